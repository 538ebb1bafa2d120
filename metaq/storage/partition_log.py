"""One partition on the event loop's side: appends, their outcomes, and roles.

Theory of operation. The loop's thread owns everything in a `PartitionLog` and makes all
decisions; the storage thread writes (`log_writer.py`) and reports (`appender.py`).

    log start ... high watermark ... log end ... next offset
        |------ readable ----|-- written --|-- in flight --|

* `append` assigns the next offset at once and queues a request; it never blocks. An
  append is answered, in order, when the high watermark has passed its last byte.
* Reads stop at the high watermark (`readable_log.py`).
* When the disk is full, every unwritten append in flight fails, `next_offset` goes back
  to the log end, and the version grows (see `appender.py`).
* An append that may be stored ends *in doubt*: it fails, but its bytes and the notes of
  its batches stay.
* An append whose end a crash has cut off may be *held*: the high watermark stays before
  it, and no other append is accepted, until the rest of it is synced.
* In a replica set the high watermark has a bound (`set_bound`): what other copies have
  synced, or the high watermark of the leader that this log follows. It stops only where
  an append ends. When the role changes, every ticket ends in doubt, because other bytes
  may come to the same offsets.

Source: docs/metaq-1.4/broker.md 2.4 to 2.8.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

from metaq.errors import ClosedError, MayBeStoredError, NoSpaceError, StorageError
from metaq.fs import Buffer
from metaq.model import LogId, MessageId, Offset, SizeBytes
from metaq.storage.append_request import (
    AppendRequest,
    AppendTicket,
    BeforeWrite,
    CopiedAppends,
    Tickets,
    WriterProgress,
)
from metaq.storage.damage import merge_damage
from metaq.storage.log_dir import LogDir
from metaq.storage.log_state import (
    COPYING,
    TRANSITIONS,
    LogEvent,
    LogState,
    LogStatistics,
)
from metaq.storage.log_writer import LogWriter
from metaq.storage.producers import ProducerTable, StoredBatch
from metaq.storage.readable_log import ReadableLog
from metaq.storage.recovery import RecoveredLog
from metaq.storage.segment import Damage, Segment, Segments
from metaq.storage.slices import OpenFiles
from metaq.storage.span_index import NO_ID
from metaq.storage.watermarks import Watermark

_log = logging.getLogger(__name__)


def high_watermark(
    synced_end: Offset, held: range | None, others_end: Offset | None = None
) -> Offset:
    """Return the high watermark: the least of its bounds. Pure.

    Args:
        synced_end: offset after the last byte that is synced here.
        held: offsets of an append whose rest is not synced yet; None: there is none.
        others_end: bound by the other copies; None: there are none.
    """
    end = synced_end if held is None else Offset(min(synced_end, held.start))
    return end if others_end is None else min(end, others_end)


class PartitionLog(ReadableLog):
    """One partition. Owner: the event loop's thread.

    Every method is called on that thread and none blocks on writes.
    """

    def __init__(
        self,
        log_id: LogId,
        log_dir: LogDir,
        writer: LogWriter,
        segments: Segments,
        files: OpenFiles,
        *,
        is_group_commit: bool,
        interval_s: float,
        size_bytes_max: int,
        producers: ProducerTable,
        record_count: int = 0,
        damage: tuple[Damage, ...] = (),
        number: int | None = None,
        watermark: Offset | None = None,
    ) -> None:
        """Create a log in the state that recovery found, or a new one.

        Args:
            log_id: the partition.
            log_dir: its data directory.
            writer: the storage thread's side of the log.
            segments: at least one; the last one's end is the end of the log.
            files: shared by all logs of the broker.
            is_group_commit: the durability mode, for statistics.
            interval_s: maximum age of unsynced records, equal to the writer's.
            size_bytes_max: appends that make the log larger are refused; 0: no limit.
            producers: batches that may be sent again; owned from now on.
            record_count: records in it, as far as they are known.
            damage: damaged ranges; any makes the log start in STOPPED.
            number: its log number in a replica set.
            watermark: the high watermark; None: the end of the log.
        """
        super().__init__(
            log_id,
            log_dir,
            segments,
            files,
            producers,
            damage=damage,
            number=number,
            watermark=watermark,
        )
        self.writer: Final = writer
        """The storage thread's side; the loop's thread must not use it."""
        self.is_group_commit: Final = is_group_commit
        """Whether acknowledged records are on disk."""
        self._size_bytes_max = size_bytes_max
        self.is_settled = number is None and watermark is None
        """Whether the high watermark was reached since this start. In a replica set:
        whether a follower has what its leader had at the join, a leader what it found.
        """
        self.leader_start = self.log_start_offset
        """Log start of the leader; retention of a log that follows removes up to it."""
        self.trim_offset: Offset | None = None
        """Offset below which a log of the broker's own is not needed; replaces its
        topic's retention policy. None: the policy applies."""
        self.on_moved: Callable[[PartitionLog], None] | None = None
        """Called after log end, synced end or high watermark has moved, and after the
        directory went offline."""
        self._held: range | None = None
        """Offsets of the append that a crash has cut, until its rest is synced."""
        self._bound: Offset | None = None
        """Bound of the high watermark by other copies; None: there are none."""
        self._settled_from: Offset | None = None
        """High watermark from which on the log is settled; None: not known yet."""
        self.record_count = record_count
        """Number of records stored, as far as it is known."""
        self._version = 0
        self._append_count = 0
        self._refused_count = 0
        self._interval_s = interval_s
        self._last_sync_s = 0.0
        self._is_sync_queued = False
        self._sync_count = 0
        self._sync_s = 0.0

    # -- state

    @property
    def trims_to(self) -> Offset:
        """Return the offset below which a log of the broker's own is not needed."""
        if self.state is LogState.FOLLOWING:
            return self.leader_start
        return self.log_start_offset if self.trim_offset is None else self.trim_offset

    @property
    def _answered_end(self) -> Offset:
        """Return the end of the appends answered as stored.

        The high watermark in group commit; the end of the written bytes in threshold
        mode, which promises less.
        """
        return self.high_watermark if self.is_group_commit else self.log_end

    @property
    def _end_cause(self) -> str:
        """Return why the outcome of appends in flight stays unknown."""
        cause = self.log_dir.offline_cause or f"partition {self.log_id} was closed"
        return str(cause)

    @property
    def _is_cut(self) -> bool:
        """Whether the log ends with a held append, so that its rest must come next."""
        return self._held is not None and self.log_end == self._held.stop

    def statistics(self) -> LogStatistics:
        """Return a snapshot."""
        return LogStatistics(
            log_id=self.log_id,
            state=self.state,
            is_group_commit=self.is_group_commit,
            log_start=self.log_start_offset,
            high_watermark=self.high_watermark,
            log_end=self.log_end,
            next_offset=self.next_offset,
            size_bytes=self.size_bytes,
            held_bytes=SizeBytes(
                self.log_end - self.high_watermark if self._is_cut else 0
            ),
            segment_count=len(self.segments),
            record_count=self.record_count,
            append_count=self._append_count,
            refused_count=self._refused_count,
            in_flight_count=len(self._in_flight),
            waiter_count=len(self._waiters),
            producer_count=len(self.producers),
            forgotten_count=self.producers.forgotten_count,
            sync_count=self._sync_count,
            sync_s=self._sync_s,
            damage=tuple(str(damage) for damage in self.damage),
            lost=tuple(str(each) for each in self.damage if each in self.lost),
        )

    # -- writing

    def append(
        self,
        chunks: Sequence[Buffer],
        *,
        size_bytes: int,
        record_count: int,
        last_id: MessageId,
        ticket: AppendTicket,
        batch: StoredBatch | None = None,
        before_write: BeforeWrite | None = None,
        finish: Iterable[None] = (),
        is_light: bool = False,
        joins: bool = False,
        completes: bool = False,
    ) -> Offset:
        """Queue whole records for the end of the log; never blocks.

        Args:
            chunks: the bytes; ownership passes to the log, and they must not change.
            size_bytes: sum of the lengths of the chunks, 1 or more.
            record_count: number of records, 1 or more.
            last_id: id of the last record.
            ticket: called once on this thread, in the order of the appends.
            batch: added to `producers`; removed again if it is certainly not stored.
            before_write: called on the storage thread, see `AppendRequest`.
            finish: steps that finish the bytes in place, run on the storage thread
                before the write; pure computation.
            is_light: the connection has little in flight; see `GroupQueue`.
            joins: more appends come in this turn of the loop; commit them together.
            completes: it begins with the rest of the held append.

        Returns:
            The offset of the first byte; the bytes are there when the ticket says so.

        Raises:
            LogOfflineError: the log is stopped because of damage.
            LogDirOfflineError: its data directory had a disk error.
            NoSpaceError: the disk is full, or a size limit is reached.
            ClosedError: the log is closed or closing.

        After an error nothing was queued and the ticket is not called.

        Durability: group commit answers the ticket after the sync; threshold mode
        after the write.
        """
        try:
            self._check_append(size_bytes, completes=completes)
        except (StorageError, ClosedError):
            self._refused_count += 1
            raise
        offset = self.next_offset
        request = AppendRequest(
            self.writer,
            self,
            self._version,
            offset,
            chunks,
            SizeBytes(size_bytes),
            record_count,
            last_id,
            ticket,
            () if batch is None else (batch,),
            before_write,
            finish,
            is_light,
            completes,
        )
        # Update everything before `submit`: a worker that runs at once calls this log
        # before it returns. The line that may raise MemoryError comes first.
        self._in_flight.add(request)
        self.next_offset = Offset(offset + size_bytes)
        if batch is not None:
            self.producers.add(batch)
        # Batches of transactions come in groups, as their journal is written.
        self.log_dir.submit(request, joins=joins or before_write is not None)
        return offset

    def append_copy(
        self, copy: CopiedAppends, ticket: AppendTicket, *, joins: bool = False
    ) -> None:
        """Queue bytes of the leader that this log follows; never blocks.

        Args:
            copy: verified appends; ownership of the bytes passes to the log.
            ticket: called once on this thread; *stored* after the sync here.
            joins: more copies come in this turn of the loop, see `CommitOwner.submit`.

        Raises:
            LogOfflineError: the log is stopped because of damage.
            LogDirOfflineError: its data directory had a disk error.
            NoSpaceError: there is not enough free space.
            ClosedError: the log does not follow, or is closed or closing.
            StorageError: the copy does not begin where the log ends.
        """
        if self.state is not LogState.FOLLOWING:
            raise self._refusal()
        if copy.offset != self.next_offset:
            raise StorageError(
                f"copy does not go on where partition {self.log_id} ends: expected"
                f" offset {self.next_offset}, got {copy.offset}"
            )
        self.log_dir.check_free_space(copy.size_bytes)
        request = AppendRequest(
            self.writer,
            self,
            self._version,
            *copy[:-1],
            ticket,
            copy.batches,
            is_light=True,
        )
        self._in_flight.add(request)
        self.next_offset = request.end_offset
        for batch in copy.batches:
            self.producers.add(batch)
        self.log_dir.submit(request, joins=joins)

    def roll(self, offset: Offset) -> None:
        """Roll after the queued appends, as the leader did, unless a segment is empty.

        Without space the next append tries again. If the log does not end at `offset`
        by then, nothing happens: queued appends found no space, or were skipped while
        the log was stopped. The leader sends them and this order again.

        Args:
            offset: base offset of the leader's new segment.
        """
        roll = self.log_dir.appender.roll_on_order
        self.log_dir.submit(partial(roll, self.writer, self, offset))

    def join(self, batch: StoredBatch, ticket: AppendTicket) -> None:
        """Answer a batch that is sent again, together with its first append.

        At once if that was answered, or can no longer be; a log that holds the bytes
        is not enough for an answer.

        Args:
            batch: an entry of `producers`.
            ticket: called once on this thread, possibly before this method returns.
        """
        if batch.end_offset <= self._answered_end:
            ticket.on_stored()
            return
        # The ticket of a copy means synced here, which is no answer to a producer.
        if self.state in COPYING or not self._in_flight.join(batch.end_offset, ticket):
            ticket.on_failed(MayBeStoredError(self._end_cause))

    def end_in_doubt(self, cause: str, *, until: Offset) -> None:
        """Fail appends that are in flight for too long; they may still be stored.

        Their bytes and the notes of their batches stay, and the high watermark passes
        them when it can. A batch that is sent again waits for that.

        Args:
            cause: reason for the error.
            until: appends that end here or before.
        """
        self._in_flight.end_in_doubt(MayBeStoredError(cause), until=until)

    def set_interval_s(self, interval_s: float) -> None:
        """Change the maximum age of unsynced records; 0: sync at each write."""
        if interval_s != self._interval_s:
            self._interval_s = interval_s
            self.log_dir.submit(partial(self.writer.set_interval_s, interval_s))

    def sync_if_due(self, now_s: float) -> None:
        """Queue a sync of unsynced records if the last one is an interval ago.

        Args:
            now_s: time of the monotonic clock.
        """
        if (
            not self._is_sync_queued
            and self._interval_s <= now_s - self._last_sync_s
            and self.synced_end < self.log_end
        ):
            self._is_sync_queued = True
            self.log_dir.submit(partial(self.log_dir.appender.sync, self.writer, self))

    def plan_append(self, size_bytes: int) -> Offset:
        """Return a lower bound of the offsets of later appends.

        Args:
            size_bytes: size of the planned append, 1 or more.

        Raises:
            StorageError: the log would refuse it now.
            ClosedError: the log is closed or closing.
        """
        self._check_append(size_bytes)
        return self.high_watermark

    # -- its role in a replica set

    def follow(self) -> None:
        """Accept a leader's bytes instead of puts; no change if it follows already.

        Puts in flight end in doubt, and waits end. Queued appends are still written.
        """
        self._apply(LogEvent.FOLLOW)
        self._begin_role(is_led=False)

    def lead(self) -> None:
        """Accept puts after the bytes that are there; nothing may be in flight.

        Bytes above the high watermark become readable in one step, when `set_bound`
        allows all of them, because the ends of their appends are not known. A stopped
        log stays stopped.
        """
        assert self.synced_end == self.next_offset, self.statistics()
        self._apply(LogEvent.LEAD)
        self._begin_role(is_led=True)
        rest = SizeBytes(self.next_offset - self.high_watermark)
        self._settled_from, self.is_settled = self.next_offset, not rest
        if rest:
            sides, start = (self.writer, self, self._version), self.high_watermark
            inherited = AppendRequest(*sides, start, (), rest, 0, NO_ID, Tickets())
            self._in_flight.add(inherited)

    def _begin_role(self, *, is_led: bool) -> None:
        cause = f"partition {self.log_id} has another leader"
        self.end_in_doubt(cause, until=self.next_offset)
        self._bound = self.high_watermark
        self.log_dir.submit(partial(self.writer.begin_role, is_led=is_led))
        self._waiters.wake_below(None)

    def set_bound(self, offset: Offset) -> None:
        """Set the bound of the high watermark by other copies, and advance it.

        The high watermark never goes back by this.

        Args:
            offset: for a follower the leader's high watermark; for a leader the end
                that every copy which counts has synced.
        """
        if self.state not in {LogState.OFFLINE, LogState.CLOSED}:
            self._bound = offset
            self._advance(self.log_end)

    def lower_high_watermark(self, offset: Offset) -> None:
        """Make the bytes from an offset on unreadable, for `LogManager`.

        The file of watermarks gets the lower one too, synced before a cut that is
        begun later.

        Args:
            offset: the new high watermark; no effect if it is not lower.

        Raises:
            StorageError: the log does not follow a leader.
        """
        if self.state not in {LogState.FOLLOWING, LogState.STOPPED}:
            raise StorageError(
                f"partition {self.log_id} follows no leader: it is {self.state.value}"
            )
        end = max(self.log_start_offset, min(offset, self.high_watermark))
        self.high_watermark = end
        if self._bound is not None:
            self._bound = min(self._bound, end)
        if self.number is not None:
            mark = Watermark(self.number, end, self.log_start_offset)
            self.log_dir.lower_watermark(mark)

    def set_settled_from(self, target: Offset) -> None:
        """Set the high watermark from which on it is settled. Call `set_bound` next.

        Args:
            target: offset in the leader's answer to the join. No replica has reported a
                later end: one that joins with an empty copy does not send readers back.
        """
        self._settled_from = target

    def begin_reopen(self) -> None:
        """Accept nothing but gets until `on_reopened`.

        Raises:
            StorageError: the log takes puts, or is closed, offline or reopening.
        """
        if (self.state, LogEvent.REOPEN) not in TRANSITIONS:
            raise StorageError(
                f"partition {self.log_id} is not opened again: it is {self.state.value}"
            )
        self._apply(LogEvent.REOPEN)
        cause = f"partition {self.log_id} is opened again"
        self.end_in_doubt(cause, until=self.next_offset)

    def on_reopened(self, found: RecoveredLog, batches: Iterable[StoredBatch]) -> None:
        """Continue with the present content of the files: follow, or stop for damage.

        Args:
            found: that content; of the ranges that were damaged before, those that
                still are.
            batches: remembered batches of its producers.
        """
        if self.state in {LogState.OFFLINE, LogState.CLOSED}:
            return
        self._apply(LogEvent.REOPENED)
        segments = found.segments or (self.segments.active,)
        for gone in {each.path for each in self.segments} - {
            each.path for each in segments
        }:
            self._files.forget(gone, self.log_dir.reader)
        self.segments = Segments(segments)
        end, damage = self.segments.active.end_offset, found.damage
        if end < self.high_watermark:
            detail = f"log ends too early: expected {self.high_watermark}, got {end}"
            lost = Damage(self.segments.active.path, end, None, detail)
            damage, end = merge_damage((*damage, lost)), self.high_watermark
        self._in_flight.clear()
        self.producers.replace(batches)
        self.record_count, self.damage = found.record_count, damage
        self.lost &= set(damage)
        self.synced_end = self.next_offset = end
        self._set_bounds(log_end=end)
        self.log_dir.is_layout_changed = self.log_dir.is_damage_new = True
        if damage:
            self._apply(LogEvent.DAMAGE)
        self._wake_waiters()
        self._mend_waiters.wake_below(None)

    # -- what happens to it

    def hold(self, offset: Offset) -> None:
        """Hide the last append, which a crash has cut, until its rest is there.

        Called before the first read or append. An append that `completes` ends the
        hold, when the sync passes the old log end; others are refused before.

        Args:
            offset: start of that append. If it is in a sealed segment there is no
                hold, because an earlier version has shown it already.
        """
        if offset >= self.segments.active.base_offset:
            self._held, self.high_watermark = range(offset, self.log_end), offset

    def on_written(self, end: Offset) -> None:
        """Note the end of written, unsynced bytes: copies may have them.

        Without `on_moved` the log end moves with the sync.
        """
        if self.on_moved is not None and self.state is LogState.OPEN:
            self._set_bounds(log_end=end)
            self.on_moved(self)

    def on_progress(self, progress: WriterProgress) -> None:
        """Update written and synced ends, and answer the appends that they cover.

        Progress older than the known state changes nothing.
        """
        if self.log_dir.on_log_moved is not None:
            self.log_dir.note_log_moved()
        if self.state is LogState.OFFLINE or self.state is LogState.CLOSED:
            return
        if progress.synced_end < self.synced_end or progress.log_end < self.log_end:
            return
        self._is_sync_queued = False
        self._sync_count = progress.sync_count
        self._sync_s = progress.sync_s
        self._last_sync_s = progress.last_sync_s
        is_moved = self.synced_end != progress.synced_end
        self.synced_end = progress.synced_end
        if self._held is not None and self.synced_end > self._held.stop:
            self._held = None
        self._advance(progress.log_end, is_moved=is_moved)

    def _advance(self, log_end: Offset, *, is_moved: bool = False) -> None:
        """Move log end and high watermark, and answer appends that are now stored."""
        is_alone, before = self._bound is None, self.high_watermark
        if is_alone:
            end = high_watermark(self.synced_end, self._held)
        else:
            end = self._next_high_watermark()
        self._set_bounds(log_end=log_end, high_watermark=end)
        is_copy = not is_alone and self.state in COPYING
        end = self.synced_end if is_copy else self._answered_end
        done = self._in_flight.take_stored(end)
        if done and not self._append_count:
            self.log_dir.is_layout_changed = True
        self._append_count += len(done)
        for request in done:
            self.record_count += request.record_count
            request.ticket.on_stored()
        self._wake_waiters()
        if self.on_moved is not None and (is_moved or self.high_watermark != before):
            self.on_moved(self)

    def on_rolled(self, sealed: Segment, active: Segment) -> None:
        """Replace the active segment after a roll."""
        self.segments = self.segments.rolled(sealed, active)
        self.log_dir.is_layout_changed = True

    def on_refused(self, error: NoSpaceError) -> None:
        """Fail unwritten appends in flight: the disk is full; later ones are void."""
        self._version += 1
        # Written appends still wait for their answer.
        refused = self._in_flight.take_refused(self.log_end)
        self.next_offset = self.log_end
        self.log_dir.note_full(error, sum(each.size_bytes for each in refused))
        self._refused_count += len(refused)
        for request in refused:
            for batch in request.batches:
                self.producers.remove(batch)
        for request in refused:
            request.ticket.on_failed(error)

    def on_removed(self, segment: Segment, record_count: int) -> None:
        """Remove the oldest segment, which is gone from the disk.

        Args:
            segment: the first of `segments`.
            record_count: number of records in it.
        """
        if self.state is LogState.CLOSED:
            # The records of a forgotten log are not counted any more.
            return
        self.segments = self.segments.without(segment)
        self._files.forget(segment.path, self.log_dir.reader)
        self.record_count = max(0, self.record_count - record_count)
        self.log_dir.is_layout_changed = True
        self._set_bounds(log_start=self.segments.first.base_offset)
        if self.number is not None:
            start = self.log_start_offset
            self.damage = tuple(
                each
                for each in self.damage
                if each.next_good_offset is None or each.next_good_offset > start
            )

    def on_damage(self, damage: Damage) -> None:
        """Stop the log: bytes in it contradict a checksum.

        Appends in flight are finished; new ones are refused. In a replica set a log
        whose damage has an end continues, because other copies have these bytes. No
        effect in state OFFLINE or CLOSED.
        """
        if (self.state, LogEvent.DAMAGE) not in TRANSITIONS:
            return
        before, self.damage = self.damage, merge_damage((*self.damage, damage))
        self.log_dir.is_damage_new = True
        ends = [each.next_good_offset for each in self.damage]
        is_bounded = all(end is not None and end <= self.synced_end for end in ends)
        goes_on = self.number is not None and is_bounded
        if not goes_on or self.state is LogState.STOPPED:
            self._apply(LogEvent.DAMAGE)
        if self.damage != before:
            what = "damage found" if goes_on else "log stopped"
            _log.error("%s: partition=%s %s", what, self.log_id, damage)
        self._wake_waiters()

    def on_mended(self, mended: Damage) -> None:
        """Remove a damaged range that is good and synced again.

        A log that was stopped for it is reopened instead (`begin_reopen`).
        """
        self.damage = tuple(each for each in self.damage if each != mended)
        self.lost -= {mended}
        # The file may have been replaced; the open one would be the old one.
        self._files.forget(mended.path, self.log_dir.reader)
        self._mend_waiters.wake_below(None)

    def on_lost(self, damage: Damage) -> None:
        """Mark a damaged range as lost: no replica has a good copy of it."""
        self.lost |= {damage}
        self._mend_waiters.wake_below(None)

    def on_offline(self) -> None:
        """Fail everything: the data directory had a disk error."""
        self._apply(LogEvent.DISK_ERROR)
        self._give_up()
        self._wake_waiters()
        if self.on_moved is not None:
            self.on_moved(self)

    def begin_close(self) -> None:
        """Refuse appends from now on; appends in flight are finished."""
        self._apply(LogEvent.CLOSE)
        self._wake_waiters()

    def finish_close(self) -> None:
        """Refuse everything, and fail appends that were never answered."""
        self._apply(LogEvent.CLOSED)
        self._give_up()

    # -- helpers

    def _check_append(self, size_bytes: int, *, completes: bool = False) -> None:
        if self.state is not LogState.OPEN:
            raise self._refusal()
        held = self._held
        if held is not None and self.next_offset == held.stop and not completes:
            raise NoSpaceError(
                f"partition {self.log_id} takes no put before a committed transaction"
                f" is whole there: a crash has cut it, offset={held.start}"
                f" found_bytes={len(held)}"
            )
        size_max = self._size_bytes_max
        size_before = self.next_offset - self.log_start_offset
        if size_max and size_before >= size_max:
            raise NoSpaceError(
                f"partition {self.log_id} is full: expected less than {size_max} bytes,"
                f" got {size_before}"
            )
        self.log_dir.check_free_space(size_bytes)

    def _give_up(self) -> None:
        """Fail everything in flight: its outcome will not be known."""
        self._refused_count += len(self._in_flight)
        self.end_in_doubt(self._end_cause, until=self.next_offset)
        self._in_flight.clear()
        self.next_offset = self.log_end

    def _next_high_watermark(self) -> Offset:
        """Return the next high watermark of a log in a replica set."""
        bound = high_watermark(self.synced_end, self._held, self._bound)
        if self.state is LogState.REOPENING:
            return self.high_watermark
        is_idle = self.state is LogState.STOPPED and not len(self._in_flight)
        if self.state is LogState.FOLLOWING or is_idle:
            # Stopped ones too: bytes above the high watermark are not mended.
            end = max(self.high_watermark, bound)
        else:
            # Copies may end inside an append: readers see it whole or not at all.
            end = self._in_flight.last_end(bound) or self.high_watermark
        if self._settled_from is not None and end >= self._settled_from:
            self.is_settled = True
        if self.number is not None and end > self.high_watermark:
            mark = Watermark(self.number, end, self.log_start_offset)
            self.log_dir.unwritten_watermarks[self.number] = mark
        return end
