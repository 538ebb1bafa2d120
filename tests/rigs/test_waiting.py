"""Waiting ends as soon as the condition is true, and says what it waited for."""

import asyncio
import itertools
import threading

import pytest

from tests.rigs.virtual_time import run_virtually
from tests.rigs.waiting import PATIENCE_S, until, wait_until


def test_waiting_ends_when_the_condition_is_true() -> None:
    """Of either form; a condition on a loop may be a coroutine function."""
    numbers = itertools.count()
    wait_until(lambda: next(numbers) == 3)

    async def is_late() -> bool:
        await asyncio.sleep(0)
        return next(numbers) == 7

    async def scenario() -> None:
        await until(lambda: next(numbers) == 5)
        await until(is_late)

    asyncio.run(scenario())
    assert next(numbers) == 8


def test_the_error_names_the_condition_its_values_and_the_time() -> None:
    found = [b"0"]
    wanted = r"^not within 0.01 s: .*lambda: len\(found\) == 2.*, with .*\[b'0'\]"
    with pytest.raises(AssertionError, match=wanted):
        wait_until(lambda: len(found) == 2, 0.01)

    async def scenario() -> float:
        with pytest.raises(
            AssertionError, match=f"not within {PATIENCE_S:g} s: .*Event"
        ):
            await until(threading.Event().is_set)
        with pytest.raises(AssertionError, match=r"^not within 1 s: one of 2$"):
            await until(lambda: len(found) == 2, 1, lambda: "one of 2")
        return asyncio.get_running_loop().time()

    assert run_virtually(scenario()) == pytest.approx(1000 + PATIENCE_S + 1, abs=1)
