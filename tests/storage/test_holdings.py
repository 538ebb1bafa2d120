"""Records of data directories, and starts that find less."""

import errno
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from metaq.config.settings import BrokerConfig, LimitsConfig, SystemConfig
from metaq.errors import (
    CorruptRecordError,
    LogOfflineError,
    OffsetOutOfRangeError,
    StorageError,
)
from metaq.model import LogId, Millis, Offset
from metaq.storage.holdings import (
    HOLDINGS_FILE,
    Claim,
    Extent,
    Holdings,
    decode_holdings,
    encode_holdings,
    find_losses,
)
from metaq.storage.inventory import read_holdings, write_holdings
from metaq.storage.log_dir import RECORD_INTERVAL_S
from metaq.storage.log_state import LogState
from metaq.storage.log_writer import UNSYNCED_BYTES_MAX
from metaq.storage.verify import verify_directory
from metaq.testing.clock import ManualClock
from tests.rigs.fs import (
    FaultyFileSystem,
    Operation,
    crash_points,
    keep_all,
    keep_none,
    keep_random,
)
from tests.rigs.storage import StorageBench, Ticket
from tests.sampling import failures
from tests.storage.support import DATA, LOG, OTHER, content_of, log_of, opened

FILE = DATA / HOLDINGS_FILE
AWAY = Path("/away")
RECORD = Holdings(
    identity="a1",
    written_ms=Millis(7),
    is_sealed=True,
    partitions={"test-0": Extent(Offset(120), Offset(480))},
    siblings={"/second": Claim("b2", 3)},
)


def put(bench: StorageBench, log_id: LogId = LOG, count: int = 1) -> None:
    for _ in range(count):
        ticket = Ticket()
        bench.append(log_of(bench, log_id), [b"x" * 100], ticket)
        bench.run()
        assert ticket.is_stored


def filled(fs: FaultyFileSystem) -> None:
    """Leave two logs, of four segments and of one record, by a clean stop."""
    bench = opened(fs, segment_bytes_max=120)
    put(bench, LOG, 4)
    put(bench, OTHER)
    bench.close()


def segment(offset: int, name: str = "test-0") -> Path:
    return DATA / name / f"{offset:020}.meta"


def remove(fs: FaultyFileSystem, offset: int) -> None:
    """Remove a segment and its side file."""
    fs.unlink(segment(offset))
    fs.unlink(segment(offset).with_suffix(".spans"))


# -- the record -----------------------------------------------------------------------


def test_a_record_is_read_as_it_was_written(fs: FaultyFileSystem) -> None:
    """Every field, by its bytes and on a disk."""
    claims = {"ZooKeeper /x": Claim("c", 2)}
    seen = replace(RECORD, lost=("test-0",), refused_by=claims, journal="/journal")
    for record in (RECORD, seen):
        assert decode_holdings(encode_holdings(record)) == record
    fs.make_directory(DATA)
    write_holdings(fs, DATA, RECORD)
    assert read_holdings(fs, DATA) == RECORD
    assert not HOLDINGS_FILE.endswith(".meta")
    assert "-" not in HOLDINGS_FILE


