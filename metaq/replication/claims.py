"""Claims of a replica: it claims an epoch, merges other members' data, and leads.

Owned by the node, which calls it while there is no leader or its own claim is open.
"""

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Final, Protocol

from metaq.clock import Clock
from metaq.errors import MetaqError, UnavailableError
from metaq.replication.election import Flag, claim_delay_ms
from metaq.replication.epochs import Epoch
from metaq.replication.follow_task import FollowNode, connected
from metaq.replication.merging import Merged, Merging
from metaq.replication.replica import (
    ReplicaRole,
    View,
    claim,
    declare_incomplete,
    give_up,
    lead,
    merged,
)
from metaq.replication.store import ReplicaStore

_log = logging.getLogger(__name__)

MERGE_TIMEOUT_S: Final = 5.0
"""Longest wait for one member in a merge; the other members are then asked first."""
ASK_AGAIN_S: Final = 0.1
"""Pause before members that have not replied are asked again, in seconds."""
TERM_TRIES_S: Final = 15.0
"""Time after which a claimer that may not lead gives up, in seconds."""
NONCE_BYTES: Final = 8
"""Size of the nonce of a claim, in bytes."""
LAST_IN_RANK_S: Final = 10.0
"""Time for which a claimer that gave up leaves the next claim to others, in seconds."""

KNOWN: Final = frozenset(
    {ReplicaRole.LEADING, ReplicaRole.DRAINING, ReplicaRole.FROZEN}
)
"""Roles in which this replica leads, or an alarm shows why it takes no part."""


class ClaimNode(FollowNode, Protocol):
    """Interface of the node that `Claims` needs."""

    async def read(self) -> View:
        """Read ZooKeeper after a sync."""

    async def forget_former_process(self) -> None:
        """Delete a `leader` node that an earlier process of this replica left."""


