"""The nodes of a set while ZooKeeper lags, loses answers, or was set back."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from metaq.errors import CoordinationError, SessionLostError, SessionSuspendedError
from metaq.replication.election import PresenceState, newer_copy
from metaq.replication.json_values import to_json
from metaq.replication.record import (
    Change,
    LeaderNode,
    Purpose,
    ReplicaSetError,
    encode_record,
    foreign_reason,
    plan_claim,
    plan_renew,
    plan_settings,
    plan_take_out,
)
from metaq.replication.replica import (
    Propose,
    Replica,
    ReplicaRole,
    SetFile,
    on_view,
)
from metaq.replication.replica import claim as claim_of
from metaq.replication.set_nodes import (
    REQUEST_TIMEOUT_S,
    Outcome,
)
from metaq.zk.errors import CoordinationTimeoutError
from metaq.zk.session import SessionEvent
from tests.replication.set_nodes_rig import (
    ALL,
    CLOCK,
    FIRST,
    LEADER,
    PRESENT_2,
    RECORD,
    SetRig,
    a_set,
    leading,
    member,
    shown,
)
from tests.rigs.virtual_time import run_virtually
from tests.rigs.waiting import until


async def send(rig: SetRig, replica: int, change: Change | None) -> Outcome:
    assert change is not None
    data = leading(replica, change.record.epoch)
    nodes = rig.nodes[replica]
    return await nodes.propose(change, member=None, leader=data)


async def claim(rig: SetRig, replica: int, nonce: str = "n") -> Change:
    """Let a replica lead, and return the change with which it did."""
    view = (await rig.nodes[replica].read(synced=True)).view
    assert view.record is not None
    change = plan_claim(view.record, view.version, replica, nonce, frozenset())
    assert await send(rig, replica, change) is Outcome.APPLIED
    assert change is not None
    return change


async def begin_session(rig: SetRig, replica: int) -> None:
    """Give a client a new session while the nodes of its old one are there."""
    client = rig.clients[replica]
    version = client.status.session_version
    client.report(SessionEvent.EXPIRED)
    client.connect_soon()
    await until(lambda: client.status.session_version == version + 1)


def after_reading(
    rig: SetRig, replica: int, path: str, act: Callable[[], Awaitable[Any]]
) -> None:
    """Let something happen once, when a replica has just read a node."""
    client = rig.clients[replica]
    get = client.get

    async def get_and_act(asked: str, *, deadline_s: float) -> Any:
        found = await get(asked, deadline_s=deadline_s)
        if asked == path:
            client.get = get  # type: ignore[method-assign]
            await act()
        return found

    client.get = get_and_act  # type: ignore[method-assign]


# -- a server that lags ---------------------------------------------------------------


def test_a_synced_read_has_what_a_lagging_server_lacks() -> None:
    """One without a sync may be old, and says so."""

    async def scenario() -> None:
        async with a_set() as rig:
            rig.server.lag(rig.clients[2])
            change = await claim(rig, 1)
            old = (await rig.nodes[2].read(synced=False)).view
            assert (old.record, old.leader, old.is_synced) == (FIRST, None, False)
            new = (await rig.nodes[2].read(synced=True)).view
            assert (new.record, new.is_synced) == (change.record, True)
            assert new.leader is not None

    run_virtually(scenario())


def test_what_was_planned_from_an_old_view_is_refused() -> None:
    """The servers that decide do not lag."""

    async def scenario() -> None:
        async with a_set() as rig:
            rig.server.lag(rig.clients[2])
            led = await claim(rig, 1)
            old = (await rig.nodes[2].read(synced=False)).view
            late = plan_claim(FIRST, old.version, 2, "m", frozenset())
            assert await send(rig, 2, late) is Outcome.REFUSED
            assert rig.data(RECORD) == encode_record(led.record)

    run_virtually(scenario())


# -- answers that get lost ------------------------------------------------------------


@pytest.mark.parametrize("is_carried_out", [True, False])
def test_a_lost_answer_is_read_back_and_decides(is_carried_out: bool) -> None:
    """The outcome is unknown; the record says then whether the claim landed."""

    async def scenario() -> None:
        async with a_set() as rig:
            nodes, client = rig.nodes[1], rig.clients[1]
            await nodes.show(shown(1))
            view = (await nodes.read(synced=True)).view
            file = SetFile("s", 1, FIRST, epoch=1, completed=1)
            idle = Replica(ReplicaRole.IDLE, file, view.version, 5, is_sure=True)
            transition = claim_of(idle, view, "n", waited_ms=10_000)
            assert transition is not None
            claiming, actions = transition
            proposed = actions[-1]
            assert isinstance(proposed, Propose)
            rig.server.lose_answer(client, is_carried_out=is_carried_out)
            assert await send(rig, 1, proposed.change) is Outcome.UNKNOWN
            with pytest.raises(SessionSuspendedError):
                await nodes.read(synced=True)
            rig.server.resume(client)
            after, _ = on_view(claiming, (await nodes.read(synced=True)).view)
            landed = ReplicaRole.MERGING if is_carried_out else ReplicaRole.IDLE
            assert after.role is landed
            assert (rig.data(LEADER) is not None) == is_carried_out

    run_virtually(scenario())


@pytest.mark.parametrize("is_carried_out", [True, False])
def test_a_presence_whose_answer_got_lost_is_shown_again(is_carried_out: bool) -> None:
    """Whether it was created or not, it is there once, and ours."""

    async def scenario() -> None:
        async with a_set() as rig:
            rig.server.lose_answer(rig.clients[2], is_carried_out=is_carried_out)
            with pytest.raises(SessionSuspendedError):
                await rig.nodes[2].show(shown(2))
            assert (rig.data(PRESENT_2) is not None) == is_carried_out
            rig.server.resume(rig.clients[2])
            await rig.nodes[2].show(shown(2))
            assert rig.data(PRESENT_2) == to_json(shown(2))

    run_virtually(scenario())


def test_a_change_without_an_answer_in_time_is_unknown() -> None:
    """It may still be carried out; one that was never sent is refused."""

    async def scenario() -> None:
        async with a_set() as rig:
            nodes = rig.nodes[0]
            view = (await nodes.read(synced=True)).view
            settings = plan_settings(FIRST, view.version, min_in_sync=3)
            claiming = plan_claim(FIRST, view.version, 1, "n", frozenset())
            rig.server.stall = True
            began_s = CLOCK.monotonic_s()
            assert await send(rig, 0, settings) is Outcome.UNKNOWN
            assert CLOCK.monotonic_s() == began_s + REQUEST_TIMEOUT_S
            # This one reads the leader first.
            assert await send(rig, 0, claiming) is Outcome.REFUSED
            with pytest.raises(CoordinationTimeoutError):
                await nodes.read(synced=True)
            rig.server.stall = False

    run_virtually(scenario())


@pytest.mark.parametrize("end", ["suspend", "expire"])
def test_a_connection_that_is_gone_sends_nothing(end: str) -> None:
    """Neither refusal nor loss makes the record change later."""

    async def scenario() -> None:
        async with a_set() as rig:
            view = (await rig.nodes[1].read(synced=True)).view
            change = plan_claim(FIRST, view.version, 1, "n", frozenset())
            getattr(rig.server, end)(rig.clients[1])
            assert await send(rig, 1, change) is Outcome.REFUSED
            rig.server.resume(rig.clients[1])
            await asyncio.sleep(1)
            assert (await rig.nodes[1].read(synced=True)).view.record == FIRST

    run_virtually(scenario())


def test_what_zookeeper_refuses_for_other_reasons_is_an_error() -> None:
    """Rights and quotas are for an operator; nothing was done."""

    async def scenario() -> None:
        async with a_set() as rig:
            view = (await rig.nodes[1].read(synced=True)).view
            change = plan_settings(FIRST, view.version, min_in_sync=3)
            rig.server.refusal = "no rights"
            with pytest.raises(CoordinationError, match="no rights"):
                await send(rig, 1, change)
            rig.server.refusal = ""
            assert rig.data(RECORD) == encode_record(FIRST)

    run_virtually(scenario())


# -- set back to a backup -------------------------------------------------------------


def test_a_record_that_was_set_back_contradicts_copies_and_presences() -> None:
    """A replica that knows more shows it, so that none claims from the old record."""

    async def scenario() -> None:
        async with a_set() as rig:
            backup = rig.server.tree()
            known = (await claim(rig, 1)).record
            rig.server.restore(backup)
            await until(lambda: rig.clients[2].status.session_version == 2)
            await rig.nodes[1].show(shown(1, revision=known.revision, epoch=2))
            view = (await rig.nodes[2].read(synced=True)).view
            assert view.record == FIRST
            assert "expected revision 2 or more" in foreign_reason(known, FIRST)
            assert newer_copy(FIRST, view.presences) == view.presences[0]

    run_virtually(scenario())


def test_versions_that_come_twice_after_a_backup_deceive_nobody() -> None:
    """A change planned before is refused unsent, over another record of its version."""

    async def scenario() -> None:
        async with a_set() as rig:
            backup = rig.server.tree()
            operator = rig.nodes[0]
            view = (await operator.read(synced=True)).view
            three = plan_settings(FIRST, view.version, min_in_sync=3)
            assert await send(rig, 0, three) is Outcome.APPLIED
            view = (await rig.nodes[2].read(synced=True)).view
            late = plan_claim(three.record, view.version, 2, "n", frozenset())
            rig.server.restore(backup)
            await until(lambda: rig.clients[2].status.session_version == 2)
            await until(lambda: rig.clients[0].status.session_version == 2)
            other = (await operator.read(synced=True)).view
            two = plan_settings(FIRST, other.version, replicas=ALL | {4})
            assert await send(rig, 0, two) is Outcome.APPLIED
            assert rig.server.tree()[RECORD].version == view.version
            assert await send(rig, 2, late) is Outcome.REFUSED
            assert rig.data(RECORD) == encode_record(two.record)

    run_virtually(scenario())


def test_nodes_of_sessions_from_before_the_backup_are_taken_over() -> None:
    """They are ours by number and address, and would go by themselves only later."""

    async def scenario() -> None:
        async with a_set() as rig:
            await rig.nodes[2].show(shown(2))
            led = (await claim(rig, 2)).record
            rig.server.restore(rig.server.tree())
            client = rig.clients[2]
            await until(lambda: client.status.session_version == 2)
            await rig.nodes[2].show(shown(2, state=PresenceState.FROZEN))
            view = (await rig.nodes[2].read(synced=True)).view
            renewed = plan_renew(led, view.version)
            assert await send(rig, 2, renewed) is Outcome.APPLIED
            nodes = rig.server.tree()
            for path in (PRESENT_2, LEADER):
                assert nodes[path].owner_session_id == client.status.session_id

    run_virtually(scenario())


# -- sessions that end ----------------------------------------------------------------


def test_the_first_read_waits_for_a_session_and_not_for_a_node_to_be_good() -> None:
    """A command or a start says at once what another try does not mend."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with a_set() as rig:
            nodes, client = rig.nodes[1], rig.clients[1]
            rig.server.suspend(client)
            loop.call_later(3, rig.server.resume, client)
            began_s = loop.time()
            assert (await nodes.read_first(10)).view.record == FIRST
            assert loop.time() - began_s >= 3
            rig.server.suspend(client)
            with pytest.raises(CoordinationError):
                await nodes.read_first(1)
            rig.server.resume(client)
            rig.server.put(RECORD, b"no record")
            began_s = loop.time()
            with pytest.raises(ReplicaSetError, match=RECORD):
                await nodes.read_first(10)
            assert loop.time() - began_s < 1

    run_virtually(scenario())


