"""Periodic jobs of a broker: one task that sleeps in between.

Theory of operation. A job says how long it can be left alone (`delay_s`), and does its
turn when that time is over (`run`). The task sleeps until the first one is due, so a
broker with nothing to do does nothing. A turn has up to three steps:

    run     on the loop; short. Often all there is. May return
    work    that blocks, done by the executor meanwhile; it may return
    finish  takes the result, on the loop again

A job is asked for its next delay when its turn has ended, so that turns of one job
never overlap, and missed turns (a machine that slept, a long turn) are made up by one.
A turn that fails is logged and counted, and comes again like any other; the other jobs
do not notice. The same error over and over is logged once.

`stop` waits for the task, not for work: the owner of its data waits for it.
Work that was handed to the executor is never called off, as its owner may count on it.

Jobs and their parts are put together by the app; the periods are here.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

from metaq.broker.schedule import NAP_S_MAX, Schedules
from metaq.broker.status import JobStatus
from metaq.clock import Clock
from metaq.config.settings import TopicConfig
from metaq.errors import MetaqError
from metaq.lifecycle import Service, State
from metaq.retry import wait_set
from metaq.storage.retention_run import RetentionReport

REALTIME_RESET_S: Final = 30 * 60.0
"""Realtime statistics start afresh this often (broker spec 7.2)."""
CONNECTION_CHECK_S: Final = 5.0
"""Connections are checked for being idle or stalled this often."""
DELETED_CHECK_S: Final = 60.0
"""Data of deleted topics is removed this often."""
TRANSACTION_TICK_S: Final = 0.5
"""Transactions are ended by their time-outs this often, as by MetaQ."""
JOURNAL_SYNC_S: Final = 1.0
"""The journal is synced this often where flushTxLogAtCommit is 2."""
JOURNAL_OPENING_S: Final = 5.0
"""A journal that found no free space at the start is opened again this often."""
SCRUB_STEP_S: Final = 1.0
"""Interval between steps of the scrub, seconds; each reads as much as its rate
allows."""
INDEX_S: Final = 0.1
"""Small groups get their index entry this often: the time of an entry is when it is
made, and a put that comes just then is the storage thread's."""
LOG_CHECK_S: Final = 5.0
"""Logs and free space are looked at this often where no interval is shorter."""
LOG_CHECK_S_MIN: Final = 0.05
"""And never more often: sync intervals are kept to within this."""
DELAY_S_MIN: Final = 0.01
"""A job never comes again sooner: a wrong delay must not keep a processor busy."""
DELAY_AFTER_BUG_S: Final = 60.0
"""Delay before a job that failed to tell its own."""

