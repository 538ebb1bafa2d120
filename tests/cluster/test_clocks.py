"""Wall clocks that jump, on one replica or on all: order and ids do not depend on them.

The clock that jumps is the one of the product (`tests.cluster.handled`), not that of
the machine: deadlines and leases are of clocks that cannot be set.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from metaq.record.layout import HEADER, HEADER_BYTES
from tests.cluster.handled import Orders
from tests.cluster.ledger import load
from tests.cluster.rig import CALM_MS, PARTITIONS, TOPIC, Cluster, ReplicaProcess
from tests.cluster.test_failover import wait_acked
from tests.sampling import IS_WHOLE

pytestmark = [
    pytest.mark.skipif(not IS_WHOLE, reason="minutes: with METAQ_WHOLE"),
    pytest.mark.crash,
    pytest.mark.slow,
    pytest.mark.zookeeper,
    pytest.mark.timeout(900),
]

HOUR_MS = 3_600_000


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "cluster", orders=Orders()) as one:
        yield one


@pytest.fixture
def calm(tmp_path: Path) -> Iterator[Cluster]:
    """Have a set in which no session ends."""
    with Cluster(tmp_path / "cluster", orders=Orders(), session_ms=CALM_MS) as one:
        yield one


def ids_of(replica: ReplicaProcess, partition: int) -> list[int]:
    """Return the ids of the messages of a log, in their order."""
    found = []
    directory = replica.data / f"{TOPIC}-{partition}"
    for path in sorted(directory.glob("*.meta")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            length, _crc, message_id, _flag = HEADER.unpack_from(data, at)
            found.append(message_id)
            at += HEADER_BYTES + length
    return found


def check_ids(cluster: Cluster) -> None:
    """Ids grow in each log, and no two messages have the same."""
    logs = [ids_of(cluster.replicas[1], number) for number in range(PARTITIONS)]
    for number, log in enumerate(logs):
        assert all(a < b for a, b in pairwise(log)), f"partition {number}"
    everything = [each for log in logs for each in log]
    assert len({*everything}) == len(everything) > 100


def test_a_clock_that_jumps_on_one_replica_changes_nothing(calm: Cluster) -> None:
    """An hour ahead, then one back; then one with the right time leads."""
    with load(calm) as ledger:
        leader = calm.leader()
        for hours in (1, -1):
            ledger.note(f"the clock of leader {leader}: {hours} h")
            calm.replicas[leader].order(clock_ms=hours * HOUR_MS)
            wait_acked(ledger)
            assert calm.leader() == leader
        ledger.note(f"the clock of leader {leader}: 1 h; restart it")
        calm.replicas[leader].order(clock_ms=HOUR_MS)
        wait_acked(ledger)
        calm.replicas[leader].ask_to_end()
        assert calm.replicas[leader].wait() == 0
        wait_acked(ledger)
        assert calm.leader() != leader
        calm.mend()
        assert ledger.failed == []
    check_ids(calm)


def test_clocks_that_jump_on_all_replicas_change_nothing(cluster: Cluster) -> None:
    """An hour ahead, then one back, with another leader in between."""
    with load(cluster) as ledger:
        for hours in (1, -1):
            ledger.note(f"all clocks: {hours} h")
            for replica in cluster.replicas.values():
                replica.order(clock_ms=hours * HOUR_MS)
            wait_acked(ledger)
            leader = cluster.leader()
            ledger.note(f"kill leader {leader}")
            cluster.replicas[leader].kill()
            wait_acked(ledger)
            cluster.mend()
        assert ledger.failed == []
    check_ids(cluster)
