"""Calls about queue groups: what there is, and how far it is on each broker."""

from collections.abc import Mapping
from dataclasses import dataclass

from metaq.client.admin.group_admin import AsyncGroupAdmin
from metaq.client.cluster.queue_groups import delete_queue_group, read_queue_groups
from metaq.client.consume.browse import stats_text
from metaq.client.names import require_text
from metaq.errors import ClientError, MetaqError
from metaq.model import BrokerId, TopicPartition
from metaq.zk.group_definitions import QueueGroupDefinition


@dataclass(frozen=True, slots=True)
class QueueDescription:
    """A queue group on one partition, as its broker has it in memory."""

    partition: TopicPartition
    open_count: int
    """Messages that are given out, returned or blocked."""
    ready_count: int
    """Of these, messages that can be given out now; those that were not looked at yet
    are not counted."""
    unread_bytes: int
    """Bytes of the partition that were not looked at yet."""
    lost_count: int
    """Messages that retention took before they were done, since the broker began."""
    worker_count: int
    """Workers that have messages."""


@dataclass(frozen=True, slots=True)
class QueueGroupDescription:
    """A queue group."""

    group: str
    definition: QueueGroupDefinition
    queues: tuple[QueueDescription, ...]
    """By partition; those that a worker has used since their broker began."""
    problems: tuple[str, ...]
    """One sentence for each broker that could not be asked."""


class AsyncQueueAdmin(AsyncGroupAdmin):
    """The part of `AsyncAdmin` about queue groups; needs ZooKeeper."""

    async def queue_groups(
        self, timeout: float | None = None
    ) -> Mapping[str, QueueGroupDefinition]:
        """Return the queue groups by name, ascending.

        Args:
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            ConfigError: the client has no ZooKeeper.
            CoordinationError: ZooKeeper cannot be asked.
        """
        context = self._context
        deadline_s = await context.reach(timeout)
        return await read_queue_groups(context, deadline_s=deadline_s)

    async def describe_queue_group(
        self, group: str, timeout: float | None = None
    ) -> QueueGroupDescription:
        """Return a queue group, and how far it is.

        Args:
            group: its name.
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            ClientError: there is no such group; the text names those there are.
            ConfigError: the client has no ZooKeeper.
            CoordinationError: ZooKeeper cannot be asked.
            TypeError: the name is no text.
        """
        require_text("group", group)
        context, known = self._context, await self.queue_groups(timeout)
        if group not in known:
            names = ", ".join(known) or "none"
            raise ClientError(f"no queue group {group}; groups there are: {names}")
        queues, problems = list[QueueDescription](), list[str]()
        for broker_id in sorted(context.metadata.snapshot.brokers):
            try:
                queues += await self._queues_on(broker_id, group, timeout)
            except MetaqError as error:
                problems.append(f"broker {broker_id} cannot be asked: {error}")
        queues.sort(key=lambda each: each.partition)
        return QueueGroupDescription(
            group, known[group], tuple(queues), tuple(problems)
        )

    async def _queues_on(
        self, broker_id: BrokerId, group: str, timeout: float | None
    ) -> list[QueueDescription]:
        context = self._context
        address = context.address_of(broker_id)
        if address is None:
            return []
        deadline_s = context.deadline_s(timeout)
        text = await stats_text(context, address, "queues", deadline_s=deadline_s)
        rows = [line.split(" ") for line in _lines_of(text)]
        return [_described(row, broker_id) for row in rows if row[0] == group]

    async def delete_queue_group(
        self, group: str, timeout: float | None = None
    ) -> None:
        """Delete a queue group: brokers forget what is done, messages stay.

        A worker that is there stops with an error. A group that is made again begins
        as a new one does.

        Args:
            group: its name.
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            ClientError: there is no such group.
            ConfigError: the client has no ZooKeeper.
            CoordinationError: ZooKeeper cannot be asked.
            TypeError: the name is no text.
        """
        require_text("group", group)
        context = self._context
        deadline_s = await context.reach(timeout)
        if not await delete_queue_group(context, group, deadline_s=deadline_s):
            raise ClientError(f"no queue group {group}")


def _lines_of(text: str) -> list[str]:
    """Return the lines of a reply to `stats` between its first and its last."""
    return [line for line in text.splitlines() if line not in {"STATS", "END", ""}]


def _described(words: list[str], broker_id: BrokerId) -> QueueDescription:
    """Read a line of `stats queues`: group, topic, then names and numbers."""
    figures = dict(zip(words[2::2], map(int, words[3::2]), strict=True))
    return QueueDescription(
        partition=TopicPartition(words[1], broker_id, figures["part"]),
        open_count=figures["open"],
        ready_count=figures["ready"],
        unread_bytes=max(0, figures["end"] - figures["scanned"]),
        lost_count=figures["lost"],
        worker_count=figures["workers"],
    )
