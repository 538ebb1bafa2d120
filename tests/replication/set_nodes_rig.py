"""A set in an in-memory ZooKeeper, and replicas that read and write its nodes."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final

from metaq.model import BrokerId
from metaq.replication.election import Presence, PresenceState
from metaq.replication.epochs import Epoch
from metaq.replication.json_values import to_json
from metaq.replication.record import make_record
from metaq.replication.set_nodes import (
    LeaderData,
    Member,
    SetNodes,
    Shown,
)
from metaq.testing.zk import MemoryCoordinator, MemoryZooKeeper
from metaq.zk.paths import NodePaths
from tests.rigs.virtual_time import VirtualClock
from tests.rigs.waiting import until

CLOCK: Final = VirtualClock()
BROKER: Final = BrokerId(7)
RECORD, LEADER = "/meta/replicas/7", "/meta/replicas/7/leader"
PRESENT_1, PRESENT_2 = "/meta/replicas/7/present/1", "/meta/replicas/7/present/2"
MEMBER_2 = "/meta/replicas/7/members/2"
ALL: Final = frozenset({1, 2, 3})
FIRST: Final = replace(
    make_record("s", 1, ALL, min_in_sync=2, nonce="init"), in_sync=ALL
)


def member(incarnation: int, version: int = 0) -> Member:
    return Member("s", {f"disk{incarnation}": version or incarnation}, incarnation)


def leading(replica: int, epoch: Epoch) -> LeaderData:
    return LeaderData(replica, epoch, f"meta://host{replica}:8123")


def leader(replica: int, epoch: Epoch) -> bytes:
    return to_json(leading(replica, epoch))


def shown(replica: int, *, address: str = "", **changes: Any) -> Shown:
    presence = Presence(replica, 5, PresenceState.READY, 1, 1)
    address = address or f"meta://host{replica}:8123"
    return Shown(replace(presence, **changes), address, f"token{replica}")


class SetRig:
    """One server and the replicas of one set; `nodes[0]` is an operator's."""

    def __init__(self) -> None:
        self.server = MemoryZooKeeper()
        self.clients: dict[int, MemoryCoordinator] = {}
        self.nodes: dict[int, SetNodes] = {}

    async def join(self, replica: int) -> SetNodes:
        """Start a client for a replica, in the place of one that was there."""
        client = self.server.coordinator(CLOCK)
        client.start()
        await until(lambda: client.status.session_version == 1)
        self.clients[replica] = client
        nodes = SetNodes(client, NodePaths(), BROKER, replica, clock=CLOCK)
        self.nodes[replica] = nodes
        return nodes

    def data(self, path: str) -> bytes | None:
        node = self.server.tree().get(path)
        return None if node is None else node.data


@asynccontextmanager
async def a_set(members: Mapping[int, Member] | None = None) -> AsyncIterator[SetRig]:
    """Yield a set of three replicas, none of which is there yet."""
    rig = SetRig()
    operator = await rig.join(0)
    await operator.create_record(FIRST, members or {1: member(4)})
    for replica in (1, 2):
        await rig.join(replica)
    yield rig
    for client in rig.clients.values():
        await client.stop(deadline_s=CLOCK.monotonic_s() + 1)
