"""Blocking requests of a driver to brokers and ZooKeeper, over one client.

Spark does not notify a source of the end of its query, so nothing here relies on being
closed: a client unused for `IDLE_S` closes its connections, and the next call makes a
new one. Its thread stays; it is a daemon and costs nothing while idle.

Tasks get their brokers' addresses from the driver. They use this only to look up topics
or new leaders, or to check that their driver is the current one.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, TypeAlias, TypeVar

from metaq.client.cluster.catalog import (
    NEW_TOPIC_S,
    find_partitions,
    find_topics,
    read_cluster,
    read_takers,
    wait_for_readers,
)
from metaq.client.cluster.context import ClientContext
from metaq.client.cluster.log_ends import LogEnds
from metaq.client.cluster.metadata_queries import LogQueries
from metaq.client.cluster.presence import (
    describe_absent,
    describe_away,
    find_away,
    missing_topics,
    put_addresses,
    refuse_exchanges,
    unknown_pattern,
    unknown_topic,
)
from metaq.client.errors import PartitionsAwayError
from metaq.client.fan_out import all_of
from metaq.client.names import name_some
from metaq.client.offsets.query_progress import (
    change_routes,
    forget_routes,
    read_committed,
    read_decision,
)
from metaq.client.session import AsyncClient, context_of
from metaq.cluster_snapshot import ClusterSnapshot
from metaq.errors import NoBrokerError
from metaq.loop_thread import LoopThread
from metaq.model import BrokerId, Offset, TopicPartition
from metaq.spark.options import Edge, SourceOptions, WireOptions
from metaq.spark.plan import LogSpan
from metaq.spark.routing import Route, WriteRoutes

IDLE_S: Final = 60.0
"""Seconds after which an unused client is closed."""
METADATA_S: Final = 10.0
"""Seconds between metadata requests to brokers named by address: the delay until a new
topic is found there."""
TOPICS_S: Final = 5.0
"""Seconds between looks for new topics that match a pattern."""

_log = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")


ClusterWork: TypeAlias = Callable[[ClientContext, float], Coroutine[Any, Any, T]]
"""Coroutine function that runs on the client's loop, with a monotonic deadline."""


def _blocking(
    method: Callable[
        Concatenate["Cluster", ClientContext, float, P], Coroutine[Any, Any, T]
    ],
) -> Callable[Concatenate["Cluster", P], T]:
    """Turn a method that runs on the client's loop into a blocking one."""

    @wraps(method)
    def call(self: "Cluster", /, *args: P.args, **more: P.kwargs) -> T:
        return self.run(
            lambda context, deadline_s: method(self, context, deadline_s, *args, **more)
        )

    return call


async def _newer(
    context: ClientContext, snapshot: ClusterSnapshot, deadline_s: float
) -> ClusterSnapshot:
    """Wait for a later snapshot; NoBrokerError if there is none in time."""
    return await context.metadata.wait_newer(snapshot.version, deadline_s=deadline_s)


def _log_spans(
    found: Iterable[tuple[TopicPartition, tuple[Offset, Offset] | None]],
) -> dict[TopicPartition, LogSpan | None]:
    return {p: None if span is None else LogSpan(*span) for p, span in found}


class _Matching(NamedTuple):
    """Topics that match a pattern, cached until the next look."""

    pattern: str
    names: tuple[str, ...]
    until_s: float


