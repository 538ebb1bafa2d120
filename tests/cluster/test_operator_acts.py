"""Acts of an operator on a set of processes, under load."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metaq.cli import replicas
from metaq.errors import MetaqError
from metaq.replication.election import PresenceState
from tests.cluster.ledger import load
from tests.cluster.rig import BROKER_ID, SETTLE_S, TOPIC, Cluster, ReplicaProcess
from tests.cluster.test_failover import wait_acked
from tests.rigs.waiting import wait_until

pytestmark = [
    pytest.mark.crash,
    pytest.mark.slow,
    pytest.mark.zookeeper,
    pytest.mark.timeout(900),
]

FROZEN = PresenceState.FROZEN


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "cluster") as one:
        yield one


def wait_frozen(cluster: Cluster, *numbers: int) -> None:
    """Wait until these, and no others, show that an operator has to act."""

    def are_frozen() -> bool:
        shown = cluster.view().shown
        frozen = {k for k, s in shown.items() if s.presence.state is FROZEN}
        return frozen == {*numbers}

    wait_until(are_frozen, SETTLE_S, cluster.describe)


def test_a_set_that_zookeeper_lost_is_restored(cluster: Cluster) -> None:
    """The replicas freeze, and nothing is lost when they go on."""
    with load(cluster) as ledger:
        ledger.note("empty ZooKeeper")
        cluster.zookeeper.stop()
        cluster.zookeeper.wipe()
        cluster.zookeeper.start()

        wait_frozen(cluster, 1, 2, 3)
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


def test_a_group_that_had_read_what_is_lost_is_given_what_comes_next(
    cluster: Cluster,
) -> None:
    """It was away while an operator forced a replica to lead that lacked it."""
    leader = cluster.leader()
    last, other = cluster.followers()
    replicas_of = cluster.replicas

    def send(words: list[str]) -> None:
        with cluster.client() as client, client.producer() as producer:
            for word in words:
                producer.send(TOPIC, word.encode(), partition=f"{BROKER_ID}-0")

    def read(count: int) -> list[str]:
        given: list[str] = []
        with (
            cluster.client() as client,
            client.consumer("away", [TOPIC], start="earliest") as consumer,
        ):
            while len(given) < count and (message := consumer.receive(SETTLE_S)):
                given.append(message.data.decode())
        return given

    kept = [f"kept {n}" for n in range(5)]
    lost = [f"lost {n}" for n in range(10)]
    more = [f"more {n}" for n in range(30)]
    send(kept)
    cluster.wait_whole()
    replicas_of[last].kill()
    wait_until(lambda: last not in cluster.record.in_sync, SETTLE_S, cluster.describe)
    send(lost)
    assert read(15) == kept + lost
    for number in (leader, other):
        replicas_of[number].kill()
    replicas_of[last].start()
    # Its former life may be shown, which does not say what it has.
    wait_until(
        lambda: last in replicas.look(cluster.target, BROKER_ID)[1],
        SETTLE_S,
        cluster.describe,
    )
    assert replicas.elect(cluster.target, last, BROKER_ID, is_sure=True)
    # The one keeps what is lost aside, the other is cut to what is left.
    replicas_of[other].start()
    wait_until(lambda: other in cluster.record.in_sync, SETTLE_S, cluster.describe)
    assert replicas.join(replicas_of[leader].ini, {}, is_discarding=True, is_sure=True)
    send(more)
    cluster.mend()
    assert read(30) == more


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


def test_a_set_that_zookeeper_was_set_back_for_is_restored(
    cluster: Cluster, tmp_path: Path
) -> None:
    """To a backup from before a failover; nobody leads by what it says."""
    with load(cluster) as ledger:
        data = cluster.zookeeper.data_dir / "data"
        ledger.note("back up ZooKeeper")
        cluster.zookeeper.stop()
        shutil.copytree(data, tmp_path / "backup")
        cluster.zookeeper.start()
        cluster.mend()
        leader = cluster.leader()
        ledger.note(f"kill leader {leader}")
        cluster.replicas[leader].kill()
        wait_acked(ledger)
        cluster.mend()
        ledger.note("set ZooKeeper back")
        cluster.zookeeper.stop()
        cluster.zookeeper.wipe()
        shutil.copytree(tmp_path / "backup", data)
        cluster.zookeeper.start()
        wait_frozen(cluster, 1, 2, 3)
        ledger.note("restore")
        replicas.restore(cluster.target, BROKER_ID, (), is_dry=False, is_sure=True)
        cluster.wait_whole()
        wait_acked(ledger)


def test_a_set_is_not_made_twice(cluster: Cluster) -> None:
    """Not on an empty directory, and not on one of the set; all goes on."""
    with load(cluster) as ledger:
        number = cluster.followers()[0]
        replica = cluster.replicas[number]
        others = tuple({1, 2, 3} - {number})
        again: dict[str, Any] = {"others": others, "min_in_sync": 2, "is_sure": True}
        replica.kill()
        ledger.note(f"init on the directory of {number}")
        with pytest.raises(MetaqError, match=f"is replica {number} of set"):
            replicas.init(replica.ini, {}, **again)
        ledger.note(f"wipe {number}, and init on its empty directory")
        replica.wipe()
        with pytest.raises(MetaqError, match="to join it, start a replica"):
            replicas.init(replica.ini, {}, **again)
        wait_acked(ledger)
        cluster.mend()
        assert ledger.failed == []


def test_a_set_made_of_an_empty_directory_takes_nothing_from_the_others(
    cluster: Cluster,
) -> None:
    """ZooKeeper was lost, and `init` was run where nothing is: all freeze."""
    with load(cluster) as ledger:
        ledger.note("stop all, empty ZooKeeper and 3, init on 3, start all")
        for each in cluster.replicas.values():
            each.kill()
        cluster.zookeeper.stop()
        cluster.zookeeper.wipe()
        cluster.zookeeper.start()
        wrong = cluster.replicas[3]
        wrong.wipe()
        replicas.init(wrong.ini, {}, others=(1, 2), min_in_sync=2, is_sure=True)
        for each in cluster.replicas.values():
            each.start()
        wait_frozen(cluster, 1, 2, 3)
        ledger.note("empty 3 again, and restore the set of the others")
        wrong.kill()
        wrong.wipe()
        replicas.restore(cluster.target, BROKER_ID, (3,), is_dry=False, is_sure=True)
        cluster.mend()
        wait_acked(ledger)


def test_a_replica_number_that_is_used_twice_is_refused(cluster: Cluster) -> None:
    """Another directory and port with the number of one that runs; that one goes on."""
    with load(cluster) as ledger:
        number = cluster.followers()[0]
        port = cluster.zookeeper.port
        twin = ReplicaProcess(number, cluster.directory / "twin", port)
        try:
            ledger.note(f"start another {number}")
            twin.start()
            wait_until(
                lambda: f"replica {number} runs twice, at" in twin.log.read_text(),
                SETTLE_S,
                lambda: twin.log.read_text()[-2000:],
            )
            wait_acked(ledger)
            wait_until(lambda: number in cluster.record.in_sync, SETTLE_S)
        finally:
            twin.kill()
            twin.link.stop()
        assert ledger.failed == []


def test_a_replica_that_is_given_another_broker_id_has_no_part(
    cluster: Cluster,
) -> None:
    """Its directory is of another set; with the right id it goes on."""
    with load(cluster) as ledger:
        number = cluster.followers()[0]
        replica = cluster.replicas[number]
        ledger.note(f"start {number} as one of broker 8")
        replica.ask_to_end()
        assert replica.wait() == 0
        replica.configure(broker_id=8)
        replica.start()
        wait_until(
            lambda: not replica.is_running or "frozen" in replica.log.read_text(),
            SETTLE_S,
            cluster.describe,
        )
        wait_acked(ledger)
        replica.kill()
        replica.configure()
        cluster.mend()
        assert ledger.failed == []


def test_a_broker_that_ran_alone_becomes_a_set_under_load(tmp_path: Path) -> None:
    """With one restart: offsets are the same, and its producers go on."""
    with Cluster(tmp_path / "cluster", is_begun=False) as cluster:
        alone = cluster.replicas[1]
        alone.configure(section="")
        alone.start()
        with load(cluster) as ledger:
            wait_acked(ledger, 200)
            ledger.note("restart the broker as replica 1 of three")
            alone.ask_to_end()
            assert alone.wait() == 0
            alone.configure()
            cluster.begin()
            wait_acked(ledger, 200)
            assert ledger.failed == []
