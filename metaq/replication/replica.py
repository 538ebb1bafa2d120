"""One replica of a set: its role, and the actions that each event causes. Pure.

    STARTING --registered--> IDLE --leader seen--> FOLLOWING --leader gone--> IDLE
                              |
                              +--claims--> CLAIMING -applied--> MERGING --> LEADING
                                              |                    |          |  ^
                                              +----- refused ------+-- IDLE <-+  |
                                                                          |  DRAINING
    any --the record contradicts the own copy--> FROZEN

Functions take the state of the replica and an event, and return the next state and the
actions, which the owner carries out one by one. A `SaveSet` is durable before the next
action; a crash may come between any two actions. Nothing here waits. Only what was read
from ZooKeeper, or confirmed by it, counts: if the reply to a change is lost, the result
is read after a sync, in the same session or a later one, and the change is never
repeated.

Invariants:

* puts are accepted only in LEADING;
* the `set` file has an epoch and a revision before the first pull, put or reply in it;
* `incomplete` is in the `set` file before the replica shows itself or truncates;
* a flag is cleared by leading after a merge, by following up to the target, or by
  force;
* a step-down replies to puts in flight before a high watermark can rise again.
"""

import enum
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from metaq.replication.election import (
    Candidate,
    Flag,
    Merge,
    Presence,
    PresenceState,
    begin_merge,
    may_claim,
    newer_copy,
    unflagged,
)
from metaq.replication.epochs import NO_EPOCH, Epoch
from metaq.replication.progress import Leadership, Quorum
from metaq.replication.record import (
    NO_REPLICA,
    Change,
    Purpose,
    SetRecord,
    foreign_reason,
    plan_claim,
    plan_give_up,
    plan_register,
    plan_renew,
    plan_take_in,
    plan_take_out,
)


class ReplicaRole(enum.StrEnum):
    """Role of a replica in its set."""

    STARTING = "starting"
    """Its directory is not registered in the set yet."""
    IDLE = "idle"
    """No leader is known; the stream of the last leader may continue."""
    CLAIMING = "claiming"
    MERGING = "merging"
    LEADING = "leading"
    DRAINING = "draining"
    """Leads, but refuses puts until it has handed over."""
    FOLLOWING = "following"
    FROZEN = "frozen"
    """Serves only gets; an operator must decide."""


class RoleEvent(enum.StrEnum):
    """Event that changes a role."""

    REGISTERED = "registered"
    LEADER_SEEN = "leader seen"
    LEADER_GONE = "leader gone"
    CLAIM = "claim"
    CLAIMED = "claimed"
    MERGED = "merged"
    DRAIN = "drain"
    LEAD_ON = "lead on"
    STEP_DOWN = "step down"
    FREEZE = "freeze"
    THAW = "thaw"


R, E = ReplicaRole, RoleEvent

TRANSITIONS: Final = {
    (R.STARTING, E.REGISTERED): R.IDLE,
    (R.IDLE, E.LEADER_SEEN): R.FOLLOWING,
    (R.FOLLOWING, E.LEADER_SEEN): R.FOLLOWING,
    (R.FOLLOWING, E.LEADER_GONE): R.IDLE,
    (R.IDLE, E.CLAIM): R.CLAIMING,
    (R.CLAIMING, E.CLAIMED): R.MERGING,
    (R.MERGING, E.MERGED): R.LEADING,
    (R.LEADING, E.DRAIN): R.DRAINING,
    (R.DRAINING, E.LEAD_ON): R.LEADING,
    (R.FROZEN, E.THAW): R.IDLE,
    **{
        (role, E.STEP_DOWN): R.IDLE
        for role in (R.CLAIMING, R.MERGING, R.LEADING, R.DRAINING)
    },
    **{(role, E.FREEZE): R.FROZEN for role in R},
}
TERM_ROLES: Final = frozenset({R.CLAIMING, R.MERGING, R.LEADING, R.DRAINING})
"""Roles in which an epoch is, or may become, the replica's own."""


def next_role(role: ReplicaRole, event: RoleEvent) -> ReplicaRole:
    """Return the role after an event.

    Raises:
        AssertionError: the event is not possible in this role.
    """
    after = TRANSITIONS.get((role, event))
    assert after is not None, f"replica is {role}, got {event}"
    return after


