"""Replace the bytes of a damaged range of a log by those of another copy.

    pieces      written in place, each synced, by the storage thread, so that a cut of
                the log or setting it aside comes before or after
    check       against its own span index and the records; only then the range is good
    end         a log in use drops the range; a stopped log is opened again

A range that a crash leaves half written is still damaged. Bytes of a log do not change,
so it is harmless to write the right ones again.
"""

import asyncio
from functools import partial
from pathlib import Path
from typing import NamedTuple

from metaq.errors import StorageError
from metaq.fs import FileSystem
from metaq.model import Offset, Position, SizeBytes
from metaq.storage.listing import parse_base_offset
from metaq.storage.log_manager import LogManager
from metaq.storage.log_removal import carry_out
from metaq.storage.log_state import LogState
from metaq.storage.partition_log import PartitionLog
from metaq.storage.segment import META_SUFFIX, Damage, Segment
from metaq.storage.slices import damage_in


class Piece(NamedTuple):
    """The part of a damaged range that is in one file."""

    segment: Segment
    """The file's segment, with its expected size."""
    end: Offset


def piece_at(log: PartitionLog, damage: Damage, offset: Offset) -> Piece | None:
    """Return the part of a damaged range from an offset on, or None at its end.

    Args:
        log: the log with the range.
        damage: the range; its path is a missing segment's own file.
        offset: inside the range, or its end.
    """
    end, following = damage.next_good_offset, log.segments.following(offset)
    if end is None or offset >= end:
        return None
    stop = end if following is None else min(end, following.base_offset)
    own = parse_base_offset(damage.path.name.removesuffix(META_SUFFIX))
    found = log.segments.find(offset)
    path, base = damage.path, own
    if own != offset:
        if found is None:
            return None
        path, base = found.path, found.base_offset
    assert base is not None
    whole = log.synced_end if following is None else following.base_offset
    segment = Segment(path, base, SizeBytes(whole - base))
    return Piece(segment, stop)


async def write_piece(
    logs: LogManager, log: PartitionLog, segment: Segment, offset: Offset, data: bytes
) -> None:
    """Write bytes of a log in place, and sync them.

    Args:
        logs: has the log.
        log: damaged in this range, which is below its high watermark.
        segment: from `piece_at`.
        offset: offset of the first byte.
        data: bytes of a copy that is equal there.

    Raises:
        StorageError: they are not written or not synced; or the log was replaced, or
            may be cut there.
    """
    _require_same(logs, log)
    if offset + len(data) > log.high_watermark:
        raise StorageError(f"partition {log.log_id} may be cut at {offset}")
    write = partial(write_bytes, path=segment.path, at=segment.position_of(offset))
    await carry_out(partial(logs.change_file, log.log_id, partial(write, data=data)))


def write_bytes(fs: FileSystem, *, path: Path, at: Position, data: bytes) -> None:
    """Write bytes of a file in place, and sync it; a missing file is created.

    Raises:
        StorageError: the disk refuses; some bytes may be written.
    """
    is_new = not fs.exists(path)
    with fs.open_update(path, create=is_new) as file:
        file.write_at(at, data)
        file.sync()
    if is_new:
        fs.sync_directory(path.parent)


def _require_same(logs: LogManager, log: PartitionLog) -> None:
    """Refuse a log that was set aside: a new one may have its name and files."""
    if logs.get(log.log_id) is not log:
        raise StorageError(f"partition {log.log_id} was made again")


async def damage_left(
    fs: FileSystem, log: PartitionLog, segment: Segment, start: Offset, end: Offset
) -> tuple[Damage, ...]:
    """Check a range that was written, on the reader threads of its directory.

    Returns:
        Damage there, according to its own index and the checksums of records.

    Raises:
        StorageError: the disk does not return the bytes.
    """

    def check() -> tuple[Damage, ...]:
        with fs.open_read(segment.path) as file:
            return damage_in(fs, file, segment, start, end, walks=True)

    return await asyncio.get_running_loop().run_in_executor(log.log_dir.reader, check)


async def finish(logs: LogManager, log: PartitionLog, mended: set[Damage]) -> bool:
    """Mark ranges of a log as good that were written and checked.

    Args:
        logs: has the log.
        log: in use, or stopped for damage that a start found.
        mended: the damaged ranges; all of them if the log is stopped.

    Returns:
        Whether the log was opened again; then it follows.

    Raises:
        StorageError: it was not opened, or is still damaged and stopped.
        ClosedError: it is closed.
    """
    _require_same(logs, log)
    if log.state is not LogState.STOPPED:
        for each in mended:
            log.on_mended(each)
        return False
    is_mended = mended.__contains__
    reopen = partial(logs.reopen, log.log_id, _leave_files, is_mended=is_mended)
    await carry_out(reopen)
    return True


def _leave_files(_fs: FileSystem, _directory: Path, _producer_count_max: int) -> None:
    """Change nothing: the files were written before."""
