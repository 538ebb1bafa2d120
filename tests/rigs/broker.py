"""A real broker on a free port, and a peer that detects when it has all answers."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final, Self

from metaq.broker.app import Broker
from metaq.broker.session import Session
from metaq.clock import Clock
from metaq.config.load import parse_config
from metaq.config.settings import BrokerConfig
from metaq.fs import FileSystem
from metaq.net.channel import ChannelState
from metaq.zk.session import Coordinator
from tests.rigs.inside import hot_puts_of
from tests.rigs.waiting import until

CONFIG: Final = """
[system]
brokerId=0
numPartitions=2
serverPort=0
hostName=127.0.0.1
dataPath={data}
unflushThreshold=0
unflushInterval=10000
maxSegmentSize=1024*1024*1024
maxTransferSize=1024*1024
updateConsumerOffsets=true
stat=true
[zookeeper]
zk.zkEnable=false
[topic=test]
[topic=meta-test]
[topic=wild-*]
"""
"""Settings of the recorded Java broker, but without ZooKeeper, on a free port."""

TIMEOUT_S: Final = 30.0
POLL_S: Final = 0.000_5
"""Interval at which a peer checks for answers."""


def make_config(
    data: Path, overrides: Mapping[str, str] | None = None, text: str = CONFIG
) -> BrokerConfig:
    """Return settings of a broker with a data directory."""
    ini = text.replace("{data}", str(data))
    return parse_config(ini.encode(), "", overrides or {})


@contextlib.asynccontextmanager
async def running_broker(
    data: Path,
    overrides: Mapping[str, str] | None = None,
    *,
    text: str = CONFIG,
    clock: Clock | None = None,
    fs: FileSystem | None = None,
    coordinator: Coordinator | None = None,
) -> AsyncIterator[Broker]:
    """Run a broker during the block; the failure of a part of it fails the block.

    A put to any partition goes to the last open one. The scrub is off, because it might
    find damage made by a test before the test does.
    """
    broker = Broker(
        make_config(data, {"scrubBytesPerS": "0", **(overrides or {})}, text),
        clock=clock,
        fs=fs,
        coordinator=coordinator,
        choose=lambda count: count - 1,
    )
    await broker.start()
    try:
        yield broker
    finally:
        await broker.stop()
    assert broker.failure is None, broker.failure


class Peer:
    """A raw connection to a broker in this process, on the same event loop."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._sent = 0
        self._read = 0
        self.session: Session
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    async def __aenter__(self) -> Self:
        """Connect, and find the broker's session of the connection."""
        self.reader, self.writer = await asyncio.open_connection(
            "127.0.0.1", self._broker.port, limit=64 * 1024 * 1024
        )
        host, port = self.writer.get_extra_info("sockname")

        def sessions() -> list[Session]:
            name = f"{host}:{port}"
            return [each for each in self._broker.sessions if each.peer == name]

        await until(sessions)
        (self.session,) = sessions()
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Close the connection."""
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    def write(self, data: bytes) -> None:
        """Send bytes without waiting."""
        self.writer.write(data)
        self._sent += len(data)

    async def ask(self, data: bytes) -> bytes:
        """Send bytes; return all answers to them.

        The answers are complete when the broker has read every byte, has answered every
        command and has nothing left to send, or has closed the connection.
        """
        self.write(data)
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                if self.is_closed():
                    return await self.reader.read(-1)
                seen = self.session.channel
                is_idle = not self.session.unanswered_count and not seen.queued_bytes
                is_idle = is_idle and not self.session.is_paused
                if is_idle and seen.received_bytes == self._sent:
                    break
                # Let the loop read bytes in flight, or the broker cannot finish.
                await asyncio.sleep(POLL_S)
            size_bytes = seen.sent_bytes - self._read
            self._read += size_bytes
            return await self.reader.readexactly(size_bytes)

    async def send(self, data: bytes) -> None:
        """Send bytes and wait until the broker has read them."""
        self.write(data)
        await until(lambda: self.session.channel.received_bytes >= self._sent)

    async def read_some(self) -> bytes:
        """Return the next bytes; b"" if the broker has closed the connection."""
        async with asyncio.timeout(TIMEOUT_S):
            data = await self.reader.read(1024 * 1024)
        self._read += len(data)
        return data

    def is_closed(self) -> bool:
        """Return whether the broker has ended the connection."""
        state = self.session.channel.state
        return state in {ChannelState.LINGERING, ChannelState.CLOSED}


def take_nothing(session: Session) -> None:
    """Make a session handle all puts by the general path."""
    hot: Any = hot_puts_of(session)
    hot.take = lambda _buffer: 0
    hot.take_single = lambda _data: 0
    hot.take_batch = lambda _data: False


def reset_on_close(sock: socket.socket) -> None:
    """Make a socket send a reset when closed, like a crashed peer."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
