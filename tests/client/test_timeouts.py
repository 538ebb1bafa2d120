"""Every call returns within its time, with the effects that its docstring says."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from metaq.client import Client, FileOffsets, Spooled
from metaq.client.consume.fetched_batch import FetchedBatch
from metaq.client.offsets.offset_store import MemoryOffsets
from metaq.errors import ClosedError, CoordinationError, RequestTimeoutError
from metaq.fs import FileSystem
from metaq.fs.calls import LinuxCalls
from metaq.model import Message, Offset
from metaq.testing.clock import ManualClock
from tests.brokers import AnyBroker, StartBroker
from tests.client.worlds import IDLE, QUICK, WORLDS, partition, payloads, take
from tests.rigs.inside import loop_thread_of, twin_of, use_disk
from tests.rigs.waiting import PATIENCE_S, wait_until

SHORT_S = 0.05
"""Of calls that are bound to time out."""
ZERO = partition(0)


ONE_BROKER = {"java": "an answer that is late"}


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    return start_broker()


@pytest.fixture
def java(start_metaq_1_4: StartBroker) -> Any:
    return start_metaq_1_4()


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, broker: AnyBroker) -> Iterator[Any]:
    with WORLDS[request.param](brokers=[broker.address], **QUICK) as one:
        yield one


class SlowStore(MemoryOffsets):
    """A store that keeps no deadline, while it is told to hang."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs: set[str] = set()
        self.closed_count = 0

    async def _hang(self, what: str) -> None:
        if what in self.hangs:
            await asyncio.Event().wait()

    async def load(self, *args: Any, **named: Any) -> Any:
        await self._hang("load")
        return await super().load(*args, **named)

    async def commit(self, *args: Any, **named: Any) -> Any:
        await self._hang("commit")
        return await super().commit(*args, **named)

    async def close(self) -> None:
        self.closed_count += 1
        await self._hang("close")


@pytest.fixture
def store() -> SlowStore:
    return SlowStore()


# -- consumers ------------------------------------------------------------------------


def test_a_start_that_takes_too_long_closes_the_consumer(
    client: Any, store: SlowStore
) -> None:
    store.hangs = {"load", "close"}
    consumer = client.consumer("g", ["test"], offsets=store, **IDLE)
    client.partitions("test")
    with pytest.raises(RequestTimeoutError, match=r"'g': start: .* within 0\.05 s"):
        consumer.start(SHORT_S)
    assert consumer.is_closed
    assert consumer.assignment() == frozenset()
    assert store.closed_count == 1
    with pytest.raises(ClosedError):
        consumer.start()
    with pytest.raises(ClosedError):
        consumer.receive(PATIENCE_S)
    with client.consumer("g", ["test"], **IDLE):
        """The client goes on."""


def test_a_member_that_cannot_join_in_time_leaves_when_zookeeper_answers(
    broker: AnyBroker,
) -> None:
    zookeeper = broker.zookeeper
    with Client(**broker.client_options) as client:
        client.partitions("test")
        zookeeper.stop()
        consumer = client.consumer("g", ["test"], consumer_id="late")
        with pytest.raises(CoordinationError, match=r"^cannot reach ZooKeeper"):
            consumer.start(timeout=SHORT_S)
        assert consumer.is_closed
        zookeeper.start()
        with client.consumer("g", ["test"], consumer_id="next") as consumer:
            wait_until(lambda: consumer.assignment() == {ZERO})
        assert not [path for path in zookeeper.nodes if "late" in path]


def test_a_rollback_that_takes_too_long_changes_nothing(
    broker: AnyBroker, client: Any, store: SlowStore
) -> None:
    broker.put(b"0", b"1", b"2")
    options: dict[str, Any] = {"offsets": store, "commit_interval_s": None, **IDLE}
    with client.consumer("g", ["test"], **options) as consumer:
        take(consumer, 2)
        store.hangs = {"load"}
        with pytest.raises(RequestTimeoutError, match="'g': rollback"):
            consumer.rollback(SHORT_S)
        store.hangs = set()
        assert payloads(take(consumer, 1)) == [b"2"]
        consumer.rollback(timeout=PATIENCE_S)
        assert payloads(take(consumer, 3)) == [b"0", b"1", b"2"]


