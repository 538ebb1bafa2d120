"""What a client, and everything that was made from it, counts: one snapshot.

Taken from any thread, asks nobody. Of what is closed it knows what producers counted,
so that their sums never fall; consumers that are closed have left.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from metaq.client.consumer import AsyncConsumer
from metaq.client.context import ClientContext
from metaq.client.feed import LaneStatistics
from metaq.client.ordered import OrderedStatistics
from metaq.client.pool import PoolStatistics
from metaq.client.producer import ProducerStatistics
from metaq.client.progress import ConsumerStatistics, Health, Lag
from metaq.client.totals import Totals
from metaq.model import TopicPartition
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
    lanes: Mapping[TopicPartition, LaneStatistics]
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


def snapshot_of(
    context: ClientContext,
    producers: Totals[ProducerStatistics],
    ordered: Totals[OrderedStatistics],
    children: Iterable[object],
) -> ClientStatistics:
    """Return what there is to tell of a client.

    Args:
        context: its parts.
        producers: all of them.
        ordered: all ordered producers.
        children: consumers among others, closed ones as well.
    """
    coordinator = context.coordinator
    open_producers, closed_producers = producers.snapshot()
    open_ordered, closed_ordered = ordered.snapshot()
    return ClientStatistics(
        pool=context.pool.statistics(),
        session=None if coordinator is None else coordinator.status,
        producers=open_producers,
        ordered_producers=open_ordered,
        consumers=tuple(
            _snapshot_of_consumer(one)
            for one in children
            if isinstance(one, AsyncConsumer) and not one.is_closed
        ),
        closed_producers=closed_producers,
        closed_ordered_producers=closed_ordered,
    )


def _snapshot_of_consumer(consumer: AsyncConsumer) -> ConsumerSnapshot:
    lanes = consumer.feed.statistics()
    lags = consumer.last_lags
    return ConsumerSnapshot(
        group=consumer.group,
        health=consumer.health(),
        counters=consumer.statistics(),
        lanes=lanes,
        lags={partition: lags[partition] for partition in lanes if partition in lags},
    )
