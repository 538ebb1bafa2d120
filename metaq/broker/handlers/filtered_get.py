"""A get with a filter: returns matching records and the next offset.

The bytes from the offset on are read in windows, verified and evaluated, one get after
another, in pieces of at most a turn of the loop (`PacedWork`). Bytes that are not in
the page cache are read by the reader threads. The scan ends when it has read its
maximum, the reply is full, the log ends, or the bytes cannot be walked because of
damage or a record larger than the get. If that is so at the offset of the get itself,
the get is answered as without a filter, so that clients handle these cases in one way.
A get above FILTERED_MAX is answered without a filter, too.

If the topic has a key index, and every match has an indexed field, candidates are
looked up there and other records are skipped unread (`metaq/storage/key_hits.py`). A
result of the index is valid for one segment object, below the high watermark: a cut
lowers the watermark first and then replaces these objects, so an index of other bytes
never makes the scan skip records. Known damage ends a get, as it ends a scan.

A get without a match at the log end may wait for more, but only for a short time,
because the client has to learn the next offset.
"""

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

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
from metaq.model import Offset, Position, SizeBytes
from metaq.protocol.commands import Get
from metaq.protocol.encoding import encode_refusal, encode_value_line
from metaq.record.layout import HEADER, HEADER_BYTES, Record
from metaq.record.runs import RUN_BYTES, RecordRun, encode_runs
from metaq.record.scan import Incomplete, read_record, scan_records
from metaq.storage.key_hits import KeyHits, find_hits
from metaq.storage.key_index import field_names
from metaq.storage.log_state import WaitHandle
from metaq.storage.partition_log import PartitionLog
from metaq.storage.segment import Segment

T = TypeVar("T")

SCAN_BYTES: Final = 1 << 20
"""Maximum bytes of the log that a get scans before it is answered."""
SCAN_STEPS: Final = 16
"""Maximum steps of a get, each at most a turn of the loop."""
WINDOW_BYTES: Final = 64 * 1024
"""Bytes read and verified at once; takes half a millisecond."""
FILTERED_MAX: Final = 10_000
"""Maximum gets with a filter in progress, without those that wait for data."""
_CLOCK_RECORDS: Final = 16
"""Records evaluated between two looks at the clock."""

HITS_MAX: Final = 4096
"""Maximum records looked up at once; about as many as a get's steps allow."""
_HIT_BYTES: Final = 4096
"""Bytes read first of a record that was looked up; most records are shorter."""
NEAR_BYTES: Final = 32 * 1024
"""Hits at most this far apart are read together, which is no slower."""
_HIT_EFFORT: Final = 1024
"""Overhead of one hit, in bytes of a scan that take as long."""


def answer_get(
    command: Get, answerer: GetAnswerer, *, has_waited: bool = False
) -> None:
    """Answer a get, with or without a filter, or wait; see `handle_get`.

    Raises:
        WireError: there are no bytes, or the filter is invalid; the text is the answer.
    """
    if command.where is None or not _begin(command, command.where, answerer):
        handle_get(command, answerer, has_waited=has_waited)


