"""Plan of one query: segment files, cut on record boundaries, shared out among tasks.

A boundary is believed where the span index names it. Bytes without an index (a Java
broker wrote them, or they are archived) are walked from header to header, which reads
them once on the driver. That pays for a few files; where there are many, each of them
is one split, as is every file that is short enough. So is a zip: it can only be
unpacked from its start.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby, pairwise
from struct import Struct
from typing import Final

from metaq.client.names import name_few
from metaq.errors import CorruptRecordError, DiskError
from metaq.fs import FileSystem
from metaq.model import (
    BrokerId,
    LogId,
    MessageId,
    Millis,
    Offset,
    Position,
    SizeBytes,
    TopicPartition,
)
from metaq.record.ids import BROKER_ID_MAX, SEQUENCE_BITS
from metaq.record.layout import HEADER, HEADER_BYTES
from metaq.spark.errors import OptionError
from metaq.spark.record_bounds import Bounds, PushedFilters
from metaq.spark.segments.segment_files import FileKind, SegmentFile, find_segments
from metaq.spark.segments.segment_options import SegmentOptions
from metaq.storage.segment import Damage
from metaq.storage.segment_source import open_source
from metaq.storage.span_index import SpanIndex, read_index
from metaq.storage.walk import WINDOW_BYTES, RangeReader

NO_BROKER: Final = BrokerId(-1)
"""Broker of a file whose ids do not name it: a Java broker stamped them."""

WALK_BYTES_MAX: Final = SizeBytes(4 << 30)
"""Walked per query on the driver, some seconds' worth; files beyond stay whole."""

_LENGTH: Final = Struct(">i")


@dataclass(frozen=True, slots=True)
class Split:
    """A range of one segment file that one task reads; picklable."""

    file: SegmentFile
    broker_id: BrokerId
    """Broker that its records come from; -1: unknown."""
    bounds: Bounds
    """Which of its records are wanted."""
    start: Offset
    end: Offset
    """Offset after its last byte, a record boundary unless `may_be_torn`."""
    may_be_torn: bool = False
    """Nothing proves that its bytes were ever synced: a crash, or a broker at work,
    explains a flaw at its end."""

    @property
    def size_bytes(self) -> SizeBytes:
        """Return how many bytes of records it spans."""
        return SizeBytes(self.end - self.start)


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """Plan of a query."""

    tasks: tuple[tuple[Split, ...], ...]
    """Splits by task; every wanted record is in exactly one."""
    unreadable: tuple[Damage, ...]
    """Wanted files that cannot be read at all."""


def plan_query(
    fs: FileSystem,
    options: SegmentOptions,
    pushed: PushedFilters,
    walk_bytes_max: int = WALK_BYTES_MAX,
) -> SegmentPlan:
    """Look at the files, and give each task about as many bytes as the options say.

    Raises:
        OptionError: A path does not exist, or names no partition; or no file is of a
            topic or partition that the options name.
        StorageError: The disk refused.
    """
    found = find_segments(fs, options.paths)
    _require_topics(options, {file.log_id.topic for file in found})
    files = [file for file in found if options.wants(file.log_id)]
    placed = list(place_files(fs, files, options.broker_id))
    _require_partitions(options, files, placed)
    splits: list[Split] = []
    splitter = _Splitter(fs, options.bytes_per_partition, walk_bytes_max)
    for file, broker_id in placed:
        bounds = _bounds_of(file, broker_id, options, pushed)
        if bounds is not None:
            splits += splitter.split(file, broker_id, bounds)
    tasks = _pack(splits, options.bytes_per_partition)
    unreadable = (Damage(f.path, f.base_offset, None, f.flaw) for f in files if f.flaw)
    return SegmentPlan(tasks, tuple(unreadable))


def _require_topics(options: SegmentOptions, there: Collection[str]) -> None:
    """Refuse a topic of `subscribe` of which there is no file."""
    for topic in sorted((options.topics or frozenset()).difference(there)):
        raise OptionError(
            f"subscribe: no file is of topic {topic!r}; topics of the files are:"
            f" {name_few(sorted(there)) or 'none'}"
        )


def _require_partitions(
    options: SegmentOptions,
    files: Iterable[SegmentFile],
    placed: Iterable[tuple[SegmentFile, BrokerId]],
) -> None:
    """Refuse a partition that is named and of which there is no file.

    Message ids name its broker. A file without any may be of each broker.
    """
    brokers: dict[LogId, set[BrokerId]] = {file.log_id: set() for file in files}
    for file, broker_id in placed:
        if file.size_bytes:
            brokers[file.log_id].add(broker_id)
    for partition in sorted(options.named):
        there = brokers.get(LogId(partition.topic, partition.partition))
        if there is not None and NO_BROKER in there:
            raise OptionError(
                f"{partition}: the ids of its messages do not name their broker: name"
                " it by brokerId"
            )
        if there is None or (there and partition.broker_id not in there):
            others = [f"{each}-{partition.partition}" for each in sorted(there or ())]
            raise OptionError(
                f"{partition}: no file is of this partition; of topic"
                f" {partition.topic} and its number there are:"
                f" {name_few(others) or 'none'}"
            )


def _bounds_of(
    file: SegmentFile,
    broker_id: BrokerId,
    options: SegmentOptions,
    pushed: PushedFilters,
) -> Bounds | None:
    """Return the wanted range of a file; None: none."""
    log_id = file.log_id
    partition = TopicPartition(log_id.topic, broker_id, log_id.partition)
    asked = options.bounds_of(partition)
    if asked is None or not pushed.allows(partition):
        return None
    return asked.narrowed(pushed.bounds)


