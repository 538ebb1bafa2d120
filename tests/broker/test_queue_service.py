"""Queue groups over a connection: takes, settles, leases, restarts, dead letters."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from metaq.broker.app import Broker
from metaq.protocol.queue_frames import Verb, Word
from metaq.record.flags import decode_payload
from metaq.retry import Backoff
from tests.broker.queue_worker import Worker, define, put, stored
from tests.rigs.broker import Peer, running_broker
from tests.rigs.waiting import until

Scenario = Callable[[Broker, Peer], Awaitable[None]]


@pytest.fixture(autouse=True)
def quick_reclaim(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are waited for during a tenth of a second."""
    monkeypatch.setattr("metaq.broker.queue_service.RECLAIM_MS", 100)
    monkeypatch.setattr("metaq.queues.state.RECLAIM_MS", 100)


def run(data: Path, scenario: Scenario, **settings: Any) -> None:
    async def main() -> None:
        async with running_broker(data) as broker, Peer(broker) as peer:
            define(broker, **settings)
            await scenario(broker, peer)

    asyncio.run(main())


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
            assert await two.say(second[0], Verb.RELEASE) is Word.OK
            again = await one.take(9)
            assert [(each.data, each.deliveries) for each in again] == [(b"c", 1)]
            assert await two.ack(second[0]) is Word.LOST
            assert await one.ack(again[0]) is Word.OK
            assert await one.ack(again[0]) is Word.DONE
            assert await one.take(9) == []

    run(tmp_path, scenario)


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


def test_a_nack_gives_a_message_out_again_after_its_delay(tmp_path: Path) -> None:
    """The delivery counts, and a waiting take gets it when it is due."""

    async def scenario(_broker: Broker, peer: Peer) -> None:
        await put(peer, b"a")
        worker = Worker(peer)
        (got,) = await worker.take(1)
        assert await worker.say(got, Verb.NACK, 60) is Word.OK
        assert await worker.take(1) == []
        (again,) = await worker.take(1, wait_ms=20_000)
        assert (again.data, again.deliveries) == (b"a", 2)
        assert again.delivery > got.delivery

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


def test_an_extended_lease_goes_on(tmp_path: Path) -> None:
    """A handler that takes long keeps its message."""

    async def scenario(_broker: Broker, peer: Peer) -> None:
        await put(peer, b"a")
        worker = Worker(peer)
        (got,) = await worker.take(1, lease_ms=80)
        assert await worker.say(got, Verb.EXTEND, 60_000) is Word.OK
        assert await worker.take(1, wait_ms=200) == []
        assert await worker.ack(got) is Word.OK

    run(tmp_path, scenario)


def test_a_worker_that_is_cut_off_keeps_its_messages_when_it_is_back(
    tmp_path: Path,
) -> None:
    """Its leases end a moment after its connection; a new one in time keeps them."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        await put(peer, b"kept", b"lost")
        async with Peer(broker) as gone:
            (kept,) = await Worker(gone, "w1").take(1)
        async with Peer(broker) as back:
            worker = Worker(back, "w1")
            assert await worker.say(kept, Verb.EXTEND, 30_000) is Word.OK
            assert [g.data for g in await worker.take(9, wait_ms=300)] == [b"lost"]
            assert await worker.ack(kept) is Word.OK
        async with Peer(broker) as other:
            (again,) = await Worker(other, "w2").take(9, wait_ms=20_000)
            assert (again.data, again.deliveries) == (b"lost", 2)

    run(tmp_path, scenario)


def test_a_rejected_message_is_a_dead_letter_and_done_or_neither(
    tmp_path: Path,
) -> None:
    """The letter has the message, its origin and the reason."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        await put(peer, b"bad", b"good")
        worker = Worker(peer)
        bad, _good = await worker.take(2)
        assert await worker.say(bad, Verb.REJECT, text="no number") is Word.OK
        (letter,) = await stored(broker, "meta-test", 1)
        message = decode_payload(letter.payload, letter.flag)
        assert message.data == b"bad"
        headers = dict(message.headers)
        assert headers["dead-letter.cause"] == b"rejected: no number"
        assert headers["dead-letter.origin"] == b"test/0-0@0"
        assert headers["dead-letter.group"] == b"workers"
        assert await worker.ack(bad) is Word.DONE

    run(tmp_path, scenario, dead_letter_topic="meta-test")


