"""Housekeeping whose time and whose worker stand still until a test moves them."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future
from typing import Any

from metaq.broker.housekeeping import Housekeeping, Job, every
from metaq.testing.clock import ManualClock


class HeldExecutor(Executor):
    """Keeps what it is given until a test lets it run."""

    def __init__(self) -> None:
        self.held: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.held.append((future, lambda: fn(*args, **kwargs)))
        return future

    def run_one(self) -> None:
        future, work = self.held.pop(0)
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)


class Bench:
    """A housekeeping whose clock and threads are moved by hand."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.executor = HeldExecutor()
        self.turns: list[str] = []

    def job(self, name: str, period_s: float, error: Exception | None = None) -> Job:
        def run() -> None:
            self.turns.append(name)
            if error is not None:
                raise error

        return every(name, period_s, run)

    def run(self, *jobs: Job, body: Callable[[Housekeeping], Awaitable[None]]) -> None:
        """Run `body` while the jobs are looked after."""

        async def main() -> None:
            keeping = Housekeeping(
                jobs, clock=self.clock, executor=self.executor, stop_timeout_s=5
            )
            await keeping.start()
            await asyncio.sleep(0)
            try:
                await body(keeping)
            finally:
                await keeping.stop()

        asyncio.run(main())

    def pass_s(self, keeping: Housekeeping, seconds: float) -> float:
        self.clock.advance_s(seconds)
        return keeping.run_due()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)
