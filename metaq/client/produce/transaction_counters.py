"""The counters of a producer's transactions, and what they are called outside."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from metaq.client.errors import TransactionInDoubtError, TransactionRolledBackError
from metaq.stats import Histogram, HistogramSnapshot, counter, histogram


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionStatistics:
    """A snapshot of the counters of transactions, local and XA together."""

    begun_count: int = counter(
        "metaq_producer_transactions_begun_total", "Transactions begun."
    )
    prepared_count: int = counter(
        "metaq_producer_transactions_prepared_total",
        "XA transactions that every broker of theirs promised to keep.",
    )
    committed_count: int = counter(
        "metaq_producer_transactions_committed_total",
        "Transactions begun and committed, those without messages too.",
    )
    rolled_back_count: int = counter(
        "metaq_producer_transactions_rolled_back_total",
        "Transactions begun and rolled back, by the program or by a failure.",
    )
    in_doubt_count: int = counter(
        "metaq_producer_transactions_in_doubt_total",
        "Verdicts whose outcome was not known when their call ended.",
    )
    recovered_count: int = counter(
        "metaq_producer_transactions_recovered_total",
        "XA transactions that had been begun elsewhere, and were ended here.",
    )
    commit_s: HistogramSnapshot = histogram(
        "metaq_producer_transaction_commit_seconds",
        "Time from a commit to the answer that it was carried out.",
    )


class ClientTransactionCounters:
    """The counters of one producer's transactions; used on its loop."""

    def __init__(self) -> None:
        """Start at nothing."""
        self.begun_count = 0
        """Transactions begun."""
        self.prepared_count = 0
        """Promised by all of their brokers."""
        self.rolled_back_count = 0
        """Rolled back by the program; `failing` counts the others."""
        self.recovered_count = 0
        """Begun elsewhere, ended here."""
        self._in_doubt_count = 0
        self._commit_s = Histogram()

    def on_committed(self, passed_s: float) -> None:
        """Count a commit that took so many seconds."""
        self._commit_s.record(passed_s)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Count how the verdict inside the block goes wrong, if it does."""
        try:
            yield
        except TransactionRolledBackError:
            self.rolled_back_count += 1
            raise
        except (TransactionInDoubtError, asyncio.CancelledError):
            self._in_doubt_count += 1
            raise

    def snapshot(self) -> TransactionStatistics:
        """Return what was counted so far."""
        commit_s = self._commit_s.snapshot()
        return TransactionStatistics(
            begun_count=self.begun_count,
            prepared_count=self.prepared_count,
            committed_count=commit_s.count,
            rolled_back_count=self.rolled_back_count,
            in_doubt_count=self._in_doubt_count,
            recovered_count=self.recovered_count,
            commit_s=commit_s,
        )
