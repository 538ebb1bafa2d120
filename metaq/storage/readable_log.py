"""The readable side of one partition: bounds, segments, reads, waiters, state.

    log start ... high watermark ... log end ... next offset
        |------ readable ----|-- written --|-- in flight --|

Gets stop at the high watermark: a consumer never sees a byte that a crash could take
back. The loop's thread opens and reads no file. A replica that follows gets *copies*:
written appends in flight from memory (`tail`), other synced bytes from the file.

    copy of        from           ends
    appends in     memory         with one of them; at least one, however large
    flight
    other bytes    one segment    at the end of any record; not within a batch that a
                                  producer may send again, see `batches_in`

Invariant: log start <= high watermark <= log end <= next offset, asserted when one of
them changes. `partition_log.py` moves them. Source: docs/metaq-1.4/broker.md 2.4.
"""

from collections.abc import Callable
from typing import Final

from metaq.errors import ClosedError, LogOfflineError, OffsetOutOfRangeError
from metaq.model import LogId, Offset, SizeBytes
from metaq.storage.append_request import AppendRequest
from metaq.storage.in_flight import AppendsInFlight
from metaq.storage.log_dir import LogDir
from metaq.storage.log_state import (
    COPYING,
    TRANSITIONS,
    LogEvent,
    LogState,
    LogWaiters,
    WaitHandle,
)
from metaq.storage.producers import ProducerTable, StoredBatch
from metaq.storage.segment import Damage, DamagedSegmentError, Segment, Segments
from metaq.storage.slices import OpenFiles, Slice


