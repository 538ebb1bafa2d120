"""A producer's world without sockets: virtual time, and brokers that fail on cue."""

import asyncio
import contextlib
import enum
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from types import MappingProxyType
from typing import Any

from metaq.client.cluster.context import ClientContext
from metaq.client.options import ClientOptions, ProducerOptions
from metaq.client.partitioner import Selector
from metaq.client.produce.producer import AsyncProducer
from metaq.clock import Clock
from metaq.cluster_snapshot import BrokerCopies, ClusterSnapshot
from metaq.errors import (
    ClosedError,
    ConnectionLostError,
    MetaqError,
    NoBrokerError,
    RemoteProtocolError,
    RequestTimeoutError,
)
from metaq.model import BrokerAddress, BrokerId, TopicPartition
from metaq.peer.connection import PutListener
from metaq.peer.replies import ReceiptColumns, parse_receipt
from metaq.protocol import texts
from metaq.protocol.commands import OWN_TIMES, Mput, Put, Reply, Result
from metaq.protocol.connection import Connection, Role, WireLimits
from metaq.protocol.version import Capabilities
from metaq.record.checksum import checksum
from metaq.record.layout import HEADER, HEADER_BYTES
from tests.rigs.virtual_time import VirtualClock

JAVA = Capabilities("1.4.6.2")
OURS = Capabilities("1.0", has_mput=True, dedup=True)
TIMED_ALIKE = Capabilities("1.0", has_mput=True, dedup=True, delay_ms_max=10**10)
TIMED = replace(TIMED_ALIKE, delay_each=True)
FORGETFUL = Capabilities("0.9", has_mput=True)


def split_records(records: bytes, times: list[int] | None = None) -> list[bytes]:
    """Return the payloads of an mput, its checksums verified; note times of its own."""
    payloads, position = [], 0
    while position < len(records):
        length, expected, message_id, _flag = HEADER.unpack_from(records, position)
        position += HEADER_BYTES
        payload = records[position : position + length]
        assert (len(payload), checksum(payload)) == (length, expected)
        if times is None:
            assert message_id == 0
        else:
            times.append(message_id)
        payloads.append(payload)
        position += length
    return payloads


class Act(enum.Enum):
    """Reaction of a stand-in broker to one command."""

    STORE = "store"
    CLOSED = "403"
    BUSY = "503"
    BROKEN = "500"
    SWALLOW = "swallow"
    SWALLOW_STORED = "swallow stored"
    CUT = "cut"
    CUT_STORED = "cut stored"