# -- state ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SetFile:
    """The replica's `set` file: state that must survive a restart."""

    set_id: str
    replica: int
    record: SetRecord | None = None
    """Copy of the newest record that it has seen."""
    epoch: int = 0
    """Highest number of an epoch that it led, followed, claimed or promised."""
    completed: int = 0
    """Number of the last epoch in which it completed a join, or led."""
    flag: Flag = Flag.NONE
    clean: int = 0
    """Holdings version of its last stop while it was sure of its directories."""


@dataclass(frozen=True, slots=True)
class DirectoryFindings:
    """Findings in the directories at the start, compared with ZooKeeper's."""

    is_known: bool
    """Whether the identities are those in `members/K`, or there is no such node."""
    holdings_version: int
    """Holdings version of the directories."""
    member_version: int
    """Holdings version in `members/K`."""
    lacks_bytes: bool = False
    """Whether logs are missing, end below their high watermark, or have no epochs."""
    is_cut: bool = False
    """Whether recovery will cut a torn tail."""
    is_sealed: bool = False
    """Whether a clean stop closed all directories, which are unused since."""

    def is_sure(self, clean: int) -> bool:
        """Return whether the directories are as a sure replica left them.

        The seal shows the end of that process, so this is no earlier backup. A later
        process would have written a greater version to ZooKeeper; a lower one there was
        set back.
        """
        return self.is_sealed and clean == self.holdings_version == self.member_version

    def flag(self, kept: Flag) -> Flag:
        """Return the flag at the start, given the flag in the `set` file."""
        is_proven = self.is_known and self.holdings_version >= self.member_version
        if kept is Flag.INCOMPLETE or not is_proven or self.lacks_bytes:
            return Flag.INCOMPLETE
        return Flag.CUT if self.is_cut else kept


@dataclass(frozen=True, slots=True)
class LeaderSeen:
    """The `leader` node as read."""

    replica: int
    epoch: Epoch
    is_own: bool
    """Whether the node is of the reader's current session."""


@dataclass(frozen=True, slots=True)
class View:
    """ZooKeeper as read by a replica: first the presences, then the record."""

    record: SetRecord | None
    version: int
    leader: LeaderSeen | None
    presences: tuple[Presence, ...]
    is_synced: bool
    """Whether it was read after a sync; otherwise it may be out of date."""


@dataclass(frozen=True, slots=True)
class Replica:
    """State of one replica. Owned by the shell that runs it, on the loop."""

    role: ReplicaRole
    file: SetFile
    """The `set` file, as it is on disk after the actions."""
    version: int
    """Version of the record's node, as last read or confirmed."""
    incarnation: int = 0
    """Holdings version of this process; 0 until it is registered."""
    stream: Epoch = NO_EPOCH
    """Epoch of the leader from which it pulls."""
    pending: Change | None = None
    """The unfinished change; at most one."""
    merge: Merge | None = None
    term: Leadership | None = None
    """Its term while it leads."""
    refused: Epoch = NO_EPOCH
    """Epoch of a leader whose log contradicts the own high watermark."""
    reason: str = ""
    """Reason why it is frozen."""
    is_sure: bool = False
    """Whether its directories cannot be an older state of themselves, because a clean
    stop left them so, or it has since led or caught up with a leader."""

    @property
    def id(self) -> int:
        """Number of the replica."""
        return self.file.replica

    @property
    def record(self) -> SetRecord:
        """The record as last read or confirmed; if frozen, the own copy."""
        assert self.file.record is not None, f"replica {self.id} has read no record"
        return self.file.record

    def presence(self) -> Presence:
        """Return its presence, as shown to the others."""
        states = {R.STARTING: PresenceState.RECOVERING, R.FROZEN: PresenceState.FROZEN}
        state = states.get(self.role, PresenceState.READY)
        seen = self.record.revision, self.record.epoch.number
        return Presence(self.id, self.incarnation, state, *seen, self.file.flag)


# -- actions --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SaveSet:
    """Write the `set` file, synced."""

    file: SetFile


@dataclass(frozen=True, slots=True)
class SaveHoldings:
    """Write the version of the directories, synced; with new identities if unproven."""

    version: int


@dataclass(frozen=True, slots=True)
class Propose:
    """Send a change to ZooKeeper, and report the result."""

    change: Change


