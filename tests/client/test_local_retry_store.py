"""Messages of the local retry store come again until handled, even after restarts."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from metaq.client.consume.fetch_buffer import FetchBuffer
from metaq.client.consume.handling import Handling
from metaq.client.consume.local_retry_store import LocalRetryStore
from metaq.client.consume.redelivery import Reject, RetryPolicy
from metaq.client.session import AsyncClient
from metaq.client.spool import Spool, spool_name
from metaq.client.sync.client import Client, Consumer
from metaq.cluster_snapshot import ClusterSnapshot
from metaq.errors import LogDirLockedError, RequestTimeoutError
from metaq.fs import DirLock, SystemFileSystem
from metaq.model import (
    BrokerId,
    GroupOffset,
    Message,
    MessageId,
    Offset,
    TopicPartition,
)
from metaq.testing.clock import ManualClock
from tests.brokers import AnyBroker, StartBroker
from tests.client.asking import lacking
from tests.client.test_fetch_buffer import batch
from tests.rigs.fs import FaultyFileSystem
from tests.rigs.waiting import until

PLACE = TopicPartition("t", BrokerId(0), 0)


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    return start_broker()


def policy(directory: Path | str, **changes: float) -> RetryPolicy:
    options = {"replay_first_s": 0.01, "replay_interval_s": 0.02} | changes
    return RetryPolicy(then="park", park_dir=directory, **options)


def kept(directory: Path, group: str) -> list[bytes]:
    spool = Spool(SystemFileSystem(), directory / spool_name("test", group))
    stored = [spool.read(number) for number in spool.numbers()]
    spool.close()
    return [message.data for message in stored if message is not None]


@pytest.mark.slow
def test_a_kept_message_is_handled_later_and_the_live_ones_meanwhile(
    broker: AnyBroker, tmp_path: Path
) -> None:
    seen: list[bytes] = []
    rejections = iter(range(3))

    async def handler(message: Message) -> None:
        seen.append(message.data)
        if message.data == b"bad" and next(rejections, None) is not None:
            raise Reject("not now")

    async def scenario() -> None:
        async with AsyncClient(**broker.client_options) as client:
            async with client.producer() as producer:
                for text in (b"bad", b"a", b"b"):
                    await producer.send("test", text)
            async with client.consumer("g@1", ["test"]) as consumer:
                task = asyncio.create_task(
                    consumer.run(handler, retry=policy(tmp_path / "parked"))
                )
                await until(lambda: seen.count(b"bad") == 4)
                await until(lambda: counts(consumer).replayed_count == 1)
                found = counts(consumer)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            assert seen[:1] + sorted(seen[1:]) == [b"bad", b"a", b"b", *[b"bad"] * 3]
            assert (found.parked_count, found.replayed_count) == (1, 1)
            assert found.failure_count == 3

    asyncio.run(scenario())
    assert kept(tmp_path / "parked", "g@1") == []


def test_a_replay_that_finds_no_memory_comes_again(
    broker: AnyBroker, tmp_path: Path
) -> None:
    """And is a problem of the consumer's until then."""
    rejections = iter(range(1))
    seen: list[bytes] = []

    async def handler(message: Message) -> None:
        if next(rejections, None) is not None:
            raise Reject("not now")
        seen.append(message.data)

    async def scenario() -> None:
        async with AsyncClient(**broker.client_options) as client:
            async with client.producer() as producer:
                await producer.send("test", b"bad")
            async with client.consumer("g", ["test"]) as consumer:
                with lacking(Spool, "read"):
                    task = asyncio.create_task(
                        consumer.run(handler, retry=policy(tmp_path / "parked"))
                    )
                    await until(
                        lambda: "MemoryError" in " ".join(consumer.health().problems)
                    )
                await until(lambda: seen == [b"bad"])
                await until(lambda: not consumer.health().problems)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scenario())


def counts(consumer):
    return consumer.statistics().handling


@contextlib.contextmanager
def closed_when(consumer: Consumer, condition: Callable[[], object]) -> Iterator[None]:
    """Close a consumer from another thread as soon as a condition holds."""

    def work() -> None:
        asyncio.run(until(condition))
        consumer.close()

    closer = threading.Thread(target=work)
    closer.start()
    yield
    closer.join()


