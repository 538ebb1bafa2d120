"""Start, close and health of a consumer: the base of `AsyncConsumer`.

It connects the parts that choose its partitions (`assignments.py`), hold their state
(`subscription_state.py`), fetch (`fetcher.py`) and buffer messages (`fetch_buffer.py`).

Source: docs/metaq-1.4/client.md 10 to 13.
"""

import asyncio
import logging
from collections.abc import Collection, Coroutine, Mapping
from typing import Any, Self

from metaq.client.cluster.catalog import away_of_group
from metaq.client.cluster.context import ClientContext
from metaq.client.cluster.presence import refuse_exchanges
from metaq.client.consume.current_batch import CurrentBatch, current_task
from metaq.client.consume.fetch_handler import Marks
from metaq.client.consume.handling import Handling, total_of_runs
from metaq.client.consume.progress import (
    UNKNOWN_LAG,
    ConsumerState,
    ConsumerStatistics,
    Health,
    Lag,
    Unserved,
    Watchdog,
    lags_of,
    waiting_for,
)
from metaq.client.consume.subscription_state import SubscriptionState
from metaq.client.errors import ExchangeError
from metaq.client.group.assignments import PartitionSource
from metaq.client.group.hooks import Hooks, refuse_inside
from metaq.client.group.subscribed_topics import SubscribedTopics
from metaq.client.offsets.commit_orders import CommitOrders
from metaq.client.offsets.committer import Commit, CommitOrder
from metaq.client.offsets.offset_store import OffsetStore
from metaq.client.options import ConsumerOptions, load_filter
from metaq.client.own_process import OfOneProcess
from metaq.client.timeouts import require_loop, spawn, within
from metaq.cluster_snapshot import ClusterSnapshot
from metaq.errors import ClosedError, CoordinationError, MetaqError, RequestTimeoutError
from metaq.model import TopicPartition
from metaq.retry import wait_set
from metaq.stats import Totals

_log = logging.getLogger(__name__)


