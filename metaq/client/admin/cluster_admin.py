"""Reads and changes consumer groups in ZooKeeper: members, owners, offsets and lag.

Nothing here joins a group. Groups of Java consumers are supported, because they keep
the same nodes. A change is first planned, as values, and then written by
`write_offsets`, so that a plan can be shown without being carried out.

Source: docs/metaq-1.4/client.md 4, 13 and 14.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from metaq.client.admin.broker_admin import AdminCall
from metaq.client.cluster.boundaries import offset_back
from metaq.client.cluster.context import ClientContext
from metaq.client.cluster.presence import require_all_there
from metaq.client.cluster.queue_groups import where_of
from metaq.client.consume.progress import Lag, lag_and_start
from metaq.client.errors import GroupInUseError, PartitionsAwayError
from metaq.client.fan_out import failures, for_each, raise_first
from metaq.client.names import name_few
from metaq.client.offsets.offset_reset import NO_MESSAGE, Goal, find_goal
from metaq.errors import ClientError, CoordinationError, MetaqError, NoBrokerError
from metaq.model import GroupOffset, Offset, TopicPartition, printable
from metaq.zk.errors import NodeNotEmptyError, PayloadError
from metaq.zk.groups import Members, read_members, read_owners
from metaq.zk.offsets import GroupOffsets
from metaq.zk.paths import NodeKind, is_legal_step


@dataclass(frozen=True, slots=True)
class PartitionProgress:
    """Progress of a group in one partition."""

    partition: TopicPartition
    owner: str | None
    """Member that owns it; None: no member does."""
    is_wanted: bool
    """Whether a member subscribes to its topic, so that it should have an owner."""
    committed: Offset | None
    """The group's next offset; None: nothing was ever committed."""
    lag: Lag | None
    """Distance from the committed offset to the log end; without one, from the log
    start, where a group begins by default. None: unknown."""
    problem: str | None
    """Reason for an unknown value, or what retention has removed before the group
    handled it, in one sentence."""


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """A group at one moment."""

    group: str
    members: Members
    """Member → the topics it subscribes to."""
    partitions: tuple[PartitionProgress, ...]
    """Partitions that it subscribes to, owns or has offsets of; numeric order."""
    where: str | None = None
    """Filter of its present or last members; None: they read all messages."""


@dataclass(frozen=True, slots=True)
class OffsetChange:
    """A change of one partition's offset, and the offset it replaces."""

    partition: TopicPartition
    old: GroupOffset | None
    """The committed offset; None: there is none, or its node is unreadable."""
    new: GroupOffset | None
    """The offset to write; None: delete it."""


