"""A cursor advances over whole records and never loops."""

import random
import re
import struct
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.client.consume.cursor import (
    FETCH_BYTES,
    FRUITLESS_MAX,
    SMALL_MAX,
    PartitionCursor,
)
from metaq.client.errors import NoProgressError
from metaq.errors import CorruptRecordError
from metaq.model import BrokerId, Message, MessageId, Offset, TopicPartition
from metaq.peer.replies import Fetched, GetOutcome, MovedTo, NothingThere
from metaq.record.flags import encode_payload
from metaq.record.layout import encode_record

PARTITION = TopicPartition("t", BrokerId(3), 1)


def record(payload: bytes, message_id: int = 1, flag: int = 0) -> bytes:
    return encode_record(payload, id=MessageId(message_id), flag=flag)


def feed(cursor: PartitionCursor, outcomes: Iterable[GetOutcome]) -> None:
    """Hand over answers of which none brings a message."""
    for outcome in outcomes:
        assert cursor.on_reply(outcome) == []


def drain(cursor: PartitionCursor, log: bytes, transfer_max: int) -> list[Message]:
    """Serve gets from `log` until the cursor is done."""
    messages = []
    while not cursor.is_done:
        start, size = cursor.fetch_offset, min(cursor.size_bytes, transfer_max)
        messages += cursor.on_reply(Fetched(log[start : start + size]))
    return messages


@given(
    payloads=st.lists(st.binary(max_size=60), min_size=1, max_size=30),
    transfer_max=st.integers(min_value=10, max_value=500),
)
def test_wherever_answers_are_cut_every_message_comes_once(
    payloads: list[bytes], transfer_max: int
) -> None:
    """Any cut of the slices gives the same messages with the right offsets."""
    records = [record(p, i + 1) for i, p in enumerate(payloads)]
    log = b"".join(records)
    cursor = PartitionCursor(PARTITION, Offset(0), end=Offset(len(log)))
    messages = drain(cursor, log, transfer_max)
    assert [m.data for m in messages] == payloads
    assert [m.id for m in messages] == list(range(1, len(payloads) + 1))
    for message in messages:
        raw = log[message.offset : message.next_offset]
        assert raw == record(message.data, message.id)
    assert cursor.offset == len(log)


def test_an_attribute_is_taken_off_the_data() -> None:
    """The message has the attribute and the application's bytes apart."""
    payload, flag = encode_payload(b"data", "color=red")
    log = record(payload, flag=flag) + record(b"plain")
    cursor = PartitionCursor(PARTITION, Offset(0))
    first, second = cursor.on_reply(Fetched(log))
    assert (first.data, first.attribute) == (b"data", "color=red")
    assert (second.data, second.attribute) == (b"plain", None)
    assert first.partition == PARTITION


def test_a_record_larger_than_a_get_is_asked_for_whole() -> None:
    """The next get asks for what the record needs; then the size goes back."""
    log = record(bytes(3 * FETCH_BYTES))
    cursor = PartitionCursor(PARTITION, Offset(0))
    assert cursor.on_reply(Fetched(log[:FETCH_BYTES])) == []
    assert cursor.size_bytes == len(log)
    (message,) = cursor.on_reply(Fetched(log))
    assert len(message.data) == 3 * FETCH_BYTES
    assert cursor.size_bytes == FETCH_BYTES


@pytest.mark.parametrize("transfer_max", [1, 19, 20, 21, 100, 1019])
def test_a_record_larger_than_any_answer_is_put_together(transfer_max: int) -> None:
    """A transfer limit below a record's size costs more gets, not the message."""
    log = record(b"small") + record(bytes(range(250)) * 4) + record(b"follower")
    cursor = PartitionCursor(PARTITION, Offset(0), end=Offset(len(log)))
    messages = drain(cursor, log, transfer_max)
    assert [len(m.data) for m in messages] == [5, 1000, 8]
    assert messages[1].data == bytes(range(250)) * 4
    assert messages[2].offset == 25 + 1020


def test_a_record_whose_rest_never_comes_is_an_error() -> None:
    """The beginning of a record without its end is asked for again, a few times."""
    log = record(bytes(1000))
    cursor = PartitionCursor(PARTITION, Offset(0))
    with pytest.raises(CorruptRecordError, match="rest of its 1020 bytes does not"):
        feed(cursor, [Fetched(log[:100]), NothingThere()] * (FRUITLESS_MAX + 1))
    assert (cursor.fetch_offset, cursor.after_damage) == (0, 100)


def with_length(length: int, payload: bytes = b"bad") -> bytes:
    """Return a record whose length has rotted."""
    return struct.pack(">i", length) + record(payload)[4:]


