"""Room in a producer's buffer: what batches have reserved, and who waits for more.

Room is reserved by batches, some at a time, so that the bounds are looked at once for
many messages; what a batch does not need it gives back when it is sealed.

    Invariant: free room and the rooms reserved by batches that are not resolved are
    together what the options allow.
"""

import threading
from collections.abc import Callable
from typing import Final, NoReturn

from metaq.client.batches import Batch
from metaq.client.errors import BufferFullError, MessageTooLargeError
from metaq.client.lanes import Lane
from metaq.client.options import ProducerOptions
from metaq.errors import ClosedError

RESERVE_BYTES: Final = 32 * 1024
"""Room that a batch reserves at a time, beyond the message that needs it."""

RESERVE_COUNT: Final = 256
"""The same in messages."""

RESERVE_SHARE: Final = 16
"""No more than this part of the room that is left, so that little stays unused."""


class Room:
    """The room of one buffer.

    Concurrency: called under the buffer's lock, but for `refuse` of what never fits.
    """

    def __init__(self, options: ProducerOptions, lock: threading.Lock) -> None:
        """Start with all of it free.

        Args:
            options: how much there is.
            lock: the buffer's; `wait` lets go of it meanwhile.
        """
        self.free_bytes = options.buffer_bytes_max
        """Record bytes that nobody has reserved."""
        self.free_count = options.buffer_count_max
        """The same in messages."""
        self.full_count = 0
        """How often a message or a list found no room."""
        self.is_closed = False
        """No message is taken any more, so nobody waits for room."""
        self._bytes_max = options.buffer_bytes_max
        self._freed = threading.Condition(lock)
        self._waiter_count = 0
        self._callbacks: list[Callable[[], None]] = []

    def has(self, size_bytes: int, message_count: int) -> bool:
        """Tell whether there is room for messages, or waiting for it has no sense."""
        return self.is_closed or (
            size_bytes <= self.free_bytes and message_count <= self.free_count
        )

    def check(self, size_bytes: int, message_count: int) -> None:
        """Refuse messages for which there is no room.

        Raises:
            BufferFullError: not now.
            MessageTooLargeError: never.
            ClosedError: the producer is closed.
        """
        if self.is_closed or not self.has(size_bytes, message_count):
            self.refuse(size_bytes, message_count)

    def refuse(self, size_bytes: int, message_count: int) -> NoReturn:
        """Raise what `check` does, and count it when it is for want of room."""
        if self.is_closed:
            raise ClosedError("the producer is closed")
        if size_bytes > self._bytes_max:
            raise MessageTooLargeError(
                f"message: the buffer takes at most {self._bytes_max} bytes,"
                f" got {size_bytes} with its header"
            )
        self.full_count += 1
        raise BufferFullError(
            f"buffer: {size_bytes} bytes in {message_count} messages do not fit into"
            f" {self.free_bytes} bytes and {self.free_count} messages",
            size_bytes=size_bytes,
            message_count=message_count,
        )

    def reserve(
        self, batch: Batch, lane: Lane, size_bytes: int, message_count: int
    ) -> None:
        """Give a batch room for messages, which there is, and for some more.

        Args:
            batch: has given back what it had; the messages fit into it.
            lane: bounds the batch.
            size_bytes: of the messages, headers included.
            message_count: how many they are.
        """
        share_bytes = min(RESERVE_BYTES, self.free_bytes // RESERVE_SHARE)
        spare_bytes = lane.bytes_max - batch.size_bytes
        grant_bytes = max(size_bytes, min(share_bytes, spare_bytes))
        share_count = min(RESERVE_COUNT, self.free_count // RESERVE_SHARE)
        spare_count = lane.count_max - len(batch.payloads)
        grant_count = max(message_count, min(share_count, spare_count))
        batch.reserved_bytes += grant_bytes
        batch.bytes_left = grant_bytes
        batch.reserved_count += grant_count
        self.free_bytes -= grant_bytes
        self.free_count -= grant_count

    def give_back(self, batch: Batch) -> None:
        """Free what a batch has reserved and not used."""
        self.free_bytes += batch.bytes_left
        self.free_count += batch.reserved_count - len(batch.payloads)
        batch.reserved_bytes -= batch.bytes_left
        batch.reserved_count = len(batch.payloads)
        batch.bytes_left = 0

    def release(self, batch: Batch) -> None:
        """Free all that a batch has, which is sealed and has its outcome."""
        self.free_bytes += batch.reserved_bytes
        self.free_count += len(batch.payloads)

    # -- waiting ----------------------------------------------------------------------

    def wait(
        self, timeout_s: float | None, *, size_bytes: int, message_count: int
    ) -> bool:
        """Block until there is room; False when there is none before the time is over.

        Args:
            timeout_s: None waits for ever.
            size_bytes: record bytes, header included.
            message_count: messages.
        """
        self._waiter_count += 1
        try:
            return self._freed.wait_for(
                lambda: self.has(size_bytes, message_count), timeout_s
            )
        finally:
            self._waiter_count -= 1

    def on_freed(self, callback: Callable[[], None]) -> None:
        """Have `callback` among those that the next `wake` returns."""
        self._callbacks.append(callback)

    def wake(self) -> list[Callable[[], None]]:
        """Wake who blocks; return whom to call back, outside the lock."""
        if self._waiter_count:
            self._freed.notify_all()
        callbacks, self._callbacks = self._callbacks, []
        return callbacks
