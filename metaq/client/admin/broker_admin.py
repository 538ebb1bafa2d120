"""Administration calls about brokers and partitions.

They describe brokers and partitions, read statistics of brokers, and delete the records
of brokers that are gone for good. Every function takes the parts of a started client,
and raises CoordinationError if ZooKeeper cannot be asked.

Source: docs/metaq-1.4/client.md 4 and 14.
"""

import asyncio
import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from metaq.client.cluster.broker_facts import read_closed
from metaq.client.cluster.catalog import read_cluster, read_whole, recorded_addresses
from metaq.client.cluster.context import ClientContext, ZooKeeperCall
from metaq.client.cluster.metadata import NO_BROKERS
from metaq.client.cluster.metadata_queries import LogQueries
from metaq.client.consume.browse import (
    check_item,
    known_partitions,
    known_topics,
    stats_text,
)
from metaq.client.errors import BrokerRegisteredError
from metaq.client.fan_out import for_each, raise_first
from metaq.client.names import near_topics, require_names
from metaq.client.own_process import OfOneProcess
from metaq.client.validation import check_whole
from metaq.cluster_snapshot import ClusterSnapshot
from metaq.errors import ClientError, MetaqError, NoBrokerError
from metaq.model import BrokerAddress, BrokerId, Offset, TopicPartition
from metaq.peer.replies import parse_stats
from metaq.zk.errors import NodeNotEmptyError
from metaq.zk.groups import list_groups
from metaq.zk.offsets import GroupOffsets

NAMES_SHOWN_MAX: Final = 10


class AdminCall(ZooKeeperCall):
    """ZooKeeper and the brokers during one administration call, with its deadline."""

    def __init__(
        self,
        context: ClientContext,
        deadline_s: float,
        needed: str = "groups are kept in",
    ) -> None:
        """Begin; nothing is asked.

        Args:
            context: the parts of a started client.
            deadline_s: deadline of the call, monotonic.
            needed: purpose of ZooKeeper; see `require_coordinator`.

        Raises:
            ConfigError: the client has no ZooKeeper.
        """
        coordinator = context.require_coordinator(needed)
        super().__init__(coordinator, context.paths, deadline_s)
        self.context = context
        self.read_cluster = partial(read_cluster, context, deadline_s=deadline_s)

    async def groups(self) -> tuple[str, ...]:
        """Return the names of all groups ever used and not deleted, ascending."""
        return await list_groups(
            self.coordinator, self.paths, deadline_s=self.deadline_s
        )


# -- values ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BrokerDescription:
    """A registered or recorded broker at one moment."""

    broker_id: BrokerId | None
    """Its id; None for a named address that has never answered."""
    address: BrokerAddress | None
    """Last known address of its leader; None if unknown."""
    has_leader: bool
    """Whether its leader, which takes puts, is registered."""
    followers: tuple[int, ...]
    """Numbers of its registered followers."""
    topic_count: int
    """Number of topics that it serves or has recorded."""
    partition_count: int

    @property
    def is_present(self) -> bool:
        """Whether its leader or a follower is registered."""
        return self.has_leader or bool(self.followers)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionDescription:
    """A partition and its log at one moment."""

    partition: TopicPartition
    address: BrokerAddress | None
    """Address from which its log is read: the leader's, or else a follower's."""
    takes_puts: bool
    """Whether its broker has registered it for producers."""
    gives_gets: bool
    """Whether its broker has registered it for consumers."""
    is_away: bool
    """Whether it is recorded and no broker serves it."""
    log_start: Offset | None = None
    """Log start; None: nothing was ever put, its broker is away, or see `problem`."""
    log_end: Offset | None = None
    """Offset of the next message; None as `log_start`."""
    is_closed: bool | None = None
    """Whether an operator has closed it; None: its broker does not report it."""
    problem: str = ""
    """Error of the queries for the log's start and end, in one sentence; "": none."""


