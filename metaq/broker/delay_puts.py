"""Delayed puts: their records in `__delays`, their receipts, and repeated batches.

Adjacent messages of a batch with the same due time are stored as one record. All
records of a batch are appended at once, to the tier of the latest due time, so all or
none are stored. A batch that its producer sends again may belong to another tier by
then, so the producer tables of all tiers are searched. A tier has batches for many
partitions: the producer's name there is a digest of producer, topic and partition.
"""

from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from itertools import chain, groupby, repeat
from struct import Struct
from typing import Any, Final, NamedTuple

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
from metaq.delay.plan import RECORD_MESSAGES_MAX, DueEntry, tier_of
from metaq.delay.records import TOPIC, encode_head
from metaq.errors import (
    ClosedError,
    NoSpaceError,
    SequenceError,
    ServerError,
    StorageError,
)
from metaq.model import LogId, MessageId, SizeBytes
from metaq.protocol import texts
from metaq.protocol.commands import NO_CHECKSUM, OWN_TIMES, Mput, Put, Status
from metaq.protocol.encoding import encode, encode_result
from metaq.record.batch import CheckedRecords
from metaq.record.ids import id_after
from metaq.record.layout import HEADER, HEADER_BYTES, ID_AT
from metaq.record.pieces import checksum_in_steps
from metaq.storage.append_request import AppendTicket, Tickets
from metaq.storage.partition_log import PartitionLog
from metaq.storage.producers import StoredBatch
from metaq.txn.records import encode_put
from metaq.txn.transaction import PutRun

STEP_RECORDS: Final = 256
"""Records encoded in one step; takes about a millisecond."""
NAMES_REMEMBERED_MAX: Final = 4096
"""Size of the cache of producer names in tiers."""


_TIME: Final = Struct(">q")


