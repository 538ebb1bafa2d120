"""One partition through any roles, cuts, faults and starts, against what was said."""

import random
from collections.abc import Callable

import pytest

from metaq.errors import ClosedError, MayBeStoredError, StorageError
from metaq.model import Offset, SizeBytes
from metaq.storage.append_request import CopiedAppends
from metaq.storage.cut import cut_log
from metaq.storage.log_state import LogState
from metaq.storage.producers import StoredBatch
from tests.rigs.disk import CAPACITY_BYTES
from tests.rigs.fs import FaultyFileSystem, keep_all, keep_none, keep_random
from tests.rigs.storage import StorageBench, Ticket
from tests.sampling import examples
from tests.storage.support import LOG, config, content_of, replica_log, turn
from tests.storage.test_partition_log_batches import send

STEPS = 60


class Replica:
    """One log whose threads and loop go on in any order; the test is its leader."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.fs = FaultyFileSystem()
        self.sequence = 0
        self.committed = b""
        """Bytes that were readable once: they never change."""
        self.ends = {0}
        """Offsets at which an append may end, of every history so far."""
        self.sent: list[tuple[StoredBatch, Ticket]] = []
        """Puts of this role, oldest first."""
        self.earlier: list[Ticket] = []
        """Those of earlier roles: none of them is answered any more."""
        self.cuts: list[list[Exception | None]] = []
        self.bench, self.log = replica_log(self.fs)

    # -- steps

    def step(self) -> None:
        steps: list[Callable[[], None]] = [
            self.put, self.put, self.copy, self.copy, self.roll, self.turn, self.turn,
            self.allow, self.allow, self.repeat, self.be_late, self.change, self.cut,
            self.fill, self.crash,
        ]  # fmt: skip
        self.rng.choice(steps)()
        self.check()

    def put(self) -> None:
        self.sequence += 10
        try:
            sent = send(self.bench, self.sequence, self.rng.randint(1, 4), "p")
        except (StorageError, ClosedError):
            return
        self.sent.append(sent)
        self.ends.add(sent[0].end_offset)

    def copy(self) -> None:
        """Append what a leader with other bytes would send: here, made as by a put."""
        other = StorageBench(FaultyFileSystem(), config())
        other.open()
        other.next_id = self.bench.next_id
        self.sequence += 10
        batch, _ticket = send(other, self.sequence, self.rng.randint(1, 4), "q")
        other.run()
        (made,) = other.manager.logs().values()
        data = content_of(made)
        self.bench.next_id = other.next_id
        start, size = self.log.next_offset, SizeBytes(len(data))
        moved = StoredBatch(
            "q", batch.sequence, batch.count, -1, batch.first_id, start, size
        )
        try:
            last_id = type(batch.first_id)(other.next_id - 1)
            self.log.append_copy(
                CopiedAppends(start, (data,), size, batch.count, last_id, (moved,)),
                Ticket(),
            )
        except (StorageError, ClosedError):
            return
        self.ends.add(start + size)

    def roll(self) -> None:
        if self.log.state is LogState.FOLLOWING:
            self.log.roll(self.log.next_offset)

    def turn(self) -> None:
        turn(self.bench, self.rng)

    def allow(self) -> None:
        self.log.set_bound(Offset(self.rng.randrange(self.log.next_offset + 1)))

    def repeat(self) -> None:
        """Send a batch again that is remembered."""
        known = list(self.log.producers)
        if known:
            batch, ticket = self.rng.choice(known), Ticket()
            self.log.join(batch, ticket)
            self.sent.append((batch, ticket))

    def be_late(self) -> None:
        until = Offset(self.rng.randrange(self.log.next_offset + 1))
        self.log.end_in_doubt("late", until=until)

    def change(self) -> None:
        """Change the role; the writer is waited for before a log leads."""
        self.bench.run()
        if self.log.state is LogState.FOLLOWING:
            self.log.lead()
        elif self.log.state is LogState.OPEN:
            if self.rng.random() < 0.5:
                self.put()
            self.log.follow()
            assert all(ticket.is_answered for _, ticket in self.sent)
            self.sent = []

    def cut(self) -> None:
        if self.log.state is not LogState.FOLLOWING:
            return
        low, high = self.log.high_watermark, self.log.next_offset
        offsets = [each for each in self.ends if low <= each <= high]
        at = Offset(self.rng.choice([*offsets, low]))
        if at not in self.boundaries():
            return
        done: list[Exception | None] = []
        cut_log(self.bench.manager, LOG, at, done.append)
        if self.rng.random() < 0.7:
            self.bench.run()
            assert len(done) == 1
            if done == [None]:
                # Less where what was queued has found no room.
                assert self.log.next_offset <= at
        self.cuts.append(done)

    def boundaries(self) -> set[int]:
        """Return the ends of records by the notes: a cut is at one of them."""
        notes = self.log.producers
        ends = {0, *(end for each in notes for end in (each.offset, each.end_offset))}
        return ends if len(ends) > 1 else {0}

    def fill(self) -> None:
        is_full = self.rng.random() < 0.5
        self.fs.set_capacity(0 if is_full else CAPACITY_BYTES)
        self.turn()
        if self.rng.random() < 0.8:
            self.fs.set_capacity(CAPACITY_BYTES)

    def crash(self) -> None:
        if self.rng.random() < 0.6:
            return
        self.check()
        if self.rng.random() < 0.3:
            self.bench.close()
        choose = self.rng.choice(
            [keep_all, keep_none, keep_random(self.rng.randrange(1 << 30))]
        )
        self.fs = self.fs.crash(choose)
        self.fs.set_capacity(CAPACITY_BYTES)
        self.sent = []
        self.bench, self.log = replica_log(self.fs)
        assert self.log.state is LogState.FOLLOWING, self.log.damage
        known = self.bench.manager.known
        assert known is not None
        assert not known.too_short
        assert self.log.high_watermark <= len(self.committed)
        assert self.log.next_offset >= len(self.committed)
        # A leader says again what it has said.
        self.log.set_bound(Offset(len(self.committed)))

    # -- checks

    def check(self) -> None:
        """Hold what can be read, and what was answered, to what was so before."""
        assert self.log.state in {
            LogState.OPEN, LogState.FOLLOWING, LogState.REOPENING
        }, self.log.damage  # fmt: skip
        now = content_of(self.log)
        if len(now) >= len(self.committed):
            assert now.startswith(self.committed)
            self.committed = now
        else:
            assert self.committed.startswith(now)
        for batch, ticket in self.sent:
            if ticket.is_stored:
                assert batch.end_offset <= len(self.committed)
                first = self.committed[batch.offset + 8 : batch.offset + 16]
                assert int.from_bytes(first, "big") == batch.first_id
            if isinstance(ticket.error, MayBeStoredError):
                assert str(ticket.error).endswith("outcome unknown")


@pytest.mark.slow
def test_nothing_that_was_readable_changes_and_no_answer_is_of_other_bytes(
    rng: random.Random,
) -> None:
    """Whatever the role, the disk and the order in which threads go on."""
    cut_count = 0
    for _ in range(examples(40)):
        replica = Replica(rng)
        for _ in range(STEPS):
            replica.step()
        replica.bench.run()
        replica.check()
        replica.bench.close()
        assert replica.fs.open_paths() == []
        cut_count += sum(done == [None] for done in replica.cuts)
    assert cut_count, "nothing was cut"
