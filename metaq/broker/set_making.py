"""Checks whether a broker can become a replica set.

A set delivers no delayed messages and takes no transactions. Delayed messages and
unfinished transactions would remain on the disk of its first replica, unnoticed.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from metaq.delay.plan import TIERS, is_done
from metaq.delay.records import (
    PROGRESS_PARTITION,
    TOPIC,
    DelayKind,
    DelayState,
    cancelled_at,
    decode_head,
    decode_state,
)
from metaq.errors import CorruptRecordError
from metaq.fs import FileSystem
from metaq.model import LogId, Offset, Position
from metaq.record.layout import Record
from metaq.record.scan import Corrupt, Incomplete, iter_records
from metaq.storage.inventory import read_holdings
from metaq.storage.listing import check_names
from metaq.storage.opening import find_logs
from metaq.txn.opening import journal_numbers, read_journal

_NOTHING = (0,) * TIERS


def find_unfinished(fs: FileSystem, paths: Sequence[Path]) -> str:
    """Return why not, and the remedy, in one sentence; "" if it can. Blocks.

    Args:
        fs: the disk.
        paths: all data directories of a stopped broker.

    Raises:
        StorageError: the disk refuses, or the logs of delayed messages are damaged.
        JournalDamagedError: the transaction journal is damaged.
    """
    if (count := _count_waiting(fs, paths)) > 0:
        return (
            f"the data directory has {count} scheduled messages, which a replica set"
            " does not deliver: start the broker without [replication], and wait until"
            " 'metaq scheduled list' shows none, or cancel them with 'metaq scheduled"
            " cancel'"
        )
    for path in paths:
        held = read_holdings(fs, path)
        if held is None or not held.journal:
            continue
        journal = Path(held.journal)
        if not fs.is_directory(journal):
            continue
        replay = read_journal(fs, journal, journal_numbers(fs, journal))
        keys = [each.key for each in (*replay.commits, *replay.prepared())]
        if keys:
            return (
                "the data directory has unfinished transactions, which a replica set"
                " does not support: start the broker without [replication], end them,"
                f" and stop it with SIGTERM: {', '.join(keys)}"
            )
    return ""


def _count_waiting(fs: FileSystem, paths: Sequence[Path]) -> int:
    """Return the number of delayed messages that are not delivered yet."""
    logs = {
        log_id: path / name
        for path in paths
        for name, log_id in find_logs(fs, path).items()
        if log_id.topic == TOPIC
    }
    state = DelayState()
    for _offset, record in _records(fs, logs.get(LogId(TOPIC, PROGRESS_PARTITION))):
        found = decode_state(record.payload)
        state = max(state, found, key=lambda each: each.sequence)
    count = 0
    for tier, steps in enumerate(state.steps):
        for at, record in _records(fs, logs.get(LogId(TOPIC, tier))):
            head, offset, messages = decode_head(record.payload), at, 0
            if head.kind is DelayKind.CANCELLED:
                offset, _size = cancelled_at(record.payload, head)
                messages = -1
            else:
                messages = head.messages
            is_dropped = offset < state.dropped.get(head.topic, _NOTHING)[tier]
            if not is_dropped and not is_done(steps, (head.due_ms, offset)):
                count += messages
    return count


def _records(fs: FileSystem, directory: Path | None) -> Iterator[tuple[Offset, Record]]:
    """Yield the records of a log up to a torn tail, which was never acknowledged."""
    segments = () if directory is None else check_names(fs, directory).segments
    for segment in segments:
        with fs.open_read(segment.path) as file:
            end = Position(segment.size_bytes)
            for item in iter_records(file.read_at, Position(0), end):
                if isinstance(item, Incomplete):
                    break
                if isinstance(item, Corrupt):
                    raise CorruptRecordError(f"{segment.path} is damaged: {item}")
                yield Offset(segment.base_offset + item[0]), item[1]
