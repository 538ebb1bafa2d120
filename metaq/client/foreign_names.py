"""Arguments of other systems' clients, with our names, for error texts. Pure.

If a user passes an argument known from Kafka, RabbitMQ, NATS or Redis, the error gives
its name here, or says that it is not needed.
"""

from types import MappingProxyType
from typing import Final

_BROKERS: Final = "'zookeeper', its address, or 'brokers', a list of host:port"
_TIMES: Final = (
    "an argument of 'send' of a producer, or of its transactions: what may wait on this"
    " disk, or for the end of a block, has no time"
)
_SEND_TIME: Final = "'timeout_s', the time of a send with all its retries, in seconds"

_NAMES: Final = (
    # to connect
    ("bootstrap_servers servers hosts", _BROKERS),
    ("client_id", "'consumer_id' of a consumer"),
    ("session_timeout_ms", "'session_timeout_s' of the client, in seconds"),
    ("heartbeat_interval_ms", "'heartbeat_s' of the client, in seconds"),
    ("request_timeout_ms", "'request_timeout_s' of the client, in seconds"),
    ("metadata_max_age_ms", "'metadata_s' of the client, in seconds"),
    ("reconnect_backoff_ms", "'reconnect_first_s' of the client, in seconds"),
    ("reconnect_backoff_max_ms", "'reconnect_max_s' of the client, in seconds"),
    ("security_protocol", "not there: brokers know no login"),
    # to consume
    ("group_id durable", "'group'"),
    ("group_instance_id", "'consumer_id'"),
    ("subject stream", "'topic'"),
    ("auto_offset_reset deliver_policy", "'start'"),
    ("enable_auto_commit", "'commit_interval_s'; None: only commit() commits"),
    ("auto_commit_interval_ms", "'commit_interval_s', in seconds"),
    (
        "enable_auto_offset_store",
        "not needed: a message is handled when the next is asked for",
    ),
    (
        "max_poll_records max_records num_messages",
        "'max_count' of batches, 'count_max' of receive_many",
    ),
    ("max_poll_interval_ms", "'revoke_timeout_s', in seconds"),
    ("consumer_timeout_ms", "'timeout' of receive, in seconds"),
    ("queue_buffering_max_messages", "'buffer_count_max'"),
    ("prefetch_count", "'prefetch' of a queue, 'buffer_count_max' of a consumer"),
    ("visibility_timeout ack_wait", "'lease_s' of a queue, in seconds"),
    ("max_deliver", "'deliveries_max' of a queue"),
    ("dead_letter_exchange", "'dead_letter_topic' of a queue"),
    ("max_partition_fetch_bytes", "'fetch_bytes'"),
    ("fetch_max_bytes", "'fetch_bytes_max'"),
    ("fetch_max_wait_ms", "'wait_s', in seconds"),
    ("fetch_min_bytes", "not needed: what is there is given at once"),
    ("partition_assignment_strategy", "'strategy'"),
    ("value_deserializer", "not needed: 'message.data' is bytes, decode those"),
    ("key_deserializer", "not needed: 'message.key' is bytes, decode those"),
    ("isolation_level", "not needed: what is not committed is never read"),
    # to produce
    ("value msg payload body", "'data'"),
    ("callback on_delivery", "'add_done_callback' of the future of send_nowait"),
    ("tags", "'tag', one text"),
    ("timestamp_ms", "not there: the broker stamps messages"),
    ("delay deliver_at expires_in", _TIMES),
    ("acks", "not needed: a message is acknowledged when it is on disk"),
    ("enable_idempotence", "not needed: a repeated batch is stored once"),
    ("transactional_id", "'qualifier' of client.xa"),
    ("linger_ms", "'linger_s', in seconds"),
    ("batch_size max_request_size", "'batch_bytes_max'"),
    ("buffer_memory", "'buffer_bytes_max'"),
    ("max_in_flight_requests_per_connection", "'in_flight_batches_max'"),
    ("max_block_ms delivery_timeout_ms message_timeout_ms", _SEND_TIME),
    ("retries", f"{_SEND_TIME}; for a handler, 'attempts_max' of RetryPolicy"),
    ("retry_backoff_ms", "'retry_first_s', or 'first_s' of RetryPolicy, in seconds"),
    ("retry_backoff_max_ms", "'retry_max_s', or 'max_s' of RetryPolicy, in seconds"),
    ("compression_type", "not there: compress the data"),
    ("partitioner", "'selector'"),
    ("value_serializer", "not needed: 'data' is bytes, encode it"),
    ("key_serializer", "not needed: 'key' is text or bytes"),
)
"""Foreign names, with `_` for dots, and the text with ours."""

OURS: Final = MappingProxyType(
    {theirs: ours for names, ours in _NAMES for theirs in names.split()}
)
"""Foreign name → the text with ours."""
