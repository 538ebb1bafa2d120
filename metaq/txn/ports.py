"""What the transaction journal needs from outside; it is given these, it imports none.

Keep in step: `storage/log_manager.py`, which satisfies `MessageSink` (a test says so).
"""

from typing import Protocol

from metaq.errors import StorageError
from metaq.model import LogId, MessageId, Offset


class StoredTicket(Protocol):
    """Who wants to know what became of a batch; called once, on the caller's thread."""

    def on_stored(self) -> None:
        """The batch is stored as the durability mode of its partition promises."""
        ...

    def on_failed(self, error: StorageError) -> None:
        """It is not acknowledged; after a disk error it may be there nevertheless."""
        ...


class MessageSink(Protocol):
    """Where the puts of a committed transaction go."""

    def append(
        self,
        log_id: LogId,
        chunks: list[bytes],
        *,
        size_bytes: int,
        record_count: int,
        last_id: MessageId,
        ticket: StoredTicket,
    ) -> Offset:
        """Append one contiguous batch to one partition; never blocks.

        Args:
            log_id: the partition; made when it does not exist.
            chunks: whole records in segment format, ids stamped; ownership passes.
            size_bytes: sum of the lengths of the chunks, 1 or more.
            record_count: records in the batch, 1 or more.
            last_id: id of the last of them.
            ticket: told once; never after this method raised.

        Returns:
            The offset of the batch: no other record lies between its first byte and
            its last, and all of it lies in one segment.

        Raises:
            StorageError: the partition does not take it now; nothing was queued.
            ClosedError: the logs are closed.
        """
        ...

    def read_back(self, log_id: LogId, offset: Offset, size_bytes: int) -> bytes:
        """Return stored bytes, for the check whether a batch was applied already.

        Blocks on the disk: for replay, before the broker listens.

        Args:
            log_id: the partition.
            offset: where the batch lies if it was applied.
            size_bytes: its length, 1 or more.

        Returns:
            The bytes there; fewer where the readable part of the log ends.

        Raises:
            OffsetOutOfRangeError: nothing readable is there. Below `log_start` the
                batch was applied and has been removed since; at or above
                `high_watermark` it was not applied.
            StorageError: the partition or its disk cannot be read.
        """
        ...
