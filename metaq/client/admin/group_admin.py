"""Calls about consumer groups: seen from outside, moved, copied and deleted.

None of them takes part in a group, and a group of Java consumers is as good as one of
ours: both keep the same nodes in ZooKeeper.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeAlias

from metaq.client.admin.broker_admin import AdminCall, AsyncBrokerAdmin
from metaq.client.admin.cluster_admin import AdminGroup, GroupDescription, OffsetChange
from metaq.client.decisions.ending import forget, settle
from metaq.client.names import as_partition, require_names, require_text
from metaq.client.offsets.offset_reset import Goal
from metaq.client.options import check_start
from metaq.client.validation import check_offset, check_whole
from metaq.errors import ClientError, ConfigError, MetaqError
from metaq.model import GroupOffset, Offset, TopicPartition
from metaq.zk.groups import check_group_node

Changes: TypeAlias = tuple[OffsetChange, ...]
ResetTo: TypeAlias = (
    Literal["earliest", "latest"]
    | datetime
    | int
    | Mapping[TopicPartition, int]
    | Mapping[str, int]
)
"""Place at which a group goes on; `AsyncAdmin.reset_offsets` has the meanings."""


@dataclass(frozen=True, slots=True)
class SettledGroup:
    """Branches of a group's exactly-once batches that were found prepared."""

    committed: int
    """Branches of dead members that were decided; they are committed now."""
    rolled_back: int
    """Branches of dead members that were not decided; they are rolled back now."""
    living: Mapping[str, int]
    """Member that is alive → its branches, which it ends itself."""


