"""The one policy for data that should be read and is gone.

Data are lost in three ways: retention moves the log start past a query's offset, a log
ends before its old end (it was created again, or a disk lost its tail), or a partition
no longer exists. Driver and tasks call the same function, `settle`, so that they never
disagree; nothing is ever left out without a `LostRange` that names it.
"""

from dataclasses import dataclass

from metaq.model import Offset, TopicPartition
from metaq.spark.errors import BackwardRangeError, DataLossError, LostRange
from metaq.spark.plan import LogSpan


@dataclass(frozen=True, slots=True)
class Settled:
    """Readable and lost parts of a wanted span."""

    span: LogSpan
    """Span to read: within the wanted span or empty, and within the log."""
    lost: tuple[LostRange, ...] = ()


def settle(
    partition: TopicPartition,
    wanted: LogSpan,
    log: LogSpan | None,
    *,
    fail_on_data_loss: bool,
) -> Settled:
    """Decide how to go on when a log may not hold the wanted span.

    Reading goes on at the end of a log that ends before the query's offset: messages
    put after the loss cannot be distinguished from those read before.

    `wanted` is empty where a query only has an offset; `log` is None where the
    partition is gone.

    Raises:
        DataLossError: something is lost and `fail_on_data_loss` is set.
        BackwardRangeError: `wanted` ends before it starts.
    """
    if wanted.start > wanted.end:
        raise BackwardRangeError(
            f"{partition}: cannot read from {wanted.start} to {wanted.end}"
        )
    if log is None:
        here = LogSpan(wanted.start, wanted.start)
        gone = LostRange(partition, wanted.start, None, "the partition is gone")
        settled = Settled(here, (gone,))
    else:
        settled = _fit(partition, wanted, log)
    if settled.lost and fail_on_data_loss:
        raise DataLossError(settled.lost)
    return settled


def _fit(partition: TopicPartition, wanted: LogSpan, log: LogSpan) -> Settled:
    lost: list[LostRange] = []

    def lose(start: Offset, end: Offset, reason: str) -> None:
        lost.append(LostRange(partition, start, end, reason))

    if wanted.start < log.start:
        # A query that only has an offset there has lost everything up to the log start.
        is_empty = wanted.start == wanted.end
        end = log.start if is_empty else min(wanted.end, log.start)
        lose(wanted.start, end, f"the log starts at {log.start}")
    if wanted.end > log.end:
        reason = f"the log ends at {log.end}"
        if wanted.start > log.end:
            reason += f", before the next byte to read, {wanted.start}"
        lose(log.end, wanted.end, reason)
    start = min(max(wanted.start, log.start), log.end)
    end = max(min(wanted.end, log.end), start)
    return Settled(LogSpan(start, end), tuple(lost))
