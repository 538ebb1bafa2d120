"""Whose appends are written next: bounded groups, and turns for all logs."""

import errno
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.errors import MayBeStoredError, NoSpaceError
from metaq.model import LogId, MessageId, Offset, SizeBytes
from metaq.record.layout import encode_record
from metaq.record.scan import CleanEnd, scan_records
from metaq.storage.append_request import AppendRequest
from metaq.storage.appender import GroupQueue
from metaq.storage.log_writer import GROUP_BYTES_MAX
from tests.rigs.fs import FaultyFileSystem, keep_none
from tests.rigs.storage import StorageBench, Ticket
from tests.storage.support import DATA, LOG, RECORD, content_of, log_of, opened, put

OTHER = LogId("test", 1)
SEGMENT = DATA / "test-0" / "00000000000000000000.meta"
BOUND = 100
ROOM = 1 << 40


@dataclass(eq=False)
class Writer:
    """Facts that the queue knows of a log."""

    number: int
    last_turn: int = 0


def request(
    writer: Writer, number: int, size: int, *, is_light: bool = False
) -> AppendRequest:
    return AppendRequest(
        writer,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        0,
        Offset(number),
        [],
        SizeBytes(size),
        1,
        MessageId(number),
        Ticket(),
        is_light=is_light,
    )


# -- the queue

ARRIVALS = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 4), st.integers(1, 2 * BOUND), st.booleans()),
        st.just("turn"),
        st.just("half a turn"),
    ),
    max_size=60,
)


@given(ARRIVALS)
def test_any_arrivals_are_served_in_fair_bounded_groups(
    steps: list[tuple[int, int, bool] | str],
) -> None:
    """A group is within its bound, or one append; a log keeps its order; while a log
    waits no other one has two turns, unless for a light append, and those get half of
    the turns at most; and everything comes out.
    """
    queue, writers = GroupQueue(BOUND), [Writer(number) for number in range(5)]
    pushed: dict[int, list[int]] = {number: [] for number in range(5)}
    taken: dict[int, list[int]] = {number: [] for number in range(5)}
    light: dict[int, set[int]] = {number: set() for number in range(5)}
    under_way: set[int] = set()
    served_while_waiting: dict[int, list[int]] = {}

    def turn(*, is_done: bool) -> None:
        writer = queue.begin_turn()
        number = writer.number  # type: ignore[attr-defined]
        served_while_waiting.pop(number, None)
        for served in served_while_waiting.values():
            assert number not in served or light[number]
            served.append(number)
            assert len(served) < 2 * len(writers)
        if number not in under_way:
            group = queue.take(writer)
            sizes = [each.size_bytes for each in group]
            assert sum(sizes) <= BOUND or len(sizes) == 1
            taken[number] += [each.offset for each in group]
            light[number] -= set(taken[number])
        under_way.discard(number)
        if not is_done:
            under_way.add(number)
        queue.end_turn(writer, is_done=is_done)
        if under_way & {number} or len(taken[number]) < len(pushed[number]):
            served_while_waiting[number] = []

    for place, step in enumerate(steps):
        if isinstance(step, tuple):
            number, size, is_light = step
            queue.push(request(writers[number], place, size, is_light=is_light))
            pushed[number].append(place)
            light[number] |= {place} if is_light else set()
            served_while_waiting.setdefault(number, [])
        elif queue:
            turn(is_done=step == "turn")
    while queue:
        turn(is_done=True)
    assert taken == pushed


def test_a_light_append_goes_in_the_next_group() -> None:
    """With what is before it in its log; of two turns one goes by the order."""
    queue, writers = GroupQueue(BOUND), [Writer(number) for number in range(4)]
    for place, number in enumerate([0, 1, 2, 3] * 2):
        queue.push(request(writers[number], place, 60))
    queue.push(request(writers[3], 8, 10, is_light=True))
    served = []
    while queue:
        writer = queue.begin_turn()
        group = [int(each.offset) for each in queue.take(writer)]
        served.append((writer.number, group))  # type: ignore[attr-defined]
        queue.end_turn(writer, is_done=True)
    first, second = (3, [3]), (3, [7, 8])
    others = [(0, [0]), (1, [1]), (2, [2]), (0, [4]), (1, [5]), (2, [6])]
    assert served == [first, others[0], second, *others[1:]]


# -- a directory


