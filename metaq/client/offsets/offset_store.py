"""Stores of a group's offsets.

An offset says which message comes next; its committer has handled everything before.
Stores are asked on the client's loop and may not block it. Files and databases are in
`file_offsets.py` and `sql_offsets.py`. Source: client spec 13.
"""

from collections.abc import Mapping
from typing import Final, Protocol

from metaq.client.group.assignments import Fence
from metaq.errors import MetaqError
from metaq.model import TopicPartition
from metaq.zk.znodes import GroupOffset

STORE_SLACK_S: Final = 0.1
"""A store that has not answered so long after its deadline is given up."""


class OffsetStore(Protocol):
    """Offset store interface used by consumers; an abandoned call is cancelled."""

    async def load(
        self, group: str, partition: TopicPartition, *, deadline_s: float
    ) -> GroupOffset | None:
        """Return the committed offset; None when there is none.

        Raises:
            MetaqError: the store could not be asked, or its content cannot be parsed.
        """
        ...

    async def commit(
        self,
        group: str,
        offsets: Mapping[TopicPartition, GroupOffset],
        *,
        fence: Fence | None,
        deadline_s: float,
    ) -> Mapping[TopicPartition, MetaqError]:
        """Store offsets; durable when this returns.

        Args:
            group: consumer group.
            offsets: the next offset of each partition.
            fence: binding of the group's ownership; a store in ZooKeeper refuses when
                it is gone.
            deadline_s: when to give up.

        Returns:
            The partitions that were not stored, with their errors; empty when all were.
            An exception in its place means that none was.
        """
        ...

    async def close(self) -> None:
        """Let go of files and connections; never raises."""
        ...


class MemoryOffsets:
    """Offsets that live as long as this object: for tests, and for reading once."""

    def __init__(self) -> None:
        self._offsets: dict[tuple[str, TopicPartition], GroupOffset] = {}

    async def load(
        self, group: str, partition: TopicPartition, *, deadline_s: float
    ) -> GroupOffset | None:
        """Return the offset stored before."""
        del deadline_s  # nothing to wait for
        return self._offsets.get((group, partition))

    async def commit(
        self,
        group: str,
        offsets: Mapping[TopicPartition, GroupOffset],
        *,
        fence: Fence | None,
        deadline_s: float,
    ) -> Mapping[TopicPartition, MetaqError]:
        """Remember offsets."""
        del fence, deadline_s  # no other owner, no wait
        for partition, offset in offsets.items():
            self._offsets[group, partition] = offset
        return {}

    async def close(self) -> None:
        """Do nothing: a closed consumer may be followed by another one."""
