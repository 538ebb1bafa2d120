"""Options of a connection to a broker, and the pauses of its readers."""

from dataclasses import dataclass
from typing import Final

from metaq.retry import Backoff

MIB: Final = 1024 * 1024
READ_BACKOFF: Final = Backoff(first_s=0.1, max_s=2.0)
"""Pauses of readers after errors: a returning broker is found within 2 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """Times and limits of the connections to one broker."""

    connect_timeout_s: float = 10.0
    """Longest attempt to connect to a broker, including its `version` reply."""
    heartbeat_s: float = 10.0
    """Time without received data after which a heartbeat (`version`) is sent."""
    heartbeat_timeout_s: float = 5.0
    """Time without a reply to it after which the connection is lost."""
    reconnect_first_s: float = 0.05
    """Longest pause before the second attempt to connect; doubles from there."""
    reconnect_max_s: float = 2.0
    """Longest pause between attempts to connect; their number is not limited."""
    in_flight_bytes_max: int = 16 * MIB
    """Maximum number of bytes in flight to one broker."""
