"""Help, errors and `repr` for programmers."""

import asyncio
import inspect
import os
import pydoc
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from metaq.client import (
    AsyncClient,
    AsyncConsumer,
    AsyncProducer,
    AsyncQueue,
    AsyncQueueMessage,
    AsyncResponder,
    Client,
    ClientOptions,
    ConfigError,
    Consumer,
    ConsumerOptions,
    OutgoingMessage,
    Producer,
    ProducerOptions,
    Queue,
    QueueMessage,
    QueueOptions,
    Responder,
    RetryPolicy,
)
from metaq.client.admin.topic_admin import AsyncAdmin
from metaq.client.sync.client import MessageBatch
from metaq.client.sync.producers import Exchange
from metaq.model import Offset
from metaq.testing.zk import MemoryZooKeeper
from tests.brokers import AnyBroker, StartBroker
from tests.client.worlds import IDLE, QUICK
from tests.rigs.waiting import wait_until

CALLS: list[tuple[Callable[..., Any], type[Any]]] = [
    (Client, ClientOptions),
    (AsyncClient, ClientOptions),
    (Client.producer, ProducerOptions),
    (AsyncClient.producer, ProducerOptions),
    (Client.ordered_producer, ProducerOptions),
    (AsyncClient.ordered_producer, ProducerOptions),
    (Client.consumer, ConsumerOptions),
    (AsyncClient.consumer, ConsumerOptions),
    (Client.queue, QueueOptions),
    (AsyncClient.queue, QueueOptions),
]


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    return start_broker({"test": 2})


# -- help -----------------------------------------------------------------------------


@pytest.mark.parametrize(("call", "options"), CALLS)
def test_a_signature_has_every_option(
    call: Callable[..., Any], options: type[Any]
) -> None:
    """With its type and default, as editors and `inspect` show it."""
    parameters = inspect.signature(call).parameters
    for field in fields(options):
        shown = parameters[field.name]
        wanted = (inspect.Parameter.KEYWORD_ONLY, field.default, field.type)
        assert (shown.kind, shown.default, shown.annotation) == wanted
    assert "options" not in parameters


@pytest.mark.parametrize(("call", "options"), CALLS)
def test_help_lists_every_option(call: Callable[..., Any], options: type[Any]) -> None:
    """A line for each, below what the call does."""
    told = call.__init__ if inspect.isclass(call) else call  # type: ignore[misc]
    text = pydoc.render_doc(told, renderer=pydoc.plaintext)
    listed = re.findall(r"^ {8}(\w+): .+ = .+$", text, re.MULTILINE)
    assert listed == [field.name for field in fields(options)]


def test_help_of_a_bound_method_is_the_same() -> None:
    client = Client("127.0.0.1:2181")
    text = pydoc.render_doc(client.producer, renderer=pydoc.plaintext)
    assert "linger_s: float = 0.0" in text
    assert "self" not in inspect.signature(client.producer).parameters


# -- options --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("method", "arguments", "wrong", "near"),
    [
        ("producer", (), "linger", "linger_s"),
        ("producer", (), "selecter", "selector"),
        ("ordered_producer", ("test", "0:1", "/"), "retry_unknwon", "retry_unknown"),
        ("consumer", ("g", ["test"]), "fetch_byte", "fetch_bytes"),
        ("consumer", ("g", ["test"]), "brodcast", "broadcast"),
        ("browse", ("test",), "partition", "partitions"),
    ],
)
def test_a_misspelt_option_is_told_with_the_nearest(
    kind: type[Any], method: str, arguments: tuple[Any, ...], wrong: str, near: str
) -> None:
    """Those of the call itself too; before anything is made."""
    client = kind("127.0.0.1:2181")
    with pytest.raises(TypeError) as refused:
        getattr(client, method)(*arguments, **{wrong: 1})
    assert str(refused.value) == (
        f"{kind.__name__}.{method}: no option '{wrong}'; did you mean '{near}'?"
    )


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_misspelt_option_of_a_client_is_told(kind: type[Any]) -> None:
    """One that is like none brings the list."""
    with pytest.raises(TypeError, match="did you mean 'request_timeout_s'"):
        kind("127.0.0.1:2181", request_timeout=1)
    with pytest.raises(TypeError, match=r"no option 'zzz'; there are brokers, chance,"):
        kind("127.0.0.1:2181", zzz=1)


