"""The state tables of local and XA transactions."""

import itertools

import pytest

from metaq.errors import TransactionError
from metaq.txn.state import (
    HeuristicOutcome,
    TxEvent,
    TxState,
    XaCommandError,
    advance,
    not_started,
    outcome_error,
)

E, S = TxEvent, TxState
LOCAL, XA = "TX:s1:1", "XID:1:0a::uq"


def ends(key: str, *events: TxEvent) -> TxState:
    state = S.STARTED
    for event in events:
        state = advance(key, state, event)
    return state


@pytest.mark.parametrize(
    ("key", "events", "state"),
    [
        (LOCAL, (E.COMMIT_ONE_PHASE,), S.FINISHED),
        (LOCAL, (E.PUT, E.COMMIT_TWO_PHASE, E.JOURNALLED, E.APPENDED), S.FINISHED),
        (LOCAL, (E.PUT, E.COMMIT_ONE_PHASE, E.REFUSED), S.FINISHED),
        (LOCAL, (E.PUT, E.ROLLBACK), S.FINISHED),
        (LOCAL, (E.PUT, E.TIMEOUT), S.FINISHED),
        (XA, (E.PREPARE,), S.FINISHED),
        (XA, (E.PUT, E.PREPARE, E.JOURNALLED), S.PREPARED),
        (XA, (E.PUT, E.PREPARE, E.REFUSED), S.FINISHED),
        (XA, (E.PUT, E.COMMIT_ONE_PHASE, E.JOURNALLED), S.DECIDED),
        (XA, (E.PUT, E.PREPARE, E.JOURNALLED, E.COMMIT_TWO_PHASE), S.COMMITTING),
        (XA, (E.PUT, E.PREPARE, E.JOURNALLED, E.ROLLBACK, E.REFUSED), S.PREPARED),
    ],
)  # fmt: skip
def test_the_ways_of_a_transaction(
    key: str, events: tuple[TxEvent, ...], state: TxState
) -> None:
    """Each row is a life of MetaQ's transactions (docs/metaq-1.4/broker.md 5.4)."""
    assert ends(key, *events) is state


@pytest.mark.parametrize(
    ("key", "state", "event", "code", "text"),
    [
        (LOCAL, S.IN_USE, E.PREPARE, -3,
         "Prepare not implemented on Local Transactions."),
        (XA, S.IN_USE, E.COMMIT_TWO_PHASE, -6,
         "Cannot do 2 phase commit if the transaction has not been prepared."),
        (XA, S.STARTED, E.COMMIT_TWO_PHASE, -6,
         "Cannot do 2 phase commit if the transaction has not been prepared."),
        (XA, S.PREPARED, E.PREPARE, -6, "Cannot call prepare now."),
        (XA, S.PREPARING, E.COMMIT_ONE_PHASE, -6, "Cannot call commit now."),
        (XA, S.DECIDED, E.ROLLBACK, -6, "Cannot call rollback now."),
        (XA, S.FINISHED, E.ROLLBACK, -4,
         f"XA transaction '{XA}' has not been started."),
    ],
)  # fmt: skip
def test_refusals_have_the_words_of_metaq(
    key: str, state: TxState, event: TxEvent, code: int, text: str
) -> None:
    """Code and text of what cannot be done now (docs/metaq-1.4/broker.md 5.5)."""
    with pytest.raises(XaCommandError) as caught:
        advance(key, state, event)
    assert (caught.value.code, str(caught.value)) == (code, text)


@pytest.mark.parametrize("state", [S.PREPARED, S.COMMITTING, S.DECIDED])
def test_a_put_behind_the_prepare_is_refused(state: TxState) -> None:
    """Row 21: MetaQ acknowledges it, and drops it at the commit."""
    with pytest.raises(TransactionError, match="takes no puts"):
        advance(XA, state, E.PUT)


def test_a_refused_commit_leaves_what_was_prepared_prepared() -> None:
    """One that was not prepared is rolled back; nothing else would be known of it."""
    for was_prepared, state in ((True, S.PREPARED), (False, S.FINISHED)):
        found = advance(XA, S.COMMITTING, E.REFUSED, was_prepared=was_prepared)
        assert found is state


@pytest.mark.parametrize("key", [LOCAL, XA])
def test_what_is_prepared_ends_by_a_verdict_alone(key: str) -> None:
    """No time-out, and no put, moves a transaction that was prepared or decided."""
    for state, event in itertools.product((S.PREPARED, S.DECIDED), (E.TIMEOUT, E.PUT)):
        with pytest.raises(TransactionError):
            advance(key, state, event)


def test_unknown_and_heuristic_transactions_have_their_codes() -> None:
    """Local ones are answered in plain text, XA ones with a code."""
    assert (
        str(not_started(LOCAL)) == f"Local transaction '{LOCAL}' has not been started."
    )
    assert not isinstance(not_started(LOCAL), XaCommandError)
    found = {each: outcome_error(XA, each) for each in HeuristicOutcome}
    assert {each: error.code for each, error in found.items()} == {
        HeuristicOutcome.COMMIT: 7,
        HeuristicOutcome.ROLLBACK: 6,
        HeuristicOutcome.COMPLETE: 8,
    }
    text = f"XA transaction '{XA}' has been heuristically rolled back."
    assert str(found[HeuristicOutcome.ROLLBACK]) == text
