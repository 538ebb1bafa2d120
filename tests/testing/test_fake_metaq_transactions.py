"""Transactions of a fake MetaQ 1.4 broker: states, time-outs, outcomes of operators."""

from collections.abc import Callable

import pytest

from metaq.errors import ServerError
from metaq.model import (
    NULL_TRANSACTION,
    LocalTransactionId,
    TransactionId,
    XaTransactionId,
)
from metaq.protocol.commands import Put, TransactionCommand, TransactionType
from metaq.testing.clock import ManualClock
from metaq.testing.fake_metaq import FakeTransactions
from metaq.txn.state import UNKNOWN, HeuristicOutcome

BEGIN, PREPARE, ROLLBACK, RECOVER, FORGET, ONE_PHASE, TWO_PHASE = (
    TransactionType.BEGIN,
    TransactionType.PREPARE,
    TransactionType.ROLLBACK,
    TransactionType.RECOVER,
    TransactionType.FORGET,
    TransactionType.COMMIT_ONE_PHASE,
    TransactionType.COMMIT_TWO_PHASE,
)
XID = XaTransactionId(1, b"g", b"b", "q")
LOCAL = LocalTransactionId("s", 1)
OVER = "one connection"


class Rig:
    """Transactions, and the payloads that they have stored."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.stored: list[bytes] = []
        self.transactions = FakeTransactions(
            self.clock, lambda put, _number: self.stored.append(put.payload)
        )

    def put(self, data: bytes, transaction: TransactionId = XID) -> None:
        put = Put("test", 0, data, 0, -1, 1, transaction)
        self.transactions.put(put, 7, OVER)

    def tell(
        self,
        kind: TransactionType,
        transaction: TransactionId = XID,
        *,
        over: object = OVER,
        timeout_s: int = 0,
        qualifier: str | None = None,
    ) -> str:
        command = TransactionCommand(
            transaction, "s", kind, 1, timeout_s=timeout_s, qualifier=qualifier
        )
        return self.transactions.answer(command, over)

    def refusal(self, act: Callable[[], object]) -> str:
        with pytest.raises(ServerError) as caught:
            act()
        return str(caught.value)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_puts_are_stored_at_the_commit(rig: Rig) -> None:
    """In the order of the puts; one after the PREPARE is lost."""
    rig.tell(BEGIN)
    rig.put(b"one")
    rig.put(b"two")
    assert rig.tell(PREPARE) == "0"
    rig.put(b"late")
    assert rig.stored == []
    rig.transactions.restart()
    assert rig.tell(TWO_PHASE) == ""
    assert rig.stored == [b"one", b"two"]
    assert rig.transactions.keys() == []


def test_an_empty_transaction_ends_with_its_prepare(rig: Rig) -> None:
    """3 is XA's word for read only; there is nothing to commit."""
    rig.tell(BEGIN)
    assert rig.tell(PREPARE) == "3"
    assert rig.transactions.keys() == []


def test_a_local_transaction_is_reached_over_its_own_connection_alone(
    rig: Rig,
) -> None:
    """An XA transaction over any."""
    rig.tell(BEGIN)
    rig.tell(BEGIN, LOCAL)
    rig.put(b"local", LOCAL)
    other = rig.refusal(lambda: rig.tell(ONE_PHASE, LOCAL, over="another"))
    assert other == "Local transaction 'TX:s:1' has not been started."
    rig.tell(ONE_PHASE, LOCAL)
    rig.tell(ROLLBACK, XID, over="another")
    assert rig.stored == [b"local"]


def test_a_time_out_ends_what_is_not_prepared(rig: Rig) -> None:
    """A prepared one waits for its decision for ever."""
    prepared = XaTransactionId(1, b"p", b"b", "q")
    for transaction in (XID, prepared):
        rig.tell(BEGIN, transaction, timeout_s=5)
        rig.put(b"x", transaction)
    rig.tell(PREPARE, prepared)
    rig.clock.advance_s(4.9)
    assert len(rig.transactions.keys()) == 2
    rig.clock.advance_s(0.1)
    assert rig.transactions.keys() == ["XID:1:70:62:q"]
    assert f"code={UNKNOWN}" in rig.refusal(lambda: rig.tell(PREPARE))


def test_a_restart_keeps_what_is_prepared(rig: Rig) -> None:
    """As a broker that was killed: the journal holds the prepares."""
    prepared = XaTransactionId(1, b"p", b"b", "q")
    for transaction in (XID, prepared):
        rig.tell(BEGIN, transaction)
        rig.put(b"x", transaction)
    rig.tell(PREPARE, prepared)
    rig.transactions.restart()
    assert rig.transactions.keys() == ["XID:1:70:62:q"]


def test_a_recover_lists_prepared_transactions_of_its_qualifier(rig: Rig) -> None:
    """Of all without a qualifier; those that are begun are in none."""
    names = [("a", "q"), ("b", "r"), ("c", "q")]
    xids = [XaTransactionId(1, n.encode(), b"b", q) for n, q in names]
    for xid in xids:
        rig.tell(BEGIN, xid)
        rig.put(b"x", xid)
    for xid in xids[:2]:
        rig.tell(PREPARE, xid)
    assert rig.tell(RECOVER, NULL_TRANSACTION, qualifier="q") == "XID:1:61:62:q"
    assert rig.tell(RECOVER, NULL_TRANSACTION).split("\r\n") == [
        "XID:1:61:62:q",
        "XID:1:62:62:r",
    ]


@pytest.mark.parametrize(
    ("outcome", "code", "word"),
    [
        (HeuristicOutcome.COMMIT, 7, "committed"),
        (HeuristicOutcome.ROLLBACK, 6, "rolled back"),
        (HeuristicOutcome.COMPLETE, 8, "completed"),
    ],
)
def test_a_heuristic_outcome_is_answered_until_it_is_forgotten(
    outcome: HeuristicOutcome, code: int, word: str, rig: Rig
) -> None:
    """To decisions with its code, to puts with the words alone."""
    rig.tell(BEGIN)
    rig.put(b"one")
    rig.tell(PREPARE)
    rig.transactions.end(XID, outcome)
    text = f"XA transaction 'XID:1:67:62:q' has been heuristically {word}."
    answer = f"XAException:code={code},msg={text}"
    assert rig.refusal(lambda: rig.tell(ROLLBACK)) == answer
    assert rig.refusal(lambda: rig.put(b"two")) == text
    assert rig.stored == [b"one"] * (outcome is HeuristicOutcome.COMMIT)
    assert rig.tell(RECOVER, NULL_TRANSACTION) == "XID:1:67:62:q"
    rig.tell(FORGET)
    assert rig.tell(RECOVER, NULL_TRANSACTION) == ""


def test_a_local_transaction_has_one_phase(rig: Rig) -> None:
    """It cannot be prepared, and two phases of an XA one need the first."""
    rig.tell(BEGIN)
    rig.tell(BEGIN, LOCAL)
    refused = rig.refusal(lambda: rig.tell(PREPARE, LOCAL))
    assert "Prepare not implemented on Local Transactions." in refused
    assert "has not been prepared" in rig.refusal(lambda: rig.tell(TWO_PHASE))
