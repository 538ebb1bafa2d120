"""A batch checked and stamped at once."""

from metaq.model import MessageId
from metaq.record.batch import BatchError, check_in_steps, stamp
from metaq.record.layout import PAYLOAD_BYTES_MAX


def check_and_stamp(
    buffer: bytearray,
    count: int,
    first_id: MessageId,
    *,
    payload_bytes_max: int = PAYLOAD_BYTES_MAX,
) -> BatchError | None:
    """Write ids into records as an mput does, or return why they are refused."""
    steps = check_in_steps(buffer, count, payload_bytes_max=payload_bytes_max)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            if isinstance(end.value, BatchError):
                return end.value
            stamp(buffer, end.value, first_id)
            return None