class Cluster:
    """The cluster to which options connect. One per process and options: `clusters.py`.

    Every call may raise NoBrokerError, RequestTimeoutError, WireError and
    CoordinationError if the cluster is not available for `retry_timeout_s`.
    """

    def __init__(self, wire: WireOptions, *, idle_s: float = IDLE_S) -> None:
        """Prepare; nothing is connected yet."""
        self._wire = wire
        self._idle_s = idle_s
        self._thread = LoopThread("metaq-spark")
        self._client: AsyncClient | None = None
        self._ends: LogEnds | None = None
        self._used_s = 0.0
        self._busy_count = 0
        self._opening = asyncio.Lock()
        self._closing: asyncio.Task[None] | None = None
        self._topics: _Matching | None = None

    @property
    def is_usable(self) -> bool:
        """Whether calls can work; False in a forked child."""
        return self._thread.is_usable

    @property
    def is_open(self) -> bool:
        """Whether there is a client now; if not, the next call creates one."""
        return self._client is not None

    def close(self) -> None:
        """Close the client and end its thread, for tests; no calls afterwards.

        Idempotent; harmless in a forked child.
        """
        self._thread.run_close(self._close())
        self._thread.stop()

    def run(self, work: ClusterWork[T]) -> T:
        """Run a coroutine with the client; wait for its result."""
        return self._thread.run(self._run(work))

    def ask(self, question: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        """Run a coroutine function of the client with its context and a deadline."""
        return self.run(
            lambda context, deadline_s: question(context, *args, deadline_s=deadline_s)
        )

    # -- topics and logs --------------------------------------------------------------

    @_blocking
    async def partitions(
        self, context: ClientContext, deadline_s: float, options: SourceOptions
    ) -> tuple[TopicPartition, ...]:
        """Return the partitions chosen by a query, sorted; may be empty."""
        if options.assigned:
            return tuple(sorted(options.assigned))
        topics = options.topics
        if options.topic_pattern is not None:
            topics = await self._matching(context, options.topic_pattern, deadline_s)
        return await find_partitions(context, topics, deadline_s=deadline_s)

    @_blocking
    async def require_whole(
        self,
        context: ClientContext,
        deadline_s: float,
        options: SourceOptions,
        known: Iterable[TopicPartition] = (),
    ) -> tuple[TopicPartition, ...]:
        """Wait until all known partitions chosen by a query are served.

        The known partitions are those recorded by brokers; for topics without a record,
        those that the query has read before (`known`) or its group has offsets of.
        Without `failOnDataLoss` this does not wait, but warns of partitions away.

        Returns:
            The partitions that are away.

        Raises:
            NoBrokerError: no broker has a topic, or no topic matches the pattern.
            PartitionsAwayError: a broker stays away.
        """
        topics = await self._existing(context, options, deadline_s)
        before = {p for p in known if options.chooses(p)}
        group = options.progress_group
        if options.starting.edge is Edge.GROUP:
            group = options.start_group
        if group is not None:
            found = await read_committed(context, group, topics, deadline_s=deadline_s)
            before.update(filter(options.chooses, found))
        snapshot = await read_cluster(context, topics, deadline_s=deadline_s)
        while True:
            # A returning broker registers for puts before it does for gets.
            snapshot = await wait_for_readers(
                context, snapshot, topics, deadline_s=deadline_s
            )
            what = describe_away(snapshot, topics, options.chooses, before)
            away = find_away(snapshot, topics, options.chooses, before)
            if what and not options.fail_on_data_loss:
                _log.warning("some data is not read: %s", what)
            if not what or not options.fail_on_data_loss:
                return away
            try:
                snapshot = await _newer(context, snapshot, deadline_s)
            except NoBrokerError as error:
                raise PartitionsAwayError(
                    f"{what}; failOnDataLoss=false reads without that", partitions=away
                ) from error

    async def _existing(
        self, context: ClientContext, options: SourceOptions, deadline_s: float
    ) -> tuple[str, ...]:
        """Return the topics chosen by a query; refuse any that no broker has."""
        pattern = options.topic_pattern
        now_s = context.clock.monotonic_s()
        # Leaves time to read the names for the error.
        soon_s = now_s + min(NEW_TOPIC_S, (deadline_s - now_s) / 2)
        is_last_look = False
        while True:
            topics = options.topics or tuple({p.topic for p in options.assigned})
            if pattern is not None:
                topics = await self._matching(context, pattern, deadline_s)
            snapshot = await read_cluster(context, topics, deadline_s=deadline_s)
            refuse_exchanges(snapshot, topics)
            missing = missing_topics(snapshot, topics)
            is_lacking = missing == topics if pattern else bool(missing)
            if not is_lacking or options.assigned or options.waits_for_topics:
                return topics
            if is_last_look:
                names = await context.metadata.topics(deadline_s=deadline_s)
                there = names.difference(missing)
                if pattern:
                    raise unknown_pattern(pattern, there)
                raise unknown_topic(missing[0], there)
            # The topic may have been created a moment ago.
            try:
                await _newer(context, snapshot, soon_s)
            except NoBrokerError:
                is_last_look = True
            self._topics = None

    async def _matching(
        self, context: ClientContext, pattern: str, deadline_s: float
    ) -> tuple[str, ...]:
        now_s, known = context.clock.monotonic_s(), self._topics
        if known is None or known.pattern != pattern or known.until_s <= now_s:
            names = await find_topics(context, pattern, deadline_s=deadline_s)
            known = self._topics = _Matching(pattern, names, now_s + TOPICS_S)
        return known.names

    @_blocking
    async def addresses(
        self,
        context: ClientContext,
        deadline_s: float,
        partitions: Collection[TopicPartition],
    ) -> dict[TopicPartition, str]:
        """Return partition → address to read it from, as `meta://host:port`.

        Lacks partitions whose broker stays away for `retry_timeout_s`.
        """
        with suppress(NoBrokerError):
            while any(context.address_of(p.broker_id) is None for p in partitions):
                await _newer(context, context.metadata.snapshot, deadline_s)
        found = {p: context.address_of(p.broker_id) for p in partitions}
        return {p: str(at) for p, at in found.items() if at is not None}

    def find_leaders(
        self, brokers: Collection[BrokerId]
    ) -> Future[Mapping[BrokerId, str]]:
        """Look up the addresses of brokers, `meta://host:port`, without blocking.

        Returns:
            A future of broker → address, without brokers that are away. It fails with
            the errors of other calls.
        """

        async def look(
            context: ClientContext, _deadline_s: float
        ) -> Mapping[BrokerId, str]:
            found = {broker: context.address_of(broker) for broker in brokers}
            return {broker: str(at) for broker, at in found.items() if at is not None}

        return self._thread.begin(self._run(look))

    @_blocking
    async def targets(
        self,
        context: ClientContext,
        deadline_s: float,
        topics: Iterable[str],
        *,
        is_whole: bool = False,
    ) -> dict[str, dict[TopicPartition, str]]:
        """Return topic → partitions that take puts → their addresses.

        Without ZooKeeper the routes of a batch depend on the brokers named: `is_whole`
        waits until all of them are available.

        Raises:
            NoBrokerError: no broker takes puts to a topic; or, with `is_whole`, one of
                the named brokers is away.
        """
        wanted = sorted(set(topics))
        snapshot = await read_takers(context, wanted, deadline_s=deadline_s)
        while is_whole and (away := describe_absent(snapshot, wanted)):
            try:
                snapshot = await _newer(context, snapshot, deadline_s)
            except NoBrokerError as error:
                raise NoBrokerError(
                    f"{away}: without ZooKeeper a batch needs all brokers that the"
                    " option names, because it would go to other partitions when it is"
                    " run again; start the broker, or set zookeeper"
                ) from error
        return {topic: put_addresses(snapshot, [topic]) for topic in wanted}

    @_blocking
    async def begin_batch(
        self,
        context: ClientContext,
        deadline_s: float,
        write: str,
        topics: Iterable[str],
        *,
        fail_on_lost_route: bool,
    ) -> tuple[WriteRoutes, dict[TopicPartition, str]]:
        """Store the routes of a write's next batch; keep those stored before.

        Waits for partitions among them that take no puts, or, without
        `fail_on_lost_route`, replaces them with a warning.

        Returns:
            The stored routes, and the addresses that take puts to them now.

        Raises:
            NoBrokerError: no broker takes puts to a topic.
            SparkError: the stored routes cannot be parsed.
        """
        wanted = sorted(set(topics))
        snapshot = await read_takers(context, wanted, deadline_s=deadline_s)

        async def keep(
            change: Callable[[WriteRoutes, Route], WriteRoutes],
        ) -> WriteRoutes:
            there = {topic: snapshot.put_partitions(topic) for topic in wanted}
            text = await change_routes(
                context,
                write,
                lambda kept: change(WriteRoutes.from_json(kept), there).to_json(),
                deadline_s=deadline_s,
            )
            return WriteRoutes.from_json(text)

        routes = await keep(WriteRoutes.begun)
        known = routes.last.keys() | routes.next.keys()
        snapshot = await read_cluster(context, known, deadline_s=deadline_s)
        begun = {partition for topic in wanted for partition in routes.next[topic]}
        if fail_on_lost_route:
            with suppress(NoBrokerError):
                while begun - put_addresses(snapshot, wanted).keys():
                    snapshot = await _newer(context, snapshot, deadline_s)
            return routes, put_addresses(snapshot, known)
        before = {p for topic in wanted for p in routes.last.get(topic, ())}
        if lost := (begun | before) - put_addresses(snapshot, wanted).keys():
            _log.warning(
                "rows go to other partitions, some are away: %s", name_some(lost)
            )
            routes = await keep(WriteRoutes.moved)
        return routes, put_addresses(snapshot, known)

    def end_batch(self, write: str, batch: int, query: str) -> None:
        """Record that all rows of a batch of a query are written."""

        def written(kept: str | None) -> str:
            return WriteRoutes.from_json(kept).written(batch, query).to_json()

        self.ask(change_routes, write, written)

    def forget_routes(self, write: str) -> None:
        """Delete the routes of a write; idempotent."""
        self.ask(forget_routes, write)

    def read_decision(self, query: str) -> bytes | None:
        """Return the stored decision of a query; None if there is none."""
        return self.ask(read_decision, query)

    @_blocking
    async def spans(
        self,
        context: ClientContext,
        deadline_s: float,
        partitions: Collection[TopicPartition],
        *,
        is_confirmed: bool = False,
    ) -> dict[TopicPartition, LogSpan | None]:
        """Return the current spans of logs; None if the broker has no log yet.

        With `is_confirmed`, used before bytes are declared lost, only the registered
        leader of a replica set is asked, and waited for if there is none.
        """
        logs = [LogQueries(context, p, deadline_s) for p in partitions]
        found = await all_of(
            log.confirmed_ends() if is_confirmed else log.ends() for log in logs
        )
        return _log_spans(zip(partitions, found, strict=True))

    @_blocking
    async def unopened(
        self,
        context: ClientContext,
        deadline_s: float,
        partitions: Collection[TopicPartition],
    ) -> frozenset[TopicPartition]:
        """Return partitions whose broker may have a log that it has not opened."""
        asked = [LogQueries(context, p, deadline_s) for p in partitions]
        found = await all_of(log.may_be_unopened() for log in asked)
        return frozenset(p for p, may in zip(partitions, found, strict=True) if may)

    @_blocking
    async def watched_spans(
        self,
        context: ClientContext,
        deadline_s: float,
        partitions: Iterable[TopicPartition],
    ) -> dict[TopicPartition, LogSpan | None]:
        """As `spans`, but at no cost for logs that do not grow.

        Lacks partitions of brokers that are away. Log starts may be outdated.
        """
        there = [p for p in partitions if context.address_of(p.broker_id)]
        found = await self._log_ends(context).read(there, deadline_s=deadline_s)
        return _log_spans(found.items())

    @_blocking
    async def wait_for_growth(
        self, context: ClientContext, _deadline_s: float, wait_s: float
    ) -> None:
        """Wait until a watched log has grown, or for `wait_s` seconds."""
        await self._log_ends(context).wait(wait_s=wait_s)

    async def _run(self, work: ClusterWork[T]) -> T:
        context = context_of(await self._opened())
        deadline_s = context.clock.monotonic_s() + self._wire.retry_timeout_s
        self._busy_count += 1
        try:
            # Without a first snapshot, every broker would seem to be away.
            await read_cluster(context, (), deadline_s=deadline_s)
            return await work(context, deadline_s)
        finally:
            self._busy_count -= 1
            self._used_s = asyncio.get_running_loop().time()

    async def _opened(self) -> AsyncClient:
        """Return the client; the first call creates it, others wait for it."""
        wire = self._wire
        async with self._opening:
            if self._client is None:
                client = AsyncClient(
                    wire.zookeeper,
                    brokers=None if wire.zookeeper else wire.brokers,
                    root=wire.zk_root,
                    request_timeout_s=wire.request_timeout_s,
                    metadata_s=METADATA_S,
                )
                # A client that fails to start closes itself; the next call tries again.
                await client.start()
                self._client = client
                asyncio.get_running_loop().call_later(self._idle_s, self._look_if_idle)
            return self._client

    def _look_if_idle(self) -> None:
        loop = asyncio.get_running_loop()
        idle_s = loop.time() - self._used_s
        if self._busy_count or idle_s < self._idle_s:
            loop.call_later(self._idle_s, self._look_if_idle)
            return
        # Removed at once, so that a call before the task runs creates a new client.
        client = self._take_client()
        if client is not None:
            self._closing = loop.create_task(client.close(), name="close idle client")

    async def _close(self) -> None:
        client = self._take_client()
        if client is not None:
            await client.close()
        if self._closing is not None:
            await self._closing

    def _take_client(self) -> AsyncClient | None:
        client, self._client = self._client, None
        if self._ends is not None:
            self._ends.close()
            self._ends = None
        return client

    def _log_ends(self, context: ClientContext) -> LogEnds:
        if self._ends is None:
            patience_s = self._wire.retry_timeout_s
            self._ends = LogEnds(context, patience_s=patience_s)
        return self._ends
