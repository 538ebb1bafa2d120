"""`metaq groups` and `metaq offsets`: what is printed, written and refused."""

import json
from collections.abc import Iterator
from typing import Any

import click
import pytest
from click.testing import CliRunner

from metaq.cli.cluster import Target
from metaq.cli.groups import delete as delete_group
from metaq.cli.groups import group_row, groups
from metaq.cli.main import main
from metaq.cli.offsets import (
    WriteOptions,
    copy_offsets,
    delete,
    reset_offsets,
    show_offsets,
)
from metaq.client import Client, GroupDescription, Lag, PartitionProgress
from metaq.client.errors import GroupInUseError
from metaq.errors import ClientError, NoBrokerError
from metaq.model import BrokerId, Offset, TopicPartition
from tests.brokers import BROKERS, AnyBroker, broker_of
from tests.cli.runner import at_terminal

PATIENCE_S = 60.0
RECORD_BYTES = 20 + 1
WRITE = WriteOptions(is_dry=False, is_forced=False, as_json=True)
DRY = WriteOptions(is_dry=True, is_forced=False, as_json=True)
FORCE = WriteOptions(is_dry=False, is_forced=True, as_json=True)


@pytest.fixture(scope="module", params=BROKERS)
def broker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[AnyBroker]:
    data = tmp_path_factory.mktemp("broker") / "data"
    with broker_of(request.param, data, {"test": 2}) as made:
        made.put(*(b"%d" % number for number in range(5)))
        yield made


@pytest.fixture
def target(broker: AnyBroker) -> Target:
    return Target("memory", "/meta", (), PATIENCE_S, broker.coordinator_factory)


