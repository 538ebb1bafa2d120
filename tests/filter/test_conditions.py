"""Conditions: SQL's three values, and the bytes that a record must have."""

from collections.abc import Mapping

import pytest
from hypothesis import given

from metaq.errors import FilterError
from metaq.filter.conditions import (
    FIELD_SETS_MAX,
    KEY,
    TERMS_MAX,
    Condition,
    Field,
    joined,
    negated,
)
from metaq.filter.grammar import parse_condition
from metaq.filter.language import parse_filter
from metaq.record.flags import HAS_PROPERTIES, encode_payload, has_field
from tests.cases import for_each
from tests.filter.expressions import Message, Tree, messages, says, text_of, trees

VALUES = {"t": True, "f": False, "u": None}


def always(value: bool | None) -> Condition:
    def test(_: Mapping[Field, bytes]) -> bool | None:
        return value

    return Condition(test, None, None, 1)


@pytest.mark.parametrize(
    ("is_or", "table"),
    [
        (False, "ttt tff tuu ftf fff fuf utu uff uuu"),
        (True, "ttt tft tut ftt fff fuu utt ufu uuu"),
    ],
)
def test_and_and_or_follow_sql(is_or: bool, table: str) -> None:
    """Both operands and the outcome, for each pair of true, false and unknown."""
    for left, right, outcome in table.split():
        parts = [always(VALUES[left]), always(VALUES[right])]
        assert joined(parts, is_or=is_or).test({}) is VALUES[outcome], (left, right)


def test_not_of_unknown_is_unknown() -> None:
    """A message without the field matches neither a condition nor its opposite."""
    for value, outcome in ((True, False), (False, True), (None, None)):
        assert negated(always(value)).test({}) is outcome


@for_each(
    "text, needles",
    [
        ("tag = 'paid'", [b"h.tag=paid"]),
        ("tag = 'a b'", [b"h.tag=a%20b"]),
        ("tag = ''", [b"h.tag="]),
        ("tag IN ('b', 'a', 'b')", [b"h.tag=a", b"h.tag=b"]),
        ("tag LIKE 'eu-%'", [b"h.tag=eu-"]),
        ("key = 'é'", [b"key=%C3%A9"]),
        ("key > 'a'", [b"key="]),
        ("\"x y\" = 'a'", [b"h.x%20y=a"]),
        ("amount = 5", [b"h.amount="]),
        ("amount IN (5)", [b"h.amount="]),
        ("attribute = 'Java'", [b"Java"]),
        ("attribute LIKE 'Ja%'", [b"Ja"]),
        ("attribute = ''", None),
        ("attribute > 'a'", None),
        ("attribute = '\ufffd'", None),
        ("\"\ufffd\" = 'a'", None),
        ("tag = '\ufffd'", [b"h.tag=%EF%BF%BD"]),
        ("tag IS NULL", None),
        ("tag IS NOT NULL", [b"h.tag="]),
        ("NOT tag = 'paid'", [b"h.tag="]),
        ("tag NOT IN ('paid')", [b"h.tag="]),
        ("NOT NOT tag = 'paid'", [b"h.tag=paid"]),
        ("tag = 'a' AND b = 'long'", [b"h.b=long"]),
        ("tag = 'a' AND b IS NULL", [b"h.tag=a"]),
        ("tag = 'a' OR b > 1", [b"h.tag=a", b"h.b="]),
        ("tag = 'a' OR b IS NULL", None),
        ("NOT (tag = 'a' AND b = 'x')", [b"h.tag=", b"h.b="]),
        ("NOT (tag = 'a' OR b IS NULL)", [b"h.tag="]),
    ],
)
def test_needles(text: str, needles: list[bytes] | None) -> None:
    """Equality needs the value, other comparisons the name, NULL nothing."""
    expected = None if needles is None else tuple(needles)
    assert parse_condition(text).needles == expected


