"""`peer/log_reader.py` against brokers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from metaq.client.names import parse_address
from metaq.errors import (
    NoBrokerError,
    OffsetOutOfRangeError,
    RequestTimeoutError,
    UnavailableError,
)
from metaq.model import BrokerId, Offset, TopicPartition
from metaq.peer.log_reader import GET_BYTES, LogReader
from metaq.record.layout import HEADER_BYTES
from metaq.testing.fake_broker import FaultKind
from tests.brokers import AnyBroker, Metaq14Broker, StartBroker

ONE_BROKER = {
    "test_a_read_that_is_given_up_may_be_made_again": "a get without answer",
    "test_a_try_that_is_cut_short_does_not_hide_the_cause": "the same",
    "test_a_silent_broker_is_waited_for_as_long_as_all_tries_may_take": "the same",
}

pytestmark = pytest.mark.slow

PARTITION = TopicPartition("test", BrokerId(0), 0)
PAYLOADS = [bytes([number % 251]) * 5000 for number in range(1000)]
RECORD_BYTES = HEADER_BYTES + 5000
SEGMENT_BYTES = 700_000


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    """Return a broker whose log of five MB has segments smaller than a get."""
    made = start_broker(settings={"maxSegmentSize": str(SEGMENT_BYTES)})
    step = SEGMENT_BYTES // RECORD_BYTES
    for number in range(0, len(PAYLOADS), step):
        made.put(*PAYLOADS[number : number + step])
        if isinstance(made, Metaq14Broker):
            made.inner.roll()
    return made


def payloads_in(data: bytes) -> list[bytes]:
    """Return the payloads of the whole records, all of one size."""
    return [
        data[end - RECORD_BYTES + HEADER_BYTES : end]
        for end in range(RECORD_BYTES, len(data) + 1, RECORD_BYTES)
    ]


@contextlib.asynccontextmanager
async def reader_of(
    broker: AnyBroker, *, timeout_s: float = 20.0, retry_timeout_s: float = 20.0
) -> AsyncIterator[LogReader]:
    reader = LogReader(
        PARTITION,
        parse_address(broker.address),
        timeout_s=timeout_s,
        retry_timeout_s=retry_timeout_s,
    )
    try:
        yield reader
    finally:
        await reader.close()


async def pieces(reader: LogReader, start: int, end: int) -> bytes:
    """Return a part of the log, read piece by piece."""
    data = b""
    while start + len(data) < end:
        data += await reader.read(Offset(start + len(data)), Offset(end))
    return data


def run(
    broker: AnyBroker, work: Callable[[LogReader], Awaitable[None]], **options: Any
) -> None:
    """Do something with a reader on a loop of its own."""

    async def scenario() -> None:
        async with reader_of(broker, **options) as reader:
            await work(reader)

    asyncio.run(scenario())


def test_pieces_are_the_log_without_gap_or_overlap(broker: AnyBroker) -> None:
    """Segments end within what was asked ahead; no byte is lost or doubled."""

    async def work(reader: LogReader) -> None:
        span = await reader.span()
        assert span is not None
        start, end = span
        data = await pieces(reader, start, end)
        assert (start, len(data)) == (0, end)
        assert payloads_in(data) == PAYLOADS

    run(broker, work)


def test_a_range_may_begin_and_end_anywhere(broker: AnyBroker) -> None:
    """Bytes are bytes; nothing after the end is asked for."""

    async def work(reader: LogReader) -> None:
        whole = await pieces(reader, 0, 3_000_000)
        part = await pieces(reader, 1_234_567, 2_345_678)
        assert part == whole[1_234_567:2_345_678]
        assert len(whole) == 3_000_000 > 2 * GET_BYTES

    run(broker, work)


def test_reading_goes_on_after_the_broker_was_away(broker: AnyBroker) -> None:
    """The piece that was lost is asked for again, at the same offset."""

    async def work(reader: LogReader) -> None:
        end = Offset(5_000_000)
        data = await reader.read(Offset(0), end)
        broker.stop()
        starting = asyncio.create_task(asyncio.to_thread(broker.start))
        data += await pieces(reader, len(data), end)
        await starting
        assert payloads_in(data) == PAYLOADS[: end // RECORD_BYTES]

    run(broker, work)


def test_a_log_that_ends_early_is_named_with_its_numbers(
    broker: AnyBroker,
) -> None:
    """Behind the log end there is nothing to wait for."""
    end = len(PAYLOADS) * RECORD_BYTES

    async def work(reader: LogReader) -> None:
        with pytest.raises(OffsetOutOfRangeError) as caught:
            await pieces(reader, end - 100, end + 1)
        assert caught.value.high_watermark == end
        assert await reader.span() == (0, end)

    run(broker, work)


@pytest.mark.slow
def test_a_broker_that_stays_away_is_an_error(broker: AnyBroker) -> None:
    """Trying ends."""
    broker.stop()

    async def work(reader: LogReader) -> None:
        with pytest.raises(NoBrokerError, match="cannot connect"):
            await reader.span()

    run(broker, work, retry_timeout_s=1.0)


@pytest.mark.timeout(120)
def test_a_silent_broker_is_waited_for_as_long_as_all_tries_may_take(
    start_metaq_1_4: StartBroker,
) -> None:
    """However long one answer may take: an hour here."""
    broker: Any = start_metaq_1_4()
    broker.put(b"m")
    broker.inner.inject(FaultKind.SWALLOW, verb="get")

    async def work(reader: LogReader) -> None:
        with pytest.raises(RequestTimeoutError):
            await reader.read(Offset(0), Offset(HEADER_BYTES + 1))

    run(broker, work, timeout_s=3600.0, retry_timeout_s=0.3)


def test_a_try_that_is_cut_short_does_not_hide_the_cause(
    start_metaq_1_4: StartBroker,
) -> None:
    """The error is that of the try before."""
    broker: Any = start_metaq_1_4()
    broker.put(b"m")
    broker.inner.inject(FaultKind.REFUSE, verb="get", status=503, body=b"busy")
    broker.inner.inject(FaultKind.SWALLOW, verb="get")

    async def work(reader: LogReader) -> None:
        with pytest.raises(UnavailableError, match="busy"):
            await reader.read(Offset(0), Offset(HEADER_BYTES + 1))

    run(broker, work, timeout_s=3600.0, retry_timeout_s=3.0)


def test_a_read_that_is_given_up_may_be_made_again(
    start_metaq_1_4: StartBroker,
) -> None:
    """And readers of one loop do not wait for each other."""
    broker: Any = start_metaq_1_4()
    broker.put(b"m")
    end = Offset(HEADER_BYTES + 1)
    broker.inner.inject(FaultKind.SWALLOW, verb="get")

    async def work(reader: LogReader) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(Offset(0), end), 0.2)
        async with reader_of(broker) as other:
            both = await asyncio.gather(
                *(pieces(one, 0, end) for one in (reader, other))
            )
        assert [one[HEADER_BYTES:] for one in both] == [b"m", b"m"]

    run(broker, work)
