"""A commit in one request by a member that loses its partition, at each step.

The first commit remembers the version of the offset node. The second one is a single
request, before which the state in ZooKeeper changes.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest

from metaq.client.group.assignments import Fence
from metaq.client.offsets.offset_store import TOGETHER_MAX, ZooKeeperOffsets
from metaq.errors import MetaqError, OwnershipLostError, SessionSuspendedError
from metaq.model import BrokerId, TopicPartition
from metaq.zk.errors import CoordinationTimeoutError
from metaq.zk.session import CheckNode, WriteNode
from tests.rigs.virtual_time import run_virtually
from tests.rigs.waiting import until
from tests.zk.meddling import MeddledZooKeeper
from tests.zk.test_offsets import OFFSET, OWNER, P0, PATHS, Owner, at, in_s, owner_on

MEMBER = "/meta/consumers/g/ids/g_c1"
P1 = TopicPartition("test", BrokerId(0), 1)
OWNER_1, OFFSET_1 = PATHS.owner("g", P1), PATHS.group_offset("g", P1)


class Case:
    """A group of two; the first one owns the partitions, and commits by one request."""

    def __init__(self, server: MeddledZooKeeper, one: Owner, two: Owner) -> None:
        self.server, self.one, self.two = server, one, two
        self.store = ZooKeeperOffsets(one.coordinator, PATHS)

    async def begin(self, partitions: tuple[TopicPartition, ...] = (P0,)) -> None:
        await self.one.claim()
        for partition in partitions[1:]:
            assert await self.one.group.claim(partition, deadline_s=in_s())
        assert await self.commit(10, partitions) == {}

    async def commit(
        self, offset: int, partitions: tuple[TopicPartition, ...] = (P0,)
    ) -> dict[TopicPartition, MetaqError]:
        fence = Fence(self.one.group.member, self.one.session_version)
        offsets = dict.fromkeys(partitions, at(offset))
        failed = await self.store.commit("g", offsets, fence=fence, deadline_s=in_s())
        return dict(failed)

    # -- what may happen --------------------------------------------------------------

    async def release(self) -> None:
        await self.one.group.release(P0, deadline_s=in_s())

    async def expire(self) -> None:
        """The session ends, and another one begins before the request is sent."""
        self.server.expire(self.one.coordinator)
        await until(lambda: self.one.coordinator.status.session_version == 2)

    async def delete_owner(self) -> None:
        self.server.remove(OWNER)

    async def overwrite_owner(self) -> None:
        self.server.write(OWNER, b"g_c2")

    async def delete_member(self) -> None:
        self.server.remove(MEMBER)

    async def take(self) -> None:
        await self.two.claim()

    async def take_and_commit(self) -> None:
        await self.two.claim()
        await self.two.commit(500)

    async def set_offset(self) -> None:
        self.server.write(OFFSET, b"3")

    async def delete_offset(self) -> None:
        self.server.remove(OFFSET)

    async def make_offset_again(self) -> None:
        """With the version that the first commit left."""
        self.server.remove(OFFSET)
        self.server.write(OFFSET, b"3")


@dataclass(frozen=True)
class Loss:
    steps: tuple[Callable[[Case], Awaitable[None]], ...]
    error: type[MetaqError] | None
    stored: bytes | None


LOST = OwnershipLostError
LOSSES = {
    "nothing": Loss((), None, b"7-20"),
    "released": Loss((Case.release,), LOST, b"7-10"),
    # The same version of the owner node: the next owner has not committed, and begins
    # at 10, which 20 is not before.
    "released, claimed": Loss((Case.release, Case.take), None, b"7-20"),
    "released, committed": Loss((Case.release, Case.take_and_commit), LOST, b"7-500"),
    "expired": Loss((Case.expire,), LOST, b"7-10"),
    "expired, claimed": Loss((Case.expire, Case.take), LOST, b"7-10"),
    "expired, committed": Loss((Case.expire, Case.take_and_commit), LOST, b"7-500"),
    "owner deleted": Loss((Case.delete_owner,), LOST, b"7-10"),
    "owner deleted, claimed": Loss((Case.delete_owner, Case.take), None, b"7-20"),
    "owner deleted, committed": Loss(
        (Case.delete_owner, Case.take_and_commit), LOST, b"7-500"
    ),
    "owner overwritten": Loss((Case.overwrite_owner,), LOST, b"7-10"),
    "member deleted": Loss((Case.delete_member,), None, b"7-20"),
    "offset set": Loss((Case.set_offset,), None, b"7-20"),
    "offset deleted": Loss((Case.delete_offset,), None, b"7-20"),
    "offset made again": Loss((Case.make_offset_again,), None, b"7-20"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_happens_before_the_request_is_noticed_or_harmless(name: str) -> None:
    """A lost partition is refused, or its next owner is not set back."""
    loss = LOSSES[name]

    async def scenario() -> None:
        server = MeddledZooKeeper()
        async with owner_on(server) as one, owner_on(server, "c2") as two:
            case = Case(server, one, two)
            await case.begin()

            async def meddle(_operations: Any) -> None:
                server.before.clear()
                for step in loss.steps:
                    await step(case)

            server.before["transact"] = meddle
            failed = await case.commit(20)
            assert [type(error) for error in failed.values()] == (
                [] if loss.error is None else [loss.error]
            )
            assert server.nodes[OFFSET].data == loss.stored

    run_virtually(scenario())


@pytest.mark.parametrize("name", [name for name in LOSSES if "claimed" in name])
def test_the_next_owner_commits_over_a_late_commit_and_ends_them(name: str) -> None:
    """However often the former owner has committed before that."""
    loss = LOSSES[name]

    async def scenario() -> None:
        server = MeddledZooKeeper()
        async with owner_on(server) as one, owner_on(server, "c2") as two:
            case = Case(server, one, two)
            await case.begin()
            next_store = ZooKeeperOffsets(two.coordinator, PATHS)
            for step in loss.steps:
                await step(case)
            for offset in (20, 30):
                await case.commit(offset)
            fence = Fence(two.group.member, two.session_version)
            for offset in (15, 16):
                assert not await next_store.commit(
                    "g", {P0: at(offset)}, fence=fence, deadline_s=in_s()
                )
                failed = await case.commit(40)
                assert isinstance(failed[P0], OwnershipLostError)
                assert server.nodes[OFFSET].data == b"7-%d" % offset

    run_virtually(scenario())


@pytest.mark.parametrize("fault", ["suspended", "expired", "no answer"])
def test_a_fault_of_zookeeper_fails_all_and_the_next_commit_is_right(
    fault: str,
) -> None:
    """Whether the offsets were written is not known; the next commit finds out."""
    errors = {
        "suspended": SessionSuspendedError,
        "expired": OwnershipLostError,
        "no answer": CoordinationTimeoutError,
    }

    async def scenario() -> None:
        server = MeddledZooKeeper()
        async with owner_on(server) as one, owner_on(server, "c2") as two:
            case = Case(server, one, two)
            await case.begin((P0, P1))

            async def break_down(_operations: Any) -> None:
                if fault == "suspended":
                    server.suspend(one.coordinator)
                elif fault == "expired":
                    await case.expire()
                else:
                    server.stall = True

            server.before["transact"] = break_down
            failed = await case.commit(20, (P0, P1))
            assert {type(error) for error in failed.values()} == {errors[fault]}
            assert failed.keys() == {P0, P1}
            server.before.clear()
            server.stall = False
            server.resume(one.coordinator)
            # An answer that was lost: it was written all the same.
            server.write(OFFSET, b"7-20")
            await one.claim()
            assert await one.group.claim(P1, deadline_s=in_s())
            assert await case.commit(30, (P0, P1)) == {}
            assert await case.commit(40, (P0, P1)) == {}
            assert server.nodes[OFFSET].data == server.nodes[OFFSET_1].data == b"7-40"

    run_virtually(scenario())


def test_all_partitions_go_in_one_request_after_the_first_commit() -> None:
    """The member's node, each owner node as claimed, each offset in its place."""

    async def scenario() -> None:
        server = MeddledZooKeeper()
        async with owner_on(server) as one, owner_on(server, "c2") as two:
            case = Case(server, one, two)
            await case.begin((P0, P1))
            asked: list[Any] = []

            async def note(operations: Any) -> None:
                asked.extend(operations)

            server.before["transact"] = note
            server.calls.clear()
            assert await case.commit(20, (P0, P1)) == {}
            assert server.calls == [("transact", MEMBER)]
            assert asked == [
                CheckNode(MEMBER, None),
                CheckNode(OWNER, 0),
                WriteNode(OFFSET, b"7-20", 0),
                CheckNode(OWNER_1, 0),
                WriteNode(OFFSET_1, b"7-20", 0),
            ]
            asked.clear()
            assert await case.commit(30, (P1,)) == {}
            assert asked[2] == WriteNode(OFFSET_1, b"7-30", 1)

    run_virtually(scenario())


