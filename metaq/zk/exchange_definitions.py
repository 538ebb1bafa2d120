"""Definitions of exchanges and their bindings in ZooKeeper. Pure.

    node                              bytes: JSON, UTF-8, keys sorted, no spaces
    --------------------------------  --------------------------------------------------
    /catalog/exchanges/{exchange}     {"alternate":null,"kind":"topic","state":"active"}
    /catalog/bindings/{exchange}/{b}  {"key":"order.#","topic":"orders"}
                                      {"headers":{"region":"eu","vip":null},
                                       "match":"all","topic":"orders"}

`{b}` is a digest of the bytes, so binding twice has no effect. A deleted exchange keeps
its node, as a deleted queue group does: if a node is missing, ZooKeeper may have lost
it. A binding whose node is missing is unbound. Brokers keep a copy of both on disk: the
properties of each exchange, `bindings`, name → binding, and `unread`, name → reason.
Unknown properties of an exchange are kept. A binding with an unknown property is an
error, because the property may exclude messages from the topic.
Source: docs/messaging.md.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Final

from metaq.model import no_items
from metaq.routing.match import Binding, ExchangeKind
from metaq.zk.definitions import decode_json, encode_json, made_later
from metaq.zk.errors import PayloadError

EXCHANGES_COPY_NAME: Final = "exchanges.json"
"""File in a broker's first data directory; may be deleted while it is down."""
STATES: Final = ("active", "deleted")
MATCHES: Final = ("all", "any")

