"""Dead letters of bad values, task by task, with a real broker and without Spark."""

from collections.abc import Iterator
from itertools import pairwise

import pyarrow as pa
import pytest

from metaq.model import Offset
from metaq.spark.options import SourceOptions
from metaq.spark.plan import ReadRange
from metaq.spark.source.read_task import ReadTask, TaskReader
from metaq.spark.versions import tasks_of
from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from tests.spark.brokers import TOPIC, data_of, publish, stored, tp, wire

pytestmark = [pytest.mark.spark, pytest.mark.slow]

BAD = (b"\xff one", b"\xff two", b"\xff three")


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    with embedded_broker(topics={TOPIC: 1, "dead": 1}) as found:
        yield found


def read(broker: EmbeddedBroker, start: int, end: int) -> None:
    """Run one task of a query of its own."""
    options = SourceOptions.from_map(
        wire(
            broker,
            subscribe=TOPIC,
            valueFormat="string",
            badRows="topic",
            deadLetterTopic="dead",
        ),
        is_stream=False,
    )
    span = ReadRange(tp(0), Offset(start), Offset(end))
    (task,) = tasks_of([(ReadTask(span, broker.address),)])
    reader = TaskReader(options, pa.string())
    assert sum(b.num_rows for b in reader.read(task)) == 0


def test_a_bad_value_is_put_once_by_whichever_query(broker: EmbeddedBroker) -> None:
    """Tasks of two queries have the same number; what they read distinguishes them."""
    publish(broker, BAD)
    ends = [0]
    for value in BAD:
        ends.append(ends[-1] + 20 + len(value))
    for start, end in pairwise(ends):
        for _run in range(2):
            read(broker, start, end)
    assert data_of(stored(broker, "dead")) == sorted(BAD)
