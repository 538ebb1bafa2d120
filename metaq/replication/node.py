"""One replica of a set at work: reads ZooKeeper, and carries out the core's decisions.

Theory of operation. `replica.py` decides; this module is its shell. One task reads
ZooKeeper when a watch fires, after a change without a reply, and every
`READ_INTERVAL_S`. It passes the result to the core and carries out the actions one by
one, so that each is done, and durable where required, before the next begins. Reports
of streams and other replicas are handled under the same lock, or on the loop without a
wait in between.

    ZooKeeper --View--> replica.py --actions--> store.py        set file, journals
    followers --join, pull--> term.py           leading.py      high watermarks
    leader    <--join, pull-- follow_task.py    following.py    appends of this copy
    claimer   --tables, tail--> answers.py      serving.py

A leader continues while ZooKeeper is away, as long as all replicas of the quorum keep
pulling: then no other replica can have taken the next epoch (docs/replication.md).
"""

import asyncio
import logging
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

from metaq.config.settings import BrokerConfig, TopicConfig
from metaq.errors import (
    ClosedError,
    CoordinationError,
    MetaqError,
    NotLeaderError,
    StorageError,
    UnavailableError,
)
from metaq.fs import FileSystem
from metaq.lifecycle import Service
from metaq.model import BrokerAddress, LogId, MessageId, Offset, parse_broker_address
from metaq.replication.answers import Answers
from metaq.replication.claims import Claims
from metaq.replication.election import Flag, Presence, PresenceState, unflagged
from metaq.replication.epochs import Epoch
from metaq.replication.facts import ReplicaFacts, ReplicaStatus, logs_of
from metaq.replication.follow_task import FollowTask
from metaq.replication.joins import check_newcomer
from metaq.replication.leading import LeadingStreams
from metaq.replication.mending import Mender
from metaq.replication.messages import TablesReply, TablesRequest
from metaq.replication.record import NO_REPLICA, Change, Purpose, ReplicaSetError
from metaq.replication.replica import (
    STEP_DOWN,
    TERM_ROLES,
    Action,
    AskTables,
    BeginEpoch,
    DirectoryFindings,
    Join,
    Propose,
    Replica,
    ReplicaRole,
    SaveHoldings,
    SaveSet,
    SetFile,
    SimpleAction,
    Transition,
    View,
    drain,
    give_up,
    lead_on,
    leave_sure,
    on_applied,
    on_view,
    promise,
    renew,
    start,
    step_down,
)
from metaq.replication.serving import copies_of
from metaq.replication.set_nodes import (
    LeaderData,
    Outcome,
    SetNodes,
    SetView,
    Shown,
    require_former_process,
    token_of,
)
from metaq.replication.store import ReplicaStore, StartFacts
from metaq.replication.term import Term
from metaq.replication.upkeep import successor
from metaq.retry import wait_set
from metaq.storage.log_manager import LogManager
from metaq.storage.partition_log import PartitionLog
from metaq.zk.session import SessionState

_log = logging.getLogger(__name__)

CHECK_S: Final = 0.25
"""Longest interval of checks by time: idle followers, lags, waiting puts; seconds."""
CHECKS_PER_LAG: Final = 12
"""Minimum number of such checks within the lag time."""
CLAIM_CHECK_S: Final = 0.05
"""Interval of checks while no leader is known; separates claims; in seconds."""
READ_INTERVAL_S: Final = 5.0
"""Interval of reads of ZooKeeper while no watch fires, in seconds."""
FAILED_FIRST_S: Final = 60.0
"""Time for which a leader that gave up leaves claims to others, in seconds."""
HAND_OVER_S: Final = 4.0
"""Longest time that a stop takes to hand over, in seconds."""
DRAIN_S: Final = 2.0
"""Part of it for which followers may still sync, in seconds."""
SETTLED: Final = frozenset(
    {ReplicaRole.LEADING, ReplicaRole.FOLLOWING, ReplicaRole.FROZEN}
)
"""Roles that may last, in which checks are less frequent."""
NO_PART: Final = frozenset({ReplicaRole.STARTING, ReplicaRole.FROZEN})
"""Roles in which the own directories are not written."""


