"""Calls about queue groups: what there is, and how far it is on each broker."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Final, Literal, TypeAlias

from metaq.client.admin.group_admin import AsyncGroupAdmin
from metaq.client.cluster.catalog import read_cluster
from metaq.client.cluster.context import ClientContext
from metaq.client.cluster.queue_groups import reach_queue_groups
from metaq.client.consume.browse import stats_text
from metaq.client.consume.progress import Lag, lag_of
from metaq.client.errors import NoQueuesError
from metaq.client.fan_out import answers, failures, for_each
from metaq.client.names import check_group, check_topic, require_text
from metaq.client.options import QueueOptions, load_filter
from metaq.cluster_snapshot import ClusterSnapshot
from metaq.errors import ClientError, MetaqError, RemoteProtocolError
from metaq.model import BrokerId, Offset, TopicPartition, no_items
from metaq.zk.group_definitions import QueueGroupDefinition

Then: TypeAlias = Literal["dead_letter", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueDescription:
    """A queue group on one partition; its counters are of this life of the broker."""

    partition: TopicPartition
    floor: int
    """Offset below which every message is done."""
    end: int
    """End of the partition's log."""
    read_offset: int | None = None
    """Offset from which on no message was looked at for the workers; None: at the
    floor."""
    unread_count: int | None = None
    """Messages from there to the end, with any that were done before the broker began;
    None if it is not known."""
    open_count: int = 0
    """Messages that were looked at and are not done."""
    ready_count: int = 0
    """Of these, messages that can be given out now."""
    delayed_count: int = 0
    """Of these, messages that wait for the end of their delay."""
    done_count: int = 0
    """Messages that are done: handled, passed over, dropped or dead."""
    passed_count: int = 0
    """Of these, messages that are not the group's, by its filter."""
    expired_count: int = 0
    """Leases that ended before their messages were settled."""
    letter_count: int = 0
    """Messages that were given up: stored as dead letters, or dropped."""
    held: Mapping[str, int] = field(default_factory=no_items)
    """Worker → messages that it has; those that have most."""
    oldest_s: float | None = None
    """Age of the message at the floor, the oldest one that is not done; 0.0 without
    one, None if it is not known."""


@dataclass(frozen=True, slots=True)
class QueueGroupDescription:
    """A queue group."""

    group: str
    definition: QueueGroupDefinition
    queues: tuple[QueueDescription, ...]
    """By partition, those that have had a message; a broker may not have heard of a new
    group for a second."""
    problems: tuple[str, ...]
    """One sentence for each broker, or partition, that is away."""


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
        groups = await reach_queue_groups(self._context, timeout)
        return await groups.read()

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
            CoordinationError: ZooKeeper cannot be asked, or a newer version has made
                the group.
            TypeError: the name is no text.
        """
        require_text("group", group)
        context = self._context
        groups = await reach_queue_groups(context, timeout)
        known = await groups.read()
        if group not in known:
            await groups.require_readable(group)
            names = ", ".join(known) or "none"
            raise ClientError(f"no queue group {group}; groups there are: {names}")
        deadline_s, topic = context.deadline_s(timeout), known[group].topic
        snapshot = await read_cluster(context, [topic], deadline_s=deadline_s)

        async def look(broker_id: BrokerId) -> list[QueueDescription]:
            is_served = broker_id in snapshot.gets.get(topic, {})
            return await _queues_on(
                context, broker_id, group, deadline_s, is_served=is_served
            )

        found = await for_each(look, sorted(snapshot.brokers))
        queues = chain.from_iterable(answers(found).values())
        problems = problems_of(snapshot, [topic], found)
        counts = snapshot.puts, snapshot.gets, snapshot.recorded
        if not any(topic in each for each in counts):
            gone = f"topic {topic} is on no broker: if it was deleted, so is what the"
            problems += (f"{gone} group has done of it, and workers wait for it",)
        return QueueGroupDescription(
            group,
            known[group],
            tuple(sorted(queues, key=lambda each: each.partition)),
            problems,
        )

    async def create_queue_group(
        self,
        group: str,
        topic: str,
        *,
        lease_s: float | None = None,
        deliveries_max: int | None = None,
        then: Then | None = None,
        dead_letter_topic: str | None = None,
        retry_delays_s: Sequence[float] | None = None,
        ordered_by: Literal["key"] | None = None,
        start: Literal["earliest", "latest"] | None = None,
        where: str | None = None,
        timeout: float | None = None,
    ) -> QueueGroupDefinition:
        """Make a queue group; its first worker would make it as well.

        Args:
            group: its name.
            topic: the one that it is of, which exists.
            lease_s: this and the others are as in `QueueOptions`.
            deliveries_max: likewise.
            then: "drop", or a dead-letter topic.
            dead_letter_topic: a topic that exists; needed without `then="drop"`.
            retry_delays_s: likewise.
            ordered_by: likewise.
            start: likewise.
            where: likewise.
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            QueueGroupError: it is there, or the name is a log group's.
            ExchangeError: a topic of it is an exchange.
            ConfigError: a name or an option that cannot be; a topic that is not there;
                nothing says what becomes of a message that is given up; or the client
                has no ZooKeeper.
            CoordinationError: ZooKeeper cannot be asked.
            TypeError: an argument of another type; the text names it.

        Cancellation: it may be made.
        """
        check_group(group)
        check_topic(topic)
        options = QueueOptions(
            lease_s=lease_s,
            deliveries_max=deliveries_max,
            then=then,
            dead_letter_topic=dead_letter_topic,
            retry_delays_s=retry_delays_s,
            ordered_by=ordered_by,
            start=start,
            where=where,
        )
        await load_filter(where)
        groups = await reach_queue_groups(self._context, timeout)
        return await groups.create(group, topic, options.definition())

    async def alter_queue_group(
        self,
        group: str,
        *,
        lease_s: float | None = None,
        deliveries_max: int | None = None,
        then: Then | None = None,
        dead_letter_topic: str | None = None,
        retry_delays_s: Sequence[float] | None = None,
        where: str | None = None,
        timeout: float | None = None,
    ) -> QueueGroupDefinition:
        """Change options of a queue group, from the next delivery on.

        Its topic, order and start stay as they are: they say what is done. A new filter
        is of messages that were not looked at yet; what the old one passed over is
        done, and does not come.
        Workers that repeat an option have to say the new value when they start again.

        Args:
            group: its name.
            lease_s: as in `QueueOptions`; None leaves it as it is, as do the others.
            deliveries_max: likewise.
            then: "drop", or a dead-letter topic.
            dead_letter_topic: a topic that exists; letters that wait go there too.
            retry_delays_s: likewise.
            where: likewise; "" is no filter.
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            ClientError: there is no such group.
            ExchangeError: the dead-letter topic is an exchange.
            ConfigError: an option that cannot be, or none; a dead-letter topic that is
                not there; or the client has no ZooKeeper.
            CoordinationError: ZooKeeper cannot be asked, or another one has changed the
                group at this moment.
            TypeError: an argument of another type; the text names it.

        Cancellation: it may be changed.
        """
        require_text("group", group)
        options = QueueOptions(
            lease_s=lease_s,
            deliveries_max=deliveries_max,
            then=then,
            dead_letter_topic=dead_letter_topic,
            retry_delays_s=retry_delays_s,
            where=None if where == "" else where,
        )
        wanted = options.definition()
        if where == "":
            wanted["where"] = None
        await load_filter(options.where)
        groups = await reach_queue_groups(self._context, timeout)
        return await groups.alter(group, wanted)

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
        groups = await reach_queue_groups(self._context, timeout)
        await groups.delete_group(group)


def problems_of(
    snapshot: ClusterSnapshot, topics: Iterable[str], found: Mapping[BrokerId, object]
) -> tuple[str, ...]:
    """Return a sentence for each partition that is away, and each broker's error."""
    away = chain.from_iterable(map(snapshot.away, topics))
    failed = failures(found).items()
    return (
        *(f"{partition}: its broker is away" for partition in away),
        *(f"broker {number} cannot be asked: {error}" for number, error in failed),
    )


