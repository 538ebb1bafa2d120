"""Epochs of a replica set, and the offset at which two copies of a log part.

An epoch is the term of one leader: a number and the nonce of its claim. The number
alone is not unique: it may be used again after ZooKeeper was set back. A log has a
table with the offset at which each epoch begins. Copies that agree on an epoch and an
offset have the same bytes before it, so two tables show up to which offset two copies
are equal:

    own     1 at 0    2 at 40          end 90       equal up to 60: epoch 2 ends
    other   1 at 0    2 at 40   4 at 60             there in the other copy

Invariants, for logs with the same number:

* an epoch and an offset identify the same byte on every replica, for ever;
* a copy is truncated only at the divergence point, and never below a high watermark
  that it knows, except in a forced set;
* an entry is synced before the first byte of its epoch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from metaq.model import Offset
from metaq.replication.json_values import LogNumber


class Epoch(NamedTuple):
    """The term of one leader; a later epoch compares greater."""

    number: int
    """Number of the epoch, 1 or more; 0 before the first leader."""
    nonce: str
    """Random text, unique to the claim."""


NO_EPOCH: Final = Epoch(0, "")
"""Epoch before the first leader of a set."""


class EpochStart(NamedTuple):
    """An entry of a table: an epoch, and the first offset written in it."""

    epoch: Epoch
    start: Offset


EpochTable: TypeAlias = tuple[EpochStart, ...]
"""Entries of one log, oldest first."""


@dataclass(frozen=True, slots=True)
class CopyFacts:
    """Facts of one replica's copy of a log, as sent in its join or reply."""

    number: LogNumber
    """Number of the log; differs for each log that is created under a name."""
    start: Offset
    """Log start."""
    end: Offset
    """Synced end."""
    hw: Offset
    """Highest high watermark known to the replica; never above the true one."""
    table: EpochTable

    @property
    def rank(self) -> tuple[Epoch, Offset]:
        """Epoch of the last byte, and the end: the greater of two ranks has more."""
        kept = entries_within(self.table, self.start, self.end)
        return (kept[-1].epoch if kept else NO_EPOCH), self.end

    def fault(self) -> str | None:
        """Return the contradiction in facts read from a message; None for none.

        A high watermark above the end is not one: it means that bytes are missing.
        """
        if self.start <= self.end:
            return None
        return f"log {self.number} starts at {self.start}, ends at {self.end}"


def entries_within(
    table: Sequence[EpochStart], start: Offset, end: Offset
) -> EpochTable:
    """Return the entries of a table that have bytes in a range.

    Epochs without bytes are left out, because they would make equal copies look
    different. An entry that begins before the range begins with it.

    Args:
        table: entries, oldest first.
        start: first offset of the range.
        end: end of the range, exclusive; after recovery or a crash it may be below
            entries of the table.
    """
    kept = []
    for index, entry in enumerate(table):
        stop = min(table[index + 1].start, end) if index + 1 < len(table) else end
        begin = max(entry.start, start)
        if begin < stop:
            kept.append(EpochStart(entry.epoch, begin))
    return tuple(kept)


def divergence_point(one: CopyFacts, other: CopyFacts) -> Offset:
    """Return the offset up to which two copies are known to be equal.

    It is the smaller end of the last common entry; without a common entry, the greater
    of the two log starts. Never above either log end.
    """
    low = max(one.start, other.start)
    ends = one.end, other.end
    tables = [entries_within(each.table, low, each.end) for each in (one, other)]
    point = low
    for index, (mine, theirs) in enumerate(zip(*tables, strict=False)):
        if mine != theirs:
            break
        point = min(
            table[index + 1].start if index + 1 < len(table) else end
            for table, end in zip(tables, ends, strict=True)
        )
    return min(point, *ends)


def adopt_table(own: EpochTable, other: CopyFacts, point: Offset) -> EpochTable:
    """Return the table of a copy that is truncated and continued as another copy.

    Args:
        own: entries of the copy.
        other: the copy that it continues.
        point: where it is truncated: the divergence point, or the other's log start.
    """
    kept = [entry for entry in own if entry.start < point]
    for entry in entries_within(other.table, point, other.end):
        if not kept or kept[-1].epoch != entry.epoch:
            kept.append(entry)
    return tuple(kept)


def begin_epoch(table: EpochTable, epoch: Epoch, end: Offset) -> EpochTable:
    """Return the table of a log whose leader starts an epoch at the log's end."""
    kept = tuple(entry for entry in table if entry.start < end)
    return (*kept, EpochStart(epoch, end))


def load_table(
    entries: Iterable[EpochStart], *, start: Offset, end: Offset
) -> EpochTable:
    """Return the valid entries of a table read from disk at the start.

    Entries at or above the end are from before a crash or truncation; entries whose
    bytes were all deleted are obsolete.
    """
    table = tuple(entries)
    with_bytes = {entry.epoch for entry in entries_within(table, start, end)}
    return tuple(entry for entry in table if entry.epoch in with_bytes)