@dataclass(frozen=True, slots=True)
class AskTables:
    """Ask members for their tables, ends and high watermarks, under a claimed epoch."""

    members: frozenset[int]
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class BeginEpoch:
    """Write the start of an epoch at the end of every log, synced."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Join:
    """Connect to a leader, and join all logs."""

    leader: int
    epoch: Epoch


class SimpleAction(enum.Enum):
    """An action without an argument."""

    STOP_PULLING = "close the stream, and let the writer finish: ends are fixed"
    LOWER_WATERMARKS = "set high watermarks above the end of a log to it, synced"
    OPEN_PUTS = "take puts"
    REFUSE_PUTS = "refuse puts before they are appended"
    FAIL_IN_FLIGHT = "answer puts in flight as in doubt, and keep their bytes and notes"
    STOP_WRITER = "drop what is queued, and wait for what is being written"
    WITHDRAW = "delete the nodes of a leader"


Action: TypeAlias = (
    SaveSet | SaveHoldings | Propose | AskTables | BeginEpoch | Join | SimpleAction
)
Transition: TypeAlias = tuple[Replica, tuple[Action, ...]]
"""The next state, and the actions in order."""

STEP_DOWN: Final = (
    SimpleAction.REFUSE_PUTS,
    SimpleAction.FAIL_IN_FLIGHT,
    SimpleAction.STOP_WRITER,
    SimpleAction.WITHDRAW,
)
"""In this order, because puts still in flight when this copy follows would be
acknowledged by the high watermark of another leader."""


# -- starting, and reading ZooKeeper --------------------------------------------------


def start(file: SetFile, findings: DirectoryFindings, view: View) -> Transition:
    """Return a starting replica, which registers in ZooKeeper or is frozen.

    Args:
        file: its `set` file.
        findings: findings of the start.
        view: read after a sync.
    """
    record = view.record or file.record
    assert record is not None, "a set file without a record, and none in ZooKeeper"
    replica = Replica(R.STARTING, file, view.version)
    if reason := contradiction(file, view):
        return replace(replica, role=R.FROZEN, reason=reason), ()
    flag = findings.flag(file.flag)
    saved = replace(file, record=record, flag=flag)
    version = max(findings.holdings_version, findings.member_version) + 1
    is_incomplete = flag is Flag.INCOMPLETE
    ready = unflagged(view.presences) - {replica.id} if is_incomplete else None
    change = plan_register(record, view.version, (replica.id, version), ready)
    lowered = (SimpleAction.LOWER_WATERMARKS,) if is_incomplete else ()
    is_sure = not flag and findings.is_sure(file.clean)
    return (
        replace(
            replica, file=saved, incarnation=version, pending=change, is_sure=is_sure
        ),
        (SaveSet(saved), *lowered, SaveHoldings(version), Propose(change)),
    )


def contradiction(file: SetFile, view: View) -> str:
    """Return the reason why the record cannot follow from the own copy; "" if it can.

    A record that looks older is no contradiction if it may be out of date.
    """
    copy = file.record
    if copy is None:
        return ""
    if view.record is None:
        return "the record is missing" if view.is_synced else ""
    reason = foreign_reason(copy, view.record)
    if reason and (view.is_synced or view.record.revision >= copy.revision):
        return reason
    ahead = newer_copy(view.record, view.presences) if view.is_synced else None
    if ahead is not None:
        return (
            f"replica {ahead.replica} has revision {ahead.revision} of epoch"
            f" {ahead.epoch}, from which the record does not follow"
        )
    return ""


def on_view(replica: Replica, view: View) -> Transition:
    """Return the step after a read of ZooKeeper, caused by a watch, timer or change."""
    if replica.role is R.STARTING or replica.incarnation == 0:
        return replica, ()  # the shell starts it again
    if reason := contradiction(replica.file, view):
        return freeze(replica, reason)
    copy = replica.file.record
    if view.record is None or (copy and view.record.revision < copy.revision):
        return replica, ()  # the view is out of date
    if replica.pending is None:
        return _adopt_view(replica, view)
    if not view.is_synced:
        return replica, ()  # it does not show the outcome of the change
    transition, actions = _read_back(replica, replica.pending, view)
    after, others = _adopt_view(transition, view)
    return after, (*actions, *others)


def _read_back(replica: Replica, change: Change, view: View) -> Transition:
    """Find out whether an unconfirmed or refused change took effect."""
    assert view.record is not None
    is_claim = change.purpose is Purpose.CLAIM
    replica = replace(replica, pending=None)
    if is_claim and view.record.epoch == change.record.epoch:
        return _applied(replica, change, view.version)
    is_renewed = view.leader is not None and view.leader.is_own
    if is_claim or (change.purpose is Purpose.RENEW and not is_renewed):
        return step_down(replica)
    return replica, ()


def _adopt_view(replica: Replica, view: View) -> Transition:
    """Adopt a record that is not older than the own copy."""
    record = view.record
    assert record is not None
    own_epoch = replica.record.epoch
    replica, actions = _adopt_record(replica, record, view.version)
    if replica.role in TERM_ROLES:
        if record.epoch != own_epoch or record.leader != replica.id:
            # First, so that it also happens if the disk cannot save the record.
            replica, stopped = step_down(replica)
            return replica, (*stopped, *actions)
        return _settle(replica, record), actions
    if replica.role is R.FROZEN:
        if replica.refused == record.epoch:
            return replica, actions
        role = next_role(replica.role, E.THAW)
        replica = replace(replica, role=role, reason="", refused=NO_EPOCH)
    if replica.stream < record.epoch and replica.stream != NO_EPOCH:
        replica = replace(replica, stream=NO_EPOCH)
        actions = (*actions, SimpleAction.STOP_PULLING)
    leader = view.leader
    if leader is None or leader.epoch != record.epoch or record.leader == NO_REPLICA:
        if replica.role is R.FOLLOWING:
            role = next_role(replica.role, E.LEADER_GONE)
            replica = replace(replica, role=role)
        replica, forced = _obey_force(replica, record)
        return replica, (*actions, *forced)
    if leader.replica == replica.id or leader.epoch.number < replica.file.epoch:
        return replica, actions  # of an earlier process, or before a promise
    replica, followed = _follow(replica, leader)
    return replica, (*actions, *followed)


def _adopt_record(replica: Replica, record: SetRecord, version: int) -> Transition:
    """Save a record before anything is done under it."""
    if replica.record == record:
        return replace(replica, version=version), ()
    saved = replace(replica.file, record=record)
    return replace(replica, version=version, file=saved), (SaveSet(saved),)


def _settle(replica: Replica, record: SetRecord) -> Replica:
    """Use a record that is known to be ZooKeeper's, with no unfinished change."""
    if replica.term is None:
        return replica
    quorum = replica.term.quorum.settle(record.in_sync, min_in_sync=record.min)
    return replace(replica, term=replace(replica.term, quorum=quorum))


