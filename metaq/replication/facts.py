"""Facts that a replica reports about itself: for health, metrics and other replicas.

`stats replica` returns `ReplicaFacts` as JSON, in any role: even a frozen replica shows
its copy of the record and the ends of its logs, which `restore` and `elect` need.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from metaq.model import LogId
from metaq.peer.replies import parse_stats
from metaq.replication.json_values import LogNumber, to_json
from metaq.replication.record import SetRecord, decode
from metaq.stats import counter, gauge, part
from metaq.storage.partition_log import PartitionLog

ITEM: Final = "replica"
"""Item of `stats` for the facts of a replica."""


@dataclass(frozen=True, slots=True)
class FollowerLag:
    """Lag of a follower, for status output."""

    replica: int
    state: str
    """`in sync`, `joining` or `out`."""
    is_connected: bool
    lag_bytes: int = gauge(
        "metaq_follower_lag_bytes", "Bytes that a follower of this leader lacks."
    )
    lag_s: float = gauge(
        "metaq_follower_lag_seconds", "Time since a follower had all of them."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """Status of this broker as one replica of a set."""

    replica: int
    epoch: int = gauge(
        "metaq_replica_epoch",
        "Epoch in which this replica leads its set, 0 while it does not.",
    )
    in_sync_count: int = gauge(
        "metaq_replica_in_sync", "In-sync replicas of a set, as this one knows it."
    )
    leaderless_s: float = gauge(
        "metaq_replica_leaderless_seconds",
        "Time for which this replica has seen no leader.",
    )
    damaged: int = gauge(
        "metaq_replica_damaged_ranges",
        "Damaged ranges on this replica that are to be mended from another.",
        default=0,
    )
    mended: int = counter(
        "metaq_replica_mended_ranges_total",
        "Damaged ranges that were mended from another replica.",
        default=0,
    )
    mended_bytes: int = counter(
        "metaq_replica_mended_bytes_total",
        "Bytes that were copied from another replica for that.",
        default=0,
    )
    differing: str = ""
    """Names of two copies that differ although neither is damaged; "" for none."""
    frozen_cause: str = ""
    """Reason why it takes no part in its set; "" if it does."""
    lack_of_space: str = ""
    """Reason why it waits for disk space, and lags; "" if it does not."""
    is_incomplete: bool = False
    """Whether it may lack bytes that were acknowledged."""
    refusal: str = ""
    """Reason why it leads but refuses puts; "" if it does not."""
    followers: tuple[FollowerLag, ...] = part(
        default=(), labels=("replica",), label=lambda each: (str(each.replica),)
    )
    """Lags of its followers, on a leader."""


class HeldLog(NamedTuple):
    """One log of a replica."""

    name: str
    number: LogNumber
    start: int
    end: int
    """Synced end."""
    hw: int
    """High watermark, as known to the replica."""


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """Facts of a replica, reported by itself."""

    replica: int
    role: str
    reason: str
    """Reason why it is frozen, or the last error; "" for none."""
    completed: int
    """Number of the last epoch in which it led or completed a join."""
    record: SetRecord | None
    """Copy of the record in its `set` file."""
    lag: tuple[FollowerLag, ...] = ()
    """Lags of its followers, on a leader."""
    logs: tuple[HeldLog, ...] = ()
    mended: int = 0
    """Number of damaged ranges repaired from other replicas since it started."""


def encode_facts(facts: ReplicaFacts) -> str:
    """Return the line of `stats replica`: a name and one JSON object."""
    return f"{ITEM} {to_json(facts).decode()}"


def decode_facts(text: str) -> ReplicaFacts:
    """Decode the body of a reply to `stats replica`.

    Raises:
        ReplicaSetError: it has none: the broker is not a replica, or is older.
    """
    return decode(ReplicaFacts, parse_stats(text).get(ITEM, "").encode(), "stats")


def logs_of(logs: Mapping[LogId, PartitionLog]) -> tuple[HeldLog, ...]:
    """Return the facts of the logs that have a number, in order of their ids."""
    return tuple(
        HeldLog(
            str(log_id),
            log.number,
            log.log_start_offset,
            log.synced_end,
            log.high_watermark,
        )
        for log_id, log in sorted(logs.items())
        if log.number is not None
    )
