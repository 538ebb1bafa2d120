"""Which records of a segment have a key or header: blocks in a file beside it.

    name: <base offset, 20 digits>.keys, beside <base offset>.meta

    block     header | slots + 1 rows | entries    back to back, each over whole records
                                                   from where the one before ends
    header    "MQ-KEYS1" | base i64 | end i64 | least id i64 | greatest id i64
              | names u32 | slots u32 | entries u32 | crc u32                  56 bytes
    row       number of the slot's first entry u32 | crc of the slot u32        8 bytes
    entry     hash u32 | position u32, from the block's base on; sorted         8 bytes

Big-endian. A *field* is a key or header as the payload has it, `key=42` or
`h.order-id=7`, and the hash is its CRC-32. `names` is the CRC-32 of the names that are
indexed: a block of others is made again. The hashes of a slot lie next to each other
(`slot_of`), so those of one field are one run in the order of the log.

A question reads the header, two rows and the entries of one slot. Each has a checksum:
that of the header covers the bytes before it, that of a slot its two row numbers, base
and entries. What does not hold together is not believed, and the log is read there. An
entry is only a hint: the record is compared. The file is derived from its segment and
may be short or gone; it never changes an answer. It is made from bytes that have the
checksums of their spans, and cut before other bytes can come (`recovery.py`).
"""

import sys
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

from metaq.fs import FileSystem, ReadFile
from metaq.model import Offset, Position, SizeBytes
from metaq.record.checksum import crc32, has_crc, with_crc
from metaq.record.flags import HAS_BOTH, TEXT_AT, encode_properties
from metaq.record.layout import HEADER as RECORD_HEADER
from metaq.record.layout import HEADER_BYTES

KEYS_SUFFIX: Final = ".keys"
"""Ends the name of the file; MetaQ ignores such names."""

BLOCK_BYTES_MIN: Final = 16 << 20
"""Bytes of the log that a block covers, but for the last one of a sealed segment."""

SLOT_ENTRIES: Final = 8
"""Entries of a slot on average: a row costs as much as one of them."""

KEY_NAME: Final = "key"
"""Stands for the key of a message among the names of headers."""

_MAGIC: Final = b"MQ-KEYS1"
_HEAD: Final = Struct(">8sqqqqIIII")
_ROW: Final = Struct(">II")
_ROWS: Final = Struct(">IIII")
_SLOT: Final = Struct(">qIII")
_ENTRY_BYTES: Final = 8
_LENGTH: Final = Struct(">i")
_HASH_BITS: Final = 32
_LOW: Final = (1 << _HASH_BITS) - 1

HashOf = Callable[[bytes], int]
"""Hash of a field, 32 bits."""


class KeyBlock(NamedTuple):
    """Header of a block, and where it is."""

    position: Position
    """Of the block in its file."""
    base: Offset
    end: Offset
    least_id: int
    """Of the records; below 0 where one of them has no time."""
    greatest_id: int
    slots: int
    entries: int

    @property
    def after(self) -> Position:
        """Return the position after the block."""
        size = _HEAD.size + (self.slots + 1) * _ROW.size + self.entries * _ENTRY_BYTES
        return Position(self.position + size)


def keys_path(segment_path: Path, base: Offset) -> Path:
    """Return the path of the file of a segment."""
    return segment_path.with_name(f"{base:020d}{KEYS_SUFFIX}")


def field_names(names: Sequence[str]) -> tuple[bytes, ...]:
    """Return how fields begin, of a key or headers by name."""
    return tuple(
        b"key=" if name == KEY_NAME else encode_properties(None, [(name, b"")]).encode()
        for name in names
    )


def cut_keys(fs: FileSystem, segment_path: Path, base: Offset, end: Offset) -> None:
    """Remove the blocks that end after `end`; the log may get other bytes there."""
    path = keys_path(segment_path, base)
    file = fs.try_open_read(path)
    if file is not None:
        with file:
            blocks, size = read_blocks(file, base, end), file.size()
        kept = SizeBytes(blocks[-1].after if blocks else 0)
        if kept < size:
            with fs.open_append(path, create=False) as index:
                index.truncate(kept)
                index.sync()


def _digest(names: Sequence[bytes]) -> int:
    return crc32(b"&".join(sorted(names)))


# -- make -----------------------------------------------------------------------------


