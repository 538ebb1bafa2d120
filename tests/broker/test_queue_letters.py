"""Dead letters: there, and the end of the message here, or neither."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from metaq.broker.app import Broker
from metaq.errors import ClosedError, UnavailableError
from metaq.model import Offset
from metaq.protocol.queue_frames import SettleVerb, Word
from metaq.record.flags import decode_payload
from metaq.record.layout import Record
from tests.broker.queue_worker import Worker, define, put, queue_of, run, stored
from tests.rigs.broker import Peer
from tests.rigs.waiting import until


def test_a_rejected_message_is_a_dead_letter_and_done_or_neither(
    tmp_path: Path,
) -> None:
    """The letter has the message, its origin and the reason."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        await put(peer, b"bad", b"good")
        worker = Worker(peer)
        bad, _good = await worker.take(2)
        assert await worker.say(bad, SettleVerb.REJECT, text="no number") is Word.OK
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
            assert await worker.say(got, SettleVerb.NACK, 0) is Word.OK
        assert await worker.take(1) == []
        (letter,) = await stored(broker, "meta-test", 1)
        headers = dict(decode_payload(letter.payload, letter.flag).headers)
        assert headers["dead-letter.cause"] == b"deliveries: 2"

    run(tmp_path, scenario, dead_letter_topic="meta-test", deliveries_max=2)


def test_an_expired_message_is_a_dead_letter_and_others_go_out(tmp_path: Path) -> None:
    """Also one that fills whole takes; the letter does not expire."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        await put(peer, *[b"late"] * 40, headers={"expires-in": b"0", "a": b"1"})
        await put(peer, b"good", headers={"expires-in": b"60000"})
        worker = Worker(peer)
        (got,) = await worker.take(9, wait_ms=20_000)
        assert got.data == b"good"
        letters = await until_stored(broker, "meta-test", 40)
        headers = dict(decode_payload(letters[0].payload, letters[0].flag).headers)
        assert headers["dead-letter.cause"] == b"expired"
        assert headers["dead-letter.attempts"] == b"0"
        assert headers["a"] == b"1"
        assert "expires-in" not in headers
        assert await worker.ack(got) is Word.OK
        assert queue_of(broker).state.floor == queue_of(broker).log.high_watermark

    run(tmp_path, scenario, dead_letter_topic="meta-test")


async def until_stored(broker: Broker, topic: str, count: int) -> list[Record]:
    """Wait for so many letters, and for the ends of their messages."""
    state = queue_of(broker).state
    await until(lambda: state.letter_count == count)
    return [each for number in range(4) for each in await stored(broker, topic, number)]


def test_expired_messages_are_dropped_where_the_group_says_so(tmp_path: Path) -> None:
    """Counted as dropped; a taker that finds nothing else waits on."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        await put(peer, b"late", b"late", headers={"expires-in": b"0"})
        worker = Worker(peer)

        async def finds_none() -> bool:
            assert await worker.take(1, wait_ms=50) == []
            return bool(queue_of(broker).state.dropped_count)

        await until(finds_none)  # first the queue is opened
        state = queue_of(broker).state
        assert (state.dropped_count, state.open_count) == (2, 0)
        assert state.floor == queue_of(broker).log.high_watermark

    run(tmp_path, scenario)


@pytest.mark.slow
def test_a_dead_letter_that_its_topic_refuses_is_tried_again(tmp_path: Path) -> None:
    """Until then the message is open and not given out, and a problem says so."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        topics, queues = broker.context.topics, broker.context.queues
        await put(peer, b"bad")
        worker = Worker(peer)
        (bad,) = await worker.take(1)
        topics.close_partitions("meta-test", start=0, end=None)
        assert await worker.say(bad, SettleVerb.REJECT, text="x") is Word.LATER
        (problem,) = queues.problems()
        assert "meta-test" in problem
        assert "metaq topics alter" not in problem
        assert await worker.take(1) == []
        topics.open_partitions("meta-test")
        await until(lambda: not queues.problems())
        assert len(await stored(broker, "meta-test", 1)) == 1

    run(tmp_path, scenario, dead_letter_topic="meta-test")


@pytest.mark.slow
def test_the_state_is_written_whole_while_a_letter_waits(tmp_path: Path) -> None:
    """`__queues` is trimmed however long the topic refuses it."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        topics, outcomes = broker.context.topics, list[object]()
        await put(peer, b"bad")
        worker = Worker(peer)
        (bad,) = await worker.take(1)
        topics.close_partitions("meta-test", start=0, end=None)
        assert await worker.say(bad, SettleVerb.REJECT, text="x") is Word.LATER
        queue = queue_of(broker)
        assert (queue.letters_open, queue.letters_tried) == (1, 0)
        queue.snapshot(broker.context.queues.now(), outcomes.append)
        await until(lambda: outcomes)
        assert outcomes == [None]
        topics.open_partitions("meta-test")
        await until(lambda: not queue.letters_open)
        assert len(await stored(broker, "meta-test", 1)) == 1

    run(tmp_path, scenario, dead_letter_topic="meta-test")