class ReplicaHost(Protocol):
    """Interface of the broker around a replica."""

    @property
    def address(self) -> str:
        """Return the advertised address."""

    def settings_of(self, topic: str) -> TopicConfig:
        """Return the settings of a topic."""

    def refuse_puts(self, error: UnavailableError | None) -> None:
        """Refuse puts with this error before they are appended; None: accept them."""

    def begin_term(self, last_id: MessageId) -> None:
        """Stamp only ids above this one, and register as the broker for clients."""

    def end_term(self) -> None:
        """Withdraw the registration for clients."""

    def on_check(self) -> None:
        """Note that this process runs; called at least twice a second."""


class ReplicaNode(Service):
    """One replica. Owned by the broker; used on the loop's thread only."""

    def __init__(
        self,
        config: BrokerConfig,
        nodes: SetNodes,
        *,
        fs: FileSystem,
        logs: LogManager,
        facts: StartFacts,
        host: ReplicaHost,
    ) -> None:
        """Create a replica whose logs are open and follow.

        Args:
            config: has a section `[replication]`.
            nodes: nodes of this replica in ZooKeeper; their session is started and
                stopped by its owner.
            fs: the disk.
            logs: opened with the numbers of the tables in `facts`.
            facts: facts from the start.
            host: the broker.
        """
        assert config.replication is not None, "a member of a set"
        super().__init__("replica", stop_timeout_s=5.0)
        self.id: Final = config.replication.replica_id
        """Number of this replica."""
        self._lag_s = config.replication.lag_timeout_ms / 1000
        self._connect_timeout_s = config.zookeeper.connection_timeout_ms / 1000
        self._broker_id = config.system.broker_id
        self._nodes = nodes
        clock = self._clock = nodes.clock
        self._logs = logs
        path = Path(config.system.data_path)
        self._store = ReplicaStore(fs, path, logs, facts.tables, clock=clock)
        self._facts = facts
        self._host = host
        self.token: Final = token_of(fs, secrets.token_hex(16))
        """Random text of this process in `present/K`, which a leader compares."""
        self.lock: Final = asyncio.Lock()
        """Held during a step of the core and its actions."""
        self.answers: Final = Answers(self, self._store)
        """Replies to other replicas."""
        self._is_due = asyncio.Event()
        self._has_moved = asyncio.Event()
        """Set when the role changes, so that a claim does not wait for a rare check."""
        self._read_due_s = 0.0
        """Time of the next read of ZooKeeper; 0.0: at the next check."""
        self.seen: SetView | None = None
        """The set, as last read."""
        self._session_version = 0
        self._shown: Shown | None = None
        self._replica: Replica | None = None
        self._term: Term | None = None
        self._following: FollowTask | None = None
        self.mender: Final = Mender(self, self._store, clock=clock)
        """Repairs damage from the copies of others."""
        self._claims = Claims(self, self._store, clock=clock, draw=secrets.token_hex)
        self._tried_revision = 0
        self._last_id = logs.last_message_id()
        self._is_leaving = False
        self._error = ""

    @property
    def replica(self) -> Replica:
        """Return the state; ZooKeeper must have been read."""
        assert self._replica is not None, f"replica {self.id} has read nothing yet"
        return self._replica

    @property
    def streams(self) -> LeadingStreams | None:
        """Return the streams of the term; None if this replica does not lead."""
        return None if self._term is None else self._term.streams

    @property
    def epoch(self) -> int:
        """Return the number of its epoch as a leader; 0 if it does not lead."""
        led = None if self._term is None else self.replica.term
        return 0 if led is None else led.epoch.number

    async def on_start(self) -> None:
        """Start to take part; a directory without a `set` file must be new.

        Raises:
            ReplicaSetError: there is no such set, this directory has logs that are not
                of the set, or it is another replica's.
        """
        self._store.begin()
        self.on_way_down("writer", self._store.end)
        self.on_way_down("streams", self._end_streams)
        self._host.refuse_puts(self.refusal())
        file = self._facts.file
        if file is None:
            await self._check_newcomer()
        elif file.replica != self.id:
            raise ReplicaSetError(
                f"the data directory is that of replica {file.replica}, and"
                f" replicaId={self.id}"
            )
        cancel = self._nodes.watch(self.wake)

        async def unwatch() -> None:
            cancel()

        self.on_way_down("watches", unwatch)
        self.spawn(self._run(), name="run")
        self.spawn(self._tick(), name="tick")

    async def _check_newcomer(self) -> None:
        """Refuse a directory that belongs to no set, before it shows itself."""
        self.seen = await self._nodes.read_first(self._connect_timeout_s)
        record, logs = self.seen.view.record, self._logs.logs()
        check_newcomer(record, self._broker_id, self.id, log_count=len(logs))

    # -- the task ---------------------------------------------------------------------

    def wake(self) -> None:
        """Check soon what is due, and read ZooKeeper."""
        self._read_due_s = 0.0
        self._is_due.set()

    async def _tick(self) -> None:
        """Check what is due by time, several times a second."""
        check_s = max(CLAIM_CHECK_S, min(CHECK_S, self._lag_s / CHECKS_PER_LAG))
        while True:
            self._check()
            self._is_due.set()
            own = self._replica
            is_settled = own is not None and own.role in SETTLED
            self._has_moved.clear()
            await wait_set(self._has_moved, check_s if is_settled else CLAIM_CHECK_S)

    async def _run(self) -> None:
        while True:
            await self._is_due.wait()
            self._is_due.clear()
            try:
                async with self.lock:
                    await self._step()
                self._error = ""
            except (CoordinationError, StorageError, ClosedError) as error:
                # Unfinished actions are due again, by the record or as a disk failure.
                self._read_due_s = 0.0
                if str(error) != self._error:
                    _log.warning("replica %d: %s", self.id, error)
                self._error = str(error)

    def _check(self) -> None:
        """Check the times of a term, even while ZooKeeper or a disk is waited for."""
        self._host.on_check()
        self.mender.check()
        term = self._term
        if term is not None and self.replica.term is not None:
            term.tick(self._clock.monotonic_s())
            self._open_or_refuse(term)

    async def _step(self) -> None:
        """Read changes, and do what is due."""
        if self._is_leaving:
            return
        now_s = self._clock.monotonic_s()
        status = self._nodes.coordinator.status
        if status.state is not SessionState.CONNECTED:
            await self._while_away(status.state)
            return
        if status.session_version != self._session_version:
            self._shown, self._read_due_s = None, 0.0
        if now_s >= self._read_due_s:
            await self._read()
        if self._replica is None or self._replica.role is ReplicaRole.STARTING:
            return
        if (
            status.session_version != self._session_version
            and self._replica.pending is None
        ):
            self._session_version = status.session_version
            await self.apply(renew(self._replica))
        await self._show()
        await self._note_holdings(now_s)
        assert self.seen is not None
        await self.apply(self.mender.note_missing())
        self._claims.note_leader(self.seen.view)
        match self._replica.role:
            case ReplicaRole.IDLE:
                await self._claims.claim_if_due(self.seen.view)
            case ReplicaRole.MERGING:
                await self._claims.lead_if_merged(self.seen.view)
            case ReplicaRole.LEADING:
                await self._keep_set(self.seen.view, now_s)
            case ReplicaRole.DRAINING if not self._replica.pending:
                await self.apply(lead_on(self._replica))

    async def _read(self) -> None:
        self._read_due_s = self._clock.monotonic_s() + READ_INTERVAL_S
        seen = self.seen = await self._nodes.read(synced=True)
        own = self._replica
        if own is None or own.role is ReplicaRole.STARTING or not own.incarnation:
            await self._begin(seen)
        else:
            await self.apply(on_view(own, seen.view))
            await self._register_again(seen)
        if self._term is None:
            self._host.refuse_puts(self.refusal())

    async def _register_again(self, seen: SetView) -> None:
        """Write `members/K` if ZooKeeper came back without it, or with an old one."""
        record, own = seen.view.record, self.replica
        known = seen.members.get(self.id)
        is_known = known is not None and known.incarnation >= own.incarnation
        if record is None or own.role in NO_PART or is_known:
            return
        if self.id in record.replicas:
            name, version = (self.id, own.incarnation), seen.view.version
            change = Change(
                Purpose.REGISTER, record, version, member=name, is_check=True
            )
            held = self._logs.holdings_version
            member = self._store.member(own.file.set_id, held, own.incarnation)
            await self._nodes.propose(change, member=member)

    async def _begin(self, seen: SetView) -> None:
        """Register in the set, or freeze; writes nothing if the number is in use."""
        there = seen.shown.get(self.id)
        if there is not None:
            require_former_process(there, address=self._host.address, token=self.token)
        before = self._replica
        if before is not None and before.role is ReplicaRole.STARTING:
            # Refused, or without a reply: start again from what was read now.
            self._facts = replace(self._facts, file=before.file)
        record, file = seen.view.record, self._facts.file
        if file is None:
            if record is None:
                return
            file = SetFile(record.set_id, self.id, flag=Flag.INCOMPLETE)
        elif record is None and file.record is None:
            return
        member = seen.members.get(self.id)
        own = set(self._logs.identities().values())
        findings = DirectoryFindings(
            # ZooKeeper loses this node with the record; then an operator has decided
            # which copy of the record is valid.
            is_known=member is None or own <= set(member.directories),
            holdings_version=self._logs.holdings_version,
            member_version=member.version if member else 0,
            lacks_bytes=self._facts.lacks_bytes,
            is_cut=self._facts.is_cut,
            is_sealed=self._facts.is_sealed,
        )
        await self._store.finish_deletions()
        await self.apply(start(file, findings, seen.view))
        if before is None:
            self.spawn(self.mender.run(), name="mend")
        if self.replica.role is ReplicaRole.STARTING:
            self._read_due_s = 0.0
        elif before is None or before.role is not self.replica.role:
            begun = self.replica
            facts = begun.role, begun.file.flag.value or "none", begun.record.revision
            text = "replica started: replica=%d role=%s flag=%s revision=%d %s"
            _log.info(text, self.id, *facts, begun.reason)

    async def _show(self) -> None:
        """Keep `present/K` equal to the state of this replica."""
        shown = self._to_show()
        if shown != self._shown:
            await self._nodes.show(shown)
            self._shown = shown
            self._read_due_s = 0.0

    def _to_show(self) -> Shown:
        damaged = self.mender.damaged_count
        presence = replace(self.replica.presence(), damaged=damaged)
        if self._store.failure:
            presence = replace(presence, state=PresenceState.FAILED)
        return Shown(presence, self._host.address, self.token)

    async def _note_holdings(self, now_s: float) -> None:
        """Raise the version of the directories while bytes are synced.

        A backup of a directory then has a lower version than ZooKeeper.
        """
        if self.replica.role in NO_PART or self._store.failure:
            return
        if self._store.has_grown(now_s):
            await self._raise_version()

    async def _raise_version(self) -> bool:
        """Give the directories the next version; True: ZooKeeper has it, too."""
        version = self._logs.holdings_version + 1
        await self._store.save_holdings(version)
        file, incarnation = self.replica.file, self.replica.incarnation
        member = self._store.member(file.set_id, version, incarnation)
        return await self._nodes.write_member(member) is Outcome.APPLIED

    # -- actions ----------------------------------------------------------------------

    async def apply(self, transition: Transition | None) -> bool:
        """Take a step of the core, and carry out its actions; False if there is none.

        The caller holds `lock`.
        """
        if transition is None:
            return False
        before, (replica, actions) = self._replica, transition
        self.set_replica(replica)
        merging = ReplicaRole.MERGING
        if before and before.role is merging and replica.role is not merging:
            # Its remaining truncations and appends must not reach another role.
            await self._claims.end()
            await self._store.finish_writing()
        await self._perform(actions)
        return True

    def set_replica(self, replica: Replica) -> None:
        """Replace the state by one that needs no action."""
        before, self._replica = self._replica, replica
        self._say_frozen(before, replica)
        if before is not None and before.role is not replica.role:
            text = "role changed: replica=%d role=%s epoch=%d"
            _log.info(text, self.id, replica.role, replica.record.epoch.number)
            self._claims.note_role()
            self._has_moved.set()
        if self._term is not None:
            if replica.term is not None:
                self._term.streams.set_term(replica.term)
            else:
                # From here on, acknowledgements do not count.
                self._term.streams.close()

    def _say_frozen(self, before: Replica | None, replica: Replica) -> None:
        old, new = before and _frozen_cause(before), _frozen_cause(replica)
        if new and new != old:
            _log.error("replica is frozen: replica=%d cause=%s", self.id, new)
        elif old and not new:
            _log.info("replica is frozen no more: replica=%d", self.id)

    async def _perform(self, actions: Sequence[Action]) -> None:
        for number, action in enumerate(actions, 1):
            try:
                await self._carry_out(action)
            except StorageError:
                # A term that is over must end, even if the disk fails to record why.
                for later in actions[number:]:
                    if later in STEP_DOWN:
                        await self._carry_out(later)
                raise

    async def _carry_out(self, action: Action) -> None:
        match action:
            case SaveSet(file):
                await self._store.save(file)
            case SaveHoldings(version):
                await self._store.save_holdings(version)
            case Propose(change):
                await self._propose(change)
            case AskTables(members, epoch):
                self._claims.begin_merge(members, epoch)
            case BeginEpoch(epoch):
                await self._store.begin_epoch(epoch)
            case Join(leader, epoch):
                await self._follow(leader, epoch)
            case SimpleAction.STOP_PULLING:
                await self._stop_following()
                await self._store.finish_writing()
            case SimpleAction.STOP_WRITER:
                # A term ends even if a disk hangs; a later join waits for the disk.
                with suppress(StorageError):
                    await self._store.finish_writing()
            case SimpleAction.LOWER_WATERMARKS:
                await self._store.lower_watermarks()
            case SimpleAction.OPEN_PUTS:
                self._begin_term()
            case SimpleAction.REFUSE_PUTS:
                self._host.refuse_puts(self.refusal())
            case SimpleAction.FAIL_IN_FLIGHT:
                self._store.stop_leading()
            case SimpleAction.WITHDRAW:
                self._end_term()
                with suppress(CoordinationError):
                    await self._nodes.withdraw()

    async def _propose(self, change: Change) -> None:
        """Send a change; if there is no reply, the result is read back."""
        own, set_id = change.member, self.replica.file.set_id
        leader = LeaderData(self.id, change.record.epoch, self._host.address)
        outcome = await self._nodes.propose(
            change,
            member=own and self._store.member(set_id, own[1], own[1]),
            leader=leader,
            shown=self._to_show() if change.purpose is Purpose.REGISTER else None,
        )
        self.wake()
        text = "set: %s %s: replica=%d revision=%d epoch=%d in_sync=%s"
        record, what = change.record, (change.purpose.value, outcome.value)
        numbers = self.id, record.revision, record.epoch.number
        _log.info(text, *what, *numbers, sorted(record.in_sync))
        if outcome is Outcome.APPLIED and self.replica.pending == change:
            await self.apply(on_applied(self.replica))

    async def _follow(self, leader: int, epoch: Epoch) -> None:
        """Follow a leader, unless it is being followed already."""
        following = self._following
        if following is None or following.leader != (leader, epoch):
            await self._stop_following()
            self._following = FollowTask(
                self, self._store, leader, epoch, clock=self._clock
            )

    async def _stop_following(self) -> None:
        following, self._following = self._following, None
        if following is not None:
            await following.end()

    # -- leading ----------------------------------------------------------------------

    def _begin_term(self) -> None:
        term = self._term
        if term is None:
            term = self._term = Term(self, self._store, lag_s=self._lag_s)
            tables, epoch = self._store.tables, term.term.epoch
            term.streams.begin()
            self._logs.assign_number = lambda log_id, directory, first: (
                tables.begin_log(log_id, directory, first, epoch)
            )
            self._logs.on_numbered = term.streams.add_log
            tables.on_gone = term.streams.remove_log
            self._host.begin_term(self._last_id)
        self._open_or_refuse(term)

    def _end_term(self) -> None:
        term, self._term = self._term, None
        self._logs.assign_number = self._logs.on_numbered = None
        self._store.tables.on_gone = None
        if term is not None:
            term.streams.close()
            self._host.end_term()

    def _open_or_refuse(self, term: Term) -> None:
        """Refuse puts if it is known that they would not be acknowledged."""
        is_leading = self.replica.role is ReplicaRole.LEADING
        self._host.refuse_puts(
            term.refusal(self._presences) if is_leading else self.refusal()
        )

    @property
    def _presences(self) -> tuple[Presence, ...]:
        return self.seen.view.presences if self.seen else ()

    def refusal(self) -> NotLeaderError:
        """Return the error for puts, with the address of the leader if known."""
        leader = self.seen.leader_address if self.seen else ""
        if leader == self._host.address:
            leader = ""  # this replica does not lead any more, or not yet
        where = f"the leader is {leader}" if leader else "there is no leader now"
        return NotLeaderError(f"replica {self.id} does not lead its set: {where}")

    async def _while_away(self, state: SessionState) -> None:
        """Step down if the session is over and the followers are gone, too."""
        is_over = state is SessionState.LOST
        if is_over and self._term is not None and self._term.streams.stalled():
            _log.warning("replica %d steps down: no session, and no followers", self.id)
            await self.apply(step_down(self.replica))

    async def _keep_set(self, view: View, now_s: float) -> None:
        """Change the in-sync set if due; hand over if this leader cannot continue."""
        term = self._term
        if self.replica.pending is not None:
            return
        failure = self._store.failure or self.mender.missing
        if failure or term is None or term.is_alone(view.presences, now_s):
            # Without a term, the start of the term has failed.
            cause = failure or self._error or "no follower is reached"
            _log.error("replica %d gives up: %s", self.id, cause)
            self._claims.wait(FAILED_FIRST_S)
            transition = give_up(
                self.replica, view.presences, lacks_bytes=bool(failure)
            )
            await self.apply(transition)
        elif not await self.apply(term.next_change(view.presences)):
            await self._transfer_if_asked(view)

    async def _transfer_if_asked(self, view: View) -> None:
        """Hand over to the replica named by an operator, once for each request."""
        record = self.replica.record
        is_asked = record.target not in {NO_REPLICA, self.id}
        if is_asked and record.revision != self._tried_revision:
            self._tried_revision = record.revision
            ready = unflagged(view.presences) & record.in_sync
            if record.target in ready:
                await self._hand_over(record.target, is_sure=False)

    # -- of streams and terms ---------------------------------------------------------

    def knows(self, replica: int, token: str) -> bool:
        """Return whether a token is that of `present/K`; if not, read the node soon."""
        shown = self.seen.shown.get(replica) if self.seen else None
        if shown is not None and shown.token == token:
            return True
        self.wake()
        return False

    def address_of(self, replica: int) -> BrokerAddress | None:
        """Return the address that a replica advertises; None if it advertises none."""
        shown = self.seen.shown.get(replica) if self.seen else None
        return None if shown is None else parse_broker_address(shown.address)

    def on_reopened(self, log: PartitionLog) -> None:
        """Lead or join with a log that follows again; called under `lock`."""
        if self._term is not None:
            self._term.streams.lead_again(log)
        elif self._following is not None:
            self._following.join_again()

    async def read(self) -> View:
        """Read ZooKeeper after a sync; the caller holds `lock`."""
        self.seen = await self._nodes.read(synced=True)
        return self.seen.view

    async def forget_former_process(self) -> None:
        """Delete a `leader` node of an earlier process, whose lock this one has."""
        await self._nodes.withdraw()

    def note_last_id(self, last_id: MessageId) -> None:
        """Note that records with ids up to this one exist."""
        self._last_id = max(self._last_id, last_id)

    def make_log(self, log_id: LogId, start: Offset, number: int) -> PartitionLog:
        """Create a log that follows, with another replica's start and number."""
        settings = self._host.settings_of(log_id.topic)
        return self._logs.get_or_create(
            log_id, settings, start_offset=start, number=number
        )

    async def answer_tables(self, asked: TablesRequest) -> TablesReply:
        """Follow no older epoch from now on, and return the facts of the own copies.

        Raises:
            UnavailableError: this replica may lack bytes itself, or has another epoch.
        """
        async with self.lock:
            if self._replica is None or self._replica.role in TERM_ROLES:
                raise self.refusal()
            await self._read()
            file = self.replica.file
            is_claimed = (asked.set_id, asked.epoch) == (
                file.set_id,
                self.replica.record.epoch,
            )
            if not is_claimed or not await self.apply(
                promise(self.replica, asked.epoch)
            ):
                raise UnavailableError(
                    f"replica {self.id} promises nothing: asked for epoch"
                    f" {asked.epoch.number} of set {asked.set_id}, known is"
                    f" {file.epoch} of {file.set_id}, flag {file.flag or 'none'}"
                )
        self.wake()  # the claimer leads soon
        copies = copies_of(self._logs.logs(), self._store.tables)
        return TablesReply(copies, self._last_id)

    def drop(self, session: object) -> None:
        """Drop the requests of a connection that has ended."""
        if self._term is not None:
            self._term.streams.drop(session)

    # -- the end ----------------------------------------------------------------------

    async def leave(self) -> None:
        """Hand over, and show that this replica stops; never raises."""
        self._is_leaving = True
        try:
            async with asyncio.timeout(HAND_OVER_S), self.lock:
                await self._leave()
        except (MetaqError, TimeoutError) as error:
            _log.warning("replica %d leaves without a word: %r", self.id, error)

    async def _leave(self) -> None:
        if self._replica is None or self.seen is None:
            return
        if self._shown is not None:
            presence = replace(self._shown.presence, state=PresenceState.STOPPING)
            await self._nodes.show(replace(self._shown, presence=presence))
        if self._replica.role is ReplicaRole.LEADING and not self._replica.pending:
            target = successor(self._replica, self.seen.view.presences)
            await self._hand_over(target, is_sure=True)
        # Last, so that no write comes after it but the seal of the logs.
        if self._replica.is_sure and await self._raise_version():
            await self.apply(leave_sure(self._replica, self._logs.holdings_version))

    async def _hand_over(self, target: int, *, is_sure: bool) -> None:
        """Refuse puts, wait for the followers, and end the own term.

        If they have not synced all within `DRAIN_S`, this replica leads on, unless
        `is_sure`: then the term ends, and puts in flight end in doubt.
        """
        await self.apply(drain(self.replica))
        until_s = self._clock.monotonic_s() + DRAIN_S
        if not await self._store.wait_committed(until_s) and not is_sure:
            await self.apply(lead_on(self.replica))
            return
        await self.apply(give_up(self.replica, self._presences, target=target))

    async def _end_streams(self) -> None:
        await self._stop_following()
        await self.answers.end()
        await self._claims.end()
        self._end_term()

    # -- for the operator -------------------------------------------------------------

    def status(self) -> ReplicaStatus:
        """Return the status for monitoring; zeros before ZooKeeper was read."""
        own, term = self._replica, self._term
        if own is None:
            return ReplicaStatus(replica=self.id)
        return ReplicaStatus(
            replica=self.id,
            epoch=self.epoch,
            in_sync_count=len(own.record.in_sync),
            leaderless_s=self._claims.leaderless_s,
            damaged=self.mender.damaged_count,
            mended=self.mender.mended_count,
            mended_bytes=self.mender.mended_bytes,
            differing=self.mender.comparison.differing,
            frozen_cause=_frozen_cause(own),
            lack_of_space=self._store.lack_of_space
            or (self._following.lack_of_space if self._following else ""),
            is_incomplete=own.file.flag is Flag.INCOMPLETE,
            refusal=str((term and term.refusal(self._presences)) or ""),
            followers=() if term is None else term.streams.lag(),
        )

    def facts(self) -> ReplicaFacts:
        """Return the facts that this replica reports about itself."""
        replica, streams = self._replica, self.streams
        return ReplicaFacts(
            replica=self.id,
            role="starting" if replica is None else replica.role.value,
            reason=self._error if replica is None else replica.reason or self._error,
            completed=0 if replica is None else replica.file.completed,
            record=None if replica is None else replica.file.record,
            lag=() if streams is None else streams.lag(),
            mended=self.mender.mended_count,
            logs=logs_of(self._logs.logs()),
        )


def _frozen_cause(replica: Replica) -> str:
    """Return why a replica has no part in its set, in words; "" if it has one."""
    if replica.reason or replica.id in replica.record.replicas:
        return replica.reason
    return (
        f"it is not one of {sorted(replica.record.replicas)}: stop it, or run 'metaq"
        f" replicas add {replica.id}'"
    )
