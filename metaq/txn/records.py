"""The records of a redo file: those of MetaQ 1.4, with one field more.

    record       i32 length | TxCommand, length bytes | attachment of a commit

    TxCommand            1 varint: kind (1 append, 2 operation)
                         2 bytes:  content, one of the two below
                         3 varint: force, 1 on a prepare, else absent
    append               1 varint: message id, 64 bits, two's complement
                         2 bytes:  the put, as on the wire in its eight-word form:
                                   `put topic partition length flag checksum key opaque`
                                   CRLF payload; checksum -1 where the client sent none
    operation            1 varint: type (1 XA prepare, 2 XA commit, 3 XA rollback,
                                   4 local commit, 5 local rollback)
                         2 varint: was prepared, 0 or 1
                         3 bytes:  key of the transaction
                         4 varint: bytes of the attachment, absent without one
                        15 bytes:  first values of the offsets in the attachment, i64
                                   each, by topic and partition; ours, in commits

    attachment   for each partition with puts, in any order:
    byte  0        8        12         16          20
          +--------+--------+----------+-----------+---------------+
          | offset | length | checksum | name size | topic-number  |
          | i64    | i32    | i32      | i32       |               |
          +--------+--------+----------+-----------+---------------+

Messages are in protobuf's encoding, other numbers big-endian. The length at the start
does not include the attachment. `checksum` covers the whole batch, headers of its
records included. `offset` is that of the batch. In our own commit record it is first a
bound: the batch is there or after it; the exact offset overwrites it before the batch
is written to its partition (`applier.py`). A power cut may tear that write, so field 15
has the bounds as well, and never changes. A Java broker skips it, as protobuf does with
unknown fields; all other bytes equal those that it writes. It may rewrite the
attachment in another order.

`tests/txn/test_records.py` pins the bytes. Source: docs/metaq-1.4/broker.md 5.6.
"""

import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from struct import Struct
from types import MappingProxyType
from typing import Final, NamedTuple

from metaq.model import LogId, MessageId, Offset
from metaq.record.layout import HEADER, HEADER_BYTES
from metaq.txn.state import is_xa

LENGTH_BYTES: Final = 4

LOCATION: Final = Struct(">qiii")
"""Offset, length, checksum, size of the name."""

OFFSET: Final = Struct(">q")
"""First field of a location, which a broker may overwrite."""

NAME_BYTES_MAX: Final = 4096
"""Maximum length of `topic-partition` in a valid location."""

_U64: Final = (1 << 64) - 1
_VARINT_BYTES_MAX: Final = 10
_APPEND_TAG: Final = b"\x08\x01\x12"
_PUT_TOKENS: Final = 8
_BOUNDS_TAG: Final = b"\x7a"
"""Tag of field 15, far from MetaQ's fields."""

_VARINT: Final = rb"([\x80-\xff]{0,9}[\x00-\x7f])"
_PUT_HEAD: Final = re.compile(
    rb"\x08\x01\x12" + _VARINT + rb"\x08" + _VARINT + rb"\x12" + _VARINT
)
"""Bytes between the length of a record and its put."""
_OPERATION_HEAD: Final = re.compile(
    rb"\x08\x02\x12" + _VARINT + rb"\x08([\x01-\x05])\x10([\0\x01])\x1a" + _VARINT
)
"""Bytes between the length of an operation record and its key."""
_FORCES: Final = (b"", b"\x18\x01", b"\x18\0")


class RedoOperation(enum.IntEnum):
    """Kind of an operation record; the numbers are those of the format."""

    XA_PREPARE = 1
    XA_COMMIT = 2
    XA_ROLLBACK = 3
    LOCAL_COMMIT = 4
    LOCAL_ROLLBACK = 5


COMMITS: Final = frozenset({RedoOperation.XA_COMMIT, RedoOperation.LOCAL_COMMIT})


_OPERATIONS: Final = tuple(RedoOperation)


