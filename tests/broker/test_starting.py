"""Starts that take their time: for the disk, for ZooKeeper."""

import asyncio
import contextlib
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
from tests.rigs.broker import Peer, make_config, running_broker

HELLO = b"put test 0 5 0 907060870 1\r\nhello"
WITH_ZOOKEEPER = {"zk.zkEnable": "true", "zk.zkConnect": "none:1"}


def run(coroutine) -> None:
    asyncio.run(coroutine)


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


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
    """What the thread makes nevertheless is taken away again."""

    class Disk(SystemFileSystem):
        is_asked = threading.Event()
        may_go_on = threading.Event()

        def rename(self, source: Path, target: Path) -> None:
            if target.name == SOCKET_NAME:
                self.is_asked.set()
                assert self.may_go_on.wait(10)
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
        await until(lambda: hasattr(broker, "_control") and broker.control.registration)
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


def test_open_transactions_of_a_java_broker_are_named_at_the_start(
    data_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the log, in /health, and on the administration socket; nothing is changed."""
    journal = data_dir / "transactions"
    journal.mkdir()
    prepared = bytes.fromhex("00000020 0802 121a 0801 1000 1a14")
    prepared += b"XID:100:0a0b:0c0d:uq" + bytes.fromhex("1801")
    (journal / "redo.1").write_bytes(prepared)

    async def scenario() -> None:
        async with running_broker(data_dir) as broker:
            health = describe_health(broker.control.status())
            (problem,) = health["problems"]  # type: ignore[misc, var-annotated]
            assert (problem["alarm"], health["status"]) == (
                "transactions_open",
                "warning",
            )
            assert "XID:100:0a0b:0c0d:uq is prepared and not ended" in problem["text"]

    run(scenario())
    assert "journal of a Java broker: XID:100:0a0b:0c0d:uq is prepared" in caplog.text
    assert (journal / "redo.1").read_bytes() == prepared