class AsyncGroupAdmin(AsyncBrokerAdmin):
    """The part of `AsyncAdmin` about consumer groups; needs ZooKeeper."""

    async def groups(self, timeout: float | None = None) -> tuple[str, ...]:
        """Return the names of all groups that there have ever been, ascending.

        Args:
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            ConfigError: the client has no ZooKeeper.
            CoordinationError: ZooKeeper cannot be asked.
        """
        here = AdminCall(self._context, await self._context.reach(timeout))
        return await here.groups()

    async def describe_group(
        self, group: str, timeout: float | None = None
    ) -> GroupDescription:
        """Return a group's members, and its owner, offset and lag in each partition.

        Joins nothing. One that never was is empty. Where a broker cannot be asked, or
        is away, only the lag in its partitions is not known.

        Args:
            group: its name.
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            ConfigError: the client has no ZooKeeper.
            CoordinationError: ZooKeeper cannot be asked.
            TypeError: the name is no text.
        """
        return await (await self._reach_group(group, timeout)).describe()

    async def committed_offsets(
        self,
        group: str,
        topics: Collection[str] | None = None,
        timeout: float | None = None,
    ) -> dict[TopicPartition, GroupOffset | MetaqError]:
        """Return the offsets that a group has committed, partitions in numeric order.

        No broker is asked. Where a node of ZooKeeper holds no offset, the value is the
        error that a member would get.

        Args:
            group: its name.
            topics: only of these; None: of all.
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            ConfigError: the client has no ZooKeeper.
            CoordinationError: ZooKeeper cannot be asked.
            TypeError: a name is no text.
        """
        _check_topics(topics)
        here = await self._reach_group(group, timeout)
        return {**await here.read_offsets(topics)}

    async def reset_offsets(
        self,
        group: str,
        *,
        to: ResetTo,
        topics: Collection[str] | None = None,
        partitions: Collection[TopicPartition | str] | None = None,
        plan: bool = False,
        force: bool = False,
        timeout: float | None = None,
    ) -> Changes:
        """Have a group go on elsewhere, and return each old and new offset.

        Durability: on return ZooKeeper has it on a majority of its disks. Partitions
        are written one by one: after an error some are, and the same call may be made
        again (but for `-n`, which counts from what is committed then).

        Args:
            group: its name; one that never was is made.
            to: "earliest" or "latest", the ends of each log; a `datetime`, the first
                message of that time or later; `-n`, n messages back from the committed
                offset, no further than the log start; or `{partition: offset}`, the
                start of a message.
            topics: move it in all partitions of these; None: of those in which it has
                committed. With `-n` partitions without an offset are left out.
            partitions: move it in these alone; names like "0-3" are of the one topic.
            plan: only return what would change.
            force: although members read, who overwrite it with their next commit.
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            GroupInUseError: a member subscribes to one of the topics.
            ClientError: no message begins at the offset, it is outside the log, or
                nothing is committed that says from where or where to go.
            CannotAnswerError: a time, of a broker that knows none.
            NoBrokerError: no broker serves a topic or a partition.
            PartitionsAwayError: the broker of a partition is away; name `partitions`.
            ConfigError: a name or `to` that cannot be, or the client has no ZooKeeper.
            CoordinationError: ZooKeeper cannot be asked, or not all is written.
            TypeError: an argument of another type; the text names it.
            MetaqError: a broker cannot be asked; nothing is written.

        Cancellation: some of it may be written.
        """
        require_text("group", group)
        check_group_node(group)
        _check_topics(topics)
        goal = _check_goal(to, topics or ())
        here = await self._reach_group(group, timeout)
        if not isinstance(goal, dict):
            goals = (
                await here.choose_goals(topics, goal)
                if partitions is None
                else dict.fromkeys(_named(partitions, topics), goal)
            )
        elif partitions is None:
            goals = goal
        else:
            raise ConfigError("partitions: expected None beside to={partition: offset}")
        changes = await here.plan_reset(goals)
        await _write(here, changes, plan=plan, force=force)
        return changes

    async def copy_offsets(
        self,
        source: str,
        target: str,
        *,
        topics: Collection[str] | None = None,
        plan: bool = False,
        force: bool = False,
        timeout: float | None = None,
    ) -> Changes:
        """Have one group go on where another is, and return each old and new offset.

        Offsets that the target has beyond those of the source stay. Durability and
        repeats are as of `reset_offsets`.

        Args:
            source: the group whose offsets are read; it may have members.
            target: the group that gets them; one that never was is made.
            topics: only of these; None: of all.
            plan: only return what would change.
            force: although members of the target read, who overwrite it.
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            GroupInUseError: a member of the target subscribes to one of the topics.
            ClientError: the source has committed nothing there.
            ConfigError: a name that cannot be, or the client has no ZooKeeper.
            CoordinationError: ZooKeeper cannot be asked, a node of the source holds no
                offset, or not all is written.
            TypeError: a name is no text.

        Cancellation: some of it may be written.
        """
        require_text("source", source)
        require_text("target", target)
        check_group_node(target)
        _check_topics(topics)
        here = await self._reach_group(target, timeout)
        changes = await here.plan_copy(source, topics)
        await _write(here, changes, plan=plan, force=force)
        return changes

    async def delete_offsets(
        self,
        group: str,
        *,
        topics: Collection[str] | None = None,
        partitions: Collection[TopicPartition | str] | None = None,
        plan: bool = False,
        timeout: float | None = None,
    ) -> Changes:
        """Delete offsets that a group has committed, and return them.

        Where it has none a group begins as a new one does. After an error some are
        deleted; the same call may be made again.

        Args:
            group: its name.
            topics: only of these; None: of all.
            partitions: only of these; names like "0-3" are of the one topic.
            plan: only return what would be deleted.
            timeout: seconds; None takes `request_timeout_s`.

        Returns:
            () where nothing is committed.

        Raises:
            GroupInUseError: a member subscribes to one of the topics.
            ConfigError: a name that cannot be, or the client has no ZooKeeper.
            CoordinationError: ZooKeeper cannot be asked, or not all is deleted.
            TypeError: a name is no text.

        Cancellation: some of it may be deleted.
        """
        _check_topics(topics)
        here = await self._reach_group(group, timeout)
        changes = await here.plan_delete(topics)
        if partitions is not None:
            chosen = _named(partitions, topics)
            changes = tuple(one for one in changes if one.partition in chosen)
        await _write(here, changes, plan=plan)
        return changes

    async def delete_group(
        self, group: str, *, plan: bool = False, timeout: float | None = None
    ) -> Changes:
        """Delete a group with its committed offsets, and return these.

        If it comes back it begins as a new group does. What it has written exactly once
        is settled first, as by `settle_group`: a batch that is decided is committed
        before its decision is deleted. After an error some of it is deleted; the same
        call may be made again.

        Args:
            group: its name.
            plan: only return what would be deleted.
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            GroupInUseError: a member is there, or one that was killed still owns
                partitions, or may decide, until its session ends.
            ClientError: there is no such group; the text names those there are.
            TransactionInDoubtError: it has written exactly once, and a recorded broker
                does not confirm that nothing stays prepared. Nothing is deleted.
            ConfigError: the client has no ZooKeeper.
            CoordinationError: ZooKeeper cannot be asked, or not all is deleted.
            TypeError: the name is no text.

        Cancellation: some of it may be deleted.
        """
        here = await self._reach_group(group, timeout)
        known = await self.groups(timeout)
        if group not in known:
            raise ClientError(
                f"no group {group}; groups there are: {', '.join(known) or 'none'}"
            )
        await here.require_idle(None)
        changes = await here.plan_delete(None)
        if not plan:
            await forget(self._context, group, deadline_s=here.deadline_s)
            await here.delete_group()
        return changes

    async def _reach_group(self, group: str, timeout: float | None) -> AdminGroup:
        """Wait until ZooKeeper can be asked about a group."""
        require_text("group", group)
        return AdminGroup(self._context, group, await self._context.reach(timeout))

    async def settle_group(
        self, group: str, timeout: float | None = None
    ) -> SettledGroup:
        """End what dead members that wrote exactly once have left, as was decided.

        At all brokers, what ZooKeeper says was decided is committed, and the rest is
        rolled back. What members have that are alive stays theirs.

        Args:
            group: name of the group.
            timeout: seconds; None takes `request_timeout_s`.

        Returns:
            The numbers of branches that were ended, and those of living members.

        Raises:
            TransactionInDoubtError: something stays prepared, or a recorded broker does
                not confirm that nothing is left.
            ConfigError: the client has no ZooKeeper.
            CoordinationError: ZooKeeper cannot be asked; some may be ended.
        """
        require_text("group", group)
        check_group_node(group)
        here = await self._reach_group(group, timeout)
        swept = await settle(self._context, group, deadline_s=here.deadline_s)
        living = {member: len(branches) for member, branches in swept.living.items()}
        return SettledGroup(len(swept.committed), len(swept.rolled_back), living)


