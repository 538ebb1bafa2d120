"""The state of one queue: open messages, their leases, done ranges. Pure.

    floor ........ open, done, done, open ........ scan offset ........ end of the log
      |-- every message is open, or in a done range --|-- not looked at yet --|

    READY ── take ──> LEASED ── ack ─────────────────────────> done
      ^                 │ ├── nack, lease over ──> DELAYED or READY; too often: DEAD
      └── due, release ─┘ ├── reject ──> DEAD ── its letter is stored ──> done
                          └── ack in a transaction ──> HELD ── commit ──> done
                                 LEASED <── rollback ────┘

Messages are found (`found`) and given out in log order, and settled in any order. Each
delivery has a number; a settle is valid until the message is given out again (table in
docs/messaging.md). Changes that must survive a restart are collected for `state_log.py`
and take effect at once. Leases are not stored: after a restart a leased message is
READY, and a settle of its earlier delivery is valid until the message is given out
again. A HELD message stays open and belongs to its transaction: it has no lease to
expire, and no settle changes it. The commit itself stores that the message is done, in
a record among the puts of the transaction; no change is collected here.

An *incarnation* is the time between two starts of a queue. Messages that were in the
log at a restart are READY but not *queued* to be given out until the `reclaim` time is
over, so that workers can reconnect and extend their leases. Messages appended since
were never given out, and are queued at once. After a clean shutdown the stored state
names the leased messages, and only these wait.

In an ordered group a message is READY but not *queued* while an earlier message with
its key is open, or is done and that is not stored yet. A message whose lease expired
twice without a nack goes out alone, because it may crash its workers.

    Invariant: every message below the scan offset is open or in a done range; no open
    message is below the floor.
"""

import heapq
import zlib
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from metaq.deadlines import Deadlines
from metaq.model import Offset, SizeBytes
from metaq.protocol.queue_frames import GROUP_DELAY, Settlement, SettleVerb, Word
from metaq.queues.leases import (
    Lease,
    LeaseTable,
    MessageState,
    OpenBound,
    OpenMessage,
    Reclaim,
)
from metaq.queues.rules import INCARNATION_SHIFT, Now, QueueRules
from metaq.queues.state_log import (
    KEPT_DUE_MS,
    Change,
    Done,
    DoneRanges,
    QueueSnapshot,
    Returned,
)

PASSED_BYTES_MAX: Final = 16 << 20
"""Passed-over bytes that are stored even without another change. A restart reads
passed-over messages again unless they were stored."""

ALONE_COUNT: Final = 2
"""Number of expired leases without a nack after which a message goes out alone."""


class LeasedMessage(NamedTuple):
    """A message that was given out."""

    offset: Offset
    size_bytes: SizeBytes
    delivery: int
    """Number of the delivery; see `INCARNATION_SHIFT`."""
    deliveries: int
    """Deliveries of the message so far, with this one."""


class DeadLetter(NamedTuple):
    """A message to be stored as a dead letter."""

    offset: Offset
    size_bytes: SizeBytes
    deliveries: int
    cause: str


class HotKey(NamedTuple):
    """The key with the most open messages in an ordered group."""

    lock: int
    """CRC-32 of the key."""
    open_count: int
    offset: Offset
    """Offset of its first open message; the others wait for that one."""
    worker: str
    """Worker that holds the first message; "" for none."""


_DELIVERED: Final = frozenset({MessageState.LEASED, MessageState.HELD})
"""States in which the current delivery is already counted in `count`."""


_ENDED: Final = frozenset({SettleVerb.NACK, SettleVerb.RELEASE})
"""Verbs that end a lease; without effect when it has ended."""


