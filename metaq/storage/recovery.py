"""Open one partition directory: list segments, repair a torn tail, stop at damage.

Theory of operation. Recovery is a sequence of named passes; each starts from the
results of those before it, and the result is a value. The broker that runs afterwards
may assume a log without flaws, or the log is stopped.

    1 check_names         names → segments, indexes, leftovers; refuses wrong names;
                          base offset + size = next base offset, no segment is missing
    2 clear the way       removes temporary files and indexes of deleted segments
    3 check_active        the active segment: every span by its checksum, then the
                          records after the last span one by one, and whether the
                          last batch of a producer is there as a whole
    4 keep and cut        a torn tail: copy it aside, sync the copy, truncate, sync
    5 settle              make the bytes after the last span durable, then index them

Four things can be found in the active segment, and they are results, not errors:

* a clean end;
* a *torn tail*: the first bad byte is after the last covered byte, and no whole
  record begins further after it than one unsynced write can be long
  (`unsynced_bytes_max`). Only a crash explains it, and these bytes were never
  acknowledged: they are cut, and kept in `<name>.torn-<offset>`;
* a part of a batch that its producer will send again: whole records, but not all of
  those that the producer file has noted. It is cut as a torn tail;
* *corruption*: anything else. An entry of the index proves that its bytes were on disk;
  a record far after the bad byte proves that a later write was. The log stops, with
  file, offset and next good offset; nothing is cut and the index stays as it is.

Invariant: bytes below the end of the index are never cut. Every pass may be killed at
any point and done again: the second run gives the same bytes.

An index that cannot be read for any reason counts as none, and a line is logged. A
directory that has the name of a side file is moved aside.

Pass 5 writes the bytes again before it syncs them. A process that stopped because of a
failed sync leaves pages that memory shows and the disk does not have, marked clean; a
sync alone would report success and write nothing.

Only the disk raises (`StorageError`: the data directory goes offline). Source:
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
from metaq.storage.damage import apart, check_tail, damage_in_spans
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
"""Torn tails kept per partition; the one with the smallest offset goes first."""

REWRITTEN_BYTES_MAX: Final = 64 << 20
"""Written again at most, from the end (pass 5): several times one group commit."""

COPY_BYTES: Final = 1 << 20
"""Copied at a time."""

_TORN: Final = re.compile(r"[0-9]+\.meta\.torn-([0-9]+)")


@dataclass(frozen=True, slots=True)
class TornTail:
    """The bytes cut off the active segment."""

    path: Path
    offset: Offset
    """Offset of the first byte that was cut: the log end since."""
    cut_bytes: SizeBytes
    flaw: str
    kept_as: Path | None
    """Copy of the cut bytes; None when the disk was full."""


@dataclass(frozen=True, slots=True)
class RecoveredLog:
    """Contents of a partition directory after repair."""

    segments: tuple[Segment, ...]
    """Sorted by base offset and contiguous, the last one active; where a file does not
    reach to the next one, `damage` says so. None in a new directory, and in one that is
    refused as a whole."""
    spans: SpanIndexWriter | None
    """Open at the end of the active segment, owned by the caller; None without a
    segment, with damage, or when the disk was too full for the index."""
    last_id: MessageId
    """Largest message id that is known, -1 for none: new ids are larger."""
    record_count: int
    """Records in all segments that have an index, and in the active one."""
    damage: tuple[Damage, ...] = ()
    """Not empty: the log is stopped. In order of offsets, apart from each other."""
    torn: TornTail | None = None


@dataclass(frozen=True, slots=True)
class _Active:
    """State of the active segment as found."""

    index: SpanIndex
    """Everything valid, if there is no damage: believed entries and walked spans."""
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
    """Recover one partition; see the head of this file.

    Args:
        fs: The disk.
        directory: The partition directory; exclusively ours.
        unsynced_bytes_max: How many bytes one crash may tear: the bound of one group
            commit. None: any number (threshold mode).
        span_bytes_min: For the index that is made here, and for its writer.
        now_ms: Wall clock; records without a better time get at most this.
        noted: Batches that were written, or about to be (`producer_file.py`).
        rewritten_bytes_max: How many of the bytes after the index are written again.
        is_index_trusted: This process has written, or verified, the bytes that the
            index covers: they are not read again.
        on_torn_tail: Called where there is a torn tail, before it is cut.

    Raises:
        StorageError: The disk refused; the directory may be recovered again.

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
    damage_found = apart(names.damage + active.damage)
    count = index.record_count + _count_records(fs, sealed)
    torn, spans = None, None
    if active.flaw is not None:
        # With damage it is cut later, and lacks these bytes already.
        on_torn_tail()
    if not damage_found:
        if active.flaw is not None:
            torn = _cut_torn_tail(fs, last, active.end, active.flaw)
        cut_keys(fs, last.path, last.base_offset, active.end)
        _settle(fs, last, active, rewritten_bytes_max)
        # Last, so that no later error can leave it open.
        spans = _open_writer(fs, last, index, active.believed, span_bytes_min)
    last = replace(last, size_bytes=SizeBytes(active.end - last.base_offset))
    result = RecoveredLog((*sealed, last), spans, last_id, count, damage_found, torn)
    return _report(result)