class ReadableLog:
    """The readable side of one partition. Owner: the event loop's thread."""

    def __init__(
        self,
        log_id: LogId,
        log_dir: LogDir,
        segments: Segments,
        files: OpenFiles,
        producers: ProducerTable,
        *,
        damage: tuple[Damage, ...],
        number: int | None,
        watermark: Offset | None,
    ) -> None:
        """Create a log in the state that recovery found; see `PartitionLog`."""
        self.log_id: Final = log_id
        """Partition of the log."""
        self.log_dir: Final = log_dir
        """Its data directory."""
        self.number: Final = number
        """Log number in a replica set; None outside of one, or if not yet assigned."""
        self.producers: Final = producers
        """Batches of its producers, including those in flight."""
        self._files = files
        self.segments = segments
        """Segments of the log; an immutable value, replaced when it changes."""
        self.log_start_offset = segments.first.base_offset
        """First readable offset; never decreases."""
        end = segments.active.end_offset
        self.high_watermark = end if watermark is None else watermark
        """Offset after the last readable byte; decreases only by
        `lower_high_watermark`."""
        self.log_end = end
        """Offset after the last byte known to be written here."""
        self.next_offset = end
        """Offset of the next append, after those in flight."""
        self.synced_end = end
        """Offset after the last byte that is synced here."""
        self.damage = damage
        """Damaged ranges, in order of their offsets."""
        self.lost: frozenset[Damage] = frozenset()
        """Damaged ranges of which no replica has a good copy."""
        self.state = LogState.STOPPED if damage else LogState.OPEN
        """State; it says which requests are accepted."""
        self._in_flight = AppendsInFlight()
        self._waiters = LogWaiters()
        self._mend_waiters = LogWaiters()
        log_dir.size_bytes = SizeBytes(log_dir.size_bytes + self.size_bytes)

    # -- bounds

    @property
    def size_bytes(self) -> SizeBytes:
        """Return the bytes on disk."""
        return SizeBytes(self.log_end - self.log_start_offset)

    def readable_active(self) -> Segment:
        """Return the active segment with the size that is readable now."""
        return self.segments.readable_active(self.high_watermark)

    # -- gets

    def read(self, offset: Offset, max_bytes: int) -> Slice:
        """Return readable bytes of one segment, from `offset` on.

        Args:
            offset: any offset, not necessarily the start of a record.
            max_bytes: maximum size of the slice, 1 or more.

        Returns:
            A slice of 1 to `max_bytes` bytes; it ends at the latest at the end of the
            segment, at the high watermark or where damage begins. The caller releases
            it.

        Raises:
            OffsetOutOfRangeError: no readable byte has this offset (the high watermark
                itself is out of range too).
            CorruptRecordError: the byte is in a damaged range or missing; the error
                has the next good offset.
            LogDirOfflineError: the data directory had a disk error.
            ClosedError: the log is closed.
        """
        if not self.log_start_offset <= offset < self.high_watermark:
            # A log that lost its end reports the damage.
            self._require_good(offset)
            raise OffsetOutOfRangeError(
                offset,
                log_start=self.log_start_offset,
                high_watermark=self.high_watermark,
            )
        end = Offset(offset + max(1, max_bytes))
        return self._slice(offset, min(end, self.high_watermark))

    def nearest_offset(self, offset: Offset) -> Offset:
        """Return the valid offset that MetaQ calls nearest.

        Source: docs/metaq-1.4/broker.md 1.6, 2.4.

        Returns:
            Below the log start: the log start; from the high watermark on: the high
            watermark; else the base offset of the segment that contains the byte, which
            is always the start of a record.
        """
        if offset < self.log_start_offset:
            return self.log_start_offset
        if offset >= self.high_watermark:
            return self.high_watermark
        segment = self.segments.find(offset) or self.segments.following(offset)
        return segment.base_offset if segment else self.high_watermark

    def is_mendable(self, offset: Offset) -> bool:
        """Return whether a byte is damaged here and another replica may have it."""
        return self.number is not None and any(
            each.covers(offset) and each not in self.lost for each in self.damage
        )

    def wait(self, offset: Offset, callback: Callable[[], None]) -> WaitHandle:
        """Call back once, when the byte at `offset` is readable or the log stops.

        If `is_mendable`: when a damaged range was mended or is found lost.

        Args:
            offset: usually the present high watermark.
            callback: called on this thread, later or, if the condition holds already,
                before this method returns.

        Returns:
            A handle that cancels the wait.
        """
        if self.is_mendable(offset):
            return self._mend_waiters.add(offset, callback)
        handle = self._waiters.add(offset, callback)
        if offset < self.high_watermark or not self._may_grow:
            handle.wake()
        return handle

    # -- copies, for a replica that follows

    def tail(self, offset: Offset, max_bytes: int) -> list[AppendRequest]:
        """Return appends in flight that can be copied without reading the file.

        Args:
            offset: start of the copy.
            max_bytes: maximum total size; the first may be larger.

        Returns:
            Contiguous appends of one segment that begin exactly at `offset` and are
            written here, with their bytes; empty if the file has to be read.
        """
        following = self.segments.following(offset)
        end = self.log_end
        if following is not None:
            end = min(end, following.base_offset)
        return self._in_flight.take_copies(offset, end, max_bytes)

    def copy_end(self, offset: Offset, max_bytes: int) -> tuple[Offset, bool]:
        """Return where a copy that is read from the file may end.

        Args:
            offset: start of the copy, below the synced end.
            max_bytes: maximum size wanted; one append in flight may be larger.

        Returns:
            An offset in the segment of the first byte, up to the synced end, and
            whether an append ends there, so that the copy includes all of it. If not,
            the copy ends with a record, there or before, and inside no batch
            (`batches_in`).
        """
        following = self.segments.following(offset)
        end = self.synced_end
        if following is not None:
            end = min(end, following.base_offset)
        wanted = Offset(offset + max_bytes)
        if end <= wanted:
            return end, True
        if offset < self.high_watermark:
            return min(wanted, self.high_watermark), wanted >= self.high_watermark
        return self._in_flight.copy_end(offset, wanted)

    def read_copy(self, offset: Offset, end: Offset) -> Slice:
        """Return bytes for a copy, including those above the high watermark.

        Args:
            offset: of the first byte.
            end: after the last byte, in the same segment and synced (`copy_end`).

        Returns:
            A slice; it ends early where damage begins. The caller releases it.

        Raises:
            OffsetOutOfRangeError: bytes of the range do not exist or are not synced.
            CorruptRecordError: the first byte is in a damaged range or missing.
            LogDirOfflineError: the data directory had a disk error.
            ClosedError: the log is closed.
        """
        if not self.log_start_offset <= offset < end <= self.synced_end:
            self._require_good(offset)
            raise OffsetOutOfRangeError(
                offset, log_start=self.log_start_offset, high_watermark=self.synced_end
            )
        return self._slice(offset, end)

    def segment_base(self, offset: Offset) -> Offset:
        """Return the base offset of the segment that has, or will have, an offset."""
        return (self.segments.find(offset) or self.segments.first).base_offset

    def batches_in(self, start: Offset, end: Offset) -> tuple[StoredBatch, ...]:
        """Return entries of the batches that begin in [start, end), by offset."""
        found = [each for each in self.producers if start <= each.offset < end]
        return tuple(sorted(found, key=lambda batch: batch.offset))

    # -- helpers

    def _require_good(self, offset: Offset) -> Offset | None:
        """Return the first damaged offset after `offset`, or None.

        Raises:
            CorruptRecordError: `offset` is in a damaged range.
            LogDirOfflineError: the data directory is offline.
            ClosedError: the log is closed.
        """
        if self.state in {LogState.OFFLINE, LogState.CLOSED}:
            raise self._refusal()
        for each in self.damage:
            if each.covers(offset):
                raise DamagedSegmentError(each, self.log_id)
            if each.offset > offset:
                return each.offset
        return None

    def _slice(self, offset: Offset, end: Offset) -> Slice:
        """Return a slice up to `end`, the end of the segment or the next damage."""
        damaged = self._require_good(offset)
        return self.read_unchecked(
            offset, end if damaged is None else min(end, damaged)
        )

    def read_unchecked(self, offset: Offset, end: Offset) -> Slice:
        """Return bytes of one segment as they are on the disk, damaged or not.

        Args:
            offset: of the first byte, in the log.
            end: after the last byte, up to the synced end; the slice may end earlier.
        """
        segment = self.segments.find(offset)
        assert segment is not None, f"{self.log_id}: no segment holds {offset}"
        is_sealed = segment is not self.segments.active
        if is_sealed:
            end = min(end, segment.end_offset)
        return Slice(
            self._files.acquire(segment.path),
            segment,
            segment.position_of(offset),
            SizeBytes(end - offset),
            self.log_dir.reader,
            is_sealed=is_sealed,
        )

    def _refusal(self) -> Exception:
        match self.state:
            case LogState.STOPPED:
                return LogOfflineError(
                    f"partition {self.log_id} is stopped: {self.damage[0]}"
                )
            case LogState.OFFLINE:
                return self.log_dir.refusal() or ClosedError(str(self.log_id))
            case LogState.FOLLOWING | LogState.REOPENING:
                return ClosedError(f"partition {self.log_id} follows its leader")
            case _:
                return ClosedError(f"partition {self.log_id} is closed")

    @property
    def _may_grow(self) -> bool:
        """Whether more bytes may become readable."""
        return self.state is LogState.OPEN or self.state in COPYING

    def _wake_waiters(self) -> None:
        self._waiters.wake_below(self.high_watermark if self._may_grow else None)

    def _set_bounds(
        self,
        *,
        log_start: Offset | None = None,
        high_watermark: Offset | None = None,
        log_end: Offset | None = None,
    ) -> None:
        size_before = self.size_bytes
        if log_start is not None:
            assert log_start >= self.log_start_offset, (
                log_start,
                self.log_start_offset,
            )
            self.log_start_offset = log_start
        if high_watermark is not None:
            assert high_watermark >= self.high_watermark, high_watermark
            self.high_watermark = high_watermark
        if log_end is not None:
            self.log_end = log_end
        start, end = self.log_start_offset, self.log_end
        assert start <= self.high_watermark <= end <= self.next_offset, (
            self.log_id,
            (start, self.high_watermark, end, self.next_offset),
        )
        self.log_dir.size_bytes = SizeBytes(
            self.log_dir.size_bytes + self.size_bytes - size_before
        )

    def _apply(self, event: LogEvent) -> None:
        found = TRANSITIONS.get((self.state, event))
        assert found is not None, f"{self.log_id}: {event.value} in {self.state.value}"
        self.state = found
