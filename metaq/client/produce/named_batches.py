"""Batches under names that outlive their sender: sent once more, they are recognised.

Theory of operation: whoever may be run again with the same messages, as a task of Spark
is, names the producer of each batch himself. What an earlier run has stored is then not
stored again by a broker that announced `dedup`. Each batch has a second name for the
case that the first one was used for other messages. Where batches are not taken, each
payload is a put of its own, pipelined; names mean nothing there.

There is one queue per broker: a connection and the requests in flight on it, oldest
first. When the connection breaks, or an answer does not come in time, nobody knows
which of them were stored. The queue gets another connection and sends all of them once
more, in the same order. What had left before, and is not recognised, may be there twice
then: it is counted as *doubtful*. After TRIES_MAX such rounds without one
acknowledgement in between, or when the broker cannot be reached for the time of one
request, the error is raised.

A refusal (closed partition, no space) ends the sending: nothing new goes out, the
answers to what is in flight are waited for, each within its time, and then the first
refusal is raised. What has no answer by then has an unknown outcome.

Connections live on a loop thread of the sender's own, so what does not fit into a
socket leaves while the caller makes the next batch.

Order: within a partition messages lie in the order of `send`, because brokers of this
package store the puts of one connection in order. A Java broker may not (broker spec
1.2).

Source: client spec 2.4 and 16, broker spec 1.4.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

from metaq.client.cluster.addresses import parse_address
from metaq.client.errors import GivenUpError
from metaq.client.options import IN_FLIGHT_BATCHES_MAX, MIB, ClientOptions
from metaq.client.produce.batches import encode_records
from metaq.clock import Clock, SystemClock
from metaq.errors import (
    BadReplyError,
    ClosedError,
    MetaqError,
    NoBrokerError,
    NotSentError,
    SequenceUsedError,
)
from metaq.loop_thread import LoopThread
from metaq.model import BrokerAddress, BrokerId, TopicPartition
from metaq.peer.connection import BrokerConnection
from metaq.peer.pool import ConnectionPool
from metaq.peer.replies import parse_receipt
from metaq.protocol.commands import Command, Mput, Put, Reply
from metaq.protocol.encode import encode
from metaq.protocol.version import Capabilities
from metaq.record.checksum import checksum
from metaq.record.layout import HEADER_BYTES

BATCH_RECORDS_MAX: Final = 8192
"""Most messages of one batch."""
LANE_BYTES_MAX: Final = 8 * MIB
"""`send` waits at so many bytes in flight to one broker; one request may pass it."""
LANE_COUNT_MAX: Final = 2000
"""Requests in flight to one broker before `send` waits."""
TRIES_MAX: Final = 3
"""Times that what is in flight is sent again without an acknowledgement."""
CLOSE_TIMEOUT_S: Final = 1.0
"""Bound on giving up attempts to connect."""


@dataclass(frozen=True, slots=True)
class SentStatistics:
    """What a sender has done so far."""

    message_count: int
    """Acknowledged messages."""
    size_bytes: int
    """Their payload bytes."""
    doubtful_count: int
    """Acknowledged messages that may be stored twice."""
    renamed_count: int
    """Messages that were sent under a second name; may be stored twice as well."""


@dataclass(slots=True)
class _Request:
    partition: TopicPartition
    payload: bytes
    count: int
    flag: int
    message_bytes: int
    is_batch: bool
    producer: str
    sequence: int
    spare: str | None
    may_be_stored: bool = False
    """It left on a connection that is lost."""
    is_in_doubt: bool = False
    is_answered: bool = False

    def command(self, opaque: int) -> Command:
        """Return what goes on the wire."""
        topic, number = self.partition.topic, self.partition.partition
        crc = checksum(self.payload)
        if not self.is_batch:
            return Put(topic, number, self.payload, self.flag, crc, opaque)
        return Mput(
            topic=topic,
            partition=number,
            count=self.count,
            checksum=crc,
            opaque=opaque,
            payload=self.payload,
            producer=self.producer,
            sequence=self.sequence,
        )


class _BrokerQueue:
    """One broker: its connection and the requests in flight, oldest first."""

    def __init__(self, connection: BrokerConnection) -> None:
        self.connection = connection
        self.requests: deque[_Request] = deque()
        self.size_bytes = 0
        self.tries = 0
        self.cause: MetaqError | None = None
        """Why the connection cannot be used any more."""

    @property
    def has_room(self) -> bool:
        return len(self.requests) < LANE_COUNT_MAX and self.size_bytes < LANE_BYTES_MAX

    def drop_answered(self) -> None:
        while self.requests and self.requests[0].is_answered:
            self.size_bytes -= len(self.requests.popleft().payload)


class NamedSender:
    """Sends named batches to partitions. Blocking; one thread owns it.

    Lifecycle: a context manager; `send` any number of times, `flush`. After an error
    nothing more can be sent; `statistics` says how far it came.
    """

    def __init__(
        self,
        addresses: Mapping[BrokerId, str],
        *,
        timeout_s: float,
        clock: Clock | None = None,
    ) -> None:
        """Prepare to send; connections are made when they are needed.

        Args:
            addresses: of brokers, `meta://host:port` or `host:port`; looked into at
                the first batch for each, so that more may be added meanwhile.
            timeout_s: how long one answer may take, and how long to try to connect.
            clock: for deadlines; None is the machine's.
        """
        self._addresses = addresses
        self._timeout_s = timeout_s
        self._clock = clock or SystemClock()
        self._thread: LoopThread | None = None
        self._pool: ConnectionPool | None = None
        self._queues: dict[BrokerId, _BrokerQueue] = {}
        self._batches: Counter[TopicPartition] = Counter()
        self._changed = asyncio.Event()
        self._failure: MetaqError | None = None
        self._message_count = 0
        self._size_bytes = 0
        self._doubtful_count = 0
        self._renamed_count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def statistics(self) -> SentStatistics:
        """Return a snapshot."""
        return SentStatistics(
            message_count=self._message_count,
            size_bytes=self._size_bytes,
            doubtful_count=self._doubtful_count,
            renamed_count=self._renamed_count,
        )

    def send(
        self,
        partition: TopicPartition,
        payloads: Sequence[bytes],
        flags: Sequence[int],
        *,
        producer: str,
        sequence: int,
        spare: str,
    ) -> None:
        """Put one batch on its way; waits while too much is in flight.

        Args:
            partition: where it goes.
            payloads: at least one; attribute block, if its flag says so, and
                application bytes each. What is larger than its broker takes in one
                batch travels in several, or alone.
            flags: one for each payload.
            producer: whose messages these are, the same whenever they are sent, 1..64
                of [A-Za-z0-9._~-]; at most IN_FLIGHT_BATCHES_MAX calls per partition,
                or what was sent first is forgotten.
            sequence: number of the first payload among the producer's payloads for the
                partition, 0 or more.
            spare: a name nobody has used, under which the batch is sent when other
                messages were sent under the first one.

        Raises:
            NoBrokerError: the partition's broker cannot be reached.
            ConfigError: its address is none.
            RequestTimeoutError: answers do not come; outcomes unknown.
            WireError: a put was refused.
        """
        if self._thread is None:
            self._thread = LoopThread("metaq-named-batches")
        self._thread.run(
            self._send(partition, payloads, flags, producer, sequence, spare)
        )

    def flush(self) -> None:
        """Wait until everything sent is acknowledged; raises as `send`."""
        if self._thread is not None:
            self._thread.run(self._flush())

    def close(self) -> None:
        """Close the connections; what is in flight stays without an answer.

        Harmless twice.
        """
        if self._thread is None or not self._thread.is_usable:
            return
        try:
            self._thread.run(self._close())
        finally:
            self._thread.stop()

    # -- on the loop ------------------------------------------------------------------

    async def _send(
        self,
        partition: TopicPartition,
        payloads: Sequence[bytes],
        flags: Sequence[int],
        producer: str,
        sequence: int,
        spare: str,
    ) -> None:
        await self._mend()
        queue = await self._queue(partition.broker_id)
        capabilities = queue.connection.capabilities
        for first, end in pieces_of(payloads, capabilities):
            some = payloads[first:end]
            message_bytes = sum(map(len, some))
            is_batch = _fits(
                capabilities, message_bytes + HEADER_BYTES * len(some), len(some)
            )
            request = _Request(
                partition=partition,
                payload=encode_records(some, flags[first:end]) if is_batch else some[0],
                count=len(some),
                flag=flags[first],
                message_bytes=message_bytes,
                is_batch=is_batch,
                producer=producer,
                sequence=sequence + first,
                spare=spare,
            )
            while not self._has_room(queue, partition):
                await self._step()
            self._batches[partition] += is_batch
            queue.requests.append(request)
            queue.size_bytes += len(request.payload)
            self._submit(queue, request)

    async def _flush(self) -> None:
        await self._mend()
        while any(queue.requests for queue in self._queues.values()):
            await self._step()

    async def _close(self) -> None:
        if self._pool is not None:
            deadline_s = self._clock.monotonic_s() + CLOSE_TIMEOUT_S
            await self._pool.close(deadline_s=deadline_s)

    async def _queue(self, broker_id: BrokerId) -> _BrokerQueue:
        queue = self._queues.get(broker_id)
        if queue is None:
            address = self._addresses.get(broker_id)
            if address is None:
                raise NoBrokerError(f"broker {broker_id} is not there at the moment")
            queue = self._queues[broker_id] = _BrokerQueue(
                await self._connect(parse_address(address))
            )
        return queue

    async def _connect(self, address: BrokerAddress) -> BrokerConnection:
        if self._pool is None:
            self._pool = ConnectionPool(
                clock=self._clock,
                options=ClientOptions(connect_timeout_s=self._timeout_s),
                loop=asyncio.get_running_loop(),
            )
        deadline_s = self._clock.monotonic_s() + self._timeout_s
        return await self._pool.get(address, deadline_s=deadline_s)

    def _has_room(self, queue: _BrokerQueue, partition: TopicPartition) -> bool:
        has_few = self._batches[partition] < IN_FLIGHT_BATCHES_MAX
        return queue.cause is None and has_few and queue.has_room

    async def _step(self) -> None:
        """Wait for an outcome, and deal with it; something is in flight, or is lost."""
        await self._changed.wait()
        self._changed.clear()
        await self._mend()

    async def _mend(self) -> None:
        """Connect again where a connection is lost, or raise what ended the sending."""
        for queue in self._queues.values():
            if self._failure is None and queue.cause is not None:
                await self._recover(queue)
        if self._failure is None:
            return
        while any(
            queue.requests and not queue.cause for queue in self._queues.values()
        ):
            await self._changed.wait()
            self._changed.clear()
        raise self._failure

    async def _recover(self, queue: _BrokerQueue) -> None:
        """Connect again and send everything in flight once more."""
        cause = queue.cause
        assert cause is not None
        queue.tries += 1
        if queue.tries > TRIES_MAX:
            raise cause
        try:
            queue.connection = await self._connect(queue.connection.address)
        except NoBrokerError as error:
            raise GivenUpError(f"{cause}; then {error}") from error
        if self._failure is not None:  # refused meanwhile
            return
        queue.cause = None
        queue.requests = deque(r for r in queue.requests if not r.is_answered)
        queue.size_bytes = sum(len(r.payload) for r in queue.requests)
        has_dedup = queue.connection.capabilities.dedup
        for request in queue.requests:
            if request.may_be_stored and not (request.is_batch and has_dedup):
                request.is_in_doubt = True
        for request in tuple(queue.requests):
            self._submit(queue, request)

    def _submit(self, queue: _BrokerQueue, request: _Request) -> None:
        connection = queue.connection
        opaque = connection.next_opaque()

        def on_reply(outcome: Reply | MetaqError) -> None:
            if isinstance(outcome, MetaqError):
                self._on_loss(queue, request, outcome)
            else:
                self._on_reply(queue, request, outcome)
            self._changed.set()

        try:
            connection.submit(
                encode(request.command(opaque)),
                opaque,
                on_reply,
                deadline_s=self._clock.monotonic_s() + self._timeout_s,
                is_alone=request.is_batch,
            )
        except ClosedError as error:
            # It was lost while nothing was in flight that could have told.
            queue.cause = queue.cause or error
            self._changed.set()

    def _on_loss(
        self, queue: _BrokerQueue, request: _Request, error: MetaqError
    ) -> None:
        request.may_be_stored |= not isinstance(error, NotSentError)
        queue.cause = queue.cause or error
        # Of one that is not answered the others are not waited for: order decides.
        queue.connection.close("a put was not answered in time")

    def _on_reply(self, queue: _BrokerQueue, request: _Request, reply: Reply) -> None:
        failure = _failure_of(reply, request.partition.partition)
        if isinstance(failure, BadReplyError):
            # It says nothing of the put, which is sent again.
            queue.cause = queue.cause or failure
            queue.connection.close_for(failure)
            self._on_loss(queue, request, failure)
            return
        if isinstance(failure, SequenceUsedError) and request.spare:
            request.producer, request.spare = request.spare, None
            self._renamed_count += request.count
            self._submit(queue, request)
            return
        request.is_answered = True
        self._batches[request.partition] -= request.is_batch
        queue.drop_answered()
        if failure:
            self._failure = self._failure or failure
            return
        queue.tries = 0
        self._message_count += request.count
        self._size_bytes += request.message_bytes
        if request.is_in_doubt:
            self._doubtful_count += request.count


def _failure_of(reply: Reply, partition: int) -> MetaqError | None:
    try:
        parse_receipt(reply, partition)
    except MetaqError as error:
        return error
    return None


def _fits(capabilities: Capabilities, size_bytes: int, count: int) -> bool:
    """Tell whether a broker takes so many records of so many bytes as one batch."""
    return (
        capabilities.has_mput
        and size_bytes <= (capabilities.batch_bytes_max or MIB)
        and count <= (capabilities.batch_records_max or BATCH_RECORDS_MAX)
    )


def pieces_of(
    payloads: Sequence[bytes], capabilities: Capabilities
) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of what travels together, in order, one payload or more each.

    A piece of several is within what the broker takes as one batch; without `mput`
    there is none. `payloads` are one at least.
    """
    whole_bytes = sum(map(len, payloads)) + HEADER_BYTES * len(payloads)
    if _fits(capabilities, whole_bytes, len(payloads)):
        yield 0, len(payloads)
        return
    first, size_bytes = 0, 0
    for index, payload in enumerate(payloads):
        size_bytes += HEADER_BYTES + len(payload)
        if index > first and not _fits(capabilities, size_bytes, index + 1 - first):
            yield first, index
            first, size_bytes = index, HEADER_BYTES + len(payload)
    yield first, len(payloads)
