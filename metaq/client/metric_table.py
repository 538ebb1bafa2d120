"""The table of a client's metrics: what each is called, means, and is read from.

The same table is in `docs/client.md`; `metrics.py` exports it.
"""

from collections.abc import Iterator
from typing import Final

from metaq.client.client_statistics import ClientStatistics
from metaq.client.consume.progress import ConsumerState
from metaq.client.metric_specs import (
    BY_GROUP,
    BY_PARTITION,
    HistogramSpec,
    MetricSpec,
    of_buffer,
    of_client,
    of_connection,
    of_counters,
    of_duplicates,
    of_fetch,
    of_group,
    of_handling,
    of_lag,
    of_ordered,
    of_producer,
)
from metaq.prometheus import Sample
from metaq.zk.paths import partition_name
from metaq.zk.session import SessionState

# -- what one metric alone reads ------------------------------------------------------


def _read_session(client: ClientStatistics) -> float | None:
    session = client.session
    return None if session is None else session.state is SessionState.CONNECTED


def _read_acknowledged(client: ClientStatistics) -> Iterator[Sample]:
    for producer in client.all_producers:
        for partition, count in producer.by_partition.items():
            yield (partition.topic, partition_name(partition)), count


def _read_failed(client: ClientStatistics) -> Iterator[Sample]:
    for producer in client.all_producers:
        for error, count in producer.failed.items():
            yield (error,), count


def _read_dropped(client: ClientStatistics) -> Iterator[Sample]:
    for producer in client.all_producers:
        for error, count in producer.dropped.items():
            yield (error,), count


def _read_spooled(client: ClientStatistics) -> Iterator[Sample]:
    for producer in client.all_ordered_producers:
        for partition, count in producer.waiting.items():
            yield (partition.topic, partition_name(partition)), count


def _read_states(client: ClientStatistics) -> Iterator[Sample]:
    for consumer in client.consumers:
        for state in ConsumerState:
            if state is not ConsumerState.CLOSED:
                is_in_it = consumer.health.state is state
                yield (consumer.group, state.value), is_in_it


def _read_parked(client: ClientStatistics) -> Iterator[Sample]:
    for consumer in client.consumers:
        if consumer.counters.handling is not None:
            yield (consumer.group,), consumer.counters.handling.waiting_count


# -- the table ------------------------------------------------------------------------

