"""Local transactions in both worlds: everything is stored, or nothing."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from metaq.client import (
    ClosedError,
    ConfigError,
    MessageTooLargeError,
    NoBrokerError,
    OutgoingMessage,
    RequestTimeoutError,
    RoundRobin,
    TransactionError,
    TransactionInDoubtError,
    TransactionRolledBackError,
    TransactionState,
)
from metaq.client.produce.transaction_branch import Branch
from metaq.errors import ServerError
from metaq.model import BrokerId, LocalTransactionId, TopicPartition
from metaq.protocol.version import Capabilities
from metaq.testing.clock import ManualClock
from metaq.testing.fake_broker import FakeBroker, FaultKind
from metaq.testing.zk import MemoryZooKeeper
from tests.brokers import StartBroker
from tests.client.worlds import QUICK, WORLDS
from tests.rigs.waiting import wait_until

ONE_BROKER = {
    "fakes": "what a client meets on MetaQ 1.4 and what fails on cue; tests/java has"
    " the real one",
    "test_a_transaction_whose_time_is_over_is_rolled_back": "its clock is the test's",
}

TOPICS = {"test": 3, "audit": 1}


@pytest.fixture
def fakes(start_metaq_1_4: StartBroker) -> list[Any]:
    """Two brokers; topic "far" is on the second alone."""
    zookeeper = MemoryZooKeeper()
    one = start_metaq_1_4(TOPICS, zookeeper=zookeeper, broker_id=0)
    other = start_metaq_1_4({"test": 3, "far": 1}, zookeeper=zookeeper, broker_id=1)
    return [one, other]


@pytest.fixture(params=WORLDS)
def client(request: pytest.FixtureRequest, fakes: list[Any]) -> Iterator[Any]:
    with WORLDS[request.param](**fakes[0].client_options, **QUICK) as client:
        yield client


@pytest.fixture
def producer(client: Any) -> Iterator[Any]:
    with client.producer(timeout_s=10) as producer:
        yield producer


@pytest.fixture
def broker(fakes: list[Any]) -> Any:
    return fakes[0].inner


def stored(fakes: list[Any], topic: str = "test") -> list[bytes]:
    return sorted(
        data
        for number, fake in enumerate(fakes)
        for partition in range(TOPICS.get(topic, 1) if not number else 3)
        for data in fake.stored(topic, partition)
    )


HERE = "0-0"


def test_the_end_of_the_block_stores_all_of_it(fakes: list[Any], producer: Any) -> None:
    """Nothing before; two topics, keys and attributes; ids are known at once."""
    with producer.transaction(timeout=30) as tx:
        first = tx.send("test", b"one", partition="0-2", attribute="k=v")
        second = tx.send("audit", b"two", key="k")
        assert stored(fakes) == stored(fakes, "audit") == []
    assert tx.state is TransactionState.COMMITTED
    assert first.partition == TopicPartition("test", BrokerId(0), 2)
    (record,) = fakes[0].inner.records("test", 2)
    assert record.id == first.message_id
    assert stored(fakes, "audit") == [b"two"]
    assert second.partition.partition == 0


def test_an_exception_that_leaves_the_block_takes_all_of_it_back(
    fakes: list[Any], producer: Any
) -> None:
    def leave() -> None:
        with producer.transaction() as tx:
            tx.send("audit", b"one")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        leave()
    assert stored(fakes, "audit") == []
    assert fakes[0].inner.transactions() == []


def test_an_explicit_end_is_the_end(fakes: list[Any], producer: Any) -> None:
    """Behind it nothing is taken, and the block's own end does nothing."""
    with producer.transaction() as tx:
        tx.send("audit", b"one")
        tx.commit()
        with pytest.raises(TransactionError, match=r"TX:\w+:1 has ended: .* committed"):
            tx.send("audit", b"late")
        with pytest.raises(TransactionError, match="has ended"):
            tx.commit()
    with producer.transaction() as tx:
        tx.send("audit", b"two")
        tx.rollback()
        with pytest.raises(TransactionError, match="rolled back"):
            tx.rollback()
    assert stored(fakes, "audit") == [b"one"]


def test_without_messages_brokers_hear_nothing(broker: Any, client: Any) -> None:
    with client.producer() as producer:
        with producer.transaction() as tx:
            tx.send_many("test", [])
        with producer.transaction() as other:
            other.rollback()
    assert tx.state is TransactionState.COMMITTED
    assert other.state is TransactionState.ROLLED_BACK
    assert "begin" not in broker.statistics().commands


