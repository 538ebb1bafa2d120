"""Members that join, leave, hang and die: at rest every partition has one owner.

Two living members never read the same partition at the same time.
"""

import asyncio
import random
from collections.abc import Collection
from types import NoneType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.assignment import Strategy
from metaq.errors import ClosedError
from metaq.model import TopicPartition
from metaq.testing.zk import MemoryZooKeeper
from tests.client.group_members import (
    CLOCK,
    GROUP,
    PATHS,
    Member,
    Sink,
    is_at_rest,
    part,
    serve,
)
from tests.rigs.virtual_time import run_virtually
from tests.rigs.waiting import until

SETTLE_S = 60.0


class _Group:
    """All members there ever were, and what may happen to them."""

    def __init__(self, strategy: Strategy, count: int, rng: random.Random) -> None:
        self.server = MemoryZooKeeper()
        self.strategy = strategy
        self.count = count
        self.rng = rng
        self.members: list[Member] = []
        self.suspended: set[Member] = set()
        self.dead_sessions: list[int] = []
        self.number = 0
        self.starts: dict[Member, asyncio.Task[None]] = {}
        self.violations: list[str] = []
        self.background: list[asyncio.Task[None]] = []
        serve(self.server, count)

    def make(self) -> Member:
        self.number += 1
        member = Member(self.server, f"c{self.number}", strategy=self.strategy)
        member.sink = _ExclusiveSink(self)
        member.sink.assign_s = self.rng.choice([0.0, 0.01, 0.2])
        member.sink.revoke_s = self.rng.choice([0.0, 0.05, 1.0])
        return member

    async def join(self) -> None:
        member = self.make()
        await member.connect()
        self.members.append(member)
        self.starts[member] = self._spawn(member.source.start(member.sink))

    async def leave(self) -> None:
        member = self.pick()
        if member is not None:
            self.members.remove(member)
            self._spawn(member.leave())

    async def die(self) -> None:
        member = self.pick()
        if member is not None:
            self.members.remove(member)
            self.starts[member].cancel()
            self.dead_sessions.append(await member.die())

    async def reap(self) -> None:
        if self.dead_sessions:
            self.server.reap(self.dead_sessions.pop())

    async def expire(self) -> None:
        member = self.pick()
        if member is not None:
            self.server.expire(member.coordinator)

    async def suspend(self) -> None:
        member = self.pick()
        # Who is joining would rightly give up.
        if member is not None and self.starts[member].done():
            self.suspended.add(member)
            self.server.suspend(member.coordinator)

    async def resume(self) -> None:
        if self.suspended:
            self.server.resume(self.suspended.pop().coordinator)

    async def grow(self) -> None:
        self.count += 1
        serve(self.server, self.count)

    async def shrink(self) -> None:
        self.count = max(1, self.count - 1)
        serve(self.server, self.count)

    async def lose_id(self) -> None:
        member = self.pick()
        if member is not None:
            self.server.remove(PATHS.member(GROUP, member.name))

    async def bounce(self) -> None:
        self.server.stop()
        await asyncio.sleep(self.rng.random())
        self.server.start()

    def pick(self) -> Member | None:
        free = [member for member in self.members if member not in self.suspended]
        return self.rng.choice(free) if free else None

    def _spawn(self, work: "asyncio._CoroutineLike[None]") -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self.background.append(task)
        return task

    async def come_to_rest(self) -> None:
        """Heal everything, then wait until each partition has its one owner."""
        while self.suspended:
            await self.resume()
        while self.dead_sessions:
            await self.reap()
        began_s = CLOCK.monotonic_s()
        await until(
            lambda: is_at_rest(self.server, self.members, self.count, self.strategy)
        )
        assert CLOCK.monotonic_s() - began_s < SETTLE_S
        assert self.violations == []
        ends = await asyncio.gather(*self.background, return_exceptions=True)
        for end in ends:
            # A member that leaves or dies while it joins gets an error.
            assert isinstance(end, NoneType | ClosedError | asyncio.CancelledError), end

    async def close(self) -> None:
        for member in self.members:
            await member.leave()


class _ExclusiveSink(Sink):
    """Tells when it shall read a partition that another member reads."""

    def __init__(self, group: _Group) -> None:
        super().__init__()
        self._group = group

    async def assign(self, partitions: Collection[TopicPartition]) -> None:
        await super().assign(partitions)
        for member in self._group.members:
            shared = member.reading.intersection(partitions)
            if shared and member.sink is not self:
                self._group.violations.append(f"{shared} of {member.name}")


OPERATIONS = (
    "join",
    "join",
    "leave",
    "die",
    "reap",
    "expire",
    "suspend",
    "resume",
    "grow",
    "shrink",
    "lose_id",
    "bounce",
)
"""Joining twice as often as the others: a group of none is no test."""

steps = st.lists(
    st.tuples(st.sampled_from(OPERATIONS), st.sampled_from([0.0, 0.005, 0.03, 0.3, 3])),
    min_size=4,
    max_size=40,
)


@pytest.mark.slow
@given(
    strategy=st.sampled_from(Strategy),
    count=st.integers(1, 7),
    steps=steps,
    seed=st.integers(0, 2**32),
)
def test_any_history_ends_with_one_owner_each(
    strategy: Strategy, count: int, steps: list[tuple[str, float]], seed: int
) -> None:
    """For any events, in any order, at any time."""

    async def scenario() -> None:
        group = _Group(strategy, count, random.Random(seed))
        for name, pause_s in steps:
            await getattr(group, name)()
            await asyncio.sleep(pause_s)
        await group.come_to_rest()
        await group.close()
        assert not [path for path in group.server.nodes if "/owners/t/" in path]

    run_virtually(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", Strategy)
def test_twenty_members_and_forty_partitions(
    strategy: Strategy, rng: random.Random
) -> None:
    """Joining and leaving at random, dying and losing sessions; then at rest."""

    async def scenario() -> None:
        group = _Group(strategy, 40, rng)
        for _ in range(20):
            await group.join()
        await group.come_to_rest()
        for _ in range(5):
            for _ in range(10):
                await getattr(group, rng.choice(OPERATIONS))()
                await asyncio.sleep(rng.random() * 0.2)
            while len(group.members) < 20:
                await group.join()
            await group.come_to_rest()
            owners = [p for member in group.members for p in member.reading]
            assert sorted(owners) == sorted(map(part, range(group.count)))
        await group.close()

    run_virtually(scenario())


@pytest.mark.slow
def test_a_storm_leaves_most_partitions_alone(rng: random.Random) -> None:
    """With consistent hashing, who stays keeps what stays with it."""

    async def scenario() -> None:
        group = _Group(Strategy.CONSIST, 40, rng)
        for _ in range(5):
            await group.join()
        await group.come_to_rest()
        before = {m: frozenset(m.reading) for m in group.members}
        for member in group.members:
            member.sink.calls.clear()
        for _ in range(3):
            await group.join()
            await group.come_to_rest()
            newest = group.members.pop()
            await newest.leave()
            await group.come_to_rest()
        assert {m: frozenset(m.reading) for m in group.members} == before
        moved = {p for m in group.members for p in m.sink.called("revoke")}
        assert len(moved) < 40
        for member in group.members:
            untouched = before[member] - member.sink.called("revoke")
            assert untouched.isdisjoint(member.sink.called("assign"))
        await group.close()

    run_virtually(scenario())
