"""Numbers in decimal, read as Java reads them. Pure.

A number is an optional sign and decimal digits, of 32 or 64 bits. `+5`, `-0` and
leading zeros are valid; an empty token, a sign alone, spaces, underscores, hexadecimal
digits and numbers out of range are not. Java also accepts the decimal digits of other
scripts, which no client has ever sent; this module accepts ASCII digits only.

Source: docs/metaq-1.4/broker.md 1.2, rules 5 and 7.
"""

from typing import Final

from metaq.errors import RemoteProtocolError

I32_MIN: Final = -(2**31)
I32_MAX: Final = 2**31 - 1
I64_MIN: Final = -(2**63)
I64_MAX: Final = 2**63 - 1

# A number with so few plain digits is always in range, and nearly every token is one.
_I32_PLAIN_MAX: Final = 9
_I64_PLAIN_MAX: Final = 18

DIGITS_MAX: Final = 4096
"""Longest number that is parsed, in digits. Python's own limit for int() is just above;
a longer number is either out of range or only zeros, which no client sends."""


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
    # bytes.isdigit accepts only ASCII, and returns False for b"".
    if not digits.isdigit() or len(digits) > DIGITS_MAX:
        raise RemoteProtocolError(f"{what}: expected a number, got {token[:40]!r}")
    number = int(token)
    if not low <= number <= high:
        raise RemoteProtocolError(
            f"{what}: expected {low}..{high}, got {token[:40].decode()}"
        )
    return number


def capped(digits: bytes) -> int:
    """Return the number, or the largest 64-bit number if it is larger."""
    # Nineteen digits are enough to reach the cap, and keep int() cheap.
    return I64_MAX if len(digits) > 19 else min(int(digits), I64_MAX)
