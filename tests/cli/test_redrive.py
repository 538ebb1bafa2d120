"""`metaq queues redrive`: dead letters go back to their topics, each once."""

import datetime as dt
import json
from collections.abc import Iterator
from typing import Any

import pytest

from metaq.cli.cluster import Target
from metaq.cli.redrive import LetterChoice, redrive
from metaq.client import Client, Message
from metaq.errors import ClientError, MetaqError
from metaq.model import BrokerId, MessageId, Millis, Offset, TopicPartition
from metaq.record.dead_letters import Origin, letter_headers
from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from tests.cli.runner import run

ONE_BROKER = {
    "broker": "MetaQ has no queue groups",
    "client": "likewise",
    "target": "likewise",
    "test_a_failure_in_the_middle_sends_nothing_and_forgets_nothing": "likewise",
    "test_letters_at_a_replica_set_are_refused_before_the_question": "likewise",
    "test_a_letter_too_large_to_be_put_again_names_the_call_that_sends_it": "likewise",
}
MOMENT = dt.datetime(2026, 1, 31, tzinfo=dt.UTC)
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


def bury(
    client: Client,
    topic: str,
    data: bytes,
    group: str = "workers",
    *,
    key: str | None = None,
    cause: str = "x",
    at_ms: int | None = None,
) -> None:
    """Put a dead letter of some topic and group."""
    origin = Origin(
        TopicPartition(topic, BrokerId(0), 0),
        Offset(0),
        MessageId(1),
        "E",
        cause,
        group,
        at_ms=None if at_ms is None else Millis(at_ms),
    )
    with client.producer() as producer:
        producer.send("dead", data, key=key, headers=letter_headers((), origin))


def later(client: Client, count: int) -> list[Message]:
    """Return the messages of the topic after the first ones."""
    return list(client.browse("orders"))[count:]


