"""The jobs of a broker: checks of logs, and retention by schedule and by size."""

import datetime as dt
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest

from metaq.broker.housekeeping import Housekeeping
from metaq.broker.jobs import LOG_CHECK_S, LOG_CHECK_S_MIN, log_check_s, retention_job
from metaq.broker.schedule import NAP_S_MAX, Schedules
from metaq.broker.status import RetentionStatus, add_run
from metaq.config.settings import TopicConfig
from metaq.model import SizeBytes
from metaq.storage.retention_run import RetentionReport
from tests.broker.keeping import Bench, settle


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


def report(**changes: Any) -> RetentionReport:
    """Return what a run did: nothing, but for the changes."""
    return replace(RetentionReport(0, SizeBytes(0), (), None), **changes)


class Retention:
    """The storage's side of retention, and what it was asked."""

    def __init__(self, bench: Bench, schedules: dict[str, str]) -> None:
        self.asked: list[Collection[str]] = []
        self.reports: list[RetentionReport] = []
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

    def begin(self, topics: Collection[str]) -> Callable[[], RetentionReport] | None:
        self.asked.append(topics)
        return None if self.is_busy else lambda: report(segment_count=1)


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
        assert retention.reports == [report(segment_count=1)]
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
    ("run", "after"),
    [
        (
            report(segment_count=2, size_bytes=SizeBytes(20)),
            replace(BEFORE, segment_count=7, removed_bytes=70, last_error=""),
        ),
        (
            report(failures=("x",)),
            replace(BEFORE, failure_count=2, last_error="x"),
        ),
        (
            report(failures=("x", "y", "z")),
            replace(BEFORE, failure_count=4, last_error="x (and 2 more)"),
        ),
        (
            report(clock_fault="clock"),
            replace(BEFORE, last_error="", clock_doubt="clock"),
        ),
    ],
)
def test_runs_of_retention_add_up(run: RetentionReport, after: RetentionStatus) -> None:
    """Counters grow; the error is that of the last run alone."""
    assert add_run(BEFORE, run) == after
