"""Requests of a driver to brokers: unknown partitions are named."""

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from metaq.errors import CoordinationError, NoBrokerError
from metaq.model import Offset
from metaq.spark.cluster import Cluster
from metaq.spark.errors import SparkError
from metaq.spark.options import SourceOptions
from metaq.spark.source.batch import BatchReader
from metaq.spark.source.stream import StreamProgress
from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from tests.spark.brokers import (
    TOPIC,
    numbered,
    options_of,
    own_clusters,
    publish,
    tp,
    wire,
)

pytestmark = [pytest.mark.spark, pytest.mark.slow]

P0 = tp(0)


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    with embedded_broker(topics={TOPIC: 2}) as found, own_clusters():
        yield found


def source_options(broker: EmbeddedBroker, **more: Any) -> SourceOptions:
    given = options_of(broker, **more)
    texts = {name: str(value) for name, value in given.items() if value is not None}
    return SourceOptions.from_map(texts, is_stream=True)


EARLIEST = {"startingOffsets": "earliest"}
QUICKLY = {"retryTimeoutMs": 200, "requestTimeoutMs": 200}
"""Limits for waits in vain."""


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("0-2", "no broker has logs/0-2; of topic 'logs' there are: 0-0, 0-1"),
        ("7-0", "no broker has logs/7-0; of topic 'logs' there are: 0-0, 0-1"),
    ],
)
def test_a_partition_that_nobody_has_is_named(
    broker: EmbeddedBroker, name: str, sentence: str
) -> None:
    """Of assign and of offsets, of batches and of streams, new ones and old ones."""
    picked = {"assign": json.dumps({TOPIC: ["0-0", name]})}
    offset = {"subscribe": TOPIC, "startingOffsets": json.dumps({TOPIC: {name: 0}})}
    for more in (picked, offset):
        with pytest.raises(NoBrokerError, match=re.escape(sentence)):
            StreamProgress(source_options(broker, **QUICKLY, **more)).start()
        reader = BatchReader(source_options(broker, **QUICKLY, **more), pa.binary())
        with pytest.raises(NoBrokerError, match=re.escape(sentence)):
            reader.partitions()
    goes_on = StreamProgress(source_options(broker, **QUICKLY, **picked))
    with pytest.raises(NoBrokerError, match=re.escape(sentence)):
        goes_on.advance({P0: Offset(0)})


@pytest.mark.parametrize("edge", ["start", "end"])
def test_an_offset_inside_a_record_is_called_that(
    broker: EmbeddedBroker, edge: str
) -> None:
    """Of batches and of streams, before any task runs; `skip` reads on after it."""
    publish(broker, numbered(3), partition=P0)
    name = f"{edge}ingOffsets"
    given = {"subscribe": TOPIC, name: json.dumps({TOPIC: {"0-0": 40, "0-1": 0}})}
    sentence = (
        "logs/0-0: no record begins at offset 40, which is inside a record, or at"
        " damage; the next one is at 70. Offsets are byte positions"
    )

    def plan(**more: Any) -> Any:
        options = SourceOptions.from_map(wire(broker, **given, **more), is_stream=False)
        return BatchReader(options, pa.binary()).partitions()

    with pytest.raises(SparkError, match=re.escape(sentence)):
        plan()
    assert plan(onCorrupt="skip")
    if edge == "start":
        with pytest.raises(SparkError, match=re.escape(sentence)):
            StreamProgress(source_options(broker, **given)).start()
    given[name] = json.dumps({TOPIC: {"0-0": 35, "0-1": 0}})
    assert plan()


@pytest.mark.timeout(120)
def test_zookeeper_is_waited_for_as_long_as_was_asked() -> None:
    """However long an answer of a broker may take."""
    options = SourceOptions.from_map(
        {
            "zookeeper": "127.0.0.1:1",
            "subscribe": TOPIC,
            "retryTimeoutMs": "200",
            "requestTimeoutMs": "3600000",
        },
        is_stream=False,
    )
    cluster = Cluster(options.wire)
    try:
        with pytest.raises(CoordinationError, match=r"127\.0\.0\.1:1"):
            cluster.partitions(options)
    finally:
        cluster.close()


@pytest.mark.timeout(120)
def test_a_broker_is_waited_for_as_long_as_was_asked(broker: EmbeddedBroker) -> None:
    """The same for one that has left, at the start of a read and in planning."""
    hour = {"retryTimeoutMs": 1500, "requestTimeoutMs": 3_600_000}
    options = source_options(broker, assign=json.dumps({TOPIC: ["0-0"]}), **hour)
    assert options.wire.request_timeout_s == options.wire.retry_timeout_s == 1.5
    progress = StreamProgress(options)
    progress.start()
    broker.stop()
    for question in (progress.start, progress.freeze):
        with pytest.raises(NoBrokerError):
            question()


def test_an_assigned_partition_whose_broker_comes_later_is_waited_for(
    broker: EmbeddedBroker,
) -> None:
    publish(broker, numbered(1), partition=P0)
    broker.stop()
    coming = threading.Timer(0.2, broker.start)
    coming.start()
    try:
        picked = {"assign": json.dumps({TOPIC: ["0-0"]}), **EARLIEST}
        assert StreamProgress(source_options(broker, **picked)).start() == {
            P0: Offset(0)
        }
    finally:
        coming.join()
