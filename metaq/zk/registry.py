"""A broker's registration in ZooKeeper, kept true for as long as the broker runs.

Theory of operation: there is one wanted snapshot, one task, and one loop: when the
session is connected, compare what is wanted with what is there, take the steps that
`plan.py` gives, and sleep until something happens. What may happen:

    a new snapshot         only the groups that differ from what was applied
    a new session          everything, because the old ephemeral nodes are gone
    CHECK_INTERVAL_S       everything: somebody may have deleted nodes under a living
                           session, and ZooKeeper does not tell
    a failure              the same again after a back-off that doubles

Nothing happens while the session is suspended: the nodes live on in ZooKeeper.
Nobody waits for this task except `register` and `withdraw`, both with a deadline; puts
and gets never do. Snapshots that arrive while one is being applied replace each other,
so however many new topics appear at once, there is one pass for all of them.

    Invariant: `_applied` holds the groups that are in ZooKeeper under session epoch
    `_epoch`, but for those in `_unsure`, on which a pass has begun to work and failed;
    both are forgotten when the epoch changes.

Keep in step: `plan.py`.

Source: broker spec 3.3 to 3.5, rows 11 and 12 of its section 12.
"""

import asyncio
import enum
import logging
from dataclasses import dataclass
from typing import Final

from metaq.clock import Clock
from metaq.errors import CoordinationError
from metaq.zk.errors import BrokerIdTakenError, NodeNotEmptyError
from metaq.zk.paths import NodePaths
from metaq.zk.plan import (
    BrokerSnapshot,
    DesiredGroup,
    Step,
    Upkeep,
    Verb,
    desired_groups,
    plan_group,
    plan_removal,
    plan_withdrawal,
)
from metaq.zk.session import Cancel, Coordinator, SessionState, SessionStatus

log = logging.getLogger(__name__)

OPERATION_TIMEOUT_S: Final = 5.0
RETRY_DELAY_S_MIN: Final = 0.1
RETRY_DELAY_S_MAX: Final = 10.0
# How often nodes that somebody deleted under a living session are put back.
CHECK_INTERVAL_S: Final = 60.0
# How often a broker whose id is taken looks whether it is free again.
TAKEN_RETRY_DELAY_S: Final = 1.0


class RegistrationState(enum.Enum):
    """How the wanted snapshot and ZooKeeper relate."""

    IDLE = "idle"
    PENDING = "pending"
    REGISTERED = "registered"
    REFUSED = "refused"
    WITHDRAWN = "withdrawn"


@dataclass(frozen=True, slots=True)
class RegistrationStatistics:
    """A snapshot of a registry's counters."""

    state: RegistrationState
    """REFUSED means that another broker holds our id; it is tried again."""
    session: SessionStatus
    """The ZooKeeper session."""
    topic_count: int
    """Topics that are in ZooKeeper under this session."""
    refused_topics: tuple[str, ...]
    """Topics of the wanted snapshot whose names ZooKeeper cannot hold."""
    pass_count: int
    """Passes that brought ZooKeeper in step, those that found nothing to do too."""
    failure_count: int
    """Passes that ended in an error."""
    repair_count: int
    """Steps taken because nodes had vanished under a living session."""
    last_error: str
    """Text of the last failure; "" after a pass that succeeded."""


