"""The readable side of one partition: bounds, segments, reads, waiters, state.

    log start ... high watermark ... log end ... next offset
        |------ readable ----|-- written --|-- in flight --|

Gets stop at the high watermark: a consumer never sees a byte that a crash could take
back. No file is opened on the loop's thread, and none is read there. A replica that
follows gets *copies*: of appends in flight that are written, from memory (`tail`), of
others that are synced, from the file.

    copy of        from           ends
    appends in     memory         with one of them; at least one, however large
    flight
    other bytes    one segment    at the end of any record; not within a batch that a
                                  producer may send again, see `batches_in`

Invariant: log start <= high watermark <= log end <= next offset, asserted whenever one
of them changes. `partition_log.py` moves them. Source: docs/metaq-1.4/broker.md 2.4.
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
        """Show a log as recovery found it; see `PartitionLog`."""
        self.log_id: Final = log_id
        """Partition of the log."""
        self.log_dir: Final = log_dir
        """Its data directory."""
        self.number: Final = number
        """Log number in a replica set; None outside of one, and before it has one."""
        self.producers: Final = producers
        """Batches of its producers, those in flight included."""
        self._files = files
        self.segments = segments
        """Its segments; an immutable value, replaced when it changes."""
        self.log_start_offset = segments.first.base_offset
        """First readable offset; it only grows."""
        end = segments.active.end_offset
        self.high_watermark = end if watermark is None else watermark
        """Offset after the last readable byte; it only grows, see
        `lower_high_watermark`."""
        self.log_end = end
        """Offset after the last byte that is written here, as far as that is known."""
        self.next_offset = end
        """Offset of the next append, those in flight counted."""
        self.synced_end = end
        """Offset after the last byte that is synced here."""
        self.damage = damage
        """Damaged ranges, in order of their offsets."""
        self.lost: frozenset[Damage] = frozenset()
        """Those of which no replica has a good copy."""
        self.state = LogState.STOPPED if damage else LogState.OPEN
        """Requests that it accepts."""
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
        """Return readable bytes from `offset` on, of one segment.

        Args:
            offset: any offset; it need not be where a record starts.
            max_bytes: longest slice wanted, 1 or more.

        Returns:
            A slice of 1 to `max_bytes` bytes; it ends at the latest at the end of the
            segment, at the high watermark or where damage starts. The caller releases
            it.

        Raises:
            OffsetOutOfRangeError: no readable byte has this offset (the high watermark
                itself is out of range too).
            CorruptRecordError: the byte is in a damaged range, or is missing; the
                error knows the next good offset.
            LogDirOfflineError: the data directory had a disk error.
            ClosedError: the log is closed.
        """
        if not self.log_start_offset <= offset < self.high_watermark:
            # Damage comes first: of a log that lost its end it says where.
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
            watermark; else the base offset of the segment that holds the byte, which
            is always where a record starts.
        """
        if offset < self.log_start_offset:
            return self.log_start_offset
        if offset >= self.high_watermark:
            return self.high_watermark
        segment = self.segments.find(offset) or self.segments.following(offset)
        return segment.base_offset if segment else self.high_watermark

    def is_mendable(self, offset: Offset) -> bool:
        """Return whether a byte is damaged here, and another replica may have it."""
        return self.number is not None and any(
            each.covers(offset) and each not in self.lost for each in self.damage
        )

    def wait(self, offset: Offset, callback: Callable[[], None]) -> WaitHandle:
        """Call back once, when a byte at `offset` is readable or the log stops.

        Where `is_mendable`: when a damaged range was mended, or is found lost.

        Args:
            offset: usually the high watermark of the moment.
            callback: called on this thread, later or, when the condition holds
                already, before this method returns.

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
        """Return appends in flight that a copy can be made of without the file.

        Args:
            offset: where the copy begins.
            max_bytes: of all together; the first may be larger.

        Returns:
            Appends that begin exactly there and follow each other, of one segment,
            written here, with their bytes; none where the file has to be read.
        """
        following = self.segments.following(offset)
        end = self.log_end
        if following is not None:
            end = min(end, following.base_offset)
        return self._in_flight.take_copies(offset, end, max_bytes)

    def copy_end(self, offset: Offset, max_bytes: int) -> tuple[Offset, bool]:
        """Return where a copy may end that is read from the file.

        Args:
            offset: where it begins, below the synced end.
            max_bytes: wanted at most; one append in flight may be larger.

        Returns:
            An offset in the segment of the first byte, up to the synced end, and
            whether an append ends there: then the copy has all of it. Else it ends
            with a record, there or before, and within no batch (`batches_in`).
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
        """Return bytes for a copy, also from above the high watermark.

        Args:
            offset: of the first byte.
            end: after it, within its segment and the synced end (`copy_end`).

        Returns:
            A slice; it ends early where damage starts. The caller releases it.

        Raises:
            OffsetOutOfRangeError: bytes of the range are not there, or not synced.
            CorruptRecordError: the first byte is in a damaged range, or is missing.
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
        """Return the base offset of the segment that holds, or will hold, an offset."""
        return (self.segments.find(offset) or self.segments.first).base_offset

    def batches_in(self, start: Offset, end: Offset) -> tuple[StoredBatch, ...]:
        """Return the notes of batches that begin in a range, in their order."""
        found = [each for each in self.producers if start <= each.offset < end]
        return tuple(sorted(found, key=lambda batch: batch.offset))

    # -- helpers

    def _require_good(self, offset: Offset) -> Offset | None:
        """Return where damage begins after an offset, or None.

        Raises:
            CorruptRecordError: it is in a damaged range.
            LogDirOfflineError: nothing is believed.
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
        """Return a slice from an offset to `end`, its segment's end or damage."""
        damaged = self._require_good(offset)
        return self.read_unchecked(
            offset, end if damaged is None else min(end, damaged)
        )

    def read_unchecked(self, offset: Offset, end: Offset) -> Slice:
        """Return bytes as they are on the disk, damaged or not, of one segment.

        Args:
            offset: of the first byte, in the log.
            end: after it, up to the synced end; the slice may end before.
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
        """Whether more may become readable."""
        return self.state is LogState.OPEN or self.state in COPYING

    def _wake_waiters(self) -> None:
        may_grow = self.state is LogState.OPEN or self._may_grow
        self._waiters.wake_below(self.high_watermark if may_grow else None)

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
