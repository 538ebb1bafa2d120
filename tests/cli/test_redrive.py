"""`metaq queues redrive`: dead letters go back to their topics, each once."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from metaq.cli.cluster import Target
from metaq.cli.redrive import redrive
from metaq.client import Client, Message
from metaq.errors import ClientError, MetaqError
from metaq.model import BrokerId, MessageId, Offset, TopicPartition
from metaq.record.dead_letters import Origin, letter_headers
from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from tests.cli.runner import run

ONE_BROKER = {
    "broker": "MetaQ has no queue groups",
    "client": "likewise",
    "target": "likewise",
    "test_a_failure_in_the_middle_sends_nothing_and_forgets_nothing": "likewise",
}
NOW: dict[str, Any] = {"is_dry": False, "is_sure": True, "as_json": True}


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    with embedded_broker(topics={"orders": 1, "dead": 1}) as one:
        yield one


@pytest.fixture
def target(broker: EmbeddedBroker) -> Target:
    return Target("memory", "/meta", (), 5.0, broker.coordinator_factory)


@pytest.fixture
def client(broker: EmbeddedBroker) -> Iterator[Client]:
    with Client(**broker.client_options) as one:
        admin = one.admin()
        admin.create_queue_group("workers", "orders", dead_letter_topic="dead")
        yield one


def give_up(client: Client, *data: bytes) -> None:
    """Put messages, and reject them."""
    with client.producer() as producer:
        for each in data:
            producer.send(
                "orders", each, attribute="a", key=b"k", headers={"trace": b"1"}
            )
    with client.queue("orders", group="workers") as queue:
        for _ in data:
            message = queue.receive(30)
            assert message is not None
            message.reject(f"no number in {message.data.decode()}")


def bury(client: Client, topic: str, data: bytes, group: str = "workers") -> None:
    """Put a dead letter of some topic and group."""
    origin = Origin(
        TopicPartition(topic, BrokerId(0), 0), Offset(0), MessageId(1), "E", "x", group
    )
    with client.producer() as producer:
        producer.send("dead", data, headers=letter_headers((), origin))


def later(client: Client, count: int) -> list[Message]:
    """Return the messages of the topic after the first ones."""
    return list(client.browse("orders"))[count:]


def test_letters_go_back_as_they_were_and_once(
    client: Client, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """With key, attribute and headers; a second call has nothing to send."""
    give_up(client, b"x", b"y")
    redrive(target, "workers", None, **NOW)
    found, text = capsys.readouterr()
    rows = [json.loads(line) for line in found.splitlines()]
    assert {
        "topic": "orders",
        "cause": "rejected: no number in x",
        "letters": 1,
    } in rows
    assert text == "metaq: 2 dead letters sent back\n"
    sent = later(client, 2)
    assert [each.data for each in sent] == [b"x", b"y"]
    assert {(each.attribute, each.key) for each in sent} == {("a", b"k")}
    assert {each.header_pairs for each in sent} == {(("trace", b"1"),)}
    redrive(target, "workers", None, **NOW)
    assert "no dead letters that were not sent back" in capsys.readouterr().err
    give_up(client, b"z", b"z", b"z")  # the first three that come: x and y again
    redrive(target, "workers", None, **NOW)
    assert [each.data for each in later(client, 7)] == [b"x", b"y", b"z"]


def test_a_look_changes_nothing_and_a_limit_is_kept(
    client: Client, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next call goes on where the last one ended."""
    give_up(client, b"a", b"b", b"c")
    redrive(target, "workers", None, is_dry=True, is_sure=False, as_json=False)
    assert capsys.readouterr().out.splitlines()[1] == (
        "orders\trejected: no number in a\t1"
    )
    assert later(client, 3) == []
    redrive(target, "workers", 2, **NOW)
    assert [each.data for each in later(client, 3)] == [b"a", b"b"]
    redrive(target, "workers", 2, **NOW)
    assert [each.data for each in later(client, 5)] == [b"c"]


def test_letters_of_others_stay(client: Client, target: Target) -> None:
    """Of another group, and what is no letter."""
    bury(client, "orders", b"theirs", group="others")
    with client.producer() as producer:
        producer.send("dead", b"no letter")
    bury(client, "orders", b"ours")
    redrive(target, "workers", None, **NOW)
    assert [each.data for each in later(client, 0)] == [b"ours"]


def test_a_failure_in_the_middle_sends_nothing_and_forgets_nothing(
    broker: EmbeddedBroker, client: Client, target: Target
) -> None:
    """The letters of the same batch are rolled back, and come again."""
    bury(client, "orders", b"first")
    bury(client, "gone", b"second")
    with pytest.raises(MetaqError, match="gone"):
        redrive(target, "workers", None, **NOW)
    assert later(client, 0) == []
    broker.create_topic("gone")
    redrive(target, "workers", None, **NOW)
    assert [each.data for each in later(client, 0)] == [b"first"]
    assert [each.data for each in client.browse("gone")] == [b"second"]


def test_many_causes_are_counted_together(
    client: Client, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table is bounded."""
    give_up(client, *[b"%d" % number for number in range(60)])
    redrive(target, "workers", None, is_dry=True, is_sure=False, as_json=True)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 51
    assert rows[0] == {"topic": "orders", "cause": "other causes", "letters": 10}


def test_a_group_without_dead_letters_is_named(client: Client, target: Target) -> None:
    """And one that is not there."""
    client.admin().create_queue_group("mails", "orders", then="drop")
    with pytest.raises(ClientError, match="group mails drops what it gives up"):
        redrive(target, "mails", None, **NOW)
    with pytest.raises(ClientError, match="no queue group x; groups there are: mails"):
        redrive(target, "x", None, **NOW)
    assert run("queues", "redrive", "mails", "--limit", "0").exit_code == 2
