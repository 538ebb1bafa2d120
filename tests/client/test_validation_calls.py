"""Wrong arguments of public calls: `TypeError` or `ConfigError`, and nothing sent."""

import inspect
import math
from collections.abc import Callable, Iterator
from datetime import date, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from metaq.client import (
    Client,
    ExactlyOnce,
    FileOffsets,
    MessageBatch,
    OutgoingMessage,
    Pinned,
    Queue,
    QueueMessage,
    RetryPolicy,
    Scheduled,
    SendFuture,
    SendResult,
)
from metaq.errors import ConfigError
from metaq.filter.language import parse_filter
from metaq.model import BrokerId, MessageId, Millis, Offset, TopicPartition
from tests.brokers import AnyBroker, StartBroker
from tests.client.test_derived_worlds import TWINS
from tests.client.worlds import IDLE, QUICK, WORLDS

ZERO = TopicPartition("test", BrokerId(0), 0)
NO_TEXTS: tuple[object, ...] = (5, None, b"test", ["test"])
NO_TOPICS = (*NO_TEXTS, "", "te st", "a/b", "a\nb", "\ud800", ".")
NO_NAMES: tuple[object, ...] = ("test", b"test", 5, [], [5], ["te st"])
NO_DATA: tuple[object, ...] = ("text", 5, None, [b"x"], {"a": 1})
NO_TIMES: tuple[object, ...] = (-1, math.nan, math.inf, "5", True)
NO_PARTITIONS: tuple[object, ...] = (0, "", "0", "a-b", "0-0 ", b"0-0", ("0", 0))
NO_LISTS: tuple[object, ...] = (["0"], [0], "0-0", [], b"0-0", [None])
NO_KEYS: tuple[object, ...] = (5, ["k"], "\ud800")
NO_HEADERS: tuple[object, ...] = (5, {"a": "b"}, {5: b""}, [("a",)], {"": b""}, "ab")
NO_OFFSETS: tuple[object, ...] = (-1, 1.5, "0", True, None, 1 << 63)
NO_COUNTS: tuple[object, ...] = (0, -1, 1.5, "1", True, None)
NO_MOMENTS: tuple[object, ...] = (5, "2026-01-01", date(2026, 1, 1))
NO_GROUPS: tuple[object, ...] = (5, None, b"g", ["g"])
NO_FILTERS: tuple[object, ...] = (5, b"tag = 'a'", "", "tag =", "\ud800", "a" * 3000)
NO_FUNCTIONS: tuple[object, ...] = (5, "handle", None)