def test_a_read_over_two_sessions_is_no_view() -> None:
    """The second one may be at a server that has less than the first."""

    async def scenario() -> None:
        async with a_set() as rig:
            after_reading(rig, 2, RECORD, lambda: begin_session(rig, 2))
            with pytest.raises(SessionLostError, match="ended in between"):
                await rig.nodes[2].read(synced=True)
            assert (await rig.nodes[2].read(synced=True)).view.record == FIRST

    run_virtually(scenario())


def test_a_change_whose_session_ends_before_it_is_sent_is_refused() -> None:
    """Nothing is written in a new session over what an old one has read."""

    async def scenario() -> None:
        async with a_set() as rig:
            view = (await rig.nodes[1].read(synced=True)).view
            change = plan_claim(FIRST, view.version, 1, "n", frozenset())
            after_reading(rig, 1, LEADER, lambda: begin_session(rig, 1))
            assert await send(rig, 1, change) is Outcome.REFUSED
            assert (rig.data(RECORD), rig.data(LEADER)) == (encode_record(FIRST), None)

    run_virtually(scenario())


def test_a_leader_goes_on_in_a_new_session_while_its_old_node_is_there() -> None:
    """The node is replaced in the one request that checks the record."""

    async def scenario() -> None:
        async with a_set() as rig:
            led = (await claim(rig, 1)).record
            await begin_session(rig, 1)
            found = await rig.nodes[1].read(synced=True)
            assert found.view.leader is not None
            assert not found.view.leader.is_own
            version = found.view.version
            # Before that it changes nothing: the node is of another session.
            out = plan_take_out(led, version, 3, ALL)
            assert await send(rig, 1, out) is Outcome.REFUSED
            assert await send(rig, 1, plan_renew(led, version)) is Outcome.APPLIED
            again = (await rig.nodes[1].read(synced=True)).view.leader
            assert again is not None
            assert again.is_own
            assert await send(rig, 1, out) is Outcome.APPLIED

    run_virtually(scenario())


