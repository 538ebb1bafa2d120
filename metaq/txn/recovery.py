"""Replay: from the bytes of the redo files to what is prepared, and what is committed.

Pure. A put opens its transaction or joins it, a prepare marks it, a rollback drops it,
a commit moves it to the list of commits. What is open and not prepared at the end was
rolled back by the crash.

How a file ends is judged by its side file (`sums.py`):

* bytes that were synced and do not have their checksum, or are not there: damage; the
  journal is not to be believed, and nothing is done with it;
* bytes that were written and not synced, and are not whole: torn; what is in front of
  them counts;
* no side file, or bytes behind its last span: records are read as long as they make
  sense, as a Java broker reads them.

A record may come twice, when compaction was interrupted (`opening.py`): a put is known
by its message id, and a commit by those of its puts.

Whether a commit is in its partitions is found by looking. The order is the reverse of
MetaQ's: the commit record comes first, and the batches behind it, so that a crash
between two partitions leaves no half. The offset in an attachment is the place of the
batch. Where it is not, a power cut has taken it, and the bound counts that was written
first: where the readable log ended when the record was made, so each batch lies there
or behind. Without a side file the time of the first put is a bound. The batch is found
(`locate`) by the id of its first record and its bytes. One that a crash has cut lies at
the end of its log, and is completed there; until then the partition shows nothing of it
(`cut_appends`), nor of what is one append with it (`side_files.py`). Source: broker
spec 5.7, 12 rows 3 and 5.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NamedTuple

from metaq.errors import StorageError
from metaq.model import LogId, MessageId, Millis, Offset, id_time
from metaq.record.checksum import checksum, crc32
from metaq.record.layout import HEADER, HEADER_BYTES, encode_record
from metaq.txn.ports import StoredBatches
from metaq.txn.records import (
    COMMITS,
    OFFSET,
    BatchPlace,
    LoggedPut,
    OperationRecord,
    PutRecord,
    RecordError,
    RedoOperation,
    decode_put,
    decode_record,
    offset_positions,
)
from metaq.txn.sums import Sums, SumSpan

WINDOW_BYTES: Final = 1 << 20
"""Read of a partition at a time."""

CLOCK_BACK_MS: Final = 60_000
"""Longest time that the clock may have been set back between a put and its commit."""


class JournalDamagedError(StorageError):
    """A file is missing, or contradicts its checksums, where no crash explains it."""


@dataclass(slots=True)
class ReplayedTransaction:
    """Records of one transaction in the journal."""

    key: str
    """Its key."""
    puts: dict[MessageId, bytes] = field(default_factory=dict)
    """Id → the put as on the wire, in the order in which they came."""
    is_prepared: bool = False
    """It survives, and obeys the later verdict."""
    places: tuple[BatchPlace, ...] | None = None
    """Of a commit: where its batches lie, or behind; None: there is none."""
    commit_end: int = 0
    """Behind the attachment with the places, in its redo file."""
    first_offsets: Mapping[int, Offset] = field(default_factory=dict)
    """Position in that file → what an offset was first, where that is known."""
    deleted_topics: frozenset[str] = frozenset()
    """Topics that were deleted behind its commit: what it put to them is over."""
    is_unverified: bool = False
    """Whether its batches are there could not be seen: not to be applied now."""
    applied_bytes: dict[LogId, int] = field(default_factory=dict)
    """Bytes of a batch that lie at the end of its log already."""

    @property
    def first_id(self) -> MessageId:
        """Return the id of its first put; -1 without any."""
        return next(iter(self.puts), MessageId(-1))

    def is_named(self, group: Mapping[str, MessageId]) -> bool:
        """Tell whether a group means this one, and no former one of its key."""
        return self.first_id <= group.get(self.key, MessageId(-1))

    def bounds(self) -> dict[LogId, Offset]:
        """Return from where on batches lie, whatever a power cut made of places."""
        places = self.places or ()
        positions = offset_positions(places, self.commit_end)
        return {
            place.log_id: self.first_offsets[position]
            for position, place in zip(positions, places, strict=True)
            if position in self.first_offsets
        }


@dataclass(slots=True)
class Replay:
    """Everything that a journal says; filled file by file."""

    open: dict[str, ReplayedTransaction] = field(default_factory=dict)
    """By key: begun or prepared, and not ended."""
    commits: list[ReplayedTransaction] = field(default_factory=list)
    """In the order of their records."""
    notes: list[str] = field(default_factory=list)
    """Bytes that were torn or ignored, one sentence each."""
    last_id: MessageId = MessageId(-1)  # noqa: RUF009  # a NewType is its number
    """The largest id of a put."""
    record_count: int = 0
    """Records that were read."""

    def prepared(self) -> list[ReplayedTransaction]:
        """Return what survives, oldest first."""
        return [each for each in self.open.values() if each.is_prepared]

    def read(
        self,
        data: bytes,
        sums: Sums,
        name: str,
        *,
        deleted: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Take in one redo file.

        Args:
            data: all of its bytes.
            sums: its side file.
            name: of the file, for texts.
            deleted: topic → end of the file when it was deleted.

        Raises:
            JournalDamagedError: see the head of this page.
        """
        end = whole_end(_as_first_written(data, sums), sums, name)
        position = 0
        while position < end:
            try:
                record, behind = decode_record(data, position, end)
            except RecordError as error:
                if position < sums.synced_end:
                    raise JournalDamagedError(f"{name}: {error}") from error
                self._note_torn(name, position, len(data))
                return
            self.record_count += 1
            self._take(record, behind, sums, deleted)
            position = behind
        if end < len(data):
            self._note_torn(name, end, len(data))

    def _note_torn(self, name: str, position: int, size: int) -> None:
        self.notes.append(
            f"torn tail of the journal ignored: file={name} position={position}"
            f" bytes={size - position}"
        )

    def _take(
        self,
        record: PutRecord | OperationRecord,
        end: int,
        sums: Sums,
        deleted: Mapping[str, int],
    ) -> None:
        if isinstance(record, PutRecord):
            found = self.open.get(record.key)
            if found is None:
                found = self.open[record.key] = ReplayedTransaction(record.key)
            self.last_id = max(self.last_id, record.message_id)
            # A Java broker journals puts behind the prepare, and drops them then.
            if not found.is_prepared:
                found.puts.setdefault(record.message_id, record.command)
            return
        if record.operation is RedoOperation.XA_PREPARE:
            if record.key in self.open:
                self.open[record.key].is_prepared = True
            return
        ended = self.open.pop(record.key, None)
        if ended is None or record.operation not in COMMITS:
            return
        ended.places, ended.commit_end = record.places, end
        ended.first_offsets = sums.bounds
        if deleted:
            ended.deleted_topics = frozenset(
                topic for topic, until in deleted.items() if end <= until
            )
        self.commits.append(ended)


