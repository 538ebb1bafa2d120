"""Decoded columns in batches and streams; what does not decode reaches its topic."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from metaq.client import Client, OutgoingMessage
from metaq.client.consume.dead_letters import read_origin
from metaq.pipeline import decode
from metaq.pipeline.decode import HAS_ARROW_UDF
from metaq.record.dead_letters import Origin, letter_headers
from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from tests.spark.brokers import TOPIC, options_of, publish, read, stored, tp

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not HAS_ARROW_UDF, reason="decoding columns require PySpark 4.1"
    ),
]

DDL = "level STRING NOT NULL, code INT"
DEADLINE_S = 120


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    with embedded_broker(topics={TOPIC: 2, "dead": 2}) as found:
        yield found


def decoded(frame: DataFrame) -> DataFrame:
    return frame.withColumn("decoded", decode.json(DDL)("value"))


def plain(value: bytes) -> tuple[str, int | None] | None:
    """Return what plain Python makes of a value; None for one that is bad."""
    try:
        found = json.loads(value)
    except ValueError:
        return None
    if not isinstance(found, dict):
        return None
    level, code = found.get("level"), found.get("code")
    is_number = isinstance(code, int) and abs(code) < 2**31
    if isinstance(level, str) and (code is None or is_number):
        return level, code
    return None


def mixed(count: int) -> list[bytes]:
    """Return values of which every third is bad, in one of several ways."""
    bad = [
        b"no json",
        b'{"level": "INFO"} more',
        b'{"code": %d}',
        b'{"level": "INFO", "code": "%d"}',
        b'{"level": null, "code": 1}',
        b'{"level": "INFO", "code": 1.5}',
        b"\xff",
        b"",
    ]
    good = [b'{"level": "INFO", "code": %d}', b'{"level": "WARN"}']
    found = []
    for number in range(count):
        some = bad if number % 3 == 0 else good
        text = some[number // 3 % len(some)]
        found.append(text % number if b"%d" in text else text)
    return found


def test_a_batch_has_rows_and_errors(spark: SparkSession) -> None:
    """Every value is one or the other, as plain Python says; a null is neither."""
    values = mixed(60)
    frame = spark.createDataFrame([(v,) for v in [*values, None]], "value BINARY")
    rows = decoded(frame).collect()
    assert len(rows) == 61
    for value, row in zip(values, rows, strict=False):
        found = row.decoded
        assert (found.row and tuple(found.row)) == plain(value), value
        assert (found.row is None) == bool(found.error)
    assert tuple(rows[-1].decoded) == (None, None)


def test_a_filter_and_the_fields_decode_once(
    spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan has one evaluation, no matter what is asked of the column."""
    frame = spark.createDataFrame([(b"{}",)], "value BINARY")
    rows = decoded(frame).where("decoded.error IS NULL").select("decoded.row.*")
    assert rows.columns == ["level", "code"]
    rows.explain("cost")
    plan, _, _physical = capsys.readouterr().out.partition("== Physical Plan ==")
    assert plan.count("ArrowEvalPython") == 1, plan


def test_text_columns_and_other_formats_decode_too(spark: SparkSession) -> None:
    """Each function makes a column of the same form."""
    frame = spark.createDataFrame([("INFO,5",), ("x",)], "value STRING")
    fields = [{"name": "a", "type": {"type": "int", "logicalType": "date"}}]
    schema = json.dumps({"type": "record", "name": "r", "fields": fields})
    columns = {
        "csv": decode.csv(DDL),
        "pattern": decode.pattern("(?P<level>[A-Z]+),(?P<code>[0-9]+)", DDL),
        "text": decode.pattern("(?P<level>.*)"),
        "avro": decode.avro(schema),
    }
    rows = frame.select(*(make("value").alias(name) for name, make in columns.items()))
    first, second = rows.collect()
    assert [tuple(first[name].row) for name in ("csv", "pattern", "text")] == [
        ("INFO", 5),
        ("INFO", 5),
        ("INFO,5",),
    ]
    assert [second[name].error for name in columns] == [
        "expected 2 fields, got 1",
        "the pattern does not match",
        None,
        "no Avro: expected c301 first, got 78",
    ]
    assert rows.schema["avro"].dataType.simpleString() == (
        "struct<row:struct<a:date>,error:string>"
    )


