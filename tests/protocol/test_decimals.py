"""Numbers are read as Java reads them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.errors import RemoteProtocolError
from metaq.protocol.decimals import parse_i32, parse_i64

GOOD = [
    (b"0", 0), (b"-0", 0), (b"+0", 0), (b"+7", 7), (b"-7", -7), (b"007", 7),
    (b"2147483647", 2**31 - 1), (b"-2147483648", -(2**31)), (b"0" * 4000 + b"1", 1),
]  # fmt: skip
BAD = [
    b"", b"-", b"+", b"--1", b"+-1", b"1.0", b"1_000", b" 1", b"1 ", b"0x10", b"1e3",
    b"abc", b"1L", b"\xd9\xa3", b"\xff", b"1\n", b"0" * 5000,
]  # fmt: skip


@pytest.mark.parametrize(("token", "number"), GOOD)
def test_numbers_of_java_are_numbers(token: bytes, number: int) -> None:
    """An optional sign and decimal digits."""
    assert parse_i32(token, "field") == number
    assert parse_i64(token, "field") == number


@pytest.mark.parametrize("token", BAD)
def test_everything_else_is_a_breach_that_names_the_field(token: bytes) -> None:
    """No Python spelling of numbers slips through."""
    for parse in (parse_i32, parse_i64):
        with pytest.raises(RemoteProtocolError, match="field: expected a number"):
            parse(token, "field")


@pytest.mark.parametrize("number", [2**31, -(2**31) - 1, 2**63, -(2**63) - 1, 10**3000])
def test_ranges_are_those_of_the_type(number: int) -> None:
    """One past either end is refused, by i64 only past 64 bits."""
    token = b"%d" % number
    with pytest.raises(
        RemoteProtocolError, match=r"expected -2147483648\.\.2147483647"
    ):
        parse_i32(token, "field")
    if -(2**63) <= number < 2**63:
        assert parse_i64(token, "field") == number
    else:
        with pytest.raises(RemoteProtocolError, match="expected -9223372036854775808"):
            parse_i64(token, "field")


@given(st.integers(-(2**63), 2**63 - 1))
def test_every_number_reads_back(number: int) -> None:
    """Each number reads back as written."""
    assert parse_i64(b"%d" % number, "field") == number
