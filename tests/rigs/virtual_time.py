"""An event loop with virtual time: instead of waiting it jumps to the next timer."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from metaq.model import Millis

T = TypeVar("T")


class _JumpingSelector(selectors.SelectSelector):
    """Selector that advances the time by the timeout instead of waiting."""

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
    """Run a coroutine to its end in virtual time.

    Exceptions in callbacks, and in tasks that are never awaited, fail the test.
    """
    problems: list[dict[str, Any]] = []
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        loop = runner.get_loop()
        loop.set_exception_handler(lambda _loop, context: problems.append(context))
        result = runner.run(scenario)
    assert not problems
    return result
