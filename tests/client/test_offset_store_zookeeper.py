"""Offsets in ZooKeeper as the store of a consumer; the fence is the group's."""

import asyncio
from typing import Any

from metaq.client.group.assignments import Fence
from metaq.client.offsets.committer import Committer
from metaq.client.offsets.offset_reset import NO_MESSAGE
from metaq.client.offsets.offset_store import ZooKeeperOffsets
from metaq.errors import OwnershipLostError
from metaq.model import GroupOffset, MessageId, Offset
from metaq.testing.zk import MemoryZooKeeper
from tests.client.group_members import (
    CLOCK,
    GROUP,
    PATHS,
    Member,
    owner_path,
    part,
    serve,
)
from tests.rigs.virtual_time import run_virtually
from tests.rigs.waiting import until

AT_10 = GroupOffset(Offset(10), MessageId(7))


def in_s(seconds: float = 5.0) -> float:
    return CLOCK.monotonic_s() + seconds


def test_an_owner_commits_what_metaq_would_read() -> None:
    """`id-offset`, and -1 for no message; the others are refused and not changed."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        serve(server, 2)
        one = await Member(server).join()
        store = ZooKeeperOffsets(one.coordinator, PATHS)
        assert await store.load(GROUP, part(0), deadline_s=in_s()) is None
        begun = GroupOffset(Offset(5), NO_MESSAGE)
        offsets = {part(0): AT_10, part(1): begun, part(2): AT_10}
        failed = await store.commit(
            GROUP, offsets, fence=one.source.fence, deadline_s=in_s()
        )
        assert failed.keys() == {part(2)}
        assert isinstance(failed[part(2)], OwnershipLostError)
        assert server.nodes[PATHS.group_offset(GROUP, part(0))].data == b"7-10"
        assert server.nodes[PATHS.group_offset(GROUP, part(1))].data == b"-1-5"
        assert PATHS.group_offset(GROUP, part(2)) not in server.nodes
        assert await store.load(GROUP, part(0), deadline_s=in_s()) == AT_10
        assert await store.load(GROUP, part(1), deadline_s=in_s()) == begun
        await store.close()
        await one.leave()

    run_virtually(scenario())


def test_who_lost_the_session_commits_nothing() -> None:
    """Neither under the old one, nor, before it has claimed again, the new one."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        serve(server, 1)
        one = await Member(server).join()
        store = ZooKeeperOffsets(one.coordinator, PATHS)
        old = one.source.fence
        server.expire(one.coordinator)
        await until(lambda: one.coordinator.status.session_version == 2)
        server.put(owner_path(part(0)), b"g_c2", session_id=77)
        for fence in (old, Fence(old.member, 2)):
            failed = await store.commit(
                GROUP, {part(0): AT_10}, fence=fence, deadline_s=in_s()
            )
            assert isinstance(failed[part(0)], OwnershipLostError)
        assert PATHS.group_offset(GROUP, part(0)) not in server.nodes
        await one.leave()

    run_virtually(scenario())


def test_without_a_group_there_is_no_fence() -> None:
    """A reader of fixed partitions stores offsets as a tool does."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        coordinator = server.coordinator(CLOCK)
        coordinator.start()
        store = ZooKeeperOffsets(coordinator, PATHS)
        await until(lambda: coordinator.status.session_version)
        offsets = {part(0): AT_10}
        assert not await store.commit(GROUP, offsets, fence=None, deadline_s=in_s())
        assert await store.load(GROUP, part(0), deadline_s=in_s()) == AT_10
        await coordinator.stop(deadline_s=in_s())

    run_virtually(scenario())


def test_what_waits_for_another_commit_keeps_its_fence() -> None:
    """Messages handled under one session are not committed under the next."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        serve(server, 1)
        one = await Member(server).join()
        may_end = asyncio.Event()

        class Slow(ZooKeeperOffsets):
            async def commit(self, *words: Any, **named: Any) -> Any:
                if not may_end.is_set():
                    await may_end.wait()
                    return {}
                return await super().commit(*words, **named)

        committer = Committer(
            Slow(one.coordinator, PATHS),
            group=GROUP,
            clock=CLOCK,
            timeout_s=5.0,
            fence=lambda: one.source.fence,
        )
        committer.admit(part(0))
        at_5 = GroupOffset(Offset(5), NO_MESSAGE)
        earlier = asyncio.create_task(committer.commit({part(0): at_5}))
        await asyncio.sleep(0)
        commit = asyncio.create_task(committer.commit({part(0): AT_10}))
        await asyncio.sleep(0)
        server.expire(one.coordinator)
        await until(lambda: one.is_settled and one.source.fence.session_version == 2)
        may_end.set()
        assert await earlier == {}
        failed = await commit
        assert isinstance(failed[part(0)], OwnershipLostError)
        await one.leave()

    run_virtually(scenario())