@pytest.mark.slow
def test_a_commit_that_takes_too_long_is_made_by_the_next_one(
    broker: AnyBroker, client: Any, store: SlowStore
) -> None:
    broker.put(b"0", b"1", b"2")
    options: dict[str, Any] = {"offsets": store, "commit_interval_s": None, **IDLE}
    with client.consumer("g", ["test"], **options) as consumer:
        take(consumer, 2)
        store.hangs = {"commit"}
        with pytest.raises(RequestTimeoutError, match="commit of g: not done"):
            consumer.commit(timeout=SHORT_S)
        store.hangs = set()
        consumer.commit()
        assert consumer.health().uncommitted_count == 0


@pytest.mark.slow
def test_a_seek_does_not_wait_for_a_loop_that_is_held_up(broker: AnyBroker) -> None:
    """It is given up: what is asked for later is not overtaken by it."""
    broker.put(b"0", b"1")
    go_on = threading.Event()
    with (
        Client(brokers=[broker.address], **QUICK) as client,
        client.consumer("g", ["test"], **IDLE) as consumer,
    ):
        messages = take(consumer, 2)
        loop_thread_of(client).loop.call_soon_threadsafe(go_on.wait, PATIENCE_S)
        try:
            with pytest.raises(RequestTimeoutError, match=r"within 0\.05 s"):
                consumer.seek(ZERO, messages[0].offset, timeout=SHORT_S)
        finally:
            go_on.set()
        assert consumer.receive(0.1) is None
        consumer.seek(ZERO, messages[1].offset)
        assert payloads(take(consumer, 1)) == [b"1"]


@pytest.mark.slow
@pytest.mark.parametrize("hanging", [set(), {"commit"}, {"close"}])
def test_a_close_frees_everything_at_the_end_of_its_time(
    broker: AnyBroker, client: Any, hanging: set[str]
) -> None:
    """Handled messages are committed, unless the store takes longer."""
    broker.put(b"0", b"1", b"2")
    left = [b"0", b"1", b"2"] if "commit" in hanging else [b"1", b"2"]

    def is_the_rest_left(close_s: float) -> bool:
        store = SlowStore()
        options: dict[str, Any] = {"offsets": store, "skip_repeats": False, **IDLE}
        consumer = client.consumer("g", ["test"], **options)
        consumer.start()
        take(consumer, 2)
        store.hangs = hanging
        consumer.close(timeout=close_s)
        assert consumer.is_closed
        assert store.closed_count == 1
        store.hangs = set()
        with pytest.raises(ClosedError):
            consumer.receive(0)
        with client.consumer("g", ["test"], **options) as consumer:
            return payloads(take(consumer, len(left))) == left

    in_some_time(is_the_rest_left, 10 * SHORT_S if hanging else PATIENCE_S)


def in_some_time(condition: Callable[[float], bool], seconds: float) -> None:
    """Find it true when there is so much time, or more on a machine that is busy."""
    while not condition(seconds):
        seconds *= 2
        assert seconds < PATIENCE_S, "it did not come true"


class Worker:
    """A thread that handles messages until it is let go."""

    def __init__(self, consumer: Any) -> None:
        self.consumer = consumer
        self.found: list[Message] = []
        self.let_go = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for message in self.consumer:
            self.found.append(message)
            if len(self.found) == 2:
                self.let_go.wait(PATIENCE_S)

    def join(self) -> None:
        self.let_go.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize("of_client", [False, True])
