"""Values in JSON by their classes: they read back, and what is wrong is named."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, NamedTuple

import pytest

from metaq.model import LogId, MessageId, Offset
from metaq.replication.json_values import (
    FieldError,
    LogNumber,
    from_json,
    number,
    to_json,
)


class Colour(Enum):
    RED = "red"


class Pair(NamedTuple):
    offset: Offset
    log_id: LogId


@dataclass(frozen=True, slots=True)
class Part:
    low: int
    high: int

    def fault(self) -> str | None:
        return None if self.low <= self.high else f"{self.low} is above {self.high}"


@dataclass(frozen=True, slots=True)
class Whole:
    colour: Colour
    parts: tuple[Part, ...]
    pair: Pair
    few: tuple[LogNumber, MessageId]
    those: frozenset[int]
    sizes: Mapping[str, int]
    time_s: float
    is_so: bool
    part: Part | None
    small: Annotated[int, number(1, 3)]


WHOLE = Whole(
    Colour.RED,
    (Part(1, 2),),
    Pair(Offset(7), LogId("topic", 3)),
    (2**64 - 1, MessageId(-5)),
    frozenset({9, 3}),
    {"a": 1},
    0.5,
    True,
    None,
    2,
)
FIELDS: dict[str, Any] = {
    "colour": "red",
    "parts": [{"low": 1, "high": 2}],
    "pair": [7, {"topic": "topic", "partition": 3}],
    "few": [2**64 - 1, -5],
    "those": [3, 9],
    "sizes": {"a": 1},
    "time_s": 0.5,
    "is_so": True,
    "part": None,
    "small": 2,
}


def test_a_value_is_the_json_of_its_class() -> None:
    """And back: a row for a named tuple, an object for a dataclass."""
    # An enum of no text type is written by its owner.
    assert json.loads(to_json((WHOLE.parts, WHOLE.pair, WHOLE.those))) == [
        FIELDS["parts"], FIELDS["pair"], FIELDS["those"],
    ]  # fmt: skip
    assert from_json(Whole, json.dumps(FIELDS).encode(), "whole") == WHOLE


def test_later_properties_are_skipped_and_optional_ones_may_be_missing() -> None:
    """All others have to be there."""
    fields = FIELDS | {"later": 1}
    del fields["part"]
    assert from_json(Whole, json.dumps(fields).encode(), "whole") == WHOLE
    for name in FIELDS.keys() - {"part"}:
        lacking = {key: each for key, each in FIELDS.items() if key != name}
        with pytest.raises(FieldError, match=f"{name}: expected .*, got None"):
            from_json(Whole, json.dumps(lacking).encode(), "whole")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"colour": "blue"}, r"colour: expected one of \['red'\], got 'blue'"),
        ({"colour": 1}, "colour: expected a text, got 1"),
        ({"parts": [{"low": 3, "high": 2}]}, "parts: 3 is above 2"),
        ({"parts": {}}, "parts: expected a list"),
        ({"part": []}, "part: expected an object"),
        ({"pair": [7]}, "pair: expected 2 items"),
        ({"pair": [2**63, {}]}, "offset: expected 0 to 9223372036854775807, got"),
        ({"pair": [7, {"topic": "t", "partition": 2**31}]}, "partition: expected 0 to"),
        ({"few": [2**64, 0]}, "few: expected 0 to 18446744073709551615"),
        ({"those": [True]}, "those: expected 0 to .*, got True"),
        ({"those": [-1]}, "those: expected 0 to .*, got -1"),
        ({"sizes": {"a": "x"}}, "sizes a: expected 0 to .*, got 'x'"),
        ({"sizes": []}, "sizes: expected an object"),
        ({"time_s": "1"}, "time_s: expected a number, got '1'"),
        ({"is_so": 1}, "is_so: expected true or false, got 1"),
        ({"small": 4}, "small: expected 1 to 3, got 4"),
        ({"small": 1.0}, "small: expected 1 to 3, got 1.0"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, object], text: str) -> None:
    """With what was expected and what is there."""
    with pytest.raises(FieldError, match=text):
        from_json(Whole, json.dumps(FIELDS | change).encode(), "whole")


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 100_000])
def test_what_is_no_json_is_refused(data: bytes) -> None:
    """Also what nests too deep."""
    with pytest.raises(FieldError, match="whole: expected JSON"):
        from_json(Whole, data, "whole")
