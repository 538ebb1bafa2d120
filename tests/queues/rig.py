"""A queue over a log of numbered messages, its records, and a clock of its own."""

from collections.abc import Sequence
from typing import NamedTuple

from metaq.model import Offset, SizeBytes
from metaq.protocol.queue_frames import Settlement, SettleVerb, Word
from metaq.queues.leases import Reclaim
from metaq.queues.rules import Now, QueueRules
from metaq.queues.state import DeadLetter, LeasedMessage, QueueState
from metaq.queues.state_log import (
    Change,
    Done,
    QueueName,
    QueueSnapshot,
    QueueSnapshots,
    StateKind,
    StateRecord,
    decode_state,
    encode_state,
    snapshot_record,
)

NAME = QueueName("g", "t", 0)


class Stored(NamedTuple):
    """A message of the log."""

    offset: Offset
    size_bytes: SizeBytes
    key: bytes | None
    expiry_ms: int | None = None
    is_other: bool = False
    """It does not match the group's filter."""


class Rig:
    """One queue on one log, which may crash."""

    def __init__(
        self,
        rules: QueueRules | None = None,
        *,
        open_max: int = 1000,
        make_state: type[QueueState] = QueueState,
    ) -> None:
        self.make_state = make_state
        self.rules = rules or QueueRules(retry_delays_ms=())
        self.open_max = open_max
        self.messages: list[Stored] = []
        self.end = Offset(0)
        self.records: list[bytes] = []
        self.now = Now(1_000_000, 1_700_000_000_000)
        self.letters: list[DeadLetter] = []
        snapshot = QueueSnapshot(Offset(0), incarnation=1)
        self.state = make_state(self.rules, snapshot, open_max=open_max)
        self._begin()

    def put(
        self,
        count: int = 1,
        *,
        size: int = 100,
        key: bytes | None = None,
        expiry_ms: int | None = None,
        is_other: bool = False,
    ) -> None:
        for _ in range(count):
            message = Stored(self.end, SizeBytes(size), key, expiry_ms, is_other)
            self.messages.append(message)
            self.end = Offset(self.end + size)

    def scan(self, count: int) -> None:
        while self.state.wants_scan(count) and self.state.scan_offset < self.end:
            self._find()

    def _find(self) -> None:
        at = self.state.scan_offset
        found = next(m for m in self.messages if m.offset >= at)
        offset, size, key, expiry_ms, is_other = found
        if is_other:
            self.state.pass_over(Offset(offset + size), 1)
            return
        key = key if self.rules.is_ordered else None
        self.state.found(offset, size, key, self.now, expiry_ms=expiry_ms)

    def scan_through(self, offset: Offset) -> None:
        """Find everything up to an offset, as far as there is room."""
        while self.state.scan_offset <= offset < self.end and self.state.has_room:
            self._find()

    def take(
        self,
        count: int = 1,
        worker: str = "w",
        lease_ms: int = 30_000,
        size: int = 10**6,
    ) -> list[LeasedMessage]:
        self.scan(count)
        is_alone = self.state.is_alone_first
        return self.state.take(
            worker, count, size, lease_ms, self.now, is_alone=is_alone
        )

    def settle(
        self,
        taken: LeasedMessage,
        verb: SettleVerb,
        argument: int = 0,
        text: str = "",
        *,
        worker: str = "w",
        is_held: bool = False,
    ) -> Word:
        entry = Settlement(taken.offset, taken.delivery, verb, argument, text)
        if is_held:
            word = self.state.settle(worker, entry, self.now, is_held=True)
        else:
            word = self.state.settle_all(worker, [entry], self.now)[0]
        self.store()
        return word

    def hold(self, taken: LeasedMessage, worker: str = "w") -> Word:
        """Ack in a transaction."""
        return self.settle(taken, SettleVerb.ACK, worker=worker, is_held=True)

    def commit(self, *held: LeasedMessage) -> None:
        """End a transaction: its record is in the log, and then in the state."""
        done = [
            Done(each.offset, Offset(each.offset + each.size_bytes)) for each in held
        ]
        self._record(StateKind.CHANGES, done)
        for each in held:
            self.state.end_hold(each.offset, self.now, is_done=True)

    def roll_back(self, *held: LeasedMessage) -> None:
        for each in held:
            self.state.end_hold(each.offset, self.now, is_done=False)

    def ack(self, taken: LeasedMessage) -> Word:
        return self.settle(taken, SettleVerb.ACK)

    def store(self) -> None:
        """Append what has changed, as the service does before it answers."""
        changes = self.state.drain_changes()
        self.letters += self.state.drain_letters()
        if changes:
            self._record(StateKind.CHANGES, changes)
        self.state.free_keys(self.state.drain_ended())

    def snapshot(self) -> None:
        self.store()
        record = snapshot_record(1, NAME, self.state.snapshot(self.now))
        self.records = [encode_state(record)]

    def pass_time(self, ms: int) -> None:
        self.now = Now(self.now.mono_ms + ms, self.now.wall_ms + ms)
        self.state.on_time(self.now)
        self.store()

    def store_letter(self, letter: DeadLetter) -> None:
        """Commit a dead letter: the message is done by the same transaction."""
        self.letters.remove(letter)
        end = Offset(letter.offset + letter.size_bytes)
        self._record(StateKind.CHANGES, [Done(letter.offset, end)])
        self.state.letter_stored(letter.offset)

    def stop(self, reclaim_ms: int) -> None:
        """End cleanly, and begin another life."""
        self._record(StateKind.CHANGES, self.state.leased())
        self._record(StateKind.CHANGES, ())
        self.crash(reclaim_ms)

    def crash(self, reclaim_ms: int = 0) -> None:
        """Begin another life with what is stored."""
        snapshots = QueueSnapshots()
        for each in self.records:
            snapshots.apply(decode_state(each))
        snapshot = snapshots.by_name[NAME]
        snapshot.incarnation += 1
        self.letters = []
        end = Offset(0) if snapshot.is_idle else self.end
        reclaim = Reclaim(end, self.now.mono_ms + reclaim_ms)
        self.state = self.make_state(
            self.rules,
            snapshot,
            open_max=self.open_max,
            reclaim=reclaim if reclaim_ms else None,
        )
        self._begin()

    def _begin(self) -> None:
        self._record(StateKind.OPENED, ())

    def _record(self, kind: StateKind, changes: Sequence[Change]) -> None:
        name = None if kind is StateKind.CHANGES else NAME
        record = StateRecord(
            kind, 1, self.state.incarnation, self.state.floor, list(changes), name
        )
        self.records.append(encode_state(record))
