"""Small JSON files beside the journal, each replaced as a whole.

    <journal>/outcomes    {"version": 1, "outcomes": [{"key": "XID:...",
                           "outcome": "commit", "at_ms": 1700000000000}, ...], "crc": 9}
    <journal>/together    {"version": 1, "together": [{"XID:...": 6755399441055744,
                           "XID:...": ...}, ...], "crc": 9}
    <journal>/deletions   {"version": 1, "topics": {"orders": {"3": 4711, "4": 0}, ...},
                           "crc": 9}
    <journal>/checkpoint.N  {"number":<N of a redo file>,"offset":<byte in it>}

`crc` is the CRC-32 of all other fields, as JSON with sorted keys. The first start makes
the first three, and they are never removed: one that has become empty is replaced by an
empty one. So a missing one was removed by hand (`sums.py`).

Outcomes are heuristic: prepared transactions that an operator has ended. An outcome is
written before it is carried out, and stays until the transaction's coordinator forgets
it; until then every command of that coordinator is answered with code 6, 7 or 8. A Java
broker keeps its own in `heuristic.log`, a serialised Java object: that file is never
read or written here.

Transactions committed together are one decision. For each such command the file has the
keys of its unfinished transactions, and the largest message id of each. Every commit
record is in the redo file of its puts, and these may be several files: a power cut may
leave one record of two. So this file is written and synced before the first record, and
the transactions in it are committed: a start makes missing records. Batches are
appended when all records are synced, so a transaction without a record has no batch
yet. The file stays until the next such command, start or stop. An outdated key has no
effect: ids only grow, so a later transaction of that key has larger ones.

Deletions list the commits that replay must not restore. Replay appends puts of a commit
that a partition lacks; a deleted partition lacks all, and so does one that was created
again with its name. So before the data of a topic is deleted, the end of each redo file
is written here: batches for that topic of commits before these ends are dropped.
Commits after them are for a topic that was created again. A start removes all named
files, and empties the record.

Checkpoints are MetaQ's, without a checksum: the position where the replay of a Java
broker begins, the first record of the oldest unfinished transaction. The checkpoint
with the highest number counts; an empty one is ignored. Only a newer position is
written, and only the newest few files are kept. Our start reads all redo files and
ignores checkpoints, but gives its new file a higher number.

Source: docs/metaq-1.4/broker.md 5.6, 5.8.
"""

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar

from metaq.errors import MissingFileError, NoSpaceError, StorageError
from metaq.fs import FileSystem
from metaq.model import MessageId, Millis, SizeBytes
from metaq.record.checksum import crc32
from metaq.txn.state import HeuristicOutcome

T = TypeVar("T")

_log = logging.getLogger(__name__)

VERSION: Final = 1
_BYTES_MAX: Final = SizeBytes(64 << 20)


def encode_fields(fields: Mapping[str, object]) -> bytes:
    """Return the content of a file with these fields."""
    all_fields = {"version": VERSION, **fields}
    return json.dumps({**all_fields, "crc": _crc(all_fields)}, indent=1).encode()


def decode_fields(data: bytes) -> dict[str, Any]:
    """Return the fields in the content of a file.

    Raises:
        ValueError: it has no fields, another version, or a wrong checksum.
    """
    try:
        fields = json.loads(data)
        if fields.pop("crc") == _crc(fields) and fields.pop("version") == VERSION:
            return dict(fields)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"no fields: {error!r}") from error
    raise ValueError(f"expected version {VERSION} and a checksum that fits")


def _crc(fields: Mapping[str, object]) -> int:
    return crc32(json.dumps(fields, sort_keys=True).encode())


