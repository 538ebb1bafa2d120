"""Threads that call what may hang: order, bounds, and how a process ends."""

import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from metaq.broker.helper_threads import HelperThreads

HANGING = """
import asyncio, sys, threading
from pathlib import Path
from metaq.fs import SystemFileSystem
from metaq.testing.broker import Peer, running_broker

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
            assert disk.is_hanging.wait(5)
            disk.hangs = False

asyncio.run(main())
print("stopped")
"""


@pytest.fixture
def threads():
    made = HelperThreads(2, "helper")
    yield made
    made.shutdown()


def test_results_and_errors_are_those_of_the_call(threads: HelperThreads) -> None:
    """As with any executor."""
    assert threads.submit(divmod, 7, 2).result(5) == (3, 1)
    assert threads.submit(int, "11", base=2).result(5) == 3
    with pytest.raises(ZeroDivisionError):
        threads.submit(divmod, 1, 0).result(5)


def test_as_many_calls_at_once_as_there_are_threads(threads: HelperThreads) -> None:
    """One that hangs leaves the others the rest of the threads."""
    may_end = threading.Event()
    hanging = threads.submit(may_end.wait, 10)
    names = {
        threads.submit(lambda: threading.current_thread().name).result(5)
        for _ in range(4)
    }
    assert len(names) == 1
    may_end.set()
    assert hanging.result(5)


def test_a_shutdown_ends_the_threads_behind_the_queue() -> None:
    """What was asked for before is done, unless it is called off; then nothing is."""
    threads = HelperThreads(1, "helper")
    may_end = threading.Event()
    running, queued = threads.submit(may_end.wait, 10), threads.submit(int)
    threads.shutdown(wait=False)
    may_end.set()
    assert (running.result(5), queued.result(5)) == (True, 0)
    with pytest.raises(RuntimeError, match="helper: a call after the shutdown"):
        threads.submit(int)


def test_a_shutdown_may_cancel_what_has_not_begun() -> None:
    """What runs is not touched."""
    threads = HelperThreads(1, "helper")
    has_begun, may_end = threading.Event(), threading.Event()

    def work() -> bool:
        has_begun.set()
        return may_end.wait(10)

    running, queued = threads.submit(work), threads.submit(int)
    assert has_begun.wait(5)
    threads.shutdown(wait=False, cancel_futures=True)
    with pytest.raises(CancelledError):
        queued.result(5)
    may_end.set()
    assert running.result(5)


@pytest.mark.slow
def test_a_hanging_disk_does_not_keep_a_stopped_broker_alive(data_dir: Path) -> None:
    """The process ends although a question still waits for its file."""
    done = subprocess.run(
        [sys.executable, "-c", HANGING, str(data_dir)],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, b"stopped\n"), done.stderr
