"""A group's decisions: from members and partitions in ZooKeeper to our assignment.

Theory of operation. One task owns everything; whatever happens (members, partitions,
the session, an owner node that went) only wakes it, and events while it works are
looked at once when it has finished. An attempt computes our assignment from the latest
members and partitions and goes there by the shortest way:

    revoke lost ones -> release them -> claim new ones -> read them

Kept partitions are not touched. One that another member still owns is claimed again
whenever an owner of the topic goes, and after a back-off, for as long as it takes: it
may be the partition of a process that died, whose session ends a whole time-out later.
An attempt that fails is made again in the same way; there is no last one.

    session       what we read        what we do
    CONNECTED     our assignment      attempts
    SUSPENDED     as before           wait: the session, and what we own, may live on
    LOST          nothing, at once    wait for the next session; then register, claim

LOST comes before ZooKeeper gives our partitions away, also when it fell silent: the
coordinator promises that.

    Invariant: every partition read was claimed under the session of `fence`.
    Invariant: a partition is released after `revoke` of it has ended, never before.

Our nodes may be deleted or overwritten by others: an operator, a wiped server, a
confused member. So they are watched, and looked for now and then. A member node is made
again; a partition without its owner node is fenced, because another member may have it,
and claimed again.

Keep in step: `metaq/zk/groups.py`. Source: client spec 14 and 21 (3, 4, 10, 24).
"""

import asyncio
import logging
import math
from collections.abc import Callable, Collection
from functools import partial
from typing import Final

from metaq.assignment import Strategy, assignment_of, plan_rebalance
from metaq.client.cluster.metadata import Metadata
from metaq.client.errors import NotSettledError
from metaq.client.fan_out import for_each, raise_first
from metaq.client.group.assignments import RETRY, AssignmentSink, Fence
from metaq.client.names import name_few, name_some
from metaq.client.options import ClientOptions
from metaq.clock import Clock
from metaq.cluster_snapshot import ClusterSnapshot
from metaq.errors import ClosedError, MetaqError, SessionLostError
from metaq.model import TopicPartition, printable
from metaq.retry import wait_set
from metaq.zk.errors import CoordinationTimeoutError, MemberTakenError
from metaq.zk.groups import GroupMembership, Members
from metaq.zk.paths import NodeKind, NodePaths
from metaq.zk.session import Cancel, Coordinator, SessionState, SessionStatus

log = logging.getLogger(__name__)

HANDOVER_S_MAX: Final = 10.0
"""Longest wait for partitions of others that is an event, not yet a warning."""
UNOWNED_S_MIN: Final = 30.0
"""Partitions that no member has taken for less are about to be taken; for longer where
the nodes of a dead member last longer."""
CHECK_S: Final = 30.0
"""Interval of the checks that our nodes are there, seconds."""

Partitions = Collection[TopicPartition]


