"""Committed offsets of a group in ZooKeeper, and the checks before a commit.

Theory of operation: an offset node is persistent, and every MetaQ consumer may write
it. So a member that was cut off and returns late could set the group back to its old
offset. `commit_offset` prevents that:

    1. the session must be the one under which the partition was claimed;
    2. it reads the version of the offset node, and *then* the owner node, which must
       have our name and session;
    3. it writes the offset only if its node still has that version.

A member that lost the partition between 2 and 3 fails at 3 once the next owner has
committed. Before that, a late commit does no harm, because its offset is not below the
one at which the next owner began. If the version changed while we own the partition (by
a tool, or by ourselves when a reply was lost), the commit repeats step 2.

`commit_together` is one request for partitions that we have committed under the same
claim. It checks that our member node exists, so our session lives; that each owner node
was not written since its creation; and that each offset node has the version of our
last commit. If a check fails, `commit_offset` finds out why (docs/decisions/0051).

Keep in step: `groups.py`, `znodes.py`.

Source: docs/metaq-1.4/client.md 4, 13 and 14.6.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from metaq.errors import OwnershipLostError
from metaq.model import GroupOffset, TopicPartition
from metaq.zk.errors import NodeChangedError, NodeNotEmptyError, PayloadError
from metaq.zk.paths import NodeKind, NodePaths, parse_partition
from metaq.zk.session import CheckNode, Coordinator, Operation, SessionState, WriteNode
from metaq.zk.znodes import decode_group_offset, encode_group_offset, encode_owner

# While we own a partition, only tools write its offset.
COMMIT_TRIES: Final = 3
CLAIM_VERSION: Final = 0
"""Version of an owner node: it is created, and never written."""


class GroupOffsets:
    """The stored offsets of one group. Holds no state of its own.

    Every request raises the errors of `Coordinator`.

    Concurrency: one event loop; requests for different partitions may run concurrently.
    """

    def __init__(
        self, coordinator: Coordinator, paths: NodePaths, *, group: str
    ) -> None:
        """Prepare access to the offsets of `group`."""
        self._coordinator = coordinator
        self._paths = paths
        self._group = group

    async def read_offset(
        self, partition: TopicPartition, *, deadline_s: float
    ) -> GroupOffset | None:
        """Return the group's next offset, or None if none was ever stored.

        Raises:
            PayloadError: the node does not hold an offset; the text names it.
        """
        path = self._paths.group_offset(self._group, partition)
        node = await self._coordinator.get(path, deadline_s=deadline_s)
        try:
            return None if node is None else decode_group_offset(node.data)
        except PayloadError as error:
            raise PayloadError(f"{path}: {error}") from error

    async def commit_offset(
        self,
        partition: TopicPartition,
        group_offset: GroupOffset,
        *,
        member: str,
        session_version: int,
        deadline_s: float,
    ) -> int:
        """Store the group's next offset, as the owner of the partition.

        Durability: on return, a majority of ZooKeeper's servers has it on disk.

        Args:
            partition: a partition that we claimed.
            group_offset: offset of the next message, and id of the last one.
            member: our name in the group.
            session_version: session version of the claim.
            deadline_s: absolute; after it, whether the offset was stored is unknown.

        Returns:
            The version of the node, for `commit_together`.

        Raises:
            OwnershipLostError: the session is another one, or we are not the owner.
            NodeChangedError: other clients keep writing this offset.
        """
        path = self._paths.group_offset(self._group, partition)
        data = encode_group_offset(group_offset)
        for _ in range(COMMIT_TRIES):
            self._require_session_version(partition, session_version)
            node = await self._coordinator.get(path, deadline_s=deadline_s)
            version = None if node is None else node.version
            await self._require_owner(partition, member, deadline_s)
            self._require_session_version(partition, session_version)
            try:
                await self._coordinator.replace(
                    path, data, version=version, deadline_s=deadline_s
                )
            except NodeChangedError:
                continue
            return 0 if version is None else version + 1
        raise NodeChangedError(
            f"commit {path}: written by others while {member} owns it,"
            f" {COMMIT_TRIES} times"
        )

    async def commit_together(
        self,
        offsets: Mapping[TopicPartition, tuple[GroupOffset, int]],
        *,
        member: str,
        session_version: int,
        deadline_s: float,
    ) -> dict[TopicPartition, int]:
        """Store the offsets of several partitions in one request, all or none.

        Args:
            offsets: the offset of each partition, and the version of its node after our
                last commit under the current claim.
            member: our name in the group.
            session_version: session version of the claims.
            deadline_s: absolute; after it, whether the offsets were stored is unknown.

        Returns:
            The new versions of the nodes, for the next call.

        Raises:
            OwnershipLostError: the session is another one.
            NodeChangedError: another check failed; `commit_offset` shows which.
        """
        operations: list[Operation] = [
            CheckNode(self._paths.member(self._group, member), None)
        ]
        for partition, (group_offset, version) in offsets.items():
            self._require_session_version(partition, session_version)
            owner = self._paths.owner(self._group, partition)
            path = self._paths.group_offset(self._group, partition)
            data = encode_group_offset(group_offset)
            operations += (
                CheckNode(owner, CLAIM_VERSION),
                WriteNode(path, data, version),
            )
        versions = await self._coordinator.transact(operations, deadline_s=deadline_s)
        return dict(zip(offsets, versions[2::2], strict=True))

    async def set_offset(
        self, partition: TopicPartition, group_offset: GroupOffset, *, deadline_s: float
    ) -> None:
        """Store an offset regardless of the owner, for tools and groups of one.

        A running owner continues at its own offset, and overwrites this one.
        """
        await self._coordinator.set_or_create(
            self._paths.group_offset(self._group, partition),
            encode_group_offset(group_offset),
            deadline_s=deadline_s,
        )

    async def delete_offset(
        self, partition: TopicPartition, *, deadline_s: float
    ) -> None:
        """Delete an offset; with the last one of a topic, also the topic's node."""
        path = self._paths.group_offset(self._group, partition)
        await self._coordinator.delete(path, deadline_s=deadline_s)
        with suppress(NodeNotEmptyError):
            parent = path.rpartition("/")[0]
            await self._coordinator.delete(parent, deadline_s=deadline_s)

    async def topics(self, *, deadline_s: float) -> tuple[str, ...]:
        """Return the topics with stored offsets, ascending."""
        path = self._paths.group_topics(NodeKind.GROUP_OFFSET, self._group)
        return await self._coordinator.children(path, deadline_s=deadline_s) or ()

    async def partitions(
        self, topic: str, *, deadline_s: float
    ) -> tuple[TopicPartition, ...]:
        """Return the partitions of a topic with a stored offset, in numeric order."""
        path = self._paths.group_partitions(NodeKind.GROUP_OFFSET, self._group, topic)
        names = await self._coordinator.children(path, deadline_s=deadline_s) or ()
        parsed = filter(None, map(parse_partition, names))
        return tuple(sorted(TopicPartition(topic, *numbers) for numbers in parsed))

    def _require_session_version(
        self, partition: TopicPartition, session_version: int
    ) -> None:
        status = self._coordinator.status
        if (
            status.state is SessionState.LOST
            or status.session_version != session_version
        ):
            raise OwnershipLostError(
                f"partition {partition} of group {self._group}: claimed under session"
                f" version {session_version}, now it is {status.session_version},"
                f" {status.state.value}"
            )

    async def _require_owner(
        self, partition: TopicPartition, member: str, deadline_s: float
    ) -> None:
        path = self._paths.owner(self._group, partition)
        session_id = self._coordinator.status.session_id
        node = await self._coordinator.get(path, deadline_s=deadline_s)
        if node is None:
            raise OwnershipLostError(
                f"partition {partition} of group {self._group}: expected owner"
                f" {member}, got none"
            )
        if node.data != encode_owner(member) or node.owner_session_id != session_id:
            raise OwnershipLostError(
                f"partition {partition} of group {self._group}: expected owner"
                f" {member} of session {session_id:#x}, got"
                f" {node.data.decode(errors='replace')} of session"
                f" {node.owner_session_id:#x}"
            )
