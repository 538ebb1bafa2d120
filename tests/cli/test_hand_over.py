"""`metaq hand-over`: its plan, its changes and the way back."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from metaq.client import Client
from metaq.errors import DataMissingError
from metaq.fs import LOCK_FILE
from metaq.model import BrokerId
from metaq.storage.holdings import HOLDINGS_FILE
from metaq.testing.embedded import embedded_broker
from metaq.zk.definitions import (
    COPY_NAME,
    TopicDefinition,
    TopicState,
    encode_copy,
    encode_definition,
)
from tests.cli.runner import run
from tests.rigs.broker import Peer, running_broker

ONE_BROKER = {
    "live": "a MetaQ broker needs no such files in its data directory",
    "test_a_prepared_transaction_with_a_delayed_message_refuses": "likewise",
    "test_a_running_broker_refuses": "likewise",
    "test_a_broker_that_was_killed_is_mentioned": "likewise",
}

PUT = b"put test 0 5 0 907060870 1\r\nhello"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return a directory that a broker has used, its journal elsewhere."""
    directory = tmp_path / "data"
    (tmp_path / "journal").mkdir()
    live(directory)
    return directory


def live(data: Path) -> None:
    async def put() -> None:
        journal = {"dataLogPath": str(data.with_name("journal"))}
        async with running_broker(data, journal) as broker, Peer(broker) as peer:
            assert (await peer.ask(PUT)).startswith(b"result 200 ")

    asyncio.run(put())


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_nothing_but_partitions_remains_and_the_record_comes_back(data: Path) -> None:
    """It may be repeated, and so may the way back."""
    (data / "deleted" / "20261122T101501.123Z" / "old-0").mkdir(parents=True)
    (data / "admin.sock").touch()
    before = (data / HOLDINGS_FILE).read_bytes()
    for _ in range(2):
        done = run("hand-over", str(data), "--yes")
        assert done.exit_code == 0, done.output
        assert names(data) == {"test-0"}
    aside = data.with_name("data.handed-over")
    assert (aside / HOLDINGS_FILE).read_bytes() == before
    for wanted in (f"moved back: {HOLDINGS_FILE}\n", "moved back: nothing\n"):
        back = run("hand-over", str(data), "--back")
        assert (back.exit_code, back.stdout) == (0, wanted)
    assert (data / HOLDINGS_FILE).read_bytes() == before
    assert not aside.exists()
    live(data)


def test_a_start_before_the_way_back_is_refused_and_leaves_the_way_open(
    data: Path,
) -> None:
    """Queue groups would begin again, and messages with a time stay aside."""
    assert run("hand-over", str(data), "--yes").exit_code == 0
    with pytest.raises(DataMissingError, match=r"run 'metaq hand-over .*data --back'"):
        live(data)
    assert names(data) <= {"test-0", LOCK_FILE}
    assert run("hand-over", str(data), "--back").exit_code == 0
    live(data)


def test_the_logs_of_the_broker_itself_go_aside_and_come_back(data: Path) -> None:
    """A Java broker would register them as topics."""
    shutil.copytree(data / "test-0", data / "__queues-1")
    (data / "groups.json").write_bytes(encode_copy({}, encode_definition))
    before = names(data / "__queues-1")
    assert run("hand-over", str(data), "--yes").exit_code == 0
    assert names(data) == {"test-0"}
    back = run("hand-over", str(data), "--back")
    assert back.exit_code == 0, back.output
    assert names(data / "__queues-1") == before
    assert (data / "groups.json").exists()


def test_the_plan_is_shown_and_nothing_changes_without_a_yes(data: Path) -> None:
    """Without a terminal to ask at it is refused; topics made by command are named.

    A Java broker does not start with a key that it does not know, as `index`.
    """
    definitions = {
        "orders": TopicDefinition(
            partitions=3, settings={"deletePolicy": "delete,1h", "index": "key"}
        ),
        "over": TopicDefinition(partitions=1, state=TopicState.DELETING),
        "others": TopicDefinition(partitions=1, brokers=(BrokerId(9),)),
    }
    (data / COPY_NAME).write_bytes(encode_copy(definitions, encode_definition))
    before = names(data)
    refused = run("hand-over", str(data))
    assert refused.exit_code == 2
    assert "use --yes to confirm" in refused.stderr
    aside = data.with_name("data.handed-over")
    assert refused.stdout.splitlines() == [
        f"move {data / HOLDINGS_FILE} to {aside / HOLDINGS_FILE}",
        f"move {data / COPY_NAME} to {aside / COPY_NAME}",
        "topics made by command, for the server.ini of the Java broker:",
        "[topic=orders]",
        "numPartitions=3",
        "deletePolicy=delete,1h",
    ]
    assert names(data) == before
    plan = json.loads(run("hand-over", str(data), "--yes", "--json").stdout)
    assert plan["move"] == [HOLDINGS_FILE, COPY_NAME]
    assert plan["topics"] == {
        "orders": {"numPartitions": "3", "deletePolicy": "delete,1h"}
    }
    assert names(data) == {"test-0"}


