"""Messages of one task: named batches, cut in the same way in every run of the task.

A failed task is repeated and sends everything again. Batches carry a producer name and
a sequence derived from the task, so brokers that announced `dedup` recognise batches
that they have stored. They remember only the last few batches of each producer, so each
producer has no more than that: the next batches belong to the next producer.

No batch on the wire has rows of two Spark batches. If the input of a task breaks off
because its source has failed, the task seems to end there; the batches sent until then
are also the first ones of the next run.

    producer  w-5f0c...-7-3-0    batches 0..4 of task 3 of the query's batch 7
              w-5f0c...-7-3-1    batches 5..9

If a repeated task has other rows, or another order of them (after a shuffle, for
example), brokers reply that these sequences belong to other messages. New rows cannot
be distinguished from old ones then, and the batch is sent under a name of this run: it
may be stored twice, and is never lost. For brokers without `mput`, each payload is a
put of its own, pipelined; names have no effect there.

Batches are sent as by every producer (`accumulator.py`, `delivery.py`), on a loop
thread of the sender's own. Failures differ (`AttemptLimits`): the first failure ends
the sending, because the caller then begins again. A request without an answer within
its time limit is sent again, up to RETRIES_MAX times; reconnecting has the same time
limit. Messages sent again and not recognised may be stored twice; they are counted.

A refusal (closed partition, no space) is such a failure: nothing more is sent, answers
to requests in flight are awaited within their time limits, and then the first refusal
is raised. Requests without an answer by then have an unknown outcome.

Order: within a partition messages are stored in the order of `send`, because brokers of
this package store the puts of one connection in order; except batches sent under their
spare name. A Java broker may not keep the order (docs/metaq-1.4/broker.md 1.2).

Source: docs/metaq-1.4/client.md 2.4 and 16, docs/metaq-1.4/broker.md 1.4.
"""

import asyncio
import math
import uuid
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from typing import Final, Self, TypeAlias

import pyarrow as pa
from pyspark import TaskContext

from metaq.client.errors import BufferFullError
from metaq.client.names import parse_address
from metaq.client.options import (
    IN_FLIGHT_BATCHES_MAX,
    MIB,
    ClientOptions,
    ProducerOptions,
)
from metaq.client.produce.attempts import AttemptLimits
from metaq.client.produce.batches import BatchName
from metaq.client.produce.delivery import Delivery
from metaq.client.produce.producer_counters import ProducerStatistics
from metaq.clock import SystemClock
from metaq.cluster_snapshot import BrokerCopies, ClusterSnapshot
from metaq.errors import NoBrokerError
from metaq.loop_thread import LoopThread
from metaq.model import BrokerAddress, BrokerId, TopicPartition
from metaq.peer.pool import ConnectionPool
from metaq.record.layout import HEADER_BYTES
from metaq.spark.leaders import LOOK_S, FindLeaders, follow_leaders, leaders_of, look
from metaq.spark.options import WireOptions
from metaq.spark.sink.decisions import ATTEMPT_MAX
from metaq.spark.sink.sink_rows import Payloads, Router

CLOSE_TIMEOUT_S: Final = 1.0
"""Time limit for closing the connections, seconds."""


