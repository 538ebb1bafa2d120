"""`metaq topics create|alter|delete|describe`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metaq.cli import topics
from metaq.cli.cluster import Target
from metaq.cli.topics import TopicOptions
from metaq.client import Client
from metaq.client.errors import NoTopicError, TopicRefusedError
from metaq.errors import ConfigError
from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from tests.cli.runner import at_terminal

ONE_BROKER = {"broker": "a MetaQ 1.4 broker takes no definitions"}


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    with embedded_broker(topics={"mine": 1}, data_path=tmp_path / "data") as broker:
        yield broker


@pytest.fixture
def target(broker: Any) -> Target:
    return Target("zoo:2181", "/meta", (), 10.0, broker.coordinator_factory)


def options(partitions: int, **settings: str) -> TopicOptions:
    return TopicOptions(partitions=partitions, served_by=None, settings=settings)


@pytest.mark.slow
def test_a_topic_is_made_and_shown(
    target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """For people a list and a table, for machines one object."""
    topics.create(
        target, "orders", options(4, deletePolicy="delete,72h"), as_json=False
    )
    assert capsys.readouterr().out == (
        "state active\npartitions 4\nbrokers all\ndeletePolicy delete,72h\n\n"
        "broker\tis_there\tpartitions\teffect\ttext\n0\tTrue\t4\tin effect\t-\n"
    )
    topics.alter(target, "orders", options(5, deletePolicy=""), as_json=True)
    assert json.loads(capsys.readouterr().out) == {
        "topic": "orders",
        "definition": {
            "partitions": 5,
            "brokers": None,
            "settings": {},
            "state": "active",
        },
        "problem": None,
        "brokers": [
            {
                "broker": 0,
                "is_there": True,
                "partitions": 5,
                "effect": "in effect",
                "text": None,
            }
        ],
    }
    topics.delete(target, "orders", "orders", as_json=True)
    assert json.loads(capsys.readouterr().out) == {
        "topic": "orders",
        "is_deleted": True,
        "scheduled": 0,
    }
    with pytest.raises(NoTopicError):
        topics.describe(target, "orders", as_json=False)


def test_a_topic_of_server_ini_is_described_with_its_file(
    target: Target, broker: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """And is not deleted."""
    topics.describe(target, "mine", as_json=False)
    ini = broker.data_path / "server.ini"
    assert capsys.readouterr().out.splitlines()[-1] == f"0\tTrue\t1\tserver.ini\t{ini}"
    with pytest.raises(TopicRefusedError, match=str(ini)):
        topics.delete(target, "mine", "mine", as_json=False)


def test_a_misspelt_setting_has_a_hint(target: Target) -> None:
    """Nothing is made."""
    with pytest.raises(ConfigError, match="do you mean 'deletePolicy'"):
        topics.create(target, "t", options(1, deletePolcy="x"), as_json=False)
    with pytest.raises(NoTopicError):
        topics.describe(target, "t", as_json=False)


@pytest.mark.slow
def test_the_name_may_be_typed_at_a_terminal(target: Target) -> None:
    """The name is asked for only at a terminal."""
    topics.create(target, "orders", options(1), as_json=False)

    def delete() -> None:
        topics.delete(target, "orders", None, as_json=False)

    done = at_terminal(delete, b"orders\n")
    assert (
        "This deletes all messages of orders. Name of the topic, to confirm: "
        in done.stderr
    )
    assert done.stderr.endswith("metaq: topic orders is deleted\n")


@pytest.mark.slow
def test_scheduled_messages_of_a_deleted_topic_are_counted(
    target: Target, broker: Any
) -> None:
    """Before it is confirmed, and when it is done."""
    topics.create(target, "orders", options(2), as_json=False)
    with Client(**broker.client_options) as client:
        client.producer().send_many("orders", [b"a", b"b"], delay="1h")

    def delete() -> None:
        topics.delete(target, "orders", None, as_json=False)

    done = at_terminal(delete, b"orders\n")
    assert "of orders, with 2 scheduled messages. Name of the topic" in done.stderr
    assert done.stderr.endswith("orders is deleted, with 2 scheduled messages\n")
