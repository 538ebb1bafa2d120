"""`metaq stats` and `metaq topics`."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from metaq.cli.brokers import stats
from metaq.cli.cluster import Target
from metaq.cli.topics import topics
from metaq.client.admin.broker_admin import nobody_serves
from metaq.errors import NoBrokerError
from metaq.peer.replies import parse_stats
from metaq.testing.fake_broker import FaultKind
from metaq.testing.zk import MemoryZooKeeper
from tests.brokers import AnyBroker, StartBroker
from tests.cli.runner import run

ONE_BROKER = {"java": "a refusal on cue, a log whose start moved"}


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    return start_broker({"t": 2, "wild-*": 1}, broker_id=7)


@pytest.fixture
def java(start_metaq_1_4: StartBroker) -> Any:
    return start_metaq_1_4({"t": 2}, broker_id=7)


def test_stats_prints_what_the_broker_says(broker: AnyBroker) -> None:
    """The lines are the broker's own."""
    result = run("stats", broker=broker)
    assert result.exit_code == 0
    assert result.stdout.startswith("STATS\npid ")
    assert "\nbroker_id 7\n" in result.stdout
    assert result.stdout.endswith("\nEND\n")


def test_stats_for_machines_are_names_and_values(broker: AnyBroker) -> None:
    """One object per broker."""
    broker.put(b"x", topic="t")
    found = json.loads(run("stats", "topics", "--json", broker=broker).stdout)
    assert (found["broker"], found["address"]) == (7, f"meta://{broker.address}")
    assert found["stats"]["t"].startswith("partitions ")
    assert found["stats"]["wild-*"] == "*Empty*"


def test_the_raw_configuration_is_not_taken_apart(broker: AnyBroker) -> None:
    """`config` is a file, not names and values."""
    result = run("stats", "config", "--json", broker=broker)
    assert "[system]" in json.loads(result.stdout)["stats"].splitlines()


def test_a_broker_that_refuses_is_told_and_fails(java: Any) -> None:
    """Its error names it; the exit code is 1."""
    # Its id and topics are asked for first; once more for what is closed.
    run("topics", broker=java)
    asked_count = java.inner.statistics().commands["stats"] - 1
    java.inner.inject(
        FaultKind.REFUSE, verb="stats", after=asked_count, body=b"not found", count=9
    )
    result = run("stats", "pid", broker=java)
    assert result.exit_code == 1
    assert result.stderr == "metaq: broker 7: not found\n"


def test_a_topic_that_no_broker_knows_is_an_error(broker: AnyBroker) -> None:
    """A mistyped item is taken for a topic; one without messages yet is none."""
    result = run("stats", "topcis", broker=broker)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        "metaq: no broker knows a topic 'topcis'; other items are topics, offsets,"
        " realtime, config, help\n"
    )
    assert run("stats", "t", broker=broker).exit_code == 0


def test_an_address_that_is_none_names_its_option() -> None:
    """As every other usage error does."""
    result = run("stats", "--broker", "127.0.0.1")
    assert result.exit_code == 2
    assert (
        "Invalid value for --broker: broker: expected host:port, got '127.0.0.1'"
        in result.stderr
    )


@pytest.mark.parametrize(
    "look",
    [
        lambda target: stats(target, "", as_json=False),
        lambda target: topics(target, (), as_json=False),
        lambda target: topics(target, ("t",), as_json=False),
    ],
)
def test_an_empty_cluster_says_where_nobody_is(
    look: Callable[[Target], object],
) -> None:
    """Most often the root or the address is another one."""
    zookeeper = MemoryZooKeeper()
    target = Target("zoo:2181", "/nope", (), 5.0, zookeeper.coordinator)
    text = "no broker is registered in ZooKeeper at zoo:2181 below /nope"
    with pytest.raises(NoBrokerError, match=text):
        look(target)


