"""Periodic jobs of a broker, run by one task.

Theory of operation. A job returns the time until its next turn (`delay_s`), and takes
its turn when that has passed (`run`). The task sleeps until the first job is due, so an
idle broker does nothing. A turn has up to three steps:

    run     on the loop; short. Often the only step. May return
    work    that blocks, run by the executor; may return
    finish  takes the result, on the loop again

The next delay of a job is asked for after its turn, so turns of a job never overlap,
and one turn makes up for several missed ones (the machine slept, a turn took long). A
failed turn is logged and counted, does not affect other jobs, and the job goes on. An
error that repeats is logged once.

`stop` waits for the task but not for submitted work: the owners of the data wait for
that. Work is never cancelled, because its owner may rely on it.

The jobs of a broker are in `jobs.py`.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeAlias

from metaq.broker.status import JobStatus
from metaq.clock import Clock
from metaq.errors import MetaqError
from metaq.lifecycle import Service, State
from metaq.retry import wait_set

DELAY_S_MIN: Final = 0.01
"""Minimum delay of a job, in seconds, so that a wrong delay does not cause a busy
loop."""
DELAY_AFTER_BUG_S: Final = 60.0
"""Delay of a job whose `delay_s` raised, in seconds."""

Finish: TypeAlias = Callable[[], None]
"""The end of a turn, on the event loop."""
Work: TypeAlias = Callable[[], Finish | None]
"""The blocking middle of a turn, on a thread of the executor."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """A periodic job."""

    name: str
    """Name of the job for logs and metrics; unique."""
    delay_s: Callable[[], float]
    """Returns the seconds from now until it is due; `math.inf`: not before `wake`."""
    run: Callable[[], Work | None]
    """Runs its turn, or the first step of it; must not block."""


@dataclass(slots=True)
class _Entry:
    """A job and its state."""

    job: Job
    status: JobStatus
    due_s: float = math.inf
    is_working: bool = False


class Housekeeping(Service):
    """Runs jobs. Owned by the app; everything but `Work` runs on one event loop."""

    def __init__(
        self,
        jobs: Sequence[Job],
        *,
        clock: Clock,
        executor: Executor,
        stop_timeout_s: float,
    ) -> None:
        """Prepare to run the jobs; the first turn of each is after its delay.

        The executor is not owned; it needs a spare thread, because a turn may take
        minutes.
        """
        super().__init__("housekeeping", stop_timeout_s=stop_timeout_s)
        self._clock = clock
        self._executor = executor
        self._entries = [_Entry(job, JobStatus(name=job.name)) for job in jobs]
        self._wakeup = asyncio.Event()

    async def on_start(self) -> None:
        """Plan the first turns and start the task."""
        for entry in self._entries:
            self._plan(entry)
        self.spawn(self._run(), name="run")

    def wake(self) -> None:
        """Ask every job for its delay again; to be called after settings changed.

        No job is put off by this.
        """
        for entry in self._entries:
            if not entry.is_working:
                due_s = entry.due_s
                self._plan(entry)
                entry.due_s = min(entry.due_s, due_s)
        self._wakeup.set()

    def run_due(self) -> float:
        """Run due jobs; return the seconds until the next one is due, or infinity.

        Called by the task each time it wakes, and directly by tests.
        """
        now_s = self._clock.monotonic_s()
        for entry in self._entries:
            if not entry.is_working and entry.due_s <= now_s:
                self._begin_turn(entry)
        dues = [entry.due_s for entry in self._entries if not entry.is_working]
        return max(0.0, min(dues, default=math.inf) - self._clock.monotonic_s())

    def statistics(self) -> tuple[JobStatus, ...]:
        """Return a snapshot of every job, in the order of the constructor."""
        return tuple(replace(entry.status) for entry in self._entries)

    async def _run(self) -> None:
        while True:
            self._wakeup.clear()
            await wait_set(self._wakeup, self.run_due())

    # -- one turn

    def _begin_turn(self, entry: _Entry) -> None:
        failure = None
        try:
            work = entry.job.run()
            if work is not None:
                loop = asyncio.get_running_loop()
                working = loop.run_in_executor(self._executor, work)
                working.add_done_callback(partial(self._on_worked, entry))
                entry.is_working = True
                return
        except Exception as error:  # noqa: BLE001  # one job must not stop the others
            failure = error
        self._end_turn(entry, failure)

    def _on_worked(
        self, entry: _Entry, working: "asyncio.Future[Finish | None]"
    ) -> None:
        entry.is_working = False
        if working.cancelled() or self.state is not State.RUNNING:
            return
        failure = None
        try:
            finish = working.result()
            if finish is not None:
                finish()
        except Exception as error:  # noqa: BLE001  # one job must not stop the others
            failure = error
        self._end_turn(entry, failure)
        self._wakeup.set()

    def _end_turn(self, entry: _Entry, error: Exception | None) -> None:
        entry.status.run_count += 1
        if error is not None:
            entry.status.failure_count += 1
        self._report(entry, error)
        self._plan(entry)

    def _plan(self, entry: _Entry) -> None:
        try:
            delay_s = entry.job.delay_s()
        except Exception as error:  # noqa: BLE001  # one job must not stop the others
            delay_s = DELAY_AFTER_BUG_S
            entry.status.failure_count += 1
            self._report(entry, error)
        entry.due_s = self._clock.monotonic_s() + max(DELAY_S_MIN, delay_s)

    def _report(self, entry: _Entry, error: Exception | None) -> None:
        """Log a change in a job's outcome; a repeated error is only counted."""
        before, entry.status.last_error = entry.status.last_error, _text_of(error)
        if error is None:
            if before:
                _log.info(
                    "job succeeded again: job=%s failures=%d",
                    entry.job.name,
                    entry.status.failure_count,
                )
        elif entry.status.last_error != before:
            is_known = isinstance(error, MetaqError)
            _log.error(
                "job failed: job=%s error=%s",
                entry.job.name,
                entry.status.last_error,
                exc_info=None if is_known else error,
            )


def _text_of(error: Exception | None) -> str:
    if error is None:
        return ""
    return str(error) if isinstance(error, MetaqError) else repr(error)


def every(name: str, period_s: float, run: Callable[[], Work | None]) -> Job:
    """Return a job with a fixed delay from the end of a turn to the next one."""
    return Job(name, lambda: period_s, run)
