"""Group members that write exactly once, with brokers and ZooKeeper in memory.

The decisions, the block and the ends of branches are the real ones. The partition of a
member is a list of numbers; a broker has transactions and one log. Every request passes
a `Faults.point` before and after it is carried out.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from metaq.client.consume.exactly_once import AsyncExactlyOnce
from metaq.client.decisions.ending import end_dead
from metaq.client.decisions.member import MemberDecisions
from metaq.client.group.assignments import Fence
from metaq.client.options import ClientOptions, ProducerOptions
from metaq.client.partitioner import OutgoingMessage
from metaq.client.produce.broker_starts import BrokerStarts
from metaq.client.produce.producer_counters import ClientTransactionCounters
from metaq.client.produce.transaction_branch import TransactionParts
from metaq.cluster_snapshot import BrokerCopies, ClusterSnapshot
from metaq.errors import (
    MetaqError,
    NoBrokerError,
    RequestTimeoutError,
    ServerError,
    SessionSuspendedError,
)
from metaq.model import (
    BrokerAddress,
    BrokerId,
    GroupOffset,
    MessageId,
    Offset,
    TopicPartition,
)
from metaq.protocol.commands import Put, Reply, Result, TransactionCommand
from metaq.protocol.version import Capabilities
from metaq.testing.fake_metaq import FakeTransactions
from metaq.testing.zk import MemoryZooKeeper
from metaq.zk.errors import NodeExistsError
from metaq.zk.offsets import GroupOffsets
from metaq.zk.paths import NodePaths
from metaq.zk.session import SessionState
from metaq.zk.znodes import Node, encode_owner
from tests.rigs.virtual_time import VirtualClock

CLOCK = VirtualClock()
PATHS = NodePaths()
GROUP = "g"
BROKERS = (BrokerId(0), BrokerId(1))
INPUTS = tuple(TopicPartition("in", BrokerId(0), number) for number in range(2))
INPUT_COUNT = 6
"""Messages of each input; the offset of one is its number."""
BATCH = 2
"""Messages of a partition in a batch."""
REQUEST_S = 2.0

T = TypeVar("T")


class Fault(Enum):
    """Misfortune of a request, or of the member that makes it."""

    FAILED = "not carried out"
    ANSWER_LOST = "carried out, and the answer is lost"
    KILLED_BEFORE = "its member is killed before it"
    KILLED_AFTER = "its member is killed after it"
    SESSION_LOST_BEFORE = "the session of its member ends before it"
    SESSION_LOST_AFTER = "the session of its member ends after it"
    STOPPED_BEFORE = "its member hangs before it until others have done all"
    STOPPED_AFTER = "its member hangs after it until others have done all"
    BROKERS_RESTART = "the brokers were killed before it"
    SWEPT = "another member, whose reads are late, ends what is dead before it"


def due() -> Counter[bytes]:
    """Return what all inputs become, each once."""
    return Counter(
        made
        for partition in INPUTS
        for number in range(INPUT_COUNT)
        for made in made_of(partition, number)
    )


def made_of(partition: TopicPartition, number: int) -> dict[bytes, BrokerId]:
    """Return what a message becomes: nothing, or a message for one or two brokers."""
    name = b"%d %d" % (partition.partition, number)
    match (partition.partition + number) % 4:
        case 0:
            return {name + b" a": BROKERS[0], name + b" b": BROKERS[1]}
        case 1:
            return {name + b" b": BROKERS[1]}
        case 2:
            return {name + b" a": BROKERS[0]}
    return {}


class FakeLog:
    """One broker: its transactions, and what is readable."""

    def __init__(self) -> None:
        self.log: list[bytes] = []
        self.transactions = FakeTransactions(CLOCK, self._append)
        self.is_away = False

    def _append(self, put: Put, number: int) -> None:
        self.log.append(put.payload)


class OldTrees(MemoryZooKeeper):
    """Keeps what was: a server may answer reads with what was a while ago.

    A session sees its own writes, and never an older state than before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trees: list[dict[str, Node]] = [{}]

    def _touch(self) -> None:
        super()._touch()
        self.trees.append(dict(self.nodes))

    def write(self, path: str, data: bytes) -> None:
        super().write(path, data)
        self.trees[-1] = dict(self.nodes)


