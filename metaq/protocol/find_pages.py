"""Payload of the reply to a `find` of several partitions. Pure.

    byte  0           4        12       20       24
          +-----------+--------+--------+--------+---------------------+
          | partition | next   | read   | length | length bytes:       |  repeated
          | i32       | i64    | i64    | i32    | runs                |
          +-----------+--------+--------+--------+---------------------+

A page is the reply that a `find` of its partition alone would have: the offset to
continue below, the number of bytes that were scanned, and the records
(`record/runs.py`). A partition without a page was not looked up.
"""

from collections.abc import Iterable
from struct import Struct
from typing import Final, NamedTuple

from metaq.errors import RemoteProtocolError

_PAGE: Final = Struct(">iqqi")

FIND_PARTITIONS_MAX: Final = 64
"""Maximum number of partitions in one `find`."""


class FoundPage(NamedTuple):
    """Part of a reply that belongs to one partition."""

    partition: int
    next_offset: int
    """Continue below this offset; 0 at the end."""
    read_bytes: int
    """Number of bytes of the log that were scanned without an index."""
    runs: bytes
    """The records, newest first."""


def encode_pages(pages: Iterable[FoundPage]) -> bytes:
    """Return the encoded pages, in their order."""
    pieces = list[bytes]()
    for partition, next_offset, read_bytes, runs in pages:
        pieces += (_PAGE.pack(partition, next_offset, read_bytes, len(runs)), runs)
    return b"".join(pieces)


def decode_pages(payload: bytes) -> list[FoundPage]:
    """Return the pages of a reply.

    Raises:
        RemoteProtocolError: a page is cut short, or a number is negative.
    """
    pages, position, size = list[FoundPage](), 0, len(payload)
    while position < size:
        start = position + _PAGE.size
        if start > size:
            raise RemoteProtocolError(
                f"page: expected {_PAGE.size} bytes, got {size - position}"
            )
        partition, after, read, length = _PAGE.unpack_from(payload, position)
        position = start + length
        if min(partition, after, read, length) < 0 or position > size:
            raise RemoteProtocolError(
                f"page of partition {partition}: expected 0 to {size - start} bytes of"
                f" runs, got {length} (next {after}, read {read})"
            )
        pages.append(FoundPage(partition, after, read, payload[start:position]))
    return pages