class OwnSender:
    """Connections to brokers of known addresses. Blocking; owned by one thread."""

    def __init__(
        self, thread_name: str, addresses: Mapping[BrokerId, str], timeout_s: float
    ) -> None:
        """Start the thread, and run `_start` there; nothing is connected."""
        self._addresses = addresses
        self._timeout_s = timeout_s
        self._clock = SystemClock()
        self._thread = LoopThread(thread_name)
        self._thread.run(self._start())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; requests in flight get no answer. Idempotent."""
        try:
            self._thread.run_close(self._close())
        finally:
            self._thread.stop()

    async def _start(self) -> None:
        self._pool = ConnectionPool(
            clock=self._clock,
            options=ClientOptions(connect_timeout_s=self._timeout_s),
            loop=asyncio.get_running_loop(),
        )

    async def _close(self) -> None:
        deadline_s = self._clock.monotonic_s() + CLOSE_TIMEOUT_S
        await self._pool.close(deadline_s=deadline_s)

    def _deadline_s(self) -> float:
        return self._clock.monotonic_s() + self._timeout_s

    def _address_of(self, broker_id: BrokerId) -> BrokerAddress | None:
        text = self._addresses.get(broker_id)
        return None if text is None else parse_address(text)


BUFFER_BYTES_MAX: Final = 16 * MIB
"""Maximum unanswered bytes, at which `send` waits; a larger batch is sent alone."""
RETRIES_MAX: Final = 3
"""Maximum number of times that a request is sent again."""


class NamedSender(OwnSender):
    """Sends named batches to partitions. Blocking; owned by one thread.

    Lifecycle: a context manager with a thread of its own; `send` any number of times,
    `flush`. After an error nothing more can be sent; `statistics` has what was stored.
    """

    def __init__(
        self,
        addresses: Mapping[BrokerId, str],
        *,
        timeout_s: float,
        retry_timeout_s: float = math.inf,
        find: FindLeaders | None = None,
    ) -> None:
        """Prepare to send; connects when needed.

        Args:
            addresses: of brokers, `meta://host:port` or `host:port`; read with the
                first batch for each, so more may be added until then.
            timeout_s: time limit of one answer, and of connecting.
            retry_timeout_s: time limit of a batch, retries included.
            find: looks up brokers that do not answer; None keeps their addresses.

        Raises:
            NoResourcesError: no thread can be started.
        """
        self._brokers: dict[BrokerId, BrokerCopies] = {}
        self._retry_timeout_s = retry_timeout_s
        self._find = find
        super().__init__("metaq-named-batches", addresses, timeout_s)

    def statistics(self) -> ProducerStatistics:
        """Return a snapshot of the counters."""
        return self._delivery.statistics()

    @property
    def renamed_count(self) -> int:
        """Number of messages sent under a spare name, which may be stored twice."""
        return self._delivery.outcomes.renamed_count

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
        """Begin to send one batch; waits while too much is buffered.

        Args:
            partition: destination.
            payloads: at least one; each an attribute block, if its flag says so, and
                application bytes. A batch over the broker's limit is sent as several,
                or as single puts.
            flags: one for each payload.
            producer: producer name, the same in every repetition; 1..64 of
                [A-Za-z0-9._~-]. Used for at most IN_FLIGHT_BATCHES_MAX calls per
                partition, because brokers forget older batches.
            sequence: number of the first payload among the producer's payloads for the
                partition, 0 or more.
            spare: an unused producer name, used if other messages were sent under the
                first one.

        Raises:
            NoBrokerError: the partition's broker cannot be reached.
            ConfigError: its address is invalid.
            RequestTimeoutError: no answer in time; outcomes unknown.
            MessageTooLargeError: a payload exceeds the broker's limit.
            WireError: a put was refused.
            ClosedError: the sender is closed, or belongs to another process.
        """
        self._thread.require_usable()
        if partition.broker_id not in self._brokers:
            self._thread.run(self._connect(partition.broker_id))
        name = BatchName(producer, sequence, spare)
        while True:
            if self._delivery.outcomes.failure is not None:
                self.flush()  # raises it after waiting for the rest
            try:
                self._delivery.accumulator.append_batch(
                    partition, payloads, flags, name
                )
            except BufferFullError as full:
                self._delivery.accumulator.buffer.wait(
                    None, size_bytes=full.size_bytes, message_count=full.message_count
                )
            else:
                return

    def flush(self) -> None:
        """Wait until everything sent is acknowledged; raises as `send`."""
        self._thread.require_usable()
        for batch in self._delivery.accumulator.unanswered():
            batch.wait(None)
        if self._delivery.outcomes.failure is not None:
            raise self._delivery.outcomes.failure

    # -- inside -----------------------------------------------------------------------

    async def _start(self) -> None:
        await super()._start()
        options = ProducerOptions(
            # Time for all attempts, and for reconnecting.
            timeout_s=min((2 + RETRIES_MAX) * self._timeout_s, self._retry_timeout_s),
            in_flight_batches_max=IN_FLIGHT_BATCHES_MAX,
            buffer_bytes_max=BUFFER_BYTES_MAX,
        )
        self._delivery = Delivery(
            pool=self._pool,
            options=options,
            clock=self._clock,
            producer_id="",  # each batch has its own
            request_refresh=lambda: None,
            limits=AttemptLimits(self._timeout_s, RETRIES_MAX),
        )
        if self._find is not None:
            self._following = asyncio.get_running_loop().create_task(
                follow_leaders(
                    self._find, self._brokers.keys, self._progress, self._move
                ),
                name="follow leaders",
            )

    async def _connect(self, broker_id: BrokerId) -> None:
        """Look up a broker, and wait for the first connection to it."""
        address = self._address_of(broker_id)
        if address is None:
            raise NoBrokerError(f"broker {broker_id} is away at the moment")
        deadline_s = self._deadline_s()
        while True:
            soon_s = deadline_s
            if self._find is not None:
                soon_s = min(deadline_s, self._clock.monotonic_s() + LOOK_S)
            try:
                await self._pool.get(address, deadline_s=soon_s)
                break
            except NoBrokerError:
                if self._find is None or soon_s == deadline_s:
                    raise
            address = (await look(self._find, [broker_id])).get(broker_id, address)
        self._use(broker_id, address)

    def _use(self, broker_id: BrokerId, address: BrokerAddress) -> None:
        self._brokers[broker_id] = BrokerCopies(address, {})
        self._delivery.on_snapshot(ClusterSnapshot(brokers=dict(self._brokers)), ())

    def _progress(self) -> int | None:
        """Return a number that grows with answers; None if none is expected."""
        if not self._delivery.accumulator.buffer.has_unanswered:
            return None
        return self._delivery.statistics().acknowledged_count

    def _move(self, broker_id: BrokerId, address: BrokerAddress) -> None:
        """Send to a new leader; requests unanswered by the former are sent again."""
        former = self._brokers[broker_id].leader
        if former is None or former == address:
            return
        self._use(broker_id, address)
        self._pool.leave(former, "another replica leads")

    async def _close(self) -> None:
        self._delivery.close("the sender of named batches was closed")
        await super()._close()


Targets: TypeAlias = Mapping[str, Mapping[TopicPartition, str]]
"""Topic → partition → address of the broker that takes its puts."""
FindTargets: TypeAlias = Callable[[Collection[str]], Targets]
"""Returns the targets of topics; raises NoBrokerError if no broker takes their puts."""

BATCH_RECORDS_MAX: Final = 8192
_NAME_BYTES: Final = 12
"""Bytes of the hash of a write's name, so that producer names have at most 64
characters."""


@dataclass(frozen=True, slots=True)
class WriteName:
    """Name of a task's write; every run of the task has another `attempt`."""

    query: str
    batch: int
    task: int
    attempt: int
    """Random number of the run, unique among all runs."""

    @property
    def producer(self) -> str:
        """Prefix of its producer names."""
        digest = blake2b(self.query.encode(), digest_size=_NAME_BYTES).hexdigest()
        return f"w-{digest}-{self.batch}-{self.task}"

    @property
    def turn(self) -> int:
        """First turn of round robin, which differs between tasks and batches."""
        return self.batch * 7 + self.task


