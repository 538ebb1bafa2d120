"""A batch is stamped whole or refused with the record and both numbers."""

import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from metaq.model import MessageId, Position
from metaq.record.batch import STEP_BYTES, BatchError, check_in_steps
from metaq.record.ids import SEQUENCE_MASK, id_after
from metaq.record.layout import HEADER, encode_record
from metaq.record.pieces import join_in_steps
from metaq.record.scan import CleanEnd, read_record, scan_records
from tests.record.stamping import check_and_stamp, run_to_end

NO_ID = MessageId(0)
FIRST = MessageId((1_000_000 << 22) | (3 << 12) | 4090)


def batch_of(payloads: list[bytes]) -> bytearray:
    return bytearray(
        b"".join(encode_record(payload, id=NO_ID, flag=-7) for payload in payloads)
    )


@pytest.mark.parametrize(
    "payloads",
    [
        [b"abc"],
        [b"abc"] * 5000,
        [b"abc", b"de"] * 5000,
        [b""] * 3,
        [b"", b"abc", b""],
        [b"abcd", b"", b"ab"],
    ],
    ids=["one", "equal", "mixed", "empty", "some-empty", "mean-equals-none"],
)
def test_every_record_gets_its_id_and_nothing_else_changes(
    payloads: list[bytes],
) -> None:
    """The k-th record carries `id_after(first, k)`, across the carry too."""
    buffer = batch_of(payloads)
    assert check_and_stamp(buffer, len(payloads), FIRST) is None
    assert buffer == b"".join(
        encode_record(payload, id=id_after(FIRST, k), flag=-7)
        for k, payload in enumerate(payloads)
    )
    assert isinstance(scan_records(buffer), CleanEnd)


@given(st.integers(-(2**62), 2**62), st.integers(12, 600))
@example(-2, 600)
@example(SEQUENCE_MASK - 1, 600)
def test_ids_of_records_of_one_length_are_those_of_any(
    first_id: int, count: int
) -> None:
    """Across bytes, signs and the end of the sequence."""
    first, buffer = MessageId(first_id), batch_of([b"abc"] * count)
    assert check_and_stamp(buffer, count, first) is None
    assert buffer == b"".join(
        encode_record(b"abc", id=id_after(first, k), flag=-7) for k in range(count)
    )


LARGE = {"equal": [b"x" * 100] * 9000, "mixed": [b"x" * 100, b"y" * 99] * 4500}


@pytest.mark.parametrize("payloads", LARGE.values(), ids=LARGE)
def test_a_large_batch_goes_in_steps(payloads: list[bytes]) -> None:
    """Each of about STEP_BYTES; together they find what one step would."""
    buffer = batch_of(payloads)
    steps = list(check_in_steps([bytearray(buffer)], len(payloads)))
    assert len(steps) >= len(buffer) // STEP_BYTES
    assert check_and_stamp(buffer, len(payloads), FIRST) is None
    assert buffer == b"".join(
        encode_record(payload, id=id_after(FIRST, k), flag=-7)
        for k, payload in enumerate(payloads)
    )
    buffer[-1] ^= 1
    error = check_and_stamp(buffer, len(payloads), FIRST)
    assert error is not None
    assert error.detail.startswith(f"record {len(payloads) - 1}: expected checksum ")


some = st.lists(st.binary(max_size=3), min_size=1, max_size=24)


@given(some)
def test_any_batch_reads_back(payloads: list[bytes]) -> None:
    """A stamped batch is a valid log."""
    buffer = batch_of(payloads)
    assert check_and_stamp(buffer, len(payloads), FIRST) is None
    result = scan_records(buffer)
    last_id = id_after(FIRST, len(payloads) - 1)
    assert result == CleanEnd(len(buffer), len(payloads), last_id)
    assert read_record(buffer).payload == payloads[0]


@given(some, st.lists(st.integers(0, 60)), st.integers(1, 60), st.data())
def test_cuts_change_nothing(
    payloads: list[bytes], cuts: list[int], step_bytes: int, data: st.DataObject
) -> None:
    """However a batch comes, and goes in steps, the same is stored or refused."""
    raw = batch_of(payloads)
    if data.draw(st.booleans()):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    count = len(payloads) + data.draw(st.sampled_from([0, 0, 0, -1, 1]))
    whole, cut = bytearray(raw), bytearray(raw)
    expected = check_and_stamp(whole, count, FIRST, payload_bytes_max=2)
    inside = sorted(each for each in cuts if each <= len(raw))
    found = check_and_stamp(
        cut, count, FIRST, payload_bytes_max=2, cuts=inside, step_bytes=step_bytes
    )
    assert found == expected
    assert cut == whole


