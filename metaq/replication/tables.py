"""The epoch tables and numbers of a replica's logs, in memory and in its journals.

There is one journal for each data directory (`epoch_journal.py`). The loop's thread
owns the tables and queues their changes; the storage thread of the directory writes
them, in order with the appends. So a change that is queued for a log is synced before
any later byte of it. Changes that are queued together are one frame and one sync. A
failed write, even for lack of space, takes the directory offline: without its epochs no
byte of a log can be trusted.

A damaged journal is moved aside by the first write. Its numbers and epochs are lost,
and the replica is incomplete (`is_damaged`).
"""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from pathlib import Path
from typing import Final

from metaq.errors import CorruptRecordError, MissingFileError, NoSpaceError
from metaq.fs import FileSystem
from metaq.fs.frame_file import FrameFile, StoredFrame, read_frames
from metaq.model import LogId, Offset
from metaq.replication.epoch_journal import (
    ENTRIES,
    EPOCHS_FILE,
    MAGIC,
    Entry,
    EpochBegun,
    EpochJournal,
    LogCreated,
    LogDeleted,
    TableCut,
    decode_entries,
    encode_entries,
)
from metaq.replication.epochs import Epoch, EpochTable, load_table
from metaq.storage.log_dir import LogDir
from metaq.storage.log_manager import LogManager
from metaq.storage.log_removal import OnDone, outcome_of

NUMBER_BITS: Final = 64
"""Size of a log number, in bits; drawn at random."""

COMPACT_BYTES: Final = 1 << 20
"""A journal is compacted when it exceeds twice the size of its contents by this."""

_log = logging.getLogger(__name__)


