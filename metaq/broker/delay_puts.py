"""Puts with a time: one record of `__delays` for each, its receipt, its repetition.

A batch that its producer sends again may fall into another tier, so the producer
tables of all are asked. One tier has batches for many partitions: the producer's name
there is a digest of producer, topic and partition.
"""

from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import Final

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
from metaq.model import LogId, SizeBytes, span_text
from metaq.protocol.commands import NO_CHECKSUM, Mput, Put, Status
from metaq.protocol.encoding import encode, encode_result
from metaq.record.batch import CheckedRecords
from metaq.record.layout import HEADER, HEADER_BYTES
from metaq.record.pieces import checksum_in_steps
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


def answer_if_repeated(
    delays: DelayedMessages, command: Mput, answerer: Answerer
) -> bool:
    """Answer a batch that its producer sends again; return whether it was one.

    Raises:
        SequenceError: its numbers were used for something else.
    """
    if command.producer is None:
        return False
    name = name_of(command.producer, command.topic, command.partition)
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
            answerer.context.counters.batch_repeated += 1
            receipt = number, int(batch.first_id), int(batch.offset)
            log.join(batch, ScheduledTicket(answerer, command, receipt))
            return True
    return False


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
    topic, partition = command.topic, command.partition
    assert due_ms is not None, "it has a time"
    first_id = context.ids.reserve(count)
    head = encode_head(due_ms, first_id, topic, partition, count)
    pieces: list[bytes | bytearray] = [head, *(part.records for part in parts)]
    length, limit = sum(map(len, pieces)), context.config.limits.payload_bytes_max
    if length > limit:
        raise ServerError(
            f"mput with a time: expected at most {limit} bytes, got {length}"
        )
    found = yield from checksum_in_steps(pieces)
    log_id = LogId(TOPIC, tier_of(due_ms, delays.now_ms()))
    chunks = [HEADER.pack(length, found, first_id, 0), *pieces]
    size = SizeBytes(HEADER_BYTES + length)
    delays.wake()
    # Another connection may have sent it, or ended the transaction, since.
    if command.transaction is not None:
        transaction = find_transaction(command, answerer, count=count)
        put = Put(
            TOPIC, log_id.partition, b"".join(pieces), 0, NO_CHECKSUM, 0,
            command.transaction,
        )  # fmt: skip
        journalled = (encode_put(first_id, encode(put)),)
        put_run(
            transaction,
            PutRun(log_id, chunks, size, 1, first_id, journalled),
            answerer,
            opaques=(b"%d" % command.opaque,),
            ids=(first_id,),
            partition=partition,
        )
        return
    if answer_if_repeated(delays, command, answerer):
        return
    log = context.topics.internal_log(log_id)
    offset, batch = log.next_offset, None
    if command.producer is not None:
        name = name_of(command.producer, topic, partition)
        batch = StoredBatch(
            name, command.sequence, count, command.checksum, first_id, offset, size
        )
    entry = ENTRY.pack(due_ms, offset, count, size, topic_hash(topic))
    forget = delays.tiers[log_id.partition].note(offset, entry)
    receipt = log_id.partition, first_id, offset
    ticket = ScheduledTicket(answerer, command, receipt, size, forget)
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


@lru_cache(NAMES_REMEMBERED_MAX)
def name_of(producer: str, topic: str, partition: int) -> str:
    """Return a producer's name in the tables of the tiers."""
    return producer_name(producer, topic, partition)