async def _queues_on(
    context: ClientContext,
    broker_id: BrokerId,
    group: str,
    deadline_s: float,
    *,
    is_served: bool,
) -> list[QueueDescription]:
    """Return what one broker has of a group, with what its logs say of it."""
    address = context.address_of(broker_id)
    if address is None:
        return []
    connection = await context.pool.get(address, deadline_s=deadline_s)
    if is_served and not connection.capabilities.queues:
        raise NoQueuesError(
            f"it has no queue groups (version {connection.capabilities.version}): no"
            " worker gets what the topic has there"
        )
    text = await stats_text(context, address, "queues", deadline_s=deadline_s)
    queues = [each for name, each in read_lines(text, broker_id) if name == group]

    async def measured(queue: QueueDescription) -> QueueDescription:
        async def lag_from(offset: int) -> Lag:
            at = Offset(offset)
            return await lag_of(context, queue.partition, at, deadline_s=deadline_s)

        oldest = unread = await lag_from(queue.floor)
        if queue.read_offset is not None and queue.read_offset != queue.floor:
            unread = await lag_from(queue.read_offset)
        return replace(queue, oldest_s=oldest.seconds, unread_count=unread.messages)

    found = await for_each(lambda at: measured(queues[at]), range(len(queues)))
    return [
        queues[at] if isinstance(one, MetaqError) else one for at, one in found.items()
    ]


_FIGURES: Final = {each.name for each in fields(QueueDescription)} - {
    "partition", "held", "oldest_s", "unread_count",
}  # fmt: skip


def read_lines(
    text: str, broker_id: BrokerId
) -> Iterator[tuple[str, QueueDescription]]:
    """Yield group and figures of each line of `stats queues`.

    A broker without queue groups takes the item for the name of a topic; its answer
    has no such line.

    Raises:
        RemoteProtocolError: a line makes no sense.
    """
    for line in text.splitlines():
        if not line.startswith("{"):
            continue
        try:
            found = json.loads(line)
            group = str(found["group"])
            partition = TopicPartition(found["topic"], broker_id, found["partition"])
            held = {str(name): int(count) for name, count in found["held"].items()}
            figures = {name: int(found[name]) for name in _FIGURES & found.keys()}
            queue = QueueDescription(partition=partition, held=held, **figures)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RemoteProtocolError(f"stats queues: {line[:200]!r}") from error
        yield group, queue
