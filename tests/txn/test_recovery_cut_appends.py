"""Committed appends of which a crash left a part, in partitions that refuse the rest.

A reader sees all of a transaction in a partition or nothing of it, and all or nothing
of those that are committed together, however often the broker starts without room.
"""

import random
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate, product
from pathlib import Path

import pytest

from metaq.errors import NoSpaceError
from metaq.model import LogId, Offset, SizeBytes
from metaq.record.layout import HEADER_BYTES
from metaq.txn.opening import JournalOpening
from tests.rigs.fs import (
    CrashPoint,
    FaultyFileSystem,
    Operation,
    crash_points,
    keep_all,
    keep_random,
)
from tests.rigs.storage import Ticket
from tests.sampling import quarter, sample
from tests.txn.support import (
    DATA,
    JOURNAL,
    A,
    B,
    Reader,
    TransactionBench,
    content,
    each_once,
    killed,
    opened,
    payloads_of,
)

ALONE = ("TX:a:1",)
TOGETHER = tuple(f"XID:1:0{n}::uq" for n in range(1, 4))
DECISIONS = (ALONE, TOGETHER)
"""Keys that are committed by one command."""
ORDERS = (ALONE, TOGETHER, TOGETHER[::-1])
"""Keys in the order in which they are committed; they began in that of their names."""

ROOM_BYTES = SizeBytes(1 << 40)


def puts_of(key: str, log_id: LogId) -> list[bytes]:
    """Return what a transaction puts to a partition."""
    parts = range(3 - log_id.partition)
    return [b"%d of %b to %d" % (n, key.encode(), log_id.partition) for n in parts]


def begin(bench: TransactionBench, key: str) -> None:
    bench.begin(key)
    for log_id in (A, B):
        for payload in puts_of(key, log_id):
            bench.put(key, log_id, payload)


def commit(bench: TransactionBench, keys: tuple[str, ...]) -> Callable[[], bool]:
    """Make a decision, and return whether it was answered; nothing is appended yet."""
    for key in sorted(keys):
        begin(bench, key)
        if keys != ALONE:
            bench.prepare(key)
        bench.run()
    if keys != ALONE:
        answers = [*bench.commit_together(*keys).values()]
    else:
        answers = [bench.commit(*keys)]
    return lambda: all(answer.is_good for answer in answers)


def check_whole(visible: Mapping[LogId, list[bytes]]) -> set[str]:
    """Assert that all of a decision can be read in a partition, or none, and once.

    Returns:
        Keys of what can be read in all of these partitions.
    """
    whole = {key for keys in DECISIONS for key in keys}
    for log_id, payloads in visible.items():
        found = each_once(payloads)
        for keys in DECISIONS:
            puts = {put for key in keys for put in puts_of(key, log_id)}
            assert puts & found in (puts, set()), (keys, log_id, payloads)
            if not puts <= found:
                whole -= {*keys}
    return whole


def visible(bench: TransactionBench) -> dict[LogId, list[bytes]]:
    return {log_id: bench.payloads(log_id) for log_id in (A, B)}


def held(bench: TransactionBench) -> set[LogId]:
    """Return the partitions that keep a part from readers."""
    logs = bench.logs.manager.logs()
    return {log_id for log_id, log in logs.items() if log.statistics().held_bytes}


def start_above_limit(disk: FaultyFileSystem) -> TransactionBench:
    """Start where each partition is larger than it may be."""
    return opened(disk, log_bytes_max=1, segment_bytes_max=1)


def start_full(disk: FaultyFileSystem, **options: int) -> TransactionBench:
    """Start on a disk that is full when a batch is to be appended."""

    def on_call(call: Operation) -> None:
        # The last thing that is done to the journal before.
        if call.name == "unlink" and call.path.name.startswith("sums."):
            disk.on_call(fill)

    def fill(call: Operation) -> None:
        if call.name == "write" and call.path.suffix == ".meta":
            disk.set_capacity(0)

    disk.on_call(on_call)
    return opened(disk, **options)


def give_room(bench: TransactionBench) -> None:
    """Free the disk, and try again what waits."""
    bench.fs.on_call(None)
    bench.fs.set_capacity(ROOM_BYTES)
    bench.coordinator.tick()
    bench.run()


def path_of(log_id: LogId) -> Path:
    """Return the file of a partition that has one."""
    return DATA / str(log_id) / f"{0:020d}.meta"