@dataclass
class World:
    """Brokers, a ZooKeeper, and what is to go wrong."""

    server: OldTrees = field(default_factory=OldTrees)
    pause_s: Callable[[], float] = lambda: 0.0
    """Returns how long a request is on its way, and its answer."""
    lag: Callable[[int], int] = lambda _count: 0
    """Returns how many writes a read is late, of so many that it may be."""
    brokers: dict[BrokerId, FakeLog] = field(
        default_factory=lambda: {one: FakeLog() for one in BROKERS}
    )
    choose: Callable[["Member", str], Fault | None] = lambda _member, _what: None
    """Returns the fault of the next request of a member."""
    meanwhile: Callable[[], Awaitable[None]] | None = None
    """Runs while a member hangs."""
    sweep: Callable[[], Awaitable[None]] | None = None
    """Ends what is dead, by another member."""
    _tokens: int = 0

    def draw_token(self) -> str:
        """Return digits that it never returned before."""
        self._tokens += 1
        return f"{self._tokens:032x}"

    def snapshot(self) -> ClusterSnapshot:
        """Return the cluster as clients see it."""
        return ClusterSnapshot(
            version=1,
            brokers={
                one: BrokerCopies(BrokerAddress("b", 1 + one), {})
                for one, broker in self.brokers.items()
                if not broker.is_away
            },
            seen=frozenset(self.brokers),
        )

    async def point(
        self, member: "Member", what: str, act: Callable[[], Awaitable[T]]
    ) -> T:
        """Carry out a request of a member, with its fault."""
        await asyncio.sleep(self.pause_s())
        member.require_alive()
        fault = self.choose(member, what)
        if fault is not None:
            member.faults.append(f"{what}: {fault.value}")
        if fault is Fault.BROKERS_RESTART:
            for broker in self.brokers.values():
                broker.transactions.restart()
        if fault is Fault.SWEPT and self.sweep is not None:
            await self.sweep()
        await self._around(fault, member, Fault.KILLED_BEFORE)
        if fault is Fault.FAILED:
            raise _away(what)
        result = await act()
        await asyncio.sleep(self.pause_s())
        await self._around(fault, member, Fault.KILLED_AFTER)
        if fault is Fault.ANSWER_LOST:
            raise _lost(what)
        return result

    async def _around(
        self, fault: Fault | None, member: "Member", killed: Fault
    ) -> None:
        is_before = killed is Fault.KILLED_BEFORE
        lost = Fault.SESSION_LOST_BEFORE if is_before else Fault.SESSION_LOST_AFTER
        stopped = Fault.STOPPED_BEFORE if is_before else Fault.STOPPED_AFTER
        if fault is killed:
            member.kill()
            member.require_alive()
        elif fault is lost:
            self.server.expire(member.raw)
        elif fault is stopped:
            self.server.reap(member.raw.status.session_id)
            if self.meanwhile is not None:
                await self.meanwhile()


def _away(what: str) -> MetaqError:
    text = f"{what}: connection lost"
    return SessionSuspendedError(text) if what[0].islower() else NoBrokerError(text)


def _lost(what: str) -> MetaqError:
    text = f"{what}: answer lost"
    is_zookeeper = what[0].islower()
    return SessionSuspendedError(text) if is_zookeeper else RequestTimeoutError(text)


class FaultyCoordinator:
    """A session whose requests pass points."""

    def __init__(self, member: "Member") -> None:
        self._member = member
        self._seen = 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._member.raw, name)
        if name in {"status", "add_listener"}:
            return real
        world, member = self._member.world, self._member

        async def act(*args: Any, **named: Any) -> Any:
            trees = world.server.trees
            try:
                found = await real(*args, **named)
            finally:
                last = len(trees) - 1
                if name not in READS:
                    # A refusal is an answer to a write as well.
                    self._seen = last
            if name not in READS:
                return found
            self._seen = last - world.lag(last - self._seen)
            return READS[name](trees[self._seen], args[0])

        async def ask(*args: Any, **named: Any) -> Any:
            return await world.point(member, name, lambda: act(*args, **named))

        return ask


