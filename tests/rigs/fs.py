"""A file system in memory that fails on request and can lose unsynced bytes.

`FaultyFileSystem` is the real `metaq.fs.FileSystem` over `FaultyCalls`, which answers
system calls from memory and counts them from 1 (`faulty_calls.py`); `disk.py` describes
the effect of a crash:

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
"""Maximum number of outcomes to enumerate; use random ones beyond it."""

SYNC_S: Final = 0.001
"""Duration of a sync of `LoopSyncs`, seconds."""

T = TypeVar("T")


class MemorySyncs:
    """Syncs that `reap` carries out in the order in which they were begun."""

    def __init__(self, calls: FaultyCalls) -> None:
        self.begun: list[tuple[int, Callable[[int], None]]] = []
        self.is_full = False
        """Whether further syncs are refused."""
        self._calls = calls

    def begin(self, fd: int, on_done: Callable[[int], None]) -> bool:
        """Queue a sync."""
        if not self.is_full:
            self.begun.append((fd, on_done))
        return not self.is_full

    def reap(self) -> None:
        """Carry out and report all queued syncs."""
        begun, self.begun = self.begun, []
        for fd, on_done in begun:
            try:
                self._calls.fdatasync(fd)
            except OSError as error:
                on_done(error.errno or 0)
            else:
                on_done(0)


class LoopSyncs(MemorySyncs):
    """Syncs for a broker: each takes `SYNC_S`, and waits while the disk hangs.

    Completion is signalled by a descriptor, as by the kernel.
    """

    def __init__(self, calls: FaultyCalls) -> None:
        super().__init__(calls)
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closed = False

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when `reap` has something to do."""
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
        """Carry out and report all queued syncs."""
        os.eventfd_read(self._eventfd)
        super().reap()

    def close(self) -> None:
        """Stop reporting."""
        self._is_closed = True
        os.close(self._eventfd)


