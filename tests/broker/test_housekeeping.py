"""Housekeeping: when jobs run, what a failure does, and that nothing else is done."""

import asyncio
import logging
import math
from concurrent.futures import Future
from typing import Any

import pytest

from metaq.broker.housekeeping import (
    DELAY_AFTER_BUG_S,
    DELAY_S_MIN,
    Finish,
    Housekeeping,
    Job,
    Work,
    every,
)
from metaq.errors import NoSpaceError
from metaq.testing.clock import ManualClock
from tests.broker.keeping import Bench, HeldExecutor, settle


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
        "job succeeded again: job=job failures=3",
    ]


def test_a_bug_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """An unexpected error has to be found; a known error needs no traceback."""
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
    """A broker never calls `run_due`: the task does, when it is time."""
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
        async with asyncio.timeout(30):
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
