"""Figures beside Kafka, whose broker syncs before it acknowledges, as ours does.

Its client is confluent-kafka, with the fastest settings found here. The wheel is
installed from PyPI when a figure needs it, into the cache of the tests' jars.
"""

import importlib
import sys
import time
from itertools import count as counter
from pathlib import Path
from typing import Any

from bench import consuming, producing
from bench.figures import TOPIC, Turns, WithLines, batches
from bench.lines import Payloads
from bench.processes import add_wheels
from bench.spark_kafka import KafkaBroker
from metaq.client import Client
from tests.rigs.process import BrokerProcess

CONFLUENT = "confluent-kafka==2.16.1"
SYNCED = "log.flush.interval.messages=1\n"
START_TIMEOUT_S = 60.0
PRODUCER = {
    "batch.size": 900_000,
    "queue.buffering.max.messages": 2_000_000,
    "queue.buffering.max.kbytes": 1 << 20,
}
CONSUMER = {
    "queued.min.messages": 2_000_000,
    "queued.max.messages.kbytes": 1 << 20,
    "fetch.queue.backoff.ms": 10,
    "enable.auto.commit": False,
    "auto.offset.reset": "earliest",
}
MANY = 10_000
"""Maximum number of messages that the consumer takes at a time."""


def find_confluent() -> Any:
    """Return the module `confluent_kafka`.

    Raises:
        NoJarsError: the wheel is not available.
    """
    add_wheels(CONFLUENT)
    importlib.import_module("confluent_kafka.admin")
    return sys.modules["confluent_kafka"]


def produce(directory: Path, payloads: Payloads) -> Turns:
    """A million messages: their client at their broker, then our list to ours."""
    confluent = find_confluent()
    messages = payloads.repeat(producing.COUNT)
    with (
        KafkaBroker(directory / "kafka", SYNCED) as kafka,
        BrokerProcess(directory / "ours", topic=TOPIC) as broker,
        Client(brokers=[f"127.0.0.1:{broker.port}"]) as ours,
    ):
        make_topic(confluent, kafka)
        while True:
            plain = len(messages) / send_all(confluent, kafka, messages)
            yield plain, len(messages) / producing.send_list(messages, ours)


def make_topic(confluent: Any, kafka: KafkaBroker, topic: str = TOPIC) -> None:
    """Create a topic with one partition; the broker may still be starting."""
    quiet = {"bootstrap.servers": kafka.address, "log_level": 0}
    client = confluent.admin.AdminClient(quiet)
    new = confluent.admin.NewTopic(topic, 1, 1)
    client.create_topics([new], operation_timeout=START_TIMEOUT_S)[topic].result()


def send_all(confluent: Any, kafka: KafkaBroker, messages: list[bytes]) -> float:
    """Produce messages; return the seconds until all are acknowledged."""
    producer = confluent.Producer({"bootstrap.servers": kafka.address, **PRODUCER})
    producer.produce(TOPIC, messages[0])
    producer.flush(START_TIMEOUT_S)  # connected, topic known
    started = time.perf_counter()
    for message in messages:
        producer.produce(TOPIC, message)
    left = producer.flush(START_TIMEOUT_S)
    assert left == 0, left
    return time.perf_counter() - started


def drain(directory: Path, payloads: Payloads) -> Turns:
    """A backlog of a million: their client at their broker, then ours at ours."""
    confluent = find_confluent()
    total = consuming.COUNT
    with (
        KafkaBroker(directory / "kafka", SYNCED) as kafka,
        BrokerProcess(directory / "ours", topic=TOPIC) as broker,
    ):
        make_topic(confluent, kafka)
        send_all(confluent, kafka, payloads.repeat(total))
        consuming.fill(
            broker, batches(payloads, consuming.BATCH, total // consuming.BATCH)
        )
        for number in counter():
            plain = total / seconds_to_drain(confluent, kafka, f"drain-{number}", total)
            yield plain, total / consuming.iterate_sync(broker.port)


def seconds_to_drain(
    confluent: Any, kafka: KafkaBroker, group: str, total: int
) -> float:
    """Consume, reading each value; return the seconds from the first message on."""
    wanted = {"bootstrap.servers": kafka.address, "group.id": group}
    consumer = confluent.Consumer({**wanted, **CONSUMER})
    consumer.subscribe([TOPIC])
    many = consumer.consume(1, START_TIMEOUT_S)
    started, count = time.perf_counter(), 0
    while count < total:
        for message in many:
            assert message.value() is not None, message.error()
        count += len(many)
        many = consumer.consume(min(MANY, max(1, total - count)), START_TIMEOUT_S)
    seconds = time.perf_counter() - started
    consumer.close()
    return seconds


FIGURES = {
    "send-many-kafka": WithLines(
        produce,
        "send_many (floor: confluent-kafka at a Kafka broker that syncs)",
        "messages/s",
    ),
    "drain-kafka": WithLines(
        drain,
        "drain of 1,000,000 (floor: confluent-kafka at a Kafka broker)",
        "messages/s",
        "0.6",
        "1.0",
    ),
}
