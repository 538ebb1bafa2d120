"""Values used everywhere: numbers with units, and frozen names.

Mixing an offset with a position is a type error; conversion happens in named
functions (`Segment.position_of`, for example).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NewType, TypeAlias

Offset = NewType("Offset", int)
"""A byte address in a partition's whole history; the next put goes to the log end."""

Position = NewType("Position", int)
"""A byte distance from the start of one file."""

SizeBytes = NewType("SizeBytes", int)

MessageId = NewType("MessageId", int)
"""A signed 64-bit id stamped by a broker (docs/metaq-1.4/broker.md 8)."""

Millis = NewType("Millis", int)
"""Milliseconds; since 1970 (UTC) where a point in time is meant."""

BrokerId = NewType("BrokerId", int)
"""A broker's number, 0..1023 (it is also the worker part of message ids)."""

ID_ZERO_MS: Final = 1_303_895_660_503
"""Subtracted by MetaQ from the clock when it stamps an id: a moment of 2011-04-27."""

ID_MS_SHIFT: Final = 22
"""Position of the milliseconds' lowest bit in an id; see `metaq/record/ids.py`."""

RANDOM_PARTITION: Final = -1
"""The partition number of a put that leaves the choice to the broker."""

SCHEME: Final = "meta://"

TRANSACTION_KEY_BYTES_MAX: Final = 1024
"""Longest key of a transaction that is begun. An XA key with X/Open's longest ids takes
273 characters and its qualifier."""
PORT_MAX: Final = 65535

MAX_OFFSET: Final = Offset(2**63 - 1)
"""Offset of a get that asks for the end of the log."""

