"""Takes: what they get, how long they wait, what is refused."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from metaq.broker.app import Broker
from metaq.broker.context import BrokerContext
from metaq.broker.queue_takers import REPLIES_MAX
from metaq.protocol.encoding import encode
from metaq.protocol.queue_frames import SettleVerb, Word
from tests.broker.queue_worker import Worker, put, run
from tests.rigs.broker import Peer
from tests.rigs.waiting import until


def test_a_take_waits_for_a_message_and_the_one_that_came_first_gets_it(
    tmp_path: Path,
) -> None:
    """Long polls end with data, in the order in which they came."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        await put(peer, b"old")
        async with Peer(broker) as p1, Peer(broker) as p2:
            one, two = Worker(p1, "w1"), Worker(p2, "w2")
            (old,) = await one.take(1)
            assert await one.ack(old) is Word.OK
            first = asyncio.create_task(one.take(5, wait_ms=20_000))
            await until(lambda: broker.context.queues.takers.count == 1)
            second = asyncio.create_task(two.take(5, wait_ms=20_000))
            await until(lambda: broker.context.queues.takers.count == 2)
            await put(peer, b"new")
            assert [each.data for each in await first] == [b"new"]
            assert not second.done()
            await put(peer, b"newer")
            assert [each.data for each in await second] == [b"newer"]

    run(tmp_path, scenario)


def test_a_wait_that_is_over_is_answered_with_nothing(tmp_path: Path) -> None:
    """No message came in time."""

    async def scenario(_broker: Broker, peer: Peer) -> None:
        await put(peer, b"a")
        worker = Worker(peer)
        (got,) = await worker.take(1)
        assert await worker.take(1, wait_ms=30) == []
        assert await worker.ack(got) is Word.OK

    run(tmp_path, scenario)


def test_a_take_of_a_connection_that_has_ended_gets_nothing(tmp_path: Path) -> None:
    """The message would be leased to a worker that cannot have it."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        takers = broker.context.queues.takers
        async with Peer(broker) as gone:
            taking = asyncio.create_task(Worker(gone).take(1, wait_ms=60_000))
            await until(lambda: takers.count == 1)
            taking.cancel()
        async with asyncio.timeout(20):  # its wait is longer
            await until(lambda: takers.count == 0)
        await put(peer, b"a")
        assert [each.data for each in await Worker(peer, "w2").take(1)] == [b"a"]

    run(tmp_path, scenario)


def test_each_wait_ends_by_itself(tmp_path: Path) -> None:
    """Also a short one that began while a longer one was under way."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        await put(peer, b"a")
        async with Peer(broker) as other:
            worker, second = Worker(peer), Worker(other, "w2")
            await worker.take(1)
            long = asyncio.create_task(worker.take(1, wait_ms=30_000))
            await until(lambda: broker.context.queues.takers.count == 1)
            assert await second.take(1, wait_ms=30) == []
            assert broker.context.queues.takers.count == 1
            long.cancel()

    run(tmp_path, scenario)


def test_a_take_that_waits_keeps_no_other_reply(tmp_path: Path) -> None:
    """A begin joins the next reply, which may come in a long time."""

    async def scenario(_broker: Broker, peer: Peer) -> None:
        waits = Worker(peer).taking(1, wait_ms=600_000)
        await peer.send(encode(waits) + b"transaction TX:s:1 s BEGIN 9\r\n")
        assert await peer.read_some() == b"result 200 0 9\r\n"

    run(tmp_path, scenario)


class CountingSession:
    """A connection that notes how many commands each of its answers is for."""

    def __init__(self, context: BrokerContext) -> None:
        self.context = context
        self.taker_count = 0
        self.counts = list[int]()

    def hold(self, **_more: Any) -> None:
        pass

    def answer(self, replies: bytes, *, count: int, **_more: Any) -> None:
        assert replies.count(b"value ") == count
        self.counts.append(count)


