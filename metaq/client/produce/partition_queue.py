"""Partition queue: one partition's batches, from the first message to the last answer.

Also their form on the wire: parts as their broker takes them, and the frames of each.
Nothing here sends; the delivery does.
"""

from asyncio import TimerHandle
from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Protocol

from metaq.client.errors import MessageTooLargeError, OutcomeUnknownError
from metaq.client.options import ProducerOptions
from metaq.client.produce.attempts import BatchSpan, plan_spans
from metaq.client.produce.batches import (
    Batch,
    BatchName,
    BatchOutcome,
    PutResults,
    SendResult,
)
from metaq.cluster_snapshot import Counts
from metaq.errors import MetaqError, NoBrokerError, NotSentError, RemoteProtocolError
from metaq.model import BrokerAddress, MessageId, Offset, TopicPartition
from metaq.peer.connection import PutListener
from metaq.peer.replies import ReceiptColumns, parse_receipt
from metaq.protocol.codec import encode, encode_puts
from metaq.protocol.commands import Command, Mput, Reply
from metaq.protocol.version import Capabilities
from metaq.record.checksum import checksum, checksums
from metaq.record.layout import HEADER_BYTES, PAYLOAD_BYTES_MAX


class PutConnection(Protocol):
    """Connection interface used by the delivery; `BrokerConnection` is one."""

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities that the broker announced."""
        ...

    @property
    def is_open(self) -> bool:
        """Whether the broker is still the one that announced them; from any thread."""
        ...

    @property
    def has_room(self) -> bool:
        """Whether one more request keeps the bound on requests in flight."""
        ...

    def next_opaque(self) -> int:
        """Return a number that no request in flight has."""
        ...

    def submit(
        self,
        frame: bytes,
        opaque: int,
        on_reply: Callable[[Reply | MetaqError], None],
        *,
        deadline_s: float,
        is_alone: bool = False,
    ) -> None:
        """Send a request; see `BrokerConnection.submit`."""
        ...

    def next_opaques(self, count: int) -> range:
        """Return numbers that no request in flight has."""
        ...

    def submit_puts(
        self, frames: bytes, opaques: range, listener: PutListener, *, deadline_s: float
    ) -> None:
        """Send a run of puts; see `BrokerConnection.submit_puts`."""
        ...

    async def call(self, command: Command, *, deadline_s: float) -> Reply:
        """Send a command and return its reply; see `BrokerConnection.call`."""
        ...

    def close_for(self, error: RemoteProtocolError) -> None:
        """Close because the broker broke the rules."""
        ...


class Pool(Protocol):
    """Pool interface used by the delivery; `ConnectionPool` is one."""

    def ready(self, address: BrokerAddress) -> PutConnection | None:
        """Return the open connection to an address, if there is one."""
        ...

    async def get(self, address: BrokerAddress, *, deadline_s: float) -> PutConnection:
        """Return a connection; NoBrokerError at the deadline."""
        ...

    def when_open(
        self,
        address: BrokerAddress,
        on_end: Callable[[MetaqError | None], None],
        *,
        deadline_s: float,
    ) -> Callable[[], None]:
        """Call back when there is a connection; see `ConnectionPool.when_open`."""
        ...


class BatchPart:
    """Messages of a batch that leave together."""

    __slots__ = (
        "attempt", "batch", "error", "is_in_doubt", "name", "place", "sequence", "span",
    )  # fmt: skip

    def __init__(self, batch: Batch, span: BatchSpan, place: int) -> None:
        self.batch = batch
        self.span = span
        self.place = place  # in its queue's order
        self.sequence: int | None = None
        self.name: BatchName | None = batch.name
        self.attempt = 0
        self.error: MetaqError | None = None  # of the last attempt
        self.is_in_doubt = False

    @property
    def message_count(self) -> int:
        """Return the number of its messages."""
        return self.span.end - self.span.first

    @property
    def command_count(self) -> int:
        """Return the number of commands that it is sent as."""
        return 1 if self.span.is_mput else self.message_count

    def cut(self, first: int, end: int) -> "BatchPart":
        """Return a new part with some of its messages."""
        part = self.like(BatchSpan(first, end, is_mput=self.span.is_mput))
        part.attempt = self.attempt
        return part

    def like(self, span: BatchSpan) -> "BatchPart":
        """Return a new part in the same state, with other messages of the batch."""
        part = BatchPart(self.batch, span, self.place)
        part.name, part.error = self.name, self.error
        part.is_in_doubt = self.is_in_doubt
        return part

    def take_spare(self) -> bool:
        """Go on under the spare name; False when there is none."""
        if self.name is None or self.name.spare is None:
            return False
        self.name = BatchName(self.name.spare, self.name.sequence, None)
        self.sequence = None
        return True


class PutRun:
    """Puts of one part in flight, and the receipts of their broker.

    Where stored messages lie is kept column by column. A message that failed is cut
    out, and is of a part of its own then. A `PutListener` of a connection.
    """

    __slots__ = (
        "_first", "_ids", "_is_stored", "_offsets", "_on_failed", "_on_stored",
        "_partition", "_sizes", "left", "part",
    )  # fmt: skip

    def __init__(
        self,
        part: BatchPart,
        partition: TopicPartition,
        opaques: range,
        *,
        sizes: Callable[[], Sequence[int]],
        on_stored: Callable[["PutRun", int], None],
        on_failed: Callable[["PutRun", Sequence[int], MetaqError], None],
    ) -> None:
        """Begin without answers.

        Args:
            part: whose messages they are.
            partition: where they go.
            opaques: of each put.
            sizes: returns the bytes of each put's frame.
            on_stored: hears that so many more are stored.
            on_failed: hears which opaques failed.
        """
        self.part = part
        self.left = count = len(opaques)
        """Puts in flight; counted down by the queue, whose commands they are."""
        self._partition = partition
        self._first = opaques.start
        self._ids = [0] * count
        self._offsets = [0] * count
        self._is_stored: list[bool | None] = [None] * count  # None: no answer
        self._sizes = sizes
        self._on_stored = on_stored
        self._on_failed = on_failed

    def sizes(self) -> Sequence[int]:
        """Return the bytes of each put's frame."""
        return self._sizes()

    def on_receipts(self, receipts: ReceiptColumns) -> None:
        """Take note of puts that are stored; `receipts` are in order of opaques."""
        if not receipts.are_of(self._partition.partition):
            for reply in receipts.replies():
                self.on_outcome((reply.opaque,), reply)
        elif self.left:  # else they were given up
            self._take(receipts)
            self._on_stored(self, len(receipts.opaques))

    def on_outcome(self, opaques: Sequence[int], outcome: Reply | MetaqError) -> None:
        """Take note of the reply to one put, or of the error of many, ascending."""
        try:
            if isinstance(outcome, MetaqError):
                raise outcome
            receipt = parse_receipt(outcome, self._partition.partition)
        except MetaqError as error:
            if self.left:
                self._on_failed(self, opaques, error)
        else:
            place = [receipt.partition]
            self.on_receipts(
                ReceiptColumns(opaques, [receipt.id], place, [receipt.offset])
            )

    def _take(self, receipts: ReceiptColumns) -> None:
        opaques, ids, _, offsets = receipts
        first, end = opaques[0] - self._first, opaques[-1] + 1 - self._first
        if end - first == len(opaques):
            self._ids[first:end] = ids
            self._offsets[first:end] = offsets
            self._is_stored[first:end] = [True] * len(opaques)
        else:
            for opaque, message_id, offset in zip(opaques, ids, offsets, strict=True):
                at = opaque - self._first
                self._ids[at], self._offsets[at] = message_id, offset
                self._is_stored[at] = True

    def unanswered(self) -> list[int]:
        """Return the opaques of unanswered puts, ascending."""
        return [
            self._first + at
            for at, is_stored in enumerate(self._is_stored)
            if is_stored is None
        ]

    def cut(self, opaques: Sequence[int]) -> list[BatchPart]:
        """Cut out failed puts, ascending; neighbours stay together.

        The batch waits for each part. Without memory for all, none is cut out.
        """
        parts, base = [], self.part.span.first
        places = [opaque - self._first for opaque in opaques]
        for _, group in groupby(enumerate(places), lambda pair: pair[1] - pair[0]):
            some = [at for _, at in group]
            parts.append(self.part.cut(base + some[0], base + some[-1] + 1))
        self.part.batch.parts_left += len(parts)
        for at in places:
            self._is_stored[at] = False
        return parts

    def outcomes(self) -> list[BatchOutcome]:
        """Return the outcomes of the stored ones."""
        outcomes, at, place = [], 0, self._partition
        for is_stored, group in groupby(self._is_stored):
            end = at + len(list(group))
            if is_stored:
                ids, offsets = self._ids[at:end], self._offsets[at:end]
                receipt = SendResult(MessageId(ids[0]), place, Offset(offsets[0]))
                first, puts = self.part.span.first + at, PutResults(ids, offsets)
                outcomes.append(BatchOutcome(first, receipt, None, puts))
            at = end
        return outcomes


