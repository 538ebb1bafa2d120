"""High watermarks of a replica over restarts, and what is not believed."""

import errno
from collections.abc import Mapping
from pathlib import Path
from zlib import crc32

import pytest

from metaq.model import LogId, Offset
from metaq.storage.cut import cut_log
from metaq.storage.log_state import LogState
from metaq.storage.partition_log import PartitionLog
from metaq.storage.watermarks import (
    SLOT_BYTES,
    WATERMARKS_NAME,
    Watermark,
    WatermarkFile,
    decode_watermarks,
    encode_header,
    encode_slot,
    read_watermarks,
)
from metaq.testing.clock import ManualClock
from tests.rigs.fs import (
    FaultyFileSystem,
    Operation,
    crash_points,
    keep_none,
    keep_random,
)
from tests.rigs.storage import StorageBench
from tests.storage.support import DATA, LOG, OTHER, RECORD, config, content_of, put
from tests.storage.test_partition_log_following import copy

NUMBERS = {LOG: 2**64 - 1, OTHER: 7}
FILE = DATA / WATERMARKS_NAME
MARK = Watermark(7, Offset(2 * RECORD), Offset(0))


@pytest.fixture
def fs() -> FaultyFileSystem:
    """Return a disk with a data directory."""
    disk = FaultyFileSystem(has_syncs=False)
    disk.make_directory(DATA)
    return disk


def replica(
    fs: FaultyFileSystem, numbers: Mapping[LogId, int] = NUMBERS
) -> tuple[StorageBench, ManualClock]:
    """Open the logs of a replica."""
    clock = ManualClock()
    bench = StorageBench(fs, config(segment_bytes_max=3 * RECORD), clock)
    bench.manager.open(numbers=numbers)
    bench.next_id = max(0, bench.manager.last_message_id()) + 1
    return bench, clock


def log_of(bench: StorageBench, log_id: LogId = LOG) -> PartitionLog:
    settings = bench.config.topic(log_id.topic)
    number = NUMBERS[log_id]
    return bench.manager.get_or_create(log_id, settings, number=number)


def tick(bench: StorageBench, clock: ManualClock, after_s: float = 1.0) -> None:
    clock.advance_s(after_s)
    bench.manager.tick(clock.monotonic_s())
    bench.run()


def marks(fs: FaultyFileSystem) -> dict[int, Watermark]:
    return read_watermarks(fs, DATA)


def writes(fs: FaultyFileSystem, since: int) -> list[str]:
    return [each.name for each in fs.log[since:] if each.path == FILE]


# -- bytes


def test_the_bytes_of_a_file() -> None:
    """Pinned: a header and a slot."""
    header = b"MQ-MARKS" + bytes([0, 0, 0, 1]) + bytes(16)
    assert encode_header() == header + crc32(header).to_bytes(4, "big")
    slot = bytes([0, 0, 0, 0, 0, 0, 0, 7]) + (240).to_bytes(8, "big") + bytes(12)
    assert encode_slot(MARK) == slot + crc32(slot).to_bytes(4, "big")
    assert decode_watermarks(encode_header() + encode_slot(MARK)) == {7: MARK}


