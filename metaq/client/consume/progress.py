"""Health and lag of a consumer, and a watchdog for partitions without progress.

A consumer that stands still looks like one that has nothing to do. The watchdog tells
them apart: for every partition that has not moved for a while it asks the broker where
the log ends, over a question of its own. Data there, a worker that wants it, and no
movement for the whole bound is an error that ends the consumer, with a log line; gets
that are refused are no movement. A message that was in the handler's hands for the
whole bound is a log line alone: a handler may be slow, and rightly so.
"""

import asyncio
import contextlib
import enum
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import Final

from metaq.client.cluster.context import ClientContext
from metaq.client.cluster.metadata_queries import count_between, log_range, time_of
from metaq.client.cluster.presence import name_away
from metaq.client.consume.duplicate_filter import DuplicateStatistics
from metaq.client.consume.fetch_buffer import FetchBuffer, PartitionBufferStatistics
from metaq.client.consume.fetcher import FetchStatistics
from metaq.client.consume.handling import HandlingStatistics
from metaq.client.errors import BehindLogEndError, CannotAnswerError, StuckError
from metaq.client.fan_out import all_of
from metaq.cluster_snapshot import ClusterSnapshot
from metaq.errors import (
    ConnectionLostError,
    CorruptRecordError,
    ForbiddenError,
    MetaqError,
    RemoteProtocolError,
    WireError,
)
from metaq.model import GroupOffset, Offset, TopicPartition
from metaq.stats import counter, gauge, part

log = logging.getLogger(__name__)


class ConsumerState(enum.Enum):
    """State of a consumer."""

    NEW = "new"
    JOINING = "joining"
    """It does not have the partitions that are its own."""
    RUNNING = "running"
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Health:
    """A snapshot of a consumer's condition."""

    state: ConsumerState = gauge(
        "metaq_consumers",
        "Consumers that are open, by what they are doing.",
        default=MISSING,
        labels=("state",),
        read=lambda state: {
            one.value: one is state
            for one in ConsumerState
            if one is not ConsumerState.CLOSED
        },
    )
    is_ok: bool = gauge(
        "metaq_consumer_healthy",
        "1 while `health()` of every consumer of the group is good, 0 otherwise.",
        default=False,
        combine=min,
    )
    """Running, with every topic served, no partition that only brings errors, and
    commits that work."""
    partition_count: int = gauge(
        "metaq_consumer_partitions", "Partitions that are read."
    )
    idle_s: float = gauge(
        "metaq_consumer_idle_seconds",
        "Time since something was fetched, handed out or handled; the longest.",
        combine=max,
    )
    """0 without partitions."""
    uncommitted_count: int = gauge(
        "metaq_consumer_uncommitted_partitions",
        "Partitions whose handled offset is ahead of the committed one.",
    )
    problems: tuple[str, ...] = gauge(
        "metaq_consumer_problems",
        "Sentences that `health()` has to say.",
        default=(),
        read=len,
    )
    """Problems, one sentence each."""


@dataclass(frozen=True, slots=True)
class Lag:
    """Distance of a consumer from the end of one partition's log."""

    messages: int | None = gauge(
        "metaq_consumer_lag_messages",
        "Messages that were not handled when `lag()` was asked last.",
        default=None,
        combine=max,
    )
    """None where the broker cannot count, the log is damaged, or `bytes` is None."""
    bytes: int | None = gauge(
        "metaq_consumer_lag_bytes",
        "Bytes of the log that were not handled when `lag()` was asked last.",
        default=None,
        combine=max,
    )
    """None where the partition is away, or the offset lies behind the log end."""
    seconds: float | None = gauge(
        "metaq_consumer_lag_seconds",
        "Age of the oldest message not handled when `lag()` was asked last.",
        default=None,
        combine=max,
    )
    """0.0 when there is none; None
    where messages carry no time, or may not be read."""


UNKNOWN_LAG: Final = Lag(messages=None, bytes=None, seconds=None)
"""Lag of a partition whose broker is away, or that is read behind the log end."""


