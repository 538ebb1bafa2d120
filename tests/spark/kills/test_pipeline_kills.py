"""Processes of a declared pipeline are killed at every step of an update.

What `metaq pipeline init` writes is run again after the death of each driver; of other
processes several die in one update. A run has one death, in
`declared/test_updates_service.py`, METAQ_WHOLE=1 all of them, here; METAQ_KILL_ROUNDS
makes it longer, METAQ_SEED repeats it.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TypeAlias

import pytest

from metaq.testing.embedded import EmbeddedBroker
from tests.cli.runner import run
from tests.pipeline.declared.project import (
    WAIT_S,
    broker,
    check_counts,
    check_lines,
    environment,
    log_lines,
    publish,
)
from tests.sampling import IS_WHOLE
from tests.spark.kills.harness import DRIVER_MARKS, Killing
from tests.spark.kills.steps import (
    DECISION_STEPS,
    DIRECTORY,
    DRIVER,
    EXECUTOR,
    PLAN_STEPS,
    PROGRESS_STEPS,
    READ_STEPS,
    SELF,
    UPDATE_STEPS,
    WRITE_STEPS,
)

__all__ = ["broker"]

pytestmark = [pytest.mark.spark, *DRIVER_MARKS]

Death: TypeAlias = tuple[str, str]
"""A step, and who dies there."""

FORMATS = Path(__file__).parent / "formats"
TASK_STEPS = (*READ_STEPS, *WRITE_STEPS)
PYTHON_STEPS = (*TASK_STEPS, *PLAN_STEPS, *PROGRESS_STEPS, *DECISION_STEPS)
MASTERS = {
    "local": (
        "local[2,3]",
        [
            *product(UPDATE_STEPS, (DRIVER,)),
            *product(PYTHON_STEPS, (SELF, DRIVER)),
        ],
    ),
    "executors": (
        "local-cluster[1,2,1024]",
        [*product(TASK_STEPS, (SELF, EXECUTOR, DRIVER))],
    ),
}
"""Places where updates run, and the process that dies there at which step."""
DEATHS_MAX = 6
"""Of workers and executors in one update; a driver dies once."""
SETTINGS = {
    # A task that writes has several batches of rows.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "5",
    # A flow that has failed is run again, for each death.
    "spark.sql.pipelines.execution.watchdog.minRetryTime": "1s",
    "spark.sql.pipelines.execution.watchdog.maxRetryTime": "1s",
    "spark.sql.pipelines.maxFlowRetryAttempts": f"{DEATHS_MAX}",
    "spark.deploy.maxExecutorRetries": "-1",
    # Each update has a JVM of its own.
    "spark.driver.extraJavaOptions": (
        "-Dderby.stream.error.file=/dev/null -XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    ),
}
LIMIT = "500000"
"""Of messages in a micro-batch, as a new project has it."""
MINUTES = 12
"""Of the lines of an update, for each death in it."""


TORN, TORN_TRIES = "Illegal size", 3
"""Error of an update whose flows have begun in the same moment: Spark 4.3 has both put
variables of a Python source in one map, and its Java sends no task from then on."""


class Updates:
    """Updates of one project, each by a command of its own that may be killed."""

    def __init__(self, place: Path, directory: Path, master: str) -> None:
        self._directory = directory
        found = environment()
        paths = [str(FORMATS), found["PYTHONPATH"]]
        self._environment = {
            **found,
            "PYTHONPATH": os.pathsep.join(paths),
            # Those that are killed are Spark's own children.
            "PYSPARK_PYTHON": sys.executable,
            DIRECTORY: str(directory),
        }
        words = ["-m", "tests.spark.kills.pipeline", str(place), "--once"]
        self._command = [sys.executable, *words, "--master", master]
        for name, value in SETTINGS.items():
            self._command += ["--conf", f"{name}={value}"]

    def run(self) -> subprocess.CompletedProcess[str]:
        """Run one; again, where Spark has torn its map."""
        for _ in range(TORN_TRIES):
            done = subprocess.run(
                self._command,
                env=self._environment,
                # Python looks for formats there first; this checkout has the real one.
                cwd=self._directory,
                start_new_session=True,
                capture_output=True,
                text=True,
                timeout=WAIT_S,
                check=False,
            )
            if TORN not in done.stderr:
                break
        return done


def updates_of(deaths: Sequence[Death]) -> list[list[Death]]:
    """Return the deaths of each update: one of a driver, or several of others."""
    others = [(step, victim) for step, victim in deaths if victim != DRIVER]
    return [
        *(others[i : i + DEATHS_MAX] for i in range(0, len(others), DEATHS_MAX)),
        *([(step, victim)] for step, victim in deaths if victim == DRIVER),
    ]


@pytest.mark.skipif(not IS_WHOLE, reason="test_updates_service.py has one of them")
@pytest.mark.parametrize("masters", MASTERS)
def test_a_pipeline_is_right_though_its_processes_die(
    killing: Killing, broker: EmbeddedBroker, tmp_path: Path, masters: str
) -> None:
    """Tables, alerts and dead letters have everything once.

    Python workers and executors are Spark's to replace; an update that was killed is
    gone on with by the next one.
    """
    place = tmp_path / "errors"
    zookeeper = str(broker.zookeeper.address)
    assert not run("pipeline", "init", str(place), "--zookeeper", zookeeper).exit_code
    master, deaths = MASTERS[masters]
    updates = Updates(place, killing.directory, master)
    chosen = killing.some_of(deaths, 1)
    logs = place / "transformations" / "logs.py"
    text = logs.read_text()
    assert LIMIT in text
    lines: list[str] = []
    minute = 0
    for dying in updates_of(chosen):
        end = minute + len(dying) * MINUTES
        new = log_lines(range(minute, end))
        minute = end
        publish(broker, new)
        lines += new
        # Several micro-batches: what follows the commit of one is done at the start
        # of the next.
        limit = len(new) * 2 // 3 // len(dying)
        logs.write_text(text.replace(LIMIT, str(limit)))
        killing.order_all(dying)
        done = updates.run()
        killing.assert_done(done)
        driver_dies = dying[0][1] == DRIVER
        assert done.returncode == (-signal.SIGKILL if driver_dies else 0), done
        if not driver_dies:
            check_lines(broker, place, lines, {})
    last = log_lines(range(minute + 10, minute + 11))[:1]
    publish(broker, last)
    done = updates.run()
    assert done.returncode == 0, done
    check_lines(broker, place, lines + last, {})
    check_counts(broker, place, lines)
