"""Transactions of our client on our own broker; `tests/java` has MetaQ's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metaq.client import (
    TransactionInDoubtError,
    TransactionRolledBackError,
    UnknownXidError,
)
from metaq.client.errors import XaError
from metaq.errors import ServerError
from metaq.testing.embedded import EmbeddedBroker
from metaq.testing.zk import MemoryZooKeeper
from tests.client.worlds import QUICK, WORLDS

ONE_BROKER = {
    "brokers": "tests/java has MetaQ's own broker",
    "client": "of these brokers",
    "test_what_is_prepared_survives_a_restart_and_is_committed_once": "as above",
    "test_a_broker_whose_journal_is_offline_is_not_taken_for_one_with_nothing": (
        "MetaQ's has no such state"
    ),
}

TOPICS = {"orders": 2, "audit": 1}
COUNT = 1000


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[list[EmbeddedBroker]]:
    """Two brokers with the same topics."""
    zookeeper = MemoryZooKeeper()
    made = [
        EmbeddedBroker(
            tmp_path / str(number),
            topics=TOPICS,
            zookeeper=zookeeper,
            settings={"brokerId": str(number)},
        )
        for number in (0, 1)
    ]
    with made[0], made[1]:
        yield made


@pytest.fixture(params=WORLDS)
def client(request: pytest.FixtureRequest, brokers: list[EmbeddedBroker]) -> Any:
    with WORLDS[request.param](**brokers[0].client_options, **QUICK) as client:
        yield client


def texts(client: Any, topic: str) -> list[bytes]:
    return sorted(message.data for message in client.browse(topic))


def send_and_fail(producer: Any) -> None:
    with producer.transaction() as tx:
        tx.send("orders", b"never")
        raise ZeroDivisionError


@pytest.mark.slow
def test_all_of_a_transaction_is_stored_or_nothing(client: Any) -> None:
    """Over topics and partitions; leaving by an exception rolls back."""
    wanted = sorted(b"%d" % number for number in range(COUNT))
    with client.producer() as producer:
        with producer.transaction() as tx:
            tx.send_many("orders", wanted)
            tx.send("audit", b"done")
            assert texts(client, "orders") == texts(client, "audit") == []
        assert (texts(client, "orders"), texts(client, "audit")) == (wanted, [b"done"])
        with pytest.raises(ZeroDivisionError):
            send_and_fail(producer)
    assert (texts(client, "orders"), texts(client, "audit")) == (wanted, [b"done"])


def prepare(client: Any, text: str) -> Any:
    """Prepare a message on each broker; return the xid."""
    with client.xa(qualifier="billing") as xa:
        xid = xa.xid(42, text, "b")
        xa.begin(xid)
        for partition in ("0-0", "1-0"):
            xa.send("orders", text.encode(), partition=partition)
        xa.prepare()
        return xid


def test_an_xid_in_use_is_refused_and_goes_on(client: Any) -> None:
    """Of two that use one, the second gets an error, and its rollback is its own."""
    with client.xa(qualifier="billing") as first, client.xa(qualifier="billing") as two:
        xid = first.xid(42, "twice", "b")
        first.begin(xid)
        first.send("orders", b"first", partition="0-0")
        for go_on in (bool, first.prepare):  # open still; then prepared
            go_on()
            two.begin(xid)
            with pytest.raises(XaError, match=r"XAER_DUPID \(-8\).* is in use"):
                two.send("orders", b"second", partition="0-0")
            with pytest.raises(TransactionRolledBackError):
                two.prepare()
        first.commit(xid)
        assert texts(client, "orders") == [b"first"]


@pytest.mark.slow
def test_what_is_prepared_survives_a_restart_and_is_committed_once(
    client: Any, brokers: list[EmbeddedBroker]
) -> None:
    """On both brokers; what is rolled back is readable nowhere."""
    kept, dropped = prepare(client, "kept"), prepare(client, "dropped")
    for broker in brokers:
        broker.restart()
    assert texts(client, "orders") == []
    with client.xa(qualifier="billing") as xa:
        assert set(xa.recover()) == {kept, dropped}
        xa.commit(kept)
        xa.rollback(dropped)
        assert list(xa.recover()) == []
        assert texts(client, "orders") == [b"kept", b"kept"]
        with pytest.raises(UnknownXidError):
            xa.commit(kept)
    for broker in brokers:
        broker.restart()
    assert texts(client, "orders") == [b"kept", b"kept"]


@pytest.mark.slow
def test_a_broker_whose_journal_is_offline_is_not_taken_for_one_with_nothing(
    client: Any, brokers: list[EmbeddedBroker]
) -> None:
    """A transaction manager would forget its decision; `partial` lists the others."""
    xid = prepare(client, "kept")
    brokers[0].stop()
    for path in brokers[0].data_path.rglob("redo.*"):
        path.unlink()
    brokers[0].start()
    assert texts(client, "orders") == []
    with client.xa(qualifier="billing") as xa:
        with pytest.raises(
            ServerError, match=r"offline until a restart: .* is missing"
        ):
            xa.recover()
        assert list(xa.recover(partial=True)) == [xid]
        with pytest.raises(TransactionInDoubtError, match="is missing"):
            xa.commit(xid)
