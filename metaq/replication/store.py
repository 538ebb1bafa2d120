"""The disk of a replica, as actions that its node awaits one by one.

The `set` file is written by a separate thread, so that a directory with a hung storage
thread cannot keep a leader from giving up. All other writes go through the storage
threads of the data directories, in order with their appends.
"""

import asyncio
import logging
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from metaq.clock import Clock
from metaq.errors import NoSpaceError, StorageError
from metaq.fs import FileSystem
from metaq.fs.helper_threads import HelperThreads
from metaq.replication.epochs import Epoch
from metaq.replication.record import SET_FILE
from metaq.replication.replica import SetFile
from metaq.replication.set_file import encode_set_file, write_set_file
from metaq.replication.set_nodes import Member
from metaq.replication.tables import EpochTables
from metaq.storage.log_dir import DirState, LogDir
from metaq.storage.log_manager import LogManager
from metaq.storage.log_removal import carry_out
from metaq.storage.log_state import LogState

_log = logging.getLogger(__name__)

COMMIT_POLL_S: Final = 0.01
"""Interval of checks of high watermarks and of unfinished writes, in seconds."""
SILENCE_POLL_S: Final = 0.1
"""Interval of checks whether a disk still responds, in seconds."""
WRITE_PAUSE_S: Final = 1.0
"""Pause before the `set` file is written again after a lack of space, in seconds."""
HOLDINGS_INTERVAL_S: Final = 10.0
"""Interval at which the version of the directories is raised for synced bytes."""
WRITE_S: Final = 10.0
"""Time after which an unfinished write of the `set` file counts as a hung disk."""


@dataclass(frozen=True, slots=True)
class StartFacts:
    """Findings in the data directories, before ZooKeeper is read."""

    tables: EpochTables
    """Epochs of the logs."""
    file: SetFile | None
    """The `set` file; None: there is none."""
    is_cut: bool
    """Whether recovery cut a torn tail."""
    lacks_bytes: bool
    """Whether logs lack bytes that they had, or their epochs are damaged."""
    is_sealed: bool = False
    """Whether a clean stop had closed the directories."""


