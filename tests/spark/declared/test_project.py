"""A new project is run as it is written, killed and gone on with, and counts right.

Its numbers are compared with plain Python over the same lines. Spark is dear, so one
life of a project has several promises in it: each run begins where the last one ended.
"""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pyarrow.parquet as pq
import pytest

from metaq.cli.logs import FORMAT
from metaq.client import Client
from metaq.spark.errors import JobError
from metaq.spark.jobs.failures import sentence_of
from metaq.testing.embedded import EmbeddedBroker
from metaq.testing.ports import reserve_port
from metaq.zk.embedded import EmbeddedZooKeeper
from tests.cli.runner import run
from tests.spark.brokers import wire
from tests.spark.conftest import ROOT, VERSION
from tests.spark.test_executors import RealZooKeeper

pytest.importorskip("pyspark.pipelines")
pytest.importorskip("grpc")

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.crash,
    pytest.mark.zookeeper,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(VERSION < (4, 2), reason="the project takes WATERMARK in SQL"),
]

START_S = 1_800_000_000
LEVELS = (logging.INFO, logging.INFO, logging.WARNING, logging.ERROR)
WAIT_S = 600.0
COMPACT = ".compact"


def log_lines(minutes: range) -> list[str]:
    """Return lines as Python writes them to a log, some with a traceback."""
    formatter = logging.Formatter(FORMAT)
    formatter.converter = time.gmtime
    lines = []
    for minute in minutes:
        for number in range(8 + 5 * (minute % 4)):
            level = LEVELS[number * (minute + 1) % len(LEVELS)]
            record = logging.LogRecord(
                "metaq.broker", level, __file__, 1, f"line {number}", None, None
            )
            record.created, record.msecs = START_S + 60 * minute + 2 * number, 0
            lines += formatter.format(record).split("\n")
            if level == logging.ERROR:
                lines += ["Traceback (most recent call last):", "ValueError: no"]
    return lines


FIRST = log_lines(range(6))
SECOND = log_lines(range(6, 12))
LAST = log_lines(range(60, 61))[:1]
"""So much later that all minutes before it are over."""
STRAY = "2027-02-30 08:00:00,000 ERROR   metaq.broker a day that no year has"
MATCH = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d):\d\d\S* ([A-Z]+) ")

WARNINGS = """CREATE STREAMING TABLE warnings AS
SELECT time, text FROM STREAM lines WHERE level = 'WARNING'
"""


def levels_of(lines: list[str]) -> list[tuple[str, str]]:
    """Return minute and level of each line that has them, by plain Python."""
    found = map(MATCH.match, lines)
    return sorted((match[1], match[2]) for match in found if match)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    with EmbeddedZooKeeper(tmp_path / "zookeeper") as zookeeper:
        found = EmbeddedBroker(
            tmp_path / "broker",
            topics={"logs": 2, "alerts": 1, "logs.dead": 1},
            zookeeper=RealZooKeeper(zookeeper.address),  # type: ignore[arg-type]  # it will do
        )
        found.start()
        yield found
        found.stop()


def publish(broker: EmbeddedBroker, lines: list[str]) -> None:
    with Client(brokers=[broker.address]) as client, client.producer() as producer:
        producer.send_many("logs", [line.encode() for line in lines])


