"""The order of a producer's batches, where the disk refuses them any time later."""

import errno
import random
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import pytest

from metaq.broker.handlers.put import handle_mput
from metaq.broker.hot_puts import HotPuts
from metaq.broker.single_puts import SinglePuts
from metaq.errors import UnavailableError, WireError
from metaq.protocol.commands import Mput, Result
from metaq.protocol.encoding import encode
from metaq.protocol.texts import NO_ROOM, split_code
from tests.broker.delay_rig import FakeSession, mput_of, result_of
from tests.broker.stepped import context_on
from tests.rigs.fs import FaultyFileSystem, Operation
from tests.sampling import examples
from tests.txn.support import A, TransactionBench

RUNS = examples(1000)
STEPS = 250
IN_FLIGHT_MAX = 5


def batch_of(sequence: int, count: int = 1, producer: str = "p") -> Mput:
    data = [b"%d" % (sequence + each) for each in range(count)]
    return mput_of(*data, due_ms=None, producer=producer, sequence=sequence)


class World:
    """A producer, a broker whose disk answers any time later, and what both do."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        fs = FaultyFileSystem()
        self.bench = TransactionBench(fs)
        self.bench.open()
        self.full_count = 0
        """Writes that are still to find no space."""
        fs.on_call(self.on_call)
        self.context = context_on(self.bench, self.bench.logs.config)
        self.sequence = self.number = 0
        self.is_gap_due = self.is_alone = self.is_ending = False
        self.in_flight: dict[int, Mput] = {}
        """Batches by their opaques, which are new for each attempt."""
        self.returned: list[Mput] = []
        self.in_doubt: set[int] = set()
        """Sequences of batches that an earlier connection may have left in the log."""
        self.acked: list[Mput] = []
        self.connect()

    def connect(self) -> None:
        """Lose the connection, with the answers that are on their way."""
        self.session: Any = FakeSession(self.context)
        self.hot = HotPuts(
            self.session, self.context, SinglePuts(self.context, lambda _call: None)
        )
        self.in_doubt |= {each.sequence for each in self.in_flight.values()}
        self.returned += self.in_flight.values()
        self.in_flight = {}

    # -- the producer

    def send(self) -> None:
        """Send the next batch; one again, alone, once all in flight have an answer."""
        if self.is_gap_due or self.returned or self.is_alone:
            if self.in_flight:
                return
            self.sequence += self.is_gap_due
            self.is_gap_due, self.is_alone = False, bool(self.returned)
        if self.returned:
            batch = min(self.returned, key=lambda batch: batch.sequence)
            self.returned.remove(batch)
            self.put(batch, is_refused=self.draws_refusal())
        elif len(self.in_flight) < IN_FLIGHT_MAX and not self.is_ending:
            count = self.rng.choice([1, 1, 2])
            self.put(batch_of(self.sequence, count), is_refused=self.draws_refusal())
            self.sequence += count

    def draws_refusal(self) -> bool:
        return not self.is_ending and self.rng.random() < 0.15

    def put(self, batch: Mput, *, is_refused: bool = False) -> None:
        self.number += 1
        batch = replace(batch, opaque=self.number)
        self.in_flight[self.number] = batch
        busy = UnavailableError("for a moment")
        self.bench.topics.refuse(busy if is_refused else None)
        if self.hot.take_batch(encode(batch)):
            return
        try:
            for _ in handle_mput(batch, [batch.payload], self.session):
                pass
        except WireError as refusal:
            reply = Result(refusal.status, str(refusal).encode(), batch.opaque)
            self.session.replies.append(encode(reply))

    def hear(self) -> None:
        """Receive one answer."""
        if not self.session.replies:
            return
        reply = result_of(self.session.replies.pop(0))
        batch = self.in_flight.pop(reply.opaque)
        if reply.status == 200:
            self.acked.append(batch)
            return
        _, code = split_code(reply.text)
        assert reply.status == 503 or (code and code.word == NO_ROOM), reply
        if self.rng.random() < 0.1 and batch.sequence not in self.in_doubt:
            self.is_gap_due = True  # its time is over
        else:
            self.returned.append(batch)

    def statuses(self) -> list[int]:
        """Receive all answers."""
        replies, self.session.replies = self.session.replies, []
        return [result_of(each).status for each in replies]

    # -- the broker

    def work(self) -> None:
        """Have the storage thread write a group, or the disk answer syncs."""
        logs = self.bench.logs
        for worker in logs.workers:
            if worker.queue or worker.has_more:
                worker.turn()
        if logs.syncs is not None and self.rng.random() < 0.5:
            logs.syncs.reap()

    def report(self) -> None:
        self.bench.logs.loop.run_some(self.rng.choice([0, 1, 1, 2]))

    def fill(self) -> None:
        """Have the next writes find no space."""
        self.full_count = self.rng.choice([1, 1, 2])

    def on_call(self, operation: Operation) -> None:
        if operation.name == "write" and self.full_count:
            self.full_count -= 1
            raise OSError(errno.ENOSPC, "full", str(operation.path))

    # -- all

    def play(self) -> None:
        steps = [self.send, self.hear, self.work, self.report, self.fill]
        for _ in range(STEPS):
            (step,) = self.rng.choices(steps, [10, 2, 8, 8, 4])
            step()
            if self.rng.random() < 0.01:
                self.connect()
        self.full_count = 0
        self.is_ending = True
        while self.in_flight or self.returned:
            self.send()
            self.bench.run()
            self.hear()


@pytest.mark.slow
def test_nothing_is_stored_before_a_refused_batch_that_comes_again(
    rng: random.Random,
) -> None:
    """Whenever it is refused, and whenever the disk says so."""
    refused_count = 0
    for _ in range(RUNS):
        world = World(rng)
        world.play()
        stored = [int(each) for each in world.bench.payloads(A)]
        world.bench.close()
        assert all(before < after for before, after in pairwise(stored)), stored
        ranges = [range(b.sequence, b.sequence + b.count) for b in world.acked]
        assert stored == sorted(chain.from_iterable(ranges))
        refused_count += world.number - len(world.acked)
    assert refused_count, "nothing was refused"


def test_a_late_refusal_of_the_disk_does_not_forget_one_at_once(
    rng: random.Random,
) -> None:
    """The first batch is in flight while the second one is refused."""
    world = World(rng)
    world.put(batch_of(0))
    world.bench.run()
    world.full_count = 1
    world.put(batch_of(1))
    world.put(batch_of(2), is_refused=True)
    world.bench.run()
    assert world.statuses() == [200, 503, 500]
    world.put(batch_of(3))
    assert world.statuses() == [503]
    world.bench.close()


def test_a_repetition_that_joined_a_batch_is_refused_like_it(
    rng: random.Random,
) -> None:
    """So is the next batch on the connection that joined."""
    world = World(rng)
    world.put(batch_of(0))
    world.bench.run()
    world.full_count = 1
    world.put(batch_of(1))
    world.connect()
    world.put(batch_of(1))
    world.bench.run()
    assert world.statuses() == [500]
    world.put(batch_of(2))
    assert world.statuses() == [500]
    world.bench.close()


def test_only_the_producer_that_waits_is_looked_at_closely(rng: random.Random) -> None:
    """Batches of one of others take the short path, however long it waits."""
    world = World(rng)
    world.put(batch_of(0))
    world.put(batch_of(1), is_refused=True)
    world.bench.topics.refuse(None)
    other = batch_of(0, producer="q")
    assert world.hot.take_batch(encode(other))
    assert not world.hot.take_batch(encode(batch_of(2)))
    world.bench.run()
    world.bench.close()
