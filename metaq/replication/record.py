"""The record of a set in ZooKeeper, and every change that may be proposed to it.

A change is one request, all or nothing: it writes the record over the version that was
read, together with the `leader` node and a replica's own node (`members/K`) if it
concerns them. Functions here return the change, or None if a rule forbids it. Their
callers send it, and learn that it took effect, that it did not, or that the outcome is
unknown.

Rule S: the in-sync set never shrinks below the minimum. A member leaves only if at
least `min` others remain. At the minimum it stays, and the high watermark waits, so
every acknowledged put was synced by `min` replicas, and each complete member has it.
Two changes of an operator start below the minimum, `init` and `elect --force`: from
there the set grows, and nothing is acknowledged until it has `min` members.

Invariants of the record:

* the revision grows by one with each change; epochs grow strictly;
* every epoch of a record is among its claims, of which the last `CLAIMS_KEPT` are kept;
* an epoch has one leader: the `leader` node is created in the request of its claim.
"""

import enum
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeVar

from metaq.errors import CoordinationError
from metaq.replication.epochs import Epoch
from metaq.replication.json_values import FieldError, from_json, to_json

T = TypeVar("T")

SET_FILE: Final = "set"
"""Name of the file with a replica's copy; it has no dash, so no partition has it."""
CLAIMS_KEPT: Final = 64
"""Number of claims in a record; a copy older than all of them is not trusted."""
RESTORE_STEP: Final = 1_000_000
"""Added to revision and epoch when a record is rebuilt from the replicas' copies."""
REPLICA_MAX: Final = 9
"""Highest number of a replica; the lowest is 1."""
NO_REPLICA: Final = 0
"""Value of a leader or target if there is none."""


class EpochClaim(NamedTuple):
    """An epoch, and the revision at which it began."""

    epoch: Epoch
    revision: int


class ReplicaSetError(CoordinationError):
    """The state of a replica set does not allow the request; nothing was changed."""

    retriable = False


@dataclass(frozen=True, slots=True)
class SetRecord:
    """A set, as in ZooKeeper, and in the copy in each replica's `set` file."""

    set_id: str
    """Id of the set, drawn at random when it was created."""
    revision: int
    """Number of changes; unlike a node's version, it survives the node."""
    epoch: Epoch
    leader: int
    """Leader of this epoch; NO_REPLICA after it gave up."""
    in_sync: frozenset[int]
    """Replicas that have every byte below the high watermark, or know that they lack
    some."""
    replicas: frozenset[int]
    """All replicas of the set."""
    min: int
    """Number of replicas that must have synced a put before it is acknowledged."""
    forced: tuple[int, ...] = ()
    """Epochs in which an operator let a replica lead that may lack bytes."""
    claims: tuple[EpochClaim, ...] = ()
    """The last epochs, oldest first."""
    target: int = NO_REPLICA
    """Replica that should claim next: a leader hands over to it."""

    def at(self, number: int, nonce: str, **changes: Any) -> "SetRecord":
        """Return the next record, with a new epoch and other changes."""
        epoch = Epoch(number, nonce)
        revision = changes.pop("revision", self.revision + 1)
        claims = (*self.claims, EpochClaim(epoch, revision))[-CLAIMS_KEPT:]
        fields = {"target": NO_REPLICA, **changes}
        return replace(self, revision=revision, epoch=epoch, claims=claims, **fields)

    def then(self, **changes: Any) -> "SetRecord":
        """Return the next record, with some changes."""
        return replace(self, revision=self.revision + 1, **changes)

    def fault(self) -> str | None:
        """Return the contradiction in the record; None for none."""
        known = self.replicas | {NO_REPLICA}
        if not self.replicas or not self.replicas <= set(range(1, REPLICA_MAX + 1)):
            named = sorted(self.replicas)
            return f"expected replicas from 1 to {REPLICA_MAX}, got {named}"
        if not self.in_sync or not self.in_sync <= self.replicas:
            named = sorted(self.in_sync)
            return f"expected in_sync of {sorted(self.replicas)}, got {named}"
        if not 1 <= self.min <= len(self.replicas):
            return f"expected min from 1 to {len(self.replicas)}, got {self.min}"
        if self.leader not in known or self.target not in known:
            return f"leader {self.leader} or target {self.target} is no replica"
        if not self.claims or self.claims[-1].epoch != self.epoch:
            return f"epoch {self.epoch} is not the last of its claims"
        return None