class Service:
    """`metaq pipeline run` in a process group of its own; its Java is of the group."""

    def __init__(self, place: Path) -> None:
        self.errors = place.parent / "errors.log"
        self.metrics_port = reserve_port(self)
        self.rows_in: Counter[str] = Counter()
        more = ["--json", "--metrics-port", str(self.metrics_port)]
        command = ["-m", "metaq", "pipeline", "run", str(place), *more]
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, *command, "--master", "local[2]", "--every", "0"],
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                text=True,
            )

    def next_batch(self) -> dict[str, Any]:
        """Return the next micro-batch, and count its rows."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"it ended: {self.errors.read_text()[-4000:]}"
        found: dict[str, Any] = json.loads(line)
        self.rows_in[found["flow"]] += found["row_in_count"]
        return found

    def batch_of(self, flow: str) -> dict[str, Any]:
        """Return the next micro-batch of a flow that has rows."""
        while True:
            found = self.next_batch()
            if found["flow"] == flow and found["row_in_count"]:
                return found

    def scrape(self) -> str:
        with urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics") as answer:
            text: str = answer.read().decode()
        return text

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def end(self) -> int:
        """End it as service managers do; return its exit code."""
        self.process.terminate()
        self.process.communicate(timeout=WAIT_S)
        return self.process.returncode

    def wait_gone(self) -> None:
        """Wait until no process of the group is left; Python's end behind Java's."""
        deadline_s = time.monotonic() + WAIT_S
        with suppress(ProcessLookupError):
            while time.monotonic() < deadline_s:
                os.killpg(self.process.pid, 0)
                time.sleep(0.1)
            raise AssertionError("processes are left")


def environment() -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYSPARK_PYTHON": sys.executable,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }


def rows_of(place: Path, table: str) -> list[dict[str, Any]]:
    """Return what a table holds by its own log: a kill leaves other files there."""
    steps = place / "tables" / table / "_spark_metadata"
    named = [path for path in steps.iterdir() if not path.name.startswith(".")]
    # Every tenth one has all before it: 9.compact.
    numbers = {int(path.name.removesuffix(COMPACT)): path for path in named}
    first = max((n for n, path in numbers.items() if path.suffix), default=0)
    entries = [
        json.loads(line)
        for number, path in numbers.items()
        for line in path.read_text().splitlines()[1:]
        if number >= first
    ]
    files = [entry["path"].removeprefix("file://") for entry in entries]
    read = partial(pq.read_table, coerce_int96_timestamp_unit="us")
    return [row for file in files for row in read(file).to_pylist()]


def minute_text(moment: datetime) -> str:
    return moment.replace(tzinfo=UTC).strftime("%Y-%m-%d %H:%M")


def counts_of(place: Path) -> list[tuple[tuple[str, str], int]]:
    return sorted(
        ((minute_text(row["minute"]), row["level"]), row["count"])
        for row in rows_of(place, "counts")
    )


def alerts_of(broker: EmbeddedBroker) -> list[tuple[tuple[str, str], int]]:
    with Client(brokers=[broker.address]) as client:
        values = [json.loads(message.data) for message in client.browse("alerts")]
    return sorted(
        ((minute_text(datetime.fromisoformat(v["minute"])), v["level"]), v["count"])
        for v in values
    )


def letters_of(broker: EmbeddedBroker) -> dict[str, list[str]]:
    """Return the dead letters: line → causes, one for each time that it is there."""
    found: dict[str, list[str]] = {}
    with Client(brokers=[broker.address]) as client:
        for message in client.browse("logs.dead"):
            cause = message.headers["dead-letter.cause"].decode()
            found.setdefault(message.data.decode(), []).append(cause)
    return found


def check_lines(
    broker: EmbeddedBroker, place: Path, lines: list[str], more: dict[str, list[str]]
) -> None:
    """Each line is a row or a dead letter, once; there are some more letters."""
    rows = [(minute_text(r["time"]), r["level"]) for r in rows_of(place, "lines")]
    assert sorted(rows) == levels_of(lines)
    bad = Counter(line for line in lines if not MATCH.match(line))
    letters = {line: ["the pattern does not match"] * n for line, n in bad.items()}
    assert letters_of(broker) == {**letters, **more}


def check_counts(broker: EmbeddedBroker, place: Path, lines: list[str]) -> None:
    """Each minute is counted once, and told once where there is reason to."""
    counts = Counter(levels_of(lines))
    assert counts_of(place) == sorted(counts.items())
    many = {
        key: count
        for key, count in counts.items()
        if key[1] in {"WARNING", "ERROR"} and count >= 5
    }
    assert alerts_of(broker) == sorted(many.items())


def test_a_project_runs_as_it_is_written_through_a_kill_a_stop_and_a_refresh(
    broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """Counts, alerts and dead letters are those of plain Python, each once."""
    place = tmp_path / "errors"
    zookeeper = str(broker.zookeeper.address)
    done = run("pipeline", "init", str(place), "--zookeeper", zookeeper)
    assert done.exit_code == 0, done.output

    publish(broker, FIRST)
    service = Service(place)
    first = service.batch_of("lines")
    assert first["row_in_count"] == len(FIRST)
    assert first["lag_bytes"] == {"logs": 0}
    service.kill()  # counts are next, or have begun

    publish(broker, SECOND + LAST)
    (place / "transformations" / "warnings.sql").write_text(WARNINGS)
    service = Service(place)
    assert service.batch_of("lines")["row_in_count"] == len(SECOND + LAST)
    wrote = service.batch_of("alert")
    read = f'metaq_pipeline_rows_in_total{{flow="lines"}} {len(SECOND + LAST)}.0'
    assert read in service.scrape()
    publish(broker, [STRAY])
    while service.rows_in["lines"] <= len(SECOND + LAST):
        service.next_batch()
    while not service.rows_in["dead_letter"] or STRAY not in letters_of(broker):
        service.next_batch()
    assert service.end() == 0
    assert service.errors.read_text() == ""
    service.wait_gone()

    check_counts(broker, place, FIRST + SECOND)
    assert 0 < wrote["row_out_count"] <= len(alerts_of(broker))
    cause = "field time: expected TIMESTAMP, got '2027-02-30 08:00:00,000'"
    check_lines(broker, place, FIRST + SECOND + LAST, {STRAY: [cause]})
    warned = sum(level[0] == "W" for _minute, level in levels_of(FIRST + SECOND))
    assert len(rows_of(place, "warnings")) == warned

    done = run("pipeline", "status", str(place), "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["pipeline"] == told["group"] == "errors"
    assert {each["flow"] for each in told["flows"]} == {
        "alert", "counts", "dead_letter", "lines", "warnings",
    }  # fmt: skip
    assert all(each["finished"] for each in told["flows"])
    assert [each["lag"]["bytes"] for each in told["partitions"]] == [0, 0]

    # Spark's own command, on the same catalog.
    from metaq.spark.declared.updates import catalog_settings

    settings = [f"--conf={k}={v}" for k, v in catalog_settings(place).items()]
    spec = ["--spec", str(place / "spark-pipeline.yml")]
    refreshed = subprocess.run(
        ["spark-pipelines", "run", *settings, *spec, "--full-refresh", "warnings"],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert refreshed.returncode == 0, refreshed.stderr[-4000:]
    assert len(rows_of(place, "warnings")) == warned
    versions = place / "storage/_checkpoints/spark_catalog/default/warnings/warnings"
    assert {path.name for path in versions.iterdir()} == {"0", "1"}


CONNECT = """
import json, sys
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
import metaq.spark

