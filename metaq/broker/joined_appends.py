"""Atomic appends to several partitions: local transactions of the broker itself.

Used for "append there and record it here", such as a dead letter and the end of its
message. A crash leaves both or neither, because the journal decides. These transactions
have their own bounds, so that they and those of clients cannot starve each other.
"""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Final, NamedTuple

from metaq.broker.context import BrokerContext
from metaq.errors import MetaqError, TransactionError
from metaq.model import LocalTransactionId, LogId, TransactionId
from metaq.protocol.commands import NO_CHECKSUM, Put
from metaq.protocol.encoding import encode
from metaq.protocol.transaction_ids import format_key
from metaq.record.batch import CheckedRecords, stamp_in_steps
from metaq.record.ids import id_after
from metaq.record.layout import encode_record
from metaq.txn.decisions import DecisionTicket
from metaq.txn.records import encode_batch, encode_put
from metaq.txn.transaction import PutRun

OPEN_MAX: Final = 64
"""Maximum joined appends in progress; more are refused, and the caller retries."""
HELD_BYTES_MAX: Final = 16 << 20
"""Maximum bytes of all in progress; a larger one is accepted alone."""
_SESSION: Final = "metaq-broker"
_NO_TIMEOUT: Final = 0
_UNHEARD: Final = DecisionTicket(lambda _position: None, lambda _error: None)
"""Ticket of a put in such a transaction: a refused put makes the commit fail."""


class JoinedRecord(NamedTuple):
    """One record and its partition."""

    log_id: LogId
    payload: bytes
    flag: int = 0


def run_of_one(
    context: BrokerContext, record: JoinedRecord, transaction: TransactionId | None
) -> PutRun:
    """Return the put of one record in a transaction, with an id of its own."""
    log_id, payload, flag = record
    message_id = context.ids.reserve(1)
    topic, partition = log_id.topic, log_id.partition
    put = Put(topic, partition, payload, flag, NO_CHECKSUM, 0, transaction)
    data = encode_record(payload, id=message_id, flag=flag)
    journalled = (encode_put(message_id, encode(put)),)
    return PutRun(log_id, (data,), len(data), 1, message_id, journalled)


class JoinedBatch(NamedTuple):
    """Records of one partition; they get their ids when they are appended."""

    log_id: LogId
    records: bytearray
    """In segment format; modified by the append, and owned by the log from then on."""
    positions: Sequence[int]
    """Start of each record."""


class _Decision:
    """Hold that records whether the commit was decided.

    After the decision, records missing in a partition are appended by the journal.
    """

    def __init__(self) -> None:
        self.is_committed = False

    def require_kept(self) -> None:
        """Do nothing: no state outside the transaction can be lost."""

    def on_ended(self, *, is_committed: bool) -> None:
        """Record the decision."""
        self.is_committed = is_committed


class JoinedAppends:
    """Joined appends of one broker. Used on the loop's thread."""

    def __init__(self, context: BrokerContext, session: str = _SESSION) -> None:
        """Create one; `session` differs between the objects of one broker."""
        self._context = context
        self._session = session
        self._numbers = count(1)
        self._open_count = 0
        self._held_bytes = 0

    def append(
        self,
        records: Sequence[JoinedRecord | JoinedBatch],
        on_done: Callable[[MetaqError | None], None],
    ) -> None:
        """Append records, all or none; never blocks.

        Args:
            records: their partitions are served now.
            on_done: called once, on the loop, with None when all records are stored, or
                with the error when none is; it may be called at once. A record whose
                partition fails after the decision counts as stored: the journal stores
                it later.
        """
        size_bytes = sum(len(each[1]) for each in records)
        held_bytes, is_busy = self._held_bytes + size_bytes, self._open_count > 0
        if self._open_count >= OPEN_MAX or (is_busy and held_bytes > HELD_BYTES_MAX):
            on_done(
                TransactionError(
                    f"joined appends: expected at most {OPEN_MAX} of {HELD_BYTES_MAX}"
                    f" bytes, got {self._open_count + 1} of {held_bytes}"
                )
            )
            return
        self._open_count += 1
        self._held_bytes = held_bytes

        def end(error: MetaqError | None) -> None:
            self._open_count -= 1
            self._held_bytes -= size_bytes
            on_done(error)

        try:
            self._commit(records, end)
        except TransactionError as error:
            end(error)

    def _commit(
        self,
        records: Sequence[JoinedRecord | JoinedBatch],
        on_done: Callable[[MetaqError | None], None],
    ) -> None:
        transactions = self._context.transactions
        transaction = LocalTransactionId(self._session, next(self._numbers))
        key = format_key(transaction)
        transactions.begin(key, self, _NO_TIMEOUT)
        tx = transactions.find_for_put(key, self)
        for each in records:
            if isinstance(each, JoinedBatch):
                run = self._run_of(each, key)
            else:
                run = run_of_one(self._context, each, transaction)
            transactions.put(tx, run, _UNHEARD)
        decision = _Decision()
        tx.holds.append(decision)

        def end(error: MetaqError | None) -> None:
            if error is not None and isinstance(error.__cause__, MetaqError):
                error = error.__cause__  # the outer error has one text for all causes
            on_done(None if decision.is_committed else error)

        transactions.commit(key, self, end, is_two_phase=False)

    def _run_of(self, batch: JoinedBatch, key: str) -> PutRun:
        log_id, records, positions = batch
        count = len(positions)
        first_id = self._context.ids.reserve(count)
        for _ in stamp_in_steps([CheckedRecords(records, positions)], first_id):
            pass  # all in one turn, because the broker's own batches are small
        journalled = encode_batch(log_id, key.encode(), 0, records, positions)
        last_id = id_after(first_id, count - 1)
        return PutRun(log_id, (records,), len(records), count, last_id, journalled)