def encode_record(record: SetRecord) -> bytes:
    """Return the JSON of a record."""
    return to_json(record)


def decode_record(data: bytes) -> SetRecord:
    """Decode a record.

    Raises:
        ReplicaSetError: it is not a record, or contradicts itself.
    """
    return decode(SetRecord, data, "record")


def decode(kind: Callable[..., T], data: bytes, name: str) -> T:
    """Decode a value of a set from a replica or ZooKeeper, as `from_json`.

    Raises:
        ReplicaSetError: it is not a value of this class.
    """
    try:
        return from_json(kind, data, name)
    except FieldError as error:
        raise ReplicaSetError(str(error)) from error


def foreign_reason(copy: SetRecord, record: SetRecord) -> str:
    """Return the reason why a record does not follow from a copy; "" if it may.

    ZooKeeper may have been set back, and then have had other changes. Numbers alone do
    not show that: the record soon has a greater revision than the copy, and an epoch
    number is used again. So claims have nonces, and the revision at which they began: a
    later change in the copy was never made in the history of this record.
    """
    if record.set_id != copy.set_id:
        return f"expected set {copy.set_id}, got {record.set_id}"
    if record.revision < copy.revision:
        return f"expected revision {copy.revision} or more, got {record.revision}"
    if record.revision == copy.revision and record != copy:
        return f"revision {copy.revision} is another change than the one known here"
    epochs = [claim.epoch for claim in record.claims]
    if copy.epoch not in epochs:
        return f"epoch {copy.epoch} of the own copy is none of the record's"
    later = record.claims[epochs.index(copy.epoch) + 1 :]
    if later and later[0].revision <= copy.revision:
        return (
            f"epoch {later[0].epoch} began at revision {later[0].revision}, and"
            f" {copy.revision} is known here of the epoch before"
        )
    return ""


# -- changes --------------------------------------------------------------------------


class Purpose(enum.Enum):
    """Reason of a change."""

    REGISTER = "register"
    CLAIM = "claim"
    RENEW = "renew"
    GIVE_UP = "give up"
    HAND_OVER = "hand over"
    TAKE_OUT = "take out"
    TAKE_IN = "take in"
    OPERATOR = "operator"


class LeaderNode(enum.Enum):
    """Effect of a change on the `leader` node."""

    LEFT = "left alone"
    CREATED = "created: refused where it is there"
    CHECKED = "checked: refused where it is not the proposer's"
    DELETED = "deleted, if it is there"


@dataclass(frozen=True, slots=True)
class Change:
    """One request to ZooKeeper: all of it takes effect, or nothing."""

    purpose: Purpose
    record: SetRecord
    """The record after the change; if it is only checked, the record as read."""
    version: int
    """Version of the record's node over which it is written or checked."""
    leader_node: LeaderNode = LeaderNode.LEFT
    member: tuple[int, int] | None = None
    """Replica and holdings version to write into its own node."""
    member_check: tuple[int, int] | None = None
    """Replica and holdings version: refused if its own node has another version."""
    is_check: bool = False
    """Whether the record is only checked, not written."""


def may_leave(record: SetRecord, leaving: int, ready: AbstractSet[int]) -> bool:
    """Return whether a member may leave the in-sync set: rule S.

    Args:
        record: the confirmed record.
        leaving: the member.
        ready: replicas that are present, ready and without a flag.
    """
    return len((record.in_sync - {leaving}) & ready) >= record.min


