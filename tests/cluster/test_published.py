"""Rows of a published report, on three replicas: what was acknowledged is not lost.

The report: Jepsen on NATS 2.12.1, December 2025. Each test names the row, prints how
many messages were acknowledged and how many of them a new client does not read, and
asserts that these are none.
"""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from metaq.cli import replicas
from metaq.record.layout import HEADER_BYTES
from tests.cluster.ledger import Ledger, finish, puts, read_all
from tests.cluster.rig import SESSION_S, SETTLE_S, TOPIC, Cluster, ReplicaProcess
from tests.cluster.test_failover import wait_acked
from tests.rigs.waiting import wait_until
from tests.sampling import IS_WHOLE, SEED

pytestmark = [
    pytest.mark.skipif(not IS_WHOLE, reason="minutes: with METAQ_WHOLE"),
    pytest.mark.crash,
    pytest.mark.slow,
    pytest.mark.zookeeper,
    pytest.mark.timeout(900),
]

SEGMENT_BYTES = 128 << 10
"""So small that there are sealed ones soon."""
HOT = 1
"""The partition that gets most."""
COLD = 2
"""A partition whose acknowledgements are entered as they come."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "cluster", segment_bytes=SEGMENT_BYTES) as one:
        yield one


@contextmanager
def row(cluster: Cluster, text: str) -> Iterator[Ledger]:
    """Put while the block runs; then count what a new client does not read."""
    with puts(cluster) as ledger:
        yield ledger
    count_lost(cluster, ledger, text)
    finish(cluster, ledger)


def count_lost(cluster: Cluster, ledger: Ledger, text: str) -> None:
    """Print and check the row."""
    lost = ledger.lost(read_all(cluster, ledger))
    print(f"{text}: {len(ledger.acked)} acknowledged, {len(lost)} lost")
    history = cluster.directory / "history.jsonl"
    assert not lost, f"{text}: {len(lost)} lost, see {history}\n{cluster.describe()}"


def chosen(cluster: Cluster, *, is_leader: bool) -> ReplicaProcess:
    """Return the leader, or a follower."""
    number = cluster.leader() if is_leader else cluster.followers()[0]
    return cluster.replicas[number]


def segment(replica: ReplicaProcess, partition: int, *, is_sealed: bool) -> Path:
    """Return the first segment of a partition or the one that grows, with bytes."""
    directory = replica.data / f"{TOPIC}-{partition}"

    def filled() -> list[Path]:
        return sorted(p for p in directory.glob("*.meta") if p.stat().st_size > 1000)

    wait_until(lambda: len(filled()) > 1, SETTLE_S)
    return filled()[0 if is_sealed else -1]


def flip(path: Path, random: Random) -> str:
    """Flip one bit of a message in the middle of a segment."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        at = random.randrange(size // 4, size // 2)
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << random.randrange(8)]))
    return f"flip a bit of byte {at} of {size} in {path}"


BOTH = {
    "is_leader": pytest.mark.parametrize(
        "is_leader", [True, False], ids=["leader", "follower"]
    ),
    "is_sealed": pytest.mark.parametrize(
        "is_sealed", [True, False], ids=["sealed", "active"]
    ),
}


@pytest.mark.sampled(2)
@BOTH["is_leader"]
@BOTH["is_sealed"]
@pytest.mark.parametrize("is_running", [True, False], ids=["running", "stopped"])
def test_one_bit_is_flipped_on_a_minority(
    cluster: Cluster, is_leader: bool, is_sealed: bool, is_running: bool
) -> None:
    """NATS lost 679,153 of 1,367,069: a replica with a flipped bit led the others."""
    random = Random(SEED)
    with puts(cluster) as ledger:
        wait_acked(ledger, 200)
        replica = chosen(cluster, is_leader=is_leader)
        path = segment(replica, HOT, is_sealed=is_sealed)
        if not is_running:
            ledger.note(f"kill {replica.number}")
            replica.kill()
        ledger.note(flip(path, random))
        replica.start()
        wait_acked(ledger, 200)
    count_lost(cluster, ledger, "a bit is flipped")


@pytest.mark.sampled(1)
@BOTH["is_leader"]
@BOTH["is_sealed"]
def test_a_segment_is_cut_on_a_minority(
    cluster: Cluster, is_leader: bool, is_sealed: bool
) -> None:
    """NATS lost what was in the file, where the replica with less led the others."""
    with row(cluster, "a segment is cut") as ledger:
        wait_acked(ledger, 200)
        replica = chosen(cluster, is_leader=is_leader)
        path = segment(replica, HOT, is_sealed=is_sealed)
        ledger.note(f"kill {replica.number}, and cut {path} to its half")
        replica.kill()
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)
        replica.start()
        wait_acked(ledger, 200)


