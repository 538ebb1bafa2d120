"""Connections to former leaders, which are closed once another replica leads.

A leader that hangs, or that the network hides, keeps its connections open and answers
nothing; one that died takes none. Without this requests would wait for the heartbeat,
or for their deadlines, although the new leader could answer them.
"""

import asyncio
from functools import partial
from typing import Final

from metaq.client.cluster.metadata import Metadata
from metaq.cluster_snapshot import ClusterSnapshot
from metaq.model import BrokerAddress, BrokerId
from metaq.peer.pool import ConnectionPool

LAST_ANSWERS_S: Final = 1.0
"""Seconds for the last answers of a former leader that is there and hands over."""


class FormerLeaders:
    """Closes the connections to brokers that another address has replaced.

    Owner: a session, on its loop. It ends with the metadata that it listens to.
    """

    def __init__(self, metadata: Metadata, pool: ConnectionPool) -> None:
        """Begin to listen."""
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