def test_one_lost_partition_does_not_fail_the_others() -> None:
    """The others are written by themselves, and together again the next time."""

    async def scenario() -> None:
        server = MeddledZooKeeper()
        async with owner_on(server) as one, owner_on(server, "c2") as two:
            case = Case(server, one, two)
            await case.begin((P0, P1))
            await case.release()
            for offset in (20, 30):
                failed = await case.commit(offset, (P0, P1))
                assert failed.keys() == {P0}
                assert isinstance(failed[P0], OwnershipLostError)
                assert server.nodes[OFFSET].data == b"7-10"
                assert server.nodes[OFFSET_1].data == b"7-%d" % offset
            server.calls.clear()
            assert await case.commit(40, (P1,)) == {}
            assert server.calls == [("transact", MEMBER)]

    run_virtually(scenario())


def test_another_fence_begins_with_a_look_at_the_owner() -> None:
    """The next session uses nothing that one remembers."""

    async def scenario() -> None:
        server = MeddledZooKeeper()
        async with owner_on(server) as one, owner_on(server, "c2") as two:
            case = Case(server, one, two)
            await case.begin()
            await case.expire()
            await one.claim()
            server.calls.clear()
            assert await case.commit(20) == {}
            names = [name for name, _path in server.calls]
            assert names == ["get", "get", "replace"]

    run_virtually(scenario())


