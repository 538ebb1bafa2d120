"""Housekeeping: when jobs run, what a failure does, and that nothing else is done."""

import asyncio
import datetime as dt
import logging
import math
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from typing import Any

import pytest

from metaq.broker.housekeeping import (
    DELAY_AFTER_BUG_S,
    DELAY_S_MIN,
    LOG_CHECK_S,
    LOG_CHECK_S_MIN,
    Finish,
    Housekeeping,
    Job,
    Work,
    every,
    log_check_s,
    retention_job,
)
from metaq.broker.schedule import NAP_S_MAX, Schedules
from metaq.broker.status import RetentionStatus, add_run
from metaq.config import TopicConfig
from metaq.errors import NoSpaceError
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


def test_each_job_runs_when_its_time_has_come() -> None:
    """The task is told how long it can sleep: until the first one is due."""
    bench = Bench()

    async def body(keeping: Housekeeping) -> None:
        assert keeping.run_due() == pytest.approx(2)
        assert bench.turns == []
        assert bench.pass_s(keeping, 2) == pytest.approx(1)
        assert bench.turns == ["a"]
        assert bench.pass_s(keeping, 1) == pytest.approx(1)
        assert bench.turns == ["a", "b"]
        assert bench.pass_s(keeping, 1) == pytest.approx(2)
        assert bench.turns == ["a", "b", "a"]

    bench.run(bench.job("a", 2), bench.job("b", 3), body=body)


def test_what_was_missed_is_done_once() -> None:
    """A machine that slept for a day does not catch up turn by turn."""
    bench = Bench()

    async def body(keeping: Housekeeping) -> None:
        assert bench.pass_s(keeping, 86_400) == pytest.approx(2)
        assert bench.turns == ["a"]

    bench.run(bench.job("a", 2), body=body)


def test_nothing_to_do_is_no_awakening() -> None:
    """Without a job, or with one that waits to be woken, the task sleeps for ever."""
    bench = Bench()

    async def body(keeping: Housekeeping) -> None:
        assert keeping.run_due() == math.inf
        assert bench.pass_s(keeping, 1e9) == math.inf
        assert bench.turns == []

    bench.run(body=body)
    bench.run(bench.job("never", math.inf), body=body)


@pytest.mark.parametrize("error", [NoSpaceError("no room"), ZeroDivisionError("a bug")])
def test_a_job_that_fails_does_not_stop_the_others(error: Exception) -> None:
    """It is counted, and comes again like any other."""
    bench = Bench()

    async def body(keeping: Housekeeping) -> None:
        bench.pass_s(keeping, 2)
        bench.pass_s(keeping, 2)
        assert bench.turns == ["bad", "good", "bad", "good"]
        bad, good = keeping.statistics()
        assert (bad.name, bad.run_count, bad.failure_count) == ("bad", 2, 2)
        assert str(error) in bad.last_error
        assert (good.run_count, good.failure_count, good.last_error) == (2, 0, "")
        assert keeping.failure is None

    bench.run(bench.job("bad", 2, error), bench.job("good", 2), body=body)


