"""Find which records after an offset may have certain fields, with the key index.

    start                                                       end
      | block          | block                    | block        |   no block ...
          ^   hits ^            ^                    ^  ^

Between `start` and `end` no other records have one of the fields: a reader of such
records may skip the rest. It must compare each hit, because an entry is only a hint
(`key_index.py`). For a block with many hits there is no answer, because a walk over all
records is as fast.

Everything here blocks. The segment is the one known when the search began: the caller
must ensure that the log still has the same bytes when the result is used.
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
"""Minimum mean distance of hits, bytes, for which a lookup pays."""

FIELDS_MAX: Final = 1024
"""Maximum number of fields looked up in one call, exceeded by those of one block: a few
milliseconds."""


class KeyHits(NamedTuple):
    """Result of the index for a range."""

    start: Offset
    end: Offset
    """End of the range; equal to `start` if the index has no answer."""
    offsets: Sequence[int] = ()
    """Ascending offsets of records that may have one of the fields."""
    is_damaged: bool = False
    """Whether the index is damaged at `end`."""


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
    """Return the offsets of records that may have a field of each set.

    Args:
        fs: the disk.
        segment: the segment, with its readable size.
        names: prefixes of the indexed fields, including those of all `sets`.
        sets: one or more sets of fields; in each block only the set with the fewest
            entries is looked up.
        start: a record boundary of the segment.
        count_max: maximum number of hits, 1 or more.
        lists: cache of the blocks of indexes.
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
    """Return the hashes of the set with the fewest entries; empty if all have many."""
    found = list[tuple[int, tuple[int, ...]]]()
    for hashes in sets:
        count = sum(count_entries(file, block, hashed) for hashed in hashes)
        # The first and last page have other entries, too.
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
