"""Walk a buffer of records; return where and why the walk ends.

A walk ends with one of three results, never with an exception:

* `CleanEnd`: the last record ends exactly at the end of the buffer;
* `Incomplete`: the end of the buffer cuts a header or payload short: more bytes may
  follow (a window over a file, a slice of a get), or this is a torn tail;
* `Corrupt`: the bytes at that position cannot be a record.

The bytes of a record alone do not distinguish a torn tail from rot: storage decides
that with `find_next_record` and its span index. The walk itself never skips anything.
"""

import enum
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, TypeAlias

from metaq.model import MessageId, Position, SizeBytes
from metaq.record.checksum import CHECKSUM_MASK, BytesLike, checksum, crc32
from metaq.record.layout import (
    HEADER,
    HEADER_BYTES,
    PAYLOAD_BYTES_MAX,
    ZERO_HEADER,
    Record,
)

START: Final = Position(0)
WINDOW_BYTES: Final = 1 << 20
"""Bytes of a file that are read at once."""
HEADER_EFFORT: Final = 1024
"""Bytes whose checksum takes about as long as decoding a header."""
POSITION_EFFORT: Final = 128
"""The same for a position where no header can be."""


class Flaw(enum.Enum):
    """Reason why bytes are not a record; the value is the text for reports."""

    NEGATIVE_LENGTH = "negative length"
    LENGTH_OVER_LIMIT = "length over the limit"
    CHECKSUM_MISMATCH = "checksum mismatch"
    ZERO_HEADER = "all-zero header"


@dataclass(frozen=True, slots=True)
class CleanEnd:
    """The records fill the buffer to its last byte."""

    position: Position
    """End of the last valid record."""
    record_count: int = 0
    last_id: MessageId | None = None
    """Id of the last valid record; None if there was none."""


@dataclass(frozen=True, slots=True)
class Incomplete:
    """The record at `position` is cut short by the end of the buffer."""

    position: Position
    needed_bytes: SizeBytes
    """Size of that record when its header is there, else the size of a header."""
    record_count: int = 0
    last_id: MessageId | None = None


@dataclass(frozen=True, slots=True)
class Corrupt:
    """The bytes at `position` are no record."""

    position: Position
    flaw: Flaw
    detail: str
    record_count: int = 0
    last_id: MessageId | None = None


ScanResult: TypeAlias = CleanEnd | Incomplete | Corrupt


def scan_records(
    buffer: BytesLike,
    start: Position = START,
    *,
    payload_bytes_max: int = PAYLOAD_BYTES_MAX,
    starts: list[Position] | None = None,
) -> ScanResult:
    """Walk the records from `start` to the end of `buffer`, verifying each checksum.

    Args:
        buffer: bytes-like; a `memoryview` of a memory map is fine, and no reference
            to it is kept.
        start: a record boundary, 0..len(buffer).
        payload_bytes_max: a longer payload counts as corruption.
        starts: where given, the position of each valid record is appended to it.

    Returns:
        Where the walk ended and why, with the number of valid records before it.
    """
    # Flat on purpose, and no call for a type of each number: recovery walks a gigabyte
    # through this loop.
    unpack, crc, last = HEADER.unpack_from, crc32, len(buffer) - HEADER_BYTES
    position, end, count, last_id = int(start), len(buffer), 0, None
    add: Callable[[Any], object] | None = None if starts is None else starts.append
    with memoryview(buffer) as view:
        while position <= last:
            length, stored, message_id, _flag = unpack(view, position)
            first = position + HEADER_BYTES
            after = first + length
            if not 0 <= length <= payload_bytes_max or after > end:
                break
            if crc(view[first:after]) & CHECKSUM_MASK != stored:
                break
            if not length and view[position:after] == ZERO_HEADER:
                break
            if add is not None:
                add(position)
            count, last_id, position = count + 1, message_id, after
        last_id = None if last_id is None else MessageId(last_id)
        return _end_of_walk(view, Position(position), payload_bytes_max, count, last_id)


