"""Check stored bytes in the background, slowly, while the broker runs.

Theory of operation. A *pass* checks all segments of all logs once; the next one begins
a day after its beginning, or when it has ended, whichever is later. Work is divided
into steps, each of about one second at the configured rate. `Scrub` decides and never
waits or reads; `run_step` reads and knows only its step:

    step = scrub.take_step(source, monotonic_s)        the owner's thread
    result = run_step(fs, step)                        a helper thread, blocking
    scrub.finish_step(step, result, monotonic_s)       the owner's thread

A pass lists the logs when it begins, and then the segments of one log at a time:
listing all of them at every step would block a broker with thousands of logs.

With the first segment of a log its names and sizes are checked, as at a start: holes,
overlaps, files that are too long. Damage is passed to `on_damage`, which stops the log;
the scrub continues in a stopped log, but writes nothing there. A sealed segment without
a complete span index (a Java broker wrote it, a disk was full, or the index is
unreadable) gets one from the bytes read: a damaged index is no damage to the log.

Passes begin at different segments: the clock chooses the beginning of the first pass
after a start, so that a broker that is restarted often does not always leave out the
same segments. Bytes in the page cache are checked there; those on disk only when they
are read again. Keep in step: docs/storage.md.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, Protocol

from metaq.errors import DiskError, MissingFileError, NoSpaceError
from metaq.fs import FileSystem
from metaq.model import LogId, Offset, SizeBytes
from metaq.stats import counter, gauge
from metaq.storage.damage import check_part, merge_damage
from metaq.storage.listing import check_names, index_of
from metaq.storage.segment import Damage, Segment
from metaq.storage.span_index import (
    SPAN_BYTES_MAX,
    Span,
    SpanIndex,
    is_unreadable,
    spans_path,
    write_index,
)

_log = logging.getLogger(__name__)

STEP_BYTES_MAX: Final = 4 << 20
"""Maximum number of bytes checked in one step, exceeded by less than one span."""

PASS_S_MIN: Final = 24 * 3600.0
"""Minimum time between the beginnings of two passes, in seconds: small logs need not be
read all day."""

_Key = tuple[LogId, Offset]


@dataclass(frozen=True, slots=True)
class ScrubTarget:
    """One segment to check."""

    log_id: LogId
    segment: Segment
    """The segment, with the size of its durable bytes, up to the high watermark."""
    is_sealed: bool
    is_first: bool = False
    """Whether names and sizes of all files of its log are checked with it."""
    may_write: bool = True
    """Whether a missing index may be made; False if the log is stopped."""

    @property
    def key(self) -> _Key:
        """Its key in the order of a pass."""
        return self.log_id, self.segment.base_offset


class ScrubSource(Protocol):
    """The logs to check, in their state at each call."""

    def sizes(self) -> Mapping[LogId, int]:
        """Return the number of bytes to check in each log."""

    def targets(self, log_id: LogId) -> Sequence[ScrubTarget]:
        """Return the segments of a log, oldest first; empty if it is not checked."""


@dataclass(frozen=True, slots=True)
class ScrubStep:
    """One unit of work."""

    target: ScrubTarget
    start: Offset
    """First byte to check, a record boundary; below the target's end."""
    bytes_max: int
    span_bytes_min: int
    """Minimum size of the spans of a new index."""
    index: SpanIndex | None = None
    """The segment's index as an earlier step read it; None: not read yet."""
    made: tuple[Span, ...] = ()
    """Spans made by earlier steps, after the end of the index."""
    is_intact: bool = True
    """Whether no earlier step found damage in this segment."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step."""

    end: Offset
    """Start of the next step; the segment's end if it is done or gone."""
    checked_bytes: SizeBytes
    damage: tuple[Damage, ...]
    index: SpanIndex | None
    made: tuple[Span, ...]


@dataclass(slots=True)
class ScrubState:
    """Progress of the scrub, for operators. Snapshots are copies."""

    is_enabled: bool
    passes: int = counter(
        "metaq_scrub_passes_total", "Complete passes of the background verification."
    )
    log_id: LogId | None = None
    offset: Offset | None = None
    checked_bytes: int = gauge(
        "metaq_scrub_checked_bytes", "Bytes verified in the present pass."
    )
    """Between passes, the bytes of the last pass."""
    total_bytes: int = gauge("metaq_scrub_pass_bytes", "Bytes of a whole pass.")
    """At the beginning of the pass."""
    damage_count: int = gauge(
        "metaq_scrub_damaged_ranges",
        "Damaged ranges found in the background since the start.",
    )


