"""One data directory: lock, storage thread, free space, and offline switch.

    NEW --open--> ONLINE --disk error--> OFFLINE
                    |                       |
                    +--------close----------+--> CLOSED

`LogDir` belongs to the event loop's thread, which makes all decisions; the storage
thread carries out submitted requests: it writes and syncs (`appender.py`). A directory
goes offline once and loudly: every log in it fails its requests in flight, and refuses
everything until a restart has recovered it.
"""

import enum
import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

from metaq.clock import Clock
from metaq.errors import (
    ClosedError,
    DiskError,
    LogDirOfflineError,
    NoSpaceError,
    StorageError,
)
from metaq.fs import LOCK_FILE, DirLock, FileSystem
from metaq.fs.group_thread import (
    SET_SILENCE_S_MAX,
    GroupThread,
    Post,
    RunRequests,
    SilenceWatch,
    Task,
    Worker,
)
from metaq.fs.helper_threads import HelperThreads
from metaq.fs.kernel_syncs import Syncs
from metaq.model import SizeBytes
from metaq.stats import Histogram
from metaq.storage.append_request import AppendReceiver, Request
from metaq.storage.appender import Appender
from metaq.storage.commit_owner import CommitOwner
from metaq.storage.holdings import Holdings
from metaq.storage.log_writer import LogWriter
from metaq.storage.watermarks import WRITE_INTERVAL_S, Watermark, WatermarkFile

_log = logging.getLogger(__name__)

READER_THREADS: Final = 2
"""Number of threads that open files and read ahead for gets: one slow read does not
block the others, and a hanging disk blocks only its own threads."""

RECORD_INTERVAL_S: Final = 10.0
"""Minimum time between two records of a directory's contents, except the last one."""

SET_LOOK_INTERVAL_S: Final = 1.0
"""Maximum time between two free-space checks of a replica."""

REFUSAL_LOG_INTERVAL_S: Final = 60.0
"""Minimum time between two log lines about refused puts; producers may retry fast."""


class DirState(enum.Enum):
    """State of a data directory."""

    NEW = "new"
    ONLINE = "online"
    OFFLINE = "offline"
    CLOSED = "closed"


class DirEvent(enum.Enum):
    """Event that may change the state of a data directory."""

    OPEN = "open"
    DISK_ERROR = "disk error"
    CLOSE = "close"


TRANSITIONS: Final[dict[tuple[DirState, DirEvent], DirState]] = {
    (DirState.NEW, DirEvent.OPEN): DirState.ONLINE,
    (DirState.NEW, DirEvent.CLOSE): DirState.CLOSED,
    (DirState.ONLINE, DirEvent.DISK_ERROR): DirState.OFFLINE,
    (DirState.ONLINE, DirEvent.CLOSE): DirState.CLOSED,
    (DirState.OFFLINE, DirEvent.CLOSE): DirState.CLOSED,
}


StartWorker: TypeAlias = Callable[
    [str, RunRequests[Request], Callable[[int], object]], Worker[Request]
]
"""Makes a worker from a name, a function that runs requests, and a callback for when
all are done; tests pass a deterministic one."""