class StandInBroker:
    """Partitions as lists of payloads; `acts` are used up one per command."""

    def __init__(self, broker_id: int = 0, capabilities: Capabilities = OURS) -> None:
        self.broker_id = broker_id
        self.capabilities = capabilities
        self.acts: deque[Act] = deque()
        self.default = Act.STORE
        self.delay_ms_max = 1 << 62
        self.payloads: dict[int, list[bytes]] = {}
        self.ends: dict[int, int] = {}
        self.scheduled: list[tuple[int, int, list[bytes]]] = []
        """Time, partition and payloads of each record that waits."""
        self.places: dict[int, tuple[int, list[bytes]]] = {}
        """Time and payloads of each, by its offset."""
        self.waiting_bytes = 0
        self.commands: list[Put | Mput] = []
        self.seen: dict[tuple[int, str, int], tuple[int, bytes]] = {}
        self.expected: dict[tuple[int, str], int] = {}
        self.overlap_count = 0
        self.next_id = 1 << 30
        self.delay_s = 0.001
        self.is_up = True
        self.connection: StandInConnection | None = None
        self.address = BrokerAddress("stand-in", 1000 + broker_id)

    def stored(self, partition: int = 0) -> list[bytes]:
        return self.payloads.get(partition, [])

    def go_away(self) -> None:
        self.is_up = False
        if self.connection is not None:
            self.connection.cut()

    def come_back(self) -> None:
        self.is_up = True

    def refuse_far(self, command: Put | Mput) -> str | None:
        """Return the refusal of messages with times, if some are too far."""
        times, limit_ms = list[int](), self.delay_ms_max
        if not isinstance(command, Mput) or command.deliver_ms is None:
            return None
        if command.deliver_ms == OWN_TIMES:
            split_records(command.payload, times)
        times = times or [command.deliver_ms]
        now_ms = VirtualClock().wall_ms()
        far = [n for n, time_ms in enumerate(times) if time_ms > now_ms + limit_ms]
        return texts.too_far(far, len(times), limit_ms, 0) if far else None

    def carry_out(self, command: Put | Mput) -> bytes | None:
        """Store or recognise a command; return the receipt, None for a wrong number."""
        number = command.partition
        key = None
        if isinstance(command, Mput) and command.producer and self.capabilities.dedup:
            key = (number, command.producer, command.sequence)
            if key in self.seen:
                count, receipt = self.seen[key]
                assert count == command.count, "a repetition of another size"
                return receipt
            expected = self.expected.get(key[:2], 0)
            if command.sequence < expected:
                self.overlap_count += 1
                return None
            self.expected[key[:2]] = command.sequence + command.count
        times = list[int]()
        payloads, size_bytes = [command.payload], 20 + len(command.payload)
        if isinstance(command, Mput):
            own = command.deliver_ms == OWN_TIMES
            payloads = split_records(command.payload, times if own else None)
            assert len(payloads) == command.count
            size_bytes = len(command.payload)
        if isinstance(command, Mput) and command.deliver_ms is not None:
            receipt = b"%d %d -1 1 %d" % (self.next_id, number, self.waiting_bytes)
            if times:
                assert self.capabilities.delay_each
                assert len(set(times)) > 1, "they have one time"
            times = times or [command.deliver_ms] * len(payloads)
            pairs = zip(times, payloads, strict=True)
            for due_ms, group in groupby(pairs, itemgetter(0)):
                together = [payload for _, payload in group]
                self.places[self.waiting_bytes] = due_ms, together
                self.scheduled.append((due_ms, number, together))
                self.waiting_bytes += 49 + len(command.topic)
                self.waiting_bytes += sum(20 + len(payload) for payload in together)
            self.next_id += len(payloads)
            if key is not None:
                self.seen[key] = (command.count, receipt)
            return receipt
        offset = self.ends.get(number, 0)
        self.ends[number] = offset + size_bytes
        self.payloads.setdefault(number, []).extend(payloads)
        receipt = b"%d %d %d" % (self.next_id, number, offset)
        self.next_id += len(payloads)
        if key is not None:
            assert isinstance(command, Mput)
            self.seen[key] = (command.count, receipt)
        return receipt