class EpochTables:
    """Epochs of the logs of one replica. Owned by the event loop's thread."""

    def __init__(
        self,
        fs: FileSystem,
        paths: Iterable[Path],
        draw: Callable[[], int] = lambda: secrets.randbits(NUMBER_BITS),
    ) -> None:
        """Read the journals of data directories without changing them; blocks.

        Args:
            fs: the disk.
            paths: all data directories; they may be missing.
            draw: returns a 64-bit number that was not used before.

        Raises:
            StorageError: a disk failed.
        """
        self._files = {path: _JournalFile(fs, path) for path in paths}
        self._draw = draw
        self._directories: Mapping[Path, LogDir] = {}
        self._known = EpochJournal()
        self._paths: dict[int, Path] = {}
        """Number of each existing log → its data directory."""
        for path, file in self._files.items():
            self._known.logs.update(file.known.logs)
            self._known.tables.update(file.known.tables)
            self._known.gone.update(file.known.gone)
            self._paths.update(dict.fromkeys(file.known.logs, path))
        for number in self._known.logs:
            # A log that began again in another directory is gone in the first one.
            self._known.gone.pop(number, None)
        self.numbers: Final[dict[LogId, int]] = {
            each.log_id: number for number, each in self._known.logs.items()
        }
        """Existing logs → their numbers."""
        self._under_way: Final = set[asyncio.Future[None]]()
        """Unfinished writes, including those whose callers do not wait any more."""
        self.on_gone: Callable[[int], None] | None = None
        """Called when an existing log is buried, before other code can see it."""

    def attach(self, logs: LogManager) -> None:
        """Write to the data directories of logs that are now open.

        Drops entries at or after the end of a log, which are from before a crash or
        truncation, and entries of deleted bytes.
        """
        self._directories = {each.path: each for each in logs.directories()}
        tables = self._known.tables
        for log in logs.logs().values():
            if log.number in tables:
                start, end = log.log_start_offset, log.synced_end
                table = load_table(tables[log.number], start=start, end=end)
                tables[log.number] = table

    @property
    def is_damaged(self) -> bool:
        """Return whether a journal is damaged, so that nothing is known of its logs."""
        return any(file.is_damaged for file in self._files.values())

    @property
    def gone(self) -> AbstractSet[int]:
        """Return the numbers of deleted logs."""
        return self._known.gone.keys()

    @property
    def starts(self) -> dict[LogId, Offset]:
        """Return the first offset of each existing log."""
        return {each.log_id: each.start for each in self._known.logs.values()}

    @property
    def buried(self) -> AbstractSet[LogId]:
        """Return the names of deleted logs whose files may still exist."""
        names = self._known.gone.values()
        return {name for name in names if name is not None} - self.numbers.keys()

    def is_living(self, number: int | None) -> bool:
        """Return whether a log has epochs: it was begun here, and is not buried."""
        return number in self._known.logs

    def table(self, number: int) -> EpochTable:
        """Return the epochs of an existing log."""
        return self._known.tables[number]

    # -- creation and deletion of logs

    def begin_log(
        self, log_id: LogId, directory: LogDir, start: Offset, epoch: Epoch
    ) -> int:
        """Draw the number of a leader's new log; never blocks.

        It is on disk before anything that is appended later.

        Args:
            log_id: the partition.
            directory: its data directory.
            start: its first offset.
            epoch: epoch of the leader.
        """
        number = self._draw()
        while number in self._paths or number in self._known.gone:
            number = self._draw()
        self.adopt_log(log_id, number, directory, start, epoch)
        return number

    def adopt_log(
        self, log_id: LogId, number: int, directory: LogDir, start: Offset, epoch: Epoch
    ) -> None:
        """Record a log of the leader, new here or created again; never blocks.

        Args:
            log_id: the partition; another log with this name must have been buried.
            number: number given by the leader.
            directory: its data directory.
            start: the first offset here.
            epoch: epoch of the byte there.
        """
        known = self.numbers.get(log_id, number)
        assert known == number, f"{log_id}: {known} is not buried, and {number} begins"
        former = self._directories.get(self._paths.get(number, directory.path))
        self.numbers[log_id], self._paths[number] = number, directory.path
        born = LogCreated(number, log_id, start, epoch)
        self._known.apply([born])
        self._queue(directory, born)
        if former is not None and former is not directory:
            self._queue(former, LogDeleted(number))

    def _queue(self, directory: LogDir, entry: Entry) -> None:
        file = self._files[directory.path]
        file.pending.append(entry)
        work = partial(directory.appender.guarded, file.write)
        directory.submit(work, joins=True)

    async def bury(self, numbers: Collection[int]) -> None:
        """Record permanently that logs are deleted, synced on return.

        Args:
            numbers: may include logs that this replica never had, because others may.

        Raises:
            StorageError: a directory is offline, or goes offline now.
            ClosedError: a directory is closed.
        """
        await self._write(
            [LogDeleted(each) for each in numbers if each not in self.gone]
        )

    async def bury_topic(self, topic: str) -> None:
        """Record that the logs of a topic are deleted, as `bury`, also to followers."""
        await self.bury([n for each, n in self.numbers.items() if each.topic == topic])

    # -- epochs

    async def begin_epoch(self, epoch: Epoch, ends: Mapping[int, Offset]) -> None:
        """Start an epoch in logs that now lead: one sync for each data directory.

        Args:
            epoch: epoch of the leader.
            ends: log number → its end.

        Raises:
            StorageError: a directory is offline, or goes offline now.
            ClosedError: a directory is closed.
        """
        await self._write(
            [EpochBegun(number, epoch, end) for number, end in ends.items()]
        )

    async def adopt(self, tables: Mapping[int, EpochTable]) -> None:
        """Replace the tables of logs that were truncated or continue, synced on return.

        Args:
            tables: log number → its whole table. Unchanged tables are not written.

        Raises:
            StorageError: a directory is offline, or goes offline now.
            ClosedError: a directory is closed.
        """
        # An epoch whose write an earlier term did not await may be written first.
        while self._under_way:
            await asyncio.wait(self._under_way)
        entries: list[Entry] = []
        for number, table in tables.items():
            entries += _changes(number, self.table(number), table)
        await self._write(entries)

    async def _write(self, entries: Sequence[Entry]) -> None:
        by_path: dict[Path, list[Entry]] = {}
        first = next(iter(self._files))
        for entry in entries:
            path = self._paths.get(entry.number, first)
            by_path.setdefault(path, []).append(entry)
        errors = await asyncio.gather(
            *(outcome_of(partial(self._submit, *each)) for each in by_path.items())
        )
        for error in errors:
            if error is not None:
                raise error

    def _submit(self, path: Path, entries: Sequence[Entry], on_done: OnDone) -> None:
        directory, file = self._directories[path], self._files[path]
        if (refusal := directory.refusal()) is not None:
            on_done(refusal)
            return

        written = asyncio.get_running_loop().create_future()

        def done(error: Exception | None) -> None:
            if error is None:
                self._take(entries)
            self._under_way.discard(written)
            written.set_result(None)
            on_done(error)

        self._under_way.add(written)
        file.pending.extend(entries)
        carry_out = directory.appender.carry_out
        directory.submit(partial(carry_out, file.write, done, is_vital=True))

    def _take(self, entries: Sequence[Entry]) -> None:
        """Apply entries to memory that are on disk."""
        known = self._known.logs
        for entry in entries:
            if isinstance(entry, LogDeleted) and entry.number in known:
                del self.numbers[known[entry.number].log_id]
                del self._paths[entry.number]
                if self.on_gone is not None:
                    self.on_gone(entry.number)
        self._known.apply(entries)

    def close(self) -> None:
        """Close the journals, after the logs are closed; never raises."""
        for file in self._files.values():
            file.close()


