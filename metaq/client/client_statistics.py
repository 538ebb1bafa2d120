"""What a client, and everything that was made from it, counts: one snapshot.

Taken from any thread, asks nobody. Of what is closed it knows what it counted, so that
no sum falls.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from metaq.client.cluster.context import ClientContext
from metaq.client.consume.consumer import AsyncConsumer
from metaq.client.consume.fetch_buffer import PartitionBufferStatistics
from metaq.client.consume.progress import (
    ConsumerStatistics,
    Health,
    Lag,
)
from metaq.client.consume.totals import (
    Totals,
    total_of_groups,
    total_of_ordered,
    total_of_producers,
)
from metaq.client.produce.ordered_producer import (
    AsyncOrderedProducer,
    OrderedStatistics,
)
from metaq.client.produce.producer import (
    AsyncProducer,
    ProducerStatistics,
)
from metaq.model import TopicPartition
from metaq.peer.pool import PoolStatistics
from metaq.zk.session import SessionStatus


@dataclass(frozen=True, slots=True)
class ConsumerSnapshot:
    """One consumer."""

    group: str
    """Its consumer group."""
    health: Health
    """Its condition."""
    counters: ConsumerStatistics
    """Its counters."""
    buffers: Mapping[TopicPartition, PartitionBufferStatistics]
    """The partitions it reads now, and how far each is handled."""
    lags: Mapping[TopicPartition, Lag]
    """What `lag` said last of those partitions; empty while it was not asked."""


@dataclass(frozen=True, slots=True)
class ClientStatistics:
    """A snapshot of a client and of what was made from it."""

    pool: PoolStatistics
    """Its connections."""
    session: SessionStatus | None
    """Its ZooKeeper session; None for a client of named brokers."""
    producers: tuple[ProducerStatistics, ...]
    """Its open producers, with those of dead letters and under ordered producers."""
    ordered_producers: tuple[OrderedStatistics, ...]
    """Its open ordered producers."""
    consumers: tuple[ConsumerSnapshot, ...]
    """Its open consumers."""
    closed_producers: ProducerStatistics | None = None
    """What those that are closed counted, together; nothing of it is buffered or in
    flight. None while none was closed."""
    closed_ordered_producers: OrderedStatistics | None = None
    """The same of ordered producers; nothing of it is waiting."""
    closed_consumers: Mapping[str, ConsumerStatistics] = field(default_factory=dict)
    """What the closed consumers of each group counted, together, by the group's name;
    nothing of it is parked, and no partition is read."""

    @property
    def all_producers(self) -> Iterator[ProducerStatistics]:
        """Yield the producers that are open, then the closed ones as one."""
        yield from self.producers
        if self.closed_producers is not None:
            yield self.closed_producers

    @property
    def all_ordered_producers(self) -> Iterator[OrderedStatistics]:
        """Yield the ordered producers that are open, then the closed ones as one."""
        yield from self.ordered_producers
        if self.closed_ordered_producers is not None:
            yield self.closed_ordered_producers

    @property
    def all_counters(self) -> Iterator[tuple[str, ConsumerStatistics]]:
        """Yield (group, counters) of open consumers, then of each group's closed."""
        for consumer in self.consumers:
            yield consumer.group, consumer.counters
        yield from self.closed_consumers.items()


class Made:
    """All that one client has made and that counts, closed ones included.

    Concurrency: things are added on the client's loop, snapshots taken in any thread.
    """

    def __init__(self) -> None:
        """Start with nothing."""
        self.producers = Totals(AsyncProducer.statistics, total_of_producers)
        """Those of dead letters and under ordered producers among them."""
        self.ordered = Totals(AsyncOrderedProducer.statistics, total_of_ordered)
        """Ordered producers."""
        self.consumers = Totals(_by_group, total_of_groups)
        """Consumers."""

    def snapshot(self, context: ClientContext) -> ClientStatistics:
        """Return what there is to tell of the client with these parts."""
        coordinator = context.coordinator
        producers, closed_producers = self.producers.split()
        ordered, closed_ordered = self.ordered.split()
        consumers, closed_consumers = self.consumers.split()
        return ClientStatistics(
            pool=context.pool.statistics(),
            session=None if coordinator is None else coordinator.status,
            producers=tuple(one.statistics() for one in producers),
            ordered_producers=tuple(one.statistics() for one in ordered),
            consumers=tuple(map(_snapshot_of_consumer, consumers)),
            closed_producers=closed_producers,
            closed_ordered_producers=closed_ordered,
            closed_consumers=closed_consumers or {},
        )


def _by_group(consumer: AsyncConsumer) -> Mapping[str, ConsumerStatistics]:
    return {consumer.group: consumer.statistics()}


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
