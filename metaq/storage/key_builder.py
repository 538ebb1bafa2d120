"""Make the key indexes of topics that want one, in the background.

Work is cut into steps, as that of the scrub is:

    step = builder.take_step(targets, monotonic_s)     the owner's thread
    end = run_key_step(fs, step)                       a helper thread, blocking
    builder.finish_step(step, end, monotonic_s)        the owner's thread

A step makes one block. Its bytes are compared with their spans first: an entry of
damaged bytes could hide a record that is mended later. Of the active segment whole
blocks are made, of a sealed one the rest as well; the newest segments come first.

The end of each index is remembered, and looked up again from time to time: a log may
be cut, and a file removed. While a step runs no log is cut (`Retention.hold`).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from metaq.fs import FileSystem, ReadFile
from metaq.model import LogId, Offset, SizeBytes
from metaq.storage.key_index import (
    BLOCK_BYTES_MIN,
    BlockMaker,
    KeyBlock,
    keys_path,
    read_blocks,
)
from metaq.storage.segment import Segment
from metaq.storage.span_index import Span
from metaq.storage.span_lookup import open_spans
from metaq.storage.walk import WINDOW_BYTES, damaged_spans

LOOK_S: Final = 600.0
"""The ends of indexes are looked up this often."""

RETRY_S: Final = 3.0
"""A segment is tried again after so long; one that was sealed just now may lack spans,
and others wait for the scrub."""

IDLE_S: Final = 1.0
"""Time between two looks for something to do."""


_Key = tuple[LogId, Offset, tuple[bytes, ...]]


class KeyTarget(NamedTuple):
    """One segment that is to have an index."""

    log_id: LogId
    segment: Segment
    """With the size of its durable bytes."""
    is_sealed: bool
    names: tuple[bytes, ...]
    """Names that are indexed, as fields begin."""

    @property
    def key(self) -> _Key:
        """Its key in the memory of the builder."""
        return self.log_id, self.segment.base_offset, self.names


@dataclass(frozen=True, slots=True)
class KeyStep:
    """One piece of work."""

    target: KeyTarget
    block_bytes: int
    is_new: bool
    """Nothing that there is of the index is believed."""


class KeyStepResult(NamedTuple):
    """Result of a step."""

    end: Offset
    """The index reaches so far."""
    read_bytes: int
    is_stuck: bool = False
    """Its next bytes cannot be compared with spans now."""


class KeyBuilder:
    """Schedule of steps. Owner: one thread; one step at a time."""

    def __init__(self, bytes_per_s: int, *, block_bytes: int = BLOCK_BYTES_MIN) -> None:
        """Begin with nothing known; a rate of 0 makes nothing."""
        self._bytes_per_s = bytes_per_s
        self._block_bytes = block_bytes
        self._due_s = 0.0 if bytes_per_s else math.inf
        self._known: dict[_Key, tuple[Offset, float]] = {}
        """The end of each index, and when it is looked up again."""
        self._distrusted: set[_Key] = set()

    def distrust(self, key: _Key) -> None:
        """Have an index made again of which a part was damaged."""
        self._distrusted.add(key)

    def delay_s(self, monotonic_s: float) -> float:
        """Return when to ask for a step, in seconds from now."""
        return max(0.0, self._due_s - monotonic_s)

    def take_step(
        self, targets: Iterable[KeyTarget], monotonic_s: float
    ) -> KeyStep | None:
        """Return the next step; None: there is nothing to do now."""
        if monotonic_s < self._due_s:
            return None
        self._due_s = monotonic_s + IDLE_S
        seen: dict[_Key, tuple[Offset, float]] = {}
        for target in targets:
            end, look_s = self._known.get(target.key, (Offset(-1), 0.0))
            is_new = target.key in self._distrusted
            left = target.segment.end_offset - end
            wanted = 1 if target.is_sealed else self._block_bytes
            if is_new or monotonic_s >= look_s or left >= wanted:
                # A step that fails is made again after a while.
                again = target.segment.end_offset, monotonic_s + RETRY_S
                self._known[target.key] = again
                return KeyStep(target, self._block_bytes, is_new)
            seen[target.key] = end, look_s
        self._known = seen
        return None

    def finish_step(
        self, step: KeyStep, result: KeyStepResult, monotonic_s: float
    ) -> None:
        """Take over the result of a step."""
        target = step.target
        self._due_s = monotonic_s + result.read_bytes / self._bytes_per_s
        self._distrusted.discard(target.key)
        if not result.is_stuck:
            self._known[target.key] = result.end, monotonic_s + LOOK_S


def run_key_step(fs: FileSystem, step: KeyStep) -> KeyStepResult:
    """Make the next block of a segment; blocks.

    Raises:
        StorageError: the disk refuses; what is there stays as good as it was.
    """
    target, segment = step.target, step.target.segment
    path = keys_path(segment.path, segment.base_offset)
    file, blocks = None if step.is_new else fs.try_open_read(path), list[KeyBlock]()
    if file is not None:
        base, end = segment.base_offset, segment.end_offset
        with file:
            blocks = read_blocks(file, base, end, target.names)
    start, spans = _next_block(fs, target, blocks, step.block_bytes)
    if not spans:
        end = segment.end_offset if target.is_sealed else start
        return KeyStepResult(start, 0, is_stuck=start < end)
    end = spans[-1].end_offset
    with fs.open_read(segment.path) as log:
        if damaged_spans(log, segment.base_offset, spans):
            return KeyStepResult(start, end - start, is_stuck=True)
        block = _make(log, target, start, end)
    size = SizeBytes(blocks[-1].after if blocks else 0)
    if fs.exists(segment.path):
        with fs.open_append(path, create=True, is_synced=False) as index:
            if index.size() != size:
                index.truncate(size)
            index.write(block)
    return KeyStepResult(end, end - start)


def _next_block(
    fs: FileSystem, target: KeyTarget, blocks: list[KeyBlock], block_bytes: int
) -> tuple[Offset, list[Span]]:
    """Return where the next block begins, and its spans; none where it is too early.

    A block that ends within a span, because the index was made again with others, is
    taken out.
    """
    while True:
        start = blocks[-1].end if blocks else target.segment.base_offset
        spans = _spans_after(fs, target, start, block_bytes)
        if not spans or spans[0].base_offset == start:
            return start, spans
        blocks.pop()


def _spans_after(
    fs: FileSystem, target: KeyTarget, start: Offset, block_bytes: int
) -> list[Span]:
    segment, spans = target.segment, list[Span]()
    with open_spans(fs, segment) as lookup:
        for span in lookup.pieces(start, segment.end_offset, is_merged=False):
            if not span.record_count:
                break
            # One that is followed by another grows no more.
            if spans and spans[-1].end_offset - start >= block_bytes:
                return spans
            spans.append(span)
    is_rest = bool(spans) and spans[-1].end_offset == segment.end_offset
    return spans if target.is_sealed and is_rest else []


def _make(file: ReadFile, target: KeyTarget, start: Offset, end: Offset) -> bytes:
    maker, at, size = BlockMaker(start, target.names), start, WINDOW_BYTES
    while at < end:
        position = target.segment.position_of(at)
        data = file.read_at(position, SizeBytes(min(size, end - at)))
        used = maker.add(data, at)
        # A record may be longer than a window.
        size = WINDOW_BYTES if used else size * 2
        at = Offset(at + used)
    return maker.encode(end)