def test_a_leader_does_not_go_on_over_the_node_of_another_one() -> None:
    """Nor when the record has changed; the node of the other one stays."""

    async def scenario() -> None:
        async with a_set() as rig:
            led = (await claim(rig, 1)).record
            rig.server.expire(rig.clients[1])
            await until(lambda: rig.clients[1].status.session_version == 2)
            view = (await rig.nodes[1].read(synced=True)).view
            await claim(rig, 2, "m")
            for version in (view.version, view.version + 1):
                renewed = plan_renew(led, version)
                assert await send(rig, 1, renewed) is Outcome.REFUSED
            assert b'"replica":2' in (rig.data(LEADER) or b"")

    run_virtually(scenario())


def test_a_withdrawal_never_deletes_the_node_of_the_next_leader() -> None:
    """Its version is the same; that of the record is not."""

    async def scenario() -> None:
        async with a_set() as rig:
            await claim(rig, 1)

            async def succeed() -> None:
                rig.server.remove(LEADER)
                await claim(rig, 2, "m")

            after_reading(rig, 1, LEADER, succeed)
            await rig.nodes[1].withdraw()
            assert b'"replica":2' in (rig.data(LEADER) or b"")

    run_virtually(scenario())


def test_a_presence_that_goes_with_its_old_session_is_shown_again() -> None:
    """The old node ends between the look at it and the request that deletes it."""

    async def scenario() -> None:
        async with a_set() as rig:
            await rig.nodes[2].show(shown(2))
            old = rig.clients[2].status.session_id
            await begin_session(rig, 2)

            async def end() -> None:
                rig.server.reap(old)

            after_reading(rig, 2, PRESENT_2, end)
            await rig.nodes[2].show(shown(2))
            node = rig.server.tree()[PRESENT_2]
            assert node.owner_session_id == rig.clients[2].status.session_id

    run_virtually(scenario())