def judge(
    state: ConsumerState,
    fetch_buffer: FetchBuffer,
    *,
    is_settled: bool,
    uncommitted_count: int,
    problems: Sequence[str],
    now_s: float,
) -> Health:
    """Return a consumer's condition.

    Args:
        state: its state.
        fetch_buffer: its fetch_buffer, which may have failed.
        is_settled: whether it has the partitions that are its own.
        uncommitted_count: partitions that are handled further than committed.
        problems: known problems.
        now_s: monotonic time.
    """
    buffers = fetch_buffer.statistics()
    if state is ConsumerState.RUNNING:
        if fetch_buffer.error is not None:
            state = ConsumerState.FAILED
            problems = (*problems, str(fetch_buffer.error))
        elif not is_settled:
            state = ConsumerState.JOINING
    last_s = max((buffer.progress_s for buffer in buffers.values()), default=now_s)
    return Health(
        state=state,
        is_ok=state is ConsumerState.RUNNING and not problems,
        partition_count=len(buffers),
        idle_s=now_s - last_s,
        uncommitted_count=uncommitted_count,
        problems=tuple(problems),
    )


class Unserved:
    """Parts of a consumer's topics that no broker serves; each is logged once.

    That ends nothing: the topic, or the broker, may come. But a wrong name would look
    like a topic without messages, and a broker that is away like one that never was.
    """

    def __init__(self, topics: Collection[str], *, reads_all: bool) -> None:
        """Take the names of the subscribed topics; nothing is known of them yet.

        Args:
            topics: their names.
            reads_all: whether the consumer is to read all partitions, alone or with
                its group; else a partition away may be none of its own, and one that
                is read none of the topic.
        """
        self._topics = topics
        self._reads_all = reads_all
        self._missing: frozenset[str] = frozenset()
        self._strange: frozenset[TopicPartition] = frozenset()
        """Partitions that are read, and that their brokers do not have."""
        self.away: tuple[TopicPartition, ...] = ()
        """Partitions to be read that are away."""

    def update(
        self, snapshot: ClusterSnapshot, group: str, active: Iterable[TopicPartition]
    ) -> None:
        """Take over a snapshot; topics that it has not heard of yet are not missing.

        Args:
            snapshot: the cluster as it is now.
            group: for the log.
            active: the partitions that are read.
        """
        known = snapshot.topics.intersection(self._topics)
        missing = frozenset(t for t in known if not snapshot.get_partitions(t))
        for topic in sorted(missing - self._missing):
            log.warning("no broker serves the topic: group=%s topic=%s", group, topic)
        self._missing = missing
        before, away = self.away, []
        if self._reads_all:
            away = [one for topic in sorted(known) for one in snapshot.away(topic)]
        if not set(away) <= set(before):
            log.warning("partitions are away: group=%s %s", group, name_away(away))
        self.away = tuple(away)
        strange = frozenset[TopicPartition]()
        if not self._reads_all:
            served = known - missing
            strange = frozenset(
                one
                for one in active
                if one.topic in served
                and one.broker_id in snapshot.brokers
                and not snapshot.is_served(one)
            )
        for one in sorted(strange - self._strange):
            log.warning("no broker serves the partition: group=%s %s", group, one)
        self._strange = strange

    def problems(self) -> list[str]:
        """Return sentences for what no broker serves, and for partitions away."""
        missing = [*sorted(self._missing), *sorted(self._strange)]
        found = [f"{each}: no broker serves it" for each in missing]
        return [*found, name_away(self.away)] if self.away else found


