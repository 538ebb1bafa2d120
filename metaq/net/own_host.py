"""Address of this machine under which others would reach it."""

import contextlib
import socket
from typing import Final

_ROUTE_PROBES: Final = (
    (socket.AF_INET, ("192.0.2.1", 9)),
    (socket.AF_INET6, ("2001:db8::1", 9)),
)
"""Documentation addresses; connecting a datagram socket to one sends nothing, it only
asks the kernel which of our addresses it would send from."""

LOOPBACK: Final = "127.0.0.1"


def own_host() -> str:
    """Return the address that packets of ours to others carry; else LOOPBACK.

    IPv4 where there is a choice.
    """
    for family, target in _ROUTE_PROBES:
        with (
            contextlib.suppress(OSError),
            socket.socket(family, socket.SOCK_DGRAM) as probe,
        ):
            probe.connect(target)
            host = str(probe.getsockname()[0])
            if not host.startswith("127.") and host != "::1":
                return host
    return LOOPBACK