class ScheduledTicket(PutTicket):
    """Ticket of a delayed batch that is being stored."""

    __slots__ = ("_tier",)

    def __init__(
        self,
        answerer: Answerer,
        command: Mput,
        receipt: tuple[int, int, int],
        size_bytes: int = 0,
    ) -> None:
        """Hold the command in flight.

        Args:
            answerer: the session.
            command: the command to answer.
            receipt: tier, id of the first message, offset.
            size_bytes: bytes held in flight besides the command itself.
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
        answerer.hold(count=1, size_bytes=self.size_bytes)

    def encode(self) -> bytes:
        """Return the reply: id, partition, no offset, and the receipt."""
        (opaque,), (first_id,), (offset,) = self.receipts
        partition = self.log_id.partition
        body = b"%d %d -1 %d %d" % (first_id, partition, self._tier, offset)
        return encode_result(Status.OK, body, int(opaque))


def find_repeated(
    delays: DelayedMessages, command: Mput, name: str, own: int | None = None
) -> tuple[int, PartitionLog, StoredBatch] | None:
    """Find a batch that its producer sends again; return tier, log and stored batch.

    `name` is the producer's name in the tiers.

    Raises:
        SequenceError: the tier `own` has other content under these sequence numbers. In
            other tiers that only means that a later batch was stored there first.
    """
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
            return number, log, batch
    return None


def answer_if_repeated(
    delays: DelayedMessages, command: Mput, answerer: Answerer, own: int | None = None
) -> bool:
    """Answer a batch that is stored already; return whether it was.

    Raises:
        SequenceError: as `find_repeated`.
    """
    if command.producer is None:
        return False
    name = name_of(command.producer, LogId(command.topic, command.partition))
    found = find_repeated(delays, command, name, own)
    if found is None:
        return False
    number, log, batch = found
    answerer.context.counters.batch_repeated += 1
    receipt = number, int(batch.first_id), int(batch.offset)
    log.join(batch, ScheduledTicket(answerer, command, receipt))
    return True


class TimedRecords(NamedTuple):
    """Adjacent messages of a batch with one due time: one record of a tier."""

    due_ms: int
    messages: int
    records: Sequence[bytes | bytearray]
    """The messages in segment format, split anywhere."""


def split_by_time(
    command: Mput, parts: Sequence[CheckedRecords]
) -> Generator[None, None, list[TimedRecords]]:
    """Return the verified messages of a batch, grouped where due times are equal."""
    due_ms, count = command.deliver_ms, sum(len(part.positions) for part in parts)
    assert due_ms is not None, "it has a time"
    if due_ms != OWN_TIMES:
        return [TimedRecords(due_ms, count, [part.records for part in parts])]
    found = list[TimedRecords]()
    for data, positions in parts:
        times = (_TIME.unpack_from(data, at + ID_AT)[0] for at in positions)
        first, ends = 0, [*positions[1:], len(data)]
        for due_ms, group in groupby(times):
            count = len(list(group))
            records: Sequence[bytes | bytearray]
            records = [data[positions[first] : ends[first + count - 1]]]
            first += count
            if found and found[-1].due_ms == due_ms:  # split at the end of a part
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
    latest_ms, limit_ms = max(times), now_ms + limits.delay_max
    if min(times) < 0 or latest_ms > limit_ms:
        counts = (each.messages for each in timed)
        every = chain.from_iterable(map(repeat, times, counts))
        numbers = [at for at, due in enumerate(every) if not 0 <= due <= limit_ms]
        wrong_ms = next(due for due in times if not 0 <= due <= limit_ms)
        wanted_s = -((now_ms - wrong_ms) // 1000)
        count = sum(each.messages for each in timed) if len(timed) > 1 else 1
        raise ServerError(
            texts.too_far(numbers, count, limits.delay_max, wanted_s * 1000)
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
        WireError: it is too large, or its topic or transaction takes no puts.
        SequenceError: as `find_repeated`.
        StorageError: the tier cannot be made.
    """
    context, producer = answerer.context, command.producer
    target = LogId(command.topic, command.partition)
    first_id = context.ids.reserve(command.count)
    waiting = yield from wrap(target, timed, first_id, context)
    delays.wake()
    # The topic may have been deleted since, and another connection may have sent the
    # batch, or ended the transaction.
    context.topics.open_for_put(command.topic, command.partition)
    if command.transaction is not None:
        require_taken(waiting, delays, context)
        put_run(
            find_transaction(command, answerer, count=command.count),
            run_of(waiting, command, delays),
            answerer,
            opaques=(b"%d" % command.opaque,),
            ids=(first_id,),
            partition=target.partition,
        )
        return
    if answer_if_repeated(delays, command, answerer, waiting.tier(delays)):
        return
    name = None
    if producer is not None:
        own = name_of(producer, target)
        name = own, command.sequence, command.count, command.checksum
    append(
        waiting,
        delays,
        answerer,
        name,
        lambda receipt: ScheduledTicket(answerer, command, receipt, waiting.size_bytes),
    )


class WaitingRecords(NamedTuple):
    """Messages of one partition, as records of a tier: one for each time in turn."""

    first_id: MessageId
    """Of the first message."""
    ids: Sequence[MessageId]
    """Of each record: that of its first message."""
    chunks: Sequence[bytes]
    """Header and payload of each record."""
    entries: Sequence[DueEntry]
    """Entry of each in the index; its offset is from the start of the append."""
    size_bytes: SizeBytes

    def tier(self, delays: DelayedMessages) -> int:
        """Return the tier that they go to now: that of the latest time."""
        latest_ms = max(each.due_ms for each in self.entries)
        return tier_of(latest_ms, delays.now_ms())


