"""Connects transactions on the wire, the coordinator and the partitions.

`ServedLogs` finds the logs for committed puts, and creates missing ones. The puts of a
session to one partition in one transaction and one pass are a run, as in `acks.py`:
journalled as one piece, answered by one formatting operation. Errors of the coordinator
become MetaQ's replies here.

Source: docs/metaq-1.4/broker.md 5.3 to 5.5.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from metaq.broker.acks import PUT_OVERHEAD_BYTES, Answerer
from metaq.broker.topics import Topics
from metaq.errors import MetaqError, ServerError, StorageError, TransactionError
from metaq.model import LogId, is_internal
from metaq.protocol.commands import CommitTogether, Status, TransactionCommand
from metaq.protocol.encoding import encode_result
from metaq.protocol.put_replies import encode_put_replies
from metaq.protocol.transaction_ids import LINE_END
from metaq.storage.partition_log import PartitionLog
from metaq.txn.state import TxState, XaCommandError
from metaq.txn.transaction import BrokerTransaction, PutRun

NO_OFFSET = -1
"""Offset in the reply to a put; the real one is only known after the commit."""
COMMITTED = b"0"
"""Line of a committed transaction in the reply to a commit of several: XA_OK."""


class ServedLogs:
    """Logs that the coordinator appends to."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._logs: dict[LogId, PartitionLog] = {}
        """Cache of found logs, for `_version` of the topics."""
        self._version = topics.version

    def find(self, log_id: LogId) -> PartitionLog:
        """Return a log of a served topic, even if the partition is closed.

        Raises:
            StorageError: the topic was deleted or removed from the settings, or the log
                cannot be created.
        """
        if self._version != self._topics.version:
            self._version = self._topics.version
            self._logs.clear()
        log = self._logs.get(log_id)
        if log is None:
            topics = self._topics
            if is_internal(log_id.topic):
                log = topics.internal_log(log_id)
            elif topics.may_appear(log_id.topic, log_id.partition):
                log = topics.log_for_put(log_id.topic, log_id.partition)
            else:
                raise StorageError(f"partition {log_id} is not served any more")
            self._logs[log_id] = log
        return log


@dataclass(slots=True, eq=False)
class PutRunTicket:
    """Ticket of puts of one transaction to one partition, for the journal."""

    transaction: BrokerTransaction
    answerer: Answerer
    partition: int
    opaques: Sequence[bytes]
    """In decimal."""
    ids: Sequence[int]
    """Id of each command's first record."""
    size_bytes: int

    def __post_init__(self) -> None:
        """Count the commands as in flight."""
        self.size_bytes += len(self.ids) * PUT_OVERHEAD_BYTES
        self.answerer.hold(count=len(self.ids), size_bytes=self.size_bytes)

    def on_journalled(self, _position: int) -> None:
        """Answer 200; the offsets of the records are not known yet."""
        try:
            offsets = [NO_OFFSET] * len(self.ids)
            replies = encode_put_replies(
                self.partition, self.opaques, self.ids, offsets
            )
        except MemoryError:
            # Do not raise: other tickets of this group still need replies.
            self.answerer.run_out()
            replies = b""
        is_committing = self.transaction.state is TxState.COMMITTING
        self._answer(replies, joins_next=is_committing)

    def on_refused(self, error: StorageError) -> None:
        """Refuse every put; the transaction can no longer be committed."""
        self.refuse(f"not in the transaction journal: {error}")

    def refuse(self, text: str) -> None:
        """Answer every put with 500."""
        body = text.encode()
        replies = [
            encode_result(Status.SERVER_ERROR, body, int(opaque))
            for opaque in self.opaques
        ]
        self._answer(b"".join(replies))

    def give_up(self) -> None:
        """Send no reply, because there was no memory for the puts."""
        self._answer(b"")

    def _answer(self, replies: bytes, *, joins_next: bool = False) -> None:
        self.answerer.answer(
            replies,
            count=len(self.ids),
            size_bytes=self.size_bytes,
            joins_next=joins_next,
        )


def put_run(
    transaction: BrokerTransaction,
    puts: PutRun,
    answerer: Answerer,
    *,
    opaques: Sequence[bytes],
    ids: Sequence[int],
    partition: int | None = None,
) -> None:
    """Add puts to a transaction; they are answered once they are journalled.

    `partition`, if given, is the one in the replies instead of the puts' own.
    """
    transactions, size_bytes = answerer.context.transactions, puts.size_bytes
    partition = puts.log_id.partition if partition is None else partition
    ticket = PutRunTicket(transaction, answerer, partition, opaques, ids, size_bytes)
    try:
        transactions.check_room(puts.record_count, size_bytes)
    except TransactionError as error:
        ticket.refuse(str(error))
        return
    try:
        transactions.put(transaction, puts, ticket)
    except MemoryError:
        ticket.give_up()
        raise


class TransactionAnswer:
    """Reply to a transaction command, sent later."""

    __slots__ = ("_answerer", "_opaque")

    def __init__(
        self, answerer: Answerer, command: TransactionCommand | CommitTogether
    ) -> None:
        self._answerer = answerer
        self._opaque = command.opaque
        answerer.hold(count=1, size_bytes=PUT_OVERHEAD_BYTES)

    def on_done(self, error: MetaqError | None) -> None:
        """Answer 200, or 500 with the error."""
        if error is None:
            self._answer(encode_result(Status.OK, b"", self._opaque))
        else:
            body = str(refusal_of(error)).encode()
            self._answer(encode_result(Status.SERVER_ERROR, body, self._opaque))

    def on_voted(self, vote: int) -> None:
        """Answer 200 with the vote of a prepare."""
        self._answer(encode_result(Status.OK, b"%d" % vote, self._opaque))

    def on_outcomes(self, outcomes: Sequence[MetaqError | None]) -> None:
        """Answer 200 with a line for each transaction: 0, or the error."""
        lines = [
            COMMITTED if error is None else str(refusal_of(error)).encode()
            for error in outcomes
        ]
        self._answer(encode_result(Status.OK, LINE_END.join(lines), self._opaque))

    def give_up(self) -> None:
        """Send no reply, because the error that was raised answers the command."""
        self._answer(b"")

    def _answer(self, reply: bytes) -> None:
        self._answerer.answer(reply, count=1, size_bytes=PUT_OVERHEAD_BYTES)


def refusal_of(error: MetaqError) -> ServerError:
    """Return the reply to a failed transaction command."""
    if isinstance(error, XaCommandError):
        return ServerError(f"XAException:code={error.code},msg={error}")
    return ServerError(str(error))
