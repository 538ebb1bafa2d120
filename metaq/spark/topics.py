"""Functions for jobs that plan and read topics themselves, without a DataFrame.

Tasks import this module for `read_rows`, so it imports neither the client nor the
ZooKeeper library.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from metaq.model import Offset, TopicPartition
from metaq.spark.clusters import shared_cluster
from metaq.spark.options import SinkOptions, SourceOptions
from metaq.spark.source.read_task import ReadTask, read_rows

if TYPE_CHECKING:
    from metaq.spark.source.stream import StreamProgress

__all__ = [
    "PartitionsFound",
    "ReadTask",
    "find_partitions",
    "log_starts",
    "plan_stream",
    "put_targets",
    "read_rows",
]


@dataclass(frozen=True, slots=True)
class PartitionsFound:
    """Partitions of a read."""

    served: tuple[TopicPartition, ...]
    """Partitions that a broker serves now, sorted."""
    away: tuple[TopicPartition, ...]
    """Partitions that no broker serves, or that a MetaQ 1.4 broker has forgotten."""


def find_partitions(
    options: SourceOptions, known: Collection[TopicPartition] = ()
) -> PartitionsFound:
    """Return the partitions of a read, after waiting for those away.

    Args:
        options: of the read; without `failOnDataLoss` this does not wait.
        known: partitions read before, which are expected too.

    Raises:
        NoBrokerError: no broker has a topic, or no topic matches the pattern.
        PartitionsAwayError: a broker stays away, with `failOnDataLoss`.
    """
    cluster = shared_cluster(options.wire)
    away = set(cluster.require_whole(options, known))
    served = cluster.partitions(options)
    # Requests spans only for these; usually there are none.
    forgetful = cluster.unopened(set(served).intersection(known))
    away |= {p for p, span in cluster.spans(forgetful).items() if span is None}
    return PartitionsFound(served, tuple(sorted(away)))


def log_starts(
    options: SourceOptions, partitions: Collection[TopicPartition]
) -> dict[TopicPartition, Offset]:
    """Return the current log start of each partition; 0 if it has no log yet.

    Raises:
        MetaqError: a broker is not available.
    """
    spans = shared_cluster(options.wire).spans(partitions)
    return {p: Offset(0) if span is None else span.start for p, span in spans.items()}


def plan_stream(options: SourceOptions) -> "StreamProgress":
    """Return a planner for the batches of a stream, on the driver; connects later.

    `read_rows` reads the tasks of its batches.
    """
    from metaq.spark.source.stream import StreamProgress  # noqa: PLC0415  # see the top

    return StreamProgress(options)


def put_targets(
    options: SinkOptions, topics: Iterable[str]
) -> Mapping[str, Collection[TopicPartition]]:
    """Return topic → partitions that take puts.

    Raises:
        NoBrokerError: no broker takes puts to one of the topics.
    """
    return shared_cluster(options.wire).targets(topics)
