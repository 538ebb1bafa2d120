"""Group offsets on an in-memory ZooKeeper: what is stored, and who may store."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from metaq.errors import OwnershipLostError, SessionSuspendedError
from metaq.model import BrokerId, GroupOffset, MessageId, Offset, TopicPartition
from metaq.testing.zk import MemoryCoordinator, MemoryZooKeeper
from metaq.zk.errors import CoordinationTimeoutError, NodeChangedError, PayloadError
from metaq.zk.groups import GroupMembership
from metaq.zk.offsets import GroupOffsets
from metaq.zk.paths import NodePaths
from tests.rigs.virtual_time import VirtualClock, run_virtually
from tests.zk.meddling import MeddledZooKeeper

CLOCK = VirtualClock()
PATHS = NodePaths()
P0 = TopicPartition("test", BrokerId(0), 0)
OFFSET = "/meta/consumers/g/offsets/test/0-0"
OWNER = "/meta/consumers/g/owners/test/0-0"


def in_s(seconds: float = 5.0) -> float:
    return CLOCK.monotonic_s() + seconds


def at(offset: int, message_id: int | None = 7) -> GroupOffset:
    number = None if message_id is None else MessageId(message_id)
    return GroupOffset(Offset(offset), number)


class Owner:
    """A member that owns the partition, and commits for it."""

    def __init__(self, coordinator: MemoryCoordinator, consumer_id: str) -> None:
        self.coordinator = coordinator
        self.group = GroupMembership(
            coordinator, PATHS, group="g", consumer_id=consumer_id
        )
        self.offsets = GroupOffsets(coordinator, PATHS, group="g")
        self.session_version = 0

    async def claim(self) -> None:
        self.session_version = await self.group.register(["test"], deadline_s=in_s())
        assert await self.group.claim(P0, deadline_s=in_s())

    async def commit(self, offset: int) -> None:
        await self.offsets.commit_offset(
            P0,
            at(offset),
            member=self.group.member,
            session_version=self.session_version,
            deadline_s=in_s(),
        )


@asynccontextmanager
async def owner_on(
    server: MemoryZooKeeper, consumer_id: str = "c1"
) -> AsyncIterator[Owner]:
    coordinator = server.coordinator(CLOCK)
    coordinator.start()
    await asyncio.sleep(0)
    yield Owner(coordinator, consumer_id)
    await coordinator.stop(deadline_s=in_s())


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"7-100", at(100)),
        (b"-1-100", at(100, -1)),
        (b"-5468920727941939200-108", at(108, -5468920727941939200)),
        (b"100", at(100, None)),
    ],
)
def test_offsets_of_every_writer_are_read(data: bytes, expected: GroupOffset) -> None:
    """The last dash parts id and offset; old writers leave a bare offset."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with owner_on(server) as one:
            assert await one.offsets.read_offset(P0, deadline_s=in_s()) is None
            server.put(OFFSET, data)
            assert await one.offsets.read_offset(P0, deadline_s=in_s()) == expected

    run_virtually(scenario())


def test_an_unreadable_offset_is_an_error() -> None:
    """Beginning somewhere else would lose or repeat messages without a word."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        server.put(OFFSET, b"nonsense")
        async with owner_on(server) as one:
            with pytest.raises(PayloadError, match="nonsense"):
                await one.offsets.read_offset(P0, deadline_s=in_s())

    run_virtually(scenario())


def test_the_owner_commits_again_and_again() -> None:
    """The first commit creates the node, later ones write it in place."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with owner_on(server) as one:
            await one.claim()
            for offset in (10, 20, 30):
                await one.commit(offset)
                assert server.nodes[OFFSET].data == b"7-%d" % offset
            assert server.nodes[OFFSET].version == 2
            assert not server.nodes[OFFSET].owner_session_id

    run_virtually(scenario())


def test_nobody_but_the_owner_commits() -> None:
    """Without a claim, after a release, and for another's partition there is none."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with owner_on(server) as one, owner_on(server, "c2") as two:
            two.session_version = await two.group.register(["test"], deadline_s=in_s())
            with pytest.raises(OwnershipLostError, match="g_c2, got none"):
                await two.commit(5)
            await one.claim()
            with pytest.raises(OwnershipLostError, match=r"g_c2 .* got g_c1"):
                await two.commit(5)
            await one.group.release(P0, deadline_s=in_s())
            with pytest.raises(OwnershipLostError, match=r"test/0-0.*g_c1"):
                await one.commit(5)
            assert OFFSET not in server.nodes

    run_virtually(scenario())


def test_a_claim_is_good_for_its_session_alone() -> None:
    """After an expiry nothing is committed, even where our own name still stands."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with owner_on(server) as one:
            await one.claim()
            old = one.coordinator.status.session_id
            server.suspend(one.coordinator)
            with pytest.raises(SessionSuspendedError):
                await one.commit(5)
            server.resume(one.coordinator)
            await one.commit(5)
            server.expire(one.coordinator)
            with pytest.raises(OwnershipLostError, match="lost"):
                await one.commit(6)
            server.put(OWNER, b"g_c1", session_id=old)
            await asyncio.sleep(0.1)
            with pytest.raises(OwnershipLostError, match="version 1, now it is 2"):
                await one.commit(6)
            one.session_version = 2
            with pytest.raises(OwnershipLostError, match="of session"):
                await one.commit(6)
            assert server.nodes[OFFSET].data == b"7-5"

    run_virtually(scenario())


