"""Which records from an offset on may have one of some fields, by the index of keys.

    start                                                       end
      | block          | block                    | block        |   no block ...
          ^   hits ^            ^                    ^  ^

Between `start` and `end` no other records have one of them: a reader of those that do
may pass over the rest. It compares each, for an entry is a hint (`key_index.py`). Where
a block has many of them it says nothing: to walk all records is as good.

All of it blocks. The segment is as it was when the question came: who asks sees to it
that the log has the same bytes still when the answer is used.
"""

from array import array
from collections.abc import Sequence
from itertools import islice
from typing import Final, NamedTuple

from metaq.fs import FileSystem, ReadFile
from metaq.model import Offset
from metaq.record.checksum import crc32
from metaq.storage.key_index import (
    PAGE_ENTRIES,
    BlockLists,
    DamagedIndexError,
    HashOf,
    KeyBlock,
    count_entries,
    first_offsets,
    keys_path,
)
from metaq.storage.segment import Segment

GAP_BYTES: Final = 2048
"""Bytes between two hits, on average, with which looking them up begins to pay."""

FIELDS_MAX: Final = 1024
"""Fields that are looked up at once, but for those of one block: a few milliseconds."""


class KeyHits(NamedTuple):
    """An answer of the index about a range."""

    start: Offset
    end: Offset
    """At `start`: it says nothing."""
    offsets: Sequence[int] = ()
    """At which records with one of the fields may begin, in order."""
    is_damaged: bool = False
    """The index is, at `end`."""


def find_hits(
    fs: FileSystem,
    segment: Segment,
    names: tuple[bytes, ...],
    sets: Sequence[tuple[bytes, ...]],
    start: Offset,
    *,
    count_max: int,
    lists: BlockLists,
    hash_of: HashOf = crc32,
) -> KeyHits:
    """Return where to look for records that have a field of each set.

    Args:
        fs: the disk.
        segment: with the size that is readable.
        names: names that are indexed, as fields begin; with those of all fields.
        sets: one or more sets of fields; those of one set are looked up, in each block
            the one with the fewest entries.
        start: a record boundary of the segment.
        count_max: most hits, 1 or more.
        lists: blocks of the indexes that were read before.
        hash_of: hash of a field.

    Raises:
        StorageError: the disk refuses.
    """
    base = segment.base_offset
    hashes = [tuple(map(hash_of, fields)) for fields in sets]
    offsets, end, is_damaged, left_fields = array("q"), start, False, FIELDS_MAX
    file = fs.try_open_read(keys_path(segment.path, base))
    if file is None:
        return KeyHits(start, start)
    with file:
        for block in lists.blocks_of(file, base, segment.end_offset, names):
            if block.end <= start:
                continue
            if left_fields <= 0 or len(offsets) > count_max:
                break
            try:
                wanted = _fewest(file, block, hashes)
                if not wanted:
                    break
                left_fields -= sum(map(len, hashes))
                offsets.extend(_in_block(file, block, wanted, end, count_max + 1))
            except DamagedIndexError:
                is_damaged = True
                break
            end = block.end
    if len(offsets) > count_max:
        end, offsets = Offset(offsets[count_max]), offsets[:count_max]
    return KeyHits(start, end, offsets, is_damaged)


def _fewest(
    file: ReadFile, block: KeyBlock, sets: Sequence[tuple[int, ...]]
) -> tuple[int, ...]:
    """Return the hashes with the fewest entries; none where all of them have many."""
    found = list[tuple[int, tuple[int, ...]]]()
    for hashes in sets:
        count = sum(count_entries(file, block, hashed) for hashed in hashes)
        # Others are in the same pages.
        others = 2 * PAGE_ENTRIES * len(hashes)
        if count <= block.size_bytes // GAP_BYTES + others:
            found.append((count, hashes))
    return min(found)[1] if found else ()


def _in_block(
    file: ReadFile, block: KeyBlock, hashes: Sequence[int], low: Offset, count_max: int
) -> list[Offset]:
    """Return the first hits from `low` on, in order."""
    found = {
        offset
        for hashed in hashes
        for offset in islice(
            first_offsets(file, block, hashed, low, block.end), count_max
        )
    }
    return sorted(found)[:count_max]
