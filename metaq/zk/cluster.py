"""The cluster as clients see it: immutable snapshots, kept current by watches.

Theory of operation: `ClusterWatch` watches the brokers and, for each requested topic,
its two topic nodes and its record in the catalog. It watches names and payloads, so it
sees counts that change in place, which MetaQ's clients miss. A topic that is recorded
but not served is away: it exists, but cannot be read. The definition of an exchange of
the same name is watched too, because brokers register an exchange as a topic without
readers.

Each burst of changes makes one snapshot with the next version; a snapshot equal to the
last one is dropped. Nothing is created: a watch on a missing node fires when it
appears.

With `watch_names` it also watches the lists of all topics.

While ZooKeeper is unreachable the last snapshot stays valid: brokers work without
ZooKeeper, and so do clients.

    Invariant: the version grows with every snapshot; 0 means that nothing is known yet.

Source: docs/metaq-1.4/client.md 4.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from metaq.clock import Clock
from metaq.cluster_snapshot import BrokerCopies, ClusterSnapshot, Counts
from metaq.errors import ClosedError
from metaq.model import BrokerAddress, BrokerId
from metaq.zk.children import Settler, ValuesWatch, in_batches
from metaq.zk.errors import CoordinationTimeoutError, PayloadError
from metaq.zk.exchange_definitions import decode_exchange
from metaq.zk.paths import (
    LEADER_NAME,
    NodeKind,
    NodePaths,
    parse_broker_id,
    parse_follower,
    parse_role,
)
from metaq.zk.session import Cancel, ChildrenCallback, Coordinator
from metaq.zk.znodes import decode_address, decode_partition_count, decode_registration

_log = logging.getLogger(__name__)

PARTITIONS_MAX: Final = 100_000
"""Maximum number of partitions of a topic on a broker; more are an error."""
_TOPIC_KINDS: Final = (NodeKind.TOPIC_PUB, NodeKind.TOPIC_SUB)


def _decode_count(data: bytes) -> int:
    return _require_few(decode_registration(data).partition_count)


def _decode_recorded(data: bytes) -> int:
    return _require_few(decode_partition_count(data))


def _require_few(count: int) -> int:
    if count > PARTITIONS_MAX:
        raise PayloadError(f"expected at most {PARTITIONS_MAX} partitions, got {count}")
    return count


def _is_broker_id(name: str) -> bool:
    return parse_broker_id(name) is not None


def _is_copy(name: str) -> bool:
    return name == LEADER_NAME or parse_follower(name) is not None


def _is_role(name: str) -> bool:
    return parse_role(name) is not None


def _is_leader(name: str) -> bool:
    role = parse_role(name)
    return role is not None and role.is_leader


def _broker_of(name: str) -> BrokerId:
    """Return the broker in a node's name: `0-m`, `0-s1` (roles) or `0` (a record)."""
    return BrokerId(int(name.partition("-")[0]))


_WATCHED: Final[
    Mapping[NodeKind, tuple[Callable[[bytes], int], Callable[[str], bool]]]
] = {
    NodeKind.TOPIC_PUB: (_decode_count, _is_leader),
    NodeKind.TOPIC_SUB: (_decode_count, _is_role),
    NodeKind.RECORDED_PARTITIONS: (_decode_recorded, _is_broker_id),
}
"""Kind of a topic's nodes → decoder of the count, and filter of the names."""

SnapshotCallback = Callable[[ClusterSnapshot], None]


class SnapshotFeed:
    """The current snapshot of a cluster, and the callbacks for the next ones.

    Concurrency: everything on one event loop; callbacks are called on it.
    """

    def __init__(self) -> None:
        """Start with an empty snapshot."""
        self.snapshot = ClusterSnapshot()
        """The current snapshot; version 0 while nothing is known."""
        self._listeners: dict[object, SnapshotCallback] = {}
        self._changed = asyncio.Event()
        self._is_closed = False

    def add_listener(self, on_snapshot: SnapshotCallback) -> Cancel:
        """Call `on_snapshot` on the loop with each new snapshot, in order."""
        key = object()
        self._listeners[key] = on_snapshot

        def cancel() -> None:
            self._listeners.pop(key, None)

        return cancel

    async def wait_above(self, version: int, timeout_s: float) -> ClusterSnapshot:
        """Return the current snapshot, as soon as its version is above `version`.

        Raises:
            TimeoutError: there was no such snapshot in time.
            ClosedError: the feed is closed.
        """
        async with asyncio.timeout(timeout_s):
            while True:
                self._require_open()
                if self.snapshot.version > version:
                    return self.snapshot
                await self._changed.wait()

    def _require_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the watch on the cluster is closed")

    def _end(self) -> None:
        """Drop the listeners, and wake the waiting tasks."""
        self._is_closed = True
        self._listeners.clear()
        self._changed.set()

    def _offer(self, new: ClusterSnapshot) -> None:
        """Publish a snapshot, unless it equals the current one.

        Sets its version, and adds the brokers seen before.
        """
        old = self.snapshot
        new = replace(new, seen=old.seen.union(new.brokers), version=old.version)
        if new == old and old.version:
            return
        self.snapshot = replace(new, version=old.version + 1)
        _log.info(
            "cluster changed: version=%d brokers=%d topics=%d",
            self.snapshot.version,
            len(new.brokers),
            len(new.topics | new.puts.keys() | new.gets.keys()),
        )
        self._changed.set()
        self._changed = asyncio.Event()
        for callback in tuple(self._listeners.values()):
            # Separate calls, so that an exception in one does not stop the others.
            asyncio.get_running_loop().call_soon(callback, self.snapshot)


