"""Values of the replicas in JSON: the class of a value is the description of it. Pure.

| class | JSON |
|---|---|
| dataclass | an object; a property that is missing has the default of its field |
| named tuple, tuple of some items | an array of so many items |
| tuple of any length | an array |
| enum | its text |
| `int`, or a `NewType` of it | a number from 0 to 2^63 - 1, but for message ids |
| `Annotated[..., reader]` | what the reader takes |

What came from outside is read with every check: kinds, sizes, ranges, and where a
class has a method `fault`, what contradicts itself. Properties that are not known are
skipped.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from types import UnionType
from typing import (
    Annotated,
    Any,
    Final,
    TypeAlias,
    get_args,
    get_origin,
    get_type_hints,
)

from metaq.model import LogId, MessageId
from metaq.protocol.decimals import I32_MAX, I64_MAX, I64_MIN

Reader: TypeAlias = Callable[[Any, str], Any]
"""Takes a value and its name; returns what it says, or raises FieldError."""


class FieldError(ValueError):
    """A value is not of the kind, size or range that was expected; it is named."""


def to_json(value: object) -> bytes:
    """Return the JSON of a value, without spaces."""
    return _JSON.encode(value).encode()


def fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name."""
    return {name: getattr(value, name) for name in value.__match_args__}


_JSON = json.JSONEncoder(separators=(",", ":"), default=fields_of)


def reader_of(kind: Any) -> Reader:
    """Return the reader of a class; see the top of this file."""
    origin, args = get_origin(kind), get_args(kind)
    if kind in _READERS:
        return _READERS[kind]
    if origin is Annotated:
        return args[1]  # type: ignore[no-any-return]  # its reader
    if origin is UnionType:
        return _or_none(reader_of(args[0]))
    if origin is tuple and args[-1] is Ellipsis:
        return _array(reader_of(args[0]))
    if origin is tuple:
        return _row(tuple, [("", reader_of(each)) for each in args])
    if hasattr(kind, "__supertype__"):
        return reader_of(kind.__supertype__)
    if issubclass(kind, Enum):
        return _one_of(kind)
    hints = get_type_hints(kind, include_extras=True)
    readers = {name: reader_of(hints[name]) for name in kind.__match_args__}
    if is_dataclass(kind):
        return _object(kind, readers)
    return _row(kind._make, list(readers.items()))


def number(low: int = 0, high: int = I64_MAX) -> Reader:
    """Return a reader of the whole numbers of a range."""

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


def _array(reader: Reader) -> Reader:
    def read(value: Any, name: str) -> tuple[Any, ...]:
        if type(value) is not list:
            raise FieldError(f"{name}: expected a list, got {value!r:.80}")
        return tuple([reader(each, name) for each in value])

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


def _object(kind: Any, readers: dict[str, Reader]) -> Reader:
    optional = {each.name for each in fields(kind) if each.default is not MISSING}
    has_faults = hasattr(kind, "fault")

    def read(value: Any, name: str) -> Any:
        if type(value) is not dict:
            raise FieldError(f"{name}: expected an object, got {value!r:.80}")
        found = kind(
            **{
                each: reader(value.get(each), each)
                for each, reader in readers.items()
                if each in value or each not in optional
            }
        )
        if has_faults and (fault := found.fault()):
            raise FieldError(f"{name}: {fault}")
        return found

    return read


_READERS: Final[dict[Any, Reader]] = {
    int: number(),
    str: _text,
    bool: _switch,
    MessageId: number(I64_MIN),
    LogId: _object(LogId, {"topic": _text, "partition": number(0, I32_MAX)}),
}
LogNumber: TypeAlias = Annotated[int, number(0, 2**64 - 1)]
"""Number of a log, as it was drawn."""
