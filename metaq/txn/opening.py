"""Opening of a journal: read all, find what is applied, and write the rest.

    redo.3  redo.4      →  replay, look into the partitions  →  redo.5
    sums.3  sums.4                                              sums.5

The rest are prepared transactions, and commits with batches that are not in their
partitions. They are written to a new file with a higher number and synced; then the old
files are removed. Nothing is appended to partitions before that: after an interrupted
opening the next one finds everything it needs, some of it twice, which replay detects.
So a crash costs only unprepared transactions, and a start leaves a small journal.

All existing redo files are read: checkpoints are not trusted. A missing file is damage:
from the first start on there is a redo file, and a `beside` entry in `sums.N` says that
the others existed (`sums.py`). A Java broker that has run since may have removed any
redo file.

A clean stop does the same, so that a Java broker finds no commit, which it would check
by an offset, and no unprepared transaction.
Source: docs/metaq-1.4/broker.md 5.7.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Final, NamedTuple

from metaq.errors import ClosedError, MissingFileError, NoSpaceError
from metaq.fs import FileSystem
from metaq.model import MessageId
from metaq.record.ids import id_after
from metaq.txn.journal import Journal, Slot
from metaq.txn.ports import StoredBatches
from metaq.txn.records import (
    RedoOperation,
    bounds_of,
    encode_operation,
    encode_put,
    ending_of,
)
from metaq.txn.recovery import (
    JournalDamagedError,
    Replay,
    ReplayedTransaction,
    cut_appends,
    find_unapplied,
)
from metaq.txn.redo_file import FILE_NAME, remove_files
from metaq.txn.side_files import (
    DELETIONS,
    JAVA_OUTCOMES_FILE,
    NOWHERE,
    OUTCOMES,
    SIDE_FILES,
    TOGETHER,
    KeptOutcome,
    NamedGroup,
    ends_in,
    has_java_outcomes,
    make_missing_files,
    missing_files,
    read_checkpoint,
)
from metaq.txn.state import HeuristicOutcome
from metaq.txn.sums import Sums, decode_sums

NO_ID: Final = MessageId(-1)

_log = logging.getLogger(__name__)


class RestoredTransaction(NamedTuple):
    """An unfinished transaction, and the new position of its records."""

    replayed: ReplayedTransaction
    slot: Slot
    records_end: int
    """End of its last record, which is its commit record if there is one."""


class OpenedJournal(NamedTuple):
    """Content of a journal after opening."""

    transactions: tuple[RestoredTransaction, ...]
    """Prepared, or committed and not applied; oldest first."""
    outcomes: dict[str, KeptOutcome]
    next_id: MessageId
    """Id after the largest of ours in it; negative if there is none."""
    notes: tuple[str, ...]
    together: tuple[tuple[str, ...], ...] = ()
    """Keys of transactions that one command has committed, for each such command."""


class _Found(NamedTuple):
    """Content of a journal as the start found it, and what has to be written."""

    replay: Replay
    prepared: list[ReplayedTransaction]
    unapplied: list[ReplayedTransaction]
    """Commits with batches that are not in their partitions."""
    outcomes: dict[str, KeptOutcome]
    together: Sequence[NamedGroup]
    """Groups of transactions whose commits are one decision."""
    notes: tuple[str, ...]


class JournalOpening:
    """Opening of one journal: read once, and written when there is free space.

    Owner: the app. A lock lets a stop wait for the thread that opens.
    """

    def __init__(self, fs: FileSystem, journal: Journal, reader: StoredBatches) -> None:
        """Create it without reading; the partitions must be recovered before `run`."""
        self._fs = fs
        self._journal = journal
        self._reader = reader
        self._found: _Found | None = None
        self._turn = Lock()
        self._is_over = False

    @property
    def next_id(self) -> MessageId:
        """Return the id after the largest of ours; negative: not read, or none."""
        last_id = NO_ID if self._found is None else self._found.replay.last_id
        return id_after(last_id, 1) if last_id >= 0 else NO_ID

    def run(self) -> OpenedJournal:
        """Read the journal, and write unfinished transactions to a new file. Blocks.

        Raises:
            NoSpaceError: nothing is lost; call it again later.
            JournalDamagedError: synced bytes have changed, or a file is missing;
                nothing was changed here.
            LogDirLockedError: another broker has locked it.
            StorageError: the disk refuses.
            ClosedError: it was abandoned.
        """
        with self._turn:
            if self._is_over:
                raise ClosedError("the journal was abandoned")
            if self._found is None:
                self._found = self._read()
            return self._write(self._found)

    def abandon(self) -> None:
        """Abandon the journal, after a running `run` has ended. Blocks."""
        with self._turn:
            self._is_over = True
            self._journal.abandon()

    def _read(self) -> _Found:
        fs, directory = self._fs, self._journal.directory
        if not fs.is_directory(directory.parent):
            fs.make_directory(directory.parent)
        fs.make_directory(directory)
        self._journal.lock()
        replay = read_journal(fs, directory, journal_numbers(fs, directory))
        outcomes = OUTCOMES.read(fs, directory)
        notes = list(replay.notes)
        if has_java_outcomes(fs, directory):
            notes.append(
                "a Java broker left heuristic outcomes, which are not read here:"
                f" file={directory / JAVA_OUTCOMES_FILE}"
            )
        together = TOGETHER.read(fs, directory)
        prepared = _settle(replay, outcomes, together)
        unapplied = find_unapplied(replay.commits, self._reader, together)
        for log_id, offset in cut_appends(unapplied).items():
            _log.warning(
                "append cut by a crash: partition=%s offset=%d", log_id, offset
            )
            self._reader.hold(log_id, offset)
        for note in notes:
            _log.warning("%s", note)
        return _Found(replay, prepared, unapplied, outcomes, together, tuple(notes))

    def _write(self, found: _Found) -> OpenedJournal:
        fs, journal = self._fs, self._journal
        directory = journal.directory
        journal.close_files()  # those of an earlier try
        numbers = journal_numbers(fs, directory)
        # Above that of a checkpoint, too, because a Java broker begins there.
        number = max([read_checkpoint(fs, directory).number, *numbers]) + 1
        try:
            restored = compact(fs, journal, [*found.prepared, *found.unapplied], number)
            make_missing_files(fs, directory)
        except NoSpaceError:
            journal.close_files()
            if numbers:  # otherwise it is the only redo file, and must stay
                remove_files(fs, directory, [number])
            raise
        journal.note_side_files()
        remove_files(fs, directory, numbers)
        DELETIONS.clear(fs, directory)
        joined = _join(restored, found.together)
        if not joined:
            TOGETHER.clear(fs, directory)
        _log.info(
            "journal opened: directory=%s records=%d commits=%d prepared=%d"
            " unapplied=%d",
            directory,
            found.replay.record_count,
            len(found.replay.commits),
            len(found.prepared),
            len(found.unapplied),
        )
        return OpenedJournal(
            restored, found.outcomes, self.next_id, found.notes, joined
        )


def tidy(fs: FileSystem, journal: Journal, *, has_prepared: bool) -> None:
    """Reduce a closed journal to its prepared transactions. Blocks.

    Args:
        fs: the disk.
        journal: its files are closed; every commit is applied.
        has_prepared: whether there are prepared transactions.

    Raises:
        StorageError: the disk refuses; the existing files have the same meaning.
    """
    directory = journal.directory
    numbers = journal_numbers(fs, directory)
    left = read_journal(fs, directory, numbers).prepared() if has_prepared else []
    compact(fs, journal, left, max(numbers, default=0) + 1)
    journal.close_files()
    remove_files(fs, directory, numbers)
    DELETIONS.clear(fs, directory)
    TOGETHER.clear(fs, directory)


def journal_numbers(fs: FileSystem, directory: Path) -> list[int]:
    """Return the numbers of all redo files and side files, sorted."""
    names = map(FILE_NAME.fullmatch, fs.list_directory(directory))
    return sorted({int(match[2]) for match in names if match})


def read_journal(fs: FileSystem, directory: Path, numbers: Iterable[int]) -> Replay:
    """Replay all redo files of a directory.

    Raises:
        JournalDamagedError: a file is missing, or see `recovery.py`.
        StorageError: the disk refuses.
    """
    replay, deletions = Replay(), DELETIONS.read(fs, directory)
    files = {number: directory / f"redo.{number}" for number in numbers}
    found = {number: path for number, path in files.items() if fs.exists(path)}
    sums = {number: _read_sums(fs, directory, number) for number in files}
    _require_files(fs, directory, found.keys(), sums)
    for number, path in found.items():
        deleted = ends_in(deletions, number)
        replay.read(_read_file(fs, path), sums[number], str(path), deleted=deleted)
    return replay


def _require_files(
    fs: FileSystem, directory: Path, found: Collection[int], sums: Mapping[int, Sums]
) -> None:
    """Raise JournalDamagedError if one of our files was removed.

    Args:
        fs: the disk.
        directory: directory of the journal.
        found: numbers of the existing redo files.
        sums: the checksums of each number.
    """
    for number, of_file in sums.items():
        if not of_file.is_complete:
            continue
        missing = [each.name for each in missing_files(fs, directory)]
        if number not in found and not _has_java_file(fs, directory, found):
            missing.append(f"redo.{number}")
        if missing:
            raise JournalDamagedError(
                f"journal damaged: file={directory / missing[0]} is missing, which"
                f" sums.{number} beside it expects"
            )
    witnesses = [each.name for each in SIDE_FILES if fs.exists(directory / each.name)]
    if read_checkpoint(fs, directory) != NOWHERE:
        witnesses.append("checkpoint")
    if witnesses and not found:
        raise JournalDamagedError(
            f"journal damaged: directory={directory} expected a redo file, as it has"
            f" {', '.join(witnesses)}, got none"
        )


def _has_java_file(fs: FileSystem, directory: Path, found: Iterable[int]) -> bool:
    """Return whether a Java broker has written a redo file, which has no checksums."""
    return any(
        fs.size_of(directory / f"redo.{number}")
        and not fs.exists(directory / f"sums.{number}")
        for number in found
    )


def _read_file(fs: FileSystem, path: Path) -> bytes:
    return fs.read_file(path, fs.size_of(path))


def _read_sums(fs: FileSystem, directory: Path, number: int) -> Sums:
    """Return the checksums of a file; none if a Java broker has written it since."""
    path = directory / f"sums.{number}"
    try:
        sums = decode_sums(_read_file(fs, path), number)
        changed_ms = fs.mtime_ms(path)
    except MissingFileError:
        return Sums()
    java = directory / JAVA_OUTCOMES_FILE
    if fs.exists(java) and fs.mtime_ms(java) > changed_ms:
        _log.info("journal not checked, a Java broker wrote it: file=%s", path)
        return Sums()
    return sums


def _settle(
    replay: Replay, outcomes: dict[str, KeptOutcome], together: Sequence[NamedGroup]
) -> list[ReplayedTransaction]:
    """Return the prepared transactions; apply decisions of side files to the others."""
    left = []
    for each in replay.prepared():
        kept = outcomes.get(each.key)
        is_committed = any(each.is_named(group) for group in together)
        if kept is not None:
            is_committed = kept.outcome is HeuristicOutcome.COMMIT
        if is_committed:
            # Its commit record was lost or never written, so none of it is applied.
            each.locations = ()
            replay.commits.append(each)
        elif kept is None:
            left.append(each)
    return left


def _join(
    restored: Iterable[RestoredTransaction], together: Sequence[NamedGroup]
) -> tuple[tuple[str, ...], ...]:
    """Return the keys of restored committed transactions, by group."""
    committed = [
        each.replayed for each in restored if each.replayed.locations is not None
    ]
    groups = (
        tuple(each.key for each in committed if each.is_named(group))
        for group in together
    )
    return tuple(keys for keys in groups if keys)


def compact(
    fs: FileSystem, journal: Journal, left: Iterable[ReplayedTransaction], number: int
) -> tuple[RestoredTransaction, ...]:
    """Open the journal with a first file of the given transactions.

    Raises:
        NoSpaceError: there is not enough space; a part of the file may exist.
        StorageError: the disk refuses.
    """
    restored, survivors = [], []
    for each in left:
        slot = Slot()
        data = encode_transaction(each)
        # If a partition could not be read, an offset may still be torn.
        locations = () if each.is_unverified else each.locations or ()
        survivors.append((slot, data, bounds_of(locations, len(data))))
        restored.append((each, slot, len(data)))
    size_bytes = sum(len(data) for _slot, data, _bounds in survivors)
    free_bytes = fs.free_bytes(journal.directory)
    if free_bytes < size_bytes:
        # Checked first, because a failed try would take free space from others.
        raise NoSpaceError(
            f"no space for the journal: directory={journal.directory} expected"
            f" {size_bytes} bytes free, got {free_bytes}"
        )
    journal.open(number, survivors)
    return tuple(
        RestoredTransaction(each, slot, slot.position + size)
        for each, slot, size in restored
    )


def encode_transaction(transaction: ReplayedTransaction) -> bytes:
    """Return all records of a transaction, its commit record last."""
    locations, bounds = transaction.locations, transaction.bounds
    parts = [encode_put(*put) for put in transaction.puts]
    if transaction.is_prepared:
        parts.append(encode_operation(RedoOperation.XA_PREPARE, transaction.key))
    if locations is None:
        return b"".join(parts)
    parts.append(
        encode_operation(
            ending_of(transaction.key, is_commit=True),
            transaction.key,
            was_prepared=transaction.is_prepared,
            locations=locations,
            has_bounds=all(location.log_id in bounds for location in locations),
        )
    )
    return b"".join(parts)