class GroupSource:
    """The partitions of one member of a group; a `PartitionSource`.

    Lifecycle: `start` once, `stop` once. Concurrency: one event loop.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        paths: NodePaths,
        metadata: Metadata,
        *,
        group: str,
        consumer_id: str,
        topics: Collection[str],
        strategy: Strategy,
        clock: Clock,
        options: ClientOptions,
    ) -> None:
        """Prepare; nothing is written before `start`.

        Args:
            coordinator: the session that ownership is bound to; the client's.
            paths: where MetaQ's root is.
            metadata: tells the topics' partitions.
            group: name of the group.
            consumer_id: unique among all consumers of the group, wherever they run.
            topics: subscribed topics; they need not exist.
            strategy: the same as that of all other members.
            clock: for deadlines.
            options: `request_timeout_s` bounds each question, `session_timeout_s`
                bounds the life of nodes left by a dead process.
        """
        self.unsettled_since_s: float | None = None
        """Monotonic time since which we lack some of our partitions; None: we have
        all."""
        self.last_error: MetaqError | None = None
        """Error of the last attempt; None when it succeeded."""
        self._told_level = logging.NOTSET
        self.rebalance_count = 0
        """Rebalances so far that changed what is read."""
        self._coordinator = coordinator
        self._paths = paths
        self._metadata = metadata
        self._topics = sorted(set(topics))
        self._strategy = strategy
        self._clock = clock
        self._options = options
        self._membership = GroupMembership(
            coordinator, paths, group=group, consumer_id=consumer_id
        )
        self._node_check = NodeCheck(self._membership, self._topics, clock=clock)
        self._members: Members = {}
        self._owners: dict[str, frozenset[str]] = {}
        self._unowned_since_s: dict[TopicPartition, float] = {}
        self._active: set[TopicPartition] = set()
        self._session_version = 0
        self._is_stopping = False
        self._wake = asyncio.Event()
        self._joined = asyncio.Event()
        self._attempted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._taking: asyncio.Task[dict[TopicPartition, bool | MetaqError]] | None = (
            None
        )
        self._leaving: asyncio.Task[None] | None = None
        self._cancels: list[Callable[[], None]] = []
        self._sink: AssignmentSink | None = None

    @property
    def fence(self) -> Fence:
        """Binding of commits: our name, and the session of our claims."""
        return Fence(self._membership.member, self._session_version)

    # -- life -------------------------------------------------------------------------

    async def start(self, sink: AssignmentSink) -> None:
        """Join the group and make the first assignment.

        Does not wait for partitions of other members: those come later.

        Raises:
            MemberTakenError: another member has our name, and did not die within the
                session time-out.
            CoordinationError: ZooKeeper was not reached within `request_timeout_s`.
            ClosedError: `stop` was called meanwhile.
            MetaqError: where reading begins cannot be said, and never will.

        Cancellation: the group is left, without waiting for that.
        """
        self._sink = sink
        self.unsettled_since_s = self._clock.monotonic_s()
        try:
            self._watch()
            self._task = asyncio.create_task(
                self._run(sink), name=f"group {self._membership.group}"
            )
            await self._wait_first()
        except asyncio.CancelledError:
            # A caller that gave up does not wait until we have left.
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
            # A name that a killed process left behind goes with its session.
            if not isinstance(self.last_error, MemberTakenError):
                break
        if not self._joined.is_set():
            raise self.last_error or CoordinationTimeoutError(
                f"group {self._membership.group}: expected to join within"
                f" {options.request_timeout_s:g} s, ZooKeeper gave no answer"
            )
        await self._attempted.wait()
        if self._is_stopping:
            raise ClosedError(f"group {self._membership.group}: left while joining")
        if self.last_error is not None and not self.last_error.retriable:
            raise self.last_error

    async def stop(self, *, deadline_s: float | None = None) -> None:
        """Revoke and release all partitions, leave the group; never raises.

        Bounded by the sink's `revoke` and `request_timeout_s`, and by `deadline_s`.
        Nodes that could not be deleted by then are deleted when ZooKeeper answers, or
        go with the session.

        Cancellation: all partitions are fenced, and the group left all the same.
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
                await self._end_task(self._task, deadline_s)
            if self._sink is not None:
                await self._revoke(self._sink, self._active)
        except asyncio.CancelledError:
            if self._task is not None:
                self._task.cancel()
            self._fence(frozenset(self._active))
            raise
        finally:
            # A member that stays and reads nothing keeps its assignment from all
            # others.
            self._leaving = asyncio.create_task(self._leave(), name="group left")
        limit_s = min(self._options.request_timeout_s, self._left_s(deadline_s))
        _done, late = await asyncio.wait({self._leaving}, timeout=limit_s)
        if late:
            log.warning(
                "group is not left yet: group=%s member=%s: no answer within %.1f s",
                self._membership.group,
                self._membership.member,
                limit_s,
            )

    async def _end_task(
        self, task: asyncio.Task[None], deadline_s: float | None
    ) -> None:
        """Wait for the end of an attempt; one that takes too long is cancelled."""
        _done, late = await asyncio.wait({task}, timeout=self._left_s(deadline_s) / 2)
        if late:
            # A partition that it was revoking is still read: the caller goes on with
            # it.
            task.cancel()
            await asyncio.wait({task})

    def _left_s(self, deadline_s: float | None) -> float:
        if deadline_s is None:
            return math.inf
        return max(0.0, deadline_s - self._clock.monotonic_s())

    async def _leave(self) -> None:
        """Delete our nodes, for as long as the session lives that they live with."""
        session_version = self._coordinator.status.session_version
        attempt_count = 0
        while True:
            self._wake.clear()
            status = self._coordinator.status
            if (
                status.state is SessionState.LOST
                or status.session_version != session_version
            ):
                break
            try:
                await self._release(self._owned())
                await self._membership.unregister(deadline_s=self._deadline_s())
                break
            except MetaqError as error:
                log.debug(
                    "group not left, trying again: group=%s: %s",
                    self._membership.group,
                    error,
                )
                attempt_count += 1
                await self._pause(attempt_count)
        self._node_check.watch(set(), self._wake.set)
        for cancel in self._cancels:
            cancel()

    # -- events that wake the
    # task---------------------------------------------------------

    def _watch(self) -> None:
        for topic in self._topics:
            self._metadata.watch_topic(topic)
        cancels = self._cancels
        cancels.append(self._coordinator.add_listener(self._on_status))
        cancels.append(self._metadata.add_listener(self._on_news))
        cancels.append(self._membership.watch_members(self._on_members))
        cancels.extend(map(self._watch_owners, self._topics))

    def _on_status(self, status: SessionStatus) -> None:
        if self._session_version and self._is_lost(status):
            self._stop_reading(
                SessionLostError(f"the session of member {self.fence.member} is lost")
            )
        if status.state is not SessionState.SUSPENDED:
            self._wake.set()

    def _is_lost(self, status: SessionStatus) -> bool:
        return (
            status.state is SessionState.LOST
            or status.session_version != self._session_version
        )

    def _stop_reading(self, reason: MetaqError) -> None:
        """Stop at once: our nodes may be gone, and others may own them."""
        if self._taking is not None:
            self._taking.cancel()
        self._fence(frozenset(self._active))
        if not self._is_stopping:
            self._note_unsettled(reason)

    def _on_news(self, snapshot: ClusterSnapshot) -> None:
        self._note_unowned(snapshot)
        self._wake.set()

    def _on_members(self, members: Members) -> None:
        self._members = members
        self._wake.set()

    def _watch_owners(self, topic: str) -> Callable[[], None]:
        path = self._paths.group_partitions(
            NodeKind.OWNER, self._membership.group, topic
        )
        on_owners = partial(self._on_owners, topic)
        return self._coordinator.watch_children(path, on_owners)

    def _on_owners(self, topic: str, names: tuple[str, ...] | None) -> None:
        self._owners[topic] = frozenset(names or ())
        self._note_unowned(self._metadata.snapshot)
        expected = {p.name for p in self._active if p.topic == topic}
        if not expected.issubset(names or ()):
            self._node_check.ask_soon()
            self._wake.set()
        elif self.unsettled_since_s is not None:
            self._wake.set()

    # -- the task ---------------------------------------------------------------------

    async def _run(self, sink: AssignmentSink) -> None:
        failure_count = 0
        while not self._is_stopping:
            self._wake.clear()
            if self._coordinator.status.state is SessionState.CONNECTED:
                is_settled = await self._attempt(sink)
                failure_count = 0 if is_settled else failure_count + 1
            await self._pause(failure_count)

    async def _pause(self, failure_count: int) -> None:
        """Wait until woken, or it is time to try or to check again."""
        limit_s = RETRY.delay_s(failure_count) if failure_count else CHECK_S
        await wait_set(self._wake, limit_s)

    async def _attempt(self, sink: AssignmentSink) -> bool:
        """Try to get our partitions; return whether we have all. Never raises."""
        try:
            is_settled = await self._settle(sink)
        except MetaqError as error:
            is_settled = False
            self._note_unsettled(error)
        except Exception as error:
            is_settled = False
            log.exception("rebalance failed: group=%s", self._membership.group)
            self._note_unsettled(MetaqError(f"rebalance failed: {error!r}"))
        if is_settled:
            self.unsettled_since_s = self.last_error = None
        elif self.unsettled_since_s is None:
            self.unsettled_since_s = self._clock.monotonic_s()
        self._node_check.watch(self._active, self._wake.set)
        if self._joined.is_set():
            self._attempted.set()
        return is_settled

    async def _settle(self, sink: AssignmentSink) -> bool:
        """Make one attempt; False: there is nothing to go by yet.

        Raises:
            MetaqError: something of our assignment is not read, or of another's not
                released; what could be done is done.
        """
        began_s = self._clock.monotonic_s()
        await self._register()
        assignment = self._assignment()
        if assignment is None:
            return False
        self._joined.set()
        lost = await self._node_check.find_lost(self._active, self._deadline_s)
        self._fence(lost)
        plan = plan_rebalance(
            owned=self._owned(), active=self._active, assignment=assignment
        )
        removed = plan.revoke.intersection(self._active)
        release_error = await self._revoke_and_release(sink, plan.revoke)
        try:
            await self._take(sink, plan.claim)
        finally:
            self._report(plan.claim & self._active, removed, began_s)
        if release_error is not None:
            raise release_error
        return not self._is_stopping

    async def _register(self) -> None:
        session_version = self._coordinator.status.session_version
        if session_version != self._session_version or not self._is_listed():
            self._session_version = await self._membership.register(
                self._topics, deadline_s=self._deadline_s()
            )

    def _is_listed(self) -> bool:
        """Return whether the group has us as its member, with our topics."""
        return self._members.get(self._membership.member) == tuple(self._topics)

    def _assignment(self) -> frozenset[TopicPartition] | None:
        """Return our wanted partitions; None while they are unknown."""
        snapshot, member = self._metadata.snapshot, self._membership.member
        if not self._is_listed() or not snapshot.topics.issuperset(self._topics):
            return None
        return assignment_of(
            member,
            strategy=self._strategy,
            members=self._members,
            partitions={t: snapshot.get_partitions(t) for t in self._topics},
        )

    # -- steps ------------------------------------------------------------------------

    def _owned(self) -> frozenset[TopicPartition]:
        return self._membership.claims | self._membership.unanswered_claims

    def _fence(self, partitions: Partitions) -> None:
        assert self._sink is not None
        if partitions:
            self._sink.fence(partitions)
            self._active.difference_update(partitions)

    async def _revoke(self, sink: AssignmentSink, partitions: Partitions) -> None:
        revoked = self._active.intersection(partitions)
        if revoked:
            # Until it ends they count as read, for the session may be lost meanwhile.
            await sink.revoke(revoked)
            self._active -= revoked

    async def _revoke_and_release(
        self, sink: AssignmentSink, partitions: Partitions
    ) -> MetaqError | None:
        """Revoke and release; return why something was not released."""
        await self._revoke(sink, partitions)
        try:
            await self._release(partitions)
        except MetaqError as error:
            return error
        return None

    async def _release(self, partitions: Partitions) -> None:
        release = partial(self._membership.release, deadline_s=self._deadline_s())
        raise_first(await for_each(release, partitions))

    async def _take(self, sink: AssignmentSink, partitions: Partitions) -> None:
        """Claim and begin to read.

        Raises:
            NotSettledError: others own some of them.
            SessionLostError: the session was lost meanwhile.
            MetaqError: some of them could not be claimed or read.
        """
        deadline_s = self._deadline_s()

        async def take(partition: TopicPartition) -> bool:
            if not await self._membership.claim(partition, deadline_s=deadline_s):
                return False
            await sink.assign([partition])
            # No await between: a fence in between must find it.
            self._active.add(partition)
            if self._is_lost(self._coordinator.status):
                # The last answer came with the end of the session, and overtook it.
                self._fence([partition])
                return False
            return True

        if self._is_stopping or not partitions:
            return
        # A task of its own, so that a lost session ends it before anything is begun.
        self._taking = asyncio.create_task(for_each(take, sorted(partitions)))
        try:
            await asyncio.wait({self._taking})
            if self._taking.cancelled():
                raise SessionLostError(
                    f"member {self._membership.member}: the claims were interrupted"
                )
            results = self._taking.result()
        finally:
            self._taking = None
        raise_first(results)
        held = [partition for partition, is_ours in results.items() if not is_ours]
        if held:
            raise NotSettledError(
                f"group {self._membership.group}: {len(held)} of our partitions are"
                f" owned by other members still: {name_some(held)}"
            )

    # -- state ------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """Name partitions that no member has taken for long, and the members."""
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
        log.info(
            "rebalanced: group=%s member=%s rebalances=%d added=%d removed=%d"
            " partitions=%d duration_ms=%d",
            self._membership.group,
            self._membership.member,
            self.rebalance_count,
            len(added),
            len(removed),
            len(self._active),
            (self._clock.monotonic_s() - began_s) * 1000,
        )

    def _note_unsettled(self, error: MetaqError) -> None:
        """Remember why; tell the log once for each kind of error in a row."""
        self.unsettled_since_s = self.unsettled_since_s or self._clock.monotonic_s()
        waited_s = self._clock.monotonic_s() - self.unsettled_since_s
        is_event = isinstance(error, NotSettledError) and waited_s <= HANDOVER_S_MAX
        level = logging.INFO if is_event else logging.WARNING
        if type(error) is not type(self.last_error) or level > self._told_level:
            text = "partitions of ours are not read: group=%s member=%s: %s"
            log.log(level, text, self._membership.group, self._membership.member, error)
            self._told_level = level
        self.last_error = error

    def _deadline_s(self) -> float:
        return self._clock.monotonic_s() + self._options.request_timeout_s


