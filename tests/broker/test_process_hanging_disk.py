"""A disk that hangs for ever, and the end of the process that waits for it."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from metaq.broker.app import Broker
from metaq.errors import LogDirLockedError
from metaq.fs import SystemFileSystem
from metaq.fs.kernel_syncs import KernelSyncs
from tests.rigs.broker import CONFIG, Peer, make_config, running_broker
from tests.rigs.waiting import until

WAIT_S = 60.0
HELLO = b"put test 0 5 0 907060870 1\r\nhello"

QUESTION = """
import asyncio, sys, threading
from pathlib import Path
from metaq.fs import SystemFileSystem
from tests.rigs.broker import Peer, running_broker

class Disk(SystemFileSystem):
    is_hanging = threading.Event()
    hangs = False

    def open_read(self, path):
        if self.hangs:
            self.is_hanging.set()
            threading.Event().wait()
        return super().open_read(path)

async def main():
    disk = Disk()
    settings = {"shutdownTimeoutMs": "1000"}
    async with running_broker(Path(sys.argv[1]), settings, fs=disk) as broker:
        async with Peer(broker) as peer:
            await peer.ask(b"put test 0 5 0 907060870 1\\r\\nhello")
            disk.hangs = True
            await peer.send(b"offset test g 0 0 2 count=25\\r\\n")
            assert disk.is_hanging.wait(30)
            disk.hangs = False

asyncio.run(main())
print("stopped")
"""

SYNC = """
import asyncio, os, sys
from pathlib import Path
from metaq.fs import SystemFileSystem
from tests.rigs.broker import Peer, running_broker

HELLO = b"put test 0 5 0 907060870 1\\r\\nhello"

class Syncs:
    begun = 0
    is_idle = False

    def begin(self, fd, on_done):
        self.begun += 1
        return True

    def fileno(self):
        return self.eventfd

    def reap(self):
        raise AssertionError("nothing is done")

    def close(self):
        os.close(self.eventfd)

class Disk(SystemFileSystem):
    syncs = Syncs()

    def open_syncs(self):
        self.syncs.eventfd = os.eventfd(0)
        return self.syncs

async def main():
    disk = Disk()
    settings = {"shutdownTimeoutMs": "500"}
    async with running_broker(Path(sys.argv[1]), settings, fs=disk) as broker:
        async with Peer(broker) as peer, Peer(broker) as other:
            assert (await peer.ask(HELLO)).startswith(b"result 200 ")
            while not disk.syncs.begun:
                await peer.send(HELLO)
                await asyncio.sleep(0.001)
            await peer.send(HELLO)
            answer = await other.ask(b"get test g 0 0 25 2\\r\\n")
            assert answer.startswith(b"value 25 2") and answer.endswith(b"hello")
            assert (await other.ask(b"version 3\\r\\n")).startswith(b"result 200 ")
            assert disk.syncs.begun == 1
            print("goes on", flush=True)

asyncio.run(main())
"""

START = """
import asyncio, sys, threading
from pathlib import Path
from metaq.broker import app
from metaq.broker.process import run_broker
from metaq.config.load import load_config
from metaq.fs import SystemFileSystem

ini, name, target = sys.argv[1:]

class Disk(SystemFileSystem):
    pass

def call(disk, path, *rest):
    if path.name == target:
        print("hanging", flush=True)
        threading.Event().wait()
    return getattr(SystemFileSystem, name)(disk, path, *rest)