options, place = json.loads(sys.argv[1]), sys.argv[2]
spark = SparkSession.builder.remote("local[1]").getOrCreate()
metaq.spark.register(spark)
metaq.spark.register(spark)
rows = spark.range(10).selectExpr("concat('line ', id) AS value")
rows.write.format("metaq").options(**options, topic="logs").mode("append").save()
ours = spark.read.format("metaq").options(**options)
found = {"read": ours.option("subscribe", "logs").load().count()}
(
    spark.readStream.format("metaq")
    .options(**options, subscribe="logs", startingOffsets="earliest")
    .load()
    .selectExpr("string(value) AS line")
    .writeStream.format("parquet")
    .option("path", place + "/lines")
    .option("checkpointLocation", place + "/checkpoint")
    .trigger(availableNow=True)
    .start()
    .awaitTermination()
)
found["streamed"] = spark.read.parquet(place + "/lines").count()
try:
    ours.option("subscribe", "nobody").load().count()
except PySparkException as error:
    found["error"] = str(error)
spark.stop()
print(json.dumps(found))
"""


def test_a_client_of_spark_connect_reads_writes_streams_and_hears_of_errors(
    broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """The formats are registered there as in a session of its own process."""
    script = tmp_path / "connect.py"
    script.write_text(CONNECT)
    options = wire(broker, retryTimeoutMs=1000)
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(options), str(tmp_path)],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["read"], found["streamed"]) == (10, 10)
    assert "no broker has topic 'nobody'" in sentence_of(JobError(found["error"]))
