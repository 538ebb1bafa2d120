"""Replicas that end, hang or lose their disks under load: nothing acknowledged is lost.

METAQ_CLUSTER_S says for how long faults come by chance; METAQ_SEED repeats them.
"""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from metaq.cli.replicas import transfer
from tests.cluster.ledger import Ledger, load
from tests.cluster.rig import BROKER_ID, SESSION_S, SETTLE_S, Cluster
from tests.rigs.waiting import wait_until
from tests.sampling import IS_WHOLE, SEED

CHAOS_S = float(os.environ.get("METAQ_CLUSTER_S") or (120 if IS_WHOLE else 25))

pytestmark = [
    pytest.mark.crash,
    pytest.mark.slow,
    pytest.mark.zookeeper,
    pytest.mark.timeout(int(CHAOS_S) + 900),
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "cluster") as one:
        yield one


def wait_acked(ledger: Ledger, more: int = 50) -> None:
    """Wait until puts are acknowledged again."""
    before = len(ledger.acked)
    wait_until(lambda: len(ledger.acked) >= before + more, SETTLE_S)


def test_a_leader_that_is_killed_is_replaced(cluster: Cluster) -> None:
    """Three times; no send fails, and the one that was killed comes back in sync."""
    with load(cluster) as ledger:
        for _ in range(3):
            leader = cluster.leader()
            ledger.note(f"kill leader {leader}")
            cluster.replicas[leader].kill()
            wait_acked(ledger)
            assert cluster.leader() != leader
            cluster.mend()
        assert ledger.failed == []


def test_a_follower_that_is_killed_is_waited_for_no_longer(cluster: Cluster) -> None:
    """Puts go on with the others, and it catches up when it is back."""
    with load(cluster) as ledger:
        follower = cluster.followers()[0]
        ledger.note(f"kill follower {follower}")
        cluster.replicas[follower].kill()
        wait_acked(ledger, 200)
        assert follower not in cluster.record.in_sync
        cluster.mend()
        assert ledger.failed == []


def test_a_leader_that_hangs_is_replaced_and_follows(cluster: Cluster) -> None:
    """Its beliefs have no effect when it wakes up."""
    with load(cluster) as ledger:
        leader = cluster.leader()
        ledger.note(f"freeze leader {leader}")
        cluster.replicas[leader].freeze()
        time.sleep(SESSION_S * 2)
        wait_acked(ledger)
        assert cluster.leader() != leader
        ledger.note(f"thaw {leader}")
        cluster.replicas[leader].thaw()
        wait_acked(ledger)
        cluster.mend()
        assert ledger.failed == []


def test_a_follower_that_hangs_leaves_the_set_until_it_wakes_up(
    cluster: Cluster,
) -> None:
    """Nothing waits for it after the time of a lag."""
    with load(cluster) as ledger:
        follower = cluster.followers()[0]
        ledger.note(f"freeze follower {follower}")
        cluster.replicas[follower].freeze()
        wait_acked(ledger, 200)
        wait_until(lambda: follower not in cluster.record.in_sync, SETTLE_S)
        cluster.mend()
        assert ledger.failed == []


def test_a_leader_that_zookeeper_does_not_hear_is_replaced(cluster: Cluster) -> None:
    """It hears the others still, and yields to the next epoch of one of them."""
    with load(cluster) as ledger:
        leader = cluster.leader()
        ledger.note(f"stall the link of {leader} to ZooKeeper")
        cluster.replicas[leader].link.stall()
        wait_until(lambda: cluster.record.leader not in {0, leader}, SETTLE_S)
        wait_acked(ledger)
        cluster.mend()
        assert ledger.failed == []


def test_a_follower_that_zookeeper_does_not_hear_keeps_its_place_or_comes_back(
    cluster: Cluster,
) -> None:
    """Puts go on all the time."""
    with load(cluster) as ledger:
        follower = cluster.followers()[0]
        ledger.note(f"cut the link of {follower} to ZooKeeper")
        cluster.replicas[follower].link.cut()
        cluster.replicas[follower].link.stall()
        time.sleep(SESSION_S * 2)
        wait_acked(ledger, 200)
        cluster.mend()
        assert ledger.failed == []


