"""The one checksum of the format: CRC-32 with its top bit cleared."""

import sys
from array import array
from collections.abc import Iterable
from typing import Final, TypeAlias
from zlib import crc32

BytesLike: TypeAlias = bytes | bytearray | memoryview
"""What the functions of this package read; they never keep a reference to it."""

CHECKSUM_MASK: Final = 0x7FFF_FFFF
"""Clears the top bit: MetaQ keeps the checksum in a signed 32-bit field."""

_IS_LITTLE_ENDIAN: Final = sys.byteorder == "little"
_CLEAR_TOP_BIT: Final = bytes(octet & 0x7F for octet in range(256))


def checksum(data: BytesLike) -> int:
    """Return the checksum of `data`, 0..2^31-1 (broker spec 1.4).

    Args:
        data: bytes-like, contiguous; read, not kept.

    Returns:
        zlib's CRC-32 with the top bit cleared; 0 for no bytes.
    """
    return crc32(data) & CHECKSUM_MASK


def checksum_columns(datas: Iterable[BytesLike]) -> tuple[bytes, bytes, bytes, bytes]:
    """Return the checksums of many, as strided slices over equal records show them.

    No interpreted instruction runs per checksum.

    Args:
        datas: bytes-like, contiguous each; read, not kept.

    Returns:
        The first octets of all checksums, their second ones, and so on; the most
        significant octet is the first.
    """
    raw = array("I", map(crc32, datas))
    if _IS_LITTLE_ENDIAN:
        raw.byteswap()
    octets = raw.tobytes()
    top = octets[0::4].translate(_CLEAR_TOP_BIT)
    return top, octets[1::4], octets[2::4], octets[3::4]