class Scrub:
    """Schedules the checks. Owner: one thread; one step at a time."""

    def __init__(
        self,
        *,
        bytes_per_s: int,
        span_bytes_min: int,
        first: int,
        on_damage: Callable[[LogId, Damage], None],
    ) -> None:
        """Create a scrub that will begin its first pass.

        Args:
            bytes_per_s: Rate; 0 checks nothing.
            span_bytes_min: Minimum size of the spans of a new index.
            first: Any number (the wall clock); selects where the first pass begins.
            on_damage: Called with each damaged range, from `finish_step`; stops the
                log.
        """
        self._bytes_per_s = bytes_per_s
        self._span_bytes_min = span_bytes_min
        self._first = first
        self._on_damage = on_damage
        self._due_s = 0.0
        self._pass_began_s: float | None = None
        self._origin: _Key | None = None
        """Start of this pass; None between passes."""
        self._ahead: deque[LogId] = deque()
        """The present log and the later ones; the origin's log is in it twice."""
        self._log_count = 0
        self._next: ScrubStep | None = None
        """Position in the present segment; None: the one after `_done` is next."""
        self._done: _Key | None = None
        self._state = ScrubState(is_enabled=bytes_per_s > 0)

    def take_step(self, source: ScrubSource, monotonic_s: float) -> ScrubStep | None:
        """Return the next step if it is due, or None.

        Args:
            source: The logs to check; read only when a step is due.
            monotonic_s: Monotonic clock.
        """
        if not self._bytes_per_s or monotonic_s < self._due_s:
            return None
        if self._origin is None:
            self._begin_pass(source, monotonic_s)
        target = self._find_target(source)
        if target is None:
            if self._origin is not None:
                self._end_pass()
            return None
        bytes_max = min(STEP_BYTES_MAX, self._bytes_per_s)
        going_on = self._next
        if going_on is not None and going_on.target.key == target.key:
            return replace(going_on, target=target, bytes_max=bytes_max)
        start = target.segment.base_offset
        return ScrubStep(target, start, bytes_max, self._span_bytes_min)

    def finish_step(
        self, step: ScrubStep, result: StepResult, monotonic_s: float
    ) -> None:
        """Process the result of a step; call `on_damage` for damage found."""
        self._due_s = monotonic_s + result.checked_bytes / self._bytes_per_s
        self._state.checked_bytes += result.checked_bytes
        self._state.damage_count += len(result.damage)
        self._next = replace(
            step,
            start=result.end,
            index=result.index,
            made=result.made,
            is_intact=step.is_intact and not result.damage,
        )
        if result.end >= step.target.segment.end_offset:
            self._next, self._done = None, step.target.key
        for damage in result.damage:
            self._on_damage(step.target.log_id, damage)

    def state(self) -> ScrubState:
        """Return the progress of the scrub."""
        at = self._next
        return replace(
            self._state,
            log_id=None if at is None else at.target.log_id,
            offset=None if at is None else at.start,
        )

    def _begin_pass(self, source: ScrubSource, monotonic_s: float) -> None:
        sizes = source.sizes()
        log_ids = sorted(log_id for log_id, size in sizes.items() if size)
        if not log_ids:
            return
        number, first = divmod(self._first, len(log_ids))
        around = log_ids[first:] + log_ids[:first]
        for at, log_id in enumerate(around):  # noqa: B007  # used below
            # There is none if the high watermark of a replica is in the first segment.
            if segments := source.targets(log_id):
                break
        else:
            return
        self._first = 0
        self._origin = segments[number % len(segments)].key
        self._ahead = deque([*around[at:], *around[: at + 1]])
        self._log_count = len(log_ids)
        self._next, self._done = None, None
        self._pass_began_s = monotonic_s
        self._state.checked_bytes = 0
        self._state.total_bytes = sum(sizes.values())

    def _end_pass(self) -> None:
        assert self._pass_began_s is not None
        self._due_s = max(self._due_s, self._pass_began_s + PASS_S_MIN)
        self._origin = None
        self._state.passes += 1
        _log.info(
            "scrub pass complete: checked_bytes=%d damage_count=%d",
            self._state.checked_bytes,
            self._state.damage_count,
        )

    def _find_target(self, source: ScrubSource) -> ScrubTarget | None:
        """Return the next segment to check; None if the pass is complete.

        Segments may have come and gone since the last step.
        """
        while self._ahead:
            for target in source.targets(self._ahead[0]):
                if self._is_ahead(target):
                    return target
            self._ahead.popleft()
            self._next, self._done = None, None
        return None

    def _is_ahead(self, target: ScrubTarget) -> bool:
        """Return whether a segment of the present log has bytes and is still ahead."""
        assert self._origin is not None
        key = target.key
        if key[0] == self._origin[0]:
            # First the keys after the origin, then the keys before it.
            is_first = len(self._ahead) > self._log_count
            if is_first != (key >= self._origin):
                return False
        if self._next is not None and key < self._next.target.key:
            return False
        if self._done is not None and key <= self._done:
            return False
        return target.segment.size_bytes > 0


