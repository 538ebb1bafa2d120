"""A batch checked and stamped at once."""

from collections.abc import Generator, Sequence
from itertools import pairwise
from typing import TypeVar

from metaq.model import MessageId
from metaq.record.batch import STEP_BYTES, BatchError, check_in_steps, stamp_in_steps
from metaq.record.layout import PAYLOAD_BYTES_MAX

T = TypeVar("T")


def check_and_stamp(
    buffer: bytearray,
    count: int,
    first_id: MessageId,
    *,
    payload_bytes_max: int = PAYLOAD_BYTES_MAX,
    cuts: Sequence[int] = (),
    step_bytes: int = STEP_BYTES,
) -> BatchError | None:
    """Write ids into records as an mput does, or return why they are refused.

    The records come in blocks that are cut at `cuts`, in ascending order.
    """
    blocks = [buffer[a:b] for a, b in pairwise((0, *cuts, len(buffer)))]
    steps = check_in_steps(
        blocks, count, payload_bytes_max=payload_bytes_max, step_bytes=step_bytes
    )
    found = run_to_end(steps)
    if isinstance(found, BatchError):
        return found
    for _step in stamp_in_steps(found, first_id):
        pass
    buffer[:] = b"".join(part.records for part in found)
    return None


def run_to_end(steps: Generator[None, None, T]) -> T:
    """Take all steps; return what they come to."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value
