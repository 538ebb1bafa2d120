"""Small files of JSON beside the journal, each written as a whole.

    <journal>/outcomes    {"version": 1, "outcomes": [{"key": "XID:...",
                           "outcome": "commit", "at_ms": 1700000000000}, ...], "crc": 9}
    <journal>/together    {"version": 1, "together": [{"XID:...": 6755399441055744,
                           "XID:...": ...}, ...], "crc": 9}
    <journal>/deletions   {"version": 1, "topics": {"orders": {"3": 4711, "4": 0}, ...},
                           "crc": 9}
    <journal>/checkpoint.N  {"number":<N of a redo file>,"offset":<byte in it>}

`crc` is the CRC-32 of all but itself: of the JSON with sorted keys. The first three are
made by the first start, and never removed: one that says nothing any more is replaced
by an empty one. So one that is missing later was removed by hand (`sums.py`).

Outcomes are heuristic: which prepared transactions an operator has ended. An outcome is
written before it is carried out, and stays until the coordinator of the transaction
forgets it: whatever it asks is answered with code 6, 7 or 8 meanwhile. A Java broker
keeps its own in `heuristic.log`, as a serialised Java object: that file is never read
or written here.

Commits together are one decision: which transactions a start has to commit as well. For
each command the keys of its transactions that are not finished, and the largest message
id of each. Every transaction has its commit record in the redo file of its puts, and
these may be several files: a power cut may leave one record of two. So the file is
written and synced before the first record. What it names is committed: a start makes
the records that are missing. Batches are appended when all records are synced, so one
that has none is nowhere yet. The file stays until the next command, start or stop. A
name that is out of date says nothing: ids only grow, so a later transaction of that key
has larger ones.

Deletions of topics say which commits of the journal must not come back. Replay appends
what a commit put and a partition lacks. A partition that was deleted lacks everything,
and so does one that was made under its name again. So before the data of a topic goes,
the end of each redo file is written down: of commits in front of it, the batches for
that topic are over. What is committed behind it is for a topic that was made again. A
start leaves none of the named files, and empties the record.

Checkpoints are MetaQ's, without a checksum: where the replay of a Java broker begins.
The one with the highest number counts, and an empty one says nothing. It names the
first record of the oldest transaction that is not finished. Only a newer one is
written, and only the newest few are kept. A start of ours reads all redo files,
whatever a checkpoint says, and takes care that the number of its new one is higher.

Source: broker spec 5.6, 5.8.
"""

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from metaq.errors import DiskError, NoSpaceError, StorageError
from metaq.fs import FileSystem
from metaq.model import MessageId, Millis, SizeBytes
from metaq.record.checksum import crc32
from metaq.txn.state import HeuristicOutcome

T = TypeVar("T")

log = logging.getLogger(__name__)

VERSION: Final = 1
_BYTES_MAX: Final = SizeBytes(64 << 20)


def encode_fields(fields: Mapping[str, object]) -> bytes:
    """Return the content of a file with these fields."""
    all_fields = {"version": VERSION, **fields}
    return json.dumps({**all_fields, "crc": _crc(all_fields)}, indent=1).encode()


def decode_fields(data: bytes) -> dict[str, Any]:
    """Return the fields of a file.

    Raises:
        ValueError: it has none, another version, or a checksum that does not fit.
    """
    try:
        fields = json.loads(data)
        if fields.pop("crc") == _crc(fields) and fields.pop("version") == VERSION:
            return dict(fields)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"no fields: {error!r}") from error
    raise ValueError(f"expected version {VERSION} and a checksum that fits")


def read_side_file(
    fs: FileSystem, path: Path, decode: Callable[[bytes], T]
) -> T | None:
    """Return what a file says; None without one.

    Args:
        fs: the disk.
        path: of the file.
        decode: returns what a content says; ValueError: it makes no sense.

    Raises:
        StorageError: the disk refuses, or the file is damaged.
    """
    try:
        return decode(fs.read_file(path, _BYTES_MAX))
    except DiskError as error:
        if error.errno_name != "ENOENT":
            raise
        return None
    except ValueError as error:
        raise StorageError(f"{path.name} damaged: file={path} {error}") from error


def _crc(fields: Mapping[str, object]) -> int:
    return crc32(json.dumps(fields, sort_keys=True).encode())


# -- outcomes -------------------------------------------------------------------------

