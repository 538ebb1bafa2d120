"""Records are found by key and header, with an index and without, whatever happens."""

import random
from collections import Counter

import pytest

from metaq.errors import CorruptRecordError
from metaq.model import MessageId, Offset, SizeBytes
from metaq.record.checksum import crc32
from metaq.record.flags import encode_payload
from metaq.record.layout import encode_record
from metaq.storage.key_index import keys_path
from metaq.storage.key_lookup import NO_MORE, KeyQuestion, KeySearch
from metaq.storage.key_merge import BlockMaker
from metaq.storage.segment import Damage, DamagedSegmentError, Segment
from metaq.storage.span_index import spans_path
from metaq.storage.span_queries import SpanQueries
from tests.rigs.fs import FaultyFileSystem
from tests.sampling import SEED, examples
from tests.storage.key_machine import FAR, NAMES, KeyMachine, field_of, search
from tests.storage.logs import disk_with_directory, put_segment

ACTS = [
    *4 * [KeyMachine.append],
    *4 * [KeyMachine.build],
    KeyMachine.trim,
    KeyMachine.cut,
    KeyMachine.restart,
    KeyMachine.lose_power,
    KeyMachine.lose_power_in_a_step,
    *2 * [KeyMachine.damage],
    KeyMachine.change_index,
]


@pytest.mark.slow
def test_an_index_never_changes_an_answer() -> None:
    """Appends, trims, cuts, restarts, power cuts, damaged and removed indexes."""
    done, blocks = Counter[str](), 0
    for number in range(examples(30)):
        machine = KeyMachine(SEED + number)
        for _ in range(40):
            act = machine.rng.choice(ACTS)
            act(machine)
            done[act.__name__] += 1
            blocks += len(machine.index_files())
            for _ in range(3):
                machine.check()
        machine.bench.close()
    assert len(done) == len(set(ACTS))
    assert blocks > len(done), "there were indexes"


def test_with_an_index_only_what_has_none_yet_is_read() -> None:
    """The end of the active segment, shorter than a block and its last span."""
    machine = KeyMachine(SEED)
    while len(machine.log.segments) < 4:
        machine.append()
    machine.build_all()
    question = KeyQuestion(field_of(b"a"), FAR, 0, FAR, 1000, 10**6)
    _found, indexed_read, _ = search(machine.fs, machine.log, question)
    _found, read, _ = search(machine.fs, machine.log, question, names=())
    assert read == machine.log.high_watermark
    assert indexed_read <= machine.log.readable_active().size_bytes


def small_log(*payloads: tuple[bytes, int]) -> tuple[FaultyFileSystem, Segment]:
    """Return a sealed segment with a span for each record."""
    fs = disk_with_directory()
    records = [
        encode_record(payload, id=MessageId(number + 1), flag=flag)
        for number, (payload, flag) in enumerate(payloads)
    ]
    path = put_segment(fs, 0, [[each] for each in records], sealed=True)
    return fs, Segment(path, Offset(0), SizeBytes(sum(map(len, records))))


def ask(
    fs: FaultyFileSystem,
    segment: Segment,
    field: bytes,
    *damage: Damage,
    below: Offset = FAR,
    narrow: int = -1,
) -> tuple[list[bytes], int, Offset]:
    """Return the data of what is found, the bytes that were read, where to go on."""
    log = SpanQueries(fs, [segment], damage=damage)
    question = KeyQuestion(field, below, 0, FAR, 1000, 10**6)

    def hash_of(each: bytes) -> int:
        return crc32(each) & narrow

    found = KeySearch(log, question, NAMES, hash_of, piece_bytes=1).run(lambda: False)
    return [run.data[-1:] for run in found.records], found.read_bytes, found.next_offset


def put_index(fs: FaultyFileSystem, segment: Segment, narrow: int = -1) -> bytes:
    """Write the index of a segment as one block; return it."""
    maker = BlockMaker(Offset(0), NAMES, lambda field: crc32(field) & narrow)
    data = fs.read_file(segment.path, SizeBytes(1 << 20))
    assert maker.add(data, Offset(0)) == segment.size_bytes
    block = b"".join(maker.encode(Offset(0), segment.end_offset))
    with fs.open_append(keys_path(segment.path, Offset(0)), create=True) as file:
        file.truncate(SizeBytes(0))
        file.write(block)
    return block


PAYLOADS = [
    encode_payload(b"%d" % number, None, b"k%d" % (number % 3), {"order-id": b"7"})
    for number in range(9)
]
FIELDS = [
    *map(field_of, (b"k0", b"k1", b"k2", b"k3")),
    field_of(None, ("order-id", b"7")),
]


