"""Both worlds have the same names and arguments, and all waits can be bounded."""

import inspect
from typing import Any, Unpack, get_origin

import pytest

from metaq.client import (
    Admin,
    AsyncAdmin,
    AsyncClient,
    AsyncConsumer,
    AsyncExactlyOnce,
    AsyncExchange,
    AsyncMessageBatch,
    AsyncOrderedProducer,
    AsyncProducer,
    AsyncQueue,
    AsyncQueueMessage,
    AsyncTransaction,
    AsyncXa,
    Client,
    Consumer,
    ExactlyOnce,
    Exchange,
    MessageBatch,
    OrderedProducer,
    Producer,
    Queue,
    QueueMessage,
    Responder,
    SendFuture,
    Transaction,
    Xa,
)

TWINS: list[tuple[type[Any], type[Any]]] = [
    (Client, AsyncClient),
    (Producer, AsyncProducer),
    (Exchange, AsyncExchange),
    (Consumer, AsyncConsumer),
    (MessageBatch, AsyncMessageBatch),
    (OrderedProducer, AsyncOrderedProducer),
    (Admin, AsyncAdmin),
    (Transaction, AsyncTransaction),
    (ExactlyOnce, AsyncExactlyOnce),
    (Xa, AsyncXa),
    (Queue, AsyncQueue),
    (QueueMessage, AsyncQueueMessage),
]

UNBOUNDED = {
    "Client.start": "begins to connect, waits for nothing",
    "Client.producer": "makes an object",
    "Client.ordered_producer": "makes an object",
    "Client.consumer": "makes an object",
    "Client.queue": "makes an object",
    "Client.responder": "makes an object",
    "Client.xa": "makes an object",
    "Client.exchange": "makes an object",
    "Exchange.statistics": "asks no one",
    "Exchange.__enter__": "does nothing",
    "Exchange.__exit__": "is close, by close_timeout_s",
    "Client.admin": "makes an object",
    "Client.statistics": "asks no one",
    "Client.__enter__": "is start",
    "Client.__exit__": "is close, by close_timeout_s and the options of each",
    "Producer.send_oneway": "hands over, waits for nothing",
    "Producer.exactly_once": "makes an object",
    "Producer.statistics": "asks no one",
    "Producer.__enter__": "does nothing",
    "Producer.__exit__": "is close, by close_timeout_s",
    "Consumer.__enter__": "is start, by request_timeout_s and session_timeout_s",
    "Consumer.__exit__": "is close, by revoke_timeout_s and request_timeout_s",
    "Consumer.__iter__": "is receive for ever; receive has the bound",
    "Consumer.commit_nowait": "waits for nothing; the future ends by itself",
    "Consumer.assignment": "asks no one",
    "Consumer.batches": "is receive for ever; receive_many has the bound",
    "Consumer.pause": "waits for nothing",
    "Consumer.resume": "waits for nothing",
    "Consumer.paused": "asks no one",
    "Consumer.health": "asks no one",
    "Consumer.statistics": "asks no one",
    "MessageBatch.__iter__": "goes through a list",
    "MessageBatch.block": "makes an object",
    "OrderedProducer.__enter__": "is start, by the disk",
    "OrderedProducer.__exit__": "is close, by close_timeout_s",
    "OrderedProducer.statistics": "asks no one",
    "Transaction.__enter__": "does nothing",
    "ExactlyOnce.send": "by timeout_s of the producer",
    "ExactlyOnce.send_many": "by timeout_s of the producer",
    "ExactlyOnce.__enter__": "by timeout_s of the producer",
    "ExactlyOnce.__exit__": "by timeout_s of the producer",
    "Transaction.__exit__": "is commit or rollback, by timeout_s",
    "Xa.xid": "makes an object",
    "Xa.__enter__": "does nothing",
    "Xa.__exit__": "is close, by close_timeout_s",
    "Queue.__enter__": "is start, by request_timeout_s",
    "Queue.__exit__": "is close, by close_timeout_s",
    "Queue.__iter__": "is receive for ever; receive has the bound",
    "Queue.statistics": "asks no one",
    "QueueMessage.ack_nowait": "waits for nothing; the future ends by itself",
    "SendFuture.done": "asks no one",
    "SendFuture.add_done_callback": "waits for nothing",
    "SendFuture.pass_on": "waits for nothing",
    "SendFuture.__await__": "ends by the message's deadline; result has the bound",
}
"""Methods without a time-out, and the reason for each."""