def test_a_message_that_fails_too_often_is_a_dead_letter(tmp_path: Path) -> None:
    """The last delivery that is allowed ends there."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        await put(peer, b"bad")
        worker = Worker(peer)
        for number in (1, 2):
            (got,) = await worker.take(1, wait_ms=20_000)
            assert got.deliveries == number
            assert await worker.say(got, Verb.NACK, 0) is Word.OK
        assert await worker.take(1) == []
        (letter,) = await stored(broker, "meta-test", 1)
        headers = dict(decode_payload(letter.payload, letter.flag).headers)
        assert headers["dead-letter.cause"] == b"deliveries: 2"

    run(tmp_path, scenario, dead_letter_topic="meta-test", deliveries_max=2)


def test_a_dead_letter_that_nobody_takes_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the message is open and given to nobody, and a problem says so."""
    soon = Backoff(first_s=0.05, max_s=0.1)
    monkeypatch.setattr("metaq.broker.queue_letters.PATIENCE", soon)

    async def scenario(broker: Broker, peer: Peer) -> None:
        topics, queues = broker.context.topics, broker.context.queues
        await put(peer, b"bad")
        worker = Worker(peer)
        (bad,) = await worker.take(1)
        topics.close_partitions("meta-test", start=0, end=None)
        assert await worker.say(bad, Verb.REJECT, text="x") is Word.LATER
        assert "meta-test" in queues.problems()[0]
        assert await worker.take(1) == []
        topics.open_partitions("meta-test")
        await until(lambda: not queues.problems())
        assert len(await stored(broker, "meta-test", 1)) == 1

    run(tmp_path, scenario, dead_letter_topic="meta-test")


def test_a_restart_knows_what_is_done_and_how_often_the_rest_was_given(
    tmp_path: Path,
) -> None:
    """Acked messages are never given out again; counts go on."""

    async def before() -> tuple[Any, Any]:
        async with running_broker(tmp_path) as broker, Peer(broker) as peer:
            define(broker)
            await put(peer, b"a", b"b", b"c", b"d")
            worker = Worker(peer)
            a, b, c, d = await worker.take(4)
            assert (
                await worker.settle(
                    0, [a.says(Verb.ACK), c.says(Verb.ACK), b.says(Verb.NACK, 0)]
                )
                == [Word.OK] * 3
            )
            return b, d

    async def after(b: Any, d: Any) -> None:
        async with running_broker(tmp_path) as broker, Peer(broker) as peer:
            define(broker)
            worker = Worker(peer)
            assert await worker.take(9) == []  # the reclaim time
            assert await worker.say(d, Verb.EXTEND, 30_000) is Word.OK
            (again,) = await worker.take(9, wait_ms=20_000)
            assert (again.data, again.deliveries) == (b"b", 2)
            assert again.delivery > max(b.delivery, d.delivery)
            assert await worker.ack(b) is Word.LOST
            assert await worker.ack(d) is Word.OK
            assert await worker.ack(again) is Word.OK
            assert await worker.take(9, wait_ms=50) == []

    b, d = asyncio.run(before())
    asyncio.run(after(b, d))


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


def test_a_group_that_starts_at_the_end_gets_what_comes_later(tmp_path: Path) -> None:
    """As of its definition, not of the first take; also after a restart."""

    async def main() -> None:
        async with running_broker(tmp_path) as broker, Peer(broker) as peer:
            await put(peer, b"before")
            define(broker, start="latest")
            await put(peer, b"after")
        async with running_broker(tmp_path) as broker, Peer(broker) as peer:
            define(broker, start="latest")
            got = await Worker(peer).take(9, wait_ms=20_000)
            assert [each.data for each in got] == [b"after"]

    asyncio.run(main())


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


def test_a_deleted_topic_takes_its_queues_along(tmp_path: Path) -> None:
    """A topic that is made again has none of what was done."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        queues = broker.context.queues
        await put(peer, b"a")
        worker = Worker(peer)
        (got,) = await worker.take(1)
        assert await worker.ack(got) is Word.OK
        queues.drop_topic("test")
        await until(lambda: not queues.lines())
        (again,) = await worker.take(1, wait_ms=20_000)
        assert (again.data, again.deliveries) == (b"a", 1)

    run(tmp_path, scenario)
