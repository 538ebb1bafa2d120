"""Workers, drivers, brokers and ZooKeeper die at every step of an exactly-once batch.

A run takes one of the deaths, METAQ_WHOLE=1 all of them; METAQ_KILL_ROUNDS makes it
longer, METAQ_SEED repeats it. What is there at the end is compared with a set.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from metaq.client import Client
from metaq.testing.embedded import EmbeddedBroker
from metaq.zk.embedded import EmbeddedZooKeeper
from tests.matrix.scene import broker_arguments
from tests.rigs.process import BrokerProcess
from tests.spark.brokers import numbered, publish, tp
from tests.spark.kills.harness import (
    CLUSTER,
    DRIVER_MARKS,
    MASTER,
    DriverDied,
    Drivers,
    Killing,
    ask_mending,
)
from tests.spark.kills.steps import (
    DECISION_STEPS,
    DRIVER,
    EXECUTOR,
    SELF,
    SERVER_PIDS,
    WRITE_STEPS,
)
from tests.spark.test_executors import RealZooKeeper

pytestmark = [pytest.mark.spark, *DRIVER_MARKS]

BROKER, ZOOKEEPER = "broker", "zookeeper"
STEPS = (*WRITE_STEPS, *DECISION_STEPS)
LOCAL = (SELF, BROKER, ZOOKEEPER, DRIVER)
MASTERS = {
    "local": (MASTER, [(step, victim) for step in STEPS for victim in LOCAL]),
    "executors": (
        CLUSTER,
        [(step, victim) for step in WRITE_STEPS for victim in (SELF, EXECUTOR)],
    ),
}
"""Places where queries run, and the process that dies there at which step."""
BATCH = 300
TRIES = 3
"""Runs of a query after a death: what has died may not be back at the first."""


class Servers:
    """ZooKeeper, a source that never dies, and two brokers to write to."""

    def __init__(self, place: Path, stack: ExitStack) -> None:
        (place / "zookeeper").mkdir()
        self.zookeeper = stack.enter_context(EmbeddedZooKeeper(place / "zookeeper"))
        self.source = stack.enter_context(
            EmbeddedBroker(
                place / "source",
                topics={"logs": 2},
                zookeeper=RealZooKeeper(self.zookeeper.address),  # type: ignore[arg-type]  # it will do
                settings={"brokerId": "9"},
            )
        )
        self.brokers = [
            stack.enter_context(
                BrokerProcess(
                    place / f"broker-{number}",
                    topic="unused",
                    arguments=[
                        *broker_arguments(self.zookeeper.address, number, {"copy": 2}),
                        "--set=hostName=127.0.0.1",
                    ],
                )
            )
            for number in (0, 1)
        ]
        self.published = 0

    def publish(self) -> None:
        """Put one batch of messages into the source."""
        for number in (0, 1):
            data = numbered(BATCH // 2, self.published)
            publish(self.source, data, partition=tp(number, broker=9, topic="logs"))
            self.published += BATCH // 2

    def note(self, directory: Path) -> None:
        """Tell processes that kill whom they may."""
        pids = {BROKER: self.brokers[1].pid, ZOOKEEPER: self.zookeeper.pid}
        (directory / SERVER_PIDS).write_text(json.dumps(pids))

    def mend(self) -> None:
        """Start again what has died."""
        if not self.zookeeper.is_running:
            self.zookeeper.start()
        for broker in self.brokers:
            broker.mend()

    def check(self, *, is_whole: bool) -> None:
        """Nothing is there twice, and everything if it has to be."""
        with Client(self.zookeeper.address) as client:
            there = sorted(message.data for message in client.browse("copy"))
        due = numbered(self.published)
        assert len(there) == len(set(there))
        assert there == due if is_whole else set(there) <= set(due)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(tmp_path, stack)


@pytest.mark.parametrize("masters", MASTERS)
@pytest.mark.sampled(1)
def test_a_stream_is_there_once_though_processes_die(
    killing: Killing,
    drivers: Drivers,
    servers: Servers,
    tmp_path: Path,
    masters: str,
) -> None:
    """Tasks are run again, and batches; neither is to be seen."""
    words = {
        "source": {
            "zookeeper": servers.zookeeper.address,
            "subscribe": "logs",
            "startingOffsets": "earliest",
        },
        "target": {
            "zookeeper": servers.zookeeper.address,
            "topic": "copy",
            "delivery": "exactly-once",
        },
        "checkpoint": str(tmp_path / "checkpoint"),
    }
    master, deaths = MASTERS[masters]
    for step, victim in killing.some_of(deaths, 1):
        servers.publish()
        servers.note(killing.directory)
        killing.order(step, victim, skip_max=int(step == "branch committed"))
        try:
            answer = ask_mending(drivers.get(master), "spread", words, servers.mend)
        except DriverDied:
            assert victim == DRIVER
            answer = {"error": "it died"}
        killing.assert_done(answer)
        servers.mend()
        servers.check(is_whole="done" in answer)
        for _ in range(TRIES):
            if "done" in answer:
                break
            print(f"again: {answer['error'][:300]}")
            answer = ask_mending(drivers.get(master), "spread", words, servers.mend)
        assert "done" in answer
        servers.check(is_whole=True)
