"""Layouts of ordered producers: valid and invalid texts and lists."""

from collections.abc import Sequence

import pytest

from metaq.client.produce.ordered_producer import parse_layout
from metaq.errors import ConfigError


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ("0:2", ["0-0", "0-1"]),
        ("1:1;0:2", ["0-0", "0-1", "1-0"]),
        (";0:1; ;", ["0-0"]),
        (["1-0", "0-3"], ["0-3", "1-0"]),
    ],
)
def test_a_layout_is_text_or_a_list(
    layout: str | Sequence[str], names: list[str]
) -> None:
    found = parse_layout("test", layout)
    assert [p.name for p in found] == names


@pytest.mark.parametrize(
    "layout", ["", ";", "0", "0:", ":1", "a:1", "0:b", "0:0", "0:-1", "-1:1", "0:9999"]
)
def test_what_is_no_layout_is_refused(layout: str) -> None:
    with pytest.raises(ConfigError, match="layout of topic test"):
        parse_layout("test", layout)


@pytest.mark.parametrize("layout", [[], ["0:1"], ["0-"], ["x"]])
def test_a_list_of_something_else_is_refused(layout: list[str]) -> None:
    with pytest.raises(ConfigError, match="layout of topic test"):
        parse_layout("test", layout)
