"""`metaq accept-loss`: what it shows, asks and leaves."""

import asyncio
import shutil
from pathlib import Path

import pytest

from metaq.broker.app import Broker
from metaq.cli.accept_loss import accept_loss
from metaq.clock import SystemClock
from metaq.config.settings import BrokerConfig
from metaq.errors import ConfigError, DataMissingError
from metaq.fs import SystemFileSystem
from metaq.storage.holdings import HOLDINGS_FILE
from metaq.storage.inventory import read_holdings
from metaq.testing.zk import MemoryZooKeeper
from tests.cli.runner import run
from tests.rigs.broker import CONFIG, Peer, make_config, running_broker
from tests.rigs.waiting import until

ONE_BROKER = {
    "ask": "a MetaQ broker keeps no record of what its data directory has held",
    "test_a_running_broker_is_not_disturbed": "likewise",
    "live_once": "likewise",
    "test_what_zookeeper_knows_is_shown_after_the_start_that_it_refused": "likewise",
    "test_a_new_disk_is_accepted_before_any_start_with_the_settings": "likewise",
    "test_what_another_data_directory_knows_is_shown": "likewise",
}

PUT = b"put test 0 5 0 907060870 1\r\nhello"
OTHER = b"put test 1 5 0 907060870 1\r\nhello"


async def ask(data: Path, *commands: bytes) -> list[bytes]:
    async with running_broker(data) as broker, Peer(broker) as peer:
        return [await peer.ask(command) for command in commands]


def test_a_loss_is_shown_asked_about_and_taken_once(data_dir: Path) -> None:
    """Until it is agreed the partition stays stopped; then it goes on at its end."""
    asyncio.run(ask(data_dir, PUT, PUT, OTHER))
    shutil.rmtree(data_dir / "test-0")
    (answer,) = asyncio.run(ask(data_dir, PUT))
    assert answer.startswith(b"result 500 ")
    assert f"'metaq accept-loss {data_dir}' once".encode() in answer
    checked = run("verify", str(data_dir))
    assert checked.exit_code == 1
    assert "test-0: partition" not in checked.stdout
    assert "partition is missing: expected offsets 0 to 50 (by" in checked.stdout
    assert checked.stdout.endswith(": 1 problem\n")
    refused = run("accept-loss", str(data_dir))
    assert refused.exit_code == 1
    assert "test-0: partition is missing: expected offsets 0 to 50\n" in refused.stdout
    assert f"{data_dir}: expected 2 partitions, 1 of them have less" in refused.stdout
    assert (asyncio.run(ask(data_dir, PUT))[0]).startswith(b"result 500 ")
    agreed = run("accept-loss", str(data_dir), "--yes")
    assert (agreed.exit_code, agreed.stdout.splitlines()[-1]) == (
        0,
        "accepted for the next start only: start the broker",
    )
    (answer,) = asyncio.run(ask(data_dir, PUT))
    assert answer.startswith(b"result 200 ")
    assert answer.endswith(b" 0 50")
    record = read_holdings(SystemFileSystem(), data_dir)
    assert record is not None
    assert not record.is_accepted


def test_an_empty_directory_refuses_the_start(data_dir: Path) -> None:
    """One sentence with both numbers; the record alone is not what was stored."""
    asyncio.run(ask(data_dir, PUT, OTHER))
    for name in ("test-0", "test-1"):
        shutil.rmtree(data_dir / name)
    with pytest.raises(DataMissingError, match="expected 2 partitions"):
        asyncio.run(ask(data_dir))
    assert run("accept-loss", str(data_dir), "--yes").exit_code == 0
    asyncio.run(ask(data_dir, PUT))


WITH_ZOOKEEPER = {"zk.zkEnable": "true", "zk.zkConnect": "127.0.0.1:1"}
RECORDED = "/meta/catalog/directories/0"


def refusal_of(config: BrokerConfig, server: MemoryZooKeeper | None = None) -> str:
    """Return what a start says that is refused, without the remedy."""

    async def start() -> None:
        coordinator = server and server.coordinator(SystemClock())
        await Broker(config, coordinator=coordinator).start()

    with pytest.raises(DataMissingError) as refused:
        asyncio.run(start())
    return str(refused.value).partition(": mount its disk")[0]


def live_once(data: Path, server: MemoryZooKeeper) -> None:
    """Store one message, and have ZooKeeper know of it."""

    def is_known() -> bool:
        node = server.tree().get(RECORDED)
        return node is not None and node.data.endswith(b",1]}")

    async def live() -> None:
        coordinator = server.coordinator(SystemClock())
        async with (
            running_broker(data, WITH_ZOOKEEPER, coordinator=coordinator) as broker,
            Peer(broker) as peer,
        ):
            await peer.ask(PUT)
            await until(is_known)

    asyncio.run(live())


