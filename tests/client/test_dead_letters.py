"""The headers of a dead letter are complete, survive transport, and stay small."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.client.consume.dead_letters import (
    DeadLetterSelector,
    origin_of,
    read_origin,
)
from metaq.client.partitioner import KeyHash, OutgoingMessage
from metaq.model import (
    BrokerId,
    HeaderPairs,
    Message,
    MessageId,
    Millis,
    Offset,
    TopicPartition,
)
from metaq.record.dead_letters import (
    ERROR_CHARS_MAX,
    PREFIX,
    TEXT_CHARS_MAX,
    TRACEBACK_CHARS_MAX,
    Origin,
    letter_headers,
)

PLACE = TopicPartition("orders", BrokerId(3), 7)
TEXTS = st.text(st.sampled_from('aé: \n"\\\0'), max_size=9)
NUMBERS = st.integers(-(2**63), 2**63 - 1)
OWN = (("trace", b"1"), ("trace", b"2"))


def message(headers: HeaderPairs) -> Message:
    place = (MessageId(5), PLACE, Offset(40), Offset(64))
    return Message("orders", b"data", "k=v", *place, b"key", headers)


def origin(**changes: object) -> Origin:
    plain = Origin(
        PLACE, Offset(40), MessageId(5), "ValueError", "no", "g", 6, Millis(99)
    )
    return plain._replace(**changes)


@given(text=TEXTS, group=TEXTS.filter(bool), offset=NUMBERS, message_id=NUMBERS)
def test_what_is_written_is_read(
    text: str, group: str, offset: int, message_id: int
) -> None:
    written = origin(text=text, group=group, offset=offset, id=message_id)
    headers = letter_headers(OWN, written)
    assert headers[:2] == OWN
    assert read_origin(message(headers)) == written


@given(text=TEXTS)
def test_what_spark_writes_is_read(text: str) -> None:
    """It has no type of an error, no group and no time."""
    written = Origin(PLACE, Offset(40), MessageId(5), "", text)
    assert read_origin(message(letter_headers((), written))) == written


def test_it_tells_of_message_group_and_error() -> None:
    made = origin_of(
        message(()), group="g", error=ValueError("no"), attempts=6, at_ms=Millis(99)
    )
    assert made == origin()


def test_a_letter_given_up_again_has_its_last_origin_alone() -> None:
    first = letter_headers(OWN, origin())
    again = letter_headers(first, origin(group="other"))
    assert len(again) == len(first)
    found = read_origin(message(again))
    assert found is not None
    assert found.group == "other"


def test_half_a_surrogate_pair_in_an_error_is_readable() -> None:
    headers = letter_headers((), origin(text="no \ud800"))
    found = read_origin(message(headers))
    assert found is not None
    assert found.text.startswith("no ")


def test_letters_of_one_key_or_partition_stay_together() -> None:
    """A key goes where it went; without one the origin decides."""
    select, by_key = DeadLetterSelector(), KeyHash()
    partitions = [TopicPartition("dead", BrokerId(0), number) for number in range(9)]
    headers = [letter_headers((), origin(offset=offset)) for offset in range(9)]
    without = {
        select("dead", partitions, OutgoingMessage(b"", headers=each))
        for each in headers
    }
    assert len(without) == 1
    keyed = OutgoingMessage(b"", key=b"k", headers=headers[0])
    assert select("dead", partitions, keyed) == by_key("dead", partitions, keyed)


def test_the_error_is_cut_to_its_bounds() -> None:
    error = type("E" * 5000, (Exception,), {})("t" * 5000)
    made = origin_of(message(()), group="g", error=error, attempts=1, at_ms=Millis(0))
    assert len(made.error) == ERROR_CHARS_MAX
    assert len(made.text) == TEXT_CHARS_MAX


def changed(name: str, value: bytes | None) -> HeaderPairs:
    fields = dict(letter_headers((), origin()))
    if value is None:
        del fields[PREFIX + name]
    else:
        fields[PREFIX + name] = value
    return tuple(fields.items())


@pytest.mark.parametrize(
    "headers",
    [
        (),
        OWN,
        changed("origin", None),
        changed("id", None),
        changed("cause", None),
        changed("origin", b"orders"),
        changed("origin", b"orders/seven@40"),
        changed("origin", b"orders/3-7@x"),
        changed("attempts", b"many"),
        changed("at_ms", b"\xff"),
    ],
)
def test_other_messages_are_no_dead_letters(headers: HeaderPairs) -> None:
    assert read_origin(message(headers)) is None


def test_headers_of_later_versions_are_ignored() -> None:
    assert read_origin(message(changed("later", b"1"))) == origin()


def raised(depth: int) -> Exception:
    try:
        if depth:
            raise raised(depth - 1) from None
        raise ValueError("no number")
    except ValueError as error:
        return error


def test_it_has_the_traceback_of_the_last_error() -> None:
    made = origin_of(
        message(()), group="g", error=raised(0), attempts=1, at_ms=Millis(0)
    )
    assert made.traceback.startswith("Traceback (most recent call last):\n")
    assert __file__ in made.traceback
    assert made.traceback.endswith("ValueError: no number\n")
    assert read_origin(message(letter_headers((), made))) == made


def test_of_a_long_traceback_the_end_is_kept() -> None:
    error = raised(0)
    error.args = ("x" * 9000 + "end",)
    made = origin_of(message(()), group="g", error=error, attempts=1, at_ms=Millis(0))
    assert len(made.traceback) == TRACEBACK_CHARS_MAX
    assert made.traceback.endswith("xend\n")
