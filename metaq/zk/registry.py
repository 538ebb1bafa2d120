"""A broker's registration in ZooKeeper, kept current while the broker runs.

Theory of operation: there is one wanted snapshot, one task and one loop. While the
session is connected, the loop compares the wanted nodes with the present ones, executes
the steps planned by `plan.py`, and waits for an event:

    a new snapshot         only the groups that differ from the applied ones
    a new session          everything, because the old ephemeral nodes are gone, and
                           the records of topics that this broker no longer has
    a node of ours that    its group, after REPAIR_DELAY_S; until then the registration
    others change          is pending, and names the changed nodes
    CHECK_INTERVAL_S       everything, in case a watch missed a change
    a failure              the same again after a back-off that doubles

Nothing is done while the session is suspended: the nodes live on in ZooKeeper. Only
`register` and `withdraw` wait for this task, both with a deadline; puts and gets never
do. Snapshots that arrive while one is being applied replace each other, so many new
topics at once take one pass.

    Invariant: `_applied` has the groups that are in ZooKeeper under session version
    `_session_version`, except those in `_unsure`, which a pass started to change and
    then failed. A new version clears `_applied` alone, because its first pass applies
    or removes the groups in `_unsure` as well.

Keep in step: `plan.py`.

Source: docs/metaq-1.4/broker.md 3.3 to 3.5, rows 11 and 12 of its section 12.
"""

import asyncio
import enum
import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass
from functools import partial
from typing import Final

from metaq.clock import Clock
from metaq.errors import CoordinationError
from metaq.retry import Backoff, wait_set
from metaq.stats import MetricKind, MetricSpec, counter, gauge, part
from metaq.zk.children import in_batches
from metaq.zk.errors import BrokerIdTakenError, NodeChangedError, NodeNotEmptyError
from metaq.zk.paths import NodePaths
from metaq.zk.plan import (
    BrokerSnapshot,
    DesiredGroup,
    DesiredNode,
    Step,
    Upkeep,
    Verb,
    desired_groups,
    find_stranger,
    plan_group,
    plan_record_removal,
    plan_removal,
    plan_withdrawal,
)
from metaq.zk.session import (
    Cancel,
    CheckNode,
    Coordinator,
    DeleteNode,
    SessionState,
    SessionStatus,
    WriteNode,
)
from metaq.zk.znodes import Node

_log = logging.getLogger(__name__)

OPERATION_TIMEOUT_S: Final = 5.0
BACKOFF: Final = Backoff(first_s=0.1, max_s=10.0)
"""Pauses between failed passes."""
# Interval of full comparisons, with or without events of the watches.
CHECK_INTERVAL_S: Final = 60.0
# Collects nodes that others delete together. It also bounds how often two processes
# that keep overwriting the same node do so.
REPAIR_DELAY_S: Final = 0.5
GROUPS_AT_ONCE: Final = 32
"""Number of topics registered concurrently: thousands in sequence take minutes, because
each waits for several replies."""
STEPS_AT_ONCE: Final = 1024
"""Number of steps of a withdrawal sent back to back. While a broker is gone but its
topics are not, Java's consumers log an error for each partition."""
PATHS_NAMED_MAX: Final = 3
# Interval of checks whether a taken broker id is free again.
TAKEN_RETRY_DELAY_S: Final = 1.0


class RegistrationState(enum.Enum):
    """State of the wanted snapshot in ZooKeeper."""

    IDLE = "idle"
    PENDING = "pending"
    REGISTERED = "registered"
    REFUSED = "refused"
    WITHDRAWN = "withdrawn"


