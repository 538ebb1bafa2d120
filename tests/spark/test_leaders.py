"""Tasks of Spark whose broker is elsewhere since they were planned."""

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace

import pytest

from metaq.errors import CoordinationError, NoBrokerError
from metaq.model import BrokerAddress, BrokerId, Offset, TopicPartition
from metaq.protocol.commands import Get, Mput, OffsetQuery, Result
from metaq.protocol.texts import NOT_LEADER, TOO_FEW_REPLICAS, with_code
from metaq.spark.leaders import FindLeaders, follow_leaders, look
from metaq.spark.options import SourceOptions
from metaq.spark.plan import ReadRange
from metaq.spark.sink.outbox import NamedSender
from metaq.spark.source.read_task import ReadTask, read_rows
from metaq.testing.embedded import embedded_broker
from tests.client.memory_broker import OURS, MemoryBroker
from tests.rigs.ports import reserved_port
from tests.rigs.virtual_time import run_virtually
from tests.spark.brokers import TOPIC, numbered, own_clusters, publish, tp, wire

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ONE_BROKER = {"MemoryBroker": "brokers are silent, away and refuse on cue"}

ID = BrokerId(7)
PARTITION = TopicPartition("t", ID, 0)
HERE, THERE = BrokerAddress("here", 1), BrokerAddress("there", 1)


def finding(address: object) -> FindLeaders:
    """Return what finds each broker at one address, or fails with an error."""

    def find(brokers: Collection[BrokerId]) -> "Future[Mapping[BrokerId, str]]":
        found: Future[Mapping[BrokerId, str]] = Future()
        if isinstance(address, Exception):
            found.set_exception(address)
        else:
            found.set_result(dict.fromkeys(brokers, str(address)))
        return found

    return find


# -- looks ----------------------------------------------------------------------------


def follow(find: FindLeaders, progress: Callable[[], object]) -> list[BrokerAddress]:
    """Follow for some looks; return the addresses that were moved to."""
    moves: list[BrokerAddress] = []

    async def scenario() -> None:
        async with asyncio.timeout(0.5):
            await follow_leaders(
                find,
                lambda: [ID],
                progress,
                lambda _broker, at: moves.append(at),
                pause_s=0.05,
            )

    with pytest.raises(TimeoutError):
        run_virtually(scenario())
    return moves


def test_the_cluster_is_asked_while_a_task_waits_in_vain() -> None:
    """Not while answers come, and not while none is waited for."""
    numbers = iter(range(1_000_000))
    assert THERE in follow(finding(THERE), lambda: 5)
    assert follow(finding(THERE), lambda: next(numbers)) == []
    assert follow(finding(THERE), lambda: None) == []


