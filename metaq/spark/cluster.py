"""Requests of a driver to brokers and ZooKeeper, over one client, blocking.

Spark never tells a source that its query is over, so nothing here waits to be closed:
a client unused for `IDLE_S` closes its connections, and the next call makes
another one. Its thread stays; it is a daemon and costs nothing while it sleeps.

Tasks have no part in this, but for a look at topics or at a turn: they are told the
address of their broker.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from metaq.client.cluster.catalog import (
    NEW_TOPIC_S,
    find_partitions,
    find_topics,
    read_cluster,
    read_takers,
    require_partitions,
    wait_for_readers,
)
from metaq.client.cluster.context import ClientContext
from metaq.client.cluster.log_ends import LogEnds
from metaq.client.cluster.metadata_queries import log_range
from metaq.client.cluster.presence import (
    describe_absent,
    describe_away,
    find_away,
    missing_topics,
    put_addresses,
    unknown_pattern,
    unknown_topic,
)
from metaq.client.errors import PartitionsAwayError
from metaq.client.fan_out import all_of
from metaq.client.names import name_some
from metaq.client.offsets.query_progress import (
    change_routes,
    commit_progress,
    forget_routes,
    forget_start,
    keep_start,
    read_committed,
    read_decision,
    read_progress,
    read_start,
)
from metaq.client.session import AsyncClient
from metaq.errors import NoBrokerError
from metaq.loop_thread import LoopThread
from metaq.model import Offset, TopicPartition
from metaq.spark.options import Edge, SourceOptions, WireOptions
from metaq.spark.plan import LogSpan
from metaq.spark.routing import Route, WriteRoutes

IDLE_S: Final = 60.0
"""Seconds after which an unused client is closed."""
METADATA_S: Final = 10.0
"""Seconds between two questions to brokers that were named by address: how late a new
topic is found there."""
TOPICS_S: Final = 5.0
"""Seconds between two looks for new topics that match a pattern."""

_log = logging.getLogger(__name__)

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class ClusterWork(Protocol[T_co]):
    """A coroutine function over a client's parts, with an absolute deadline."""

    def __call__(
        self, context: ClientContext, deadline_s: float
    ) -> Coroutine[Any, Any, T_co]:
        """Return the coroutine to run on the client's loop."""
        ...


class _Matching(NamedTuple):
    """The topics that match a pattern, until the next look."""

    pattern: str
    names: tuple[str, ...]
    until_s: float


