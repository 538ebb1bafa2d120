"""`get`: the rows of the table in docs/metaq-1.4/broker.md 1.5, in its order.

What MetaQ calls the maximal offset is the high watermark here: no reader sees a byte
that a crash could take back (section 12, row 24). A get at the end of a log, or of a
log that no put has made yet, may wait for data (`wait=<ms>`); after the wait the same
rows are applied once more.
"""

from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from metaq.broker.acks import Answerer
from metaq.broker.context import BrokerContext
from metaq.broker.handlers.offset import knows_end
from metaq.broker.waiters import Waiter
from metaq.errors import (
    BadRequestError,
    ClosedError,
    CorruptRecordError,
    ForbiddenError,
    MovedError,
    NotFoundError,
    ServerError,
    StorageError,
    UnavailableError,
)
from metaq.model import MAX_OFFSET, Offset, SizeBytes
from metaq.net.file_range import Explain, FileRange
from metaq.protocol import texts
from metaq.protocol.commands import Check, Get, Status
from metaq.protocol.encoding import encode_result, encode_value_line
from metaq.storage.partition_log import PartitionLog
from metaq.storage.segment import DamagedSegmentError


class GetAnswerer(Answerer, Protocol):
    """Session interface used by get handlers."""

    def send_range(
        self, head: bytes, file: FileRange, *, explain: Explain, is_fresh: bool
    ) -> None:
        """Send a header and a range of a file."""

    def finish_wait(self, waiter: Waiter) -> None:
        """Answer a get whose wait is over."""

    def keep_waiter(self, waiter: Waiter) -> None:
        """Remember a waiter, to end it with the session."""


MEND_S: Final = 2.0
"""Longest wait for a damaged range to be mended."""


@dataclass(frozen=True, slots=True)
class _End:
    """There is no data at the offset yet."""

    log: PartitionLog | None
    """None if no put has created the log yet."""
    error: NotFoundError | UnavailableError
    """The answer without a wait."""
    wait_ms: int = 0
    """Wait at least so long."""


def handle_get(
    command: Get, answerer: GetAnswerer, *, has_waited: bool = False
) -> None:
    """Answer with bytes of the log, or wait for some unless the wait is over.

    Raises:
        WireError: there are no bytes; the text is the answer.
    """
    context = answerer.context
    found = _find(command, context)
    if isinstance(found, _End):
        if not has_waited and _wait(command, found, answerer):
            return
        is_miss = isinstance(found.error, NotFoundError)
        is_failure = found.log is not None
        count_get(context, command, is_miss=is_miss, is_failure=is_failure)
        raise found.error
    count_get(context, command)
    answerer.send_range(
        encode_value_line(found.size_bytes, command.opaque),
        found,
        explain=partial(_explain, command, context),
        is_fresh=has_waited,
    )


def _find(command: Get, context: BrokerContext) -> FileRange | _End:
    """Go through the rows; the numbers are those of the table.

    Raises:
        WireError: rows 1, 3, 4, 7, 8 and 9.
    """
    topics, topic, partition = context.topics, command.topic, command.partition
    if topics.is_closed(topic, partition):  # 1
        broker_id = context.config.system.broker_id
        count_get(context, command)
        raise ForbiddenError(texts.get_closed(broker_id, partition))
    log = topics.find_log(topic, partition)
    if log is None:  # 2
        return _End(None, NotFoundError(texts.no_such_log(topic, partition)))
    if command.max_size <= 0:  # 3
        count_get(context, command)
        raise BadRequestError(texts.invalid_max_size(command.max_size))
    offset, limit = Offset(command.offset), context.config.system.transfer_bytes_max
    try:
        if log.log_start_offset <= offset < log.high_watermark or any(
            each.covers(offset) for each in log.damage
        ):  # 5
            return log.read(offset, SizeBytes(min(command.max_size, limit)))
    except (StorageError, ClosedError) as error:  # 9
        if isinstance(error, CorruptRecordError) and log.is_mendable(offset):
            mends = UnavailableError(texts.being_mended(log.log_id, offset))
            return _End(log, mends, int(MEND_S * 1000))
        count_get(context, command, is_failure=True)
        if not log.is_settled:
            # Other replicas have these bytes, and one of them leads or soon will.
            raise UnavailableError(texts.not_settled(topic, partition)) from error
        raise ServerError(text_of(error, command, log, context)) from error
    return _outside(command, log, context)