class LogDir:
    """One data directory. Owner: the event loop's thread."""

    def __init__(
        self,
        fs: FileSystem,
        clock: Clock,
        post: Post,
        path: Path,
        *,
        free_bytes_min: int,
        size_bytes_max: int,
        start_worker: StartWorker = GroupThread[Request],
        syncs: Syncs | None = None,
        on_offline: Callable[["LogDir", StorageError], None],
    ) -> None:
        """Create a directory in state NEW; `open` locks it.

        Args:
            fs: the disk.
            clock: measures the time between free-space checks.
            post: runs a callback on the loop's thread.
            path: the directory; its parent exists.
            free_bytes_min: puts that leave less free space are refused; 0: no limit.
            size_bytes_max: maximum total size of its logs; 0: no limit.
            start_worker: makes the storage thread.
            syncs: kernel syncs of the loop's thread; None: the storage thread commits
                all groups.
            on_offline: called once, on the loop's thread, after a disk error.
        """
        self.path: Final = path
        """The directory."""
        self.state = DirState.NEW
        """State of the directory."""
        self.size_bytes = SizeBytes(0)
        """Total size of its logs, updated by the logs."""
        self.offline_cause: StorageError | None = None
        """The error that took it offline, or None."""
        self.is_layout_changed = False
        """Whether a log was added, rolled or lost a segment since the last record."""
        self.on_log_moved: Callable[[], None] | None = None
        """Called once when a log moves while there is nothing to index."""
        self.is_damage_new = True
        """Whether damage may have been found in a log since the mender last looked."""
        self.sync_latency: Final = Histogram()
        """Duration of each sync of a segment, seconds; filled by the storage thread."""
        self._fs = fs
        self._clock = clock
        self._post = post
        self.free_bytes_min: Final = free_bytes_min
        """Puts that leave less free space are refused; 0: no limit."""
        self._size_bytes_max = size_bytes_max
        self.free_bytes = SizeBytes(0)
        """Free space of its disk, last known value."""
        self.is_read_only = False
        """Whether its disk was read-only at the last check of the free space."""
        self.watermarks: WatermarkFile | None = None
        """File of a replica's watermarks; the storage thread's from `start` on."""
        self.unwritten_watermarks: Final[dict[int, Watermark]] = {}
        """Watermarks to be written to that file, by log number."""
        self._watermarks_s = float("-inf")
        self._record_s = float("-inf")
        self.watch: Final = SilenceWatch("data directory", path)
        """Detects a storage thread that does not answer."""
        self._refusal_logged_s = float("-inf")
        self._lacking_bytes = 0
        self._is_disk_full = False
        self._lock: DirLock | None = None
        self._report_offline = on_offline
        self.appender: Final = Appender(
            fs,
            clock,
            post,
            path,
            check_lock=self._check_lock,
            on_offline=self._on_offline,
            on_free_space=self._on_free_space,
        )
        """The cycle that the storage thread runs."""
        self.reader: Final = HelperThreads(READER_THREADS, f"reader {path}")
        """Threads on which gets may block on its disk; the owner of the broker's
        threads calls `begin`."""
        start = partial(start_worker, f"storage {path}", self.appender.run)
        self._worker = CommitOwner(self.appender, start, clock, post, syncs)

    def open(self) -> None:
        """Create the directory if it is missing, and lock it. Blocks.

        Raises:
            LogDirLockedError: another process owns it.
            StorageError: the disk refuses, or the parent directory is missing.
        """
        try:
            self._fs.make_directory(self.path)
        except DiskError as error:
            if error.errno_name == "EEXIST":
                raise StorageError(
                    f"data directory is not a directory: path={self.path}"
                ) from error
            if error.errno_name == "ENOENT":
                raise StorageError(
                    f"data directory cannot be created: path={self.path}: create"
                    f" {self.path.parent} first, or mount its file system"
                ) from error
            # The parent of a mount point may be unreadable for us; the name is as
            # durable as its creator made it.
            if error.errno_name != "EACCES" or not self._fs.is_directory(self.path):
                raise
        self._fs.sync_directory(self.path)
        self._lock = self._fs.lock_directory(self.path)
        self._on_free_space(self._fs.free_bytes(self.path))

    def start(self) -> None:
        """Start the storage thread; recovered logs may be used from now on."""
        self._apply(DirEvent.OPEN)
        self._worker.start()

    def submit(self, request: Request, *, joins: bool = False) -> None:
        """Queue a request; see `CommitOwner.submit`."""
        self._worker.submit(request, joins=joins)

    @property
    def is_idle(self) -> bool:
        """Return whether all submitted requests are done and reported."""
        return self._worker.is_idle

    def refusal(self) -> Exception | None:
        """Return a new error that says why the directory is unusable, or None."""
        match self.state:
            case DirState.ONLINE:
                return None
            case DirState.OFFLINE:
                return LogDirOfflineError(
                    f"data directory is offline until a restart: directory={self.path}"
                    f" cause={self.offline_cause}"
                )
            case DirState.NEW | DirState.CLOSED:
                return ClosedError(f"data directory is closed: directory={self.path}")

    def check_free_space(self, size_bytes: int) -> None:
        """Reserve space for a put, or raise `NoSpaceError`.

        Uses cached figures only: the storage thread checks the free space, and bytes
        accepted since then are subtracted here.
        """
        if self._has_too_little_for(size_bytes):
            self._lacking_bytes = max(self._lacking_bytes, size_bytes)
            raise self._refused(
                f"low on space: directory={self.path} expected at least"
                f" {self.free_bytes_min} bytes to stay free, got"
                f" {self.free_bytes - size_bytes}"
            )
        if 0 < self._size_bytes_max <= self.size_bytes:
            raise self._refused(
                f"data directory is full: directory={self.path} expected less than"
                f" {self._size_bytes_max} bytes, got {self.size_bytes}"
            )
        self.free_bytes = SizeBytes(self.free_bytes - size_bytes)

    def note_full(self, error: NoSpaceError, size_bytes: int) -> None:
        """Note that the disk was full at a write.

        Args:
            error: the error of the storage thread.
            size_bytes: total size of the appends that failed with it.
        """
        self._is_disk_full = True
        self._lacking_bytes = max(self._lacking_bytes, size_bytes)
        self._refused(f"{error} refused_bytes={size_bytes}")

    def _refused(self, text: str) -> NoSpaceError:
        now_s = self._clock.monotonic_s()
        if now_s - self._refusal_logged_s >= REFUSAL_LOG_INTERVAL_S:
            self._refusal_logged_s = now_s
            _log.error("puts refused: %s", text)
        return NoSpaceError(text)

    def _has_too_little_for(self, size_bytes: int) -> bool:
        return 0 < self.free_bytes_min > self.free_bytes - size_bytes

    @property
    def is_low_on_space(self) -> bool:
        """Return whether puts are refused because the disk is full, or nearly.

        True from a refusal until there is space for a put of the refused size, even if
        smaller ones fit.
        """
        return self._is_disk_full or self._has_too_little_for(self._lacking_bytes)

    def tick(self, now_s: float, refresh_s: float) -> None:
        """Start the watermark write and the free-space check that are due.

        Only one check is outstanding; one without an answer means that the disk hangs,
        which is detected sooner in a replica.

        Args:
            now_s: the monotonic clock.
            refresh_s: maximum age of the free space; lower in a replica.
        """
        if self.state is DirState.ONLINE:
            look = partial(self._worker.submit, self.appender.measure_free_space)
            if self.watermarks is None:
                self.watch.tick(now_s, refresh_s, look)
            else:
                soon_s = min(refresh_s, SET_LOOK_INTERVAL_S)
                self.watch.tick(now_s, soon_s, look, SET_SILENCE_S_MAX)
        if self.unwritten_watermarks and now_s - self._watermarks_s >= WRITE_INTERVAL_S:
            self._watermarks_s = now_s
            self._write_watermarks(is_last=False)

    def lower_watermark(self, mark: Watermark) -> None:
        """Queue a synced write of a lower watermark, before later requests."""
        self.unwritten_watermarks.pop(mark.number, None)
        if self.watermarks is not None and self.state is DirState.ONLINE:
            lower = partial(self.watermarks.lower, mark)
            self._worker.submit(partial(self.appender.guarded, lower))

    def _write_watermarks(self, *, is_last: bool) -> None:
        file, marks = self.watermarks, tuple(self.unwritten_watermarks.values())
        self.unwritten_watermarks.clear()
        if file is None or self.state is DirState.NEW:
            return
        write = file.close if is_last else file.write
        self._worker.submit(partial(self.appender.guarded, write, marks))
        if is_last:
            self._worker.submit(file.abandon)

    def index(self) -> None:
        """Queue the indexing of small groups committed since the last call."""
        if self.state is DirState.ONLINE and self.appender.unindexed:
            self._worker.submit(self.appender.index_later)

    def is_indexed(self, on_log_moved: Callable[[], None]) -> bool:
        """Return whether nothing waits for `index`; see `LogManager.is_indexed`."""
        is_done = self.is_idle and not self.appender.unindexed
        self.on_log_moved = on_log_moved if is_done else None
        return is_done or self.state is not DirState.ONLINE

    def note_log_moved(self) -> None:
        """Call `on_log_moved` once, because a log has moved."""
        on_log_moved, self.on_log_moved = self.on_log_moved, None
        if on_log_moved is not None:
            on_log_moved()

    def is_record_due(self, now_s: float) -> bool:
        """Return whether the record of the directory's contents is due."""
        return (
            self.is_layout_changed
            and self.state is DirState.ONLINE
            and now_s - self._record_s >= RECORD_INTERVAL_S
        )

    def write_record(self, record: Holdings) -> None:
        """Queue the write of a record of the contents, unless offline."""
        if self.state is DirState.ONLINE:
            self.is_layout_changed = False
            self._record_s = self._clock.monotonic_s()
            self._worker.submit(partial(self.appender.write_record, record))

    def close(
        self,
        logs: Iterable[tuple[LogWriter, AppendReceiver]],
        seal: Callable[[], Holdings],
        on_closed: Task,
    ) -> None:
        """Close the logs after all queued requests, then end the storage thread.

        Args:
            logs: both sides of every log in this directory.
            seal: called on the storage thread after the logs are closed; returns the
                record of the contents.
            on_closed: called on the loop's thread when all files are closed; it must
                call `unlock`.
        """
        self.reader.shutdown(wait=False, cancel_futures=True)
        was_started = self.state is not DirState.NEW
        self._write_watermarks(is_last=True)
        self._apply(DirEvent.CLOSE)
        if was_started:
            self._worker.stop(
                partial(self.appender.close, tuple(logs), seal, on_closed)
            )
        else:
            self._post(on_closed)

    def take_offline(self, error: StorageError) -> None:
        """Take the directory offline because of an error on another thread."""
        if self.state is DirState.ONLINE:
            self._worker.submit(partial(self.appender.go_offline, error))

    def unlock(self) -> None:
        """Release the lock; the directory is not used any more."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def _check_lock(self) -> None:
        """Raise if another process could lock the directory; on the storage thread.

        Raises:
            StorageError: the directory, or its lock file, was replaced.
        """
        lock = self._lock
        if lock is not None and not lock.is_in_place():
            raise StorageError(
                f"data directory is not ours any more: its lock file is gone:"
                f" file={self.path / LOCK_FILE} (removed or replaced, a directory above"
                " it renamed or removed, or another disk mounted over it)"
            )

    def _on_free_space(self, free_bytes: SizeBytes | None) -> None:
        self.watch.on_answer(self._clock.monotonic_s())
        self.is_read_only = free_bytes is None
        if free_bytes is None:
            return
        self.free_bytes = free_bytes
        if free_bytes - self._lacking_bytes >= self.free_bytes_min:
            self._lacking_bytes, self._is_disk_full = 0, False

    def _on_offline(self, error: StorageError) -> None:
        self.offline_cause, self.watch.is_silent = error, False
        _log.error(
            "data directory offline until restart: directory=%s cause=%s",
            self.path,
            error,
        )
        if self.state is DirState.ONLINE:
            self._apply(DirEvent.DISK_ERROR)
            self._report_offline(self, error)

    def _apply(self, event: DirEvent) -> None:
        found = TRANSITIONS.get((self.state, event))
        assert found is not None, f"{self.path}: {event.value} in {self.state.value}"
        self.state = found