@pytest.fixture
def bench(fs: FaultyFileSystem) -> Iterator[StorageBench]:
    """Two logs with a record each, nothing queued."""
    bench = opened(fs)
    put(bench, log_of(bench))
    put(bench, log_of(bench, OTHER))
    bench.run()
    yield bench
    bench.run()
    bench.close()


def step(bench: StorageBench) -> bool:
    """End the turn of the loop, do one piece of work, and report it.

    Returns whether there is more.
    """
    bench.loop.run()
    has_more = bench.workers[0].turn()
    bench.loop.run()
    return has_more


def turn(bench: StorageBench) -> bool:
    """Work until a log was written; return whether there is more."""
    before = len(bench.fs.log)  # type: ignore[attr-defined]
    while step(bench):
        done = bench.fs.log[before:]  # type: ignore[attr-defined]
        if any(each.path.suffix == ".meta" for each in done):
            return True
    return False


def finish(bench: StorageBench) -> int:
    """Take turns until there is nothing to do; return how many."""
    count = 1
    while turn(bench):
        count += 1
    return count


def flood(bench: StorageBench, groups: int = 4) -> list[Ticket]:
    """Queue so many groups of appends of a quarter of the bound."""
    size = GROUP_BYTES_MAX // 4 - RECORD
    return [put(bench, log_of(bench), size=size) for _ in range(4 * groups)]


def test_a_put_to_another_log_is_in_the_next_group(bench: StorageBench) -> None:
    """Whatever was queued before it, it waits for the group under way and no more."""
    tickets = flood(bench)
    turn(bench)
    assert [ticket.is_stored for ticket in tickets] == [True] * 4 + [False] * 12
    other = put(bench, log_of(bench, OTHER))
    turn(bench)
    assert other.is_stored
    assert sum(ticket.is_stored for ticket in tickets) == 4
    assert finish(bench) == 3 + 1  # after the last one only its index is written
    assert all(ticket.is_stored for ticket in tickets)


def test_a_small_group_is_a_turn(bench: StorageBench) -> None:
    """Nothing of it is left to do, and still the log waits for the others then."""
    log, other = log_of(bench), log_of(bench, OTHER)
    first, second = put(bench, log), put(bench, other)
    step(bench)
    assert (first.is_stored, second.is_stored) == (True, False)
    third = put(bench, log)
    assert step(bench)
    assert (second.is_stored, third.is_stored) == (True, False)
    assert not step(bench)
    assert third.is_stored


def test_what_is_written_and_synced_at_once_is_bounded(
    bench: StorageBench, fs: FaultyFileSystem
) -> None:
    """However much is queued, and however large one append is."""
    before = len(fs.log)
    flood(bench)
    put(bench, log_of(bench), 1, 3 * GROUP_BYTES_MAX)
    put(bench, log_of(bench))
    bench.run()
    calls = [(each.name, each.size) for each in fs.log[before:] if each.path == SEGMENT]
    calls = [call for call in calls if call[0] in {"write", "sync"}]
    assert [name for name, _size in calls] == ["write", "sync"] * (4 + 4 + 1)
    assert max(size for _name, size in calls) <= GROUP_BYTES_MAX
    assert isinstance(scan_records(content_of(log_of(bench))), CleanEnd)


def test_others_are_served_between_the_steps_of_a_large_append(
    bench: StorageBench,
) -> None:
    """Nothing of it is readable or answered before all of it is synced."""
    log, other = log_of(bench), log_of(bench, OTHER)
    large, later = put(bench, log, 1, 3 * GROUP_BYTES_MAX), put(bench, log)
    for _ in range(3):
        turn(bench)
        between = put(bench, other)
        turn(bench)
        assert between.is_stored
        assert (log.high_watermark, large.is_answered) == (RECORD, False)
    turn(bench)
    assert large.is_stored
    assert not later.is_answered
    finish(bench)
    assert later.is_stored
    assert log.high_watermark == log.next_offset


def test_others_are_served_before_a_group_is_indexed(
    bench: StorageBench, fs: FaultyFileSystem
) -> None:
    """A checksum of much, and a file of its own, are nothing that a put waits for."""
    index = SEGMENT.with_suffix(".spans")
    large = put(bench, log_of(bench), 1, GROUP_BYTES_MAX - RECORD)
    turn(bench)
    assert large.is_stored
    before = len(fs.log)
    for _ in range(2):  # before the checksum, and between two steps of it
        other = put(bench, log_of(bench, OTHER))
        turn(bench)
        assert other.is_stored
    assert index not in {each.path for each in fs.log[before:]}
    finish(bench)
    assert index in {each.path for each in fs.log[before:]}


