"""Points in time, as people write them."""

import datetime as dt

import pytest

from metaq.cli.options import parse_time
from metaq.cli.render import format_time
from metaq.model import Millis

NOON = 1_769_860_800_000  # 2026-01-31T12:00:00Z


@pytest.mark.parametrize(
    "text",
    [
        "1769860800",
        "1769860800.0",
        "1769860800000",
        "2026-01-31T12:00Z",
        "2026-01-31T12:00:00+00:00",
        "2026-01-31 13:00:00.000+01:00",
    ],
)
def test_the_same_moment_in_all_its_forms(text: str) -> None:
    """Seconds, milliseconds and ISO 8601 with a zone."""
    assert parse_time(text) == NOON


@pytest.mark.parametrize("text", ["2026-01-31T12:00", "2026-01-31 12:00"])
def test_without_a_zone_it_is_local_time(text: str) -> None:
    """The user's wall clock is meant."""
    local = dt.datetime(2026, 1, 31, 12, 0).astimezone()
    assert parse_time(text) == int(local.timestamp() * 1000)


def test_a_date_is_its_midnight() -> None:
    """A day begins at 00:00 local time."""
    assert parse_time("2026-01-31") == parse_time("2026-01-31T00:00")


@pytest.mark.parametrize(
    "text", ["", "yesterday", "-5", "12:00", "2026-13-01", "1" * 30, "٣"]
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    """The error shows what was written and what is expected."""
    with pytest.raises(ValueError, match="expected a time such as 2026"):
        parse_time(text)


def test_times_are_printed_in_utc_with_milliseconds() -> None:
    """An unknown time, or one that no calendar holds, prints as nothing."""
    assert format_time(Millis(NOON + 5)) == "2026-01-31T12:00:00.005Z"
    assert format_time(None) is None
    assert format_time(Millis(2**62)) is None
