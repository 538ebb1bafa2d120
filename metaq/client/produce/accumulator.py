"""The accumulator: appends messages from any thread to the batches of partitions.

Theory of operation. `append` does all the work per message: it chooses a partition's
sender, adds the payload to the sender's open batch under one plain lock, and returns.
The event loop is notified once, when an empty sender gets its first message; from then
on the sender takes batches whenever it can send, so batches grow while others are in
flight. Nothing here waits or does I/O; `Buffer.wait` blocks until memory is free.

All messages of a batch have the same time-out, so the batch has the deadline of its
first message, and no clock is read for the others. The delivery's tick seals old
batches, so that later messages do not share an old deadline.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import cast

from metaq.client.partitioner import OutgoingMessage
from metaq.client.produce.batches import Batch, BatchName, SendFuture, ends_of
from metaq.client.produce.buffer import Buffer
from metaq.client.produce.partition_sender import PartitionSender
from metaq.client.produce.routes import Routes, unknown_topic
from metaq.client.produce.runs import Appending, Run, frozen, list_messages, sort_runs
from metaq.client.produce.scheduling import delay_row
from metaq.client.timeouts import require_loop
from metaq.client.validation import SECONDS_MAX, check_timeout
from metaq.model import Millis, TopicPartition
from metaq.record.checksum import BytesLike
from metaq.record.flags import Headers, encode_payload
from metaq.record.layout import HEADER_BYTES


class Accumulator:
    """Takes messages from any thread and hands batches to one event loop."""

    def __init__(self, buffer: Buffer[PartitionSender], routes: Routes) -> None:
        """Start empty; called on the loop's thread."""
        self.buffer = buffer
        self._options = buffer.options
        # Called for each message; costs a third of `with`.
        self._acquire, self._release = buffer.lock.acquire, buffer.lock.release
        self.routes = routes
        self._timeout_s = buffer.options.timeout_s

    def knows(self, topic: str) -> bool:
        """Return whether the topic's partitions are known: `append` needs them."""
        return topic in self.routes.by_topic

    def append(
        self,
        topic: str,
        data: BytesLike,
        attribute: str | None = None,
        key: str | bytes | None = None,
        partition: str | TopicPartition | None = None,
        headers: Headers = (),
        timeout_s: float | None = None,
        deliver_ms: Millis | None = None,
    ) -> SendFuture:
        """Add one message; never waits.

        Args:
            topic: a known topic.
            data: application bytes; mutable ones are copied.
            attribute: application attribute, or None.
            key: stored with the message; chooses the partition. None for no key.
            partition: `<broker>-<partition>`; overrides key and selector.
            headers: names and bytes, stored in this order.
            timeout_s: time limit for sending; None takes the producer's.
            deliver_ms: delivery time, ms since 1970; None for at once.

        Returns:
            The message's future. A partition stores the messages of one thread in the
            order of the calls.

        Raises:
            BufferFullError: no memory now; see `Buffer.wait`.
            MessageTooLargeError: larger than the buffer or the broker's limit.
            NoBrokerError: the topic is not known, or the selector found no partition.
            ConfigError: attribute, key, headers or partition cannot be encoded.
            ClosedError: the producer is closed, or belongs to another event loop.
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
        routes, buffer = self.routes, self.buffer
        may_move = key is None and partition is None and routes.is_default
        if may_move and topic in routes.by_topic:
            senders = routes.by_topic[topic]
            if buffer.is_turn_over and buffer.begin_turn():
                routes.place = next(routes.turn)
            sender = senders[routes.place % len(senders)]
        else:
            message = OutgoingMessage(data, attribute, key, partition, headers)
            sender, may_move = routes.select(topic, message)
        if deliver_ms is not None:
            sender = self._timed(sender, deliver_ms)
        size_bytes = len(payload) + HEADER_BYTES
        self._acquire()
        try:
            batch = sender.open
            if (
                batch is None
                or batch.bytes_left < size_bytes
                or len(batch.payloads) >= batch.reserved_count
                or batch.timeout_s != timeout_s
            ):
                batch = self._reserve(sender, size_bytes, 1, size_bytes, timeout_s)
            payloads = batch.payloads
            future = SendFuture(batch, len(payloads))
            if flag:
                batch.flags[len(payloads)] = flag
            if deliver_ms is not None:
                # Set by index, as `flags`: if memory ran out here before, the time
                # of that lost message is overwritten.
                batch.times[len(payloads) :] = (deliver_ms,)
            payloads.append(payload)
            batch.bytes_left -= size_bytes
            if not may_move:
                batch.may_move = False
            if not sender.is_awake:
                sender.note_ready()
            ready = buffer.ready
        finally:
            self._release()
        # Outside the lock, because the notified loop takes it at once.
        if ready and buffer.announced is not ready:
            buffer.announce()
        return future

    def check_lasting(self, partition: TopicPartition, payload_bytes: int) -> None:
        """Refuse a message to be spooled that could never be appended later.

        Raises:
            MessageTooLargeError: it is larger than the buffer, or over the limit that
                its broker announced last.
            ClosedError: the producer is closed.
        """
        size_bytes = payload_bytes + HEADER_BYTES
        self.routes.sender(partition).check(size_bytes, is_lasting=True)
        if size_bytes > self._options.buffer_bytes_max:
            self.buffer.refuse(size_bytes, 1)

    def append_many(
        self,
        topic: str,
        messages: Iterable[BytesLike | OutgoingMessage],
        *,
        timeout_s: float | None = None,
        deliver_ms: Millis | None = None,
    ) -> Appending:
        """Prepare to add a list; `Appending.step` adds as much as memory allows.

        Without keys and with the default selector, contiguous runs of up to a
        batch's size go to the partitions in turn; otherwise the selector chooses for
        each message, and messages of one partition keep their order.

        Args:
            topic: a known topic.
            messages: bytes-like, or `OutgoingMessage` for those that need more.
            timeout_s: as in `append`.
            deliver_ms: delivery time of all messages; None for at once.

        Raises:
            As `append`, except BufferFullError.
        """
        check_timeout(timeout_s)
        listed = list_messages(messages)
        order: list[int] | None = None
        if topic not in self.routes.by_topic:
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
        add = partial(self._add_next, topic, timeout_s, deliver_ms)
        return Appending(add, runs, order)

    def append_batch(
        self,
        partition: TopicPartition,
        payloads: Sequence[bytes],
        flags: Sequence[int],
        name: BatchName,
    ) -> None:
        """Add messages as one sealed batch with its own producer name and sequence.

        Messages that exceed the whole buffer are added once the buffer is empty.

        Args:
            partition: destination; the messages never move to another one.
            payloads: at least one; each an attribute block, if its flag says so, and
                application bytes.
            flags: one for each payload.
            name: producer and sequence of the batch.

        Raises:
            BufferFullError: no memory now; see `Buffer.wait`.
            ClosedError: the producer is closed.
        """
        sender, options = self.routes.sender(partition), self._options
        ends = ends_of(payloads)
        size_bytes = ends[-1]
        with self.buffer.lock:
            self.buffer.check(
                min(size_bytes, options.buffer_bytes_max),
                min(len(payloads), options.buffer_count_max),
            )
            batch = self._begin(sender, self._timeout_s)
            bounds = sender.bytes_max, sender.count_max
            self.buffer.reserve(batch, size_bytes, len(payloads), *bounds)
            batch.name, batch.may_move = name, False
            batch.add(payloads, flags, ends)
            sender.seal()
            self._wake(sender)

    def add_apart(
        self, sender: PartitionSender, apart: Batch, *, may_move: bool
    ) -> SendFuture:
        """Add the message of a batch from `Buffer.begin_apart`; under the lock.

        The caller has just released that batch's memory, so the message is added
        without a check for free memory, also when the producer is closed.

        Raises:
            MessageTooLargeError: larger than the broker's limit.
        """
        ends = ends_of(apart.payloads)
        size_bytes, flags = ends[-1], [apart.flags.get(0, 0)]
        batch = self._reserve(
            sender, size_bytes, 1, size_bytes, apart.timeout_s, is_taken=True
        )
        batch.add(apart.payloads, flags, ends)
        batch.may_move = batch.may_move and may_move
        if not sender.is_awake:
            sender.note_ready()
        return SendFuture(batch, len(batch.payloads) - 1)

    def unanswered(self) -> list[Batch]:
        """Seal open batches, and return every batch without an outcome.

        Later messages go to other batches.
        """
        with self.buffer.lock:
            for sender in self.routes.senders():
                sender.seal()
            return self.buffer.unanswered()

    def close(self) -> None:
        """Refuse new messages; buffered ones stay."""
        self.buffer.close()
        # Seals open batches, so the next message has to reserve memory, and is refused.
        self.unanswered()

    # -- inside -----------------------------------------------------------------------

    def _select_run(
        self, topic: str, message: OutgoingMessage
    ) -> tuple[PartitionSender | None, bool]:
        """Return a message's sender, None for any; and whether it may move."""
        is_keyed = message.key is not None or message.partition is not None
        if self.routes.is_default and not is_keyed:
            return None, True
        return self.routes.select(topic, message)

    def _add_next(
        self, topic: str, timeout_s: float, deliver_ms: Millis | None, run: Run
    ) -> tuple[Batch, int, int]:
        """Add up to a batch of a run; to the open batch if all of that fits there.

        Returns:
            The batch, the index of the first added message in it, and the number of
            messages added.

        Raises:
            BufferFullError: no memory now.
            ClosedError: the producer is closed.
        """
        sender = run.sender or self.routes.next_sender(topic)
        if deliver_ms is not None:
            sender = self._timed(sender, deliver_ms)
        options = self._options
        payloads, flags, ends = run.next_messages(
            min(sender.bytes_max, options.buffer_bytes_max),
            min(sender.count_max, options.buffer_count_max),
        )
        message_count, size_bytes = len(payloads), ends[-1] - ends[0]
        with self.buffer.lock:
            batch = self._reserve(sender, size_bytes, message_count, 0, timeout_s)
            first = len(batch.payloads)
            if deliver_ms is not None:
                batch.times[first:] = [deliver_ms] * message_count
            batch.add(payloads, flags, ends)
            batch.may_move = batch.may_move and run.may_move
            self._wake(sender)
        return batch, first, message_count

    def _timed(self, sender: PartitionSender, deliver_ms: Millis) -> PartitionSender:
        """Return the sender for delayed messages of the given sender's partition."""
        row = delay_row(deliver_ms - self.buffer.clock.wall_ms())
        return self.routes.timed(sender.partition, row)

    def _check_size(self, topic: str, run: Run) -> None:
        size_bytes = run.largest_bytes
        for sender in (run.sender,) if run.sender else self.routes.by_topic[topic]:
            sender.check(size_bytes)
        if size_bytes > self._options.buffer_bytes_max:
            self.buffer.refuse(size_bytes, 1)

    def _reserve(
        self,
        sender: PartitionSender,
        size_bytes: int,
        message_count: int,
        largest_bytes: int,
        timeout_s: float,
        *,
        is_taken: bool = False,
    ) -> Batch:
        """Return the sender's open batch, with memory reserved; under the lock.

        More memory is reserved than asked for, so that most messages need no
        reservation. With `is_taken`, free memory is not checked.
        """
        buffer = self.buffer
        if buffer.home.is_here():
            # If another loop runs in this thread, ours does not.
            require_loop(buffer.home.loop, "the producer")
        batch = sender.open
        if batch is not None:
            buffer.give_back(batch)
        if not is_taken:
            buffer.check(size_bytes, message_count)
        sender.check(largest_bytes)
        if (
            batch is None
            or batch.size_bytes + size_bytes > sender.bytes_max
            or len(batch.payloads) + message_count > sender.count_max
            or batch.timeout_s != timeout_s
        ):
            batch = self._begin(sender, timeout_s)
        bounds = sender.bytes_max, sender.count_max
        buffer.reserve(batch, size_bytes, message_count, *bounds)
        return batch

    def _begin(self, sender: PartitionSender, timeout_s: float) -> Batch:
        """Begin a new open batch; under the lock."""
        if sender.open is not None and self._options.linger_s:
            sender.note_ready()
            self.buffer.announce()
        batch = self.buffer.begin(sender, timeout_s)
        sender.begin(batch)
        return batch

    def _wake(self, sender: PartitionSender) -> None:
        """Notify the loop of a sender with messages, if needed; under the lock."""
        if not sender.is_awake:
            sender.note_ready()
        self.buffer.announce()
