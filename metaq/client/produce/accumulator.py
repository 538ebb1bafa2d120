"""Waiting messages: bounded batches per partition, for any thread.

Theory of operation. `append` is the one thing that happens per message: it chooses a
queue (a partition's batches), adds the payload to the queue's open batch under one
plain lock, and returns. The event loop is told once, when a queue that it knew to be
empty is not any more; from then on the delivery asks (`take`) whenever it can send, so
batches grow by themselves while others are in flight. Nothing here waits or does I/O,
but for `wait_room`, which blocks its caller.

A batch holds messages of one time-out only, so that its deadline is that of its first
message, and no clock is read for the others. The delivery seals a batch that waits
(`take_late`), so that later messages do not share an old deadline. When to look at a
batch for that, and for its deadline, stands in a heap (`take_due`): what has been
answered by then costs nothing.

The bounds are kept by `BufferMemory`, from which batches reserve room in advance.

    Invariant: a queue with messages to take is in `_ready`, or `is_awake` says that
    the delivery knows it.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NoReturn, cast

from metaq.client.errors import BufferFullError, MessageTooLargeError
from metaq.client.options import ProducerOptions
from metaq.client.partitioner import OutgoingMessage, Selector
from metaq.client.produce.batches import (
    Batch,
    BatchName,
    BatchOutcome,
    Home,
    SendFuture,
    ends_of,
)
from metaq.client.produce.partition_queue import PartitionQueue, PutConnection
from metaq.client.produce.routes import Routes, unknown_topic
from metaq.client.produce.runs import Appending, Run, frozen, list_messages, sort_runs
from metaq.client.timeouts import require_loop
from metaq.client.validation import SECONDS_MAX, check_timeout
from metaq.clock import Clock
from metaq.deadlines import Deadlines
from metaq.errors import ClosedError
from metaq.model import TopicPartition
from metaq.record.checksum import BytesLike
from metaq.record.flags import Headers, encode_payload
from metaq.record.layout import HEADER_BYTES

BATCH_AGE_SHARE: Final = 0.1
"""A batch that cannot be sent takes messages for this share of its time-out, so no
message fails earlier than that before its own deadline."""

BATCH_AGE_MAX_S: Final = 1.0
"""The same, for long time-outs."""

RESERVE_BYTES: Final = 32 * 1024
"""Room that a batch reserves at a time, beyond the message that needs it."""

RESERVE_COUNT: Final = 256
"""The same in messages."""

RESERVE_SHARE: Final = 16
"""No more than this part of the room that is left, so that little stays unused."""


@dataclass(frozen=True, slots=True)
class BufferStatistics:
    """A snapshot of the buffered messages."""

    appended_count: int
    """Messages taken from senders so far."""
    buffered_count: int
    """Of these, messages without an outcome."""
    buffered_bytes: int
    """Their bytes, record headers included."""
    full_count: int
    """Number of messages or lists that found no room."""


class BufferMemory:
    """Buffer memory: reservations of batches, and waiters for room.

    Room is reserved by batches, some at a time, so that the bounds are looked at once
    for many messages; a batch gives back unused room when it is sealed.

        Invariant: free memory and the reservations of unresolved batches add up to the
        bounds of the options.

    Concurrency: called under the buffer's lock, but for `refuse` of messages that never
    fit.
    """

    def __init__(self, options: ProducerOptions, lock: threading.Lock) -> None:
        """Start with all of it free.

        Args:
            options: how much there is.
            lock: the buffer's; `wait` lets go of it meanwhile.
        """
        self.free_bytes = options.buffer_bytes_max
        """Record bytes that are not reserved."""
        self.free_count = options.buffer_count_max
        """The same in messages."""
        self.full_count = 0
        """Number of messages or lists that found no room."""
        self.is_closed = False
        """No message is taken any more, so no caller waits for room."""
        self._bytes_max = options.buffer_bytes_max
        self._freed = threading.Condition(lock)
        self._waiter_count = 0
        self._callbacks: dict[Callable[[], None], None] = {}

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
        """Raise the error of `check`, and count it when there is no room."""
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
        self, batch: Batch, queue: PartitionQueue, size_bytes: int, message_count: int
    ) -> None:
        """Give a batch room for messages, which there is, and for some more.

        Args:
            batch: has given back its reservation; the messages fit into it.
            queue: bounds the batch.
            size_bytes: of the messages, headers included.
            message_count: how many they are.
        """
        share_bytes = min(RESERVE_BYTES, self.free_bytes // RESERVE_SHARE)
        spare_bytes = queue.bytes_max - batch.size_bytes
        grant_bytes = max(size_bytes, min(share_bytes, spare_bytes))
        share_count = min(RESERVE_COUNT, self.free_count // RESERVE_SHARE)
        spare_count = queue.count_max - len(batch.payloads)
        grant_count = max(message_count, min(share_count, spare_count))
        batch.reserved_bytes += grant_bytes
        batch.bytes_left = grant_bytes
        batch.reserved_count += grant_count
        self.free_bytes -= grant_bytes
        self.free_count -= grant_count

    def give_back(self, batch: Batch) -> None:
        """Free the unused reservation of a batch."""
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
        self._callbacks[callback] = None

    def forget(self, callback: Callable[[], None]) -> None:
        """Take a callback back; harmless when it was called."""
        self._callbacks.pop(callback, None)

    def wake(self) -> Iterable[Callable[[], None]]:
        """Wake blocked callers; return callbacks to call outside the lock."""
        if self._waiter_count:
            self._freed.notify_all()
        callbacks, self._callbacks = self._callbacks, {}
        return callbacks


class Accumulator:
    """Takes messages from any thread, gives batches to one event loop."""

    def __init__(
        self,
        *,
        options: ProducerOptions,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        on_ready: Callable[[], None],
        selector: Selector | None = None,
        first_turn: int = 1,
    ) -> None:
        """Start empty; called on the loop's thread.

        Args:
            options: bounds.
            clock: for deadlines.
            loop: where `on_ready` and everything of the batches is called back.
            on_ready: `take_ready` has something.
            selector: chooses partitions; None goes by the key of messages that have
                one, and round robin with the others.
            first_turn: where round robin begins, modulo the number of partitions.
        """
        self._options = options
        self._clock = clock
        self._loop = loop
        self._on_ready = on_ready
        self._lock = threading.Lock()
        # A third of the cost of `with`, twice a message.
        self._acquire, self._release = self._lock.acquire, self._lock.release
        self._memory = BufferMemory(options, self._lock)
        self._home = Home(self._lock, loop, threading.get_ident())
        self._ready: list[PartitionQueue] = []
        self._told: list[PartitionQueue] | None = None
        """The list in `_ready` that the delivery was told of last."""
        self._unanswered: dict[Batch, PartitionQueue] = {}
        self._due = Deadlines[Batch]()
        self.routes = Routes(options, selector, first_turn)
        """Queues of messages by topic; written on the loop."""
        self._timeout_s = options.timeout_s
        self._resolved_count = 0

    # -- for senders, from any thread -------------------------------------------------

    def knows(self, topic: str) -> bool:
        """Tell whether the topic's partitions are known, so that `append` takes it."""
        return topic in self.routes.queues

    def append(
        self,
        topic: str,
        data: BytesLike,
        attribute: str | None = None,
        key: str | bytes | None = None,
        partition: str | None = None,
        headers: Headers = (),
        timeout_s: float | None = None,
    ) -> SendFuture:
        """Add one message; never waits.

        Args:
            topic: one that is known.
            data: application bytes; mutable ones are copied.
            attribute: application attribute, or None.
            key: stored, chooses the partition; or None.
            partition: `<broker>-<partition>`, chooses it above all else.
            headers: names and bytes, stored in this order.
            timeout_s: bound on its sending; None is the producer's.

        Returns:
            Its future; messages of one thread lie in their partition in this order.

        Raises:
            BufferFullError: no room now; see `wait_room`.
            MessageTooLargeError: never any room, or its broker does not take it.
            NoBrokerError: the topic is not known, or the selector found no partition.
            LocalProtocolError: attribute, key, headers or partition cannot be written.
            ClosedError: the producer is closed, or of another event loop.
            TypeError: data, attribute, key or headers are of another type.
        """
        if timeout_s is None:
            timeout_s = self._timeout_s
        elif type(timeout_s) is not float or not 0 <= timeout_s <= SECONDS_MAX:
            check_timeout(timeout_s)
        if type(data) is bytes and attribute is None and key is None and not headers:
            payload, flag = data, 0
        else:
            data = frozen(data)
            payload, flag = encode_payload(data, attribute, key, headers)
        routes = self.routes
        may_move = key is None and partition is None and routes.is_default
        if may_move and topic in routes.queues:
            queues = routes.queues[topic]
            queue = queues[next(routes.turn) % len(queues)]
        else:
            message = OutgoingMessage(data, attribute, key, partition, headers)
            queue, may_move = routes.select(topic, message)
        size_bytes = len(payload) + HEADER_BYTES
        self._acquire()
        try:
            batch = queue.open
            if (
                batch is None
                or batch.bytes_left < size_bytes
                or len(batch.payloads) >= batch.reserved_count
                or batch.timeout_s != timeout_s
            ):
                batch = self._reserve(queue, size_bytes, 1, size_bytes, timeout_s)
            payloads = batch.payloads
            future = SendFuture(batch, len(payloads))
            if flag:
                batch.flags[len(payloads)] = flag
            payloads.append(payload)
            batch.bytes_left -= size_bytes
            if not may_move:
                batch.may_move = False
            if not queue.is_awake:
                self._note_ready(queue)
            ready = self._ready
        finally:
            self._release()
        # Told behind the lock: the delivery needs it, and would wait for it.
        if ready and self._told is not ready:
            self._tell_ready()
        return future

    def check_lasting(self, partition: TopicPartition, payload_bytes: int) -> None:
        """Refuse a message that is to be kept, and could not be appended later.

        Raises:
            MessageTooLargeError: it is larger than the buffer, or than what its broker
                announced last takes.
            ClosedError: the producer is closed.
        """
        size_bytes = payload_bytes + HEADER_BYTES
        self.routes.queue(partition).check(size_bytes, is_lasting=True)
        if size_bytes > self._options.buffer_bytes_max:
            self._memory.refuse(size_bytes, 1)

    def append_many(
        self,
        topic: str,
        messages: Iterable[BytesLike | OutgoingMessage],
        *,
        timeout_s: float | None = None,
    ) -> Appending:
        """Prepare to add a list; `Appending.step` adds it, as far as there is room.

        Without keys and with the default selector, contiguous pieces of up to a
        batch's size go to one partition after the other; else each message goes where
        the selector sends it, in order within its partition.

        Args:
            topic: one that is known.
            messages: bytes-like, or `OutgoingMessage` for those that need more.
            timeout_s: as in `append`.

        Raises:
            As `append`, but for what depends on room.
        """
        check_timeout(timeout_s)
        listed = list_messages(messages)
        order: list[int] | None = None
        if topic not in self.routes.queues:
            raise unknown_topic(topic)
        if not listed:
            runs: list[Run] = []
        elif self.routes.is_default and set(map(type, listed)) == {bytes}:
            payloads = cast("list[bytes]", listed)
            runs = [Run(None, payloads, [], may_move=True)]
        else:
            runs, order = sort_runs(listed, partial(self._select_run, topic))
        for run in runs:
            self._check_size(topic, run)
        if timeout_s is None:
            timeout_s = self._timeout_s
        return Appending(partial(self._add_piece, topic, timeout_s), runs, order)

    def append_batch(
        self,
        partition: TopicPartition,
        payloads: Sequence[bytes],
        flags: Sequence[int],
        name: BatchName,
    ) -> None:
        """Add messages that travel under a name of their own, with no others.

        More than the whole buffer takes is added when nothing else is in it.

        Args:
            partition: where they go, and stay.
            payloads: at least one; attribute block, if its flag says so, and
                application bytes each.
            flags: one for each payload.
            name: of the batch.

        Raises:
            BufferFullError: no room now; see `wait_room`.
            ClosedError: the producer is closed.
        """
        queue, options = self.routes.queue(partition), self._options
        ends = ends_of(payloads)
        size_bytes = ends[-1]
        with self._lock:
            self._memory.check(
                min(size_bytes, options.buffer_bytes_max),
                min(len(payloads), options.buffer_count_max),
            )
            batch = self._begin(queue, self._timeout_s)
            self._memory.reserve(batch, queue, size_bytes, len(payloads))
            batch.name, batch.may_move = name, False
            batch.add(payloads, ends)
            if any(flags):
                batch.flags = {at: flag for at, flag in enumerate(flags) if flag}
            self._seal(queue)
            self._wake(queue)

    def wait_room(
        self, timeout_s: float | None, *, size_bytes: int = 1, message_count: int = 1
    ) -> bool:
        """Block until there is room; False when there is none before the time is over.

        Another caller may take the room first.

        Args:
            timeout_s: None waits for ever.
            size_bytes: record bytes, header included.
            message_count: messages.

        Raises:
            RuntimeError: called on the loop's thread, which would wait for itself.
        """
        if self._home.is_here():
            raise RuntimeError("the event loop cannot wait for itself; use await")
        with self._lock:
            return self._memory.wait(
                timeout_s, size_bytes=size_bytes, message_count=message_count
            )

    def statistics(self) -> BufferStatistics:
        """Return a snapshot."""
        with self._lock:
            batches = list(self._unanswered)
            resolved_count, full_count = self._resolved_count, self._memory.full_count
            buffered_count = sum(len(batch.payloads) for batch in batches)
            buffered_bytes = sum(batch.size_bytes for batch in batches)
        return BufferStatistics(
            appended_count=resolved_count + buffered_count,
            buffered_count=buffered_count,
            buffered_bytes=buffered_bytes,
            full_count=full_count,
        )

    @property
    def has_unanswered(self) -> bool:
        """Whether any message has no outcome yet."""
        return bool(self._unanswered)

    # -- for the delivery, on the loop's thread ---------------------------------------

    def on_room(self, callback: Callable[[], None]) -> None:
        """Call back once, when a batch has been resolved or everything is closed."""
        with self._lock:
            if self._memory.is_closed:
                self._loop.call_soon(callback)
            else:
                self._memory.on_freed(callback)

    def forget_room(self, callback: Callable[[], None]) -> None:
        """Take back a callback of `on_room`; harmless when it was called."""
        with self._lock:
            self._memory.forget(callback)

    def set_connection(self, queue: PartitionQueue, connection: PutConnection) -> None:
        """Keep a queue's batches to the limits that its broker announced."""
        with self._lock:
            queue.set_connection(self._options, connection)
            if queue.open is not None:  # it may have reserved more than that
                self._memory.give_back(queue.open)

    def take_ready(self) -> list[PartitionQueue]:
        """Return the queues that got messages since they were found empty."""
        with self._lock:
            ready, self._ready = self._ready, []
            return ready

    def has_messages(self, queue: PartitionQueue) -> bool:
        """Tell whether there is something to take; if not, `on_ready` tells later."""
        with self._lock:
            queue.is_awake = bool(queue.sealed) or queue.open is not None
            return queue.is_awake

    def take(self, queue: PartitionQueue, now_s: float) -> Batch | float | None:
        """Take the queue's next batch, seal its open one for that.

        Returns:
            The batch; or the monotonic time until which the open one lingers, unless
            `on_ready` tells of it earlier because it is full; or None: there is
            nothing, and `on_ready` will tell when there is.
        """
        with self._lock:
            if queue.sealed:
                return queue.sealed.popleft()
            batch = queue.open
            if batch is None:
                queue.is_awake = False
                return None
            linger_s = batch.created_s + self._options.linger_s
            if linger_s > now_s:
                return linger_s
            self._seal(queue)
            return queue.sealed.popleft()

    def take_due(
        self, now_s: float, again_s: float
    ) -> list[tuple[Batch, PartitionQueue]]:
        """Return batches that are old, or have passed their deadline.

        Args:
            now_s: the time.
            again_s: after so long those past their deadline are returned again, as
                long as they have no outcome.

        Returns:
            Each with the queue that it began in.
        """
        with self._lock:
            due = self._due.take_due(now_s)
            for batch in due:
                is_late = batch.deadline_s <= now_s
                self._due.set(batch, now_s + again_s if is_late else batch.deadline_s)
            return [(batch, self._unanswered[batch]) for batch in due]

    def take_late(self, queue: PartitionQueue, now_s: float) -> list[Batch]:
        """Take batches that cannot be sent in time any more, and seal old ones."""
        with self._lock:
            batch = queue.open
            if batch and now_s - batch.created_s >= _age_s(batch.timeout_s):
                self._seal(queue)
            late = [batch for batch in queue.sealed if batch.deadline_s <= now_s]
            if late:
                left = (b for b in queue.sealed if b.deadline_s > now_s)
                queue.sealed = deque(left)
            return late

    def take_movable(self, queue: PartitionQueue) -> list[Batch]:
        """Take batches that may go to another partition."""
        with self._lock:
            self._seal(queue)
            movable = [batch for batch in queue.sealed if batch.may_move]
            queue.sealed = deque(b for b in queue.sealed if not b.may_move)
            return movable

    def resolve(self, batch: Batch, outcomes: Sequence[BatchOutcome]) -> None:
        """Set the outcomes of a batch, and free its room."""
        with self._lock:
            del self._unanswered[batch]
            self._due.clear(batch)
            self._memory.release(batch)
            self._resolved_count += len(batch.payloads)
            callbacks = self._memory.wake()
        batch.resolve(outcomes)
        for callback in callbacks:
            callback()

    def unanswered(self) -> list[Batch]:
        """Return every batch without an outcome, after sealing open ones.

        Messages appended from now on are in none of them.
        """
        with self._lock:
            for queue in self.routes.everything():
                self._seal(queue)
            return list(self._unanswered)

    def close(self) -> None:
        """Refuse messages from now on; waiting ones stay."""
        with self._lock:
            self._memory.is_closed = True
            for queue in self.routes.everything():
                self._seal(queue)  # its room goes, so the next message asks for some
            callbacks = self._memory.wake()
        for callback in callbacks:
            callback()

    # -- inside -----------------------------------------------------------------------

    def _select_run(
        self, topic: str, message: OutgoingMessage
    ) -> tuple[PartitionQueue | None, bool]:
        """Return a message's queue; None where all may go anywhere."""
        is_keyed = message.key is not None or message.partition is not None
        if self.routes.is_default and not is_keyed:
            return None, True
        return self.routes.select(topic, message)

    def _add_piece(
        self, topic: str, timeout_s: float, run: Run
    ) -> tuple[Batch, int, int]:
        """Add the next piece of a run, to the open batch if the whole piece fits.

        Returns:
            The batch, where in it the piece begins, and how many messages it has.

        Raises:
            BufferFullError: no room now.
            ClosedError: the producer is closed.
        """
        queue = run.queue or self.routes.next_queue(topic)
        options = self._options
        piece = run.piece(
            min(queue.bytes_max, options.buffer_bytes_max),
            min(queue.count_max, options.buffer_count_max),
        )
        message_count, size_bytes = len(piece.payloads), piece.ends[-1] - piece.ends[0]
        with self._lock:
            batch = self._reserve(queue, size_bytes, message_count, 0, timeout_s)
            first = len(batch.payloads)
            for at, flag in enumerate(piece.flags or (), first):
                if flag:
                    batch.flags[at] = flag
            batch.add(piece.payloads, piece.ends)
            batch.may_move = batch.may_move and run.may_move
            self._wake(queue)
        return batch, first, message_count

    def _check_size(self, topic: str, run: Run) -> None:
        size_bytes = run.largest_bytes
        for queue in self.routes.queues[topic] if run.queue is None else (run.queue,):
            queue.check(size_bytes)
        if size_bytes > self._options.buffer_bytes_max:
            self._memory.refuse(size_bytes, 1)

    def _reserve(
        self,
        queue: PartitionQueue,
        size_bytes: int,
        message_count: int,
        largest_bytes: int,
        timeout_s: float,
    ) -> Batch:
        """Return the queue's open batch, with room for messages; under the lock.

        Some more room than that is reserved, so that not each message has to ask.
        """
        if self._home.is_here():
            # Another loop in this thread means that ours does not run.
            require_loop(self._loop, "the producer")
        if queue.open is not None:
            self._memory.give_back(queue.open)
        self._memory.check(size_bytes, message_count)
        queue.check(largest_bytes)
        batch = queue.open
        if (
            batch is None
            or batch.size_bytes + size_bytes > queue.bytes_max
            or len(batch.payloads) + message_count > queue.count_max
            or batch.timeout_s != timeout_s
        ):
            batch = self._begin(queue, timeout_s)
        self._memory.reserve(batch, queue, size_bytes, message_count)
        return batch

    def _begin(self, queue: PartitionQueue, timeout_s: float) -> Batch:
        """Begin another open batch; under the lock."""
        if queue.open is not None:
            self._seal(queue)
            if self._options.linger_s:
                self._note_ready(queue)
                self._tell_ready()
        now_s = self._clock.monotonic_s()
        batch = Batch(self._home, created_s=now_s, timeout_s=timeout_s, may_move=True)
        self._unanswered[batch] = queue
        self._due.set(batch, now_s + _age_s(timeout_s))
        queue.open = batch
        return batch

    def _seal(self, queue: PartitionQueue) -> None:
        """Put the open batch, if there is one, behind the sealed; under the lock."""
        if queue.open is not None:
            self._memory.give_back(queue.open)
            queue.sealed.append(queue.open)
            queue.open = None

    def _wake(self, queue: PartitionQueue) -> None:
        """Have the delivery look at a queue, unless it does; under the lock."""
        if not queue.is_awake:
            self._note_ready(queue)
        self._tell_ready()

    def _note_ready(self, queue: PartitionQueue) -> None:
        """Note a queue for `take_ready`; under the lock. `_tell_ready` follows."""
        queue.is_awake = True
        self._ready.append(queue)

    def _tell_ready(self) -> None:
        """Tell the delivery of noted queues, unless it was told and did not come yet.

        An interrupt in here keeps no message back: the next one tells of both.
        """
        ready = self._ready
        if not ready or self._told is ready:
            return
        if self._home.is_here():
            self._loop.call_soon(self._on_ready)
        else:
            self._loop.call_soon_threadsafe(self._on_ready)
        # The delivery may have taken it by now, and then this is of no importance.
        self._told = ready


def _age_s(timeout_s: float) -> float:
    """Return for how long a batch of messages with this time-out takes more."""
    return min(BATCH_AGE_MAX_S, timeout_s * BATCH_AGE_SHARE)