class ReplicaStore:
    """The disk of one replica. Owned by the node; used on the loop's thread."""

    def __init__(
        self,
        fs: FileSystem,
        path: Path,
        logs: LogManager,
        tables: EpochTables,
        *,
        clock: Clock,
    ) -> None:
        """Take over open logs.

        Args:
            fs: the disk.
            path: the first data directory, which has the `set` file.
            clock: for the wait for followers.
            logs: logs that follow.
            tables: epochs of the logs.
        """
        self.fs: Final = fs
        self._path = path
        self._clock = clock
        self.logs: Final = logs
        self.tables: Final = tables
        self._writer = HelperThreads(1, "metaq-set")
        self._saved: SetFile | None = None
        self.revision = 0
        """Revision of the record in the `set` file saved last."""
        self.lack_of_space = ""
        """Reason why the `set` file waits for disk space; "" if it does not."""
        self._error: StorageError | None = None
        self._holdings_s = clock.monotonic_s()
        self._synced_ends = 0

    def begin(self) -> None:
        """Start the thread now, because there may be no memory for it later."""
        self._writer.begin()

    async def end(self) -> None:
        """End the thread after its queued work."""
        await self._writer.end()

    @property
    def failure(self) -> str:
        """Return the reason why this disk cannot take part in a term; "" if it can."""
        for each in self.logs.directories():
            if each.state is not DirState.ONLINE:
                return f"{each.path} is offline: {each.offline_cause}"
            if each.watch.is_silent:
                return f"{each.path} does not answer"
        return "" if self._error is None else str(self._error)

    async def save(self, file: SetFile) -> None:
        """Write the `set` file, synced; retried for ever while there is no space.

        Later actions must wait for it.

        Raises:
            StorageError: the disk failed or does not respond; `failure` reports it
                until a later write succeeds.
        """
        write = partial(write_set_file, self.fs, self._path, file)
        while file != self._saved:
            self._saved = None  # unknown until the write is known to have succeeded
            writing = asyncio.wrap_future(self._writer.submit(write))
            try:
                # A write cancelled here still finishes before any later one.
                await asyncio.wait_for(asyncio.shield(writing), WRITE_S)
            except NoSpaceError as error:
                if not self.lack_of_space:
                    _log.error("replica is waiting for space: %s", error)
                room = {each.path: each.free_bytes for each in self.logs.directories()}
                self.lack_of_space = (
                    f"{error}: expected {len(encode_set_file(file))} free bytes, got"
                    f" {room.get(self._path, 0)}"
                )
                await asyncio.sleep(WRITE_PAUSE_S)
            except TimeoutError:
                text = f"{self._path / SET_FILE} is not written within {WRITE_S:g} s"
                self._error = StorageError(text)
                raise self._error from None
            except StorageError as error:
                self._error = error
                raise
            else:
                self._saved, self._error = file, None
                self.revision = 0 if file.record is None else file.record.revision
        if self.lack_of_space:
            self.lack_of_space = ""
            _log.warning("replica has space again: path=%s", self._path)

    def remove_aside(self) -> None:
        """Delete logs that were set aside until this copy was complete again."""
        removing = self._writer.submit(self.logs.remove_aside)
        removing.add_done_callback(_report)

    def has_grown(self, now_s: float) -> bool:
        """Return whether bytes were synced since the last check, if one is due."""
        if now_s - self._holdings_s < HOLDINGS_INTERVAL_S:
            return False
        before, self._holdings_s = self._synced_ends, now_s
        self._synced_ends = sum(log.synced_end for log in self.logs.logs().values())
        return self._synced_ends != before

    async def save_holdings(self, version: int) -> None:
        """Write the version of the data directories, synced.

        Raises:
            StorageError: a directory is offline, or does not respond.
        """
        await self._answered(
            carry_out(partial(self.logs.set_holdings_version, version))
        )

    def member(self, set_id: str, version: int, incarnation: int) -> Member:
        """Return the payload of `members/K` for the data directories."""
        directories = dict.fromkeys(self.logs.identities().values(), version)
        return Member(set_id, directories, incarnation)

    async def finish_deletions(self) -> None:
        """Move logs aside that an earlier process has buried but not moved.

        Raises:
            StorageError: it failed; call it again.
        """
        left = self.tables.buried & self.logs.logs().keys()
        if left:
            await self._answered(carry_out(partial(self.logs.set_logs_aside, left)))

    async def begin_epoch(self, epoch: Epoch) -> None:
        """Write the start of an epoch at the end of every log, synced.

        Raises:
            StorageError: a directory is offline, or does not respond; in that case it
                may be written later, but before `finish_writing` returns.
        """
        ends = {
            log.number: log.next_offset
            for log in self.logs.logs().values()
            if log.number is not None
        }
        await self._answered(self.tables.begin_epoch(epoch, ends))

    async def lower_watermarks(self) -> None:
        """Lower high watermarks that are above the end of their log, durably.

        Raises:
            StorageError: a directory is offline, or does not respond.
        """
        above = {
            log_id: log.next_offset
            for log_id, log in self.logs.logs().items()
            if log.high_watermark > log.next_offset
        }
        if above:
            await self._answered(
                carry_out(partial(self.logs.lower_high_watermarks, above))
            )

    async def _answered(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for the storage threads, as long as they respond.

        The caller holds the node's lock: while it waited for a hung disk, its replica
        could not give up.
        """
        waiting = asyncio.ensure_future(work)
        waiting.add_done_callback(_retrieve)
        while not waiting.done():
            await asyncio.wait({waiting}, timeout=SILENCE_POLL_S)
            for directory in () if waiting.done() else self.logs.directories():
                _require_answers(directory)
        waiting.result()

    def stop_leading(self) -> None:
        """End puts in flight in doubt; their bytes and notes stay."""
        for log in self.logs.logs().values():
            if log.state in {LogState.OPEN, LogState.STOPPED}:
                log.follow()

    async def wait_committed(self, deadline_s: float) -> bool:
        """Wait until all followers have all bytes; False: the deadline passed first."""
        logs = self.logs.logs()
        while True:
            if all(log.high_watermark == log.next_offset for log in logs.values()):
                return True
            if self._clock.monotonic_s() >= deadline_s:
                return False
            await asyncio.sleep(COMMIT_POLL_S)

    async def finish_writing(self) -> None:
        """Wait until queued appends are written or dropped, so that all ends are fixed.

        Raises:
            StorageError: a directory does not respond.
        """
        loop = asyncio.get_running_loop()
        waits: dict[LogDir, asyncio.Event] = {}
        for directory in self.logs.directories():
            if directory.state is DirState.ONLINE:
                done = waits[directory] = asyncio.Event()

                def set_later(done: asyncio.Event = done) -> None:
                    loop.call_soon_threadsafe(done.set)

                directory.submit(set_later)
        for directory, done in waits.items():
            while not done.is_set() or self._is_reopening(directory):
                if directory.state is not DirState.ONLINE:
                    break
                _require_answers(directory)
                await asyncio.sleep(COMMIT_POLL_S)

    def _is_reopening(self, directory: LogDir) -> bool:
        logs = self.logs.logs().values()
        return any(
            each.log_dir is directory and each.state is LogState.REOPENING
            for each in logs
        )


def _require_answers(directory: LogDir) -> None:
    if directory.watch.is_silent:
        raise StorageError(f"{directory.path} does not answer")


def _retrieve(done: asyncio.Future[None]) -> None:
    """Retrieve the error of an abandoned write; `failure` reports it."""
    if not done.cancelled():
        done.exception()


def _report(done: Future[None]) -> None:
    """Log a failure to delete files; they are deleted later."""
    if not done.cancelled() and (error := done.exception()) is not None:
        _log.warning("logs that were set aside are not removed: %s", error)
