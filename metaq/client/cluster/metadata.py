"""Metadata of the cluster, from ZooKeeper or from brokers.

Producers and consumers read one immutable `ClusterSnapshot` and hear of the next one.
It comes from ZooKeeper (`ZooKeeperMetadata`), which reports each change by itself, or
from brokers that were named by address (`AddressMetadata`) and are asked every
`metadata_s`, and when a request went wrong.

Theory of operation of the latter. Each address has a task of its own, so a broker that
does not answer delays no other. The first snapshot waits until every broker has
answered or failed, at most SETTLE_S: a reader of a whole topic should not take the
first broker's partitions for all there are. Later on every answer that changes
something gives the next snapshot. A broker that cannot be reached is missing from
`brokers`; what it serves stays known, and is its record, so its partitions do not seem
to vanish. One that has never answered is `silent`: it may have a part of every topic.

    Invariant: the version grows with every snapshot; 0 says that nothing is known yet.

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
"""Longest the first snapshot waits for brokers that neither answer nor fail."""

ASK_PAUSE_S: Final = 1.0
"""Least seconds between two requests to one broker, however often news is wanted; less
when `metadata_s` is."""

UNREACHABLE_S: Final = 2.0
"""A broker that cannot be connected to for so long counts as not there."""


class Metadata(Protocol):
    """Source of cluster snapshots. Used on the client's loop.

    Lifecycle: `start` once, use, `stop` once.
    """

    clock: Clock
    snapshot: ClusterSnapshot
    """The present snapshot; version 0 while nothing is known."""

    async def start(self) -> None:
        """Begin to learn; does not wait for anything to be known."""

    async def stop(self) -> None:
        """End all updates; waiters get a ClosedError. Bounded, idempotent."""

    def watch_topic(self, name: str) -> None:
        """Let snapshots speak of this topic from now on; it need not exist.

        Raises:
            ClosedError: stopped.
            NodeNameError: no topic can have this name.
        """

    def watch_names(self) -> None:
        """Let snapshots have the names of topics and exchanges from now on.

        Raises:
            ClosedError: stopped.
        """

    async def topic(
        self, name: str, *, deadline_s: float, takes_puts: bool = False
    ) -> ClusterSnapshot:
        """Watch a topic; return the first snapshot in which it has partitions.

        Args:
            name: the topic.
            deadline_s: absolute.
            takes_puts: partitions that producers may put to; those of followers, which
                are only read, are none.

        Raises:
            NoTopicError: nothing is known of it at the deadline; the text names topics
                with a similar name.
            NoBrokerError: no broker takes puts to it, though one gives its messages.
            PartitionsAwayError: it is recorded, and its brokers are away.
            CoordinationError: ZooKeeper, which knows, was out of reach.
            ClosedError, NodeNameError: as `watch_topic`.
        """
        self.watch_topic(name)
        since_s = self.clock.monotonic_s()
        snapshot, known, unread = self.snapshot, None, None
        while name not in snapshot.puts and (takes_puts or name not in snapshot.gets):
            if snapshot.version and known is None:
                # Asked now: at the deadline there is no time left for it.
                known = await self._known_topics(deadline_s)
            if unread is None and name in snapshot.exchanges:
                unread = await self.find_unread(name, deadline_s=deadline_s)
            newer = await self._try_newer(snapshot.version, deadline_s)
            if newer is None:
                # Outside of an `except`: why the wait ended is no cause of this.
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
        """Return a snapshot above a version; None when there was none in time."""
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
        """Return the error of a topic without partitions; raise what hides them."""
        self.require_reachable(waited_s)
        require_all_there(snapshot, [name])
        is_read = name in snapshot.gets
        text = "takes puts to" if is_read else "serves"
        there = ", ".join(map(str, snapshot.brokers)) or "none"
        hint = "" if is_read else f"; {near_topics(name, known)}"
        kind = NoBrokerError if is_read else NoTopicError
        return kind(
            f"no broker {text} topic '{name}' (waited {waited_s:.3g} s); ids of the"
            f" brokers present: {there}{hint}"
        )

    async def find_unread(self, exchange: str, *, deadline_s: float) -> str:
        """Return why an exchange, or one of its bindings, cannot be read; "": it can.

        Args:
            exchange: its name.
            deadline_s: absolute; at the end nothing is known, as for brokers, which do
                not say.
        """
        return ""

    async def _known_topics(self, deadline_s: float) -> frozenset[str]:
        try:
            return await self.topics(deadline_s=deadline_s)
        except (CoordinationError, NoBrokerError):
            return frozenset()

    async def topics(self, *, deadline_s: float) -> frozenset[str]:
        """Return the names of all topics, also of those that are away.

        Raises:
            NoBrokerError: no broker has named any before the deadline.
            CoordinationError: ZooKeeper cannot be asked.
            ClosedError: stopped.
        """

    async def reach(self, *, deadline_s: float) -> None:
        """Wait until the cluster is known and, where it is used, ZooKeeper connected.

        Raises:
            CoordinationError: ZooKeeper was out of reach at the deadline.
            NoBrokerError: no named broker has answered by then.
            ClosedError: stopped.
        """
        if not self.snapshot.version:
            await self.wait_newer(0, deadline_s=deadline_s)

    def require_reachable(self, waited_s: float) -> None:
        """Raise where nothing new is heard, so that what is missing may be there.

        Args:
            waited_s: for the text: how long the caller has waited.

        Raises:
            CoordinationError: ZooKeeper is out of reach.
        """
        return  # no other source can be out of reach for all of it

    async def wait_newer(self, version: int, *, deadline_s: float) -> ClusterSnapshot:
        """Return the present snapshot, as soon as its version is above `version`.

        Raises:
            CoordinationError: `version` is 0, and ZooKeeper was out of reach.
            NoBrokerError: nothing changed before the deadline; of version 0, no named
                broker has answered.
            ClosedError: stopped.
        """

    def add_listener(self, on_snapshot: SnapshotCallback) -> Cancel:
        """Call `on_snapshot` on the loop with each new snapshot, in order."""

    def request_refresh(self) -> None:
        """Ask for news soon: a request failed with `refresh_metadata`. Never waits."""


# -- from ZooKeeper -------------------------------------------------------------------


class ZooKeeperMetadata(ClusterWatch, Metadata):
    """The cluster below one root in ZooKeeper.

    The snapshot holds while that is out of reach.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        paths: NodePaths,
        *,
        clock: Clock,
        name: str = "ZooKeeper",
    ) -> None:
        """Prepare to watch.

        Args:
            coordinator: belongs to the caller; may connect before or after `start`.
            paths: the root.
            clock: gives meaning to deadlines.
            name: of ZooKeeper in errors, with its address.
        """
        super().__init__(coordinator, paths, clock=clock)
        self._name = name
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
        """Wait until ZooKeeper is connected and the cluster known."""
        left_s = max(0.0, deadline_s - self.clock.monotonic_s())
        if not await wait_set(self._connected, left_s):
            raise self._unreachable(left_s)
        await super().reach(deadline_s=deadline_s)

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
        """Raise CoordinationError while ZooKeeper is away, or does not answer."""
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
        """Do nothing: ZooKeeper reports every change by itself."""


