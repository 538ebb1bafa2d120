"""The transaction journal: one thread that writes and syncs redo files, in groups.

Theory of operation. Entries come from the loop in the order of events. All entries of
one turn of the loop are given to the journal's thread together, because one that woke
the thread by itself would be synced alone. The thread takes everything queued at once:

    per redo file: write, sync if a decision requires it  →  sums  →  report to the loop

* As in a Java broker, all entries of one transaction are in one file. The first one
  goes to the current file and counts as a reference to it; the others follow it there.
  A file of full size takes no new transactions. A large file without references is
  removed. A reference ends with a rollback, or with `release` when the batches of a
  commit are in their partitions; that waits until the next entry.
* A *decision* (prepare, commit, rollback) is synced before it is reported, if
  `flushTxLogAtCommit` is 1. With 2 `sync_due` syncs once a second, with 0 nothing does.
  Puts are written before they are reported, and synced with the next decision.
* Entries that must be on disk *before* the partitions get them are synced in every
  mode.
* Disk full: the file is truncated to its former size, the entries of the group fail,
  and so do later ones of those transactions, because a commit must not lack a put.
  Without space or a descriptor for the next file, the current one continues.
* Any other failure takes the journal offline, once: everything fails from then on until
  a restart has read the disk again. It is unknown which decisions of the group are on
  disk.
* The offsets in a commit record are overwritten (`redo_file.py`) on the thread that is
  about to write the batch: a Java broker looks for the batch at exactly these offsets,
  and at each moment it finds it there or finds nothing.
* `sums.N` beside each file (`sums.py`) is written after its bytes. A failure there
  costs only the checksums of later bytes of that file.

Invariant: an entry is reported exactly once, as written or as failed.
Source: docs/metaq-1.4/broker.md 5.6.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Final, NamedTuple, Protocol, TypeAlias

from metaq.clock import Clock
from metaq.errors import DiskError, NoSpaceError, StorageError
from metaq.fs import Buffer, DirLock, FileSystem
from metaq.fs.group_thread import (
    GroupThread,
    Post,
    RunRequests,
    SilenceWatch,
    Task,
    Worker,
    warn_of_slow_sync,
)
from metaq.model import Offset
from metaq.stats import Histogram
from metaq.txn.redo_file import (
    Bounds,
    OffsetBlock,
    RedoFile,
    create_redo_file,
    remove_files,
)
from metaq.txn.side_files import DELETIONS, Deletions, JournalPosition, write_checkpoint

IDLE_BYTES_MAX: Final = 1 << 20
"""A redo file of this size is removed as soon as it has no references, so that a start
has less to read."""

QUESTION_INTERVAL_S: Final = 30.0
"""Time from an answer of the thread to the next question that checks for a hang."""

SYNC_NEVER, SYNC_AT_DECISION, SYNC_EACH_SECOND = 0, 1, 2

_log = logging.getLogger(__name__)


class JournalTicket(Protocol):
    """Receives the outcome of an entry, once, on the loop's thread."""

    def on_journalled(self, position: int) -> None:
        """It is written at this position of its file, and synced if required."""

    def on_refused(self, error: StorageError) -> None:
        """It is not in the journal; if the journal is offline, it may be."""


@dataclass(slots=True, eq=False)
class Slot:
    """Redo file and state of one transaction's entries. Owner: the journal's thread."""

    block: OffsetBlock | None = None
    """Block with the offsets of the commit record, once that is written."""
    file: RedoFile | None = None
    """None before the first entry and after the last one."""
    position: int = 0
    """Position of the first entry."""
    error: StorageError | None = None
    """Error of a missing entry, after which no other one may follow; or None."""


@dataclass(slots=True, eq=False)
class Gate:
    """A task that must be done before some entries. Owner: the journal's thread."""

    error: StorageError | None = None
    """Error of the task, or None; with one the entries that wait for it are refused."""


class JournalEntry(NamedTuple):
    """One or more records on their way to the journal's thread."""

    slot: Slot
    chunks: Sequence[bytes]
    """Whole records, cut anywhere."""
    ticket: JournalTicket
    is_decision: bool = False
    """Whether the mode may require a sync before the report."""
    is_last: bool = False
    """Whether it ends its transaction, so that the slot is released."""
    is_ahead: bool = False
    """Whether it is synced in every mode, because partitions must not get it before."""
    bounds: Bounds = ()
    """Position in the chunks, and value, of each offset that `note_offset` may
    change."""
    gate: Gate | None = None
    """Task that must be done first, and that commits the broker to this entry."""


