"""`metaq queues redrive` in processes that are killed and interrupted in the middle."""

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from metaq.cli.redrive import INTERRUPTED
from metaq.client import Client, OutgoingMessage
from metaq.model import BrokerId, MessageId, Offset, TopicPartition
from metaq.record.dead_letters import Origin, letter_headers
from tests.integration.registered import make_topic, registered_broker
from tests.rigs.fork_server import executable
from tests.rigs.waiting import wait_until

pytestmark = [pytest.mark.zookeeper, pytest.mark.slow, pytest.mark.timeout(300)]

LETTERS = 20_000
"""Many batches: the first is seen long before the last is sent."""
PATIENCE_S = 60.0
TRIES = 20
"""A member that was killed is one until its session ends."""


@pytest.fixture
def client(zookeeper: str, tmp_path: Path) -> Iterator[Client]:
    with registered_broker(tmp_path / "data", zookeeper), Client(zookeeper) as one:
        for topic in ("orders", "dead"):
            make_topic(one, topic)
        one.admin().create_queue_group("workers", "orders", dead_letter_topic="dead")
        yield one


def bury(client: Client) -> list[bytes]:
    """Put dead letters of the group; return their data."""
    source = TopicPartition("orders", BrokerId(7), 0)
    origin = Origin(source, Offset(0), MessageId(1), "E", "x", "workers")
    headers, data = letter_headers((), origin), [b"%d" % n for n in range(LETTERS)]
    with client.producer() as producer, producer.transaction() as tx:
        tx.send_many("dead", [OutgoingMessage(each, headers=headers) for each in data])
    return data


def redrive(zookeeper: str) -> "subprocess.Popen[str]":
    words = ("-m", "metaq", "queues", "redrive", "workers", "--yes")
    return subprocess.Popen(
        [executable(), *words, "--zookeeper", zookeeper, "--timeout", "3"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def sent_back(client: Client) -> list[bytes]:
    return [each.data for each in client.browse("orders")]


def end_of(client: Client) -> int:
    ends = [one.log_end for one in client.admin().describe_partitions(["orders"])]
    return sum(end or 0 for end in ends)


def begin(client: Client, zookeeper: str) -> "subprocess.Popen[str]":
    """Start the command, and return it when it has sent something."""
    before = end_of(client)
    for _ in range(TRIES):
        process = redrive(zookeeper)
        wait_until(
            lambda process=process: (
                end_of(client) > before or process.poll() is not None
            )
        )
        if process.poll() is None:
            return process
        require_end(process)
    raise AssertionError(f"nothing was sent in {TRIES} tries")


def require_end(process: "subprocess.Popen[str]") -> bool:
    """Wait for the end; False: a member that was killed is still one."""
    _, text = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0 or "killed just now" in text, text
    return process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_each_letter_goes_back_once_whatever_ends_the_command(
    client: Client, zookeeper: str, number: signal.Signals
) -> None:
    """The next call goes on; Ctrl-C says that in one sentence."""
    data = bury(client)
    for _ in range(2):
        process = begin(client, zookeeper)
        process.send_signal(number)
        _, text = process.communicate(timeout=PATIENCE_S)
        if number == signal.SIGINT:
            assert process.returncode == 130
            assert text == f"metaq: {INTERRUPTED}\n"
        assert 0 < len(sent_back(client)) < LETTERS
    assert any(require_end(redrive(zookeeper)) for _ in range(TRIES))
    assert sorted(sent_back(client)) == sorted(data)
