"""A get with a filter: the records that match, and the offset to go on at.

The bytes from the offset on are read in windows, verified and evaluated, one get after
another, in pieces of a turn of the loop (`PacedWork`). Bytes that are not in the page
cache are read by the reader threads. It ends when enough was looked at, the reply is
full, the log ends, or the bytes cannot be walked: by damage, or because a record is
larger than the get. At the offset of the get itself it is answered as without a filter
then, so that clients deal with that in one way. So is a get which is one too many.

At the log's end, where nothing matched, it waits for more if it may wait at all, but
not for long: the client is to learn how far it came.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from metaq.broker.handlers.get import GetAnswerer, count_get, handle_get
from metaq.broker.handlers.offset import late_failure
from metaq.broker.internal_logs import read_cached
from metaq.errors import (
    BadRequestError,
    ClosedError,
    CorruptRecordError,
    FilterError,
    StorageError,
    WireError,
)
from metaq.filter.language import ANY_FILTER, Filter, has_parser, parse_filter
from metaq.model import Offset, Position
from metaq.protocol.commands import Get
from metaq.protocol.encoding import encode_result, encode_value_line
from metaq.record.layout import HEADER, HEADER_BYTES
from metaq.record.runs import RUN_BYTES, RecordRun, encode_runs
from metaq.record.scan import Incomplete, scan_records
from metaq.storage.log_state import WaitHandle
from metaq.storage.partition_log import PartitionLog

SCAN_BYTES: Final = 1 << 20
"""A get looks at so much of the log; then it is answered with what it has."""
SCAN_STEPS: Final = 16
"""Steps that it may take for that, each at most a turn of the loop."""
WINDOW_BYTES: Final = 64 * 1024
"""Read and verified at once: half a millisecond."""
FILTERED_MAX: Final = 10_000
"""Gets with a filter that are not answered yet, but for those that wait as all do."""
_CLOCK_RECORDS: Final = 16
"""Records that are evaluated before the clock is looked at."""


def answer_get(
    command: Get, answerer: GetAnswerer, *, has_waited: bool = False
) -> None:
    """Answer a get, with or without a filter, or wait; see `handle_get`.

    Raises:
        WireError: no bytes, or the filter cannot be read; the text is the answer.
    """
    if command.where is None or not _begin(command, command.where, answerer):
        handle_get(command, answerer, has_waited=has_waited)


def _begin(command: Get, where: str, answerer: GetAnswerer) -> bool:
    """Return whether a filtered answer is begun."""
    context, topic, partition = answerer.context, command.topic, command.partition
    if not has_parser():
        # The loop does not wait for it: until then clients filter.
        if not context.filter_parser_asked:
            context.filter_parser_asked = True
            context.upkeep.submit(parse_filter, ANY_FILTER)
        context.counters.filter_plain += 1
        return False
    try:
        found = parse_filter(where)
    except FilterError as error:
        raise BadRequestError(str(error)) from error
    log = context.topics.find_log(topic, partition)
    if (
        log is None
        or context.topics.is_closed(topic, partition)
        or command.max_size <= 0
        or not log.log_start_offset <= command.offset < log.high_watermark
    ):
        return False
    is_free = context.filter_work.has_room and context.filtered_count < FILTERED_MAX
    if not is_free or context.load.has_many_replies:
        context.counters.filter_plain += 1
        return False
    context.filtered_count += 1
    answerer.hold(count=1, size_bytes=0)
    context.filter_work.add(_FilteredGet(command, found, log, answerer).go_on)
    return True


class _FilteredGet:
    """A get with a filter on its way to its answer. Owner: the loop's thread."""

    def __init__(
        self, command: Get, where: Filter, log: PartitionLog, answerer: GetAnswerer
    ) -> None:
        self._command = command
        self._where = where
        self._log = log
        self._answerer = answerer
        self._context = context = answerer.context
        self._loop = asyncio.get_running_loop()
        self._bytes_max = min(
            command.max_size, context.config.system.transfer_bytes_max
        )
        self._offset = Offset(command.offset)
        self._runs = list[tuple[Offset, list[bytes]]]()
        self._run_end = -1
        self._size = 0
        self._left_steps = SCAN_STEPS
        self._turn_end_s = 0.0
        hold_s = min(context.filter_hold_s, command.wait_ms / 1000)
        self._hold_until_s = self._loop.time() + hold_s
        self._held: WaitHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._steps = self._scan()

    def go_on(self) -> bool:
        """Take one step; return whether another one is to follow by itself."""
        self._left_steps -= 1
        self._turn_end_s = self._loop.time() + self._context.filter_work.turn_s
        try:
            return self._step()
        except MemoryError:
            self._context.filtered_count -= 1
            self._answerer.run_out()
        except Exception as error:  # noqa: BLE001  # logged and answered
            if not isinstance(error, WireError):
                error = late_failure(error, self._command, self._context)
            body = str(error).encode()
            self._answer(encode_result(error.status, body, self._command.opaque))
        return False

    def _step(self) -> bool:
        try:
            if self._left_steps:
                return next(self._steps)
        except (StopIteration, StorageError, ClosedError):
            pass  # as far as it came
        if self._offset > self._command.offset:
            self._answer_matches()
        else:
            self._context.counters.filter_plain += 1
            handle_get(replace(self._command, where=None), self._answerer)
            self._answer(b"")
        return False

    # -- the scan: each step yields whether another one is to follow by itself

    def _scan(self) -> Iterator[bool]:
        """Look at records until the get is to be answered; the offset says how far.

        Raises:
            StorageError: the bytes from here on cannot be had.
            ClosedError: the log is closed.
        """
        left_bytes, size = SCAN_BYTES, WINDOW_BYTES
        while left_bytes > 0:
            base = self._offset
            if base == self._log.high_watermark:
                if not self._hold():
                    return
                yield False
                continue
            data = read_cached(self._log, base, size)
            if data is None:
                if self._runs:
                    return  # nothing is held in memory while a disk works
                reading = self._begin_read(base, size)
                yield False
                if reading.cancelled():
                    return
                data = reading.result()
            left_bytes -= len(data)
            self._context.filter_work.spend(len(data))
            self._context.counters.filter_scanned_bytes += len(data)
            starts = list[Position]()
            found = scan_records(data, starts=starts)
            if starts:
                size = WINDOW_BYTES
                yield from self._evaluate(data, base, [*starts, found.position])
                if self._offset < base + found.position:
                    return
                if self._is_turn_over():
                    yield True
            elif (
                isinstance(found, Incomplete)
                and size < found.needed_bytes <= self._bytes_max
            ):
                size = found.needed_bytes
            else:
                return

    def _evaluate(
        self, data: bytes, base: Offset, bounds: Sequence[Position]
    ) -> Iterator[bool]:
        """Evaluate the records of a window; stop at the first that has to wait."""
        where, unpack = self._where, HEADER.unpack_from
        for count, index in enumerate(where.candidates(data, bounds)):
            start, stop = bounds[index : index + 2]
            self._offset = Offset(base + start)
            if not count % _CLOCK_RECORDS and self._is_turn_over():
                yield True
            flag = unpack(data, start)[3]
            try:
                is_match = where.matches_payload(data, start + HEADER_BYTES, stop, flag)
            except CorruptRecordError:
                return
            if is_match and not self._add(data[start:stop]):
                return
        self._offset = Offset(base + bounds[-1])

    def _is_turn_over(self) -> bool:
        return self._loop.time() >= self._turn_end_s

    def _add(self, record: bytes) -> bool:
        """Add the record at the offset to the reply; return whether it fits."""
        is_next = self._offset == self._run_end
        size = self._size + len(record) + RUN_BYTES * (not is_next)
        if size > self._bytes_max and (self._runs or len(record) > self._bytes_max):
            return False
        if not is_next:
            self._runs.append((self._offset, []))
        self._runs[-1][1].append(record)
        self._size, self._run_end = size, self._offset + len(record)
        return True

    def _begin_read(self, offset: Offset, size: int) -> "asyncio.Future[bytes]":
        """Have bytes read that are not in memory; the scan goes on with them."""
        part = self._log.read(offset, size)
        try:
            reading = self._loop.run_in_executor(part.reader, part.read)
        except RuntimeError as error:
            part.release()
            raise ClosedError(f"partition {self._log.log_id}: {error}") from error
        reading.add_done_callback(lambda _: part.release())
        reading.add_done_callback(lambda _: self._context.filter_work.add(self.go_on))
        return reading

    def _hold(self) -> bool:
        """Wait a short time for more; return whether there is a reason for that."""
        is_over = self._held is not None and self._held.offset == self._offset
        if self._runs or is_over or self._loop.time() >= self._hold_until_s:
            return False
        self._held = self._log.wait(self._offset, self._wake)
        self._timer = self._loop.call_at(self._hold_until_s, self._held.wake)
        return True

    def _wake(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._context.filter_work.add(self.go_on)

    # -- the answer

    def _answer_matches(self) -> None:
        count_get(self._context, self._command)
        self._context.counters.filtered += 1
        runs = encode_runs(
            RecordRun(offset, b"".join(pieces)) for offset, pieces in self._runs
        )
        opaque = self._command.opaque
        line = encode_value_line(len(runs), opaque, next_offset=self._offset)
        self._answer(line + runs)

    def _answer(self, reply: bytes) -> None:
        self._context.filtered_count -= 1
        self._answerer.answer(reply, count=1, size_bytes=0)