@dataclass(frozen=True, slots=True)
class RegistrationStatistics:
    """A snapshot of a registry's counters."""

    state: RegistrationState = gauge(
        "metaq_registered",
        "1 while this broker is registered as it wants to be.",
        default=MISSING,
        read=lambda state: state is RegistrationState.REGISTERED,
    )
    """REFUSED: another broker holds our id; the registration is retried."""
    session: SessionStatus = part(
        MetricSpec(
            MetricKind.GAUGE,
            "metaq_zookeeper_connected",
            "1 while the ZooKeeper session is connected.",
            read=lambda session: session.state is SessionState.CONNECTED,
        ),
        MetricSpec(
            MetricKind.COUNTER,
            "metaq_zookeeper_sessions_total",
            "ZooKeeper sessions so far; each new one follows an expiry.",
            read=lambda session: session.session_version,
        ),
    )
    topic_count: int = gauge("metaq_registered_topics", "Topics that are registered.")
    pass_count: int = 0
    """Number of complete passes, including those that found nothing to do."""
    failure_count: int = counter(
        "metaq_registration_failures_total",
        "Attempts to register that ended in an error.",
    )
    repair_count: int = counter(
        "metaq_registration_repairs_total",
        "Nodes put back after they had been deleted.",
    )
    last_error: str = ""
    """Text of the last failure, and the nodes that others deleted or overwrote and that
    are not restored yet; "" if all is as wanted."""


