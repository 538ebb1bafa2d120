"""`metaq stats` and `metaq topics`."""

import json
from collections.abc import Callable

import pytest

from metaq.cli.cluster import Target, nobody_serves
from metaq.cli.stats import stats
from metaq.cli.topics import topics
from metaq.client.browse import parse_stats
from metaq.errors import NoBrokerError
from metaq.protocol.commands import Result, Stats
from metaq.testing.zk import MemoryZooKeeper
from tests.cli.runner import run
from tests.client.memory_broker import MemoryBroker


def test_stats_prints_what_the_broker_says() -> None:
    """The lines are the broker's own."""
    with MemoryBroker() as broker:
        result = run("stats", broker=broker)
        assert result.exit_code == 0
        assert result.stdout == "STATS\npid 1\nbroker_id 7\nEND\n"


def test_stats_for_machines_are_names_and_values() -> None:
    """One object per broker."""
    with MemoryBroker() as broker:
        result = run("stats", "topics", "--json", broker=broker)
        assert json.loads(result.stdout) == {
            "broker": 7,
            "address": str(broker.address),
            "stats": {"t": "partitions 2 message_count 1", "wild-*": "*Empty*"},
        }


def test_the_raw_configuration_is_not_taken_apart() -> None:
    """`config` is a file, not names and values."""
    with MemoryBroker() as broker:
        broker.refuse = lambda command: (
            Result(200, b"[system]\nbrokerId=0\n", command.opaque)
            if isinstance(command, Stats) and command.item == "config"
            else None
        )
        result = run("stats", "config", "--json", broker=broker)
        assert json.loads(result.stdout)["stats"] == "[system]\nbrokerId=0\n"


def test_a_broker_that_refuses_is_told_and_fails() -> None:
    """Its error names it; the exit code is 1."""
    with MemoryBroker() as broker:
        broker.refuse = lambda command: (
            Result(500, b"Config file not found", command.opaque)
            if isinstance(command, Stats) and command.item == "config"
            else None
        )
        result = run("stats", "config", broker=broker)
        assert result.exit_code == 1
        assert result.stderr == "metaq: broker 7: Config file not found\n"


def test_an_address_that_is_none_names_its_option() -> None:
    """As every other usage error does."""
    result = run("stats", "--broker", "127.0.0.1")
    assert result.exit_code == 2
    assert "Invalid value for --broker: '127.0.0.1' is not HOST:PORT" in result.stderr


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


def test_topics_are_listed_with_their_offsets() -> None:
    """One row per partition; a partition without a log has no offsets."""
    with MemoryBroker() as broker:
        broker.starts["t", 0] = 100
        broker.add(b"x")
        result = run("topics", broker=broker)
        assert result.exit_code == 0
        address = str(broker.address)
        assert [line.split("\t") for line in result.stdout.splitlines()] == [
            ["topic", "partition", "broker", "puts", "gets", "log_start", "log_end"],
            ["t", "7-0", address, "True", "True", "100", "121"],
            ["t", "7-1", address, "True", "True", "-", "-"],
        ]


def test_one_topic_can_be_asked_for() -> None:
    """An unknown one is an error that names those there are."""
    with MemoryBroker() as broker:
        broker.add(b"x")
        result = run("topics", "t", "--json", broker=broker)
        rows = [json.loads(line) for line in result.stdout.splitlines()]
        assert [row["log_end"] for row in rows] == [21, None]
        result = run("topics", "nope", broker=broker)
        assert result.exit_code == 1
        assert "other topics are: t" in result.stderr


def test_a_topic_that_is_missing_is_not_named_among_the_others() -> None:
    """ZooKeeper keeps the names of topics whose brokers have gone."""
    assert str(nobody_serves("b", {"a", "b", "c"})) == (
        "no broker serves topic 'b' at the moment; other topics are: a, c"
    )
    assert str(nobody_serves("b", {"b"})).endswith("other topics are: none")