class PartitionQueue:
    """Messages of one partition: they wait, leave, and perhaps come back.

    Owner: the accumulator, under its lock, as long as they are in `open` or `sealed`;
    the delivery, on its loop, afterwards. Limits are written under the lock, on the
    loop; `partition` never changes.
    """

    __slots__ = (
        "alarm", "alone", "bytes_max", "commands", "connection", "count_max",
        "failures", "in_flight", "is_awake", "open", "partition", "payload_bytes_max",
        "places", "refused_until_s", "resume_s", "returned", "sealed", "sequence",
        "trouble", "waiting", "was_offered",
    )  # fmt: skip

    def __init__(self, partition: TopicPartition, options: ProducerOptions) -> None:
        self.partition = partition
        # The accumulator's.
        self.open: Batch | None = None
        self.sealed: deque[Batch] = deque()
        self.is_awake = False  # the delivery will ask for its batches by itself
        # Limits that its broker announced last.
        self.connection: PutConnection | None = None
        self.bytes_max = options.batch_bytes_max
        self.count_max = options.batch_count_max
        self.payload_bytes_max: int = PAYLOAD_BYTES_MAX
        # The delivery's.
        self.alarm: TimerHandle | None = None  # fills it when a pause is over
        self.alone: BatchPart | None = None  # nothing is sent while this is in flight
        self.waiting: deque[BatchPart] = deque()
        self.returned: list[BatchPart] = []
        self.in_flight: dict[BatchPart, PutRun | None] = {}  # None: an mput
        self.commands = 0  # in flight
        self.sequence = 0
        self.places = 0
        self.failures = 0  # refusals in a row
        self.resume_s = 0.0
        self.refused_until_s = 0.0  # others' messages do not move here before
        self.trouble: MetaqError | None = None  # why nothing is sent
        self.was_offered = False  # registered for puts when it was connected

    # -- limits -----------------------------------------------------------------------

    def set_connection(
        self, options: ProducerOptions, connection: PutConnection
    ) -> None:
        """Apply the limits that its broker announced, within the options."""
        capabilities = connection.capabilities
        self.connection = connection
        self.payload_bytes_max = capabilities.payload_bytes_max or PAYLOAD_BYTES_MAX
        # A message over the payload limit is over this one too, so that no open
        # batch has room for it: see `check`.
        self.bytes_max = min(
            options.batch_bytes_max,
            capabilities.batch_bytes_max or options.batch_bytes_max,
            self.payload_bytes_max + HEADER_BYTES,
        )
        self.count_max = min(
            options.batch_count_max,
            capabilities.batch_records_max or options.batch_count_max,
        )

    def check(self, size_bytes: int, *, is_lasting: bool = False) -> None:
        """Refuse a message that the broker does not take.

        A broker that went away may announce more when it is back: limits of a lost
        connection refuse nothing. The delivery finds out with the message at hand.

        Args:
            size_bytes: of the record, header included.
            is_lasting: the message is to be kept until the broker is back: the last
                known limits count.

        Raises:
            MessageTooLargeError: its payload is over the limit.
        """
        payload_bytes = size_bytes - HEADER_BYTES
        if payload_bytes <= self.payload_bytes_max:
            return
        if is_lasting or (self.connection is not None and self.connection.is_open):
            raise MessageTooLargeError(
                f"message: {self.partition} takes at most {self.payload_bytes_max}"
                f" bytes, got {payload_bytes}"
            )

    # -- order ------------------------------------------------------------------------

    def is_early(self, puts: Counts) -> bool:
        """Tell whether a broker that came back has not registered the topic again.

        A put may then keep a MetaQ 1.4 broker from registering it at all, and its
        start fails over that.

        Args:
            puts: how many partitions of each topic each broker takes puts to.
        """
        place = self.partition
        count = puts.get(place.topic, {}).get(place.broker_id, 0)
        if place.partition < count or not self.was_offered:
            self.was_offered = place.partition < count
            return False
        self.trouble = NoBrokerError(
            f"{place}: broker {place.broker_id} does not take puts at the moment"
        )
        return True

    def note_success(self) -> None:
        """Forget the last error."""
        self.failures, self.trouble, self.refused_until_s = 0, None, 0.0

    def next_place(self) -> int:
        """Return the place of the next part in the queue's order."""
        self.places += 1
        return self.places

    def take_back(self) -> None:
        """Put returned parts in front of waiting ones, in the old order.

        Parts in doubt go first. The others get new sequences, and a broker does
        not take a sequence below one that it has seen.
        """
        self.returned.sort(key=_order_of)
        self.waiting.extendleft(reversed(self.returned))
        self.returned.clear()

    def part_of(self, batch: Batch) -> BatchPart:
        """Return the one part of a batch that was just taken."""
        whole = BatchSpan(0, len(batch.payloads), is_mput=True)
        return BatchPart(batch, whole, self.next_place())

    def fit_next(
        self, capabilities: Capabilities, puts_max: int
    ) -> tuple[BatchPart, MessageTooLargeError | None]:
        """Cut the first waiting part as the broker wants it.

        Args:
            capabilities: of the broker.
            puts_max: most single puts that leave together.

        Returns:
            The part that is first now, and the error if the broker never takes it.
        """
        part = self.waiting[0]
        batch, span = part.batch, part.span
        if part.is_in_doubt and span.is_mput and capabilities.has_mput:
            return part, None  # it is recognised by its size
        spans = plan_spans(batch.ends, span.first, span.end, capabilities, puts_max)
        if spans != [span]:
            self.waiting.popleft()
            part.batch.parts_left += len(spans) - 1
            self.waiting.extendleft(part.like(each) for each in reversed(spans))
        part = self.waiting[0]
        limit = capabilities.payload_bytes_max
        if limit is None or part.span.is_mput:
            return part, None
        size_bytes = len(batch.payloads[part.span.first])
        if size_bytes <= limit:
            return part, None
        return part, MessageTooLargeError(
            f"message: {self.partition} takes at most {limit} bytes, got {size_bytes}"
        )

    def frame(self, part: BatchPart, opaque: int, producer_id: str) -> bytes:
        """Return the `mput` of a part, which gets its sequence by it.

        Raises:
            LocalProtocolError: the topic's name cannot travel.
        """
        batch, span = part.batch, part.span
        if part.name is not None:
            producer_id, part.sequence = part.name.producer, part.name.sequence
            part.sequence += span.first
        elif part.sequence is None:
            part.sequence = self.sequence
            self.sequence += part.message_count
        records = batch.encode(span.first, span.end)
        return encode(
            Mput(
                topic=self.partition.topic,
                partition=self.partition.partition,
                count=part.message_count,
                checksum=checksum(records),
                opaque=opaque,
                payload=records,
                producer=producer_id,
                sequence=part.sequence,
            )
        )

    def put_frames(self, part: BatchPart, opaques: range) -> bytes:
        """Return the puts of a part, one behind the other.

        Raises:
            LocalProtocolError: the topic's name cannot travel.
        """
        batch, span = part.batch, part.span
        payloads, flags = batch.payloads[span.first : span.end], None
        if batch.flags:
            flags = [batch.flags.get(at, 0) for at in range(span.first, span.end)]
        return encode_puts(
            self.partition.topic,
            self.partition.partition,
            payloads,
            flags=flags,
            checksums=checksums(payloads),
            opaques=opaques,
        )

    def put_sizes(self, part: BatchPart, opaques: range) -> list[int]:
        """Return the bytes of each of these puts."""
        sizes, whole = [], part.span
        for at, opaque in zip(range(whole.first, whole.end), opaques, strict=True):
            span = BatchSpan(at, at + 1, is_mput=False)
            one = BatchPart(part.batch, span, part.place)
            sizes.append(len(self.put_frames(one, range(opaque, opaque + 1))))
        return sizes

    def begin(self, part: BatchPart, run: PutRun | None) -> None:
        """Note that a part leaves."""
        self.in_flight[part] = run
        self.commands += part.command_count

    def end(self, part: BatchPart, command_count: int) -> None:
        """Take note that commands of a part are answered, or given up."""
        self.commands -= command_count
        run = self.in_flight[part]
        if run is not None:
            run.left -= command_count
        if run is None or not run.left:
            del self.in_flight[part]

    def take_late(self, now_s: float) -> list[BatchPart]:
        """Take waiting and returned parts that have passed their deadline."""
        late = [p for p in self.waiting if p.batch.deadline_s <= now_s]
        late += [p for p in self.returned if p.batch.deadline_s <= now_s]
        if late:
            gone = set(late)
            self.waiting = deque(p for p in self.waiting if p not in gone)
            self.returned = [p for p in self.returned if p not in gone]
        return late

    def doubt(self) -> MetaqError | None:
        """Return what left open whether something that came back is stored."""
        parts = (*self.returned, *self.waiting)
        return next((part.error for part in parts if part.is_in_doubt), None)

    def unanswered(self, before_s: float) -> list[BatchPart]:
        """Return the parts in flight with a deadline up to `before_s`."""
        return [p for p in self.in_flight if p.batch.deadline_s <= before_s]

    def lateness(self, batch: Batch) -> MetaqError:
        """Return the error of messages whose deadline passed before they left."""
        if self.trouble is not None:
            return self.trouble
        return NotSentError(f"{self.partition}: not sent within {batch.timeout_s:g} s")

    def silence(self, batch: Batch) -> MetaqError:
        """Return the error of messages whose deadline passed without an answer."""
        return OutcomeUnknownError(
            f"{self.partition}: no answer within {batch.timeout_s:g} s; outcome unknown"
        )


def _order_of(part: BatchPart) -> tuple[bool, int, int]:
    if part.name is not None:  # sequences of two names cannot be compared
        return False, part.place, part.span.first
    place = part.place if part.sequence is None else part.sequence
    return part.sequence is None, place, part.span.first