def test_what_is_no_partition_and_not_ours_to_move_refuses(data: Path) -> None:
    """A journal is given a directory of its own; a stranger is named."""
    (data / "transactions").mkdir()
    (data / "notes").touch()
    before = names(data)
    refused = run("hand-over", str(data), "--yes")
    assert refused.exit_code == 1
    assert f"{data / 'notes'} is no partition" in refused.stderr
    assert "set dataLogPath to that directory for both brokers" in refused.stderr
    assert names(data) == before


def test_damage_refuses(data: Path) -> None:
    """A Java broker would cut it, with everything after it."""
    segment = data / "test-0" / "00000000000000000000.meta"
    content = bytearray(segment.read_bytes())
    content[-1] ^= 1
    segment.write_bytes(content)
    before = names(data)
    refused = run("hand-over", str(data), "--yes")
    assert refused.exit_code == 1
    assert "damage: " in refused.stderr
    assert names(data) == before


@pytest.mark.slow
def test_a_prepared_transaction_with_a_delayed_message_refuses(tmp_path: Path) -> None:
    """Its coordinator ends it first; a Java broker would append to `__delays`."""
    data, journal = tmp_path / "data", tmp_path / "journal"
    settings = {"dataLogPath": str(journal)}
    with (
        embedded_broker(data_path=data, settings=settings) as broker,
        Client(**broker.client_options) as client,
    ):
        for name, more in (("plain", {}), ("late", {"delay": "1h"})):
            xa = client.xa("q")
            xa.begin(xa.xid(1, name))
            xa.send("test", b"x", **more)
            xa.prepare()
    (data / "server.ini").unlink()
    before = names(data)
    refused = run("hand-over", str(data), "--yes")
    assert refused.exit_code == 1
    assert "prepared transactions have scheduled messages" in refused.stderr
    assert refused.stderr.count("XID:") == 1
    assert names(data) == before
    journal.rename(tmp_path / "elsewhere")
    refused = run("hand-over", str(data), "--yes")
    assert f"is no longer at {journal / 'transactions'}:" in refused.stderr
    (tmp_path / "elsewhere").rename(journal)
    with (
        embedded_broker(data_path=data, settings=settings) as broker,
        Client(**broker.client_options) as client,
    ):
        xa = client.xa("q")
        for each in xa.recover():
            xa.rollback(each)
        with client.producer().transaction() as tx:
            tx.send("test", b"x", delay="1h")
        shutil.copytree(journal, tmp_path / "killed")
    (data / "server.ini").unlink()
    journal.rename(tmp_path / "stopped")
    (tmp_path / "killed").rename(journal)
    refused = run("hand-over", str(data), "--yes")
    assert "the journal has scheduled messages" in refused.stderr
    shutil.rmtree(journal)
    (tmp_path / "stopped").rename(journal)
    done = run("hand-over", str(data), "--yes")
    assert done.exit_code == 0, done.output


def test_a_running_broker_refuses(tmp_path: Path) -> None:
    """Its lock is what says so."""
    data = tmp_path / "data"

    async def main() -> None:
        async with running_broker(data):
            refused = await asyncio.to_thread(run, "hand-over", str(data), "--yes")
            assert refused.exit_code == 1
            assert "data directory is in use" in refused.stderr
            assert (data / LOCK_FILE).exists()

    asyncio.run(main())


def test_a_broker_that_was_killed_is_mentioned(data: Path) -> None:
    """Such a directory may be handed over, with the advice to stop cleanly first."""
    run("hand-over", str(data), "--yes")
    run("hand-over", str(data), "--back")
    record = data / HOLDINGS_FILE
    record.unlink()

    async def kill() -> None:
        journal = {"dataLogPath": str(data.with_name("journal"))}
        async with running_broker(data, journal):
            unsealed.append(record.read_bytes())

    unsealed: list[bytes] = []
    asyncio.run(kill())
    record.write_bytes(unsealed[0])
    done = run("hand-over", str(data), "--yes")
    assert done.exit_code == 0
    assert "the last broker here was killed" in done.stderr


def test_a_record_that_was_made_since_is_not_overwritten(data: Path) -> None:
    """The sentence names both files."""
    run("hand-over", str(data), "--yes")
    moved = data.with_name("data.handed-over")
    moved.rename(elsewhere := data.with_name("elsewhere"))
    live(data)
    elsewhere.rename(moved)
    aside = moved / HOLDINGS_FILE
    refused = run("hand-over", str(data), "--back")
    assert refused.exit_code == 1
    assert f"a broker has created {data / HOLDINGS_FILE} since" in refused.stderr
    assert str(aside) in refused.stderr
    assert aside.exists()
    assert run("hand-over", str(data), "--yes").exit_code == 0
