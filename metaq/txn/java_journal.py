"""Which transactions a Java broker left open, read from its journal and nothing more.

    <dataLogPath>/transactions/redo.N         records, N = 1, 2, …
    <dataLogPath>/transactions/checkpoint.N   JSON: where the first open one begins

    record   i32 length | TxCommand, length bytes | attachment of a commit

    TxCommand             1: kind (1 append, 2 operation) | 2: content
    append content        1: message id | 2: the put as on the wire, with its key
    operation content     1: type (1 prepare, 2, 4 commit, 3, 5 rollback)
                          2: was prepared | 3: key | 4: bytes of the attachment

Messages are in protobuf's encoding. Only the head of a record is read. A record that
is cut off or makes no sense ends the file, as it does for a Java broker. Nothing here
changes a byte. Source: broker spec 5.6, 5.7.
"""

import enum
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from metaq.errors import StorageError
from metaq.fs import FileSystem, ReadFile
from metaq.model import Position, SizeBytes

HEAD_BYTES: Final = SizeBytes(4096)
"""Read of each record: a put's line with the longest topic is shorter."""

RECORDS_MAX: Final = 200_000
"""Records that are looked at, seconds of a start; behind them nothing is known."""

_NAME: Final = re.compile(r"(redo|checkpoint)\.([1-9][0-9]{0,8})")
_CHECKPOINT_BYTES_MAX: Final = SizeBytes(4096)
_LENGTH_BYTES: Final = 4
_VARINT_BYTES_MAX: Final = 10
_KEY_TOKEN: Final = 6
_PUT_TOKENS: Final = 8


class JournalKind(enum.Enum):
    """What a record does to its transaction."""

    PUT = "put"
    PREPARE = "prepare"
    END = "commit or rollback"


_OPERATIONS: Final = {
    1: JournalKind.PREPARE, 2: JournalKind.END, 3: JournalKind.END,
    4: JournalKind.END, 5: JournalKind.END,
}  # fmt: skip


class JournalRecord(NamedTuple):
    """One record, as far as it matters here."""

    kind: JournalKind
    """What happened."""
    key: str
    """To which transaction."""
    attachment_bytes: int
    """Bytes behind it that belong to it."""


@dataclass(slots=True)
class OpenTransaction:
    """A transaction that was begun or prepared and has no end."""

    key: str
    """Its key, as commands spell it."""
    put_count: int = 0
    """Puts that wait for its end."""
    is_prepared: bool = False
    """It was promised: only its manager may end it."""

    def __str__(self) -> str:
        """Return one sentence without its subject."""
        state = "prepared" if self.is_prepared else "begun"
        return f"{self.key} is {state} and not ended, with {self.put_count} puts"


@dataclass(frozen=True, slots=True)
class JournalReport:
    """What a journal says."""

    open: tuple[OpenTransaction, ...]
    """Open transactions, oldest first."""
    is_whole: bool
    """Everything was looked at."""


def decode_record(head: bytes) -> JournalRecord | None:
    """Return what a record says, by its first bytes; None where it is none."""
    try:
        fields = _fields(head)
        content = fields.get(2)
        if not isinstance(content, bytes):
            return None
        inner = _fields(content)
        if fields.get(1) == 1:
            return _decode_put(inner.get(2))
        kind, key = _OPERATIONS[_number(inner.get(1))], inner.get(3)
        if fields.get(1) != 2 or not isinstance(key, bytes):
            return None
        size = _number(inner.get(4, 0))
        return JournalRecord(kind, key.decode(), size)
    except (IndexError, KeyError, ValueError):
        return None


def _decode_put(put: int | bytes | None) -> JournalRecord | None:
    line = put.partition(b"\r\n")[0].split(b" ") if isinstance(put, bytes) else []
    if len(line) != _PUT_TOKENS or line[0] != b"put":
        return None
    return JournalRecord(JournalKind.PUT, line[_KEY_TOKEN].decode(), 0)


def _number(value: int | bytes | None) -> int:
    if not isinstance(value, int):
        raise ValueError(f"expected a number, got {value!r}")  # noqa: TRY004  # bytes
    return value


