"""A watched node is read again, whatever a read ends with."""

import asyncio

import pytest

from metaq.errors import CoordinationError, SessionSuspendedError
from metaq.zk.watch import Watch
from tests.rigs.virtual_time import run_virtually


@pytest.mark.parametrize("error", [CoordinationError("slow"), MemoryError(), OSError()])
def test_a_read_that_failed_is_made_again(error: Exception) -> None:
    """By itself, until one succeeds."""
    ends = iter([error, error, 1])
    seen: list[int | None] = []

    async def read() -> int:
        end = next(ends)
        if isinstance(end, Exception):
            raise end
        return end

    async def main() -> None:
        watch = Watch("/a", read, seen.append)
        watch.refresh()
        await asyncio.sleep(60)
        watch.cancel()

    run_virtually(main())
    assert seen == [1]


def test_without_a_session_the_next_one_reads() -> None:
    """`refresh` is called then."""
    count = 0

    async def read() -> int:
        nonlocal count
        count += 1
        raise SessionSuspendedError("away")

    async def main() -> None:
        watch = Watch("/a", read, lambda _snapshot: None)
        for expected in (1, 2):
            watch.refresh()
            await asyncio.sleep(60)
            assert count == expected

    run_virtually(main())


def test_a_watch_that_is_cancelled_calls_no_one_any_more() -> None:
    """Nor for what it has read in the turn before."""
    seen: list[int | None] = []

    async def read() -> int:
        return 1

    async def main() -> None:
        watch = Watch("/a", read, seen.append)
        watch.refresh()
        await asyncio.sleep(0)
        watch.cancel()
        await asyncio.sleep(1)

    run_virtually(main())
    assert seen == []
