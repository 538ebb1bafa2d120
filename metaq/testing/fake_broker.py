"""A fake MetaQ 1.4 broker on a real socket, with injected faults.

    with FakeBroker({"test": 2}, coordinator=zookeeper.coordinator) as broker:
        broker.inject(FaultKind.DROP_STORED, verb="put")     # the next put
        broker.reorder = True
        ...
        assert broker.statistics().commands["get"] < 20      # no polling in a loop

`fake_metaq.py` makes its answers. It has none of our extensions: a command unknown to
MetaQ closes the connection as soon as its line is complete. It runs on its own thread,
so that tests with and without an event loop can use it; every method may be called from
any thread.

Source: docs/metaq-1.4/broker.md 1.1, 1.2, 3.2.
"""

import asyncio
import enum
import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from metaq.clock import Clock, SystemClock
from metaq.errors import NotFoundError, ServerError
from metaq.model import BrokerAddress, BrokerId, LogId, MessageId, Offset
from metaq.protocol import texts
from metaq.protocol.commands import (
    Get,
    OffsetQuery,
    Put,
    Reply,
    Result,
    Stats,
    Status,
    TransactionCommand,
    Version,
)
from metaq.record.flags import encode_payload
from metaq.record.layout import HEADER_BYTES, Record, encode_record
from metaq.testing.fake_metaq import FakeMetaq, Known
from metaq.testing.fake_session import FakeSession
from metaq.testing.servers import HOST, ThreadOwner, reserve_port, stop_listening
from metaq.zk.paths import BrokerRole, NodePaths
from metaq.zk.plan import AdvertisedTopic, BrokerSnapshot
from metaq.zk.registry import BrokerRegistry
from metaq.zk.session import Coordinator

_VERBS: Final[Mapping[type, str]] = {
    Put: "put",
    Get: "get",
    OffsetQuery: "offset",
    Version: "version",
    Stats: "stats",
}

REGISTER_TIMEOUT_S: Final = 60.0


class FaultKind(enum.Enum):
    """Fault injected in place of a normal answer."""

    REFUSE = "not carried out; answered with a status"
    SWALLOW = "not carried out; never answered"
    SWALLOW_STORED = "carried out; never answered"
    DROP = "not carried out; the connection is cut"
    DROP_STORED = "carried out; the connection is cut before the answer"


@dataclass(slots=True)
class FakeFault:
    """A pending fault; see `FakeBroker.inject`."""

    kind: FaultKind
    verb: str
    after: int
    count: int
    status: int
    body: bytes


@dataclass(frozen=True, slots=True)
class FakeBrokerStatistics:
    """A snapshot of a fake broker's counters since its creation."""

    commands: Mapping[str, int]
    """Commands received, by verb (put, get, offset, version, stats, other) or type of
    transaction command (begin, prepare, commit_one_phase ...)."""
    connection_count: int
    open_connection_count: int
    empty_get_count: int
    """Gets answered with 404."""
    unknown_count: int
    """Connections closed because of a command unknown to MetaQ."""
    fault_count: int


