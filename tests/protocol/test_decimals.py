"""Decimal texts by table are those that formatting gives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.protocol.decimals import split_decimals


def texts(numbers: range, before: bytes = b"") -> list[bytes]:
    heads, tails = split_decimals(numbers, before)
    return [head + tail for head, tail in zip(heads, tails, strict=True)]


@given(
    st.integers(0, 19), st.integers(0, 10**6), st.integers(1, 10**6), st.integers(1, 99)
)
def test_each_is_what_formatting_gives(
    digits: int, start: int, step: int, count: int
) -> None:
    """Whatever their size and distance, as long as all have as many digits."""
    numbers = range(10**digits + start, 10**digits + start + step * count, step)
    same = [each for each in numbers if len(str(each)) == len(str(numbers[0]))]
    numbers = range(same[0], same[-1] + 1, step)
    assert texts(numbers, b"<") == [b"<%d" % each for each in numbers]


@pytest.mark.parametrize(
    "numbers",
    [
        range(10),
        range(9_998, 10_000),
        range(10_000, 10_001),
        range(19_990, 20_020),
        range(10_000, 100_000, 9_999),
        range(10_000, 100_000, 10_000),
        range(10_000, 100_000, 10_001),
        range(7 * 10**18, 7 * 10**18 + 30_000),
    ],
)
def test_ends_of_the_table(numbers: range) -> None:
    """Zeros at the front of a tail stay, those of a short number are not made."""
    assert texts(numbers) == [b"%d" % each for each in numbers]
