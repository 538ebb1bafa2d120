"""The transaction journal: one thread that writes and syncs redo files, in groups.

Theory of operation. Entries come from the loop in the order things happened. Those of
one turn of the loop go to the thread of the journal together: woken by the first one,
it would sync that alone. It takes everything queued at once:

    per redo file: write, sync if a verdict asks for it  →  sums  →  tell the loop

* Like a Java broker, all entries of one transaction lie in one file. The first one goes
  to the current file and counts as a reference to it, and the others follow it there. A
  file that has reached its size takes no new transactions. A large one is removed when
  nothing refers to it. `release` gives a reference back: with a rollback, or when the
  batches of a commit are in their partitions. That has time until the next entry.
* A *verdict* (prepare, commit, rollback) is synced before the loop is told where
  `flushTxLogAtCommit` is 1. With 2 `sync_due` does it once a second, with 0 nothing.
  Puts are written before the loop is told, and synced by the verdict behind them.
* What must lie on the disk *ahead* of the partitions is synced in every mode.
* No room: the file is cut back to what it had, the entries of that group fail, and so
  does what comes later of those transactions: a commit must not lack a put. Where there
  is none for the next file, nor a descriptor, the present one goes on.
* Any other failure takes the journal offline, once: everything fails from then on, and
  nothing is believed before a restart has read the disk again. Which verdicts of the
  group are on the disk, is unknown.
* The offsets in a commit record are rewritten in place (`redo_file.py`), on whichever
  thread is about to write the batch: so at each moment a Java broker, which takes them
  for places, finds each batch there or does not find it at all.
* `sums.N` beside each file (`sums.py`) is written behind its bytes. A failure there
  costs the checksums of what follows in that file, and nothing else.

Invariant: an entry is told once, as written or as failed. Source: broker spec 5.6.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Final, NamedTuple, Protocol, TypeAlias

from metaq.clock import Clock
from metaq.errors import DiskError, NoSpaceError, StorageError
from metaq.fs import Buffer, DirLock, FileSystem
from metaq.fs.group_thread import GroupThread, SilenceWatch, Worker, tell_slow_sync
from metaq.model import Offset
from metaq.stats import Histogram
from metaq.txn.redo_file import (
    Bounds,
    PlaceBlock,
    RedoFile,
    create_redo_file,
    remove_files,
)
from metaq.txn.side_files import (
    Deletions,
    JournalPosition,
    write_checkpoint,
    write_deletions,
)

IDLE_BYTES_MAX: Final = 1 << 20
"""A redo file of this size goes as soon as nothing in it is needed: a start has as much
less to read."""

QUESTION_INTERVAL_S: Final = 30.0
"""From an answer of the thread to the next question whether its disk hangs."""

SYNC_NEVER, SYNC_AT_VERDICT, SYNC_EACH_SECOND = 0, 1, 2
"""Values of flushTxLogAtCommit."""

Task: TypeAlias = Callable[[], None]
Post: TypeAlias = Callable[[Callable[[], None]], object]
"""Runs a callback on the loop's thread, in the order of the calls."""

log = logging.getLogger(__name__)


class JournalTicket(Protocol):
    """Receives the outcome of an entry, once, on the loop's thread."""

    def on_journalled(self, position: int) -> None:
        """It is written from this byte of its file on, and synced if that was due."""
        ...

    def on_refused(self, error: StorageError) -> None:
        """It is not in the journal; or, where that is offline, perhaps."""
        ...


class Slot:
    """Redo file of one transaction's entries. Owner: the journal's thread."""

    __slots__ = ("block", "error", "file", "position")

    def __init__(self) -> None:
        self.block: PlaceBlock | None = None
        """Holds the offsets of the commit record, once it is written."""
        self.file: RedoFile | None = None
        """None before the first entry, and behind the last one."""
        self.position = 0
        """Position of the first entry."""
        self.error: StorageError | None = None
        """Why an entry is missing; no other one may follow."""


class Gate:
    """Something that is done ahead of some entries. Owner: the journal's thread."""

    __slots__ = ("error",)

    def __init__(self) -> None:
        self.error: StorageError | None = None
        """Why it was not done; no entry behind it is written then."""


