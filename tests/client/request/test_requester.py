"""Requests and their replies: in both worlds, in parallel, in time and too late."""

import asyncio
import contextlib
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from metaq.client import (
    AsyncClient,
    Client,
    ClosedError,
    ConfigError,
    CoordinationError,
    ErrorReply,
    NoBrokerError,
    NoMailboxError,
    NoTopicError,
    ReplyTimeoutError,
)
from metaq.client.request.requester import Requester, RequestStatistics
from metaq.client.session import context_of
from metaq.cluster_snapshot import BrokerCopies
from metaq.model import BrokerAddress, BrokerId, Offset
from metaq.protocol.commands import Listen, Value
from metaq.protocol.version import Capabilities
from metaq.record.reply_to import encode_reply
from metaq.record.runs import RecordRun, encode_runs
from metaq.testing.embedded import EmbeddedBroker
from metaq.testing.fake_broker import FakeBroker
from metaq.testing.zk import MemoryZooKeeper
from tests.client.request.conftest import responding
from tests.client.scripted import CLOCK
from tests.client.worlds import QUICK, WORLDS
from tests.rigs.waiting import until, wait_until

ONE_BROKER = {
    "test_a_reply_is_what_the_handler_returned": "MetaQ has no queue groups",
    "test_replies_find_their_requests": "MetaQ has no queue groups",
    "test_a_request_without_a_responder_ends_in_time": "MetaQ has no mailboxes",
    "test_a_request_that_expired_is_not_handled": "MetaQ has no queue groups",
    "test_a_broken_connection_loses_no_reply": "MetaQ has no queue groups",
    "test_a_restart_of_the_broker_loses_what_waits_and_no_more": "MetaQ has none",
    "test_another_broker_takes_the_mailbox_over": "two of ours",
    "test_requests_are_counted_also_those_whose_reply_is_late": "MetaQ has no queues",
    "test_a_request_that_waits_ends_with_the_client": "MetaQ has no mailboxes",
    "test_a_request_without_a_mailbox_ends_with_the_client": "likewise",
    "test_bad_input_is_refused_before_anything_is_sent": "MetaQ has no mailboxes",
    "test_a_broker_without_mailboxes_is_named": "says of itself that it has none",
}


@pytest.mark.slow
def test_a_reply_is_what_the_handler_returned(client: Any) -> None:
    """Any bytes, also none; headers, key and tag arrive."""

    def echo(message: Any) -> bytes:
        assert message.key == b"k"
        assert message.headers["from"] == b"test"
        assert message.tag == "eu"
        return bytes(message.data)

    with responding(client, echo):
        for data in (b"", b"ACME", bytes(range(256)) * 100):
            more: Any = {"key": "k", "headers": {"from": b"test"}, "tag": "eu"}
            reply = client.request("prices", data, timeout=30, **more)
            assert reply == data


@pytest.mark.slow
def test_replies_find_their_requests(client: Any) -> None:
    """Any number at once over one connection, answered in any order."""
    late = threading.Barrier(4, timeout=30)

    def double(message: Any) -> bytes:
        if message.data.startswith(b"slow"):
            late.wait()
        return bytes(message.data) * 2

    wanted = [b"slow%d" % n for n in range(4)] + [b"%d" % n for n in range(40)]
    with (
        responding(client, double, concurrency=8),
        ThreadPoolExecutor(len(wanted)) as threads,
    ):
        replies = threads.map(
            lambda data: client.request("prices", data, timeout=30), wanted
        )
        assert [*replies] == [data * 2 for data in wanted]


@pytest.mark.slow
def test_a_request_without_a_responder_ends_in_time(client: Any) -> None:
    """The sentence says that it may have been handled."""
    text = r"topic 'prices': no reply within 2 s; it may have been handled"
    with pytest.raises(ReplyTimeoutError, match=text):
        client.request("prices", b"ACME", timeout=2)


