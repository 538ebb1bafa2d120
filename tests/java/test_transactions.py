"""Transactions of our client on MetaQ's own broker."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from metaq.client import (
    Client,
    MetaqError,
    TransactionError,
    TransactionInDoubtError,
    TransactionRolledBackError,
    UnknownXidError,
)
from tests.client.worlds import WORLDS
from tests.java.server import JavaBroker
from tests.java.test_java_brokers import is_registered
from tests.rigs.waiting import wait_until

TOPICS: dict[str, dict[str, Any]] = {
    "orders": {"numPartitions": 2},
    "audit": {},
    "many": {"numPartitions": 3},
    "order": {},
    "global": {"numPartitions": 2},
    "late": {},
}
COUNT = 1000


@pytest.fixture(scope="module")
def root(new_root: Callable[[], str]) -> str:
    return new_root()


@pytest.fixture(scope="module")
def broker(
    server_jars: list[Path], root: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[JavaBroker]:
    home = tmp_path_factory.mktemp("transactions")
    with JavaBroker(server_jars, home / "java", root, TOPICS) as broker:
        yield broker


@pytest.fixture(params=WORLDS)
def client(request: pytest.FixtureRequest, broker: JavaBroker, root: str) -> Any:
    with WORLDS[request.param](root) as client:
        yield client


def read(client: Any, topic: str) -> list[bytes]:
    return [message.data for message in client.browse(topic)]


def wait_for(client: Any, topic: str, count: int) -> None:
    """Wait for messages of a commit: MetaQ may answer it before it appends them."""
    wait_until(lambda: len(read(client, topic)) >= count)


def test_a_block_stores_all_or_nothing(client: Any) -> None:
    """Two topics of one broker; an exception takes everything back."""
    before = read(client, "orders"), read(client, "audit")
    with client.producer() as producer:
        with producer.transaction(timeout=30) as tx:
            sent = tx.send("orders", b"order", attribute="k=v", key="user")
            tx.send("audit", b"audit")
            assert (read(client, "orders"), read(client, "audit")) == before

        def leave() -> None:
            with producer.transaction() as tx:
                tx.send("orders", b"lost")
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            leave()
        with producer.transaction() as tx:
            tx.send("audit", b"lost")
            tx.rollback()
    wait_for(client, "orders", len(before[0]) + 1)
    wait_for(client, "audit", len(before[1]) + 1)
    found = list(client.browse("orders"))
    assert [one.data for one in found] == [*before[0], b"order"]
    assert (found[-1].id, found[-1].attribute) == (sent.message_id, "k=v")
    assert read(client, "audit") == [*before[1], b"audit"]


def test_many_at_once_are_stored_once_each(client: Any) -> None:
    """In flight together, over three partitions, with others beside them."""
    with client.producer() as producer:
        begun = len(read(client, "many"))
        data = [b"%d" % number for number in range(COUNT)]
        with producer.transaction() as tx:
            results = tx.send_many("many", data)
            producer.send("many", b"beside")
        lost = producer.transaction()
        lost.send_many("many", data)
        lost.rollback()
        assert len({one.message_id for one in results}) == COUNT
        wait_for(client, "many", begun + COUNT + 1)
        found = read(client, "many")
    assert len(found) == begun + COUNT + 1
    assert set(data) <= set(found)


def test_messages_that_wait_for_each_other_keep_their_order(client: Any) -> None:
    begun = len(read(client, "order"))
    data = [b"%d" % number for number in range(50)]
    with client.producer() as producer, producer.transaction() as tx:
        for one in data:
            tx.send("order", one)
    wait_for(client, "order", begun + len(data))
    assert read(client, "order")[begun:] == data


def test_a_transaction_that_takes_too_long_is_rolled_back(client: Any) -> None:
    """The broker's wheel has half seconds."""
    with client.producer() as producer:
        tx = producer.transaction(timeout=1)
        tx.send("late", b"one")

        def is_over() -> bool:
            try:
                tx.send("late", b"more")
            except TransactionRolledBackError:
                return True
            return False

        wait_until(is_over)
        with pytest.raises(TransactionRolledBackError):
            tx.commit()
    assert read(client, "late") == []


