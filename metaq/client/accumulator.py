"""Where messages wait to be sent: bounded batches per partition, for any thread.

Theory of operation. `append` is the one thing that happens per message: it chooses a
lane (a partition's batches), adds the payload to the lane's open batch under one plain
lock, and returns. The event loop is told once, when a lane that it knew to be empty is
not any more; from then on the delivery asks (`take`) whenever it can send, so batches
grow by themselves while others are in flight. Nothing here waits or does I/O, but for
`wait_room`, which blocks its caller.

A batch holds messages of one time-out only, so that its deadline is that of its first
message, and no clock is read for the others. The delivery seals a batch that waits
(`take_late`), so that later messages do not share an old deadline.

The bounds are kept by `room.py`, from which batches reserve room in advance.

    Invariant: a lane with messages to take is in `_ready`, or `is_awake` says that
    the delivery knows it.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, cast

from metaq.client.batches import Batch, Home, Outcome, SendFuture
from metaq.client.lanes import Announcer, Lane
from metaq.client.numbers import SECONDS_MAX, check_timeout
from metaq.client.options import ProducerOptions
from metaq.client.partitioner import OutgoingMessage, Selector
from metaq.client.room import Room
from metaq.client.routes import Routes, unknown_topic
from metaq.client.runs import Appending, Run, frozen, sort_runs
from metaq.clock import Clock
from metaq.model import TopicPartition
from metaq.record.checksum import BytesLike
from metaq.record.flags import encode_payload
from metaq.record.layout import HEADER_BYTES

BATCH_AGE_SHARE: Final = 0.1
"""A batch that cannot be sent takes messages for this share of its time-out, so no
message fails earlier than that before its own deadline."""

BATCH_AGE_MAX_S: Final = 1.0
"""The same, for long time-outs."""


@dataclass(frozen=True, slots=True)
class BufferStatistics:
    """A snapshot of what is buffered."""

    appended_count: int
    """Messages taken from senders so far."""
    buffered_count: int
    """Of these, messages without an outcome."""
    buffered_bytes: int
    """Their bytes, record headers included."""
    full_count: int
    """How often a message or a list found no room."""


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
    ) -> None:
        """Start empty; called on the loop's thread.

        Args:
            options: bounds.
            clock: for deadlines.
            loop: where `on_ready` and everything of the batches is called back.
            on_ready: `take_ready` has something.
            selector: chooses partitions; None goes by the key of messages that have
                one, and round robin with the others.
        """
        self._options = options
        self._clock = clock
        self._loop = loop
        self._on_ready = on_ready
        self._lock = threading.Lock()
        # A third of what `with` costs, twice a message.
        self._acquire, self._release = self._lock.acquire, self._lock.release
        self._room = Room(options, self._lock)
        self._home = Home(self._lock, loop, threading.get_ident())
        self._ready: list[Lane] = []
        self._unanswered: dict[Batch, None] = {}
        self.routes = Routes(options, selector)
        """Which lane a message goes to; written on the loop."""
        self._timeout_s = options.timeout_s
        self._resolved_count = 0

    # -- for senders, from any thread -------------------------------------------------

    def knows(self, topic: str) -> bool:
        """Tell whether the topic's partitions are known, so that `append` takes it."""
        return topic in self.routes.lanes

    def append(
        self,
        topic: str,
        data: BytesLike,
        attribute: str | None = None,
        key: str | bytes | None = None,
        partition: str | None = None,
        timeout_s: float | None = None,
    ) -> SendFuture:
        """Add one message; never waits.

        Args:
            topic: one that is known.
            data: application bytes; what may change is copied.
            attribute: application attribute, or None.
            key: chooses the partition, or None.
            partition: `<broker>-<partition>`, chooses it above all else.
            timeout_s: bound on its sending; None is the producer's.

        Returns:
            Its future; messages of one thread lie in their partition in this order.

        Raises:
            BufferFullError: no room now; see `wait_room`.
            MessageTooLargeError: never any room, or its broker does not take it.
            NoBrokerError: the topic is not known, or the selector found no partition.
            LocalProtocolError: attribute or partition cannot be written.
            ClosedError: the producer is closed.
            TypeError: data is not bytes-like.
        """
        if timeout_s is None:
            timeout_s = self._timeout_s
        elif type(timeout_s) is not float or not 0 <= timeout_s <= SECONDS_MAX:
            check_timeout(timeout_s)
        flag = 0
        if type(data) is not bytes or attribute is not None:
            data, flag = encode_payload(frozen(data), attribute)
        routes = self.routes
        may_move = key is None and partition is None and routes.is_default
        if may_move and topic in routes.lanes:
            lanes = routes.lanes[topic]
            lane = lanes[next(routes.turn) % len(lanes)]
        else:
            message = OutgoingMessage(data, attribute, key, partition)
            lane, may_move = routes.select(topic, message)
        size_bytes = len(data) + HEADER_BYTES
        self._acquire()
        try:
            batch = lane.open
            if (
                batch is None
                or batch.bytes_left < size_bytes
                or len(batch.payloads) >= batch.reserved_count
                or batch.timeout_s != timeout_s
            ):
                batch = self._reserve(lane, size_bytes, 1, size_bytes, timeout_s)
            payloads = batch.payloads
            future = SendFuture(batch, len(payloads))
            if flag:
                batch.flags[len(payloads)] = flag
            payloads.append(data)
            batch.bytes_left -= size_bytes
            if not may_move:
                batch.may_move = False
            if not lane.is_awake:
                self._wake(lane)
        finally:
            self._release()
        return future

    def check_lasting(self, partition: TopicPartition, payload_bytes: int) -> None:
        """Refuse a message that is to be kept, and could not be appended later.

        Raises:
            MessageTooLargeError: it is larger than the buffer, or than what its broker
                announced last takes.
            ClosedError: the producer is closed.
        """
        size_bytes = payload_bytes + HEADER_BYTES
        self.routes.lane(partition).check(size_bytes, is_lasting=True)
        if size_bytes > self._options.buffer_bytes_max:
            self._room.refuse(size_bytes, 1)

    def append_many(
        self,
        topic: str,
        messages: Iterable[BytesLike | OutgoingMessage],
        *,
        timeout_s: float | None = None,
    ) -> "Appending":
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
        listed = list(messages)
        order: list[int] | None = None
        if topic not in self.routes.lanes:
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
        return Appending(self, topic, runs, order, timeout_s)

    def add_piece(
        self, topic: str, run: Run, timeout_s: float
    ) -> tuple[Batch, int, int]:
        """Add the next piece of a run, to the open batch if the whole piece fits.

        Returns:
            The batch, where in it the piece begins, and how many messages it has.

        Raises:
            BufferFullError: no room now.
            ClosedError: the producer is closed.
        """
        lane = run.lane or self.routes.next_lane(topic)
        options = self._options
        piece = run.piece(
            min(lane.bytes_max, options.buffer_bytes_max),
            min(lane.count_max, options.buffer_count_max),
        )
        message_count = len(piece.payloads)
        with self._lock:
            batch = self._reserve(lane, piece.size_bytes, message_count, 0, timeout_s)
            first = len(batch.payloads)
            for at, flag in enumerate(piece.flags or (), first):
                if flag:
                    batch.flags[at] = flag
            batch.payloads += piece.payloads
            batch.bytes_left -= piece.size_bytes
            batch.may_move = batch.may_move and run.may_move
            if not lane.is_awake:
                self._wake(lane)
        return batch, first, message_count

    def wait_room(
        self, timeout_s: float | None, *, size_bytes: int = 1, message_count: int = 1
    ) -> bool:
        """Block until there is room; False when there is none before the time is over.

        Room may be taken by somebody else before the caller comes to use it.

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
            return self._room.wait(
                timeout_s, size_bytes=size_bytes, message_count=message_count
            )

    def statistics(self) -> BufferStatistics:
        """Return a snapshot."""
        with self._lock:
            batches = list(self._unanswered)
            resolved_count, full_count = self._resolved_count, self._room.full_count
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
            if self._room.is_closed:
                self._loop.call_soon(callback)
            else:
                self._room.on_freed(callback)

    def set_limits(self, lane: Lane, announcer: Announcer) -> None:
        """Keep a lane's batches to what its broker announced."""
        with self._lock:
            lane.set_limits(self._options, announcer)
            if lane.open is not None:
                self._room.give_back(lane.open)  # it may have reserved more than that

    def take_ready(self) -> list[Lane]:
        """Return the lanes that got messages since they were found empty."""
        with self._lock:
            ready, self._ready = self._ready, []
            return ready

    def has_messages(self, lane: Lane) -> bool:
        """Tell whether there is something to take; if not, `on_ready` tells later."""
        with self._lock:
            lane.is_awake = bool(lane.sealed) or lane.open is not None
            return lane.is_awake

    def take(self, lane: Lane, now_s: float) -> Batch | float | None:
        """Take the lane's next batch, seal its open one for that.

        Returns:
            The batch; or the monotonic time until which the open one lingers, unless
            `on_ready` tells of it earlier because it is full; or None: there is
            nothing, and `on_ready` will tell when there is.
        """
        with self._lock:
            if lane.sealed:
                return lane.sealed.popleft()
            batch = lane.open
            if batch is None:
                lane.is_awake = False
                return None
            linger_s = batch.created_s + self._options.linger_s
            if linger_s > now_s:
                return linger_s
            self._seal(lane)
            return lane.sealed.popleft()

    def take_late(self, lane: Lane, now_s: float) -> list[Batch]:
        """Take what cannot be sent in time any more, and seal what has grown old."""
        with self._lock:
            batch = lane.open
            if batch is not None:
                age_s = min(BATCH_AGE_MAX_S, batch.timeout_s * BATCH_AGE_SHARE)
                if now_s - batch.created_s >= age_s:
                    self._seal(lane)
            late = [batch for batch in lane.sealed if batch.deadline_s <= now_s]
            if late:
                left = (b for b in lane.sealed if b.deadline_s > now_s)
                lane.sealed = deque(left)
            return late

    def take_movable(self, lane: Lane) -> list[Batch]:
        """Take what may go to another partition."""
        with self._lock:
            self._seal(lane)
            movable = [batch for batch in lane.sealed if batch.may_move]
            lane.sealed = deque(b for b in lane.sealed if not b.may_move)
            return movable

    def put(self, lane: Lane, batch: Batch) -> None:
        """Put a batch that nobody appends to at the end of a lane."""
        with self._lock:
            lane.sealed.append(batch)
            if not lane.is_awake:
                self._wake(lane)

    def resolve(self, batch: Batch, outcomes: Sequence[Outcome]) -> None:
        """Say what became of a batch, and make its room free."""
        with self._lock:
            self._unanswered.pop(batch)
            self._room.release(batch)
            self._resolved_count += len(batch.payloads)
            callbacks = self._room.wake()
        batch.resolve(outcomes)
        for callback in callbacks:
            callback()

    def unanswered(self) -> list[Batch]:
        """Return every batch without an outcome, after sealing what is open.

        What is appended from now on is in none of them.
        """
        with self._lock:
            for lane in self.routes.everything():
                self._seal(lane)
            return list(self._unanswered)

    def close(self) -> None:
        """Refuse messages from now on; what is here stays."""
        with self._lock:
            self._room.is_closed = True
            for lane in self.routes.everything():
                self._seal(lane)  # its room goes, so the next message asks for some
            callbacks = self._room.wake()
        for callback in callbacks:
            callback()

    # -- inside -----------------------------------------------------------------------

    def _select_run(
        self, topic: str, message: OutgoingMessage
    ) -> tuple[Lane | None, bool]:
        """Return a message's lane; None where all may go anywhere."""
        is_keyed = message.key is not None or message.partition is not None
        if self.routes.is_default and not is_keyed:
            return None, True
        return self.routes.select(topic, message)

    def _check_size(self, topic: str, run: Run) -> None:
        size_bytes = run.largest_bytes
        for lane in self.routes.lanes[topic] if run.lane is None else (run.lane,):
            lane.check(size_bytes)
        if size_bytes > self._options.buffer_bytes_max:
            self._room.refuse(size_bytes, 1)

    def _reserve(
        self,
        lane: Lane,
        size_bytes: int,
        message_count: int,
        largest_bytes: int,
        timeout_s: float,
    ) -> Batch:
        """Return the lane's open batch, with room for messages; under the lock.

        Some more room than that is reserved, so that not each message has to ask.
        """
        if lane.open is not None:
            self._room.give_back(lane.open)
        self._room.check(size_bytes, message_count)
        lane.check(largest_bytes)
        batch = lane.open
        if (
            batch is None
            or batch.size_bytes + size_bytes > lane.bytes_max
            or len(batch.payloads) + message_count > lane.count_max
            or batch.timeout_s != timeout_s
        ):
            batch = self._begin(lane, timeout_s)
        self._room.reserve(batch, lane, size_bytes, message_count)
        return batch

    def _begin(self, lane: Lane, timeout_s: float) -> Batch:
        """Begin another open batch; under the lock."""
        if lane.open is not None:
            self._seal(lane)
            if self._options.linger_s:
                self._wake(lane)
        batch = Batch(
            self._home,
            created_s=self._clock.monotonic_s(),
            timeout_s=timeout_s,
            may_move=True,
        )
        self._unanswered[batch] = None
        lane.open = batch
        return batch

    def _seal(self, lane: Lane) -> None:
        """Put the open batch, if there is one, behind the sealed; under the lock."""
        if lane.open is not None:
            self._room.give_back(lane.open)
            lane.sealed.append(lane.open)
            lane.open = None

    def _wake(self, lane: Lane) -> None:
        """Tell the delivery about a lane; under the lock."""
        lane.is_awake = True
        self._ready.append(lane)
        if len(self._ready) > 1:
            return  # it was told, and did not come yet
        if self._home.is_here():
            self._loop.call_soon(self._on_ready)
        else:
            self._loop.call_soon_threadsafe(self._on_ready)