@pytest.mark.sampled(1)
@BOTH["is_leader"]
@pytest.mark.parametrize(
    "names",
    [("epochs", "watermarks"), ("holdings", f"{TOPIC}-{HOT}")],
    ids=["known", "held"],
)
def test_files_of_the_set_are_lost_on_a_minority(
    cluster: Cluster, is_leader: bool, names: tuple[str, ...]
) -> None:
    """NATS deleted a stream everywhere, where one replica had lost its description."""
    with row(cluster, "a file of the set is lost") as ledger:
        for name in names:
            wait_acked(ledger)
            replica = chosen(cluster, is_leader=is_leader)
            path = replica.data / name
            wait_until(path.exists, SETTLE_S)
            ledger.note(f"kill {replica.number}, and remove {path}")
            replica.kill()
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
            replica.start()
            wait_acked(ledger)
            cluster.mend()


def test_the_file_that_names_the_set_is_lost_on_the_leader(cluster: Cluster) -> None:
    """It starts no more, the others go on, and it joins when its data is discarded."""
    with row(cluster, "the file that names the set is lost") as ledger:
        replica = chosen(cluster, is_leader=True)
        ledger.note(f"kill {replica.number}, and remove its set file")
        replica.kill()
        (replica.data / "set").unlink()
        replica.start()
        assert replica.wait() != 0
        wait_acked(ledger)
        assert replicas.join(replica.ini, {}, is_discarding=True, is_sure=True)


def test_all_lose_power_at_once(cluster: Cluster) -> None:
    """NATS lost 131,418 of 930,005: it acknowledged before it had synced.

    What was not acknowledged was not synced everywhere: some of it goes with the power.
    """
    random = Random(SEED)
    with row(cluster, "all lose power") as ledger:
        wait_acked(ledger, 200)
        ledger.note("freeze the followers: what comes now is at the leader alone")
        for number in cluster.followers():
            cluster.replicas[number].freeze()
        time.sleep(0.5)
        ledger.note("kill all, and tear what was not acknowledged")
        for replica in cluster.replicas.values():
            replica.kill()
        time.sleep(3.0)  # answers that have arrived are entered
        for replica in cluster.replicas.values():
            ledger.note(tear_unsynced(replica, ledger, random))
        for replica in cluster.replicas.values():
            replica.start()
        wait_acked(ledger, 200)


def tear_unsynced(replica: ReplicaProcess, ledger: Ledger, random: Random) -> str:
    """Cut a log of a replica anywhere above what was acknowledged."""
    ends = [
        offset + HEADER_BYTES + len(data)
        for (partition, offset), data in ledger.acked.items()
        if partition == COLD
    ]
    paths = sorted((replica.data / f"{TOPIC}-{COLD}").glob("*.meta"))
    path = max(p for p in paths if int(p.stem) <= max(ends))
    for later in paths[paths.index(path) + 1 :]:
        later.unlink()
    size, least = path.stat().st_size, max(ends) - int(path.stem)
    assert least <= size, f"{path}: {least} bytes acknowledged, {size} there"
    left = random.randint(least, size)
    with path.open("r+b") as file:
        file.truncate(left)
    return f"replica {replica.number}: {size - left} of {size - least} bytes are lost"


def test_one_is_paused_while_another_loses_power_then_they_swap(
    cluster: Cluster,
) -> None:
    """NATS had two histories for good: one that lost its tail was believed."""
    with row(cluster, "one is paused, another loses power, then swapped") as ledger:
        one, other = (cluster.replicas[number] for number in cluster.followers())
        for paused, cut in ((one, other), (other, one)):
            ledger.note(f"freeze {paused.number}, kill {cut.number}, tear its tails")
            paused.freeze()
            cut.kill()
            time.sleep(SESSION_S)
            tear_tails(cut)
            cut.start()
            time.sleep(SESSION_S)
            paused.thaw()
            wait_acked(ledger)


def tear_tails(replica: ReplicaProcess) -> None:
    """Take the last bytes of each log, synced or not."""
    for directory in replica.data.glob(f"{TOPIC}-*"):
        last = max(p for p in directory.glob("*.meta") if p.stat().st_size)
        with last.open("r+b") as file:
            file.truncate(max(0, last.stat().st_size - 1_000))
