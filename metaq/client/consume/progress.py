"""Health and lag of a consumer, and a watchdog for partitions without progress.

A stuck consumer looks like one that has nothing to read. The watchdog tells them apart
by a separate request for the log end of every partition without recent progress. If
there is data and a worker wants it, but there is no progress for the whole bound, the
consumer fails with an error, which is logged. A refused get is no progress. A message
that is being handled for the whole bound is only logged, because handlers may be slow.
"""

import asyncio
import contextlib
import enum
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import Final, TypeAlias

from metaq.client.cluster.context import ClientContext
from metaq.client.cluster.metadata_queries import LogQueries
from metaq.client.cluster.presence import name_away
from metaq.client.consume.duplicate_filter import DuplicateStatistics
from metaq.client.consume.fetch_buffer import FetchBuffer, PartitionBufferStatistics
from metaq.client.consume.fetcher import FetchStatistics
from metaq.client.consume.handling import HandlingStatistics
from metaq.client.errors import BehindLogEndError, CannotAnswerError, StuckError
from metaq.client.fan_out import all_for
from metaq.client.names import name_some
from metaq.client.offsets.offset_store import Offsets
from metaq.cluster_snapshot import ClusterSnapshot
from metaq.errors import (
    ConnectionLostError,
    CorruptRecordError,
    ForbiddenError,
    MetaqError,
    RemoteProtocolError,
    WireError,
)
from metaq.model import Offset, TopicPartition
from metaq.stats import counter, gauge, part

_log = logging.getLogger(__name__)


class ConsumerState(enum.Enum):
    """State of a consumer."""

    NEW = "new"
    JOINING = "joining"
    """It does not have all of its partitions yet."""
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
    """Running without problems: for example, every topic is served, gets succeed, and
    commits work."""
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
    waiting_for: str | None = None
    """Reasons why it does not fetch more: limits reached, with their numbers; handlers
    that are all busy; paused partitions; a broker that does not answer; an
    `on_assigned` that has not returned. None: there is none. This is a state, not a
    problem."""


@dataclass(frozen=True, slots=True)
class Lag:
    """Distance of a consumer from the end of one partition's log."""

    messages: int | None = gauge(
        "metaq_consumer_lag_messages",
        "Messages that were not handled when `lag()` was asked last.",
        default=None,
        combine=max,
    )
    """None if the broker cannot count, the log is damaged, or `bytes` is None."""
    bytes: int | None = gauge(
        "metaq_consumer_lag_bytes",
        "Bytes of the log that were not handled when `lag()` was asked last.",
        default=None,
        combine=max,
    )
    """None if the partition is away, or the offset is beyond the log end."""
    seconds: float | None = gauge(
        "metaq_consumer_lag_seconds",
        "Age of the oldest message not handled when `lag()` was asked last.",
        default=None,
        combine=max,
    )
    """0.0 if there is none; None if messages have no time, or cannot be read."""


UNKNOWN_LAG: Final = Lag()
"""Lag of a partition whose broker is away, or that is read beyond the log end."""


def waiting_for(
    fetch_buffer: FetchBuffer, *, concurrency: int | None, held_back: Sequence[str]
) -> str | None:
    """Return the reasons why a consumer does not fetch more; None: there is none.

    Args:
        fetch_buffer: buffer of the consumer.
        concurrency: number of handlers of the present `run`; None: there is none.
        held_back: reasons for waiting gets, one per broker, and an awaited hook.
    """
    bounds = fetch_buffer.reached_bounds()
    if bounds and concurrency is not None and not fetch_buffer.has_waiters:
        bounds.append(f"handlers (concurrency={concurrency})")
    paused = fetch_buffer.paused()
    if paused:
        bounds.append(f"partitions {name_some(paused)} paused")
    return "; ".join([*bounds, *held_back]) or None


