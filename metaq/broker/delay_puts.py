"""Puts with a time: records of `__delays`, their receipt, their repetition.

Neighbours of a batch with one time wait as one record. All records of a batch are
appended at once, to the tier of the latest time: so they are there, or none is. A batch
that its producer sends again may fall into another tier, so the producer tables of all
are asked. One tier has batches for many partitions: the producer's name there is a
digest of producer, topic and partition.
"""

from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from itertools import groupby
from struct import Struct
from typing import Final, NamedTuple

from metaq.broker.acks import (
    PUT_OVERHEAD_BYTES,
    Answerer,
    PutTicket,
    Receipts,
    is_light,
)
from metaq.broker.context import BrokerContext, DelayedMessages
from metaq.broker.handlers.txn import find_transaction
from metaq.broker.internal_logs import producer_name
from metaq.broker.transactions import put_run
from metaq.delay.due_index import topic_hash
from metaq.delay.plan import PLACES_MAX, Waiting, tier_of
from metaq.delay.records import TOPIC, encode_head
from metaq.errors import (
    ClosedError,
    NoSpaceError,
    SequenceError,
    ServerError,
    StorageError,
)
from metaq.model import LogId, MessageId, SizeBytes, span_text
from metaq.protocol.commands import NO_CHECKSUM, OWN_TIMES, Mput, Put, Status
from metaq.protocol.encoding import encode, encode_result
from metaq.record.batch import CheckedRecords
from metaq.record.ids import id_after
from metaq.record.layout import HEADER, HEADER_BYTES, ID_AT
from metaq.record.pieces import checksum_in_steps
from metaq.storage.producers import StoredBatch
from metaq.txn.records import encode_put
from metaq.txn.transaction import PutRun

STEP_RECORDS: Final = 256
"""Records of one step: a millisecond."""
NAMES_REMEMBERED_MAX: Final = 4096
"""Producers with a partition whose names in the tiers are remembered."""


_TIME: Final = Struct(">q")


