"""Fetch buffer: fetched batches on their way to handlers, and the handled offsets.

    fetcher --put--> [buffer of a partition] --take--> worker --done--> handled offset

Theory of operation. One buffer per assigned partition. A buffer is with one worker at a
time, so a partition is handled in order whatever the number of workers; buffers with
batches wait in line and take turns. Batches cross, never single messages: the
lock is taken once per batch, and the batch that a worker holds counts its messages.

A message counts as *handled* when the worker asks for the next one
(`current_batch.py`), or says so (`FetchedBatch.confirm`). `handled` tells the offset
behind the last handled message of each partition, for a commit.

A buffer goes in one of two ways. `revoke` stops the batch that is taken, waits until
its worker gives it back (bounded), and returns the handled offset. `fence` does not
wait. Either way the buffer is gone: what its worker reports later changes nothing, and
a commit of it is refused (`is_current`). A buffer may be given back *paused*: its
worker is free for others, and nothing of it is handed out before `resume`.

    Invariant: a batch that is taken belongs to exactly one worker.
    Invariant: handled offsets of a buffer never go back.
    Invariant: buffered bytes are those of batches that were put and not taken.
    Invariant: a buffer in line has a batch, and no worker holds one of it.

Concurrency: everything may be called from any thread unless it says otherwise.
"""

import asyncio
import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import MISSING, dataclass, field
from functools import partial
from itertools import islice
from operator import length_hint
from typing import Any, Final

from metaq.client.consume.decode import MAKE, take_apart
from metaq.client.timeouts import wait_for
from metaq.clock import Clock
from metaq.errors import MetaqError
from metaq.model import GroupOffset, Message, MessageId, Offset, TopicPartition
from metaq.stats import gauge

PARTITION_BATCHES_MAX: Final = 2
"""Batches fetched ahead per partition: one to take while the next one arrives."""


@dataclass(slots=True, eq=False)
class FetchedBatch:
    """Messages of one partition, in order; belongs to one worker while taken."""

    partition: TopicPartition
    """Partition of the batch."""
    messages: Sequence[Message]
    """May be empty: filtered away, and only `next_offset` tells of them."""
    next_offset: Offset
    """Offset behind the last of them, filtered ones included."""
    size_bytes: int
    """Bytes of the log they came from."""
    held: int = 1
    """Number of the last messages handed out that are still being handled."""
    confirmed: int = 0
    """Messages that were confirmed as handled."""
    told: int = 0
    """Messages that `on_handled` was told of."""
    is_stopped: bool = False
    """Hand out no more: the partition is being taken away, or read elsewhere."""
    _rows: Iterator[Any] = field(init=False)
    _left: Iterator[Any] | None = field(default=None, init=False)
    _gate: list[type[Message]] = field(default_factory=list, init=False)

    @property
    def handed(self) -> int:
        """Messages that were handed out."""
        left = self._left
        return 0 if left is None else len(self.messages) - length_hint(left)

    def begin(self) -> Iterator[Message]:
        """Hand out the rest, one by one; what was handed out before is handled.

        No interpreted instruction runs per message: `_left` counts, and the iterator
        ends when its gate is emptied, by the next `begin` or from another thread.
        """
        if self._left is None:
            self._rows, self._left = take_apart(self.messages)
        self.confirm()
        self.held = 1
        self._gate.clear()
        self._gate = [Message] * length_hint(self._left)
        if self.is_stopped:  # looked at last: `stop` may come at any point
            self._gate.clear()
        return map(MAKE, self._gate, self._rows)

    def take(self, count_max: int) -> list[Message]:
        """Hand out up to so many at once; what was handed out before is handled."""
        rest = self.begin()
        self.held = count_max
        return list(islice(rest, count_max))

    def stop(self) -> None:
        """Hand out no more, to a loop that is under way either."""
        self.is_stopped = True
        self._gate.clear()

    @property
    def handled(self) -> int:
        """Messages that are handled: all handed out but those being handled."""
        return max(self.handed - self.held, self.confirmed, 0)

    def confirm(self) -> None:
        """Count the messages handed out as handled."""
        self.confirmed = self.handed


