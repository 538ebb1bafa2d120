"""Which records of a segment have a key or header: blocks in a file beside it.

    name: <base offset, 20 digits>.keys, beside <base offset>.meta

    block     header | pages of entries | pages + 1 rows           one after the other
    header    "MQ-KEYS2" | base of the segment i64 | base i64 | end i64
              | least id i64 | greatest id i64 | names u32 | entries u32 | crc u32
    page      64 entries, the last page fewer | crc u32                       516 bytes
    entry     28 bits of the hash, 34 of the position in the segment; sorted    8 bytes
    row       page with the first entry of a slot u32                           4 bytes

Big-endian. A *field* is a key or header as the payload has it, `key=42` or
`h.order-id=7`, and the hash is its CRC-32, without the lowest bits. `names` is the
CRC-32 of the names that are indexed: a block of others is made again.

A block covers whole records from where another one ends, and the file only grows: a
block whose base is that of earlier ones is merged of them, and takes their place. So
blocks end in the order of the file, and a cut of it is one of the log. When much of
the file is replaced it is written again, and renamed.

A question reads two rows, and a page or two. The entries of one field are one run, in
the order of the log; where it is, the pages prove: rows are hints. The checksum of the
header covers the bytes before it, and that of a page its entries, its number and the
checksum of the header. What does not hold together is not believed, and the log is read
there. An entry is only a hint: the record is compared. The file is derived from its
segment and may be short or gone; it never changes an answer. It is made from bytes that
have the checksums of their spans, and cut before other bytes can come (`recovery.py`).
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
"""Ends the name of the file; MetaQ ignores such names."""

POSITION_BITS: Final = 34
SEGMENT_BYTES_MAX: Final = 1 << POSITION_BITS
"""Bytes of a segment that can be indexed: 16 GiB."""
HASH_BITS: Final = 28
"""Of two fields in 2^28 one is compared in vain."""

PAGE_ENTRIES: Final = 64
ENTRY_BYTES: Final = 8
PAGE: Final = PAGE_ENTRIES * ENTRY_BYTES
"""Bytes of the entries of a whole page."""

KEY_NAME: Final = "key"
"""Stands for the key of a message among the names of headers."""

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
"""Files whose blocks are remembered; all are forgotten when there are more."""

HashOf = Callable[[bytes], int]
"""Hash of a field, 32 bits."""


class DamagedIndexError(Exception):
    """Bytes of an index that are in question do not hold together; never leaves."""


class KeyBlock(NamedTuple):
    """Header of a block, and where it is."""

    position: Position
    """Of the block in its file."""
    origin: Offset
    """Base offset of the segment."""
    base: Offset
    end: Offset
    least_id: int
    """Of the records; below 0 where one of them has no time."""
    greatest_id: int
    entries: int
    crc: int
    """Of the header."""

    @property
    def size_bytes(self) -> int:
        """Return the bytes of the log that it covers."""
        return self.end - self.base

    @property
    def file_bytes(self) -> int:
        """Return the bytes of the block."""
        return self.after - self.position

    @property
    def pages(self) -> int:
        """Return the number of its pages."""
        return -(-self.entries // PAGE_ENTRIES)

    @property
    def rows_at(self) -> int:
        """Return the position of its rows."""
        data = self.entries * ENTRY_BYTES + self.pages * _CRC_BYTES
        return self.position + HEAD.size + data

    @property
    def after(self) -> Position:
        """Return the position after the block."""
        return Position(self.rows_at + (self.pages + 1) * _ROW_BYTES)


def keys_path(segment_path: Path, base: Offset) -> Path:
    """Return the path of the file of a segment."""
    return segment_path.with_name(f"{base:020d}{KEYS_SUFFIX}")


@lru_cache
def field_names(names: tuple[str, ...]) -> tuple[bytes, ...]:
    """Return how fields begin, of a key or headers by name."""
    return tuple(
        b"key=" if name == KEY_NAME else encode_properties(None, [(name, b"")]).encode()
        for name in names
    )


def names_digest(names: Sequence[bytes]) -> int:
    """Return what a block says of the names that are indexed."""
    return crc32(b"&".join(sorted(names)))


def entry_of(hashed: int, position: int) -> int:
    """Return the entry of a hash of 32 bits, and a position in the segment."""
    return hashed >> _HASH_SHIFT << POSITION_BITS | position


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


# -- blocks of a file -----------------------------------------------------------------


def read_blocks(
    file: ReadFile, base: Offset, end: Offset, names: tuple[bytes, ...] | None = None
) -> list[KeyBlock]:
    """Return the blocks of a file that hold together, in the order of the log.

    Args:
        file: the file.
        base: base offset of its segment.
        end: no block that ends later is believed, and none after it.
        names: names that are indexed; None: any.
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
    """The blocks of files that were read before, for any thread.

    They are read again when a file has changed, by its size, its time, or the checksum
    of its last block: after a cut, blocks of other bytes may be as long.
    """

    def __init__(self, lists_max: int = LISTS_MAX) -> None:
        """Remember so many files."""
        self._lists_max = lists_max
        self._lists: dict[
            tuple[Path, tuple[bytes, ...]], tuple[tuple[int, int], list[KeyBlock]]
        ] = {}

    def blocks_of(
        self, file: ReadFile, base: Offset, end: Offset, names: tuple[bytes, ...]
    ) -> list[KeyBlock]:
        """Return what `read_blocks` does."""
        state, key = (file.size(), file.mtime_ms()), (file.path, names)
        known = self._lists.get(key)
        if known is None or known[0] != state or not _ends_with(file, known[1]):
            blocks = read_blocks(file, base, _FAR, names)
            if len(self._lists) >= self._lists_max:
                self._lists.clear()
            known = self._lists[key] = state, blocks
        blocks = known[1]
        if blocks and blocks[-1].end > end:
            # It is newer than the question.
            return read_blocks(file, base, end, names)
        return blocks