def test_the_same_error_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A job that fails every second does not fill the log; the end of it is told."""
    bench = Bench()
    errors: list[Exception | None] = [
        NoSpaceError("one"),
        NoSpaceError("one"),
        NoSpaceError("two"),
        None,
        None,
    ]

    def run() -> None:
        error = errors.pop(0)
        if error is not None:
            raise error

    async def body(keeping: Housekeeping) -> None:
        for _ in range(5):
            bench.pass_s(keeping, 1)
        assert keeping.statistics()[0].last_error == ""

    with caplog.at_level(logging.INFO, "metaq.broker.housekeeping"):
        bench.run(every("job", 1, run), body=body)
    assert [record.getMessage() for record in caplog.records] == [
        "job failed: job=job error=one",
        "job failed: job=job error=two",
        "job works again: job=job failures=3",
    ]


def test_a_bug_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """What nobody expected has to be found again; a known error needs no traceback."""
    bench = Bench()

    async def body(keeping: Housekeeping) -> None:
        bench.pass_s(keeping, 1)

    jobs = (
        bench.job("bug", 1, ZeroDivisionError("oops")),
        bench.job("known", 1, NoSpaceError("full")),
    )
    bench.run(*jobs, body=body)
    bug, known = caplog.records
    assert bug.exc_info
    assert not known.exc_info


def test_a_job_that_cannot_say_its_delay_comes_again_later() -> None:
    """A wrong delay is a failure of that job alone."""
    bench = Bench()

    def delay_s() -> float:
        raise ZeroDivisionError("oops")

    async def body(keeping: Housekeeping) -> None:
        bad = keeping.statistics()[0]
        assert (bad.failure_count, "oops" in bad.last_error) == (1, True)
        assert bench.pass_s(keeping, DELAY_AFTER_BUG_S) == pytest.approx(
            DELAY_AFTER_BUG_S
        )
        assert keeping.statistics()[0].run_count == 1

    bench.run(Job("bad", delay_s, lambda: None), body=body)


@pytest.mark.parametrize("delay_s", [0.0, -5.0])
def test_a_job_never_keeps_the_processor_busy(delay_s: float) -> None:
    """A delay of nothing, or less, is made a short one."""
    bench = Bench()

    async def body(keeping: Housekeeping) -> None:
        assert keeping.run_due() == pytest.approx(DELAY_S_MIN)
        assert bench.pass_s(keeping, DELAY_S_MIN) == pytest.approx(DELAY_S_MIN)

    bench.run(bench.job("eager", delay_s), body=body)


def test_waking_brings_a_job_forward_and_never_back() -> None:
    """After a reload a job may be due sooner; often woken, it still has its turn."""
    bench = Bench()
    delays_s = [10.0]
    job = Job("a", lambda: delays_s[0], lambda: bench.turns.append("a"))

    async def body(keeping: Housekeeping) -> None:
        delays_s[0] = 2.0
        keeping.wake()
        assert keeping.run_due() == pytest.approx(2)
        for _ in range(4):
            assert bench.turns == []
            bench.clock.advance_s(0.5)
            keeping.wake()
        keeping.run_due()
        assert bench.turns == ["a"]

    bench.run(job, body=body)


def test_the_task_wakes_by_itself() -> None:
    """Nobody calls `run_due` in a broker: the task does, when it is time."""
    turns = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        enough = asyncio.Event()

        def run() -> None:
            turns.append(loop.time())
            if len(turns) == 3:
                enough.set()

        class LoopClock(ManualClock):
            def monotonic_s(self) -> float:
                return loop.time()

        keeping = Housekeeping(
            [every("a", 0.01, run), Job("idle", lambda: math.inf, run)],
            clock=LoopClock(),
            executor=HeldExecutor(),
            stop_timeout_s=5,
        )
        await keeping.start()
        async with asyncio.timeout(5):
            await enough.wait()
        await keeping.stop()

    asyncio.run(main())
    assert turns[2] - turns[0] >= 0.019


# -- blocking work


def blocking(bench: Bench, finish: Finish | None = None) -> Job:
    def work() -> Finish | None:
        bench.turns.append("work")
        return finish

    def run() -> Work:
        bench.turns.append("run")
        return work

    return every("blocking", 2, run)


def test_blocking_work_runs_elsewhere_and_ends_on_the_loop() -> None:
    """The three steps of a turn come in order; the delay counts from the last."""
    bench = Bench()

    async def body(keeping: Housekeeping) -> None:
        assert bench.pass_s(keeping, 2) == math.inf
        assert bench.turns == ["run"]
        assert keeping.statistics()[0].run_count == 0
        bench.clock.advance_s(100)
        bench.executor.run_one()
        assert bench.turns == ["run", "work"]
        await settle()
        assert bench.turns == ["run", "work", "finish"]
        assert keeping.statistics()[0].run_count == 1
        assert keeping.run_due() == pytest.approx(2)

    bench.run(blocking(bench, lambda: bench.turns.append("finish")), body=body)


def test_long_work_holds_nobody_up_and_never_overlaps_itself() -> None:
    """Other jobs have their turns; the busy one is not begun again, woken or not."""
    bench = Bench()

    async def body(keeping: Housekeeping) -> None:
        for _ in range(3):
            bench.pass_s(keeping, 2)
            keeping.wake()
        assert bench.turns == ["run", "a", "a", "a"]

    bench.run(blocking(bench), bench.job("a", 2), body=body)


def test_work_that_fails_is_a_turn_that_fails() -> None:
    """In whichever step: it is counted, and the job comes again."""
    bench = Bench()

    def finish() -> None:
        raise NoSpaceError("finish")

    async def body(keeping: Housekeeping) -> None:
        bench.pass_s(keeping, 2)
        bench.executor.run_one()
        await settle()
        assert keeping.statistics()[0].last_error == "finish"
        bench.pass_s(keeping, 2)
        future, _ = bench.executor.held.pop()
        future.set_exception(NoSpaceError("work"))
        await settle()
        failed = keeping.statistics()[0]
        assert (failed.failure_count, failed.last_error) == (2, "work")
        assert keeping.run_due() == pytest.approx(2)

    bench.run(blocking(bench, finish), body=body)


def test_an_executor_that_is_closed_is_a_failed_turn() -> None:
    """It says so in the statistics, and nothing else breaks."""
    bench = Bench()

    class Closed(HeldExecutor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            raise RuntimeError("cannot schedule new futures after shutdown")

    bench.executor = Closed()

    async def body(keeping: Housekeeping) -> None:
        bench.pass_s(keeping, 2)
        assert "after shutdown" in keeping.statistics()[0].last_error
        assert keeping.failure is None

    bench.run(blocking(bench), body=body)


def test_a_stop_neither_waits_for_work_nor_calls_it_off() -> None:
    """Its owner may count on it; what comes of it after the stop is dropped."""
    bench = Bench()

    async def body(keeping: Housekeeping) -> None:
        bench.pass_s(keeping, 2)
        await keeping.stop()
        future, _ = bench.executor.held[0]
        assert not future.cancelled()
        bench.executor.run_one()
        await settle()
        assert bench.turns == ["run", "work"]
        assert keeping.failure is None

    bench.run(blocking(bench, lambda: bench.turns.append("finish")), body=body)


# -- the jobs of a broker


def topic(threshold: int, interval_ms: int) -> TopicConfig:
    return TopicConfig(
        name="t", unflush_threshold=threshold, unflush_interval_ms=interval_ms
    )


@pytest.mark.parametrize(
    ("topics", "expected"),
    [
        ([], LOG_CHECK_S),
        ([topic(0, 100)], LOG_CHECK_S),
        ([topic(-1, 100)], LOG_CHECK_S),
        ([topic(1000, 0)], LOG_CHECK_S),
        ([topic(1000, 10_000)], 2.5),
        ([topic(1000, 60_000)], LOG_CHECK_S),
        ([topic(1000, 1000), topic(1, 300), topic(0, 1)], 0.075),
        ([topic(1000, 1)], LOG_CHECK_S_MIN),
    ],
)
def test_logs_are_looked_at_as_often_as_intervals_need(
    topics: list[TopicConfig], expected: float
) -> None:
    """Group commit needs no timer; the shortest interval of threshold mode counts."""
    assert log_check_s(topics) == expected


@dataclass(frozen=True)
class Report:
    """A `RetentionFigures`."""

    segment_count: int = 0
    size_bytes: int = 0
    failures: tuple[str, ...] = ()
    doubt: str | None = None


class Retention:
    """The storage's side of retention, and what it was asked."""

    def __init__(self, bench: Bench, schedules: dict[str, str]) -> None:
        self.asked: list[Collection[str]] = []
        self.reports: list[Report] = []
        self.early: Collection[str] | None = None
        self.is_busy = False
        self.schedules = Schedules(bench.clock, dt.UTC)
        self.schedules.replace_jobs(schedules)
        self.job = retention_job(
            self.schedules,
            clock=bench.clock,
            begin=self.begin,
            find_early=lambda: self.early,
            on_end=self.reports.append,
        )

    def begin(self, topics: Collection[str]) -> Callable[[], Report] | None:
        self.asked.append(topics)
        return None if self.is_busy else lambda: Report(segment_count=1)


