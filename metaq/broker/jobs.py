"""The periodic jobs of a broker, and when each is due.

Jobs that read much (retention, scrub, building indexes of keys) do one bounded step per
turn on a thread of the upkeep; all others are short and run on the loop.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Final

from metaq.broker.context import BrokerContext
from metaq.broker.control import Control
from metaq.broker.delay_service import DelayService
from metaq.broker.housekeeping import Finish, Job, Work, every
from metaq.broker.queue_service import QueueService
from metaq.broker.schedule import NAP_S_MAX, Schedules
from metaq.broker.status import add_run
from metaq.clock import Clock
from metaq.config.settings import TopicConfig
from metaq.storage.key_builder import run_key_step
from metaq.storage.log_manager import LogManager
from metaq.storage.log_snapshots import ScrubbedLogs, key_logs
from metaq.storage.retention_run import RetentionReport
from metaq.storage.scrub import Scrub, run_step

REALTIME_RESET_S: Final = 30 * 60.0
"""Interval between resets of the realtime statistics (docs/metaq-1.4/broker.md 7.2)."""
CONNECTION_CHECK_S: Final = 5.0
"""Interval between checks for idle or stalled connections, in seconds."""
DELETED_CHECK_S: Final = 60.0
"""Interval between removals of the data of deleted topics, in seconds."""
TRANSACTION_TICK_S: Final = 0.5
"""Interval between checks for timed-out transactions, in seconds; MetaQ's."""
JOURNAL_SYNC_S: Final = 1.0
"""Interval between syncs of the journal if flushTxLogAtCommit is 2, in seconds."""
JOURNAL_OPENING_S: Final = 5.0
"""Interval between tries to open a journal that lacked space at the start."""
SCRUB_STEP_S: Final = 1.0
"""Interval between steps of the scrub, in seconds; a step reads as much as the rate
allows."""
QUEUES_TICK_S: Final = 1.0
"""Interval between ticks of the queue groups (snapshots, retries of dead letters) and
closes of mailboxes without a listener, in seconds."""
INDEX_S: Final = 0.1
"""Interval between index entries of small groups, in seconds: an entry has the time at
which it is made."""
LOG_CHECK_S: Final = 5.0
"""Maximum interval between checks of logs and free space, in seconds."""
LOG_CHECK_S_MIN: Final = 0.05
"""Minimum interval between these checks, in seconds; bounds how exact sync intervals
are."""

_log = logging.getLogger(__name__)


