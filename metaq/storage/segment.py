"""Segment: a file, its base offset and its size; and the segments of one log.

    <dataPath>/<topic>-<partition>/00000000000000004096.meta
                                   base offset, 20 digits

A `Segment` is a value: a roll or a truncation makes another one. The open file of
the active segment belongs to the storage thread (`log_writer.py`). Offsets and
positions are converted here and nowhere else.

`Segments` are in order of their base offsets; replaced, never edited. Look-up is a
bisection on base offsets. A reader that holds them keeps a consistent view while the
log rolls or its head is trimmed. In a log without damage neighbours are contiguous:
base offset + size = next base offset; where damage broke that, a look-up inside the
hole finds nothing. Source: docs/metaq-1.4/broker.md 2.1, 2.4.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from metaq.errors import CorruptRecordError
from metaq.model import LogId, Offset, Position, SizeBytes

META_SUFFIX: Final = ".meta"
"""Suffix of segment files; no other file may have it."""

NAME_DIGITS: Final = 20
"""Digits of the base offset in a name that we write; MetaQ reads any number."""


def segment_file_name(base_offset: Offset) -> str:
    """Return the file name of the segment that starts at `base_offset` (0 or more)."""
    return f"{base_offset:0{NAME_DIGITS}d}{META_SUFFIX}"


@dataclass(frozen=True, slots=True)
class Segment:
    """One append-only file of a partition log."""

    path: Path
    """The file; its name may be unpadded if a Java broker's tools made it."""
    base_offset: Offset
    size_bytes: SizeBytes
    """Size of the file; for the active segment, its size when this value was made."""

    @property
    def end_offset(self) -> Offset:
        """Return the offset after its last byte: the next segment's base offset."""
        return Offset(self.base_offset + self.size_bytes)

    def contains(self, offset: Offset) -> bool:
        """Return whether the byte at `offset` is in this segment."""
        return self.base_offset <= offset < self.base_offset + self.size_bytes

    def position_of(self, offset: Offset) -> Position:
        """Return the position in the file of the byte at `offset`."""
        assert offset >= self.base_offset, (offset, self)
        return Position(offset - self.base_offset)

    def offset_at(self, position: Position) -> Offset:
        """Return the offset of the byte at `position` in the file."""
        return Offset(self.base_offset + position)


class Segments:
    """An immutable list of segments with at least one member; the last is active."""

    __slots__ = ("_bases", "_items", "active", "first", "sealed")

    def __init__(self, items: Iterable[Segment]) -> None:
        """Take one or more segments, sorted by base offset."""
        self._items = tuple(items)
        self._bases = [segment.base_offset for segment in self._items]
        assert self._bases, "a log has at least its active segment"
        assert self._bases == sorted(self._bases), self._bases
        self.first: Final = self._items[0]
        """The segment at the log start."""
        self.active: Final = self._items[-1]
        """The segment that takes appends."""
        self.sealed: Final = self._items[:-1]
        """All but the active one, oldest first."""

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._items)

    def find(self, offset: Offset) -> Segment | None:
        """Return the segment that contains `offset`, or None.

        The active segment is taken to contain every offset from its base offset on,
        because its present size is not known here. An empty sealed segment has none.
        """
        index = bisect_right(self._bases, offset) - 1
        if index < 0:
            return None
        segment = self._items[index]
        is_active = index == len(self._items) - 1
        return segment if is_active or segment.contains(offset) else None

    def following(self, offset: Offset) -> Segment | None:
        """Return the first segment that starts after `offset`, or None."""
        index = bisect_right(self._bases, offset)
        return self._items[index] if index < len(self._items) else None

    def settled(self, end: Offset) -> tuple[Segment, ...]:
        """Return the sealed segments that end at `end` or before, oldest first."""
        count = min(bisect_right(self._bases, end), len(self.sealed))
        if count and self._items[count - 1].end_offset > end:
            count -= 1
        return self.sealed[:count]

    def readable_active(self, end: Offset) -> Segment:
        """Return the active segment with its readable size, if readable up to `end`."""
        size = max(0, end - self.active.base_offset)
        return replace(self.active, size_bytes=SizeBytes(size))

    def rolled(self, sealed: Segment, active: Segment) -> "Segments":
        """Return the list after a roll: the active one sealed, then a new one."""
        assert sealed.base_offset == self.active.base_offset, (sealed, self.active)
        assert sealed.end_offset == active.base_offset, (sealed, active)
        return Segments((*self._items[:-1], sealed, active))

    def without(self, removed: Segment) -> "Segments":
        """Return the list without its first segment, which must be `removed`.

        Segments are removed oldest first; the active one is never removed.
        """
        assert len(self._items) > 1, "the active segment stays"
        assert removed.base_offset == self.first.base_offset, (removed, self.first)
        return Segments(self._items[1:])


@dataclass(frozen=True, slots=True)
class Damage:
    """A range of a log that contradicts a checksum or an invariant.

    It extends from `offset` to `next_good_offset`, or to the end of the log if that is
    None. Bytes on both sides of it are good. It is empty if the file has bytes to which
    no offset of the log maps.
    """

    path: Path
    offset: Offset
    """First damaged offset."""
    next_good_offset: Offset | None
    """Offset where a reader can resume; None: there is none."""
    detail: str

    @property
    def is_empty(self) -> bool:
        """Return whether the range is empty: every byte of the log is good."""
        return self.offset == self.next_good_offset

    def covers(self, offset: Offset) -> bool:
        """Return whether the byte at `offset` is damaged."""
        end = self.next_good_offset
        return self.offset <= offset and (end is None or offset < end)

    def overlaps(self, start: Offset, end: Offset) -> bool:
        """Return whether any byte of [start, end) is damaged.

        An empty range overlaps if the bytes on both sides of it are damaged.
        """
        good = self.next_good_offset
        is_behind = good is not None and good <= start
        return self.offset < end and not (is_behind or self.is_empty)

    def __str__(self) -> str:
        """Return one line with file, offset and next good offset."""
        good = "none" if self.next_good_offset is None else self.next_good_offset
        return (
            f"{self.detail}: file={self.path} offset={self.offset}"
            f" next_good_offset={good}"
        )


class DamagedSegmentError(CorruptRecordError):
    """A requested offset is in a damaged range; the error carries the range."""

    def __init__(self, damage: Damage, log_id: LogId | None = None) -> None:
        subject = "" if log_id is None else f"partition {log_id}: "
        super().__init__(
            f"{subject}{damage}",
            offset=damage.offset,
            next_good_offset=damage.next_good_offset,
            path=str(damage.path),
            detail=damage.detail,
        )
        self.damage = damage
        """The damaged range."""