class NodeCheck:
    """Checks that a member's nodes are in ZooKeeper. Owner: the member, on its loop."""

    def __init__(
        self, membership: GroupMembership, topics: Collection[str], *, clock: Clock
    ) -> None:
        """Start with a check that is due.

        Args:
            membership: the member.
            topics: its topics, for a member node that is made again.
            clock: tells when the next check is due.
        """
        self._membership = membership
        self._topics = topics
        self._clock = clock
        self._due_s = 0.0
        self._watches: dict[TopicPartition, Cancel] = {}

    def watch(self, active: set[TopicPartition], wake: Callable[[], None]) -> None:
        """Watch the owner nodes of the partitions read, and of no others.

        Args:
            active: the partitions read, followed as they change meanwhile.
            wake: called after a change of one of them, for which a check is due.
        """

        def on_change(partition: TopicPartition) -> None:
            # A release is no loss.
            if partition in active:
                self.ask_soon()
                wake()

        for partition in self._watches.keys() - active:
            self._watches.pop(partition)()
        for partition in active - self._watches.keys():
            self._watches[partition] = self._membership.watch_owner(
                partition, partial(on_change, partition)
            )

    def ask_soon(self) -> None:
        """Have the next `find_lost` ask, whenever the last one did."""
        self._due_s = 0.0

    async def find_lost(
        self, active: set[TopicPartition], deadline_s: Callable[[], float]
    ) -> set[TopicPartition]:
        """Return the partitions read and not owned in ZooKeeper, if a check is due.

        Args:
            active: the partitions read, followed as they change meanwhile.
            deadline_s: gives the deadline of a question that is asked now.

        Raises:
            MetaqError: some of it is not known; the check stays due.
        """
        if self._clock.monotonic_s() < self._due_s:
            return set()
        # Whatever is reported from here on asks for another check.
        self._due_s = self._clock.monotonic_s() + CHECK_S
        try:
            lost = await self._ask(active, deadline_s)
        except MetaqError:
            self._due_s = 0.0
            raise
        if lost:
            log.error(
                "owner nodes of ours were deleted or overwritten: group=%s member=%s"
                " partitions=%s",
                self._membership.group,
                self._membership.member,
                name_some(lost),
            )
        return lost

    async def _ask(
        self, active: set[TopicPartition], deadline_s: Callable[[], float]
    ) -> set[TopicPartition]:
        if not await self._membership.is_registered(deadline_s=deadline_s()):
            await self._membership.register(self._topics, deadline_s=deadline_s())
        owns = partial(self._membership.owns, deadline_s=deadline_s())
        answers = await for_each(owns, active)
        raise_first(answers)
        lost = {partition for partition, is_ours in answers.items() if not is_ours}
        # The session may have gone meanwhile, with everything that was read.
        return lost & active
