"""Make the key indexes of topics that have one configured, in the background.

Work is divided into steps, like that of the scrub:

    step = builder.take_step(logs, monotonic_s)        the owner's thread
    end = run_key_step(fs, step)                       a helper thread, blocking
    builder.finish_step(step, end, monotonic_s)        the owner's thread

A step indexes the next bytes of one segment, up to STEP_BYTES. They are first compared
with their spans: an entry of damaged bytes could hide a record that is mended later.
New bytes are indexed once there are enough (READY_PARTS), or after WAIT_S, so that an
idle log is indexed to its end; the last span may grow, and is then compared once more.

The new block replaces the previous blocks that together cover no more than it does
(`_kept_count`): there are about as many blocks as the number of bytes has binary
digits, and each entry is merged as often. A sealed segment has one block.

The end of each index is cached, and looked up again from time to time, because a log
may be cut and a file removed. While a step runs no log is cut (`Retention.hold`). A
look visits all logs, but the segments only of those whose segments have changed: sealed
segments wait in a heap until they are due. Active and sealed segments take turns.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final, NamedTuple

from metaq.errors import StorageError
from metaq.fs import FileSystem, ReadFile
from metaq.model import LogId, Offset, SizeBytes
from metaq.storage.key_index import (
    SEGMENT_BYTES_MAX,
    DamagedIndexError,
    KeyBlock,
    keys_path,
    read_blocks,
)
from metaq.storage.key_merge import BlockMaker
from metaq.storage.segment import Segment, Segments
from metaq.storage.span_index import Span
from metaq.storage.span_lookup import open_spans
from metaq.storage.walk import damaged_spans

STEP_BYTES: Final = 16 << 20
"""Maximum size of a step, exceeded by less than a span."""

READY_PARTS: Final = 16
"""New bytes of at least this part of a step, 1 MiB, are indexed at the next look; fewer
wait for WAIT_S."""

SMALL_PARTS: Final = 64
"""A block that covers at most this part of a step, 256 KiB, is merged with the next."""

DEAD_PARTS: Final = 4
"""A file is rewritten when it is larger than twice its used blocks plus this part of a
step, 4 MiB."""

WAIT_S: Final = 1.0
"""Time for which a few new bytes wait for a step, before a look (IDLE_S) finds them."""

WINDOW_BYTES: Final = 128 << 10
"""Bytes of records read at once; their entries are sorted by one call."""

LOOK_S: Final = 600.0
"""Time after which the end of an index is looked up again."""

RETRY_S: Final = 3.0
"""Time before a segment is tried again: a newly sealed one may lack spans, and others
wait for the scrub."""

IDLE_S: Final = 1.0
"""Time between two looks if there is no work."""

SCAN_S: Final = 0.25
"""Minimum time between two looks if there is work, plus LOG_S for each log."""

LOG_S: Final = 0.0002
"""Time per log between two looks: a hundred times the cost of looking at one."""

LOOK_COUNT: Final = 500
"""Maximum number of logs visited without a pause: about a millisecond."""

LOOK_PAUSE_S: Final = 0.01
"""Pause within a look, for other work on the owner's thread."""

STEP_S_MIN: Final = 0.005
"""Minimum time accounted for a step: opening its files alone takes 0.5 ms."""

TEMPORARY_SUFFIX: Final = ".tmp"

_Names = tuple[bytes, ...]
_LogKey = tuple[LogId, _Names]
_Key = tuple[LogId, Offset, _Names]


class KeyTarget(NamedTuple):
    """One segment that needs an index."""

    log_id: LogId
    segment: Segment
    """The segment, with the size of its durable bytes."""
    is_sealed: bool
    names: _Names
    """Prefixes of the indexed fields."""

    @property
    def key(self) -> _Key:
        """Return its key for `KeyBuilder.distrust`."""
        return self.log_id, self.segment.base_offset, self.names


class KeyLog(NamedTuple):
    """One log that needs indexes, in its present state."""

    log_id: LogId
    names: _Names
    """Prefixes of the indexed fields."""
    segments: Segments
    end: Offset
    """End of its durable bytes."""

    def active(self) -> KeyTarget:
        """Return its active segment."""
        active = self.segments.readable_active(self.end)
        return KeyTarget(self.log_id, active, False, self.names)


