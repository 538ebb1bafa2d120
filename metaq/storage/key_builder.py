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

IDLE_S: Final = 1.0
"""Time between two looks for something to do."""


class KeyTarget(NamedTuple):
    """One segment that is to have an index."""

    log_id: LogId
    segment: Segment
    """With the size of its durable bytes."""
    is_sealed: bool
    names: tuple[bytes, ...]
    """Names that are indexed, as fields begin."""

    @property
    def key(self) -> tuple[LogId, Offset, tuple[bytes, ...]]:
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
    is_done: bool
    """Nothing more can be made now."""


class KeyBuilder:
    """Schedule of steps. Owner: one thread; one step at a time."""

    def __init__(self, bytes_per_s: int, *, block_bytes: int = BLOCK_BYTES_MIN) -> None:
        """Begin with nothing known; a rate of 0 makes nothing."""
        self._bytes_per_s = bytes_per_s
        self._block_bytes = block_bytes
        self._due_s = 0.0
        self._look_s = 0.0
        self._ends: dict[tuple[LogId, Offset, tuple[bytes, ...]], Offset] = {}
        self._distrusted: set[tuple[LogId, Offset]] = set()

    def distrust(self, log_id: LogId, base: Offset) -> None:
        """Have an index made again of which a part was damaged."""
        self._distrusted.add((log_id, base))
        self._look_s = 0.0

    def delay_s(self, monotonic_s: float) -> float:
        """Return when to ask for a step, in seconds from now."""
        return max(0.0, self._due_s - monotonic_s)

    def take_step(
        self, targets: Iterable[KeyTarget], monotonic_s: float
    ) -> KeyStep | None:
        """Return the next step; None: there is nothing to do now."""
        if not self._bytes_per_s or monotonic_s < self._due_s:
            return None
        if monotonic_s >= self._look_s:
            self._ends.clear()
            self._look_s = monotonic_s + LOOK_S
        for target in targets:
            end = self._ends.get(target.key)
            left = target.segment.end_offset - (end or target.segment.base_offset)
            if end is None or left >= (1 if target.is_sealed else self._block_bytes):
                is_new = target.key[:2] in self._distrusted
                return KeyStep(target, self._block_bytes, is_new)
        self._due_s = monotonic_s + IDLE_S
        return None

    def finish_step(
        self, step: KeyStep, result: KeyStepResult, monotonic_s: float
    ) -> None:
        """Take over the result of a step."""
        target = step.target
        self._due_s = monotonic_s + result.read_bytes / self._bytes_per_s
        if step.is_new:
            self._distrusted.discard(target.key[:2])
        # What cannot be indexed now is tried again after the next look.
        end = target.segment.end_offset if result.is_done else result.end
        self._ends[target.key] = end


def run_key_step(fs: FileSystem, step: KeyStep) -> KeyStepResult:
    """Make the next block of a segment; blocks.

    Raises:
        StorageError: the disk refuses; what is there stays as good as it was.
    """
    target, segment = step.target, step.target.segment
    blocks = _believed(fs, step)
    start, spans = _next_block(fs, target, blocks, step.block_bytes)
    if not spans:
        return KeyStepResult(start, 0, is_done=True)
    end = spans[-1].end_offset
    with fs.open_read(segment.path) as file:
        if damaged_spans(file, segment.base_offset, spans):
            return KeyStepResult(start, end - start, is_done=True)
        block = _make(file, target, start, end)
    size = SizeBytes(blocks[-1].after if blocks else 0)
    path = keys_path(segment.path, segment.base_offset)
    if fs.exists(segment.path):
        with fs.open_append(path, create=True, is_synced=False) as index:
            if index.size() != size:
                index.truncate(size)
            index.write(block)
    return KeyStepResult(end, end - start, is_done=False)


def _believed(fs: FileSystem, step: KeyStep) -> list[KeyBlock]:
    segment = step.target.segment
    base, end = segment.base_offset, segment.end_offset
    file = fs.try_open_read(keys_path(segment.path, base))
    if file is None:
        return []
    with file:
        return [] if step.is_new else read_blocks(file, base, end, step.target.names)


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