def _ends_with(file: ReadFile, blocks: Sequence[KeyBlock]) -> bool:
    """Return whether the last of some blocks is still where it was."""
    if not blocks:
        return True
    at = Position(blocks[-1].position + HEAD.size - _CRC_BYTES)
    return file.read_at(at, SizeBytes(_CRC_BYTES)) == _CRC.pack(blocks[-1].crc)


# -- entries --------------------------------------------------------------------------


class _Pages:
    """Pages of a block, some read at once; they prove what its rows only hint at."""

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

        Rows say which pages are the hash's.
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
    """Yield the offsets of a hash within [low, high), the last one first.

    Pages are read as they are needed: a field may have most of the entries.

    Raises:
        DamagedIndexError: the bytes in question are damaged.
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
    """Yield the offsets of a hash within [low, high), the first one first.

    Raises:
        DamagedIndexError: as `newest_offsets`.
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
    """Return the most entries that a hash may have, as rows hint: not proven.

    All of its slot count, and what else is in its first and last page.
    """
    if not block.pages:
        return 0
    first, last = _pages_of(file, block, hashed)
    return (last - first + 1) * PAGE_ENTRIES


def _run_of(block: KeyBlock, hashed: int, low: Offset, high: Offset) -> tuple[int, int]:
    """Return the least entry of a hash in a range, and one that is greater than all."""
    last = entry_of(hashed, high - 1 - block.origin)
    return entry_of(hashed, low - block.origin), last + 1


def _pages_of(file: ReadFile, block: KeyBlock, hashed: int) -> tuple[int, int]:
    """Return the first and last page with entries of the slot of a hash, a hint.

    Raises:
        DamagedIndexError: they cannot be.
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
    """Yield numbers and entries of some pages."""
    raw = read_checked(file, block, first, after)
    entries = array("Q", raw)
    if sys.byteorder == "little":
        entries.byteswap()
    for number in range(first, after):
        at = (number - first) * PAGE_ENTRIES
        yield number, entries[at : at + PAGE_ENTRIES]


def read_checked(file: ReadFile, block: KeyBlock, first: int, after: int) -> bytes:
    """Return the entries of some pages as they are in the file.

    Raises:
        DamagedIndexError: a page does not have its checksum.
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
