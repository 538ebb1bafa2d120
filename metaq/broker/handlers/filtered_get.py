"""A get with a filter: the records that match, and the offset to go on at.

The bytes from the offset on are read in windows, verified and evaluated, one get after
another, in pieces of a turn of the loop (`PacedWork`). Bytes that are not in the page
cache are read by the reader threads. It ends when enough was looked at, the reply is
full, the log ends, or the bytes cannot be walked: by damage, or because a record is
larger than the get. At the offset of the get itself the latter is the answer of a get
without a filter, so that clients deal with it in one way. So is that of a get which is
one too many.

At the log's end, where nothing matched, it waits for more if it may wait at all, but
not for long: the client is to learn how far it came.
"""

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from metaq.broker.handlers.get import GetAnswerer, count_get, handle_get, send_plain
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
from metaq.filter.language import Filter, parse_filter
from metaq.model import Offset, Position
from metaq.protocol.codec import encode_result, encode_value_line
from metaq.protocol.commands import Get
from metaq.record.layout import HEADER, HEADER_BYTES
from metaq.record.runs import RUN_BYTES, RecordRun, encode_runs
from metaq.record.scan import Incomplete, scan_records
from metaq.storage.log_state import WaitHandle
from metaq.storage.slices import Slice

SCAN_BYTES: Final = 1 << 20
"""A get looks at so much of the log; then it is answered with what it has."""
SCAN_TURNS: Final = 10
"""Turns that it may take for that."""
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
    if command.where is None:
        handle_get(command, answerer, has_waited=has_waited)
        return
    try:
        where = parse_filter(command.where)
    except FilterError as error:
        raise BadRequestError(str(error)) from error
    send = partial(_send_filtered, where)
    handle_get(command, answerer, has_waited=has_waited, send=send)


def _send_filtered(
    where: Filter, command: Get, part: Slice, answerer: GetAnswerer
) -> None:
    context = answerer.context
    is_free = context.filter_work.has_room and context.filtered_count < FILTERED_MAX
    if not is_free or context.load.has_many_replies:
        context.counters.filter_plain += 1
        send_plain(command, part, answerer)
        return
    part.release()
    answerer.hold(count=1, size_bytes=0)
    _FilteredGet(command, where, answerer).begin()


