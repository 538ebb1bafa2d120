"""One-way messages: what arrives, order, bound, and what is dropped."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from metaq.client.partitioner import OutgoingMessage
from metaq.client.produce.oneway import ONEWAY_WAITING_MAX, Handover, OnewayMessages
from metaq.errors import ClosedError, MetaqError, NoBrokerError
from metaq.loop_thread import LoopThread
from tests.brokers import StartBroker
from tests.client.worlds import QUICK, WORLDS
from tests.rigs.virtual_time import run_virtually


class Log:
    """Takes messages of any topic."""

    def __init__(self) -> None:
        self.appended: list[tuple[str, bytes]] = []

    def append(self, topic: str, message: OutgoingMessage) -> None:
        self.appended.append((topic, bytes(message.data)))


def messages_into(
    log: Log, prepare: Callable[[str], Awaitable[None]]
) -> OnewayMessages:
    return OnewayMessages(prepare=prepare, append=log.append)


async def nobody_serves(topic: str) -> None:
    await asyncio.sleep(1)
    raise NoBrokerError(f"topic {topic} has no partitions")


@pytest.mark.parametrize("world", WORLDS)
def test_a_one_way_message_arrives_as_it_was_when_it_was_sent(
    start_broker: StartBroker, world: str
) -> None:
    """As that of any other call; also the first one, which waits for its topic."""
    broker = start_broker({"test": 1})
    words: dict[str, Any] = {"attribute": "a", "key": "k"}
    with WORLDS[world](**broker.client_options, **QUICK) as client:
        with client.producer(in_flight_batches_max=1) as producer:
            for _ in range(2):
                headers = {"h": b"1"}
                producer.send_oneway("test", b"x", **words, headers=headers)
                headers["h"] = b"2"
                producer.send("test", b"x", **words, headers={"h": b"1"})
        found = [
            (one.data, one.attribute, one.key, dict(one.headers))
            for one in client.browse("test")
        ]
    assert found == [(b"x", "a", b"k", {"h": b"1"})] * 4


def test_messages_leave_in_order_when_their_topic_is_known() -> None:
    """One question per topic, however many messages wait for it."""

    async def main() -> None:
        asked: list[str] = []

        async def prepare(topic: str) -> None:
            asked.append(topic)
            await asyncio.sleep(1)

        log = Log()
        messages = messages_into(log, prepare)
        for topic, data in (("a", b"1"), ("b", b"2"), ("a", b"3")):
            messages.keep(topic, OutgoingMessage(data))
        await asyncio.sleep(2)
        assert asked == ["a", "b"]
        assert log.appended == [("a", b"1"), ("a", b"3"), ("b", b"2")]
        assert not messages.dropped

    run_virtually(main())


def test_what_was_dropped_takes_no_place_any_more() -> None:
    """The bound is on what waits now, also after a topic that never came."""

    async def main() -> None:
        messages = messages_into(Log(), nobody_serves)
        for _round in range(3):
            for number in range(ONEWAY_WAITING_MAX):
                messages.keep("ab"[number % 2], OutgoingMessage(b"1"))
            with pytest.raises(NoBrokerError, match="not known yet"):
                messages.keep("c", OutgoingMessage(b"3"))
            await asyncio.sleep(2)
        assert messages.dropped == {"NoBrokerError": 3 * ONEWAY_WAITING_MAX}

    run_virtually(main())


def test_a_close_waits_for_topics_that_come_in_its_time() -> None:
    async def main() -> None:
        async def prepare(_topic: str) -> None:
            await asyncio.sleep(1)

        log = Log()
        messages = messages_into(log, prepare)
        messages.keep("a", OutgoingMessage(b"1"))
        await messages.close(timeout_s=2)
        assert log.appended == [("a", b"1")]

    run_virtually(main())


def test_a_close_drops_what_waits_and_says_why() -> None:
    """Nothing is lost without being counted."""

    async def main() -> None:
        log = Log()
        messages = messages_into(log, nobody_serves)
        messages.keep("a", OutgoingMessage(b"1"))
        await asyncio.sleep(0.5)
        await messages.close(timeout_s=0.1)
        assert messages.dropped == {"ClosedError": 1}

    run_virtually(main())


def test_a_message_that_a_user_s_selector_fails_on_takes_no_other_along() -> None:
    """The selector's error has no hearer, so it is counted."""

    async def main() -> None:
        appended: list[bytes] = []

        def append(_topic: str, message: OutgoingMessage) -> None:
            if message.data == b"2":
                raise KeyError("as the test says")
            appended.append(bytes(message.data))

        async def prepare(_topic: str) -> None:
            await asyncio.sleep(1)

        messages = OnewayMessages(prepare=prepare, append=append)
        for data in (b"1", b"2", b"3"):
            messages.keep("a", OutgoingMessage(data))
        await messages.close(5)
        assert appended == [b"1", b"3"]
        assert messages.dropped == {"KeyError": 1}

    run_virtually(main())