def _obey_force(replica: Replica, record: SetRecord) -> Transition:
    """Trust the own data if an operator has chosen it as the only data."""
    is_forced = record.forced[-1:] == (record.epoch.number,)
    is_chosen = record.in_sync == {replica.id} and is_forced
    if not is_chosen or replica.file.completed >= record.epoch.number:
        return replica, ()
    saved = replace(replica.file, flag=Flag.NONE, completed=record.epoch.number)
    return replace(replica, file=saved), (SimpleAction.LOWER_WATERMARKS, SaveSet(saved))


def on_applied(replica: Replica) -> Transition:
    """Return the step after ZooKeeper has confirmed that the change took effect.

    After a refusal, or without a reply, a view is read after a sync (`on_view`).
    """
    change = replica.pending
    assert change is not None, f"replica {replica.id} has proposed nothing"
    version = change.version if change.is_check else change.version + 1
    return _applied(replace(replica, pending=None), change, version)


def _applied(replica: Replica, change: Change, version: int) -> Transition:
    before = replica.record
    replica, actions = _adopt_record(replica, change.record, version)
    if change.purpose is Purpose.REGISTER:
        role = next_role(replica.role, E.REGISTERED)
        return replace(replica, role=role), actions
    if change.purpose is Purpose.CLAIM:
        merge = begin_merge(before, replica.id)
        role = next_role(replica.role, E.CLAIMED)
        others = merge.in_sync - {replica.id}
        replica = replace(replica, role=role, merge=merge)
        return replica, (*actions, AskTables(others, change.record.epoch))
    if change.purpose in {Purpose.GIVE_UP, Purpose.HAND_OVER}:
        replica, stopped = step_down(replica)
        return replica, (*stopped, *actions)
    return _settle(replica, change.record), actions


def freeze(replica: Replica, reason: str) -> Transition:
    """Return the replica, frozen until an operator has acted."""
    stopped: tuple[Action, ...] = ()
    if replica.role in TERM_ROLES:
        replica, stopped = step_down(replica)
    role = next_role(replica.role, E.FREEZE)
    frozen = replace(
        replica, role=role, reason=reason, stream=NO_EPOCH, pending=None, is_sure=False
    )
    return frozen, (*stopped, SimpleAction.STOP_PULLING)


# -- claiming and merging -------------------------------------------------------------


