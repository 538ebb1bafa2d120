"""Faults of a group, idle or under load: no message is lost, no member stuck.

Each cell of the matrix is one fault and one kind of load. The ledger says what may
never be seen; a deadline says that all must go on. A run has some of the cells,
METAQ_WHOLE=1 all of them; METAQ_MATRIX_ROUNDS repeats the fault within each.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from metaq.model import BrokerId, TopicPartition
from metaq.testing.proxy import Proxy
from tests.client.worlds import parts_of
from tests.integration.conftest import ZooKeeperServer, expire_session
from tests.matrix.child_member import ChildMember
from tests.matrix.ledger import readers
from tests.matrix.scene import (
    SESSION_TIMEOUT_S,
    Member,
    Scene,
    broker_arguments,
)
from tests.rigs.inside import session_identity
from tests.rigs.process import BrokerProcess
from tests.rigs.waiting import wait_until

ROUNDS = int(os.environ.get("METAQ_MATRIX_ROUNDS", "1"))
PARTITION_COUNT = 3
"""On each of the brokers."""

pytestmark = [
    pytest.mark.crash,
    pytest.mark.slow,
    pytest.mark.zookeeper,
    pytest.mark.timeout(900),
]


@dataclass
class Cluster:
    """Parts shared by all cells; each has a topic and a group of its own."""

    zookeeper: ZooKeeperServer
    proxy: Proxy
    brokers: list[BrokerProcess]


def kazoo_of(member: Member) -> tuple[int, bytes]:
    """Return id and password of a member's session."""
    return session_identity(parts_of(member.client).coordinator)


# -- faults ----------------------------------------------------------------------------


def rebalance(scene: Scene, _cluster: Cluster) -> None:
    """A member joins; then another one leaves."""
    scene.join(f"late-{len(scene.ledger.events)}")
    scene.settle()
    scene.leave(min(scene.members))
    scene.settle()


def restart_broker(_scene: Scene, cluster: Cluster) -> None:
    """A broker is asked to end, and started again."""
    cluster.brokers[0].stop()
    cluster.brokers[0].start()


def kill_broker(_scene: Scene, cluster: Cluster) -> None:
    """A broker is killed, and started again."""
    cluster.brokers[1].kill()
    cluster.brokers[1].start()


def restart_zookeeper(_scene: Scene, cluster: Cluster) -> None:
    """ZooKeeper is asked to end, and started again with its data."""
    cluster.zookeeper.restart()


def expire(scene: Scene, cluster: Cluster) -> None:
    """A member's session ends, for the server and for it."""
    member = min(scene.members)
    scene.forced.add(member)
    before = len(scene.ledger.events)
    expire_session(cluster.zookeeper.address, *kazoo_of(scene.members[member]))

    def was_fenced() -> bool:
        news = scene.ledger.events[before:]
        return any(e.kind == "fence" and e.member == member for e in news)

    wait_until(was_fenced, show=scene.describe)


def part(scene: Scene, cluster: Cluster) -> None:
    """The network between one member and ZooKeeper goes silent, and comes back."""
    lonely = "far"
    cluster.proxy.stall()

    def is_taken_over() -> bool:
        reading = readers(scene.ledger.events)
        return reading.keys() == scene.partitions and lonely not in reading.values()

    wait_until(is_taken_over, show=scene.describe)
    cluster.proxy.pass_all()


def join_child(scene: Scene, name: str) -> ChildMember:
    """Let a process join that may be killed and stopped, and wait for it."""
    child = ChildMember(
        name,
        scene.zookeeper,
        scene.group,
        scene.topic,
        scene.ledger,
        session_timeout_s=SESSION_TIMEOUT_S,
    )
    scene.members[name] = child  # type: ignore[assignment]
    child.start()
    scene.settle()
    return child


def kill_member(scene: Scene, _cluster: Cluster) -> None:
    """A member is killed; its partitions go on when its session has ended."""
    child = join_child(scene, f"child-{len(scene.ledger.events)}")
    scene.drain()
    child.kill()
    del scene.members[child.name]


def stop_member(scene: Scene, _cluster: Cluster) -> None:
    """A member stands still for longer than its session lives, and goes on then."""
    child = join_child(scene, f"child-{len(scene.ledger.events)}")
    # It cannot know before it goes on.
    scene.forced.add(child.name)
    child.stop()

    def is_taken_over() -> bool:
        return child.name not in readers(scene.ledger.events).values()

    wait_until(is_taken_over, show=scene.describe)
    child.go_on()


FAULTS: dict[str, Callable[[Scene, Cluster], None]] = {
    "rebalance": rebalance,
    "broker-restart": restart_broker,
    "broker-kill": kill_broker,
    "zookeeper-restart": restart_zookeeper,
    "expiry": expire,
    "partition": part,
    "member-kill": kill_member,
    "member-stop": stop_member,
}
LOADS = ("idle", "loaded")


# -- the matrix ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(
    zookeeper_alone: ZooKeeperServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """One ZooKeeper, two brokers, and a way to ZooKeeper that can be blocked."""
    directory = tmp_path_factory.mktemp("matrix")
    host, _, port = zookeeper_alone.address.rpartition(":")
    topics = {f"{fault}-{load}": PARTITION_COUNT for fault in FAULTS for load in LOADS}
    with ExitStack() as stack:
        brokers = [
            stack.enter_context(
                BrokerProcess(
                    directory / f"broker-{number}",
                    topic="unused",
                    arguments=broker_arguments(zookeeper_alone.address, number, topics),
                )
            )
            for number in range(2)
        ]
        proxy = stack.enter_context(Proxy(host, int(port)))
        yield Cluster(zookeeper_alone, proxy, brokers)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_is_lost_and_nobody_is_stuck(
    fault: str, load: str, cluster: Cluster
) -> None:
    """One cell: settle, load, the fault, progress again, accounts."""
    topic = f"{fault}-{load}"
    partitions = [
        TopicPartition(topic, BrokerId(broker), number)
        for broker in range(len(cluster.brokers))
        for number in range(PARTITION_COUNT)
    ]
    proxy = f"{cluster.proxy.address.host}:{cluster.proxy.address.port}"
    with Scene(cluster.zookeeper.address, topic, partitions, cluster.brokers) as scene:
        scene.join("near-1")
        scene.join("near-2")
        scene.join("far", proxy)
        scene.settle()
        scene.sender.send(len(partitions))
        if load == "loaded":
            scene.sender.is_loaded.set()
        for _ in range(ROUNDS):
            began_s = time.monotonic()
            FAULTS[fault](scene, cluster)
            scene.settle()
            print(f"{topic}: settled {time.monotonic() - began_s:.1f} s after")
        scene.finish()
        print(f"{scene.ledger.delivered_count} delivered,", end=" ")
        print(f"{scene.ledger.repeat_count} of them again")
