"""Waiting on a loop for what no event tells of."""

import asyncio
from collections.abc import Callable

PATIENCE_S = 120.0
"""Bound on every wait: a busy machine may take its time."""
POLL_S = 0.002


async def until(condition: Callable[[], object]) -> None:
    """Wait until a condition is true, at most PATIENCE_S."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(POLL_S)