_BINDINGS: Final = "bindings"
_UNREAD: Final = "unread"
_KNOWN: Final = frozenset({"alternate", _BINDINGS, "kind", "state", _UNREAD})
_KNOWN_OF_BINDING: Final = frozenset({"headers", "key", "match", "topic"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeDefinition:
    """An exchange as defined by a command, with its bindings."""

    kind: ExchangeKind
    alternate: str | None = None
    """Topic of messages that match no binding; None: no such topic."""
    bindings: Mapping[str, Binding] = field(default_factory=no_items)
    """Name of a node → its binding."""
    unread: Mapping[str, str] = field(default_factory=no_items)
    """Unreadable bindings, name → reason; any of them keeps it from being served."""
    is_deleted: bool = False
    others: Mapping[str, object] = field(default_factory=no_items)
    """Unknown properties, as JSON values."""


def with_bindings(
    definition: ExchangeDefinition, found: Mapping[str, Binding | str]
) -> ExchangeDefinition:
    """Return an exchange with the bindings read for it.

    Args:
        definition: definition of the exchange.
        found: name → binding, or the reason why it cannot be read.
    """
    unread = {name: each for name, each in found.items() if isinstance(each, str)}
    bindings = {name: each for name, each in found.items() if isinstance(each, Binding)}
    return replace(definition, bindings=bindings, unread=unread)


def encode_exchange(definition: ExchangeDefinition) -> bytes:
    """Return the payload of an exchange; equal values give equal bytes."""
    return encode_json(_fields_of(definition))


def encode_copied(definition: ExchangeDefinition) -> bytes:
    """Return the bytes of an exchange with its bindings, for the copy on disk."""
    found, unread = definition.bindings.items(), definition.unread
    bindings = {name: _binding_fields(each) for name, each in found}
    fields = {**_fields_of(definition), _BINDINGS: bindings}
    return encode_json(fields | ({_UNREAD: {**unread}} if unread else {}))


def _fields_of(definition: ExchangeDefinition) -> dict[str, object]:
    return {
        **definition.others,
        "kind": definition.kind.value,
        "alternate": definition.alternate,
        "state": STATES[definition.is_deleted],
    }


def decode_exchange(data: bytes) -> ExchangeDefinition:
    """Decode an exchange, from ZooKeeper or the copy; unknown properties are kept.

    Raises:
        PayloadError: not a JSON object, or a property is invalid.
    """
    fields = decode_json(data, "exchange")
    kinds = [each.value for each in ExchangeKind]
    bindings: Any = fields.get(_BINDINGS, {})
    unread: Any = fields.get(_UNREAD, {})
    if not _has_all(bindings, dict) or not _has_all(unread, str):
        raise _nonsense("exchange", "objects of bindings and of unread ones", data)
    if fields.get("kind") not in kinds:
        raise _nonsense("exchange", f"a kind of {', '.join(kinds)}", data)
    if fields.get("state") not in STATES:
        raise _nonsense("exchange", "a state, active or deleted", data)
    alternate: Any = fields.get("alternate")
    if alternate is not None and not _is_name(alternate):
        raise _nonsense("exchange", "alternate to be a topic, or null", data)
    return ExchangeDefinition(
        kind=ExchangeKind(fields["kind"]),
        alternate=alternate,
        bindings={name: _binding_of(each, data) for name, each in bindings.items()},
        unread=unread,
        is_deleted=fields["state"] == "deleted",
        others=MappingProxyType(
            {name: each for name, each in fields.items() if name not in _KNOWN}
        ),
    )


def encode_binding(binding: Binding) -> bytes:
    """Return the payload of a binding; equal values give equal bytes."""
    return encode_json(_binding_fields(binding))


def _binding_fields(binding: Binding) -> dict[str, object]:
    fields: dict[str, object] = {"topic": binding.topic}
    if binding.headers:
        fields |= {"headers": dict(binding.headers)}
        fields |= {"match": MATCHES[binding.matches_any]}
    elif binding.key:
        fields |= {"key": binding.key}
    return fields


def binding_name(binding: Binding) -> str:
    """Return the name of a binding's node."""
    return blake2b(encode_binding(binding), digest_size=16).hexdigest()


def decode_binding(data: bytes) -> Binding:
    """Decode a binding.

    Raises:
        PayloadError: not a JSON object, or a property is invalid.
    """
    return _binding_of(decode_json(data, "binding"), data)


def sends_rest_to(topic: str, data: bytes) -> bool | None:
    """Return whether a topic is the alternate of an exchange; None: it is deleted.

    For an exchange that cannot be decoded: whether its payload names the topic.
    """
    try:
        found = decode_exchange(data)
    except PayloadError:
        return _names(topic, data)
    return None if found.is_deleted else found.alternate == topic


def sends_to(topic: str, data: bytes) -> bool:
    """Return whether a binding targets a topic, or cannot be decoded and names it."""
    try:
        return decode_binding(data).topic == topic
    except PayloadError:
        return _names(topic, data)


def _names(topic: str, data: bytes) -> bool:
    quoted = {json.dumps(topic, ensure_ascii=each).encode() for each in (False, True)}
    return any(each in data for each in quoted)


def _binding_of(fields: Mapping[str, Any], data: bytes) -> Binding:
    topic: Any = fields.get("topic")
    key = fields.get("key", "")
    headers = fields.get("headers", {})
    if not _is_name(topic) or not isinstance(key, str):
        raise _nonsense("binding", "a topic, and key to be a text", data)
    if not isinstance(headers, dict) or not all(
        value is None or isinstance(value, str) for value in headers.values()
    ):
        raise _nonsense("binding", "headers to be an object of texts, or null", data)
    if others := sorted(fields.keys() - _KNOWN_OF_BINDING):
        raise _nonsense("binding", f"no property {', '.join(others)}", data)
    if fields.get("match", "all") not in MATCHES:
        raise _nonsense("binding", "match to be all or any", data)
    pairs = tuple(sorted(headers.items()))
    return Binding(topic, key, pairs, fields.get("match") == "any")


def _has_all(value: object, kind: type) -> bool:
    return isinstance(value, dict) and all(
        isinstance(each, kind) for each in value.values()
    )


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _nonsense(what: str, wanted: str, data: bytes) -> PayloadError:
    return made_later(f"{what}: expected {wanted}, got {data[:200]!r}")