def _begin(command: Get, where: str, answerer: GetAnswerer) -> bool:
    """Start a filtered get; return False if it has to be answered without a filter."""
    context, topic, partition = answerer.context, command.topic, command.partition
    if not has_parser():
        # The loop does not wait until the parser is loaded; clients filter until then.
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
    """A get with a filter that is not answered yet. Used on the loop's thread."""

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
        names = field_names(context.config.topic(command.topic).index)
        self._names = names
        self._sets = [
            fields
            for fields in where.fields
            if names and all(field.startswith(names) for field in fields)
        ]
        """Sets of fields that are looked up; none where there is no use in it."""
        self._hits: KeyHits | None = None
        self._looked_in: Segment | None = None
        self._hit_size = _HIT_BYTES
        self._window_size = WINDOW_BYTES
        self._left_bytes = SCAN_BYTES
        self._left_steps = SCAN_STEPS
        self._turn_end_s = 0.0
        hold_s = min(context.filter_hold_s, command.wait_ms / 1000)
        self._hold_until_s = self._loop.time() + hold_s
        self._held: WaitHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._steps = self._scan()

    def go_on(self) -> bool:
        """Take one step; return whether to call this again without an event."""
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
            self._answer(encode_refusal(error, self._command.opaque))
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

    # -- the scan: each step yields the result of `go_on`

    def _scan(self) -> Iterator[bool]:
        """Scan until the get can be answered; advances the offset.

        Raises:
            StorageError: the bytes at the offset cannot be read.
            ClosedError: the log is closed.
        """
        goes_on = True
        while goes_on and self._left_bytes > 0:
            if self._offset == self._log.high_watermark:
                if not self._hold():
                    return
                yield False
                continue
            if self._wants_look():
                if self._runs:
                    return  # nothing is held in memory while a disk works
                yield from self._look()
            goes_on = yield from self._follow() if self._knows_hits() else self._walk()
            if goes_on and self._is_turn_over():
                yield True

    def _walk(self) -> Generator[bool, None, bool]:
        """Evaluate the records of a window; return whether more may follow."""
        base = self._offset
        data = yield from self._read(base, self._window_size)
        if data is None:
            return False
        self._left_bytes -= len(data)
        self._spend(len(data))
        starts = list[Position]()
        found = scan_records(data, starts=starts)
        if starts:
            self._window_size = WINDOW_BYTES
            return (yield from self._evaluate(data, base, [*starts, found.position]))
        if not isinstance(found, Incomplete):
            return False
        is_longer = self._window_size < found.needed_bytes <= self._bytes_max
        self._window_size = max(self._window_size, found.needed_bytes)
        return is_longer

    def _evaluate(
        self, data: bytes, base: Offset, bounds: Sequence[Position]
    ) -> Generator[bool, None, bool]:
        """Evaluate records; return False at the first that does not fit the reply."""
        for count, index in enumerate(self._where.candidates(data, bounds)):
            start, stop = bounds[index : index + 2]
            if not count % _CLOCK_RECORDS and self._is_turn_over():
                self._offset = Offset(base + start)
                yield True
            if not self._take(data, base, start, stop):
                return False
        self._offset = Offset(base + bounds[-1])
        return True

    def _take(self, data: bytes, base: Offset, start: int, stop: int) -> bool:
        """Add a record if it matches; return False, at it, if it does not fit."""
        self._offset = Offset(base + start)
        flag = HEADER.unpack_from(data, start)[3]
        try:
            is_match = self._where.matches_payload(
                data, start + HEADER_BYTES, stop, flag
            )
        except CorruptRecordError:
            return False
        if is_match and not self._add(data[start:stop]):
            return False
        self._offset = Offset(base + stop)
        return True

    def _spend(self, size: int, effort: int = 0) -> None:
        self._context.filter_work.spend(size + effort)
        self._context.counters.filter_scanned_bytes += size

    # -- with an index

    def _wants_look(self) -> bool:
        """Return whether to ask the index about the next records."""
        if not self._sets or self._knows_hits():
            return False
        wanted = self._context.filter_look_bytes
        return self._sound_bytes(wanted) == wanted

    def _sound_bytes(self, size_max: int) -> int:
        """Return the number of bytes before the next known damage."""
        part = self._log.read(self._offset, size_max)
        part.release()
        return part.size_bytes

    def _look(self) -> Iterator[bool]:
        """Ask the index; if it has no answer, do not ask again."""
        log, base, context = self._log, self._offset, self._context
        segment = log.segments.find(base)
        assert segment is not None, base
        end = log.high_watermark
        if segment is not log.segments.active:
            end = min(end, segment.end_offset)
        looking = self._begin(
            log.log_dir.reader,
            partial(
                find_hits,
                context.fs,
                replace(segment, size_bytes=SizeBytes(end - segment.base_offset)),
                self._names,
                self._sets,
                base,
                count_max=min(HITS_MAX, 1 + self._bytes_max // HEADER_BYTES),
                lists=context.key_lists,
            ),
        )
        yield False
        hits = KeyHits(base, base)
        if not looking.cancelled():
            with suppress(StorageError):  # then the log is read instead
                hits = looking.result()
        if hits.is_damaged:
            key = log.log_id, segment.base_offset, self._names
            context.key_builder.distrust(key)
        if hits.end == base:
            self._sets = []
        self._hits, self._looked_in = hits, segment

    def _knows_hits(self) -> bool:
        """Return whether there is a valid result of the index for this offset."""
        hits, log = self._hits, self._log
        return (
            hits is not None
            and hits.start <= self._offset < hits.end <= log.high_watermark
            and log.segments.find(self._offset) is self._looked_in
        )

    def _follow(self) -> Generator[bool, None, bool]:
        """Skip records up to some hits and evaluate those; return as `_walk`."""
        assert self._hits is not None
        offsets, base = self._hits.offsets, self._offset
        end = base + self._sound_bytes(self._hits.end - base)
        near = _near(offsets, bisect_left(offsets, base), end)
        if not near:
            self._offset = Offset(end)
            return True
        first = self._offset = Offset(near[0])
        last_end = max(first + self._hit_size, near[-1] + _HIT_BYTES)
        data = yield from self._read(first, min(last_end, end) - first)
        if data is None:
            return False
        for count, offset in enumerate(near):
            if not count % _CLOCK_RECORDS and self._is_turn_over():
                self._offset = Offset(offset)
                yield True
            found = read_record(data, Position(offset - first))
            if isinstance(found, Record):
                start, size = offset - first, found.size_bytes
                self._hit_size = _HIT_BYTES
                self._spend(size, _HIT_EFFORT)
                if not self._take(data, first, start, start + size):
                    return False
                continue
            self._offset = Offset(offset)
            if not isinstance(found, Incomplete):
                return False
            if offset > first:
                return True  # it is read by itself
            is_longer = self._hit_size < found.needed_bytes <= self._bytes_max
            self._hit_size = max(self._hit_size, found.needed_bytes)
            return is_longer
        return True

    # -- for both

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

    def _read(self, offset: Offset, size: int) -> Generator[bool, None, bytes | None]:
        """Return bytes, from memory or from the disk; None: the get has to end."""
        data = read_cached(self._log, offset, size)
        if data is None and not self._runs:  # none are held while a disk works
            part = self._log.read(offset, size)
            try:
                reading = self._begin(part.reader, part.read)
            except ClosedError:
                part.release()
                raise
            reading.add_done_callback(lambda _: part.release())
            yield False
            data = None if reading.cancelled() else reading.result()
        return data

    def _begin(self, executor: Executor, work: Callable[[], T]) -> "asyncio.Future[T]":
        """Run blocking work on a thread; the scan continues after it.

        Raises:
            ClosedError: the log is closed.
        """
        try:
            working = self._loop.run_in_executor(executor, work)
        except RuntimeError as error:
            raise ClosedError(f"partition {self._log.log_id}: {error}") from error
        working.add_done_callback(lambda _: self._context.filter_work.add(self.go_on))
        return working

    def _hold(self) -> bool:
        """Wait a short time for more records; return whether it waits."""
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


def _near(offsets: Sequence[int], index: int, end: int) -> Sequence[int]:
    """Return the hits from `index` on, below `end`, that are read together."""
    if index == len(offsets) or offsets[index] >= end:
        return ()
    last = min(end - 1, offsets[index] + WINDOW_BYTES - _HIT_BYTES)
    after = bisect_right(offsets, last, lo=index)
    stop = index + 1
    while stop < after and offsets[stop] - offsets[stop - 1] <= NEAR_BYTES:
        stop += 1
    return offsets[index:stop]