def run_step(fs: FileSystem, step: ScrubStep) -> StepResult:
    """Read and check the bytes of a step; blocks.

    A missing segment was removed by retention, and is done; otherwise the check of
    names finds a hole. A segment that the disk cannot open is damage: its bytes exist,
    but can not be read.

    Raises:
        DiskError: The disk refuses; its state is unknown.
    """
    segment = step.target.segment
    named = _check_names(fs, step)
    try:
        result = _check(fs, step)
    except MissingFileError:
        result = StepResult(segment.end_offset, SizeBytes(0), (), None, ())
    except DiskError as error:
        if not is_unreadable(error):
            raise
        damage = (Damage(segment.path, step.start, segment.end_offset, str(error)),)
        size = SizeBytes(segment.end_offset - step.start)
        result = StepResult(segment.end_offset, size, damage, None, ())
    if result.end >= segment.end_offset and not result.damage:
        _complete_index(fs, step, result)
    return (
        replace(result, damage=merge_damage(named + result.damage)) if named else result
    )


def _check_names(fs: FileSystem, step: ScrubStep) -> tuple[Damage, ...]:
    """Check names and sizes once per pass, with the first step in a log."""
    segment = step.target.segment
    if not step.target.is_first or step.start != segment.base_offset:
        return ()
    try:
        names = check_names(fs, segment.path.parent, in_use=True)
    except MissingFileError as error:
        return (Damage(segment.path.parent, step.start, None, str(error)),)
    if names.bad_name:
        path = segment.path.parent
        _log.error("name refused: directory=%s cause=%s", path, names.bad_name)
    return names.damage


def _check(fs: FileSystem, step: ScrubStep) -> StepResult:
    segment = step.target.segment
    index = step.index
    is_completing = step.target.is_sealed and bool(step.made)
    if index is None or (index.end_offset <= step.start and not is_completing):
        # The index of a segment that was active when it was read has grown since.
        is_logged = step.start == segment.base_offset
        index = index_of(fs, segment, is_logged=is_logged).until(segment.end_offset)
    with fs.open_read(segment.path) as file:
        part = check_part(
            file,
            segment,
            index,
            step.start,
            bytes_max=step.bytes_max,
            span_bytes_min=step.span_bytes_min,
        )
    for span in part.miscounted:
        _log.warning(
            "span index counts wrongly: file=%s offset=%d",
            segment.path,
            span.base_offset,
        )
    checked = SizeBytes(part.end - step.start)
    return StepResult(part.end, checked, part.damage, index, step.made + part.spans)


def _complete_index(fs: FileSystem, step: ScrubStep, result: StepResult) -> None:
    """Write the index of a sealed segment whose index was missing or incomplete."""
    index = result.index
    may_write = step.target.is_sealed and step.target.may_write
    if not (may_write and step.is_intact and result.made) or index is None:
        return
    assert all(span.size_bytes <= SPAN_BYTES_MAX for span in result.made)
    whole = replace(index, spans=index.spans + result.made)
    if whole.end_offset != step.target.segment.end_offset:
        return
    path = spans_path(step.target.segment.path, whole.base_offset)
    if fs.is_directory(path):
        _log.error("span index cannot be made, its name is taken: directory=%s", path)
        return
    with suppress(NoSpaceError):
        write_index(fs, step.target.segment.path, whole, is_sealed=True)
        _log.info("span index made: file=%s", step.target.segment.path)
