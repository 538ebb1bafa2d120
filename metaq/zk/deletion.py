"""Deletion of a topic: the brokers that still have it, and its last nodes.

Each broker that has the topic deletes its data, registers without it, which deletes its
record, and then deletes its status. When no broker has it any more, the groups' offsets
are deleted, because a new topic of that name begins at offset 0; then the empty
parents, and last the definition. While the definition exists the topic cannot be
created again, and a broker that returns sees that it must delete the topic.

Every step may be repeated, and several brokers may execute it at once.
"""

from contextlib import suppress
from typing import Final

from metaq.model import BrokerId
from metaq.zk.definitions import TopicState, decode_definition
from metaq.zk.errors import NodeChangedError, NodeNotEmptyError, PayloadError
from metaq.zk.paths import NodeKind, NodePaths, parse_role
from metaq.zk.session import Coordinator

TOPIC_KINDS: Final = (NodeKind.TOPIC, NodeKind.TOPIC_PUB, NodeKind.TOPIC_SUB)


async def brokers_with(
    coordinator: Coordinator, paths: NodePaths, topic: str, *, deadline_s: float
) -> tuple[BrokerId, ...]:
    """Return the brokers that have a topic or a status of it, ascending.

    Includes brokers that are away.

    Raises:
        CoordinationError: ZooKeeper could not be read; see `Coordinator`.
    """
    found: set[BrokerId] = set()
    for path in (paths.recorded_topic(topic), paths.topic_statuses(topic)):
        names = await coordinator.children(path, deadline_s=deadline_s)
        found.update(BrokerId(int(name)) for name in names if name.isdecimal())
    for kind in TOPIC_KINDS:
        path = paths.topic_children(kind, topic)
        names = await coordinator.children(path, deadline_s=deadline_s)
        found.update(role.broker_id for role in map(parse_role, names) if role)
    return tuple(sorted(found))


async def finish_deletion(
    coordinator: Coordinator, paths: NodePaths, topic: str, *, deadline_s: float
) -> tuple[BrokerId, ...]:
    """Delete the last nodes of a topic once no broker has it any more.

    Returns:
        The brokers that still have it; () if the topic is gone, or is not to be
        deleted.

    Raises:
        CoordinationError: as `brokers_with`; call again.
    """
    left = await brokers_with(coordinator, paths, topic, deadline_s=deadline_s)
    if left:
        return left
    path = paths.topic_definition(topic)
    node = await coordinator.get(path, deadline_s=deadline_s)
    try:
        is_deleting = (
            node is not None
            and decode_definition(node.data).state is TopicState.DELETING
        )
    except PayloadError:
        is_deleting = False
    if node is None or not is_deleting:
        return ()
    groups = await coordinator.children(paths.groups(), deadline_s=deadline_s)
    parents = [
        paths.group_partitions(kind, group, topic)
        for group in groups
        for kind in (NodeKind.GROUP_OFFSET, NodeKind.OWNER)
    ]
    for parent in parents[::2]:
        names = await coordinator.children(parent, deadline_s=deadline_s)
        for name in names:
            await coordinator.delete(f"{parent}/{name}", deadline_s=deadline_s)
    parents += [paths.recorded_topic(topic), paths.topic_statuses(topic)]
    parents += [paths.topic_children(kind, topic) for kind in TOPIC_KINDS]
    for parent in parents:
        with suppress(NodeNotEmptyError):
            await coordinator.delete(parent, deadline_s=deadline_s)
    # If another broker was faster, a new topic may already have the name.
    with suppress(NodeChangedError):
        await coordinator.delete(path, version=node.version, deadline_s=deadline_s)
    return ()
