"""Queue groups: created by their first user; users with different options are refused.

The options that a caller wants have the names of the fields of `QueueGroupDefinition`,
and `then`. Missing ones keep their present value, or get the default in a new group.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from metaq.client.cluster.context import ClientContext, ZooKeeperCall
from metaq.client.errors import ExchangeError, GroupInUseError, QueueGroupError
from metaq.client.names import near_topics
from metaq.client.options import load_filter
from metaq.errors import ClientError, ConfigError
from metaq.filter.language import ANY_FILTER
from metaq.model import BrokerId
from metaq.zk.definitions import decode_definition
from metaq.zk.errors import NodeChangedError
from metaq.zk.exchange_definitions import decode_exchange
from metaq.zk.group_definitions import (
    QueueGroupDefinition,
    decode_group,
    encode_group,
    wants_parser,
)
from metaq.zk.paths import NodeKind
from metaq.zk.znodes import Node

LETTERS: Final = "dead_letter_topic"
AGREE_TRIES: Final = 5
"""Maximum number of tries to write a node that other starting members also change."""

_Found = tuple[Node | None, QueueGroupDefinition | None]
"""The node of a queue group, and its definition unless it was deleted."""


async def reach_queue_groups(
    context: ClientContext, timeout: float | None = None
) -> "QueueGroupDefinitions":
    """Wait for ZooKeeper; return the queue groups of a client's cluster, for one call.

    Raises:
        ConfigError: the client has no ZooKeeper.
        CoordinationError: ZooKeeper cannot be reached.
    """
    coordinator = context.require_coordinator("queue groups are kept in")
    deadline_s = await context.reach(timeout)
    return QueueGroupDefinitions(coordinator, context.paths, deadline_s)


class QueueGroupDefinitions(ZooKeeperCall):
    """The queue groups of a cluster. Created for one call, which has a deadline.

    Every method raises CoordinationError if ZooKeeper cannot be asked, or if another
    client has just changed the group; nothing is written then.
    """

    async def read(self) -> dict[str, QueueGroupDefinition]:
        """Return the queue groups by name."""
        await load_filter(ANY_FILTER)  # one of them may have a filter
        found = await self.values(self.paths.queue_groups(), decode_group)
        return {name: each for name, each in found.items() if not each.is_deleted}

    async def require_readable(self, group: str) -> None:
        """Check that this version can read the definition of a group, if there is one.

        Raises:
            PayloadError: it cannot.
        """
        await self._look(group)

    async def ensure(
        self, group: str, topic: str, wanted: Mapping[str, object]
    ) -> QueueGroupDefinition:
        """Return the definition of a queue group; write it first if there is none.

        Raises:
            ConfigError: the group is new, and neither a dead-letter topic nor `then` is
                given, or that topic does not exist, or only MetaQ 1.4 brokers have the
                group's topic.
            QueueGroupError: the group has a different definition, or is a log group.
        """
        node, old = await self._look(group)
        if old is None:
            await self._require_topic("topic", topic, may_come=True)
            try:
                return await self._write_first(group, topic, wanted, node)
            except NodeChangedError:
                _, old = await self._look(group)
                if old is None:
                    raise
        differences = [
            f"{name} is {getattr(old, name)!r}, got {value!r}"
            for name, value in sorted({**_fields(wanted), "topic": topic}.items())
            if getattr(old, name) != value
        ]
        if differences:
            raise QueueGroupError(
                f"queue group '{group}' is defined with other options:"
                f" {'; '.join(differences)}"
            )
        return old

    async def create(
        self, group: str, topic: str, wanted: Mapping[str, object]
    ) -> QueueGroupDefinition:
        """Create a queue group.

        Raises:
            ConfigError: as `ensure`; or the group's topic does not exist.
            QueueGroupError: the group exists already, or is a log group.
        """
        await self._require_topic("topic", topic)
        node, old = await self._look(group)
        if old is not None:
            raise QueueGroupError(
                f"queue group '{group}' exists, of topic '{old.topic}'"
            )
        return await self._write_first(group, topic, wanted, node)

    async def alter(
        self, group: str, wanted: Mapping[str, object]
    ) -> QueueGroupDefinition:
        """Change options of a queue group.

        Raises:
            ClientError: there is no such group.
            ConfigError: no option is given; or a dead-letter topic does not exist, or
                is missing.
        """
        node, old = await self._find(group)
        if not wanted:
            raise ConfigError(
                f"queue group '{group}': expected at least one option to change"
            )
        new = replace(old, **_fields(wanted))
        if wanted.get("then") == "dead_letter" and new.dead_letter_topic is None:
            raise ConfigError(f"{LETTERS}: expected a topic with then='dead_letter'")
        if new.dead_letter_topic != old.dead_letter_topic:
            await self._require_letters(new)
        await self._write(group, new, node.version)
        return new

    async def delete_group(self, group: str) -> None:
        """Delete a queue group; its brokers then delete its state.

        Raises:
            ClientError: there is no such group.
        """
        node, old = await self._find(group)
        await self._write(group, replace(old, is_deleted=True), node.version)

    async def refuse(self, group: str) -> None:
        """Check that a log consumer may use a group's name.

        Raises:
            QueueGroupError: it is the name of a queue group.
        """
        _, found = await self._look(group)
        if found is not None:
            raise QueueGroupError(
                f"group '{group}' is a queue group: take from it with"
                " client.queue(...), or give the consumer another group"
            )

    async def agree(self, group: str, member: str, where: str | None) -> None:
        """Ensure that all members of a log group have the same filter.

        The only member of a group may change it.

        Raises:
            GroupInUseError: there are other members, with another filter.
        """
        path, before = self.paths.group_filter(group), list[Node | None]()
        for _ in range(AGREE_TRIES):
            node = await self.get(path)
            found = None if node is None else where_of(node.data)
            if found == where:
                return
            # In this order: a member that joins later reads the node after we did.
            there = await self.children(self.paths.members(group))
            if not {*there} <= {member}:
                if node in before:
                    raise GroupInUseError(
                        f"group '{group}' reads with {_where_text(found)}, and this"
                        f" member with {_where_text(where)}: all members of a group"
                        " have the same filter; stop the others to change it"
                    )
                before.append(node)
                continue
            with suppress(NodeChangedError):
                version = None if node is None else node.version
                await self.write(path, (where or "").encode(), version=version)
                return
        raise NodeChangedError(f"{path}: changed by others at every attempt")

    async def _look(self, group: str) -> _Found:
        node = await self.get(self.paths.queue_group(group))
        if node is not None and wants_parser(node.data):
            await load_filter(ANY_FILTER)
        found = None if node is None else decode_group(node.data)
        return node, None if found is None or found.is_deleted else found

    async def _find(self, group: str) -> tuple[Node, QueueGroupDefinition]:
        node, found = await self._look(group)
        if node is None or found is None:
            raise ClientError(f"no queue group {group}")
        return node, found

    async def _write(
        self, group: str, definition: QueueGroupDefinition, version: int | None
    ) -> None:
        path, data = self.paths.queue_group(group), encode_group(definition)
        await self.write(path, data, version=version)

    async def _write_first(
        self, group: str, topic: str, wanted: Mapping[str, object], node: Node | None
    ) -> QueueGroupDefinition:
        """Write the definition of a new group; `node` is that of a deleted one."""
        await self._refuse_log_group(group)
        fields = _fields(wanted)
        if LETTERS not in fields:
            raise ConfigError(
                f"queue group '{group}' does not exist yet: pass dead_letter_topic=...,"
                ' or then="drop"'
            )
        if node is not None:
            fields["generation"] = decode_group(node.data).generation + 1
        definition = replace(QueueGroupDefinition(topic=topic), **fields)
        await self._require_letters(definition)
        await self._write(group, definition, None if node is None else node.version)
        try:
            # Check again: a log consumer that joins registers first, then reads this.
            await self._refuse_log_group(group)
        except QueueGroupError:
            await self.delete_group(group)
            raise
        return definition

    async def _refuse_log_group(self, group: str) -> None:
        offsets = self.paths.group_topics(NodeKind.GROUP_OFFSET, group)
        for node in (self.paths.members(group), offsets):
            # Ignore the group's own node, which a refused consumer may leave.
            if await self.children(node):
                raise QueueGroupError(
                    f"group '{group}' is a log group: a queue group needs another name"
                )

    async def _require_letters(self, definition: QueueGroupDefinition) -> None:
        topic = definition.dead_letter_topic
        if topic == definition.topic:
            raise ConfigError(
                f"{LETTERS}: expected another topic than '{topic}' itself"
            )
        if topic is None:
            return
        await self._require_topic(LETTERS, topic)
        # A broker stores a letter with the end of its message, in its own partitions.
        node = await self.get(self.paths.topic_definition(topic))
        names = None if node is None else decode_definition(node.data).names
        has_it = await self.children(self.paths.recorded_topic(topic))
        for broker in await self.children(self.paths.recorded_topic(definition.topic)):
            if broker not in has_it and not (names and names(BrokerId(int(broker)))):
                raise ConfigError(
                    f"{LETTERS}: broker {broker} has topic '{definition.topic}', and"
                    f" needs '{topic}' for its dead letters: 'metaq topics alter"
                    f" {topic} --brokers all'; or, if it is gone for good, 'metaq"
                    f" brokers forget {broker}'"
                )

    async def _require_topic(
        self, name: str, topic: str, *, may_come: bool = False
    ) -> None:
        paths = self.paths
        for path in (paths.topic_definition(topic), paths.recorded_topic(topic)):
            if await self.exists(path):
                return
        node = await self.get(paths.exchange(topic))
        if node is not None and not decode_exchange(node.data).is_deleted:
            raise ExchangeError(
                f"{name}: '{topic}' is an exchange, which stores nothing itself: name a"
                " topic that it is bound to"
            )
        if await self.children(paths.topic_children(NodeKind.TOPIC_SUB, topic)):
            raise ConfigError(
                f"{name}: topic '{topic}' is only at brokers of MetaQ 1.4, which have"
                " no queue groups and take no dead letters of other brokers"
            )
        if not may_come:
            raise ConfigError(
                f"{name}: there is no topic '{topic}'; {near_topics(topic, ())}"
            )


def where_of(data: bytes | None) -> str | None:
    """Return the filter in the node of a log group; None if there is none."""
    return data.decode(errors="replace") if data else None


def _where_text(where: str | None) -> str:
    return "no filter" if where is None else f"where={where!r}"


def _fields(wanted: Mapping[str, object]) -> dict[str, Any]:
    """Return the fields of a definition; `then="drop"` means no dead-letter topic."""
    fields = {name: value for name, value in wanted.items() if name != "then"}
    if wanted.get("then") == "drop":
        fields[LETTERS] = None
    return fields