def without(
    record: SetRecord, leaving: int, ready: AbstractSet[int] | None
) -> frozenset[int]:
    """Return the in-sync set without a member if rule S allows it, else unchanged.

    `ready` is None for a member that has no reason to leave.
    """
    is_out = ready is not None and may_leave(record, leaving, ready)
    return record.in_sync - {leaving} if is_out else record.in_sync


def plan_register(
    record: SetRecord,
    version: int,
    member: tuple[int, int],
    ready: AbstractSet[int] | None,
) -> Change:
    """Return the change by which a starting replica registers its directories.

    Args:
        record: as read.
        version: version of its node.
        member: the replica, and its new holdings version.
        ready: for an incomplete replica, which leaves by rule S: the replicas that are
            present, ready and without a flag. None for others.
    """
    left = without(record, member[0], ready)
    is_same = left == record.in_sync
    after = record if is_same else record.then(in_sync=left)
    return Change(Purpose.REGISTER, after, version, member=member, is_check=is_same)


def plan_claim(
    record: SetRecord, version: int, claimer: int, nonce: str, ready: AbstractSet[int]
) -> Change | None:
    """Return the change by which a member of the in-sync set takes the next epoch.

    Members that are absent leave at once if enough complete ones are present. Otherwise
    all stay, because an absent one may have bytes that the others lack.

    Args:
        record: as read.
        version: version of its node.
        claimer: the replica that will lead.
        nonce: random text, unique to the claim.
        ready: replicas that are present, ready and without a flag.
    """
    if claimer not in record.in_sync:
        return None
    present = record.in_sync & ready
    kept = present | {claimer} if len(present) >= record.min else record.in_sync
    after = record.at(record.epoch.number + 1, nonce, leader=claimer, in_sync=kept)
    return Change(Purpose.CLAIM, after, version, LeaderNode.CREATED)


def plan_take_out(
    record: SetRecord, version: int, leaving: int, ready: AbstractSet[int]
) -> Change | None:
    """Return the leader's change that removes a member; None if rule S forbids it."""
    if leaving not in record.in_sync or leaving == record.leader:
        return None
    if not may_leave(record, leaving, ready | {record.leader}):
        return None
    after = record.then(in_sync=record.in_sync - {leaving})
    return Change(Purpose.TAKE_OUT, after, version, LeaderNode.CHECKED)


def plan_take_in(
    record: SetRecord, version: int, joining: tuple[int, int]
) -> Change | None:
    """Return the leader's change that adds a replica that has caught up.

    Args:
        record: as read.
        version: version of its node.
        joining: the replica, and the holdings version with which it joined: another
            directory under its number, or an older state of it, is refused.
    """
    if joining[0] in record.in_sync or joining[0] not in record.replicas:
        return None
    after = record.then(in_sync=record.in_sync | {joining[0]})
    return Change(
        Purpose.TAKE_IN, after, version, LeaderNode.CHECKED, member_check=joining
    )


def plan_renew(record: SetRecord, version: int) -> Change:
    """Return the change that creates the `leader` node again, in a new session."""
    return Change(Purpose.RENEW, record, version, LeaderNode.CREATED, is_check=True)


def plan_give_up(
    record: SetRecord,
    version: int,
    ready: AbstractSet[int] | None,
    *,
    target: int = NO_REPLICA,
) -> Change:
    """Return the change by which a leader, or a claimer, ends its term.

    Args:
        record: as confirmed.
        version: version of its node.
        ready: for a leader that lacks bytes or a disk, which leaves by rule S: the
            replicas that are present, ready and without a flag. None for others.
        target: the replica that should claim next.
    """
    in_sync = without(record, record.leader, ready)
    purpose = Purpose.HAND_OVER if target else Purpose.GIVE_UP
    after = record.then(leader=NO_REPLICA, in_sync=in_sync, target=target)
    return Change(purpose, after, version, LeaderNode.DELETED)