_Outcome: TypeAlias = tuple[JournalEntry, int | StorageError]
"""An entry, and the position where it was written, or the error."""

JournalRequest: TypeAlias = Sequence[JournalEntry | Slot] | Task
"""Entries, and slots of finished transactions; or a task between two groups."""

StartJournalWorker: TypeAlias = Callable[
    [str, RunRequests[JournalRequest]], Worker[JournalRequest]
]
"""Makes the journal's thread; tests pass a deterministic one."""


@dataclass(frozen=True, slots=True)
class JournalFigures:
    """Counts of the journal; a snapshot."""

    size_bytes: int = 0
    sync_count: int = 0


class Journal:
    """The journal of one broker. Methods are for the loop's thread unless noted."""

    def __init__(
        self,
        fs: FileSystem,
        clock: Clock,
        post: Post,
        call_soon: Post,
        directory: Path,
        *,
        sync_mode: int,
        checkpoints_max: int,
        file_bytes_max: int,
        slow_sync_ms: int,
        start_worker: StartJournalWorker = GroupThread[JournalRequest],
    ) -> None:
        """Create a journal; `JournalOpening` opens it, and `start` begins to write.

        Args:
            fs: the disk.
            clock: measures syncs.
            post: runs a callback on the loop's thread; called on the journal's thread.
            call_soon: the same, called on the loop's thread, at the end of this turn.
            directory: `<dataLogPath>/transactions`.
            sync_mode: 0, 1 or 2, as flushTxLogAtCommit.
            checkpoints_max: number of checkpoint files to keep.
            file_bytes_max: a file of this size takes no new transactions.
            slow_sync_ms: a longer sync is logged.
            start_worker: makes the journal's thread.
        """
        self.directory: Final = directory
        self.offline_cause: StorageError | None = None
        self.figures = JournalFigures()
        self.sync_latency = Histogram()
        """Duration of each sync, seconds; recorded on the journal's thread."""
        self.watch: Final = SilenceWatch("journal", directory)
        self._fs = fs
        self._clock = clock
        self._post = post
        self._call_soon = call_soon
        self._sync_mode = sync_mode
        self._checkpoints_max = checkpoints_max
        self._file_bytes_max = file_bytes_max
        self._slow_sync_ms = slow_sync_ms
        self._idle_bytes_max = min(file_bytes_max, IDLE_BYTES_MAX)
        self._files: dict[int, RedoFile] = {}
        self._current: RedoFile | None = None
        self._is_complete = False
        """Whether all side files are in the directory."""
        self._crowded_number = 0
        """Number of the last full file that had to continue for lack of space."""
        self._failed: StorageError | None = None
        self._deletions: Deletions = {}
        self._sync_count = 0
        self._lock: DirLock | None = None
        self._waiting: list[JournalEntry | Slot] = []
        self._is_due = False
        self._worker = start_worker("journal", self._run)

    # -- opening: any thread, before `start`

    def lock(self) -> None:
        """Lock the directory, until `abandon` or the end of `close`. Blocks.

        Raises:
            LogDirLockedError: another broker has locked it.
            StorageError: the disk refuses.
        """
        self._lock = self._fs.lock_directory(self.directory)

    def abandon(self) -> None:
        """Close all files and release the lock, without having started."""
        self.close_files()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def open(
        self, number: int, survivors: Iterable[tuple[Slot, bytes, Bounds]]
    ) -> None:
        """Create the first file, with the records of unfinished transactions. Blocks.

        Args:
            number: number of the file, above all existing ones.
            survivors: slot, records and bounds of each transaction.

        Raises:
            StorageError: the disk refuses.
        """
        file = self._current = self._make_file(number)
        for slot, data, bounds in survivors:
            slot.file, slot.position = file, file.end
            file.references += 1
            file.write(data)
            commits = [(0, bounds)] if bounds else []
            for block in file.note_written(data, commits, is_synced=False):
                slot.block = block
        file.sync()
        file.note_synced()
        self.figures = self._figures()

    def note_side_files(self) -> None:
        """Note in this file, and in all later ones, that the side files exist."""
        self._is_complete = True
        for file in self._files.values():
            file.note_beside()

    def start(self) -> None:
        """Start the thread."""
        self._worker.start()

    # -- requests

    def submit(self, entry: JournalEntry) -> None:
        """Queue an entry; never blocks."""
        self._waiting.append(entry)
        if not self._is_due:
            self._is_due = True
            self._call_soon(self.hand_over)

    def release(self, slot: Slot) -> None:
        """Release the slot of a transaction whose commit is carried out."""
        self._waiting.append(slot)

    def hand_over(self) -> None:
        """Give the waiting entries to the thread."""
        self._is_due = False
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._worker.submit(waiting)

    def tick(self) -> None:
        """Hand over waiting entries, and check that the thread answers; periodic."""
        self.hand_over()

        def answered(_error: StorageError | None) -> None:
            self.watch.on_answer(self._clock.monotonic_s())

        ask = partial(self.call, lambda: None, answered)
        self.watch.tick(self._clock.monotonic_s(), QUESTION_INTERVAL_S, ask)

    def note_offset(self, slot: Slot, position: int, offset: Offset) -> Sequence[Task]:
        """Note the offset of a batch; on the thread that writes the batch next.

        Args:
            slot: slot of its transaction, whose commit record is written.
            position: position of the offset in the redo file.
            offset: offset of the batch.

        Returns:
            A task that writes this offset and others noted near it; it does not raise.
        """
        if slot.block is None:
            return ()
        slot.block.note(position, offset)
        return (slot.block.write,)

    def do_ahead(self, task: Task) -> Gate:
        """Run a task before some entries, on the journal's thread.

        Written decisions are synced first. If the task finds no space, the entries that
        wait for it are refused; any other failure takes the journal offline.

        Args:
            task: must change nothing if it raises NoSpaceError.

        Returns:
            The gate for these entries.
        """
        gate = Gate()

        def run() -> None:
            gate.error = self._attempt(self.sync_now) or self._attempt(task)
            if gate.error is not None and not isinstance(gate.error, NoSpaceError):
                self._go_offline(gate.error)

        self._submit_task(run)
        return gate

    def sync_due(self) -> None:
        """Sync written decisions, if the mode is once a second."""
        if self._sync_mode == SYNC_EACH_SECOND:
            self._submit_task(self.sync_now)

    def checkpoint(self, slots: Sequence[Slot]) -> None:
        """Write a checkpoint, given the slots of all unfinished transactions."""
        self._submit_task(partial(self._checkpoint, slots))

    def note_deletion(
        self, topic: str, on_done: Callable[[StorageError | None], None]
    ) -> None:
        """Make replay skip earlier commits for a topic.

        Args:
            topic: until its data is deleted, no commit with puts to it is submitted.
            on_done: called on the loop's thread with None when the note is on disk, or
                with the error.
        """

        def note() -> None:
            ends = {n: file.end for n, file in self._files.items() if file.end}
            if not ends:
                return
            # Removed files can bring nothing back.
            self._deletions = {
                each: {number: end for number, end in old.items() if number in ends}
                for each, old in self._deletions.items()
            }
            self._deletions[topic] = ends
            DELETIONS.write(self._fs, self.directory, self._deletions)

        self.call(note, on_done)

    def call(self, task: Task, on_done: Callable[[StorageError | None], None]) -> None:
        """Run a task on the journal's thread, between two groups.

        Args:
            task: may raise StorageError, which does not take the journal offline.
            on_done: called on the loop's thread with the error, or None.
        """

        def run() -> None:
            error = self._failed or self._attempt(task)
            self._post(partial(on_done, error))

        self._submit_task(run)

    def close(self, finish: Task | None, on_closed: Task) -> None:
        """Sync and close everything after the queued requests, and end the thread.

        Args:
            finish: called on the journal's thread when all files are closed, unless the
                journal is offline; may raise StorageError, which is logged.
            on_closed: posted to the loop.
        """
        self._submit_task(partial(self._close, finish, on_closed))
        self._worker.stop()

    def _submit_task(self, task: Task) -> None:
        """Queue a task after everything submitted before."""
        self.hand_over()
        self._worker.submit(task)

    # -- the journal's thread

    def _run(self, batch: Sequence[JournalRequest]) -> bool:
        """Carry out all queued requests, which `txBytesMax` bounds."""
        entries: list[JournalEntry] = []
        finished: list[Slot] = []
        for request in batch:
            if callable(request):
                self._carry_out(entries, finished)
                entries, finished = [], []
                self._guarded(request)
                continue
            for each in request:
                if isinstance(each, Slot):
                    # Not a barrier, which would cost a sync between two entries.
                    finished.append(each)
                else:
                    entries.append(each)
        self._carry_out(entries, finished)
        return False

    def _carry_out(
        self, entries: Sequence[JournalEntry], finished: Sequence[Slot]
    ) -> None:
        # First, so that the figures below do not count removed files.
        for slot in finished:
            if self._failed is None:
                self._guarded(partial(self._let_go, slot))
        if entries:
            self._write(entries)

    def _write(self, entries: Sequence[JournalEntry]) -> None:
        """Write a group, and report it to the loop."""
        done: list[_Outcome] = []
        if self._failed is None:
            self._guarded(partial(self._write_groups, entries, done))
        if self._failed is not None:
            known = {id(entry) for entry, _ in done}
            done += [(each, self._failed) for each in entries if id(each) not in known]
        figures, outcomes = self._figures(), iter(done)

        def report() -> None:
            self.figures = figures
            try:
                for entry, outcome in outcomes:
                    if isinstance(outcome, int):
                        entry.ticket.on_journalled(outcome)
                    else:
                        entry.ticket.on_refused(outcome)
            except Exception:
                # After a bug in one callback the others still need their outcome.
                self._call_soon(report)
                raise

        self._post(report)

    def _write_groups(
        self, entries: Sequence[JournalEntry], done: list[_Outcome]
    ) -> None:
        groups: dict[int, list[JournalEntry]] = {}
        for entry in entries:
            error = entry.slot.error
            if error is None and entry.gate is not None:
                error = entry.gate.error
            if error is not None:
                done.append((entry, error))
                continue
            file = entry.slot.file or self._take_file(entry.slot)
            groups.setdefault(file.number, []).append(entry)
        for number, group in groups.items():
            self._write_group(self._files[number], group, done)

    def _take_file(self, slot: Slot) -> RedoFile:
        """Assign a file to a transaction."""
        file = self._current
        assert file is not None, "the journal is open"
        if file.end >= self._file_bytes_max:
            file = self._begin_file(file)
        slot.file, slot.position = file, -1
        file.references += 1
        return file

    def _write_group(
        self, file: RedoFile, group: Sequence[JournalEntry], done: list[_Outcome]
    ) -> None:
        try:
            data = join_chunks([chunk for entry in group for chunk in entry.chunks])
            file.write(data)
        except NoSpaceError as error:
            if any(entry.gate is not None for entry in group):
                # The gate's task is done, and a start would make these entries.
                raise
            file.cut_back()
            for entry in group:
                if not entry.is_decision:
                    entry.slot.error = error
                done.append((entry, error))
            return
        has_decision = any(entry.is_decision for entry in group)
        is_synced = any(entry.is_ahead for entry in group) or (
            has_decision and self._sync_mode == SYNC_AT_DECISION
        )
        if is_synced:
            self._sync(file)
        elif has_decision:
            file.is_dirty = True
        sizes = (sum(map(len, entry.chunks)) for entry in group)
        *starts, _end = accumulate(sizes, initial=0)
        placed = list(zip(group, starts, strict=True))
        commits = [(entry, start) for entry, start in placed if entry.bounds]
        position = file.end
        blocks = file.note_written(
            data,
            [(start, entry.bounds) for entry, start in commits],
            is_synced=is_synced,
        )
        for (entry, _start), block in zip(commits, blocks, strict=True):
            entry.slot.block = block
        for entry, start in placed:
            if entry.slot.position < 0:
                entry.slot.position = position + start
            done.append((entry, position + start))
        for entry in group:
            if entry.is_last:
                self._let_go(entry.slot)

    def _let_go(self, slot: Slot) -> None:
        """End a reference, and remove a large file without one."""
        file, slot.file = slot.file, None
        if file is None:
            return
        file.references -= 1
        if file.references > 0 or file.end < self._idle_bytes_max:
            return
        if file is self._current:
            self._begin_file(file)
        else:
            self._remove(file)

    def _remove(self, file: RedoFile) -> None:
        """Remove a file without references."""
        del self._files[file.number]
        file.close()
        remove_files(self._fs, self.directory, [file.number])

    def sync_now(self) -> None:
        """Sync written decisions that are not synced; on the journal's thread.

        Raises:
            StorageError: the journal is offline.
        """
        if self._failed is not None:
            raise self._failed
        try:
            self._sync_files(file for file in self._files.values() if file.is_dirty)
        except StorageError as error:
            self._go_offline(error)
            raise

    def _sync_files(self, files: Iterable[RedoFile]) -> None:
        for file in files:
            self._sync(file)
            file.note_synced()

    def _sync(self, file: RedoFile) -> None:
        started_s = self._clock.monotonic_s()
        file.sync()
        took_s = self._clock.monotonic_s() - started_s
        self.sync_latency.record(took_s)
        warn_of_slow_sync(file.path, took_s, self._slow_sync_ms)
        self._sync_count += 1

    def _checkpoint(self, slots: Sequence[Slot]) -> None:
        starts = [
            JournalPosition(slot.file.number, slot.position)
            for slot in slots
            if slot.file is not None and slot.position >= 0
        ]
        if self._failed is not None or not starts:
            return
        try:
            write_checkpoint(
                self._fs, self.directory, min(starts), kept_max=self._checkpoints_max
            )
        except NoSpaceError as error:
            _log.warning("checkpoint not written: error=%s", error)

    def _close(self, finish: Task | None, on_closed: Task) -> None:
        if self._failed is None:
            self._guarded(partial(self._sync_files, self._files.values()))
        self._attempt(self.close_files)
        if finish is not None and self._failed is None:
            error = self._attempt(finish)
            if error is not None:
                _log.warning("last step of closing the journal failed: error=%s", error)
        self._attempt(self._unlock)
        self._post(on_closed)

    def close_files(self) -> None:
        """Close all files; on the journal's thread, or before it has started."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _guarded(self, task: Task) -> None:
        """Run a task; a failure takes the journal offline."""
        error = self._attempt(task)
        if error is not None:
            self._go_offline(error)

    def _attempt(self, task: Task) -> StorageError | None:
        """Run a task; return its error, or None.

        An error other than a StorageError takes the journal offline: if it ended the
        thread, requests that wait for it would never be answered.
        """
        try:
            task()
        except StorageError as error:
            return error
        except Exception as error:  # noqa: BLE001  # logged, and the end of it
            _log.exception("journal failed: directory=%s", self.directory)
            bug = StorageError(f"bug in the journal's thread: {error!r}")
            self._go_offline(bug)
            return bug
        return None

    def _go_offline(self, error: StorageError) -> None:
        if self._failed is not None:
            return
        self._failed = error

        def report() -> None:
            self.offline_cause = error
            text = "journal offline until restart: directory=%s cause=%s"
            _log.error(text, self.directory, error)

        self._post(report)

    # -- files

    def _begin_file(self, file: RedoFile) -> RedoFile:
        """Return the new current file; `file` itself if there is no space now.

        `file` is removed if it has no references.
        """
        try:
            begun = self._make_file(file.number + 1)
        except StorageError as error:
            if not _is_passing(error):
                raise
            if self._crowded_number != file.number:
                self._crowded_number = file.number
                text = "journal goes on in a full file: file=%s error=%s"
                _log.warning(text, file.path, error)
            return file
        self._current = begun
        if not file.references:
            self._remove(file)
        return begun

    def _make_file(self, number: int) -> RedoFile:
        file = create_redo_file(self._fs, self.directory, number)
        self._files[number] = file
        if self._is_complete:
            file.note_beside()
        return file

    def _figures(self) -> JournalFigures:
        return JournalFigures(
            sum(file.end for file in self._files.values()), self._sync_count
        )


def _is_passing(error: StorageError) -> bool:
    """Return whether a file was not made for lack of space or descriptors."""
    return isinstance(error, NoSpaceError) or (
        isinstance(error, DiskError) and error.lacks_descriptors
    )


def join_chunks(chunks: Sequence[Buffer]) -> Buffer:
    """Return all chunks in one piece.

    Raises:
        NoSpaceError: there is not enough memory now.
    """
    try:
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)
    except MemoryError as error:
        size_bytes = sum(map(len, chunks))
        raise NoSpaceError(f"no memory for {size_bytes} bytes") from error
