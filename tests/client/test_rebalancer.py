"""One member, and its group, on an in-memory ZooKeeper in virtual time."""

import asyncio
import logging

import pytest

from metaq.client.errors import NotSettledError
from metaq.client.group.assignments import Fence
from metaq.client.group.rebalancer import CHECK_S
from metaq.errors import ClosedError, SessionLostError
from metaq.zk.session import SessionEvent, SessionState
from tests.client.group_members import (
    CLOCK,
    GROUP,
    ID,
    OPTIONS,
    PATHS,
    Group,
    Member,
    owner_path,
    owners,
    part,
    parts,
    run_group,
    serve,
    serving,
)
from tests.rigs.virtual_time import run_virtually
from tests.rigs.waiting import until

# -- what others do to the group -------------------------------------------------------


def test_a_thousand_members_that_take_nothing_are_named() -> None:
    """They get an assignment each and read nothing, and only this report names them."""

    async def scenario(group: Group, one: Member) -> None:
        assert one.source.problems() == []
        for number in range(1000):
            path = PATHS.member(GROUP, f"a\u202e{number:03d}")
            group.server.put(path, b"t", session_id=99)
        await until(lambda: not one.reading)
        assert one.source.problems() == []
        await asyncio.sleep(60)
        (problem,) = one.source.problems()
        assert problem.startswith("3 partitions without an owner for 60 s (t/0-0, ")
        assert "the 1001 members of the group (a\\u202e000, a\\u202e001," in problem
        assert "and 996 more) have assignments" in problem
        group.server.reap(99)
        await until(lambda: one.reading == parts(0, 1, 2))
        assert one.source.problems() == []

    run_group(scenario, 3)


def test_partitions_that_members_hand_over_are_no_problem() -> None:
    """A partition that has an owner now and then is on its way."""

    async def scenario(_group: Group, one: Member) -> None:
        await asyncio.sleep(600)
        assert one.source.problems() == []

    run_group(scenario, 3)


# -- joining and leaving --------------------------------------------------------------


def test_a_member_alone_reads_everything_and_leaves_nothing() -> None:
    """Its nodes are MetaQ's, byte by byte; after `stop` there are none."""

    async def scenario(group: Group, one: Member) -> None:
        server = group.server
        assert one.reading == parts(0, 1, 2)
        assert one.is_settled
        assert one.source.rebalance_count == 1
        assert one.source.fence == Fence("g_c1", 1)
        assert server.nodes[ID].data == b"t"
        assert server.nodes[ID].owner_session_id
        assert owners(server) == dict.fromkeys(["0-0", "0-1", "0-2"], "g_c1")
        assert server.nodes[owner_path(part(0))].owner_session_id
        await one.source.stop()
        assert one.sink.called("revoke") == parts(0, 1, 2)
        assert owners(server) == {}
        assert ID not in server.nodes
        await one.source.stop()

    run_group(scenario, 3)


def test_what_stays_is_not_touched() -> None:
    """A second member takes its half; the first one's other half is never stopped."""

    async def scenario(group: Group, one: Member) -> None:
        two = await group.join("c2")
        await until(lambda: two.is_settled)
        assert one.reading == parts(0, 1)
        assert two.reading == parts(2, 3)
        assert one.sink.called("revoke") == parts(2, 3)
        assert one.sink.called("fence") == set()
        assigned = [call for call in one.sink.calls if call[0] == "assign"]
        assert len(assigned) == 4
        await two.leave()
        await until(lambda: one.reading == parts(0, 1, 2, 3))
        assert one.sink.called("revoke") == parts(2, 3)

    run_group(scenario, 4)


def test_a_partition_is_released_when_its_revocation_has_ended() -> None:
    """No other member claims it before: the handler in flight and its commit come
    first."""

    async def scenario(group: Group, one: Member) -> None:
        server = group.server
        one.sink.revoke_s = 10.0
        seen: list[dict[str, str]] = []
        one.sink.before_release = lambda: seen.append(owners(server))
        two = await group.join("c2")
        assert two.reading == set()
        assert not two.is_settled
        assert isinstance(two.source.last_error, NotSettledError)
        assert "1 of our partitions" in str(two.source.last_error)
        await until(lambda: two.is_settled)
        assert seen == [{"0-0": "g_c1", "0-1": "g_c1"}]
        assert two.reading == parts(1)
        assert two.source.last_error is None
        one.sink.before_release = lambda: None

    run_group(scenario, 2)


@pytest.mark.parametrize(("revoke_s", "warnings"), [(5.0, 0), (60.0, 1)])
def test_a_handover_is_a_warning_when_it_takes_long(
    caplog: pytest.LogCaptureFixture, revoke_s: float, warnings: int
) -> None:
    """Once; the begin of every rebalance is no reason for alarm."""

    async def scenario(group: Group, one: Member) -> None:
        for name in ("c2", "c3"):
            one.sink.revoke_s = revoke_s
            other = await group.join(name)
            await until(lambda: one.reading != parts(0, 1))
            await until(lambda: len(one.reading) == 1)
            one.sink.revoke_s = 0.0
            await other.leave()
            await until(lambda: one.reading == parts(0, 1))

    caplog.set_level(logging.INFO, "metaq.client.group.rebalancer")
    run_group(scenario, 2)
    lines = [record for record in caplog.records if "are not read" in record.message]
    for name in ("g_c2", "g_c3"):
        levels = [one.levelno for one in lines if f"member={name}" in one.message]
        assert levels == [logging.INFO] + [logging.WARNING] * warnings


