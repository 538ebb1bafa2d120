"""A leader's upkeep of its set: who goes, who comes, what is refused or in doubt. Pure.

Its owner asks some times a second. Nothing here is needed for safety: a leader that
never asks acknowledges nothing that it must not, it only waits for replicas that are
gone.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Final

from metaq.model import LogId, Offset
from metaq.replication.election import Flag, Presence, PresenceState, unflagged
from metaq.replication.progress import may_put
from metaq.replication.record import NO_REPLICA
from metaq.replication.replica import Moved, Replica, take_in, take_out
from metaq.storage.partition_log import PartitionLog

CHECKS: Final = 4
"""Looks at puts in flight within the lag time: so much later at most they end."""


def incomplete(presences: Iterable[Presence]) -> frozenset[int]:
    """Return the replicas that show that they lack bytes, or cannot know."""
    return frozenset(p.replica for p in presences if p.flag is Flag.INCOMPLETE)


def change_set(
    replica: Replica,
    presences: tuple[Presence, ...],
    *,
    stalled: AbstractSet[int],
    lost: AbstractSet[int],
    caught_up: AbstractSet[int],
) -> Moved | None:
    """Return the next change of the in-sync set that is due; None: none is, or may be.

    Members that lack bytes go first, then those that are late or away; a replica that
    has caught up comes in when none of these may go.

    Args:
        replica: the leader, with no change on its way.
        presences: of all replicas.
        stalled: followers that are silent, or late by the lag time.
        lost: members that were found to lack bytes.
        caught_up: followers that have joined all logs.
    """
    leaves = PresenceState.STOPPING
    present = {each.replica for each in presences if each.state is not leaves}
    others = replica.record.in_sync - {replica.id}
    short = lost | incomplete(presences)
    leaving = others & (short | stalled | (others - present))
    for member in sorted(leaving, key=lambda k: (k not in short, k)):
        if (moved := take_out(replica, member, presences)) is not None:
            return moved
    for joining in sorted((caught_up & present) - others - stalled - short):
        if (moved := take_in(replica, joining)) is not None:
            return moved
    return None


def refuses_puts(
    replica: Replica, presences: tuple[Presence, ...], stalled: AbstractSet[int]
) -> bool:
    """Return whether a put is seen not to be acknowledged: it is not appended then."""
    return replica.term is None or not may_put(
        replica.term.quorum,
        stalled=stalled,
        flagged=incomplete(presences),
        present={each.replica for each in presences},
    )


def can_others_lead(replica: Replica, presences: tuple[Presence, ...]) -> bool:
    """Return whether the set has a leader and its minimum without this replica."""
    others = unflagged(presences) - {replica.id}
    return len(others) >= replica.record.min and bool(others & replica.record.in_sync)


def successor(replica: Replica, presences: tuple[Presence, ...]) -> int:
    """Return who is to claim next; NO_REPLICA: any may."""
    ready = unflagged(presences) & replica.record.in_sync
    return min(ready - {replica.id}, default=NO_REPLICA)


class WaitingPuts:
    """Puts in flight at a leader, and since when: they must not wait for ever."""

    def __init__(self, lag_s: float) -> None:
        """Watch no put yet.

        Args:
            lag_s: so long a put may wait for the other replicas, seconds.
        """
        self._lag_s = lag_s
        self._since: dict[LogId, tuple[Offset, float]] = {}
        self._checked_s = float("-inf")

    def check(self, logs: Mapping[LogId, PartitionLog], now_s: float) -> None:
        """End in doubt what has waited for the lag time; cheap between two looks.

        Args:
            logs: that lead.
            now_s: the monotonic clock.
        """
        if now_s - self._checked_s < self._lag_s / CHECKS:
            return
        self._checked_s = now_s
        before, self._since = self._since, {}
        # Most logs are at rest, and there may be thousands.
        moving = [x for x in logs.values() if x.next_offset > x.high_watermark]
        for log in moving:
            until, since_s = before.get(log.log_id, (Offset(0), now_s))
            if log.high_watermark < until and now_s - since_s < self._lag_s:
                self._since[log.log_id] = until, since_s
                continue
            if log.high_watermark < until:
                log.end_in_doubt(
                    f"partition {log.log_id}: the in-sync replicas have not all"
                    f" synced it within {self._lag_s:g} s",
                    until=until,
                )
            self._since[log.log_id] = log.next_offset, now_s