@given(
    payloads=st.lists(st.binary(min_size=1, max_size=60), min_size=1, max_size=9),
    rotten=st.integers(0, 8),
    length=st.integers(min_value=0, max_value=2**31 - 1),
    transfer_max=st.integers(min_value=10, max_value=500),
)
def test_whatever_length_a_record_says_the_others_come(
    payloads: list[bytes], rotten: int, length: int, transfer_max: int
) -> None:
    """No good record is left out, and none is asked for without end."""
    rotten %= len(payloads)
    pieces = [record(one) for one in payloads]
    pieces[rotten] = with_length(length, payloads[rotten])
    log = b"".join(pieces)
    cursor = PartitionCursor(PARTITION, Offset(0), fetch_bytes=50, fetch_bytes_max=2000)
    found: list[bytes] = []
    for _ in range(200):
        start, size = cursor.fetch_offset, min(cursor.size_bytes, transfer_max)
        data = log[start : start + size]
        if not data and start == len(log) and not cursor.is_incomplete:
            break
        try:
            outcome = Fetched(data) if data else NothingThere()
            found += [message.data for message in cursor.on_reply(outcome)]
        except CorruptRecordError:
            cursor.seek(cursor.after_damage)
    else:
        pytest.fail("it did not come to the end")
    good = payloads[:rotten] + payloads[rotten + 1 :]
    assert [one for one in found if one in payloads] == (
        payloads if length == len(payloads[rotten]) else good
    )


LARGE = record(bytes(1000))


@pytest.mark.parametrize(
    "after",
    [b"", record(b"next"), record(b"next") + b"\0\0", record(bytes(300))[:200]],
)
def test_a_record_that_is_too_large_is_no_damage(after: bytes) -> None:
    """It ends where another one begins, or the log, or a segment."""
    cursor = PartitionCursor(PARTITION, Offset(7), fetch_bytes_max=500)
    feed(cursor, [Fetched(LARGE[:400])])
    assert (cursor.fetch_offset, cursor.is_incomplete) == (7 + 1019, True)
    with pytest.raises(NoProgressError, match=r"record of 1020 bytes \(at most 500"):
        feed(cursor, [Fetched(b"\0" + after)])
    assert cursor.fetch_offset == 7


@pytest.mark.parametrize(
    "answer",
    [NothingThere(), MovedTo(Offset(90)), Fetched(b"\0" * 30), Fetched(b"\xff" * 30)],
)
def test_a_length_that_leads_nowhere_is_damage(answer: GetOutcome) -> None:
    """The next good record is looked for in what there is."""
    cursor = PartitionCursor(PARTITION, Offset(7), fetch_bytes_max=500)
    bad = with_length(2**31 - 1)
    feed(cursor, [Fetched(bad + record(b"good"))])
    with pytest.raises(CorruptRecordError, match="does not end where it says"):
        feed(cursor, [answer])
    assert (cursor.offset, cursor.after_damage) == (7, 7 + len(bad))
    cursor.seek(cursor.after_damage)
    (message,) = cursor.on_reply(Fetched(record(b"good")))
    assert message.data == b"good"


def test_a_beginning_is_dropped_when_the_offset_moves() -> None:
    """Bytes collected at another offset are no part of the record there."""
    cursor = PartitionCursor(PARTITION, Offset(0))
    feed(cursor, [Fetched(record(bytes(1000))[:100]), MovedTo(Offset(5000))])
    assert cursor.fetch_offset == 5000
    (message,) = cursor.on_reply(Fetched(record(b"whole")))
    assert (message.data, message.offset) == (b"whole", 5000)


def test_damage_is_reported_behind_the_good_records() -> None:
    """Good records come out; then the error names the offset and the next good one."""
    good, bad = record(b"good"), bytearray(record(b"bad bytes"))
    bad[25] ^= 1
    log = good + bytes(bad) + record(b"after")
    cursor = PartitionCursor(PARTITION, Offset(0))
    assert [m.data for m in cursor.on_reply(Fetched(log))] == [b"good"]
    next_good = len(good) + len(bad)
    expected = f"damaged record at offset {len(good)}: .* is at offset {next_good}"
    for _ in range(2):
        with pytest.raises(CorruptRecordError, match=expected):
            cursor.on_reply(Fetched(log[cursor.offset :]))
    assert cursor.offset == len(good)


@pytest.mark.parametrize(
    ("damaged", "after"),
    [
        (record(b"bad")[:-1] + b"x", len(record(b"bad"))),
        (b"\xff" * 30, 30 + 10),
    ],
    ids=["in the payload", "in the header"],
)
def test_without_a_good_record_reading_goes_on_behind_the_damage(
    damaged: bytes, after: int
) -> None:
    """Bytes that were never looked at may hold good ones."""
    size = len(damaged) + 10
    cursor = PartitionCursor(
        PARTITION, Offset(7), fetch_bytes=size, fetch_bytes_max=size
    )
    rest = record(b"good" * 20)[:10]
    with pytest.raises(CorruptRecordError, match="no good record"):
        feed(cursor, [Fetched(damaged + rest)] * 10)
    assert cursor.after_damage == 7 + after


