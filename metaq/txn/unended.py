"""Rolled back transactions whose end the journal has no room for.

Replay knows a transaction by its key. Puts that lie in the journal without an end would
count as those of the next transaction of that key: what was rolled back would be
prepared or committed with it. So until the rollback is journalled, in the file of the
puts, the key stays in use. It is tried again for as long as it takes; these count as
open transactions, so their number has that bound.
"""

from functools import partial
from typing import Final

from metaq.errors import StorageError
from metaq.txn.commit_records import VerdictTicket
from metaq.txn.journal import Journal, JournalEntry, Slot
from metaq.txn.records import RedoOperation, encode_operation
from metaq.txn.state import is_xa

TRIED_AT_ONCE: Final = 100
"""Rollbacks tried together: a disk without room refuses them all."""


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
