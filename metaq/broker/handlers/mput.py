"""`mput`: many records, one command, one sync, one answer (docs/protocol.md).

All or none: framing, the checksum of the batch and the checksum of every record are
verified before the first id is given out, in steps where the batch is large. A record
whose own checksum is wrong would look like rot later, and a Java broker that recovers
the log would cut it there.

A batch that its producer sends again is answered with the receipt of the first time;
it is recognised by its numbers, before anything else of it is looked at.

One that names a transaction goes to that and to the journal, like a put that does.
"""

from collections.abc import Generator, Sequence
from typing import Final
from zlib import crc32

from metaq.broker.acks import (
    Answerer,
    Receipts,
    append_run,
    count_puts,
    refuse_put,
    require_checksum,
)
from metaq.broker.batches import answer_repeated, append_batch
from metaq.broker.context import BrokerContext
from metaq.broker.handlers.txn import find_transaction
from metaq.broker.transactions import put_run
from metaq.errors import (
    ClosedError,
    ForbiddenError,
    SequenceError,
    ServerError,
    StorageError,
)
from metaq.model import MessageId, SizeBytes
from metaq.protocol.commands import Mput
from metaq.protocol.transaction_ids import format_key
from metaq.record.batch import BatchError, check_in_steps, stamp
from metaq.record.checksum import CHECKSUM_MASK
from metaq.record.ids import id_after
from metaq.record.layout import HEADER_BYTES
from metaq.storage.partition_log import PartitionLog
from metaq.storage.producers import StoredBatch
from metaq.txn.records import encode_batch

COPY_STEP_BYTES: Final = 512 * 1024
"""Bytes of a batch that one step checks and copies: less than a millisecond."""

JOURNAL_STEP_COUNT: Final = 512
"""Messages of a batch that one step makes records of the journal of: likewise."""


def handle_mput(
    command: Mput, answerer: Answerer, context: BrokerContext
) -> Generator[None]:
    """Append a batch in steps; it is answered when it is stored.

    Between the steps others may be served. What a step has found out is asked again
    where it may have changed: a batch may come a second time on another connection.

    Raises:
        WireError: refused, and nothing was appended; the text is the answer.
    """
    topic, partition, count = command.topic, command.partition, command.count
    limit = context.config.limits.batch_records_max
    if not 1 <= count <= limit:
        raise ServerError(f"mput: expected 1..{limit} records, got {count}")
    payload_bytes = max(0, len(command.payload) - HEADER_BYTES * count)
    count_puts(context, topic, count=count, payload_bytes=payload_bytes)
    if command.transaction is not None:
        yield from _put_in_transaction(command, answerer, context)
        return
    try:
        partition = context.topics.resolve_put(topic, partition)
        if _answer_if_repeated(command, partition, answerer, context):
            return
        records, positions = yield from _check(command, context)
        if _answer_if_repeated(command, partition, answerer, context):
            return
        log = context.topics.log_for_put(topic, partition)
    except (
        ForbiddenError,
        ServerError,
        SequenceError,
        StorageError,
        ClosedError,
    ) as error:
        raise refuse_put(
            context, error, topic=topic, partition=partition, count=count
        ) from error
    first_id = context.ids.reserve(count)
    stamp(records, positions, first_id)
    _append(command, records, first_id, log, answerer, context)


def _put_in_transaction(
    command: Mput, answerer: Answerer, context: BrokerContext
) -> Generator[None]:
    """Journal a batch of a transaction; it is answered when that is written.

    Raises:
        WireError: refused, and nothing was journalled; the text is the answer.
    """
    topic, partition, count = command.topic, command.partition, command.count
    find_transaction(command, answerer, context, count=count)
    try:
        records, positions = yield from _check(command, context)
        log_id = context.topics.log_for_put(topic, partition).log_id
    except (ServerError, StorageError, ClosedError) as error:
        raise refuse_put(
            context, error, topic=topic, partition=partition, count=count
        ) from error
    first_id = context.ids.reserve(count)
    stamp(records, positions, first_id)
    assert command.transaction is not None, "of a transaction"
    key, journalled = format_key(command.transaction).encode(), list[bytes]()
    for start in range(0, count, JOURNAL_STEP_COUNT):
        if start:
            yield
        some = positions[start : start + JOURNAL_STEP_COUNT]
        journalled += encode_batch(log_id, key, command.opaque, records, some)
    # Another connection may have ended it meanwhile, or closed the partition.
    transaction = find_transaction(command, answerer, context, count=count)
    put_run(
        context.transactions,
        transaction,
        log_id,
        (records,),
        answerer,
        opaques=(b"%d" % command.opaque,),
        ids=(first_id,),
        size_bytes=len(records),
        record_count=count,
        last_id=id_after(first_id, count - 1),
        journalled=journalled,
    )


def _answer_if_repeated(
    command: Mput, partition: int, answerer: Answerer, context: BrokerContext
) -> bool:
    """Answer a batch that its producer sends again; return whether it was one.

    Raises:
        SequenceError: its numbers were used for something else.
    """
    log = context.topics.find_log(command.topic, partition)
    if command.producer is None or log is None:
        return False
    batch = log.producers.find(
        command.producer, command.sequence, command.count, command.checksum
    )
    if batch is None:
        return False
    answer_repeated(log, batch, answerer, context, opaque=command.opaque)
    return True


def _append(
    command: Mput,
    stamped: bytearray,
    first_id: MessageId,
    log: PartitionLog,
    answerer: Answerer,
    context: BrokerContext,
) -> None:
    """Append a verified batch, with or without a producer who may send it again."""
    count, offset = command.count, log.next_offset
    if command.producer is None:
        append_run(
            log,
            [stamped],
            answerer,
            context,
            size_bytes=len(stamped),
            record_count=count,
            last_id=id_after(first_id, count - 1),
            receipts=Receipts((b"%d" % command.opaque,), (first_id,), (offset,)),
        )
        return
    batch = StoredBatch(
        command.producer,
        command.sequence,
        count,
        command.checksum,
        first_id,
        offset,
        SizeBytes(len(stamped)),
    )
    append_batch(log, stamped, batch, answerer, context, opaque=command.opaque)


def _check(
    command: Mput, context: BrokerContext
) -> Generator[None, None, tuple[bytearray, Sequence[int]]]:
    """Verify a batch.

    Returns:
        The records as they go to disk but for their ids, and where each begins.

    Raises:
        ServerError: the batch is not what it says it is.
    """
    payload, crc, records = command.payload, 0, bytearray()
    for start in range(0, len(payload), COPY_STEP_BYTES):
        if start:
            yield
        piece = memoryview(payload)[start : start + COPY_STEP_BYTES]
        crc = crc32(piece, crc)
        # Memory that is new to the process costs more than the bytes in it.
        records += piece
    require_checksum(crc & CHECKSUM_MASK, command.checksum)
    found = yield from check_in_steps(
        payload,
        command.count,
        payload_bytes_max=context.config.limits.payload_bytes_max,
    )
    if isinstance(found, BatchError):
        raise ServerError(f"mput: at byte {found.position}: {found.detail}")
    return records, found
