"""Errors for argument names of other clients suggest ours, in both worlds."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

from metaq.client import (
    AsyncClient,
    Client,
    ClientOptions,
    Consumer,
    ConsumerOptions,
    Producer,
    ProducerOptions,
    RetryPolicy,
)
from metaq.client.foreign_names import OURS
from metaq.client.options import QueueOptions
from tests.brokers import AnyBroker, StartBroker
from tests.client.worlds import QUICK, WORLDS

OPTIONS = (ClientOptions, ConsumerOptions, ProducerOptions, QueueOptions, RetryPolicy)


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    return start_broker({"test": 1})


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, broker: AnyBroker) -> Iterator[Any]:
    with WORLDS[request.param](**broker.client_options, **QUICK) as one:
        yield one


THEIR_NAMES = [
    ("consumer", {"group_id": "g", "topics": ["test"]}, "'group'"),
    ("consumer", {"auto_offset_reset": "earliest"}, "'start'"),
    ("consumer", {"enable_auto_commit": False}, "'commit_interval_s'; None: only"),
    ("consumer", {"max_poll_records": 5}, "'max_count' of batches, 'count_max'"),
    (
        "producer",
        {"acks": "all"},
        "not needed: a message is acknowledged when it is on",
    ),
    ("producer", {"linger_ms": 5}, "'linger_s', in seconds"),
    ("producer", {"linger.ms": 5}, "'linger_s', in seconds"),
    ("producer", {"value_serializer": str}, "not needed: 'data' is bytes, encode it"),
    ("queue", {"prefetch_count": 4}, "'prefetch' of a queue, 'buffer_count_max'"),
    ("queue", {"visibility_timeout": 30}, "'lease_s' of a queue, in seconds"),
    ("producer", {"bootstrap_servers": "h:1"}, "'zookeeper', its address, or"),
]


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(("method", "options", "ours"), THEIR_NAMES)
def test_a_name_of_another_client_is_answered_with_ours(
    kind: type[Any], method: str, options: dict[str, Any], ours: str
) -> None:
    """Users of Kafka write theirs first; nothing is made."""
    name = next(iter(options))
    with pytest.raises(TypeError) as refused:
        getattr(kind("127.0.0.1:2181"), method)(**options)
    text = str(refused.value)
    assert text.startswith(f"{kind.__name__}.{method}: no option '{name}'; here that")
    assert f"here that is {ours}" in text


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("retries", "attempts_max"),
        ("retry_backoff_ms", "first_s"),
        ("retry_backoff_max_ms", "max_s"),
    ],
)
def test_a_retry_policy_by_other_names_is_answered(theirs: str, ours: str) -> None:
    """With its own fields, not those of a producer alone."""
    options: dict[str, Any] = {theirs: 3}
    with pytest.raises(TypeError, match=f"'{theirs}'; .*'{ours}' of RetryPolicy"):
        RetryPolicy(**options)


def test_the_address_by_another_name_is_answered_too() -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(TypeError, match="here that is 'zookeeper', its address"):
            kind(bootstrap_servers="127.0.0.1:9092")  # type: ignore[call-arg]  # that is it


def test_arguments_of_sends_by_other_names_are_answered(
    broker: AnyBroker, client: Any
) -> None:
    """Also where our argument is missing for it; nothing is sent."""
    with client.producer() as producer, client.xa("q") as xa:
        transaction = producer.transaction()
        for call in (producer.send, transaction.send, xa.send):
            with pytest.raises(TypeError, match=r"'value'; here that is 'data'$"):
                call("test", value=b"x")
            with pytest.raises(TypeError, match=r"no option 'tmeout'; did you mean"):
                call("test", b"x", tmeout=5)
        with pytest.raises(TypeError, match="'on_delivery'; here that is 'add_done_"):
            producer.send_many("test", [b"x"], on_delivery=print)
    assert broker.stored() == []


def test_every_name_of_ours_that_they_lead_to_is_there() -> None:
    """In quotes stand names that this client has."""
    known = {one.name for kind in OPTIONS for one in fields(kind)}
    for call in (Client.__init__, Client.consumer, Producer.send, Consumer.receive,
                 Consumer.receive_many, Consumer.batches, Client.producer,
                 Client.xa):  # fmt: skip
        known.update(inspect.signature(call).parameters)
    known |= {"send", "message.data", "message.key", "add_done_callback"}
    quoted = {name for text in OURS.values() for name in re.findall(r"'([^']+)'", text)}
    assert quoted - known == set()
