"""The language of filters: parser of text to conditions. Pure.

    tag IN ('paid', 'void') AND amount > 100 AND NOT "x-region" LIKE 'eu-%'

A subset of SQL's conditions on single values, without functions and arithmetic; LIKE
takes a prefix only. Keywords are case-insensitive; a name in double quotes is always
that of a header.
"""

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from operator import eq, ge, gt, le, lt, ne
from typing import Any, Final

from lark import Lark, Token, Transformer, UnexpectedCharacters, UnexpectedToken, v_args

from metaq.errors import FilterError
from metaq.filter.conditions import (
    ATTRIBUTE,
    KEY,
    Condition,
    Field,
    Relation,
    bounded,
    joined,
    missing,
    negated,
    related,
)

LIST_MAX: Final = 256
"""Maximum number of values after IN."""

_GRAMMAR: Final = r"""
?start: either
either: both ("OR"i both)*
both: single ("AND"i single)*
?single: test | excluded | missing | present | negated | grouped
test: name (compared | _relation)
excluded: name "NOT"i _relation
missing: name "IS"i "NULL"i
present: name "IS"i "NOT"i "NULL"i
negated: "NOT"i single
grouped: "(" either ")"
_relation: between | listed | prefixed
compared: (EQUAL | UNEQUAL | ORDER) (TEXT | NUMBER) | (EQUAL | UNEQUAL) BOOLEAN
between: "BETWEEN"i (TEXT "AND"i TEXT | NUMBER "AND"i NUMBER)
listed: "IN"i "(" (TEXT ("," TEXT)* | NUMBER ("," NUMBER)*) ")"
prefixed: "LIKE"i TEXT
name: NAME | QUOTED
EQUAL: "="
UNEQUAL.2: "<>" | "!="
ORDER: "<=" | ">=" | "<" | ">"
TEXT: /'([^']|'')*'/
QUOTED: /"([^"]|"")+"/
NUMBER: /[+-]?[0-9]{1,30}(\.[0-9]{1,30})?/
BOOLEAN.2: /(true|false)(?![\w.])/i
NAME: /[a-z_][a-z0-9_.]*/i
%ignore /\s+/
"""
_WORDS: Final = {
    "NAME": "a name",
    "TEXT": "text in single quotes",
    "NUMBER": "a number",
    "BOOLEAN": "TRUE or FALSE",
    "EQUAL": "a comparison",
    "COMMA": "a comma",
    "LPAR": "(",
    "RPAR": ")",
    **{each: each for each in ("AND", "OR", "NOT", "IS", "NULL", "IN", "LIKE")},
    "BETWEEN": "BETWEEN",
    "$END": "the end",
}
"""Names of terminals in errors; the others are accepted only beside one of these."""
_RELATIONS: Final = {
    "=": eq, "<>": ne, "!=": ne, "<": lt, "<=": le, ">": gt, ">=": ge
}  # fmt: skip
_NAMES: Final[Mapping[str, Field]] = {"key": KEY, "attribute": ATTRIBUTE, "tag": "tag"}
_NUMBER: Final = re.compile(rb"[+-]?[0-9]{1,30}(\.[0-9]{1,30})?")
_TRUTHS: Final = {b"true": True, b"false": False}


def _read_number(value: bytes) -> Decimal | None:
    return Decimal(value.decode()) if _NUMBER.fullmatch(value) else None


def _read_truth(value: bytes) -> bool | None:
    return _TRUTHS.get(value.lower())


_READERS: Final[Mapping[str, Callable[[bytes], Any]]] = {
    "TEXT": bytes,
    "NUMBER": _read_number,
    "BOOLEAN": _read_truth,
}


def _unquoted(token: Token) -> str:
    quote = token[0]
    return token[1:-1].replace(2 * quote, quote)


def _value(literal: Token) -> Any:
    text = _unquoted(literal) if literal.type == "TEXT" else str(literal)
    return _READERS[literal.type](text.encode())


def _column(token: Token) -> int:
    # The token's own column restarts after a line end.
    return (token.start_pos or 0) + 1


@v_args(inline=True)
class _Builder(Transformer[Token, Condition]):
    """Builds conditions during parsing: one method for each rule."""

    def name(self, token: Token) -> tuple[Field, int]:
        if token.type == "QUOTED":
            return _unquoted(token), _column(token)
        return _NAMES.get(token.lower(), str(token)), _column(token)

    def compared(self, sign: Token, literal: Token) -> Relation:
        value, read = _value(literal), _READERS[literal.type]
        holds: Callable[[Any, Any], bool] = _RELATIONS[sign]
        is_text = sign == "=" and literal.type == "TEXT"
        starts = (value,) if is_text else (b"",)
        return Relation(read, lambda found: holds(found, value), starts, is_text)

    def between(self, first: Token, last: Token) -> Relation:
        low, high = _value(first), _value(last)
        return Relation(_READERS[first.type], lambda found: low <= found <= high)

    def listed(self, *literals: Token) -> Relation:
        if len(literals) > LIST_MAX:
            wanted, got = f"at most {LIST_MAX} values", f"{len(literals)} of them"
            raise FilterError(_column(literals[LIST_MAX]), wanted, got)
        kind, values = literals[0].type, frozenset(map(_value, literals))
        is_text = kind == "TEXT"
        starts = sorted(values) if is_text else (b"",)
        return Relation(_READERS[kind], values.__contains__, starts, is_text)

    def prefixed(self, literal: Token) -> Relation:
        text = _unquoted(literal)
        prefix = text.removesuffix("%")
        if prefix == text or "%" in prefix or "_" in prefix:
            raise FilterError(_column(literal), "'prefix%' without other % or _", text)
        start = prefix.encode()
        return Relation(bytes, lambda found: found.startswith(start), (start,))

    def test(self, name: tuple[Field, int], relation: Relation) -> Condition:
        field, column = name
        return related(field, relation, column)

    def excluded(self, name: tuple[Field, int], relation: Relation) -> Condition:
        return negated(self.test(name, relation))

    def missing(self, name: tuple[Field, int]) -> Condition:
        return missing(*name)

    def present(self, name: tuple[Field, int]) -> Condition:
        return negated(missing(*name))

    def negated(self, condition: Condition) -> Condition:
        return self.grouped(negated(condition))

    def grouped(self, condition: Condition) -> Condition:
        return bounded(condition._replace(terms=condition.terms + 1))

    def both(self, *parts: Condition) -> Condition:
        return parts[0] if len(parts) == 1 else joined(parts, is_or=False)

    def either(self, *parts: Condition) -> Condition:
        return parts[0] if len(parts) == 1 else joined(parts, is_or=True)


_PARSER: Final = Lark(_GRAMMAR, parser="lalr", lexer="basic", transformer=_Builder())


def parse_condition(text: str) -> Condition:
    """Parse the text of a filter.

    Raises:
        FilterError: a syntax error, or too many terms or values.
    """
    try:
        condition: Any = _PARSER.parse(text)
    except UnexpectedCharacters as error:
        position: Any = error.pos_in_stream
        rest = text[position:]
        is_quote = rest[0] in "'\""
        wanted = "a closing quote" if is_quote else "a name, a value or a sign"
        raise FilterError(position + 1, wanted, rest) from error
    except UnexpectedToken as error:
        could = [words for each, words in _WORDS.items() if each in error.accepts]
        token, wanted = error.token, " or ".join(could)
        if token.type == "$END":
            raise FilterError(len(text) + 1, wanted, "the end") from error
        raise FilterError(_column(token), wanted, str(token)) from error
    assert isinstance(condition, Condition), condition
    return condition
