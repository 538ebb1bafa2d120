"""States of transactions: one table for local ones, one for XA.

Pure. `advance` returns the next state of a transaction after an event, or raises the
error that MetaQ sends, word for word. The errors of heuristic outcomes are here too.

    STARTED --put--> IN_USE --prepare--> PREPARING --journalled--> PREPARED
       |                |                    |                        |
       |                +-----commit---------|--> COMMITTING <--commit+
       |                |                    |        | journalled
       |                |                    |     DECIDED --appended--> FINISHED
       +----------------+---rollback, timeout, refused by the journal--> FINISHED

A DECIDED transaction is committed for good: its batches are on their way to their
partitions, or are retried until these accept them.

Source: docs/metaq-1.4/broker.md 5.4, 5.5, 5.8.
"""

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from metaq.errors import TransactionError


class TxState(enum.StrEnum):
    """State of a transaction; a str, which tables find in a third of the time.

    PREPARING, COMMITTING and ROLLING_BACK wait for the journal.
    """

    STARTED = "started"
    IN_USE = "in use"
    """Has puts; a crash rolls it back."""
    PREPARING = "preparing"
    PREPARED = "prepared"
    """Survives a crash; only a decision ends it."""
    COMMITTING = "committing"
    ROLLING_BACK = "rolling back"
    DECIDED = "decided"
    FINISHED = "finished"


OPEN_STATES: Final = frozenset({TxState.STARTED, TxState.IN_USE})
"""States in which a transaction accepts puts."""


class TxEvent(enum.StrEnum):
    """Event of a transaction; a str, the word in an error."""

    PUT = "put"
    PREPARE = "prepare"
    COMMIT_ONE_PHASE = "commit"
    COMMIT_TWO_PHASE = "commit of two phases"
    ROLLBACK = "rollback"
    TIMEOUT = "timeout"
    JOURNALLED = "journalled"
    REFUSED = "refused"
    APPENDED = "appended"


class HeuristicOutcome(enum.Enum):
    """Decision of an operator about a prepared transaction."""

    COMMIT = "commit"
    ROLLBACK = "rollback"
    COMPLETE = "complete"
    """Ended by other means: its puts are dropped."""


S, E = TxState, TxEvent

_COMMON: Final[Mapping[tuple[TxState, TxEvent], TxState]] = {
    (S.STARTED, E.PUT): S.IN_USE,
    (S.IN_USE, E.PUT): S.IN_USE,
    (S.STARTED, E.COMMIT_ONE_PHASE): S.FINISHED,
    (S.IN_USE, E.COMMIT_ONE_PHASE): S.COMMITTING,
    (S.STARTED, E.ROLLBACK): S.FINISHED,
    (S.IN_USE, E.ROLLBACK): S.FINISHED,
    (S.STARTED, E.TIMEOUT): S.FINISHED,
    (S.IN_USE, E.TIMEOUT): S.FINISHED,
    (S.COMMITTING, E.JOURNALLED): S.DECIDED,
    (S.DECIDED, E.APPENDED): S.FINISHED,
    # A repeated commit is answered when the first one ends.
    (S.COMMITTING, E.COMMIT_ONE_PHASE): S.COMMITTING,
    (S.DECIDED, E.COMMIT_ONE_PHASE): S.DECIDED,
}

LOCAL: Final = MappingProxyType(
    {
        **_COMMON,
        # MetaQ's local transactions ignore the phase.
        (S.STARTED, E.COMMIT_TWO_PHASE): S.FINISHED,
        (S.IN_USE, E.COMMIT_TWO_PHASE): S.COMMITTING,
        (S.COMMITTING, E.COMMIT_TWO_PHASE): S.COMMITTING,
        (S.DECIDED, E.COMMIT_TWO_PHASE): S.DECIDED,
        (S.COMMITTING, E.REFUSED): S.FINISHED,
    }
)

