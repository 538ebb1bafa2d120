"""A standalone cluster of Spark, with this package sent along as docs/spark.md says.

A master and a worker are processes of their own, as PySpark's wheel brings them. One
driver has a session for a job, and another one for a declared pipeline after it; each
has an executor. All of it runs once for the tests of this module.
"""

import json
import os
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pyspark
import pytest

from metaq.client import Client
from metaq.pipeline.declared.updates import TOKEN
from metaq.testing.embedded import EmbeddedBroker
from metaq.zk.embedded import EmbeddedZooKeeper
from tests.spark.projects import write_project
from tests.spark.test_executors import RealZooKeeper

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.zookeeper,
    pytest.mark.timeout(600),
]

ROOT = Path(__file__).parents[2]
SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"
CORES = "2"
COUNT = 20_000
HAS_PIPELINES = all(find_spec(name) for name in ("pyspark.pipelines", "grpc", "yaml"))
TOPICS = ({"many": 2, "copy": 2, "declared": 2}, {"many": 2})
"""Of each broker, and how many partitions they have there."""
START_S = 120.0
JOB_S = 560.0

TABLES = """
from pyspark import pipelines as dp
from pyspark.sql import SparkSession

spark = SparkSession.active()
wire = dict(zookeeper={zookeeper!r})


@dp.table
def lines():
    source = spark.readStream.format("metaq").options(**wire, subscribe="copy")
    return source.option("startingOffsets", "earliest").load().select("value")


dp.create_sink("declared", "metaq", dict(**wire, topic="declared"))


@dp.append_flow(target="declared")
def flow():
    return spark.readStream.table("lines")
"""
SMALL = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.executor.cores": CORES,
}


@contextmanager
def daemon(log: Path, name: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run one of Spark's daemons, which writes to a file."""
    env = {**os.environ, "SPARK_DAEMON_MEMORY": "192m", "SPARK_LOCAL_IP": "127.0.0.1"}
    with log.open("wb") as out:
        child = subprocess.Popen(
            [str(SPARK_CLASS), f"org.apache.spark.deploy.{name}", *arguments],
            env=env,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        try:
            yield child
        finally:
            child.terminate()
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


@contextmanager
def cluster(directory: Path) -> Iterator[str]:
    """Run a master and its workers; yield the master's URL."""
    log = directory / "master.log"
    with ExitStack() as stack:
        where = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
        master = stack.enter_context(daemon(log, "master.Master", *where))
        until_s = time.monotonic() + START_S
        while (
            found := re.search(r"spark://127\.0\.0\.1:\d+", log.read_text())
        ) is None:
            assert master.poll() is None, log.read_text()
            assert time.monotonic() < until_s, log.read_text()
            time.sleep(0.1)
        size = ["--cores", CORES, "--memory", "600m"]
        place = ["--work-dir", str(directory / "worker")]
        stack.enter_context(
            daemon(
                directory / "worker.log", "worker.Worker",
                *where, *size, *place, found[0],
            )
        )  # fmt: skip
        yield found[0]


def zip_packages(path: Path) -> None:
    """Zip the package and the names by which PySpark finds its formats."""
    with zipfile.ZipFile(path, "w") as zipped:
        sources = [*ROOT.glob("pyspark_metaq*.py"), *(ROOT / "metaq").rglob("*.py")]
        for source in sources:
            zipped.write(source, source.relative_to(ROOT))


def run_python(*words: str) -> "subprocess.CompletedProcess[str]":
    """Run a module of this checkout, whose executors have the same interpreter."""
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env={
            **os.environ,
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
            # The command makes one before it starts Java, and finds it started.
            TOKEN: "of both",
        },
        capture_output=True,
        text=True,
        timeout=JOB_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run job and pipeline on a cluster; return what the job prints and logs, and what
    is there after them."""
    place = tmp_path_factory.mktemp("standalone")
    zip_packages(place / "metaq.zip")
    with ExitStack() as stack:
        zookeeper = stack.enter_context(EmbeddedZooKeeper(place / "zookeeper"))
        brokers = [
            stack.enter_context(
                EmbeddedBroker(
                    place / f"broker-{number}",
                    topics=topics,
                    zookeeper=RealZooKeeper(zookeeper.address),  # type: ignore[arg-type]  # it will do
                    settings={"brokerId": str(number)},
                )
            )
            for number, topics in enumerate(TOPICS)
        ]
        master = stack.enter_context(cluster(place))
        words = [master, zookeeper.address, str(place / "metaq.zip"), str(place)]
        words.append(str(COUNT))
        if HAS_PIPELINES:
            text = TABLES.format(zookeeper=zookeeper.address)
            write_project(place / "project", "declared", text)
            settings = [f"--conf={name}={value}" for name, value in SMALL.items()]
            update = ("pipeline", "run", str(place / "project"), "--once", "--json")
            words += [*update, "--master", master, *settings]
        done = run_python("tests.spark.standalone_job", *words)
        first = next(line for line in done.stdout.splitlines() if line[:1] == "{")
        found: dict[str, Any] = json.loads(first)
        found["log"] = done.stderr
        if HAS_PIPELINES:
            found["declared"] = values_of(brokers[0], "declared")
            found["table"] = place / "project" / "tables" / "lines"
    return found


def values_of(broker: EmbeddedBroker, topic: str) -> list[bytes]:
    with Client(brokers=[broker.address]) as client:
        return [message.data for message in client.browse(topic)]


WHOLE = {"rows": COUNT, "distinct": COUNT, "sum": COUNT * (COUNT - 1) // 2}


def test_executors_have_the_packages_that_were_sent(outcome: dict[str, Any]) -> None:
    """They come from the zip, also where others are installed."""
    assert {file.partition("metaq.zip")[2] for file in outcome["files"]} == {
        "/metaq/spark/source/read_task.py"
    }


def test_what_executors_write_is_read_by_executors(outcome: dict[str, Any]) -> None:
    """Rows with keys, a batch read of all; a task that is lost doubles nothing."""
    assert "this run is to fail" in outcome["log"]
    assert outcome["batch"] == {**WHOLE, "brokers": 2}
    assert outcome["tasks"] > 4  # one for each partition, and some more


def test_a_stream_writes_exactly_once_and_is_archived(outcome: dict[str, Any]) -> None:
    """In more than one micro-batch; the archive has each message of the copy."""
    assert outcome["batches"] >= 2
    assert outcome["archive"] == WHOLE


@pytest.mark.skipif(not HAS_PIPELINES, reason="pipelines take PySpark's own extra")
def test_a_declared_pipeline_reads_and_writes_on_executors(
    outcome: dict[str, Any],
) -> None:
    """A topic goes to a table, and the table to a topic."""
    whole = [b"message %07d" % number for number in range(COUNT)]
    assert sorted(outcome["declared"]) == whole
    table = ds.dataset(outcome["table"], exclude_invalid_files=True).to_table()
    assert sorted(table["value"].to_pylist()) == whole