def _fields(data: bytes) -> dict[int, int | bytes]:
    """Return the fields of a protobuf message; the last one may be cut off."""
    fields: dict[int, int | bytes] = {}
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        if tag & 7 == 0:
            fields[tag >> 3], position = _varint(data, position)
        elif tag & 7 == 2:
            size, position = _varint(data, position)
            fields[tag >> 3] = data[position : position + size]
            position += size
        else:
            raise ValueError(f"expected wire type 0 or 2, got {tag & 7}")
    return fields


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(_VARINT_BYTES_MAX):
        byte = data[position + shift]
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return value, position + shift + 1
    raise ValueError("expected a number of at most 10 bytes")


# -- files ----------------------------------------------------------------------------


def find_open(fs: FileSystem, directory: Path) -> JournalReport:
    """Return the open transactions of the journal in a directory. Blocks, for seconds.

    Args:
        fs: the disk; nothing on it is changed.
        directory: `<dataLogPath>/transactions`; there need be none.

    Raises:
        StorageError: the disk refuses.
    """
    found: dict[str, OpenTransaction] = {}
    count = 0
    for record in _records(fs, directory):
        count += 1
        if count > RECORDS_MAX:
            return JournalReport(tuple(found.values()), is_whole=False)
        if record.kind is JournalKind.END:
            found.pop(record.key, None)
            continue
        each = found.setdefault(record.key, OpenTransaction(record.key))
        each.put_count += record.kind is JournalKind.PUT
        each.is_prepared |= record.kind is JournalKind.PREPARE
    return JournalReport(tuple(found.values()), is_whole=True)


def _records(fs: FileSystem, directory: Path) -> Iterator[JournalRecord]:
    if not fs.is_directory(directory):
        return
    numbers: dict[str, list[int]] = {"redo": [], "checkpoint": []}
    for name in fs.list_directory(directory):
        if match := _NAME.fullmatch(name):
            numbers[match[1]].append(int(match[2]))
    first, offset = 0, 0
    if numbers["checkpoint"]:
        path = directory / f"checkpoint.{max(numbers['checkpoint'])}"
        first, offset = _read_checkpoint(fs, path)
    for number in sorted(each for each in numbers["redo"] if each >= first):
        file = fs.open_read(directory / f"redo.{number}")
        try:
            yield from _read_redo(file, offset if number == first else 0)
        finally:
            file.close()


def _read_checkpoint(fs: FileSystem, path: Path) -> tuple[int, int]:
    """Return file and offset to begin at; everything where it says nothing."""
    try:
        fields = json.loads(fs.read_file(path, _CHECKPOINT_BYTES_MAX))
        return max(0, int(fields["number"])), max(0, int(fields["offset"]))
    except (ValueError, TypeError, KeyError, RecursionError):
        return 0, 0


def _read_redo(file: ReadFile, position: int) -> Iterator[JournalRecord]:
    end = file.size()
    while position + _LENGTH_BYTES <= end:
        head = file.read_at(Position(position), SizeBytes(_LENGTH_BYTES + HEAD_BYTES))
        length = int.from_bytes(head[:_LENGTH_BYTES], "big", signed=True)
        position += _LENGTH_BYTES + length
        if length <= 0 or position > end:
            return
        record = decode_record(head[_LENGTH_BYTES : _LENGTH_BYTES + length])
        if record is None:
            return
        yield record
        position += record.attachment_bytes


def describe(report: JournalReport) -> tuple[str, ...]:
    """Return one sentence for each thing that an operator has to know."""
    told = [str(each) for each in report.open]
    if not report.is_whole:
        told.append(f"behind {RECORDS_MAX} records the journal was not read")
    return tuple(told)


def read_journal(fs: FileSystem, directory: Path) -> tuple[str, ...]:
    """Return `describe` of a journal, and what kept it from being read."""
    try:
        return describe(find_open(fs, directory))
    except StorageError as error:
        return (f"the journal cannot be read: {error}",)