class ScheduledTicket(PutTicket):
    """A batch with a time that waits for the disk."""

    __slots__ = ("_forget", "_tier")

    def __init__(
        self,
        answerer: Answerer,
        command: Mput,
        receipt: tuple[int, int, int],
        size_bytes: int = 0,
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        """Hold the command in flight.

        Args:
            answerer: the session.
            command: what is answered.
            receipt: tier, id of the first message, offset.
            size_bytes: held in flight besides the command itself.
            forget: called if it is not stored.
        """
        tier, first_id, offset = receipt
        super().__init__(
            answerer,
            log_id=LogId(command.topic, command.partition),
            receipts=Receipts((b"%d" % command.opaque,), (first_id,), (offset,)),
            record_count=command.count,
            size_bytes=size_bytes + PUT_OVERHEAD_BYTES,
        )
        self._tier = tier
        self._forget = forget
        answerer.hold(count=1, size_bytes=self.size_bytes)

    def encode(self) -> bytes:
        """Return the reply: id, partition, no offset, and where it waits."""
        (opaque,), (first_id,), (offset,) = self.receipts
        partition = self.log_id.partition
        body = b"%d %d -1 %d %d" % (first_id, partition, self._tier, offset)
        return encode_result(Status.OK, body, int(opaque))

    def on_failed(self, error: StorageError | ClosedError) -> None:
        """Refuse it."""
        self._forget()
        super().on_failed(error)


def answer_if_repeated(
    delays: DelayedMessages, command: Mput, answerer: Answerer, own: int | None = None
) -> bool:
    """Answer a batch that its producer sends again; return whether it was one.

    Raises:
        SequenceError: its numbers were used for something else in the tier `own`.
            Elsewhere that says that a later batch was first there, which may be.
    """
    if command.producer is None:
        return False
    name = name_of(command.producer, command.topic, command.partition)
    for number, tier in enumerate(delays.tiers):
        log, batch = tier.log, None
        try:
            if log is not None:
                batch = log.producers.find(
                    name, command.sequence, command.count, command.checksum
                )
        except SequenceError:
            if number == own:
                raise
        if log is not None and batch is not None:
            answerer.context.counters.batch_repeated += 1
            receipt = number, int(batch.first_id), int(batch.offset)
            log.join(batch, ScheduledTicket(answerer, command, receipt))
            return True
    return False


class TimedRecords(NamedTuple):
    """Neighbours in a batch with one time: a record of a tier."""

    due_ms: int
    messages: int
    records: Sequence[bytes | bytearray]
    """Messages in segment format, in any split."""


def split_by_time(
    command: Mput, parts: Sequence[CheckedRecords]
) -> Generator[None, None, list[TimedRecords]]:
    """Return the records of a verified batch, neighbours with one time together."""
    due_ms, whole = command.deliver_ms, [part.records for part in parts]
    assert due_ms is not None, "it has a time"
    if due_ms != OWN_TIMES:
        return [TimedRecords(due_ms, command.count, whole)]
    found = list[TimedRecords]()
    for data, positions in parts:
        times = (_TIME.unpack_from(data, at + ID_AT)[0] for at in positions)
        first, ends = 0, [*positions[1:], len(data)]
        for due_ms, group in groupby(times):
            count = len(list(group))
            records: Sequence[bytes | bytearray]
            records = [data[positions[first] : ends[first + count - 1]]]
            first += count
            if found and found[-1].due_ms == due_ms:  # cut by the end of a part
                _, more, before = found.pop()
                count, records = more + count, [*before, *records]
            found.append(TimedRecords(due_ms, count, records))
            if not len(found) % STEP_RECORDS:
                yield
    return found


def is_due_later(
    delays: DelayedMessages, timed: Sequence[TimedRecords], context: BrokerContext
) -> bool:
    """Return whether a time of a batch is still to come.

    Raises:
        ServerError: one is too far away, or none.
        NoSpaceError: what waits takes too much already.
    """
    limits, now_ms = context.config.limits, delays.now_ms()
    times = [each.due_ms for each in timed]
    latest_ms = max(times)
    if min(times) < 0 or latest_ms > now_ms + limits.delay_max:
        number = 0
        for due_ms, count, _ in timed:
            if not 0 <= due_ms <= now_ms + limits.delay_max:
                break
            number += count
        wanted_s = -((now_ms - due_ms) // 1000)
        raise ServerError(
            f"mput: message {number}: expected a time within"
            f" {span_text(limits.delay_max)}, got one in {span_text(wanted_s * 1000)}"
        )
    if latest_ms <= now_ms:
        return False
    logs = [tier.log for tier in delays.tiers]
    held = sum(log.size_bytes for log in logs if log is not None)
    if held > limits.delay_bytes_max:
        raise NoSpaceError(
            f"delayed messages take {held} bytes, expected at most"
            f" {limits.delay_bytes_max}"
        )
    return True


def schedule(
    delays: DelayedMessages,
    command: Mput,
    timed: Sequence[TimedRecords],
    answerer: Answerer,
) -> Generator[None, None, None]:
    """Append a verified batch to the tier of its time; answered when it is stored.

    Raises:
        WireError: it is too large, or its transaction takes no puts.
        SequenceError: as `answer_if_repeated`.
        StorageError: the tier cannot be made.
    """
    context, topic, partition = answerer.context, command.topic, command.partition
    first_id = context.ids.reserve(command.count)
    wrapped = yield from _wrap(command, timed, first_id, context)
    latest_ms = max(each.due_ms for each in timed)
    log_id = LogId(TOPIC, tier_of(latest_ms, delays.now_ms()))
    chunks = [chunk for one in wrapped for chunk in one.chunks]
    size = SizeBytes(sum(map(len, chunks)))
    last_id = wrapped[-1].id
    delays.wake()
    # Another connection may have sent it, or ended the transaction, since.
    if command.transaction is not None:
        transaction = find_transaction(command, answerer, count=command.count)
        key = command.transaction
        journalled = list[bytes]()
        for one in wrapped:
            payload = one.chunks[1]
            put = Put(TOPIC, log_id.partition, payload, 0, NO_CHECKSUM, 0, key)
            journalled.append(encode_put(one.id, encode(put)))
        put_run(
            transaction,
            PutRun(log_id, chunks, size, len(wrapped), last_id, journalled),
            answerer,
            opaques=(b"%d" % command.opaque,),
            ids=(first_id,),
            partition=partition,
        )
        return
    if answer_if_repeated(delays, command, answerer, log_id.partition):
        return
    log = context.topics.internal_log(log_id)
    offset, batch = log.next_offset, None
    if command.producer is not None:
        name = name_of(command.producer, topic, partition)
        batch = StoredBatch(
            name,
            command.sequence,
            command.count,
            command.checksum,
            first_id,
            offset,
            size,
        )
    entries = [one.entry for one in wrapped]
    forget = delays.tiers[log_id.partition].note(offset, entries)
    receipt = log_id.partition, first_id, offset
    ticket = ScheduledTicket(answerer, command, receipt, size, forget)
    try:
        log.append(
            chunks,
            size_bytes=size,
            record_count=len(wrapped),
            last_id=last_id,
            ticket=ticket,
            batch=batch,
            is_light=is_light(answerer),
        )
    except (StorageError, ClosedError) as error:
        ticket.on_failed(error)


class _Wrapped(NamedTuple):
    """A record of a tier."""

    id: MessageId
    chunks: tuple[bytes, bytes]
    """Header and payload."""
    entry: Waiting
    """Its entry in the index, with its place in the batch for the offset."""


def _wrap(
    command: Mput,
    timed: Sequence[TimedRecords],
    first_id: MessageId,
    context: BrokerContext,
) -> Generator[None, None, list[_Wrapped]]:
    """Return the records that a batch becomes.

    Raises:
        ServerError: one is too large.
    """
    topic, limit = command.topic, context.config.limits.payload_bytes_max
    name, found, number, place = topic_hash(topic), list[_Wrapped](), 0, 0
    for due_ms, count, records in timed:
        message_id = id_after(first_id, number)
        head = encode_head(due_ms, message_id, topic, command.partition, count)
        data = b"".join((head, *records))
        if count > PLACES_MAX:
            raise ServerError(
                f"mput with a time: expected at most {PLACES_MAX} messages with one,"
                f" got {count}"
            )
        if len(data) > limit:
            raise ServerError(
                f"mput with a time: expected at most {limit} bytes, got {len(data)}"
            )
        crc = yield from checksum_in_steps((data,))
        size = HEADER_BYTES + len(data)
        chunks = HEADER.pack(len(data), crc, message_id, 0), data
        entry = Waiting(due_ms, place, count, size, name)
        found.append(_Wrapped(message_id, chunks, entry))
        number, place = number + count, place + size
        if not len(found) % STEP_RECORDS:
            yield
    return found


@lru_cache(NAMES_REMEMBERED_MAX)
def name_of(producer: str, topic: str, partition: int) -> str:
    """Return a producer's name in the tables of the tiers."""
    return producer_name(producer, topic, partition)