METRICS: Final[tuple[MetricSpec | HistogramSpec, ...]] = (
    # Connections.
    of_connection(
        "metaq_client_connections",
        "Connections that are open.",
        lambda _: 1,
    ),
    of_client(
        "metaq_client_connect_attempts_total",
        "Attempts to connect to brokers.",
        lambda c: c.pool.attempt_count,
    ),
    of_client(
        "metaq_client_connect_failures_total",
        "Attempts to connect that failed.",
        lambda c: c.pool.failure_count,
    ),
    of_client(
        "metaq_client_connections_lost_total",
        "Connections that ended without being closed here.",
        lambda c: c.pool.lost_count,
    ),
    of_connection(
        "metaq_client_in_flight_requests",
        "Requests sent and not answered.",
        lambda c: c.in_flight_count,
    ),
    of_connection(
        "metaq_client_in_flight_bytes",
        "Bytes of requests sent and not answered.",
        lambda c: c.in_flight_bytes,
    ),
    of_connection(
        "metaq_client_queued_bytes",
        "Bytes of requests that have not left yet.",
        lambda c: c.queued_bytes,
    ),
    of_connection(
        "metaq_client_sent_bytes_total",
        "Bytes sent over the present connection.",
        lambda c: c.sent_bytes,
    ),
    of_connection(
        "metaq_client_received_bytes_total",
        "Bytes received over the present connection.",
        lambda c: c.received_bytes,
    ),
    of_connection(
        "metaq_client_requests_total",
        "Requests over the present connection, heartbeats included.",
        lambda c: c.request_count,
    ),
    of_connection(
        "metaq_client_request_timeouts_total",
        "Requests over the present connection that ran into their deadline.",
        lambda c: c.timeout_count,
    ),
    of_connection(
        "metaq_client_unknown_replies_total",
        "Replies to nothing in flight, late ones mostly.",
        lambda c: c.unknown_reply_count,
    ),
    of_connection(
        "metaq_client_heartbeats_total",
        "Times the broker was asked whether it is there.",
        lambda c: c.heartbeat_count,
    ),
    # ZooKeeper.
    of_client(
        "metaq_client_zookeeper_connected",
        "ZooKeeper sessions that are connected, one for each client.",
        _read_session,
    ),
    of_client(
        "metaq_client_zookeeper_sessions_total",
        "ZooKeeper sessions so far; each new one follows an expiry.",
        lambda c: None if c.session is None else c.session.session_version,
    ),
    # Producers.
    of_client(
        "metaq_producers",
        "Producers that are open, with those of dead letters and of ordered producers.",
        lambda c: len(c.producers),
    ),
    of_producer(
        "metaq_producer_appended_messages_total",
        "Messages taken from senders.",
        lambda p: p.appended_count,
    ),
    MetricSpec(
        "metaq_producer_acknowledged_messages_total",
        "Messages that are stored, where they lie.",
        BY_PARTITION,
        _read_acknowledged,
    ),
    of_producer(
        "metaq_producer_acknowledged_bytes_total",
        "Payload bytes of the messages that are stored, attributes included.",
        lambda p: p.acknowledged_bytes,
    ),
    of_producer(
        "metaq_producer_doubtful_messages_total",
        "Messages that are stored, and may be stored twice.",
        lambda p: p.doubtful_count,
    ),
    MetricSpec(
        "metaq_producer_failed_messages_total",
        "Messages that failed, by the name of the error.",
        ("error",),
        _read_failed,
    ),
    MetricSpec(
        "metaq_producer_dropped_messages_total",
        "One-way messages that were never appended, by the name of the error.",
        ("error",),
        _read_dropped,
    ),
    of_producer(
        "metaq_producer_buffered_messages",
        "Messages without an outcome.",
        lambda p: p.buffered_count,
    ),
    of_producer(
        "metaq_producer_buffered_bytes",
        "Bytes of messages without an outcome, record headers included.",
        lambda p: p.buffered_bytes,
    ),
    of_producer(
        "metaq_producer_full_total",
        "Times that a message or a list found no room.",
        lambda p: p.full_count,
    ),
    of_producer(
        "metaq_producer_in_flight_commands",
        "Commands sent and not answered.",
        lambda p: p.in_flight_count,
    ),
    of_producer(
        "metaq_producer_retried_commands_total",
        "Commands sent again.",
        lambda p: p.retried_count,
    ),
    of_producer(
        "metaq_producer_moved_batches_total",
        "Batches, or parts of them, that went to another partition.",
        lambda p: p.moved_count,
    ),
    HistogramSpec(
        "metaq_producer_batch_messages",
        "Messages per command.",
        lambda c: (producer.batch_counts for producer in c.all_producers),
    ),
    HistogramSpec(
        "metaq_producer_latency_seconds",
        "Time from the first message of a batch to the answer, per message.",
        lambda c: (producer.latency_s for producer in c.all_producers),
    ),
    # Ordered producers.
    of_ordered(
        "metaq_ordered_producer_sent_messages_total",
        "Messages of ordered producers that went to the broker directly.",
        lambda p: p.sent_count,
    ),
    of_ordered(
        "metaq_ordered_producer_spooled_messages_total",
        "Messages of ordered producers that were spooled.",
        lambda p: p.spooled_count,
    ),
    of_ordered(
        "metaq_ordered_producer_replayed_messages_total",
        "Spooled messages that the broker has.",
        lambda p: p.replayed_count,
    ),
    of_ordered(
        "metaq_ordered_producer_refused_messages_total",
        "Spooled messages that the broker does not take, and that were set aside.",
        lambda p: p.refused_count,
    ),
    MetricSpec(
        "metaq_ordered_producer_waiting_messages",
        "Messages that are spooled now.",
        BY_PARTITION,
        _read_spooled,
    ),
    # Consumers.
    MetricSpec(
        "metaq_consumers",
        "Consumers that are open, by what they are doing.",
        ("group", "state"),
        _read_states,
    ),
    of_group(
        "metaq_consumer_healthy",
        "1 while `health()` of every consumer of the group is good, 0 otherwise.",
        lambda c: c.health.is_ok,
        min,
    ),
    of_group(
        "metaq_consumer_problems",
        "Sentences that `health()` has to say.",
        lambda c: len(c.health.problems),
    ),
    of_group(
        "metaq_consumer_partitions",
        "Partitions that are read.",
        lambda c: c.health.partition_count,
    ),
    of_group(
        "metaq_consumer_idle_seconds",
        "Time since something was fetched, handed out or handled; the longest.",
        lambda c: c.health.idle_s,
        max,
    ),
    of_group(
        "metaq_consumer_uncommitted_partitions",
        "Partitions whose handled offset is ahead of the committed one.",
        lambda c: c.health.uncommitted_count,
    ),
    of_counters(
        "metaq_consumer_delivered_messages_total",
        "Messages fetched and let through by the filter.",
        lambda c: c.delivered_count,
    ),
    of_counters(
        "metaq_consumer_filtered_messages_total",
        "Messages that the filter held back.",
        lambda c: c.filtered_count,
    ),
    of_counters(
        "metaq_consumer_repeated_messages_total",
        "Messages not delivered because this process had handled them.",
        lambda c: c.repeat_count,
    ),
    of_duplicates(
        "metaq_consumer_duplicate_messages_total",
        "Messages not delivered because their ids were in `duplicate_ids`.",
        lambda d: d.skipped_count,
    ),
    of_duplicates(
        "metaq_consumer_duplicate_ids_failures_total",
        "Calls of `duplicate_ids` that raised or took too long.",
        lambda d: d.failure_count,
    ),
    of_duplicates(
        "metaq_consumer_duplicate_ids_forgotten_total",
        "Ids that were not added to `duplicate_ids`.",
        lambda d: d.forgotten_count,
    ),
    of_counters(
        "metaq_consumer_resets_total",
        "Committed offsets given up because they lay outside the log.",
        lambda c: c.reset_count,
    ),
    of_counters(
        "metaq_consumer_missing_bytes_total",
        "Bytes of the log passed over: deleted before they were read, or damaged.",
        lambda c: c.missing_bytes,
    ),
    of_counters(
        "metaq_consumer_commits_total",
        "Commits that wrote something.",
        lambda c: c.commit_count,
    ),
    of_counters(
        "metaq_consumer_commit_failures_total",
        "Partitions whose commit failed, counted each time.",
        lambda c: c.commit_failure_count,
    ),
    # Partitions that are read.
    of_buffer(
        "metaq_consumer_handled_bytes",
        "Offset behind the last handled message; `metaq_log_end_bytes` is the end.",
        lambda buffer: buffer.handled.offset,
    ),
    of_buffer(
        "metaq_consumer_buffered_messages",
        "Messages fetched and not handed out.",
        lambda buffer: buffer.buffered_count,
    ),
    of_lag(
        "metaq_consumer_lag_messages",
        "Messages that were not handled when `lag()` was asked last.",
        lambda lag: lag.messages,
    ),
    of_lag(
        "metaq_consumer_lag_bytes",
        "Bytes of the log that were not handled when `lag()` was asked last.",
        lambda lag: lag.bytes,
    ),
    of_lag(
        "metaq_consumer_lag_seconds",
        "Age of the oldest message not handled when `lag()` was asked last.",
        lambda lag: lag.seconds,
    ),
    of_fetch(
        "metaq_consumer_gets_total",
        "Gets sent.",
        lambda f: f.get_count,
    ),
    of_fetch(
        "metaq_consumer_empty_gets_total",
        "Gets answered without data.",
        lambda f: f.empty_count,
    ),
    of_fetch(
        "metaq_consumer_get_failures_total",
        "Gets refused, lost with their connection, or not answered in time.",
        lambda f: f.error_count,
    ),
    of_fetch(
        "metaq_consumer_skipped_ranges_total",
        "Damaged places that were skipped.",
        lambda f: f.skipped_count,
    ),
    of_fetch(
        "metaq_consumer_received_bytes_total",
        "Bytes of the log received.",
        lambda f: f.received_bytes,
    ),
    # Handlers.
    of_handling(
        "metaq_consumer_handled_messages_total",
        "Messages that `run` is done with: handled, or given up and taken.",
        lambda h: h.handled_count,
    ),
    of_handling(
        "metaq_consumer_handler_failures_total",
        "How often a handler failed, parked messages included.",
        lambda h: h.failure_count,
    ),
    of_handling(
        "metaq_consumer_dead_letters_total",
        "Messages that became dead letters.",
        lambda h: h.dead_letter_count,
    ),
    of_handling(
        "metaq_consumer_dropped_messages_total",
        "Messages that were given up for good.",
        lambda h: h.dropped_count,
    ),
    of_handling(
        "metaq_consumer_parked_messages_total",
        "Messages that were parked.",
        lambda h: h.parked_count,
    ),
    of_handling(
        "metaq_consumer_replayed_messages_total",
        "Parked messages that were handled later.",
        lambda h: h.replayed_count,
    ),
    MetricSpec(
        "metaq_consumer_parked_messages",
        "Messages that are parked now.",
        BY_GROUP,
        _read_parked,
    ),
)
"""Every metric of a client, in the order of a scrape."""