@pytest.mark.parametrize("verdict", ["commit", "rollback"])
def test_a_prepared_transaction_gets_its_verdict_from_another_client(
    client: Any, root: str, verdict: str
) -> None:
    """Over another connection; said twice, the broker knows it no more."""
    begun = len(read(client, "global"))
    with client.xa(qualifier="billing-1") as xa:
        xa.begin(xa.xid(42, "global", verdict))
        xa.send_many("global", [b"1", b"2", b"3"])
        assert xa.prepare() is True
        with pytest.raises(TransactionError, match="takes no more"):
            xa.send("global", b"4")
    with Client(root) as other, other.xa(qualifier="billing-1") as again:
        (xid,) = again.recover()
        assert xid == again.xid(42, "global", verdict)
        getattr(again, verdict)(xid)
        assert again.recover() == []
        with pytest.raises(UnknownXidError):
            getattr(again, verdict)(xid)
        again.forget(xid)
    count = begun + (3 if verdict == "commit" else 0)
    wait_for(client, "global", count)
    assert len(read(client, "global")) == count


def test_one_phase_and_nothing_at_all(client: Any) -> None:
    begun = len(read(client, "global"))
    with client.xa(qualifier="billing-2") as xa:
        xa.begin(xa.xid(1, "a"))
        xa.send("global", b"one")
        xa.commit()
        xa.begin(xa.xid(1, "b"))
        assert xa.prepare() is False
        xa.commit()
        xa.begin(xa.xid(1, "c"))
        xa.send("global", b"lost")
        xa.rollback()
        assert xa.recover() == []
    wait_for(client, "global", begun + 1)
    assert len(read(client, "global")) == begun + 1


def test_a_transaction_at_a_broker_that_starts_is_whole(
    server_jars: list[Path], new_root: Callable[[], str], tmp_path: Path
) -> None:
    """Issue 30, row 11: its port is open for as long as it registers its topics, and
    then it rolls back what was begun.
    """
    topics: dict[str, dict[str, Any]] = {f"t{number:03}": {} for number in range(300)}
    with JavaBroker(server_jars, tmp_path / "java", new_root(), topics) as broker:
        broker.kill()
        wait_until(lambda: not is_registered(broker.zookeeper))
        broker.launch()
        with (
            Client(brokers=[broker.address]) as client,
            client.producer(timeout_s=60) as producer,
        ):
            with producer.transaction() as tx:
                tx.send("t000", b"first")
                wait_until(lambda: broker.has_recovered)
                tx.send("t001", b"second")
            wait_for(client, "t001", 1)
            assert read(client, "t000") == [b"first"]


def test_a_killed_broker_keeps_what_is_committed_or_prepared(
    server_jars: list[Path], new_root: Callable[[], str], tmp_path: Path
) -> None:
    """An open transaction is gone; the prepared one is found, and committed once.

    A MetaQ 1.4 broker shows what it commits behind a recovery only after its next
    start.
    """
    root = new_root()

    def start_again(broker: JavaBroker) -> None:
        wait_until(lambda: not is_registered(root))
        broker.start()

    with JavaBroker(server_jars, tmp_path / "java", root, TOPICS) as broker:
        with Client(root) as client, client.producer() as producer:
            with producer.transaction() as tx:
                tx.send("audit", b"committed")
            wait_for(client, "audit", 1)
            open_one = producer.transaction()
            open_one.send("audit", b"open")
            xa = client.xa(qualifier="billing-1")
            xid = xa.xid(42, "survives")
            xa.begin(xid)
            xa.send_many("orders", [b"1", b"2", b"3"])
            xa.prepare()
            broker.kill()
            with pytest.raises((TransactionRolledBackError, TransactionInDoubtError)):
                open_one.commit(timeout=5)
            start_again(broker)
            with client.xa(qualifier="billing-1") as again:
                found: list[Any] = []

                def is_found() -> bool:
                    # Its port opens before it has read its journal.
                    try:
                        found[:] = again.recover(timeout=1)
                    except MetaqError:
                        return False
                    return bool(found)

                wait_until(is_found)
                assert found == [xid]
                again.commit(xid)
                assert again.recover() == []
            broker.stop()
            wait_until(lambda: not is_registered(root))
            broker.start()
        with Client(root) as client:
            assert read(client, "audit") == [b"committed"]
            assert sorted(read(client, "orders")) == [b"1", b"2", b"3"]
