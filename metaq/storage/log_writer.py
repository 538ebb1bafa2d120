"""The storage thread's side of one partition: active segment and synced bytes.

The storage thread of the data directory owns everything here, and calls may block. The
exceptions are `write_small` and `begin_sync`, which the loop calls while it commits a
group of single puts (`commit_owner.py`). The loop's side of the same partition is
`partition_log.py`; the two exchange only values.

    base offset            synced_end             end
        |------- synced --------|---- written -----|
        |            active segment                |

In group commit `synced_end` = `end` between two groups. In threshold mode there are
records between them until more than `unflush_threshold` are unsynced or the interval is
over.

A failure leaves one of two states. On a full disk (`NoSpaceError`) the bytes of the
failed group are cut off, so the file ends where it ended before. After any other error
(`DiskError`) the state of the file is unknown; the caller takes the whole data
directory offline and calls none of its writers again, except to abandon them.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Final

from metaq.clock import Clock
from metaq.errors import DiskError, NoSpaceError, SegmentSealedError, StorageError
from metaq.fs import AppendFile, Buffer, FileSystem
from metaq.fs.group_thread import warn_of_slow_sync
from metaq.fs.kernel_syncs import Syncs
from metaq.model import MessageId, Offset, SizeBytes
from metaq.record.pieces import in_steps
from metaq.stats import Histogram
from metaq.storage.producer_file import ProducerFile
from metaq.storage.producers import StoredBatch
from metaq.storage.segment import Segment, segment_file_name
from metaq.storage.span_index import SpanIndexWriter

GROUP_BYTES_MAX: Final = SizeBytes(5 << 18)
"""Maximum number of bytes of one log that are written, and in group commit synced,
before another log has its turn: about 3 ms of an SSD."""

UNSYNCED_BYTES_MAX: Final = SizeBytes(16 << 20)
"""A longer damaged tail counts as corruption in recovery, not as torn. Groups were this
large in earlier versions, and the tails that they left are judged by this limit."""

UNCOVERED_BYTES_MAX: Final = SizeBytes(4096)
"""Below this size the checksum of written bytes is postponed and computed with that of
later ones, because it keeps the interpreter from a loop that has a reply to send."""

PLACE_CHECK_S: Final = 1.0
"""Maximum time between checks that the active segment still has its name, while appends
are acknowledged: the bytes of a file without a name are gone when it is closed."""


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterOptions:
    """Settings of a writer, fixed when its log is opened."""

    segment_bytes_max: int
    """Roll when the active segment has reached this size, bytes, 1 or more."""
    span_bytes_min: int
    """Minimum size of a span in the index, bytes."""
    slow_sync_ms: int
    """A sync slower than this is logged as a warning."""
    unflush_threshold: int
    """0 or less: group commit; n: sync after more than n unsynced records."""
    unflush_interval_s: float
    """Sync interval in threshold mode, until `set_interval_s` changes it; seconds."""
    producer_count_max: int

    @property
    def is_group_commit(self) -> bool:
        """Return whether records are acknowledged only after their sync."""
        return self.unflush_threshold <= 0


@dataclass(slots=True, eq=False)
class ActiveSegment:
    """The open files of the segment that takes appends."""

    base_offset: Offset
    size_bytes: SizeBytes
    file: AppendFile
    spans: SpanIndexWriter | None
    """Its index; None if there was no space for one."""

    def as_segment(self) -> Segment:
        """Return the active segment as a value for the loop's side."""
        return Segment(self.file.path, self.base_offset, self.size_bytes)

    def abandon(self) -> None:
        """Close the files without writing or syncing; never raises."""
        if self.spans is not None:
            self.spans.abandon()
        self.file.abandon()


