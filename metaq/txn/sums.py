"""Checksums of a redo file, in a small file beside it: which of its bytes are valid.

Records of a redo file have no checksum in MetaQ's format. So `redo.N` has a `sums.N`,
which a Java broker ignores: entries of one size, appended, each with its own checksum.

    byte  0       4       8            16           24     28     32
          +-------+-------+------------+------------+------+------+
          | kind  | index | position   | value      | sum  | crc  |
          | u32   | u32   | i64        | i64        | u32  | u32  |
          +-------+-------+------------+------------+------+------+
    head    1       1       N            0            0             first, once
    span    2       0 or 1  first byte   length       CRC-32        bytes written
    synced  3       0       end          0            0             all below is on disk
    bound   5       0       an offset    first value  0             may be overwritten
    beside  6       0       0            0            0             no file is missing

Big-endian; `crc` is the CRC-32 of the 28 bytes before it. Spans are contiguous, from
byte 0 of the redo file on; index 1 means that everything up to the end of the span was
synced. A span is written after its bytes, a `synced` after the sync. So an error in
synced bytes is rot, or a truncated file; an error in others is what a crash left. A
`bound` names an offset in the attachment of a commit, and comes before its span: the
checksum is that of the bytes with the first value, although the offset may have been
overwritten since. (A start does not search from there: the record has that value, too,
and is synced.) A `beside` says that `redo.N` and our other files (`side_files.py`) are
in the directory as long as this file: if one is missing, that is damage. 4 is not used
any more.

Read defensively: entries are trusted from the start as long as each has its checksum
and spans are contiguous. The file is not synced, because it is only a help: a journal
without it, as a Java broker leaves one, is read by its records alone (`recovery.py`).
"""

from dataclasses import dataclass, field
from struct import Struct
from typing import Final, NamedTuple

from metaq.model import Offset
from metaq.record.checksum import BytesLike, crc32, has_crc, with_crc

ENTRY: Final = Struct(">IIqqII")
ENTRY_BYTES: Final = ENTRY.size

HEAD: Final = 1
SPAN: Final = 2
SYNCED: Final = 3
BOUND: Final = 5
BESIDE: Final = 6

VERSION: Final = 1


class SumSpan(NamedTuple):
    """Bytes of a redo file that were written by one call."""

    position: int
    end: int
    checksum: int
    """CRC-32 of the bytes, all 32 bits."""


@dataclass(slots=True)
class Sums:
    """Content of a side file; empty without one."""

    spans: list[SumSpan] = field(default_factory=list)
    synced_end: int = 0
    bounds: dict[int, Offset] = field(default_factory=dict)
    """Position of an offset that may have been overwritten → its first value."""
    is_complete: bool = False
    has_file: bool = False
    """Whether there is a side file, even without content: no Java broker wrote this."""


def encode_entry(
    kind: int, index: int, position: int, value: int = 0, checksum: int = 0
) -> bytes:
    """Return one entry."""
    return with_crc(ENTRY.pack(kind, index, position, value, checksum, 0))


def encode_head(number: int) -> bytes:
    """Return the first entry of the side file of `redo.<number>`."""
    return encode_entry(HEAD, VERSION, number)


def encode_span(position: int, data: BytesLike, *, is_synced: bool) -> bytes:
    """Return the entry for bytes written at a position."""
    return encode_entry(SPAN, is_synced, position, len(data), crc32(data))


def decode_sums(data: bytes, number: int) -> Sums:
    """Return the content of `sums.<number>`; empty if it is not such a file."""
    sums = Sums(has_file=True)
    for at in range(0, len(data) - ENTRY_BYTES + 1, ENTRY_BYTES):
        kind, index, position, value, checksum, _crc = ENTRY.unpack_from(data, at)
        if not has_crc(data[at : at + ENTRY_BYTES]):
            break
        if at == 0:
            if (kind, index, position) != (HEAD, VERSION, number):
                break
        elif kind == SPAN:
            end = sums.spans[-1].end if sums.spans else 0
            if position != end or value <= 0:
                break
            sums.spans.append(SumSpan(position, position + value, checksum))
            if index:
                sums.synced_end = position + value
        elif kind == SYNCED:
            sums.synced_end = max(sums.synced_end, position)
        elif kind == BOUND:
            sums.bounds[position] = Offset(value)
        elif kind == BESIDE:
            sums.is_complete = True
    return sums
