"""Find runs of whole, verified records in bytes of the log; no object per record.

A run is described by its edges, one flat array of positions in the bytes:

    edges:  0        1         2        3         4            2n
            | header | payload | header | payload | ... payload |
            |<--- record 0 --->|<--- record 1 --->|

Producers that care for speed send records of equal size, so that case has a way of its
own: the length fields are compared by strides, and one unpacking iterator feeds the
checksums. Both ways accept and refuse the same bytes.
"""

from array import array
from struct import Struct
from typing import Final

from metaq.record.checksum import CHECKSUM_MASK, crc32
from metaq.record.layout import HEADER_BYTES, ZERO_HEADER

_LENGTH_CHECKSUM: Final = Struct(">ii")
_LENGTH_BYTES: Final = 4
_CHECKSUM_BYTES: Final = 4
_TOP_BIT_CLEARED: Final = bytes(byte & 0x7F for byte in range(256))


def find_run(
    data: memoryview, start: int, *, records_max: int, bytes_max: int, payload_max: int
) -> "array[int]":
    """Return the edges of the whole records from `start` on, each checksum verified.

    Args:
        data: bytes of the log; read, not kept.
        start: position of a record, 0..len(data).
        records_max: end the run after that many records, 1 or more.
        bytes_max: end the run with the first record that reaches this size, so that
            a run has at least one record however large that is.
        payload_max: a longer payload ends the run.

    Returns:
        2n + 1 edges for n records, positions in `data` minus `start`. A run ends at a
        limit, at a record that is cut short by the end of `data`, or at bytes that
        are no record; `metaq.record.scan` distinguishes them.
    """
    view = data[start:]
    edges = _find_uniform(view, records_max, bytes_max, payload_max)
    # After records of equal size there may be some of another size.
    _find_each(view, edges, records_max, bytes_max, payload_max)
    return edges


def _find_uniform(
    view: memoryview, records_max: int, bytes_max: int, payload_max: int
) -> "array[int]":
    """Return the edges if all records have the first one's size and are whole.

    The only edge is 0 where that is not so.
    """
    nothing = array("i", [0])
    if len(view) < HEADER_BYTES:
        return nothing
    length, _stored = _LENGTH_CHECKSUM.unpack_from(view)
    if not 0 < length <= payload_max:
        return nothing
    stride = HEADER_BYTES + length
    count = min(len(view) // stride, records_max, -(-bytes_max // stride))
    last = (count - 1) * stride
    if count < 1 or view[last : last + _LENGTH_BYTES] != view[:_LENGTH_BYTES]:
        return nothing
    run = bytes(view[: count * stride])
    for byte in range(_LENGTH_BYTES):
        if run[byte::stride] != run[byte : byte + 1] * count:
            return nothing
    payloads = [p for (p,) in Struct(f"{HEADER_BYTES}x{length}s").iter_unpack(run)]
    computed = bytearray(Struct(f">{count}I").pack(*map(crc32, payloads)))
    top_bytes = computed[::_CHECKSUM_BYTES].translate(_TOP_BIT_CLEARED)
    computed[::_CHECKSUM_BYTES] = top_bytes
    for byte in range(_CHECKSUM_BYTES):
        if computed[byte::_CHECKSUM_BYTES] != run[_LENGTH_BYTES + byte :: stride]:
            return nothing
    edges = array("i", bytes(nothing.itemsize * (2 * count + 1)))
    edges[0::2] = array("i", range(0, len(run) + 1, stride))
    edges[1::2] = array("i", range(HEADER_BYTES, len(run), stride))
    return edges


def _find_each(
    view: memoryview,
    edges: "array[int]",
    records_max: int,
    bytes_max: int,
    payload_max: int,
) -> None:
    """Go on after the last edge. Flat on purpose: rows pass here one by one."""
    unpack, crc, mask = _LENGTH_CHECKSUM.unpack_from, crc32, CHECKSUM_MASK
    header_bytes, end, append = HEADER_BYTES, len(view), edges.append
    position, left = edges[-1], records_max - len(edges) // 2
    last_start = min(end - header_bytes, bytes_max - 1)
    while position <= last_start and left:
        length, stored = unpack(view, position)
        payload_at = position + header_bytes
        next_position = payload_at + length
        if not 0 <= length <= payload_max or next_position > end:
            break
        if crc(view[payload_at:next_position]) & mask != stored:
            break
        if not length and view[position:payload_at] == ZERO_HEADER:
            break
        append(payload_at)
        append(next_position)
        position = next_position
        left -= 1
