"""Integer and boolean values of settings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.config.keys import NAMES_MAX, evaluate_boolean, evaluate_integer, read_names


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("8123", 8123),
        ("1024*1024*1024", 2**30),
        (" 1024 * 1024 ", 2**20),
        ("-1", -1),
        ("010", 10),
        ("1024*007", 7168),
        ("000", 0),
        ("-(2+3)*4", -20),
        ("7/2", 3),
        ("-7/2", -3),
        ("7/-2", -3),
        ("-7%3", -1),
        ("7%-3", 1),
        ("1-2-3", -4),
        ("9223372036854775807+1-1", None),
        ("9223372036854775807", 2**63 - 1),
        ("-9223372036854775807-1", -(2**63)),
    ],
)
def test_expressions_have_the_value_java_gives_them(
    text: str, value: int | None
) -> None:
    """Division cuts toward zero, steps stay in 64 bits."""
    if value is None:
        with pytest.raises(ValueError, match="64-bit"):
            evaluate_integer(text)
    else:
        assert evaluate_integer(text) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "whole number"),
        ("abc", "whole number"),
        ("1.5", "whole number"),
        ("0x10", "whole number"),
        ("__import__('os')", "whole number"),
        ("1 2", "not well formed"),
        ("(1", "not well formed"),
        ("+5", "only"),
        ("   ", "not well formed"),
        ("1(2)", "only"),
        ("7//2", "only"),
        ("1/0", "division by zero"),
        ("1%0", "division by zero"),
        ("9**9**9", "only"),
        ("9" * 60, "64-bit"),
        ("1+" * 60 + "1", "at most 100 characters"),
    ],
)
def test_other_texts_are_refused_with_the_reason(text: str, message: str) -> None:
    """Nothing but bounded arithmetic is evaluated."""
    with pytest.raises(ValueError, match=message):
        evaluate_integer(text)


@given(st.text(alphabet="0123456789+-*/%() ", max_size=110))
def test_any_expression_gives_a_number_or_a_value_error(text: str) -> None:
    """No expression raises anything else, and none leaves 64 bits."""
    try:
        value = evaluate_integer(text)
    except ValueError:
        return
    assert -(2**63) <= value < 2**63


def test_booleans_are_the_two_literals() -> None:
    """`true` and `false`, nothing like them."""
    assert evaluate_boolean("true") is True
    assert evaluate_boolean("false") is False
    for text in ("True", "yes", "1", "", "true "):
        with pytest.raises(ValueError, match="true or false"):
            evaluate_boolean(text)


def test_names_have_commas_between_and_each_comes_once() -> None:
    """Blanks around them go; none is empty, and there are not too many."""
    assert read_names("key, order-id,key") == ("key", "order-id")
    for text in ("key,", ",", ",".join(f"n{n}" for n in range(NAMES_MAX + 1))):
        with pytest.raises(ValueError, match=f"expected 1 to {NAMES_MAX} names"):
            read_names(text)
