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
from metaq.zk.paths import NodePaths
from metaq.zk.session import Coordinator

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
    node = await coordinator.get(path, deadline_s=deadline_s)
    old = None if node is None else decode_group(node.data)
    if old is None or old.is_deleted:
        await _refuse_log_group(context, coordinator, group, deadline_s)
        definition = _first_definition(group, topic, wanted)
        if old is not None:
            definition = replace(definition, generation=old.generation + 1)
        await _require_letters(context, coordinator, definition, deadline_s)
        version = None if node is None else node.version
        try:
            await coordinator.replace(
                path, encode_group(definition), version=version, deadline_s=deadline_s
            )
        except NodeChangedError:
            old = await _read(coordinator, path, deadline_s)
        else:
            try:
                # A log consumer that joins registers first, and looks for this then.
                await _refuse_log_group(context, coordinator, group, deadline_s)
            except QueueGroupError:
                await delete_queue_group(context, group, deadline_s=deadline_s)
                raise
            return definition
    if old is None or old.is_deleted:
        raise QueueGroupError(f"queue group '{group}' was deleted at this moment")
    _require_same(group, old, {**_fields(wanted), "topic": topic})
    return old


async def _refuse_log_group(
    context: ClientContext, coordinator: Coordinator, group: str, deadline_s: float
) -> None:
    if await coordinator.exists(context.paths.group(group), deadline_s=deadline_s):
        raise QueueGroupError(
            f"group '{group}' is a log group: a queue group needs another name"
        )


async def _read(
    coordinator: Coordinator, path: str, deadline_s: float
) -> QueueGroupDefinition | None:
    node = await coordinator.get(path, deadline_s=deadline_s)
    return None if node is None else decode_group(node.data)


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
    context: ClientContext,
    coordinator: Coordinator,
    definition: QueueGroupDefinition,
    deadline_s: float,
) -> None:
    topic, paths = definition.dead_letter_topic, context.paths
    if topic is None or topic == definition.topic:
        if topic is not None:
            raise ConfigError(
                f"dead_letter_topic: expected another topic than '{topic}' itself"
            )
        return
    nodes = (paths.topic_definition(topic), paths.recorded_topic(topic))
    for node in nodes:
        if await coordinator.exists(node, deadline_s=deadline_s):
            return
    raise ConfigError(
        f"dead_letter_topic: there is no topic '{topic}':"
        f" 'metaq topics create {topic}' makes it"
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
    found = await _read(coordinator, paths.queue_group(group), deadline_s)
    if found is not None and not found.is_deleted:
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
    node = await coordinator.get(path, deadline_s=deadline_s)
    old = None if node is None else decode_group(node.data)
    if node is None or old is None or old.is_deleted:
        return False
    gone = encode_group(replace(old, is_deleted=True))
    await coordinator.replace(path, gone, version=node.version, deadline_s=deadline_s)
    return True
