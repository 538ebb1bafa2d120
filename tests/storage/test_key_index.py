"""Blocks of a key index: what is written is read, and what is damaged is not."""

import random
from contextlib import suppress
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from metaq.fs import ReadFile
from metaq.model import MessageId, Offset, SizeBytes
from metaq.record.checksum import crc32
from metaq.record.flags import encode_payload
from metaq.record.layout import encode_record
from metaq.storage.key_index import (
    SEGMENT_BYTES_MAX,
    BlockLists,
    DamagedIndexError,
    KeyBlock,
    count_entries,
    cut_keys,
    field_names,
    first_offsets,
    keys_path,
    newest_offsets,
    read_blocks,
)
from metaq.storage.key_merge import BlockMaker
from tests.rigs.fs import FaultyFileSystem
from tests.sampling import SEED, examples
from tests.storage.logs import DIRECTORY, disk_with_directory, put_file

NAMES = field_names(("key",))
SEGMENT = DIRECTORY / f"{0:020d}.meta"
NAME = keys_path(SEGMENT, Offset(0)).name


def block_of(hashes: list[int], base: int = 0) -> bytes:
    """Return a block over a record for each hash."""
    maker = BlockMaker(Offset(0), NAMES, lambda field: hashes[int(field[4:])])
    at = base
    for number in range(len(hashes)):
        payload, flag = encode_payload(b"", None, b"%d" % number)
        record = encode_record(payload, id=MessageId(number - 1), flag=flag)
        at += maker.add(record, Offset(at))
    return b"".join(maker.encode(Offset(base), Offset(at)))


def read_positions(
    file: ReadFile,
    block: KeyBlock,
    hashed: int,
    *,
    low: int = 0,
    high: int = 1 << 40,
) -> list[int] | None:
    """Return the positions of a hash, from the block's base on; None: it is damaged.

    Both ways are the same, but for damage that only one of them has to read.
    """
    bounds = Offset(max(low, block.base)), Offset(min(high, block.end))
    found = list[list[Offset]]()
    for offsets in (newest_offsets, first_offsets):
        with suppress(DamagedIndexError):
            found.append(list(offsets(file, block, hashed, *bounds)))
    if len(found) < 2:
        return None
    newest, first = found
    assert newest[::-1] == first
    return [offset - block.base for offset in first]


def put_index(fs: FaultyFileSystem, data: bytes, name: str = NAME) -> Path:
    """Make a file, or another one in its place."""
    fs.discard(DIRECTORY / name)
    return put_file(fs, name, data)


