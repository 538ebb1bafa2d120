"""Passes fetched messages to the fetch buffer, without repeats and filtered ones.

All fetchers of one consumer share a handler. An error that ends reading is passed to
the consumer, which stops all fetchers, so that no message after a failure is handed
out.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Final

from metaq.client.consume.decode import matching
from metaq.client.consume.duplicate_filter import DuplicateFilter
from metaq.client.consume.fetch_buffer import FetchBuffer
from metaq.client.consume.fetched_batch import FetchedBatch
from metaq.client.offsets.offset_reset import CUT, NOTHING_HANDLED
from metaq.client.options import ConsumerOptions
from metaq.clock import Clock
from metaq.errors import MetaqError
from metaq.filter.language import parse_filter
from metaq.model import BrokerId, GroupOffset, Message, Offset, TopicPartition
from metaq.record.expiry import expiry_of

_log = logging.getLogger(__name__)

FETCH_BYTES_MIN: Final = 64 * 1024
"""Minimum size of a get, for any number of partitions, in bytes."""

Marks = dict[tuple[str, TopicPartition], Offset]
"""(Group, partition) → offset up to which messages were handled but not committed, so
that they may be fetched again; for `skip_repeats`."""


class FetchHandler:
    """Receives the messages of a consumer's fetchers; used on the loop's thread."""

    def __init__(
        self,
        fetch_buffer: FetchBuffer,
        *,
        group: str,
        clock: Clock,
        options: ConsumerOptions,
        marks: Marks,
        duplicates: DuplicateFilter | None,
        on_fatal: Callable[[MetaqError], None],
    ) -> None:
        """Create a handler; all consumers of a client share the marks."""
        self._fetch_buffer = fetch_buffer
        self._group = group
        self._options = options
        self._clock = clock
        self._passes_over = options.on_expired == "skip"
        self._marks = marks
        self._duplicates = duplicates
        self.on_fatal = on_fatal
        self._failing: dict[tuple[BrokerId, type[MetaqError]], set[TopicPartition]] = {}
        self.delivered_count = 0
        self.filtered_count = 0
        self.expired_count = 0
        self.repeat_count = 0
        self.reset_count = 0
        self.missing_bytes = 0

    # -- marks of handled offsets -----------------------------------------------------

    def mark(self, partition: TopicPartition, handled: GroupOffset) -> None:
        """Remember a handled offset that could not be committed.

        Not if only the user commits: then uncommitted messages are delivered again.
        """
        options = self._options
        if options.skip_repeats and options.commit_interval_s is not None:
            key = (self._group, partition)
            self._marks[key] = max(handled.offset, self._marks.get(key, Offset(0)))

    def marked(self, partition: TopicPartition) -> Offset:
        """Return the offset up to which a partition was handled, or NOTHING_HANDLED."""
        if not self._options.skip_repeats:
            return NOTHING_HANDLED
        return self._marks.get((self._group, partition), NOTHING_HANDLED)

    def unmark(self, partition: TopicPartition) -> None:
        """Forget the mark, after a seek back or a replacement of the log."""
        self._marks.pop((self._group, partition), None)

    def deliver_again(self, partition: TopicPartition) -> None:
        """Deliver all messages of a partition until `stop`, as a seek requested."""
        self.unmark(partition)
        if self._duplicates is not None:
            self._duplicates.let_pass(partition)

    def stop(self, partition: TopicPartition) -> None:
        """Drop the messages of a partition whose ids are being checked."""
        if self._duplicates is not None:
            self._duplicates.stop(partition)

    # -- interface of fetchers --------------------------------------------------------

    def has_room(self, partition: TopicPartition) -> bool:
        """Return whether more of a partition may be fetched."""
        if self._duplicates is not None and self._duplicates.is_asking(partition):
            return False
        return self._fetch_buffer.has_room(partition)

    def fetch_bytes(self) -> int:
        """Return the size of a get; partitions share the bound on buffered bytes."""
        options = self._options
        share = options.buffer_bytes_max // max(1, self._fetch_buffer.buffer_count)
        return max(FETCH_BYTES_MIN, min(options.fetch_bytes, share))

    def on_messages(
        self,
        partition: TopicPartition,
        messages: Sequence[Message],
        size_bytes: int,
        end: Offset,
    ) -> None:
        """Deliver fetched messages: all matching ones of the log up to `end`."""
        fresh = self._without_repeats(partition, messages)
        batch = FetchedBatch(partition, fresh, end, size_bytes)
        if self._passes_over and getattr(messages, "may_expire", False):
            batch.is_fresh = self._is_fresh
        if self._duplicates is not None and fresh:
            self._duplicates.sift(batch, self._deliver)
        else:
            self._deliver(batch)

    def _deliver(self, batch: FetchedBatch) -> None:
        accepts, text = self._options.message_filter, self._options.where
        if accepts is not None or text is not None:
            where = None if text is None else parse_filter(text)
            kept = matching(batch.messages, where)
            try:
                if accepts is not None:
                    kept = [message for message in kept if accepts(message)]
            except Exception as error:  # noqa: BLE001  # any error of the user's filter
                _log.exception("message filter failed: group=%s", self._group)
                text = f"{batch.partition}: message filter: {error!r}"
                self.on_fatal(MetaqError(text))
                return
            self.filtered_count += len(batch.messages) - len(kept)
            batch.messages = kept
        self.delivered_count += len(batch.messages)
        self._fetch_buffer.put(batch)

    def _is_fresh(self, message: Message) -> bool:
        """Return whether a message has not expired; count it if it has. Any thread."""
        expiry_ms = expiry_of(message.id, message.header_pairs)
        if expiry_ms is None or self._clock.wall_ms() < expiry_ms:
            return True
        self.expired_count += 1
        return False

    def _without_repeats(
        self, partition: TopicPartition, messages: Sequence[Message]
    ) -> Sequence[Message]:
        mark = self._marks.get((self._group, partition))
        if mark is None or not self._options.skip_repeats:
            return messages
        fresh = [message for message in messages if message.offset >= mark]
        self.repeat_count += len(messages) - len(fresh)
        if fresh:
            self.unmark(partition)
        return fresh

    def on_skip(self, partition: TopicPartition, old: Offset, new: Offset) -> None:
        """Count and log skipped bytes."""
        self.missing_bytes += max(0, new - old)
        _log.error(
            "reading continues at another offset: group=%s partition=%s old=%d new=%d:"
            " %s",
            self._group,
            partition,
            old,
            new,
            CUT
            if new < old
            else ("the bytes between were deleted unread, or are damaged"),
        )
        self._fetch_buffer.put(FetchedBatch(partition, [], new, 0))

    def on_replaced(self, partition: TopicPartition, old: Offset) -> None:
        """Count and log that a replaced log is read from its start."""
        self.reset_count += 1
        _log.error(
            "the log ends before the offset at which reading began: group=%s"
            " partition=%s old=%d new=0: it was replaced, or cut by a broker that lost"
            " data",
            self._group,
            partition,
            old,
        )
        self.unmark(partition)
        self._fetch_buffer.put(FetchedBatch(partition, [], Offset(0), 0))

    def on_failure(self, partition: TopicPartition, error: MetaqError) -> None:
        """Log a failed get, as a warning only once for each broker and type of error.

        A broker that is away may fail thousands of partitions for hours; `health`
        reports each.
        """
        failing = self._failing.setdefault((partition.broker_id, type(error)), set())
        level = logging.DEBUG if failing else logging.WARNING
        _log.log(level, "get failed: partition=%s error=%s", partition, error)
        failing.add(partition)

    def on_recovery(self, partition: TopicPartition) -> None:
        """Forget the failure of a partition that is read again or unassigned."""
        for failing in self._failing.values():
            failing.discard(partition)
