"""A random machine over the service of queue groups, and a book of what was promised.

Each step puts, takes, settles, acks in a transaction, lets a connection end, lets time
pass, fills the disk, or kills the broker or the machine, at any sync. Commands are in
flight together: disk, journal and what they have to say take their turns in between,
and time passes within a turn. What is promised is checked at each answer:

    what was acknowledged is never given out again, and is no dead letter
    what a worker has, by its lease, is given to no other, and its ack is good
    of a key, a message is given out when all before it are done

and at the end each message is done in one way, once: acknowledged, in a transaction
whose output is there, or a dead letter.
"""

import asyncio
import math
import random
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, NamedTuple

from metaq.protocol.commands import Mput, Result, Settle, Take, Value
from metaq.protocol.queue_frames import (
    Settlement,
    SettleVerb,
    Word,
    decode_words,
    encode_settlements,
)
from metaq.record.checksum import checksum
from metaq.record.flags import encode_payload
from metaq.record.layout import encode_record
from metaq.zk.group_definitions import QueueGroupDefinition
from tests.broker.queue_rig import (
    GROUP,
    LoopClock,
    QueueRig,
    QueueSession,
    SteppedQueues,
    key_of,
)
from tests.broker.queue_worker import Got, got_of
from tests.broker.stepped import cut_at_sync
from tests.rigs.disk import CAPACITY_BYTES
from tests.rigs.fs import FaultyFileSystem, keep_all, keep_random

WORKERS: Final = ("w0", "w1", "w2")
LEASE_MS: Final = 5_000
RECLAIM_S: Final = 2.0
INSIDE_S: Final = 0.25
"""More than passes within a turn: a lease may end so much before its worker knows."""
LAPSES_S: Final = (0.001, 0.1, 0.1, 1.0, 2.5, 6.0)
DECADE_MS: Final = 10 * 365 * 86_400_000
JUMPS_MS: Final = (-3_600_000, 3_600_000, -DECADE_MS, DECADE_MS)


@dataclass
class Message:
    """One message, as those outside know it."""

    partition: int
    key: str | None
    offset: int = -1
    """-1: its put was not answered."""
    is_acked: bool = False
    """An ack of it was answered with `ok`."""
    asked: int = 0
    """Acks that were asked, and not answered, or in doubt."""
    outputs: set[bytes] = field(default_factory=set)
    """Output of transactions that have its ack."""
    tries: int = 0
    """Times that it was given out, returned or rejected: with `deliveries_max` of them
    it may be a dead letter."""
    is_given_up: bool = False
    """It is given out no more: a settle was answered so. While its dead letter is not
    stored, that is so for a life of the broker."""


@dataclass
class Hold:
    """A message that a worker has, and for how long."""

    worker: str
    delivery: int
    until_s: float
    since_s: float
    """When this life of the broker heard of it; infinite: it has not."""


class Asked(NamedTuple):
    """A settlement on its way."""

    worker: str
    at_s: float
    hold: Hold | None
    """That of the worker, for this delivery."""
    was_acked: bool


@dataclass
class Book:
    """All that is known outside of the broker."""

    messages: dict[bytes, Message] = field(default_factory=dict)
    given: list[tuple[str, Got]] = field(default_factory=list)
    holds: dict[bytes, Hold] = field(default_factory=dict)