class ConsumerLife(OfOneProcess):
    """A consumer without its messages and offsets. Everything is called on its loop."""

    def __init__(
        self,
        context: ClientContext,
        *,
        group: str,
        topics: SubscribedTopics,
        source: PartitionSource,
        store: OffsetStore,
        options: ConsumerOptions,
        marks: Marks,
    ) -> None:
        """Create a consumer that reads nothing yet; use `AsyncClient.consumer`.

        Args:
            context: the client's parts.
            group: consumer group; part of commits and gets.
            topics: the subscribed topics; owned by the consumer.
            source: source of its partitions; owned by the consumer.
            store: offset store; owned by the consumer.
            options: options chosen by the user.
            marks: shared by the consumers of one client.
        """
        self.group = group
        self._topics = topics
        self.options = options
        self._context = context
        self._source = source
        self._store = store
        self._loop = asyncio.get_running_loop()
        self.hooks = Hooks(self, options, on_ready=self._hand_out, on_failed=self._fail)
        self._subscription = SubscriptionState(
            context,
            store,
            fence=lambda: source.fence,
            restart=source.restart,
            group=group,
            options=options,
            marks=marks,
            hooks=self.hooks,
            on_fatal=self._fail,
        )
        self.clock = context.clock
        self.fetch_buffer = self._subscription.fetch_buffer
        self.current_batch = CurrentBatch(self.fetch_buffer)
        self.commit_orders = CommitOrders(self._begin_commit)
        self._tasks: list[asyncio.Task[None]] = []
        topics.start()
        self._unserved = Unserved(topics, reads_all=source.fence is not None)
        self._unlisten = context.metadata.add_listener(self._on_snapshot)
        self._state = ConsumerState.NEW
        self._ended = asyncio.Event()
        self._handling: Handling | None = None
        self._concurrency = 0
        self._watchdog: Watchdog | None = None
        self._runs = Totals(Handling.statistics, total_of_runs)
        self.last_lags: Mapping[TopicPartition, Lag] = {}

    @property
    def topics(self) -> Collection[str]:
        """Names of the subscribed topics, including those that match a pattern now."""
        return self._topics.names

    # -- life -------------------------------------------------------------------------

    async def start(self, timeout: float | None = None) -> None:
        """Join the group and begin to fetch; `async with` calls it.

        Args:
            timeout: seconds in all; None: each request has `request_timeout_s`, and it
                waits up to `session_timeout_s` for the member name of a process that
                died.

        Raises:
            ClosedError: it was started before, or closed during the call.
            CoordinationError: ZooKeeper cannot be reached in time; it is closed.
            RequestTimeoutError: the time is over; it is closed, and leaves its group
                as soon as ZooKeeper answers.
            FilterError: `where` cannot be parsed.
            ExchangeError: one of the topics is an exchange.
            MetaqError: it could not join, or not read its offsets; it is closed.

        Cancellation: it is closed.
        """
        self._require_loop()
        await load_filter(self.options.where)
        if self._state is not ConsumerState.NEW:
            raise ClosedError("a consumer is started only once; create another one")
        deadline_s = None if timeout is None else self._context.deadline_s(timeout)
        self._state = ConsumerState.JOINING
        try:
            await within(timeout, self._start_source(), f"{self}: start")
        except BaseException as error:
            self._stop_listening()
            self._state = ConsumerState.CLOSED
            self._subscription.fence(self.assignment())
            await self._end(deadline_s)
            if isinstance(error, RequestTimeoutError) and timeout is not None:
                try:
                    self._context.metadata.require_reachable(timeout)
                except CoordinationError as away:
                    raise away from None
            raise
        self._state = ConsumerState.RUNNING
        if self.options.commit_interval_s is not None:
            committing = self._subscription.run_commits(self.options.commit_interval_s)
            self._spawn(committing, "commit")
        if self.options.watchdog_s is not None:
            self._watchdog = Watchdog(
                self._context,
                self.fetch_buffer,
                group=self.group,
                bound_s=max(self.options.watchdog_s, 2 * self.options.idle_max_s),
                status_of=self._subscription.status_of,
                on_stuck=self._fail,
            )
            self._spawn(self._watchdog.run(), "watchdog")

    async def _start_source(self) -> None:
        await self._source.start(self._subscription)
        # A topic that is watched already causes no snapshot event.
        snapshot = self._context.metadata.snapshot
        try:
            refuse_exchanges(snapshot, self.topics)
            if self.is_closed:
                raise ClosedError(f"{self} is closed")
        except MetaqError:
            # Leave the group: it would own partitions without reading them.
            await self._source.stop()
            raise
        self._unserved.update(snapshot, self.group, self.assignment())

    def _stop_listening(self) -> None:
        self._unlisten()
        self._topics.stop()

    def _on_snapshot(self, snapshot: ClusterSnapshot) -> None:
        self._unserved.update(snapshot, self.group, self.assignment())
        self._subscription.on_cluster()
        try:
            refuse_exchanges(snapshot, self.topics)
        except ExchangeError as error:
            if self.fetch_buffer.error is None:
                self._fail(error)

    def _hand_out(self, partitions: Collection[TopicPartition]) -> None:
        for partition in partitions:
            self.fetch_buffer.unhold(partition)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._tasks.append(spawn(work, f"{name} of {self.group}", self._fail))

    def _fail(self, error: MetaqError) -> None:
        """Stop fetching; the iterator raises the error after the fetched messages."""
        _log.error("consumer of group %s stops: %s", self.group, error)
        self._subscription.stop_fetching()
        self.fetch_buffer.fail(error)

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, or could not be started."""
        return self._state is ConsumerState.CLOSED

    @property
    def has_ended(self) -> bool:
        """Whether it is closed and its counters are final."""
        return self._ended.is_set()

    def require_started(self) -> None:
        """Raise ClosedError if it was not started."""
        if self._state is ConsumerState.NEW:
            raise ClosedError(
                "the consumer is not started: use it as 'with', or call start()"
            )

    async def close(self, timeout: float | None = None) -> None:
        """Revoke the partitions, commit handled messages, and leave the group.

        The message being handled counts as handled only if `commit` was called or the
        next one requested. A loop in another task or thread has `revoke_timeout_s` to
        do that. With `commit_interval_s=None` nothing is committed, but it waits for a
        running `commit`. A second call waits for the first.

        Args:
            timeout: seconds in all, at most half of them for the message being handled.
                Then it stops waiting: uncommitted messages are delivered again, and it
                leaves the group as soon as ZooKeeper answers, at the latest at the end
                of the session. None: the last commit and leaving the group have
                `request_timeout_s` each, the store `close_timeout_s`.

        Raises:
            ClosedError: it belongs to another event loop; it is not closed.
            ClientError: a hook raised during the call; it is closed. Or called in a
                hook, for which it would wait; it is not closed.

        Cancellation: it revokes the partitions at once and leaves the group;
        uncommitted messages are delivered again.
        """
        self._require_loop()
        refuse_inside(self.hooks, "close")
        deadline_s = None if timeout is None else self._context.deadline_s(timeout)
        if self.is_closed:
            await wait_set(self._ended, timeout)
            return
        self._subscription.end_s = deadline_s
        before = self.hooks.error
        is_new = self._state is ConsumerState.NEW
        self._state = ConsumerState.CLOSED
        self._stop_listening()
        if self.current_batch.is_free_for(current_task()):
            self.current_batch.drop()
        for task in self._tasks:
            task.cancel()
        try:
            if not is_new:
                await self._source.stop(deadline_s=deadline_s)
        finally:
            await self._end(deadline_s)
        if self.hooks.error is not None and self.hooks.error is not before:
            raise self.hooks.error

    async def _end(self, deadline_s: float | None) -> None:
        """Fail the waiters for messages, and end tasks, hooks and the store."""
        self.fetch_buffer.fail(ClosedError(f"{self} is closed"))
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            left_s = self.options.revoke_timeout_s
            if deadline_s is not None:
                left_s = min(left_s, deadline_s - self._context.clock.monotonic_s())
            await self.hooks.close(max(0.0, left_s))
            await self._subscription.close(deadline_s)
        finally:
            self._ended.set()

    async def _begin_commit(
        self, order: CommitOrder, timeout: float | None = None
    ) -> Commit:
        return await self._subscription.commit(order, self._context.deadline_s(timeout))

    def limit_s(self, timeout: float | None) -> float:
        """Return the time limit of a call, in seconds; None: `request_timeout_s`."""
        return self._context.limit_s(timeout)

    def _require_loop(self) -> None:
        require_loop(self._loop, self)

    def __str__(self) -> str:
        return f"consumer of group '{self.group}'"

    def __repr__(self) -> str:
        health = self.health()
        return (
            f"<{type(self).__name__} of group '{self.group}', topics"
            f" {self._topics}, {self._context.place}: {health.state.value},"
            f" {health.partition_count} partitions>"
        )

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, *_error: object
    ) -> None:
        if kind is None and self.current_batch.is_free_for(current_task()):
            self.current_batch.count()
        await self.close()

    # -- state ------------------------------------------------------------------------

    def assignment(self) -> frozenset[TopicPartition]:
        """Return the partitions assigned to this consumer, which it reads."""
        return self._subscription.partitions

    async def lag(self, timeout: float | None = None) -> dict[TopicPartition, Lag]:
        """Return how far the handled messages are from the end of each partition's log.

        Args:
            timeout: seconds; None takes the client's `request_timeout_s`.

        Returns:
            The lag of each assigned partition, and `UNKNOWN_LAG` for each one that is
            read beyond its log end, or is away: recorded by a broker, or with a
            committed offset of the group, but not served.

        Raises:
            MetaqError: a broker, or ZooKeeper, cannot be asked.
        """
        self._require_loop()
        context, deadline_s = self._context, self._context.deadline_s(timeout)
        away: set[TopicPartition] = set()
        if self._source.fence is not None:
            away = await away_of_group(
                context, self.group, self.topics, deadline_s=deadline_s
            )
        handled = {
            p: o for p, o in self.fetch_buffer.handled().items() if p not in away
        }
        lags = await lags_of(context, handled, deadline_s=deadline_s)
        lags |= dict.fromkeys(sorted(away), UNKNOWN_LAG)
        self.last_lags = lags
        return lags

    def health(self) -> Health:
        """Return the consumer's condition; cheap, and without a request."""
        fetch_buffer, state = self.fetch_buffer, self._state
        problems = self._subscription.problems() + self._unserved.problems()
        problems += self._topics.problems()
        if (
            state is ConsumerState.RUNNING
            and not self._context.metadata.snapshot.version
        ):
            problems.append("no broker has answered yet")
        if self._source.last_error is not None:
            problems.append(f"assignment: {self._source.last_error}")
        problems += self._source.problems()
        if self._watchdog is not None:
            problems += self._watchdog.problems()
        if self._handling is not None:
            problems += self._handling.problems()
        if state is ConsumerState.RUNNING:
            if fetch_buffer.error is not None:
                state = ConsumerState.FAILED
                problems.append(str(fetch_buffer.error))
            elif self._source.unsettled_since_s is not None:
                state = ConsumerState.JOINING
        now_s = self._context.clock.monotonic_s()
        buffers = fetch_buffer.statistics()
        last_s = max((one.progress_s for one in buffers.values()), default=now_s)
        return Health(
            state=state,
            is_ok=state is ConsumerState.RUNNING and not problems,
            partition_count=len(buffers),
            idle_s=now_s - last_s,
            uncommitted_count=self._subscription.uncommitted_count,
            problems=tuple(dict.fromkeys(problems)),
            waiting_for=waiting_for(
                fetch_buffer,
                concurrency=None if self._handling is None else self._concurrency,
                held_back=self._subscription.held_back() + self.hooks.waiting_for(),
            ),
        )

    def statistics(self) -> ConsumerStatistics:
        """Return a snapshot of the counters."""
        return self._subscription.statistics(
            handling=self._runs.total(), rebalance_count=self._source.rebalance_count
        )
