"""Hits of an index: no record with one of the fields is left out, damaged or not."""

import random
from pathlib import Path

import pytest

from metaq.fs import FileSystem, ReadFile
from metaq.model import Offset, SizeBytes
from metaq.record.checksum import crc32
from metaq.record.flags import encode_payload
from metaq.record.layout import encode_record
from metaq.storage.key_hits import FIELDS_MAX, GAP_BYTES, KeyHits, find_hits
from metaq.storage.key_index import BlockLists, field_names, keys_path
from metaq.storage.key_merge import BlockMaker
from metaq.storage.segment import Segment
from tests.sampling import SEED, examples
from tests.storage.logs import DIRECTORY, disk_with_directory, put_file

NAMES = field_names(("tag", "key"))
BASE = Offset(5000)
SEGMENT = DIRECTORY / f"{BASE:020d}.meta"
NAME = keys_path(SEGMENT, BASE).name
PAID, VOID = b"h.tag=paid", b"h.tag=void"
FEW, MANY = b"h.tag=few", b"h.tag=many"
COUNT_MAX = 1000


class Made:
    """A segment, as far as its index is about it: (offset, fields) of its records."""

    def __init__(self, tags: list[list[str]], per_block: int, size: int = 40) -> None:
        self.fs = disk_with_directory()
        self.rows: list[tuple[int, list[bytes]]] = []
        self.ends: list[int] = []
        at = int(BASE)
        for first in range(0, len(tags), per_block):
            maker, base = BlockMaker(BASE, NAMES), Offset(at)
            for each in tags[first : first + per_block]:
                headers = [("tag", tag.encode()) for tag in each]
                payload, flag = encode_payload(bytes(size), headers=headers)
                record = encode_record(payload, id=1, flag=flag)
                self.rows.append((at, [b"h.tag=" + tag.encode() for tag in each]))
                at += maker.add(record, Offset(at))
            put_file(self.fs, NAME, b"".join(maker.encode(base, Offset(at))))
            self.ends.append(at)
        self.end = at

    def find(self, *sets: tuple[bytes, ...], start: int = BASE, **options) -> KeyHits:
        options = {"count_max": COUNT_MAX, "lists": BlockLists(), **options}
        size = SizeBytes(options.pop("end", self.end) - BASE)
        segment = Segment(SEGMENT, BASE, size)
        names = options.pop("names", NAMES)
        fs = options.pop("fs", self.fs)
        return find_hits(fs, segment, names, sets, Offset(start), **options)

    def of(self, *fields: bytes, start: int = 0) -> list[int]:
        """Return the offsets of the records with one of the fields."""
        return [at for at, has in self.rows if at >= start and set(has) & set(fields)]


