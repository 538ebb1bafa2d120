"""Any filter as a tree, its text, and what SQL says of it."""

import re
from decimal import Decimal
from typing import Any

from hypothesis import strategies as st

from metaq.model import HeaderPairs

Tree = tuple[Any, ...]
Message = tuple[bytes | None, HeaderPairs, str | None]

NAMES = ("key", "attribute", "tag", "amount", "x-y", "é")
TEXTS = (
    "",
    "a",
    "paid",
    "pa%id",
    "it's",
    "5",
    "-1.50",
    "true",
    "é",
    "h.tag=a",
    "z" * 9,
)
NUMBERS = ("0", "5", "-1.5", "+100", "007")

texts = st.sampled_from(TEXTS)
names = st.sampled_from(NAMES)
values = texts.map(str.encode) | st.sampled_from(NUMBERS).map(str.encode)
messages: st.SearchStrategy[Message] = st.tuples(
    st.none() | values | st.binary(max_size=3),
    st.lists(st.tuples(names, values | st.binary(max_size=3)), max_size=4).map(tuple),
    st.none() | texts,
)


def _pairs(values: st.SearchStrategy[str], kind: str) -> st.SearchStrategy[Tree]:
    return st.one_of(
        st.tuples(
            st.just("compare"),
            names,
            st.just(kind),
            st.sampled_from(["=", "<>", "!=", "<", "<=", ">", ">="]),
            values,
        ),
        st.tuples(st.just("between"), names, st.just(kind), values, values),
        st.tuples(
            st.just("in"),
            names,
            st.just(kind),
            st.lists(values, min_size=1, max_size=3),
        ),
    )


_tests = st.one_of(
    _pairs(texts, "text"),
    _pairs(st.sampled_from(NUMBERS), "number"),
    st.tuples(
        st.just("compare"),
        names,
        st.just("truth"),
        st.sampled_from(["=", "<>"]),
        st.sampled_from(["TRUE", "false"]),
    ),
    st.tuples(
        st.just("like"), names, texts.filter(lambda t: "%" not in t and "_" not in t)
    ),
    st.tuples(st.just("null"), names),
)
trees: st.SearchStrategy[Tree] = st.recursive(
    _tests,
    lambda some: st.one_of(
        st.tuples(st.just("not"), some),
        st.tuples(st.sampled_from(["and", "or"]), some, some),
    ),
    max_leaves=6,
)


def text_of(tree: Tree, *, is_plain: bool = False) -> str:
    """Return the text of a filter; without parentheses where SQL needs none."""
    match tree:
        case "compare", name, kind, sign, value:
            return f"{_name(name)} {sign} {_literal(kind, value)}"
        case "between", name, kind, low, high:
            bounds = f"{_literal(kind, low)} AND {_literal(kind, high)}"
            return f"{_name(name)} between {bounds}"
        case "in", name, kind, listed:
            return f"{_name(name)} IN ({', '.join(_literal(kind, v) for v in listed)})"
        case "like", name, prefix:
            return f"{_name(name)} LIKE {_literal('text', prefix + '%')}"
        case "null", name:
            return f"{_name(name)} IS NULL"
        case "not", ("null", name):
            return f"{_name(name)} is not null"
        case "not", (("in" | "like" | "between"), *_) as inner:
            name = _name(inner[1])
            return name + " NOT" + text_of(inner).removeprefix(name)
        case "not", inner:
            return f"NOT ({text_of(inner)})"
        case word, left, right:
            inner = [
                f"({text_of(each)})"
                if word == "and" and each[0] == "or"
                else text_of(each)
                for each in (left, right)
            ]
            return f" {word} ".join(inner)
    raise AssertionError(tree)


def _name(name: str) -> str:
    return name if re.fullmatch("[a-z]+", name) else f'"{name}"'


def _literal(kind: str, value: str) -> str:
    return "'" + value.replace("'", "''") + "'" if kind == "text" else value


def says(tree: Tree, message: Message) -> bool | None:
    """Return what SQL says of a message; None: unknown."""
    match tree:
        case "not", inner:
            found = says(inner, message)
            return None if found is None else not found
        case "and", left, right:
            both = {says(left, message), says(right, message)}
            return False if False in both else None if None in both else True
        case "or", left, right:
            both = {says(left, message), says(right, message)}
            return True if True in both else None if None in both else False
        case "null", name:
            return _value(name, "text", message) is None
        case "like", name, prefix:
            value = _value(name, "text", message)
            return None if value is None else value.startswith(prefix.encode())
        case "between", name, kind, low, high:
            value = _value(name, kind, message)
            bounds = _read(kind, low.encode()), _read(kind, high.encode())
            return None if value is None else bounds[0] <= value <= bounds[1]
        case "in", name, kind, listed:
            value = _value(name, kind, message)
            if value is None:
                return None
            return any(value == _read(kind, each.encode()) for each in listed)
        case "compare", name, kind, sign, literal:
            value, other = _value(name, kind, message), _read(kind, literal.encode())
            if value is None:
                return None
            order = (value > other) - (value < other)
            return order in {"=": [0], "<>": [-1, 1], "!=": [-1, 1], "<": [-1],
                             "<=": [-1, 0], ">": [1], ">=": [0, 1]}[sign]  # fmt: skip
    raise AssertionError(tree)


def _value(name: str, kind: str, message: Message) -> Any:
    key, headers, attribute = message
    if name == "key":
        raw = key
    elif name == "attribute":
        raw = None if attribute is None else attribute.encode()
    else:
        raw = next((value for each, value in headers[::-1] if each == name), None)
    return None if raw is None else _read(kind, raw)


def _read(kind: str, raw: bytes) -> Any:
    if kind == "text":
        return raw
    text = raw.decode("latin-1")
    if kind == "truth":
        return {"true": True, "false": False}.get(text.lower())
    is_plain = re.fullmatch(r"[+-]?[0-9]+(\.[0-9]+)?", text) is not None
    return Decimal(text) if is_plain else None