XA: Final = MappingProxyType(
    {
        **_COMMON,
        (S.STARTED, E.PREPARE): S.FINISHED,
        (S.IN_USE, E.PREPARE): S.PREPARING,
        (S.PREPARING, E.JOURNALLED): S.PREPARED,
        (S.PREPARING, E.REFUSED): S.FINISHED,
        (S.PREPARED, E.COMMIT_ONE_PHASE): S.COMMITTING,
        (S.PREPARED, E.COMMIT_TWO_PHASE): S.COMMITTING,
        (S.PREPARED, E.ROLLBACK): S.ROLLING_BACK,
        (S.ROLLING_BACK, E.JOURNALLED): S.FINISHED,
        (S.ROLLING_BACK, E.REFUSED): S.PREPARED,
        (S.COMMITTING, E.COMMIT_TWO_PHASE): S.COMMITTING,
        (S.DECIDED, E.COMMIT_TWO_PHASE): S.DECIDED,
        # PREPARED if it was prepared, else FINISHED: see `advance`.
        (S.COMMITTING, E.REFUSED): S.PREPARED,
    }
)

# -- errors ---------------------------------------------------------------------------

ROLLED_BACK: Final = 104
"""XA_RBOTHER: the commit failed, the transaction is rolled back."""
RM_ERROR: Final = -3
"""XAER_RMERR."""
UNKNOWN: Final = -4
"""XAER_NOTA."""
PROTOCOL: Final = -6
"""XAER_PROTO."""
UNAVAILABLE: Final = -7
"""XAER_RMFAIL: ask again; nothing is lost."""
DUPLICATE: Final = -8
"""XAER_DUPID: the xid is in use."""

_OUTCOMES: Final = {
    HeuristicOutcome.COMMIT: (7, "heuristically committed"),
    HeuristicOutcome.ROLLBACK: (6, "heuristically rolled back"),
    HeuristicOutcome.COMPLETE: (8, "heuristically completed"),
}
"""XA_HEURCOM, XA_HEURRB, XA_HEURHAZ."""

STORE_FAILED: Final = "STORE COMMIT FAILED: Transaction rolled back."


class XaCommandError(TransactionError):
    """An error with an XA code."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def is_xa(key: str) -> bool:
    """Return whether a key is that of an XA transaction."""
    return key.startswith("XID:")


def qualifier_of(key: str) -> str:
    """Return the qualifier in the key of an XA transaction."""
    return key.rpartition(":")[2]


def not_started(key: str) -> TransactionError:
    """Return the error for an unknown transaction."""
    if is_xa(key):
        return XaCommandError(UNKNOWN, f"XA transaction '{key}' has not been started.")
    return TransactionError(f"Local transaction '{key}' has not been started.")


def in_use(key: str, state: TxState) -> TransactionError:
    """Return the error for a begin with a key that is in use."""
    if is_xa(key):
        text = f"XA transaction '{key}' is in use: {state.value}."
        return XaCommandError(DUPLICATE, text)
    return TransactionError(f"Local transaction '{key}' is in use: {state.value}.")


def outcome_error(key: str, outcome: HeuristicOutcome) -> XaCommandError:
    """Return the error for a transaction that an operator has ended."""
    code, words = _OUTCOMES[outcome]
    return XaCommandError(code, f"XA transaction '{key}' has been {words}.")


def advance(
    key: str, state: TxState, event: TxEvent, *, was_prepared: bool = False
) -> TxState:
    """Return the next state of a transaction.

    Args:
        key: key of the transaction.
        state: its present state.
        event: the event.
        was_prepared: whether its prepare is in the journal.

    Raises:
        TransactionError: the event is not allowed; an `XaCommandError` except for puts.
    """
    table = XA if is_xa(key) else LOCAL
    found = table.get((state, event))
    if found is None:
        raise _refusal(key, state, event)
    if event is E.REFUSED and state is S.COMMITTING:
        return S.PREPARED if was_prepared else S.FINISHED
    return found


def _refusal(key: str, state: TxState, event: TxEvent) -> TransactionError:
    if state is S.FINISHED:
        return not_started(key)
    if event is E.PUT:
        return TransactionError(f"Transaction '{key}' takes no puts: {state.value}.")
    if event is E.PREPARE and not is_xa(key):
        text = "Prepare not implemented on Local Transactions."
        return XaCommandError(RM_ERROR, text)
    if event is E.COMMIT_TWO_PHASE and state in {S.STARTED, S.IN_USE}:
        text = "Cannot do 2 phase commit if the transaction has not been prepared."
        return XaCommandError(PROTOCOL, text)
    word = event.value.split(" ")[0]
    return XaCommandError(PROTOCOL, f"Cannot call {word} now.")
