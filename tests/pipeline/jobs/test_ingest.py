"""Anything that Spark reads goes to a topic of a real broker."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from metaq.pipeline.jobs.ingest import ingest
from metaq.testing.embedded import EmbeddedBroker
from tests.spark.brokers import data_of, stored
from tests.spark.brokers import wire as options

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]


def test_anything_that_spark_reads_goes_to_a_topic(
    spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """A column `value`, the whole row, or what expressions say."""
    lines = tmp_path / "lines"
    lines.write_text("one\ntwo\nthree\n")
    wire = options(broker, topic="copy")
    done = ingest(spark, wire, source_format="text", paths=[str(lines)])
    assert (done.message_count, done.size_bytes) == (3, 11)
    table = tmp_path / "table.csv"
    table.write_text("name,age\nann,3\nbob,4\n")
    header = {"header": "true"}
    ingest(spark, wire, source_format="csv", paths=[str(table)], source_options=header)
    objects = [b'{"name":"ann","age":"3"}', b'{"name":"bob","age":"4"}']
    wanted = sorted([b"one", b"two", b"three", *objects])
    assert data_of(stored(broker, "copy")) == wanted
    ingest(
        spark,
        options(broker, topic="same"),
        source_format="csv",
        paths=[str(table)],
        source_options=header,
        value="upper(name)",
        attribute="age",
        key="'one key'",
    )
    found = [messages for messages in stored(broker, "same").values() if messages]
    assert len(found) == 1
    assert [(m.data, m.attribute) for m in found[0]] == [(b"ANN", "3"), (b"BOB", "4")]
