"""The span index: golden bytes, growth in place, defensive reading, queries."""

import errno
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metaq.errors import DiskError
from metaq.model import MessageId, Millis, Offset, SizeBytes
from metaq.storage.segment import segment_file_name
from metaq.storage.span_index import (
    INDEX_BYTES_MAX,
    NO_ID,
    SPAN_BYTES_MAX,
    Span,
    SpanIndex,
    SpanIndexWriter,
    SpanTotals,
    decode_index,
    encode_index,
    read_index,
    read_totals,
    spans_path,
)
from tests.cases import for_each
from tests.rigs.fs import FaultyFileSystem, keep_random
from tests.sampling import examples
from tests.storage.logs import DIRECTORY, SPAN, content, disk_with_directory, put_file

BASE = Offset(4096)
META = DIRECTORY / segment_file_name(BASE)
SPANS = "00000000000000004096.spans"

GOLDEN = bytes.fromhex(
    "4d512d5350414e53 00000001 0000000000001000 0000000000000007 88be4674 "
    "0000000000001000 00000005 00000002 000000000000000a 3610a686 c22545b9 "
    "0000000000001005 00000003 00000001 000000000000000b 352441c2 39c132ea"
)
EXAMPLE = SpanIndex(
    BASE,
    MessageId(7),
    (
        Span(BASE, SizeBytes(5), 2, Millis(10), crc32(b"hello")),
        Span(Offset(4101), SizeBytes(3), 1, Millis(11), crc32(b"abc")),
    ),
)


def writer_on(disk: FaultyFileSystem, base: Offset = BASE) -> SpanIndexWriter:
    return SpanIndexWriter.create(disk, META, base, NO_ID, span_bytes_min=SPAN)


def append(writer: SpanIndexWriter, data: bytes, count: int, time_ms: int) -> None:
    list(writer.extend([data], record_count=count))
    writer.commit(Millis(time_ms))


def stored(disk: FaultyFileSystem) -> SpanIndex:
    index = read_index(disk, META, BASE)
    assert index is not None
    return index


def test_the_bytes_are_those_of_the_drawing() -> None:
    """Header and entries, field by field, as past versions wrote them."""
    assert encode_index(EXAMPLE).hex() == GOLDEN.hex()
    assert decode_index(GOLDEN, BASE) == EXAMPLE


