"""The segments of one log, in order of their base offsets; replaced, never edited.

Look-up is a bisection on base offsets. A reader that holds a `Segments` keeps a
consistent view while the log rolls or its head is trimmed. In a log without damage
neighbours are contiguous: base offset + size = next base offset; where damage broke
that, a look-up inside the hole finds nothing. Source: broker spec 2.4.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator

from metaq.model import Offset
from metaq.storage.segment import Segment


class Segments:
    """An immutable list of segments with at least one member; the last is active."""

    __slots__ = ("_bases", "_items")

    def __init__(self, items: Iterable[Segment]) -> None:
        """Take segments sorted by base offset.

        Args:
            items: one or more.
        """
        self._items = tuple(items)
        self._bases = [segment.base_offset for segment in self._items]
        assert self._bases, "a log has at least its active segment"
        assert self._bases == sorted(self._bases), self._bases

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._items)

    @property
    def first(self) -> Segment:
        """Return the segment at the log start."""
        return self._items[0]

    @property
    def active(self) -> Segment:
        """Return the segment that takes appends."""
        return self._items[-1]

    @property
    def sealed(self) -> tuple[Segment, ...]:
        """Return all but the active one, oldest first."""
        return self._items[:-1]

    def find(self, offset: Offset) -> Segment | None:
        """Return the segment whose bytes hold `offset`, or None.

        The active segment holds everything from its base offset on: its size is not
        known here. An empty sealed segment holds nothing.
        """
        index = bisect_right(self._bases, offset) - 1
        if index < 0:
            return None
        segment = self._items[index]
        is_active = index == len(self._items) - 1
        return segment if is_active or segment.contains(offset) else None

    def following(self, offset: Offset) -> Segment | None:
        """Return the first segment that starts behind `offset`, or None."""
        index = bisect_right(self._bases, offset)
        return self._items[index] if index < len(self._items) else None

    def rolled(self, sealed: Segment, active: Segment) -> "Segments":
        """Return the list after a roll: the active one sealed, a new one behind it."""
        assert sealed.base_offset == self.active.base_offset, (sealed, self.active)
        assert sealed.end_offset == active.base_offset, (sealed, active)
        return Segments((*self._items[:-1], sealed, active))

    def without(self, removed: Segment) -> "Segments":
        """Return the list without its first segment, which has to be `removed`.

        Segments go from the oldest on, and the active one never goes.
        """
        assert len(self._items) > 1, "the active segment stays"
        assert removed.base_offset == self.first.base_offset, (removed, self.first)
        return Segments(self._items[1:])
