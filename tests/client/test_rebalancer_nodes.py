"""Foreign nodes in ZooKeeper, such as MetaQ's members, and deleted nodes."""

import asyncio
import logging

import pytest

from metaq.client.errors import NotSettledError
from metaq.client.group.rebalancer import CHECK_S
from metaq.testing.zk import MemoryZooKeeper
from metaq.zk.errors import MemberTakenError
from metaq.zk.groups import GroupMembership
from tests.client.group_members import (
    CLOCK,
    GROUP,
    PATHS,
    Member,
    owner_path,
    owners,
    part,
    parts,
    serving,
)
from tests.rigs.virtual_time import run_virtually
from tests.rigs.waiting import until

ID = PATHS.member(GROUP, "g_c1")


# -- what others leave, hold and delete -----------------------------------------------


def test_what_a_dead_process_owned_is_claimed_when_its_session_ends() -> None:
    """`start` does not wait for that; trying goes on for as long as it takes."""

    async def scenario() -> None:
        server = serving(2)
        dead = await Member(server, "c9").join()
        session_id = await dead.die()
        one = await Member(server).join()
        assert one.reading == set()
        await asyncio.sleep(300)
        assert one.reading == set()
        assert isinstance(one.source.last_error, NotSettledError)
        since_s = one.source.unsettled_since_s
        assert since_s is not None
        assert CLOCK.monotonic_s() - since_s >= 300
        ended_s = CLOCK.monotonic_s()
        server.reap(session_id)
        await until(lambda: one.reading == parts(0, 1))
        assert CLOCK.monotonic_s() - ended_s < 1, "woken by the node, not by time"
        await one.leave()

    run_virtually(scenario())


def test_a_partition_is_claimed_when_its_owner_releases_it() -> None:
    """Not at the next attempt, which is seconds away after many of them."""

    async def scenario() -> None:
        server = serving(1)
        server.put(owner_path(part(0)), b"g_java", session_id=77)
        one = await Member(server).join()
        await asyncio.sleep(100)
        claim = ("create", owner_path(part(0)))
        count = server.calls.count(claim)
        await until(lambda: server.calls.count(claim) > count)
        server.remove(owner_path(part(0)))
        await asyncio.sleep(0.5)
        assert one.is_settled
        assert one.reading == parts(0)
        await one.leave()

    run_virtually(scenario())


def test_waiting_for_others_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Not with every attempt."""

    async def scenario() -> None:
        server = serving(1)
        server.put(owner_path(part(0)), b"g_java", session_id=77)
        one = await Member(server).join()
        asked = server.calls.count(("create", owner_path(part(0))))
        await asyncio.sleep(100)
        assert server.calls.count(("create", owner_path(part(0)))) >= asked + 10
        await one.leave()

    run_virtually(scenario())
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "still owned by other members: t/0-0" in warnings[0]


def test_a_deleted_member_node_comes_back() -> None:
    """Reading goes on."""

    async def scenario() -> None:
        server = serving(2)
        one = await Member(server).join()
        calls = list(one.sink.calls)
        server.remove(ID)
        await until(lambda: ID in server.nodes)
        await until(lambda: one.is_settled)
        assert one.sink.calls == calls
        await one.leave()

    run_virtually(scenario())


def test_a_deleted_owner_node_fences_and_is_claimed_again() -> None:
    """Another member might have it; only that partition is touched."""

    async def scenario() -> None:
        server = serving(2)
        one = await Member(server).join()
        server.remove(owner_path(part(1)))
        began_s = CLOCK.monotonic_s()
        await until(lambda: one.sink.called("fence") == parts(1))
        await until(lambda: one.is_settled and one.reading == parts(0, 1))
        assert CLOCK.monotonic_s() - began_s < 1, "reported by a watch"
        assert owners(server) == dict.fromkeys(["0-0", "0-1"], "g_c1")
        assert [call for call in one.sink.calls if part(0) in call[1]] == [
            ("assign", frozenset([part(0)]))
        ]
        await one.leave()

    run_virtually(scenario())


@pytest.mark.parametrize("data", [b"other", b"", b"\xff", b"t,other", b"g_c2"])
def test_a_member_node_that_is_overwritten_is_put_back(data: bytes) -> None:
    """Nothing is let go of, and until then the member is not settled."""

    async def scenario() -> None:
        server = serving(2)
        one = await Member(server).join()
        calls = list(one.sink.calls)
        server.write(ID, data)
        await until(lambda: not one.is_settled)
        began_s = CLOCK.monotonic_s()
        await until(lambda: one.is_settled)
        assert CLOCK.monotonic_s() - began_s < 2, "reported by a watch"
        assert server.nodes[ID].data == b"t"
        assert one.sink.calls == calls
        await one.leave()
        assert ID not in server.nodes

    run_virtually(scenario())


@pytest.mark.parametrize("data", [b"g_java", b"", b"\xff"])
def test_an_owner_node_that_is_overwritten_is_put_back(data: bytes) -> None:
    """As one that was deleted: fenced, and claimed again at once."""

    async def scenario() -> None:
        server = serving(2)
        one = await Member(server).join()
        server.write(owner_path(part(1)), data)
        began_s = CLOCK.monotonic_s()
        await until(lambda: one.sink.called("fence") == parts(1))
        await until(lambda: one.is_settled and one.reading == parts(0, 1))
        assert CLOCK.monotonic_s() - began_s < 1, "reported by a watch"
        assert owners(server) == dict.fromkeys(["0-0", "0-1"], "g_c1")
        await one.leave()
        assert owners(server) == {}

    run_virtually(scenario())


def test_nodes_of_two_members_of_one_client_are_not_taken_for_each_other_s() -> None:
    """They have one session: only the name, and the owner of the node, differ."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        coordinator = server.coordinator(CLOCK)
        coordinator.start()
        a, b = (
            GroupMembership(coordinator, PATHS, group=GROUP, consumer_id=consumer_id)
            for consumer_id in ("a", "b")
        )
        late_s = CLOCK.monotonic_s() + 60
        await until(lambda: coordinator.status.session_id)
        for one in (a, b):
            await one.register(["t"], deadline_s=late_s)
        assert await a.claim(part(0), deadline_s=late_s)
        server.remove(owner_path(part(0)))
        assert await b.claim(part(0), deadline_s=late_s)
        assert not await a.claim(part(0), deadline_s=late_s)
        server.write(owner_path(part(0)), b"x")
        assert await b.claim(part(0), deadline_s=late_s)
        assert owners(server) == {"0-0": "g_b"}
        server.write(owner_path(part(0)), b"x")
        server.write(PATHS.member(GROUP, "g_b"), b"x")
        assert not await a.release(part(0), deadline_s=late_s)
        assert await b.release(part(0), deadline_s=late_s)
        assert owners(server) == {}
        await b.unregister(deadline_s=late_s)
        assert server.names(PATHS.members(GROUP)) == ("g_a",)
        await coordinator.stop(deadline_s=late_s)

    run_virtually(scenario())


