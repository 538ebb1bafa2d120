"""The coordinator: all unfinished transactions of a broker, and how they end.

Theory of operation. Everything here happens on the loop's thread; work that waits for a
disk returns as a callback. A transaction is a row of the state table (`state.py`), one
list of future records for each partition, and a slot in the journal.

    put       records are kept, a run of them is journalled, then it is answered
    prepare   one record, synced as the mode requires, then it is answered
    commit    1. each partition returns a lower bound for its offset (a refusal here
                 rolls back, or leaves the transaction prepared)
              2. the commit record with these bounds: from here on it *is* committed
              3. one batch to each partition; a batch that is refused is retried
              4. when all are stored as their partitions promise, it is answered

Several prepared ones can be committed as one: `side_files.py` describes how a start
recognises that, and step 3 gives each partition one append for all of them. A time-out,
a heuristic outcome or another command for one of them takes effect before step 1, or
waits for the end.

So a reader never sees one partition's part of a transaction that a crash could take
back, because only committed batches are appended. A client whose batch could not be
appended yet may ask again, and is answered when it is appended.

A transaction takes puts only from the connection that began it, its *owner*, and is
begun once: two users of one key would mix their messages. A local one ends with its
connection; any connection may decide an XA one. A time-out ends only unprepared ones.

Limits: open transactions, bytes of their puts, transactions with a time-out, bytes of
the journal; requests that would exceed one are refused, and counted.
Source: docs/metaq-1.4/broker.md 5.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final

from metaq.clock import Clock
from metaq.errors import (
    ClosedError,
    MetaqError,
    NoSpaceError,
    StorageError,
    TransactionError,
)
from metaq.fs import FileSystem
from metaq.model import LogId
from metaq.record.layout import HEADER_BYTES
from metaq.txn.applier import Applier
from metaq.txn.decisions import (
    CommitRecords,
    DecisionTicket,
    HeuristicOutcomes,
    Outcomes,
    UnendedTransactions,
    submit_rollback,
)
from metaq.txn.figures import (
    TransactionCounters,
    TransactionFigures,
    TransactionLimits,
    TransactionView,
)
from metaq.txn.journal import Journal, JournalEntry, JournalTicket
from metaq.txn.open_transactions import OpenTransactions
from metaq.txn.opening import OpenedJournal, tidy
from metaq.txn.ports import FindLog
from metaq.txn.records import RedoOperation, encode_operation
from metaq.txn.state import (
    OPEN_STATES,
    ROLLED_BACK,
    STORE_FAILED,
    UNAVAILABLE,
    UNKNOWN,
    HeuristicOutcome,
    TxEvent,
    TxState,
    XaCommandError,
    advance,
    in_use,
    is_xa,
    not_started,
    outcome_error,
    qualifier_of,
)
from metaq.txn.transaction import (
    NO_OWNER,
    PUT_OVERHEAD_BYTES,
    BrokerTransaction,
    OnDone,
    PutRun,
    restore_transaction,
    view_transactions,
)

VOTE_COMMIT: Final = 0
"""XA_OK: a prepared transaction waits for its decision."""
VOTE_READ_ONLY: Final = 3
"""XA_RDONLY: there was nothing to prepare; the transaction is finished."""

_log = logging.getLogger(__name__)


class TransactionCoordinator:
    """All transactions of one broker. Owner: the app; used on the loop's thread."""

    def __init__(
        self,
        fs: FileSystem,
        clock: Clock,
        journal: Journal,
        find_log: FindLog,
        limits: TransactionLimits,
    ) -> None:
        """Create a coordinator without transactions; call `restore` or `disable` next.

        The journal must be open, with its thread running, before the first command.
        """
        self._fs = fs
        self._clock = clock
        self._journal = journal
        self._limits = limits
        self.counters = TransactionCounters()
        self._open = OpenTransactions(clock, limits, self.counters)
        self._outcomes = HeuristicOutcomes(fs, clock, journal)
        self._records = CommitRecords(fs, journal, find_log)
        self._applier = Applier(find_log, journal, self._on_applied)
        self._unended = UnendedTransactions(journal)
        self._disabled: StorageError | TransactionError | None = None
        self._notes: tuple[str, ...] = ()
        self._is_closed = False

    # -- the start and the end

    def disable(self, cause: StorageError | TransactionError) -> None:
        """Refuse everything until `restore`, which may follow only a NoSpaceError.

        A TransactionError is the answer to all requests: this broker never takes any.
        """
        self._disabled = cause

    def restore(self, opened: OpenedJournal, on_settled: Callable[[], None]) -> None:
        """Adopt the content of the journal, and append committed batches.

        `on_settled` is called once, when committed batches are in their partitions or
        were refused for now.
        """
        self._disabled = None
        self._outcomes.by_key.update(opened.outcomes)
        self._notes = opened.notes
        for restored in opened.transactions:
            self._open.add(restore_transaction(restored, self._clock.wall_ms()))
        for keys in opened.together:
            self._records.join([self._open.by_key[key] for key in keys])
        # Cut ones first: the rest of an append that a crash has cut must come next.
        decided = [
            tx for tx in self._open.by_key.values() if tx.state is TxState.DECIDED
        ]
        self._applier.apply_all(sorted(decided, key=lambda tx: not tx.is_cut))
        # Retry those that were refused because the rest of another had to come first.
        self._applier.retry()
        self._applier.call_when_settled(on_settled)

    def close(self, on_closed: Callable[[], None]) -> None:
        """End undecided transactions, and close the journal after commits in progress.

        `on_closed` is called on the loop's thread when the journal's files are closed.
        """
        self._is_closed = True
        if self._disabled is not None:
            on_closed()
            return

        def close_journal() -> None:
            finish = None
            # Commits that are not applied exist only in the journal.
            if not self._applier.decided:
                finish = partial(
                    tidy, self._fs, self._journal, has_prepared=bool(self._open.by_key)
                )
            self._journal.close(finish, on_closed)

        def written(_error: StorageError | None) -> None:
            self._applier.call_when_settled(close_journal)

        # After everything queued, so that no commit is on its way to the journal.
        self._journal.call(lambda: None, written)

    # -- what clients ask

    def begin(
        self, key: str, owner: object, timeout_s: int, session_id: str = ""
    ) -> None:
        """Begin a transaction; no effect if its owner has begun it already.

        Args:
            key: key of the transaction.
            owner: the connection.
            timeout_s: seconds after which it is rolled back; 0 or less: never.
            session_id: name of a producer; a connection may have several.

        Raises:
            TransactionError: the key is in use, a limit is reached, or the journal is
                offline.
        """
        self._require_journal()
        self._outcomes.require_none(key)
        found = self._get(key)
        if found is not None:
            is_same = (found.owner, found.session_id) == (owner, session_id)
            if not is_same or found.state not in OPEN_STATES:
                raise in_use(key, found.state)
            return
        if key in self._unended:
            raise in_use(key, TxState.ROLLING_BACK)
        self._open.require_begin(key, timeout_s, unended_count=len(self._unended))
        tx = BrokerTransaction(key, owner, self._clock.wall_ms(), session_id)
        self._open.add(tx)
        self._open.limit_time(tx, timeout_s)
        self.counters.begun_xa += is_xa(key)
        self.counters.begun_local += not is_xa(key)

    def find_for_put(self, key: str, owner: object) -> BrokerTransaction:
        """Return a transaction that accepts puts.

        Raises:
            TransactionError: it is unknown, or accepts none.
        """
        self._require_journal()
        tx = self._find(key, owner)
        advance(key, tx.state, TxEvent.PUT)
        if tx.owner is not owner:
            raise TransactionError(f"XA transaction '{key}' is open elsewhere.")
        return tx

    def check_room(self, put_count: int, payload_bytes: int) -> None:
        """Raise TransactionError if so many puts would exceed a limit."""
        after = self._open.held_bytes + payload_bytes + PUT_OVERHEAD_BYTES * put_count
        limits, journal_bytes = self._limits, self._journal.figures.size_bytes
        if after > limits.held_bytes_max:
            self._open.refuse(
                f"open transactions hold too much: expected at most"
                f" {limits.held_bytes_max} bytes, got {after}"
            )
        if journal_bytes > limits.journal_bytes_max:
            self._open.refuse(
                f"the transaction journal is full: expected at most"
                f" {limits.journal_bytes_max} bytes, got {journal_bytes}"
            )

    def put(self, tx: BrokerTransaction, puts: PutRun, ticket: JournalTicket) -> None:
        """Add puts to one partition, and journal them; never blocks.

        Args:
            tx: result of `find_for_put`, in the same turn of the loop.
            puts: one or more puts.
            ticket: called when they are journalled.
        """
        tx.state = TxState.IN_USE
        tx.add(puts)
        count = puts.record_count
        self.counters.put_count += count
        payload_bytes = puts.size_bytes - HEADER_BYTES * count
        held_bytes = payload_bytes + PUT_OVERHEAD_BYTES * count
        tx.held_bytes += held_bytes
        self._open.held_bytes += held_bytes
        self._journal.submit(JournalEntry(tx.slot, puts.journalled, ticket))

    def prepare(
        self,
        key: str,
        owner: object,
        on_voted: Callable[[int], None],
        on_failed: OnDone,
    ) -> None:
        """Prepare an XA transaction for a connection.

        `on_voted` is called with the vote, at once or when the prepare is journalled;
        or `on_failed` with the reason for a rollback.

        Raises:
            TransactionError: it is unknown, or cannot be prepared now.
        """
        self._require_journal()
        tx = self._find(key, owner)
        tx.state = advance(key, tx.state, TxEvent.PREPARE)
        if tx.state is TxState.FINISHED:
            self._open.drop(tx)
            on_voted(VOTE_READ_ONLY)
            return

        def journalled(_position: int) -> None:
            tx.state = advance(key, tx.state, TxEvent.JOURNALLED)
            tx.was_prepared = True
            tx.prepared_ms = self._clock.wall_ms()
            self.counters.prepared += 1
            on_voted(VOTE_COMMIT)

        def refused(error: StorageError) -> None:
            tx.state = advance(key, tx.state, TxEvent.REFUSED)
            self._forget_refused(tx)
            on_failed(self._rolled_back(tx, error))

        self._open.deadlines.clear(tx)
        with suppress(NoSpaceError):
            # Here, because many may be committed in one turn of the loop later.
            for batch in tx.batches.values():
                batch.seal()
        data = encode_operation(RedoOperation.XA_PREPARE, key)
        ticket = DecisionTicket(journalled, refused)
        self._journal.submit(JournalEntry(tx.slot, (data,), ticket, is_decision=True))

    def commit(
        self, key: str, owner: object, on_done: OnDone, *, is_two_phase: bool
    ) -> None:
        """Commit a transaction for a connection.

        Args:
            key: key of the transaction.
            owner: the connection.
            on_done: called with None when its batches are stored, or with the error.
            is_two_phase: whether an XA transaction must be prepared.

        Raises:
            TransactionError: it is unknown, or cannot be committed now.
        """
        self._require_journal()
        event = TxEvent.COMMIT_TWO_PHASE if is_two_phase else TxEvent.COMMIT_ONE_PHASE
        tx = self._ask_commit(key, owner, event, on_done)
        if tx is not None:
            self._begin_commit(tx)

    def commit_together(
        self,
        keys: Sequence[str],
        on_done: Callable[[Sequence[MetaqError | None]], None],
    ) -> None:
        """Commit prepared XA transactions; a partition gets all batches in one append.

        A transaction that cannot be committed does not affect the others.

        Args:
            keys: one or more.
            on_done: called when all outcomes are known, with the result of `commit` for
                each, in the order of the keys.

        Raises:
            TransactionError: the journal is offline.
        """
        self._require_journal()
        outcomes, begun = Outcomes(len(keys), on_done), list[BrokerTransaction]()
        for index, key in enumerate(keys):
            take = partial(outcomes.take, index)
            try:
                tx = self._ask_commit(key, NO_OWNER, TxEvent.COMMIT_TWO_PHASE, take)
            except TransactionError as error:
                # 50,000 tracebacks would keep the garbage collector busy.
                take(error.with_traceback(None))
            else:
                begun += [] if tx is None else [tx]
        if begun:
            self._begin_commit(*begun)

    def rollback(self, key: str, owner: object, on_done: OnDone) -> None:
        """Roll a transaction back; `on_done` is called when that is journalled.

        Raises:
            TransactionError: it is unknown, or committed.
        """
        self._require_journal()
        tx = self._find(key, owner)
        tx.state = advance(key, tx.state, TxEvent.ROLLBACK)
        self._roll_back(tx, on_done)

    def forget(self, key: str, on_done: OnDone) -> None:
        """Forget a heuristic outcome; no effect if it is unknown.

        Raises:
            TransactionError: the key is not that of an XA transaction.
        """
        if not is_xa(key):
            raise XaCommandError(UNKNOWN, f"{key} is not a valid xid")
        self._require_journal()
        if key in self._open.by_key and key in self._outcomes.by_key:
            raise XaCommandError(
                UNAVAILABLE, f"the outcome of '{key}' is not carried out yet"
            )
        self._outcomes.forget(key, on_done)

    def recover(self, qualifier: str | None) -> list[str]:
        """Return the keys of prepared transactions, and of heuristic outcomes.

        Args:
            qualifier: that of the transaction manager that asks; None: all.

        Raises:
            TransactionError: the journal is offline.
        """
        self._require_journal()
        waiting = {TxState.PREPARED, TxState.DECIDED}
        keys = [
            key
            for key, tx in self._open.by_key.items()
            if is_xa(key) and tx.state in waiting
        ]
        keys += [key for key in self._outcomes.by_key if key not in self._open.by_key]
        return [
            key for key in keys if qualifier is None or qualifier_of(key) == qualifier
        ]

    def end_owner(self, owner: object) -> None:
        """Roll back the local transactions of a closed connection."""
        for tx in self._open.disown(owner):
            if tx.state in OPEN_STATES and not is_xa(tx.key):
                self.counters.abandoned += 1
                tx.state = TxState.FINISHED
                self._roll_back(tx, lambda _error: None)

    # -- what operators ask

    def decide(self, key: str, outcome: HeuristicOutcome, on_done: OnDone) -> None:
        """End a prepared transaction without its transaction manager.

        An unprepared one can only be rolled back, and that outcome is not kept.

        Args:
            key: key of an XA transaction.
            outcome: the decision.
            on_done: called with None when it is carried out, or with the error.

        Raises:
            TransactionError: it is not prepared, or has ended otherwise.
        """
        self._require_journal()
        tx, kept = self._get(key), self._outcomes.by_key.get(key)
        if kept is not None and (tx is None or kept.outcome is not outcome):
            raise outcome_error(key, kept.outcome)
        if tx is None:
            raise not_started(key)
        if tx.state in OPEN_STATES and outcome is HeuristicOutcome.ROLLBACK:
            tx.state = advance(key, tx.state, TxEvent.ROLLBACK)
            self._roll_back(tx, on_done)
            return
        if tx.state is not TxState.PREPARED:
            raise TransactionError(
                f"transaction '{key}' is not prepared: {tx.state.value}"
            )

        def carry_out(error: MetaqError | None) -> None:
            if error is not None:
                on_done(error)
            elif outcome is HeuristicOutcome.COMMIT:
                tx.waiters.append(on_done)
                tx.state = advance(key, tx.state, TxEvent.COMMIT_TWO_PHASE)
                self._begin_commit(tx)
            else:
                tx.state = advance(key, tx.state, TxEvent.ROLLBACK)
                self._roll_back(tx, on_done)

        self._outcomes.keep(key, outcome, carry_out)

    def views(self) -> list[TransactionView]:
        """Return unfinished transactions and outcomes; raises as `recover`."""
        self._require_journal()
        now_ms = self._clock.wall_ms()
        return view_transactions(self._open.by_key, self._outcomes.by_key, now_ms)

    def figures(self) -> TransactionFigures:
        """Return a snapshot."""
        now_ms = self._clock.wall_ms()
        prepared = [tx.prepared_ms or tx.began_ms for tx in self._open.prepared()]
        untimed = [tx.began_ms for tx in self._open.untimed()]
        journal = self._journal.figures
        cause = self._disabled or self._journal.offline_cause
        return TransactionFigures(
            counters=replace(
                self.counters, failed=self.counters.failed + self._applier.failed_count
            ),
            open_count=len(self._open.by_key),
            in_doubt_count=len(prepared),
            stuck_count=self._applier.stuck_count,
            outcome_count=len(self._outcomes.by_key),
            held_bytes=self._open.held_bytes,
            journal_bytes=journal.size_bytes,
            journal_sync_count=journal.sync_count,
            oldest_in_doubt_ms=max(0, now_ms - min(prepared, default=now_ms)),
            untimed_count=len(untimed),
            oldest_untimed_ms=max(0, now_ms - min(untimed, default=now_ms)),
            sync_latency=self._journal.sync_latency.snapshot(),
            offline_cause=None if cause is None else str(cause),
            is_silent=self._journal.watch.is_silent,
            notes=self._notes,
            is_unread=self._disabled is not None
            and not isinstance(self._disabled, NoSpaceError),
        )

    def require_ended(self, log_id: LogId) -> None:
        """Raise StorageError if a commit may still append to a partition."""
        if isinstance(self._disabled, NoSpaceError):
            raise self._disabled  # `restore` will follow
        for tx in self._open.by_key.values():
            is_ending = tx.state in {TxState.COMMITTING, TxState.DECIDED}
            if is_ending and log_id in tx.batches:
                raise StorageError(f"'{tx.key}' is being committed to {log_id}")

    # -- deletions of topics

    def note_deletion(self, topic: str, on_done: OnDone) -> None:
        """Prevent a start from restoring earlier commits for a topic.

        Args:
            topic: not served any more; its data still exists.
            on_done: called with None when its data may be deleted, or with the error.
        """
        try:
            self._require_journal()
        except TransactionError as error:
            on_done(error)
            return
        self._journal.note_deletion(topic, on_done)

    def drop_topic(self, topic: str) -> None:
        """Drop committed batches that wait for a topic whose data is deleted."""
        self._applier.drop_topic(topic)

    # -- called periodically

    def tick(self) -> None:
        """Roll back expired transactions, retry stuck ones; called twice a second."""
        if self._disabled is None and not self._is_closed:
            self._journal.tick()
        for tx in self._open.deadlines.take_due(self._clock.monotonic_s()):
            self._expire(tx)
        self._applier.retry()
        self._unended.retry()

    def sync_due(self) -> None:
        """Sync the journal if its mode is once a second."""
        if self._disabled is None and not self._is_closed:
            self._journal.sync_due()

    def checkpoint(self) -> None:
        """Write a checkpoint: the position where replay would begin."""
        if self._disabled is None and not self._is_closed:
            slots = [tx.slot for tx in self._open.by_key.values() if tx.put_count]
            if slots:
                self._journal.checkpoint(slots)

    # -- decisions

    def _ask_commit(
        self, key: str, owner: object, event: TxEvent, on_done: OnDone
    ) -> BrokerTransaction | None:
        """Register a waiter for a commit; return the transaction if it must begin."""
        tx = self._find(key, owner)
        before = tx.state
        tx.state = advance(key, before, event)
        if tx.state is TxState.FINISHED:
            self._open.drop(tx)
            self.counters.committed += 1
            on_done(None)
            return None
        tx.waiters.append(on_done)
        if before is TxState.DECIDED:
            self._applier.apply(tx)
        return None if before in {TxState.COMMITTING, TxState.DECIDED} else tx

    def _begin_commit(self, *together: BrokerTransaction) -> None:
        """Journal the commit of transactions, as one decision."""

        def settled(error: MetaqError | None) -> None:
            for tx in together:
                if error is None:
                    tx.state = advance(tx.key, tx.state, TxEvent.JOURNALLED)
                    tx.end_holds(is_committed=True)
                else:
                    self._fail_commit(tx, error, is_journalled=True)
            if error is None:
                self._applier.apply(together[0])

        for tx in together:
            self._open.deadlines.clear(tx)
        try:
            for hold in [hold for tx in together for hold in tx.holds]:
                hold.require_kept()
            self._records.submit(together, settled)
        except (StorageError, ClosedError) as error:
            for tx in together:
                self._fail_commit(tx, error, is_journalled=False)

    def _fail_commit(
        self, tx: BrokerTransaction, error: MetaqError, *, is_journalled: bool
    ) -> None:
        """Leave a transaction prepared, or roll it back, after a refused commit."""
        self.counters.failed += 1
        tx.state = advance(
            tx.key, tx.state, TxEvent.REFUSED, was_prepared=tx.was_prepared
        )
        if tx.state is TxState.PREPARED:
            state = "still prepared"
            if self._journal.offline_cause is not None:
                state = "the outcome is known after a restart"
            tx.answer(XaCommandError(UNAVAILABLE, f"{state}: {error}"))
            return
        if is_journalled:
            if self._journal.offline_cause is not None:
                tx.holds.clear()  # unchanged: a restart will know the outcome
            self._forget_refused(tx)
            tx.answer(self._rolled_back(tx, error))
        else:
            failure = self._rolled_back(tx, error)
            self._roll_back(tx, lambda _error: tx.answer(failure))

    def _rolled_back(self, tx: BrokerTransaction, error: MetaqError) -> MetaqError:
        """Return the answer for a refused prepare or commit."""
        _log.warning("transaction not committed: key=%s error=%s", tx.key, error)
        if self._journal.offline_cause is not None:
            return XaCommandError(
                UNAVAILABLE, f"the outcome is known after a restart: {error}"
            )
        failure = XaCommandError(ROLLED_BACK, STORE_FAILED)
        failure.__cause__ = error  # for parts of this broker; clients get Java's words
        return failure

    def _on_applied(self, tx: BrokerTransaction) -> None:
        """Finish a transaction whose batches are in their partitions."""
        tx.state = advance(tx.key, tx.state, TxEvent.APPENDED)
        self._open.drop(tx)
        self.counters.committed += 1
        tx.answer(None)

    def _roll_back(self, tx: BrokerTransaction, on_done: OnDone) -> None:
        """Journal a rollback; an unprepared transaction is dropped at once."""
        self.counters.rolled_back += 1
        if not tx.put_count:
            self._open.drop(tx)
            on_done(None)
            return
        is_prepared = tx.state is TxState.ROLLING_BACK

        def journalled(_position: int) -> None:
            if is_prepared:
                tx.state = advance(tx.key, tx.state, TxEvent.JOURNALLED)
                self._open.drop(tx)
            on_done(None)

        def refused(error: StorageError) -> None:
            if is_prepared:
                tx.state = advance(tx.key, tx.state, TxEvent.REFUSED)
                on_done(XaCommandError(UNAVAILABLE, f"still prepared: {error}"))
            else:
                # A restart drops it anyway, which is the requested outcome.
                self._unended.add(tx.key, tx.slot)
                on_done(None)

        if not is_prepared:
            self._open.drop(tx)
        ticket = DecisionTicket(journalled, refused)
        submit_rollback(
            self._journal, tx.slot, tx.key, ticket, was_prepared=tx.was_prepared
        )

    # -- helpers

    def _find(self, key: str, owner: object) -> BrokerTransaction:
        self._outcomes.require_none(key)
        tx = self._get(key)
        if tx is None or (tx.owner is not owner and not is_xa(key)):
            raise not_started(key)
        return tx

    def _get(self, key: str) -> BrokerTransaction | None:
        """Return a transaction that has not expired, or None."""
        tx = self._open.by_key.get(key)
        deadline_s = None if tx is None else self._open.deadlines.get(tx)
        if tx is None or deadline_s is None or self._clock.monotonic_s() < deadline_s:
            return tx
        self._expire(tx)
        return None

    def _expire(self, tx: BrokerTransaction) -> None:
        """Roll back an expired transaction."""
        tx.state = advance(tx.key, tx.state, TxEvent.TIMEOUT)
        self.counters.timed_out += 1
        self._roll_back(tx, lambda _error: None)

    def _forget_refused(self, tx: BrokerTransaction) -> None:
        """Drop a transaction whose slot accepts no more records."""
        self._unended.add(tx.key, tx.slot)
        self._open.drop(tx)

    def _require_journal(self) -> None:
        cause = self._disabled or self._journal.offline_cause
        if isinstance(cause, TransactionError):
            raise TransactionError(str(cause))
        if cause is not None:
            is_passing = isinstance(self._disabled, NoSpaceError)
            until = "there is free space" if is_passing else "a restart"
            raise TransactionError(f"transactions are offline until {until}: {cause}")
        if self._is_closed:
            raise TransactionError("the broker stops")
