"""The ordered producer: a fixed layout, and a spool for each partition of it.

Theory of operation. A key keeps its partition only if the partitions never change, so
the layout is configured, independent of the partitions that the cluster has now. A
message that its partition does not take is spooled *under that partition*, and while
anything is spooled there, later messages are spooled too. One task per partition sends
spooled messages, oldest first, and removes acknowledged ones; once none is left, sends
go to the broker directly again.

    Invariant: a message is sent directly only if nothing of its partition is spooled.
    Invariant: sends of one partition run one at a time, in the order of the calls.

Spooled messages are on disk, survive this process, and are sent at least once: if the
process or the connection dies between acknowledgement and removal, up to REPLAY_GROUP
messages are sent again. A message too large for its broker is set aside
(`dead_letter_files.py`), and the others continue.

Source: docs/metaq-1.4/client.md 8.1, without the defect of 21, row 15.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple, Self

from metaq.client.cluster.context import ClientContext
from metaq.client.errors import MessageTooLargeError
from metaq.client.names import check_topic
from metaq.client.off_loop import call_off_loop, close_off_loop, open_off_loop
from metaq.client.options import names_arguments
from metaq.client.partitioner import KeyHash, OutgoingMessage, Selector, parse_partition
from metaq.client.produce.batches import SendResult
from metaq.client.produce.dead_letter_files import DeadLetterFiles
from metaq.client.produce.producer import AsyncProducer
from metaq.client.produce.runs import encode_outgoing, frozen, tagged
from metaq.client.spool import SPOOL_THREADS_MAX, Spool, spool_name
from metaq.client.timeouts import ClosedByBlock, close_all, require_loop, within
from metaq.client.validation import check_timeout
from metaq.errors import (
    ClosedError,
    ConfigError,
    CoordinationError,
    ForbiddenError,
    MetaqError,
    NoBrokerError,
    NoRoomError,
    NoSpaceError,
    NotSentError,
    UnavailableError,
)
from metaq.fs import SystemFileSystem
from metaq.fs.helper_threads import HelperThreads
from metaq.model import BrokerId, Message, MessageId, Offset, TopicPartition
from metaq.record.checksum import BytesLike
from metaq.record.flags import Headers, list_headers
from metaq.retry import Backoff, wait_set
from metaq.stats import counter, gauge

_log = logging.getLogger(__name__)

NOT_TAKEN: Final = (
    NotSentError, NoBrokerError, CoordinationError, ForbiddenError, NoRoomError,
    UnavailableError,
)  # fmt: skip
"""Errors after which a message is certainly not stored, so it may be spooled."""

REPLAY_GROUP: Final = 32
"""Maximum number of spooled messages sent before the acknowledged ones are removed."""

REPLAY: Final = Backoff(first_s=0.1, max_s=5.0)
"""Pauses while a partition does not take spooled messages. A change of the cluster ends
a pause early."""

_NO_ID: Final = MessageId(-1)
_NO_OFFSET: Final = Offset(-1)


class Spooled(NamedTuple):
    """Receipt of a message that its partition did not take: it is on the local disk."""

    partition: TopicPartition
    """Partition to which it will be sent."""
    waiting_count: int
    """Number of messages spooled for this partition, this one included."""


@dataclass(slots=True)
class OrderedStatistics:
    """A snapshot of an ordered producer's counters."""

    sent_count: int = counter(
        "metaq_ordered_producer_sent_messages_total",
        "Messages of ordered producers that went to the broker directly.",
    )
    spooled_count: int = counter(
        "metaq_ordered_producer_spooled_messages_total",
        "Messages of ordered producers that were spooled.",
    )
    replayed_count: int = counter(
        "metaq_ordered_producer_replayed_messages_total",
        "Spooled messages that the broker has.",
    )
    refused_count: int = counter(
        "metaq_ordered_producer_refused_messages_total",
        "Spooled messages that the broker does not take, and that were set aside.",
    )
    waiting: Mapping[TopicPartition, int] = gauge(
        "metaq_ordered_producer_waiting_messages",
        "Messages that are spooled now.",
        labels=("topic", "partition"),
        label=TopicPartition.labels,
        default=dict,
    )
    """Only partitions with spooled messages."""
    problems: tuple[str, ...] = ()
    """Per partition a sentence why messages are still spooled, and one with the
    directory of messages set aside."""


