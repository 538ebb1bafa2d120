"""The transaction journal: one thread that writes and syncs redo files, in groups.

Theory of operation. Entries come from the loop in the order of events. Those of one
turn of the loop go to the journal's thread together; if the first one woke it, that
one would be synced alone. The thread takes everything queued at once:

    per redo file: write, sync if a decision asks for it  →  sums  →  report to the loop

* As at a Java broker, all entries of one transaction are in one file. The first one
  goes to the current file and counts as a reference to it; the others follow it there.
  A file of full size takes no new transactions. A large one is removed when it has no
  reference. `release` gives a reference back: with a rollback, or when the batches of a
  commit are in their partitions. It has time until the next entry.
* A *decision* (prepare, commit, rollback) is synced before it is reported where
  `flushTxLogAtCommit` is 1. With 2 `sync_due` syncs once a second, with 0 nothing does.
  Puts are written before they are reported, and synced with the next decision.
* What must be on disk *before* the partitions get it is synced in every mode.
* Disk full: the file is cut back to what it had, the entries of that group fail, and so
  do later ones of those transactions: a commit must not lack a put. Without space for
  the next file, or without a descriptor, the current one goes on.
* Any other failure takes the journal offline, once: everything fails from then on, and
  nothing is believed before a restart has read the disk again. Which decisions of the
  group are on disk is unknown.
* The offsets in a commit record are rewritten (`redo_file.py`) on the thread that is
  about to write the batch: a Java broker looks for the batch at exactly these offsets,
  and at each moment it finds it there or finds nothing.
* `sums.N` beside each file (`sums.py`) is written after its bytes. A failure there
  costs the checksums of later bytes of that file, and nothing else.

Invariant: an entry is reported once, as written or as failed.
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
"""A redo file of this size goes as soon as nothing in it is needed: a start has as much
less to read."""

QUESTION_INTERVAL_S: Final = 30.0
"""From an answer of the thread to the next question whether its disk hangs."""

SYNC_NEVER, SYNC_AT_DECISION, SYNC_EACH_SECOND = 0, 1, 2

_log = logging.getLogger(__name__)


class JournalTicket(Protocol):
    """Receives the outcome of an entry, once, on the loop's thread."""

    def on_journalled(self, position: int) -> None:
        """It is written from this byte of its file on, and synced if that was due."""

    def on_refused(self, error: StorageError) -> None:
        """It is not in the journal; or, where that is offline, perhaps."""


@dataclass(slots=True, eq=False)
class Slot:
    """Redo file of one transaction's entries. Owner: the journal's thread."""

    block: OffsetBlock | None = None
    """Has the offsets of the commit record, once it is written."""
    file: RedoFile | None = None
    """None before the first entry, and after the last one."""
    position: int = 0
    """Position of the first entry."""
    error: StorageError | None = None
    """Why an entry is missing; no other one may follow."""


@dataclass(slots=True, eq=False)
class Gate:
    """A task that is done before some entries. Owner: the journal's thread."""

    error: StorageError | None = None
    """Why it was not done; then no entry that waits for it is written."""


class JournalEntry(NamedTuple):
    """A record, or a run of them, on its way to the journal's thread."""

    slot: Slot
    chunks: Sequence[bytes]
    """Whole records, in any split."""
    ticket: JournalTicket
    is_decision: bool = False
    """To be synced, by the mode."""
    is_last: bool = False
    """Nothing of this transaction is needed any more."""
    is_ahead: bool = False
    """To be synced in every mode: partitions may get it only after that."""
    bounds: Bounds = ()
    """Byte of the chunks and value of each offset that `note_offset` may change."""
    gate: Gate | None = None
    """A task to be done first, which promises this entry."""


_Outcome: TypeAlias = tuple[JournalEntry, int | StorageError]
"""An entry, and the position where it was written, or why it was not."""

JournalRequest: TypeAlias = Sequence[JournalEntry | Slot] | Task
"""Entries, and slots of finished transactions; or a task between two groups."""

StartJournalWorker: TypeAlias = Callable[
    [str, RunRequests[JournalRequest]], Worker[JournalRequest]
]
"""Makes the thread of the journal; tests pass a deterministic one."""


@dataclass(frozen=True, slots=True)
class JournalFigures:
    """Counts of the journal; a snapshot."""

    size_bytes: int = 0
    sync_count: int = 0