NO_SPANS: tuple[object, ...] = (
    -1, math.nan, math.inf, "5", "soon", "1h ", "", True, [5], timedelta(-1),
    timedelta.max,
)  # fmt: skip
TIMED: dict[str, tuple[object, ...]] = {
    "delay": NO_SPANS,
    "deliver_at": (*NO_MOMENTS, datetime(2030, 1, 1)),  # that is wrong
    "expires_in": (*NO_SPANS, 0),
}
SEND: dict[str, tuple[object, ...]] = {
    "attribute": (5, b"a", "\ud800"),
    "key": NO_KEYS,
    "headers": NO_HEADERS,
    "tag": (5, b"x", "\ud800"),
    "timeout": NO_TIMES,
}
PUT = {
    "topic": NO_TOPICS,
    "data": NO_DATA,
    **SEND,
    "partition": NO_PARTITIONS,
    **TIMED,
}
MANY: dict[str, tuple[object, ...]] = {
    "topic": NO_TOPICS,
    "messages": (
        b"x", "x", 5, None, ["x"], [5], [OutgoingMessage(5)],  # type: ignore[arg-type]
        [OutgoingMessage(b"x", key=5)],  # type: ignore[arg-type]
        [OutgoingMessage(b"x", partition="x")],
        [OutgoingMessage(b"x", tag=5)],  # type: ignore[arg-type]
    ),
    "tag": SEND["tag"],
    "timeout": NO_TIMES,
    **TIMED,
}  # fmt: skip
WRONG_COMMITS: tuple[object, ...] = (5, "x", [5], {"x": 0}, {"0-0": -1}, {"0-0": "0"})
XIDS: tuple[object, ...] = (5, "x", b"x")
# Call → argument → wrong values.
WRONG_RULES: dict[str, tuple[object, ...]] = {
    "lease_s": ("x", 0.5, -1, 10**6),
    "deliveries_max": (0, 1001, 1.5, "x"),
    "then": (5, "keep"),
    "dead_letter_topic": (5, b"x"),
    "retry_delays_s": (5, "1,2", ["x"], [-1], [10**6]),
    "timeout": NO_TIMES,
}
ROUTED: dict[str, tuple[object, ...]] = {
    "routing_key": NO_TEXTS,
    "data": NO_DATA,
    "key": NO_KEYS,
    "headers": NO_HEADERS,
    "tag": SEND["tag"],
    "timeout": NO_TIMES,
    **TIMED,
}
BOUND: dict[str, tuple[object, ...]] = {
    "exchange": NO_TOPICS,
    "topic": NO_TOPICS,
    "key": NO_TEXTS,
    "headers": (5, None, {"a": b"b"}, {5: "b"}, "ab"),
    "match": (5, None, "one"),
    "timeout": NO_TIMES,
}
WRONG: dict[str, dict[str, tuple[object, ...]]] = {
    "Client.producer": {"selector": NO_FUNCTIONS[:2], "timeout_s": NO_TIMES},
    "Client.ordered_producer": {
        "topic": NO_TOPICS,
        "partitions": (5, None, "", "x", ["0"], [0], [], b"0:1"),
        "directory": (5, None),
        "selector": NO_FUNCTIONS[:2],
    },
    "Client.xa": {"qualifier": (5, None, "", "a b", "a:b", b"q")},
    "Client.consumer": {
        "group": (*NO_TEXTS, "", "a b", "a/b"),
        "topics": NO_NAMES,
        "partitions": NO_LISTS,
        "offsets": (5, "file", FileOffsets),
        "start": ("newest", None, 1.5, -1, {"0-0": 5}),
        "fetch_bytes": NO_COUNTS,
        "consumer_id": (5, "a b"),
        "skip_repeats": (5, "yes"),
        "strategy": (5, "x"),
        "where": NO_FILTERS,
        "message_filter": NO_FUNCTIONS[:2],
        "duplicate_ids": (5,),
    },
    "Client.browse": {
        "topic": NO_TOPICS,
        "partitions": NO_LISTS,
        "start": ("newest", None, 1.5, -1),
        "last": NO_COUNTS[1:-1],
        "since": NO_MOMENTS,
        "until": NO_MOMENTS,
        "where": NO_FILTERS,
        "timeout": NO_TIMES,
    },
    "Client.find": {
        "topic": NO_TOPICS,
        "key": NO_KEYS,
        "header": (5, "a", ("a",), ("a", "b"), (5, b"x"), ("", b"")),
        "id": (1.5, "5", True, 1 << 63),
        "partitions": NO_LISTS,
        "since": NO_MOMENTS,
        "until": NO_MOMENTS,
        "limit": NO_COUNTS[:-1],
        "read_bytes_max": NO_OFFSETS[:-1],
        "on_read": NO_FUNCTIONS[:2],
        "timeout": NO_TIMES,
    },
    "Client.request": {
        "topic": NO_TOPICS,
        "data": NO_DATA,
        "key": NO_KEYS,
        "headers": NO_HEADERS,
        "tag": SEND["tag"],
        "timeout": NO_TIMES,
    },
    "Client.get": {
        "topic": NO_TOPICS,
        "partition": (*NO_PARTITIONS, None),
        "offset": NO_OFFSETS,
        "max_bytes": NO_COUNTS,
        "timeout": NO_TIMES,
    },
    "Client.topics": {"timeout": NO_TIMES},
    "Client.partitions": {"topic": NO_TOPICS, "timeout": NO_TIMES},
    "Client.stats": {"item": (5, None, b"topics", "a b", "a\nb"), "timeout": NO_TIMES},
    "Client.close": {"timeout": NO_TIMES},
    "Producer.prepare": {"topic": NO_TOPICS, "timeout": NO_TIMES},
    "Producer.send": PUT,
    "Producer.send_nowait": PUT,
    "Producer.send_many": MANY,
    "Producer.send_oneway": {
        name: values
        for name, values in PUT.items()
        if name not in {"partition", "timeout", *TIMED}
    },
    "Producer.transaction": {"timeout": (*NO_TIMES, 0), "keys": ("x", None, 5)},
    "Producer.exactly_once": {"batch": (5, None, [], [b"x"])},
    "Producer.cancel": {
        "scheduled": (5, None, "", "t/0-0 0 0 0", b"x", SendResult(1, ZERO, 0)),
        "timeout": NO_TIMES,
    },
    "Producer.flush": {"timeout": NO_TIMES},
    "Producer.close": {"timeout": NO_TIMES},
    "OrderedProducer.start": {"timeout": NO_TIMES},
    "OrderedProducer.send": {"data": NO_DATA, **SEND},
    "OrderedProducer.close": {"timeout": NO_TIMES},
    "Transaction.send": PUT,
    "Transaction.send_many": MANY,
    "Transaction.ack": {"message": ("x", None, 5), "timeout": NO_TIMES},
    "Transaction.commit": {"timeout": NO_TIMES},
    "Transaction.rollback": {"timeout": NO_TIMES},
    "Xa.xid": {
        "format_id": (-1, "1", None, True, 1 << 31),
        "global_id": (5, None, "x" * 65),
        "branch": (5, None, "x" * 65),
    },
    "Xa.begin": {"xid": (*XIDS, None), "timeout": (*NO_TIMES, 0)},
    "Xa.send": PUT,
    "Xa.send_many": MANY,
    "Xa.prepare": {"timeout": NO_TIMES},
    "Xa.commit": {"xid": XIDS, "timeout": NO_TIMES},
    "Xa.rollback": {"xid": XIDS, "timeout": NO_TIMES},
    "Xa.recover": {"timeout": NO_TIMES},
    "Xa.forget": {"xid": (*XIDS, None), "timeout": NO_TIMES},
    "Xa.close": {"timeout": NO_TIMES},
    "Consumer.start": {"timeout": NO_TIMES},
    "Consumer.receive": {"timeout": NO_TIMES},
    "Consumer.receive_many": {"count_max": NO_COUNTS, "timeout": NO_TIMES},
    "Consumer.run": {
        "handler": NO_FUNCTIONS,
        "concurrency": NO_COUNTS,
        "retry": (5, None, "drop", RetryPolicy),
        "timeout": NO_TIMES,
    },
    "Consumer.batches": {
        "max_count": NO_COUNTS,
        "max_bytes": NO_COUNTS[:-1],
        "max_wait_s": (*NO_TIMES, None),
    },
    "Consumer.pause": {"partitions": (5, None, ["x"], [5], "0")},
    "Consumer.resume": {"partitions": (5, None, ["x"], [5], "0")},
    "Consumer.commit": {"what": WRONG_COMMITS, "timeout": NO_TIMES},
    "Consumer.commit_nowait": {"what": WRONG_COMMITS},
    "Consumer.committed": {"partitions": (5, ["x"], [5]), "timeout": NO_TIMES},
    "Consumer.rollback": {"timeout": NO_TIMES},
    "Consumer.lag": {"timeout": NO_TIMES},
    "Consumer.seek": {
        "partition": (5, None, b"0-0", "x"),
        "to": (*NO_OFFSETS, "newest", date(2026, 1, 1)),
        "timeout": NO_TIMES,
    },
    "Consumer.close": {"timeout": NO_TIMES},
    "Admin.create_topic": {
        "topic": NO_TOPICS,
        "partitions": NO_COUNTS,
        "brokers": (5, None, "some", [], ["0"], [-1]),
        "settings": (5, None, {"a": 1}, {5: "a"}),
        "timeout": NO_TIMES,
    },
    "Admin.alter_topic": {
        "topic": NO_TOPICS,
        "partitions": NO_COUNTS[:-1],
        "brokers": (5, "some", [], ["0"], [-1]),
        "settings": (5, None, {"a": 1}, {5: "a"}),
        "timeout": NO_TIMES,
    },
    "Admin.delete_topic": {"topic": NO_TOPICS, "timeout": NO_TIMES},
    "Admin.describe_topic": {"topic": NO_TOPICS, "timeout": NO_TIMES},
    "Admin.topics": {"timeout": NO_TIMES},
    "Admin.brokers": {"timeout": NO_TIMES},
    "Admin.forget_broker": {"broker_id": NO_OFFSETS[:-1], "timeout": NO_TIMES},
    "Admin.broker_stats": {
        "broker_id": NO_OFFSETS[:-1],
        "item": (5, None, b"topics", "a b", "a\nb"),
        "timeout": NO_TIMES,
    },
    "Admin.describe_partitions": {"topics": NO_NAMES[:3], "timeout": NO_TIMES},
    "Admin.wait_until_there": {"topics": NO_NAMES[:3], "timeout": NO_TIMES},
    "Admin.groups": {"timeout": NO_TIMES},
    "Admin.describe_group": {"group": NO_GROUPS, "timeout": NO_TIMES},
    "Admin.committed_offsets": {
        "group": NO_GROUPS,
        "topics": NO_NAMES[:3],
        "timeout": NO_TIMES,
    },
    "Admin.reset_offsets": {
        "group": NO_GROUPS,
        "to": ("newest", None, 1.5, 5, {"0-0": -1}, {"x": 5}),
        "topics": NO_NAMES[:3],
        "partitions": (5, ["x"], [5]),
        "timeout": NO_TIMES,
    },
    "Admin.copy_offsets": {
        "source": NO_GROUPS,
        "target": NO_GROUPS,
        "topics": NO_NAMES[:3],
        "timeout": NO_TIMES,
    },
    "Admin.delete_offsets": {
        "group": NO_GROUPS,
        "topics": NO_NAMES[:3],
        "partitions": (5, ["x"], [5]),
        "timeout": NO_TIMES,
    },
    "Admin.delete_group": {"group": NO_GROUPS, "timeout": NO_TIMES},
    "Admin.settle_group": {"group": NO_GROUPS, "timeout": NO_TIMES},
    "Client.exchange": {"name": NO_TOPICS, "mandatory": (5, None, "yes")},
    "Exchange.send": ROUTED,
    "Exchange.send_nowait": ROUTED,
    "Exchange.flush": {"timeout": NO_TIMES},
    "Exchange.close": {"timeout": NO_TIMES},
    "Admin.exchanges": {"timeout": NO_TIMES},
    "Admin.unread_definitions": {"timeout": NO_TIMES},
    "Admin.create_exchange": {
        "exchange": (*NO_TOPICS, "__x"),
        "kind": (5, None, "x"),
        "alternate": (5, "a b"),
        "timeout": NO_TIMES,
    },
    "Admin.delete_exchange": {"exchange": NO_TOPICS, "timeout": NO_TIMES},
    "Admin.bind": BOUND,
    "Admin.unbind": BOUND,
    "Admin.route": {
        "exchange": NO_TOPICS,
        "routing_key": NO_TEXTS,
        "headers": NO_HEADERS,
        "timeout": NO_TIMES,
    },
    "Admin.queue_groups": {"timeout": NO_TIMES},
    "Admin.describe_queue_group": {"group": NO_GROUPS, "timeout": NO_TIMES},
    "Admin.create_queue_group": {
        "group": NO_GROUPS,
        "topic": NO_TOPICS,
        "ordered_by": (5, "id"),
        "start": (5, "now"),
        "where": (5, "tag ="),
        **WRONG_RULES,
    },
    "Admin.alter_queue_group": {
        "group": NO_GROUPS,
        "where": (5, b"", "tag ="),
        **WRONG_RULES,
    },
    "Admin.delete_queue_group": {"group": NO_GROUPS, "timeout": NO_TIMES},
    "Admin.scheduled": {
        "topic": tuple(each for each in NO_TOPICS if each is not None),
        "since": TIMED["deliver_at"],
        "until": TIMED["deliver_at"],
        "count_max": (-1, 1001, 1.5, "1", True, None),
        "timeout": NO_TIMES,
    },
    "Admin.cancel_scheduled": {
        "topic": NO_TOPICS,
        "since": TIMED["deliver_at"],
        "until": TIMED["deliver_at"],
        "timeout": NO_TIMES,
    },
}
# A sequence, with `commit` alone of its own; test_exactly_once.py has the second one,
# and queue/test_work_queue.py the workers of queue groups.
OTHERS = (MessageBatch, ExactlyOnce, Queue, QueueMessage)
ONCE = {"start", "close"}
# Right values of the other arguments.
RIGHT: dict[str, Any] = {
    "topic": "test",
    "exchange": "events",
    "name": "events",
    "routing_key": "a",
    "data": b"x",
    "messages": [b"x"],
    "partition": "0-0",
    "offset": 0,
    "group": "g",
    "topics": ["test"],
    "qualifier": "other",
    "handler": print,
    "count_max": 1,
    "format_id": 1,
    "global_id": "x",
    "broker_id": 9,
    "source": "g",
    "target": "h",
    "to": "latest",
    "scheduled": Scheduled(MessageId(1), ZERO, Offset(0), Millis(5), 0),
}


