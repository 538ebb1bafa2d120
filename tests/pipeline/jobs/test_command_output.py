"""Output of `metaq pipeline`, run in this process, in a session that is there.

That commands start Spark and stop it is in `test_commands.py`.
"""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from pyspark.sql import SparkSession

from metaq.pipeline.jobs import session as jobs_session
from metaq.spark import register
from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from tests.cli.runner import run
from tests.spark.brokers import TOPIC, numbered, publish
from tests.spark.segment_dirs import flip

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

RECORD_BYTES = 35


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    with embedded_broker(topics={TOPIC: 2, "copy": 2}) as found:
        yield found


@pytest.fixture(autouse=True)
def _is_there(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have commands find a session that has been started, and leave it running."""
    register(spark)
    monkeypatch.setattr(jobs_session, "start_session", lambda *_, **__: spark)
    monkeypatch.setattr(jobs_session, "stop_session", lambda _session: None)
    py4j = logging.getLogger("py4j")
    level = py4j.level
    yield
    py4j.setLevel(level)


def pipeline(*words: str) -> Result:
    return run("pipeline", *words, "--master", "local[1]")


def test_a_topic_is_ingested_archived_and_audited(
    broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """Exit codes, objects on standard output, and not a word from Spark."""
    lines = tmp_path / "lines"
    lines.write_text("one\ntwo\nthree\n")
    path, wire = str(tmp_path / "archive"), ("--json", "--broker", broker.address)
    done = pipeline("ingest", TOPIC, str(lines), "--format", "text", *wire)
    assert (done.exit_code, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {"messages": 3, "bytes": 11}
    done = pipeline("archive", TOPIC, "--to", path, *wire)
    assert (done.exit_code, done.stderr) == (0, "")
    assert json.loads(done.stdout)["archive_messages"] == 3
    done = pipeline("audit", TOPIC, "--copy", "copy", *wire)
    assert (done.exit_code, done.stderr) == (1, "")
    *findings, numbers = map(json.loads, done.stdout.splitlines())
    assert numbers["lost"] == len(findings) == 3
    done = pipeline("archive", TOPIC, "--to", path, "--option", "x=1", *wire)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("metaq: unknown option 'x'")
    assert done.stderr.count("\n") == 1


def test_windows_are_printed(broker: EmbeddedBroker) -> None:
    """The same numbers either way."""
    publish(broker, numbered(100))
    words = ("stats", TOPIC, "--window", "86400", "--broker", broker.address)
    done = pipeline(*words, "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    windows = list(map(json.loads, done.stdout.splitlines()))
    assert sum(window["messages"] for window in windows) == 100
    done = pipeline(*words)
    assert (done.exit_code, done.stderr) == (0, "")
    head, *rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert head == [*windows[0]]
    assert [(r[0], int(r[2]), int(r[3])) for r in rows] == [
        (w["topic"], w["messages"], w["bytes"]) for w in windows
    ]


def test_damage_is_named_with_its_place(broker: EmbeddedBroker, tmp_path: Path) -> None:
    """Partition and offsets by who reads the topic; `verify` names file and offsets."""
    publish(broker, numbered(100))
    done = pipeline("verify", str(broker.data_path), "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert (found["records"], found["problems"]) == (100, 0)
    (segment,) = broker.data_path.glob(f"**/{TOPIC}-0/*.meta")
    flip(segment, 10 * RECORD_BYTES + 30)
    path = str(tmp_path / "archive")
    done = pipeline("archive", TOPIC, "--to", path, "--broker", broker.address)
    assert (done.exit_code, done.stdout) == (1, "")
    # The broker runs in this process and has a line of its own.
    lines = [x for x in done.stderr.splitlines() if "log stopped" not in x]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("metaq: archive: ")
    assert f"{TOPIC}/0-0: damaged record at offset {10 * RECORD_BYTES}" in lines[0]
    assert lines[0].endswith(f"next good record is at offset {11 * RECORD_BYTES}")
