"""Queue groups: made by their first user, refused where another one says otherwise."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from metaq.client.cluster.context import ClientContext
from metaq.client.errors import QueueGroupError
from metaq.errors import ConfigError
from metaq.zk.children import read_values
from metaq.zk.errors import NodeChangedError
from metaq.zk.group_definitions import (
    QueueGroupDefinition,
    decode_group,
    encode_group,
)
from metaq.zk.paths import NodeKind, NodePaths
from metaq.zk.session import Coordinator
from metaq.zk.znodes import Node

LETTERS: Final = "dead_letter_topic"


async def ensure_queue_group(
    context: ClientContext, group: str, topic: str, wanted: Mapping[str, object]
) -> QueueGroupDefinition:
    """Return the definition of a queue group, written now where there is none.

    Args:
        context: of the client.
        group: name of the group.
        topic: the one that it is of.
        wanted: what the caller says, by the names of `QueueGroupDefinition`, and
            `then`; the rest is as it is, or the default.

    Raises:
        ConfigError: the client has no ZooKeeper; or there is no such group yet, and
            nothing says what becomes of a message that is given up, or its dead-letter
            topic is not there.
        QueueGroupError: the group is defined otherwise, or is a log group.
        CoordinationError: ZooKeeper cannot be asked.
    """
    deadline_s = await context.reach()
    coordinator, path = _require_coordinator(context), context.paths.queue_group(group)
    node, old = await _look(coordinator, path, deadline_s)
    if old is None:
        try:
            return await _write_first(context, group, topic, wanted, node, deadline_s)
        except NodeChangedError:
            _, old = await _look(coordinator, path, deadline_s)
    if old is None:
        raise QueueGroupError(f"queue group '{group}' was deleted at this moment")
    _require_same(group, old, {**_fields(wanted), "topic": topic})
    return old


async def create_queue_group(
    context: ClientContext,
    group: str,
    topic: str,
    wanted: Mapping[str, object],
    *,
    deadline_s: float,
) -> QueueGroupDefinition:
    """Make a queue group; raises as `ensure_queue_group`.

    Raises:
        ConfigError: there is no such topic.
        QueueGroupError: it is there.
    """
    coordinator, path = _require_coordinator(context), context.paths.queue_group(group)
    await _require_topic(context, "topic", topic, deadline_s)
    node, old = await _look(coordinator, path, deadline_s)
    if old is not None:
        raise QueueGroupError(f"queue group '{group}' exists, of topic '{old.topic}'")
    try:
        return await _write_first(context, group, topic, wanted, node, deadline_s)
    except NodeChangedError as error:
        raise _changed(group) from error


async def alter_queue_group(
    context: ClientContext,
    group: str,
    wanted: Mapping[str, object],
    *,
    deadline_s: float,
) -> QueueGroupDefinition | None:
    """Change options of a queue group; None: there is none.

    Raises:
        ConfigError: the client has no ZooKeeper; nothing is wanted; or the dead-letter
            topic is not there, or not said.
        QueueGroupError: it was changed at this moment.
        CoordinationError: ZooKeeper cannot be asked.
    """
    coordinator, path = _require_coordinator(context), context.paths.queue_group(group)
    node, old = await _look(coordinator, path, deadline_s)
    if node is None or old is None:
        return None
    if not wanted:
        raise ConfigError(f"queue group '{group}': nothing is said that would change")
    new = replace(old, **_fields(wanted))
    if wanted.get("then") == "dead_letter" and new.dead_letter_topic is None:
        raise ConfigError("dead_letter_topic: expected a topic with then='dead_letter'")
    if new.dead_letter_topic != old.dead_letter_topic:
        await _require_letters(context, new, deadline_s)
    try:
        await coordinator.replace(
            path, encode_group(new), version=node.version, deadline_s=deadline_s
        )
    except NodeChangedError as error:
        raise _changed(group) from error
    return new


def _changed(group: str) -> QueueGroupError:
    return QueueGroupError(
        f"queue group '{group}' was changed by another one at this moment: nothing is"
        " written"
    )


async def _write_first(
    context: ClientContext,
    group: str,
    topic: str,
    wanted: Mapping[str, object],
    node: Node | None,
    deadline_s: float,
) -> QueueGroupDefinition:
    """Write the definition of a group that is not there, over the node that was read.

    Raises:
        NodeChangedError: it was made at this moment.
    """
    coordinator, paths = _require_coordinator(context), context.paths
    await _refuse_log_group(context, group, deadline_s)
    definition, version = _first_definition(group, topic, wanted), None
    if node is not None:
        generation = decode_group(node.data).generation + 1
        definition, version = replace(definition, generation=generation), node.version
    await _require_letters(context, definition, deadline_s)
    data, path = encode_group(definition), paths.queue_group(group)
    await coordinator.replace(path, data, version=version, deadline_s=deadline_s)
    try:
        # A log consumer that joins registers first, and looks for this then.
        await _refuse_log_group(context, group, deadline_s)
    except QueueGroupError:
        await delete_queue_group(context, group, deadline_s=deadline_s)
        raise
    return definition


async def _refuse_log_group(
    context: ClientContext, group: str, deadline_s: float
) -> None:
    coordinator, paths = _require_coordinator(context), context.paths
    offsets = paths.group_topics(NodeKind.GROUP_OFFSET, group)
    for node in (paths.members(group), offsets):
        # The node of the group alone may be what a refused consumer has left.
        if await coordinator.children(node, deadline_s=deadline_s):
            raise QueueGroupError(
                f"group '{group}' is a log group: a queue group needs another name"
            )


async def _look(
    coordinator: Coordinator, path: str, deadline_s: float
) -> tuple[Node | None, QueueGroupDefinition | None]:
    """Return the node of a queue group, and its definition unless it was deleted."""
    node = await coordinator.get(path, deadline_s=deadline_s)
    found = None if node is None else decode_group(node.data)
    return node, None if found is None or found.is_deleted else found


def _require_coordinator(context: ClientContext) -> Coordinator:
    if context.coordinator is None:
        raise ConfigError(
            "queue groups are kept in ZooKeeper: expected its address, got brokers by"
            " name"
        )
    return context.coordinator


def _fields(wanted: Mapping[str, object]) -> dict[str, Any]:
    """Return fields of a definition: that of `then` is the dead-letter topic."""
    fields = {name: value for name, value in wanted.items() if name != "then"}
    if wanted.get("then") == "drop":
        fields[LETTERS] = None
    return fields


def _first_definition(
    group: str, topic: str, wanted: Mapping[str, object]
) -> QueueGroupDefinition:
    fields = _fields(wanted)
    if LETTERS not in fields:
        raise ConfigError(
            f"queue group '{group}' is not there yet: say dead_letter_topic=..., or"
            ' then="drop"'
        )
    return replace(QueueGroupDefinition(topic=topic), **fields)


async def _require_letters(
    context: ClientContext, definition: QueueGroupDefinition, deadline_s: float
) -> None:
    topic = definition.dead_letter_topic
    if topic == definition.topic:
        raise ConfigError(f"{LETTERS}: expected another topic than '{topic}' itself")
    if topic is not None:
        await _require_topic(context, LETTERS, topic, deadline_s)


async def _require_topic(
    context: ClientContext, name: str, topic: str, deadline_s: float
) -> None:
    coordinator, paths = _require_coordinator(context), context.paths
    for node in (paths.topic_definition(topic), paths.recorded_topic(topic)):
        if await coordinator.exists(node, deadline_s=deadline_s):
            return
    raise ConfigError(
        f"{name}: there is no topic '{topic}': 'metaq topics create {topic}' makes it"
    )


def _require_same(
    group: str, definition: QueueGroupDefinition, wanted: Mapping[str, Any]
) -> None:
    differences = [
        f"{name} is {getattr(definition, name)!r}, got {value!r}"
        for name, value in sorted(wanted.items())
        if getattr(definition, name) != value
    ]
    if differences:
        raise QueueGroupError(
            f"queue group '{group}' is defined otherwise: {'; '.join(differences)}"
        )


async def refuse_queue_group(
    coordinator: Coordinator, paths: NodePaths, group: str, *, deadline_s: float
) -> None:
    """Refuse a log consumer of a queue group's name.

    Raises:
        QueueGroupError: the name is a queue group's.
        CoordinationError: ZooKeeper cannot be asked.
    """
    _, found = await _look(coordinator, paths.queue_group(group), deadline_s)
    if found is not None:
        raise QueueGroupError(
            f"group '{group}' is a queue group: take from it with client.queue(...), or"
            " give the consumer another group"
        )


async def read_queue_groups(
    context: ClientContext, *, deadline_s: float
) -> dict[str, QueueGroupDefinition]:
    """Return the queue groups by name; raises as `ensure_queue_group`."""
    path = context.paths.queue_groups()
    found = await read_values(
        _require_coordinator(context), path, decode_group, deadline_s=deadline_s
    )
    return {name: each for name, each in found.items() if not each.is_deleted}


async def delete_queue_group(
    context: ClientContext, group: str, *, deadline_s: float
) -> bool:
    """Delete a queue group, and on its brokers what it has done; False: none is there.

    Raises:
        ConfigError: the client has no ZooKeeper.
        CoordinationError: ZooKeeper cannot be asked, or the group was changed at this
            moment.
    """
    coordinator, path = _require_coordinator(context), context.paths.queue_group(group)
    node, old = await _look(coordinator, path, deadline_s)
    if node is None or old is None:
        return False
    gone = encode_group(replace(old, is_deleted=True))
    await coordinator.replace(path, gone, version=node.version, deadline_s=deadline_s)
    return True
