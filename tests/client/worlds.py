"""Both worlds of the client, through one set of blocking calls.

Tests are written once, as for the sync world. `AsyncWorld` makes the same calls to the
async client, on an event loop of its own.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

from metaq.client import AsyncClient, Client
from metaq.client.cluster.context import ClientContext
from metaq.client.session import context_of
from metaq.errors import ClosedError
from metaq.model import BrokerId, Message, TopicPartition
from metaq.testing.servers import BoundedLoopThread
from tests.rigs.inside import twin_of

QUICK: dict[str, Any] = {
    "reconnect_first_s": 0.005,
    "reconnect_max_s": 0.02,
    "metadata_s": 0.05,
}
"""Client options that let tests be short."""
IDLE: dict[str, Any] = {"idle_step_s": 0.01, "idle_max_s": 0.02}
"""The same for consumers of a broker without long poll."""

PLAIN_CALLS = {"assignment", "health", "statistics", "xid", "pause", "resume", "paused"}
"""Calls of the async world that are no coroutines."""


class AsyncWorldPart:
    """An object made from an async client, called from outside its loop."""

    def __init__(self, twin: Any, run: Callable[..., Any]) -> None:
        self.twin = twin
        self._run = run

    def __enter__(self) -> Self:
        self._run(self.twin.__aenter__())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._run(self.twin.__aexit__(kind, error, trace))

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.twin, name)
        if name in PLAIN_CALLS or not callable(value):
            return value
        return lambda *args, **named: self._run(value(*args, **named))

    def transaction(self, *args: Any, **named: Any) -> "AsyncWorldPart":
        async def make() -> Any:
            return self.twin.transaction(*args, **named)

        return AsyncWorldPart(self._run(make()), self._run)

    def exactly_once(self, batch: Any) -> "AsyncWorldPart":
        async def make() -> Any:
            return self.twin.exactly_once(getattr(batch, "twin", batch))

        return AsyncWorldPart(self._run(make()), self._run)

    def send_oneway(self, *args: Any, **named: Any) -> None:
        async def send() -> None:
            self.twin.send_oneway(*args, **named)

        self._run(send())


class AsyncWorldConsumer(AsyncWorldPart):
    """An async consumer."""

    def commit_nowait(self, *args: Any) -> Future[None]:
        async def begin() -> asyncio.Future[None]:
            future: asyncio.Future[None] = self.twin.commit_nowait(*args)
            return future

        future = self._run(begin())

        async def wait() -> None:
            await future

        return asyncio.run_coroutine_threadsafe(wait(), future.get_loop())

    def __iter__(self) -> Iterator[Message]:
        return self._steps(aiter(self.twin))

    def batches(self, **bounds: Any) -> Iterator[Any]:
        for batch in self._steps(self.twin.batches(**bounds)):
            yield AsyncWorldBatch(batch, self._run)

    def _steps(self, iterator: Any) -> Iterator[Any]:
        async def step() -> Any:
            return await anext(iterator, None)

        async def close() -> None:
            await iterator.aclose()

        try:
            while (one := self._run(step())) is not None:
                yield one
        finally:
            # A loop that was left open may outlive its client.
            with contextlib.suppress(ClosedError):
                self._run(close())


class AsyncWorldBatch(AsyncWorldPart):
    """A batch of an async consumer."""

    def __iter__(self) -> Iterator[Message]:
        return iter(self.twin)

    def __len__(self) -> int:
        return len(self.twin)

    def __getitem__(self, at: Any) -> Any:
        return self.twin[at]

    def __repr__(self) -> str:
        return repr(self.twin)


class AsyncWorldQueue(AsyncWorldConsumer):
    """An async worker of a queue group."""

    def __iter__(self) -> Iterator[Any]:
        for message in super().__iter__():
            yield AsyncWorldMessage(message, self._run)

    def receive(self, *args: Any) -> Any:
        message = self._run(self.twin.receive(*args))
        return None if message is None else AsyncWorldMessage(message, self._run)

    def receive_many(self, *args: Any) -> list[Any]:
        many = self._run(self.twin.receive_many(*args))
        return [AsyncWorldMessage(one, self._run) for one in many]

    def ack_many(self, messages: Any, *args: Any) -> None:
        self._run(self.twin.ack_many([one.twin for one in messages], *args))

    def run(self, handler: Callable[[Any], Any], **options: Any) -> None:
        async def handle(message: Any) -> None:
            await asyncio.to_thread(handler, AsyncWorldMessage(message, self._run))

        self._run(self.twin.run(handle, **options))


class AsyncWorldMessage(AsyncWorldPart):
    """A message of an async worker."""

    def ack_nowait(self) -> Future[None]:
        async def begin() -> asyncio.Future[None]:
            future: asyncio.Future[None] = self.twin.ack_nowait()
            return future

        future = self._run(begin())

        async def wait() -> None:
            await future

        return asyncio.run_coroutine_threadsafe(wait(), future.get_loop())


class AsyncWorldResponder(AsyncWorldPart):
    """An async responder."""

    def run(self, handler: Callable[[Any], Any], **options: Any) -> None:
        async def handle(message: Any) -> Any:
            return await asyncio.to_thread(handler, message)

        self._run(self.twin.run(handle, **options))


class AsyncWorld:
    """An async client, called from outside its loop; mirrors `Client`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._make = lambda: AsyncClient(*args, **options)

    def __enter__(self) -> Self:
        self._thread = BoundedLoopThread("async-world")
        self.twin = self.call(self._make)
        self.run(self.twin.start())
        return self

    def __exit__(self, *_error: object) -> None:
        try:
            self.run(self.twin.close())
        finally:
            self._thread.close()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._thread.run(work, timeout_s=120)

    def call(self, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        async def call() -> Any:
            return function(*args, **named)

        return self.run(call())

    def consumer(self, *args: Any, **options: Any) -> AsyncWorldConsumer:
        return AsyncWorldConsumer(
            self.call(self.twin.consumer, *args, **options), self.run
        )

    def queue(self, *args: Any, **options: Any) -> AsyncWorldQueue:
        return AsyncWorldQueue(self.call(self.twin.queue, *args, **options), self.run)

    def responder(self, *args: Any, **options: Any) -> AsyncWorldResponder:
        made = self.call(self.twin.responder, *args, **options)
        return AsyncWorldResponder(made, self.run)

    def producer(self, **options: Any) -> AsyncWorldPart:
        return AsyncWorldPart(self.call(self.twin.producer, **options), self.run)

    def xa(self, *args: Any, **options: Any) -> AsyncWorldPart:
        return AsyncWorldPart(self.call(self.twin.xa, *args, **options), self.run)

    def exchange(self, *args: Any, **options: Any) -> AsyncWorldPart:
        return AsyncWorldPart(self.call(self.twin.exchange, *args, **options), self.run)

    def admin(self) -> AsyncWorldPart:
        return AsyncWorldPart(self.call(self.twin.admin), self.run)

    def ordered_producer(self, *args: Any, **options: Any) -> AsyncWorldPart:
        made = self.call(self.twin.ordered_producer, *args, **options)
        return AsyncWorldPart(made, self.run)

    def browse(self, *args: Any, **options: Any) -> Iterator[Message]:
        return self._iterate(self.call(self.twin.browse, *args, **options))

    def find(self, *args: Any, **options: Any) -> Iterator[Message]:
        return self._iterate(self.call(self.twin.find, *args, **options))

    def _iterate(self, iterator: Any) -> Iterator[Message]:

        async def step() -> Message | None:
            return await anext(iterator, None)

        try:
            while (message := self.run(step())) is not None:
                yield message
        finally:
            self.run(iterator.aclose())

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **named: self.run(getattr(self.twin, name)(*args, **named))


def parts_of(client: Client | AsyncClient | AsyncWorld) -> ClientContext:
    """Return the parts of a started client of either world."""
    if isinstance(client, AsyncClient):
        return context_of(client)
    return context_of(twin_of(client) if isinstance(client, Client) else client.twin)


WORLDS: dict[str, Any] = {"sync": Client, "async": AsyncWorld}


def partition(number: int = 0, topic: str = "test") -> TopicPartition:
    return TopicPartition(topic, BrokerId(0), number)


def take(consumer: Any, count: int) -> list[Message]:
    """Return so many messages from a loop; the last one stays current."""
    found: list[Message] = []
    for message in consumer:
        found.append(message)
        if len(found) == count:
            break
    return found


def payloads(messages: list[Message]) -> list[bytes]:
    return [message.data for message in messages]
