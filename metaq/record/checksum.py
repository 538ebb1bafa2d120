"""Checksums: MetaQ's, a CRC-32 with its top bit cleared, and those of our own files.

`crc32` is zlib-ng's if that is installed: it takes a third of the time for a record of
128 bytes, and a tenth for a large block (docs/decisions/0043).
"""

import zlib
from collections.abc import Callable, Iterable
from itertools import repeat
from operator import and_
from typing import Final, TypeAlias

from metaq.errors import StorageError

try:
    from zlib_ng.zlib_ng import crc32 as faster_crc32
except ImportError:
    # A platform without it, or a task of Spark that was sent this package alone.
    from zlib import crc32 as faster_crc32

BytesLike: TypeAlias = bytes | bytearray | memoryview
"""Input of the functions of this package, which never keep a reference to it."""

CHECKSUM_MASK: Final = 0x7FFF_FFFF
"""Clears the top bit: MetaQ keeps the checksum in a signed 32-bit field."""

CRC_BYTES: Final = 4
"""Size of the CRC-32 at the end of entries in our own files."""

_TRIED_BYTES: Final = (*range(300), 1 << 12, 1 << 16, 1 << 20)
"""Lengths for which the two CRC-32s are compared: the algorithm depends on it."""

_ALL_BITS: Final = 0xFFFF_FFFF
_ZEROS: Final = memoryview(bytes(1 << 20))


def _choose_crc32() -> Callable[..., int]:
    """Return the faster CRC-32 if it is right on this processor, else zlib's.

    A wrong checksum would be written and trusted until another machine reads it.
    """
    data = memoryview(bytes(range(251)) * (max(_TRIED_BYTES) // 251 + 1))
    is_right = all(
        faster_crc32(data[:size]) == zlib.crc32(data[:size]) for size in _TRIED_BYTES
    )
    return faster_crc32 if is_right else zlib.crc32


crc32: Final = _choose_crc32()
"""CRC-32 of bytes-like data, all 32 bits; a second argument is the CRC-32 of the bytes
before it. Below 5 KiB it does not release the interpreter."""


def checksum(data: BytesLike) -> int:
    """Return the checksum of `data`, 0..2^31-1 (docs/metaq-1.4/broker.md 1.4)."""
    return crc32(data) & CHECKSUM_MASK


def with_crc(packed: bytes) -> bytes:
    """Return packed fields with their CRC-32, big-endian, as the last four bytes."""
    fields = packed[:-CRC_BYTES]
    return fields + crc32(fields).to_bytes(CRC_BYTES, "big")


def has_crc(packed: BytesLike) -> bool:
    """Return whether the last four bytes are the CRC-32 of the bytes before."""
    crc = int.from_bytes(packed[-CRC_BYTES:], "big")
    return crc32(packed[:-CRC_BYTES]) == crc


def with_crc_line(magic: bytes, body: bytes) -> bytes:
    """Return a small text file: a line with `magic` and the body's CRC-32, the body."""
    return b"%s%08x\n%s\n" % (magic, crc32(body), body)


def body_after_crc_line(magic: bytes, data: bytes) -> bytes:
    """Return the body of a file made by `with_crc_line`.

    Raises:
        StorageError: it is not such a file, or it is damaged.
    """
    head, _, rest = data.partition(b"\n")
    body = rest.removesuffix(b"\n")
    expected = b"%s%08x" % (magic, crc32(body))
    if head != expected:
        raise StorageError(
            f"expected a first line {expected.decode()!r}, got {head[:40]!r}"
        )
    return body


def checksums(datas: Iterable[BytesLike]) -> list[int]:
    """Return the checksum of each, without interpreted code per checksum."""
    return list(map(and_, map(crc32, datas), repeat(CHECKSUM_MASK)))


def checksum_of_joined(first: int, second: int, size: int) -> int:
    """Return the CRC-32 of two byte strings joined, given that of each.

    Args:
        first: CRC-32 of the first, all 32 bits.
        second: CRC-32 of the second.
        size: length of the second in bytes.
    """
    # A CRC is linear: appended zeros move the first one to the end of the second.
    value = first ^ _ALL_BITS
    while size > 0:
        value = crc32(_ZEROS[:size], value)
        size -= len(_ZEROS)
    return value ^ _ALL_BITS ^ second
