"""Hands a data directory over to a Java broker, and takes it back.

A Java broker skips partitions if the last name that the file system lists in the
directory is not a partition (docs/metaq-1.4/broker.md 2.3): it answers gets there with
404 until the first put. So only partitions may remain. Files that only our broker needs
and that it cannot make again are kept next to the directory:

    <dataPath>.handed-over/holdings, topics.json

They are copied, not renamed, because a data directory may be a mount point.

Keep in step: the list of files in docs/storage.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from metaq.broker.admin_socket import SOCKET_NAME
from metaq.errors import StorageError
from metaq.fs import LOCK_FILE, FileSystem
from metaq.model import is_internal
from metaq.storage.holdings import HOLDINGS_BYTES_MAX, HOLDINGS_FILE
from metaq.storage.inventory import handed_over_path, read_holdings
from metaq.storage.opening import find_logs
from metaq.storage.set_aside import DELETED_DIRECTORY, remove_set_aside
from metaq.txn.opening import journal_numbers, read_journal
from metaq.txn.records import decode_put
from metaq.txn.recovery import ReplayedTransaction
from metaq.zk.definitions import (
    COPY_BYTES_MAX,
    COPY_NAME,
    TopicDefinition,
    TopicState,
    decode_copy,
    decode_definition,
)
from metaq.zk.errors import PayloadError
from metaq.zk.exchange_definitions import EXCHANGES_COPY_NAME
from metaq.zk.group_definitions import GROUPS_COPY_NAME

KEPT: Final = {
    HOLDINGS_FILE: HOLDINGS_BYTES_MAX,
    COPY_NAME: COPY_BYTES_MAX,
    GROUPS_COPY_NAME: COPY_BYTES_MAX,
    EXCHANGES_COPY_NAME: COPY_BYTES_MAX,
}
"""Files to move aside, and their maximum size."""

NEEDLESS: Final = frozenset(
    (SOCKET_NAME, DELETED_DIRECTORY, *(f"{name}.tmp" for name in (SOCKET_NAME, *KEPT)))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """The changes that make one data directory ready for a Java broker."""

    directory: Path
    """The data directory, locked by the caller."""
    aside: Path
    moved: tuple[str, ...]
    """Names to move aside, including internal logs, which a Java broker would register
    as topics; `metaq hand-over --back` moves them back."""
    removed: tuple[str, ...]
    """Names to remove for good; the lock file is not among them."""
    others: tuple[str, ...]
    """Other names that are not partitions; they prevent the hand-over."""
    topics: Mapping[str, TopicDefinition]
    """Topics made by command: a Java broker needs sections in its `server.ini`."""
    problem: str = ""
    """Why transactions prevent the hand-over; "" if they do not."""


def plan_hand_over(fs: FileSystem, directory: Path) -> HandOver:
    """Return the changes to a data directory that no broker uses.

    Raises:
        StorageError: the disk refused.
        PayloadError: the copy of the topic definitions is damaged.
        JournalDamagedError: the transaction journal is damaged.
    """
    logs = find_logs(fs, directory)
    rest = sorted(set(fs.list_directory(directory)) - {LOCK_FILE, *logs})
    held = {log_id.topic for log_id in logs.values()}
    topics: dict[str, TopicDefinition] = {}
    if COPY_NAME in rest:
        topics = _read_topics(fs, directory / COPY_NAME)
    return HandOver(
        directory=directory,
        aside=handed_over_path(directory),
        moved=(
            *(name for name in rest if name in KEPT),
            *(name for name, log_id in logs.items() if is_internal(log_id.topic)),
        ),
        removed=tuple(name for name in rest if name in NEEDLESS),
        others=tuple(name for name in rest if name not in KEPT.keys() | NEEDLESS),
        topics={
            topic: definition
            for topic, definition in topics.items()
            if definition.state is TopicState.ACTIVE
            and (definition.brokers is None or topic in held)
        },
        problem=_find_problem(fs, directory),
    )


def _read_topics(fs: FileSystem, path: Path) -> dict[str, TopicDefinition]:
    try:
        return decode_copy(fs.read_file(path, COPY_BYTES_MAX), decode_definition)
    except PayloadError as error:
        raise PayloadError(
            f"{path}: {error}; start and stop the broker with its ZooKeeper, which has"
            " them, or remove it"
        ) from error


def _find_problem(fs: FileSystem, directory: Path) -> str:
    """Return why unfinished transactions with puts to internal logs prevent it."""
    record = read_holdings(fs, directory)
    if record is None or not record.journal:
        return ""  # from an earlier version, which had no internal logs
    journal = Path(record.journal)
    if not fs.is_directory(journal):
        return (
            f"the transaction journal is no longer at {journal}: start the broker with"
            " its dataLogPath, and stop it"
        )
    replay = read_journal(fs, journal, journal_numbers(fs, journal))
    if any(map(_has_internal_puts, replay.commits)):
        return (
            "the journal has scheduled messages or messages of queue groups: start the"
            " broker, and stop it with SIGTERM"
        )
    keys = [each.key for each in replay.prepared() if _has_internal_puts(each)]
    if not keys:
        return ""
    return (
        "prepared transactions have scheduled messages, which a Java broker would put"
        f" into a topic: start the broker and end them: {', '.join(keys)}"
    )


def _has_internal_puts(transaction: ReplayedTransaction) -> bool:
    commands = [command for _, command in transaction.puts]
    return any(is_internal(decode_put(each).log_id.topic) for each in commands)


def hand_over(fs: FileSystem, plan: HandOver) -> None:
    """Apply the plan; the lock file stays. May be called again after an error.

    Raises:
        StorageError: the disk refused; some of the changes may be made.
    """
    assert not plan.others, plan.others
    if plan.moved:
        fs.make_directory(plan.aside)
    for name in plan.moved:
        # May replace files of an earlier hand-over, which are older.
        _move(fs, plan.directory / name, plan.aside / name)
    remove_set_aside(fs, plan.directory)
    for name in plan.removed:
        fs.discard(plan.directory / name)


def take_back(fs: FileSystem, directory: Path) -> tuple[str, ...]:
    """Move the files back; return their names, () if nothing was moved aside.

    Raises:
        StorageError: the disk refused; or our broker has run on the directory since and
            has made such a file, in which case nothing was changed.
    """
    aside = handed_over_path(directory)
    if not fs.is_directory(aside):
        return ()
    names = [
        name for name in fs.list_directory(aside) if name in KEPT or is_internal(name)
    ]
    for name in names:
        if fs.exists(directory / name) and name not in KEPT:
            raise StorageError(
                f"a broker has created {directory / name} since the hand-over: remove"
                f" it, or {aside / name}"
            )
        if fs.exists(directory / name):
            before, now = (
                fs.read_file(path / name, KEPT[name]) for path in (aside, directory)
            )
            if before != now:
                raise StorageError(
                    f"a broker has created {directory / name} since the hand-over, and"
                    f" {aside / name} differs: remove one of them"
                )
    for name in names:
        _move(fs, aside / name, directory / name)
    if not fs.list_directory(aside):
        fs.remove_directory(aside)
    return tuple(names)


def _move(fs: FileSystem, source: Path, target: Path) -> None:
    """Rename a log; copy a file, then remove the original, so a crash loses neither."""
    if fs.is_directory(source):
        fs.rename(source, target)
        return
    fs.write_atomically(target, fs.read_file(source, KEPT[source.name]))
    fs.unlink(source)
