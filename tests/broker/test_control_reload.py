"""Reloads one after the other, and from a disk that hangs."""

import asyncio
import re
import threading
from pathlib import Path
from typing import Self

import pytest

from metaq.broker import control
from metaq.broker.app import Broker
from metaq.config.load import load_config
from metaq.errors import AdminError
from metaq.fs import SystemFileSystem
from metaq.model import SizeBytes
from tests.rigs.broker import CONFIG, Peer

WAIT_S = 60.0
NEW = b"put new 0 5 0 907060870 1\r\nhello"


class Disk(SystemFileSystem):
    """The configuration is read when the test lets it."""

    def __init__(self, ini: Path) -> None:
        super().__init__()
        self._ini = ini
        self.read_count = 0
        self.readers: list[threading.Thread] = []
        self.is_asked = threading.Event()
        self.may_go_on = threading.Event()

    def read_file(self, path: Path, max_bytes: SizeBytes) -> bytes:
        if path == self._ini:
            self.read_count += 1
            self.readers.append(threading.current_thread())
            self.is_asked.set()
            assert self.may_go_on.wait(WAIT_S)
        return super().read_file(path, max_bytes)


class Bench:
    """A broker with a configuration file, inside the block."""

    def __init__(self, directory: Path) -> None:
        self.ini = directory / "server.ini"
        self.text = CONFIG.replace("{data}", str(directory / "data"))
        self.ini.write_text(self.text)
        self.disk = Disk(self.ini)
        self.load()

    def load(self) -> None:
        """Make the broker, with the settings of the file."""
        config = load_config(str(self.ini), lambda path: Path(path).read_bytes())
        self.broker = Broker(config, fs=self.disk)

    async def __aenter__(self) -> Self:
        await self.broker.start()
        return self

    async def __aexit__(self, *_error: object) -> None:
        self.disk.may_go_on.set()
        await self.broker.stop()


def test_a_reload_from_a_disk_that_hangs_holds_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Puts go on; the reload is given up, and the next is refused until it answers."""
    monkeypatch.setattr(control, "CONFIG_READ_S_MAX", 0.05)

    async def scenario() -> None:
        async with Bench(tmp_path) as bench, Peer(bench.broker) as peer:
            bench.ini.write_text(bench.text + "[topic=new]\n")
            reload = asyncio.create_task(bench.broker.control.reload())
            await asyncio.to_thread(bench.disk.is_asked.wait, WAIT_S)
            assert b"do not accept topic new" in await peer.ask(NEW)
            with pytest.raises(AdminError, match="was not read in time"):
                await reload
            with pytest.raises(AdminError, match="earlier reload still waits"):
                await bench.broker.control.reload()
            assert "earlier reload" in bench.broker.control.status().reload_error
            assert bench.disk.read_count == 1
            bench.disk.may_go_on.set()
            async with asyncio.timeout(WAIT_S):
                while bench.broker.control.status().reload_error:
                    try:
                        await bench.broker.control.reload()
                    except AdminError:
                        await asyncio.sleep(0.01)
            assert (await peer.ask(NEW)).startswith(b"result 200 ")

    asyncio.run(scenario())


def test_a_reload_reads_on_a_thread_of_the_start(tmp_path: Path) -> None:
    """One that finds no memory to begin may be waited for for ever, by the loop."""

    async def scenario() -> None:
        async with Bench(tmp_path) as bench:
            begun = threading.enumerate()
            bench.disk.may_go_on.set()
            for _ in range(2):
                await bench.broker.control.reload()
            assert [each in begun for each in bench.disk.readers] == [True, True]

    asyncio.run(scenario())


def test_reloads_at_once_end_with_the_last_file(tmp_path: Path) -> None:
    """A slow one does not put back what a later one has read."""

    async def scenario() -> None:
        async with Bench(tmp_path) as bench:
            one = asyncio.create_task(bench.broker.control.reload())
            await asyncio.to_thread(bench.disk.is_asked.wait, WAIT_S)
            two = asyncio.create_task(bench.broker.control.reload())
            await asyncio.sleep(0)
            assert bench.disk.read_count == 1
            bench.ini.write_text(bench.text + "[topic=new]\n")
            bench.disk.may_go_on.set()
            await one
            await two
            assert "new" in bench.broker.context.config.topics
            assert bench.broker.control.status().reload_count == 2

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (0, 7, b"synced-before-ack until a restart, then synced-later after 7 "),
        (7, 0, b"synced-later until a restart, then synced-before-ack"),
    ],
)
def test_the_durability_that_is_told_is_that_of_the_logs(
    tmp_path: Path, before: int, after: int, told: bytes
) -> None:
    """A reload does not change what an acknowledgement of an open log means."""

    def settings(threshold: int) -> str:
        values = f"unflushThreshold={threshold}\nunflushInterval=1000"
        return bench.text.replace("[topic=test]", f"[topic=test]\n{values}")

    async def scenario() -> None:
        async with bench, Peer(bench.broker) as peer:
            await peer.ask(b"put test 0 5 0 907060870 1\r\nhello")
            bench.ini.write_text(settings(after))
            await bench.broker.control.reload()
            for item in (b"stats\r\n", b"stats test\r\n"):
                (line,) = re.findall(rb"durability (.+)\r\n", await peer.ask(item))
                assert told in line

    bench = Bench(tmp_path)
    bench.ini.write_text(settings(before))
    bench.load()
    bench.disk.may_go_on.set()
    asyncio.run(scenario())
