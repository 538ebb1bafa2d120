"""Plan of retention: a pure plan from facts, and a clock that may be wrong.

Theory of operation. Segments are removed from a log oldest first, so that the log stays
contiguous; the active segment is never removed. A segment is removed

* by age: it is strictly older than its topic's policy allows. Its age counts from its
  newest append, according to the span index; only without one from the file's mtime;
* by size: the log, or all logs of a data directory, are strictly larger than allowed.
  Size does not need the clock, except to choose the log with the oldest segment.

Deletion by age relies on a clock, and clocks jump. `TrustedTime` is the trusted time;
it starts at the newest append that recovery found and advances with the clock since the
boot, which does not jump, and runs on while the machine is suspended and the process
stopped. Each look compares it with the wall clock:

* wall and trusted time agree within `STEP_MS_MAX` (and a drift of one in a thousand):
  the wall clock is trusted;
* they differ: ages count from the *earlier* of the two. When both clocks have run in
  parallel for `HOLD_MS`, the wall clock is trusted again; but one that jumped forward
  by more than `LEAD_MS_MAX` while the broker ran is not trusted until a restart.

A start finds the wall clock ahead of the newest append by as long as the broker was
down or idle. Up to `LEAD_MS_MAX` that is an *absence*, not reported as a fault of the
clock; ages still lag for the hold, because a clock that was set wrong while the broker
was down looks the same.

So a jump forward deletes nothing within the hold, and a jump back never does; a broker
that was down for long deletes a day late. The append time of a segment may be wrong as
well: a time in the future is replaced by that of the next segment, and no segment
counts as older than the one before it. Source: docs/metaq-1.4/broker.md 2.9 (strict
comparison).

Keep in step: docs/storage.md; `retention_run.py` carries the plan out.
"""

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

from metaq.model import LogId, Millis, Offset, SizeBytes

STEP_MS_MAX: Final = Millis(60_000)
"""Maximum difference that counts as an adjustment of the clock, not as a jump."""

DRIFT_PER_MS: Final = 1000
"""One more millisecond of difference is allowed per this many elapsed: twice the rate
at which clocks are slewed."""

HOLD_MS: Final = Millis(24 * 3_600_000)
"""Time for which a jumped clock must run evenly before it is trusted: a day, in which
an operator may notice the error that is logged at each look."""

LEAD_MS_MAX: Final = Millis(30 * 24 * 3_600_000)
"""After a longer jump forward, while the broker runs, only a restart trusts the
clock."""

_NEVER: Final = Millis(2**63 - 1)


# -- time -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrustedTime:
    """The trusted time, as of one look at both clocks."""

    wall_ms: Millis
    boot_ms: Millis
    """Clock since the boot at that look."""
    is_start: bool = False
    """True until the wall clock was trusted once: it may be ahead by as long as the
    broker was down, so any lead is trusted after the hold."""
    is_absence: bool = False
    """Whether the lead is still that of the start, and small enough for an absence."""
    lead_ms: int = 0
    """Milliseconds by which the wall clock led at the last look; 0: it is trusted."""
    since_ms: Millis | None = None
    """Time since the boot when it began to lead by that much; None: it is trusted."""


@dataclass(frozen=True, slots=True)
class ClockCheck:
    """Result of one comparison of the clocks."""

    trusted: TrustedTime
    now_ms: Millis
    """Time from which ages count back."""
    clock_fault: str | None
    """Reason for not trusting the wall clock, for the log; None: it is trusted."""


def trust_at_start(
    newest_append_ms: Millis | None, *, wall_ms: Millis, boot_ms: Millis
) -> TrustedTime:
    """Return the time to trust when a broker starts.

    Args:
        newest_append_ms: Newest append in any log, before this run appended anything;
            None if nothing is stored, and so there is nothing to delete.
        wall_ms: Wall clock.
        boot_ms: Clock since the boot.
    """
    if newest_append_ms is None:
        return TrustedTime(wall_ms, boot_ms)
    lead_ms = wall_ms - newest_append_ms
    return TrustedTime(
        newest_append_ms,
        boot_ms,
        is_start=True,
        is_absence=STEP_MS_MAX < lead_ms <= LEAD_MS_MAX,
        lead_ms=lead_ms,
        since_ms=boot_ms,
    )


def check_clocks(
    trusted: TrustedTime, *, wall_ms: Millis, boot_ms: Millis
) -> ClockCheck:
    """Compare both clocks with the trusted time; see the module docstring."""
    passed = boot_ms - trusted.boot_ms
    expected = Millis(trusted.wall_ms + passed)
    lead = wall_ms - expected
    allowed = STEP_MS_MAX + passed // DRIFT_PER_MS
    believed = TrustedTime(wall_ms, boot_ms)
    if abs(lead) <= allowed:
        return ClockCheck(believed, wall_ms, None)
    since, is_absence = trusted.since_ms, trusted.is_absence
    if since is None or abs(lead - trusted.lead_ms) > allowed:
        since, is_absence = boot_ms, False
    is_held = boot_ms - since < HOLD_MS
    is_too_far = lead > LEAD_MS_MAX and not trusted.is_start
    if not is_held and not is_too_far:
        return ClockCheck(believed, wall_ms, None)
    clock_fault = (
        f"wall clock is not trusted: expected {expected} ms, got {wall_ms} ms,"
        f" {'ahead' if lead > 0 else 'behind'} by {abs(lead) // 1000} s"
    )
    kept = replace(
        trusted,
        wall_ms=expected,
        boot_ms=boot_ms,
        is_absence=is_absence,
        lead_ms=lead,
        since_ms=since,
    )
    now_ms = Millis(min(wall_ms, expected))
    return ClockCheck(kept, now_ms, None if is_absence else clock_fault)


