"""Bad values found by halving: one in a block makes Arrow refuse the whole block."""

from collections.abc import Callable, Iterator

import pyarrow as pa


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
