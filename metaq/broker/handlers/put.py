"""`put` in the general path: every form, every refusal (broker spec 1.4).

Order of the checks: closed partition, topic, partition range, checksum, then the log
itself. Refusals of the disk (offline, damaged, no space) are 500 with a detail that
names what is wrong; MetaQ sends no detail there.

What is stored comes this way only where it is the first put of its partition, or was
cut by the end of a read: `hot_puts.py` takes the rest, and answers no refusal. Keep
both in step.
"""

from collections.abc import Generator, Sequence
from dataclasses import replace

from metaq.broker.acks import (
    Answerer,
    Receipts,
    append_run,
    count_puts,
    refuse_put,
    require_checksum,
)
from metaq.broker.context import BrokerContext
from metaq.broker.handlers.txn import handle_transactional_put
from metaq.errors import ClosedError, ForbiddenError, ServerError, StorageError
from metaq.protocol.buffer import Piece
from metaq.protocol.commands import Put
from metaq.record.checksum import checksum
from metaq.record.layout import HEADER, HEADER_BYTES
from metaq.record.pieces import checksum_in_steps


def handle_put(command: Put, answerer: Answerer, context: BrokerContext) -> None:
    """Append one message; it is answered when it is stored.

    Raises:
        WireError: refused; the text is the answer.
    """
    payload = command.payload
    if command.transaction is not None:
        count_puts(context, command.topic, count=1, payload_bytes=len(payload))
        handle_transactional_put(command, answerer, context)
        return
    _append(command, [payload], checksum(payload), answerer, context)


def handle_put_in_pieces(
    command: Put,
    pieces: Sequence[Piece],
    answerer: Answerer,
    context: BrokerContext,
) -> Generator[None]:
    """Append one message whose payload came in pieces, in steps; see `handle_put`."""
    if command.transaction is not None:
        handle_put(replace(command, payload=b"".join(pieces)), answerer, context)
        return
    found = yield from checksum_in_steps(pieces)
    # A view would keep what was received with it for as long as the disk takes.
    _append(command, list(map(bytes, pieces)), found, answerer, context)


def _append(
    command: Put,
    pieces: Sequence[bytes],
    found: int,
    answerer: Answerer,
    context: BrokerContext,
) -> None:
    """Append a message whose payload has the checksum `found`."""
    topic, partition = command.topic, command.partition
    payload_bytes = sum(map(len, pieces))
    count_puts(context, topic, count=1, payload_bytes=payload_bytes)
    try:
        partition = context.topics.resolve_put(topic, partition)
        require_checksum(found, command.checksum)
        log = context.topics.log_for_put(topic, partition)
    except (ForbiddenError, ServerError, StorageError, ClosedError) as error:
        raise refuse_put(context, error, topic=topic, partition=partition) from error
    message_id = context.ids.reserve(1)
    append_run(
        log,
        [HEADER.pack(payload_bytes, found, message_id, command.flag), *pieces],
        answerer,
        context,
        size_bytes=HEADER_BYTES + payload_bytes,
        record_count=1,
        last_id=message_id,
        receipts=Receipts((b"%d" % command.opaque,), (message_id,), (log.next_offset,)),
    )