@dataclass(frozen=True, slots=True)
class Written:
    """Counters of one task."""

    message_count: int
    """Number of messages on the disks of brokers."""
    size_bytes: int
    doubtful_count: int
    """Number of messages that may be stored twice: sent again to a broker that cannot
    recognise them, or under a spare name."""


@dataclass(slots=True)
class _Sent:
    """Number of batches of one partition, and the next sequence."""

    batch_count: int = 0
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class RowTargets:
    """The topics of a task's rows, and their partitions."""

    topic: str | None
    """Topic of all rows; None if each row names its own."""
    known: Targets
    find: FindTargets


class RowOutbox(ABC):
    """Routes the rows of one task. Blocking; one thread."""

    def __init__(self, targets: RowTargets, first_turn: int) -> None:
        """Prepare to route; for `first_turn` see `Router`."""
        self._targets = targets
        self._router = Router({}, first_turn=first_turn)
        self._addresses: dict[BrokerId, str] = {}
        for known, there in targets.known.items():
            self._add_topic(known, there)

    def __enter__(self) -> Self:
        return self

    def put(self, batch: pa.RecordBatch) -> None:
        """Send rows; waits only while too much is in flight.

        Raises:
            RowError: a row cannot be written; rows before it may have been written.
            MetaqError: as the sender's `send`; outcomes are unknown.
        """
        topic, find = self._targets.topic, self._targets.find
        missing = self._router.missing(batch) if topic is None else ()
        for name, there in find(missing).items() if missing else ():
            self._add_topic(name, there)
        for partition, new in self._router.route(batch, topic).items():
            self._send(partition, new)

    @abstractmethod
    def _send(self, partition: TopicPartition, new: Payloads) -> None:
        """Begin to send rows to one partition, in order."""

    def _add_topic(self, topic: str, there: Mapping[TopicPartition, str]) -> None:
        if not there:
            raise NoBrokerError(f"no broker takes puts to topic '{topic}' now")
        self._router.add_topic(topic, there)
        for partition, address in there.items():
            self._addresses[partition.broker_id] = address


