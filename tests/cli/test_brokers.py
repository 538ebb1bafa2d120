"""`metaq brokers`, and what `cat`, `topics` and `groups` say of one that is away."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from metaq.cli.brokers import forget, list_brokers
from metaq.cli.cat import CatOptions, cat
from metaq.cli.cluster import Target, find_topic
from metaq.cli.groups import groups
from metaq.cli.offsets import WriteOptions, reset_offsets
from metaq.cli.topics import topics
from metaq.client import Client
from metaq.client.errors import BrokerRegisteredError, PartitionsAwayError
from metaq.errors import ClientError, NoBrokerError
from metaq.testing.zk import MemoryZooKeeper
from tests.brokers import PYTHON, AnyBroker, broker_of
from tests.cli.runner import at_terminal

WRITE = WriteOptions(is_dry=False, is_forced=False, as_json=True)
ONE_BROKER = {"pair": "MetaQ 1.4 records nothing"}

Pair = tuple[AnyBroker, AnyBroker]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    server = MemoryZooKeeper()
    with (
        broker_of(PYTHON, tmp_path / "0", {"t": 1}, zookeeper=server) as first,
        broker_of(
            PYTHON, tmp_path / "1", {"t": 2}, zookeeper=server, broker_id=1
        ) as second,
    ):
        first.put(b"here", topic="t")
        yield first, second


@pytest.fixture
def target(pair: Pair) -> Target:
    return Target("memory", "/meta", (), 1.0, pair[0].coordinator_factory)


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_brokers_are_listed_with_those_that_are_missing(
    pair: Pair, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command fails when one is."""
    first, second = pair
    assert list_brokers(target, as_json=True)
    assert [each["state"] for each in objects(capsys.readouterr().out)] == [
        "present",
        "present",
    ]
    second.stop()
    assert not list_brokers(target, as_json=True)
    here, gone = objects(capsys.readouterr().out)
    assert here == {
        "broker": 0,
        "address": f"meta://{first.address}",
        "state": "present",
        "leader": True,
        "followers": None,
        "topics": 1,
        "partitions": 1,
    }
    assert (gone["broker"], gone["state"], gone["leader"]) == (1, "missing", False)
    assert (gone["topics"], gone["partitions"]) == (1, 2)


