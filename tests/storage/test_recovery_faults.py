"""Recovery under faults: every call fails once, killed at every call, power cut."""

import errno
from collections.abc import Callable

import pytest

from metaq.errors import NoSpaceError, StorageError
from metaq.model import Offset
from metaq.storage.segment import segment_file_name
from metaq.storage.span_index import decode_index
from tests.cases import for_each
from tests.rigs.fs import FaultyFileSystem, Operation, crash_points, keep_random
from tests.sampling import failures
from tests.storage.logs import (
    DIRECTORY,
    content,
    everything,
    put_file,
    put_segment,
    record,
)
from tests.storage.test_recovery import BYTES, META, disk_with_log, recover

ACTIVE = segment_file_name(Offset(len(BYTES)))
ACKNOWLEDGED = record(6) + record(7, 60)


class KilledError(BaseException):
    """The process is gone: nothing catches this on the way."""


def troubled() -> FaultyFileSystem:
    """Return a disk on which every pass has something to do."""
    disk = disk_with_log()
    put_segment(disk, len(BYTES), [[record(6)], [record(7, 60)]])
    put_file(disk, ACTIVE, record(8) + b"torn")
    put_file(disk, "5.spans", b"of a deleted segment")
    put_file(disk, f"{META}.zip.tmp", b"half an archive")
    for offset in range(8):
        put_file(disk, f"{META}.torn-{offset}", b"old")
    return disk


def without_kept(disk: FaultyFileSystem) -> dict[str, bytes]:
    """Return what has to be the same after any number of starts."""
    return {n: data for n, data in everything(disk).items() if "torn-" not in n}


def calls_of_a_recovery() -> int:
    disk = troubled()
    before = disk.calls
    recover(disk)
    return disk.calls - before


CALLS = calls_of_a_recovery()
EXPECTED_DISK = troubled()
recover(EXPECTED_DISK)
EXPECTED = without_kept(EXPECTED_DISK)


def test_the_scenario_ends_with_every_acknowledged_record() -> None:
    """The yardstick of the tests below."""
    assert EXPECTED[ACTIVE] == ACKNOWLEDGED + record(8)
    assert EXPECTED[META] == BYTES
    assert CALLS > 40


@for_each("number, error", failures(CALLS, (errno.EIO, errno.ENOSPC, errno.EINTR)))
def test_any_call_may_fail_once(number: int, error: int, caplog) -> None:
    """It is reported or made good, nothing stays open, and the next start is as ever.

    An index that could not be read was made again, with times that are estimates.
    """
    caplog.clear()
    disk = troubled()
    disk.fail_at(disk.calls + number, error)
    try:
        result = recover(disk)
    except StorageError:
        assert disk.open_paths() == []
        assert error != errno.EINTR
    else:
        assert result.damage == ()
        assert result.segments[-1].size_bytes == len(ACKNOWLEDGED + record(8))
    assert content(disk, ACTIVE).startswith(ACKNOWLEDGED + record(8))
    result = recover(disk)
    assert (result.damage, result.record_count) == ((), 8)
    found, expected = without_kept(disk), dict(EXPECTED)
    if "going on without a span index" in caplog.text:
        name, base = ACTIVE.replace(".meta", ".spans"), Offset(len(BYTES))
        made = decode_index(found.pop(name), base)
        lost = decode_index(expected.pop(name), base)
        assert made is not None
        assert lost is not None
        assert made.end_offset == lost.end_offset
        assert made.record_count == lost.record_count
    assert found == expected


def test_want_of_room_never_keeps_a_log_from_starting() -> None:
    """On a disk that stays full the log opens, without an index writer if need be."""
    disk = troubled()
    disk.set_capacity(1)
    try:
        result = recover(disk)
    except NoSpaceError:  # pragma: no cover
        pytest.fail("recovery needs room")
    assert result.segments[-1].size_bytes == len(ACKNOWLEDGED + record(8))


def test_entries_that_nobody_believes_do_not_outlive_a_start_without_room() -> None:
    """Questions believe entries one by one, and the log gets other bytes there."""
    disk = disk_with_log()
    put_segment(disk, len(BYTES), [[record(6, 60)], [record(7, 60)], [record(8, 60)]])
    spans = ACTIVE.replace(".meta", ".spans")
    whole = content(disk, spans)
    disk.flip_bit(DIRECTORY / spans, 8 * (2 * 32 + 5))
    disk.set_capacity(1)
    recover(disk)
    assert content(disk, spans) == whole[: 2 * 32]


def kill_at(number: int) -> Callable[[Operation], None]:
    def hook(operation: Operation) -> None:
        if operation.number == number:
            raise KilledError

    return hook


@pytest.mark.slow
@for_each("number", range(1, CALLS + 1))
def test_a_kill_at_any_call_is_followed_by_the_same_bytes(number: int) -> None:
    """The second start finishes what the first began, the third finds nothing."""
    disk = troubled()
    disk.on_call(kill_at(disk.calls + number))
    with pytest.raises(KilledError):
        recover(disk)
    found = disk.snapshot()
    recover(found)
    assert without_kept(found) == EXPECTED
    kept = {n for n in found.list_directory(DIRECTORY) if n.startswith(ACTIVE + ".")}
    assert kept == {f"{ACTIVE}.torn-{len(BYTES + ACKNOWLEDGED + record(8))}"}
    before = everything(found)
    assert recover(found).torn is None
    assert everything(found) == before


@pytest.mark.parametrize("seed", range(6))
def test_a_power_cut_during_recovery_loses_nothing_acknowledged(seed: int) -> None:
    """At every sync, with any unsynced pages kept, the next start is whole."""
    disk = troubled()
    for point in crash_points(disk, lambda: recover(disk), lambda: None):
        found = point.disk.crash(keep_random(seed))
        result = recover(found)
        assert result.damage == ()
        assert content(found, META) == BYTES
        assert content(found, ACTIVE).startswith(ACKNOWLEDGED)
