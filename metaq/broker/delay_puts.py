"""Puts with a time: one record of `__delays` for each, its receipt, its repetition.

A batch that its producer sends again may fall into another tier, so the producer
tables of all are asked. One tier has batches for many partitions: the producer's name
there is a digest of producer, topic and partition.
"""

from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
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
from metaq.delay.due_index import ENTRY, topic_hash
from metaq.delay.plan import tier_of
from metaq.delay.records import TOPIC, encode_head
from metaq.errors import (
    ClosedError,
    NoSpaceError,
    SequenceError,
    ServerError,
    StorageError,
)
from metaq.fs import Buffer
from metaq.model import LogId, MessageId, SizeBytes, span_text
from metaq.protocol.commands import NO_CHECKSUM, Mput, Put, Status
from metaq.protocol.encoding import encode, encode_result
from metaq.record.batch import CheckedRecords
from metaq.record.layout import HEADER, HEADER_BYTES
from metaq.record.pieces import checksum_in_steps
from metaq.storage.append_request import AppendTicket
from metaq.storage.partition_log import PartitionLog
from metaq.storage.producers import StoredBatch
from metaq.txn.records import encode_put
from metaq.txn.transaction import PutRun

NAMES_REMEMBERED_MAX: Final = 4096
"""Producers with a partition whose names in the tiers are remembered."""


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


def find_repeated(
    delays: DelayedMessages, command: Mput, name: str
) -> tuple[int, PartitionLog, StoredBatch] | None:
    """Return tier, log and batch that a producer sends again; `name` is its name there.

    Raises:
        SequenceError: its numbers were used for something else.
    """
    assert command.deliver_ms is not None, "it has a time"
    own = tier_of(command.deliver_ms, delays.now_ms())
    for number, tier in enumerate(delays.tiers):
        log, batch = tier.log, None
        try:
            if log is not None:
                batch = log.producers.find(
                    name, command.sequence, command.count, command.checksum
                )
        except SequenceError:
            # Elsewhere it says that a later batch was first there, which may be.
            if number == own:
                raise
        if log is not None and batch is not None:
            return number, log, batch
    return None


def answer_if_repeated(
    delays: DelayedMessages, command: Mput, answerer: Answerer
) -> bool:
    """Answer a batch that its producer sends again; return whether it was one.

    Raises:
        SequenceError: as `find_repeated`.
    """
    if command.producer is None:
        return False
    name = name_of(command.producer, LogId(command.topic, command.partition))
    found = find_repeated(delays, command, name)
    if found is None:
        return False
    number, log, batch = found
    answerer.context.counters.batch_repeated += 1
    receipt = number, int(batch.first_id), int(batch.offset)
    log.join(batch, ScheduledTicket(answerer, command, receipt))
    return True


def is_due_later(
    delays: DelayedMessages, command: Mput, context: BrokerContext
) -> bool:
    """Return whether the time of a batch is still to come.

    Raises:
        ServerError: it is too far away.
        NoSpaceError: what waits takes too much already.
    """
    limits, now_ms = context.config.limits, delays.now_ms()
    assert command.deliver_ms is not None, "it has a time"
    if command.deliver_ms <= now_ms:
        return False
    if command.deliver_ms > now_ms + limits.delay_max:
        wanted_s = -((now_ms - command.deliver_ms) // 1000)
        raise ServerError(
            f"mput: expected a time within {span_text(limits.delay_max)}, got one in"
            f" {span_text(wanted_s * 1000)}"
        )
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
    parts: Sequence[CheckedRecords],
    answerer: Answerer,
) -> Generator[None, None, None]:
    """Append a verified batch to the tier of its time; answered when it is stored.

    Raises:
        WireError: it is too large, or its transaction takes no puts.
        SequenceError: as `answer_if_repeated`.
        StorageError: the tier cannot be made.
    """
    context, count, due_ms = answerer.context, command.count, command.deliver_ms
    topic, partition, producer = command.topic, command.partition, command.producer
    assert due_ms is not None, "it has a time"
    first_id = context.ids.reserve(count)
    target, records = LogId(topic, partition), [part.records for part in parts]
    waiting = yield from wrap(command, context, target, first_id, count, records)
    delays.wake()
    # Another connection may have sent it, or ended the transaction, since.
    if command.transaction is not None:
        put_run(
            find_transaction(command, answerer, count=count),
            run_of(waiting, command, context),
            answerer,
            opaques=(b"%d" % command.opaque,),
            ids=(first_id,),
            partition=partition,
        )
        return
    if answer_if_repeated(delays, command, answerer):
        return
    name = None
    if producer is not None:
        own = name_of(producer, target)
        name = own, command.sequence, count, command.checksum
    append(
        waiting,
        command,
        answerer,
        name,
        lambda receipt, forget: ScheduledTicket(
            answerer, command, receipt, waiting.size_bytes, forget
        ),
    )


