"""Interfaces that transactions use; they are given these, and import none.

Keep in step: `storage/log_manager.py` is a `StoredBatches`, and `TopicSink` in
`broker/transactions.py` a `MessageSink`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from metaq.errors import StorageError
from metaq.model import LogId, MessageId, Millis, Offset
from metaq.record.checksum import BytesLike


class StoredTicket(Protocol):
    """Receives the outcome of a batch, once, on the caller's thread."""

    def on_stored(self) -> None:
        """The batch is stored as the durability mode of its partition promises."""
        ...

    def on_failed(self, error: StorageError) -> None:
        """It is not acknowledged; after a disk error it may be there nevertheless."""
        ...


class StoredBatches(Protocol):
    """Stored batches, as replay looks for them."""

    def readable_range(self, log_id: LogId) -> tuple[Offset, Offset]:
        """Return log start and high watermark; 0 and 0 where there is no such log."""
        ...

    def offset_since(self, log_id: LogId, time_ms: Millis) -> Offset:
        """Return an offset at or in front of all that came at a time or later.

        Blocks on the disk, as `read_back`; 0 where there is no such log.

        Raises:
            StorageError: the partition or its disk cannot be read.
        """
        ...

    def read_back(self, log_id: LogId, offset: Offset, size_bytes: int) -> bytes:
        """Return stored bytes; blocks on the disk: for replay, before the port opens.

        Args:
            log_id: the partition.
            offset: where the batch lies if it was applied.
            size_bytes: its length, 1 or more.

        Returns:
            The bytes there; fewer where the readable part of the log ends, or a
            segment.

        Raises:
            OffsetOutOfRangeError: nothing readable is there. Below `log_start` the
                batch was applied and was trimmed since; at or above
                `high_watermark` it was not applied.
            StorageError: the partition or its disk cannot be read.
        """
        ...

    def hold(self, log_id: LogId, offset: Offset) -> None:
        """Show nothing from an offset on until an append `completes` what lies there.

        Before the port opens. Other appends to the partition are refused until then.

        Args:
            log_id: the partition; it exists.
            offset: where an append begins that a crash has cut; it is the last one.
        """
        ...


class MessageSink(Protocol):
    """Logs that take the puts of a committed transaction."""

    def plan_append(self, log_id: LogId, size_bytes: int) -> Offset:
        """Return a bound for the next append: it will not lie below, whatever comes.

        Args:
            log_id: the partition; made when it does not exist.
            size_bytes: of the batch, 1 or more.

        Raises:
            StorageError: the partition would not take it now.
            ClosedError: the logs are closed.
        """
        ...

    def append(
        self,
        log_id: LogId,
        chunks: Sequence[BytesLike],
        *,
        size_bytes: int,
        record_count: int,
        last_id: MessageId,
        ticket: StoredTicket,
        before_write: Callable[[Offset], Iterable[Callable[[], None]]],
        completes: bool,
    ) -> Offset:
        """Append one contiguous batch to one partition; never blocks.

        Args:
            log_id: the partition; made when it does not exist.
            chunks: whole records in segment format, ids stamped; ownership passes.
            size_bytes: sum of the lengths of the chunks, 1 or more.
            record_count: records in the batch, 1 or more.
            last_id: the largest id of them.
            ticket: told once; never after this method raised.
            before_write: called with the offset, on the thread that writes the batch,
                before it does; raises nothing, and is quick. What it returns is called
                behind it, before a byte is written, each function once for all batches
                that are written together and return it.
            completes: it begins with the rest of the append that is held.

        Returns:
            The offset of the batch: no other record lies between its first byte and
            its last, and all of it lies in one segment.

        Raises:
            StorageError: the partition does not take it now; nothing was queued.
            ClosedError: the logs are closed.
        """
        ...