class LogWriter:
    """Writes, syncs and rolls one partition. Owner: the storage thread."""

    def __init__(
        self,
        fs: FileSystem,
        clock: Clock,
        directory: Path,
        options: WriterOptions,
        *,
        end: Offset,
        last_id: MessageId,
        sync_latency: Histogram,
    ) -> None:
        """Create the writer of a log without a segment; `reopen` may give it one.

        Args:
            fs: the disk.
            clock: for append times and sync times.
            directory: the partition's directory; created by the first write.
            options: limits and mode; the mode does not change later.
            end: offset of the next byte.
            last_id: last message id in the log; negative when there is none.
            sync_latency: gets a sample for each sync; shared by the writers of one
                storage thread.
        """
        self._fs = fs
        self._clock = clock
        self._options = options
        self._sync_latency = sync_latency
        self._active: ActiveSegment | None = None
        self._is_closed = False
        self._producers = ProducerFile(
            fs, directory, producer_count_max=options.producer_count_max
        )
        self.directory: Final = directory
        """The partition's directory."""
        self._interval_s = options.unflush_interval_s
        self._roll_bytes: float = options.segment_bytes_max
        """Size at which the active segment is full."""
        self._rolls_by_size = True
        self.is_led = False
        """Whether this log has copies, which get bytes before they are synced."""
        self.version = 0
        """Grows when a failed append makes the queued ones after it void."""
        self.last_turn = 0
        """Number of the last turn of this log, kept by `GroupQueue`; 0: none yet."""
        self.end = end
        """Offset after the last byte written."""
        self.synced_end = end
        """Offset after the last byte synced."""
        self.last_id = last_id
        """Id of the last record written."""
        self.unsynced_records = 0
        """Records written since the last sync."""
        self._uncovered: list[Buffer] = []
        """Written bytes that `cover` will add to the index."""
        self._uncovered_bytes = 0
        self._uncovered_records = 0
        self.last_sync_s = self._seen_s = clock.monotonic_s()
        """Time when the last sync ended, on the monotonic clock."""
        self.sync_count = 0
        """Number of syncs of segment files."""
        self.sync_s = 0.0
        """Total duration of these syncs, in seconds."""

    def reset(
        self, *, end: Offset, last_id: MessageId, batches: Sequence[StoredBatch]
    ) -> None:
        """Set the state that recovery found; the files must be closed."""
        self.end = self.synced_end = end
        self.last_id = last_id
        self.unsynced_records = 0
        self._uncovered, self._uncovered_bytes, self._uncovered_records = [], 0, 0
        self._is_closed = False
        # An earlier order to roll may refer to bytes that were cut.
        self.set_rolls(by_size=self._rolls_by_size)
        self._producers = ProducerFile(
            self._fs,
            self.directory,
            producer_count_max=self._options.producer_count_max,
            batches=batches,
        )

    def reopen(self, segment: Segment, spans: SpanIndexWriter | None) -> None:
        """Continue with the active segment that recovery found; takes over `spans`.

        Without `spans` (there was no space for an index) its bytes stay uncovered until
        the next start; the next segment has an index again.
        """
        file = self._fs.open_append(segment.path, create=False)
        self._active = ActiveSegment(
            segment.base_offset, segment.size_bytes, file, spans
        )

    def set_rolls(self, *, by_size: bool) -> None:
        """Roll when a segment has its size, or only after `order_roll`."""
        self._rolls_by_size = by_size
        self._roll_bytes = self._options.segment_bytes_max if by_size else inf

    def begin_role(self, *, is_led: bool) -> None:
        """Begin to lead, copied by others, or to follow, with rolls on order."""
        self.is_led = is_led
        self.set_rolls(by_size=is_led)

    def order_roll(self) -> None:
        """Make the active segment count as full, unless it is empty."""
        if self._active is not None and self._active.size_bytes:
            self._roll_bytes = self._active.size_bytes

    def set_interval_s(self, interval_s: float) -> None:
        """Set the sync interval of threshold mode, checked at writes; 0: each write."""
        self._interval_s = interval_s

    @property
    def is_new(self) -> bool:
        """Whether the log has no segment yet; the first write creates it."""
        return self._active is None and not self._is_closed

    @property
    def is_full(self) -> bool:
        """Return whether the active segment has reached the size for a roll."""
        return self._active is not None and self._active.size_bytes >= self._roll_bytes

    def is_sync_due(self) -> bool:
        """Return whether written bytes must be synced before they are acknowledged."""
        if self._options.is_group_commit:
            return True
        if self.unsynced_records > self._options.unflush_threshold:
            return True
        age_s = self._clock.monotonic_s() - self.last_sync_s
        return self._interval_s <= 0 or self._interval_s < age_s

    @property
    def is_cover_due(self) -> bool:
        """Return whether `cover` must not wait for more bytes."""
        return self._uncovered_bytes >= UNCOVERED_BYTES_MAX or self.is_index_due

    def takes_small(self, *, batch_count: int, now_s: float) -> bool:
        """Return whether a group needs `write_small` and `begin_sync` only.

        False if more is needed: a segment to be created, rolled or checked for its
        name, bytes to be synced or indexed, or a producer file to be rewritten.
        """
        return (
            self._active is not None
            and self._options.is_group_commit
            and self.synced_end == self.end
            and not (self.is_full or self.is_index_due)
            and now_s - self._seen_s < PLACE_CHECK_S
            and not (batch_count and self._producers.is_rewrite_due(batch_count))
        )

    @property
    def is_index_due(self) -> bool:
        """Return whether a whole span is missing from the index, synced or not."""
        active = self._active
        if active is None or active.spans is None:
            return False
        return self.end - active.spans.end_offset >= self._options.span_bytes_min

    def write(
        self,
        chunks: Sequence[Buffer],
        *,
        record_count: int,
        last_id: MessageId,
        batches: Sequence[StoredBatch] = (),
    ) -> Iterator[None]:
        """Write whole records after the last one; call `cover_later` next.

        More than `GROUP_BYTES_MAX` is written in steps: between two of them other logs
        may be written, but not this one, and `end` moves after the last step. In group
        commit each step but the last is synced. Batches of producers among the records
        are first noted in the producer file.

        Raises:
            NoSpaceError: the log ends where it ended before.
            DiskError: the state of the file is unknown.
        """
        active = self._ready_segment()
        size_bytes = sum(map(len, chunks))
        is_large = size_bytes > GROUP_BYTES_MAX
        steps = in_steps(chunks, GROUP_BYTES_MAX) if is_large else (chunks,)
        self._note(batches)
        try:
            for number, step in enumerate(steps):
                if number:
                    if self._options.is_group_commit:
                        self._sync_file(active.file)
                    yield
                active.file.write_all(step)
        except NoSpaceError:
            self.cut_off()
            raise
        self._move_end(size_bytes, record_count, last_id, batches)

    def write_small(
        self,
        chunks: Sequence[Buffer],
        *,
        record_count: int,
        last_id: MessageId,
        batches: Sequence[StoredBatch],
    ) -> None:
        """Write as `write` does, if `takes_small`; call `begin_sync` next.

        Raises:
            NoSpaceError: a part may have been written; call `cut_off` next.
            DiskError: the state of the file is unknown.
        """
        assert self._active is not None, "takes_small"
        self._note(batches)
        self._active.file.write_all(chunks)
        self._move_end(sum(map(len, chunks)), record_count, last_id, batches)
        self.cover_later(chunks, record_count=record_count)

    def cut_off(self) -> None:
        """Cut off bytes that a failed write may have left, and sync.

        Raises:
            DiskError: the state of the file is unknown.
        """
        active = self._ready_segment()
        with _no_space_is_final():
            active.file.truncate(active.size_bytes)
        # A prefix of a refused batch must not come back after a power cut.
        self._sync_file(active.file)

    def _note(self, batches: Sequence[StoredBatch]) -> None:
        if batches:
            try:
                self._producers.note(batches)
            except DiskError as error:
                _raise_if_passing(error)
                raise

    def _move_end(
        self,
        size_bytes: int,
        record_count: int,
        last_id: MessageId,
        batches: Sequence[StoredBatch],
    ) -> None:
        """Update sizes, counts and producers after a write."""
        active = self._ready_segment()
        if batches:
            self._producers.keep(batches)
        active.size_bytes = SizeBytes(active.size_bytes + size_bytes)
        self.end = Offset(self.end + size_bytes)
        # A transaction's records get their ids before its commit.
        self.last_id = max(self.last_id, last_id)
        self.unsynced_records += record_count

    def require_in_place(self) -> None:
        """Check, once in `PLACE_CHECK_S`, that the active segment still has its name.

        Raises:
            StorageError: it has not, so its bytes can not be found again.
        """
        now_s = self._clock.monotonic_s()
        if self._active is None or now_s - self._seen_s < PLACE_CHECK_S:
            return
        self._seen_s = now_s
        if not self._active.file.is_in_place():
            raise StorageError(
                f"active segment is gone from its name: file={self._active.file.path}"
                " (removed or replaced, a directory above it renamed or removed, or"
                " another disk mounted over it)"
            )

    def cover_later(self, chunks: Sequence[Buffer], *, record_count: int) -> None:
        """Keep written bytes for `cover`.

        Args:
            chunks: all that was written since the last call; must not change.
            record_count: records in them.
        """
        if self._active is None or self._active.spans is None:
            return
        self._uncovered += chunks
        self._uncovered_bytes += sum(map(len, chunks))
        self._uncovered_records += record_count

    def cover(self) -> Iterator[None]:
        """Add the kept bytes to the index in memory, in steps; see `index`.

        Separate from `write`, so that no append waits for the checksum of its bytes:
        while it is computed the loop may take the interpreter for long.
        """
        chunks, record_count = self._uncovered, self._uncovered_records
        self._uncovered, self._uncovered_bytes, self._uncovered_records = [], 0, 0
        if chunks and self._active is not None and self._active.spans is not None:
            yield from self._active.spans.extend(chunks, record_count=record_count)

    def sync(self) -> None:
        """Wait until all written bytes are on disk, then index them.

        Raises:
            DiskError: final, see `AppendFile.sync`.
        """
        self.sync_segment()
        self.index()

    def sync_segment(self) -> None:
        """Wait until all written bytes are on disk; call `index` next.

        Raises:
            DiskError: final, see `AppendFile.sync`.
        """
        if self._active is not None and self.synced_end != self.end:
            self._sync_file(self._active.file)
            self._move_synced_end()

    def begin_sync(
        self, syncs: Syncs, on_done: Callable[[DiskError | None], None]
    ) -> bool:
        """Begin `sync_segment` without waiting; write nothing before it has ended.

        Args:
            syncs: carries it out.
            on_done: called later with the error or None; errors are final, see `sync`.

        Returns:
            Whether the sync has begun; if not, call `sync_segment`.

        Raises:
            DiskError: an earlier sync failed.
        """
        assert self._active is not None, "takes_small"
        file, start_s = self._active.file, self._clock.monotonic_s()

        def on_synced(error: DiskError | None) -> None:
            if error is None:
                self._note_sync(file, start_s)
                self._move_synced_end()
            on_done(error)

        return file.begin_sync(syncs, on_synced)

    def _move_synced_end(self) -> None:
        self.synced_end = self.end
        self.unsynced_records = 0

    def index(self) -> None:
        """Write index entries for synced bytes; not if unsynced ones were added too.

        Raises:
            DiskError: the state of the index is unknown.
        """
        for _step in self.cover():
            pass
        active = self._active
        if active is None or active.spans is None:
            return
        if active.spans.taken_end > self.synced_end:
            return
        with _no_space_is_final():
            active.spans.commit(self._clock.wall_ms())

    def roll(self) -> tuple[Segment, Segment]:
        """Seal the active segment and open the next one.

        Returns:
            The sealed segment and the new active one.

        Raises:
            NoSpaceError: no space or no descriptor for the next segment now; the log is
                unchanged, and no write succeeds until a roll has.
            DiskError: the state of the files is unknown.
        """
        sealed = self._active
        if sealed is None:
            raise SegmentSealedError(f"nothing to roll: directory={self.directory}")
        self.sync()
        # Create the next segment before the seal: a failure in between leaves an empty
        # file with exactly the name that the next try needs.
        active = self._require_created()
        with _no_space_is_final():
            try:
                if sealed.spans is not None:
                    sealed.spans.seal()
            finally:
                # Nothing refers to this file any more.
                sealed.file.close()
        _log.info(
            "segment rolled: directory=%s offset=%d size_bytes=%d",
            self.directory,
            active.base_offset,
            sealed.size_bytes,
        )
        return sealed.as_segment(), active.as_segment()

    def close(self, *, syncs_side_files: bool = True) -> None:
        """Sync unsynced bytes and close the files; a second call does nothing.

        Args:
            syncs_side_files: sync index and producer file too; else their durability
                does not change, and they are whole unless the power fails.

        Raises:
            DiskError: unsynced bytes may be lost; files may still be open.
        """
        self._is_closed = True
        if self._active is not None:
            self.sync()
            with _no_space_is_final():
                if self._active.spans is not None:
                    self._active.spans.close(is_synced=syncs_side_files)
                self._active.file.close()
            self._active = None
        if syncs_side_files:
            self._producers.close()
        else:
            self._producers.abandon()

    def abandon(self) -> None:
        """Close the files of an offline directory without writing or syncing."""
        self._is_closed = True
        if self._active is not None:
            self._active.abandon()
            self._active = None
        self._producers.abandon()

    def create_segment(self) -> ActiveSegment:
        """Create the files of the segment that begins at the end of the log.

        The names are not durable, and the segment is not active yet; see
        `create_segments`.

        Raises:
            NoSpaceError: no space or no descriptor now.
            DiskError: the disk refuses.
        """
        path = self.directory / segment_file_name(self.end)
        with _few_descriptors_are_no_space():
            if self._active is None:
                self._fs.make_directory(self.directory, is_synced=False)
            file = self._fs.open_append(path, create=True, is_synced=False)
            try:
                if file.size():
                    raise SegmentSealedError(
                        f"segment exists already: file={path} size_bytes={file.size()}"
                    )
                spans = SpanIndexWriter.create(
                    self._fs,
                    path,
                    self.end,
                    self.last_id,
                    span_bytes_min=self._options.span_bytes_min,
                )
            except StorageError:
                file.close()
                raise
        return ActiveSegment(self.end, SizeBytes(0), file, spans)

    def activate(self, segment: ActiveSegment) -> None:
        """Make this segment the active one; its names are durable."""
        self.set_rolls(by_size=self._rolls_by_size)
        self._active = segment
        self._seen_s = self._clock.monotonic_s()

    def _ready_segment(self) -> ActiveSegment:
        """Return the active segment; creates the first one of a new log."""
        if self._is_closed:
            raise SegmentSealedError(f"log is closed: directory={self.directory}")
        return self._active or self._require_created()

    def _require_created(self) -> ActiveSegment:
        lack = create_segments(self._fs, [self])
        if lack is not None:
            raise lack
        assert self._active is not None, "there was no lack of anything"
        return self._active

    def _sync_file(self, file: AppendFile) -> None:
        """Sync a file and update the sync statistics."""
        start_s = self._clock.monotonic_s()
        file.sync()
        self._note_sync(file, start_s)

    def _note_sync(self, file: AppendFile, start_s: float) -> None:
        self.last_sync_s = self._clock.monotonic_s()
        took_s = self.last_sync_s - start_s
        self.sync_count += 1
        self.sync_s += took_s
        self._sync_latency.record(took_s)
        warn_of_slow_sync(file.path, took_s, self._options.slow_sync_ms)


