"""The attribute of a dead letter says all, survives the way, and stays small."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.client.consume.dead_letters import (
    ERROR_CHARS_MAX,
    TEXT_CHARS_MAX,
    TRACEBACK_CHARS_MAX,
    Origin,
    encode_origin,
    origin_of,
    read_origin,
)
from metaq.model import BrokerId, Message, MessageId, Millis, Offset, TopicPartition

PLACE = TopicPartition("orders", BrokerId(3), 7)
TEXTS = st.text(st.sampled_from('aé\ud800\n"\\\0'), max_size=9)
NUMBERS = st.integers(-(2**63), 2**63 - 1)


def message(attribute: str | None) -> Message:
    return Message(
        "orders", b"data", attribute, MessageId(5), PLACE, Offset(40), Offset(64)
    )


def origin(**changes: object) -> Origin:
    plain = Origin(
        PLACE, Offset(40), MessageId(5), None, "g", "ValueError", "no", 6, Millis(99)
    )
    return plain._replace(**changes)


@given(
    attribute=st.none() | TEXTS,
    text=TEXTS,
    group=TEXTS,
    offset=NUMBERS,
    message_id=NUMBERS,
)
def test_what_is_written_is_read(
    attribute: str | None, text: str, group: str, offset: int, message_id: int
) -> None:
    written = origin(
        attribute=attribute, text=text, group=group, offset=offset, id=message_id
    )
    line = encode_origin(written)
    assert line.isascii()
    assert "\n" not in line
    assert read_origin(message(line)) == written


def test_it_tells_of_message_group_and_error() -> None:
    made = origin_of(
        message("a=b"), group="g", error=ValueError("no"), attempts=6, at_ms=Millis(99)
    )
    assert made == origin(attribute="a=b")


def test_the_error_is_cut_to_its_bounds() -> None:
    error = type("E" * 5000, (Exception,), {})("t" * 5000)
    made = origin_of(message(None), group="g", error=error, attempts=1, at_ms=Millis(0))
    assert len(made.error) == ERROR_CHARS_MAX
    assert len(made.text) == TEXT_CHARS_MAX


def without(name: str) -> str:
    fields = json.loads(encode_origin(origin()))
    del fields[name]
    return json.dumps(fields)


@pytest.mark.parametrize(
    "attribute",
    [
        None,
        "",
        "k=v",
        "[1]",
        "[" * 100_000,
        '{"dead_letter": 2}',
        without("offset"),
        without("topic"),
        without("partition"),
        encode_origin(origin()).replace('"3-7"', '"seven"'),
        encode_origin(origin()).replace('"g"', "3"),
    ],
)
def test_other_messages_are_no_dead_letters(attribute: str | None) -> None:
    assert read_origin(message(attribute)) is None


def test_fields_that_nobody_knows_are_ignored() -> None:
    fields = json.loads(encode_origin(origin())) | {"later": 1}
    assert read_origin(message(json.dumps(fields))) == origin()


def raised(depth: int) -> Exception:
    try:
        if depth:
            raise raised(depth - 1) from None
        raise ValueError("no number")
    except ValueError as error:
        return error


def test_it_has_the_traceback_of_the_last_error() -> None:
    made = origin_of(
        message(None), group="g", error=raised(0), attempts=1, at_ms=Millis(0)
    )
    assert made.traceback.startswith("Traceback (most recent call last):\n")
    assert __file__ in made.traceback
    assert made.traceback.endswith("ValueError: no number\n")
    assert read_origin(message(encode_origin(made))) == made


def test_of_a_long_traceback_the_end_is_kept() -> None:
    error = raised(0)
    error.args = ("x" * 9000 + "end",)
    made = origin_of(message(None), group="g", error=error, attempts=1, at_ms=Millis(0))
    assert len(made.traceback) == TRACEBACK_CHARS_MAX
    assert made.traceback.endswith("xend\n")


def test_dead_letters_of_before_have_no_traceback() -> None:
    assert read_origin(message(without("traceback"))) == origin()