def rows(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def reset(target: Target, *words: Any) -> None:
    """Move a group, which need not be there."""
    reset_offsets(target, *words, is_sure=True)


def put_offset(target: Target, group: str, offset: int) -> None:
    reset(target, group, "test", Offset(offset), ("0-0",), FORCE)


@pytest.mark.slow
def test_groups_are_listed_with_their_lag(
    broker: AnyBroker, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """One row per group; a pipe gets tabs and a header. MetaQ 1.4 does not count."""
    put_offset(target, "listed", 2 * RECORD_BYTES)
    capsys.readouterr()
    groups(target, "", as_json=False)
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split("\t") == [
        "group", "members", "topics", "partitions", "unowned", "lag_messages",
        "lag_bytes", "where",
    ]  # fmt: skip
    found = {line.split("\t")[0]: line.split("\t") for line in lines}
    count = "3" if broker.has_extensions else "-"
    assert found["listed"][1:] == [
        "0", "test", "2", "0", count, str(3 * RECORD_BYTES), "-",
    ]  # fmt: skip


@pytest.mark.slow
def test_lag_is_shown_where_nothing_is_committed(
    broker: AnyBroker, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of the log, and that it is not committed; a pipe and a machine get it too."""
    reset(target, "fresh", "test", "earliest", ("0-1",), FORCE)
    capsys.readouterr()
    groups(target, "fresh", as_json=True)
    groups(target, "fresh", as_json=False)
    shown = capsys.readouterr()
    found = json.loads(shown.out.splitlines()[0])["partitions"][0]
    count = 5 if broker.has_extensions else None
    assert (found["partition"], found["committed"]) == ("0-0", None)
    assert (found["lag"]["bytes"], found["lag"]["messages"]) == (
        5 * RECORD_BYTES,
        count,
    )
    line = f"test\t0-0\t-\tuncommitted\t{count or '-'}\t{5 * RECORD_BYTES}\t"
    assert line in shown.out
    assert "1 partition without a committed offset" in shown.err
    groups(target, "", as_json=True)
    everything = rows(capsys)
    (listed,) = [one for one in everything if one["group"] == "fresh"]
    assert sum(one["lag"]["bytes"] for one in listed["partitions"]) == 5 * RECORD_BYTES


def test_a_sum_without_what_is_not_known_is_not_shown() -> None:
    """Unknown is not zero: it would look like all of it."""
    there, away = (
        PartitionProgress(
            TopicPartition("test", BrokerId(0), number),
            owner=None,
            is_wanted=False,
            committed=Offset(0),
            lag=lag,
            problem=None if lag else "broker 0 is not registered",
        )
        for number, lag in enumerate([Lag(1, 21, 0.0), None])
    )
    known = GroupDescription("g", {}, (there,))
    assert group_row(known)[-3:] == (1, 21, None)
    assert group_row(GroupDescription("g", {}, (there, away)))[-3:] == (None,) * 3


@pytest.mark.slow
def test_a_group_is_shown_with_its_filter(
    broker: AnyBroker, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the list, alone, and for machines; also when its members are gone."""
    where = "tag = 'paid'"
    with (
        Client(**broker.client_options) as client,
        client.consumer("sifting", ["test"], where=where),
    ):
        pass
    groups(target, "", as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("\t")[-1] for line in lines if line.startswith("sifting")] == [
        where
    ]
    groups(target, "sifting", as_json=True)
    (found,) = rows(capsys)
    assert found["where"] == where
    groups(target, "sifting", as_json=False)
    assert f"filter {where}" in capsys.readouterr().err


@pytest.mark.slow
def test_one_group_is_shown_with_its_members(
    broker: AnyBroker, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """Members, owners and offsets: for people and for machines."""
    with (
        Client(**broker.client_options) as client,
        client.consumer("shown", ["test"], consumer_id="me") as consumer,
    ):
        while consumer.receive(PATIENCE_S).data != b"4":  # type: ignore[union-attr]
            pass
        consumer.commit()
        groups(target, "shown", as_json=True)
        (found,) = rows(capsys)
        groups(target, "shown", as_json=False)
        text = capsys.readouterr().out
    assert found["members"] == {"shown_me": ["test"]}
    first, second = found["partitions"]
    assert first == {
        "topic": "test",
        "partition": "0-0",
        "owner": "shown_me",
        "committed": 5 * RECORD_BYTES,
        "lag": {"messages": 0, "bytes": 0, "seconds": 0.0},
        "problem": None,
    }
    assert second["owner"] == "shown_me"
    assert "shown_me\ttest\t2\n\ntopic\tpartition\towner" in text
    assert f"test\t0-0\tshown_me\t{5 * RECORD_BYTES}\t0\t0\t0.0\n" in text


@pytest.mark.slow
def test_a_group_that_is_none_is_told(target: Target) -> None:
    """Those that there are are named."""
    put_offset(target, "known", 0)
    with pytest.raises(ClientError, match=r"no group nope; existing groups: .*known"):
        groups(target, "nope", as_json=False)


@pytest.mark.slow
def test_a_reset_prints_what_it_wrote(
    target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """Old and new of each partition; afterwards it is committed."""
    put_offset(target, "moved", RECORD_BYTES)
    capsys.readouterr()
    reset(target, "moved", "test", "latest", (), WRITE)
    assert rows(capsys) == [
        {
            "topic": "test",
            "partition": "0-0",
            "old": RECORD_BYTES,
            "new": 5 * RECORD_BYTES,
        },
        {"topic": "test", "partition": "0-1", "old": None, "new": 0},
    ]
    show_offsets(target, "moved", "", as_json=True)
    first, _second = rows(capsys)
    assert first == {
        "topic": "test",
        "partition": "0-0",
        "committed": 5 * RECORD_BYTES,
        "message_id": -1,
        "log_start": 0,
        "log_end": 5 * RECORD_BYTES,
        "state": "ok",
    }


@pytest.mark.slow
def test_a_dry_run_writes_nothing(
    target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan is the same, and says that it is one."""
    put_offset(target, "dry", RECORD_BYTES)
    capsys.readouterr()
    reset(target, "dry", "test", "earliest", ("0-0",), DRY)
    shown = capsys.readouterr()
    assert json.loads(shown.out)["new"] == 0
    assert shown.err == "metaq: dry run: nothing was changed\n"
    show_offsets(target, "dry", "test", as_json=True)
    assert rows(capsys)[0]["committed"] == RECORD_BYTES


@pytest.mark.slow
def test_a_number_below_zero_goes_so_many_messages_back(
    target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """From what is committed; partitions without an offset stay, unless named."""
    put_offset(target, "back", 4 * RECORD_BYTES)
    capsys.readouterr()
    for partitions in ((), ("0-0",)):
        reset(target, "back", "test", Offset(-3), partitions, DRY)
        (planned,) = rows(capsys)
        assert (planned["partition"], planned["new"]) == ("0-0", RECORD_BYTES)
    with pytest.raises(ClientError, match="committed no offset to go back from"):
        reset(target, "back", "test", Offset(-3), ("0-1",), DRY)
    reset(target, "back", "test", Offset(-9), (), WRITE)
    capsys.readouterr()
    show_offsets(target, "back", "test", as_json=True)
    assert [row["committed"] for row in rows(capsys)] == [0]


@pytest.mark.slow
def test_a_node_that_holds_no_offset_is_shown_with_the_others(
    broker: AnyBroker, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which node it is, is what an operator has to know."""
    reset(target, "odd", "test", "earliest", (), WRITE)

    broker.zookeeper.put("/meta/consumers/odd/offsets/test/0-0", b"x")
    capsys.readouterr()
    show_offsets(target, "odd", "", as_json=True)
    first, second = rows(capsys)
    assert (first["committed"], first["log_end"]) == (None, 5 * RECORD_BYTES)
    assert first["state"].startswith("/meta/consumers/odd/offsets/test/0-0: group off")
    assert (second["committed"], second["state"]) == (0, "ok")


@pytest.mark.slow
def test_offsets_go_from_group_to_group(
    target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """A copy prints its plan too; a dry one writes nothing."""
    put_offset(target, "one", 3 * RECORD_BYTES)
    copy_offsets(target, "one", "two", "", DRY)
    with pytest.raises(ClientError, match="group two has committed no offset"):
        show_offsets(target, "two", "", as_json=True)
    copy_offsets(target, "one", "two", "test", WRITE)
    capsys.readouterr()
    show_offsets(target, "two", "", as_json=True)
    assert [row["committed"] for row in rows(capsys)] == [3 * RECORD_BYTES]


@pytest.mark.slow
def test_a_group_with_members_is_moved_by_force_alone(
    broker: AnyBroker, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without force nothing is written; with it, the danger is printed."""
    with (
        Client(**broker.client_options) as client,
        client.consumer("busy", ["test"], commit_interval_s=None),
    ):
        with pytest.raises(GroupInUseError, match="expected no live member, got 1"):
            reset(target, "busy", "test", "latest", (), WRITE)
        with pytest.raises(ClientError, match="committed no offset"):
            show_offsets(target, "busy", "", as_json=True)
        capsys.readouterr()
        reset(target, "busy", "test", "latest", (), FORCE)
        assert "stop them first" in capsys.readouterr().err
        show_offsets(target, "busy", "", as_json=True)
        assert rows(capsys)[0]["committed"] == 5 * RECORD_BYTES


def names(target: Target, capsys: pytest.CaptureFixture[str]) -> set[str]:
    capsys.readouterr()
    groups(target, "", as_json=True)
    return {row["group"] for row in rows(capsys)}


@pytest.mark.slow
def test_a_reset_of_a_group_that_is_not_there_asks(
    target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """A misspelt name would get offsets that no member reads."""
    put_offset(target, "spelt", 0)

    def move() -> None:
        reset_offsets(target, "splet", "test", "latest", (), WRITE)

    with pytest.raises(click.UsageError, match=r"no group splet; .*spelt.*--yes"):
        move()
    done = at_terminal(move, b"n\n")
    assert "There is no group splet; existing groups:" in done.stderr
    assert done.exit_code == 1
    assert "splet" not in names(target, capsys)
    assert at_terminal(move, b"y\n").exit_code == 0
    assert "splet" in names(target, capsys)
    assert at_terminal(move, b"").exit_code == 0, "it is there now"


@pytest.mark.slow
def test_a_group_is_deleted_with_its_offsets(
    target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan is shown and asked about; no node of the group is left."""
    put_offset(target, "gone", RECORD_BYTES)

    def run(*, is_dry: bool = False) -> None:
        delete_group(target, "gone", is_dry=is_dry, is_sure=False, as_json=True)

    capsys.readouterr()
    run(is_dry=True)
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {
        "topic": "test",
        "partition": "0-0",
        "committed": RECORD_BYTES,
    }
    assert shown.err == "metaq: dry run: nothing was changed\n"
    with pytest.raises(click.UsageError, match=r"its 1 committed offset\? .*--yes"):
        run()
    assert at_terminal(run, b"n\n").exit_code == 1
    assert "gone" in names(target, capsys)
    done = at_terminal(run, b"y\n")
    assert done.stderr.endswith("metaq: group gone is deleted\n")
    assert "gone" not in names(target, capsys)
    with pytest.raises(ClientError, match="no group gone"):
        run()


@pytest.mark.slow
def test_a_group_with_members_is_not_deleted(
    broker: AnyBroker, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor are its offsets; when the members have ended, it is."""
    with (
        Client(**broker.client_options) as client,
        client.consumer("read", ["test"]) as consumer,
    ):
        assert consumer.receive(PATIENCE_S) is not None
        consumer.commit()
        with pytest.raises(GroupInUseError, match="expected no live member, got 1"):
            delete_group(target, "read", is_dry=False, is_sure=True, as_json=True)
        with pytest.raises(GroupInUseError, match="expected no live member, got 1"):
            delete(target, "read", "", is_dry=False, is_sure=True, as_json=True)
        show_offsets(target, "read", "", as_json=True)
    delete_group(target, "read", is_dry=False, is_sure=True, as_json=True)
    assert "read" not in names(target, capsys)


@pytest.mark.slow
def test_a_group_whose_partitions_are_owned_is_not_deleted(
    broker: AnyBroker, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """A member that was killed owns them until its session ends; offsets stay."""
    put_offset(target, "held", RECORD_BYTES)
    owner = "/meta/consumers/held/owners/test/0-0"
    broker.zookeeper.put(owner, b"held_killed")
    with pytest.raises(GroupInUseError, match="still owns partitions until its"):
        delete_group(target, "held", is_dry=False, is_sure=True, as_json=True)
    capsys.readouterr()
    show_offsets(target, "held", "", as_json=True)
    assert [row["committed"] for row in rows(capsys)] == [RECORD_BYTES]
    broker.zookeeper.remove(owner)
    delete_group(target, "held", is_dry=False, is_sure=True, as_json=True)
    assert "held" not in names(target, capsys)


@pytest.mark.slow
def test_offsets_of_a_group_are_deleted(
    target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a topic or of all; where there are none, one sentence says who keeps them."""
    reset(target, "less", "test", "latest", (), FORCE)

    def run(topic: str = "", *, is_dry: bool = False) -> None:
        delete(target, "less", topic, is_dry=is_dry, is_sure=False, as_json=True)

    with pytest.raises(ClientError, match=r"no offset of topic other in ZooKeeper"):
        run("other")
    run("test", is_dry=True)
    with pytest.raises(click.UsageError, match="Delete 2 committed offsets of group"):
        run("test")
    done = at_terminal(run, b"y\n")
    assert done.stderr.endswith("metaq: 2 committed offsets of group less deleted\n")
    with pytest.raises(ClientError, match="in files or databases are managed there"):
        run()
    assert "less" in names(target, capsys)


def test_an_offset_needs_one_partition(target: Target) -> None:
    """The same number means different things in different logs."""
    with pytest.raises(click.UsageError, match="test has 2: select one"):
        reset(target, "g", "test", Offset(0), (), WRITE)


def test_a_topic_that_nobody_serves_is_told(target: Target) -> None:
    """Before anything is asked of its partitions."""
    with pytest.raises(NoBrokerError, match="no broker serves topic 'nope'"):
        reset(target, "g", "nope", "latest", (), WRITE)


def test_groups_need_zookeeper(broker: AnyBroker) -> None:
    """With --broker alone it is one sentence and exit code 1."""
    for words in (["groups"], ["offsets", "show", "g"]):
        result = CliRunner().invoke(main, [*words, "--broker", broker.address])
        assert result.exit_code == 1
        assert "kept in ZooKeeper" in result.stderr


def test_no_zookeeper_is_one_sentence() -> None:
    """It names the address and how long was waited."""
    words = ["groups", "--zookeeper", "127.0.0.1:1", "--timeout", "0.05"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 1
    assert result.stderr == (
        "metaq: no ZooKeeper answers at 127.0.0.1:1 (waited 0.05 s)\n"
    )
