"""Links that are cut, in one direction or both: nothing acknowledged is lost.

A proxy is on the way from each replica to each other one, from each to ZooKeeper, and
from clients to each. METAQ_CLUSTER_S says for how long links are cut by chance.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from metaq.errors import MetaqError
from metaq.testing.proxy import Direction, Proxy
from tests.cluster.ledger import SEND_S, Ledger, load
from tests.cluster.rig import CALM_MS, SESSION_S, SETTLE_S, TOPIC, Cluster
from tests.cluster.test_failover import CHAOS_S, wait_acked
from tests.rigs.waiting import wait_until
from tests.sampling import SEED

pytestmark = [
    pytest.mark.crash,
    pytest.mark.slow,
    pytest.mark.zookeeper,
    pytest.mark.timeout(int(CHAOS_S) + 900),
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "cluster", has_links=True) as one:
        yield one


@pytest.fixture
def calm(tmp_path: Path) -> Iterator[Cluster]:
    """Have a set in which no session ends."""
    with Cluster(tmp_path / "cluster", has_links=True, session_ms=CALM_MS) as one:
        yield one


def between(cluster: Cluster, one: int, other: int) -> list[Proxy]:
    """Return the ways from one replica to another, and back."""
    return [cluster.links[one, other], cluster.links[other, one]]


def part(cluster: Cluster, ledger: Ledger, one: int, *others: int) -> None:
    """Let no byte pass between a replica and others; nobody is told so."""
    ledger.note(f"no byte between {one} and {others}")
    for other in others:
        for link in between(cluster, one, other):
            link.stall()


def test_a_leader_that_no_follower_reaches_hands_over(cluster: Cluster) -> None:
    """It reaches ZooKeeper: it takes silent ones out, never below the minimum."""
    with load(cluster) as ledger:
        leader = cluster.leader()
        part(cluster, ledger, leader, *cluster.followers())
        wait_until(lambda: cluster.leader() != leader, SETTLE_S, cluster.describe)
        wait_acked(ledger)
        assert len(cluster.record.in_sync) >= 2


def test_a_follower_that_is_cut_off_from_its_leader_leaves_the_set(
    calm: Cluster,
) -> None:
    """Nobody else leads, no put fails, and it is in sync when it is back."""
    with load(calm) as ledger:
        leader, follower = calm.leader(), calm.followers()[0]
        part(calm, ledger, leader, follower)
        wait_until(lambda: follower not in calm.record.in_sync, SETTLE_S)
        wait_acked(ledger)
        assert calm.leader() == leader
        calm.mend()
        assert ledger.failed == []


def test_a_link_that_passes_bytes_one_way_only_is_no_link(calm: Cluster) -> None:
    """Data without acknowledgements, then acknowledgements without data."""
    with load(calm) as ledger:
        leader, follower = calm.leader(), calm.followers()[0]
        for way in (Direction.TO_SERVER, Direction.TO_CLIENT):
            ledger.note(f"nothing {way} of {follower} and its leader {leader}")
            calm.links[follower, leader].stall(way)
            wait_until(lambda: follower not in calm.record.in_sync, SETTLE_S)
            wait_acked(ledger)
            assert calm.leader() == leader
            calm.mend()
        assert ledger.failed == []


def test_clients_that_are_cut_off_from_their_leader_go_on_when_they_are_back(
    calm: Cluster,
) -> None:
    """It leads on; a send with a short deadline ends there, and says what is known."""
    with load(calm) as ledger, calm.client() as client:
        leader = calm.leader()
        front = calm.replicas[leader].front
        assert front is not None
        with client.producer(timeout_s=2.0) as producer:
            ledger.ack(b"short:1", producer.send(TOPIC, b"short:1", timeout=SEND_S))
            ledger.note(f"no byte between clients and {leader}")
            front.stall()
            with pytest.raises(MetaqError) as failure:
                producer.send(TOPIC, b"short:2")
            ledger.note(f"the send ended: {failure.value!r}")
            time.sleep(SESSION_S)
            assert calm.leader() == leader
            ledger.note("reset all connections of clients, refuse them, take them")
            front.cut()
            front.refuse()
            front.pass_all()
            time.sleep(SESSION_S)
            front.accept()
            wait_acked(ledger)
            assert calm.leader() == leader
        calm.mend()
        assert ledger.failed == []


def test_a_leader_that_all_links_are_cut_of_is_replaced(cluster: Cluster) -> None:
    """Also that to ZooKeeper; its clients find the next one."""
    with load(cluster) as ledger:
        leader = cluster.leader()
        part(cluster, ledger, leader, *cluster.followers())
        front = cluster.replicas[leader].front
        assert front is not None
        for proxy in (cluster.replicas[leader].link, front):
            proxy.stall()
        wait_until(
            lambda: cluster.record.leader not in {0, leader}, SETTLE_S, cluster.describe
        )
        wait_acked(ledger)
        cluster.mend()
        assert ledger.failed == []


def test_links_are_cut_by_chance(cluster: Cluster) -> None:
    """Stalled one way or both, reset, or closed, for a moment or longer."""
    random = Random(SEED)
    print(f"METAQ_SEED={SEED}")
    names = {id(link): f"link {pair}" for pair, link in cluster.links.items()}
    for number, replica in cluster.replicas.items():
        names[id(replica.link)] = f"link of {number} to ZooKeeper"
        names[id(replica.front)] = f"link of clients to {number}"
    with load(cluster) as ledger:
        end_s = time.monotonic() + CHAOS_S
        while time.monotonic() < end_s:
            proxy = random.choice(cluster.proxies())
            act = random.choice(["to server", "to client", "both", "cut", "refuse"])
            ledger.note(f"{names[id(proxy)]}: {act}")
            match act:
                case "cut":
                    proxy.cut()
                case "refuse":
                    proxy.refuse()
                    proxy.cut()
                case way:
                    proxy.stall(Direction["_".join(way.upper().split())])
            time.sleep(random.choice([0.05, 0.3, SESSION_S * 1.5]))
            if random.random() < 0.5:
                ledger.note(f"{names[id(proxy)]}: passes")
                proxy.pass_all()
                proxy.accept()
            if random.random() < 0.2:
                ledger.note("mend all")
                for each in cluster.proxies():
                    each.pass_all()
                    each.accept()
                wait_acked(ledger, 10)