def wrap(
    target: LogId,
    timed: Sequence[TimedRecords],
    first_id: MessageId,
    context: BrokerContext,
) -> Generator[None, None, WaitingRecords]:
    """Make the records in which messages of a partition wait, in steps.

    Raises:
        ServerError: one is too large.
    """
    topic, limit = target.topic, context.config.limits.payload_bytes_max
    ids, chunks, entries = list[MessageId](), list[bytes](), list[DueEntry]()
    name, number, start = topic_hash(topic), 0, 0
    for due_ms, count, records in timed:
        message_id = id_after(first_id, number)
        head = encode_head(due_ms, message_id, topic, target.partition, count)
        data = b"".join((head, *records))
        if count > RECORD_MESSAGES_MAX:
            raise ServerError(
                "mput with a time: expected at most"
                f" {RECORD_MESSAGES_MAX} messages with one, got {count}"
            )
        if len(data) > limit:
            raise ServerError(
                f"mput with a time: expected at most {limit} bytes, got {len(data)}"
            )
        crc = yield from checksum_in_steps((data,))
        size = HEADER_BYTES + len(data)
        ids.append(message_id)
        chunks += HEADER.pack(len(data), crc, message_id, 0), data
        entries.append(DueEntry(due_ms, start, count, size, name))
        number, start = number + count, start + size
        if not len(ids) % STEP_RECORDS:
            yield
    return WaitingRecords(first_id, ids, chunks, entries, SizeBytes(start))


def require_taken(
    waiting: WaitingRecords, delays: DelayedMessages, context: BrokerContext
) -> None:
    """Check that the tier of records takes them now.

    Raises:
        StorageError: it does not, or it cannot be made.
        ClosedError: the logs are closed.
    """
    tier = context.topics.internal_log(LogId(TOPIC, waiting.tier(delays)))
    tier.plan_append(waiting.size_bytes)


def append(
    waiting: WaitingRecords,
    delays: DelayedMessages,
    answerer: Answerer,
    name: tuple[str, int, int, int] | None,
    ticket_of: Callable[[tuple[int, int, int]], AppendTicket],
) -> None:
    """Append records to the tier of their time.

    Args:
        waiting: the records.
        delays: delivers them.
        answerer: the session.
        name: producer there, sequence, count and checksum of a batch that has it.
        ticket_of: makes the ticket from tier, id and offset.

    Raises:
        StorageError: the tier cannot be made.
    """
    first_id, size = waiting.first_id, waiting.size_bytes
    log_id = LogId(TOPIC, waiting.tier(delays))
    log = answerer.context.topics.internal_log(log_id)
    offset, batch = log.next_offset, None
    if name is not None:
        batch = StoredBatch(*name, first_id, offset, size)
    noted = delays.tiers[log_id.partition].note(offset, waiting.entries)
    ticket: Any = Tickets((noted, ticket_of((log_id.partition, first_id, offset))))
    try:
        log.append(
            waiting.chunks,
            size_bytes=size,
            record_count=len(waiting.ids),
            last_id=waiting.ids[-1],
            ticket=ticket,
            batch=batch,
            is_light=is_light(answerer),
        )
    except (StorageError, ClosedError) as error:
        ticket.on_failed(error)


def run_of(waiting: WaitingRecords, command: Mput, delays: DelayedMessages) -> PutRun:
    """Return records of a tier as a put of the transaction of a command."""
    key = command.transaction
    assert key is not None, "of a transaction"
    log_id = LogId(TOPIC, waiting.tier(delays))
    journalled = list[bytes]()
    for message_id, payload in zip(waiting.ids, waiting.chunks[1::2], strict=True):
        put = Put(TOPIC, log_id.partition, payload, 0, NO_CHECKSUM, 0, key)
        journalled.append(encode_put(message_id, encode(put)))
    return PutRun(
        log_id,
        waiting.chunks,
        waiting.size_bytes,
        len(waiting.ids),
        waiting.ids[-1],
        journalled,
    )


@lru_cache(NAMES_REMEMBERED_MAX)
def name_of(producer: str, target: LogId) -> str:
    """Return a producer's name in the tables of the tiers."""
    return producer_name(producer, target.topic, target.partition)
