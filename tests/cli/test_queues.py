"""`metaq queues`: the groups, how far they are, their end."""

import json
from collections.abc import Iterator

import pytest

from metaq.cli.cluster import Target
from metaq.cli.queues import delete, queues
from metaq.client import Client
from metaq.errors import ClientError
from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from tests.client.worlds import QUICK

ONE_BROKER = {
    "broker": "MetaQ has no queue groups",
    "target": "likewise",
    "test_a_deleted_group_is_gone_and_a_new_one_begins_again": "likewise",
}


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    with embedded_broker(topics={"orders": 1}) as one:
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
    queues(target, "", as_json=False)
    header, row = (line.split("\t") for line in capsys.readouterr().out.splitlines())
    found = dict(zip(header, row, strict=True))
    assert (found["group"], found["topic"]) == ("workers", "orders")
    assert (found["lease_s"], found["dead_letters"]) == ("30.0", "dropped")
    queues(target, "", as_json=True)
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["deliveries_max"] == 16


def test_a_group_shows_how_far_it_is(
    target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of each partition that a worker has used."""
    queues(target, "workers", as_json=True)
    (line,) = capsys.readouterr().out.splitlines()
    (queue,) = json.loads(line)["queues"]
    assert (queue["partition"], queue["open_count"]) == ("0-0", 2)
    queues(target, "workers", as_json=False)
    assert "0-0" in capsys.readouterr().out
    with pytest.raises(ClientError, match="no queue group other; groups there are: w"):
        queues(target, "other", as_json=False)


def test_a_deleted_group_is_gone_and_a_new_one_begins_again(
    broker: EmbeddedBroker, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing of what was done is left; the messages are."""
    delete(target, "workers", is_dry=True, is_sure=False, as_json=True)
    queues(target, "", as_json=True)
    assert len(capsys.readouterr().out.splitlines()) == 2
    delete(target, "workers", is_dry=False, is_sure=True, as_json=True)
    capsys.readouterr()
    queues(target, "", as_json=True)
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
