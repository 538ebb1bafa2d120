"""Replay: from the bytes of the redo files to prepared and committed transactions.

Pure. A put begins or joins its transaction, a prepare marks it, a rollback drops it, a
commit moves it to the list of commits. A transaction that is open and not prepared at
the end was rolled back by the crash.

The checksums beside a file (`sums.py`) decide where its valid part ends:

* synced bytes are missing or do not match their checksum: damage; the journal is not
  used or changed;
* bytes that were written and not synced are incomplete: torn; the bytes before them
  count;
* no checksums, or bytes after the last span: records are read while they are
  well-formed, as in a Java broker. In our files a put must match its own checksum, and
  a commit must have the puts of its batches: one that does not was never synced.

A record may occur twice after an interrupted compaction (`opening.py`): a put is
identified by its message id, and a commit by those of its puts.

Whether a commit is in its partitions is found by reading them. The order is the reverse
of MetaQ's: the commit record is written before the batches, so that a crash between two
partitions leaves no half. The offset in an attachment is that of the batch. If the
batch is not there, a power cut has torn the offset, and the bound counts that the
record has beside it: the end of the readable log when the record was made, so each
batch is there or after it. No clock is used, because it may have been set back. The
batch is found (`locate`) by the id of its first record and its bytes. A batch that a
crash has cut is at the end of its log, and is completed there; until then the partition
hides it (`cut_appends`), and the other batches of the same append (`side_files.py`).

Source: docs/metaq-1.4/broker.md 5.7, 12 rows 3 and 5.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

from metaq.errors import StorageError
from metaq.model import LogId, MessageId, Offset
from metaq.record.checksum import checksum, crc32
from metaq.record.layout import HEADER, HEADER_BYTES, encode_record
from metaq.txn.ports import StoredBatches
from metaq.txn.records import (
    COMMITS,
    OFFSET,
    BatchLocation,
    OperationRecord,
    PutRecord,
    RecordError,
    RedoOperation,
    decode_put,
    decode_record,
)
from metaq.txn.sums import Sums, SumSpan

WINDOW_BYTES: Final = 1 << 20


class JournalDamagedError(StorageError):
    """A file is missing, or contradicts its checksums, in a way no crash explains."""


JournalledPut: TypeAlias = tuple[MessageId, bytes]
"""Id of a put, and the put as on the wire."""


@dataclass(slots=True)
class ReplayedTransaction:
    """Records of one transaction in the journal."""

    key: str
    puts: dict[JournalledPut, None] = field(default_factory=dict)
    """In the order of their arrival, each once, because an interrupted start may have
    copied some. A message of an exchange has one id in each of its topics."""
    is_prepared: bool = False
    locations: tuple[BatchLocation, ...] | None = None
    """For a commit: offsets of its batches, or bounds; None: there is no commit."""
    bounds: Mapping[LogId, Offset] = field(default_factory=dict)
    """For our own commit: the bound of each batch, which no power cut can tear."""
    deleted_topics: frozenset[str] = frozenset()
    """Topics that were deleted after its commit; its puts to them are dropped."""
    is_unverified: bool = False
    """Whether a partition could not be read, so that it must not be applied now."""
    applied_bytes: dict[LogId, int] = field(default_factory=dict)
    """Bytes of a cut batch that are already at the end of its log."""

    @property
    def first_id(self) -> MessageId:
        """Return the id of its first put; -1 if it has none."""
        return next((message_id for message_id, _ in self.puts), MessageId(-1))

    def is_named(self, group: Mapping[str, MessageId]) -> bool:
        """Return whether a group names this one, and no former one of its key."""
        return self.first_id <= group.get(self.key, MessageId(-1))


@dataclass(slots=True)
class Replay:
    """Content of a journal, read file by file."""

    open: dict[str, ReplayedTransaction] = field(default_factory=dict)
    """By key: transactions that have begun or are prepared, and have not ended."""
    commits: list[ReplayedTransaction] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Torn or ignored bytes, one sentence each."""
    last_id: MessageId = MessageId(-1)  # noqa: RUF009  # a NewType is its number
    record_count: int = 0

    def prepared(self) -> list[ReplayedTransaction]:
        """Return the prepared transactions, which survive, oldest first."""
        return [each for each in self.open.values() if each.is_prepared]

    def read(
        self,
        data: bytes,
        sums: Sums,
        name: str,
        *,
        deleted: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Read one redo file.

        Args:
            data: all of its bytes.
            sums: its checksums.
            name: name of the file, for texts.
            deleted: topic → end of the file when it was deleted.

        Raises:
            JournalDamagedError: see the module docstring.
        """
        end = whole_end(_as_first_written(data, sums), sums, name)
        position, checked_end = 0, sums.spans[-1].end if sums.spans else 0
        while position < end:
            try:
                record, after = decode_record(data, position, end)
                if position >= checked_end:
                    self._require_whole(record, sums)
            except RecordError as error:
                if position < sums.synced_end:
                    raise JournalDamagedError(f"{name}: {error}") from error
                self._note_torn(name, position, len(data))
                return
            self.record_count += 1
            self._take(record, after, deleted)
            position = after
        if end < len(data):
            self._note_torn(name, end, len(data))

    def _note_torn(self, name: str, position: int, size: int) -> None:
        self.notes.append(
            f"torn tail of the journal ignored: file={name} position={position}"
            f" bytes={size - position}"
        )

    def _require_whole(self, record: PutRecord | OperationRecord, sums: Sums) -> None:
        """Raise RecordError if a page of a record or of its puts was not written.

        Before a sync only some pages may be on disk. A Java broker accepts wrong
        checksums, so they are checked only in our files.
        """
        if isinstance(record, PutRecord):
            put = decode_put(record.command)
            is_checked = sums.has_file and put.checksum != -1
            if is_checked and checksum(put.payload) != put.checksum:
                raise RecordError(f"put {record.message_id} has another checksum")
        elif record.bounds and record.key in self.open:
            made = {
                (each.log_id, len(each.data), checksum(each.data))
                for each in make_batches(self.open[record.key])
            }
            named = {(each[0], *each[2:]) for each in record.locations}
            if made != named:
                raise RecordError(f"puts of {record.key} are not those of its commit")

    def _take(
        self,
        record: PutRecord | OperationRecord,
        end: int,
        deleted: Mapping[str, int],
    ) -> None:
        if isinstance(record, PutRecord):
            found = self.open.get(record.key)
            if found is None:
                found = self.open[record.key] = ReplayedTransaction(record.key)
            self.last_id = max(self.last_id, record.message_id)
            # A Java broker journals puts after the prepare, and drops them at a start.
            if not found.is_prepared:
                found.puts[record.message_id, record.command] = None
            return
        if record.operation is RedoOperation.XA_PREPARE:
            if record.key in self.open:
                self.open[record.key].is_prepared = True
            return
        ended = self.open.pop(record.key, None)
        if ended is None or record.operation not in COMMITS:
            return
        ended.locations, ended.bounds = record.locations, record.bounds
        if deleted:
            ended.deleted_topics = frozenset(
                topic for topic, until in deleted.items() if end <= until
            )
        self.commits.append(ended)


def _as_first_written(data: bytes, sums: Sums) -> bytes:
    """Return the bytes of a redo file with the offsets that its checksums cover."""
    if not sums.bounds:
        return data
    first = bytearray(data)
    for position, bound in sums.bounds.items():
        if position + OFFSET.size <= len(first):
            OFFSET.pack_into(first, position, bound)
    return bytes(first)


def whole_end(data: bytes, sums: Sums, name: str) -> int:
    """Return the end of the valid bytes of a redo file.

    Raises:
        JournalDamagedError: synced bytes are not valid.
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
    """Puts of one transaction to one partition, as records."""

    log_id: LogId
    data: bytes
    ids: tuple[MessageId, ...]
    puts: tuple[JournalledPut, ...]


def make_batches(transaction: ReplayedTransaction) -> list[CommittedBatch]:
    """Return the puts of a transaction, as one batch for each partition.

    Raises:
        JournalDamagedError: a put is malformed.
    """
    found: dict[LogId, tuple[list[bytes], list[JournalledPut]]] = {}
    for each in transaction.puts:
        message_id, command = each
        try:
            put = decode_put(command)
        except RecordError as error:
            text = f"journal damaged: transaction={transaction.key} {error}"
            raise JournalDamagedError(text) from error
        chunks, puts = found.setdefault(put.log_id, ([], []))
        chunks.append(encode_record(put.payload, id=message_id, flag=put.flag))
        puts.append(each)
    return [
        CommittedBatch(log_id, b"".join(chunks), tuple(i for i, _ in puts), tuple(puts))
        for log_id, (chunks, puts) in found.items()
    ]


def find_unapplied(
    commits: Sequence[ReplayedTransaction],
    reader: StoredBatches,
    together: Iterable[Mapping[str, MessageId]] = (),
) -> list[ReplayedTransaction]:
    """Return the commits with batches that are not in their partitions.

    Each has only the puts of its missing batches, and bounds as locations. Blocks, as
    it reads the partitions.

    Args:
        commits: the replayed commits.
        reader: the partitions.
        together: groups of commits that are one append to a partition
            (`side_files.py`).
    """
    windows = _Windows(reader)
    missing: dict[MessageId, ReplayedTransaction] = {}
    seen: set[MessageId] = set()
    for commit in commits:
        # A copy made by an interrupted start has only some of the puts.
        if not commit.puts or commit.first_id in seen:
            continue
        left = _left_of(commit, windows)
        if left is not None:
            seen.update(message_id for message_id, _ in left.puts)
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
    """Return the start of the last append of each partition, if a crash has cut it.

    Args:
        left: result of `find_unapplied`.
    """
    found: dict[LogId, Offset] = {}
    for each in left:
        for location in each.locations or ():
            if each.applied_bytes.get(location.log_id):
                first = found.get(location.log_id, location.offset)
                found[location.log_id] = min(first, location.offset)
    return found


def _find_waiting(
    group: Sequence[ReplayedTransaction],
    missing: Mapping[MessageId, ReplayedTransaction],
    windows: "_Windows",
) -> list[tuple[ReplayedTransaction, Mapping[LogId, Offset]]]:
    """Return commits with whole batches whose append lacks other batches, and where.

    The batches of a group are one append to a partition, in any order. The part that a
    crash has left is at the end of the log: whole batches back to back, then a cut one.
    """
    ends: dict[LogId, Offset] = {}
    for left in [missing[e.first_id] for e in group if e.first_id in missing]:
        if left.is_unverified:
            return []
        for location in left.locations or ():
            log_id, end = location.log_id, location.offset
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
    """Return the part of one commit that is not applied; None if all of it is.

    Batches at the offsets of `waiting` are stored, but count as not applied.
    """
    locations, gone = commit.locations or (), commit.deleted_topics
    placed_bytes = sum([location.size_bytes for location in locations])
    is_placed = not (gone or waiting) and placed_bytes == _record_bytes(commit)
    if is_placed and all(windows.has(location, commit) for location in locations):
        return None
    left = ReplayedTransaction(commit.key, is_prepared=commit.is_prepared)
    found_at = list[BatchLocation]()
    placed = {location.log_id: location.offset for location in locations}
    kept: set[JournalledPut] = set()
    for batch in make_batches(commit):
        if batch.log_id.topic in gone:
            continue
        size, offset = len(batch.data), placed.get(batch.log_id, Offset(-1))
        # Offsets of a Java broker are always right.
        bound = commit.bounds.get(batch.log_id, offset)
        try:
            found = locate(batch, bound, windows)
            if batch.log_id in waiting:
                found = Unapplied(waiting[batch.log_id], size)
        except StorageError:
            left.is_unverified = True
            found = Unapplied(bound, 0)
        if found is None:
            continue
        kept.update(batch.puts)
        left.applied_bytes[batch.log_id] = found.applied_bytes
        found_at.append(
            BatchLocation(batch.log_id, found.offset, size, checksum(batch.data))
        )
    if not kept:
        return None
    left.puts = dict.fromkeys(each for each in commit.puts if each in kept)
    left.locations, left.bounds = tuple(found_at), commit.bounds
    if not left.is_unverified:
        left.bounds = {location.log_id: location.offset for location in found_at}
    return left


def _record_bytes(commit: ReplayedTransaction) -> int:
    """Return the total size of its puts as records."""
    line_end = b"\r\n"
    return sum(
        [
            HEADER_BYTES + len(command) - command.find(line_end) - len(line_end)
            for _, command in commit.puts
        ]
    )


class Unapplied(NamedTuple):
    """A batch that is not complete in its partition."""

    offset: Offset
    """Offset where it must be, or a lower bound."""
    applied_bytes: int
    """Number of its bytes that are already there, at the end of the log."""


def locate(
    batch: CommittedBatch, bound: Offset, windows: "_Windows"
) -> Unapplied | None:
    """Find a batch from `bound` on, -1 is the end; None if it is stored or trimmed.

    Raises:
        StorageError: the partition cannot be read.
    """
    log_start, end = windows.range_of(batch.log_id)
    if 0 <= bound < log_start:
        return None
    position: int = bound if bound >= 0 else end
    while (
        len(head := windows.read(batch.log_id, Offset(position), HEADER_BYTES))
        == HEADER_BYTES
    ):
        length, _checksum, message_id, _flag = HEADER.unpack(head)
        if length < 0:
            break
        if message_id == batch.ids[0]:
            found = windows.read(batch.log_id, Offset(position), len(batch.data))
            if found == batch.data:
                return None
            if position + len(found) == end and batch.data.startswith(found):
                return Unapplied(Offset(position), len(found))
        position += HEADER_BYTES + length
    return Unapplied(end, 0)


class _Windows:
    """Reads partitions in large pieces, with a cache of one piece for each."""

    def __init__(self, reader: StoredBatches) -> None:
        self._reader = reader
        self._windows: dict[LogId, tuple[int, bytes]] = {}

    def range_of(self, log_id: LogId) -> tuple[Offset, Offset]:
        return self._reader.readable_range(log_id)

    def has(self, location: BatchLocation, commit: ReplayedTransaction) -> bool:
        """Return whether a batch is exactly at its location, or trimmed."""
        log_start, end = self.range_of(location.log_id)
        if 0 <= location.offset < log_start:
            # A torn offset may be below everything that was readable at the commit.
            return commit.bounds.get(location.log_id, location.offset) < log_start
        if location.offset < 0 or location.offset + location.size_bytes > end:
            return False
        try:
            data = self.read(location.log_id, location.offset, location.size_bytes)
        except StorageError:
            return False
        return checksum(data) == location.checksum

    def ends_with(self, batch: CommittedBatch, end: Offset) -> bool:
        """Return whether a batch ends at an offset."""
        offset, size = Offset(end - len(batch.data)), len(batch.data)
        if offset < self.range_of(batch.log_id)[0]:
            return False
        try:
            # Most other batches differ in the first record, without a large read.
            head = self._reader.read_back(batch.log_id, offset, HEADER_BYTES)
            is_here = head == batch.data[:HEADER_BYTES]
            return is_here and self.read(batch.log_id, offset, size) == batch.data
        except StorageError:
            return False

    def read(self, log_id: LogId, offset: Offset, size: int) -> bytes:
        """Return bytes of a log, across its segments; fewer at its end."""
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
