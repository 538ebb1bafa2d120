"""A ZooKeeper server that does what a test says, for its side of the wire."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

NO_NODE = -101
NODE_EXISTS = -110
CLOSE = -11
PASSWORD = b"p" * 16


def greeting(timeout_ms: int, session_id: int, password: bytes = PASSWORD) -> bytes:
    """Return a server's greeting without its length."""
    return struct.pack(">iiqi", 0, timeout_ms, session_id, len(password)) + password


def answer(number: int, *, zxid: int = 0, error: int = 0, fields: bytes = b"") -> bytes:
    """Return an answer without its length."""
    return struct.pack(">iqi", number, zxid, error) + fields


def event(path: str) -> bytes:
    """Return the event of a changed node without its length."""
    return answer(
        -1, zxid=-1, fields=struct.pack(">iii", 3, 3, len(path)) + path.encode()
    )


def frame(body: bytes) -> bytes:
    """Return a body with its length before it."""
    return struct.pack(">i", len(body)) + body


@dataclass
class Greeted:
    """Fields of a client's greeting."""

    zxid: int
    timeout_ms: int
    session_id: int
    password: bytes


@dataclass
class Link:
    """The server's side of one connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def receive(self) -> bytes:
        """Return the body of the next frame."""
        (size,) = struct.unpack(">i", await self.reader.readexactly(4))
        return await self.reader.readexactly(size)

    def send(self, body: bytes) -> None:
        """Send a frame."""
        self.writer.write(frame(body))

    async def receive_greeting(self) -> Greeted:
        """Return how a client greets."""
        _version, zxid, timeout_ms, session_id, size = struct.unpack_from(
            ">iqiqi", body := await self.receive()
        )
        return Greeted(zxid, timeout_ms, session_id, body[28 : 28 + size])

    async def serve(self, *, zxid: int = 7) -> None:
        """Answer that there is no node, until the session is closed."""
        while True:
            number, kind = struct.unpack_from(">ii", await self.receive())
            self.send(answer(number, zxid=zxid, error=0 if kind == CLOSE else NO_NODE))
            if kind == CLOSE:
                return


@dataclass
class ScriptedServer:
    """A server, and what has come to it."""

    port: int = 0
    greeted: list[Greeted] = field(default_factory=list)
    connection_count: int = 0
    closed_sessions: list[int] = field(default_factory=list)

    async def grant(self, link: Link, timeout_ms: int, session_id: int) -> None:
        """Greet with a session and serve it until it is closed."""
        link.send(greeting(timeout_ms, session_id))
        await link.serve()
        self.closed_sessions.append(session_id)


Script = Callable[[ScriptedServer, Link, Greeted], Awaitable[None]]


@contextlib.asynccontextmanager
async def scripted_server(
    script: Script, port: int = 0
) -> AsyncIterator[ScriptedServer]:
    """Run `script` for each connection, after its greeting; then it is closed."""
    server, tasks = ScriptedServer(), set[asyncio.Task[None]]()

    async def run(link: Link) -> None:
        server.connection_count += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            try:
                greeted = await link.receive_greeting()
                server.greeted.append(greeted)
                await script(server, link, greeted)
            finally:
                link.writer.close()
                await link.writer.wait_closed()

    async def accept(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.create_task(run(Link(reader, writer)))
        tasks.add(task)
        await asyncio.wait([task])

    listener = await asyncio.start_server(accept, "127.0.0.1", port)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
