"""The one checksum of the format: CRC-32 with its top bit cleared."""

from typing import Final, TypeAlias
from zlib import crc32

BytesLike: TypeAlias = bytes | bytearray | memoryview
"""What the functions of this package read; they never keep a reference to it."""

CHECKSUM_MASK: Final = 0x7FFF_FFFF
"""Clears the top bit: MetaQ keeps the checksum in a signed 32-bit field."""


def checksum(data: BytesLike) -> int:
    """Return the checksum of `data`, 0..2^31-1 (broker spec 1.4).

    Args:
        data: bytes-like, contiguous; read, not kept.

    Returns:
        zlib's CRC-32 with the top bit cleared; 0 for no bytes.
    """
    return crc32(data) & CHECKSUM_MASK