class JournalEntry(NamedTuple):
    """A record, or a run of them, on its way to the journal's thread."""

    slot: Slot
    """Slot of the transaction."""
    chunks: Sequence[bytes]
    """Whole records, in any split."""
    size_bytes: int
    """Length of all chunks."""
    is_verdict: bool
    """To be synced, by the mode."""
    is_last: bool
    """Nothing of this transaction is needed any more."""
    ticket: JournalTicket
    """Receives the outcome."""
    is_ahead: bool = False
    """To be synced in every mode: partitions may only get it behind that."""
    bounds: Bounds = ()
    """Byte of the chunks and value of each offset that `note_place` may change."""
    gate: Gate | None = None
    """To be written behind this, which promises it."""


class Release(NamedTuple):
    """Word that a transaction is finished; see `Journal.release`."""

    slot: Slot
    """Slot of the transaction."""


_Outcome: TypeAlias = tuple[JournalEntry, int | StorageError]
"""An entry, and the position where it was written, or why it was not."""

Request: TypeAlias = Sequence[JournalEntry | Release] | Task

RunRequests: TypeAlias = Callable[[Sequence[Request]], bool]
StartWorker: TypeAlias = Callable[[str, RunRequests], Worker[Request]]
"""Makes the thread of the journal; tests put a deterministic one here."""


