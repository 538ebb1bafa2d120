"""Where a group's offsets are kept.

An offset says which message comes next; whoever commits it has handled everything
before. Stores are asked on the client's loop and may not block it. Files and databases
are in `file_offsets.py` and `sql_offsets.py`. Source: client spec 13.
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
    """What a consumer needs of a store; a call that is given up is cancelled."""

    async def load(
        self, group: str, partition: TopicPartition, *, deadline_s: float
    ) -> GroupOffset | None:
        """Return what is committed; None when nothing is.

        Raises:
            MetaqError: the store could not be asked, or holds what nobody can read.
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
            fence: what the group's ownership is bound to; a store in ZooKeeper
                refuses when it is gone.
            deadline_s: when to give up.

        Returns:
            The partitions that were not stored, and why; empty when all were. What it
            raises in place of that is why none was.
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
        """Return what was committed."""
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
        del fence, deadline_s  # nobody else can own them, nothing to wait for
        for partition, offset in offsets.items():
            self._offsets[group, partition] = offset
        return {}

    async def close(self) -> None:
        """Do nothing: a closed consumer may be followed by another one."""