Finish: TypeAlias = Callable[[], None]
"""The end of a turn, on the event loop."""
Work: TypeAlias = Callable[[], Finish | None]
"""The blocking middle of a turn, on a thread of the executor."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """Something that is done from time to time."""

    name: str
    """Name of the job for logs and metrics; unique."""
    delay_s: Callable[[], float]
    """Seconds until it is due, from now on; `math.inf`: not before `wake`."""
    run: Callable[[], Work | None]
    """Does its turn, or the first step of it; must not block."""


class _Entry:
    """A job and its results."""

    __slots__ = (
        "due_s",
        "failure_count",
        "is_working",
        "job",
        "last_error",
        "run_count",
    )

    def __init__(self, job: Job) -> None:
        self.job = job
        self.due_s = math.inf
        self.is_working = False
        self.run_count = 0
        self.failure_count = 0
        self.last_error = ""


class Housekeeping(Service):
    """Runs jobs. Owner: the app; everything but work on one event loop."""

    def __init__(
        self,
        jobs: Sequence[Job],
        *,
        clock: Clock,
        executor: Executor,
        stop_timeout_s: float,
    ) -> None:
        """Take over the jobs; each has its first turn when its delay is over.

        Args:
            jobs: names are unique.
            clock: the monotonic one tells when a job is due.
            executor: does the work; not owned. It has a thread to spare for a turn
                that takes minutes.
            stop_timeout_s: bound on `stop`, in seconds.
        """
        super().__init__("housekeeping", stop_timeout_s=stop_timeout_s)
        self._clock = clock
        self._executor = executor
        self._entries = [_Entry(job) for job in jobs]
        self._wakeup = asyncio.Event()

    async def on_start(self) -> None:
        """Begin to watch the clock."""
        for entry in self._entries:
            self._plan(entry)
        self.spawn(self._run(), name="run")

    def wake(self) -> None:
        """Ask every job again how long it can be left alone.

        To be called when settings changed; no job comes later than it would have.
        """
        for entry in self._entries:
            if not entry.is_working:
                due_s = entry.due_s
                self._plan(entry)
                entry.due_s = min(entry.due_s, due_s)
        self._wakeup.set()

    def run_due(self) -> float:
        """Run due jobs; return the seconds until the next one is due, or infinity.

        Called by the task at each awakening, and by tests in its place.
        """
        now_s = self._clock.monotonic_s()
        for entry in self._entries:
            if not entry.is_working and entry.due_s <= now_s:
                self._begin_turn(entry)
        dues = [entry.due_s for entry in self._entries if not entry.is_working]
        return max(0.0, min(dues, default=math.inf) - self._clock.monotonic_s())

    def statistics(self) -> tuple[JobStatus, ...]:
        """Return a snapshot of every job, in the order they were given."""
        return tuple(
            JobStatus(
                name=entry.job.name,
                run_count=entry.run_count,
                failure_count=entry.failure_count,
                last_error=entry.last_error,
            )
            for entry in self._entries
        )

    async def _run(self) -> None:
        while True:
            self._wakeup.clear()
            await wait_set(self._wakeup, self.run_due())

    # -- one turn

    def _begin_turn(self, entry: _Entry) -> None:
        try:
            work = entry.job.run()
            if work is not None:
                loop = asyncio.get_running_loop()
                working = loop.run_in_executor(self._executor, work)
                working.add_done_callback(partial(self._on_worked, entry))
                entry.is_working = True
                return
        except Exception as error:  # noqa: BLE001  # one job must not stop the others
            self._end_turn(entry, error)
        else:
            self._end_turn(entry, None)

    def _on_worked(
        self, entry: _Entry, working: "asyncio.Future[Finish | None]"
    ) -> None:
        entry.is_working = False
        if working.cancelled() or self.state is not State.RUNNING:
            return
        try:
            finish = working.result()
            if finish is not None:
                finish()
        except Exception as error:  # noqa: BLE001  # one job must not stop the others
            self._end_turn(entry, error)
        else:
            self._end_turn(entry, None)
        self._wakeup.set()

    def _end_turn(self, entry: _Entry, error: Exception | None) -> None:
        entry.run_count += 1
        if error is not None:
            entry.failure_count += 1
        self._report(entry, error)
        self._plan(entry)

    def _plan(self, entry: _Entry) -> None:
        try:
            delay_s = entry.job.delay_s()
        except Exception as error:  # noqa: BLE001  # one job must not stop the others
            delay_s = DELAY_AFTER_BUG_S
            entry.failure_count += 1
            self._report(entry, error)
        entry.due_s = self._clock.monotonic_s() + max(DELAY_S_MIN, delay_s)

    def _report(self, entry: _Entry, error: Exception | None) -> None:
        """Log a change in a job's outcome; a repeated error is only counted."""
        before, entry.last_error = entry.last_error, _text_of(error)
        if error is None:
            if before:
                _log.info(
                    "job works again: job=%s failures=%d",
                    entry.job.name,
                    entry.failure_count,
                )
        elif entry.last_error != before:
            is_known = isinstance(error, MetaqError)
            _log.error(
                "job failed: job=%s error=%s",
                entry.job.name,
                entry.last_error,
                exc_info=None if is_known else error,
            )


def _text_of(error: Exception | None) -> str:
    if error is None:
        return ""
    return str(error) if isinstance(error, MetaqError) else repr(error)


# -- the jobs of a broker -------------------------------------------------------------


def every(name: str, period_s: float, run: Callable[[], Work | None]) -> Job:
    """Return a job with a fixed time between the end of a turn and the next one."""
    return Job(name, lambda: period_s, run)


def log_check_s(topics: Iterable[TopicConfig]) -> float:
    """Return how often logs have to be looked at, in seconds.

    Args:
        topics: the settings of every topic that has a log or may get one.

    Returns:
        A quarter of the shortest sync interval in threshold mode, so that no sync is
        later than by a quarter, and `LOG_CHECK_S` at the most: the free space is
        looked at on the same occasion.
    """
    intervals_s = [
        topic.unflush_interval_ms / 1000 / 4
        for topic in topics
        if topic.unflush_threshold > 0 and topic.unflush_interval_ms > 0
    ]
    return max(LOG_CHECK_S_MIN, min([LOG_CHECK_S, *intervals_s]))


def retention_job(
    schedules: Schedules,
    *,
    clock: Clock,
    begin: Callable[[Collection[str]], Callable[[], RetentionReport] | None],
    find_early: Callable[[], Collection[str] | None],
    on_end: Callable[[RetentionReport], None],
) -> Job:
    """Return the job that lets old segments go.

    Args:
        schedules: say which topics are due; `wake` when they were replaced.
        clock: the wall clock, which the schedules follow.
        begin: returns the blocking run, which lets segments of these topics go by
            age, and of all topics by size; None when there is nothing to do.
        find_early: asked at every look: topics for a run that does not wait for the
            schedule (a disk is nearly full, or a size over its limit); None: no run.
        on_end: takes the result of the run, on the event loop.
    """

    def delay_s() -> float:
        due_ms = schedules.next_due_ms()
        if due_ms is None:
            return NAP_S_MAX
        return min(NAP_S_MAX, (due_ms - clock.wall_ms()) / 1000)

    def run() -> Work | None:
        topics = schedules.take_due()
        early = find_early()
        if not topics and early is None:
            return None
        retention = begin({*topics, *(early or ())})
        if retention is None:
            return None
        return lambda: partial(on_end, retention())

    return Job("retention", delay_s, run)
