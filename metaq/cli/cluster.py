"""Choice of the brokers that a command talks to: ZooKeeper's, or given ones."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Protocol, TypeVar

import click

from metaq.client import AsyncClient, Client
from metaq.client.cluster.catalog import read_cluster, read_whole
from metaq.client.cluster.context import ClientContext
from metaq.client.cluster.metadata import ZooKeeperMetadata
from metaq.client.cluster.presence import missing_topics, name_away
from metaq.client.errors import PartitionsAwayError
from metaq.client.names import near_topics, parse_address
from metaq.client.session import CoordinatorFactory
from metaq.cluster_snapshot import ClusterSnapshot
from metaq.config.topic_rules import compile_topic_pattern
from metaq.errors import ConfigError, CoordinationError, NoBrokerError
from metaq.model import BrokerAddress, BrokerId, TopicPartition
from metaq.zk._kazoo_client import check_hosts
from metaq.zk.paths import normalize_root

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

CLOSE_TIMEOUT_S: Final = 5.0
"""Time for commits and replies at the end of a command, seconds."""
NAMES_SHOWN_MAX: Final = 10
"""Topics that an error names."""
SESSION_TIMEOUT_S: Final = 10.0
"""Time until the partitions of a killed command go to another member, seconds."""


class Work(Protocol[T_co]):
    """Work with the parts of a client, up to a deadline."""

    def __call__(
        self, context: ClientContext, /, *, deadline_s: float
    ) -> Awaitable[T_co]:
        """Begin it."""
        ...


@dataclass(frozen=True, slots=True)
class Target:
    """Cluster given by the options."""

    zookeeper: str
    """`host:port[,host:port...][/chroot]`."""
    root: str
    """`zk.zkRoot` of the cluster."""
    brokers: tuple[str, ...]
    """`host:port` or `meta://host:port`; any of them leaves ZooKeeper out."""
    timeout_s: float
    """Time-out of one request, seconds."""
    coordinator: CoordinatorFactory | None = None
    """Substitute for ZooKeeper, for tests."""

    def client(self) -> Client:
        """Return a client, not started."""
        return Client(**self._client_options())

    def run(self, work: Work[T]) -> T:
        """Do some work with a client that has found the cluster."""

        async def run() -> T:
            async with AsyncClient(**self._client_options()) as client:
                context = client.context
                deadline_s = context.clock.monotonic_s() + self.timeout_s
                try:
                    await context.metadata.wait_newer(0, deadline_s=deadline_s)
                except (CoordinationError, NoBrokerError) as error:
                    raise NoBrokerError(self._nobody()) from error
                now_s = context.clock.monotonic_s()
                return await work(context, deadline_s=now_s + self.timeout_s)

        return asyncio.run(run())

    def _client_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {
            "root": self.root,
            "session_timeout_s": SESSION_TIMEOUT_S,
            "connect_timeout_s": self.timeout_s,
            "request_timeout_s": self.timeout_s,
            "close_timeout_s": CLOSE_TIMEOUT_S,
        }
        if self.brokers:
            return {"brokers": list(self.brokers), **options}
        if self.coordinator is not None:
            return {"coordinator": self.coordinator, **options}
        return {"zookeeper": self.zookeeper, **options}

    def require_brokers(self, brokers: Collection[BrokerId]) -> None:
        """Raise NoBrokerError when the cluster that was found has no broker."""
        if not brokers:
            raise NoBrokerError(
                f"no broker is registered in ZooKeeper at {self.zookeeper} below"
                f" {self.root}"
            )

    def _nobody(self) -> str:
        waited = f"(waited {self.timeout_s:g} s)"
        if self.brokers:
            return f"no broker answers at {', '.join(self.brokers)} {waited}"
        return f"no ZooKeeper answers at {self.zookeeper} {waited}"


def check_target(target: Target) -> None:
    """Refuse options without an address of the cluster; the error names the option."""
    checks: list[tuple[Callable[[str], object], str, str]] = [
        (parse_address, text, "--broker") for text in target.brokers
    ] or [
        (check_hosts, target.zookeeper, "--zookeeper"),
        (normalize_root, target.root, "--zk-root"),
    ]
    for check, text, hint in checks:
        try:
            check(text)
        except ConfigError as error:
            raise click.BadParameter(str(error), param_hint=hint) from error


def named_partitions(
    topic: str, everything: Sequence[TopicPartition], wanted: tuple[str, ...]
) -> tuple[TopicPartition, ...]:
    """Return the partitions that `--partition` names, all of them without one.

    A name is `BROKER-NUMBER`, or a number where only one broker has it.
    """
    if not wanted:
        return tuple(everything)
    chosen = []
    for text in wanted:
        found = [p for p in everything if text in {p.name, str(p.partition)}]
        if len(found) != 1:
            names = ", ".join(p.name for p in everything)
            raise click.BadParameter(
                f"'{text}' names {len(found)} partitions of {topic}, expected one of"
                f" {names}",
                param_hint="--partition",
            )
        chosen += found
    return tuple(dict.fromkeys(chosen))


@dataclass(frozen=True, slots=True)
class Found:
    """A topic that at least one broker serves."""

    target: Target
    """Brokers to ask for it: a topic that a pattern of some brokers admits, and that
    has no message yet, is known to those brokers alone."""
    partitions: tuple[TopicPartition, ...]
    """Requested partitions, in numeric order."""


def find_topic(
    target: Target,
    topic: str,
    wanted: tuple[str, ...],
    *,
    kind: Literal["puts", "gets"],
    is_partial: bool = False,
) -> Found:
    """Return the partitions of a topic, and the brokers to ask for them.

    Raises when no broker serves the topic, or when one of the partitions that are to be
    read is away.

    Args:
        target: which cluster.
        topic: topic name.
        wanted: partitions of `--partition`; () for all.
        kind: partitions that take puts, or those that are read.
        is_partial: of those that are read, leave out partitions that are away.
    """

    async def find(context: ClientContext, deadline_s: float) -> Found:
        snapshot = await read_cluster(context, {topic}, deadline_s=deadline_s)
        if kind == "puts":
            partitions = snapshot.put_partitions(topic)
        else:
            if not (is_partial or wanted):
                snapshot = await read_whole(context, {topic}, deadline_s=deadline_s)
            partitions = tuple(sorted(snapshot.get_partitions(topic)))
            require_not_away(snapshot, topic, wanted)
        if partitions:
            return Found(target, named_partitions(topic, partitions, wanted))
        return await _find_by_pattern(target, topic, wanted, context, deadline_s)

    return target.run(find)


def find_missing(target: Target, topics: Collection[str]) -> tuple[str, ...]:
    """Return the topics of which no broker has a partition, here or away.

    Raises:
        NoBrokerError: the cluster cannot be asked.
    """

    async def look(context: ClientContext, deadline_s: float) -> tuple[str, ...]:
        snapshot = await read_cluster(context, topics, deadline_s=deadline_s)
        return missing_topics(snapshot, topics)

    return target.run(look)


def require_not_away(
    snapshot: ClusterSnapshot, topic: str, wanted: tuple[str, ...]
) -> None:
    """Refuse partitions that are named by `--partition` and are away."""
    away = [each for each in snapshot.away(topic) if each.name in wanted]
    if away:
        raise PartitionsAwayError(name_away(away), partitions=away)


def nobody_serves(topic: str, known: Collection[str]) -> NoBrokerError:
    """Return the error of a command that was given a topic without partitions.

    The topic may be among those that are known: nodes outlive brokers.
    """
    others = sorted(set(known) - {topic})[:NAMES_SHOWN_MAX]
    return NoBrokerError(
        f"no broker serves topic '{topic}' at the moment; {near_topics(topic, known)};"
        f" other topics are: {', '.join(others) or 'none'}"
    )


async def _find_by_pattern(
    target: Target,
    topic: str,
    wanted: tuple[str, ...],
    context: ClientContext,
    deadline_s: float,
) -> Found:
    known = await context.metadata.topics(deadline_s=deadline_s)
    addresses: dict[BrokerId, BrokerAddress] = {}
    # A client of named brokers knows their patterns; one of ZooKeeper does not.
    if isinstance(context.metadata, ZooKeeperMetadata):
        patterns = {
            name
            for name in known
            if "*" in name and compile_topic_pattern(name).fullmatch(topic)
        }
        snapshot = await read_cluster(context, patterns, deadline_s=deadline_s)
        for pattern in patterns:
            for broker_id in snapshot.puts.get(pattern, {}):
                copies = snapshot.brokers.get(broker_id)
                if copies is not None and copies.leader is not None:
                    addresses[broker_id] = copies.leader
    if not addresses:
        raise nobody_serves(topic, known)
    partitions = [
        TopicPartition(topic, broker_id, 0) for broker_id in sorted(addresses)
    ]
    brokers = tuple(str(addresses[broker_id]) for broker_id in sorted(addresses))
    return Found(
        replace(target, brokers=brokers), named_partitions(topic, partitions, wanted)
    )
