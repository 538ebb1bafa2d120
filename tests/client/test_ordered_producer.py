"""Order within a partition, despite failures of brokers, producer and disk."""

import asyncio
import contextlib
import errno
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from metaq.client.errors import OutcomeUnknownError
from metaq.client.names import parse_address
from metaq.client.partitioner import OutgoingMessage
from metaq.client.produce.batches import SendResult
from metaq.client.produce.ordered_producer import (
    REPLAY_GROUP,
    AsyncOrderedProducer,
    Spooled,
)
from metaq.client.session import AsyncClient
from metaq.client.spool import Spool, spool_name
from metaq.client.sync.client import Client
from metaq.errors import ClosedError, ConfigError, LogDirLockedError, StorageError
from metaq.fs import FileSystem, SystemFileSystem
from metaq.fs.calls import LinuxCalls
from metaq.model import BrokerId, TopicPartition
from metaq.testing.fake_broker import FaultKind
from tests.brokers import AnyBroker, StartBroker
from tests.client.asking import lacking
from tests.client.worlds import parts_of
from tests.rigs.fs import FaultyFileSystem
from tests.rigs.inside import use_disk
from tests.rigs.waiting import until, wait_until

SHORT_S = 0.1
"""Longest time of a send, where it is bound to fail."""


ONE_BROKER = {"java": "answers that come late or never"}


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    return start_broker({"test": 2})


@pytest.fixture
def java(start_metaq_1_4: StartBroker) -> Any:
    return start_metaq_1_4({"test": 2})


def client_of(broker: AnyBroker) -> AsyncClient:
    return AsyncClient(**broker.client_options)


def by_key(
    topic: str, partitions: Sequence[TopicPartition], message: OutgoingMessage
) -> TopicPartition:
    """Choose the partition whose number is the key."""
    return partitions[int(message.key)]


def waiting(producer: AsyncOrderedProducer) -> int:
    return sum(producer.statistics().waiting.values())


