"""Decoded columns in a declared pipeline, which runs on Spark Connect."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.dataset as ds
import pytest

from metaq.pipeline.decode import HAS_ARROW_UDF
from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from tests.rigs.fork_server import executable
from tests.sampling import IS_WHOLE
from tests.spark.brokers import TOPIC, data_of, publish, stored
from tests.spark.classes import VERSION
from tests.spark.conftest import ROOT
from tests.spark.projects import write_project

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not HAS_ARROW_UDF, reason="decoding columns require PySpark 4.1"
    ),
]
for name in ("grpc", "pandas", "yaml", "zstandard"):
    pytest.importorskip(name, reason="declared pipelines take PySpark's own extra")

TABLES = """
from pyspark import pipelines as dp
from pyspark.sql import SparkSession

from metaq.pipeline import decode

spark = SparkSession.active()
wire = dict(brokers={address!r})
line = decode.json("level STRING NOT NULL, code INT")


@dp.temporary_view
def decoded():
    stream = spark.readStream.format("metaq").options(**wire, subscribe={topic!r})
    rows = stream.option("startingOffsets", "earliest").load()
    return rows.withColumn("decoded", line("value"))


@dp.table
def lines():
    rows = spark.readStream.table("decoded")
    return rows.where("decoded.error IS NULL").select("offset", "decoded.row.*")


dp.create_sink("dead", "metaq", {{**wire, "topic": "dead"}})


@dp.append_flow(target="dead")
def letters():
    return decode.dead_letters(spark.readStream.table("decoded"))
"""
BAD = [b"no json", b'{"code": 1}']


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    with embedded_broker(topics={TOPIC: 2, "dead": 1}) as found:
        yield found


@pytest.mark.parametrize(
    ("command", "tables"),
    [
        pytest.param(
            ["spark-pipelines", "run", "--conf", "spark.ui.enabled=false"],
            "spark-warehouse",
            marks=pytest.mark.skipif(
                VERSION >= (4, 2) and not IS_WHOLE,
                reason="declared/test_updates_service.py runs it",
            ),
        ),
        pytest.param(
            ["metaq", "pipeline", "run", "--once", "--master", "local[1]", "."],
            "tables",
            marks=pytest.mark.skipif(
                VERSION >= (4, 2), reason="declared/test_updates_service.py runs it"
            ),
        ),
    ],
)
def test_a_declared_pipeline_has_rows_and_dead_letters(
    broker: EmbeddedBroker, tmp_path: Path, command: list[str], tables: str
) -> None:
    """The schema is parsed, and columns made, without a JVM in the process."""
    publish(broker, [b'{"level": "INFO", "code": %d}' % n for n in range(20)] + BAD)
    text = TABLES.format(address=broker.address, topic=TOPIC)
    write_project(tmp_path, "decoded", text)
    scripts = Path(sys.executable).parent
    path = os.pathsep.join([str(scripts), os.environ["PATH"]])
    done = subprocess.run(
        [scripts / command[0], *command[1:]],
        check=False,
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": path,
            "PYSPARK_PYTHON": executable(),
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert data_of(stored(broker, "dead")) == sorted(BAD)
    table = ds.dataset(tmp_path / tables / "lines", exclude_invalid_files=True)
    assert sorted(table.to_table()["code"].to_pylist()) == list(range(20))
