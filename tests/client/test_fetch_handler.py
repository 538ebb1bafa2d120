"""Fetched messages reach the buffer without repeats and filtered ones."""

from typing import Any

import pytest

from metaq.client.consume.fetch_buffer import FetchBuffer
from metaq.client.consume.fetch_handler import FetchHandler, Marks
from metaq.client.offsets.offset_reset import NOTHING_HANDLED
from metaq.client.options import ConsumerOptions
from metaq.errors import ConnectionLostError, MetaqError, NoBrokerError
from metaq.model import (
    BrokerId,
    GroupOffset,
    Message,
    MessageId,
    Offset,
    TopicPartition,
)
from metaq.testing.clock import ManualClock
from tests.client.worlds import partition

ZERO, ONE = partition(0), partition(1)
OTHER = TopicPartition("test", BrokerId(1), 0)


def message(number: int) -> Message:
    at = Offset(number * 10)
    return Message(
        "test", b"%d" % number, None, MessageId(number), ZERO, at, Offset(at + 10)
    )


class Bench:
    """A handler over a fetch buffer, with the fatal errors that it reports."""

    def __init__(
        self, marks: Marks | None = None, *, room: int = 100, **options: Any
    ) -> None:
        self.clock = ManualClock()
        self.buffer = FetchBuffer(
            clock=self.clock,
            buffer_bytes_max=10 * room,
            buffer_count_max=room,
            on_room=lambda: None,
        )
        self.buffer.add(ZERO, GroupOffset(Offset(0), MessageId(-1)))
        self.fatal: list[MetaqError] = []
        self.handler = FetchHandler(
            self.buffer,
            group="g",
            clock=self.clock,
            options=ConsumerOptions(**options),
            marks={} if marks is None else marks,
            duplicates=None,
            on_fatal=self.fatal.append,
        )

    def fetch(self, *numbers: int) -> list[bytes]:
        """Return the data of the fetched messages that the buffer hands out."""
        messages = [message(number) for number in numbers]
        self.handler.on_messages(ZERO, messages, 10, messages[-1].next_offset)
        batch = self.buffer.take_nowait()
        if batch is None:
            return []
        found = [one.data for one in batch.begin()]
        batch.confirm()
        self.buffer.done(batch)
        return found


def test_messages_below_a_mark_are_not_delivered_again() -> None:
    """The mark goes with the first message that is new."""
    bench = Bench()
    bench.handler.mark(ZERO, GroupOffset(Offset(20)))
    bench.handler.mark(ZERO, GroupOffset(Offset(10)))
    assert bench.handler.marked(ZERO) == 20
    assert bench.fetch(0, 1) == []
    assert bench.fetch(1, 2) == [b"2"]
    assert bench.handler.repeat_count == 3
    assert bench.handler.marked(ZERO) == NOTHING_HANDLED
    assert bench.buffer.handled()[ZERO].offset == 30


@pytest.mark.parametrize(
    "option", [{"skip_repeats": False}, {"commit_interval_s": None}]
)
def test_no_offset_is_marked_where_repeats_are_wanted(option: dict[str, Any]) -> None:
    bench = Bench(**option)
    bench.handler.mark(ZERO, GroupOffset(Offset(20)))
    assert bench.handler.marked(ZERO) == NOTHING_HANDLED
    assert bench.fetch(0, 1) == [b"0", b"1"]


def test_filtered_messages_advance_the_offset() -> None:
    bench = Bench(message_filter=lambda one: one.data != b"1")
    assert bench.fetch(0, 1) == [b"0"]
    assert bench.fetch(1) == []
    assert bench.handler.filtered_count == 2
    assert bench.handler.delivered_count == 1
    assert bench.buffer.handled()[ZERO].offset == 20


def test_a_filter_that_raises_ends_reading() -> None:
    bench = Bench(message_filter=lambda one: one.no_such_field)
    assert bench.fetch(0) == []
    (error,) = bench.fatal
    assert "test/0-0: message filter: AttributeError" in str(error)


def test_one_warning_is_logged_for_each_broker_and_type_of_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And another one after all its partitions were read again."""
    handler = Bench().handler
    for one in (ZERO, ONE):
        handler.on_failure(one, NoBrokerError("away"))
    handler.on_failure(OTHER, NoBrokerError("away"))
    handler.on_failure(ZERO, ConnectionLostError("cut"))
    assert len(caplog.messages) == 3
    handler.on_recovery(ZERO)
    handler.on_failure(ZERO, NoBrokerError("away"))
    assert len(caplog.messages) == 3
    for one in (ZERO, ONE):
        handler.on_recovery(one)
    handler.on_failure(ZERO, NoBrokerError("away"))
    assert len(caplog.messages) == 4


def test_partitions_share_the_bound_on_buffered_bytes() -> None:
    bench = Bench(buffer_bytes_max=2**20, fetch_bytes=2**19)
    assert bench.handler.fetch_bytes() == 2**19
    for number in range(1, 4):
        bench.buffer.add(partition(number), GroupOffset(Offset(0)))
    assert bench.handler.fetch_bytes() == 2**18
    for number in range(4, 64):
        bench.buffer.add(partition(number), GroupOffset(Offset(0)))
    assert bench.handler.fetch_bytes() == 2**16