def claim(
    replica: Replica, view: View, nonce: str, *, waited_ms: int
) -> Transition | None:
    """Return the claim of an idle replica; None if it may not claim yet.

    Args:
        replica: the current state.
        view: read after a sync.
        nonce: random text, unique to the claim.
        waited_ms: time since it saw that no replica leads, in milliseconds.
    """
    record = view.record
    if replica.role is not R.IDLE or view.leader is not None or record is None:
        return None
    own = Candidate(replica.id, replica.file.flag, waited_ms, replica.is_sure)
    if not view.is_synced or not may_claim(own, record, view.presences):
        return None
    ready = unflagged(view.presences)
    change = plan_claim(record, view.version, replica.id, nonce, ready)
    if change is None or contradiction(replica.file, view):
        return None
    replica, known = _adopt_record(replica, record, view.version)
    role = next_role(replica.role, E.CLAIM)
    after = replace(replica, role=role, pending=change, stream=NO_EPOCH)
    # End the stream first: from here on, the old leader waits for this replica.
    return after, (SimpleAction.STOP_PULLING, *known, Propose(change))


def promise(replica: Replica, epoch: Epoch) -> Transition | None:
    """Return the replica after its promise to a claimer to follow no older epoch.

    None: it may lack bytes itself, has a newer promise, or takes part in a term.
    """
    newest = max(replica.file.epoch, replica.record.epoch.number)
    if replica.role not in {R.IDLE, R.FOLLOWING} or epoch.number < newest:
        return None
    if replica.file.flag is Flag.INCOMPLETE:
        return None
    saved = replace(replica.file, epoch=epoch.number)
    after = replace(replica, role=R.IDLE, stream=NO_EPOCH, file=saved)
    return after, (SimpleAction.STOP_PULLING, SaveSet(saved))


def merged(replica: Replica, member: int) -> Replica:
    """Return the claimer after it has merged all bytes of a member."""
    assert replica.merge is not None, f"replica {replica.id} is {replica.role}"
    answered = replica.merge.answered | {member}
    return replace(replica, merge=replace(replica.merge, answered=answered))


def lead(replica: Replica, *, waited_ms: int) -> Transition | None:
    """Return the claimer as leader; None if it may not lead (yet).

    The progress of every log starts then (`begin_progress`).
    """
    merge = replica.merge
    if replica.role is not R.MERGING or merge is None or replica.pending is not None:
        return None
    is_sure = replica.is_sure
    if not merge.may_lead(replica.file.flag, waited_ms=waited_ms, is_sure=is_sure):
        return None
    record = replica.record
    saved = replace(
        replica.file,
        flag=Flag.NONE,
        epoch=record.epoch.number,
        completed=record.epoch.number,
    )
    quorum = Quorum(replica.id, record.in_sync, record.min)
    after = replace(
        replica,
        role=next_role(replica.role, E.MERGED),
        file=saved,
        merge=None,
        term=Leadership(record.epoch, quorum),
        is_sure=True,
    )
    return after, (BeginEpoch(record.epoch), SaveSet(saved), SimpleAction.OPEN_PUTS)


# -- leading --------------------------------------------------------------------------


def _propose(replica: Replica, change: Change | None) -> Transition | None:
    """Propose a change of the in-sync set; high watermarks wait for both sets."""
    if change is None or replica.pending is not None or replica.term is None:
        return None
    quorum = replica.term.quorum.propose(change.record.in_sync)
    term = replace(replica.term, quorum=quorum)
    return replace(replica, term=term, pending=change), (Propose(change),)


def take_out(
    replica: Replica, leaving: int, presences: tuple[Presence, ...]
) -> Transition | None:
    """Return the leader's proposal to remove a member; None if rule S forbids it.

    Once it took effect, the logs forget that the member had joined
    (`LogProgress.leave`).
    """
    ready = unflagged(presences)
    change = plan_take_out(replica.record, replica.version, leaving, ready)
    return _propose(replica, change)


def take_in(replica: Replica, joining: int) -> Transition | None:
    """Return the leader's proposal to add a replica that has joined all logs."""
    incarnation = dict(replica.term.incarnations).get(joining) if replica.term else None
    if incarnation is None:
        return None
    change = plan_take_in(replica.record, replica.version, (joining, incarnation))
    return _propose(replica, change)


def note_join(replica: Replica, follower: int, incarnation: int) -> Replica:
    """Return the leader that knows the incarnation with which a follower has joined."""
    if replica.term is None:
        return replica
    return replace(replica, term=replica.term.join(follower, incarnation))


