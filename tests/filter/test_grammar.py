"""The language of filters: what is read, what each form means, where errors are."""

import random

import pytest

from metaq.errors import FilterError
from metaq.filter.grammar import LIST_MAX, parse_condition
from metaq.filter.language import FILTER_BYTES_MAX, parse_filter
from tests.cases import for_each
from tests.sampling import IS_WHOLE

HEADERS = (
    ("amount", b"100"),
    ("tag", b"first"),
    ("price", b"-2.50"),
    ("urgent", b"True"),
    ("x-y", b"dash"),
    ("key", b"header"),
    ("a.b", b"dot"),
    ("text", b"it's"),
    ("android", b"1"),
    ("huge", b"9" * 31),
    ("tag", b"paid"),
)


@for_each(
    "text, is_match",
    [
        ("tag = 'paid'", True),
        ("tag = 'first'", False),
        ("TAG = 'paid'", True),
        ("Key = 'k1'", True),
        ("\"key\" = 'header'", True),
        ("attribute LIKE 'at%'", True),
        ('"attribute" IS NULL', True),
        ("\"x-y\" = 'dash'", True),
        ("a.b = 'dot'", True),
        ("Amount IS NULL", True),
        ("android = 1 AND NOTe IS NULL", True),
        ("text = 'it''s'", True),
        ("text = 'its'", False),
        ("tag <> 'first'", True),
        (
            "tag != 'first' AND amount!=99 AND urgent != FALSE AND NOT tag != 'paid'",
            True,
        ),
        ("tag < 'paie' AND tag <= 'paid' AND tag > 'Paid' AND tag >= 'paid'", True),
        ("amount = 100.00 AND amount = +100 AND amount <> 99", True),
        ("amount > 99", True),
        ("amount > 100", False),
        # As text: '100' < '99'.
        ("amount > '99'", False),
        ("price = -2.5 AND price < -2 AND price BETWEEN -3 AND -2.5", True),
        ("amount BETWEEN 100 AND 99", False),
        ("amount NOT BETWEEN 1 AND 99", True),
        ("tag BETWEEN 'a' AND 'q'", True),
        ("amount IN (1, 100.0)", True),
        ("tag IN ('x', 'paid')", True),
        ("tag NOT IN ('x', 'paid')", False),
        ("tag LIKE 'pa%' AND tag LIKE 'paid%' AND tag LIKE '%'", True),
        ("tag NOT LIKE 'pa%'", False),
        ("urgent = TRUE AND urgent <> false", True),
        ("tag = TRUE OR tag <> TRUE", False),
        # What is no number is NULL, as what is not there.
        ("tag = 5 OR tag <> 5 OR NOT tag = 5", False),
        ("huge > 0 OR huge <= 0", False),
        ("nothing = 'x' OR NOT nothing = 'x' OR nothing NOT IN ('x')", False),
        ("nothing IS NULL AND tag IS NOT NULL", True),
        ("nothing = 'x' OR tag = 'paid'", True),
        ("tag = 'x' AND tag = 'y' OR amount = 100", True),
        ("tag = 'x' AND (tag = 'y' OR amount = 100)", False),
        ("NOT tag = 'x' AND amount = 100", True),
        ("not(tag='x')and(amount=100)", True),
        (" tag\n=\t'paid' ", True),
    ],
)
def test_what_each_form_means(text: str, is_match: bool) -> None:
    """Of one message with a key, an attribute and headers, one of them twice."""
    assert parse_filter(text).matches(b"k1", HEADERS, "attr") is is_match


VALUE = "text in single quotes or a number or TRUE or FALSE"
START = "a name or ( or NOT"


