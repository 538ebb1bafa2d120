"""A follower's side of a join: truncates, creates or keeps each log before it pulls.

Invariants:

* nothing is truncated below a high watermark that the follower knows, except in a
  forced set;
* a copy that is not known to equal the leader's below the leader's log start is created
  again at that start.
"""

from dataclasses import dataclass, replace

from metaq.model import Offset
from metaq.replication.election import Flag
from metaq.replication.epochs import CopyFacts, EpochTable, adopt_table
from metaq.replication.progress import JoinAnswer
from metaq.replication.record import ReplicaSetError, SetRecord
from metaq.replication.replica import Replica, Transition, freeze


@dataclass(frozen=True, slots=True)
class LogPlan:
    """Changes to one log of a follower before it pulls: truncation, then table."""

    end: Offset
    """Offset at which it is truncated, or at which the new copy begins."""
    hw: Offset
    table: EpochTable
    is_restart: bool = False
    """Whether the copy is moved aside and created again at the leader's log start."""


def plan_log(replica: Replica, own: CopyFacts, answer: JoinAnswer) -> LogPlan | None:
    """Return how a follower's log continues as its leader's.

    None: the leader's log parts below the own high watermark, so one of the two copies
    is not what the set assumes, and nothing may be truncated (`refuse`).

    Args:
        replica: the follower.
        own: its copy.
        answer: the leader's reply about this log.
    """
    begin = answer.copy.start
    is_other = own.number != answer.copy.number
    # Sharing nothing above the log start, they may differ below it, too.
    is_foreign = answer.point <= begin and own.hw < begin
    if replica.file.flag is Flag.INCOMPLETE or is_other or is_foreign:
        table = adopt_table((), answer.copy, begin)
        return LogPlan(begin, begin, table, is_restart=True)
    is_forced = any(e > replica.file.completed for e in replica.record.forced)
    if answer.point < own.hw and not is_forced:
        return None
    hw = min(own.hw, answer.point)
    return LogPlan(answer.point, hw, adopt_table(own.table, answer.copy, answer.point))


def refuse(
    replica: Replica, log_id: object, own: CopyFacts, answer: JoinAnswer
) -> Transition:
    """Return the replica frozen, because a leader's log contradicts its own."""
    reason = (
        f"partition {log_id}: expected equal bytes up to {own.hw}, got {answer.point}:"
        f" {own.table} against {answer.copy.table}"
    )
    frozen, actions = freeze(replica, reason)
    return replace(frozen, refused=replica.record.epoch), actions


def check_newcomer(
    record: SetRecord | None, broker_id: int, replica: int, *, log_count: int
) -> SetRecord:
    """Return the record of a set that a directory without a `set` file may join.

    Args:
        record: record of the set; None: there is no set.
        broker_id: broker id of the set.
        replica: number of the replica that would start.
        log_count: number of logs in its directories.

    Raises:
        ReplicaSetError: it may not join; the text names the command to run.
    """
    if record is None:
        raise ReplicaSetError(
            f"broker {broker_id} is not a replica set yet: run 'metaq replicas init'"
            " where its data is"
        )
    if replica not in record.replicas:
        raise ReplicaSetError(
            f"expected one of replicas {sorted(record.replicas)}, got {replica}: run"
            f" 'metaq replicas add {replica}' first"
        )
    if log_count:
        raise ReplicaSetError(
            f"replica {replica} has {log_count} partitions that do not belong to the"
            " set: run 'metaq replicas join --discard' to start without them"
        )
    return record