async def lag_of(
    context: ClientContext,
    partition: TopicPartition,
    handled: Offset,
    *,
    deadline_s: float,
) -> Lag:
    """Return the lag of a reader that has handled everything before `handled`.

    Raises:
        BehindLogEndError: `handled` lies behind the log end.
        MetaqError: the broker cannot be asked.
    """
    ends = await log_range(context, partition, deadline_s=deadline_s)
    log_start, end = ends or (Offset(0), Offset(0))
    if handled > end:
        raise BehindLogEndError(
            f"{partition}: offset {handled} lies behind the log end {end}: the log was"
            " replaced, or cut by a broker that lost data"
        )
    if handled == end:
        return Lag(messages=0, bytes=0, seconds=0.0)
    start = max(handled, log_start)
    messages: int | None
    try:
        messages = await count_between(
            context, partition, start, end, deadline_s=deadline_s
        )
    except (CannotAnswerError, CorruptRecordError):
        # Where bytes are damaged it is not known how many messages they were.
        messages = None
    age_s = stamped = None
    # A partition that is closed for gets, or damaged, still tells its offsets.
    with contextlib.suppress(WireError, CorruptRecordError):
        stamped = await time_of(context, partition, start, deadline_s=deadline_s)
    if stamped is not None:
        age_s = max(0.0, (context.clock.wall_ms() - stamped) / 1000)
    return Lag(messages, end - start, age_s)


@dataclass(frozen=True, slots=True)
class ConsumerStatistics:
    """A snapshot of a consumer's counters, since it was made."""

    delivered_count: int = counter(
        "metaq_consumer_delivered_messages_total",
        "Messages fetched and let through by the filter.",
    )
    filtered_count: int = counter(
        "metaq_consumer_filtered_messages_total", "Messages that the filter held back."
    )
    repeat_count: int = counter(
        "metaq_consumer_repeated_messages_total",
        "Messages not delivered because this process had handled them.",
    )
    duplicates: DuplicateStatistics | None = None
    """Counters of `duplicate_ids`; None without that option."""
    rebalance_count: int = counter(
        "metaq_consumer_rebalances_total",
        "Rebalances of the group that changed what a consumer reads.",
    )
    reset_count: int = counter(
        "metaq_consumer_resets_total",
        "Committed offsets given up because they lay outside the log.",
    )
    missing_bytes: int = counter(
        "metaq_consumer_missing_bytes_total",
        "Bytes of the log passed over: deleted before they were read, or damaged.",
    )
    commit_count: int = counter(
        "metaq_consumer_commits_total", "Commits that wrote something."
    )
    commit_failure_count: int = counter(
        "metaq_consumer_commit_failures_total",
        "Partitions whose commit failed, counted each time.",
    )
    fetches: Mapping[TopicPartition, FetchStatistics] = part(
        default=dict, labels=("topic", "partition"), label=TopicPartition.labels
    )
    """Of the partitions it reads now."""
    handling: HandlingStatistics | None = None
    """Of every `run`; the retry store is that of the last one. None when there was
    none."""


async def lags_of(
    context: ClientContext,
    handled: Mapping[TopicPartition, GroupOffset],
    *,
    deadline_s: float,
) -> dict[TopicPartition, Lag]:
    """Return the lag of each partition, all asked at once; as `lag_of`.

    `UNKNOWN_LAG` where the offset lies behind the log end.
    """

    async def ask(partition: TopicPartition, offset: Offset) -> Lag:
        try:
            return await lag_of(context, partition, offset, deadline_s=deadline_s)
        except BehindLogEndError:
            return UNKNOWN_LAG

    lags = await all_of(ask(one, at.offset) for one, at in handled.items())
    return dict(zip(handled, lags, strict=True))


@dataclass(frozen=True, slots=True)
class Standing:
    """Progress of reading one partition."""

    reached: Offset
    """Offset behind the bytes read so far."""
    error: MetaqError | None
    """Error of the last get, or damage whose end is looked for; None: neither."""

    def __str__(self) -> str:
        if self.error is None:
            return "the last answer to a get was that nothing is there"
        return f"the last get failed: {self.error}"


@dataclass(frozen=True, slots=True)
class Sight:
    """Observation of one partition by the watchdog."""

    progress_s: float
    """Monotonic time at which something was last fetched, handed out or handled."""
    standing: Standing
    """Progress of reading."""
    is_taken: bool
    """A worker has messages of it, or it is paused."""
    is_buffered: bool
    """Messages of it wait for a worker."""
    has_room: bool
    """More of it may be fetched."""
    has_waiters: bool
    """A worker waits for messages now."""
    is_wanted: bool
    """A worker has asked for messages within the bound, or waits now."""


