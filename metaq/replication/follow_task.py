"""A replica's way to its leader: connects, follows, and connects again.

Owner: the node, from a `Join` to the next change of its role. What the stream learns is
taken in by the node's core, under its lock.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
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
    Moved,
    Replica,
    ReplicaRole,
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
"""Replicas notice soon that another one is gone: a leader sends twice a second."""
LASTED_S: Final = 2.0
"""A stream that lasted so long was one; the next pause is the first again."""


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
    """Hold a connection to another replica for some questions.

    Raises:
        NoBrokerError: it cannot be reached.
    """
    connection = await connect(address, clock)
    try:
        yield connection
    finally:
        connection.close("all is answered")


class FollowNode(Protocol):
    """Interface of the node."""

    @property
    def replica(self) -> Replica:
        """Return its state."""

    @property
    def lock(self) -> asyncio.Lock:
        """Return the lock under which a step of the core and its actions are one."""

    @property
    def token(self) -> str:
        """Return the token in its node `present/K`."""

    async def take(self, moved: Moved | None) -> bool:
        """Take a step of the core, and carry out its actions."""

    def take_note(self, replica: Replica) -> None:
        """Take over a state that needs no action."""

    def wake(self) -> None:
        """Look soon at what is due."""

    def spawn(
        self, work: Coroutine[Any, Any, None], *, name: str
    ) -> asyncio.Task[None]:
        """Run a task; one that fails ends the replica."""

    def address_of(self, replica: int) -> BrokerAddress | None:
        """Return the address that a replica shows; None: it shows none."""

    def note_last_id(self, last_id: MessageId) -> None:
        """Records with ids up to this one exist."""

    def make_log(self, log_id: LogId, start: Offset, number: int) -> PartitionLog:
        """Make a log that follows, as another replica has it."""


class FollowTask:
    """One leader, followed until `end`. On the loop's thread."""

    def __init__(
        self,
        node: FollowNode,
        store: ReplicaStore,
        leader: int,
        epoch: Epoch,
        *,
        clock: Clock,
    ) -> None:
        """Begin to follow.

        Args:
            node: of the replica.
            store: its logs.
            leader: number of the leader.
            epoch: that it leads.
            clock: time.
        """
        self._node = node
        self._store = store
        self.leader: Final = leader, epoch
        """Number and epoch of the leader."""
        self.lack_of_space = ""
        """Why the copy waits for space; "" while it does not."""
        self._clock = clock
        self._follower: Follower | None = None
        self._task = node.spawn(self._run(), name="follow")

    def join_again(self) -> None:
        """End the stream, and join with the logs as they are now."""
        if self._follower is not None:
            self._follower.fail(ClosedError("a log was opened again"))

    async def end(self) -> None:
        """Pull no more; what was handed to the storage threads is written."""
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
            # This stream is what the actions would end.
            frozen, _actions = refuse(self.replica, log_id, own, answer)
            self._node.take_note(frozen)
        _log.error("replica %d is frozen: %s", frozen.id, frozen.reason)

    async def on_joined(self, epoch: Epoch) -> None:
        """All cuts and tables of a join are on disk."""
        async with self._node.lock:
            await self._node.take(joined(self.replica, epoch))

    async def on_caught_up(self) -> None:
        """All logs are at the targets of the flag."""
        async with self._node.lock:
            await self._node.take(caught_up(self.replica))
        self._node.wake()
        self._store.remove_aside()

    def on_sure(self) -> None:
        """All logs are at their targets: nothing is to be saved, or waited for."""
        self._node.take_note(replace(self.replica, is_sure=True))

    async def on_lost(self) -> None:
        """The leader knows of bytes that this replica promised and lacks."""
        async with self._node.lock:
            # This stream has ended, which is the other action.
            incomplete, _actions = declare_incomplete(self.replica)
            await self._store.save(incomplete.file)
            self._node.take_note(incomplete)
        self._node.wake()

    def note_last_id(self, last_id: MessageId) -> None:
        """Records with ids up to this one exist: some were appended."""
        self.lack_of_space = ""
        self._node.note_last_id(last_id)

    def make_log(self, log_id: LogId, start: Offset, number: int) -> PartitionLog:
        """Make a log that follows, as the leader has it."""
        return self._node.make_log(log_id, start, number)
