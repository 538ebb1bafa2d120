"""One tier of delayed messages: a partition of `__delays` and its index.

The tier follows its partition: readable records are added to the index in their order.
Records appended since the start are added from memory, without a read. Each sealed
segment has a `.due` file, written by a thread when it is sealed or when the file is
missing; delivery waits for these files only at a start.

Everything that waits for the disk happens between two batches, never while one is
being committed, so that index and progress always agree.
"""

import asyncio
import logging
import struct
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from metaq.broker.context import BrokerContext
from metaq.broker.internal_logs import read_range, read_records
from metaq.delay.due_index import (
    ENTRY,
    DueIndex,
    DueRun,
    decode_entries,
    discard_old,
    due_path,
    entry_of,
    make_run,
    open_run,
)
from metaq.delay.plan import NOTHING_DONE, DueEntry, Progress, Steps, is_done
from metaq.delay.records import TOPIC, DelayHead, decode_head
from metaq.errors import ClosedError, CorruptRecordError, StorageError
from metaq.model import LogId, Offset, Position, SizeBytes
from metaq.record.layout import HEADER, HEADER_BYTES, Record
from metaq.record.scan import read_record
from metaq.storage.append_request import AppendTicket
from metaq.storage.log_state import LogState
from metaq.storage.partition_log import PartitionLog
from metaq.storage.segment import Segment

_log = logging.getLogger(__name__)

WINDOW_BYTES: Final = 256 * 1024
"""Bytes read at once while following the partition."""
GAP_BYTES: Final = 16 * 1024
"""Records closer together than this are read by one call."""

STEP_RECORDS: Final = 2048
"""Records added to the index in one turn of the loop. That takes two milliseconds, in
which fewer records arrive."""
KEPT_S: Final = 600.0
"""Time to keep a segment after its last message was delivered: longer than a producer
resends an unanswered batch, which is recognized by its bytes."""
HEAD_BYTES: Final = SizeBytes(64 * 1024)
"""Upper bound of the head of a record, which has the topic's name."""

T = TypeVar("T")


def _in_log(each: DueEntry) -> tuple[int, bool]:
    """Return the sort key of `late`: a cancel record comes after its message."""
    return each.offset, each.messages < 0


class _Noted(NamedTuple):
    """Ticket of an append. If it fails, another append may get the same offset."""

    appended: dict[Offset, Sequence[DueEntry]]
    offset: Offset
    entries: Sequence[DueEntry]

    def on_stored(self) -> None:
        """Keep the entries."""

    def on_failed(self, _error: StorageError) -> None:
        if self.appended.get(self.offset) is self.entries:
            del self.appended[self.offset]