class Claims:
    """The claims of one replica. Used on the loop's thread."""

    def __init__(
        self,
        node: ClaimNode,
        store: ReplicaStore,
        *,
        clock: Clock,
        draw: Callable[[int], str],
    ) -> None:
        """Prepare to claim.

        Args:
            node: the node of the replica.
            store: its logs.
            clock: for waits and deadlines.
            draw: returns a random text of the given number of bytes.
        """
        self._draw = draw
        self._node = node
        self._store = store
        self._clock = clock
        self._idle_s = self._claimed_s = clock.monotonic_s()
        self._claim: tuple[Epoch | None, float] = (None, self._idle_s)
        """Epoch of the `leader` node when last read, None without one; since when."""
        self._is_led, self._led_s = True, self._idle_s
        """Whether a replica led at the last look; the last time at which one led."""
        self._not_before_s = 0.0
        self._merging: asyncio.Task[None] | None = None

    def note_role(self) -> None:
        """Restart the time without a leader, because the role has changed."""
        self._idle_s = self._clock.monotonic_s()

    @property
    def idle_s(self) -> float:
        """Return the time for which no `leader` node was seen, in seconds."""
        return self._clock.monotonic_s() - self._idle_s

    def note_leader(self, view: View) -> None:
        """Record whether a replica leads, as far as this one can know.

        A claim is no proof, because the claimer may fail to reach the others and give
        up, repeatedly. It counts as leading once its claim is older than the time in
        which it would have given up, or once this replica has completed a join of that
        epoch.
        """
        own, seen, now_s = self._node.replica, view.leader, self._clock.monotonic_s()
        epoch = None if seen is None else seen.epoch
        if epoch != self._claim[0]:
            self._claim = epoch, now_s
        is_old = now_s - self._claim[1] > TERM_TRIES_S + MERGE_TIMEOUT_S
        has_joined = epoch is not None and own.file.completed == epoch.number
        self._is_led = own.role in KNOWN or (epoch is not None and is_old) or has_joined
        if self._is_led:
            self._led_s = now_s

    @property
    def leaderless_s(self) -> float:
        """Return the time for which no replica has led, in seconds; 0: one leads."""
        return 0.0 if self._is_led else self._clock.monotonic_s() - self._led_s

    def wait(self, seconds: float) -> None:
        """Leave the next claim to others for some seconds."""
        self._not_before_s = self._clock.monotonic_s() + seconds

    async def claim_if_due(self, view: View) -> None:
        """Claim if no replica leads and those of better rank have had their time."""
        record, now_s, own = view.record, self._clock.monotonic_s(), self._node.replica
        if record is None:
            return
        if view.leader is not None:
            self._idle_s = now_s
            if view.leader.replica == own.id:
                await self._node.forget_former_process()
            return
        waited_ms = int(self.idle_s * 1000)
        delay_ms = claim_delay_ms(own.id, record, view.presences)
        if waited_ms < delay_ms or now_s < self._not_before_s:
            return
        nonce = self._draw(NONCE_BYTES)
        if claim(own, view, nonce, waited_ms=waited_ms) is not None:
            seen = await self._node.read()
            transition = claim(self._node.replica, seen, nonce, waited_ms=waited_ms)
            await self._node.apply(transition)

    def begin_merge(self, members: Collection[int], epoch: Epoch) -> None:
        """Start to merge what members have, under an epoch that was claimed."""
        self._claimed_s = self._clock.monotonic_s()
        self._merging = self._node.spawn(self._merge(members, epoch), name="merge")

    async def end(self) -> None:
        """Cancel a running merge: it belongs to the role that ends."""
        merging, self._merging = self._merging, None
        if merging is not None:
            merging.cancel()
            await asyncio.wait({merging})

    async def _merge(self, members: Collection[int], epoch: Epoch) -> None:
        """Merge what each member has; retry those that do not reply, until all have.

        A member that was claiming itself refuses at first, and another may be starting.
        """
        causes: dict[int, str] = {}
        waiting = sorted(members)
        while waiting:
            for member in tuple(waiting):
                try:
                    async with asyncio.timeout(MERGE_TIMEOUT_S):
                        found = await self._merge_with(member, epoch)
                    if not await self._note_merged(member, found):
                        return
                    waiting.remove(member)
                except (MetaqError, TimeoutError) as error:
                    cause = str(error) or f"waited {MERGE_TIMEOUT_S:g} s"
                    if causes.get(member) != cause:
                        _log.warning("replica %d did not answer: %s", member, cause)
                    causes[member] = cause
            await asyncio.sleep(ASK_AGAIN_S)

    async def _note_merged(self, member: int, found: Merged) -> bool:
        """Record a merged member; return False if the own copy lacks bytes."""
        async with self._node.lock:
            own = self._node.replica
            self._node.note_last_id(found.last_id)
            if found.lacks_bytes:
                await self._node.apply(declare_incomplete(own))
                return False
            self._node.set_replica(merged(own, member))
        self._node.wake()
        return True

    async def _merge_with(self, member: int, epoch: Epoch) -> Merged:
        address = self._node.address_of(member)
        if address is None:
            raise UnavailableError("it is away")
        merging = Merging(self._node, self._store, epoch, clock=self._clock)
        async with connected(address, self._clock) as connection:
            return await merging.merge_with(connection)

    async def lead_if_merged(self, view: View) -> None:
        """Lead once enough members have replied; give up after `TERM_TRIES_S`."""
        own, waited_s = self._node.replica, self._clock.monotonic_s() - self._claimed_s
        lacks_bytes = own.file.flag is Flag.INCOMPLETE
        transition = None if lacks_bytes else lead(own, waited_ms=int(waited_s * 1000))
        if await self._node.apply(transition):
            return
        if lacks_bytes or waited_s > TERM_TRIES_S:
            self.wait(LAST_IN_RANK_S)
            await self._node.apply(
                give_up(own, view.presences, lacks_bytes=lacks_bytes)
            )