@dataclass(frozen=True)
class SideFile(Generic[T]):
    """A file with one field, and the encoding of its value of type `T`."""

    name: str
    field: str
    to_json: Callable[[T], object]
    from_json: Callable[[Any], T]
    no_value: T

    @property
    def empty(self) -> bytes:
        """Content of the file without a value."""
        return self.encode(self.no_value)

    def encode(self, value: T) -> bytes:
        """Return the content of the file."""
        return encode_fields({self.field: self.to_json(value)})

    def decode(self, data: bytes) -> T:
        """Return the value in the content of a file; ValueError if it is malformed."""
        try:
            return self.from_json(decode_fields(data)[self.field])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no {self.field}: {error!r}") from error

    def read(self, fs: FileSystem, directory: Path) -> T:
        """Return the value of the file; the empty one if there is no file.

        Raises:
            StorageError: the disk refuses, or the file is damaged.
        """
        path = directory / self.name
        try:
            data = fs.read_file(path, _BYTES_MAX)
        except MissingFileError:
            data = self.empty
        try:
            return self.decode(data)
        except ValueError as error:
            raise StorageError(f"{self.name} damaged: file={path} {error}") from error

    def write(self, fs: FileSystem, directory: Path, value: T) -> None:
        """Replace the file.

        Raises:
            NoSpaceError: the old file is still there.
            StorageError: the disk refuses; the old or the new file is there.
        """
        fs.write_atomically(directory / self.name, self.encode(value))

    def clear(self, fs: FileSystem, directory: Path) -> None:
        """Replace an outdated content by the empty one; without space it stays.

        Raises:
            StorageError: the disk refuses for another reason.
        """
        path = directory / self.name
        try:
            if fs.read_file(path, _BYTES_MAX) != self.empty:
                fs.write_atomically(path, self.empty)
        except NoSpaceError as error:
            _log.warning("outdated file stays: file=%s error=%s", path, error)


# -- outcomes -------------------------------------------------------------------------

JAVA_OUTCOMES_FILE: Final = "heuristic.log"
JAVA_EMPTY_MAP_BYTES: Final = 135
"""Size of Java's file without an outcome."""


class KeptOutcome(NamedTuple):
    """Decision of an operator, and its time."""

    outcome: HeuristicOutcome
    at_ms: Millis


def _outcomes_to_json(outcomes: Mapping[str, KeptOutcome]) -> object:
    return [
        {"key": key, "outcome": kept.outcome.value, "at_ms": kept.at_ms}
        for key, kept in outcomes.items()
    ]


def _outcomes_from_json(found: Any) -> dict[str, KeptOutcome]:
    return {
        str(each["key"]): KeptOutcome(
            HeuristicOutcome(each["outcome"]), Millis(int(each["at_ms"]))
        )
        for each in found
    }


OUTCOMES: Final = SideFile[dict[str, KeptOutcome]](
    "outcomes", "outcomes", _outcomes_to_json, _outcomes_from_json, {}
)


def has_java_outcomes(fs: FileSystem, directory: Path) -> bool:
    """Return whether a Java broker left outcomes, which can not be read here."""
    path = directory / JAVA_OUTCOMES_FILE
    return fs.exists(path) and fs.size_of(path) > JAVA_EMPTY_MAP_BYTES


# -- commits together -----------------------------------------------------------------

NamedGroup: TypeAlias = Mapping[str, MessageId]
"""Key of each transaction of one command → its largest message id."""


def _together_to_json(groups: Sequence[NamedGroup]) -> object:
    return [dict(group) for group in groups]


def _together_from_json(found: Any) -> Sequence[NamedGroup]:
    return [
        {str(key): MessageId(int(last_id)) for key, last_id in group.items()}
        for group in found
    ]


TOGETHER: Final = SideFile[Sequence[NamedGroup]](
    "together", "together", _together_to_json, _together_from_json, ()
)

# -- deletions ------------------------------------------------------------------------

Deletions: TypeAlias = dict[str, dict[int, int]]
"""Topic → number of a redo file → its end when the topic was deleted."""


def _deletions_from_json(found: Any) -> Deletions:
    return {
        str(topic): {int(number): int(end) for number, end in ends.items()}
        for topic, ends in found.items()
    }