def _end_of_walk(
    view: memoryview,
    position: Position,
    payload_bytes_max: int,
    count: int,
    last_id: MessageId | None,
) -> ScanResult:
    """Return why the walk stopped at `position`."""
    left = len(view) - position
    if left == 0:
        return CleanEnd(position, count, last_id)
    if left < HEADER_BYTES:
        return Incomplete(position, SizeBytes(HEADER_BYTES), count, last_id)
    length, stored, _message_id, _flag = HEADER.unpack_from(view, position)
    if length < 0:
        flaw, detail = Flaw.NEGATIVE_LENGTH, f"length {length}"
    elif length > payload_bytes_max:
        flaw = Flaw.LENGTH_OVER_LIMIT
        detail = f"length {length}, the limit is {payload_bytes_max}"
    elif HEADER_BYTES + length > left:
        return Incomplete(position, SizeBytes(HEADER_BYTES + length), count, last_id)
    elif view[position : position + HEADER_BYTES] == ZERO_HEADER:
        flaw, detail = Flaw.ZERO_HEADER, "20 zero bytes where a header should be"
    else:
        start = position + HEADER_BYTES
        computed = checksum(view[start : start + length])
        flaw = Flaw.CHECKSUM_MISMATCH
        detail = f"checksum: expected {stored}, got {computed} over {length} bytes"
    return Corrupt(position, flaw, detail, count, last_id)


def read_record(
    buffer: BytesLike,
    position: Position = START,
    *,
    payload_bytes_max: int = PAYLOAD_BYTES_MAX,
) -> Record | ScanResult:
    """Return the record at `position`, or why there is none.

    Args:
        buffer: bytes-like; the payload is copied out of it.
        position: a record boundary, 0..len(buffer).
        payload_bytes_max: a longer payload counts as corruption.

    Returns:
        The record; `CleanEnd` at the end of the buffer; else `Incomplete` or
        `Corrupt` at `position`.
    """
    with memoryview(buffer) as view:
        if position + HEADER_BYTES <= len(view):
            length, stored, message_id, flag = HEADER.unpack_from(view, position)
            start = position + HEADER_BYTES
            if (
                0 <= length <= min(payload_bytes_max, len(view) - start)
                and checksum(view[start : start + length]) == stored
                and (length or view[position:start] != ZERO_HEADER)
            ):
                payload = bytes(view[start : start + length])
                return Record(MessageId(message_id), flag, stored, payload)
        return _end_of_walk(view, position, payload_bytes_max, 0, None)


_BLANK: Final = bytes(8)
"""Start of an empty record: length and checksum are 0."""


def iter_records(
    read: Callable[[Position, SizeBytes], bytes],
    start: Position,
    end: Position,
    *,
    window_bytes: int = WINDOW_BYTES,
    payload_bytes_max: int = PAYLOAD_BYTES_MAX,
) -> Iterator[tuple[Position, Record] | Corrupt | Incomplete]:
    """Yield each record of a file with its position, then the fault that ends the walk.

    A walk that ends at `end`, or at the end of the file, yields no fault.

    Args:
        read: reads the file at a position; returns fewer bytes only at its end.
        start: a record boundary.
        end: end of the walk, at most the size of the file.
        window_bytes: bytes read at once; a larger record is read by itself.
        payload_bytes_max: a longer payload counts as corruption.
    """
    window, base = b"", start
    position = start
    while position < end:
        result = read_record(
            window, Position(position - base), payload_bytes_max=payload_bytes_max
        )
        if isinstance(result, Record):
            yield position, result
            position = Position(position + result.size_bytes)
            continue
        needed = result.needed_bytes if isinstance(result, Incomplete) else 0
        have_end = base + len(window)
        if isinstance(result, Corrupt) or (
            isinstance(result, Incomplete)
            and (have_end >= end or position + needed > end)
        ):
            yield result
            return
        size = min(max(window_bytes, needed), end - position)
        base = position
        window = read(position, SizeBytes(size))
        if len(window) < size:
            end = Position(base + len(window))


