"""`peer/log_reader.py` against brokers."""

import signal
import threading
from typing import Any

import pytest

from metaq.client.names import parse_address
from metaq.errors import NoBrokerError, OffsetOutOfRangeError
from metaq.model import BrokerId, Offset, TopicPartition
from metaq.peer.log_reader import GET_BYTES, LogReader
from metaq.record.layout import HEADER_BYTES
from metaq.testing.fake_broker import FaultKind
from tests.brokers import AnyBroker, Metaq14Broker, StartBroker, until

ONE_BROKER = {
    "test_an_interrupt_is_what_the_caller_hears_and_the_connection_is_closed": (
        "a get that is not answered"
    )
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


def reader_of(broker: AnyBroker, *, retry_timeout_s: float = 20.0) -> LogReader:
    return LogReader(
        PARTITION,
        parse_address(broker.address),
        timeout_s=20.0,
        retry_timeout_s=retry_timeout_s,
    )


def test_pieces_are_the_log_without_gap_or_overlap(broker: AnyBroker) -> None:
    """Segments end within what was asked ahead; no byte is lost or doubled."""
    with reader_of(broker) as reader:
        span = reader.span()
        assert span is not None
        data = b"".join(reader.pieces(*span))
    start, end = span
    assert (start, len(data)) == (0, end)
    assert payloads_in(data) == PAYLOADS


def test_a_range_may_begin_and_end_anywhere(broker: AnyBroker) -> None:
    """Bytes are bytes; nothing behind the end is asked for."""
    with reader_of(broker) as reader:
        whole = b"".join(reader.pieces(Offset(0), Offset(3_000_000)))
        part = b"".join(reader.pieces(Offset(1_234_567), Offset(2_345_678)))
    assert part == whole[1_234_567:2_345_678]
    assert len(whole) == 3_000_000 > 2 * GET_BYTES


def test_reading_goes_on_after_the_broker_was_away(broker: AnyBroker) -> None:
    """The piece that was lost is asked for again, at the same offset."""
    with reader_of(broker) as reader:
        pieces = reader.pieces(Offset(0), Offset(5_000_000))
        data = next(pieces)
        broker.stop()
        thread = threading.Thread(target=broker.start)
        thread.start()
        data += b"".join(pieces)
        thread.join()
    assert payloads_in(data) == PAYLOADS[: 5_000_000 // RECORD_BYTES]


def test_a_log_that_ends_early_is_named_with_its_numbers(
    broker: AnyBroker,
) -> None:
    """Behind the log end there is nothing to wait for."""
    end = len(PAYLOADS) * RECORD_BYTES
    with reader_of(broker) as reader:
        with pytest.raises(OffsetOutOfRangeError) as caught:
            list(reader.pieces(Offset(end - 100), Offset(end + 1)))
        assert caught.value.high_watermark == end
        assert reader.span() == (0, end)


@pytest.mark.slow
def test_a_broker_that_stays_away_is_an_error(broker: AnyBroker) -> None:
    """Trying ends."""
    broker.stop()
    with (
        reader_of(broker, retry_timeout_s=1.0) as reader,
        pytest.raises(NoBrokerError, match="cannot connect"),
    ):
        reader.span()


def test_an_interrupt_is_what_the_caller_hears_and_the_connection_is_closed(
    start_metaq_1_4: StartBroker,
) -> None:
    """The answer that was waited for is given up by then."""
    broker: Any = start_metaq_1_4()
    broker.put(b"m")
    broker.inner.inject(FaultKind.SWALLOW, verb="get")
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        until(lambda: broker.inner.statistics().commands.get("get"))
        signal.pthread_kill(main, signal.SIGINT)

    def read() -> None:
        with reader_of(broker) as reader:
            threading.Thread(target=interrupt, daemon=True).start()
            list(reader.pieces(Offset(0), Offset(10)))

    with pytest.raises(KeyboardInterrupt):
        read()
    until(lambda: not broker.inner.statistics().open_connection_count)
