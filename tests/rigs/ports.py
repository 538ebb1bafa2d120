"""Ports that nothing listens on, kept from other programs."""

import contextlib
from collections.abc import Iterator

from metaq.testing.servers import bind_port


@contextlib.contextmanager
def reserved_port(port: int = 0) -> Iterator[int]:
    """Keep a port inside the block.

    Args:
        port: without a listener; 0: any free one.

    Raises:
        OSError: it is taken.
    """
    with bind_port(port) as sock:
        yield sock.getsockname()[1]
