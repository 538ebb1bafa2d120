"""A replica's way to a term: it claims, merges what others have, and leads.

Owner: the node, which calls while there is no leader, and while the own claim is open.
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
"""A member that does not answer a claimer for so long is asked after the others."""
ASK_AGAIN_S: Final = 0.1
"""Pause before those are asked again that have not answered."""
TERM_TRIES_S: Final = 15.0
"""A claimer that may not lead after so long gives up."""
NONCE_BYTES: Final = 8
"""Size of the text that no other claim has."""
LAST_IN_RANK_S: Final = 10.0
"""So long it leaves the next claim to others."""

KNOWN: Final = frozenset(
    {ReplicaRole.LEADING, ReplicaRole.DRAINING, ReplicaRole.FROZEN}
)
"""Roles in which a replica leads, or an alarm says why it has no part."""


class ClaimNode(FollowNode, Protocol):
    """Interface of the node."""

    async def read(self) -> View:
        """Read ZooKeeper after a sync."""

    async def forget_former_life(self) -> None:
        """Delete a `leader` node of an earlier process."""


class Claims:
    """On the loop's thread."""

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
            node: of the replica.
            store: its logs.
            clock: time.
            draw: returns a random text of so many bytes.
        """
        self._draw = draw
        self._node = node
        self._store = store
        self._clock = clock
        self._idle_s = self._claimed_s = clock.monotonic_s()
        self._claim: tuple[Epoch | None, float] = (None, self._idle_s)
        """The epoch that was claimed last and is not given up, and since when."""
        self._is_led, self._led_s = True, self._idle_s
        """At the last look, and when that was so."""
        self._not_before_s = 0.0
        self._merging: asyncio.Task[None] | None = None

    def note_role(self) -> None:
        """Note a new role: if no replica leads, it is so since now at the earliest."""
        self._idle_s = self._clock.monotonic_s()

    @property
    def idle_s(self) -> float:
        """Return for how long no replica was seen to lead, seconds."""
        return self._clock.monotonic_s() - self._idle_s

    def note_leader(self, view: View) -> None:
        """Note whether a replica leads, as far as this one can know.

        A claim is no proof: its replica may reach no other, and give up, again and
        again. One that it would have given up by now is, and so is a join.
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
        """Return for how long no replica has led, seconds; 0: one leads."""
        return 0.0 if self._is_led else self._clock.monotonic_s() - self._led_s

    def wait(self, seconds: float) -> None:
        """Leave the next claim to others for so long."""
        self._not_before_s = self._clock.monotonic_s() + seconds

    async def claim_if_due(self, view: View) -> None:
        """Claim, when no replica leads and the better ranks have had their time."""
        record, now_s, own = view.record, self._clock.monotonic_s(), self._node.replica
        if record is None:
            return
        if view.leader is not None:
            self._idle_s = now_s
            if view.leader.replica == own.id:
                await self._node.forget_former_life()
            return
        waited_ms = int(self.idle_s * 1000)
        delay_ms = claim_delay_ms(own.id, record, view.presences)
        if waited_ms < delay_ms or now_s < self._not_before_s:
            return
        nonce = self._draw(NONCE_BYTES)
        if claim(own, view, nonce, waited_ms=waited_ms) is not None:
            seen = await self._node.read()
            moved = claim(self._node.replica, seen, nonce, waited_ms=waited_ms)
            await self._node.take(moved)

    def begin_merge(self, members: Collection[int], epoch: Epoch) -> None:
        """Ask members what they have, under an epoch that was claimed."""
        self._claimed_s = self._clock.monotonic_s()
        self._merging = self._node.spawn(self._merge(members, epoch), name="merge")

    async def end(self) -> None:
        """Call off what is under way: a merge has no part in another role."""
        merging, self._merging = self._merging, None
        if merging is not None:
            merging.cancel()
            await asyncio.wait({merging})

    async def _merge(self, members: Collection[int], epoch: Epoch) -> None:
        """Take over what members have, each as far as it answers, until all have.

        One that was claiming itself refuses at first, and one may only be starting.
        """
        causes: dict[int, str] = {}
        waiting = sorted(members)
        while waiting:
            for member in tuple(waiting):
                try:
                    async with asyncio.timeout(MERGE_TIMEOUT_S):
                        found = await self._merge_with(member, epoch)
                    if not await self._take_note(member, found):
                        return
                    waiting.remove(member)
                except (MetaqError, TimeoutError) as error:
                    cause = str(error) or f"waited {MERGE_TIMEOUT_S:g} s"
                    if causes.get(member) != cause:
                        _log.warning("replica %d did not answer: %s", member, cause)
                    causes[member] = cause
            await asyncio.sleep(ASK_AGAIN_S)

    async def _take_note(self, member: int, found: Merged) -> bool:
        """Note what a member had; False: the own copy lacks what is acknowledged."""
        async with self._node.lock:
            own = self._node.replica
            self._node.note_last_id(found.last_id)
            if found.is_short:
                await self._node.take(declare_incomplete(own))
                return False
            self._node.take_note(merged(own, member))
        self._node.wake()
        return True

    async def _merge_with(self, member: int, epoch: Epoch) -> Merged:
        address = self._node.address_of(member)
        if address is None:
            raise UnavailableError("it is not there")
        merging = Merging(self._node, self._store, epoch, clock=self._clock)
        async with connected(address, self._clock) as connection:
            return await merging.merge_with(connection)

    async def lead_if_merged(self, view: View) -> None:
        """Lead when enough members have answered; give up after `TERM_TRIES_S`."""
        own, waited_s = self._node.replica, self._clock.monotonic_s() - self._claimed_s
        is_short = own.file.flag is Flag.INCOMPLETE
        moved = None if is_short else lead(own, waited_ms=int(waited_s * 1000))
        if await self._node.take(moved):
            return
        if is_short or waited_s > TERM_TRIES_S:
            self.wait(LAST_IN_RANK_S)
            await self._node.take(give_up(own, view.presences, is_short=is_short))
