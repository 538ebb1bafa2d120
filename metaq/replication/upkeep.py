"""A leader's upkeep of its set: who leaves, who joins, and which puts fail. Pure.

Its owner calls several times a second. Safety does not depend on it: a leader without
upkeep acknowledges nothing wrongly, it only waits for replicas that are gone.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Final

from metaq.model import LogId, Offset
from metaq.replication.election import Flag, Presence, PresenceState, unflagged
from metaq.replication.progress import may_put
from metaq.replication.record import NO_REPLICA
from metaq.replication.replica import Replica, Transition, take_in, take_out
from metaq.storage.partition_log import PartitionLog

CHECKS_PER_LAG: Final = 4
"""Number of checks of waiting puts per lag time; bounds how much later they end."""


def incomplete(presences: Iterable[Presence]) -> frozenset[int]:
    """Return the replicas that report that they lack bytes, or may lack them."""
    return frozenset(p.replica for p in presences if p.flag is Flag.INCOMPLETE)


def change_set(
    replica: Replica,
    presences: tuple[Presence, ...],
    *,
    stalled: AbstractSet[int],
    lost: AbstractSet[int],
    caught_up: AbstractSet[int],
) -> Transition | None:
    """Return the next change of the in-sync set; None if none is due or allowed.

    Members that lack bytes leave first, then those that are late or away. A replica
    that has caught up joins if no member can leave.

    Args:
        replica: the leader, with no unfinished change.
        presences: presences of all replicas.
        stalled: followers that are silent, or late by the lag time.
        lost: members found to lack bytes.
        caught_up: followers that have caught up in all logs.
    """
    leaves = PresenceState.STOPPING
    present = {each.replica for each in presences if each.state is not leaves}
    others = replica.record.in_sync - {replica.id}
    short = lost | incomplete(presences)
    leaving = others & (short | stalled | (others - present))
    for member in sorted(leaving, key=lambda k: (k not in short, k)):
        if (transition := take_out(replica, member, presences)) is not None:
            return transition
    for joining in sorted((caught_up & present) - others - stalled - short):
        if (transition := take_in(replica, joining)) is not None:
            return transition
    return None


def refuses_puts(
    replica: Replica, presences: tuple[Presence, ...], stalled: AbstractSet[int]
) -> bool:
    """Return whether a put could not be acknowledged, and so is not appended."""
    return replica.term is None or not may_put(
        replica.term.quorum,
        stalled=stalled,
        flagged=incomplete(presences),
        present={each.replica for each in presences},
    )


def can_others_lead(replica: Replica, presences: tuple[Presence, ...]) -> bool:
    """Return whether the set has a possible leader and its minimum without this one."""
    others = unflagged(presences) - {replica.id}
    return len(others) >= replica.record.min and bool(others & replica.record.in_sync)


def successor(replica: Replica, presences: tuple[Presence, ...]) -> int:
    """Return the replica that should claim next; NO_REPLICA: any may."""
    ready = unflagged(presences) & replica.record.in_sync
    return min(ready - {replica.id}, default=NO_REPLICA)


class WaitingPuts:
    """Puts in flight at a leader, and since when; bounds their wait."""

    def __init__(self, lag_s: float) -> None:
        """Watch no put yet.

        Args:
            lag_s: longest wait of a put for the other replicas, in seconds.
        """
        self._lag_s = lag_s
        self._since: dict[LogId, tuple[Offset, float]] = {}
        self._checked_s = float("-inf")

    def check(self, logs: Mapping[LogId, PartitionLog], now_s: float) -> None:
        """End puts in doubt that have waited for the lag time; cheap if called often.

        Args:
            logs: logs that lead.
            now_s: time of the monotonic clock, in seconds.
        """
        if now_s - self._checked_s < self._lag_s / CHECKS_PER_LAG:
            return
        self._checked_s = now_s
        before, self._since = self._since, {}
        # Most logs are idle, and there may be thousands.
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
