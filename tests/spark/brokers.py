"""Real brokers for Spark tests, and messages in them."""

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from pyspark.sql import DataFrame, SparkSession

from metaq.client import Client, OutgoingMessage
from metaq.client.session import AsyncClient
from metaq.model import BrokerId, Message, TopicPartition
from metaq.spark import cluster as cluster_module
from metaq.spark.clusters import CLUSTERS
from metaq.testing.embedded import EmbeddedBroker

TOPIC = "logs"


@contextmanager
def own_clusters(make: Callable[..., AsyncClient] = AsyncClient) -> Iterator[None]:
    """Ask no cluster of another test inside the block, by clients that `make` makes."""
    with (
        mock.patch.dict(CLUSTERS, clear=True),
        mock.patch.object(cluster_module, "AsyncClient", make),
    ):
        yield
        forget_clusters()


def forget_clusters() -> None:
    """Close all clusters, as the end of a driver does."""
    while CLUSTERS:
        CLUSTERS.popitem()[1].close()


def numbered(count: int, first: int = 0) -> list[bytes]:
    """Return so many messages that sort by their number."""
    return [b"message %07d" % number for number in range(first, first + count)]


def tp(number: int, *, broker: int = 0, topic: str = TOPIC) -> TopicPartition:
    return TopicPartition(topic, BrokerId(broker), number)


def publish(
    broker: EmbeddedBroker,
    payloads: Sequence[bytes],
    *,
    partition: TopicPartition | None = None,
) -> None:
    """Store messages in one partition, in order."""
    to = partition or tp(0)
    name = to.name
    messages = [OutgoingMessage(data, partition=name) for data in payloads]
    with Client(brokers=[broker.address]) as client, client.producer() as producer:
        producer.send_many(to.topic, messages)


def options_of(*brokers: EmbeddedBroker, **more: Any) -> dict[str, Any]:
    """Return the options that lead to brokers, with short time-outs."""
    return {
        "brokers": ",".join(broker.address for broker in brokers),
        "requestTimeoutMs": 20_000,
        "retryTimeoutMs": 20_000,
        **more,
    }


def wire(*brokers: EmbeddedBroker, **more: Any) -> dict[str, str]:
    """Return the same as text, for functions that take options."""
    return {name: str(value) for name, value in options_of(*brokers, **more).items()}


def read(spark: SparkSession, *brokers: EmbeddedBroker, **more: Any) -> DataFrame:
    """Return what a batch read gives; topic `logs` unless something else is said."""
    if not more.keys() & {"subscribe", "subscribePattern", "assign"}:
        more["subscribe"] = TOPIC
    return spark.read.format("metaq").options(**options_of(*brokers, **more)).load()


def values(frame: DataFrame) -> list[bytes]:
    """Return all values, sorted."""
    return sorted(bytes(row.value) for row in frame.select("value").collect())


def stored(broker: EmbeddedBroker, topic: str = TOPIC) -> dict[str, list[Message]]:
    """Return all that a broker has of a topic: partition → messages in log order."""
    with Client(brokers=[broker.address]) as client:
        partitions = client.partitions(topic)
        found: dict[str, list[Message]] = {p.name: [] for p in partitions}
        for message in client.browse(topic) if partitions else ():
            found[message.partition.name].append(message)
    return found


def data_of(messages: dict[str, list[Message]]) -> list[bytes]:
    """Return the data of all messages, sorted."""
    return sorted(m.data for some in messages.values() for m in some)


@contextmanager
def watched(broker: EmbeddedBroker, topic: str) -> Iterator[list[bytes]]:
    """Read a partition all the time, from a thread; give what each look has found."""
    host, _, port = broker.address.partition(":")
    question = b"get %b g 0 0 1000000 1\r\n" % topic.encode()
    found, is_over = [b""], threading.Event()

    def look() -> None:
        with socket.create_connection((host, int(port)), timeout=60) as peer:
            stream = peer.makefile("rb")
            while not is_over.is_set():
                peer.sendall(question)
                words = stream.readline().split()
                size = int(words[1] if words[0] == b"value" else words[2])
                data = stream.read(size)
                if words[0] == b"value" and data != found[-1]:
                    found.append(data)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        is_over.set()
        thread.join()