class Outbox(RowOutbox):
    """Sends the rows of one task in named batches. Blocking; one thread.

    Lifecycle: a context manager; `put` any number of times, `finish` once.
    """

    def __init__(
        self,
        name: WriteName,
        targets: RowTargets,
        *,
        batch_bytes: int,
        wire: WireOptions,
    ) -> None:
        """Prepare to send.

        Args:
            name: of the task.
            targets: destinations of the rows.
            batch_bytes: maximum bytes of one batch; a larger message is sent alone.
            wire: time-outs, and the cluster for new leaders.
        """
        super().__init__(targets, name.turn)
        self._name = name
        self._batch_bytes = batch_bytes
        self._sent: dict[TopicPartition, _Sent] = {}
        self._sender = NamedSender(
            self._addresses,
            timeout_s=wire.request_timeout_s,
            retry_timeout_s=wire.retry_timeout_s,
            find=leaders_of(wire),
        )

    def __exit__(self, *_error: object) -> None:
        self._sender.close()

    def finish(self) -> Written:
        """Wait for every answer, and return the counters; raises as `put`."""
        self._sender.flush()
        done = self._sender.statistics()
        return Written(
            done.acknowledged_count,
            done.acknowledged_bytes,
            done.doubtful_count + self._sender.renamed_count,
        )

    def _send(self, partition: TopicPartition, new: Payloads) -> None:
        sent = self._sent.setdefault(partition, _Sent())
        payloads, flags, first = new.payloads, new.flags, 0
        ends = list(accumulate(map(HEADER_BYTES.__add__, map(len, payloads))))
        while first < len(payloads):
            sent_bytes = ends[first - 1] if first else 0
            end = bisect_right(ends, sent_bytes + self._batch_bytes)
            end = min(max(end, first + 1), first + BATCH_RECORDS_MAX)
            chunk, number = divmod(sent.batch_count, IN_FLIGHT_BATCHES_MAX)
            if not number:
                sent.sequence = 0
            producer = self._name.producer
            self._sender.send(
                partition,
                payloads[first:end],
                flags[first:end],
                producer=f"{producer}-{chunk}",
                sequence=sent.sequence,
                spare=f"{producer}-{sent.batch_count}~{self._name.attempt}",
            )
            sent.sequence += end - first
            sent.batch_count += 1
            first = end


_QUERY: str = "sql.streaming.queryId"
_BATCH: str = "streaming.sql.batchId"
TURN_CHARS: Final = 16


def draw_turn() -> str:
    """Return a new random text, unique in practice."""
    return uuid.uuid4().hex[:TURN_CHARS]


def write_name(write: str) -> WriteName:
    """Return the name under which this task writes.

    A streaming query keeps its id in the checkpoint, and a micro-batch repeated after a
    restart keeps its number. The attempt is random, because each Spark driver counts
    runs from 0, and brokers remember names for longer.

    Args:
        write: name of a write, the same in all runs of its tasks; identifies a write
            that is not a micro-batch of a query.
    """
    task = TaskContext.get()
    attempt = uuid.uuid4().int & ATTEMPT_MAX
    if task is None:
        return WriteName(write, 0, 0, attempt)
    query, batch = task.getLocalProperty(_QUERY), task.getLocalProperty(_BATCH)
    return WriteName(
        query=f"{query} {write}" if query else write,
        batch=int(batch) if batch else 0,
        task=task.partitionId(),
        attempt=attempt,
    )