class FakeBroker(ThreadOwner):
    """One broker. Owned by the test.

    Lifecycle: `start` (or `with`) registers it if it has a ZooKeeper; then any number
    of `go_away` and `come_back`; `stop` withdraws it and cuts all connections. The port
    is chosen at the first start and kept. Messages, prepared transactions, options and
    counters survive `go_away`.
    """

    def __init__(
        self,
        topics: Mapping[str, int] | None = None,
        *,
        broker_id: int = 0,
        coordinator: Callable[[Clock], Coordinator] | None = None,
        root: str = "/meta",
        clock: Clock | None = None,
        seed: int = 0,
    ) -> None:
        """Configure a broker; nothing is opened before `start`.

        Args:
            topics: topic → number of partitions; by default "test" with one.
            broker_id: broker id, 0..1023.
            coordinator: factory of the ZooKeeper session to register with; None: the
                broker is not registered.
            root: MetaQ's root in ZooKeeper.
            clock: clock; by default the machine's.
            seed: seed of the random choices: partitions, order of answers, sizes of
                pieces.
        """
        super().__init__(f"fake-broker-{broker_id}")
        self.broker_id = BrokerId(broker_id)
        self.port = 0
        """Port of the listener; valid after `start`."""
        self.split_bytes = 0
        """Size of the pieces in which answers are written; 0: no pieces."""
        self.splits_anywhere = False
        """Whether to write answers in pieces of random sizes, across their ends."""
        self.delay_s = 0.0
        """Delay of each answer, seconds; commands are still read."""
        self.reorder = False
        """Whether to shuffle answers of a connection that are due together."""
        self.misorders_puts = False
        """Whether to shuffle puts of a connection that arrive together before they are
        carried out, as MetaQ's thread pool does (docs/metaq-1.4/broker.md 9)."""
        self._clock = clock or SystemClock()
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self.metaq = FakeMetaq(
            {"test": 1} if topics is None else topics,
            broker_id=broker_id,
            clock=self._clock,
            choose=self._random.randrange,
        )
        """Behaviour and content of the broker, with the options of its answers."""
        self._registration = FakeRegistration(coordinator, root, self._clock)
        self._faults: list[FakeFault] = []
        self._fault_count = 0
        self._commands: Counter[str] = Counter()
        self._empty_gets = self._unknown = 0
        self._connection_count = 0
        self._sessions: set[FakeSession] = set()
        self._server: asyncio.Server | None = None

    # -- life -------------------------------------------------------------------------

    @property
    def address(self) -> BrokerAddress:
        """Address for clients; valid after `start`."""
        return BrokerAddress(HOST, self.port)

    def go_away(self, *, keeps_nodes: bool = False) -> None:
        """Close the listener and cut the open connections.

        Args:
            keeps_nodes: leave the nodes in ZooKeeper, as a crashed machine does until
                its session expires.
        """
        self._running.run(self._go_away(keeps_nodes=keeps_nodes))

    def come_back(self, *, port: int | None = None) -> None:
        """Listen and register again.

        Args:
            port: port to listen on; None: the same as before; 0: a free one.
        """
        self._running.run(self._come_back(self.port if port is None else port))

    async def _start(self) -> None:
        await self._come_back(self.port)

    async def _come_back(self, port: int) -> None:
        self.port = port or reserve_port(self)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: FakeSession(self), HOST, self.port
        )
        with self._lock:
            self.metaq.port, self.metaq.uri = self.port, str(self.address)
        await self._registration.register(self._snapshot())

    async def _go_away(self, *, keeps_nodes: bool) -> None:
        if not keeps_nodes:
            await self._registration.withdraw()
        if self._server is not None:
            await stop_listening(self._server)
            self._server = None
        with self._lock:
            self.metaq.transactions.restart()
        for session in tuple(self._sessions):
            session.cut()
        while self._sessions:  # noqa: ASYNC110  # takes a turn or two: they are cut
            await asyncio.sleep(0)

    async def _stop(self) -> None:
        await self._go_away(keeps_nodes=False)
        await self._registration.stop()

    def _snapshot(self) -> BrokerSnapshot:
        with self._lock:
            topics = tuple(
                AdvertisedTopic(name, count)
                for name, count in sorted(self.metaq.topics.items())
            )
        return BrokerSnapshot(
            BrokerRole(self.broker_id), self.address, 0, topics, has_record=False
        )

    def _update(self) -> None:
        self._registration.update(self._snapshot())

    # -- content ----------------------------------------------------------------------

    def create_topic(self, topic: str, partitions: int = 1) -> None:
        """Add a topic, or change its number of partitions; it is registered soon.

        Args:
            topic: topic name.
            partitions: number of partitions, 1 or more.
        """
        with self._lock:
            self.metaq.topics[topic] = partitions
        if self._thread is not None:
            self._thread.call(self._update)

    def add(
        self,
        data: bytes,
        *,
        topic: str = "test",
        partition: int = 0,
        attribute: str | None = None,
        message_id: int | None = None,
    ) -> Offset:
        """Append a message as a put would.

        Args:
            data: payload from the application.
            topic: topic of the partition.
            partition: number of the partition on this broker.
            attribute: attribute of the message, or None.
            message_id: id, any signed 64-bit number; None: the next one.

        Returns:
            The offset of the record.
        """
        payload, flag = encode_payload(data, attribute)
        with self._lock:
            number = self.metaq.next_id() if message_id is None else message_id
            record = encode_record(payload, id=MessageId(number), flag=flag)
            return self.metaq.log(topic, partition).append(record)

    def records(self, topic: str = "test", partition: int = 0) -> list[Record]:
        """Return the records of a partition, oldest first, including damaged ones.

        Args:
            topic: topic of the partition.
            partition: its number on this broker.
        """
        with self._lock:
            return self.metaq.peek(topic, partition).records()

    def payloads(self, topic: str = "test", partition: int = 0) -> list[bytes]:
        """Return the payloads of a partition, oldest first.

        Args:
            topic: topic of the partition.
            partition: its number on this broker.
        """
        return [record.payload for record in self.records(topic, partition)]

    def transactions(self) -> list[str]:
        """Return the keys of unfinished transactions."""
        with self._lock:
            return self.metaq.transactions.keys()

    def log_start(self, topic: str = "test", partition: int = 0) -> Offset:
        """Return the log start offset of a partition.

        Args:
            topic: topic of the partition.
            partition: its number on this broker.
        """
        with self._lock:
            return self.metaq.peek(topic, partition).start

    def log_end(self, topic: str = "test", partition: int = 0) -> Offset:
        """Return the log end offset of a partition.

        Args:
            topic: topic of the partition.
            partition: its number on this broker.
        """
        with self._lock:
            return self.metaq.peek(topic, partition).end

    def roll(self, topic: str = "test", partition: int = 0) -> None:
        """Begin a new segment; no answer to a get spans two segments.

        Args:
            topic: topic of the partition.
            partition: its number on this broker.
        """
        with self._lock:
            self.metaq.log(topic, partition).roll()

    def trim(self, topic: str = "test", partition: int = 0) -> None:
        """Delete the oldest segment unless it is the last; gets in it are answered 301.

        Args:
            topic: topic of the partition.
            partition: its number on this broker.
        """
        with self._lock:
            self.metaq.log(topic, partition).trim()

    def corrupt(
        self,
        offset: int,
        *,
        topic: str = "test",
        partition: int = 0,
        length: int | None = None,
    ) -> None:
        """Flip a bit in the payload of a record, or set its length.

        Args:
            offset: offset of the record.
            topic: topic of the partition.
            partition: number of the partition on this broker.
            length: new length in the header, bytes; None: flip a bit instead.
        """
        with self._lock:
            position = offset + (HEADER_BYTES if length is None else 0)
            start, segment = self.metaq.log(topic, partition).find(position)
            at = position - start
            if length is None:
                segment[at] ^= 1
            else:
                segment[at : at + 4] = length.to_bytes(4, "big", signed=True)

    def lose(
        self,
        start: int,
        end: int,
        *,
        refuses: bool = False,
        topic: str = "test",
        partition: int = 0,
    ) -> None:
        """Make bytes of a log unreadable, like a truncated segment or a broken disk.

        Args:
            start: offset of the first byte.
            end: offset after the last byte.
            refuses: answer gets there with 500; False: with 404, as at the end of the
                log.
            topic: topic of the partition.
            partition: number of the partition on this broker.
        """
        with self._lock:
            log = self.metaq.log(topic, partition)
            text = texts.nothing_at(start)
            answer = ServerError("") if refuses else NotFoundError(text)
            log.gaps.append((start, end, answer))

    def close_partition(self, topic: str = "test", partition: int = 0) -> None:
        """Refuse puts to a partition and gets from it with 403.

        Args:
            topic: topic of the partition.
            partition: its number on this broker.
        """
        with self._lock:
            self.metaq.closed.add(LogId(topic, partition))

    def open_partition(self, topic: str = "test", partition: int = 0) -> None:
        """Accept puts and gets of a partition again.

        Args:
            topic: topic of the partition.
            partition: its number on this broker.
        """
        with self._lock:
            self.metaq.closed.discard(LogId(topic, partition))

    # -- faults -----------------------------------------------------------------------

    def inject(
        self,
        kind: FaultKind,
        *,
        verb: str = "put",
        after: int = 0,
        count: int = 1,
        status: int = Status.SERVER_ERROR,
        body: bytes = b"",
    ) -> None:
        """Inject a fault into future commands.

        A command meets at most one pending fault, the first injected one that applies.

        Args:
            kind: kind of fault.
            verb: verb, as in `FakeBrokerStatistics.commands`; "" is every command.
            after: number of commands of that verb to let pass first.
            count: number of commands that meet the fault.
            status: status of the answer, for REFUSE.
            body: body of the answer, for REFUSE.
        """
        with self._lock:
            self._faults.append(FakeFault(kind, verb, after, count, status, body))

    def drop_connections(self) -> None:
        """Cut every open connection."""

        def cut_all() -> None:
            for session in tuple(self._sessions):
                session.cut()

        self._running.call(cut_all)

    def statistics(self) -> FakeBrokerStatistics:
        """Return a snapshot of the counters."""
        with self._lock:
            return FakeBrokerStatistics(
                commands=Counter(self._commands),
                connection_count=self._connection_count,
                open_connection_count=len(self._sessions),
                empty_get_count=self._empty_gets,
                unknown_count=self._unknown,
                fault_count=self._fault_count,
            )

    def _take_fault(self, verb: str) -> FakeFault | None:
        """Return the fault for a command; all pending faults of the verb count it."""
        taken = None
        for fault in [f for f in self._faults if f.verb in {"", verb}]:
            if fault.after:
                fault.after -= 1
            elif taken is None:
                taken = fault
        if taken is not None:
            self._fault_count += 1
            taken.count -= 1
            if not taken.count:
                self._faults.remove(taken)
        return taken

    # -- for its connections ----------------------------------------------------------

    def on_opened(self, session: FakeSession) -> None:
        """Add a new connection."""
        with self._lock:
            self._connection_count += 1
            self._sessions.add(session)
        if self._server is None:
            # It was accepted just before the listener closed.
            session.cut()

    def on_closed(self, session: FakeSession) -> None:
        """Remove a connection."""
        with self._lock:
            self._sessions.discard(session)

    def on_unknown(self) -> None:
        """Count a command unknown to MetaQ."""
        with self._lock:
            self._unknown += 1

    def shuffle(self, items: list[Any]) -> None:
        """Shuffle items in place; different items never keep their order."""
        before = list(items)
        while len(set(before)) > 1 and items == before:
            self._random.shuffle(items)

    def piece_bytes(self, queued_bytes: int) -> int:
        """Return the maximum size of the next piece to write, 1 or more."""
        if self.splits_anywhere:
            return self._random.randint(1, queued_bytes)
        return self.split_bytes or queued_bytes

    def on_command(
        self, command: Known, session: FakeSession
    ) -> tuple[Reply | None, bool]:
        """Carry out a command, unless a fault prevents it.

        Args:
            command: the command.
            session: its connection.

        Returns:
            (the answer or None, whether to cut the connection instead).
        """
        verb = _VERBS.get(type(command), "other")
        if isinstance(command, TransactionCommand):
            verb = command.type.name.lower()
        with self._lock:
            self._commands[verb] += 1
            fault = self._take_fault(verb)
            kind = None if fault is None else fault.kind
            if fault is not None and kind is FaultKind.REFUSE:
                return Result(fault.status, fault.body, command.opaque), False
            if kind is FaultKind.SWALLOW or kind is FaultKind.DROP:
                return None, kind is FaultKind.DROP
            reply = self.metaq.answer(command, session)
            if kind is not None:
                return None, kind is FaultKind.DROP_STORED
            if isinstance(command, Get) and isinstance(reply, Result):
                self._empty_gets += reply.status == Status.NOT_FOUND
            return reply, False


