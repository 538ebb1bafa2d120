"""The buffer of one producer: bounded memory, and each batch without an outcome.

Theory of operation. One plain lock guards the buffer, and what partition senders have
that their loop has not taken. Memory is reserved by batches, some at a time, so that
the bounds are checked once for many messages; a sealed batch returns what it did not
use. When a batch has to be checked, for its age or its deadline, is in a heap
(`take_due`): what was answered before costs nothing.

    Invariant: free memory and the reservations of unresolved batches add up to the
    bounds of the options.
    Invariant: a sender with messages to take is in `ready`, or its `is_awake` says that
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
"""A batch that cannot be sent takes messages for this share of its time-out, so no
message fails earlier than that before its own deadline."""

BATCH_AGE_MAX_S: Final = 1.0
"""The same, for long time-outs."""

TURN_S: Final = 0.005
"""For so long messages without a key go to one partition, while any is not answered. To
give each of a stream to another has the broker sync all of their files for every few
messages."""

RESERVE_BYTES: Final = 32 * 1024
"""Memory that a batch reserves at a time, beyond the message that needs it."""

RESERVE_COUNT: Final = 256
"""The same in messages."""

RESERVE_SHARE: Final = 16
"""At most this part of the free memory is reserved, so that little stays unused."""

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class BufferStatistics:
    """A snapshot of the buffered messages, for `ProducerStatistics`."""

    appended_count: int
    buffered_count: int
    buffered_bytes: int
    full_count: int


class Buffer(Generic[S]):
    """Buffered batches by their partition sender `S`, and the memory they may take.

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
        """Senders that got messages since the loop found them empty."""
        self.announced: list[S] | None = None
        """The list in `ready` that the loop was notified of last."""
        self.is_turn_over = True
        """Whether the next message without a key goes to another partition.

        It changes under the lock; messages look at it without: one that sees the former
        value goes to the partition before it, or asks under the lock.
        """
        self._turn_ends_s = 0.0
        self._on_ready = on_ready
        self._free_bytes = options.buffer_bytes_max
        self._free_count = options.buffer_count_max
        self._full_count = 0
        self._is_closed = False
        self._freed = threading.Condition(self.lock)
        self.room = asyncio.Event()
        """Set when a batch is resolved, or the producer closed; another one follows."""
        self._unanswered: dict[Batch, list[S]] = {}
        self._due = Deadlines[Batch]()
        self._resolved_count = 0

    # -- memory, under the lock -------------------------------------------------------

    def check(self, size_bytes: int, message_count: int) -> None:
        """Refuse messages for which there is no memory.

        Raises:
            BufferFullError: not now.
            MessageTooLargeError: never.
            ClosedError: the producer is closed.
        """
        if self._is_closed or not self._has(size_bytes, message_count):
            self.refuse(size_bytes, message_count)

    def refuse(self, size_bytes: int, message_count: int) -> NoReturn:
        """Raise the error of `check`; without the lock for messages that never fit."""
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
        """Give a batch memory for messages that fit, and for some more.

        Args:
            batch: has returned its reservation.
            size_bytes: of the messages, headers included.
            message_count: how many they are.
            bytes_max: bound of the batch.
            count_max: likewise.
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
        """Block until there is memory, or the producer is closed; False: too late.

        Another caller may take the memory first.

        Args:
            timeout_s: None waits for ever.
            size_bytes: record bytes, header included.
            message_count: messages.

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
        """Return a new batch, under the lock."""
        now_s = self.clock.monotonic_s()
        batch = Batch(self.home, created_s=now_s, timeout_s=timeout_s)
        self._unanswered[batch] = [sender]
        self._due.set(batch, now_s + age_s(timeout_s))
        return batch

    def begin_apart(self, payload: bytes, flag: int, timeout_s: float) -> Batch:
        """Return a batch of one message that no sender has yet; under the lock.

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
        """Free the memory of a batch whose messages go to others; under the lock."""
        del self._unanswered[batch]
        self._free_bytes += batch.reserved_bytes
        self._free_count += len(batch.payloads)

    def note_moved(self, batch: Batch, sender: S) -> None:
        """Note that messages of a batch went to another sender."""
        with self.lock:
            senders = self._unanswered[batch]
            if sender not in senders:
                senders.append(sender)

    def take_due(self, now_s: float, again_s: float) -> list[S]:
        """Return the senders of batches that are old, or have passed their deadline.

        Args:
            now_s: the time.
            again_s: after so long those past their deadline are returned again, as
                long as they have no outcome.
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
        """Refuse messages from now on, and wake who waits for memory; on the loop."""
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
        """Let messages without a key go to one partition for TURN_S; any thread.

        Returns:
            False when another thread has just done so.
        """
        with self.lock:
            if not self.is_turn_over:
                return False
            self._turn_ends_s = self.clock.monotonic_s() + TURN_S
            self.is_turn_over = False
            return True

    def look_at_turn(self, now_s: float) -> None:
        """End it if it is time; as batches leave, so that no message reads a clock.

        Under the lock.
        """
        if now_s >= self._turn_ends_s:
            self.is_turn_over = True

    # -- wake-ups of the loop ---------------------------------------------------------

    def announce(self) -> None:
        """Notify the loop of `ready`, unless it was notified and did not come yet.

        An interrupt in here delays no message: the next one announces both.
        """
        ready = self.ready
        if not ready or self.announced is ready:
            return
        if self.home.is_here():
            self.home.loop.call_soon(self._on_ready)
        else:
            self.home.loop.call_soon_threadsafe(self._on_ready)
        # If the loop has taken it by now, this has no effect.
        self.announced = ready

    def take_ready(self) -> list[S]:
        """Return the senders that got messages since they were found empty."""
        with self.lock:
            ready, self.ready = self.ready, []
            return ready


def age_s(timeout_s: float) -> float:
    """Return for how long a batch of messages with this time-out takes more."""
    return min(BATCH_AGE_MAX_S, timeout_s * BATCH_AGE_SHARE)
