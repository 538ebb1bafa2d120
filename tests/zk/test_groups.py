"""Membership and ownership on an in-memory ZooKeeper, in virtual time."""

import asyncio
import json
from pathlib import Path

import pytest

from metaq.errors import SessionLostError
from metaq.testing.zk import MemoryZooKeeper
from metaq.zk.errors import CoordinationTimeoutError, MemberTakenError
from metaq.zk.groups import (
    GroupMembership,
    Members,
    list_groups,
    member_name,
    read_members,
    read_owners,
)
from metaq.zk.offsets import GroupOffsets
from metaq.zk.znodes import decode_group_offset
from tests.rigs.virtual_time import run_virtually
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

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "vectors.json").read_text()
)["zookeeper"]


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
            path: (node.data.decode(), bool(node.owner_session_id))
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
            session_version = await member.register(["test"], deadline_s=in_s())
            for partition, text in offsets.items():
                assert await member.claim(partition, deadline_s=in_s())
                await store.commit_offset(
                    partition,
                    decode_group_offset(text.encode()),
                    member=member.member,
                    session_version=session_version,
                    deadline_s=in_s(),
                )
            assert written(server) == running
            for partition in offsets:
                assert await member.release(partition, deadline_s=in_s())
            await member.unregister(deadline_s=in_s())
            assert written(server).keys() == recorded("java_consumer_shutdown").keys()

    run_virtually(scenario())


async def members_of(server: MemoryZooKeeper) -> Members:
    coordinator = await connect(server)
    members = await read_members(coordinator, PATHS, "g", deadline_s=in_s())
    await coordinator.stop(deadline_s=in_s())
    return members


def test_members_are_read_with_their_topics() -> None:
    """Names ascending, topics sorted when we write and kept when we read."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with member_on(server, "c2") as (two, _), member_on(server) as (one, _):
            assert await members_of(server) == {}
            await two.register(["b", "a", "b"], deadline_s=in_s())
            await one.register(["a"], deadline_s=in_s())
            server.put("/meta/consumers/g/ids/g_java", b"z,a, b", session_id=77)
            members = await members_of(server)
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
        assert dict(await members_of(server)) == {"g_good": ("a",)}

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
            assert server.nodes[MEMBER].owner_session_id

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


def test_nodes_of_our_last_session_are_waited_for() -> None:
    """They vanish later, and until then nothing can tell them from another's."""

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
            with pytest.raises(MemberTakenError, match="broken session"):
                await one.register(["a"], deadline_s=in_s())
            server.remove(MEMBER)
            assert await one.register(["a"], deadline_s=in_s()) == 2
            assert not await one.claim(P0, deadline_s=in_s())
            server.reap(old)
            assert await one.claim(P0, deadline_s=in_s())
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
            owners = await read_owners(
                coordinator, PATHS, "g", "test", deadline_s=in_s()
            )
            assert dict(owners) == {P0: "g_c1", P1: "g_c1"}
            assert await one.release(P0, deadline_s=in_s())
            assert not await one.release(P0, deadline_s=in_s()), "gone already"
            assert await two.claim(P0, deadline_s=in_s())
            server.abandon(coordinator)
            assert not await two.claim(P1, deadline_s=in_s())
            server.reap(coordinator.status.session_id)
            assert await two.claim(P1, deadline_s=in_s())
            assert two.claims_of_session_version(1) == {P0, P1}
            assert two.claims_of_session_version(2) == frozenset()

    run_virtually(scenario())


def test_two_consumers_of_one_process_are_two_members() -> None:
    """They share a session, and still neither takes nor gives the other's
    partitions."""

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
            with pytest.raises(SessionLostError, match="version 1, got 0"):
                await one.claim(P0, deadline_s=in_s())
            assert OWNER not in server.nodes

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
    """A pending snapshot is not delivered any more."""

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
            assert one.claims == {P0}
            assert not await one.claim(P0, deadline_s=in_s())
            assert one.claims == frozenset()
            server.put(MEMBER, b"t", session_id=mine + 1)
            assert await ask() == (False, False)

    run_virtually(scenario())


def test_a_registration_without_an_answer_is_found_when_leaving() -> None:
    """No other client would ever delete it while the session lives."""

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
