"""Outgoing connections: connect a socket to a host and port of either family.

A name may have several addresses, and some of them may not answer at all. Attempts
therefore overlap: the next address is tried after STAGGER_S, or at once when an attempt
has failed, and the first connection wins. Names are resolved on the loop's executor;
addresses need no resolver.
"""

import asyncio
import contextlib
import os
import socket
from collections import deque
from typing import Final, NamedTuple

STAGGER_S: Final = 0.25
"""Head start of an address over the next one, seconds."""

ADDRESS_COUNT_MAX: Final = 16
"""Most addresses of one name that are tried; the resolver's order is kept."""


class _Target(NamedTuple):
    """One address of a name, as the resolver gives it."""

    family: int
    kind: int
    protocol: int
    name: str
    sockaddr: tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]


async def dial(
    host: str, port: int, *, loop: asyncio.AbstractEventLoop
) -> socket.socket:
    """Return a connected, non-blocking socket with TCP_NODELAY and keep-alive.

    Args:
        host: name or address; an IPv6 address without brackets.
        port: TCP port.
        loop: the running loop.

    Raises:
        OSError: the connection was refused; the last address' reason. An unknown name
            is a `socket.gaierror`.

    Cancellation: attempts under way end and their sockets are closed. The caller bounds
    the time.
    """
    targets = await _resolve(host, port, loop)
    sock = await _first(targets, loop)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    except OSError:
        sock.close()
        raise
    return sock


async def _resolve(
    host: str, port: int, loop: asyncio.AbstractEventLoop
) -> list[_Target]:
    try:
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )
    except socket.gaierror:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [_Target(*item) for item in found[:ADDRESS_COUNT_MAX]]


async def _first(
    targets: list[_Target], loop: asyncio.AbstractEventLoop
) -> socket.socket:
    """Return the first connection; the others are closed."""
    waiting = deque(targets)
    attempts: set[asyncio.Task[socket.socket]] = set()
    failure: OSError = OSError("the name has no address")
    winner: socket.socket | None = None
    try:
        while winner is None and (waiting or attempts):
            if waiting:
                attempts.add(loop.create_task(_connect(waiting.popleft(), loop)))
            done, attempts = await asyncio.wait(
                attempts,
                timeout=STAGGER_S if waiting else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for task in done:
                try:
                    sock = task.result()
                except OSError as error:
                    failure = error
                    continue
                if winner is None:
                    winner = sock
                else:
                    sock.close()
    finally:
        for task in attempts:
            task.cancel()
            task.add_done_callback(_close_late)
    if winner is None:
        raise failure
    return winner


async def _connect(target: _Target, loop: asyncio.AbstractEventLoop) -> socket.socket:
    sock = socket.socket(target.family, target.kind, target.protocol)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, target.sockaddr)
    except OSError as error:
        sock.close()
        if error.errno is None:
            raise
        # The loop's text does not have the cause.
        raise OSError(error.errno, os.strerror(error.errno)) from error
    except BaseException:
        sock.close()
        raise
    return sock


def _close_late(task: asyncio.Task[socket.socket]) -> None:
    """Close a connection that came too late to be used."""
    with contextlib.suppress(OSError, asyncio.CancelledError):
        task.result().close()