class Unserved:
    """Topics and partitions of a consumer that no broker serves; each is logged once.

    The consumer continues, because the topic or the broker may appear. But without this
    report a wrong name would look like a topic without messages, and a broker that is
    away like one that never existed.
    """

    def __init__(self, topics: Collection[str], *, reads_all: bool) -> None:
        """Create it without a snapshot.

        Args:
            topics: names of the subscribed topics.
            reads_all: whether the consumer and its group read all partitions, so that
                any partition that is away is reported. If not, the partitions that it
                reads are reported if their brokers do not have them.
        """
        self._topics = topics
        self._reads_all = reads_all
        self._missing: frozenset[str] = frozenset()
        self._strange: frozenset[TopicPartition] = frozenset()
        """Partitions of the consumer that their brokers do not have."""
        self._away: tuple[TopicPartition, ...] = ()
        """Partitions of the topics that are away."""

    def update(
        self, snapshot: ClusterSnapshot, group: str, active: Iterable[TopicPartition]
    ) -> None:
        """Update from a snapshot; topics that it does not watch yet are not missing.

        Args:
            snapshot: snapshot of the cluster.
            group: consumer group, for the log.
            active: the partitions that the consumer reads.
        """
        known = snapshot.topics.intersection(self._topics)
        missing = frozenset(t for t in known if not snapshot.get_partitions(t))
        for topic in sorted(missing - self._missing):
            _log.warning("no broker serves the topic: group=%s topic=%s", group, topic)
        self._missing = missing
        away: tuple[TopicPartition, ...] = ()
        strange = frozenset[TopicPartition]()
        if self._reads_all:
            away = tuple(one for each in sorted(known) for one in snapshot.away(each))
        else:
            served = known - missing
            strange = frozenset(
                one
                for one in active
                if one.topic in served
                and one.broker_id in snapshot.brokers
                and not snapshot.is_served(one)
            )
        if not set(away) <= set(self._away):
            _log.warning("partitions are away: group=%s %s", group, name_away(away))
        for one in sorted(strange - self._strange):
            _log.warning("no broker serves the partition: group=%s %s", group, one)
        self._away, self._strange = away, strange

    def problems(self) -> list[str]:
        """Return a sentence for each topic or partition without a broker."""
        missing = [*sorted(self._missing), *sorted(self._strange)]
        found = [f"{each}: no broker serves it" for each in missing]
        return [*found, name_away(self._away)] if self._away else found


async def lag_of(
    context: ClientContext,
    partition: TopicPartition,
    handled: Offset,
    *,
    deadline_s: float,
) -> Lag:
    """Return the lag of a reader that has handled everything before `handled`.

    Raises:
        BehindLogEndError: `handled` is beyond the log end.
        MetaqError: the broker cannot be asked.
    """
    return (await lag_and_start(context, partition, handled, deadline_s=deadline_s))[0]


async def lag_and_start(
    context: ClientContext,
    partition: TopicPartition,
    handled: Offset,
    *,
    deadline_s: float,
) -> tuple[Lag, Offset]:
    """Return the lag of a reader, and the log start; raises as `lag_of`."""
    log = LogQueries(context, partition, deadline_s)
    ends = await log.ends()
    log_start, end = ends or (Offset(0), Offset(0))
    if handled > end:
        why = "the log was replaced, or cut by a broker that lost data"
        if ends is None and await log.may_be_unopened():
            why = "a MetaQ 1.4 broker may know it again with the next put to it"
        raise BehindLogEndError(
            f"{partition}: offset {handled} is beyond the log end {end}: {why}"
        )
    start = max(handled, log_start)
    if start == end:
        return Lag(messages=0, bytes=0, seconds=0.0), log_start
    messages: int | None
    try:
        messages = await log.count(start, end)
    except (CannotAnswerError, CorruptRecordError):
        # The number of messages in damaged bytes is unknown.
        messages = None
    age_s = stamped = None
    # If the partition is closed for gets, or damaged, return the lag in bytes only.
    with contextlib.suppress(WireError, CorruptRecordError):
        stamped = await log.time_of(start)
    if stamped is not None:
        age_s = max(0.0, (context.clock.wall_ms() - stamped) / 1000)
    return Lag(messages, end - start, age_s), log_start


