"""The logs of a broker that end: deleted with their topic, or set aside.

Nothing is removed from under a log: it is closed, the record of its data directory is
written without it, its directory is renamed, and the files go later, in the background.
A topic goes to `deleted/`, and a log of which a replica begins another copy to
`aside/` (`set_aside.py`). Each step may be done again after a crash.
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
    """Begin an operation, and return what it reports at the end."""
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
    """Logs, and how they end. Owner: the event loop's thread."""

    def __init__(
        self, fs: FileSystem, clock: Clock, post: Post, transactions: Path
    ) -> None:
        """Begin without logs.

        Args:
            fs: the disk.
            clock: names what is set aside.
            post: runs a callback on the loop's thread.
            transactions: the journal of transactions of the same broker.
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
        """Directory → what was there of deleted topics at the last removal."""
        self.known: KnownWatermarks | None = None
        """Watermarks that a replica had at the start; None: it is none."""

    def get(self, log_id: LogId) -> PartitionLog | None:
        """Return a log that exists."""
        return self._logs.get(log_id)

    def logs(self) -> Mapping[LogId, PartitionLog]:
        """Return all logs; a live view, not to be changed."""
        return self._logs

    # -- deletion

    def delete_topic(self, topic: str, on_done: OnDone) -> None:
        """End the logs of a topic and move their directories aside; never blocks.

        No put or get for the topic may come from now on. To be repeated until it
        succeeds; a restart in between leaves the topic out (`open`).

        Args:
            topic: its name.
            on_done: takes, on the loop's thread, the error, or None when no data
                directory has a partition of the topic any more.
        """
        self._end_logs(lambda each: each.topic == topic, DELETED_DIRECTORY, on_done)

    def _end_logs(
        self, is_wanted: Callable[[LogId], bool], holding: str, on_done: OnDone
    ) -> None:
        """Close logs, and move what the data directories have of them to `holding`."""

        def on_forgotten(error: Exception | None) -> None:
            if error is not None:
                on_done(error)
                return
            # A run works on the files that it was shown.
            move = partial(self._set_aside, is_wanted, holding, on_done)
            self._retention.call_when_idle(move)

        try:
            # Also without any: an earlier try may have left them in the records.
            self.forget(list(filter(is_wanted, self._logs)), on_forgotten)
        except (StorageError, ClosedError) as error:
            on_done(error)

    def forget(self, log_ids: Collection[LogId], on_forgotten: OnDone) -> None:
        """Close logs for good, and no longer expect them.

        Their files stay where they are. Until the callback the logs refuse appends.

        Args:
            log_ids: which partitions.
            on_forgotten: called once on the loop's thread. With None the directories of
                the logs may be moved or removed, and a put would make new ones. An
                error says that a record may still name them: a start without the
                directories would stop the partitions.

        Raises:
            StorageError: there is no such log, or it is not to be used any more.
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
        # Each knows how many partitions the others have.
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
        """Let go of a log whose files are closed."""
        if log.state is LogState.CLOSING:
            log.finish_close()
        self._forgotten.discard(log.log_id)
        if self._logs.pop(log.log_id, None) is None:
            return
        directory = log.log_dir
        directory.size_bytes = SizeBytes(directory.size_bytes - log.size_bytes)
        for segment in log.segments:
            self._files.forget(segment.path, directory.reader)
        # A run that is under way would remember them again.
        self._retention.call_when_idle(partial(self._retention.forget, log.segments))

    def set_logs_aside(self, log_ids: Collection[LogId], on_done: OnDone) -> None:
        """End logs of a replica and move their directories to `aside/`; never blocks.

        To be repeated until it succeeds; one that is not there is passed over.

        Args:
            log_ids: which partitions.
            on_done: takes, on the loop's thread, the error, or None.
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
        """Run a step for each data directory; report the first error at the end."""
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
        """Remove the files of topics that were deleted before the last call.

        So there is time to get them back. Blocks, on a worker thread.

        Raises:
            StorageError: a disk refuses; to be repeated.
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
        """Remove the files of logs that were set aside; blocks and raises likewise."""
        for directory in tuple(self._directories.values()):
            if directory.state is DirState.ONLINE:
                remove_set_aside(self._fs, directory.path, holding=ASIDE_DIRECTORY)

    # -- records of the data directories

    def _write_records(self, on_done: OnDone) -> None:
        """Write the record of each directory, synced, after what is queued."""
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