@dataclass(slots=True)
class OrderedQueue:
    """One partition. Owner: the ordered producer, on its loop."""

    partition: TopicPartition
    spool: Spool
    refused: DeadLetterFiles
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    replay: asyncio.Task[None] | None = None
    spooling: asyncio.Future[int] | None = None
    """Disk write in progress; it may outlive a cancelled `send`."""
    last_error: MetaqError | None = None

    def problems(self) -> Iterator[str]:
        """Yield a sentence for spooled messages, and one for those set aside."""
        if len(self.spool):
            yield f"{self.partition}: {self.last_error or 'its broker is away'}"
        if self.refused.count:
            yield (
                f"{self.partition}: {self.refused.count} spooled messages that are too"
                f" large were set aside, to {self.refused.directory}"
            )


class AsyncOrderedProducer(ClosedByBlock):
    """Sends messages of one topic and keeps their order even while brokers are away.

    Created by `AsyncClient.ordered_producer`; used as `async with`. One process at a
    time uses a directory. Sends to one partition run one at a time; partitions are
    independent of each other.
    """

    def __init__(
        self,
        context: ClientContext,
        producer: AsyncProducer,
        *,
        topic: str,
        partitions: Sequence[TopicPartition],
        directory: Path,
        timeout_s: float,
        selector: Selector | None = None,
    ) -> None:
        """Prepare; `start` opens the spools.

        Args:
            context: the client's parts.
            producer: sends the messages; owned from now on.
            topic: topic of all messages.
            partitions: the layout; must never change.
            directory: directory of the spools.
            timeout_s: default time-out of a send.
            selector: chooses a partition of the layout; None for the hash of the key.
        """
        self.topic = topic
        self.partitions = tuple(partitions)
        self._context = context
        self._producer = producer
        self._directory = directory
        self._timeout_s = timeout_s
        self._selector = selector or KeyHash()
        self._fs = SystemFileSystem()
        self._threads = HelperThreads(
            min(len(self.partitions), SPOOL_THREADS_MAX), f"spools of {topic}"
        )
        self._queues: dict[TopicPartition, OrderedQueue] = {}
        self._unlisten: Callable[[], None] | None = None
        self._loop = asyncio.get_running_loop()
        self._closing: set[asyncio.Task[None]] = set()
        self._is_started = False
        self._is_opening = False
        self._is_known = False
        self._counts = OrderedStatistics()

    # -- life -------------------------------------------------------------------------

    async def start(self, timeout: float | None = None) -> None:
        """Open the spools, and begin to send their messages; `async with` calls it.

        After any error but the first, the producer and all spools are closed.

        Args:
            timeout: seconds that the disk may take; None for no limit.

        Raises:
            ClosedError: it was started before, or is closed.
            StorageError: a spool cannot be opened, or another process uses it.
            RequestTimeoutError: the spools were not open in time.

        Cancellation: the producer and all spools are closed.
        """
        require_loop(self._loop, self)
        if self._is_started:
            raise ClosedError(
                "an ordered producer is started only once; create another one"
            )
        check_timeout(timeout)
        self._is_started = self._is_opening = True
        clock = self._context.clock
        deadline_s = None if timeout is None else clock.monotonic_s() + timeout
        try:
            await within(timeout, self._open_spools(), f"spools of topic {self.topic}")
        except BaseException:
            self._is_opening = False
            await close_all([self], deadline_s, clock)
            raise
        self._is_opening = False
        metadata = self._context.metadata
        metadata.watch_topic(self.topic)
        self._unlisten = metadata.add_listener(lambda _: self._wake_all())
        self._wake_all()

    async def _open_spools(self) -> None:
        for partition in self.partitions:
            path = self._directory / spool_name(self.topic, partition.name)
            opening = partial(Spool, self._fs, path)
            spool = await open_off_loop(self._threads, opening)
            refused = DeadLetterFiles(self._fs, path)
            self._queues[partition] = OrderedQueue(partition, spool, refused)
            await call_off_loop(self._threads, refused.recount)
        if self.is_closed:
            raise ClosedError("the ordered producer was closed while it started")

    @property
    def is_closed(self) -> bool:
        """Whether it refuses new messages."""
        return self._producer.is_closed

    @property
    def has_ended(self) -> bool:
        """Whether it and its spools are closed."""
        return self._producer.has_ended and not self._queues and not self._closing

    async def close(self, timeout: float | None = None) -> None:
        """Stop; spooled messages stay on disk for the next ordered producer.

        Waits for sends in progress. A second call waits for the first.

        Args:
            timeout: seconds for everything; None is the client's `close_timeout_s`. If
                the disk hangs for longer, this returns, and the files are closed once
                the disk answers.

        Raises:
            ClosedError: it belongs to another event loop; it is not closed.

        Cancellation: the files are still closed.
        """
        require_loop(self._loop, self)
        check_timeout(timeout)
        if self._unlisten is not None:
            self._unlisten()
        limit_s = self._context.options.close_timeout_s if timeout is None else timeout
        queues, self._queues = self._queues, {}
        replays = [
            queue.replay for queue in queues.values() if queue.replay is not None
        ]
        for replay in replays:
            replay.cancel()
        deadline_s = self._context.deadline_s(limit_s)
        try:
            await self._producer.close(limit_s)
        finally:
            closing = asyncio.create_task(self._close_spools(queues.values(), replays))
            self._closing.add(closing)
            closing.add_done_callback(self._on_closed)
        left_s = max(0.0, deadline_s - self._context.clock.monotonic_s())
        _done, late = await asyncio.wait(self._closing, timeout=left_s)
        if late:
            _log.warning(
                "spools are not closed yet, the disk does not answer: topic=%s"
                " timeout_s=%.1f",
                self.topic,
                limit_s,
            )

    async def _close_spools(
        self, queues: Iterable[OrderedQueue], replays: Collection[asyncio.Task[None]]
    ) -> None:
        """Close each spool after its last use, without a time limit."""
        await asyncio.gather(*replays, return_exceptions=True)
        for queue in queues:
            async with queue.turn:
                await close_off_loop(self._threads, queue.spool)

    def _on_closed(self, closing: asyncio.Task[None]) -> None:
        self._closing.discard(closing)
        if not self._closing and not self._is_opening:
            self._threads.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    def __repr__(self) -> str:
        state = (
            "closed" if self.is_closed else "open" if self._queues else "not started"
        )
        count = sum(self.statistics().waiting.values())
        return (
            f"<{type(self).__name__} of topic '{self.topic}' in"
            f" {len(self.partitions)} partitions, {self._context.place}: {state},"
            f" {count} messages wait in {self._directory}>"
        )

    # -- sending ----------------------------------------------------------------------

    @names_arguments
    async def send(
        self,
        data: BytesLike,
        *,
        attribute: str | None = None,
        key: str | bytes | None = None,
        headers: Headers = (),
        tag: str | None = None,
        timeout: float | None = None,
    ) -> SendResult | Spooled:
        """Send one message, or spool it; it is on a disk, here or there, on return.

        Args:
            data: application bytes; mutable ones are copied.
            attribute: application attribute; "" is an attribute, None means none.
            key: stored; the same key goes to the same partition, unless the selector
                does otherwise.
            headers: names and bytes, stored in this order; a dict, or pairs.
            tag: text stored as the header `tag`, for consumers with `where`.
            timeout: seconds to try the broker; None is `timeout_s` of the options.

        Returns:
            Partition, offset and id; or `Spooled`, if the partition is away or closed,
            the message could not be sent in time, or earlier messages are spooled for
            the partition.

        Raises:
            OutcomeUnknownError: it was sent, and may be stored; it is not spooled.
            ConfigError: the selector chose a partition outside the layout, or
                attribute, key or headers cannot be encoded.
            MessageTooLargeError: it exceeds the limit that its broker announced last.
            NoSpaceError: it was to be spooled, and the disk is full.
            MetaqError: the broker refused the message itself, or the disk failed.
            ClosedError: it is closed, not started, or belongs to another event loop.
            TypeError: an argument of another type; the text names it.

        Cancellation: the message may still be stored or spooled.
        """
        require_loop(self._loop, self)
        check_timeout(timeout)
        message = tagged(
            OutgoingMessage(frozen(data), attribute, key, None, headers, tag)
        )
        payload, _flag = encode_outgoing(message)
        queue = self._queue_of(message)
        timeout_s = self._timeout_s if timeout is None else timeout
        deadline_s = self._context.clock.monotonic_s() + timeout_s
        async with queue.turn:
            if queue.spooling is not None and not queue.spooling.done():
                await asyncio.wait([queue.spooling])
            if await self._is_open(queue, deadline_s):
                try:
                    return await self._send(queue, message, deadline_s)
                except NOT_TAKEN as error:
                    queue.last_error = error
            self._producer.accumulator.check_lasting(queue.partition, len(payload))
            return await self._spool(queue, message)

    def _queue_of(self, message: OutgoingMessage) -> OrderedQueue:
        if not self._queues:
            raise ClosedError("the ordered producer is closed, or was not started")
        chosen = self._selector(self.topic, self.partitions, message)
        queue = self._queues.get(chosen)
        if queue is None:
            raise ConfigError(
                f"the selector chose {chosen}, which is not in the layout of"
                f" {len(self.partitions)} partitions"
            )
        return queue

    async def _is_open(self, queue: OrderedQueue, deadline_s: float) -> bool:
        """Return whether a message may be sent to the broker directly."""
        if not self._is_known:
            try:
                await self._context.metadata.topic(
                    self.topic, deadline_s=deadline_s, takes_puts=True
                )
            except (CoordinationError, NoBrokerError) as error:
                queue.last_error = error
            self._is_known = True
        return not len(queue.spool) and self._is_available(queue.partition)

    def _is_available(self, partition: TopicPartition) -> bool:
        snapshot = self._context.metadata.snapshot
        is_there = snapshot.leader(partition.broker_id) is not None
        return is_there and partition in snapshot.put_partitions(self.topic)

    async def _send(
        self, queue: OrderedQueue, message: OutgoingMessage, deadline_s: float
    ) -> SendResult:
        left_s = deadline_s - self._context.clock.monotonic_s()
        if left_s <= 0:
            raise NotSentError(f"{queue.partition}: no time was left to send")
        result = await self._producer.send(
            self.topic,
            message.data,
            attribute=message.attribute,
            key=message.key,
            headers=message.headers,
            partition=queue.partition.name,
            timeout=left_s,
        )
        self._counts.sent_count += 1
        return result

    async def _spool(self, queue: OrderedQueue, message: OutgoingMessage) -> Spooled:
        stored = Message(
            self.topic,
            message.data,
            message.attribute,
            _NO_ID,
            queue.partition,
            _NO_OFFSET,
            _NO_OFFSET,
            message.key.encode() if isinstance(message.key, str) else message.key,
            list_headers(message.headers),
        )
        queue.spooling = call_off_loop(self._threads, queue.spool.append, stored)
        queue.spooling.add_done_callback(partial(self._on_spooled, queue))
        await asyncio.shield(queue.spooling)
        return Spooled(queue.partition, len(queue.spool))

    def _on_spooled(self, queue: OrderedQueue, spooling: asyncio.Future[int]) -> None:
        if not spooling.cancelled() and spooling.exception() is None:
            self._counts.spooled_count += 1
            self._wake(queue)

    # -- replay -----------------------------------------------------------------------

    def _wake_all(self) -> None:
        for queue in self._queues.values():
            self._wake(queue)

    def _wake(self, queue: OrderedQueue) -> None:
        """Ensure that spooled messages are sent; at most one task per partition."""
        if queue.replay is not None and not queue.replay.done():
            queue.wake.set()
        elif len(queue.spool) and queue.partition in self._queues:
            queue.replay = asyncio.create_task(
                self._run_replay(queue), name=f"replay of {queue.partition}"
            )

    async def _run_replay(self, queue: OrderedQueue) -> None:
        """Send spooled messages until none is left."""
        failures = 0
        while len(queue.spool):
            queue.wake.clear()
            if self._is_available(queue.partition):
                try:
                    await self._replay(queue)
                except MetaqError as error:
                    queue.last_error = error
                    _log.warning(
                        "replay stopped: partition=%s: %s", queue.partition, error
                    )
                except Exception as error:  # noqa: BLE001  # logged; the replay goes on
                    queue.last_error = MetaqError(f"replay failed: {error!r}")
                    _log.exception("replay failed: partition=%s", queue.partition)
                else:
                    failures = 0
                    continue
            failures += 1
            await wait_set(queue.wake, REPLAY.delay_s(failures))

    async def _replay(self, queue: OrderedQueue) -> None:
        """Send the oldest messages, and remove those stored or set aside.

        A full disk stops nothing: the spool may be what fills it.
        """
        threads, spool = self._threads, queue.spool
        await self._remove(queue, ())
        settled: list[int] = []
        try:
            for number in await call_off_loop(threads, spool.numbers, REPLAY_GROUP):
                message = await call_off_loop(threads, spool.read, number)
                assert message is not None
                try:
                    await self._producer.send(
                        self.topic,
                        message.data,
                        attribute=message.attribute,
                        key=message.key,
                        headers=message.header_pairs,
                        partition=queue.partition.name,
                    )
                except MessageTooLargeError as error:
                    await self._set_aside(queue, number, message, error)
                else:
                    self._counts.replayed_count += 1
                settled.append(number)
            queue.last_error = None
        finally:
            await self._remove(queue, settled)

    async def _set_aside(
        self, queue: OrderedQueue, number: int, message: Message, error: MetaqError
    ) -> None:
        """Set aside a message that its broker will always refuse."""
        now_ms = self._context.clock.wall_ms()
        path = await call_off_loop(
            self._threads, queue.refused.keep, message, number, error, now_ms
        )
        self._counts.refused_count += 1
        _log.error("spooled message set aside: file=%s: %s", path, error)

    async def _remove(self, queue: OrderedQueue, numbers: Collection[int]) -> None:
        try:
            await call_off_loop(self._threads, queue.spool.remove, numbers)
        except NoSpaceError as error:
            queue.last_error = error

    # -- statistics -------------------------------------------------------------------

    def statistics(self) -> OrderedStatistics:
        """Return a snapshot of the counters."""
        # Copied, because any thread may call this while spools are being opened.
        queues = tuple(self._queues.values())
        return replace(
            self._counts,
            waiting={
                queue.partition: len(queue.spool)
                for queue in queues
                if len(queue.spool)
            },
            problems=tuple(chain.from_iterable(queue.problems() for queue in queues)),
        )