def _as_first_written(data: bytes, sums: Sums) -> bytes:
    """Return the bytes of a redo file with the offsets that its checksums are of."""
    if not sums.bounds:
        return data
    first = bytearray(data)
    for position, bound in sums.bounds.items():
        if position + OFFSET.size <= len(first):
            OFFSET.pack_into(first, position, bound)
    return bytes(first)


def whole_end(data: bytes, sums: Sums, name: str) -> int:
    """Return up to where the bytes of a redo file may be believed.

    Raises:
        JournalDamagedError: they may not, and were synced.
    """
    for span in sums.spans:
        flaw = _flaw_of(data, span)
        if flaw:
            if span.position < sums.synced_end:
                raise JournalDamagedError(
                    f"journal damaged: file={name} position={span.position} {flaw}"
                )
            return min(span.position, len(data))
    if len(data) < sums.synced_end:
        raise JournalDamagedError(
            f"journal damaged: file={name} expected {sums.synced_end} bytes,"
            f" got {len(data)}"
        )
    return len(data)


def _flaw_of(data: bytes, span: SumSpan) -> str:
    if span.end > len(data):
        return f"expected {span.end} bytes, got {len(data)}"
    found = crc32(memoryview(data)[span.position : span.end])
    if found != span.checksum:
        return f"expected checksum {span.checksum}, got {found}"
    return ""


# -- batches --------------------------------------------------------------------------


class CommittedBatch(NamedTuple):
    """The puts of one transaction to one partition, as records."""

    log_id: LogId
    """The partition."""
    data: bytes
    """All records, in the order of the puts."""
    ids: tuple[MessageId, ...]
    """One for each."""

    @property
    def checksum(self) -> int:
        """Return the checksum over all bytes."""
        return checksum(self.data)


def make_batches(transaction: ReplayedTransaction) -> list[CommittedBatch]:
    """Return what a transaction puts, one batch for each partition.

    Raises:
        JournalDamagedError: a put makes no sense.
    """
    found: dict[LogId, tuple[list[bytes], list[MessageId]]] = {}
    for message_id, command in transaction.puts.items():
        put = _decode_put(transaction.key, command)
        chunks, ids = found.setdefault(put.log_id, ([], []))
        chunks.append(encode_record(put.payload, id=message_id, flag=put.flag))
        ids.append(message_id)
    return [
        CommittedBatch(log_id, b"".join(chunks), tuple(ids))
        for log_id, (chunks, ids) in found.items()
    ]


