"""Stores of the committed offsets of groups.

A committed offset is that of the next message; all messages before it are handled.
Stores are called on the client's loop and must not block it. Stores in files and
databases are in `file_offsets.py` and `sql_offsets.py`.

Source: docs/metaq-1.4/client.md 13.
"""

from collections.abc import Mapping
from functools import partial
from typing import Final, Protocol, TypeAlias

from metaq.client.fan_out import answers, failures, for_each
from metaq.client.group.assignments import Fence
from metaq.errors import MetaqError
from metaq.model import GroupOffset, TopicPartition
from metaq.zk.errors import NodeChangedError
from metaq.zk.offsets import GroupOffsets
from metaq.zk.paths import NodePaths
from metaq.zk.session import Coordinator

Offsets: TypeAlias = Mapping[TopicPartition, GroupOffset]
"""The next offset of each partition."""
Failures: TypeAlias = Mapping[TopicPartition, MetaqError]
"""Partitions for which something failed, with their errors."""

TOGETHER_MAX: Final = 100
"""Maximum number of partitions in one request, because ZooKeeper ends a session that
sends a request above 1 MiB."""
STORE_SLACK_S: Final = 0.1
"""Time after its deadline at which a call of a store is cancelled, in seconds."""


class OffsetStore(Protocol):
    """Interface of offset stores; consumers cancel calls that exceed the deadline."""

    async def load(
        self, group: str, partition: TopicPartition, *, deadline_s: float
    ) -> GroupOffset | None:
        """Return the committed offset; None if there is none.

        Args:
            group: consumer group.
            partition: partition of the offset.
            deadline_s: monotonic time.

        Raises:
            MetaqError: the store cannot be asked, or its content cannot be parsed.
        """

    async def commit(
        self, group: str, offsets: Offsets, *, fence: Fence | None, deadline_s: float
    ) -> Failures:
        """Store offsets; durable on return.

        Args:
            group: consumer group.
            offsets: the next offset of each partition.
            fence: member and session that own the partitions; a store in ZooKeeper
                refuses the commit if they do not own them any more. None: no group.
            deadline_s: monotonic time.

        Returns:
            The partitions that were not stored, with their errors. If it raises, none
            was stored.
        """

    async def close(self) -> None:
        """Close files and connections; never raises."""


class MemoryOffsets:
    """Offsets in memory, for tests and for reading once."""

    def __init__(self) -> None:
        self._offsets: dict[tuple[str, TopicPartition], GroupOffset] = {}

    async def load(
        self, group: str, partition: TopicPartition, *, deadline_s: float
    ) -> GroupOffset | None:
        """Return the stored offset; see `OffsetStore.load`."""
        del deadline_s  # nothing to wait for
        return self._offsets.get((group, partition))

    async def commit(
        self, group: str, offsets: Offsets, *, fence: Fence | None, deadline_s: float
    ) -> Failures:
        """Store offsets; see `OffsetStore.commit`."""
        del fence, deadline_s  # no other owner, no wait
        for partition, offset in offsets.items():
            self._offsets[group, partition] = offset
        return {}

    async def close(self) -> None:
        """Do nothing, so that another consumer can continue."""


class ZooKeeperOffsets:
    """Offsets in ZooKeeper, where MetaQ's consumers keep them.

    A commit with a fence is only written while the fence's member owns the partition
    under the fence's session. The first commit of a partition takes three requests;
    later ones of all partitions share one. A consumer with fixed partitions has no
    fence: its offsets are written without a check.
    """

    def __init__(self, coordinator: Coordinator, paths: NodePaths) -> None:
        """Use the client's session, to which the fences belong."""
        self._coordinator = coordinator
        self._paths = paths
        self._versions: dict[tuple[str, TopicPartition], tuple[Fence, int]] = {}
        """Version of the node after the last commit, and the fence of that commit."""

    async def load(
        self, group: str, partition: TopicPartition, *, deadline_s: float
    ) -> GroupOffset | None:
        """Return the committed offset; None if there is none.

        Raises:
            PayloadError: the content of the node is not an offset.
            CoordinationError: ZooKeeper cannot be asked.
        """
        offsets = self._offsets(group)
        return await offsets.read_offset(partition, deadline_s=deadline_s)

    async def commit(
        self, group: str, offsets: Offsets, *, fence: Fence | None, deadline_s: float
    ) -> Failures:
        """Store offsets; durable on return.

        Returns:
            The partitions that were not stored, with their errors: OwnershipLostError
            if the fence does not own the partition any more.
        """
        store = self._offsets(group)
        if fence is None:
            set_offset = partial(store.set_offset, deadline_s=deadline_s)
            ends = await for_each(lambda one: set_offset(one, offsets[one]), offsets)
            return failures(ends)
        known = {}
        for partition in offsets:
            claim, version = self._versions.pop((group, partition), (None, 0))
            if claim == fence:
                known[partition] = version
        committed = await _commit_fenced(store, offsets, known, fence, deadline_s)
        for partition, version in answers(committed).items():
            self._versions[group, partition] = fence, version
        return failures(committed)

    async def close(self) -> None:
        """Do nothing, because the client closes the session."""

    def _offsets(self, group: str) -> GroupOffsets:
        return GroupOffsets(self._coordinator, self._paths, group=group)


async def _commit_fenced(
    store: GroupOffsets,
    offsets: Offsets,
    known: Mapping[TopicPartition, int],
    fence: Fence,
    deadline_s: float,
) -> dict[TopicPartition, int | MetaqError]:
    """Commit offsets of known node version together, the others one by one.

    A joint request that fails because a node was changed is repeated one by one.
    """
    owner, session_version = fence.member, fence.session_version
    together = partial(
        store.commit_together,
        member=owner,
        session_version=session_version,
        deadline_s=deadline_s,
    )
    alone = partial(
        store.commit_offset,
        member=owner,
        session_version=session_version,
        deadline_s=deadline_s,
    )
    order = tuple(known)
    pieces = [
        order[at : at + TOGETHER_MAX] for at in range(0, len(order), TOGETHER_MAX)
    ]
    ends: dict[TopicPartition, int | MetaqError] = {}
    written = await for_each(
        lambda piece: together({one: (offsets[one], known[one]) for one in piece}),
        pieces,
    )
    for piece, end in written.items():
        if not isinstance(end, MetaqError):
            ends |= end
        elif not isinstance(end, NodeChangedError):
            ends |= dict.fromkeys(piece, end)
    rest = offsets.keys() - ends.keys()
    return ends | await for_each(lambda one: alone(one, offsets[one]), rest)