# 22:13:20 UTC on the manual clock: the schedule below is due in 40 seconds.
SOON = {"a": "0 14 22 * * ?", "b": "0 14 22 * * ?", "c": "0 0 6 * * ?"}


def test_retention_runs_for_the_topics_whose_time_has_come() -> None:
    """Those that share an expression run together; the report reaches the loop."""
    bench = Bench()
    retention = Retention(bench, SOON)

    async def body(keeping: Housekeeping) -> None:
        assert keeping.run_due() == pytest.approx(40)
        bench.pass_s(keeping, 40)
        assert retention.asked == [frozenset({"a", "b"})]
        bench.executor.run_one()
        await settle()
        assert retention.reports == [Report(segment_count=1)]
        assert keeping.run_due() == NAP_S_MAX

    bench.run(retention.job, body=body)


@pytest.mark.parametrize("early", [(), ("a", "b")])
def test_a_full_disk_does_not_wait_for_the_schedule(early: tuple[str, ...]) -> None:
    """A run comes at the next look, for the topics that are named, or by size alone."""
    bench = Bench()
    retention = Retention(bench, {"c": SOON["c"]})

    async def body(keeping: Housekeeping) -> None:
        bench.pass_s(keeping, NAP_S_MAX)
        assert retention.asked == []
        retention.early = early
        bench.pass_s(keeping, NAP_S_MAX)
        assert retention.asked == [frozenset(early)]

    bench.run(retention.job, body=body)


