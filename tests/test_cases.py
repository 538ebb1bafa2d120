"""A table of cases in one test: each is tried, and the one that fails is named."""

from pathlib import Path

import pytest

from tests.cases import for_each

SEEN: list[tuple[int, str]] = []


@for_each("number", [1, 2])
@for_each("letter, size", [("a", 1), ("bb", 2)])
def test_each_case_is_tried_with_the_fixtures_of_the_test(
    number: int, letter: str, size: int, tmp_path: Path
) -> None:
    """Tables may be crossed, as with `parametrize`."""
    assert tmp_path.is_dir()
    assert len(letter) == size
    SEEN.append((number, letter))
    assert (2, "bb") not in SEEN or len(SEEN) == 4


def test_the_case_that_fails_is_named() -> None:
    """Its values are a note of the error."""

    @for_each("number", range(3))
    def fails(number: int) -> None:
        assert number < 1

    with pytest.raises(AssertionError) as caught:
        fails()
    assert caught.value.__notes__ == ["case: {'number': 1}"]
