"""`put` in the general path, and `mput`, with all their forms and refusals.

Source: docs/metaq-1.4/broker.md 1.4.

Order of the checks of a put: closed partition, topic, partition range, checksum, then
the log itself. Refusals by the disk (offline, damaged, no space) are 500 with a detail
that names the cause; MetaQ sends no detail there.

A put that is not refused takes this path only if it is the first of its partition, was
cut by the end of a read, or is written in an unusual way: `hot_puts.py` handles the
rest, and no refusals. Keep both in step.

An mput has many records, one command, one sync and one reply (docs/protocol.md). It is
stored as a whole or not at all: framing, the checksum of the batch and those of all
records are verified before the first id is assigned, in steps if the batch is large. A
record with a wrong checksum would later look like corruption, and a Java broker that
recovers the log would truncate it there.

A batch that its producer sends again is answered with the receipt of the first time; it
is recognized by its sequence numbers, before any other check. A batch or put of a
transaction goes to that and to the journal.
"""

from collections.abc import Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from metaq.broker import delay_puts
from metaq.broker.acks import (
    REFUSALS,
    Answerer,
    Receipts,
    answer_repeated,
    append_run,
    count_puts,
    hold_back,
    refuse_put,
    require_checksum,
)
from metaq.broker.context import BrokerContext
from metaq.broker.handlers.route import route
from metaq.broker.handlers.txn import find_transaction, handle_transactional_put
from metaq.broker.transactions import put_run
from metaq.errors import (
    MetaqError,
    SequenceError,
    ServerError,
    UnavailableError,
    WireError,
)
from metaq.model import LogId, SizeBytes
from metaq.protocol import texts
from metaq.protocol.commands import NO_CHECKSUM, Mput, Put
from metaq.protocol.connection import Piece
from metaq.protocol.transaction_ids import format_key
from metaq.record.batch import (
    BatchError,
    CheckedRecords,
    check_in_steps,
    stamp_in_steps,
)
from metaq.record.checksum import BytesLike, checksum
from metaq.record.ids import id_after
from metaq.record.layout import HEADER, HEADER_BYTES
from metaq.record.pieces import checksum_in_steps, join_in_steps
from metaq.storage.partition_log import PartitionLog
from metaq.storage.producers import StoredBatch
from metaq.txn.records import encode_batch
from metaq.txn.transaction import PutRun

JOURNAL_STEP_COUNT: Final = 512
"""Number of messages of a batch that one step encodes for the journal: half a
millisecond."""
STAMPED_NOW_MAX: Final = 32
"""Maximum number of messages of a batch whose ids are written at once, which takes some
microseconds. In a larger one the storage thread writes them and owns the batch."""


def handle_put(command: Put, answerer: Answerer) -> None:
    """Append one message; it is answered once it is stored.

    Raises:
        WireError: refused; the text is the reply.
    """
    context = answerer.context
    payload = command.payload
    if command.topic in context.topics.exchanges:
        count_puts(context, command.topic, count=1, payload_bytes=len(payload))
        batch = Mput(
            command.topic, command.partition, 1, NO_CHECKSUM, command.opaque, b"",
            transaction=command.transaction, is_mandatory=False,
        )  # fmt: skip
        for _ in route(batch, _check_put(command), answerer):
            pass
        return
    if command.transaction is not None:
        count_puts(context, command.topic, count=1, payload_bytes=len(payload))
        handle_transactional_put(command, answerer)
        return
    _append_put(command, [payload], checksum(payload), answerer)


def handle_put_in_pieces(
    command: Put, pieces: Sequence[Piece], answerer: Answerer
) -> Generator[None]:
    """Append one message with a payload in pieces, in steps; see `handle_put`."""
    is_routed = command.topic in answerer.context.topics.exchanges
    if command.transaction is not None or is_routed:
        handle_put(replace(command, payload=b"".join(pieces)), answerer)
        return
    found = yield from checksum_in_steps(pieces)
    # Copied, because a view would keep its whole receive buffer until the sync.
    _append_put(command, list(map(bytes, pieces)), found, answerer)


