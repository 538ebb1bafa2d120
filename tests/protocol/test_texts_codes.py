"""Codes after texts of refusals: what is written is read, all else is ignored."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.protocol.texts import (
    NAMED_MAX,
    ReplyCode,
    refused,
    split_code,
    with_code,
)

NAMES = st.from_regex("[a-z][a-z0-9-]{0,31}", fullmatch=True)


@given(
    text=st.text(),
    word=NAMES,
    values=st.dictionaries(NAMES, st.text(max_size=20), max_size=4),
)
def test_what_is_written_is_read(text: str, word: str, values: dict[str, str]) -> None:
    """With any text and any values; nothing breaks the line."""
    body = with_code(text, word, values)
    assert split_code(body) == (text, ReplyCode(word, values))
    assert body.removeprefix(text).isprintable()


@given(st.text())
def test_any_body_is_read(body: str) -> None:
    """A body of a foreign broker has no code, or is a text and a code."""
    text, code = split_code(body)
    assert (code is None) == (text == body)


def test_the_form_is_that_of_the_page() -> None:
    """docs/protocol.md shows it."""
    values = {"from": 375, "to": 500, "file": None, "why": "no segment [x]"}
    body = with_code("Sorry.", "damaged", values)
    assert body == "Sorry. [damaged from=375 to=500 why=no%20segment%20%5Bx%5D]"


@pytest.mark.parametrize(
    "body",
    [
        "",
        "a",
        "a [",
        "a []",
        "a [B]",
        "a [b] ",
        "a[b]",
        "a [b c]",
        "a [b c=]]",
        "a [b =1]",
    ],
)
def test_what_is_no_code_is_text(body: str) -> None:
    """A sentence that ends in brackets stays whole."""
    assert split_code(body) == (body, None)


@pytest.mark.parametrize(
    ("value", "numbers"),
    [("0", (0,)), ("2,5,65535", (2, 5, 65535)), ("", ()), ("1,", ()), ("-1", ())],
)
def test_a_code_names_messages(value: str, numbers: tuple[int, ...]) -> None:
    """Or none, where it cannot be read."""
    assert ReplyCode("too-far", {"messages": value}).messages == numbers


def test_the_first_of_many_messages_are_named() -> None:
    """The code is read all the same; of a batch of one, none is."""
    code = split_code(
        with_code("", "too-far", refused(range(65_536 - 1000, 65_536), 9))
    )[1]
    assert code is not None
    assert code.messages == tuple(range(64_536, 64_536 + NAMED_MAX))
    assert refused([0], 1) == {}


def test_a_long_value_is_cut() -> None:
    """The offsets in front of it are not lost for it."""
    body = with_code("", "damaged", {"from": 1, "to": 2, "file": "\U0001f600" * 9999})
    code = split_code(body)[1]
    assert code is not None
    assert (code.number("from"), code.number("to")) == (1, 2)
    assert code.values["file"].endswith("...")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        (str(2**63 - 1), 2**63 - 1),
        (str(2**63), None),
        ("-1", None),
        ("", None),
    ],
)
def test_a_number_has_63_bits(text: str, number: int | None) -> None:
    """Anything else is None."""
    assert ReplyCode("w", {"n": text}).number("n") == number
    assert ReplyCode("w", {}).number("n") is None