class BrokerJobs:
    """The jobs of one broker. Used on the event loop, but for their `Work`."""

    def __init__(
        self,
        context: BrokerContext,
        logs: LogManager,
        control: Control,
        schedules: Schedules,
        scrub: Scrub,
        *,
        queues: QueueService,
        delays: DelayService | None,
        check_sessions: Callable[[], None],
        open_journal: Callable[[], Work | None],
        wake: Callable[[], None],
    ) -> None:
        """Prepare; nothing runs before the housekeeping of `all` starts.

        Args:
            context: parts of the broker.
            logs: its logs.
            control: has the schedules of topics, and gets the results of retention.
            schedules: when the topics are due for retention.
            scrub: which part of which log is verified next.
            queues: its queue groups.
            delays: its delayed messages; None: not served.
            check_sessions: closes idle and stalled connections.
            open_journal: returns work that opens a journal that lacked space at the
                start; None: it is open.
            wake: has the housekeeping ask every job for its delay again; any thread.
        """
        self._context = context
        self._logs = logs
        self._control = control
        self._schedules = schedules
        self._scrub = scrub
        self._queues = queues
        self._delays = delays
        self._check_sessions = check_sessions
        self._open_journal = open_journal
        self._wake = wake

    def all(self) -> tuple[Job, ...]:
        """Return every job, in the order in which `stats` lists them."""
        context, logs, queues = self._context, self._logs, self._queues
        transactions = context.transactions
        checkpoint_s = context.config.system.checkpoint_interval_ms / 1000
        return (
            Job("logs", self._log_check_s, self._tick_logs),
            Job("index", self._index_delay_s, logs.index),
            every("connections", CONNECTION_CHECK_S, self._check_sessions),
            every("realtime", REALTIME_RESET_S, context.realtime.reset),
            every("scrub", SCRUB_STEP_S, self._begin_scrub_step),
            Job("keys", self._key_delay_s, self._begin_key_step),
            every("transactions", TRANSACTION_TICK_S, transactions.tick),
            every("journal", JOURNAL_SYNC_S, transactions.sync_due),
            every("journal-opening", JOURNAL_OPENING_S, self._open_journal),
            every("checkpoint", checkpoint_s, transactions.checkpoint),
            every("deleted", DELETED_CHECK_S, lambda: logs.remove_deleted),
            every("queues", QUEUES_TICK_S, queues.tick),
            every("mailboxes", QUEUES_TICK_S, context.mailboxes.close_left),
            retention_job(
                self._schedules,
                clock=context.clock,
                begin=logs.begin_retention,
                find_early=self._find_early_retention,
                on_end=self._on_retention_end,
            ),
        )

    def _index_delay_s(self) -> float:
        is_done = self._logs.is_indexed(self._wake)
        return math.inf if is_done else INDEX_S

    def _log_check_s(self) -> float:
        topics = {log_id.topic for log_id in self._logs.logs()}
        return log_check_s(map(self._context.config.topic, topics))

    def _tick_logs(self) -> None:
        self._logs.tick(self._context.clock.monotonic_s())

    def _begin_scrub_step(self) -> Work | None:
        """Return the next step of the scrub, if it is due."""
        scrub, clock, fs = self._scrub, self._context.clock, self._context.fs
        step = scrub.take_step(ScrubbedLogs(self._logs.logs()), clock.monotonic_s())
        if step is None:
            return None

        def work() -> Finish:
            result = run_step(fs, step)
            return lambda: scrub.finish_step(step, result, clock.monotonic_s())

        return work

    def _key_delay_s(self) -> float:
        return self._context.key_builder.delay_s(self._context.clock.monotonic_s())

    def _begin_key_step(self) -> Work | None:
        """Return the next step of building an index of keys, if it is due."""
        context, logs = self._context, self._logs
        builder, clock = context.key_builder, context.clock
        step = builder.take_step(
            key_logs(logs.logs(), context.config), clock.monotonic_s()
        )
        if step is None:
            return None

        def work() -> Finish:
            result = run_key_step(context.fs, step)
            return lambda: builder.finish_step(step, result, clock.monotonic_s())

        return logs.while_uncut(work)

    def _find_early_retention(self) -> Collection[str] | None:
        """Return topics for a retention run before its schedule; None for no run.

        All scheduled ones if a directory is low on space; none for removals by size.
        """
        if any(each.is_low_on_space for each in self._logs.directories()):
            return self._control.deletion_schedules(self._context.config).keys()
        is_trimmed = self._queues.wants_trim
        is_trimmed = is_trimmed or (self._delays is not None and self._delays.trim())
        return () if self._logs.is_over_size_limit or is_trimmed else None

    def _on_retention_end(self, run: RetentionReport) -> None:
        control = self._control
        control.retention = add_run(control.retention, run)
        if run.segment_count or run.failures:
            _log.info(
                "retention complete: segments=%d bytes=%d failures=%d",
                run.segment_count,
                run.size_bytes,
                len(run.failures),
            )


def log_check_s(topics: Iterable[TopicConfig]) -> float:
    """Return the interval between checks of the logs, in seconds.

    It is a quarter of the shortest sync interval in threshold mode, so that no sync is
    late by more than a quarter, and at most `LOG_CHECK_S`, because the free space is
    checked at the same time.
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
    """Return the job that removes old segments.

    Args:
        schedules: return the due topics; call `wake` after replacing them.
        clock: wall clock of the schedules.
        begin: returns the blocking run, which removes segments of these topics by age,
            and of all topics by size; None: nothing to do.
        find_early: returns the topics of a run ahead of the schedule (a disk is nearly
            full, or a size limit is exceeded); None: no run.
        on_end: called on the event loop with the result of the run.
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