@pytest.mark.parametrize("kind", [Consumer, AsyncConsumer])
def test_batches_know_the_names_of_other_clients(kind: type[Any]) -> None:
    with pytest.raises(TypeError, match="batches: no option 'max_records'; here that"):
        kind.batches(object.__new__(kind), max_records=5)


@pytest.mark.parametrize(
    ("kind", "call", "arguments", "wrong", "near"),
    [
        *(
            (kind, *case)
            for kind in (Consumer, AsyncConsumer)
            for case in [
                ("receive", (), "timeout_s", "timeout"),
                ("receive_many", (3,), "timeout_s", "timeout"),
                ("run", (print,), "concurency", "concurrency"),
                ("seek", ("0-0", 0), "timeout_s", "timeout"),
            ]
        ),
        *(
            (kind, *case)
            for kind in (QueueMessage, AsyncQueueMessage)
            for case in [
                ("nack", (), "delay_s", "delay"),
                ("reject", (), "raeson", "reason"),
                ("extend", (), "second", "seconds"),
            ]
        ),
        (AsyncConsumer, "receive_many", (), "count", "count_max"),
        (Queue, "run", (print,), "concurency", "concurrency"),
        (AsyncQueue, "run", (print,), "concurency", "concurrency"),
        (AsyncQueue, "receive", (), "timeout_s", "timeout"),
        (AsyncQueue, "receive_many", (3,), "timeout_s", "timeout"),
        (Responder, "run", (print,), "concurency", "concurrency"),
        (AsyncResponder, "run", (print,), "concurency", "concurrency"),
        (RetryPolicy, "__init__", (), "attempt_max", "attempts_max"),
    ],
)
def test_a_misspelt_argument_is_named_with_the_nearest(
    kind: type[Any], call: str, arguments: tuple[Any, ...], wrong: str, near: str
) -> None:
    """Before anything happens, and before a coroutine is awaited."""
    base: Any = tuple if issubclass(kind, tuple) else object
    one = base.__new__(kind)
    with pytest.raises(TypeError) as refused:
        getattr(one, call)(*arguments, **{wrong: 1})
    name = f"{kind.__name__}.{call}".removesuffix(".__init__")
    assert str(refused.value) == f"{name}: no option '{wrong}'; did you mean '{near}'?"


@pytest.mark.parametrize(
    ("call", "twin", "sentence"),
    [
        (Consumer.receive, AsyncConsumer.receive, "timeout: seconds; None waits"),
        (
            Consumer.receive_many,
            AsyncConsumer.receive_many,
            "another thread is reading",
        ),
        (Consumer.batches, AsyncConsumer.batches, "max_wait_s: seconds to wait for mo"),
        (
            Consumer.commit_nowait,
            AsyncConsumer.commit_nowait,
            "ClosedError: the client is closed.",
        ),
        (
            Producer.send_oneway,
            AsyncProducer.send_oneway,
            "ClosedError: the client is closed.",
        ),
        (Producer.send_nowait, AsyncProducer.send_nowait, "Messages of one thread are"),
        (Consumer.seek, AsyncConsumer.seek, "Interrupt: reading continues as before"),
        (Consumer.run, AsyncConsumer.run, "handler: handles one message, on one of th"),
        (
            Queue.run,
            AsyncQueue.run,
            "handler: handles one message, on one of the threa",
        ),
        (Responder.run, AsyncResponder.run, "ConfigError: the handler is a coroutine"),
    ],
)
def test_help_of_a_sync_call_is_complete(
    call: Callable[..., Any], twin: Callable[..., Any], sentence: str
) -> None:
    """Users of the sync world need not look at the async one."""
    text = inspect.getdoc(call) or ""
    assert sentence in text
    assert "see `Async" not in text
    assert text.splitlines()[0] == (inspect.getdoc(twin) or "").splitlines()[0]


