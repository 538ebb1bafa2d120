"""The record: the bytes of one message on disk and in a `value` reply.

    byte  0        4          8                    16      20
          +--------+----------+--------------------+-------+-----------------+
          | length | checksum | id                 | flag  | payload[length] |
          | i32    | i32      | i64                | i32   |                 |
          +--------+----------+--------------------+-------+-----------------+

Everything is big-endian and signed. `length` counts only the payload; `checksum` covers
only the payload (the span index detects damage to headers). A record has no topic, time
or magic number, and the next one follows directly: the offset after a record is its own
offset + 20 + length.

A header of 20 zero bytes is not a record here, although the Java broker reads one as an
empty message: no broker stamps the id 0, and file systems fill unwritten tails with
zeros. Keep `scan.py` and `batch.py` in step with this page.
Source: docs/metaq-1.4/broker.md 1.14.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from struct import Struct
from typing import Final

from metaq.model import MessageId, SizeBytes
from metaq.record.checksum import BytesLike, checksum

HEADER: Final = Struct(">iiqi")
"""Length, checksum, id, flag."""

HEADER_BYTES: Final = HEADER.size
"""20."""

ID_AT: Final = 8
"""Position of the id in a record."""

ZERO_HEADER: Final = bytes(HEADER_BYTES)
"""Header of an unwritten tail, which is never a record."""

PAYLOAD_BYTES_MAX: Final = SizeBytes(2**31 - 1)
"""Maximum of the length field; configured limits are far below it."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record, with a copy of its payload."""

    id: MessageId
    """Id stamped by a broker; negative if a Java broker stamped it."""
    flag: int
    """The 32 flag bits as a signed number, stored as the producer sent them."""
    checksum: int
    """Checksum as stored, 0..2^31-1; it matches the payload."""
    payload: bytes
    """Attribute block, if the flag says so, and application bytes."""

    @property
    def size_bytes(self) -> SizeBytes:
        """Return the record's size with its header: the distance to the next one."""
        return SizeBytes(HEADER_BYTES + len(self.payload))


def encode_record(
    payload: BytesLike,
    *,
    id: MessageId,  # noqa: A002  # the field's name in the format
    flag: int = 0,
    payload_checksum: int | None = None,
) -> bytes:
    """Return the bytes of one record.

    Args:
        payload: attribute block and application bytes, copied; < 2^31 bytes.
        id: signed 64-bit id.
        flag: signed 32-bit flags.
        payload_checksum: `checksum(payload)`, if the caller knows it.

    Raises:
        struct.error: a field is out of range, which is a bug of the caller.
    """
    known = checksum(payload) if payload_checksum is None else payload_checksum
    return HEADER.pack(len(payload), known, id, flag) + payload


def encode_records(
    payloads: Sequence[bytes],
    checksums: Sequence[int],
    ids: Sequence[int],
    flags: Sequence[int],
) -> bytes:
    """Return contiguous records, without interpreted code per record.

    Args:
        payloads: attribute blocks and application bytes.
        checksums: checksums of the payloads.
        ids: signed 64-bit ids.
        flags: signed 32-bit flags.
    """
    pieces = [b""] * (2 * len(payloads))
    pieces[0::2] = map(HEADER.pack, map(len, payloads), checksums, ids, flags)
    pieces[1::2] = payloads
    return b"".join(pieces)


def record_starts(payloads: Sequence[bytes], first: int) -> list[int]:
    """Return the offset of each record, the first being `first`, and the end offset."""
    sizes = map(HEADER_BYTES.__add__, map(len, payloads))
    return list(accumulate(sizes, initial=first))


def record_positions(data: bytes | bytearray) -> list[int]:
    """Return the position of each record in whole records."""
    position, positions = 0, list[int]()
    while position < len(data):
        positions.append(position)
        position += HEADER_BYTES + HEADER.unpack_from(data, position)[0]
    return positions