setattr(Disk, name, call)
app.SystemFileSystem = Disk
settings = {"shutdownTimeoutMs": "500"}
config = load_config(ini, lambda path: Path(path).read_bytes(), settings)
show = lambda broker: print("ready", flush=True)
asyncio.run(run_broker(config, on_ready=show))
"""


@pytest.mark.slow
def test_a_question_does_not_keep_a_stopped_broker_alive(data_dir: Path) -> None:
    """The process ends although it still waits for its file."""
    done = subprocess.run(
        [sys.executable, "-c", QUESTION, str(data_dir)],
        capture_output=True,
        timeout=WAIT_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, b"stopped\n"), done.stderr


@pytest.mark.slow
def test_a_sync_of_the_kernel_that_does_not_return_stops_nothing_else(
    data_dir: Path,
) -> None:
    """Stored messages are read, puts wait, and the process ends in its time."""
    done = subprocess.run(
        [sys.executable, "-c", SYNC, str(data_dir)],
        capture_output=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.stdout.startswith(b"goes on\n"), done.stderr
    assert b"logs took longer than 0.5 s to stop" in done.stderr


class HeldSyncs(KernelSyncs):
    """Syncs that are not reported while they are held."""

    is_held = False

    def reap(self) -> None:
        if self.is_held:
            os.eventfd_read(self.fileno())
        else:
            super().reap()


class HeldDisk(SystemFileSystem):
    """A disk that answers when the test says so."""

    def __init__(self, syncs: HeldSyncs) -> None:
        super().__init__()
        self.syncs = syncs

    def open_syncs(self) -> KernelSyncs:
        return self.syncs


@pytest.mark.slow
def test_a_sync_that_outlasts_the_stop_lets_go_of_the_files(data_dir: Path) -> None:
    """The process that goes on can open them again, once the disk has answered."""
    try:
        syncs = HeldSyncs()
    except OSError as error:
        pytest.skip(f"this machine has none: {error}")

    async def main() -> None:
        config = make_config(data_dir, {"shutdownTimeoutMs": "500"})
        broker = Broker(config, fs=HeldDisk(syncs))
        await broker.start()
        async with Peer(broker) as peer:
            syncs.is_held = True
            while syncs.is_idle:
                await peer.send(HELLO)
                await asyncio.sleep(0)
            await broker.stop()
        assert isinstance(broker.failure, TimeoutError)
        with pytest.raises(LogDirLockedError):
            await Broker(config).start()
        syncs.is_held = False
        syncs.reap()
        await until(lambda: can_lock(data_dir))
        async with running_broker(data_dir) as again, Peer(again) as peer:
            answer = await peer.ask(b"get test g 0 0 1000 2\r\n")
            assert answer.endswith(b"hello")

    asyncio.run(main())


def can_lock(directory: Path) -> bool:
    try:
        SystemFileSystem().lock_directory(directory).release()
    except LogDirLockedError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "target"),
    [
        ("list_directory", "data"),
        ("list_directory", "test-0"),
        ("exists", "admin.sock"),
        ("rename", "admin.sock.tmp"),
    ],
    ids=["data directory", "partition", "old socket", "new socket"],
)
def test_a_start_does_not_keep_a_stopped_broker_alive(
    tmp_path: Path, call: str, target: str
) -> None:
    """SIGTERM while the disk hangs ends the process when the time for it is over."""
    (tmp_path / "data" / "test-0").mkdir(parents=True)
    code, errors = end_of(tmp_path, call, target, signalled_at=b"hanging\n")
    assert code == 0, errors


@pytest.mark.slow
def test_a_stop_that_the_disk_holds_up_ends_nevertheless(tmp_path: Path) -> None:
    """The removal of the administration socket waits for it; the loop does not."""
    code, errors = end_of(tmp_path, "unlink", "admin.sock", signalled_at=b"ready\n")
    assert code == 1
    assert b"the broker failed: admin took longer than 0.5 s to stop" in errors


def end_of(
    directory: Path, call: str, target: str, *, signalled_at: bytes
) -> tuple[int, bytes]:
    """Return exit code and errors of a broker that gets SIGTERM when it says this.

    Its disk hangs in every call of this name for this file.
    """
    ini = directory / "server.ini"
    ini.write_text(CONFIG.replace("{data}", str(directory / "data")))
    child = subprocess.Popen(
        [sys.executable, "-c", START, str(ini), call, target],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == signalled_at
        child.terminate()
        _, errors = child.communicate(timeout=WAIT_S)
    finally:
        child.kill()
        child.communicate()
    return child.returncode, errors