class BrokerRegistry:
    """Registers one broker in ZooKeeper and keeps it registered.

    Lifecycle: `start`, `register` (after recovery and listen, because clients that read
    the nodes connect at once), `update` any number of times, `withdraw` (before the
    drain), `stop`. The coordinator is started before and stopped after by its owner;
    stopping it ends the session. After `withdraw`, wait zk.zkSyncTimeMs before closing
    the listener, so that clients can react. A broker with zk.zkEnable=false has neither
    coordinator nor registry.

    An absent ZooKeeper is not an error here: `register` returns False at its deadline,
    and the registration happens when ZooKeeper appears. Only BrokerIdTakenError must
    make a start fail.

    Concurrency: everything on one event loop; `update` never waits.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        paths: NodePaths,
        *,
        clock: Clock,
        takeover_wait_s: float = 0.0,
        check_interval_s: float = CHECK_INTERVAL_S,
    ) -> None:
        """Create a registry.

        For `takeover_wait_s` seconds, `register` waits for a node with another address
        under our id to disappear before it fails. A broker that may return on another
        port (`metaq local` with port 0) passes slightly more than the session time-out;
        others refuse to start at once.
        """
        self._coordinator = coordinator
        self._check_interval_s = check_interval_s
        self._paths = paths
        self._clock = clock
        self._takeover_wait_s = takeover_wait_s
        self._state = RegistrationState.IDLE
        self._snapshot: BrokerSnapshot | None = None
        self._wanted: tuple[DesiredGroup, ...] = ()
        self._refused: tuple[str, ...] = ()
        self._applied: dict[str | None, DesiredGroup] = {}
        self._unsure: dict[str | None, DesiredGroup] = {}
        self._watches: dict[str, Cancel] = {}
        self._missing: dict[str, str | None] = {}
        self._repair: asyncio.TimerHandle | None = None
        self._session_version = 0
        self._entitled: CheckNode | None = None
        self._is_check_due = False
        self._are_records_checked = False
        self._wake = asyncio.Event()
        self._first: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._forget: Cancel | None = None
        self._takeover_until_s = 0.0
        self._pass_count = 0
        self._failure_count = 0
        self._failures_in_a_row = 0
        self._repair_count = 0
        self._last_error = ""

    # -- for the broker ---------------------------------------------------------------

    def start(self) -> None:
        """Start the background task; nothing is registered yet."""
        self._forget = self._coordinator.add_listener(self._on_status)
        self._task = asyncio.create_task(self._run(), name="zk-registry")
        self._task.add_done_callback(_report_failure)

    async def register(self, snapshot: BrokerSnapshot, *, deadline_s: float) -> bool:
        """Register, and wait until that is done; after the deadline it continues.

        Returns:
            True if everything is in ZooKeeper, False if the deadline came first.

        Raises:
            BrokerIdTakenError: another broker is registered under this id at another
                address; nothing was registered, and nothing will be.
        """
        self._takeover_until_s = self._clock.monotonic_s() + self._takeover_wait_s
        self._first = asyncio.get_running_loop().create_future()
        self.update(snapshot)
        try:
            async with asyncio.timeout(deadline_s - self._clock.monotonic_s()):
                await self._first
        except TimeoutError:
            _log.warning(
                "registration pending; the broker serves and registers later:"
                " broker=%s session=%s error=%s",
                snapshot.role,
                self._coordinator.status.state.value,
                self._last_error or "no answer in time",
            )
            return False
        finally:
            self._first = None
        return True

    def update(self, snapshot: BrokerSnapshot) -> None:
        """Make this the wanted snapshot; it is applied soon, in the background.

        Topics missing from it are removed from ZooKeeper; unchanged topics are not
        touched.
        """
        if self._state is RegistrationState.WITHDRAWN or snapshot == self._snapshot:
            return
        self._snapshot = snapshot
        self._wanted, refused = desired_groups(snapshot, self._paths)
        for topic in sorted(set(refused) - set(self._refused)):
            _log.error("topic not registered, zookeeper refuses its name %r", topic)
        self._refused = refused
        if self._state is not RegistrationState.REFUSED:
            self._state = RegistrationState.PENDING
        self._wake.set()

    async def withdraw(self, *, deadline_s: float) -> None:
        """Remove all our nodes from ZooKeeper in MetaQ's order; final, never raises.

        Returns at the deadline at the latest. Remaining ephemeral nodes disappear with
        the session; the persistent node `ids/N` may stay.
        """
        is_registered = self._session_version != 0 and bool(self._applied)
        self._state = RegistrationState.WITHDRAWN
        await self.stop()
        if not is_registered:
            return
        groups = [g for g in self._wanted if g.topic in self._applied]
        try:
            async with asyncio.timeout(deadline_s - self._clock.monotonic_s()):
                while await self._has_not_been_followed(deadline_s):
                    with suppress(NodeChangedError):
                        await self._take_all(plan_withdrawal(tuple(groups)), deadline_s)
                        break
                else:
                    return
        except (CoordinationError, TimeoutError) as error:
            _log.warning("withdrawal incomplete, the session ends it: error=%s", error)
        else:
            _log.info("withdrawn: topics=%d", len(groups) - 1)
        self._applied.clear()

    def statistics(self) -> RegistrationStatistics:
        """Return a snapshot of state and counters."""
        return RegistrationStatistics(
            state=self._state,
            session=self._coordinator.status,
            topic_count=sum(topic is not None for topic in self._applied),
            pass_count=self._pass_count,
            failure_count=self._failure_count,
            repair_count=self._repair_count,
            last_error="; ".join(
                filter(None, [self._name_missing(), self._last_error])
            ),
        )

    # -- the loop ---------------------------------------------------------------------

    def _on_status(self, status: SessionStatus) -> None:
        if status.state is SessionState.CONNECTED:
            self._failures_in_a_row = 0
            _log.info(
                "zookeeper session connected: session_version=%d",
                status.session_version,
            )
        else:
            _log.warning(
                "zookeeper session %s: session_version=%d; puts and gets go on",
                status.state.value,
                status.session_version,
            )
        is_registered = self._state is RegistrationState.REGISTERED
        if status.state is SessionState.LOST:
            # Its nodes end with it; that is not a change by others.
            self._forget_nodes([*self._watches, *self._missing])
            if is_registered:
                self._state = RegistrationState.PENDING
        # If the session is the same and everything is in place, there is nothing to do.
        if not is_registered or status.session_version != self._session_version:
            self._wake.set()

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            if not await wait_set(self._wake, await self._pass()):
                self._is_check_due |= self._state is RegistrationState.REGISTERED

    async def _pass(self) -> float | None:
        """Make ZooKeeper match once; return the seconds until the next pass.

        None: wait for the next event.
        """
        status, wanted = self._coordinator.status, self._wanted
        if self._snapshot is None:
            return None
        if status.state is not SessionState.CONNECTED:
            return self._check_interval_s
        try:
            await self._reconcile(wanted, status)
        except BrokerIdTakenError as error:
            return self._on_taken(error)
        except CoordinationError as error:
            return self._on_failure(error)
        if self._wanted is not wanted or self._coordinator.status != status:
            return 0.0
        self._on_success()
        return self._check_interval_s

    async def _reconcile(
        self, wanted: tuple[DesiredGroup, ...], status: SessionStatus
    ) -> None:
        if status.session_version != self._session_version:
            self._applied.clear()
            self._forget_nodes([*self._watches, *self._missing])
            self._session_version = status.session_version
            self._is_check_due = False
            self._are_records_checked = False
        is_check, changed = self._is_check_due, frozenset(self._missing.values())
        repairs = {g.topic for g in wanted if is_check or g.topic in changed}
        due = [
            group
            for group in wanted
            if group.topic in repairs
            or group.topic in self._unsure
            or self._applied.get(group.topic) != group
        ]
        # Without its role a broker registers no topic: another broker may have the id.
        roles = [group for group in due if group.topic is None]
        topics_due = [group for group in due if group.topic is not None]
        # A process that hung for longer than its session believes that it is the leader
        # until it has read the title.
        title = self._snapshot.title if self._snapshot else ""
        if title and not await self._is_entitled(title, self._operation_deadline_s()):
            raise CoordinationError(
                f"{title} is not of session {status.session_id:#x}: this replica is not"
                " seen to lead its set"
            )
        starts = range(0, len(topics_due), GROUPS_AT_ONCE)
        for groups in (roles, *(topics_due[i : i + GROUPS_AT_ONCE] for i in starts)):
            outcomes = await asyncio.gather(
                *(self._bring(g, status, is_repair=g.topic in repairs) for g in groups),
                return_exceptions=True,
            )
            for outcome in outcomes:
                if outcome is not None:
                    raise outcome
        topics = {group.topic for group in wanted}
        await self._remove_unwanted(topics)
        if not self._are_records_checked:
            await self._remove_old_records(topics)
            self._are_records_checked = True

    async def _bring(
        self, group: DesiredGroup, status: SessionStatus, *, is_repair: bool
    ) -> None:
        """Make one group match, and record the result."""
        self._unsure[group.topic] = group
        count = await self._apply(group, status)
        del self._unsure[group.topic]
        if count and is_repair:
            self._repair_count += count
            _log.warning(
                "registration repaired, others had changed it: topic=%s steps=%d",
                group.topic,
                count,
            )
        self._applied[group.topic] = group

    async def _remove_unwanted(self, wanted: set[str | None]) -> None:
        """Remove the groups of other topics, including partly applied ones."""
        for topic, group in {**self._applied, **self._unsure}.items():
            if topic in wanted:
                continue
            steps = plan_removal(group, is_sure=topic not in self._unsure)
            self._unsure[topic] = group
            self._forget_nodes([node.path for node in group.nodes])
            for step in steps:
                await self._take(step, self._operation_deadline_s())
            del self._unsure[topic]
            self._applied.pop(topic, None)

    async def _remove_old_records(self, wanted: set[str | None]) -> None:
        """Delete records of topics that disappeared while this broker was away."""
        assert self._snapshot is not None
        if not self._snapshot.is_recorded:
            return
        broker_id = self._snapshot.role.broker_id
        coordinator, paths = self._coordinator, self._paths
        found = await coordinator.children(
            paths.recorded_topics(), deadline_s=self._operation_deadline_s()
        )
        others = [
            paths.recorded_partitions(name, broker_id)
            for name in found
            if name not in wanted
        ]

        async def exists(path: str) -> bool:
            return await coordinator.exists(
                path, deadline_s=self._operation_deadline_s()
            )

        for path, is_there in await in_batches(exists, others):
            if is_there:
                for step in plan_record_removal(path):
                    await self._take(step, self._operation_deadline_s())
                _log.info("record of a topic that is gone removed: path=%s", path)

    async def _apply(self, group: DesiredGroup, status: SessionStatus) -> int:
        """Make one group match; return the number of steps executed."""
        deadline_s = self._operation_deadline_s()
        nodes = await asyncio.gather(
            *(
                self._coordinator.get(node.path, deadline_s=deadline_s)
                for node in group.nodes
            )
        )
        paths = [node.path for node in group.nodes]
        found = dict(zip(paths, nodes, strict=True))
        steps = plan_group(group, found, status.session_id)
        if (stranger := find_stranger(group, found)) is not None:
            _log.warning(
                "another broker has the id of this replica set, and is replaced:"
                " address=%s by=%s",
                stranger.decode(errors="replace"),
                group.nodes[0].data.decode(),
            )
        if steps or self._applied.get(group.topic) != group:
            # From here on, the changes are our own.
            self._unwatch(paths)
        for step in steps:
            await self._take(step, self._operation_deadline_s())
        self._watch(group)
        return len(steps)

    async def _take(self, step: Step, deadline_s: float) -> None:
        """Execute one step.

        If a node appears between the read and the create, NodeExistsError fails the
        pass, and the next one reads again.
        """
        _log.debug("step: verb=%s path=%s", step.verb.value, step.path)
        coordinator, path, data = self._coordinator, step.path, step.data
        match step.verb:
            case Verb.CREATE_EPHEMERAL:
                await coordinator.create_ephemeral(path, data, deadline_s=deadline_s)
            case Verb.SET_OR_CREATE:
                await coordinator.set_or_create(path, data, deadline_s=deadline_s)
            case Verb.DELETE:
                await self._delete(path, deadline_s)
            case Verb.DELETE_CHILDLESS:
                with suppress(NodeNotEmptyError):
                    await self._delete(path, deadline_s)
            case Verb.DELETE_OR_EMPTY:
                await self._delete_or_empty(path, deadline_s)

    async def _delete(self, path: str, deadline_s: float) -> None:
        """Delete a node; in a set, only while no other replica has claimed it."""
        coordinator, entitled = self._coordinator, self._entitled
        if entitled is None:
            await coordinator.delete(path, deadline_s=deadline_s)
        elif await coordinator.exists(path, deadline_s=deadline_s):
            steps = entitled, DeleteNode(path, None)
            await coordinator.transact(steps, deadline_s=deadline_s)

    async def _delete_or_empty(self, path: str, deadline_s: float) -> None:
        coordinator, entitled = self._coordinator, self._entitled
        try:
            await self._delete(path, deadline_s)
        except NodeNotEmptyError:
            node = await coordinator.get(path, deadline_s=deadline_s)
            if entitled is not None and node is not None:
                steps = entitled, WriteNode(path, b"", node.version)
                await coordinator.transact(steps, deadline_s=deadline_s)
            else:
                await coordinator.set_or_create(path, b"", deadline_s=deadline_s)

    async def _take_all(self, steps: Sequence[Step], deadline_s: float) -> None:
        """Execute steps in order, without waiting for one reply before the next step.

        A failed step does not prevent the others.

        Raises:
            CoordinationError: the error of the first failed step.
        """
        failures = []
        for start in range(0, len(steps), STEPS_AT_ONCE):
            # ZooKeeper executes the requests of a session in the order of sending.
            outcomes = await asyncio.gather(
                *(self._take(s, deadline_s) for s in steps[start:][:STEPS_AT_ONCE]),
                return_exceptions=True,
            )
            failures += [each for each in outcomes if each is not None]
        if failures:
            raise failures[0]

    # -- changes by others ------------------------------------------------------------

    def _watch(self, group: DesiredGroup) -> None:
        """Watch the nodes of a group that matches."""
        for node in group.nodes:
            if node.path in self._watches:
                continue
            self._missing.pop(node.path, None)
            if node.upkeep is not Upkeep.ABSENT:
                self._watches[node.path] = self._coordinator.watch_data(
                    node.path, partial(self._on_node, group.topic, node)
                )

    def _unwatch(self, paths: Collection[str]) -> None:
        for path in paths:
            if (cancel := self._watches.pop(path, None)) is not None:
                cancel()

    def _forget_nodes(self, paths: Collection[str]) -> None:
        """Stop watching nodes, and do not count them as missing any more."""
        for path in paths:
            self._missing.pop(path, None)
        self._unwatch(paths)

    def _on_node(
        self, topic: str | None, wanted: DesiredNode, data: bytes | None
    ) -> None:
        if data == wanted.data:
            if self._missing.pop(wanted.path, None) is None:
                return
        else:
            if not self._missing:
                _log.warning("a node of ours was changed by others: %s", wanted.path)
            self._missing[wanted.path] = topic
            if self._state is RegistrationState.REGISTERED:
                self._state = RegistrationState.PENDING
        if self._repair is None:
            loop = asyncio.get_running_loop()
            self._repair = loop.call_later(REPAIR_DELAY_S, self._on_repair_due)

    def _on_repair_due(self) -> None:
        self._repair = None
        self._wake.set()

    def _name_missing(self) -> str:
        paths = list(self._missing)
        if not paths:
            return ""
        more = len(paths) - PATHS_NAMED_MAX
        return (
            "deleted or overwritten by others, and being put back:"
            f" {', '.join(paths[:PATHS_NAMED_MAX])}"
            f"{f' and {more} more' if more > 0 else ''}"
        )

    # -- outcomes ---------------------------------------------------------------------

    def _on_success(self) -> None:
        self._pass_count += 1
        self._failures_in_a_row = 0
        self._is_check_due = False
        self._last_error = ""
        if self._missing:
            # Nodes went missing after the check; a repair is due.
            return
        if self._state is not RegistrationState.REGISTERED:
            self._state = RegistrationState.REGISTERED
            assert self._snapshot is not None
            _log.info(
                "registered: broker=%s address=%s topics=%d session_version=%d",
                self._snapshot.role,
                self._snapshot.address,
                len(self._applied) - 1,
                self._session_version,
            )
        if self._first is not None and not self._first.done():
            self._first.set_result(None)

    def _on_failure(self, error: CoordinationError) -> float:
        self._failure_count += 1
        if self._state is not RegistrationState.REFUSED:
            self._state = RegistrationState.PENDING
        if str(error) != self._last_error:
            _log.warning("registration failed, tried again: error=%s", error)
        self._last_error = str(error)
        self._failures_in_a_row += 1
        return BACKOFF.delay_s(self._failures_in_a_row)

    def _on_taken(self, error: BrokerIdTakenError) -> float | None:
        self._failure_count += 1
        if self._state is not RegistrationState.REFUSED:
            _log.error("%s", error)
        self._state = RegistrationState.REFUSED
        self._last_error = str(error)
        is_waited_for = self._first is not None and not self._first.done()
        if is_waited_for and self._clock.monotonic_s() >= self._takeover_until_s:
            # The start fails with this error; nothing may be registered after it.
            assert self._first is not None
            self._first.set_exception(error)
            self._snapshot = None
            return None
        return TAKEN_RETRY_DELAY_S

    # -- details ----------------------------------------------------------------------

    def _operation_deadline_s(self) -> float:
        return self._clock.monotonic_s() + OPERATION_TIMEOUT_S

    def _is_ours(self, node: Node | None) -> bool:
        """Return whether a node belongs to our session."""
        session_id = self._coordinator.status.session_id
        return node is not None and node.owner_session_id == session_id

    async def _is_entitled(
        self, title: str, deadline_s: float, *, is_over: bool = False
    ) -> bool:
        """Return whether this session leads its set, and bind its deletes to that.

        Args:
            title: path of the node that names the leader.
            deadline_s: deadline of the reads.
            is_over: also accept that it has led and that no replica leads now.
        """
        # The record first, because a claim writes it together with the title.
        record = title.rpartition("/")[0]
        found = await self._coordinator.get(record, deadline_s=deadline_s)
        led = await self._coordinator.get(title, deadline_s=deadline_s)
        if found is not None:
            self._entitled = CheckNode(record, found.version)
        is_free = is_over and led is None
        return found is not None and (is_free or self._is_ours(led))

    async def _has_not_been_followed(self, deadline_s: float) -> bool:
        """Return whether the nodes of the broker are still ours to withdraw."""
        assert self._snapshot is not None
        if title := self._snapshot.title:
            return await self._is_entitled(title, deadline_s, is_over=True)
        role = self._wanted[0].nodes[0].path  # of the own nodes the first
        return self._is_ours(await self._coordinator.get(role, deadline_s=deadline_s))

    async def stop(self) -> None:
        """End the background task, leaving ZooKeeper as it is. May be repeated."""
        if self._forget is not None:
            self._forget()
            self._forget = None
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None
        self._forget_nodes([*self._watches, *self._missing])
        if self._repair is not None:
            self._repair.cancel()
            self._repair = None


def _report_failure(task: asyncio.Task[None]) -> None:
    """Log an unexpected error, which is a bug; known errors never leave the task."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("task failed: name=%s", task.get_name(), exc_info=error)
