"""Random walks of many workers over one queue, with crashes, against dictionaries.

The model knows what was acknowledged and who was given what; it does not know how a
queue works. Broken rules, by a switch, are found.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest

from metaq.model import Offset
from metaq.protocol.queue_frames import Settlement, SettleVerb, Word
from metaq.queues.rules import QueueRules
from metaq.queues.state import LeasedMessage, QueueState
from tests.queues.rig import Rig

WORKERS = ("w1", "w2", "w3")
LEASE_MS = 5_000
RECLAIM_MS = 2_000
STEPS = 400
FOREVER_MS = 1 << 60


class Walk:
    """One walk. A violation is an AssertionError that names the step."""

    def __init__(self, seed: int, make_state: type[QueueState] = QueueState) -> None:
        self.rng = rng = random.Random(seed)
        self.rig = Rig(
            QueueRules(
                deliveries_max=rng.choice((2, 4, 16)),
                retry_delays_ms=rng.choice(((), (10, 3_000))),
                is_ordered=rng.random() < 0.5,
                takes_letters=rng.random() < 0.7,
            ),
            open_max=rng.choice((3, 20, 1000)),
            make_state=make_state,
        )
        self.given: list[tuple[str, LeasedMessage]] = []
        """All deliveries ever, with their workers."""
        self.last: dict[Offset, LeasedMessage] = {}
        """The latest delivery of each message."""
        self.held: dict[Offset, tuple[LeasedMessage, int]] = {}
        """Deliveries that nobody else may get, and until when."""
        self.unheard: set[Offset] = set()
        """Of these, messages whose workers this life has not heard of."""
        self.done: set[Offset] = set()
        """Acknowledged to a worker, or ended by a letter, a drop or retention."""
        self.present = set(WORKERS)
        self.open_tx: list[list[LeasedMessage]] = []
        """Transactions without an outcome, with what each holds."""

    def run(self) -> None:
        moves: list[Callable[[], None]] = [
            self.put, self.put, self.take, self.take, self.take, self.settle,
            self.settle, self.settle, self.settle, self.pass_time, self.letter,
            self.leave, self.come_back, self.snapshot, self.hold, self.hold,
            self.commit, self.roll_back,
        ]  # fmt: skip
        for _ in range(STEPS):
            chance = self.rng.random()
            if chance < 0.02:
                self.crash()
            elif chance < 0.025:
                self.cut_power()
            elif chance < 0.03:
                self.trim()
            elif chance < 0.035:
                self.crash_after_a_decision()
            else:
                self.rng.choice(moves)()
            self.check()
        self.drain()

    # -- moves

    def put(self) -> None:
        key = self.rng.choice((None, b"a", b"b", b"c"))
        count, size = self.rng.randrange(1, 4), self.rng.randrange(1, 99)
        is_other = self.rng.random() < 0.3
        self.rig.put(count, size=size, key=key, is_other=is_other)

    def take(self) -> None:
        worker = self.rng.choice(sorted(self.present) or ["w1"])
        count = self.rng.choice((1, 2, 9))
        for taken in self.rig.take(count, worker, LEASE_MS, self.rng.choice((60, 900))):
            at = taken.offset
            assert at not in self.done, f"{at} was acknowledged, and is given out"
            (message,) = (m for m in self.rig.messages if m.offset == at)
            assert not message.is_other, f"{at} is not the group's"
            now_ms = self.rig.now.mono_ms
            if at in self.held:
                assert self.held[at][1] <= now_ms, f"{at} is with another worker"
            self._check_order(at)
            self.given.append((worker, taken))
            self.last[at] = taken
            self._note_held(taken, now_ms + LEASE_MS)
        self.rig.store()

    def settle(self) -> None:
        if not self.given:
            return
        recent = self.given[-12:] if self.rng.random() < 0.8 else self.given
        worker, taken = self.rng.choice(recent)
        if self.rng.random() < 0.02:
            taken = taken._replace(delivery=self.rng.choice((0, 1, 1 << 63)))
        verb = self.rng.choice((SettleVerb.ACK, SettleVerb.ACK, *SettleVerb))
        argument = {
            SettleVerb.NACK: self.rng.choice((-1, 0, 700)),
            SettleVerb.EXTEND: LEASE_MS,
        }
        self.rig.scan_through(taken.offset)
        entry = Settlement(taken.offset, taken.delivery, verb, argument.get(verb, 0))
        before = self.rig.state.dropped_count
        word = self.rig.state.settle(worker, entry, self.rig.now)
        self.rig.store()
        if word is Word.DONE:
            assert taken.offset in self.done, f"{taken.offset} is not done"
        if word is not Word.OK:
            return
        assert taken.offset not in self.done, f"{taken.offset} was done before"
        later = self.last[taken.offset].delivery > taken.delivery
        is_lost = later and self.held_by_other(taken)
        assert not is_lost, f"{taken.offset} was with another worker"
        self.held.pop(taken.offset, None)
        if verb is SettleVerb.ACK or self.rig.state.dropped_count > before:
            self.done.add(taken.offset)
        elif verb is SettleVerb.EXTEND:
            self._note_held(taken, self.rig.now.mono_ms + LEASE_MS)

    def hold(self) -> None:
        """Ack in a new transaction, or in one that is open."""
        if not self.given:
            return
        worker, taken = self.rng.choice(self.given[-12:])
        self.rig.scan_through(taken.offset)
        word = self.rig.hold(taken, worker)
        if word is not Word.OK:
            return
        assert taken.offset not in self.done, f"{taken.offset} was done before"
        later = self.last[taken.offset].delivery > taken.delivery
        assert not (later and self.held_by_other(taken)), f"{taken.offset} was taken"
        self._note_held(taken, FOREVER_MS)
        if not self.open_tx or self.rng.random() < 0.5:
            self.open_tx.append([])
        self.rng.choice(self.open_tx).append(taken)

    def _close(self) -> list[LeasedMessage]:
        return self.open_tx.pop(self.rng.randrange(len(self.open_tx)))

    def commit(self) -> None:
        if self.open_tx:
            tx = self._close()
            self.rig.commit(*tx)
            for each in tx:
                self.held.pop(each.offset, None)
                self.done.add(each.offset)

    def roll_back(self) -> None:
        if self.open_tx:
            tx = self._close()
            self.rig.roll_back(*tx)
            until_ms = self.rig.now.mono_ms + self.rig.rules.lease_ms
            self.held |= {each.offset: (each, until_ms) for each in tx}

    def crash_after_a_decision(self) -> None:
        """A decision of the journal is in the log at the next start."""
        self.commit()
        self.crash()

    def _note_held(self, taken: LeasedMessage, until_ms: int) -> None:
        self.held[taken.offset] = taken, until_ms
        self.unheard.discard(taken.offset)

    def held_by_other(self, taken: LeasedMessage) -> bool:
        held = self.held.get(taken.offset)
        is_known = held is not None and taken.offset not in self.unheard
        return is_known and held[0].delivery > taken.delivery

    def pass_time(self) -> None:
        before = self.rig.state.dropped_count
        self.rig.pass_time(self.rng.choice((1, 100, 1_000, LEASE_MS)))
        if self.rig.state.dropped_count > before:
            self._note_dropped()

    def _note_dropped(self) -> None:
        """A lease's end may give up a message without a letter: it is done."""
        for offset in self.last:
            if self.rig.state.is_done(offset):
                self.done.add(offset)

    def letter(self) -> None:
        if self.rig.letters:
            letter = self.rng.choice(self.rig.letters)
            self.rig.store_letter(letter)
            self.held.pop(letter.offset, None)
            self.done.add(letter.offset)

    def leave(self) -> None:
        worker = self.rng.choice(WORKERS)
        self.present.discard(worker)
        self.rig.state.leases.cut_short(worker, self.rig.now.mono_ms + RECLAIM_MS)
        soon_ms = self.rig.now.mono_ms + RECLAIM_MS
        for at, (taken, until_ms) in self.held.items():
            if until_ms == FOREVER_MS:
                continue
            if (worker, taken) in self.given[-60:]:
                self.held[at] = taken, min(until_ms, soon_ms)

    def come_back(self) -> None:
        worker = self.rng.choice(WORKERS)
        self.present.add(worker)
        self.rig.state.leases.restore(worker)

    def snapshot(self) -> None:
        if not self.rig.letters:
            self.rig.snapshot()

    def trim(self) -> None:
        ends = [m.offset for m in self.rig.messages if m.offset > self.rig.state.floor]
        if ends:
            start = self.rng.choice(ends[:3])
            self.rig.state.trim(start)
            self.rig.store()
            self.done |= {m.offset for m in self.rig.messages if m.offset < start}

    def cut_power(self) -> None:
        """Crash before a settle is stored, and so before it is answered."""
        if self.given:
            worker, taken = self.rng.choice(self.given[-12:])
            self.rig.scan_through(taken.offset)
            verb = self.rng.choice([*SettleVerb])
            argument = LEASE_MS if verb is SettleVerb.EXTEND else 0
            entry = Settlement(taken.offset, taken.delivery, verb, argument)
            self.rig.state.settle(worker, entry, self.rig.now)
            self.last |= {each.offset: each for each in self.rig.take(2)}
        self.crash()

    def crash(self) -> None:
        reclaim_ms = self.rng.choice((0, RECLAIM_MS))
        self.rig.crash(reclaim_ms)
        soon_ms = self.rig.now.mono_ms + reclaim_ms
        self.held = {
            at: (taken, min(until_ms, soon_ms))
            for at, (taken, until_ms) in self.held.items()
        }
        self.unheard = set(self.held)
        self.open_tx.clear()  # a start rolls them back
        self.present = set(WORKERS)

    # -- what holds

    def check(self) -> None:
        state = self.rig.state
        scanned = [m for m in self.rig.messages if m.offset < state.scan_offset]
        for message in scanned:
            if message.offset < state.floor and not message.is_other:
                assert message.offset in self.done, f"floor passed {message.offset}"
        for offset in self.done:
            assert state.is_done(offset), f"{offset} is done, and forgotten"
        open_count = sum(not state.is_done(m.offset) for m in scanned)
        assert state.open_count == open_count

    def _check_order(self, at: Offset) -> None:
        if not self.rig.rules.is_ordered:
            return
        message = next(m for m in self.rig.messages if m.offset == at)
        for other in self.rig.messages:
            if other.key is not None and other.key == message.key:
                is_earlier = other.offset < at and not self.rig.state.is_done(
                    other.offset
                )
                assert not is_earlier, f"{at} before {other.offset} of its key"
                is_late = other.offset > at and other.offset in self.last
                assert not is_late, f"{at} after {other.offset} of its key"

    def drain(self) -> None:
        """Handle all that is left: nothing is stuck."""
        for _ in range(10 * len(self.rig.messages) + 100):
            for letter in [*self.rig.letters]:
                self.rig.store_letter(letter)
                self.done.add(letter.offset)
            while self.open_tx:
                self.rng.choice((self.commit, self.roll_back))()
            for taken in self.rig.take(99):
                assert taken.offset not in self.done
                assert self.rig.ack(taken) is Word.OK
                self.done.add(taken.offset)
            self.rig.pass_time(LEASE_MS)
            self._note_dropped()
            if self.rig.state.floor == self.rig.end and not self.rig.letters:
                break
        assert self.rig.state.floor == self.rig.end, "something is stuck"
        assert self.rig.state.open_count == 0
        assert self.rig.state.ready_count == 0