class _FilteredGet:
    """A get with a filter on its way to its answer. Owner: the loop's thread."""

    def __init__(self, command: Get, where: Filter, answerer: GetAnswerer) -> None:
        context = answerer.context
        log = context.topics.find_log(command.topic, command.partition)
        assert log is not None, "it has bytes"
        self._command = command
        self._where = where
        self._answerer = answerer
        self._context = context
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._bytes_max = min(
            command.max_size, context.config.system.transfer_bytes_max
        )
        self._offset = Offset(command.offset)
        self._runs = list[tuple[Offset, list[bytes]]]()
        self._run_end = -1
        self._size = 0
        self._left_bytes = SCAN_BYTES
        self._left_turns = SCAN_TURNS
        self._turn_end_s = 0.0
        hold_s = min(context.filter_hold_s, command.wait_ms / 1000)
        self._hold_until_s = self._loop.time() + hold_s
        self._held_at = -1
        self._waiting: WaitHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._steps = self._scan()

    def begin(self) -> None:
        """Scan: at once, or when those that came before have been scanned."""
        self._context.filtered_count += 1
        self._context.filter_work.add(self._go_on)

    def _go_on(self) -> bool:
        """Take one step; return whether another one is to follow by itself."""
        self._turn_end_s = self._loop.time() + self._context.filter_work.turn_s
        try:
            return self._step()
        except MemoryError:
            self._context.filtered_count -= 1
            self._answerer.run_out()
        except Exception as error:  # noqa: BLE001  # logged and answered
            failure = late_failure(error, self._command, self._context)
            body = str(failure).encode()
            self._answer(encode_result(failure.status, body, self._command.opaque))
        return False

    def _step(self) -> bool:
        try:
            return next(self._steps)
        except (StopIteration, StorageError, ClosedError):
            if self._offset == self._command.offset:
                self._answer_plainly()
            else:
                self._answer_matches()
            return False

    # -- the scan: each step yields whether another one is to follow by itself

    def _scan(self) -> Iterator[bool]:
        """Look at records until the get is to be answered.

        Raises:
            StorageError: the bytes from here on cannot be had.
            ClosedError: the log is closed.
        """
        size = WINDOW_BYTES
        while self._left_bytes > 0 and self._left_turns:
            base = self._offset
            if base == self._log.high_watermark:
                if self._is_due(base):
                    return
                self._hold()
                yield False
                continue
            data = read_cached(self._log, base, size)
            if data is None:
                reading = self._begin_read(base, size)
                yield False
                if reading.cancelled():
                    return
                data = reading.result()
            self._note_read(len(data))
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
                if not self._left_turns:
                    return
                yield True
            flag = unpack(data, start)[3]
            try:
                is_match = where.matches_payload(data, start + HEADER_BYTES, stop, flag)
            except CorruptRecordError:
                return
            if is_match and not self._add(data[start:stop]):
                return
        self._offset = Offset(base + bounds[-1])

    def _add(self, record: bytes) -> bool:
        """Add the record at the offset to the reply; return whether it fits."""
        offset, is_next = self._offset, self._offset == self._run_end
        size = self._size + len(record) + RUN_BYTES * (not is_next)
        if size > self._bytes_max and (self._runs or len(record) > self._bytes_max):
            return False
        if is_next:
            self._runs[-1][1].append(record)
        else:
            self._runs.append((offset, [record]))
        self._size, self._run_end = size, offset + len(record)
        return True

    def _is_turn_over(self) -> bool:
        is_over = self._loop.time() >= self._turn_end_s
        self._left_turns -= is_over
        return is_over

    def _note_read(self, size_bytes: int) -> None:
        self._left_bytes -= size_bytes
        self._context.filter_work.spend(size_bytes)
        self._context.counters.filter_scanned_bytes += size_bytes

    def _begin_read(self, offset: Offset, size: int) -> "asyncio.Future[bytes]":
        """Have bytes read that are not in memory; the scan goes on with them."""
        part = self._log.read(offset, size)
        try:
            reading = self._loop.run_in_executor(part.reader, part.read)
        except RuntimeError as error:
            part.release()
            raise ClosedError(f"partition {self._log.log_id}: {error}") from error

        def finish(_: object) -> None:
            part.release()
            self._context.filter_work.add(self._go_on)

        reading.add_done_callback(finish)
        return reading

    # -- the end

    def _is_due(self, offset: Offset) -> bool:
        """Return whether the get is to be answered at the log's end."""
        is_late = self._loop.time() >= self._hold_until_s
        return bool(self._runs) or is_late or self._held_at == offset

    def _hold(self) -> None:
        """Wait for more, a short time."""
        self._held_at = self._offset
        self._timer = self._loop.call_at(self._hold_until_s, self._end_hold)
        self._waiting = self._log.wait(self._offset, self._wake)

    def _end_hold(self) -> None:
        if self._waiting is not None:
            self._waiting.wake()

    def _wake(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._context.filter_work.add(self._go_on)

    def _answer_plainly(self) -> None:
        command, answerer, reply = self._command, self._answerer, b""
        self._context.counters.filter_plain += 1
        try:
            handle_get(command, answerer, has_waited=True, send=send_plain)
        except WireError as error:
            reply = encode_result(error.status, str(error).encode(), command.opaque)
        self._answer(reply)

    def _answer_matches(self) -> None:
        command = self._command
        count_get(self._context, command)
        self._context.counters.filtered += 1
        runs = encode_runs(
            RecordRun(offset, b"".join(pieces)) for offset, pieces in self._runs
        )
        head = encode_value_line(len(runs), command.opaque, next_offset=self._offset)
        self._answer(head + runs)

    def _answer(self, reply: bytes) -> None:
        self._context.filtered_count -= 1
        self._answerer.answer(reply, count=1, size_bytes=0)
