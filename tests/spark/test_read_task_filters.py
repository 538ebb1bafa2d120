"""A task with `where`: rows, losses and damage as without, less what does not match."""

from collections.abc import Iterator
from typing import Any

import pytest

from metaq.client import Client, OutgoingMessage
from metaq.model import Message, Offset
from metaq.spark.errors import DamagedRecordError, DataLossError, OptionError
from metaq.spark.plan import ReadRange
from metaq.spark.source.read_task import ReadTask, read_rows
from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from tests.rigs.flipping import FlippingProxy
from tests.spark.brokers import TOPIC, stored, tp
from tests.spark.segment_dirs import flip
from tests.spark.test_read_task import lose_segments, options, segments

pytestmark = [pytest.mark.spark, pytest.mark.slow]

COUNT = 1000
WHERE = "tag = 'paid' AND n >= 100"


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    """Return a broker with segments, and a large message that does not match."""
    settings = {"maxSegmentSize": "8000"}
    with embedded_broker(topics={TOPIC: 1}, settings=settings) as found:
        with Client(brokers=[found.address]) as client, client.producer() as producer:
            for first in range(0, COUNT, 100):
                producer.send_many(TOPIC, map(make, range(first, first + 100)))
        yield found


def make(number: int) -> OutgoingMessage:
    headers = {"n": b"%d" % number}
    tag = "paid" if number % 10 == 0 else None
    data = b"x" * 100_000 if number == 501 else b"message %d" % number
    return OutgoingMessage(data, headers=headers, tag=tag)


def matching(numbers: range) -> list[bytes]:
    return [
        b"message %d" % number
        for number in numbers
        if number % 10 == 0 and number >= 100
    ]


def read(
    broker: EmbeddedBroker, log: list[Message], address: str | None = None, **more: Any
) -> list[bytes]:
    """Read from the first message of a list to the last."""
    wanted = ReadRange(tp(0), log[0].offset, log[-1].next_offset)
    task = ReadTask(wanted, address or broker.address)
    batches = list(read_rows(task, options(broker, where=WHERE, **more)))
    return [value for batch in batches for value in batch.column("value").to_pylist()]


def log_of(broker: EmbeddedBroker) -> list[Message]:
    (log,) = stored(broker).values()
    return log


def test_a_range_has_the_rows_that_match(broker: EmbeddedBroker) -> None:
    """Over all segments, in order; nothing before it and nothing after it."""
    log = log_of(broker)
    assert len(segments(broker)) > 5
    assert read(broker, log) == matching(range(COUNT))
    assert read(broker, log[155:301]) == matching(range(155, 301))
    assert read(broker, log[501:502]) == []


def test_what_is_lost_is_lost_with_a_filter_too(broker: EmbeddedBroker) -> None:
    """It may have matched."""
    log = log_of(broker)
    lose_segments(broker, 3)
    start = segments(broker)[0].stem
    with pytest.raises(DataLossError, match=rf"lost \[0, {int(start)}\)"):
        read(broker, log)
    found = read(broker, log, failOnDataLoss="false")
    left = sum(one.offset < int(start) for one in log)
    assert found == matching(range(left, COUNT))


def test_damage_is_found_where_nothing_matches(broker: EmbeddedBroker) -> None:
    """And left out, where that is wanted."""
    log = log_of(broker)
    base = int(segments(broker)[2].stem)
    at = next(n for n, one in enumerate(log) if one.offset >= base and n % 10 == 5)
    flip(segments(broker)[2], log[at].next_offset - base - 1)
    with pytest.raises(DamagedRecordError) as caught:
        read(broker, log)
    assert caught.value.offset == log[at].offset
    assert read(broker, log, onCorrupt="skip") == matching(range(COUNT))


def test_a_match_that_is_flipped_on_the_way_is_read_again(
    broker: EmbeddedBroker,
) -> None:
    log = log_of(broker)
    with FlippingProxy(broker.port, b"message 700", left=1) as proxy:
        assert read(broker, log, address=str(proxy.address)) == matching(range(COUNT))


def test_a_filter_that_is_none_is_an_option_error(broker: EmbeddedBroker) -> None:
    """It says where; an archive takes no filter at all."""
    with pytest.raises(OptionError, match="where: filter, column 5: expected"):
        options(broker, where="tag 'paid'")
    with pytest.raises(OptionError, match="an archive has all messages"):
        options(broker, where=WHERE).require_raw_values()


def test_rows_end_with_the_range(broker: EmbeddedBroker) -> None:
    """Also where the broker sends more."""
    log = log_of(broker)
    wanted = ReadRange(tp(0), Offset(0), log[311].offset)
    task = ReadTask(wanted, broker.address)
    rows = [
        offset
        for batch in read_rows(task, options(broker, where="tag = 'paid'"))
        for offset in batch.column("offset").to_pylist()
    ]
    assert rows == [log[number].offset for number in range(0, 311, 10)]
