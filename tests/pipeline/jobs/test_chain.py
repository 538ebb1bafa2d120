"""Two million messages through the commands: archive, audit, replay, audit.

METAQ_WHOLE=1 runs it. What is replayed is read by the client, and compared in order.
"""

import random
import resource
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from metaq.client import Client, OutgoingMessage
from metaq.pipeline.jobs.audit import AuditFindingKind
from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from tests.pipeline.jobs.test_commands import facts, pipeline
from tests.sampling import IS_WHOLE, SEED
from tests.spark.brokers import TOPIC

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not IS_WHOLE, reason="takes minutes: METAQ_WHOLE=1"),
]

COUNT = 2_000_000
VALUE_BYTES = 200
PIECE = 20_000
SETTINGS = ("--conf", "spark.driver.memory=3g")
RIGHT = {
    "source": COUNT,
    "target": COUNT,
    **{kind.value: 0 for kind in AuditFindingKind},
}
"""An audit that finds nothing."""
Sums = dict[str, tuple[int, int]]
"""Partition → messages, and a checksum of all of them in their order."""


def processor_s() -> float:
    """Return the processor time of commands that have ended, and of their Java."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    with embedded_broker(topics={TOPIC: 4, "copy": 4}) as found:
        yield found


def publish_many(broker: EmbeddedBroker) -> Sums:
    """Put all messages into the partitions by turns."""
    rng = random.Random(SEED)
    sums: Sums = {f"0-{number}": (0, 0) for number in range(4)}
    with Client(brokers=[broker.address]) as client, client.producer() as producer:
        for turn in range(COUNT // PIECE):
            name = f"0-{turn % len(sums)}"
            values = [rng.randbytes(VALUE_BYTES) for _ in range(PIECE)]
            producer.send_many(
                TOPIC, [OutgoingMessage(v, partition=name) for v in values]
            )
            count, checksum = sums[name]
            for value in values:
                checksum = zlib.crc32(value, checksum)
            sums[name] = (count + PIECE, checksum)
    return sums


def sums_of(broker: EmbeddedBroker, topic: str) -> Sums:
    found: Sums = {}
    with Client(brokers=[broker.address]) as client:
        for message in client.browse(topic):
            name = message.partition.name
            count, checksum = found.get(name, (0, 0))
            found[name] = (count + 1, zlib.crc32(message.data, checksum))
    return found


def test_two_million_messages_are_archived_and_replayed(
    broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """Each audit finds nothing, and each message is in its place at the end."""
    sums = publish_many(broker)
    path = str(tmp_path / "archive")

    def run(*words: str) -> dict[str, int]:
        address = ("--broker", broker.address)
        before = time.monotonic(), processor_s()
        done = pipeline(*words, *address, master="local[2]", settings=SETTINGS)
        took_s, used_s = time.monotonic() - before[0], processor_s() - before[1]
        print(f"{words[0]}: {took_s:.1f} s, {used_s:.1f} s of processor")
        return facts(done)

    archived = run("archive", TOPIC, "--to", path)
    assert archived["messages"] == archived["archive messages"] == COUNT
    assert run("audit", TOPIC, "--archive", path) == RIGHT
    replayed = run("replay", path, "--topic", "copy", "--keep-partitions")
    assert replayed == {"messages": COUNT, "bytes": COUNT * VALUE_BYTES}
    assert run("audit", TOPIC, "--copy", "copy") == RIGHT
    assert sums_of(broker, "copy") == sums
