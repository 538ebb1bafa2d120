"""Terms that begin and end: hand-over, lost sessions, kills, a ZooKeeper set back."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from metaq.client import AsyncClient
from metaq.record.ids import id_after
from metaq.replication.election import Flag
from metaq.replication.operator import (
    change_set,
    wait_until_leads,
)
from metaq.replication.record import (
    NO_REPLICA,
    Change,
    LeaderNode,
    Purpose,
    plan_transfer,
    restored_record,
)
from metaq.replication.replica import ReplicaRole as R
from metaq.replication.set_nodes import Outcome, decode_member, decode_present
from tests.replication.replicas import RECORD, Replicas, run, soon
from tests.rigs.fs import FaultyFileSystem

LEADER = f"{RECORD}/leader"


class Load:
    """A producer that sends one message after another, by whichever leads."""

    def __init__(self, rig: Replicas) -> None:
        self._rig = rig
        self.sent: list[bytes] = []

    async def run(self) -> None:
        new = self._rig.zookeeper.coordinator
        async with AsyncClient(coordinator=new) as client, client.producer() as one:
            while True:
                payload = b"m%d." % len(self.sent)
                await one.send("test", payload)
                self.sent.append(payload)

    async def more(self, count: int = 5) -> None:
        """Wait until so many more are acknowledged."""
        until = len(self.sent) + count
        await soon(lambda: len(self.sent) >= until, show=self._rig.describe)


async def under_load(
    rig: Replicas, act: Callable[[Load], Awaitable[None]]
) -> list[bytes]:
    """Do something while messages are sent; none may fail, or be lost."""
    load = Load(rig)
    sending = asyncio.create_task(load.run())
    try:
        await load.more()
        await act(load)
        await load.more()
    finally:
        sending.cancel()
        await asyncio.wait({sending})
        assert sending.cancelled(), sending.exception()
    await rig.equal()
    leader = rig.leader()
    stored = rig.bytes_of(leader) + rig.bytes_of(leader, "test-1")
    counts = {payload: stored.count(payload) for payload in load.sent}
    assert {*counts.values()} == {1}, counts
    return load.sent


# -- hand-over ------------------------------------------------------------------------


@pytest.mark.slow
def test_a_leader_that_stops_hands_over_without_a_failed_send() -> None:
    """Another one leads at once, and the set goes on without the one that left."""

    async def scenario(rig: Replicas) -> None:
        first = rig.leader()

        async def act(load: Load) -> None:
            await rig[first].stop()
            assert rig[first].failure is None
            await load.more()

        await under_load(rig, act)
        assert await rig.in_sync(*{1, 2, 3} - {first}) != first
        await rig[first].start()
        await rig.in_sync(1, 2, 3)

    run(scenario)


@pytest.mark.slow
def test_an_operator_moves_the_lead_without_a_failed_send() -> None:
    """The replica that was named leads; the one before follows it."""

    async def scenario(rig: Replicas) -> None:
        first, target = rig.leader(), 3

        async def act(load: Load) -> None:
            async with rig.operator() as nodes:
                await change_set(
                    nodes,
                    lambda view, record: plan_transfer(
                        record, view.view.version, target
                    ),
                )
                assert await wait_until_leads(nodes, target, timeout_s=20)
            await load.more()

        await under_load(rig, act)
        assert rig.leader() == target
        await rig.role(first, R.FOLLOWING)
        await rig.in_sync(1, 2, 3)

    run(scenario)


@pytest.mark.slow
def test_a_leader_that_stops_alone_leaves_no_leader_and_claims_no_more() -> None:
    """Nobody can take over; its own next start does."""

    async def scenario(rig: Replicas) -> None:
        await rig.start(1)
        await rig.in_sync(1)
        epoch = rig.record.epoch.number
        await rig[1].stop()
        assert rig[1].failure is None
        assert (rig.record.leader, rig.record.epoch.number) == (NO_REPLICA, epoch)
        assert LEADER not in rig.zookeeper.nodes
        await rig[1].start()
        await rig.led(after=epoch)

    run(scenario, are_started=False)


@pytest.mark.slow
def test_a_follower_that_stops_leaves_the_set_at_once() -> None:
    """It says so: no put waits for the lag time."""

    async def scenario(rig: Replicas) -> None:
        other = rig.follower()
        node = rig[other].node
        await node.leave()
        shown = decode_present(
            other, rig.zookeeper.nodes[f"{RECORD}/present/{other}"].data
        )
        assert shown.presence.state == "stopping"
        await rig.in_sync(*{1, 2, 3} - {other})
        await asyncio.sleep(0.2)
        assert other not in rig.record.in_sync

    run(scenario)


# -- sessions -------------------------------------------------------------------------


@pytest.mark.slow
def test_a_leader_goes_on_in_a_new_session() -> None:
    """Its epoch stays: nobody else has claimed."""

    async def scenario(rig: Replicas) -> None:
        leader = rig.leader()
        epoch = rig[leader].node.epoch

        async def act(load: Load) -> None:
            before = rig.zookeeper.nodes[LEADER].owner_session_id
            rig.zookeeper.expire(rig[leader].client)
            await soon(
                lambda: (
                    LEADER in rig.zookeeper.nodes
                    and rig.zookeeper.nodes[LEADER].owner_session_id != before
                )
            )
            await load.more()

        await under_load(rig, act)
        assert (rig.leader(), rig[leader].node.epoch) == (leader, epoch)

    run(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("is_carried_out", [True, False])
def test_a_lost_answer_to_a_claim_is_found_out(is_carried_out: bool) -> None:
    """The claimer leads if it landed, and somebody leads if it did not."""

    async def scenario(rig: Replicas) -> None:
        leader = rig.leader()
        epoch = rig[leader].node.epoch
        others = {1, 2, 3} - {leader}
        for each in others:
            rig.zookeeper.lose_answer(rig[each].client, is_carried_out=is_carried_out)
        rig.zookeeper.reap(await rig[leader].kill())
        await soon(lambda: any(rig[k].client.loses is None for k in others))
        for each in others:
            rig[each].client.loses = None
            rig.zookeeper.resume(rig[each].client)
        await rig.led(after=epoch)
        await rig.in_sync(*others)
        await rig.store()

    run(scenario)


@pytest.mark.slow
def test_a_leader_without_zookeeper_goes_on_until_another_one_has_claimed() -> None:
    """All replicas pull, so nobody has claimed; then it steps down and follows."""

    async def scenario(rig: Replicas) -> None:
        leader = rig.leader()
        epoch = rig[leader].node.epoch
        session = rig[leader].client.status.session_id
        rig.zookeeper.suspend(rig[leader].client)
        for _ in range(3):
            await rig.store()
        await rig.equal()
        rig.zookeeper.reap(session)
        others = {1, 2, 3} - {leader}
        await soon(lambda: any(rig[k].node.epoch > epoch for k in others))
        # What is put there now is promised to nobody.
        answer = await rig.put(leader)
        assert answer.startswith((b"result 500 ", b"result 503 "))
        assert answer.endswith((b"[in-doubt]", b"[too-few-replicas]", b"[not-leader]"))
        rig.zookeeper.expire(rig[leader].client)
        await rig.role(leader, R.FOLLOWING)
        await rig.in_sync(1, 2, 3)
        assert rig.leader() != leader
        await rig.store(b"later")
        await rig.equal()

    run(scenario)


@pytest.mark.slow
def test_puts_in_flight_end_in_doubt_when_a_leader_steps_down() -> None:
    """Whether they are stored is the next leader's to say."""

    async def scenario(rig: Replicas) -> None:
        leader = rig.leader()
        await rig.store()
        await rig.equal()
        rig.zookeeper.suspend(rig[leader].client)
        streams = rig[leader].node.streams
        assert streams is not None
        streams.pull = lambda *_: None  # type: ignore[method-assign]
        asking = asyncio.create_task(rig.put(leader))
        log = rig[leader].log()
        assert log is not None
        await soon(lambda: log.next_offset > log.high_watermark)
        rig.zookeeper.expire(rig[leader].client)
        answer = await asking
        assert answer.endswith(b"[in-doubt]")

    run(scenario)