class StandInConnection:
    """A connection of the delivery's protocol."""

    def __init__(self, broker: StandInBroker) -> None:
        self.broker = broker
        self.capabilities = broker.capabilities
        self.has_room = True
        self.is_open = True
        self.in_flight: dict[int, Callable[[Reply | MetaqError], None]] = {}
        self._opaque = 0
        self._held_back: dict[tuple[int, str], tuple[int, Act]] = {}
        self._under_way: deque[Put | Mput] = deque()
        self._loop = asyncio.get_running_loop()

    def next_opaque(self) -> int:
        self._opaque += 1
        return self._opaque

    def submit(
        self,
        frame: bytes,
        opaque: int,
        on_reply: Callable[[Reply | MetaqError], None],
        *,
        deadline_s: float,
        is_alone: bool = False,
    ) -> None:
        if not self.is_open:
            raise ClosedError("stand-in connection is closed")
        protocol = Connection(Role.SERVER, WireLimits())
        protocol.receive_data(frame)
        command = protocol.next_event()
        assert isinstance(command, Put | Mput)
        assert command.opaque == opaque
        self.in_flight[opaque] = on_reply
        self._loop.call_at(deadline_s, self._late, opaque)
        # In a queue of its own: timers of one moment come in any order.
        self._under_way.append(command)
        self._loop.call_later(self.broker.delay_s, self._arrive)

    def close_for(self, _error: RemoteProtocolError) -> None:
        self.cut()

    def next_opaques(self, count: int) -> range:
        first = self._opaque + 1
        self._opaque += count
        return range(first, first + count)

    def submit_puts(
        self, frames: bytes, opaques: range, listener: PutListener, *, deadline_s: float
    ) -> None:
        start = 0
        for opaque, size in zip(opaques, listener.sizes(), strict=True):
            self.submit(
                frames[start : start + size],
                opaque,
                partial(self._tell, listener, opaque),
                deadline_s=deadline_s,
            )
            start += size
        assert start == len(frames)

    def _tell(
        self, listener: PutListener, opaque: int, outcome: Reply | MetaqError
    ) -> None:
        try:
            if isinstance(outcome, MetaqError):
                raise outcome
            receipt = parse_receipt(outcome)
        except MetaqError:
            listener.on_outcome([opaque], outcome)
        else:
            numbers = [receipt.id], [receipt.partition], [receipt.offset]
            listener.on_receipts(ReceiptColumns([opaque], *numbers))

    def cut(self) -> None:
        self.is_open = False
        self.broker.connection = None
        waiting, self.in_flight = list(self.in_flight.values()), {}
        for on_reply in waiting:
            on_reply(ConnectionLostError("stand-in connection is lost"))

    def _late(self, opaque: int) -> None:
        on_reply = self.in_flight.pop(opaque, None)
        if on_reply is not None:
            on_reply(RequestTimeoutError("no answer in time"))

    def _arrive(self) -> None:
        if not self.is_open:
            return
        command = self._under_way.popleft()
        broker = self.broker
        broker.commands.append(command)
        act = self._act_for(command)
        refusal = broker.refuse_far(command)
        if refusal is not None:
            self._answer(Result(500, refusal.encode(), command.opaque))
            return
        if act in (Act.STORE, Act.SWALLOW_STORED, Act.CUT_STORED):
            receipt = broker.carry_out(command)
            if receipt is None:
                self._answer(Result(500, b"already stored", command.opaque))
            elif act is Act.STORE:
                self._answer(Result(200, receipt, command.opaque))
        if act in (Act.CUT, Act.CUT_STORED):
            self.cut()
        elif act in (Act.CLOSED, Act.BUSY, Act.BROKEN):
            self._answer(Result(int(act.value), b"as the test says", command.opaque))

    def _act_for(self, command: Put | Mput) -> Act:
        """Refuse what follows on a refused batch, as our broker does."""
        broker = self.broker
        if not (
            isinstance(command, Mput) and command.producer and broker.capabilities.dedup
        ):
            return broker.acts.popleft() if broker.acts else broker.default
        writer, after = (command.partition, command.producer), command.sequence
        held = self._held_back.pop(writer, None)
        if held is not None and held[0] == command.sequence:
            act = held[1]
        else:
            act = broker.acts.popleft() if broker.acts else broker.default
        if act in (Act.CLOSED, Act.BUSY):
            self._held_back[writer] = after + command.count, act
        return act

    def _answer(self, reply: Result) -> None:
        on_reply = self.in_flight.pop(reply.opaque, None)
        if on_reply is not None:
            on_reply(reply)


class StandInPool:
    """Connects to stand-in brokers, which takes a moment."""

    def __init__(self, brokers: Iterable[StandInBroker]) -> None:
        self.brokers = {broker.address: broker for broker in brokers}
        self.attempts = 0
        self.looks = 0

    def ready(self, address: BrokerAddress) -> StandInConnection | None:
        self.looks += 1
        return self.brokers[address].connection

    async def get(
        self, address: BrokerAddress, *, deadline_s: float
    ) -> StandInConnection:
        loop = asyncio.get_running_loop()
        broker = self.brokers[address]
        while True:
            await asyncio.sleep(0.01)
            if broker.is_up:
                self.attempts += 1
                if broker.connection is None:
                    broker.connection = StandInConnection(broker)
                return broker.connection
            if loop.time() >= deadline_s:
                raise NoBrokerError(f"no connection to {address}")

    def when_open(
        self,
        address: BrokerAddress,
        on_end: Callable[[MetaqError | None], None],
        *,
        deadline_s: float,
    ) -> Callable[[], None]:
        async def wait() -> None:
            try:
                await self.get(address, deadline_s=deadline_s)
            except NoBrokerError as error:
                on_end(error)
            else:
                on_end(None)

        task = asyncio.get_running_loop().create_task(wait())
        return partial(_cancel, task)


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


