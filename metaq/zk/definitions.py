"""Topics made by command: the definition, and its status on each broker. Pure.

    node               bytes: JSON, UTF-8, keys sorted, no spaces
    -----------------  -----------------------------------------------------------------
    topic definition   {"brokers":null,"partitions":4,
                        "settings":{"deletePolicy":"delete,72h"},"state":"active"}
    topic status       {"definition":463763767,"effect":"server.ini",
                        "text":"/etc/metaq/server.ini"}
                       and "puts":false, "gets":false where the topic is closed

A client writes the definition; each broker concerned writes its status. `definition` of
a status is the CRC-32 of the definition's bytes as `encode_definition` writes them; a
status with another number is about an older definition.

Unknown properties of a definition are kept when it is altered, because a later version
may have written them. An invalid definition is a PayloadError.

Keep in step: `paths.py`, this package's README.
"""

import enum
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, TypeVar

from metaq.config.keys import BROKER_ID_MAX, PARTITION_COUNT_MAX
from metaq.model import BrokerId, SizeBytes, no_items
from metaq.zk.errors import PayloadError

COPY_NAME: Final = "topics.json"
"""File in a broker's first data directory; may be deleted while it is down."""
COPY_BYTES_MAX: Final = SizeBytes(64 << 20)

QUOTED_CHARS_MAX: Final = 80

T = TypeVar("T")

_KNOWN: Final = frozenset({"brokers", "partitions", "settings", "state"})


class TopicState(enum.Enum):
    """Wanted state of a topic in the cluster."""

    ACTIVE = "active"
    DELETING = "deleting"
    """Withdraw it and delete its data; the definition is deleted last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicDefinition:
    """A topic as defined by a command."""

    partitions: int
    """Number of partitions on each of its brokers, 1 or more."""
    brokers: tuple[BrokerId, ...] | None = None
    """Brokers that serve it, ascending; None: every broker."""
    settings: Mapping[str, str] = field(default_factory=no_items)
    """Keys of a topic section of `server.ini`, in its spelling → text."""
    state: TopicState = TopicState.ACTIVE
    others: Mapping[str, object] = field(default_factory=no_items)
    """Unknown properties, as JSON values."""

    def names(self, broker_id: BrokerId) -> bool:
        """Return whether a broker should serve the topic."""
        return self.brokers is None or broker_id in self.brokers

    @property
    def checksum(self) -> int:
        """Checksum by which statuses name this definition."""
        return zlib.crc32(encode_definition(self))


class Effect(enum.Enum):
    """Result of a definition on one broker."""

    IN_EFFECT = "in effect"
    """The broker serves the topic as defined; the text says to whom it is closed."""
    OVERRIDDEN = "server.ini"
    """`server.ini` has a section of that name, which wins; the text is its path."""
    REFUSED = "refused"
    """The broker cannot serve the topic as defined; the text is the reason."""
    DELETING = "deleting"
    """The broker still has data of the topic; the text is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicStatus:
    """Status of a definition on one broker."""

    definition: int
    """`TopicDefinition.checksum` of the definition it is about; 0: there is none, and
    `server.ini` has a section for the topic."""
    effect: Effect
    text: str = ""
    takes_puts: bool = True
    """False if `acceptPublish` is false, so that producers do not see the topic."""
    gives_gets: bool = True
    """False if `acceptSubscribe` is false, so that consumers do not see it."""


def encode_definition(definition: TopicDefinition) -> bytes:
    """Return the bytes of a definition; equal values give equal bytes."""
    brokers = definition.brokers
    return encode_json(
        {
            **definition.others,
            "partitions": definition.partitions,
            "brokers": None if brokers is None else list(brokers),
            "settings": dict(definition.settings),
            "state": definition.state.value,
        }
    )


def decode_definition(data: bytes) -> TopicDefinition:
    """Decode a definition; properties in any order, unknown ones kept.

    Raises:
        PayloadError: not a JSON object, or a property is invalid.
    """
    fields = decode_json(data, "topic definition")
    partitions = whole_number(fields.get("partitions"), 1, PARTITION_COUNT_MAX)
    if partitions is None:
        raise _nonsense(data, f"partitions from 1 to {PARTITION_COUNT_MAX}")
    settings = fields.get("settings", {})
    if not isinstance(settings, dict) or not all(
        isinstance(text, str) for text in settings.values()
    ):
        raise _nonsense(data, "settings to be an object of texts")
    state = fields.get("state")
    if state not in [each.value for each in TopicState]:
        raise _nonsense(data, "a state, active or deleting")
    return TopicDefinition(
        partitions=partitions,
        brokers=read_brokers(fields.get("brokers"), data),
        settings=MappingProxyType(dict(sorted(settings.items()))),
        state=TopicState(state),
        others=MappingProxyType(
            {name: value for name, value in fields.items() if name not in _KNOWN}
        ),
    )


