"""Interfaces that transactions use; they are given these, and import none.

Keep in step: `storage/log_manager.py` is a `StoredBatches`, the log of
`storage/partition_log.py` a `StoringLog`, and `ServedLogs.find` in
`broker/transactions.py` a `FindLog`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeAlias

from metaq.errors import StorageError
from metaq.model import LogId, MessageId, Offset
from metaq.record.checksum import BytesLike


class StoredTicket(Protocol):
    """Receives the outcome of a batch, once, on the caller's thread."""

    def on_stored(self) -> None:
        """The batch is stored as the durability mode of its partition promises."""

    def on_failed(self, error: StorageError) -> None:
        """It is not acknowledged; after a disk error it may be stored nevertheless."""


class StoredBatches(Protocol):
    """The partitions as replay reads them, before the port opens. Blocks on the disk.

    Raises StorageError where a partition or its disk cannot be read.
    """

    def readable_range(self, log_id: LogId) -> tuple[Offset, Offset]:
        """Return log start and high watermark; 0 and 0 where there is no such log."""

    def read_back(self, log_id: LogId, offset: Offset, size_bytes: int) -> bytes:
        """Return bytes from an offset; fewer where the readable log or a segment ends.

        Raises:
            OffsetOutOfRangeError: nothing there is readable. Below `log_start` a batch
                was applied and was trimmed since; at or above `high_watermark` it was
                not applied.
            StorageError: the partition or its disk cannot be read.
        """

    def hold(self, log_id: LogId, offset: Offset) -> None:
        """Hide everything from an offset on, where a crash has cut the last append.

        Until an append `completes` it, other appends to the partition are refused.
        """


class StoringLog(Protocol):
    """A partition that takes the puts of committed transactions.

    Raises StorageError when it does not take a batch now, and ClosedError when the logs
    are closed.
    """

    def plan_append(self, size_bytes: int) -> Offset:
        """Return a bound: the next append will not get a lower offset."""

    def append(
        self,
        chunks: Sequence[BytesLike],
        *,
        size_bytes: int,
        record_count: int,
        last_id: MessageId,
        ticket: StoredTicket,
        before_write: Callable[[Offset], Iterable[Callable[[], None]]],
        completes: bool,
    ) -> Offset:
        """Append one contiguous batch; never blocks.

        Args:
            chunks: whole records in segment format, ids stamped; ownership passes.
            size_bytes: sum of the lengths of the chunks, 1 or more.
            record_count: records in the batch, 1 or more.
            last_id: the largest id of them.
            ticket: called once; never after this method raised.
            before_write: called with the offset on the thread that writes the batch,
                before it does; raises nothing, and is quick. The functions that it
                returns are called after it and before a byte is written, each once for
                all batches of the group.
            completes: the batch begins with the rest of the append that is held.

        Returns:
            The offset of the batch: all of it is in one segment, without another record
            between its first byte and its last.
        """


class TransactionHold(Protocol):
    """Kept outside of a transaction until its outcome is known: a message of a queue.

    `on_ended` is called once, on the loop's thread; not where a restart will know the
    outcome.
    """

    def require_kept(self) -> None:
        """Raise StorageError where it is lost, so that a commit would be by half."""

    def on_ended(self, *, is_committed: bool) -> None:
        """Hear of the outcome.

        Committed, what the transaction puts is on its way; else nothing of it is there,
        nor will be.
        """


FindLog: TypeAlias = Callable[[LogId], StoringLog]
"""Finds the log of a partition, which is made when it does not exist. Raises
StorageError when the partition is not served, and ClosedError when the logs are
closed."""