def saved_by(replica: Replica, follower: int, revision: int) -> Replica:
    """Return the leader that knows the record that a follower has saved.

    Once all others have saved it, members that left are no longer waited for.
    """
    if replica.term is None:
        return replica
    current = replica.record.revision
    term = replica.term.save(follower, revision, current=current)
    return replace(replica, term=term)


def renew(replica: Replica) -> Transition | None:
    """Return the leader's proposal to continue in a new session of the same process."""
    if replica.role not in TERM_ROLES or replica.pending is not None:
        return None
    change = plan_renew(replica.record, replica.version)
    return replace(replica, pending=change), (Propose(change),)


def drain(replica: Replica) -> Transition:
    """Return the leader that refuses puts, before it hands over."""
    after = replace(replica, role=next_role(replica.role, E.DRAIN))
    return after, (SimpleAction.REFUSE_PUTS,)


def lead_on(replica: Replica) -> Transition:
    """Return the leader after a hand-over that failed."""
    after = replace(replica, role=next_role(replica.role, E.LEAD_ON))
    return after, (SimpleAction.OPEN_PUTS,)


def give_up(
    replica: Replica,
    presences: tuple[Presence, ...],
    *,
    lacks_bytes: bool = False,
    target: int = NO_REPLICA,
) -> Transition | None:
    """Return the proposal to end the own term; it steps down once that took effect.

    Args:
        replica: leads, or merges.
        presences: presences of all replicas.
        lacks_bytes: whether it lacks bytes or a disk, and so leaves the set by rule S.
        target: replica that should claim next: ready, complete and in sync.
    """
    is_term = replica.role in TERM_ROLES - {R.CLAIMING}
    if not is_term or replica.pending is not None:
        return None
    ready = unflagged(presences) - {replica.id} if lacks_bytes else None
    change = plan_give_up(replica.record, replica.version, ready, target=target)
    return replace(replica, pending=change), (Propose(change),)


def step_down(replica: Replica) -> Transition:
    """Return the replica after its term, or its attempt at one."""
    steps = STEP_DOWN if replica.term is not None else ()
    after = replace(
        replica,
        role=next_role(replica.role, E.STEP_DOWN),
        merge=None,
        term=None,
        pending=None,
    )
    return after, steps


def declare_incomplete(replica: Replica) -> Transition:
    """Return a replica that has learned that it lacks promised bytes.

    It joins again with nothing: the join moves its logs aside.
    """
    saved = replace(replica.file, flag=Flag.INCOMPLETE)
    after = replace(replica, file=saved, stream=NO_EPOCH, is_sure=False)
    return after, (SimpleAction.STOP_PULLING, SaveSet(saved))


# -- following ------------------------------------------------------------------------


def _follow(replica: Replica, leader: LeaderSeen) -> Transition:
    role = next_role(replica.role, E.LEADER_SEEN)
    if replica.stream == leader.epoch:
        return replace(replica, role=role), ()
    saved = replace(replica.file, epoch=leader.epoch.number)
    after = replace(replica, role=role, file=saved)
    return after, (SaveSet(saved), Join(leader.replica, leader.epoch))


def joined(replica: Replica, epoch: Epoch) -> Transition:
    """Return the follower after all truncations and tables of a join; it may pull."""
    completed = replica.file.completed
    if not replica.file.flag:
        completed = epoch.number
    saved = replace(replica.file, completed=completed)
    return replace(replica, stream=epoch, file=saved), (SaveSet(saved),)


def caught_up(replica: Replica) -> Transition:
    """Return the follower whose logs have all reached their targets: it is complete.

    Saved before the acknowledgement that reports it.
    """
    number = replica.stream.number
    saved = replace(replica.file, flag=Flag.NONE, completed=number)
    return replace(replica, file=saved, is_sure=True), (SaveSet(saved),)


def leave_sure(replica: Replica, version: int) -> Transition | None:
    """Return the stopping replica, which may trust its directories at its next start.

    None if it does not trust them itself: a stop does not make an older state good.

    Args:
        replica: the state at the stop.
        version: version written to its directories and ZooKeeper for this stop.
    """
    if not replica.is_sure:
        return None
    saved = replace(replica.file, clean=version)
    return replace(replica, file=saved), (SaveSet(saved),)


def takes_data(replica: Replica, epoch: Epoch) -> bool:
    """Return whether to append bytes of a leader: it follows, or did until now."""
    return replica.stream == epoch and replica.role in {R.FOLLOWING, R.IDLE}
