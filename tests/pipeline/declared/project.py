"""A scaffolded project: lines for its topic, and what is to come of them.

Its numbers are compared with plain Python over the same lines.
"""

import json
import logging
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from metaq.cli.logs import FORMAT
from metaq.client import Client
from metaq.testing.embedded import EmbeddedBroker
from metaq.zk.embedded import EmbeddedZooKeeper
from tests.rigs.fork_server import executable
from tests.spark.conftest import ROOT
from tests.spark.test_executors import RealZooKeeper

pytest.importorskip("pyspark.pipelines")
pytest.importorskip("grpc")

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


MATCH = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d):\d\d\S* ([A-Z]+) ")


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


def environment() -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYSPARK_PYTHON": executable(),
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
    """Each minute is counted once, and reported once where there is reason to."""
    counts = Counter(levels_of(lines))
    assert counts_of(place) == sorted(counts.items())
    many = {
        key: count
        for key, count in counts.items()
        if key[1] in {"WARNING", "ERROR"} and count >= 5
    }
    assert alerts_of(broker) == sorted(many.items())