def test_changes_during_a_rebalance_are_looked_at_after_it() -> None:
    """Two join while a slow revocation is under way; one pass later all is right."""

    async def scenario(group: Group, one: Member) -> None:
        one.sink.revoke_s = 5.0
        two = await group.join("c2")
        three = await group.join("c3")
        members = (one, two, three)
        await until(lambda: all(m.is_settled for m in members))
        assert [m.reading for m in members] == [parts(0), parts(1), parts(2)]

    run_group(scenario, 3)


def test_members_share_the_topics_that_both_subscribe_to() -> None:
    """A member that does not subscribe to a topic takes no part in it."""

    async def scenario() -> None:
        server = serving(2)
        serve(server, 2, topic="u")
        one = await Member(server, topics=["t", "u"]).join()
        two = await Member(server, "c2", topics=["u"]).join()
        await until(lambda: two.is_settled)
        assert server.nodes[ID].data == b"t,u"
        assert one.reading == parts(0, 1) | {part(0, topic="u")}
        assert two.reading == {part(1, topic="u")}
        await one.leave()
        await two.leave()

    run_virtually(scenario())


def test_partitions_that_come_and_go_are_followed() -> None:
    """A topic that is not there yet, that grows, and that goes."""

    async def scenario(group: Group, one: Member) -> None:
        server = group.server
        assert one.is_settled
        assert one.reading == set()
        serve(server, 1)
        await until(lambda: one.reading == parts(0))
        serve(server, 3)
        await until(lambda: one.reading == parts(0, 1, 2))
        serve(server, 1, broker=7)
        await until(lambda: part(0, broker=7) in one.reading)
        assert one.sink.called("revoke") == set()
        serve(server, 0)
        await until(lambda: one.reading == {part(0, broker=7)})
        assert owners(server) == {"7-0": "g_c1"}

    run_group(scenario, 0)


def test_a_rebalance_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """With who, how many, and how long; a look without effect is none."""

    async def scenario(group: Group, one: Member) -> None:
        await asyncio.sleep(2 * CHECK_S)
        two = await group.join("c2")
        await until(lambda: two.is_settled)

    caplog.set_level(logging.INFO, "metaq.client.group.rebalancer")

    run_group(scenario, 2)
    texts = [record.getMessage() for record in caplog.records]
    mine = [t for t in texts if "rebalanced" in t and "member=g_c1" in t]
    assert [t.rpartition(" duration_ms=")[0] for t in mine] == [
        "rebalanced: group=g member=g_c1 rebalances=1 added=2 removed=0 partitions=2",
        "rebalanced: group=g member=g_c1 rebalances=2 added=0 removed=1 partitions=1",
    ]


# -- the session ----------------------------------------------------------------------


def test_a_lost_session_stops_reading_at_once() -> None:
    """Before another member can claim; nothing is revoked, and all of it comes back."""

    async def scenario(group: Group, one: Member) -> None:
        server = group.server
        server.expire(one.coordinator)
        await asyncio.sleep(0)
        assert one.reading == set()
        assert one.sink.called("fence") == parts(0, 1)
        assert not one.is_settled
        assert isinstance(one.source.last_error, SessionLostError)
        await until(lambda: one.is_settled)
        assert one.reading == parts(0, 1)
        assert one.source.fence == Fence("g_c1", 2)
        assert one.sink.called("revoke") == set()
        session_id = one.coordinator.status.session_id
        for path in (ID, owner_path(part(0)), owner_path(part(1))):
            assert server.nodes[path].owner_session_id == session_id

    run_group(scenario, 2)


def test_a_suspended_session_changes_nothing() -> None:
    """Reading goes on; nothing is asked, and nothing is done twice after it."""

    async def scenario(group: Group, one: Member) -> None:
        server = group.server
        calls = list(one.sink.calls)
        for _ in range(3):
            server.suspend(one.coordinator)
            await asyncio.sleep(OPTIONS.session_timeout_s - 0.1)
            assert one.reading == parts(0, 1)
            server.resume(one.coordinator)
            await asyncio.sleep(1)
        assert one.sink.calls == calls
        assert one.is_settled
        assert one.source.fence == Fence("g_c1", 1)

    run_group(scenario, 2)


def test_a_session_lost_while_reading_begins_begins_nothing() -> None:
    """Partitions claimed under it are not read."""

    async def scenario(group: Group, one: Member) -> None:
        server = group.server
        one.sink.assign_s = 3.0
        await one.connect()
        starting = asyncio.create_task(one.source.start(one.sink))
        await until(lambda: len(owners(server)) == 2)
        server.expire(one.coordinator)
        await starting
        assert one.sink.calls == []
        assert not one.is_settled
        await until(lambda: one.is_settled)
        assert one.reading == parts(0, 1)

    run_group(scenario, 2, is_joined=False)


