"""The table of Kafka's options in docs/recipes.md, made from the client's answers."""

import re

from metaq.client.foreign_names import OURS
from tests.docs.blocks import ROOT
from tests.docs.option_tables import tables

PAGE = ROOT / "docs" / "recipes.md"
HEAD = "| Kafka | default | here | default |\n|---|---|---|---|\n"
CLIENT = {
    "bootstrap.servers": "",
    "security.protocol": "PLAINTEXT",
    "client.id": "",
    "session.timeout.ms": "45000",
    "heartbeat.interval.ms": "3000",
    "request.timeout.ms": "30000",
    "metadata.max.age.ms": "300000",
    "reconnect.backoff.ms": "50",
    "reconnect.backoff.max.ms": "1000",
}
CONSUMER = {
    "group.id": "",
    "group.instance.id": "",
    "auto.offset.reset": "latest",
    "enable.auto.commit": "true",
    "auto.commit.interval.ms": "5000",
    "enable.auto.offset.store": "true",
    "max.poll.records": "500",
    "max.poll.interval.ms": "300000",
    "consumer_timeout_ms": "never",
    "max.partition.fetch.bytes": "1048576",
    "fetch.max.bytes": "52428800",
    "fetch.max.wait.ms": "500",
    "fetch.min.bytes": "1",
    "partition.assignment.strategy": "range",
    "isolation.level": "read_uncommitted",
    "key.deserializer": "",
    "value.deserializer": "",
}
PRODUCER = {
    "acks": "all",
    "enable.idempotence": "true",
    "transactional.id": "",
    "linger.ms": "0; 5 since 4.0",
    "batch.size": "16384",
    "buffer.memory": "33554432",
    "queue.buffering.max.messages": "100000",
    "max.request.size": "1048576",
    "max.in.flight.requests.per.connection": "5",
    "max.block.ms": "60000",
    "delivery.timeout.ms": "120000",
    "message.timeout.ms": "300000",
    "retries": "2147483647",
    "retry.backoff.ms": "100",
    "retry.backoff.max.ms": "1000",
    "compression.type": "none",
    "partitioner": "murmur2 of the key",
    "key.serializer": "",
    "value.serializer": "",
    "on_delivery": "",
    "callback": "",
    "value": "",
    "timestamp_ms": "now",
}
DEFAULTS = {
    "ClientOptions": CLIENT, "ConsumerOptions": CONSUMER, "ProducerOptions": PRODUCER
}  # fmt: skip
"""Our options → Kafka's names → their defaults, of the Java client or of librdkafka."""
OTHERS = {"servers", "hosts", "durable", "subject", "stream", "deliver_policy",
          "prefetch_count", "visibility_timeout", "ack_wait", "max_deliver",
          "dead_letter_exchange", "msg", "payload", "body", "tags",
          "max_records", "num_messages",
          "delay", "deliver_at", "expires_in"}  # fmt: skip
"""Names of NATS's clients, Redis's, RabbitMQ's and RocketMQ's; two arguments of a
poll of Kafka's; the last three are our own, where they do not belong."""


def table() -> str:
    """Return the rows: their name and default, the answer, and the default here."""
    rows = []
    for kind, names in DEFAULTS.items():
        ours = dict(re.findall(r"\| `(\w+)` \| (`.*?`) \|", tables()[kind]))
        for name, default in names.items():
            answer = OURS[name.replace(".", "_")]
            first = re.match(r"'(\w+)'", answer)
            here = ours.get(first[1], "") if first else ""
            text = re.sub(r"'([^']+)'", r"`\1`", answer)
            row = f"| `{name}` | {default} | {text} | {here} |"
            rows.append(row.replace("|  |", "| |"))
    return HEAD + "\n".join(rows) + "\n"


def write() -> None:
    """Write the table at the end of the page: `python -m tests.docs.kafka_names`."""
    before, head, _ = PAGE.read_text().partition(HEAD)
    assert head
    PAGE.write_text(before + table())


if __name__ == "__main__":
    write()