def test_every_flipped_bit_only_shortens_what_is_believed() -> None:
    """No flip changes an entry that is still believed; header flips end all belief."""
    for bit in range(len(GOLDEN) * 8):
        damaged = bytearray(GOLDEN)
        damaged[bit // 8] ^= 1 << bit % 8
        index = decode_index(damaged, BASE)
        if bit < 32 * 8:
            assert index is None
        else:
            assert index is not None
            assert index.spans == EXAMPLE.spans[: bit // 8 // 32 - 1]


@for_each("size", range(len(GOLDEN)))
def test_a_short_file_is_believed_as_far_as_it_goes(size: int) -> None:
    """A cut at any byte leaves the whole entries before it."""
    index = decode_index(GOLDEN[:size], BASE)
    assert (index is None) == (size < 32)
    if index is not None:
        assert index.spans == EXAMPLE.spans[: size // 32 - 1]


def test_entries_that_do_not_follow_each_other_are_not_believed() -> None:
    """A gap, an overlap, an empty span, a span without records: belief ends there."""
    first, second = EXAMPLE.spans
    for bad in (
        second._replace(base_offset=Offset(4102)),
        second._replace(base_offset=Offset(4100)),
        second._replace(size_bytes=SizeBytes(0)),
        second._replace(record_count=0),
    ):
        data = encode_index(SpanIndex(BASE, NO_ID, (first, bad)))
        index = decode_index(data, BASE)
        assert index is not None
        assert index.spans == (first,)


def test_the_index_of_another_segment_is_not_believed() -> None:
    """Base offset and version have to be ours."""
    assert decode_index(GOLDEN, Offset(0)) is None


@settings(max_examples=examples(200), deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_without_an_error(data: bytes) -> None:
    """Garbage gives nothing, later a good header too."""
    assert decode_index(data, BASE) is None
    index = decode_index(GOLDEN[:32] + data, BASE)
    assert index is not None
    assert index.spans == ()


def test_small_commits_grow_the_last_entry_in_place() -> None:
    """Commits of less than the minimum share an entry, and each one is covered."""
    disk = disk_with_directory()
    writer = writer_on(disk)
    for number in range(4):
        append(writer, b"%d" % number * 30, 2, 100 + number)
        assert stored(disk).end_offset == writer.end_offset == BASE + 30 * (number + 1)
    writer.close()
    data = b"".join(b"%d" % number * 30 for number in range(4))
    assert stored(disk).spans == (
        Span(BASE, SizeBytes(90), 6, Millis(102), crc32(data[:90])),
        Span(Offset(BASE + 90), SizeBytes(30), 2, Millis(103), crc32(data[90:])),
    )
    assert (writer.record_count, writer.newest_append_ms) == (8, 103)


def test_bytes_that_are_not_synced_have_no_entry() -> None:
    """Extending writes nothing; one commit then covers it all, of any size."""
    disk = disk_with_directory()
    writer = writer_on(disk)
    append(writer, b"a" * 10, 1, 1)
    calls = disk.calls
    list(writer.extend([b"b" * 20, memoryview(b"c" * 20)], record_count=2))
    list(writer.extend([b"d" * 40], record_count=1))
    list(writer.extend([b"e" * 70], record_count=3))
    list(writer.extend([b"f"], record_count=1))
    assert disk.calls == calls
    assert stored(disk).end_offset == writer.end_offset == BASE + 10
    assert writer.record_count == 1
    writer.commit(Millis(2))
    writer.commit(Millis(3))
    data = b"a" * 10 + b"b" * 20 + b"c" * 20 + b"d" * 40
    assert stored(disk).spans == (
        Span(BASE, SizeBytes(90), 4, Millis(2), crc32(data)),
        Span(Offset(BASE + 90), SizeBytes(70), 3, Millis(2), crc32(b"e" * 70)),
        Span(Offset(BASE + 160), SizeBytes(1), 1, Millis(2), crc32(b"f")),
    )
    assert writer.record_count == 8
    writer.seal()


def test_a_span_never_outgrows_its_length_field() -> None:
    """If the sum would not fit, a new span begins."""
    span = Span(BASE, SizeBytes(SPAN_BYTES_MAX - 5), 1, Millis(0), 0)
    disk = disk_with_directory()
    index = SpanIndex(BASE, NO_ID, (span,))
    put_file(disk, SPANS, encode_index(index))
    writer = SpanIndexWriter.resume(disk, META, index, span_bytes_min=1 << 33)
    append(writer, b"123456", 1, 1)
    assert [s.size_bytes for s in stored(disk).spans] == [SPAN_BYTES_MAX - 5, 6]
    writer.close()


def test_a_writer_goes_on_where_the_file_ends() -> None:
    """Close and resume after every commit gives the same file as one writer."""
    one, many = disk_with_directory(), disk_with_directory()
    writer = writer_on(one)
    writer_on(many).close()
    for number in range(20):
        data = bytes([number]) * (7 * number % 90 + 1)
        append(writer, data, 1, number)
        resumed = SpanIndexWriter.resume(many, META, stored(many), span_bytes_min=SPAN)
        append(resumed, data, 1, number)
        resumed.close()
    writer.close()
    assert content(one, SPANS) == content(many, SPANS)


def test_a_new_segment_forgets_an_old_index_of_that_name() -> None:
    """Creating replaces what was there, so no stale entry can be believed."""
    disk = disk_with_directory()
    put_file(disk, SPANS, GOLDEN)
    writer_on(disk).close()
    assert stored(disk) == SpanIndex(BASE)


def test_want_of_room_delays_entries_and_loses_none() -> None:
    """ENOSPC is not the caller's worry; the next commit brings what is missing."""
    disk = disk_with_directory()
    writer = writer_on(disk)
    for number in range(3):
        disk.fail_at(disk.calls + 1, errno.ENOSPC, taken=20)
        append(writer, b"x" * 80, 1, number)
    assert stored(disk).spans == ()
    append(writer, b"y" * 8, 1, 9)
    assert [span.size_bytes for span in stored(disk).spans] == [80, 80, 80, 8]
    writer.close()


def test_a_disk_error_is_told_and_leaves_a_readable_prefix() -> None:
    """EIO on commit or at close reaches the caller; nothing stays open."""
    disk = disk_with_directory()
    writer = writer_on(disk)
    append(writer, b"x" * 80, 1, 1)
    disk.fail_at(disk.calls + 1, errno.EIO, taken=20)
    with pytest.raises(DiskError):
        append(writer, b"x" * 80, 1, 2)
    assert [span.size_bytes for span in stored(disk).spans] == [80]
    disk.fail_at(disk.calls + 2, errno.EIO)
    with pytest.raises(DiskError):
        writer.seal()
    writer.abandon()
    assert disk.open_paths() == []


@for_each("number", range(40))
def test_after_a_power_cut_the_index_is_a_prefix(number: int) -> None:
    """Whatever pages were kept, what is believed was once written; without a whole
    header that is nothing.
    """
    disk = disk_with_directory()
    writer = writer_on(disk)
    disk.sync_directory(DIRECTORY)
    seen = {SpanIndex(BASE).spans}
    for at in range(20):
        append(writer, bytes([at]) * 30, 1, at)
        seen.add(stored(disk).spans)
    prefixes = {spans[:size] for spans in seen for size in range(len(spans) + 1)}
    found = read_index(disk.crash(keep_random(number)), META, BASE)
    assert found is None or found.spans in prefixes
    writer.close()
    assert stored(disk.crash()).end_offset == BASE + 600


def test_a_missing_or_monstrous_file_is_no_index() -> None:
    """No file, or one that cannot be ours: nothing is believed, little is read."""
    disk = disk_with_directory()
    assert read_index(disk, META, BASE) is None
    put_file(disk, SPANS, GOLDEN)
    assert read_index(disk, META, BASE) == EXAMPLE
    assert read_index(disk, META, BASE, len(GOLDEN) - 1) is None
    disk.fail_at(disk.calls + 1, errno.EACCES)
    with pytest.raises(DiskError):
        read_index(disk, META, BASE)
    assert INDEX_BYTES_MAX > 32 << 20


def test_questions_are_answered_from_the_entries() -> None:
    """Counts, spans by offset and the newest time."""
    assert EXAMPLE.record_count == 3
    assert EXAMPLE.newest_append_ms == 11
    assert SpanIndex(BASE).newest_append_ms is None
    assert [EXAMPLE.index_of(Offset(o)) for o in (4095, 4096, 4100, 4101, 4104)] == [
        0, 0, 0, 1, 2,
    ]  # fmt: skip
    assert spans_path(DIRECTORY / "4096.meta", BASE) == DIRECTORY / SPANS


def test_the_seal_has_the_bytes_of_the_drawing() -> None:
    """End offset, no length, the number of all records."""
    sealed = encode_index(EXAMPLE, is_sealed=True)
    seal = "0000000000001008 00000000 00000000 0000000000000003 00000000"
    body = bytes.fromhex(seal)
    assert sealed == GOLDEN + body + crc32(body).to_bytes(4, "big")
    assert decode_index(sealed, BASE) == EXAMPLE


@pytest.mark.slow
def test_totals_come_from_the_seal_and_without_it_from_the_entries() -> None:
    """Every flipped bit of the file gives the same totals or such of a prefix."""
    disk = disk_with_directory()
    assert read_totals(disk, META, BASE) == SpanTotals(BASE, 0, None)
    writer = writer_on(disk)
    for number in range(3):
        append(writer, b"x" * 70, 2, number)
    writer.seal()
    whole = SpanTotals(Offset(BASE + 210), 6, Millis(2))
    calls = disk.calls
    assert read_totals(disk, META, BASE) == whole
    assert disk.log[calls].name == "open"
    assert sum(call.size for call in disk.log[calls:] if call.name == "read") == 96
    prefixes = [
        SpanTotals(Offset(BASE + 70 * n), 2 * n, Millis(n - 1)) for n in (1, 2, 3)
    ]
    prefixes.append(SpanTotals(BASE, 0, None))
    for bit in range(disk.size_of(DIRECTORY / SPANS) * 8):
        damaged = disk.snapshot()
        damaged.flip_bit(DIRECTORY / SPANS, bit)
        assert read_totals(damaged, META, BASE) in prefixes
    disk.fail_at(disk.calls + 1, errno.EMFILE)
    with pytest.raises(DiskError):
        read_totals(disk, META, BASE)
    disk.fail_at(disk.calls + 1, errno.EIO)
    assert read_totals(disk, META, BASE) == SpanTotals(BASE, 0, None)


def test_a_seal_that_found_no_room_is_not_missed() -> None:
    """The totals are then added up from the entries."""
    disk = disk_with_directory()
    writer = writer_on(disk)
    append(writer, b"x" * 70, 2, 5)
    disk.set_capacity(1)
    writer.seal()
    assert read_totals(disk, META, BASE) == SpanTotals(Offset(BASE + 70), 2, Millis(5))
