"""A member as MetaQ's Java client is one: its nodes, commands and way to rebalance.

Written from docs/metaq-1.4/client.md 14, with kazoo and a plain socket, and nothing of
`metaq.client`: on any change it stops fetching, commits, releases what it lost, claims
what is new, and gives everything back when another member still owns a part of it.
"""

import socket
import threading
import time
from collections.abc import Mapping, Sequence

from kazoo.client import KazooClient
from kazoo.exceptions import NodeExistsError

from metaq.model import BrokerId, Message, MessageId, Offset, TopicPartition
from metaq.record.layout import HEADER, HEADER_BYTES
from tests.matrix.ledger import Event, Ledger

SYNC_S = 1.0
"""zkSyncTimeMs: pause after a rebalance that failed; 5 s by default. It gives up after
seven of them, and a busy machine has to let others release within."""
TRIES = 7
COMMIT_S = 0.3
FETCH_BYTES = 1 << 16


class _Broker:
    """One connection that asks one thing at a time."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), 40)
        self._file = self._socket.makefile("rb")
        self._opaque = 0

    def get(self, topic: str, group: str, partition: int, offset: int) -> bytes:
        """Return stored bytes from there on; b"" when there are none yet."""
        self._opaque += 1
        line = f"get {topic} {group} {partition} {offset} {FETCH_BYTES} {self._opaque}"
        self._socket.sendall(line.encode() + b"\r\n")
        words = self._file.readline().split()
        if words[0] == b"value":
            return self._file.read(int(words[1]))
        body = self._file.read(int(words[2]))
        assert words[1] == b"404", body
        return b""

    def close(self) -> None:
        self._file.close()
        self._socket.close()


class JavaMember(threading.Thread):
    """Reads until told to leave; keeps the same ledger as the other members."""

    consumer = None

    def __init__(
        self,
        name: str,
        zookeeper: str,
        group: str,
        partitions: Sequence[TopicPartition],
        ports: Mapping[int, int],
        ledger: Ledger,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.error: BaseException | None = None
        self.is_ok = False
        self._zookeeper = KazooClient(zookeeper)
        self._id = f"{group}_{name}"
        self._group = group
        self._topic = partitions[0].topic
        self._partitions = sorted(p.name for p in partitions)
        self._ports = ports
        self._ledger = ledger
        self.leaving = threading.Event()
        self._changed = threading.Event()
        self._offsets: dict[str, tuple[int, int]] = {}
        """Claimed partition → message id and offset."""
        self._modified: set[str] = set()
        self._root = f"/meta/consumers/{group}"

    def run(self) -> None:
        self._zookeeper.start(timeout=20)
        brokers = {number: _Broker(port) for number, port in self._ports.items()}
        try:
            self._join()
            commit_at_s = 0.0
            while not self.leaving.is_set():
                if self._changed.is_set():
                    self._changed.clear()
                    self.is_ok = self._rebalance()
                for name in tuple(self._offsets):
                    self._fetch(name, brokers[int(name.partition("-")[0])])
                if time.monotonic() > commit_at_s:
                    self._commit()
                    commit_at_s = time.monotonic() + COMMIT_S
                time.sleep(0.005)
            self._commit()
            self._release(tuple(self._offsets))
        except BaseException as error:
            self.error = error
        finally:
            self._zookeeper.stop()
            self._zookeeper.close()
            for broker in brokers.values():
                broker.close()

    def leave(self) -> None:
        """Leave the group in order, and wait for it."""
        self.leaving.set()
        self.join(30)
        assert not self.is_alive()
        assert self.error is None, self.error

    def _join(self) -> None:
        self._zookeeper.ensure_path(f"{self._root}/ids")
        path = f"{self._root}/ids/{self._id}"
        self._zookeeper.create(path, self._topic.encode(), ephemeral=True)
        self._watch(None)

    def _watch(self, _event: object) -> None:
        if not self.leaving.is_set():
            self._zookeeper.get_children(f"{self._root}/ids", watch=self._watch)
            self._changed.set()

    # -- rebalance --------------------------------------------------------------------

    def _rebalance(self) -> bool:
        for _ in range(TRIES):
            if self._try():
                return True
            self._release(tuple(self._offsets))
            time.sleep(SYNC_S)
        return False

    def _try(self) -> bool:
        self._commit()
        mine = self._assignment()
        self._release([name for name in self._offsets if name not in mine])
        for name in mine:
            if name not in self._offsets and not self._claim(name):
                return False
        return True

    def _assignment(self) -> list[str]:
        """Return what strategy DEFAULT gives us (docs/metaq-1.4/client.md 14.7)."""
        members = sorted(self._zookeeper.get_children(f"{self._root}/ids"))
        n, e = divmod(len(self._partitions), len(members))
        i = members.index(self._id)
        start = n * i + min(i, e)
        return self._partitions[start : start + n + (1 if i < e else 0)]

    def _claim(self, name: str) -> bool:
        path = f"{self._root}/owners/{self._topic}/{name}"
        try:
            self._zookeeper.create(
                path, self._id.encode(), ephemeral=True, makepath=True
            )
        except NodeExistsError:
            return False
        path = f"{self._root}/offsets/{self._topic}/{name}"
        message_id, offset = -1, 0
        if self._zookeeper.exists(path):
            text = self._zookeeper.get(path)[0].decode()
            number, _, last = text.rpartition("-")
            message_id, offset = int(number), int(last)
        self._note("assign", name)
        self._offsets[name] = (message_id, offset)
        return True

    def _release(self, names: Sequence[str]) -> None:
        for name in names:
            del self._offsets[name]
            self._note("revoke", name)
            self._zookeeper.delete(f"{self._root}/owners/{self._topic}/{name}")

    def _commit(self) -> None:
        for name in tuple(self._modified & self._offsets.keys()):
            message_id, offset = self._offsets[name]
            path = f"{self._root}/offsets/{self._topic}/{name}"
            self._zookeeper.ensure_path(path)
            self._zookeeper.set(path, f"{message_id}-{offset}".encode())
            self._note("commit", name, offset)
        self._modified.clear()

    # -- messages ---------------------------------------------------------------------

    def _fetch(self, name: str, broker: _Broker) -> None:
        partition = self._named(name)
        _id, offset = self._offsets[name]
        data = broker.get(self._topic, self._group, partition.partition, offset)
        messages = []
        position = 0
        while position + HEADER_BYTES <= len(data):
            length, _crc, message_id, flag = HEADER.unpack_from(data, position)
            end = position + HEADER_BYTES + length
            if end > len(data):
                break
            assert flag == 0
            messages.append(
                Message(
                    self._topic,
                    data[position + HEADER_BYTES : end],
                    None,
                    MessageId(message_id),
                    partition,
                    Offset(offset + position),
                    Offset(offset + end),
                )
            )
            position = end
        if messages:
            self._ledger.deliver(self.name, messages)
            self._offsets[name] = (messages[-1].id, offset + position)
            self._modified.add(name)

    def _named(self, name: str) -> TopicPartition:
        broker, _, number = name.partition("-")
        return TopicPartition(self._topic, BrokerId(int(broker)), int(number))

    def _note(self, kind: str, name: str, offset: int = 0) -> None:
        self._ledger.events.append(Event(kind, self.name, self._named(name), offset))