class Journal:
    """The journal of one broker. Methods without a note are for the loop's thread."""

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
        """Describe a journal; `JournalOpening` opens it, and `start` begins to write.

        Args:
            fs: the disk.
            clock: measures syncs.
            post: runs a callback on the loop's thread; from the thread of the journal.
            call_soon: the same, from the loop's thread, at the end of this turn.
            directory: `<dataLogPath>/transactions`.
            sync_mode: 0, 1 or 2, as flushTxLogAtCommit.
            checkpoints_max: checkpoint files that are kept.
            file_bytes_max: a file of this size takes no new transactions.
            slow_sync_ms: a longer sync is logged.
            start_worker: makes the thread.
        """
        self.directory: Final = directory
        self.offline_cause: StorageError | None = None
        self.figures = JournalFigures()
        self.sync_latency = Histogram()
        """Seconds that one sync took; recorded on the journal's thread."""
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
        """All side files are in the directory."""
        self._crowded_number = 0
        """Of the last full file that had to go on."""
        self._failed: StorageError | None = None
        self._deletions: Deletions = {}
        self._sync_count = 0
        self._lock: DirLock | None = None
        self._waiting: list[JournalEntry | Slot] = []
        self._is_due = False
        self._worker = start_worker("journal", self._run)

    # -- opening: any thread, before `start`

    def lock(self) -> None:
        """Become the only owner of the directory; until `abandon`, or closed. Blocks.

        Raises:
            LogDirLockedError: another broker writes a journal there.
            StorageError: the disk refuses.
        """
        self._lock = self._fs.lock_directory(self.directory)

    def abandon(self) -> None:
        """Close all files and release the directory without having used it."""
        self.close_files()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def open(
        self, number: int, survivors: Iterable[tuple[Slot, bytes, Bounds]]
    ) -> None:
        """Make a first file with the records of unfinished transactions. Blocks.

        Args:
            number: of the file, above all that existed.
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
        """Forget a transaction whose commit is carried out."""
        self._waiting.append(slot)

    def hand_over(self) -> None:
        """Give the thread what waits."""
        self._is_due = False
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._worker.submit(waiting)

    def tick(self) -> None:
        """Hand over what waits, and check that the thread answers; now and then."""
        self.hand_over()

        def answered(_error: StorageError | None) -> None:
            self.watch.on_answer(self._clock.monotonic_s())

        ask = partial(self.call, lambda: None, answered)
        self.watch.tick(self._clock.monotonic_s(), QUESTION_INTERVAL_S, ask)

    def note_offset(self, slot: Slot, position: int, offset: Offset) -> Sequence[Task]:
        """Note the offset of a batch; on the thread that writes the batch next.

        Args:
            slot: of its transaction, whose commit record is written.
            position: byte of the redo file where the offset is.
            offset: of the batch.

        Returns:
            What writes it, and all that was noted for records near it; raises nothing.
        """
        if slot.block is None:
            return ()
        slot.block.note(position, offset)
        return (slot.block.write,)

    def do_ahead(self, task: Task) -> Gate:
        """Have a task done before some entries, on the journal's thread.

        Written decisions are synced first. Where the task finds no space, the entries
        that wait for it are refused; any other failure takes the journal offline.

        Args:
            task: changes nothing where it raises NoSpaceError.

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
        """Sync written decisions: mode 2, once a second."""
        if self._sync_mode == SYNC_EACH_SECOND:
            self._submit_task(self.sync_now)

    def checkpoint(self, slots: Sequence[Slot]) -> None:
        """Write where replay begins, given the slots of all unfinished transactions."""
        self._submit_task(partial(self._checkpoint, slots))

    def note_deletion(
        self, topic: str, on_done: Callable[[StorageError | None], None]
    ) -> None:
        """Make replay skip what was committed for a topic until now.

        Args:
            topic: no commit with puts to it is submitted until its data is gone.
            on_done: called on the loop's thread when that is on disk.
        """

        def note() -> None:
            ends = {n: file.end for n, file in self._files.items() if file.end}
            if not ends:
                return
            # Nothing comes back from files that are gone.
            self._deletions = {
                each: {number: end for number, end in old.items() if number in ends}
                for each, old in self._deletions.items()
            }
            self._deletions[topic] = ends
            DELETIONS.write(self._fs, self.directory, self._deletions)

        self.call(note, on_done)

    def call(self, task: Task, on_done: Callable[[StorageError | None], None]) -> None:
        """Have a task done on the journal's thread, between two groups.

        Args:
            task: may raise StorageError, which does not take the journal offline.
            on_done: called on the loop's thread.
        """

        def run() -> None:
            error = self._failed or self._attempt(task)
            self._post(partial(on_done, error))

        self._submit_task(run)

    def close(self, finish: Task | None, on_closed: Task) -> None:
        """Sync and close everything after what is queued; then end the thread.

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
        """Carry out all that is queued, which `txBytesMax` bounds; nothing is left."""
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
                    # No barrier: one between two entries would cost a sync.
                    finished.append(each)
                else:
                    entries.append(each)
        self._carry_out(entries, finished)
        return False

    def _carry_out(
        self, entries: Sequence[JournalEntry], finished: Sequence[Slot]
    ) -> None:
        # First: a file that goes here must not be counted in the figures below.
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
                # A bug in one callback: the others still need their outcome.
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
        """Give a transaction its file."""
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
                # The gate's task has promised these entries: a start makes them.
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
        """Take back a reference, and remove a large file without one."""
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
        """Remove a file in which nothing is needed."""
        del self._files[file.number]
        file.close()
        remove_files(self._fs, self.directory, [file.number])

    def sync_now(self) -> None:
        """Sync written decisions that are not on disk; on the journal's thread.

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
        """Close all files; for the journal's thread, or before it has started."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _guarded(self, task: Task) -> None:
        """Do a task; a failure takes the journal offline."""
        error = self._attempt(task)
        if error is not None:
            self._go_offline(error)

    def _attempt(self, task: Task) -> StorageError | None:
        """Do a task; return why it was not done.

        An error that the disk does not explain takes the journal offline: a thread that
        ended would leave everything that waits for it without an answer.
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
        """Return the new current file; `file` itself where there is no space now.

        `file` is removed if nothing in it is needed.
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
    """Return whether making a file failed for want of space or descriptors."""
    return isinstance(error, NoSpaceError) or (
        isinstance(error, DiskError) and error.lacks_descriptors
    )


def join_chunks(chunks: Sequence[Buffer]) -> Buffer:
    """Return chunks in one piece.

    Raises:
        NoSpaceError: there is no memory for it now.
    """
    try:
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)
    except MemoryError as error:
        size_bytes = sum(map(len, chunks))
        raise NoSpaceError(f"no memory for {size_bytes} bytes") from error
