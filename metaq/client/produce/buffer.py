"""The buffer of one producer: bounded memory, and the batches without an outcome.

Theory of operation. One plain lock guards the buffer and the batches of partition
senders that the loop has not taken. A batch reserves memory in advance, so that the
bounds are checked once for many messages; a sealed batch returns the unused part. A
heap has the time at which each batch must be checked for its age or its deadline
(`take_due`), so batches answered before that cost nothing.

    Invariant: free memory and the reservations of unresolved batches add up to the
    bounds of the options.
    Invariant: a sender with messages to take is in `ready`, or has `is_awake` set and
    the loop knows of them.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, NoReturn, TypeVar

from metaq.client.errors import BufferFullError, MessageTooLargeError
from metaq.client.options import ProducerOptions
from metaq.client.produce.batches import Batch, BatchOutcome, Home, ends_of
from metaq.clock import Clock
from metaq.deadlines import Deadlines
from metaq.errors import ClosedError

BATCH_AGE_SHARE: Final = 0.1
"""A batch that cannot be sent takes messages for this share of its time-out, so a
message fails at most that much before its own deadline."""

BATCH_AGE_MAX_S: Final = 1.0
"""Upper bound of that time, in seconds, for long time-outs."""

TURN_S: Final = 0.005
"""Seconds for which messages without a key go to the same partition while any message
is unanswered. With a new partition for each message, the broker would sync the files of
all partitions for every few messages."""

RESERVE_BYTES: Final = 32 * 1024
"""Maximum memory that a batch reserves at once, unless its messages need more."""

RESERVE_COUNT: Final = 256
"""The same in messages."""

RESERVE_SHARE: Final = 16
"""A reservation is at most this fraction (1/n) of the free memory, unless its messages
need more, so that little stays unused."""

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class BufferStatistics:
    """A snapshot of the buffered messages, for `ProducerStatistics`."""

    appended_count: int
    buffered_count: int
    buffered_bytes: int
    full_count: int


class Buffer(Generic[S]):
    """Buffered batches with their partition senders `S`, and the buffer memory.

    Concurrency: methods that say so are called under `lock`; the others take it.
    """

    def __init__(
        self,
        options: ProducerOptions,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        on_ready: Callable[[], None],
    ) -> None:
        """Start empty, on the loop's thread; `on_ready` is called there."""
        self.options = options
        self.clock = clock
        self.lock = threading.Lock()
        self.home = Home(self.lock, loop, threading.get_ident())
        self.ready: list[S] = []
        """Senders with messages that the loop last found empty."""
        self.announced: list[S] | None = None
        """The `ready` list of which the loop was notified last."""
        self.is_turn_over = True
        """Whether the next message without a key goes to another partition.

        Written under the lock, read without it: a message that reads a stale False
        goes to the former partition; a stale True is checked under the lock.
        """
        self._turn_ends_s = 0.0
        self._on_ready = on_ready
        self._free_bytes = options.buffer_bytes_max
        self._free_count = options.buffer_count_max
        self._full_count = 0
        self._is_closed = False
        self._freed = threading.Condition(self.lock)
        self.room = asyncio.Event()
        """Set when a batch is resolved or the producer closed, then replaced."""
        self._unanswered: dict[Batch, list[S]] = {}
        self._due = Deadlines[Batch]()
        self._resolved_count = 0

    # -- memory, under the lock -------------------------------------------------------

    def check(self, size_bytes: int, message_count: int) -> None:
        """Refuse messages for which there is no memory.

        Raises:
            BufferFullError: too little memory is free now.
            MessageTooLargeError: more bytes than the whole buffer.
            ClosedError: the producer is closed.
        """
        if self._is_closed or not self._has(size_bytes, message_count):
            self.refuse(size_bytes, message_count)

    def refuse(self, size_bytes: int, message_count: int) -> NoReturn:
        """Raise the error of `check`; needs no lock for messages that never fit."""
        if self._is_closed:
            raise ClosedError("the producer is closed")
        bytes_max = self.options.buffer_bytes_max
        if size_bytes > bytes_max:
            raise MessageTooLargeError(
                f"message: the buffer takes at most {bytes_max} bytes,"
                f" got {size_bytes} with its header"
            )
        self._full_count += 1
        raise BufferFullError(
            f"buffer: {size_bytes} bytes in {message_count} messages do not fit into"
            f" {self._free_bytes} bytes and {self._free_count} messages",
            size_bytes=size_bytes,
            message_count=message_count,
        )

    def reserve(
        self,
        batch: Batch,
        size_bytes: int,
        message_count: int,
        bytes_max: int,
        count_max: int,
    ) -> None:
        """Reserve memory for messages that passed `check`, and some more.

        Args:
            batch: a batch that has returned its unused reservation.
            size_bytes: of the messages, headers included.
            message_count: number of the messages.
            bytes_max: maximum record bytes of the batch.
            count_max: maximum number of its messages.
        """
        share_bytes = min(RESERVE_BYTES, self._free_bytes // RESERVE_SHARE)
        spare_bytes = bytes_max - batch.size_bytes
        grant_bytes = max(size_bytes, min(share_bytes, spare_bytes))
        share_count = min(RESERVE_COUNT, self._free_count // RESERVE_SHARE)
        spare_count = count_max - len(batch.payloads)
        grant_count = max(message_count, min(share_count, spare_count))
        batch.reserved_bytes += grant_bytes
        batch.bytes_left = grant_bytes
        batch.reserved_count += grant_count
        self._free_bytes -= grant_bytes
        self._free_count -= grant_count

    def give_back(self, batch: Batch) -> None:
        """Free the unused reservation of a batch."""
        self._free_bytes += batch.bytes_left
        self._free_count += batch.reserved_count - len(batch.payloads)
        batch.reserved_bytes -= batch.bytes_left
        batch.reserved_count = len(batch.payloads)
        batch.bytes_left = 0

    def _has(self, size_bytes: int, message_count: int) -> bool:
        return size_bytes <= self._free_bytes and message_count <= self._free_count

    # -- waiting for memory -----------------------------------------------------------

    def wait(
        self, timeout_s: float | None, *, size_bytes: int = 1, message_count: int = 1
    ) -> bool:
        """Block until memory is free or the producer is closed; False on a time-out.

        Another caller may take the memory first.

        Args:
            timeout_s: seconds; None waits without a limit.
            size_bytes: record bytes, header included.
            message_count: number of messages.

        Raises:
            RuntimeError: called on the loop's thread, which would wait for itself.
        """
        if self.home.is_here():
            raise RuntimeError("the event loop cannot wait for itself; use await")
        with self.lock:
            return self._freed.wait_for(
                lambda: self._is_closed or self._has(size_bytes, message_count),
                timeout_s,
            )

    def _announce_room(self) -> None:
        self.room.set()
        self.room = asyncio.Event()

    # -- batches ----------------------------------------------------------------------

    def begin(self, sender: S, timeout_s: float) -> Batch:
        """Return a new batch; under the lock."""
        now_s = self.clock.monotonic_s()
        batch = Batch(self.home, created_s=now_s, timeout_s=timeout_s)
        self._unanswered[batch] = [sender]
        self._due.set(batch, now_s + age_s(timeout_s))
        return batch

    def begin_apart(self, payload: bytes, flag: int, timeout_s: float) -> Batch:
        """Return a batch of one message that has no sender yet; under the lock.

        Raises:
            BufferFullError, MessageTooLargeError, ClosedError: as `check`.
        """
        ends = ends_of([payload])
        self.check(ends[-1], 1)
        now_s = self.clock.monotonic_s()
        batch = Batch(self.home, created_s=now_s, timeout_s=timeout_s)
        self._unanswered[batch] = []
        self.reserve(batch, ends[-1], 1, ends[-1], 1)
        batch.add([payload], [flag], ends)
        return batch

    def release(self, batch: Batch) -> None:
        """Free the memory of a batch whose message goes to another; under the lock."""
        del self._unanswered[batch]
        self._free_bytes += batch.reserved_bytes
        self._free_count += len(batch.payloads)

    def note_moved(self, batch: Batch, sender: S) -> None:
        """Record that messages of a batch went to another sender."""
        with self.lock:
            senders = self._unanswered[batch]
            if sender not in senders:
                senders.append(sender)

    def take_due(self, now_s: float, again_s: float) -> list[S]:
        """Return the senders of batches that are old, or have passed their deadline.

        Args:
            now_s: the monotonic time.
            again_s: seconds after which the senders of a late batch are returned again,
                if it still has no outcome.
        """
        with self.lock:
            self.look_at_turn(now_s)
            found: dict[S, None] = {}
            for batch in self._due.take_due(now_s):
                is_late = batch.deadline_s <= now_s
                self._due.set(batch, now_s + again_s if is_late else batch.deadline_s)
                found.update(dict.fromkeys(self._unanswered[batch]))
            return list(found)

    def resolve(self, batch: Batch, outcomes: Sequence[BatchOutcome]) -> None:
        """Set the outcomes of a sealed batch, and free its memory."""
        with self.lock:
            del self._unanswered[batch]
            self._due.clear(batch)
            self._free_bytes += batch.reserved_bytes
            self._free_count += len(batch.payloads)
            self._resolved_count += len(batch.payloads)
            if not self._unanswered:
                self.is_turn_over = True
            self._freed.notify_all()
        batch.resolve(outcomes)
        self._announce_room()

    @property
    def has_unanswered(self) -> bool:
        """Whether any message has no outcome yet."""
        return bool(self._unanswered)

    def unanswered(self) -> list[Batch]:
        """Return the batches without an outcome; under the lock."""
        return list(self._unanswered)

    def close(self) -> None:
        """Refuse new messages, and wake those waiting for memory; on the loop."""
        with self.lock:
            self._is_closed = True
            self._freed.notify_all()
        self._announce_room()

    def statistics(self) -> BufferStatistics:
        """Return a snapshot."""
        with self.lock:
            buffered_count = sum(len(batch.payloads) for batch in self._unanswered)
            return BufferStatistics(
                appended_count=self._resolved_count + buffered_count,
                buffered_count=buffered_count,
                buffered_bytes=sum(batch.size_bytes for batch in self._unanswered),
                full_count=self._full_count,
            )

    # -- turns of partitions ----------------------------------------------------------

    def begin_turn(self) -> bool:
        """Begin a turn of TURN_S for messages without a key; from any thread.

        Returns:
            False if another thread has just begun one.
        """
        with self.lock:
            if not self.is_turn_over:
                return False
            self._turn_ends_s = self.clock.monotonic_s() + TURN_S
            self.is_turn_over = False
            return True

    def look_at_turn(self, now_s: float) -> None:
        """End the turn if its time is over; under the lock.

        Called as batches are taken, so that no clock is read per message.
        """
        if now_s >= self._turn_ends_s:
            self.is_turn_over = True

    # -- wake-ups of the loop ---------------------------------------------------------

    def announce(self) -> None:
        """Notify the loop of `ready`, unless a notification is still pending.

        If an interrupt ends this call, the next message announces both.
        """
        ready = self.ready
        if not ready or self.announced is ready:
            return
        if self.home.is_here():
            self.home.loop.call_soon(self._on_ready)
        else:
            self.home.loop.call_soon_threadsafe(self._on_ready)
        # No effect if the loop has taken the list by now.
        self.announced = ready

    def take_ready(self) -> list[S]:
        """Return the list `ready`, and start another one."""
        with self.lock:
            ready, self.ready = self.ready, []
            return ready


def age_s(timeout_s: float) -> float:
    """Return the seconds for which a batch with this time-out takes messages."""
    return min(BATCH_AGE_MAX_S, timeout_s * BATCH_AGE_SHARE)