def test_an_owner_node_that_changed_hands_is_found_by_a_watch() -> None:
    """Its partition is let go of, and the member says that it lacks it."""

    async def scenario() -> None:
        server = serving(1)
        one = await Member(server).join()
        server.put(owner_path(part(0)), b"g_java", session_id=77)
        await asyncio.sleep(1)
        assert one.reading == set()
        assert one.sink.called("fence") == parts(0)
        assert not one.is_settled
        server.remove(owner_path(part(0)))
        await until(lambda: one.is_settled and one.reading == parts(0))
        await one.leave()
        assert owners(server) == {}

    run_virtually(scenario())


@pytest.mark.parametrize(("data", "wait_s"), [(b"t", CHECK_S + 1), (b"other", 1)])
def test_a_member_node_that_changed_hands_is_told(data: bytes, wait_s: float) -> None:
    """Another member took our name: reading goes on, and health says so.

    With other topics at once; a node that looks like ours is found by the check.
    """

    async def scenario() -> None:
        server = serving(1)
        one = await Member(server).join()
        server.put(ID, data, session_id=77)
        await asyncio.sleep(wait_s)
        assert isinstance(one.source.last_error, MemberTakenError)
        assert one.reading == parts(0)
        server.remove(ID)
        await until(lambda: one.is_settled)
        await one.leave()

    run_virtually(scenario())


# -- members of MetaQ -----------------------------------------------------------------


def test_a_member_of_metaq_that_joins_gets_its_assignment() -> None:
    """It writes its id node, computes its assignment, and claims until it can."""

    async def scenario() -> None:
        server = serving(5)
        one = await Member(server).join()
        server.put(PATHS.member(GROUP, "g_java"), b"t", session_id=77)
        # DEFAULT: g_c1 has the longer run 0-0 to 0-2, g_java the rest.
        kept = dict.fromkeys(["0-0", "0-1", "0-2"], "g_c1")
        await until(lambda: owners(server) == kept)
        assert one.reading == parts(0, 1, 2)
        for number in (3, 4):
            server.put(owner_path(part(number)), b"g_java", session_id=77)
        await asyncio.sleep(2 * CHECK_S)
        assert one.reading == parts(0, 1, 2)
        assert one.is_settled
        # It dies; what it had is claimed when its session has ended.
        server.reap(77)
        await until(lambda: one.reading == parts(0, 1, 2, 3, 4))
        await one.leave()

    run_virtually(scenario())


def test_a_member_of_metaq_that_is_there_keeps_its_assignment() -> None:
    """Ours takes what it releases, whenever that is, and nothing else."""

    async def scenario() -> None:
        server = serving(3)
        server.put(PATHS.member(GROUP, "g_a-java"), b"t,other", session_id=77)
        for number in range(3):
            server.put(owner_path(part(number)), b"g_a-java", session_id=77)
        one = await Member(server).join()
        assert one.reading == set()
        await asyncio.sleep(35)
        server.remove(owner_path(part(2)))
        await until(lambda: one.is_settled)
        assert one.reading == parts(2)
        assert owners(server) == {"0-0": "g_a-java", "0-1": "g_a-java", "0-2": "g_c1"}
        await one.leave()
        assert owners(server) == {"0-0": "g_a-java", "0-1": "g_a-java"}

    run_virtually(scenario())


@pytest.mark.parametrize("topics", [b"", b"other", b"\xff"])
def test_a_member_that_does_not_subscribe_gets_nothing(topics: bytes) -> None:
    """Blank lists, other topics, and unreadable payloads."""

    async def scenario() -> None:
        server = serving(2)
        server.put(PATHS.member(GROUP, "g_a"), topics, session_id=77)
        one = await Member(server).join()
        assert one.reading == parts(0, 1)
        assert one.is_settled
        await one.leave()

    run_virtually(scenario())