# -- acts of an operator --------------------------------------------------------------


def make_record(
    set_id: str, first: int, replicas: AbstractSet[int], *, min_in_sync: int, nonce: str
) -> SetRecord:
    """Return the first record of a set: one replica has the data, others will join.

    Raises:
        ReplicaSetError: the minimum or a number is out of range.
    """
    epoch = Epoch(1, nonce)
    who = frozenset({first}), frozenset(replicas)
    claims = (EpochClaim(epoch, 1),)
    record = SetRecord(set_id, 1, epoch, NO_REPLICA, *who, min_in_sync, claims=claims)
    if fault := record.fault():
        raise ReplicaSetError(f"set {set_id}: {fault}")
    return record


def plan_settings(
    record: SetRecord,
    version: int,
    *,
    replicas: AbstractSet[int] | None = None,
    min_in_sync: int | None = None,
) -> Change:
    """Return the change of the replicas or the minimum.

    Raises:
        ReplicaSetError: the in-sync set would be below the minimum or would have a
            member that is no replica, or a number is out of range.
    """
    after = record.then(
        replicas=record.replicas if replicas is None else frozenset(replicas),
        min=record.min if min_in_sync is None else min_in_sync,
    )
    removed = record.replicas - after.replicas
    if removed & {record.leader}:
        raise ReplicaSetError(
            f"set {record.set_id}: replica {record.leader} leads; hand over first"
        )
    after = replace(after, in_sync=record.in_sync - removed)
    if len(after.in_sync) < after.min:
        raise ReplicaSetError(
            f"set {record.set_id}: expected {after.min} in-sync replicas or more after"
            f" the change, got {sorted(after.in_sync)}"
        )
    if fault := after.fault():
        raise ReplicaSetError(f"set {record.set_id}: {fault}")
    return Change(Purpose.OPERATOR, after, version)


def plan_transfer(record: SetRecord, version: int, target: int) -> Change:
    """Return the change that asks the leader to hand over.

    Raises:
        ReplicaSetError: no replica leads, or the target is not in sync.
    """
    if record.leader == NO_REPLICA:
        raise ReplicaSetError(
            f"set {record.set_id}: no replica leads, so none can hand over"
        )
    if target not in record.in_sync:
        raise ReplicaSetError(
            f"set {record.set_id}: expected one of the in-sync replicas"
            f" {sorted(record.in_sync)}, got {target}"
        )
    return Change(Purpose.OPERATOR, record.then(target=target), version)


def plan_force(record: SetRecord, version: int, forced: int, nonce: str) -> Change:
    """Return the change that lets one replica claim alone, with the bytes that it has.

    It may truncate acknowledged bytes; no other change does.

    Raises:
        ReplicaSetError: it is not a replica of the set.
    """
    if forced not in record.replicas:
        raise ReplicaSetError(
            f"set {record.set_id}: expected one of {sorted(record.replicas)},"
            f" got {forced}"
        )
    number = record.epoch.number + 1
    after = record.at(
        number,
        nonce,
        leader=NO_REPLICA,
        in_sync=frozenset({forced}),
        forced=(*record.forced, number),
    )
    return Change(Purpose.OPERATOR, after, version, LeaderNode.DELETED)


