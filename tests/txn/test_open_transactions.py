"""Unfinished transactions by key and connection, and their bounds."""

import pytest

from metaq.errors import TransactionError
from metaq.model import TRANSACTION_KEY_BYTES_MAX, Millis
from metaq.testing.clock import ManualClock
from metaq.txn.figures import TransactionCounters, TransactionLimits
from metaq.txn.open_transactions import OpenTransactions
from metaq.txn.state import TxState
from metaq.txn.transaction import NO_OWNER, BrokerTransaction

LIMITS = TransactionLimits(
    open_count_max=2,
    held_bytes_max=100,
    timed_count_max=1,
    timeout_s_max=60,
    journal_bytes_max=100,
)


def made(*transactions: BrokerTransaction) -> OpenTransactions:
    found = OpenTransactions(ManualClock(), LIMITS, TransactionCounters())
    for each in transactions:
        found.add(each)
    return found


def test_what_is_dropped_is_not_counted_any_more() -> None:
    """Its key, what its puts hold, and its connection."""
    tx = BrokerTransaction("TX:s:1", "owner", Millis(0), held_bytes=7)
    found = made(tx)
    assert (found.by_key, found.held_bytes) == ({tx.key: tx}, 7)
    found.drop(tx)
    assert (found.by_key, found.held_bytes) == ({}, 0)
    assert found.disown("owner") == []


def test_transactions_of_an_ended_connection_have_no_owner() -> None:
    """Those of others keep theirs."""
    one, two = (BrokerTransaction(f"TX:s:{n}", n, Millis(0)) for n in (1, 2))
    found = made(one, two)
    assert found.disown(1) == [one]
    assert (one.owner, two.owner) == (NO_OWNER, 2)


def test_prepared_ones_wait_for_a_decision() -> None:
    """Those that take puts do not."""
    one, two = (BrokerTransaction(f"XID:1:0{n}::", n, Millis(0)) for n in (1, 2))
    two.state = TxState.PREPARED
    assert made(one, two).prepared() == [two]


def test_those_without_a_time_out_are_named_until_they_are_prepared() -> None:
    """Those with one end by themselves."""
    one, two, three = (BrokerTransaction(f"XID:1:0{n}::", n, Millis(0)) for n in "123")
    three.state = TxState.PREPARED
    found = made(one, two, three)
    found.limit_time(one, 5)
    assert found.untimed() == [two]


def test_one_more_than_a_bound_is_refused_with_both_numbers() -> None:
    """Transactions with an unfinished rollback count too."""
    tx = BrokerTransaction("TX:s:1", 1, Millis(0))
    found = made(tx)
    found.require_begin("TX:s:2", 5, unended_count=0)
    with pytest.raises(TransactionError, match="expected at most 2, got 3"):
        found.require_begin("TX:s:2", 0, unended_count=1)
    found.limit_time(tx, 5)
    with pytest.raises(TransactionError, match=r"Timer size 2 is great than .* 1"):
        found.require_begin("TX:s:2", 5, unended_count=0)


def test_a_key_has_a_bound() -> None:
    """Keys of transactions that hold nothing yet could fill the memory."""
    found, longest = made(), "TX:" + "s" * (TRANSACTION_KEY_BYTES_MAX - 5) + ":1"
    found.require_begin(longest, 0, unended_count=0)
    with pytest.raises(TransactionError, match=r"key of at most 1024.*, got 1025"):
        found.require_begin(longest + "1", 0, unended_count=0)
