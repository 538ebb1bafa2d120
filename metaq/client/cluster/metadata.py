"""Metadata of the cluster, from ZooKeeper or from brokers.

Producers and consumers read an immutable `ClusterSnapshot`, and are notified of each
new one. Its source is ZooKeeper (`ZooKeeperMetadata`), which reports every change, or
brokers given by address (`AddressMetadata`), which are asked every `metadata_s` and
after failed requests.

Theory of operation of the latter. Each address has its own task, so that a broker that
does not answer delays no other. The first snapshot is published when every broker has
answered or failed, after SETTLE_S at the latest: a reader of a whole topic should not
see the partitions of the first broker only. Later, every answer that changes something
causes a new snapshot. A broker that cannot be reached is missing from `brokers`; its
last answer counts as its record, so that its partitions do not seem to vanish. A broker
that has never answered is `silent`: it may have partitions of every topic.

    Invariant: the version increases with every snapshot; 0 means that nothing is known.

Source: docs/metaq-1.4/client.md 4 and 7.6.
"""

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Final, Protocol

from metaq.client.cluster.broker_facts import BrokerFacts, parse_facts
from metaq.client.cluster.presence import require_all_there
from metaq.client.errors import NoTopicError
from metaq.client.names import near_topics
from metaq.client.options import ClientOptions
from metaq.client.timeouts import NOTICE_S, WaitNotice
from metaq.clock import Clock
from metaq.cluster_snapshot import BrokerCopies, ClusterSnapshot
from metaq.errors import (
    ClosedError,
    CoordinationError,
    MetaqError,
    NoBrokerError,
    WireError,
)
from metaq.lifecycle import Service, State
from metaq.model import BrokerAddress, BrokerId
from metaq.peer.connection import BrokerConnection
from metaq.peer.pool import ConnectionPool
from metaq.peer.replies import require_ok
from metaq.protocol.commands import Stats
from metaq.retry import wait_set
from metaq.zk.children import read_values
from metaq.zk.cluster import ClusterWatch, SnapshotCallback, SnapshotFeed
from metaq.zk.definitions import or_error
from metaq.zk.errors import CoordinationTimeoutError, NodeNameError
from metaq.zk.exchange_definitions import decode_binding
from metaq.zk.paths import NodePaths, is_legal_step
from metaq.zk.session import Cancel, Coordinator, SessionState, SessionStatus

_log = logging.getLogger(__name__)

SETTLE_S: Final = 1.0
"""Maximum delay of the first snapshot by brokers that neither answer nor fail, in
seconds."""

ASK_PAUSE_S: Final = 1.0
"""Minimum pause between two requests to a broker, in seconds, even if a refresh is
requested; at most `metadata_s`."""

UNREACHABLE_S: Final = 2.0
"""Time without a connection after which a broker counts as away, in seconds."""

NO_BROKERS: Final = (
    "no broker is there: start one, or correct the address or root of ZooKeeper"
)
"""Cure where a cluster has no broker at all."""