def test_takes_of_a_connection_are_answered_together(tmp_path: Path) -> None:
    """At most `REPLIES_MAX` with each send."""
    count = 2 * REPLIES_MAX + 4

    async def scenario(broker: Broker, peer: Peer) -> None:
        worker = Worker(peer)
        await put(peer, b"old")
        (old,) = await worker.take(1)  # the file is open for reads
        assert await worker.ack(old) is Word.OK
        await put(peer, *[b"%d" % number for number in range(count)])
        session: Any = CountingSession(broker.context)
        for _ in range(count):
            take = worker.taking(1, wait_ms=60_000)
            broker.context.queues.take(take, session)
        await until(lambda: sum(session.counts) == count)
        # Where the machine is busy, the turn of the loop may be over before.
        assert 1 < max(session.counts) <= REPLIES_MAX

    run(tmp_path, scenario)


def test_keys_are_in_order_over_all_workers(tmp_path: Path) -> None:
    """The second message of a key waits until the first one is done."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        await put(peer, b"a1", key="a")
        await put(peer, b"a2", key="a")
        await put(peer, b"b1", key="b")
        async with Peer(broker) as other:
            one, two = Worker(peer, "w1"), Worker(other, "w2")
            a1, b1 = await one.take(9)
            assert [a1.data, b1.data] == [b"a1", b"b1"]
            assert await two.take(9) == []
            waiting = asyncio.create_task(two.take(9, wait_ms=20_000))
            await until(lambda: broker.context.queues.takers.count == 1)
            assert await one.ack(a1) is Word.OK
            assert [each.data for each in await waiting] == [b"a2"]

    run(tmp_path, scenario, ordered_by="key")


async def let_end_twice(worker: Worker) -> None:
    """Let the lease of the only message end twice: it goes out alone then."""
    for _ in range(2):
        assert len(await worker.take(1, lease_ms=1, wait_ms=20_000)) == 1


def test_what_goes_out_alone_is_for_a_worker_without_another(tmp_path: Path) -> None:
    """And that gets no other, in another take: a worker that dies has it alone."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        await put(peer, b"a")
        async with Peer(broker) as p2, Peer(broker) as p3, Peer(broker) as p4:
            one, two, three = Worker(peer, "w1"), Worker(p2, "w2"), Worker(p3, "w3")
            await let_end_twice(one)
            (a,) = await one.take(9, wait_ms=20_000)
            assert (a.data, a.deliveries) == (b"a", 3)
            await put(p2, b"b")
            assert await one.take(9) == []
            (b,) = await two.take(9)
            assert b.data == b"b"
            waiting = asyncio.create_task(two.take(9, wait_ms=20_000))
            await until(lambda: broker.context.queues.takers.count == 1)
            assert await one.say(a, SettleVerb.RELEASE) is Word.OK
            # The first taker has another message: the next one gets it.
            (a,) = await three.take(9)
            assert a.data == b"a"
            assert await three.say(a, SettleVerb.RELEASE) is Word.OK
            assert not waiting.done()
            assert await Worker(p4, "w2").ack(b) is Word.OK
            assert [each.data for each in await waiting] == [b"a"]

    run(tmp_path, scenario)


def test_what_goes_out_alone_holds_up_no_other_message(tmp_path: Path) -> None:
    """One worker is kept free for it; the others get what comes after it."""

    async def scenario(_broker: Broker, peer: Peer) -> None:
        one, two, three = (Worker(peer, name) for name in ("w1", "w2", "w3"))
        await put(peer, b"a")
        await let_end_twice(three)
        (a,) = await three.take(1, wait_ms=20_000)
        await put(peer, b"b", b"c", b"d", b"e")
        (b,), (_c,) = await two.take(1), await one.take(1)
        assert await three.say(a, SettleVerb.RELEASE) is Word.OK
        assert await two.take(9) == []
        assert [each.data for each in await one.take(1)] == [b"d"]
        assert await two.ack(b) is Word.OK
        (a,) = await two.take(9)
        assert (a.data, a.deliveries) == (b"a", 3)
        assert await two.take(9) == []
        assert await two.ack(a) is Word.OK
        assert [each.data for each in await two.take(9)] == [b"e"]

    run(tmp_path, scenario)


