"""State of a channel, and a snapshot of its counters."""

import enum
from dataclasses import dataclass


class ChannelState(enum.Enum):
    """Life of a channel; it only goes down this list."""

    OPEN = "open"
    FLUSHING = "flushing"
    LINGERING = "lingering"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """A snapshot of a channel's counters."""

    peer: str
    """`host:port` of the other side."""
    state: ChannelState
    """State of the channel."""
    received_bytes: int
    """Bytes taken from the socket."""
    sent_bytes: int
    """Bytes given to the socket, ranges included."""
    queued_bytes: int
    """Reply bytes that have not left, ranges included."""
    range_count: int
    """Ranges sent by sendfile."""
    cold_range_count: int
    """Ranges that had to be opened or warmed first."""
