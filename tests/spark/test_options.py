"""Options are read strictly: what is unknown or contradictory ends in one sentence."""

import json
import pickle

import pytest

from metaq.config.settings import ZK_ROOT
from metaq.model import BrokerId, Millis, Offset, TopicPartition
from metaq.spark.errors import OffsetTextError, OptionError
from metaq.spark.option_table import Use
from metaq.spark.options import (
    AtTime,
    BadRows,
    Bound,
    Edge,
    SinkOptions,
    SourceOptions,
    ValueFormat,
    ValueOptions,
    read_value_options,
)
from metaq.spark.plan import BatchLimits
from metaq.spark.rows import OnCorrupt
from metaq.spark.segments.segment_options import parse_segment_options

WIRE = {"brokers": "localhost:8123"}
LEAST = {**WIRE, "subscribe": "logs"}


def logs(number: int) -> TopicPartition:
    return TopicPartition("logs", BrokerId(0), number)


def batch(**options: str) -> SourceOptions:
    return SourceOptions.from_map({**LEAST, **options}, is_stream=False)


def stream(**options: str) -> SourceOptions:
    return SourceOptions.from_map({**LEAST, **options}, is_stream=True)


def test_defaults_of_a_batch_and_of_a_stream() -> None:
    """A batch starts at the earliest, a stream at the latest; data loss fails both."""
    found = batch()
    assert found.wire.brokers == ("localhost:8123",)
    assert (found.wire.zookeeper, found.wire.zk_root) == (None, ZK_ROOT)
    assert (found.wire.request_timeout_s, found.wire.retry_timeout_s) == (30, 120)
    assert (found.starting, found.ending) == (Bound(Edge.EARLIEST), Bound(Edge.LATEST))
    assert found.fail_on_data_loss
    assert found.is_late_start_error
    assert found.on_corrupt is OnCorrupt.FAIL
    assert not found.is_filter_pushdown
    assert found.values == ValueOptions(
        format=ValueFormat.BINARY,
        ddl=None,
        bad_rows=BadRows.FAIL,
        dead_letter_topic=None,
    )
    assert stream().starting == Bound(Edge.LATEST)
    assert stream().limits == BatchLimits(delay_s_max=900)
    assert (stream().pin_name, stream().progress_group) == (None, None)


def test_everything_that_can_be_said() -> None:
    """Names in any case, as Spark hands them over; the whole travels to executors."""
    found = SourceOptions.from_map(
        {
            "ZOOKEEPER": "zk1:2181,zk2:2181/root",
            "zkroot": "/other",
            "assign": '{"logs": ["0-0", "0-1"]}',
            "startingoffsets": '{"logs": {"0-0": 40, "0-1": -1}}',
            "startingOffsetsByTimestampStrategy": "LATEST",
            "progressGroup": "reports",
            "failondataloss": "False",
            "maxOffsetsPerTrigger": "1000",
            "maxBytesPerTrigger": "2000",
            "minOffsetsPerTrigger": "10",
            "maxTriggerDelay": "90s",
            "minPartitions": "8",
            "maxRecordsPerPartition": "500",
            "valueFormat": "json",
            "valueSchema": "level STRING",
            "badRows": "topic",
            "deadLetterTopic": "bad",
            "onCorrupt": "skip",
            "filterPushdown": "true",
            "requestTimeoutMs": "1500",
            "retryTimeoutMs": "1200",
        },
        is_stream=True,
    )
    assert found.assigned == {logs(0), logs(1)}
    assert [found.starting.of(logs(n)) for n in range(3)] == [
        40,
        Edge.LATEST,
        Edge.EARLIEST,
    ]
    assert (found.wire.zookeeper, found.wire.zk_root) == (
        "zk1:2181,zk2:2181/root",
        "/other",
    )
    assert (found.wire.request_timeout_s, found.wire.retry_timeout_s) == (1.2, 1.2)
    assert not found.fail_on_data_loss
    assert not found.is_late_start_error
    assert found.pin_name == found.start_group == found.progress_group == "reports"
    assert found.limits == BatchLimits(
        messages_max=1000, bytes_max=2000, messages_min=10, delay_s_max=90
    )
    assert (found.ranges_min, found.records_max) == (8, 500)
    assert found.values.dead_letter_topic == "bad"
    assert found.on_corrupt is OnCorrupt.SKIP
    assert found.is_filter_pushdown
    assert pickle.loads(pickle.dumps(found)) == found


def test_times_win_over_offsets() -> None:
    """One time for all, then times per partition, then offsets, as with Kafka."""
    times = '{"logs": {"0-0": 7}}'
    offsets = '{"logs": {"0-0": 1, "0-1": -2}}'
    found = batch(startingOffsets=offsets, startingOffsetsByTimestamp=times)
    assert found.starting.of(logs(0)) == AtTime(Millis(7))
    assert found.starting.of(logs(1)) is Edge.EARLIEST
    found = batch(startingOffsetsByTimestamp=times, startingTimestamp="9")
    assert found.starting.of(logs(0)) == found.starting.of(logs(5)) == AtTime(Millis(9))
    found = batch(endingOffsets=offsets.replace("-2", "5"), endingTimestamp="9")
    assert found.ending.of(logs(1)) == AtTime(Millis(9))
    assert batch(endingOffsets=times).ending.of(logs(0)) == Offset(7)


