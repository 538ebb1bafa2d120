"""Three brokers of one set on one loop: disks and ZooKeeper are in memory.

`run` gives a scenario a set in which replica 1 has begun and 2 and 3 have joined it.
Disks are those of `tests.rigs.fs`: one that is killed leaves what it had written.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest

from metaq.broker.app import Broker
from metaq.clock import Clock, SystemClock
from metaq.errors import NoBrokerError, StorageError
from metaq.fs import FileSystem
from metaq.model import BrokerAddress, BrokerId, Millis
from metaq.peer.connection import BrokerConnection
from metaq.replication import follow_task
from metaq.replication.facts import ReplicaFacts, decode_facts
from metaq.replication.node import ReplicaNode
from metaq.replication.operator import begin_set
from metaq.replication.record import (
    NO_REPLICA,
    SetRecord,
    decode_record,
    make_record,
)
from metaq.replication.replica import ReplicaRole, SetFile
from metaq.replication.set_file import write_set_file
from metaq.replication.set_nodes import SetNodes
from metaq.storage.partition_log import PartitionLog
from metaq.testing.proxy import Proxy
from metaq.testing.servers import HOST, reserve_port
from metaq.testing.zk import MemoryCoordinator, MemoryZooKeeper
from metaq.zk.paths import NodePaths
from tests.rigs.broker import CONFIG, make_config
from tests.rigs.fs import FaultyFileSystem
from tests.rigs.inside import abort
from tests.rigs.waiting import until

SET_INI: Final = CONFIG.replace("zk.zkEnable=false", "zk.zkEnable=true")
DATA: Final = Path("/data")
RECORD: Final = "/meta/replicas/0"
LAG_MS: Final = 500
"""Shorter than by default: tests wait for it."""


SOON_S: Final = 120.0
"""Bound on each wait for the set, seconds."""


async def soon(
    condition: Callable[[], object], show: Callable[[], object] | None = None
) -> None:
    """Wait until a condition is true."""
    await until(condition, SOON_S, show)


class OnePort:
    """Owner of a port for `reserve_port`."""


class Replica:
    """One broker of the set, its disk, and its session."""

    def __init__(
        self,
        number: int,
        zookeeper: MemoryZooKeeper,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.number = number
        self.settings = settings or {}
        """Of its broker, besides those of every replica."""
        self.disk = FaultyFileSystem(has_loop_syncs=True)
        self.clock = SystemClock()
        """Of its present life: no other life, and no other replica, has the object."""
        self.connections: list[BrokerConnection] = []
        """From its present life to other replicas."""
        self.zookeeper = zookeeper
        self.broker: Broker | None = None
        self.starting: Broker | None = None
        """The broker from before its start on."""
        self.client: MemoryCoordinator
        self.saved: list[SetFile] = []
        """Every `set` file that was written, oldest first."""
        self.save_error: StorageError | None = None
        """While set, writes of the `set` file fail with it."""
        self.refused_count = 0
        """Writes that failed."""
        self.failure: BaseException | None = None
        self._port = OnePort()
        self.port = reserve_port(self._port)

    @property
    def address(self) -> str:
        assert self.broker is not None, f"replica {self.number} does not run"
        return self.broker.address

    def save(self, fs: FileSystem, directory: Path, file: SetFile) -> None:
        """Write the `set` file in the place of the broker."""
        if self.save_error is not None:
            self.refused_count += 1
            raise self.save_error
        write_set_file(fs, directory, file)
        self.saved.append(file)

    @property
    def node(self) -> ReplicaNode:
        assert self.broker is not None, f"replica {self.number} does not run"
        part = self.broker.context.replica
        assert part is not None, f"replica {self.number} has not begun"
        node: Any = part
        assert isinstance(node.node, ReplicaNode)
        return node.node

    @property
    def role(self) -> str:
        return self.node.facts().role

    def log(self, topic: str = "test", partition: int = 0) -> PartitionLog | None:
        assert self.broker is not None
        return self.broker.context.topics.find_log(topic, partition)

    async def start(self, *, loses: bool | None = None) -> None:
        """Start it, and wait for that.

        Args:
            loses: its first change in ZooKeeper gets no answer; whether that is carried
                out.
        """
        settings = {
            "scrubBytesPerS": "0",
            "replicaId": str(self.number),
            "replicaLagTimeoutMs": str(LAG_MS),
            "serverPort": str(self.port),
            **self.settings,
        }
        clock = self.clock = SystemClock()
        self.client = self.zookeeper.coordinator(clock)
        self.client.loses = loses
        broker = self.starting = Broker(
            make_config(DATA, settings, SET_INI),
            clock=clock,
            fs=self.disk,
            coordinator=self.client,
            choose=lambda count: count - 1,
        )
        await broker.start()
        self.broker = broker

    async def stop(self) -> None:
        """Stop in good order; a failure of a part is kept."""
        broker, self.broker = self.broker, None
        if broker is not None:
            await broker.stop()
            self.failure = broker.failure

    def cut_off(self, disk: FaultyFileSystem | None = None) -> int:
        """Have nobody hear from its broker any more; return the number of its session.

        The next start is with a disk as this one is now, or with another one. The
        session lives on. What is left of the broker is for `stop`.
        """
        left = self.disk.snapshot() if disk is None else disk
        self.disk.go_on()
        self.disk, session = left, self.client.status.session_id
        self.clock, connections = SystemClock(), self.connections
        self.connections = []
        self.zookeeper.suspend(self.client)
        self.zookeeper.abandon(self.client)
        assert self.broker is not None
        for each in self.broker.sessions:
            each.abort("killed")
        for connection in connections:
            abort(connection)
        return session

    async def kill(self) -> int:
        """End it as `kill -9` does; return the number of its session, which lives on.

        Its disk is as it was at that moment.
        """
        session = self.cut_off()
        await self.stop()
        return session


class Links:
    """The ways from each replica to each other one, by proxies."""

    def __init__(self, rig: "Replicas") -> None:
        self.rig = rig
        self.proxies: dict[tuple[int, int], Proxy] = {}

    def begin(self, until: contextlib.ExitStack) -> None:
        """Lead all that replicas say to each other over proxies."""
        for number in self.rig.all:
            for other in self.rig.all.keys() - {number}:
                proxy = Proxy(HOST, self.rig[other].port)
                self.proxies[number, other] = until.enter_context(proxy)

    def of(self, number: int) -> list[Proxy]:
        """Return the ways from and to a replica."""
        return [proxy for pair, proxy in self.proxies.items() if number in pair]

    def way(self, source: Replica, address: BrokerAddress) -> BrokerAddress:
        """Return where a replica finds the one at this address."""
        for (number, other), proxy in self.proxies.items():
            if number == source.number and self.rig[other].port == address.port:
                return proxy.address
        return address


class Replicas:
    """All replicas of one set, and what a test does to them."""

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        self.zookeeper = MemoryZooKeeper()
        self.all = {k: Replica(k, self.zookeeper, settings) for k in (1, 2, 3)}
        self.links = Links(self)

    def __getitem__(self, number: int) -> Replica:
        return self.all[number]

    @property
    def running(self) -> list[Replica]:
        return [each for each in self.all.values() if each.broker is not None]

    async def init(self, number: int = 1, *, minimum: int = 2) -> None:
        """Begin a set with the disk of one replica."""
        disk = self[number].disk
        disk.make_directory(DATA)
        record = make_record(
            "s1", number, set(self.all), min_in_sync=minimum, nonce="init"
        )
        record, member = begin_set(
            disk, [DATA], record, number, Millis(0), found=None, draw=os.urandom
        )
        async with self.operator() as nodes:
            await nodes.create_record(record, {number: member})

    @contextlib.asynccontextmanager
    async def operator(self) -> AsyncIterator[SetNodes]:
        """Have the nodes of the set, as a command of an operator has them."""
        clock = SystemClock()
        client = self.zookeeper.coordinator(clock)
        client.start()
        await soon(lambda: client.status.session_id)
        paths = NodePaths("/meta")
        yield SetNodes(client, paths, BrokerId(0), NO_REPLICA, clock=clock)
        await client.stop(deadline_s=clock.monotonic_s())

    async def start(self, *numbers: int) -> None:
        await asyncio.gather(*(self[k].start() for k in numbers or self.all))

    async def stop(self) -> None:
        for each in self.running:
            await each.stop()

    # -- what there is ----------------------------------------------------------------

    @property
    def record(self) -> SetRecord:
        return decode_record(self.zookeeper.nodes[RECORD].data)

    def follower(self) -> int:
        """Return a replica that runs and does not lead."""
        return next(each.number for each in self.running if not each.node.epoch)

    async def facts(self, number: int) -> ReplicaFacts:
        """Return what a replica says of itself."""
        return decode_facts((await self.ask(number, b"stats replica\r\n")).decode())

    def leader(self) -> int:
        """Return who takes puts; 0: nobody."""
        leading = [each.number for each in self.running if each.node.epoch]
        return max(leading, key=lambda k: self[k].node.epoch, default=0)

    async def in_sync(self, *numbers: int) -> int:
        """Wait until these and no others are in sync; return who leads them.

        Where they are two or more, puts are taken then.
        """

        def are_in_sync() -> bool:
            leader = self.leader()
            if not leader or self.record.in_sync != set(numbers):
                return False
            broker = self[leader].broker
            assert broker is not None
            return len(numbers) < 2 or broker.context.topics.refusal is None

        await soon(are_in_sync, show=self.describe)
        return self.leader()

    async def role(self, number: int, *roles: ReplicaRole) -> None:
        """Wait for a role."""
        await soon(lambda: self[number].role in roles, show=self.describe)

    async def led(self, *, after: int = 0) -> int:
        """Wait for a leader whose epoch is above this one, and return it."""
        await soon(
            lambda: (now := self.leader()) and self[now].node.epoch > after,
            show=self.describe,
        )
        return self.leader()

    def describe(self) -> str:
        lines = [str(self.record) if RECORD in self.zookeeper.nodes else "no record"]
        for each in self.running:
            lines.append(f"{each.number}: {each.node.facts()}")
        return "\n".join(lines)

    # -- what clients ask -------------------------------------------------------------

    async def ask(self, number: int, command: bytes) -> bytes:
        """Return the answer of a replica to a command; b"" if it hangs up."""
        broker = self[number].starting
        assert broker is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", broker.port)
        try:
            writer.write(command)
            head = await reader.readline()
            words = head.split()
            if words[:1] == [b"STATS"]:
                return head + await reader.readuntil(b"END\r\n")
            size = {b"result": 2, b"value": 1}.get(words[0]) if words else None
            if size is None:
                return head
            return head + await reader.readexactly(int(words[size]))
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def put(
        self,
        number: int,
        payload: bytes = b"hello",
        place: str = "test 0",
        flag: int = 0,
    ) -> bytes:
        """Put a record to a partition of a replica; return its answer."""
        head = b"put %s %d %d 9\r\n" % (place.encode(), len(payload), flag)
        return await self.ask(number, head + payload)

    async def store(
        self, payload: bytes = b"hello", place: str = "test 0", flag: int = 0
    ) -> bytes:
        """Put a record; a busy machine may take a follower for one that is late.

        Returns:
            The answer of the leader that has it.
        """
        until_s = asyncio.get_running_loop().time() + SOON_S
        while b" 200 " not in (
            answer := await self.put(self.leader(), payload, place, flag)
        ):
            assert b" 503 " in answer, answer
            assert asyncio.get_running_loop().time() < until_s, answer
            await asyncio.sleep(0.05)
        return answer

    async def equal(self) -> None:
        """Wait until all running replicas have the same bytes."""

        def ends() -> set[tuple[int, int] | None]:
            logs = [each.log() for each in self.running]
            return {
                None if log is None else (log.synced_end, log.high_watermark)
                for log in logs
            }

        await soon(lambda: len(ends()) == 1 and None not in ends(), show=self.describe)
        assert len({self.bytes_of(each.number) for each in self.running}) == 1

    def segments(self, number: int, name: str) -> list[Path]:
        """Return the files of a partition on a disk, by their offsets."""
        directory, disk = DATA / name, self[number].disk
        names = disk.names_in(directory)
        return [directory / each for each in names if each.endswith(".meta")]

    def bytes_of(self, number: int, name: str = "test-0") -> bytes:
        """Return the bytes of a partition on a disk."""
        disk = self[number].disk
        with disk.held():
            return b"".join(disk.content(path) for path in self.segments(number, name))


Scenario: TypeAlias = Callable[[Replicas], Awaitable[None]]


@contextlib.asynccontextmanager
async def replicas(
    *,
    are_started: bool = True,
    times: Mapping[str, object] | None = None,
    settings: Mapping[str, str] | None = None,
    has_links: bool = False,
) -> AsyncIterator[Replicas]:
    """Have a set inside the block, of which replica 1 has begun.

    Args:
        are_started: all three are in sync.
        times: names of constants of the package, and other values for them.
        settings: of all brokers.
        has_links: replicas reach each other by `links`.
    """
    rig = Replicas(settings)
    connect = follow_task.connect

    async def dial(address: BrokerAddress, clock: Clock) -> BrokerConnection:
        """Connect, unless the process that does it has been killed."""
        source = next((r for r in rig.all.values() if r.clock is clock), None)
        if source is None:
            raise NoBrokerError("killed")
        connection = await connect(rig.links.way(source, address), clock)
        if source.clock is not clock:
            abort(connection)
            raise NoBrokerError("killed")
        source.connections = [each for each in source.connections if each.is_open]
        source.connections.append(connection)
        return connection

    def save(fs: FileSystem, directory: Path, file: SetFile) -> None:
        owners = [each for each in rig.all.values() if each.disk is fs]
        write = owners[0].save if owners else write_set_file
        write(fs, directory, file)

    places = {
        "metaq.replication.follow_task.connect": dial,
        # The socket of the administration needs a real disk.
        "metaq.broker.admin.AdminServer.on_start": _nothing,
        "metaq.replication.store.write_set_file": save,
        "metaq.broker.replica_part.write_set_file": save,
        **(times or {}),
    }
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as until:
        if has_links:
            rig.links.begin(until)
        for name, value in places.items():
            patch.setattr(name, value)
        try:
            await rig.init()
            if are_started:
                await rig.start()
                await rig.in_sync(1, 2, 3)
            yield rig
        finally:
            await rig.stop()


def run(
    scenario: Scenario,
    *,
    are_started: bool = True,
    times: Mapping[str, object] | None = None,
) -> None:
    """Run a scenario on a set of three, on a loop of its own."""

    async def main() -> None:
        async with replicas(are_started=are_started, times=times) as rig:
            await scenario(rig)

    asyncio.run(main())


async def _nothing(_self: object) -> None:
    return None
