"""Cut the end off the files of one partition.

A replica that follows a new leader drops what that leader does not have. The order of
the steps makes a crash between any two of them leave a log that opens, with all bytes
below the cut, and perhaps some after it, but never a hole:

    1  copy the bytes aside, `<name>.torn-<offset>`; they were never acknowledged
    2  remove later segments, newest first, the index of each before its file: an index
       after the end of a log would say that its segment is missing
    3  cut the index of the last segment
    4  write the producer file without batches that end later, and with those that it
       had forgotten for them
    5  cut the segment

Each step is durable before the next. An index, or a producer file, that is short costs
time or a repetition; one that says more than the bytes would be believed once other
bytes have come. After it the log is recovered, which makes index and notes whole.
"""

from functools import partial
from pathlib import Path
from typing import Final

from metaq.errors import StorageError
from metaq.fs import FileSystem
from metaq.model import LogId, Offset, SizeBytes
from metaq.storage.listing import Names, check_names
from metaq.storage.log_manager import LogManager
from metaq.storage.log_removal import OnDone
from metaq.storage.producer_file import read_notes, stored_batches, write_notes
from metaq.storage.recovery import cut_file, cut_index, keep_aside
from metaq.storage.span_index import spans_path, try_read_index

KEPT_BYTES_MAX: Final = SizeBytes(64 << 20)
"""Copied aside at most, the first ones."""


def cut_log(logs: LogManager, log_id: LogId, offset: Offset, on_done: OnDone) -> None:
    """Drop the bytes of a log that follows from an offset on; never blocks.

    Until the callback the log takes nothing but gets.

    Args:
        logs: has the log; on the loop's thread.
        log_id: which partition.
        offset: where a record starts; not below the high watermark.
        on_done: called on the loop's thread when the log is open again, with the error
            that left some of these bytes there, or None.

    Raises:
        StorageError: bytes below the high watermark would go, or the log ends before;
            there is no such log, or it takes puts.
    """
    log = logs.get(log_id)
    if log is not None and not log.high_watermark <= offset <= log.next_offset:
        raise StorageError(
            f"partition {log_id} is cut from its high watermark on: expected offsets"
            f" {log.high_watermark} to {log.next_offset}, got {offset}"
        )
    logs.reopen(
        log_id,
        partial(cut_files, offset=offset),
        on_done,
        is_mended=lambda damage: damage.offset >= offset,
    )


def cut_files(
    fs: FileSystem, directory: Path, producer_count_max: int, *, offset: Offset
) -> None:
    """Drop all bytes from an offset on; see the head of this file. Blocks.

    A segment that begins there goes as well, unless it is the first: whether the leader
    has rolled there is its business.

    Args:
        fs: the disk.
        directory: the partition directory; its log has no file open.
        producer_count_max: producers that are remembered.
        offset: where a record starts, not below the log start.

    Raises:
        NoSpaceError: a step was not done; what is there opens, and may be cut again.
        StorageError: a file has a name that no segment has: nothing was done.
        DiskError: the disk refuses.
    """
    # Nothing was written yet where there is none.
    names = check_names(fs, directory) if fs.is_directory(directory) else Names()
    if names.bad_name:
        raise StorageError(f"{names.bad_name}: directory={directory}")
    later = [each for each in names.segments[1:] if each.base_offset >= offset]
    kept = names.segments[: len(names.segments) - len(later)]
    if not kept or kept[-1].end_offset < offset:
        return
    last = kept[-1]
    if names.segments[-1].end_offset > offset:
        keep_aside(fs, (last, *later), offset, KEPT_BYTES_MAX)
    for segment in reversed(later):
        fs.discard(spans_path(segment.path, segment.base_offset))
        fs.unlink(segment.path)
    index = try_read_index(fs, last.path, last.base_offset)
    if index is None:
        # Another try may read it.
        fs.discard(spans_path(last.path, last.base_offset))
    else:
        cut_index(fs, last.path, index.until(offset))
    notes = read_notes(fs, directory)
    if notes.batches or notes.flaw:
        noted = [each for each in notes.batches if each.end_offset <= offset]
        batches = stored_batches(fs, kept, noted, producer_count_max=producer_count_max)
        write_notes(fs, directory, batches)
    cut_file(fs, last.path, SizeBytes(last.position_of(offset)))
