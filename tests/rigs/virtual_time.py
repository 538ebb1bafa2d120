"""An event loop on which waiting takes no time: it jumps to the next timer."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from metaq.model import Millis

T = TypeVar("T")


class _JumpingSelector(selectors.SelectSelector):
    """Never waits: time jumps to where the loop wanted to wait to."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0

    def select(
        self, timeout: float | None = None
    ) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "all wait for ever"
            self.now_s += max(0.0, timeout)
        return ready


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


class VirtualClock:
    """The clock of the running virtual loop."""

    def wall_ms(self) -> Millis:
        return Millis(int(self.monotonic_s() * 1000))

    def monotonic_s(self) -> float:
        return asyncio.get_running_loop().time()

    def boot_s(self) -> float:
        return self.monotonic_s()


def run_virtually(scenario: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end; its sleeps and deadlines cost nothing.

    What callbacks raise, and tasks that are never awaited, fails the test.
    """
    problems: list[dict[str, Any]] = []
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        loop = runner.get_loop()
        loop.set_exception_handler(lambda _loop, context: problems.append(context))
        result = runner.run(scenario)
    assert not problems
    return result
