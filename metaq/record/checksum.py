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


def pack_checksums(datas: Iterable[BytesLike]) -> bytes:
    """Return the checksums of many, four octets each, as records carry them.

    No interpreted instruction runs per checksum.

    Args:
        datas: bytes-like, contiguous each; read, not kept.

    Returns:
        Big-endian numbers, one behind the other; `[k::4]` are the k-th octets of all.
    """
    raw = array("I", map(crc32, datas))
    if _IS_LITTLE_ENDIAN:
        raw.byteswap()
    octets = bytearray(raw.tobytes())
    octets[0::4] = octets[0::4].translate(_CLEAR_TOP_BIT)
    return bytes(octets)