def read_brokers(value: object, data: bytes) -> tuple[BrokerId, ...] | None:
    """Return the brokers of a definition; None: every broker.

    Args:
        value: value of the property.
        data: the definition, for the error.

    Raises:
        PayloadError: it is neither null nor a list of ids.
    """
    if value is None:
        return None
    numbers = [whole_number(each, 0, BROKER_ID_MAX) for each in _items(value)]
    brokers = {BrokerId(number) for number in numbers if number is not None}
    if not brokers or None in numbers:
        raise _nonsense(data, "brokers to be null or a list of broker ids")
    return tuple(sorted(brokers))


def encode_copy(definitions: Mapping[str, T], encode: Callable[[T], bytes]) -> bytes:
    """Return the bytes of a copy of definitions: their CRC-32 on a line, then JSON.

    A broker keeps one copy of each kind on disk, for starts without ZooKeeper.
    """
    # One line for each; `indent` would use the slower encoder written in Python.
    lines = [
        json.dumps(name, ensure_ascii=False).encode() + b": " + encode(definition)
        for name, definition in sorted(definitions.items())
    ]
    text = b"{%s}" % b",\n".join(lines)
    return b"%08x\n%s\n" % (zlib.crc32(text), text)


def decode_copy(data: bytes, decode: Callable[[bytes], T]) -> dict[str, T]:
    """Decode a copy of definitions.

    Raises:
        PayloadError: it is damaged.
    """
    checksum, _, text = data.partition(b"\n")
    text = text.removesuffix(b"\n")
    if checksum != b"%08x" % zlib.crc32(text):
        raise PayloadError(
            f"copy of definitions: expected checksum {_quoted(checksum)},"
            f" got {zlib.crc32(text):08x}"
        )
    fields = decode_json(text, "copy of definitions")
    return {
        name: decode(json.dumps(definition).encode())
        for name, definition in fields.items()
    }


def encode_status(status: TopicStatus) -> bytes:
    """Return the bytes of a status; `puts` and `gets` only if they are false."""
    closed = {"puts": status.takes_puts, "gets": status.gives_gets}
    return encode_json(
        {
            "definition": status.definition,
            "effect": status.effect.value,
            "text": status.text,
            **{name: False for name, is_open in closed.items() if not is_open},
        }
    )


def decode_status(data: bytes) -> TopicStatus:
    """Decode a status; properties in any order, unknown ones ignored.

    Raises:
        PayloadError: not a JSON object, or a property is invalid.
    """
    fields = decode_json(data, "topic status")
    definition = whole_number(fields.get("definition"), 0, 2**32 - 1)
    effect, text = fields.get("effect"), fields.get("text", "")
    if (
        definition is None
        or effect not in [each.value for each in Effect]
        or not isinstance(text, str)
    ):
        raise PayloadError(
            f"topic status: expected definition, effect and text, got {_quoted(data)}"
        )
    return TopicStatus(
        definition=definition,
        effect=Effect(effect),
        text=text,
        takes_puts=fields.get("puts") is not False,
        gives_gets=fields.get("gets") is not False,
    )


def or_error(decode: Callable[[bytes], T], data: bytes) -> T | str:
    """Return the decoded value, or the text of the error, so that it is not lost."""
    try:
        return decode(data)
    except PayloadError as error:
        return str(error)


def encode_json(fields: Mapping[str, object]) -> bytes:
    """Return the payload of a node: JSON in UTF-8, keys sorted, no spaces."""
    return json.dumps(
        fields, ensure_ascii=False, sort_keys=True, separators=(",", ":")
    ).encode()


def decode_json(data: bytes, what: str) -> dict[str, object]:
    """Decode a JSON object.

    Args:
        data: payload of a node.
        what: name of the payload, for the error.

    Raises:
        PayloadError: it is not an object, or some of its text cannot be encoded again.
    """
    try:
        fields = json.loads(data)
        # Half of a surrogate pair can be decoded, but not encoded again.
        json.dumps(fields, ensure_ascii=False).encode()
    # Deep nesting ends in RecursionError, a huge number in ValueError.
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"{what}: expected JSON, got {_quoted(data)}") from error
    if not isinstance(fields, dict):
        raise PayloadError(f"{what}: expected a JSON object, got {_quoted(data)}")
    return fields


def made_later(text: str) -> PayloadError:
    """Return the error of a definition that is JSON but has unknown content."""
    return PayloadError(f"{text}: made by a newer version, or by hand")


def _items(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def whole_number(value: object, low: int, high: int) -> int | None:
    """Return an integer in a range, inclusive; None for anything else."""
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if low <= value <= high else None


def _nonsense(data: bytes, wanted: str) -> PayloadError:
    return PayloadError(f"topic definition: expected {wanted}, got {_quoted(data)}")


def _quoted(data: bytes) -> str:
    return repr(data[:QUOTED_CHARS_MAX])[1:]
