"""A broker that cannot name damage: the next data is searched for, and found."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from metaq.client.names import parse_address
from metaq.errors import CorruptRecordError, NoDataError, ServerError
from metaq.model import MAX_OFFSET, Offset
from metaq.peer.gap_search import GapSearch
from metaq.peer.log_reader import LogReader
from metaq.peer.replies import Fetched, GetOutcome, MovedTo, NothingThere
from tests.brokers import StartBroker
from tests.client.worlds import IDLE, QUICK, WORLDS, partition, payloads, take
from tests.rigs.waiting import wait_until

ONE_BROKER = {
    "broker": "it cannot name damage; the other one: test_fetcher_named_damage.py"
}
ZERO = partition(0)
QUESTIONS_MAX = 2 * 63 + 4


def answer(at: Offset, *, start: int, gap: int, end: int) -> GetOutcome:
    """Answer a get as a broker whose log has no bytes in start..gap."""
    if at >= end:
        return MovedTo(Offset(end)) if at == MAX_OFFSET else NothingThere()
    return NothingThere() if start <= at < gap else Fetched(b"x")


@given(
    start=st.integers(0, 2**40),
    lost=st.integers(1, 2**40),
    behind=st.integers(1, 2**40),
)
def test_the_first_byte_behind_a_gap_is_found(
    start: int, lost: int, behind: int
) -> None:
    """Or none, where the last probe jumps over what is left; in few questions."""
    gap, end = start + lost, start + lost + behind
    search = GapSearch(Offset(start))
    for _ in range(QUESTIONS_MAX):
        if search.is_over:
            break
        at = search.fetch_offset
        search.on_reply(answer(at, start=start, gap=gap, end=end))
    assert search.is_over
    assert search.found == gap


@pytest.mark.parametrize(
    ("start", "gap", "end"),
    [
        (100, 100, 100),  # the end of the log
        (100, 200, 200),  # bytes that are not readable yet: nothing comes after them
        (100, 100, 200),  # put during the search
    ],
)
def test_where_there_is_no_gap_none_is_found(start: int, gap: int, end: int) -> None:
    """Nothing may be left out there."""
    search = GapSearch(Offset(start))
    while not search.is_over:
        search.on_reply(answer(search.fetch_offset, start=start, gap=gap, end=end))
    assert search.found is None


@given(
    start=st.integers(0, 100),
    lost=st.integers(0, 30),
    behind=st.integers(1, 30),
    flushes=st.lists(st.tuples(st.integers(2, 12), st.integers(1, 60)), min_size=1),
)
@example(start=0, lost=0, behind=30, flushes=[(6, 30)])
def test_bytes_that_become_readable_meanwhile_are_not_left_out(
    start: int, lost: int, behind: int, flushes: list[tuple[int, int]]
) -> None:
    """A broker that syncs during the search differs from one that lost bytes."""
    gap, end = start + lost, start + lost + behind
    readable, step = start, 0
    search = GapSearch(Offset(start))
    while not search.is_over:
        step += 1
        grown = sum(size for at, size in flushes if at <= step)
        readable = min(end, start + grown)
        at = search.fetch_offset
        found = answer(at, start=start, gap=gap, end=end)
        if isinstance(found, Fetched) and at >= readable:
            found = NothingThere()
        search.on_reply(found)
    assert search.found in {None, gap}
    assert search.found is None or lost > 0


def test_a_log_whose_start_moves_meanwhile_is_another_one() -> None:
    """The next get knows where it begins."""
    search = GapSearch(Offset(100))
    search.on_reply(MovedTo(Offset(500)))
    search.on_reply(MovedTo(Offset(300)))
    assert (search.is_over, search.found) == (True, None)


@pytest.fixture
def broker(start_metaq_1_4: StartBroker) -> Any:
    return start_metaq_1_4({"test": 1})


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, broker: Any) -> Iterator[Any]:
    with WORLDS[request.param](brokers=[broker.address], **QUICK) as one:
        yield one


@pytest.fixture(params=["404", "500"])
def offsets(request: pytest.FixtureRequest, broker: Any) -> list[Offset]:
    """Return offsets of a..e; c is lost, and the gap begins within b."""
    found: list[Offset] = broker.put(b"a", b"b", b"c")
    broker.inner.roll()
    found += broker.put(b"d", b"e")
    broker.inner.lose(found[1] + 5, found[3], refuses=request.param == "500")
    return found


@pytest.mark.slow
def test_a_consumer_stops(broker: Any, client: Any, offsets: list[Offset]) -> None:
    """With the place and where it can go on, as it finds them itself."""
    with client.consumer("g", ["test"], **IDLE) as consumer:
        assert payloads(take(consumer, 1)) == [b"a"]
        with pytest.raises(CorruptRecordError) as caught:
            take(consumer, 1)
    error = caught.value
    assert (error.partition, error.offset) == (ZERO, offsets[1])
    assert error.next_good_offset == offsets[3]


@pytest.mark.slow
def test_a_consumer_skips(broker: Any, client: Any, offsets: list[Offset]) -> None:
    """And counts what it left out."""
    options = {"on_corrupt": "skip", **IDLE}
    with client.consumer("g", ["test"], **options) as consumer:
        assert payloads(take(consumer, 3)) == [b"a", b"d", b"e"]
        statistics = consumer.statistics()
        assert statistics.fetches[ZERO].skipped_count == 1
        assert statistics.missing_bytes == offsets[3] - offsets[1]
        wait_until(lambda: consumer.health().is_ok)


@pytest.mark.slow
def test_a_browser_and_a_single_get_stop(
    broker: Any, client: Any, offsets: list[Offset]
) -> None:
    """Silence at a gap looks like the end of the log, and is not."""
    found = iter(client.browse("test"))
    assert next(found).data == b"a"
    with pytest.raises(CorruptRecordError) as caught:
        next(found)
    assert caught.value.next_good_offset == offsets[3]
    with pytest.raises(CorruptRecordError) as caught:
        client.get("test", "0-0", offsets[2], 1000)
    assert caught.value.next_good_offset == offsets[3]


async def read_log(
    broker: Any, start: Offset, end: Offset, *, patience_s: float = 30.0
) -> bytes:
    """Read bytes as tasks and followers do."""
    address = parse_address(broker.address)
    reader = LogReader(ZERO, address, timeout_s=30.0, retry_timeout_s=patience_s)
    try:
        return await reader.read(start, end)
    finally:
        await reader.close()


def test_a_log_reader_stops(broker: Any, offsets: list[Offset]) -> None:
    """It reads bytes: those of b before the gap, too."""
    gap, end = Offset(offsets[1] + 5), broker.inner.log_end()
    assert len(asyncio.run(read_log(broker, Offset(0), end))) == gap
    with pytest.raises(CorruptRecordError, match="damaged record") as caught:
        asyncio.run(read_log(broker, gap, end))
    assert (caught.value.partition, caught.value.offset) == (ZERO, gap)
    assert caught.value.next_good_offset == offsets[3]
    assert asyncio.run(read_log(broker, offsets[3], end))


@pytest.mark.slow
def test_where_nothing_lies_behind_a_log_reader_finds_no_gap(broker: Any) -> None:
    """Bytes that are not readable yet may be; a refusal is raised as it is."""
    broker.put(b"a")
    end = broker.inner.log_end()
    for refuses, kind in ((False, NoDataError), (True, ServerError)):
        broker.inner.lose(0, end, refuses=refuses)
        with pytest.raises(kind) as caught:
            asyncio.run(read_log(broker, Offset(0), end, patience_s=2.0))
        assert type(caught.value) is kind
        broker.inner.metaq.log("test", 0).gaps.clear()


def test_a_get_at_the_end_has_no_messages(broker: Any, client: Any) -> None:
    """The broker is asked once more, and there is no gap."""
    broker.put(b"a")
    end = broker.inner.log_end()
    found = client.get("test", "0-0", end, 1000)
    assert (found.messages, found.next_offset) == ([], end)


def test_a_broker_that_refuses_everything_is_told_as_it_says(
    broker: Any, client: Any
) -> None:
    """No readable byte comes after it: it is no gap."""
    (offset,) = broker.put(b"a")
    broker.inner.lose(0, broker.inner.log_end(), refuses=True)
    with pytest.raises(ServerError):
        client.get("test", "0-0", offset, 1000)
    with pytest.raises(ServerError):
        list(client.browse("test"))


@pytest.mark.slow
def test_bytes_that_cannot_be_read_yet_are_not_left_out(
    broker: Any, client: Any
) -> None:
    """As of a Java broker with `unflushThreshold`: its log end is ahead."""
    offsets = broker.put(b"a", b"b")
    broker.inner.lose(offsets[1], broker.inner.log_end())
    options = {"on_corrupt": "skip", **IDLE}
    with client.consumer("g", ["test"], **options) as consumer:
        assert payloads(take(consumer, 1)) == [b"a"]
        wait_until(lambda: consumer.statistics().fetches[ZERO].get_count > 60)
        assert consumer.statistics().missing_bytes == 0
        broker.inner.metaq.log("test", 0).gaps.clear()
        assert payloads(take(consumer, 1)) == [b"b"]
