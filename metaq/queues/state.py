"""The state of one queue: what is open, who has it, what is done. Pure.

    floor ........ open, done, done, open ........ scan offset ........ end of the log
      |-- every message is open, or in a done range --|-- not looked at yet --|

    READY ── take ──> LEASED ── ack ─────────────────────────> done
      ^                 │ ├── nack, lease over ──> DELAYED or READY; too often: DEAD
      └── due, release ─┘ ├── reject ──> DEAD ── its letter is stored ──> done
                          └── ack in a transaction ──> HELD ── commit ──> done
                                 LEASED <── rollback ────┘

Messages are found in the order of the log (`found`), given out in that order, and
settled in any. A delivery has a number; a settle is good while no later delivery has
the message (table in docs/messaging.md). What a restart must know is collected as
changes (`state_log.py`), and counts at once. Deliveries are not kept: after a restart a
worker's message is READY, and a settle of the earlier life's delivery is good until it
is given out again. While it is HELD it stays open and is its transaction's alone: no
lease ends, and no settle has an effect. What a commit changes is a record among the
puts of the transaction, none of the state.

What was in the log at a restart is READY, and not *queued* to be given out, until the
`reclaim` time is over: workers come back, and extend what they have. What was appended
since was given out by no earlier life, and waits for nothing. A life that ended in
peace has said what they have, and only that waits.

With order by key a message is READY, and not *queued* to be given out, while an earlier
one has its key that is open, or done and not stored as that. A message whose lease
ended twice goes out alone: it may kill its workers. A nack is the word of a living one.

    Invariant: below the scan offset every message is open or in a done range; the floor
    passes no open one.
"""

import heapq
import zlib
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from metaq.deadlines import Deadlines
from metaq.model import Offset, SizeBytes
from metaq.protocol.queue_frames import GROUP_DELAY, Settlement, SettleVerb, Word
from metaq.queues.leases import At, Lease, LeaseTable, OpenBound, OpenMessage, Reclaim
from metaq.queues.rules import INCARNATION_SHIFT, Now, QueueRules
from metaq.queues.state_log import (
    KEPT_DUE_MS,
    Change,
    Done,
    DoneRanges,
    QueueImage,
    Returned,
)

PASSED_BYTES_MAX: Final = 16 << 20
"""So much is passed over before it is a change by itself: a restart looks again."""

ALONE_COUNT: Final = 2
"""A message whose lease ended so often without a nack goes out alone."""


class Taken(NamedTuple):
    """A message that was given out."""

    offset: Offset
    size_bytes: SizeBytes
    delivery: int
    deliveries: int


class Letter(NamedTuple):
    """A message that is to be a dead letter."""

    offset: Offset
    size_bytes: SizeBytes
    deliveries: int
    cause: str


class HotKey(NamedTuple):
    """The key that most open messages of an ordered group have."""

    lock: int
    """Its hash, the CRC-32 of the key."""
    open_count: int
    offset: Offset
    """Of the first one; the others wait for it."""
    worker: str
    """That has it; "" for none."""


_GIVEN: Final = frozenset({At.LEASED, At.HELD})
"""Places of a message that was given out, which its count says already."""


_ENDED: Final = frozenset({SettleVerb.NACK, SettleVerb.RELEASE})
"""Verbs that end a lease, and say nothing when it has ended."""


