"""Connecting: names, families, addresses that lead nowhere, and no leaks."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from metaq.dial import dial
from tests.rigs.ports import reserved_port

PATIENCE_S = 30.0

Infos = list[tuple[Any, ...]]
Connect = Callable[[socket.socket, Any], Awaitable[None]]


def info(host: str, port: int) -> tuple[Any, ...]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return (family, socket.SOCK_STREAM, 6, "", (host, port))


class ScriptedLoop:
    """The running loop; it resolves every name to the given addresses."""

    def __init__(self, infos: Infos, connect: Connect | None = None) -> None:
        self._infos = infos
        self._loop = asyncio.get_running_loop()
        self.sock_connect = connect or self._loop.sock_connect

    async def getaddrinfo(self, *_args: object, **_named: object) -> Infos:
        return self._infos

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


async def dial_as(infos: Infos, connect: Connect | None = None) -> socket.socket:
    """Dial a name that has the given addresses."""
    loop: Any = ScriptedLoop(infos, connect)
    return await dial("a.name", 1, loop=loop)


def test_a_connected_socket_sends_at_once_and_is_watched() -> None:
    """TCP_NODELAY and keep-alive, and no call on it ever blocks."""

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            loop = asyncio.get_running_loop()
            sock = await dial("127.0.0.1", server.getsockname()[1], loop=loop)
            with sock:
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                assert not sock.getblocking()

    asyncio.run(main())


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_ipv6_addresses_need_no_resolver() -> None:
    """An address in either family is an address."""

    async def main() -> None:
        try:
            server = socket.create_server(("::1", 0), family=socket.AF_INET6)
        except OSError:
            pytest.skip("no IPv6 here")
        with server:
            port = server.getsockname()[1]
            sock = await dial("::1", port, loop=asyncio.get_running_loop())
            sock.close()

    asyncio.run(main())


def test_the_next_address_is_tried_when_one_refuses() -> None:
    """A name's addresses replace each other."""

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            infos = [info("127.0.0.2", port), info("127.0.0.1", port)]
            sock = await dial_as(infos)
            assert sock.getpeername()[0] == "127.0.0.1"
            sock.close()

    asyncio.run(main())


@pytest.mark.slow
def test_an_address_that_leads_nowhere_delays_the_next_a_little() -> None:
    """The attempts overlap: silence of one does not use up the caller's time."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        connect = loop.sock_connect
        waits: list[socket.socket] = []

        async def connect_or_hang(sock: socket.socket, target: Any) -> None:
            if target[0] == "127.0.0.2":
                waits.append(sock)
                await asyncio.sleep(100 * PATIENCE_S)
            await connect(sock, target)

        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            infos = [info("127.0.0.2", port), info("127.0.0.1", port)]
            async with asyncio.timeout(PATIENCE_S):
                sock = await dial_as(infos, connect_or_hang)
            sock.close()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert [waiting.fileno() for waiting in waits] == [-1]

    asyncio.run(main())


def test_the_reason_is_the_systems_own_words() -> None:
    """No listener is "Connection refused", not the event loop's phrase."""

    async def main() -> None:
        with reserved_port() as port, pytest.raises(ConnectionRefusedError) as caught:
            await dial("127.0.0.1", port, loop=asyncio.get_running_loop())
        assert caught.value.strerror == "Connection refused"

    asyncio.run(main())


def test_a_name_without_addresses_is_an_error() -> None:
    """A resolver that finds nothing ends in the one error there is."""

    async def main() -> None:
        with pytest.raises(OSError, match="no address"):
            await dial_as([])

    asyncio.run(main())


def test_a_cancelled_dial_leaves_no_socket() -> None:
    """The caller's bound of time is the only one, and it costs nothing."""

    async def main() -> None:
        dialled: list[socket.socket] = []

        async def hang(sock: socket.socket, _target: object) -> None:
            dialled.append(sock)
            await asyncio.sleep(3600)

        task = asyncio.ensure_future(dial_as([info("127.0.0.1", 1)], hang))
        for _ in range(5):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(3):
            await asyncio.sleep(0)
        assert [sock.fileno() for sock in dialled] == [-1]

    asyncio.run(main())
