"""Ports reserved for a test, also while no server listens there.

A port that was free a moment ago goes to the next program that asks the system for one:
tests that run side by side take it from a broker that restarts. On Linux a socket that
is bound and does not listen keeps it. Connecting is refused, no other program is given
the port; a server that names it and reuses addresses, as all of ours do, may listen
there.
"""

import contextlib
import socket
import weakref
from collections.abc import Iterator
from typing import Final

HOST: Final = "127.0.0.1"


def reserve_port(owner: object) -> int:
    """Return a free port that is the owner's as long as the owner lives."""
    sock = _bound(0)
    weakref.finalize(owner, sock.close)
    port: int = sock.getsockname()[1]
    return port


@contextlib.contextmanager
def reserved_port(port: int = 0) -> Iterator[int]:
    """Keep a port inside the block.

    Args:
        port: without a listener; 0: any free one.

    Raises:
        OSError: it is taken.
    """
    with _bound(port) as sock:
        yield sock.getsockname()[1]


def _bound(port: int) -> socket.socket:
    sock = socket.socket()
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((HOST, port))
    except BaseException:
        sock.close()
        raise
    return sock