def test_what_cannot_be_handed_over_is_dropped_alone() -> None:
    """A selector may raise in any world; later messages are not lost."""
    log, dropped = Log(), list[Exception]()
    is_busy, go_on, is_through = (threading.Event() for _ in range(3))

    def block() -> None:
        is_busy.set()
        go_on.wait(20)

    def send(topic: str, message: OutgoingMessage) -> None:
        if message.data == b"2":
            raise KeyError("as the test says")
        log.append(topic, message)

    thread = LoopThread("test")
    handover = Handover(thread.loop, send=send, drop=dropped.append)
    thread.loop.call_soon_threadsafe(block)
    assert is_busy.wait(20)
    for data in (b"1", b"2", b"3"):
        handover.put("a", OutgoingMessage(data))
    go_on.set()
    thread.loop.call_soon_threadsafe(is_through.set)
    assert is_through.wait(20)
    thread.stop()
    assert log.appended == [("a", b"1"), ("a", b"3")]
    assert [type(error) for error in dropped] == [KeyError]


def test_threads_hand_over_as_many_as_the_bound_allows() -> None:
    """A loop that is late is not flooded: more are dropped, the rest keep order."""
    given = [b"%d" % number for number in range(ONEWAY_WAITING_MAX + 2)]
    log, dropped = Log(), list[MetaqError]()
    is_busy, go_on, is_through = (threading.Event() for _ in range(3))

    def block() -> None:
        is_busy.set()
        go_on.wait(20)

    thread = LoopThread("test")
    handover = Handover(thread.loop, send=log.append, drop=dropped.append)
    thread.loop.call_soon_threadsafe(block)
    assert is_busy.wait(20)
    for data in given:
        handover.put("a", OutgoingMessage(data))
    assert [type(error).__name__ for error in dropped] == ["BufferFullError"] * 2
    go_on.set()
    thread.loop.call_soon_threadsafe(is_through.set)
    assert is_through.wait(20)
    handover.put("a", OutgoingMessage(b"last"))
    is_through.clear()
    thread.loop.call_soon_threadsafe(is_through.set)
    assert is_through.wait(20)
    assert log.appended == [("a", data) for data in (*given[:-2], b"last")]
    thread.stop()
    for _ in range(2):
        with pytest.raises(ClosedError):
            handover.put("a", OutgoingMessage(b"7"))


def test_an_interrupt_as_the_loop_is_told_keeps_no_later_message_back() -> None:
    """Ctrl-C in the thread that hands over."""
    log, is_through = Log(), threading.Event()
    thread = LoopThread("test")
    handover = Handover(thread.loop, send=log.append, drop=lambda _error: None)
    notify = thread.loop.call_soon_threadsafe

    def interrupted(*_words: object) -> asyncio.Handle:
        thread.loop.call_soon_threadsafe = notify  # type: ignore[method-assign]  # so it is called
        raise KeyboardInterrupt

    thread.loop.call_soon_threadsafe = interrupted  # type: ignore[method-assign]  # as above
    with pytest.raises(KeyboardInterrupt):
        handover.put("a", OutgoingMessage(b"1"))
    handover.put("a", OutgoingMessage(b"2"))
    notify(is_through.set)
    assert is_through.wait(20)
    thread.stop()
    assert log.appended == [("a", b"1"), ("a", b"2")]
