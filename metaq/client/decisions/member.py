"""Decisions of one consumer, and those it finds when it claims a partition.

    settle    after a claim, before the first get: complete the last decision (rule 3)
    begin     before a batch: complete the last one, name the transaction of this one
    decide    once its branches are prepared: store offsets and decision, in one request
    complete  commit the decided branches; retry while a broker is away

`rules.py` has the rules. A request to ZooKeeper whose reply is lost is sent again: its
version checks let it succeed once, and after a refusal the nodes show whether the first
one succeeded.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

from metaq.client.cluster.context import ClientContext
from metaq.client.cluster.metadata_queries import BACKOFF, insist
from metaq.client.decisions.ending import end_dead
from metaq.client.decisions.rules import branches_of, make_decision
from metaq.client.errors import LostBranchError, TransactionInDoubtError
from metaq.client.fan_out import all_of
from metaq.client.group.assignments import Fence
from metaq.client.names import name_few
from metaq.client.offsets.committer import Committer
from metaq.client.produce.branch_endings import LOST, BranchEndings
from metaq.client.produce.branch_fates import Placed
from metaq.client.produce.xa_commands import ROLLBACK, key_of, shown
from metaq.errors import (
    ConfigError,
    CoordinationError,
    MetaqError,
    OwnershipLostError,
    TransactionError,
)
from metaq.model import BrokerId, GroupOffset, Offset, TopicPartition, XaTransactionId
from metaq.peer.pool import ConnectionPool
from metaq.retry import retry
from metaq.zk.decisions import (
    GroupDecision,
    GroupDecisions,
    Place,
    batch_xid,
    qualifier_of,
)
from metaq.zk.errors import NodeChangedError
from metaq.zk.session import SessionState

DECIDE_TRIES: Final = 3
"""Maximum number of attempts at a decision, after which another writer is assumed."""
SWEEP_S: Final = 30.0
"""Maximum seconds for ending branches of dead members; the next claim continues."""

_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Held:
    """A claimed partition."""

    place: Place | None
    """State in ZooKeeper on which its next decision is based; None if not read yet,
    because the group had no decisions."""
    begin: Offset
    """Its next batch begins here, or after it."""
    claim: object = field(default_factory=object)
    """Differs from claim to claim: each begins at what was stored then."""


@dataclass(slots=True, eq=False)
class _Pending:
    """A decided batch that is not complete."""

    xid: XaTransactionId
    branches: list[Placed]
    held: tuple[_Held, ...]
    """Its partitions; while all are held, no other member completes the batch."""
    was_sent: bool = False
    """Whether a commit was sent before."""


class MemberDecisions:
    """The decisions of one consumer, a member of a group in ZooKeeper.

    Owner: the consumer's partitions. Concurrency: on the client's loop; one batch at a
    time, concurrently with claims.
    """

    def __init__(
        self,
        context: ClientContext,
        *,
        group: str,
        fence: Callable[[], Fence | None],
        committer: Committer,
        restart: Callable[[Collection[TopicPartition]], None],
    ) -> None:
        """Prepare; nothing is read.

        Args:
            context: the client's parts.
            group: consumer group.
            fence: returns the current binding of claims; None without a group.
            committer: of the consumer; knows the stored offsets, and writes none during
                a decision.
            restart: stops reading partitions; claims those still assigned again, and
                reads them from their stored offsets.
        """
        self._context = context
        self._group = group
        self._fence = fence
        self._committer = committer
        self.restart = restart
        """As given."""
        self._held: dict[TopicPartition, _Held] = {}
        self._is_used = False
        """Whether the group has ever had exactly-once decisions."""
        self._token, self._token_session = "", 0
        self._doubted: set[str] = set()
        """Tokens with a request in doubt, which may still be carried out."""
        self._number = 0
        self._open: XaTransactionId | None = None
        self._claims: dict[TopicPartition, object] = {}
        """Claims of the partitions of the open batch."""
        self._pending: _Pending | None = None
        self._left: set[Placed] = set()
        """Own undecided branches that may be prepared, to be rolled back."""
        self._sweep: asyncio.Task[None] | None = None
        self._is_sweep_due = False

    @property
    def pool(self) -> ConnectionPool:
        """Connections of the consumer's client."""
        return self._context.pool

    # -- the partitions ---------------------------------------------------------------

    async def settle(
        self, partition: TopicPartition, *, deadline_s: float
    ) -> Place | None:
        """Complete the last decision about a partition just claimed (rule 3).

        Returns:
            The base of its next decision; None if the group has no decisions.

        Raises:
            MetaqError: ZooKeeper or a broker with a branch is away; call it again
                before the first get.
        """
        if self._fence() is None or self._context.coordinator is None:
            return None
        decisions = self._decisions
        for token in tuple(self._doubted):
            await decisions.drop_token(token, deadline_s=deadline_s)
            self._doubted.discard(token)
        if not self._is_used:
            self._is_used = await decisions.is_used(deadline_s=deadline_s)
        if not self._is_used:
            return None
        place = await decisions.read(partition, deadline_s=deadline_s)
        if place.decision is not None:
            await self._finish(partition, place.decision, deadline_s)
        self._start_sweep()
        return place

    async def _finish(
        self, partition: TopicPartition, decision: GroupDecision, deadline_s: float
    ) -> None:
        """Commit the branches of a decision; they may have been committed before."""
        branches = branches_of(partition, decision)
        failed = await self._endings(deadline_s).commit(branches, was_sent=True)
        for (broker_id, xid), error in failed.items():
            if not isinstance(error, LOST):
                raise TransactionInDoubtError(
                    f"{partition}: {shown(xid)} is decided, and broker {broker_id} has"
                    f" not committed it yet, so the partition is not read: {error}"
                ) from error
            # The branch is lost or has a heuristic outcome: retries are useless.
            _log.error(
                "messages of a decided batch are missing: partition=%s broker=%d"
                " transaction=%s error=%s",
                partition,
                broker_id,
                key_of(xid),
                error,
            )

    def hold(
        self, partition: TopicPartition, place: Place | None, begin: Offset
    ) -> None:
        """Record that a partition is held, and read from `begin`."""
        self._held[partition] = _Held(place, begin)

    def move(self, partition: TopicPartition, offset: Offset) -> None:
        """Record that a partition is read from another offset."""
        held = self._held.get(partition)
        if held is not None:
            self._held[partition] = _Held(held.place, offset, held.claim)

    def release(self, partitions: Collection[TopicPartition]) -> None:
        """Record that partitions are released: no more decisions about them."""
        for partition in partitions:
            self._held.pop(partition, None)

    async def wait_idle(self, *, deadline_s: float | None) -> None:
        """Wait until no decision is in progress, or until `deadline_s` (monotonic).

        None waits for at most `request_timeout_s`.
        """
        if deadline_s is None:
            deadline_s = self._context.deadline_s()
        left_s = max(0.0, deadline_s - self._context.clock.monotonic_s())
        with suppress(TimeoutError):
            async with asyncio.timeout(left_s), self._committer.storing:
                pass

    # -- a batch ----------------------------------------------------------------------

    def check(self) -> None:
        """Check that a batch can begin now.

        Raises:
            ConfigError: the group is not in ZooKeeper.
            TransactionError: another batch has not ended.
        """
        if self._fence() is None or self._context.coordinator is None:
            raise ConfigError(
                f"exactly_once: group {self._group} is not in ZooKeeper, which keeps"
                " the decisions; read as a member of a group, without partitions="
            )
        if self._open is not None:
            raise TransactionError(
                f"{shown(self._open)} of another batch of this consumer has not ended"
            )

    async def begin(
        self, begins: Mapping[TopicPartition, Offset], *, deadline_s: float
    ) -> XaTransactionId:
        """Complete the last batch, and name the transaction of the next one.

        A batch that is committed already may have messages that are not: its partitions
        are read again from their stored offsets.

        Args:
            begins: offset of the first message of each partition.
            deadline_s: monotonic.

        Raises:
            ConfigError: as `check`.
            TransactionError: as `check`, or this batch is committed.
            OwnershipLostError: a partition of the batch is no longer held.
            TransactionInDoubtError: a broker has not committed the last batch, which is
                decided.
            LostBranchError: a broker has lost a branch of the last batch.
            CoordinationError: ZooKeeper is not available.
        """
        self.check()
        for partition, begin in begins.items():
            known = self._held.get(partition)
            if known is not None and begin < known.begin:
                self.restart(tuple(begins))
                raise TransactionError(
                    f"{partition}: the batch begins at offset {begin}, and the group is"
                    f" at {known.begin} already: write each batch once"
                )
        held = self._require_held(begins)
        await self.complete(deadline_s=deadline_s)
        await self._roll_back_left(deadline_s)
        # Most loops ask for the next batch at once after any error.
        make = partial(self._make_token, begins)
        fence = await insist(self._context, make, deadline_s)
        self._number += 1
        self._claims = {partition: each.claim for partition, each in held.items()}
        self._open = batch_xid(self._group, fence.member, self._token, self._number)
        return self._open

    async def _make_token(
        self, begins: Collection[TopicPartition], *, deadline_s: float
    ) -> Fence:
        """Return the binding of our claims; a token of their session is there then."""
        self._require_held(begins)
        fence = self._fence()
        assert fence is not None
        if not self._token or self._token_session != fence.session_version:
            token = self._context.draw_token()
            await self._decisions.make_token(token, fence.member, deadline_s=deadline_s)
            self._token, self._token_session = token, fence.session_version
        return fence

    async def decide(
        self,
        xid: XaTransactionId,
        brokers: Collection[BrokerId],
        offsets: Mapping[TopicPartition, GroupOffset],
        *,
        deadline_s: float,
    ) -> None:
        """Store the offsets of a batch and the decision for it; durable on return.

        If it raises, the partitions are read again from their stored offsets.

        Args:
            xid: the transaction, whose branches are prepared.
            brokers: brokers of the branches.
            offsets: next offset of each partition.
            deadline_s: monotonic.

        Raises:
            TransactionInDoubtError: it may be decided; do not roll back.
            MetaqError: it is not decided, and never will be.

        Cancellation: it may be decided.
        """
        decision = make_decision(xid, brokers)
        async with self._committer.storing:
            try:
                held = self._require_held(offsets, self._claims)
                places = await _Deciding(
                    self._context,
                    self._decisions,
                    self._committer,
                    decision,
                    self._token,
                    self._token_session,
                    held,
                    offsets,
                    deadline_s,
                ).run()
            except BaseException:
                # Partitions resume at their stored offsets, after the token is dropped
                # and no request can change these any more.
                self._doubted.add(self._token)
                self._token = ""
                self.restart(tuple(offsets))
                raise
            self._note_decided(xid, decision, held, places)

    def _note_decided(
        self,
        xid: XaTransactionId,
        decision: GroupDecision,
        held: Mapping[TopicPartition, _Held],
        places: Mapping[TopicPartition, Place],
    ) -> None:
        stored: dict[TopicPartition, GroupOffset] = {}
        for partition, place in places.items():
            if place.decision == decision and place.offset is not None:
                held[partition].place = place
                held[partition].begin = place.offset.offset
                stored[partition] = place.offset
        self._pending = _Pending(
            xid, [(one, xid) for one in decision.brokers], tuple(held.values())
        )
        self._committer.note_stored(stored)
        if len(stored) < len(places):
            # Decided, and others have gone on from there since.
            self.restart([one for one in places if one not in stored])

    def _require_held(
        self,
        partitions: Collection[TopicPartition],
        claims: Mapping[TopicPartition, object] | None = None,
    ) -> dict[TopicPartition, _Held]:
        """Return the held partitions of a batch.

        Args:
            partitions: of the batch.
            claims: under which they were read; None: any.

        Raises:
            OwnershipLostError: one of them is not ours any more, or is ours again.
        """
        for partition in partitions:
            held = self._held.get(partition)
            if held is None or (claims and held.claim is not claims[partition]):
                raise OwnershipLostError(
                    f"{partition}: lost while its messages were being handled; they"
                    " will be delivered again"
                )
        return {partition: self._held[partition] for partition in partitions}

    # -- after the decision -----------------------------------------------------------

    async def complete(self, *, deadline_s: float) -> None:
        """Commit the last decided batch; retry until the deadline.

        Raises:
            TransactionInDoubtError: a broker has not committed it yet.
            LostBranchError: a broker has lost a branch of it.
        """
        pending = self._pending
        if pending is None:
            return
        was_sent, pending.was_sent = pending.was_sent, True
        failed = await self._endings(deadline_s).commit(
            pending.branches, was_sent=was_sent
        )
        late = {k: e for k, e in failed.items() if not isinstance(e, LOST)}
        for (broker_id, _), error in late.items():
            raise TransactionInDoubtError(
                f"{shown(pending.xid)} is decided, and its input is not delivered"
                f" again; broker {broker_id} has not committed it yet: the next batch"
                " of this consumer, or the next owner of its partitions, completes it:"
                f" {error}"
            ) from error
        self._pending = None
        is_ours = all(one in self._held.values() for one in pending.held)
        for (broker_id, _), error in failed.items():
            # If a partition was lost, its next owner may have completed the batch.
            if is_ours or not isinstance(error, LostBranchError):
                raise LostBranchError(
                    f"{shown(pending.xid)} is decided, but its messages at broker"
                    f" {broker_id} are missing: {error}"
                ) from error

    async def give_up(
        self, xid: XaTransactionId, brokers: Collection[BrokerId], *, deadline_s: float
    ) -> None:
        """Roll back an undecided batch; branches not reached are kept for later."""
        self._left.update((broker_id, xid) for broker_id in brokers)
        await self._roll_back_left(deadline_s)

    def refuse_commit(self) -> None:
        """Refuse a commit beside the decision, which would not wait for it.

        Raises:
            TransactionError: a batch has begun, and has not ended.
        """
        if self._open is not None:
            raise TransactionError(
                f"a block of exactly_once is open ({shown(self._open)}), and stores"
                " the offsets at its end: do not commit in it"
            )

    def end(self) -> None:
        """Record that the batch of the last `begin` has ended."""
        self._open = None

    async def _roll_back_left(self, deadline_s: float) -> None:
        left = {*self._left}
        kept = await self._endings(deadline_s).end(ROLLBACK, left)
        self._left.difference_update(left - kept)

    async def close(self, *, deadline_s: float) -> None:
        """Complete and roll back if possible; drop tokens. Logs errors, raises none."""
        if self._sweep is not None:
            self._sweep.cancel()
        if not self._token and not self._doubted:
            return
        try:
            await self.complete(deadline_s=deadline_s)
            await self._roll_back_left(deadline_s)
            for token in filter(None, (self._token, *self._doubted)):
                await self._decisions.drop_token(token, deadline_s=deadline_s)
        except MetaqError as error:
            _log.warning(
                "exactly-once batch not ended: group=%s: %s", self._group, error
            )

    # -- branches of dead members -----------------------------------------------------

    def _start_sweep(self) -> None:
        self._is_sweep_due = True
        if self._sweep is None or self._sweep.done():
            self._sweep = asyncio.create_task(self._run_sweep(), name="sweep")

    async def _run_sweep(self) -> None:
        while self._is_sweep_due:
            self._is_sweep_due = False
            deadline_s = self._context.clock.monotonic_s() + SWEEP_S
            try:
                await end_dead(self._context, self._group, deadline_s=deadline_s)
            except MetaqError as error:
                _log.info(
                    "batches of dead members may be left: group=%s: %s",
                    self._group,
                    error,
                )

    # -- inside -----------------------------------------------------------------------

    @property
    def _decisions(self) -> GroupDecisions:
        coordinator = self._context.coordinator
        assert coordinator is not None
        return GroupDecisions(coordinator, self._context.paths, group=self._group)

    def _endings(self, deadline_s: float) -> BranchEndings:
        return BranchEndings(self._context, deadline_s, name=qualifier_of(self._group))