@dataclass(frozen=True, slots=True)
class KeyStep:
    """One unit of work."""

    target: KeyTarget
    step_bytes: int
    is_new: bool
    """Whether the existing index is discarded."""


class KeyStepResult(NamedTuple):
    """Result of a step."""

    end: Offset
    """Offset up to which the segment is indexed."""
    read_bytes: int
    is_stuck: bool = False
    """Whether the next bytes can not be compared with spans now."""
    is_damaged: bool = False
    """Whether the index is damaged, so that all of it must be made again."""


_NOWHERE: Final = Offset(-1)


@dataclass(slots=True)
class _Known:
    """State of a log and its indexes."""

    segments: Segments | None = None
    """Segments at the last look."""
    active: Offset = _NOWHERE
    """Base offset of the active segment."""
    end: Offset = _NOWHERE
    """Offset up to which the active segment is indexed."""
    look_s: float = 0.0
    """Time when that offset is looked up again."""
    wait_s: float = 0.0
    """Time from which a few bytes are enough for a step."""
    sealed: dict[Offset, KeyTarget] = field(default_factory=dict)
    """Sealed segments by base offset. Other heap entries of the log are void."""


class KeyBuilder:
    """Schedules the steps. Owner: one thread; one step at a time."""

    def __init__(self, bytes_per_s: int, *, step_bytes: int = STEP_BYTES) -> None:
        """Create a builder without known logs; a rate of 0 disables it."""
        self._bytes_per_s = bytes_per_s
        self._step_bytes = step_bytes
        self._due_s = 0.0 if bytes_per_s else math.inf
        self._scan_s = 0.0
        self._known = dict[_LogKey, _Known]()
        self._looking: Iterator[KeyLog] | None = None
        """The remaining logs of a look; None: no look is in progress."""
        self._seen = dict[_LogKey, _Known]()
        """Logs visited by that look."""
        self._active = dict[_LogKey, KeyTarget]()
        """Active segments that are due, in the order of their steps."""
        self._is_turn_of_sealed = False
        self._sealed = list[tuple[float, int, KeyTarget]]()
        """Heap of sealed segments by due time."""
        self._numbers = itertools.count()
        self._distrusted = set[_Key]()

    def distrust(self, key: _Key) -> None:
        """Schedule a rebuild of an index that has damage."""
        self._distrusted.add(key)
        log_id, base, names = key
        known = self._known.get((log_id, names), _Known())
        if base in known.sealed:
            self._plan(known, known.sealed[base], 0.0)
        elif base == known.active:
            known.end, known.wait_s = base, 0.0

    def delay_s(self, monotonic_s: float) -> float:
        """Return the time until the next call of `take_step`, in seconds."""
        return max(0.0, self._due_s - monotonic_s)

    def take_step(self, logs: Iterable[KeyLog], monotonic_s: float) -> KeyStep | None:
        """Return the next step, or None if nothing is due.

        Args:
            logs: all logs; kept if a look begins, and iterated in later calls.
            monotonic_s: the time.
        """
        if monotonic_s < self._due_s:
            return None
        self._due_s = self._scan_s
        if self._looking is None and monotonic_s >= self._scan_s:
            self._looking, self._seen = iter(logs), {}
        if self._looking is not None:
            self._due_s = monotonic_s + LOOK_PAUSE_S
            some = itertools.islice(self._looking, LOOK_COUNT)
            if self._look(some, monotonic_s) < LOOK_COUNT:
                self._known, self._looking = self._seen, None
                self._scan_s = monotonic_s + SCAN_S + LOG_S * len(self._known)
                self._due_s = monotonic_s + IDLE_S
        target = self._take_target(monotonic_s)
        if target is None:
            return None
        self._due_s = monotonic_s + IDLE_S
        return KeyStep(target, self._step_bytes, target.key in self._distrusted)

    def _look(self, logs: Iterable[KeyLog], monotonic_s: float) -> int:
        """Find active segments that are due; return the number of logs visited."""
        # Flat on purpose: there may be thousands.
        seen, ready_bytes = self._seen, self._step_bytes // READY_PARTS
        before = len(seen)
        for log in logs:
            log_id, names, segments, end = log
            known = self._known.get(key := (log_id, names))
            if known is None:
                known = self._known[key] = _Known()
            if known.segments is not segments or len(known.sealed) + 1 < len(segments):
                self._take_over(log, known, monotonic_s)
            seen[key] = known
            left = end - known.end
            due_s = known.wait_s if left > 0 else known.look_s
            if left >= ready_bytes or monotonic_s >= due_s:
                self._active[key] = log.active()
        return len(seen) - before

    def _take_over(self, log: KeyLog, known: _Known, monotonic_s: float) -> None:
        """Update the known segments of a log, and schedule the new sealed ones."""
        before, known.sealed = known.sealed, {}
        for segment in reversed(log.segments.settled(log.end)):
            base = segment.base_offset
            planned = before.get(base)
            if planned is not None and planned.segment is segment:
                known.sealed[base] = planned
            else:
                target = KeyTarget(log.log_id, segment, True, log.names)
                self._plan(known, target, monotonic_s)
        if known.segments is not log.segments:
            known.segments = log.segments
            known.active = known.end = log.segments.active.base_offset
            known.look_s, known.wait_s = monotonic_s + LOOK_S, 0.0

    def _plan(self, known: _Known, target: KeyTarget, due_s: float) -> None:
        """Schedule a sealed segment; an earlier schedule of it becomes void."""
        target = known.sealed[target.segment.base_offset] = target._replace()
        heappush(self._sealed, (due_s, next(self._numbers), target))

    def _take_target(self, monotonic_s: float) -> KeyTarget | None:
        if self._is_turn_of_sealed or not self._active:
            self._is_turn_of_sealed = False
            target = self._take_sealed(monotonic_s)
            if target is not None or not self._active:
                return target
        self._is_turn_of_sealed = True
        key = next(iter(self._active))
        target, known = self._active.pop(key), self._known.get(key, _Known())
        # A failed step is repeated after RETRY_S.
        known.end = target.segment.end_offset
        known.look_s = known.wait_s = monotonic_s + RETRY_S
        return target

    def _take_sealed(self, monotonic_s: float) -> KeyTarget | None:
        while self._sealed and self._sealed[0][0] <= monotonic_s:
            target = heappop(self._sealed)[2]
            known = self._known.get((target.log_id, target.names), _Known())
            if known.sealed.get(target.segment.base_offset) is target:
                self._plan(known, target, monotonic_s + RETRY_S)
                return target
        return None

    def finish_step(
        self, step: KeyStep, result: KeyStepResult, monotonic_s: float
    ) -> None:
        """Process the result of a step."""
        target, segment = step.target, step.target.segment
        turn_s = max(STEP_S_MIN, result.read_bytes / self._bytes_per_s)
        self._due_s = monotonic_s + turn_s
        self._distrusted.discard(target.key)
        if result.is_damaged:
            self.distrust(target.key)
        if result.is_damaged or result.is_stuck:
            return
        known = self._known.get((target.log_id, target.names), _Known())
        planned = known.sealed.get(segment.base_offset)
        if planned is not None and planned.segment is segment:
            is_done = result.end >= segment.end_offset
            self._plan(known, planned, monotonic_s + LOOK_S * is_done)
        elif segment.base_offset == known.active:
            known.end = result.end
            known.look_s, known.wait_s = monotonic_s + LOOK_S, monotonic_s + WAIT_S