def _children(tree: dict[str, Node], path: str) -> tuple[str, ...]:
    parts = (one.rpartition("/") for one in tree)
    return tuple(sorted(name for parent, _, name in parts if parent == path))


READS: dict[str, Callable[[dict[str, Node], str], Any]] = {
    "get": lambda tree, path: tree.get(path),
    "exists": lambda tree, path: path in tree,
    "children": _children,
}


class FakeConnection:
    """A connection of one member to one broker."""

    capabilities = Capabilities("1", has_mput=True, mput_tx=True)
    is_open = True

    def __init__(self, member: "Member", broker: FakeLog) -> None:
        self._member = member
        self._broker = broker

    def next_opaque(self) -> int:
        return 1

    async def call(self, command: TransactionCommand, *, deadline_s: float) -> Reply:
        async def act() -> Reply:
            if self._broker.is_away:
                raise NoBrokerError("away")
            try:
                text = self._broker.transactions.answer(command, self)
            except ServerError as error:
                return Result(500, str(error).encode(), 1)
            return Result(200, text.encode(), 1)

        name = command.type.name
        return await self._member.world.point(self._member, name, act)

    def next_opaques(self, count: int) -> range:
        return range(count)

    def submit_puts(
        self, frames: bytes, opaques: range, listener: Any, *, deadline_s: float
    ) -> None:
        async def act() -> Reply:
            if self._broker.is_away:
                raise NoBrokerError("away")
            for data in listener.payloads:
                put = Put("out", 0, data, 0, 0, 1, listener.transaction)
                try:
                    self._broker.transactions.put(put, 1, self)
                except ServerError as error:
                    return Result(500, str(error).encode(), 1)
            return Result(200, b"1 0 -1", 1)

        async def answer() -> None:
            try:
                outcome = await self._member.world.point(self._member, "PUT", act)
            except MetaqError as error:
                listener.on_outcome(opaques, error)
            else:
                listener.on_outcome(opaques, outcome)

        # Of a process that is killed no answer comes.
        task = asyncio.create_task(answer())
        self._member.tasks.add(task)
        task.add_done_callback(self._member.tasks.discard)


class Routes:
    """Chooses the broker that a message names."""

    def choose(
        self, topic: str, message: OutgoingMessage, *_others: Any, **_named: Any
    ) -> TopicPartition:
        assert message.partition is not None
        return TopicPartition(topic, BrokerId(int(message.partition)), 0)


async def at_once(_topic: str, _deadline_s: float) -> None:
    """Wait for the partitions of a topic: they are known."""


@dataclass
class Batch:
    """A batch of a member, as `AsyncMessageBatch` is one of a consumer."""

    member: "Member"
    begins: Mapping[TopicPartition, Offset]
    offsets: Mapping[TopicPartition, Offset]
    is_last: bool = True
    ends: list[str] = field(default_factory=list)
    """Its end: handled, or delivered again."""
    lost: list[TopicPartition] = field(default_factory=list)
    """Its partitions that went, and may be ours again."""

    def block(self) -> AsyncExactlyOnce:
        """Return the block that writes it."""
        return AsyncExactlyOnce(
            self.member.parts,
            cast("Any", self),
            self.member.decisions,
            confirm=self.confirm,
            redeliver=self.redeliver,
            lost=lambda: self.lost,
        )

    def __iter__(self) -> Iterator[Any]:
        for partition, begin in self.begins.items():
            for number in range(begin, self.offsets[partition]):
                yield SimpleNamespace(
                    partition=partition, offset=number, id=MessageId(number)
                )

    def redeliver(self) -> None:
        self.ends.append("again")
        for partition, begin in self.begins.items():
            if partition in self.member.positions:
                self.member.positions[partition] = begin

    def confirm(self) -> None:
        self.ends.append("handled")
        for partition, offset in self.offsets.items():
            if partition in self.member.positions:
                self.member.positions[partition] = offset


