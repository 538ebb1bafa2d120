"""Decoding finds all records, and creates the messages that they contain."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.client.consume.decode import decode_joined, decode_messages
from metaq.errors import CorruptRecordError
from metaq.model import BrokerId, Message, MessageId, Offset, Position, TopicPartition
from metaq.record.flags import decode_payload, encode_payload
from metaq.record.layout import HEADER_BYTES, encode_record
from metaq.record.runs import RecordRun
from metaq.record.scan import CleanEnd, Corrupt, Incomplete, read_record, scan_records

PARTITION = TopicPartition("t", BrokerId(3), 1)
BASE = Offset(1_000)


def record(data: bytes, number: int, attribute: str | None = None) -> bytes:
    """Encode a record; one with an attribute that is not empty has a key, too."""
    key = "key-1" if attribute else None
    payload, flag = encode_payload(data, attribute, key)
    return encode_record(payload, id=MessageId(number), flag=flag)


def expected(log: bytes) -> list[Message]:
    """Decode record by record, with nothing but the functions of `record`."""
    starts: list[Position] = []
    scan_records(log, starts=starts)
    messages = []
    for start in starts:
        found = read_record(log, start)
        assert not isinstance(found, CleanEnd | Incomplete | Corrupt)
        data, attribute, key, headers = decode_payload(found.payload, found.flag)
        offset = Offset(BASE + start)
        follower = Offset(offset + found.size_bytes)
        place = (found.id, PARTITION, offset, follower)
        messages.append(Message("t", data, attribute, *place, key, headers))
    return messages


runs = st.tuples(
    st.integers(0, 12), st.integers(1, 24), st.sampled_from([None, "", "k=v"])
)


@given(
    shape=st.lists(runs, max_size=6),
    cut=st.integers(0, 60),
    flip=st.none() | st.integers(0, 4_000),
)
def test_messages_agree_with_the_record(
    shape: list[tuple[int, int, str | None]], cut: int, flip: int | None
) -> None:
    """Runs, odd ones between them, a cut tail and one flipped bit anywhere."""
    log = bytearray()
    for size, count, attribute in shape:
        for number in range(count):
            log += record(bytes([number]) * size, number + 1, attribute)
    if flip is not None and log:
        log[flip % len(log)] ^= 0x10
    data = bytes(log[: max(0, len(log) - cut)])
    messages, ending = decode_messages(data, PARTITION, BASE)
    if isinstance(ending, CorruptRecordError):
        # A flipped flag made an attribute of what is none: the walk stops there.
        assert len(messages) < len(expected_starts(data))
        return
    assert list(messages) == expected(data)
    assert ending == scan_records(data, ending.position)
    whole = scan_records(data)
    assert (type(ending), ending.position) == (type(whole), whole.position)


def expected_starts(log: bytes) -> list[Position]:
    starts: list[Position] = []
    scan_records(log, starts=starts)
    return starts


def test_messages_are_the_same_one_by_one_in_part_and_all() -> None:
    log = b"".join(record(b"%d" % n, n, "k=v" if n % 3 else None) for n in range(9))
    messages, ending = decode_messages(log, PARTITION, BASE)
    wanted = expected(log)
    assert list(messages) == [messages[at] for at in range(9)] == wanted
    assert list(messages[2:5]) == wanted[2:5]
    assert {type(message) for message in (*messages, messages[-1])} == {Message}
    assert messages[-1].next_offset == BASE + len(log)
    assert isinstance(ending, CleanEnd)


@pytest.mark.parametrize("octet", [4, 5, 6, 7, HEADER_BYTES])
def test_damage_stops_before_it(octet: int) -> None:
    one = record(b"x" * 5, 7)
    log = bytearray(one * 100)
    log[60 * len(one) + octet] ^= 1
    messages, ending = decode_messages(bytes(log), PARTITION, BASE)
    assert len(messages) == 60
    assert isinstance(ending, Corrupt)
    assert ending.position == 60 * len(one)


def test_a_bad_attribute_block_is_an_error_behind_what_is_good() -> None:
    bad = encode_record(b"\x00\x00\x00\x09x", id=MessageId(2), flag=1)
    messages, ending = decode_messages(record(b"a", 1) + bad, PARTITION, BASE)
    assert [m.data for m in messages] == [b"a"]
    assert isinstance(ending, CorruptRecordError)
    assert "length 9, but 1 bytes follow" in str(ending)


@given(counts=st.lists(st.integers(1, 3), max_size=6), order=st.randoms())
def test_runs_agree_with_the_log_that_they_are_of(
    counts: list[int], order: random.Random
) -> None:
    """In any order, with gaps between them."""
    log, parts = b"", list[tuple[int, int]]()
    for count in counts:
        log += record(b"between", 0)
        start = len(log)
        for number in range(count):
            log += record(bytes(number), number + 1, "k=v" if number % 2 else None)
        parts.append((start, len(log)))
    order.shuffle(parts)
    found = decode_joined(
        [RecordRun(Offset(BASE + start), log[start:end]) for start, end in parts],
        PARTITION,
    )
    by_offset = {message.offset: message for message in expected(log)}
    assert list(found) == [
        by_offset[offset]
        for start, end in parts
        for offset in sorted(by_offset)
        if BASE + start <= offset < BASE + end
    ]


@pytest.mark.parametrize("first_bytes", [1, 30, 80])
def test_a_record_is_not_put_together_of_two_runs(first_bytes: int) -> None:
    """Joined, the bytes are whole records; the runs are not."""
    log = record(b"a", 1) + record(bytes(40), 2)
    halves = log[:first_bytes], log[first_bytes:]
    assert first_bytes != len(record(b"a", 1))
    with pytest.raises(CorruptRecordError, match="damaged record at"):
        decode_joined(
            [
                RecordRun(Offset(at), half)
                for at, half in zip((0, 500), halves, strict=True)
            ],
            PARTITION,
        )