def test_every_damaged_bit_costs_its_slot_and_no_other() -> None:
    """One in the header costs all of them."""
    other = Watermark(8, Offset(9), Offset(3))
    data = encode_header() + encode_slot(MARK) + encode_slot(other)
    for bit in range(8 * len(data)):
        found = bytearray(data)
        found[bit // 8] ^= 1 << bit % 8
        expected = {8: other}
        if bit < 8 * SLOT_BYTES:
            assert decode_watermarks(bytes(found)) is None
            continue
        if bit >= 8 * 2 * SLOT_BYTES:
            expected = {7: MARK}
        assert decode_watermarks(bytes(found)) == expected
    for size in range(len(data)):
        whole = max(0, size // SLOT_BYTES - 1)
        assert len(decode_watermarks(data[:size]) or ()) == whole


def test_of_two_slots_of_one_log_the_higher_is_believed() -> None:
    """Each of them was true."""
    low = MARK._replace(high_watermark=Offset(1))
    data = encode_header() + encode_slot(MARK) + encode_slot(low)
    assert decode_watermarks(data) == {7: MARK}


def test_a_file_that_cannot_be_read_counts_as_none(
    fs: FaultyFileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    """It is reported; the disk is believed otherwise."""
    assert marks(fs) == {}
    fs.write_atomically(FILE, b"x" * 99)
    assert marks(fs) == {}
    assert "header is damaged" in caplog.text
    fs.fail_at(fs.calls + 1, errno.EACCES)
    assert marks(fs) == {}
    assert "going on without watermarks" in caplog.text


def test_a_file_is_written_in_place_after_the_first_time(fs: FaultyFileSystem) -> None:
    """With the logs that are there, in slots that they keep; a stop syncs it."""
    file = WatermarkFile(fs, DATA, [MARK])
    file.write([MARK._replace(number=9)])
    assert marks(fs).keys() == {7, 9}
    size, before = fs.size_of(FILE), fs.calls
    file.write([MARK._replace(high_watermark=Offset(999))])
    assert [call.name for call in fs.log[before:]] == ["write"]
    assert fs.size_of(FILE) == size
    file.close([MARK._replace(number=10)])
    found = read_watermarks(fs.crash(keep_none), DATA)
    assert {number: each.high_watermark for number, each in found.items()} == {
        7: 999,
        9: MARK.high_watermark,
        10: MARK.high_watermark,
    }
    assert fs.open_paths() == []


def test_a_full_disk_leaves_older_watermarks(fs: FaultyFileSystem) -> None:
    """They are true as well."""
    file = WatermarkFile(fs, DATA, [MARK])
    fs.set_capacity(0)
    file.write([])
    assert marks(fs) == {}
    fs.set_capacity(1 << 20)
    file.write([])
    fs.set_capacity(0)
    file.write([MARK._replace(number=9)])
    assert marks(fs) == {7: MARK}
    file.close([])


def test_a_lower_watermark_is_synced_and_a_higher_one_stays(
    fs: FaultyFileSystem,
) -> None:
    """Only where the file says more than it: a cut comes next."""
    file = WatermarkFile(fs, DATA, [MARK])
    for _ in range(2):
        file.lower(MARK._replace(high_watermark=Offset(RECORD)))
        assert read_watermarks(fs.crash(keep_none), DATA)[7].high_watermark == RECORD
    file.write([MARK])
    file.lower(MARK._replace(high_watermark=Offset(1)))
    assert read_watermarks(fs.crash(keep_none), DATA)[7].high_watermark == 1
    before = fs.calls
    file.lower(MARK)
    file.lower(MARK._replace(number=99))
    assert fs.calls == before
    file.abandon()


# -- logs


def test_a_start_shows_what_was_known_and_no_more(fs: FaultyFileSystem) -> None:
    """The rest is there, and may still be cut; the log follows."""
    bench, _clock = replica(fs)
    log = log_of(bench)
    assert log.state is LogState.FOLLOWING
    copy(bench, log, 2), copy(bench, log, 2)
    bench.run()
    log.set_bound(Offset(2 * RECORD))
    bench.close()
    bench, _clock = replica(fs)
    log = log_of(bench)
    assert log.state is LogState.FOLLOWING
    assert log.high_watermark == 2 * RECORD
    assert len(content_of(log)) == 2 * RECORD
    assert log.next_offset == 4 * RECORD
    assert not bench.manager.known or not bench.manager.known.too_short
    log.set_bound(Offset(4 * RECORD))
    assert len(content_of(log)) == 4 * RECORD
    bench.close()


@pytest.mark.parametrize("lost", ["file", "slot", "number"])
def test_a_log_without_a_watermark_shows_nothing(
    fs: FaultyFileSystem, lost: str
) -> None:
    """It begins to at its log start, until a leader says more."""
    bench, _clock = replica(fs)
    log = log_of(bench)
    copy(bench, log, 2)
    bench.run()
    log.set_bound(Offset(2 * RECORD))
    bench.close()
    numbers: dict[LogId, int] = dict(NUMBERS)
    match lost:
        case "file":
            fs.unlink(FILE)
        case "slot":
            fs.flip_bit(FILE, 8 * (SLOT_BYTES + 9))
        case "number":
            # The topic was deleted, and made again under its name.
            numbers[LOG] = 55
    bench, _clock = replica(fs, numbers)
    log = log_of(bench)
    assert log.high_watermark == log.log_start_offset == 0
    assert log.next_offset == 2 * RECORD
    bench.close()


def test_bytes_that_are_gone_below_a_watermark_are_reported(
    fs: FaultyFileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    """They were readable, so every in-sync copy has had them: this one lacks them."""
    bench, _clock = replica(fs)
    log = log_of(bench)
    copy(bench, log, 2)
    bench.run()
    log.set_bound(Offset(2 * RECORD))
    bench.close()
    mark = Watermark(NUMBERS[LOG], Offset(9 * RECORD), Offset(0))
    fs.write_atomically(FILE, encode_header() + encode_slot(mark))
    bench, _clock = replica(fs)
    assert bench.manager.known is not None
    assert bench.manager.known.too_short == {LOG}
    assert log_of(bench).high_watermark == 2 * RECORD
    text = f"partition=test-0 expected_end={9 * RECORD} end={2 * RECORD}"
    assert caplog.text.count(text) == 1
    bench.close()


def test_watermarks_are_written_once_a_second_where_they_have_moved(
    fs: FaultyFileSystem,
) -> None:
    """However often they move; an idle log costs nothing."""
    bench, clock = replica(fs)
    log, other = log_of(bench), log_of(bench, OTHER)
    for each in (log, other):
        copy(bench, each)
        bench.run()
        each.set_bound(Offset(RECORD))
    tick(bench, clock)
    assert {each.high_watermark for each in marks(fs).values()} == {RECORD}
    before = fs.calls
    for number in range(2, 6):
        copy(bench, log)
        bench.run()
        log.set_bound(Offset(number * RECORD))
        tick(bench, clock, 0.1)
    assert writes(fs, before) == []
    tick(bench, clock, 0.6)
    assert writes(fs, before) == ["write"]
    assert marks(fs)[NUMBERS[LOG]].high_watermark == 5 * RECORD
    before = fs.calls
    tick(bench, clock, 5)
    assert writes(fs, before) == []
    bench.close()
    assert fs.open_paths() == []


@pytest.mark.slow
def test_a_watermark_is_never_higher_than_what_was_readable(
    fs: FaultyFileSystem,
) -> None:
    """Whenever the power goes; so it is at most the end of the log."""
    bench, clock = replica(fs)
    log = log_of(bench)
    for number in range(1, 12):
        copy(bench, log)
        bench.run()
        log.set_bound(Offset(number * RECORD))
        tick(bench, clock)
        for choose in (keep_none, lambda count: count - 1):
            disk = fs.crash(choose)
            again, _clock = replica(disk)
            found = log_of(again)
            assert again.manager.known is not None
            assert not again.manager.known.too_short
            assert found.high_watermark <= number * RECORD
            assert not found.damage
            again.close()
    bench.close()


def test_what_is_after_the_high_watermark_may_be_cut_between_two_starts(
    fs: FaultyFileSystem,
) -> None:
    """The record of the data directory does not call that a loss."""
    bench, _clock = replica(fs)
    log = log_of(bench)
    for _ in range(4):
        copy(bench, log)
    bench.run()
    log.set_bound(Offset(2 * RECORD))
    bench.close()
    for _ in range(2):
        bench, _clock = replica(fs)
        assert log_of(bench).next_offset == 4 * RECORD
        bench.close()
    path = DATA / "test-0" / f"{0:020d}.meta"
    file = fs.open_append(path, create=False)
    file.truncate(type(fs.size_of(path))(2 * RECORD))
    file.close()
    fs.unlink(path.with_suffix(".spans"))
    bench, _clock = replica(fs)
    assert not log_of(bench).damage
    assert log_of(bench).next_offset == 2 * RECORD
    bench.close()


def test_a_disk_error_of_the_file_takes_the_directory_offline(
    fs: FaultyFileSystem,
) -> None:
    """Nothing is believed of it, and nothing stays open."""
    bench, clock = replica(fs)
    log = log_of(bench)
    copy(bench, log)
    bench.run()
    log.set_bound(Offset(RECORD))
    tick(bench, clock)
    copy(bench, log)
    bench.run()
    log.set_bound(Offset(2 * RECORD))
    clock.advance_s(1)

    def fail(call: Operation) -> None:
        if call.path == FILE:
            raise OSError(errno.EIO, "")

    fs.on_call(fail)
    tick(bench, clock)
    fs.on_call(None)
    assert log.state is LogState.OFFLINE
    bench.close()
    assert fs.open_paths() == []


def test_a_broker_without_replicas_has_no_such_file(fs: FaultyFileSystem) -> None:
    """Nor writes anything for it."""
    clock = ManualClock()
    bench = StorageBench(fs, config(), clock)
    bench.open()
    log = bench.manager.get_or_create(LOG, bench.config.topic("test"))
    put(bench, log)
    bench.run()
    tick(bench, clock)
    assert not log.log_dir.unwritten_watermarks
    bench.close()
    names: set[Path] = {each.path for each in fs.log}
    assert FILE not in names


def forced_cut(bench: StorageBench) -> list[Exception | None]:
    """Cut a log below its high watermark, as under a leader that was forced."""
    done: list[Exception | None] = []

    def cut(error: Exception | None) -> None:
        done.append(error)
        if error is None:
            cut_log(bench.manager, LOG, Offset(RECORD), done.append)

    bench.manager.lower_high_watermarks({LOG: Offset(RECORD)}, cut)
    bench.run()
    return done


@pytest.mark.slow
def test_a_start_knows_of_a_forced_cut_whenever_the_power_goes(seed: int) -> None:
    """It misses nothing, neither by its watermark nor by the record."""
    disk = FaultyFileSystem(has_syncs=False)
    disk.make_directory(DATA)
    bench, _clock = replica(disk)
    copy(bench, log_of(bench), 1), copy(bench, log_of(bench), 2)
    bench.run()
    log_of(bench).set_bound(Offset(3 * RECORD))
    bench.close()
    fs, done = disk.snapshot(), list[Exception | None]()

    def life() -> None:
        bench, _clock = replica(fs)
        done.extend(forced_cut(bench))
        bench.close()

    points = crash_points(fs, life, lambda: len(done))
    assert len(points) > 10
    for at, point in enumerate(points):
        for sample in range(3):
            found = point.disk.crash(keep_random(seed + 100 * at + sample))
            bench, _clock = replica(found)
            log = log_of(bench)
            assert not log.damage
            assert not bench.manager.lacks_bytes
            assert RECORD <= log.next_offset <= 3 * RECORD
            if point.progress == 2:
                assert log.next_offset == RECORD
            assert forced_cut(bench) == [None, None]
            assert log_of(bench).high_watermark <= log_of(bench).next_offset == RECORD
            bench.close()


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_whichever_call_of_a_forced_cut_fails_it_is_reported(
    number: int, seed: int
) -> None:
    """Or done; a start that misses bytes says so, and has no damage."""
    disk = FaultyFileSystem(has_syncs=False)
    disk.make_directory(DATA)
    bench, _clock = replica(disk)
    copy(bench, log_of(bench), 3)
    bench.run()
    log_of(bench).set_bound(Offset(3 * RECORD))
    bench.close()
    bench, _clock = replica(disk.snapshot())
    before = bench.fs.calls  # type: ignore[attr-defined]
    forced_cut(bench)
    count = bench.fs.calls - before  # type: ignore[attr-defined]
    for call in range(1, count + 1):
        fs = disk.snapshot()
        bench, _clock = replica(fs)
        fs.fail_at(fs.calls + call, number)
        done = forced_cut(bench)
        is_online = log_of(bench).state is LogState.FOLLOWING
        bench.close()
        assert fs.open_paths() == []
        assert len(done) == 2 or done[0] is not None
        found, _clock = replica(fs.crash(keep_random(seed + call)))
        assert not log_of(found).damage
        assert not found.manager.lacks_bytes or not is_online or done != [None, None]
        found.close()
