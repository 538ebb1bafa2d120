"""One transaction in memory: its state, and its puts as batches for partitions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from metaq.errors import MetaqError
from metaq.fs import Buffer
from metaq.model import LogId, MessageId, Millis, Offset, id_time
from metaq.record.checksum import checksum
from metaq.record.layout import record_positions
from metaq.txn.figures import TransactionView
from metaq.txn.journal import Slot, join_chunks
from metaq.txn.opening import RestoredTransaction
from metaq.txn.ports import TransactionHold
from metaq.txn.records import bounds_of
from metaq.txn.recovery import make_batches
from metaq.txn.side_files import KeptOutcome
from metaq.txn.state import TxState

PUT_OVERHEAD_BYTES: Final = 200
"""Bytes counted for a put in addition to its payload: record header and objects."""

VIEWS_MAX: Final = 1000
"""Maximum number of transactions shown to an operator; prepared ones come first."""

NO_OWNER: Final = object()
"""Owner of a transaction whose connection has ended."""

OnDone: TypeAlias = Callable[[MetaqError | None], None]
"""Called with the error, or None; once, on the loop's thread."""


class PutRun(NamedTuple):
    """Puts of one transaction to one partition, added together."""

    log_id: LogId
    chunks: Sequence[Buffer]
    """The records in segment format, cut anywhere; owned by the transaction."""
    size_bytes: int
    record_count: int
    last_id: MessageId
    journalled: Sequence[bytes] = ()
    """The records in the journal's format, cut anywhere; empty if they are in the
    journal already."""


@dataclass(slots=True, eq=False)
class PendingBatch:
    """Puts of a transaction to one partition."""

    log_id: LogId
    chunks: list[Buffer] = field(default_factory=list)
    checksum: int | None = None
    """Checksum of the chunks, joined into one by `seal`; None before."""
    size_bytes: int = 0
    """Total size of the chunks."""
    whole_bytes: int = 0
    """Size of the batch; greater than `size_bytes` if a crash left its beginning in the
    log."""
    put_count: int = 0
    last_id: MessageId = MessageId(-1)  # noqa: RUF009  # a NewType is its number
    offset_at: int = -1
    """Position of its offset in the redo file; -1: it is not overwritten."""
    offset_written: Offset = Offset(-1)  # noqa: RUF009  # as above
    """The value there: the batch's offset, or a bound."""
    is_in_flight: bool = False
    is_stored: bool = False

    @property
    def is_cut(self) -> bool:
        """Whether a crash left its beginning, or all of it, in the log."""
        return self.size_bytes < self.whole_bytes

    def seal(self) -> int:
        """Join the records into one piece, once; return their checksum.

        Raises:
            NoSpaceError: there is not enough memory now.
        """
        if self.checksum is None:
            data = join_chunks(self.chunks)
            self.chunks = [data]
            self.checksum = checksum(data)
        return self.checksum