class Member:
    """A consumer and a producer in one process."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.raw = world.server.coordinator(CLOCK)
        self.raw.start()
        self.raw.add_listener(self._on_status)
        self.faults: list[str] = []
        self.is_dead = False
        self.tasks: set[asyncio.Task[None]] = set()
        self.positions: dict[TopicPartition, Offset] = {}
        self._stored: dict[TopicPartition, Offset | None] = {}
        self.stored = self._stored.get
        self.storing = asyncio.Lock()
        self._session_version = 0
        self._coordinator: Any = FaultyCoordinator(self)
        self.context: Any = SimpleNamespace(
            clock=CLOCK,
            options=ClientOptions(request_timeout_s=REQUEST_S),
            pool=self,
            metadata=self,
            paths=PATHS,
            draw_token=world.draw_token,
            coordinator=self._coordinator,
            require_coordinator=lambda _needed: self._coordinator,
            deadline_s=lambda: CLOCK.monotonic_s() + REQUEST_S,
        )
        self.decisions = MemberDecisions(
            self.context,
            group=GROUP,
            fence=lambda: Fence(self.name, self._session_version),
            committer=cast("Any", self),
            restart=self._restart,
        )
        self.parts = TransactionParts(
            address_of=self._address_of,
            pool=self.context.pool,
            clock=CLOCK,
            session_id=name,
            starts=BrokerStarts(CLOCK),
            prepare=at_once,
            routes=cast("Any", Routes()),
            options=ProducerOptions(timeout_s=REQUEST_S),
            counters=ClientTransactionCounters(),
        )

    # -- what a client has ------------------------------------------------------------

    @property
    def snapshot(self) -> ClusterSnapshot:
        return self.world.snapshot()

    def _address_of(self, broker_id: BrokerId) -> BrokerAddress | None:
        copies = self.snapshot.brokers.get(broker_id)
        return None if copies is None else copies.leader

    async def get(self, address: BrokerAddress, *, deadline_s: float) -> FakeConnection:
        return self.connection(BrokerId(address.port - 1))

    def require_open(self) -> None:
        self.require_alive()

    def connection(self, broker_id: BrokerId) -> FakeConnection:
        broker = self.world.brokers[broker_id]
        if broker.is_away:
            raise NoBrokerError(f"broker {broker_id} is away")
        return FakeConnection(self, broker)

    # -- life and death ---------------------------------------------------------------

    def kill(self) -> None:
        """End the process; its session goes on until it is reaped."""
        if not self.is_dead:
            self.is_dead = True
            self.world.server.abandon(self.raw)

    def require_alive(self) -> None:
        if self.is_dead:
            raise asyncio.CancelledError

    def reap(self) -> None:
        """End the session of a process that was killed."""
        self.world.server.reap(self.raw.status.session_id)

    def _on_status(self, status: Any) -> None:
        is_lost = status.state is SessionState.LOST
        if is_lost or status.session_version != self._session_version:
            self._restart(tuple(self.positions))

    async def close(self) -> None:
        """Leave, as at the end of a process; it may be killed there."""
        try:
            await self.decisions.close(deadline_s=CLOCK.monotonic_s() + REQUEST_S)
        except asyncio.CancelledError:
            if not self.is_dead:
                raise
        self.kill()
        self.reap()

    # -- partitions -------------------------------------------------------------------

    def _restart(self, partitions: Collection[TopicPartition]) -> None:
        self.decisions.release(partitions)
        for partition in partitions:
            self.positions.pop(partition, None)

    def note_stored(self, offsets: Mapping[TopicPartition, GroupOffset]) -> None:
        for partition, offset in offsets.items():
            self._stored[partition] = offset.offset

    async def claim(self, partition: TopicPartition) -> bool:
        """Own a partition, settle it, and read it from its offset."""
        status = self.raw.status
        status.require_connected()
        deadline_s = CLOCK.monotonic_s() + REQUEST_S
        path, data = PATHS.owner(GROUP, partition), encode_owner(self.name)
        try:
            await self._coordinator.create_ephemeral(path, data, deadline_s=deadline_s)
        except NodeExistsError:
            node = await self._coordinator.get(path, deadline_s=deadline_s)
            if node is None or node.owner_session_id != status.session_id:
                return False
        self._session_version = status.session_version
        place = await self.decisions.settle(partition, deadline_s=deadline_s)
        offsets = GroupOffsets(self._coordinator, PATHS, group=GROUP)
        found = await offsets.read_offset(partition, deadline_s=deadline_s)
        if self.raw.status.session_version != status.session_version:
            return False
        self._stored[partition] = None if found is None else found.offset
        begin = 0 if found is None else found.offset
        self.decisions.hold(partition, place, begin)
        self.positions[partition] = begin
        return True

    async def _release(self, partition: TopicPartition) -> None:
        deadline_s = CLOCK.monotonic_s() + REQUEST_S
        self.positions.pop(partition, None)
        await self.decisions.wait_idle(deadline_s=deadline_s)
        self.decisions.release([partition])
        path = PATHS.owner(GROUP, partition)
        node = await self._coordinator.get(path, deadline_s=deadline_s)
        if node and node.owner_session_id == self.raw.status.session_id:
            await self._coordinator.delete(path, deadline_s=deadline_s)

    async def leave(self) -> None:
        """Give all partitions up, as a rebalance does."""
        try:
            for partition in tuple(self.positions):
                await self._release(partition)
        except MetaqError as error:
            self.faults.append(f"caught {error!r:.200}")
        except asyncio.CancelledError:
            if not self.is_dead:
                raise

    async def sweep(self) -> None:
        """End what dead members left."""
        deadline_s = CLOCK.monotonic_s() + REQUEST_S
        await end_dead(self.context, GROUP, deadline_s=deadline_s)

    # -- work -------------------------------------------------------------------------

    def next_batch(self) -> Batch | None:
        """Return the next messages of all its partitions; None: there are none."""
        begins = {p: at for p, at in self.positions.items() if at < INPUT_COUNT}
        if not begins:
            return None
        ends = {p: min(at + BATCH, INPUT_COUNT) for p, at in begins.items()}
        for partition, end in ends.items():
            self.positions[partition] = end
        return Batch(self, begins, ends)

    async def write(self, batch: Batch) -> None:
        """Write what is made of a batch."""
        async with batch.block() as tx:
            for one in batch:
                for data, broker_id in made_of(one.partition, one.offset).items():
                    message = OutgoingMessage(data, partition=str(broker_id))
                    tx.add("out", [message])

    async def step(self, wanted: Collection[TopicPartition]) -> None:
        """Claim what is missing and write a batch; errors are those of a user."""
        try:
            for partition in wanted:
                if partition not in self.positions:
                    await self.claim(partition)
            batch = self.next_batch()
            if batch is not None:
                await self.write(batch)
        except MetaqError as error:
            self.faults.append(f"caught {error!r:.200}")

    async def run(self, wanted: Collection[TopicPartition], steps: int) -> None:
        """Make so many steps, or as many as it lives for."""
        try:
            for _ in range(steps):
                await self.step(wanted)
                await asyncio.sleep(0.5)
        except asyncio.CancelledError:
            if not self.is_dead:
                raise


async def heal(world: World, members: Collection[Member]) -> None:
    """End all that lives; a new member does the rest, and nothing is left over."""
    world.choose = lambda _member, _what: None
    world.pause_s = lambda: 0.0
    for broker in world.brokers.values():
        broker.is_away = False
    for member in members:
        member.kill()
        member.reap()
    await asyncio.sleep(60)
    last = Member(world, "g_last")
    await asyncio.sleep(1)
    await last.run(INPUTS, INPUT_COUNT * 2)
    await last.sweep()
    await last.close()


def check(world: World, members: Collection[Member]) -> None:
    """Each input is there once, in order, and no transaction is left."""
    history = [f"{one.name} {line}" for one in members for line in one.faults]
    logs = [broker.log for broker in world.brokers.values()]
    found = Counter(data for log in logs for data in log)
    assert found == due(), (found - due(), due() - found, history)
    for log in logs:
        for partition in INPUTS:
            numbers = [
                int(data.split()[1])
                for data in log
                if int(data.split()[0]) == partition.partition
            ]
            assert numbers == sorted(numbers), (numbers, history)
    left = [broker.transactions.keys() for broker in world.brokers.values()]
    assert left == [[], []], (left, history)
    tokens = world.server.names(PATHS.group_tokens(GROUP))
    assert not tokens, (tokens, history)
