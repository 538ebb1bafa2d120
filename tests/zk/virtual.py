"""An event loop on which waiting takes no time: it jumps to the next timer."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from metaq.model import Millis

T = TypeVar("T")


class _JumpingSelector(selectors.SelectSelector):
    """Never waits; tells the loop how long it would have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "all wait for ever"
        self.now_s += max(0.0, timeout)
        return super().select(0)


class VirtualClock:
    """The clock of the running virtual loop."""

    def wall_ms(self) -> Millis:
        return Millis(int(self.monotonic_s() * 1000))

    def monotonic_s(self) -> float:
        return asyncio.get_running_loop().time()

    def boot_s(self) -> float:
        return self.monotonic_s()


def run_virtually(scenario: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end; its sleeps and deadlines cost nothing."""
    selector = _JumpingSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now_s  # type: ignore[method-assign]  # the point
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(scenario)
