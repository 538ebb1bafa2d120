"""Check the payload of an `mput` and stamp its ids.

The payload is records exactly as they will be in the segment, with any id (producers
write 0). Every record's own checksum is verified before the batch may reach the disk:
a wrong one would later look like rot, and a Java broker would cut the log there.

Fast producers send records of equal size, so many such records have their own code
path: lengths and checksums are compared, and ids written, column by column. Both paths
accept and refuse the same batches.

A large payload comes in blocks, cut anywhere. It is checked in steps of about
STEP_BYTES, and each block becomes a *part*: whole records that are stamped in it and
written from it. So a large batch neither blocks the caller nor needs memory in one
piece, and most batches are one part.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from struct import Struct
from typing import Final, NamedTuple, TypeAlias

from metaq.model import MessageId, Position
from metaq.record.checksum import CHECKSUM_MASK, checksum, crc32, pack_checksums
from metaq.record.ids import id_after, id_runs
from metaq.record.layout import CHECKSUM_AT, HEADER_BYTES, ID_AT, PAYLOAD_BYTES_MAX

_LENGTH_CHECKSUM: Final = Struct(">ii")
_ID: Final = Struct(">q")

UNIFORM_COUNT_MIN: Final = 12
"""Fewer records are checked one by one: the path for equal ones has a set-up cost."""


BLOCK_COUNT: Final = 128
"""Records of one length that are taken apart in one call."""

_HIGH_ID_BYTES: Final = 7
_LOW_OCTETS: Final = bytes(range(256))

STEP_BYTES: Final = 128 * 1024
"""Bytes of a batch verified in one step: 0.3 ms with small records."""


@dataclass(frozen=True, slots=True)
class BatchError:
    """Reason for refusing a batch, as a whole."""

    position: Position
    """Start of the offending record in the payload; the payload's end when the number
    of records is wrong."""
    detail: str
    """Description of the fault, with both numbers; part of the 500."""


_Refusal: TypeAlias = BatchError | None


class CheckedRecords(NamedTuple):
    """Some of the records of a batch: whole ones that match their checksums."""

    records: bytearray
    """Records as they go to disk, except for their ids."""
    positions: Sequence[int]
    """Start of each of them, in `records`."""


def check_in_steps(
    blocks: Sequence[bytearray],
    count: int,
    *,
    payload_bytes_max: int = PAYLOAD_BYTES_MAX,
    step_bytes: int = STEP_BYTES,
) -> Generator[None, None, BatchError | list[CheckedRecords]]:
    """Verify `count` records that fill the payload, about `step_bytes` a step.

    Args:
        blocks: the payload, cut anywhere; owned from now on, as they become the parts.
        count: records announced.
        payload_bytes_max: largest payload of a record.
        step_bytes: size of a step, exceeded by less than one record.

    Returns:
        The records, for `stamp_in_steps`, when every one is whole and matches its
        checksum and nothing is left over; else the first fault. A part is as large as a
        block, and up to one record larger or smaller.
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
    return (yield from checker.finish())


def stamp_in_steps(
    parts: Sequence[CheckedRecords], first_id: MessageId
) -> Iterator[None]:
    """Write ids into verified records; a step is a part, or a run of ids.

    Args:
        parts: of a batch, from `check_in_steps`; changed in place.
        first_id: of the first record; the k-th gets `id_after(first_id, k)`.
    """
    for number, (records, positions) in enumerate(parts):
        if number:
            yield
        if isinstance(positions, range):
            _stamp_uniform(records, positions.step, first_id, len(positions))
        else:
            yield from _stamp_each(records, positions, first_id)
        first_id = id_after(first_id, len(positions))


def _stamp_uniform(
    records: bytearray, stride: int, first_id: MessageId, count: int
) -> None:
    """Write the ids into `count` records of `stride` bytes each, headers included."""
    id_at = ID_AT
    for run in id_runs(first_id, count):
        first = run.start
        while first < run.stop:
            # Ids that differ in their last byte only.
            low = first & 0xFF
            step = min(256 - low, run.stop - first)
            octets = first.to_bytes(8, signed=True)
            end = id_at + step * stride
            for octet in range(_HIGH_ID_BYTES):
                high = octets[octet : octet + 1]
                records[id_at + octet : end : stride] = high * step
            records[id_at + _HIGH_ID_BYTES : end : stride] = _LOW_OCTETS[
                low : low + step
            ]
            id_at, first = end, first + step


