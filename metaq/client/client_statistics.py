"""Counters of a client, and of everything made from it: one snapshot.

Taken from any thread, without a request. Counters of closed objects are kept, so that
no sum falls.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from metaq.client.cluster.context import ClientContext
from metaq.client.consume.consumer import AsyncConsumer
from metaq.client.consume.fetch_buffer import PartitionBufferStatistics
from metaq.client.consume.progress import ConsumerStatistics, Health, Lag
from metaq.client.produce.ordered_producer import (
    AsyncOrderedProducer,
    OrderedStatistics,
)
from metaq.client.produce.producer import AsyncProducer
from metaq.client.produce.producer_counters import ProducerStatistics
from metaq.client.queue.prefetch import QueueStatistics
from metaq.client.queue.queue_life import QueueLife
from metaq.client.request.requester import RequestStatistics
from metaq.model import TopicPartition
from metaq.peer.pool import PoolStatistics
from metaq.stats import MetricKind, MetricSpec, Totals, part, total_of
from metaq.zk.session import SessionState, SessionStatus

S = TypeVar("S")

CLOSED_GROUPS_MAX: Final = 1_000
"""Groups whose closed consumers one client remembers; of more, those with which a
consumer was closed last."""


@dataclass(frozen=True, slots=True)
class ConsumerSnapshot:
    """One consumer."""

    group: str
    health: Health
    counters: ConsumerStatistics
    buffers: Mapping[TopicPartition, PartitionBufferStatistics] = part(
        default=dict, labels=("topic", "partition"), label=TopicPartition.labels
    )
    """The partitions it reads now, and how far each is handled."""
    lags: Mapping[TopicPartition, Lag] = part(
        default=dict, labels=("topic", "partition"), label=TopicPartition.labels
    )
    """Last answers of `lag` for those partitions; empty before the first."""


@dataclass(frozen=True, slots=True)
class ClientStatistics:
    """A snapshot of a client and of everything made from it."""

    pool: PoolStatistics
    session: SessionStatus | None = part(
        MetricSpec(
            MetricKind.GAUGE,
            "metaq_client_zookeeper_connected",
            "ZooKeeper sessions that are connected, one for each client.",
            read=lambda status: status and status.state is SessionState.CONNECTED,
        ),
        MetricSpec(
            MetricKind.COUNTER,
            "metaq_client_zookeeper_sessions_total",
            "ZooKeeper sessions so far; each new one follows an expiry.",
            read=lambda status: status and status.session_version,
        ),
        default=None,
    )
    """Its ZooKeeper session; None for a client of named brokers."""
    producers: tuple[ProducerStatistics, ...] = part(
        MetricSpec(
            MetricKind.GAUGE,
            "metaq_producers",
            "Producers that are open, with those of dead letters and of ordered"
            " producers.",
            read=len,
        ),
        default=(),
    )
    """Its open producers, with those of dead letters and under ordered producers."""
    ordered_producers: tuple[OrderedStatistics, ...] = ()
    consumers: tuple[ConsumerSnapshot, ...] = part(
        default=(), labels=("group",), label=lambda consumer: (consumer.group,)
    )
    requests: RequestStatistics | None = None
    """Its requests; None: there was none."""
    queues: tuple[QueueStatistics, ...] = part(
        default=(), labels=("group",), label=lambda queue: (queue.group,)
    )
    """Its open workers of queue groups."""
    closed_producers: ProducerStatistics | None = None
    """Sums of the closed producers; nothing is buffered or in flight in them. None
    while none was closed."""
    closed_ordered_producers: OrderedStatistics | None = None
    """The same of ordered producers; nothing of it is waiting."""
    closed_consumers: Mapping[str, ConsumerStatistics] = part(
        default=dict,
        labels=("group",),
        label=lambda group: (group,),
        is_closed=True,
    )
    """Sums of the closed consumers of each group, by the group's name;
    its local retry store is closed, and no partition is read."""
    closed_queues: Mapping[str, QueueStatistics] = part(
        default=dict,
        labels=("group",),
        label=lambda group: (group,),
        is_closed=True,
    )
    """The same of closed workers; nothing is held in them."""


class Made:
    """All that one client has made and that counts, closed ones included.

    Concurrency: things are added on the client's loop, snapshots taken in any thread.
    """

    def __init__(self) -> None:
        """Start with nothing."""
        self.requests: RequestStatistics | None = None
        self.producers = Totals(AsyncProducer.statistics, total_of)
        self.ordered = Totals(AsyncOrderedProducer.statistics, total_of)
        self.consumers = Totals(_by_group, total_of_groups)
        self.queues: Totals[QueueLife, Mapping[str, QueueStatistics]]
        self.queues = Totals(_by_queue_group, total_of_groups)

    def snapshot(self, context: ClientContext) -> ClientStatistics:
        """Return a snapshot of the client with these parts."""
        coordinator = context.coordinator
        producers, closed_producers = self.producers.split()
        ordered, closed_ordered = self.ordered.split()
        consumers, closed_consumers = self.consumers.split()
        queues, closed_queues = self.queues.split()
        return ClientStatistics(
            pool=context.pool.statistics(),
            session=None if coordinator is None else coordinator.status,
            producers=tuple(one.statistics() for one in producers),
            ordered_producers=tuple(one.statistics() for one in ordered),
            consumers=tuple(map(_snapshot_of_consumer, consumers)),
            requests=self.requests and replace(self.requests),
            closed_producers=closed_producers,
            closed_ordered_producers=closed_ordered,
            queues=tuple(one.statistics() for one in queues),
            closed_consumers=closed_consumers or {},
            closed_queues=closed_queues or {},
        )


def _by_group(consumer: AsyncConsumer) -> Mapping[str, ConsumerStatistics]:
    return {consumer.group: consumer.statistics()}


def _by_queue_group(queue: QueueLife) -> Mapping[str, QueueStatistics]:
    return {queue.group: queue.statistics()}


def _snapshot_of_consumer(consumer: AsyncConsumer) -> ConsumerSnapshot:
    buffers = consumer.fetch_buffer.statistics()
    lags = consumer.last_lags
    return ConsumerSnapshot(
        group=consumer.group,
        health=consumer.health(),
        counters=consumer.statistics(),
        buffers=buffers,
        lags={partition: lags[partition] for partition in buffers if partition in lags},
    )


def total_of_groups(parts: Sequence[Mapping[str, S]]) -> Mapping[str, S]:
    """Return the sums of the closed members of each group.

    Bounded by `CLOSED_GROUPS_MAX`.
    """
    groups: dict[str, S] = {}
    for one in parts:
        for group, counters in one.items():
            known = groups.pop(group, None)
            both = [counters] if known is None else [known, counters]
            groups[group] = total_of(both)
    return dict([*groups.items()][-CLOSED_GROUPS_MAX:])
