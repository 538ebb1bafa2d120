"""A file system in memory that fails on request and forgets what was not synced.

`FaultyFileSystem` is the real `metaq.fs.FileSystem` over `FaultyCalls`, which answers
the calls of the kernel from memory and counts them from 1 (`faulty_calls.py`); what
survives a crash is said in `disk.py`:

    disk = FaultyFileSystem()
    disk.fail_at(7, errno.EIO)             the seventh call fails
    disk.crash(keep_random(seed))          the disk after a power cut now
    crash_points(disk, scenario, acked)    the disk at every sync of a scenario
"""

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from metaq.fs import FileSystem
from tests.rigs.disk import Choose, Disk, keep_all, keep_none, keep_random
from tests.rigs.faulty_calls import Fault, FaultyCalls, Operation

__all__ = [
    "CrashPoint",
    "FaultyCalls",
    "FaultyFileSystem",
    "Operation",
    "crash_points",
    "keep_all",
    "keep_none",
    "keep_random",
]

CRASHES_MAX: Final = 100_000
"""More outcomes than this are not enumerated: use random ones."""

SYNC_S: Final = 0.001
"""Time that a sync takes which a loop does not wait for."""

T = TypeVar("T")


class MemorySyncs:
    """Syncs that are carried out by `reap`, in the order they were begun."""

    def __init__(self, calls: FaultyCalls) -> None:
        self.begun: list[tuple[int, Callable[[int], None]]] = []
        self.is_full = False
        """No more are taken now."""
        self._calls = calls

    def begin(self, fd: int, on_done: Callable[[int], None]) -> bool:
        """Queue a sync."""
        if not self.is_full:
            self.begun.append((fd, on_done))
        return not self.is_full

    def reap(self) -> None:
        """Carry out and report all syncs that are queued."""
        begun, self.begun = self.begun, []
        for fd, on_done in begun:
            try:
                self._calls.fdatasync(fd)
            except OSError as error:
                on_done(error.errno or 0)
            else:
                on_done(0)


class LoopSyncs(MemorySyncs):
    """Syncs for a broker: each takes some turns of the loop, and waits while it hangs.

    Reported by a descriptor, as those of the kernel are.
    """

    def __init__(self, calls: FaultyCalls) -> None:
        super().__init__(calls)
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closed = False

    def fileno(self) -> int:
        """Return a descriptor that is readable when a sync is done."""
        return self._eventfd

    @property
    def is_idle(self) -> bool:
        """Whether no sync is under way."""
        return not self.begun

    def begin(self, fd: int, on_done: Callable[[int], None]) -> bool:
        """Queue a sync."""
        self._wake_later()
        return super().begin(fd, on_done)

    def _wake_later(self) -> None:
        asyncio.get_running_loop().call_later(SYNC_S, self._wake)

    def _wake(self) -> None:
        if self._is_closed:
            return
        if self._calls.goes_on.is_set():
            os.eventfd_write(self._eventfd, 1)
        else:
            self._wake_later()

    def reap(self) -> None:
        """Carry out and report all syncs that are queued."""
        os.eventfd_read(self._eventfd)
        super().reap()

    def close(self) -> None:
        """Report nothing more."""
        self._is_closed = True
        os.close(self._eventfd)


