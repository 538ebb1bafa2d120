"""Runs: whole records of one partition that are not contiguous. Pure.

    byte  0          8            12
          +----------+------------+-----------------------+
          | offset   | length     | length bytes of whole |   repeated
          | i64      | i32        | records               |
          +----------+------------+-----------------------+

The offset is that of the first record, and the records of a run are contiguous in the
log. Runs come in any order. The reply with them has the offset to continue at
(`next=`), so no reader stops inside a record, or waits where nothing was sent.
"""

from collections.abc import Iterable, Iterator
from struct import Struct
from typing import Final, NamedTuple

from metaq.errors import CorruptRecordError
from metaq.model import Offset
from metaq.record.layout import HEADER, HEADER_BYTES

_RUN: Final = Struct(">qi")

RUN_BYTES: Final = _RUN.size
"""12: size of the header of a run."""


class RecordRun(NamedTuple):
    """Contiguous records of a log."""

    offset: Offset
    """Offset of the first record."""
    data: bytes
    """Whole records, at least one."""


def encode_runs(runs: Iterable[RecordRun]) -> bytes:
    """Return the encoded runs, in their order."""
    pieces = list[bytes]()
    for offset, data in runs:
        pieces += (_RUN.pack(offset, len(data)), data)
    return b"".join(pieces)


def decode_runs(payload: bytes, position: int = 0) -> list[RecordRun]:
    """Return the runs in a payload, from `position` to its end.

    Raises:
        CorruptRecordError: a run is cut short, has no record, or a negative offset.
    """
    runs, size = list[RecordRun](), len(payload)
    while position < size:
        if position + RUN_BYTES > size:
            raise CorruptRecordError(
                f"run: expected {RUN_BYTES} bytes, got {size - position}"
            )
        offset, length = _RUN.unpack_from(payload, position)
        position += RUN_BYTES
        if offset < 0 or not 1 <= length <= size - position:
            raise CorruptRecordError(
                f"run at offset {offset}: expected 1 to {size - position} bytes of"
                f" records, got {length}"
            )
        runs.append(RecordRun(Offset(offset), payload[position : position + length]))
        position += length
    return runs


def records_of(run: RecordRun) -> Iterator[RecordRun]:
    """Yield each record as its own run, in order, without verifying checksums.

    Raises:
        CorruptRecordError: the bytes are not whole records.
    """
    offset, data = run
    position, size = 0, len(data)
    while position < size:
        length = -1
        if position + HEADER_BYTES <= size:
            length = HEADER.unpack_from(data, position)[0]
        end = position + HEADER_BYTES + length
        if length < 0 or end > size:
            raise CorruptRecordError(
                f"run at offset {offset}: no whole record at byte {position} of {size}"
            )
        yield RecordRun(Offset(offset + position), data[position:end])
        position = end