@pytest.mark.slow
def test_letters_go_back_as_they_were_and_once(
    client: Client, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """With key, attribute and headers; a second call has nothing to send."""
    give_up(client, b"x", b"y")
    redrive(target, "workers", LetterChoice(), **NOW)
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
    redrive(target, "workers", LetterChoice(), **NOW)
    text = capsys.readouterr().err
    assert "no dead letters in topic dead still to be sent back" in text
    give_up(client, b"z", b"z", b"z")  # the first three that come: x and y again
    redrive(target, "workers", LetterChoice(), **NOW)
    assert [each.data for each in later(client, 7)] == [b"x", b"y", b"z"]


@pytest.mark.slow
def test_a_look_changes_nothing_and_a_limit_is_kept(
    client: Client, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next call goes on where the last one ended."""
    give_up(client, b"a", b"b", b"c")
    redrive(
        target, "workers", LetterChoice(), is_dry=True, is_sure=False, as_json=False
    )
    assert capsys.readouterr().out.splitlines()[1] == (
        "orders\trejected: no number in a\t1"
    )
    assert later(client, 3) == []
    redrive(target, "workers", LetterChoice(limit=2), **NOW)
    assert [each.data for each in later(client, 3)] == [b"a", b"b"]
    redrive(target, "workers", LetterChoice(limit=2), **NOW)
    assert [each.data for each in later(client, 5)] == [b"c"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("choice", "meant"),
    [
        ({"key": "k2"}, b"b"),
        ({"cause": "customer"}, b"bc"),
        ({"since": MOMENT}, b"cd"),
        ({"until": MOMENT}, b"ab"),
        ({"since": MOMENT, "cause": "customer"}, b"c"),
        ({"cause": "customer", "limit": 1}, b"b"),
        ({"key": "nobody's"}, b""),
    ],
)
def test_what_is_not_chosen_is_found_by_a_later_call(
    client: Client,
    target: Target,
    capsys: pytest.CaptureFixture[str],
    choice: dict[str, Any],
    meant: bytes,
) -> None:
    """With the headers of its letter; each is sent back once in the end."""
    at_ms = int(MOMENT.timestamp() * 1000)
    bury(client, "orders", b"a", key="k1", at_ms=at_ms - 1)
    bury(client, "orders", b"b", key="k2", at_ms=at_ms - 1, cause="no customer 7")
    bury(client, "orders", b"c", key="k1", at_ms=at_ms, cause="no customer 8")
    bury(client, "orders", b"d", at_ms=at_ms)
    bury(client, "orders", b"e")
    wanted = LetterChoice(**choice)
    redrive(target, "workers", wanted, **{**NOW, "is_dry": True, "as_json": True})
    rows = capsys.readouterr().out.splitlines()
    count = sum(json.loads(row)["letters"] for row in rows)
    assert min(count, choice.get("limit", count)) == len(meant)
    assert later(client, 0) == []
    redrive(target, "workers", wanted, **NOW)
    assert b"".join(each.data for each in later(client, 0)) == meant
    redrive(target, "workers", LetterChoice(), **NOW)
    found = [each.data for each in later(client, 0)]
    assert sorted(found) == [b"a", b"b", b"c", b"d", b"e"]


@pytest.mark.slow
def test_letters_of_others_stay(client: Client, target: Target) -> None:
    """Of another group, and what is no letter."""
    bury(client, "orders", b"theirs", group="others")
    with client.producer() as producer:
        producer.send("dead", b"no letter")
    bury(client, "orders", b"ours")
    redrive(target, "workers", LetterChoice(), **NOW)
    assert [each.data for each in later(client, 0)] == [b"ours"]


@pytest.mark.slow
def test_a_failure_in_the_middle_sends_nothing_and_forgets_nothing(
    broker: EmbeddedBroker, client: Client, target: Target
) -> None:
    """The letters of the same batch are rolled back, and come again."""
    bury(client, "orders", b"first")
    bury(client, "gone", b"second")
    with pytest.raises(MetaqError, match="gone"):
        redrive(target, "workers", LetterChoice(), **NOW)
    assert later(client, 0) == []
    broker.create_topic("gone")
    redrive(target, "workers", LetterChoice(), **NOW)
    assert [each.data for each in later(client, 0)] == [b"first"]
    assert [each.data for each in client.browse("gone")] == [b"second"]


def test_letters_at_a_replica_set_are_refused_before_the_question(
    broker: EmbeddedBroker, client: Client, target: Target
) -> None:
    """It was asked for, and then refused as a send in a transaction."""
    bury(client, "orders", b"first")
    broker.zookeeper.put("/meta/replicas", b"")
    broker.zookeeper.put("/meta/replicas/0", b"")
    with pytest.raises(ClientError, match="at broker 0 cannot be sent back: it is a"):
        redrive(
            target, "workers", LetterChoice(), is_dry=True, is_sure=False, as_json=True
        )


@pytest.mark.slow
def test_many_causes_are_counted_together(
    client: Client, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table is bounded."""
    give_up(client, *[b"%d" % number for number in range(60)])
    redrive(target, "workers", LetterChoice(), is_dry=True, is_sure=False, as_json=True)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 51
    assert rows[0] == {"topic": "orders", "cause": "other causes", "letters": 10}


def test_a_group_without_dead_letters_is_named(client: Client, target: Target) -> None:
    """And one that is not there."""
    client.admin().create_queue_group("mails", "orders", then="drop")
    with pytest.raises(
        ClientError, match="group mails drops messages that it gives up"
    ):
        redrive(target, "mails", LetterChoice(), **NOW)
    with pytest.raises(ClientError, match="no queue group x; existing groups: mails"):
        redrive(target, "x", LetterChoice(), **NOW)
    assert run("queues", "redrive", "mails", "--limit", "0").exit_code == 2


@pytest.mark.slow
def test_a_letter_too_large_to_be_put_again_names_the_call_that_sends_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its origin makes it larger than a message may be; sent back, it is not."""
    bounds = {"payloadBytesMax": "4096"}
    with embedded_broker(topics={"orders": 1, "dead": 1}, settings=bounds) as broker:
        target = Target("memory", "/meta", (), 5.0, broker.coordinator_factory)
        with Client(**broker.client_options) as client:
            admin = client.admin()
            admin.create_queue_group("workers", "orders", dead_letter_topic="dead")
            with client.producer() as producer:
                producer.send_many("orders", [b"a" * 4096, b"b"])
            with client.queue("orders", group="workers") as queue:
                for reason in ("one", "two"):
                    message = queue.receive(30)
                    assert message is not None
                    message.reject(reason)
            with pytest.raises(ClientError, match=r"4096 bytes.*call without choices"):
                redrive(target, "workers", LetterChoice(cause="two"), **NOW)
            assert later(client, 2) == []
            redrive(target, "workers", LetterChoice(), **NOW)
            assert [len(each.data) for each in later(client, 2)] == [4096, 1]
    assert "2 dead letters sent back" in capsys.readouterr().err