def test_what_is_left_to_the_storage_thread_is_done_in_steps_before_the_write(
    bench: StorageBench,
) -> None:
    """Others are served in between; what is stored is what the steps have made."""
    log, record = log_of(bench), bytearray(encode_record(b"x", id=MessageId(0)))
    wanted = encode_record(b"x", id=MessageId(9))

    def finish_record() -> Iterator[None]:
        yield
        record[:] = wanted
        yield

    ticket = Ticket()
    log.append(
        [record],
        size_bytes=len(record),
        record_count=1,
        last_id=MessageId(9),
        ticket=ticket,
        finish=finish_record(),
    )
    step(bench)
    assert record != wanted
    between = put(bench, log_of(bench, OTHER))
    step(bench)
    assert between.is_stored
    assert not ticket.is_answered
    finish(bench)
    assert ticket.is_stored
    assert content_of(log).endswith(wanted)


def test_a_log_without_memory_to_finish_an_append_refuses_it(
    bench: StorageBench,
) -> None:
    """Nothing of it is written, and the log goes on."""

    def run_out() -> Iterator[None]:
        yield
        raise MemoryError

    log, ticket = log_of(bench), Ticket()
    log.append(
        [b"x" * RECORD],
        size_bytes=RECORD,
        record_count=1,
        last_id=MessageId(9),
        ticket=ticket,
        finish=run_out(),
    )
    finish(bench)
    assert isinstance(ticket.error, NoSpaceError)
    assert put_is_stored(bench)
    assert log.high_watermark == 2 * RECORD


def test_a_power_cut_between_two_steps_leaves_whole_records(
    bench: StorageBench, fs: FaultyFileSystem
) -> None:
    """All that was acknowledged is there, and the log goes on after whole records."""
    put(bench, log_of(bench), 1, 2 * GROUP_BYTES_MAX)
    turn(bench)
    found = opened(fs.crash(keep_none))
    assert log_of(found).high_watermark == RECORD
    assert put_is_stored(found)
    found.close()


def put_is_stored(bench: StorageBench, log_id: LogId = LOG) -> bool:
    ticket = put(bench, log_of(bench, log_id))
    bench.run()
    return ticket.is_stored


def test_a_group_without_room_fails_its_own_log_alone(
    bench: StorageBench, fs: FaultyFileSystem
) -> None:
    """Its steps are cut off again; a put between them is stored."""
    log, other = log_of(bench), log_of(bench, OTHER)
    large, later = put(bench, log, 1, 2 * GROUP_BYTES_MAX), put(bench, log)
    turn(bench)
    between = put(bench, other)
    turn(bench)
    fs.set_capacity(0)
    turn(bench)
    assert between.is_stored
    assert isinstance(large.error, NoSpaceError)
    assert isinstance(later.error, NoSpaceError)
    fs.set_capacity(ROOM)
    finish(bench)
    assert log.next_offset == log.high_watermark == RECORD
    assert put_is_stored(bench)
    assert put_is_stored(bench, OTHER)


def test_a_disk_error_between_two_steps_fails_everything_once(
    bench: StorageBench, fs: FaultyFileSystem
) -> None:
    """All that is queued is dropped, whichever log it is of, and nothing is tried."""
    large = put(bench, log_of(bench), 1, 2 * GROUP_BYTES_MAX)
    others = [put(bench, log_of(bench)), put(bench, log_of(bench, OTHER))]
    turn(bench)
    fs.fail_at(fs.calls + 1, errno.EIO)
    turn(bench)
    calls = fs.calls
    finish(bench)
    assert fs.calls == calls
    assert all(isinstance(each.error, MayBeStoredError) for each in (large, *others))


def test_a_task_runs_behind_what_was_queued_before_it(bench: StorageBench) -> None:
    """And before what was queued after it, whosever turn it would be."""
    seen: list[tuple[int, bool]] = []
    log, other = log_of(bench), log_of(bench, OTHER)
    tickets = flood(bench)
    log.log_dir.submit(
        lambda: seen.append((log.writer.end, other.writer.end == RECORD))
    )
    put(bench, other)
    finish(bench)
    assert seen == [(log.next_offset, True)]
    assert all(ticket.is_stored for ticket in tickets)