def _changes(number: int, old: EpochTable, new: EpochTable) -> Iterable[Entry]:
    """Return the entries that turn one table into another."""
    same = 0
    while same < min(len(old), len(new)) and old[same] == new[same]:
        same += 1
    if same < len(old):
        yield TableCut(number, old[same].start)
    for epoch, start in new[same:]:
        yield EpochBegun(number, epoch, start)


class _JournalFile:
    """The journal of one data directory. Owned by its storage thread once that runs."""

    def __init__(self, fs: FileSystem, path: Path) -> None:
        """Read the journal of a data directory; there may be none."""
        self.known: Final = EpochJournal()
        """Its contents as written."""
        self.is_damaged = False
        """Whether its file was damaged when it was read."""
        self.pending: Final = deque[Entry]()
        """Entries for the next `write`; any thread may add to them."""
        self._fs = fs
        self._path = path / EPOCHS_FILE
        self._file: FrameFile | None = None
        self._limit_bytes = COMPACT_BYTES
        try:
            entries = list(_entries_of(read_frames(fs, self._path, MAGIC)))
            self.known.apply(entries)
        except CorruptRecordError as error:
            _log.error("epochs not believed: %s", error)
            self.is_damaged = True
        except MissingFileError:
            pass  # a new directory

    def write(self) -> None:
        """Write and sync the pending entries as one frame; compact the file if due.

        Raises:
            StorageError: the state of the file is unknown, or there is no space.
        """
        entries = [self.pending.popleft() for _ in range(len(self.pending))]
        if not entries:
            return
        file = self._file or self._open()
        file.append(ENTRIES, 0, encode_entries(entries))
        self.known.apply(entries)
        if file.end >= self._limit_bytes:
            self._compact(file)

    def _open(self) -> FrameFile:
        if self.is_damaged and self._fs.exists(self._path):
            aside = self._path.with_name(f"{EPOCHS_FILE}.damaged")
            self._fs.rename(self._path, aside)
        self._file = FrameFile(self._fs, self._path, MAGIC)
        self._file.open(lambda _frame: None)
        self._set_limit()
        return self._file

    def _set_limit(self) -> None:
        size = len(encode_entries(self.known.entries()))
        self._limit_bytes = COMPACT_BYTES + 2 * size

    def _compact(self, file: FrameFile) -> None:
        self._set_limit()
        if file.end < self._limit_bytes:
            return
        try:
            file.replace([(ENTRIES, 0, encode_entries(self.known.entries()))])
        except NoSpaceError as error:
            _log.warning("epochs not made smaller: %s", error)
            self._limit_bytes += file.end

    def close(self) -> None:
        """Close the file; never raises."""
        if self._file is not None:
            self._file.close()


def _entries_of(frames: Iterable[StoredFrame]) -> Iterable[Entry]:
    """Yield the entries of all frames.

    Raises:
        CorruptRecordError: a frame has an unknown kind.
    """
    for frame in frames:
        if frame.kind != ENTRIES:
            raise CorruptRecordError(
                f"frame of epochs: expected kind {ENTRIES}, got {frame.kind}"
            )
        yield from decode_entries(frame.body)
