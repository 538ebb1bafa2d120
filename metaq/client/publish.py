"""Many messages to many partitions, pipelined, in order, with nothing hidden.

Theory of operation: there is one lane per broker: a connection and the requests in
flight on it, oldest first. Where the broker announced `mput`, the payloads of one
`send` travel as batches; elsewhere each is a put of its own, pipelined.

When a connection breaks, or an answer does not come in time, nobody knows which of the
requests in flight were stored. The lane connects again and sends all of them once
more, in the same order; their messages are counted as *doubtful*, because they may be
there twice. A batch carries the same producer and sequence both times, so that a broker
that announced `dedup` stores it once: it is not doubtful there. After `TRIES_MAX` such
rounds without one acknowledgement in between, or when the broker cannot be reached for
the time of one request, the error is raised.

Whoever may be run again with the same messages, as a task of Spark is, names the
producer of each batch himself (`send_records`): what an earlier run has stored is then
not stored again. Such a batch has a second name for the case that the first one was
used for other messages.

A refusal (closed partition, no space, unknown topic) ends the sending: nothing new goes
out, the answers to what is in flight are waited for, each within its time, and then the
first refusal is raised. What has no answer by then has an unknown outcome.

Order: within a partition messages lie in the order of `send`, also with several
requests in flight, because brokers of this package store the puts of one connection in
order. A Java broker may not (broker spec 1.2).
"""

import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, repeat
from types import MappingProxyType
from typing import Final
from zlib import crc32

from metaq.client.discovery import Cluster
from metaq.client.errors import ConnectionLostError, GivenUpError
from metaq.client.replies import parse_receipt
from metaq.client.wire import WireConnection, pump
from metaq.clock import Clock, SystemClock
from metaq.errors import ClientError, MetaqError, NoBrokerError, RequestTimeoutError
from metaq.model import BrokerId, TopicPartition
from metaq.protocol.commands import Command, Mput, Put, Reply
from metaq.protocol.version import Capabilities
from metaq.record.checksum import CHECKSUM_MASK, checksum
from metaq.record.layout import HEADER, HEADER_BYTES
from metaq.retry import Backoff
from metaq.zk.znodes import BrokerAddress

BATCH_BYTES_MAX: Final = 1024 * 1024
"""Larger batches gain nothing: the sync costs as much as writing half of this."""
BATCH_RECORDS_MAX: Final = 8192
LANE_BYTES_MAX: Final = 8 * 1024 * 1024
"""Bytes in flight to one broker before `send` waits."""
LANE_COUNT_MAX: Final = 2000
"""Requests in flight to one broker before `send` waits."""
BATCHES_IN_FLIGHT_MAX: Final = 5
"""Batches in flight to one partition before `send` waits: a broker remembers so many of
a producer, and refuses to be sent an older one again."""
TRIES_MAX: Final = 3
BACKOFF: Final = Backoff(first_s=0.1, max_s=1.0)
_NAME_USED: Final = re.compile(r"sequence \d+ of producer \S+ (?:is|was) ")
"""In the text of a refusal: producer and sequence stand for other records."""


@dataclass(frozen=True, slots=True)
class PublishStatistics:
    """What a publisher has done so far."""

    message_count: int
    """Acknowledged messages."""
    size_bytes: int
    """Their payload bytes."""
    by_partition: Mapping[TopicPartition, int]
    """Acknowledged messages per partition."""
    doubtful_count: int
    """Acknowledged messages that may be stored twice."""
    renamed_count: int
    """Messages that were sent under a second name; may be stored twice as well."""
    refused_count: int
    """Messages that were answered with an error."""
    in_flight_count: int
    """Messages sent and not yet answered."""


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
    spare: str | None = None
    deadline_s: float = 0.0
    is_doubtful: bool = False
    is_answered: bool = False

    def command(self, opaque: int) -> Command:
        """Return what goes on the wire."""
        topic, number = self.partition.topic, self.partition.partition
        if not self.is_batch:
            crc = checksum(self.payload)
            return Put(topic, number, self.payload, self.flag, crc, opaque)
        return Mput(
            topic=topic,
            partition=number,
            count=self.count,
            checksum=checksum(self.payload),
            opaque=opaque,
            payload=self.payload,
            producer=self.producer,
            sequence=self.sequence,
        )


