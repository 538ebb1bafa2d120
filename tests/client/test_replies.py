"""What a client makes of replies."""

import pytest

from metaq.client.errors import UnexpectedReplyError
from metaq.client.replies import (
    Fetched,
    MovedTo,
    NothingThere,
    parse_boundaries,
    parse_count,
    parse_get,
    parse_receipt,
)
from metaq.errors import ForbiddenError, ServerError
from metaq.model import Offset
from metaq.protocol.commands import Reply, Result, Value


def ok(body: str) -> Result:
    return Result(200, body.encode(), 1)


@pytest.mark.parametrize(
    ("body", "count"), [("0", 0), ("15", 15), ("9" * 19, 10**19 - 1)]
)
def test_a_count_is_one_number(body: str, count: int) -> None:
    """Zero is one, too."""
    assert parse_count(ok(body)) == count


@pytest.mark.parametrize("body", ["", " ", "-1", "1 2", "x", "٣", "1\n", "9" * 20])
def test_what_is_no_count_is_not_believed(body: str) -> None:
    """The error shows what came."""
    with pytest.raises(UnexpectedReplyError, match="expected a count, got"):
        parse_count(ok(body))


@pytest.mark.parametrize(
    ("body", "offsets"), [("7", (7,)), ("0 125 250", (0, 125, 250))]
)
def test_boundaries_are_growing_offsets(body: str, offsets: tuple[int, ...]) -> None:
    """An empty range has one."""
    assert parse_boundaries(ok(body)) == offsets


@pytest.mark.parametrize("body", ["", "1 1", "2 1", "1  2", "1 x", "-1 2", "1 2 "])
def test_what_does_not_grow_is_not_believed(body: str) -> None:
    """A plan that is made of it would read twice or never."""
    with pytest.raises(UnexpectedReplyError, match="expected growing offsets, got"):
        parse_boundaries(ok(body))


@pytest.mark.parametrize("parse", [parse_count, parse_boundaries])
def test_a_refusal_is_the_error_of_its_status(parse) -> None:
    """The text is the broker's; a value is no answer."""
    with pytest.raises(ServerError, match="no record"):
        parse(Result(500, b"no record starts there", 1))
    with pytest.raises(UnexpectedReplyError):
        parse(Value(b"1", 1))


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        (Value(b"x", 1), Fetched(b"x")),
        (Value(b"", 1), NothingThere()),
        (Result(404, b"Could not find message at position 5", 1), NothingThere()),
        (Result(301, b"100", 1), MovedTo(Offset(100))),
    ],
)
def test_answers_to_a_get(reply: Reply, outcome: object) -> None:
    """The answers that a reader goes on with are values."""
    assert parse_get(reply) == outcome


@pytest.mark.parametrize(
    ("reply", "error", "text"),
    [
        (Result(403, b"closed", 1), ForbiddenError, "closed"),
        (Result(500, b"", 1), ServerError, "status 500"),
        (Result(200, b"odd", 1), UnexpectedReplyError, "odd"),
        (Result(301, b"here", 1), UnexpectedReplyError, "here"),
        (Result(777, b"odd", 1), UnexpectedReplyError, "777"),
    ],
)
def test_refusals_of_a_get(reply: Reply, error: type[Exception], text: str) -> None:
    """Every other answer is an error that carries the broker's text."""
    with pytest.raises(error, match=text):
        parse_get(reply)


@pytest.mark.parametrize(
    "reply", [Result(200, b"1 2", 1), Result(200, b"a b c", 1), Value(b"", 1)]
)
def test_a_200_that_is_no_receipt_is_not_believed(reply: Reply) -> None:
    """A put counts as stored only with id, partition and offset."""
    with pytest.raises(UnexpectedReplyError):
        parse_receipt(reply)