class BlockMaker:
    """Collects the entries of one block; owner: who reads the records."""

    def __init__(
        self, base: Offset, names: tuple[bytes, ...], hash_of: HashOf = crc32
    ) -> None:
        self._base = base
        self._names = names
        self._hash_of = hash_of
        self._entries: set[int] = set()
        self._ids: list[int] = []

    def add(self, data: bytes, offset: Offset) -> int:
        """Add the whole records in `data`; return their size in bytes."""
        # Flat on purpose: every record of the topic goes through this loop.
        unpack, names, add = RECORD_HEADER.unpack_from, self._names, self._entries.add
        at, size, origin, ids = 0, len(data), offset - self._base, []
        while at + HEADER_BYTES <= size:
            length, _checksum, message_id, flag = unpack(data, at)
            start = at + HEADER_BYTES + TEXT_AT
            after = at + HEADER_BYTES + length
            if after > size or length < 0:
                break
            ids.append(message_id)
            if flag & HAS_BOTH == HAS_BOTH and start <= after:
                (text,) = _LENGTH.unpack_from(data, start - TEXT_AT)
                line = data[start : start + text].partition(b"\n")[0]
                for field in line.split(b"&"):
                    if field.startswith(names):
                        add(self._hash_of(field) << _HASH_BITS | origin + at)
            at = after
        if ids:
            self._ids += (min(ids), max(ids))
        return at

    def encode(self, end: Offset) -> bytes:
        """Return the block, whose records end at `end`."""
        entries = array("Q", sorted(self._entries))
        count = len(entries)
        slots = max(1, count // SLOT_ENTRIES)
        firsts = [
            bisect_left(entries, -(-(slot << _HASH_BITS) // slots) << _HASH_BITS)
            for slot in range(slots + 1)
        ]
        if sys.byteorder == "little":
            entries.byteswap()
        data = entries.tobytes()
        rows = [
            _ROW.pack(first, _slot_crc(self._base, slot, first, after, data))
            for slot, (first, after) in enumerate(pairwise(firsts))
        ]
        ids = min(self._ids, default=-1), max(self._ids, default=-1)
        head = _HEAD.pack(
            _MAGIC, self._base, end, *ids, _digest(self._names), slots, count, 0
        )
        return b"".join((with_crc(head), *rows, _ROW.pack(count, 0), data))


def _slot_crc(base: Offset, slot: int, first: int, after: int, data: bytes) -> int:
    """Return the checksum of a slot; `data` begins with the first entry of all."""
    entries = memoryview(data)[first * _ENTRY_BYTES : after * _ENTRY_BYTES]
    return crc32(entries, crc32(_SLOT.pack(base, slot, first, after)))


# -- read -----------------------------------------------------------------------------


def read_blocks(
    file: ReadFile, base: Offset, end: Offset, names: tuple[bytes, ...] | None = None
) -> list[KeyBlock]:
    """Return the blocks at the start of a file that hold together.

    Args:
        file: the file.
        base: base offset of its segment.
        end: no block that ends later is believed.
        names: names that are indexed; None: any.
    """
    blocks, position, size = list[KeyBlock](), Position(0), file.size()
    while True:
        data = file.read_at(position, SizeBytes(_HEAD.size))
        if len(data) < _HEAD.size or not has_crc(data):
            return blocks
        magic, start, after, least, greatest, *rest = _HEAD.unpack(data)
        known, slots, entries, _crc = rest
        is_known = names is None or known == _digest(names)
        if (magic, start) != (_MAGIC, base) or not is_known or after > end:
            return blocks
        block = KeyBlock(position, start, after, least, greatest, slots, entries)
        if block.after > size:
            return blocks
        blocks.append(block)
        base, position = block.end, block.after


def read_positions(file: ReadFile, block: KeyBlock, hashed: int) -> list[int] | None:
    """Return the positions of a hash, from the block's base on, in log order.

    None: the bytes in question are damaged.
    """
    return first_positions(file, block, hashed, low=0, count_max=block.entries)


def first_positions(
    file: ReadFile, block: KeyBlock, hashed: int, *, low: int, count_max: int
) -> list[int] | None:
    """Return the first positions of a hash at `low` or after it, as `read_positions`.

    What is read at once is all entries of the slot: see `count_entries`.
    """
    slot, rows_at = hashed * block.slots >> _HASH_BITS, block.position + _HEAD.size
    at = Position(rows_at + slot * _ROW.size)
    rows = file.read_at(at, SizeBytes(_ROWS.size))
    if len(rows) < _ROWS.size:
        return None
    first, crc, after, _ = _ROWS.unpack(rows)
    if not first <= after <= block.entries:
        return None
    entries_at = rows_at + (block.slots + 1) * _ROW.size
    at = Position(entries_at + first * _ENTRY_BYTES)
    data = file.read_at(at, SizeBytes((after - first) * _ENTRY_BYTES))
    if crc32(data, crc32(_SLOT.pack(block.base, slot, first, after))) != crc:
        return None
    found = array("Q", data)
    if sys.byteorder == "little":
        found.byteswap()
    first = bisect_left(found, hashed << _HASH_BITS | low)
    after = bisect_left(found, (hashed + 1) << _HASH_BITS, lo=first)
    after = min(after, first + count_max)
    return [entry & _LOW for entry in found[first:after]]


def count_entries(file: ReadFile, block: KeyBlock, hashed: int) -> int:
    """Return the entries of the slot of a hash, as two rows say: not proven.

    A slot has some `SLOT_ENTRIES` of other hashes.
    """
    slot = hashed * block.slots >> _HASH_BITS
    at = Position(block.position + _HEAD.size + slot * _ROW.size)
    rows = file.read_at(at, SizeBytes(_ROWS.size))
    if len(rows) < _ROWS.size:
        return 0
    first, _crc, after, _ = _ROWS.unpack(rows)
    return max(0, int(after) - int(first))
