"""Assigns partitions to one member of a group, from the group's state in ZooKeeper.

Theory of operation. One task owns all state; events (members, partitions, the session,
a deleted owner node) only wake it, and events that arrive while it works are processed
together afterwards. An attempt computes the member's assignment from the latest members
and partitions and makes the necessary changes:

    revoke lost ones -> release them -> claim new ones -> read them -> announce them

Kept partitions are not touched. A claim of a partition that another member still owns
is repeated whenever an owner node of the topic is deleted, and after a back-off,
without a limit: the owner may be a dead process, whose session ends only after its
time-out. Failed attempts are repeated in the same way, without a limit.

    session       partitions read     action
    CONNECTED     our assignment      attempts
    SUSPENDED     as before           wait: the session and its nodes may still exist
    LOST          nothing, at once    wait for the next session; then register, claim

The coordinator guarantees LOST before ZooKeeper can give our partitions to others, even
if ZooKeeper does not answer.

All members have the same filter, or none (`QueueGroupDefinitions.agree`). A member
checks the filter before it registers, so that a wrong one disturbs nothing. Members
that start at the same time see the last one written by a watch, and those with another
filter leave.

    Invariant: every partition read was claimed under the session of `fence`.
    Invariant: a partition is only released after its `revoke` has ended.

Our nodes may be deleted or overwritten (by an operator, a wiped server, a faulty
member). So they are watched, and checked at intervals. A missing member node is created
again; a partition without our owner node is fenced, because another member may own it,
and claimed again.

Keep in step: `metaq/zk/groups.py`.
Source: docs/metaq-1.4/client.md 14 and 21 (3, 4, 10, 24).
"""

import asyncio
import logging
import math
from collections.abc import Callable, Collection
from functools import partial
from typing import Final

from metaq.assignment import Strategy, assignment_of, plan_rebalance
from metaq.client.cluster.context import ClientContext
from metaq.client.cluster.queue_groups import QueueGroupDefinitions, where_of
from metaq.client.errors import GroupInUseError, NotSettledError
from metaq.client.fan_out import for_each, raise_first
from metaq.client.group.assignments import RETRY, AssignmentSink, Fence
from metaq.client.group.subscribed_topics import SubscribedTopics
from metaq.client.names import name_few, name_some
from metaq.cluster_snapshot import ClusterSnapshot
from metaq.errors import ClosedError, MetaqError, SessionLostError
from metaq.model import TopicPartition, printable
from metaq.retry import wait_set
from metaq.zk.errors import CoordinationTimeoutError, MemberTakenError
from metaq.zk.groups import GroupMembership, Members
from metaq.zk.paths import NodeKind
from metaq.zk.session import Cancel, SessionState, SessionStatus

_log = logging.getLogger(__name__)

HANDOVER_S_MAX: Final = 10.0
"""Maximum wait for other members' partitions that is logged as info, not a warning."""
UNOWNED_S_MIN: Final = 30.0
"""Time without an owner after which a partition is a problem, in seconds; the session
time-out, if longer, because nodes of a dead member exist so long."""
CHECK_S: Final = 30.0
"""Interval between checks that our nodes exist, in seconds."""

Partitions = Collection[TopicPartition]
_Claims = dict[TopicPartition, bool | MetaqError]
"""Partition → whether the claim succeeded, or its error."""


