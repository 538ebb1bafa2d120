"""One partition on the event loop's side: appends, what becomes of them, roles.

Theory of operation. The loop's thread owns everything in a `PartitionLog` and decides
everything; the storage thread writes (`log_writer.py`) and reports (`appender.py`).

    log start ... high watermark ... log end ... next offset
        |------ readable ----|-- written --|-- in flight --|

* `append` gives out the next offset at once and queues a request; it never blocks.
  It is answered when the high watermark has passed its last byte, in order.
* Reads stop at the high watermark (`readable_log.py`).
* When the disk is full, everything in flight that is not written fails with it,
  `next_offset` goes back to the log end, and the version grows (see `appender.py`).
* What may be stored ends *in doubt*: its bytes and the notes of its batches stay.
* An append of which a crash has left only the beginning may be *held*: the high
  watermark stays in front of it, and nothing else is appended, until the rest is there.
* In a replica set others have a say in the high watermark (`set_bound`): copies that
  have not synced so much yet, or the leader that is followed. It stops where an append
  ends. With the role every ticket ends in doubt, because from then on other bytes may
  come to the same offsets.

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
from metaq.storage.damage import apart
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
    """Return the offset that no readable byte reaches: the least of all bounds. Pure.

    Args:
        synced_end: offset after the last byte that is synced here.
        held: offsets of an append of which the rest is not synced; None: there is none.
        others_end: how far the other copies allow it; None: there are none.
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
        """Take a log as recovery found it, or a new one.

        Args:
            log_id: which partition.
            log_dir: its data directory.
            writer: the storage thread's side of it.
            segments: at least one; the last one's end is the end of the log.
            files: shared by all logs of the broker.
            is_group_commit: the durability mode, for statistics.
            interval_s: how old unsynced records may become, as the writer has it.
            size_bytes_max: refuse appends that make the log larger; 0: no limit.
            producers: which batches may be sent again; owned from now on.
            record_count: records in it, as far as they are known.
            damage: damaged ranges; any makes the log start in STOPPED.
            number: its log number in a replica set.
            watermark: nothing after it is readable yet; None: the end.
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
        """The storage thread's side; not to be touched on the loop's thread."""
        self.is_group_commit: Final = is_group_commit
        """An acknowledged record is on disk."""
        self._size_bytes_max = size_bytes_max
        self.is_settled = number is None and watermark is None
        """Whether the high watermark is one of this life: in a replica set only once a
        follower has what its leader had at the join, and a leader what it found."""
        self.leader_start = self.log_start_offset
        """Log start of the leader: while this log follows, retention goes to there."""
        self.trim_offset: Offset | None = None
        """Nothing below it is needed, and the policy of its topic does not count; None:
        that counts. Of a log of the broker's own."""
        self.on_moved: Callable[[PartitionLog], None] | None = None
        """Called after log end, synced end or high watermark has moved, and when no
        more will."""
        self._held: range | None = None
        """Offsets of an append that was cut, until the rest of it is synced."""
        self._bound: Offset | None = None
        """Bound of the high watermark by other copies; None: there are none."""
        self._settled_from: Offset | None = None
        """High watermark with which it is settled; None: it is not known yet."""
        self.record_count = record_count
        """Records stored, as far as that is known."""
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
        """Return the offset below which appends are answered as stored.

        Threshold mode promises less: there it is the end of the written bytes.
        """
        return self.high_watermark if self.is_group_commit else self.log_end

    @property
    def _end_cause(self) -> str:
        """Return why nothing more will be known of what is in flight."""
        cause = self.log_dir.offline_cause or f"partition {self.log_id} was closed"
        return str(cause)

    @property
    def _is_cut(self) -> bool:
        """Whether the log is held, and nothing was written since."""
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
            chunks: their bytes, ownership passes to the log; must not change.
            size_bytes: sum of the lengths of the chunks, 1 or more.
            record_count: number of records, 1 or more.
            last_id: id of the last of them.
            ticket: called once on this thread, in the order of the appends.
            batch: to be remembered in `producers`; forgotten again if it is certainly
                not stored.
            before_write: called on the storage thread, see `AppendRequest`.
            finish: steps that finish the bytes in place, taken on the storage thread
                before they are written; they only compute.
            is_light: the connection has little in flight; see `GroupQueue`.
            joins: others come in this turn of the loop: they are committed together.
            completes: it begins with the rest of the append that is held.

        Returns:
            The offset of the first byte; the bytes lie there when the ticket says so.

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
        # All books are kept before the request goes out: a worker that runs at once
        # comes back to this log before `submit` returns. The one line that may find no
        # memory comes first.
        self._in_flight.add(request)
        self.next_offset = Offset(offset + size_bytes)
        if batch is not None:
            self.producers.add(batch)
        # Batches of transactions come by the group, as their journal is written.
        self.log_dir.submit(request, joins=joins or before_write is not None)
        return offset

    def append_copy(
        self, copy: CopiedAppends, ticket: AppendTicket, *, joins: bool = False
    ) -> None:
        """Queue bytes of the leader that this log follows; never blocks.

        Args:
            copy: verified; ownership of its bytes passes to the log.
            ticket: called once on this thread, with *stored* after the sync here.
            joins: others come in this turn of the loop, see `CommitOwner.submit`.

        Raises:
            LogOfflineError: the log is stopped because of damage.
            LogDirOfflineError: its data directory had a disk error.
            NoSpaceError: there is not enough free space.
            ClosedError: the log does not follow now, or is closed or closing.
            StorageError: the copy does not begin where the log ends.
        """
        if self.state is not LogState.FOLLOWING:
            raise self._refusal()
        if copy.offset != self.next_offset:
            raise StorageError(
                f"copy does not go on where partition {self.log_id} ends: expected"
                f" offset {self.next_offset}, got {copy.offset}"
            )
        self.log_dir.check_room(copy.size_bytes)
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
        """Roll where the leader did: after what is queued, unless a segment is empty.

        Without space the next append tries again. Where the log does not end there
        then, nothing happens: there was no space for what is queued, or it has passed
        over what came while it was stopped. The leader sends that again, and this.

        Args:
            offset: where the leader's segment begins.
        """
        roll = self.log_dir.appender.roll_on_order
        self.log_dir.submit(partial(roll, self.writer, self, offset))

    def join(self, batch: StoredBatch, ticket: AppendTicket) -> None:
        """Answer a batch that is sent again, together with its first time.

        At once if that was answered, or can be no more; the bytes alone are no answer.

        Args:
            batch: one of `producers`.
            ticket: called once on this thread, also before this method returns.
        """
        if batch.end_offset <= self._answered_end:
            ticket.on_stored()
            return
        # A copy is answered when it is synced here, which is no answer to a producer.
        if self.state in COPYING or not self._in_flight.join(batch.end_offset, ticket):
            ticket.on_failed(MayBeStoredError(self._end_cause))

    def end_in_doubt(self, cause: str, *, until: Offset) -> None:
        """Fail appends that are in flight for too long: they may be stored.

        Their bytes and the notes of their batches stay, and the high watermark passes
        them when it can. A batch that is sent again waits for that.

        Args:
            cause: why, for the error.
            until: appends that end here or before.
        """
        self._in_flight.end_in_doubt(MayBeStoredError(cause), until=until)

    def set_interval_s(self, interval_s: float) -> None:
        """Change how old unsynced records may become; 0: synced at once."""
        if interval_s != self._interval_s:
            self._interval_s = interval_s
            self.log_dir.submit(partial(self.writer.set_interval_s, interval_s))

    def sync_if_due(self, now_s: float) -> None:
        """Have unsynced records synced when the last sync is an interval ago.

        Args:
            now_s: the monotonic clock.
        """
        if (
            not self._is_sync_queued
            and self._interval_s <= now_s - self._last_sync_s
            and self.synced_end < self.log_end
        ):
            self._is_sync_queued = True
            self.log_dir.submit(partial(self.log_dir.appender.sync, self.writer, self))

    def plan_append(self, size_bytes: int) -> Offset:
        """Return a bound that no later append is below.

        Args:
            size_bytes: of what is to be appended, 1 or more.

        Raises:
            StorageError: the log would not take it now.
            ClosedError: the log is closed or closing.
        """
        self._check_append(size_bytes)
        return self.high_watermark

    # -- its role in a replica set

    def follow(self) -> None:
        """Take bytes of a leader in the place of puts; harmless when it does already.

        Puts in flight end in doubt, and waits end. What is queued is written.
        """
        self._apply(LogEvent.FOLLOW)
        self._begin_role(is_led=False)

    def lead(self) -> None:
        """Take puts after the bytes that are there; nothing may be in flight.

        What is after the high watermark is readable in one step, when `set_bound`
        allows all of it: where appends end in it is not known. A stopped log stays so.
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
        """Let the high watermark go as far as the other copies allow; never back.

        Args:
            offset: of a log that follows, the leader's high watermark; of one that
                leads, the end that every copy which counts has synced.
        """
        if self.state not in {LogState.OFFLINE, LogState.CLOSED}:
            self._bound = offset
            self._advance(self.log_end)

    def lower_high_watermark(self, offset: Offset) -> None:
        """Show nothing from an offset on any more; `LogManager` keeps its books.

        In the file of watermarks too, synced before a cut that is begun later.

        Args:
            offset: lower than the high watermark, or nothing changes here.

        Raises:
            StorageError: it does not follow.
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

    def settle(self, target: Offset) -> None:
        """Answer for the high watermark once it is here; `set_bound` follows.

        Args:
            target: of its leader, which was joined. No replica has named a later end:
                one that joins from nothing does not send readers back.
        """
        self._settled_from = target

    def begin_reopen(self) -> None:
        """Take nothing but gets until `on_reopened`.

        Raises:
            StorageError: the log takes puts, or is closed, offline or opened already.
        """
        if (self.state, LogEvent.REOPEN) not in TRANSITIONS:
            raise StorageError(
                f"partition {self.log_id} is not opened again: it is {self.state.value}"
            )
        self._apply(LogEvent.REOPEN)
        cause = f"partition {self.log_id} is opened again"
        self.end_in_doubt(cause, until=self.next_offset)

    def on_reopened(self, found: RecoveredLog, batches: Iterable[StoredBatch]) -> None:
        """Go on with what its files hold now: follow, or stay stopped for damage.

        Args:
            found: what they hold; of ranges that were damaged before it has those that
                are damaged still.
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
            damage, end = apart((*damage, lost)), self.high_watermark
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
        """Show nothing of the last append until the rest of it is there.

        Called before anything is read or appended. What ends the hold is an append that
        `completes`, when the sync passes the old log end; others are refused before.

        Args:
            offset: where that append begins, of which a crash has cut the end. In a
                sealed segment it has been shown already, by an earlier version.
        """
        if offset >= self.segments.active.base_offset:
            self._held, self.high_watermark = range(offset, self.log_end), offset

    def on_written(self, end: Offset) -> None:
        """Take note of bytes that are not synced: copies may have them.

        Where there are none its end moves with the sync.
        """
        if self.on_moved is not None and self.state is LogState.OPEN:
            self._set_bounds(log_end=end)
            self.on_moved(self)

    def on_progress(self, progress: WriterProgress) -> None:
        """Take note of written and synced bytes; answer the appends they cover.

        Progress that is older than what is known changes nothing.
        """
        if self.log_dir.on_stir is not None:
            self.log_dir.stir()
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
        """Move log end and high watermark; answer the appends that are stored now."""
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
        """Take note of a new active segment."""
        self.segments = self.segments.rolled(sealed, active)
        self.log_dir.is_layout_changed = True

    def on_refused(self, error: NoSpaceError) -> None:
        """Fail everything in flight: the disk is full, and later requests are void."""
        self._version += 1
        # What is written waits for its answer all the same.
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
        """Take note that the oldest segment is gone from the disk.

        Args:
            segment: the first of `segments`.
            record_count: records that it held.
        """
        if self.state is LogState.CLOSED:
            # Of a log that was forgotten nothing is counted any more.
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
        goes on whose damage has an end: other copies have these bytes. Nothing happens
        to a log of which nothing is believed any more.
        """
        if (self.state, LogEvent.DAMAGE) not in TRANSITIONS:
            return
        before, self.damage = self.damage, apart((*self.damage, damage))
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
        """Take note that a damaged range is good and synced again.

        A log that was stopped for it is opened again instead (`begin_reopen`).
        """
        self.damage = tuple(each for each in self.damage if each != mended)
        self.lost -= {mended}
        # It may have been made again, with the name of the one that is open.
        self._files.forget(mended.path, self.log_dir.reader)
        self._mend_waiters.wake_below(None)

    def on_lost(self, damage: Damage) -> None:
        """Take note that no replica has a good copy of a damaged range."""
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
        """Refuse appends from now on; those in flight are finished."""
        self._apply(LogEvent.CLOSE)
        self._wake_waiters()

    def finish_close(self) -> None:
        """Refuse everything, and fail requests that were never answered."""
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
        self.log_dir.check_room(size_bytes)

    def _give_up(self) -> None:
        """Fail everything in flight: nothing more will be known of it."""
        self._refused_count += len(self._in_flight)
        self.end_in_doubt(self._end_cause, until=self.next_offset)
        self._in_flight.clear()
        self.next_offset = self.log_end

    def _next_high_watermark(self) -> Offset:
        """Return the next one of a log in a replica set."""
        bound = high_watermark(self.synced_end, self._held, self._bound)
        if self.state is LogState.REOPENING:
            return self.high_watermark
        is_idle = self.state is LogState.STOPPED and not len(self._in_flight)
        if self.state is LogState.FOLLOWING or is_idle:
            # A stopped one too: what is above the high watermark is not mended.
            end = max(self.high_watermark, bound)
        else:
            # Copies may end within an append: readers see it whole or not at all.
            end = self._in_flight.last_end(bound) or self.high_watermark
        if self._settled_from is not None and end >= self._settled_from:
            self.is_settled = True
        if self.number is not None and end > self.high_watermark:
            mark = Watermark(self.number, end, self.log_start_offset)
            self.log_dir.moved[self.number] = mark
        return end
