"""One data directory, written by MetaQ's own broker and by ours in turn."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from metaq.client import Client, SendResult
from metaq.errors import MetaqError
from metaq.model import TopicPartition
from tests.java.server import JavaBroker, metaq
from tests.rigs.process import BrokerProcess
from tests.rigs.waiting import wait_until

pytestmark = pytest.mark.crash

SEGMENT_BYTES = 4000
SIZES = (0, 1, 100, 900)
PUT_COUNT = 80
Stored = dict[tuple[TopicPartition, int], tuple[int, bytes]]
"""Place and offset of a message → its id and data."""


@pytest.fixture
def java(
    server_jars: list[Path], new_root: Callable[[], str], tmp_path: Path
) -> JavaBroker:
    """Return a broker that has not been started.

    Its journal is elsewhere: it overlooks partitions when anything but one of them is
    what the file system lists last.
    """
    system = {
        "maxSegmentSize": SEGMENT_BYTES,
        "unflushInterval": 100,
        "dataLogPath": tmp_path / "journal",
    }
    (tmp_path / "journal").mkdir()
    topics = {"grouped": {"numPartitions": 2}, "lazy": {"unflushThreshold": 10}}
    return JavaBroker(server_jars, tmp_path / "java", new_root(), topics, system)


@contextlib.contextmanager
def ours_on(java: JavaBroker) -> Iterator[str]:
    """Run our broker on the same directory; hand it over at the end."""
    metaq("hand-over", str(java.data), "--back")
    with BrokerProcess(
        java.data,
        topic="grouped",
        partition_count=2,
        segment_bytes=SEGMENT_BYTES,
        arguments=[
            "--set=brokerId=0",
            f"--set=dataLogPath={java.data.parents[1] / 'journal'}",
            "--set=lazy:unflushThreshold=10",
            "--set=unflushInterval=100",
        ],
    ) as broker:
        yield f"127.0.0.1:{broker.port}"
    metaq("hand-over", str(java.data), "--yes")


def put_some(address: str, name: str) -> Stored:
    """Put messages to every partition, some at once, others one by one."""
    acknowledged: Stored = {}
    with Client(brokers=[address]) as client, client.producer() as producer:
        for topic, place in (("grouped", "0-0"), ("grouped", "0-1"), ("lazy", "0-0")):
            data = [
                f"{name} {number} ".encode() + b"x" * SIZES[number % len(SIZES)]
                for number in range(PUT_COUNT)
            ]
            alone, together = data[::2], data[1::2]
            results = [producer.send(topic, one, partition=place) for one in alone]
            futures = [
                producer.send_nowait(topic, one, partition=place) for one in together
            ]
            results += [future.result() for future in futures]
            data = alone + together
            acknowledged |= as_stored(results, data)
    return acknowledged


def as_stored(results: list[SendResult], data: list[bytes]) -> Stored:
    return {
        (result.partition, result.offset): (result.message_id, one)
        for result, one in zip(results, data, strict=True)
    }


def all_of(address: str) -> Stored:
    """Return every message that a broker has."""
    found: Stored = {}
    with Client(brokers=[address]) as client:
        for topic in ("grouped", "lazy"):
            for one in client.browse(topic):
                found[one.partition, one.offset] = (one.id, one.data)
    return found


def verify(data: Path) -> None:
    assert ": 0 problems" in metaq("verify", str(data))


def test_a_directory_goes_there_and_back(java: JavaBroker) -> None:
    """Each reads all that both wrote, ids and offsets too, and goes on behind it."""
    with java:
        stored = put_some(java.address, "java")
        wait_until(lambda: all_of(java.address) == stored)
    verify(java.data)
    with ours_on(java) as address:
        assert all_of(address) == stored
        stored |= put_some(address, "ours")
        wait_until(lambda: all_of(address) == stored)
    verify(java.data)
    with java:
        assert all_of(java.address) == stored
        stored |= put_some(java.address, "java again")
        wait_until(lambda: all_of(java.address) == stored)
    verify(java.data)
    # Each of the three has rolled: a commit of a group may be larger than a segment.
    assert len(list((java.data / "grouped-0").glob("*.meta"))) > 3


def test_what_a_killed_java_broker_acknowledged_is_there(java: JavaBroker) -> None:
    """Killed while four clients put: we take the directory over, and lose nothing."""
    acknowledged: Stored = {}

    def put_until_it_dies(name: str) -> None:
        with Client(brokers=[java.address]) as client:
            producer = client.producer(timeout_s=5.0)
            with contextlib.suppress(MetaqError), producer:
                for number in range(1_000_000):
                    data = f"{name} {number} ".encode() + b"x" * SIZES[number % 4]
                    topic = ("grouped", "lazy")[number % 2]
                    acknowledged.update(as_stored([producer.send(topic, data)], [data]))

    java.start()
    threads = [
        threading.Thread(target=put_until_it_dies, args=(f"thread {number}",))
        for number in range(4)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(acknowledged) > 500)
    java.kill()
    for thread in threads:
        thread.join()
    verify(java.data)
    with ours_on(java) as address:
        found = all_of(address)
        assert acknowledged.items() <= found.items()
        # One more for each who waited for an answer, at most.
        assert len(found) <= len(acknowledged) + len(threads)
        after = put_some(address, "ours")
        wait_until(lambda: all_of(address) == found | after)