def test_values_may_hold_spaces() -> None:
    """The name ends at the first space."""
    text = "STATS\r\nput Count=1, Value=2\r\nalone\r\nEND\r\n"
    assert parse_stats(text) == {"put": "Count=1, Value=2", "alone": ""}


def test_topics_are_listed_with_their_offsets(java: Any) -> None:
    """One row per partition; a partition without a log has no offsets."""
    java.put(b"x" * 80, topic="t")
    java.inner.roll("t")
    java.put(b"x", topic="t")
    java.inner.trim("t")
    result = run("topics", broker=java)
    assert result.exit_code == 0
    assert [line.split("\t") for line in result.stdout.splitlines()] == [
        ["topic", "partition", "broker", "state", "log_start", "log_end"],
        ["t", "7-0", java.address, "open", "100", "121"],
        ["t", "7-1", java.address, "open", "-", "-"],
    ]
    shown = run("topics", "--json", broker=java).stdout.splitlines()
    assert json.loads(shown[0]) == {
        "topic": "t",
        "partition": "7-0",
        "broker": f"meta://{java.address}",
        "puts": True,
        "gets": True,
        "log_start": 100,
        "log_end": 121,
        "closed": None,
    }


def test_topics_fit_80_columns(broker: AnyBroker) -> None:
    """Also with large offsets and a long address: a row is one line of a terminal."""
    printed = run("topics", "t", broker=broker).stdout.splitlines()
    columns, row = (line.split("\t") for line in printed[:2])
    assert columns == ["topic", "partition", "broker", "state", "log_start", "log_end"]
    assert row[:4] == ["t", "7-0", broker.address, "open"]
    widest = (
        "page-views", "10-12", "192.168.100.100:65535", "puts only", 10**12, 10**12
    )  # fmt: skip
    widths = [
        max(len(str(c)), len(name)) for c, name in zip(widest, columns, strict=True)
    ]
    assert sum(widths) + len(widths) - 1 <= 80


def test_closed_partitions_are_shown(broker: AnyBroker) -> None:
    """A MetaQ 1.4 broker does not say: unknown is not open."""
    broker.close_partition("t", 1)
    *_head, last = run("topics", "t", broker=broker).stdout.splitlines()
    assert last.split("\t")[3] == ("closed" if broker.has_extensions else "open")
    result = run("topics", "t", "--json", broker=broker)
    closed = [json.loads(line)["closed"] for line in result.stdout.splitlines()]
    assert closed == ([False, True] if broker.has_extensions else [None, None])
    broker.open_partition("t", 1)
    result = run("topics", "t", "--json", broker=broker)
    closed = [json.loads(line)["closed"] for line in result.stdout.splitlines()]
    assert closed == ([False, False] if broker.has_extensions else [None, None])


def test_one_topic_can_be_asked_for(broker: AnyBroker) -> None:
    """An unknown one is an error that names those there are."""
    broker.put(b"x", topic="t")
    result = run("topics", "t", "--json", broker=broker)
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["log_end"] or 0 for row in rows] == [21, 0]
    result = run("topics", "nope", broker=broker)
    assert result.exit_code == 1
    assert "other topics are: t" in result.stderr


def test_a_topic_that_is_missing_is_not_named_among_the_others() -> None:
    """ZooKeeper keeps the names of topics whose brokers have gone."""
    assert str(nobody_serves("b", {"a", "b", "c"})) == (
        "no broker serves topic 'b' at the moment; 'metaq topics create b"
        " --partitions 1' creates it; other topics are: a, c"
    )
    assert str(nobody_serves("b", {"b"})).endswith("other topics are: none")


@pytest.mark.parametrize("name", ["a b", "a/b", "a,b", "", "__delays"])
def test_a_name_that_no_topic_can_have_is_not_advised(name: str) -> None:
    text = str(nobody_serves(name, {"c"}))
    marks = "names of topics have no blanks, commas and slashes"
    assert (marks if name != "__delays" else "reserved for brokers") in text
    assert "metaq topics create" not in text
