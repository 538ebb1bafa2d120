"""Facts of a replica, as it describes itself: `stats replica` has them as JSON.

They come in any role: also a frozen replica shows its copy of the record and the ends
of its logs, which `restore` and `elect` need.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from metaq.model import LogId
from metaq.peer.replies import parse_stats
from metaq.replication.leading import FollowerLag
from metaq.replication.record import (
    ReplicaSetError,
    SetRecord,
    decode_record,
    encode_record,
    fields_of,
)
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
    number: int
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


def encode_facts(facts: ReplicaFacts) -> str:
    """Return the line of `stats replica`: a name and one JSON object."""
    record = facts.record and json.loads(encode_record(facts.record))
    fields = {
        "replica": facts.replica,
        "role": facts.role,
        "reason": facts.reason,
        "completed": facts.completed,
        "record": record,
        "lag": facts.lag,
        "logs": facts.logs,
    }
    return f"{ITEM} {json.dumps(fields, separators=(',', ':'))}"


_KINDS: Final = {
    **dict.fromkeys(("replica", "completed"), int),
    **dict.fromkeys(("role", "reason"), str),
    **dict.fromkeys(("lag", "logs"), list),
}


def decode_facts(text: str) -> ReplicaFacts:
    """Read the body of a reply to `stats replica`.

    Raises:
        ReplicaSetError: it has no facts of a replica: the broker is none, or an older
            one.
    """
    fields = fields_of(parse_stats(text).get(ITEM, "").encode(), "stats", _KINDS)
    record = fields.get("record")
    try:
        return ReplicaFacts(
            replica=fields["replica"],
            role=fields["role"],
            reason=fields["reason"],
            completed=fields["completed"],
            record=decode_record(json.dumps(record).encode()) if record else None,
            lag=tuple(
                LagFacts(int(replica), int(size), float(seconds), str(state))
                for replica, size, seconds, state in fields["lag"]
            ),
            logs=tuple(
                HeldLog(str(name), *map(int, numbers))
                for name, *numbers in fields["logs"]
            ),
        )
    except (TypeError, ValueError) as error:
        raise ReplicaSetError(f"stats: {error}: {text[:200]!r}") from error


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
