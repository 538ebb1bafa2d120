"""Open one partition directory: list segments, repair a torn tail, stop at damage.

Theory of operation. Recovery is a sequence of named passes; each uses the results of
the passes before it, and the result is a value. Afterwards the broker may assume that
the log has no flaws, or the log is stopped.

    1 check_names         names → segments, indexes, leftovers; refuses wrong names;
                          base offset + size = next base offset, no segment is missing
    2 clear the way       removes temporary files and indexes of deleted segments
    3 check_active        the active segment: every span by its checksum, then the
                          records after the last span one by one, and whether the
                          last batch of a producer is complete
    4 keep and cut        a torn tail: copy it aside, sync the copy, truncate, sync
    5 settle              make the bytes after the last span durable, then index them

The active segment can be in one of four states, which are results, not errors:

* a clean end;
* a *torn tail*: the first bad byte is after the last covered byte, and no whole
  record begins further after it than one unsynced write can be long
  (`unsynced_bytes_max`). Only a crash explains it, and these bytes were never
  acknowledged: they are cut, and kept in `<name>.torn-<offset>`;
* a part of a batch that its producer will send again: whole records, but not all that
  the producer file has noted. It is cut like a torn tail;
* *corruption*: anything else. An entry of the index proves that its bytes were on disk;
  a record far after the bad byte proves that a later write was. The log stops, and
  reports file, offset and next good offset; nothing is cut and the index is unchanged.

Invariant: bytes below the end of the index are never cut. Every pass may be killed at
any point and repeated: the second run gives the same bytes.

An unreadable index counts as none, and is logged. A directory with the name of a side
file is renamed.

Pass 5 writes the bytes again before it syncs them. After a failed sync the page cache
has pages that are marked clean but are not on the disk; a sync alone would report
success and write nothing.

Only disk errors are raised (`StorageError`: the data directory goes offline). Source:
docs/metaq-1.4/broker.md 2.1, 2.3. Keep in step: docs/storage.md, `span_index.py`.
"""

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from metaq.errors import NoSpaceError, StorageError
from metaq.fs import FileSystem, ReadFile
from metaq.model import MessageId, Millis, Offset, Position, SizeBytes
from metaq.storage.damage import check_tail, damage_in_spans, merge_damage
from metaq.storage.holdings import Extent
from metaq.storage.key_index import cut_keys
from metaq.storage.listing import check_names, index_of, walk_segment
from metaq.storage.producer_file import PRODUCERS_NAME, torn_batch
from metaq.storage.producers import StoredBatch
from metaq.storage.segment import Damage, Segment
from metaq.storage.span_index import (
    ENTRY_BYTES,
    HEADER,
    NO_ID,
    SpanIndex,
    SpanIndexWriter,
    read_totals,
    spans_path,
    try_read_index,
    write_index,
)
from metaq.storage.walk import MTIME_LAG_MS, WINDOW_BYTES, walk_records

_log = logging.getLogger(__name__)

TORN_FILES_MAX: Final = 8
"""Maximum number of torn tails kept per partition; the smallest offset goes first."""

REWRITTEN_BYTES_MAX: Final = 64 << 20
"""Maximum number of bytes rewritten in pass 5, from the end: several group commits."""

COPY_BYTES: Final = 1 << 20
"""Bytes copied at once."""

_TORN: Final = re.compile(r"[0-9]+\.meta\.torn-([0-9]+)")


@dataclass(frozen=True, slots=True)
class TornTail:
    """The bytes cut off the active segment."""

    path: Path
    offset: Offset
    """Offset of the first cut byte, which is the new log end."""
    cut_bytes: SizeBytes
    flaw: str
    kept_as: Path | None
    """Copy of the cut bytes; None if the disk was full."""


@dataclass(frozen=True, slots=True)
class RecoveredLog:
    """Contents of a partition directory after repair."""

    segments: tuple[Segment, ...]
    """Sorted by base offset and contiguous, the last one active; `damage` has the files
    that do not extend to the next one. Empty for a new directory, and for one that is
    refused as a whole."""
    spans: SpanIndexWriter | None
    """Open at the end of the active segment, owned by the caller; None without a
    segment, with damage, or if the disk was too full for the index."""
    last_id: MessageId
    """Largest known message id, -1 for none: new ids must be larger."""
    record_count: int
    """Records in all segments that have an index, and in the active one."""
    damage: tuple[Damage, ...] = ()
    """If not empty, the log is stopped. In order of offsets, not touching."""
    torn: TornTail | None = None