@for_each(
    "text, fields",
    [
        ("tag = 'paid'", [[b"h.tag=paid"]]),
        ("tag = 'a b'", [[b"h.tag=a%20b"]]),
        ("tag = ''", [[b"h.tag="]]),
        ("tag = '\ufffd'", [[b"h.tag=%EF%BF%BD"]]),
        ("tag IN ('b', 'a', 'b')", [[b"h.tag=a", b"h.tag=b"]]),
        ("key = 'é'", [[b"key=%C3%A9"]]),
        ("tag LIKE 'eu-%'", []),
        ("key > 'a'", []),
        ("key BETWEEN 'a' AND 'a'", []),
        ("tag <> 'a'", []),
        ("amount = 5", []),
        ("amount IN (5)", []),
        ("flag = TRUE", []),
        ("attribute = 'Java'", []),
        ("\"\ufffd\" = 'a'", []),
        ("tag IS NULL", []),
        ("tag IS NOT NULL", []),
        ("NOT tag = 'paid'", []),
        ("NOT NOT tag = 'paid'", [[b"h.tag=paid"]]),
        ("tag = 'a' AND b = 'x'", [[b"h.tag=a"], [b"h.b=x"]]),
        ("tag = 'a' AND b > 1", [[b"h.tag=a"]]),
        ("tag = 'a' OR b = 'x'", [[b"h.tag=a", b"h.b=x"]]),
        ("tag = 'a' OR b > 1", []),
        ("tag = 'a' OR tag = 'a'", [[b"h.tag=a"]]),
        (
            "(tag = 'a' AND b = 'x') OR c = 'y'",
            [[b"h.tag=a", b"h.c=y"], [b"h.b=x", b"h.c=y"]],
        ),
        ("NOT (NOT tag = 'a' OR NOT b = 'x')", [[b"h.tag=a"], [b"h.b=x"]]),
        ("NOT (NOT tag = 'a' AND NOT b = 'x')", [[b"h.tag=a", b"h.b=x"]]),
        ("NOT (NOT tag = 'a' AND b = 'x')", []),
    ],
)
def test_fields(text: str, fields: list[list[bytes]]) -> None:
    """Equality of texts needs a whole field; each set of an AND will do."""
    assert parse_condition(text).fields == tuple(map(tuple, fields))


def test_sets_of_fields_are_bounded() -> None:
    """By the first ones, of AND and of OR."""
    both = " AND ".join(f"h{number} = 'a'" for number in range(30))
    expected = tuple((b"h.h%d=a" % number,) for number in range(FIELD_SETS_MAX))
    assert parse_condition(both).fields == expected
    one_of = " OR ".join(["(a = 'x' AND b = 'y')"] * 10)
    assert len(parse_condition(one_of).fields) == FIELD_SETS_MAX


@given(trees, messages)
def test_any_filter_says_what_sql_says(tree: Tree, message: Message) -> None:
    """Of the message, and of its record; a record without a needle never matches."""
    where = parse_filter(text_of(tree))
    expected = says(tree, message) is True
    assert where.matches(*message) is expected
    key, headers, attribute = message
    payload, flag = encode_payload(b"key=a&h.tag=paid", attribute, key, headers)
    assert where.matches_payload(b"\0" + payload, 1, 1 + len(payload), flag) is expected
    if where.needles is not None and expected:
        text = payload[: -len(b"key=a&h.tag=paid")]
        assert not flag & HAS_PROPERTIES or any(n in text for n in where.needles)
    for fields in where.fields if expected else ():
        assert any(has_field(payload, flag, each) for each in fields), fields


def test_terms_are_bounded() -> None:
    """Comparisons, NOTs and parentheses count: nothing is deeper than their number."""
    for size, text in (
        (TERMS_MAX, " OR ".join(["a = 1"] * TERMS_MAX)),
        (TERMS_MAX, "NOT " * (TERMS_MAX - 1) + "a = 1"),
        (TERMS_MAX, "(" * (TERMS_MAX - 1) + "a = 1" + ")" * (TERMS_MAX - 1)),
    ):
        assert parse_condition(text).terms == size
    for text in (
        " OR ".join(["a = 1"] * (TERMS_MAX + 1)),
        "NOT " * TERMS_MAX + "a = 1",
        "(" * 900 + "a = 1" + ")" * 900,
    ):
        with pytest.raises(FilterError, match="at most 64 terms, got 65"):
            parse_condition(text)


def test_values_are_compared_and_not_their_hashes() -> None:
    """Two texts of one hash are two (apache/rocketmq#72); "Aa" and "BB" are in Java."""
    where = parse_condition("tag = 'Aa' AND key = 'Aa'")
    assert where.test({"tag": b"Aa", KEY: b"Aa"}) is True
    assert where.test({"tag": b"BB", KEY: b"Aa"}) is False
