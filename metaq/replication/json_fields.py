"""Readers of JSON that came from outside: each checks one kind of value. Pure.

A reader takes a value and its name, and returns what it says. `row` and `listed` put
readers together, so a table of them is the description of a message. `to_json` writes
what they read: an object of a class is the array of its fields, in their order.
"""

import json
from collections.abc import Callable
from typing import Any, Final, TypeAlias, TypeVar

from metaq.protocol.decimals import I64_MAX

T = TypeVar("T")
Reader: TypeAlias = Callable[[Any, str], T]


class FieldError(ValueError):
    """A value is not of the kind, size or range that was expected; it is named."""


def number(low: int = 0, high: int = I64_MAX) -> Reader[int]:
    """Return a reader of whole numbers of a range."""

    def read(value: Any, name: str) -> int:
        if type(value) is not int or not low <= value <= high:
            raise FieldError(f"{name}: expected {low} to {high}, got {value!r:.80}")
        return value

    return read


def text(value: Any, name: str) -> str:
    """Read a text."""
    if type(value) is not str:
        raise FieldError(f"{name}: expected a text, got {value!r:.80}")
    return value


def switch(value: Any, name: str) -> bool:
    """Read a truth."""
    if type(value) is not bool:
        raise FieldError(f"{name}: expected true or false, got {value!r:.80}")
    return value


def one_of(kind: Callable[[str], T]) -> Reader[T]:
    """Return a reader of the texts of an enum."""

    def read(value: Any, name: str) -> T:
        try:
            return kind(text(value, name))
        except FieldError:
            raise
        except ValueError as error:
            raise FieldError(f"{name}: {error}") from error

    return read


def listed(reader: Reader[T], item: str) -> Reader[tuple[T, ...]]:
    """Return a reader of arrays of one kind of items, which `item` names."""

    def read(value: Any, name: str) -> tuple[T, ...]:
        if type(value) is not list:
            raise FieldError(f"{name}: expected a list, got {value!r:.80}")
        return tuple([reader(each, item) for each in value])

    return read


def row(make: Callable[..., T], **readers: Reader[Any]) -> Reader[T]:
    """Return a reader of arrays that have an item for each argument of `make`.

    Args:
        make: a class, or another function of the items in their order.
        readers: name of each item → its reader.
    """
    columns, size = tuple(readers.items()), len(readers)

    def read(value: Any, name: str) -> T:
        if type(value) is not list or len(value) != size:
            raise FieldError(f"{name}: expected {size} items, got {value!r:.80}")
        items = zip(columns, value, strict=True)
        return make(*[reader(item, column) for (column, reader), item in items])

    return read


def _fields_of(value: Any) -> list[Any]:
    return [getattr(value, name) for name in value.__match_args__]


to_json: Final = json.JSONEncoder(separators=(",", ":"), default=_fields_of).encode
"""Returns the text of a value, without spaces."""