@pytest.mark.slow
def test_a_request_that_expired_is_not_handled(client: Any) -> None:
    """It expires with its time-out: a responder that comes later has other work."""
    with pytest.raises(ReplyTimeoutError):
        client.request("prices", b"late", timeout=2)
    handled = Counter[bytes]()

    def note(message: Any) -> bytes:
        handled[message.data] += 1
        return b""

    with responding(client, note):
        client.request("prices", b"in time", timeout=30)
    assert handled == {b"in time": 1}


class Wire:
    """A connection and a producer, and in which order they were used."""

    def __init__(self, *, is_silent: bool = False) -> None:
        self.sent: list[str] = []
        self.brokers: list[BrokerId] = []
        self.address = BrokerAddress("localhost", 1)
        self._is_silent = is_silent
        self.capabilities = Capabilities("test", mailbox=True, wait_ms_max=10_000)
        self._replies = asyncio.Queue[bytes]()

    def next_opaque(self) -> int:
        return len(self.sent)

    async def call(self, command: Listen, **_more: Any) -> Value:
        self.sent.append("listen")
        if self._is_silent:
            await asyncio.Event().wait()
        runs = list[RecordRun]()
        if command.wait_ms:
            data = encode_reply(await self._replies.get())
            runs.append(RecordRun(Offset(self.sent.count("put")), data))
        return Value(encode_runs(runs), command.opaque)

    async def send(self, _topic: str, data: bytes, **_more: Any) -> None:
        self.sent.append("put")
        self._replies.put_nowait(data)

    async def close(self, _timeout: float | None) -> None:
        pass


def requester_of(
    wire: Any, limit_s: float, *, token: str = "0" * 32, brokers: int = 1
) -> Requester:
    """Return a requester whose brokers are all one wire, which notes their ids."""

    async def found(*_args: Any, **_more: Any) -> Any:
        return SimpleNamespace(exchanges=frozenset())

    async def reach(*_args: Any) -> float:
        return CLOCK.monotonic_s() + limit_s

    async def connect(broker_id: BrokerId, _deadline_s: float) -> Any:
        wire.brokers.append(broker_id)
        return wire

    copies = {BrokerId(n): BrokerCopies(wire.address, {}) for n in range(brokers)}
    context: Any = SimpleNamespace(
        clock=CLOCK,
        place="here",
        make_producer=lambda *_: wire,
        draw_token=lambda: token,
        limit_s=lambda _timeout: limit_s,
        reach=reach,
        deadline_s=lambda: CLOCK.monotonic_s() + 30,
        connect_leader=connect,
        metadata=SimpleNamespace(topic=found, snapshot=SimpleNamespace(brokers=copies)),
    )
    return Requester(context, RequestStatistics())


def test_the_mailboxes_of_many_clients_are_spread_over_the_brokers() -> None:
    """By their names, which are drawn at random."""

    async def scenario() -> None:
        found = list[int]()
        for number in range(3):
            wire, token = Wire(), f"{number:08x}" + "0" * 24
            requester = requester_of(wire, 30, token=token, brokers=3)
            await requester.request("t", b"x", key=None, headers=(), timeout=None)
            await requester.close()
            found += wire.brokers
        assert found == [0, 1, 2]

    asyncio.run(scenario())