# -- calls ----------------------------------------------------------------------------


class AsyncBrokerAdmin(OfOneProcess):
    """The part of `AsyncAdmin` about brokers and partitions."""

    def __init__(self, context: ClientContext) -> None:
        """Wrap the client's parts; use `AsyncClient.admin` to create one."""
        self._context = context

    async def brokers(
        self, timeout: float | None = None
    ) -> tuple[BrokerDescription, ...]:
        """Return the registered brokers, and those that are away and recorded.

        Ids ascending, followed by named addresses that have never answered. Java
        brokers that are away are missing, because they leave no record. Works without
        ZooKeeper, but then brokers that are away are not known.

        Args:
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            NoBrokerError: nothing is known of the cluster.
            CoordinationError: ZooKeeper cannot be asked.
        """
        return await _brokers(self._context, await self._context.reach(timeout))

    async def forget_broker(
        self, broker_id: int, *, plan: bool = False, timeout: float | None = None
    ) -> BrokerDescription:
        """Delete the records of a broker that is gone for good, and return them.

        The offsets that groups have committed in its partitions are deleted too.
        Afterwards its partitions are no longer reported as away, deletions of topics do
        not wait for it, and the contents of its data directories are unknown. Its data
        is not deleted: if it starts again, it registers and is recorded again.

        Durability: on return a majority of the ZooKeeper servers has it on disk.

        Args:
            broker_id: id of the broker.
            plan: only return the records that would be deleted.
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            BrokerRegisteredError: it is registered, and would write its record again.
            ClientError: there is no record of it.
            ConfigError: no whole number of 0 or more, or the client has no ZooKeeper.
            CoordinationError: ZooKeeper cannot be asked; some records may be deleted,
                and the call may be repeated.

        Cancellation: some records may be deleted.
        """
        check_whole("broker_id", broker_id, 0)
        here = AdminCall(self._context, await self._context.reach(timeout))
        broker = await _require_gone(here, BrokerId(broker_id))
        if not plan:
            await _forget_broker(here, BrokerId(broker_id))
        return broker

    async def broker_stats(
        self, broker_id: int, item: str = "", timeout: float | None = None
    ) -> str:
        """Return the text of one broker's statistics, as `AsyncClient.stats` of all.

        Args:
            broker_id: id of the broker; its leader is asked, or else a follower.
            item: "" for the broker itself, or one of MetaQ's items, like `topics`.
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            NoBrokerError: the broker is not registered.
            MetaqError: the broker cannot be asked, or refuses.
            TypeError, ConfigError: an argument is not a number, or not an item.
        """
        check_whole("broker_id", broker_id, 0)
        check_item(item)
        context, deadline_s = self._context, await self._context.reach(timeout)
        await read_cluster(context, (), deadline_s=deadline_s)
        address = context.address_of(BrokerId(broker_id))
        if address is None:
            raise NoBrokerError(f"broker {broker_id} is not registered")
        return await stats_text(context, address, item, deadline_s=deadline_s)

    async def describe_partitions(
        self,
        topics: Collection[str] | None = None,
        *,
        with_logs: bool = True,
        timeout: float | None = None,
    ) -> tuple[PartitionDescription, ...]:
        """Return the partitions of topics, with their brokers, log starts and ends.

        In the order of the topics, and within each in numeric order; includes
        partitions whose broker is away. If a broker cannot be asked, only the values
        that it has are missing.

        Args:
            topics: names of the topics; None: all topics.
            with_logs: also ask each broker for log starts and ends, and for closed
                partitions; if False, no broker is asked.
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            NoBrokerError: no broker serves or has recorded one of the topics (the text
                names similar ones), or nothing is known of the cluster.
            CoordinationError: ZooKeeper cannot be asked.
            TypeError: `topics` is not a collection of strings.
        """
        context, deadline_s = self._context, await self._context.reach(timeout)
        if topics is not None:
            require_names("topics", topics)
        wanted = topics
        if wanted is None:
            wanted = await known_topics(context, deadline_s=deadline_s)
        snapshot = await read_cluster(context, wanted, deadline_s=deadline_s)
        partitions: list[TopicPartition] = []
        for topic in wanted:
            found = await known_partitions(context, topic, deadline_s=deadline_s)
            if not found and topics is not None:
                known = await known_topics(context, deadline_s=deadline_s)
                raise nobody_serves(topic, known, has_brokers=bool(snapshot.brokers))
            partitions += found
        addresses = {p.broker_id: context.address_of(p.broker_id) for p in partitions}
        asked = [p for p in partitions if with_logs and addresses[p.broker_id]]

        async def closed_at(address: BrokerAddress) -> frozenset[str] | None:
            text = await stats_text(context, address, "", deadline_s=deadline_s)
            return read_closed(parse_stats(text))

        async with asyncio.TaskGroup() as both:
            asking = both.create_task(
                for_each(lambda one: LogQueries(context, one, deadline_s).ends(), asked)
            )
            there = {each for each in addresses.values() if each and with_logs}
            closing = both.create_task(for_each(closed_at, there))
        ends, closed = asking.result(), closing.result()

        return tuple(
            _describe_partition(
                one, snapshot, addresses[one.broker_id], ends.get(one), closed
            )
            for one in partitions
        )

    async def wait_until_there(
        self, topics: Collection[str], timeout: float | None = None
    ) -> None:
        """Wait until no partition of some topics is away.

        Args:
            topics: names of the topics.
            timeout: seconds; None takes `request_timeout_s`, 0 only checks.

        Raises:
            PartitionsAwayError: some are still away; the text names the remedy.
            NoBrokerError: nothing is known of the cluster.
            TypeError: `topics` is not a collection of strings.
        """
        require_names("topics", topics)
        deadline_s = await self._context.reach(timeout)
        await read_whole(self._context, topics, deadline_s=deadline_s)


