"""Starts that take their time: for the disk, for ZooKeeper."""

import asyncio
import contextlib
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from metaq.broker.admin_socket import SOCKET_NAME
from metaq.broker.app import Broker
from metaq.broker.health import describe_health
from metaq.clock import SystemClock
from metaq.errors import ClosedError
from metaq.fs import SystemFileSystem
from metaq.testing.zk import MemoryZooKeeper
from tests.protocol.golden import bytes_of, vectors
from tests.rigs.broker import Peer, make_config, running_broker
from tests.rigs.waiting import until

HELLO = b"put test 0 5 0 907060870 1\r\nhello"
WITH_ZOOKEEPER = {"zk.zkEnable": "true", "zk.zkConnect": "none:1"}


def run(coroutine) -> None:
    asyncio.run(coroutine)


class SlowDisk(SystemFileSystem):
    """Recovery finds out what there is when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked = threading.Event()
        self.may_go_on = threading.Event()

    def list_directory(self, path: Path) -> tuple[str, ...]:
        self.is_asked.set()
        assert self.may_go_on.wait(30)
        return super().list_directory(path)


async def stop_while_it_waits(broker: Broker, disk: Any) -> None:
    """Stop a broker whose start waits for the disk; neither may be a failure."""
    start = asyncio.create_task(broker.start())
    await until(disk.is_asked.is_set)
    stop = asyncio.create_task(broker.stop())
    await asyncio.sleep(0)
    disk.may_go_on.set()
    await stop
    with pytest.raises(ClosedError):
        await start
    assert broker.failure is None


def test_a_start_that_is_stopped_during_recovery_gives_everything_back(
    data_dir: Path,
) -> None:
    """The directory is free when the stop is over, and no log is left open."""

    async def scenario() -> None:
        async with running_broker(data_dir) as broker, Peer(broker) as peer:
            await peer.ask(HELLO)
        disk = SlowDisk()
        await stop_while_it_waits(Broker(make_config(data_dir), fs=disk), disk)
        assert not [path for path in open_paths() if path.is_relative_to(data_dir)]

    run(scenario())


def test_a_start_that_is_stopped_while_it_binds_leaves_no_socket(
    data_dir: Path,
) -> None:
    """A socket that the thread makes nevertheless is taken away again."""

    class Disk(SystemFileSystem):
        is_asked = threading.Event()
        may_go_on = threading.Event()

        def rename(self, source: Path, target: Path) -> None:
            if target.name == SOCKET_NAME:
                self.is_asked.set()
                assert self.may_go_on.wait(60)
            super().rename(source, target)

    async def scenario() -> None:
        disk = Disk()
        await stop_while_it_waits(Broker(make_config(data_dir), fs=disk), disk)
        assert not (data_dir / SOCKET_NAME).exists()

    run(scenario())


def open_paths() -> list[Path]:
    """Return what this process has open."""
    paths = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            paths.append(link.readlink())
    return paths


@pytest.mark.slow
def test_a_start_that_waits_for_zookeeper_is_healthy(data_dir: Path) -> None:
    """Puts are served, so a load balancer sends them; what is missing is named."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        server.stop()
        broker = Broker(
            make_config(data_dir, WITH_ZOOKEEPER),
            coordinator=server.coordinator(SystemClock()),
        )
        start = asyncio.create_task(broker.start())
        await until(
            lambda: hasattr(broker, "control") and broker.control.registration()
        )
        async with Peer(broker) as peer:
            assert (await peer.ask(HELLO)).startswith(b"result 200 ")
        health = describe_health(broker.control.status())
        assert (health["status"], health["state"]) == ("warning", "starting")
        assert [problem["alarm"] for problem in health["problems"]] == [
            "not_registered",
            "session_not_connected",
        ]
        server.start()
        await start
        assert describe_health(broker.control.status())["status"] == "ok"
        await broker.stop()

    run(scenario())


def test_what_a_java_broker_left_prepared_is_restored(
    data_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its journal has no side file. The start names it, RECOVER lists it, a commit
    makes it readable.
    """
    caplog.set_level(logging.INFO)
    journal = data_dir / "transactions"
    journal.mkdir()
    (journal / "redo.1").write_bytes(journal_with_one_prepared())

    async def scenario() -> None:
        async with running_broker(data_dir) as broker, Peer(broker) as peer:
            found = await peer.ask(b"transaction null s1 RECOVER uq-9 1\r\n")
            assert found.endswith(b"\r\nXID:7:7375727669766f72:62:uq-9")
            commit = b"transaction XID:7:7375727669766f72:62:uq-9 s1 COMMIT_TWO_PHASE 2"
            assert await peer.ask(commit + b"\r\n") == b"result 200 0 2\r\n"
            assert b"prepared-one" in await peer.ask(b"get test g 0 0 100 3\r\n")

    run(scenario())
    (told,) = [text for text in caplog.messages if text.startswith("journal opened: ")]
    assert f"directory={journal} " in told
    assert " records=2 commits=0 prepared=1 " in told


def test_a_damaged_journal_leaves_a_broker_without_transactions(
    data_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is guessed and nothing changed: an alarm names the file, every other
    command works, and transactions say why they do not.
    """

    async def begin_and_put() -> None:
        async with running_broker(data_dir) as broker, Peer(broker) as peer:
            await peer.ask(b"transaction XID:1:aa::uq s1 BEGIN 1\r\n")
            await peer.ask(b"put test 0 1 0 -1 XID:1:aa::uq 2\r\nx")
            await peer.ask(b"transaction XID:1:aa::uq s1 PREPARE 3\r\n")

    async def look() -> None:
        async with running_broker(data_dir) as broker, Peer(broker) as peer:
            health = describe_health(broker.control.status())
            (problem,) = health["problems"]  # type: ignore[misc, var-annotated]
            assert problem["alarm"] == "transactions_offline"
            assert str(path) in problem["text"]
            refused = await peer.ask(b"transaction XID:1:aa::uq s1 BEGIN 1\r\n")
            assert refused.startswith(b"result 500 ")
            assert str(path).encode() in refused
            assert (await peer.ask(HELLO)).startswith(b"result 200 ")

    run(begin_and_put())
    (path,) = (data_dir / "transactions").glob("redo.*")
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    run(look())
    assert path.read_bytes() == data
    assert "transactions are offline until a restart" in caplog.text


def journal_with_one_prepared() -> bytes:
    data = bytes_of(vectors()["disk"]["journal_one_prepared_xa"]["bytes"])
    assert data
    return data
