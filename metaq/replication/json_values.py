"""JSON of the replicas' values; the class of a value describes its JSON. Pure.

| class | JSON |
|---|---|
| dataclass | an object with its fields; a missing field gets its default, if any |
| named tuple, tuple of some items | an array with as many items |
| tuple of any length, frozenset | an array |
| mapping | an object |
| enum | its text |
| `int`, or a `NewType` of it | a number from 0 to 2^63 - 1; message ids: negative too |
| optional | null, or no property, for None |
| `Annotated[..., reader]` | a value that the reader accepts |

Input is fully checked: types, sizes, ranges and, if a class has a method `fault`,
contradictions. Unknown properties are ignored, because a set has replicas of two
versions while it is updated.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache
from inspect import Parameter, signature
from types import UnionType
from typing import (
    Annotated,
    Any,
    Final,
    TypeAlias,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from metaq.model import LogId, MessageId
from metaq.protocol.decimals import I32_MAX, I64_MAX, I64_MIN

T = TypeVar("T")
Reader: TypeAlias = Callable[[Any, str], Any]
"""Takes a JSON value and its name; returns the decoded value, or raises FieldError."""


class FieldError(ValueError):
    """A value does not have the expected type, size or range; the text names it."""


def to_json(value: object) -> bytes:
    """Return the JSON of a value, without spaces; equal values give equal texts."""
    return _JSON.encode(value).encode()


def from_json(kind: Callable[..., T], data: bytes, name: str) -> T:
    """Decode a value of a class from JSON.

    Args:
        kind: the class.
        data: the JSON.
        name: name of the value, for the error.

    Raises:
        FieldError: it is not a value of this class.
    """
    try:
        value = json.loads(data)
    # Deep nesting ends in RecursionError, a huge number in ValueError.
    except (ValueError, RecursionError) as error:
        raise FieldError(f"{name}: expected JSON, got {data[:80]!r}") from error
    found: T = reader_of(kind)(value, name)
    return found


def fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name."""
    return {name: getattr(value, name) for name in value.__match_args__}


def _plain(value: Any) -> object:
    return sorted(value) if isinstance(value, frozenset) else fields_of(value)


_JSON: Final = json.JSONEncoder(separators=(",", ":"), default=_plain)


@cache
def reader_of(kind: Any) -> Reader:
    """Return the reader of a class; see the top of this file."""
    origin, args = get_origin(kind), get_args(kind)
    if kind in _READERS:
        return _READERS[kind]
    if origin is Annotated:
        return args[1]  # type: ignore[no-any-return]  # its reader
    if origin is UnionType:
        return _or_none(reader_of(args[0]))
    if origin is Mapping:
        return _mapping(reader_of(args[1]))
    if origin is frozenset or (origin is tuple and args[-1] is Ellipsis):
        return _array(origin, reader_of(args[0]))
    if origin is tuple:
        return _row(tuple, [("", reader_of(each)) for each in args])
    if hasattr(kind, "__supertype__"):
        return reader_of(kind.__supertype__)
    if issubclass(kind, Enum):
        return _one_of(kind)
    hints = get_type_hints(kind, include_extras=True)
    readers = {name: reader_of(hints[name]) for name in kind.__match_args__}
    if issubclass(kind, tuple):
        return _row(kind._make, list(readers.items()))
    return _object(kind, readers)


def number(low: int = 0, high: int = I64_MAX) -> Reader:
    """Return a reader of integers in a range, inclusive."""

    def read(value: Any, name: str) -> int:
        if type(value) is not int or not low <= value <= high:
            raise FieldError(f"{name}: expected {low} to {high}, got {value!r:.80}")
        return value

    return read


def _text(value: Any, name: str) -> str:
    if type(value) is not str:
        raise FieldError(f"{name}: expected a text, got {value!r:.80}")
    return value


def _switch(value: Any, name: str) -> bool:
    if type(value) is not bool:
        raise FieldError(f"{name}: expected true or false, got {value!r:.80}")
    return value


def _real(value: Any, name: str) -> float:
    if type(value) not in {int, float}:
        raise FieldError(f"{name}: expected a number, got {value!r:.80}")
    return float(value)


def _one_of(kind: type[Enum]) -> Reader:
    members = {each.value: each for each in kind}

    def read(value: Any, name: str) -> Enum:
        member = members.get(_text(value, name))
        if member is None:
            raise FieldError(f"{name}: expected one of {[*members]}, got {value!r:.80}")
        return member

    return read


def _or_none(reader: Reader) -> Reader:
    return lambda value, name: None if value is None else reader(value, name)


def _array(make: Callable[[list[Any]], Any], reader: Reader) -> Reader:
    def read(value: Any, name: str) -> Any:
        if type(value) is not list:
            raise FieldError(f"{name}: expected a list, got {value!r:.80}")
        return make([reader(each, name) for each in value])

    return read


def _mapping(reader: Reader) -> Reader:
    def read(value: Any, name: str) -> dict[str, Any]:
        if type(value) is not dict:
            raise FieldError(f"{name}: expected an object, got {value!r:.80}")
        return {key: reader(each, f"{name} {key:.80}") for key, each in value.items()}

    return read


def _row(
    make: Callable[[list[Any]], Any], columns: Sequence[tuple[str, Reader]]
) -> Reader:
    size = len(columns)

    def read(value: Any, name: str) -> Any:
        if type(value) is not list or len(value) != size:
            raise FieldError(f"{name}: expected {size} items, got {value!r:.80}")
        items = zip(columns, value, strict=True)
        return make([reader(item, column or name) for (column, reader), item in items])

    return read


_NONE: Final = Parameter.empty


def _object(kind: Any, readers: dict[str, Reader]) -> Reader:
    has_faults = hasattr(kind, "fault")
    parameters = signature(kind).parameters
    columns = [(n, read, parameters[n].default) for n, read in readers.items()]

    def read(value: Any, name: str) -> Any:
        if type(value) is not dict:
            raise FieldError(f"{name}: expected an object, got {value!r:.80}")
        get = value.get
        items = [
            reader(get(each), each) if each in value or default is _NONE else default
            for each, reader, default in columns
        ]
        found = kind(*items)
        if has_faults and (fault := found.fault()):
            raise FieldError(f"{name}: {fault}")
        return found

    return read


_READERS: Final[dict[Any, Reader]] = {
    int: number(),
    str: _text,
    bool: _switch,
    float: _real,
    MessageId: number(I64_MIN),
    LogId: _object(LogId, {"topic": _text, "partition": number(0, I32_MAX)}),
}
LogNumber: TypeAlias = Annotated[int, number(0, 2**64 - 1)]
"""Number of a log, drawn at random."""
