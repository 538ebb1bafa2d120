"""A clock that moves only when a test moves it."""

import asyncio
import heapq
from collections.abc import Coroutine
from itertools import count
from typing import Any, Final, TypeVar

from metaq.model import Millis

WALL_MS: Final = Millis(1_700_000_000_000)
"""Initial wall time: 2023-11-14 22:13:20 UTC."""

_ROUNDS: Final = 20
"""Turns of the event loop after which every runnable task has run."""

T = TypeVar("T")


class ManualClock:
    """`metaq.clock.Clock` for tests: it advances only by its methods, `drive` included.

    Sleepers are woken in the order of their wake-up times. For one event loop.
    """

    def __init__(self, wall_ms: Millis = WALL_MS, monotonic_s: float = 1000.0) -> None:
        self._wall_ms = float(wall_ms)
        self._monotonic_s = monotonic_s
        self._suspended_s = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = count()

    def wall_ms(self) -> Millis:
        """Return the wall clock in milliseconds since 1970 (UTC)."""
        return Millis(round(self._wall_ms))

    def monotonic_s(self) -> float:
        """Return the monotonic clock in seconds."""
        return self._monotonic_s

    def boot_s(self) -> float:
        """Return the monotonic clock plus suspended time, in seconds."""
        return self._monotonic_s + self._suspended_s

    def suspend_s(self, seconds: float) -> None:
        """Simulate a suspend of `seconds`: the monotonic clock does not advance."""
        self._suspended_s += seconds
        self._wall_ms += seconds * 1000

    def advance_s(self, seconds: float) -> None:
        """Advance all clocks by `seconds` (0 or more); wake sleepers that are due."""
        assert seconds >= 0, "time does not go back; see jump_wall_ms"
        self._move_to(self._monotonic_s + seconds)

    def jump_wall_ms(self, milliseconds: int) -> None:
        """Step the wall clock forward or back, as an administrator or NTP does."""
        self._wall_ms += milliseconds

    async def sleep(self, seconds: float) -> None:
        """Wait until the clock has advanced by `seconds`; `asyncio.sleep` for tests."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        woken = asyncio.get_running_loop().create_future()
        wake_s = self._monotonic_s + seconds
        heapq.heappush(self._sleepers, (wake_s, next(self._order), woken))
        await woken

    async def drive(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` to its end; whenever all tasks sleep, advance to the next sleeper.

        Returns:
            The result of the work; its exception is raised.

        Raises:
            AssertionError: the work waits for something other than this clock.
        """
        task = asyncio.get_running_loop().create_task(work)
        try:
            while True:
                for _ in range(_ROUNDS):
                    if task.done():
                        return task.result()
                    await asyncio.sleep(0)
                self._drop_cancelled()
                assert self._sleepers, "the work waits for something else than time"
                self._move_to(self._sleepers[0][0])
        finally:
            task.cancel()

    def _move_to(self, monotonic_s: float) -> None:
        self._wall_ms += (monotonic_s - self._monotonic_s) * 1000
        self._monotonic_s = monotonic_s
        while self._sleepers and self._sleepers[0][0] <= monotonic_s:
            _, _, woken = heapq.heappop(self._sleepers)
            if not woken.done():
                woken.set_result(None)

    def _drop_cancelled(self) -> None:
        self._sleepers = [entry for entry in self._sleepers if not entry[2].done()]
        heapq.heapify(self._sleepers)
