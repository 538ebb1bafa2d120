"""Decisions before the journal: commits, late rollbacks, and those of operators.

A commit begins with its record; `applier.py` does the rest:

    bounds of all partitions  →  `together` (of several)  →  commit records, synced

Each partition returns a lower bound for the offset; one that would refuse stops the
commit here. Transactions that are committed together are planned together, and all of
this is queued in one turn of the loop, so that a topic is deleted either before the
first record or after the last one.

Replay identifies a transaction by its key. Puts without an end in the journal would
count as those of the next transaction with that key: rolled back puts would be prepared
or committed with it. So the key stays in use until the rollback is journalled, in the
file of the puts. The rollback is retried until it succeeds; such transactions count as
open ones, so their number is bounded.

The outcome that an operator decides is written before it is carried out, and stays
until the transaction's coordinator forgets it; until then every command of that
coordinator is answered with the outcome's code. Source: docs/metaq-1.4/broker.md 5.8.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, NamedTuple

from metaq.clock import Clock
from metaq.errors import MetaqError, StorageError
from metaq.fs import FileSystem
from metaq.model import LogId
from metaq.txn.journal import Gate, Journal, JournalEntry, Slot
from metaq.txn.ports import FindLog
from metaq.txn.records import BatchLocation, bounds_of, encode_operation, ending_of
from metaq.txn.side_files import OUTCOMES, TOGETHER, KeptOutcome
from metaq.txn.state import HeuristicOutcome, outcome_error
from metaq.txn.transaction import BrokerTransaction, OnDone

TRIED_AT_ONCE: Final = 100
"""Maximum number of rollbacks tried together: a full disk refuses them all."""


class DecisionTicket(NamedTuple):
    """Calls one of two functions with the outcome of a decision."""

    on_journalled: Callable[[int], None]
    on_refused: Callable[[StorageError], None]


def submit_rollback(
    journal: Journal,
    slot: Slot,
    key: str,
    ticket: DecisionTicket,
    *,
    was_prepared: bool = False,
) -> None:
    """Journal the rollback of a slot's transaction."""
    operation = ending_of(key, is_commit=False)
    data = encode_operation(operation, key, was_prepared=was_prepared)
    entry = JournalEntry(slot, (data,), ticket, is_decision=True, is_last=True)
    journal.submit(entry)


class CommitRecords:
    """Journals commits. Owner: the coordinator."""

    def __init__(self, fs: FileSystem, journal: Journal, find_log: FindLog) -> None:
        self._fs = fs
        self._journal = journal
        self._find_log = find_log
        self._groups: list[dict[BrokerTransaction, None]] = []

    def submit(
        self,
        together: Sequence[BrokerTransaction],
        on_settled: Callable[[MetaqError | None], None],
    ) -> None:
        """Journal the commit of transactions: all of them or none.

        Args:
            together: one or more; several must be prepared.
            on_settled: called once with None when they are committed, or with the
                error. If the journal is offline by then, a restart knows the outcome.

        Raises:
            StorageError: a partition would refuse its batch now; nothing was queued.
            ClosedError: the logs are closed.
        """
        if len(together) == 1:
            (tx,) = together
            self._submit(tx, self._plan(tx), on_settled)
            return
        self._require_space(together)
        plans = [self._plan(tx) for tx in together]
        self.join(together)

        def settled(errors: Sequence[MetaqError | None]) -> None:
            error = next(filter(None, errors), None)
            if error is not None:
                for tx in together:
                    tx.leave_group()
            on_settled(error)

        names = [{tx.key: tx.last_id for tx in group} for group in self._groups]
        gate = self._journal.do_ahead(
            partial(TOGETHER.write, self._fs, self._journal.directory, names)
        )
        records = Outcomes(len(together), settled)
        for index, (tx, locations) in enumerate(zip(together, plans, strict=True)):
            self._submit(tx, locations, partial(records.take, index), gate)

    def join(self, together: Iterable[BrokerTransaction]) -> None:
        """Make transactions a group, and drop groups that have ended."""
        group = dict.fromkeys(together)
        for tx in group:
            tx.group = group
        self._groups = [each for each in self._groups if each] + [group]

    def _require_space(self, together: Iterable[BrokerTransaction]) -> None:
        """Raise if a partition would refuse all of its batches as one append."""
        sizes = Counter[LogId]()
        for tx in together:
            for batch in tx.batches.values():
                sizes[batch.log_id] += batch.size_bytes
        for log_id, size_bytes in sizes.items():
            self._find_log(log_id).plan_append(size_bytes)

    def _plan(self, tx: BrokerTransaction) -> list[BatchLocation]:
        """Return locations for the commit record, with bounds as offsets."""
        locations = []
        for batch in tx.batches.values():
            size = batch.size_bytes
            bound = self._find_log(batch.log_id).plan_append(size)
            batch.offset_written = bound
            locations.append(BatchLocation(batch.log_id, bound, size, batch.seal()))
        return locations

    def _submit(
        self,
        tx: BrokerTransaction,
        locations: Sequence[BatchLocation],
        on_settled: Callable[[StorageError | None], None],
        gate: Gate | None = None,
    ) -> None:
        was_prepared = tx.was_prepared
        operation = ending_of(tx.key, is_commit=True)
        record = encode_operation(
            operation,
            tx.key,
            was_prepared=was_prepared,
            locations=locations,
            has_bounds=True,
        )
        bounds = bounds_of(locations, len(record))

        def journalled(position: int) -> None:
            for (at, _bound), batch in zip(bounds, tx.batches.values(), strict=True):
                batch.offset_at = position + at
            on_settled(None)

        self._journal.submit(
            JournalEntry(
                tx.slot,
                (record,),
                DecisionTicket(journalled, on_settled),
                is_decision=True,
                # A power cut that takes the record and leaves batches would leave a
                # half, or a second copy if the transaction stays prepared. A single
                # message can be neither.
                is_ahead=was_prepared or tx.put_count > 1,
                bounds=bounds,
                gate=gate,
            )
        )


