"""A connection to a scripted broker, and a caller of its requests."""

import asyncio
import contextlib
import itertools
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from metaq.client.options import ClientOptions
from metaq.clock import Clock, SystemClock
from metaq.errors import MetaqError
from metaq.peer.connection import BrokerConnection
from metaq.peer.pool import open_connection
from metaq.protocol.commands import Command, Reply, Result, Stats, Version
from metaq.protocol.encoding import encode
from tests.client.scripted import ScriptedBroker, ok

CLOCK = SystemClock()
OPTIONS = ClientOptions()


def soon(seconds: float = 30.0) -> float:
    return CLOCK.monotonic_s() + seconds


@contextlib.asynccontextmanager
async def connected(
    broker: ScriptedBroker, options: ClientOptions = OPTIONS
) -> AsyncIterator[BrokerConnection]:
    connection = await open_connection(
        broker.address, clock=CLOCK, deadline_s=soon(), options=options
    )
    try:
        yield connection
    finally:
        connection.close("test over")


def run(
    scenario: Callable[[ScriptedBroker, BrokerConnection], Awaitable[None]],
    options: ClientOptions = OPTIONS,
) -> None:
    async def main() -> None:
        async with ScriptedBroker() as broker, connected(broker, options) as connection:
            await scenario(broker, connection)

    asyncio.run(main())


@contextlib.contextmanager
def lacking(place: object, name: str, times: int = sys.maxsize) -> Iterator[None]:
    """Let a function find no memory, for its first calls."""
    work, left = getattr(place, name), itertools.repeat(None, times)

    def lack(*args: Any, **more: Any) -> Any:
        for _ in left:
            raise MemoryError
        return work(*args, **more)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(place, name, lack)
        yield


class Asker:
    """Submits `stats <n>` requests and keeps what became of each, in order."""

    def __init__(self, connection: BrokerConnection, clock: Clock = CLOCK) -> None:
        self.connection = connection
        self.clock = clock
        self.outcomes: list[tuple[int, Reply | MetaqError]] = []

    def ask(
        self, number: int, *, seconds: float = 30.0, is_alone: bool = False
    ) -> None:
        opaque = self.connection.next_opaque()
        self.connection.submit(
            encode(Stats(str(number), opaque)),
            opaque,
            lambda outcome: self.outcomes.append((number, outcome)),
            deadline_s=self.clock.monotonic_s() + seconds,
            is_alone=is_alone,
        )


def silent(command: Command) -> Reply | None:
    return ok(command) if isinstance(command, Version) else None


def echo(command: Command) -> Reply | None:
    if isinstance(command, Stats) and command.item:
        return Result(200, command.item.encode(), command.opaque)
    return ok(command)
