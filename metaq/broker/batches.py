"""Batches of producers: appended once, and answered as often as they are sent.

The partition log remembers which batches it has (`storage/producers.py`). One that is
repeated is answered with the receipt of the first: at once when that is stored, else
with it, whatever becomes of it. So no batch is acknowledged before the disk has it.
"""

from collections.abc import Iterable, Sequence

from metaq.broker.acks import (
    PUT_OVERHEAD_BYTES,
    Answerer,
    PutTicket,
    Receipts,
    is_light,
)
from metaq.broker.context import BrokerContext
from metaq.errors import ClosedError, StorageError
from metaq.fs import Buffer
from metaq.record.ids import id_after
from metaq.storage.partition_log import PartitionLog
from metaq.storage.producers import StoredBatch


class BatchTicket:
    """A batch that waits for the disk, and all that are answered with it.

    Called once, on the loop's thread.
    """

    __slots__ = ("_tickets",)

    def __init__(self, ticket: PutTicket) -> None:
        self._tickets = [ticket]

    def join(self, ticket: PutTicket) -> None:
        """Answer a repeated batch together with this one."""
        self._tickets.append(ticket)

    def on_stored(self) -> None:
        """Answer all with 200."""
        for ticket in self._tickets:
            ticket.on_stored()

    def on_failed(self, error: StorageError | ClosedError) -> None:
        """Refuse all; the log has forgotten the batch."""
        for ticket in self._tickets:
            ticket.on_failed(error)


def append_batch(
    log: PartitionLog,
    chunks: Sequence[Buffer],
    batch: StoredBatch,
    answerer: Answerer,
    context: BrokerContext,
    *,
    opaque: int,
    finish: Iterable[None],
) -> None:
    """Append a new batch; its command is answered by its ticket, now if refused.

    Args:
        log: where to.
        chunks: its records; owned by the log from now on.
        batch: its remembered form; its offset is the log's next one.
        answerer: the session that put.
        context: counters and texts.
        opaque: of the command.
        finish: gives them their ids; see `PartitionLog.append`.
    """
    assert batch.offset == log.next_offset, (batch, log.next_offset)
    ticket = BatchTicket(
        _hold(log, batch, answerer, context, opaque=opaque, size_bytes=batch.size_bytes)
    )
    try:
        log.append(
            chunks,
            size_bytes=batch.size_bytes,
            record_count=batch.count,
            last_id=id_after(batch.first_id, batch.count - 1),
            ticket=ticket,
            batch=batch,
            finish=finish,
            is_light=is_light(answerer),
        )
    except (StorageError, ClosedError) as error:
        ticket.on_failed(error)
    except MemoryError:
        answerer.answer(b"", count=1, size_bytes=batch.size_bytes + PUT_OVERHEAD_BYTES)
        raise


def answer_repeated(
    log: PartitionLog,
    batch: StoredBatch,
    answerer: Answerer,
    context: BrokerContext,
    *,
    opaque: int,
) -> None:
    """Answer a batch that the log has, or is about to have; nothing is appended."""
    context.counters.batch_repeated += 1
    ticket = _hold(log, batch, answerer, context, opaque=opaque, size_bytes=0)
    in_flight = log.ticket_of(batch)
    if isinstance(in_flight, BatchTicket):
        in_flight.join(ticket)
    else:
        ticket.on_stored()


def _hold(
    log: PartitionLog,
    batch: StoredBatch,
    answerer: Answerer,
    context: BrokerContext,
    *,
    opaque: int,
    size_bytes: int,
) -> PutTicket:
    """Count a command as in flight; return the ticket that answers it."""
    in_flight = size_bytes + PUT_OVERHEAD_BYTES
    answerer.hold(count=1, size_bytes=in_flight)
    return PutTicket(
        answerer,
        context,
        log=log,
        receipts=Receipts((b"%d" % opaque,), (batch.first_id,), (batch.offset,)),
        record_count=batch.count,
        size_bytes=in_flight,
    )