def test_retention_without_a_schedule_sleeps_but_looks() -> None:
    """No topic, no firing: only sizes are watched."""
    bench = Bench()
    retention = Retention(bench, {})

    async def body(keeping: Housekeeping) -> None:
        assert keeping.run_due() == NAP_S_MAX

    bench.run(retention.job, body=body)


def test_a_wall_clock_set_forward_is_noticed() -> None:
    """The job never sleeps longer than a nap, whatever the wall clock said."""
    bench = Bench()
    retention = Retention(bench, {"c": SOON["c"]})

    async def body(keeping: Housekeeping) -> None:
        assert keeping.run_due() == NAP_S_MAX
        bench.clock.jump_wall_ms(9 * 3_600_000)
        bench.pass_s(keeping, NAP_S_MAX)
        assert retention.asked == [frozenset({"c"})]

    bench.run(retention.job, body=body)


def test_a_run_that_cannot_begin_is_no_work() -> None:
    """While another run is under way there is nothing to do."""
    bench = Bench()
    retention = Retention(bench, SOON)
    retention.is_busy = True

    async def body(keeping: Housekeeping) -> None:
        bench.pass_s(keeping, 40)
        assert bench.executor.held == []
        assert keeping.statistics()[0].failure_count == 0

    bench.run(retention.job, body=body)


BEFORE = RetentionStatus(
    segment_count=5, removed_bytes=50, failure_count=1, last_error="old"
)


@pytest.mark.parametrize(
    ("report", "after"),
    [
        (
            Report(segment_count=2, size_bytes=20),
            replace(BEFORE, segment_count=7, removed_bytes=70, last_error=""),
        ),
        (
            Report(failures=("x",)),
            replace(BEFORE, failure_count=2, last_error="x"),
        ),
        (
            Report(failures=("x", "y", "z")),
            replace(BEFORE, failure_count=4, last_error="x (and 2 more)"),
        ),
        (
            Report(doubt="clock"),
            replace(BEFORE, last_error="", clock_doubt="clock"),
        ),
    ],
)
def test_runs_of_retention_add_up(report: Report, after: RetentionStatus) -> None:
    """Counters grow; the error is that of the last run alone."""
    assert add_run(BEFORE, report) == after