class FaultyFileSystem(FileSystem):
    """The real file system code over a disk in memory."""

    def __init__(
        self,
        disk: Disk | None = None,
        *,
        has_syncs: bool = True,
        has_loop_syncs: bool = False,
    ) -> None:
        self._faulty = FaultyCalls(Disk() if disk is None else disk)
        self.syncs = MemorySyncs(self._faulty) if has_syncs else None
        """Syncs without waiting, for who carries them out by `reap`."""
        self._has_loop_syncs = has_loop_syncs
        super().__init__(self._faulty)

    def open_syncs(self) -> Any:
        """Return syncs for the loop of a broker, if this disk has any."""
        return LoopSyncs(self._faulty) if self._has_loop_syncs else None

    def _again(self, disk: Disk) -> "FaultyFileSystem":
        return FaultyFileSystem(
            disk,
            has_syncs=self.syncs is not None,
            has_loop_syncs=self._has_loop_syncs,
        )

    @property
    def calls(self) -> int:
        """Return how many calls were made so far."""
        return len(self._faulty.log)

    @property
    def log(self) -> Sequence[Operation]:
        """Return every call so far, oldest first; call n is at index n - 1."""
        return self._faulty.log

    def fail_at(self, number: int, error: int, *, taken: int | None = None) -> None:
        """Make one call fail.

        Args:
            number: Which call, counted from 1 since this file system was made; use
                `calls + 1` for the next one.
            error: An errno. EINTR makes reads and writes short and does nothing to
                other calls, as the interpreter repeats those by itself.
            taken: For a write, how many bytes are written before it fails, for EINTR
                also how many a read returns; half of them unless told.
        """
        self._faulty.faults[number] = Fault(error, taken)

    def set_capacity(self, size: int) -> None:
        """Make the disk this large: what does not fit is ENOSPC after a part."""
        self._faulty.disk.capacity = size

    def set_read_only(self, is_read_only: bool) -> None:
        """Have the disk say that it takes no writes, or that it does."""
        self._faulty.is_read_only = is_read_only

    def hang(self) -> None:
        """Have writes and syncs of other threads wait, until `go_on`; reads do not."""
        self._faulty.goes_on.clear()

    def go_on(self) -> None:
        """Carry out what hangs."""
        self._faulty.goes_on.set()

    def held(self) -> AbstractContextManager[bool]:
        """Let no other thread change anything, as long as the block lasts."""
        return self._faulty.lock

    def used_bytes(self) -> int:
        """Return the size of all files that have a name."""
        with self._faulty.lock:
            return self._faulty.disk.used()

    def synced_size(self, path: Path) -> int:
        """Return how many bytes the device holds for certain of a file."""
        with self._faulty.lock:
            return len(self._faulty.file_named(path).durable)

    def names_in(self, path: Path) -> list[str]:
        """Return the names in a directory, or none, by no call that may fail."""
        with self._faulty.lock:
            return self._faulty.names_in(path)

    def content(self, path: Path) -> bytes:
        """Return what readers see of a file, by no call that may fail."""
        with self._faulty.lock:
            return bytes(self._faulty.file_named(path).content)

    def set_wall_ms(self, wall_ms: int) -> None:
        """Set the time that files changed from now on get."""
        self._faulty.wall_ms = wall_ms

    def open_paths(self) -> list[Path]:
        """Return the paths of all open descriptors, to find leaks."""
        return sorted(opened.path for opened in self._faulty.descriptors.values())

    def flip_bit(self, path: Path, bit: int) -> None:
        """Turn one bit over, on the device and for readers.

        Args:
            path: An existing file.
            bit: 0 is the lowest bit of the first byte; below 8 times the size.
        """
        file = self._faulty.file_named(path)
        index, mask = bit // 8, 1 << bit % 8
        file.content[index] ^= mask
        file.changed += 1
        if index < len(file.durable):
            file.durable[index] ^= mask

    def write_back(self, path: Path) -> None:
        """Bring a file to the device, as the kernel may at any moment by itself."""
        self._faulty.file_named(path).sync()

    def synced_bytes(self, path: Path) -> bytes:
        """Return what the device holds for certain of the file with this name."""
        return bytes(self._faulty.file_named(path).durable)

    def snapshot(self) -> "FaultyFileSystem":
        """Return the same disk again, unsynced state included, nothing open."""
        with self._faulty.lock:
            disk = self._faulty.disk.copy()
        return self._again(disk)

    def crash(
        self, choose: Choose = keep_none, *, torn: bool = True
    ) -> "FaultyFileSystem":
        """Return the disk that is found after a power cut at this moment.

        Args:
            choose: Decides what became of each thing that was not synced.
            torn: Whether sizes and pages may be cut at any byte; without it only
                whole pages are kept or lost.

        This file system is not changed and can be crashed again.
        """
        with self._faulty.lock:
            disk = self._faulty.disk.crash(choose, torn=torn)
        return self._again(disk)

    def crashes(
        self, *, torn: bool, count_max: int = CRASHES_MAX
    ) -> "Iterator[FaultyFileSystem]":
        """Yield every disk that a power cut at this moment can leave.

        Some outcomes may come twice. With `torn` there is one for every byte, so it is
        for scenarios with a few unsynced bytes.

        Raises:
            ValueError: There are more than `count_max`.
        """
        first: list[int] = []
        for _ in range(count_max):
            trail: list[tuple[int, int]] = []

            def choose(
                count: int,
                trail: list[tuple[int, int]] = trail,
                first: list[int] = first,
            ) -> int:
                taken = first[len(trail)] if len(trail) < len(first) else 0
                trail.append((taken, count))
                return taken

            yield self.crash(choose, torn=torn)
            while trail and trail[-1][0] + 1 == trail[-1][1]:
                trail.pop()
            if not trail:
                return
            first = [taken for taken, _count in trail]
            first[-1] += 1
        raise ValueError(f"more than {count_max} outcomes: crash with keep_random")

    def on_call(self, hook: Callable[[Operation], None] | None) -> None:
        """Have `hook` called before each call takes effect; None ends that."""
        self._faulty.before_call = hook


@dataclass(frozen=True, slots=True)
class CrashPoint(Generic[T]):
    """A moment of a scenario at which the power may go."""

    operation: Operation | None
    """The sync that was about to happen; None at the end of the scenario."""
    disk: FaultyFileSystem
    """The disk at that moment; crash it as often as you like."""
    progress: T
    """Acknowledgements that the scenario had seen by then."""


def crash_points(
    disk: FaultyFileSystem, scenario: Callable[[], None], progress: Callable[[], T]
) -> list[CrashPoint[T]]:
    """Run a scenario once and return the disk before each of its syncs and at its end.

    While bytes are only appended, a crash between two syncs leaves nothing that a crash
    before the second one cannot leave; so these are all the moments that differ, as
    long as every outcome of each is tried.

    Args:
        disk: The file system the scenario works on.
        scenario: Does the work; it may use threads.
        progress: Called at each point, on the thread of the sync; returns a value that
            does not change later (the records acknowledged so far, for example).
    """
    points: list[CrashPoint[T]] = []

    def on_call(operation: Operation) -> None:
        if operation.name in {"sync", "sync_directory"}:
            points.append(CrashPoint(operation, disk.snapshot(), progress()))

    disk.on_call(on_call)
    try:
        scenario()
    finally:
        disk.on_call(None)
    points.append(CrashPoint(None, disk.snapshot(), progress()))
    return points