def _stamp_each(
    records: bytearray, positions: Sequence[int], first_id: MessageId
) -> Iterator[None]:
    write, left = _ID.pack_into, iter(positions)
    for number, ids in enumerate(id_runs(first_id, len(positions))):
        if number:
            yield
        for message_id, position in zip(ids, left, strict=False):
            write(records, position + ID_AT, message_id)


class _Checker:
    """A check under way: the parts found, and a window of the rest."""

    def __init__(
        self, size_bytes: int, count: int, payload_bytes_max: int, step_bytes: int
    ) -> None:
        self._end = size_bytes
        self._count = count
        self._payload_bytes_max = payload_bytes_max
        self._step_bytes = step_bytes
        self._parts: list[CheckedRecords] = []
        self._found = 0
        self._window = bytearray()
        self._start = 0  # of the window, in the payload
        stride, rest = divmod(size_bytes, count)
        self._may_be_uniform = (
            count >= UNIFORM_COUNT_MIN
            and not rest
            and 0 < stride - HEADER_BYTES <= payload_bytes_max
        )
        self._stride = stride

    def take(self, block: bytearray) -> Generator[None, None, _Refusal]:
        """Check all records that are whole with the bytes of one more block."""
        if self._window:
            self._window += block
        else:
            self._window = block
        if self._may_be_uniform and (yield from self._take_uniform()):
            return None
        return (yield from self._take_each())

    def finish(self) -> Generator[None, None, BatchError | list[CheckedRecords]]:
        """Return the result after the last block."""
        # After uniform records less than one of them may be left.
        error = yield from self._take_each()
        if error is None and self._found != self._count:
            return BatchError(
                Position(self._end),
                f"expected {self._count} records, got {self._found}",
            )
        return error or self._parts

    def _take_uniform(self) -> Generator[None, None, bool]:
        """Take the records of the window if all have the expected length."""
        window, stride = self._window, self._stride
        count = len(window) // stride
        step_count = max(1, self._step_bytes // stride)
        for first in range(0, count, step_count):
            if first:
                yield
            some = min(step_count, count - first)
            if not _is_uniform_and_whole(window, first * stride, some, stride):
                return False
        end = count * stride
        self._add(range(0, end, stride), end)
        return True

    def _take_each(self) -> Generator[None, None, _Refusal]:
        """Take the records of the window, one by one."""
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

    def _explain(self, view: memoryview, position: int, number: int) -> _Refusal:
        """Return what is wrong with a record; None: the rest of it is still to come."""
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
            position,
            f"record {number}: expected checksum {stored}, got {computed}",
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


def _is_uniform_and_whole(
    records: bytearray, start: int, count: int, stride: int
) -> bool:
    """Return whether `count` records from `start` on are valid and of one length."""
    end, payload_bytes = start + count * stride, stride - HEADER_BYTES
    for octet, value in enumerate(payload_bytes.to_bytes(4)):
        if records[start + octet : end : stride] != bytes([value]) * count:
            return False
    checksums = pack_checksums(_payloads(records, start, count, payload_bytes))
    return all(
        records[start + CHECKSUM_AT + octet : end : stride] == checksums[octet::4]
        for octet in range(4)
    )


def _payloads(
    records: bytearray, start: int, count: int, payload_bytes: int
) -> list[bytes]:
    """Return the payloads of records of one length."""
    payloads: list[bytes] = []
    while count > 0:
        some = min(count, BLOCK_COUNT)
        payloads += _unpacker(payload_bytes, some)(records, start)
        start += some * (HEADER_BYTES + payload_bytes)
        count -= some
    return payloads


@lru_cache(64)
def _unpacker(payload_bytes: int, count: int) -> Callable[..., tuple[bytes, ...]]:
    """Return a function that takes the payloads out of a block, in one call."""
    return Struct(f"{HEADER_BYTES}x{payload_bytes}s" * count).unpack_from
