"""Python workers, planners and executors are killed at every step of a batch.

A run takes some of the steps, METAQ_WHOLE=1 all of them; METAQ_KILL_ROUNDS makes it
longer, METAQ_SEED repeats it.
"""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from deltalake import DeltaTable

from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from tests.spark.brokers import data_of, stored, wire
from tests.spark.kills.harness import (
    CLUSTER,
    OWN_FORMAT,
    ROUNDS,
    Driver,
    Drivers,
    Killing,
    Ledger,
)
from tests.spark.kills.steps import (
    COMMIT_STEPS,
    EXECUTOR,
    FILE_STEPS,
    PLAN_STEPS,
    PROGRESS_STEPS,
    READ_STEPS,
    SELF,
    WRITE_STEPS,
)

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.crash,
    OWN_FORMAT,
    pytest.mark.timeout(2400 * ROUNDS),
]

TASK_STEPS = (*READ_STEPS, *WRITE_STEPS)


@pytest.fixture
def cluster(drivers: Drivers) -> Driver:
    """Return a driver with two executors in processes of their own."""
    return drivers.get(CLUSTER)


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    with embedded_broker(topics={"logs": 2, "copy": 2}) as found:
        yield found


def source(broker: EmbeddedBroker, step: str) -> dict[str, str]:
    """Return options for a stream of 300 messages.

    What follows the commit of a micro-batch is done at the start of the next one.
    """
    limit = 200 if step in PROGRESS_STEPS else 1000
    return wire(
        broker, subscribe="logs", startingOffsets="earliest", maxOffsetsPerTrigger=limit
    )


def victim_at(step: str, killing: Killing) -> str:
    return killing.rng.choice((SELF, EXECUTOR)) if step in TASK_STEPS else SELF


def test_a_stream_loses_and_doubles_nothing(
    cluster: Driver, broker: EmbeddedBroker, killing: Killing, tmp_path: Path
) -> None:
    """Tasks are run again; a query whose planner is gone is started again."""
    ledger = Ledger(broker, "logs")
    target = wire(broker, topic="copy", batchBytes=2000)
    steps = (*TASK_STEPS, *PLAN_STEPS, *COMMIT_STEPS, *PROGRESS_STEPS)
    for step in killing.some_of(steps, 1):
        words = {
            "source": source(broker, step),
            "target": target,
            "checkpoint": str(tmp_path),
        }
        ledger.publish(150)
        is_task = step in TASK_STEPS
        killing.order(step, victim_at(step, killing), skip_max=int(is_task))
        answer = cluster.ask("copy", **words)
        killing.assert_done(answer)
        if not is_task:
            assert "StreamingQueryException" in answer["error"]
            ledger.check("copy", is_whole=False)
            answer = cluster.ask("copy", **words)
        assert answer == {"done": None}
        ledger.check("copy")


def test_a_batch_write_loses_and_doubles_nothing(
    cluster: Driver, broker: EmbeddedBroker, killing: Killing
) -> None:
    """As long as Spark goes on with it; written again it is there twice."""
    ledger = Ledger(broker, "logs")
    ledger.publish(150)
    for number, step in enumerate(
        killing.some_of((*TASK_STEPS, "planned", *COMMIT_STEPS), 1)
    ):
        target = f"copy-{number}"
        broker.create_topic(target, 2)
        words = {
            "source": wire(broker, subscribe="logs"),
            "target": wire(broker, topic=target, batchBytes=2000),
        }
        is_task = step in TASK_STEPS
        killing.order(step, victim_at(step, killing), skip_max=int(is_task))
        answer = cluster.ask("write", **words)
        killing.assert_done(answer)
        doubles = 0
        if not is_task:
            assert "error" in answer
            was_written = step in COMMIT_STEPS
            ledger.check(target, is_whole=was_written)
            answer = cluster.ask("write", **words)
            doubles = 300 if was_written else 0
        assert answer == {"done": None}
        assert ledger.check(target, doubles_max=doubles) == doubles


def test_an_archive_has_each_message_once(
    cluster: Driver, broker: EmbeddedBroker, killing: Killing, tmp_path: Path
) -> None:
    """A half of a file that is there is not in the table, and does not stay."""
    ledger = Ledger(broker, "logs")
    path = tmp_path / "archive"
    words = {"path": str(path), "options": wire(broker, subscribe="logs")}
    deaths = [*product(FILE_STEPS, (SELF, EXECUTOR))]
    for step, victim in killing.some_of(deaths, 1):
        ledger.publish(300)
        killing.order(step, victim, skip_max=1)
        answer = cluster.ask("archive", **words)
        killing.assert_done(answer)
        assert answer["done"]["total_message_count"] == ledger.count
        assert cluster.ask("archived", path=str(path))["done"] == ledger.texts
        there = {f"{file}" for file in path.rglob("*.parquet")}
        assert there == {*DeltaTable(path).file_uris()}


def test_a_replay_keeps_order_and_doubles_nothing(
    cluster: Driver, broker: EmbeddedBroker, killing: Killing, tmp_path: Path
) -> None:
    """Its rows come from a shuffle, in an order that does not depend on it."""
    ledger = Ledger(broker, "logs")
    ledger.publish(150)
    path = str(tmp_path / "archive")
    options = wire(broker, subscribe="logs")
    assert "done" in cluster.ask("archive", path=path, options=options)
    for number, step in enumerate(killing.some_of(WRITE_STEPS, 1)):
        target = f"copy-{number}"
        broker.create_topic(target, 2)
        killing.order(step, victim_at(step, killing))
        options = wire(broker, topic=target, batchBytes=2000)
        answer = cluster.ask(
            "replay", path=path, options=options, keeps_partitions=True
        )
        killing.assert_done(answer)
        ledger.check(target)
        assert answer["done"]["message_count"] == ledger.count


def test_an_ingest_doubles_nothing(
    cluster: Driver, broker: EmbeddedBroker, killing: Killing, tmp_path: Path
) -> None:
    """A file is read again in the same order."""
    for name in ("one", "two"):
        lines = [f"{name} {number}" for number in range(150)]
        (tmp_path / f"{name}.txt").write_text("\n".join(lines))
    due = sorted(b"%s %d" % (name, n) for name in (b"one", b"two") for n in range(150))
    for number, step in enumerate(killing.some_of(WRITE_STEPS, 1)):
        target = f"copy-{number}"
        broker.create_topic(target, 2)
        killing.order(step, victim_at(step, killing))
        answer = cluster.ask(
            "ingest",
            options=wire(broker, topic=target, batchBytes=2000),
            source_format="text",
            paths=[str(tmp_path)],
        )
        killing.assert_done(answer)
        assert data_of(stored(broker, target)) == due
        assert answer["done"]["message_count"] == 300