# -- from the brokers themselves ------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Asked:
    """One address, and the facts about its broker."""

    address: BrokerAddress
    facts: BrokerFacts | None = None
    is_there: bool = False
    was_tried: bool = False
    wanted: asyncio.Event = field(default_factory=asyncio.Event)


class AddressMetadata(Service, SnapshotFeed, Metadata):
    """The cluster as a list of brokers describes it."""

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
        """Prepare to ask.

        Args:
            addresses: at least one; where two are one broker, the first counts.
            pool: whose connections carry the questions; belongs to the caller.
            clock: gives meaning to deadlines.
            options: `metadata_s` and time-outs.
            settle_s: longest wait of the first snapshot for a silent broker.
            ask_pause_s: least time between two requests to one broker.
            unreachable_s: how long a broker may take to be connected to.
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
        """Let snapshots speak of this topic from now on."""
        self._require_open()
        if name in self._watched:
            return
        if not is_legal_step(name):
            # Errors name topics as they are: none of these may reach a user's log.
            raise NodeNameError(f"topic {name!r}: no broker can register such a name")
        self._watched.add(name)
        self._publish()
        if name not in self.snapshot.puts:
            self.request_refresh()

    def watch_names(self) -> None:
        """Do nothing: brokers name all their topics, every `metadata_s`."""
        self._require_open()

    async def topics(self, *, deadline_s: float) -> frozenset[str]:
        """Return the names that the brokers gave last; waits for the first time."""
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
        """Ask every broker as soon as ASK_PAUSE_S since its last answer are over."""
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
        """Ask one broker again and again."""
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
        if not connection.capabilities.exchanges:  # to it that is a topic's name
            return ""
        return await self._stats(connection, "exchanges")

    def _publish(self) -> None:
        """Make the next snapshot, if anything is different from the present one."""
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
        replies: address of a broker, its last reply, and whether it is there now. Of
            two leaders with one id, the one of the greater epoch counts, then the
            first.
        watched: topics that are looked for also where only a pattern takes them.
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
