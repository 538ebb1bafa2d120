"""Progress of a query outside the consumer groups, kept in ZooKeeper.

A query keeps its own offsets. It writes its progress to the offsets of a group, so that
tools show its lag like that of a group; it claims no partition. Its start (the offsets
of `latest` or a time) is kept here until it has offsets of its own: otherwise a restart
before that would begin at other offsets, and skip messages. A query that writes keeps
the routes of its batches, so that a batch that is run again takes the same routes.

Requests without a session are repeated until their deadline.

Source: docs/metaq-1.4/client.md 13.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial

from metaq.client.cluster.context import ClientContext
from metaq.client.cluster.metadata_queries import insist
from metaq.client.fan_out import all_for, all_of
from metaq.model import GroupOffset, Offset, TopicPartition
from metaq.zk.errors import NodeChangedError, NodeNotEmptyError
from metaq.zk.offsets import GroupOffsets
from metaq.zk.session import Coordinator
from metaq.zk.znodes import Node


async def read_progress(
    context: ClientContext,
    group: str,
    partitions: Iterable[TopicPartition],
    *,
    deadline_s: float,
) -> dict[TopicPartition, Offset]:
    """Return the offsets that a group has stored; other partitions are missing.

    Raises:
        ConfigError: a client without ZooKeeper.
        CoordinationError: ZooKeeper cannot be asked.
    """
    offsets = _group_offsets(context, group)
    found = await all_for(
        lambda one: insist(context, partial(offsets.read_offset, one), deadline_s),
        partitions,
    )
    return {one: at.offset for one, at in found.items() if at is not None}


async def read_committed(
    context: ClientContext, group: str, topics: Iterable[str], *, deadline_s: float
) -> tuple[TopicPartition, ...]:
    """Return the partitions of some topics for which a group has stored an offset.

    Raises:
        ConfigError: a client without ZooKeeper.
        CoordinationError: ZooKeeper cannot be asked.
    """
    offsets = _group_offsets(context, group)
    found = await all_of(
        insist(context, partial(offsets.partitions, topic), deadline_s)
        for topic in topics
    )
    return tuple(partition for some in found for partition in some)


async def commit_progress(
    context: ClientContext,
    group: str,
    progress: Mapping[TopicPartition, Offset],
    *,
    deadline_s: float,
) -> None:
    """Store the progress of a query; an offset never goes back.

    Durability: on return ZooKeeper has it on a majority of its disks.

    Raises:
        ConfigError: a client without ZooKeeper.
        CoordinationError: ZooKeeper cannot be asked; some may be stored.
    """
    stored = await read_progress(context, group, progress, deadline_s=deadline_s)
    set_offset = _group_offsets(context, group).set_offset
    await all_of(
        insist(context, partial(set_offset, one, GroupOffset(offset)), deadline_s)
        for one, offset in progress.items()
        if offset > stored.get(one, -1)
    )


async def read_start(
    context: ClientContext, query: str, *, deadline_s: float
) -> str | None:
    """Return the start kept for a query by `keep_start`; None for none.

    Raises:
        ConfigError: a client without ZooKeeper.
        CoordinationError: ZooKeeper cannot be asked.
    """
    node = await _read(context, context.paths.query_start(query), deadline_s)
    return None if node is None else node.data.decode(errors="replace")


async def keep_start(
    context: ClientContext, query: str, text: str, *, deadline_s: float
) -> None:
    """Keep the start of a query, as text; durable on return. Raises as `read_start`."""
    path = context.paths.query_start(query)
    store = partial(_coordinator(context).set_or_create, path, text.encode())
    await insist(context, store, deadline_s)


async def forget_start(
    context: ClientContext, query: str, *, deadline_s: float
) -> None:
    """Forget the start of a query; harmless twice. Raises as `read_start`."""
    path = context.paths.query_start(query)
    await insist(context, partial(_coordinator(context).delete, path), deadline_s)


async def change_routes(
    context: ClientContext,
    query: str,
    change: Callable[[str | None], str],
    *,
    deadline_s: float,
) -> str:
    """Replace the kept routes of a query; as `change_decision`, with a text."""

    def changed(kept: bytes | None) -> bytes:
        text = None if kept is None else kept.decode(errors="replace")
        return change(text).encode()

    path = context.paths.query_routes(query)
    data = await _change(context, path, changed, deadline_s=deadline_s)
    return data.decode()


async def forget_routes(
    context: ClientContext, query: str, *, deadline_s: float
) -> None:
    """Forget the routes of a query; harmless twice. Raises as `change_decision`."""
    await _forget(context, context.paths.query_routes(query), deadline_s=deadline_s)


async def read_decision(
    context: ClientContext, query: str, *, deadline_s: float
) -> bytes | None:
    """Return the kept decision of a query; None for none. Raises as `read_start`."""
    node = await _read(context, context.paths.query_decision(query), deadline_s)
    return None if node is None else node.data


async def change_decision(
    context: ClientContext,
    query: str,
    change: Callable[[bytes | None], bytes],
    *,
    deadline_s: float,
) -> bytes:
    """Replace the kept decision of a query; durable on return.

    Args:
        context: the client's parts.
        query: name of the query.
        change: takes the kept value, None for none, and returns the new one; called
            again when another writer was faster, or when it is not known whether the
            new one was written. An unchanged value is not written.
        deadline_s: absolute.

    Returns:
        The value kept now.

    Raises:
        ConfigError: a client without ZooKeeper.
        CoordinationError: ZooKeeper cannot be asked; it may be changed.
        Exception: what `change` raises; nothing is changed then.
    """
    path = context.paths.query_decision(query)
    return await _change(context, path, change, deadline_s=deadline_s)


async def forget_decision(
    context: ClientContext, query: str, *, deadline_s: float
) -> None:
    """Forget the decision of a query; harmless twice. Raises as `change_decision`."""
    await _forget(context, context.paths.query_decision(query), deadline_s=deadline_s)


async def _change(
    context: ClientContext,
    path: str,
    change: Callable[[bytes | None], bytes],
    *,
    deadline_s: float,
) -> bytes:
    coordinator = _coordinator(context)
    while True:
        node = await _read(context, path, deadline_s)
        kept = None if node is None else node.data
        data = change(kept)
        if data == kept:
            return data
        version = None if node is None else node.version
        replace = partial(coordinator.replace, path, data, version=version)
        with suppress(NodeChangedError):
            await insist(context, replace, deadline_s)
            return data


async def _forget(context: ClientContext, path: str, *, deadline_s: float) -> None:
    coordinator = _coordinator(context)
    await insist(context, partial(coordinator.delete, path), deadline_s)
    parent = path.rpartition("/")[0]
    with suppress(NodeNotEmptyError):
        await insist(context, partial(coordinator.delete, parent), deadline_s)


def _group_offsets(context: ClientContext, group: str) -> GroupOffsets:
    return GroupOffsets(_coordinator(context), context.paths, group=group)


async def _read(context: ClientContext, path: str, deadline_s: float) -> Node | None:
    return await insist(context, partial(_coordinator(context).get, path), deadline_s)


def _coordinator(context: ClientContext) -> Coordinator:
    return context.require_coordinator("progress is kept in")
