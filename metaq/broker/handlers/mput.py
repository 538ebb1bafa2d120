"""`mput`: many records, one command, one sync, one answer (docs/protocol.md).

All or none: framing, the checksum of the batch and the checksum of every record are
verified before the first id is given out. A record whose own checksum is wrong would
look like rot later, and a Java broker that recovers the log would cut it there.

The producer's name and sequence are carried for a later version that recognises a
retry; this one appends a batch each time it comes.
"""

from metaq.broker.acks import (
    Answerer,
    append_run,
    count_puts,
    refuse_put,
    verify_checksum,
)
from metaq.broker.context import BrokerContext
from metaq.errors import ClosedError, ForbiddenError, ServerError, StorageError
from metaq.model import MessageId
from metaq.protocol.commands import Mput
from metaq.record.batch import check_and_stamp
from metaq.record.ids import id_after
from metaq.record.layout import HEADER_BYTES


def handle_mput(command: Mput, answerer: Answerer, context: BrokerContext) -> None:
    """Append a batch; it is answered when it is stored.

    Raises:
        WireError: refused, and nothing was appended; the text is the answer.
    """
    topic, partition, count = command.topic, command.partition, command.count
    limit = context.config.limits.batch_records_max
    if not 1 <= count <= limit:
        raise ServerError(f"mput: expected 1..{limit} records, got {count}")
    payload_bytes = max(0, len(command.payload) - HEADER_BYTES * count)
    count_puts(context, topic, count=count, payload_bytes=payload_bytes)
    try:
        partition = context.topics.resolve_put(topic, partition)
        stamped, first_id = _stamp(command, context)
        log = context.topics.log_for_put(topic, partition)
    except (ForbiddenError, ServerError, StorageError, ClosedError) as error:
        raise refuse_put(
            context, error, topic=topic, partition=partition, count=count
        ) from error
    append_run(
        log,
        [stamped],  # type: ignore[list-item]  # read-only from here on, like bytes
        answerer,
        context,
        size_bytes=len(stamped),
        record_count=count,
        last_id=id_after(first_id, count - 1),
        flat=[command.opaque, first_id, log.next_offset],
    )


def _stamp(command: Mput, context: BrokerContext) -> tuple[bytearray, MessageId]:
    """Verify a batch and give its records their ids.

    Returns:
        The records as they go to disk, and the first id.

    Raises:
        ServerError: the batch is not what it says it is.
    """
    verify_checksum(command.payload, command.checksum)
    records, first_id = bytearray(command.payload), context.ids.reserve(command.count)
    error = check_and_stamp(records, command.count, first_id)
    if error is not None:
        raise ServerError(f"mput: at byte {error.position}: {error.detail}")
    return records, first_id
