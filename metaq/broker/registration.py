"""Registers a broker in ZooKeeper, and withdraws it.

A broker is registered after recovery and after it listens, because clients that read
the nodes connect at once. It is withdrawn before the drain, so that clients turn to
other brokers while it still answers. `metaq.zk.registry` writes and maintains the
nodes; a lost or unstable session never affects puts and gets.

Source: docs/metaq-1.4/broker.md 3.1 to 3.5; section 12 rows 11 and 12.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from ipaddress import ip_address
from socket import getaddrinfo
from types import MappingProxyType
from typing import Final

from metaq.broker.topics import ServedExchange
from metaq.clock import Clock
from metaq.config.settings import BrokerConfig
from metaq.errors import ConfigError, DataMissingError
from metaq.lifecycle import Service
from metaq.model import BrokerAddress, is_internal
from metaq.net.own_host import LOOPBACK, own_host
from metaq.retry import Backoff, retry
from metaq.storage.log_manager import LogManager
from metaq.zk.errors import PayloadError
from metaq.zk.paths import BrokerRole, NodePaths, normalize_root
from metaq.zk.plan import AdvertisedTopic, BrokerSnapshot
from metaq.zk.registry import (
    OPERATION_TIMEOUT_S,
    BrokerRegistry,
    RegistrationState,
    RegistrationStatistics,
)
from metaq.zk.servers import parse_servers
from metaq.zk.session import Coordinator
from metaq.zk.znodes import Node, decode_directories, encode_directories

_log = logging.getLogger(__name__)

BACKOFF: Final = Backoff(first_s=0.1, max_s=2.0)
"""Delay between tries to read the record of the data directories."""

TAKEOVER_MARGIN_S: Final = 2.0
"""Time added to the session time-out, for which nodes of an earlier session of this
broker may exist."""


def advertised_host(config: BrokerConfig) -> str:
    """Return the advertised host: hostName, or one of our addresses."""
    return config.system.host_name or own_host()


def host_problem(config: BrokerConfig, address: BrokerAddress) -> str:
    """Return why clients on other machines cannot reach the address; "" if they can."""
    if config.system.host_name or address.host != LOOPBACK:
        return ""
    return (
        f"clients on other machines cannot connect to {address}: hostName is not set,"
        " and this machine has no address but loopback; set hostName, or give the"
        " machine an address, and restart"
    )


def find_unknown_hosts(
    config: BrokerConfig, resolve: Callable[[str, None], object] = getaddrinfo
) -> list[str]:
    """Return a sentence for each configured host that does not resolve; blocks."""
    named = []
    if config.system.host_name:
        named.append(("[system] hostName", config.system.host_name))
    if config.zookeeper.is_enabled:
        with suppress(ConfigError):  # the coordinator refuses it
            hosts = parse_servers(config.zookeeper.connect).hosts
            named += [("[zookeeper] zk.zkConnect", host) for host in hosts]
    sentences = []
    for setting, host in named:
        try:
            resolve(host, None)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            sentences.append(
                f"{setting} names the host '{host}', which this machine cannot"
                f" resolve: {reason}"
            )
    return sentences


def listening_host(config: BrokerConfig) -> str:
    """Return the address to listen on; "" is every interface.

    If the advertised host is a loopback address, only clients on this machine can use
    it, so the broker listens on loopback alone.
    """
    host = config.system.host_name or ""
    if host == "localhost":
        return "127.0.0.1"
    try:
        return host if ip_address(host).is_loopback else ""
    except ValueError:
        return ""


def make_snapshot(
    config: BrokerConfig,
    address: BrokerAddress,
    log_topics: Iterable[str],
    directories: Mapping[str, tuple[str, int]],
    *,
    withdrawn: Collection[str] = (),
    exchanges: Mapping[str, ServedExchange] = MappingProxyType({}),
) -> BrokerSnapshot:
    """Return this broker's snapshot for ZooKeeper, without `withdrawn` topics.

    An exchange is registered for producers as a topic with one partition, unless all of
    its topics refuse puts; it is not registered for consumers. `log_topics` are topics
    with a log here, configured or not; `directories` maps the path of each data
    directory to its identity and partition count.
    """
    # Configured topics first, sorted, then the rest: MetaQ's order (3.3).
    configured = sorted(config.topic_names)
    others = sorted(set(log_topics) - set(configured))
    others = [each for each in others if not is_internal(each)]
    topics = [
        config.topic(name) for name in (*configured, *others) if name not in withdrawn
    ]
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
        )
        + tuple(
            AdvertisedTopic(name, 1, accepts_gets=False, has_log=False)
            for name in sorted(exchanges)
            if _takes_messages(exchanges[name], config)
        ),
        directories=encode_directories(directories),
    )


def _takes_messages(exchange: ServedExchange, config: BrokerConfig) -> bool:
    """Return whether any topic of an exchange takes puts, or none is bound.

    If none takes puts, the broker is being drained.
    """
    bound = exchange.matcher.bound_topics()
    return not bound or any(config.topic(each).accept_publish for each in bound)


def witness_of(node: str) -> str:
    """Return the name of a record in ZooKeeper for error texts."""
    return f"ZooKeeper {node}"


async def read_claims(
    coordinator: Coordinator, node: str, clock: Clock, *, deadline_s: float = math.inf
) -> dict[str, tuple[str, int]]:
    """Return a broker's record of its data directories; retry until the deadline.

    Raises:
        CoordinationError: ZooKeeper did not answer until the deadline.
    """

    async def read() -> Node | None:
        until_s = min(clock.monotonic_s() + OPERATION_TIMEOUT_S, deadline_s)
        return await coordinator.get(node, deadline_s=until_s)

    found = await retry(read, backoff=BACKOFF, deadline_s=deadline_s, clock=clock)
    try:
        return {} if found is None else decode_directories(found.data)
    except PayloadError as error:
        _log.warning("record of data directories ignored: %s", error)
        return {}


class Registration(Service):
    """Keeps one broker registered. Owned by the broker.

    `start` connects in the background; `advertise` registers; `withdraw` deletes the
    registration; `stop` ends the session.

    A broker registers only after the topics in ZooKeeper are in effect, and after its
    data directories were compared with ZooKeeper's record of earlier runs, because a
    broker whose disk is not mounted would serve empty logs. The registration updates
    that record.
    """

    def __init__(
        self,
        config: BrokerConfig,
        coordinator: Coordinator,
        clock: Clock,
        logs: LogManager,
    ) -> None:
        zookeeper = config.zookeeper
        super().__init__("registration", stop_timeout_s=5.0)
        self._clock = clock
        self._coordinator = coordinator
        self._connect_timeout_s = zookeeper.connection_timeout_ms / 1000
        # With port 0, an address found under our id may be from our own earlier run;
        # with a fixed port, another address is another broker's.
        takeover_wait_s = 0.0
        if config.system.server_port == 0:
            takeover_wait_s = zookeeper.session_timeout_ms / 1000 + TAKEOVER_MARGIN_S
        self._logs = logs
        self._is_prepared = False
        self._refusal = ""
        self._snapshot: BrokerSnapshot | None = None
        paths = NodePaths(normalize_root(zookeeper.root))
        self._node = paths.recorded_directories(config.system.broker_id)
        self._registry = BrokerRegistry(
            coordinator, paths, clock=clock, takeover_wait_s=takeover_wait_s
        )

    async def on_start(self) -> None:
        """Connect in the background; nothing is registered yet."""
        self.on_way_down("session", self._end_session)
        self._coordinator.start()
        self.on_way_down("registry", self._registry.stop)
        self._registry.start()

    async def advertise(
        self,
        snapshot: BrokerSnapshot,
        *,
        wait_definitions: Callable[[], Awaitable[None]],
    ) -> bool:
        """Register, waiting at most zk.zkConnectionTimeoutMs.

        Nothing is registered before `wait_definitions` returns, when the topics in
        ZooKeeper are in effect; otherwise their records would be deleted and written
        again.

        Returns:
            False if ZooKeeper did not answer in time; registration then continues in
            the background.

        Raises:
            BrokerIdTakenError: another broker has this id.
            DataMissingError: a data directory holds less than ZooKeeper has recorded.
        """
        deadline_s = self._clock.monotonic_s() + self._connect_timeout_s
        self._snapshot = snapshot
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await self._prepare(wait_definitions)
        except TimeoutError:
            _log.warning(
                "registration pending; the broker serves and registers later:"
                " broker=%s session=%s",
                snapshot.role,
                self._coordinator.status.state.value,
            )
            self.spawn(self._advertise_later(wait_definitions), name="check")
            return False
        return await self._registry.register(self._snapshot, deadline_s=deadline_s)

    def update(self, snapshot: BrokerSnapshot) -> None:
        """Register a changed snapshot in the background."""
        self._snapshot = snapshot
        if self._is_prepared:
            self._registry.update(snapshot)

    async def withdraw(self, *, timeout_s: float) -> bool:
        """Withdraw the registration; return whether any topic was registered.

        Never raises; remaining nodes disappear with the session.
        """
        was_there = self._registry.statistics().topic_count > 0
        deadline_s = self._clock.monotonic_s() + timeout_s
        await self._registry.withdraw(deadline_s=deadline_s)
        return was_there

    def statistics(self) -> RegistrationStatistics:
        """Return a snapshot of the registration."""
        found = self._registry.statistics()
        if self._is_prepared or self._snapshot is None:
            return found
        state = RegistrationState.PENDING
        if self._refusal:
            state = RegistrationState.REFUSED
        return replace(found, state=state, last_error=self._refusal)

    # -- the data directories ---------------------------------------------------------

    async def _check(self) -> None:
        """Wait for ZooKeeper, and compare the data directories with its record.

        Raises:
            DataMissingError: a data directory holds less.
        """
        claims = await read_claims(self._coordinator, self._node, self._clock)
        self._logs.check_claims(witness_of(self._node), claims)

    async def _prepare(self, wait_definitions: Callable[[], Awaitable[None]]) -> None:
        """Wait until the broker may be registered; raises as `_check`."""
        await self._check()
        await wait_definitions()
        self._is_prepared = True

    async def _advertise_later(
        self, wait_definitions: Callable[[], Awaitable[None]]
    ) -> None:
        try:
            await self._prepare(wait_definitions)
        except DataMissingError as error:
            self._refusal = str(error)
            _log.error("not registered: %s", error)
            return
        assert self._snapshot is not None
        self._registry.update(self._snapshot)

    async def _end_session(self) -> None:
        await self._coordinator.stop(deadline_s=self._clock.monotonic_s() + 3.0)