async def _write(
    group: AdminGroup, changes: Changes, *, plan: bool, force: bool = False
) -> None:
    """Carry out a plan, unless a member would overwrite it."""
    if not force:
        await group.require_idle({change.partition.topic for change in changes})
    if not plan:
        await group.write_offsets(changes)


def _check_topics(topics: Collection[str] | None) -> None:
    if topics is not None:
        require_names("topics", topics)


def _named(
    partitions: Collection[TopicPartition | str], topics: Collection[str] | None
) -> set[TopicPartition]:
    """Return partitions that an argument names, within the topics of the call."""
    return {as_partition(each, topics or ()) for each in partitions}


def _check_goal(
    to: ResetTo, topics: Collection[str]
) -> Goal | dict[TopicPartition, Goal]:
    """Return the goal of all partitions, or that of each."""
    if isinstance(to, Mapping):
        for partition, offset in to.items():
            check_offset(f"to: offset of {partition}", offset)
        return {as_partition(each, topics): Offset(at) for each, at in to.items()}
    if not isinstance(to, int):
        check_start(to, "to")
        return to
    if to >= 0:
        raise ConfigError(
            "to: an offset is of one partition: expected {partition: offset}, or a"
            f" number below 0 to go so many messages back, got {to!r}"
        )
    check_whole("to: messages to go back", -to, 1)
    return Offset(to)
