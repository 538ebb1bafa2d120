"""The producer file: its bytes, what is believed of them, and when it is rewritten."""

import errno
from zlib import crc32

import pytest

from metaq.errors import DiskError, NoSpaceError
from metaq.model import MessageId, Offset, SizeBytes
from metaq.storage.listing import check_names
from metaq.storage.producer_file import (
    ENTRY_BYTES,
    FILE_FACTOR,
    HEADER,
    PRODUCERS_NAME,
    Notes,
    ProducerFile,
    decode_notes,
    encode_entry,
    encode_header,
    read_notes,
    stored_batches,
    torn_batch,
)
from metaq.storage.producers import BATCHES_KEPT, StoredBatch
from metaq.storage.segment import Segment, segment_file_name
from tests.rigs.fs import FaultyFileSystem
from tests.storage.logs import DIRECTORY, content, disk_with_directory, put_file, record

EXAMPLE = StoredBatch(
    "host-1",
    4000,
    2,
    1649521298,
    MessageId(1661382015569637376),
    Offset(4096),
    SizeBytes(50),
)
GOLDEN_HEADER = b"MQ-PRODS" + bytes.fromhex("00000001")
GOLDEN_ENTRY = bytes.fromhex(
    "686f73742d31" + "00" * 58 + "0000000000000fa0 00000002"
    "6251b292 170e6a240a403000 0000000000001000 00000032"
)
RECORDS = [record(number, 10 + number) for number in range(1, 9)]
STARTS = [sum(map(len, RECORDS[:number])) for number in range(len(RECORDS) + 1)]
META = segment_file_name(Offset(0))


def with_crc(data: bytes) -> bytes:
    return data + crc32(data).to_bytes(4, "big")


def batch(first: int, count: int = 2, *, producer: str = "p") -> StoredBatch:
    """Return the batch that RECORDS[first:first + count] would be."""
    size = STARTS[first + count] - STARTS[first]
    return StoredBatch(
        producer,
        first,
        count,
        -1,
        MessageId(first + 1),
        Offset(STARTS[first]),
        SizeBytes(size),
    )


def log_of(disk: FaultyFileSystem, *pieces: tuple[int, int]) -> list[Segment]:
    """Write segments of RECORDS[start:end] each."""
    segments = []
    for start, end in pieces:
        data, base = b"".join(RECORDS[start:end]), Offset(STARTS[start])
        path = put_file(disk, segment_file_name(base), data)
        segments.append(Segment(path, base, SizeBytes(len(data))))
    return segments


def test_the_bytes_are_those_of_the_drawing() -> None:
    """Golden: files of earlier versions are read for ever."""
    assert encode_header() == with_crc(GOLDEN_HEADER)
    assert encode_entry(EXAMPLE) == with_crc(GOLDEN_ENTRY)
    assert (len(encode_header()), len(encode_entry(EXAMPLE))) == (16, 104)
    data = with_crc(GOLDEN_HEADER) + with_crc(GOLDEN_ENTRY)
    assert decode_notes(data) == Notes((EXAMPLE,))


