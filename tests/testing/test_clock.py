"""The manual clock moves when told, and jumps only when everyone sleeps."""

import asyncio

import pytest

from metaq.testing.clock import WALL_MS, ManualClock


def test_both_clocks_advance_and_only_the_wall_jumps() -> None:
    """Time passes on both clocks; a step of the wall clock leaves the other alone."""
    clock = ManualClock(monotonic_s=5.0)
    clock.advance_s(1.5)
    assert (clock.wall_ms(), clock.monotonic_s()) == (WALL_MS + 1500, 6.5)
    clock.jump_wall_ms(-3_600_000)
    assert (clock.wall_ms(), clock.monotonic_s()) == (WALL_MS + 1500 - 3_600_000, 6.5)


def test_time_does_not_go_back() -> None:
    """A negative advance is a mistake of the test."""
    with pytest.raises(AssertionError):
        ManualClock().advance_s(-1)


def test_sleepers_wake_in_order_of_their_times() -> None:
    """Longer sleeps end later, at exactly the time asked for."""
    clock = ManualClock(monotonic_s=0.0)
    woken: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append((name, clock.monotonic_s()))

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            for name, seconds in (("c", 30), ("a", 1), ("b", 2), ("now", 0)):
                group.create_task(sleeper(name, seconds))

    asyncio.run(clock.drive(work()))
    assert woken == [("now", 0), ("a", 1), ("b", 2), ("c", 30)]


def test_a_sleeper_sleeps_until_the_time_has_come() -> None:
    """Just before its time it still sleeps; at its time it wakes."""

    async def work() -> None:
        clock = ManualClock()
        task = asyncio.ensure_future(clock.sleep(10))
        await asyncio.sleep(0)
        clock.advance_s(9.5)
        await asyncio.sleep(0)
        assert not task.done()
        clock.advance_s(0.5)
        await task

    asyncio.run(work())


def test_work_that_waits_for_something_else_is_named() -> None:
    """Instead of hanging, drive says that no task sleeps on this clock."""

    async def work() -> None:
        await asyncio.Event().wait()

    with pytest.raises(AssertionError, match="something else than time"):
        asyncio.run(ManualClock().drive(work()))


def test_a_cancelled_sleeper_does_not_hold_the_time() -> None:
    """Time does not stop at the wake-up time of a cancelled sleep."""
    clock = ManualClock(monotonic_s=0.0)

    async def work() -> None:
        task = asyncio.ensure_future(clock.sleep(3))
        await asyncio.sleep(0)
        task.cancel()
        await clock.sleep(10)

    asyncio.run(clock.drive(work()))
    assert clock.monotonic_s() == 10