def _decode_put(key: str, command: bytes) -> LoggedPut:
    try:
        return decode_put(command)
    except RecordError as error:
        raise JournalDamagedError(
            f"journal damaged: transaction={key} {error}"
        ) from error


def find_unapplied(
    commits: Sequence[ReplayedTransaction],
    reader: StoredBatches,
    together: Iterable[Mapping[str, MessageId]] = (),
) -> list[ReplayedTransaction]:
    """Return what of the commits is not in its partitions.

    Each has the puts of the missing batches alone, and places that say from where on
    they will lie. Blocks: reads the partitions.

    Args:
        commits: as replayed.
        reader: the partitions.
        together: groups of them that are one append to a partition (`side_files.py`).
    """
    windows = _Windows(reader)
    missing: dict[MessageId, ReplayedTransaction] = {}
    seen: set[MessageId] = set()
    for commit in commits:
        # The copy of a start that was interrupted has no puts but those.
        if not commit.puts or commit.first_id in seen:
            continue
        left = _left_of(commit, windows)
        if left is not None:
            seen.update(left.puts)
            missing[commit.first_id] = left
    for names in together:
        if not any(each.is_named(names) for each in missing.values()):
            continue
        group = [each for each in commits if each.is_named(names)]
        for commit, waiting in _find_waiting(group, missing, windows):
            left = _left_of(commit, windows, waiting)
            if left is not None:
                missing[commit.first_id] = left
    return [*missing.values()]


def cut_appends(left: Iterable[ReplayedTransaction]) -> dict[LogId, Offset]:
    """Return where the last append of a partition begins, if it is not whole there.

    Args:
        left: what `find_unapplied` has found.
    """
    found: dict[LogId, Offset] = {}
    for each in left:
        for place in each.places or ():
            if each.applied_bytes.get(place.log_id):
                first = found.get(place.log_id, place.offset)
                found[place.log_id] = min(first, place.offset)
    return found


def _find_waiting(
    group: Sequence[ReplayedTransaction],
    missing: Mapping[MessageId, ReplayedTransaction],
    windows: "_Windows",
) -> list[tuple[ReplayedTransaction, Mapping[LogId, Offset]]]:
    """Return commits with whole batches of which others are missing, and where.

    Batches of a group are one append to a partition, in any order. What a crash has
    left of it is the end of the log: batches one behind the other, then a cut one.
    """
    ends: dict[LogId, Offset] = {}
    for left in [missing[e.first_id] for e in group if e.first_id in missing]:
        if left.is_unverified:
            return []
        for place in left.places or ():
            log_id, end = place.log_id, place.offset
            if not left.applied_bytes[log_id]:
                _log_start, end = windows.range_of(log_id)
            ends[log_id] = min(end, ends.get(log_id, end))
    others = [
        (commit.first_id, batch)
        for commit in group
        for batch in make_batches(commit)
        if batch.log_id in ends
    ]
    found: dict[MessageId, dict[LogId, Offset]] = {}

    def is_next(other: tuple[MessageId, CommittedBatch]) -> bool:
        return windows.ends_with(other[1], ends[other[1].log_id])

    while (other := next(filter(is_next, others), None)) is not None:
        others.remove(other)
        first_id, batch = other
        ends[batch.log_id] = Offset(ends[batch.log_id] - len(batch.data))
        found.setdefault(first_id, {})[batch.log_id] = ends[batch.log_id]
    return [
        (each, found.pop(each.first_id)) for each in group if each.first_id in found
    ]


def _left_of(
    commit: ReplayedTransaction,
    windows: "_Windows",
    waiting: Mapping[LogId, Offset] = MappingProxyType({}),
) -> ReplayedTransaction | None:
    """Return what of one commit is not applied; None: all of it is.

    Batches that lie at the offsets of `waiting` are there and count as not applied.
    """
    places, gone = commit.places or (), commit.deleted_topics
    placed_bytes = sum([place.size_bytes for place in places])
    is_placed = not (gone or waiting) and placed_bytes == _record_bytes(commit)
    if is_placed and all(windows.has(place, commit) for place in places):
        return None
    left = ReplayedTransaction(commit.key, is_prepared=commit.is_prepared)
    known, bounds = commit.bounds(), list[BatchPlace]()
    placed = {place.log_id: place.offset for place in places} | known
    kept: set[LogId] = set()
    for batch in make_batches(commit):
        if batch.log_id.topic in gone:
            continue
        size, bound = len(batch.data), placed.get(batch.log_id, Offset(-1))
        is_guess = batch.log_id not in known
        try:
            found = locate(batch, bound, windows)
            if batch.log_id in waiting:
                found = Location(waiting[batch.log_id], size)
            elif found is not None and not found.applied_bytes and is_guess:
                found = locate(batch, windows.first_since(batch, bound), windows)
        except StorageError:
            left.is_unverified = True
            found = Location(bound, 0)
        if found is None:
            continue
        kept.add(batch.log_id)
        left.applied_bytes[batch.log_id] = found.applied_bytes
        bounds.append(BatchPlace(batch.log_id, found.offset, size, batch.checksum))
    if not kept:
        return None
    for message_id, command in commit.puts.items():
        if _decode_put(commit.key, command).log_id in kept:
            left.puts[message_id] = command
    left.places = tuple(bounds)
    return left