def test_a_flipped_bit_costs_one_entry_at_most() -> None:
    """In the header it costs the file: another version may mean something else."""
    data = encode_header() + b"".join(encode_entry(batch(n)) for n in range(3))
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        notes = decode_notes(bytes(damaged))
        assert notes.flaw
        hit = (bit // 8 - HEADER.size) // ENTRY_BYTES
        expected = [batch(n) for n in range(3) if n != hit] if hit >= 0 else []
        assert list(notes.batches) == expected


@pytest.mark.parametrize("cut", [1, 50, 103])
def test_a_torn_entry_costs_itself(cut: int) -> None:
    """The size of the file says that there is a flaw."""
    data = encode_header() + encode_entry(batch(0)) + encode_entry(batch(2))[:cut]
    notes = decode_notes(data)
    assert notes.batches == (batch(0),)
    assert f"1 are good, the file has {ENTRY_BYTES + cut} bytes" in notes.flaw


def test_no_file_and_a_monstrous_one_say_nothing() -> None:
    """A Java broker's directory has none; one that cannot be read is a flaw."""
    disk = disk_with_directory()
    assert read_notes(disk, DIRECTORY) == Notes()
    data = encode_header() + encode_entry(EXAMPLE)
    put_file(disk, PRODUCERS_NAME, data)
    assert read_notes(disk, DIRECTORY) == Notes((EXAMPLE,))
    notes = read_notes(disk, DIRECTORY, len(data) - 1)
    assert notes == Notes((), "expected at most 119 bytes, got 120")
    for error in (errno.EACCES, errno.EIO):
        disk.fail_at(disk.calls + 1, error)
        notes = read_notes(disk, DIRECTORY)
        assert notes.batches == ()
        assert errno.errorcode[error] in notes.flaw
    disk.fail_at(disk.calls + 1, errno.EMFILE)
    with pytest.raises(DiskError):
        read_notes(disk, DIRECTORY)
    assert disk.open_paths() == []


def test_a_note_counts_where_the_log_has_the_batch() -> None:
    """All of it, with its first id at its offset."""
    disk = disk_with_directory()
    segments = log_of(disk, (2, 4), (4, 7))
    trimmed, first, second = batch(0), batch(2), batch(4)
    other_id = StoredBatch(
        "p", 4, 2, -1, MessageId(99), second.offset, second.size_bytes
    )
    cut, later = (
        batch(6),
        StoredBatch("p", 9, 1, -1, MessageId(9), Offset(9999), SizeBytes(1)),
    )
    noted = [trimmed, first, other_id, second, cut, later]
    kept = stored_batches(disk, segments, noted, producer_count_max=9)
    assert kept == (first, second)
    assert disk.open_paths() == []


def test_of_the_stored_ones_the_last_are_remembered() -> None:
    """Five of each producer, and of the producers those that were noted last."""
    disk = disk_with_directory()
    segments = log_of(disk, (0, 8))
    noted = [batch(7, 1, producer="old"), *(batch(n, 1) for n in range(7))]
    noted.append(batch(0, 8, producer="q"))
    kept = stored_batches(disk, segments, noted, producer_count_max=2)
    assert kept == (*(batch(n, 1) for n in range(2, 7)), batch(0, 8, producer="q"))
    assert BATCHES_KEPT == 5


@pytest.mark.parametrize("end", range(len(STARTS)))
def test_a_part_of_a_batch_is_told_by_where_the_log_ends(end: int) -> None:
    """Not where the index covers it, and not where another record is there."""
    disk = disk_with_directory()
    (segment,) = log_of(disk, (0, end))
    noted = [batch(0, 3), batch(3, 2), batch(5, 3)]
    inside = {1: 0, 2: 0, 4: 1, 6: 2, 7: 2}
    found = torn_batch(
        disk, segment, noted, covered_end=Offset(0), end=Offset(STARTS[end])
    )
    assert found == (noted[inside[end]] if end in inside else None)
    covered = Offset(STARTS[end])
    assert torn_batch(disk, segment, noted, covered_end=covered, end=covered) is None
    others = [
        StoredBatch("p", 0, 9, -1, MessageId(77), one.offset, one.size_bytes)
        for one in noted
    ]
    end_offset = Offset(STARTS[end])
    assert (
        torn_batch(disk, segment, others, covered_end=Offset(0), end=end_offset) is None
    )


# -- the writer


def writer(
    disk: FaultyFileSystem, *batches: StoredBatch, limit: int = 2
) -> ProducerFile:
    return ProducerFile(disk, DIRECTORY, producer_count_max=limit, batches=batches)


def test_the_first_note_writes_the_file_again() -> None:
    """With what recovery found, regardless of what was there."""
    disk = disk_with_directory()
    put_file(disk, PRODUCERS_NAME, b"rubbish")
    file = writer(disk, batch(0))
    file.note([batch(2), batch(4)])
    file.keep([batch(2), batch(4)])
    assert read_notes(disk, DIRECTORY) == Notes((batch(0), batch(2), batch(4)))
    file.close()
    file.close()
    assert disk.open_paths() == []
    assert disk.crash().read_file(DIRECTORY / PRODUCERS_NAME, SizeBytes(9999))


def test_what_was_noted_and_not_kept_is_overwritten() -> None:
    """A group that found no room leaves no trace that matters."""
    disk = disk_with_directory()
    file = writer(disk)
    file.note([batch(0)])
    file.note([batch(2)])
    file.keep([batch(2)])
    assert read_notes(disk, DIRECTORY).batches == (batch(2),)
    file.close()


def test_the_file_is_written_again_when_it_has_too_many_entries() -> None:
    """Then it has those that are remembered, and the new ones."""
    disk = disk_with_directory()
    file = writer(disk)
    bound = FILE_FACTOR * BATCHES_KEPT * 2
    sizes = []
    for number in range(3 * bound):
        one = StoredBatch(
            "ab"[number % 2], number, 1, -1, MessageId(1), Offset(0), SizeBytes(1)
        )
        file.note([one])
        file.keep([one])
        sizes.append(len(read_notes(disk, DIRECTORY).batches))
    assert max(sizes) == bound
    assert sizes[bound] == 2 * BATCHES_KEPT + 1
    file.close()


@pytest.mark.parametrize("call", range(1, 9))
def test_without_room_nothing_is_noted_and_a_later_try_succeeds(call: int) -> None:
    """Whichever call of the first note finds none."""
    disk = disk_with_directory()
    file = writer(disk, batch(0))
    disk.fail_at(disk.calls + call, errno.ENOSPC)
    try:
        file.note([batch(2)])
    except (NoSpaceError, DiskError):
        file.note([batch(2)])
    file.keep([batch(2)])
    assert read_notes(disk, DIRECTORY).batches == (batch(0), batch(2))
    file.abandon()
    assert disk.open_paths() == []


def test_half_a_rewritten_file_is_a_leftover() -> None:
    """Recovery removes it; the file itself is left alone."""
    disk = disk_with_directory()
    put_file(disk, PRODUCERS_NAME, b"x")
    put_file(disk, f"{PRODUCERS_NAME}.tmp", b"x")
    listing = check_names(disk, DIRECTORY)
    assert [path.name for path in listing.leftovers] == ["producers.tmp"]
    assert listing.segments == ()
    assert not listing.bad_name


def test_the_golden_file_is_not_what_java_looks_at() -> None:
    """Its broker takes names that end in .meta, and nothing else."""
    assert not PRODUCERS_NAME.endswith(".meta")
    disk = disk_with_directory()
    file = writer(disk)
    file.note([EXAMPLE])
    file.close()
    assert content(disk, PRODUCERS_NAME) == encode_header() + encode_entry(EXAMPLE)
