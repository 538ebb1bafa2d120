"""A Java member and Python members of one group hand partitions to each other."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from metaq.model import BrokerId, TopicPartition
from tests.matrix.java_member import JavaMember
from tests.matrix.scene import Scene, broker_arguments
from tests.rigs.process import BrokerProcess

TOPIC = "mixed"
PARTITION_COUNT = 6
"""On each of two brokers: from 0-0 to 1-5, sorted as text."""

pytestmark = [pytest.mark.zookeeper, pytest.mark.slow, pytest.mark.timeout(900)]


def join_java(scene: Scene, name: str) -> JavaMember:
    """Let a Java member join; does not wait."""
    member = JavaMember(
        name,
        scene.zookeeper,
        scene.group,
        sorted(scene.partitions),
        {number: broker.port for number, broker in enumerate(scene.brokers)},
        scene.ledger,
    )
    scene.members[name] = member  # type: ignore[assignment]
    member.start()
    return member


def test_partitions_go_to_and_fro_under_load(zookeeper: str, tmp_path: Path) -> None:
    """Nothing lost, nothing twice: each goes on exactly where the other committed."""
    topics = {TOPIC: PARTITION_COUNT}
    partitions = [
        TopicPartition(TOPIC, BrokerId(broker), number)
        for broker in range(2)
        for number in range(PARTITION_COUNT)
    ]
    with ExitStack() as stack:
        brokers = [
            stack.enter_context(
                BrokerProcess(
                    tmp_path / f"broker-{number}",
                    topic="unused",
                    arguments=broker_arguments(zookeeper, number, topics),
                )
            )
            for number in range(2)
        ]
        scene = stack.enter_context(Scene(zookeeper, TOPIC, partitions, brokers))
        scene.join("m-python")
        scene.settle()
        scene.sender.is_loaded.set()
        # Its name comes first, then last: other parts move.
        join_java(scene, "a-java")
        scene.settle()
        scene.join("z-python")
        scene.settle()
        scene.leave("a-java")
        scene.settle()
        join_java(scene, "zz-java")
        scene.settle()
        scene.leave("m-python")
        scene.settle()
        scene.leave("z-python")
        scene.settle()
        scene.join("m-python")
        scene.finish()
        assert scene.ledger.repeat_count == 0