OUTCOMES_FILE: Final = "outcomes"
JAVA_OUTCOMES_FILE: Final = "heuristic.log"
JAVA_EMPTY_MAP_BYTES: Final = 135
"""Length of Java's file that holds no outcome."""


class KeptOutcome(NamedTuple):
    """Decision of an operator."""

    outcome: HeuristicOutcome
    """The outcome decided on."""
    at_ms: Millis
    """Time of the decision, wall clock."""


def encode_outcomes(outcomes: Mapping[str, KeptOutcome]) -> bytes:
    """Return the content of the file."""
    return encode_fields(
        {
            "outcomes": [
                {"key": key, "outcome": kept.outcome.value, "at_ms": kept.at_ms}
                for key, kept in outcomes.items()
            ]
        }
    )


def decode_outcomes(data: bytes) -> dict[str, KeptOutcome]:
    """Return what the content says.

    Raises:
        ValueError: it makes no sense.
    """
    try:
        return {
            str(each["key"]): KeptOutcome(
                HeuristicOutcome(each["outcome"]), Millis(int(each["at_ms"]))
            )
            for each in decode_fields(data)["outcomes"]
        }
    except (KeyError, TypeError) as error:
        raise ValueError(f"no outcomes: {error!r}") from error


def read_outcomes(fs: FileSystem, directory: Path) -> dict[str, KeptOutcome]:
    """Return the outcomes that are kept; none without a file.

    Raises:
        StorageError: the disk refuses, or the file is damaged.
    """
    return read_side_file(fs, directory / OUTCOMES_FILE, decode_outcomes) or {}


def write_outcomes(
    fs: FileSystem, directory: Path, outcomes: Mapping[str, KeptOutcome]
) -> None:
    """Replace the file.

    Raises:
        StorageError: the disk refuses; the old one is still there.
    """
    fs.write_atomically(directory / OUTCOMES_FILE, encode_outcomes(outcomes))


def has_java_outcomes(fs: FileSystem, directory: Path) -> bool:
    """Tell whether a Java broker left outcomes, which cannot be read here."""
    path = directory / JAVA_OUTCOMES_FILE
    if not fs.exists(path):
        return False
    file = fs.open_read(path)
    try:
        return file.size() > JAVA_EMPTY_MAP_BYTES
    finally:
        file.close()


# -- commits together -----------------------------------------------------------------

TOGETHER_FILE: Final = "together"

NamedGroup: TypeAlias = Mapping[str, MessageId]
"""Key of each transaction of one command → its largest message id."""


def encode_together(groups: Sequence[NamedGroup]) -> bytes:
    """Return the content of the file."""
    return encode_fields({"together": [dict(group) for group in groups]})


