"""Retrying asks the error, keeps the deadline, and waits longer each time."""

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.errors import MetaqError
from metaq.retry import Backoff, retry, wait_set
from metaq.testing.clock import ManualClock
from tests.rigs.virtual_time import run_virtually

BACKOFF = Backoff(first_s=1.0, max_s=8.0)


class PassingError(MetaqError):
    retriable = True


class FinalError(MetaqError):
    retriable = False


def attempts_of(outcomes: list, deadline_s: float = math.inf) -> tuple[list, object]:
    """Retry through the outcomes; return times of the attempts and the result."""
    clock = ManualClock(monotonic_s=0.0)
    times: list[float] = []
    script = iter(outcomes)

    async def operation() -> str:
        times.append(clock.monotonic_s())
        outcome = next(script)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def run() -> object:
        try:
            return await retry(
                operation,
                backoff=BACKOFF,
                deadline_s=deadline_s,
                clock=clock,
                chance=lambda: 1.0,
                sleep=clock.sleep,
            )
        except Exception as error:
            return error

    return times, asyncio.run(clock.drive(run()))


def test_waits_double_up_to_the_cap() -> None:
    """The waits are 1, 2, 4, 8, 8 seconds; then the result is returned."""
    times, result = attempts_of([PassingError()] * 5 + ["done"])
    assert times == [0, 1, 3, 7, 15, 23]
    assert result == "done"


def test_a_final_error_ends_at_once() -> None:
    """An error that says it is not retriable is raised without a wait."""
    final = FinalError()
    times, result = attempts_of([PassingError(), final])
    assert result is final
    assert times == [0, 1]


def test_an_error_of_others_passes_through() -> None:
    """A foreign error is a bug and is never retried."""
    bug = ValueError()
    times, result = attempts_of([bug])
    assert result is bug
    assert times == [0]


@pytest.mark.parametrize(("deadline_s", "attempts"), [(-5, 1), (1, 1), (3.5, 3)])
def test_no_attempt_comes_after_the_deadline(deadline_s: float, attempts: int) -> None:
    """When the next attempt would be too late, the last error is raised now."""
    errors = [PassingError() for _ in range(9)]
    times, result = attempts_of(list(errors), deadline_s)
    assert len(times) == attempts
    assert result is errors[attempts - 1]
    assert times[-1] <= max(0, deadline_s)


@given(st.integers(1, 10**6), st.floats(0, 1, exclude_max=True))
def test_chance_spreads_the_upper_half(failures: int, chance: float) -> None:
    """Whatever the count and the chance, the wait is within half and whole."""
    longest = min(2.0 ** min(failures - 1, 20), 8.0)
    assert longest / 2 <= BACKOFF.delay_s(failures, lambda: chance) <= longest


@pytest.mark.parametrize(("first_s", "max_s"), [(0, 1), (-1, 1), (2, 1)])
def test_a_busy_loop_is_refused(first_s: float, max_s: float) -> None:
    """Waits of nothing, or a cap below the first wait, are a mistake."""
    with pytest.raises(ValueError, match="first_s"):
        Backoff(first_s=first_s, max_s=max_s)


def test_waiting_for_an_event_ends_with_it_or_with_the_time() -> None:
    """It tells which; neither None nor infinity is ever over."""

    async def scenario() -> list[bool]:
        event = asyncio.Event()
        found = [await wait_set(event, 3.0)]
        for timeout_s in (3.0, None, math.inf):
            event.clear()
            asyncio.get_running_loop().call_later(2.0, event.set)
            found.append(await wait_set(event, timeout_s))
        return [*found, await wait_set(event, 0.0)]

    assert run_virtually(scenario()) == [False, True, True, True, True]


def test_an_event_that_is_set_takes_no_timer() -> None:
    """Requests ask for ones that nearly always are."""

    async def scenario() -> bool:
        event, loop = asyncio.Event(), asyncio.get_running_loop()
        event.set()
        loop.call_at = loop.call_later = None  # type: ignore[method-assign,assignment]
        return await wait_set(event, 3.0)

    assert asyncio.run(scenario())