@pytest.mark.slow
def test_letters_that_wait_go_where_an_altered_group_says(tmp_path: Path) -> None:
    """To another topic, or nowhere; then nothing is wrong any more."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        queues = broker.context.queues
        assert queues is not None
        await put(peer, b"one", b"two")
        worker = Worker(peer)
        one, two = await worker.take(2)
        assert await worker.say(one, SettleVerb.REJECT, text="x") is Word.LATER
        (problem,) = queues.problems()
        assert "'metaq topics alter nowhere --brokers all'" in problem
        define(broker, dead_letter_topic="meta-test")
        await until(lambda: not queues.problems())
        (letter,) = await stored(broker, "meta-test", 1)
        assert decode_payload(letter.payload, letter.flag).data == b"one"
        define(broker, dead_letter_topic="nowhere")
        assert await worker.say(two, SettleVerb.REJECT, text="x") is Word.LATER
        define(broker)
        await until(lambda: not queues.problems())
        queue = queue_of(broker)
        assert queue.state.floor == queue.log.high_watermark
        assert (queue.state.dropped_count, queue.state.letter_count) == (1, 1)
        assert await stored(broker, "meta-test", 1) == [letter]

    run(tmp_path, scenario, dead_letter_topic="nowhere")


@pytest.mark.slow
def test_a_letter_whose_message_retention_took_is_given_up(tmp_path: Path) -> None:
    """It cannot be made any more; nothing waits for it, and no problem stays."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        topics, queues = broker.context.topics, broker.context.queues
        assert queues is not None
        await put(peer, *[b"%05d" % n for n in range(60)])
        worker = Worker(peer)
        (bad,) = await worker.take(1)
        topics.close_partitions("meta-test", start=0, end=None)
        assert await worker.say(bad, SettleVerb.REJECT, text="x") is Word.LATER
        queue = queue_of(broker)
        queue.log.on_removed(queue.log.segments.first, 0)
        await until(lambda: not queues.problems())
        assert queue.letters_open == 0

    run(
        tmp_path,
        scenario,
        broker={"maxSegmentSize": "1000"},
        dead_letter_topic="meta-test",
    )


@pytest.mark.slow
def test_a_message_that_is_read_for_its_letter_while_queues_are_read_again(
    tmp_path: Path,
) -> None:
    """It is given out again, and has no letter beside that."""
    begun, goes_on = asyncio.Event(), asyncio.Event()

    async def scenario(broker: Broker, peer: Peer) -> None:
        await put(peer, b"bad")
        worker = Worker(peer)
        (bad,) = await worker.take(1)
        queue: Any = queue_of(broker)
        read = queue.read

        async def read_late(start: Offset, end: Offset) -> bytes:
            data = await read(start, end)
            begun.set()
            await goes_on.wait()
            return bytes(data)

        queue.read = read_late
        reject = worker.settling(0, [bad.says(SettleVerb.REJECT)])
        rejecting = asyncio.create_task(worker.ask(reject))
        await begun.wait()
        queues = broker.context.queues
        assert queues is not None
        queues.fail(ClosedError("a test"))
        async with Peer(broker) as other:
            second = Worker(other, "w2")
            await until(lambda: is_read(broker))
            goes_on.set()
            await rejecting
            (again,) = await second.take(1, wait_ms=20_000)
            assert await second.ack(again) is Word.OK
        letters = [await stored(broker, "meta-test", number) for number in range(4)]
        assert letters == [[]] * 4

    run(tmp_path, scenario, dead_letter_topic="meta-test")


def is_read(broker: Broker) -> bool:
    """Return whether the queues are in memory again."""
    try:
        queue_of(broker)
    except UnavailableError:
        return False
    return True