def decode_together(data: bytes) -> list[NamedGroup]:
    """Return what the content says.

    Raises:
        ValueError: it makes no sense.
    """
    try:
        return [
            {str(key): MessageId(int(last_id)) for key, last_id in group.items()}
            for group in decode_fields(data)["together"]
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no transactions: {error!r}") from error


def read_together(fs: FileSystem, directory: Path) -> list[NamedGroup]:
    """Return what is committed together; nothing without a file.

    Raises:
        StorageError: the disk refuses, or the file is damaged.
    """
    return read_side_file(fs, directory / TOGETHER_FILE, decode_together) or []


def write_together(
    fs: FileSystem, directory: Path, groups: Sequence[NamedGroup]
) -> None:
    """Replace the file.

    Raises:
        NoSpaceError: the old one is still there.
        StorageError: the disk refuses; which one is there, is unknown.
    """
    fs.write_atomically(directory / TOGETHER_FILE, encode_together(groups))


# -- deletions ------------------------------------------------------------------------

DELETIONS_FILE: Final = "deletions"

Deletions: TypeAlias = dict[str, dict[int, int]]
"""Topic → number of a redo file → its end when the topic was deleted."""


def encode_deletions(deletions: Deletions) -> bytes:
    """Return the content of the file."""
    return encode_fields({"topics": deletions})


def decode_deletions(data: bytes) -> Deletions:
    """Return what the content says.

    Raises:
        ValueError: it makes no sense.
    """
    try:
        return {
            str(topic): {int(number): int(end) for number, end in ends.items()}
            for topic, ends in decode_fields(data)["topics"].items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no deletions: {error!r}") from error


def read_deletions(fs: FileSystem, directory: Path) -> Deletions:
    """Return the deletions since the last start; none without a file.

    Raises:
        StorageError: the disk refuses, or the file is damaged.
    """
    return read_side_file(fs, directory / DELETIONS_FILE, decode_deletions) or {}


def write_deletions(fs: FileSystem, directory: Path, deletions: Deletions) -> None:
    """Replace the file.

    Raises:
        StorageError: the disk refuses; the old one is still there.
    """
    fs.write_atomically(directory / DELETIONS_FILE, encode_deletions(deletions))


def ends_in(deletions: Deletions, number: int) -> Mapping[str, int]:
    """Return topic → end in one redo file; no topic that was deleted before it."""
    return {topic: ends[number] for topic, ends in deletions.items() if number in ends}


# -- all of them ----------------------------------------------------------------------

EMPTY_FILES: Final = {
    OUTCOMES_FILE: encode_outcomes({}),
    TOGETHER_FILE: encode_together(()),
    DELETIONS_FILE: encode_deletions({}),
}
"""Name of each file of ours → its content when it says nothing."""


def missing_files(fs: FileSystem, directory: Path) -> list[Path]:
    """Return the files that are not there."""
    paths = [directory / name for name in EMPTY_FILES]
    return [path for path in paths if not fs.exists(path)]


def make_missing_files(fs: FileSystem, directory: Path) -> None:
    """Make the files that are not there, empty.

    Raises:
        StorageError: the disk refuses.
    """
    for path in missing_files(fs, directory):
        fs.write_atomically(path, EMPTY_FILES[path.name])


def empty_file(fs: FileSystem, directory: Path, name: str) -> None:
    """Have a file say nothing; what it says is out of date by now.

    Raises:
        StorageError: the disk refuses something else than space, which can wait.
    """
    path = directory / name
    try:
        if fs.read_file(path, _BYTES_MAX) != EMPTY_FILES[name]:
            fs.write_atomically(path, EMPTY_FILES[name])
    except NoSpaceError as error:
        log.warning("file is out of date, and stays: file=%s error=%s", path, error)


# -- checkpoints ----------------------------------------------------------------------

_CHECKPOINT_NAME: Final = re.compile(r"checkpoint\.([1-9][0-9]{0,8})")
NUMBER_MAX: Final = 999_999_999
"""Largest number that a file of the journal can have in its name."""
_CHECKPOINT_BYTES_MAX: Final = SizeBytes(4096)


class JournalPosition(NamedTuple):
    """A byte of the journal; ordered."""

    number: int
    """Number of the redo file."""
    position: int
    """In it."""


NOWHERE: Final = JournalPosition(0, 0)
"""Position of a checkpoint that says nothing."""


def encode_checkpoint(place: JournalPosition) -> bytes:
    """Return the content of a checkpoint file."""
    return b'{"number":%d,"offset":%d}' % place


def decode_checkpoint(data: bytes) -> JournalPosition:
    """Return what a checkpoint says; `NOWHERE` if it makes no sense."""
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
    """Return where a Java broker begins; `NOWHERE`: with all that is there.

    Raises:
        StorageError: the disk refuses.
    """
    numbers = checkpoint_numbers(fs.list_directory(directory))
    if not numbers:
        return NOWHERE
    path = directory / f"checkpoint.{numbers[-1]}"
    return decode_checkpoint(fs.read_file(path, _CHECKPOINT_BYTES_MAX))


def write_checkpoint(
    fs: FileSystem, directory: Path, place: JournalPosition, *, kept_max: int
) -> bool:
    """Write a checkpoint if it is newer than the last one, and remove old ones.

    Returns:
        Whether it was written; it is on the disk then.

    Raises:
        StorageError: the disk refuses; the last one still counts.
    """
    numbers = checkpoint_numbers(fs.list_directory(directory))
    newest = numbers[-1] if numbers else 0
    is_empty = False
    if newest:
        data = fs.read_file(directory / f"checkpoint.{newest}", _CHECKPOINT_BYTES_MAX)
        is_empty = not data
        if not is_empty and place <= decode_checkpoint(data):
            return False
    # Like a Java broker, which makes an empty one first and fills it then.
    number = newest if is_empty else newest + 1
    path = directory / f"checkpoint.{number}"
    fs.write_atomically(path, encode_checkpoint(place))
    kept = [*(each for each in numbers if each != number), number]
    for old in kept[:-kept_max]:
        fs.unlink(directory / f"checkpoint.{old}")
    return True
