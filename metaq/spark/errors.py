"""Errors of the Spark source and sink, beyond those of `metaq.errors`.

Spark shows the text written by its Python worker; `one_sentence` reduces that text to
the error's own sentence.
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
"""Prefix of environment variables that Spark sets only for its Python workers."""
_HIDDEN: Final = "SPARK_HIDE_TRACEBACK"
"""Environment variable that a worker reads when it writes its error."""

_log = logging.getLogger(__name__)


def one_sentence(call: Callable[P, T]) -> Callable[P, T]:
    """Make a method called by Spark report our errors without a traceback.

    The traceback is logged at DEBUG. A worker exits after an error, so no other
    traceback is hidden. Errors other than MetaqError are bugs, and keep theirs.
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
    """Root of the errors of the Spark source and sink."""


class OptionError(SparkError, ConfigError):
    """An option of a source or sink is unknown, out of range or contradicts another."""


class OffsetTextError(SparkError):
    """A text is not valid JSON of offsets or partitions; the message quotes it."""


class BackwardRangeError(SparkError):
    """A read would end before it starts; not treated as empty."""


class SchemaError(SparkError):
    """Rows to write lack a column, or have one of another type."""


class RowError(SparkError):
    """A row cannot be written: it has no topic, or an invalid partition."""


class DecisionError(SparkError):
    """The decision about a batch cannot be read, or is too large; see the message."""


class TakenOverError(SparkError):
    """Another driver writes the same query, so this one can no longer decide."""


class IncompleteError(SparkError):
    """Parts of a write may not have ended as decided."""


class NoTransactionsError(SparkError):
    """A broker lacks a capability that `delivery=exactly-once` needs."""


@dataclass(frozen=True, slots=True)
class LostRange:
    """Bytes of a partition that were to be read and are gone."""

    partition: TopicPartition
    start: Offset
    end: Offset | None
    """Offset after the lost bytes; None if the log end is unknown."""
    reason: str

    def __str__(self) -> str:
        if self.end is None:
            return f"{self.partition}: lost from {self.start} on: {self.reason}"
        size = f"{self.end - self.start} bytes"
        where = f"[{self.start}, {self.end})"
        return f"{self.partition}: lost {where}, {size}: {self.reason}"


class DataLossError(SparkError):
    """Bytes to be read are gone; the message names every lost range."""

    def __init__(self, lost: tuple[LostRange, ...]) -> None:
        ranges = "; ".join(map(str, lost))
        super().__init__(f"{ranges}. failOnDataLoss=false reads on without them")
        self.lost = lost


class BadRowError(SparkError):
    """A value does not have the requested format, and `badRows` is `fail`."""

    def __init__(self, partition: TopicPartition, offset: Offset, reason: str) -> None:
        super().__init__(
            f"{partition}: bad value at offset {offset}: {reason}. badRows=column keeps"
            " such values in a column of their own"
        )
        self.partition = partition
        self.offset = offset
        self.reason = reason


class DamagedRecordError(CorruptRecordError):
    """A record's bytes are corrupt; nothing after it was read."""

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
