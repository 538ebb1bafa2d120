"""Verdicts on their way to the journal: commits, and rollbacks without room.

A commit begins with its record; `applier.py` does the rest.

    bounds of all partitions  →  `together` (of several)  →  commit records, synced

Each partition is asked for a bound of the offset to come; one that would refuse stops
the commit here. Several transactions that are committed as one are planned as one, and
all of this is queued in one turn of the loop: a topic that is deleted is deleted before
the first record, or behind the last one.

Replay knows a transaction by its key. Puts that lie in the journal without an end would
count as those of the next transaction of that key: what was rolled back would be
prepared or committed with it. So until the rollback is journalled, in the file of the
puts, the key stays in use. It is tried again for as long as it takes; these count as
open transactions, so their number has that bound.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

from metaq.errors import MetaqError, StorageError
from metaq.fs import FileSystem
from metaq.model import LogId
from metaq.txn.journal import Gate, Journal, JournalEntry, Slot
from metaq.txn.ports import MessageSink
from metaq.txn.records import BatchPlace, RedoOperation, bounds_of, encode_operation
from metaq.txn.side_files import write_together
from metaq.txn.state import is_xa
from metaq.txn.transaction import BrokerTransaction

TRIED_AT_ONCE: Final = 100
"""Rollbacks tried together: a disk without room refuses them all."""


class CommitRecords:
    """Journals commits. Owner: the coordinator."""

    def __init__(self, fs: FileSystem, journal: Journal, sink: MessageSink) -> None:
        """Begin without any.

        Args:
            fs: the disk, for what is committed together.
            journal: takes the records.
            sink: knows the bounds.
        """
        self._fs = fs
        self._journal = journal
        self._sink = sink
        self._groups: list[dict[BrokerTransaction, None]] = []

    def submit(
        self,
        together: Sequence[BrokerTransaction],
        on_settled: Callable[[MetaqError | None], None],
    ) -> None:
        """Journal the commit of transactions: of all or none of them.

        Args:
            together: one or more; several are prepared.
            on_settled: told once when they are committed, or why they are not. Where
                the journal is offline by then, a restart knows.

        Raises:
            StorageError: a partition would not take its batch now; nothing was queued.
            ClosedError: the logs are closed.
        """
        if len(together) == 1:
            (tx,) = together
            self._submit(tx, self._plan(tx), on_settled)
            return
        self._require_room(together)
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
            partial(write_together, self._fs, self._journal.directory, names)
        )
        records = Outcomes(len(together), settled)
        for index, (tx, places) in enumerate(zip(together, plans, strict=True)):
            self._submit(tx, places, partial(records.take, index), gate)

    def join(self, together: Iterable[BrokerTransaction]) -> None:
        """Make transactions a group; those that have ended by now are forgotten."""
        group = dict.fromkeys(together)
        for tx in group:
            tx.group = group
        self._groups = [each for each in self._groups if each] + [group]

    def _require_room(self, together: Iterable[BrokerTransaction]) -> None:
        """Raise where a partition would not take all of its batches in one append."""
        sizes = Counter[LogId]()
        for tx in together:
            for batch in tx.batches.values():
                sizes[batch.log_id] += batch.size_bytes
        for log_id, size_bytes in sizes.items():
            self._sink.plan_append(log_id, size_bytes)

    def _plan(self, tx: BrokerTransaction) -> list[BatchPlace]:
        """Return what the commit record says of each batch; sets their bounds."""
        places = []
        for batch in tx.batches.values():
            size_bytes = batch.size_bytes
            batch.bound = self._sink.plan_append(batch.log_id, size_bytes)
            batch.place_told = batch.bound
            places.append(
                BatchPlace(batch.log_id, batch.bound, size_bytes, batch.seal())
            )
        return places

    def _submit(
        self,
        tx: BrokerTransaction,
        places: Sequence[BatchPlace],
        on_settled: Callable[[StorageError | None], None],
        gate: Gate | None = None,
    ) -> None:
        xa, was_prepared = is_xa(tx.key), tx.was_prepared
        operation = RedoOperation.XA_COMMIT if xa else RedoOperation.LOCAL_COMMIT
        record = encode_operation(
            operation, tx.key, was_prepared=was_prepared, places=places
        )
        bounds = bounds_of(places, len(record))

        def journalled(position: int) -> None:
            for (at, _bound), batch in zip(bounds, tx.batches.values(), strict=True):
                batch.place_at = position + at
            on_settled(None)

        self._journal.submit(
            JournalEntry(
                tx.slot,
                (record,),
                len(record),
                is_verdict=True,
                is_last=False,
                ticket=VerdictTicket(journalled, on_settled),
                # A power cut that takes the record and leaves batches would leave a
                # half, or, of what stays prepared, a second time. One message alone is
                # neither.
                is_ahead=was_prepared or tx.put_count > 1,
                bounds=bounds,
                gate=gate,
            )
        )


class VerdictTicket:
    """Tells one of two functions what became of a verdict."""

    __slots__ = ("on_journalled", "on_refused")

    def __init__(
        self,
        on_journalled: Callable[[int], None],
        on_refused: Callable[[StorageError], None],
    ) -> None:
        self.on_journalled = on_journalled
        self.on_refused = on_refused


class Outcomes:
    """Collects what becomes of several things; tells it once, when all is known."""

    def __init__(
        self, count: int, on_done: Callable[[Sequence[MetaqError | None]], None]
    ) -> None:
        """Wait for `count` outcomes, 1 or more."""
        self._outcomes: list[MetaqError | None] = [None] * count
        self._missing = count
        self._on_done = on_done

    def take(self, index: int, error: MetaqError | None) -> None:
        """Take the outcome of one of them; once for each."""
        self._outcomes[index] = error
        self._missing -= 1
        if not self._missing:
            self._on_done(self._outcomes)


class UnendedTransactions:
    """Rollbacks that are to be journalled. Owner: the coordinator."""

    def __init__(self, journal: Journal) -> None:
        """Begin without any."""
        self._journal = journal
        self._slots: dict[str, Slot] = {}
        self._tried_count = 0

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: str) -> bool:
        return key in self._slots

    def add(self, key: str, slot: Slot) -> None:
        """Take over a transaction that is gone for everything but the journal.

        Args:
            key: its key.
            slot: its place in the journal, which takes no entry any more.
        """
        if slot.file is not None:
            # An entry may be missing in the old one, which takes no other then.
            self._slots[key] = Slot()
            self._slots[key].file = slot.file

    def retry(self) -> None:
        """Try what waits, unless that is under way."""
        if self._tried_count:
            return
        for key, slot in list(self._slots.items())[:TRIED_AT_ONCE]:
            self._tried_count += 1
            self._submit(key, slot)

    def _submit(self, key: str, slot: Slot) -> None:
        xa = is_xa(key)
        operation = RedoOperation.XA_ROLLBACK if xa else RedoOperation.LOCAL_ROLLBACK
        data = encode_operation(operation, key)
        ticket = VerdictTicket(partial(self._on_journalled, key), self._on_refused)
        self._journal.submit(
            JournalEntry(slot, (data,), len(data), True, is_last=True, ticket=ticket)
        )

    def _on_journalled(self, key: str, _position: int) -> None:
        self._tried_count -= 1
        del self._slots[key]

    def _on_refused(self, _error: StorageError) -> None:
        self._tried_count -= 1
