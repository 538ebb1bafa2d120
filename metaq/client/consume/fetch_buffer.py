"""Fetch buffer: fetched batches on their way to handlers, and the handled offsets.

    fetcher --put--> [buffer of a partition] --take--> worker --done--> handled offset

Theory of operation. There is one buffer per assigned partition. Only one worker at a
time has a batch of a buffer, so each partition is handled in order by any number of
workers. Buffers with batches wait in a queue and take turns. Whole batches are passed
on, not single messages: the lock is taken once per batch, and a taken batch counts its
own handled messages.

A message counts as *handled* when the worker requests the next one
(`current_batch.py`), or calls `FetchedBatch.confirm`. `handled` returns the offset
after the last handled message of each partition, for a commit.

`fence` removes a buffer at once. Before it, `drain` stops the taken batch and waits,
for a bounded time, until its worker gives it back. After the removal, calls of this
worker change nothing, and a commit of its batch is refused (`is_current`).

A worker may hold batches of several partitions, all but the last handed out to the end.
If it takes more of a partition that it holds, the new batch is joined to the held one
(`grown`). So a buffer has at most one taken batch, which has all of its messages that
are being handled.

Messages of a buffer are held back in two cases. After a failure a worker gives its
batch back *delayed*: the worker is free for others, and nothing of the buffer is handed
out before `end_delay`. A user *pauses* a partition: nothing of it is fetched or handed
out before `resume`, and a worker that has a batch of it gives it back when it requests
the next message. Messages of paused partitions do not count as buffered, because they
would leave no space for the others.

    Invariant: a buffer has at most one taken batch, which belongs to one worker.
    Invariant: the handled offset of a buffer never decreases.
    Invariant: buffered bytes are those of batches that were put and not taken, without
    those of paused partitions.
    Invariant: a queued buffer has a batch, no worker holds one of its batches, and it
    is not paused, delayed, held or ending.

Concurrency: everything may be called from any thread unless documented otherwise.
"""

import asyncio
import math
import threading
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import MISSING, dataclass, field
from functools import partial
from operator import attrgetter
from typing import Final

from metaq.client.consume.fetched_batch import FetchedBatch
from metaq.client.names import name_some
from metaq.client.timeouts import finish, wait_for
from metaq.clock import Clock
from metaq.errors import MetaqError
from metaq.model import GroupOffset, Message, Offset, TopicPartition
from metaq.stats import gauge

PARTITION_BATCHES_MAX: Final = 2
"""Number of batches prefetched per partition: one to take while the next arrives."""


@dataclass(slots=True, eq=False)
class _PartitionBuffer:
    partition: TopicPartition
    before: GroupOffset
    """Handled offset at the start of `taken`."""
    progress_s: float
    ready: deque[FetchedBatch] = field(default_factory=deque)
    taken: FetchedBatch | None = None
    is_paused: bool = False
    is_delayed: bool = False
    """Whether nothing is handed out for a while, because one of its messages failed."""
    is_held: bool = False
    """Whether nothing is handed out because `on_assigned` has not returned."""
    is_ending: bool = False
    returned: list[Callable[[], None]] = field(default_factory=list)

    def handled(self) -> GroupOffset:
        """Return the group offset after the last handled message."""
        batch = self.taken
        count = 0 if batch is None else batch.handled
        if batch is None or not count:
            return self.before
        last = batch.messages[count - 1]
        is_all = count == len(batch.messages)
        return GroupOffset(batch.next_offset if is_all else last.next_offset, last.id)


