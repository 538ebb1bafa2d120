"""`offset`: where reading can start, and questions about the log.

An `offset` may carry a question instead (docs/protocol.md, *Questions*). Its answer
needs the span indexes, and records if it splits a span, so upkeep threads compute it
and other commands may overtake it. They see the log as it was when the question
arrived: immutable segments and two offsets.

Source: docs/metaq-1.4/broker.md 1.6.
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import Final, assert_never

from metaq.broker.acks import Answerer
from metaq.broker.context import BrokerContext
from metaq.errors import (
    MissingFileError,
    NotFoundError,
    ServerError,
    StorageError,
    UnavailableError,
    WireError,
)
from metaq.model import Millis, Offset
from metaq.protocol import texts
from metaq.protocol.commands import (
    Check,
    CountQuestion,
    Find,
    Get,
    OffsetQuery,
    Question,
    SplitQuestion,
    Status,
    TimeQuestion,
)
from metaq.protocol.encoding import encode_refusal, encode_result
from metaq.storage.log_state import LogState
from metaq.storage.partition_log import PartitionLog
from metaq.storage.segment import DamagedSegmentError
from metaq.storage.span_queries import SpanQueries

BOUNDARIES_MAX: Final = 10_000

ANSWER_BYTES_MAX: Final = 256 << 10
"""Bytes counted as in flight for a question: more than its longest answer."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A question, with the log as it was when the question arrived."""

    name: str
    queries: SpanQueries
    start: Offset
    end: Offset
    question: Question


def handle_offset(command: OffsetQuery, answerer: Answerer) -> bytes | None:
    """Return the nearest offset: log start, start of a segment, or the end.

    Closed partitions answer too. None: it is a question, which is answered later.

    Raises:
        NotFoundError: no put has made this log.
        UnavailableError: this replica does not know the log end yet.
        ServerError: the log cannot answer the question now.
    """
    context = answerer.context
    context.counters.cmd_offset += 1
    if context.topics.has_stat(command.topic):
        context.realtime.record("offset", command.topic)
    log = settled_log(context, command.topic, command.partition)
    if command.question is not None:
        _begin_answer(command, command.question, log, answerer)
        return None
    return b"%d" % log.nearest_offset(Offset(command.offset))


def settled_log(context: BrokerContext, topic: str, partition: int) -> PartitionLog:
    """Return a log whose end is known.

    Raises:
        NotFoundError: no put has made it.
        UnavailableError: this replica does not know the end yet.
    """
    log = context.topics.find_log(topic, partition)
    if not knows_end(context, log):
        raise UnavailableError(texts.not_settled(topic, partition))
    if log is None:
        raise NotFoundError(texts.no_such_log(topic, partition))
    return log


def queries_of(context: BrokerContext, log: PartitionLog) -> SpanQueries:
    """Return the queries of a log as it is now; they may run on any thread.

    Raises:
        ServerError: it cannot be read.
    """
    if log.state in {LogState.OFFLINE, LogState.CLOSED}:
        raise ServerError(f"partition {log.log_id} is {log.state.value}")
    segments = (*log.segments.sealed, log.readable_active())
    return SpanQueries(context.fs, segments, context.made_indexes, log.damage)


def knows_end(context: BrokerContext, log: PartitionLog | None) -> bool:
    """Return whether this replica knows the end of a log; None: no put has made it."""
    replica = context.replica
    is_known = context.config.replication is None or (
        replica is not None and replica.knows_ends
    )
    return is_known and (log is None or log.is_settled)


def _begin_answer(
    command: OffsetQuery, question: Question, log: PartitionLog, answerer: Answerer
) -> None:
    """Answer a question on another thread; `answerer` sends the answer later.

    Raises:
        ServerError: the log cannot be read there; the text is the answer.
    """
    context = answerer.context
    asked = _ask(command, question, log, context)
    future = asyncio.get_running_loop().run_in_executor(context.upkeep, _answer, asked)
    answerer.hold(count=1, size_bytes=ANSWER_BYTES_MAX)

    def send(done: asyncio.Future[str]) -> None:
        error = done.exception()
        if error is None:
            reply = encode_result(Status.OK, done.result().encode(), command.opaque)
        else:
            failure = late_failure(error, command, context)
            reply = encode_refusal(failure, command.opaque)
        answerer.answer(reply, count=1, size_bytes=ANSWER_BYTES_MAX)

    future.add_done_callback(send)


def _ask(
    command: OffsetQuery, question: Question, log: PartitionLog, context: BrokerContext
) -> _Asked:
    """Return a question with the log as it is now and the range of the question."""
    queries = queries_of(context, log)
    log_start, high_watermark = log.log_start_offset, log.high_watermark
    start = Offset(max(log_start, min(command.offset, high_watermark)))
    end = high_watermark
    if not isinstance(question, TimeQuestion):
        end = Offset(max(start, min(question.end, high_watermark)))
    for damage in log.damage:
        if damage.overlaps(start, end):
            error = DamagedSegmentError(damage, log.log_id)
            text = texts.with_damage(
                str(error), error, offset=start, end=high_watermark
            )
            raise ServerError(text)
    return _Asked(str(log.log_id), queries, start, end, question)


def _answer(asked: _Asked) -> str:
    """Return the body of the answer; blocks.

    Raises:
        ServerError: an end of the range is not where a record starts.
        StorageError: the disk refused a read.
    """
    queries, start, end = asked.queries, asked.start, asked.end
    match asked.question:
        case TimeQuestion(time_ms):
            return str(queries.offset_for_time(Millis(time_ms), start=start))
        case CountQuestion():
            _require_boundaries(asked)
            return str(queries.count_records(start, end))
        case SplitQuestion(count_max=count_max):
            _require_boundaries(asked)
            count_max = max(2, min(count_max, BOUNDARIES_MAX))
            return " ".join(map(str, queries.split_range(start, end, count_max)))
        case _:  # pragma: no cover
            assert_never(asked.question)


def _require_boundaries(asked: _Asked) -> None:
    for offset in (asked.start, asked.end):
        if not asked.queries.is_boundary(offset):
            raise ServerError(texts.no_record_starts(asked.name, offset))


def late_failure(
    error: BaseException,
    command: OffsetQuery | Check | Get | Find,
    context: BrokerContext,
) -> WireError:
    """Return the refusal of a command that has failed on another thread."""
    match error:
        case MissingFileError():
            # Retention removed the segment; the next question finds the new log start.
            return UnavailableError(texts.LOG_START_MOVED)
        case WireError() | StorageError():
            return ServerError(str(error))
        case _:
            context.counters.error_count += 1
            name = type(command).__name__
            _log.error("command failed: command=%s", name, exc_info=error)
            return ServerError(texts.INTERNAL_ERROR)
