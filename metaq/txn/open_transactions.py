"""The unfinished transactions of a broker: by key, by connection, and their limits."""

from metaq.clock import Clock
from metaq.deadlines import Deadlines
from metaq.errors import TransactionError
from metaq.model import TRANSACTION_KEY_BYTES_MAX
from metaq.txn.figures import TransactionCounters, TransactionLimits
from metaq.txn.state import OPEN_STATES, TxState
from metaq.txn.transaction import NO_OWNER, BrokerTransaction


class OpenTransactions:
    """Transactions that are not finished. Owner: the coordinator."""

    def __init__(
        self, clock: Clock, limits: TransactionLimits, counters: TransactionCounters
    ) -> None:
        self._clock = clock
        self._limits = limits
        self._counters = counters
        self._owned: dict[object, dict[BrokerTransaction, None]] = {}
        self.deadlines = Deadlines[BrokerTransaction]()
        self.by_key: dict[str, BrokerTransaction] = {}
        self.held_bytes = 0

    def add(self, tx: BrokerTransaction) -> None:
        """Add a transaction, and count the bytes of its puts."""
        self.by_key[tx.key] = tx
        self.held_bytes += tx.held_bytes
        if tx.owner is not NO_OWNER:
            self._owned.setdefault(tx.owner, {})[tx] = None

    def drop(self, tx: BrokerTransaction) -> None:
        """Forget a finished transaction, and roll back its remaining holds."""
        tx.end_holds(is_committed=False)
        self.deadlines.clear(tx)
        self.held_bytes -= tx.held_bytes
        del self.by_key[tx.key]
        if tx.owner is not NO_OWNER:
            owned = self._owned[tx.owner]
            del owned[tx]
            if not owned:
                del self._owned[tx.owner]

    def disown(self, owner: object) -> list[BrokerTransaction]:
        """Remove the owner of all transactions of a closed connection; return them."""
        owned = list(self._owned.pop(owner, ()))
        for tx in owned:
            tx.owner = NO_OWNER
        return owned

    def prepared(self) -> list[BrokerTransaction]:
        """Return the transactions that wait for a decision."""
        return [tx for tx in self.by_key.values() if tx.state is TxState.PREPARED]

    def untimed(self) -> list[BrokerTransaction]:
        """Return unprepared transactions without a time-out; they may never end."""
        return [
            tx
            for tx in self.by_key.values()
            if tx.state in OPEN_STATES and self.deadlines.get(tx) is None
        ]

    def limit_time(self, tx: BrokerTransaction, timeout_s: int) -> None:
        """Set the deadline of a transaction; 0 or less: none."""
        if timeout_s > 0:
            seconds = min(timeout_s, self._limits.timeout_s_max)
            self.deadlines.set(tx, self._clock.monotonic_s() + seconds)

    def require_begin(self, key: str, timeout_s: int, *, unended_count: int) -> None:
        """Raise TransactionError if one more transaction would exceed a limit."""
        if len(key) > TRANSACTION_KEY_BYTES_MAX:
            self.refuse(
                f"transaction '{key[:80]}...': expected a key of at most"
                f" {TRANSACTION_KEY_BYTES_MAX} characters, got {len(key)}"
            )
        count, limits = len(self.by_key) + unended_count + 1, self._limits
        if count > limits.open_count_max:
            self.refuse(
                f"too many transactions are open: expected at most"
                f" {limits.open_count_max}, got {count}"
            )
        if timeout_s > 0 and len(self.deadlines) >= limits.timed_count_max:
            # MetaQ's text.
            self.refuse(
                f"Timer size {len(self.deadlines) + 1} is great than maxTimerCapacity"
                f" {limits.timed_count_max}"
            )

    def refuse(self, text: str) -> None:
        """Count a refusal because of a limit, and raise it."""
        self._counters.refused += 1
        raise TransactionError(text)
