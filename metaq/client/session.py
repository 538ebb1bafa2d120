"""A client: one ZooKeeper session, one connection per broker, and the objects it makes.

Everything of a client runs on one event loop. The user creates it; entering its
`async with` block starts it. Closing it closes all objects made from it, consumers
first, because their handlers may still send. Source: docs/metaq-1.4/client.md 6.
"""

import asyncio
import contextlib
import os
import random
import uuid
import warnings
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Self, TypeVar, Unpack

from metaq.assignment import Strategy
from metaq.client.admin.topic_admin import AsyncAdmin
from metaq.client.browsing import AsyncBrowsing
from metaq.client.client_statistics import ClientStatistics, Made
from metaq.client.cluster.context import ClientContext
from metaq.client.cluster.former_leaders import FormerLeaders
from metaq.client.cluster.metadata import AddressMetadata, Metadata, ZooKeeperMetadata
from metaq.client.cluster.queue_groups import reach_queue_groups
from metaq.client.consume.consumer import AsyncConsumer
from metaq.client.consume.fetch_handler import Marks
from metaq.client.errors import TopicExistsError
from metaq.client.group.assignments import PartitionSource, listed_source, topic_source
from metaq.client.group.rebalancer import GroupSource
from metaq.client.group.subscribed_topics import SubscribedTopics
from metaq.client.names import (
    Topics,
    broadcast_group,
    check_group,
    check_topic,
    fixed_partitions,
    member_id,
    parse_addresses,
    split_topics,
)
from metaq.client.offsets.file_offsets import FileOffsets
from metaq.client.offsets.offset_store import (
    MemoryOffsets,
    OffsetStore,
    ZooKeeperOffsets,
)
from metaq.client.options import (
    ClientKeywords,
    ClientOptions,
    ConsumerKeywords,
    ConsumerOptions,
    ProducerKeywords,
    ProducerOptions,
    QueueKeywords,
    QueueOptions,
    check_methods,
    check_plain_function,
    names_calls,
    takes_options,
)
from metaq.client.partitioner import Selector
from metaq.client.produce.exchange import AsyncExchange
from metaq.client.produce.ordered_producer import AsyncOrderedProducer, parse_layout
from metaq.client.produce.producer import AsyncProducer
from metaq.client.produce.runs import with_tag
from metaq.client.produce.xa import AsyncXa, check_qualifier
from metaq.client.queue.work_queue import AsyncQueue
from metaq.client.request.requester import Requester, RequestStatistics
from metaq.client.request.responder import AsyncResponder
from metaq.client.timeouts import Closable, close_all, require_loop
from metaq.client.validation import check_timeout, wrong_type
from metaq.clock import Clock, SystemClock
from metaq.errors import ClosedError, ConfigError
from metaq.model import TopicPartition
from metaq.net.own_host import own_host
from metaq.peer.pool import ConnectionPool
from metaq.record.flags import Headers
from metaq.zk.coordinator import ZooKeeperCoordinator
from metaq.zk.group_definitions import QueueGroupDefinition
from metaq.zk.paths import NodePaths, normalize_root
from metaq.zk.servers import parse_servers
from metaq.zk.session import Coordinator

C = TypeVar("C", bound=Closable)

FIRST_TURNS: Final = 2**32
"""Number of possible starts of the round robin: many more than partitions."""

CoordinatorFactory = Callable[[Clock], Coordinator]
"""Creates a coordinator on the client's loop; for tests without ZooKeeper."""