def rare(count: int, *tags: str) -> list[list[str]]:
    """Return tags: of every hundredth record one of these, of others their own."""
    return [[f"x{n}" if n % 100 else tags[n // 100 % len(tags)]] for n in range(count)]


def is_nothing(found: KeyHits) -> bool:
    """Return whether it says nothing of the first record."""
    return found.start == found.end == BASE and not found.offsets


def test_hits_of_all_blocks_come_in_order() -> None:
    """Of the fields of a set, from any record on, as far as there are blocks."""
    made = Made(rare(1000, "paid", "void"), 200)
    found = made.find((PAID, VOID))
    assert list(found.offsets) == made.of(PAID, VOID)
    assert found[:2] == (BASE, made.end)
    start = made.rows[501][0]
    found = made.find((PAID,), start=start)
    assert list(found.offsets) == made.of(PAID, start=start)
    assert found[:2] == (start, made.end)
    nothing = made.find((b"h.tag=none",))
    assert (nothing.end, list(nothing.offsets)) == (made.end, [])


def test_a_block_that_ends_later_than_the_segment_says_nothing() -> None:
    """Nor does one of other names; nor where there is no index."""
    made = Made(rare(1000, "paid"), 200)
    found = made.find((PAID,), end=made.ends[2] + 1)
    assert found.end == made.ends[2]
    assert list(found.offsets) == made.of(PAID)[: len(found.offsets)]
    for options in ({"names": NAMES[:1]}, {"fs": disk_with_directory()}):
        assert is_nothing(made.find((PAID,), **options))
    assert made.find((PAID,), start=made.end).end == made.end


@pytest.mark.parametrize("count", [1, 2, 4, 5, 9])
def test_only_so_many_hits_come(count: int) -> None:
    """They end at the next one: it is the first of the next look."""
    made = Made(rare(1000, "paid", "void"), 200)
    wanted, at, seen = made.of(PAID, VOID), int(BASE), list[int]()
    while at < made.end:
        found = made.find((PAID, VOID), start=at, count_max=count)
        assert len(found.offsets) <= count
        assert found.end > at
        at, seen = found.end, seen + list(found.offsets)
        assert at == made.end or at in wanted
    assert seen == wanted


def test_where_many_records_have_it_it_says_nothing() -> None:
    """Of the sets the rarest counts, block by block."""
    tags = [["many"] if n % 2 else ["few"] if n == 8 else ["x"] for n in range(2000)]
    made = Made(tags, 1000)
    assert is_nothing(made.find((MANY,)))
    for sets in ([(MANY,), (FEW,)], [(FEW,), (MANY,)]):
        found = made.find(*sets)
        assert (list(found.offsets), found.end) == (made.of(FEW), made.end)
    assert is_nothing(made.find((FEW, MANY)))
    # A block before one with many of them does say something.
    tags = [["x"]] * 1000 + [["many"]] * 1000
    made = Made(tags, 1000)
    found = made.find((MANY,))
    assert (found.end, list(found.offsets)) == (made.ends[0], [])


@pytest.mark.slow
def test_a_few_fields_are_looked_up_at_once() -> None:
    """The rest is another look."""
    made = Made(rare(2000, "paid"), 200, size=GAP_BYTES)
    fields = (PAID, *(b"h.tag=%d" % number for number in range(FIELDS_MAX // 2)))
    found = made.find(fields)
    assert (found.end, list(found.offsets)) == (made.ends[1], made.of(*fields)[:4])


def test_damage_of_an_index_is_named() -> None:
    """The blocks before it count; a flipped bit anywhere leaves out no hit."""
    tags, rng, count = rare(200, "paid", "void"), random.Random(SEED), 0
    for _ in range(examples(100)):
        made = Made(tags, 40)
        size = made.fs.size_of(DIRECTORY / NAME)
        made.fs.flip_bit(DIRECTORY / NAME, rng.randrange(8 * size))
        found = made.find((PAID,))
        assert list(found.offsets) == [at for at in made.of(PAID) if at < found.end]
        assert not found.is_damaged or found.end < made.end
        count += found.is_damaged
    assert count


class MadeAgain:
    """A disk on which an index is made again while it is read."""

    def __init__(self, fs: FileSystem, data: bytes) -> None:
        self.fs, self.data, self.read_count = fs, data, 0

    def try_open_read(self, path: Path) -> ReadFile:
        file = self.fs.open_read(path)
        whole = file.read_at

        def read_at(position, size):
            self.read_count += 1
            if self.read_count == 3:  # the header was read, and that there is no other
                with self.fs.open_append(path, create=False) as index:
                    index.truncate(SizeBytes(0))
                    index.write(self.data)
            return whole(position, size)

        file.read_at = read_at
        return file


def test_an_index_that_is_made_again_while_it_is_read_says_nothing() -> None:
    """Its blocks may be others, with the slots elsewhere."""
    tags = rare(400, "paid")
    before, after = Made(tags[:200], 200), Made(tags, 400)
    data = after.fs.read_file(DIRECTORY / NAME, SizeBytes(1 << 20))
    fs = MadeAgain(before.fs, data)
    assert is_nothing(before.find((PAID,), fs=fs, end=after.end))


def test_other_fields_of_a_hash_are_hits() -> None:
    """A reader of the records finds that out."""
    made = Made(rare(400, "paid"), 200)
    found = made.find((b"h.tag=none",), hash_of=lambda _: crc32(PAID))
    assert list(found.offsets) == made.of(PAID)
