"""The exactly-once sink of Spark over MetaQ's own broker, killed on the way."""

import json
import random
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from metaq.client import Client
from tests.java.server import JavaBroker
from tests.java.test_java_brokers import is_registered
from tests.matrix.scene import broker_arguments
from tests.rigs.process import BrokerProcess
from tests.rigs.waiting import wait_until
from tests.sampling import SEED
from tests.spark.brokers import numbered
from tests.spark.kills.harness import MASTER, OWN_FORMAT, Killing, ask_mending, driver
from tests.spark.kills.steps import SERVER_PIDS

pytestmark = [pytest.mark.spark, pytest.mark.crash, OWN_FORMAT]

COUNT = 300
BROKER = "broker"


def test_rows_are_there_once_though_the_broker_dies_behind_the_decision(
    server_jars: list[Path], new_root: Callable[[], str], tmp_path: Path
) -> None:
    """It lists what it has prepared when it is back, and the batch is completed."""
    root = new_root()
    words = {
        "source": {"zookeeper": root, "subscribe": "logs"},
        "target": {"zookeeper": root, "topic": "copy", "delivery": "exactly-once"},
        "checkpoint": str(tmp_path / "checkpoint"),
    }
    words["source"]["startingOffsets"] = "earliest"
    killing = Killing(tmp_path, random.Random(SEED))
    with ExitStack() as stack:
        java = JavaBroker(server_jars, tmp_path / "java", root, {"copy": {}})
        stack.enter_context(java)
        source = BrokerProcess(
            tmp_path / "source",
            topic="unused",
            arguments=[
                *broker_arguments(root, 1, {"logs": 1}),
                "--set=hostName=127.0.0.1",
            ],
        )
        stack.enter_context(source)
        client = stack.enter_context(Client(root))
        producer = stack.enter_context(client.producer())
        alive = stack.enter_context(driver(tmp_path, MASTER))

        def mend() -> None:
            # It does not start while ZooKeeper has the node of its former life.
            if not java.is_running and not is_registered(root):
                java.start()

        for first, step in ((0, ""), (COUNT, "decided")):
            producer.send_many("logs", numbered(COUNT, first))
            if step:
                (tmp_path / SERVER_PIDS).write_text(json.dumps({BROKER: java.pid}))
                killing.order(step, BROKER)
            answer = ask_mending(alive, "spread", words, mend)
            if step:
                killing.assert_done(answer)
            if "error" in answer:
                answer = ask_mending(alive, "spread", words, mend)
            assert answer == {"done": None}
            check(client, numbered(first + COUNT))


def check(client: Client, due: list[bytes]) -> None:
    """Hold what is there against what is due; MetaQ answers before it appends."""

    def there() -> list[bytes]:
        return sorted(message.data for message in client.browse("copy"))

    wait_until(lambda: len(there()) >= len(due))
    assert there() == due
