"""A random machine over the delay service, and a dictionary that says what is due.

Each step sends, cancels, waits, sets the clock, closes partitions, fills the disk,
damages an index, trims, or cuts the power, which may come within any other step, at one
of its syncs. After each step the partitions are compared with the dictionary: nothing
is there twice, before its time, or after its cancel was answered; what is due and was
answered is there, unless its partition was closed when its time came.
"""

import random
from dataclasses import dataclass, field
from typing import Any

from metaq.broker.delay_tier import KEPT_S
from metaq.delay.due_index import DUE_SUFFIX
from metaq.protocol.commands import Cancel, Mput
from metaq.testing.clock import ManualClock
from tests.broker.delay_rig import (
    DelayRig,
    SteppedDelays,
    mput_of,
    receipts_of,
)
from tests.broker.stepped import cut_at_sync
from tests.rigs.disk import CAPACITY_BYTES
from tests.rigs.fs import FaultyFileSystem, keep_all, keep_random

PARTITIONS = 2
DELAYS_MS = (1, 50, 99, 100, 1_000, 10_000, 3_600_000, 3 * 86_400_000, 40 * 86_400_000)
LAPSES_S = (0.001, 0.1, 0.1, 1.0, 10.0, 3600.0, 86_400.0 * 2)
DECADE_MS = 10 * 365 * 86_400_000
JUMPS_MS = (-500, 700, -10_000, 10_000, -3_600_000, 3_600_000, -DECADE_MS, DECADE_MS)
SETTLE_S = 61.0
"""Longer than a clock that jumped is doubted, and than the longest back-off."""


@dataclass
class Sent:
    """One message, as its sender knows it."""

    due_ms: int
    is_acked: bool = False
    """The sender was told that it is kept."""
    is_cancelled: bool = False
    """The sender was told that it is taken back."""
    is_in_doubt: bool = False
    """It may have been taken back."""
    may_be_late: bool = False
    """Its partition may have refused it when its time came."""
    receipt: tuple[int, int, int, int] | None = None
    """Tier, offset, due time, id."""


@dataclass
class Book:
    """Messages that were sent, by data."""

    sent: dict[bytes, Sent] = field(default_factory=dict)
    unanswered: list[tuple[float, Mput, list[bytes]]] = field(default_factory=list)
    """Batches with a name that may be sent again."""


