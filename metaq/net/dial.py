"""Outgoing connections: connect a socket to a host and port of either family.

A name may have several addresses, and some of them may not answer at all. Attempts
therefore overlap: the next address is tried after STAGGER_S, or at once when an attempt
has failed, and the first connection wins. Names are resolved on the loop's executor;
addresses need no resolver.

`own_host` is the address under which others reach this machine.
"""

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final, NamedTuple

STAGGER_S: Final = 0.25
"""Head start of an address over the next one, seconds."""

ADDRESS_COUNT_MAX: Final = 16
"""Most addresses of one name that are tried; the resolver's order is kept."""

_ROUTE_PROBES: Final = (
    (socket.AF_INET, ("192.0.2.1", 9)),
    (socket.AF_INET6, ("2001:db8::1", 9)),
)
"""Documentation addresses. Connecting a datagram socket to one sends nothing; the
kernel chooses the address that we would send from."""

LOOPBACK: Final = "127.0.0.1"


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


def _routed_hosts() -> Iterator[str]:
    for family, target in _ROUTE_PROBES:
        with (
            contextlib.suppress(OSError),
            socket.socket(family, socket.SOCK_DGRAM) as probe,
        ):
            probe.connect(target)
            yield str(probe.getsockname()[0])


def _interface_hosts() -> Iterator[str]:
    import ifaddr  # noqa: PLC0415  # 10 ms, needed only without a route

    with contextlib.suppress(OSError):
        for adapter in ifaddr.get_adapters():
            for address in adapter.ips:
                yield address.ip if isinstance(address.ip, str) else address.ip[0]


def own_host(
    routed: Callable[[], Iterable[str]] = _routed_hosts,
    interfaces: Callable[[], Iterable[str]] = _interface_hosts,
) -> str:
    """Return the address of this machine that others reach; else LOOPBACK.

    The first that is not loopback, IPv4 before IPv6: the source of a route to anywhere,
    and where there is none, as in closed networks, one of an interface.

    Args:
        routed: returns the addresses that our packets to anywhere come from.
        interfaces: returns the addresses of all interfaces.
    """
    found = list(filter(_is_reachable, map(ip_address, routed())))
    if not any(address.version == 4 for address in found):
        found += filter(_is_reachable, map(ip_address, interfaces()))
    # The first of equals.
    return str(min(found, key=lambda address: address.version, default=LOOPBACK))


def _is_reachable(address: IPv4Address | IPv6Address) -> bool:
    # A link-local address of IPv6 means nothing without the name of an interface.
    is_local = address.version == 6 and address.is_link_local
    return not (address.is_loopback or address.is_unspecified or is_local)
