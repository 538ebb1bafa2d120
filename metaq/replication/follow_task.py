"""A follower's connection to its leader: connects, follows, and reconnects.

Owned by the node, from a `Join` to the next change of its role. Results of the stream
are applied by the node's core, under its lock.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final, Protocol

from metaq.clock import Clock
from metaq.errors import ClosedError, MetaqError, NoSpaceError
from metaq.model import BrokerAddress, LogId, MessageId, Offset
from metaq.peer.connection import BrokerConnection
from metaq.peer.options import READ_BACKOFF, ConnectionOptions
from metaq.peer.pool import open_connection
from metaq.replication.epochs import CopyFacts, Epoch
from metaq.replication.following import Follower
from metaq.replication.joins import refuse
from metaq.replication.progress import JoinAnswer
from metaq.replication.replica import (
    Replica,
    ReplicaRole,
    Transition,
    caught_up,
    declare_incomplete,
    joined,
)
from metaq.replication.store import ReplicaStore
from metaq.storage.partition_log import PartitionLog

_log = logging.getLogger(__name__)

CONNECTION: Final = ConnectionOptions(
    connect_timeout_s=3.0, heartbeat_s=2.0, heartbeat_timeout_s=2.0
)
"""Short, to notice a lost replica soon; a leader sends twice a second."""
LASTED_S: Final = 2.0
"""Duration of a stream that counts as a success and resets the back-off, in seconds."""


async def connect(address: BrokerAddress, clock: Clock) -> BrokerConnection:
    """Return a connection to another replica.

    Raises:
        NoBrokerError: it cannot be reached.
    """
    deadline_s = clock.monotonic_s() + CONNECTION.connect_timeout_s
    return await open_connection(
        address, clock=clock, deadline_s=deadline_s, options=CONNECTION
    )


@asynccontextmanager
async def connected(
    address: BrokerAddress, clock: Clock
) -> AsyncIterator[BrokerConnection]:
    """Open a connection to another replica for some questions, and close it afterwards.

    Raises:
        NoBrokerError: it cannot be reached.
    """
    connection = await connect(address, clock)
    try:
        yield connection
    finally:
        connection.close("all is answered")


class FollowNode(Protocol):
    """Interface of the node that `FollowTask` needs."""

    @property
    def replica(self) -> Replica:
        """Return the state of the replica."""

    @property
    def lock(self) -> asyncio.Lock:
        """Return the lock that makes a step of the core and its actions atomic."""

    @property
    def token(self) -> str:
        """Return the token in its node `present/K`."""

    async def apply(self, transition: Transition | None) -> bool:
        """Apply a step of the core, and carry out its actions; False for None."""

    def set_replica(self, replica: Replica) -> None:
        """Replace the state by one that needs no action."""

    def wake(self) -> None:
        """Make the node check soon what is due."""

    def spawn(
        self, work: Coroutine[Any, Any, None], *, name: str
    ) -> asyncio.Task[None]:
        """Run a task; an exception in it ends the replica."""

    def address_of(self, replica: int) -> BrokerAddress | None:
        """Return the address that a replica advertises; None if it advertises none."""

    def note_last_id(self, last_id: MessageId) -> None:
        """Note that records with ids up to this one exist."""

    def make_log(self, log_id: LogId, start: Offset, number: int) -> PartitionLog:
        """Create a log that follows, with another replica's start and number."""


class FollowTask:
    """Follows one leader until `end`. Used on the loop's thread."""

    def __init__(
        self,
        node: FollowNode,
        store: ReplicaStore,
        leader: int,
        epoch: Epoch,
        *,
        clock: Clock,
    ) -> None:
        """Start to follow.

        Args:
            node: the node of the replica.
            store: its logs.
            leader: number of the leader.
            epoch: epoch of the leader.
            clock: for waits and deadlines.
        """
        self._node = node
        self._store = store
        self.leader: Final = leader, epoch
        """Number and epoch of the leader."""
        self.lack_of_space = ""
        """Reason why the copy waits for disk space; "" if it does not."""
        self._clock = clock
        self._follower: Follower | None = None
        self._task = node.spawn(self._run(), name="follow")

    def join_again(self) -> None:
        """End the stream, and join again with the present logs."""
        if self._follower is not None:
            self._follower.fail(ClosedError("a log was opened again"))

    async def end(self) -> None:
        """Stop pulling; what the storage threads already have is still written."""
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _run(self) -> None:
        failures = 0
        while True:
            began_s = self._clock.monotonic_s()
            try:
                await self._follow()
                if self.replica.role is ReplicaRole.FROZEN:
                    return
            except MetaqError as error:
                if isinstance(error, NoSpaceError):
                    self.lack_of_space = str(error)
                _log.warning(
                    "stream ended: replica=%d leader=%d epoch=%d cause=%s",
                    self.replica.id,
                    self.leader[0],
                    self.leader[1].number,
                    error,
                )
            if self._clock.monotonic_s() - began_s > LASTED_S:
                failures = 0
            failures += 1
            self._node.wake()
            await asyncio.sleep(READ_BACKOFF.delay_s(failures))

    async def _follow(self) -> None:
        address = self._node.address_of(self.leader[0])
        if address is not None:
            follower = self._follower = Follower(
                await connect(address, self._clock),
                self._store,
                self,
                clock=self._clock,
                epoch=self.leader[1],
                token=self._node.token,
            )
            await follower.run()

    # -- of the stream (FollowerOwner) ------------------------------------------------

    @property
    def replica(self) -> Replica:
        """Return the state of the replica."""
        return self._node.replica

    async def refuse(self, log_id: LogId, own: CopyFacts, answer: JoinAnswer) -> None:
        """Freeze: the leader's log parts from the own below its high watermark."""
        async with self._node.lock:
            # The actions would end this stream, which ends anyway.
            frozen, _actions = refuse(self.replica, log_id, own, answer)
            self._node.set_replica(frozen)

    async def on_joined(self, epoch: Epoch) -> None:
        """Called when all truncations and tables of a join are on disk."""
        async with self._node.lock:
            await self._node.apply(joined(self.replica, epoch))

    async def on_caught_up(self) -> None:
        """Called when all logs have reached their targets: the copy is complete."""
        async with self._node.lock:
            await self._node.apply(caught_up(self.replica))
        self._node.wake()
        self._store.remove_aside()

    async def on_lost(self) -> None:
        """Called when the leader knows of promised bytes that this replica lacks."""
        async with self._node.lock:
            # The other action would end this stream, which has ended.
            incomplete, _actions = declare_incomplete(self.replica)
            await self._store.save(incomplete.file)
            self._node.set_replica(incomplete)
        self._node.wake()

    def note_last_id(self, last_id: MessageId) -> None:
        """Note that records with ids up to this one exist, and that appends succeed."""
        self.lack_of_space = ""
        self._node.note_last_id(last_id)

    def make_log(self, log_id: LogId, start: Offset, number: int) -> PartitionLog:
        """Create a log that follows, with the leader's start and number."""
        return self._node.make_log(log_id, start, number)
