"""Brokers and consumer groups seen from outside: presence, members, owners, lag.

For tools. Brokers that are gone for good are taken out of the catalog here. Nothing
here takes part in a group, and a group of Java consumers is as good as one of ours:
both keep the same nodes. A move is planned first, as values, and written by
`write_offsets` afterwards, so that a plan can be shown without being carried out.

Every function takes the parts of a started client with ZooKeeper, and raises
CoordinationError when ZooKeeper cannot be asked.

Source: docs/metaq-1.4/client.md 4, 13 and 14.
"""

import contextlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from metaq.client.cluster.catalog import read_cluster, recorded_addresses
from metaq.client.cluster.context import ClientContext
from metaq.client.consume.progress import Lag, lag_of
from metaq.client.errors import (
    BrokerRegisteredError,
    GroupInUseError,
    PartitionsAwayError,
)
from metaq.client.fan_out import failures, for_each, raise_first
from metaq.client.names import name_few
from metaq.client.offsets.offset_reset import NO_MESSAGE, Goal, find_goal
from metaq.errors import (
    ClientError,
    ConfigError,
    CoordinationError,
    MetaqError,
    NoBrokerError,
)
from metaq.model import (
    BrokerAddress,
    BrokerId,
    GroupOffset,
    Offset,
    TopicPartition,
    printable,
)
from metaq.zk.errors import NodeNotEmptyError, PayloadError
from metaq.zk.groups import Members, list_groups, read_members, read_owners
from metaq.zk.offsets import GroupOffsets
from metaq.zk.paths import NodeKind, is_legal_step
from metaq.zk.session import Coordinator


@dataclass(frozen=True, slots=True)
class PartitionProgress:
    """Progress of a group in one partition."""

    partition: TopicPartition
    owner: str | None
    """The member that owns it; None for no member."""
    is_wanted: bool
    """Whether a member subscribes to its topic: then it should have an owner."""
    committed: Offset | None
    """The group's next offset; None when nothing was ever committed."""
    lag: Lag | None
    """Distance to the log end; from the log start where nothing was ever committed, for
    there a group begins by default; None when it is not known."""
    problem: str | None
    """Reason for an unknown value, in one sentence."""


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """A group at one moment."""

    group: str
    members: Members
    """Member → the topics it subscribes to."""
    partitions: tuple[PartitionProgress, ...]
    """Partitions that it subscribes to, owns or has offsets of; numeric order."""


@dataclass(frozen=True, slots=True)
class OffsetChange:
    """A change of one partition's offset, and the offset it replaces."""

    partition: TopicPartition
    old: GroupOffset | None
    """The committed offset; None for none, or where the node holds no offset."""
    new: GroupOffset


def require_coordinator(context: ClientContext) -> Coordinator:
    """Return the client's ZooKeeper.

    Raises:
        ConfigError: it was made for named brokers, and has none.
    """
    if context.coordinator is None:
        raise ConfigError(
            "groups are kept in ZooKeeper: expected its address, got brokers by name"
        )
    return context.coordinator


# -- brokers --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BrokerDescription:
    """A broker at one moment, there or recorded."""

    broker_id: BrokerId | None
    """Its id; None for a named address that has never answered."""
    address: BrokerAddress | None
    """Last known address of its leader; None if unknown."""
    has_leader: bool
    """Whether its leader, which takes puts, is registered."""
    followers: tuple[int, ...]
    """Numbers of its followers that are there."""
    topic_count: int
    """Topics that it serves, or has recorded."""
    partition_count: int

    @property
    def is_present(self) -> bool:
        """Whether a copy of it is registered."""
        return self.has_leader or bool(self.followers)


async def brokers(
    context: ClientContext, *, deadline_s: float
) -> tuple[BrokerDescription, ...]:
    """Return the brokers that are there, and those that have left a record.

    Ids ascending; after them the named addresses that have never answered. A Java
    broker records nothing, so one that is away is not among them.

    Raises:
        NoBrokerError: nothing is known of the cluster.
        CoordinationError: ZooKeeper cannot be asked.
    """
    metadata = context.metadata
    names = await metadata.topics(deadline_s=deadline_s)
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
        leader = copies.leader if copies else None
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