def test_a_session_lost_while_it_revokes_is_the_end_of_all() -> None:
    """Also of what was not being revoked."""

    async def scenario(group: Group, one: Member) -> None:
        server = group.server
        one.sink.revoke_s = 10.0
        two = await group.join("c2")
        await until(lambda: one.sink.called("revoke") == parts(1))
        server.expire(one.coordinator)
        await asyncio.sleep(0)
        assert one.reading == set()
        await until(lambda: one.is_settled and two.is_settled)
        assert (one.reading, two.reading) == (parts(0), parts(1))

    run_group(scenario, 2)


def test_a_server_that_comes_back_empty_is_joined_again() -> None:
    """Nodes, topics and sessions are gone; the topics come back later."""

    async def scenario(group: Group, one: Member) -> None:
        server = group.server
        server.stop()
        await asyncio.sleep(1)
        assert one.reading == parts(0, 1)
        server.start(is_wiped=True)
        await until(lambda: ID in server.nodes and one.is_settled and not one.reading)
        serve(server, 2)
        await until(lambda: one.reading == parts(0, 1))
        assert owners(server) == dict.fromkeys(["0-0", "0-1"], "g_c1")

    run_group(scenario, 2)


# -- stopping -------------------------------------------------------------------------


def test_a_stop_while_suspended_is_finished_when_zookeeper_answers() -> None:
    """`stop` is bounded; the nodes of the living session do not stay for ever."""

    async def scenario(group: Group, one: Member) -> None:
        server = group.server
        server.suspend(one.coordinator)
        began_s = CLOCK.monotonic_s()
        await one.source.stop()
        assert CLOCK.monotonic_s() - began_s <= OPTIONS.request_timeout_s + 1
        assert one.sink.called("revoke") == parts(0, 1)
        assert one.reading == set()
        assert len(owners(server)) == 2
        server.resume(one.coordinator)
        await until(lambda: ID not in server.nodes)
        assert owners(server) == {}

    run_group(scenario, 2)


def test_a_stop_without_a_session_asks_for_nothing() -> None:
    """Its partitions are gone with it."""

    async def scenario(group: Group, one: Member) -> None:
        server = group.server
        server.stop()
        one.coordinator.report(SessionEvent.EXPIRED)
        await until(lambda: one.coordinator.status.state is SessionState.LOST)
        await one.source.stop()
        assert one.sink.called("fence") == parts(0, 1)
        assert not {t for t in asyncio.all_tasks() if t.get_name().startswith("group")}

    run_group(scenario, 2)


def test_a_stop_while_joining_ends_the_start() -> None:
    """Its waiter hears so at once."""

    async def scenario(group: Group, one: Member) -> None:
        server = group.server
        server.stop()
        joining = asyncio.create_task(one.join())
        await asyncio.sleep(0.1)
        await one.source.stop()
        with pytest.raises(ClosedError, match="left while joining"):
            await joining
        await one.quit()

    run_group(scenario, 0, is_joined=False)


def test_a_stop_ends_what_is_being_taken() -> None:
    """Claims and readings under way are given up, not waited for."""

    async def scenario(group: Group, one: Member) -> None:
        server = group.server
        one.sink.assign_s = 1000.0
        serve(server, 4)
        await until(lambda: len(owners(server)) == 4)
        began_s = CLOCK.monotonic_s()
        await one.source.stop()
        assert CLOCK.monotonic_s() - began_s < 1
        assert one.sink.called("revoke") == parts(0, 1)
        assert owners(server) == {}
        assert ID not in server.nodes

    run_group(scenario, 2)


def test_a_cancelled_stop_leaves_the_group_all_the_same() -> None:
    """A member that reads nothing and stays would keep its assignment from all
    others."""

    async def scenario(group: Group, one: Member) -> None:
        one.sink.revoke_s = 1000.0
        stopping = asyncio.create_task(one.source.stop())
        await until(lambda: one.sink.called("revoke"))
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        assert one.reading == set()
        await until(lambda: ID not in group.server.nodes)
        assert owners(group.server) == {}

    run_group(scenario, 2)


def test_a_stop_waits_for_a_revocation_under_way() -> None:
    """The message being handled ends and committed before anything is released."""

    async def scenario(group: Group, one: Member) -> None:
        server = group.server
        one.sink.revoke_s = 10.0
        two = await group.join("c2")
        await until(lambda: one.sink.called("revoke") == parts(1))
        seen: list[dict[str, str]] = []
        one.sink.before_release = lambda: seen.append(owners(server))
        await one.source.stop()
        assert seen == [
            {"0-0": "g_c1", "0-1": "g_c1"},
            {"0-0": "g_c1", "0-1": "g_c2"},
        ]
        await until(lambda: two.reading == parts(0, 1))

    run_group(scenario, 2)
