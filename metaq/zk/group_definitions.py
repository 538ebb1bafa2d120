"""Definitions of queue groups in ZooKeeper. Pure.

    /catalog/groups/{group}    JSON, UTF-8, keys sorted, no spaces:

    {"dead_letter_topic":"orders-dead","deliveries_max":16,"generation":0,
     "lease_ms":30000,"ordered_by":null,"retry_delays_ms":[1000,5000,30000,120000],
     "start":"earliest","state":"active","then":"dead_letter","topic":"orders",
     "type":"queue"}

The first user of a group writes its definition; brokers follow it and keep a copy on
disk. A deleted group keeps its node: if a node is missing, ZooKeeper may have lost it,
and brokers must not forget which messages are done. A group that is created again has
the next generation, which shows a broker that was away that this is another group. The
property `where` is present if the group has a filter. Unknown properties are kept.
Source: docs/messaging.md.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from metaq.errors import FilterError
from metaq.filter.language import Filter, has_parser, parse_filter
from metaq.model import no_items
from metaq.zk.definitions import decode_json, encode_json, made_later, whole_number
from metaq.zk.errors import PayloadError

GROUPS_COPY_NAME: Final = "groups.json"
"""File in a broker's first data directory; may be deleted while it is down."""

LEASE_MS_MIN: Final = 1_000
LEASE_MS_MAX: Final = 12 * 3600 * 1000
DELIVERIES_MAX: Final = 1_000
DELAY_MS_MAX: Final = 24 * 3600 * 1000
"""Longest delay before a message is delivered again, in milliseconds. Like the other
limits here it is not configurable, because all readers of a definition must agree
whether it is valid."""
DELAYS_MAX: Final = 16
"""Maximum number of delays in a schedule."""
STATES: Final = ("active", "deleted")
GENERATION_MAX: Final = 2**32 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueGroupDefinition:
    """A queue group as defined by its first user or a command."""

    topic: str
    """The one topic that the group reads."""
    lease_ms: int = 30_000
    """Lease of a delivery, in milliseconds, LEASE_MS_MIN to LEASE_MS_MAX."""
    deliveries_max: int = 16
    """Maximum number of deliveries of a message, 1 to DELIVERIES_MAX."""
    dead_letter_topic: str | None = None
    """Gets the messages that have used up their deliveries; None: they are dropped."""
    retry_delays_ms: tuple[int, ...] = (1_000, 5_000, 30_000, 120_000)
    """Delay after the first, second, ... delivery, in milliseconds, 0 to DELAY_MS_MAX;
    the last one repeats. Empty: no delay."""
    ordered_by: str | None = None
    """`key`: messages with the same key are delivered one at a time, in order."""
    start: str = "earliest"
    """`earliest`; or `latest`: messages put after the definition took effect."""
    where: str | None = None
    """Filter of the group's messages; None: all. A message that a filter has rejected
    is not examined again."""
    generation: int = 0
    """Number of deleted groups that had this name, 0 to GENERATION_MAX."""
    is_deleted: bool = False
    """Whether the group was deleted: only its generation is kept."""
    others: Mapping[str, object] = field(default_factory=no_items)
    """Unknown properties, as JSON values."""


def encode_group(definition: QueueGroupDefinition) -> bytes:
    """Return the bytes of a definition; equal values give equal bytes."""
    letters, where = definition.dead_letter_topic, definition.where
    return encode_json(
        {
            **definition.others,
            **({} if where is None else {"where": where}),
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


def wants_parser(data: bytes) -> bool:
    """Return whether `decode_group` would load the parser; not done on a loop."""
    return b'"where"' in data and not has_parser()


def decode_group(data: bytes) -> QueueGroupDefinition:
    """Decode a definition; properties in any order, unknown ones kept.

    Raises:
        PayloadError: not a JSON object, or a property is invalid.
    """
    fields: dict[str, Any] = decode_json(data, "queue group")
    for name, (is_sound, wanted) in _PROPERTIES.items():
        if not is_sound(fields.get(name)):
            raise _nonsense(f"{name} {wanted}", data)
    letters = fields["dead_letter_topic"]
    if letters == fields["topic"]:
        raise _nonsense("dead_letter_topic to be another topic", data)
    if (letters is None) != (fields["then"] == "drop"):
        raise _nonsense("a dead_letter_topic, or then to be drop", data)
    return QueueGroupDefinition(
        topic=fields["topic"],
        lease_ms=fields["lease_ms"],
        deliveries_max=fields["deliveries_max"],
        dead_letter_topic=letters,
        retry_delays_ms=tuple(fields["retry_delays_ms"]),
        ordered_by=fields["ordered_by"],
        start=fields["start"],
        where=fields.get("where"),
        generation=fields["generation"],
        is_deleted=fields["state"] == "deleted",
        others={name: each for name, each in fields.items() if name not in _PROPERTIES},
    )


_Rule: TypeAlias = tuple[Callable[[object], bool], str]
"""Predicate of a valid value, and the expected value for the error."""


def _whole(low: int, high: int) -> _Rule:
    return (
        lambda value: whole_number(value, low, high) is not None,
        f"from {low} to {high}",
    )


def _one_of(*values: str | None) -> _Rule:
    return lambda value: value in values, f"to be one of {values}"


def _are_delays(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= DELAYS_MAX
        and all(whole_number(each, 0, DELAY_MS_MAX) is not None for each in value)
    )


def _is_filter(value: Any) -> bool:
    try:
        return value is None or isinstance(parse_filter(value), Filter)
    except (FilterError, TypeError):
        return False


_PROPERTIES: Final[Mapping[str, _Rule]] = {
    "type": _one_of("queue"),
    "topic": (lambda value: isinstance(value, str) and value != "", "to be a name"),
    "lease_ms": _whole(LEASE_MS_MIN, LEASE_MS_MAX),
    "deliveries_max": _whole(1, DELIVERIES_MAX),
    "then": _one_of("dead_letter", "drop"),
    "dead_letter_topic": (
        lambda value: value is None or isinstance(value, str),
        "to be a name, or null",
    ),
    "retry_delays_ms": (
        _are_delays,
        f"to be at most {DELAYS_MAX} numbers up to {DELAY_MS_MAX}",
    ),
    "ordered_by": _one_of(None, "key"),
    "start": _one_of("earliest", "latest"),
    "where": (_is_filter, "to be a filter, or null"),
    "generation": _whole(0, GENERATION_MAX),
    "state": _one_of(*STATES),
}


def _nonsense(wanted: str, data: bytes) -> PayloadError:
    return made_later(f"queue group: expected {wanted}, got {data[:200]!r}")