# -- partitions and brokers ------------------------------------------------------------


def _describe_partition(
    partition: TopicPartition,
    snapshot: ClusterSnapshot,
    address: BrokerAddress | None,
    log: tuple[Offset, Offset] | MetaqError | None,
    closed: Mapping[BrokerAddress, frozenset[str] | MetaqError | None],
) -> PartitionDescription:
    topic = partition.topic
    start, end = log if isinstance(log, tuple) else (None, None)
    # If that query failed, so did the one for the log, with the same sentence.
    names = closed.get(address) if address else None
    return PartitionDescription(
        partition=partition,
        address=address,
        takes_puts=partition in snapshot.put_partitions(topic),
        gives_gets=partition in snapshot.get_partitions(topic),
        is_away=not snapshot.is_served(partition),
        log_start=start,
        log_end=end,
        is_closed=(
            f"{topic}-{partition.partition}" in names
            if isinstance(names, frozenset)
            else None
        ),
        problem=str(log) if isinstance(log, MetaqError) else "",
    )


def nobody_serves(
    topic: str, known: Collection[str], *, has_brokers: bool = True
) -> NoBrokerError:
    """Return the error of a call about a topic without partitions.

    The topic may be among the known ones, because nodes outlive brokers.
    """
    others = sorted(set(known) - {topic})[:NAMES_SHOWN_MAX]
    hint = (
        f"{near_topics(topic, known)}; other topics are: {', '.join(others) or 'none'}"
        if has_brokers
        else NO_BROKERS
    )
    return NoBrokerError(f"no broker serves topic '{topic}' at the moment; {hint}")