def boundaries(count: int) -> st.SearchStrategy[int]:
    """Return hashes at the edges of slots, if there are so many entries."""
    pages = max(1, -(-count // 64))
    edges = [(slot << 32) // pages for slot in range(pages + 1)]
    near = {edge + by for edge in edges for by in (-17, -16, -1, 0, 1, 16)}
    return st.sampled_from(sorted(min(max(0, each), 2**32 - 1) for each in near))


@settings(max_examples=examples(60), deadline=None)
@given(st.data(), st.sampled_from((0, 1, 5, 63, 64, 65, 200, 700)))
def test_each_hash_has_the_positions_of_its_records(data, count) -> None:
    """In the order of the log, also where slots and pages end; any part of them."""
    few = data.draw(st.lists(boundaries(count), min_size=1, max_size=12))
    choose = random.Random(data.draw(st.integers(0, 1 << 30)))
    hashes = choose.choices(few, k=count)
    fs = disk_with_directory()
    path = put_index(fs, block_of(hashes))
    with fs.open_read(path) as file:
        (block,) = read_blocks(file, Offset(0), Offset(1 << 40), NAMES)
        sizes = [20 + 4 + len(b"key=%d" % number) for number in range(count)]
        starts = [sum(sizes[:number]) for number in range(count)]
        for hashed in {*hashes, 7}:
            # The lowest bits are not kept.
            wanted = [
                start
                for start, each in zip(starts, hashes, strict=True)
                if each >> 4 == hashed >> 4
            ]
            assert read_positions(file, block, hashed) == wanted
            low, high = (Offset(choose.randint(0, block.end)) for _ in range(2))
            part = read_positions(file, block, hashed, low=low, high=high)
            assert part == [each for each in wanted if low <= each < high]
            assert len(wanted) <= count_entries(file, block, hashed) <= count + 63
        assert (block.least_id, block.greatest_id) == (-1, max(-1, count - 2))


def test_rows_that_are_damaged_hide_nothing() -> None:
    """Any numbers in their place: the positions, or the answer that it is damaged."""
    choose = random.Random(SEED)
    hashes = choose.choices([0, 1 << 30, 1 << 31, 2**32 - 1, 77 << 20], k=300)
    fs = disk_with_directory()
    data = block_of(hashes)
    rows = 6 * 4
    answers = set()
    for _ in range(examples(300)):
        junk = b"".join(choose.randint(0, 5).to_bytes(4, "big") for _ in range(6))
        path = put_index(fs, data[:-rows] + junk)
        with fs.open_read(path) as file:
            (block,) = read_blocks(file, Offset(0), Offset(1 << 40), NAMES)
            for hashed in (*set(hashes), 5 << 28):
                count = sum(each == hashed for each in hashes)
                for offsets in (newest_offsets, first_offsets):
                    found = None
                    with suppress(DamagedIndexError):
                        found = list(offsets(file, block, hashed, Offset(0), block.end))
                    answers.add(found is None)
                    assert found is None or len(found) == count
    assert answers == {True, False}


def test_a_segment_has_positions_up_to_the_last_bit() -> None:
    """The greatest position and the greatest hash are found."""
    last = SEGMENT_BYTES_MAX - 100
    maker = BlockMaker(Offset(0), NAMES, lambda _field: 2**32 - 1)
    payload, flag = encode_payload(b"", None, b"1")
    size = maker.add(encode_record(payload, id=MessageId(1), flag=flag), Offset(last))
    block_bytes = b"".join(maker.encode(Offset(0), Offset(last + size)))
    fs = disk_with_directory()
    with fs.open_read(put_index(fs, block_bytes)) as file:
        (block,) = read_blocks(file, Offset(0), Offset(1 << 40), NAMES)
        assert read_positions(file, block, 2**32 - 1) == [last]
        assert read_positions(file, block, 0) == []


def two_blocks() -> tuple[FaultyFileSystem, int, int]:
    """Return a disk with two blocks, and where each ends in the log."""
    fs = disk_with_directory()
    first = block_of([1 << 28, 2 << 28, 3 << 28])
    end = 3 * 29
    put_index(fs, first + block_of([4 << 28, 5 << 28], base=end))
    return fs, end, end + 2 * 29


def merged_over(fs: FaultyFileSystem, first: int, end: int) -> bytes:
    """Return a block over those of the file from the first one on."""
    with fs.open_read(DIRECTORY / NAME) as file:
        older = read_blocks(file, Offset(0), Offset(end), NAMES)[first:]
        maker = BlockMaker(Offset(0), NAMES)
        return b"".join(maker.encode(older[0].base, Offset(end), file, older))


def test_a_merged_block_takes_the_place_of_those_before_it() -> None:
    """Those are believed again if it ends too late."""
    fs, middle, end = two_blocks()
    last = end + 29
    two = fs.read_file(DIRECTORY / NAME, SizeBytes(1 << 20))
    put_index(fs, two + block_of([6], base=end))
    three = fs.read_file(DIRECTORY / NAME, SizeBytes(1 << 20))
    late = merged_over(fs, 1, last)
    all_of_it = three + late + merged_over(fs, 0, last)
    put_index(fs, three + late)

    def ends(data: bytes, until: int = last) -> list[tuple[int, int]]:
        put_index(fs, data)
        with fs.open_read(DIRECTORY / NAME) as file:
            blocks = read_blocks(file, Offset(0), Offset(until), NAMES)
            whole = [each for each in blocks if read_positions(file, each, 4 << 28)]
            assert whole or not blocks or until < end
        return [(each.base, each.end) for each in blocks]

    assert ends(three + late) == [(0, middle), (middle, last)]
    assert ends(three + late, last - 1) == [(0, middle), (middle, end)]
    assert ends(all_of_it) == [(0, last)]
    assert ends(all_of_it[:-1]) == [(0, middle), (middle, last)]
    # A block that ends before another one, or leaves bytes out, was not made like this.
    assert ends(three + late + two[: len(block_of([1, 2, 3]))]) == [
        (0, middle), (middle, last)
    ]  # fmt: skip
    assert ends(three + block_of([7], base=last + 1), last + 99) == [
        (0, middle), (middle, end), (end, last)
    ]  # fmt: skip


def test_lists_of_blocks_are_read_again_when_a_file_has_changed() -> None:
    """Also to one of the same size and time; pages of the former are not believed."""
    fs, middle, end = two_blocks()
    lists = BlockLists(2)

    def blocks(until: int, name: str = NAME) -> list[int]:
        with fs.open_read(DIRECTORY / name) as file:
            found = lists.blocks_of(file, Offset(0), Offset(until), NAMES)
        return [each.end for each in found]

    assert blocks(end) == [middle, end]
    assert blocks(end - 1) == [middle], "it is newer than the question"
    with fs.open_append(DIRECTORY / NAME, create=False) as file:
        file.write(block_of([6], base=end))
    assert blocks(end + 29) == [middle, end, end + 29]
    for number in range(3):
        put_index(fs, block_of([number]), f"{number}.keys")
        assert blocks(end, f"{number}.keys") == [29]
    put_index(fs, block_of([1 << 20]))
    with fs.open_read(DIRECTORY / NAME) as file:
        (old,) = lists.blocks_of(file, Offset(0), Offset(end), NAMES)
        assert read_positions(file, old, 1 << 20) == [0]
    # The same entries of a longer log.
    maker = BlockMaker(Offset(0), NAMES, lambda _field: 1 << 20)
    payload, flag = encode_payload(b"", None, b"0")
    maker.add(encode_record(payload, id=MessageId(-1), flag=flag), Offset(0))
    put_index(fs, b"".join(maker.encode(Offset(0), Offset(end))))
    with fs.open_read(DIRECTORY / NAME) as file:
        (new,) = lists.blocks_of(file, Offset(0), Offset(end), NAMES)
        assert (new.end, new.after, new.crc != old.crc) == (end, old.after, True)
        assert read_positions(file, new, 1 << 20) == [0]
        assert read_positions(file, old, 1 << 20) is None


def test_pages_that_changed_places_are_not_believed() -> None:
    """Each is whole, but for its number."""
    fs, size = disk_with_directory(), 516
    data = block_of([1 << 31] * 128)
    first, second = data[60 : 60 + size], data[60 + size : 60 + 2 * size]
    put_index(fs, data[:60] + second + first + data[60 + 2 * size :])
    with fs.open_read(DIRECTORY / NAME) as file:
        (block,) = read_blocks(file, Offset(0), Offset(1 << 40), NAMES)
        assert read_positions(file, block, 1 << 31) is None


def test_blocks_are_believed_from_the_front() -> None:
    """As far as the segment goes, and only those of the names that are indexed."""
    fs, middle, end = two_blocks()
    with fs.open_read(DIRECTORY / NAME) as file:

        def ends(base: int, last: int, names: tuple[bytes, ...] | None) -> list[int]:
            blocks = read_blocks(file, Offset(base), Offset(last), names)
            return [each.end for each in blocks]

        assert ends(0, end, NAMES) == [middle, end]
        assert ends(0, end, None) == [middle, end]
        assert ends(0, end - 1, NAMES) == [middle]
        assert ends(0, middle - 1, NAMES) == []
        assert ends(1, end, NAMES) == []
        assert ends(0, end, field_names(("key", "a"))) == []


def test_an_index_is_cut_with_its_segment() -> None:
    """At the end of a block; one that is whole, or is not there, is left alone."""
    fs, middle, end = two_blocks()
    size = fs.size_of(DIRECTORY / NAME)
    cut_keys(fs, SEGMENT, Offset(0), Offset(end))
    assert fs.size_of(DIRECTORY / NAME) == size
    cut_keys(fs, SEGMENT, Offset(0), Offset(end - 1))
    kept = fs.read_file(DIRECTORY / NAME, SizeBytes(size))
    assert kept == block_of([1 << 28, 2 << 28, 3 << 28])
    assert fs.synced_bytes(DIRECTORY / NAME) == kept
    cut_keys(fs, SEGMENT, Offset(0), Offset(middle - 1))
    assert fs.size_of(DIRECTORY / NAME) == 0
    cut_keys(fs, SEGMENT, Offset(5), Offset(9))


def test_names_are_written_as_their_fields_begin() -> None:
    """A header may be named like the word for the key, in its escaped form only."""
    assert field_names(("key", "order-id", "a=b", "é")) == (
        b"key=",
        b"h.order-id=",
        b"h.a%3Db=",
        b"h.%C3%A9=",
    )
    assert crc32(b"key=42") == 0xCB5A9DA5, "as in files of others"