def required(call: str) -> dict[str, Any]:
    """Return right values for the arguments of a call that have no default."""
    kind, _, name = call.partition(".")
    (sync,) = (one for one, _twin in TWINS if one.__name__ == kind)
    found = inspect.signature(getattr(sync, name)).parameters.values()
    names = [one.name for one in found if one.default is one.empty]
    right = dict(RIGHT)
    if kind == "Client":
        right.update(partitions="0:1", directory="/nowhere")
    else:
        right.update(partitions=1)
    if kind == "Consumer":
        right.update(partition=None)
    return {one: right[one] for one in names if one in right}


def faults(call: str, function: Callable[..., Any], right: dict[str, Any]) -> list[str]:
    """Return the wrong arguments that a call takes, or refuses as something else."""
    found = []
    for name, values in WRONG[call].items():
        for value in values:
            given = f"{call}({name}={value!r:.40})"
            try:
                result = function(**{**right, name: value})
                if inspect.isgenerator(result):
                    next(result)
                elif isinstance(result, SendFuture):
                    result.result(5)
            except (TypeError, ConfigError) as error:
                if name not in str(error) and "unexpected" in str(error):
                    found.append(f"{given}: {error}")
            except BaseException as error:
                found.append(f"{given}: {error!r}")
            else:
                found.append(f"{given} is taken")
    return found


