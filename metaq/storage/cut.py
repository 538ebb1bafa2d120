"""Cut the end off the files of one partition.

A replica that follows a new leader drops the bytes that the leader does not have. With
this order of steps, a crash between any two of them leaves a log that opens, with all
bytes below the cut and perhaps some after it, but never a hole:

    1  copy the bytes aside, `<name>.torn-<offset>`; they were never acknowledged
    2  remove later segments, newest first, the index of each before its file: an index
       after the end of a log would say that its segment is missing
    3  truncate the index of the last segment
    4  write the producer file without batches that end later, and with earlier ones
       that those had displaced
    5  truncate the segment

Each step is durable before the next. A short index or producer file costs time or a
repeated batch; one that claims more than the bytes would be trusted once other bytes
have come. Then the log is recovered, which completes the index and the producer file.
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
"""Maximum number of bytes copied aside, the first ones."""


def cut_log(logs: LogManager, log_id: LogId, offset: Offset, on_done: OnDone) -> None:
    """Drop the bytes of a log that follows, from an offset on; never blocks.

    Until the callback the log accepts only gets.

    Args:
        logs: has the log; used on the loop's thread.
        log_id: the partition.
        offset: a record boundary, not below the high watermark.
        on_done: called on the loop's thread when the log is open again, with None or
            the error, after which some of these bytes may be left.

    Raises:
        StorageError: the offset is below the high watermark or after the end; there is
            no such log, or it takes puts.
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
    """Drop all bytes from an offset on; see the module docstring. Blocks.

    A segment that begins there is removed, too, unless it is the first: the leader
    decides whether the log rolls there.

    Args:
        fs: the disk.
        directory: the partition directory; its log has no open files.
        producer_count_max: maximum number of producers to remember.
        offset: a record boundary, not below the log start.

    Raises:
        NoSpaceError: a step failed; the log opens, and may be cut again.
        StorageError: a file name is invalid; nothing was done.
        DiskError: the disk refuses.
    """
    # Without a directory nothing was written yet.
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
        # Unreadable now, but a later try might read it.
        fs.discard(spans_path(last.path, last.base_offset))
    else:
        cut_index(fs, last.path, index.until(offset))
    notes = read_notes(fs, directory)
    if notes.batches or notes.flaw:
        noted = [each for each in notes.batches if each.end_offset <= offset]
        batches = stored_batches(fs, kept, noted, producer_count_max=producer_count_max)
        write_notes(fs, directory, batches)
    cut_file(fs, last.path, SizeBytes(last.position_of(offset)))
