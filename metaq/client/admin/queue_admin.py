"""Administration calls about queue groups and their progress on each broker."""

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
    """A queue group on one partition; counters are since the start of the broker."""

    partition: TopicPartition
    floor: int
    """Offset below which every message is done."""
    end: int
    """Log end offset of the partition."""
    read_offset: int | None = None
    """Offset of the first message not read for the workers yet; None: the floor."""
    unread_count: int | None = None
    """Number of messages from there to the end, including any done before the broker
    started; None if unknown."""
    open_count: int = 0
    """Number of messages that were read and are not done."""
    ready_count: int = 0
    """Number of open messages that can be delivered now."""
    delayed_count: int = 0
    """Number of open messages that wait for the end of a delay."""
    done_count: int = 0
    """Number of done messages: handled, passed over, dropped or dead."""
    passed_count: int = 0
    """Number of done messages that the group's filter passed over."""
    expired_count: int = 0
    """Number of leases that ended before their messages were settled."""
    letter_count: int = 0
    """Number of messages given up: stored as dead letters, or dropped."""
    held: Mapping[str, int] = field(default_factory=no_items)
    """Worker → number of messages leased to it, of the workers with most."""
    oldest_s: float | None = None
    """Age of the oldest message that is not done, at the floor; 0.0: there is none,
    None: unknown."""


@dataclass(frozen=True, slots=True)
class QueueGroupDescription:
    """A queue group."""

    group: str
    definition: QueueGroupDefinition
    queues: tuple[QueueDescription, ...]
    """Progress on each partition that has had a message, by partition. A broker may
    know a new group only after a second."""
    problems: tuple[str, ...]
    """One sentence for each partition that is away and broker that cannot be asked."""


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
        """Return a queue group and its progress.

        Args:
            group: name of the group.
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            ClientError: there is no such group; the text names the existing ones.
            ConfigError: the client has no ZooKeeper.
            CoordinationError: ZooKeeper cannot be asked, or a newer version has created
                the group.
            TypeError: the name is not a string.
        """
        require_text("group", group)
        context = self._context
        groups = await reach_queue_groups(context, timeout)
        known = await groups.read()
        if group not in known:
            await groups.require_readable(group)
            names = ", ".join(known) or "none"
            raise ClientError(f"no queue group {group}; existing groups: {names}")
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
        """Create a queue group; otherwise its first worker creates it.

        Args:
            group: name of the group.
            topic: topic whose messages it gets; must exist.
            lease_s: as in `QueueOptions`, like the other options.
            deliveries_max: likewise.
            then: "drop" or "dead_letter".
            dead_letter_topic: an existing topic; required unless `then="drop"`.
            retry_delays_s: likewise.
            ordered_by: likewise.
            start: likewise.
            where: likewise.
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            QueueGroupError: the group exists, or the name is a log group's.
            ExchangeError: one of the topics is an exchange.
            ConfigError: a name or an option is invalid, a topic does not exist, the
                options do not say what happens to messages that are given up, or the
                client has no ZooKeeper.
            CoordinationError: ZooKeeper cannot be asked.
            TypeError: an argument has a wrong type; the text names it.

        Cancellation: it may be created.
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

        Topic, order and start cannot be changed, because the group's progress depends
        on them. A new filter applies to messages that were not read yet; messages that
        the old one passed over are done and are not delivered.
        Workers that name an option must have the new value at their next start.

        Args:
            group: name of the group.
            lease_s: as in `QueueOptions`; None leaves it unchanged, like the others.
            deliveries_max: likewise.
            then: "drop" or "dead_letter".
            dead_letter_topic: an existing topic; letters that still wait go there too.
            retry_delays_s: likewise.
            where: likewise; "" removes the filter.
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            ClientError: there is no such group.
            ExchangeError: the dead-letter topic is an exchange.
            ConfigError: an option is invalid, or none is given; the dead-letter topic
                does not exist; or the client has no ZooKeeper.
            CoordinationError: ZooKeeper cannot be asked, or another client changed the
                group at the same time.
            TypeError: an argument has a wrong type; the text names it.

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
        """Delete a queue group: brokers delete its progress, messages stay.

        Its workers stop with an error. If the group is created again, it begins as a
        new one.

        Args:
            group: name of the group.
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            ClientError: there is no such group.
            ConfigError: the client has no ZooKeeper.
            CoordinationError: ZooKeeper cannot be asked.
            TypeError: the name is not a string.
        """
        require_text("group", group)
        groups = await reach_queue_groups(self._context, timeout)
        await groups.delete_group(group)


def problems_of(
    snapshot: ClusterSnapshot, topics: Iterable[str], found: Mapping[BrokerId, object]
) -> tuple[str, ...]:
    """Return a sentence for each partition that is away and each broker's error."""
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
    """Return a group's queues on one broker, with lags from their logs."""
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
    """Yield group and description of each line of `stats queues`.

    A broker without queue groups takes the item for the name of a topic; its answer has
    no such lines.

    Raises:
        RemoteProtocolError: a line cannot be decoded.
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