@dataclass(frozen=True, slots=True)
class ConsumerStatistics:
    """A snapshot of a consumer's counters since its creation."""

    delivered_count: int = counter(
        "metaq_consumer_delivered_messages_total",
        "Messages fetched and let through by the filter.",
    )
    filtered_count: int = counter(
        "metaq_consumer_filtered_messages_total", "Messages that the filter held back."
    )
    expired_count: int = counter(
        "metaq_consumer_expired_messages_total",
        "Messages passed over because they had expired.",
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
    """Counters of the partitions that it reads now."""
    handling: HandlingStatistics | None = None
    """Sums over all runs, with the local retry store of the last one. None without a
    run."""


async def lags_of(
    context: ClientContext, handled: Offsets, *, deadline_s: float
) -> dict[TopicPartition, Lag]:
    """Return the lag of each partition, requested concurrently; raises as `lag_of`.

    `UNKNOWN_LAG` if the offset is beyond the log end.
    """

    async def ask(one: TopicPartition) -> Lag:
        try:
            offset = handled[one].offset
            return await lag_of(context, one, offset, deadline_s=deadline_s)
        except BehindLogEndError:
            return UNKNOWN_LAG

    return await all_for(ask, handled)


@dataclass(frozen=True, slots=True)
class ReadStatus:
    """Progress of reading one partition."""

    reached: Offset
    """Offset after the bytes read so far."""
    error: MetaqError | None
    """Error of the last get, or damage whose end is searched for; None: neither."""

    def __str__(self) -> str:
        if self.error is None:
            return "the last answer to a get was that nothing is there"
        return f"the last get failed: {self.error}"


def may_be_stuck(
    status: ReadStatus,
    *,
    is_taken: bool,
    is_buffered: bool,
    has_room: bool,
    has_waiters: bool,
    is_wanted: bool,
) -> bool:
    """Return whether a partition without progress should have some.

    With a buffered batch it should only if a worker is free. Without one, fetching
    should progress, even if the workers are busy with other partitions. A partition
    that an operator closed cannot be read; `health` reports it.

    Args:
        status: status of reading it.
        is_taken: whether a worker has messages of it, or it is delayed or held.
        is_buffered: whether messages of it wait for a worker.
        has_room: whether more may be fetched.
        has_waiters: whether a worker waits for messages now.
        is_wanted: whether a worker requested messages within the bound, or waits now.
    """
    if is_taken or isinstance(status.error, ForbiddenError):
        return False
    if is_buffered:
        return has_waiters
    return is_wanted and (has_room or has_waiters)


_State: TypeAlias = tuple[float, Offset]
"""Time of the last progress, and an offset that changes with progress."""


@dataclass(frozen=True, slots=True)
class _Suspicion:
    state: _State
    """Its offset is the one that reading has reached."""
    since_s: float
    """Monotonic time at which data was first seen in this state."""
    end: Offset
    """Log end."""


class Watchdog:
    """Finds partitions that make no progress although their logs have data.

    A partition is suspected from the moment at which its log is seen to have data. Any
    progress, or the absence of a worker that wants it, ends the suspicion. A failed get
    is no progress; but while a broker is away, its data is unknown. A suspicion as old
    as the bound is an error. So data that arrives after a long silence causes none.
    """

    def __init__(
        self,
        context: ClientContext,
        fetch_buffer: FetchBuffer,
        *,
        group: str,
        bound_s: float,
        status_of: Callable[[TopicPartition], ReadStatus | None],
        on_stuck: Callable[[MetaqError], None],
    ) -> None:
        """Create a watchdog; `run` watches.

        Args:
            context: the client's parts.
            fetch_buffer: the buffer to watch.
            group: consumer group, for the log.
            bound_s: seconds without progress after which a partition is stuck, and a
                message that is being handled is logged.
            status_of: returns the status of a partition; None if it is not read.
            on_stuck: called once, with the error.
        """
        self._context = context
        self._fetch_buffer = fetch_buffer
        self._group = group
        self._bound_s = bound_s
        self._status_of = status_of
        self._on_stuck = on_stuck
        self._suspects: dict[TopicPartition, _Suspicion] = {}
        self._taken: dict[TopicPartition, tuple[_State, float | None]] = {}
        """State of taken partitions, with their handled offset, and the time since
        which it has not changed; None once that is logged."""
        self._beyond: dict[TopicPartition, tuple[Offset, Offset]] = {}
        """Partition read beyond its log end → handled offset and log end."""

    def problems(self) -> list[str]:
        """Return a sentence for each partition that is read beyond its log end."""
        return [
            f"{partition}: it is read at offset {reached}, beyond the log end {end}:"
            " the log was replaced, or cut by a broker that lost data; messages before"
            " that offset are not read"
            for partition, (reached, end) in self._beyond.items()
        ]

    async def run(self) -> None:
        """Watch until cancelled, or until a partition is stuck.

        It checks four times per bound, so it finds a stuck partition after at most one
        and a half bounds.
        """
        while True:
            await asyncio.sleep(self._bound_s / 4)
            error = await self.look()
            if error is not None:
                self._on_stuck(error)
                return

    async def look(self) -> StuckError | None:
        """Check once; return the error of a stuck partition, else None."""
        now_s = self._context.clock.monotonic_s()
        buffers = self._fetch_buffer.statistics()
        self._check_handling(buffers, now_s)
        self._beyond = {
            partition: offsets
            for partition, offsets in self._beyond.items()
            if partition in buffers and buffers[partition].handled.offset == offsets[0]
        }
        has_waiters = self._fetch_buffer.has_waiters
        asked_s = self._fetch_buffer.asked_s
        for partition, buffer in buffers.items():
            old = self._suspects.pop(partition, None)
            status = self._status_of(partition)
            if status is None or now_s - buffer.progress_s < self._bound_s / 4:
                continue
            if buffer.is_paused:
                continue
            if not may_be_stuck(
                status,
                is_taken=buffer.is_taken,
                is_buffered=buffer.buffered_count > 0,
                has_room=self._fetch_buffer.has_space,
                has_waiters=has_waiters,
                is_wanted=has_waiters or now_s - asked_s < self._bound_s,
            ):
                continue
            end = await self._end_of(partition, buffer.handled.offset, now_s, old)
            if end is None:
                continue
            state = (buffer.progress_s, status.reached)
            since_s = old.since_s if old is not None and old.state == state else now_s
            self._suspects[partition] = _Suspicion(state, since_s, end)
            if now_s - since_s >= self._bound_s and self._is_still(partition, state):
                return StuckError(
                    f"{partition}: no progress for {now_s - since_s:.3g} s (bound"
                    f" {self._bound_s:g} s) at offset {buffer.handled.offset}, although"
                    f" the log goes on to {end} and a reader waits; {status}"
                )
        return None

    def _check_handling(
        self, buffers: Mapping[TopicPartition, PartitionBufferStatistics], now_s: float
    ) -> None:
        """Log each message that is being handled for too long, once."""
        before, self._taken = self._taken, {}
        for partition, buffer in buffers.items():
            if not buffer.is_taken or buffer.is_paused:
                continue
            state = (buffer.progress_s, buffer.handled.offset)
            old_state, since_s = before.get(partition, (None, None))
            if old_state != state:
                since_s = now_s
            if since_s is not None and now_s - since_s >= self._bound_s:
                _log.warning(
                    "message still being handled, its partition waits: group=%s"
                    " partition=%s offset=%d duration_s=%.0f",
                    self._group,
                    partition,
                    buffer.handled.offset,
                    now_s - since_s,
                )
                since_s = None
            self._taken[partition] = state, since_s

    async def _end_of(
        self,
        partition: TopicPartition,
        handled: Offset,
        now_s: float,
        old: _Suspicion | None,
    ) -> Offset | None:
        """Return the log end if there is unhandled data before it, else None."""
        try:
            until_s = now_s + self._bound_s / 4
            ends = await LogQueries(self._context, partition, until_s).ends()
        except (WireError, RemoteProtocolError, ConnectionLostError):
            # The broker refuses this request too, or closed the shared connection after
            # a malformed answer to a get: use its last answer.
            return None if old is None else old.end
        except MetaqError:
            # `health` reports a broker that is away; it may come back.
            return None
        end = Offset(0) if ends is None else ends[1]
        if handled <= end:
            self._beyond.pop(partition, None)
            return end if handled < end else None
        if partition not in self._beyond:
            _log.error(
                "partition is read beyond its log end, messages before that offset are"
                " skipped: group=%s partition=%s offset=%d log_end=%d",
                self._group,
                partition,
                handled,
                end,
            )
        self._beyond[partition] = (handled, end)
        return None

    def _is_still(self, partition: TopicPartition, state: _State) -> bool:
        """Return whether the state has not changed during the request."""
        buffer = self._fetch_buffer.statistics().get(partition)
        status = self._status_of(partition)
        if buffer is None or status is None:
            return False
        return state == (buffer.progress_s, status.reached)
