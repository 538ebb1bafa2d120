"""Integer settings are expressions: `maxSegmentSize=1024*1024*1024`.

Numbers, `+ - * / %` and parentheses, as a Java broker computes them: division cuts
toward zero, the remainder has the sign of the dividend, results are signed 64-bit
numbers. Length, depth and size of everything are bounded, so a hostile file costs
nothing. A boolean is the literal `true` or `false`. Source: broker spec 4.1.
"""

import ast
import operator
import re
from collections.abc import Callable
from typing import Final

EXPRESSION_CHARS_MAX: Final = 100
"""Long enough for any product of units; bounds the depth of the parsed tree."""
INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1

_ALPHABET = re.compile(r"[0-9+\-*/%() \t]+")
_LEADING_ZEROS = re.compile(r"\b0+(?=[0-9])")


def _divide(left: int, right: int) -> int:
    if right == 0:
        raise ValueError("division by zero")
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


def _remainder(left: int, right: int) -> int:
    return left - right * _divide(left, right)


_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.Mod: _remainder,
}
_UNARY: dict[type[ast.unaryop], Callable[[int], int]] = {
    ast.USub: operator.neg,
}


def evaluate_integer(text: str) -> int:
    """Compute an integer expression.

    Args:
        text: the expression, at most `EXPRESSION_CHARS_MAX` characters.

    Returns:
        Its value, a signed 64-bit number.

    Raises:
        ValueError: it is no such expression, or a number in it leaves 64 bits.
    """
    if len(text) > EXPRESSION_CHARS_MAX:
        raise ValueError(
            f"expected at most {EXPRESSION_CHARS_MAX} characters, got {len(text)}"
        )
    if _ALPHABET.fullmatch(text) is None:
        raise ValueError("expected a whole number or an expression such as 1024*1024")
    try:
        tree = ast.parse(_LEADING_ZEROS.sub("", text.strip()), mode="eval")
    except SyntaxError as error:
        raise ValueError("the expression is not well formed") from error
    return _value(tree.body)


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)):
            result = number
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            result = _UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            result = _BINARY[type(op)](_value(left), _value(right))
        case _:
            raise ValueError("only + - * / % and parentheses are understood")
    if not INT64_MIN <= result <= INT64_MAX:
        raise ValueError(f"expected a signed 64-bit number, got {result}")
    return result


def evaluate_boolean(text: str) -> bool:
    """Read a boolean literal.

    Raises:
        ValueError: the text is neither `true` nor `false`.
    """
    if text not in {"true", "false"}:
        raise ValueError("expected true or false")
    return text == "true"