def test_members_of_two_processes_of_one_replica_do_not_mix() -> None:
    """The second registers after the first has, from what it read before."""

    async def scenario() -> None:
        async with a_set() as rig:
            view = (await rig.nodes[2].read(synced=True)).view
            change = Change(
                Purpose.REGISTER, FIRST, view.version, member=(2, 1), is_check=True
            )
            first, other = rig.nodes[2], await rig.join(2)
            await other.read(synced=True)

            async def register() -> None:
                landed = await first.propose(change, member=member(1))
                assert landed is Outcome.APPLIED

            path = "/meta/replicas/7/members/2"
            after_reading(rig, 2, path, register)
            late = replace(member(1), directories={"other": 1})
            outcome = await other.propose(change, member=late)
            assert outcome is Outcome.REFUSED
            assert (await other.read(synced=True)).members[2] == member(1)

    run_virtually(scenario())


def test_a_change_that_leaves_the_leader_alone_does_not_look_at_it() -> None:
    """Settings land beside a leader, whose node stays as it is."""

    async def scenario() -> None:
        async with a_set() as rig:
            led = (await claim(rig, 1)).record
            before = rig.server.tree()[LEADER]
            view = (await rig.nodes[0].read(synced=True)).view
            change = plan_settings(led, view.version, min_in_sync=3)
            assert change.leader_node is LeaderNode.LEFT
            assert await send(rig, 0, change) is Outcome.APPLIED
            assert rig.server.tree()[LEADER] == before

    run_virtually(scenario())
