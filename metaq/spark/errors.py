"""Errors between Spark and the log, beyond `metaq.errors`.

Executors hand their errors to the driver in pickled form, so an error with fields of
its own says how it is built again. Spark shows the text that its Python worker writes;
`one_sentence` sees to it that this is our sentence alone.
"""

import logging
import os
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import wraps
from inspect import isgeneratorfunction
from typing import Any, Final, ParamSpec, TypeVar, cast

from metaq.errors import ConfigError, CorruptRecordError, MetaqError
from metaq.model import Offset, TopicPartition

P = ParamSpec("P")
T = TypeVar("T")

_WORKER: Final = "PYTHON_WORKER_FACTORY_"
"""Start of variables that Spark sets for its Python workers only."""
_HIDDEN: Final = "SPARK_HIDE_TRACEBACK"
"""Heeded by a worker when it writes its error."""

_log = logging.getLogger(__name__)


def one_sentence(call: Callable[P, T]) -> Callable[P, T]:
    """Let a method that Spark calls fail with the sentence of our error alone.

    Without it the sentence would follow the lines of a trace. A worker that has failed
    ends, so no other trace is hidden. The trace of ours goes to the log at
    DEBUG; an error that is not ours is a bug, and keeps it.
    """

    @wraps(call)
    def plain(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except MetaqError:
            _hide_trace()
            raise

    @wraps(call)
    def generator(*args: P.args, **kwargs: P.kwargs) -> Generator[Any, None, Any]:
        try:
            return (yield from cast("Generator[Any, None, Any]", call(*args, **kwargs)))
        except MetaqError:
            _hide_trace()
            raise

    if isgeneratorfunction(call):
        return cast("Callable[P, T]", generator)
    return plain


def _hide_trace() -> None:
    _log.debug("reported to Spark in one sentence", exc_info=True)
    if any(name.startswith(_WORKER) for name in os.environ):
        os.environ[_HIDDEN] = "1"


class SparkError(MetaqError):
    """Root of errors raised on the Spark side only."""


class OptionError(SparkError, ConfigError):
    """An option of a source or sink is unknown, out of range or contradicts another."""


class OffsetTextError(SparkError):
    """A text that should name offsets does not; the message quotes it."""


class BackwardRangeError(SparkError):
    """A read would end before it starts: never taken for an empty one."""


class SchemaError(SparkError):
    """Rows that are to be written lack a column, or have one of another type."""


class RowError(SparkError):
    """A row cannot be written: it names no topic, or a partition that is none."""


class DecisionError(SparkError):
    """The decision about a batch cannot be read, or is too large; see the message."""


class TakenOverError(SparkError):
    """Another driver writes the same query: this one can decide nothing any more."""


class IncompleteError(SparkError):
    """Not all of a write is known to be ended as was decided."""


class NoTransactionsError(SparkError):
    """A broker cannot do what `delivery=exactly-once` needs of it."""


@dataclass(frozen=True, slots=True)
class LostRange:
    """Bytes of a partition that should be read and cannot be read any more."""

    partition: TopicPartition
    start: Offset
    end: Offset | None
    """The first byte that is not lost; None where the log end is unknown."""
    reason: str

    def __str__(self) -> str:
        if self.end is None:
            return f"{self.partition}: lost from {self.start} on: {self.reason}"
        size = f"{self.end - self.start} bytes"
        where = f"[{self.start}, {self.end})"
        return f"{self.partition}: lost {where}, {size}: {self.reason}"


class DataLossError(SparkError):
    """Bytes that should be read are gone; the message names every lost range."""

    def __init__(self, lost: tuple[LostRange, ...]) -> None:
        ranges = "; ".join(map(str, lost))
        super().__init__(f"{ranges}. failOnDataLoss=false reads on without them")
        self.lost = lost


class BadRowError(SparkError):
    """A value is not of the asked format, and bad rows are to fail the query."""

    def __init__(self, partition: TopicPartition, offset: Offset, reason: str) -> None:
        super().__init__(
            f"{partition}: bad value at offset {offset}: {reason}. badRows=column keeps"
            " such values in a column of their own"
        )
        self.partition = partition
        self.offset = offset
        self.reason = reason


class DamagedRecordError(CorruptRecordError):
    """A record's bytes contradict themselves; nothing after it was read."""

    def __init__(
        self,
        partition: TopicPartition,
        offset: Offset,
        detail: str,
        next_good_offset: Offset | None,
    ) -> None:
        where = (
            "no good record was found after it"
            if next_good_offset is None
            else f"the next good record is at offset {next_good_offset}"
        )
        super().__init__(
            f"{partition}: damaged record at offset {offset}: {detail}; {where}",
            next_good_offset=next_good_offset,
        )
        self.partition: TopicPartition = partition
        self.offset: Offset = offset
        self.detail = detail
