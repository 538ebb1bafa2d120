"""Try again, later and later, until a deadline; the error says whether it makes sense.

Policy lives on the error (`MetaqError.retriable`): nothing here knows a type of error,
so a new one needs no change here. Chance and time are arguments.
"""

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from metaq.clock import Clock
from metaq.errors import MetaqError

_log = logging.getLogger(__name__)

_EXPONENT_MAX: Final = 64  # 2.0 ** 1024 overflows; no wait grows that long

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Pauses between attempts: doubling, capped, spread by chance."""

    first_s: float
    """Longest wait after the first failure, in seconds; above 0."""
    max_s: float
    """Longest wait of all, in seconds; at least `first_s`."""

    def __post_init__(self) -> None:
        """Refuse waits that would be a busy loop."""
        if not 0 < self.first_s <= self.max_s:
            raise ValueError(
                f"expected 0 < first_s <= max_s, got {self.first_s} and {self.max_s}"
            )

    def delay_s(
        self, failures: int, chance: Callable[[], float] = random.random
    ) -> float:
        """Return the wait after so many failures, in seconds.

        Args:
            failures: How many attempts have failed, 1 or more.
            chance: Returns a number in [0, 1).

        Returns:
            Between half of the doubled and capped wait and the whole of it: clients
            that failed together do not come back together, and none comes at once.
        """
        longest = self.first_s * 2.0 ** min(failures - 1, _EXPONENT_MAX)
        return min(longest, self.max_s) * (0.5 + 0.5 * chance())


async def wait_set(event: asyncio.Event, timeout_s: float | None) -> bool:
    """Wait until an event is set, and return whether it is; or until the time is over.

    Args:
        event: what ends the wait early.
        timeout_s: in seconds, 0 or more; None, `math.inf`: as long as it takes.
    """
    if event.is_set():
        return True  # without a timer
    limit_s = None if timeout_s == math.inf else timeout_s
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await event.wait()
    return event.is_set()


async def retry(
    operation: Callable[[], Awaitable[T]],
    *,
    backoff: Backoff,
    deadline_s: float,
    clock: Clock,
    chance: Callable[[], float] = random.random,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> T:
    """Call `operation` until it succeeds, fails for good, or the deadline is near.

    Args:
        operation: One attempt; it keeps the deadline itself while it runs.
        backoff: The waits between attempts.
        deadline_s: On `clock.monotonic_s`; `math.inf` to try for ever. No wait goes
            past it: when the next attempt would come later, there is none.
        clock: Judges the deadline.
        chance: Spreads the waits; returns numbers in [0, 1).
        sleep: Waits so many seconds.

    Returns:
        The result of the first successful attempt.

    Raises:
        MetaqError: The last attempt's, when it is not retriable or time is up.

    Any other exception of `operation` passes through at once. There is always one
    attempt, even when the deadline has passed.

    Cancellation: the attempt or the wait ends; effects of an attempt stay.
    """
    failures = 0
    while True:
        try:
            return await operation()
        except MetaqError as error:
            failures += 1
            delay_s = backoff.delay_s(failures, chance)
            if not error.retriable or clock.monotonic_s() + delay_s >= deadline_s:
                raise
            _log.debug(
                "attempt failed, trying again: failures=%d delay_ms=%d error=%s",
                failures,
                delay_s * 1000,
                error,
            )
        await sleep(delay_s)
