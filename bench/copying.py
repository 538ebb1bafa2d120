"""Copies from topic to topic in batches: exactly once, at least once, and Kafka's.

A copy reads a batch from one topic, sends its messages unchanged to another, and stores
its offset. ZooKeeper, brokers and disks are real, our client is the sync one. Each
round copies the same number of messages with a new group.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count as counter
from pathlib import Path
from typing import Any

from bench import load
from bench.committing import cluster
from bench.figures import TOPIC, Turns, WithLines, batches
from bench.kafka import (
    CONSUMER,
    PRODUCER,
    START_TIMEOUT_S,
    SYNCED,
    find_confluent,
    make_topic,
)
from bench.lines import Payloads
from bench.spark_kafka import KafkaBroker
from metaq.client import Client, Producer

BATCH = 500
COUNT = 100 * BATCH
"""Messages that a round copies."""
COPIED = f"{TOPIC}-copied"

TRANSACTIONAL = {
    **PRODUCER,
    "linger.ms": 50,  # the end of a transaction flushes it: one request, one sync
    "retry.backoff.ms": 1,  # for a broker that is still ending the last one
    "log_level": 0,
}
"""The fastest settings found here that keep the guarantees of the defaults."""

Copy = Callable[[Producer, Any], None]
"""Copies one batch and stores its offset."""


def at_least_once(producer: Producer, batch: Any) -> None:
    """Send a batch, then commit."""
    producer.send_many(COPIED, [message.data for message in batch])
    batch.commit()


def exactly_once(producer: Producer, batch: Any) -> None:
    """Send a batch and commit atomically."""
    with producer.exactly_once(batch) as tx:
        tx.send_many(COPIED, [message.data for message in batch])


@contextmanager
def filled(directory: Path, payloads: Payloads) -> Iterator[Client]:
    """Run our cluster with the messages of a round; yield a client."""
    with (
        cluster(directory, 1, [COPIED]) as (address, broker),
        Client(address) as client,
    ):
        work = batches(payloads, BATCH, COUNT // BATCH)
        load.pipeline(broker.port, work, 8, load.ok_counter())
        yield client


def copies_per_second(client: Client, group: str, copy: Copy) -> float:
    """Copy the topic; return messages per second, without the first batch."""
    with (
        client.producer() as producer,
        client.consumer(group, [TOPIC], start="earliest", commit_interval_s=None) as c,
    ):
        begin, count = 0.0, 0
        for batch in c.batches(max_count=BATCH, max_wait_s=1.0):
            copy(producer, batch)
            begin = begin or time.perf_counter()
            count += len(batch)
            if count == COUNT:
                return (COUNT - BATCH) / (time.perf_counter() - begin)
    raise AssertionError(f"expected {COUNT} messages, got {count}")


def beside_at_least_once(directory: Path, payloads: Payloads) -> Turns:
    """The copy at least once, then exactly once."""
    with filled(directory, payloads) as client:
        for number in counter():
            plain = copies_per_second(client, f"plain-{number}", at_least_once)
            yield plain, copies_per_second(client, f"once-{number}", exactly_once)


def beside_kafka(directory: Path, payloads: Payloads) -> Turns:
    """Kafka's transactional copy, then ours.

    Raises:
        NoJarsError: Kafka's jars or client are not available.
    """
    confluent = find_confluent()
    with (
        KafkaBroker(directory / "kafka", SYNCED) as kafka,
        filled(directory / "ours", payloads) as client,
    ):
        for topic in (TOPIC, COPIED):
            make_topic(confluent, kafka, topic)
        producer = confluent.Producer({"bootstrap.servers": kafka.address, **PRODUCER})
        for line in payloads.repeat(COUNT):
            producer.produce(TOPIC, line)
        assert producer.flush(START_TIMEOUT_S) == 0
        for number in counter():
            plain = kafka_copies_per_second(confluent, kafka, f"kafka-{number}")
            yield plain, copies_per_second(client, f"ours-{number}", exactly_once)


def kafka_copies_per_second(confluent: Any, kafka: KafkaBroker, group: str) -> float:
    """Copy the topic with Kafka's transactions; as `copies_per_second`."""
    place = {"bootstrap.servers": kafka.address}
    reading = {**CONSUMER, "group.id": group, "isolation.level": "read_committed"}
    consumer = confluent.Consumer({**place, **reading})
    consumer.subscribe([TOPIC])
    producer = confluent.Producer({**place, **TRANSACTIONAL, "transactional.id": group})
    producer.init_transactions(START_TIMEOUT_S)
    begin, count = 0.0, 0
    while count < COUNT:
        batch = consumer.consume(BATCH, START_TIMEOUT_S)
        producer.begin_transaction()
        for message in batch:
            producer.produce(COPIED, message.value())
        producer.send_offsets_to_transaction(
            consumer.position(consumer.assignment()), consumer.consumer_group_metadata()
        )
        producer.commit_transaction(START_TIMEOUT_S)
        begin = begin or time.perf_counter()
        count += len(batch)
    seconds = time.perf_counter() - begin
    consumer.close()
    return (COUNT - BATCH) / seconds


FIGURES = {
    "exactly-once-copy": WithLines(
        beside_at_least_once,
        "copy in batches of 500, exactly once (floor: at least once)",
        "messages/s",
        "0.3",
        "0.6",
    ),
    "exactly-once-copy-kafka": WithLines(
        beside_kafka,
        "copy in batches of 500, exactly once (floor: Kafka's transactions)",
        "messages/s",
        "1.0",
        "2.0",
    ),
}