@dataclass(frozen=True, slots=True)
class _Active:
    """State of the active segment as found."""

    index: SpanIndex
    """Valid entries and walked spans; complete if there is no damage."""
    believed: SpanIndex | None
    """Valid part of the index file; None if there is none."""
    end: Offset
    """Log end: the end of the last valid record."""
    last_id: MessageId
    damage: tuple[Damage, ...]
    flaw: str | None
    """Fault at `end`, if there are bytes after it."""


def recover_log(
    fs: FileSystem,
    directory: Path,
    *,
    unsynced_bytes_max: SizeBytes | None,
    span_bytes_min: int,
    now_ms: Millis,
    noted: Sequence[StoredBatch] = (),
    rewritten_bytes_max: int = REWRITTEN_BYTES_MAX,
    is_index_trusted: bool = False,
    on_torn_tail: Callable[[], None] = lambda: None,
) -> RecoveredLog:
    """Recover one partition; see the module docstring.

    Args:
        fs: The disk.
        directory: The partition directory; must be exclusively ours.
        unsynced_bytes_max: Maximum number of bytes that one crash may tear: the size
            of a group commit. None: no limit (threshold mode).
        span_bytes_min: For the index that is made here, and for its writer.
        now_ms: Wall clock; the latest append time given to records.
        noted: Batches in the producer file, written or about to be.
        rewritten_bytes_max: Maximum number of bytes after the index that are rewritten.
        is_index_trusted: This process has written or verified the bytes that the index
            covers: they are not read again.
        on_torn_tail: Called if there is a torn tail, before it is cut.

    Raises:
        StorageError: The disk refuses; the directory may be recovered again.

    Durability: every byte below the end of the result is on disk.
    """
    names = check_names(fs, directory)
    if names.bad_name:
        damage = Damage(directory, Offset(0), None, names.bad_name)
        return _report(RecoveredLog((), None, NO_ID, 0, (damage,)))
    _clear_way(fs, directory, names.leftovers)
    if not names.segments:
        return _report(RecoveredLog((), None, NO_ID, 0, names.damage))
    *sealed, last = names.segments
    check = _Check(
        fs, last, unsynced_bytes_max, span_bytes_min, now_ms, is_index_trusted
    )
    active = check.run()
    if not active.damage:
        active = check.without_torn_batch(active, noted)
    index, last_id = active.index, active.last_id
    if last_id == NO_ID and sealed:
        last_id = _last_id_of(fs, sealed[-1], span_bytes_min)
        index = replace(index, last_id_before=last_id)
    damage_found = merge_damage(names.damage + active.damage)
    count = index.record_count + _count_records(fs, sealed)
    torn, spans = None, None
    if active.flaw is not None:
        # With damage it is cut later, but the log lacks these bytes already.
        on_torn_tail()
    if not damage_found:
        if active.flaw is not None:
            torn = _cut_torn_tail(fs, last, active.end, active.flaw)
        cut_keys(fs, last.path, last.base_offset, active.end)
        _settle(fs, last, active, rewritten_bytes_max)
        # Last, because a later error would leave it open.
        spans = _open_writer(fs, last, index, active.believed, span_bytes_min)
    last = replace(last, size_bytes=SizeBytes(active.end - last.base_offset))
    result = RecoveredLog((*sealed, last), spans, last_id, count, damage_found, torn)
    return _report(result)


def find_extent(
    fs: FileSystem, directory: Path, *, unsynced_bytes_max: SizeBytes, now_ms: Millis
) -> Extent | None:
    """Return the offsets that `recover_log` would find; runs passes 1 and 3 only.

    None without a segment. Changes nothing.
    """
    names = check_names(fs, directory)
    if names.bad_name or not names.segments:
        return None
    first, last = names.segments[0], names.segments[-1]
    check = _Check(fs, last, unsynced_bytes_max, WINDOW_BYTES, now_ms)
    return Extent(first.base_offset, check.run().end)


# -- pass 2: clear the way ------------------------------------------------------------


def _clear_way(fs: FileSystem, directory: Path, leftovers: Iterable[Path]) -> None:
    """Remove leftovers of an interrupted step, and free the names of side files."""
    for path in leftovers:
        if not _moved_aside(fs, path):
            fs.unlink(path)
    _moved_aside(fs, directory / PRODUCERS_NAME)


def _moved_aside(fs: FileSystem, path: Path) -> bool:
    """Rename a directory with the name of a side file; return whether it was one."""
    if not fs.is_directory(path):
        return False
    aside = path.with_name(f"{path.name}.aside")
    _log.error("directory moved aside: directory=%s to=%s", path, aside)
    fs.rename(path, aside)
    return True