INNER = {
    "AsyncClient.require_new",
    "AsyncConsumer.acknowledge",
    "AsyncConsumer.begin_handling",
    "AsyncConsumer.commit_order",
    "AsyncConsumer.commit_orders",
    "AsyncConsumer.decider",
    "AsyncExactlyOnce.add",
    "AsyncExactlyOnce.flush",
    "AsyncConsumer.limit_s",
    "AsyncConsumer.require_started",
    "AsyncConsumer.has_ended",
    "AsyncMessageBatch.confirm",
    "AsyncMessageBatch.block",
    "AsyncMessageBatch.lost",
    "AsyncMessageBatch.redeliver",
    "AsyncOrderedProducer.has_ended",
    "AsyncProducer.append_oneway",
    "AsyncProducer.has_ended",
    "AsyncQueue.ack_held",
    "AsyncExchange.producer",
    "AsyncQueue.end_hold",
    "AsyncQueue.refuse_hold",
    "AsyncQueue.begin_hold",
    "AsyncQueue.begin_run",
    "AsyncQueue.end_run",
    "AsyncQueue.end_work",
    "AsyncQueue.close_timeout_s",
    "AsyncQueue.conclude",
    "AsyncQueue.message",
    "AsyncQueue.require_started",
    "AsyncQueue.say",
    "AsyncQueue.settle",
    "MessageBatch.block",
}
"""Names that the worlds have for each other, and for their client."""

PROTOCOLS = {"__enter__", "__exit__", "__iter__", "__await__"}


def members_of(kind: type[Any]) -> dict[str, Any]:
    """Return what a class has of its own and of its bases in the project."""
    return {
        name: value
        for one in reversed(kind.__mro__)
        if one.__module__.startswith("metaq.")
        for name, value in vars(one).items()
    }


def calls_of(kind: type[Any]) -> dict[str, Any]:
    """Return what users may call: methods, and what `with`, `for` and `await` call."""
    return {
        name: value
        for name, value in members_of(kind).items()
        if inspect.isfunction(value) and (not name.startswith("_") or name in PROTOCOLS)
    }


def names_of(kind: type[Any]) -> set[str]:
    names = {name for name in members_of(kind) if not name.startswith("_")}
    return {name for name in names if f"{kind.__name__}.{name}" not in INNER}


def shape(function: Any) -> list[tuple[str, object, object]]:
    parameters = inspect.signature(function).parameters.values()
    return [(one.name, one.kind, one.default) for one in parameters]


@pytest.mark.parametrize("kind", [sync for sync, _ in TWINS] + [SendFuture])
def test_every_call_takes_a_timeout_or_is_known_to_need_none(kind: type[Any]) -> None:
    without = {
        f"{kind.__name__}.{name}"
        for name, function in calls_of(kind).items()
        if "timeout" not in inspect.signature(function).parameters
    }
    known = {name for name in UNBOUNDED if name.startswith(f"{kind.__name__}.")}
    assert without == known


@pytest.mark.parametrize("kind", [sync for sync, _ in TWINS] + [SendFuture])
def test_no_timeout_is_the_default_everywhere(kind: type[Any]) -> None:
    """None stands for the option that is named in the docstring."""
    for name, function in calls_of(kind).items():
        timeout = inspect.signature(function).parameters.get("timeout")
        assert timeout is None or timeout.default is None, name
        assert timeout is None or timeout.annotation == float | None, name