@pytest.mark.slow
def test_the_first_message_chooses_the_broker(fakes: list[Any], producer: Any) -> None:
    """The rest goes to its partitions, by turns or by key; others are refused."""
    with producer.transaction(keys="local") as tx:
        tx.send("test", b"0", partition="1-0")
        places = {tx.send("test", b"x").partition for _ in range(6)}
        keyed = {tx.send("test", b"y", key="user-1").partition for _ in range(3)}
        assert {place.broker_id for place in places | keyed} == {1}
        assert len(places) == 3
        assert len(keyed) == 1
        with pytest.raises(TransactionError, match=r"audit: broker 1, .* no partition"):
            tx.send("audit", b"z")
        with pytest.raises(TransactionError, match="no partition 0-1 of it"):
            tx.send("test", b"z", partition="0-1")
        tx.send("far", b"goes on")
    assert len(stored(fakes)) == 10
    assert stored(fakes, "audit") == []


KEYS = [f"user-{number}" for number in range(12)]


@pytest.mark.slow
def test_a_key_goes_to_one_partition_inside_and_outside(
    fakes: list[Any], client: Any, producer: Any
) -> None:
    """Issue 30, row 7: it is never moved in silence. XA has it at any broker."""
    outside = {key: producer.send("test", b"", key=key).partition for key in KEYS}
    theirs = [key for key in KEYS if outside[key].broker_id != 1]
    assert 0 < len(theirs) < len(KEYS)
    with producer.transaction() as tx:
        tx.send("test", b"0", partition="1-0")
        for key in KEYS:
            if key in theirs:
                name = outside[key].name
                wanted = (
                    rf"key '{key}' belongs to partition {name}, not to broker 1, .*"
                )
                with pytest.raises(TransactionError, match=f"{wanted}client.xa.*local"):
                    tx.send("test", b"", key=key)
            else:
                assert tx.send("test", b"", key=key).partition == outside[key]
    with client.xa(qualifier="keys") as xa:
        xa.begin(xa.xid(1, "keys"))
        inside = {key: xa.send("test", b"", key=key).partition for key in KEYS}
        xa.rollback()
    assert inside == outside
    assert len(stored(fakes)) == len(KEYS) + 1 + len(KEYS) - len(theirs)


@pytest.mark.slow
def test_keys_without_a_partition_of_their_own_stay_at_the_broker(client: Any) -> None:
    """By `keys="local"`, or a selector that moves its messages."""
    with client.producer() as producer, producer.transaction(keys="local") as tx:
        tx.send("test", b"0", partition="1-0")
        assert {tx.send("test", b"", key=key).partition.broker_id for key in KEYS} == {
            1
        }
    with (
        client.producer(selector=RoundRobin()) as producer,
        producer.transaction() as tx,
    ):
        tx.send("test", b"0", partition="1-0")
        assert {tx.send("test", b"", key=key).partition.broker_id for key in KEYS} == {
            1
        }
    with client.producer() as producer, pytest.raises(ConfigError, match="keys: exp"):
        producer.transaction(keys="remote")


def test_arguments_are_refused_before_anything_is_sent(
    broker: Any, producer: Any
) -> None:
    """And the transaction goes on."""
    for wrong in (0, -1, float("nan"), "5", True):
        with pytest.raises((TypeError, ConfigError), match="timeout"):
            producer.transaction(timeout=wrong)
    with producer.transaction() as tx:
        with pytest.raises(ConfigError):
            tx.send("a b", b"x")
        with pytest.raises(ConfigError):
            tx.send("test", b"x", partition="nowhere")
        with pytest.raises(TypeError):
            tx.send("test", "text")
        with pytest.raises(TypeError):
            tx.send_many("test", b"one message")
        with pytest.raises(NoBrokerError):
            tx.send("nosuch", b"x", timeout=0.05)
        assert "begin" not in broker.statistics().commands
        tx.send("audit", b"ok")
    assert broker.payloads("audit") == [b"ok"]


