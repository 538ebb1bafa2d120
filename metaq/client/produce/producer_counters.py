"""The counters of a producer and its transactions, with their metric names."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from metaq.client.errors import TransactionInDoubtError, TransactionRolledBackError
from metaq.model import TopicPartition
from metaq.stats import Histogram, HistogramSnapshot, counter, gauge, histogram, part


@dataclass(slots=True, kw_only=True)
class TransactionStatistics:
    """Counters of transactions, local and XA together. Snapshots are copies."""

    begun_count: int = counter(
        "metaq_producer_transactions_begun_total", "Transactions begun."
    )
    prepared_count: int = counter(
        "metaq_producer_transactions_prepared_total",
        "XA transactions that every broker of theirs promised to keep.",
    )
    committed_count: int = counter(
        "metaq_producer_transactions_committed_total",
        "Transactions begun and committed, those without messages too.",
    )
    rolled_back_count: int = counter(
        "metaq_producer_transactions_rolled_back_total",
        "Transactions begun and rolled back, by the program or by a failure.",
    )
    in_doubt_count: int = counter(
        "metaq_producer_transactions_in_doubt_total",
        "Decisions whose outcome was unknown when their call ended.",
    )
    recovered_count: int = counter(
        "metaq_producer_transactions_recovered_total",
        "XA transactions that had been begun elsewhere, and were ended here.",
    )
    commit_s: HistogramSnapshot = histogram(
        "metaq_producer_transaction_commit_seconds",
        "Time from a commit to the answer that it was carried out.",
    )


class ClientTransactionCounters:
    """The counters of one producer's transactions; used on its loop."""

    def __init__(self) -> None:
        """Start at 0."""
        self._commit_s = Histogram()
        self.counts = TransactionStatistics(commit_s=self._commit_s.snapshot())
        """All counts except those of commits, which `on_committed` counts."""

    def on_committed(self, passed_s: float) -> None:
        """Count a commit and its duration."""
        self._commit_s.record(passed_s)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Count a failure of the commit or rollback inside the block."""
        try:
            yield
        except TransactionRolledBackError:
            self.counts.rolled_back_count += 1
            raise
        except (TransactionInDoubtError, asyncio.CancelledError):
            self.counts.in_doubt_count += 1
            raise

    def snapshot(self) -> TransactionStatistics:
        """Return a snapshot of the counters."""
        commit_s = self._commit_s.snapshot()
        return replace(self.counts, committed_count=commit_s.count, commit_s=commit_s)


BATCH_COUNT_BOUNDS: Final = (1, 4, 16, 64, 256, 1024, 4096, 16_384, 65_536)
"""Upper bounds of the histogram buckets for messages per command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerStatistics:
    """A snapshot of a producer's counters; that of a delivery lacks buffer counts."""

    appended_count: int = counter(
        "metaq_producer_appended_messages_total", "Messages taken from senders."
    )
    by_partition: Mapping[TopicPartition, int] = counter(
        "metaq_producer_acknowledged_messages_total",
        "Stored messages, by the partition that has them.",
        labels=("topic", "partition"),
        label=TopicPartition.labels,
        default=dict,
    )
    acknowledged_bytes: int = counter(
        "metaq_producer_acknowledged_bytes_total",
        "Payload bytes of the messages that are stored, attributes included.",
    )
    doubtful_count: int = counter(
        "metaq_producer_doubtful_messages_total",
        "Messages that are stored, and may be stored twice.",
    )
    """An earlier attempt has an unknown outcome, and the broker does not recognise
    repetitions."""
    failed: Mapping[str, int] = counter(
        "metaq_producer_failed_messages_total",
        "Messages that failed, by the name of the error.",
        labels=("error",),
        default=dict,
    )
    dropped: Mapping[str, int] = counter(
        "metaq_producer_dropped_messages_total",
        "One-way messages that were not taken, by the name of the error.",
        labels=("error",),
        default=dict,
    )
    buffered_count: int = gauge(
        "metaq_producer_buffered_messages", "Messages without an outcome."
    )
    buffered_bytes: int = gauge(
        "metaq_producer_buffered_bytes",
        "Bytes of messages without an outcome, record headers included.",
    )
    full_count: int = counter(
        "metaq_producer_full_total", "Sends that found the buffer full."
    )
    in_flight_count: int = gauge(
        "metaq_producer_in_flight_commands", "Commands sent and not answered."
    )
    retried_count: int = counter(
        "metaq_producer_retried_commands_total", "Commands sent again."
    )
    moved_count: int = counter(
        "metaq_producer_moved_batches_total",
        "Batches, or parts of them, that went to another partition.",
    )
    batch_counts: HistogramSnapshot = histogram(
        "metaq_producer_batch_messages", "Messages per command."
    )
    latency_s: HistogramSnapshot = histogram(
        "metaq_producer_latency_seconds",
        "Time from the first message of a batch to the answer, per message.",
    )
    transactions: TransactionStatistics = part(
        default=lambda: ClientTransactionCounters().snapshot()
    )
    """Counters of its transactions, whose messages are not counted above."""

    @property
    def acknowledged_count(self) -> int:
        """Return the number of messages that are stored."""
        return sum(self.by_partition.values())
