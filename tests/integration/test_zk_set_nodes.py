"""The nodes of a replica set on a real ZooKeeper."""

import asyncio

import pytest

from metaq.clock import SystemClock
from metaq.replication.election import PresenceState
from metaq.replication.record import (
    Change,
    plan_claim,
    plan_force,
    plan_register,
    plan_renew,
    plan_take_out,
)
from metaq.replication.set_nodes import Outcome, SetNodes
from metaq.zk.coordinator import ZooKeeperCoordinator
from metaq.zk.paths import NodePaths
from metaq.zk.session import SessionState
from tests.integration.conftest import expire_session
from tests.replication.set_nodes_rig import (
    ALL,
    BROKER,
    FIRST,
    leading,
    member,
    shown,
)
from tests.rigs.inside import session_identity
from tests.rigs.waiting import until

CLOCK = SystemClock()
PATIENCE_S = 60.0

pytestmark = pytest.mark.zookeeper


async def replica_on(hosts: str, replica: int) -> tuple[ZooKeeperCoordinator, SetNodes]:
    client = ZooKeeperCoordinator(hosts, session_timeout_ms=20_000, clock=CLOCK)
    client.start()
    await until(lambda: client.status.state is SessionState.CONNECTED)
    return client, SetNodes(client, NodePaths(), BROKER, replica, clock=CLOCK)


async def send(nodes: SetNodes, replica: int, change: Change | None) -> Outcome:
    assert change is not None
    data = leading(replica, change.record.epoch)
    own = member(change.member[1]) if change.member else None
    return await nodes.propose(change, member=own, leader=data)


def test_a_set_is_made_led_and_led_on_after_its_session_ended(zookeeper: str) -> None:
    """Each kind of change, with those that a server refuses."""

    async def scenario() -> None:
        client, one = await replica_on(zookeeper, 1)
        other, two = await replica_on(zookeeper, 2)
        changes = 0

        def on_change() -> None:
            nonlocal changes
            changes += 1

        cancel = two.watch(on_change)
        assert (await one.read(synced=True)).view.record is None
        assert await one.create_record(FIRST, {1: member(4)}) is Outcome.APPLIED
        assert await two.create_record(FIRST, {}) is Outcome.REFUSED
        view = (await two.read(synced=True)).view
        register = plan_register(FIRST, view.version, (2, 1), None)
        assert await send(two, 2, register) is Outcome.APPLIED
        assert await send(two, 2, register) is Outcome.REFUSED
        await two.show(shown(2))
        await two.show(shown(2, state=PresenceState.STOPPING))
        view = (await one.read(synced=True)).view
        claim = plan_claim(FIRST, view.version, 1, "n", frozenset())
        assert claim is not None
        before = changes
        assert await send(one, 1, claim) is Outcome.APPLIED
        assert await send(one, 1, claim) is Outcome.REFUSED
        await until(lambda: changes > before)
        found = await two.read(synced=True)
        assert found.view.record == claim.record
        assert found.view.leader is not None
        assert not found.view.leader.is_own
        assert found.shown == {2: shown(2, state=PresenceState.STOPPING)}
        assert found.members == {1: member(4), 2: member(1)}
        # The session ends: its leader node goes, and comes with the next one.
        await asyncio.to_thread(expire_session, zookeeper, *session_identity(client))
        await until(lambda: client.status.session_version == 2)
        out = plan_take_out(claim.record, found.view.version, 3, ALL)
        assert await send(one, 1, out) is Outcome.REFUSED
        view = (await one.read(synced=True)).view
        assert view.leader is None
        assert await send(one, 1, plan_renew(claim.record, view.version)) is (
            Outcome.APPLIED
        )
        assert await send(one, 1, out) is Outcome.APPLIED
        view = (await two.read(synced=True)).view
        assert view.record is not None
        force = plan_force(view.record, view.version, 2, "f")
        assert await send(two, 2, force) is Outcome.APPLIED
        view = (await one.read(synced=True)).view
        assert (view.record, view.leader) == (force.record, None)
        cancel()
        for each in (client, other):
            await each.stop(deadline_s=CLOCK.monotonic_s() + PATIENCE_S)

    asyncio.run(scenario())
