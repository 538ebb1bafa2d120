"""Blocks of a key index: what is written is read, and what is damaged is not."""

from hypothesis import given, settings
from hypothesis import strategies as st

from metaq.model import MessageId, Offset, SizeBytes
from metaq.record.checksum import crc32
from metaq.record.flags import encode_payload
from metaq.record.layout import encode_record
from metaq.storage.key_index import (
    BlockMaker,
    count_entries,
    cut_keys,
    field_names,
    first_positions,
    keys_path,
    read_blocks,
    read_positions,
)
from tests.rigs.fs import FaultyFileSystem
from tests.sampling import examples
from tests.storage.logs import DIRECTORY, disk_with_directory, put_file

NAMES = field_names(["key"])
SEGMENT = DIRECTORY / f"{0:020d}.meta"
NAME = keys_path(SEGMENT, Offset(0)).name


def block_of(hashes: list[int], base: int = 0) -> bytes:
    """Return a block over a record for each hash."""
    maker = BlockMaker(Offset(base), NAMES, lambda field: hashes[int(field[4:])])
    at = base
    for number in range(len(hashes)):
        payload, flag = encode_payload(b"", None, b"%d" % number)
        record = encode_record(payload, id=MessageId(number - 1), flag=flag)
        at += maker.add(record, Offset(at))
    return maker.encode(Offset(at))


def boundaries(count: int) -> st.SearchStrategy[int]:
    """Return hashes at the edges of slots, if there are so many entries."""
    edges = [(slot << 32) // max(1, count // 8) for slot in range(count // 8 + 1)]
    near = {min(max(0, edge + by), 2**32 - 1) for edge in edges for by in (-1, 0, 1)}
    return st.sampled_from(sorted(near))


@settings(max_examples=examples(100), deadline=None)
@given(st.data(), st.integers(0, 60))
def test_each_hash_has_the_positions_of_its_records(data, count) -> None:
    """In the order of the log, also where slots end."""
    hashes = data.draw(st.lists(boundaries(count), min_size=count, max_size=count))
    fs = disk_with_directory()
    path = put_file(fs, NAME, block_of(hashes))
    with fs.open_read(path) as file:
        (block,) = read_blocks(file, Offset(0), Offset(1 << 40), NAMES)
        sizes = [20 + 4 + len(b"key=%d" % number) for number in range(count)]
        for hashed in {*hashes, 7}:
            found = read_positions(file, block, hashed)
            assert found == [
                sum(sizes[:number])
                for number in range(count)
                if hashes[number] == hashed
            ]
        assert (block.least_id, block.greatest_id) == (-1, max(-1, count - 2))


@settings(max_examples=examples(50), deadline=None)
@given(st.data(), st.integers(0, 60))
def test_the_first_positions_from_one_on(data, count) -> None:
    """As many as are wanted; the entries of the slot are no fewer."""
    hashes = data.draw(st.lists(boundaries(count), min_size=count, max_size=count))
    path = put_file(fs := disk_with_directory(), NAME, block_of(hashes))
    with fs.open_read(path) as file:
        (block,) = read_blocks(file, Offset(0), Offset(1 << 40), NAMES)
        for hashed in {*hashes, 7}:
            found = read_positions(file, block, hashed)
            assert found is not None
            assert count_entries(file, block, hashed) >= len(found)
            low = data.draw(st.integers(0, 30 * count + 1))
            most = data.draw(st.integers(1, 5))
            wanted = [position for position in found if position >= low][:most]
            first = first_positions(file, block, hashed, low=low, count_max=most)
            assert first == wanted


def test_entries_of_a_file_that_is_cut_are_none() -> None:
    """Then the positions say that it is damaged."""
    path = put_file(fs := disk_with_directory(), NAME, block_of([1, 2, 3]))
    with fs.open_read(path) as file:
        (block,) = read_blocks(file, Offset(0), Offset(1 << 40), NAMES)
        with fs.open_append(path, create=False) as index:
            index.truncate(SizeBytes(60))
        assert count_entries(file, block, 1) == 0
        assert first_positions(file, block, 1, low=0, count_max=1) is None


def two_blocks() -> tuple[FaultyFileSystem, int, int]:
    """Return a disk with two blocks, and where each ends in the log."""
    fs = disk_with_directory()
    first = block_of([1, 2, 3])
    end = 3 * 29
    put_file(fs, NAME, first + block_of([4, 5], base=end))
    return fs, end, end + 2 * 29


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
        assert ends(0, end, field_names(["key", "a"])) == []


def test_an_index_is_cut_with_its_segment() -> None:
    """At the end of a block; one that is whole, or is not there, is left alone."""
    fs, middle, end = two_blocks()
    size = fs.size_of(DIRECTORY / NAME)
    cut_keys(fs, SEGMENT, Offset(0), Offset(end))
    assert fs.size_of(DIRECTORY / NAME) == size
    cut_keys(fs, SEGMENT, Offset(0), Offset(end - 1))
    kept = fs.read_file(DIRECTORY / NAME, SizeBytes(size))
    assert kept == block_of([1, 2, 3])
    assert fs.synced_bytes(DIRECTORY / NAME) == kept
    cut_keys(fs, SEGMENT, Offset(0), Offset(middle - 1))
    assert fs.size_of(DIRECTORY / NAME) == 0
    cut_keys(fs, SEGMENT, Offset(5), Offset(9))


def test_names_are_written_as_their_fields_begin() -> None:
    """A header may be named like the word for the key, in its escaped form only."""
    assert field_names(["key", "order-id", "a=b", "é"]) == (
        b"key=",
        b"h.order-id=",
        b"h.a%3Db=",
        b"h.%C3%A9=",
    )
    assert crc32(b"key=42") == 0xCB5A9DA5, "as in files of others"