def _pack(
    splits: Iterable[Split], bytes_max: SizeBytes
) -> tuple[tuple[Split, ...], ...]:
    """Put small splits together, in order: a task for each would cost more."""
    packs: list[list[Split]] = []
    size = 0
    for split in splits:
        if not packs or size + split.size_bytes > bytes_max:
            packs.append([])
            size = 0
        packs[-1].append(split)
        size += split.size_bytes
    return tuple(tuple(pack) for pack in packs)


# -- cutting --------------------------------------------------------------------------


def place_files(
    fs: FileSystem, files: Iterable[SegmentFile], broker_id: BrokerId | None
) -> Iterator[tuple[SegmentFile, BrokerId]]:
    """Yield the readable files with their brokers, by the ids of first records.

    Args:
        fs: The disk.
        files: By directory, then by base offset.
        broker_id: Of all files, where the caller knows better than the ids.

    Raises:
        StorageError: The disk refused, or an archive is damaged.
    """
    for _directory, group in groupby(files, key=lambda file: file.path.parent):
        known = NO_BROKER if broker_id is None else broker_id
        for file in group:
            if file.flaw:
                continue
            if broker_id is None and (first := _first_id(fs, file)) is not None:
                known = BrokerId((first >> SEQUENCE_BITS) & BROKER_ID_MAX)
            yield file, known


def _first_id(fs: FileSystem, file: SegmentFile) -> MessageId | None:
    """Return the id of a file's first record; None if none names a broker."""
    is_zip = file.kind is FileKind.ZIPPED
    with closing(open_source(fs, file.path, is_zip=is_zip)) as source:
        try:
            header = source.read_at(Position(0), SizeBytes(HEADER_BYTES))
        except CorruptRecordError:
            return None  # named when the file is read
        except DiskError as error:
            if error.operation != "read":
                raise
            return None  # a bad sector: the task that reads it fails, or names it
    if len(header) < HEADER_BYTES:
        return None
    _length, _checksum, message_id, _flag = HEADER.unpack(header)
    return MessageId(message_id) if message_id > 0 else None


@dataclass(slots=True)
class _Splitter:
    """Cuts the files of one query. Owner: its plan."""

    fs: FileSystem
    bytes_max: int
    """A split ends at the first boundary that reaches this size."""
    left_bytes: int
    """Bytes that may still be walked."""

    def split(
        self, file: SegmentFile, broker_id: BrokerId, bounds: Bounds
    ) -> list[Split]:
        """Cut a file into splits; leave out those that hold no offset in `bounds`.

        Times leave out a file only where its index says that the last append was too
        early. Ids do not show it: messages of a transaction have the ids of their puts,
        and may follow younger ones, also as the first of a file.

        The splits are in order, and cover every record within the bounds. The bytes of
        an active segment after its index are a split of their own, which may be torn.

        Raises:
            StorageError: The disk refused.
        """
        index = None
        if not (file.is_active or bounds.overlaps(file.base_offset, file.end_offset)):
            return []
        if file.kind is FileKind.PLAIN:
            index = read_index(self.fs, file.path, file.base_offset)
        if not file.is_active and _is_too_old(file, index, bounds.start_ms):
            return []
        end = tail = file.end_offset
        if file.is_active:
            # The index may be newer than the size: its bytes are there by now.
            tail = file.base_offset if index is None else index.end_offset
            end = max(end, tail)
        cuts = [file.base_offset, *self._cuts(file, index, tail), tail, end]
        return [
            Split(file, broker_id, bounds, one, two, may_be_torn=one >= tail)
            for one, two in pairwise(cuts)
            if one < two and bounds.overlaps(one, two)
        ]

    def _cuts(
        self, file: SegmentFile, index: SpanIndex | None, end: Offset
    ) -> Iterator[Offset]:
        """Yield the offsets between the ends of [base offset, end) at which to cut."""
        last = covered = file.base_offset
        if file.kind is FileKind.ZIPPED or end - last <= self.bytes_max:
            return
        for span in index.spans if index is not None else ():
            if span.end_offset >= end:
                return
            covered = span.end_offset
            if covered - last >= self.bytes_max:
                yield covered
                last = covered
        if end - last > self.bytes_max and end - covered <= self.left_bytes:
            self.left_bytes -= end - covered
            yield from self._walk_cuts(file, covered, end, last + self.bytes_max)

    def _walk_cuts(
        self, file: SegmentFile, start: Offset, end: Offset, target: int
    ) -> Iterator[Offset]:
        """Yield the first record in [start, end) at or after `target`, and so on.

        Only headers are looked at, and the walk ends at one that is none. A damaged
        length may lead it astray: the split before such a cut names the damage, the one
        after it finds its way as after any damage, and the record under the cut is lost
        with it.
        """
        with closing(self.fs.open_read(file.path)) as plain:
            base, offset = file.base_offset, start
            reader = RangeReader(plain, Position(start - base), Position(end - base))
            while offset + HEADER_BYTES <= end:
                window = reader.read(Position(offset - base), WINDOW_BYTES)
                at, limit = 0, len(window) - HEADER_BYTES
                if limit < 0:
                    return
                while at <= limit:
                    if offset + at >= target:
                        yield Offset(offset + at)
                        target = offset + at + self.bytes_max
                    (length,) = _LENGTH.unpack_from(window, at)
                    if length < 0:
                        return
                    at += HEADER_BYTES + length
                offset = Offset(offset + at)


def _is_too_old(
    file: SegmentFile, index: SpanIndex | None, start_ms: Millis | None
) -> bool:
    """Whether all of a file was appended before a time."""
    if start_ms is None or index is None or index.end_offset < file.end_offset:
        return False
    return all(span.append_time_ms < start_ms for span in index.spans)
