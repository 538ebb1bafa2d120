"""Check the payload of an `mput` and stamp its ids, in place.

The payload is records exactly as they will lie in the segment, with any id (producers
write 0). Every record's own checksum is verified before the batch may reach the disk:
a wrong one would later look like rot, and a Java broker would cut the log there.

Producers that care for speed send records of equal size, so that case has a way of
its own where they are many: lengths and checksums are compared, and ids written,
column by column (`uniform.py`). Both ways accept and refuse the same batches, and go in
steps, so that a large batch need not hold up the caller.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from struct import Struct
from typing import Final
from zlib import crc32

from metaq.model import MessageId, Position
from metaq.record.checksum import CHECKSUM_MASK, pack_checksums
from metaq.record.ids import id_runs
from metaq.record.layout import CHECKSUM_AT, HEADER_BYTES, ID_AT, PAYLOAD_BYTES_MAX
from metaq.record.uniform import stamp_ids

_LENGTH_CHECKSUM: Final = Struct(">ii")
_ID: Final = Struct(">q")

UNIFORM_COUNT_MIN: Final = 12
"""Fewer records are looked at one by one: the way of equal ones has a set-up."""


STEP_BYTES: Final = 256 * 1024
"""Bytes of a batch verified in one step: less than a millisecond with small records."""


@dataclass(frozen=True, slots=True)
class BatchError:
    """Reason for refusing a batch, as a whole."""

    position: Position
    """Start of the offending record in the payload; the payload's end when the number
    of records is wrong."""
    detail: str
    """Description of the fault, with both numbers; goes into the 500."""


def check_in_steps(
    buffer: bytes | bytearray, count: int, *, payload_bytes_max: int = PAYLOAD_BYTES_MAX
) -> Generator[None, None, BatchError | Sequence[int]]:
    """Verify `count` records that fill `buffer`, about STEP_BYTES a step.

    Args:
        buffer: the payload; not changed, and must not change between two steps.
        count: records announced.
        payload_bytes_max: largest payload of a record.

    Returns:
        Where each record begins, for `stamp`, when every record is whole and matches
        its checksum and nothing is left over; else the first thing that is wrong.
    """
    if count < 1:
        return BatchError(Position(0), f"expected 1 record or more, got {count}")
    stride, rest = divmod(len(buffer), count)
    payload_bytes = stride - HEADER_BYTES
    if (
        count >= UNIFORM_COUNT_MIN
        and not rest
        and 0 < payload_bytes <= payload_bytes_max
        and (yield from _are_uniform_and_whole(buffer, count, payload_bytes))
    ):
        return range(0, len(buffer), stride)
    return (yield from _check_each(buffer, count, payload_bytes_max))


def stamp(buffer: bytearray, positions: Sequence[int], first_id: MessageId) -> None:
    """Write ids into verified records; the k-th gets `id_after(first_id, k)`.

    Args:
        buffer: the records; changed in place.
        positions: where each begins, from `check_in_steps`.
        first_id: of the first one.
    """
    if isinstance(positions, range):
        stamp_ids(buffer, positions.step, first_id, len(positions))
        return
    write, done = _ID.pack_into, 0
    for ids in id_runs(first_id, len(positions)):
        for position, number in zip(islice(positions, done, None), ids, strict=False):
            write(buffer, position + ID_AT, number)
        done += len(ids)


def _are_uniform_and_whole(
    buffer: bytes | bytearray, count: int, payload_bytes: int
) -> Generator[None, None, bool]:
    stride = HEADER_BYTES + payload_bytes
    step = max(1, STEP_BYTES // stride)
    if count <= step:
        return _is_uniform_and_whole(buffer, count, payload_bytes)
    for first in range(0, count, step):
        part = buffer[first * stride : (first + step) * stride]
        if not _is_uniform_and_whole(part, len(part) // stride, payload_bytes):
            return False
        yield
    return True


def _is_uniform_and_whole(
    buffer: bytes | bytearray, count: int, payload_bytes: int
) -> bool:
    stride = HEADER_BYTES + payload_bytes
    for octet, value in enumerate(payload_bytes.to_bytes(4)):
        if buffer[octet::stride] != bytes([value]) * count:
            return False
    payloads = Struct(f"{HEADER_BYTES}x{payload_bytes}s").iter_unpack(buffer)
    checksums = pack_checksums(chain.from_iterable(payloads))
    return all(
        buffer[CHECKSUM_AT + octet :: stride] == checksums[octet::4]
        for octet in range(4)
    )


def _check_each(
    buffer: bytes | bytearray, count: int, payload_bytes_max: int
) -> Generator[None, None, BatchError | Sequence[int]]:
    unpack, crc = _LENGTH_CHECKSUM.unpack_from, crc32
    end, position, step_end = len(buffer), 0, STEP_BYTES
    payload_at, mask = HEADER_BYTES, CHECKSUM_MASK
    positions: list[int] = []
    with memoryview(buffer) as view:
        while position < end:
            if position + HEADER_BYTES > end:
                return BatchError(
                    Position(position),
                    f"expected a header of 20 bytes, got {end - position}",
                )
            length, stored = unpack(buffer, position)
            next_position = position + payload_at + length
            if length < 0 or next_position > end:
                left = end - position - HEADER_BYTES
                return BatchError(
                    Position(position),
                    f"record {len(positions)}: length {length}, but {left} bytes"
                    " follow",
                )
            if length > payload_bytes_max:
                return BatchError(
                    Position(position),
                    f"record {len(positions)}: payload of {length} bytes, expected at"
                    f" most {payload_bytes_max}",
                )
            computed = crc(view[position + payload_at : next_position]) & mask
            if computed != stored:
                return BatchError(
                    Position(position),
                    f"record {len(positions)}: expected checksum {stored}, got"
                    f" {computed}",
                )
            positions.append(position)
            position = next_position
            if position >= step_end:
                step_end = position + STEP_BYTES
                yield
    if len(positions) != count:
        return BatchError(
            Position(end), f"expected {count} records, got {len(positions)}"
        )
    return positions