SPAN_UNITS_MS: Final = MappingProxyType(
    {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}
)
"""Units of the time spans that users write, the largest first."""
_SPAN_PART: Final = r"(\d{1,12}(?:\.\d{1,9})?)(ms|[dhms])"
_SPAN: Final = re.compile(rf"(?:{_SPAN_PART})+", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class LogId:
    """A partition as named on its broker's disk: `<topic>-<partition>`."""

    topic: str
    """Topic name; may itself contain '-'."""
    partition: int
    """Partition number on this broker, 0 or more."""

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


@dataclass(frozen=True, slots=True, order=True)
class TopicPartition:
    """A partition as named in the whole cluster: the unit of order and ownership."""

    topic: str
    broker_id: BrokerId
    """The broker that takes puts for it."""
    partition: int
    """Partition number on that broker, 0 or more."""

    if TYPE_CHECKING:  # programs of users write the broker's id as a plain number

        def __init__(self, topic: str, broker_id: int, partition: int) -> None: ...

    def __str__(self) -> str:
        return f"{self.topic}/{self.name}"

    @property
    def name(self) -> str:
        """Its name within the topic: `0-1`, broker first."""
        return f"{self.broker_id}-{self.partition}"

    def labels(self) -> tuple[str, str]:
        """Return the values of its metric labels: its topic and its name."""
        return self.topic, self.name


@dataclass(frozen=True, slots=True)
class GroupOffset:
    """Committed offset of a group in a partition."""

    offset: Offset
    """The group's next offset."""
    message_id: MessageId | None = None
    """Id of the last message before it; None if a writer before 1.4 stored it."""


@dataclass(frozen=True, slots=True, order=True)
class BrokerAddress:
    """Address of a broker for clients, as in `meta://host:port`."""

    host: str
    """Name or address; an IPv6 address is without brackets here."""
    port: int
    """TCP port, 1..65535."""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{SCHEME}{host}:{self.port}"


def parse_broker_address(text: str) -> BrokerAddress | None:
    """Return the address in `meta://host:port`; None if the text is not one.

    A trailing `?slaveId=K` is ignored. The port is 1 to 65535, and the host printable.
    """
    match = re.fullmatch(
        r"meta://(?:\[(?P<v6>[^\]/?]+)\]|(?P<host>[^\[\]/?]+)):(?P<port>\d{1,5})/?(?:\?.*)?",
        text,
        re.ASCII | re.DOTALL,
    )
    if match is None or not 0 < int(match["port"]) <= PORT_MAX:
        return None
    host = match["v6"] or match["host"]
    return BrokerAddress(host, int(match["port"])) if host.isprintable() else None


INTERNAL_PREFIX: Final = "__"
"""Prefix of a broker's internal topics; clients neither put to nor get from them."""


def is_internal(topic: str) -> bool:
    """Return whether a name is reserved for brokers."""
    return topic.startswith(INTERNAL_PREFIX)


@dataclass(frozen=True, slots=True)
class LocalTransactionId:
    """A transaction of one session on one connection."""

    session_id: str
    """The producer's session; free of ':' and space."""
    number: int
    """Counter of the session, signed 32-bit."""


@dataclass(frozen=True, slots=True)
class XaTransactionId:
    """A branch of a global transaction; known to the whole broker."""

    format_id: int
    """Format of the ids, signed 32-bit."""
    global_id: bytes
    """Global transaction id; may be empty."""
    branch: bytes
    """Branch qualifier; may be empty."""
    qualifier: str
    """Part of the transaction manager's name; not blank, free of ':' and space."""


@dataclass(frozen=True, slots=True)
class NullTransactionId:
    """No transaction: sent by RECOVER in place of an id."""


TransactionId: TypeAlias = LocalTransactionId | XaTransactionId | NullTransactionId
"""Key of a transaction; `protocol/transaction_ids.py` makes its text."""

NULL_TRANSACTION: Final = NullTransactionId()


HeaderPairs: TypeAlias = tuple[tuple[str, bytes], ...]
"""Name and value of each header, in order; a name may occur more than once."""


TAG: Final = "tag"
"""Header of a message's tag."""


class Message(NamedTuple):
    """The decoded application value of one record.

    A tuple, because a backlog has millions of them: a loop over it makes them with one
    `map` over columns.
    """

    topic: str
    data: bytes
    """Application bytes, attribute block removed."""
    attribute: str | None
    """Application attribute; None when the record has none, "" when it is empty."""
    id: MessageId
    partition: TopicPartition
    offset: Offset
    """Offset of its record's first byte."""
    next_offset: Offset
    """Offset of the next record: the reader's next offset."""
    key: bytes | None = None
    """Key; None when the record has none, b"" when it is empty."""
    header_pairs: HeaderPairs = ()
    """Every header, in order."""

    @property
    def headers(self) -> dict[str, bytes]:
        """Value of each header by name; the last value, if a name occurs twice."""
        return dict(self.header_pairs)

    @property
    def tag(self) -> str | None:
        """Its tag, the header of that name as text; None if there is none."""
        tag = self.headers.get(TAG)
        return None if tag is None else tag.decode(errors="replace")

    @property
    def timestamp_ms(self) -> Millis | None:
        """Time at which a broker stamped it; None if a Java broker did (`id_time`)."""
        return id_time(self.id)

    @property
    def timestamp(self) -> float | None:
        """`timestamp_ms` in seconds since 1970 (UTC), as `time.time` counts them."""
        milliseconds = id_time(self.id)
        return None if milliseconds is None else milliseconds / 1000


def id_time(message_id: MessageId) -> Millis | None:
    """Return the time at which a broker stamped an id; None if a Java broker did.

    Java brokers use a clock that counts from the machine's start: their ids are
    negative or give a time in 2011, and the wall time is unknown.
    """
    if message_id < 0:
        return None
    return Millis((message_id >> ID_MS_SHIFT) + ID_ZERO_MS)


def span_text(ms: int) -> str:
    """Return a time span as users write it: `1d12h`."""
    parts = list[str]()
    for unit, unit_ms in SPAN_UNITS_MS.items():
        count, ms = divmod(ms, unit_ms)
        parts += [f"{count}{unit}"] if count else []
    return "".join(parts) or "0s"


def parse_span(text: str) -> float:
    """Return the seconds in a time span such as `1d12h`.

    Raises:
        ValueError: the text is not a time span; the error says what is expected.
    """
    if _SPAN.fullmatch(text) is None:
        raise ValueError(
            f"expected a time such as '30m', '1d12h' or '500ms', got {text[:80]!r}"
        )
    parts = re.findall(_SPAN_PART, text)
    return sum(float(number) * SPAN_UNITS_MS[unit] / 1000 for number, unit in parts)


def printable(text: str) -> str:
    """Return a text of foreign origin in a form for errors, logs and tables.

    Characters that do not print, control characters among them, are escaped as in
    Python: one log line stays one line, and a terminal gets no commands.
    """
    if text.isprintable():
        return text
    escaped = (c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return "".join(escaped)


def no_items() -> Mapping[Any, Any]:
    """Return an empty mapping that stays empty, for fields of frozen values."""
    return MappingProxyType({})
