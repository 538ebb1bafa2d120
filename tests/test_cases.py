"""A table of cases in one test: each is tried, and those that fail are named."""

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
    assert (number, letter) not in SEEN
    SEEN.append((number, letter))


def test_all_cases_that_fail_are_named() -> None:
    """The values of each are a note of its error; the others are tried as well."""
    tried = []

    @for_each("number", range(4))
    def fails(number: int) -> None:
        tried.append(number)
        assert number % 2 == 0

    with pytest.raises(ExceptionGroup, match="2 of 4 cases failed") as caught:
        fails(seed=1)
    notes = sorted(error.__notes__[0] for error in caught.value.exceptions)
    assert notes == ["case: {'number': 1}", "case: {'number': 3}"]
    assert sorted(tried) == [0, 1, 2, 3]


def test_one_failure_is_raised_as_it_is() -> None:
    """A report shows it where it happened."""

    @for_each("number", range(3))
    def fails(number: int) -> None:
        assert number != 1

    with pytest.raises(AssertionError) as caught:
        fails(seed=1)
    assert caught.value.__notes__ == ["case: {'number': 1}"]


def test_the_order_of_cases_is_that_of_the_seed() -> None:
    """The same for one seed, another for others: no case may need the one before."""
    tried: list[int] = []

    @for_each("number", range(20))
    def note(number: int) -> None:
        tried.append(number)

    for seed in (1, 1, 2):
        note(seed=seed)
    first, again, other = tried[:20], tried[20:40], tried[40:]
    assert first == again != other
    assert sorted(other) == list(range(20)) != other
