"""Options of a connection to a broker, and pauses of those who read over it."""

from dataclasses import dataclass
from typing import Final

from metaq.retry import Backoff

MIB: Final = 1024 * 1024
READ_BACKOFF: Final = Backoff(first_s=0.1, max_s=2.0)
"""Pauses of readers after errors: a broker that comes back is found within 2 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """Times and bounds of the connections to one broker."""

    connect_timeout_s: float = 10.0
    """Bound on one attempt to connect to a broker, its `version` reply included."""
    heartbeat_s: float = 10.0
    """A connection without traffic for so long is asked for its version."""
    heartbeat_timeout_s: float = 5.0
    """No answer to that for so long: the connection is lost."""
    reconnect_first_s: float = 0.05
    """Longest pause before the second attempt to connect; doubles from there."""
    reconnect_max_s: float = 2.0
    """Longest pause between attempts to connect; there is no last attempt."""
    in_flight_bytes_max: int = 16 * MIB
    """Most bytes sent to one broker and not answered."""