def test_messages_go_directly_to_the_partition_that_was_chosen(
    broker: AnyBroker, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with (
            client_of(broker) as client,
            client.ordered_producer(
                "test", "0:2", tmp_path, selector=by_key
            ) as producer,
        ):
            result = await producer.send(b"a", key="1", attribute="k=v")
            assert isinstance(result, SendResult)
            assert result.partition == TopicPartition("test", BrokerId(0), 1)
            assert producer.statistics().sent_count == 1

    asyncio.run(scenario())
    assert broker.stored("test", 1) == [b"a"]


@pytest.mark.slow
def test_what_cannot_be_sent_waits_and_everything_behind_it_too(
    broker: AnyBroker, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with (
            client_of(broker) as client,
            client.ordered_producer(
                "test", "0:2", tmp_path, selector=by_key
            ) as producer,
        ):
            await producer.send(b"0", key="0")
            await asyncio.to_thread(broker.stop)
            for number in range(1, 4):
                spooled = await producer.send(b"%d" % number, key="0", timeout=SHORT_S)
                assert isinstance(spooled, Spooled)
                assert spooled.waiting_count == number
            assert "test/0-0" in producer.statistics().problems[0]
            await asyncio.to_thread(broker.start)
            # Whether it is spooled or not, the next one comes after it.
            await producer.send(b"4", key="0")
            await until(lambda: not waiting(producer))
            assert isinstance(await producer.send(b"5", key="0"), SendResult)
            assert producer.statistics().problems == ()

    asyncio.run(scenario())
    assert broker.stored() == [b"%d" % n for n in range(6)]


@pytest.mark.slow
def test_a_replay_that_finds_no_memory_comes_again(
    broker: AnyBroker, tmp_path: Path
) -> None:
    """Without any other news, and is a problem of the producer's until then."""

    async def scenario() -> None:
        async with (
            client_of(broker) as client,
            client.ordered_producer(
                "test", "0:2", tmp_path, selector=by_key
            ) as producer,
        ):
            await producer.send(b"0", key="0")
            await asyncio.to_thread(broker.stop)
            await producer.send(b"1", key="0", timeout=SHORT_S)
            with lacking(Spool, "read"):
                await asyncio.to_thread(broker.start)
                await until(
                    lambda: "MemoryError" in " ".join(producer.statistics().problems)
                )
            await until(lambda: not waiting(producer))
            assert not producer.statistics().problems

    asyncio.run(scenario())
    assert broker.stored("test", 0) == [b"0", b"1"]


@pytest.mark.slow
def test_a_closed_partition_keeps_its_order(broker: AnyBroker, tmp_path: Path) -> None:
    """The defect of MetaQ's producer: there, what comes later overtakes."""
    broker.close_partition()

    async def scenario() -> None:
        async with (
            client_of(broker) as client,
            client.ordered_producer(
                "test", "0:2", tmp_path, selector=by_key
            ) as producer,
        ):
            spooled = None
            while spooled is None:
                # An attempt that is under way at the end may be stored; it is refused.
                with contextlib.suppress(OutcomeUnknownError):
                    spooled = await producer.send(b"0", key="0", timeout=2.0)
            assert spooled == Spooled(TopicPartition("test", BrokerId(0), 0), 1)
            broker.open_partition()
            for number in range(1, 30):
                await producer.send(b"%d" % number, key="0")
            await until(lambda: not waiting(producer))

    asyncio.run(scenario())
    assert broker.stored() == [b"%d" % n for n in range(30)]


@pytest.mark.slow
def test_what_is_spooled_survives_and_goes_before_what_comes_then(
    broker: AnyBroker, tmp_path: Path
) -> None:
    async def scenario() -> None:
        await asyncio.to_thread(broker.stop)
        async with client_of(broker) as client:
            async with client.ordered_producer(
                "test", ["0-1"], tmp_path, timeout_s=SHORT_S
            ) as producer:
                for number in range(3):
                    await producer.send(b"%d" % number, attribute="k=v")
            await asyncio.to_thread(broker.start)
            async with client.ordered_producer("test", ["0-1"], tmp_path) as producer:
                assert waiting(producer) == 3
                await producer.send(b"3", attribute="k=v")
                await until(lambda: not waiting(producer))
                assert producer.statistics().replayed_count >= 3

    asyncio.run(scenario())
    assert broker.stored("test", 1) == [b"0", b"1", b"2", b"3"]
    with Client(**broker.client_options) as client:
        assert {m.attribute for m in client.browse("test")} == {"k=v"}


@pytest.mark.slow
def test_an_unknown_outcome_is_told_and_not_spooled(java: Any, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            client_of(java) as client,
            client.ordered_producer("test", ["0-0"], tmp_path) as producer,
        ):
            await producer.send(b"0")  # the broker is connected
            java.inner.inject(FaultKind.SWALLOW_STORED, verb="put", count=1)
            with pytest.raises(OutcomeUnknownError):
                await producer.send(b"a", timeout=1.0)
            assert waiting(producer) == 0

    asyncio.run(scenario())


@pytest.mark.slow
def test_order_holds_whatever_is_refused(
    broker: AnyBroker, tmp_path: Path, rng: random.Random
) -> None:
    """Many senders at once, and partitions that close and open.

    Each sender's messages are stored in its order, once each; except unknown ones,
    whose last attempt was under way at the deadline.
    """
    count = 30
    in_doubt: set[bytes] = set()

    async def send(producer: AsyncOrderedProducer, sender: int) -> None:
        for number in range(count):
            text = b"%d:%d" % (sender, number)
            try:
                await producer.send(text, key=str(sender % 2), timeout=2.0)
            except OutcomeUnknownError:
                in_doubt.add(text)
            await asyncio.sleep(rng.random() / 500)

    async def disturb(producer: AsyncOrderedProducer) -> None:
        broker.close_partition("test", 0)
        await until(lambda: producer.statistics().spooled_count)
        broker.open_partition("test", 0)
        for _ in range(3):
            number = rng.randrange(2)
            broker.close_partition("test", number)
            await asyncio.sleep(rng.random() / 4)
            broker.open_partition("test", number)
            await asyncio.sleep(rng.random() / 20)

    async def scenario() -> None:
        async with client_of(broker) as client:
            producer = client.ordered_producer("test", "0:2", tmp_path, selector=by_key)
            async with producer:
                await asyncio.gather(
                    disturb(producer), *(send(producer, sender) for sender in range(4))
                )
                await until(lambda: not waiting(producer))
                found = producer.statistics()
                sure_count = 4 * count - len(in_doubt)
                assert found.sent_count + found.spooled_count == sure_count
                assert found.spooled_count
                assert found.replayed_count == found.spooled_count

    asyncio.run(scenario())
    for sender in range(4):
        mine = [
            text
            for text in broker.stored("test", sender % 2)
            if text.startswith(b"%d:" % sender)
        ]
        sent = [b"%d:%d" % (sender, number) for number in range(count)]
        lost = in_doubt.difference(mine)
        assert mine == [text for text in sent if text not in lost]


@pytest.mark.slow
def test_a_disk_that_takes_nothing_is_an_error(broker: AnyBroker) -> None:
    """No message is called safe when it is not."""
    fs = FaultyFileSystem()

    async def scenario() -> None:
        await asyncio.to_thread(broker.stop)
        async with client_of(broker) as client:
            producer = client.ordered_producer(
                "test", ["0-0"], Path("/s"), timeout_s=SHORT_S
            )
            use_disk(producer, fs)
            async with producer:
                await producer.send(b"a")
                fs.fail_at(fs.calls + 2, errno.EIO)
                with pytest.raises(StorageError):
                    await producer.send(b"b")

    asyncio.run(scenario())
    spool = Spool(fs.crash(), Path("/s") / spool_name("test", "0-0"))
    assert len(spool) == 1
    spool.close()


@pytest.mark.slow
def test_a_spool_that_fills_its_disk_is_sent_once_and_emptied(
    broker: AnyBroker,
) -> None:
    """The removal of its messages needs space that only its end frees."""
    fs = FaultyFileSystem()
    sent = [b"%d" % number for number in range(REPLAY_GROUP + 1)]

    async def scenario() -> None:
        await asyncio.to_thread(broker.stop)
        async with client_of(broker) as client:
            producer = client.ordered_producer("test", ["0-0"], Path("/s"))
            use_disk(producer, fs)
            async with producer:
                for data in sent:
                    await producer.send(data, timeout=SHORT_S)
                fs.set_capacity(1)
                await asyncio.to_thread(broker.start)
                await until(lambda: not waiting(producer))

    asyncio.run(scenario())
    assert broker.stored() == sent
    spool = Spool(fs.crash(), Path("/s") / spool_name("test", "0-0"))
    assert len(spool) == 0
    spool.close()


@pytest.mark.slow
def test_a_cancelled_send_leaves_order_and_turn_intact(
    java: Any, tmp_path: Path
) -> None:
    java.inner.delay_s = 0.05

    async def scenario() -> None:
        async with (
            client_of(java) as client,
            client.ordered_producer("test", ["0-0"], tmp_path) as producer,
        ):
            await producer.send(b"0")
            first = asyncio.create_task(producer.send(b"1"))
            second = asyncio.create_task(producer.send(b"2"))
            await asyncio.sleep(0)
            first.cancel()
            assert isinstance(await second, SendResult)

    asyncio.run(scenario())
    assert java.stored() in ([b"0", b"2"], [b"0", b"1", b"2"])


@pytest.mark.slow
def test_a_send_that_is_cancelled_does_not_wait_for_the_disk(
    broker: AnyBroker, tmp_path: Path
) -> None:
    """Its message is spooled all the same, and goes before what comes then."""
    is_slow, begun, go_on = threading.Event(), threading.Event(), threading.Event()

    class Kernel(LinuxCalls):
        def writev(self, fd: int, buffers: Any, /) -> int:
            if is_slow.is_set():
                begun.set()
                assert go_on.wait(20)
            return LinuxCalls.writev(fd, buffers)

    async def scenario() -> None:
        async with client_of(broker) as client:
            producer = client.ordered_producer("test", "0:1", tmp_path)
            use_disk(producer, FileSystem(Kernel()))
            await check(client, producer)

    async def check(client: AsyncClient, producer: AsyncOrderedProducer) -> None:
        async with producer:
            await producer.send(b"0")
            is_slow.set()
            broker.close_partition("test", 0)

            async def send_until_spooled() -> None:
                while True:
                    # An attempt that is under way at the end may be stored.
                    with contextlib.suppress(OutcomeUnknownError):
                        await producer.send(b"1", timeout=SHORT_S)

            sending = asyncio.create_task(send_until_spooled())
            await until(begun.is_set)
            sending.cancel()
            await asyncio.wait([sending], timeout=60)
            assert sending.cancelled()
            broker.open_partition("test", 0)
            await until(
                lambda: (
                    producer.partitions[0]
                    in parts_of(client).metadata.snapshot.put_partitions("test")
                )
            )
            following = asyncio.create_task(producer.send(b"2"))
            await asyncio.sleep(0)
            go_on.set()
            await following
            await until(lambda: not waiting(producer))

    asyncio.run(scenario())
    assert broker.stored() == [b"0", b"1", b"2"]


def test_a_choice_outside_of_the_layout_is_refused(
    broker: AnyBroker, tmp_path: Path
) -> None:
    def elsewhere(topic: str, partitions: object, message: object) -> TopicPartition:
        return TopicPartition(topic, BrokerId(7), 7)

    async def scenario() -> None:
        async with client_of(broker) as client:
            producer = client.ordered_producer(
                "test", "0:2", tmp_path, selector=elsewhere
            )
            async with producer:
                with pytest.raises(ConfigError, match="7-7"):
                    await producer.send(b"a")
                with pytest.raises(ConfigError, match="UTF-8"):
                    await producer.send(b"a", attribute="\ud800")
            with pytest.raises(ClosedError):
                await producer.send(b"a")

    asyncio.run(scenario())


def test_a_directory_has_one_producer(broker: AnyBroker, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with client_of(broker) as client:
            async with client.ordered_producer("test", ["0-0", "0-1"], tmp_path):
                second = client.ordered_producer("test", ["0-1"], tmp_path)
                with pytest.raises(LogDirLockedError):
                    await second.start()
            place = tmp_path / spool_name("test", "0-1")
            Spool(SystemFileSystem(), place).close()

    asyncio.run(scenario())


def test_it_is_started_once(broker: AnyBroker, tmp_path: Path) -> None:
    """A second start takes nothing from the first."""

    async def scenario() -> None:
        async with client_of(broker) as client:
            async with client.ordered_producer("test", "0:2", tmp_path) as producer:
                with pytest.raises(ClosedError, match="started only once"):
                    await producer.start()
                assert isinstance(await producer.send(b"a"), SendResult)
            with pytest.raises(ClosedError, match="started only once"):
                await producer.start()

    asyncio.run(scenario())


def free(directory: Path) -> None:
    """Fail when a spool of the one partition is held."""
    Spool(SystemFileSystem(), directory / spool_name("test", "0-0")).close()


def test_a_close_while_it_starts_leaves_nothing_open(
    broker: AnyBroker, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with client_of(broker) as client:
            producer = client.ordered_producer("test", "0:1", tmp_path)
            starting = asyncio.create_task(producer.start())
            await asyncio.sleep(0)
            await producer.close()
            with pytest.raises(ClosedError, match="while it started"):
                await starting
            free(tmp_path)

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_cancelled_close_lets_go_of_the_files(java: Any, tmp_path: Path) -> None:
    java.inner.delay_s = 0.05

    async def scenario() -> None:
        async with client_of(java) as client:
            producer = client.ordered_producer("test", "0:1", tmp_path)
            await producer.start()
            sending = asyncio.create_task(producer.send(b"0"))
            await until(lambda: java.inner.statistics().commands["put"])
            closing = asyncio.create_task(producer.close())
            await asyncio.sleep(0)
            closing.cancel()
            await asyncio.gather(sending, closing, return_exceptions=True)
            assert closing.cancelled()
            await producer.close()
            free(tmp_path)

    asyncio.run(scenario())


@pytest.mark.slow
def test_the_sync_world_has_it_too(broker: AnyBroker, tmp_path: Path) -> None:
    """Over a restart of its broker."""
    with Client(**broker.client_options) as client:
        spools = tmp_path / "spools"
        with client.ordered_producer("test", "0:2", spools) as producer:
            assert isinstance(producer.send(b"0", key="k"), SendResult)
            broker.stop()
            # What is sent on a connection whose end is not known yet may be stored.
            address = parse_address(broker.address)
            wait_until(lambda: parts_of(client).pool.ready(address) is None)
            spooled = producer.send(b"1", key="k", timeout=SHORT_S)
            assert isinstance(spooled, Spooled)
            broker.start()
            producer.send(b"2", key="k")
            wait_until(lambda: not producer.statistics().waiting)
        assert received(client, 3) == [b"0", b"1", b"2"]


def received(client: Client, count: int) -> list[bytes]:
    found = []
    with client.consumer("g", ["test"]) as consumer:
        while len(found) < count:
            message = consumer.receive(30)
            assert message is not None
            found.append(message.data)
    return found