class BrokerRegistry:
    """Registers one broker in ZooKeeper and keeps it registered.

    Lifecycle: `start`, `register` (after recovery and listen: whoever reads the nodes
    will connect at once), `update` any number of times, `withdraw` (before the drain),
    `stop`. The coordinator is started before and stopped after, by its owner; stopping
    it ends the session. After `withdraw`, wait zk.zkSyncTimeMs before the listener
    closes, so that clients can react. A broker with zk.zkEnable=false makes neither
    coordinator nor registry.

    Absence of ZooKeeper is not an error here: `register` returns False at its deadline,
    and the registration happens when ZooKeeper appears. The one error a start has to
    respect is BrokerIdTakenError.

    Concurrency: everything on one event loop; `update` never waits.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        paths: NodePaths,
        *,
        clock: Clock,
        takeover_wait_s: float = 0.0,
    ) -> None:
        """Prepare a registry.

        Args:
            coordinator: the session to register under.
            paths: where MetaQ's root is.
            clock: gives meaning to deadlines.
            takeover_wait_s: how long `register` waits for a node of another address
                under our id to vanish. A broker that may come back on another port
                (`metaq local` with port 0) passes a little more than the session
                time-out, others refuse to start at once.
        """
        self._coordinator = coordinator
        self._paths = paths
        self._clock = clock
        self._takeover_wait_s = takeover_wait_s
        self._state = RegistrationState.IDLE
        self._snapshot: BrokerSnapshot | None = None
        self._wanted: tuple[DesiredGroup, ...] = ()
        self._refused: tuple[str, ...] = ()
        self._applied: dict[str | None, DesiredGroup] = {}
        self._unsure: dict[str | None, DesiredGroup] = {}
        self._epoch = 0
        self._is_check_due = False
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
        """Begin to look after the registration; nothing is registered yet."""
        self._forget = self._coordinator.add_listener(self._on_status)
        self._task = asyncio.create_task(self._run(), name="zk-registry")
        self._task.add_done_callback(_report_failure)

    async def register(self, snapshot: BrokerSnapshot, *, deadline_s: float) -> bool:
        """Register, and wait until it is done.

        Args:
            snapshot: what to register.
            deadline_s: when to stop waiting, on the clock's monotonic scale. The
                registration itself is never given up.

        Returns:
            True when everything is in ZooKeeper, False when the deadline came first.

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
            log.warning(
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

        Topics that are missing from it are taken out of ZooKeeper; topics that did not
        change are not touched.
        """
        if self._state is RegistrationState.WITHDRAWN or snapshot == self._snapshot:
            return
        self._snapshot = snapshot
        self._wanted, refused = desired_groups(snapshot, self._paths)
        for topic in sorted(set(refused) - set(self._refused)):
            log.error("topic not registered, zookeeper refuses its name %r", topic)
        self._refused = refused
        if self._state is not RegistrationState.REFUSED:
            self._state = RegistrationState.PENDING
        self._wake.set()

    async def withdraw(self, *, deadline_s: float) -> None:
        """Take everything out of ZooKeeper in MetaQ's order; final, never raises.

        Returns at the deadline at the latest. What could not be deleted by then
        vanishes with the session; the persistent node `ids/N` may stay.
        """
        is_registered = self._epoch != 0 and bool(self._applied)
        self._state = RegistrationState.WITHDRAWN
        await self._end_task()
        if not is_registered:
            return
        groups = [g for g in self._wanted if g.topic in self._applied]
        try:
            async with asyncio.timeout(deadline_s - self._clock.monotonic_s()):
                if not await self._is_role_ours(deadline_s):
                    return
                for step in plan_withdrawal(tuple(groups)):
                    await self._take(step, deadline_s)
        except (CoordinationError, TimeoutError) as error:
            log.warning("withdrawal incomplete, the session ends it: error=%s", error)
        else:
            log.info("withdrawn: topics=%d", len(groups) - 1)
        self._applied.clear()

    async def stop(self) -> None:
        """End the background task; ZooKeeper is not touched. Harmless when repeated."""
        await self._end_task()

    def statistics(self) -> RegistrationStatistics:
        """Return a snapshot of state and counters."""
        return RegistrationStatistics(
            state=self._state,
            session=self._coordinator.status,
            topic_count=sum(topic is not None for topic in self._applied),
            refused_topics=self._refused,
            pass_count=self._pass_count,
            failure_count=self._failure_count,
            repair_count=self._repair_count,
            last_error=self._last_error,
        )

    # -- the loop ---------------------------------------------------------------------

    def _on_status(self, status: SessionStatus) -> None:
        if status.state is SessionState.CONNECTED:
            self._failures_in_a_row = 0
            log.info("zookeeper session connected: epoch=%d", status.epoch)
        else:
            log.warning(
                "zookeeper session %s: epoch=%d; puts and gets go on",
                status.state.value,
                status.epoch,
            )
        is_registered = self._state is RegistrationState.REGISTERED
        if is_registered and status.state is SessionState.LOST:
            self._state = RegistrationState.PENDING
        # The same session with everything in place needs nothing.
        if not is_registered or status.epoch != self._epoch:
            self._wake.set()

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            delay_s = await self._pass()
            try:
                async with asyncio.timeout(delay_s):
                    await self._wake.wait()
            except TimeoutError:
                self._is_check_due |= self._state is RegistrationState.REGISTERED

    async def _pass(self) -> float | None:
        """Bring ZooKeeper in step once; return after how many seconds to do it again.

        None stands for "when something happens".
        """
        status, wanted = self._coordinator.status, self._wanted
        if self._snapshot is None:
            return None
        if status.state is not SessionState.CONNECTED:
            return CHECK_INTERVAL_S
        try:
            await self._reconcile(wanted, status)
        except BrokerIdTakenError as error:
            return self._on_taken(error)
        except CoordinationError as error:
            return self._on_failure(error)
        if self._wanted is not wanted or self._coordinator.status != status:
            return 0.0
        self._on_success()
        return CHECK_INTERVAL_S

    async def _reconcile(
        self, wanted: tuple[DesiredGroup, ...], status: SessionStatus
    ) -> None:
        if status.epoch != self._epoch:
            self._applied.clear()
            self._unsure.clear()
            self._epoch = status.epoch
            self._is_check_due = False
        is_check = self._is_check_due
        for group in wanted:
            is_sure = group.topic not in self._unsure
            if is_sure and not is_check and self._applied.get(group.topic) == group:
                continue
            self._unsure[group.topic] = group
            count = await self._apply(group, status)
            del self._unsure[group.topic]
            if count and is_check:
                self._repair_count += count
                log.warning(
                    "registration repaired, nodes had vanished: topic=%s steps=%d",
                    group.topic,
                    count,
                )
            self._applied[group.topic] = group
        await self._remove_unwanted({group.topic for group in wanted})

    async def _remove_unwanted(self, wanted: set[str | None]) -> None:
        """Take away the groups of other topics, those too that are there in part."""
        for topic, group in {**self._applied, **self._unsure}.items():
            if topic in wanted:
                continue
            steps = plan_removal(group, is_sure=topic not in self._unsure)
            self._unsure[topic] = group
            for step in steps:
                await self._take(step, self._operation_deadline_s())
            del self._unsure[topic]
            self._applied.pop(topic, None)

    async def _apply(self, group: DesiredGroup, status: SessionStatus) -> int:
        """Bring one group in step; return how many steps it took."""
        found = {
            node.path: await self._coordinator.get(
                node.path, deadline_s=self._operation_deadline_s()
            )
            for node in group.nodes
        }
        steps = plan_group(group, found, status.session_id)
        for step in steps:
            await self._take(step, self._operation_deadline_s())
        return len(steps)

    async def _take(self, step: Step, deadline_s: float) -> None:
        """Carry out one step.

        A node that appeared between reading and creating is NodeExistsError: the pass
        fails, and the next one reads again.
        """
        log.debug("step: verb=%s path=%s", step.verb.value, step.path)
        coordinator, path, data = self._coordinator, step.path, step.data
        match step.verb:
            case Verb.CREATE_EPHEMERAL:
                await coordinator.create_ephemeral(path, data, deadline_s=deadline_s)
            case Verb.SET_OR_CREATE:
                await coordinator.set_or_create(path, data, deadline_s=deadline_s)
            case Verb.DELETE:
                await coordinator.delete(path, deadline_s=deadline_s)
            case Verb.DELETE_OR_EMPTY:
                try:
                    await coordinator.delete(path, deadline_s=deadline_s)
                except NodeNotEmptyError:
                    await coordinator.set_or_create(path, b"", deadline_s=deadline_s)

    # -- outcomes ---------------------------------------------------------------------

    def _on_success(self) -> None:
        self._pass_count += 1
        self._failures_in_a_row = 0
        self._is_check_due = False
        self._last_error = ""
        if self._state is not RegistrationState.REGISTERED:
            self._state = RegistrationState.REGISTERED
            assert self._snapshot is not None
            log.info(
                "registered: broker=%s address=%s topics=%d epoch=%d",
                self._snapshot.role,
                self._snapshot.address,
                len(self._applied) - 1,
                self._epoch,
            )
        if self._first is not None and not self._first.done():
            self._first.set_result(None)

    def _on_failure(self, error: CoordinationError) -> float:
        self._failure_count += 1
        if self._state is not RegistrationState.REFUSED:
            self._state = RegistrationState.PENDING
        if str(error) != self._last_error:
            log.warning("registration failed, tried again: error=%s", error)
        self._last_error = str(error)
        delay_s = RETRY_DELAY_S_MIN * 2.0**self._failures_in_a_row
        if delay_s < RETRY_DELAY_S_MAX:
            self._failures_in_a_row += 1
        return min(delay_s, RETRY_DELAY_S_MAX)

    def _on_taken(self, error: BrokerIdTakenError) -> float | None:
        self._failure_count += 1
        if self._state is not RegistrationState.REFUSED:
            log.error("%s", error)
        self._state = RegistrationState.REFUSED
        self._last_error = str(error)
        is_waited_for = self._first is not None and not self._first.done()
        if is_waited_for and self._clock.monotonic_s() >= self._takeover_until_s:
            # The start fails with this; nothing must be registered behind its back.
            assert self._first is not None
            self._first.set_exception(error)
            self._snapshot = None
            return None
        return TAKEN_RETRY_DELAY_S

    # -- details ----------------------------------------------------------------------

    def _operation_deadline_s(self) -> float:
        return self._clock.monotonic_s() + OPERATION_TIMEOUT_S

    async def _is_role_ours(self, deadline_s: float) -> bool:
        """Return whether the role's node belongs to our session still."""
        status = self._coordinator.status
        claims = [
            node
            for group in self._wanted
            for node in group.nodes
            if node.upkeep is Upkeep.CLAIM
        ]
        found = await self._coordinator.get(claims[0].path, deadline_s=deadline_s)
        return found is not None and found.owner_session_id == status.session_id

    async def _end_task(self) -> None:
        if self._forget is not None:
            self._forget()
            self._forget = None
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None


def _report_failure(task: asyncio.Task[None]) -> None:
    """Log an error that is a bug of ours; known ones never leave the task."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("task failed: name=%s", task.get_name(), exc_info=error)
