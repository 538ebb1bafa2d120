"""Membership when sessions end and requests fail."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from metaq.errors import SessionLostError, SessionSuspendedError
from metaq.testing.zk import MemoryCoordinator, MemoryZooKeeper
from metaq.zk.errors import CoordinationTimeoutError, NodeChangedError
from metaq.zk.groups import GroupMembership
from metaq.zk.offsets import GroupOffsets
from metaq.zk.znodes import decode_group_offset
from tests.rigs.virtual_time import run_virtually
from tests.zk.meddling import MeddledZooKeeper
from tests.zk.membership import (
    MEMBER,
    OWNER,
    P0,
    P1,
    PATHS,
    connect,
    in_s,
    member_on,
    settle,
)


def test_claims_end_with_the_session_and_survive_a_suspension() -> None:
    """Suspended is not lost; a new session owns nothing and registers first."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with member_on(server) as (one, coordinator):
            await one.register(["test"], deadline_s=in_s())
            assert await one.claim(P0, deadline_s=in_s())
            server.suspend(coordinator)
            assert one.claims == {P0}
            with pytest.raises(SessionSuspendedError):
                await one.claim(P1, deadline_s=in_s())
            server.resume(coordinator)
            assert one.claims == {P0}
            server.expire(coordinator)
            assert one.claims == frozenset()
            await settle()
            assert one.claims == frozenset()
            assert one.claims_of_session_version(1) == {P0}
            with pytest.raises(SessionLostError, match="version 2, got 1"):
                await one.claim(P0, deadline_s=in_s())

    run_virtually(scenario())


@pytest.mark.parametrize("call", ["create", "get"])
def test_a_session_that_ends_under_a_claim_gives_nothing(call: str) -> None:
    """A claim begun under one session never counts under the next."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with member_on(server) as (one, coordinator):
            await one.register(["test"], deadline_s=in_s())
            if call == "get":
                server.put(OWNER, b"g_c1", session_id=coordinator.status.session_id)
            claiming = asyncio.ensure_future(one.claim(P0, deadline_s=in_s()))
            await asyncio.sleep(0)
            server.expire(coordinator)
            with pytest.raises((SessionLostError, SessionSuspendedError)):
                await claiming
            assert one.unanswered_claims == {P0}
            assert one.claims_of_session_version(2) == frozenset()

    run_virtually(scenario())


@pytest.mark.parametrize("call", ["register", "claim", "release", "unregister"])
def test_an_answer_of_the_last_session_is_not_acted_upon(
    call: str,
) -> None:
    """The session ends between the look at a node and what would follow from it."""

    async def scenario() -> None:
        server = MeddledZooKeeper()
        async with member_on(server) as (one, coordinator):
            await one.register(["test"], deadline_s=in_s())
            await one.claim(P0, deadline_s=in_s())

            async def end_session(path: str) -> None:
                server.after.clear()
                server.expire(coordinator)
                await settle()
                server.put(path, b"g_c1", session_id=coordinator.status.session_id)

            server.after["get"] = end_session
            calls: dict[str, Callable[[], Awaitable[object]]] = {
                "register": lambda: one.register(["test"], deadline_s=in_s()),
                "claim": lambda: one.claim(P0, deadline_s=in_s()),
                "release": lambda: one.release(P0, deadline_s=in_s()),
                "unregister": lambda: one.unregister(deadline_s=in_s()),
            }
            with pytest.raises(SessionLostError, match="version 1, got 2"):
                await calls[call]()
            path = OWNER if call in {"claim", "release"} else MEMBER
            assert path in server.nodes
            assert one.claims == frozenset()

    run_virtually(scenario())


def test_a_claim_that_another_member_makes_in_our_old_one_s_place_stays() -> None:
    """Our old session ends between our look at its node and what would follow."""

    async def scenario() -> None:
        server = MeddledZooKeeper()
        async with member_on(server) as (one, coordinator):
            await one.register(["test"], deadline_s=in_s())
            await one.claim(P0, deadline_s=in_s())
            old, new = coordinator.status.session_id, server.begin_session()
            server.expire(coordinator)
            await settle()
            await one.register(["test"], deadline_s=in_s())
            server.put(OWNER, b"g_c1", session_id=old)

            async def hand_over(path: str) -> None:
                server.after.clear()
                server.reap(old)
                server.put(path, b"g_c2", session_id=new)

            server.after["get"] = hand_over
            assert not await one.claim(P0, deadline_s=in_s())
            assert server.nodes[OWNER].data == b"g_c2"
            assert not await one.claim(P0, deadline_s=in_s())

    run_virtually(scenario())


def test_a_claim_without_an_answer_can_be_repeated_or_released() -> None:
    """The node may be there; both ways to go on are right."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with member_on(server) as (one, coordinator):
            await one.register(["test"], deadline_s=in_s())
            server.stall = True
            with pytest.raises(CoordinationTimeoutError):
                await one.claim(P0, deadline_s=in_s())
            server.stall = False
            server.put(OWNER, b"g_c1", session_id=coordinator.status.session_id)
            assert one.claims == frozenset()
            assert one.unanswered_claims == {P0}
            assert await one.release(P0, deadline_s=in_s())
            assert one.unanswered_claims == frozenset()
            server.put(OWNER, b"g_c1", session_id=coordinator.status.session_id)
            assert await one.claim(P0, deadline_s=in_s())
            assert one.claims == {P0}
            assert one.unanswered_claims == frozenset()

    run_virtually(scenario())