class _Lane:
    """One broker: its connection and the requests in flight, oldest first."""

    def __init__(self, connection: WireConnection) -> None:
        self.connection = connection
        self.requests: deque[_Request] = deque()
        self.size_bytes = 0
        self.tries = 0

    @property
    def address(self) -> BrokerAddress:
        return self.connection.address

    @property
    def has_room(self) -> bool:
        return len(self.requests) < LANE_COUNT_MAX and self.size_bytes < LANE_BYTES_MAX

    def drop_answered(self) -> None:
        while self.requests and self.requests[0].is_answered:
            self.size_bytes -= len(self.requests.popleft().payload)


class Publisher:
    """Sends to the partitions of a cluster. Blocking; one thread owns it.

    Lifecycle: `send` any number of times, `flush`, `close`. After an error nothing
    more can be sent; `statistics` says how far it came.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        producer: str,
        timeout_s: float,
        clock: Clock | None = None,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        """Prepare to send; connections are made when they are needed.

        Args:
            cluster: where the brokers are.
            producer: a name nobody else sends under, 1..64 of [A-Za-z0-9._~-].
            timeout_s: how long one request may take.
            clock: for deadlines; None is the machine's.
            sleep: waits that many seconds, between two tries to connect; None waits
                by the clock.
        """
        self._cluster = cluster
        self._producer = producer
        self._timeout_s = timeout_s
        self._clock = clock or SystemClock()
        self._sleep = sleep or self._wait
        self._lanes: dict[BrokerId, _Lane] = {}
        self._sequences: dict[TopicPartition, int] = {}
        self._batches: Counter[TopicPartition] = Counter()
        self._acknowledged: dict[TopicPartition, int] = {}
        self._size_bytes = 0
        self._doubtful_count = 0
        self._refused_count = 0
        self._renamed_count = 0
        self._failure: MetaqError | None = None

    def statistics(self) -> PublishStatistics:
        """Return a snapshot."""
        requests = [r for lane in self._lanes.values() for r in lane.requests]
        return PublishStatistics(
            message_count=sum(self._acknowledged.values()),
            size_bytes=self._size_bytes,
            by_partition=MappingProxyType(dict(sorted(self._acknowledged.items()))),
            doubtful_count=self._doubtful_count,
            renamed_count=self._renamed_count,
            refused_count=self._refused_count,
            in_flight_count=sum(r.count for r in requests if not r.is_answered),
        )

    def send(
        self, partition: TopicPartition, payloads: Sequence[bytes], *, flag: int = 0
    ) -> None:
        """Put messages on their way, in order; waits while too much is in flight.

        Args:
            partition: where they go.
            payloads: attribute block, if `flag` says so, and application bytes each.
            flag: of all of them.

        Raises:
            NoBrokerError: the partition's broker cannot be reached.
            RequestTimeoutError: answers do not come; outcomes unknown.
            WireError: a put was refused.
        """
        lane = self._lane(partition.broker_id)
        capabilities = lane.connection.capabilities
        for batch in split_batches(payloads, capabilities):
            sequence = self._sequences.get(partition, 0)
            self._sequences[partition] = sequence + len(batch)
            is_batch = capabilities.has_mput and len(batch) > 1
            request = _Request(
                partition=partition,
                payload=encode_batch(batch, flag) if is_batch else batch[0],
                count=len(batch),
                flag=flag,
                message_bytes=sum(map(len, batch)),
                is_batch=is_batch,
                producer=self._producer,
                sequence=sequence,
            )
            self._enqueue(lane, request)
        # Take what has been answered, and push out what is queued, without waiting.
        self._pump(self._clock.monotonic_s())

    def send_records(
        self,
        partition: TopicPartition,
        payloads: Sequence[bytes],
        flags: Sequence[int],
        *,
        producer: str,
        sequence: int,
        spare: str,
    ) -> None:
        """Put one named batch on its way; raises and waits as `send`.

        Args:
            partition: where it goes.
            payloads: attribute block, if its flag says so, and application bytes each.
            flags: one for each payload.
            producer: whose messages these are, the same whenever they are sent; at
                most BATCHES_IN_FLIGHT_MAX calls per partition, or what was sent first
                is forgotten.
            sequence: number of the first payload among the producer's payloads for the
                partition, 0 or more.
            spare: a name nobody has used, under which the batch is sent when other
                messages were sent under the first one.
        """
        lane = self._lane(partition.broker_id)
        capabilities = lane.connection.capabilities
        size_bytes = sum(map(len, payloads)) + HEADER_BYTES * len(payloads)
        batches: Iterable[Sequence[bytes]] = [payloads]
        if not _fits(capabilities, size_bytes, len(payloads)):
            batches = split_batches(payloads, capabilities, bytes_max=size_bytes)
        first = 0
        for batch in batches:
            some = flags[first : first + len(batch)]
            is_batch = len(batch) > 1 or _fits(
                capabilities, len(batch[0]) + HEADER_BYTES, 1
            )
            request = _Request(
                partition=partition,
                payload=encode_records(batch, some) if is_batch else batch[0],
                count=len(batch),
                flag=some[0],
                message_bytes=sum(map(len, batch)),
                is_batch=is_batch,
                producer=producer,
                sequence=sequence + first,
                spare=spare,
            )
            first += len(batch)
            self._enqueue(lane, request)
        self._pump(self._clock.monotonic_s())

    def flush(self) -> None:
        """Wait until everything sent is acknowledged; raises as `send`."""
        while any(lane.requests for lane in self._lanes.values()):
            self._step()

    def close(self) -> None:
        """Close the connections; what is in flight stays without an answer."""
        for lane in self._lanes.values():
            lane.connection.close()

    # -- inside -----------------------------------------------------------------------

    def _wait(self, wait_s: float) -> None:
        # Nothing to move: it only waits.
        pump([], deadline_s=self._clock.monotonic_s() + wait_s, clock=self._clock)

    def _lane(self, broker_id: BrokerId) -> _Lane:
        lane = self._lanes.get(broker_id)
        if lane is None:
            address = self._cluster.brokers.get(broker_id)
            if address is None:
                raise NoBrokerError(f"broker {broker_id} is not there at the moment")
            lane = self._lanes[broker_id] = _Lane(self._connect(address))
        return lane

    def _connect(self, address: BrokerAddress) -> WireConnection:
        return WireConnection.open(
            address, timeout_s=self._timeout_s, clock=self._clock
        )

    def _enqueue(self, lane: _Lane, request: _Request) -> None:
        while not self._has_room(lane, request.partition):
            self._step()
        self._batches[request.partition] += request.is_batch
        lane.requests.append(request)
        lane.size_bytes += len(request.payload)
        self._submit(lane, request)

    def _has_room(self, lane: _Lane, partition: TopicPartition) -> bool:
        has_few = self._batches[partition] < BATCHES_IN_FLIGHT_MAX
        return has_few and lane.has_room and lane.connection.has_room

    def _submit(self, lane: _Lane, request: _Request) -> None:
        connection = lane.connection
        opaque = connection.next_opaque()
        request.deadline_s = self._clock.monotonic_s() + self._timeout_s

        def on_reply(reply: Reply) -> None:
            self._on_reply(lane, request, reply)

        connection.submit(request.command(opaque), opaque, on_reply)

    def _on_reply(self, lane: _Lane, request: _Request, reply: Reply) -> None:
        failure = _failure_of(reply)
        if failure and request.spare and _NAME_USED.search(str(failure)):
            request.producer, request.spare = request.spare, None
            self._renamed_count += request.count
            self._submit(lane, request)
            return
        request.is_answered = True
        self._batches[request.partition] -= request.is_batch
        lane.drop_answered()
        if failure:
            error = failure
            self._failure = self._failure or error
            self._refused_count += request.count
            return
        lane.tries = 0
        partition = request.partition
        known = self._acknowledged.get(partition, 0)
        self._acknowledged[partition] = known + request.count
        self._size_bytes += request.message_bytes
        if request.is_doubtful:
            self._doubtful_count += request.count

    def _step(self) -> None:
        """Wait for one event; the oldest request in flight bounds the wait."""
        lanes = [lane for lane in self._lanes.values() if lane.requests]
        oldest = min(lanes, key=lambda lane: lane.requests[0].deadline_s)
        if not self._pump(oldest.requests[0].deadline_s):
            oldest.connection.close()
            self._recover(
                oldest,
                RequestTimeoutError(
                    f"put to {oldest.address}: no answer within {self._timeout_s:g} s;"
                    " outcome unknown"
                ),
            )

    def _pump(self, deadline_s: float) -> bool:
        connections = [
            lane.connection for lane in self._lanes.values() if lane.requests
        ]
        try:
            has_moved = pump(connections, deadline_s=deadline_s, clock=self._clock)
        except ClientError as error:
            for lane in self._lanes.values():
                if not lane.connection.is_open:
                    self._recover(lane, error)
            has_moved = True
        if self._failure is not None:
            self._drain()
            raise self._failure
        return has_moved

    def _recover(self, lane: _Lane, cause: ClientError) -> None:
        """Connect again and send everything in flight once more."""
        # A refusal that arrived with the break decides: going on would hide it.
        if self._failure is not None:
            self._drain()
            raise self._failure
        while True:
            lane.tries += 1
            if lane.tries > TRIES_MAX:
                raise cause
            try:
                lane.connection = self._reconnect(lane, cause)
                self._send_again(lane)
            except GivenUpError:
                raise
            except RequestTimeoutError as error:
                cause = error
            else:
                return

    def _drain(self) -> None:
        """Take the answers that are on their way; what breaks now stays broken."""
        while lanes := [
            lane
            for lane in self._lanes.values()
            if lane.requests and lane.connection.is_open
        ]:
            deadline_s = max(lane.requests[-1].deadline_s for lane in lanes)
            connections = [lane.connection for lane in lanes]
            # A connection that is lost is closed, and no longer waited for.
            with suppress(ConnectionLostError):
                if not pump(connections, deadline_s=deadline_s, clock=self._clock):
                    return

    def _reconnect(self, lane: _Lane, cause: ClientError) -> WireConnection:
        give_up_s = self._clock.monotonic_s() + self._timeout_s
        failures = lane.tries
        while True:
            # One process has no herd to run with: the whole of each wait.
            self._sleep(BACKOFF.delay_s(failures, lambda: 1.0))
            try:
                return self._connect(lane.address)
            except NoBrokerError as error:
                failures += 1
                if self._clock.monotonic_s() >= give_up_s:
                    raise GivenUpError(f"{cause}; then {error}") from error

    def _send_again(self, lane: _Lane) -> None:
        requests = [r for r in lane.requests if not r.is_answered]
        lane.requests = deque(requests)
        lane.size_bytes = sum(len(r.payload) for r in requests)
        has_dedup = lane.connection.capabilities.dedup
        for request in requests:
            request.is_doubtful |= not (request.is_batch and has_dedup)
        for request in requests:
            # Some may be answered while the rest waits for room.
            while not lane.connection.has_room:
                deadline_s = self._clock.monotonic_s() + self._timeout_s
                one = [lane.connection]
                if not pump(one, deadline_s=deadline_s, clock=self._clock):
                    lane.connection.close()
                    raise RequestTimeoutError(
                        f"put to {lane.address}: no answer within"
                        f" {self._timeout_s:g} s; outcome unknown"
                    )
            self._submit(lane, request)


# -- batches --------------------------------------------------------------------------


def _failure_of(reply: Reply) -> MetaqError | None:
    try:
        parse_receipt(reply)
    except MetaqError as error:
        return error
    return None


def _fits(capabilities: Capabilities, size_bytes: int, count: int) -> bool:
    """Tell whether a broker takes so many records of so many bytes as one batch."""
    return (
        capabilities.has_mput
        and size_bytes <= (capabilities.batch_bytes_max or BATCH_BYTES_MAX)
        and count <= (capabilities.batch_records_max or BATCH_RECORDS_MAX)
    )


def split_batches(
    payloads: Sequence[bytes],
    capabilities: Capabilities,
    *,
    bytes_max: int = BATCH_BYTES_MAX,
) -> Iterator[Sequence[bytes]]:
    """Cut payloads into what travels together, in order; each piece holds one or more.

    Without `mput` every piece is one payload.
    """
    if not capabilities.has_mput:
        for payload in payloads:
            yield [payload]
        return
    bytes_max = min(bytes_max, capabilities.batch_bytes_max or BATCH_BYTES_MAX)
    count_max = min(
        BATCH_RECORDS_MAX, capabilities.batch_records_max or BATCH_RECORDS_MAX
    )
    first, size_bytes = 0, 0
    for index, payload in enumerate(payloads):
        size_bytes += HEADER_BYTES + len(payload)
        is_full = size_bytes > bytes_max or index - first >= count_max
        if is_full and index > first:
            yield payloads[first:index]
            first, size_bytes = index, HEADER_BYTES + len(payload)
    if first < len(payloads):
        yield payloads[first:]


def encode_batch(payloads: Sequence[bytes], flag: int) -> bytes:
    """Return the body of an `mput`: records in segment format, id 0."""
    return encode_records(payloads, [flag] * len(payloads))


def encode_records(payloads: Sequence[bytes], flags: Sequence[int]) -> bytes:
    """Return the same for payloads with a flag each."""
    # Loops in C: a task of Spark comes through here with every message.
    checksums = [crc & CHECKSUM_MASK for crc in map(crc32, payloads)]
    headers = map(HEADER.pack, map(len, payloads), checksums, repeat(0), flags)
    return b"".join(chain.from_iterable(zip(headers, payloads, strict=True)))