def test_a_request_that_follows_a_reply_leaves_before_the_next_listen() -> None:
    """The broker begins with what is waited for."""

    async def scenario() -> None:
        wire: Any = Wire()
        requester = requester_of(wire, 30.0)
        more: Any = {"key": None, "headers": None, "timeout": None}
        for data in (b"first", b"second"):
            assert await requester.request("prices", data, **more) == data
        await until(lambda: len(wire.sent) == 6)
        assert wire.sent == ["listen", "listen", "put", "put", "listen", "listen"]
        await requester.close()

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_broker_that_does_not_answer_is_named() -> None:
    """It is there: nothing was sent, because the mailbox is not open."""

    async def scenario() -> None:
        wire: Any = Wire(is_silent=True)
        requester = requester_of(wire, 0.2)
        more: Any = {"key": None, "headers": None, "timeout": None}
        with pytest.raises(NoBrokerError, match="localhost:1: the broker does not"):
            await requester.request("prices", b"x", **more)
        assert wire.sent == ["listen"]
        await requester.close()

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_broken_connection_loses_no_reply(broker: EmbeddedBroker) -> None:
    """The mailbox is kept for as long as it takes to connect again."""

    async def scenario() -> None:
        async with (
            AsyncClient(**broker.client_options, **QUICK) as client,
            AsyncClient(**broker.client_options, **QUICK) as other,
        ):
            cut = asyncio.Event()

            async def handle(_message: Any) -> bytes:
                await cut.wait()
                return b"after all"

            responder = other.responder("prices", group="quotes")
            answering = asyncio.create_task(responder.run(handle))
            reply = asyncio.create_task(client.request("prices", b"ACME", timeout=30))
            await until(lambda: responder.queue.statistics().taken_count)
            context = context_of(client)
            address = context.address_of(BrokerId(0))
            assert address is not None
            connection = context.pool.ready(address)
            assert connection is not None
            connection.close("cut by the test")
            cut.set()
            assert await reply == b"after all"
            await responder.close()
            await answering

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_restart_of_the_broker_loses_what_waits_and_no_more(
    client: Any, broker: EmbeddedBroker
) -> None:
    """A request that was sent before ends in time; the next one has its reply."""
    begun, goes_on = threading.Event(), threading.Event()

    def wait(message: Any) -> bytes:
        if message.data == b"before":
            begun.set()
            assert goes_on.wait(30)
        return b"done"

    with responding(client, wait, concurrency=2), ThreadPoolExecutor(1) as threads:
        assert client.request("prices", b"first", timeout=30) == b"done"
        reply = threads.submit(client.request, "prices", b"before", timeout=2)
        assert begun.wait(30)
        broker.restart()
        goes_on.set()
        assert client.request("prices", b"after", timeout=30) == b"done"
        # Its handler was asked again, or its mailbox was open again in time.
        with contextlib.suppress(ReplyTimeoutError):
            assert reply.result(30) == b"done"


@pytest.mark.slow
def test_another_broker_takes_the_mailbox_over(tmp_path: Path) -> None:
    """Requests that follow have their replies there, and those before end in time."""
    zookeeper = MemoryZooKeeper()
    brokers = [
        EmbeddedBroker(
            tmp_path / str(number),
            topics={"prices": 1},
            zookeeper=zookeeper,
            settings={"brokerId": str(number)},
        )
        for number in range(2)
    ]
    with contextlib.ExitStack() as stack:
        for each in brokers:
            stack.enter_context(each)
        client = stack.enter_context(Client(**brokers[0].client_options, **QUICK))
        with responding(client, lambda message: message.data):
            places = set[bytes]()
            for _ in range(2):
                assert client.request("prices", b"a", timeout=30) == b"a"
                last = max(client.browse("prices", partial=True), key=lambda m: m.id)
                places.add(last.headers["reply-to"].partition(b"/")[0])
                if len(places) == 1:
                    brokers[int(next(iter(places)))].stop()
            assert len(places) == 2


@pytest.mark.parametrize("world", ["sync", "async"])
def test_a_request_that_waits_ends_with_the_client(
    world: str, broker: EmbeddedBroker
) -> None:
    """With `ClosedError`, at once."""
    with ThreadPoolExecutor(1) as threads:
        with WORLDS[world](**broker.client_options, **QUICK) as client:
            reply = threads.submit(client.request, "prices", b"ACME", timeout=30)
            wait_until(lambda: [*client.browse("prices")])
        with pytest.raises(ClosedError):
            reply.result(10)


@pytest.mark.slow
def test_a_request_without_a_mailbox_ends_with_the_client(
    broker: EmbeddedBroker,
) -> None:
    """Likewise, and not with its time-out: the broker is away, and is waited for."""

    async def main() -> None:
        async with AsyncClient(**broker.client_options, **QUICK) as client:
            await asyncio.to_thread(broker.stop)
            waiting = client.request("prices", b"ACME", timeout=30)
            request = asyncio.ensure_future(waiting)
            await asyncio.sleep(0.3)
            assert not request.done()
        with pytest.raises(ClosedError):
            await asyncio.wait_for(request, 10)

    asyncio.run(main())
    broker.start()