async def plan_forget(
    context: ClientContext, broker_id: BrokerId, *, deadline_s: float
) -> BrokerDescription:
    """Return the broker whose record `forget_broker` would remove.

    Raises:
        BrokerRegisteredError: it is there, and would write its record again.
        ClientError: there is no record of it.
        ConfigError, CoordinationError: there is no ZooKeeper, or it cannot be asked.
    """
    require_coordinator(context)
    found = await brokers(context, deadline_s=deadline_s)
    for broker in found:
        if broker.broker_id == broker_id and broker.is_present:
            raise BrokerRegisteredError(
                f"broker {broker_id} is registered at {broker.address}: stop it before"
                " it is forgotten"
            )
        if broker.broker_id == broker_id:
            return broker
    if await offsets_of_broker(context, broker_id, deadline_s=deadline_s):
        # A Java broker leaves no record; the offsets of its groups stay.
        return BrokerDescription(broker_id, None, False, (), 0, 0)
    known = ", ".join(str(broker.broker_id) for broker in found) or "none"
    raise ClientError(f"there is no record of broker {broker_id}; brokers are: {known}")


async def offsets_of_broker(
    context: ClientContext, broker_id: BrokerId, *, deadline_s: float
) -> dict[str, tuple[TopicPartition, ...]]:
    """Return each group's partitions on one broker that have a committed offset."""
    coordinator, found = require_coordinator(context), {}
    for group in await list_groups(coordinator, context.paths, deadline_s=deadline_s):
        offsets = GroupOffsets(coordinator, context.paths, group=group)
        partitions = [
            partition
            for topic in await offsets.topics(deadline_s=deadline_s)
            for partition in await offsets.partitions(topic, deadline_s=deadline_s)
            if partition.broker_id == broker_id
        ]
        if partitions:
            found[group] = tuple(partitions)
    return found


async def forget_broker(
    context: ClientContext, broker_id: BrokerId, *, deadline_s: float
) -> BrokerDescription:
    """Delete the records of a broker that is gone for good, and return them.

    The offsets that groups have committed in its partitions are deleted too. From then
    on nothing says that its partitions are away, no deletion of a topic waits for it,
    and the contents of its data directories are unknown. Its data is not touched: if it
    comes back it registers, and is recorded, again.

    Durability: on return ZooKeeper has it on a majority of its disks. After an error
    some of it is removed; the same call may be made again.

    Raises: as `plan_forget`.
    """
    broker = await plan_forget(context, broker_id, deadline_s=deadline_s)
    coordinator, paths = require_coordinator(context), context.paths
    recorded = await coordinator.children(
        paths.recorded_topics(), deadline_s=deadline_s
    )
    marked = await coordinator.children(
        paths.topics_with_status(), deadline_s=deadline_s
    )
    nodes = [
        *(paths.recorded_partitions(topic, broker_id) for topic in recorded or ()),
        *(paths.topic_status(topic, broker_id) for topic in marked or ()),
    ]

    async def forget(path: str) -> None:
        if not await coordinator.exists(path, deadline_s=deadline_s):
            return
        await coordinator.delete(path, deadline_s=deadline_s)
        with contextlib.suppress(NodeNotEmptyError):
            await coordinator.delete(path.rpartition("/")[0], deadline_s=deadline_s)

    raise_first(await for_each(forget, nodes))
    groups = await offsets_of_broker(context, broker_id, deadline_s=deadline_s)
    for group, partitions in groups.items():
        # Members of the group read other brokers, and commit there.
        offsets = GroupOffsets(coordinator, paths, group=group)
        for partition in partitions:
            await offsets.delete_offset(partition, deadline_s=deadline_s)
    await coordinator.delete(
        paths.recorded_directories(broker_id), deadline_s=deadline_s
    )
    # Last, so that a call that failed half-way can be repeated.
    path = paths.recorded_broker(broker_id)
    await coordinator.delete(path, deadline_s=deadline_s)
    return broker


# -- looking --------------------------------------------------------------------------