@pytest.mark.parametrize(
    "kind", [Client, Consumer, Exchange, MessageBatch, Producer, Queue, Responder]
)
def test_help_of_the_sync_world_does_not_refer_to_the_async_one(
    kind: type[Any],
) -> None:
    for name, call in vars(kind).items():
        if inspect.isfunction(call) and not name.startswith("_"):
            assert "`Async" not in (inspect.getdoc(call) or ""), name


@pytest.mark.parametrize("kind", [Consumer, Queue, Responder])
def test_a_handler_of_a_sync_run_is_a_plain_function(kind: type[Any]) -> None:
    """For editors and type checkers."""
    signature = inspect.signature(kind.run)
    assert "Awaitable" not in str(signature.parameters["handler"].annotation)


def test_a_sync_call_names_itself_and_not_its_twin(broker: AnyBroker) -> None:
    """Calls that are derived from an async class."""
    with Client(**broker.client_options) as client, client.producer() as producer:
        calls: list[tuple[str, Any]] = [
            ("Client.topics", client.topics),
            ("Client.request", client.request),
            ("Admin.describe_topic", client.admin().describe_topic),
            ("Producer.flush", producer.flush),
            ("Transaction.send", producer.transaction().send),
        ]
        for name, call in calls:
            with pytest.raises(TypeError, match=f"^{name}: no option 'zzz'; there are"):
                call(zzz=1)
        for name, call in calls[1:3]:
            with pytest.raises(TypeError, match=f"^{name}: missing a required argumen"):
                call()


@pytest.mark.parametrize(
    ("options", "name", "value", "sentence"),
    [
        (ClientOptions, "root", 5, "root: expected str, got int 5"),
        (
            ProducerOptions,
            "retry_unknown",
            "no",
            "retry_unknown: expected True or False, got str 'no'",
        ),
        (
            ConsumerOptions,
            "skip_repeats",
            0,
            "skip_repeats: expected True or False, got int 0",
        ),
        (ConsumerOptions, "consumer_id", 7, "consumer_id: expected str, got int 7"),
        (
            ConsumerOptions,
            "message_filter",
            "x",
            "message_filter: expected a function, got str 'x'",
        ),
    ],
)
def test_an_option_of_another_type_is_refused(
    options: type[Any], name: str, value: object, sentence: str
) -> None:
    """A text is no switch: "no" would count as yes."""
    with pytest.raises(TypeError) as refused:
        options(**{name: value})
    assert str(refused.value) == sentence


# -- arguments of another type --------------------------------------------------------