@dataclass(frozen=True, slots=True)
class JournalFigures:
    """Counts of the journal; a snapshot."""

    size_bytes: int = 0
    """Bytes of all redo files."""
    file_count: int = 0
    """Redo files."""
    sync_count: int = 0
    """Syncs since the start."""


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
        start_worker: StartWorker = GroupThread[Request],
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
            slow_sync_ms: a sync that takes longer is told.
            start_worker: makes the thread.
        """
        self.directory: Final = directory
        """Its directory."""
        self.offline_cause: StorageError | None = None
        """The error that took it offline."""
        self.figures = JournalFigures()
        """Figures that the thread told last."""
        self.sync_latency = Histogram()
        """Seconds that one sync took; recorded on the journal's thread."""
        self._fs = fs
        self._clock = clock
        self._post = post
        self._call_soon = call_soon
        self._sync_mode = sync_mode
        self._checkpoints_max = checkpoints_max
        self._file_bytes_max = file_bytes_max
        self._slow_sync_ms = slow_sync_ms
        self._watch = SilenceWatch("journal", directory)
        self._idle_bytes_max = min(file_bytes_max, IDLE_BYTES_MAX)
        self._files: dict[int, RedoFile] = {}
        self._current: RedoFile | None = None
        self._is_complete = False
        """All side files are in the directory."""
        self._crowded_number = 0
        """Of the last file that had to go on for want of room for the next."""
        self._failed: StorageError | None = None
        self._deletions: Deletions = {}
        self._sync_count = 0
        self._lock: DirLock | None = None
        self._waiting: list[JournalEntry | Release] = []
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
        """Close what is open and give the directory up: it is not to be used."""
        self.close_files()
        self._unlock()

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def open(
        self,
        number: int,
        survivors: Iterable[tuple[Slot, bytes, Bounds]],
    ) -> None:
        """Make a first file that holds the records of what is not finished. Blocks.

        Args:
            number: of the file, above all that were there.
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
        self._waiting.append(Release(slot))

    def hand_over(self) -> None:
        """Give the thread what waits: what nothing else gives it in its time."""
        self._is_due = False
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._worker.submit(waiting)

    def tick(self) -> None:
        """Hand over what waits, and look whether the thread answers; now and then."""
        self.hand_over()

        def answered(_error: StorageError | None) -> None:
            self._watch.on_answer(self._clock.monotonic_s())

        ask = partial(self.call, lambda: None, answered)
        self._watch.tick(self._clock.monotonic_s(), QUESTION_INTERVAL_S, ask)

    @property
    def is_silent(self) -> bool:
        """Tell whether its disk hangs: the thread has not answered for long."""
        return self._watch.is_silent

    def note_place(self, slot: Slot, position: int, offset: Offset) -> Sequence[Task]:
        """Take note of where a batch lies; on the thread that writes it next.

        Args:
            slot: of its transaction, its commit record written.
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
        """Have a task done ahead of entries, on the journal's thread.

        What has verdicts is synced before. Where the task finds no room, the entries
        behind it are refused; any other failure takes the journal offline.

        Args:
            task: leaves what was there where it raises NoSpaceError.

        Returns:
            What these entries are given.
        """
        gate = Gate()

        def run() -> None:
            try:
                self.sync_now()
                task()
            except StorageError as error:
                gate.error = error
                if not isinstance(error, NoSpaceError):
                    self._go_offline(error)

        self._submit_task(run)
        return gate

    def sync_due(self) -> None:
        """Sync what has verdicts that are not on the disk: mode 2, once a second."""
        if self._sync_mode == SYNC_EACH_SECOND:
            self._submit_task(self._sync_each_second)

    def checkpoint(self, slots: Sequence[Slot]) -> None:
        """Write where replay begins.

        Args:
            slots: of all transactions that are not finished.
        """
        self._submit_task(partial(self._checkpoint, slots))

    def note_deletion(
        self, topic: str, on_done: Callable[[StorageError | None], None]
    ) -> None:
        """Have replay leave out what was committed for a topic so far.

        Args:
            topic: no commit with puts to it is submitted until its data is gone.
            on_done: told on the loop's thread, when that is on the disk.
        """

        def note() -> None:
            ends = {n: file.end for n, file in self._files.items() if file.end}
            if not ends:
                return
            # Of files that are gone nothing comes back.
            self._deletions = {
                each: {number: end for number, end in old.items() if number in ends}
                for each, old in self._deletions.items()
            }
            self._deletions[topic] = ends
            write_deletions(self._fs, self.directory, self._deletions)

        self.call(note, on_done)

    def call(self, task: Task, on_done: Callable[[StorageError | None], None]) -> None:
        """Have a task done on the journal's thread, between two groups.

        Args:
            task: may raise StorageError, which does not take the journal offline.
            on_done: told on the loop's thread.
        """

        def run() -> None:
            error = self._failed or self._attempt(task)
            self._post(partial(on_done, error))

        self._submit_task(run)

    def close(self, finish: Task | None, on_closed: Task) -> None:
        """Sync and close everything, behind what is queued; then end the thread.

        Args:
            finish: called on the journal's thread when all files are closed, unless the
                journal is offline; may raise StorageError, which is logged.
            on_closed: posted to the loop.
        """
        self._submit_task(partial(self._close, finish, on_closed))
        self._worker.stop()

    def _submit_task(self, task: Task) -> None:
        """Queue a task behind all that came before it."""
        self.hand_over()
        self._worker.submit(task)

    # -- the journal's thread

    def _run(self, batch: Sequence[Request]) -> bool:
        """Carry out all that is queued, which `txBytesMax` bounds; nothing is left."""
        entries: list[JournalEntry] = []
        releases: list[Release] = []
        for request in batch:
            if callable(request):
                self._carry_out(entries, releases)
                entries, releases = [], []
                self._guarded(request)
                continue
            for each in request:
                if isinstance(each, JournalEntry):
                    entries.append(each)
                else:
                    # No barrier: one between two entries would cost a sync.
                    releases.append(each)
        self._carry_out(entries, releases)
        return False

    def _carry_out(
        self, entries: Sequence[JournalEntry], releases: Sequence[Release]
    ) -> None:
        # What is let go may be the current file, and is no longer in the figures then.
        self._release_all(releases)
        self._write(entries)

    def _write(self, entries: Sequence[JournalEntry]) -> None:
        """Write a group, and tell the loop."""
        if not entries:
            return
        told: list[_Outcome] = []
        if self._failed is None:
            self._guarded(partial(self._write_groups, entries, told))
        if self._failed is not None:
            done = {id(entry) for entry, _ in told}
            told += [(each, self._failed) for each in entries if id(each) not in done]
        figures, outcomes = self._figures(), iter(told)

        def tell() -> None:
            self.figures = figures
            try:
                for entry, outcome in outcomes:
                    if isinstance(outcome, int):
                        entry.ticket.on_journalled(outcome)
                    else:
                        entry.ticket.on_refused(outcome)
            except Exception:
                # A bug of one: the others are still to be told.
                self._call_soon(tell)
                raise

        self._post(tell)

    def _write_groups(
        self, entries: Sequence[JournalEntry], told: list[_Outcome]
    ) -> None:
        groups: dict[int, list[JournalEntry]] = {}
        for entry in entries:
            error = entry.slot.error
            if error is None and entry.gate is not None:
                error = entry.gate.error
            if error is not None:
                told.append((entry, error))
                continue
            file = entry.slot.file or self._take_file(entry.slot)
            groups.setdefault(file.number, []).append(entry)
        for number, group in groups.items():
            self._write_group(self._files[number], group, told)

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
        self,
        file: RedoFile,
        group: Sequence[JournalEntry],
        told: list[_Outcome],
    ) -> None:
        try:
            data = join_chunks([chunk for entry in group for chunk in entry.chunks])
            file.write(data)
        except NoSpaceError as error:
            if any(entry.gate is not None for entry in group):
                # What was done ahead says that they are there: a start makes it true.
                raise
            file.cut_back()
            for entry in group:
                if not entry.is_verdict:
                    entry.slot.error = error
                told.append((entry, error))
            return
        has_verdict = any(entry.is_verdict for entry in group)
        is_synced = any(entry.is_ahead for entry in group) or (
            has_verdict and self._sync_mode == SYNC_AT_VERDICT
        )
        if is_synced:
            self._sync(file)
        elif has_verdict:
            file.is_dirty = True
        *starts, end = accumulate((entry.size_bytes for entry in group), initial=0)
        assert end == len(data), (end, len(data))
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
            told.append((entry, position + start))
        for entry in group:
            if entry.is_last:
                self._let_go(entry.slot)

    def _release_all(self, releases: Sequence[Release]) -> None:
        """Let go of finished transactions."""
        for release in releases:
            if self._failed is None:
                self._guarded(partial(self._let_go, release.slot))

    def _let_go(self, slot: Slot) -> None:
        """Take back a reference, and remove a large file that is done with."""
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

    def _sync_each_second(self) -> None:
        with suppress(StorageError):
            self.sync_now()

    def sync_now(self) -> None:
        """Sync what has verdicts that are not on the disk; on the journal's thread.

        Raises:
            StorageError: the journal is offline.
        """
        if self._failed is not None:
            raise self._failed
        try:
            for file in self._files.values():
                if file.is_dirty:
                    self._sync(file)
                    file.note_synced()
        except StorageError as error:
            self._go_offline(error)
            raise

    def _sync(self, file: RedoFile) -> None:
        started_s = self._clock.monotonic_s()
        file.sync()
        took_s = self._clock.monotonic_s() - started_s
        self.sync_latency.record(took_s)
        tell_slow_sync(file.path, took_s, self._slow_sync_ms)
        self._sync_count += 1

    def _checkpoint(self, slots: Sequence[Slot]) -> None:
        places = [
            JournalPosition(slot.file.number, slot.position)
            for slot in slots
            if slot.file is not None and slot.position >= 0
        ]
        if self._failed is not None or not places:
            return
        try:
            write_checkpoint(
                self._fs, self.directory, min(places), kept_max=self._checkpoints_max
            )
        except NoSpaceError as error:
            log.warning("checkpoint not written: error=%s", error)

    def _close(self, finish: Task | None, on_closed: Task) -> None:
        if self._failed is None:
            self._guarded(self._sync_all)
        self._attempt(self.close_files)
        if finish is not None and self._failed is None:
            error = self._attempt(finish)
            if error is not None:
                log.warning("last step of closing the journal failed: error=%s", error)
        self._attempt(self._unlock)
        self._post(on_closed)

    def _sync_all(self) -> None:
        for file in self._files.values():
            self._sync(file)
            file.note_synced()

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

        What the disk does not explain takes the journal offline: a thread that ended
        would leave all that waits for it without an answer.
        """
        try:
            task()
        except StorageError as error:
            return error
        except Exception as error:
            log.exception("journal failed: directory=%s", self.directory)
            bug = StorageError(f"bug in the journal's thread: {error!r}")
            self._go_offline(bug)
            return bug
        return None

    def _go_offline(self, error: StorageError) -> None:
        if self._failed is not None:
            return
        self._failed = error

        def tell() -> None:
            self.offline_cause = error
            log.error(
                "journal offline until restart: directory=%s cause=%s",
                self.directory,
                error,
            )

        self._post(tell)

    # -- files

    def _begin_file(self, file: RedoFile) -> RedoFile:
        """Return the new current file; the present one where there is no room now.

        That one goes if nothing in it is needed.
        """
        try:
            begun = self._make_file(file.number + 1)
        except StorageError as error:
            if not _is_passing(error):
                raise
            if self._crowded_number != file.number:
                self._crowded_number = file.number
                path = self.directory / f"redo.{file.number}"
                log.warning(
                    "journal goes on in a full file: file=%s error=%s", path, error
                )
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
            sum(file.end for file in self._files.values()),
            len(self._files),
            self._sync_count,
        )


def _is_passing(error: StorageError) -> bool:
    """Tell whether a file could not be made for want of what may be there again."""
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
