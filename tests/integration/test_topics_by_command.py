"""Topics by command on a real ZooKeeper: the commands, and a broker that is killed."""

import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from metaq.client import Client, RequestTimeoutError
from metaq.zk.definitions import TopicState, decode_copy, decode_definition
from tests.integration.registered import registered_broker, wait_registered
from tests.rigs.fork_server import executable
from tests.rigs.process import BrokerProcess
from tests.rigs.waiting import wait_until
from tests.sampling import IS_WHOLE

pytestmark = [pytest.mark.zookeeper, pytest.mark.slow, pytest.mark.timeout(900)]

ROUNDS = int(os.environ.get("METAQ_CRASH_ROUNDS") or (5 if IS_WHOLE else 2))
COUNT = 24
"""Partitions of the topic that is deleted: enough to be killed in the middle."""


@pytest.fixture
def broker(zookeeper: str, tmp_path: Path) -> Iterator[BrokerProcess]:
    with registered_broker(tmp_path / "data", zookeeper) as process:
        wait_registered(zookeeper)
        yield process


def start(broker: BrokerProcess, zookeeper: str) -> None:
    """Start it again, and wait until it is registered."""
    broker.start()
    wait_registered(zookeeper)


def metaq(
    zookeeper: str, *words: str, code: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run a command as a user does."""
    command = [executable(), "-m", "metaq", *words, "--zookeeper", zookeeper]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done


def test_a_topic_is_made_and_deleted_by_commands(
    broker: BrokerProcess, zookeeper: str
) -> None:
    """The first page: make a topic, send, read, delete; no file is edited."""
    made = metaq(zookeeper, "topics", "create", "orders", "--partitions", "2", "--json")
    assert json.loads(made.stdout)["brokers"] == [
        {
            "broker": 7,
            "is_there": True,
            "partitions": 2,
            "effect": "in effect",
            "text": None,
        }
    ]
    with Client(zookeeper) as client, client.producer() as producer:
        assert producer.send("orders", b"hello", partition="7-1").offset == 0
    assert metaq(zookeeper, "cat", "orders").stdout == "hello\n"
    rows = metaq(zookeeper, "topics", "orders", "--json").stdout.splitlines()
    assert [json.loads(row)["partition"] for row in rows] == ["7-0", "7-1"]
    metaq(zookeeper, "topics", "alter", "orders", "--partitions", "3")
    again = metaq(zookeeper, "topics", "create", "orders", "--partitions", "1", code=1)
    assert "topic 'orders' exists: it is defined with 3 partitions" in again.stderr
    wrong = metaq(zookeeper, "topics", "delete", "orders", "--confirm", "oders", code=2)
    assert "all its messages are deleted, got 'oders'" in wrong.stderr
    broker.kill()
    start(broker, zookeeper)
    metaq(zookeeper, "topics", "delete", "orders", "--confirm", "orders")
    missing = metaq(zookeeper, "topics", "describe", "oders", code=1)
    assert "there is no topic 'oders'" in missing.stderr
    mine = metaq(zookeeper, "topics", "delete", "mine", "--confirm", "mine", code=1)
    assert "server.ini of broker 7 defines it" in mine.stderr
    assert not list(broker.data.glob("orders-*"))


def test_what_transactions_put_to_a_deleted_topic_does_not_come_back(
    broker: BrokerProcess, zookeeper: str
) -> None:
    """Behind a kill the topic of that name has what was put to it since."""
    with Client(zookeeper, request_timeout_s=60.0) as client:
        admin = client.admin()
        admin.create_topic("orders", partitions=1)
        with client.producer() as producer, producer.transaction() as tx:
            tx.send("orders", b"old")
        admin.delete_topic("orders")
        admin.create_topic("orders", partitions=1)
        with client.producer() as producer:
            assert producer.send("orders", b"new", partition="7-0").offset == 0
    broker.kill()
    start(broker, zookeeper)
    with Client(zookeeper, request_timeout_s=60.0) as client:
        assert [message.data for message in client.browse("orders")] == [b"new"]


def is_deleting(broker: BrokerProcess) -> bool:
    copy = decode_copy((broker.data / "topics.json").read_bytes(), decode_definition)
    # A deletion that is over has left the copy, before the kill came.
    return "orders" not in copy or copy["orders"].state is TopicState.DELETING


def old_partitions(client: Client) -> set[str]:
    """Return the partitions that give an old message now."""
    found = set()
    for number in range(COUNT):
        with contextlib.suppress(Exception):
            result = client.get("orders", f"7-{number}", 0, timeout=5)  # type: ignore[arg-type]  # an offset
            if any(message.data == b"old" for message in result.messages):
                found.add(f"7-{number}")
    return found


@pytest.mark.crash
def test_a_broker_that_is_killed_while_it_deletes_serves_nothing_half(
    broker: BrokerProcess, zookeeper: str
) -> None:
    """After the next start the rest goes, and the name begins at offset 0."""
    seed = int(os.environ.get("METAQ_SEED", time.time_ns() % 10**9))
    print(f"METAQ_SEED={seed}")
    random = Random(seed)
    half_way = 0
    for _ in range(ROUNDS):
        with Client(zookeeper, request_timeout_s=60.0) as client:
            client.admin().create_topic("orders", partitions=COUNT)
            with client.producer() as producer:
                for number in range(COUNT):
                    sent = producer.send("orders", b"old", partition=f"7-{number}")
                    assert sent.offset == 0
            begun = threading.Event()
            killer = threading.Thread(target=kill_soon, args=(broker, begun, random))
            killer.start()
            begun.set()
            with contextlib.suppress(RequestTimeoutError):
                client.admin().delete_topic("orders", timeout=6)
            killer.join()
        is_begun = is_deleting(broker)
        left = len(list(broker.data.glob("orders-*")))
        half_way += 0 < left < COUNT
        broker.start()
        if is_begun:
            with Client(brokers=[f"127.0.0.1:{broker.port}"]) as direct:
                assert old_partitions(direct) == set()
        wait_registered(zookeeper)
        with Client(zookeeper, request_timeout_s=60.0) as client:
            admin = client.admin()
            wait_until(lambda admin=admin: not is_known(admin))  # type: ignore[misc]  # a loop
            assert not list(broker.data.glob("orders-*"))
            admin.create_topic("orders", partitions=1)
            with client.producer() as producer:
                assert producer.send("orders", b"new", partition="7-0").offset == 0
            assert [m.data for m in client.browse("orders")] == [b"new"]
            admin.delete_topic("orders")
    print(f"killed half way {half_way} times of {ROUNDS}")


def kill_soon(broker: BrokerProcess, begun: threading.Event, random: Random) -> None:
    """Kill the broker while directories move, or a moment before or after."""
    begun.wait()
    wanted = random.randrange(COUNT + 1)
    wait_until(
        lambda: (
            len(list(broker.data.glob("orders-*"))) <= wanted
            or not broker.data.exists()
        )
    )
    broker.kill()


def is_known(admin: object) -> bool:
    try:
        admin.describe_topic("orders")  # type: ignore[attr-defined]  # any admin
    except Exception as error:
        return "there is no topic" not in str(error)
    return True