def ending_of(key: str, *, is_commit: bool) -> RedoOperation:
    """Return the operation that commits or rolls back a transaction."""
    if is_xa(key):
        return RedoOperation.XA_COMMIT if is_commit else RedoOperation.XA_ROLLBACK
    return RedoOperation.LOCAL_COMMIT if is_commit else RedoOperation.LOCAL_ROLLBACK


class BatchLocation(NamedTuple):
    """Location of a commit's batch in one partition, or a bound before it."""

    log_id: LogId
    offset: Offset
    """Offset of the first byte, or a bound; see the module docstring."""
    size_bytes: int
    checksum: int
    """Checksum of all bytes, 0..2^31-1."""


class PutRecord(NamedTuple):
    """Record of a put of a transaction."""

    key: str
    message_id: MessageId
    command: bytes


class OperationRecord(NamedTuple):
    """Record of a prepare, commit or rollback."""

    operation: RedoOperation
    key: str
    was_prepared: bool
    locations: tuple[BatchLocation, ...]
    """For a commit: one for each partition."""
    bounds: Mapping[LogId, Offset] = MappingProxyType({})
    """First offset of each location; empty in the record of a Java broker."""


class LoggedPut(NamedTuple):
    """The message of a put record."""

    log_id: LogId
    flag: int
    checksum: int
    """Checksum as sent; -1 for none."""
    payload: bytes


class RecordError(ValueError):
    """Bytes that are not a valid record; never leaves this package."""


# -- writing --------------------------------------------------------------------------


@lru_cache(1024)
def varint(number: int) -> bytes:
    """Return a number, as unsigned 64 bits, in protobuf's encoding.

    Cached, because most are lengths, or the common part of ids of one millisecond.
    """
    number &= _U64
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def encode_put(message_id: MessageId, command: bytes) -> bytes:
    """Return the record of a put, given its eight-word line, CRLF and payload."""
    head = b"\x08" + varint(message_id) + b"\x12" + varint(len(command))
    size = len(head) + len(command)
    body = _APPEND_TAG + varint(size)
    length = len(body) + size
    return b"".join((length.to_bytes(LENGTH_BYTES, "big"), body, head, command))


def encode_put_head(message_id: int, size: int) -> bytes:
    """Return the bytes before a put in its record.

    Args:
        message_id: id of the put, above 127.
        size: size of the put in its eight-word form, line and body.
    """
    upper = varint(message_id >> 7)
    before, after = _around_id(size, len(upper))
    return b"%b%c%b%b" % (before, message_id & 0x7F | 0x80, upper, after)


@lru_cache(1024)
def _around_id(size: int, upper_bytes: int) -> tuple[bytes, bytes]:
    """Return the bytes before and after an id of `1 + upper_bytes` bytes."""
    after = b"\x12" + varint(size)
    content = 2 + upper_bytes + len(after) + size
    body = _APPEND_TAG + varint(content)
    length = (len(body) + content).to_bytes(LENGTH_BYTES, "big")
    return length + body + b"\x08", after


def encode_batch(
    log_id: LogId, key: bytes, opaque: int, records: bytearray, positions: Iterable[int]
) -> list[bytes]:
    """Return the records of a batch of messages, in pieces.

    Each message is journalled as a put, because a Java broker knows no batches.

    Args:
        log_id: the partition.
        key: key of the transaction.
        opaque: opaque of the command, used for each put.
        records: the messages in segment format, with their ids stamped.
        positions: start of each message to journal.
    """
    head = b"put %b %d" % (log_id.topic.encode(), log_id.partition)
    tail = b"%b %d\r\n" % (key, opaque)
    unpack = HEADER.unpack_from
    pieces: list[bytes] = []
    for position in positions:
        length, crc, message_id, flag = unpack(records, position)
        line = b"%b %d %d %d %b" % (head, length, flag, crc, tail)
        start = position + HEADER_BYTES
        payload = bytes(records[start : start + length])
        pieces += (encode_put_head(message_id, len(line) + length), line, payload)
    return pieces


