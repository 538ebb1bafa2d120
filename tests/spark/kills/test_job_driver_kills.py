"""Drivers of pipeline jobs are killed while they work, and the jobs run again.

Each start of Spark ends with a death. A run kills the driver of one job at one step,
METAQ_WHOLE=1 of all jobs at all steps; METAQ_KILL_ROUNDS makes it longer, METAQ_SEED
repeats it.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from tests.spark.brokers import data_of, stored, wire
from tests.spark.kills.harness import DRIVER_MARKS, Drivers, Killing, Ledger, die_in
from tests.spark.kills.steps import (
    ARCHIVE_STEPS,
    COMMIT_STEPS,
    DRIVER,
    FILE_STEPS,
    WRITE_STEPS,
)

pytestmark = [pytest.mark.spark, *DRIVER_MARKS]

SINK_STEPS = (*WRITE_STEPS, *COMMIT_STEPS)
STEPS = {
    "archive": (*ARCHIVE_STEPS, *FILE_STEPS),
    "replay": SINK_STEPS,
    "ingest": SINK_STEPS,
}
"""Those of each job."""


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    with embedded_broker(topics={"logs": 2, "copy": 2, "lines": 2}) as found:
        yield found


def test_jobs_whose_drivers_die_lose_nothing(
    killing: Killing, drivers: Drivers, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """An archive doubles nothing either; what is written again is there twice."""
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
    jobs = {"archive": archiving, "replay": replaying, "ingest": ingesting}
    every = [(job, step) for job, steps in STEPS.items() for step in steps]
    chosen = killing.some_of(every, 1)
    deaths = {job: [step for dying, step in chosen if dying == job] for job in jobs}
    ledger.publish(100)
    for job, words in jobs.items():
        for step in deaths[job]:
            killing.order(step, DRIVER)
            die_in(drivers.get(), killing, job, words)
            if job == "archive":
                ledger.publish(100)
        doubles_max = len(deaths["replay"]) * ledger.count
        if job == "replay":
            ledger.check("copy", doubles_max=doubles_max, is_whole=False)
        assert "done" in drivers.get().ask(job, **words)
    assert drivers.get().ask("archived", path=path)["done"] == ledger.texts
    ledger.check("copy", doubles_max=doubles_max)
    found = data_of(stored(broker, "lines"))
    assert {*found} == {b"%d" % number for number in range(300)}
    assert len(found) <= (1 + len(deaths["ingest"])) * 300
