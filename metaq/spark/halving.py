"""Bad values found by halving: one in a block makes Arrow refuse the whole block."""

from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.compute as pc


def read_by_halves(
    count: int,
    read: Callable[[int, int], pa.Array],
    on_bad: Callable[[int, pa.ArrowInvalid], None],
    kind: pa.DataType,
) -> Iterator[pa.Array]:
    """Yield what is read of a number of values, in order; bad ones are null.

    Args:
        count: number of values.
        read: reads the values [start, end); raises ArrowInvalid where one is bad.
        on_bad: is told the number of each bad value, and its fault.
        kind: type of what is read.

    Yields:
        Arrays of one or more elements; none for a count of 0.
    """
    # Halves wait on a list, in order, so that no depth of calls is a limit.
    waiting = [(0, count)] if count else []
    while waiting:
        start, end = waiting.pop()
        try:
            yield read(start, end)
        except pa.ArrowInvalid as error:
            if end - start > 1:
                middle = (start + end) // 2
                waiting += [(middle, end), (start, middle)]
                continue
            on_bad(start, error)
            yield pa.nulls(1, kind)


def require_finite(values: pa.Array, *, may_be_nan: bool) -> None:
    """Refuse infinity, which Arrow makes of numbers that a DOUBLE cannot hold.

    Args:
        values: of any type; structs and lists are looked into.
        may_be_nan: the format has NaN; JSON has not, and Arrow reads it there as well.

    Raises:
        ArrowInvalid: a number in them is infinite, or none.
    """
    kind = values.type
    if pa.types.is_struct(kind):
        for number in range(kind.num_fields):
            field = pc.struct_field(values, [number])
            require_finite(field, may_be_nan=may_be_nan)
    elif pa.types.is_list(kind):
        require_finite(values.flatten(), may_be_nan=may_be_nan)
    elif pa.types.is_floating(kind):
        if pc.any(pc.is_inf(values)).as_py():
            raise pa.ArrowInvalid("a number is too large")
        if not may_be_nan and pc.any(pc.is_nan(values)).as_py():
            raise pa.ArrowInvalid("NaN is no number of JSON")