@pytest.mark.slow
def test_what_is_kept_survives_and_is_handled_by_the_next_run(
    broker: AnyBroker, tmp_path: Path
) -> None:
    """In the sync world, by the same threads as all other messages."""
    directory = tmp_path / "parked"
    names = set()

    def reject(message: Message) -> None:
        raise Reject("not now")

    def accept(message: Message) -> None:
        names.add((threading.current_thread().name, message.data))

    with Client(**broker.client_options) as client:
        with client.producer() as producer:
            producer.send("test", b"a")
        consumer = client.consumer("g", ["test"])
        consumer.start()
        late = policy(directory, replay_first_s=100.0)
        with closed_when(
            consumer, lambda: counts(consumer) and counts(consumer).parked_count
        ):
            consumer.run(reject, retry=late)
        assert kept(directory, "g") == [b"a"]
        consumer = client.consumer("other", ["test"], start="latest")
        consumer.start()
        with closed_when(consumer, lambda: counts(consumer)):
            consumer.run(accept, retry=policy(directory))
        assert names == set()  # another group's
        consumer = client.consumer("g", ["test"], start="latest")
        consumer.start()
        with closed_when(
            consumer, lambda: counts(consumer) and counts(consumer).replayed_count
        ):
            consumer.run(accept, retry=policy(directory))
    assert names == {("metaq-handler-0", b"a")}
    assert kept(directory, "g") == []


def test_a_directory_that_another_one_uses_is_an_error(
    broker: AnyBroker, tmp_path: Path
) -> None:
    async def handler(message: Message) -> None: ...

    async def scenario() -> None:
        spool = Spool(SystemFileSystem(), tmp_path / spool_name("test", "g"))
        async with (
            AsyncClient(**broker.client_options) as client,
            client.consumer("g", ["test"]) as consumer,
        ):
            with pytest.raises(LogDirLockedError):
                await consumer.run(handler, retry=policy(tmp_path))
            spool.close()
            task = asyncio.create_task(consumer.run(handler, retry=policy(tmp_path)))
            await until(lambda: counts(consumer) is not None)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scenario())


def empty_buffer() -> FetchBuffer:
    return FetchBuffer(
        clock=ManualClock(),
        buffer_bytes_max=1000,
        buffer_count_max=10,
        on_room=lambda: None,
    )


@pytest.mark.slow
def test_what_the_disk_does_not_take_stays_in_the_partition() -> None:
    """The handler gets it no more; it is kept when there is room."""
    fs, seen = FaultyFileSystem(), []

    async def handler(message: Message) -> None:
        seen.append(message.data)
        fs.set_capacity(1)
        raise Reject("not now")

    async def scenario() -> None:
        fetch_buffer = empty_buffer()
        fetch_buffer.add(PLACE, GroupOffset(Offset(0), MessageId(-1)))
        fetch_buffer.put(batch(PLACE, 0, 1))
        options = policy("/p", replay_first_s=100.0)
        snapshot = ClusterSnapshot()
        context: Any = SimpleNamespace(
            clock=ManualClock(), metadata=SimpleNamespace(snapshot=snapshot)
        )
        handling = Handling(
            context,
            fetch_buffer,
            group="g",
            topics=["t"],
            policy=options,
            fs=fs,
        )
        await handling.start(None)
        task = asyncio.create_task(
            handling.run_workers(handler, 1, timeout_s=None, grace_s=0.0)
        )
        await until(lambda: any("takes it" in p for p in handling.problems()))
        assert fetch_buffer.handled()[PLACE].offset == 0
        fs.set_capacity(1 << 20)
        await until(lambda: handling.statistics().parked_count == 1)
        await until(lambda: fetch_buffer.handled()[PLACE].offset > 0)
        assert handling.problems() == []
        assert handling.statistics().waiting_count == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await handling.close()

    asyncio.run(scenario())
    assert seen == [b"0"]


