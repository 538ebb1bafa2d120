"""Index of the records of a segment by key or header: blocks in a file beside it.

    name: <base offset, 20 digits>.keys, beside <base offset>.meta

    block     header | pages of entries | pages + 1 rows                contiguous
    header    "MQ-KEYS2" | base of the segment i64 | base i64 | end i64
              | least id i64 | greatest id i64 | names u32 | entries u32 | crc u32
    page      64 entries, the last page fewer | crc u32                       516 bytes
    entry     28 bits of the hash, 34 of the position in the segment; sorted    8 bytes
    row       number of the page with the first entry of a slot u32             4 bytes

Big-endian. A *field* is a key or header as encoded in the payload, `key=42` or
`h.order-id=7`, and the hash is its CRC-32, without the lowest bits. `names` is the
CRC-32 of the indexed names: a block with other names is made again.

A block covers whole records from the end of another one on, and the file only grows: a
block with the base of an earlier one is a merge of that one and all later ones, and
replaces them. So ends of blocks ascend in the file, and a truncated file belongs to a
truncated log. When most of the file is replaced blocks, it is rewritten and renamed.

A lookup reads two rows and one or two pages. The entries of one field are contiguous,
in the order of the log. Rows only hint at the page; pages prove it. The checksum of the
header covers the bytes before it, and that of a page its entries, its number and the
checksum of the header. Inconsistent parts are not used, and the log is read instead. An
entry is only a hint: the record is compared. The file is derived from its segment and
may be short or missing; it never changes a result. It is made from bytes that match the
checksums of their spans, and cut before other bytes can be written (`recovery.py`).
"""

import sys
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

from metaq.fs import FileSystem, ReadFile
from metaq.model import Offset, Position, SizeBytes
from metaq.record.checksum import crc32, has_crc
from metaq.record.flags import encode_properties

KEYS_SUFFIX: Final = ".keys"
"""Suffix of key index files; MetaQ ignores such names."""

POSITION_BITS: Final = 34
SEGMENT_BYTES_MAX: Final = 1 << POSITION_BITS
"""Maximum number of indexed bytes of a segment: 16 GiB."""
HASH_BITS: Final = 28
"""One of 2^28 other fields has the same hash, and is compared in vain."""

PAGE_ENTRIES: Final = 64
ENTRY_BYTES: Final = 8
PAGE: Final = PAGE_ENTRIES * ENTRY_BYTES
"""Size of the entries of a full page, bytes."""

KEY_NAME: Final = "key"
"""Name for the key of a message among the names of headers."""

MAGIC: Final = b"MQ-KEYS2"
HEAD: Final = Struct(">8sqqqqqIII")
_CRC: Final = Struct(">I")
_CRC_BYTES: Final = _CRC.size
_ROWS: Final = Struct(">II")
_ROW_BYTES: Final = 4
_PAGES_AT_ONCE: Final = 4
_HASH_SHIFT: Final = 32 - HASH_BITS
_POSITION: Final = SEGMENT_BYTES_MAX - 1

_FAR: Final = Offset((1 << 63) - 1)

LISTS_MAX: Final = 1024
"""Size of the cache of block lists, in files; a full cache is emptied."""

HashOf = Callable[[bytes], int]
"""Function that returns the 32-bit hash of a field."""


class DamagedIndexError(Exception):
    """The index bytes that a lookup needs are damaged; never raised to callers."""


