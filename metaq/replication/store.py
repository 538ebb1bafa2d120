"""The disk of a replica, as actions that its node awaits one by one.

The `set` file is written by a thread of its own: a directory whose storage thread hangs
must not keep a leader from giving up. Everything else goes through the storage threads
of the data directories, in the order of their appends.
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
"""Interval of looks at high watermarks before a hand-over, and at what is written."""
SILENCE_POLL_S: Final = 0.1
"""Interval of looks at whether a disk still answers."""
WRITE_PAUSE_S: Final = 1.0
"""Pause before a file that found no space is written again."""
HOLDINGS_INTERVAL_S: Final = 10.0
"""Bytes that were synced for so long show in the version of the directories."""
WRITE_S: Final = 10.0
"""A file that is not written within so long is of a disk that hangs."""


@dataclass(frozen=True, slots=True)
class StartFacts:
    """Findings in the data directories, before ZooKeeper was asked."""

    tables: EpochTables
    """Epochs of the logs."""
    file: SetFile | None
    """The `set` file; None: there is none."""
    is_cut: bool
    """Whether recovery cut a torn tail."""
    is_short: bool
    """Whether logs lack bytes that they had, or their epochs are damaged."""
    is_sealed: bool = False
    """Whether a clean stop had closed the directories."""


class ReplicaStore:
    """Owner: the node; on the loop's thread."""

    def __init__(
        self,
        fs: FileSystem,
        path: Path,
        logs: LogManager,
        tables: EpochTables,
        *,
        clock: Clock,
    ) -> None:
        """Take over what is open.

        Args:
            fs: the disk.
            path: the first data directory, where the `set` file is.
            clock: for the wait for followers.
            logs: that follow.
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
        """Revision of the copy of the record that was saved last."""
        self.lack_of_space = ""
        """Why the `set` file waits for space; "" while it does not."""
        self._error: StorageError | None = None
        self._holdings_s = clock.monotonic_s()
        self._synced_ends = 0

    def begin(self) -> None:
        """Begin the thread now: later there may be no memory for it."""
        self._writer.begin()

    async def end(self) -> None:
        """End the thread after what it was given."""
        await self._writer.end()

    @property
    def failure(self) -> str:
        """Return why this disk can have no part in a term; "" while it can."""
        for each in self.logs.directories():
            if each.state is not DirState.ONLINE:
                return f"{each.path} is offline: {each.offline_cause}"
            if each.watch.is_silent:
                return f"{each.path} does not answer"
        return "" if self._error is None else str(self._error)

    async def save(self, file: SetFile) -> None:
        """Write the `set` file, synced; without space again and again.

        Nothing that comes after it may be done before.

        Raises:
            StorageError: the disk refuses, or does not answer; `failure` says so until
                a later write succeeds.
        """
        write = partial(write_set_file, self.fs, self._path, file)
        while file != self._saved:
            self._saved = None  # unknown until the write is known to have succeeded
            writing = asyncio.wrap_future(self._writer.submit(write))
            try:
                # What is called off here is written before what comes later.
                await asyncio.wait_for(asyncio.shield(writing), WRITE_S)
            except NoSpaceError as error:
                if not self.lack_of_space:
                    _log.error("replica waits for space: %s", error)
                room = {each.path: each.free_bytes for each in self.logs.directories()}
                self.lack_of_space = (
                    f"{error}: expected room for {len(encode_set_file(file))} bytes,"
                    f" free are {room.get(self._path, 0)}"
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
        """Have logs removed that were kept until this copy was complete again."""
        removing = self._writer.submit(self.logs.remove_aside)
        removing.add_done_callback(_report)

    def has_grown(self, now_s: float) -> bool:
        """Return whether bytes were synced since the last look, if one is due again."""
        if now_s - self._holdings_s < HOLDINGS_INTERVAL_S:
            return False
        before, self._holdings_s = self._synced_ends, now_s
        self._synced_ends = sum(log.synced_end for log in self.logs.logs().values())
        return self._synced_ends != before

    async def save_holdings(self, version: int) -> None:
        """Write the version of the data directories, synced.

        Raises:
            StorageError: a directory is offline, or does not answer.
        """
        await self._answered(
            carry_out(partial(self.logs.set_holdings_version, version))
        )

    def member(self, set_id: str, version: int, incarnation: int) -> Member:
        """Return what `members/K` is to have of the data directories."""
        directories = dict.fromkeys(self.logs.identities().values(), version)
        return Member(set_id, directories, incarnation)

    async def finish_deletions(self) -> None:
        """Move logs aside that a former life has buried, and no more.

        Raises:
            StorageError: it failed, and is to be repeated.
        """
        left = self.tables.buried & self.logs.logs().keys()
        if left:
            await self._answered(carry_out(partial(self.logs.set_logs_aside, left)))

    async def begin_epoch(self, epoch: Epoch) -> None:
        """Write the begin of an epoch at the end of every log, synced.

        Raises:
            StorageError: a directory is offline, or does not answer: then it may be
                written later, before what comes after `finish_writing`.
        """
        ends = {
            log.number: log.next_offset
            for log in self.logs.logs().values()
            if log.number is not None
        }
        await self._answered(self.tables.begin_epoch(epoch, ends))

    async def lower_watermarks(self) -> None:
        """Believe no high watermark above the end of its log, durably.

        Raises:
            StorageError: a directory is offline, or does not answer.
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
        """Wait for the storage threads, as long as they answer.

        The caller holds the lock of the node: while it waited for a disk that hangs,
        its replica could not give up.
        """
        waiting = asyncio.ensure_future(work)
        waiting.add_done_callback(_retrieve)
        while not waiting.done():
            await asyncio.wait({waiting}, timeout=SILENCE_POLL_S)
            for directory in () if waiting.done() else self.logs.directories():
                _require_answers(directory)
        waiting.result()

    def stop_leading(self) -> None:
        """Answer puts in flight as in doubt; their bytes and notes stay."""
        for log in self.logs.logs().values():
            if log.state in {LogState.OPEN, LogState.STOPPED}:
                log.follow()

    async def wait_committed(self, deadline_s: float) -> bool:
        """Return whether all followers have everything before the deadline."""
        logs = self.logs.logs()
        while True:
            if all(log.high_watermark == log.next_offset for log in logs.values()):
                return True
            if self._clock.monotonic_s() >= deadline_s:
                return False
            await asyncio.sleep(COMMIT_POLL_S)

    async def finish_writing(self) -> None:
        """Wait until what was queued is written, or dropped: all ends are fixed.

        Raises:
            StorageError: a directory does not answer.
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
    """Take the error of a write that is waited for no longer: `failure` names it."""
    if not done.cancelled():
        done.exception()


def _report(done: Future[None]) -> None:
    """Log what kept files from being removed; they are removed at another time."""
    if not done.cancelled() and (error := done.exception()) is not None:
        _log.warning("logs that were set aside are not removed: %s", error)
