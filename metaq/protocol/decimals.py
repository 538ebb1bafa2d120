"""Decimal texts of evenly spaced numbers, the last four digits by a table.

    1700000000 4711     head  tail      the head is made once for all numbers that
    1700000000 4712     head  tail      share it, the tails are a slice of the table

To write a long number in decimal costs as much as the rest of a reply. Pure.
"""

from functools import cache
from typing import Final, NamedTuple

_TAIL_COUNT: Final = 10_000


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
