"""Make a block of a key index from records, older blocks, or both.

Entries come in sorted runs, one per window of records or per block, and are merged a
few thousand at a time: no call keeps the interpreter for more than about a millisecond,
because the same process answers puts. Memory does not grow with the blocks.

An entry is compared as the double with the same bits. Its two highest bits are 0, so it
is a finite number, and such numbers have the order of their bits; doubles are sorted
three times as fast as integers of that size.
"""

import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from struct import Struct
from typing import Final, TypeAlias

from metaq.fs import ReadFile
from metaq.model import Offset
from metaq.record.checksum import crc32, with_crc
from metaq.record.flags import HAS_BOTH, TEXT_AT
from metaq.record.layout import HEADER as RECORD_HEADER
from metaq.record.layout import HEADER_BYTES
from metaq.storage.key_index import (
    ENTRY_BYTES,
    HASH_BITS,
    HEAD,
    MAGIC,
    PAGE,
    PAGE_ENTRIES,
    POSITION_BITS,
    HashOf,
    KeyBlock,
    entry_of,
    names_digest,
    page_crc,
    read_checked,
)

MERGED_ENTRIES: Final = 8192
"""Maximum number of entries merged at once, over all runs."""

RUN_ENTRIES: Final = 4096
"""Approximate number of entries in a run of records."""

_LENGTH: Final = Struct(">i")
_NO_ID: Final = -1

Entries: TypeAlias = "array[float]"
"""Sorted entries, as doubles."""

_NONE: Final = array("d")


class BlockMaker:
    """Collects the entries of one block. Owned by the thread that reads the records."""

    def __init__(
        self, origin: Offset, names: tuple[bytes, ...], hash_of: HashOf = crc32
    ) -> None:
        """Begin a block of the segment with base offset `origin`."""
        self._origin = origin
        self._names = names
        self._hash_of = hash_of
        self._found: set[int] = set()
        self.runs: list[Entries] = []
        """Sorted entries of the records so far, except the newest."""
        self._ids: list[int] = []

    def add(self, data: bytes, offset: Offset) -> int:
        """Add the whole records in `data`; return their size in bytes."""
        # Flat on purpose: every record of the topic goes through this loop.
        unpack, names, add = RECORD_HEADER.unpack_from, self._names, self._found.add
        at, size, origin, ids = 0, len(data), offset - self._origin, list[int]()
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
                        add(entry_of(self._hash_of(field), origin + at))
            at = after
        if ids:
            self._ids += (min(ids), max(ids))
        if len(self._found) >= RUN_ENTRIES:
            self._end_run()
        return at

    def _end_run(self) -> None:
        entries = array("d", array("Q", self._found).tobytes())
        self.runs.append(array("d", sorted(entries)))
        self._found.clear()

    def encode(
        self,
        base: Offset,
        end: Offset,
        file: ReadFile | None = None,
        older: Sequence[KeyBlock] = (),
    ) -> Iterator[bytes]:
        """Yield the bytes of the block.

        Args:
            base: start of its records.
            end: end of its records.
            file: the index file that has `older`.
            older: blocks that it replaces, with the records before those that were
                added.

        Raises:
            DamagedIndexError: an older block is damaged.
        """
        self._end_run()
        count = sum(map(len, self.runs)) + sum(block.entries for block in older)
        least = [*self._ids, *(block.least_id for block in older)]
        greatest = [*self._ids, *(block.greatest_id for block in older)]
        ids = min(least, default=_NO_ID), max(greatest, default=_NO_ID)
        names = names_digest(self._names)
        head = with_crc(
            HEAD.pack(MAGIC, self._origin, base, end, *ids, names, count, 0)
        )
        yield head
        count_of_runs = max(1, len(older) + len(self.runs))
        size = max(PAGE_ENTRIES, MERGED_ENTRIES // count_of_runs)
        runs = [_of_block(file, block, size // PAGE_ENTRIES) for block in older if file]
        runs += [_of_memory(run, size) for run in self.runs]
        yield from _encode_pages(merge_runs(runs), count, HEAD.unpack(head)[-1])


def merge_runs(runs: Iterable[Iterator[Entries]]) -> Iterator[Entries]:
    """Yield the entries of sorted runs in order, a few at a time.

    Args:
        runs: iterators over parts of one entry or more.
    """
    parts = [(part, run) for run in runs if (part := next(run, _NONE))]
    while parts:
        # All later entries of any run are greater.
        bound = min(part[-1] for part, _run in parts)
        taken, left = array("d"), list[tuple[Entries, Iterator[Entries]]]()
        for part, run in parts:
            cut = bisect_right(part, bound)
            taken += part[:cut]
            rest = part[cut:] or next(run, _NONE)
            if rest:
                left.append((rest, run))
        yield array("d", sorted(taken))
        parts = left


def _of_memory(run: Entries, size: int) -> Iterator[Entries]:
    return (run[at : at + size] for at in range(0, len(run), size))


def _of_block(file: ReadFile, block: KeyBlock, pages: int) -> Iterator[Entries]:
    for first in range(0, block.pages, pages):
        after = min(block.pages, first + pages)
        entries = array("d", read_checked(file, block, first, after))
        if sys.byteorder == "little":
            entries.byteswap()
        yield entries


def _encode_pages(
    merged: Iterable[Entries], count: int, head_crc: int
) -> Iterator[bytes]:
    """Yield pages, then rows."""
    pages = -(-count // PAGE_ENTRIES)
    rows, number, rest = array("I"), 0, b""
    for entries in merged:
        count -= len(entries)
        if sys.byteorder == "little":
            entries.byteswap()
        rest += entries.tobytes()
        whole = len(rest) - len(rest) % PAGE if count else len(rest)
        parts = list[bytes]()
        for at in range(0, whole, PAGE):
            page = rest[at : min(at + PAGE, whole)]
            parts += page, page_crc(page, head_crc, number)
            last = int.from_bytes(page[-ENTRY_BYTES:], "big") >> POSITION_BITS
            slot = last * pages >> HASH_BITS
            rows.extend([number] * (slot + 1 - len(rows)))
            number += 1
        rest = rest[whole:]
        yield b"".join(parts)
    rows.extend([max(0, pages - 1)] * (pages + 1 - len(rows)))
    if sys.byteorder == "little":
        rows.byteswap()
    yield rows.tobytes()