# -- pass 3: the active segment -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Check:
    """The active segment, and the facts by which it is judged."""

    fs: FileSystem
    segment: Segment
    unsynced_bytes_max: SizeBytes | None
    span_bytes_min: int
    now_ms: Millis
    is_index_trusted: bool = False

    def run(self) -> _Active:
        """Verify the spans, walk the bytes after them, and classify faults."""
        segment = self.segment
        believed = try_read_index(self.fs, segment.path, segment.base_offset)
        index = believed or SpanIndex(segment.base_offset)
        with self.fs.open_read(segment.path) as file:
            is_whole = index.end_offset <= segment.end_offset
            spans = () if self.is_index_trusted and is_whole else index.spans
            damage = damage_in_spans(file, segment, spans)
            last_id = max(index.last_id_before, _newest_id(file, segment, index))
            if not is_whole:
                # The last range is that of the missing bytes.
                end = damage[-1].offset
                return _Active(index, believed, end, last_id, damage, None)
            tail = check_tail(
                file,
                segment,
                index.end_offset,
                unsynced_bytes_max=self.unsynced_bytes_max,
                span_bytes_min=self.span_bytes_min,
                time_ms=min(Millis(file.mtime_ms() + MTIME_LAG_MS), self.now_ms),
            )
        return _Active(
            replace(index, spans=index.spans + tail.spans),
            believed,
            tail.end,
            max(last_id, tail.last_id),
            damage + tail.damage,
            tail.flaw,
        )

    def without_torn_batch(
        self, active: _Active, noted: Sequence[StoredBatch]
    ) -> _Active:
        """End the log before a batch of which only the first records are there."""
        fs, segment, end = self.fs, self.segment, active.end
        believed = active.believed or SpanIndex(segment.base_offset)
        covered_end = believed.end_offset
        batch = torn_batch(fs, segment, noted, covered_end=covered_end, end=end)
        if batch is None:
            return active
        size_bytes = SizeBytes(batch.offset - segment.base_offset)
        whole = replace(segment, size_bytes=size_bytes)
        walk = walk_segment(fs, whole, covered_end, self.span_bytes_min)
        return replace(
            active,
            index=replace(active.index, spans=believed.spans + walk.spans),
            end=batch.offset,
            flaw=f"batch: expected {batch.size_bytes} bytes, got {end - batch.offset}",
        )


def _newest_id(file: ReadFile, segment: Segment, index: SpanIndex) -> MessageId:
    """Return the largest id of the last covered span; -1 if none can be read."""
    span = index.spans[-1] if index.spans else None
    if span is None or span.base_offset >= segment.end_offset:
        return NO_ID
    return walk_records(
        file,
        segment.base_offset,
        segment.position_of(span.base_offset),
        segment.position_of(min(span.end_offset, segment.end_offset)),
        span_bytes_min=span.size_bytes,
        time_ms=span.append_time_ms,
    ).last_id


def _last_id_of(fs: FileSystem, segment: Segment, span_bytes_min: int) -> MessageId:
    """Return the largest id known from a sealed segment; -1 for a Java broker's."""
    index = index_of(fs, segment)
    # A full disk, or a power cut during a roll, leaves a short index.
    tail = walk_segment(fs, segment, index.end_offset, span_bytes_min)
    with fs.open_read(segment.path) as file:
        covered_id = _newest_id(file, segment, index)
    return max(index.last_id_before, covered_id, tail.last_id)


def _count_records(fs: FileSystem, segments: list[Segment]) -> int:
    """Return the number of records of sealed segments that have an index."""
    totals = (read_totals(fs, each.path, each.base_offset) for each in segments)
    return sum(each.record_count for each in totals)


# -- pass 4: the torn tail ------------------------------------------------------------


def _cut_torn_tail(
    fs: FileSystem, segment: Segment, end: Offset, flaw: str
) -> TornTail:
    """Copy the bytes from `end` on, then cut them off; durable on return."""
    size_bytes = SizeBytes(segment.end_offset - end)
    kept = keep_aside(fs, (segment,), end, size_bytes)
    cut_file(fs, segment.path, SizeBytes(segment.position_of(end)))
    return TornTail(segment.path, end, size_bytes, flaw, kept)


