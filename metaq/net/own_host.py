"""The address under which others reach this machine."""

import contextlib
import socket
from collections.abc import Callable, Iterable, Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

_ROUTE_PROBES: Final = (
    (socket.AF_INET, ("192.0.2.1", 9)),
    (socket.AF_INET6, ("2001:db8::1", 9)),
)
"""Documentation addresses. Connecting a datagram socket to one sends nothing; the
kernel chooses the address that we would send from."""

LOOPBACK: Final = "127.0.0.1"


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
