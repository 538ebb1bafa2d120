"""What a client, and everything that was made from it, counts: one snapshot.

Taken from any thread, asks nobody, and knows only what is open: who is closed has left.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from metaq.client.consumer import AsyncConsumer
from metaq.client.context import ClientContext
from metaq.client.feed import LaneStatistics
from metaq.client.ordered import AsyncOrderedProducer, OrderedStatistics
from metaq.client.pool import PoolStatistics
from metaq.client.producer import AsyncProducer, ProducerStatistics
from metaq.client.progress import ConsumerStatistics, Health, Lag
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
    """A snapshot of a client and of what was made from it and is open."""

    pool: PoolStatistics
    """Its connections."""
    session: SessionStatus | None
    """Its ZooKeeper session; None for a client of named brokers."""
    producers: tuple[ProducerStatistics, ...]
    """Its producers, with those of dead letters and under ordered producers."""
    ordered_producers: tuple[OrderedStatistics, ...]
    """Its ordered producers."""
    consumers: tuple[ConsumerSnapshot, ...]
    """Its consumers."""


def snapshot_of(
    context: ClientContext,
    producers: Iterable[AsyncProducer],
    children: Iterable[object],
) -> ClientStatistics:
    """Return what there is to tell of a client.

    Args:
        context: its parts.
        producers: all of them, closed ones as well.
        children: consumers and ordered producers among others, closed ones as well.
    """
    coordinator = context.coordinator
    children = tuple(children)
    return ClientStatistics(
        pool=context.pool.statistics(),
        session=None if coordinator is None else coordinator.status,
        producers=tuple(one.statistics() for one in producers if not one.is_closed),
        ordered_producers=tuple(
            one.statistics()
            for one in children
            if isinstance(one, AsyncOrderedProducer) and not one.is_closed
        ),
        consumers=tuple(
            _snapshot_of_consumer(one)
            for one in children
            if isinstance(one, AsyncConsumer) and not one.is_closed
        ),
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
