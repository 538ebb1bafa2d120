"""Deadlines of many things at once, in a heap: only what is due is looked at."""

import asyncio
import heapq
from collections.abc import Callable, Hashable
from itertools import count
from typing import Final, Generic, TypeVar

SPARE_MAX: Final = 1000
"""Places in the heap of what has no deadline any more, besides as many as there are
deadlines; then it is rebuilt."""

K = TypeVar("K", bound=Hashable)


class Deadlines(Generic[K]):
    """At most one deadline for each key. Owner: one object; not for two threads.

    What is cleared stays in the heap, unheeded, until its time or until there are many.
    """

    def __init__(self) -> None:
        """Start without any."""
        self._heap: list[tuple[float, int, K]] = []
        self._entries: dict[K, tuple[float, int, K]] = {}
        self._numbers = count()

    def __len__(self) -> int:
        """Return how many keys have a deadline."""
        return len(self._entries)

    @property
    def first_s(self) -> float | None:
        """Return a time before which nothing is due; None: there is no deadline."""
        return self._heap[0][0] if self._heap else None

    def get(self, key: K) -> float | None:
        """Return a key's deadline; None when it has none."""
        entry = self._entries.get(key)
        return None if entry is None else entry[0]

    def set(self, key: K, deadline_s: float) -> None:
        """Give a key a deadline in place of the one that it has.

        Args:
            key: hashed and compared as in a dictionary, never ordered.
            deadline_s: on a clock of the owner's, seconds.
        """
        entry = (deadline_s, next(self._numbers), key)
        self._entries[key] = entry
        heapq.heappush(self._heap, entry)
        self._clean()

    def clear(self, key: K) -> None:
        """Forget a key's deadline; harmless when it has none."""
        if self._entries.pop(key, None) is not None:
            self._clean()

    def take_due(self, now_s: float) -> list[K]:
        """Return the keys whose deadline has come, oldest first; they have none now."""
        due: list[K] = []
        while self._heap and self._heap[0][0] <= now_s:
            entry = heapq.heappop(self._heap)
            if self._entries.get(entry[2]) is entry:
                del self._entries[entry[2]]
                due.append(entry[2])
        return due

    def _clean(self) -> None:
        if len(self._heap) > 2 * len(self._entries) + SPARE_MAX:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)


class DeadlineTimer(Generic[K]):
    """One timer of the running loop over many deadlines. For the loop's thread."""

    def __init__(
        self,
        deadlines: Deadlines[K],
        now_s: Callable[[], float],
        on_due: Callable[[list[K]], object],
        *,
        together_s: float = 0.0,
    ) -> None:
        """Prepare; `start` follows each deadline that was set.

        Args:
            deadlines: the owner's, who sets and clears them.
            now_s: the clock that they are of, seconds.
            on_due: called with the keys that are due, oldest first; may be empty, as a
                deadline that was cleared does not stop the timer.
            together_s: shortest wait: what is due within it is due together.
        """
        self._deadlines = deadlines
        self._now_s = now_s
        self._on_due = on_due
        self._together_s = together_s
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Wait for the first deadline, unless the timer ends earlier already."""
        first_s = self._deadlines.first_s
        if first_s is None:
            return
        loop = asyncio.get_running_loop()
        at_s = loop.time() + max(first_s - self._now_s(), self._together_s)
        if self._handle is not None:
            if self._handle.when() <= at_s:
                return
            self._handle.cancel()
        self._handle = loop.call_at(at_s, self._end)

    def close(self) -> None:
        """Stop the timer; `start` would start it again."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _end(self) -> None:
        self._handle = None
        try:
            self._on_due(self._deadlines.take_due(self._now_s()))
        finally:
            self.start()
