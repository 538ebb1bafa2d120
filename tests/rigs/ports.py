"""Reserved ports without a listener."""

import contextlib
from collections.abc import Iterator

from metaq.testing.servers import bind_port


@contextlib.contextmanager
def reserved_port(port: int = 0) -> Iterator[int]:
    """Reserve a port during the block.

    Args:
        port: port without a listener; 0: any free one.

    Raises:
        OSError: the port is in use.
    """
    with bind_port(port) as sock:
        yield sock.getsockname()[1]