def run_key_step(fs: FileSystem, step: KeyStep) -> KeyStepResult:
    """Index the next bytes of a segment, and merge blocks; blocks.

    Raises:
        StorageError: the disk refuses; the existing index stays valid.
    """
    target, segment = step.target, step.target.segment
    base, path = segment.base_offset, keys_path(segment.path, segment.base_offset)
    with ExitStack() as files:
        file, blocks = None if step.is_new else fs.try_open_read(path), list[KeyBlock]()
        if file is not None:
            files.enter_context(file)
            blocks = read_blocks(file, base, segment.end_offset, target.names)
        log = fs.try_open_read(segment.path)
        if log is None:
            # Retention has removed it.
            return KeyStepResult(segment.end_offset, 0)
        files.enter_context(log)
        start = blocks[-1].end if blocks else base
        limit = min(segment.end_offset, Offset(base + SEGMENT_BYTES_MAX))
        spans = _spans_after(fs, segment, start, limit, step.step_bytes)
        damaged = damaged_spans(log, base, spans)
        if damaged:
            spans = spans[: spans.index(damaged[0])]
        end = max(start, spans[-1].end_offset) if spans else start
        is_stuck = bool(damaged) or (target.is_sealed and end == start < limit)
        is_whole = target.is_sealed and end == limit
        done = segment.end_offset if end == limit else end
        if end == start and not (is_whole and len(blocks) > 1):
            return KeyStepResult(done, 0, is_stuck)
        # One block: for a whole segment, or in a rewritten file.
        is_one = is_whole or _is_mostly_dead(blocks, step.step_bytes)
        kept = 0 if is_one else _kept_count(blocks, end - start, step.step_bytes)
        maker = BlockMaker(base, target.names)
        _add(maker, log, segment, start, end)
        merged = blocks[kept:]
        block = maker.encode(merged[0].base if merged else start, end, file, merged)
        try:
            if blocks and is_one:
                _replace(fs, segment, block)
            else:
                _append(fs, segment, blocks, block)
        except DamagedIndexError:
            return KeyStepResult(start, end - start, is_damaged=True)
    index_bytes = sum(each.file_bytes for each in merged)
    return KeyStepResult(done, end - start + 2 * index_bytes, is_stuck)


