"""Polling for conditions without an event, on a loop or in a thread."""

import asyncio
import inspect
import reprlib
import time
from collections.abc import Callable
from typing import Final

PATIENCE_S: Final = 120.0
"""Default timeout, long enough for a busy machine."""
POLL_S: Final = 0.001
"""First pause between checks; pauses grow with the time waited."""
POLL_S_MAX: Final = 0.05


async def until(
    condition: Callable[[], object],
    timeout_s: float = PATIENCE_S,
    show: Callable[[], object] | None = None,
) -> None:
    """Wait until a condition is true.

    Args:
        condition: function or coroutine function, called repeatedly.
        timeout_s: maximum time, by the loop's clock.
        show: returns the state to show in the error; None: the error has the source of
            the condition and its variables.

    Raises:
        AssertionError: the condition was not true in time.
    """
    time_s = asyncio.get_running_loop().time
    start_s = time_s()
    while True:
        answer = condition()
        if inspect.isawaitable(answer):
            answer = await answer
        if answer:
            return
        await asyncio.sleep(_pause_s(time_s() - start_s, timeout_s, condition, show))


def wait_until(
    condition: Callable[[], object],
    timeout_s: float = PATIENCE_S,
    show: Callable[[], object] | None = None,
) -> None:
    """Wait until a condition is true, like `until`, but block the thread."""
    start_s = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - start_s
        time.sleep(_pause_s(waited_s, timeout_s, condition, show))


def _pause_s(
    waited_s: float,
    timeout_s: float,
    condition: Callable[[], object],
    show: Callable[[], object] | None,
) -> float:
    if waited_s > timeout_s:
        text = _text_of(condition) if show is None else show()
        raise AssertionError(f"not within {timeout_s:g} s: {text}")
    return min(POLL_S + waited_s / 20, POLL_S_MAX)


def _text_of(condition: Callable[[], object]) -> str:
    """Return the source of a condition, and the values of its variables."""
    if not inspect.isfunction(condition):
        return repr(condition)
    source = " ".join(inspect.getsource(condition).split())
    values = inspect.getclosurevars(condition).nonlocals
    return f"{source}, with {reprlib.repr(values)}"