def _append_put(
    command: Put, pieces: Sequence[bytes], found: int, answerer: Answerer
) -> None:
    """Append a message; `found` is the computed checksum of its payload."""
    context = answerer.context
    topic, partition = command.topic, command.partition
    payload_bytes = sum(map(len, pieces))
    count_puts(context, topic, count=1, payload_bytes=payload_bytes)
    try:
        partition = context.topics.resolve_put(topic, partition)
        require_checksum(found, command.checksum)
        log = context.topics.log_for_put(topic, partition)
    except REFUSALS as error:
        raise refuse_put(context, error, LogId(topic, partition)) from error
    message_id = context.ids.reserve(1)
    append_run(
        log,
        [HEADER.pack(payload_bytes, found, message_id, command.flag), *pieces],
        answerer,
        size_bytes=HEADER_BYTES + payload_bytes,
        record_count=1,
        last_id=message_id,
        receipts=Receipts((b"%d" % command.opaque,), (message_id,), (log.next_offset,)),
    )


def handle_mput(
    command: Mput, pieces: Sequence[BytesLike], answerer: Answerer
) -> Generator[None]:
    """Append a batch in steps; it is answered once it is stored.

    Other commands may run between the steps, so some checks are repeated: the same
    batch may have arrived on another connection. The last step assigns the ids; the
    storage thread writes them into the records. `pieces` are the payload, split
    anywhere.

    Raises:
        WireError: refused, and nothing was appended; the text is the reply. The batch
            with the next sequence numbers may be refused as well; see `hold_back`.
    """
    try:
        yield from _handle_mput(command, pieces, answerer)
    except WireError as refusal:
        if command.producer is not None:
            cause = refusal.__cause__
            error = cause if isinstance(cause, MetaqError) else refusal
            writer = command.producer, LogId(command.topic, command.partition)
            hold_back(answerer, writer, command.sequence + command.count, error)
        raise


def _require_turn(command: Mput, producer: str, answerer: Answerer) -> None:
    """Refuse a batch that continues a refused one of its producer.

    Raises:
        WireError: the same refusal.
    """
    at = LogId(command.topic, command.partition)
    held = answerer.held_back.pop((producer, at), None)
    if held is not None and command.sequence == held.next_sequence:
        context, error = answerer.context, held.error
        raise refuse_put(context, error, at, command.count) from error


def _handle_mput(
    command: Mput, pieces: Sequence[BytesLike], answerer: Answerer
) -> Generator[None]:
    """Append, route or delay a batch, or journal it for its transaction."""
    context = answerer.context
    topic, partition, count = command.topic, command.partition, command.count
    limit = context.config.limits.batch_records_max
    if not 1 <= count <= limit:
        raise ServerError(f"mput: expected 1..{limit} records, got {count}")
    size_bytes = sum(map(len, pieces))
    payload_bytes = max(0, size_bytes - HEADER_BYTES * count)
    count_puts(context, topic, count=count, payload_bytes=payload_bytes)
    if command.producer is not None:
        _require_turn(command, command.producer, answerer)
    if topic in context.topics.exchanges or command.is_mandatory is not None:
        yield from route(command, _check(command, pieces, context), answerer)
        return
    if command.deliver_ms is not None and (
        yield from _delay(command, pieces, answerer)
    ):
        return
    if command.transaction is not None:
        yield from _put_in_transaction(command, pieces, answerer)
        return
    try:
        partition = context.topics.resolve_put(topic, partition)
        if _answer_if_repeated(command, partition, answerer):
            return
        parts = yield from _check(command, pieces, context)
        if _answer_if_repeated(command, partition, answerer):
            return
        log = context.topics.log_for_put(topic, partition)
    except REFUSALS as error:
        raise refuse_put(context, error, LogId(topic, partition), count) from error
    _append_mput(command, parts, size_bytes, log, answerer)


def _delay(
    command: Mput, pieces: Sequence[BytesLike], answerer: Answerer
) -> Generator[None, None, bool]:
    """Schedule a batch for later; return False if it is due now.

    Raises:
        WireError: refused, and nothing is stored; the text is the reply.
    """
    context, delays = answerer.context, answerer.context.delays
    if delays is None:
        raise UnavailableError(texts.NO_DELAY)
    if command.transaction is not None:
        find_transaction(command, answerer, count=command.count)
    try:
        if delay_puts.answer_if_repeated(delays, command, answerer):
            return True
        choices = context.topics.open_for_put(command.topic, command.partition)
        parts = yield from _check(command, pieces, context)
        timed = yield from delay_puts.split_by_time(command, parts)
        if not delay_puts.is_due_later(delays, timed, context):
            return False
        for partition in choices:
            # The batch may have been due when it was sent first, if the clock was set
            # back since.
            with suppress(SequenceError):
                if _answer_if_repeated(command, partition, answerer):
                    return True
        yield from delay_puts.schedule(delays, command, timed, answerer)
    except REFUSALS as error:
        at = LogId(command.topic, command.partition)
        raise refuse_put(context, error, at, command.count) from error
    return True


