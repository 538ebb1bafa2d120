"""Puts that a replica of a set refuses: sent again, until the send's deadline."""

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from metaq.errors import NotLeaderError, TooFewReplicasError, UnavailableError
from metaq.peer.replies import parse_receipt
from metaq.protocol.commands import Result
from metaq.protocol.texts import NOT_LEADER, TOO_FEW_REPLICAS, with_code
from metaq.testing.fake_broker import FakeBroker, FaultKind
from metaq.testing.zk import MemoryZooKeeper
from tests.client.producing import Act, StandInBroker, at, producing
from tests.client.worlds import QUICK, WORLDS
from tests.rigs.virtual_time import run_virtually
from tests.rigs.waiting import wait_until

KINDS = {NOT_LEADER: NotLeaderError, TOO_FEW_REPLICAS: TooFewReplicasError}
OFTEN = 1_000
Pair = tuple[FakeBroker, FakeBroker]

ONE_BROKER = {"replicas": "two of one id, which refuse on request"}


def refusal(word: str) -> bytes:
    return with_code("Put message failed", word, {"address": None}).encode()


@pytest.fixture
def zookeeper() -> MemoryZooKeeper:
    return MemoryZooKeeper()


@pytest.fixture
def replicas(zookeeper: MemoryZooKeeper) -> Iterator[Pair]:
    """Two brokers of one id; the first is registered."""
    first, second = (FakeBroker(coordinator=zookeeper.coordinator) for _ in range(2))
    with first:
        yield first, second
        second.stop()


@pytest.mark.parametrize("status", [500, 503])
@pytest.mark.parametrize("word", KINDS)
def test_a_code_says_that_a_put_is_not_stored(word: str, status: int) -> None:
    """Under either status; the error is one that passes."""
    with pytest.raises(UnavailableError, match=r"^Put message failed$") as caught:
        parse_receipt(Result(status, refusal(word), 1))
    assert type(caught.value) is KINDS[word]
    assert caught.value.retriable
    assert caught.value.refresh_metadata == (word == NOT_LEADER)


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("word", KINDS)
def test_a_refused_put_is_sent_until_the_leader_takes_it(
    replicas: Pair,
    zookeeper: MemoryZooKeeper,
    word: str,
    world: str,
) -> None:
    """Single puts and many; what was refused is stored once, in order."""
    leader, _ = replicas
    leader.inject(FaultKind.REFUSE, count=5, status=503, body=refusal(word))
    client: Any = WORLDS[world](coordinator=zookeeper.coordinator, **QUICK)
    with client, client.producer() as producer:
        producer.send("test", b"0", partition="0-0")
        leader.inject(FaultKind.REFUSE, count=4, status=503, body=refusal(word))
        producer.send_many("test", [b"1", b"2"])
    assert leader.payloads()[0] == b"0"
    assert sorted(leader.payloads()) == [b"0", b"1", b"2"]


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("word", KINDS)
def test_a_refusal_that_lasts_ends_at_the_deadline_as_not_stored(
    replicas: Pair,
    zookeeper: MemoryZooKeeper,
    word: str,
    world: str,
) -> None:
    """The error is the refusal, not an unknown outcome; the pauses grow."""
    leader, _ = replicas
    leader.inject(FaultKind.REFUSE, count=OFTEN, status=503, body=refusal(word))
    client: Any = WORLDS[world](coordinator=zookeeper.coordinator, **QUICK)
    with (
        client,
        client.producer(timeout_s=1.0) as producer,
        pytest.raises(KINDS[word]),
    ):
        producer.send("test", b"x", partition="0-0")
    assert leader.payloads() == []
    assert 3 <= leader.statistics().commands["put"] <= 40


@pytest.mark.parametrize("world", WORLDS)
def test_a_new_leader_gets_what_the_old_one_refused(
    replicas: Pair, zookeeper: MemoryZooKeeper, world: str
) -> None:
    """As soon as ZooKeeper shows its address."""
    old, new = replicas
    body = refusal(NOT_LEADER)
    old.inject(FaultKind.REFUSE, count=OFTEN, status=503, body=body)
    client: Any = WORLDS[world](coordinator=zookeeper.coordinator, **QUICK)
    with client, client.producer() as producer:
        future = producer.send_nowait("test", b"x", partition="0-0")
        wait_until(lambda: old.statistics().commands["put"] >= 3)
        old.go_away()
        new.start()
        producer.flush()
        assert future.done()
    assert new.payloads() == [b"x"]
    assert old.payloads() == []


def test_a_new_leader_is_asked_at_once() -> None:
    """The pause after refusals is one of the leader that refused, not of the next."""

    async def main() -> None:
        old, new = StandInBroker(0), StandInBroker(0)
        new.address = type(old.address)("stand-in", 2000)
        old.default = Act.BUSY
        async with producing(old, retry_first_s=5.0, retry_max_s=5.0) as world:
            world.pool.brokers[new.address] = new
            future = await world.producer.send_nowait("test", b"x", partition="0-0")
            await asyncio.sleep(0.1)
            assert len(old.commands) == 1
            world.metadata.tell({0: 1}, {0: new.address})
            await asyncio.sleep(0.1)
            assert future.done()
            # It pauses as well when it refuses.
            new.default = Act.BUSY
            later = await world.producer.send_nowait("test", b"y", partition="0-0")
            await asyncio.sleep(0.2)
            assert len(new.commands) == 2
            new.default = Act.STORE
            assert (await later).partition == at(0)
        assert new.stored() == [b"x", b"y"]

    run_virtually(main())


def test_a_batch_in_doubt_keeps_its_number_at_the_new_leader() -> None:
    """It recognises what the old one had stored; refusals do not take that away."""

    async def main() -> None:
        old, new = StandInBroker(0), StandInBroker(0)
        new.address = type(old.address)("stand-in", 2000)
        old.acts = deque([Act.CUT_STORED, Act.BUSY, Act.BUSY])
        old.default = Act.BUSY
        new.acts = deque([Act.BUSY, Act.BUSY])
        async with producing(old) as world:
            world.pool.brokers[new.address] = new
            future = await world.producer.send_nowait("test", b"x", partition="0-0")
            await asyncio.sleep(1.0)
            # Replication: what is known of the batch is at the new leader as well.
            new.seen, new.expected = dict(old.seen), dict(old.expected)
            new.ends, new.payloads = dict(old.ends), {0: list(old.stored())}
            world.metadata.tell({0: 1}, {0: new.address})
            assert (await future).offset == 0
        assert new.stored() == old.stored() == [b"x"]

    run_virtually(main())
