"""Offsets in ZooKeeper, where MetaQ's consumers keep them, for owners only.

A commit that carries a fence is written by the owner of the partition under that very
session; a consumer without a group has no fence, and writes as a tool would. Source:
client spec 13.
"""

from collections.abc import Mapping

from metaq.client.fan_out import failures, for_each
from metaq.client.group.assignments import Fence
from metaq.errors import MetaqError
from metaq.model import TopicPartition
from metaq.zk.offsets import GroupOffsets
from metaq.zk.paths import NodePaths
from metaq.zk.session import Coordinator
from metaq.zk.znodes import GroupOffset


class ZooKeeperOffsets:
    """An `OffsetStore`; holds no state of its own."""

    def __init__(self, coordinator: Coordinator, paths: NodePaths) -> None:
        """Prepare a store.

        Args:
            coordinator: the session that the fences belong to; not closed by us.
            paths: where MetaQ's root is.
        """
        self._coordinator = coordinator
        self._paths = paths

    async def load(
        self, group: str, partition: TopicPartition, *, deadline_s: float
    ) -> GroupOffset | None:
        """Return the committed offset; None when there is none.

        Raises:
            PayloadError: the node holds no offset.
            CoordinationError: ZooKeeper could not be asked.
        """
        offsets = self._offsets(group)
        return await offsets.read_offset(partition, deadline_s=deadline_s)

    async def commit(
        self,
        group: str,
        offsets: Mapping[TopicPartition, GroupOffset],
        *,
        fence: Fence | None,
        deadline_s: float,
    ) -> Mapping[TopicPartition, MetaqError]:
        """Store offsets; durable when this returns, each by itself.

        Returns:
            The partitions that were not stored, with their errors: OwnershipLostError
            where the partition is not the fence's any more.
        """
        store = self._offsets(group)

        async def write(partition: TopicPartition) -> None:
            offset = offsets[partition]
            if fence is None:
                await store.set_offset(partition, offset, deadline_s=deadline_s)
                return
            await store.commit_offset(
                partition,
                offset,
                member=fence.member,
                session_version=fence.session_version,
                deadline_s=deadline_s,
            )

        return failures(await for_each(write, offsets))

    async def close(self) -> None:
        """Do nothing: the session is the client's."""

    def _offsets(self, group: str) -> GroupOffsets:
        return GroupOffsets(self._coordinator, self._paths, group=group)
