"""Closes connections to former leaders once another replica leads.

The connections of a leader that hangs or is unreachable stay open without answers.
Without this module, requests would wait for the heartbeat or for their deadlines,
although the new leader could answer them.
"""

import asyncio
from functools import partial
from typing import Final

from metaq.client.cluster.metadata import Metadata
from metaq.cluster_snapshot import ClusterSnapshot
from metaq.model import BrokerAddress, BrokerId
from metaq.peer.pool import ConnectionPool

LAST_ANSWERS_S: Final = 1.0
"""Time for the last answers of a former leader that hands over, in seconds."""


class FormerLeaders:
    """Closes the connections to brokers that another address has replaced.

    Owned by a session, used on its loop. Ends with the metadata that it listens to.
    """

    def __init__(self, metadata: Metadata, pool: ConnectionPool) -> None:
        """Start to listen to the metadata."""
        self._metadata = metadata
        self._pool = pool
        self._leaders: dict[BrokerId, BrokerAddress] = {}
        metadata.add_listener(self._on_snapshot)

    def _on_snapshot(self, snapshot: ClusterSnapshot) -> None:
        for broker_id, leader in snapshot.leaders().items():
            former = self._leaders.get(broker_id, leader)
            self._leaders[broker_id] = leader
            if former != leader:
                leave = partial(self._leave, former)
                asyncio.get_running_loop().call_later(LAST_ANSWERS_S, leave)

    def _leave(self, former: BrokerAddress) -> None:
        if former not in self._metadata.snapshot.leaders().values():
            self._pool.leave(former, "another replica leads")