class QueueState:
    """One queue. Owner: its service; not for two threads."""

    def __init__(
        self,
        rules: QueueRules,
        image: QueueImage,
        *,
        open_max: int,
        bound: OpenBound | None = None,
        reclaim: Reclaim | None = None,
    ) -> None:
        """Begin a life of a queue.

        Args:
            rules: options of the group.
            image: what earlier lives left, with the incarnation of this one; owned.
            open_max: nothing more is found while so many messages are open.
            bound: of all queues together; None: there is none.
            reclaim: what workers of earlier lives may have; None: nothing.
        """
        self.rules = rules
        self.floor = image.floor
        """Every message below it is done."""
        self.scan_offset = image.floor
        """The first message that was not looked at."""
        self.ready_count = 0
        """Messages that can be given out now."""
        self.done_count = 0
        """Messages done in this life: handled, passed over, dropped or dead."""
        self.expired_count = 0
        """Leases that ended before their messages were settled."""
        self.letter_count = 0
        """Messages that became dead letters."""
        self.passed_count = 0
        """Messages that are not the group's, by its filter."""
        self.dropped_count = 0
        """Messages that were given up without a dead letter."""
        self.held_count = 0
        """Messages that transactions hold."""
        self.lost_bytes = 0
        """Bytes that retention took before they were looked at."""
        self.skipped_bytes = 0
        """Bytes that were passed over by command."""
        self._open_max = open_max
        self.bound = bound or OpenBound()
        self.leases: Final = LeaseTable()
        """Cut short while their worker has no connection."""
        self.reclaim = reclaim
        """None when its time is over."""
        self._reclaim_end = Offset(0) if reclaim is None else reclaim.end
        self._kept = frozenset[Offset]() if reclaim is None else image.kept()
        """Messages that workers of the last life have, which said so."""
        self.incarnation: Final = image.incarnation
        """Number of this life, 1 or more."""
        self._first_life = image.first_life
        self._counter = 0
        self._done = image.done
        self._returned = image.open_returned()
        self._open: dict[Offset, OpenMessage] = {}
        self._queued: list[Offset] = []
        self._alone: list[Offset] = []
        self._delays: Deadlines[Offset] = Deadlines()
        self._keys: dict[int, list[Offset]] = {}
        self._changes = list[Change]()
        self._passed = DoneRanges()
        """Passed over since the last `drain_changes`."""
        self._passed_bytes = 0
        self._ended = list[OpenMessage]()
        """Done since the last `drain_ended`; what has their keys waits still."""
        self._letters = list[Letter]()
        self._skip_done()

    # -- figures

    @property
    def open_count(self) -> int:
        """Return how many messages are open."""
        return len(self._open)

    @property
    def delayed_count(self) -> int:
        """Return how many messages wait for the end of a delay."""
        return len(self._delays)

    @property
    def has_changes(self) -> bool:
        """Return whether anything is to be stored, letters included."""
        return bool(
            self._changes or self._letters or self._passed_bytes >= PASSED_BYTES_MAX
        )

    @property
    def is_full(self) -> bool:
        """Return whether as many messages are open as may be of one queue."""
        return len(self._open) >= self._open_max

    @property
    def has_room(self) -> bool:
        """Return whether another message may be open."""
        return not self.is_full and self.bound.count < self.bound.count_max

    def leave_bound(self) -> None:
        """Count for no other queue any more: this one is dropped from memory."""
        self.bound.count -= len(self._open)
        self.bound = OpenBound()  # a letter may be stored yet

    def hot_key(self) -> HotKey | None:
        """Return the key for which most messages wait; None: none waits for any."""
        lock = max(self._keys, key=lambda each: len(self._keys[each]), default=0)
        waiting = self._keys.get(lock, ())
        if len(waiting) < 2:
            return None
        first = self._open[waiting[0]]
        worker = "" if first.lease is None else first.lease.worker
        return HotKey(lock, len(waiting), first.offset, worker)

    @property
    def is_worn(self) -> bool:
        """Whether this life has used half of its delivery numbers, and may end."""
        return self._counter >> (INCARNATION_SHIFT - 1) > 0 and not self.held_count

    def is_done(self, offset: Offset) -> bool:
        """Return whether the message at an offset is done."""
        return offset < self.floor or self._done.end_at(offset) is not None

    def next_due_ms(self) -> int | None:
        """Return a time before which `on_time` has nothing to do; None: never."""
        until_ms = None if self.reclaim is None else self.reclaim.until_ms
        firsts = self.leases.first_ms, self._delays.first_s, until_ms
        return min((int(each) for each in firsts if each is not None), default=None)

    # -- finding

    def wants_scan(self, count: int) -> bool:
        """Return whether more is to be found for a taker of `count`."""
        # The same as `has_room` at its end: asked for every message.
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
        """Add the message at the scan offset.

        Args:
            offset: of its record, the scan offset or, after a gap, a later one.
            size_bytes: of its record.
            key: its key where the group is ordered; None: it waits for no other.
            now: for one that was returned with a delay.
            expiry_ms: when it is given up, on the wall clock; None: never.
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
        if before is not None and now.wall_ms < before.due_ms != KEPT_DUE_MS:
            message.at = At.DELAYED
            left_ms = before.due_ms - now.wall_ms
            if before.delivery:
                left_ms = min(left_ms, before.left_ms)
            self._delays.set(offset, now.mono_ms + left_ms)
        else:
            self._queue(message)
        self.scan_offset = message.end
        if len(self._done):
            self._skip_done()

    def pass_over(self, end: Offset, count: int) -> None:
        """Note that messages from the scan offset to `end` are not the group's: done.

        That is stored with the next change, or when it is much: a restart looks again.
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
            self._rise(self.scan_offset)

    def trim(self, log_start: Offset) -> int:
        """Give up what retention took; return how many open messages that were."""
        if log_start <= self.floor:
            return 0
        self.lost_bytes += max(0, log_start - self.scan_offset)
        return self._drop(self.floor, log_start)

    def skip(self, start: Offset, end: Offset) -> None:
        """Give up what begins in a range, of which no byte can be read.

        Args:
            start: at or below the scan offset.
            end: where a record begins, or the log ends.
        """
        self.skipped_bytes += end - start
        self._drop(start, end)

    def _drop(self, start: Offset, end: Offset) -> int:
        """Count a range as done; return how many open messages that were."""
        self._changes.append(Done(start, end))
        dropped = [each for at, each in self._open.items() if start <= at < end]
        for message in dropped:
            self._end_stored(message)
        for offset in [each for each in self._returned if start <= each < end]:
            del self._returned[offset]
        self.scan_offset = max(self.scan_offset, end)
        self._skip_done()  # first: what the floor passes is in no range any more
        self._add_done(start, end)
        return len(dropped)

    def count_in(self, start: Offset, end: Offset) -> int:
        """Return how many open messages begin in a range."""
        return sum(start <= offset < end for offset in self._open)

    # -- giving out

    @property
    def is_alone_first(self) -> bool:
        """Whether the first message that is ready goes out alone."""
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
    ) -> list[Taken]:
        """Give out messages that are ready, those of lower offsets first.

        Those that have expired are given up.

        Args:
            worker: that gets them.
            count: at most.
            bytes_max: of them together; the first may be larger.
            lease_ms: for how long they are the worker's.
            now: when.
            is_alone: one of those that go out alone, and none of the others.
        """
        taken = list[Taken]()
        left_bytes, queued = bytes_max, self._alone if is_alone else self._queued
        find, lease = (
            self._open.get,
            self.leases.lease_of(worker, now.mono_ms + lease_ms),
        )
        life = self.incarnation << INCARNATION_SHIFT
        while queued and len(taken) < count:
            message = find(queued[0])
            if message is None or message.heap is not queued:
                heapq.heappop(queued)  # as in `_first`
                continue
            offset, size_bytes = message.offset, message.size_bytes
            if taken and (is_alone or size_bytes > left_bytes):
                break
            if message.expiry_ms is not None and message.expiry_ms <= now.wall_ms:
                self._give_up(message, "expired")
                continue
            heapq.heappop(queued)
            message.heap = None
            self.ready_count -= 1
            self._counter += 1
            message.delivery = delivery = life | self._counter
            message.count += 1
            lease.add(message)
            left_bytes -= size_bytes
            taken.append(Taken(offset, size_bytes, delivery, message.count))
        if not lease.messages:
            self.leases.drop(lease)
        return taken

    def _first(self, queued: list[Offset]) -> OpenMessage | None:
        while queued:
            message = self._open.get(queued[0])
            if message is not None and message.heap is queued:
                return message
            heapq.heappop(queued)  # it was settled, or taken back, in the heap
        return None

    def give_back(self, taken: Sequence[Taken]) -> None:
        """Take back what never reached its worker; it does not count.

        A lease that has ended by now is left as it ended.
        """
        for each in taken:
            message = self._open.get(each.offset)
            is_same = message is not None and message.delivery == each.delivery
            if message is not None and is_same and message.at is At.LEASED:
                self._release(message)

    # -- settling

    def settle_all(
        self, worker: str, entries: Iterable[Settlement], now: Now
    ) -> list[Word]:
        """Settle deliveries in turn, as `settle`; those done in a row are one change.

        Nearly all are acks of messages that their workers have: these are settled here.
        """
        words, messages, left = list[Word](), self._open, list[Lease]()
        ack, ok, count = SettleVerb.ACK, Word.OK, 0
        start = end = Offset(-1)  # of those that are done and not noted yet
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
                self.leases.tidy(left)
                words.append(self.settle(worker, entry, now))
                continue
            if offset != end:
                if start != end:
                    self._note_done(start, end)
                start = offset
            end = Offset(offset + message.size_bytes)
            lease.leave(message)
            if not left or lease is not left[-1]:
                left.append(lease)
            del messages[offset]
            count += 1
            words.append(ok)
        if start != end:
            self._note_done(start, end)
        self.bound.count -= count
        self.done_count += count
        self.leases.tidy(left)
        return words

    def _note_done(self, start: Offset, end: Offset) -> None:
        self._changes.append(Done(start, end))
        self._add_done(start, end)

    def settle(
        self, worker: str, entry: Settlement, now: Now, *, is_held: bool = False
    ) -> Word:
        """Settle one delivery: a row of the table.

        Args:
            worker: that has it from now on, where it extends the lease.
            entry: its arguments are in range.
            now: when.
            is_held: an ack counts when `end_hold` says so.

        Returns:
            DONE and LOST changed nothing.
        """
        message = self._open.get(entry.offset)
        if message is None:
            return Word.DONE if self.is_done(entry.offset) else Word.LOST
        if message.at is At.DEAD:
            is_same = entry.delivery == message.delivery
            return (
                Word.LATER
                if is_same and entry.verb is not SettleVerb.ACK
                else Word.LOST
            )
        if message.at is At.HELD:
            is_same = entry.delivery == message.delivery
            return Word.OK if is_same and entry.verb is SettleVerb.EXTEND else Word.LOST
        if not self._is_good(message, entry.delivery):
            return Word.LOST
        if entry.verb is not SettleVerb.ACK and not self._is_first(message):
            # The group was not ordered when it was given out.
            return Word.LOST
        is_over = message.at is not At.LEASED
        if is_over and message.delivery == entry.delivery and entry.verb in _ENDED:
            return Word.OK  # it was said before, or the lease has ended
        if message.delivery != entry.delivery:
            # Of an earlier life, of which no start knows how often it was given out.
            message.delivery = entry.delivery
            message.count += message.at is not At.LEASED
        match entry.verb:
            case SettleVerb.ACK if is_held:
                self._leave(message)
                message.at, message.worker = At.HELD, worker
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
                self._give_up(message, f"rejected: {entry.text}")
        return Word.OK

    def _is_good(self, message: OpenMessage, delivery: int) -> bool:
        """Return whether a message was not given out after a delivery."""
        if not delivery:
            return False
        if message.delivery == delivery:
            return True
        life = delivery >> INCARNATION_SHIFT
        if not self._first_life <= life < self.incarnation:
            return False
        return message.delivery < delivery

    def _nack(self, message: OpenMessage, delay_ms: int, now: Now) -> None:
        if message.count >= self.rules.deliveries_max:
            self._give_up(message, f"deliveries: {message.count}")
            return
        if delay_ms == GROUP_DELAY:
            delay_ms = self.rules.retry_delay_ms(message.count)
        message.silent_count = 0
        self._return(message, delay_ms, now)

    def letter_stored(self, offset: Offset) -> None:
        """Note that a dead letter is stored, and with it that its message is done."""
        message = self._open.get(offset)
        if message is not None:
            self.letter_count += 1
            self._end_stored(message)

    def drop_letter(self, offset: Offset) -> None:
        """Have no dead letter of a message: it is done without."""
        message = self._open.get(offset)
        if message is not None:
            self.dropped_count += 1
            self._finish(message)

    def range_of(self, offset: Offset) -> Done:
        """Return the range of an open message."""
        return Done(offset, self._open[offset].end)

    def end_hold(self, offset: Offset, now: Now, *, is_done: bool) -> None:
        """Note the outcome of a transaction for a message that it holds.

        Committed, the message is done, and nothing is to be stored: the transaction
        has that. Rolled back, it is its worker's again, for a lease from now on.
        """
        message = self._open.get(offset)
        if message is None or message.at is not At.HELD:
            return  # retention took it
        if is_done:
            self._end_stored(message)
        else:
            self._lease(message, message.worker, now.mono_ms + self.rules.lease_ms)

    def drain_changes(self) -> list[Change]:
        """Return what was changed since the last call, neighbours as one."""
        changes, self._changes = self._changes, []
        done, self._passed, self._passed_bytes = self._passed, DoneRanges(), 0
        for each in changes:
            if isinstance(each, Done):
                done.add(*each)
        returned = [each for each in changes if isinstance(each, Returned)]
        return [*returned, *done.ranges()]

    def drain_ended(self) -> list[OpenMessage]:
        """Return messages with keys that the last changes have as done."""
        ended, self._ended = self._ended, []
        return ended

    def free_keys(self, ended: Iterable[OpenMessage]) -> None:
        """Have the next messages of keys given out: the changes are stored."""
        for message in ended:
            self._free_key(message)

    def drain_letters(self) -> list[Letter]:
        """Return the letters since the last call, to be stored."""
        letters, self._letters = self._letters, []
        return letters

    # -- time

    def on_time(self, now: Now) -> None:
        """End the leases, the delays and the reclaim time that are over."""
        if self.reclaim is not None and self.reclaim.until_ms <= now.mono_ms:
            self.reclaim, self._reclaim_end, self._kept = None, Offset(0), frozenset()
            for message in self._open.values():
                if message.at is At.READY:
                    self._queue(message)
        for lease in self.leases.take_due(now.mono_ms):
            for message in [*lease.messages]:
                self.expired_count += 1
                if message.count >= self.rules.deliveries_max:
                    self._give_up(message, f"deliveries: {message.count}")
                else:
                    message.silent_count += 1
                    self._return(message, 0, now)
        for offset in self._delays.take_due(now.mono_ms):
            message = self._open[offset]
            message.at = At.READY
            self._queue(message)

    # -- for a restart

    def image(self, now: Now) -> QueueImage:
        """Return what a restart is to know; what is given out counts as before that."""
        returned = dict(self._returned)
        for offset, message in self._open.items():
            given = message.at in _GIVEN
            count, delivery = message.count - given, message.delivery - given
            due_s = self._delays.get(offset)
            due_ms = left_ms = 0
            if message.at is At.DELAYED and due_s is not None:
                left_ms = max(0, int(due_s) - now.mono_ms)
                due_ms = now.wall_ms + left_ms
            if count > 0 or due_ms:
                size = message.size_bytes
                returned[offset] = Returned(
                    offset, size, count, due_ms, delivery, left_ms
                )
        done = DoneRanges(self._done.ranges())
        return QueueImage(self.floor, done, returned, self.incarnation)

    def leased(self) -> list[Returned]:
        """Return what the next life is to keep for its workers."""
        return [
            Returned(at, one.size_bytes, one.count - 1, KEPT_DUE_MS, one.delivery - 1)
            for at, one in self._open.items()
            if one.at is At.LEASED
        ]

    # -- changes of one message

    def _queue(self, message: OpenMessage) -> None:
        """Have a message that is ready given out, unless an earlier one has its key.

        One that a worker of an earlier life may have is, when the reclaim time is over.
        """
        at = message.offset
        if message.heap is not None or at < self._reclaim_end or at in self._kept:
            return
        if message.key is None or self._is_first(message):
            is_alone = message.silent_count >= ALONE_COUNT
            message.heap = self._alone if is_alone else self._queued
            heapq.heappush(message.heap, at)
            self.ready_count += 1

    def _is_first(self, message: OpenMessage) -> bool:
        """Return whether no earlier open message has its key."""
        key = message.key
        return key is None or self._keys[key][0] == message.offset

    def _unqueue(self, message: OpenMessage) -> None:
        """Give a message out no more; its place in the heap stays, unheeded."""
        if message.heap is not None:
            message.heap = None
            self.ready_count -= 1

    def _leave(self, message: OpenMessage) -> None:
        """Take a message from where it is: heap, deadline, worker."""
        self._unqueue(message)
        if message.lease is not None:
            lease = message.lease
            lease.leave(message)
            self.leases.tidy([lease])
        elif message.at is At.DELAYED:
            self._delays.clear(message.offset)
        elif message.at is At.HELD:
            self.held_count -= 1

    def _lease(self, message: OpenMessage, worker: str, end_ms: int) -> None:
        self._leave(message)
        self.leases.lease_of(worker, end_ms).add(message)

    def _return(self, message: OpenMessage, delay_ms: int, now: Now) -> None:
        """Have a message given out again; a restart knows how often it was."""
        self._leave(message)
        due_ms = now.wall_ms + delay_ms if delay_ms else 0
        offset, size_bytes = message.offset, message.size_bytes
        self._changes.append(
            Returned(
                offset, size_bytes, message.count, due_ms, message.delivery, delay_ms
            )
        )
        if delay_ms:
            message.at = At.DELAYED
            self._delays.set(offset, now.mono_ms + delay_ms)
        else:
            message.at = At.READY
            self._queue(message)

    def _release(self, message: OpenMessage) -> None:
        """Have a message given out again that was not begun."""
        # Nothing is kept: a restart knows the count of before.
        message.count -= 1
        message.delivery = 0
        self._leave(message)
        message.at = At.READY
        self._queue(message)

    def _give_up(self, message: OpenMessage, cause: str) -> None:
        """Give a message out no more: a dead letter, or none."""
        if not self.rules.takes_letters:
            self.dropped_count += 1
            self._finish(message)
            return
        self._leave(message)
        message.at = At.DEAD
        self._letters.append(
            Letter(message.offset, message.size_bytes, message.count, cause)
        )

    def _finish(self, message: OpenMessage) -> None:
        self._changes.append(Done(message.offset, message.end))
        self._end(message)
        if message.key is not None:
            # A crash before that is stored would bring it back after a later one.
            self._ended.append(message)

    def _end_stored(self, message: OpenMessage) -> None:
        """Count a message as done, which a restart knows as well."""
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
            self._rise(max(self.floor, end))
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
        if first is not None and first.at is At.READY:
            self._queue(first)

    def _rise(self, floor: Offset) -> None:
        self.floor = self._done.take_below(floor)