PARTITIONS_MAX: Final = 4096
"""Maximum number of partitions of a layout; more are taken for a mistake."""


def parse_layout(topic: str, layout: str | Sequence[str]) -> tuple[TopicPartition, ...]:
    """Return the partitions of a layout, sorted.

    Args:
        topic: topic name.
        layout: MetaQ's `partitionsInfo`, `<broker>:<count>;<broker>:<count>`; or the
            partitions themselves, each `<broker>-<partition>`.

    Raises:
        ConfigError: the layout is neither, or has no partition or more than
            PARTITIONS_MAX; or the topic name is invalid.
    """
    check_topic(topic)
    try:
        if isinstance(layout, str):
            found = _parse_counts(topic, layout)
        else:
            found = {parse_partition(topic, name) for name in layout}
    except (ValueError, TypeError, ConfigError) as error:
        raise ConfigError(
            f"layout of topic {topic}: expected '<broker>:<count>;...' or"
            f" ['<broker>-<partition>', ...], got {layout!r}"
        ) from error
    if not 1 <= len(found) <= PARTITIONS_MAX:
        raise ConfigError(
            f"layout of topic {topic}: expected 1 to {PARTITIONS_MAX} partitions, got"
            f" {len(found)}"
        )
    return tuple(sorted(found))


def _parse_counts(topic: str, text: str) -> set[TopicPartition]:
    found = set()
    for part in filter(None, map(str.strip, text.split(";"))):
        broker, _, count = part.partition(":")
        broker_id, number = int(broker), int(count)
        if broker_id < 0 or not 1 <= number <= PARTITIONS_MAX:
            raise ValueError(part)
        found |= {TopicPartition(topic, BrokerId(broker_id), n) for n in range(number)}
    return found
