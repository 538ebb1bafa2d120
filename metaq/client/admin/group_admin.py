"""Administration calls about consumer groups.

They describe groups, and reset, copy and delete their offsets, without joining them.
Groups of Java consumers are supported, because they keep the same nodes in ZooKeeper.
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
"""New offsets of a group; `AsyncAdmin.reset_offsets` explains the forms."""


@dataclass(frozen=True, slots=True)
class SettledGroup:
    """Branches of a group's exactly-once batches that were found prepared."""

    committed: int
    """Number of decided branches of dead members, which were committed."""
    rolled_back: int
    """Number of undecided branches of dead members, which were rolled back."""
    living: Mapping[str, int]
    """Living member → number of its branches, which it ends itself."""


class AsyncGroupAdmin(AsyncBrokerAdmin):
    """The part of `AsyncAdmin` about consumer groups; needs ZooKeeper."""

    async def groups(self, timeout: float | None = None) -> tuple[str, ...]:
        """Return the names of all groups ever used and not deleted, ascending.

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

        Does not join the group. An unknown group has no members and no partitions. If a
        broker cannot be asked, or is away, only the lag in its partitions is unknown.

        Args:
            group: name of the group.
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            ConfigError: the client has no ZooKeeper.
            CoordinationError: ZooKeeper cannot be asked.
            TypeError: the name is not a string.
        """
        return await (await self._reach_group(group, timeout)).describe()

    async def committed_offsets(
        self,
        group: str,
        topics: Collection[str] | None = None,
        timeout: float | None = None,
    ) -> dict[TopicPartition, GroupOffset | MetaqError]:
        """Return the committed offsets of a group, partitions in numeric order.

        No broker is asked. For a ZooKeeper node without a readable offset, the value is
        the error that a member would get.

        Args:
            group: name of the group.
            topics: only of these topics; None: of all.
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            ConfigError: the client has no ZooKeeper.
            CoordinationError: ZooKeeper cannot be asked.
            TypeError: a name is not a string.
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
        """Change the committed offsets of a group; return each old and new offset.

        Durability: on return a majority of the ZooKeeper servers has them on disk. Each
        partition is written by itself: after an error some are written, and the call
        may be repeated (except for `-n`, which counts from the offset committed then).

        Args:
            group: name of the group; an unknown one is created.
            to: "earliest" or "latest", start or end of each log; a `datetime`, the
                first message of that time or later; `-n`, n messages back from the
                committed offset, at most to the log start; or `{partition: offset}`,
                each at the start of a message.
            topics: change all partitions of these; None: of topics in which the group
                has committed. With `-n`, only partitions with a committed offset.
            partitions: change only these; names like "0-3" need exactly one topic.
            plan: only return what would change.
            force: do so even if members read, whose next commits overwrite it.
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            GroupInUseError: a member subscribes to one of the topics.
            ClientError: no message begins at the offset, it is outside the log, or a
                committed offset is missing, to know the topics or to go back from.
            CannotAnswerError: `to` is a time, which a MetaQ 1.4 broker cannot find.
            NoBrokerError: no broker serves a topic or a partition.
            PartitionsAwayError: the broker of a partition is away; use `partitions`.
            ConfigError: a name or `to` is invalid, or the client has no ZooKeeper.
            CoordinationError: ZooKeeper cannot be asked, or some are not written.
            TypeError: an argument has a wrong type; the text names it.
            MetaqError: a broker cannot be asked; nothing is written.

        Cancellation: some may be written.
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
        """Copy the committed offsets of a group; return each old and new offset.

        Offsets of the target in other partitions stay. Durability and repetition are as
        for `reset_offsets`.

        Args:
            source: group whose offsets are copied; it may have members.
            target: group that gets the offsets; an unknown one is created.
            topics: only of these topics; None: of all.
            plan: only return what would change.
            force: copy even if the target has members, which may overwrite the offsets.
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            GroupInUseError: a member of the target subscribes to one of the topics.
            ClientError: the source has committed nothing there.
            ConfigError: a name is invalid, or the client has no ZooKeeper.
            CoordinationError: ZooKeeper cannot be asked, a node of the source has no
                readable offset, or some are not written.
            TypeError: a name is not a string.

        Cancellation: some may be written.
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
        """Delete committed offsets of a group, and return them.

        In partitions without an offset a group begins as a new one does. After an error
        some are deleted, and the call may be repeated.

        Args:
            group: name of the group.
            topics: only of these topics; None: of all.
            partitions: only of these; names like "0-3" need exactly one topic.
            plan: only return what would be deleted.
            timeout: seconds; None takes `request_timeout_s`.

        Returns:
            The deletions; () if nothing is committed.

        Raises:
            GroupInUseError: a member subscribes to one of the topics.
            ConfigError: a name is invalid, or the client has no ZooKeeper.
            CoordinationError: ZooKeeper cannot be asked, or some are not deleted.
            TypeError: a name is not a string.

        Cancellation: some may be deleted.
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

        If it is used again, it begins as a new group. Its exactly-once transactions are
        settled first, as by `settle_group`: a decided batch is committed before its
        decision is deleted. After an error some nodes are deleted, and the call may be
        repeated.

        Args:
            group: name of the group.
            plan: only return what would be deleted.
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            GroupInUseError: the group has a member, or a killed one, which still owns
                partitions or may decide until its session ends.
            ClientError: there is no such group; the text names the existing ones.
            TransactionInDoubtError: it has written exactly once, and a recorded broker
                does not confirm that nothing stays prepared. Nothing is deleted.
            ConfigError: the client has no ZooKeeper.
            CoordinationError: ZooKeeper cannot be asked, or some is not deleted.
            TypeError: the name is not a string.

        Cancellation: some nodes may be deleted.
        """
        here = await self._reach_group(group, timeout)
        known = await self.groups(timeout)
        if group not in known:
            raise ClientError(
                f"no group {group}; existing groups: {', '.join(known) or 'none'}"
            )
        await here.require_idle(None)
        changes = await here.plan_delete(None)
        if not plan:
            await forget(self._context, group, deadline_s=here.deadline_s)
            await here.delete_group()
        return changes

    async def _reach_group(self, group: str, timeout: float | None) -> AdminGroup:
        """Return the group once ZooKeeper can be asked."""
        require_text("group", group)
        return AdminGroup(self._context, group, await self._context.reach(timeout))

    async def settle_group(
        self, group: str, timeout: float | None = None
    ) -> SettledGroup:
        """End exactly-once transactions of dead members, as they were decided.

        On all brokers, branches with a decision in ZooKeeper are committed, and the
        others are rolled back. Branches of living members are not touched.

        Args:
            group: name of the group.
            timeout: seconds; None takes `request_timeout_s`.

        Returns:
            The numbers of branches that were ended, and of those of living members.

        Raises:
            TransactionInDoubtError: a branch stays prepared, or a recorded broker does
                not confirm that none does.
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
    """Write a plan (unless `plan`); refuse if a member reads (unless `force`)."""
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
    """Return the partitions of an argument; short names are of the one topic."""
    return {as_partition(each, topics or ()) for each in partitions}


def _check_goal(
    to: ResetTo, topics: Collection[str]
) -> Goal | dict[TopicPartition, Goal]:
    """Return the goal of all partitions, or of each; refuse an invalid `to`."""
    if isinstance(to, Mapping):
        for partition, offset in to.items():
            check_offset(f"to: offset of {partition}", offset)
        return {as_partition(each, topics): Offset(at) for each, at in to.items()}
    if not isinstance(to, int):
        check_start(to, "to")
        return to
    if to >= 0:
        raise ConfigError(
            "to: an offset is valid in one partition: expected {partition: offset}, or"
            f" a negative number of messages to go back, got {to!r}"
        )
    check_whole("to: messages to go back", -to, 1)
    return Offset(to)