def test_a_cluster_that_cannot_be_asked_is_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The task goes on with the address that it has."""
    error = CoordinationError("no ZooKeeper at h:1")
    assert asyncio.run(look(finding(error), [ID])) == {}
    assert "leaders of brokers are not known: no ZooKeeper at h:1" in caplog.text
    assert follow(finding(error), lambda: 5) == []


# -- writes ---------------------------------------------------------------------------


@contextmanager
def sender_from(address: object, find: FindLeaders) -> Iterator[NamedSender]:
    with NamedSender({ID: str(address)}, timeout_s=5, find=find) as sender:
        yield sender


def send(sender: NamedSender) -> None:
    sender.send(PARTITION, [b"a", b"b"], [0, 0], producer="p", sequence=0, spare="s")
    sender.flush()


def refusal(word: str) -> Callable[[object], Result | None]:
    body = with_code("Put message failed", word, {}).encode()
    return lambda c: Result(503, body, c.opaque) if isinstance(c, Mput) else None


@pytest.mark.parametrize("fault", ["refuses", "is silent", "hangs up"])
def test_a_batch_goes_to_the_next_leader(fault: str) -> None:
    """The former one refuses it, is silent, or hangs up."""
    dedup = replace(OURS, dedup=True)
    with MemoryBroker(dedup) as former, MemoryBroker(dedup) as leader:
        match fault:
            case "refuses":
                former.refuse = refusal(NOT_LEADER)
            case "is silent":
                former.stay_silent = lambda command: isinstance(command, Mput)
            case "hangs up":
                former.hang_up = lambda command: isinstance(command, Mput)
                former.stop_listening()
        with sender_from(former.address, finding(leader.address)) as sender:
            if fault == "hangs up":
                former.hang_up = lambda _command: False
            send(sender)
            assert sender.statistics().doubtful_count == 0
        assert leader.payloads("t", 0) == [b"a", b"b"]
        assert former.payloads("t", 0) == []


def test_a_leader_that_is_gone_at_the_first_batch_is_replaced() -> None:
    """Before anything was connected; without a way to ask it is an error."""
    with reserved_port() as port, MemoryBroker() as leader:
        address = BrokerAddress("127.0.0.1", port)
        with sender_from(address, finding(leader.address)) as sender:
            send(sender)
        assert leader.payloads("t", 0) == [b"a", b"b"]
        with (
            NamedSender({ID: str(address)}, timeout_s=0.3) as sender,
            pytest.raises(NoBrokerError),
        ):
            send(sender)


def test_a_former_leader_that_stays_away_fails_nothing_later() -> None:
    """Attempts to connect to it end after the batches went elsewhere."""
    with MemoryBroker() as former, MemoryBroker() as leader:
        find = finding(leader.address)
        with NamedSender({ID: str(former.address)}, timeout_s=2.5, find=find) as sender:
            former.refuse = refusal(NOT_LEADER)
            former.hang_up = lambda command: isinstance(command, Mput)
            former.stop_listening()
            sender.send(PARTITION, [b"a"], [0], producer="p", sequence=0, spare="s")
            sender.flush()
            time.sleep(3.0)  # its time to connect is over
            sender.send(PARTITION, [b"b"], [0], producer="p", sequence=1, spare="s")
            sender.flush()
        assert leader.payloads("t", 0) == [b"a", b"b"]


def test_too_few_replicas_are_waited_for() -> None:
    """More often than what is in doubt is sent again."""
    refuse = refusal(TOO_FEW_REPLICAS)
    with MemoryBroker() as leader:
        tries: list[object] = []

        def some(command: object) -> Result | None:
            tries.append(command)
            return refuse(command) if len(tries) < 12 else None

        leader.refuse = some
        with sender_from(leader.address, finding(leader.address)) as sender:
            send(sender)
        assert leader.payloads("t", 0) == [b"a", b"b"]


# -- reads ----------------------------------------------------------------------------


def test_a_range_is_read_from_the_next_leader() -> None:
    """The broker that was planned listens no more."""
    with (
        embedded_broker(topics={TOPIC: 1}) as broker,
        reserved_port() as port,
        own_clusters(),
    ):
        publish(broker, numbered(100))
        given = wire(broker, subscribe=TOPIC)
        options = SourceOptions.from_map(given, is_stream=False)
        task = ReadTask(
            ReadRange(tp(0), Offset(0), Offset(3500)), f"meta://127.0.0.1:{port}"
        )
        batches = list(read_rows(task, options))
    assert [v for b in batches for v in b.column("value").to_pylist()] == numbered(100)


def test_a_range_that_a_former_leader_does_not_have_is_read_from_the_next_one() -> None:
    """It hung, and names an end of before: nothing is lost."""

    def old(command: object) -> Result | None:
        match command:
            case Get():
                return Result(404, b"nothing there", command.opaque)
            case OffsetQuery():
                return Result(200, b"35" if command.offset else b"0", command.opaque)
        return None

    with (
        embedded_broker(topics={TOPIC: 1}) as broker,
        MemoryBroker(replace(OURS, follow=True)) as former,
        own_clusters(),
    ):
        former.refuse = old
        publish(broker, numbered(100))
        given = wire(broker, subscribe=TOPIC)
        options = SourceOptions.from_map(given, is_stream=False)
        task = ReadTask(ReadRange(tp(0), Offset(0), Offset(3500)), str(former.address))
        batches = list(read_rows(task, options))
    assert [v for b in batches for v in b.column("value").to_pylist()] == numbered(100)