@dataclass(frozen=True, slots=True)
class PartitionBufferStatistics:
    """A snapshot of one buffer."""

    handled: GroupOffset = gauge(
        "metaq_consumer_handled_bytes",
        "Offset after the last handled message; `metaq_log_end_bytes` is the end.",
        default=MISSING,
        read=lambda handled: handled.offset,
        combine=max,
    )
    """The offset that a commit would store."""
    buffered_count: int = gauge(
        "metaq_consumer_buffered_messages",
        "Messages fetched and not handed out.",
        combine=max,
    )
    is_taken: bool = False
    """Whether a worker has one of its batches, or it is delayed or held."""
    is_paused: bool = False
    """Whether the user paused it."""
    progress_s: float = 0.0
    """Monotonic time of the last progress: a batch was put, taken or given back, or
    handing out was stopped or resumed."""


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
        """Create it without buffers.

        Both callbacks may be called from any thread, without the lock.

        Args:
            clock: for `progress_s`.
            buffer_bytes_max: number of buffered bytes at which no further batch is
                fetched; batches in flight are still accepted.
            buffer_count_max: number of buffered messages, likewise.
            on_room: called when more may be fetched after `has_room` returned False.
            on_handled: called with the handled messages of a batch when it is given
                back or fenced, or at `report_handled`; once for each message.
        """
        self._clock = clock
        self._bytes_max = buffer_bytes_max
        self._count_max = buffer_count_max
        self._on_room = on_room
        self._on_handled = on_handled
        self._lock = threading.Lock()
        self._arrival = threading.Condition(self._lock)
        self._buffers: dict[TopicPartition, _PartitionBuffer] = {}
        self._queue: OrderedDict[_PartitionBuffer, None] = OrderedDict()
        self._replayed: deque[FetchedBatch] = deque()
        self._sleepers: set[asyncio.Future[None]] = set()
        self.error: BaseException | None = None
        """First error given to `fail`."""
        self.is_call_due: Callable[[], bool] = lambda: False
        """Whether waiting threads have other work to do; checked after `wake`."""
        self._buffered_bytes = 0
        self._buffered_count = 0
        self._is_room_wanted = False
        self._waiting_count = 0
        self.asked_s = -math.inf
        """Monotonic time of the last request for a batch; -inf before the first."""

    # -- the fetcher's side -----------------------------------------------------------

    def add(
        self,
        partition: TopicPartition,
        handled: GroupOffset,
        *,
        is_paused: bool = False,
        is_held: bool = False,
    ) -> None:
        """Open a buffer; `handled` is the offset at which reading begins.

        With `is_held` nothing is handed out before `unhold`.
        """
        with self._lock:
            assert partition not in self._buffers, partition
            buffer = _PartitionBuffer(partition, handled, self._clock.monotonic_s())
            buffer.is_paused, buffer.is_held = is_paused, is_held
            self._buffers[partition] = buffer

    def unhold(self, partition: TopicPartition) -> None:
        """Hand out messages of a partition added with `is_held`; else do nothing."""
        with self._lock:
            buffer = self._buffers.get(partition)
            if buffer is not None:
                buffer.is_held = False
                buffer.progress_s = self._clock.monotonic_s()
                self._enqueue(buffer)

    def has_room(self, partition: TopicPartition) -> bool:
        """Return whether one more batch may be fetched; if not, `on_room` follows.

        False, without that call, for a partition that has no buffer.
        """
        with self._lock:
            buffer = self._buffers.get(partition)
            if buffer is None:
                return False
            has_room = (
                not buffer.is_ending
                and not buffer.is_paused
                and len(buffer.ready) < PARTITION_BATCHES_MAX
                and self.has_space
            )
            self._is_room_wanted |= not has_room
            return has_room

    def put(self, batch: FetchedBatch) -> None:
        """Add a fetched batch; an empty one only advances the offset.

        It is dropped if the buffer is gone or ending.
        """
        with self._lock:
            buffer = self._buffers.get(batch.partition)
            if buffer is None or buffer.is_ending:
                return
            buffer.progress_s = self._clock.monotonic_s()
            last = buffer.ready[-1] if buffer.ready else buffer.taken
            if batch.messages:
                buffer.ready.append(batch)
                self._count(buffer, batch.size_bytes, len(batch.messages))
                self._enqueue(buffer)
                if buffer.taken is not None and buffer.taken.is_awaited:
                    self._wake_all()
            elif last is not None:
                last.next_offset = batch.next_offset
            else:
                message_id = buffer.before.message_id
                buffer.before = GroupOffset(batch.next_offset, message_id)

    def _enqueue(self, buffer: _PartitionBuffer) -> None:
        """Queue a buffer if it has a batch to take; the lock is held."""
        if buffer in self._queue or buffer.taken is not None or not buffer.ready:
            return
        if buffer.is_paused or buffer.is_delayed or buffer.is_held or buffer.is_ending:
            return
        self._queue[buffer] = None
        self._wake()

    def _count(
        self, buffer: _PartitionBuffer, size_bytes: int, message_count: int
    ) -> None:
        """Count added, or with negative numbers removed, messages; the lock is held."""
        if not buffer.is_paused:
            self._buffered_bytes += size_bytes
            self._buffered_count += message_count

    def _recount(self) -> None:
        """Count all buffered messages again; the lock is held."""
        self._buffered_bytes = self._buffered_count = 0
        for buffer in self._buffers.values():
            for batch in buffer.ready:
                self._count(buffer, batch.size_bytes, len(batch.messages))

    def _wake(self) -> None:
        """Wake one worker; the lock is held."""
        self._arrival.notify()
        if self._sleepers:
            _finish_soon(self._sleepers.pop())

    def _wake_all(self) -> None:
        """Wake every worker; the lock is held."""
        self._arrival.notify_all()
        for sleeper in self._sleepers:
            _finish_soon(sleeper)
        self._sleepers.clear()

    # -- the worker's side ------------------------------------------------------------

    def take_nowait(self, held: Sequence[FetchedBatch] = ()) -> FetchedBatch | None:
        """Return the next batch; None if there is none now.

        Args:
            held: batches of the worker, which are handed out to the end. If no other
                partition has a batch, one of these is replaced by the returned batch,
                which begins with its messages that are being handled.

        Raises:
            MetaqError: the error of `fail`, once all fetched messages were taken.
        """
        with self._lock:
            batch = self._take(held)
        if batch is not None:
            self._announce_room()
        return batch

    def take(self, timeout_s: float | None) -> FetchedBatch | None:
        """Wait for a batch, up to `timeout_s`; not on the event loop's thread.

        Returns:
            The batch, taken until `done`; None on a time-out, if `is_call_due`, or if
            another worker was faster.
        """
        batch = self.take_nowait()
        if batch is None and self.wait(timeout_s, ()):
            batch = self.take_nowait()
        return batch

    def wake(self) -> None:
        """Wake waiting threads, which check `is_call_due`."""
        with self._lock:
            self._arrival.notify_all()

    async def take_async(self) -> FetchedBatch:
        """Wait for a batch on an event loop. Cancellation: nothing is taken."""
        while True:
            batch = self.take_nowait()
            if batch is not None:
                return batch
            await self.wait_async()

    def wait(self, timeout_s: float | None, held: Sequence[FetchedBatch]) -> bool:
        """Wait as `wait_async`, on a thread; return False on a time-out.

        Args:
            timeout_s: maximum wait, in seconds; None waits without a limit.
            held: as for `take_nowait`.
        """
        with self._lock:
            self._waiting_count += 1
            try:
                is_met = partial(self._has_something, held)
                return wait_for(self._arrival, is_met, timeout_s)
            finally:
                self._waiting_count -= 1

    async def wait_async(self, held: Sequence[FetchedBatch] = ()) -> None:
        """Wait until there is a batch to take, or a held batch was halted.

        It may return too early, and another worker may take the batch.
        """
        sleeper: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._lock:
            if self._has_something(held):
                return
            self._sleepers.add(sleeper)
            self._waiting_count += 1
        is_awake = False
        try:
            await sleeper
            is_awake = True
        finally:
            with self._lock:
                self._sleepers.discard(sleeper)
                self._waiting_count -= 1
                if not is_awake and (self._queue or self._replayed):
                    # This worker may have been the one that was woken: wake another.
                    self._wake()

    def _has_something(self, held: Sequence[FetchedBatch]) -> bool:
        for batch in held:
            batch.is_awaited = True
            if batch.is_halted or self._has_more(batch):
                return True
        is_over = self.error is not None or self.is_call_due()
        return bool(self._queue or self._replayed) or is_over

    def _has_more(self, held: FetchedBatch) -> bool:
        """Return whether the buffer has the batch after one that a worker holds."""
        buffer = self._buffers.get(held.partition)
        return buffer is not None and buffer.taken is held and bool(buffer.ready)

    def _take(self, held: Sequence[FetchedBatch] = ()) -> FetchedBatch | None:
        """Take the next batch of the queue, or of a `held` one; the lock is held."""
        self.asked_s = self._clock.monotonic_s()
        if self._replayed:
            return self._replayed.popleft()
        if self._queue:
            buffer, _ = self._queue.popitem(last=False)
            return self._take_first(buffer, buffer.ready[0])
        for batch in held:
            if self._has_more(batch) and not batch.is_halted:
                buffer = self._buffers[batch.partition]
                grown = batch.grown(buffer.ready[0])
                buffer.before = buffer.handled()
                return self._take_first(buffer, grown)
        if self.error is not None:
            # Other waiting workers raise it too.
            self._arrival.notify_all()
            raise self.error
        return None

    def _take_first(
        self, buffer: _PartitionBuffer, batch: FetchedBatch
    ) -> FetchedBatch:
        """Take the first ready batch of a buffer as `batch`; the lock is held."""
        first = buffer.ready[0]
        # Taken before it is removed from `ready`: see `recover`.
        buffer.taken = batch
        buffer.ready.popleft()
        buffer.progress_s = self.asked_s
        self._count(buffer, -first.size_bytes, -len(first.messages))
        return batch

    def report_handled(self) -> None:
        """Call `on_handled` now for the handled messages of taken batches."""
        with self._lock:
            taken = [one.taken for one in self._buffers.values() if one.taken]
        for batch in taken:
            self._report_handled(batch)

    def _report_handled(self, batch: FetchedBatch) -> None:
        if self._on_handled is None:
            return
        with self._lock:
            count = batch.handled
            fresh = batch.messages[batch.reported : count]
            batch.reported = max(batch.reported, count)
        if fresh:
            self._on_handled(fresh)

    def _announce_room(self) -> None:
        if self._is_room_wanted:
            self._is_room_wanted = False
            self._on_room()

    def done(self, batch: FetchedBatch, *, is_delayed: bool = False) -> None:
        """Give a batch back; its unhandled messages are handed out again.

        Nothing is handed out again if its buffer is gone, or the batch was stopped: the
        next reader of the partition begins with these messages.

        Args:
            batch: the batch taken before.
            is_delayed: hand out nothing of its partition before `end_delay`.
        """
        batch.recall()  # a loop over it may still run
        self._report_handled(batch)
        with self._lock:
            buffer = self._buffers.get(batch.partition)
            if buffer is None or buffer.taken is not batch:
                return
            buffer.is_delayed = is_delayed
            buffer.is_ending = batch.is_stopped
            rest = batch.messages[batch.handled :]
            if rest and not batch.is_stopped:
                left = FetchedBatch(
                    batch.partition,
                    rest,
                    batch.next_offset,
                    size_bytes=0,
                    is_fresh=batch.is_fresh,
                )
                buffer.ready.appendleft(left)
                self._count(buffer, 0, len(rest))
            # After the rest was added: see `recover`.
            buffer.before = buffer.handled()
            buffer.taken = None
            buffer.progress_s = self._clock.monotonic_s()
            self._enqueue(buffer)
            returned, buffer.returned = buffer.returned, []
        for on_return in returned:
            on_return()
        self._announce_room()

    def recover(self) -> None:
        """Repair the state after an interrupt of the only reader.

        Taken batches are given back. At any point at which Ctrl-C may interrupt `_take`
        or `done`, a batch is in `taken`, in `ready`, or in both: this removes
        duplicates.
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
            self._recount()
            for buffer in self._buffers.values():
                self._enqueue(buffer)
        self._on_room()

    def end_delay(self, partition: TopicPartition) -> None:
        """Hand out messages of a delayed partition again; else do nothing."""
        with self._lock:
            buffer = self._buffers.get(partition)
            if buffer is not None:
                buffer.is_delayed = False
                buffer.progress_s = self._clock.monotonic_s()
                self._enqueue(buffer)

    def set_paused(
        self, partitions: Collection[TopicPartition], *, is_paused: bool
    ) -> None:
        """Pause partitions, or resume them; those without a buffer are ignored.

        Nothing of a paused partition is fetched or handed out; a taken batch of it is
        given back when its worker requests the next message.
        """
        with self._lock:
            for buffer in map(self._buffers.get, partitions):
                if buffer is None:
                    continue
                buffer.is_paused = is_paused
                buffer.progress_s = self._clock.monotonic_s()
                self._queue.pop(buffer, None)
                self._enqueue(buffer)
                if is_paused and buffer.taken is not None:
                    buffer.taken.recall()
            self._recount()
            self._wake_all()
        self._on_room()

    def paused(self) -> frozenset[TopicPartition]:
        """Return the partitions that the user paused."""
        with self._lock:
            return frozenset(
                one for one, buffer in self._buffers.items() if buffer.is_paused
            )

    def put_replayed(self, batch: FetchedBatch) -> None:
        """Hand a batch to the next free worker; it has no buffer and no offset."""
        with self._lock:
            self._replayed.append(batch)
            self._wake()

    def drop_replayed(self) -> None:
        """Drop the replayed batches that were not taken."""
        with self._lock:
            self._replayed.clear()

    # -- the end of a buffer ----------------------------------------------------------

    def fence(self, partition: TopicPartition) -> GroupOffset | None:
        """Remove a buffer at once; return its handled offset, None without a buffer."""
        with self._lock:
            buffer = self._buffers.pop(partition, None)
            if buffer is None:
                return None
            if buffer.taken is not None:
                buffer.taken.stop()
                self._wake_all()
            handled = buffer.handled()
            self._drop_ready(buffer)
        if buffer.taken is not None:
            self._report_handled(buffer.taken)
        for on_return in buffer.returned:
            on_return()
        self._announce_room()
        return handled

    async def drain(self, partition: TopicPartition, *, timeout_s: float) -> bool:
        """Stop a buffer, and wait until its batch is given back; call `fence` next.

        Returns:
            False if it was not given back in time; True also without a buffer.
        """
        returned: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._lock:
            buffer = self._buffers.get(partition)
            if buffer is None:
                return True
            self._drop_ready(buffer)
            if buffer.taken is None:
                buffer.is_ending = True
                returned.set_result(None)
            else:
                buffer.taken.stop()
                buffer.returned.append(partial(_finish_soon, returned))
                self._wake_all()
        await asyncio.wait([returned], timeout=timeout_s)
        return returned.done()

    def _drop_ready(self, buffer: _PartitionBuffer) -> None:
        """Drop a buffer's waiting batches, and unqueue it; the lock is held."""
        self._queue.pop(buffer, None)
        for batch in buffer.ready:
            self._count(buffer, -batch.size_bytes, -len(batch.messages))
        buffer.ready.clear()

    def fail(self, error: MetaqError) -> None:
        """Have every `take` raise `error`, after all fetched messages were taken."""
        with self._lock:
            self.error = self.error or error
            self._wake_all()

    # -- state ------------------------------------------------------------------------

    @property
    def buffer_count(self) -> int:
        """Number of partitions that have a buffer."""
        return len(self._buffers)

    @property
    def has_waiters(self) -> bool:
        """Whether a worker waits for a batch."""
        return self._waiting_count > 0

    def reached_bounds(self) -> list[str]:
        """Return a text for each limit that stops fetching now."""
        with self._lock:
            reached = {
                f"buffer_bytes_max={self._bytes_max} bytes": (
                    self._buffered_bytes >= self._bytes_max
                ),
                f"buffer_count_max={self._count_max} messages": (
                    self._buffered_count >= self._count_max
                ),
            }
            full = [
                one
                for one, buffer in self._buffers.items()
                if len(buffer.ready) >= PARTITION_BATCHES_MAX and not buffer.is_paused
            ]
        reached[f"{PARTITION_BATCHES_MAX} gets of {name_some(full)}"] = bool(full)
        return [
            f"{what} fetched and not handed out" for what in reached if reached[what]
        ]

    @property
    def has_space(self) -> bool:
        """Whether buffered bytes and messages are below their bounds."""
        return (
            self._buffered_bytes < self._bytes_max
            and self._buffered_count < self._count_max
        )

    def is_current(self, batch: FetchedBatch) -> bool:
        """Return whether a batch is taken from a buffer that was not removed."""
        buffer = self._buffers.get(batch.partition)
        return buffer is not None and buffer.taken is batch

    def lacks(self, partition: TopicPartition, offset: Offset) -> bool:
        """Return whether an offset is not known to be a message boundary.

        Known boundaries are the handled offset before the taken batch and the ends of
        its messages. False for a partition without a buffer.
        """
        with self._lock:
            buffer = self._buffers.get(partition)
            if buffer is None or offset == buffer.before.offset:
                return False
            messages = buffer.taken.messages if buffer.taken is not None else ()
        at = bisect_left(messages, offset, key=attrgetter("next_offset"))
        near = messages[at : at + 1]
        return not any(offset in {one.offset, one.next_offset} for one in near)

    def handled(self) -> dict[TopicPartition, GroupOffset]:
        """Return the handled offset of every buffer."""
        with self._lock:
            return {one: buffer.handled() for one, buffer in self._buffers.items()}

    def statistics(self) -> dict[TopicPartition, PartitionBufferStatistics]:
        """Return a snapshot of every buffer."""
        with self._lock:
            return {
                partition: PartitionBufferStatistics(
                    handled=buffer.handled(),
                    buffered_count=sum(len(batch.messages) for batch in buffer.ready),
                    is_taken=buffer.taken is not None
                    or buffer.is_delayed
                    or buffer.is_held,
                    is_paused=buffer.is_paused,
                    progress_s=buffer.progress_s,
                )
                for partition, buffer in self._buffers.items()
            }


def _finish_soon(future: asyncio.Future[None]) -> None:
    future.get_loop().call_soon_threadsafe(finish, future, None)
