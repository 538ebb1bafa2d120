"""`metaq offsets`: its columns and its goals; `test_groups.py` has the rest."""

import datetime as dt

import click
import pytest

from metaq.cli.main import main
from metaq.cli.offsets import describe_offset, parse_goal
from metaq.model import Offset


@pytest.mark.parametrize(
    ("start", "end", "text"),
    [
        (0, 9, "ok"),
        (5, 5, "ok"),
        (7, 9, "2 bytes below the log start"),
        (0, 4, "1 bytes above the log end"),
        (0, 0, "5 bytes above the log end"),
        (None, None, "the broker has no log of it"),
    ],
)
def test_an_offset_outside_the_log_is_seen(
    start: int | None, end: int | None, text: str
) -> None:
    """Messages there are gone, or were never written."""
    assert describe_offset(5, start, end) == text


@pytest.mark.parametrize(
    ("text", "goal"),
    [
        ("earliest", "earliest"),
        ("latest", "latest"),
        ("4096", Offset(4096)),
        ("-10", Offset(-10)),
        ("2026-01-31T12:00:00Z", dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC)),
    ],
)
def test_goals_are_read(text: str, goal: object) -> None:
    """A number is an offset, a date a time."""
    assert parse_goal(text) == goal


@pytest.mark.parametrize("words", [["--to", "-10"], ["--to=-10"]])
def test_a_number_below_zero_is_no_option(words: list[str]) -> None:
    """In both spellings it is the value of --to."""
    offsets = main.commands["offsets"]
    assert isinstance(offsets, click.Group)
    reset = offsets.commands["reset"]
    context = reset.make_context("reset", ["billing", "orders", *words])
    assert context.params["goal"] == -10


@pytest.mark.parametrize("text", ["soon", "-0", "1.5e3", "", "2026-13-01"])
def test_a_goal_that_is_none_is_wrong_usage(text: str) -> None:
    """The error shows how to write one."""
    with pytest.raises(click.BadParameter, match="2026-01-31T12:00"):
        parse_goal(text)
