"""Elections of a set: claiming the next epoch, and merging what its members have.

Any complete member of the in-sync set may claim: it has every byte that was
acknowledged. So a rank saves work and decides nothing. A claimer has stopped pulling
from the old leader before it proposes; it was in each set that this leader waits for,
so nothing can be acknowledged any more that the claimer lacks. No clock is needed.

Then it asks the other complete members of the old in-sync set what they have, and takes
from each the tail that it lacks itself ("merging"). There is no longest of 5,000 logs,
and none is needed: it is decided for each log. One whose recovery cut a torn tail
(`cut`) may lack bytes, and leads only after `min` members have answered, itself
counted, and another one where there is one. Without enough answers one claims and leads
alone, after it has waited, if it is sure that its directories are no older state of
themselves (`Replica.is_sure`): who knows of later promises might be among the others.

Invariants:

* a replica that is `incomplete` never claims, and its answer counts for nothing;
* merging cuts at the parting point, never below the own high watermark;
* the high watermark of a new leader is the highest that it heard of: all are true.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from metaq.model import Offset
from metaq.replication.epochs import CopyFacts, parting_point
from metaq.replication.record import NO_REPLICA, SetRecord

CLAIM_WAIT_MS: Final = 10_000
"""After so long a member that is sure of its bytes claims without the others."""
TARGET_WAIT_MS: Final = 2_000
"""So long a leader's chosen successor has the first claim."""
RANK_STEP_MS: Final = 50
"""Pause before a claim, for each replica of a better rank."""
MERGE_WAIT_MS: Final = 10_000
"""After so long a claimer that is sure of its bytes leads with what it has."""


class Flag(enum.StrEnum):
    """Mark of a replica that may lack bytes which it promised."""

    NONE = ""
    CUT = "cut"
    """Recovery cut a torn tail: it may lack bytes that it promised."""
    INCOMPLETE = "incomplete"
    """It lacks bytes that it promised, or cannot know."""


class PresenceState(enum.StrEnum):
    """State of a replica, as others see it in ZooKeeper."""

    RECOVERING = "recovering"
    READY = "ready"
    STOPPING = "stopping"
    FAILED = "failed"
    FROZEN = "frozen"


@dataclass(frozen=True, slots=True)
class Presence:
    """One replica's node `present/K`: there while its session is."""

    replica: int
    incarnation: int
    """Its holdings version at its start."""
    state: PresenceState
    revision: int
    """Of its own copy of the record."""
    epoch: int
    """Number of the epoch of that copy."""
    flag: Flag = Flag.NONE
    damaged: int = 0
    """Number of damaged ranges: they cost rank, never membership."""

    @property
    def may_count(self) -> bool:
        """Whether it is ready and complete: a possible answer of a merge."""
        return self.state is PresenceState.READY and self.flag is not Flag.INCOMPLETE


def counted(presences: Iterable[Presence]) -> frozenset[int]:
    """Return the replicas that are ready and complete; some may have cut a tail."""
    return frozenset(each.replica for each in presences if each.may_count)


def unflagged(presences: Iterable[Presence]) -> frozenset[int]:
    """Return the replicas that are ready and have no flag: those of rule S."""
    return frozenset(
        each.replica for each in presences if each.may_count and not each.flag
    )


def newer_copy(record: SetRecord, presences: Iterable[Presence]) -> Presence | None:
    """Return a replica whose copy has what ZooKeeper's record does not follow from.

    ZooKeeper was set back then: no replica may claim or lead before an operator has
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
    """A replica that would claim, and what it knows of itself."""

    replica: int
    flag: Flag
    waited_ms: int
    """Since it saw that no replica leads."""
    is_sure: bool
    """Whether its directories cannot be an older state (`Replica.is_sure`)."""


def may_claim(own: Candidate, record: SetRecord, presences: Iterable[Presence]) -> bool:
    """Return whether a replica may claim now; the pause of its rank comes after.

    Args:
        own: the candidate.
        record: as read; there is no `leader` node.
        presences: of all replicas, its own among them.
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
    """Return the pause before a claim: the better the rank, the shorter.

    First the last leader, then those without damage, then those that cut no tail; of
    equals the lowest number.
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
    """A claimer's way from its claim to leading."""

    in_sync: frozenset[int]
    """The in-sync set before the claim: who of it answers may have what is missing."""
    min: int
    answered: frozenset[int]
    """Members whose answers are merged; the claimer among them."""

    def may_lead(self, flag: Flag, *, waited_ms: int, is_sure: bool) -> bool:
        """Return whether the claimer may begin to lead.

        Args:
            flag: of the claimer.
            waited_ms: since its claim landed.
            is_sure: as in `Candidate`.
        """
        if flag is Flag.INCOMPLETE:
            return False
        # One that may lack bytes is no witness for itself, also where one is enough.
        needed = max(self.min, 2) if flag is Flag.CUT else self.min
        if len(self.answered & self.in_sync) >= min(needed, len(self.in_sync)):
            return True
        return is_sure and flag is Flag.NONE and waited_ms >= MERGE_WAIT_MS


def begin_merge(record: SetRecord, claimer: int) -> Merge:
    """Return the merge that follows a claim over this record."""
    return Merge(record.in_sync, record.min, frozenset({claimer}))


def tail_from(own: CopyFacts, other: CopyFacts) -> Offset | None:
    """Return where the claimer cuts and goes on as another member's copy.

    None where its own copy has as much. A parting point below the own high watermark
    would contradict the invariants of the set: nothing is taken then either, and
    `merged_watermark` says what is missing.
    """
    if other.rank <= own.rank:
        return None
    if other.number != own.number:
        # A later leader made it, or it was never heard of here; it is not committed.
        return other.start if own.hw <= own.start else None
    point = parting_point(own, other)
    return point if point >= own.hw else None


def merged_watermark(own: CopyFacts, heard: Iterable[Offset]) -> Offset:
    """Return the highest high watermark that is known; above the end, bytes miss."""
    return max(own.hw, *heard)
