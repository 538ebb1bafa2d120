"""State, events, statistics and waiters of a partition log.

OPEN ----damage----> STOPPED     puts are refused; gets outside damage continue
OPEN, STOPPED --disk error--> OFFLINE    everything is refused until a restart
any --close--> CLOSING --closed--> CLOSED

In a replica set:

OPEN <--lead-- FOLLOWING    accepts bytes of a leader instead of puts
FOLLOWING, STOPPED --reopen--> REOPENING --reopened--> FOLLOWING

A waiter, such as a long poll, is called back at most once: when the byte at its offset
is readable, or when no more bytes are expected. Most wait at the high watermark, so
they are not sorted. Owner of the waiters: the event loop's thread.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from metaq.model import LogId, Offset, SizeBytes
from metaq.stats import counter, gauge


class LogState(enum.Enum):
    """State of a partition log; each accepts the requests listed under it."""

    OPEN = "open"
    """Everything."""
    FOLLOWING = "following"
    """Gets, and bytes of its leader."""
    REOPENING = "reopening"
    """Gets; its end is being cut, or its files are being reopened."""
    STOPPED = "stopped"
    """Gets outside the damaged ranges."""
    OFFLINE = "offline"
    """Nothing: its data directory had a disk error."""
    CLOSING = "closing"
    """Gets; appends in flight are being finished."""
    CLOSED = "closed"
    """Nothing."""


class LogEvent(enum.Enum):
    """Event that may change the state of a partition log."""

    FOLLOW = "follow"
    LEAD = "lead"
    REOPEN = "reopen"
    REOPENED = "reopened"
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
    (LogState.OPEN, LogEvent.FOLLOW): LogState.FOLLOWING,
    (LogState.FOLLOWING, LogEvent.FOLLOW): LogState.FOLLOWING,
    (LogState.STOPPED, LogEvent.FOLLOW): LogState.STOPPED,
    (LogState.REOPENING, LogEvent.FOLLOW): LogState.REOPENING,
    (LogState.FOLLOWING, LogEvent.LEAD): LogState.OPEN,
    (LogState.STOPPED, LogEvent.LEAD): LogState.STOPPED,
    (LogState.FOLLOWING, LogEvent.REOPEN): LogState.REOPENING,
    (LogState.STOPPED, LogEvent.REOPEN): LogState.REOPENING,
    (LogState.REOPENING, LogEvent.REOPENED): LogState.FOLLOWING,
    (LogState.CLOSING, LogEvent.REOPENED): LogState.CLOSING,
    (LogState.FOLLOWING, LogEvent.DAMAGE): LogState.STOPPED,
    (LogState.REOPENING, LogEvent.DAMAGE): LogState.REOPENING,
    (LogState.FOLLOWING, LogEvent.DISK_ERROR): LogState.OFFLINE,
    (LogState.REOPENING, LogEvent.DISK_ERROR): LogState.OFFLINE,
    (LogState.FOLLOWING, LogEvent.CLOSE): LogState.CLOSING,
    (LogState.REOPENING, LogEvent.CLOSE): LogState.CLOSING,
}

COPYING: Final = frozenset({LogState.FOLLOWING, LogState.REOPENING})
"""States in which the high watermark follows the leader's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStatistics:
    """A snapshot of one partition log."""

    log_id: LogId
    state: LogState
    next_offset: Offset
    size_bytes: SizeBytes = gauge("metaq_log_size_bytes", "Bytes of a log on disk.")
    held_bytes: SizeBytes = gauge(
        "metaq_log_held_bytes",
        "Bytes of a log that wait for the rest of their append; above 0 it takes no"
        " puts.",
    )
    segment_count: int = gauge("metaq_log_segments", "Files of a log.")
    record_count: int = gauge("metaq_log_records", "Records stored in a log.")
    """As far as the span index knows them."""
    log_start: Offset = gauge(
        "metaq_log_start_bytes", "Log start: first readable offset."
    )
    high_watermark: Offset = gauge(
        "metaq_log_high_watermark_bytes",
        "High watermark: offset after the last readable byte.",
    )
    log_end: Offset = gauge(
        "metaq_log_end_bytes", "Log end: offset after the last byte written."
    )
    append_count: int = counter(
        "metaq_log_appends_total",
        "Appends that were acknowledged; one holds one or many records.",
    )
    refused_count: int = counter(
        "metaq_log_refused_appends_total", "Appends that were refused or failed."
    )
    in_flight_count: int = 0
    waiter_count: int = 0
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
    lost: tuple[str, ...] = gauge(
        "metaq_log_lost_ranges",
        "Damaged ranges of a log of which no replica has a good copy.",
        default=(),
        read=len,
    )
    is_group_commit: bool = gauge(
        "metaq_log_group_commit",
        "1 where a put is acknowledged after its sync, 0 where before.",
        default=True,
    )


class WaitHandle:
    """One waiter, until it is called back or cancelled."""

    __slots__ = ("_callback", "_waiters", "offset")

    def __init__(
        self, waiters: "LogWaiters", offset: Offset, callback: Callable[[], None]
    ) -> None:
        self.offset = offset
        """Offset of the byte that is waited for."""
        self._waiters: LogWaiters | None = waiters
        self._callback = callback

    def cancel(self) -> None:
        """Prevent the callback; no effect after it."""
        waiters, self._waiters = self._waiters, None
        if waiters is not None:
            waiters.forget(self)

    def wake(self) -> None:
        """Call back, unless called back or cancelled already."""
        if self._waiters is not None:
            self.cancel()
            self._callback()


class LogWaiters:
    """The waiters of one log."""

    __slots__ = ("_handles",)

    def __init__(self) -> None:
        self._handles: dict[WaitHandle, None] = {}

    def __len__(self) -> int:
        return len(self._handles)

    def add(self, offset: Offset, callback: Callable[[], None]) -> WaitHandle:
        """Add a waiter; does not call it back."""
        handle = WaitHandle(self, offset, callback)
        self._handles[handle] = None
        return handle

    def forget(self, handle: WaitHandle) -> None:
        """Remove a waiter; called by its handle."""
        self._handles.pop(handle, None)

    def wake_below(self, offset: Offset | None) -> None:
        """Wake waiters for bytes below `offset`, in the order they were added.

        Args:
            offset: the high watermark; None wakes all.
        """
        if not self._handles:
            return
        for handle in [h for h in self._handles if offset is None or h.offset < offset]:
            handle.wake()