class FixedMetadata:
    """Says what the test says."""

    def __init__(self, counts: dict[int, int], topic: str = "test") -> None:
        self.topic_name = topic
        self.listeners: list[Callable[[ClusterSnapshot], None]] = []
        self.refreshes = 0
        self.brokers: dict[int, BrokerAddress] = {}
        self.snapshot = ClusterSnapshot()
        self.counts = counts

    def tell(self, counts: dict[int, int], brokers: dict[int, BrokerAddress]) -> None:
        self.counts, self.brokers = counts, brokers
        copies = {
            BrokerId(i): BrokerCopies(address, {}) for i, address in brokers.items()
        }
        puts = {self.topic_name: {BrokerId(i): n for i, n in counts.items()}}
        self.snapshot = ClusterSnapshot(
            self.snapshot.version + 1,
            MappingProxyType(copies),
            MappingProxyType(puts),
            MappingProxyType(puts),
            frozenset([self.topic_name]),
        )
        for listener in list(self.listeners):
            listener(self.snapshot)

    async def topic(
        self, name: str, *, deadline_s: float, takes_puts: bool = False
    ) -> ClusterSnapshot:
        assert takes_puts
        loop = asyncio.get_running_loop()
        while name != self.topic_name or not self.snapshot.put_partitions(name):
            if loop.time() >= deadline_s:
                raise NoBrokerError(f"no broker serves topic {name}")
            await asyncio.sleep(0.01)
        return self.snapshot

    def add_listener(
        self, callback: Callable[[ClusterSnapshot], None]
    ) -> Callable[[], None]:
        self.listeners.append(callback)
        return lambda: self.listeners.remove(callback)

    def request_refresh(self) -> None:
        self.refreshes += 1


class World:
    """Brokers, what is known of them, and one producer."""

    def __init__(self, brokers: Sequence[StandInBroker], partitions: int) -> None:
        self.brokers = brokers
        self.pool = StandInPool(brokers)
        self.metadata = FixedMetadata({})
        self.partitions = partitions
        self.producer: AsyncProducer
        self.everybody()

    def everybody(self) -> None:
        self.only(*self.brokers)

    def only(self, *brokers: StandInBroker) -> None:
        self.metadata.tell(
            {b.broker_id: self.partitions for b in brokers},
            {b.broker_id: b.address for b in brokers},
        )


def context_of(pool: Any, metadata: Any, clock: Clock) -> ClientContext:
    """Return the parts of a client that a producer uses."""
    unused: Any = None
    return ClientContext(clock, ClientOptions(), pool, metadata, unused, unused, unused)


@contextlib.asynccontextmanager
async def producing(
    *brokers: StandInBroker,
    partitions: int = 1,
    selector: Selector | None = None,
    is_mandatory: bool | None = None,
    **options: Any,
) -> AsyncIterator[World]:
    """Open a producer in a world of brokers; inside `run_virtually`."""
    world = World(brokers, partitions)
    world.producer = AsyncProducer(
        context_of(world.pool, world.metadata, VirtualClock()),
        ProducerOptions(**options),
        producer_id="tester",
        selector=selector,
        is_mandatory=is_mandatory,
    )
    async with world.producer:
        yield world


def at(partition: int, broker: int = 0, topic: str = "test") -> TopicPartition:
    return TopicPartition(topic, BrokerId(broker), partition)