class WaitingRecord(NamedTuple):
    """Messages of one partition, as the record of a tier."""

    topic: str
    first_id: MessageId
    messages: int
    chunks: Sequence[Buffer]
    size_bytes: SizeBytes


def wrap(
    command: Mput,
    context: BrokerContext,
    target: LogId,
    first_id: MessageId,
    count: int,
    records: Sequence[Buffer],
) -> Generator[None, None, WaitingRecord]:
    """Make the record of messages that wait for the time of a command, in steps.

    Raises:
        ServerError: it is too large.
    """
    due_ms, limit = command.deliver_ms, context.config.limits.payload_bytes_max
    assert due_ms is not None, "it has a time"
    head = encode_head(due_ms, first_id, target.topic, target.partition, count)
    pieces: list[Buffer] = [head, *records]
    length = sum(map(len, pieces))
    if length > limit:
        raise ServerError(
            f"mput with a time: expected at most {limit} bytes, got {length}"
        )
    found = yield from checksum_in_steps(pieces)
    chunks = [HEADER.pack(length, found, first_id, 0), *pieces]
    size = SizeBytes(HEADER_BYTES + length)
    return WaitingRecord(target.topic, first_id, count, chunks, size)


def append(
    waiting: WaitingRecord,
    command: Mput,
    answerer: Answerer,
    name: tuple[str, int, int, int] | None,
    ticket_of: Callable[[tuple[int, int, int], Callable[[], None]], AppendTicket],
) -> None:
    """Append a record to the tier of its time.

    Args:
        waiting: the record.
        command: has the time.
        answerer: the session.
        name: producer there, sequence, count and checksum of a batch that has it.
        ticket_of: makes the ticket from tier, id and offset, and from what is called
            if it is not stored.

    Raises:
        StorageError: the tier cannot be made.
    """
    context, (topic, first_id, count, chunks, size) = answerer.context, waiting
    delays, due_ms, log_id = context.delays, command.deliver_ms, _tier(command, context)
    assert delays is not None, "it waits"
    log = context.topics.internal_log(log_id)
    offset, batch = log.next_offset, None
    if name is not None:
        batch = StoredBatch(*name, first_id, offset, size)
    entry = ENTRY.pack(due_ms, offset, count, size, topic_hash(topic))
    forget = delays.tiers[log_id.partition].note(offset, entry)
    ticket: Any = ticket_of((log_id.partition, first_id, offset), forget)
    try:
        log.append(
            chunks,
            size_bytes=size,
            record_count=1,
            last_id=first_id,
            ticket=ticket,
            batch=batch,
            is_light=is_light(answerer),
        )
    except (StorageError, ClosedError) as error:
        ticket.on_failed(error)


def run_of(waiting: WaitingRecord, command: Mput, context: BrokerContext) -> PutRun:
    """Return a record of a tier as a put of the transaction of a command."""
    assert command.transaction is not None, "of a transaction"
    log_id, first_id, chunks = _tier(command, context), waiting.first_id, waiting.chunks
    payload = b"".join(chunks[1:])
    put = Put(TOPIC, log_id.partition, payload, 0, NO_CHECKSUM, 0, command.transaction)
    journalled = (encode_put(first_id, encode(put)),)
    return PutRun(log_id, chunks, waiting.size_bytes, 1, first_id, journalled)


def _tier(command: Mput, context: BrokerContext) -> LogId:
    due_ms, delays = command.deliver_ms, context.delays
    assert due_ms is not None, "it waits"
    assert delays is not None, "likewise"
    return LogId(TOPIC, tier_of(due_ms, delays.now_ms()))


@lru_cache(NAMES_REMEMBERED_MAX)
def name_of(producer: str, target: LogId) -> str:
    """Return a producer's name in the tables of the tiers."""
    return producer_name(producer, target.topic, target.partition)