class Outcomes:
    """Collects several outcomes, and reports them together."""

    def __init__(
        self, count: int, on_done: Callable[[Sequence[MetaqError | None]], None]
    ) -> None:
        """Expect `count` outcomes, 1 or more."""
        self._outcomes: list[MetaqError | None] = [None] * count
        self._missing = count
        self._on_done = on_done

    def take(self, index: int, error: MetaqError | None) -> None:
        """Record one outcome; once for each index."""
        self._outcomes[index] = error
        self._missing -= 1
        if not self._missing:
            self._on_done(self._outcomes)


class UnendedTransactions:
    """Transactions whose rollback is not journalled yet. Owner: the coordinator."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._slots: dict[str, Slot] = {}
        self._tried_count = 0

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: str) -> bool:
        return key in self._slots

    def add(self, key: str, slot: Slot) -> None:
        """Add an ended transaction whose slot accepts no entries any more.

        Its puts are not kept, and their memory is not counted any more.
        """
        if slot.file is not None:
            # A new slot: the old one may lack an entry, and then refuses all others.
            self._slots[key] = Slot()
            self._slots[key].file = slot.file

    def retry(self) -> None:
        """Retry rollbacks, unless a try is in progress."""
        if self._tried_count:
            return
        for key, slot in list(self._slots.items())[:TRIED_AT_ONCE]:
            self._tried_count += 1
            ticket = DecisionTicket(partial(self._on_journalled, key), self._on_refused)
            submit_rollback(self._journal, slot, key, ticket)

    def _on_journalled(self, key: str, _position: int) -> None:
        self._tried_count -= 1
        del self._slots[key]

    def _on_refused(self, _error: StorageError) -> None:
        self._tried_count -= 1


class HeuristicOutcomes:
    """Outcomes not yet forgotten by a coordinator. Owner: the coordinator."""

    def __init__(self, fs: FileSystem, clock: Clock, journal: Journal) -> None:
        self._fs = fs
        self._clock = clock
        self._journal = journal
        self.by_key: dict[str, KeptOutcome] = {}

    def require_none(self, key: str) -> None:
        """Raise the error for a transaction that an operator has ended."""
        kept = self.by_key.get(key)
        if kept is not None:
            raise outcome_error(key, kept.outcome)

    def keep(self, key: str, outcome: HeuristicOutcome, on_done: OnDone) -> None:
        """Write an outcome; `on_done` gets None and carries it out, or the error."""
        self.by_key[key] = KeptOutcome(outcome, self._clock.wall_ms())

        def written(error: MetaqError | None) -> None:
            if error is not None:
                self.by_key.pop(key, None)
            on_done(error)

        self._write(written)

    def forget(self, key: str, on_done: OnDone) -> None:
        """Forget an outcome; no effect if it is unknown."""
        kept = self.by_key.pop(key, None)
        if kept is None:
            on_done(None)
            return

        def written(error: MetaqError | None) -> None:
            self.by_key |= {} if error is None else {key: kept}
            on_done(error)

        self._write(written)

    def _write(self, on_done: OnDone) -> None:
        outcomes = dict(self.by_key)

        def write() -> None:
            # The prepare must be on disk before the outcome.
            self._journal.sync_now()
            OUTCOMES.write(self._fs, self._journal.directory, outcomes)

        self._journal.call(write, on_done)
