"""Committed offsets of a group in ZooKeeper, and the right to write them.

Theory of operation: an offset node is persistent, and every MetaQ consumer may write
it. So a member that was cut off and comes back late would set the group back to where
*it* was. `commit_offset` prevents that:

    1. the session must be the one that the partition was claimed under;
    2. the version of the offset node is read, and *then* the owner node, which must be
       ours: name and session;
    3. the offset is written only if its node still has that version.

A member that lost the partition between 2 and 3 fails at 3 as soon as the next owner
has committed once; before that, a late commit sets no owner back, because its offset is
not below the one where the next owner began. If the version changed while we own the
partition (a tool, or ourselves, when an answer got lost), the commit goes back to 2.

`commit_together` is one request for partitions that we have committed under the same
claim: our member node is there, so our session lives; each owner node is as it was
made; each offset node has the version that our last commit left. If it does not fit,
`commit_offset` finds out why (docs/decisions/0051).

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

# Only tools write the offset of a partition that we own.
COMMIT_TRIES: Final = 3
CLAIM_VERSION: Final = 0
"""Version of an owner node: it is made, and never written."""


class GroupOffsets:
    """The stored offsets of one group; holds no state of its own.

    Every request raises what `Coordinator` raises.

    Concurrency: one event loop; requests for different partitions may run at once.
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
        """Return where the group goes on, or None when nothing was ever stored.

        Raises:
            PayloadError: the node holds no offset; the text names it.
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
        """Store where the group goes on, as the owner of the partition.

        Durability: on return ZooKeeper has it on a majority of its disks.

        Args:
            partition: a partition that we claimed.
            group_offset: offset of the next message, and id of the last one.
            member: our name in the group.
            session_version: session version of the claim.
            deadline_s: when to give up; whether it was stored is unknown then.

        Returns:
            The version of the node, for `commit_together`.

        Raises:
            OwnershipLostError: the session is another one, or the owner is not us.
            NodeChangedError: others write this offset again and again.
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
                last commit under the present claim.
            member: our name in the group.
            session_version: session version of the claims.
            deadline_s: when to give up; whether they were stored is unknown then.

        Returns:
            The versions of the nodes, for the next time.

        Raises:
            OwnershipLostError: the session is another one.
            NodeChangedError: something else was changed; `commit_offset` of each says
                what.
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
        """Store an offset regardless of the owner: for tools and groups of one.

        An owner that runs goes on from where it is, and overwrites this.
        """
        await self._coordinator.set_or_create(
            self._paths.group_offset(self._group, partition),
            encode_group_offset(group_offset),
            deadline_s=deadline_s,
        )

    async def delete_offset(
        self, partition: TopicPartition, *, deadline_s: float
    ) -> None:
        """Delete an offset, and with a topic's last one the node of the topic."""
        path = self._paths.group_offset(self._group, partition)
        await self._coordinator.delete(path, deadline_s=deadline_s)
        with suppress(NodeNotEmptyError):
            parent = path.rpartition("/")[0]
            await self._coordinator.delete(parent, deadline_s=deadline_s)

    async def topics(self, *, deadline_s: float) -> tuple[str, ...]:
        """Return the topics for which offsets have been stored, ascending."""
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
                f" {member}, it has none"
            )
        if node.data != encode_owner(member) or node.owner_session_id != session_id:
            raise OwnershipLostError(
                f"partition {partition} of group {self._group}: expected owner"
                f" {member} of session {session_id:#x}, got"
                f" {node.data.decode(errors='replace')} of session"
                f" {node.owner_session_id:#x}"
            )