class DelayTier:
    """One tier. Owned by the service, on the loop."""

    def __init__(self, number: int, context: BrokerContext) -> None:
        self.log_id: Final = LogId(TOPIC, number)
        self.index = DueIndex()
        self.late: list[DueEntry] = []
        self.steps: Steps = (NOTHING_DONE,)
        self.reached: tuple[int, int] = NOTHING_DONE[:2]
        """Key of the last record taken, which may not be committed yet."""
        self.seen = 0
        self.is_loaded = False
        self.problem = ""
        """Error of the last `load` or `follow`; "" if it succeeded."""
        self.retry_s = 0.0
        """Monotonic time of the next `load` after an error."""
        self._context = context
        self._appended: dict[Offset, Sequence[DueEntry]] = {}
        """Entries of appends that are not in the index yet, by offset of the append;
        the offsets in the entries are relative to it."""
        self._files: dict[Offset, Path] = {}
        """Indexes of sealed segments, by base offset."""
        self._entries: dict[Offset, bytearray] = {}
        """Entries of unsealed segments that were followed from their base."""
        self._making: dict[Offset, Future[None]] = {}
        self._trimmed: deque[tuple[float, Offset]] = deque()
        """Times since which nothing below an offset is needed, oldest first."""
        self._segment = range(0)
        """Offsets of the segment at `seen`."""

    @property
    def log(self) -> PartitionLog | None:
        """Return the partition; None before its first record."""
        return self._context.topics.find_internal(self.log_id)

    @property
    def damage(self) -> str:
        """Return why waiting messages may be missing from the index; "" if none are."""
        log = self.log
        if not self.problem and log is not None and log.state is LogState.STOPPED:
            return str(log.damage[0])
        return self.problem

    @property
    def waiting_messages(self) -> int:
        """Return the number of waiting messages."""
        return self.index.messages + sum(each.totals[0] for each in self.late)

    @property
    def waiting_bytes(self) -> int:
        """Return the bytes of waiting records."""
        return self.index.size_bytes + sum(each.totals[1] for each in self.late)

    # -- of `take_batch`

    @property
    def progress(self) -> Progress:
        """Return the progress of delivery."""
        return self.steps[0]

    def peek(self) -> DueEntry | None:
        """Return the next record that is not late; None: there is none in memory."""
        if not self.is_loaded:
            return None
        while (head := self.index.peek()) is not None and (
            self.steps[1:] and is_done(self.steps, head.key)
        ):
            self.index.pop()
        return head

    def pop(self) -> DueEntry:
        """Remove and return the record of `peek`."""
        return self.index.pop()

    # -- what is in the partition

    def note(self, offset: Offset, entries: Sequence[DueEntry]) -> AppendTicket:
        """Remember the entries of an append; return the ticket that ends it."""
        self._appended[offset] = entries
        return _Noted(self._appended, offset, entries)

    def unload(self) -> None:
        """Drop the index; `load` reads it again."""
        self.index, self.late, self.is_loaded = DueIndex(), [], False

    async def load(self, steps: Steps) -> None:
        """Read the indexes of sealed segments, from the given progress on.

        Raises:
            StorageError: the partition is damaged, or the disk failed.
            ClosedError: the partition is closed.
        """
        self.unload()
        log = self.log
        makings = map(asyncio.wrap_future, self._making.values())
        made = await asyncio.gather(*makings, return_exceptions=True)
        for error in filter(None, made):
            _log.warning(
                "index of delayed messages is made again: partition=%s error=%s",
                self.log_id,
                error,
            )
        self._files, self.seen = {}, 0
        self._entries, self._making, self._segment = {}, {}, range(0)
        self.steps, self.reached = steps, steps[0][:2]
        if log is not None:
            self.seen = int(log.log_start_offset)
            # The log may be shorter than the progress: an operator accepted a loss.
            end = int(log.next_offset)
            self.steps = tuple(
                step._replace(seen=min(step.seen, end)) for step in steps
            )
            directory = log.segments.active.path.parent
            await self._in_thread(
                partial(discard_old, self._context.fs, directory, log.log_start_offset)
            )
            for segment in log.segments.sealed:
                if segment.end_offset > log.high_watermark:
                    break
                self.late += decode_entries(b"".join(await self._open(segment)))
                self.seen = int(segment.end_offset)
            self.late.sort(key=_in_log)
        self.is_loaded, self.problem = True, ""

    async def follow(self) -> None:
        """Add the new records of the partition to the index; raises as `load`.

        Later records are left to the next call, so that due messages do not wait.
        """
        log = self.log
        if log is None:
            return
        end = log.high_watermark
        while self.seen < end:
            base = Offset(self.seen)
            appended = self._appended.pop(base, ())
            for start in range(0, len(appended), STEP_RECORDS):
                some = appended[start : start + STEP_RECORDS]
                some = [each._replace(offset=base + each.offset) for each in some]
                self._add(log, some[-1].offset + some[-1].size_bytes, some)
                await asyncio.sleep(0)
            if appended:
                continue
            records = read_records(log, Offset(self.seen), window_bytes=WINDOW_BYTES)
            async for offset, record in records:
                entry = DueEntry._make(ENTRY.unpack(entry_of(offset, record)))
                self._add(log, offset + record.size_bytes, [entry])
                if self.seen in self._appended:
                    break
        for segment in log.segments.sealed:
            if segment.base_offset not in self._files and (
                segment.end_offset <= self.seen
            ):
                await self._open_when_made(segment)

    def _add(self, log: PartitionLog, end: int, records: Sequence[DueEntry]) -> None:
        """Add the records from `seen` to `end`, all of one segment, to the index."""
        offset, self.seen = self.seen, end
        if offset not in self._segment:
            found = log.segments.find(Offset(offset)) or log.segments.active
            is_active = found is log.segments.active
            # Not beyond the known end: the next record may be in the next segment.
            known_end = log.high_watermark if is_active else found.end_offset
            self._segment = range(found.base_offset, known_end)
            if offset == found.base_offset:
                self._entries[found.base_offset] = bytearray()
        base = Offset(self._segment.start)
        data = b"".join([ENTRY.pack(*each) for each in records])
        if (entries := self._entries.get(base)) is not None:
            entries += data
        if min(records).key > self.progress[:2]:
            self.index.add(data, base)
            return
        for each in records:
            if each.key > self.progress[:2]:
                self.index.add(ENTRY.pack(*each), base)
            elif not is_done(self.steps, each.key):
                insort(self.late, each, key=_in_log)

    async def _open_when_made(self, segment: Segment) -> None:
        """Start writing the index of a sealed segment; open it once it is written."""
        base, end = segment.base_offset, segment.end_offset
        if base not in self._making:
            entries = self._entries.pop(base, None)
            data = None if entries is None else bytes(entries)
            work = partial(make_run, self._context.fs, segment.path, base, end, data)
            self._making[base] = self._context.upkeep.submit(work)
        if self._making[base].done():
            self._making.pop(base).result()
            await self._open(segment)

    async def _open(self, segment: Segment) -> list[bytes]:
        """Open the index of a sealed segment; return its late entries."""
        base, end = segment.base_offset, segment.end_offset
        work = partial(
            open_run, self._context.fs, segment.path, base, end, self.progress
        )
        opened = await self._in_thread(work)
        self.index.add_run(opened.run)
        self._files[base] = due_path(segment.path, base)
        return opened.late

    async def load_due(self, now_ms: int) -> None:
        """Read the index blocks with due records; raises as `load`."""
        for run in self.index.wanted(now_ms):
            await self._read_by_reader(partial(run.load, self._context.fs))

    async def blocks_of(self, run: DueRun) -> list[bytes]:
        """Return the waiting entries of a run; raises as `load`."""
        blocks = run.unread_blocks(self._context.fs)
        return await self._read_by_reader(lambda: list(blocks))

    async def _read_by_reader(self, work: Callable[[], T]) -> T:
        log = self.log
        assert log is not None, "it has records"
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(log.log_dir.reader, work)
        except RuntimeError as error:
            raise ClosedError(f"partition {self.log_id}: {error}") from error

    async def _in_thread(self, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._context.upkeep, work)

    # -- records

    async def read(self, wanted: Iterable[DueEntry]) -> dict[int, Record]:
        """Return records by offset; raises as `load`."""
        log, found = self.log, dict[int, Record]()
        assert log is not None, "it has records"
        ordered = sorted(wanted, key=lambda each: each.offset)
        position = 0
        while position < len(ordered):
            first = ordered[position]
            end, start = first.offset + first.size_bytes, position
            while position < len(ordered) and (
                (each := ordered[position]) is first
                or (
                    each.offset - end < GAP_BYTES
                    and each.offset - first.offset < WINDOW_BYTES
                )
            ):
                end = each.offset + each.size_bytes
                position += 1
            data = await read_range(log, Offset(first.offset), Offset(end))
            for each in ordered[start:position]:
                record = read_record(data, Position(each.offset - first.offset))
                if not isinstance(record, Record):
                    raise CorruptRecordError(
                        f"partition {log.log_id}: no record at {each.offset}: {record}"
                    )
                found[each.offset] = record
        return found

    async def read_head(self, offset: Offset) -> tuple[DelayHead, int] | None:
        """Return head and size in bytes of a record; None: there is no record there.

        Raises:
            StorageError: the disk cannot be read.
            ClosedError: the partition is closed.
        """
        log = self.log
        if log is None or not log.log_start_offset <= offset < log.high_watermark:
            return None
        part = log.read(offset, HEAD_BYTES)
        data = await part.run(part.read)
        try:
            size = HEADER_BYTES + HEADER.unpack_from(data)[0]
            return decode_head(data[HEADER_BYTES:]), size
        except (CorruptRecordError, struct.error):
            return None

    def drop_files(self) -> None:
        """Delete the index files; they are written again."""
        for path in self._files.values():
            self._context.upkeep.submit(self._context.fs.discard, path)
        self._files = {}

    def trim(self) -> bool:
        """Trim segments without waiting messages; return whether any can be removed."""
        log = self.log
        if log is None or not self.is_loaded:
            return False
        needed = {log.segment_base(Offset(each.offset)) for each in self.late[:1]}
        following = log.segments.find(Offset(self.seen)) or log.segments.active
        needed |= self.index.segments | {following.base_offset}
        # A batch that is sent again is recognized as long as its bytes are kept.
        now_s, waiting = self._context.clock.monotonic_s(), self._trimmed
        if not waiting or waiting[-1][1] < min(needed):
            waiting.append((now_s, min(needed)))
        while len(waiting) > 1 and waiting[1][0] <= now_s - KEPT_S:
            waiting.popleft()
        if waiting[0][0] <= now_s - KEPT_S:
            log.trim_offset = waiting[0][1]
        if log.trim_offset is None:
            log.trim_offset = log.log_start_offset
        for base in [each for each in self._files if each < log.log_start_offset]:
            self._context.upkeep.submit(self._context.fs.discard, self._files.pop(base))
        return bool(
            log.segments.sealed and log.segments.first.end_offset <= log.trim_offset
        )
