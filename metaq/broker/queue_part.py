"""One queue as its broker serves it: its state, the bytes of its messages, its changes.

    topic's partition ── scan ──> state ── take ──> deliveries, their bytes
                                    │
                                    └── changes ──> `__queues` ──> answers

The state (`queues/state.py`) decides; here is the I/O. Bytes in the page cache are read
on the loop, others by the reader threads of the data directory. A change counts when it
is applied, and is answered when it is stored, as are answers that rely on an earlier
change. Deliveries are numbered by *incarnation*: nothing is given out before the record
of this one is stored, so no earlier life has used a number of this one.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Final

from metaq.broker.internal_logs import (
    InternalLogs,
    OnStored,
    read_cached,
    read_range,
)
from metaq.broker.queue_log import QUEUES
from metaq.errors import CorruptRecordError, MetaqError
from metaq.filter.language import Filter
from metaq.model import MessageId, Offset, SizeBytes
from metaq.queues.rules import Now
from metaq.queues.state import QueueState, Taken
from metaq.queues.state_log import (
    Change,
    Done,
    QueueName,
    StateKind,
    StateRecord,
    encode_state,
    snapshot_of,
)
from metaq.record.expiry import EXPIRY_MARK, expiry_of
from metaq.record.flags import HAS_PROPERTIES, decode_payload
from metaq.record.layout import HEADER, HEADER_BYTES
from metaq.record.runs import RecordRun
from metaq.storage.partition_log import PartitionLog

WINDOW_BYTES: Final = 256 * 1024
"""Most bytes that a scan reads at once, but for one larger message."""
WINDOW_BYTES_MIN: Final = 4 * 1024
LONG_WINDOW_BYTES: Final = 64 * 1024
"""The same of a scan that passes many: evaluated in a turn or two of the loop."""
RECORD_BYTES: Final = 512
"""Bytes that are read for each message that is wanted."""
SNAPSHOT_CHANGES: Final = 8192
"""Changes after which a queue is written as a whole."""


def _unheard(_error: MetaqError | None) -> None:
    """Hear of an outcome for which no one waits."""


@dataclass(eq=False)
class ServedQueue:
    """One queue, served once `open` is stored. Owner: the service; on the loop."""

    name: QueueName
    log: PartitionLog
    """Partition with its messages."""
    state: QueueState
    _journal: InternalLogs
    _: KW_ONLY
    queue_id: int
    where: Filter | None
    on_failed: Callable[[MetaqError], None]
    """Called when a record of it is not stored, before who waits."""
    on_freed: Callable[[], None]
    """Called when what waited for another one of its key can be given out."""
    is_open: bool = False
    """Whether its incarnation is stored."""
    is_reading: bool = False
    """A read is under way for it."""
    problem: str = ""
    """Why nothing more is found; "" when nothing is wrong."""
    retry_ms: int = 0
    """Monotonic: with a problem it is not looked at before, while others are."""
    lost_count: int = 0
    """Messages that retention took before they were done."""
    lost_ms: int = 0
    """When that, or bytes that were not looked at, was noted last; 0: never."""
    letters_open: int = 0
    """Dead letters on their way."""
    _window: tuple[Offset, bytes] | None = None
    _scale: int = 1
    """Factor of what is read: grows while a record is larger than that."""
    _asking: list[OnStored] = field(default_factory=list)
    """Those that hear of the outcome of the next append."""
    _waiting: list[OnStored] = field(default_factory=list)
    """Those that hear of the outcome of the last append."""
    _appends: int = 0
    _changes: int = 0

    def __str__(self) -> str:
        return f"queue group '{self.name.group}' of {self.log.log_id}"

    @property
    def is_busy(self) -> bool:
        """Whether it is being opened or read, and may have something then."""
        return not self.is_open or self.is_reading

    @property
    def has_something(self) -> bool:
        """Whether there may be something to give out, or something was lost."""
        state, log = self.state, self.log
        return (
            state.ready_count > 0
            or state.scan_offset < log.high_watermark
            or state.floor < log.log_start_offset
        )

    # -- the state's log

    def open(self, on_open: OnStored) -> None:
        """Write that this incarnation begins."""

        def stored(error: MetaqError | None) -> None:
            self.is_open = error is None
            on_open(error)

        self._append(self._record(StateKind.OPENED), stored)

    def store(self, on_stored: OnStored = _unheard) -> None:
        """Store what has changed; report it when that, and all before it, is stored.

        It is appended in the next turn of the loop, with what changes until then: the
        settles of many workers that came together are one record.
        """
        self._asking.append(on_stored)
        if len(self._asking) == 1:
            asyncio.get_running_loop().call_soon(self.store_now)

    def store_now(self) -> None:
        """Append what is to be stored, before anything else of the queue is."""
        asking, self._asking = self._asking, []
        if not asking:
            return
        changes, ended = self.state.drain_changes(), self.state.drain_ended()

        def stored(error: MetaqError | None) -> None:
            for each in asking:
                each(error)
            if error is None and ended:
                self.state.free_keys(ended)
                self.on_freed()

        if changes:
            self._append(self.encode(changes), stored)
        elif self._appends:
            self._waiting.append(stored)
        else:
            stored(None)

    def give_up(self, error: MetaqError) -> None:
        """Store nothing of what is not appended yet: its state is read again."""
        asking, self._asking = self._asking, []
        for each in asking:
            each(error)

    def end(self) -> None:
        """Write what workers have, where that is known: this life ends."""
        state = self.state
        if self.is_open and state.reclaim is None and not state.held_count:
            if leased := state.leased():
                self._append(self.encode(leased), _unheard)
            self._append(self.encode(()), _unheard)

    def note_done(self, done: Sequence[Done], on_stored: OnStored = _unheard) -> None:
        """Write that messages are done; their state hears of it by another way."""
        self._append(self.encode(done), on_stored)

    def encode(self, changes: Sequence[Change]) -> bytes:
        """Return the record of changes, which is appended next."""
        self._changes += len(changes)
        return self._record(StateKind.CHANGES, changes)

    def snapshot(self, now: Now, on_stored: OnStored) -> None:
        """Write the whole state, unless a dead letter is on its way."""
        if not self.is_open or self.letters_open:
            return
        self.store()
        self.store_now()
        self._changes = 0
        record = snapshot_of(self.queue_id, self.name, self.state.image(now))
        self._append(encode_state(record), on_stored)

    def _record(self, kind: StateKind, changes: Sequence[Change] = ()) -> bytes:
        floor = self.state.floor
        name = None if kind is StateKind.CHANGES else self.name
        return encode_state(
            StateRecord(
                kind, self.queue_id, self.state.incarnation, floor, changes, name
            )
        )

    @property
    def wants_snapshot(self) -> bool:
        """Whether it has changed often since the last one."""
        return self._changes >= SNAPSHOT_CHANGES

    def _append(self, payload: bytes, on_stored: OnStored) -> None:
        self.store_now()
        self._appends += 1
        waiting = self._waiting = [on_stored]

        def stored(error: MetaqError | None) -> None:
            self._appends -= 1
            if error is not None:
                self.on_failed(error)
            for each in waiting:
                each(error)

        self._journal.append(QUEUES, payload, stored, joins=True)

    # -- the topic's log

    def scan(self, count: int, now: Now, *, through: Offset | None = None) -> bool:
        """Find messages until `count` can be given out, or none is left.

        Args:
            count: wanted.
            now: when.
            through: find this one as well.

        Returns:
            False: the bytes have to be read from the disk first, see `read_ahead`.

        Raises:
            StorageError: the partition is damaged there, or its disk is away.
            ClosedError: it is closed.
        """
        state, log, is_later = self.state, self.log, False
        self.trim(now)
        while state.wants_scan(count) or (
            through is not None and state.scan_offset <= through and not state.is_full
        ):
            offset = state.scan_offset
            if offset >= log.high_watermark:
                break
            data = self._window_at(offset)
            if data is None:
                # Others have their turn between the windows.
                if not is_later:
                    data = read_cached(self.log, offset, self._wanted_bytes(count))
                if data is None:
                    return False
                self._window = (offset, data)
            self._walk(offset, data, count, through, now)
            is_later = self._is_long
            if state.scan_offset > offset:
                self._scale = 1
            else:
                # It is cut in its first record.
                self._scale, self._window = 2 * self._scale, None
        self.problem = ""
        return True

    def trim(self, now: Now) -> None:
        """Give up what retention took."""
        state, log_start = self.state, self.log.log_start_offset
        if log_start > state.floor:
            before = self.lost_count + state.lost_bytes
            self.lost_count += state.trim(log_start)
            if self.lost_count + state.lost_bytes > before:
                self.lost_ms = now.mono_ms

    async def read_ahead(self, count: int) -> None:
        """Read what `scan` needs; raises as `scan`."""
        offset = self.state.scan_offset
        part = self.log.read(offset, self._wanted_bytes(count))
        self._window = (offset, await part.run(part.read))

    def drop_window(self) -> None:
        """Forget the bytes that were read last."""
        self._window = None

    def _window_at(self, offset: Offset) -> bytes | None:
        """Return what is left of the window from an offset on."""
        start, known = self._window or (offset, b"")
        return known[offset - start :] or None if offset >= start else None

    def _wanted_bytes(self, count: int) -> SizeBytes:
        wanted = max(WINDOW_BYTES_MIN, min(count * RECORD_BYTES, WINDOW_BYTES))
        if self._is_long:
            wanted = LONG_WINDOW_BYTES
        return SizeBytes(self._scale * wanted)

    @property
    def _is_long(self) -> bool:
        """Whether a scan may pass many messages for the few that are given out."""
        return self.where is not None or self.state.reclaim is not None

    def _walk(
        self, base: Offset, data: bytes, count: int, through: Offset | None, now: Now
    ) -> None:
        """Find the whole records of a window."""
        state, position, size, passed = self.state, 0, len(data), 0
        limit = self.log.high_watermark - base
        unpack, is_ordered = HEADER.unpack_from, self.state.rules.is_ordered
        where = self.where
        while position + HEADER_BYTES <= size and (
            state.wants_scan(count)
            or (through is not None and base + position <= through)
        ):
            length, _checksum, message_id, flag = unpack(data, position)
            end = position + HEADER_BYTES + length
            if length < 0 or end > limit:
                raise CorruptRecordError(
                    f"partition {self.log.log_id}: length {length} of the record at"
                    f" offset {base + position}"
                )
            if end > size:
                break
            if where is not None and not _is_wanted(
                where, data, position + HEADER_BYTES, end, flag
            ):
                position, passed = end, passed + 1
                continue
            if passed:
                state.pass_over(Offset(base + position), passed)
                passed = 0
                if state.scan_offset > base + position:
                    position = state.scan_offset - base  # what follows is done
                    continue
            key = expiry_ms = None
            if flag & HAS_PROPERTIES and (
                is_ordered or data.find(EXPIRY_MARK, position, end) >= 0
            ):
                payload = data[position + HEADER_BYTES : end]
                decoded = decode_payload(payload, flag)
                key = decoded.key if is_ordered else None
                expiry_ms = expiry_of(MessageId(message_id), decoded.headers)
            state.found(
                Offset(base + position),
                SizeBytes(end - position),
                key,
                now,
                expiry_ms=expiry_ms,
            )
            position = state.scan_offset - base
        if passed:
            state.pass_over(Offset(base + position), passed)

    # -- bytes of deliveries

    def runs_now(self, taken: Sequence[Taken]) -> list[RecordRun] | None:
        """Return the records of deliveries; None: they are not all in memory."""
        runs = list[RecordRun]()
        for start, end in _ranges(taken):
            data = self._bytes_at(start, end)
            if data is None:
                return None
            runs.append(RecordRun(start, data))
        return runs

    async def read_runs(self, taken: Sequence[Taken]) -> list[RecordRun]:
        """Return the same, from the disk; raises as `scan`."""
        return [
            RecordRun(start, await self.read(start, end))
            for start, end in _ranges(taken)
        ]

    async def read(self, start: Offset, end: Offset) -> bytes:
        """Return the bytes of a range that holds whole records."""
        return await read_range(self.log, start, end)

    def _bytes_at(self, start: Offset, end: Offset) -> bytes | None:
        if self._window is not None:
            base, data = self._window
            if base <= start and end <= base + len(data):
                return data[start - base : end - base]
        found = read_cached(self.log, start, end - start)
        return found if found is not None and len(found) == end - start else None


def _is_wanted(where: Filter, data: bytes, start: int, end: int, flag: int) -> bool:
    try:
        return where.matches_payload(data, start, end, flag)
    except CorruptRecordError:
        return True  # the worker finds that, as without a filter


def _ranges(taken: Sequence[Taken]) -> list[tuple[Offset, Offset]]:
    """Return the ranges of deliveries in ascending order, neighbours as one."""
    ranges = list[tuple[Offset, Offset]]()
    for each in sorted(taken):
        start, end = each.offset, Offset(each.offset + each.size_bytes)
        if ranges and ranges[-1][1] == start:
            start, _ = ranges.pop()
        ranges.append((start, end))
    return ranges