def mistakes(client: Any, producer: Any, consumer: Any) -> dict[str, Callable[[], Any]]:
    """Return calls with an argument of another type, by the error's sentence."""
    return {
        "topic: expected str, got bytes b'test'": lambda: producer.send(b"test", b"x"),
        "topic: expected str, got list ['test']": (
            lambda: producer.send(["test"], b"x")
        ),
        "topic: expected str, got int 5": lambda: producer.send_many(5, [b"x"]),
        "topic: expected str, got NoneType None": (
            lambda: producer.send_nowait(None, b"x")
        ),
        "data: expected bytes-like, got str": lambda: producer.send("test", "x"),
        "key: expected str or bytes, got int 7": (
            lambda: producer.send("test", b"x", key=7)
        ),
        "key: expected str or bytes, got int 0": (
            lambda: producer.send("test", b"x", key=0)
        ),
        "attribute: expected str, got int 3": (
            lambda: producer.send("test", b"x", attribute=3)
        ),
        "attribute: expected str, got bytes b'a'": (
            lambda: producer.send_many("test", [OutgoingMessage(b"x", b"a")])  # type: ignore[arg-type]
        ),
        "messages: expected a list of bytes or OutgoingMessage, got bytes": (
            lambda: producer.send_many("test", b"abc")
        ),
        "messages: expected a list of bytes or OutgoingMessage, got int": (
            lambda: producer.send_many("test", 3)
        ),
        "group: expected str, got int 5": lambda: client.consumer(5, ["test"]),
        "group: expected str, got NoneType None": (
            lambda: client.consumer(None, ["test"])
        ),
        "topics: expected str, got int 1": lambda: client.consumer("g", [1]),
        "topics: expected a list of names, got int 1": (
            lambda: client.consumer("g", 1)
        ),
        "topics: expected a list of names, got bytes b'test'": (
            lambda: client.consumer("g", b"test")
        ),
        "partition: expected TopicPartition or str, got int 0": (
            lambda: client.consumer("g", ["test"], partitions=[0])
        ),
        "topic: expected str, got int 6": lambda: client.partitions(6),
        "topic: expected str, got int 8": lambda: client.get(8, "0-0", Offset(0)),
        "topic: expected str, got int 9": lambda: client.browse(9),
        "item: expected str, got int 1": lambda: client.stats(1),
        "selector: expected a function, got str 'x'": (
            lambda: client.producer(selector="x")
        ),
        "offsets: expected an object with load and commit and close, got int 5": (
            lambda: client.consumer("g", ["test"], offsets=5)
        ),
        "duplicate_ids: expected an object with seen and add, got int 5": (
            lambda: client.consumer("g", ["test"], duplicate_ids=5)
        ),
        **{
            f"consumer_id: expected a name without blanks and '/', got {bad!r}": (
                lambda bad=bad: client.consumer("g", ["test"], consumer_id=bad)
            )
            for bad in ("a/b", "", "a b", " a", "..", "a\x01")
        },
        "handler: expected a function, got int 4": lambda: consumer.run(4),
    }


async def told(call: Callable[[], Any]) -> str:
    """Return the text of a call's error, in either world."""
    try:
        found = call()
        if inspect.isawaitable(found):
            async with asyncio.timeout(60):
                await found
        elif inspect.isasyncgen(found):
            await anext(found)
        elif inspect.isgenerator(found):
            next(found)
    except (TypeError, ConfigError) as error:
        return str(error)
    return "nothing"


def test_an_argument_of_another_type_is_named(broker: AnyBroker) -> None:
    """Expected and got; no message goes anywhere."""

    async def main() -> dict[str, str]:
        async with AsyncClient(brokers=[broker.address], **QUICK) as client:
            producer = client.producer()
            async with client.consumer("g", ["test"], **IDLE) as consumer:
                calls = mistakes(client, producer, consumer)
                return {wanted: await told(call) for wanted, call in calls.items()}

    found = asyncio.run(main())
    assert found == {wanted: wanted for wanted in found}
    assert broker.stored() == []


def test_the_sync_world_names_it_too(broker: AnyBroker) -> None:
    with Client(brokers=[broker.address], **QUICK) as client:
        producer = client.producer()
        with client.consumer("g", ["test"], **IDLE) as consumer:
            calls = mistakes(client, producer, consumer)
            found = {w: asyncio.run(told(call)) for w, call in calls.items()}
    assert found == {wanted: wanted for wanted in found}
    assert broker.stored() == []


# -- the first partition --------------------------------------------------------------


def test_producers_of_one_message_each_spread(broker: AnyBroker) -> None:
    """Round robin begins where chance says."""
    turn = 1 / 2**32
    chances = iter([0.0, turn, 0.5, 0.5 + turn] * 3)
    with Client(
        brokers=[broker.address], chance=lambda: next(chances), **QUICK
    ) as client:
        used = []
        for _ in range(12):
            with client.producer() as producer:
                used.append(producer.send("test", b"x").partition.partition)
    assert used == [0, 1, 0, 1] * 3


def test_chance_is_the_default(broker: AnyBroker) -> None:
    """Forty producers on the same of two partitions: once in a trillion runs."""
    with Client(brokers=[broker.address], **QUICK) as client:
        used = Counter(
            client.producer().send("test", b"x").partition for _ in range(40)
        )
    assert len(used) == 2


# -- repr -----------------------------------------------------------------------------


