"""Membership and ownership on an in-memory ZooKeeper, in virtual time."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from metaq.errors import SessionLostError, SessionSuspendedError
from metaq.model import BrokerId, TopicPartition
from metaq.testing.zk import MemoryCoordinator, MemoryZooKeeper
from metaq.zk.errors import (
    CoordinationTimeoutError,
    MemberTakenError,
    NodeChangedError,
)
from metaq.zk.groups import (
    GroupMembership,
    Members,
    list_groups,
    member_name,
    read_members,
    read_owners,
)
from metaq.zk.offsets import GroupOffsets
from metaq.zk.paths import NodePaths
from metaq.zk.znodes import decode_group_offset
from tests.zk.virtual import VirtualClock, run_virtually

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "vectors.json").read_text()
)["zookeeper"]
CLOCK = VirtualClock()
PATHS = NodePaths()
P0 = TopicPartition("test", BrokerId(0), 0)
P1 = TopicPartition("test", BrokerId(0), 1)
MEMBER = "/meta/consumers/g/ids/g_c1"
OWNER = "/meta/consumers/g/owners/test/0-0"


def in_s(seconds: float = 5.0) -> float:
    return CLOCK.monotonic_s() + seconds


async def settle() -> None:
    await asyncio.sleep(0.1)


async def connect(server: MemoryZooKeeper) -> MemoryCoordinator:
    coordinator = server.coordinator(CLOCK)
    coordinator.start()
    await asyncio.sleep(0)
    return coordinator


@asynccontextmanager
async def member_on(
    server: MemoryZooKeeper, consumer_id: str = "c1", *, group: str = "g"
) -> AsyncIterator[tuple[GroupMembership, MemoryCoordinator]]:
    coordinator = await connect(server)
    yield (
        GroupMembership(coordinator, PATHS, group=group, consumer_id=consumer_id),
        coordinator,
    )
    await coordinator.stop(deadline_s=in_s())


def test_members_owners_and_offsets_are_the_nodes_of_metaq() -> None:
    """Joining, claiming and committing leave what MetaQ's consumer left, byte by byte.

    Leaving takes away what it took away.
    """

    def recorded(tree: str) -> dict[str, tuple[str, bool]]:
        return {
            node["path"]: (node["data"], node["ephemeral"])
            for node in GOLDEN[tree]
            if "/consumers" in node["path"] and "golden-latest" not in node["path"]
        }

    def written(server: MemoryZooKeeper) -> dict[str, tuple[str, bool]]:
        return {
            path: (node.data.decode(), node.is_ephemeral)
            for path, node in server.tree().items()
            if "/consumers" in path
        }

    running = recorded("java_consumer_running")
    [name] = [path for path in running if "/ids/" in path]
    consumer_id = name.rpartition("/")[2].removeprefix("golden-group_")
    offsets = {
        P0: running["/meta/consumers/golden-group/offsets/test/0-0"][0],
        P1: running["/meta/consumers/golden-group/offsets/test/0-1"][0],
    }

    async def scenario() -> None:
        server = MemoryZooKeeper()
        joining = member_on(server, consumer_id, group="golden-group")
        async with joining as (member, coordinator):
            store = GroupOffsets(coordinator, PATHS, group="golden-group")
            epoch = await member.register(["test"], deadline_s=in_s())
            for partition, text in offsets.items():
                assert await member.claim(partition, deadline_s=in_s())
                await store.commit_offset(
                    partition,
                    decode_group_offset(text.encode()),
                    member=member.member,
                    epoch=epoch,
                    deadline_s=in_s(),
                )
            assert written(server) == running
            for partition in offsets:
                assert await member.release(partition, deadline_s=in_s())
            await member.unregister(deadline_s=in_s())
            assert written(server).keys() == recorded("java_consumer_shutdown").keys()

    run_virtually(scenario())


def test_members_are_read_with_their_topics() -> None:
    """Names ascending, topics sorted when we write and kept when we read."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with member_on(server, "c2") as (two, _), member_on(server) as (one, _):
            assert await one.members(deadline_s=in_s()) == {}
            await two.register(["b", "a", "b"], deadline_s=in_s())
            await one.register(["a"], deadline_s=in_s())
            server.put("/meta/consumers/g/ids/g_java", b"z,a, b", session_id=77)
            members = await one.members(deadline_s=in_s())
            assert dict(members) == {
                "g_c1": ("a",),
                "g_c2": ("a", "b"),
                "g_java": ("z", "a", "b"),
            }
            assert list(members) == sorted(members)
            assert one.member == member_name("g", "c1")
            assert one.group == "g"

    run_virtually(scenario())


