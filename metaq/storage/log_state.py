"""What a partition log may be asked, what changes that, and a snapshot of its numbers.

OPEN ----damage----> STOPPED     puts are refused, gets outside damage go on
OPEN, STOPPED --disk error--> OFFLINE    nothing is believed until a restart
any --close--> CLOSING --closed--> CLOSED
"""

import enum
from dataclasses import dataclass
from typing import Final

from metaq.model import LogId, Offset, SizeBytes


class LogState(enum.Enum):
    """What a partition log may be asked."""

    OPEN = "open"
    """Everything."""
    STOPPED = "stopped"
    """Gets outside the damaged ranges."""
    OFFLINE = "offline"
    """Nothing: its data directory had a disk error."""
    CLOSING = "closing"
    """Gets; appends in flight are being finished."""
    CLOSED = "closed"
    """Nothing."""


class LogEvent(enum.Enum):
    """What happens to a partition log."""

    DAMAGE = "damage"
    DISK_ERROR = "disk error"
    CLOSE = "close"
    CLOSED = "closed"


TRANSITIONS: Final[dict[tuple[LogState, LogEvent], LogState]] = {
    (LogState.OPEN, LogEvent.DAMAGE): LogState.STOPPED,
    (LogState.STOPPED, LogEvent.DAMAGE): LogState.STOPPED,
    (LogState.CLOSING, LogEvent.DAMAGE): LogState.CLOSING,
    (LogState.OPEN, LogEvent.DISK_ERROR): LogState.OFFLINE,
    (LogState.STOPPED, LogEvent.DISK_ERROR): LogState.OFFLINE,
    (LogState.OPEN, LogEvent.CLOSE): LogState.CLOSING,
    (LogState.STOPPED, LogEvent.CLOSE): LogState.CLOSING,
    (LogState.OFFLINE, LogEvent.CLOSE): LogState.CLOSING,
    (LogState.CLOSING, LogEvent.CLOSED): LogState.CLOSED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStatistics:
    """A snapshot of one partition log."""

    log_id: LogId
    """Which partition."""
    state: LogState
    """What it may be asked."""
    is_group_commit: bool
    """Whether an acknowledged record is on disk (else: soon, see the interval)."""
    log_start: Offset
    """First readable offset."""
    high_watermark: Offset
    """Offset behind the last readable byte."""
    log_end: Offset
    """Offset behind the last byte written."""
    next_offset: Offset
    """Where the next append will lie."""
    size_bytes: SizeBytes
    """Bytes on disk: log end - log start."""
    segment_count: int
    """Files, the active one included."""
    record_count: int
    """Records stored, as far as they are known to the span index."""
    append_count: int
    """Appends answered with success since the log was opened."""
    refused_count: int
    """Appends that were refused or failed since the log was opened."""
    in_flight_count: int
    """Appends queued and not yet answered."""
    waiter_count: int
    """Long polls."""
    producer_count: int
    """Producers whose batches are remembered."""
    forgotten_count: int
    """Producers that were forgotten because there are too many."""
    sync_count: int
    """Syncs since the log was opened."""
    sync_s: float
    """Time they took together, seconds."""
    damage: tuple[str, ...]
    """One line per damaged range."""