def test_what_zookeeper_knows_is_shown_after_the_start_that_it_refused(
    data_dir: Path,
) -> None:
    """The sentence of the start, with or without ZooKeeper."""
    server = MemoryZooKeeper()
    live_once(data_dir, server)
    shutil.rmtree(data_dir)
    config = make_config(data_dir, WITH_ZOOKEEPER)
    for _ in range(2):
        expected = refusal_of(config, server).partition(", got ")[0]
        assert f"with 1 partitions (by ZooKeeper {RECORDED})" in expected
        shown = run("accept-loss", str(data_dir))
        assert shown.exit_code == 1
        assert shown.stdout.startswith(f"{expected}, got identity ")
        assert "expected 0 partitions" not in shown.stdout
    assert run("accept-loss", str(data_dir), "--yes").exit_code == 0
    live_once(data_dir, server)


@pytest.mark.slow
def test_a_new_disk_is_accepted_before_any_start_with_the_settings(
    data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They say whose it is, and where ZooKeeper is: what the start would show is shown.
    Without them it may be a slip of the pen.
    """
    server = MemoryZooKeeper()
    live_once(data_dir, server)
    shutil.rmtree(data_dir)
    data_dir.mkdir()
    refused = run("accept-loss", str(data_dir), "--yes")
    assert refused.exit_code == 1
    assert "to accept a new disk, name" in refused.stderr
    assert list(data_dir.iterdir()) == []
    config = make_config(data_dir, WITH_ZOOKEEPER)
    accept_loss(data_dir, config, is_sure=True, new_coordinator=server.coordinator)
    shown = capsys.readouterr().out.splitlines()[0]
    assert f"with 1 partitions (by ZooKeeper {RECORDED})" in shown
    assert shown.endswith("got no record and 0 partitions")
    live_once(data_dir, server)
    with pytest.raises(ConfigError, match="expected dataPath"):
        accept_loss(data_dir.parent, config, is_sure=True)


def test_zookeeper_that_does_not_answer_is_not_taken_for_one_that_knows_nothing(
    data_dir: Path, tmp_path: Path
) -> None:
    """A start does without it, and so does this; but it says so."""
    settings = tmp_path / "server.ini"
    text = CONFIG.replace("{data}", str(data_dir)).replace(
        "zk.zkEnable=false",
        "zk.zkConnect=127.0.0.1:1\nzk.zkConnectionTimeoutMs=50",
    )
    settings.write_text(text)
    result = run("accept-loss", str(data_dir), "--config", str(settings), "--yes")
    assert result.exit_code == 0
    assert "ZooKeeper at 127.0.0.1:1 does not answer" in result.stderr
    assert "0 partitions, no record of others" in result.stdout


def test_what_another_data_directory_knows_is_shown(
    data_dir: Path, tmp_path: Path
) -> None:
    """With the settings at once, and without them after the start that it refused; a
    directory that is put back without its record is believed as ever.
    """
    second = tmp_path / "second"
    text = CONFIG.replace("[topic=test]", f"[topic=test]\ndataPath={second}")

    async def live() -> None:
        async with running_broker(data_dir, text=text) as broker, Peer(broker) as peer:
            assert (await peer.ask(PUT)).startswith(b"result 200 ")

    asyncio.run(live())
    shutil.move(second / "test-0", tmp_path / "away")
    shutil.rmtree(second)
    second.mkdir()
    settings = tmp_path / "server.ini"
    settings.write_text(text.replace("{data}", str(data_dir)))
    shown = run("accept-loss", str(second), "--config", str(settings))
    assert f"with 1 partitions (by {data_dir / HOLDINGS_FILE})" in shown.stdout
    refusal = refusal_of(make_config(data_dir, text=text))
    for words in ([], ["--config", str(settings)]):
        shown = run("accept-loss", str(second), *words)
        assert (shown.exit_code, shown.stdout.splitlines()[0]) == (1, refusal)
    shutil.move(tmp_path / "away", second / "test-0")
    asyncio.run(live())


def test_a_running_broker_is_not_disturbed(data_dir: Path) -> None:
    """It owns the record."""

    async def scenario() -> None:
        async with running_broker(data_dir):
            before = (data_dir / HOLDINGS_FILE).read_bytes()
            result = run("accept-loss", str(data_dir), "--yes")
            assert result.exit_code == 1
            assert "data directory is in use" in result.stderr
            assert (data_dir / HOLDINGS_FILE).read_bytes() == before

    asyncio.run(scenario())


def test_a_directory_without_a_record_is_accepted_too(data_dir: Path) -> None:
    """Another data directory, or ZooKeeper, may know of more."""
    asyncio.run(ask(data_dir))
    (data_dir / HOLDINGS_FILE).unlink()
    result = run("accept-loss", str(data_dir), "--yes")
    assert result.exit_code == 0
    assert "0 partitions, no record of others" in result.stdout
    asyncio.run(ask(data_dir, PUT))


def test_a_directory_of_no_broker_is_refused_and_nothing_is_written(
    tmp_path: Path,
) -> None:
    """A mistyped name would leave a record there, and the broker as it was."""
    (tmp_path / "photos-1").mkdir()
    (tmp_path / "photos-1" / "sea.png").touch()
    result = run("accept-loss", str(tmp_path), "--yes")
    assert result.exit_code == 1
    assert f"not a data directory of a broker: directory={tmp_path}" in result.stderr
    assert list(tmp_path.iterdir()) == [tmp_path / "photos-1"]
    assert list((tmp_path / "photos-1").iterdir()) == [tmp_path / "photos-1/sea.png"]
