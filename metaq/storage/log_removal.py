"""Removal of a broker's logs: deleted with their topic, or set aside.

No file is removed while its log is open: the log is closed, the record of its data
directory is written without it, its directory is renamed, and the files are removed
later, in the background. A deleted topic goes to `deleted/`; a log that a replica will
copy again goes to `aside/` (`set_aside.py`). Each step may be repeated after a crash.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

from metaq.clock import Clock
from metaq.errors import ClosedError, StorageError
from metaq.fs import FileSystem
from metaq.fs.group_thread import Post, Task
from metaq.model import LogId, SizeBytes
from metaq.storage.holdings import Extent, Holdings
from metaq.storage.inventory import Inventory, write_holdings
from metaq.storage.log_dir import DirState, LogDir
from metaq.storage.log_state import LogState
from metaq.storage.partition_log import PartitionLog
from metaq.storage.retention_run import Retention
from metaq.storage.set_aside import (
    ASIDE_DIRECTORY,
    DELETED_DIRECTORY,
    list_set_aside,
    remove_set_aside,
    set_aside,
)
from metaq.storage.slices import OpenFiles
from metaq.storage.watermarks import KnownWatermarks

OnDone: TypeAlias = Callable[[Exception | None], None]
"""Callback that takes the error, or None."""

E = TypeVar("E", bound=Exception)


async def outcome_of(begin: Callable[[Callable[[E | None], None]], None]) -> E | None:
    """Begin an operation, and return the error that it reports at the end, or None."""
    done: asyncio.Future[E | None] = asyncio.get_running_loop().create_future()

    def on_done(error: E | None) -> None:
        if not done.done():
            done.set_result(error)

    begin(on_done)
    return await done


async def carry_out(begin: Callable[[OnDone], None]) -> None:
    """Begin an operation on the logs, and wait until it is done.

    Raises:
        StorageError: it failed.
        ClosedError: the logs are closed.
    """
    error = await outcome_of(begin)
    if error is not None:
        raise error


class LogRemoval:
    """The logs and their removal. Owner: the event loop's thread."""

    def __init__(
        self, fs: FileSystem, clock: Clock, post: Post, transactions: Path
    ) -> None:
        """Create a manager without logs.

        Args:
            fs: the disk.
            clock: time for the names of directories that are set aside.
            post: runs a callback on the loop's thread.
            transactions: path of the same broker's transaction journal.
        """
        self._fs = fs
        self._clock = clock
        self._post = post
        self._directories: dict[Path, LogDir] = {}
        self._logs: dict[LogId, PartitionLog] = {}
        self._files = OpenFiles(fs)
        self._retention = Retention(fs, clock, post)
        self._inventory = Inventory(fs, clock, transactions)
        self._forgotten: set[LogId] = set()
        self._deleted: Mapping[Path, tuple[str, ...]] = {}
        """Directory → names of deleted topics there at the last removal."""
        self.known: KnownWatermarks | None = None
        """Watermarks that a replica knew at the start; None if not a replica."""

    def get(self, log_id: LogId) -> PartitionLog | None:
        """Return a log, or None if there is none."""
        return self._logs.get(log_id)

    def logs(self) -> Mapping[LogId, PartitionLog]:
        """Return all logs; a live view, read-only for the caller."""
        return self._logs

    # -- deletion

    def delete_topic(self, topic: str, on_done: OnDone) -> None:
        """Close the logs of a topic and move their directories away; never blocks.

        No put or get for the topic may come from now on. The caller repeats it until it
        succeeds; a start in between leaves the topic out (`open`).

        Args:
            topic: its name.
            on_done: called on the loop's thread with the error, or None when no data
                directory has a partition of the topic any more.
        """
        self._end_logs(lambda each: each.topic == topic, DELETED_DIRECTORY, on_done)

    def _end_logs(
        self, is_wanted: Callable[[LogId], bool], holding: str, on_done: OnDone
    ) -> None:
        """Close logs, and move their directories to `holding`."""

        def on_forgotten(error: Exception | None) -> None:
            if error is not None:
                on_done(error)
                return
            # A run of retention uses the files of its snapshot.
            move = partial(self._set_aside, is_wanted, holding, on_done)
            self._retention.call_when_idle(move)

        try:
            # Even without logs: after a failed try the records may still name them.
            self.forget(list(filter(is_wanted, self._logs)), on_forgotten)
        except (StorageError, ClosedError) as error:
            on_done(error)

    def forget(self, log_ids: Collection[LogId], on_forgotten: OnDone) -> None:
        """Close logs for good, and remove them from the records.

        Their files stay. Until the callback the logs refuse appends.

        Args:
            log_ids: the partitions.
            on_forgotten: called once on the loop's thread. With None the directories of
                the logs may be moved or removed, and a put would make new ones. After
                an error a record may still name them, so that a start without the
                directories would stop the partitions.

        Raises:
            StorageError: there is no such log, it is closing, or a disk is offline.
            ClosedError: the manager is closed.
        """
        logs = [self._require_open(log_id) for log_id in log_ids]
        for directory in self._directories.values():
            if (refusal := directory.refusal()) is not None:
                raise refusal
        for log in logs:
            log.begin_close()
            self._forgotten.add(log.log_id)
            self._inventory.forget(log.log_id)
        # Each record has the number of partitions in all others.
        records = self._make_records()

        def begin(directory: LogDir, on_done: OnDone) -> None:
            here = [log for log in logs if log.log_dir is directory]
            directory.submit(
                partial(
                    directory.appender.forget,
                    [log.writer for log in here],
                    records[directory.path],
                    partial(done, here, on_done),
                )
            )

        def done(
            here: Sequence[PartitionLog], on_done: OnDone, error: Exception | None
        ) -> None:
            for log in here:
                self._drop(log)
            on_done(error)

        self._in_each_directory(begin, on_forgotten)

    def _require_open(self, log_id: LogId) -> PartitionLog:
        log = self._logs.get(log_id)
        if log is None or log.state in {LogState.CLOSING, LogState.CLOSED}:
            raise StorageError(f"no log to forget: partition={log_id}")
        return log

    def _drop(self, log: PartitionLog) -> None:
        """Remove a log whose files are closed."""
        if log.state is LogState.CLOSING:
            log.finish_close()
        self._forgotten.discard(log.log_id)
        if self._logs.pop(log.log_id, None) is None:
            return
        directory = log.log_dir
        directory.size_bytes = SizeBytes(directory.size_bytes - log.size_bytes)
        for segment in log.segments:
            self._files.forget(segment.path, directory.reader)
        # A run of retention in progress would remember them again.
        self._retention.call_when_idle(partial(self._retention.forget, log.segments))

    def set_logs_aside(self, log_ids: Collection[LogId], on_done: OnDone) -> None:
        """Close logs of a replica and move their directories to `aside/`; never blocks.

        The caller repeats it until it succeeds; missing logs are skipped.

        Args:
            log_ids: the partitions.
            on_done: called on the loop's thread with the error, or None.
        """
        self._end_logs(frozenset(log_ids).__contains__, ASIDE_DIRECTORY, on_done)

    def _set_aside(
        self, is_wanted: Callable[[LogId], bool], holding: str, on_done: OnDone
    ) -> None:
        def begin(directory: LogDir, on_done: OnDone) -> None:
            path, wall_ms = directory.path, self._clock.wall_ms()
            work = partial(
                set_aside, self._fs, path, is_wanted, wall_ms, holding=holding
            )
            self._carry_out(directory, work, on_done)

        self._in_each_directory(begin, on_done)

    def _carry_out(self, directory: LogDir, work: Task, on_done: OnDone) -> None:
        refusal = directory.refusal()
        if refusal is not None:
            on_done(refusal)
            return
        directory.submit(partial(directory.appender.carry_out, work, on_done))

    def _in_each_directory(
        self, begin: Callable[[LogDir, OnDone], None], on_done: OnDone
    ) -> None:
        """Begin a step in each data directory; report the first error when all end."""
        left = set(self._directories.values())
        failed: list[Exception] = []

        def done(directory: LogDir, error: Exception | None) -> None:
            if error is not None:
                failed.append(error)
            left.discard(directory)
            if not left:
                on_done(failed[0] if failed else None)

        for directory in tuple(left):
            begin(directory, partial(done, directory))

    def remove_deleted(self) -> None:
        """Remove the files of deleted topics that the previous call has found.

        The delay gives time to restore them. Blocks, on a worker thread.

        Raises:
            StorageError: a disk refuses; the caller repeats it.
        """
        before, self._deleted = self._deleted, self._list_deleted()
        for directory, names in before.items():
            remove_set_aside(self._fs, directory, names=names)

    def _list_deleted(self) -> Mapping[Path, tuple[str, ...]]:
        return {
            directory.path: list_set_aside(self._fs, directory.path)
            for directory in tuple(self._directories.values())
            if directory.state is DirState.ONLINE
        }

    def remove_aside(self) -> None:
        """Remove the files of logs that were set aside; blocks and raises the same."""
        for directory in tuple(self._directories.values()):
            if directory.state is DirState.ONLINE:
                remove_set_aside(self._fs, directory.path, holding=ASIDE_DIRECTORY)

    # -- records of the data directories

    def _write_records(self, on_done: OnDone) -> None:
        """Write the record of each directory, synced, after all queued requests."""
        records = self._make_records()

        def begin(directory: LogDir, on_done: OnDone) -> None:
            path = directory.path
            work = partial(write_holdings, self._fs, path, records[path])
            self._carry_out(directory, work, on_done)

        self._in_each_directory(begin, on_done)

    def _make_records(self) -> dict[Path, Holdings]:
        extents = (
            (log.log_dir.path, log_id, Extent(log.log_start_offset, log.high_watermark))
            for log_id, log in self._logs.items()
            if log_id not in self._forgotten
        )
        is_replica = self.known is not None
        return self._inventory.make_records(extents, is_replica=is_replica)

    def _logs_of(self, directory: LogDir) -> list[PartitionLog]:
        return [log for log in self._logs.values() if log.log_dir is directory]
