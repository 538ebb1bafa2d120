"""The looks of a replica at what is due: some a second, and few while it rests.

A look at the times of claims, lags and puts costs little, and twenty a second of them
are all that a set at rest would do. So its owner says at each look whether only an
event can make something due now; the next look comes later then, or with the event.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from metaq.retry import wait_set

TICK_S: Final = 0.05
"""Interval of looks at times: claims, lags, puts that wait."""
REST_S: Final = 0.5
"""The same at rest: as often as an idle follower gets an empty message."""
RESTS: Final = 6
"""Looks at rest within the lag time, at least."""


class Pace:
    """Owner: the node; on the loop's thread."""

    def __init__(self, lag_s: float, on_stir: Callable[[], None]) -> None:
        """Look at nothing yet.

        Args:
            lag_s: so long a follower may be late, seconds.
            on_stir: called when an event ends a rest, before it is taken in.
        """
        self.is_due: Final = asyncio.Event()
        """Set at each look: there may be something to do."""
        self._rest_s = max(TICK_S, min(REST_S, lag_s / RESTS))
        self._on_stir = on_stir
        self._stirred = asyncio.Event()
        self._is_at_rest = False

    def stir(self) -> None:
        """End a rest: look now, and often until the next one."""
        if self._is_at_rest:
            self._is_at_rest = False
            self._stirred.set()
            self._on_stir()

    async def run(self, look: Callable[[], bool]) -> None:
        """Look until cancelled; `look` returns whether a rest may begin."""
        while True:
            self._stirred.clear()
            self._is_at_rest = look()
            self.is_due.set()
            pause_s = self._rest_s if self._is_at_rest else TICK_S
            await wait_set(self._stirred, pause_s)