class QueueState:
    """One queue. Owned by its service; not thread-safe."""

    def __init__(
        self,
        rules: QueueRules,
        snapshot: QueueSnapshot,
        *,
        open_max: int,
        bound: OpenBound | None = None,
        reclaim: Reclaim | None = None,
    ) -> None:
        """Begin an incarnation of a queue.

        Args:
            rules: options of the group.
            snapshot: stored state, with the number of this incarnation; the queue owns
                it.
            open_max: maximum number of open messages; at it, no more are found.
            bound: the same for all queues together; None: no such bound.
            reclaim: messages that workers may hold from earlier incarnations; None:
                no messages.
        """
        self.rules = rules
        self.floor = snapshot.floor
        """Every message below this offset is done."""
        self.scan_offset = snapshot.floor
        """Offset of the next message to find."""
        self.ready_count = 0
        """Messages queued to be given out."""
        self.done_count = 0
        """Messages done in this incarnation: handled, passed over, dropped or dead."""
        self.expired_count = 0
        """Leases that ended before their messages were settled."""
        self.letter_count = 0
        """Messages that became dead letters."""
        self.passed_count = 0
        """Messages that do not match the group's filter."""
        self.dropped_count = 0
        """Messages that were given up without a dead letter."""
        self.held_count = 0
        """Messages that transactions hold."""
        self.lost_bytes = 0
        """Bytes that retention deleted before their messages were found."""
        self.skipped_bytes = 0
        """Bytes that were skipped by command."""
        self._open_max = open_max
        self.bound = bound or OpenBound()
        self.leases: Final = LeaseTable()
        """Leases; cut short while their worker has no connection."""
        self.reclaim = reclaim
        """None once the reclaim time is over."""
        self._reclaim_end = Offset(0) if reclaim is None else reclaim.end
        self._kept = frozenset[Offset]() if reclaim is None else snapshot.kept()
        """Messages that were leased at the last clean shutdown."""
        self.incarnation: Final = snapshot.incarnation
        """Number of this incarnation, 1 or more."""
        self._first_incarnation = snapshot.first_incarnation
        self._counter = 0
        """Of the last delivery; even, so that `delivery - 1`, which is stored for a
        leased message, is after all earlier deliveries and is none itself."""
        self._done = snapshot.done
        self._returned = snapshot.open_returned()
        self._open: dict[Offset, OpenMessage] = {}
        self._queued: list[Offset] = []
        self._alone: list[Offset] = []
        self._delays: Deadlines[Offset] = Deadlines()
        self._keys: dict[int, list[Offset]] = {}
        self._changes = list[Change]()
        self._passed = DoneRanges()
        """Ranges passed over since the last `drain_changes`."""
        self._passed_bytes = 0
        self._ended = list[OpenMessage]()
        """Messages done since the last `drain_ended` whose keys are not free yet."""
        self._letters = list[DeadLetter]()
        self._skip_done()

    # -- figures

    @property
    def open_count(self) -> int:
        """Return the number of open messages."""
        return len(self._open)

    @property
    def delayed_count(self) -> int:
        """Return the number of messages that wait for the end of a delay."""
        return len(self._delays)

    @property
    def has_changes(self) -> bool:
        """Return whether there are changes or dead letters to store."""
        return bool(
            self._changes or self._letters or self._passed_bytes >= PASSED_BYTES_MAX
        )

    @property
    def is_full(self) -> bool:
        """Return whether the queue has its maximum of open messages."""
        return len(self._open) >= self._open_max

    @property
    def has_room(self) -> bool:
        """Return whether both bounds allow another open message."""
        return not self.is_full and self.bound.count < self.bound.count_max

    def leave_bound(self) -> None:
        """Stop counting in the common bound, because the queue leaves memory."""
        self.bound.count -= len(self._open)
        self.bound = OpenBound()  # a letter may still be stored

    def hot_key(self) -> HotKey | None:
        """Return the key with most open messages; None if no message waits for one."""
        lock = max(self._keys, key=lambda each: len(self._keys[each]), default=0)
        # A done message keeps its key until that is stored.
        waiting = [each for each in self._keys.get(lock, ()) if each in self._open]
        if len(waiting) < 2:
            return None
        first = self._open[waiting[0]]
        worker = "" if first.lease is None else first.lease.worker
        return HotKey(lock, len(waiting), first.offset, worker)

    @property
    def needs_new_incarnation(self) -> bool:
        """Whether half of the delivery numbers are used and no message is held."""
        return self._counter >> (INCARNATION_SHIFT - 1) > 0 and not self.held_count

    def is_done(self, offset: Offset) -> bool:
        """Return whether the message at an offset is done."""
        return offset < self.floor or self._done.end_at(offset) is not None

    def was_out(self, offset: Offset) -> bool:
        """Return whether a message to be found was out in an earlier incarnation.

        It matched the filter of that time, and is found again whatever it is now.
        """
        return offset in self._returned

    def next_due_ms(self) -> int | None:
        """Return a time before which `on_time` has nothing to do; None if none."""
        until_ms = None if self.reclaim is None else self.reclaim.until_ms
        firsts = self.leases.first_ms, self._delays.first_s, until_ms
        return min((int(each) for each in firsts if each is not None), default=None)

    # -- finding

    def wants_scan(self, count: int) -> bool:
        """Return whether to find more messages for a take of `count`."""
        # Ends with `has_room` written out: this runs for every message.
        return (
            self.ready_count - len(self._alone) < count
            and len(self._open) < self._open_max
            and self.bound.count < self.bound.count_max
        )

    def found(
        self,
        offset: Offset,
        size_bytes: SizeBytes,
        key: bytes | None,
        now: Now,
        *,
        expiry_ms: int | None = None,
    ) -> None:
        """Add the message at the scan offset as an open one.

        Args:
            offset: of its record, the scan offset or, after a gap, a later one.
            size_bytes: of its record.
            key: its key in an ordered group; None: it waits for no other message.
            now: current time, for a message that was returned with a delay.
            expiry_ms: wall-clock time from which it is given up; None: never.
        """
        if offset > self.scan_offset:
            self._done.add(self.scan_offset, offset)
            self._skip_done()
            if self.scan_offset != offset:
                return
        lock = None if key is None else zlib.crc32(key)
        before = self._returned.pop(offset, None) if self._returned else None
        count = 0 if before is None else before.deliveries
        message = OpenMessage(offset, size_bytes, count, lock, expiry_ms)
        if before is not None:
            message.delivery = before.delivery
        self._open[offset] = message
        self.bound.count += 1
        if lock is not None:
            self._keys.setdefault(lock, []).append(offset)
        self.scan_offset = message.end
        if len(self._done):
            self._skip_done()
        if before is not None and now.wall_ms < before.due_ms != KEPT_DUE_MS:
            message.state = MessageState.DELAYED
            left_ms = before.due_ms - now.wall_ms
            if before.delivery:
                left_ms = min(left_ms, before.left_ms)
            self._delays.set(offset, now.mono_ms + left_ms)
        else:
            self._queue(message)

    def pass_over(self, end: Offset, count: int) -> None:
        """Count messages from the scan offset to `end` as done: they do not match.

        Stored with the next change, or once `PASSED_BYTES_MAX` is reached; until then a
        restart reads them again.
        """
        self._passed.add(self.scan_offset, end)
        self._passed_bytes += end - self.scan_offset
        self._done.add(self.scan_offset, end)
        self.done_count += count
        self.passed_count += count
        self._skip_done()

    def _skip_done(self) -> None:
        while (end := self._done.end_at(self.scan_offset)) is not None:
            self.scan_offset = end
        if not self._open:
            self._raise_floor(self.scan_offset)

    def trim(self, log_start: Offset) -> int:
        """Count messages that retention deleted as done; return how many were open."""
        if log_start <= self.floor:
            return 0
        self.lost_bytes += max(0, log_start - self.scan_offset)
        return self._drop(self.floor, log_start)

    def skip(self, start: Offset, end: Offset) -> None:
        """Count messages that begin in an unreadable range as done.

        Args:
            start: at or below the scan offset.
            end: offset of a record, or the log end.
        """
        self.skipped_bytes += end - start
        self._drop(start, end)

    def _drop(self, start: Offset, end: Offset) -> int:
        """Count a range as done; return the number of open messages in it."""
        self._changes.append(Done(start, end))
        dropped = [each for at, each in self._open.items() if start <= at < end]
        for message in dropped:
            self._end_stored(message)
        self.scan_offset = max(self.scan_offset, end)
        self._skip_done()  # first: ranges below the floor are forgotten
        self._add_done(start, end)
        return len(dropped)

    def count_in(self, start: Offset, end: Offset) -> int:
        """Return the number of open messages that begin in a range."""
        return sum(start <= offset < end for offset in self._open)

    # -- giving out

    @property
    def is_alone_first(self) -> bool:
        """Whether the first queued message goes out alone."""
        alone, other = self._first(self._alone), self._first(self._queued)
        return alone is not None and (other is None or alone.offset < other.offset)

    def take(
        self,
        worker: str,
        count: int,
        bytes_max: int,
        lease_ms: int,
        now: Now,
        *,
        is_alone: bool = False,
    ) -> list[LeasedMessage]:
        """Give out queued messages in the order of their offsets.

        Expired messages are given up instead.

        Args:
            worker: worker that gets them.
            count: maximum number of messages.
            bytes_max: maximum sum of their sizes; the first message may exceed it.
            lease_ms: duration of the lease.
            now: current time.
            is_alone: take one message that goes out alone, and none of the others.
        """
        taken = list[LeasedMessage]()
        left_bytes, queued = bytes_max, self._alone if is_alone else self._queued
        find, lease = (
            self._open.get,
            self.leases.lease_of(worker, now.mono_ms + lease_ms),
        )
        base = self.incarnation << INCARNATION_SHIFT
        while queued and len(taken) < count:
            message = find(queued[0])
            if message is None or message.heap is not queued:
                heapq.heappop(queued)  # as in `_first`
                continue
            offset, size_bytes = message.offset, message.size_bytes
            if taken and (is_alone or size_bytes > left_bytes):
                break
            if message.expiry_ms is not None and message.expiry_ms <= now.wall_ms:
                self._dead_letter(message, "expired")
                continue
            heapq.heappop(queued)
            message.heap = None
            self.ready_count -= 1
            self._counter += 2
            message.delivery = delivery = base | self._counter
            message.count += 1
            lease.add(message)
            left_bytes -= size_bytes
            taken.append(LeasedMessage(offset, size_bytes, delivery, message.count))
        if not lease.messages:
            self.leases.drop(lease)
        return taken

    def _first(self, queued: list[Offset]) -> OpenMessage | None:
        while queued:
            message = self._open.get(queued[0])
            if message is not None and message.heap is queued:
                return message
            heapq.heappop(queued)  # settled or returned since it was pushed
        return None

    def release(self, taken: Sequence[LeasedMessage]) -> None:
        """Undo the delivery of messages that never reached their worker.

        Messages that are no longer leased by this delivery are not changed.
        """
        for each in taken:
            message = self._open.get(each.offset)
            is_same = message is not None and message.delivery == each.delivery
            if message is not None and is_same and message.state is MessageState.LEASED:
                self._release(message)

    # -- settling

    def settle_all(
        self, worker: str, entries: Iterable[Settlement], now: Now
    ) -> list[Word]:
        """Settle deliveries in order, as `settle`; adjacent acks become one change.

        Acks of leased messages without a key, by far the most, are settled inline.
        """
        words, messages, left = list[Word](), self._open, list[Lease]()
        ack, ok, count = SettleVerb.ACK, Word.OK, 0
        start = end = Offset(-1)  # range that is done and not recorded yet
        for entry in entries:
            offset, delivery, verb, _, _ = entry
            message = messages.get(offset)
            if (
                message is None
                or verb is not ack
                or (lease := message.lease) is None
                or message.delivery != delivery
                or message.key is not None
            ):
                if start != end:
                    self._note_done(start, end)
                    start = end
                self.leases.drop_empty(left)
                words.append(self.settle(worker, entry, now))
                continue
            if offset != end:
                if start != end:
                    self._note_done(start, end)
                start = offset
            end = Offset(offset + message.size_bytes)
            lease.remove(message)
            if not left or lease is not left[-1]:
                left.append(lease)
            del messages[offset]
            count += 1
            words.append(ok)
        if start != end:
            self._note_done(start, end)
        self.bound.count -= count
        self.done_count += count
        self.leases.drop_empty(left)
        return words

    def _note_done(self, start: Offset, end: Offset) -> None:
        self._changes.append(Done(start, end))
        self._add_done(start, end)

    def settle(
        self, worker: str, entry: Settlement, now: Now, *, is_held: bool = False
    ) -> Word:
        """Settle one delivery, by the table in docs/messaging.md.

        Args:
            worker: worker that settles; an extend leases the message to it.
            entry: the settlement; its arguments are in range.
            now: current time.
            is_held: an ack holds the message until `end_hold`.

        Returns:
            The reply; DONE and LOST mean that nothing was changed.
        """
        message = self._open.get(entry.offset)
        if message is None:
            return Word.DONE if self.is_done(entry.offset) else Word.LOST
        if message.state is MessageState.DEAD:
            is_same = entry.delivery == message.delivery
            return (
                Word.LATER
                if is_same and entry.verb is not SettleVerb.ACK
                else Word.LOST
            )
        if message.state is MessageState.HELD:
            is_same = entry.delivery == message.delivery
            return Word.OK if is_same and entry.verb is SettleVerb.EXTEND else Word.LOST
        if not self._is_good(message, entry.delivery):
            return Word.LOST
        if entry.verb is not SettleVerb.ACK and not self._is_first(message):
            # It was given out before the group became ordered.
            return Word.LOST
        is_over = message.state is not MessageState.LEASED
        if is_over and message.delivery == entry.delivery and entry.verb in _ENDED:
            return Word.OK  # settled before, or the lease has ended
        if message.delivery != entry.delivery:
            # A delivery of an earlier incarnation, whose count was not stored.
            message.delivery = entry.delivery
            message.count += message.state is not MessageState.LEASED
        match entry.verb:
            case SettleVerb.ACK if is_held:
                self._leave(message)
                message.state, message.worker = MessageState.HELD, worker
                self.held_count += 1
            case SettleVerb.ACK:
                self._finish(message)
            case SettleVerb.NACK:
                self._nack(message, entry.argument, now)
            case SettleVerb.RELEASE:
                self._release(message)
            case SettleVerb.EXTEND:
                self._lease(message, worker, now.mono_ms + entry.argument)
            case SettleVerb.REJECT:
                self._dead_letter(message, f"rejected: {entry.text}")
        return Word.OK

    def _is_good(self, message: OpenMessage, delivery: int) -> bool:
        """Return whether a message was not given out again after a delivery."""
        if not delivery:
            return False
        if message.delivery == delivery:
            return True
        incarnation = delivery >> INCARNATION_SHIFT
        if not self._first_incarnation <= incarnation < self.incarnation:
            return False
        return message.delivery < delivery

    def _nack(self, message: OpenMessage, delay_ms: int, now: Now) -> None:
        if message.count >= self.rules.deliveries_max:
            self._dead_letter(message, f"deliveries: {message.count}")
            return
        if delay_ms == GROUP_DELAY:
            delay_ms = self.rules.retry_delay_ms(message.count)
        message.silent_count = 0
        self._return(message, delay_ms, now)

    def letter_stored(self, offset: Offset) -> None:
        """Count a message as done; after a restart its stored letter shows that."""
        message = self._open.get(offset)
        if message is not None:
            self.letter_count += 1
            self._end_stored(message)

    def drop_letter(self, offset: Offset) -> None:
        """Count a message as done without a dead letter."""
        message = self._open.get(offset)
        if message is not None:
            self.dropped_count += 1
            self._finish(message)

    def range_of(self, offset: Offset) -> Done:
        """Return the range of an open message."""
        return Done(offset, self._open[offset].end)

    def end_hold(self, offset: Offset, now: Now, *, is_done: bool) -> None:
        """Apply the outcome of a transaction to a message that it holds.

        After a commit the message is done; the transaction has stored that. After a
        rollback the message is leased to its worker again, for a full lease from now.
        """
        message = self._open.get(offset)
        if message is None or message.state is not MessageState.HELD:
            return  # retention deleted it
        if is_done:
            self._end_stored(message)
        else:
            self._lease(message, message.worker, now.mono_ms + self.rules.lease_ms)

    def drain_changes(self) -> list[Change]:
        """Return the changes since the last call; adjacent done ranges are merged."""
        changes, self._changes = self._changes, []
        done, self._passed, self._passed_bytes = self._passed, DoneRanges(), 0
        for each in changes:
            if isinstance(each, Done):
                done.add(*each)
        returned = [each for each in changes if isinstance(each, Returned)]
        return [*returned, *done.ranges()]

    def drain_ended(self) -> list[OpenMessage]:
        """Return the keyed messages that became done since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def free_keys(self, ended: Iterable[OpenMessage]) -> None:
        """Queue the next message of each key. Call it once the changes are stored."""
        for message in ended:
            self._free_key(message)

    def drain_letters(self) -> list[DeadLetter]:
        """Return the dead letters to store that were added since the last call."""
        letters, self._letters = self._letters, []
        return letters

    # -- time

    def on_time(self, now: Now) -> None:
        """End the leases, delays and reclaim time that have expired."""
        if self.reclaim is not None and self.reclaim.until_ms <= now.mono_ms:
            self.reclaim, self._reclaim_end, self._kept = None, Offset(0), frozenset()
            for message in [*self._open.values()]:
                if message.state is MessageState.READY:
                    self._queue(message)
        for lease in self.leases.take_due(now.mono_ms):
            for message in [*lease.messages]:
                self.expired_count += 1
                if message.count >= self.rules.deliveries_max:
                    self._dead_letter(message, f"deliveries: {message.count}")
                else:
                    message.silent_count += 1
                    self._return(message, 0, now)
        for offset in self._delays.take_due(now.mono_ms):
            message = self._open[offset]
            message.state = MessageState.READY
            self._queue(message)

    # -- for a restart

    def snapshot(self, now: Now) -> QueueSnapshot:
        """Return the state to store; deliveries still open are not counted in it."""
        returned = dict(self._returned)
        for offset, message in self._open.items():
            given = message.state in _DELIVERED
            count, delivery = message.count - given, message.delivery - given
            due_s = self._delays.get(offset)
            due_ms = left_ms = 0
            if message.state is MessageState.DELAYED and due_s is not None:
                left_ms = max(0, int(due_s) - now.mono_ms)
                due_ms = now.wall_ms + left_ms
            if count > 0 or due_ms:
                size = message.size_bytes
                returned[offset] = Returned(
                    offset, size, count, due_ms, delivery, left_ms
                )
        done = DoneRanges(self._done.ranges())
        return QueueSnapshot(self.floor, done, returned, self.incarnation)

    def leased(self) -> list[Returned]:
        """Return the leased messages, which the next incarnation keeps for workers."""
        return [
            Returned(at, one.size_bytes, one.count - 1, KEPT_DUE_MS, one.delivery - 1)
            for at, one in self._open.items()
            if one.state is MessageState.LEASED
        ]

    # -- changes of one message

    def _queue(self, message: OpenMessage) -> None:
        """Queue a READY message, unless an earlier open message has its key.

        A message that a worker may hold from an earlier incarnation is queued when the
        reclaim time is over. One that was given out often enough becomes a dead letter:
        its letter was not stored before the restart, or the maximum was reduced.
        """
        at = message.offset
        if message.heap is not None or at < self._reclaim_end or at in self._kept:
            return
        if message.key is None or self._is_first(message):
            if message.count >= self.rules.deliveries_max:
                self._dead_letter(message, f"deliveries: {message.count}")
                return
            is_alone = message.silent_count >= ALONE_COUNT
            message.heap = self._alone if is_alone else self._queued
            heapq.heappush(message.heap, at)
            self.ready_count += 1

    def _is_first(self, message: OpenMessage) -> bool:
        """Return whether no earlier open message has its key."""
        key = message.key
        return key is None or self._keys[key][0] == message.offset

    def _unqueue(self, message: OpenMessage) -> None:
        """Take a message off the queue; its heap entry stays and is ignored."""
        if message.heap is not None:
            message.heap = None
            self.ready_count -= 1

    def _leave(self, message: OpenMessage) -> None:
        """Remove a message from its heap, lease, delay or count of held messages."""
        self._unqueue(message)
        if message.lease is not None:
            lease = message.lease
            lease.remove(message)
            self.leases.drop_empty([lease])
        elif message.state is MessageState.DELAYED:
            self._delays.clear(message.offset)
        elif message.state is MessageState.HELD:
            self.held_count -= 1

    def _lease(self, message: OpenMessage, worker: str, end_ms: int) -> None:
        self._leave(message)
        self.leases.lease_of(worker, end_ms).add(message)

    def _return(self, message: OpenMessage, delay_ms: int, now: Now) -> None:
        """Return a message to be given out again, and store its count of deliveries."""
        self._leave(message)
        due_ms = now.wall_ms + delay_ms if delay_ms else 0
        offset, size_bytes = message.offset, message.size_bytes
        self._changes.append(
            Returned(
                offset, size_bytes, message.count, due_ms, message.delivery, delay_ms
            )
        )
        if delay_ms:
            message.state = MessageState.DELAYED
            self._delays.set(offset, now.mono_ms + delay_ms)
        else:
            message.state = MessageState.READY
            self._queue(message)

    def _release(self, message: OpenMessage) -> None:
        """Return a message unprocessed; its delivery does not count."""
        # No change is stored: the stored count is that before the delivery.
        message.count -= 1
        message.delivery = 0
        self._leave(message)
        message.state = MessageState.READY
        self._queue(message)

    def _dead_letter(self, message: OpenMessage, cause: str) -> None:
        """Stop giving out a message: make it a dead letter, or drop it."""
        if not self.rules.takes_letters:
            self.dropped_count += 1
            self._finish(message)
            return
        self._leave(message)
        message.state = MessageState.DEAD
        self._letters.append(
            DeadLetter(message.offset, message.size_bytes, message.count, cause)
        )

    def _finish(self, message: OpenMessage) -> None:
        self._changes.append(Done(message.offset, message.end))
        self._end(message)
        if message.key is not None:
            # The next message of the key waits until this change is stored: a crash
            # before that would give this message out again, after the next one.
            self._ended.append(message)

    def _end_stored(self, message: OpenMessage) -> None:
        """Count a message as done where the log or a transaction has stored that."""
        self._end(message)
        if message.key is not None:
            self._free_key(message)

    def _end(self, message: OpenMessage) -> None:
        """Count a message as done."""
        self._leave(message)
        del self._open[message.offset]
        self.bound.count -= 1
        self.done_count += 1
        self._add_done(message.offset, message.end)

    def _add_done(self, start: Offset, end: Offset) -> None:
        if start <= self.floor:
            self._raise_floor(max(self.floor, end))
        else:
            self._done.add(start, end)

    def _free_key(self, message: OpenMessage) -> None:
        assert message.key is not None
        waiting = self._keys[message.key]
        waiting.remove(message.offset)
        if not waiting:
            del self._keys[message.key]
            return
        first = self._open.get(waiting[0])
        if first is not None and first.state is MessageState.READY:
            self._queue(first)

    def _raise_floor(self, floor: Offset) -> None:
        self.floor = self._done.take_below(floor)
