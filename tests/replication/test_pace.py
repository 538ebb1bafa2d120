"""The pace of a replica: its looks at what is due, and what ends a rest."""

import asyncio

from metaq.replication.pace import Pace
from tests.rigs.waiting import until

LAG_S = 3600.0


def paced(*, rests: bool) -> tuple[int, int]:
    """Run a pace and what happens to it; return the looks, and the rests that ended."""
    looks, stirs = 0, 0

    def on_stir() -> None:
        nonlocal stirs
        stirs += 1

    def look() -> bool:
        nonlocal looks
        looks += 1
        return rests

    async def run() -> None:
        pace = Pace(LAG_S, on_stir)
        task = asyncio.ensure_future(pace.run(look))
        await until(pace.is_due.is_set)
        for _ in range(3):
            pace.stir()
        for _ in range(20):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})

    asyncio.run(run())
    return looks, stirs


def test_an_event_ends_a_rest_at_once() -> None:
    """The next look comes in the same turn or the next, and the rest ends once."""
    assert paced(rests=True) == (2, 1)


def test_without_a_rest_nothing_looks_more_often() -> None:
    """Under load there is an event for each put, and the looks keep their interval."""
    assert paced(rests=False) == (1, 0)
