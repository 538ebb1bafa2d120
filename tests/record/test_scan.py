"""A walk ends in one of three results; the search finds what follows damage."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.model import MessageId, Position
from metaq.record.layout import HEADER, Record, encode_record
from metaq.record.scan import (
    CleanEnd,
    Corrupt,
    Flaw,
    Incomplete,
    find_next_record,
    iter_records,
    read_record,
    scan_records,
    search_next_record,
)

A = encode_record(b"hello", id=MessageId(1))
B = encode_record(b"", id=MessageId(-2))
C = encode_record(b"\0" * 30, id=MessageId(3), flag=-1)
PAYLOADS = st.lists(st.binary(max_size=40), max_size=6)


def log_of(payloads: list[bytes]) -> bytes:
    return b"".join(
        encode_record(payload, id=MessageId(number))
        for number, payload in enumerate(payloads, 1)
    )


def test_a_whole_buffer_ends_cleanly() -> None:
    """Every record is counted, placed, and the last id is returned."""
    starts: list[Position] = []
    assert scan_records(A + B + C, starts=starts) == CleanEnd(95, 3, -2 + 5)
    assert starts == [0, 25, 45]
    assert scan_records(A + B + C, Position(45)) == CleanEnd(95, 1, 3)
    assert scan_records(b"") == CleanEnd(Position(0))


def test_every_cut_is_incomplete_at_the_last_record_end() -> None:
    """A buffer cut anywhere inside a record says where it starts and what it needs."""
    for cut in range(1, len(A)):
        result = scan_records((C + A)[: len(C) + cut])
        needed = 20 if cut < 20 else 25
        assert result == Incomplete(len(C), needed, 1, MessageId(3))
        assert read_record((C + A)[: len(C) + cut], Position(len(C))) == Incomplete(
            len(C), needed
        )


BAD = [
    (HEADER.pack(-1, 0, 5, 0), Flaw.NEGATIVE_LENGTH, "length -1"),
    (HEADER.pack(101, 0, 5, 0), Flaw.LENGTH_OVER_LIMIT, "length 101, the limit is 100"),
    (bytes(20), Flaw.ZERO_HEADER, "20 zero bytes"),
    (bytes(45), Flaw.ZERO_HEADER, "20 zero bytes"),
    (HEADER.pack(0, 1, 5, 0), Flaw.CHECKSUM_MISMATCH, "expected 1, got 0 over 0 bytes"),
    (
        HEADER.pack(3, -1, 5, 0) + b"abc",
        Flaw.CHECKSUM_MISMATCH,
        "expected -1, got 891568578 over 3 bytes",
    ),
]


@pytest.mark.parametrize(("bad", "flaw", "text"), BAD)
def test_bytes_that_are_no_record_are_corrupt(
    bad: bytes, flaw: Flaw, text: str
) -> None:
    """The result names position, flaw and both numbers, and counts what was good."""
    result = scan_records(A + bad, payload_bytes_max=100)
    assert isinstance(result, Corrupt)
    assert (result.position, result.flaw) == (25, flaw)
    assert (result.record_count, result.last_id) == (1, 1)
    assert text in result.detail
    single = read_record(A + bad, Position(25), payload_bytes_max=100)
    assert isinstance(single, Corrupt)
    assert (single.position, single.flaw, single.detail) == (25, flaw, result.detail)


def test_reading_one_record_at_a_time_walks_the_buffer() -> None:
    """`read_record` gives each record and then the clean end."""
    position, seen = Position(0), []
    while isinstance(record := read_record(A + B + C, position), Record):
        seen.append(record.id)
        position = Position(position + record.size_bytes)
    assert seen == [1, -2, 3]
    assert record == CleanEnd(95)


def test_every_flipped_payload_or_length_bit_is_noticed() -> None:
    """No single flipped bit of length, checksum or payload leaves a valid record."""
    raw = encode_record(b"abcdef", id=MessageId(7))
    for bit in [*range(8 * 8), *range(20 * 8, len(raw) * 8)]:
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        assert not isinstance(scan_records(damaged), CleanEnd), bit


@given(PAYLOADS, st.integers(0, 400))
def test_a_walk_over_any_prefix_stops_at_a_record_boundary(
    payloads: list[bytes], cut: int
) -> None:
    """A prefix of a log is never corrupt and holds exactly its whole records."""
    log, ends = log_of(payloads), [0]
    for payload in payloads:
        ends.append(ends[-1] + 20 + len(payload))
    prefix = log[:cut]
    result = scan_records(prefix)
    assert not isinstance(result, Corrupt)
    whole = [end for end in ends if end <= len(prefix)]
    assert (result.position, result.record_count) == (whole[-1], len(whole) - 1)
    assert isinstance(result, CleanEnd) == (result.position == len(prefix))


@given(st.binary(max_size=200), st.binary(min_size=1, max_size=40))
def test_a_record_behind_any_bytes_is_found(junk: bytes, payload: bytes) -> None:
    """The search never runs past a whole record with a payload."""
    log = junk + encode_record(payload, id=MessageId(9))
    found = find_next_record(log)
    assert found is not None
    assert found <= len(junk)
    assert isinstance(read_record(log, found), Record)


def test_the_search_tells_empty_records_from_zeros() -> None:
    """Eight zero bytes count as an empty record only when they lead somewhere."""
    assert find_next_record(bytes(500)) is None
    assert find_next_record(bytes(500) + b"tail of a torn write") is None
    assert find_next_record(b"xx" + bytes(8) + b"\1" * 30) is None
    assert find_next_record(bytes(500) + A) == 500
    assert find_next_record(b"xxx" + B + A) == 3
    assert find_next_record(b"xxx" + B + B) == 3
    assert find_next_record(b"xxx" + B + HEADER.pack(0, 9, 1, 0)) is None
    assert find_next_record(b"xxx" + B + HEADER.pack(-1, 9, 1, 0)) is None
    assert find_next_record(b"xxx" + B + bytes(24)) is None
    assert find_next_record(b"xxx" + B + A[:20]) is None


def test_the_search_keeps_to_its_bounds() -> None:
    """Start and limit are positions that are tried and not tried."""
    log = A + b"?" + A
    assert find_next_record(log) == 0
    assert find_next_record(log, Position(1)) == 26
    assert find_next_record(log, Position(1), Position(26)) is None
    assert find_next_record(log, Position(1), Position(27)) == 26
    assert find_next_record(log, Position(26)) == 26
    assert find_next_record(log, Position(27)) is None
    assert find_next_record(log, Position(1), payload_bytes_max=4) is None
    assert find_next_record(b"") is None


def test_scanning_leaves_no_reference_to_the_buffer() -> None:
    """A bytearray can be resized right after each function returned."""
    buffer = bytearray(A + B + C)
    scan_records(buffer)
    read_record(buffer)
    find_next_record(buffer, Position(1))
    buffer.clear()


def test_flaw_texts_are_words() -> None:
    """Reports print the value of a flaw."""
    for flaw in Flaw:
        assert re.fullmatch(r"[a-z -]+", flaw.value)


def test_a_search_with_a_bound_says_how_far_it_came() -> None:
    """Long records in vain, and bytes where no header can be, count both."""
    log = HEADER.pack(900_000, 1, 1, 1) * 50_000 + A
    found, tried = search_next_record(log, Position(1), effort_max=10**7)
    assert not found
    assert 1 < tried < 10_000
    assert search_next_record(bytes(10**6), Position(0), effort_max=128_000) == (
        False,
        1000,
    )
    good = Position(5)
    assert search_next_record(b"\xff" * 5 + A, good, effort_max=10**6) == (True, good)
    assert search_next_record(b"\xff" * 50, Position(0), effort_max=10**6) == (
        False,
        50,
    )


def test_a_file_that_is_shorter_than_it_was_ends_the_walk() -> None:
    """Between two records, and within one: then the last item is the flaw."""
    data = encode_record(b"one", id=MessageId(1)) + encode_record(
        b"two", id=MessageId(2)
    )
    for size, flaws in ((len(data) // 2, []), (len(data) - 1, [Incomplete])):
        file = data[:size]
        items = list(
            iter_records(
                lambda at, count, file=file: file[at : at + count],  # type: ignore[misc]  # a loop
                Position(0),
                Position(len(data)),
            )
        )
        first, *rest = items
        assert isinstance(first, tuple)
        assert first[1].payload == b"one"
        assert [type(each) for each in rest] == flaws
