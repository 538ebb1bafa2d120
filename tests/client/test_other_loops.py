"""A client and all its objects refuse calls on another event loop."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from metaq.client import AsyncClient, OutcomeUnknownError
from metaq.errors import ClosedError
from metaq.model import BrokerId, Offset, TopicPartition
from tests.brokers import AnyBroker, StartBroker
from tests.client.worlds import IDLE, QUICK

SENTENCE = "belongs to the event loop that its client was started on"
PART = TopicPartition("test", BrokerId(0), 0)


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    return start_broker()


class Made:
    """A client with all that can be made from it."""

    def __init__(self, broker: AnyBroker, directory: Any) -> None:
        self.directory = directory
        self.client = AsyncClient(brokers=[broker.address], **QUICK)

    async def start(self) -> None:
        await self.client.start()
        self.producer = self.client.producer()
        await self.producer.send("test", b"0")
        self.consumer = self.client.consumer("g", ["test"], **IDLE)
        await self.consumer.start()
        self.fresh = self.client.consumer("g", ["test"], **IDLE)
        self.ordered = self.client.ordered_producer("test", "0:1", self.directory)

    def calls(self) -> dict[str, Callable[[], Awaitable[object]]]:
        """Return everything that waits, or makes something that does."""
        client, producer, consumer = self.client, self.producer, self.consumer

        async def make(function: Callable[..., object], *args: Any) -> None:
            function(*args)

        return {
            "producer": lambda: make(client.producer),
            "consumer": lambda: make(client.consumer, "g", ["test"]),
            "ordered_producer": lambda: make(
                client.ordered_producer, "test", "0:1", self.directory
            ),
            "browse": lambda: anext(client.browse("test")),
            "get": lambda: client.get("test", "0-0", Offset(0)),
            "topics": client.topics,
            "partitions": lambda: client.partitions("test"),
            "stats": client.stats,
            "close": client.close,
            "producer.prepare": lambda: producer.prepare("test"),
            "producer.send": lambda: producer.send("test", b"1"),
            "producer.send_nowait": lambda: producer.send_nowait("test", b"1"),
            "producer.send_many": lambda: producer.send_many("test", [b"1"]),
            "producer.send_oneway": lambda: make(producer.send_oneway, "test", b"1"),
            "producer.flush": producer.flush,
            "producer.close": producer.close,
            "consumer.start": self.fresh.start,
            "consumer.receive": consumer.receive,
            "consumer.receive_many": lambda: consumer.receive_many(3),
            "consumer.iterate": lambda: anext(aiter(consumer)),
            "consumer.run": lambda: consumer.run(lambda _message: asyncio.sleep(0)),
            "consumer.commit": consumer.commit,
            "consumer.seek": lambda: consumer.seek(PART, Offset(0)),
            "consumer.rollback": consumer.rollback,
            "consumer.lag": consumer.lag,
            "consumer.close": consumer.close,
            "ordered.start": self.ordered.start,
            "ordered.send": lambda: self.ordered.send(b"1"),
            "ordered.close": self.ordered.close,
        }


@contextlib.contextmanager
def started(broker: AnyBroker, directory: Any) -> Iterator[tuple[Made, Any]]:
    """Start a client on a loop that stands still afterwards."""
    made = Made(broker, directory)
    with asyncio.Runner() as own:
        own.run(made.start())
        yield made, own
        own.run(made.client.close())


async def silent_calls(calls: dict[str, Any]) -> dict[str, str]:
    """Return what every call did that did not name its own loop."""
    found = {}
    for name, call in calls.items():
        try:
            async with asyncio.timeout(60):
                result: object = await call()
        except Exception as error:
            result = error
        if not (isinstance(result, ClosedError) and SENTENCE in str(result)):
            found[name] = repr(result)
    return found


def test_every_call_on_another_loop_says_so(broker: AnyBroker, tmp_path: Any) -> None:
    """Its own stands still: timers would never fire, and waits never end."""
    with started(broker, tmp_path) as (made, own):
        with asyncio.Runner() as other:
            assert other.run(silent_calls(made.calls())) == {}
        # Nothing was taken, and it goes on where it belongs.
        own.run(made.producer.send("test", b"2"))
    assert broker.stored() == [b"0", b"2"]


def test_so_does_every_call_in_another_thread(broker: AnyBroker, tmp_path: Any) -> None:
    """There the own loop runs; what is shared without a lock does not bear it."""
    made = Made(broker, tmp_path)

    async def main() -> dict[str, str]:
        await made.start()
        found = await asyncio.to_thread(lambda: asyncio.run(silent_calls(made.calls())))
        await made.client.close()
        return found

    assert asyncio.run(main()) == {}


def test_a_thread_without_a_loop_is_named(broker: AnyBroker, tmp_path: Any) -> None:
    with (
        started(broker, tmp_path) as (made, _own),
        pytest.raises(ClosedError, match="none runs in this thread"),
    ):
        made.client.producer()


def test_the_outcome_of_a_message_is_not_waited_for_where_no_loop_brings_it(
    broker: AnyBroker, tmp_path: Any
) -> None:
    """A future may be awaited on any loop, as long as its own one runs."""
    with started(broker, tmp_path) as (made, own):
        future = own.run(made.producer.send_nowait("test", b"late"))

        async def wait() -> None:
            async with asyncio.timeout(60):
                await future

        with (
            asyncio.Runner() as other,
            pytest.raises(OutcomeUnknownError, match="loop of the client does no"),
        ):
            other.run(wait())