def test_a_late_commit_does_not_throw_the_next_owner_back() -> None:
    """The partition changes hands between the look at the owner and the write."""

    async def scenario() -> None:
        server = MeddledZooKeeper()
        async with owner_on(server) as one, owner_on(server, "c2") as two:
            await one.claim()
            await one.commit(10)

            async def change_hands(path: str) -> None:
                if path == OWNER:
                    server.after.clear()
                    await one.group.release(P0, deadline_s=in_s())
                    await two.claim()
                    await two.commit(500)

            server.after["get"] = change_hands
            with pytest.raises(OwnershipLostError, match=r"g_c1 .* got g_c2"):
                await one.commit(20)
            assert server.nodes[OFFSET].data == b"7-500"

    run_virtually(scenario())


def test_a_commit_does_not_outlive_its_session() -> None:
    """The session ends between the look at the owner and the write."""

    async def scenario() -> None:
        server = MeddledZooKeeper()
        async with owner_on(server) as one:
            await one.claim()
            await one.commit(10)

            async def end_session(path: str) -> None:
                if path == OWNER:
                    server.expire(one.coordinator)
                    await asyncio.sleep(0.1)

            server.after["get"] = end_session
            with pytest.raises(OwnershipLostError, match="version 1, now it is 2"):
                await one.commit(20)
            assert server.nodes[OFFSET].data == b"7-10"

    run_virtually(scenario())


def test_two_consumers_of_one_process_are_two_owners() -> None:
    """The session is the same; the name is not."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with owner_on(server) as one:
            two = Owner(one.coordinator, "c2")
            await one.claim()
            two.session_version = await two.group.register(["test"], deadline_s=in_s())
            with pytest.raises(OwnershipLostError, match=r"g_c2 .* got g_c1"):
                await two.commit(5)

    run_virtually(scenario())


def test_an_owner_prevails_over_a_tool_but_not_for_ever() -> None:
    """A write in between is overwritten; one in every between is an error."""

    async def scenario() -> None:
        server = MeddledZooKeeper()
        async with owner_on(server) as one:
            await one.claim()
            meddlings = 1

            async def meddle(path: str) -> None:
                nonlocal meddlings
                if meddlings:
                    meddlings -= 1
                    server.write(path, b"0")

            server.before["replace"] = meddle
            await one.commit(10)
            assert server.nodes[OFFSET].data == b"7-10"
            meddlings = 100
            with pytest.raises(NodeChangedError, match="g_c1"):
                await one.commit(20)

    run_virtually(scenario())


def test_a_commit_without_an_answer_can_be_repeated() -> None:
    """Whether or not it was stored, the next one is right."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with owner_on(server) as one:
            await one.claim()
            server.stall = True
            with pytest.raises(CoordinationTimeoutError):
                await one.commit(10)
            server.stall = False
            server.write(OFFSET, b"7-10")
            await one.commit(10)
            await one.commit(20)
            assert server.nodes[OFFSET].data == b"7-20"

    run_virtually(scenario())


def test_tools_set_and_list_offsets() -> None:
    """Without ownership; names that are no partitions are passed over."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with owner_on(server) as one:
            offsets = one.offsets
            assert await offsets.topics(deadline_s=in_s()) == ()
            assert await offsets.partitions("b", deadline_s=in_s()) == ()
            stored = [
                TopicPartition("b", BrokerId(broker), number)
                for broker, number in ((0, 2), (0, 10), (1, 0))
            ]
            for partition in reversed(stored):
                await offsets.set_offset(partition, at(1, None), deadline_s=in_s())
            await offsets.set_offset(stored[0], at(2), deadline_s=in_s())
            server.put("/meta/consumers/g/offsets/a", b"")
            server.put("/meta/consumers/g/offsets/b/nonsense", b"")
            assert await offsets.topics(deadline_s=in_s()) == ("a", "b")
            found = await offsets.partitions("b", deadline_s=in_s())
            assert found == tuple(stored)
            assert await offsets.read_offset(stored[0], deadline_s=in_s()) == at(2)

    run_virtually(scenario())