class AdminGroup(AdminCall):
    """One group during one administration call.

    Every method raises CoordinationError if ZooKeeper cannot be asked.
    """

    def __init__(self, context: ClientContext, group: str, deadline_s: float) -> None:
        """Create it; nothing is asked.

        Args:
            context: the parts of a started client.
            group: name of the group; an unknown one has no members and offsets.
            deadline_s: deadline of the call, monotonic.

        Raises:
            ConfigError: the client has no ZooKeeper.
        """
        super().__init__(context, deadline_s)
        self._group = group
        self._offsets = GroupOffsets(self.coordinator, self.paths, group=group)

    # -- looking ----------------------------------------------------------------------

    async def describe(self) -> GroupDescription:
        """Return its members, owners, offsets and lag.

        If a broker cannot be asked, only the lag in its partitions is unknown.
        Partitions that are away are found in the catalog and in the group's offsets.
        """
        deadline_s, offsets = self.deadline_s, self._offsets
        members = await self._members()
        owned = self.paths.group_topics(NodeKind.OWNER, self._group)
        owned_topics = await self.children(owned)
        # A member may have written anything; illegal names of topics are left out.
        named = {topic for topics in members.values() for topic in topics}
        wanted = set(filter(is_legal_step, named))
        stored = await offsets.topics(deadline_s=deadline_s)
        topics = sorted(wanted.union(stored, owned_topics))
        snapshot = await self.read_cluster(topics)
        place = self.coordinator, self.paths, self._group
        owners: dict[TopicPartition, str] = {}
        partitions: set[TopicPartition] = set()
        for topic in topics:
            owners |= await read_owners(*place, topic, deadline_s=deadline_s)
            partitions.update(snapshot.get_partitions(topic), snapshot.away(topic))
            partitions.update(await offsets.partitions(topic, deadline_s=deadline_s))
        committed: dict[TopicPartition, Offset] = {}
        lost: dict[TopicPartition, str] = {}

        async def look(partition: TopicPartition) -> Lag:
            stored = await offsets.read_offset(partition, deadline_s=deadline_s)
            offset = Offset(0)
            if stored is not None:
                offset = committed[partition] = stored.offset
            self._require_broker(partition)
            if not snapshot.is_served(partition):
                raise PartitionsAwayError(
                    f"{partition}: broker {partition.broker_id} no longer serves it,"
                    " so its log end is unknown",
                    partitions=[partition],
                )
            lag, log_start = await lag_and_start(
                self.context, partition, offset, deadline_s=deadline_s
            )
            if stored is not None and offset < log_start:
                lost[partition] = (
                    f"{partition}: offset {offset} is before the log start {log_start}:"
                    f" {log_start - offset} bytes that the group has not handled are"
                    " gone"
                )
            return lag

        lags = await for_each(look, sorted(partitions | owners.keys()))
        node = await self.get(self.paths.group_filter(self._group))
        return GroupDescription(
            self._group,
            members,
            tuple(
                PartitionProgress(
                    partition,
                    owner=owners.get(partition),
                    is_wanted=partition.topic in wanted,
                    committed=committed.get(partition),
                    lag=None if isinstance(lag, MetaqError) else lag,
                    problem=(
                        str(lag) if isinstance(lag, MetaqError) else lost.get(partition)
                    ),
                )
                for partition, lag in lags.items()
            ),
            None if node is None else where_of(node.data),
        )

    async def _members(self) -> Members:
        return await read_members(
            self.coordinator, self.paths, self._group, deadline_s=self.deadline_s
        )

    def _require_broker(self, partition: TopicPartition) -> None:
        """Fail at once, because a request would be repeated until its deadline."""
        if self.context.address_of(partition.broker_id) is None:
            raise NoBrokerError(
                f"{partition}: broker {partition.broker_id} is not registered"
            )

    async def read_offsets(
        self, topics: Collection[str] | None
    ) -> dict[TopicPartition, GroupOffset | PayloadError]:
        """Return its committed offsets, in numeric order.

        For a node without a readable offset, the value is the error.

        Args:
            topics: only of these topics; None: of all.
        """
        offsets, deadline_s = self._offsets, self.deadline_s
        if topics is None:
            topics = await offsets.topics(deadline_s=deadline_s)
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

    # -- planning ---------------------------------------------------------------------

    async def choose_goals(
        self, topics: Collection[str] | None, goal: Goal
    ) -> dict[TopicPartition, Goal]:
        """Return a goal for each partition of some topics; None: those with offsets.

        To go back some messages, only partitions with a committed offset are returned.

        Raises:
            ClientError: the group has committed no offset, which is needed to know the
                topics or to go back from.
            NoBrokerError: no broker serves a topic.
            PartitionsAwayError: the broker of a partition is away.
        """
        stored = await self.read_offsets(topics)
        is_back = isinstance(goal, int) and goal < 0
        if not stored and (is_back or topics is None):
            raise ClientError(
                f"group {self._group} has committed no offset: expected one to go back"
                " from, or the names of topics"
            )
        wanted = {each.topic for each in stored} if topics is None else set(topics)
        snapshot = await self.read_cluster(wanted)
        if is_back:
            return dict.fromkeys(stored, goal)
        require_all_there(snapshot, wanted)
        goals: dict[TopicPartition, Goal] = {}
        for topic in sorted(wanted):
            served = snapshot.get_partitions(topic)
            if not served:
                raise NoBrokerError(f"no broker serves topic '{topic}'")
            goals |= dict.fromkeys(served, goal)
        return goals

    async def plan_reset(
        self, goals: Mapping[TopicPartition, Goal]
    ) -> tuple[OffsetChange, ...]:
        """Return the offset changes that move the group.

        Args:
            goals: partition → goal; a negative number goes back so many messages from
                the committed offset.

        Raises:
            ClientError: an offset is outside the log or within a message, or there is
                no committed offset to go back from.
            CannotAnswerError: the goal is a time, which a MetaQ 1.4 broker cannot find.
            NoBrokerError: the broker of a partition is not registered.
            CorruptRecordError: the broker reports damage at an offset.
            WireError: the broker refuses to answer.
        """
        context, deadline_s = self.context, self.deadline_s
        await self.read_cluster({partition.topic for partition in goals})

        async def plan(partition: TopicPartition) -> OffsetChange:
            self._require_broker(partition)
            goal, old = goals[partition], await self._read_old(partition)
            if not isinstance(goal, int) or goal >= 0:
                new = await find_goal(context, partition, goal, deadline_s=deadline_s)
            elif old is None:
                raise ClientError(
                    f"{partition}: group {self._group} has committed no offset to go"
                    " back from"
                )
            else:
                new = await offset_back(
                    context, partition, old.offset, -goal, deadline_s=deadline_s
                )
            return OffsetChange(partition, old, GroupOffset(new, NO_MESSAGE))

        return tuple(raise_first(await for_each(plan, sorted(goals))))

    async def _read_old(self, partition: TopicPartition) -> GroupOffset | None:
        """Return the offset that is replaced; None: none, or an unreadable one."""
        try:
            return await self._offsets.read_offset(
                partition, deadline_s=self.deadline_s
            )
        except PayloadError:
            # Members fail on such a node; writing an offset repairs it.
            return None

    async def plan_copy(
        self, source: str, topics: Collection[str] | None
    ) -> tuple[OffsetChange, ...]:
        """Return the changes that copy the offsets of another group.

        Offsets of this group in other partitions stay.

        Args:
            source: group whose offsets are copied.
            topics: only of these topics; None: of all.

        Raises:
            ClientError: there is nothing to copy.
            PayloadError: a node of the source has no readable offset.
        """
        other = AdminGroup(self.context, source, self.deadline_s)
        found = await other.read_offsets(topics)
        if not found:
            of = "" if topics is None else f" of topic {', '.join(topics)}"
            raise ClientError(f"group {source} has no offsets{of}: nothing to copy")

        async def plan(partition: TopicPartition) -> OffsetChange:
            new = found[partition]
            if isinstance(new, PayloadError):
                raise new
            return OffsetChange(partition, await self._read_old(partition), new)

        return tuple(raise_first(await for_each(plan, found)))

    async def plan_delete(
        self, topics: Collection[str] | None
    ) -> tuple[OffsetChange, ...]:
        """Return the deletions of its offsets in some topics, or in all."""
        found = await self.read_offsets(topics)
        return tuple(
            OffsetChange(
                each, stored if isinstance(stored, GroupOffset) else None, None
            )
            for each, stored in found.items()
        )

    # -- writing ----------------------------------------------------------------------

    async def require_idle(self, topics: Collection[str] | None) -> None:
        """Refuse changes while members read, whose commits would overwrite them.

        Raises:
            GroupInUseError: a member subscribes to one of the topics (None: any).
        """
        live = [
            name
            for name, read in (await self._members()).items()
            if topics is None or not set(read).isdisjoint(topics)
        ]
        if live:
            raise GroupInUseError(
                f"group {self._group}: expected no live member, got {len(live)}"
                f" ({printable(name_few(live))}); stop them first: the next commit of"
                " a member would overwrite the offsets"
            )

    async def write_offsets(self, changes: Sequence[OffsetChange]) -> None:
        """Write the changes of a plan, each partition independently.

        Durability: on return a majority of the ZooKeeper servers has all changes on
        disk. After an error some are written; the plan may be written again.

        Raises:
            CoordinationError: some could not be written; the text has their number.
        """
        wanted = {change.partition: change.new for change in changes}
        offsets, deadline_s = self._offsets, self.deadline_s

        async def write(partition: TopicPartition) -> None:
            new = wanted[partition]
            if new is None:
                await offsets.delete_offset(partition, deadline_s=deadline_s)
            else:
                await offsets.set_offset(partition, new, deadline_s=deadline_s)

        failed = failures(await for_each(write, wanted))
        for partition, error in failed.items():
            raise CoordinationError(
                f"{len(failed)} of {len(changes)} offsets may not be written, the"
                f" first of {partition}: {error}"
            ) from error

    async def delete_group(self) -> None:
        """Delete a group without members: its filter, committed offsets and nodes.

        Raises:
            GroupInUseError: a member has joined, or was killed and its session has not
                ended yet.
        """
        paths, group, delete = self.paths, self._group, self.delete

        async def delete_parents(kind: NodeKind) -> None:
            parent = paths.group_topics(kind, group)
            for topic in await self.children(parent):
                await delete(f"{parent}/{topic}")
            await delete(parent)

        try:
            # First the parent of the members: this fails if a member has joined.
            await delete(paths.members(group))
            await delete(paths.group_filter(group))
            await delete_parents(NodeKind.OWNER)
            await self.write_offsets(await self.plan_delete(None))
            await delete_parents(NodeKind.GROUP_OFFSET)
            await delete(paths.group(group))
        except NodeNotEmptyError as error:
            raise GroupInUseError(
                f"group {group}: a member has joined, or one that was killed still owns"
                f" partitions until its session ends: {error}"
            ) from error