@pytest.mark.slow
def test_a_former_life_is_no_reason_to_wait() -> None:
    """A leader that is restarted at once deletes its own node, and claims."""

    async def scenario(rig: Replicas) -> None:
        leader = rig.leader()
        epoch = rig[leader].node.epoch
        session = await rig[leader].kill()
        await rig[leader].start()
        await rig.led(after=epoch)
        for path in (LEADER, f"{RECORD}/present/{leader}"):
            assert rig.zookeeper.nodes[path].owner_session_id != session
        await rig.in_sync(1, 2, 3)

    run(scenario)


@pytest.mark.slow
def test_a_killed_leader_is_replaced_without_a_failed_send() -> None:
    """When its session is over; nothing that was acknowledged is missing."""

    async def scenario(rig: Replicas) -> None:
        leader = rig.leader()

        async def act(load: Load) -> None:
            rig.zookeeper.reap(await rig[leader].kill())
            await load.more()
            await rig[leader].start()

        await under_load(rig, act)
        await rig.in_sync(1, 2, 3)

    run(scenario)


@pytest.mark.slow
def test_a_leader_goes_on_with_ids_above_those_of_one_whose_clock_was_ahead() -> None:
    """No id is given twice."""

    async def scenario(rig: Replicas) -> None:
        first = rig.leader()
        broker = rig[first].broker
        assert broker is not None
        ids = broker.context.ids
        ids.advance_to(id_after(ids.peek(), 1 << 30))
        before = await rig.store()
        await rig.equal()
        await rig[first].stop()
        await rig.in_sync(*{1, 2, 3} - {first})
        after = await rig.store()
        assert int(after.split()[-3]) > int(before.split()[-3])

    run(scenario)