def _record_bytes(commit: ReplayedTransaction) -> int:
    """Return the size of its puts as records."""
    line_end = b"\r\n"
    return sum(
        [
            HEADER_BYTES + len(command) - command.find(line_end) - len(line_end)
            for command in commit.puts.values()
        ]
    )


class Location(NamedTuple):
    """Place of a batch that is not whole."""

    offset: Offset
    """There or behind."""
    applied_bytes: int
    """Bytes of it that lie there already, at the end of the log."""


def locate(
    batch: CommittedBatch, bound: Offset, windows: "_Windows"
) -> Location | None:
    """Find a batch from `bound` on, -1 is the end; None: it is there, or trimmed.

    Raises:
        StorageError: the partition cannot be read.
    """
    log_start, end = windows.range_of(batch.log_id)
    if 0 <= bound < log_start:
        return None
    position: int = bound if bound >= 0 else end
    while position + HEADER_BYTES <= end:
        head = windows.read(batch.log_id, Offset(position), HEADER_BYTES)
        if len(head) < HEADER_BYTES:
            break
        length, _checksum, message_id, _flag = HEADER.unpack(head)
        if length < 0:
            break
        if message_id == batch.ids[0]:
            there = windows.read(batch.log_id, Offset(position), len(batch.data))
            if there == batch.data:
                return None
            if position + len(there) == end and batch.data.startswith(there):
                return Location(Offset(position), len(there))
        position += HEADER_BYTES + length
    return Location(end, 0)


class _Windows:
    """Reads partitions in large pieces; one piece of each is kept."""

    def __init__(self, reader: StoredBatches) -> None:
        self._reader = reader
        self._windows: dict[LogId, tuple[int, bytes]] = {}

    def range_of(self, log_id: LogId) -> tuple[Offset, Offset]:
        return self._reader.readable_range(log_id)

    def first_since(self, batch: CommittedBatch, bound: Offset) -> Offset:
        """Return another bound of a batch, by the time of its first put."""
        put_ms = id_time(batch.ids[0])
        if put_ms is None or bound < 0:
            # A Java broker's: its places are right. Or it is not to be looked for.
            return bound
        since_ms = Millis(put_ms - CLOCK_BACK_MS)
        return self._reader.offset_since(batch.log_id, since_ms)

    def has(self, place: BatchPlace, commit: ReplayedTransaction) -> bool:
        """Tell whether a batch lies exactly where it is said to, or is trimmed."""
        log_start, end = self.range_of(place.log_id)
        if 0 <= place.offset < log_start:
            # A place that is torn may lie in front of what was ever readable then.
            return commit.bounds().get(place.log_id, place.offset) < log_start
        if place.offset < 0 or place.offset + place.size_bytes > end:
            return False
        try:
            data = self.read(place.log_id, place.offset, place.size_bytes)
        except StorageError:
            return False
        return checksum(data) == place.checksum

    def ends_with(self, batch: CommittedBatch, end: Offset) -> bool:
        """Tell whether a batch lies in front of an offset."""
        offset, size = Offset(end - len(batch.data)), len(batch.data)
        if offset < self.range_of(batch.log_id)[0]:
            return False
        try:
            # Most of many are told apart by their first record, without a window.
            head = self._reader.read_back(batch.log_id, offset, HEADER_BYTES)
            is_here = head == batch.data[:HEADER_BYTES]
            return is_here and self.read(batch.log_id, offset, size) == batch.data
        except StorageError:
            return False

    def read(self, log_id: LogId, offset: Offset, size: int) -> bytes:
        """Return bytes of a log, over the borders of its segments; fewer at its end."""
        start, window = self._windows.get(log_id, (0, b""))
        at = offset - start
        if at >= 0 and at + size <= len(window):
            return window[at : at + size]
        _log_start, end = self.range_of(log_id)
        parts, position = [], int(offset)
        stop = min(end, offset + max(size, WINDOW_BYTES))
        while position < stop:
            data = self._reader.read_back(log_id, Offset(position), stop - position)
            if not data:
                break
            parts.append(data)
            position += len(data)
        window = b"".join(parts)
        self._windows[log_id] = (int(offset), window)
        return window[:size]
