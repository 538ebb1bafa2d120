"""A cursor asks the broker about damage that it found, and follows the answer."""

import pytest

from metaq.client.consume.cursor import AGAIN_MAX, PartitionCursor
from metaq.errors import CorruptRecordError, RemoteProtocolError, UnavailableError
from metaq.model import BrokerId, MessageId, Offset, TopicPartition
from metaq.peer.replies import Damaged, Fetched
from metaq.protocol.commands import Check, Reply, Result
from metaq.protocol.texts import DAMAGED, with_code
from metaq.record.layout import encode_record

PARTITION = TopicPartition("t", BrokerId(3), 1)
FIRST, SECOND = (encode_record(p, id=MessageId(1)) for p in (b"first", b"second"))
BAD = FIRST[:-1] + b"T"
START = Offset(100)
GOOD = Result(200, b"125", 7)


def damaged_cursor() -> PartitionCursor:
    """Return a cursor that has just found a damaged record at START."""
    cursor = PartitionCursor(PARTITION, START)
    find_damage(cursor)
    return cursor


def find_damage(cursor: PartitionCursor) -> None:
    with pytest.raises(CorruptRecordError):
        cursor.on_reply(Fetched(BAD + SECOND))


def named(start: int, end: int) -> Result:
    text = with_code("no", DAMAGED, {"from": start, "to": end})
    return Result(500, text.encode(), 7)


def test_the_damaged_record_is_asked_about() -> None:
    """From where it begins to where the next good one does."""
    cursor = damaged_cursor()
    assert cursor.may_be_good()
    assert cursor.next_check(7) == Check("t", 1, START, len(FIRST), 7)


def test_damage_that_the_broker_named_is_not_asked_about() -> None:
    """Nor what it names as the answer; what is found later is."""
    cursor = PartitionCursor(PARTITION, START)
    with pytest.raises(CorruptRecordError):
        cursor.on_reply(Damaged(START, Offset(125), None, "bad"))
    assert not cursor.may_be_good()
    find_damage(cursor)
    assert cursor.may_be_good()


def test_good_bytes_are_got_again() -> None:
    """From the same offset, as if nothing had been received."""
    cursor = damaged_cursor()
    cursor.next_check(7)
    cursor.on_check(GOOD)
    assert (cursor.fetch_offset, cursor.again_count) == (START, 1)
    messages = cursor.on_reply(Fetched(FIRST + SECOND))
    assert [message.data for message in messages] == [b"first", b"second"]


def test_damage_that_the_broker_finds_counts_with_its_bounds() -> None:
    """They may be wider: its index covers headers, and it has seen all of the file."""
    cursor = damaged_cursor()
    cursor.next_check(7)
    with pytest.raises(CorruptRecordError) as caught:
        cursor.on_check(named(90, 200))
    assert (caught.value.offset, caught.value.next_good_offset) == (START, 200)
    assert (cursor.offset, cursor.after_damage) == (START, 200)
    assert cursor.again_count == 0


@pytest.mark.parametrize("answer", [GOOD, Result(500, b"?", 7), Result(404, b"?", 7)])
def test_bytes_are_got_again_so_many_times_at_one_offset(answer: Reply) -> None:
    """Whatever keeps the broker from calling them damaged; then they are damaged."""
    cursor = damaged_cursor()
    for _ in range(AGAIN_MAX):
        assert cursor.may_be_good()
        cursor.next_check(7)
        cursor.on_check(answer)
        find_damage(cursor)
    assert not cursor.may_be_good()
    assert cursor.again_count == AGAIN_MAX
    cursor.seek(Offset(125))
    find_damage(cursor)
    assert cursor.may_be_good()


def test_an_answer_that_may_change_counts_as_none() -> None:
    """The caller waits and asks again, as often as it takes."""
    cursor = damaged_cursor()
    for _ in range(AGAIN_MAX + 1):
        cursor.next_check(7)
        with pytest.raises(UnavailableError):
            cursor.on_check(Result(503, b"later", 7))
        find_damage(cursor)
        assert cursor.may_be_good()


@pytest.mark.parametrize(
    "answer",
    [Result(200, b"100", 7), Result(200, b"x", 7), named(101, 200), named(90, 100)],
)
def test_an_answer_about_something_else_breaks_the_rules(answer: Reply) -> None:
    """It neither is believed nor uses up an attempt."""
    cursor = damaged_cursor()
    cursor.next_check(7)
    with pytest.raises(RemoteProtocolError):
        cursor.on_check(answer)
    assert cursor.again_count == 0
