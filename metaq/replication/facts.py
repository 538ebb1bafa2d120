"""Facts of a replica, as it describes itself: `stats replica` has them as JSON.

They come in any role: also a frozen replica shows its copy of the record and the ends
of its logs, which `restore` and `elect` need.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from metaq.model import LogId
from metaq.peer.replies import parse_stats
from metaq.replication.json_values import LogNumber, to_json
from metaq.replication.leading import FollowerLag
from metaq.replication.record import SetRecord, decode
from metaq.storage.partition_log import PartitionLog

ITEM: Final = "replica"
"""Of `stats`: the facts of a replica."""


class LagFacts(NamedTuple):
    """A follower, as its leader sees it."""

    replica: int
    lag_bytes: int
    """Bytes that it lacks, of all logs."""
    lag_s: float
    """Seconds since it had all of them."""
    state: str


class HeldLog(NamedTuple):
    """One log of a replica."""

    name: str
    number: LogNumber
    start: int
    end: int
    """Synced end."""
    hw: int
    """High watermark, as far as the replica knows."""


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """A replica, as it describes itself."""

    replica: int
    role: str
    reason: str
    """Why it is frozen, or what went wrong last; "" for nothing."""
    completed: int
    """Number of the epoch in which it last led or completed a join."""
    record: SetRecord | None
    """Copy in its `set` file."""
    lag: tuple[LagFacts, ...] = ()
    """Of a leader: its followers."""
    logs: tuple[HeldLog, ...] = ()
    mended: int = 0
    """Damaged ranges that were mended from other replicas since its start."""


def encode_facts(facts: ReplicaFacts) -> str:
    """Return the line of `stats replica`: a name and one JSON object."""
    return f"{ITEM} {to_json(facts).decode()}"


def decode_facts(text: str) -> ReplicaFacts:
    """Read the body of a reply to `stats replica`.

    Raises:
        ReplicaSetError: it has no facts of a replica: the broker is none, or an older
            one.
    """
    return decode(ReplicaFacts, parse_stats(text).get(ITEM, "").encode(), "stats")


def lag_of(followers: Iterable[FollowerLag]) -> tuple[LagFacts, ...]:
    """Return the facts of a leader's followers."""
    return tuple(LagFacts(f.replica, f.lag_bytes, f.lag_s, f.state) for f in followers)


def logs_of(logs: Mapping[LogId, PartitionLog]) -> tuple[HeldLog, ...]:
    """Return the facts of the logs that have a number, in the order of their names."""
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
