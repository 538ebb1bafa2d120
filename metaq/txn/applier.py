"""The second half of a commit: its batches go to their partitions.

What is here is decided: its commit record is in the journal. A batch that its partition
refuses is tried again, until it is there or the process ends; the next start finds it
missing then.

A batch lies at the bound of its commit record or behind. Where it is behind, its place
is written into the record just before the batch is written: a Java broker looks for the
batch there and nowhere else, and would append it again otherwise.
"""

from collections.abc import Callable
from functools import partial

from metaq.errors import ClosedError, MetaqError, StorageError
from metaq.model import Offset
from metaq.record.checksum import checksum
from metaq.txn.journal import Journal, join_chunks
from metaq.txn.ports import MessageSink
from metaq.txn.records import BatchPlace
from metaq.txn.state import UNAVAILABLE, XaCommandError
from metaq.txn.transaction import BrokerTransaction, PendingBatch


class Applier:
    """Transactions that are decided and not finished. Owner: the coordinator."""

    def __init__(
        self,
        sink: MessageSink,
        journal: Journal,
        on_applied: Callable[[BrokerTransaction], None],
    ) -> None:
        """Begin without any.

        Args:
            sink: takes the batches.
            journal: forgets what is applied.
            on_applied: told of a transaction whose batches are all stored.
        """
        self._sink = sink
        self._journal = journal
        self._on_applied = on_applied
        self._on_settled: Callable[[], None] | None = None
        self.decided: dict[BrokerTransaction, None] = {}
        """Transactions that are not applied yet, oldest first."""
        self.failed_count = 0
        """Batches that were refused, each time."""

    @property
    def stuck_count(self) -> int:
        """Return how many have a batch that its partition does not take."""
        return sum(tx.stuck is not None for tx in self.decided)

    def plan(self, tx: BrokerTransaction) -> list[BatchPlace]:
        """Return what the commit record says of each batch; sets their bounds.

        Raises:
            StorageError: a partition would not take its batch now.
            ClosedError: the logs are closed.
        """
        places = []
        for batch in tx.batches.values():
            size_bytes = batch.size_bytes
            batch.bound = self._sink.plan_append(batch.log_id, size_bytes)
            batch.place_told = batch.bound
            # Once for all: it is what is appended, too.
            data = join_chunks(batch.chunks)
            batch.chunks = [data]
            places.append(
                BatchPlace(batch.log_id, batch.bound, size_bytes, checksum(data))
            )
        return places

    def apply(self, tx: BrokerTransaction) -> None:
        """Hand to the partitions what they do not have of a decided transaction."""
        self.decided[tx] = None
        if tx.is_doubtful:
            text = "a partition could not be read: a restart sees what it has"
            self._get_stuck(tx, StorageError(text))
            return
        tx.stuck = None
        for batch in list(tx.batches.values()):
            if not batch.is_stored and not batch.is_in_flight:
                self._append(tx, batch)

    def retry(self) -> None:
        """Try again what is stuck."""
        for tx in list(self.decided):
            if tx.stuck is not None:
                self.apply(tx)

    def drop_topic(self, topic: str) -> None:
        """Give up what waits for the partitions of a topic that is deleted."""
        for tx in list(self.decided):
            for batch in tx.batches.values():
                if batch.log_id.topic == topic and not batch.is_in_flight:
                    batch.is_stored = True
            self._finish_if_stored(tx)

    def call_when_settled(self, on_settled: Callable[[], None]) -> None:
        """Call once when no batch is on its way: stored, or refused for now."""
        self._on_settled = on_settled
        self._settle()

    def _append(self, tx: BrokerTransaction, batch: PendingBatch) -> None:
        batch.is_in_flight = True
        try:
            self._sink.append(
                batch.log_id,
                batch.chunks,
                size_bytes=batch.size_bytes,
                record_count=batch.put_count,
                last_id=batch.last_id,
                before_write=partial(self._tell_place, tx, batch),
                ticket=_BatchTicket(
                    partial(self._on_stored, tx, batch),
                    partial(self._on_failed, tx, batch),
                ),
            )
        except (StorageError, ClosedError) as error:
            batch.is_in_flight = False
            self._get_stuck(tx, error)

    def _tell_place(
        self, tx: BrokerTransaction, batch: PendingBatch, offset: Offset
    ) -> None:
        """Bring the commit record in step; on the thread that writes the batch next."""
        if batch.place_at >= 0 and offset != batch.place_told:
            self._journal.write_place(tx.slot, batch.place_at, offset)
            batch.place_told = offset

    def _on_stored(self, tx: BrokerTransaction, batch: PendingBatch) -> None:
        batch.is_in_flight, batch.is_stored = False, True
        self._finish_if_stored(tx)
        self._settle()

    def _finish_if_stored(self, tx: BrokerTransaction) -> None:
        if all(each.is_stored for each in tx.batches.values()):
            self._journal.release(tx.slot)
            del self.decided[tx]
            self._on_applied(tx)

    def _on_failed(
        self, tx: BrokerTransaction, batch: PendingBatch, error: MetaqError
    ) -> None:
        batch.is_in_flight = False
        self._get_stuck(tx, error)
        self._settle()

    def _get_stuck(self, tx: BrokerTransaction, error: MetaqError) -> None:
        self.failed_count += 1
        tx.stuck = error
        text = f"committed, and not in every partition yet: {error}"
        tx.tell(XaCommandError(UNAVAILABLE, text))

    def _settle(self) -> None:
        if self._on_settled is None:
            return
        batches = (batch for tx in self.decided for batch in tx.batches.values())
        if not any(batch.is_in_flight for batch in batches):
            on_settled, self._on_settled = self._on_settled, None
            on_settled()


class _BatchTicket:
    """Tells one of two functions what became of a batch."""

    __slots__ = ("on_failed", "on_stored")

    def __init__(
        self,
        on_stored: Callable[[], None],
        on_failed: Callable[[StorageError], None],
    ) -> None:
        self.on_stored = on_stored
        self.on_failed = on_failed
