"""Disks of replicas that lose something, under load: the others have it."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from metaq.fs.group_thread import SET_SILENCE_S_MAX
from tests.cluster.handled import Orders
from tests.cluster.ledger import load
from tests.cluster.rig import SETTLE_S, TOPIC, Cluster, ReplicaProcess
from tests.cluster.test_failover import wait_acked
from tests.rigs.waiting import wait_until

pytestmark = [
    pytest.mark.crash,
    pytest.mark.slow,
    pytest.mark.zookeeper,
    pytest.mark.timeout(900),
]


SOCKETS = shutil.ignore_patterns("*.sock")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "cluster") as one:
        yield one


@pytest.fixture
def handled(tmp_path: Path) -> Iterator[Cluster]:
    """Have a set whose disks fill up and hang by order."""
    with Cluster(tmp_path / "cluster", orders=Orders(disk="works")) as one:
        yield one


def tear(replica: ReplicaProcess, size_bytes: int) -> None:
    """Take the last bytes of each log, as a disk does that lied about its syncs."""
    for directory in replica.data.glob(f"{TOPIC}-*"):
        last = max(directory.glob("*.meta"))
        with last.open("r+b") as file:
            file.truncate(max(0, last.stat().st_size - size_bytes))


def version_of(cluster: Cluster, number: int) -> int:
    """Return what is registered of the data of a replica."""
    return cluster.view().members[number].version


@pytest.mark.parametrize("is_leader", [True, False], ids=["leader", "follower"])
@pytest.mark.parametrize("size_bytes", [7, 5_000])
def test_a_replica_with_a_torn_tail_gets_it_from_the_others(
    cluster: Cluster, is_leader: bool, size_bytes: int
) -> None:
    """It may not lead before, and cuts nothing of theirs."""
    with load(cluster) as ledger:
        number = cluster.leader() if is_leader else cluster.followers()[0]
        ledger.note(f"kill {number}, and tear {size_bytes} bytes of its logs")
        cluster.replicas[number].kill()
        tear(cluster.replicas[number], size_bytes)
        cluster.replicas[number].start()
        wait_acked(ledger)
        cluster.mend()
        assert ledger.failed == []


def test_a_torn_tail_is_no_loss_when_all_were_killed(cluster: Cluster) -> None:
    """The one that lacks bytes waits for another that has them."""
    with load(cluster) as ledger:
        leader = cluster.leader()
        ledger.note(f"kill all, and tear the logs of {leader}")
        for replica in cluster.replicas.values():
            replica.kill()
        tear(cluster.replicas[leader], 5_000)
        cluster.replicas[leader].start()
        time.sleep(2.0)
        cluster.mend()
        wait_acked(ledger)


@pytest.mark.parametrize("is_leader", [True, False], ids=["leader", "follower"])
def test_a_directory_from_a_backup_is_not_believed(
    cluster: Cluster, is_leader: bool, tmp_path: Path
) -> None:
    """It looks whole, and lacks what was acknowledged since; it copies all again."""
    with load(cluster) as ledger:
        number = cluster.leader() if is_leader else cluster.followers()[0]
        replica = cluster.replicas[number]
        ledger.note(f"restart {number} with a backup taken in between")
        replica.kill()
        shutil.copytree(replica.data, tmp_path / "backup", ignore=SOCKETS)
        cluster.mend()
        wait_acked(ledger, 300)
        # The version of a directory is recorded every ten seconds.
        before = version_of(cluster, number)
        wait_until(lambda: version_of(cluster, number) > before, SETTLE_S)
        replica.kill()
        replica.wipe()
        shutil.copytree(tmp_path / "backup", replica.data)
        replica.start()
        wait_acked(ledger)
        cluster.mend()
        assert "incomplete" in replica.log.read_text()
        assert ledger.failed == []


@pytest.mark.parametrize("disk", ["full", "hangs"])
def test_a_follower_whose_disk_takes_nothing_is_waited_for_no_longer(
    handled: Cluster, disk: str
) -> None:
    """The others go on, and it is in sync when its disk works again."""
    with load(handled) as ledger:
        number = handled.followers()[0]
        ledger.note(f"the disk of follower {number}: {disk}")
        handled.replicas[number].order(disk=disk)
        wait_until(lambda: number not in handled.record.in_sync, SETTLE_S)
        wait_acked(ledger, 200)
        handled.replicas[number].order(disk="works")
        handled.mend()
        assert ledger.failed == []


def test_a_leader_whose_disk_is_full_refuses_puts_until_there_is_room(
    handled: Cluster,
) -> None:
    """No copy has what it refused, and all have what it acknowledged."""
    with load(handled) as ledger:
        number = handled.leader()
        ledger.note(f"the disk of leader {number} is full")
        handled.replicas[number].order(disk="full")
        time.sleep(3.0)
        ledger.note(f"the disk of {number} has room")
        handled.replicas[number].order(disk="works")
        wait_acked(ledger, 200)


def test_a_leader_whose_disk_hangs_is_replaced(handled: Cluster) -> None:
    """It gives up when its disk is silent, and its session lives on."""
    with load(handled) as ledger:
        number = handled.leader()
        ledger.note(f"the disk of leader {number} hangs")
        handled.replicas[number].order(disk="hangs")
        wait_until(
            lambda: handled.record.leader not in {0, number},
            SET_SILENCE_S_MAX + SETTLE_S,
            handled.describe,
        )
        wait_acked(ledger, 200)
        ledger.note(f"kill {number}: it has a disk that works")
        handled.replicas[number].kill()
        handled.replicas[number].order(disk="works")
        handled.mend()
