"""Opening a journal: read all of it, see what is applied, and write what is left anew.

    redo.3  redo.4      →  replay, look into the partitions  →  redo.5
    sums.3  sums.4                                              sums.5

What is left are prepared transactions, and commits of which batches are not in their
partitions. They are written to a new file with a higher number and synced; then the old
files go. Nothing is appended before: an opening that is interrupted anywhere finds all
it needs the next time, and some of it twice, which replay knows. So a crash costs what
was not prepared and nothing else, and a start finds a small journal behind it.

A clean stop does the same, so that a Java broker finds no commit that it would judge by
an offset, and no transaction that is not prepared. Source: broker spec 5.7.
"""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from metaq.errors import DiskError
from metaq.fs import FileSystem
from metaq.model import MessageId, Position, SizeBytes
from metaq.record.ids import id_after
from metaq.txn.journal import Journal, Slot
from metaq.txn.ports import StoredBatches
from metaq.txn.records import RedoOperation, bounds_of, encode_operation, encode_put
from metaq.txn.recovery import Replay, ReplayedTransaction, cut_appends, find_unapplied
from metaq.txn.redo_file import FILE_NAME, remove_files
from metaq.txn.side_files import (
    JAVA_OUTCOMES_FILE,
    NOWHERE,
    KeptOutcome,
    NamedGroup,
    ends_in,
    has_java_outcomes,
    read_checkpoint,
    read_deletions,
    read_outcomes,
    read_together,
    remove_deletions,
    remove_together,
)
from metaq.txn.state import HeuristicOutcome, is_xa
from metaq.txn.sums import Sums, decode_sums

NO_ID: Final = MessageId(-1)

log = logging.getLogger(__name__)


class RestoredTransaction(NamedTuple):
    """A transaction that is not finished, and where its records lie now."""

    replayed: ReplayedTransaction
    """Transaction as replayed."""
    slot: Slot
    """For what follows."""
    records_end: int
    """Behind its last record, which is that of its commit if there is one."""


class OpenedJournal(NamedTuple):
    """Contents of a journal."""

    transactions: tuple[RestoredTransaction, ...]
    """Prepared, or committed and not applied; oldest first."""
    outcomes: dict[str, KeptOutcome]
    """Outcomes decided by operators."""
    next_id: MessageId
    """Behind all ids of ours in it; negative without one."""
    notes: tuple[str, ...]
    """Notes for an operator, one sentence each."""
    together: tuple[tuple[str, ...], ...] = ()
    """Keys of those among the transactions that were committed by one command."""


def open_journal(
    fs: FileSystem, journal: Journal, reader: StoredBatches
) -> OpenedJournal:
    """Read a journal, and leave what is not finished in a new first file. Blocks.

    Args:
        fs: the disk.
        journal: not open yet.
        reader: the partitions, recovered.

    Raises:
        JournalDamagedError: bytes that were synced are not what they were; nothing was
            changed.
        LogDirLockedError: another broker writes it.
        StorageError: the disk refuses.
    """
    directory = journal.directory
    if not fs.is_directory(directory.parent):
        fs.make_directory(directory.parent)
    fs.make_directory(directory)
    journal.lock()
    numbers = journal_numbers(fs, directory)
    replay = read_journal(fs, directory, numbers)
    outcomes = read_outcomes(fs, directory)
    notes = list(replay.notes)
    if has_java_outcomes(fs, directory):
        notes.append(
            "a Java broker left heuristic outcomes, which are not read here:"
            f" file={directory / JAVA_OUTCOMES_FILE}"
        )
    together = read_together(fs, directory)
    prepared = _settle(replay, outcomes, together)
    left = [*prepared, *find_unapplied(replay.commits, reader, together)]
    for log_id, offset in cut_appends(left).items():
        log.warning("append cut by a crash: partition=%s offset=%d", log_id, offset)
        reader.hold(log_id, offset)
    first = read_checkpoint(fs, directory) if numbers else NOWHERE
    restored = compact(journal, left, max([first.number, *numbers]) + 1)
    remove_files(fs, directory, numbers)
    remove_deletions(fs, directory)
    joined = _join(restored, together)
    if not joined:
        remove_together(fs, directory)
    for note in notes:
        log.warning("%s", note)
    log.info(
        "journal opened: directory=%s records=%d commits=%d prepared=%d unapplied=%d",
        directory,
        replay.record_count,
        len(replay.commits),
        len(prepared),
        len(left) - len(prepared),
    )
    next_id = id_after(replay.last_id, 1) if replay.last_id >= 0 else NO_ID
    return OpenedJournal(restored, outcomes, next_id, tuple(notes), joined)


