"""Check the payload of an `mput` and stamp its ids, in place.

The payload is records exactly as they will lie in the segment, with any id (producers
write 0). Every record's own checksum is verified before the batch may reach the disk:
a wrong one would later look like rot, and a Java broker would cut the log there.

Producers that care for speed send records of equal size, so that case has a way of
its own where they are many: lengths and checksums are compared, and ids written,
column by column (`uniform.py`). Both ways accept and refuse the same batches.
"""

from dataclasses import dataclass
from itertools import chain
from struct import Struct
from typing import Final
from zlib import crc32

from metaq.model import MessageId, Position
from metaq.record.checksum import CHECKSUM_MASK, pack_checksums
from metaq.record.ids import CARRY, SEQUENCE_MASK
from metaq.record.layout import CHECKSUM_AT, HEADER_BYTES, ID_AT, PAYLOAD_BYTES_MAX
from metaq.record.uniform import stamp_ids

_LENGTH_CHECKSUM: Final = Struct(">ii")
_ID: Final = Struct(">q")

UNIFORM_COUNT_MIN: Final = 12
"""Fewer records are looked at one by one: the way of equal ones has a set-up."""


@dataclass(frozen=True, slots=True)
class BatchError:
    """Why a batch is refused, whole."""

    position: Position
    """Start of the offending record in the payload; the payload's end when the
    number of records is what is wrong."""
    detail: str
    """What is wrong, with both numbers; goes into the 500."""


def check_and_stamp(
    buffer: bytearray,
    count: int,
    first_id: MessageId,
    *,
    payload_bytes_max: int = PAYLOAD_BYTES_MAX,
) -> BatchError | None:
    """Verify `count` records that fill `buffer`, and write their ids into them.

    Args:
        buffer: the payload; changed in place. After an error its ids are undefined.
        count: records announced.
        first_id: id of the first record; the k-th gets `id_after(first_id, k)`.
        payload_bytes_max: largest payload of a record.

    Returns:
        None when every record is whole and matches its checksum and nothing is left
        over; else the first thing that is wrong.
    """
    if count < 1:
        return BatchError(Position(0), f"expected 1 record or more, got {count}")
    stride, rest = divmod(len(buffer), count)
    payload_bytes = stride - HEADER_BYTES
    if (
        count >= UNIFORM_COUNT_MIN
        and not rest
        and 0 < payload_bytes <= payload_bytes_max
        and _is_uniform_and_whole(buffer, count, payload_bytes)
    ):
        stamp_ids(buffer, stride, first_id, count)
        return None
    return _check_and_stamp_each(buffer, count, first_id, payload_bytes_max)


def _is_uniform_and_whole(buffer: bytearray, count: int, payload_bytes: int) -> bool:
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


def _check_and_stamp_each(
    buffer: bytearray, count: int, first_id: MessageId, payload_bytes_max: int
) -> BatchError | None:
    unpack, stamp, crc = _LENGTH_CHECKSUM.unpack_from, _ID.pack_into, crc32
    end, position, seen, next_id = len(buffer), 0, 0, int(first_id)
    payload_at, mask = HEADER_BYTES, CHECKSUM_MASK
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
                    f"record {seen}: length {length}, but {left} bytes follow",
                )
            if length > payload_bytes_max:
                return BatchError(
                    Position(position),
                    f"record {seen}: payload of {length} bytes, expected at most"
                    f" {payload_bytes_max}",
                )
            computed = crc(view[position + payload_at : next_position]) & mask
            if computed != stored:
                return BatchError(
                    Position(position),
                    f"record {seen}: expected checksum {stored}, got {computed}",
                )
            stamp(buffer, position + ID_AT, next_id)
            seen, position, next_id = seen + 1, next_position, next_id + 1
            if not next_id & SEQUENCE_MASK:
                next_id += CARRY
    if seen != count:
        return BatchError(Position(end), f"expected {count} records, got {seen}")
    return None