class FakeRegistration:
    """ZooKeeper nodes of a fake broker: those of our brokers that MetaQ has too.

    Owned by one fake broker, used on its loop. Without ZooKeeper it does nothing.
    """

    def __init__(
        self,
        make_coordinator: Callable[[Clock], Coordinator] | None,
        root: str,
        clock: Clock,
    ) -> None:
        """Configure the registration; nothing is connected before `register`.

        Args:
            make_coordinator: factory of the session; None: no ZooKeeper.
            root: MetaQ's root in ZooKeeper.
            clock: clock of deadlines.
        """
        self._make_coordinator = make_coordinator
        self._paths = NodePaths(root)
        self._clock = clock
        self._registry: BrokerRegistry | None = None
        self._coordinator: Coordinator | None = None

    async def register(self, snapshot: BrokerSnapshot) -> None:
        """Register a snapshot; returns when its nodes are written."""
        if self._make_coordinator is None:
            return
        if self._coordinator is None:
            self._coordinator = self._make_coordinator(self._clock)
            self._coordinator.start()
        await self.withdraw()
        self._registry = BrokerRegistry(
            self._coordinator, self._paths, clock=self._clock
        )
        self._registry.start()
        await self._registry.register(snapshot, deadline_s=self._deadline_s())

    def update(self, snapshot: BrokerSnapshot) -> None:
        """Change the registration to a snapshot; returns before that is done."""
        if self._registry is not None:
            self._registry.update(snapshot)

    async def withdraw(self) -> None:
        """Delete the nodes; the session continues."""
        if self._registry is not None:
            await self._registry.withdraw(deadline_s=self._deadline_s())
            await self._registry.stop()
            self._registry = None

    async def stop(self) -> None:
        """End the session."""
        if self._coordinator is not None:
            await self._coordinator.stop(deadline_s=self._deadline_s())
            self._coordinator = None

    def _deadline_s(self) -> float:
        return self._clock.monotonic_s() + REGISTER_TIMEOUT_S
