"""Counters of transactions, over all producers of a client, open and closed."""

from collections.abc import Iterator
from typing import Any

import pytest

from metaq.client import (
    TransactionError,
    TransactionInDoubtError,
    TransactionRolledBackError,
    UnknownXidError,
)
from metaq.client.produce.producer_counters import TransactionStatistics
from metaq.errors import ServerError
from metaq.stats import total_of
from metaq.testing.fake_broker import FaultKind
from tests.brokers import StartBroker
from tests.client.worlds import QUICK, WORLDS

ONE_BROKER = {"broker": "refuses and hangs up on cue"}


@pytest.fixture
def broker(start_metaq_1_4: StartBroker) -> Any:
    return start_metaq_1_4({"test": 1})


@pytest.fixture(params=WORLDS)
def client(request: pytest.FixtureRequest, broker: Any) -> Iterator[Any]:
    with WORLDS[request.param](brokers=[broker.address], **QUICK) as client:
        yield client


def counted(client: Any) -> TransactionStatistics:
    found = getattr(client, "twin", client).statistics()
    closed = found.closed_producers
    producers = [*found.producers, *([] if closed is None else [closed])]
    return total_of([one.transactions for one in producers])


def numbers(client: Any) -> dict[str, int]:
    """Return what is not 0, and hold the times of commits against their number."""
    found = counted(client)
    assert found.commit_s.count == found.committed_count
    names = ("begun", "prepared", "committed", "rolled_back", "in_doubt", "recovered")
    counts = {name: getattr(found, f"{name}_count") for name in names}
    return {name: count for name, count in counts.items() if count}


def leave(producer: Any) -> None:
    with producer.transaction() as tx:
        tx.send("test", b"never")
        raise ZeroDivisionError


def test_local_transactions_are_counted_by_how_they_end(
    broker: Any, client: Any
) -> None:
    """Committed, left by an exception, failed by a message, and in doubt; a call out of
    order counts for nothing, and the sums outlive the producer.
    """
    with client.producer(timeout_s=10) as producer:
        with producer.transaction() as tx:
            tx.send("test", b"one")
        with pytest.raises(TransactionError):
            tx.commit()
        assert numbers(client) == {"begun": 1, "committed": 1}
        with pytest.raises(ZeroDivisionError):
            leave(producer)
        tx = producer.transaction()
        tx.send("test", b"two")
        broker.inner.inject(FaultKind.REFUSE, body=b"no")
        with pytest.raises(ServerError):
            tx.send("test", b"three")
        with pytest.raises(TransactionRolledBackError):
            tx.commit()
        assert numbers(client) == {"begun": 3, "committed": 1, "rolled_back": 2}
        tx = producer.transaction()
        tx.send("test", b"four")
        broker.inner.inject(FaultKind.DROP_STORED, verb="commit_one_phase")
        with pytest.raises(TransactionInDoubtError):
            tx.commit()
    assert numbers(client) == {
        "begun": 4,
        "committed": 1,
        "rolled_back": 2,
        "in_doubt": 1,
    }


def begin(xa: Any, name: str) -> Any:
    xid = xa.xid(1, name)
    xa.begin(xid)
    xa.send("test", name.encode())
    return xid


def test_xa_transactions_are_counted_and_who_recovers_counts_apart(
    broker: Any, client: Any
) -> None:
    """Prepared counts once for all brokers, and not when there was nothing to keep."""
    with client.xa(qualifier="billing") as xa:
        xa.begin(xa.xid(1, "empty"))
        assert not xa.prepare()
        xa.rollback()
        begin(xa, "one")
        xa.commit()
        begin(xa, "two")
        xa.prepare()
        xa.rollback()
        begin(xa, "three")
        broker.inner.inject(FaultKind.REFUSE, verb="prepare", body=b"no")
        with pytest.raises(TransactionRolledBackError):
            xa.prepare()
        assert numbers(client) == {
            "begun": 4,
            "prepared": 1,
            "committed": 1,
            "rolled_back": 3,
        }
        left = begin(xa, "four")
        xa.prepare()
    with client.xa(qualifier="billing") as again:
        again.commit(left)
        with pytest.raises(UnknownXidError):
            again.rollback(left)
        begin(again, "five")
    assert numbers(client) == {
        "begun": 6,
        "prepared": 2,
        "committed": 1,
        "rolled_back": 4,
        "recovered": 1,
    }