@pytest.mark.parametrize("seed", range(60))
def test_a_walk_keeps_every_promise(seed: int) -> None:
    """Acked and never again, one worker at a time, keys in order, nothing stuck."""
    Walk(seed).run()


class TakesFromOthers(QueueState):
    """A late ack is good whoever has the message."""

    def _is_good(self, *_: object) -> bool:
        return True


class PassesOpenOnes(QueueState):
    """The floor passes an open message."""

    def _raise_floor(self, floor: Offset) -> None:
        self.floor = max(floor, self._done.take_below(self.scan_offset))


class FreesKeysEarly(QueueState):
    """A key is free before it is stored that its message is done."""

    def _finish(self, message: Any) -> None:
        super()._finish(message)
        self.free_keys(self.drain_ended())


class AcksBesideTheTransaction(QueueState):
    """An ack in a transaction is a change of its own, before the outcome."""

    def settle(self, *args: Any, is_held: bool = False) -> Word:
        return super().settle(*args)


class LeasesEndInTransactions(QueueState):
    """A message that a transaction holds is its worker's until its lease ends."""

    def settle(self, worker: str, *args: Any, is_held: bool = False) -> Word:
        word = super().settle(worker, *args, is_held=is_held)
        if is_held and word is Word.OK:
            self.end_hold(args[0].offset, args[1], is_done=False)
        return word


class ReclaimsNothing(QueueState):
    """Messages of workers of an earlier life are given out as they are found."""

    def __init__(self, *args: Any, reclaim: object = None, **more: Any) -> None:
        super().__init__(*args, **more)


@pytest.mark.slow
@pytest.mark.parametrize(
    "broken",
    [
        ReclaimsNothing,
        TakesFromOthers,
        PassesOpenOnes,
        FreesKeysEarly,
        AcksBesideTheTransaction,
        LeasesEndInTransactions,
    ],
)
def test_a_broken_rule_is_found(broken: type[QueueState]) -> None:
    """By one of the same walks."""
    with pytest.raises(AssertionError):
        run_all(broken)


def run_all(make_state: type[QueueState]) -> None:
    for seed in range(60):
        Walk(seed, make_state).run()