class Cluster:
    """The brokers that some options lead to. One per process: `clusters.py`.

    Every call may raise NoBrokerError, RequestTimeoutError, WireError and
    CoordinationError when the cluster cannot be asked for `retry_timeout_s`.
    """

    def __init__(self, wire: WireOptions, *, idle_s: float = IDLE_S) -> None:
        """Prepare to ask; nothing is connected yet.

        Args:
            wire: way to the brokers.
            idle_s: seconds after which an unused client is closed.
        """
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
        """False in the child of a fork."""
        return self._thread.is_usable

    @property
    def is_open(self) -> bool:
        """Whether there is a client now; the next call makes one if not."""
        return self._client is not None

    def close(self) -> None:
        """Close the client and end its thread, for tests; nothing can be asked then.

        Harmless twice, and in the child of a fork.
        """
        if self.is_usable:
            self._thread.run(self._close())
            self._thread.stop()

    def run(self, work: ClusterWork[T]) -> T:
        """Run a coroutine over the client and wait for its end."""
        return self._thread.run(self._run(work))

    # -- topics and logs
    # -----------------------------------------------------------------

    def partitions(self, options: SourceOptions) -> tuple[TopicPartition, ...]:
        """Return the partitions that a query chose, in order; none is no error."""
        if options.assigned:
            return tuple(sorted(options.assigned))

        async def find(
            context: ClientContext, deadline_s: float
        ) -> tuple[TopicPartition, ...]:
            topics = options.topics
            if options.topic_pattern is not None:
                topics = await self._matching(
                    context, options.topic_pattern, deadline_s
                )
            return await find_partitions(context, topics, deadline_s=deadline_s)

        return self.run(find)

    def require_known(self, partitions: Iterable[TopicPartition]) -> None:
        """Return when brokers have told of partitions that a user wrote down.

        One that a broker lacks that is there is refused at once; a broker that is away
        is waited for.

        Raises:
            NoBrokerError: no broker has one of them.
        """
        wanted = frozenset(partitions)

        async def wait(context: ClientContext, deadline_s: float) -> None:
            await require_partitions(context, wanted, deadline_s=deadline_s)

        if wanted:
            self.run(wait)

    def require_whole(
        self, options: SourceOptions, known: Iterable[TopicPartition] = ()
    ) -> None:
        """Return when all that a query chose is there, as far as anything knows of it.

        Brokers record their partitions; for topics without a record they are those that
        the query has read before, or its group has offsets of. Partitions away are
        waited for; without `failOnDataLoss` it is a warning at once.

        Args:
            options: options of the query.
            known: partitions that it has read before.

        Raises:
            NoBrokerError: no broker has a topic, or no topic matches the pattern.
            PartitionsAwayError: a broker stays away.
        """

        async def wait(context: ClientContext, deadline_s: float) -> None:
            topics = await self._existing(context, options, deadline_s)
            before = {p for p in known if options.chooses(p)}
            group = options.progress_group
            if options.starting.edge is Edge.GROUP:
                group = options.start_group
            if group is not None:
                found = await read_committed(
                    context, group, topics, deadline_s=deadline_s
                )
                before.update(filter(options.chooses, found))
            snapshot = await read_cluster(context, topics, deadline_s=deadline_s)
            while True:
                # One that was away tells producers first when it is back.
                snapshot = await wait_for_readers(
                    context, snapshot, topics, deadline_s=deadline_s
                )
                away = describe_away(snapshot, topics, options.chooses, before)
                if not away:
                    return
                if not options.fail_on_data_loss:
                    _log.warning("not everything is read: %s", away)
                    return
                try:
                    snapshot = await context.metadata.wait_newer(
                        snapshot.version, deadline_s=deadline_s
                    )
                except NoBrokerError as error:
                    raise PartitionsAwayError(
                        f"{away}; failOnDataLoss=false reads without that",
                        partitions=find_away(snapshot, topics, options.chooses, before),
                    ) from error

        self.run(wait)

    def away(
        self, options: SourceOptions, known: Iterable[TopicPartition]
    ) -> tuple[TopicPartition, ...]:
        """Return the partitions that `require_whole` would name now.

        Only those of `subscribe`; none for other ways to choose.
        """

        async def find(
            context: ClientContext, deadline_s: float
        ) -> tuple[TopicPartition, ...]:
            topics = options.topics
            snapshot = await read_cluster(context, topics, deadline_s=deadline_s)
            return find_away(snapshot, topics, options.chooses, tuple(known))

        return self.run(find)

    async def _existing(
        self, context: ClientContext, options: SourceOptions, deadline_s: float
    ) -> tuple[str, ...]:
        """Return the topics that a query chose; refuse those that no broker has."""
        pattern = options.topic_pattern
        soon_s = min(deadline_s, context.clock.monotonic_s() + NEW_TOPIC_S)
        is_last_look = False
        while True:
            topics = options.topics or tuple({p.topic for p in options.assigned})
            if pattern is not None:
                topics = await self._matching(context, pattern, deadline_s)
            snapshot = await read_cluster(context, topics, deadline_s=deadline_s)
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
            # It may have been made a moment ago.
            try:
                await context.metadata.wait_newer(snapshot.version, deadline_s=soon_s)
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

    def addresses(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, str]:
        """Return where partitions are read, as `meta://host:port`.

        Those of a broker that stays away for `retry_timeout_s` are missing.
        """
        wanted = tuple(partitions)

        async def find(
            context: ClientContext, deadline_s: float
        ) -> dict[TopicPartition, str]:
            snapshot = await read_cluster(context, (), deadline_s=deadline_s)
            with suppress(NoBrokerError):
                while any(context.address_of(p.broker_id) is None for p in wanted):
                    snapshot = await context.metadata.wait_newer(
                        snapshot.version, deadline_s=deadline_s
                    )
            found = {p: context.address_of(p.broker_id) for p in wanted}
            return {p: str(at) for p, at in found.items() if at is not None}

        return self.run(find)

    def targets(self, topics: Iterable[str]) -> dict[str, dict[TopicPartition, str]]:
        """Return the partitions of topics that take puts, with their addresses.

        Raises:
            NoBrokerError: no broker takes puts to one of them.
        """
        wanted = sorted(set(topics))

        async def find(
            context: ClientContext, deadline_s: float
        ) -> dict[str, dict[TopicPartition, str]]:
            snapshot = await read_takers(context, wanted, deadline_s=deadline_s)
            return {topic: put_addresses(snapshot, [topic]) for topic in wanted}

        return self.run(find)

    def whole_targets(
        self, topics: Iterable[str]
    ) -> dict[str, dict[TopicPartition, str]]:
        """Return the result of `targets`, when all named brokers are there.

        Without ZooKeeper it is the list of the brokers that says where a batch goes.

        Raises:
            NoBrokerError: one of them is away, or no broker takes puts to a topic.
        """
        wanted = sorted(set(topics))

        async def find(
            context: ClientContext, deadline_s: float
        ) -> dict[str, dict[TopicPartition, str]]:
            snapshot = await read_takers(context, wanted, deadline_s=deadline_s)
            while away := describe_absent(snapshot, wanted):
                try:
                    snapshot = await context.metadata.wait_newer(
                        snapshot.version, deadline_s=deadline_s
                    )
                except NoBrokerError as error:
                    raise NoBrokerError(
                        f"{away}: without ZooKeeper a batch goes to all brokers that"
                        " the option names, or it would go elsewhere when it is run"
                        " again; start it, or name zookeeper"
                    ) from error
            return {topic: put_addresses(snapshot, [topic]) for topic in wanted}

        return self.run(find)

    def begin_batch(
        self, write: str, topics: Iterable[str], *, fail_on_lost_route: bool
    ) -> tuple[WriteRoutes, dict[TopicPartition, str]]:
        """Keep the routes of a write's next batch; routes kept before win.

        Partitions among them that take no puts are waited for.

        Args:
            write: its name.
            topics: that the batch writes.
            fail_on_lost_route: otherwise partitions away are replaced, with a warning.

        Returns:
            The kept routes, and the addresses that take puts to them now.

        Raises:
            NoBrokerError: no broker takes puts to a topic.
            RoutesError: the kept routes cannot be read.
        """
        wanted = sorted(set(topics))

        async def begin(
            context: ClientContext, deadline_s: float
        ) -> tuple[WriteRoutes, dict[TopicPartition, str]]:
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
                        snapshot = await context.metadata.wait_newer(
                            snapshot.version, deadline_s=deadline_s
                        )
                return routes, put_addresses(snapshot, known)
            before = {p for topic in wanted for p in routes.last.get(topic, ())}
            if lost := (begun | before) - put_addresses(snapshot, wanted).keys():
                _log.warning(
                    "rows go to other partitions, some are away: %s", name_some(lost)
                )
                routes = await keep(WriteRoutes.moved)
            return routes, put_addresses(snapshot, known)

        return self.run(begin)

    def end_batch(self, write: str, batch: int, query: str) -> None:
        """Note that a batch of a query is written as a whole."""

        async def end(context: ClientContext, deadline_s: float) -> None:
            await change_routes(
                context,
                write,
                lambda kept: (
                    WriteRoutes.from_json(kept).written(batch, query).to_json()
                ),
                deadline_s=deadline_s,
            )

        self.run(end)

    def forget_routes(self, write: str) -> None:
        """Forget where a write goes; harmless twice."""

        async def forget(context: ClientContext, deadline_s: float) -> None:
            await forget_routes(context, write, deadline_s=deadline_s)

        self.run(forget)

    # -- logs -------------------------------------------------------------------------

    def spans(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, LogSpan | None]:
        """Return the present spans of logs; None where a broker has no log yet."""
        wanted = tuple(partitions)

        async def ask(
            context: ClientContext, deadline_s: float
        ) -> list[tuple[Offset, Offset] | None]:
            questions = (log_range(context, p, deadline_s=deadline_s) for p in wanted)
            return await all_of(questions)

        found = self.run(ask)
        return {
            partition: None if span is None else LogSpan(*span)
            for partition, span in zip(wanted, found, strict=True)
        }

    def watched_spans(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, LogSpan | None]:
        """Return the result of `spans`, at no cost for logs that stand still.

        Partitions of a broker that is away are missing. Log starts may be old.
        """

        async def read(
            context: ClientContext, deadline_s: float
        ) -> dict[TopicPartition, LogSpan | None]:
            # Before the cluster is known every broker would pass for one that is away.
            await read_cluster(context, (), deadline_s=deadline_s)
            there = [p for p in partitions if context.address_of(p.broker_id)]
            found = await self._log_ends(context).read(there, deadline_s=deadline_s)
            return {
                partition: None if span is None else LogSpan(*span)
                for partition, span in found.items()
            }

        return self.run(read)

    def wait_news(self, wait_s: float) -> None:
        """Return when a watched log has grown, or after so many seconds."""

        async def wait(context: ClientContext, deadline_s: float) -> None:
            del deadline_s
            await self._log_ends(context).wait(wait_s=wait_s)

        self.run(wait)

    def monotonic_s(self) -> float:
        """Return seconds on the client's clock, for waits."""

        async def read(context: ClientContext, deadline_s: float) -> float:
            del deadline_s
            return context.clock.monotonic_s()

        return self.run(read)

    # -- ZooKeeper --------------------------------------------------------------------

    def read_progress(
        self, group: str, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, Offset]:
        """Return the offsets that a group has committed, of those that have one."""

        async def read(
            context: ClientContext, deadline_s: float
        ) -> dict[TopicPartition, Offset]:
            return await read_progress(
                context, group, partitions, deadline_s=deadline_s
            )

        return self.run(read)

    def commit_progress(
        self, group: str, progress: Mapping[TopicPartition, Offset]
    ) -> None:
        """Commit offsets for a group; none goes back."""

        async def commit(context: ClientContext, deadline_s: float) -> None:
            await commit_progress(context, group, progress, deadline_s=deadline_s)

        self.run(commit)

    def read_decision(self, query: str) -> bytes | None:
        """Return the decision that is kept for a query; None for none."""

        async def read(context: ClientContext, deadline_s: float) -> bytes | None:
            return await read_decision(context, query, deadline_s=deadline_s)

        return self.run(read)

    def read_start(self, query: str) -> str | None:
        """Return the start that is kept under a name; None for none."""

        async def read(context: ClientContext, deadline_s: float) -> str | None:
            return await read_start(context, query, deadline_s=deadline_s)

        return self.run(read)

    def keep_start(self, query: str, text: str) -> None:
        """Keep a start under a name; durable on return."""

        async def keep(context: ClientContext, deadline_s: float) -> None:
            await keep_start(context, query, text, deadline_s=deadline_s)

        self.run(keep)

    def forget_start(self, query: str) -> None:
        """Forget the start that is kept under a name; harmless twice."""

        async def forget(context: ClientContext, deadline_s: float) -> None:
            await forget_start(context, query, deadline_s=deadline_s)

        self.run(forget)

    # -- the client, all on its loop --------------------------------------------------

    async def _run(self, work: ClusterWork[T]) -> T:
        context, wire = (await self._opened()).context, self._wire
        patience_s = max(wire.retry_timeout_s, wire.request_timeout_s)
        clock = context.clock
        self._busy_count += 1
        try:
            # An answer may take longer than that; brokers and ZooKeeper may not.
            known_s = clock.monotonic_s() + wire.retry_timeout_s
            await read_cluster(context, (), deadline_s=known_s)
            return await work(context, clock.monotonic_s() + patience_s)
        finally:
            self._busy_count -= 1
            self._used_s = asyncio.get_running_loop().time()

    async def _opened(self) -> AsyncClient:
        """Return the client; the first call makes it, others wait until it is ready."""
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
                # One that cannot start closes itself; the next call tries anew.
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
        # Taken off at once: a call that comes before the task runs has another one.
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
