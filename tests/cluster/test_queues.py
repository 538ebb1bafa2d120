"""Work queues of a set: leaders are killed, hang and hand over under 64 workers."""

from pathlib import Path
from random import Random
from typing import Final

import pytest

from tests.cluster.failovers import COUNT, failover, faults
from tests.cluster.rig import SECTION, TOPIC, Cluster
from tests.matrix.queue_book import Book
from tests.matrix.test_queue_kills import Shop

PROCESSES: Final = 2
WORKERS_EACH: Final = 32
LEASE_S: Final = 5.0
"""Longer than a failover: what workers have they may keep."""
LETTERS: Final = f"\n[topic={TOPIC}-dead]\nnumPartitions=1"

pytestmark = [
    pytest.mark.crash,
    pytest.mark.slow,
    pytest.mark.zookeeper,
    pytest.mark.timeout(900 + 30 * COUNT),
]


def test_failovers_lose_nothing_and_repeat_nothing_that_was_acknowledged(
    tmp_path: Path, rng: Random
) -> None:
    """Keys stay in order, each dead letter is there once, and all copies are equal."""
    cluster = Cluster(tmp_path / "cluster", is_begun=False)
    for number, replica in cluster.replicas.items():
        replica.configure(section=SECTION.format(number=number) + LETTERS)
    book = Book(tmp_path / "book.jsonl")
    options = {
        "ordered_by": "key",
        "lease_s": LEASE_S,
        "worker_count": WORKERS_EACH,
        "concurrency": 2,
        "prefetch": 4,
    }
    with cluster:
        cluster.begin()
        shop = Shop(
            cluster.zookeeper.address,
            cluster.zookeeper,
            TOPIC,
            book,
            rng,
            [],
            options,
        )
        try:
            for _ in range(PROCESSES):
                shop.hire("async")
            shop.put(b"reject:1")
            shop.start_producer()
            shop.go_on()
            for number, fault in enumerate(faults()):
                book.note("fault", number=number, fault=fault.value)
                with failover(cluster, fault):
                    shop.go_on()
                    book.note("goes on", number=number)
                shop.go_on()
            letters = shop.finish()
        except BaseException:
            print(cluster.describe())
            raise
        finally:
            shop.end()
            book.close()
        assert b"reject:1" in {letter.data for letter in letters}
        cluster.wait_whole()
        cluster.stop()
        copies = [
            b"".join(
                path.read_bytes()
                for path in sorted(each.data.glob("__queues-0/*.meta"))
            )
            for each in cluster.replicas.values()
        ]
        assert copies[0]
        assert copies == [copies[0]] * len(copies)
