"""Deadlines of many keys in one heap: a check costs only the keys that are due."""

import asyncio
import heapq
from collections.abc import Callable, Hashable
from itertools import count
from typing import Final, Generic, TypeVar

SPARE_MAX: Final = 1000
"""Stale heap entries that are kept, in addition to one for each deadline."""

K = TypeVar("K", bound=Hashable)


class Deadlines(Generic[K]):
    """At most one deadline for each key. Owned by one object; not thread-safe.

    A cleared or replaced deadline stays in the heap as a stale entry until its time
    comes or the heap is rebuilt.
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
        """Return a time before which nothing is due; None if the heap is empty."""
        return self._heap[0][0] if self._heap else None

    def get(self, key: K) -> float | None:
        """Return a key's deadline; None when it has none."""
        entry = self._entries.get(key)
        return None if entry is None else entry[0]

    def set(self, key: K, deadline_s: float) -> None:
        """Set a key's deadline, replacing the one it has.

        Args:
            key: hashed and compared as in a dictionary, never ordered.
            deadline_s: on a clock of the owner's, seconds.
        """
        entry = (deadline_s, next(self._numbers), key)
        self._entries[key] = entry
        heapq.heappush(self._heap, entry)
        self._clean()

    def clear(self, key: K) -> None:
        """Remove a key's deadline, if it has one."""
        if self._entries.pop(key, None) is not None:
            self._clean()

    def take_due(self, now_s: float) -> list[K]:
        """Remove the deadlines that have come and return their keys, oldest first."""
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
    """One timer of the running loop for many deadlines. Used on the loop's thread."""

    def __init__(
        self,
        deadlines: Deadlines[K],
        now_s: Callable[[], float],
        on_due: Callable[[list[K]], object],
        *,
        together_s: float = 0.0,
    ) -> None:
        """Create a timer that is not running; call `start` after each `set`.

        Args:
            deadlines: the owner's, which sets and clears them.
            now_s: the clock of the deadlines, in seconds.
            on_due: called with the keys that are due, oldest first. The list may be
                empty, because clearing a deadline does not stop the timer.
            together_s: shortest wait, in seconds; joins deadlines that come within it.
        """
        self._deadlines = deadlines
        self._now_s = now_s
        self._on_due = on_due
        self._together_s = together_s
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Wait for the first deadline, unless the timer already fires earlier."""
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
        """Stop the timer; `start` starts it again."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _end(self) -> None:
        self._handle = None
        try:
            self._on_due(self._deadlines.take_due(self._now_s()))
        finally:
            self.start()