@pytest.mark.parametrize(("sync", "other"), TWINS)
def test_both_worlds_have_the_same_names(sync: type[Any], other: type[Any]) -> None:
    instance_only = {"group", "is_closed", "name", "options", "partitions", "qualifier"}
    instance_only |= {"state", "topic", "topics", "worker"}
    assert names_of(other) - names_of(sync) == set()
    assert names_of(sync) - names_of(other) - instance_only == set()


@pytest.mark.parametrize(("sync", "other"), TWINS)
def test_both_worlds_take_the_same_arguments(sync: type[Any], other: type[Any]) -> None:
    for name in calls_of(sync).keys() & calls_of(other).keys():
        assert shape(getattr(sync, name)) == shape(getattr(other, name)), name


@pytest.mark.parametrize(("_sync", "other"), TWINS)
def test_arguments_stand_where_a_call_is_written(
    _sync: type[Any], other: type[Any]
) -> None:
    """An editor that runs nothing shows them; options are those of a named class."""
    for name in names_of(other) & calls_of(other).keys():
        written = inspect.signature(inspect.unwrap(calls_of(other)[name]))
        for one in written.parameters.values():
            assert one.kind is not one.VAR_POSITIONAL, name
            is_open = one.kind is one.VAR_KEYWORD
            assert not is_open or get_origin(one.annotation) is Unpack, name


@pytest.mark.parametrize(("_sync", "other"), TWINS)
def test_what_a_timeout_means_is_said(_sync: type[Any], other: type[Any]) -> None:
    """The sync world refers to these texts."""
    for name in names_of(other) & calls_of(other).keys():
        function = calls_of(other)[name]
        if "timeout" in inspect.signature(function).parameters:
            text = inspect.getdoc(function) or ""
            assert "timeout: " in text or "`send`" in text, name


@pytest.mark.parametrize(("sync", "other"), TWINS)
def test_a_call_returns_what_its_twin_returns(
    sync: type[Any], other: type[Any]
) -> None:
    """Annotations of derived methods are those of the async ones, awaited."""
    of_each_world = {"producer", "ordered_producer", "xa", "consumer", "transaction"}
    of_each_world |= {
        "exactly_once",
        "exchange",
        "admin",
        "browse",
        "find",
        "batches",
        "commit_nowait",
    }
    of_each_world |= {"queue", "responder", "receive", "receive_many", "ack_nowait"}
    for name in names_of(other) & calls_of(other).keys() - of_each_world:
        ours = inspect.signature(getattr(sync, name)).return_annotation
        twin = inspect.signature(getattr(other, name)).return_annotation
        assert ours == twin, name


@pytest.mark.parametrize("kind", [sync for sync, _ in TWINS])
def test_help_of_the_sync_world_is_about_blocking_calls(kind: type[Any]) -> None:
    for name, function in calls_of(kind).items():
        text = inspect.getdoc(function) or ""
        assert name.startswith("__") or text, name
        assert not inspect.iscoroutinefunction(function), name
        for word in ("async with", "Cancellation", "event loop", "await "):
            assert word not in text, f"{name}: {word}"


@pytest.mark.parametrize("kind", [sync for sync, _ in TWINS])
def test_a_derived_method_goes_by_its_own_name(kind: type[Any]) -> None:
    """Tracebacks, logs and `help` name the sync class."""
    for name, function in vars(kind).items():
        if inspect.isfunction(function):
            assert function.__name__ == name
            assert function.__qualname__ == f"{kind.__name__}.{name}"
            assert function.__module__ == kind.__module__


@pytest.mark.parametrize("kind", [*(sync for sync, _ in TWINS), Responder])
def test_help_of_a_sync_class_needs_no_other_page(kind: type[Any]) -> None:
    """It names no async class."""
    assert kind.__doc__
    assert "Async" not in kind.__doc__