@dataclass(slots=True, eq=False)
class _Deciding:
    """A decision in progress."""

    context: ClientContext
    decisions: GroupDecisions
    committer: Committer
    decision: GroupDecision
    token: str
    session_version: int
    """Version of the session that has the token and the claims."""
    held: Mapping[TopicPartition, _Held]
    offsets: Mapping[TopicPartition, GroupOffset]
    deadline_s: float
    was_sent: bool = False
    """Whether a request was sent and may still be carried out."""

    async def run(self) -> Mapping[TopicPartition, Place]:
        """Decide; return the new state of each partition.

        Raises:
            OwnershipLostError: it is not decided, and never will be.
            TransactionInDoubtError: it may be decided.
            CoordinationError: ZooKeeper is not available; it is not decided.
        """
        bases = {partition: each.place for partition, each in self.held.items()}
        if None in bases.values():
            bases = dict(await self._insist(self._read))
            self._require_unchanged(bases)
        refusal: NodeChangedError | None = None
        for _ in range(DECIDE_TRIES):
            moves = {p: (base, self.offsets[p]) for p, base in bases.items() if base}
            sent = await self._insist(partial(self._send, moves))
            if not isinstance(sent, NodeChangedError):
                return sent
            refusal = sent
            found = await self._insist(self._read)
            if any(place.decision == self.decision for place in found.values()):
                return found
            # ZooKeeper handles the requests of a session in order: this read shows that
            # none of the former requests was or will be carried out.
            self.was_sent = False
            self._require_unchanged(found)
            if found == bases:
                break
            bases = dict(found)
        raise OwnershipLostError(
            f"{self._names()}: the batch is not decided, another member may own its"
            f" partitions: {refusal}"
        ) from refusal

    async def _send(
        self, moves: Mapping[TopicPartition, tuple[Place, GroupOffset]]
    ) -> Mapping[TopicPartition, Place] | NodeChangedError:
        """Send the request; return the error if a node has changed."""
        operations = await self.decisions.plan(
            self.decision, self.token, moves, deadline_s=self.deadline_s
        )
        self._require_session()
        self.was_sent = True
        try:
            return await self.decisions.decide(
                self.decision, moves, operations, deadline_s=self.deadline_s
            )
        except NodeChangedError as error:
            return error

    async def _read(self) -> Mapping[TopicPartition, Place]:
        self._require_session()
        places = await all_of(
            self.decisions.read(one, deadline_s=self.deadline_s) for one in self.held
        )
        return dict(zip(self.held, places, strict=True))

    async def _insist(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Retry while ZooKeeper is away, until the deadline."""
        try:
            return await retry(
                ask,
                backoff=BACKOFF,
                deadline_s=self.deadline_s,
                clock=self.context.clock,
            )
        except CoordinationError as error:
            if not self.was_sent:
                raise
            raise TransactionInDoubtError(
                f"{self.decision.xid} is in doubt, not failed: the decision was sent"
                " to ZooKeeper, and may be carried out; the next owner of the"
                f" partitions finds out, and continues from there: {error}"
            ) from error

    def _require_session(self) -> None:
        assert self.context.coordinator is not None
        status = self.context.coordinator.status
        if (
            status.state is SessionState.LOST
            or status.session_version != self.session_version
        ):
            raise OwnershipLostError(
                f"{self._names()}: the session of the claims is lost; their messages"
                " will be delivered again"
            )

    def _require_unchanged(self, found: Mapping[TopicPartition, Place | None]) -> None:
        """Raise if others have written since our last read or decision."""
        for partition, place in found.items():
            base = self.held[partition].place or Place()
            stored = place.offset.offset if place and place.offset else None
            known = self.committer.stored(partition)
            version = place.decision_version if place else None
            if version != base.decision_version or stored != known:
                raise OwnershipLostError(
                    f"{partition}: expected the group at offset {known}, found"
                    f" {stored}: another member or a tool has moved it"
                )

    def _names(self) -> str:
        return name_few(sorted(map(str, self.held)))
