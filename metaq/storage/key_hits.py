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
from typing import Final, NamedTuple

from metaq.fs import FileSystem, ReadFile
from metaq.model import Offset
from metaq.record.checksum import crc32
from metaq.storage.key_index import (
    SLOT_ENTRIES,
    HashOf,
    KeyBlock,
    count_entries,
    first_positions,
    keys_path,
    read_blocks,
)
from metaq.storage.segment import Segment

GAP_BYTES: Final = 2048
"""Bytes between two hits, on average, with which looking them up begins to be quicker.
It bounds what is read of a block at once, too: 16 MiB of one that covers 4 GiB."""

SLOTS_MAX: Final = 1024
"""Slots that are looked at at once, but for those of one block: a few milliseconds."""


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
        hash_of: hash of a field.

    Raises:
        StorageError: the disk refuses.
    """
    base, high = segment.base_offset, segment.end_offset
    hashes = [tuple(map(hash_of, fields)) for fields in sets]
    offsets, end, is_damaged, left_slots = array("q"), start, False, SLOTS_MAX
    file = fs.try_open_read(keys_path(segment.path, base))
    if file is None:
        return KeyHits(start, start)
    with file:
        blocks = read_blocks(file, base, high, names)
        for block in blocks:
            if block.end <= start:
                continue
            wanted = _fewest(file, block, hashes)
            if wanted is None or left_slots <= 0 or len(offsets) > count_max:
                break
            left_slots -= sum(map(len, hashes))
            found = _in_block(file, block, wanted, end, count_max + 1)
            if found is None:
                is_damaged = True
                break
            offsets.extend(found)
            end = block.end
        # It may have been made again in between, with other blocks.
        there = set(read_blocks(file, base, high, names))
        if any(block.base < end and block not in there for block in blocks):
            return KeyHits(start, start)
    if len(offsets) > count_max:
        end, offsets = Offset(offsets[count_max]), offsets[:count_max]
    return KeyHits(start, end, offsets, is_damaged)


def _fewest(
    file: ReadFile, block: KeyBlock, sets: Sequence[tuple[int, ...]]
) -> tuple[int, ...] | None:
    """Return the hashes with the fewest entries; None where all of them have many."""
    counts = dict[tuple[int, ...], int]()
    for hashes in sets:
        count = sum(count_entries(file, block, hashed) for hashed in hashes)
        # Others are in the same slots, more of them in some.
        others = 4 * SLOT_ENTRIES * len(hashes)
        if count <= (block.end - block.base) // GAP_BYTES + others:
            counts[hashes] = count
    return min(counts, key=counts.__getitem__, default=None)


def _in_block(
    file: ReadFile, block: KeyBlock, hashes: Sequence[int], low: Offset, count_max: int
) -> list[int] | None:
    """Return the first hits at `low` or after it; None: the index is damaged."""
    found = set[int]()
    for hashed in hashes:
        positions = first_positions(
            file, block, hashed, low=max(0, low - block.base), count_max=count_max
        )
        if positions is None:
            return None
        found.update(positions)
    return [block.base + position for position in sorted(found)]