@for_each(
    "text, column, wanted, got",
    [
        ("", 1, START, "the end"),
        ("tag", 4, "a comparison or NOT or IS or IN or LIKE or BETWEEN", "the end"),
        ("tag =", 6, VALUE, "the end"),
        ("tag = paid", 7, VALUE, "paid"),
        ("tag == 'a'", 6, VALUE, "="),
        ("tag = 'paid", 7, "a closing quote", "'paid"),
        ('"tag = 1', 1, "a closing quote", '"tag = 1'),
        ("tag = 'a' &", 11, "a name, a value or a sign", "&"),
        ("tag = 'a' tag", 11, "AND or OR or the end", "tag"),
        ("(tag = 'a'", 11, ")", "the end"),
        ("tag = 'a')", 10, "the end", ")"),
        ("tag < TRUE", 7, "text in single quotes or a number", "TRUE"),
        ("tag IN ()", 9, "text in single quotes or a number", ")"),
        ("tag IN ('a', 5)", 14, "text in single quotes", "5"),
        ("tag IN 'a'", 8, "(", "'a'"),
        ("a BETWEEN 1 AND 'x'", 17, "a number", "'x'"),
        ("a BETWEEN 1 OR 2", 13, "AND", "OR"),
        ("a NOT = 1", 7, "IN or LIKE or BETWEEN", "="),
        ("a IS 5", 6, "NOT or NULL", "5"),
        ("and = 1", 1, START, "and"),
        ("a = 1 AND\nAND = 2", 11, START, "AND"),
        ("'é' = tag", 1, START, "'é'"),
        ("é = 1", 1, "a name, a value or a sign", "é = 1"),
        ("tag LIKE 'a%b'", 10, "'prefix%' without other % or _", "a%b"),
        ("tag LIKE 'a_%'", 10, "'prefix%' without other % or _", "a_%"),
        ("tag LIKE 'a'", 10, "'prefix%' without other % or _", "a"),
        ("a = \ud800", 5, "text", "half a surrogate pair"),
    ],
)
def test_errors_name_the_column(text: str, column: int, wanted: str, got: str) -> None:
    """One sentence, with what could have been there, and what was."""
    with pytest.raises(FilterError) as caught:
        parse_filter(text)
    message = f"filter, column {column}: expected {wanted}, got {got}"
    assert str(caught.value) == message
    assert caught.value.column == column


def test_lists_and_texts_are_bounded() -> None:
    """They are refused by their size, however simple they are."""
    longest = ",".join(["1"] * LIST_MAX)
    assert parse_condition(f"a IN ({longest})").test({"a": b"1"}) is True
    with pytest.raises(FilterError, match="column 519: expected at most 256 values"):
        parse_condition(f"a IN ({longest},2)")
    text = '"é" = \'' + "x" * (FILTER_BYTES_MAX - len("\"é\" = ''") - 1) + "'"
    assert parse_filter(text).matches(None, (), None) is False
    with pytest.raises(FilterError, match="at most 2048 bytes of text, got 2049"):
        parse_filter(text + " ")


PIECES = [
    "tag", "key", "attribute", '"x-y"', "amount", "=", "<>", "!=", "<", ">=", "'paid'",
    "''", "'", '"', "5", "-1.5", "TRUE", "AND", "OR", "NOT", "IN", "(", ")", ",",
    "LIKE", "'a%'", "IS", "NULL", "BETWEEN", " ", "\n", "é", "\0", "%", ";", "--",
    "\ud800",
]  # fmt: skip


@pytest.mark.slow
def test_any_text_is_a_filter_or_an_error_with_a_column(seed: int) -> None:
    """Pieces of the language in any order, and forms that a change of one breaks."""
    rng = random.Random(seed)
    good = "tag IN ( 'paid' , 'x' ) AND NOT amount > 5 OR key LIKE 'a%' AND b IS NULL"
    count, columns = 0, list[tuple[int, int]]()
    for _ in range(100_000 if IS_WHOLE else 3_000):
        if rng.random() < 0.5:
            words = good.split()
            words[rng.randrange(len(words))] = rng.choice(PIECES)
        else:
            words = rng.choices(PIECES, k=rng.randrange(1, 30))
        text = rng.choice(["", " "]).join(words)
        try:
            where = parse_filter.__wrapped__(text)
        except FilterError as error:
            columns.append((error.column, len(text) + 1))
        else:
            where.matches(b"k", HEADERS, None)
            count += 1
    assert count
    assert all(1 <= column <= end for column, end in columns)
