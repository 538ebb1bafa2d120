"""Which partition source and which offset store a consumer gets."""

from collections.abc import Collection
from pathlib import Path
from typing import Final

from metaq.assignment import Strategy
from metaq.client.assignments import PartitionSource, listed_source, topic_source
from metaq.client.context import ClientContext
from metaq.client.file_offsets import FileOffsets
from metaq.client.names import fixed_partitions
from metaq.client.offset_store import MemoryOffsets, OffsetStore
from metaq.client.rebalancer import GroupSource
from metaq.client.zk_offsets import ZooKeeperOffsets
from metaq.errors import ConfigError

BROADCAST_FILE: Final = "~/.meta_offsets"
"""Where MetaQ's broadcast consumers of this user keep their offsets."""


def make_source(
    context: ClientContext,
    *,
    group: str,
    topics: tuple[str, ...],
    partitions: Collection[str] | None,
    consumer_id: str,
    strategy: str,
) -> PartitionSource:
    """Return who says which partitions are read.

    Args:
        context: the client's parts; without a coordinator there are no groups.
        group: name of the group.
        topics: what is subscribed to.
        partitions: names `b-p` to read without a group; None: not fixed.
        consumer_id: of the new member, should there be a group.
        strategy: by which a group shares; one of MetaQ's names.

    Raises:
        ConfigError: a name of a partition or a strategy that is none.
    """
    if partitions is not None:
        fixed = fixed_partitions(topics, partitions)
        return listed_source(fixed, clock=context.clock)
    if context.coordinator is None:
        return topic_source(context.metadata, topics, clock=context.clock)
    return GroupSource(
        context.coordinator,
        context.paths,
        context.metadata,
        group=group,
        consumer_id=consumer_id,
        topics=topics,
        strategy=_check_strategy(strategy),
        clock=context.clock,
        options=context.options,
    )


def _check_strategy(name: str) -> Strategy:
    try:
        return Strategy(name)
    except ValueError as error:
        known = " or ".join(strategy.value for strategy in Strategy)
        raise ConfigError(f"strategy: expected {known}, got {name!r}") from error


def make_store(context: ClientContext, *, is_broadcast: bool) -> OffsetStore:
    """Return where offsets are committed when nobody says where.

    Raises:
        ConfigError: in a file below the user's home, and there is none.
    """
    if is_broadcast:
        return FileOffsets(_broadcast_file(), clock=context.clock)
    if context.coordinator is None:
        return MemoryOffsets()
    return ZooKeeperOffsets(context.coordinator, context.paths)


def _broadcast_file() -> Path:
    try:
        return Path(BROADCAST_FILE).expanduser()
    except RuntimeError as error:
        # A container's user without a name, say.
        raise ConfigError(
            f"broadcast: offsets are kept in {BROADCAST_FILE}, and this user has no"
            " home directory; name another place with offsets=FileOffsets(...)"
        ) from error
