"""Messages for topics whose partitions are not known yet; each gets a future at once.

Theory of operation. A message whose topic is not known waits in a batch of its own: it
takes buffer memory, `flush` waits for it, and it fails at its deadline like any other.
Tasks look for the topic, usually one. Once it is known, the messages are added in order
to the batches of its partitions, which then also resolve the futures.

    Invariant: a topic becomes known and its waiting messages are added under one hold
    of the buffer's lock, so they precede all later messages of their callers.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from metaq.client.names import check_topic
from metaq.client.partitioner import OutgoingMessage, parse_partition
from metaq.client.produce.accumulator import Accumulator
from metaq.client.produce.batches import Batch, BatchOutcome, SendFuture
from metaq.client.produce.partition_sender import PartitionSender
from metaq.client.produce.runs import encode_outgoing, frozen
from metaq.errors import ClosedError, MetaqError
from metaq.model import TopicPartition
from metaq.record.checksum import BytesLike
from metaq.record.flags import Headers, list_headers


@dataclass(slots=True, eq=False)
class _Waiting:
    message: OutgoingMessage
    batch: Batch


_Choice: TypeAlias = tuple[PartitionSender, bool]
"""Sender of a message, and whether it may move from there."""


class FirstMessages:
    """Messages that wait for their topics. Owner: one producer.

    Concurrency: `append` in any thread, the others on the producer's loop.
    """

    def __init__(
        self, accumulator: Accumulator, *, find: Callable[[str, float], Awaitable[None]]
    ) -> None:
        """Start with none.

        Args:
            accumulator: of the producer.
            find: finds a topic's partitions, and calls `publish`; raises MetaqError at
                its deadline, the second argument.
        """
        self._accumulator = accumulator
        self._buffer = accumulator.buffer
        self._find = find
        self._waiting: dict[str, list[_Waiting]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.failed: Counter[str] = Counter()
        """Number of messages that reached no partition, by the name of the error."""

    def append(
        self,
        topic: str,
        data: BytesLike,
        attribute: str | None = None,
        key: str | bytes | None = None,
        partition: str | TopicPartition | None = None,
        headers: Headers = (),
        timeout_s: float | None = None,
    ) -> SendFuture:
        """Keep a message until its topic is known; arguments of `Accumulator.append`.

        Raises:
            BufferFullError: no memory now; see `Buffer.wait`.
            MessageTooLargeError, ClosedError, ConfigError, TypeError: as
                `Accumulator.append`.
        """
        check_topic(topic)
        if partition is not None:
            parse_partition(topic, partition)
        # Copies, because the caller may change the originals.
        pairs = list_headers(headers) if headers else ()
        message = OutgoingMessage(frozen(data), attribute, key, partition, pairs)
        payload, flag = encode_outgoing(message)
        if timeout_s is None:
            timeout_s = self._buffer.options.timeout_s
        with self._buffer.lock:
            is_known = self._accumulator.knows(topic)
            if not is_known:
                batch = self._buffer.begin_apart(payload, flag, timeout_s)
                waiting = self._waiting.setdefault(topic, [])
                deadlines_s = [one.batch.deadline_s for one in waiting]
                waiting.append(_Waiting(message, batch))
        if is_known:
            return self._accumulator.append(topic, *message[:-1], timeout_s)
        if all(batch.deadline_s < deadline_s for deadline_s in deadlines_s):
            # A task that waits until a later deadline would miss this one.
            try:
                self._buffer.home.loop.call_soon_threadsafe(self._begin, topic)
            except RuntimeError:
                raise ClosedError("the client is closed") from None
        return SendFuture(batch, 0)

    def _begin(self, topic: str) -> None:
        if topic in self._waiting:
            task = asyncio.get_running_loop().create_task(
                self._run_topic(topic), name=f"producer-topic-{topic}"
            )
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run_topic(self, topic: str) -> None:
        """Look for a topic until it is known, or no message waits for it."""
        while waiting := self._waiting.get(topic):
            deadline_s = min(one.batch.deadline_s for one in waiting)
            try:
                await self._find(topic, deadline_s)
            except MetaqError as error:
                self._fail(topic, error, deadline_s)

    def _fail(self, topic: str, error: MetaqError, deadline_s: float) -> None:
        """Fail the messages of a topic with this deadline or an earlier one."""
        with self._buffer.lock:
            waiting = self._waiting.pop(topic, [])
            left = [one for one in waiting if one.batch.deadline_s > deadline_s]
            if left:
                self._waiting[topic] = left
        for one in waiting:
            if one.batch.deadline_s <= deadline_s:
                self.failed[type(error).__name__] += 1
                self._buffer.resolve(one.batch, [BatchOutcome(0, error)])

    def publish(self, topic: str, available: Sequence[TopicPartition]) -> None:
        """Make a topic known, and add the messages that wait for it to its batches.

        Args:
            topic: its name.
            available: its partitions that take messages now; no effect if empty.
        """
        if self._accumulator.knows(topic):
            return
        routes, lock = self._accumulator.routes, self._buffer.lock
        known = routes.plan(topic, available)
        added: list[tuple[_Waiting, SendFuture | Exception]] = []
        chosen: list[tuple[_Waiting, _Choice | Exception]] = []
        while known is not None:
            with lock:
                fresh = self._waiting.get(topic, [])[len(chosen) :]
                if not fresh:
                    routes.set_partitions(topic, available)
                    self._waiting.pop(topic, None)
                    added = [(one, self._add(one, to)) for one, to in chosen]
                    break
            # Outside the lock, because the selector is the user's function.
            for one in fresh:
                try:
                    choice = routes.select_among(topic, known, one.message)
                    chosen.append((one, choice))
                except Exception as error:  # noqa: BLE001  # its future has it
                    chosen.append((one, error))
        for one, result in added:
            if isinstance(result, SendFuture):
                result.pass_on(one.batch)
            else:
                failure = result
                if not isinstance(failure, MetaqError):
                    failure = MetaqError(
                        f"topic '{topic}': selector failed: {result!r}"
                    )
                self.failed[type(failure).__name__] += 1
                one.batch.resolve([BatchOutcome(0, failure)])
        self._buffer.announce()

    def _add(self, one: _Waiting, to: _Choice | Exception) -> SendFuture | Exception:
        """Move a message to its partition's batch; under the lock."""
        self._buffer.release(one.batch)
        if isinstance(to, Exception):
            return to
        sender, may_move = to
        try:
            return self._accumulator.add_apart(sender, one.batch, may_move=may_move)
        except MetaqError as error:
            return error

    def close(self) -> None:
        """Fail all waiting messages."""
        for task in self._tasks:
            task.cancel()
        for topic in tuple(self._waiting):
            text = f"the producer was closed before topic '{topic}' was found"
            self._fail(topic, ClosedError(text), float("inf"))
