"""`metaq queues`: the groups, how far they are, their end."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from metaq.cli.cluster import Target
from metaq.cli.exchanges import list_exchanges
from metaq.cli.main import main
from metaq.cli.queues import (
    GroupOptions,
    alter,
    create,
    delete,
    list_queues,
    rates_of,
    show,
    skip,
)
from metaq.client import AsyncAdmin, Client, QueueDescription, QueueGroupDescription
from metaq.errors import AdminError, ClientError, ServerError
from metaq.model import BrokerId, TopicPartition
from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from metaq.zk.group_definitions import QueueGroupDefinition
from tests.client.worlds import QUICK

ONE_BROKER = {
    "broker": "MetaQ has no queue groups",
    "target": "likewise",
    "test_a_partition_that_is_away_is_named": "likewise",
    "test_what_a_newer_version_has_made_is_named": "likewise",
    "test_a_group_passes_over_damage_after_a_question": "likewise",
    "test_a_deleted_group_is_gone_and_a_new_one_begins_again": "likewise",
}


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    with embedded_broker(topics={"orders": 1, "empty": 1}) as one:
        with Client(**one.client_options) as client:
            with client.producer() as producer:
                for number in range(3):
                    producer.send("orders", b"%d" % number)
            with client.queue("orders", group="workers", then="drop") as queue:
                message = queue.receive(30)
                assert message is not None
                message.ack()
        yield one


@pytest.fixture
def target(broker: EmbeddedBroker) -> Target:
    return Target("memory", "/meta", (), 5.0, broker.coordinator_factory)


def test_groups_are_listed_with_their_options(
    target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a table, or one object a line."""
    list_queues(target, as_json=False)
    header, row = (line.split("\t") for line in capsys.readouterr().out.splitlines())
    found = dict(zip(header, row, strict=True))
    assert (found["group"], found["topic"]) == ("workers", "orders")
    assert (found["lease_s"], found["then"]) == ("30.0", "drop")
    list_queues(target, as_json=True)
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["deliveries_max"] == 16