def test_the_layout_is_what_it_was() -> None:
    """A record of an earlier version is read for ever."""
    assert encode_holdings(RECORD) == (
        b"metaq-holdings 1 b78c2d62\n"
        b'{"identity": "a1", "written_ms": 7, "is_sealed": true, "is_accepted": false,'
        b' "partitions": {"test-0": [120, 480]}, "siblings": {"/second": ["b2", 3]}}\n'
    )


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        encode_holdings(RECORD)[:-20],
        encode_holdings(RECORD).replace(b"480", b"490"),
        b"metaq-holdings 1 f4dbdf21\n0\n",
        b"metaq-holdings 1 83dcefb7\n1\n",
    ],
)
def test_what_is_no_record_is_told_and_done_without(
    fs: FaultyFileSystem, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The file is knowledge and no data: the start goes on, and writes a new one."""
    filled(fs)
    fs.unlink(FILE)
    fs.write_atomically(FILE, data)
    with pytest.raises(StorageError):
        decode_holdings(data)
    opened(fs).close()
    assert "going on without the record of a data directory" in caplog.text
    record = read_holdings(fs, DATA)
    assert record is not None
    assert record.partitions.keys() == {"test-0", "test-1"}


def test_a_record_that_cannot_be_read_is_done_without(
    fs: FaultyFileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    """A bad sector under it costs what it knew."""
    filled(fs)
    number = next(
        call.number
        for call in traced(fs.snapshot())
        if call.path == FILE and call.name == "read"
    )
    again = fs.snapshot()
    again.fail_at(number, errno.EIO)
    bench = opened(again)
    assert "error=EIO" in caplog.text
    assert log_of(bench).state is LogState.OPEN
    bench.close()


def traced(fs: FaultyFileSystem):
    opened(fs).close()
    return fs.log


def test_a_fresh_directory_starts_in_silence(
    fs: FaultyFileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    """And one from before this record gets its own at the first start."""
    opened(fs).close()
    assert [each for each in caplog.records if each.levelno > logging.INFO] == []
    first = read_holdings(fs, DATA)
    assert first is not None
    assert (len(first.identity), first.partitions) == (32, {})
    filled(fs)
    fs.unlink(FILE)
    bench = opened(fs)
    assert len(content_of(log_of(bench))) == 480
    bench.close()
    second = read_holdings(fs, DATA)
    assert second is not None
    assert second.identity != first.identity
    assert second.partitions["test-0"] == Extent(Offset(0), Offset(480))
    assert [each for each in caplog.records if each.levelno > logging.INFO] == []


def test_it_is_written_when_segments_roll_and_at_stops(fs: FaultyFileSystem) -> None:
    """At most once in an interval, with synced ends alone; only a stop seals it."""
    clock = ManualClock()
    settings = BrokerConfig(
        system=SystemConfig(data_path=str(DATA), segment_bytes_max=240),
        limits=LimitsConfig(free_bytes_min=0),
    )
    bench = StorageBench(fs, settings, clock)
    bench.open()

    def tick() -> tuple[bool, Extent | None]:
        bench.manager.tick(clock.monotonic_s())
        bench.run()
        record = read_holdings(fs, DATA)
        assert record is not None
        return record.is_sealed, record.partitions.get("test-0")

    assert tick() == (False, None)
    put(bench)
    assert tick() == (False, Extent(Offset(0), Offset(120)))
    clock.advance_s(RECORD_INTERVAL_S)
    put(bench, LOG, 1)
    put(bench, LOG, 1)
    assert tick() == (False, Extent(Offset(0), Offset(360)))
    put(bench, LOG, 4)
    assert tick() == (False, Extent(Offset(0), Offset(360)))
    clock.advance_s(RECORD_INTERVAL_S)
    assert tick() == (False, Extent(Offset(0), Offset(840)))
    writes = sum(call.name == "rename" for call in fs.log)
    clock.advance_s(RECORD_INTERVAL_S)
    assert tick() == (False, Extent(Offset(0), Offset(840)))
    assert sum(call.name == "rename" for call in fs.log) == writes
    put(bench)
    bench.close()
    last = read_holdings(fs, DATA)
    assert last is not None
    assert (last.is_sealed, last.partitions) == (
        True, {"test-0": Extent(Offset(0), Offset(960))},
    )  # fmt: skip


def live(fs: FaultyFileSystem) -> tuple[FaultyFileSystem, list[Ticket]]:
    """Two lives with rolls, records in between, and a clean stop; return what is left.

    After a failed sync of a directory the second one is on the disk of a reboot, which
    Linux insists on.
    """
    tickets: list[Ticket] = []
    for _ in range(2):
        clock = ManualClock()
        settings = BrokerConfig(
            system=SystemConfig(data_path=str(DATA), segment_bytes_max=120),
            limits=LimitsConfig(free_bytes_min=0),
        )
        bench = StorageBench(fs, settings, clock)
        with suppress(StorageError):
            bench.open()
            for number in range(4):
                ticket = Ticket()
                bench.append(log_of(bench), [b"x" * 100], ticket)
                tickets.append(ticket)
                bench.run()
                clock.advance_s(RECORD_INTERVAL_S)
                if number % 2:
                    bench.manager.tick(clock.monotonic_s())
                    bench.run()
        if bench.manager.directories():
            bench.close()
        assert fs.open_paths() == []
        if any(call.name == "sync_directory" and call.error for call in fs.log):
            fs = fs.crash(keep_random(len(fs.log)))
    return fs, tickets


@pytest.mark.slow
def test_no_failed_call_makes_a_record_of_more_than_there_is() -> None:
    """Whichever call fails, and with anything that a power cut leaves: no start misses
    anything, and what was acknowledged is there.
    """
    trial = FaultyFileSystem()
    live(trial)
    touched = [call.number for call in trial.log if call.path.name.startswith("hold")]
    assert len(touched) > 20
    errors = (errno.EIO, errno.ENOSPC, errno.EMFILE)
    for number, error in failures(trial.calls, errors):
        fs = FaultyFileSystem()
        fs.fail_at(number, error)
        fs, tickets = live(fs)
        stored = sum(ticket.is_stored for ticket in tickets)
        for choose in (keep_none, keep_all, keep_random(number)):
            bench = opened(fs.crash(choose), segment_bytes_max=120)
            log = log_of(bench)
            assert log.state is LogState.OPEN, log.damage
            assert log.high_watermark >= 120 * stored
            bench.close()


@pytest.mark.slow
def test_a_power_cut_leaves_a_record_of_what_is_there(seed: int) -> None:
    """At every sync, with any of what was not synced kept: the old record or the new
    one, and no start misses anything.
    """
    fs = FaultyFileSystem()

    def scenario() -> None:
        live(fs)

    points = crash_points(fs, scenario, lambda: None)
    for number, point in enumerate(points):
        for choose in (keep_none, keep_all, keep_random(seed + number)):
            disk = point.disk.crash(choose)
            bench = opened(disk, segment_bytes_max=120)
            assert log_of(bench).state is LogState.OPEN, log_of(bench).damage
            bench.close()


# -- a partition with less ------------------------------------------------------------


def drop_partition(fs: FaultyFileSystem) -> None:
    fs.rename(DATA / "test-0", AWAY)


def drop_first_segment(fs: FaultyFileSystem) -> None:
    remove(fs, 0)


def drop_last_segments(fs: FaultyFileSystem) -> None:
    remove(fs, 480)
    remove(fs, 360)


def drop_all_segments(fs: FaultyFileSystem) -> None:
    for offset in range(0, 600, 120):
        remove(fs, offset)


@pytest.mark.parametrize(
    ("drop", "text", "lost", "next_good"),
    [
        (drop_partition, "partition is missing: expected offsets 0 to 480", 0, None),
        (drop_first_segment, "expected the log start 0, got 120", 0, 120),
        (drop_last_segments, "expected 480, got 360", 360, None),
        (drop_all_segments, "has no segment: expected offsets 0 to 480", 0, None),
    ],
)
def test_a_partition_that_holds_less_is_stopped(
    fs: FaultyFileSystem,
    drop: Callable[[FaultyFileSystem], None],
    text: str,
    lost: int,
    next_good: int | None,
) -> None:
    """It says what was there and what to do; the others go on; a restart forgets
    nothing, and gets of what is missing say so.
    """
    filled(fs)
    fs.make_directory(DATA)
    drop(fs)
    for _ in range(2):
        bench = opened(fs, segment_bytes_max=120)
        log = log_of(bench)
        assert log.state is LogState.STOPPED
        (damage,) = log.damage
        assert text in damage.detail
        assert str(DATA) in damage.detail
        assert "metaq accept-loss /data" in damage.detail
        with pytest.raises(CorruptRecordError) as refused:
            log.read(Offset(lost), 100)
        assert refused.value.next_good_offset == next_good
        with pytest.raises(LogOfflineError):
            bench.append(log, [b"x"], Ticket())
        put(bench, OTHER)
        bench.close()
        assert fs.open_paths() == []


def drop_a_middle_and_the_last(fs: FaultyFileSystem) -> None:
    remove(fs, 120)
    drop_last_segments(fs)


Named = list[tuple[LogId, Path, Offset | None, Offset | None, str]]


def checked(
    fs: FaultyFileSystem, directory: Path = DATA, *, in_use: bool = False
) -> Named:
    """Return what `metaq verify` names."""
    report = verify_directory(
        fs, directory, in_use=in_use, unsynced_bytes_max=UNSYNCED_BYTES_MAX
    )
    return [
        (each.log_id, each.path, each.offset, each.next_good_offset, each.detail)
        for each in report.findings
    ]


def stopped_for(bench: StorageBench) -> Named:
    """Return what a start names."""
    return [
        (log.log_id, each.path, each.offset, each.next_good_offset, each.detail)
        for log in bench.manager.logs().values()
        for each in log.damage
    ]


@pytest.mark.parametrize(
    "drop",
    [
        drop_partition,
        drop_first_segment,
        drop_last_segments,
        drop_all_segments,
        drop_a_middle_and_the_last,
    ],
)
def test_a_check_names_what_a_start_does(
    fs: FaultyFileSystem, drop: Callable[[FaultyFileSystem], None]
) -> None:
    """Before the start, beside the broker, when it is killed and at the start after it:
    the same ranges, for the data directory as for the partition; none for the others.
    """
    filled(fs)
    drop(fs)
    before = checked(fs)
    assert len(before) == (2 if drop is drop_a_middle_and_the_last else 1)
    bench = opened(fs)
    assert before == stopped_for(bench)
    put(bench, OTHER)
    assert checked(fs, in_use=True) == before
    if drop not in {drop_partition, drop_all_segments}:
        assert checked(fs, DATA / "test-0", in_use=True) == before
    assert checked(fs, DATA / "test-1", in_use=True) == []
    killed = fs.crash(keep_none)
    assert checked(killed) == before
    again = opened(killed)
    assert stopped_for(again) == before
    again.close()
    bench.close()
    assert checked(fs) == before
    accept(fs)
    accepted = [each for each in checked(fs) if "by /data/holdings" in each[-1]]
    assert accepted == []


@pytest.mark.parametrize("is_made_again", [False, True])
def test_a_topic_that_is_deleted_during_a_check_is_no_loss(
    fs: FaultyFileSystem, is_made_again: bool
) -> None:
    """The record that was read still names it; its log may begin at 0 again."""
    filled(fs)
    bench = opened(fs)

    def delete(operation: Operation) -> None:
        if operation.name == "read" and operation.path == FILE:
            fs.on_call(None)
            bench.manager.forget([LOG], lambda _error: None)
            bench.run()
            fs.rename(DATA / "test-0", AWAY)
            if is_made_again:
                put(bench)

    fs.on_call(delete)
    report = verify_directory(
        fs, DATA, in_use=True, unsynced_bytes_max=UNSYNCED_BYTES_MAX
    )
    assert (report.log_count, report.findings) == (1 + is_made_again, ())
    bench.close()


def accept(fs: FaultyFileSystem) -> None:
    record = read_holdings(fs, DATA) or Holdings(identity="", written_ms=Millis(0))
    write_holdings(fs, DATA, replace(record, is_accepted=True))


@pytest.mark.parametrize(
    ("drop", "extent"),
    [
        (drop_partition, Extent(Offset(480), Offset(480))),
        (drop_all_segments, Extent(Offset(480), Offset(480))),
        (drop_first_segment, Extent(Offset(120), Offset(480))),
        (drop_last_segments, Extent(Offset(0), Offset(360))),
    ],
)
def test_an_accepted_loss_is_taken_once(
    fs: FaultyFileSystem,
    drop: Callable[[FaultyFileSystem], None],
    extent: Extent,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The present contents are the new record; lost offsets are not used again."""
    filled(fs)
    drop(fs)
    opened(fs).close()
    accept(fs)
    bench = opened(fs)
    assert "loss accepted" in caplog.text
    log = log_of(bench)
    assert (log.state, log.log_start_offset, log.high_watermark) == (
        LogState.OPEN, extent.start, extent.end,
    )  # fmt: skip
    put(bench)
    bench.close()
    record = read_holdings(fs, DATA)
    assert record is not None
    assert not record.is_accepted
    assert record.partitions["test-0"] == Extent(extent.start, Offset(extent.end + 120))
    drop_partition(fs) if drop is not drop_partition else fs.rename(
        DATA / "test-0", Path("/again")
    )
    bench = opened(fs)
    assert log_of(bench).state is LogState.STOPPED
    bench.close()


HELD = {
    "a-0": Extent(Offset(100), Offset(500)),
    "b-0": Extent(Offset(0), Offset(50)),
}


@pytest.mark.parametrize(
    ("found", "is_sealed", "was_visited", "lost"),
    [
        ({}, True, False, set()),
        ({"a-0": Extent(Offset(200), Offset(600))}, True, False, set()),
        ({"a-0": Extent(Offset(200), Offset(500))}, True, False, {"a-0"}),
        ({"a-0": Extent(Offset(200), Offset(500))}, False, False, set()),
        ({"a-0": Extent(Offset(200), Offset(500))}, True, True, set()),
        (
            {"a-0": Extent(Offset(200), Offset(500)),
             "b-0": Extent(Offset(0), Offset(60))},
            True, False, set(),
        ),
        (
            {"a-0": Extent(Offset(200), Offset(500)),
             "new-0": Extent(Offset(0), Offset(9))},
            True, False, set(),
        ),
        ({"a-0": Extent(Offset(100), Offset(499))}, False, True, {"a-0"}),
        ({"a-0": Extent(Offset(50), Offset(500))}, True, False, set()),
        ({"a-0": None}, False, True, {"a-0"}),
    ],
)  # fmt: skip
def test_only_less_is_a_loss(
    found: dict[str, Extent | None], is_sealed: bool, was_visited: bool, lost: set[str]
) -> None:
    """Later ends are appends. Later starts are retention, but for what was sealed and
    not touched by another broker since.
    """
    record = replace(RECORD, is_sealed=is_sealed, partitions=HELD)
    losses = find_losses(DATA, record, {**HELD, **found}, was_visited=was_visited)
    assert losses.keys() == lost


def test_a_java_journal_that_changed_explains_a_later_start(
    fs: FaultyFileSystem,
) -> None:
    """A Java broker writes its journal at its stop, and its retention leaves no
    note."""
    filled(fs)
    drop_first_segment(fs)
    record = read_holdings(fs, DATA)
    assert record is not None
    fs.set_wall_ms(record.written_ms + 1)
    fs.make_directory(DATA / "transactions")
    fs.open_append(DATA / "transactions" / "heuristic.log", create=True).close()
    bench = opened(fs)
    assert log_of(bench).state is LogState.OPEN
    bench.close()


def test_retention_between_two_starts_is_no_loss(fs: FaultyFileSystem) -> None:
    """A kill seals nothing: what was removed after the last record stays unsaid."""
    filled(fs)
    opened(fs)
    after = fs.crash(keep_none)
    after.unlink(segment(0))
    after.unlink(segment(0).with_suffix(".spans"))
    bench = opened(after)
    assert log_of(bench).state is LogState.OPEN
    with pytest.raises(OffsetOutOfRangeError):
        log_of(bench).read(Offset(0), 10)
    bench.close()
