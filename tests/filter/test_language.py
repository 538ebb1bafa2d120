"""Filters as values: of messages, of records, and between processes."""

import pickle

import pytest

from metaq.errors import CorruptRecordError, FilterError
from metaq.filter.language import parse_filter
from metaq.record.flags import HAS_ATTRIBUTE, HAS_PROPERTIES, encode_payload


def test_a_filter_is_its_text() -> None:
    """Equal, hashed, shown and sent as that; the same text is read once."""
    where = parse_filter("tag = 'paid'")
    assert parse_filter("tag = 'paid'") is where
    assert parse_filter("tag  = 'paid'") != where
    again = pickle.loads(pickle.dumps(where))
    assert again == where
    assert hash(again) == hash(where)
    assert repr(where) == "Filter(text=\"tag = 'paid'\")"
    assert again.matches(None, (("tag", b"paid"),), None)


def test_an_error_of_a_filter_travels() -> None:
    """From a task of Spark, with its column."""
    with pytest.raises(FilterError) as caught:
        parse_filter("tag = ")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.column) == (str(caught.value), 7)


@pytest.mark.parametrize("text", [None, 5, b"tag = 'a'"])
def test_other_types_are_refused(text: object) -> None:
    """With what was expected."""
    with pytest.raises(TypeError, match=r"filter: expected str, got"):
        parse_filter(text)


def test_records_without_a_block_have_one_answer() -> None:
    """Whatever their data look like."""
    line = b"\0\0\0\x0ah.tag=paid"
    assert not parse_filter("tag = 'paid'").matches_payload(line, 0, len(line), 0)
    assert parse_filter("tag IS NULL").matches_payload(line, 0, len(line), 0)


def test_an_attribute_of_metaq_is_no_header() -> None:
    """Without the bit for it a line is text; data are not looked at."""
    payload, flag = encode_payload(b"h.tag=paid", "h.tag=paid")
    assert flag == HAS_ATTRIBUTE
    size = len(payload)
    assert not parse_filter("tag = 'paid'").matches_payload(payload, 0, size, flag)
    where = parse_filter("attribute = 'h.tag=paid' AND tag IS NULL")
    assert where.matches_payload(payload, 0, size, flag)
    data = b"\0\0\0\x07h.tag=xh.tag=paid"
    where = parse_filter("tag = 'paid'")
    assert not where.matches_payload(data, 0, len(data), HAS_ATTRIBUTE | HAS_PROPERTIES)


@pytest.mark.parametrize(
    "payload", [b"\0\0", b"\0\0\0\x09h.tag=x", b"\xff\xff\xff\xff"]
)
def test_a_cut_block_is_damage(payload: bytes) -> None:
    """The reader decides; it is never taken for a message that does not match."""
    with pytest.raises(CorruptRecordError, match="attribute block"):
        parse_filter("tag = 'a'").matches_payload(payload, 0, len(payload), 1)
