"""Elections of a set: claims of the next epoch, and merges of its members' data.

Any complete member of the in-sync set may claim, because it has every acknowledged
byte. So ranks only save work; safety does not depend on them. A claimer has stopped
pulling from the old leader before it proposes. It was in every set that this leader
waits for, so nothing that the claimer lacks can be acknowledged any more. No clock is
needed.

Then the claimer asks the other complete members of the old in-sync set for their
copies, and takes from each the tail that it lacks itself ("merging"). No member need
have the longest copy of all 5,000 logs: merging decides for each log. A claimer whose
recovery cut a torn tail (`cut`) may lack bytes: it leads only after `min` members have
replied, counting itself, and at least one other if there is one. If too few reply, a
claimer that is sure that its directories are not an older state of themselves
(`Replica.is_sure`) claims and leads alone after a wait; another must not, because
members with later promises may be among the absent.

Invariants:

* a replica that is `incomplete` never claims, and its reply does not count;
* merging truncates at the divergence point, never below the own high watermark;
* the high watermark of a new leader is the highest that it learned of: all are true.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from metaq.model import Offset
from metaq.replication.epochs import CopyFacts, divergence_point
from metaq.replication.record import NO_REPLICA, SetRecord

CLAIM_WAIT_MS: Final = 10_000
"""Wait before a member that is sure of its bytes claims without the others."""
TARGET_WAIT_MS: Final = 2_000
"""Time for which only the successor chosen by a leader may claim."""
RANK_STEP_MS: Final = 50
"""Pause before a claim, for each replica of better rank."""
MERGE_WAIT_MS: Final = 10_000
"""Wait before a claimer that is sure of its bytes leads with what it has merged."""


class Flag(enum.StrEnum):
    """Mark of a replica that may lack bytes that it promised."""

    NONE = ""
    CUT = "cut"
    """Recovery cut a torn tail: the replica may lack bytes that it promised."""
    INCOMPLETE = "incomplete"
    """The replica lacks bytes that it promised, or cannot know whether it does."""


class PresenceState(enum.StrEnum):
    """State of a replica, as shown in ZooKeeper."""

    RECOVERING = "recovering"
    READY = "ready"
    STOPPING = "stopping"
    FAILED = "failed"
    FROZEN = "frozen"


@dataclass(frozen=True, slots=True)
class Presence:
    """Contents of a replica's node `present/K`, which exists while its session does."""

    replica: int
    incarnation: int
    """Holdings version of the replica when it started."""
    state: PresenceState
    revision: int
    """Revision of the replica's copy of the record."""
    epoch: int
    """Number of the epoch in that copy."""
    flag: Flag = Flag.NONE
    damaged: int = 0
    """Number of damaged ranges; they lower the rank, but never end membership."""

    @property
    def may_count(self) -> bool:
        """Whether it is ready and complete, so that its reply to a merge can count."""
        return self.state is PresenceState.READY and self.flag is not Flag.INCOMPLETE


def counted(presences: Iterable[Presence]) -> frozenset[int]:
    """Return the replicas that are ready and complete, even if they cut a tail."""
    return frozenset(each.replica for each in presences if each.may_count)


def unflagged(presences: Iterable[Presence]) -> frozenset[int]:
    """Return the replicas that are ready and have no flag: those of rule S."""
    return frozenset(
        each.replica for each in presences if each.may_count and not each.flag
    )


def newer_copy(record: SetRecord, presences: Iterable[Presence]) -> Presence | None:
    """Return a replica whose copy of the record is not an ancestor of ZooKeeper's.

    Then ZooKeeper was set back: no replica may claim or lead until an operator has
    restored the record.
    """
    for each in presences:
        if each.revision > record.revision or each.epoch > record.epoch.number:
            return each
        for claim in record.claims:
            if claim.epoch.number > each.epoch and claim.revision <= each.revision:
                return each
    return None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that may claim, and its knowledge of itself."""

    replica: int
    flag: Flag
    waited_ms: int
    """Time since it saw that no replica leads, in milliseconds."""
    is_sure: bool
    """Whether its directories cannot be an older state of themselves
    (`Replica.is_sure`)."""


def may_claim(own: Candidate, record: SetRecord, presences: Iterable[Presence]) -> bool:
    """Return whether a replica may claim now, apart from the pause of its rank.

    Args:
        own: the candidate.
        record: as read; there is no `leader` node.
        presences: presences of all replicas, including its own.
    """
    seen = tuple(presences)
    if own.replica not in record.in_sync or own.flag is Flag.INCOMPLETE:
        return False
    if newer_copy(record, seen) is not None:
        return False
    there = counted(seen)
    if own.replica not in there:
        return False
    is_other = record.target not in {NO_REPLICA, own.replica}
    if is_other and record.target in there and own.waited_ms < TARGET_WAIT_MS:
        return False
    needed = min(record.min, len(record.in_sync))
    if len(record.in_sync & there) >= needed:
        return True
    return own.is_sure and not own.flag and own.waited_ms >= CLAIM_WAIT_MS


def claim_delay_ms(own: int, record: SetRecord, presences: Iterable[Presence]) -> int:
    """Return the pause before a claim, in ms: the better the rank, the shorter.

    The order is: the last leader, then replicas without damage, then those that cut no
    tail; among equals, the lowest number.
    """
    others = [p for p in presences if p.replica in record.in_sync and p.may_count]
    order = sorted(
        others,
        key=lambda p: (p.replica != record.leader, p.damaged > 0, p.flag, p.replica),
    )
    ranks = [each.replica for each in order]
    return RANK_STEP_MS * (ranks.index(own) if own in ranks else len(ranks))


@dataclass(frozen=True, slots=True)
class Merge:
    """State of a claimer between its claim and leading."""

    in_sync: frozenset[int]
    """The in-sync set before the claim; its members may have the missing bytes."""
    min: int
    answered: frozenset[int]
    """Members whose replies are merged, including the claimer."""

    def may_lead(self, flag: Flag, *, waited_ms: int, is_sure: bool) -> bool:
        """Return whether the claimer may start to lead.

        Args:
            flag: flag of the claimer.
            waited_ms: time since its claim was written, in milliseconds.
            is_sure: as in `Candidate`.
        """
        if flag is Flag.INCOMPLETE:
            return False
        # A claimer that may lack bytes needs another member, even if `min` is 1.
        needed = max(self.min, 2) if flag is Flag.CUT else self.min
        if len(self.answered & self.in_sync) >= min(needed, len(self.in_sync)):
            return True
        return is_sure and flag is Flag.NONE and waited_ms >= MERGE_WAIT_MS


def begin_merge(record: SetRecord, claimer: int) -> Merge:
    """Return the merge that follows a claim over this record."""
    return Merge(record.in_sync, record.min, frozenset({claimer}))


def tail_from(own: CopyFacts, other: CopyFacts) -> Offset | None:
    """Return the offset from which the claimer takes over another member's copy.

    None if its own copy has as much. A divergence point below the own high watermark
    would contradict the invariants of the set: then it also takes nothing, and
    `merged_watermark` shows what is missing.
    """
    if other.rank <= own.rank:
        return None
    if other.number != own.number:
        # It is from a later leader, or unknown here, and not committed.
        return other.start if own.hw <= own.start else None
    point = divergence_point(own, other)
    return point if point >= own.hw else None


def merged_watermark(own: CopyFacts, heard: Iterable[Offset]) -> Offset:
    """Return the highest known high watermark; if above the end, bytes are missing."""
    return max(own.hw, *heard)