def test_a_member_that_nobody_can_read_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It takes no part, and the others do not stop because of it."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        server.put("/meta/consumers/g/ids/g_bad", b"\xff")
        server.put("/meta/consumers/g/ids/g_good", b"a")
        async with member_on(server) as (one, _):
            assert dict(await one.members(deadline_s=in_s())) == {"g_good": ("a",)}

    run_virtually(scenario())
    assert "g_bad" in caplog.text


def test_registering_again_is_right() -> None:
    """The same topics leave the node alone; other topics make a new node."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with member_on(server) as (one, _):
            assert await one.register(["a"], deadline_s=in_s()) == 1
            assert await one.register(["a"], deadline_s=in_s()) == 1
            assert ("delete", MEMBER) not in server.calls
            assert await one.register(["a", "b"], deadline_s=in_s()) == 1
            assert ("delete", MEMBER) in server.calls
            assert server.nodes[MEMBER].data == b"a,b"
            assert server.nodes[MEMBER].is_ephemeral

    run_virtually(scenario())


@pytest.mark.parametrize("data", [b"a", b"other"])
def test_a_name_that_is_taken_is_refused_until_its_session_ends(data: bytes) -> None:
    """The message names both; a dead process' node goes, and then there is room."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        server.put(MEMBER, data, session_id=0x77)
        async with member_on(server) as (one, _):
            with pytest.raises(MemberTakenError, match=r"'a'.*0x77") as caught:
                await one.register(["a"], deadline_s=in_s())
            assert data.decode() in str(caught.value)
            assert caught.value.retriable
            assert server.nodes[MEMBER].owner_session_id == 0x77
            with pytest.raises(SessionLostError, match="g_c1"):
                await one.claim(P0, deadline_s=in_s())
            server.reap(0x77)
            await one.register(["a"], deadline_s=in_s())

    run_virtually(scenario())


def test_nodes_of_our_last_session_are_taken_over() -> None:
    """They would vanish later, under a member that believes in them."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with member_on(server) as (one, coordinator):
            await one.register(["a"], deadline_s=in_s())
            assert await one.claim(P0, deadline_s=in_s())
            left = {path: server.nodes[path] for path in (MEMBER, OWNER)}
            old = coordinator.status.session_id
            server.expire(coordinator)
            assert one.claims == frozenset()
            # The server still believes in the old session.
            for path, node in left.items():
                server.put(path, node.data, session_id=old)
            await settle()
            assert await one.register(["a"], deadline_s=in_s()) == 2
            assert await one.claim(P0, deadline_s=in_s())
            server.reap(old)
            for path in left:
                assert (
                    server.nodes[path].owner_session_id == coordinator.status.session_id
                )
            assert one.claims == {P0}

    run_virtually(scenario())


def test_a_session_is_left_only_with_what_belongs_to_it() -> None:
    """Unregister and release leave the nodes of others alone."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with member_on(server) as (one, _):
            await one.unregister(deadline_s=in_s())
            await one.register(["a"], deadline_s=in_s())
            assert await one.claim(P0, deadline_s=in_s())
            for path, data in ((MEMBER, b"a"), (OWNER, b"g_c1")):
                server.put(path, data, session_id=0x77)
            assert not await one.release(P0, deadline_s=in_s())
            await one.unregister(deadline_s=in_s())
            assert {MEMBER, OWNER} <= server.nodes.keys()
            assert one.claims == frozenset()
            server.put(OWNER, b"g_c2", session_id=server.begin_session())
            assert not await one.release(P0, deadline_s=in_s())
            assert OWNER in server.nodes

    run_virtually(scenario())


