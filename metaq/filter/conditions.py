"""Conditions on the values of one message, and bytes that a match contains. Pure.

A condition is true, false or unknown (None, where a value is missing), by SQL's rules.
It comes with *needles*: byte strings of which at least one is in the text of each
record for which it is true, and others for false. A reader uses them to skip records
without decoding them. It also comes with *fields*, whole fields as an index of keys has
them, by which a reader finds records. Both rely on the key and headers of a record
having one encoding only: see `record/flags.py`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, islice, product
from typing import Any, Final, NamedTuple, TypeAlias

from metaq.errors import FilterError
from metaq.record.flags import quote_octets

TERMS_MAX: Final = 64
"""Maximum number of comparisons, NOTs and pairs of parentheses; bounds the depth."""

KEY: Final = 0
ATTRIBUTE: Final = 1

Field: TypeAlias = str | int
"""Name of a header, KEY or ATTRIBUTE."""

Needles: TypeAlias = tuple[bytes, ...] | None
"""At least one of them is in each such record; None: no statement."""

Fields: TypeAlias = tuple[tuple[bytes, ...], ...]
"""Each such record has at least one field of each set; (): no statement."""

FIELD_SETS_MAX: Final = 8
"""Maximum number of sets of a condition; the others are dropped, as any set will do."""

_REPLACED: Final = "\ufffd".encode()
"""Replaces bytes that are not UTF-8."""


class Condition(NamedTuple):
    """A filter, or a part of one."""

    test: Callable[[Mapping[Field, bytes]], bool | None]
    """Returns whether the values of a message meet the condition; None: unknown."""
    needles: Needles
    """Needles of records for which it is true."""
    needles_of_no: Needles
    """Needles of records for which it is false."""
    column: int
    """Column of its first character, from 1."""
    terms: int = 1
    fields: Fields = ()
    """Fields of records for which it is true."""
    fields_of_no: Fields = ()
    """Fields of records for which it is false."""


class Relation(NamedTuple):
    """A relation between a value and literals."""

    read: Callable[[bytes], Any]
    """Converts a value to the type of the literals; None if it is not of that type."""
    holds: Callable[[Any], bool]
    starts: Sequence[bytes] = (b"",)
    """Prefixes; each value for which the relation holds begins with one of them."""
    is_exact: bool = False
    """Whether such a value equals one of `starts`."""


def related(field: Field, relation: Relation, column: int) -> Condition:
    """Return the condition that a field has a relation to literals."""
    read, holds, starts, is_exact = relation

    def test(values: Mapping[Field, bytes]) -> bool | None:
        raw = values.get(field)
        value = None if raw is None else read(raw)
        return None if value is None else holds(value)

    needles = _needles(field, starts)
    is_field = is_exact and field != ATTRIBUTE
    fields = () if needles is None or not is_field else (needles,)
    return Condition(test, needles, _needles(field), column, fields=fields)


def missing(field: Field, column: int) -> Condition:
    """Return the condition that a field is NULL."""
    return Condition(lambda values: field not in values, None, _needles(field), column)


def negated(condition: Condition) -> Condition:
    """Return the negation; that of unknown is unknown."""

    def test(values: Mapping[Field, bytes]) -> bool | None:
        found = condition.test(values)
        return None if found is None else not found

    return condition._replace(
        test=test,
        needles=condition.needles_of_no,
        needles_of_no=condition.needles,
        fields=condition.fields_of_no,
        fields_of_no=condition.fields,
    )


def joined(parts: Sequence[Condition], *, is_or: bool) -> Condition:
    """Join conditions by OR or AND."""
    tests = [part.test for part in parts]

    def test(values: Mapping[Field, bytes]) -> bool | None:
        outcome: bool | None = not is_or
        for each in tests:
            found = each(values)
            if found is is_or:
                return found
            if found is None:
                outcome = None
        return outcome

    yes, no = [part.needles for part in parts], [part.needles_of_no for part in parts]
    has, has_no = [part.fields for part in parts], [part.fields_of_no for part in parts]
    return bounded(
        Condition(
            test,
            _any_of(yes) if is_or else _best_of(yes),
            _best_of(no) if is_or else _any_of(no),
            parts[0].column,
            sum(part.terms for part in parts),
            _either_of(has) if is_or else _all_of(has),
            _all_of(has_no) if is_or else _either_of(has_no),
        )
    )


def bounded(condition: Condition) -> Condition:
    """Return the condition itself, after a check of its size.

    Raises:
        FilterError: it has more than `TERMS_MAX` terms.
    """
    if condition.terms > TERMS_MAX:
        wanted = f"at most {TERMS_MAX} terms"
        raise FilterError(condition.column, wanted, f"{condition.terms} of them")
    return condition


def _needles(field: Field, starts: Sequence[bytes] = (b"",)) -> Needles:
    if field == ATTRIBUTE:
        is_sure = all(start and _REPLACED not in start for start in starts)
        return tuple(starts) if is_sure else None
    head = "key="
    if isinstance(field, str):
        if _REPLACED in field.encode():
            return None
        head = f"h.{quote_octets(field.encode())}="
    return tuple((head + quote_octets(start)).encode() for start in starts)


def _any_of(parts: Sequence[Needles]) -> Needles:
    if None in parts:
        return None
    return tuple(dict.fromkeys(needle for part in parts for needle in part or ()))


def _best_of(parts: Iterable[Needles]) -> Needles:
    """Return the needles of one part: the longest ones, as they occur least often."""
    found = [part for part in parts if part]
    return max(found, key=lambda part: min(map(len, part)), default=None)


def _either_of(parts: Sequence[Fields]) -> Fields:
    """Return unions of one set of each part: any of the parts may be the true one."""
    return tuple(
        tuple(dict.fromkeys(chain(*sets)))
        for sets in islice(product(*parts), FIELD_SETS_MAX)
    )


def _all_of(parts: Iterable[Fields]) -> Fields:
    return tuple(islice(chain(*parts), FIELD_SETS_MAX))