class DelayWalk:
    """The machine. One walk is one seed."""

    def __init__(self, seed: int, make: type[SteppedDelays] = SteppedDelays) -> None:
        self.random = random.Random(seed)
        self.book = Book()
        self.make = make
        self.rig: DelayRig
        self.numbers = iter(range(10**9))
        self.closed = False
        self.seen: set[bytes] = set()
        self.counts: dict[str, int] = {}
        self.latest_ms = 0
        """Latest time that there was. A message that was refused then waits for a time
        after it, also when the clock was set back since."""

    async def play(self, steps: int) -> None:
        """Begin, take so many steps, and see that everything arrives."""
        self.rig = await DelayRig(make=self.make).start()
        for _ in range(steps):
            await self._step()
        await self._finish()
        await self.rig.kill()

    async def _step(self) -> None:
        step = self.random.choice(self.steps())
        self.counts[step.__name__] = self.counts.get(step.__name__, 0) + 1
        if self.random.random() < 0.85:
            await step()
            await self._tick_and_check()
            return
        # The power goes at one of the syncs of the step, or after it.
        number = self.random.randrange(8)
        with cut_at_sync(self.rig.fs, number, lambda: self.book) as found:
            await step()
            await self.rig.try_tick()
        await self._begin_again(*found[0])

    def steps(self) -> list[Any]:
        return [
            *[self.send] * 6,
            *[self.cancel] * 2,
            *[self.wait] * 6,
            self.send_again,
            self.send_in_transaction,
            self.set_clock,
            self.close,
            self.fill_disk,
            self.damage_index,
            self.trim,
            self.cut_power,
        ]

    async def _begin_again(self, fs: FaultyFileSystem, book: Book) -> None:
        self.book = book
        if self.closed:
            for each in self.book.sent.values():
                each.may_be_late |= each.due_ms <= self.rig.ticked_ms
        ticked_ms = self.rig.ticked_ms
        await self.rig.kill()
        if self.random.random() < 0.5:
            fs = fs.crash(keep_all)  # the process was killed, the machine goes on
        else:
            # Which batches there were is not synced with them (decision 0010).
            book.unanswered.clear()
            fs = fs.crash(keep_random(self.random.randrange(1 << 30)))
        fs.set_capacity(CAPACITY_BYTES)
        clock: ManualClock = self.rig.clock
        self.rig = await DelayRig(fs, clock, make=self.make).start()
        self.closed = False
        self.rig.ticked_ms = ticked_ms
        await self._tick_and_check()

    # -- steps

    async def send(self) -> None:
        datas = self._datas()
        times = self._times(len(datas))
        more: dict[str, Any] = {"partition": self.random.choice((0, 1, -1))}
        if self.random.random() < 0.4:
            more |= {"producer": f"p{next(self.numbers)}", "sequence": 0}
        command = self._command(datas, times, **more)
        self._note(datas, times)
        if more.get("producer"):
            sent_s = self.rig.clock.monotonic_s()
            self.book.unanswered.append((sent_s, command, datas))
        await self._send(command, datas)

    async def send_again(self) -> None:
        """Repeat batches, answered or not."""
        now_s = self.rig.clock.monotonic_s()
        for sent_s, command, datas in self.book.unanswered[-3:]:
            if sent_s > now_s - KEPT_S:
                await self._send(command, datas)
        del self.book.unanswered[:-6]

    async def send_in_transaction(self) -> None:
        datas, rig = self._datas(), self.rig
        times = self._times(len(datas))
        self._note(datas, times)
        is_committed = self.random.random() < 0.7
        wait_s = self.random.choice((0.0, 0.0, 2.0, 4000.0))
        command = self._command(datas, times, partition=self.random.choice((0, 1)))
        if self.closed:
            return
        # What is due at the put does not wait, also where the clock goes back after it.
        rig.ticked_ms = max(rig.ticked_ms, rig.now_ms)
        outcome = await rig.commit(command, wait_s, is_committed=is_committed)
        for data in datas:
            if not is_committed:
                del self.book.sent[data]
            elif outcome:
                self.book.sent[data].is_acked = True

    async def cancel(self) -> None:
        found = [each for each in self.book.sent.values() if each.receipt is not None]
        if not found:
            return
        sent = self.random.choice(found)
        was_cancelled, was_in_doubt = sent.is_cancelled, sent.is_in_doubt
        sent.is_in_doubt = True
        body = b"%d %d %d %d" % sent.receipt
        reply = await self.rig.ask(Cancel("test", body, 1))
        if reply.status == 200:
            # When its time is over, only the broker that took it back tells that.
            sent.is_in_doubt = was_in_doubt and reply.body == b"delivered"
            sent.is_cancelled |= reply.body == b"cancelled"
            if was_cancelled:
                # Its time was over, also where the clock was set back since.
                assert reply.body != b"unknown" or sent.due_ms < self.latest_ms

    async def wait(self) -> None:
        self.rig.clock.advance_s(self.random.choice(LAPSES_S))

    async def set_clock(self) -> None:
        jump_ms = self.random.choice(JUMPS_MS)
        if self.rig.clock.wall_ms() + jump_ms > 0:  # no machine has a time before 1970
            self.rig.clock.jump_wall_ms(jump_ms)
        if self.random.random() < 0.5:
            for _ in range(7):
                self.rig.clock.advance_s(10.0)
                await self._tick_and_check()

    async def close(self) -> None:
        """Have the topic refuse messages, or take them again."""
        topics, config = self.rig.context.topics, self.rig.context.config
        assert "test" in config.topic_names
        if self.closed:
            topics.open_partitions("test")
        else:
            topics.close_partitions("test", start=0, end=None)
        self.closed = not self.closed

    async def fill_disk(self) -> None:
        fs = self.rig.fs
        fs.set_capacity(fs.used_bytes() + self.random.choice((0, 200, 1000)))
        try:
            await self.send()
            await self.cancel()
            await self.rig.try_tick()
        finally:
            fs.set_capacity(CAPACITY_BYTES)
        self.rig.clock.advance_s(11.0)  # tiers that failed are read again

    async def damage_index(self) -> None:
        rig, fs = self.rig, self.rig.fs
        found = [
            path
            for log in rig.bench.logs.manager.logs().values()
            for name in fs.names_in(log.segments.active.path.parent)
            if (path := log.segments.active.path.with_name(name)).suffix == DUE_SUFFIX
        ]
        if found:
            path = self.random.choice(found)
            if self.random.random() < 0.5:
                fs.discard(path)
            else:
                fs.flip_bit(path, self.random.randrange(8 * len(fs.content(path))))
        rig.clock.advance_s(11.0)

    async def trim(self) -> None:
        self.rig.trim()

    async def cut_power(self) -> None:
        await self._begin_again(self.rig.fs.snapshot(), self.book)

    # -- the book

    def _datas(self) -> list[bytes]:
        size = self.random.choice((1, 10, 300))
        return [
            b"%d:%b" % (next(self.numbers), b"x" * size)
            for _ in range(self.random.choice((1, 1, 2, 5)))
        ]

    def _times(self, number: int) -> list[int]:
        """Return the times of a batch: one, or any."""
        now_ms, choose = self.rig.now_ms, self.random.choice
        if choose((True, False)):
            return [now_ms + choose(DELAYS_MS)] * number
        return [now_ms + choose((*DELAYS_MS, -1000)) for _ in range(number)]

    def _command(self, datas: list[bytes], times: list[int], **more: Any) -> Mput:
        if len(set(times)) == 1 and self.random.random() < 0.8:
            return mput_of(*datas, due_ms=times[0], **more)
        return mput_of(*datas, times=times, **more)

    def _note(self, datas: list[bytes], times: list[int]) -> None:
        for data, due_ms in zip(datas, times, strict=True):
            self.book.sent[data] = Sent(due_ms)

    async def _send(self, command: Mput, datas: list[bytes]) -> None:
        reply = await self.rig.send(command)
        if reply.status != 200:
            return
        messages = [self.book.sent[data] for data in datas]
        receipts: list[Any] = [None] * len(datas)
        if len(reply.text.split()) == 5:
            receipts = receipts_of(reply, datas, [each.due_ms for each in messages])
        for sent, receipt in zip(messages, receipts, strict=True):
            sent.is_acked = True
            assert receipt is None or sent.receipt in {None, receipt}
            sent.receipt = receipt or sent.receipt

    async def _tick_and_check(self) -> None:
        now_ms = self.rig.now_ms
        self.latest_ms = max(self.latest_ms, now_ms)
        if self.closed:
            for each in self.book.sent.values():
                each.may_be_late |= each.due_ms <= now_ms
        await self.rig.try_tick()
        self._check(now_ms, is_end=False)

    def _check(self, now_ms: int, *, is_end: bool) -> None:
        there = self.rig.payloads(0) + self.rig.payloads(1)
        assert len(there) == len(set(there)), "delivered twice"
        here = set(there)
        for data in here:
            sent = self.book.sent.get(data)
            assert sent is not None, f"of a transaction that was rolled back: {data!r}"
            is_time = sent.due_ms <= self.rig.ticked_ms
            assert is_time or data in self.seen, f"too early: {sent}"
            assert not sent.is_cancelled, f"cancelled: {sent}"
        self.seen |= here
        self.rig.ticked_ms = 0
        for data, sent in self.book.sent.items():
            is_owed = sent.is_acked and not sent.is_cancelled and not sent.is_in_doubt
            is_due = sent.due_ms <= now_ms and (is_end or not sent.may_be_late)
            if is_owed and is_due and data not in here:
                assert not self.rig.is_healthy, f"missing: {data!r} {sent}"

    async def _finish(self) -> None:
        """Everything is due, and everything is well."""
        if self.closed:
            await self.close()
        again_ms = self.latest_ms + int(SETTLE_S * 1000)
        last_ms = max([again_ms, *(each.due_ms for each in self.book.sent.values())])
        for _ in range(8):
            self.rig.clock.advance_s(SETTLE_S / 7)
            await self.rig.tick()
        lapse_s = max(0.0, (last_ms - self.rig.now_ms) / 1000) + 1.0
        for _ in range(3):
            self.rig.clock.advance_s(lapse_s)
            await self.rig.tick()
            lapse_s = SETTLE_S
        assert self.rig.is_healthy, self.rig.service.status()
        self._check(self.rig.now_ms, is_end=True)