@dataclass(slots=True, eq=False)
class BrokerTransaction:
    """One transaction. Owner: the coordinator."""

    key: str
    owner: object
    """The connection that began it, or `NO_OWNER`."""
    began_ms: Millis
    session_id: str = ""
    state: TxState = TxState.STARTED
    slot: Slot = field(default_factory=Slot)
    batches: dict[LogId, PendingBatch] = field(default_factory=dict)
    put_count: int = 0
    held_bytes: int = 0
    prepared_ms: Millis | None = None
    was_prepared: bool = False
    waiters: list[OnDone] = field(default_factory=list)
    """Called with the outcome of the decision in progress."""
    stuck: MetaqError | None = None
    """Error for which a batch is not in its partition, after the commit; or None."""
    is_unverified: bool = False
    """Whether a partition could not be read, so that only a restart can check it."""
    holds: list[TransactionHold] = field(default_factory=list)
    """Objects held until the outcome is known."""
    group: "dict[BrokerTransaction, None] | None" = None
    """Unfinished transactions that one command commits; shared by all of them."""

    @property
    def last_id(self) -> MessageId:
        """Return the largest id of its puts; it must have some."""
        return max(each.last_id for each in self.batches.values())

    @property
    def is_cut(self) -> bool:
        """Whether a part of a batch is in its partition."""
        return any(each.is_cut for each in self.batches.values())

    def add(self, puts: PutRun) -> None:
        """Add the records of puts to one partition."""
        batch = self.batches.get(puts.log_id)
        if batch is None:
            batch = self.batches[puts.log_id] = PendingBatch(puts.log_id)
        batch.chunks += puts.chunks
        batch.size_bytes += puts.size_bytes
        batch.whole_bytes += puts.size_bytes
        batch.put_count += puts.record_count
        batch.last_id = puts.last_id
        self.put_count += puts.record_count

    def end_holds(self, *, is_committed: bool) -> None:
        """Report the outcome to its holds, unless that was done."""
        holds, self.holds = self.holds, []
        for hold in holds:
            hold.on_ended(is_committed=is_committed)

    def leave_group(self) -> None:
        """Leave the group of transactions that one command commits."""
        if self.group is not None:
            del self.group[self]
            self.group = None

    def answer(self, error: MetaqError | None) -> None:
        """Report the outcome of the decision in progress to all waiters."""
        waiters, self.waiters = self.waiters, []
        for each in waiters:
            each(error)

    def view(self, now_ms: Millis) -> TransactionView:
        """Return the view for an operator."""
        prepared_ms = self.prepared_ms
        return TransactionView(
            self.key,
            self.state.value,
            self.put_count,
            self.held_bytes,
            tuple(sorted(map(str, self.batches))),
            max(0, now_ms - self.began_ms),
            None if prepared_ms is None else max(0, now_ms - prepared_ms),
            "" if self.stuck is None else str(self.stuck),
        )


def view_transactions(
    transactions: Mapping[str, BrokerTransaction],
    outcomes: Mapping[str, KeptOutcome],
    now_ms: Millis,
) -> list[TransactionView]:
    """Return views for operators: up to `VIEWS_MAX` transactions, and outcomes."""
    # Prepared ones first, which wait for an operator.
    found = sorted(transactions.values(), key=lambda tx: not tx.was_prepared)
    views = [tx.view(now_ms) for tx in found[:VIEWS_MAX]]
    for key, kept in outcomes.items():
        if key not in transactions:
            state = f"heuristic {kept.outcome.value}"
            age_ms = max(0, now_ms - kept.at_ms)
            views.append(TransactionView(key, state, 0, 0, (), age_ms, age_ms))
    return views


def restore_transaction(
    restored: RestoredTransaction, now_ms: Millis
) -> BrokerTransaction:
    """Return a transaction restored from the journal: prepared, or decided."""
    replayed = restored.replayed
    first_ms = id_time(replayed.first_id)
    tx = BrokerTransaction(
        replayed.key, NO_OWNER, now_ms if first_ms is None else first_ms
    )
    tx.slot = restored.slot
    tx.was_prepared = replayed.is_prepared
    tx.is_unverified = replayed.is_unverified
    tx.prepared_ms = tx.began_ms if replayed.is_prepared else None
    tx.state = TxState.PREPARED if replayed.locations is None else TxState.DECIDED
    locations = replayed.locations or ()
    known = dict(
        zip(
            [location.log_id for location in locations],
            bounds_of(locations, restored.records_end),
            strict=True,
        )
    )
    for made in make_batches(replayed):
        applied = replayed.applied_bytes.get(made.log_id, 0)
        left = made.ids[len(record_positions(made.data[:applied])) :]
        data = made.data[applied:]
        tx.add(PutRun(made.log_id, (data,), len(data), len(left), made.ids[-1]))
        batch = tx.batches[made.log_id]
        batch.whole_bytes = len(made.data)
        at, batch.offset_written = known.get(made.log_id, (-1, Offset(-1)))
        if not applied:
            # The rest of a cut batch follows the part that a crash has left.
            batch.offset_at = at
    tx.held_bytes = sum(
        batch.whole_bytes + PUT_OVERHEAD_BYTES * batch.put_count
        for batch in tx.batches.values()
    )
    return tx