def _outside(command: Get, log: PartitionLog, context: BrokerContext) -> _End:
    """Answer an offset that is not in the log.

    Raises:
        MovedError: rows 4 and 7.
        NotFoundError: row 8.
    """
    offset, start, end = command.offset, log.log_start_offset, log.high_watermark
    if offset < start:  # 4
        count_get(context, command, is_miss=True, is_failure=True, is_moved=True)
        raise MovedError(str(start))
    nothing = NotFoundError(texts.nothing_at(offset))
    if offset == end or (offset > end and not knows_end(context, log)):  # 6
        return _End(log, nothing)
    if offset == MAX_OFFSET or context.config.system.update_consumer_offsets:  # 7
        count_get(context, command, is_miss=True, is_failure=True, is_moved=True)
        raise MovedError(str(end))
    count_get(context, command, is_miss=True, is_failure=True)
    raise nothing  # 8


def _wait(command: Get, found: _End, answerer: GetAnswerer) -> bool:
    """Let a get wait, if it asks for that and may; return whether it waits."""
    context = answerer.context
    limits, waiters = context.config.limits, context.waiters
    wait_ms = max(found.wait_ms, min(command.wait_ms, limits.wait_ms_max))
    if wait_ms <= 0 or waiters.count >= limits.waiters_max:
        return False
    if found.log is None:
        offset = Offset(0)
        if not context.topics.may_appear(command.topic, command.partition):
            return False
    else:
        offset = Offset(command.offset)
    context.counters.wait_count += 1
    answerer.hold(count=1, size_bytes=0)
    waiter = Waiter(command, offset, answerer.finish_wait)
    answerer.keep_waiter(waiter)
    waiters.add(waiter, log=found.log, wait_ms=wait_ms)
    return True


def _explain(command: Get, context: BrokerContext, error: BaseException) -> bytes:
    """Return the answer to a counted get whose file cannot be read."""
    topic, partition = command.topic, command.partition
    counters, log = context.counters, context.topics.find_log(topic, partition)
    counters.get_failed += 1
    if log is not None and command.offset < log.log_start_offset:
        # Retention has removed the segment.
        counters.get_miss += 1
        counters.cmd_offset += 1
        start = str(log.log_start_offset).encode()
        return encode_result(Status.MOVED, start, command.opaque)
    text = text_of(error, command, log, context)
    if isinstance(error, DamagedSegmentError) and log is not None:
        log.on_damage(error.damage)
        if not error.damage.covers(Offset(command.offset)):
            # The bytes before the damage are there for the next get.
            detail = f"file ends within the range: file={error.damage.path}"
            text = texts.put_failed(context.address, topic, partition, detail)
        elif log.is_mendable(Offset(command.offset)):
            text = texts.being_mended(log.log_id, command.offset)
            return encode_result(Status.UNAVAILABLE, text.encode(), command.opaque)
    return encode_result(Status.SERVER_ERROR, text.encode(), command.opaque)


def text_of(
    error: BaseException,
    command: Get | Check,
    log: PartitionLog | None,
    context: BrokerContext,
) -> str:
    """Return the text of a 500; damage is included in machine-readable form."""
    is_known = isinstance(error, StorageError | ClosedError)
    detail = str(error) if is_known else "the disk cannot read it"
    text = texts.put_failed(context.address, command.topic, command.partition, detail)
    if isinstance(error, CorruptRecordError) and log is not None:
        offset, end = command.offset, log.high_watermark
        return texts.with_damage(text, error, offset=offset, end=end)
    return text


def count_get(
    context: BrokerContext,
    command: Get,
    *,
    is_miss: bool = False,
    is_failure: bool = False,
    is_moved: bool = False,
) -> None:
    """Count a get by its outcome (docs/metaq-1.4/broker.md 1.5, statistics)."""
    counters = context.counters
    counters.cmd_get += 1
    counters.get_miss += is_miss
    counters.get_failed += is_failure
    counters.cmd_offset += is_moved
    if context.topics.has_stat(command.topic):
        realtime = context.realtime
        realtime.record("get", command.topic)
        if is_miss:
            realtime.record("get_miss", command.topic)
        if is_moved:
            realtime.record("offset", command.topic)
