"""A broker on the test's event loop that sends the answers given by the test."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Self

import pytest

from metaq.clock import SystemClock
from metaq.errors import NoBrokerError
from metaq.model import BrokerAddress
from metaq.peer.pool import ConnectionPool
from metaq.protocol.commands import Command, Quit, Reply, Result, Stats, Version
from metaq.protocol.connection import NEED_DATA, Connection, Oversized, Role, WireLimits
from metaq.protocol.encoding import encode
from metaq.protocol.version import encode_version_body
from tests.client.memory_broker import OURS
from tests.rigs.ports import reserved_port
from tests.rigs.waiting import until

CLOCK = SystemClock()
TIMEOUT_S = 30.0
SHORT_S = 0.05
"""Of calls that are bound to time out."""


async def refusal(pool: ConnectionPool, address: BrokerAddress) -> str:
    """Return the pool's error for an address without a listener, after an attempt."""
    before = pool.statistics().failure_count
    while True:
        has_tried = pool.statistics().failure_count > before
        with pytest.raises(NoBrokerError) as caught:
            await pool.get(address, deadline_s=CLOCK.monotonic_s() + SHORT_S)
        if has_tried:
            return str(caught.value)


def ok(command: Command) -> Reply | None:
    """Answer a version and a stats as a broker, everything else with an empty 200."""
    assert not isinstance(command, Quit)
    if isinstance(command, Version):
        return Result(200, encode_version_body(OURS).encode(), command.opaque)
    if isinstance(command, Stats) and not command.item:
        return Result(200, b"STATS\r\nbroker_id 7\r\nEND\r\n", command.opaque)
    return Result(200, b"", command.opaque)


class Talk(asyncio.Protocol):
    """One connection, from the broker's side."""

    def __init__(self, broker: "ScriptedBroker") -> None:
        self.broker = broker
        self.connection = Connection(Role.SERVER, WireLimits())
        self.read_count = 0
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.broker.accepted_count += 1
        self.broker.talks.append(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.broker.talks.remove(self)
        self.broker.ends.append(exc)

    def data_received(self, data: bytes) -> None:
        self.read_count += 1
        self.connection.receive_data(data)
        while (command := self.connection.next_event()) is not NEED_DATA:
            assert not isinstance(command, Oversized)
            self.broker.commands.append(command)
            reply = self.broker.answer(command)
            if reply is not None:
                self.transport.write(encode(reply))


class ScriptedBroker:
    """Listens inside the block; `answer` returns a reply, or None for silence."""

    def __init__(self, port: int = 0) -> None:
        self.answer: Callable[[Command], Reply | None] = ok
        self.accepted_count = 0
        self.talks: list[Talk] = []
        self.commands: list[Command] = []
        self.ends: list[Exception | None] = []
        """Ends of talks: a reset, or None for an end of the stream."""
        self._port = port
        self._server: asyncio.Server
        self.address: BrokerAddress

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Talk(self), "127.0.0.1", self._port
        )
        port = self._server.sockets[0].getsockname()[1]
        self.address = BrokerAddress("127.0.0.1", port)
        return self

    def stop_listening(self) -> None:
        """Refuse connections from now on."""
        self._server.close()

    async def __aexit__(self, *_error: object) -> None:
        self.stop_listening()
        self.cut()
        await until(lambda: not self.talks)

    def cut(self) -> None:
        for talk in self.talks:
            talk.transport.abort()


@contextlib.contextmanager
def free_address() -> Iterator[BrokerAddress]:
    """Keep an address without a listener, unless the test has one."""
    with reserved_port() as port:
        yield BrokerAddress("127.0.0.1", port)
