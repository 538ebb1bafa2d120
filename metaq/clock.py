"""Access to the time: the wall clock for dates, the monotonic clock for waits.

No other module of the package reads a clock (checked by `tests/house`). Tests pass
`metaq.testing.clock.ManualClock`.
"""

import time
from typing import Protocol

from metaq.model import Millis


class Clock(Protocol):
    """Source of time."""

    def wall_ms(self) -> Millis:
        """Return the wall clock in milliseconds since 1970 (UTC); it may jump."""

    def monotonic_s(self) -> float:
        """Return seconds on a clock that never goes back; for deadlines and waits."""

    def boot_s(self) -> float:
        """Return seconds on a clock that never goes back and runs while suspended."""


class SystemClock:
    """The machine's clocks."""

    def wall_ms(self) -> Millis:
        """Return the wall clock in milliseconds since 1970 (UTC); it may jump."""
        return Millis(time.time_ns() // 1_000_000)

    def monotonic_s(self) -> float:
        """Return seconds on a clock that never goes back; for deadlines and waits."""
        return time.monotonic()

    def boot_s(self) -> float:
        """Return seconds on a clock that never goes back and runs while suspended."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)