@dataclass(slots=True, eq=False)
class _PartitionBuffer:
    partition: TopicPartition
    handled: GroupOffset
    progress_s: float
    ready: deque[FetchedBatch] = field(default_factory=deque)
    taken: FetchedBatch | None = None
    is_queued: bool = False
    is_paused: bool = False
    is_ending: bool = False
    returned: list[Callable[[], None]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PartitionBufferStatistics:
    """A snapshot of one buffer."""

    handled: GroupOffset = gauge(
        "metaq_consumer_handled_bytes",
        "Offset behind the last handled message; `metaq_log_end_bytes` is the end.",
        default=MISSING,
        read=lambda handled: handled.offset,
        combine=max,
    )
    """Offsets that a commit would store."""
    buffered_count: int = gauge(
        "metaq_consumer_buffered_messages",
        "Messages fetched and not handed out.",
        combine=max,
    )
    is_taken: bool = False
    """Whether a worker has a batch of it, or it is paused."""
    progress_s: float = 0.0
    """Monotonic time at which something was last fetched, handed out or handled."""


class FetchBuffer:
    """All buffers of one consumer."""

    def __init__(
        self,
        *,
        clock: Clock,
        buffer_bytes_max: int,
        buffer_count_max: int,
        on_room: Callable[[], None],
        on_handled: Callable[[Sequence[Message]], None] | None = None,
    ) -> None:
        """Start without buffers.

        Args:
            clock: for progress times.
            buffer_bytes_max: no further batch is fetched at or above so many
                buffered bytes; batches in flight still come.
            buffer_count_max: the same in messages.
            on_room: called, from any thread and outside the lock, when a buffer that
                `has_room` refused may have room again.
            on_handled: called, from any thread and outside the lock, with the handled
                messages of a batch that is given back, or whose buffer is fenced; once
                for each message.
        """
        self._clock = clock
        self._bytes_max = buffer_bytes_max
        self._count_max = buffer_count_max
        self._on_room = on_room
        self._on_handled = on_handled
        self._lock = threading.Lock()
        self._arrival = threading.Condition(self._lock)
        self._buffers: dict[TopicPartition, _PartitionBuffer] = {}
        self._line: deque[_PartitionBuffer] = deque()
        self._asides: deque[FetchedBatch] = deque()
        self._sleepers: set[asyncio.Future[None]] = set()
        self._error: BaseException | None = None
        self._buffered_bytes = 0
        self._buffered_count = 0
        self._is_room_wanted = False
        self._waiting_count = 0
        self._asked_s = -math.inf

    # -- the fetcher's side -----------------------------------------------------------

    def add(self, partition: TopicPartition, handled: GroupOffset) -> None:
        """Open a buffer; `handled` is where reading begins."""
        with self._lock:
            assert partition not in self._buffers, partition
            now_s = self._clock.monotonic_s()
            self._buffers[partition] = _PartitionBuffer(partition, handled, now_s)

    def has_room(self, partition: TopicPartition) -> bool:
        """Return whether one more batch may be fetched; else `on_room` will tell."""
        with self._lock:
            buffer = self._buffers.get(partition)
            if buffer is None:
                return False
            has_room = (
                not buffer.is_ending
                and len(buffer.ready) < PARTITION_BATCHES_MAX
                and self.has_space
            )
            self._is_room_wanted |= not has_room
            return has_room

    def put(self, batch: FetchedBatch) -> None:
        """Take a fetched batch; without messages it only moves the offset on.

        Dropped when the buffer is gone, or about to go.
        """
        with self._lock:
            buffer = self._buffers.get(batch.partition)
            if buffer is None or buffer.is_ending:
                return
            buffer.progress_s = self._clock.monotonic_s()
            if not batch.messages:
                self._skip_to(buffer, batch.next_offset)
                return
            buffer.ready.append(batch)
            self._buffered_bytes += batch.size_bytes
            self._buffered_count += len(batch.messages)
            self._enqueue(buffer)

    def _skip_to(self, buffer: _PartitionBuffer, offset: Offset) -> None:
        last = buffer.ready[-1] if buffer.ready else buffer.taken
        if last is None:
            buffer.handled = GroupOffset(offset, buffer.handled.message_id)
        else:
            last.next_offset = offset

    def _enqueue(self, buffer: _PartitionBuffer) -> None:
        """Put a buffer in line and wake one worker; the lock is held."""
        if buffer.is_queued or buffer.taken is not None or not buffer.ready:
            return
        if buffer.is_paused or buffer.is_ending:
            return
        buffer.is_queued = True
        self._line.append(buffer)
        self._wake()

    def _wake(self) -> None:
        self._arrival.notify()
        if self._sleepers:
            sleeper = self._sleepers.pop()
            _finish_soon(sleeper)

    # -- the worker's side ------------------------------------------------------------

    def take_nowait(self) -> FetchedBatch | None:
        """Return the next batch, or None when there is none now.

        Raises:
            MetaqError: the error of `fail`, once everything fetched was taken.
        """
        with self._lock:
            batch = self._take()
        if batch is not None:
            self._tell_room()
        return batch

    def take(self, timeout_s: float | None) -> FetchedBatch | None:
        """Wait for a batch; not on the event loop's thread.

        Args:
            timeout_s: longest wait; None waits for ever.

        Returns:
            The batch, taken until `done`; None when the time is over.
        """
        with self._lock:
            batch = self._take()
            if batch is None:
                self._waiting_count += 1
                try:
                    wait_for(self._arrival, self._has_something, timeout_s)
                finally:
                    self._waiting_count -= 1
                batch = self._take()
        if batch is not None:
            self._tell_room()
        return batch

    async def take_async(self) -> FetchedBatch:
        """Wait for a batch, on an event loop.

        Cancellation: nothing is taken.
        """
        loop = asyncio.get_running_loop()
        while True:
            batch = self.take_nowait()
            if batch is not None:
                return batch
            sleeper: asyncio.Future[None] = loop.create_future()
            with self._lock:
                if self._has_something():
                    continue
                self._sleepers.add(sleeper)
                self._waiting_count += 1
            try:
                await sleeper
            except BaseException:
                with self._lock:
                    self._sleepers.discard(sleeper)
                    if self._line or self._asides:
                        # The wake-up may have been meant for this one: pass it on.
                        self._wake()
                raise
            finally:
                with self._lock:
                    self._sleepers.discard(sleeper)
                    self._waiting_count -= 1

    def _has_something(self) -> bool:
        return bool(self._line or self._asides) or self._error is not None

    def _take(self) -> FetchedBatch | None:
        """Take the next batch in line; the lock is held."""
        self._asked_s = self._clock.monotonic_s()
        if self._asides:
            return self._asides.popleft()
        if self._line:
            buffer = self._line.popleft()
            buffer.is_queued = False
            # Taken before it leaves the line: see `recover`.
            batch = buffer.taken = buffer.ready[0]
            buffer.ready.popleft()
            buffer.progress_s = self._asked_s
            self._buffered_bytes -= batch.size_bytes
            self._buffered_count -= len(batch.messages)
            return batch
        if self._error is not None:
            # Others that wait shall hear it too.
            self._arrival.notify_all()
            raise self._error
        return None

    def tell_handled(self) -> None:
        """Tell `on_handled` of the batches taken now, not when they come back."""
        if self._on_handled is None:
            return
        with self._lock:
            taken = [buffer.taken for buffer in self._buffers.values()]
        for batch in taken:
            if batch is not None:
                self._tell_handled(batch)

    def _tell_handled(self, batch: FetchedBatch) -> None:
        if self._on_handled is None:
            return
        with self._lock:
            count = batch.handled
            fresh = batch.messages[batch.told : count]
            batch.told = max(batch.told, count)
        if fresh:
            self._on_handled(fresh)

    def _tell_room(self) -> None:
        if self._is_room_wanted:
            self._is_room_wanted = False
            self._on_room()

    def done(self, batch: FetchedBatch, *, is_paused: bool = False) -> None:
        """Give a batch back; its unhandled messages are handed out again.

        A batch of a buffer that is gone is only counted as returned. So is a stopped
        one, and nothing more is handed out of its buffer: its rest comes first,
        wherever the partition is read next.

        Args:
            batch: the batch taken before.
            is_paused: hand out nothing of its partition before `resume`.
        """
        self._tell_handled(batch)
        with self._lock:
            buffer = self._buffers.get(batch.partition)
            if buffer is None or buffer.taken is not batch:
                return
            buffer.is_paused = is_paused
            buffer.is_ending = batch.is_stopped
            rest = batch.messages[batch.handled :]
            if rest and not batch.is_stopped:
                left = FetchedBatch(
                    batch.partition, rest, batch.next_offset, size_bytes=0
                )
                buffer.ready.appendleft(left)
                self._buffered_count += len(rest)
            # Behind the rest: see `recover`.
            buffer.handled = _handled(buffer.handled, batch)
            buffer.taken = None
            buffer.progress_s = self._clock.monotonic_s()
            self._enqueue(buffer)
            returned, buffer.returned = buffer.returned, []
        for tell in returned:
            tell()
        self._tell_room()

    def recover(self) -> None:
        """Put right what an interrupt may have left half done in its only reader.

        Batches that are taken are given back. `_take` and `done` have the messages of a
        batch in one place at least, wherever Ctrl-C comes; here two places become one.
        """
        with self._lock:
            taken = []
            for buffer in self._buffers.values():
                batch = buffer.taken
                if batch is None:
                    continue
                first = buffer.ready[0] if buffer.ready else None
                if first is batch:  # about to be taken
                    buffer.taken = None
                    continue
                if first is not None and first.next_offset == batch.next_offset:
                    buffer.ready.popleft()  # the rest of it, about to be given back
                taken.append(batch)
        for batch in taken:
            self.done(batch)
        with self._lock:
            ready = [batch for each in self._buffers.values() for batch in each.ready]
            self._buffered_bytes = sum(batch.size_bytes for batch in ready)
            self._buffered_count = sum(len(batch.messages) for batch in ready)
            for buffer in self._buffers.values():
                buffer.is_queued = buffer in self._line
                self._enqueue(buffer)
        self._on_room()

    def resume(self, partition: TopicPartition) -> None:
        """Hand out a paused partition again; harmless when it is not, or is gone."""
        with self._lock:
            buffer = self._buffers.get(partition)
            if buffer is not None:
                buffer.is_paused = False
                buffer.progress_s = self._clock.monotonic_s()
                self._enqueue(buffer)

    def put_aside(self, batch: FetchedBatch) -> None:
        """Hand a batch to the next worker that is free; it belongs to no buffer.

        It moves no offset, and its worker gives it back to its maker.
        """
        with self._lock:
            self._asides.append(batch)
            self._wake()

    def drop_asides(self) -> None:
        """Forget batches that were put aside and not taken."""
        with self._lock:
            self._asides.clear()

    # -- the end of a buffer ----------------------------------------------------------

    def fence(self, partition: TopicPartition) -> GroupOffset | None:
        """Take a buffer away at once; return the handled offset, None without one."""
        with self._lock:
            buffer = self._buffers.pop(partition, None)
            if buffer is None:
                return None
            handled = buffer.handled
            if buffer.taken is not None:
                buffer.taken.stop()
                handled = _handled(handled, buffer.taken)
            self._drop_ready(buffer)
        if buffer.taken is not None:
            self._tell_handled(buffer.taken)
        for tell in buffer.returned:
            tell()
        self._tell_room()
        return handled

    async def revoke(
        self, partition: TopicPartition, *, timeout_s: float
    ) -> tuple[GroupOffset | None, bool]:
        """Take a buffer away when its worker has let go of it, or the time is over.

        Returns:
            The handled offset, None without a buffer; and whether the worker let go.
        """
        loop = asyncio.get_running_loop()
        returned: asyncio.Future[None] = loop.create_future()
        with self._lock:
            buffer = self._buffers.get(partition)
            if buffer is None:
                return None, True
            self._drop_ready(buffer)
            if buffer.taken is None:
                returned.set_result(None)
            else:
                buffer.taken.stop()
                buffer.returned.append(partial(_finish_soon, returned))
        is_returned = True
        try:
            async with asyncio.timeout(timeout_s):
                await returned
        except TimeoutError:
            is_returned = False
        return self.fence(partition), is_returned

    def _drop_ready(self, buffer: _PartitionBuffer) -> None:
        """Forget a buffer's waiting batches and its place in line; the lock is held."""
        if buffer.is_queued:
            self._line.remove(buffer)
            buffer.is_queued = False
        for batch in buffer.ready:
            self._buffered_bytes -= batch.size_bytes
            self._buffered_count -= len(batch.messages)
        buffer.ready.clear()

    def fail(self, error: MetaqError) -> None:
        """Let every `take` raise `error` after the messages fetched before it."""
        with self._lock:
            self._error = self._error or error
            self._arrival.notify_all()
            for sleeper in self._sleepers:
                _finish_soon(sleeper)
            self._sleepers.clear()

    # -- state ------------------------------------------------------------------------

    @property
    def error(self) -> BaseException | None:
        """Error given to `fail`."""
        return self._error

    @property
    def buffer_count(self) -> int:
        """Partitions that have a buffer."""
        return len(self._buffers)

    @property
    def has_waiters(self) -> bool:
        """Whether a worker waits for a batch."""
        return self._waiting_count > 0

    @property
    def asked_s(self) -> float:
        """Monotonic time at which a batch was last asked for; -inf before the first."""
        return self._asked_s

    @property
    def has_space(self) -> bool:
        """Whether the buffered bytes and messages leave room for more."""
        return (
            self._buffered_bytes < self._bytes_max
            and self._buffered_count < self._count_max
        )

    def is_current(self, batch: FetchedBatch) -> bool:
        """Return whether a batch is taken from a buffer that is still there."""
        buffer = self._buffers.get(batch.partition)
        return buffer is not None and buffer.taken is batch

    def handled(
        self, partitions: Collection[TopicPartition] | None = None
    ) -> dict[TopicPartition, GroupOffset]:
        """Return the handled offsets of all buffers or some; none of gone ones."""
        with self._lock:
            return {
                partition: buffer.handled
                if buffer.taken is None
                else _handled(buffer.handled, buffer.taken)
                for partition, buffer in self._buffers.items()
                if partitions is None or partition in partitions
            }

    def statistics(self) -> dict[TopicPartition, PartitionBufferStatistics]:
        """Return a snapshot of every buffer."""
        handled = self.handled()
        with self._lock:
            return {
                partition: PartitionBufferStatistics(
                    handled=handled.get(partition, buffer.handled),
                    buffered_count=sum(len(batch.messages) for batch in buffer.ready),
                    is_taken=buffer.taken is not None or buffer.is_paused,
                    progress_s=buffer.progress_s,
                )
                for partition, buffer in self._buffers.items()
            }


def _handled(before: GroupOffset, batch: FetchedBatch) -> GroupOffset:
    """Return the group offset behind the handled messages of a batch."""
    count = batch.handled
    if count == len(batch.messages):
        last = batch.messages[-1].id if batch.messages else before.message_id
        return GroupOffset(batch.next_offset, last)
    if not count:
        return before
    last_message = batch.messages[count - 1]
    return GroupOffset(last_message.next_offset, MessageId(last_message.id))


def _finish_soon(future: asyncio.Future[None]) -> None:
    future.get_loop().call_soon_threadsafe(_finish, future)


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
