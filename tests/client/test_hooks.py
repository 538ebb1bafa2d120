"""Hooks of a consumer: when, where and how often they are called; both worlds.

The broker is real, or a fake MetaQ 1.4; ZooKeeper is in memory.
"""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import pytest

from metaq.client import ConfigError, ConsumerOptions, Message, TopicPartition
from metaq.client.group.hooks import Hooks, commits_inside, refuse_inside
from metaq.errors import ClientError, MetaqError, OwnershipLostError
from metaq.zk.paths import NodePaths
from tests.brokers import AnyBroker, StartBroker
from tests.client.worlds import IDLE, QUICK, WORLDS, partition, parts_of, take
from tests.rigs.inside import thread_calls_of, twin_of
from tests.rigs.virtual_time import run_virtually
from tests.rigs.waiting import until, wait_until

ZERO, ONE = partition(0), partition(1)
BOTH = frozenset({ZERO, ONE})
PATHS = NodePaths()
PATIENCE_S: Final = 60.0

Event: TypeAlias = tuple[str, frozenset[TopicPartition]]


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    return start_broker({"test": 2})


@pytest.fixture(params=["sync", "async"])
def world(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def client(world: str, broker: AnyBroker) -> Iterator[Any]:
    with WORLDS[world](**broker.client_options, **QUICK) as one:
        yield one


@pytest.fixture
def other(world: str, broker: AnyBroker) -> Iterator[Any]:
    with WORLDS[world](**broker.client_options, **QUICK) as one:
        yield one


class Book:
    """Notes calls of hooks, and the threads in which they came."""

    def __init__(self, world: str, **actions: Callable[..., Any]) -> None:
        self.events: list[Event] = []
        self.threads: list[threading.Thread] = []
        self.is_sync = world == "sync"
        self.actions = actions

    @property
    def hooks(self) -> dict[str, Any]:
        names = ("on_assigned", "on_revoked", "on_lost")
        return {name: self._hook(name) for name in names}

    def _hook(self, name: str) -> Callable[..., Any]:
        def note(consumer: Any, partitions: frozenset[TopicPartition]) -> Any:
            self.events.append((name, partitions))
            self.threads.append(threading.current_thread())
            action = self.actions.get(name)
            return None if action is None else action(consumer, partitions)

        async def awaited(consumer: Any, partitions: frozenset[TopicPartition]) -> None:
            result = note(consumer, partitions)
            if result is not None:
                await result

        return note if self.is_sync else awaited

    def count(self, name: str) -> int:
        return sum(event[0] == name for event in self.events)

    def of(self, name: str) -> list[frozenset[TopicPartition]]:
        return [partitions for each, partitions in self.events if each == name]


class Reader:
    """A thread that receives until it is stopped, one message at a time."""

    def __init__(self, consumer: Any) -> None:
        self.consumer = consumer
        self.messages: list[Message] = []
        self.error: Exception | None = None
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        try:
            while not self.is_over.is_set():
                message = self.consumer.receive(0.02)
                if message is not None:
                    self.messages.append(message)
        except Exception as error:
            self.error = error

    @property
    def texts(self) -> list[bytes]:
        return [bytes(message.data) for message in self.messages]

    def stop(self) -> None:
        self.is_over.set()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def reading(consumer: Any) -> Iterator[Reader]:
    with contextlib.suppress(ClientError), consumer:
        reader = Reader(consumer)
        try:
            yield reader
        finally:
            reader.stop()


def member(client: Any, book: Book | None = None, **options: Any) -> Any:
    hooks = {} if book is None else book.hooks
    return client.consumer("g", ["test"], **{**IDLE, **hooks, **options})


def stored(broker: AnyBroker, one: TopicPartition) -> int | None:
    node = broker.zookeeper.nodes.get(PATHS.group_offset("g", one))
    return None if node is None else int(node.data.rpartition(b"-")[2])


def expire(client: Any, broker: AnyBroker) -> None:
    broker.zookeeper.expire(parts_of(client).coordinator)


def twin_of_any(one: Any) -> Any:
    return one.twin if hasattr(one, "twin") else twin_of(one)


def both_of(*many: frozenset[TopicPartition]) -> frozenset[TopicPartition]:
    return frozenset().union(*many)


# -- assigned --------------------------------------------------------------------------


def test_on_assigned_may_seek_before_the_first_message(
    client: Any, broker: AnyBroker, world: str
) -> None:
    """All partitions of one assignment come in one call, and nothing before it."""
    offsets = broker.put(b"a", b"b", b"c")

    def seek(consumer: Any, partitions: frozenset[TopicPartition]) -> Any:
        assert partitions == BOTH
        assert consumer.assignment() == BOTH
        return consumer.seek(ZERO, offsets[2])

    book = Book(world, on_assigned=seek)
    with member(client, book) as consumer:
        assert consumer.receive(PATIENCE_S).data == b"c"
        assert book.events == [("on_assigned", BOTH)]
        if world == "sync":
            assert book.threads == [threading.current_thread()]


def test_messages_wait_for_on_assigned(
    client: Any, broker: AnyBroker, world: str
) -> None:
    """Messages that were fetched before it returned stay where they are."""
    broker.put(b"a")
    is_free = threading.Event()

    async def wait() -> None:
        await until(is_free.is_set)

    def hold(*_args: Any) -> Any:
        return wait() if world == "async" else is_free.wait(PATIENCE_S) and None

    book = Book(world, on_assigned=hold)
    with reading(member(client, book)) as reader:
        wait_until(lambda: book.events)
        buffer = twin_of_any(reader.consumer).fetch_buffer
        wait_until(lambda: buffer.statistics()[ZERO].buffered_count == 1)
        assert reader.messages == []
        waiting = reader.consumer.health().waiting_for
        assert waiting == "on_assigned of test/0-0, test/0-1"
        is_free.set()
        wait_until(lambda: reader.texts == [b"a"])
        assert reader.consumer.health().waiting_for is None


def test_an_on_assigned_that_raises_ends_reading(
    client: Any, broker: AnyBroker, world: str
) -> None:
    """Without what it prepares no message is handed out; `health` says so."""
    broker.put(b"a")

    def fail(*_args: Any) -> Any:
        raise LookupError("no table")

    book = Book(world, on_assigned=fail)
    with member(client, book) as consumer:
        with pytest.raises(ClientError, match="on_assigned raised LookupError") as info:
            consumer.receive(PATIENCE_S)
        assert isinstance(info.value.__cause__, LookupError)
        (problem,) = consumer.health().problems
        assert "no table" in problem
    assert book.events == [("on_assigned", BOTH), ("on_revoked", BOTH)]


# -- revoked ---------------------------------------------------------------------------


@pytest.mark.slow
def test_on_revoked_commits_before_a_partition_moves(
    client: Any, other: Any, broker: AnyBroker, world: str
) -> None:
    """The next owner begins after what the hook committed; nothing comes twice."""
    for number in (0, 1):
        broker.put(b"a", b"b", partition=number)
    book = Book(world, on_revoked=lambda consumer, _partitions: consumer.commit())
    one = member(client, book, commit_interval_s=None, consumer_id="c1")
    with reading(one) as reader:
        wait_until(lambda: len(reader.messages) == 4)
        assert stored(broker, ONE) is None
        two = member(other, commit_interval_s=None, consumer_id="c2")
        with reading(two) as next_reader:
            wait_until(lambda: two.assignment() == {ONE})
            assert book.events == [("on_assigned", BOTH), ("on_revoked", {ONE})]
            if world == "sync":
                assert set(book.threads) == {reader.thread}
            assert stored(broker, ONE)
            broker.put(b"c", partition=1)
            wait_until(lambda: next_reader.texts)
            assert next_reader.texts == [b"c"]


def test_what_another_partition_is_at_is_not_committed_by_a_hook(
    client: Any, other: Any, broker: AnyBroker, world: str
) -> None:
    """A commit in a hook has what is handled: not the message that a handler has."""
    broker.put(b"a", b"b")
    book = Book(world, on_revoked=lambda consumer, _partitions: consumer.commit())
    one = member(client, book, commit_interval_s=None, consumer_id="c1")
    with one:
        assert one.receive(PATIENCE_S).data == b"a"
        if world == "async":
            two = member(other, consumer_id="c2")
            with two:
                wait_until(lambda: two.assignment() == {ONE})
            assert book.count("on_revoked") == 1
            assert not stored(broker, ZERO)
        one.receive(PATIENCE_S)
        one.receive(0)


def test_a_hook_that_raises_commits_nothing_and_delays_nobody(
    client: Any, other: Any, broker: AnyBroker, world: str
) -> None:
    """Messages that it could not save come to the next owner; this reader ends."""
    broker.put(b"a", partition=1)

    def fail(*_args: Any) -> Any:
        raise OSError("disk full")

    book = Book(world, on_revoked=fail)
    with reading(member(client, book, consumer_id="c1")) as reader:
        wait_until(lambda: reader.texts == [b"a"])
        with reading(member(other, consumer_id="c2")) as next_reader:
            wait_until(lambda: next_reader.texts == [b"a"])
            wait_until(lambda: reader.error is not None)
            assert "on_revoked raised OSError('disk full')" in str(reader.error)
            assert book.of("on_revoked") == [{ONE}]
            assert book.count("on_lost") == 0


@pytest.mark.slow
def test_a_hook_that_hangs_is_passed_over_and_cannot_commit(
    client: Any, other: Any, broker: AnyBroker, world: str
) -> None:
    """After the bound the partition goes without it, and `on_lost` says so."""
    broker.put(b"a", partition=1)
    is_free = threading.Event()
    ends: list[BaseException] = []

    async def hang(consumer: Any) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            ends.append(error)
            raise

    def wait(consumer: Any, _partitions: frozenset[TopicPartition]) -> Any:
        if world == "async":
            return hang(consumer)
        assert is_free.wait(PATIENCE_S)
        try:
            consumer.commit()
        except OwnershipLostError as error:
            ends.append(error)
        return None

    book = Book(world, on_revoked=wait)
    options = {"consumer_id": "c1", "revoke_timeout_s": 0.2}
    with reading(member(client, book, **options)) as reader:
        wait_until(lambda: reader.texts == [b"a"])
        with reading(member(other, consumer_id="c2")) as next_reader:
            wait_until(lambda: next_reader.texts == [b"a"])
            is_free.set()
            wait_until(lambda: book.of("on_lost") == [{ONE}])
            assert len(ends) == 1
            assert reader.error is None


@pytest.mark.slow
def test_a_message_that_is_handled_for_too_long_takes_the_hooks_time(
    client: Any, other: Any, broker: AnyBroker, world: str
) -> None:
    """`on_revoked` is never called when the partition may be another's."""
    broker.put(b"a", partition=1)
    book = Book(world)
    options = {"consumer_id": "c1", "revoke_timeout_s": 0.2}
    with member(client, book, **options) as one:
        assert one.receive(PATIENCE_S).data == b"a"
        with reading(member(other, consumer_id="c2")) as next_reader:
            wait_until(lambda: next_reader.texts == [b"a"])
            one.receive(0.02)
            wait_until(lambda: book.of("on_lost") == [{ONE}])
            assert book.count("on_revoked") == 0


@pytest.mark.slow
def test_hooks_of_a_thread_that_does_not_read_are_not_called_late(
    other: Any, broker: AnyBroker
) -> None:
    """It hears `on_lost` when it reads again, and of what came and went nothing."""
    with WORLDS["sync"](**broker.client_options, **QUICK) as client:
        book = Book("sync")
        options = {"consumer_id": "c1", "revoke_timeout_s": 0.1}
        with member(client, book, **options) as one:
            one.receive(0.02)
            assert book.events == [("on_assigned", BOTH)]
            two = member(other, consumer_id="c2")
            with two:
                wait_until(lambda: two.assignment() == {ONE})
            wait_until(lambda: one.assignment() == BOTH)
            three = member(other, consumer_id="c3")
            with three:
                wait_until(lambda: three.assignment() == {ONE})
                assert book.events == [("on_assigned", BOTH)]
                one.receive(0.02)
                assert book.events[1:] == [("on_lost", {ONE})]
            wait_until(lambda: one.assignment() == BOTH)
            one.receive(0.02)
            assert book.events[2:] == [("on_assigned", {ONE})]


def test_a_hook_interrupts_a_long_batch(other: Any, broker: AnyBroker) -> None:
    """A loop that is at a batch of one partition calls the hook of another one."""
    broker.put(*(b"%d" % number for number in range(500)))
    with WORLDS["sync"](**broker.client_options, **QUICK) as client:
        book = Book("sync")
        with member(client, book, consumer_id="c1", revoke_timeout_s=3600.0) as one:
            messages = iter(one)
            texts = [next(messages).data]
            two = member(other, consumer_id="c2")
            starting = threading.Thread(target=two.start, daemon=True)
            starting.start()
            wait_until(lambda: thread_calls_of(one).is_due)
            texts.append(next(messages).data)
            assert book.events[1:] == [("on_revoked", {ONE})]
            wait_until(lambda: two.assignment() == {ONE})

            texts += [message.data for message in take(one, 500 - len(texts))]
            assert texts == [b"%d" % number for number in range(500)]
            starting.join(PATIENCE_S)
            two.close()


# -- lost ------------------------------------------------------------------------------


def test_a_lost_session_calls_on_lost_where_nothing_can_be_committed(
    client: Any, broker: AnyBroker, world: str
) -> None:
    """Then partitions are assigned again, and what was not committed comes again."""
    broker.put(b"a")
    errors: list[Exception] = []

    def commit(consumer: Any, _partitions: frozenset[TopicPartition]) -> Any:
        async def commit_async() -> None:
            with pytest.raises(OwnershipLostError, match="on_lost") as info:
                await consumer.commit()
            errors.append(info.value)

        if world == "async":
            return commit_async()
        with pytest.raises(OwnershipLostError, match="on_lost") as info:
            consumer.commit()
        errors.append(info.value)
        return None

    book = Book(world, on_lost=commit)
    with reading(member(client, book, commit_interval_s=3600.0)) as reader:
        wait_until(lambda: reader.texts == [b"a"])
        reader.consumer.receive(0)
        expire(client, broker)
        wait_until(lambda: reader.texts == [b"a", b"a"])
        assert [name for name, _ in book.events] == [
            "on_assigned",
            "on_lost",
            "on_assigned",
        ]
        assert book.of("on_lost") == [BOTH]
        assert len(errors) == 1
        assert reader.error is None


def test_a_session_that_is_lost_during_on_revoked_ends_it(
    client: Any, other: Any, broker: AnyBroker, world: str
) -> None:
    """Its commit is refused, its error is no failure of the user, `on_lost` follows."""
    is_called, is_free = threading.Event(), threading.Event()

    async def commit_later(consumer: Any) -> None:
        await asyncio.Event().wait()

    def commit(consumer: Any, _partitions: frozenset[TopicPartition]) -> Any:
        is_called.set()
        if world == "async":
            return commit_later(consumer)
        assert is_free.wait(PATIENCE_S)
        return consumer.commit()

    book = Book(world, on_revoked=commit)
    with reading(member(client, book, consumer_id="c1")) as reader:
        wait_until(lambda: book.count("on_assigned") == 1)
        two = member(other, consumer_id="c2")
        with reading(two):
            assert is_called.wait(PATIENCE_S)
            expire(client, broker)
            wait_until(two.assignment)
            is_free.set()
            wait_until(lambda: book.count("on_lost") == 1)
            assert both_of(*book.of("on_lost")) == BOTH
            wait_until(lambda: book.count("on_assigned") >= 2)
            assert reader.error is None
            # It may be asked to give partitions away again.
            book.actions.clear()


# -- close, run ------------------------------------------------------------------------


@pytest.mark.parametrize("closes", ["block", "client"])
def test_close_calls_on_revoked_where_it_can_commit(
    broker: AnyBroker, world: str, closes: str
) -> None:
    """In the thread that closes, before the last commit."""
    broker.put(b"a", b"b")
    book = Book(world, on_revoked=lambda consumer, _partitions: consumer.commit())
    with WORLDS[world](**broker.client_options, **QUICK) as client:
        consumer = member(client, book, commit_interval_s=None)
        consumer.start()
        assert consumer.receive(PATIENCE_S).data == b"a"
        assert consumer.receive(PATIENCE_S).data == b"b"
        if closes == "block":
            consumer.close()
    assert consumer.is_closed
    assert book.events == [("on_assigned", BOTH), ("on_revoked", BOTH)]
    assert stored(broker, ZERO)
    if world == "sync":
        assert set(book.threads) == {threading.current_thread()}


def test_close_says_that_a_hook_raised(
    client: Any, broker: AnyBroker, world: str
) -> None:
    """When all is closed; a later read could not say it."""
    broker.put(b"a")

    def fail(*_args: Any) -> Any:
        raise OSError("disk full")

    consumer = member(client, Book(world, on_revoked=fail))
    consumer.start()
    assert consumer.receive(PATIENCE_S).data == b"a"
    with pytest.raises(ClientError, match="on_revoked raised OSError"):
        consumer.close()
    assert consumer.is_closed
    consumer.close()
    assert not stored(broker, ZERO)
    assert not broker.zookeeper.names(PATHS.members("g"))


@pytest.mark.slow
def test_close_ends_in_its_time_when_a_hook_hangs(
    client: Any, broker: AnyBroker, world: str
) -> None:
    """The group is left; `on_lost` is called if the hook lets it."""
    is_free = threading.Event()

    async def hang() -> None:
        await asyncio.Event().wait()

    def wait(*_args: Any) -> Any:
        return hang() if world == "async" else is_free.wait(0.6) and None

    book = Book(world, on_revoked=wait)
    consumer = member(client, book)
    consumer.start()
    consumer.receive(0.02)
    wait_until(lambda: book.events)
    consumer.close(timeout=0.3)
    assert consumer.is_closed
    wait_until(lambda: not broker.zookeeper.names(PATHS.members("g")))
    if world == "async":
        assert [name for name, _ in book.events] == [
            "on_assigned",
            "on_revoked",
            "on_lost",
        ]
    is_free.set()


def test_a_hook_that_closes_its_consumer_is_refused(
    client: Any, broker: AnyBroker, world: str
) -> None:
    """The close would wait for the hook, and the hook for the close."""
    book = Book(world, on_assigned=lambda consumer, _partitions: consumer.close())
    with member(client, book) as consumer:
        with pytest.raises(ClientError, match="close: not possible in on_assigned"):
            consumer.receive(PATIENCE_S)
        assert not consumer.is_closed


def test_a_hook_may_read_and_close_another_consumer(
    client: Any, other: Any, broker: AnyBroker, world: str
) -> None:
    """It fills a table from a topic, say."""
    found: list[Message | None] = []

    def read(*_arguments: object) -> None:
        with other.consumer("loading", ["test"], start="earliest") as loading:
            found.append(loading.receive(PATIENCE_S))
            loading.commit()

    async def read_beside(*_arguments: object) -> None:
        await asyncio.to_thread(read)

    broker.put(b"1")
    book = Book(world, on_assigned=read if world == "sync" else read_beside)
    with member(client, book) as consumer:
        assert consumer.receive(PATIENCE_S).data == b"1"
        assert [one and one.data for one in found] == [b"1"]


@pytest.mark.slow
def test_run_calls_hooks_while_handlers_work(
    client: Any, other: Any, broker: AnyBroker, world: str
) -> None:
    """In the sync world in the thread that called it, not in a handler's."""
    for number in (0, 1):
        broker.put(b"a", partition=number)
    handled: list[bytes] = []

    def handle(message: Message) -> None:
        handled.append(bytes(message.data))

    async def handle_async(message: Message) -> None:
        handle(message)

    book = Book(world, on_revoked=lambda consumer, _partitions: consumer.commit())
    one = member(client, book, commit_interval_s=None, consumer_id="c1")
    with one:
        handler = handle if world == "sync" else handle_async
        running = threading.Thread(target=one.run, args=(handler,), daemon=True)
        running.start()
        wait_until(lambda: len(handled) == 2)
        two = member(other, commit_interval_s=None, consumer_id="c2")
        with reading(two) as reader:
            wait_until(lambda: two.assignment() == {ONE})
            assert stored(broker, ONE)
            broker.put(b"b", partition=1)
            wait_until(lambda: reader.texts == [b"b"])
        if world == "sync":
            assert set(book.threads) == {running}
        one.close()
        running.join(PATIENCE_S)
    assert book.events[-1][0] == "on_revoked"


def test_a_thread_that_waits_for_a_batch_calls_hooks(
    other: Any, broker: AnyBroker
) -> None:
    """Messages of a list that was not handed out are not committed by a hook."""
    broker.put(b"a")
    with WORLDS["sync"](**broker.client_options, **QUICK) as client:
        book = Book("sync", on_revoked=lambda consumer, _partitions: consumer.commit())
        one = member(client, book, commit_interval_s=None, consumer_id="c1")
        with one:
            lists: list[list[Message]] = []
            reader = threading.Thread(
                target=lambda: lists.append(one.receive_many(9, 3600.0, fill=True)),
                daemon=True,
            )
            reader.start()
            wait_until(lambda: book.events)
            two = member(other, consumer_id="c2")
            with two:
                wait_until(lambda: two.assignment() == {ONE})
                assert book.events[1:] == [("on_revoked", {ONE})]
                assert book.threads == [reader, reader]
                assert not stored(broker, ZERO)
                broker.put(*[b"b"] * 8)
                reader.join(PATIENCE_S)
                assert len(lists[0]) == 9


def test_a_hook_that_raises_ends_a_run(
    client: Any, broker: AnyBroker, world: str
) -> None:
    """As an error of the consumer does."""

    def fail(*_args: Any) -> Any:
        raise LookupError("no table")

    async def handle_async(_message: Message) -> None: ...

    def handle(_message: Message) -> None: ...

    with member(client, Book(world, on_assigned=fail)) as consumer:
        handler = handle if world == "sync" else handle_async
        with pytest.raises(ClientError, match="no table"):
            consumer.run(handler, timeout=PATIENCE_S)


def test_ctrl_c_in_a_hook_ends_the_call_that_reads(broker: AnyBroker) -> None:
    """And not the client's loop: the consumer closes as always."""

    def interrupt(*_args: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    with WORLDS["sync"](**broker.client_options, **QUICK) as client:
        book = Book("sync", on_assigned=interrupt)
        with member(client, book) as consumer:
            with pytest.raises(KeyboardInterrupt):
                consumer.receive(PATIENCE_S)
            with pytest.raises(ClientError, match="KeyboardInterrupt"):
                consumer.receive(PATIENCE_S)
        assert book.events[-1] == ("on_revoked", BOTH)


def test_consumers_without_a_group_have_hooks_too(
    broker: AnyBroker, world: str
) -> None:
    """Their partitions come at the start, and go at the end."""
    broker.put(b"a")
    book = Book(world)
    with (
        WORLDS[world](brokers=[broker.address], **QUICK) as client,
        member(client, book) as consumer,
    ):
        assert consumer.receive(PATIENCE_S).data == b"a"
    assert book.events == [("on_assigned", BOTH), ("on_revoked", BOTH)]


# -- refused ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["on_assigned", "on_revoked", "on_lost"])
def test_hooks_are_functions(client: Any, world: str, name: str) -> None:
    """Plain ones in the sync world, which awaits nothing."""

    async def hook(*_args: Any) -> None: ...

    with pytest.raises(TypeError, match=f"{name}: expected a function"):
        ConsumerOptions(**{name: 3})
    if world == "sync":
        with pytest.raises(ConfigError, match=f"{name}: expected a plain function"):
            client.consumer("g", ["test"], **{name: hook})


def test_a_lambda_around_an_async_hook_is_refused(broker: AnyBroker) -> None:
    """It would do nothing."""

    async def hook() -> None: ...

    with (
        WORLDS["sync"](**broker.client_options, **QUICK) as client,
        client.consumer("g", ["test"], on_assigned=lambda *_: hook()) as consumer,
        pytest.raises(ClientError, match="coroutine, which is not awaited"),
    ):
        consumer.receive(PATIENCE_S)


# -- the order of calls, in virtual time -----------------------------------------------


class Rig:
    """Hooks that note their calls; `ready` are the partitions to be handed out."""

    def __init__(self, **hooks: Any) -> None:
        self.events: list[Event] = []
        self.ready: set[TopicPartition] = set()
        self.errors: list[MetaqError] = []
        self.holds: dict[str, asyncio.Event] = {}
        names = ("on_assigned", "on_revoked", "on_lost")
        options = ConsumerOptions(**{name: self._hook(name) for name in names} | hooks)
        self.hooks = Hooks(
            "c", options, on_ready=self.ready.update, on_failed=self.errors.append
        )

    def _hook(self, name: str) -> Callable[..., Any]:
        async def note(_consumer: Any, partitions: frozenset[TopicPartition]) -> None:
            self.events.append((name, partitions))
            if name in self.holds:
                await self.holds[name].wait()

        return note

    def hold(self, name: str) -> asyncio.Event:
        self.holds[name] = asyncio.Event()
        return self.holds[name]

    async def assign(self, *partitions: TopicPartition) -> None:
        for one in partitions:
            self.hooks.begin(one)
        self.hooks.announce(partitions)
        await asyncio.sleep(1)


def test_partitions_of_assignments_that_wait_come_together() -> None:
    """Those that have gone by then are left out, and are not revoked either."""

    async def scenario() -> None:
        rig = Rig()
        held = rig.hold("on_assigned")
        await rig.assign(ZERO)
        await rig.assign(ONE)
        await rig.assign(partition(2), partition(3))
        assert await rig.hooks.revoke(frozenset({partition(3)}), timeout_s=5)
        held.set()
        await asyncio.sleep(1)
        assert rig.events == [
            ("on_assigned", {ZERO}),
            ("on_assigned", {ONE, partition(2)}),
        ]
        assert rig.ready == {ZERO, ONE, partition(2)}

    run_virtually(scenario())


def test_what_is_lost_before_its_on_assigned_is_not_announced() -> None:
    """Nor does anything wait for it; the user never knew it, so it is no `on_lost`."""

    async def scenario() -> None:
        rig = Rig()
        held = rig.hold("on_assigned")
        await rig.assign(ZERO)
        await rig.assign(ONE)
        rig.hooks.lose([ONE])
        held.set()
        await asyncio.sleep(1)
        assert rig.events == [("on_assigned", {ZERO})]
        assert (rig.ready, rig.hooks.waiting_for()) == ({ZERO}, [])

    run_virtually(scenario())


def test_what_is_lost_and_comes_again_during_on_assigned_is_announced_again() -> None:
    """The return of the first call hands out nothing of the second assignment."""

    async def scenario() -> None:
        rig = Rig()
        held = rig.hold("on_assigned")
        await rig.assign(ZERO, ONE)
        rig.hooks.lose([ZERO])
        await rig.assign(ZERO)
        held.set()
        await asyncio.sleep(1)
        assert rig.events == [
            ("on_assigned", BOTH),
            ("on_lost", {ZERO}),
            ("on_assigned", {ZERO}),
        ]
        assert rig.ready == BOTH

    run_virtually(scenario())


def test_an_on_assigned_that_raised_is_not_called_again_for_its_partition() -> None:
    """Lost and assigned again while that call waited, it is known by that call."""

    async def scenario() -> None:
        calls: list[frozenset[TopicPartition]] = []

        def refuse(_consumer: Any, partitions: frozenset[TopicPartition]) -> None:
            calls.append(partitions)
            if ZERO in partitions:
                raise ValueError("no")

        rig = Rig(on_assigned=refuse)
        held = rig.hold("on_revoked")
        others = frozenset({ONE, partition(2)})
        await rig.assign(*others)
        revoking = []
        for one in others:
            revoke = rig.hooks.revoke(frozenset({one}), timeout_s=60)
            revoking.append(asyncio.create_task(revoke))
            await asyncio.sleep(1)
            if len(revoking) == 1:
                await rig.assign(ZERO)
        rig.hooks.lose([ZERO])
        await rig.assign(ZERO)
        held.set()
        assert await asyncio.gather(*revoking) == [True, True]
        await asyncio.sleep(1)
        assert calls == [others, {ZERO}]

    run_virtually(scenario())


def test_a_hook_of_partitions_that_are_all_lost_is_cancelled() -> None:
    """It would keep the turn of those that come again."""

    async def scenario() -> None:
        rig = Rig()
        rig.hold("on_assigned")
        await rig.assign(ZERO)
        rig.hooks.lose([ZERO])
        rig.holds.clear()
        await rig.assign(ZERO)
        assert [name for name, _ in rig.events] == [
            "on_assigned",
            "on_lost",
            "on_assigned",
        ]
        assert rig.errors == []

    run_virtually(scenario())


def test_a_partition_that_is_lost_ends_the_on_revoked_that_it_is_in() -> None:
    """Its commit would fail, and the others wait for it; no last commit follows."""

    async def scenario() -> None:
        rig = Rig()
        await rig.assign(ZERO, ONE)
        rig.hold("on_revoked")
        revoking = asyncio.create_task(rig.hooks.revoke(BOTH, timeout_s=50))
        await asyncio.sleep(1)
        rig.hooks.lose([ZERO])
        await asyncio.sleep(1)
        assert revoking.done()
        assert not await revoking
        assert rig.events[1:] == [
            ("on_revoked", BOTH),
            ("on_lost", {ZERO}),
            ("on_lost", {ONE}),
        ]

    run_virtually(scenario())


def test_a_revoke_that_is_cancelled_goes_on_in_the_next_one() -> None:
    """A consumer that closes during a rebalance calls `on_revoked` once."""

    async def scenario() -> None:
        rig = Rig()
        await rig.assign(ZERO, ONE)
        held = rig.hold("on_revoked")
        first = asyncio.create_task(rig.hooks.revoke(frozenset({ZERO}), timeout_s=10))
        await asyncio.sleep(1)
        first.cancel()
        await asyncio.wait({first})
        second = asyncio.create_task(rig.hooks.revoke(BOTH, timeout_s=10))
        await asyncio.sleep(1)
        held.set()
        assert await second
        assert rig.events[1:] == [("on_revoked", {ZERO}), ("on_revoked", {ONE})]

    run_virtually(scenario())


def test_without_time_on_revoked_is_not_called() -> None:
    """The partitions may go at any moment."""

    async def scenario() -> None:
        rig = Rig()
        await rig.assign(ZERO)
        assert not await rig.hooks.revoke(frozenset({ZERO}), timeout_s=0.0)
        await asyncio.sleep(1)
        assert rig.events[1:] == [("on_lost", {ZERO})]

    run_virtually(scenario())


def test_without_hooks_nothing_is_held() -> None:
    """And nothing keeps a last commit back."""

    async def scenario() -> None:
        rig = Rig(on_assigned=None, on_revoked=None, on_lost=None)
        assert not rig.hooks.are_set
        await rig.assign(ZERO)
        assert rig.hooks.held == set()
        assert await rig.hooks.revoke(frozenset({ZERO}), timeout_s=0.0)

    run_virtually(scenario())


def test_a_task_that_a_hook_began_is_not_in_it() -> None:
    """It may commit and close when the hook has returned."""

    async def scenario() -> None:
        tasks: list[asyncio.Task[None]] = []

        async def work() -> None:
            await asyncio.sleep(5)
            refuse_inside(rig.hooks, "close")
            assert not commits_inside(rig.hooks)

        def hook(*_args: Any) -> None:
            assert commits_inside(rig.hooks)
            tasks.append(asyncio.create_task(work()))

        rig = Rig(on_assigned=hook)
        await rig.assign(ZERO)
        rig.hooks.lose([ZERO])
        await tasks[0]

    run_virtually(scenario())


def test_the_end_of_a_consumer_waits_for_its_hooks_and_not_for_ever() -> None:
    """`on_lost` is called after the last partition has gone."""

    async def scenario() -> None:
        rig = Rig()
        await rig.assign(ZERO)
        rig.hold("on_lost")
        rig.hooks.lose([ZERO])
        await rig.hooks.close(3.0)
        assert rig.events[1:] == [("on_lost", {ZERO})]
        await rig.hooks.close(3.0)

    run_virtually(scenario())