def test_one_owner_at_a_time() -> None:
    """The second claim fails until the first owner releases, or its session ends."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        first, second = member_on(server, "c1"), member_on(server, "c2")
        async with first as (one, coordinator), second as (two, _):
            await one.register(["test"], deadline_s=in_s())
            await two.register(["test"], deadline_s=in_s())
            assert await one.claim(P0, deadline_s=in_s())
            assert await one.claim(P0, deadline_s=in_s()), "ours already"
            assert await one.claim(P1, deadline_s=in_s())
            assert not await two.claim(P0, deadline_s=in_s())
            assert one.claims == {P0, P1}
            assert two.claims == frozenset()
            owners = await two.owners("test", deadline_s=in_s())
            assert dict(owners) == {P0: "g_c1", P1: "g_c1"}
            assert await one.release(P0, deadline_s=in_s())
            assert not await one.release(P0, deadline_s=in_s()), "gone already"
            assert await two.claim(P0, deadline_s=in_s())
            server.abandon(coordinator)
            assert not await two.claim(P1, deadline_s=in_s())
            server.reap(coordinator.status.session_id)
            assert await two.claim(P1, deadline_s=in_s())
            assert two.claims_of_epoch(1) == {P0, P1}
            assert two.claims_of_epoch(2) == frozenset()

    run_virtually(scenario())


def test_two_consumers_of_one_process_are_two_members() -> None:
    """They share a session, and still nobody takes or gives what is the other's."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with member_on(server) as (one, coordinator):
            two = GroupMembership(coordinator, PATHS, group="g", consumer_id="c2")
            twin = GroupMembership(coordinator, PATHS, group="g", consumer_id="c1")
            await one.register(["test"], deadline_s=in_s())
            await two.register(["test"], deadline_s=in_s())
            with pytest.raises(MemberTakenError, match=r"'other'.*'test'"):
                await twin.register(["other"], deadline_s=in_s())
            await twin.unregister(deadline_s=in_s())
            assert MEMBER in server.nodes
            assert await one.claim(P0, deadline_s=in_s())
            assert not await two.claim(P0, deadline_s=in_s())
            assert not await two.release(P0, deadline_s=in_s())
            assert server.nodes[OWNER].data == b"g_c1"

    run_virtually(scenario())


def test_who_has_left_claims_nothing() -> None:
    """An owner that is no member would keep the partition from the members."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with member_on(server) as (one, _):
            await one.register(["test"], deadline_s=in_s())
            await one.unregister(deadline_s=in_s())
            with pytest.raises(SessionLostError, match="epoch 1, got 0"):
                await one.claim(P0, deadline_s=in_s())
            assert OWNER not in server.nodes

    run_virtually(scenario())


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
            assert one.claims_of_epoch(1) == {P0}
            with pytest.raises(SessionLostError, match="epoch 2, got 1"):
                await one.claim(P0, deadline_s=in_s())

    run_virtually(scenario())


@pytest.mark.parametrize("call", ["create", "get"])
def test_a_session_that_ends_under_a_claim_gives_nothing(call: str) -> None:
    """What was begun under one session never counts under the next."""

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
            assert one.claims_of_epoch(2) == frozenset()

    run_virtually(scenario())


@pytest.mark.parametrize("call", ["register", "claim", "release", "unregister"])
def test_an_answer_of_the_last_session_is_not_acted_upon(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session ends between the look at a node and what would follow from it."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with member_on(server) as (one, coordinator):
            await one.register(["test"], deadline_s=in_s())
            await one.claim(P0, deadline_s=in_s())
            real = coordinator.get

            async def get(path: str, *, deadline_s: float) -> object:
                node = await real(path, deadline_s=deadline_s)
                monkeypatch.undo()
                server.expire(coordinator)
                await settle()
                server.put(path, b"g_c1", session_id=coordinator.status.session_id)
                return node

            monkeypatch.setattr(coordinator, "get", get)
            calls: dict[str, Callable[[], Awaitable[object]]] = {
                "register": lambda: one.register(["test"], deadline_s=in_s()),
                "claim": lambda: one.claim(P0, deadline_s=in_s()),
                "release": lambda: one.release(P0, deadline_s=in_s()),
                "unregister": lambda: one.unregister(deadline_s=in_s()),
            }
            with pytest.raises(SessionLostError, match="epoch 1, got 2"):
                await calls[call]()
            path = OWNER if call in {"claim", "release"} else MEMBER
            assert path in server.nodes
            assert one.claims == frozenset()

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


def test_a_node_that_flickers_is_not_fought_over_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Somebody who creates and deletes it each time is named in an error."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with member_on(server) as (one, coordinator):
            await one.register(["test"], deadline_s=in_s())
            real_get = coordinator.get

            async def get(path: str, *, deadline_s: float) -> object:
                server.remove(path)
                node = await real_get(path, deadline_s=deadline_s)
                server.put(path, b"g_c2", session_id=0x77)
                return node

            server.put(OWNER, b"g_c2", session_id=0x77)
            monkeypatch.setattr(coordinator, "get", get)
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
        epoch = await again(lambda: one.register(["a"], deadline_s=in_s()))
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
                epoch=epoch,
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


def test_members_are_watched_by_name_and_by_topics() -> None:
    """Comers, goers and changed topics are told; a burst is told once."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with member_on(server) as (one, coordinator):
            seen: list[Members] = []
            cancel = one.watch_members(lambda members: seen.append(dict(members)))
            await settle()
            assert seen == [{}]
            await one.register(["a"], deadline_s=in_s())
            server.put("/meta/consumers/g/ids/g_c2", b"a", session_id=77)
            server.put("/meta/consumers/g/ids/g_c3", b"a", session_id=78)
            await settle()
            assert seen[1:] == [{"g_c1": ("a",), "g_c2": ("a",), "g_c3": ("a",)}]
            server.put("/meta/consumers/g/ids/g_c2", b"a,b", session_id=77)
            await settle()
            assert seen[-1]["g_c2"] == ("a", "b")
            server.put("/meta/consumers/g/ids/g_c2", b" a, b", session_id=77)
            await settle()
            server.suspend(coordinator)
            server.reap(78)
            await settle()
            assert len(seen) == 3
            server.resume(coordinator)
            await settle()
            assert seen[-1].keys() == {"g_c1", "g_c2"}
            cancel()
            cancel()
            server.reap(77)
            await settle()
            assert len(seen) == 4

    run_virtually(scenario())