def test_what_a_newer_version_has_made_is_named(
    broker: EmbeddedBroker, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is in no table, and the exit code says so."""
    assert list_queues(target, as_json=False)
    assert not capsys.readouterr().err
    broker.zookeeper.put("/meta/catalog/groups/odd", b'{"type":"stream"}')
    for lists in (list_queues, list_exchanges):
        assert not lists(target, as_json=False)
        said = capsys.readouterr().err
        assert "definition of queue group 'odd' cannot be read" in said
        assert "made by a newer version" in said


@pytest.mark.slow
def test_a_group_shows_how_far_it_is(
    target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """For machines one object, for people three tables."""
    assert show(target, "workers", as_json=True)
    (line,) = capsys.readouterr().out.splitlines()
    (queue,) = json.loads(line)["queues"]
    assert (queue["partition"], queue["open_count"]) == ("0-0", 2)
    assert (queue["done_count"], queue["done_per_s"]) == (1, 0.0)
    assert queue["oldest_s"] > 0
    assert queue["unread_count"] == 0
    assert 0 < queue["floor"] < queue["end"]
    assert show(target, "workers", as_json=False)
    options, progress, workers = capsys.readouterr().out.split("\n\n")
    assert "\nworkers\torders\t30.0\t16\tdrop\t-\t" in options
    header, row = (line.split("\t") for line in progress.splitlines())
    found = dict(zip(header, row, strict=True))
    assert (found["open_count"], found["ready_count"]) == ("2", "2")
    assert workers == "worker\tpartition\tmessages\n"
    with pytest.raises(ClientError, match="no queue group other; existing groups: w"):
        show(target, "other", as_json=False)


@pytest.mark.slow
def test_a_group_without_a_partition_says_why(
    target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is no fault; the topic has had no message."""
    target.ask(lambda admin: admin.create_queue_group("idle", "empty", then="drop"))
    assert show(target, "idle", as_json=True)
    out, error = capsys.readouterr()
    assert json.loads(out)["queues"] == []
    assert "no partitions yet: topic empty has had no message" in error


@pytest.mark.slow
def test_a_group_whose_topic_was_deleted_says_so(
    target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is there still, and has nothing: that is no group without a message yet."""

    async def make(admin: AsyncAdmin) -> None:
        await admin.create_topic("gone", partitions=1)
        await admin.create_queue_group("left", "gone", then="drop")
        await admin.delete_topic("gone")

    target.ask(make)
    assert not show(target, "left", as_json=False)
    error = capsys.readouterr().err
    assert (
        "topic gone is on no broker: if it was deleted, so is what the group" in error
    )
    assert "no partitions yet" not in error


def test_the_rate_is_what_was_done_between_two_looks() -> None:
    """A broker that began again has none."""

    def seen(*done: int) -> QueueGroupDescription:
        queues = tuple(
            QueueDescription(
                partition=TopicPartition("orders", BrokerId(0), number),
                floor=0,
                end=0,
                done_count=count,
            )
            for number, count in enumerate(done)
        )
        return QueueGroupDescription("g", QueueGroupDefinition(topic="t"), queues, ())

    rates = rates_of(seen(5, 100), seen(9, 7, 3), 2.0)
    assert {each.partition: rate for each, rate in rates.items()} == {0: 2.0}


@pytest.mark.slow
def test_a_partition_that_is_away_is_named(
    broker: EmbeddedBroker, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code says so too."""
    broker.stop()
    assert not show(target, "workers", as_json=True)
    assert "orders/0-0: its broker is away" in capsys.readouterr().err


def test_a_group_is_made_and_altered(
    target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its options are printed as they are then."""
    words: dict[str, Any] = {
        "deliveries_max": None,
        "dead_letter_topic": None,
        "retry_delays_s": (),
    }
    create(
        target,
        "mails",
        "orders",
        GroupOptions(lease_s=5.0, then="drop", where="tag = 'paid'", **words),
        "key",
        "latest",
        as_json=False,
    )
    header, row = (line.split("\t") for line in capsys.readouterr().out.splitlines())
    assert dict(zip(header, row, strict=True)) == {
        "group": "mails",
        "topic": "orders",
        "lease_s": "5.0",
        "deliveries_max": "16",
        "then": "drop",
        "dead_letter_topic": "-",
        "retry_delays_s": "1,5,30,120",
        "ordered_by": "key",
        "start": "latest",
        "where": "tag = 'paid'",
    }
    options = GroupOptions(
        **{**words, "retry_delays_s": (0.0, 2.0)}, lease_s=None, then=None, where=""
    )
    alter(target, "mails", options, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["group"], found["retry_delays_s"]) == ("mails", "0,2")
    assert (found["lease_s"], found["ordered_by"]) == (5.0, "key")
    assert found["where"] is None


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["create", "g"], "Missing option '--topic'"),
        (["create", "g", "--topic", "t"], "'--dead-letter-topic' or '--then'"),
        (["alter", "g", "--retry-delay", "x"], "--retry-delay"),
        (["alter", "g", "--lease", "0"], "--lease"),
        (["alter", "g", "--deliveries-max", "0"], "--deliveries-max"),
        (["alter", "g", "--ordered-by", "key"], "No such option"),
    ],
)
def test_wrong_use_is_refused(words: list[str], text: str) -> None:
    """Before anything is asked."""
    done = CliRunner().invoke(main, ["queues", *words])
    assert done.exit_code == 2
    assert text in done.output


@pytest.mark.slow
def test_a_group_passes_over_damage_after_a_question(
    broker: EmbeddedBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    """The order shows the damage first; the next message comes, and no other goes."""
    (path,) = (broker.data_path / "orders-0").glob("*.meta")
    data = bytearray(path.read_bytes())
    size = len(data) // 3
    data[size] ^= 0x40  # the length of the second record
    path.write_bytes(data)
    place = "orders", "workers", 0, broker.data_path
    with Client(**broker.client_options, **QUICK) as client:
        with (
            client.queue("orders", group="workers") as queue,
            pytest.raises(ServerError, match=f"offset {size}|offset={size}"),
        ):
            queue.receive(10)
        skip(*place, is_dry=True, is_sure=False)
        shown = capsys.readouterr().out
        assert f"offsets {size} to {2 * size}, {size} bytes" in shown
        with pytest.raises(AdminError, match="not defined here"):
            skip("orders", "others", 0, broker.data_path, is_dry=True, is_sure=False)
        skip(*place, is_dry=False, is_sure=True)
        assert f"continues at offset {2 * size}" in capsys.readouterr().err
        with client.queue("orders", group="workers") as queue:
            message = queue.receive(10)
            assert message is not None
            assert message.data == b"2"
            message.ack()
        with pytest.raises(AdminError, match="there is no damage to skip"):
            skip(*place, is_dry=False, is_sure=True)


@pytest.mark.slow
def test_a_deleted_group_is_gone_and_a_new_one_begins_again(
    broker: EmbeddedBroker, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing of what was done is left; the messages are."""
    delete(target, "workers", is_dry=True, is_sure=False, as_json=True)
    list_queues(target, as_json=True)
    assert len(capsys.readouterr().out.splitlines()) == 2
    delete(target, "workers", is_dry=False, is_sure=True, as_json=True)
    capsys.readouterr()
    list_queues(target, as_json=True)
    assert capsys.readouterr().out == ""
    with (
        Client(**broker.client_options, **QUICK) as client,
        client.queue("orders", group="workers", then="drop") as queue,
    ):
        found = set()
        while len(found) < 3:
            message = queue.receive(30)
            assert message is not None
            found.add(message.data)
            message.ack()
