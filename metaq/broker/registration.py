"""What this broker tells ZooKeeper, and when.

Advertised after recovery and listen, because whoever reads the nodes connects at once;
withdrawn before the drain, so that clients look elsewhere while the broker still
answers. How the nodes get there and stay there is `metaq.zk.registry`'s business; an
absent or flapping ZooKeeper never reaches puts and gets.

Source: broker spec 3.1 to 3.5; section 12 rows 11 and 12.
"""

import logging
from collections.abc import Iterable
from ipaddress import ip_address
from typing import Final

from metaq.clock import Clock
from metaq.config import BrokerConfig
from metaq.lifecycle import Service
from metaq.net.own_host import own_host
from metaq.zk.paths import BrokerRole, NodePaths, normalize_root
from metaq.zk.plan import AdvertisedTopic, BrokerSnapshot
from metaq.zk.registry import BrokerRegistry, RegistrationStatistics
from metaq.zk.session import Coordinator
from metaq.zk.znodes import BrokerAddress

log = logging.getLogger(__name__)

TAKEOVER_MARGIN_S: Final = 2.0
"""Added to the session time-out: how long a node of our own past may live on."""


def advertised_host(config: BrokerConfig) -> str:
    """Return the host that clients are told: hostName, or one of our addresses."""
    return config.system.host_name or own_host()


def listening_host(config: BrokerConfig) -> str:
    """Return the address to listen on; "" is every interface.

    Who is told a loopback address is on this machine, so nobody else is let in.
    """
    host = config.system.host_name or ""
    if host == "localhost":
        return "127.0.0.1"
    try:
        return host if ip_address(host).is_loopback else ""
    except ValueError:
        return ""


def make_snapshot(
    config: BrokerConfig, address: BrokerAddress, log_topics: Iterable[str]
) -> BrokerSnapshot:
    """Return what ZooKeeper shall say of this broker.

    Args:
        config: settings in effect.
        address: where clients reach us.
        log_topics: topics that have a log here, configured or not.
    """
    # Configured topics first, sorted, then the rest: MetaQ's order (3.3).
    configured = sorted(config.topics)
    others = sorted(set(log_topics) - set(configured))
    topics = [config.topic(name) for name in (*configured, *others)]
    return BrokerSnapshot(
        role=BrokerRole(config.system.broker_id),
        address=address,
        config_checksum=config.checksum,
        topics=tuple(
            AdvertisedTopic(
                name=topic.name,
                partition_count=topic.partition_count,
                accepts_puts=topic.accept_publish,
                accepts_gets=topic.accept_subscribe,
            )
            for topic in topics
        ),
    )


class Registration(Service):
    """Keeps one broker registered. Owner: the broker.

    `start` connects in the background; `advertise` registers; `withdraw` takes the
    registration back; `stop` ends the session.
    """

    def __init__(
        self, config: BrokerConfig, coordinator: Coordinator, clock: Clock
    ) -> None:
        zookeeper = config.zookeeper
        super().__init__("registration", stop_timeout_s=5.0)
        self._clock = clock
        self._coordinator = coordinator
        self._connect_timeout_s = zookeeper.connection_timeout_ms / 1000
        # A broker that is free to come back on another port finds its own past under
        # its id; any other address under it is another broker.
        takeover_wait_s = 0.0
        if config.system.server_port == 0:
            takeover_wait_s = zookeeper.session_timeout_ms / 1000 + TAKEOVER_MARGIN_S
        self._registry = BrokerRegistry(
            coordinator,
            NodePaths(normalize_root(zookeeper.root)),
            clock=clock,
            takeover_wait_s=takeover_wait_s,
        )

    async def on_start(self) -> None:
        """Connect in the background; nothing is registered yet."""
        self.on_way_down("session", self._end_session)
        self._coordinator.start()
        self.on_way_down("registry", self._registry.stop)
        self._registry.start()

    async def advertise(self, snapshot: BrokerSnapshot) -> bool:
        """Register; wait for it no longer than zk.zkConnectionTimeoutMs.

        Returns:
            False when ZooKeeper did not answer in time; it is done when it does.

        Raises:
            BrokerIdTakenError: another broker has our id.
        """
        deadline_s = self._clock.monotonic_s() + self._connect_timeout_s
        return await self._registry.register(snapshot, deadline_s=deadline_s)

    def update(self, snapshot: BrokerSnapshot) -> None:
        """Tell of a change; done in the background."""
        self._registry.update(snapshot)

    async def withdraw(self, *, timeout_s: float) -> bool:
        """Take everything back; return whether clients could have noticed.

        Never raises; what is not done in time goes with the session.
        """
        was_there = self._registry.statistics().topic_count > 0
        deadline_s = self._clock.monotonic_s() + timeout_s
        await self._registry.withdraw(deadline_s=deadline_s)
        return was_there

    def statistics(self) -> RegistrationStatistics:
        """Return a snapshot of the registration."""
        return self._registry.statistics()

    async def _end_session(self) -> None:
        await self._coordinator.stop(deadline_s=self._clock.monotonic_s() + 3.0)