class KeyBlock(NamedTuple):
    """Header of a block, and its position."""

    position: Position
    """Position of the block in its file."""
    origin: Offset
    """Base offset of the segment."""
    base: Offset
    end: Offset
    least_id: int
    """Least id of the records; negative if one of them has no time."""
    greatest_id: int
    entries: int
    crc: int
    """Checksum of the header."""

    @property
    def size_bytes(self) -> int:
        """Return the number of bytes of the log that the block covers."""
        return self.end - self.base

    @property
    def file_bytes(self) -> int:
        """Return the size of the block in the file, bytes."""
        return self.after - self.position

    @property
    def pages(self) -> int:
        """Return the number of pages."""
        return -(-self.entries // PAGE_ENTRIES)

    @property
    def rows_at(self) -> int:
        """Return the position of the rows."""
        data = self.entries * ENTRY_BYTES + self.pages * _CRC_BYTES
        return self.position + HEAD.size + data

    @property
    def after(self) -> Position:
        """Return the position after the block."""
        return Position(self.rows_at + (self.pages + 1) * _ROW_BYTES)


def keys_path(segment_path: Path, base: Offset) -> Path:
    """Return the path of a segment's key index."""
    return segment_path.with_name(f"{base:020d}{KEYS_SUFFIX}")


@lru_cache
def field_names(names: tuple[str, ...]) -> tuple[bytes, ...]:
    """Return the prefixes of fields, for the key or for headers by name."""
    return tuple(
        b"key=" if name == KEY_NAME else encode_properties(None, [(name, b"")]).encode()
        for name in names
    )


def names_digest(names: Sequence[bytes]) -> int:
    """Return the digest of the indexed names, as stored in a block."""
    return crc32(b"&".join(sorted(names)))


def entry_of(hashed: int, position: int) -> int:
    """Return the entry of a 32-bit hash and a position in the segment."""
    return hashed >> _HASH_SHIFT << POSITION_BITS | position


def cut_keys(fs: FileSystem, segment_path: Path, base: Offset, end: Offset) -> None:
    """Remove blocks that end after `end`, because the log may get other bytes there."""
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


# -- blocks of a file -----------------------------------------------------------------


def read_blocks(
    file: ReadFile, base: Offset, end: Offset, names: tuple[bytes, ...] | None = None
) -> list[KeyBlock]:
    """Return the valid blocks of a file, in the order of the log.

    Args:
        file: the file.
        base: base offset of its segment.
        end: a block that ends later is ignored, and so are all after it.
        names: prefixes of the indexed fields; None: any.
    """
    blocks, position, size = list[KeyBlock](), Position(0), file.size()
    while True:
        data = file.read_at(position, SizeBytes(HEAD.size))
        if len(data) < HEAD.size or not has_crc(data):
            return blocks
        magic, origin, *bounds, least, greatest, known, entries, crc = HEAD.unpack(data)
        start, after = bounds
        is_known = names is None or known == names_digest(names)
        if (magic, origin) != (MAGIC, base) or not is_known or after > end:
            return blocks
        block = KeyBlock(position, base, start, after, least, greatest, entries, crc)
        kept = len(blocks)
        while kept and blocks[kept - 1].base >= start:
            kept -= 1
        follows = start == (blocks[kept - 1].end if kept else base)
        last_end = blocks[-1].end if blocks else base
        if block.after > size or not follows or after < last_end:
            return blocks
        blocks[kept:] = [block]
        position = block.after


class BlockLists:
    """Cache of the blocks of files. Thread-safe.

    A file is read again if its size, its mtime or the checksum of its last block has
    changed: after a cut, blocks of other bytes may be as long.
    """

    def __init__(self, lists_max: int = LISTS_MAX) -> None:
        """Set the maximum number of files in the cache."""
        self._lists_max = lists_max
        self._lists: dict[
            tuple[Path, tuple[bytes, ...]], tuple[tuple[int, int], list[KeyBlock]]
        ] = {}

    def blocks_of(
        self, file: ReadFile, base: Offset, end: Offset, names: tuple[bytes, ...]
    ) -> list[KeyBlock]:
        """Return the valid blocks, as `read_blocks` does."""
        state, key = (file.size(), file.mtime_ms()), (file.path, names)
        known = self._lists.get(key)
        if known is None or known[0] != state or not _ends_with(file, known[1]):
            blocks = read_blocks(file, base, _FAR, names)
            if len(self._lists) >= self._lists_max:
                self._lists.clear()
            known = self._lists[key] = state, blocks
        blocks = known[1]
        if blocks and blocks[-1].end > end:
            # The block was written after the search began.
            return read_blocks(file, base, end, names)
        return blocks


def _ends_with(file: ReadFile, blocks: Sequence[KeyBlock]) -> bool:
    """Return whether the file still has the last of these blocks at its position."""
    if not blocks:
        return True
    at = Position(blocks[-1].position + HEAD.size - _CRC_BYTES)
    return file.read_at(at, SizeBytes(_CRC_BYTES)) == _CRC.pack(blocks[-1].crc)


# -- entries --------------------------------------------------------------------------


class _Pages:
    """Pages of a block, several read at once; they verify the hints of its rows."""

    def __init__(self, file: ReadFile, block: KeyBlock, hashed: int) -> None:
        self._file, self._block = file, block
        self._known: dict[int, array[int]] = {}
        self.first, self.last = _pages_of(file, block, hashed)

    def __getitem__(self, number: int) -> "array[int]":
        if number not in self._known:
            start, after = self.first, self.last + 1
            if after - start > _PAGES_AT_ONCE or not start <= number < after:
                start = number - number % _PAGES_AT_ONCE
                after = min(start + _PAGES_AT_ONCE, self._block.pages)
            self._known = dict(_read_pages(self._file, self._block, start, after))
        return self._known[number]

    def last_before(self, entry: int) -> int:
        """Return the last of the hash's pages that begins before an entry, or `first`.

        The pages of the hash are those that the rows hint at.
        """
        first, last = self.first, self.last
        while first < last:
            middle = (first + last + 1) // 2
            if self[middle][0] < entry:
                first = middle
            else:
                last = middle - 1
        return first


def newest_offsets(
    file: ReadFile, block: KeyBlock, hashed: int, low: Offset, high: Offset
) -> Iterator[Offset]:
    """Yield the offsets of a hash within [low, high), last one first.

    Pages are read when needed, because one field may have most of the entries.

    Raises:
        DamagedIndexError: pages needed for the result are damaged.
    """
    if low >= high or not block.pages:
        return
    lower, upper = _run_of(block, hashed, low, high)
    pages = _Pages(file, block, hashed)
    number = pages.last_before(upper)
    if number == pages.last < block.pages - 1 and pages[number][-1] < upper:
        raise DamagedIndexError
    while True:
        entries = pages[number]
        cut = bisect_left(entries, upper)
        least = bisect_left(entries, lower, hi=cut)
        for entry in reversed(entries[least:cut]):
            yield Offset(block.origin + (entry & _POSITION))
        if least or not number:
            return
        number -= 1


def first_offsets(
    file: ReadFile, block: KeyBlock, hashed: int, low: Offset, high: Offset
) -> Iterator[Offset]:
    """Yield the offsets of a hash within [low, high), first one first.

    Raises:
        DamagedIndexError: pages needed for the result are damaged.
    """
    if low >= high or not block.pages:
        return
    lower, upper = _run_of(block, hashed, low, high)
    pages = _Pages(file, block, hashed)
    number = pages.last_before(lower)
    if number and pages[number][0] >= lower and pages[number - 1][-1] >= lower:
        raise DamagedIndexError
    while number < block.pages:
        entries = pages[number]
        least = bisect_left(entries, lower)
        cut = bisect_left(entries, upper, lo=least)
        for entry in entries[least:cut]:
            yield Offset(block.origin + (entry & _POSITION))
        if cut < len(entries):
            return
        number += 1


def count_entries(file: ReadFile, block: KeyBlock, hashed: int) -> int:
    """Return an upper bound of the number of entries of a hash, according to the rows.

    It includes all entries in the first to last page of the hash's slot; not verified.
    """
    if not block.pages:
        return 0
    first, last = _pages_of(file, block, hashed)
    return (last - first + 1) * PAGE_ENTRIES


def _run_of(block: KeyBlock, hashed: int, low: Offset, high: Offset) -> tuple[int, int]:
    """Return the range of entries [first, after) of a hash within [low, high)."""
    last = entry_of(hashed, high - 1 - block.origin)
    return entry_of(hashed, low - block.origin), last + 1


def _pages_of(file: ReadFile, block: KeyBlock, hashed: int) -> tuple[int, int]:
    """Return the first and last page with entries of a hash's slot; not verified.

    Raises:
        DamagedIndexError: the rows are missing or impossible.
    """
    slot = (hashed >> _HASH_SHIFT) * block.pages >> HASH_BITS
    at = Position(block.rows_at + slot * _ROW_BYTES)
    rows = file.read_at(at, SizeBytes(_ROWS.size))
    if len(rows) < _ROWS.size:
        raise DamagedIndexError
    first, last = _ROWS.unpack(rows)
    if not first <= last < block.pages:
        raise DamagedIndexError
    return first, last


def _read_pages(
    file: ReadFile, block: KeyBlock, first: int, after: int
) -> Iterator[tuple[int, "array[int]"]]:
    """Yield number and entries of each page in [first, after)."""
    raw = read_checked(file, block, first, after)
    entries = array("Q", raw)
    if sys.byteorder == "little":
        entries.byteswap()
    for number in range(first, after):
        at = (number - first) * PAGE_ENTRIES
        yield number, entries[at : at + PAGE_ENTRIES]


def read_checked(file: ReadFile, block: KeyBlock, first: int, after: int) -> bytes:
    """Return the entries of pages [first, after) as they are in the file.

    Raises:
        DamagedIndexError: a page does not match its checksum.
    """
    size = PAGE + _CRC_BYTES
    start = block.position + HEAD.size
    at, end = start + first * size, min(start + after * size, block.rows_at)
    data = file.read_at(Position(at), SizeBytes(end - at))
    if len(data) < end - at:
        raise DamagedIndexError
    parts = list[bytes]()
    for number, begin in enumerate(range(0, len(data), size), first):
        stop = min(begin + size, len(data))
        entries, crc = data[begin : stop - _CRC_BYTES], data[stop - _CRC_BYTES : stop]
        if crc != page_crc(entries, block.crc, number):
            raise DamagedIndexError
        parts.append(entries)
    return b"".join(parts)


def page_crc(entries: bytes, head_crc: int, number: int) -> bytes:
    """Return the checksum of a page."""
    return _CRC.pack(crc32(entries, head_crc ^ number))
