"""Retry with growing pauses, until a deadline.

The error class decides whether a retry makes sense (`MetaqError.retriable`), so a new
type of error needs no change here. The clock and the source of randomness are
arguments.
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
    """Pauses between attempts: doubling, capped, with jitter."""

    first_s: float
    """Longest pause after the first failure, in seconds; above 0."""
    max_s: float
    """Upper bound of all pauses, in seconds; at least `first_s`."""

    def __post_init__(self) -> None:
        """Refuse pauses that would make a busy loop."""
        if not 0 < self.first_s <= self.max_s:
            raise ValueError(
                f"expected 0 < first_s <= max_s, got {self.first_s} and {self.max_s}"
            )

    def delay_s(
        self, failures: int, chance: Callable[[], float] = random.random
    ) -> float:
        """Return the pause after `failures` failed attempts, in seconds.

        Args:
            failures: Number of failed attempts, 1 or more.
            chance: Returns a random number in [0, 1).

        Returns:
            Between half and all of the doubled and capped pause, so that clients that
            failed together do not retry together or at once.
        """
        longest = self.first_s * 2.0 ** min(failures - 1, _EXPONENT_MAX)
        return min(longest, self.max_s) * (0.5 + 0.5 * chance())


async def wait_set(event: asyncio.Event, timeout_s: float | None) -> bool:
    """Wait until an event is set or the time is over; return whether it is set.

    Args:
        event: ends the wait early.
        timeout_s: in seconds, 0 or more; None or `math.inf`: without a limit.
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
    """Call `operation` until it succeeds, fails for good, or no time is left.

    Args:
        operation: One attempt; it must keep the deadline itself while it runs.
        backoff: The pauses between attempts.
        deadline_s: On `clock.monotonic_s`; `math.inf` to retry without a limit. An
            attempt that would start at or after it is not made.
        clock: Compared with the deadline.
        chance: Source of jitter; returns random numbers in [0, 1).
        sleep: Waits the given number of seconds.

    Returns:
        The result of the first successful attempt.

    Raises:
        MetaqError: The last attempt's, if it is not retriable or no time is left.

    Any other exception of `operation` is raised at once. There is always one attempt,
    even if the deadline has passed.

    Cancellation: cancels the attempt or the pause; effects of attempts remain.
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