# -- plan -----------------------------------------------------------------------------


class Reason(enum.Enum):
    """Reason for removing a segment."""

    AGE = "age"
    LOG_SIZE = "log size"
    DIRECTORY_SIZE = "data directory size"


@dataclass(frozen=True, slots=True)
class SegmentFacts:
    """Facts about one segment that retention needs."""

    base_offset: Offset
    size_bytes: SizeBytes
    is_active: bool
    """Whether it is the last of its log; it always stays."""
    newest_append_ms: Millis | None
    """Newest append according to the span index; None if that is not complete."""
    mtime_ms: Millis
    record_count: int = 0
    """Number of records by its index, 0 without one; the plan does not use it."""


@dataclass(frozen=True, slots=True)
class LogFacts:
    """Facts about one log that retention needs."""

    log_id: LogId
    segments: tuple[SegmentFacts, ...]
    age_ms: int
    """Sealed segments that are strictly older are removed, milliseconds, 0 or more."""
    log_bytes_max: int = 0
    """Size limit of this log, bytes; 0: none."""


@dataclass(frozen=True, slots=True)
class Removal:
    """Removal of one segment. Removals of one log are in order, oldest first."""

    log_id: LogId
    base_offset: Offset
    """The segment: the first of its log after the earlier removals."""
    reason: Reason


def hard_limit(size_bytes: int, segment_bytes_max: int) -> int:
    """Return the size at which puts are refused, for a size limit of retention.

    Retention removes sealed segments above `size_bytes`, and so can always get below
    that plus one segment. In a larger log retention does not work, and the log must not
    fill the disk.
    """
    return size_bytes + segment_bytes_max if size_bytes else 0


def plan_retention(
    logs: Sequence[LogFacts], *, now_ms: Millis, directory_bytes_max: int = 0
) -> tuple[Removal, ...]:
    """Return which segments of one data directory to remove, in order.

    A removal that fails ends the removals of its log: a later segment must not be
    removed before it.

    Args:
        logs: All logs of the directory, except damaged ones.
        now_ms: From `check_clocks`.
        directory_bytes_max: Size limit of all logs together, bytes; 0: none.
    """
    actions: list[Removal] = []
    left: list[tuple[LogFacts, list[SegmentFacts], list[Millis]]] = []
    for log in logs:
        times = newest_times(log.segments, now_ms)
        count = _count_by_age(log, times, now_ms)
        more = _count_by_size(log, count)
        for number, facts in enumerate(log.segments[: count + more]):
            reason = Reason.AGE if number < count else Reason.LOG_SIZE
            actions.append(Removal(log.log_id, facts.base_offset, reason))
        first = count + more
        left.append((log, list(log.segments[first:]), times[first:]))
    if directory_bytes_max > 0:
        actions += _plan_directory(left, directory_bytes_max)
    return tuple(actions)


def newest_times(segments: Sequence[SegmentFacts], now_ms: Millis) -> list[Millis]:
    """Return the time of each segment's newest append, with impossible ones corrected.

    A time in the future becomes that of the next segment, which has later appends; and
    no segment is older than the one before it. Both only make segments stay.
    """
    times: list[Millis] = []
    following = _NEVER
    for facts in reversed(segments):
        stamped = facts.newest_append_ms
        time = facts.mtime_ms if stamped is None else stamped
        following = time if time <= now_ms else following
        times.append(following)
    return list(accumulate(reversed(times), max))


def _count_by_age(log: LogFacts, times: list[Millis], now_ms: Millis) -> int:
    for count, (facts, time) in enumerate(zip(log.segments, times, strict=True)):
        if facts.is_active or now_ms - time <= log.age_ms:
            return count
    return len(log.segments)


def _count_by_size(log: LogFacts, gone: int) -> int:
    """Return how many segments to remove by size after the first `gone` ones."""
    excess = _size(log.segments[gone:]) - log.log_bytes_max
    count = 0
    for facts in log.segments[gone:]:
        if log.log_bytes_max <= 0 or excess <= 0 or facts.is_active:
            break
        excess -= facts.size_bytes
        count += 1
    return count


def _plan_directory(
    left: list[tuple[LogFacts, list[SegmentFacts], list[Millis]]], bytes_max: int
) -> Iterator[Removal]:
    """Remove the oldest segments over all logs until the rest fits; yield each."""
    excess = sum(_size(segments) for _log, segments, _times in left) - bytes_max
    while excess > 0:
        full = [item for item in left if item[1] and not item[1][0].is_active]
        if not full:
            return
        log, segments, times = min(full, key=lambda item: item[2][0])
        facts = segments.pop(0)
        times.pop(0)
        excess -= facts.size_bytes
        yield Removal(log.log_id, facts.base_offset, Reason.DIRECTORY_SIZE)


def _size(segments: Sequence[SegmentFacts]) -> SizeBytes:
    return SizeBytes(sum(facts.size_bytes for facts in segments))
