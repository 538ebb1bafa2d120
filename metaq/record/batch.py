"""Check the payload of an `mput` and stamp its ids.

The payload is records exactly as they will be in the segment, with any id (producers
write 0). The checksum of every record is verified before the batch may reach the disk:
a wrong one would later look like rot, and a Java broker would cut the log there.

A large payload comes in blocks, cut anywhere. It is checked in steps of about
STEP_BYTES, and each block becomes a *part*: whole records that are stamped in place and
written from there. So a large batch neither blocks the caller nor needs contiguous
memory, and most batches have one part.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import Final, NamedTuple, TypeAlias

from metaq.model import MessageId, Position
from metaq.record.checksum import CHECKSUM_MASK, checksum, crc32
from metaq.record.ids import id_after, id_runs
from metaq.record.layout import HEADER_BYTES, ID_AT, PAYLOAD_BYTES_MAX

_LENGTH_CHECKSUM: Final = Struct(">ii")
_ID: Final = Struct(">q")

STEP_BYTES: Final = 128 * 1024
"""Bytes of a batch verified in one step: 0.3 ms with small records."""


@dataclass(frozen=True, slots=True)
class BatchError:
    """Reason for refusing a whole batch."""

    position: Position
    """Start of the offending record in the payload; the end of the payload if the
    number of records is wrong."""
    detail: str
    """Description of the fault, with both numbers; part of the 500 reply."""


_Refusal: TypeAlias = BatchError | None


class CheckedRecords(NamedTuple):
    """Some records of a batch: whole ones that match their checksums."""

    records: bytearray
    """Records as they go to disk, except for their ids."""
    positions: Sequence[int]
    """Start of each record in `records`."""


def check_in_steps(
    blocks: Sequence[bytearray],
    count: int,
    *,
    payload_bytes_max: int = PAYLOAD_BYTES_MAX,
    step_bytes: int = STEP_BYTES,
) -> Generator[None, None, BatchError | list[CheckedRecords]]:
    """Verify that `count` records fill the payload, about `step_bytes` a step.

    Args:
        blocks: the payload, cut anywhere; owned from now on, as they become the parts.
        count: expected number of records.
        payload_bytes_max: maximum payload of a record.
        step_bytes: size of a step, exceeded by less than one record.

    Returns:
        The records, for `stamp_in_steps`, if all are whole and match their checksums
        and no bytes are left over; else the first fault. A part is as large as a block,
        and up to one record larger or smaller.
    """
    if count < 1:
        return BatchError(Position(0), f"expected 1 record or more, got {count}")
    checker = _Checker(sum(map(len, blocks)), count, payload_bytes_max, step_bytes)
    for number, block in enumerate(blocks):
        if number:
            yield
        error = yield from checker.take(block)
        if error is not None:
            return error
    return checker.result()


def stamp_in_steps(
    parts: Sequence[CheckedRecords], first_id: MessageId
) -> Iterator[None]:
    """Write ids into verified records; a step is a part, or a run of ids.

    Args:
        parts: result of `check_in_steps`; changed in place.
        first_id: id of the first record; the k-th gets `id_after(first_id, k)`.
    """
    for number, (records, positions) in enumerate(parts):
        if number:
            yield
        yield from _stamp(records, positions, first_id)
        first_id = id_after(first_id, len(positions))


def _stamp(
    records: bytearray, positions: Sequence[int], first_id: MessageId
) -> Iterator[None]:
    write, left = _ID.pack_into, iter(positions)
    for number, ids in enumerate(id_runs(first_id, len(positions))):
        if number:
            yield
        for message_id, position in zip(ids, left, strict=False):
            write(records, position + ID_AT, message_id)


@dataclass(slots=True)
class _Checker:
    """A check in progress: the parts found, and a window with the rest."""

    _end: int
    _count: int
    _payload_bytes_max: int
    _step_bytes: int
    _parts: list[CheckedRecords] = field(default_factory=list)
    _found: int = 0
    _window: bytearray = field(default_factory=bytearray)
    _start: int = 0  # of the window, in the payload

    def take(self, block: bytearray) -> Generator[None, None, _Refusal]:
        """Check all records that are complete with one more block."""
        if self._window:
            self._window += block
        else:
            self._window = block
        position, positions = 0, list[int]()
        with memoryview(self._window) as view:
            while True:
                stop = position + self._step_bytes
                position = _walk(
                    view, position, stop, self._payload_bytes_max, positions
                )
                if position < stop:
                    break
                yield
            error = self._explain(view, position, self._found + len(positions))
        if error is None:
            self._add(positions, position)
        return error

    def result(self) -> BatchError | list[CheckedRecords]:
        """Return the parts after the last block."""
        if self._found != self._count:
            return BatchError(
                Position(self._end),
                f"expected {self._count} records, got {self._found}",
            )
        return self._parts

    def _explain(self, view: memoryview, position: int, number: int) -> _Refusal:
        """Return the fault of a record; None: its rest is in a later block."""
        size, left_bytes = len(view), self._end - self._start - position
        if not left_bytes:
            return None
        if left_bytes < HEADER_BYTES:
            return self._refuse(
                position, f"expected a header of 20 bytes, got {left_bytes}"
            )
        if position + HEADER_BYTES > size:
            return None
        length, stored = _LENGTH_CHECKSUM.unpack_from(view, position)
        left_bytes -= HEADER_BYTES
        if not 0 <= length <= left_bytes:
            return self._refuse(
                position,
                f"record {number}: length {length}, but {left_bytes} bytes follow",
            )
        if length > self._payload_bytes_max:
            return self._refuse(
                position,
                f"record {number}: payload of {length} bytes, expected at most"
                f" {self._payload_bytes_max}",
            )
        start = position + HEADER_BYTES
        if start + length > size:
            return None
        computed = checksum(view[start : start + length])
        return self._refuse(
            position, f"record {number}: expected checksum {stored}, got {computed}"
        )

    def _add(self, positions: Sequence[int], end: int) -> None:
        """Add the window up to `end` as a part, and keep the rest as the window."""
        if not positions:
            return
        rest = self._window[end:]
        del self._window[end:]
        self._parts.append(CheckedRecords(self._window, positions))
        self._found += len(positions)
        self._start += end
        self._window = rest

    def _refuse(self, position: int, detail: str) -> BatchError:
        return BatchError(Position(self._start + position), detail)


def _walk(
    view: memoryview,
    position: int,
    stop: int,
    payload_bytes_max: int,
    positions: list[int],
) -> int:
    """Append positions of valid records before `stop`; return the end of the last."""
    unpack, note = _LENGTH_CHECKSUM.unpack_from, positions.append
    crc, mask, header_bytes, size = crc32, CHECKSUM_MASK, HEADER_BYTES, len(view)
    last = min(stop, size - header_bytes + 1)
    while position < last:
        length, stored = unpack(view, position)
        start = position + header_bytes
        end = start + length
        if not 0 <= length <= payload_bytes_max or end > size:
            break
        if crc(view[start:end]) & mask != stored:
            break
        note(position)
        position = end
    return position