def test_a_replayed_message_that_cannot_be_removed_is_not_handled_again() -> None:
    """The disk is full: the others are handled too, and all go when there is room."""
    fs, seen = FaultyFileSystem(), []

    async def handler(message: Message) -> None:
        seen.append(message.data)
        if len(seen) <= 3:
            raise Reject("not now")
        if len(seen) == 4:
            fs.set_capacity(1)
        if message.data == b"2" and len(seen) < 10:
            raise ValueError("not yet")

    async def scenario() -> None:
        fetch_buffer = empty_buffer()
        fetch_buffer.add(PLACE, GroupOffset(Offset(0), MessageId(-1)))
        fetch_buffer.put(batch(PLACE, 0, 3))
        options = policy("/p", replay_first_s=0.05, replay_interval_s=0.01)
        context: Any = SimpleNamespace(
            clock=ManualClock(), metadata=SimpleNamespace(snapshot=ClusterSnapshot())
        )
        handling = Handling(
            context, fetch_buffer, group="g", topics=["t"], policy=options, fs=fs
        )
        await handling.start(None)
        task = asyncio.create_task(
            handling.run_workers(handler, 1, timeout_s=None, grace_s=0.0)
        )
        await until(lambda: any("no free space" in p for p in handling.problems()))
        await until(lambda: handling.statistics().waiting_count == 0)
        await until(lambda: handling.problems() == [])
        assert handling.statistics().replayed_count == 3
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await handling.close()

    asyncio.run(scenario())
    assert seen[:6] == [b"0", b"1", b"2"] * 2
    assert set(seen[6:]) == {b"2"}


def test_a_start_that_is_cancelled_holds_nobody_else_up(tmp_path: Path) -> None:
    """The disk may open the spool when it is not wanted any more."""
    opened, go_on = threading.Event(), threading.Event()

    class SlowDisk(SystemFileSystem):
        def lock_directory(self, path: Path) -> DirLock:
            lock = super().lock_directory(path)
            opened.set()
            go_on.wait(20)
            return lock

    def is_free() -> bool:
        try:
            Spool(SystemFileSystem(), tmp_path / spool_name("test", "g")).close()
        except LogDirLockedError:
            return False
        return True

    async def scenario() -> None:
        store = LocalRetryStore(
            empty_buffer(),
            group="g",
            topics=["test"],
            policy=policy(tmp_path),
            fs=SlowDisk(),
        )
        starting = asyncio.create_task(store.start())
        await until(opened.is_set)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        assert starting.cancelled()
        assert not is_free()
        go_on.set()
        await until(is_free)

    asyncio.run(scenario())


def is_free(directory: Path) -> bool:
    """Whether the retry store of the group "g" are not open."""
    try:
        kept(directory, "g")
    except LogDirLockedError:
        return False
    return True


@pytest.mark.slow
def test_a_disk_that_hangs_keeps_no_run_from_its_end(
    broker: AnyBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither before a run begins nor after it."""
    answers, has_opened = threading.Event(), threading.Event()
    open_now, close_now = Spool, Spool.close

    def open_slowly(fs: SystemFileSystem, directory: Path) -> Spool:
        answers.wait(20)
        spool = open_now(fs, directory)
        has_opened.set()
        return spool

    def close_slowly(spool: Spool) -> None:
        answers.wait(20)
        close_now(spool)

    def run(consumer: Consumer, timeout: float) -> None:
        consumer.run(lambda _: None, retry=policy(tmp_path), timeout=timeout)

    monkeypatch.setattr("metaq.client.consume.local_retry_store.CLOSE_TIMEOUT_S", 0.05)
    with (
        Client(**broker.client_options) as client,
        client.consumer("g", ["test"]) as consumer,
    ):
        with monkeypatch.context() as patched:
            patched.setattr("metaq.client.consume.local_retry_store.Spool", open_slowly)
            with pytest.raises(RequestTimeoutError, match="opening the local retry"):
                run(consumer, timeout=0.05)
        answers.set()
        asyncio.run(until(lambda: has_opened.is_set() and is_free(tmp_path)))
        answers.clear()
        monkeypatch.setattr(Spool, "close", close_slowly)
        seconds = 0.5
        while True:
            try:
                run(consumer, timeout=seconds)
                break
            except RequestTimeoutError:  # not yet open by then
                seconds *= 2
        assert not answers.is_set()
        answers.set()
