"""The cluster of a command: brokers found in ZooKeeper, or given ones."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeVar

import click

from metaq.cli import render
from metaq.client import AsyncAdmin, AsyncClient, BrokerDescription, Client
from metaq.clock import Clock
from metaq.config.topic_rules import compile_topic_pattern
from metaq.errors import ConfigError, CoordinationError, NoBrokerError
from metaq.model import TopicPartition
from metaq.zk.coordinator import ZooKeeperCoordinator
from metaq.zk.paths import normalize_root
from metaq.zk.servers import parse_servers
from metaq.zk.session import Coordinator

T = TypeVar("T")

CLOSE_TIMEOUT_S: Final = 5.0
"""Timeout for commits and replies at the end of a command, seconds."""
SESSION_TIMEOUT_S: Final = 10.0
"""Time after which the partitions of a killed command go to another member, seconds."""
STOP_S: Final = 3.0
"""Timeout for the end of a ZooKeeper session, seconds."""


@dataclass(frozen=True, slots=True)
class Target:
    """Cluster selected by the options."""

    zookeeper: str
    """`host:port[,host:port...][/chroot]`."""
    root: str
    """`zk.zkRoot` of the cluster."""
    brokers: tuple[str, ...]
    """`host:port` or `meta://host:port`; if given, ZooKeeper is not used."""
    timeout_s: float
    coordinator: Callable[[Clock], Coordinator] | None = None
    """Factory of a substitute for ZooKeeper, for tests."""

    def client(self) -> Client:
        """Return a client, not started."""
        return Client(**self._client_options())

    def run(self, work: Callable[[AsyncClient], Awaitable[T]]) -> T:
        """Run a function with a connected client; raises NoBrokerError."""

        async def run() -> T:
            async with AsyncClient(**self._client_options()) as client:
                try:
                    await client.topics()
                except (CoordinationError, NoBrokerError) as error:
                    raise NoBrokerError(self.no_answer()) from error
                return await work(client)

        return asyncio.run(run())

    def ask(self, work: Callable[[AsyncAdmin], Awaitable[T]]) -> T:
        """Run a function with the cluster's `AsyncAdmin`; raises as `run`."""
        return self.run(lambda client: work(client.admin()))

    def show_defined(
        self, work: Callable[[AsyncAdmin], Awaitable[T]], show: Callable[[T], None]
    ) -> bool:
        """Run `ask` and show the result; return whether all definitions were read."""

        async def both(admin: AsyncAdmin) -> tuple[T, tuple[str, ...]]:
            return await work(admin), await admin.unread_definitions()

        found, unread = self.ask(both)
        show(found)
        for sentence in unread:
            render.say(sentence)
        return not unread

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

    async def find_brokers(self, admin: AsyncAdmin) -> list[BrokerDescription]:
        """Return the present brokers, at least one; raises NoBrokerError if none."""
        found = [each for each in await admin.brokers() if each.is_present]
        if not found:
            raise self.no_broker()
        return found

    def no_broker(self) -> NoBrokerError:
        """Return the error for a cluster without brokers."""
        return NoBrokerError(
            f"no broker is registered in ZooKeeper at {self.zookeeper} below"
            f" {self.root}"
        )

    def no_answer(self) -> str:
        """Return the text for a cluster that does not answer."""
        waited = f"(waited {self.timeout_s:g} s)"
        if self.brokers:
            return f"no broker answers at {', '.join(self.brokers)} {waited}"
        return f"no ZooKeeper answers at {self.zookeeper} {waited}"


@asynccontextmanager
async def open_session(
    zookeeper: str, clock: Clock, make: Callable[[Clock], Coordinator] | None = None
) -> AsyncIterator[Coordinator]:
    """Open a ZooKeeper session for the block; it may not be connected yet.

    Args:
        zookeeper: `host:port[,host:port...][/chroot]`.
        clock: clock of its deadlines.
        make: factory of a substitute for ZooKeeper, for tests.
    """
    session_ms = int(SESSION_TIMEOUT_S * 1000)
    coordinator = (
        make(clock)
        if make
        else ZooKeeperCoordinator(zookeeper, session_timeout_ms=session_ms, clock=clock)
    )
    coordinator.start()
    try:
        yield coordinator
    finally:
        await coordinator.stop(deadline_s=clock.monotonic_s() + STOP_S)


def check_target(target: Target) -> None:
    """Check the addresses in the options; the error names the option."""
    checks: list[tuple[Callable[[str], object], str, str]] = [
        (lambda text: Client(brokers=[text]), text, "--broker")
        for text in target.brokers
    ] or [
        (parse_servers, target.zookeeper, "--zookeeper"),
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
    """Return the partitions named by `--partition`, by default all.

    A name is `BROKER-NUMBER`, or `NUMBER` if only one broker has it.
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
    """Cluster, limited to some brokers if only these know the topic: one without
    messages that matches their patterns."""
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

    Raises if no broker serves the topic, if a partition to be read is away, or if an
    exchange is to be read.

    Args:
        target: the cluster.
        topic: topic name.
        wanted: values of `--partition`; () for all.
        kind: "puts" for partitions that take puts, "gets" for those to be read.
        is_partial: for gets, leave out partitions that are away.
    """

    async def find(client: AsyncClient) -> Found:
        admin = client.admin()
        if kind == "gets" and not (is_partial or wanted):
            await admin.wait_until_there([topic])
        try:
            found = await admin.describe_partitions([topic], with_logs=False)
        except NoBrokerError as error:
            return await _find_by_pattern(target, topic, wanted, client, error)
        names = [each.partition.name for each in found if each.is_away]
        if kind == "gets" and not set(wanted).isdisjoint(names):
            await admin.wait_until_there([topic], timeout=0)
        usable = [
            each.partition
            for each in found
            if (each.takes_puts if kind == "puts" else each.gives_gets)
        ]
        if not usable:
            await admin.wait_until_there([topic], timeout=0)  # names what is away
            raise NoBrokerError(f"no broker serves topic '{topic}' at the moment")
        return Found(target, named_partitions(topic, usable, wanted))

    return target.run(find)


def find_missing(target: Target, topics: Collection[str]) -> tuple[str, ...]:
    """Return the topics without a partition on any broker, present or away.

    Raises:
        NoBrokerError: the cluster does not answer.
    """

    async def look(client: AsyncClient) -> tuple[str, ...]:
        return tuple([each for each in topics if not await client.partitions(each)])

    return target.run(look)


async def _find_by_pattern(
    target: Target,
    topic: str,
    wanted: tuple[str, ...],
    client: AsyncClient,
    error: NoBrokerError,
) -> Found:
    """Return the brokers with a pattern that matches a topic; raise `error` if none."""
    # A client of given brokers has applied their patterns; one of ZooKeeper has not.
    known = () if target.brokers else await client.topics()
    addresses = {}
    for name in known:
        if "*" in name and compile_topic_pattern(name).fullmatch(topic):
            with suppress(NoBrokerError):
                admin = client.admin()
                for each in await admin.describe_partitions([name], with_logs=False):
                    if each.takes_puts and each.address is not None:
                        addresses[each.partition.broker_id] = str(each.address)
    if not addresses:
        raise error
    partitions = [TopicPartition(topic, number, 0) for number in sorted(addresses)]
    brokers = tuple(addresses[each.broker_id] for each in partitions)
    return Found(
        replace(target, brokers=brokers), named_partitions(topic, partitions, wanted)
    )