def encode_operation(
    operation: RedoOperation,
    key: str,
    *,
    was_prepared: bool = False,
    locations: Sequence[BatchLocation] = (),
    has_bounds: bool = False,
) -> bytes:
    """Return the record of a prepare, commit or rollback, including its attachment.

    With `has_bounds` the offsets of the locations are bounds, and are stored twice.
    """
    name, attachment = key.encode(), encode_locations(locations)
    head = (operation, was_prepared, varint(len(name)), name)
    content = b"\x08%c\x10%c\x1a%b%b" % head
    if operation in COMMITS:
        content += b"\x20" + varint(len(attachment))
    if has_bounds:
        bounds = b"".join([OFFSET.pack(each.offset) for each in sorted(locations)])
        content += _BOUNDS_TAG + varint(len(bounds)) + bounds
    body = b"\x08\x02\x12" + varint(len(content)) + content
    if operation is RedoOperation.XA_PREPARE:
        body += b"\x18\x01"
    return len(body).to_bytes(LENGTH_BYTES, "big") + body + attachment


def encode_locations(locations: Iterable[BatchLocation]) -> bytes:
    """Return the attachment of a commit record."""
    parts = []
    for location in locations:
        name = _name_of(location.log_id)
        parts += [
            LOCATION.pack(
                location.offset, location.size_bytes, location.checksum, len(name)
            ),
            name,
        ]
    return b"".join(parts)


@lru_cache(1024)
def _name_of(log_id: LogId) -> bytes:
    return str(log_id).encode()


def bounds_of(locations: Sequence[BatchLocation], end: int) -> list[tuple[int, Offset]]:
    """Return position and value of each offset in an attachment that ends at `end`."""
    offsets = [location.offset for location in locations]
    return list(zip(offset_positions(locations, end), offsets, strict=True))


# -- reading --------------------------------------------------------------------------


def decode_record(
    data: bytes, position: int, end: int
) -> tuple[PutRecord | OperationRecord, int]:
    """Return the record at a position, and the position after it.

    Raises:
        RecordError: there is no whole record before `end`.
    """
    try:
        return _decode(data, position, end)
    except (IndexError, UnicodeDecodeError, ValueError) as error:
        raise RecordError(f"no record at position {position}: {error}") from error


def _decode(
    data: bytes, position: int, end: int
) -> tuple[PutRecord | OperationRecord, int]:
    start = position + LENGTH_BYTES
    length = int.from_bytes(data[position:start], "big", signed=True)
    stop = start + length
    if start > end or length <= 0 or stop > end:
        raise RecordError(f"expected 1..{end - start} bytes, got {length}")
    if found := _PUT_HEAD.match(data, start, stop):
        # Most records are puts: one match, without a loop over their bytes.
        at = found.end()
        sizes = (stop - found.end(1), stop - at)
        if (_small(found[1]), _small(found[3])) != sizes:
            raise RecordError(f"a put of {sizes[1]} bytes has another length")
        line_end = data.find(b"\r\n", at, stop)
        line = data[at:line_end]
        if line_end < 0 or line.count(b" ") != _PUT_TOKENS - 1 or line[:4] != b"put ":
            raise RecordError("a put without a transaction")
        key = line.rsplit(b" ", 2)[1].decode()
        return PutRecord(key, _read_id(found[2]), data[at:stop]), stop
    return _decode_operation(data, start, stop, end)