def about_to_append(
    fs: FaultyFileSystem, bench: TransactionBench, ask: Callable[[], object]
) -> tuple[FaultyFileSystem, dict[LogId, bytes]]:
    """Let it commit what `ask` asks for.

    Returns:
        The disk with all commit records and no batch, and what the partitions get.
    """
    before = []

    def on_call(call: Operation) -> None:
        if call.name == "write" and call.path.suffix == ".meta":
            before.append(fs.snapshot())

    bench.put_outside(A, b"before")
    bench.put_outside(B, b"before")
    bench.run()
    sizes = {log_id: fs.size_of(path_of(log_id)) for log_id in (A, B)}
    fs.on_call(on_call)
    ask()
    bench.run()
    fs.on_call(None)
    content = {each: fs.read_file(path_of(each), ROOM_BYTES) for each in (A, B)}
    return before[0], {each: content[each][sizes[each] :] for each in (A, B)}


def write(disk: FaultyFileSystem, log_id: LogId, data: bytes) -> None:
    """Leave some bytes of what a partition was to get."""
    file = disk.open_append(path_of(log_id), create=False)
    file.write_all((data,))
    file.close()


def cut_disks(
    keys: tuple[str, ...],
) -> list[tuple[FaultyFileSystem, frozenset[LogId]]]:
    """Return what a crash can leave of a decision that is on its way to partitions.

    Returns:
        For each record that may be the last one in either partition a disk with that
        and some bytes of the next, and the partitions that have a part.
    """
    fs = FaultyFileSystem()
    # Each transaction has its own redo file.
    bench = opened(fs, file_bytes_max=200)
    base, data = about_to_append(fs, bench, lambda: commit(bench, keys))
    ends = {}
    for log_id in (A, B):
        puts = [put for key in keys for put in puts_of(key, log_id)]
        sizes = [HEADER_BYTES + len(put) for put in puts]
        ends[log_id] = [*accumulate(sizes, initial=0)]
    found = []
    for places in product(ends[A], ends[B]):
        disk, parts = base.crash(keep_all), set()
        for log_id, end in zip((A, B), places, strict=True):
            write(disk, log_id, data[log_id][: end + 7])
            if 0 < end < len(data[log_id]):
                parts.add(log_id)
        found.append((disk, frozenset(parts)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("segment_bytes_max", [1, 1 << 20])
@pytest.mark.parametrize("keys", ORDERS)
def test_a_part_is_not_shown_before_the_rest_is_there(
    keys: tuple[str, ...], segment_bytes_max: int, rng: random.Random
) -> None:
    """Whatever is left, for as many starts as there is no room; then it goes on without
    a restart, and is in one segment.
    """
    start_again = partial(start_full, segment_bytes_max=segment_bytes_max)
    for disk, parts in quarter(cut_disks(keys), rng):
        for start in (start_above_limit, start_above_limit, start_again):
            bench = start(disk)
            assert held(bench) == parts
            assert bool(bench.coordinator.figures().stuck_count) or not parts
            check_whole(visible(bench))
            for log_id in (A, B):
                bench.put_outside(log_id, b"beside")
            bench.coordinator.checkpoint()
            bench.run()
            check_whole(visible(bench))
            disk = bench.fs.crash(keep_all)
        readers = {log_id: Reader(bench, log_id) for log_id in (A, B)}
        give_room(bench)
        assert check_whole(visible(bench)) == {*keys}
        assert not held(bench)
        for log_id, reader in readers.items():
            data, segments = content(bench, log_id), reader.log.segments
            for end in reader.ends:
                check_whole({log_id: payloads_of(data[:end], 0)})
            places = [data.index(put) for key in keys for put in puts_of(key, log_id)]
            assert len({segments.find(Offset(place)) for place in places}) == 1
        bench.put_outside(A, b"at last")
        bench.run()
        shown = visible(bench)
        assert shown[A][-1] == b"at last"
        assert visible(killed(bench)) == shown


@pytest.mark.slow
@pytest.mark.parametrize("keys", ORDERS)
def test_a_start_without_room_for_the_journal_does_not_show_a_part_either(
    keys: tuple[str, ...], rng: random.Random
) -> None:
    """Transactions are offline then, and the rest of the broker serves."""
    for disk, parts in quarter(cut_disks(keys), rng):
        bench = TransactionBench(disk)
        disk.set_capacity(0)
        bench.logs.open()
        with pytest.raises(NoSpaceError):
            JournalOpening(disk, bench.journal, bench.logs.manager).run()
        assert held(bench) == parts
        check_whole(visible(bench))
        bench.kill()
        disk.set_capacity(ROOM_BYTES)
        assert check_whole(visible(opened(disk))) == {*keys}


def test_a_put_in_front_of_the_rest_is_refused() -> None:
    """The text says where, and what is there; a put after the rest is taken."""
    disk = next(disk for disk, parts in cut_disks(ALONE) if A in parts)
    bench = start_full(disk)
    log = bench.logs.manager.logs()[A]
    ticket = Ticket()
    text = "partition test-0 takes no put .* offset=26 found_bytes=36"
    with pytest.raises(NoSpaceError, match=text):
        bench.logs.append(log, [b"beside"], ticket)
    bench.fs.on_call(None)
    bench.fs.set_capacity(ROOM_BYTES)
    bench.coordinator.tick()
    bench.logs.append(log, [b"behind"], ticket)
    bench.run()
    assert ticket.is_stored
    assert visible(bench)[A] == [b"before", *puts_of(*ALONE, A), b"behind"]


def test_what_was_to_come_behind_the_rest_comes_in_the_same_start() -> None:
    """Two transactions, each with a part in one partition, found in the other order."""
    first, second = "TX:a:2", "TX:a:1"
    fs = FaultyFileSystem()
    bench = opened(fs, file_bytes_max=200)
    for key in (second, first):
        begin(bench, key)
        bench.run()
    base, data = about_to_append(
        fs, bench, lambda: (bench.commit(first), bench.commit(second))
    )
    disk = base.crash(keep_all)
    write(disk, A, data[A][: HEADER_BYTES + len(puts_of(first, A)[0])])
    write(disk, B, data[B][: -HEADER_BYTES - len(puts_of(second, B)[-1])])
    assert visible(opened(disk)) == visible(bench)


def is_of_partition(point: CrashPoint[set[str]]) -> bool:
    return point.operation is None or point.operation.path.suffix == ".meta"


@pytest.mark.slow
@pytest.mark.parametrize("unflush_threshold", [0, 4])
def test_no_power_cut_leaves_a_half_that_can_be_read(
    seed: int, rng: random.Random, unflush_threshold: int
) -> None:
    """At every sync of two decisions, without room afterwards, and again while the rest
    is appended; in the end all that was answered is there, and nothing twice.

    A run takes some of what the disk may have kept at these, a whole one many.
    """
    fs = FaultyFileSystem()
    bench = opened(fs, unflush_threshold=unflush_threshold)
    answered: list[str] = []

    def live() -> None:
        for keys in DECISIONS:
            bench.put_outside(A, b"before %b" % keys[0].encode())
            is_answered = commit(bench, keys)
            bench.put_outside(A, b"behind %b" % keys[0].encode())
            bench.run()
            assert is_answered()
            answered.extend(keys)

    points = crash_points(fs, live, lambda: {*answered})
    # Batches are on their way to the disk at a few of them, and at the end.
    moments = [
        (point, seed + 100 * place + number)
        for place, point in enumerate(points)
        for number in range(50 if is_of_partition(point) else 3)
    ]
    for point, number in sample(moments, 80, rng):
        choose = keep_random(number)
        bench = start_above_limit(point.disk.crash(choose))
        check_whole(visible(bench))
        disk = bench.fs.crash(choose)

        def complete(disk: FaultyFileSystem = disk) -> None:
            opened(disk, unflush_threshold=unflush_threshold)

        *cuts, end = crash_points(disk, complete, lambda: None)
        for cut in (*(cuts[-2:] if held(bench) else ()), end):
            bench = start_above_limit(cut.disk.crash(choose))
            check_whole(visible(bench))
            bench = killed(bench)
            assert check_whole(visible(bench)) >= point.progress
            assert not bench.coordinator.figures().stuck_count
            shown = visible(bench)
            assert visible(killed(bench)) == shown


@pytest.mark.slow
@pytest.mark.parametrize("keys", DECISIONS)
def test_the_journal_forgets_only_what_no_power_cut_can_take(
    keys: tuple[str, ...], seed: int
) -> None:
    """Also where puts are answered before they are synced: a half would stay one."""
    fs = FaultyFileSystem()
    bench = opened(fs, unflush_threshold=1000, file_bytes_max=100)
    is_answered = commit(bench, keys)
    bench.run()
    assert is_answered()
    bench.coordinator.tick()
    bench.run()
    assert "redo.1" not in fs.list_directory(JOURNAL)
    for number in range(20):
        disk = fs.crash(keep_random(seed + number))
        assert check_whole(visible(opened(disk))) == {*keys}