def test_a_close_waits_for_a_message_being_handled_no_longer_than_half_its_time(
    broker: AnyBroker, of_client: bool
) -> None:
    """The other half is for the commit of what is handled."""
    broker.put(b"0", b"1", b"2")

    def is_the_rest_left(close_s: float) -> bool:
        options: dict[str, Any] = {"offsets": SlowStore(), "skip_repeats": False}
        with Client(brokers=[broker.address], **QUICK) as client:
            consumer = client.consumer("g", ["test"], **options, **IDLE)
            consumer.start()
            worker = Worker(consumer)
            wait_until(lambda: len(worker.found) == 2)
            (client if of_client else consumer).close(timeout=close_s)
            assert twin_of(consumer).is_closed
            worker.join()
        with (
            Client(brokers=[broker.address], **QUICK) as client,
            client.consumer("g", ["test"], **options, **IDLE) as consumer,
        ):
            return payloads(take(consumer, 2)) == [b"1", b"2"]

    in_some_time(is_the_rest_left, 10 * SHORT_S)


@pytest.mark.slow
def test_a_close_ends_a_rebalance_that_waits_for_a_message(broker: AnyBroker) -> None:
    broker.put(b"0", b"1", b"2")

    def is_the_rest_left(close_s: float) -> bool:
        group = f"g-{round(close_s * 1000)}"
        with Client(**broker.client_options) as client:
            consumer = client.consumer(group, ["test"], consumer_id="z", **IDLE)
            consumer.start()
            worker = Worker(consumer)
            wait_until(lambda: len(worker.found) == 2)
            with client.consumer(group, ["test"], consumer_id="a", **IDLE) as other:
                wait_until(lambda: not consumer.assignment())
                consumer.close(timeout=close_s)
                is_left = payloads(take(other, 2)) == [b"1", b"2"]
            worker.join()
        return is_left

    in_some_time(is_the_rest_left, 10 * SHORT_S)


