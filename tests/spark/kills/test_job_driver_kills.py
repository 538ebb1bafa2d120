"""Drivers of pipeline jobs are killed while they work, and the jobs run again.

Each start of Spark ends with a death. METAQ_WHOLE=1 and METAQ_KILL_ROUNDS make it
longer, METAQ_SEED repeats it.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from tests.sampling import IS_WHOLE
from tests.spark.brokers import data_of, stored, wire
from tests.spark.kills.harness import (
    DRIVER_MARKS,
    MASTER,
    ROUNDS,
    Killing,
    Ledger,
    die,
    die_in,
    driver,
)
from tests.spark.kills.steps import COMMIT_STEPS, DRIVER, FILE_STEP, WRITE_STEPS

pytestmark = DRIVER_MARKS

FILE_CHANGES = 9
"""At least so many changes of files has a run of an archive with new messages."""


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    with embedded_broker(topics={"logs": 2, "copy": 2, "lines": 2}) as found:
        yield found


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
    writing = killing.some_of((*WRITE_STEPS, *COMMIT_STEPS), 2)
    for _ in range(ROUNDS * (1 + IS_WHOLE)):
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
