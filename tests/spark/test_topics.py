"""Topics without a DataFrame, by a real broker and without Spark."""

from collections.abc import Iterator

import pytest

from metaq.errors import NoBrokerError
from metaq.model import Offset
from metaq.spark.options import SinkOptions, SourceOptions
from metaq.spark.topics import (
    find_partitions,
    log_starts,
    plan_stream,
    put_targets,
    read_rows,
)
from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from tests.spark.brokers import TOPIC, numbered, own_clusters, publish, tp, wire

pytestmark = pytest.mark.slow


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    with own_clusters(), embedded_broker(topics={TOPIC: 2}) as found:
        yield found


def options(broker: EmbeddedBroker) -> SourceOptions:
    given = wire(broker, subscribe=TOPIC, startingOffsets="earliest")
    return SourceOptions.from_map(given, is_stream=True)


def test_partitions_are_found_with_where_they_begin(broker: EmbeddedBroker) -> None:
    publish(broker, numbered(3))
    wanted = options(broker)
    found = find_partitions(wanted)
    assert (found.served, found.away) == ((tp(0), tp(1)), ())
    assert log_starts(wanted, found.served) == {tp(0): Offset(0), tp(1): Offset(0)}


def test_a_planned_stream_is_read_task_by_task(broker: EmbeddedBroker) -> None:
    publish(broker, numbered(5))
    wanted = options(broker)
    stream = plan_stream(wanted)
    start = stream.start()
    tasks = stream.tasks(start, stream.advance(start))
    rows = [row for task in tasks for row in read_rows(task, wanted)]
    values = [value.as_py() for batch in rows for value in batch.column("value")]
    assert values == numbered(5)


def test_targets_are_those_that_take_puts(broker: EmbeddedBroker) -> None:
    sink = SinkOptions.from_map(wire(broker))
    assert list(put_targets(sink, [TOPIC])[TOPIC]) == [tp(0), tp(1)]
    with pytest.raises(NoBrokerError, match="nobody"):
        put_targets(sink, ["nobody"])
