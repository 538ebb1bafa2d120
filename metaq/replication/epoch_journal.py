"""Journal of the numbers and epochs of the logs in a data directory of a replica set.

    <dataPath>/epochs     a file of frames (`fs/frame_file.py`), magic MQ-EPOCH

    frame of kind 1: a JSON array of entries that are atomic: after a crash, all or none
    are there; the number of a frame is 0
    ["born", log number, topic, partition, start, epoch, nonce]
    ["begun", epoch, nonce, [[log number, start], ...]]
    ["cut", log number, offset]
    ["gone", log number]

One file serves all logs of a directory: an epoch that begins in 5,000 costs one sync.

A *log number* identifies a log. `born` and `begun` are synced before the first byte of
the log, or of the epoch in it. `cut` drops the epochs of a table from an offset on; so
does `begun`, from its own start on. `gone` stays for ever, 30 bytes each: another
replica deletes its copy because the number is gone, never because a log is missing.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final, TypeAlias

from metaq.errors import CorruptRecordError
from metaq.model import LogId, Offset
from metaq.replication.epochs import Epoch, EpochStart, EpochTable, begin_epoch

EPOCHS_FILE: Final = "epochs"
"""Name of the file; it has no dash, so no partition directory can have it."""

MAGIC: Final = b"MQ-EPOCH"
ENTRIES: Final = 1
"""The only kind of frame."""


@dataclass(frozen=True, slots=True)
class LogCreated:
    """A log was created, or created again, with this number."""

    number: int
    log_id: LogId
    start: Offset
    """Its first offset."""
    epoch: Epoch
    """Epoch of the leader that created it, or of its first bytes."""


@dataclass(frozen=True, slots=True)
class EpochBegun:
    """An epoch began in a log."""

    number: int
    epoch: Epoch
    start: Offset


@dataclass(frozen=True, slots=True)
class TableCut:
    """Epochs of a log that begin at or after this offset are dropped."""

    number: int
    offset: Offset


@dataclass(frozen=True, slots=True)
class LogDeleted:
    """A log was deleted."""

    number: int


Entry: TypeAlias = LogCreated | EpochBegun | TableCut | LogDeleted


@dataclass(slots=True)
class EpochJournal:
    """Contents of a journal. Owned by the caller."""

    logs: dict[int, LogCreated] = field(default_factory=dict)
    """Number → entry of each existing log."""
    tables: dict[int, EpochTable] = field(default_factory=dict)
    """Number → epochs of each existing log."""
    gone: dict[int, LogId | None] = field(default_factory=dict)
    """Numbers of deleted logs → their names; None if unknown."""

    def apply(self, entries: Iterable[Entry]) -> None:
        """Apply entries, in order; `begun` and `cut` of unknown logs are ignored."""
        for entry in entries:
            number = entry.number
            match entry:
                case LogCreated():
                    self.logs[number] = entry
                    self.tables[number] = (EpochStart(entry.epoch, entry.start),)
                    self.gone.pop(number, None)
                case LogDeleted():
                    created = self.logs.pop(number, None)
                    self.tables.pop(number, None)
                    self.gone.setdefault(number, created.log_id if created else None)
                case EpochBegun() if number in self.logs:
                    table = self.tables[number]
                    self.tables[number] = begin_epoch(table, entry.epoch, entry.start)
                case TableCut() if number in self.logs:
                    table = self.tables[number]
                    self.tables[number] = tuple(
                        each for each in table if each.start < entry.offset
                    )

    def entries(self) -> Iterator[Entry]:
        """Yield the fewest entries that give the same contents."""
        yield from map(LogDeleted, self.gone)
        yield from self.logs.values()
        begun = []
        for number, created in self.logs.items():
            table = self.tables[number]
            if table[:1] == (EpochStart(created.epoch, created.start),):
                table = table[1:]
            else:
                yield TableCut(number, created.start)
            begun += [
                (index, EpochBegun(number, *each)) for index, each in enumerate(table)
            ]
        # Group the entries by epoch, because an epoch begins in many logs.
        begun.sort(key=lambda each: (each[0], each[1].epoch))
        for _, entry in begun:
            yield entry


# -- bytes ----------------------------------------------------------------------------


def encode_entries(entries: Iterable[Entry]) -> bytes:
    """Return the body of a frame."""
    found: list[object] = []
    for epoch, group in groupby(entries, _epoch_of_begun):
        if epoch is not None:
            begun = [each for each in group if isinstance(each, EpochBegun)]
            places = [(each.number, each.start) for each in begun]
            found.append(("begun", *epoch, places))
            continue
        for entry in group:
            match entry:
                case LogCreated(number, log_id, start, born):
                    place = number, log_id.topic, log_id.partition, start
                    found.append(("born", *place, *born))
                case TableCut(number, offset):
                    found.append(("cut", number, offset))
                case LogDeleted(number):
                    found.append(("gone", number))
    return json.dumps(found, separators=(",", ":")).encode()


def _epoch_of_begun(entry: Entry) -> Epoch | None:
    return entry.epoch if isinstance(entry, EpochBegun) else None


def decode_entries(body: bytes) -> list[Entry]:
    """Return the entries of a frame.

    Raises:
        CorruptRecordError: its bytes are not entries of this version.
    """
    try:
        return [entry for fields in json.loads(body) for entry in _decode(*fields)]
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptRecordError(
            f"entries of epochs: expected those of version 1, got {body[:80]!r}:"
            f" {error}"
        ) from error


def _decode(kind: str, *fields: Any) -> Iterator[Entry]:
    match kind, *fields:
        case "born", int(number), str(topic), int(partition), int(start), *epoch:
            log_id = LogId(topic, partition)
            yield LogCreated(number, log_id, Offset(start), _epoch(*epoch))
        case "begun", epoch, nonce, places:
            for number, start in places:
                yield EpochBegun(int(number), _epoch(epoch, nonce), Offset(int(start)))
        case "cut", int(number), int(offset):
            yield TableCut(number, Offset(offset))
        case "gone", int(number):
            yield LogDeleted(number)
        case _:
            raise ValueError(f"entry {kind!r:.80} is not known")


def _epoch(number: Any, nonce: Any) -> Epoch:
    return Epoch(int(number), str(nonce))
