"""The book of a queue group finds what it is to find, and nothing else."""

from typing import Any

import pytest

from tests.matrix.queue_book import Place, check

ONE, TWO = Place("0-0", 0), Place("0-0", 50)
PUT = {"event": "put", "place": ONE}


def took(place: Place, delivery: int, begun: float, count: int = 1) -> dict[str, Any]:
    """Return the event of a message that was handed out."""
    fields = {"place": place, "delivery": delivery, "begun": begun, "count": count}
    return {"event": "took", "data": "a", "key": "k", **fields}


def said(place: Place, verb: str) -> dict[str, Any]:
    """Return the event of a settle that began."""
    return {"event": "said", "place": place, "verb": verb}


def told(place: Place, delivery: int, at: float, error: str = "") -> dict[str, Any]:
    """Return the event of an ack that was answered."""
    fields = {"place": place, "delivery": delivery, "at": at, "error": error}
    return {"event": "told", "verb": "ack", **fields}


DONE = [PUT, took(ONE, 1, 1.0), said(ONE, "ack"), told(ONE, 1, 2.0)]
BOOKS: dict[str, tuple[list[dict[str, Any]], list[tuple[Place, str]], list[str]]] = {
    "done": (DONE, [], []),
    "handed out before the answer": ([*DONE, took(ONE, 2, 1.9)], [], []),
    "handed out after it": ([*DONE, took(ONE, 2, 2.1)], [], ["handed out after its"]),
    "forgotten": ([PUT, took(ONE, 1, 1.0), said(ONE, "nack")], [], ["neither done"]),
    "rejected": (
        [PUT, took(ONE, 1, 1.0), said(ONE, "reject")],
        [(ONE, "rejected")],
        [],
    ),
    "given up too early": (
        [PUT, took(ONE, 1, 1.0, count=2)],
        [(ONE, "deliveries")],
        ["without a reason"],
    ),
    "given up twice": (
        [PUT, took(ONE, 1, 1.0, count=3)],
        [(ONE, "deliveries")] * 2,
        ["2 dead letters"],
    ),
    "lost to another": (
        [*DONE, took(ONE, 2, 1.5), told(ONE, 1, 3.0, "LeaseLostError")],
        [],
        [],
    ),
    "lost to none": (
        [*DONE, told(ONE, 1, 3.0, "LeaseLostError")],
        [],
        ["no other delivery"],
    ),
    "a later one of the key too early": (
        [took(ONE, 1, 1.0), took(TWO, 2, 1.5)],
        [],
        ["is not settled"],
    ),
    "an earlier one of the key too late": (
        [took(TWO, 1, 1.0), took(ONE, 2, 1.5)],
        [],
        ["after a later one"],
    ),
    "keys in order": ([*DONE, took(TWO, 2, 2.5)], [], []),
}


@pytest.mark.parametrize("name", BOOKS)
def test_what_may_not_be_is_found(name: str) -> None:
    """Each rule by a history that breaks it, and by one that nearly does."""
    events, letters, wanted = BOOKS[name]
    found = check(events, letters, 3, is_ordered=True)
    assert len(found) == len(wanted), found
    assert all(text in line for text, line in zip(wanted, found, strict=True)), found