def tidy(fs: FileSystem, journal: Journal, *, has_prepared: bool) -> None:
    """Leave nothing but what is prepared in the files of a closed journal. Blocks.

    Args:
        fs: the disk.
        journal: its files are closed; every commit is applied.
        has_prepared: whether there is anything to keep.

    Raises:
        StorageError: the disk refuses; the files that are there say the same.
    """
    directory = journal.directory
    numbers = journal_numbers(fs, directory)
    left = read_journal(fs, directory, numbers).prepared() if has_prepared else []
    compact(journal, left, max(numbers, default=0) + 1)
    journal.close_files()
    remove_files(fs, directory, numbers)
    remove_deletions(fs, directory)
    remove_together(fs, directory)


def journal_numbers(fs: FileSystem, directory: Path) -> list[int]:
    """Return the numbers of all redo files and side files, sorted."""
    names = map(FILE_NAME.fullmatch, fs.list_directory(directory))
    return sorted({int(match[2]) for match in names if match})


def read_journal(fs: FileSystem, directory: Path, numbers: Iterable[int]) -> Replay:
    """Replay the redo files of a directory, from its checkpoint on.

    Raises:
        JournalDamagedError: see `recovery.py`.
        StorageError: the disk refuses.
    """
    replay = Replay()
    first, deletions = read_checkpoint(fs, directory), read_deletions(fs, directory)
    for number in numbers:
        path = directory / f"redo.{number}"
        if number < first.number or not fs.exists(path):
            continue
        data = _read_file(fs, path)
        start = first.position if number == first.number else 0
        sums = _read_sums(fs, directory, number)
        deleted = ends_in(deletions, number)
        replay.read(data, start, sums, str(path), deleted=deleted)
    return replay


def _read_file(fs: FileSystem, path: Path) -> bytes:
    file = fs.open_read(path)
    try:
        return file.read_at(Position(0), SizeBytes(file.size()))
    finally:
        file.close()


def _read_sums(fs: FileSystem, directory: Path, number: int) -> Sums:
    """Return a side file; nothing of one that a Java broker has made old."""
    path = directory / f"sums.{number}"
    try:
        sums = decode_sums(_read_file(fs, path), number)
        changed_ms = fs.mtime_ms(path)
    except DiskError as error:
        if error.errno_name != "ENOENT":
            raise
        return Sums()
    java = directory / JAVA_OUTCOMES_FILE
    if fs.exists(java) and fs.mtime_ms(java) > changed_ms:
        log.info("journal not checked, a Java broker wrote it: file=%s", path)
        return Sums()
    return sums


def _settle(
    replay: Replay,
    outcomes: dict[str, KeptOutcome],
    together: Sequence[NamedGroup],
) -> list[ReplayedTransaction]:
    """Return what is prepared, but for what is decided by side files: that is done."""
    left = []
    for each in replay.prepared():
        kept = outcomes.get(each.key)
        is_committed = any(each.is_named(group) for group in together)
        if kept is not None:
            is_committed = kept.outcome is HeuristicOutcome.COMMIT
        if is_committed:
            # Its commit record was lost, or never made: none of it is applied.
            each.places = ()
            replay.commits.append(each)
        elif kept is None:
            left.append(each)
    return left


def _join(
    restored: Iterable[RestoredTransaction], together: Sequence[NamedGroup]
) -> tuple[tuple[str, ...], ...]:
    """Return the keys of those that are committed, by group."""
    committed = [each.replayed for each in restored if each.replayed.places is not None]
    groups = (
        tuple(each.key for each in committed if each.is_named(group))
        for group in together
    )
    return tuple(keys for keys in groups if keys)


def compact(
    journal: Journal, left: Iterable[ReplayedTransaction], number: int
) -> tuple[RestoredTransaction, ...]:
    """Open the journal with a first file that holds what is left."""
    restored, survivors = [], []
    for each in left:
        slot = Slot()
        data = encode_transaction(each)
        survivors.append((slot, data, bounds_of(each.places or (), len(data))))
        restored.append((each, slot, len(data)))
    journal.open(number, survivors)
    return tuple(
        RestoredTransaction(each, slot, slot.position + size)
        for each, slot, size in restored
    )


def encode_transaction(transaction: ReplayedTransaction) -> bytes:
    """Return all records of a transaction, that of its commit last."""
    parts = [encode_put(*put) for put in transaction.puts.items()]
    if transaction.is_prepared:
        parts.append(encode_operation(RedoOperation.XA_PREPARE, transaction.key))
    if transaction.places is None:
        return b"".join(parts)
    xa = is_xa(transaction.key)
    parts.append(
        encode_operation(
            RedoOperation.XA_COMMIT if xa else RedoOperation.LOCAL_COMMIT,
            transaction.key,
            was_prepared=transaction.is_prepared,
            places=transaction.places,
        )
    )
    return b"".join(parts)