def test_a_group_may_say_where_to_start() -> None:
    """Its own, or the one that progress goes to."""
    place = {"zookeeper": "zk:2181", "subscribe": "logs", "startingOffsets": "group"}
    found = SourceOptions.from_map({**place, "group": "old"}, is_stream=False)
    assert (found.starting.edge, found.start_group) == (Edge.GROUP, "old")
    found = SourceOptions.from_map(
        {**place, "group": "old", "progressGroup": "new", "pinStart": "q"},
        is_stream=True,
    )
    assert (found.start_group, found.progress_group) == ("old", "new")
    assert found.pin_name == "q"
    late = {**place, "startingOffsets": "earliest", "group": "old"}
    with pytest.raises(OptionError, match="no effect without startingOffsets=group"):
        SourceOptions.from_map(late, is_stream=False)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"subscripe": "x"}, "unknown option 'subscripe'; the closest is subscribe"),
        ({"startingoffset": "x"}, "the closest is startingOffsets"),
        ({"Subscribe": "x"}, "subscribe is given twice"),
        ({"assign": '{"logs": ["0-0"]}'}, "exactly one of subscribe, subscribePattern"),
        ({"zookeeper": "zk:2181"}, "exactly one of zookeeper, brokers"),
        ({"zkRoot": "/meta"}, "zkRoot has no effect without zookeeper"),
        ({"startingOffsets": "latest"}, "a batch would read nothing"),
        (
            {"startingOffsets": '{"logs": {"0-1": -1}}'},
            "logs/0-1 starts at the latest (-1)",
        ),
        ({"endingOffsets": "earliest"}, "endingOffsets: expected latest or JSON"),
        ({"endingOffsets": '{"logs": {"0-1": -2}}'}, "ends at the earliest (-2)"),
        ({"startingOffsets": "group"}, "needs group or progressGroup"),
        ({"group": "g"}, "group is kept in ZooKeeper: it needs zookeeper"),
        ({"maxOffsetsPerTrigger": "5"}, "is an option of streaming reads, not batch"),
        ({"delivery": "at-least-once"}, "is an option of writes, not batch reads"),
        ({"valueFormat": "json"}, "valueFormat=json and valueSchema need each other"),
        ({"valueSchema": "a INT"}, "valueFormat=json and valueSchema need each other"),
        (
            {"valueFormat": "json", "valueSchema": "a INT not  null"},
            "NOT NULL is more than JSON can promise",
        ),
        ({"badRows": "column"}, "valueFormat=binary takes all"),
        (
            {"valueFormat": "string", "badRows": "topic"},
            "badRows=topic and deadLetterTopic need each other",
        ),
        (
            {"valueFormat": "string", "deadLetterTopic": "bad"},
            "badRows=topic and deadLetterTopic need each other",
        ),
        ({"minPartitions": "0"}, "minPartitions: expected 1..1000000, got '0'"),
        ({"minPartitions": "many"}, "expected an integer, got 'many'"),
        ({"minPartitions": "9" * 5000}, "expected an integer"),
        ({"failOnDataLoss": "yes"}, "expected true or false, got 'yes'"),
        ({"onCorrupt": "ignore"}, "onCorrupt: expected fail or skip, got 'ignore'"),
        ({"subscribe": "a,,b"}, "names separated by commas"),
        ({"subscribe": "a,b, a"}, "names separated by commas, each once"),
        ({"subscribePattern": "("}, "a regular expression (missing"),
        ({"subscribePattern": ""}, "a regular expression"),
        ({"valueSchema": " "}, "expected a text"),
        ({"startingTimestamp": "-1"}, "startingTimestamp: expected 0.."),
    ],
)
def test_a_mistake_is_named_in_one_sentence(
    options: dict[str, str], sentence: str
) -> None:
    """Before anything is connected or read."""
    with pytest.raises(OptionError) as caught:
        SourceOptions.from_map({**LEAST, **options}, is_stream=False)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("kafka.bootstrap.servers", "has zookeeper or brokers for it"),
        ("groupIdPrefix", "progressGroup"),
        ("kafka.group.id", "progressGroup"),
        ("includeHeaders", "column headers"),
        ("kafkaConsumer.pollTimeoutMs", "requestTimeoutMs"),
        ("fetchOffset.numRetries", "retryTimeoutMs"),
        ("kafka.max.poll.records", "Kafka's client is not used"),
    ],
)
def test_an_option_that_only_kafka_has_is_answered_with_ours(
    name: str, ours: str
) -> None:
    """A query that changes its format learns what to write, whatever the case."""
    for spelled in (name, name.lower()):
        with pytest.raises(OptionError, match=rf"unknown option '{spelled}'.*{ours}"):
            stream(**{spelled: "x"})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"endingOffsets": "latest"}, "of batch reads and reads of segments, not"),
        ({"maxTriggerDelay": "1m"}, "has no effect without minOffsetsPerTrigger"),
        (
            {"minOffsetsPerTrigger": "9", "maxTriggerDelay": "soon"},
            "expected a duration such as",
        ),
        (
            {"minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "8"},
            "minOffsetsPerTrigger 9 is larger than maxOffsetsPerTrigger 8",
        ),
        ({"progressGroup": "g"}, "progressGroup is kept in ZooKeeper"),
        ({"pinStart": "g"}, "pinStart is kept in ZooKeeper"),
    ],
)
def test_a_mistake_of_a_stream_is_named_too(
    options: dict[str, str], sentence: str
) -> None:
    """The same law for the other use."""
    with pytest.raises(OptionError) as caught:
        SourceOptions.from_map({**LEAST, **options}, is_stream=True)
    assert sentence in str(caught.value)