async def _brokers(
    context: ClientContext, deadline_s: float
) -> tuple[BrokerDescription, ...]:
    """Return the brokers; see `AsyncBrokerAdmin.brokers`."""
    names = await context.metadata.topics(deadline_s=deadline_s)
    snapshot = await read_cluster(context, names, deadline_s=deadline_s)
    addresses = await recorded_addresses(context, deadline_s=deadline_s)
    counts: dict[BrokerId, dict[str, int]] = {}
    for known_counts in (snapshot.recorded, snapshot.puts, snapshot.gets):
        for topic, by_broker in known_counts.items():
            for broker_id, count in by_broker.items():
                known = counts.setdefault(broker_id, {})
                known[topic] = max(known.get(topic, 0), count)
    found = []
    for broker_id in sorted(snapshot.brokers.keys() | addresses.keys() | counts.keys()):
        copies = snapshot.brokers.get(broker_id)
        leader = snapshot.leader(broker_id)
        served = counts.get(broker_id, {})
        found.append(
            BrokerDescription(
                broker_id,
                leader or addresses.get(broker_id),
                has_leader=leader is not None,
                followers=tuple(copies.followers) if copies else (),
                topic_count=len(served),
                partition_count=sum(served.values()),
            )
        )
    silent = [
        BrokerDescription(None, address, False, (), 0, 0)
        for address in sorted(snapshot.silent)
    ]
    return (*found, *silent)


async def _require_gone(here: AdminCall, broker_id: BrokerId) -> BrokerDescription:
    """Return the broker whose records will be deleted; raises as `forget_broker`."""
    found = await _brokers(here.context, here.deadline_s)
    for broker in found:
        if broker.broker_id == broker_id and broker.is_present:
            raise BrokerRegisteredError(
                f"broker {broker_id} is registered at {broker.address}: stop it before"
                " it is forgotten"
            )
        if broker.broker_id == broker_id:
            return broker
    if await _offsets_of_broker(here, broker_id):
        # A Java broker leaves no record, but groups have offsets in its partitions.
        return BrokerDescription(broker_id, None, False, (), 0, 0)
    known = ", ".join(str(broker.broker_id) for broker in found) or "none"
    raise ClientError(f"there is no record of broker {broker_id}; brokers are: {known}")


async def _offsets_of_broker(
    here: AdminCall, broker_id: BrokerId
) -> dict[str, tuple[TopicPartition, ...]]:
    """Return each group's partitions on one broker that have a committed offset."""
    found, deadline_s = {}, here.deadline_s
    for group in await here.groups():
        offsets = GroupOffsets(here.coordinator, here.paths, group=group)
        partitions = [
            partition
            for topic in await offsets.topics(deadline_s=deadline_s)
            for partition in await offsets.partitions(topic, deadline_s=deadline_s)
            if partition.broker_id == broker_id
        ]
        if partitions:
            found[group] = tuple(partitions)
    return found


async def _forget_broker(here: AdminCall, broker_id: BrokerId) -> None:
    """Delete the records of a broker; may be repeated after an error."""
    paths, delete, deadline_s = here.paths, here.delete, here.deadline_s
    recorded = await here.children(paths.recorded_topics())
    marked = await here.children(paths.topics_with_status())
    nodes = [
        *(paths.recorded_partitions(topic, broker_id) for topic in recorded),
        *(paths.topic_status(topic, broker_id) for topic in marked),
    ]

    async def forget(path: str) -> None:
        if not await here.exists(path):
            return
        await delete(path)
        with contextlib.suppress(NodeNotEmptyError):
            await delete(path.rpartition("/")[0])

    raise_first(await for_each(forget, nodes))
    groups = await _offsets_of_broker(here, broker_id)
    for group, partitions in groups.items():
        # Members of the group commit only in partitions of other brokers.
        offsets = GroupOffsets(here.coordinator, paths, group=group)
        for partition in partitions:
            await offsets.delete_offset(partition, deadline_s=deadline_s)
    await delete(paths.recorded_directories(broker_id))
    # Last, so that a call that failed half-way can be repeated.
    await delete(paths.recorded_broker(broker_id))