def _put_in_transaction(
    command: Mput, pieces: Sequence[BytesLike], answerer: Answerer
) -> Generator[None]:
    """Journal a batch of a transaction; it is answered once that is written.

    Raises:
        WireError: refused, and nothing was journalled; the text is the reply.
    """
    context = answerer.context
    topic, partition, count = command.topic, command.partition, command.count
    find_transaction(command, answerer, count=count)
    try:
        parts = yield from _check(command, pieces, context)
        log_id = context.topics.log_for_put(topic, partition).log_id
    except REFUSALS as error:
        raise refuse_put(context, error, LogId(topic, partition), count) from error
    first_id = context.ids.reserve(count)
    # Later ids may be stored first, because the commit decides the order.
    yield from stamp_in_steps(parts, first_id)
    assert command.transaction is not None, "of a transaction"
    key, journalled = format_key(command.transaction).encode(), list[bytes]()
    for data, positions in parts:
        for start in range(0, len(positions), JOURNAL_STEP_COUNT):
            some = positions[start : start + JOURNAL_STEP_COUNT]
            journalled += encode_batch(log_id, key, command.opaque, data, some)
            yield
    # Check again: the transaction may have ended, or the partition been closed.
    transaction = find_transaction(command, answerer, count=count)
    records, last_id = [part.records for part in parts], id_after(first_id, count - 1)
    put_run(
        transaction,
        PutRun(log_id, records, sum(map(len, pieces)), count, last_id, journalled),
        answerer,
        opaques=(b"%d" % command.opaque,),
        ids=(first_id,),
    )


def _answer_if_repeated(command: Mput, partition: int, answerer: Answerer) -> bool:
    """Answer a batch if its producer has sent it before; return whether it has.

    Raises:
        SequenceError: its sequence numbers were used for another batch.
    """
    context = answerer.context
    log = context.topics.find_log(command.topic, partition)
    if command.producer is None or log is None:
        return False
    batch = log.producers.find(
        command.producer, command.sequence, command.count, command.checksum
    )
    if batch is None:
        return False
    answer_repeated(log, batch, answerer, opaque=command.opaque)
    return True


def _append_mput(
    command: Mput,
    parts: Sequence[CheckedRecords],
    size_bytes: int,
    log: PartitionLog,
    answerer: Answerer,
) -> None:
    """Append a verified batch."""
    context = answerer.context
    count, offset = command.count, log.next_offset
    first_id = context.ids.reserve(count)
    records = [part.records for part in parts]
    batch = None
    if command.producer is not None:
        batch = StoredBatch(
            command.producer,
            command.sequence,
            count,
            command.checksum,
            first_id,
            offset,
            SizeBytes(size_bytes),
        )
    finish: Iterable[None] = stamp_in_steps(parts, first_id)
    if count <= STAMPED_NOW_MAX:
        for _ in finish:
            pass
        finish = ()  # a complete batch may be committed by the loop's thread
    append_run(
        log,
        records,
        answerer,
        size_bytes=size_bytes,
        record_count=count,
        last_id=id_after(first_id, count - 1),
        receipts=Receipts((b"%d" % command.opaque,), (first_id,), (offset,)),
        batch=batch,
        finish=finish,
    )


def _check_put(command: Put) -> Generator[None, None, list[CheckedRecords]]:
    """Verify a put to an exchange; return its record as a batch of one."""
    payload, found = command.payload, checksum(command.payload)
    require_checksum(found, command.checksum)
    record = HEADER.pack(len(payload), found, 0, command.flag) + payload
    yield from ()
    return [CheckedRecords(bytearray(record), (0,))]


def _check(
    command: Mput, pieces: Sequence[BytesLike], context: BrokerContext
) -> Generator[None, None, list[CheckedRecords]]:
    """Verify a batch; return its records as on disk, but without their ids.

    Raises:
        ServerError: a checksum, the count or the framing is wrong.
    """
    blocks = yield from join_in_steps(pieces)
    require_checksum((yield from checksum_in_steps(blocks)), command.checksum)
    found = yield from check_in_steps(
        blocks, command.count, payload_bytes_max=context.config.limits.payload_bytes_max
    )
    if isinstance(found, BatchError):
        raise ServerError(f"mput: at byte {found.position}: {found.detail}")
    return found
