"""Three replicas as processes, a ZooKeeper, and what tests do to them."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import permutations
from pathlib import Path
from typing import Any, Final, Self

from metaq.cli.cluster import Target
from metaq.cli.replicas import at_set, init
from metaq.client import Client
from metaq.errors import MetaqError
from metaq.record.layout import HEADER, HEADER_BYTES
from metaq.replication.election import PresenceState
from metaq.replication.record import SetRecord
from metaq.replication.set_nodes import SetView
from metaq.testing.proxy import Proxy
from metaq.testing.servers import reserve_port
from tests.cluster.handled import Orders
from tests.rigs.waiting import wait_until
from tests.rigs.zookeeper import HandledZooKeeper

ROOT: Final = Path(__file__).parents[2]
TOPIC: Final = "cluster"
PARTITIONS: Final = 3
BROKER_ID: Final = 7
SESSION_MS: Final = 2_000
"""Shorter than by default: a test waits for each failover."""
SESSION_S: Final = SESSION_MS / 1000
CALM_MS: Final = 15_000
"""Session of a set in which nobody else is to lead, however busy the machine is."""
SETTLE_S: Final = 120.0
"""Everybody goes on within so long after the last fault; a busy machine takes time."""
STOP_S: Final = 120.0
SEGMENT_BYTES: Final = 4 << 20

SERVER_INI: Final = """\
[system]
brokerId={broker_id}
numPartitions={partitions}
serverPort={port}
hostName=127.0.0.1
dataPath={data}
unflushThreshold=0
unflushInterval=10000
maxSegmentSize={segment_bytes}
maxTransferSize=1024*1024
[zookeeper]
zk.zkConnect={zookeeper}
zk.zkSessionTimeoutMs={session_ms}
zk.zkConnectionTimeoutMs=20000
{section}
[topic={topic}]
"""
SECTION: Final = "[replication]\nreplicaId={number}"


class ReplicaProcess:
    """One replica: `metaq broker` on its own directory and port. Owner: `Cluster`."""

    def __init__(
        self,
        number: int,
        directory: Path,
        zookeeper_port: int,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        session_ms: int = SESSION_MS,
    ) -> None:
        self.number = number
        self.link = Proxy("127.0.0.1", zookeeper_port)
        """Between it and ZooKeeper."""
        self.link.start()
        self.port = self.own_port = reserve_port(self)
        """Advertised, and listened at; they differ where there is a `front`."""
        self.front: Proxy | None = None
        """Between clients and it."""
        self.orders: Orders | None = None
        """Faults that it has, if it is a process that may have some."""
        self._orders_path = directory / f"orders{number}.json"
        directory.mkdir(parents=True, exist_ok=True)
        self.data = directory / f"data{number}"
        self.ini = directory / f"server{number}.ini"
        self.log = directory / f"replica{number}.log"
        self.is_frozen = False
        self._child: subprocess.Popen[bytes] | None = None
        self._segment_bytes = segment_bytes
        self._session_ms = session_ms
        self.configure()

    def configure(self, **changed: object) -> None:
        """Write its settings, some of them otherwise."""
        settings = {
            "broker_id": BROKER_ID,
            "partitions": PARTITIONS,
            "port": self.port,
            "data": self.data,
            "zookeeper": f"127.0.0.1:{self.link.port}",
            "session_ms": self._session_ms,
            "segment_bytes": self._segment_bytes,
            "section": SECTION.format(number=self.number),
            "topic": TOPIC,
        }
        self.ini.write_text(SERVER_INI.format(**(settings | changed)))

    def put_front(self, front: Proxy) -> None:
        """Advertise a proxy, which leads here."""
        self.front, self.port = front, front.port
        self.configure()
        self.order(listen_port=self.own_port)

    def order(self, **changed: Any) -> None:
        """Have it do something otherwise, at once where it runs by orders already."""
        self.orders = replace(self.orders or Orders(), **changed)
        self.orders.write(self._orders_path)

    @property
    def is_running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    @property
    def pid(self) -> int:
        """Return the process, which was started."""
        assert self._child is not None, self.number
        return self._child.pid

    def start(self) -> None:
        """Start it, if it is not running; it may take its time to be there."""
        if self.is_running:
            return
        module = ["metaq"]
        if self.orders is not None:
            module = ["tests.cluster.handled", str(self._orders_path)]
        command = [sys.executable, "-m", *module, "broker", "--config", str(self.ini)]
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def kill(self) -> None:
        """End it as the kernel does."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
        self.is_frozen = False

    def freeze(self) -> None:
        """Stop its processor time: connections stay open, and nothing is answered."""
        self._signal(signal.SIGSTOP)
        self.is_frozen = True

    def thaw(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)
        self.is_frozen = False

    def ask_to_end(self) -> None:
        """Have it end in good order; see `wait`."""
        self._signal(signal.SIGTERM)

    def wait(self) -> int:
        """Return its exit code."""
        assert self._child is not None
        return self._child.wait(STOP_S)

    def wipe(self) -> None:
        """Lose its disk; it is not running."""
        assert not self.is_running
        shutil.rmtree(self.data)

    def mend(self) -> None:
        """Have it run, whatever happened to it."""
        for proxy in (self.link, self.front):
            if proxy is not None:
                proxy.pass_all()
                proxy.accept()
        if self.is_frozen:
            self.thaw()
        self.start()

    def read_log(self) -> dict[int, dict[int, bytes]]:
        """Return partition → offset → payload of all that is in its segments."""
        return {
            number: dict(_records(self.data / f"{TOPIC}-{number}"))
            for number in range(PARTITIONS)
        }

    def files(self) -> dict[str, bytes]:
        """Return the bytes of its logs by file.

        A leader makes the next segment after it was full, a follower before its first
        byte: one without bytes is no difference.
        """
        return {
            str(path.relative_to(self.data)): path.read_bytes()
            for path in sorted(self.data.glob(f"{TOPIC}-*/*.meta"))
            if path.stat().st_size
        }

    def _signal(self, number: signal.Signals) -> None:
        if self.is_running:
            assert self._child is not None
            self._child.send_signal(number)