@pytest.mark.slow
def test_a_broker_without_mailboxes_is_named() -> None:
    """One of MetaQ 1.4 has none; nothing is sent."""
    with (
        FakeBroker({"prices": 1}) as metaq,
        Client(brokers=[str(metaq.address)], **QUICK) as client,
        pytest.raises(NoMailboxError, match="broker 0: it has no mailboxes"),
    ):
        client.request("prices", b"ACME", timeout=5)


@pytest.mark.slow
def test_without_zookeeper_the_error_says_so() -> None:
    """And nothing of brokers, of which nothing is known."""
    with (
        Client("127.0.0.1:1") as client,
        pytest.raises(CoordinationError, match="ZooKeeper"),
    ):
        client.request("prices", b"ACME", timeout=0.3)


@pytest.mark.slow
def test_without_a_broker_the_error_says_so(broker: EmbeddedBroker) -> None:
    """In the time of the request."""
    broker.stop()
    with (
        Client(**broker.client_options, **QUICK) as client,
        pytest.raises(NoBrokerError, match="no broker is present"),
    ):
        client.request("prices", b"ACME", timeout=2)
    broker.start()


@pytest.mark.slow
def test_a_handler_that_fails_is_an_error_reply(client: Any) -> None:
    """Its type and text arrive, also where it returned no bytes, or too many."""

    class UnprintableError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def handle(message: Any) -> Any:
        if message.data == b"raise":
            raise ValueError("no such price")
        if message.data == b"unprintable":
            raise UnprintableError
        return None if message.data == b"none" else b"x" * (1 << 20)

    with responding(client, handle):
        for data, text in {
            b"raise": "ValueError: no such price",
            b"unprintable": "UnprintableError",
            b"none": "TypeError: reply: expected bytes, got NoneType None",
            b"large": "ValueError: reply: expected at most 1048575 bytes, got 1048576",
        }.items():
            with pytest.raises(ErrorReply, match=text) as caught:
                client.request("prices", data, timeout=30)
            assert caught.value.text == text


def test_a_reply_may_be_any_bytes(client: Any) -> None:
    """As what a producer sends."""
    kinds = {b"a": bytearray, b"m": memoryview}
    with responding(client, lambda message: kinds[message.data](message.data)):
        for data in kinds:
            assert client.request("prices", data, timeout=30) == data


@pytest.mark.slow
def test_requests_are_counted_also_those_whose_reply_is_late(
    broker: EmbeddedBroker,
) -> None:
    """A reply goes to its mailbox after its time, too: clocks differ."""

    def counts() -> RequestStatistics | None:
        return client.statistics().requests

    late = threading.Event()

    def handle(message: Any) -> bytes:
        if message.data == b"late":
            assert late.wait(30)
        return bytes(message.data)

    wanted = RequestStatistics(
        sent_count=2, answered_count=1, timed_out_count=1, late_count=1
    )
    with Client(**broker.client_options, **QUICK) as client:
        assert counts() is None
        with responding(client, handle):
            with pytest.raises(ReplyTimeoutError):
                client.request("prices", b"late", timeout=2)
            late.set()
            client.request("prices", b"a", timeout=30)
            wait_until(lambda: counts() == wanted)


@pytest.mark.slow
def test_bad_input_is_refused_before_anything_is_sent(client: Any) -> None:
    """By the names of the arguments; an unknown topic is named."""
    with pytest.raises(ConfigError, match="timeout: expected more than 0"):
        client.request("prices", b"ACME", timeout=0)
    with pytest.raises(ConfigError, match="timeout"):
        client.request("prices", b"ACME", timeout=-1)
    with pytest.raises(TypeError, match="header"):
        client.request("prices", b"ACME", headers={"a": "b"}, timeout=1)
    with pytest.raises(NoTopicError, match="prizes"):
        client.request("prizes", b"ACME", timeout=1)
    with pytest.raises(TypeError, match="data"):
        client.request("prices", "ACME", timeout=1)
