"""Acts of an operator on a set of processes, under load."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from metaq.cli import replicas
from metaq.replication.election import PresenceState
from tests.cluster.ledger import load
from tests.cluster.rig import BROKER_ID, SETTLE_S, Cluster
from tests.cluster.test_failover import wait_acked
from tests.rigs.waiting import wait_until

pytestmark = [
    pytest.mark.crash,
    pytest.mark.slow,
    pytest.mark.zookeeper,
    pytest.mark.timeout(300),
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "cluster") as one:
        yield one


def test_a_set_that_zookeeper_lost_is_restored(cluster: Cluster) -> None:
    """The replicas freeze, and nothing is lost when they go on."""
    with load(cluster) as ledger:
        ledger.note("empty ZooKeeper")
        cluster.zookeeper.stop()
        cluster.zookeeper.wipe()
        cluster.zookeeper.start()

        def are_frozen() -> bool:
            shown = cluster.view().shown.values()
            frozen = [s.presence.state is PresenceState.FROZEN for s in shown]
            return frozen == [True] * 3

        wait_until(are_frozen, SETTLE_S, cluster.describe)
        ledger.note("restore")
        replicas.restore(cluster.target, BROKER_ID, (), is_dry=False, is_sure=True)
        cluster.wait_whole()
        wait_acked(ledger)


def test_a_replica_is_forced_to_lead_when_the_others_are_gone(
    cluster: Cluster,
) -> None:
    """Those that come back follow it, also one that led before."""
    with load(cluster) as ledger:
        leader = cluster.leader()
        last, other = cluster.followers()
        ledger.note(f"kill {leader} and {other}, force {last}")
        for number in (leader, other):
            cluster.replicas[number].kill()
        assert replicas.elect(cluster.target, last, BROKER_ID, is_sure=True)
        assert cluster.record.in_sync == {last}
        before = len(ledger.acked)
        cluster.replicas[leader].start()
        wait_until(lambda: len(ledger.acked) > before + 50, SETTLE_S, cluster.describe)
        assert cluster.leader() == last
        cluster.mend()


def test_a_replica_is_taken_out_and_another_disk_put_in(cluster: Cluster) -> None:
    """With the machine away; the new one copies all, and nothing fails."""
    with load(cluster) as ledger:
        gone = cluster.followers()[0]
        ledger.note(f"kill, remove, wipe and add {gone}")
        cluster.replicas[gone].kill()
        replicas.remove(cluster.target, gone, BROKER_ID, None)
        assert gone not in cluster.record.replicas
        wait_acked(ledger)
        cluster.replicas[gone].wipe()
        replicas.add(cluster.target, gone, BROKER_ID, None)
        cluster.mend()
        assert ledger.failed == []


def test_a_replica_with_data_of_its_own_joins_when_that_is_discarded(
    cluster: Cluster,
) -> None:
    """It does not start on it, and says what to do."""
    with load(cluster) as ledger:
        number = cluster.followers()[0]
        replica = cluster.replicas[number]
        ledger.note(f"take the set file from {number}")
        replica.ask_to_end()
        replica.wait()
        (replica.data / "set").unlink()
        replica.start()
        assert replica.wait() != 0
        assert "metaq replicas join --discard" in replica.log.read_text()
        assert replicas.join(replica.ini, {}, is_discarding=True, is_sure=True)
        cluster.mend()
        assert ledger.failed == []
