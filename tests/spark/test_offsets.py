"""The texts that name offsets: the same for equal offsets, and read strictly."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.model import MAX_OFFSET, BrokerId, Offset, TopicPartition
from metaq.spark.errors import OffsetTextError
from metaq.spark.offsets import (
    EARLIEST,
    LATEST,
    format_offsets,
    offsets_from_json,
    offsets_to_json,
    parse_assigned,
    parse_offsets,
    parse_times,
    parse_wanted,
)

TOPICS = st.text(
    st.characters(exclude_characters="/", exclude_categories=["Cs"]), min_size=1
)
PARTITIONS = st.builds(
    TopicPartition,
    TOPICS,
    st.integers(0, 1023).map(BrokerId),
    st.integers(0, 10**9),
)
OFFSETS = st.dictionaries(PARTITIONS, st.integers(0, MAX_OFFSET).map(Offset))


def logs(broker: int, partition: int) -> TopicPartition:
    return TopicPartition("logs", BrokerId(broker), partition)


@pytest.mark.slow
@given(OFFSETS, st.randoms())
def test_offsets_come_back_and_equal_ones_have_equal_texts(
    offsets: dict[TopicPartition, Offset], rng: object
) -> None:
    """Whatever the order they were collected in."""
    shuffled = list(offsets.items())
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    text = format_offsets(dict(shuffled))
    assert text == format_offsets(offsets)
    assert parse_offsets(text) == offsets
    assert (
        offsets_from_json(json.loads(json.dumps(offsets_to_json(offsets)))) == offsets
    )
    assert parse_wanted(text, option="startingOffsets") == offsets


def test_the_text_is_the_one_of_the_page() -> None:
    """Checkpoints hold it for ever."""
    offsets = {logs(0, 10): Offset(7), logs(0, 2): Offset(0), logs(1, 0): Offset(5)}
    text = '{"/version": 1, "logs": {"0-2": 0, "0-10": 7, "1-0": 5}}'
    assert format_offsets(offsets) == text
    assert format_offsets({}) == '{"/version": 1}'


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[]", "expected an object"),
        ("{}", "/version"),
        ('{"logs": {"0-0": 1}}', "/version"),
        ('{"/version": 2}', "expected version 1, got 2"),
        ('{"/version": true}', "expected version 1, got True"),
        ('{"/version": 1, "logs": 5}', "'logs': expected an object"),
        ('{"/version": 1, "logs": {}}', "'logs': expected an object"),
        ('{"/version": 1, "a/b": {"0-0": 1}}', "name of a topic"),
        ('{"/version": 1, "": {"0-0": 1}}', "name of a topic"),
        ('{"/version": 1, "logs": {"0": 1}}', "'<broker>-<partition>', got '0'"),
        ('{"/version": 1, "logs": {"0-00": 1}}', "got '0-00'"),
        ('{"/version": 1, "logs": {"0-0 ": 1}}', "got '0-0 '"),
        ('{"/version": 1, "logs": {"0-\\u0661": 1}}', "<partition>"),
        ('{"/version": 1, "logs": {"0-0": -1}}', "logs/0-0: not a number in range"),
        ('{"/version": 1, "logs": {"0-0": 9223372036854775808}}', "not a number"),
        ('{"/version": 1, "logs": {"0-0": 1.0}}', "got 1.0"),
        ('{"/version": 1, "logs": {"0-0": true}}', "got True"),
        ('{"/version": 1, "logs": {"0-0": "1"}}', "got '1'"),
        ('{"/version": 1, "logs": {"0-0": 1, "0-0": 2}}', "'0-0' occurs twice"),
        ('{"/version": 1, "a": {"0-0": 1}, "a": {"0-1": 1}}', "'a' occurs twice"),
    ],
)
def test_anything_else_is_refused_by_name(text: str, named: str) -> None:
    """A checkpoint that is read wrongly loses data; the message quotes what is odd."""
    with pytest.raises(OffsetTextError) as caught:
        parse_offsets(text)
    assert named in str(caught.value)


def test_users_may_name_the_edges() -> None:
    """-2 is the log start and -1 the log end, and no version is asked for."""
    text = '{"logs": {"0-0": -2, "0-1": -1, "1-0": 40}}'
    assert parse_wanted(text, option="startingOffsets") == {
        logs(0, 0): EARLIEST,
        logs(0, 1): LATEST,
        logs(1, 0): 40,
    }
    with pytest.raises(OffsetTextError, match=r"startingOffsets: logs/0-0: .* got -3"):
        parse_wanted('{"logs": {"0-0": -3}}', option="startingOffsets")


def test_times_have_the_form_of_offsets() -> None:
    """Milliseconds since 1970, none of them before."""
    option = "startingOffsetsByTimestamp"
    text = '{"logs": {"0-0": 1700000000000}}'
    assert parse_times(text, option=option) == {logs(0, 0): 1_700_000_000_000}
    with pytest.raises(OffsetTextError, match=option):
        parse_times('{"logs": {"0-0": -1}}', option=option)


def test_partitions_are_picked_by_name() -> None:
    """A list for each topic."""
    text = '{"logs": ["0-0", "1-0"], "other": ["0-3"]}'
    other = TopicPartition("other", BrokerId(0), 3)
    assert parse_assigned(text, option="assign") == {logs(0, 0), logs(1, 0), other}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{}", "one partition or more"),
        ("7", "an object of topics"),
        ('{"logs": []}', "a list of partitions"),
        ('{"logs": "0-0"}', "a list of partitions"),
        ('{"logs": [0]}', "<broker>-<partition>"),
        ('{"logs": ["0-0", "0-0"]}', "twice"),
        ('{"a/b": ["0-0"]}', "name of a topic"),
    ],
)
def test_a_wrong_pick_is_refused_by_name(text: str, named: str) -> None:
    """Nothing is guessed."""
    with pytest.raises(OffsetTextError, match=named):
        parse_assigned(text, option="assign")