@pytest.mark.slow
def test_a_list_is_on_its_way_together(broker: Any, producer: Any) -> None:
    """Behind the first put: the broker has all of them before it answers any."""
    data = [b"%d" % number for number in range(100)]
    with producer.transaction() as tx:
        tx.send("audit", b"first")
        broker.inject(FaultKind.SWALLOW, count=100)
        with pytest.raises(RequestTimeoutError):
            tx.send_many("audit", data, timeout=2.0)
        wait_until(lambda: broker.statistics().commands["put"] == 101)
        tx.rollback()
    with producer.transaction() as tx:
        results = tx.send_many("audit", data * 11)
    assert len({one.message_id for one in results}) == 1100
    assert sorted(broker.payloads("audit")) == sorted(data * 11)


def test_a_list_mixes_partitions_and_attributes(
    fakes: list[Any], producer: Any
) -> None:
    """One result for each, in the order of the list."""
    listed = [
        OutgoingMessage(b"a", "k=v", partition="0-1"),
        OutgoingMessage(b"b", None, partition="0-0"),
        b"c",
        OutgoingMessage(b"d", "", key="key"),
    ]
    with producer.transaction(keys="local") as tx:
        results = tx.send_many("test", listed)
    numbers = [one.partition.partition for one in results]
    assert numbers[:2] == [1, 0]
    for data, result in zip([b"a", b"b", b"c", b"d"], results, strict=True):
        place = result.partition.partition
        assert data in fakes[0].stored("test", place)
        ids = [record.id for record in fakes[0].inner.records("test", place)]
        assert result.message_id in ids


def test_messages_that_wait_for_each_other_keep_their_order(
    fakes: list[Any], producer: Any
) -> None:
    data = [b"%d" % number for number in range(20)]
    with producer.transaction() as tx:
        for one in data:
            tx.send("test", one, partition=HERE)
    assert fakes[0].stored("test", 0) == data


def test_threads_that_send_together_begin_once(broker: Any, producer: Any) -> None:
    data = [b"%d" % number for number in range(16)]
    with producer.transaction() as tx, ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda one: tx.send("audit", one), data))
    assert len({one.message_id for one in results}) == len(data)
    assert sorted(broker.payloads("audit")) == sorted(data)
    assert broker.statistics().commands["begin"] == 1


# -- what goes wrong ------------------------------------------------------------------


def test_a_refused_message_lets_nothing_be_committed(
    broker: Any, producer: Any
) -> None:
    """Also when the program goes on as if nothing had been."""
    tx = producer.transaction()
    tx.send("audit", b"one")
    broker.inject(FaultKind.REFUSE, body=b"Closed MessageStore.")
    with pytest.raises(ServerError, match="Closed MessageStore"):
        tx.send("audit", b"two")
    assert tx.state is TransactionState.FAILED
    with pytest.raises(TransactionError, match=r"failed and can only .*MessageStore"):
        tx.send("audit", b"three")
    with pytest.raises(TransactionRolledBackError, match="a message had failed"):
        tx.commit()
    assert tx.state is TransactionState.ROLLED_BACK
    assert broker.payloads("audit") == broker.transactions() == []


def test_one_of_a_list_that_fails_fails_the_transaction(
    broker: Any, producer: Any
) -> None:
    broker.inject(FaultKind.REFUSE, after=7, body=b"no")

    def send() -> None:
        with producer.transaction() as tx:
            tx.send_many("audit", [b"%d" % number for number in range(20)])

    with pytest.raises(ServerError, match="no"):
        send()
    assert broker.payloads("audit") == broker.transactions() == []


@pytest.mark.parametrize("world", WORLDS)
def test_a_transaction_whose_time_is_over_is_rolled_back(world: str) -> None:
    """The broker says so to the next message, and to the commit."""
    clock = ManualClock()
    with (
        FakeBroker(clock=clock) as broker,
        WORLDS[world](brokers=[str(broker.address)], **QUICK) as client,
        client.producer() as producer,
    ):
        tx = producer.transaction(timeout=1.2)
        tx.send("test", b"one")
        other = producer.transaction(timeout=1.2)
        other.send("test", b"two")
        clock.advance_s(1.9)
        assert len(broker.transactions()) == 2
        clock.advance_s(0.2)
        with pytest.raises(TransactionRolledBackError, match="its time was over"):
            tx.send("test", b"three")
        with pytest.raises(TransactionRolledBackError, match="is not committed"):
            other.commit()
        assert broker.payloads() == []