@names_calls
class AsyncClient(AsyncBrowsing):
    """Connects to a cluster: `async with AsyncClient("127.0.0.1:2181") as client`.

    Everything is called on the event loop that entered the block; on another one it
    raises `ClosedError`. A client and its objects belong to one process: after a fork
    the child creates its own.
    """

    @takes_options(ClientOptions)
    def __init__(
        self,
        zookeeper: str | None = None,
        *,
        brokers: Sequence[str] | None = None,
        coordinator: CoordinatorFactory | None = None,
        clock: Clock | None = None,
        chance: Callable[[], float] | None = None,
        **options: Unpack[ClientKeywords],
    ) -> None:
        """Create a client; it connects when its block is entered.

        Args:
            zookeeper: `host:port[,host:port...]`, where brokers register.
            brokers: `host:port` of each broker, to work without ZooKeeper: without
                groups, and without finding a broker that moves.
            coordinator: creates a substitute for ZooKeeper, instead of an address.
            clock: time, for tests.
            chance: returns a random number in [0, 1), for the start of each producer's
                round robin; None takes `random.random`.
            options: fields of `ClientOptions`.

        Raises:
            ConfigError: not exactly one of the three ways to find brokers is given, or
                an address is invalid.
        """
        ways = sum(way is not None for way in (zookeeper, brokers, coordinator))
        if ways != 1:
            raise ConfigError(
                "a client finds brokers in one way: expected a ZooKeeper address,"
                f" brokers=[...] or coordinator=..., got {ways} of them"
            )
        self.options = ClientOptions(**options)
        self.clock = clock or SystemClock()
        self._chance = chance or random.random
        self._addresses = [] if brokers is None else parse_addresses(brokers)
        self._make_coordinator = coordinator
        self._zookeeper_name = f"ZooKeeper at {zookeeper}" if zookeeper else "ZooKeeper"
        self._place = self._zookeeper_name
        if brokers is not None:
            self._place = f"brokers {', '.join(map(str, self._addresses))}"
        if zookeeper is not None:
            parse_servers(zookeeper)
            self._make_coordinator = lambda clock: ZooKeeperCoordinator(
                zookeeper,
                session_timeout_ms=int(self.options.session_timeout_s * 1000),
                clock=clock,
            )
        self._context: ClientContext | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._children: list[Closable] = []
        self._closed: weakref.WeakSet[Closable] = weakref.WeakSet()
        self._made = Made()
        self._marks: Marks = {}
        self._requester: Requester | None = None
        self._pid = os.getpid()
        self._is_closed = False
        self._closing = asyncio.Lock()

    # -- life -------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to connect; `async with` calls it. It does not wait for a connection.

        Raises:
            ClosedError: it was started before.
        """
        self.require_new()
        options, clock = self.options, self.clock
        loop = self._loop = asyncio.get_running_loop()
        pool = ConnectionPool(clock=clock, options=options, loop=loop)
        paths = NodePaths(normalize_root(options.root))
        coordinator = None
        metadata: Metadata
        if self._make_coordinator is None:
            metadata = AddressMetadata(
                self._addresses, pool=pool, clock=clock, options=options
            )
        else:
            coordinator = self._make_coordinator(clock)
            coordinator.start()
            metadata = ZooKeeperMetadata(
                coordinator, paths, clock=clock, name=self._zookeeper_name
            )
        FormerLeaders(metadata, pool)
        self._context = ClientContext(
            clock,
            options,
            pool,
            metadata,
            paths,
            self._make_producer,
            lambda: uuid.uuid4().hex,
            coordinator,
            self._make_topic,
            self._place,
        )
        await metadata.start()

    def require_new(self) -> None:
        """Check that the client was not started before.

        Raises:
            ClosedError: it was.
        """
        if self._context is not None:
            raise ClosedError("a client is started only once; create another one")

    async def close(self, timeout: float | None = None) -> None:
        """Close producers and consumers, then the connections.

        Consumers leave their groups, then producers send their messages, each as its
        `close` says. Calling it again is harmless; a call during the first one waits
        for it.

        Args:
            timeout: seconds in all; then everything is closed without waiting longer.
                None: each object has the time of its own `close`, and the connections
                `close_timeout_s`.

        Raises:
            ClosedError: this is not the client's event loop; nothing is closed.

        Cancellation: everything is closed at once, as the `close` of each says.
        """
        check_timeout(timeout)
        if os.getpid() != self._pid:
            return  # a fork leaves the parent's connections open
        if self._loop is not None and not self._is_closed:
            require_loop(self._loop, self)
        self._is_closed = True
        deadline_s = None if timeout is None else self.clock.monotonic_s() + timeout
        try:
            async with asyncio.timeout(timeout):
                await self._closing.acquire()
        except TimeoutError:
            return
        try:
            await self._close(deadline_s)
        finally:
            self._closing.release()

    async def _close(self, deadline_s: float | None) -> None:
        children, self._children = [*self._children, *self._closed], []
        # Consumers first: a running handler may still send.
        kinds = (AsyncConsumer, AsyncQueue)
        consumers = [one for one in children if isinstance(one, kinds)]
        others = [one for one in children if one not in consumers]
        try:
            await close_all(consumers, deadline_s, self.clock)
            await close_all(others, deadline_s, self.clock)
        except asyncio.CancelledError:
            deadline_s = self.clock.monotonic_s()
            await close_all(others, deadline_s, self.clock)
            raise
        finally:
            if self._context is not None:
                # Close the consumers of open `browse` iterators: the end of the loop
                # closes such generators all at once, and would be too late.
                now_s = self.clock.monotonic_s()
                await close_all([*self._context.followers], now_s, self.clock)
                await self._context.disconnect(deadline_s)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    def __del__(self) -> None:
        """Warn if it was started and not closed."""
        is_open = getattr(self, "_context", None) is not None and not self._is_closed
        if is_open and os.getpid() == self._pid:
            warnings.warn(
                f"{self!r} was not closed, and messages not sent by then are lost: use"
                " it as 'async with', or await its close()",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._place}: {self._state()}>"

    def _state(self) -> str:
        if self._is_closed:
            return "closed"
        if self._context is None:
            return "not started"
        coordinator = self._context.coordinator
        if coordinator is None:
            return "running"
        status = coordinator.status
        text = status.state.value if status.session_version else "not there yet"
        return f"running, session {text}"

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    @property
    def _parts(self) -> ClientContext:
        """The client's parts, for objects built over them.

        Raises:
            ClosedError: the client was not started, is closed, or this process is a
                fork.
        """
        if os.getpid() != self._pid:
            raise ClosedError(
                f"this client belongs to process {self._pid}, and this is process"
                f" {os.getpid()}: create a client after the fork"
            )
        if self._is_closed:
            raise ClosedError("the client is closed")
        if self._context is None:
            raise ClosedError(
                "the client is not started: use it as 'async with', or call start()"
            )
        return self._context

    def _require_context(self) -> ClientContext:
        """Return the client's parts; raises as `_parts`, and on another event loop."""
        context = self._parts
        assert self._loop is not None
        require_loop(self._loop, self)
        return context

    # -- objects made from it ----------------------------------------------------------

    @takes_options(ProducerOptions)
    def producer(
        self, *, selector: Selector | None = None, **options: Unpack[ProducerKeywords]
    ) -> AsyncProducer:
        """Return a producer that is ready to send; the client's `close` closes it.

        Args:
            selector: chooses partitions; None: by the key, or round robin from a random
                partition for messages without one.
            options: fields of `ProducerOptions`.
        """
        return self._adopt(self._make_producer(ProducerOptions(**options), selector))

    @takes_options(ProducerOptions)
    def ordered_producer(
        self,
        topic: str,
        partitions: str | Sequence[str],
        directory: Path | str,
        *,
        selector: Selector | None = None,
        **options: Unpack[ProducerKeywords],
    ) -> AsyncOrderedProducer:
        """Return a producer that keeps order over outages; see `ordered_producer.py`.

        Args:
            topic: topic of all its messages.
            partitions: layout of the topic, which must never change: `"0:4;1:4"` for
                four partitions on each of the brokers 0 and 1, or `["0-0", "0-1"]`.
            directory: stores messages that cannot be sent yet; one process at a time.
            selector: chooses partitions of the layout; None: by the key.
            options: fields of `ProducerOptions`; `in_flight_batches_max` is always 1.

        Raises:
            ConfigError: the layout is invalid.
        """
        if selector is not None:
            check_plain_function("selector", selector)
        # A batch must not overtake one in flight, even one of a cancelled send.
        settings = replace(ProducerOptions(**options), in_flight_batches_max=1)
        producer = AsyncOrderedProducer(
            self._require_context(),
            self._make_producer(settings, None),
            topic=topic,
            partitions=parse_layout(topic, partitions),
            directory=Path(directory),
            timeout_s=settings.timeout_s,
            selector=selector,
        )
        self._made.ordered.add(producer)
        return self._adopt(producer)

    @takes_options(ProducerOptions)
    def xa(
        self,
        qualifier: str,
        *,
        selector: Selector | None = None,
        **options: Unpack[ProducerKeywords],
    ) -> AsyncXa:
        """Return an object for XA transactions; the client's `close` closes it.

        Args:
            qualifier: identifies this program at the brokers, so that it finds its
                prepared transactions after a restart: always the same, and not that of
                another program. Without blanks and colons.
            selector: as in `producer`.
            options: fields of `ProducerOptions`.

        Raises:
            ConfigError: the qualifier is invalid.
        """
        check_qualifier(qualifier)
        producer = self._make_producer(ProducerOptions(**options), selector)
        xa = AsyncXa(self._require_context(), producer, qualifier=qualifier)
        return self._adopt(xa)

    @takes_options(ProducerOptions)
    def exchange(
        self, name: str, *, mandatory: bool = True, **options: Unpack[ProducerKeywords]
    ) -> AsyncExchange:
        """Return an object that sends to an exchange; the client's `close` closes it.

        Args:
            name: name of the exchange.
            mandatory: whether a message that no binding matches is an
                `UnroutableError`. If False, it goes to the exchange's alternate topic,
                or is dropped.
            options: fields of `ProducerOptions`.

        Raises:
            ConfigError: the name is invalid.
        """
        check_topic(name)
        if not isinstance(mandatory, bool):
            raise wrong_type("mandatory", "True or False", mandatory)
        producer = self._make_producer(ProducerOptions(**options), None, mandatory)
        return self._adopt(AsyncExchange(producer, name))

    def _make_producer(
        self,
        options: ProducerOptions,
        selector: Selector | None,
        is_mandatory: bool | None = None,
    ) -> AsyncProducer:
        if selector is not None:
            check_plain_function("selector", selector)
        context = self._require_context()
        producer = AsyncProducer(
            context,
            options,
            producer_id=uuid.uuid4().hex,
            selector=selector,
            # Random: else producers that each send one message use one partition only.
            first_turn=int(self._chance() * FIRST_TURNS),
            is_mandatory=is_mandatory,
        )
        self._made.producers.add(producer)
        return producer

    @takes_options(ConsumerOptions)
    def consumer(
        self,
        group: str,
        topics: Topics,
        *,
        partitions: Collection[str | TopicPartition] | None = None,
        broadcast: bool = False,
        offsets: OffsetStore | None = None,
        **options: Unpack[ConsumerKeywords],
    ) -> AsyncConsumer:
        """Return a consumer; it reads when its block is entered.

        Args:
            group: consumer group; its members share the partitions.
            topics: topic names, a `TopicPattern`, or a list of both.
            partitions: partitions to read without sharing them; names like `0-1` mean
                those of each topic. None: the group shares all partitions. Not for
                patterns.
            broadcast: whether every machine reads everything: the group is named
                `<group>-<address of the machine>`. Consumers of one machine share.
            offsets: offset store; None: ZooKeeper, for a broadcast the file
                `~/.meta_offsets`, or memory for a client of named brokers.
            options: fields of `ConsumerOptions`.

        Raises:
            ConfigError: MetaQ does not accept a name, a broadcast has no home directory
                or no address of the machine, or patterns have `partitions`.
            TypeError: `offsets` is not an offset store.
        """
        context = self._require_context()
        settings = ConsumerOptions(**options)
        if offsets is None:
            offsets = make_store(context, is_broadcast=broadcast)
        check_methods("offsets", offsets, OffsetStore)
        name, wanted = check_group(group), split_topics(topics)
        if broadcast:
            name = check_group(broadcast_group(group, own_host()))
        subscribed = SubscribedTopics(context.metadata, *wanted)
        consumer = AsyncConsumer(
            context,
            group=name,
            topics=subscribed,
            source=_make_source(context, name, subscribed, partitions, settings),
            store=offsets,
            options=settings,
            marks=self._marks,
        )
        self._made.consumers.add(consumer)
        return self._adopt(consumer)

    @takes_options(QueueOptions)
    def queue(
        self, topic: str, *, group: str, **options: Unpack[QueueKeywords]
    ) -> AsyncQueue:
        """Return a worker of a queue group; it takes messages in its block.

        Args:
            topic: topic whose messages are handed out and settled one by one.
            group: queue group; any number of workers share its messages. The first one
                defines it.
            options: fields of `QueueOptions`.

        Raises:
            ConfigError: a name or an option is invalid.
        """
        context = self._require_context()
        settings = QueueOptions(**options)
        check_topic(topic)
        name = check_group(group)

        async def define() -> QueueGroupDefinition:
            groups = await reach_queue_groups(context)
            return await groups.ensure(name, topic, settings.definition())

        queue = AsyncQueue(context, define, topic=topic, group=name, options=settings)
        self._made.queues.add(queue)
        return self._adopt(queue)

    async def request(
        self,
        topic: str,
        data: bytes,
        *,
        key: str | bytes | None = None,
        headers: Headers = (),
        tag: str | None = None,
        timeout: float | None = None,
    ) -> bytes:
        """Send a request to the responders of a topic, and return the reply of one.

        The request is stored like any message, and expires with the time-out. The reply
        goes through the memory of a broker: at most once, up to 1 MiB. Any number of
        requests may wait at once.

        Args:
            topic: topic that responders serve.
            data: bytes of the request.
            key: chooses the partition.
            headers: names and bytes, for the handler.
            tag: text stored as the header `tag`, for responders with `where`.
            timeout: seconds in all; None takes `request_timeout_s`.

        Returns:
            The bytes that the handler returned.

        Raises:
            ReplyTimeoutError: no reply in time; it may have been handled.
            ErrorReply: the handler raised; the text is that of its exception.
            NoMailboxError: no reachable broker has mailboxes; nothing was sent.
            ExchangeError: the topic is an exchange; nothing was sent.
            MetaqError: as `send` of a producer.

        Cancellation: the reply is dropped.
        """
        if self._requester is None or self._requester.is_closed:
            counts = self._made.requests = self._made.requests or RequestStatistics()
            requester = Requester(self._require_context(), counts)
            self._requester = self._adopt(requester)
        if tag is not None:
            headers = with_tag(headers, tag)
        return await self._requester.request(
            topic, data, key=key, headers=headers, timeout=timeout
        )

    @takes_options(QueueOptions)
    def responder(
        self, topic: str, *, group: str, **options: Unpack[QueueKeywords]
    ) -> AsyncResponder:
        """Return an object that answers requests of a topic; its `run` takes a handler.

        Args:
            topic: topic of the requests.
            group: queue group; one of its workers handles each request. A new group
                drops requests that are given up, unless the options say otherwise.
            options: fields of `QueueOptions`. The default of `prefetch` is 1 here, so
                that no request waits for a busy worker while another is free.

        Raises:
            ConfigError: a name or an option is invalid.
        """
        if options.get("dead_letter_topic") is None:
            options.setdefault("then", "drop")
        options.setdefault("prefetch", 1)
        queue = self.queue(topic, group=group, **options)
        return AsyncResponder(self._require_context(), queue)

    # -- the rest ----------------------------------------------------------------------

    def admin(self) -> AsyncAdmin:
        """Return an object that administers topics, groups, exchanges and brokers."""
        return AsyncAdmin(self._require_context())

    def statistics(self) -> ClientStatistics:
        """Return a snapshot of the counters of the client and its objects.

        Callable from any thread; makes no request. `metrics.py` exports it.

        Raises:
            ClosedError: the client is not running, or this is a fork of its process.
        """
        return self._made.snapshot(self._parts)

    # -- inside -----------------------------------------------------------------------

    async def _make_topic(self, topic: str, timeout: float | None) -> None:
        with contextlib.suppress(TopicExistsError):
            await self.admin().create_topic(topic, partitions=1, timeout=timeout)

    def _adopt(self, child: C) -> C:
        """Return an object, after noting that the client's `close` has to close it.

        Closed objects are kept weakly: while a `close` runs it keeps its object alive,
        and the client's `close` waits for it.
        """
        self._closed.update(one for one in self._children if one.is_closed)
        alive = [one for one in self._children if not one.is_closed]
        self._children = [*alive, child]
        return child