@pytest.mark.parametrize("payloads", LARGE.values(), ids=LARGE)
def test_a_part_takes_no_more_memory_than_a_block_and_a_record(
    payloads: list[bytes],
) -> None:
    """A large batch needs no memory in one piece."""
    buffer = batch_of(payloads)
    blocks = run_to_end(join_in_steps([buffer[:100_000], buffer[100_000:]], 10_000))
    assert b"".join(blocks) == buffer
    parts = run_to_end(check_in_steps(blocks, len(payloads)))
    assert not isinstance(parts, BatchError)
    assert max(len(part.records) for part in parts) < 10_000 + 120
    assert b"".join(part.records for part in parts) == buffer


def with_length(length: int) -> bytes:
    return HEADER.pack(length, 0, 0, 0)


BAD = [
    (b"", 0, 0, "expected 1 record or more, got 0"),
    (b"", -1, 0, "expected 1 record or more, got -1"),
    (b"", 2, 0, "expected 2 records, got 0"),
    (bytes(batch_of([b"abc"])), 2, 23, "expected 2 records, got 1"),
    (bytes(batch_of([b"abc"] * 3)), 2, 69, "expected 2 records, got 3"),
    (bytes(batch_of([b"abc", b"de"])), 1, 45, "expected 1 records, got 2"),
    (bytes(batch_of([b"abc"])) + b"x", 1, 23, "expected a header of 20 bytes, got 1"),
    (bytes(batch_of([b"abc"]))[:-1], 1, 0, "record 0: length 3, but 2 bytes follow"),
    (with_length(-1), 1, 0, "record 0: length -1, but 0 bytes follow"),
    (with_length(-20) + b"abcd", 1, 0, "record 0: length -20, but 4 bytes follow"),
    (with_length(2**31 - 1), 1, 0, "length 2147483647, but 0 bytes follow"),
]


@pytest.mark.parametrize(("raw", "count", "position", "text"), BAD)
def test_broken_framing_is_refused(
    raw: bytes, count: int, position: int, text: str
) -> None:
    """Lengths must chain to the end, and their number must be the announced one."""
    error = check_and_stamp(bytearray(raw), count, FIRST)
    assert isinstance(error, BatchError)
    assert error.position == position
    assert text in error.detail


@pytest.mark.parametrize(
    "payloads",
    [[b"abc"] * 4, [b"abc", b"de", b"abc", b"d"]],
    ids=["equal", "mixed"],
)
def test_a_wrong_inner_checksum_is_refused(payloads: list[bytes]) -> None:
    """On disk it would look like rot; the record is named."""
    buffer = batch_of(payloads)
    start = sum(20 + len(payload) for payload in payloads[:2])
    (stored,) = struct.unpack_from(">i", buffer, start + 4)
    struct.pack_into(">i", buffer, start + 4, stored ^ 1)
    error = check_and_stamp(buffer, len(payloads), FIRST)
    assert error is not None
    assert error.position == start
    assert error.detail == f"record 2: expected checksum {stored ^ 1}, got {stored}"


@pytest.mark.parametrize(
    "payloads",
    [[b"ab", b"abcd", b"abc"], [b"abcd"] * 12],
    ids=["mixed", "equal"],
)
def test_a_payload_over_the_limit_is_refused(payloads: list[bytes]) -> None:
    """A batch is no way around the limit of a message; what is as long as it goes."""
    buffer, first = batch_of(payloads), payloads.index(b"abcd")
    error = check_and_stamp(buffer, len(payloads), FIRST, payload_bytes_max=3)
    assert error == BatchError(
        Position(22 * first),
        f"record {first}: payload of 4 bytes, expected at most 3",
    )
    assert check_and_stamp(buffer, len(payloads), FIRST, payload_bytes_max=4) is None


def test_every_flipped_bit_but_those_of_id_and_flag_is_refused() -> None:
    """Ids are overwritten and flags are free; all else is covered."""
    raw = bytes(batch_of([b"ab"] * 3))
    for bit in range(len(raw) * 8):
        if 8 <= bit // 8 % 22 < 20:
            continue
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        assert check_and_stamp(damaged, 3, FIRST) is not None, bit


def test_the_buffer_stays_free() -> None:
    """No view survives: the caller may resize the buffer."""
    buffer = batch_of([b"abc", b"de"])
    check_and_stamp(buffer, 2, FIRST)
    buffer.clear()