@pytest.mark.parametrize("narrow", [-1, 0, 1, 0x8000_0001])
def test_fields_of_one_hash_are_told_apart(narrow: int) -> None:
    """All of one slot, two hashes, and one at either end of the slots."""
    fs, segment = small_log(*PAYLOADS)
    put_index(fs, segment, narrow)
    answers = [ask(fs, segment, field, narrow=narrow) for field in FIELDS]
    assert answers == [
        ([b"6", b"3", b"0"], 0, NO_MORE),
        ([b"7", b"4", b"1"], 0, NO_MORE),
        ([b"8", b"5", b"2"], 0, NO_MORE),
        ([], 0, NO_MORE),
        ([b"%d" % number for number in reversed(range(9))], 0, NO_MORE),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("copies", [1, 30])
def test_a_bit_that_flips_in_an_index_changes_no_answer(copies: int) -> None:
    """Each bit of one page; of several, some: what does not hold is not believed."""
    fs, segment = small_log(*copies * PAYLOADS)
    block = put_index(fs, segment)
    path = keys_path(segment.path, Offset(0))
    expected = [ask(fs, segment, field)[0] for field in FIELDS]
    bits, reads = range(8 * len(block)), Counter[bool]()
    if copies > 1:
        bits = random.Random(SEED).sample(bits, examples(100))
    for bit in bits:
        fs.flip_bit(path, bit)
        found = [ask(fs, segment, field) for field in FIELDS]
        assert [each[0] for each in found] == expected, bit
        reads.update(bool(each[1]) for each in found)
        fs.flip_bit(path, bit)
    assert reads[True] > len(bits) / 2
    assert bool(reads[False]) == (copies > 1), "a page that is not asked for"


def test_after_a_damaged_page_no_record_comes_twice() -> None:
    """Those of later pages were found before; the log is read for the rest."""
    fs, segment = small_log(*800 * [encode_payload(b"", None, b"same")])
    put_index(fs, segment)
    fs.flip_bit(keys_path(segment.path, Offset(0)), 8 * 70)
    size, field = segment.size_bytes // 800, field_of(b"same")
    found, read_bytes, _after = ask(fs, segment, field)
    assert len(found) == 800
    assert 0 < read_bytes <= 4 * 64 * size


def test_a_search_stops_at_known_damage_and_names_it() -> None:
    """Records after it are found; below the damage it goes on."""
    fs, segment = small_log(*PAYLOADS)
    size = segment.size_bytes // 9
    hole = Damage(segment.path, Offset(3 * size), Offset(4 * size), "zeros")
    for has_index in (False, True):
        if has_index:
            put_index(fs, segment)
        found, _read, after = ask(fs, segment, FIELDS[-1], hole)
        assert (found, after) == ([b"8", b"7", b"6", b"5", b"4"], 4 * size)
        with pytest.raises(DamagedSegmentError, match="zeros"):
            ask(fs, segment, FIELDS[-1], hole, below=after)
        found, _read, after = ask(fs, segment, FIELDS[-1], hole, below=hole.offset)
        assert (found, after) == ([b"2", b"1", b"0"], NO_MORE)


def test_a_record_that_is_damaged_is_not_given_as_an_answer() -> None:
    """Its checksum is looked at before it leaves."""
    fs, segment = small_log(*PAYLOADS)
    put_index(fs, segment)
    fs.flip_bit(segment.path, 8 * (segment.size_bytes - 1))
    for names_index in (True, False):
        if not names_index:
            fs.unlink(keys_path(segment.path, Offset(0)))
        with pytest.raises(CorruptRecordError, match="is damaged"):
            ask(fs, segment, FIELDS[-1])


@pytest.mark.slow
def test_a_search_may_begin_anywhere() -> None:
    """A record that ends above the offset is not found, with an index or without."""
    fs, segment = small_log(*PAYLOADS)
    size = segment.size_bytes // 9
    for has_index in (False, True):
        if has_index:
            put_index(fs, segment)
        for below in range(segment.size_bytes + 2):
            found = ask(fs, segment, FIELDS[-1], below=Offset(below))[0]
            count = min(9, below // size)
            assert found == [b"%d" % n for n in reversed(range(count))], below


def test_records_longer_than_a_piece_are_found() -> None:
    """Read whole, with what is around them."""
    fs, segment = small_log(
        encode_payload(b"a" * 5000 + b"1", None, b"k0"),
        encode_payload(b"b" * 9000 + b"2", None, b"k1"),
        encode_payload(b"c" * 7000 + b"3", None, b"k0"),
    )
    assert ask(fs, segment, FIELDS[0])[0] == [b"3", b"1"]
    put_index(fs, segment)
    assert ask(fs, segment, FIELDS[0]) == ([b"3", b"1"], 0, NO_MORE)
    # Without spans all of the segment is one gap.
    fs.unlink(spans_path(segment.path, Offset(0)))
    fs.unlink(keys_path(segment.path, Offset(0)))
    assert ask(fs, segment, FIELDS[0])[0] == [b"3", b"1"]