def test_what_goes_out_alone_finds_a_worker_without_another_after_busy_ones(
    tmp_path: Path,
) -> None:
    """One is kept free for it already, and the first taker has another message."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        async with Peer(broker) as p2:
            one = Worker(p2, "w1")
            two, three, four = (Worker(peer, name) for name in ("w2", "w3", "w4"))
            await put(peer, b"a")
            await let_end_twice(three)
            (a,) = await three.take(1, wait_ms=20_000)
            await put(peer, b"b", b"c")
            assert len(await two.take(1)) == len(await one.take(1)) == 1
            assert await three.say(a, SettleVerb.RELEASE) is Word.OK
            assert await two.take(9) == []
            waiting = asyncio.create_task(one.take(9, wait_ms=20_000))
            await until(lambda: broker.context.queues.takers.count == 1)
            assert [each.data for each in await four.take(9)] == [b"a"]
            waiting.cancel()

    run(tmp_path, scenario)


@pytest.mark.slow
def test_a_worker_that_is_long_at_work_holds_up_no_message_for_ever(
    tmp_path: Path,
) -> None:
    """After a lease a message goes out beside others, and others beside it."""

    async def scenario(_broker: Broker, peer: Peer) -> None:
        await put(peer, b"a")
        worker = Worker(peer)
        await let_end_twice(worker)
        (a,) = await worker.take(9, wait_ms=20_000, lease_ms=60_000)
        await put(peer, b"b")
        (b,) = await worker.take(9, wait_ms=20_000, lease_ms=60_000)
        assert [a.data, b.data] == [b"a", b"b"]
        assert await worker.say(a, SettleVerb.RELEASE) is Word.OK
        (a,) = await worker.take(9, wait_ms=20_000, lease_ms=60_000)
        assert a.data == b"a"

    run(tmp_path, scenario, lease_ms=100)


@pytest.mark.parametrize(
    ("group", "topic", "status", "text"),
    [
        (
            "nobody",
            "test",
            503,
            "queue group 'nobody' is not defined here [not-defined]",
        ),
        ("workers", "meta-test", 500, "is of topic 'test', got 'meta-test'"),
    ],
)
def test_a_wrong_take_is_refused_in_one_sentence(
    tmp_path: Path, group: str, topic: str, status: int, text: str
) -> None:
    """Unknown groups, and groups of other topics."""

    async def scenario(_broker: Broker, peer: Peer) -> None:
        line = f"take {topic} {group} -1 1 100 5 worker=w1\r\n".encode()
        reply = (await peer.ask(line)).decode()
        assert reply.startswith(f"result {status} "), reply
        assert text in reply

    run(tmp_path, scenario)


def test_a_worker_that_goes_ends_its_takes(tmp_path: Path) -> None:
    """The messages that it gives back come to others alone."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        await put(peer, b"a")
        async with Peer(broker) as other:
            worker = Worker(peer)
            (got,) = await worker.take(1)
            second = Worker(other)  # the same worker, over another connection
            waiting = asyncio.create_task(second.take(1, wait_ms=20_000))
            await until(lambda: broker.context.queues.takers.count == 1)
            assert await worker.take(0) == []
            assert await waiting == []
            assert await worker.say(got, SettleVerb.RELEASE) is Word.OK
            assert (await Worker(other, "w2").take(1))[0].deliveries == 1

    run(tmp_path, scenario)


def test_a_closed_partition_gives_nothing_and_takes_settles(tmp_path: Path) -> None:
    """Until it is opened again."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        await put(peer, b"a", b"b")
        worker = Worker(peer)
        (got,) = await worker.take(1)
        broker.context.topics.close_partitions("test", start=0, end=0)
        assert await worker.take(1) == []
        reply = await worker.ask(worker.taking(1, 0))
        assert (reply.status, "has been closed" in reply.text) == (403, True)
        assert await worker.ack(got) is Word.OK
        broker.context.topics.open_partitions("test")
        assert [each.data for each in await worker.take(1)] == [b"b"]

    run(tmp_path, scenario)
