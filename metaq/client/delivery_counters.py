"""What a delivery counts, and the snapshot that it hands out."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from metaq.errors import MetaqError
from metaq.model import TopicPartition
from metaq.stats import Histogram, HistogramSnapshot

BATCH_COUNT_BOUNDS: Final = (1, 4, 16, 64, 256, 1024, 4096, 16_384, 65_536)
"""Buckets of the sizes of what is sent, in messages."""


@dataclass(frozen=True, slots=True)
class DeliveryStatistics:
    """A snapshot of the delivery's counters."""

    acknowledged_count: int
    """Messages that are stored."""
    acknowledged_bytes: int
    """Their payload bytes."""
    by_partition: Mapping[TopicPartition, int]
    """The same messages, where they lie."""
    doubtful_count: int
    """Those of them that may be stored twice: nobody knows what became of an earlier
    attempt, and their broker does not recognise repetitions."""
    failed: Mapping[str, int]
    """Messages that failed, by the name of the error."""
    retried_count: int
    """Commands sent again."""
    moved_count: int
    """Batches and parts of batches that went to another partition."""
    in_flight_count: int
    """Commands sent and not answered."""
    batch_counts: HistogramSnapshot
    """Messages per command."""
    latency_s: HistogramSnapshot
    """Seconds from the first message of a batch to the answer, per message."""


class DeliveryCounters:
    """The counters of one delivery; used on its loop."""

    def __init__(self) -> None:
        """Start at nothing."""
        self.retried_count = 0
        """Commands sent again."""
        self.moved_count = 0
        """Batches and parts that went to another partition."""
        self.doubtful_count = 0
        """Acknowledged messages that may be stored twice."""
        self._acknowledged_count = 0
        self._acknowledged_bytes = 0
        self._by_partition: Counter[TopicPartition] = Counter()
        self._failed: Counter[str] = Counter()
        self._batch_counts = Histogram(tuple(map(float, BATCH_COUNT_BOUNDS)))
        self._latency_s = Histogram()

    def on_sent(self, message_count: int) -> None:
        """Count a command that left."""
        self._batch_counts.record(message_count)

    def on_acknowledged(
        self,
        partition: TopicPartition,
        message_count: int,
        payload_bytes: int,
        latency_s: float,
    ) -> None:
        """Count messages that are stored; `latency_s` is that of the oldest."""
        self._acknowledged_count += message_count
        self._acknowledged_bytes += payload_bytes
        self._by_partition[partition] += message_count
        self._latency_s.record(latency_s, message_count)

    def on_failed(self, message_count: int, error: MetaqError) -> None:
        """Count messages that failed."""
        self._failed[type(error).__name__] += message_count

    def snapshot(self, in_flight_count: int) -> DeliveryStatistics:
        """Return what was counted so far."""
        return DeliveryStatistics(
            acknowledged_count=self._acknowledged_count,
            acknowledged_bytes=self._acknowledged_bytes,
            by_partition=dict(self._by_partition),
            doubtful_count=self.doubtful_count,
            failed=dict(self._failed),
            retried_count=self.retried_count,
            moved_count=self.moved_count,
            in_flight_count=in_flight_count,
            batch_counts=self._batch_counts.snapshot(),
            latency_s=self._latency_s.snapshot(),
        )
