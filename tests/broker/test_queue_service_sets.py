"""Queue groups of a replica set: its leader serves them, and the next one goes on."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from metaq.broker.app import NO_TRANSACTIONS, Broker
from metaq.broker.internal_logs import read_records
from metaq.broker.queue_log import QUEUES
from metaq.broker.replica_part import HUNG_S
from metaq.clock import SystemClock
from metaq.protocol.commands import Result, Settle, Take, Value
from metaq.protocol.encoding import encode
from metaq.protocol.queue_frames import SettleVerb, Word
from metaq.queues.state_log import StateKind, decode_state
from metaq.record.flags import decode_payload
from metaq.record.layout import HEADER_BYTES
from metaq.replication.operator import change_set
from metaq.replication.record import plan_transfer
from metaq.storage.partition_log import PartitionLog
from metaq.zk.group_definitions import QueueGroupDefinition
from tests.broker.queue_worker import (
    GROUP,
    TOPIC,
    Got,
    Worker,
    define,
    queue_of,
    stored,
)
from tests.replication.replicas import SOON_S, Replicas, replicas, soon
from tests.rigs.broker import Peer

LETTERS = "meta-test"
WAIT_MS = 20_000
LAG_MS = "2000"
"""A busy machine takes a follower for one that is late."""


class Patient(Worker):
    """A worker that asks again after a refusal that passes."""

    async def ask(self, command: Take | Settle) -> Result | Value:
        until_s = asyncio.get_running_loop().time() + SOON_S
        while True:
            reply = await super().ask(command)
            is_over = asyncio.get_running_loop().time() > until_s
            if isinstance(reply, Value) or reply.status != 503 or is_over:
                return reply
            await asyncio.sleep(0.05)


def run(
    scenario: Callable[[Replicas], Awaitable[None]],
    *,
    has_links: bool = False,
    lag_ms: str = LAG_MS,
    **group: Any,
) -> None:
    """Run a scenario on a set of three with one queue group."""

    async def main() -> None:
        async with replicas(
            settings={"queueReclaimMs": "2000", "replicaLagTimeoutMs": lag_ms},
            has_links=has_links,
        ) as rig:
            for each in rig.running:
                define(broker_of(rig, each.number), **group)
            await scenario(rig)

    asyncio.run(main())


def broker_of(rig: Replicas, number: int) -> Broker:
    broker = rig[number].broker
    assert broker is not None
    return broker


def journal_of(rig: Replicas, number: int) -> PartitionLog:
    found = broker_of(rig, number).context.topics.find_internal(QUEUES)
    assert found is not None
    return found


def is_as_long(rig: Replicas, number: int) -> bool:
    """Return whether a replica has all that the leader has of the queues."""
    leader = journal_of(rig, rig.leader())
    return journal_of(rig, number).high_watermark == leader.next_offset


@contextlib.asynccontextmanager
async def serving(rig: Replicas, *data: bytes) -> AsyncIterator[tuple[Broker, Peer]]:
    """Have a connection to the leader, put messages, and wait until it has queues."""
    broker = broker_of(rig, rig.leader())
    queues = broker.context.queues
    assert queues is not None
    async with Peer(broker) as peer:
        for each in data:
            await rig.store(each)
        await soon(queues.lines, show=rig.describe)
        yield broker, peer


async def kill_leader(rig: Replicas) -> None:
    """End the leader, and its session; another one leads."""
    leader = rig.leader()
    epoch = rig[leader].node.epoch
    rig.zookeeper.reap(await rig[leader].kill())
    await rig.led(after=epoch)


async def transfer(rig: Replicas, target: int) -> None:
    """Have an operator name the next leader."""
    async with rig.operator() as nodes:
        await change_set(
            nodes,
            lambda view, record: plan_transfer(record, view.view.version, target),
        )
        await soon(lambda: rig.leader() == target, show=rig.describe)
    await rig.in_sync(1, 2, 3)


async def refused(worker: Worker, command: Any) -> str:
    """Return the code and text of a refusal that passes."""
    reply = await worker.ask(command)
    assert isinstance(reply, Result)
    assert reply.status == 503, reply
    return reply.text


async def letters_on(rig: Replicas, number: int) -> list[bytes]:
    records = await stored(broker_of(rig, number), LETTERS, 1)
    return [decode_payload(each.payload, each.flag).data for each in records]


@pytest.mark.slow
def test_the_next_leader_goes_on_with_what_is_done_and_who_has_what() -> None:
    """An ack is done there; a worker that is back keeps the rest, others get theirs."""

    async def scenario(rig: Replicas) -> None:
        async with serving(rig, b"done", b"kept", b"lost") as (_broker, peer):
            worker, other = Patient(peer, "w1"), Patient(peer, "w2")
            done, reservations = await worker.take(2)
            await other.take(1)
            assert await worker.ack(done) is Word.OK
        await kill_leader(rig)
        async with serving(rig) as (_broker, peer):
            worker, other = Patient(peer, "w1"), Patient(peer, "w3")
            assert await worker.say(reservations, SettleVerb.EXTEND, 30_000) is Word.OK
            (lost,) = await other.take(9, wait_ms=WAIT_MS)
            assert lost.data == b"lost"
            assert await worker.ack(done) is Word.DONE
            assert await worker.ack(reservations) is Word.OK
            assert await other.ack(lost) is Word.OK
            assert await other.take(9, wait_ms=600) == []

    run(scenario)


@pytest.mark.slow
def test_the_next_leader_deletes_the_queues_of_a_topic_that_is_being_deleted() -> None:
    """The former one has not come to it; a topic made again has none of its acks."""

    async def scenario(rig: Replicas) -> None:
        async with serving(rig, b"a") as (_broker, peer):
            worker = Patient(peer)
            assert await worker.ack((await worker.take(1))[0]) is Word.OK
        others = [each.number for each in rig.running if each.number != rig.leader()]
        for number in others:
            broker_of(rig, number).context.topics.withdraw(frozenset({"test"}))
        await kill_leader(rig)
        journal = journal_of(rig, rig.leader())

        async def kinds() -> list[StateKind]:
            records = read_records(journal)
            return [decode_state(each.payload).kind async for _, each in records]

        async with asyncio.timeout(SOON_S):
            while (await kinds())[-1] is not StateKind.DELETED:
                await asyncio.sleep(0.05)
        for number in others:
            broker_of(rig, number).context.topics.withdraw(frozenset())
        async with serving(rig) as (_broker, peer):
            (again,) = await Patient(peer).take(1, wait_ms=WAIT_MS)
            assert (again.data, again.deliveries) == (b"a", 1)

    run(scenario)


@pytest.mark.slow
def test_no_queue_gets_the_number_of_one_that_is_in_doubt() -> None:
    """The record that it begins with is stored later; the next leader reads both."""
    groups = {name: QueueGroupDefinition(topic="test") for name in ("later", GROUP)}

    async def scenario(rig: Replicas) -> None:
        for each in rig.running:
            service = broker_of(rig, each.number).context.queues
            assert service is not None
            service.apply_groups(groups)
        async with serving(rig, b"a") as (broker, peer), Peer(broker) as waiting:
            queues: Any = broker.context.queues
            for link in rig.links.of(rig.leader()):
                link.stall()
            command = Worker(waiting).taking(1, wait_ms=WAIT_MS)
            taking = asyncio.create_task(waiting.ask(encode(command)))
            queue = queue_of(broker)
            await soon(lambda: not queues.has(queue), show=rig.describe)
            later = Worker(peer, group="later")
            assert await refused(later, later.taking())
            for link in rig.links.of(rig.leader()):
                link.pass_all()
            await rig.in_sync(1, 2, 3)
            await taking
        acked = list[tuple[Got, str]]()
        async with serving(rig) as (_broker, peer):
            for name in groups:
                worker = Patient(peer, name, group=name)
                (got,) = await worker.take(1, wait_ms=WAIT_MS)
                assert await worker.ack(got) is Word.OK
                acked.append((got, name))
        await kill_leader(rig)
        async with serving(rig) as (_broker, peer):
            for got, name in acked:
                assert await Patient(peer, name, group=name).ack(got) is Word.DONE

    run(scenario, has_links=True, lag_ms="500")


@pytest.mark.slow
def test_the_next_leader_mends_what_it_cannot_read_of_the_queues() -> None:
    """A bit that flipped on its disk is found by that read, and not by the scrub alone.

    Its groups were away until the scrub came there, and other replicas had the bytes.
    """

    async def scenario(rig: Replicas) -> None:
        async with serving(rig, b"done", b"open") as (_broker, peer):
            worker = Patient(peer, "w1")
            done, last = await worker.take(2)
            assert await worker.ack(done) is Word.OK
            assert await worker.say(last, SettleVerb.RELEASE) is Word.OK
        target = rig.follower()
        await soon(lambda: is_as_long(rig, target), show=rig.describe)
        path = journal_of(rig, target).segments.first.path
        rig[target].disk.flip_bit(path, 8 * (HEADER_BYTES + 5))
        await transfer(rig, target)
        async with serving(rig) as (_broker, peer):
            (again,) = await Patient(peer, "w2").take(9, wait_ms=WAIT_MS)
            assert again.data == b"open"
        assert rig[target].node.mender.mended_count == 1

    run(scenario)


@pytest.mark.slow
def test_a_record_that_workers_cannot_be_given_is_mended() -> None:
    """Its header is damaged on the leader's disk, and other replicas have it.

    Its partition gave out nothing more until the scrub came there.
    """

    async def scenario(rig: Replicas) -> None:
        async with serving(rig, b"first", b"other") as (broker, peer):
            worker, leader = Patient(peer, "w1"), rig.leader()
            (first,) = await worker.take(1)
            await rig.equal()
            queue = queue_of(broker)
            queue.drop_window()
            path = queue.log.segments.first.path
            at = HEADER_BYTES + len(first.data)
            rig[leader].disk.flip_bit(path, 8 * at + 6)  # 2**30 bytes, by its header
            (other,) = await worker.take(1, wait_ms=WAIT_MS)
            assert other.data == b"other"
            assert rig[leader].node.mender.mended_count == 1

    run(scenario)


@pytest.mark.slow
def test_damage_that_none_can_mend_is_passed_over_by_the_next_leader_too() -> None:
    """By order, once the set knows that it is lost."""

    async def scenario(rig: Replicas) -> None:
        async with serving(rig, b"first", b"gone", b"last") as (broker, peer):
            worker, queues = Patient(peer, "w1"), broker.context.queues
            (first,) = await worker.take(1)
            assert await worker.ack(first) is Word.OK
            await rig.equal()
            queue = queue_of(broker)
            queue.drop_window()
            for each in rig.running:
                log = broker_of(rig, each.number).context.topics.find_log(TOPIC, 0)
                path = log.segments.first.path
                at = HEADER_BYTES + len(first.data)
                rig[each.number].disk.flip_bit(path, 8 * at + 6)
            order = partial(queues.skip_damage, TOPIC, GROUP, 0)
            await Worker(peer, "w1").ask(worker.taking(1))  # refused while it lasts
            await soon(lambda: queue.log.lost, show=rig.describe)
            shown = await order(None)
            await order((shown["start"], shown["end"]))
        await kill_leader(rig)
        async with serving(rig) as (_broker, peer):
            (last,) = await Patient(peer, "w2").take(9, wait_ms=WAIT_MS)
            assert last.data == b"last"

    run(scenario)


@pytest.mark.slow
def test_a_follower_says_that_it_does_not_lead() -> None:
    """To a take and to a settle, with the code that a put gets."""

    async def scenario(rig: Replicas) -> None:
        async with serving(rig, b"a") as (_broker, peer):
            (got,) = await Patient(peer).take(1)
        async with Peer(broker_of(rig, rig.follower())) as peer:
            worker = Worker(peer)
            entries = [got.says(SettleVerb.ACK)]
            for command in (worker.taking(), worker.settling(0, entries)):
                assert (await refused(worker, command)).endswith("[not-leader]")

    run(scenario)


@pytest.mark.slow
def test_a_take_that_waits_is_refused_when_the_term_ends() -> None:
    """At once, and the memory of the former leader is gone with the term."""

    async def scenario(rig: Replicas) -> None:
        async with serving(rig, b"a") as (broker, peer):
            worker = Patient(peer)
            assert len(await worker.take(1)) == 1
            command = worker.taking(wait_ms=60_000)
            waiting = asyncio.create_task(refused(Worker(peer), command))
            await soon(lambda: peer.session.taker_count)
            leaving = asyncio.create_task(rig[rig.leader()].node.leave())
            text = await asyncio.wait_for(waiting, SOON_S)
            assert text.endswith("[not-leader]")
            await leaving
            queues: Any = broker.context.queues
            assert queues.lines() == []
            assert queues.problems() == ()

    run(scenario)


@pytest.mark.slow
def test_what_is_open_is_given_out_by_the_leader_that_leads_again() -> None:
    """Its memory of the term before is not believed: another one settled since."""

    async def scenario(rig: Replicas) -> None:
        first = rig.leader()
        async with serving(rig, b"one", b"two", b"three") as (_broker, peer):
            one, two, _three = await Patient(peer, "w1").take(3)
            assert await Patient(peer, "w1").ack(one) is Word.OK
        await transfer(rig, rig.follower())
        async with serving(rig) as (_broker, peer):
            assert await Patient(peer, "w1").ack(two) is Word.OK
        await transfer(rig, first)
        async with serving(rig) as (_broker, peer):
            assert await Patient(peer, "w1").ack(two) is Word.DONE
            (three,) = await Patient(peer, "w2").take(9, wait_ms=WAIT_MS)
            assert three.data == b"three"

    run(scenario)


@pytest.mark.slow
def test_an_ack_is_answered_when_enough_replicas_have_it() -> None:
    """In doubt where none answers for the lag time, and done when it is sent again."""

    async def scenario(rig: Replicas) -> None:
        async with serving(rig, b"a") as (_broker, peer):
            leader = rig.leader()
            worker = Patient(peer)
            (got,) = await worker.take(1)
            for link in rig.links.of(leader):
                link.stall()
            command = worker.settling(0, [got.says(SettleVerb.ACK)])
            reply = await worker.ask(command)
            assert isinstance(reply, Result)
            assert reply.text.endswith("[in-doubt]"), reply
            assert journal_of(rig, leader).high_watermark < (
                journal_of(rig, leader).synced_end
            )
            for link in rig.links.of(leader):
                link.pass_all()
        await rig.in_sync(1, 2, 3)
        async with serving(rig) as (_broker, peer):
            worker = Patient(peer)
            assert await worker.ack(got) is Word.DONE
            assert await worker.take(1, wait_ms=600) == []

    run(scenario, has_links=True)


@pytest.mark.slow
def test_a_dead_letter_of_a_set_is_stored_once() -> None:
    """Without a transaction; the next leader knows that its message is done."""

    async def scenario(rig: Replicas) -> None:
        async with serving(rig, b"bad", b"good") as (_broker, peer):
            worker = Patient(peer)
            bad, _good = await worker.take(2)
            assert await worker.say(bad, SettleVerb.REJECT, text="no") is Word.OK
            assert await worker.ack(bad) is Word.DONE
        await kill_leader(rig)
        async with serving(rig) as (_broker, peer):
            (good,) = await Patient(peer, "w2").take(9, wait_ms=WAIT_MS)
            assert good.data == b"good"
            assert await letters_on(rig, rig.leader()) == [b"bad"]

    run(scenario, dead_letter_topic=LETTERS)


@pytest.mark.slow
@pytest.mark.parametrize("is_rejected_again", [True, False])
def test_a_letter_whose_end_was_not_noted_is_found_by_the_next_leader(
    is_rejected_again: bool,
) -> None:
    """It is not stored again, and its message is given to nobody."""

    async def scenario(rig: Replicas) -> None:
        async with serving(rig, b"bad", b"good") as (broker, peer):
            worker = Patient(peer)
            bad, _good = await worker.take(2)
            queue: Any = queue_of(broker)
            queue.note_done = lambda _done, _on_stored: None
            command = worker.settling(0, [bad.says(SettleVerb.REJECT, text="no")])
            asking = asyncio.create_task(worker.ask(command))

            def have_it() -> bool:
                logs = [rig[number].log(LETTERS, 1) for number in (1, 2, 3)]
                return all(log is not None and log.synced_end for log in logs)

            await soon(have_it, show=rig.describe)
            assert not asking.done()
            await kill_leader(rig)
            with contextlib.suppress(Exception):
                await asking
        async with serving(rig) as (_broker, peer):
            worker = Patient(peer)
            if is_rejected_again:
                assert await worker.say(bad, SettleVerb.REJECT, text="no") is Word.DONE
            (good,) = await Patient(peer, "w2").take(9, wait_ms=WAIT_MS)
            assert good.data == b"good"
            assert await worker.ack(bad) is Word.DONE
            assert await letters_on(rig, rig.leader()) == [b"bad"]

    run(scenario, dead_letter_topic=LETTERS)


@pytest.mark.slow
def test_a_set_takes_no_ack_in_a_transaction() -> None:
    """It says so, in the words with which it refuses to begin one."""

    async def scenario(rig: Replicas) -> None:
        async with serving(rig, b"a") as (_broker, peer):
            worker = Patient(peer)
            (got,) = await worker.take(1)
            begun = await peer.ask(b"transaction TX:w:1 null BEGIN 1\r\n")
            assert NO_TRANSACTIONS.encode() in begun, begun
            reply = await worker.ask(
                worker.settling(0, [got.says(SettleVerb.ACK)], "TX:w:1")
            )
            assert isinstance(reply, Result)
            assert reply.status == 500
            assert NO_TRANSACTIONS in reply.text
            assert await worker.ack(got) is Word.OK

    run(scenario)


@pytest.mark.slow
def test_a_letter_in_doubt_is_not_stored_again_when_it_is_tried_again() -> None:
    """It is found by its name, and its message is done when enough replicas have it."""

    async def scenario(rig: Replicas) -> None:
        async with serving(rig, b"bad") as (broker, peer):
            queues: Any = broker.context.queues
            worker = Patient(peer)
            (bad,) = await worker.take(1)
            for link in rig.links.of(rig.leader()):
                link.stall()
            word = await worker.say(bad, SettleVerb.REJECT, text="no")
            assert word is Word.LATER
            for link in rig.links.of(rig.leader()):
                link.pass_all()
            await rig.in_sync(1, 2, 3)
            await soon(lambda: not queues.problems(), show=rig.describe)
            assert await worker.ack(bad) is Word.DONE
            assert await letters_on(rig, rig.leader()) == [b"bad"]

    run(scenario, has_links=True, dead_letter_topic=LETTERS)


@pytest.mark.slow
def test_a_leader_that_hung_gives_nothing_out_before_it_knows_who_leads() -> None:
    """Another one may have led since, and what is open here may be done there."""

    async def scenario(rig: Replicas) -> None:
        async with serving(rig, b"a") as (_broker, peer):
            leader = rig[rig.leader()]
            rig.zookeeper.suspend(leader.client)
            clock: Any = leader.clock
            clock.boot_s = lambda: SystemClock().boot_s() + 2 * HUNG_S
            worker = Patient(peer)
            assert await worker.take(1, wait_ms=500) == []
            rig.zookeeper.resume(leader.client)
            assert len(await worker.take(1, wait_ms=WAIT_MS)) == 1

    run(scenario)
