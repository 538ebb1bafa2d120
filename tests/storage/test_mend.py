"""A damaged range is written again: where it is, and what a fault leaves."""

import asyncio
import errno
from functools import partial

import pytest

from metaq.errors import StorageError
from metaq.model import LogId, Offset, Position
from metaq.storage.log_state import LogState
from metaq.storage.mend import Piece, finish, piece_at, write_bytes, write_piece
from metaq.storage.partition_log import PartitionLog
from metaq.storage.segment import Damage
from tests.rigs.fs import FaultyFileSystem
from tests.rigs.storage import StorageBench
from tests.storage.support import LOG, content_of
from tests.storage.test_cut import BATCH, SEGMENT_BYTES, led

DAMAGED = range(SEGMENT_BYTES + 5, SEGMENT_BYTES + 30)
"""In the second of five segments."""


def damaged(fs: FaultyFileSystem) -> tuple[StorageBench, PartitionLog, bytes]:
    """Return a log with wrong bytes in a sealed segment, and its right ones."""
    bench, log, _batches = led(fs)
    log.set_bound(log.next_offset)
    good = content_of(log)
    path = log.segments.sealed[1].path
    with fs.open_update(path) as file:
        at = Position(DAMAGED.start - SEGMENT_BYTES)
        file.write_at(at, bytes(len(DAMAGED)))
        file.sync()
    return bench, log, good


def write(bench: StorageBench, log: PartitionLog, good: bytes) -> list[object]:
    """Have the range written; return what is reported."""
    segment = log.segments.sealed[1]
    change = partial(
        write_bytes,
        path=segment.path,
        at=segment.position_of(Offset(DAMAGED.start)),
        data=good[DAMAGED.start : DAMAGED.stop],
    )
    found: list[object] = []
    bench.manager.change_file(LOG, change, found.append)
    bench.run()
    return found


def test_a_range_that_was_written_is_as_it_was() -> None:
    """Before and after it nothing changes."""
    fs = FaultyFileSystem()
    bench, log, good = damaged(fs)
    assert content_of(log) != good
    assert write(bench, log, good) == [None]
    assert content_of(log) == good
    assert log.state is LogState.FOLLOWING


@pytest.mark.parametrize("name", ["open", "write", "sync"])
def test_a_write_that_fails_is_reported_and_may_be_repeated(name: str) -> None:
    """The directory stays online: what was wrong before may be wrong still."""
    fs = FaultyFileSystem()
    bench, log, good = damaged(fs)
    before = fs.calls
    assert write(bench, log, good) == [None]
    names = [each.name for each in fs.log[before:]]
    number = next(n for n, each in enumerate(names, 1) if each.startswith(name))
    fs.fail_at(fs.calls + number, errno.EIO)
    (error,) = write(bench, log, good)
    assert isinstance(error, StorageError)
    assert write(bench, log, good) == [None]
    assert content_of(log) == good


def test_a_file_that_is_missing_is_made() -> None:
    """Its name is durable, too."""
    fs = FaultyFileSystem()
    bench, log, good = damaged(fs)
    segment = log.segments.sealed[1]
    fs.unlink(segment.path)
    data = good[segment.base_offset : segment.end_offset]
    change = partial(write_bytes, path=segment.path, at=Position(0), data=data)
    found: list[object] = []
    bench.manager.change_file(LOG, change, found.append)
    bench.run()
    assert found == [None]
    assert fs.synced_bytes(segment.path) == data


def test_a_log_that_is_gone_is_not_written() -> None:
    """Another one may have its name by now."""
    bench, _log, _good = damaged(FaultyFileSystem())
    with pytest.raises(StorageError, match="other-0"):
        bench.manager.change_file(LogId("other", 0), print, print)


def test_a_range_is_cut_into_files() -> None:
    """Each piece ends with its file, the last one with the range."""
    _bench, log, _good = damaged(FaultyFileSystem())
    end = Offset(5 * BATCH)
    damage = Damage(log.segments.first.path, Offset(10), end, "test")
    found: list[tuple[int, int, int]] = []
    offset = damage.offset
    while (piece := piece_at(log, damage, offset)) is not None:
        found.append((piece.segment.base_offset, offset, piece.end))
        offset = piece.end
    bases = [each.base_offset for each in log.segments]
    assert found == [
        (bases[0], 10, bases[1]),
        (bases[1], bases[1], bases[2]),
        (bases[2], bases[2], end),
    ]


def test_a_missing_segment_is_named_by_its_own_file() -> None:
    """Also where recovery lets the one before reach to the next one."""
    _bench, log, _good = damaged(FaultyFileSystem())
    path, base = log.segments.sealed[2].path, log.segments.sealed[2].base_offset
    end = log.segments.sealed[2].end_offset
    piece = piece_at(log, Damage(path, base, end, "test"), base)
    assert isinstance(piece, Piece)
    assert (piece.segment.path, piece.segment.base_offset) == (path, base)
    assert piece.segment.end_offset == piece.end == end


def test_a_range_without_an_end_has_no_pieces() -> None:
    """It is not known how much there was."""
    _bench, log, _good = damaged(FaultyFileSystem())
    damage = Damage(log.segments.first.path, Offset(10), None, "test")
    assert piece_at(log, damage, Offset(10)) is None


def test_a_log_that_was_made_again_is_not_written() -> None:
    """Its bytes are not those of the one that has its name and files now."""
    bench, log, good = damaged(FaultyFileSystem())
    segment = log.segments.sealed[1]
    bench.manager.begin_again({LOG: (Offset(0), 4712)}, lambda _error: None)
    bench.run()
    assert bench.manager.get(LOG) is not log
    with pytest.raises(StorageError, match="made again"):
        asyncio.run(write_piece(bench.manager, log, segment, segment.base_offset, good))
    with pytest.raises(StorageError, match="made again"):
        asyncio.run(finish(bench.manager, log, set()))


def test_bytes_that_may_be_cut_are_not_written() -> None:
    """After a cut they would be after the end of the log."""
    bench, log, good = damaged(FaultyFileSystem())
    segment = log.segments.sealed[1]
    log.lower_high_watermark(segment.base_offset)
    with pytest.raises(StorageError, match="may be cut"):
        asyncio.run(write_piece(bench.manager, log, segment, segment.base_offset, good))
