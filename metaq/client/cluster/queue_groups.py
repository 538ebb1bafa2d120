"""Queue groups: made by their first user, refused where another one says otherwise.

What a caller wants has the names of `QueueGroupDefinition`, and `then`; what is not
there is as it is, or the default.
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
"""Members that begin at the same moment change a node so often at most."""

_Found = tuple[Node | None, QueueGroupDefinition | None]
"""The node of a queue group, and its definition unless it was deleted."""


async def reach_queue_groups(
    context: ClientContext, timeout: float | None = None
) -> "QueueGroupDefinitions":
    """Return the queue groups of a client's cluster, for one call.

    Raises:
        ConfigError: the client has no ZooKeeper.
        CoordinationError: it cannot be reached.
    """
    coordinator = context.require_coordinator("queue groups are kept in")
    deadline_s = await context.reach(timeout)
    return QueueGroupDefinitions(coordinator, context.paths, deadline_s)


class QueueGroupDefinitions(ZooKeeperCall):
    """The queue groups of a cluster. Made for one call, which ends by the deadline.

    Every method raises CoordinationError when ZooKeeper cannot be asked, or when
    another one has changed the group at this moment: nothing is written then.
    """

    async def read(self) -> dict[str, QueueGroupDefinition]:
        """Return the queue groups by name."""
        await load_filter(ANY_FILTER)  # one of them may have a filter
        found = await self.values(self.paths.queue_groups(), decode_group)
        return {name: each for name, each in found.items() if not each.is_deleted}

    async def require_readable(self, group: str) -> None:
        """Refuse a group that a newer version has made: it is not missing.

        Raises:
            PayloadError: the text says so.
        """
        await self._look(group)

    async def ensure(
        self, group: str, topic: str, wanted: Mapping[str, object]
    ) -> QueueGroupDefinition:
        """Return the definition of a queue group, written now where there is none.

        Raises:
            ConfigError: there is no such group yet, and nothing says what becomes of a
                message that is given up, or its dead-letter topic is not there, or only
                brokers of MetaQ 1.4 have its topic.
            QueueGroupError: the group is defined otherwise, or is a log group.
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
                f"queue group '{group}' is defined otherwise: {'; '.join(differences)}"
            )
        return old

    async def create(
        self, group: str, topic: str, wanted: Mapping[str, object]
    ) -> QueueGroupDefinition:
        """Make a queue group; raises as `ensure`.

        Raises:
            ConfigError: there is no such topic.
            QueueGroupError: it is there.
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
            ClientError: there is none.
            ConfigError: nothing is wanted; or the dead-letter topic is not there, or
                not said.
        """
        node, old = await self._find(group)
        if not wanted:
            raise ConfigError(
                f"queue group '{group}': nothing is said that would change"
            )
        new = replace(old, **_fields(wanted))
        if wanted.get("then") == "dead_letter" and new.dead_letter_topic is None:
            raise ConfigError(f"{LETTERS}: expected a topic with then='dead_letter'")
        if new.dead_letter_topic != old.dead_letter_topic:
            await self._require_letters(new)
        await self._write(group, new, node.version)
        return new

    async def delete_group(self, group: str) -> None:
        """Delete a queue group, and on its brokers what it has done.

        Raises:
            ClientError: there is none.
        """
        node, old = await self._find(group)
        await self._write(group, replace(old, is_deleted=True), node.version)

    async def refuse(self, group: str) -> None:
        """Refuse a log consumer of a queue group's name.

        Raises:
            QueueGroupError: the name is a queue group's.
        """
        _, found = await self._look(group)
        if found is not None:
            raise QueueGroupError(
                f"group '{group}' is a queue group: take from it with"
                " client.queue(...), or give the consumer another group"
            )

    async def agree(self, group: str, member: str, where: str | None) -> None:
        """Have all members of a log group filter alike: a member alone says how.

        Raises:
            GroupInUseError: other members are there, and the group filters otherwise.
        """
        path, before = self.paths.group_filter(group), list[Node | None]()
        for _ in range(AGREE_TRIES):
            node = await self.get(path)
            found = None if node is None else where_of(node.data)
            if found == where:
                return
            # In this order: who has joined since knows the node that we replace.
            there = await self.children(self.paths.members(group))
            if not {*there} <= {member}:
                if node in before:
                    raise GroupInUseError(
                        f"group '{group}' reads with {_where_text(found)}, and this"
                        f" member with {_where_text(where)}: all members of a group"
                        " read alike; stop the others to change that"
                    )
                before.append(node)
                continue
            with suppress(NodeChangedError):
                version = None if node is None else node.version
                await self.write(path, (where or "").encode(), version=version)
                return
        raise NodeChangedError(f"{path}: others change it again and again")

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
        """Write the definition of a group that is not there, over the node."""
        await self._refuse_log_group(group)
        fields = _fields(wanted)
        if LETTERS not in fields:
            raise ConfigError(
                f"queue group '{group}' is not there yet: say dead_letter_topic=...,"
                ' or then="drop"'
            )
        if node is not None:
            fields["generation"] = decode_group(node.data).generation + 1
        definition = replace(QueueGroupDefinition(topic=topic), **fields)
        await self._require_letters(definition)
        await self._write(group, definition, None if node is None else node.version)
        try:
            # A log consumer that joins registers first, and looks for this then.
            await self._refuse_log_group(group)
        except QueueGroupError:
            await self.delete_group(group)
            raise
        return definition

    async def _refuse_log_group(self, group: str) -> None:
        offsets = self.paths.group_topics(NodeKind.GROUP_OFFSET, group)
        for node in (self.paths.members(group), offsets):
            # The node of the group alone may be what a refused consumer has left.
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
                f"{name}: topic '{topic}' is at brokers of MetaQ 1.4 alone, which have"
                " no queue groups and take no dead letters of other brokers"
            )
        if not may_come:
            raise ConfigError(
                f"{name}: there is no topic '{topic}'; {near_topics(topic, ())}"
            )


def where_of(data: bytes | None) -> str | None:
    """Return the filter in the node of a log group; None: there is none."""
    return data.decode(errors="replace") if data else None


def _where_text(where: str | None) -> str:
    return "no filter" if where is None else f"where={where!r}"


def _fields(wanted: Mapping[str, object]) -> dict[str, Any]:
    """Return fields of a definition: that of `then` is the dead-letter topic."""
    fields = {name: value for name, value in wanted.items() if name != "then"}
    if wanted.get("then") == "drop":
        fields[LETTERS] = None
    return fields
