"""One queue at its broker: reads messages, stores state changes in `__queues`.

    topic's partition ── scan ──> state ── take ──> deliveries, their bytes
                                    │
                                    └── changes ──> `__queues` ──> answers

The state (`queues/state.py`) decides; this module does the I/O. Bytes in the page cache
are read on the loop, others by the reader threads of the data directory. A change takes
effect in memory at once. Its answer, and every later answer that depends on it, waits
until it is stored. Deliveries are numbered by *incarnation*: nothing is delivered
before the record of the incarnation is stored, so numbers are unique over restarts.
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
from metaq.queues.state import LeasedMessage, QueueState
from metaq.queues.state_log import (
    Change,
    Done,
    QueueName,
    StateKind,
    StateRecord,
    encode_state,
    snapshot_record,
)
from metaq.record.expiry import EXPIRY_MARK, expiry_of
from metaq.record.flags import HAS_PROPERTIES, decode_payload
from metaq.record.layout import HEADER, HEADER_BYTES
from metaq.record.runs import RecordRun
from metaq.storage.partition_log import PartitionLog

WINDOW_BYTES: Final = 256 * 1024
"""Maximum bytes that a scan reads at once; a larger message is read whole."""
WINDOW_BYTES_MIN: Final = 4 * 1024
LONG_WINDOW_BYTES: Final = 64 * 1024
"""Bytes read at once by a scan that may skip many messages (`_is_long`). Evaluating
them takes one or two turns of the loop."""
RECORD_BYTES: Final = 512
"""Estimated bytes of a record, to size the read for a number of messages."""
SNAPSHOT_CHANGES: Final = 8192
"""Number of changes after which a snapshot of the queue is written."""


def _unheard(_error: MetaqError | None) -> None:
    """Ignore an outcome."""


@dataclass(eq=False)
class ServedQueue:
    """One queue; delivers once `open` is stored. Owned by the service, on the loop."""

    name: QueueName
    log: PartitionLog
    """The partition of its messages."""
    state: QueueState
    _journal: InternalLogs
    _: KW_ONLY
    queue_id: int
    where: Filter | None
    on_failed: Callable[[MetaqError], None]
    """Called when a record could not be stored, before the callers that wait for it."""
    on_freed: Callable[[], None]
    """Called when a message has become available because its predecessor with the same
    key is done."""
    is_open: bool = False
    """Whether the record of its incarnation is stored."""
    is_reading: bool = False
    """Whether a read of its partition is in progress."""
    problem: str = ""
    """Error that stopped the last scan; "" if there was none."""
    retry_ms: int = 0
    """Monotonic time of the next scan after a problem, if others can be served."""
    lost_count: int = 0
    """Messages that retention removed before they were done."""
    lost_ms: int = 0
    """Monotonic time of the last loss of messages or of unscanned bytes; 0: none."""
    letters_open: int = 0
    """Dead letters that are not stored yet."""
    letters_tried: int = 0
    """Dead letters being stored now; the others of `letters_open` wait for a retry."""
    _window: tuple[Offset, bytes] | None = None
    _scale: int = 1
    """Factor of the bytes to read; doubled while a record is larger."""
    _asking: list[OnStored] = field(default_factory=list)
    """Callbacks of the next append."""
    _waiting: list[OnStored] = field(default_factory=list)
    """Callbacks of the last append."""
    _appends: int = 0
    _changes: int = 0

    def __str__(self) -> str:
        return f"queue group '{self.name.group}' of {self.log.log_id}"

    @property
    def is_busy(self) -> bool:
        """Whether it is being opened or read, and may have messages after that."""
        return not self.is_open or self.is_reading

    @property
    def has_something(self) -> bool:
        """Whether there may be messages to deliver, or a loss to record."""
        state, log = self.state, self.log
        return (
            state.ready_count > 0
            or state.scan_offset < log.high_watermark
            or state.floor < log.log_start_offset
        )

    # -- the state's log

    def open(self, on_open: OnStored) -> None:
        """Store the begin of this incarnation."""

        def stored(error: MetaqError | None) -> None:
            self.is_open = error is None
            on_open(error)

        self._append(self._record(StateKind.OPENED), stored)

    def store(self, on_stored: OnStored = _unheard) -> None:
        """Store all changes; call `on_stored` once they and all earlier ones are.

        They are appended in the next turn of the loop, together with later changes of
        this turn: settles of many workers that arrive together are one record.
        """
        self._asking.append(on_stored)
        if len(self._asking) == 1:
            asyncio.get_running_loop().call_soon(self.store_now)

    def store_now(self) -> None:
        """Append now the changes for which `store` was called."""
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
        """Fail the changes that are not appended yet: the state is read again."""
        asking, self._asking = self._asking, []
        for each in asking:
            each(error)

    def end(self) -> None:
        """Store the leases, if all are known, when the broker stops."""
        state = self.state
        if self.is_open and state.reclaim is None and not state.held_count:
            if leased := state.leased():
                self._append(self.encode(leased), _unheard)
            self._append(self.encode(()), _unheard)

    def note_done(self, done: Sequence[Done], on_stored: OnStored = _unheard) -> None:
        """Store that messages are done; the caller updates the state."""
        self._append(self.encode(done), on_stored)

    def encode(self, changes: Sequence[Change]) -> bytes:
        """Return the record of changes; the caller appends it next."""
        self._changes += len(changes)
        return self._record(StateKind.CHANGES, changes)

    def snapshot(self, now: Now, on_stored: OnStored) -> None:
        """Store the whole state, unless a dead letter is being stored.

        Its done record may be before the snapshot, which replaces it.
        """
        if not self.is_open or self.letters_tried:
            return
        self.store()
        self.store_now()
        self._changes = 0
        record = snapshot_record(self.queue_id, self.name, self.state.snapshot(now))
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
        """Whether there were SNAPSHOT_CHANGES since the last snapshot."""
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
        """Find messages until `count` can be delivered, or the log end is reached.

        Args:
            count: wanted number of messages.
            now: current times.
            through: scan at least through this offset.

        Returns:
            False: the bytes have to be read from the disk first, see `read_ahead`.

        Raises:
            StorageError: the partition is damaged at this offset, or the disk failed.
            ClosedError: the partition is closed.
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
                # The loop runs other work between two windows.
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
                # The window ends within its first record.
                self._scale, self._window = 2 * self._scale, None
        self.problem = ""
        return True

    def trim(self, now: Now) -> None:
        """Drop messages that retention has removed, and count the lost ones."""
        state, log_start = self.state, self.log.log_start_offset
        if log_start > state.floor:
            before = self.lost_count + state.lost_bytes
            self.lost_count += state.trim(log_start)
            if self.lost_count + state.lost_bytes > before:
                self.lost_ms = now.mono_ms

    async def read_ahead(self, count: int) -> None:
        """Read the bytes that `scan` needs from the disk; raises as `scan`."""
        offset = self.state.scan_offset
        part = self.log.read(offset, self._wanted_bytes(count))
        self._window = (offset, await part.run(part.read))

    def drop_window(self) -> None:
        """Drop the bytes that were read last."""
        self._window = None

    def _window_at(self, offset: Offset) -> bytes | None:
        """Return the bytes of the window from an offset on; None: it has none."""
        start, known = self._window or (offset, b"")
        return known[offset - start :] or None if offset >= start else None

    def _wanted_bytes(self, count: int) -> SizeBytes:
        wanted = max(WINDOW_BYTES_MIN, min(count * RECORD_BYTES, WINDOW_BYTES))
        if self._is_long:
            wanted = LONG_WINDOW_BYTES
        return SizeBytes(self._scale * wanted)

    @property
    def _is_long(self) -> bool:
        """Whether a scan may skip many messages for each one that is delivered."""
        return self.where is not None or self.state.reclaim is not None

    def _walk(
        self, base: Offset, data: bytes, count: int, through: Offset | None, now: Now
    ) -> None:
        """Add the whole records of a window to the state."""
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
            if (
                where is not None
                and not _is_wanted(where, data, position + HEADER_BYTES, end, flag)
                and not state.was_out(Offset(base + position))
            ):
                position, passed = end, passed + 1
                continue
            if passed:
                state.pass_over(Offset(base + position), passed)
                passed = 0
                if state.scan_offset > base + position:
                    position = state.scan_offset - base  # a done range follows
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

    def cached_runs(self, taken: Sequence[LeasedMessage]) -> list[RecordRun] | None:
        """Return the records of deliveries; None: not all of them are cached."""
        runs = list[RecordRun]()
        for start, end in _ranges(taken):
            data = self._bytes_at(start, end)
            if data is None:
                return None
            runs.append(RecordRun(start, data))
        return runs

    async def read_runs(self, taken: Sequence[LeasedMessage]) -> list[RecordRun]:
        """Return the records of deliveries, read from the disk; raises as `scan`."""
        return [
            RecordRun(start, await self.read(start, end))
            for start, end in _ranges(taken)
        ]

    async def read(self, start: Offset, end: Offset) -> bytes:
        """Return the bytes of a range of whole records."""
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
        return True  # the worker reports the damage, as without a filter


def _ranges(taken: Sequence[LeasedMessage]) -> list[tuple[Offset, Offset]]:
    """Return the ranges of deliveries, ascending; adjacent ones are joined."""
    ranges = list[tuple[Offset, Offset]]()
    for each in sorted(taken):
        start, end = each.offset, Offset(each.offset + each.size_bytes)
        if ranges and ranges[-1][1] == start:
            start, _ = ranges.pop()
        ranges.append((start, end))
    return ranges