async def describe_group(
    context: ClientContext, group: str, *, deadline_s: float
) -> GroupDescription:
    """Return a group's members, owners, offsets and lag.

    If a broker cannot be asked, only the lag of its partitions is unknown. Partitions
    that are away are known from the catalog, and from the group's offsets.

    Args:
        context: the client's parts.
        group: name of the group; one that never was is empty.
        deadline_s: when to give up.
    """
    coordinator, paths = require_coordinator(context), context.paths
    members = await read_members(coordinator, paths, group, deadline_s=deadline_s)
    offsets = GroupOffsets(coordinator, paths, group=group)
    owned_topics = await coordinator.children(
        paths.group_topics(NodeKind.OWNER, group), deadline_s=deadline_s
    )
    # A member may write anything; a topic that cannot exist is left out.
    named = {topic for topics in members.values() for topic in topics}
    wanted = set(filter(is_legal_step, named))
    stored = await offsets.topics(deadline_s=deadline_s)
    topics = sorted(wanted.union(stored, owned_topics or ()))
    snapshot = await read_cluster(context, topics, deadline_s=deadline_s)
    owners: dict[TopicPartition, str] = {}
    partitions: set[TopicPartition] = set()
    for topic in topics:
        owners |= await read_owners(
            coordinator, paths, group, topic, deadline_s=deadline_s
        )
        partitions.update(snapshot.get_partitions(topic), snapshot.away(topic))
        partitions.update(await offsets.partitions(topic, deadline_s=deadline_s))
    committed: dict[TopicPartition, Offset] = {}

    async def look(partition: TopicPartition) -> Lag:
        stored = await offsets.read_offset(partition, deadline_s=deadline_s)
        offset = Offset(0)
        if stored is not None:
            offset = committed[partition] = stored.offset
        _require_broker(context, partition)
        if not snapshot.is_served(partition):
            raise PartitionsAwayError(
                f"{partition}: broker {partition.broker_id} does not serve it any more,"
                " how far its log goes is not known",
                partitions=[partition],
            )
        return await lag_of(context, partition, offset, deadline_s=deadline_s)

    lags = await for_each(look, sorted(partitions | owners.keys()))
    return GroupDescription(
        group,
        members,
        tuple(
            PartitionProgress(
                partition,
                owner=owners.get(partition),
                is_wanted=partition.topic in wanted,
                committed=committed.get(partition),
                lag=None if isinstance(lag, MetaqError) else lag,
                problem=str(lag) if isinstance(lag, MetaqError) else None,
            )
            for partition, lag in lags.items()
        ),
    )


def _require_broker(context: ClientContext, partition: TopicPartition) -> None:
    """Fail at once, where a question would be repeated until its deadline."""
    if context.address_of(partition.broker_id) is None:
        raise NoBrokerError(
            f"{partition}: broker {partition.broker_id} is not registered"
        )


async def read_offsets(
    context: ClientContext, group: str, topic: str | None, *, deadline_s: float
) -> dict[TopicPartition, GroupOffset | PayloadError]:
    """Return the committed offsets of a group, in numeric order.

    Of a node that holds no offset the error is returned.

    Args:
        context: the client's parts.
        group: name of the group.
        topic: only of this topic; None: of all.
        deadline_s: when to give up.
    """
    offsets = GroupOffsets(require_coordinator(context), context.paths, group=group)
    topics = await offsets.topics(deadline_s=deadline_s) if topic is None else (topic,)
    found: dict[TopicPartition, GroupOffset | PayloadError] = {}
    for name in topics:
        for partition in await offsets.partitions(name, deadline_s=deadline_s):
            try:
                stored = await offsets.read_offset(partition, deadline_s=deadline_s)
            except PayloadError as error:
                found[partition] = error
                continue
            if stored is not None:
                found[partition] = stored
    return {partition: found[partition] for partition in sorted(found)}


# -- planning -------------------------------------------------------------------------


async def plan_reset(
    context: ClientContext,
    group: str,
    partitions: Collection[TopicPartition],
    goal: Goal,
    *,
    deadline_s: float,
) -> tuple[OffsetChange, ...]:
    """Return the changes of offsets that have a group go on elsewhere.

    Args:
        context: the client's parts.
        group: name of the group.
        partitions: the partitions to move.
        goal: where to.
        deadline_s: when to give up.

    Raises:
        ClientError: an offset outside the log, or within a message.
        CannotAnswerError: a time, of a broker that knows none.
        NoBrokerError: the broker of a partition is not there.
        CorruptRecordError: the broker names damage at an offset.
        WireError: the broker refuses to answer.
    """
    offsets = GroupOffsets(require_coordinator(context), context.paths, group=group)

    async def plan(partition: TopicPartition) -> OffsetChange:
        _require_broker(context, partition)
        old = await _read_old(offsets, partition, deadline_s)
        new = await find_goal(context, partition, goal, deadline_s=deadline_s)
        return OffsetChange(partition, old, GroupOffset(new, NO_MESSAGE))

    return tuple(raise_first(await for_each(plan, sorted(partitions))))


async def _read_old(
    offsets: GroupOffsets, partition: TopicPartition, deadline_s: float
) -> GroupOffset | None:
    """Return the offset that is replaced; None where the node holds none."""
    try:
        return await offsets.read_offset(partition, deadline_s=deadline_s)
    except PayloadError:
        # Its members cannot begin: writing an offset is the remedy.
        return None