@pytest.mark.slow
def test_forgetting_asks_and_can_be_looked_at_first(
    pair: Pair,
    target: Target,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing goes by a dry run, nor when the answer is no."""
    with pytest.raises(BrokerRegisteredError, match="stop it before"):
        forget(target, 1, is_dry=False, is_sure=True, as_json=True)
    pair[1].stop()
    forget(target, 1, is_dry=True, is_sure=False, as_json=True)
    assert "dry run: nothing was changed" in capsys.readouterr().err
    assert not list_brokers(target, as_json=True)

    def run() -> None:
        forget(target, 1, is_dry=False, is_sure=False, as_json=True)

    refused = at_terminal(run, b"n\n")
    assert refused.exit_code == 1
    assert "Forget broker 1, its 2 partitions and 0 committed offsets" in refused.stderr
    assert not list_brokers(target, as_json=True)
    with pytest.raises(click.UsageError, match="--yes"):
        run()
    assert at_terminal(run, b"y\n").exit_code == 0
    assert list_brokers(target, as_json=True)


@pytest.mark.slow
def test_cat_prints_all_of_a_topic_or_nothing(
    pair: Pair, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless `--partial` says to go on with what is there."""
    pair[1].stop()

    def run(*partitions: str, is_partial: bool = False) -> None:
        cat(
            target,
            CatOptions(
                topic="t",
                start="earliest",
                last=None,
                count_max=None,
                follows=False,
                as_json=False,
                partitions=partitions,
                is_partial=is_partial,
            ),
        )

    for named in ((), ("1-0",)):
        with pytest.raises(PartitionsAwayError, match="broker 1 is away"):
            run(*named)
        assert capsys.readouterr().out == ""
    run(is_partial=True)
    run("0-0")
    assert capsys.readouterr().out == "here\nhere\n"


def test_a_topic_whose_only_broker_is_away_takes_no_puts(
    pair: Pair, target: Target
) -> None:
    """The error names the broker, as that of gets does."""
    for broker in pair:
        broker.stop()
    with pytest.raises(PartitionsAwayError, match="broker 0 is away"):
        find_topic(target, "t", (), kind="puts")


@pytest.mark.parametrize("names", [(), ("t",)])
def test_topics_show_partitions_that_are_away_and_fail(
    pair: Pair,
    target: Target,
    capsys: pytest.CaptureFixture[str],
    names: tuple[str, ...],
) -> None:
    """Their offsets are not known; standard error says what to do."""
    assert topics(target, names, as_json=True)
    capsys.readouterr()
    pair[1].stop()
    assert not topics(target, names, as_json=True)
    printed = capsys.readouterr()
    rows = {row["partition"]: row for row in objects(printed.out)}
    assert list(rows) == ["0-0", "1-0", "1-1"]
    assert rows["1-1"]["broker"] == "unreachable"
    assert rows["1-1"]["log_end"] is None
    assert rows["0-0"]["log_end"] is not None
    assert "start broker 1" in printed.err


def test_topics_that_nobody_has_any_more_are_not_listed(
    pair: Pair, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """The empty parents of their nodes stay for ever."""
    for kind in ("topics", "topics-pub", "topics-sub"):
        pair[0].zookeeper.put(f"/meta/brokers/{kind}/once", b"")
    assert topics(target, (), as_json=True)
    assert "once" not in capsys.readouterr().out
    with pytest.raises(NoBrokerError, match=r"other topics are: t$"):
        topics(target, ("once",), as_json=True)


@pytest.mark.slow
def test_groups_do_not_count_what_is_not_known(
    pair: Pair, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sum of a part is no lag."""
    first, second = pair
    with (
        Client(**first.client_options) as client,
        client.consumer("g", ["t"], start="earliest") as consumer,
    ):
        assert consumer.receive(30) is not None
        consumer.commit()
    second.stop()
    groups(target, "", as_json=False)
    header, row = (line.split("\t") for line in capsys.readouterr().out.splitlines())
    found = dict(zip(header, row, strict=True))
    assert (found["partitions"], found["lag_bytes"]) == ("3", "-")
    assert found["lag_messages"] == "-"
    groups(target, "g", as_json=True)
    (group,) = objects(capsys.readouterr().out)
    problems = {each["partition"]: each["problem"] for each in group["partitions"]}
    assert problems["0-0"] is None
    assert problems["1-0"] == "t/1-0: broker 1 is not registered"


@pytest.mark.slow
def test_a_forgotten_broker_takes_the_offsets_of_groups_along(
    pair: Pair, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without them no group shows a lag that will never be known again."""
    _first, second = pair
    for partition in ("0-0", "1-0", "1-1"):
        reset_offsets(target, "g", "t", "latest", (partition,), WRITE, is_sure=True)
    second.stop()

    def known() -> dict[str, Any]:
        capsys.readouterr()
        groups(target, "g", as_json=True)
        (group,) = objects(capsys.readouterr().out)
        return {each["partition"]: each["problem"] for each in group["partitions"]}

    assert known()["1-1"] is not None
    capsys.readouterr()
    forget(target, 1, is_dry=True, is_sure=True, as_json=True)
    assert "groups with offsets there: g" in capsys.readouterr().err
    forget(target, 1, is_dry=False, is_sure=True, as_json=True)
    assert known() == {"0-0": None}
    groups(target, "", as_json=False)
    header, row = (line.split("\t") for line in capsys.readouterr().out.splitlines())
    assert dict(zip(header, row, strict=True))["lag_bytes"] == "0"


@pytest.mark.slow
def test_a_java_broker_is_known_by_the_offsets_of_its_groups(
    pair: Pair, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """It leaves no record; the offsets of its groups can be taken out nevertheless."""
    with pytest.raises(ClientError, match="no record of broker 7; brokers"):
        forget(target, 7, is_dry=False, is_sure=True, as_json=True)
    pair[0].zookeeper.put("/meta/consumers/g/offsets/t/7-0", b"0-21")
    forget(target, 7, is_dry=False, is_sure=True, as_json=True)
    groups(target, "g", as_json=True)
    assert "7-0" not in capsys.readouterr().out.splitlines()[-1]


def test_addresses_from_zookeeper_are_printed_and_not_obeyed(
    pair: Pair, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name in ZooKeeper is no command for a terminal."""
    server = pair[0].zookeeper
    server.put("/meta/catalog/brokers/7", "meta://\x1b[31mh\u202e:1".encode())
    server.put("/meta/catalog/brokers/8", b"meta://ok:1")
    list_brokers(target, as_json=False)
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out + printed.err
    assert "\u202e" not in printed.out + printed.err
    assert "meta://ok:1" in printed.out
