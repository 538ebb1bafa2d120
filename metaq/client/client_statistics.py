"""Snapshot of the counters of a client and of all objects made from it.

Taken on any thread, without a request. Counters of closed objects are kept, so that
sums never decrease.
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
"""Maximum number of groups whose closed consumers a client counts; the groups whose
consumers were closed last are kept."""


@dataclass(frozen=True, slots=True)
class ConsumerSnapshot:
    """One consumer."""

    group: str
    health: Health
    counters: ConsumerStatistics
    buffers: Mapping[TopicPartition, PartitionBufferStatistics] = part(
        default=dict, labels=("topic", "partition"), label=TopicPartition.labels
    )
    """Partitions that it reads now, each with its progress."""
    lags: Mapping[TopicPartition, Lag] = part(
        default=dict, labels=("topic", "partition"), label=TopicPartition.labels
    )
    """Last results of `lag` for these partitions; empty before the first."""


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
    """Its open producers, including those for dead letters and of ordered producers."""
    ordered_producers: tuple[OrderedStatistics, ...] = ()
    consumers: tuple[ConsumerSnapshot, ...] = part(
        default=(), labels=("group",), label=lambda consumer: (consumer.group,)
    )
    requests: RequestStatistics | None = None
    """Statistics of its requests; None: it made none."""
    queues: tuple[QueueStatistics, ...] = part(
        default=(), labels=("group",), label=lambda queue: (queue.group,)
    )
    """Its open workers of queue groups."""
    closed_producers: ProducerStatistics | None = None
    """Sums of the closed producers, which have nothing buffered or in flight. None if
    none was closed."""
    closed_ordered_producers: OrderedStatistics | None = None
    """Sums of the closed ordered producers, in which nothing waits; likewise."""
    closed_consumers: Mapping[str, ConsumerStatistics] = part(
        default=dict,
        labels=("group",),
        label=lambda group: (group,),
        is_closed=True,
    )
    """Group → sums of its closed consumers, which read no partition and have closed
    their local retry stores."""
    closed_queues: Mapping[str, QueueStatistics] = part(
        default=dict,
        labels=("group",),
        label=lambda group: (group,),
        is_closed=True,
    )
    """Group → sums of its closed workers, which hold no messages."""


class Made:
    """All objects with counters that one client has made, including closed ones.

    Concurrency: objects are added on the client's loop, snapshots taken on any thread.
    """

    def __init__(self) -> None:
        """Create it empty."""
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
