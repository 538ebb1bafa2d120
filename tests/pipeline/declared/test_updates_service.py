"""A new project is run as it is written, killed and gone on with, and counts right.

Its numbers are compared with plain Python over the same lines. Spark is dear, so one
life of a project has several promises in it: each run begins where the last one ended.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from metaq.testing.embedded import EmbeddedBroker
from metaq.testing.servers import reserve_port
from tests.cli.runner import run
from tests.pipeline.declared.project import (
    MATCH,
    WAIT_S,
    alerts_of,
    broker,
    check_counts,
    check_lines,
    environment,
    letters_of,
    levels_of,
    log_lines,
    publish,
    rows_of,
)
from tests.sampling import SEED
from tests.spark.classes import VERSION
from tests.spark.kills.harness import Killing
from tests.spark.kills.steps import DRIVER, PROGRESS_STEPS
from tests.spark.kills.test_pipeline_kills import LIMIT, MASTERS, MINUTES, Updates

__all__ = ["broker"]

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.crash,
    pytest.mark.zookeeper,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(VERSION < (4, 2), reason="the project takes WATERMARK in SQL"),
]

FIRST = log_lines(range(MINUTES))
SECOND = log_lines(range(MINUTES, 30))
"""More than the first ones."""
LAST = log_lines(range(60, 61))[:1]
"""So much later that all minutes before it are over."""
LATE = [line for line in log_lines(range(61, 62)) if MATCH.match(line)]
STRAY = "2027-02-30 08:00:00,000 ERROR   metaq.broker a day that no year has"

WARNINGS = """CREATE STREAMING TABLE warnings AS
SELECT time, text FROM STREAM lines WHERE level = 'WARNING'
"""


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

    def end(self) -> int:
        """End it as service managers do; return its exit code."""
        self.process.terminate()
        self.process.communicate(timeout=WAIT_S)
        return self.process.returncode

    def wait_gone(self) -> None:
        """Wait until no process of the group is left; Python's end after Java's."""
        deadline_s = time.monotonic() + WAIT_S
        with suppress(ProcessLookupError):
            while time.monotonic() < deadline_s:
                os.killpg(self.process.pid, 0)
                time.sleep(0.1)
            raise AssertionError("processes are left")


def die_once(place: Path, directory: Path) -> None:
    """Make an update in which a process dies: one of those of `test_pipeline_kills`."""
    directory.mkdir()
    killing = Killing(directory, random.Random(SEED))
    master, deaths = killing.rng.choice([*MASTERS.values()])
    step, victim = killing.rng.choice(deaths)
    logs = place / "transformations" / "logs.py"
    text = logs.read_text()
    # What follows the commit of a micro-batch is done at the start of the next one.
    limit = str(len(FIRST) * 2 // 3) if step in PROGRESS_STEPS else LIMIT
    logs.write_text(text.replace(LIMIT, limit))
    killing.order(step, victim)
    done = Updates(place, directory, master).run()
    killing.assert_done(done)
    assert done.returncode == (-signal.SIGKILL if victim == DRIVER else 0), done
    logs.write_text(text)


def leave_half_written(checkpoint: Path) -> None:
    """Leave of a checkpoint what a kill leaves that comes in its first file."""
    (checkpoint / "offsets").mkdir(parents=True)
    (checkpoint / "offsets" / ".0.9f1c.tmp").write_text("v1")


def test_a_project_runs_as_it_is_written_through_a_kill_a_stop_and_a_refresh(
    broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """Counts, alerts and dead letters are those of plain Python, each once."""
    place = tmp_path / "errors"
    zookeeper = str(broker.zookeeper.address)
    done = run("pipeline", "init", str(place), "--zookeeper", zookeeper)
    assert done.exit_code == 0, done.output

    publish(broker, FIRST)
    die_once(place, tmp_path / "kills")

    publish(broker, SECOND + LAST)
    (place / "transformations" / "warnings.sql").write_text(WARNINGS)
    versions = place / "storage/_checkpoints/spark_catalog/default/warnings/warnings"
    leave_half_written(versions / "0")
    service = Service(place)
    # A micro-batch that was begun comes again, with the lines that it had.
    while service.rows_in["lines"] < len(SECOND + LAST):
        newest = service.batch_of("lines")
    assert newest["lag_bytes"] == {"logs": 0}
    wrote = service.batch_of("alert")
    read = service.rows_in["lines"]
    metric = f'metaq_pipeline_rows_in_total{{flow="lines"}} {read}.0'
    assert metric in service.scrape()
    publish(broker, [STRAY])
    while service.rows_in["lines"] == read:
        service.next_batch()
    while not service.rows_in["dead_letter"] or STRAY not in letters_of(broker):
        service.next_batch()
    assert service.end() == 0
    assert service.errors.read_text() == ""
    service.wait_gone()
    assert (versions / "0" / "offsets" / "0").exists()

    check_counts(broker, place, FIRST + SECOND)
    assert 0 < wrote["row_out_count"] <= len(alerts_of(broker))
    cause = "field time: expected TIMESTAMP, got '2027-02-30 08:00:00,000'"
    check_lines(broker, place, FIRST + SECOND + LAST, {STRAY: [cause]})
    warned = sum(level[0] == "W" for _minute, level in levels_of(FIRST + SECOND))
    assert len(rows_of(place, "warnings")) == warned

    done = run("pipeline", "status", str(place), "--json")
    assert done.exit_code == 0, done.output
    status = json.loads(done.stdout)
    assert status["pipeline"] == "errors"
    assert [each["group"] for each in status["groups"]] == ["errors", "errors.dead"]
    assert {each["flow"] for each in status["flows"]} == {
        "alert", "counts", "dead_letter", "lines", "warnings",
    }  # fmt: skip
    assert all(each["finished"] for each in status["flows"])
    partitions = status["groups"][0]["partitions"]
    assert [each["lag"]["bytes"] for each in partitions] == [0, 0]

    # Spark's own command, on the same catalog, with the same decoded columns.
    publish(broker, LATE)
    from metaq.pipeline.declared.updates import catalog_settings

    settings = [f"--conf={k}={v}" for k, v in catalog_settings(place).items()]
    spec = ["--spec", str(place / "spark-pipeline.yml")]
    which = ["--full-refresh", "warnings", "--refresh", "lines"]
    refreshed = subprocess.run(
        ["spark-pipelines", "run", *settings, *spec, *which],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert refreshed.returncode == 0, refreshed.stderr[-4000:]
    check_lines(broker, place, FIRST + SECOND + LAST + LATE, {STRAY: [cause]})
    warned += sum(level[0] == "W" for _minute, level in levels_of(LATE))
    assert len(rows_of(place, "warnings")) == warned
    assert {path.name for path in versions.iterdir()} == {"0", "1"}
