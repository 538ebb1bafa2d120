"""State, events and statistics of a partition log.

OPEN ----damage----> STOPPED     puts are refused, gets outside damage go on
OPEN, STOPPED --disk error--> OFFLINE    nothing is believed until a restart
any --close--> CLOSING --closed--> CLOSED
"""

import enum
from dataclasses import dataclass
from typing import Final

from metaq.model import LogId, Offset, SizeBytes
from metaq.stats import counter, gauge


class LogState(enum.Enum):
    """Requests that a partition log accepts."""

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
    """Event in the life of a partition log."""

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
    """Partition of the log."""
    state: LogState
    """State: which requests it takes."""
    next_offset: Offset
    """Offset of the next append."""
    size_bytes: SizeBytes = gauge("metaq_log_size_bytes", "Bytes of a log on disk.")
    held_bytes: SizeBytes = gauge(
        "metaq_log_held_bytes",
        "Bytes of a log that wait for the rest of their append; above 0 it takes no"
        " puts.",
    )
    segment_count: int = gauge("metaq_log_segments", "Files of a log.")
    record_count: int = gauge("metaq_log_records", "Records stored in a log.")
    """As far as they are known to the span index."""
    log_start: Offset = gauge(
        "metaq_log_start_bytes", "Log start: first readable offset."
    )
    high_watermark: Offset = gauge(
        "metaq_log_high_watermark_bytes",
        "High watermark: offset behind the last readable byte.",
    )
    log_end: Offset = gauge(
        "metaq_log_end_bytes", "Log end: offset behind the last byte written."
    )
    append_count: int = counter(
        "metaq_log_appends_total",
        "Appends that were acknowledged; one holds one or many records.",
    )
    refused_count: int = counter(
        "metaq_log_refused_appends_total", "Appends that were refused or failed."
    )
    in_flight_count: int = 0
    """Appends queued and not yet answered."""
    waiter_count: int = 0
    """Long polls."""
    producer_count: int = gauge(
        "metaq_log_producers", "Producers whose repeated batches are recognised."
    )
    forgotten_count: int = counter(
        "metaq_log_forgotten_producers_total",
        "Producers that were forgotten because there are too many.",
    )
    sync_count: int = counter("metaq_log_syncs_total", "Syncs of a log.")
    sync_s: float = counter(
        "metaq_log_sync_seconds_total", "Time that the syncs of a log took together."
    )
    damage: tuple[str, ...] = gauge(
        "metaq_log_damaged_ranges",
        "Damaged ranges found in a log; above 0 it takes no puts.",
        default=(),
        read=len,
    )
    """One line per damaged range."""
    is_group_commit: bool = gauge(
        "metaq_log_group_commit",
        "1 where a put is acknowledged after its sync, 0 where before.",
        default=True,
    )