class ClusterWatch(SnapshotFeed):
    """Keeps a `ClusterSnapshot` current for a growing set of topics.

    Lifecycle: `open` once, then use, then `close`. The caller owns the coordinator,
    which may connect before or after `open`.
    """

    def __init__(
        self, coordinator: Coordinator, paths: NodePaths, *, clock: Clock
    ) -> None:
        """Create a watch; nothing is read until `open`."""
        super().__init__()
        self._coordinator = coordinator
        self._paths = paths
        self.clock = clock
        self._has_ids = False
        self._brokers: dict[BrokerId, ValuesWatch[BrokerAddress]] = {}
        self._topics: dict[str, dict[NodeKind, ValuesWatch[int]]] = {}
        self._exchanges: dict[str, bool | None] = {}
        """Topic → whether its name is that of an exchange; None: not read yet."""
        self._unread: dict[str, str] = {}
        self.unread_exchanges: Mapping[str, str] = MappingProxyType(self._unread)
        """Exchange whose definition cannot be read → the reason."""
        self._listed: dict[str, frozenset[str] | None] = {}
        """Path of a list of topics → its names; None: not read yet."""
        self._cancels: list[Cancel] = []
        self._settler = Settler(coordinator, self._is_complete, self._publish)

    def open(self) -> None:
        """Start to watch the brokers."""
        self._watch_children(self._paths.broker_ids(), self._on_ids)

    def _watch_children(self, path: str, callback: ChildrenCallback) -> None:
        self._cancels.append(self._coordinator.watch_children(path, callback))

    def close(self) -> None:
        """End all watches and wake the waiting tasks. May be repeated."""
        self._settler.cancel()
        for cancel in self._cancels:
            cancel()
        for watch in self._all_values():
            watch.cancel()
        self._end()

    def _all_values(self) -> Iterator[ValuesWatch[Any]]:
        """Yield the watches on brokers and topics."""
        yield from self._brokers.values()
        for watches in self._topics.values():
            yield from watches.values()

    # -- topics -----------------------------------------------------------------------

    def watch_topic(self, name: str) -> None:
        """Include this topic in snapshots; it need not exist.

        Raises:
            NodeNameError: ZooKeeper does not accept the name.
            ClosedError: the watch is closed.
        """
        self._require_open()
        if name not in self._topics:
            self._topics[name] = {
                kind: ValuesWatch(
                    self._coordinator,
                    self._paths.topic_children(kind, name),
                    decode,
                    self._settler.note,
                    wants=wants,
                )
                for kind, (decode, wants) in _WATCHED.items()
            }
            self._exchanges[name] = None
            path, on_data = self._paths.exchange(name), partial(self._on_exchange, name)
            self._cancels.append(self._coordinator.watch_data(path, on_data))

    def _on_exchange(self, name: str, data: bytes | None) -> None:
        self._unread.pop(name, None)
        try:
            self._exchanges[name] = (
                data is not None and not decode_exchange(data).is_deleted
            )
        except PayloadError as error:
            _log.warning(
                "exchange is not understood: exchange=%s error=%s", name, error
            )
            # Not a topic: it would look empty.
            self._exchanges[name], self._unread[name] = True, str(error)
        self._settler.note()

    def watch_names(self) -> None:
        """Include the names of all topics and exchanges in snapshots from now on.

        Raises:
            ClosedError: the watch is closed.
        """
        self._require_open()
        for path in (*map(self._paths.topics, _WATCHED), self._paths.exchanges()):
            if path not in self._listed:
                self._listed[path] = None
                self._watch_children(path, partial(self._on_names, path))

    def _on_names(self, path: str, names: tuple[str, ...] | None) -> None:
        self._listed[path] = frozenset(names or ())
        self._settler.note()

    async def wait_newer(self, version: int, *, deadline_s: float) -> ClusterSnapshot:
        """Return the current snapshot, as soon as its version is above `version`.

        Raises:
            CoordinationTimeoutError: there was no such snapshot before the deadline.
            ClosedError: the watch is closed.
        """
        try:
            left_s = deadline_s - self.clock.monotonic_s()
            return await self.wait_above(version, left_s)
        except TimeoutError:
            raise CoordinationTimeoutError(
                f"cluster: expected one after version {version}, got none in time"
            ) from None

    async def topics(self, *, deadline_s: float) -> frozenset[str]:
        """Read and return the names of all topics, served or recorded.

        A deleted topic may leave empty parent nodes; these are not counted.
        """
        recorded = await self._names([self._paths.recorded_topics()], deadline_s)
        parents = [self._paths.topics(kind) for kind in _TOPIC_KINDS]
        exchanges = await self._names([self._paths.exchanges()], deadline_s)
        named = await self._names(parents, deadline_s)
        others = sorted(named - recorded)

        async def copies(topic: str) -> frozenset[str]:
            # An exchange, even a deleted one, has no readers; a topic of its name has.
            kinds = [NodeKind.TOPIC_SUB] if topic in exchanges else _TOPIC_KINDS
            paths = [self._paths.topic_children(kind, topic) for kind in kinds]
            return await self._names(paths, deadline_s)

        found = await in_batches(copies, others)
        return recorded.union(topic for topic, names in found if names)

    async def _names(self, paths: Iterable[str], deadline_s: float) -> frozenset[str]:
        """Return the names of the children of all these nodes."""
        found: set[str] = set()
        for path in paths:
            found.update(await self._coordinator.children(path, deadline_s=deadline_s))
        return frozenset(found)

    # -- snapshots --------------------------------------------------------------------

    def _on_ids(self, names: tuple[str, ...] | None) -> None:
        self._has_ids = True
        wanted = {BrokerId(int(name)) for name in names or () if _is_broker_id(name)}
        for broker_id in self._brokers.keys() - wanted:
            self._brokers.pop(broker_id).cancel()
        for broker_id in sorted(wanted - self._brokers.keys()):
            self._brokers[broker_id] = ValuesWatch(
                self._coordinator,
                self._paths.broker(broker_id),
                decode_address,
                self._settler.note,
                wants=_is_copy,
            )
        self._settler.note()

    def _is_complete(self) -> bool:
        return (
            self._has_ids
            and None not in self._listed.values()
            and None not in self._exchanges.values()
            and all(watch.is_complete for watch in self._all_values())
        )

    def _publish(self) -> None:
        gets = self._read_counts(NodeKind.TOPIC_SUB)
        recorded = self._read_counts(NodeKind.RECORDED_PARTITIONS)
        exchanges = {name for name, is_there in self._exchanges.items() if is_there}
        self._offer(
            ClusterSnapshot(
                brokers=MappingProxyType(self._read_brokers()),
                puts=self._read_counts(NodeKind.TOPIC_PUB),
                gets=gets,
                recorded=recorded,
                exchanges=frozenset(exchanges - gets.keys() - recorded.keys()),
                topics=frozenset(
                    topic
                    for topic, watches in self._topics.items()
                    if all(watch.has_names for watch in watches.values())
                ),
                names=self._read_names(),
            )
        )

    def _read_names(self) -> frozenset[str] | None:
        read = [names for names in self._listed.values() if names is not None]
        if not read or len(read) < len(self._listed):
            return None
        return frozenset().union(*read)

    def _read_brokers(self) -> dict[BrokerId, BrokerCopies]:
        brokers = {}
        for broker_id, watch in sorted(self._brokers.items()):
            copies = watch.values
            followers = {
                number: address
                for name, address in copies.items()
                if (number := parse_follower(name)) is not None
            }
            if copies:
                brokers[broker_id] = BrokerCopies(
                    leader=copies.get(LEADER_NAME),
                    followers=MappingProxyType(dict(sorted(followers.items()))),
                )
        return brokers

    def _read_counts(self, kind: NodeKind) -> Counts:
        counts = {}
        for topic, watches in sorted(self._topics.items()):
            by_broker: dict[BrokerId, int] = {}
            for name, count in watches[kind].values.items():
                broker_id = _broker_of(name)
                by_broker[broker_id] = max(by_broker.get(broker_id, 0), count)
            if by_broker:
                counts[topic] = MappingProxyType(dict(sorted(by_broker.items())))
        return MappingProxyType(counts)
