"""A cursor with a filter reads exactly the matching messages of one without."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.client.consume.cursor import PartitionCursor
from metaq.client.consume.decode import matching
from metaq.errors import CorruptRecordError
from metaq.filter.language import parse_filter
from metaq.model import BrokerId, Message, MessageId, Offset, TopicPartition
from metaq.protocol.commands import NO_NEXT, Get, Value
from metaq.record.flags import encode_payload
from metaq.record.layout import HEADER_BYTES, encode_record
from metaq.record.runs import RecordRun, decode_runs, encode_runs

PARTITION = TopicPartition("t", BrokerId(3), 1)
WHERE = "tag = 'a'"
FILTER = parse_filter(WHERE)


class FilteringBroker:
    """A log, and answers to gets as a broker may give them."""

    def __init__(self, records: list[tuple[str | None, int]]) -> None:
        self.log = b""
        self.starts: list[tuple[int, bool]] = []
        for number, (tag, size) in enumerate(records):
            headers = {} if tag is None else {"tag": tag.encode()}
            payload, flag = encode_payload(b"%d-" % number * size, None, None, headers)
            self.starts.append((len(self.log), tag == "a"))
            self.log += encode_record(payload, id=MessageId(number + 1), flag=flag)

    def runs(self, start: int, size: int) -> tuple[list[RecordRun], int]:
        """Return the records that match in so many bytes, and the next offset."""
        ends = [*(at for at, _ in self.starts[1:]), len(self.log)]
        runs, next_offset = list[RecordRun](), start
        for (at, is_match), end in zip(self.starts, ends, strict=True):
            if at < start or end > start + size:
                continue
            next_offset = end
            if not is_match:
                continue
            data = self.log[at:end]
            if runs and runs[-1].offset + len(runs[-1].data) == at:
                runs[-1] = RecordRun(runs[-1].offset, runs[-1].data + data)
            else:
                runs.append(RecordRun(Offset(at), data))
        return runs, next_offset

    def answer(self, get: Get, how: str, scan_bytes: int) -> Value:
        plain = self.log[get.offset : get.offset + min(get.max_size, 300)]
        if get.where is None or how == "plain":
            return Value(plain, get.opaque)
        runs, next_offset = self.runs(get.offset, scan_bytes)
        if next_offset == get.offset:
            return Value(plain, get.opaque, NO_NEXT)
        data = bytearray(encode_runs(runs))
        if how == "damaged" and data:
            data[-1] ^= 0xFF
        return Value(bytes(data), get.opaque, next_offset)


@given(
    st.lists(
        st.tuples(st.sampled_from([None, "a", "b"]), st.integers(0, 150)), min_size=1
    ),
    st.lists(
        st.tuples(
            st.sampled_from(["runs", "runs", "plain", "damaged"]),
            st.integers(50, 900),
        ),
        min_size=1,
    ),
    st.data(),
)
def test_a_reader_with_a_filter_misses_nothing_and_repeats_nothing(
    records: list[tuple[str | None, int]], answers: list[tuple[str, int]], data: Any
) -> None:
    """Whatever the broker filters, sends as it is, or sends damaged; to any end."""
    broker = FilteringBroker(records)
    end = data.draw(
        st.sampled_from([at for at, _ in broker.starts] + [len(broker.log)])
    )
    plain = PartitionCursor(PARTITION, Offset(0), end=Offset(end))
    wanted = list[Message]()
    while not plain.is_done:
        value = broker.answer(plain.next_get("g", 1, 0), "plain", 0)
        wanted += plain.on_reply(plain.outcome_of(value))
    cursor = PartitionCursor(PARTITION, Offset(0), end=Offset(end), where=WHERE)
    found, gets = list[Message](), 0
    while not cursor.is_done:
        get = cursor.next_get("g", 1, 0, can_filter=True)
        assert get.where == cursor.where
        value = broker.answer(get, *answers[gets % len(answers)])
        found += matching(cursor.on_reply(cursor.outcome_of(value)), FILTER)
        gets += 1
        assert gets <= 20 * len(records) + 20
    assert found == matching(wanted, FILTER)


def test_a_broker_without_the_capability_is_asked_for_everything() -> None:
    """The cursor filters nothing itself."""
    broker = FilteringBroker([("b", 1), ("a", 1)])
    cursor = PartitionCursor(PARTITION, Offset(0), where=WHERE)
    get = cursor.next_get("g", 1, 0, can_filter=False)
    assert get.where is None
    value = broker.answer(get, "runs", 100)
    assert [one.tag for one in cursor.on_reply(cursor.outcome_of(value))] == ["b", "a"]


def test_nothing_that_matches_is_progress() -> None:
    """Again and again, with a bound on fruitless answers nearby."""
    cursor = PartitionCursor(PARTITION, Offset(0), end=Offset(1000), where=WHERE)
    for number in range(1, 10):
        value = Value(b"", 1, 100 * number)
        assert not cursor.on_reply(cursor.outcome_of(value))
        assert cursor.offset == cursor.reached == 100 * number


WRONG: list[tuple[str, Any]] = [
    ("cut", lambda runs: encode_runs(runs)[:-1]),
    ("no record", lambda runs: encode_runs([RecordRun(Offset(50), b"x" * 30)])),
    ("before", lambda runs: encode_runs([RecordRun(Offset(49), runs[0].data)])),
    ("beyond", lambda runs: encode_runs([RecordRun(Offset(900), runs[0].data)])),
    ("twice", lambda runs: encode_runs([runs[0], runs[0]])),
    ("half", lambda runs: encode_runs([RecordRun(Offset(50), runs[0].data[:-1])])),
]


@pytest.mark.parametrize("spoil", [each for _, each in WRONG], ids=dict(WRONG).keys())
def test_runs_that_cannot_be_are_dropped_and_got_as_they_are(spoil: Any) -> None:
    """The get after the next one has the filter again."""
    payload, flag = encode_payload(b"x" * 20, None, None, {"tag": b"a"})
    record = encode_record(payload, id=MessageId(1), flag=flag)
    cursor = PartitionCursor(PARTITION, Offset(50), where=WHERE)
    value = Value(spoil([RecordRun(Offset(50), record)]), 1, 50 + len(record))
    assert cursor.on_reply(cursor.outcome_of(value)) == []
    assert (cursor.offset, cursor.where, cursor.again_count) == (50, None, 1)
    (message,) = cursor.on_reply(cursor.outcome_of(Value(record, 1)))
    assert message.offset == 50
    assert cursor.where == WHERE


def test_damage_that_the_broker_shows_is_found_as_without_a_filter() -> None:
    """It sends those bytes as they are."""
    broker = FilteringBroker([("b", 1), ("a", 1), ("a", 1)])
    (start, _), (end, _) = broker.starts[1:]
    log = bytearray(broker.log)
    log[start + HEADER_BYTES + 5] ^= 1
    cursor = PartitionCursor(PARTITION, Offset(start), where=WHERE)
    with pytest.raises(CorruptRecordError) as caught:
        cursor.on_reply(cursor.outcome_of(Value(bytes(log[start:]), 1)))
    assert caught.value.next_good_offset == end
    cursor.seek(cursor.after_damage)
    value = broker.answer(cursor.next_get("g", 1, 0, can_filter=True), "runs", 500)
    assert len(decode_runs(value.payload)) == 1
    (message,) = cursor.on_reply(cursor.outcome_of(value))
    assert message.offset == end