def create_segments(
    fs: FileSystem, writers: Sequence[LogWriter]
) -> NoSpaceError | None:
    """Create the next segment of each log, or its first; durable on return.

    All files are created first, then each directory is synced once: the first sync
    writes most of the names, and the others find little to do.

    Args:
        fs: the disk.
        writers: of logs in one data directory, with all bytes synced.

    Returns:
        The error of a log that has no new segment, or None; it may pass by itself.

    Raises:
        DiskError: the state of the new files is unknown.
    """
    lack: NoSpaceError | None = None
    created: list[tuple[LogWriter, ActiveSegment]] = []
    try:
        for writer in writers:
            try:
                created.append((writer, writer.create_segment()))
            except NoSpaceError as error:
                lack = error
        with _few_descriptors_are_no_space():
            new = {w.directory.parent for w, _ in created if w.is_new}
            for directory in (*new, *(writer.directory for writer, _ in created)):
                fs.sync_directory(directory)
    except StorageError as error:
        for _, segment in created:
            segment.abandon()
        if isinstance(error, NoSpaceError):
            return error
        raise
    for writer, segment in created:
        writer.activate(segment)
    return lack


@contextmanager
def _few_descriptors_are_no_space() -> Iterator[None]:
    """Turn exhausted descriptors into a NoSpaceError, which passes by itself."""
    try:
        yield
    except DiskError as error:
        _raise_if_passing(error)
        raise


def _raise_if_passing(error: DiskError) -> None:
    if error.lacks_descriptors:
        raise NoSpaceError(f"no descriptor for a segment: {error}") from error


@contextmanager
def _no_space_is_final() -> Iterator[None]:
    """Turn a full disk into a DiskError, where the caller needs the space to go on."""
    try:
        yield
    except NoSpaceError as error:
        raise DiskError("make room for metadata", str(error), "ENOSPC") from error