def test_a_watch_that_ends_in_a_burst_is_silent() -> None:
    """What was about to be told is not told any more."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with member_on(server) as (one, _):
            seen: list[Members] = []
            cancel = one.watch_members(seen.append)
            await asyncio.sleep(0.001)
            cancel()
            await settle()
            assert seen == []

    run_virtually(scenario())


def test_groups_can_be_looked_at_from_outside() -> None:
    """Names of groups, their members and owners, without a membership."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        coordinator = await connect(server)
        assert await list_groups(coordinator, PATHS, deadline_s=in_s()) == ()
        for group in ("g2", "g1"):
            server.put(f"/meta/consumers/{group}/ids/{group}_c", b"t")
        for name in ("1-0", "0-10", "0-2", "nonsense"):
            server.put(f"/meta/consumers/g1/owners/t/{name}", b"g1_c")
        server.put("/meta/consumers/g1/owners/t/0-3", b" ")
        assert await list_groups(coordinator, PATHS, deadline_s=in_s()) == ("g1", "g2")
        members = await read_members(coordinator, PATHS, "g1", deadline_s=in_s())
        assert dict(members) == {"g1_c": ("t",)}
        owners = await read_owners(coordinator, PATHS, "g1", "t", deadline_s=in_s())
        assert [str(partition) for partition in owners] == ["t/0-2", "t/0-10", "t/1-0"]
        none = await read_owners(coordinator, PATHS, "g1", "x", deadline_s=in_s())
        assert dict(none) == {}

    run_virtually(scenario())


def test_a_member_knows_whether_its_nodes_are_its_own() -> None:
    """Ours is what holds our payload and belongs to the present session."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with member_on(server) as (one, coordinator):

            async def ask() -> tuple[bool, bool]:
                return (
                    await one.is_registered(deadline_s=in_s()),
                    await one.owns(P0, deadline_s=in_s()),
                )

            assert await ask() == (False, False)
            await one.register(["t"], deadline_s=in_s())
            assert await ask() == (True, False)
            await one.claim(P0, deadline_s=in_s())
            assert await ask() == (True, True)
            mine = coordinator.status.session_id
            server.put(OWNER, b"g_other", session_id=mine)
            assert await ask() == (True, False)
            server.put(OWNER, b"g_c1", session_id=mine + 1)
            server.put(MEMBER, b"t", session_id=mine + 1)
            assert await ask() == (False, False)

    run_virtually(scenario())


def test_a_registration_without_an_answer_is_found_when_leaving() -> None:
    """Nobody else would ever delete it while the session lives."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with member_on(server) as (one, coordinator):
            create = coordinator.create_ephemeral

            async def unheard(path: str, data: bytes, *, deadline_s: float) -> None:
                await create(path, data, deadline_s=deadline_s)
                raise CoordinationTimeoutError("the answer got lost")

            coordinator.create_ephemeral = unheard  # type: ignore[method-assign]
            with pytest.raises(CoordinationTimeoutError):
                await one.register(["t"], deadline_s=in_s())
            assert MEMBER in server.nodes
            await one.unregister(deadline_s=in_s())
            assert MEMBER not in server.nodes

    run_virtually(scenario())
