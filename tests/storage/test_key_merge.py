"""Blocks are made of records, of blocks, and of both; the result is the same."""

import math
import random
from array import array
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metaq.model import MessageId, Offset
from metaq.record.flags import encode_payload
from metaq.record.layout import encode_record
from metaq.storage.key_index import (
    HASH_BITS,
    POSITION_BITS,
    DamagedIndexError,
    KeyBlock,
    entry_of,
    keys_path,
    read_blocks,
)
from metaq.storage.key_merge import (
    MERGED_ENTRIES,
    RUN_ENTRIES,
    BlockMaker,
    merge_runs,
)
from tests.rigs.fs import FaultyFileSystem
from tests.sampling import SEED, examples
from tests.storage.logs import DIRECTORY, disk_with_directory, put_file

NAMES = (b"key=", b"h.a=")
NAME = keys_path(DIRECTORY / f"{0:020d}.meta", Offset(0)).name


def records(rng: random.Random, count: int) -> list[bytes]:
    """Return records with few keys, and headers that come twice."""
    found = list[bytes]()
    for number in range(count):
        headers = [("a", b"%d" % rng.randrange(3)) for _ in range(rng.randrange(3))]
        key = rng.choice((None, b"same", b"%d" % rng.randrange(50)))
        payload, flag = encode_payload(rng.randbytes(3), None, key, headers)
        found.append(encode_record(payload, id=MessageId(number), flag=flag))
    return found


def made(
    data: bytes,
    base: int,
    end: int,
    fs: FaultyFileSystem | None = None,
    older: list[KeyBlock] | None = None,
    window: int = 500,
) -> bytes:
    """Return a block of some bytes of a log, read in windows, and of older blocks."""
    maker, at = BlockMaker(Offset(0), NAMES), older[-1].end if older else base
    start = older[0].base if older else base
    while at < end:
        at += maker.add(data[at : min(end, at + window)], Offset(at))
    if fs is None:
        return b"".join(maker.encode(Offset(start), Offset(end)))
    with fs.open_read(DIRECTORY / NAME) as file:
        return b"".join(maker.encode(Offset(start), Offset(end), file, older or ()))


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from((0, 1, 40, 300)))
def test_a_merged_block_is_that_of_all_records(seed: int, count: int) -> None:
    """Byte for byte, of any older blocks with any records after them."""
    rng = random.Random(seed)
    each = records(rng, count)
    data, ends = b"".join(each), [0]
    for one in each:
        ends.append(ends[-1] + len(one))
    cuts = sorted({0, *(rng.choice(ends) for _ in range(rng.randrange(6)))})
    fs = disk_with_directory()
    put_file(fs, NAME, b"".join(made(data, a, b) for a, b in pairwise(cuts)))
    with fs.open_read(DIRECTORY / NAME) as file:
        older = read_blocks(file, Offset(0), Offset(len(data)), NAMES)
    assert [block.end for block in older] == cuts[1:]
    first = rng.randint(0, len(older))
    start = older[first].base if first < len(older) else cuts[-1]
    merged = made(data, cuts[-1], len(data), fs, older[first:], window=100_000)
    assert merged == made(data, start, len(data))
    for block in older[first:]:
        if block.entries:
            fs.flip_bit(DIRECTORY / NAME, 8 * (block.position + 70))
            with pytest.raises(DamagedIndexError):
                made(data, cuts[-1], len(data), fs, older[first:])
            return


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**34 - 1))))
def test_entries_are_ordered_as_doubles_as_they_are_as_numbers(pairs) -> None:
    """Also the least and the greatest one, which are finite."""
    pairs += [(0, 0), (2**32 - 1, 2**34 - 1)]
    entries = [entry_of(*each) for each in pairs]
    assert max(entries) == (1 << HASH_BITS + POSITION_BITS) - 1
    doubles = array("d", array("Q", entries).tobytes())
    assert all(map(math.isfinite, doubles))
    ordered = array("Q", array("d", sorted(doubles)).tobytes())
    assert list(ordered) == sorted(entries)


@pytest.mark.slow
def test_runs_are_merged_some_at_a_time() -> None:
    """Sorting all would stop the other threads of a broker meanwhile."""
    rng = random.Random(SEED)
    runs = [
        array("d", sorted(rng.random() for _ in range(rng.choice((1, 70, 5000)))))
        for _ in range(12)
    ]
    part = MERGED_ENTRIES // len(runs)
    pieces = [
        iter([run[at : at + part] for at in range(0, len(run), part)]) for run in runs
    ]
    merged = list(merge_runs(pieces))
    assert [each for piece in merged for each in piece] == sorted(
        each for run in runs for each in run
    )
    assert max(map(len, merged)) <= MERGED_ENTRIES
    assert list(merge_runs([])) == []
    maker, data = BlockMaker(Offset(0), NAMES), b"".join(records(rng, 3000))
    for number in range(10):
        maker.add(data, Offset(number * len(data)))
    assert max(map(len, maker.runs)) < 2 * RUN_ENTRIES