DELETIONS: Final = SideFile[Deletions](
    "deletions", "topics", lambda deletions: deletions, _deletions_from_json, {}
)
"""Deletions since the last start."""


def ends_in(deletions: Deletions, number: int) -> Mapping[str, int]:
    """Return topic → end, in one redo file, for topics deleted since it exists."""
    return {topic: ends[number] for topic, ends in deletions.items() if number in ends}


# -- all of them ----------------------------------------------------------------------

SIDE_FILES: Final[tuple[SideFile[Any], ...]] = (OUTCOMES, TOGETHER, DELETIONS)


def missing_files(fs: FileSystem, directory: Path) -> list[SideFile[Any]]:
    """Return the side files that do not exist."""
    return [each for each in SIDE_FILES if not fs.exists(directory / each.name)]


def make_missing_files(fs: FileSystem, directory: Path) -> None:
    """Create the missing side files, empty.

    Raises:
        StorageError: the disk refuses.
    """
    for each in missing_files(fs, directory):
        fs.write_atomically(directory / each.name, each.empty)


# -- checkpoints ----------------------------------------------------------------------

_CHECKPOINT_NAME: Final = re.compile(r"checkpoint\.([1-9][0-9]{0,8})")
NUMBER_MAX: Final = 999_999_999
"""Maximum number in the name of a journal file."""
_CHECKPOINT_BYTES_MAX: Final = SizeBytes(4096)


class JournalPosition(NamedTuple):
    """Position in the journal; ordered."""

    number: int
    position: int


NOWHERE: Final = JournalPosition(0, 0)
"""Position in an empty or malformed checkpoint."""


def encode_checkpoint(start: JournalPosition) -> bytes:
    """Return the content of a checkpoint file."""
    return b'{"number":%d,"offset":%d}' % start


def decode_checkpoint(data: bytes) -> JournalPosition:
    """Return the position in a checkpoint; `NOWHERE` if it is malformed."""
    try:
        fields = json.loads(data)
        number, offset = int(fields["number"]), int(fields["offset"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return NOWHERE
    is_name = 0 < number < NUMBER_MAX
    return JournalPosition(number, max(0, offset)) if is_name else NOWHERE


def checkpoint_numbers(names: Iterable[str]) -> list[int]:
    """Return the numbers of the checkpoint files among some names, sorted."""
    return sorted(
        int(match[1]) for name in names if (match := _CHECKPOINT_NAME.fullmatch(name))
    )


def read_checkpoint(fs: FileSystem, directory: Path) -> JournalPosition:
    """Return the position where a Java broker begins; `NOWHERE`: the first redo file.

    Raises:
        StorageError: the disk refuses.
    """
    numbers = checkpoint_numbers(fs.list_directory(directory))
    if not numbers:
        return NOWHERE
    path = directory / f"checkpoint.{numbers[-1]}"
    return decode_checkpoint(fs.read_file(path, _CHECKPOINT_BYTES_MAX))


def write_checkpoint(
    fs: FileSystem, directory: Path, start: JournalPosition, *, kept_max: int
) -> bool:
    """Write a checkpoint if it is newer than the last one, and remove old ones.

    Returns:
        Whether it was written; then it is on disk.

    Raises:
        StorageError: the disk refuses; the last one still counts.
    """
    numbers = checkpoint_numbers(fs.list_directory(directory))
    newest = numbers[-1] if numbers else 0
    is_empty = False
    if newest:
        data = fs.read_file(directory / f"checkpoint.{newest}", _CHECKPOINT_BYTES_MAX)
        is_empty = not data
        if not is_empty and start <= decode_checkpoint(data):
            return False
    # A Java broker makes an empty one first and then fills it; so do we.
    number = newest if is_empty else newest + 1
    path = directory / f"checkpoint.{number}"
    fs.write_atomically(path, encode_checkpoint(start))
    kept = [*(each for each in numbers if each != number), number]
    for old in kept[:-kept_max]:
        fs.unlink(directory / f"checkpoint.{old}")
    return True