def test_puts_go_on_while_zookeeper_is_away(cluster: Cluster) -> None:
    """For as long as all who count go on copying; then it is there again."""
    with load(cluster) as ledger:
        ledger.note("stop ZooKeeper")
        cluster.zookeeper.stop()
        time.sleep(SESSION_S * 2)
        wait_acked(ledger, 200)
        ledger.note("start ZooKeeper")
        cluster.zookeeper.start()
        cluster.mend()
        wait_acked(ledger)
        assert ledger.failed == []


def test_below_the_minimum_nothing_is_acknowledged_until_another_is_back(
    cluster: Cluster,
) -> None:
    """The leader alone takes no puts; nothing of it is lost."""
    with load(cluster) as ledger:
        followers = cluster.followers()
        for number in followers:
            ledger.note(f"kill follower {number}")
            cluster.replicas[number].kill()
        before = len(ledger.acked)
        time.sleep(SESSION_S * 2)
        # Two send one message after the other: one of each may have been on its way.
        assert len(ledger.acked) <= before + 2
        wait_until(lambda: len(cluster.record.in_sync) == 2, SETTLE_S)
        cluster.replicas[followers[0]].start()
        wait_acked(ledger)


def test_all_three_killed_at_once_go_on_with_what_was_acknowledged(
    cluster: Cluster,
) -> None:
    """No replica is set back for having been killed."""
    with load(cluster) as ledger:
        ledger.note("kill all")
        for replica in cluster.replicas.values():
            replica.kill()
        time.sleep(0.5)
        cluster.mend()
        wait_acked(ledger)


def test_a_replica_that_lost_its_disk_copies_everything_again(
    cluster: Cluster,
) -> None:
    """A follower, then the leader of then."""
    with load(cluster) as ledger:
        for is_leader in (False, True):
            number = cluster.leader() if is_leader else cluster.followers()[0]
            ledger.note(f"kill and wipe {number}")
            cluster.replicas[number].kill()
            cluster.replicas[number].wipe()
            wait_acked(ledger)
            cluster.mend()
        assert ledger.failed == []


def test_the_last_complete_replica_leads_again_after_sigterm(cluster: Cluster) -> None:
    """One other is out of the set, one has lost its disk: neither could answer it."""
    with load(cluster) as ledger:
        leader = cluster.leader()
        out, wiped = cluster.followers()
        ledger.note(f"end {out}, wipe {wiped}, restart {leader}")
        cluster.replicas[out].ask_to_end()
        cluster.replicas[out].wait()
        wait_acked(ledger)
        cluster.replicas[wiped].kill()
        cluster.replicas[wiped].wipe()
        cluster.replicas[leader].ask_to_end()
        assert cluster.replicas[leader].wait() == 0
        assert cluster.record.in_sync == {leader, wiped}
        cluster.replicas[leader].start()
        cluster.replicas[wiped].start()
        wait_acked(ledger)
        assert cluster.leader() == leader
        cluster.mend()


def test_a_leader_hands_over_without_a_failed_send(cluster: Cluster) -> None:
    """By command, and when it is asked to end."""
    with load(cluster) as ledger:
        target = cluster.followers()[0]
        ledger.note(f"transfer to {target}")
        assert transfer(cluster.target, target, BROKER_ID)
        wait_acked(ledger)
        for number in cluster.replicas:
            ledger.note(f"restart {number}")
            cluster.replicas[number].ask_to_end()
            assert cluster.replicas[number].wait() == 0
            wait_acked(ledger)
            cluster.mend()
        assert ledger.failed == []


def test_faults_by_chance(cluster: Cluster) -> None:
    """Two kinds at a time, at any replicas, for as long as there is time."""
    random = Random(SEED)
    print(f"METAQ_SEED={SEED}")
    with load(cluster) as ledger:
        end_s = time.monotonic() + CHAOS_S
        while time.monotonic() < end_s:
            number = random.choice(list(cluster.replicas))
            replica = cluster.replicas[number]
            acts: list[Callable[[], None]] = [
                replica.kill,
                replica.freeze,
                replica.mend,
            ]
            act = random.choice(acts)
            ledger.note(f"{act.__name__} {number}")
            act()
            time.sleep(random.uniform(0.1, SESSION_S * 1.5))
            if random.random() < 0.3:
                ledger.note("mend all")
                for each in cluster.replicas.values():
                    each.mend()
                wait_acked(ledger, 10)
