"""Failovers of a set in turn: a leader is killed, hands over, or hangs.

METAQ_CLUSTER_FAILOVERS says how many of them a test has.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from random import Random
from typing import Final

from tests.cluster.rig import SETTLE_S, Cluster
from tests.rigs.waiting import wait_until
from tests.sampling import IS_WHOLE, SEED

COUNT: Final = int(os.environ.get("METAQ_CLUSTER_FAILOVERS") or (10 if IS_WHOLE else 3))


class Fault(StrEnum):
    """Ways in which a leader stops leading."""

    KILL = "kill"
    HAND_OVER = "hand-over"
    FREEZE = "freeze"


def faults() -> Iterator[Fault]:
    """Yield `COUNT` faults: all kinds in turn, each turn in an order of its own."""
    random = Random(SEED)
    kinds = list(Fault)
    for number in range(COUNT):
        if number % len(kinds) == 0:
            random.shuffle(kinds)
        yield kinds[number % len(kinds)]


@contextmanager
def failover(cluster: Cluster, fault: Fault) -> Iterator[None]:
    """Have another replica lead while the block runs; then the set is made whole."""
    number = cluster.leader()
    replica = cluster.replicas[number]
    match fault:
        case Fault.KILL:
            replica.kill()
        case Fault.HAND_OVER:
            replica.ask_to_end()
            assert replica.wait() == 0
        case Fault.FREEZE:
            replica.freeze()
            wait_until(
                lambda: cluster.record.leader not in {0, number},
                SETTLE_S,
                cluster.describe,
            )
    assert cluster.leader() != number
    yield
    cluster.mend()
