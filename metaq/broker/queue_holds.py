"""Acks in local transactions: messages that are put and acks are committed together.

    settle ... tx=KEY    the message is HELD; its done range is a put of the transaction
    commit, decided      it is done in memory; the transaction appends the record
    rollback             it is its worker's again; also when the time of the transaction
                         or its connection has ended

A start rolls back undecided transactions and finds the others in `__queues`. A queue
that is dropped from memory loses its holds, and another worker may get the messages, so
the commit is refused. Between the decision and its append, `__queues` lacks the record:
it must not be read again in that time (`require_ended` of the coordinator).
"""

from collections.abc import Callable, Sequence

from metaq.broker.acks import Answerer
from metaq.broker.joined_appends import JoinedRecord, run_of_one
from metaq.broker.queue_groups import QueueOwner
from metaq.broker.queue_log import QUEUES
from metaq.broker.queue_part import ServedQueue
from metaq.errors import MetaqError, ServerError, StorageError, TransactionError
from metaq.model import LocalTransactionId
from metaq.protocol.commands import Settle
from metaq.protocol.queue_frames import Settlement, SettleVerb, Word
from metaq.protocol.transaction_ids import format_key
from metaq.queues.state_log import Done, DoneRanges
from metaq.txn.decisions import DecisionTicket


def require_acks(command: Settle, entries: Sequence[Settlement]) -> None:
    """Check that a settle in a transaction has only acks, and that it is a local one.

    Raises:
        ServerError: the transaction is not local, or an entry is not an ack.
    """
    if command.transaction is None:
        return
    if not isinstance(command.transaction, LocalTransactionId):
        key = format_key(command.transaction)
        raise ServerError(f"settle: acks go into a local transaction, got '{key}'")
    for each in entries:
        if each.verb is not SettleVerb.ACK:
            raise ServerError(
                "settle: only acks go into a transaction, got"
                f" {each.verb.name.lower()} for offset {each.offset}"
            )


class QueueHold:
    """Messages of one settle that are held by a transaction, which owns this."""

    def __init__(
        self,
        service: QueueOwner,
        queue: ServedQueue,
        command: Settle,
        answerer: Answerer,
    ) -> None:
        """Find the transaction; call `hold` and `put` in the same turn of the loop.

        Raises:
            TransactionError: the transaction is not open here, or is full.
        """
        self._service = service
        self._queue = queue
        self._command = command
        self._context = answerer.context
        self._held = list[Done]()
        assert command.transaction is not None, "of a settle in a transaction"
        transactions = self._context.transactions
        self._tx = transactions.find_for_put(format_key(command.transaction), answerer)
        transactions.check_room(1, len(command.payload))
        self._tx.holds.append(self)

    def hold(self, entries: Sequence[Settlement]) -> list[Word]:
        """Hold the messages of valid acks; return a word for each entry."""
        state, worker = self._queue.state, self._command.worker
        now = self._service.now()
        words = list[Word]()
        for each in entries:
            words.append(state.settle(worker, each, now, is_held=True))
            if words[-1] is Word.OK:
                self._held.append(state.range_of(each.offset))
        return words

    def put(self, on_done: Callable[[MetaqError | None], None]) -> None:
        """Add the done record of the held messages to the transaction.

        `on_done` is called when the record is journalled (at once if nothing is held),
        or with the error after which the transaction cannot be committed.
        """
        if not self._held:
            on_done(None)
            return
        queue, command = self._queue, self._command
        payload = queue.encode(DoneRanges(self._held).ranges())
        record = JoinedRecord(QUEUES, payload)
        ticket = DecisionTicket(
            lambda _position: on_done(None),
            lambda error: on_done(
                TransactionError(f"not in the transaction journal: {error}")
            ),
        )
        run = run_of_one(self._context, record, command.transaction)
        self._context.transactions.put(self._tx, run, ticket)

    # -- called by the transaction

    def require_kept(self) -> None:
        """Raise StorageError if the queue was dropped from memory."""
        if not self._service.has(self._queue):
            raise StorageError(
                f"queue group '{self._queue.name.group}' does not hold the messages of"
                " the transaction any more"
            )

    def on_ended(self, *, is_committed: bool) -> None:
        """End the holds: messages are done after a commit, else their worker's again.

        The done record is part of the committed transaction.
        """
        service, queue = self._service, self._queue
        if not service.has(queue):
            return
        now = service.now()
        for each in self._held:
            queue.state.end_hold(each.start, now, is_done=is_committed)
        service.on_settled(queue)
