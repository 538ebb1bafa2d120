"""One transaction in memory."""

from metaq.model import LogId, MessageId, Millis
from metaq.record.checksum import checksum
from metaq.txn.side_files import KeptOutcome
from metaq.txn.state import HeuristicOutcome
from metaq.txn.transaction import BrokerTransaction, PutRun, view_transactions

A, B = LogId("test", 0), LogId("test", 1)


def test_puts_to_one_partition_are_one_batch() -> None:
    """In the order of the puts; sealed once, with the checksum of all."""
    tx = BrokerTransaction("TX:s:1", None, Millis(0))
    for log_id, number in ((A, 1), (B, 2), (A, 3)):
        chunk = b"%d" % number
        tx.add(PutRun(log_id, [chunk], 1, 1, MessageId(number)))
    batch = tx.batches[A]
    assert batch.seal() == checksum(b"13") == batch.seal()
    assert (batch.chunks, batch.size_bytes, batch.put_count) == ([b"13"], 2, 2)
    assert (tx.put_count, tx.last_id) == (3, 3)


def test_everyone_who_waits_is_answered_once() -> None:
    """Also where the answer makes somebody wait again."""
    tx, answers = BrokerTransaction("TX:s:1", None, Millis(0)), list[object]()
    tx.waiters += [answers.append, lambda _error: tx.waiters.append(answers.append)]
    tx.answer(None)
    assert answers == [None]
    assert tx.waiters == [answers.append]


def test_operators_see_prepared_ones_first() -> None:
    """They wait for somebody."""
    one, two = (BrokerTransaction(f"XID:1:0{n}::", None, Millis(5)) for n in (1, 2))
    two.was_prepared, two.prepared_ms = True, Millis(7)
    views = view_transactions({one.key: one, two.key: two}, {}, Millis(10))
    assert [(v.key, v.age_ms, v.prepared_age_ms) for v in views] == [
        (two.key, 5, 3),
        (one.key, 5, None),
    ]


def test_operators_see_the_outcome_of_what_is_not_there_any_more() -> None:
    """One that is still there says it itself."""
    tx = BrokerTransaction("XID:1:01::", None, Millis(5))
    kept = KeptOutcome(HeuristicOutcome.COMMIT, Millis(3))
    views = view_transactions(
        {tx.key: tx}, {tx.key: kept, "XID:1:02::": kept}, Millis(10)
    )
    assert [(v.key, v.state, v.age_ms) for v in views] == [
        (tx.key, "started", 5),
        ("XID:1:02::", "heuristic commit", 7),
    ]
