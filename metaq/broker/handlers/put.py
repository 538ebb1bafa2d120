"""`put` in the general path: every form, every refusal (broker spec 1.4).

Order of the checks: closed partition, topic, partition range, checksum, then the log
itself. Refusals of the disk (offline, damaged, no space) are 500 with a detail that
names what is wrong; MetaQ sends no detail there.

What is stored comes this way only where it is the first put of its partition, or was
cut by the end of a read: `hot_puts.py` takes the rest, and answers no refusal. Keep
both in step.
"""

from metaq.broker.acks import (
    Answerer,
    Receipts,
    append_run,
    count_puts,
    refuse_put,
    verify_checksum,
)
from metaq.broker.context import BrokerContext
from metaq.broker.handlers.txn import handle_transactional_put
from metaq.errors import ClosedError, ForbiddenError, ServerError, StorageError
from metaq.protocol.commands import Put
from metaq.record.layout import encode_record


def handle_put(command: Put, answerer: Answerer, context: BrokerContext) -> None:
    """Append one message; it is answered when it is stored.

    Raises:
        WireError: refused; the text is the answer.
    """
    topic, partition, payload = command.topic, command.partition, command.payload
    count_puts(context, topic, count=1, payload_bytes=len(payload))
    if command.transaction is not None:
        handle_transactional_put(command, answerer, context)
        return
    try:
        partition = context.topics.resolve_put(topic, partition)
        verify_checksum(payload, command.checksum)
        log = context.topics.log_for_put(topic, partition)
    except (ForbiddenError, ServerError, StorageError, ClosedError) as error:
        raise refuse_put(context, error, topic=topic, partition=partition) from error
    message_id = context.ids.reserve(1)
    record = encode_record(payload, id=message_id, flag=command.flag)
    append_run(
        log,
        [record],
        answerer,
        context,
        size_bytes=len(record),
        record_count=1,
        last_id=message_id,
        receipts=Receipts((b"%d" % command.opaque,), (message_id,), (log.next_offset,)),
    )
