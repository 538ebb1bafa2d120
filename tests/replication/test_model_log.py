"""The log of the explorers has the high watermark of the log that brokers have."""

import random

import pytest

from metaq.model import Offset
from metaq.replication.epochs import CopyFacts, Epoch, EpochStart
from metaq.replication.progress import Quorum
from tests.replication.model_log import ModelLog, begin_model_log
from tests.rigs.fs import FaultyFileSystem, keep_all
from tests.sampling import examples
from tests.storage.support import NUMBER, replica_log, turn
from tests.storage.test_partition_log_batches import send

STEPS = 60
EPOCH = Epoch(4, "n")
ALL = frozenset({1, 2, 3})


class Leader:
    """A log on a simulated disk, and its model; the test is the other copies."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.quorum = Quorum(1, ALL, 2)
        self.sequence = 0
        self.fs = FaultyFileSystem()
        self.bench, self.log = replica_log(self.fs)
        self.log.lead()
        self.model = self.begin()

    def begin(self) -> ModelLog:
        log = self.log
        start = log.log_start_offset
        table = (EpochStart(EPOCH, start),)
        ends = log.synced_end, log.high_watermark
        return begin_model_log(CopyFacts(NUMBER, start, *ends, table))

    def step(self) -> None:
        steps = [
            *[self.put, self.turn] * 2, *[self.acknowledge] * 6,
            self.join, self.leave, self.propose, self.settle, self.lead_again,
        ]  # fmt: skip
        self.rng.choice(steps)()
        self.model = self.model.sync(self.log.synced_end).advance(self.quorum)
        bound = self.model.bound(self.quorum)
        self.log.set_bound(self.log.high_watermark if bound is None else bound)
        assert self.log.high_watermark == self.model.hw

    def put(self) -> None:
        self.sequence += 10
        batch, _ticket = send(self.bench, self.sequence, self.rng.randint(1, 4))
        self.model = self.model.append(batch.end_offset)

    def turn(self) -> None:
        turn(self.bench, self.rng)

    def acknowledge(self) -> None:
        """Confirm an end, also one within an append, or above the leader's sync."""
        end = self.log.next_offset
        if self.rng.random() < 0.3:
            end = Offset(self.rng.randrange(end + 1))
        self.model = self.model.acknowledge(self.other(), end)

    def join(self) -> None:
        end = Offset(self.rng.randrange(self.log.next_offset + 1))
        self.model = self.model.join(self.other(), end)

    def leave(self) -> None:
        self.model = self.model.leave(self.other())

    def propose(self) -> None:
        self.quorum = self.quorum.propose(self.members())

    def settle(self) -> None:
        self.quorum = self.quorum.settle(self.members(), min_in_sync=2)

    def lead_again(self) -> None:
        """Lose the lead, or power, and lead again with what is not committed."""
        self.bench.run()
        if self.rng.random() < 0.5:
            self.log.follow()
            self.bench.run()
        else:
            self.fs = self.fs.crash(keep_all)
            self.bench, self.log = replica_log(self.fs)
        self.log.lead()
        self.model = self.begin()

    def other(self) -> int:
        return self.rng.choice([2, 3])

    def members(self) -> frozenset[int]:
        return self.rng.choice([ALL, frozenset({1, 2}), frozenset({1, 3})])


@pytest.mark.slow
def test_a_log_has_the_high_watermark_that_the_explorers_check(
    rng: random.Random,
) -> None:
    moved_count = inherited_count = 0
    for _ in range(examples(100)):
        leader = Leader(rng)
        for _ in range(STEPS):
            before = leader.model
            leader.step()
            moved_count += leader.model.hw > before.hw
            start = leader.model.epoch_start
            inherited_count += before.hw < start == leader.model.hw
        leader.bench.run()
        leader.bench.close()
    assert moved_count, "nothing was committed"
    assert inherited_count, "nothing that was inherited was committed"