class Metadata(Protocol):
    """Source of cluster snapshots. Used on the client's loop.

    Lifecycle: `start` once, use, `stop` once.
    """

    clock: Clock
    snapshot: ClusterSnapshot
    """The present snapshot; version 0 while nothing is known."""

    async def start(self) -> None:
        """Begin to watch, without waiting for the first snapshot."""

    async def stop(self) -> None:
        """End all updates; waiters get a ClosedError. Bounded, idempotent."""

    def watch_topic(self, name: str) -> None:
        """Include this topic in snapshots from now on; it need not exist.

        Raises:
            ClosedError: stopped.
            NodeNameError: the topic name is invalid.
        """

    def watch_names(self) -> None:
        """Include the names of all topics and exchanges in snapshots from now on.

        Raises:
            ClosedError: stopped.
        """

    async def topic(
        self, name: str, *, deadline_s: float, takes_puts: bool = False
    ) -> ClusterSnapshot:
        """Watch a topic; return the first snapshot in which it has partitions.

        Args:
            name: the topic.
            deadline_s: monotonic time.
            takes_puts: whether only partitions that take puts count; those of followers
                can only be read.

        Raises:
            NoTopicError: it does not exist at the deadline; the text has similar names
                of topics.
            NoBrokerError: no broker takes puts to it, but one serves gets.
            PartitionsAwayError: it is recorded, but its brokers are away.
            CoordinationError: ZooKeeper cannot be reached.
            ClosedError, NodeNameError: as `watch_topic`.
        """
        self.watch_topic(name)
        since_s = self.clock.monotonic_s()
        snapshot, known, unread = self.snapshot, None, None
        while name not in snapshot.puts and (takes_puts or name not in snapshot.gets):
            if snapshot.version and known is None:
                # Ask now, because there is no time left at the deadline.
                known = await self._known_topics(deadline_s)
            if unread is None and name in snapshot.exchanges:
                unread = await self.find_unread(name, deadline_s=deadline_s)
            newer = await self._try_newer(snapshot.version, deadline_s)
            if newer is None:
                # Not in an `except`: the time-out should not be the error's context.
                waited_s = self.clock.monotonic_s() - since_s
                if takes_puts and name in snapshot.exchanges:
                    self.require_reachable(waited_s)
                    reason = unread or "where one is there, its health says why"
                    raise NoBrokerError(
                        f"no broker serves exchange '{name}' (waited {waited_s:.3g} s):"
                        f" {reason}"
                    )
                raise self._absence(name, snapshot, known or (), waited_s)
            snapshot = newer
        return snapshot

    async def _try_newer(
        self, version: int, deadline_s: float
    ) -> ClusterSnapshot | None:
        """Return a snapshot newer than a version; None if there is none in time."""
        try:
            return await self.wait_newer(version, deadline_s=deadline_s)
        except NoBrokerError:
            if not version:
                raise
            return None

    def _absence(
        self,
        name: str,
        snapshot: ClusterSnapshot,
        known: Collection[str],
        waited_s: float,
    ) -> NoBrokerError:
        """Return the error for a topic without partitions.

        Raises:
            CoordinationError, PartitionsAwayError: it may have partitions.
        """
        self.require_reachable(waited_s)
        require_all_there(snapshot, [name])
        is_read = name in snapshot.gets
        text = "takes puts to" if is_read else "serves"
        hint = "" if is_read else f"; {near_topics(name, known)}"
        kind = NoBrokerError if is_read else NoTopicError
        brokers = ", ".join(map(str, snapshot.brokers))
        there = f"ids of the brokers present: {brokers}{hint}"
        return kind(
            f"no broker {text} topic '{name}' (waited {waited_s:.3g} s);"
            f" {there if snapshot.brokers else NO_BROKERS}"
        )

    async def find_unread(self, exchange: str, *, deadline_s: float) -> str:
        """Return why an exchange, or one of its bindings, cannot be read; "": it can.

        Args:
            exchange: name of the exchange.
            deadline_s: monotonic time; "" if it is over. Always "" without ZooKeeper.
        """
        return ""

    async def _known_topics(self, deadline_s: float) -> frozenset[str]:
        try:
            return await self.topics(deadline_s=deadline_s)
        except (CoordinationError, NoBrokerError):
            return frozenset()

    async def topics(self, *, deadline_s: float) -> frozenset[str]:
        """Return the names of all topics, including those that are away.

        Raises:
            NoBrokerError: without ZooKeeper: no broker has answered by the deadline.
            CoordinationError: ZooKeeper cannot be asked.
            ClosedError: stopped.
        """

    async def reach(self, *, deadline_s: float) -> None:
        """Wait for the first snapshot and, if it is used, a connection to ZooKeeper.

        Raises:
            CoordinationError: ZooKeeper cannot be reached by the deadline.
            NoBrokerError: without ZooKeeper: no broker has answered by the deadline.
            ClosedError: stopped.
        """
        if not self.snapshot.version:
            await self.wait_newer(0, deadline_s=deadline_s)

    def require_reachable(self, waited_s: float) -> None:
        """Check that the snapshot is up to date, so that missing topics do not exist.

        Args:
            waited_s: time that the caller has waited, for the text of the error.

        Raises:
            CoordinationError: ZooKeeper cannot be reached.
        """
        return  # brokers never count as unreachable as a whole

    async def wait_newer(self, version: int, *, deadline_s: float) -> ClusterSnapshot:
        """Return the present snapshot, as soon as its version is above `version`.

        Raises:
            CoordinationError: `version` is 0, and ZooKeeper cannot be reached.
            NoBrokerError: nothing changed by the deadline; for version 0, without
                ZooKeeper: no broker has answered.
            ClosedError: stopped.
        """

    def add_listener(self, on_snapshot: SnapshotCallback) -> Cancel:
        """Call `on_snapshot` on the loop with each new snapshot, in order."""

    def request_refresh(self) -> None:
        """Update soon, because of an error with `refresh_metadata`. Never waits."""


