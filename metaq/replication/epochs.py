"""Epochs of a replica set, and the offset at which two copies of a log part.

An epoch is the term of one leader: a number and the nonce of its claim. A number alone
would not do: it may be used twice after ZooKeeper was set back. A log has a table with
the offset at which each epoch begins. Copies that agree on an epoch and an offset have
the same bytes before it, so two tables say how far two copies are equal:

    own     1 at 0    2 at 40          end 90       equal up to 60: epoch 2 ends
    other   1 at 0    2 at 40   4 at 60             there, or goes on elsewhere

Invariants, for logs of one number:

* the same epoch and offset name the same byte, on every replica and for ever;
* a copy is cut at the parting point and nowhere else, never below a high watermark
  that it knows, but for a set that was forced;
* an entry is synced before the first byte of its epoch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from metaq.model import Offset
from metaq.replication.json_values import LogNumber


class Epoch(NamedTuple):
    """The term of one leader; later ones are greater."""

    number: int
    """Its number, 1 or more; 0 before the first leader."""
    nonce: str
    """A text that no other claim has."""


NO_EPOCH: Final = Epoch(0, "")
"""Before the first leader of a set."""


class EpochStart(NamedTuple):
    """An entry of a table: the first offset that was written in an epoch."""

    epoch: Epoch
    start: Offset


EpochTable: TypeAlias = tuple[EpochStart, ...]
"""Entries of one log, oldest first."""


@dataclass(frozen=True, slots=True)
class CopyFacts:
    """One replica's copy of a log, as its join or its answer says it."""

    number: LogNumber
    """Number of the log: of two that had one name, each has its own."""
    start: Offset
    """Log start."""
    end: Offset
    """Synced end."""
    hw: Offset
    """Highest high watermark that the replica knows; never above the true one."""
    table: EpochTable

    @property
    def rank(self) -> tuple[Epoch, Offset]:
        """Epoch of its last byte, and its end: which of two copies has more."""
        kept = entries_within(self.table, self.start, self.end)
        return (kept[-1].epoch if kept else NO_EPOCH), self.end

    def fault(self) -> str | None:
        """Return how it contradicts itself, as read from a message; None if not.

        A watermark above the end is said as it is: then bytes are missing there.
        """
        if self.start <= self.end:
            return None
        return f"log {self.number} starts at {self.start}, ends at {self.end}"


def entries_within(
    table: Sequence[EpochStart], start: Offset, end: Offset
) -> EpochTable:
    """Return the entries of a table that have bytes in a range.

    Epochs without a byte are left out: with them equal copies would look different.
    An entry that begins before the range begins with it.

    Args:
        table: entries, oldest first.
        start: first offset of the range.
        end: the offset after it; recovery or a crash may have left less than the
            table knows.
    """
    kept = []
    for index, entry in enumerate(table):
        stop = min(table[index + 1].start, end) if index + 1 < len(table) else end
        begin = max(entry.start, start)
        if begin < stop:
            kept.append(EpochStart(entry.epoch, begin))
    return tuple(kept)


def parting_point(one: CopyFacts, other: CopyFacts) -> Offset:
    """Return the offset up to which two copies are known to be equal.

    It is the end of the last entry that both have, the smaller of two; the greater of
    the log starts if they have none in common there. It is above no end.
    """
    low = max(one.start, other.start)
    ends = one.end, other.end
    tables = [entries_within(each.table, low, each.end) for each in (one, other)]
    point = low
    for index, (mine, theirs) in enumerate(zip(*tables, strict=False)):
        if mine != theirs:
            break
        mine_end, theirs_end = (
            table[index + 1].start if index + 1 < len(table) else end
            for table, end in zip(tables, ends, strict=True)
        )
        point = min(mine_end, theirs_end)
        if mine_end != theirs_end:
            break
    return min(point, *ends)


def adopt_table(own: EpochTable, other: CopyFacts, point: Offset) -> EpochTable:
    """Return the table of a copy that is cut at a point and goes on as another.

    Args:
        own: entries of the copy.
        other: the copy that it follows from there.
        point: the parting point, or the other's log start.
    """
    kept = [entry for entry in own if entry.start < point]
    for entry in entries_within(other.table, point, other.end):
        if not kept or kept[-1].epoch != entry.epoch:
            kept.append(entry)
    return tuple(kept)


def begin_epoch(table: EpochTable, epoch: Epoch, end: Offset) -> EpochTable:
    """Return the table of a log whose leader begins an epoch at its end."""
    kept = tuple(entry for entry in table if entry.start < end)
    return (*kept, EpochStart(epoch, end))


def load_table(
    entries: Iterable[EpochStart], *, start: Offset, end: Offset
) -> EpochTable:
    """Return what a start believes of a table on disk.

    Entries at the end or above it are from before a crash or a cut, and those whose
    last byte was deleted say nothing any more.
    """
    table = tuple(entries)
    with_bytes = {entry.epoch for entry in entries_within(table, start, end)}
    return tuple(entry for entry in table if entry.epoch in with_bytes)
