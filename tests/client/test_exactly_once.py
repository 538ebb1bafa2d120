"""Messages made of a batch are written exactly once, or never; both worlds."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from metaq.client import (
    Client,
    ConfigError,
    MemoryOffsets,
    OwnershipLostError,
    TransactionError,
    TransactionRolledBackError,
)
from metaq.client.consume.exactly_once import FLUSH_COUNT
from metaq.client.decisions.rules import make_decision
from metaq.model import BrokerId, TopicPartition
from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from metaq.testing.zk import MemoryZooKeeper
from metaq.zk.decisions import batch_xid
from metaq.zk.paths import NodePaths
from tests.client.worlds import WORLDS, payloads
from tests.rigs.waiting import wait_until

PATHS = NodePaths()
ONE_BROKER = {"brokers": "exactly once is not written to MetaQ 1.4"}
Brokers: TypeAlias = "list[EmbeddedBroker]"
MANUAL: dict[str, Any] = {"commit_interval_s": None, "start": "earliest"}
BATCH: dict[str, Any] = {"max_count": 10, "max_wait_s": 0.2}


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    with ExitStack() as stack:
        server = MemoryZooKeeper()
        yield [
            stack.enter_context(
                embedded_broker(
                    topics={"test": 1},
                    data_path=Path(tmp_path_factory.mktemp(f"b{number}")),
                    zookeeper=server,
                    settings={"brokerId": str(number)},
                )
            )
            for number in range(2)
        ]


@pytest.fixture
def topics(brokers: Brokers, request: pytest.FixtureRequest) -> tuple[str, str]:
    """Return an input of 30 messages at broker 0, and an output at both."""
    name = f"t{abs(hash(request.node.name)) % 10**9}"
    brokers[0].create_topic(f"{name}-in", 1)
    for broker in brokers:
        broker.create_topic(f"{name}-out", 1)
    with Client(**brokers[0].client_options) as client, client.producer() as producer:
        for number in range(30):
            producer.send(f"{name}-in", b"%d" % number)
    return f"{name}-in", f"{name}-out"


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, brokers: Brokers) -> Iterator[Any]:
    with WORLDS[request.param](**brokers[0].client_options) as one:
        yield one


def written(client: Any, topic: str) -> list[int]:
    return sorted(int(data) for data in payloads(client.browse(topic)))


def first_of(consumer: Any) -> Any:
    """Return the next batch, and leave the loop."""
    with closing(consumer.batches(**BATCH)) as batches:
        return next(batches)


def copy(tx: Any, batch: Any, topic: str) -> None:
    """Send what is made of a batch, to one broker after the other."""
    for message in batch:
        number = int(message.data)
        tx.send(topic, message.data, partition=f"{number % 2}-0")


def committed(brokers: Brokers, group: str, topic: str) -> bytes | None:
    path = f"/meta/consumers/{group}/offsets/{topic}/0-0"
    node = brokers[0].zookeeper.tree().get(path)
    return None if node is None else node.data


def prepared(brokers: Brokers, group: str) -> list[Any]:
    with (
        Client(**brokers[0].client_options) as client,
        client.xa(f"group-{group}") as xa,
    ):
        return list(xa.recover())


@pytest.mark.slow
def test_each_batch_is_written_once_with_its_offsets(
    brokers: Brokers, client: Any, topics: tuple[str, str]
) -> None:
    source, target = topics
    with (
        client.consumer(source, [source], **MANUAL) as consumer,
        client.producer() as p,
    ):
        offsets = []
        for batch in consumer.batches(**BATCH):
            with p.exactly_once(batch) as tx:
                copy(tx, batch, target)
            assert written(client, target)[-1] == int(batch[-1].data)
            offsets += batch.offsets.values()
            if len(written(client, target)) == 30:
                break
    assert written(client, target) == list(range(30))
    found = committed(brokers, source, source)
    assert found is not None
    assert int(found.split(b"-")[1]) == offsets[-1]
    assert prepared(brokers, source) == []
    assert brokers[0].zookeeper.names(PATHS.group_tokens(source)) == ()


@pytest.mark.slow
def test_a_filter_leaves_out_what_is_not_written(
    brokers: Brokers, client: Any, topics: tuple[str, str]
) -> None:
    """The offsets move past it with the batch, and another member goes on there."""
    source, target = topics
    options = {**MANUAL, "where": "tag = 'copy'"}
    with client.producer() as p:
        for number in range(40):
            p.send(source, b"%d" % number, tag="copy" if number % 4 == 0 else "no")
        for expected in (range(0, 20, 4), range(20, 40, 4)):
            with client.consumer(source, [source], **options) as consumer:
                many = {"max_count": 5, "max_wait_s": 30.0}
                batch = next(iter(consumer.batches(**many)))
                assert [int(one.data) for one in batch] == list(expected)
                with p.exactly_once(batch) as tx:
                    copy(tx, batch, target)
    assert written(client, target) == list(range(0, 40, 4))
    found = committed(brokers, source, source)
    assert found is not None
    assert int(found.split(b"-")[1]) >= batch[-1].next_offset


def test_after_an_exception_nothing_is_written_and_the_batch_comes_again(
    brokers: Brokers, client: Any, topics: tuple[str, str]
) -> None:
    source, target = topics
    seen = []
    with (
        client.consumer(source, [source], **MANUAL) as consumer,
        client.producer() as p,
    ):
        for batch in consumer.batches(**BATCH):
            seen.append([int(one.data) for one in batch])
            try:
                with p.exactly_once(batch) as tx:
                    copy(tx, batch, target)
                    if len(seen) == 2:
                        raise ValueError("a handler fails")
            except ValueError:
                assert written(client, target) == seen[0]
            if seen[-1][-1] == 29:
                break
    assert seen[1] == seen[2]
    assert written(client, target) == list(range(30))
    assert prepared(brokers, source) == []


def test_a_batch_of_which_nothing_is_made_moves_the_offsets(
    brokers: Brokers, client: Any, topics: tuple[str, str]
) -> None:
    source, target = topics
    with (
        client.consumer(source, [source], **MANUAL) as consumer,
        client.producer() as p,
    ):
        batch = first_of(consumer)
        with p.exactly_once(batch):
            pass
    (end,) = batch.offsets.values()
    assert (committed(brokers, source, source) or b"").endswith(b"-%d" % end)
    assert written(client, target) == []


def test_a_batch_is_written_once_and_one_at_a_time(
    client: Any, topics: tuple[str, str]
) -> None:
    source, target = topics
    with (
        client.consumer(source, [source], **MANUAL) as consumer,
        client.producer() as p,
    ):
        batch = first_of(consumer)
        tx = p.exactly_once(batch)
        with pytest.raises(TransactionError, match="no exactly-once block is open"):
            tx.send(target, b"1")
        with tx:
            with pytest.raises(TransactionError, match=r"another batch.*has not ended"):
                p.exactly_once(batch).__enter__()
            copy(tx, batch, target)
        with pytest.raises(TransactionError, match="write each batch once"):
            p.exactly_once(batch).__enter__()
        later = first_of(consumer)
        with pytest.raises(TransactionError, match="next messages were requested"):
            p.exactly_once(batch).__enter__()
        with p.exactly_once(later) as tx:
            copy(tx, later, target)
    assert written(client, target) == list(range(20))


def test_a_block_that_fails_after_the_next_request_has_both_batches_come_again(
    brokers: Brokers, client: Any, topics: tuple[str, str]
) -> None:
    """A reader that fetches ahead loses nothing, and gets its own error."""
    source, target = topics
    with (
        client.consumer(source, [source], **MANUAL) as consumer,
        client.producer() as p,
    ):
        first = first_of(consumer)
        tx = p.exactly_once(first).__enter__()
        copy(tx, first, target)
        ahead = first_of(consumer)
        error = ValueError("mine")
        assert not tx.__exit__(ValueError, error, None)
        with pytest.raises(OwnershipLostError, match="delivered again"):
            p.exactly_once(ahead).__enter__()
        for _ in range(3):
            batch = first_of(consumer)
            with p.exactly_once(batch) as tx:
                copy(tx, batch, target)
    assert written(client, target) == list(range(30))


def test_what_was_fetched_ahead_comes_again_when_its_own_block_fails(
    brokers: Brokers, client: Any, topics: tuple[str, str]
) -> None:
    source, target = topics
    with (
        client.consumer(source, [source], **MANUAL) as consumer,
        client.producer() as p,
    ):
        batch = first_of(consumer)
        with p.exactly_once(batch) as tx:
            copy(tx, batch, target)
            ahead = first_of(consumer)
        with pytest.raises(ValueError, match="mine"), p.exactly_once(ahead):
            raise ValueError("mine")
        again = first_of(consumer)
        assert [one.data for one in again] == [one.data for one in ahead]


def test_a_commit_in_the_block_is_refused(
    brokers: Brokers, client: Any, topics: tuple[str, str]
) -> None:
    """It would move the offsets, whatever becomes of the messages."""
    source, target = topics
    with (
        client.consumer(source, [source], **MANUAL) as consumer,
        client.producer() as p,
    ):
        batch = first_of(consumer)
        with p.exactly_once(batch) as tx:
            for commit in (batch.commit, consumer.commit):
                with pytest.raises(TransactionError, match="stores the offsets at its"):
                    commit()
            assert committed(brokers, source, source) is None
            copy(tx, batch, target)
        batch.commit()
    assert written(client, target) == list(range(10))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "commit_interval_s=None, got 5"),
        ({**MANUAL, "offsets": MemoryOffsets()}, "offsets in MemoryOffsets.*ZooKeeper"),
        ({**MANUAL, "partitions": ["0-0"]}, "not in ZooKeeper, which keeps"),
    ],
)
def test_a_consumer_that_cannot_decide_is_refused(
    client: Any, topics: tuple[str, str], options: dict[str, Any], sentence: str
) -> None:
    source, _target = topics
    options = {"start": "earliest", **options}
    with (
        client.consumer(source, [source], **options) as consumer,
        client.producer() as p,
    ):
        batch = first_of(consumer)
        with pytest.raises(ConfigError, match=sentence):
            p.exactly_once(batch).__enter__()
        with pytest.raises(TypeError, match="of this client, got list"):
            p.exactly_once([1])


def test_a_batch_of_another_client_is_refused(
    brokers: Brokers, client: Any, topics: tuple[str, str]
) -> None:
    source, _target = topics
    with (
        Client(**brokers[0].client_options) as other,
        other.consumer(source, [source], **MANUAL) as consumer,
        client.producer() as producer,
    ):
        batch = first_of(consumer)
        with pytest.raises(ConfigError, match="another client"):
            producer.exactly_once(batch)


def test_a_session_that_is_lost_in_the_block_writes_nothing(
    brokers: Brokers, client: Any, topics: tuple[str, str]
) -> None:
    """The partition is claimed again, and the batch comes again."""
    source, target = topics
    server = brokers[0].zookeeper
    with (
        client.consumer(source, [source], **MANUAL) as consumer,
        client.producer() as p,
    ):
        batch = first_of(consumer)
        owner = PATHS.owner(source, batch[0].partition)
        tx = p.exactly_once(batch).__enter__()
        copy(tx, batch, target)
        server.expire(server.owner_of(owner))
        with pytest.raises(OwnershipLostError):
            tx.__exit__(None, None, None)
        assert written(client, target) == []
        again = first_of(consumer)
        assert [one.data for one in again] == [one.data for one in batch]
        with p.exactly_once(again) as tx:
            copy(tx, again, target)
    assert written(client, target) == list(range(10))
    wait_until(lambda: prepared(brokers, source) == [])


@pytest.mark.slow
def test_a_block_that_takes_longer_than_its_transaction_may_says_so(
    client: Any, topics: tuple[str, str]
) -> None:
    source, target = topics
    with (
        client.consumer(source, [source], **MANUAL) as consumer,
        client.producer(transaction_timeout_s=1) as p,
    ):
        batch = first_of(consumer)
        tx = p.exactly_once(batch).__enter__()
        tx.send_many(target, [b"0"] * FLUSH_COUNT)
        time.sleep(1.5)
        with pytest.raises(TransactionRolledBackError, match="transaction_timeout_s=1"):
            tx.__exit__(None, None, None)
        assert first_of(consumer)[0].offset == batch[0].offset
    assert written(client, target) == []


@pytest.mark.parametrize("is_open", [False, True])
def test_a_batch_of_a_partition_that_went_and_came_again_is_not_written(
    brokers: Brokers, client: Any, topics: tuple[str, str], is_open: bool
) -> None:
    """It comes again, and what follows it is not passed over."""
    source, target = topics
    server = brokers[0].zookeeper
    with (
        client.consumer(source, [source], **MANUAL) as consumer,
        client.producer() as p,
    ):
        batch = first_of(consumer)
        tx = p.exactly_once(batch)
        if is_open:
            tx.__enter__()
            copy(tx, batch, target)
        before = consumer.statistics().rebalance_count
        server.remove(PATHS.owner(source, batch[0].partition))
        wait_until(lambda: consumer.statistics().rebalance_count > before)
        with pytest.raises(OwnershipLostError, match="delivered again"):
            tx.__exit__(None, None, None) if is_open else tx.__enter__()
        for _ in range(3):
            batch = first_of(consumer)
            with p.exactly_once(batch) as tx:
                copy(tx, batch, target)
    assert written(client, target) == list(range(30))


def begun(client: Any, group: str, token: str, target: str) -> Any:
    """Prepare two messages as a member did that is dead now; return the id."""
    xid = batch_xid(group, f"{group}_dead", token, 1)
    with client.xa(f"group-{group}") as xa:
        xa.begin(xid)
        for number in range(2):
            xa.send(target, b"%d" % number, partition=f"{number}-0")
        xa.prepare()
    return xid


def test_who_claims_a_partition_completes_what_is_decided_before_it_reads(
    brokers: Brokers, client: Any, topics: tuple[str, str]
) -> None:
    """A consumer that never writes exactly once does it as well."""
    source, target = topics
    xid = begun(client, source, "0a" * 16, target)
    server, place = brokers[0].zookeeper, TopicPartition(source, BrokerId(0), 0)
    decision = make_decision(xid, [BrokerId(0), BrokerId(1)])
    server.write(PATHS.group_decision(source, place), decision.encode())
    server.write(PATHS.group_tokens(source), b"")
    assert written(client, target) == []
    with client.consumer(source, [source], start="earliest") as consumer:
        assert consumer.receive(10) is not None
        assert written(client, target) == [0, 1]
    assert prepared(brokers, source) == []


@pytest.mark.slow
def test_who_claims_a_partition_rolls_back_what_a_dead_member_left(
    brokers: Brokers, client: Any, topics: tuple[str, str]
) -> None:
    """Branches of a living one stay."""
    source, target = topics
    server = brokers[0].zookeeper
    begun(client, source, "0b" * 16, target)
    living = begun(client, source, "0c" * 16, target)
    server.write(PATHS.group_token(source, "0c" * 16), b"g_living")
    with client.consumer(source, [source], start="earliest") as consumer:
        assert consumer.receive(10) is not None
        wait_until(lambda: prepared(brokers, source) == [living])
    server.remove(PATHS.group_token(source, "0c" * 16))
    with client.consumer(source, [source], start="earliest"):
        wait_until(lambda: prepared(brokers, source) == [])
    assert written(client, target) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"topic": 5},
        {"topic": "te st"},
        {"data": "text"},
        {"key": 5},
        {"headers": 5},
        {"tag": 5},
        {"attribute": b"a"},
        {"partition": "x"},
    ],
    ids=repr,
)
def test_a_wrong_argument_ends_the_block_and_nothing_is_written(
    brokers: Brokers, client: Any, topics: tuple[str, str], wrong: dict[str, Any]
) -> None:
    """By type or by value, at the call or at the end of the block."""
    source, target = topics
    with (
        client.consumer(source, [source], **MANUAL) as consumer,
        client.producer() as p,
    ):
        batch = first_of(consumer)
        with pytest.raises((TypeError, ConfigError)), p.exactly_once(batch) as tx:
            tx.send(**{"topic": target, "data": b"5", **wrong})
        assert first_of(consumer)[0].data == batch[0].data
    assert written(client, target) == []
    assert prepared(brokers, source) == []
