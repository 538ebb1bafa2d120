"""How the metrics of a client read a snapshot: one function for each kind of subject.

Pure: one `ClientStatistics` in, samples out.
"""

import operator
from collections.abc import Callable, Iterator
from typing import Final

from metaq import prometheus
from metaq.client.client_statistics import ClientStatistics, ConsumerSnapshot
from metaq.client.consume.duplicate_filter import DuplicateStatistics
from metaq.client.consume.fetch_buffer import PartitionBufferStatistics
from metaq.client.consume.fetcher import FetchStatistics
from metaq.client.consume.handling import HandlingStatistics
from metaq.client.consume.progress import ConsumerStatistics, Lag
from metaq.client.produce.ordered_producer import OrderedStatistics
from metaq.client.produce.producer import ProducerStatistics
from metaq.model import TopicPartition
from metaq.peer.connection import ConnectionStatistics
from metaq.prometheus import Sample
from metaq.zk.paths import partition_name

MetricSpec = prometheus.MetricSpec[ClientStatistics]
HistogramSpec = prometheus.HistogramSpec[ClientStatistics]

BY_PARTITION: Final = ("topic", "partition")
BY_GROUP: Final = ("group",)
BY_GROUP_PARTITION: Final = ("group", "topic", "partition")
BY_ADDRESS: Final = ("address",)


def of_connection(
    name: str, text: str, read: Callable[[ConnectionStatistics], float]
) -> MetricSpec:
    """Return a metric of each open connection."""

    def samples(client: ClientStatistics) -> Iterator[Sample]:
        for connection in client.pool.connections:
            address = str(connection.address).removeprefix("meta://")
            yield (address,), read(connection)

    return MetricSpec(name, text, BY_ADDRESS, samples)


def of_client(
    name: str, text: str, read: Callable[[ClientStatistics], float | None]
) -> MetricSpec:
    """Return a metric with one number, or none where `read` returns None."""

    def samples(client: ClientStatistics) -> Iterator[Sample]:
        value = read(client)
        if value is not None:
            yield (), value

    return MetricSpec(name, text, (), samples)


def of_producer(
    name: str, text: str, read: Callable[[ProducerStatistics], float]
) -> MetricSpec:
    """Return a metric of all producers, those that are closed included."""

    def samples(client: ClientStatistics) -> Iterator[Sample]:
        for producer in client.all_producers:
            yield (), read(producer)

    return MetricSpec(name, text, (), samples)


def of_ordered(
    name: str, text: str, read: Callable[[OrderedStatistics], float]
) -> MetricSpec:
    """Return a metric of all ordered producers, as `of_producer`."""

    def samples(client: ClientStatistics) -> Iterator[Sample]:
        for producer in client.all_ordered_producers:
            yield (), read(producer)

    return MetricSpec(name, text, (), samples)


def of_group(
    name: str,
    text: str,
    read: Callable[[ConsumerSnapshot], float],
    combine: Callable[[float, float], float] = operator.add,
) -> MetricSpec:
    """Return a metric of the open consumers of each group."""

    def samples(client: ClientStatistics) -> Iterator[Sample]:
        for consumer in client.consumers:
            yield (consumer.group,), read(consumer)

    return MetricSpec(name, text, BY_GROUP, samples, combine)


def of_counters(
    name: str, text: str, read: Callable[[ConsumerStatistics], float]
) -> MetricSpec:
    """Return a metric of all consumers of each group, closed ones included."""

    def samples(client: ClientStatistics) -> Iterator[Sample]:
        for group, counters in client.all_counters:
            yield (group,), read(counters)

    return MetricSpec(name, text, BY_GROUP, samples)


def of_handling(
    name: str, text: str, read: Callable[[HandlingStatistics], float]
) -> MetricSpec:
    """Return a metric of the groups whose messages `run` handles, as `of_counters`."""

    def samples(client: ClientStatistics) -> Iterator[Sample]:
        for group, counters in client.all_counters:
            if counters.handling is not None:
                yield (group,), read(counters.handling)

    return MetricSpec(name, text, BY_GROUP, samples)


def of_duplicates(
    name: str, text: str, read: Callable[[DuplicateStatistics], float]
) -> MetricSpec:
    """Return a metric of the groups with a cache of ids, as `of_counters`."""

    def samples(client: ClientStatistics) -> Iterator[Sample]:
        for group, counters in client.all_counters:
            if counters.duplicates is not None:
                yield (group,), read(counters.duplicates)

    return MetricSpec(name, text, BY_GROUP, samples)


def of_fetch(
    name: str, text: str, read: Callable[[FetchStatistics], float]
) -> MetricSpec:
    """Return a metric of the gets of each partition that is read."""

    def samples(client: ClientStatistics) -> Iterator[Sample]:
        for consumer in client.consumers:
            for partition, fetches in consumer.counters.fetches.items():
                yield _labels(consumer, partition), read(fetches)

    return MetricSpec(name, text, BY_GROUP_PARTITION, samples)


def of_buffer(
    name: str, text: str, read: Callable[[PartitionBufferStatistics], float]
) -> MetricSpec:
    """Return a metric of each partition that is read."""

    def samples(client: ClientStatistics) -> Iterator[Sample]:
        for consumer in client.consumers:
            for partition, buffer in consumer.buffers.items():
                yield _labels(consumer, partition), read(buffer)

    return MetricSpec(name, text, BY_GROUP_PARTITION, samples, max)


def of_lag(name: str, text: str, read: Callable[[Lag], float | None]) -> MetricSpec:
    """Return a metric of what `lag` said last of each partition."""

    def samples(client: ClientStatistics) -> Iterator[Sample]:
        for consumer in client.consumers:
            for partition, lag in consumer.lags.items():
                value = read(lag)
                if value is not None:
                    yield _labels(consumer, partition), value

    return MetricSpec(name, text, BY_GROUP_PARTITION, samples, max)


def _labels(consumer: ConsumerSnapshot, partition: TopicPartition) -> tuple[str, ...]:
    return consumer.group, partition.topic, partition_name(partition)