@pytest.mark.parametrize("fault", [FaultKind.DROP, FaultKind.DROP_STORED])
def test_a_commit_without_an_answer_is_in_doubt(
    broker: Any, producer: Any, fault: FaultKind
) -> None:
    """Whether it was carried out or not; it is sent once."""
    tx = producer.transaction()
    tx.send("audit", b"one")
    broker.inject(fault, verb="commit_one_phase")
    with pytest.raises(
        TransactionInDoubtError, match=r"in doubt, not failed: .* connection to .* lost"
    ):
        tx.commit()
    assert tx.state is TransactionState.IN_DOUBT
    assert broker.statistics().commands["commit_one_phase"] == 1
    expected = [b"one"] if fault is FaultKind.DROP_STORED else []
    assert broker.payloads("audit") == expected
    with pytest.raises(TransactionError, match="has ended: it is in doubt"):
        tx.rollback()


def test_a_commit_that_is_not_answered_in_time_is_in_doubt(
    broker: Any, producer: Any
) -> None:
    tx = producer.transaction()
    tx.send("audit", b"one")
    broker.inject(FaultKind.SWALLOW_STORED, verb="commit_one_phase")
    with pytest.raises(TransactionInDoubtError, match="no answer before the deadline"):
        tx.commit(timeout=0.05)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (503, b"busy", TransactionRolledBackError),
        (500, b"XAException:code=104,msg=STORE COMMIT FAILED", TransactionError),
        (500, b"java.io.IOException", TransactionInDoubtError),
    ],
)
def test_a_refused_commit_says_what_is_certain(
    broker: Any, producer: Any, status: int, body: bytes, kind: type[Exception]
) -> None:
    tx = producer.transaction()
    tx.send("audit", b"one")
    broker.inject(FaultKind.REFUSE, verb="commit_one_phase", status=status, body=body)
    with pytest.raises(kind, match=re.escape(body.decode()[-10:])):
        tx.commit()
    is_certain = kind is not TransactionInDoubtError
    expected = TransactionState.ROLLED_BACK if is_certain else TransactionState.IN_DOUBT
    assert tx.state is expected


def test_a_connection_that_is_lost_before_the_commit_leaves_no_doubt(
    broker: Any, producer: Any
) -> None:
    """The transaction lived on it, and the commit never left."""
    tx = producer.transaction()
    tx.send("audit", b"one")
    broker.drop_connections()
    wait_until(lambda: broker.statistics().open_connection_count == 0)

    def is_certain() -> bool:
        try:
            tx.commit()
        except TransactionRolledBackError:
            return True
        return False

    assert is_certain()
    assert broker.statistics().commands["commit_one_phase"] == 0


def test_a_broker_that_is_gone_ends_a_rollback_quietly(
    broker: Any, producer: Any
) -> None:
    """Messages that are never committed are never read."""
    tx = producer.transaction()
    tx.send("audit", b"one")
    broker.go_away()
    tx.rollback()
    assert tx.state is TransactionState.ROLLED_BACK


def test_a_producer_that_is_closed_takes_no_more(broker: Any, client: Any) -> None:
    producer = client.producer()
    tx = producer.transaction()
    tx.send("audit", b"one")
    producer.close()
    with pytest.raises(ClosedError):
        tx.send("audit", b"two")
    with pytest.raises(ClosedError):
        producer.transaction()
    tx.rollback()
    assert broker.transactions() == []


def test_the_key_is_legal_whatever_the_machine_is_called(
    broker: Any, producer: Any
) -> None:
    """No colon of an IPv6 address, no space; numbers grow."""
    with producer.transaction() as tx:
        tx.send("audit", b"one")
        (key,) = broker.transactions()
        assert re.fullmatch(r"TX:[A-Za-z0-9._~-]+:1", key)
        assert key == tx.id
    with producer.transaction() as tx:
        assert tx.id.endswith(":2")


class LimitedConnection:
    """Limits that a broker announced, and nothing else: nothing is sent over it."""

    capabilities = Capabilities("1", payload_bytes_max=100)


def test_a_message_over_the_announced_limit_is_refused_here() -> None:
    parts: Any = None
    connection: Any = LimitedConnection()
    branch = Branch(parts, connection, BrokerId(0), LocalTransactionId("s", 1))
    branch.check([bytes(100)])
    with pytest.raises(MessageTooLargeError, match="at most 100 bytes"):
        branch.check([b"", bytes(101)])
