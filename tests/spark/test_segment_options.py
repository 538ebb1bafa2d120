"""Options of a read of segments: defaults, values, and refusals in one sentence."""

import pytest

from metaq.model import Offset, TopicPartition
from metaq.spark.errors import OffsetTextError, SparkError
from metaq.spark.record_bounds import EVERYTHING, Bounds
from metaq.spark.rows import OnCorrupt
from metaq.spark.segments.segment_options import (
    BYTES_PER_PARTITION,
    SegmentOptions,
    parse_segment_options,
)

ONE = TopicPartition("logs", 0, 1)
TWO = TopicPartition("logs", 0, 2)


def parse(**options: str) -> SegmentOptions:
    return parse_segment_options({"path": "/data", **options})


def test_a_path_is_all_that_is_needed() -> None:
    """Everything that is there is read, and damage fails."""
    assert parse() == SegmentOptions(paths=("/data",))
    assert parse().bytes_per_partition == BYTES_PER_PARTITION
    assert parse().on_corrupt is OnCorrupt.FAIL
    assert parse().chooses_topic("any")
    assert parse().bounds_of(ONE) == EVERYTHING


def test_paths_come_in_three_ways() -> None:
    """`load(path)`, `load([path, …])` and an option with commas mean the same."""
    assert parse(path="/a, /b").paths == ("/a", "/b")
    assert parse_segment_options({"paths": '["/a","/b,c"]'}).paths == ("/a", "/b,c")


def test_topics_are_chosen_by_name_pattern_or_partition() -> None:
    """Names and patterns are whole names; partitions name their broker too."""
    named = parse(subscribe="logs,other")
    assert [named.chooses_topic(t) for t in ("logs", "log")] == [True, False]
    matched = parse(subscribePattern="lo.")
    assert [matched.chooses_topic(t) for t in ("log", "logs")] == [True, False]
    assigned = parse(assign='{"logs": ["0-1"]}')
    assert assigned.bounds_of(ONE) == EVERYTHING
    assert assigned.bounds_of(TWO) is None


def test_offsets_and_times_bound_a_read() -> None:
    """Edges by name or number say nothing; a time wins over offsets."""
    text = '{"logs": {"0-1": 60, "0-2": -2}}'
    bounded = parse(startingOffsets=text, endingOffsets='{"logs": {"0-1": 120}}')
    assert bounded.bounds_of(ONE) == Bounds(Offset(60), Offset(120))
    assert bounded.bounds_of(TWO) == EVERYTHING
    timed = parse(startingOffsets=text, startingTimestamp="5", endingTimestamp="9")
    assert timed.bounds_of(ONE) == Bounds(start_ms=5, end_ms=9)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"path": " "}, "path: expected"),
        ({"path": "/a,,/b"}, "path: expected directories"),
        ({"paths": "no"}, "paths: expected a JSON list"),
        ({"paths": "[1]"}, "path: expected directories"),
        ({"pth": "/data"}, "unknown option 'pth'"),
        ({"zookeeper": "h:1"}, "zookeeper is an option of"),
        ({"subscribe": "a", "assign": '{"a": ["0-0"]}'}, "at most one of"),
        ({"startingOffsets": "latest"}, "startingOffsets: expected earliest"),
        ({"startingOffsets": '{"a": {"0-0": -1}}'}, "startingOffsets: a/0-0"),
        ({"endingOffsets": '{"a": {"0-0": -2}}'}, "endingOffsets: a/0-0"),
        ({"onCorrupt": "maybe"}, "onCorrupt: expected fail or skip"),
        ({"maxBytesPerPartition": "0"}, "maxBytesPerPartition: expected 1"),
        ({"maxMessageBytes": "0"}, "maxMessageBytes: expected 1"),
        ({"brokerId": "1024"}, "brokerId: expected 0..1023"),
        (
            {
                "startingOffsets": '{"a": {"0-0": 9}}',
                "endingOffsets": '{"a": {"0-0": 8}}',
            },
            "a/0-0: read from 9 ends at 8",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, str], text: str) -> None:
    """The message names the option and what was expected."""
    with pytest.raises(SparkError) as caught:
        parse(**options)
    assert text in str(caught.value)


def test_an_empty_map_of_options_asks_for_a_path() -> None:
    """Nothing is read by default."""
    with pytest.raises(SparkError, match="path"):
        parse_segment_options({})


def test_json_that_is_none_is_quoted() -> None:
    """The error of the parser says where."""
    with pytest.raises(OffsetTextError, match="startingOffsets"):
        parse(startingOffsets="{")