def may_be_stuck(sight: Sight) -> bool:
    """Return whether a partition that stands still is one that should not.

    A batch that waits for a worker is only stuck beside a free one. Where nothing
    is fetched, it is the fetching that stands still, however busy the workers are with
    other partitions. An operator who closed a partition keeps it from being read:
    `health` tells of that for as long as it takes.
    """
    if sight.is_taken or isinstance(sight.standing.error, ForbiddenError):
        return False
    if sight.is_buffered:
        return sight.has_waiters
    return sight.is_wanted and (sight.has_room or sight.has_waiters)


class Watchdog:
    """Looks for partitions that stand still with data before them.

    A partition is suspected from the moment at which data is seen that does not come,
    and cleared by any movement, and by there being no worker that wants it. Gets that
    fail are no movement, whatever they fail with; but a broker that is away cannot say
    that there is data. A suspicion as old as the bound is an error: data that has just
    arrived after a long silence is none.
    """

    def __init__(
        self,
        context: ClientContext,
        fetch_buffer: FetchBuffer,
        *,
        group: str,
        bound_s: float,
        standing_of: Callable[[TopicPartition], Standing | None],
        on_stuck: Callable[[MetaqError], None],
    ) -> None:
        """Prepare.

        Args:
            context: for questions to brokers.
            fetch_buffer: the buffer to watch.
            group: consumer group, for the log.
            bound_s: how long data may wait for a free worker, and how long a message
                may take before the log says so.
            standing_of: progress of reading a partition; None: it is not read.
            on_stuck: called once, with the error.
        """
        self._context = context
        self._fetch_buffer = fetch_buffer
        self._group = group
        self._bound_s = bound_s
        self._standing_of = standing_of
        self._on_stuck = on_stuck
        self._suspects: dict[TopicPartition, _Suspicion] = {}
        self._taken: dict[TopicPartition, _TakenBatch] = {}
        self._beyond: dict[TopicPartition, tuple[Offset, Offset]] = {}
        """Offsets at which partitions are read, each with the log end before it."""

    def problems(self) -> list[str]:
        """Return sentences for partitions that are read behind the end of their log."""
        return [
            f"{partition}: {_tell_beyond(*offsets)}"
            for partition, offsets in self._beyond.items()
        ]

    async def run(self) -> None:
        """Watch until cancelled, or until something is stuck.

        Every bound is checked four times over: a stuck partition is told after one and
        a half of it at most.
        """
        while True:
            await asyncio.sleep(self._bound_s / 4)
            error = await self.look()
            if error is not None:
                self._on_stuck(error)
                return

    async def look(self) -> StuckError | None:
        """Look once; return the error of a partition that is stuck."""
        self._look_at_handling()
        now_s = self._context.clock.monotonic_s()
        buffers = self._fetch_buffer.statistics()
        self._beyond = {
            partition: offsets
            for partition, offsets in self._beyond.items()
            if partition in buffers and buffers[partition].handled.offset == offsets[0]
        }
        for partition, buffer in buffers.items():
            old = self._suspects.pop(partition, None)
            sight = self._sight_of(partition, buffer, now_s)
            if sight is None or not may_be_stuck(sight):
                continue
            if now_s - sight.progress_s < self._bound_s / 4:
                continue
            end = await self._end_of(partition, buffer.handled.offset, now_s, old)
            if end is None:
                continue
            state = (sight.progress_s, sight.standing.reached)
            since_s = old.since_s if old is not None and old.state == state else now_s
            self._suspects[partition] = _Suspicion(state, since_s, end)
            if now_s - since_s >= self._bound_s and self._is_still(partition, state):
                return StuckError(
                    f"{partition}: no progress for {now_s - since_s:.3g} s (bound"
                    f" {self._bound_s:g} s) at offset {buffer.handled.offset}, although"
                    f" the log goes on to {end} and a reader waits; {sight.standing}"
                )
        return None

    def _sight_of(
        self, partition: TopicPartition, buffer: PartitionBufferStatistics, now_s: float
    ) -> Sight | None:
        standing = self._standing_of(partition)
        if standing is None:
            return None
        has_waiters = self._fetch_buffer.has_waiters
        return Sight(
            progress_s=buffer.progress_s,
            standing=standing,
            is_taken=buffer.is_taken,
            is_buffered=buffer.buffered_count > 0,
            has_room=self._fetch_buffer.has_space,
            has_waiters=has_waiters,
            is_wanted=has_waiters or now_s - self._fetch_buffer.asked_s < self._bound_s,
        )

    def _look_at_handling(self) -> None:
        """Tell the log once of each message that is being handled for too long."""
        now_s = self._context.clock.monotonic_s()
        before, self._taken = self._taken, {}
        for partition, buffer in self._fetch_buffer.statistics().items():
            if not buffer.is_taken:
                continue
            state = (buffer.progress_s, buffer.handled.offset)
            seen = before.get(partition)
            if seen is None or seen.state != state:
                seen = _TakenBatch(state, now_s)
            elif not seen.is_told and now_s - seen.since_s >= self._bound_s:
                seen.is_told = True
                log.warning(
                    "message still being handled, its partition waits: group=%s"
                    " partition=%s offset=%d duration_s=%.0f",
                    self._group,
                    partition,
                    buffer.handled.offset,
                    now_s - seen.since_s,
                )
            self._taken[partition] = seen

    async def _end_of(
        self,
        partition: TopicPartition,
        handled: Offset,
        now_s: float,
        old: "_Suspicion | None",
    ) -> Offset | None:
        """Return the log end when there is data before it; None otherwise."""
        try:
            ends = await log_range(
                self._context, partition, deadline_s=now_s + self._bound_s / 4
            )
        except (WireError, RemoteProtocolError, ConnectionLostError):
            # It refuses this as well, or a malformed answer to a get has ended the
            # connection of both: its last answer still holds.
            return None if old is None else old.end
        except MetaqError:
            # A broker that is away is told by `health`, and comes back or not.
            return None
        end = Offset(0) if ends is None else ends[1]
        self._note_end(partition, handled, end)
        return end if handled < end else None

    def _note_end(
        self, partition: TopicPartition, handled: Offset, end: Offset
    ) -> None:
        """Tell of a place behind the log end: what is put now is passed over."""
        if handled <= end:
            self._beyond.pop(partition, None)
            return
        if partition not in self._beyond:
            log.error(
                "partition is read behind its log end, what comes before is passed"
                " over: group=%s partition=%s offset=%d log_end=%d",
                self._group,
                partition,
                handled,
                end,
            )
        self._beyond[partition] = (handled, end)

    def _is_still(self, partition: TopicPartition, state: tuple[float, Offset]) -> bool:
        """Return whether nothing has moved while the broker was asked."""
        buffer = self._fetch_buffer.statistics().get(partition)
        standing = self._standing_of(partition)
        if buffer is None or standing is None:
            return False
        return state == (buffer.progress_s, standing.reached)


def _tell_beyond(reached: Offset, end: Offset) -> str:
    return (
        f"it is read at offset {reached}, behind the log end {end}: the log was"
        " replaced, or cut by a broker that lost data; what comes before that offset is"
        " not read"
    )


@dataclass(frozen=True, slots=True)
class _Suspicion:
    state: tuple[float, Offset]
    """Time of the last progress, and how far reading had come."""
    since_s: float
    """Monotonic time at which data was first seen in this state."""
    end: Offset
    """The log end, as the broker said last."""


@dataclass(slots=True)
class _TakenBatch:
    state: tuple[float, Offset]
    """Time of the last progress, and the offset of the message being handled."""
    since_s: float
    """Monotonic time at which this state was first seen."""
    is_told: bool = False
    """The log has it."""
