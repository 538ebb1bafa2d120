"""Parts shared by all objects of one client."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from metaq.client.cluster.metadata import Metadata
from metaq.client.options import ClientOptions, ProducerOptions
from metaq.client.partitioner import Selector
from metaq.client.timeouts import Closable
from metaq.client.validation import check_timeout
from metaq.clock import Clock
from metaq.cluster_snapshot import ClusterSnapshot
from metaq.errors import ConfigError, NoBrokerError
from metaq.model import BrokerAddress, BrokerId
from metaq.peer.connection import BrokerConnection
from metaq.peer.pool import ConnectionPool
from metaq.record.flags import Headers
from metaq.zk.children import read_values
from metaq.zk.paths import NodePaths
from metaq.zk.session import Coordinator


class MessageSender(Protocol):
    """Producer interface used by parts of a client that send dead letters."""

    async def send(
        self,
        topic: str,
        data: bytes,
        *,
        attribute: str | None = None,
        key: str | bytes | None = None,
        headers: Headers = (),
        timeout: float | None = None,
    ) -> object:
        """Send one message and wait until it is on the broker's disk."""

    async def close(self, timeout: float | None = None) -> None:
        """Wait for sent messages, at most `timeout` seconds, and refuse more."""


ProducerMaker = Callable[[ProducerOptions, Selector | None], MessageSender]
"""Makes a producer of the client; the caller owns and closes it."""


TopicMaker = Callable[[str, float | None], Awaitable[None]]
"""Creates a topic with one partition on each broker; the number is a time-out."""


@dataclass(frozen=True, slots=True)
class ClientContext:
    """The parts of one client; owned by its session, used on its loop."""

    clock: Clock
    options: ClientOptions
    pool: ConnectionPool
    metadata: Metadata
    paths: NodePaths
    make_producer: ProducerMaker
    draw_token: Callable[[], str]
    """Returns hexadecimal digits that are unique."""
    coordinator: Coordinator | None = None
    """ZooKeeper; None for a client of named brokers."""
    make_topic: TopicMaker | None = None
    """Creates a topic unless it exists, and waits until brokers serve it."""
    place: str = "brokers"
    """Address of the cluster, for texts."""
    followers: set[Closable] = field(default_factory=set, compare=False)
    """Readers of browse calls that follow the log; closed with the client."""

    def require_coordinator(self, needed: str) -> Coordinator:
        """Return the ZooKeeper session.

        Args:
            needed: begin of the error's sentence, which says why it is needed.

        Raises:
            ConfigError: the client was created for named brokers, and has none.
        """
        if self.coordinator is None:
            raise ConfigError(
                f"{needed} ZooKeeper: expected its address, got brokers by name"
            )
        return self.coordinator

    def limit_s(self, timeout: float | None) -> float:
        """Return the maximum duration of a call, in seconds; None: `request_timeout_s`.

        Raises:
            ConfigError: `timeout` is not a valid time.
        """
        check_timeout(timeout)
        return self.options.request_timeout_s if timeout is None else timeout

    def deadline_s(self, timeout: float | None = None) -> float:
        """Return the monotonic time `timeout` from now; None: `request_timeout_s`."""
        return self.clock.monotonic_s() + self.limit_s(timeout)

    async def reach(self, timeout: float | None = None) -> float:
        """Wait until ZooKeeper, if it is used, can be asked; return the deadline.

        Raises:
            ClosedError: the client is closed.
            CoordinationError: it cannot be reached within `timeout`.
            ConfigError: `timeout` is not a valid time.
        """
        self.pool.require_open()
        deadline_s = self.deadline_s(timeout)
        if self.coordinator is not None:
            await self.metadata.reach(deadline_s=deadline_s)
        return deadline_s

    async def newer(
        self, snapshot: ClusterSnapshot, deadline_s: float
    ) -> ClusterSnapshot:
        """Wait for a later snapshot; raises as `Metadata.wait_newer`."""
        return await self.metadata.wait_newer(snapshot.version, deadline_s=deadline_s)

    def address_of(self, broker_id: BrokerId) -> BrokerAddress | None:
        """Return the address to read a broker's logs from: leader, else a follower."""
        copies = self.metadata.snapshot.brokers.get(broker_id)
        if copies is None:
            return None
        return copies.leader or next(iter(copies.followers.values()), None)

    async def connect_leader(
        self, broker_id: BrokerId, deadline_s: float
    ) -> BrokerConnection:
        """Return the pool's connection to a broker's leader.

        Raises:
            NoBrokerError: it is not registered, or not reached before the deadline.
            ClosedError: the client is closed.
        """
        copies = self.metadata.snapshot.brokers.get(broker_id)
        if copies is None or copies.leader is None:
            self.pool.require_open()
            self.metadata.request_refresh()
            raise NoBrokerError(f"broker {broker_id} is away")
        return await self.pool.get(copies.leader, deadline_s=deadline_s)

    async def disconnect(self, deadline_s: float | None) -> None:
        """Close connections and session, after all objects that use them.

        Args:
            deadline_s: monotonic deadline; None: `close_timeout_s` from now.

        Cancellation: all is closed at once, because a session that lived on would keep
        the partitions of a group from other members.
        """
        if deadline_s is None:
            deadline_s = self.clock.monotonic_s() + self.options.close_timeout_s
        try:
            await self.metadata.stop()
            await self.pool.close(deadline_s=deadline_s)
        except asyncio.CancelledError:
            deadline_s = self.clock.monotonic_s()
            await self.pool.close(deadline_s=deadline_s)
            raise
        finally:
            if self.coordinator is not None:
                await self.coordinator.stop(deadline_s=deadline_s)


class ZooKeeperCall:
    """ZooKeeper during one call, with its deadline."""

    def __init__(
        self, coordinator: Coordinator, paths: NodePaths, deadline_s: float
    ) -> None:
        """Create it; nothing is asked.

        Args:
            coordinator: the client's ZooKeeper session.
            paths: paths of the nodes.
            deadline_s: deadline of the call, monotonic.
        """
        self.coordinator = coordinator
        self.paths = paths
        self.deadline_s = deadline_s
        self.get = partial(coordinator.get, deadline_s=deadline_s)
        self.exists = partial(coordinator.exists, deadline_s=deadline_s)
        self.children = partial(coordinator.children, deadline_s=deadline_s)
        self.values = partial(read_values, coordinator, deadline_s=deadline_s)
        self.write = partial(coordinator.replace, deadline_s=deadline_s)
        self.put = partial(coordinator.set_or_create, deadline_s=deadline_s)
        self.transact = partial(coordinator.transact, deadline_s=deadline_s)
        self.delete = partial(coordinator.delete, deadline_s=deadline_s)