@cache
def _candidates(top: int) -> re.Pattern[bytes]:
    """Return a pattern for records whose length has a first byte of at most `top`."""
    # Look-ahead, so that candidates may overlap: a length whose first byte fits
    # the limit, a checksum without its top bit, and not 20 zero bytes.
    return re.compile(rb"(?=[\x00-\x%02x].{3}[\x00-\x7f])(?!\x00{20})" % top, re.DOTALL)


def find_next_record(
    buffer: BytesLike,
    start: Position = START,
    limit: Position | None = None,
    *,
    payload_bytes_max: int = PAYLOAD_BYTES_MAX,
) -> Position | None:
    """Return the position of the next whole record, searching byte by byte.

    An empty payload has the checksum 0, so any eight zero bytes before other bytes look
    like an empty record. One counts only if it leads, directly or through empty ones,
    to a record with a payload, or exactly to the end of the buffer.

    Args:
        buffer: bytes-like; no reference to it is kept.
        start: first position to try.
        limit: position after the last one to try; None: the end of the buffer.
        payload_bytes_max: records with longer payloads are not found. A smaller limit
            is
            faster: text is skipped at the speed of a regular expression.

    Returns:
        The position, or None if no whole record starts in [start, limit).
    """
    found, position = search_next_record(
        buffer, start, limit, payload_bytes_max=payload_bytes_max, effort_max=math.inf
    )
    return position if found else None


def search_next_record(
    buffer: BytesLike,
    start: Position,
    limit: Position | None = None,
    *,
    payload_bytes_max: int = PAYLOAD_BYTES_MAX,
    effort_max: float,
) -> tuple[bool, Position]:
    """Search as `find_next_record` does, with a bound on the effort.

    In malicious bytes a long record seems to begin at every one, and the checksum of
    each has to be computed.

    Args:
        buffer: as in `find_next_record`, like the next three.
        start: first position to try.
        limit: position after the last one to try.
        payload_bytes_max: records with longer payloads are not found.
        effort_max: bytes of failed checksums after which the search ends; a header
            counts as HEADER_EFFORT, and a position as POSITION_EFFORT.

    Returns:
        (True, position of the record); else (False, first position not tried), which is
        the end of the buffer if all were.
    """
    with memoryview(buffer) as view:
        end = len(view)
        stop = end if limit is None else min(limit, end)
        reach = int(min(stop, start + effort_max / POSITION_EFFORT))
        longest = max(0, min(payload_bytes_max, end - start))
        pattern, effort = _candidates(longest >> 24), 0
        for match in pattern.finditer(view, start, reach + HEADER_BYTES):
            position = match.start()
            if position >= reach or position + HEADER_BYTES > end:
                break
            is_good, spent = _leads_to_payload(view, position, payload_bytes_max)
            if is_good:
                return True, Position(position)
            effort += spent
            if effort > effort_max:
                return False, Position(position + 1)
        return False, Position(end if reach == stop else reach)


def _leads_to_payload(
    view: memoryview, position: int, payload_bytes_max: int
) -> tuple[bool, int]:
    """Return whether a record is there, not just zero bytes, and the effort."""
    end, effort = len(view), 0
    while position < end:
        effort += HEADER_EFFORT
        if position + HEADER_BYTES > end:
            return False, effort
        length, stored, _message_id, _flag = HEADER.unpack_from(view, position)
        start = position + HEADER_BYTES
        if not 0 <= length <= min(payload_bytes_max, end - start):
            return False, effort
        if length:
            computed = checksum(view[start : start + length])
            return computed == int(stored), effort + length
        if stored or view[position:start] == ZERO_HEADER:
            return False, effort
        position = start
    return True, effort


def is_blank_to_end(buffer: BytesLike, position: Position) -> bool:
    """Return whether all bytes from `position` on look like empty records.

    Eight zero bytes look like one; before the end of the buffer they may be a part of
    something larger.
    """
    at = int(position)
    with memoryview(buffer) as view:
        while at < len(view) and view[at : at + len(_BLANK)] == _BLANK:
            at += HEADER_BYTES
        return at >= len(view)
