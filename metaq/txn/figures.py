"""Figures of the coordinator: its limits, its counters, and its snapshots."""

from dataclasses import asdict, dataclass

from metaq.stats import (
    HistogramSnapshot,
    MetricKind,
    MetricSpec,
    counter,
    gauge,
    histogram,
    part,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionLimits:
    """Limits of a coordinator."""

    open_count_max: int
    held_bytes_max: int
    timed_count_max: int
    timeout_s_max: int
    """Maximum time-out; a longer one is reduced to it."""
    journal_bytes_max: int
    """Size of the journal above which new puts are refused."""


@dataclass(slots=True)
class TransactionCounters:
    """Counts of events since the start; they only grow."""

    begun_local: int = 0
    begun_xa: int = 0
    prepared: int = 0
    committed: int = 0
    """Commits answered with success, including those without puts."""
    rolled_back: int = 0
    """Rollbacks, including those by time-out and by a lost connection."""
    timed_out: int = 0
    abandoned: int = 0
    """Local transactions rolled back because their connection ended."""
    refused: int = 0
    """Commands and puts refused because of a limit."""
    failed: int = 0
    """Decisions that the journal or a partition refused."""
    put_count: int = 0


@dataclass(frozen=True, slots=True)
class TransactionView:
    """One transaction, for operators."""

    key: str
    state: str
    """A value of `TxState`, or "heuristic " and the outcome."""
    put_count: int
    size_bytes: int
    partitions: tuple[str, ...]
    age_ms: int
    """Time since its begin, or since its first put if before a restart."""
    prepared_age_ms: int | None
    """Time since it was prepared, as far as known; None: it is not prepared."""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionFigures:
    """A snapshot for statistics."""

    counters: TransactionCounters = part(
        MetricSpec(
            MetricKind.COUNTER,
            "metaq_transaction_events_total",
            "What happened to transactions: begun, prepared, committed, rolled back...",
            labels=("event",),
            read=asdict,
        )
    )
    open_count: int = gauge(
        "metaq_transactions_open", "Transactions that are not finished."
    )
    in_doubt_count: int = gauge(
        "metaq_transactions_in_doubt",
        "Transactions that are prepared and wait for their decision.",
    )
    oldest_in_doubt_ms: int = gauge(
        "metaq_transactions_oldest_in_doubt_seconds",
        "Age of the oldest prepared transaction, 0 without one.",
        read=lambda age_ms: age_ms / 1000,
    )
    untimed_count: int = gauge(
        "metaq_transactions_untimed",
        "Transactions without a time-out that are not prepared.",
    )
    oldest_untimed_ms: int = gauge(
        "metaq_transactions_oldest_untimed_seconds",
        "Age of the oldest such transaction, 0 without one.",
        read=lambda age_ms: age_ms / 1000,
    )
    stuck_count: int = gauge(
        "metaq_transactions_stuck",
        "Committed transactions with a batch that its partition does not take.",
    )
    outcome_count: int = gauge(
        "metaq_transactions_heuristic_outcomes",
        "Outcomes by command that no coordinator has forgotten.",
    )
    held_bytes: int = gauge(
        "metaq_transactions_held_bytes",
        "Bytes that the puts of open transactions hold.",
    )
    journal_bytes: int = gauge(
        "metaq_transaction_journal_bytes", "Size of the transaction journal."
    )
    journal_sync_count: int = counter(
        "metaq_transaction_journal_syncs_total", "Syncs of the transaction journal."
    )
    sync_latency: HistogramSnapshot = histogram(
        "metaq_transaction_journal_sync_latency_seconds",
        "Time that one sync of the transaction journal took.",
    )
    offline_cause: str | None = gauge(
        "metaq_transaction_journal_online",
        "1 while transactions are served, 0 after an error, damage, or without space.",
        default=None,
        read=lambda cause: cause is None,
    )
    """Reason why transactions are refused, until a restart or until there is space."""
    is_silent: bool = False
    """Whether the journal's disk hangs and does not answer."""
    notes: tuple[str, ...] = ()
    """Findings of the start, one sentence each."""
    is_unread: bool = False
    """Whether the start could not read the journal, so that commits are unknown."""