def test_times_are_the_same_in_every_zone_of_a_session(spark: SparkSession) -> None:
    """A time without a zone is UTC, not the session's."""
    frame = spark.createDataFrame([(b'{"t": "2024-05-01 12:00:00"}',)], "value BINARY")
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        times = frame.select(decode.json("t TIMESTAMP")("value").alias("d"))
        assert times.selectExpr("unix_seconds(d.row.t)").first() == (1_714_564_800,)
    finally:
        spark.conf.set("spark.sql.session.timeZone", str(before))


def test_dead_letters_have_the_form_of_consumers(
    spark: SparkSession, broker: EmbeddedBroker
) -> None:
    """Key, attribute and headers of the message, then those of a dead letter."""
    message = OutgoingMessage(
        b"no json",
        "attribute",
        b"key",
        tp(1).name,
        (("own", b"\xff"), ("dead-letter.cause", b"of before")),
    )
    with Client(brokers=[broker.address]) as client, client.producer() as producer:
        producer.send_many(TOPIC, [message])
    letters = decode.dead_letters(decoded(read(spark, broker)))
    letters.write.format("metaq").options(**options_of(broker, topic="dead")).mode(
        "append"
    ).save()
    (there,) = stored(broker)["0-1"]
    (found,) = [m for some in stored(broker, "dead").values() for m in some]
    origin = Origin(there.partition, there.offset, there.id, "", "no JSON object")
    assert (found.data, found.key, found.attribute) == (
        b"no json",
        b"key",
        "attribute",
    )
    assert found.header_pairs == letter_headers((("own", b"\xff"),), origin)
    assert read_origin(found) == origin


def run_stream(frame: DataFrame, checkpoint: Path, kind: str, **more: Any) -> None:
    writer = frame.writeStream.trigger(availableNow=True).format(kind)
    query = writer.options(checkpointLocation=str(checkpoint), **more).start()
    assert query.awaitTermination(DEADLINE_S)


def test_a_stream_loses_no_value(
    spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """Rows and dead letters together are what was put, in several micro-batches."""
    values = mixed(200)
    publish(broker, values[:120])
    publish(broker, values[120:], partition=tp(1))
    options = options_of(
        broker, subscribe=TOPIC, startingOffsets="earliest", maxOffsetsPerTrigger=70
    )
    frame = decoded(spark.readStream.format("metaq").options(**options).load())
    good = frame.where("decoded.error IS NULL").select("decoded.row.*")
    run_stream(good, tmp_path / "a", "parquet", path=str(tmp_path / "rows"))
    letters = decode.dead_letters(frame)
    run_stream(letters, tmp_path / "b", "metaq", **options_of(broker, topic="dead"))
    rows = spark.read.parquet(str(tmp_path / "rows")).collect()
    expected = [row for row in map(plain, values) if row is not None]
    assert sorted(map(repr, map(tuple, rows))) == sorted(map(repr, expected))
    there = {(m.partition, m.offset): m for m in flat(stored(broker))}
    found = {}
    for letter in flat(stored(broker, "dead")):
        origin = read_origin(letter)
        assert origin is not None
        assert origin.text
        found[origin.partition, origin.offset] = letter.data
    bad = {place: m.data for place, m in there.items() if plain(m.data) is None}
    assert found == bad
    assert len(flat(stored(broker, "dead"))) == len(bad) == 67


def flat(messages: dict[str, list[Any]]) -> list[Any]:
    return [message for some in messages.values() for message in some]