# -- a ZooKeeper that was set back ----------------------------------------------------


async def restore(rig: Replicas, *, missing: frozenset[int] = frozenset()) -> None:
    """Do what `metaq replicas restore` does."""
    copies, completed = {}, {}
    for number in {each.number for each in rig.running}:
        facts = await rig.facts(number)
        assert facts.record is not None
        copies[number], completed[number] = facts.record, facts.completed
    async with rig.operator() as nodes:
        view = (await nodes.read(synced=True)).view
        record = restored_record(
            copies, view.record, completed=completed, missing=missing, nonce="back"
        )
        if view.record is None:
            outcome = await nodes.create_record(record, {})
        else:
            change = Change(Purpose.OPERATOR, record, view.version, LeaderNode.DELETED)
            outcome = await nodes.propose(change)
        assert outcome is Outcome.APPLIED


async def frozen(rig: Replicas) -> None:
    for each in rig.running:
        await rig.role(each.number, R.FROZEN)


async def serves(rig: Replicas) -> None:
    """Wait until the set takes puts, on all replicas."""
    await rig.in_sync(1, 2, 3)
    await rig.store()
    await rig.equal()


@pytest.mark.slow
def test_a_record_that_was_set_back_freezes_all_until_it_is_restored() -> None:
    """Gets go on; nobody leads on a record that has forgotten what was promised."""

    async def scenario(rig: Replicas) -> None:
        backup = rig.zookeeper.tree()
        first = rig.leader()
        await rig[first].stop()
        await rig[first].start()
        await rig.in_sync(1, 2, 3)
        await rig.store()
        await rig.equal()
        rig.zookeeper.restore(backup)
        await frozen(rig)
        assert (await rig.put(first)).endswith(b"[not-leader]")
        get = b"get test g 0 0 1000 7\r\n"
        assert b"hello" in await rig.ask(rig.running[0].number, get)
        assert (await rig.facts(first)).reason
        await restore(rig)
        await serves(rig)
        # The life of one that has started since the backup is known again.
        known = decode_member(rig.zookeeper.nodes[f"{RECORD}/members/{first}"].data)
        assert known.incarnation == rig[first].node.replica.incarnation

    run(scenario)


@pytest.mark.slow
def test_replicas_of_a_wiped_zookeeper_go_on_after_it_is_restored() -> None:
    """Each makes its own node again: a restart is no reason to begin with nothing."""

    async def scenario(rig: Replicas) -> None:
        await rig.put(rig.leader())
        rig.zookeeper.stop()
        rig.zookeeper.start(is_wiped=True)
        await frozen(rig)
        await restore(rig)
        await serves(rig)
        for number in (1, 2, 3):
            assert f"{RECORD}/members/{number}" in rig.zookeeper.nodes
        other = rig.follower()
        await rig[other].stop()
        rig[other].saved.clear()
        await rig[other].start()
        await serves(rig)
        assert {each.flag for each in rig[other].saved} == {""}

    run(scenario)


@pytest.mark.slow
def test_replicas_that_start_on_a_wiped_zookeeper_go_on_after_it_is_restored() -> None:
    """Those with their disks are complete; one that lost its own is not."""

    async def scenario(rig: Replicas) -> None:
        await rig.store()
        await rig.equal()
        empty = rig.follower()
        rig.zookeeper.stop()
        for each in rig.running:
            await each.kill()
        rig.zookeeper.start(is_wiped=True)
        rig[empty].disk = FaultyFileSystem(has_loop_syncs=True)
        await rig.start(*{1, 2, 3} - {empty})
        await frozen(rig)
        for each in rig.all.values():
            each.saved.clear()
        await restore(rig, missing=frozenset({empty}))
        await rig.start(empty)
        await serves(rig)
        for each in rig.all.values():
            flags = {file.flag for file in each.saved}
            assert (Flag.INCOMPLETE in flags) == (each.number == empty)

    run(scenario)


@pytest.mark.slow
def test_replicas_that_start_frozen_thaw_when_the_record_is_back() -> None:
    """They had no part in the set yet: they begin then."""

    async def scenario(rig: Replicas) -> None:
        backup = rig.zookeeper.tree()
        first = rig.leader()
        await rig[first].stop()
        await rig[first].start()
        await rig.in_sync(1, 2, 3)
        await rig.stop()
        rig.zookeeper.restore(backup)
        await rig.start()
        await frozen(rig)
        await restore(rig)
        await serves(rig)

    run(scenario)