def _spans_after(
    fs: FileSystem, segment: Segment, start: Offset, limit: Offset, step_bytes: int
) -> list[Span]:
    """Return the next spans, read now; the first may begin before `start`."""
    spans = list[Span]()
    if start >= limit:
        return spans
    with open_spans(fs, segment) as lookup:
        for span in lookup.pieces(start, limit, is_merged=False):
            if not span.record_count or span.end_offset > limit:
                break
            spans.append(span)
            if span.end_offset - start >= step_bytes:
                break
    return spans


def _kept_count(blocks: Sequence[KeyBlock], size_bytes: int, step_bytes: int) -> int:
    """Return how many blocks stay before a new one that covers `size_bytes`."""
    kept, small = len(blocks), step_bytes // SMALL_PARTS
    while kept and blocks[kept - 1].size_bytes <= max(size_bytes, small):
        kept -= 1
        size_bytes += blocks[kept].size_bytes
    return kept


def _is_mostly_dead(blocks: Sequence[KeyBlock], step_bytes: int) -> bool:
    """Return whether most of a file is replaced blocks."""
    used = sum(each.file_bytes for each in blocks)
    return bool(blocks) and blocks[-1].after > 2 * used + step_bytes // DEAD_PARTS


def _add(
    maker: BlockMaker, log: ReadFile, segment: Segment, start: Offset, end: Offset
) -> None:
    at, size = start, WINDOW_BYTES
    while at < end:
        data = log.read_at(segment.position_of(at), SizeBytes(min(size, end - at)))
        used = maker.add(data, at)
        # A record may be longer than a window.
        size = WINDOW_BYTES if used else size * 2
        at = Offset(at + used)


def _append(
    fs: FileSystem, segment: Segment, blocks: Sequence[KeyBlock], block: Iterable[bytes]
) -> None:
    """Write a block after the valid ones."""
    path = keys_path(segment.path, segment.base_offset)
    if not fs.exists(segment.path):
        return
    size = SizeBytes(blocks[-1].after if blocks else 0)
    with fs.open_append(path, create=True, is_synced=False) as index:
        if index.size() != size:
            index.truncate(size)
        for part in block:
            index.write(part)


def _replace(fs: FileSystem, segment: Segment, block: Iterable[bytes]) -> None:
    """Replace the file by one with one block; readers keep the old one."""
    path = keys_path(segment.path, segment.base_offset)
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        with fs.open_append(temporary, create=True, is_synced=False) as index:
            index.truncate(SizeBytes(0))
            for part in block:
                index.write(part)
        if fs.exists(segment.path):
            fs.rename(temporary, path)
    finally:
        # An error of `discard` must not replace that of the write.
        with suppress(StorageError):
            fs.discard(temporary)
