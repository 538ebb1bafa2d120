"""Drivers are killed at every step of a batch, and started again on what they left.

Each start of Spark ends with a death. METAQ_KILL_ROUNDS makes it longer, METAQ_SEED
repeats it.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metaq.spark.versions import HAS_LIMITS
from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from metaq.zk.embedded import EmbeddedZooKeeper
from tests.conftest import SEED
from tests.spark.brokers import data_of, stored, wire
from tests.spark.kills.harness import (
    OWN_FORMAT,
    ROUNDS,
    Driver,
    DriverDied,
    Killing,
    Ledger,
    driver,
)
from tests.spark.kills.steps import (
    COMMIT_STEPS,
    DRIVER,
    FILE_STEP,
    PLAN_STEPS,
    PROGRESS_STEPS,
    READ_STEPS,
    START_STEPS,
    WRITE_STEPS,
)
from tests.spark.test_executors import RealZooKeeper

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.crash,
    OWN_FORMAT,
    pytest.mark.zookeeper,
    pytest.mark.timeout(1200 * ROUNDS),
    pytest.mark.skipif(
        not HAS_LIMITS, reason="before 4.2 Spark takes other steps, and other readers"
    ),
]

MASTER = "local[2]"
FILE_CHANGES = 9
"""At least so many changes of files has a run of an archive with new messages."""


@pytest.fixture
def killing(tmp_path: Path) -> Killing:
    place = tmp_path / "kills"
    place.mkdir()
    return Killing(place, random.Random(SEED))


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    with embedded_broker(topics={"logs": 2, "copy": 2, "lines": 2}) as found:
        yield found


def test_a_stream_whose_driver_dies_loses_and_doubles_nothing(
    killing: Killing, tmp_path: Path
) -> None:
    """From its first moment on: a start that is pinned is a promise."""
    (tmp_path / "zookeeper").mkdir()
    with (
        EmbeddedZooKeeper(tmp_path / "zookeeper") as zookeeper,
        embedded_broker(
            topics={"logs": 2, "copy": 2},
            zookeeper=RealZooKeeper(zookeeper.address),  # type: ignore[arg-type]  # it will do
        ) as broker,
    ):
        ledger = Ledger(broker, "logs")
        words = {
            "source": {
                "zookeeper": zookeeper.address,
                "subscribe": "logs",
                "startingOffsets": "latest",
                "maxOffsetsPerTrigger": "200",
                "progressGroup": "copying",
            },
            "target": {
                "zookeeper": zookeeper.address,
                "topic": "copy",
                "batchBytes": "2000",
            },
            "checkpoint": str(tmp_path / "checkpoint"),
        }
        for step in START_STEPS:
            ledger.publish(20, is_due=False)
            killing.order(step, DRIVER)
            die(killing, "copy", words)
        steps = killing.shuffled((*PLAN_STEPS, *COMMIT_STEPS, *PROGRESS_STEPS))
        tasks = killing.shuffled((*READ_STEPS, *WRITE_STEPS))
        for step in (*steps, *tasks[: 2 * ROUNDS]):
            ledger.publish(150)
            killing.order(step, DRIVER, skip_max=int(step in tasks))
            die(killing, "copy", words)
            ledger.check("copy", is_whole=False)
        with driver(killing.directory, MASTER) as last:
            assert last.ask("copy", **words) == {"done": None}
        ledger.check("copy")


def die(killing: Killing, job: str, words: dict[str, Any]) -> None:
    """Run a job in a driver of its own that does not survive it."""
    with driver(killing.directory, MASTER) as dying:
        die_in(dying, killing, job, words)


def die_in(dying: Driver, killing: Killing, job: str, words: dict[str, Any]) -> None:
    with pytest.raises(DriverDied):
        killing.assert_done(dying.ask(job, **words))
    killing.assert_done()


def test_jobs_whose_drivers_die_lose_nothing(
    killing: Killing, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """An archive doubles nothing either; what is written anew is there twice."""
    ledger = Ledger(broker, "logs")
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join(map(str, range(300))))
    path = str(tmp_path / "archive")
    archiving = {"path": path, "options": wire(broker, subscribe="logs")}
    replaying = {
        "path": path,
        "options": wire(broker, topic="copy", batchBytes=2000),
        "keeps_partitions": True,
    }
    ingesting = {
        "options": wire(broker, topic="lines", batchBytes=2000),
        "source_format": "text",
        "paths": [str(lines)],
    }
    writing = killing.shuffled((*WRITE_STEPS, *COMMIT_STEPS))
    for _ in range(2 * ROUNDS):
        ledger.publish(100)
        killing.order(FILE_STEP, DRIVER, skip_max=FILE_CHANGES - 1)
        die(killing, "archive", archiving)
    for step in writing[:ROUNDS]:
        with driver(killing.directory, MASTER) as dying:
            assert "done" in dying.ask("archive", **archiving)
            assert dying.ask("archived", path=path)["done"] == ledger.texts
            killing.order(step, DRIVER)
            die_in(dying, killing, "replay", replaying)
    doubles_max = ROUNDS * ledger.count
    ledger.check("copy", doubles_max=doubles_max, is_whole=False)
    for step in writing[-ROUNDS:]:
        with driver(killing.directory, MASTER) as dying:
            assert "done" in dying.ask("replay", **replaying)
            doubles_max += ledger.count
            killing.order(step, DRIVER)
            die_in(dying, killing, "ingest", ingesting)
    ledger.check("copy", doubles_max=doubles_max)
    with driver(killing.directory, MASTER) as last:
        assert "done" in last.ask("ingest", **ingesting)
    found = data_of(stored(broker, "lines"))
    assert {*found} == {b"%d" % number for number in range(300)}
    assert len(found) <= (1 + ROUNDS) * 300
