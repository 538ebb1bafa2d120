"""`metaq accept-loss`: what it shows, asks and leaves."""

import asyncio
import shutil
from pathlib import Path

import pytest

from metaq.errors import DataMissingError
from metaq.fs import SystemFileSystem
from metaq.storage.holdings import HOLDINGS_FILE
from metaq.storage.inventory import read_holdings
from tests.cli.runner import run
from tests.rigs.broker import Peer, running_broker

ONE_BROKER = {
    "ask": "a MetaQ broker keeps no record of what its data directory has held",
    "test_a_running_broker_is_not_disturbed": "likewise",
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
    assert f"{data_dir}: expected 2 partitions, 1 of them hold less" in refused.stdout
    assert (asyncio.run(ask(data_dir, PUT))[0]).startswith(b"result 500 ")
    agreed = run("accept-loss", str(data_dir), "--yes")
    assert (agreed.exit_code, agreed.stdout.splitlines()[-1]) == (
        0,
        "accepted, once: start the broker",
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
    assert "0 partitions, and no record of others" in result.stdout
    asyncio.run(ask(data_dir, PUT))


def test_a_directory_of_no_broker_is_refused_and_nothing_is_written(
    tmp_path: Path,
) -> None:
    """A mistyped name would leave a record there, and the broker as it was."""
    (tmp_path / "photos-1").mkdir()
    (tmp_path / "photos-1" / "sea.png").touch()
    result = run("accept-loss", str(tmp_path), "--yes")
    assert result.exit_code == 1
    assert f"no data directory of a broker: directory={tmp_path}" in result.stderr
    assert list(tmp_path.iterdir()) == [tmp_path / "photos-1"]
    assert list((tmp_path / "photos-1").iterdir()) == [tmp_path / "photos-1/sea.png"]