def test_a_node_that_flickers_is_not_fought_over_for_ever() -> None:
    """A client that creates and deletes it each time is named in an error."""

    async def scenario() -> None:
        server = MeddledZooKeeper()
        async with member_on(server) as (one, _coordinator):
            await one.register(["test"], deadline_s=in_s())

            async def delete(path: str) -> None:
                server.remove(path)

            async def create(path: str) -> None:
                server.put(path, b"g_c2", session_id=0x77)

            await create(OWNER)
            server.before["get"], server.after["get"] = delete, create
            with pytest.raises(NodeChangedError, match="0-0"):
                await one.claim(P0, deadline_s=in_s())

    run_virtually(scenario())


class FlakyCoordinator:
    """Fails one request: before it is carried out, or by losing its answer."""

    def __init__(self, inner: MemoryCoordinator, failing: int, *, is_lost: bool):
        self._inner = inner
        self._left = failing
        self._is_lost = is_lost

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._inner, name)
        if name not in {"get", "create_ephemeral", "replace", "delete", "children"}:
            return real

        async def request(*args: Any, **kwargs: Any) -> Any:
            self._left -= 1
            if self._left == 0 and not self._is_lost:
                raise SessionSuspendedError("connection lost before the request")
            answer = await real(*args, **kwargs)
            if self._left == 0:
                raise CoordinationTimeoutError("connection lost before the answer")
            return answer

        return request


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("failing", range(1, 14))
def test_every_request_may_fail_once(failing: int, *, is_lost: bool) -> None:
    """The same call again is right, whatever became of the first one."""

    async def again(call: Callable[[], Awaitable[Any]]) -> Any:
        try:
            return await call()
        except (SessionSuspendedError, CoordinationTimeoutError):
            return await call()

    async def scenario() -> None:
        server = MemoryZooKeeper()
        real = await connect(server)
        flaky: Any = FlakyCoordinator(real, failing, is_lost=is_lost)
        one = GroupMembership(flaky, PATHS, group="g", consumer_id="c1")
        store = GroupOffsets(flaky, PATHS, group="g")
        session_version = await again(lambda: one.register(["a"], deadline_s=in_s()))
        await again(lambda: one.register(["a", "test"], deadline_s=in_s()))
        assert server.nodes[MEMBER].data == b"a,test"
        assert await again(lambda: one.claim(P0, deadline_s=in_s()))
        assert server.nodes[OWNER].data == b"g_c1"
        assert one.claims == {P0}
        await again(
            lambda: store.commit_offset(
                P0,
                decode_group_offset(b"7-10"),
                member="g_c1",
                session_version=session_version,
                deadline_s=in_s(),
            )
        )
        assert server.nodes["/meta/consumers/g/offsets/test/0-0"].data == b"7-10"
        await again(lambda: one.release(P0, deadline_s=in_s()))
        assert one.claims == frozenset()
        await again(lambda: one.unregister(deadline_s=in_s()))
        assert not {MEMBER, OWNER} & server.nodes.keys()
        await real.stop(deadline_s=in_s())

    run_virtually(scenario())
