"""Settles over a connection: acks, nacks, leases."""

import asyncio
from pathlib import Path

import pytest

from metaq.broker.app import Broker
from metaq.broker.internal_logs import read_records
from metaq.broker.queue_log import QUEUES
from metaq.protocol.encoding import encode
from metaq.protocol.queue_frames import SettleVerb, Word
from metaq.zk.group_definitions import DELAY_MS_MAX, LEASE_MS_MAX
from tests.broker.queue_worker import Worker, put, run
from tests.rigs.broker import Peer
from tests.rigs.waiting import until


def test_a_message_is_taken_once_and_done_when_it_is_acked(tmp_path: Path) -> None:
    """Two workers share a partition; what was acked is not given out again."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        await put(peer, b"a", b"b", b"c")
        async with Peer(broker) as other:
            one, two = Worker(peer, "w1"), Worker(other, "w2")
            first, second = await one.take(2), await two.take(2)
            assert [each.data for each in (*first, *second)] == [b"a", b"b", b"c"]
            assert {each.deliveries for each in first} == {1}
            assert [await one.ack(each) for each in first] == [Word.OK, Word.OK]
            assert await two.say(second[0], SettleVerb.RELEASE) is Word.OK
            again = await one.take(9)
            assert [(each.data, each.deliveries) for each in again] == [(b"c", 1)]
            assert await two.ack(second[0]) is Word.LOST
            assert await one.ack(again[0]) is Word.OK
            assert await one.ack(again[0]) is Word.DONE
            assert await one.take(9) == []

    run(tmp_path, scenario)


def test_settles_of_many_workers_that_come_together_are_one_record(
    tmp_path: Path,
) -> None:
    """Each of them is answered, when that is stored."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        workers = [Worker(peer, f"w{number}") for number in range(3)]

        async def are_one_record() -> bool:
            await put(peer, b"a", b"b", b"c")
            got = [(await each.take())[0] for each in workers]
            before = await journal_count(broker)
            acks = [
                worker.settling(0, [each.says(SettleVerb.ACK)])
                for worker, each in zip(workers, got, strict=True)
            ]
            replies = await peer.ask(b"".join(map(bytes, map(encode, acks))))
            assert replies.count(b"result 200 2") == 3
            assert await workers[0].ack(got[0]) is Word.DONE
            return await journal_count(broker) == before + 1

        # A session whose turn of the loop is long answers the rest in its next turn.
        await until(are_one_record)

    run(tmp_path, scenario)


async def journal_count(broker: Broker) -> int:
    """Return how many records `__queues` has."""
    log = broker.context.topics.find_internal(QUEUES)
    assert log is not None
    return len([each async for each in read_records(log)])


def test_a_nack_gives_a_message_out_again_after_its_delay(tmp_path: Path) -> None:
    """The delivery counts, and a waiting take gets it when it is due."""

    async def scenario(_broker: Broker, peer: Peer) -> None:
        await put(peer, b"a")
        worker = Worker(peer)
        (got,) = await worker.take(1)
        time_s = asyncio.get_running_loop().time
        began_s = time_s()
        assert await worker.say(got, SettleVerb.NACK, 60) is Word.OK
        early = await worker.take(1)
        (again,) = early or await worker.take(1, wait_ms=20_000)
        assert time_s() - began_s >= 0.06
        assert (again.data, again.deliveries) == (b"a", 2)
        assert again.delivery > got.delivery

    run(tmp_path, scenario)


def test_a_delay_or_a_lease_beyond_its_bound_is_refused(tmp_path: Path) -> None:
    """Nothing is changed: the worker has the message still."""

    async def scenario(_broker: Broker, peer: Peer) -> None:
        await put(peer, b"a")
        worker = Worker(peer)
        (got,) = await worker.take(1)
        for verb, ms_max in (
            (SettleVerb.NACK, DELAY_MS_MAX),
            (SettleVerb.EXTEND, LEASE_MS_MAX),
        ):
            settle = encode(worker.settling(0, [got.says(verb, ms_max + 1)]))
            refused = (await peer.ask(bytes(settle))).decode()
            assert f"expected at most {ms_max} ms, got {ms_max + 1}" in refused
        assert await worker.say(got, SettleVerb.NACK, DELAY_MS_MAX) is Word.OK

    run(tmp_path, scenario)


@pytest.mark.slow
def test_a_take_has_a_bound_and_the_rest_comes_with_the_next(tmp_path: Path) -> None:
    """Of messages, and of bytes."""

    async def scenario(_broker: Broker, peer: Peer) -> None:
        worker = Worker(peer)
        await put(peer, *[b"%d" % number for number in range(1_005)])
        counts = [len(await worker.take(5_000)) for _ in range(2)]
        await put(peer, *[bytes(1 << 18)] * 4)
        counts += [len(await worker.take(9, size=9 << 20)) for _ in range(2)]
        assert counts == [1_000, 5, 3, 1]

    run(tmp_path, scenario)


def test_a_lease_that_ends_gives_a_message_out_again(tmp_path: Path) -> None:
    """A late ack is good while nobody else has the message, and lost after that."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        await put(peer, b"a", b"b")
        slow = Worker(peer, "slow")
        one, two = await slow.take(2, lease_ms=50)
        queue = broker.context.queues.queue_for(
            broker.context.queues.find_group(slow.taking()), 0
        )
        await until(lambda: queue.state.ready_count == 2)
        assert await slow.ack(one) is Word.OK
        async with Peer(broker) as other:
            quick = Worker(other, "quick")
            (again,) = await quick.take(5, wait_ms=20_000)
            assert (again.data, again.deliveries) == (b"b", 2)
            assert await slow.ack(two) is Word.LOST
            assert await quick.ack(again) is Word.OK

    run(tmp_path, scenario)


@pytest.mark.slow
def test_an_extended_lease_goes_on(tmp_path: Path) -> None:
    """A handler that takes long keeps its message."""

    async def scenario(_broker: Broker, peer: Peer) -> None:
        await put(peer, b"a")
        worker = Worker(peer)
        (got,) = await worker.take(1, lease_ms=80)
        assert await worker.say(got, SettleVerb.EXTEND, 60_000) is Word.OK
        assert await worker.take(1, wait_ms=200) == []
        assert await worker.ack(got) is Word.OK

    run(tmp_path, scenario)