def test_offsets_of_partitions_that_are_not_assigned_are_refused() -> None:
    """A slip of the pen would silently read something else."""
    options = {
        **WIRE,
        "assign": '{"logs": ["0-0"]}',
        "startingOffsets": '{"logs": {"0-1": 5}}',
    }
    with pytest.raises(OptionError, match="startingOffsets names logs/0-1"):
        SourceOptions.from_map(options, is_stream=True)


@pytest.mark.parametrize(
    ("way", "text"),
    [
        ("subscribe", "logs,other"),
        ("subscribePattern", "log.|logs|other"),
        ("assign", '{"logs": ["0-0"], "other": ["0-0"]}'),
    ],
)
@pytest.mark.parametrize("name", ["startingOffsets", "endingOffsets"])
def test_offsets_of_topics_that_are_not_read_are_refused(
    way: str, text: str, name: str
) -> None:
    """All of them are named."""
    named = {"logs": {"0-0": 5}, "lgos": {"0-0": 5, "0-1": 6}}
    options = {**WIRE, way: text, name: json.dumps(named)}
    with pytest.raises(
        OptionError, match=f"{name} names lgos/0-0, lgos/0-1, which {way} does not"
    ):
        SourceOptions.from_map(options, is_stream=False)
    times = {**WIRE, way: text, f"{name}ByTimestamp": json.dumps(named)}
    with pytest.raises(OptionError, match=f"{name} names lgos/0-0"):
        SourceOptions.from_map(times, is_stream=False)
    with pytest.raises(OptionError, match=f"{name} names lgos/0-0"):
        parse_segment_options({"path": "/data", way: text, name: json.dumps(named)})


def test_wrong_json_names_its_option() -> None:
    """The error of the parser comes through."""
    with pytest.raises(OffsetTextError, match="startingOffsets: no JSON"):
        batch(startingOffsets="{")
    with pytest.raises(OffsetTextError, match="startingOffsetsByTimestamp: "):
        batch(startingOffsetsByTimestamp="5")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("30s", 30), ("15m", 900), ("2 min", 120), ("1H", 3600)],
)
def test_durations_have_units(text: str, seconds: float) -> None:
    """Those that Spark's own options take."""
    found = stream(minOffsetsPerTrigger="1", maxTriggerDelay=text)
    assert found.limits.delay_s_max == seconds


def test_a_sink_knows_its_topic_and_its_promise() -> None:
    """Options of Spark itself are let by."""
    found = SinkOptions.from_map(
        {**WIRE, "topic": "out", "checkpointlocation": "/c", "queryName": "q"}
    )
    assert (found.topic, found.batch_bytes) == ("out", 1024 * 1024)
    assert pickle.loads(pickle.dumps(found)) == found
    assert SinkOptions.from_map(WIRE).topic is None
    assert not found.is_exactly_once
    with pytest.raises(OptionError, match="unknown option 'checkpointlocation'"):
        batch(checkpointlocation="/c")


def test_exactly_once_fits_to_other_options_or_is_refused() -> None:
    """An option that would mean nothing is named, before anything is done."""
    exact = {"zookeeper": "zk", "delivery": "Exactly-Once"}
    assert SinkOptions.from_map(exact).is_exactly_once
    for options, text in (
        ({**WIRE, "delivery": "exactly-once"}, "needs zookeeper in place of brokers"),
        ({**exact, "failOnLostRoute": "false"}, "failOnLostRoute has no effect"),
        ({**exact, "batchBytes": "5000"}, "batchBytes has no effect"),
        (
            {**exact, "delivery": "exactly_once"},
            "expected at-least-once or exactly-once, got 'exactly_once'",
        ),
    ):
        with pytest.raises(OptionError, match=text):
            SinkOptions.from_map(options)


def test_values_of_segments_are_read_alike() -> None:
    """The other format has the same columns."""
    found = read_value_options({"valueFormat": "string"}, Use.SEGMENTS)
    assert found.format is ValueFormat.STRING