class GroupSource:
    """The partitions of one member of a group; a `PartitionSource`.

    Lifecycle: `start` once, `stop` once. Concurrency: one event loop.
    """

    def __init__(
        self,
        context: ClientContext,
        *,
        group: str,
        consumer_id: str,
        topics: SubscribedTopics,
        strategy: Strategy,
        where: str | None = None,
    ) -> None:
        """Prepare; nothing is written before `start`.

        Args:
            context: the client's parts, including ZooKeeper, whose session owns our
                nodes. `request_timeout_s` bounds each request, `session_timeout_s` the
                life of a dead process' nodes.
            group: name of the group.
            consumer_id: id, unique among all consumers of the group on all machines.
            topics: subscribed topics, followed as they change; they need not exist.
            strategy: strategy, which must be the same in all members.
            where: filter of all members; None: none.
        """
        self.unsettled_since_s: float | None = None
        self.last_error: MetaqError | None = None
        self._logged_level = logging.NOTSET
        self.rebalance_count = 0
        coordinator = context.coordinator
        assert coordinator is not None, "groups are kept in ZooKeeper"
        self._coordinator = coordinator
        self._paths = context.paths
        self._metadata = context.metadata
        self._clock = context.clock
        self._options = context.options
        self._deadline_s = context.deadline_s
        self._subscribed = topics
        self._topics: list[str] = []
        self._topic_watches: dict[str, Cancel] = {}
        self._strategy = strategy
        self._membership = GroupMembership(
            coordinator, context.paths, group=group, consumer_id=consumer_id
        )
        self._group, self._member = group, self._membership.member
        self._members: Members = {}
        self._owners: dict[str, frozenset[str]] = {}
        self._unowned_since_s: dict[TopicPartition, float] = {}
        self._active: set[TopicPartition] = set()
        self._owner_watches: dict[TopicPartition, Cancel] = {}
        self._check_due_s = 0.0
        """Monotonic time from which the next attempt checks that our nodes exist."""
        self._session_version = 0
        self._where = self._seen_where = where
        self._is_log_group = False
        """Whether it was checked that there is no queue group of this name."""
        self._is_stopping = False
        self._wake = asyncio.Event()
        self._joined = asyncio.Event()
        self._attempted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._taking: asyncio.Task[_Claims] | None = None
        self._cancels: list[Callable[[], None]] = []
        self._sink: AssignmentSink
        """Set by `start`, before any partition is active."""

    @property
    def fence(self) -> Fence:
        """Fence of commits: our name, and the session of our claims."""
        return Fence(self._member, self._session_version)

    # -- life -------------------------------------------------------------------------

    async def start(self, sink: AssignmentSink) -> None:
        """Join the group and make the first assignment.

        Does not wait for partitions that other members still own; they follow later.

        Raises:
            MemberTakenError: another member has our name, and did not end within the
                session time-out.
            CoordinationError: ZooKeeper was not reached within `request_timeout_s`.
            QueueGroupError: the name is a queue group's.
            GroupInUseError: other members have another filter.
            ClosedError: `stop` was called during the call.
            MetaqError: the initial offsets cannot be found; not retriable.

        Cancellation: the group is left in the background.
        """
        self._sink = sink
        self.unsettled_since_s = self._clock.monotonic_s()
        try:
            self._watch()
            self._task = asyncio.create_task(self._run(), name=f"group {self._group}")
            await self._wait_first()
        except asyncio.CancelledError:
            # Do not make a cancelled caller wait until the group is left.
            await self.stop(deadline_s=self._clock.monotonic_s())
            raise
        except BaseException:
            await self.stop()
            raise

    async def _wait_first(self) -> None:
        options = self._options
        for wait_s in (options.request_timeout_s, options.session_timeout_s):
            if await wait_set(self._joined, wait_s):
                break
            # The name of a killed process is free after the end of its session.
            if not isinstance(self.last_error, MemberTakenError):
                break
        if not self._joined.is_set():
            self._metadata.require_reachable(options.request_timeout_s)
            raise self.last_error or CoordinationTimeoutError(
                f"group {self._group}: expected to join within"
                f" {options.request_timeout_s:g} s, ZooKeeper gave no answer"
            )
        await self._attempted.wait()
        if self._is_stopping:
            raise ClosedError(f"group {self._group}: left while joining")
        if self.last_error is not None and not self.last_error.retriable:
            raise self.last_error

    async def stop(self, *, deadline_s: float | None = None) -> None:
        """Revoke and release all partitions, leave the group; never raises.

        Bounded by the sink's `revoke`, by `request_timeout_s` and by `deadline_s`.
        Nodes that could not be deleted by then are deleted when ZooKeeper answers, or
        at the end of the session.

        Cancellation: all partitions are fenced, and the group is left anyway.
        """
        if self._is_stopping:
            return
        self._is_stopping = True
        for event in (self._wake, self._joined, self._attempted):
            event.set()
        if self._taking is not None:
            self._taking.cancel()
        try:
            if self._task is not None:
                # Cancel an attempt that takes too long. Partitions that it was revoking
                # are still active and are revoked below.
                timeout_s = self._left_s(deadline_s) / 2
                _done, late = await asyncio.wait({self._task}, timeout=timeout_s)
                if late:
                    self._task.cancel()
                    await asyncio.wait({self._task})
            await self._revoke(self._active)
        except asyncio.CancelledError:
            if self._task is not None:
                self._task.cancel()
            self._fence(frozenset(self._active))
            raise
        finally:
            # Always leave: a member that does not read would block its partitions.
            self._leaving = asyncio.create_task(self._leave(), name="group left")
        limit_s = min(self._options.request_timeout_s, self._left_s(deadline_s))
        _done, late = await asyncio.wait({self._leaving}, timeout=limit_s)
        if late:
            text = "group is not left yet: group=%s member=%s: no answer within %.1f s"
            _log.warning(text, self._group, self._member, limit_s)

    def _left_s(self, deadline_s: float | None) -> float:
        if deadline_s is None:
            return math.inf
        return max(0.0, deadline_s - self._clock.monotonic_s())

    async def _leave(self) -> None:
        """Delete our nodes; stop when their session ends."""
        session_version = self._coordinator.status.session_version
        attempt_count = 0
        while True:
            self._wake.clear()
            status = self._coordinator.status
            if _is_lost(status, session_version):
                break
            try:
                await self._release(self._owned())
                await self._membership.unregister(deadline_s=self._deadline_s())
                break
            except MetaqError as error:
                text = "group not left, trying again: group=%s: %s"
                _log.debug(text, self._group, error)
                attempt_count += 1
                await self._pause(attempt_count)
        self._cancels += [*self._owner_watches.values(), *self._topic_watches.values()]
        for cancel in self._cancels:
            cancel()

    # -- events that wake the task ----------------------------------------------------

    def _watch(self) -> None:
        cancels = self._cancels
        cancels.append(self._coordinator.add_listener(self._on_status))
        cancels.append(self._metadata.add_listener(self._on_snapshot))
        cancels.append(self._membership.watch_members(self._on_members))
        filter_path = self._paths.group_filter(self._group)
        cancels.append(self._coordinator.watch_data(filter_path, self._on_filter))
        self._follow_topics()

    def _follow_topics(self) -> None:
        """Adopt the subscribed topics; watch the owners of new ones."""
        self._topics = sorted(set(self._subscribed))
        for topic in self._topic_watches.keys() - set(self._topics):
            self._topic_watches.pop(topic)()
            self._owners.pop(topic, None)
        for topic in self._topics:
            if topic not in self._topic_watches:
                self._topic_watches[topic] = self._watch_owners(topic)

    def _on_status(self, status: SessionStatus) -> None:
        if self._session_version and _is_lost(status, self._session_version):
            # Stop at once, because others may own our partitions already.
            if self._taking is not None:
                self._taking.cancel()
            self._fence(frozenset(self._active))
            if not self._is_stopping:
                text = f"the session of member {self._member} is lost"
                self._note_unsettled(SessionLostError(text))
        if status.state is not SessionState.SUSPENDED:
            self._wake.set()

    def _on_snapshot(self, snapshot: ClusterSnapshot) -> None:
        self._follow_topics()
        self._note_unowned(snapshot)
        self._wake.set()

    def _on_members(self, members: Members) -> None:
        self._members = members
        self._wake.set()

    def _on_filter(self, data: bytes | None) -> None:
        self._seen_where = where_of(data)
        self._wake.set()

    def _watch_owners(self, topic: str) -> Callable[[], None]:
        path = self._paths.group_partitions(NodeKind.OWNER, self._group, topic)
        return self._coordinator.watch_children(path, partial(self._on_owners, topic))

    def _on_owners(self, topic: str, names: tuple[str, ...] | None) -> None:
        self._owners[topic] = frozenset(names or ())
        self._note_unowned(self._metadata.snapshot)
        if self.unsettled_since_s is not None:
            self._wake.set()

    def _watch_our_owners(self) -> None:
        """Watch exactly the owner nodes of the partitions that are read."""
        for partition in self._owner_watches.keys() - self._active:
            self._owner_watches.pop(partition)()
        for partition in self._active - self._owner_watches.keys():
            self._owner_watches[partition] = self._membership.watch_owner(
                partition, partial(self._on_owner_changed, partition)
            )

    def _on_owner_changed(self, partition: TopicPartition) -> None:
        # A released partition is no longer active.
        if partition in self._active:
            self._check_due_s = 0.0
            self._wake.set()

    # -- the task ---------------------------------------------------------------------

    async def _run(self) -> None:
        failure_count = 0
        while not self._is_stopping:
            self._wake.clear()
            if self._coordinator.status.state is SessionState.CONNECTED:
                is_settled = await self._attempt()
                failure_count = 0 if is_settled else failure_count + 1
            await self._pause(failure_count)

    async def _pause(self, failure_count: int) -> None:
        """Wait for an event, at most until the next attempt or check is due."""
        limit_s = RETRY.delay_s(failure_count) if failure_count else CHECK_S
        await wait_set(self._wake, limit_s)

    async def _attempt(self) -> bool:
        """Try to read our assignment; return whether all is read. Never raises."""
        try:
            is_settled = await self._settle()
        except MetaqError as error:
            is_settled = False
            self._note_unsettled(error)
        except Exception as error:  # noqa: BLE001  # the next attempt may succeed
            is_settled = False
            _log.exception("rebalance failed: group=%s", self._group)
            self._note_unsettled(MetaqError(f"rebalance failed: {error!r}"))
        if is_settled:
            self.unsettled_since_s = self.last_error = None
        elif self.unsettled_since_s is None:
            self.unsettled_since_s = self._clock.monotonic_s()
        self._watch_our_owners()
        if self._joined.is_set():
            self._attempted.set()
        return is_settled

    async def _settle(self) -> bool:
        """Make one attempt; return False if members or partitions are not known yet.

        Raises:
            MetaqError: one of our partitions could not be read, or a revoked one not
                released; the attempt has done the rest.
        """
        began_s = self._clock.monotonic_s()
        if not self._subscribed.is_known:
            return False
        await self._register()
        assignment = self._assignment()
        if assignment is None:
            return False
        self._joined.set()
        await self._refuse_queue_group()
        if self._seen_where != self._where:
            # A member that started at the same time has written another filter.
            await self._agree()
        if self._clock.monotonic_s() >= self._check_due_s:
            self._fence(await self._find_lost())
        plan = plan_rebalance(
            owned=self._owned(), active=self._active, assignment=assignment
        )
        removed = plan.revoke.intersection(self._active)
        await self._revoke(plan.revoke)
        release_error = None
        try:
            await self._release(plan.revoke)
        except MetaqError as error:
            release_error = error
        try:
            await self._take(plan.claim)
        finally:
            added = plan.claim & self._active
            self._sink.announce(added)
            self._report(added, removed, began_s)
        if release_error is not None:
            raise release_error
        return not self._is_stopping

    async def _find_lost(self) -> set[TopicPartition]:
        """Return the partitions that are read without owning their node in ZooKeeper.

        Raises:
            MetaqError: ZooKeeper could not be asked; the check stays due.
        """
        # First, so that a change from here on causes another check.
        self._check_due_s = self._clock.monotonic_s() + CHECK_S
        try:
            deadline_s = self._deadline_s()
            if not await self._membership.is_registered(deadline_s=deadline_s):
                deadline_s = self._deadline_s()
                await self._membership.register(self._topics, deadline_s=deadline_s)
            owns = partial(self._membership.owns, deadline_s=self._deadline_s())
            answers = await for_each(owns, self._active)
            raise_first(answers)
        except MetaqError:
            self._check_due_s = 0.0
            raise
        # Only active ones: the session may have ended in between.
        lost = {one for one, is_ours in answers.items() if not is_ours} & self._active
        if lost:
            _log.error(
                "owner nodes of ours were deleted or overwritten: group=%s member=%s"
                " partitions=%s",
                self._group,
                self._member,
                name_some(lost),
            )
        return lost

    async def _register(self) -> None:
        session_version = self._coordinator.status.session_version
        if session_version != self._session_version or not self._is_listed():
            await self._agree()
            self._session_version = await self._membership.register(
                self._topics, deadline_s=self._deadline_s()
            )

    async def _agree(self) -> None:
        """Leave the group if its other members have another filter.

        Raises:
            GroupInUseError: they have another filter.
        """
        try:
            await self._groups().agree(self._group, self._member, self._where)
        except GroupInUseError:
            # Have `start` raise the error at once.
            self._joined.set()
            await self._revoke(self._active)
            await self._release(self._owned())
            await self._membership.unregister(deadline_s=self._deadline_s())
            raise

    async def _refuse_queue_group(self) -> None:
        # After our registration, because the creator of a queue group looks for members
        # before it writes.
        if not self._is_log_group:
            await self._groups().refuse(self._group)
            self._is_log_group = True

    def _groups(self) -> QueueGroupDefinitions:
        return QueueGroupDefinitions(self._coordinator, self._paths, self._deadline_s())

    def _is_listed(self) -> bool:
        """Return whether we are a member of the group, with our present topics."""
        return self._members.get(self._member) == tuple(self._topics)

    def _assignment(self) -> frozenset[TopicPartition] | None:
        """Return our assigned partitions; None while members or topics are unknown."""
        snapshot, member = self._metadata.snapshot, self._member
        if not self._is_listed() or not snapshot.topics.issuperset(self._topics):
            return None
        return assignment_of(
            member,
            strategy=self._strategy,
            members=self._members,
            partitions={t: snapshot.get_partitions(t) for t in self._topics},
        )

    # -- steps ------------------------------------------------------------------------

    def restart(self, partitions: Partitions) -> None:
        """Fence partitions, and soon read those still assigned again; never waits."""
        self._fence(self._active.intersection(partitions))
        self._wake.set()

    def _owned(self) -> frozenset[TopicPartition]:
        return self._membership.claims | self._membership.unanswered_claims

    def _fence(self, partitions: Partitions) -> None:
        if partitions:
            self._sink.fence(partitions)
            self._active.difference_update(partitions)

    async def _revoke(self, partitions: Partitions) -> None:
        revoked = self._active.intersection(partitions)
        if revoked:
            # Active until it ends, because the session may be lost during it.
            await self._sink.revoke(revoked)
            self._active -= revoked

    async def _release(self, partitions: Partitions) -> None:
        release = partial(self._membership.release, deadline_s=self._deadline_s())
        raise_first(await for_each(release, partitions))

    async def _take(self, partitions: Partitions) -> None:
        """Claim partitions and begin to read them.

        Raises:
            NotSettledError: other members own some of them.
            SessionLostError: the session was lost during the call.
            MetaqError: some of them could not be claimed or read.
        """
        deadline_s = self._deadline_s()

        async def take(partition: TopicPartition) -> bool:
            if not await self._membership.claim(partition, deadline_s=deadline_s):
                return False
            await self._sink.assign([partition])
            # No await before this, so that a fence finds the partition in the set.
            self._active.add(partition)
            if _is_lost(self._coordinator.status, self._session_version):
                # The session ended before this answer was processed.
                self._fence([partition])
                return False
            return True

        if self._is_stopping or not partitions:
            return
        # A separate task, so that a lost session can cancel it before it reads.
        self._taking = asyncio.create_task(for_each(take, sorted(partitions)))
        try:
            await asyncio.wait({self._taking})
            if self._taking.cancelled():
                raise SessionLostError(
                    f"member {self._member}: the claims were interrupted"
                )
            results = self._taking.result()
        finally:
            self._taking = None
        raise_first(results)
        held = [partition for partition, is_ours in results.items() if not is_ours]
        if held:
            raise NotSettledError(
                f"group {self._group}: {len(held)} of our partitions are still owned"
                f" by other members: {name_some(held)}"
            )

    # -- state ------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """Return a sentence about partitions that have long had no owner, if any."""
        self._note_unowned(self._metadata.snapshot)
        now_s = self._clock.monotonic_s()
        bound_s = max(UNOWNED_S_MIN, self._options.session_timeout_s)
        since_s = {
            partition: since_s
            for partition, since_s in self._unowned_since_s.items()
            if now_s - since_s >= bound_s
        }
        if not since_s:
            return []
        names = printable(name_few(sorted(self._members)))
        unowned_s = now_s - min(since_s.values())
        text = (
            f"{len(since_s)} partitions without an owner for {unowned_s:.0f} s"
            f" ({name_some(since_s)}): the {len(self._members)} members of the group"
            f" ({names}) have assignments, and some do not take theirs"
        )
        return [text]

    def _note_unowned(self, snapshot: ClusterSnapshot) -> None:
        now_s, before = self._clock.monotonic_s(), self._unowned_since_s
        self._unowned_since_s = {
            partition: before.get(partition, now_s)
            for topic, owned in self._owners.items()
            for partition in snapshot.get_partitions(topic)
            if partition.name not in owned
        }

    def _report(self, added: Partitions, removed: Partitions, began_s: float) -> None:
        if not added and not removed:
            return
        self.rebalance_count += 1
        _log.info(
            "rebalanced: group=%s member=%s rebalances=%d added=%d removed=%d"
            " partitions=%d duration_ms=%d",
            self._group,
            self._member,
            self.rebalance_count,
            len(added),
            len(removed),
            len(self._active),
            (self._clock.monotonic_s() - began_s) * 1000,
        )

    def _note_unsettled(self, error: MetaqError) -> None:
        """Keep the error; log it once for each type of error in a row."""
        self.unsettled_since_s = self.unsettled_since_s or self._clock.monotonic_s()
        waited_s = self._clock.monotonic_s() - self.unsettled_since_s
        is_event = isinstance(error, NotSettledError) and waited_s <= HANDOVER_S_MAX
        level = logging.INFO if is_event else logging.WARNING
        if type(error) is not type(self.last_error) or level > self._logged_level:
            text = "partitions of ours are not read: group=%s member=%s: %s"
            _log.log(level, text, self._group, self._member, error)
            self._logged_level = level
        self.last_error = error


def _is_lost(status: SessionStatus, session_version: int) -> bool:
    is_other = status.session_version != session_version
    return is_other or status.state is SessionState.LOST