def find_extent(
    fs: FileSystem, directory: Path, *, unsynced_bytes_max: SizeBytes, now_ms: Millis
) -> Extent | None:
    """Return the offsets that `recover_log` would find, by passes 1 and 3 alone.

    None without a segment. Nothing is changed.
    """
    names = check_names(fs, directory)
    if names.bad_name or not names.segments:
        return None
    first, last = names.segments[0], names.segments[-1]
    check = _Check(fs, last, unsynced_bytes_max, WINDOW_BYTES, now_ms)
    return Extent(first.base_offset, check.run().end)


# -- pass 2: clear the way ------------------------------------------------------------


def _clear_way(fs: FileSystem, directory: Path, leftovers: Iterable[Path]) -> None:
    """Finish an interrupted operation, and clear the names of our files."""
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
    """The active segment, and what `recover_log` is to believe of it."""

    fs: FileSystem
    segment: Segment
    unsynced_bytes_max: SizeBytes | None
    span_bytes_min: int
    now_ms: Millis
    is_index_trusted: bool = False

    def run(self) -> _Active:
        """Verify the spans, walk the bytes after them, and classify what is wrong."""
        segment = self.segment
        believed = try_read_index(self.fs, segment.path, segment.base_offset)
        index = believed or SpanIndex(segment.base_offset)
        with self.fs.open_read(segment.path) as file:
            is_whole = index.end_offset <= segment.end_offset
            spans = () if self.is_index_trusted and is_whole else index.spans
            damage = damage_in_spans(file, segment, spans)
            last_id = max(index.last_id_before, _newest_id(file, segment, index))
            if not is_whole:
                # The last range is that of the bytes that are gone.
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
        """End the log before a batch of which it has only the first records."""
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
    """Return the largest id of the last covered span; -1 where none can be read."""
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
    """Return the largest id that a sealed segment knows: -1 for a Java broker's."""
    index = index_of(fs, segment)
    # A full disk, or a power cut in a roll, leaves an index that is short.
    tail = walk_segment(fs, segment, index.end_offset, span_bytes_min)
    with fs.open_read(segment.path) as file:
        covered_id = _newest_id(file, segment, index)
    return max(index.last_id_before, covered_id, tail.last_id)


def _count_records(fs: FileSystem, segments: list[Segment]) -> int:
    """Return the records of sealed segments, as far as they have an index."""
    totals = (read_totals(fs, each.path, each.base_offset) for each in segments)
    return sum(each.record_count for each in totals)


# -- pass 4: the torn tail ------------------------------------------------------------


def _cut_torn_tail(
    fs: FileSystem, segment: Segment, end: Offset, flaw: str
) -> TornTail:
    """Keep the bytes from `end` on aside, then cut them off; durable on return."""
    size_bytes = SizeBytes(segment.end_offset - end)
    kept = keep_aside(fs, (segment,), end, size_bytes)
    cut_file(fs, segment.path, SizeBytes(segment.position_of(end)))
    return TornTail(segment.path, end, size_bytes, flaw, kept)


def keep_aside(
    fs: FileSystem, segments: Sequence[Segment], offset: Offset, bytes_max: SizeBytes
) -> Path | None:
    """Copy bytes that are to be cut into `<name>.torn-<offset>`; durable on return.

    Args:
        fs: The disk.
        segments: The one that holds `offset`, and those after it.
        offset: The first byte.
        bytes_max: Copied at most.

    Returns:
        The copy; None when the disk is too full for it. That must not keep a log from
        starting: these bytes were never acknowledged.
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
    """Copy the bytes of segments from `offset` to `end` into a new file; sync it."""
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
    """Cut a file that may be longer; durable on return."""
    with fs.open_append(path, create=False) as file:
        if file.size() > size_bytes:
            file.truncate(size_bytes)
            file.sync()


def _drop_old_torn_files(fs: FileSystem, directory: Path) -> None:
    """Remove the torn tails of the smallest offsets beyond `TORN_FILES_MAX`."""
    matches = (_TORN.fullmatch(name) for name in fs.list_directory(directory))
    kept = sorted((int(match[1]), match[0]) for match in matches if match)
    for _offset, name in kept[:-TORN_FILES_MAX]:
        fs.unlink(directory / name)


# -- pass 5: settle -------------------------------------------------------------------


def _settle(
    fs: FileSystem, segment: Segment, active: _Active, rewritten_bytes_max: int
) -> None:
    """Make the bytes after the valid index durable, and the segment's name."""
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
    """Bring the index file in step with `index` and open it; None on a full disk."""
    path = spans_path(segment.path, index.base_offset)
    try:
        size = HEADER.size + ENTRY_BYTES * len(index.spans)
        if believed != index or fs.size_of(path) != size:
            is_aside = _moved_aside(fs, path)
            if believed is None and not is_aside and fs.exists(path):
                _log.warning("span index not believed, made again: file=%s", path)
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
    """Remove the entries after those of `index`, which needs no free space.

    The log may get other bytes where those entries say that records are.
    """
    size = SizeBytes(HEADER.size + ENTRY_BYTES * len(index.spans))
    cut_file(fs, spans_path(segment_path, index.base_offset), size)


# -- report ---------------------------------------------------------------------------


def _report(result: RecoveredLog) -> RecoveredLog:
    """Log a summary of this log for operators; return it."""
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