async def plan_copy(
    context: ClientContext,
    source: str,
    target: str,
    topic: str | None,
    *,
    deadline_s: float,
) -> tuple[OffsetChange, ...]:
    """Return the changes of offsets that have one group go on where another is.

    Args:
        context: the client's parts.
        source: the group whose offsets are read.
        target: the group that gets them; offsets it has beyond those stay.
        topic: only of this topic; None: of all.
        deadline_s: when to give up.

    Raises:
        ClientError: there is nothing to copy.
        PayloadError: a node of the source holds no offset.
    """
    found = await read_offsets(context, source, topic, deadline_s=deadline_s)
    if not found:
        of = "" if topic is None else f" of topic {topic}"
        raise ClientError(f"group {source} has no offsets{of}: nothing to copy")
    offsets = GroupOffsets(require_coordinator(context), context.paths, group=target)

    async def plan(partition: TopicPartition) -> OffsetChange:
        new = found[partition]
        if isinstance(new, PayloadError):
            raise new
        old = await _read_old(offsets, partition, deadline_s)
        return OffsetChange(partition, old, new)

    return tuple(raise_first(await for_each(plan, found)))


# -- writing --------------------------------------------------------------------------


async def require_idle(
    context: ClientContext,
    group: str,
    topics: Collection[str] | None,
    *,
    deadline_s: float,
) -> None:
    """Refuse to move a group that reads: it goes on from where it is, and overwrites.

    Raises:
        GroupInUseError: a member subscribes to one of the topics; None: to any.
    """
    members = await read_members(
        require_coordinator(context), context.paths, group, deadline_s=deadline_s
    )
    live = [
        name
        for name, read in members.items()
        if topics is None or not set(read).isdisjoint(topics)
    ]
    if live:
        raise GroupInUseError(
            f"group {group}: expected no live member, got {len(live)}"
            f" ({printable(name_few(live))}); a member goes on from where it is, and"
            " its next commit overwrites what is written here"
        )


async def write_offsets(
    context: ClientContext,
    group: str,
    changes: Sequence[OffsetChange],
    *,
    deadline_s: float,
) -> None:
    """Carry out a plan; each partition by itself.

    Durability: on return ZooKeeper has all of it on a majority of its disks. After an
    error some of it is written; the same plan may be carried out again.

    Raises:
        CoordinationError: some could not be written; the text counts them.
    """
    offsets = GroupOffsets(require_coordinator(context), context.paths, group=group)
    wanted = {change.partition: change.new for change in changes}

    async def write(partition: TopicPartition) -> None:
        await offsets.set_offset(partition, wanted[partition], deadline_s=deadline_s)

    failed = failures(await for_each(write, wanted))
    for partition, error in failed.items():
        raise CoordinationError(
            f"{len(failed)} of {len(changes)} offsets are not written, the first of"
            f" {partition}: {error}"
        ) from error


# -- deleting -------------------------------------------------------------------------


async def delete_offsets(
    context: ClientContext,
    group: str,
    partitions: Iterable[TopicPartition],
    *,
    deadline_s: float,
) -> None:
    """Delete committed offsets of a group; each partition by itself.

    After an error some are deleted; the same call may be made again.

    Raises:
        GroupInUseError: a member subscribes to one of the topics.
    """
    partitions = tuple(partitions)
    topics = {partition.topic for partition in partitions}
    await require_idle(context, group, topics, deadline_s=deadline_s)
    offsets = GroupOffsets(require_coordinator(context), context.paths, group=group)

    async def delete(partition: TopicPartition) -> None:
        await offsets.delete_offset(partition, deadline_s=deadline_s)

    raise_first(await for_each(delete, partitions))


async def delete_group(
    context: ClientContext, group: str, *, deadline_s: float
) -> None:
    """Delete a group without members: its committed offsets, then its nodes.

    Raises:
        GroupInUseError: a member is there, has joined meanwhile, or has ended without
            a farewell, and its session is not over yet.
    """
    await require_idle(context, group, None, deadline_s=deadline_s)
    coordinator, paths = require_coordinator(context), context.paths

    async def delete_parents(kind: NodeKind) -> None:
        parent = paths.group_topics(kind, group)
        topics = await coordinator.children(parent, deadline_s=deadline_s) or ()
        for path in (*(f"{parent}/{topic}" for topic in topics), parent):
            await coordinator.delete(path, deadline_s=deadline_s)

    try:
        # First the parent of the members: it cannot be deleted once one has joined.
        await coordinator.delete(paths.members(group), deadline_s=deadline_s)
        await delete_parents(NodeKind.OWNER)
        found = await read_offsets(context, group, None, deadline_s=deadline_s)
        await delete_offsets(context, group, found, deadline_s=deadline_s)
        await delete_parents(NodeKind.GROUP_OFFSET)
        await coordinator.delete(paths.group(group), deadline_s=deadline_s)
    except NodeNotEmptyError as error:
        raise GroupInUseError(
            f"group {group}: a member has joined, or one that was killed still owns"
            f" partitions until its session ends: {error}"
        ) from error
