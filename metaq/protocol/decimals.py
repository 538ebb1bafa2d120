"""Numbers in decimal: read as Java reads them, and many of them written at once. Pure.

Reading. A number is an optional sign and decimal digits, of 32 or 64 bits: `+5`, `-0`
and leading zeros are numbers; an empty token, a lone sign, spaces, underscores,
hexadecimal and anything out of range are not. Java also takes the decimal digits of
other scripts; no client ever wrote one, and two spellings of one number would only
confuse readers of a capture, so only ASCII digits count here.

Writing. To write a long number in decimal costs as much as the rest of a reply. Of
numbers that are spaced evenly the last four digits come from a table:

    1700000000 4711     head  tail      the head is made once for all numbers that
    1700000000 4712     head  tail      share it, the tails are a slice of the table

Source: broker spec 1.2, rules 5 and 7.
"""

from functools import cache
from typing import Final, NamedTuple

from metaq.errors import RemoteProtocolError

I32_MIN: Final = -(2**31)
I32_MAX: Final = 2**31 - 1
I64_MIN: Final = -(2**63)
I64_MAX: Final = 2**63 - 1

# Numbers of so many plain digits are in range, and nearly every token is one.
_I32_PLAIN_MAX: Final = 9
_I64_PLAIN_MAX: Final = 18

DIGITS_MAX: Final = 4096
"""Longest number that is looked at: Python's own limit for int() lies just above, and a
longer one is either out of range or zeros only, which no client sends."""

_TAIL_COUNT: Final = 10_000


def parse_i32(token: bytes, what: str) -> int:
    """Return the signed 32-bit number in `token`; `what` names it in the error.

    Raises:
        RemoteProtocolError: not a number, or out of range.
    """
    if len(token) <= _I32_PLAIN_MAX and token.isdigit():
        return int(token)
    return _parse(token, what, I32_MIN, I32_MAX)


def parse_i64(token: bytes, what: str) -> int:
    """Return the signed 64-bit number in `token`; `what` names it in the error.

    Raises:
        RemoteProtocolError: not a number, or out of range.
    """
    if len(token) <= _I64_PLAIN_MAX and token.isdigit():
        return int(token)
    return _parse(token, what, I64_MIN, I64_MAX)


def _parse(token: bytes, what: str, low: int, high: int) -> int:
    digits = token[1:] if token[:1] in (b"-", b"+") else token
    # bytes.isdigit is ASCII only, and False for no bytes at all.
    if not digits.isdigit() or len(digits) > DIGITS_MAX:
        raise RemoteProtocolError(f"{what}: expected a number, got {token[:40]!r}")
    number = int(token)
    if not low <= number <= high:
        raise RemoteProtocolError(
            f"{what}: expected {low}..{high}, got {token[:40].decode()}"
        )
    return number


class Decimals(NamedTuple):
    """Numbers in decimal, each in two pieces: columns of one length."""

    heads: list[bytes]
    """Prefix and all digits but the last four, one per number."""
    tails: list[bytes]
    """Last four digits; all digits of a shorter number."""


def split_decimals(numbers: range, before: bytes) -> Decimals:
    """Return the decimal texts of numbers that grow evenly.

    Args:
        numbers: 0 or more each, growing, all of as many digits; at least one.
        before: prefix of each, in its head.
    """
    if numbers[-1] < _TAIL_COUNT:
        return Decimals([before] * len(numbers), [b"%d" % each for each in numbers])
    table, step, stop = _tails(), numbers.step, numbers[-1] + 1
    heads: list[bytes] = []
    tails: list[bytes] = []
    number = numbers.start
    while number < stop:
        head, tail = divmod(number, _TAIL_COUNT)
        some = table[tail : tail + stop - number : step]
        heads += [b"%b%d" % (before, head)] * len(some)
        tails += some
        number += len(some) * step
    return Decimals(heads, tails)


@cache
def _tails() -> list[bytes]:
    """Return all texts of four digits; half a megabyte, made when first needed."""
    return [b"%04d" % number for number in range(_TAIL_COUNT)]
