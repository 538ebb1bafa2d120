"""Counts outcomes of requests, and collects them until their batch is resolved."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from metaq.client.produce.attempts import AttemptLimits, final_error
from metaq.client.produce.batches import BatchOutcome, SendResult
from metaq.client.produce.buffer import Buffer
from metaq.client.produce.producer_counters import (
    BATCH_COUNT_BOUNDS,
    ProducerStatistics,
)
from metaq.client.produce.requests import Request
from metaq.errors import MetaqError
from metaq.model import TopicPartition
from metaq.record.layout import HEADER_BYTES
from metaq.stats import Histogram

S = TypeVar("S")


class SendOutcomes(Generic[S]):
    """Settles requests, and counts outcomes. Owner: a delivery, on its loop."""

    def __init__(
        self,
        buffer: Buffer[S],
        limits: AttemptLimits | None,
        on_end: Callable[[MetaqError], None],
    ) -> None:
        """Start without outcomes.

        Args:
            buffer: buffer of the batches.
            limits: of attempts; the first failure ends the delivery. None for
                deadlines only.
            on_end: called with the first failure, if there are `limits`.
        """
        self.limits = limits
        self.failure: MetaqError | None = None
        """Error that ended the delivery; None without `limits`."""
        self.is_over = False
        self.retried_count = 0
        self.moved_count = 0
        self.renamed_count = 0
        """Number of messages sent again under the spare name of their batch."""
        self._buffer = buffer
        self._on_end = on_end
        self._doubtful_count = 0
        self._acknowledged_bytes = 0
        self._by_partition: Counter[TopicPartition] = Counter()
        self._failed: Counter[str] = Counter()
        self._batch_counts = Histogram(tuple(map(float, BATCH_COUNT_BOUNDS)))
        self._latency_s = Histogram()

    def on_sent(self, message_count: int, command_count: int) -> None:
        """Count commands that were sent, of `message_count` messages each."""
        self._batch_counts.record(message_count, command_count)

    def succeed(self, request: Request, outcomes: Sequence[BatchOutcome]) -> None:
        """Settle a request whose messages are stored.

        Args:
            request: the request.
            outcomes: of its messages; empty if all were cut out as other requests.
        """
        batch = request.batch
        latency_s = self._buffer.clock.monotonic_s() - batch.created_s
        for first, result, ids, _ in outcomes:
            assert isinstance(result, SendResult)
            count = request.message_count if ids is None else len(ids)
            size_bytes = batch.size_of(first, first + count)
            self._acknowledged_bytes += size_bytes - HEADER_BYTES * count
            self._by_partition[result.partition] += count
            self._latency_s.record(latency_s, count)
            self._doubtful_count += count * request.is_in_doubt
        self._settle(request, outcomes)

    def fail(self, request: Request, error: MetaqError) -> None:
        """Settle a request with an error; its messages may be stored if in doubt."""
        final = final_error(error, request.partition, is_in_doubt=request.is_in_doubt)
        self._failed[type(final).__name__] += request.message_count
        self.end(error)  # before any future has its outcome
        self._settle(request, [BatchOutcome(request.span.first, final)])

    def end(self, error: MetaqError) -> None:
        """End the delivery with its first failure, if attempts are limited."""
        if self.limits is not None and self.failure is None:
            self.failure, self.is_over = error, True
            self._on_end(error)

    def _settle(self, request: Request, outcomes: Sequence[BatchOutcome]) -> None:
        batch = request.batch
        batch.found += outcomes
        batch.requests_left -= 1
        if not batch.requests_left:
            batch.found.sort(key=lambda outcome: outcome.first)
            self._buffer.resolve(batch, batch.found)

    def snapshot(self, in_flight_count: int) -> ProducerStatistics:
        """Return a snapshot of the counters."""
        return ProducerStatistics(
            acknowledged_bytes=self._acknowledged_bytes,
            by_partition=dict(self._by_partition),
            doubtful_count=self._doubtful_count,
            failed=dict(self._failed),
            retried_count=self.retried_count,
            moved_count=self.moved_count,
            in_flight_count=in_flight_count,
            batch_counts=self._batch_counts.snapshot(),
            latency_s=self._latency_s.snapshot(),
        )