class QueueWalk:
    """The machine. One walk is one seed."""

    def __init__(self, seed: int, make: type[SteppedQueues] = SteppedQueues) -> None:
        self.random = rng = random.Random(seed)
        self.book = Book()
        self.make = make
        self.rig: QueueRig
        self.clock: LoopClock
        self.definition = QueueGroupDefinition(
            topic="test",
            lease_ms=LEASE_MS,
            deliveries_max=rng.choice((2, 4, 100)),
            dead_letter_topic="dead",
            retry_delays_ms=rng.choice(((), (10, 3_000))),
            ordered_by=rng.choice((None, "key")),
        )
        self.numbers = count(1)
        self.sessions: dict[str, QueueSession] = {}
        self.fails = 0
        self.counts: dict[str, int] = {}

    async def play(self, steps: int) -> None:
        """Begin, take so many steps, and see that every message is done."""
        rng = self.random
        self.clock = LoopClock(lambda: rng.choice((0.0, 0.0, 0.0, 0.001, 0.01)))
        self.rig = await QueueRig(
            FaultyFileSystem(), self.clock, self.definition, self.make
        ).start()
        for _ in range(steps):
            await self._step()
            self._check()
        await self._finish()
        await self.rig.kill()

    async def _step(self) -> None:
        step = self.random.choice(self.steps())
        self.counts[step.__name__] = self.counts.get(step.__name__, 0) + 1
        if self.random.random() < 0.01:
            await self._stop()
            return
        if self.random.random() < 0.93:
            await step()
            return
        # The power goes, or the process, at one of the syncs of the step or after it.
        number = self.random.randrange(6)
        with cut_at_sync(self.rig.fs, number, lambda: self.book) as found:
            await step()
            await self.rig.run_all()
        await self._begin_again(*found[0])

    def steps(self) -> list[Any]:
        return [
            *[self.put] * 4,
            *[self.take] * 7,
            *[self.settle] * 9,
            *[self.go_on] * 10,
            *[self.wait] * 3,
            self.ack_in_transaction,
            self.leave,
            self.fill_disk,
            self.set_clock,
            self.tend,
        ]

    async def _stop(self) -> None:
        """Stop the broker in peace, and start it again."""
        for worker in [*self.sessions]:
            self._leave(worker)
        await self.rig.play(self.rig.service.stop())
        await self.rig.run_all()
        await self._begin_again(self.rig.fs.snapshot(), self.book)

    async def _begin_again(self, fs: FaultyFileSystem, book: Book) -> None:
        self.book = book
        await self.rig.kill()
        is_kill = self.random.random() < 0.5
        fs = fs.crash(
            keep_all if is_kill else keep_random(self.random.randrange(1 << 30))
        )
        fs.set_capacity(CAPACITY_BYTES)
        self.sessions.clear()
        self.fails = 0
        now_s = self.clock.monotonic_s()
        for hold in book.holds.values():
            hold.until_s = min(hold.until_s, now_s + RECLAIM_S)
            hold.since_s = math.inf
        self.rig = await QueueRig(fs, self.clock, self.definition, self.make).start()
        self._forget_given_up()

    # -- steps

    async def put(self) -> None:
        """Put some messages in one batch."""
        partition = self.random.randrange(2)
        datas, records = list[bytes](), list[bytes]()
        for _ in range(self.random.choice((1, 2, 5))):
            data, key = (
                b"m%d" % next(self.numbers),
                self.random.choice((None, "a", "b")),
            )
            payload, flag = encode_payload(data, None, key)
            records.append(encode_record(payload, id=0, flag=flag))
            self.book.messages[data] = Message(partition, key)
            datas.append(data)
        body, opaque = b"".join(records), next(self.numbers)

        def stored(reply: Result | Value) -> None:
            if isinstance(reply, Result) and reply.status == 200:
                at = int(reply.text.split()[2])
                for data, record in zip(datas, records, strict=True):
                    self.book.messages[data].offset = at
                    at += len(record)

        self.rig.ask(
            QueueSession(self.rig),
            Mput(
                "test",
                partition,
                count=len(datas),
                checksum=checksum(body),
                payload=body,
                opaque=opaque,
            ),
            stored,
        )

    async def take(self) -> None:
        """Ask for messages, with a wait or without."""
        self._take(
            self.random.choice(WORKERS),
            self.random.choice((1, 2, 9)),
            self.random.choice((0, 0, 1_000, 20_000)),
            self.random.choice((-1, -1, 0, 1)),
        )

    def _take(
        self, worker: str, number: int, wait_ms: int, partition: int = -1
    ) -> None:
        asked_s = self.clock.monotonic_s()
        command = Take(
            "test",
            GROUP,
            partition,
            number,
            1 << 20,
            next(self.numbers),
            worker,
            wait_ms=wait_ms,
        )
        self.rig.ask(
            self._session(worker),
            command,
            lambda reply: self._on_taken(worker, reply, asked_s),
        )

    def _on_taken(self, worker: str, reply: Result | Value, asked_s: float) -> None:
        if not isinstance(reply, Value):
            return
        book, now_s, letters = self.book, self.clock.monotonic_s(), self._letters()
        assert now_s >= asked_s
        for got in got_of(reply):
            message, hold = book.messages[got.data], book.holds.get(got.data)
            assert not message.is_acked, f"acknowledged, and given out: {got}"
            assert not message.is_given_up, f"given up, and given out: {got}"
            assert got.data not in letters, f"a dead letter, and given out: {got}"
            if hold is not None and hold.worker != worker and not self._has_failed():
                left_s = hold.until_s - now_s
                assert left_s < INSIDE_S, f"{got} is {hold.worker}'s for {left_s} s"
            self._check_order(message, got)
            book.given.append((worker, got))
            message.tries = max(message.tries + 1, got.deliveries)
            until_s = now_s + LEASE_MS / 1000
            book.holds[got.data] = Hold(worker, got.delivery, until_s, now_s)

    def _check_order(self, message: Message, got: Got) -> None:
        if self.definition.ordered_by is None or message.key is None:
            return
        for data, other in self.book.messages.items():
            if (other.partition, other.key) == (message.partition, message.key):
                is_open = not (other.is_acked or other.asked or other.outputs)
                is_before = 0 <= other.offset < got.offset
                is_early = is_open and is_before and not self._may_be_dead(other)
                assert not is_early, f"{got.data!r} before {data!r}"

    async def settle(self) -> None:
        """Settle deliveries of one worker and partition, of this life or another."""
        book = self.book
        if not book.given:
            return
        recent = book.given[-12:] if self.random.random() < 0.8 else book.given
        worker, first = self.random.choice(recent)
        found = {first.data: first}
        for other, got in recent:
            is_one = other == worker and got.partition == first.partition
            if is_one and self.random.random() < 0.5:
                found.setdefault(got.data, got)
        entries = [self._entry(got) for got in found.values()]
        self._settle(worker, [*found.values()], entries)

    def _entry(self, got: Got) -> Settlement:
        verb = self.random.choice((*[SettleVerb.ACK] * 6, *SettleVerb))
        argument = {
            SettleVerb.NACK: self.random.choice((-1, 0, 700)),
            SettleVerb.EXTEND: LEASE_MS,
        }
        return got.says(verb, argument.get(verb, 0))

    def _settle(
        self, worker: str, gots: list[Got], entries: list[Settlement], tx: Any = None
    ) -> None:
        book = self.book
        asked = [
            self._note_asked(worker, got, entry)
            for got, entry in zip(gots, entries, strict=True)
        ]
        command = Settle(
            "test",
            GROUP,
            gots[0].partition,
            len(entries),
            encode_settlements(entries),
            next(self.numbers),
            worker,
            tx,
        )

        def settled(reply: Result | Value) -> None:
            if not isinstance(reply, Result) or reply.status != 200:
                for got in gots:
                    book.holds.pop(got.data, None)
                return
            words = decode_words(reply.text, len(entries))
            for got, entry, word, each in zip(gots, entries, words, asked, strict=True):
                self._on_settled(got, entry, word, each)

        self.rig.ask(self._session(worker), command, settled)

    def _note_asked(self, worker: str, got: Got, entry: Settlement) -> Asked:
        """Note what may be from now on."""
        message, hold = self.book.messages[got.data], self.book.holds.get(got.data)
        if hold is None or (hold.worker, hold.delivery) != (worker, got.delivery):
            hold = None
        asked = Asked(worker, self.clock.monotonic_s(), hold, message.is_acked)
        if entry.verb is SettleVerb.ACK:
            message.asked += 1
        elif hold is not None and entry.verb is not SettleVerb.EXTEND:
            del self.book.holds[got.data]
        if entry.verb is SettleVerb.NACK:
            message.tries += 1
        elif entry.verb is SettleVerb.REJECT:
            message.tries = 1000
        return asked

    def _on_settled(
        self, got: Got, entry: Settlement, word: Word, asked: Asked
    ) -> None:
        message, present = self.book.messages[got.data], self.book.holds.get(got.data)
        is_ack, letters = entry.verb is SettleVerb.ACK, self._letters()
        now_s, has_failed = self.clock.monotonic_s(), self._has_failed()
        is_its_own = asked.hold is not None and asked.hold is present
        if is_ack:
            message.asked -= 1
        if word is Word.OK:
            assert not asked.was_acked, f"settled after its ack: {got} {entry}"
            assert not (is_ack and got.data in letters), f"dead, and acked: {got}"
            if present is not None and not is_its_own and not has_failed:
                is_others = present.since_s < asked.at_s
                is_others = is_others and present.until_s - now_s > INSIDE_S
                assert not is_others, f"{asked} settles {got} of {present}"
        elif word is Word.DONE:
            is_done = message.is_acked or message.asked or message.outputs
            assert is_done or self._may_be_dead(message), f"done by nobody: {got}"
        elif word is Word.LOST and is_its_own and is_ack and not has_failed:
            assert present is not None
            is_known, left_s = present.since_s < asked.at_s, present.until_s - now_s
            is_lost = is_known and left_s > INSIDE_S
            assert not is_lost, f"lost, and its own: {got} {asked}"
        if is_ack and word is Word.OK:
            message.is_acked = True
            self.book.holds.pop(got.data, None)
        elif entry.verb is SettleVerb.REJECT and word in {Word.OK, Word.LATER}:
            message.is_given_up = True
        elif entry.verb is SettleVerb.EXTEND and word is Word.OK and is_its_own:
            assert present is not None
            present.until_s = asked.at_s + entry.argument / 1000
            present.since_s = now_s

    async def ack_in_transaction(self) -> None:
        """Ack a message in a transaction that puts something; commit, or roll back."""
        if not self.book.given:
            return
        worker, got = self.random.choice(self.book.given[-12:])
        session, (name, key) = self._session(worker), key_of(next(self.numbers))
        made = b"made of %b by %b" % (got.data, name.encode())
        body = encode_record(made, id=0, flag=0)
        puts, words = list[Result | Value](), list[Result | Value]()
        try:
            self.rig.begin(session, name)
        except Exception:  # its journal is offline
            return
        message = self.book.messages[got.data]
        put = Mput(
            "out",
            0,
            count=1,
            checksum=checksum(body),
            payload=body,
            opaque=next(self.numbers),
            transaction=key,
        )
        settle = Settle(
            "test",
            GROUP,
            got.partition,
            1,
            encode_settlements([got.says(SettleVerb.ACK)]),
            next(self.numbers),
            worker,
            key,
        )
        self.rig.ask(session, put, puts.append)
        self.rig.ask(session, settle, words.append)
        await self._turns()
        good = [r for r in words + puts if isinstance(r, Result) and r.status == 200]
        is_held = len(good) == 2 and decode_words(good[0].text, 1) == [Word.OK]
        is_committed = is_held and self.random.random() < 0.8
        if is_committed:
            message.outputs.add(made)
        self.rig.end(session, name, lambda _error: None, is_committed=is_committed)
        self.book.holds.pop(got.data, None)

    async def _turns(self) -> None:
        for _ in range(self.random.choice((10, 40))):
            await self.rig.run_some(self.random)

    async def go_on(self) -> None:
        """Have disk, journal and loop take some steps."""
        for _ in range(self.random.choice((1, 3, 10))):
            await self.rig.run_some(self.random)
        if self.random.random() < 0.3:
            await self.rig.run_all()

    async def wait(self) -> None:
        await asyncio.sleep(self.random.choice(LAPSES_S))

    async def leave(self) -> None:
        """A connection ends; what was asked on it is in doubt."""
        if self.sessions:
            self._leave(self.random.choice([*self.sessions]))

    def _leave(self, worker: str) -> None:
        soon_s = self.clock.monotonic_s() + RECLAIM_S
        self.rig.drop(self.sessions.pop(worker))
        for hold in self.book.holds.values():
            if hold.worker == worker:
                hold.until_s = min(hold.until_s, soon_s)

    async def fill_disk(self) -> None:
        fs = self.rig.fs
        fs.set_capacity(fs.used_bytes() + self.random.choice((0, 100, 500)))
        try:
            for _ in range(3):
                await self.random.choice((self.put, self.take, self.settle))()
                await self.go_on()
            await self.rig.run_all()
        finally:
            fs.set_capacity(CAPACITY_BYTES)
        await asyncio.sleep(1.0)

    async def set_clock(self) -> None:
        jump_ms = self.random.choice(JUMPS_MS)
        if self.clock.wall_ms() + jump_ms > 0:  # no machine has a time before 1970
            self.clock.jump_wall_ms(jump_ms)

    async def tend(self) -> None:
        """Do the work of each second, and that after many changes."""
        service = self.rig.service
        if self.random.random() < 0.5:
            service.write_whole()
            await self.rig.run_all()
        elif self.random.random() < 0.3:
            service.wear_out()
            self.book.holds.clear()
        self.rig.trim()

    # -- what is known

    def _session(self, worker: str) -> QueueSession:
        return self.sessions.setdefault(worker, QueueSession(self.rig))

    def _may_be_dead(self, message: Message) -> bool:
        return message.tries >= self.definition.deliveries_max

    def _letters(self) -> set[bytes]:
        return set(self.rig.data_in("dead"))

    def _has_failed(self) -> bool:
        """Return whether the states were dropped from memory, and leases with them."""
        if self.rig.service.fail_count > self.fails:
            self.fails = self.rig.service.fail_count
            self.book.holds.clear()
            self._forget_given_up()
            return True
        return False

    def _forget_given_up(self) -> None:
        """States are read again, in which a dead letter is only when it is stored."""
        letters = self._letters()
        for data, message in self.book.messages.items():
            message.is_given_up &= data in letters

    def _check(self) -> None:
        for error in self.rig.found:
            raise error
        self._has_failed()
        letters = self.rig.data_in("dead")
        assert len(letters) == len(set(letters)), f"a dead letter twice: {letters}"
        for data in letters:
            assert not self.book.messages[data].is_acked, (
                f"dead after its ack: {data!r}"
            )

    async def _finish(self) -> None:
        """Everything is well: one worker acknowledges all that it gets."""
        for worker in [*self.sessions]:
            self._leave(worker)
        begin = len(self.book.given)
        for turn in range(200):
            await self.rig.run_all()
            self.rig.tick()
            self._take("last", 50, 0)
            await self.rig.run_all()
            while begin < len(self.book.given):
                worker, got = self.book.given[begin]
                self._settle(worker, [got], [got.says(SettleVerb.ACK)])
                begin += 1
            await self.rig.run_all()
            await asyncio.sleep(2.0)
            self._check()
            if turn > 20 and self._are_done():
                break
        self._check()
        out, letters = set(self.rig.data_in("out")), self._letters()
        for data, message in self.book.messages.items():
            made = len(message.outputs & out)
            ends = message.is_acked + (data in letters) + made
            is_known = message.offset >= 0
            may_be = message.asked > 0 or not is_known
            assert ends <= 1, f"done {ends} times: {data!r} {message}"
            assert ends or may_be, f"never done: {data!r} {message}"
        assert not self.rig.service.problems(), self.rig.service.problems()

    def _are_done(self) -> bool:
        return all(
            queue.state.floor == queue.log.high_watermark and not queue.letters_open
            for _, queue in self.rig.service.parts()
        )