# -- from ZooKeeper -------------------------------------------------------------------


class ZooKeeperMetadata(ClusterWatch, Metadata):
    """The cluster below one root in ZooKeeper.

    The last snapshot is kept while ZooKeeper cannot be reached.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        paths: NodePaths,
        *,
        clock: Clock,
        name: str = "ZooKeeper",
    ) -> None:
        """Create it; `start` begins to watch.

        Args:
            coordinator: owned by the caller; may connect before or after `start`.
            paths: paths below the root.
            clock: clock of the deadlines.
            name: name of ZooKeeper in errors, with its address.
        """
        super().__init__(coordinator, paths, clock=clock)
        self._name = name
        self._notice = WaitNotice(clock)
        self._connected = asyncio.Event()
        self._unlisten: Cancel = coordinator.add_listener(self._on_status)

    async def start(self) -> None:
        """Begin to watch."""
        self._on_status(self._coordinator.status)
        self.open()

    async def stop(self) -> None:
        """End all watches; waiters get a ClosedError."""
        self._unlisten()
        self.close()

    def _on_status(self, status: SessionStatus) -> None:
        if status.state is SessionState.CONNECTED:
            self._connected.set()
        else:
            self._connected.clear()

    async def reach(self, *, deadline_s: float) -> None:
        """Wait for a connection to ZooKeeper, and for the first snapshot."""
        if not self._connected.is_set():
            left_s = max(0.0, deadline_s - self.clock.monotonic_s())
            with self._notice.of(self._say_wait):
                if not await wait_set(self._connected, left_s):
                    raise self._unreachable(left_s)
        await super().reach(deadline_s=deadline_s)

    def _say_wait(self) -> None:
        _log.warning("calls wait: error=%s", self._unreachable(NOTICE_S))

    async def find_unread(self, exchange: str, *, deadline_s: float) -> str:
        """Return why an exchange or one of its bindings cannot be read; "": it can."""
        if reason := self.unread_exchanges.get(exchange):
            return reason
        try:
            bindings = await read_values(
                self._coordinator,
                self._paths.bindings(exchange),
                partial(or_error, decode_binding),
                deadline_s=deadline_s,
            )
        except CoordinationError:
            return ""
        texts = (
            f"binding {name} cannot be read: {each}"
            for name, each in bindings.items()
            if isinstance(each, str)
        )
        return next(texts, "")

    def require_reachable(self, waited_s: float) -> None:
        """Raise CoordinationError if ZooKeeper is away or has not answered."""
        if not (self._connected.is_set() and self._is_complete()):
            raise self._unreachable(waited_s)

    def _unreachable(self, waited_s: float) -> CoordinationError:
        return CoordinationError(f"cannot reach {self._name} (waited {waited_s:.3g} s)")

    async def wait_newer(self, version: int, *, deadline_s: float) -> ClusterSnapshot:
        """Return the present snapshot, as soon as its version is above `version`."""
        left_s = max(0.0, deadline_s - self.clock.monotonic_s())
        try:
            return await super().wait_newer(version, deadline_s=deadline_s)
        except CoordinationTimeoutError as error:
            if not version:
                raise self._unreachable(left_s) from None
            raise NoBrokerError(
                f"nothing changed in the cluster within {left_s:.3g} s"
            ) from error

    def request_refresh(self) -> None:
        """Do nothing, because ZooKeeper reports every change."""


# -- from the brokers themselves ------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Asked:
    """One address, and the last facts about its broker."""

    address: BrokerAddress
    facts: BrokerFacts | None = None
    is_there: bool = False
    was_tried: bool = False
    wanted: asyncio.Event = field(default_factory=asyncio.Event)


class AddressMetadata(Service, SnapshotFeed, Metadata):
    """The cluster as described by the brokers at given addresses."""

    def __init__(
        self,
        addresses: Sequence[BrokerAddress],
        *,
        pool: ConnectionPool,
        clock: Clock,
        options: ClientOptions,
        settle_s: float = SETTLE_S,
        ask_pause_s: float = ASK_PAUSE_S,
        unreachable_s: float = UNREACHABLE_S,
    ) -> None:
        """Create it; `start` begins to ask.

        Args:
            addresses: at least one; if two are of the same leader, the first counts.
            pool: pool of the connections; owned by the caller.
            clock: clock of the deadlines.
            options: `metadata_s` and time-outs.
            settle_s: as SETTLE_S.
            ask_pause_s: as ASK_PAUSE_S.
            unreachable_s: as UNREACHABLE_S.
        """
        super().__init__("metadata", stop_timeout_s=options.close_timeout_s)
        SnapshotFeed.__init__(self)
        self._pool = pool
        self.clock = clock
        self._metadata_s = options.metadata_s
        self._timeout_s = options.request_timeout_s
        self._settle_s = settle_s
        self._pause_s = min(ask_pause_s, options.metadata_s)
        self._unreachable_s = unreachable_s
        self._asked = [_Asked(address) for address in dict.fromkeys(addresses)]
        self._watched: set[str] = set()
        self._is_settled = False

    async def on_start(self) -> None:
        """Begin to ask each broker."""
        self.on_way_down("waiters", self._wake_waiters)
        for asked in self._asked:
            self.spawn(self._run_asking(asked), name=f"ask {asked.address}")
        self.spawn(self._run_settling(), name="settle")

    async def _wake_waiters(self) -> None:
        self._end()

    def watch_topic(self, name: str) -> None:
        """Include this topic in snapshots from now on."""
        self._require_open()
        if name in self._watched:
            return
        if not is_legal_step(name):
            # Errors have topic names as given: keep illegal ones out of users' logs.
            raise NodeNameError(f"topic {name!r}: no broker can register such a name")
        self._watched.add(name)
        self._publish()
        if name not in self.snapshot.puts:
            self.request_refresh()

    def watch_names(self) -> None:
        """Do nothing, because brokers always report all their topics."""
        self._require_open()

    async def topics(self, *, deadline_s: float) -> frozenset[str]:
        """Return the names last reported by the brokers; wait for the first report."""
        snapshot = self.snapshot
        if not snapshot.version:
            snapshot = await self.wait_newer(0, deadline_s=deadline_s)
        return frozenset(snapshot.puts.keys() | snapshot.gets.keys()).difference(
            snapshot.exchanges
        )

    async def wait_newer(self, version: int, *, deadline_s: float) -> ClusterSnapshot:
        """Return the present snapshot, as soon as its version is above `version`."""
        left_s = max(0.0, deadline_s - self.clock.monotonic_s())
        try:
            return await self.wait_above(version, left_s)
        except TimeoutError as error:
            if version:
                raise NoBrokerError(
                    f"nothing changed in the cluster within {left_s:.3g} s"
                ) from error
            addresses = ", ".join(str(p.address) for p in self._asked)
            raise NoBrokerError(
                f"no broker answers at {addresses} (waited {left_s:.3g} s)"
            ) from None

    def request_refresh(self) -> None:
        """Ask every broker as soon as ASK_PAUSE_S have passed since its last answer."""
        for asked in self._asked:
            asked.wanted.set()

    # -- inside -----------------------------------------------------------------------

    def _require_open(self) -> None:
        if self.state not in (State.NEW, State.STARTING, State.RUNNING):
            raise ClosedError("the client's metadata is closed")

    async def _run_settling(self) -> None:
        await asyncio.sleep(self._settle_s)
        self._is_settled = True
        self._publish()

    async def _run_asking(self, asked: _Asked) -> None:
        """Ask one broker until cancelled."""
        while True:
            asked.wanted.clear()
            was_there = asked.is_there
            try:
                asked.facts = await self._ask(asked.address)
                asked.is_there = True
            except MetaqError as error:
                asked.is_there = False
                if was_there or not asked.was_tried:  # once per absence
                    _log.warning(
                        "broker did not report its metadata: broker=%s error=%s",
                        asked.address,
                        error,
                    )
            asked.was_tried = True
            self._publish()
            await asyncio.sleep(self._pause_s)
            if asked.is_there:
                await wait_set(asked.wanted, self._metadata_s - self._pause_s)

    async def _ask(self, address: BrokerAddress) -> BrokerFacts:
        now_s = self.clock.monotonic_s()
        deadline_s = now_s + self._unreachable_s
        connection = await self._pool.get(address, deadline_s=deadline_s)
        broker, topics, offsets, config, exchanges = await asyncio.gather(
            self._stats(connection, ""),
            self._stats(connection, "topics"),
            self._stats(connection, "offsets"),
            self._stats_config(connection),
            self._stats_exchanges(connection),
        )
        return parse_facts(
            broker=broker,
            topics=topics,
            offsets=offsets,
            config=config,
            exchanges=exchanges,
            source=str(address),
        )

    async def _stats(self, connection: BrokerConnection, item: str) -> str:
        reply = await connection.call(
            Stats(item, connection.next_opaque()),
            deadline_s=self.clock.monotonic_s() + self._timeout_s,
        )
        return require_ok(reply).text

    async def _stats_config(self, connection: BrokerConnection) -> str | None:
        try:
            return await self._stats(connection, "config")
        except WireError:
            return None

    async def _stats_exchanges(self, connection: BrokerConnection) -> str:
        if not connection.capabilities.exchanges:  # "exchanges" is a topic name then
            return ""
        return await self._stats(connection, "exchanges")

    def _publish(self) -> None:
        """Publish the next snapshot if it differs from the present one."""
        known = [asked for asked in self._asked if asked.facts is not None]
        silent = frozenset(p.address for p in self._asked if p.facts is None)
        settled = self._is_settled or all(asked.was_tried for asked in self._asked)
        if not known or not settled:
            return
        replies = [(p.address, p.facts, p.is_there) for p in known if p.facts]
        self._offer(replace(make_snapshot(replies, self._watched), silent=silent))


def make_snapshot(
    replies: Iterable[tuple[BrokerAddress, BrokerFacts, bool]], watched: Iterable[str]
) -> ClusterSnapshot:
    """Return the brokers' replies as one snapshot of version 0. Pure.

    Args:
        replies: address of a broker, its last reply, and whether it is reachable now.
            Of two leaders with the same id, the one with the higher leader epoch
            counts, then the first.
        watched: topics to include even if a broker serves them only by a pattern.
    """
    topics = frozenset(watched)
    leaders: dict[BrokerId, BrokerAddress] = {}
    epochs: dict[BrokerId, int] = {}
    followers: dict[BrokerId, list[BrokerAddress]] = {}
    puts: dict[str, dict[BrokerId, int]] = {}
    gets: dict[str, dict[BrokerId, int]] = {}
    recorded: dict[str, dict[BrokerId, int]] = {}
    exchanges = set[str]()
    for address, facts, is_there in replies:
        if is_there and facts.is_follower:
            followers.setdefault(facts.broker_id, []).append(address)
        elif is_there and facts.epoch > epochs.get(facts.broker_id, -1):
            epochs[facts.broker_id] = facts.epoch
            leaders[facts.broker_id] = address
        exchanges |= facts.exchanges
        for name in () if facts.is_follower else facts.exchanges:
            puts.setdefault(name, {})[facts.broker_id] = 1
        for topic in topics | facts.counts.keys():
            count = facts.partition_count(topic)
            served = [puts] if facts.takes_puts(topic) else []
            served += [gets] if facts.takes_gets(topic) else []
            for counts in [*served, recorded] if count and served else []:
                by_broker = counts.setdefault(topic, {})
                known = by_broker.get(facts.broker_id, 0)
                by_broker[facts.broker_id] = max(known, count)
    brokers = {
        broker_id: BrokerCopies(
            leader=leaders.get(broker_id),
            followers=MappingProxyType(dict(enumerate(followers.get(broker_id, [])))),
        )
        for broker_id in sorted(leaders.keys() | followers.keys())
    }
    return ClusterSnapshot(
        brokers=MappingProxyType(brokers),
        puts=_frozen(puts),
        gets=_frozen(gets),
        recorded=_frozen(recorded),
        exchanges=frozenset(exchanges - recorded.keys()),
        topics=topics,
        names=frozenset(recorded.keys() | exchanges),
    )


def _frozen(
    counts: dict[str, dict[BrokerId, int]],
) -> Mapping[str, Mapping[BrokerId, int]]:
    return MappingProxyType(
        {
            topic: MappingProxyType(dict(sorted(by_broker.items())))
            for topic, by_broker in sorted(counts.items())
        }
    )