@pytest.fixture(params=["sync", "async"])
def world(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    return start_broker(topics={"test": 1})


@pytest.fixture
def client(world: str, broker: AnyBroker) -> Iterator[Any]:
    bound = {"request_timeout_s": 0.5}
    with WORLDS[world](**broker.client_options, **QUICK, **bound) as one:
        yield one


@pytest.mark.slow
def test_every_call_refuses_what_it_cannot_use(
    client: Any, broker: AnyBroker, tmp_path: Path
) -> None:
    """By type or by value, before anything is sent; it goes on to work after that."""
    parse_filter("tag = 'a'")  # the first one on a loop is looked at by `start`
    producer, xa = client.producer(timeout_s=0.5), client.xa("q", timeout_s=0.5)
    xa.begin(xa.xid(1, "x"))
    ordered = client.ordered_producer("test", "0:1", tmp_path, timeout_s=0.5)
    consumer = client.consumer("g", ["test"], **IDLE)
    before = dict(broker.zookeeper.nodes)
    parts = {
        "Client": client,
        "Producer": producer,
        "Transaction": producer.transaction(),
        "Xa": xa,
        "Admin": client.admin(),
        "Exchange": client.exchange("events", timeout_s=0.5),
        "OrderedProducer": ordered,
        "Consumer": consumer,
    }
    found = []
    for call in WRONG:
        kind, _, name = call.partition(".")
        if name in ONCE or kind not in {"Consumer", "OrderedProducer"}:
            function = getattr(parts[kind], name)
            found += faults(call, function, required(call))
    assert broker.zookeeper.nodes == before
    with ordered, consumer:
        for call in WRONG:
            kind, _, name = call.partition(".")
            if kind in {"Consumer", "OrderedProducer"} and name not in ONCE:
                function = getattr(parts[kind], name)
                if name == "commit_nowait" and not isinstance(client, Client):
                    # A plain call of the loop.
                    function = partial(client.call, consumer.twin.commit_nowait)
                found += faults(call, function, required(call))
        assert not found, "\n".join(found)
        xa.rollback()
        assert broker.stored() == []
        producer.send("test", b"a", timeout=5)
        ordered.send(b"b", timeout=5)
        assert broker.stored() == [b"a", b"b"]


@pytest.mark.parametrize(
    ("function", "given"),
    [
        (function, given)
        for function, values in (
            (Pinned, (None, "x", 1.5, b"0-0")),
            (lambda value: Client(zookeeper=value), (5, b"h:1", "")),
            (lambda value: Client(brokers=value), (5, "h:1", [5], [], ["h"], b"h:1")),
            (lambda value: Client("h:1", root=value), (5, None)),
            (lambda value: RetryPolicy(then=value), (5, "x", None)),
            (lambda value: RetryPolicy(attempts_max=value), NO_COUNTS),
            (lambda value: RetryPolicy(dead_letter_topic=value), (5, "te st")),
            (lambda value: RetryPolicy(park_dir=value, then="park"), (5, None)),
            (FileOffsets, (5, None)),
        )
        for given in values
    ],
)
def test_what_is_made_before_a_client_refuses_it_too(
    function: Callable[..., object], given: object
) -> None:
    with pytest.raises((TypeError, ConfigError)):
        function(given)


def test_a_number_of_another_library_is_refused_by_its_name() -> None:
    """As an offset or a size it would travel as other text than its digits."""
    numpy = pytest.importorskip("numpy")
    with (
        Client("h:1") as client,
        pytest.raises(
            TypeError, match=r"^offset: expected a whole number \(int\), got int64"
        ),
    ):
        client.get("test", "0-0", numpy.int64(5))


def test_every_argument_of_a_public_call_has_wrong_values_here() -> None:
    """A call that is added belongs in the table."""
    free = {
        "fill",
        "exc_type",
        "broadcast",
        "stop_at_end",
        "partial",
        "kind",
        "error",
        "trace",
        "plan",
        "force",
        "with_logs",
        "options",
    }
    missing = []
    for sync, _twin in TWINS:
        for name, function in inspect.getmembers(sync, inspect.isfunction):
            call = f"{sync.__name__}.{name}"
            parameters = list(inspect.signature(function).parameters)[1:]
            if name.startswith("_") or not parameters or sync in OTHERS:
                continue
            if len(parameters) > 11:  # options, see test_options.py
                continue
            known = set(WRONG.get(call, ())) | free
            missing += [f"{call}({each})" for each in parameters if each not in known]
    assert missing == []
