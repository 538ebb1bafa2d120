"""How a consumer is doing: health, lag, and a watchdog that silence does not fool.

A consumer that stands still looks like one that has nothing to do. The watchdog tells
them apart: for every partition that has not moved for a while it asks the broker where
the log ends, over a question of its own. Data there, somebody free to take it, and no
movement for the whole bound is an error that ends the consumer, with a log line.
"""

import asyncio
import enum
from dataclasses import dataclass

from metaq.client.context import ClientContext
from metaq.client.errors import CannotAnswerError, StuckError
from metaq.client.feed import Feed
from metaq.client.questions import count_between, log_range, time_of
from metaq.errors import MetaqError
from metaq.model import Offset, TopicPartition


class ConsumerState(enum.Enum):
    """What a consumer is doing."""

    NEW = "new"
    JOINING = "joining"
    """It does not have the partitions that are its own."""
    RUNNING = "running"
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Health:
    """A snapshot of a consumer's condition."""

    state: ConsumerState
    """What it is doing."""
    is_ok: bool
    """Running, with no partition that only brings errors, and commits that work."""
    partition_count: int
    """Partitions it reads."""
    idle_s: float
    """Seconds since something was fetched, handed out or handled; 0 without
    partitions."""
    uncommitted_count: int
    """Partitions whose handled offset is ahead of the committed one."""
    problems: tuple[str, ...]
    """What is wrong, one sentence each."""


@dataclass(frozen=True, slots=True)
class Lag:
    """How far a consumer is behind the end of one partition's log."""

    messages: int | None
    """Messages that are not handled; None where the broker cannot count."""
    bytes: int
    """Bytes of the log that are not handled."""
    seconds: float | None
    """Age of the oldest message that is not handled, 0.0 when there is none; None
    where messages carry no time."""


async def lag_of(
    context: ClientContext,
    partition: TopicPartition,
    handled: Offset,
    *,
    deadline_s: float,
) -> Lag:
    """Return the lag of a reader that has handled everything before `handled`.

    Raises:
        MetaqError: the broker cannot be asked.
    """
    ends = await log_range(context, partition, deadline_s=deadline_s)
    if ends is None or handled >= ends[1]:
        return Lag(messages=0, bytes=0, seconds=0.0)
    start, end = max(handled, ends[0]), ends[1]
    messages: int | None
    try:
        messages = await count_between(
            context, partition, start, end, deadline_s=deadline_s
        )
    except CannotAnswerError:
        messages = None
    stamped = await time_of(context, partition, start, deadline_s=deadline_s)
    age_s = None
    if stamped is not None:
        age_s = max(0.0, (context.clock.wall_ms() - stamped) / 1000)
    return Lag(messages, end - start, age_s)


class Watchdog:
    """Looks for partitions that stand still with data before them."""

    def __init__(self, context: ClientContext, feed: Feed, *, bound_s: float) -> None:
        """Prepare.

        Args:
            context: for questions to brokers.
            feed: what is watched.
            bound_s: how long data may wait for a free worker.
        """
        self._context = context
        self._feed = feed
        self._bound_s = bound_s

    async def run(self) -> None:
        """Watch until cancelled, or until something is stuck: then the feed fails.

        Every bound is looked at four times over, so that what is stuck is told at
        most a quarter late.
        """
        while True:
            await asyncio.sleep(self._bound_s / 4)
            error = await self._look()
            if error is not None:
                self._feed.fail(error)
                return

    async def _look(self) -> StuckError | None:
        now_s = self._context.clock.monotonic_s()
        lanes = self._feed.statistics()
        if not self._feed.has_waiters:
            # Whoever handles is busy, or nobody asks: then nobody is stuck.
            return None
        for partition, lane in lanes.items():
            still_s = now_s - lane.progress_s
            if lane.is_in_hand or still_s < self._bound_s:
                continue
            try:
                ends = await log_range(
                    self._context, partition, deadline_s=now_s + self._bound_s / 4
                )
            except MetaqError:
                # A broker that is away is told by `health`, and comes back or not.
                continue
            moved = self._feed.statistics().get(partition)
            if ends is None or moved is None or moved.progress_s != lane.progress_s:
                continue
            if lane.handled.offset < ends[1]:
                return StuckError(
                    f"{partition}: no progress for {still_s:.0f} s (bound"
                    f" {self._bound_s:g} s) at offset {lane.handled.offset}, although"
                    f" the log goes on to {ends[1]} and a reader waits"
                )
        return None
