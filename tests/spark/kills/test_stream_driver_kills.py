"""Drivers of a stream are killed at every step of a batch, and started again.

Each start of Spark ends with a death. A run takes one of the steps, METAQ_WHOLE=1 all
of them; METAQ_KILL_ROUNDS makes it longer, METAQ_SEED repeats it.
"""

from pathlib import Path

import pytest

from metaq.testing.embedded import embedded_broker
from metaq.zk.embedded import EmbeddedZooKeeper
from tests.spark.kills.harness import (
    DRIVER_MARKS,
    ROUNDS,
    Drivers,
    Killing,
    Ledger,
    die_in,
)
from tests.spark.kills.steps import (
    COMMIT_STEPS,
    DRIVER,
    PLAN_STEPS,
    PROGRESS_STEPS,
    READ_STEPS,
    START_STEPS,
    WRITE_STEPS,
)
from tests.spark.test_executors import RealZooKeeper

pytestmark = [pytest.mark.spark, *DRIVER_MARKS]


def test_a_stream_whose_driver_dies_loses_and_doubles_nothing(
    killing: Killing, drivers: Drivers, tmp_path: Path
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
        chosen, pinned = START_STEPS
        steps = killing.some_of(
            (*START_STEPS, *PLAN_STEPS, *COMMIT_STEPS, *PROGRESS_STEPS), 1
        )
        # What is published before the start is pinned is not due.
        for step in [chosen] * steps.count(chosen) + [pinned] * (pinned in steps):
            ledger.publish(20, is_due=False)
            killing.order(step, DRIVER)
            die_in(drivers.get(), killing, "copy", words)
        if pinned not in steps:
            ledger.publish(20, is_due=False)
            assert drivers.get().ask("copy", **words) == {"done": None}
        others = [step for step in steps if step not in START_STEPS]
        # One round alone has none of them, unless it is whole.
        tasks = killing.some_of((*READ_STEPS, *WRITE_STEPS), 2 if ROUNDS > 1 else 0)
        for step in (*others, *tasks):
            ledger.publish(150)
            killing.order(step, DRIVER, skip_max=int(step in tasks))
            die_in(drivers.get(), killing, "copy", words)
            ledger.check("copy", is_whole=False)
        ledger.publish(150)
        assert drivers.get().ask("copy", **words) == {"done": None}
        ledger.check("copy")
