"""`metaq queues redrive` in processes that are killed and interrupted in the middle.

A process that is to be ended stops itself a moment after its first batch is stored: it
would send all the others while this one is held up.
"""

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from metaq.cli.redrive import INTERRUPTED
from metaq.client import Client, OutgoingMessage
from metaq.model import BrokerId, MessageId, Offset, TopicPartition
from metaq.record.dead_letters import Origin, letter_headers
from tests.integration.registered import make_topic, registered_broker
from tests.rigs.fork_server import executable
from tests.rigs.waiting import wait_until

pytestmark = [pytest.mark.zookeeper, pytest.mark.slow, pytest.mark.timeout(900)]

LETTERS = 10_000
"""Many batches: it stops in the second one or a little later."""
MOMENT_S = 0.05
PATIENCE_S = 60.0
TRIES = 20
"""A member that was killed is one until its session ends."""

STOPS = """
import os, signal, sys
from metaq.__main__ import main
from metaq.client.produce.producer import AsyncProducer

moment_s, begin, begun = float(sys.argv.pop(1)), AsyncProducer.exactly_once, []

def stop(*_):
    os.kill(os.getpid(), signal.SIGSTOP)

def count(producer, batch):
    begun.append(batch)
    if len(begun) == 2:
        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, moment_s)
    return begin(producer, batch)

AsyncProducer.exactly_once = count
main()
"""


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


def redrive(zookeeper: str, *program: str) -> "subprocess.Popen[str]":
    words = ("queues", "redrive", "workers", "--yes", "--zookeeper", zookeeper)
    return subprocess.Popen(
        [executable(), *(program or ("-m", "metaq")), *words, "--timeout", "5"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def sent_back(client: Client) -> list[bytes]:
    return [each.data for each in client.browse("orders")]


def has_stopped(process: "subprocess.Popen[str]") -> bool:
    """Return whether it has stopped itself; after its end it has not."""
    stat = Path(f"/proc/{process.pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "T"


def begin(zookeeper: str, moment_s: float) -> "subprocess.Popen[str]":
    """Start the command, and return it when it has stopped after a part of its work."""
    for _ in range(TRIES):
        process = redrive(zookeeper, "-c", STOPS, str(moment_s))
        wait_until(
            lambda process=process: has_stopped(process) or process.poll() is not None
        )
        if process.poll() is None:
            return process
        assert not require_end(process)
    raise AssertionError(f"nothing was sent in {TRIES} tries")


def require_end(process: "subprocess.Popen[str]") -> bool:
    """Wait for the end; False: a member that was killed is still one."""
    _, text = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0 or "killed just now" in text, text
    return process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_each_letter_goes_back_once_whatever_ends_the_command(
    client: Client, zookeeper: str, number: signal.Signals, rng: Random
) -> None:
    """The next call goes on; Ctrl-C says that in one sentence."""
    data = bury(client)
    for _ in range(2):
        process = begin(zookeeper, rng.uniform(0.001, MOMENT_S))
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)
        _, text = process.communicate(timeout=PATIENCE_S)
        if number == signal.SIGINT:
            assert process.returncode == 130
            assert text == f"metaq: {INTERRUPTED}\n"
        assert 0 < len(sent_back(client)) < LETTERS
    assert any(require_end(redrive(zookeeper)) for _ in range(TRIES))
    assert sorted(sent_back(client)) == sorted(data)
