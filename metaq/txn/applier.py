"""The second half of a commit: appending its batches to their partitions.

All transactions here are decided: their commit records are in the journal. A batch that
its partition refuses is retried until it is stored or the process ends; then the next
start finds it missing.

Transactions that are committed together (`side_files.py`) give a partition one append,
so that readers see the batches of all of them at the same moment.

A batch is at the bound in its commit record or after it. If it is after it, its offset
is written into the record just before the batch is written, because a Java broker looks
for the batch only there, and would otherwise append it again.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

from metaq.errors import ClosedError, MetaqError, StorageError
from metaq.model import LogId, Offset
from metaq.txn.journal import Journal
from metaq.txn.ports import FindLog
from metaq.txn.state import UNAVAILABLE, XaCommandError
from metaq.txn.transaction import BrokerTransaction, PendingBatch

_Joined: TypeAlias = Sequence[tuple[BrokerTransaction, PendingBatch]]
"""Batches in one append to one partition, in their order there."""


class _BatchTicket(NamedTuple):
    """Calls one of two functions with the outcome of a batch."""

    on_stored: Callable[[], None]
    on_failed: Callable[[StorageError], None]


class Applier:
    """Transactions that are decided and not finished. Owner: the coordinator.

    `on_applied` is called with each transaction whose batches are all stored.
    """

    def __init__(
        self,
        find_log: FindLog,
        journal: Journal,
        on_applied: Callable[[BrokerTransaction], None],
    ) -> None:
        self._find_log = find_log
        self._journal = journal
        self._on_applied = on_applied
        self._on_settled: Callable[[], None] | None = None
        self.decided: dict[BrokerTransaction, None] = {}
        """Transactions not applied yet, oldest first."""
        self.failed_count = 0
        """Number of refusals of batches, retries included."""

    @property
    def stuck_count(self) -> int:
        """Return the number of transactions with a batch that was refused."""
        return sum(tx.stuck is not None for tx in self.decided)

    def apply(self, tx: BrokerTransaction) -> None:
        """Append the missing batches of a decided transaction to their partitions.

        Includes those of the transactions that are committed together with it.
        """
        together = tx.group or {tx: None}
        self.decided.update(together)
        if any(each.is_unverified for each in together):
            text = "a partition could not be read: a restart checks what it has"
            for each in together:
                self._get_stuck(each, StorageError(text))
            return
        waiting: dict[LogId, list[tuple[BrokerTransaction, PendingBatch]]] = {}
        for each in together:
            each.stuck = None
            for batch in each.batches.values():
                if not batch.is_stored and not batch.is_in_flight:
                    waiting.setdefault(batch.log_id, []).append((each, batch))
        for log_id, joined in waiting.items():
            # Cut ones first: the rest of an append cut by a crash must come next.
            joined.sort(key=lambda each: not each[1].is_cut)
            self._append(log_id, joined)

    def apply_all(self, decided: Iterable[BrokerTransaction]) -> None:
        """Apply transactions in order, each group of committed together once."""
        tried = set[BrokerTransaction]()
        for tx in decided:
            if tx not in tried:
                tried.update(tx.group or (tx,))
                self.apply(tx)

    def retry(self) -> None:
        """Retry stuck batches."""
        self.apply_all([tx for tx in self.decided if tx.stuck is not None])

    def drop_topic(self, topic: str) -> None:
        """Drop batches that wait for the partitions of a deleted topic."""
        for tx in list(self.decided):
            for batch in tx.batches.values():
                if batch.log_id.topic == topic and not batch.is_in_flight:
                    batch.is_stored = True
            self._finish_if_stored(tx)

    def call_when_settled(self, on_settled: Callable[[], None]) -> None:
        """Call back once, when no batch is in flight: all are stored or refused."""
        self._on_settled = on_settled
        self._settle()

    def _append(self, log_id: LogId, joined: _Joined) -> None:
        for _tx, batch in joined:
            batch.is_in_flight = True
        try:
            self._find_log(log_id).append(
                [chunk for _tx, batch in joined for chunk in batch.chunks],
                size_bytes=sum([batch.size_bytes for _tx, batch in joined]),
                record_count=sum([batch.put_count for _tx, batch in joined]),
                last_id=max([batch.last_id for _tx, batch in joined]),
                before_write=partial(self._note_offsets, joined),
                completes=joined[0][1].is_cut,
                ticket=_BatchTicket(
                    partial(self._on_stored, joined), partial(self._on_failed, joined)
                ),
            )
        except (StorageError, ClosedError) as error:
            self._refuse(joined, error)

    def _note_offsets(
        self, joined: _Joined, offset: Offset
    ) -> Sequence[Callable[[], None]]:
        """Note offsets in commit records; on the thread that writes the batches."""
        tasks: list[Callable[[], None]] = []
        for tx, batch in joined:
            if batch.offset_at >= 0 and offset != batch.offset_written:
                batch.offset_written = offset
                tasks += self._journal.note_offset(tx.slot, batch.offset_at, offset)
            offset = Offset(offset + batch.size_bytes)
        return tasks

    def _on_stored(self, joined: _Joined) -> None:
        for _tx, batch in joined:
            batch.is_in_flight, batch.is_stored = False, True
        for tx, _batch in joined:
            self._finish_if_stored(tx)
        self._settle()

    def _finish_if_stored(self, tx: BrokerTransaction) -> None:
        if all(each.is_stored for each in tx.batches.values()):
            self._journal.release(tx.slot)
            del self.decided[tx]
            tx.leave_group()
            self._on_applied(tx)

    def _on_failed(self, joined: _Joined, error: MetaqError) -> None:
        self._refuse(joined, error)
        self._settle()

    def _refuse(self, joined: _Joined, error: MetaqError) -> None:
        for tx, batch in joined:
            batch.is_in_flight = False
            self._get_stuck(tx, error)

    def _get_stuck(self, tx: BrokerTransaction, error: MetaqError) -> None:
        self.failed_count += 1
        tx.stuck = error
        text = f"committed, and not in every partition yet: {error}"
        tx.answer(XaCommandError(UNAVAILABLE, text))

    def _settle(self) -> None:
        if self._on_settled is None:
            return
        batches = (batch for tx in self.decided for batch in tx.batches.values())
        if not any(batch.is_in_flight for batch in batches):
            on_settled, self._on_settled = self._on_settled, None
            on_settled()