class FaultyFileSystem(FileSystem):
    """The real file-system code over a disk in memory."""

    def __init__(
        self,
        disk: Disk | None = None,
        *,
        has_syncs: bool = True,
        has_loop_syncs: bool = False,
    ) -> None:
        self._faulty = FaultyCalls(Disk() if disk is None else disk)
        self.syncs = MemorySyncs(self._faulty) if has_syncs else None
        """Asynchronous syncs, which a test carries out by `reap`; None: not
        supported."""
        self._has_loop_syncs = has_loop_syncs
        super().__init__(self._faulty)

    def open_syncs(self) -> Any:
        """Return syncs for the loop of a broker; None if not supported."""
        return LoopSyncs(self._faulty) if self._has_loop_syncs else None

    def _again(self, disk: Disk) -> "FaultyFileSystem":
        return FaultyFileSystem(
            disk,
            has_syncs=self.syncs is not None,
            has_loop_syncs=self._has_loop_syncs,
        )

    @property
    def calls(self) -> int:
        """Return the number of calls so far."""
        return len(self._faulty.log)

    @property
    def log(self) -> Sequence[Operation]:
        """Return all calls so far, oldest first; call n is at index n - 1."""
        return self._faulty.log

    def fail_at(self, number: int, error: int, *, taken: int | None = None) -> None:
        """Make one call fail.

        Args:
            number: number of the call, from 1 since this file system was created;
                `calls + 1` is the next one.
            error: errno. EINTR makes reads and writes short, and has no effect on
                other calls, which the interpreter retries.
            taken: bytes that a write takes before it fails and, for EINTR, that a read
                returns; None: half of them.
        """
        self._faulty.faults[number] = Fault(error, taken)

    def set_capacity(self, size: int) -> None:
        """Set the capacity of the disk; a write beyond it is cut short, then ENOSPC."""
        self._faulty.disk.capacity = size

    def set_read_only(self, is_read_only: bool) -> None:
        """Have the disk say that it takes no writes, or that it does."""
        self._faulty.is_read_only = is_read_only

    def hang(self) -> None:
        """Block writes and syncs of other threads until `go_on`, but not reads."""
        self._faulty.goes_on.clear()

    def go_on(self) -> None:
        """Let blocked writes and syncs go on."""
        self._faulty.goes_on.set()

    def held(self) -> AbstractContextManager[bool]:
        """Keep other threads from making calls during the block."""
        return self._faulty.lock

    def used_bytes(self) -> int:
        """Return the sum of the sizes of all files with a name."""
        with self._faulty.lock:
            return self._faulty.disk.used()

    def synced_size(self, path: Path) -> int:
        """Return the durable size of a file."""
        with self._faulty.lock:
            return len(self._faulty.file_named(path).durable)

    def names_in(self, path: Path) -> list[str]:
        """Return the names in a directory, [] without it; not a counted call."""
        with self._faulty.lock:
            return self._faulty.names_in(path)

    def content(self, path: Path) -> bytes:
        """Return the content of a file as seen by reads; not a counted call."""
        with self._faulty.lock:
            return bytes(self._faulty.file_named(path).content)

    def set_wall_ms(self, wall_ms: int) -> None:
        """Set the modification time of files that change from now on."""
        self._faulty.wall_ms = wall_ms

    def open_paths(self) -> list[Path]:
        """Return the paths of all open descriptors, to find leaks."""
        return sorted(opened.path for opened in self._faulty.descriptors.values())

    def flip_bit(self, path: Path, bit: int) -> None:
        """Flip a bit of a file, in the durable content and as seen by reads.

        Args:
            path: existing file.
            bit: index of the bit, from 0, the lowest bit of the first byte.
        """
        file = self._faulty.file_named(path)
        index, mask = bit // 8, 1 << bit % 8
        file.content[index] ^= mask
        file.changed += 1
        if index < len(file.durable):
            file.durable[index] ^= mask

    def write_back(self, path: Path) -> None:
        """Make a file durable, as the kernel may do at any time."""
        self._faulty.file_named(path).sync()

    def synced_bytes(self, path: Path) -> bytes:
        """Return the durable content of a file."""
        return bytes(self._faulty.file_named(path).durable)

    def snapshot(self) -> "FaultyFileSystem":
        """Return a copy of the disk, including unsynced state, without open files."""
        with self._faulty.lock:
            disk = self._faulty.disk.copy()
        return self._again(disk)

    def crash(
        self, choose: Choose = keep_none, *, torn: bool = True
    ) -> "FaultyFileSystem":
        """Return the disk after a power cut at this moment.

        Args:
            choose: chooses the outcome for each unsynced difference.
            torn: whether sizes and pages may be cut at any byte; False: whole pages
                are kept or lost.

        This file system is not changed and can be crashed again.
        """
        with self._faulty.lock:
            disk = self._faulty.disk.crash(choose, torn=torn)
        return self._again(disk)

    def crashes(
        self, *, torn: bool, count_max: int = CRASHES_MAX
    ) -> "Iterator[FaultyFileSystem]":
        """Yield every possible disk after a power cut at this moment.

        Some outcomes may occur twice. With `torn` there is an outcome for every byte,
        so it is for scenarios with few unsynced bytes.

        Raises:
            ValueError: there are more than `count_max` outcomes.
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
        """Call `hook` before each call takes effect; None removes the hook."""
        self._faulty.before_call = hook


@dataclass(frozen=True, slots=True)
class CrashPoint(Generic[T]):
    """A moment of a scenario at which the power may be cut."""

    operation: Operation | None
    """The sync that follows; None at the end of the scenario."""
    disk: FaultyFileSystem
    """The disk at that moment; it can be crashed repeatedly."""
    progress: T
    """Value of `progress` at that moment."""


def crash_points(
    disk: FaultyFileSystem, scenario: Callable[[], None], progress: Callable[[], T]
) -> list[CrashPoint[T]]:
    """Run a scenario once; return the disk before each of its syncs and at its end.

    While bytes are only appended, every outcome of a crash between two syncs is also
    one of a crash before the second sync. So these moments suffice if all outcomes of
    each are tried.

    Args:
        disk: file system of the scenario.
        scenario: function to run; it may use threads.
        progress: called at each moment, on the thread of the sync; returns an immutable
            value, such as the records acknowledged so far.
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