def test_a_receive_that_takes_what_goes_away_does_not_begin_its_time_anew(
    broker: AnyBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    with (
        Client(brokers=[broker.address], clock=clock, **QUICK) as client,
        client.consumer("g", ["test"], **IDLE) as consumer,
    ):
        waits: list[float | None] = []

        def take_revoked(timeout_s: float | None) -> FetchedBatch | None:
            waits.append(timeout_s)
            clock.advance_s(3.0)
            gone = FetchedBatch(ZERO, [], Offset(0), 0, is_stopped=True)
            if len(waits) == 4 and timeout_s is None:
                raise ClosedError("enough")
            return gone if len(waits) < 4 else None

        monkeypatch.setattr(twin_of(consumer).fetch_buffer, "take", take_revoked)
        assert consumer.receive_many(5, timeout=7.0) == []
        assert waits == [7.0, 4.0, 1.0, 0.0]
        waits.clear()
        with pytest.raises(ClosedError, match="enough"):
            consumer.receive_many(5)
        assert waits == [None] * 4
        monkeypatch.undo()


# -- looking --------------------------------------------------------------------------


@pytest.mark.slow
def test_a_browser_that_follows_ends_when_nothing_comes_in_time(
    broker: AnyBroker, client: Any
) -> None:
    broker.put(b"0")

    def is_seen(follow_s: float) -> bool:
        following = client.browse("test", stop_at_end=False, timeout=follow_s)
        text = rf"topic test: .* within {follow_s:g} s"
        seen: list[bytes] = []
        with pytest.raises(RequestTimeoutError, match=text):
            seen.extend(message.data for message in following)
        assert list(following) == []
        return seen == [b"0"]

    in_some_time(is_seen, 0.5)


@pytest.mark.parametrize("world", ["sync", "async"])
def test_a_browser_does_not_wait_longer_than_it_was_told_to(
    java: Any, world: str
) -> None:
    java.put(b"0")
    options = {**QUICK, "close_timeout_s": SHORT_S}
    with WORLDS[world](brokers=[java.address], **options) as client:
        client.partitions("test")
        java.inner.delay_s = 2.0
        with pytest.raises(RequestTimeoutError):
            list(client.browse("test", timeout=SHORT_S))


# -- the ordered producer -------------------------------------------------------------


class Kernel(LinuxCalls):
    """Holds up who locks a directory or closes a file, while it does not answer."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()

    def flock(self, fd: int, operation: int, /) -> None:
        assert self.answers.wait(PATIENCE_S)
        LinuxCalls.flock(fd, operation)

    def close(self, fd: int, /) -> None:
        assert self.answers.wait(PATIENCE_S)
        LinuxCalls.close(fd)


def test_spools_that_open_too_late_are_closed_again(
    broker: AnyBroker, tmp_path: Path
) -> None:
    """A disk that hangs ends the start, and holds no other up afterwards."""
    kernel = Kernel()
    with Client(brokers=[broker.address], **QUICK) as client:
        producer = client.ordered_producer("test", "0:1", tmp_path)
        use_disk(twin_of(producer), FileSystem(kernel))
        kernel.answers.clear()
        with pytest.raises(RequestTimeoutError, match="spools of topic test"):
            producer.start(SHORT_S)
        assert producer.is_closed
        kernel.answers.set()

        def opens() -> bool:
            try:
                with client.ordered_producer("test", "0:1", tmp_path) as other:
                    return not isinstance(other.send(b"x"), Spooled)
            except Exception:
                return False

        wait_until(opens)


def test_a_disk_that_hangs_is_closed_behind_our_back(
    broker: AnyBroker, tmp_path: Path
) -> None:
    kernel = Kernel()
    with Client(brokers=[broker.address], **QUICK) as client:
        producer = client.ordered_producer("test", "0:1", tmp_path)
        use_disk(twin_of(producer), FileSystem(kernel))
        producer.start()
        kernel.answers.clear()
        producer.close(SHORT_S)
        with pytest.raises(ClosedError):
            producer.send(b"x")
        kernel.answers.set()
        other = client.ordered_producer("test", "0:1", tmp_path)
        wait_until(lambda: twin_of(producer).has_ended)
        with other:
            other.send(b"x")


# -- sends without a waiter ------------------------------------------------------------


@pytest.mark.parametrize(
    ("topic", "data", "named", "kind"),
    [
        ("a b", b"x", {}, "ConfigError"),
        ("test", 5, {}, "TypeError"),
        ("test", b"x", {"attribute": 5}, "TypeError"),
    ],
)
def test_what_can_never_be_sent_is_refused_at_once_in_both_worlds(
    client: Any, topic: str, data: Any, named: dict[str, Any], kind: str
) -> None:
    errors = []
    for call in (_send_oneway, _send_nowait):
        try:
            call(client, topic, data, named)
        except Exception as error:
            errors.append(type(error).__name__)
    assert errors == [kind, kind]


def _send_oneway(client: Any, topic: str, data: Any, named: dict[str, Any]) -> None:
    if isinstance(client, Client):
        with client.producer() as producer:
            producer.send_oneway(topic, data, **named)
        return
    producer = client.call(client.twin.producer)
    client.call(producer.send_oneway, topic, data, **named)


def _send_nowait(client: Any, topic: str, data: Any, named: dict[str, Any]) -> None:
    if isinstance(client, Client):
        with client.producer() as producer:
            producer.send_nowait(topic, data, **named)
        return
    producer = client.call(client.twin.producer)
    client.run(producer.send_nowait(topic, data, **named))


def test_files_are_let_go_by_a_close_without_time(
    broker: AnyBroker, tmp_path: Path
) -> None:
    broker.put(b"0")
    store = FileOffsets(tmp_path / "offsets")
    with Client(brokers=[broker.address], **QUICK) as client:
        consumer = client.consumer("g", ["test"], offsets=store, **IDLE)
        consumer.start()
        take(consumer, 1)
        consumer.close(timeout=0)
        assert consumer.is_closed