def test_what_is_printed_says_where_it_points_and_how_it_is(
    broker: AnyBroker, tmp_path: Any
) -> None:
    place = re.escape(f"brokers meta://{broker.address}")
    client = Client(brokers=[broker.address], **QUICK)
    assert re.fullmatch(f"<Client of {place}: not started>", repr(client))
    with client:
        assert re.fullmatch(f"<Client of {place}: running>", repr(client))
        producer = client.producer()
        assert re.fullmatch(
            f"<Producer to {place}: open, 0 messages without an outcome>",
            repr(producer),
        )
        consumer = client.consumer("g", ["test"], **IDLE)
        head = f"<Consumer of group 'g', topics test, {place}"
        assert re.fullmatch(f"{head}: new, 0 partitions>", repr(consumer))
        with consumer:
            wait_until(lambda: len(consumer.assignment()) == 2)
            assert re.fullmatch(f"{head}: running, 2 partitions>", repr(consumer))
        assert re.fullmatch(f"{head}: closed, 0 partitions>", repr(consumer))
        ordered = client.ordered_producer("test", "0:2", tmp_path)
        head = f"<OrderedProducer of topic 'test' in 2 partitions, {place}"
        tail = re.escape(f"0 messages wait in {tmp_path}>")
        assert re.fullmatch(f"{head}: not started, {tail}", repr(ordered))
        with ordered:
            assert re.fullmatch(f"{head}: open, {tail}", repr(ordered))
        assert re.fullmatch(f"{head}: closed, {tail}", repr(ordered))
    assert repr(client).endswith(": closed>")
    assert ": ended," in repr(producer)


def test_the_async_world_prints_the_same(broker: AnyBroker) -> None:
    async def main() -> None:
        async with AsyncClient(**broker.client_options) as client:
            await client.topics()
            assert repr(client) == (
                "<AsyncClient of ZooKeeper: running, session connected>"
            )
            producer = client.producer()
            assert repr(producer).startswith("<AsyncProducer to ZooKeeper: open, ")
            consumer = client.consumer("g", ["test"])
            assert repr(consumer).startswith("<AsyncConsumer of group 'g', topics test")

    asyncio.run(main())


def test_a_session_that_was_never_there_is_not_lost() -> None:
    """So it is in the first moments of each client."""
    zookeeper = MemoryZooKeeper()
    zookeeper.stop()
    with Client(coordinator=zookeeper.coordinator) as client:
        wanted = "<Client of ZooKeeper: running, session not there yet>"
        assert repr(client) == wanted


def test_an_address_of_zookeeper_is_printed() -> None:
    client = AsyncClient("127.0.0.1:2181,127.0.0.1:2182")
    wanted = "ZooKeeper at 127.0.0.1:2181,127.0.0.1:2182: not started>"
    assert repr(client) == f"<AsyncClient of {wanted}"


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_in_the_child_of_a_fork_nothing_is_printed_but_that(broker: AnyBroker) -> None:
    """Locks of the parent may be held there for ever."""
    with Client(brokers=[broker.address], **QUICK) as client:
        producer = client.producer()
        read_end, write_end = os.pipe()
        if not os.fork():
            os.write(write_end, f"{client!r} {producer!r}".encode())
            os._exit(0)
        os.wait()
        text = os.read(read_end, 4096).decode()
        os.close(read_end)
        os.close(write_end)
    gone = "of another process, before a fork>"
    assert text == f"<Client {gone} <Producer {gone}"


@pytest.mark.parametrize("kind", [AsyncAdmin, AsyncClient, AsyncConsumer, AsyncQueue])
def test_an_async_call_names_itself_and_the_argument(kind: type[Any]) -> None:
    """Unknown and missing arguments are found before anything else."""
    one = object.__new__(kind)
    calls = [name for name in vars(kind) if not name.startswith("_")]
    for name in calls:
        call = getattr(kind, name)
        if inspect.isfunction(call) and name not in {"producer", "consumer", "queue"}:
            with pytest.raises(TypeError, match=f"{kind.__name__}.{name}: no option"):
                call(one, no_such_argument=1)