def context_of(client: AsyncClient) -> ClientContext:
    """Return the parts of a started client, for objects that are built over it.

    Raises:
        ClosedError: it was not started, is closed, or belongs to another process.
    """
    return client._parts  # noqa: SLF001  # access for our packages, not for users


BROADCAST_FILE: Final = "~/.meta_offsets"
"""File in which MetaQ's broadcast consumers of this user keep their offsets."""


def _make_source(
    context: ClientContext,
    group: str,
    topics: SubscribedTopics,
    partitions: Collection[str | TopicPartition] | None,
    options: ConsumerOptions,
) -> PartitionSource:
    """Return a consumer's source of partitions: given ones, all, or its group's."""
    if partitions is not None:
        if topics.patterns:
            raise ConfigError(
                f"partitions: expected topics by name, got a pattern in '{topics}';"
                " topics that match are read whole"
            )
        fixed = fixed_partitions(topics, partitions)
        return listed_source(fixed, clock=context.clock)
    if context.coordinator is None:
        return topic_source(context.metadata, topics, clock=context.clock)
    return GroupSource(
        context,
        group=group,
        consumer_id=options.consumer_id or member_id(own_host(), uuid.uuid4()),
        topics=topics,
        strategy=Strategy(options.strategy),
        where=options.where,
    )


def make_store(context: ClientContext, *, is_broadcast: bool) -> OffsetStore:
    """Return the default offset store.

    Raises:
        ConfigError: it is a file in the user's home directory, which does not exist.
    """
    if is_broadcast:
        try:
            path = Path(BROADCAST_FILE).expanduser()
        except RuntimeError as error:
            # For example, a user of a container without a name.
            raise ConfigError(
                f"broadcast: offsets are kept in {BROADCAST_FILE}, and this user has no"
                " home directory; name another place with offsets=FileOffsets(...)"
            ) from error
        return FileOffsets(path, clock=context.clock)
    if context.coordinator is None:
        return MemoryOffsets()
    return ZooKeeperOffsets(context.coordinator, context.paths)
