"""Syncs that the kernel carries out while the process goes on."""

import errno
import multiprocessing
import os
import resource
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from metaq.errors import DiskError
from metaq.fs import AppendFile, SystemFileSystem
from metaq.fs.kernel_syncs import CALLS, EVENT, SYNCS_MAX, KernelSyncs, decode_events
from tests.rigs.fs import FaultyFileSystem, keep_none

TIMEOUT_S = 30.0
INTERVAL_S = 0.000_05
"""Between two signals."""


@pytest.fixture
def syncs() -> Iterator[KernelSyncs]:
    try:
        syncs = KernelSyncs()
    except OSError as error:
        pytest.skip(f"this machine has none: {error}")
    yield syncs
    syncs.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[AppendFile]:
    file = SystemFileSystem().open_append(tmp_path / "log", create=True)
    yield file
    file.close()


def wait(syncs: KernelSyncs, done: list[DiskError | None], count: int) -> None:
    while len(done) < count:
        assert select.select([syncs.fileno()], [], [], TIMEOUT_S)[0]
        syncs.reap()


def test_a_sync_is_reported_once_by_the_descriptor(
    syncs: KernelSyncs, file: AppendFile
) -> None:
    """And the file takes later writes and syncs, of either kind."""
    done: list[DiskError | None] = []
    for count in (1, 2, 3):
        file.write(b"x")
        assert file.begin_sync(syncs, done.append)
        wait(syncs, done, count)
        file.sync()
    assert done == [None] * 3
    assert not select.select([syncs.fileno()], [], [], 0)[0]
    syncs.reap()
    assert len(done) == 3


def test_so_many_are_under_way_at_most(syncs: KernelSyncs, file: AppendFile) -> None:
    """A refused sync is not reported; after the others another one is taken."""
    done: list[DiskError | None] = []
    taken = [file.begin_sync(syncs, done.append) for _ in range(SYNCS_MAX + 3)]
    assert taken == [True] * SYNCS_MAX + [False] * 3
    wait(syncs, done, SYNCS_MAX)
    assert file.begin_sync(syncs, done.append)
    wait(syncs, done, SYNCS_MAX + 1)


def test_a_file_that_cannot_be_synced_is_not_taken(syncs: KernelSyncs) -> None:
    """A pipe, and a descriptor that is none: `fdatasync` will say why."""
    read_end, write_end = os.pipe()
    assert not syncs.begin(write_end, lambda _number: None)
    os.close(read_end)
    os.close(write_end)
    assert not syncs.begin(write_end, lambda _number: None)


def test_results_below_zero_are_numbers_of_errors() -> None:
    """Everything else is success; `data` is the number of the sync."""
    events = EVENT.pack(7, 1 << 63, 0, 0) + EVENT.pack(8, 0, -errno.EIO, 0)
    assert list(decode_events(events, 2)) == [(7, 0), (8, errno.EIO)]
    assert list(decode_events(events, 0)) == []


def test_a_sync_that_failed_is_final_for_its_file() -> None:
    """As one that was waited for: no write, no sync and no other try."""
    disk = FaultyFileSystem()
    file = disk.open_append(Path("/log"), create=True)
    file.write(b"x")
    done: list[DiskError | None] = []
    assert disk.syncs is not None
    assert file.begin_sync(disk.syncs, done.append)
    disk.fail_at(disk.calls + 1, errno.EIO)
    disk.syncs.reap()
    assert "sync failed: path=/log error=EIO" in str(done)
    for again in (file.sync, lambda: file.write(b"y")):
        with pytest.raises(DiskError, match="EIO"):
            again()
    with pytest.raises(DiskError, match="EIO"):
        file.begin_sync(disk.syncs, done.append)
    assert disk.crash(keep_none).synced_bytes(Path("/log")) == b""
    file.close()


def test_a_machine_that_has_none_says_why(caplog: pytest.LogCaptureFixture) -> None:
    """It works as before, by threads."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with caplog.at_level("INFO"):
        # Not 0: threads of other tests poll a file or two, which is refused then.
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            assert SystemFileSystem().open_syncs() is None
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "a thread syncs instead of the kernel: error=[Errno 24]" in caplog.text


def test_a_queue_serves_again_unless_a_sync_is_under_way(file: AppendFile) -> None:
    """Opened and closed more often than the kernel has queues for one process."""
    for number in range(300):
        syncs = SystemFileSystem().open_syncs()
        if not isinstance(syncs, KernelSyncs):
            pytest.skip("this machine has none")
        done: list[DiskError | None] = []
        assert file.begin_sync(syncs, done.append)
        if number % 100:
            wait(syncs, done, 1)
        syncs.close()
        assert len(done) == bool(number % 100)


def test_a_forked_process_has_queues_of_its_own(
    syncs: KernelSyncs, file: AppendFile
) -> None:
    """Those of its parent take nothing there: each sync would be a thread's."""
    other = SystemFileSystem().open_syncs()
    assert other is not None
    other.close()

    def sync() -> None:
        own, done = KernelSyncs(), list[DiskError | None]()
        assert file.begin_sync(own, done.append)
        wait(own, done, 1)

    child = multiprocessing.get_context("fork").Process(target=sync)
    child.start()
    child.join(TIMEOUT_S)
    assert child.exitcode == 0


@pytest.mark.slow
def test_a_signal_is_no_error(syncs: KernelSyncs) -> None:
    """The kernel reports one that comes while nothing is done."""
    count = 0

    def on_alarm(_number: int, _frame: object) -> None:
        nonlocal count
        count += 1

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, INTERVAL_S, INTERVAL_S)
    try:
        while count < 2000:
            syncs.reap()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_calls_are_those_of_64_bits() -> None:
    """In a process of 32 on the same machine the numbers are of other calls."""
    assert {word_bytes for _machine, word_bytes in CALLS} == {8}