def keep_aside(
    fs: FileSystem, segments: Sequence[Segment], offset: Offset, bytes_max: SizeBytes
) -> Path | None:
    """Copy bytes before a cut into `<name>.torn-<offset>`; durable on return.

    Args:
        fs: The disk.
        segments: The segment that contains `offset`, and those after it.
        offset: The first byte.
        bytes_max: Maximum number of bytes to copy.

    Returns:
        The copy; None if the disk is too full for it. That must not prevent a start,
        because these bytes were never acknowledged.
    """
    path = segments[0].path
    kept = path.with_name(f"{path.name}.torn-{offset}")
    temporary = kept.with_name(f"{kept.name}.tmp")
    found: Path | None
    try:
        _copy_tail(fs, segments, offset, Offset(offset + bytes_max), temporary)
        fs.rename(temporary, kept)
        found = kept
    except NoSpaceError:
        found = None
        with suppress(StorageError):
            fs.unlink(temporary)
    _drop_old_torn_files(fs, path.parent)
    return found


def _copy_tail(
    fs: FileSystem,
    segments: Sequence[Segment],
    offset: Offset,
    end: Offset,
    target: Path,
) -> None:
    """Copy bytes of segments from `offset` to `end` into a new file, and sync it."""
    with fs.open_append(target, create=True) as writer:
        for segment in segments:
            with fs.open_read(segment.path) as reader:
                while (size := min(COPY_BYTES, end - offset)) > 0:
                    data = reader.read_at(segment.position_of(offset), SizeBytes(size))
                    if not data:
                        break
                    writer.write(data)
                    offset = Offset(offset + len(data))
        writer.sync()


def cut_file(fs: FileSystem, path: Path, size_bytes: SizeBytes) -> None:
    """Truncate a file that is longer than that; durable on return."""
    with fs.open_append(path, create=False) as file:
        if file.size() > size_bytes:
            file.truncate(size_bytes)
            file.sync()


def _drop_old_torn_files(fs: FileSystem, directory: Path) -> None:
    """Remove torn tails beyond `TORN_FILES_MAX`, smallest offsets first."""
    matches = (_TORN.fullmatch(name) for name in fs.list_directory(directory))
    kept = sorted((int(match[1]), match[0]) for match in matches if match)
    for _offset, name in kept[:-TORN_FILES_MAX]:
        fs.unlink(directory / name)


# -- pass 5: settle -------------------------------------------------------------------


def _settle(
    fs: FileSystem, segment: Segment, active: _Active, rewritten_bytes_max: int
) -> None:
    """Make the bytes after the valid index, and the segment's name, durable."""
    fs.sync_directory(segment.path.parent)
    covered = segment.base_offset
    if active.believed is not None:
        covered = active.believed.end_offset
    if active.end == covered:
        return
    start = max(covered, active.end - rewritten_bytes_max)
    position, end = start - segment.base_offset, segment.position_of(active.end)
    with fs.open_read(segment.path) as reader, fs.open_update(segment.path) as writer:
        while position < end:
            size = SizeBytes(min(COPY_BYTES, end - position))
            data = reader.read_at(Position(position), size)
            writer.write_at(Position(position), data)
            position += size
        writer.sync()


def _open_writer(
    fs: FileSystem,
    segment: Segment,
    index: SpanIndex,
    believed: SpanIndex | None,
    span_bytes_min: int,
) -> SpanIndexWriter | None:
    """Make the index file equal to `index`, and open it; None on a full disk."""
    path = spans_path(segment.path, index.base_offset)
    try:
        size = HEADER.size + ENTRY_BYTES * len(index.spans)
        if believed != index or fs.size_of(path) != size:
            is_aside = _moved_aside(fs, path)
            if believed is None and not is_aside and fs.exists(path):
                _log.warning(
                    "span index does not match its segment, rebuilt: file=%s", path
                )
            write_index(fs, segment.path, index)
        return SpanIndexWriter.resume(
            fs, segment.path, index, span_bytes_min=span_bytes_min
        )
    except NoSpaceError as error:
        _log.warning("span index not written: file=%s error=%s", path, error)
        if believed is not None:
            cut_index(fs, segment.path, believed)
        return None


def cut_index(fs: FileSystem, segment_path: Path, index: SpanIndex) -> None:
    """Truncate an index file after the entries of `index`; needs no free space.

    Otherwise the log might get other bytes where the cut entries claim records.
    """
    size = SizeBytes(HEADER.size + ENTRY_BYTES * len(index.spans))
    cut_file(fs, spans_path(segment_path, index.base_offset), size)


# -- report ---------------------------------------------------------------------------


def _report(result: RecoveredLog) -> RecoveredLog:
    """Log the result for operators, and return it."""
    for damage in result.damage:
        _log.error("log stopped: %s", damage)
    torn = result.torn
    if torn is not None:
        _log.warning(
            "torn tail cut: file=%s offset=%d cut_bytes=%d kept_as=%s flaw=%s",
            torn.path,
            torn.offset,
            torn.cut_bytes,
            torn.kept_as,
            torn.flaw,
        )
    return result
