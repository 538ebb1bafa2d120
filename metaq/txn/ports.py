"""Interfaces that transactions use; implementations are passed in, never imported.

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
        """The batch is stored as its partition's durability mode promises."""

    def on_failed(self, error: StorageError) -> None:
        """It is not acknowledged; after a disk error it may nevertheless be stored."""


class StoredBatches(Protocol):
    """Read access of replay to the partitions, before the port opens. Blocks.

    Raises StorageError if a partition or its disk cannot be read.
    """

    def readable_range(self, log_id: LogId) -> tuple[Offset, Offset]:
        """Return log start and high watermark; (0, 0) if there is no such log."""

    def read_back(self, log_id: LogId, offset: Offset, size_bytes: int) -> bytes:
        """Return bytes from an offset; fewer if the readable log or a segment ends.

        Raises:
            OffsetOutOfRangeError: nothing is readable there. Below `log_start` a batch
                was applied and has been trimmed; at or above `high_watermark` it was
                not applied.
            StorageError: the partition or its disk cannot be read.
        """

    def hold(self, log_id: LogId, offset: Offset) -> None:
        """Hide everything from an offset on, if a crash has cut the last append.

        Until an append `completes` it, other appends to the partition are refused.
        """


class StoringLog(Protocol):
    """A partition that accepts the puts of committed transactions.

    Methods raise StorageError if it would refuse a batch now, and ClosedError if the
    logs are closed.
    """

    def plan_append(self, size_bytes: int) -> Offset:
        """Return a lower bound of the offset of the next append."""

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
            record_count: number of records in the batch, 1 or more.
            last_id: largest id of the records.
            ticket: called once; never if this method raised.
            before_write: called with the offset on the thread that writes the batch,
                before the write; must be quick and not raise. The functions that it
                returns are called after it and before any byte is written, each once
                for all batches of the group.
            completes: the batch begins with the rest of the held append.

        Returns:
            The offset of the batch; it is in one segment and contiguous, without other
            records in between.
        """


class TransactionHold(Protocol):
    """An object held by a transaction until its outcome is known: a message of a queue.

    `on_ended` is called once, on the loop's thread, unless only a restart will know the
    outcome.
    """

    def require_kept(self) -> None:
        """Raise StorageError if it is lost, so that a commit would be incomplete."""

    def on_ended(self, *, is_committed: bool) -> None:
        """Receive the outcome.

        If committed, the puts of the transaction are on their way; otherwise none of
        them is stored, nor will be.
        """


FindLog: TypeAlias = Callable[[LogId], StoringLog]
"""Returns the log of a partition, created if it does not exist. Raises StorageError if
the partition is not served, and ClosedError if the logs are closed."""
