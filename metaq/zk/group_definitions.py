"""Queue groups: their definition in ZooKeeper. Pure.

    /catalog/groups/{group}    JSON, UTF-8, keys sorted, no spaces:

    {"dead_letter_topic":"orders-dead","deliveries_max":16,"generation":0,
     "lease_ms":30000,"ordered_by":null,"retry_delays_ms":[1000,5000,30000,120000],
     "start":"earliest","state":"active","then":"dead_letter","topic":"orders",
     "type":"queue"}

The first user of a group writes it; brokers follow it, and keep a copy on the disk. A
deleted group keeps its node: a node that is gone may be ZooKeeper's loss, and is no
reason to forget what is done. A group that is made again has the next generation, by
which a broker that was away in that time knows that it is another one.
Properties that are not known here are kept. Source: docs/messaging.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from metaq.model import no_items
from metaq.zk.definitions import decode_json, encode_json, whole_number
from metaq.zk.errors import PayloadError

GROUPS_COPY_NAME: Final = "groups.json"
"""Below the broker's first data directory; may be deleted while the broker is down."""

LEASE_MS_MIN: Final = 1_000
LEASE_MS_MAX: Final = 12 * 3600 * 1000
DELIVERIES_MAX: Final = 1_000
DELAY_MS_MAX: Final = 24 * 3600 * 1000
"""Longest delay before a message is given out again."""
DELAYS_MAX: Final = 16
"""Most delays of a schedule."""
ORDERED_BY: Final = ("key",)
STARTS: Final = ("earliest", "latest")
STATES: Final = ("active", "deleted")
GENERATION_MAX: Final = 2**32 - 1

_KNOWN: Final = frozenset(
    {
        "dead_letter_topic", "deliveries_max", "generation", "lease_ms", "ordered_by",
        "retry_delays_ms", "start", "state", "then", "topic", "type",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueGroupDefinition:
    """A queue group as its first user, or a command, wants it."""

    topic: str
    """The one topic that it is of."""
    lease_ms: int = 30_000
    """For how long a delivery is its worker's, LEASE_MS_MIN to LEASE_MS_MAX."""
    deliveries_max: int = 16
    """Deliveries after which a message is given up, 1 to DELIVERIES_MAX."""
    dead_letter_topic: str | None = None
    """Takes what is given up; None: that is dropped."""
    retry_delays_ms: tuple[int, ...] = (1_000, 5_000, 30_000, 120_000)
    """Delay after the first, second, ... delivery, 0 to DELAY_MS_MAX; the last one
    repeats. Empty: at once."""
    ordered_by: str | None = None
    """`key`: one message of a key at a time, in their order."""
    start: str = "earliest"
    """`latest`: what is put after the definition came into effect."""
    generation: int = 0
    """Groups of this name that were deleted before, 0 to GENERATION_MAX."""
    is_deleted: bool = False
    """Whether the group is over: nothing is kept of it but its generation."""
    others: Mapping[str, object] = field(default_factory=no_items)
    """Properties that are not known here, ready for JSON."""


def encode_group(definition: QueueGroupDefinition) -> bytes:
    """Return the bytes of a definition, always the same ones for the same value."""
    letters = definition.dead_letter_topic
    return encode_json(
        {
            **definition.others,
            "type": "queue",
            "topic": definition.topic,
            "lease_ms": definition.lease_ms,
            "deliveries_max": definition.deliveries_max,
            "then": "drop" if letters is None else "dead_letter",
            "dead_letter_topic": letters,
            "retry_delays_ms": list(definition.retry_delays_ms),
            "ordered_by": definition.ordered_by,
            "start": definition.start,
            "generation": definition.generation,
            "state": STATES[definition.is_deleted],
        }
    )


def decode_group(data: bytes) -> QueueGroupDefinition:
    """Read a definition; properties in any order, unknown ones kept.

    Raises:
        PayloadError: not a JSON object, or a property makes no sense.
    """
    fields = decode_json(data, "queue group")
    _require(fields.get("type") == "queue", "type queue", data)
    topic, letters = fields.get("topic"), fields.get("dead_letter_topic")
    lease_ms = whole_number(fields.get("lease_ms"), LEASE_MS_MIN, LEASE_MS_MAX)
    deliveries_max = whole_number(fields.get("deliveries_max"), 1, DELIVERIES_MAX)
    ordered_by, start = fields.get("ordered_by"), fields.get("start")
    delays = fields.get("retry_delays_ms")
    if not isinstance(topic, str) or not topic:
        raise _nonsense("a topic", data)
    if letters is not None and (not isinstance(letters, str) or letters == topic):
        raise _nonsense("dead_letter_topic to be another topic, or null", data)
    _require(
        fields.get("then") == ("drop" if letters is None else "dead_letter"),
        "then to be drop, or dead_letter with a dead_letter_topic",
        data,
    )
    if lease_ms is None:
        raise _nonsense(f"lease_ms from {LEASE_MS_MIN} to {LEASE_MS_MAX}", data)
    if deliveries_max is None:
        raise _nonsense(f"deliveries_max from 1 to {DELIVERIES_MAX}", data)
    if ordered_by is not None and ordered_by not in ORDERED_BY:
        raise _nonsense("ordered_by to be null or key", data)
    if start not in STARTS:
        raise _nonsense("start to be earliest or latest", data)
    generation = whole_number(fields.get("generation"), 0, GENERATION_MAX)
    if generation is None:
        raise _nonsense(f"generation from 0 to {GENERATION_MAX}", data)
    _require(fields.get("state") in STATES, "state to be active or deleted", data)
    return QueueGroupDefinition(
        topic=topic,
        lease_ms=lease_ms,
        deliveries_max=deliveries_max,
        dead_letter_topic=letters,
        retry_delays_ms=_read_delays(delays, data),
        ordered_by=None if ordered_by is None else str(ordered_by),
        start=str(start),
        generation=generation,
        is_deleted=fields["state"] == "deleted",
        others={name: each for name, each in fields.items() if name not in _KNOWN},
    )


def _read_delays(value: object, data: bytes) -> tuple[int, ...]:
    listed = value if isinstance(value, list) else [None]
    delays = [whole_number(each, 0, DELAY_MS_MAX) for each in listed]
    if None in delays or len(delays) > DELAYS_MAX:
        raise _nonsense(
            f"retry_delays_ms to be at most {DELAYS_MAX} numbers up to {DELAY_MS_MAX}",
            data,
        )
    return tuple(each for each in delays if each is not None)


def _require(is_so: bool, wanted: str, data: bytes) -> None:
    if not is_so:
        raise _nonsense(wanted, data)


def _nonsense(wanted: str, data: bytes) -> PayloadError:
    return PayloadError(f"queue group: expected {wanted}, got {data[:200]!r}")