def _records(directory: Path) -> Iterator[tuple[int, bytes]]:
    for path in sorted(directory.glob("*.meta")):
        data, base, at = path.read_bytes(), int(path.stem), 0
        while at < len(data):
            length, _crc, _id, _flag = HEADER.unpack_from(data, at)
            begin = at + HEADER_BYTES
            yield base + at, data[begin : begin + length]
            at = begin + length


class Cluster:
    """A set of three replicas and its ZooKeeper. A context manager; owner: a test."""

    def __init__(
        self,
        directory: Path,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        session_ms: int = SESSION_MS,
        has_links: bool = False,
        orders: Orders | None = None,
        is_begun: bool = True,
    ) -> None:
        """Describe a set.

        Args:
            directory: of all files.
            segment_bytes: size of a segment.
            session_ms: time-out of the replicas' sessions.
            has_links: a proxy is on the way from each replica to each other one, and
                from clients to each.
            orders: of each replica; None: all run the product alone.
            is_begun: it is made and started at once; else `begin` does it.
        """
        self._is_begun = is_begun
        self.directory = directory
        port = reserve_port(self)
        self.zookeeper = HandledZooKeeper(directory / "zookeeper", port=port)
        self.replicas = {
            number: ReplicaProcess(
                number,
                directory,
                port,
                segment_bytes=segment_bytes,
                session_ms=session_ms,
            )
            for number in (1, 2, 3)
        }
        self.links: dict[tuple[int, int], Proxy] = {}
        """(Replica that connects, replica that is connected to) → the way."""
        self.target = Target(self.zookeeper.address, "/meta", (), 20.0)
        if orders is not None:
            for replica in self.replicas.values():
                replica.order(**asdict(orders))
        if has_links:
            self._put_links()

    def _put_links(self) -> None:
        for one in self.replicas.values():
            front = Proxy("127.0.0.1", one.own_port)
            front.start()
            one.put_front(front)
        for one, other in permutations(self.replicas.values(), 2):
            link = self.links[one.number, other.number] = Proxy(
                "127.0.0.1", other.own_port
            )
            link.start()
            ports = one.orders.peer_ports if one.orders is not None else {}
            one.order(peer_ports={**ports, str(other.port): link.port})

    def __enter__(self) -> Self:
        self.zookeeper.start()
        try:
            if self._is_begun:
                self.begin()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        for replica in self.replicas.values():
            replica.kill()
        for proxy in self.proxies():
            proxy.stop()
        self.zookeeper.stop()

    def begin(self) -> None:
        """Make the set of what replica 1 has, start all, and wait for all."""
        ini = self.replicas[1].ini
        init(ini, {}, others=(2, 3), min_in_sync=2, is_sure=True)
        for replica in self.replicas.values():
            replica.start()
        self.wait_whole()

    def proxies(self) -> list[Proxy]:
        """Return all proxies that there are."""
        of_each = [p for r in self.replicas.values() for p in (r.link, r.front)]
        return [*self.links.values(), *(p for p in of_each if p is not None)]

    # -- what ZooKeeper has -----------------------------------------------------------

    def view(self) -> SetView:
        """Return the nodes of the set."""
        return at_set(self.target, BROKER_ID, lambda nodes: nodes.read(synced=True))

    @property
    def record(self) -> SetRecord:
        record = self.view().view.record
        assert record is not None
        return record

    def leader(self) -> int:
        """Return who leads; waits until one does that this process has not killed."""
        found: list[int] = []

        def looks() -> bool:
            leader = self.view().view.leader
            if leader is None:
                return False
            replica = self.replicas[leader.replica]
            found[:] = [leader.replica]
            return replica.is_running and not replica.is_frozen

        wait_until(looks, SETTLE_S, self.describe)
        return found[0]

    def followers(self) -> list[int]:
        leader = self.leader()
        return [number for number in self.replicas if number != leader]

    def wait_whole(self) -> None:
        """Wait until all are ready, in sync and without known damage, and one leads."""

        def looks() -> bool:
            view = self.view()
            record, shown = view.view.record, view.shown.values()
            ready = [s for s in shown if s.presence.state is PresenceState.READY]
            return (
                record is not None
                and len(record.in_sync) == len(ready) == len(self.replicas)
                and view.view.leader is not None
                and not any(s.presence.flag or s.presence.damaged for s in ready)
            )

        wait_until(looks, SETTLE_S, self.describe)

    def describe(self) -> str:
        """Return what there is, and the ends of the logs of all replicas."""
        tails = []
        for number, replica in self.replicas.items():
            lines = replica.log.read_text().splitlines() if replica.log.exists() else []
            kept = [line for line in lines if "segment rolled" not in line]
            head = f"-- replica {number}, running={replica.is_running}"
            tails.append("\n".join([head, *kept[-25:]]))
        try:
            nodes = repr(self.view())
        except MetaqError as error:
            nodes = repr(error)
        return "\n".join([nodes, *tails])

    # -- what is done to it -----------------------------------------------------------

    def mend(self) -> None:
        """Let all run, and wait until the set is whole."""
        for link in self.links.values():
            link.pass_all()
            link.accept()
        for replica in self.replicas.values():
            replica.mend()
        self.wait_whole()

    def stop(self) -> None:
        """End all replicas in good order, at once."""
        for replica in self.replicas.values():
            replica.ask_to_end()
        for replica in self.replicas.values():
            replica.wait()

    def client(self, **options: Any) -> Client:
        """Return a client that finds the set in ZooKeeper; not started."""
        return Client(
            zookeeper=self.zookeeper.address,
            **{"reconnect_max_s": 0.2, "session_timeout_s": 10.0, **options},
        )