def test_a_request_has_a_bounded_number_of_partitions() -> None:
    """ZooKeeper ends the session of a request that is too long."""

    async def scenario() -> None:
        server = MeddledZooKeeper()
        async with owner_on(server) as one, owner_on(server, "c2") as two:
            case = Case(server, one, two)
            many = tuple(
                TopicPartition("test", BrokerId(0), number)
                for number in range(2 * TOGETHER_MAX + 1)
            )
            await case.begin(many)
            server.calls.clear()
            assert await case.commit(20, many) == {}
            assert server.calls == [("transact", MEMBER)] * 3
            stored = {server.nodes[PATHS.group_offset("g", one)].data for one in many}
            assert stored == {b"7-20"}

    run_virtually(scenario())


class FarZooKeeper:
    """A coordinator whose transactions take a second; counts those under way."""

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator
        self.now = self.most = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coordinator, name)

    async def transact(self, *args: Any, **keywords: Any) -> Any:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(1)
        self.now -= 1
        return await self._coordinator.transact(*args, **keywords)


def test_the_requests_of_a_commit_are_made_at_once() -> None:
    """A commit of many partitions takes as long as one of them needs."""

    async def scenario() -> None:
        server = MeddledZooKeeper()
        async with owner_on(server) as one, owner_on(server, "c2") as two:
            case, far = Case(server, one, two), FarZooKeeper(one.coordinator)
            case.store = ZooKeeperOffsets(cast("Any", far), PATHS)
            many = tuple(
                TopicPartition("test", BrokerId(0), number)
                for number in range(2 * TOGETHER_MAX + 1)
            )
            await case.begin(many)
            assert await case.commit(20, many) == {}
            assert far.most == 3

    run_virtually(scenario())