def _decode_operation(
    data: bytes, start: int, stop: int, end: int
) -> tuple[OperationRecord, int]:
    found = _OPERATION_HEAD.match(data, start, stop)
    if found is None:
        raise RecordError("neither a put nor an operation")
    name_end, size, bounds = found.end() + _small(found[4]), 0, b""
    at = name_end
    if data[at : at + 1] == b"\x20":
        size, at = read_varint(data, at + 1)
    if data[at : at + 1] == _BOUNDS_TAG:
        length, at = read_varint(data, at + 1)
        bounds, at = data[at : at + length], at + length
    if at != found.end(1) + _small(found[1]) or data[at:stop] not in _FORCES:
        raise RecordError("an operation of another length")
    if not 0 <= size <= end - stop:
        raise RecordError(f"attachment: expected at most {end - stop}, got {size}")
    locations = decode_locations(data[stop : stop + size])
    log_ids = sorted([location.log_id for location in locations])
    if bounds and len(bounds) != OFFSET.size * len(log_ids):
        raise RecordError(f"{len(bounds)} bytes of bounds, {len(log_ids)} locations")
    offsets = [Offset(offset) for (offset,) in OFFSET.iter_unpack(bounds)]
    record = OperationRecord(
        _OPERATIONS[found[2][0] - 1],
        data[found.end() : name_end].decode(),
        found[3] == b"\x01",
        locations,
        dict(zip(log_ids, offsets, strict=False)),
    )
    return record, stop + size


def _small(octets: bytes) -> int:
    """Return the number in a whole varint."""
    return octets[0] if len(octets) == 1 else read_varint(octets, 0)[0]


@lru_cache(1024)
def _read_upper(octets: bytes) -> int:
    """Return the number of a varint without its first byte; cached, as ids share it."""
    return read_varint(octets, 0)[0] << 7


def _read_id(octets: bytes) -> MessageId:
    upper = _read_upper(octets[1:]) if len(octets) > 1 else 0
    return MessageId(_signed((upper | octets[0] & 0x7F) & _U64))


def decode_locations(data: bytes) -> tuple[BatchLocation, ...]:
    """Return the locations in an attachment; RecordError if it is malformed."""
    locations, position = [], 0
    while position < len(data):
        if position + LOCATION.size > len(data):
            raise RecordError("attachment is cut off")
        offset, size, checksum, name_size = LOCATION.unpack_from(data, position)
        position += LOCATION.size
        name = data[position : position + name_size].decode()
        position += name_size
        topic, dash, number = name.rpartition("-")
        is_number = number.isascii() and number.isdigit()
        if not 0 < name_size <= NAME_BYTES_MAX or not dash or not is_number:
            raise RecordError(f"attachment: {name[:80]!r} is no partition")
        if size <= 0 or position > len(data) or offset < -1:
            raise RecordError(f"attachment: {size} bytes at offset {offset}")
        locations.append(
            BatchLocation(LogId(topic, int(number)), Offset(offset), size, checksum)
        )
    return tuple(locations)


def offset_positions(locations: Sequence[BatchLocation], end: int) -> list[int]:
    """Return the position of each offset in an attachment that ends at `end`."""
    found = []
    for location in reversed(locations):
        end -= LOCATION.size + len(_name_of(location.log_id))
        found.append(end)
    return found[::-1]


def decode_put(command: bytes) -> LoggedPut:
    """Return the message of a put; RecordError if it is malformed."""
    line_end = command.find(b"\r\n")
    words = command[:line_end].split(b" ")
    payload = command[line_end + 2 :]
    try:
        if len(words) != _PUT_TOKENS or int(words[3]) != len(payload):
            raise RecordError(f"a put of {len(payload)} bytes: {words[:4]!r}")
        log_id = LogId(words[1].decode(), int(words[2]))
        return LoggedPut(log_id, int(words[4]), int(words[5]), payload)
    except ValueError as error:
        raise RecordError(str(error)) from error


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the number at a position, and the position after it."""
    byte = data[position]
    if byte < 0x80:
        return byte, position + 1
    value = 0
    for shift in range(_VARINT_BYTES_MAX):
        byte = data[position + shift]
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return value & _U64, position + shift + 1
    raise RecordError("expected a number of at most 10 bytes")


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