def restored_record(
    copies: Mapping[int, SetRecord],
    found: SetRecord | None,
    *,
    completed: Mapping[int, int],
    missing: AbstractSet[int],
    nonce: str,
) -> SetRecord:
    """Return a record rebuilt from the replicas' copies.

    It replaces a record that is missing in ZooKeeper, or was set back. A leader that
    knows nothing later than a set-back record may have continued from it; bytes that it
    acknowledged are on the in-sync set of that record. So the in-sync set is then the
    intersection of both sets, unless that is empty.

    In the set-back ZooKeeper, a replica may also have claimed before it saw what others
    know. If no replica has led by that claim, it is void: it becomes one of the last
    claims of the new record, so that replicas that know of it can continue, and only
    members of its in-sync set stay members.

    Args:
        copies: replica → the copy in its `set` file.
        found: the record in ZooKeeper, older than some copy; None if there is none.
        completed: replica → number of the epoch in which it last led or completed a
            join; only for replicas without a flag.
        missing: replicas that the operator continues without.
        nonce: random text, unique to the claim.

    Raises:
        ReplicaSetError: copies contradict each other, or one is missing.
    """
    if not copies:
        raise ReplicaSetError("expected the copy of one replica or more, got none")
    newest, void = _history(copies, completed)
    if silent := newest.replicas - copies.keys() - missing:
        raise ReplicaSetError(
            f"set {newest.set_id}: replicas {sorted(silent)} have not reported their"
            " copies of the record; start them, or name them as missing"
        )
    seen = [*copies.values(), *([found] if found else [])]
    revision = max(copy.revision for copy in seen) + RESTORE_STEP
    kept = newest.in_sync.intersection(*(copy.in_sync for copy in void))
    both = kept
    if found is not None and found.leader != NO_REPLICA:
        known = copies.get(found.leader)
        if known is None or known.revision <= found.revision:
            both &= found.in_sync
    others = {claim.epoch for copy in void for claim in copy.claims}
    others -= {claim.epoch for claim in newest.claims}
    ended = tuple(EpochClaim(epoch, revision) for epoch in sorted(others))
    return replace(newest, claims=newest.claims + ended).at(
        max(copy.epoch.number for copy in seen) + RESTORE_STEP,
        nonce,
        revision=revision,
        leader=NO_REPLICA,
        in_sync=both if both - missing else kept,
    )


def _history(
    copies: Mapping[int, SetRecord], completed: Mapping[int, int]
) -> tuple[SetRecord, list[SetRecord]]:
    """Return the newest copy of the one history, and the copies with void claims.

    Raises:
        ReplicaSetError: there are two histories.
    """
    order = sorted(copies, key=lambda k: (copies[k].epoch.number, copies[k].revision))
    refusal = ""
    for first in reversed(order):
        newest = copies[first]
        reasons = {
            replica: reason
            for replica, copy in copies.items()
            if (reason := foreign_reason(copy, newest))
        }
        void = [copies[k] for k in reasons]
        kept = newest.in_sync.intersection(*(copy.in_sync for copy in void))
        is_whole = kept and all(
            _is_void(copy, newest, copies, completed) for copy in void
        )
        if not reasons or is_whole:
            return newest, void
        replica, reason = next(iter(reasons.items()))
        refusal = refusal or (
            f"set {newest.set_id}: the copies of replicas {replica} and {first} are"
            f" of two histories ({reason}); stop the replicas of one of them, and"
            " name these as missing"
        )
    raise ReplicaSetError(refusal)


def _is_void(
    copy: SetRecord,
    newest: SetRecord,
    copies: Mapping[int, SetRecord],
    completed: Mapping[int, int],
) -> bool:
    """Return whether a copy differs from the newest one only by claims that never led.

    A leader saves its claim in its copy, and the epoch as completed, before it accepts
    a put. So the copies of all replicas are needed, and one with a flag proves nothing.
    """
    known = {claim.epoch for claim in newest.claims}
    trunk = [claim for claim in copy.claims if claim.epoch in known]
    if not trunk or (copy.replicas | newest.replicas) - copies.keys():
        return False
    more = copy.claims[copy.claims.index(trunk[-1]) + 1 :]
    if not more:
        return False
    before = replace(copy, epoch=trunk[-1].epoch, revision=more[0].revision - 1)
    if foreign_reason(before, newest):
        return False
    return all(
        replica in completed and completed[replica] < claim.epoch.number
        for claim in more
        for replica, other in copies.items()
        if claim in other.claims
    )