def test_an_attribute_block_that_is_cut_is_damage_too() -> None:
    """A flag that announces what is not there ends in an error, not in a guess."""
    good, bad = record(b"good"), record(b"\x00\x00", flag=1)
    cursor = PartitionCursor(PARTITION, Offset(0))
    assert len(cursor.on_reply(Fetched(good + bad))) == 1
    with pytest.raises(CorruptRecordError, match=f"next record is at {len(good) + 22}"):
        cursor.on_reply(Fetched(bad))


def test_a_moved_offset_is_followed_but_not_for_ever() -> None:
    """301 moves the cursor; a broker that goes on moving it is not followed."""
    cursor = PartitionCursor(PARTITION, Offset(0))
    assert cursor.on_reply(MovedTo(Offset(500))) == []
    assert cursor.offset == 500
    with pytest.raises(NoProgressError, match="t/3-1: no progress at offset"):
        feed(cursor, [MovedTo(Offset(n)) for n in range(FRUITLESS_MAX + 1)])


def test_no_data_before_a_known_end_is_not_waited_for() -> None:
    """A reader with an end does not spin when the log got shorter."""
    cursor = PartitionCursor(PARTITION, Offset(0), end=Offset(100))
    with pytest.raises(NoProgressError, match="no data before the end"):
        feed(cursor, [NothingThere()] * (FRUITLESS_MAX + 1))


def test_without_an_end_no_data_is_no_error() -> None:
    """A follower hears that there is nothing as often as it asks."""
    cursor = PartitionCursor(PARTITION, Offset(0))
    for _ in range(10 * FRUITLESS_MAX):
        assert cursor.on_reply(NothingThere()) == []


def test_messages_behind_the_end_are_left_out() -> None:
    """Messages appended after reading began are not handed out."""
    first, second = record(b"a"), record(b"b")
    cursor = PartitionCursor(PARTITION, Offset(0), end=Offset(len(first)))
    assert [m.data for m in cursor.on_reply(Fetched(first + second))] == [b"a"]
    assert cursor.is_done


def test_random_bytes_never_loop(rng: random.Random) -> None:
    """Whatever a broker sends, a bounded number of answers ends in an error."""
    for _ in range(200):
        cursor = PartitionCursor(
            PARTITION,
            Offset(0),
            end=Offset(10_000),
            fetch_bytes=50,
            fetch_bytes_max=200,
        )
        answers = [rng.randbytes(rng.randrange(1, 60)) for _ in range(300)]
        with pytest.raises((CorruptRecordError, NoProgressError)):
            feed(cursor, [Fetched(b"\x80" + answer) for answer in answers])


HUGE = struct.pack(">iiqi", 2_000_000_000, 123, 5, 0)
"""A header that claims more than is ever fetched."""
BOTH_NUMBERS = r"record of 2000000020 bytes \(at most 67108864 are fetched\)"


@pytest.mark.slow
@pytest.mark.parametrize(
    "filler",
    [HUGE, HUGE + b"x" * 100, bytes(20)],
    ids=["headers", "headers and text", "zeros"],
)
def test_the_search_behind_a_huge_length_ends_soon(filler: bytes) -> None:
    """Whatever each answer is full of; what was not looked at is read on from."""
    cursor = PartitionCursor(PARTITION, Offset(0))

    def answers() -> Iterator[GetOutcome]:
        for _ in range(5):
            yield Fetched(HUGE + filler * (cursor.size_bytes // len(filler)))

    with pytest.raises(CorruptRecordError, match=BOTH_NUMBERS):
        feed(cursor, answers())
    assert 0 < cursor.after_damage < 8 * FETCH_BYTES


def test_bytes_that_are_searched_are_no_progress() -> None:
    """Nor is it silent: the damage has both numbers before the search is over."""
    cursor = PartitionCursor(PARTITION, Offset(7))
    feed(cursor, [Fetched(HUGE + b"x" * 100)] * 5)
    assert cursor.reached == 7
    assert re.search(BOTH_NUMBERS, str(cursor.damage))
    cursor.seek(Offset(7))
    assert cursor.damage is None


@pytest.mark.parametrize(
    ("head", "error", "text"),
    [
        (HUGE, CorruptRecordError, BOTH_NUMBERS),
        (with_length(60_000_000), NoProgressError, "of 60000020 bytes, got .* answers"),
    ],
    ids=["too large", "large"],
)
def test_a_record_does_not_come_in_crumbs_for_ever(
    head: bytes, error: type[Exception], text: str
) -> None:
    """A broker that gives next to nothing each time is not asked without end."""
    cursor = PartitionCursor(PARTITION, Offset(0))
    with pytest.raises(error, match=text):
        feed(cursor, [Fetched(head + b"x" * 100)] * (SMALL_MAX + 3))
