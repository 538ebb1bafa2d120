"""The reader of `format("metaq-segments")`: lists files, splits them, reads in tasks.

The driver lists the files and cuts them into splits; each task reads its splits without
a broker, from pieces of the file to Arrow batches. A query reads the bytes that existed
when it was planned: an active segment ends with its last complete record then.

A task has in memory one piece of a file, the batch made from it, and of a zip the next
piece; or one larger record. Files are read, not mapped; `metaq/fs/` explains why.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from metaq.errors import CorruptRecordError
from metaq.fs import FileSystem, SystemFileSystem
from metaq.model import Offset, Position, SizeBytes, TopicPartition
from metaq.spark.columns import VALUE_BYTES_MAX
from metaq.spark.errors import DamagedRecordError, one_sentence
from metaq.spark.record_bounds import PushedFilters, TakesFilters
from metaq.spark.rows import OnCorrupt, RowDecoder
from metaq.spark.schema import row_ddl, value_type
from metaq.spark.segments.segment_options import SegmentOptions, parse_segment_options
from metaq.spark.segments.segment_plan import FileKind, Split, plan_query
from metaq.spark.values import ValueConverter
from metaq.spark.versions import report_missing_filters, tasks_of
from metaq.storage.damage import Tail, check_tail, merge_damage
from metaq.storage.log_writer import UNSYNCED_BYTES_MAX
from metaq.storage.segment import Damage, Segment
from metaq.storage.segment_source import open_source
from metaq.storage.walk import WINDOW_BYTES

PIECE_BYTES: Final = SizeBytes(WINDOW_BYTES)
"""Bytes read at a time, unless a record is larger; fits into a processor's cache."""

_log = logging.getLogger(__name__)


def declared_columns(given: Mapping[str, str]) -> str:
    """Return the columns of every row, as DDL.

    Args:
        given: options of the read, as passed by Spark.

    Raises:
        OptionError: an option is wrong.
    """
    return row_ddl(parse_segment_options(given).values)


def segments_reader(given: Mapping[str, str], schema: StructType) -> "SegmentsReader":
    """Return the reader of a query.

    Args:
        given: options of the read, as passed by Spark.
        schema: as passed by Spark to a reader.

    Raises:
        OptionError: an option is wrong, or the user's schema has other columns.
    """
    options = parse_segment_options(given)
    report_missing_filters(options.can_push_filters)
    # Spark refuses a reader with `pushFilters` while its own setting is off.
    kind = PushingReader if options.can_push_filters else SegmentsReader
    return kind(options, value_type(schema, options.values))


class SegmentsReader(DataSourceReader):
    """Plans on the driver, reads in the tasks; picklable."""

    def __init__(self, options: SegmentOptions, value_type: pa.DataType) -> None:
        self._options = options
        self._value_type = value_type
        self._pushed = PushedFilters()

    @one_sentence
    def partitions(self) -> list[InputPartition]:
        """Return the tasks, each with a tuple of splits.

        Raises:
            CorruptRecordError: a file is unreadable, with `OnCorrupt.FAIL`.
            OptionError: a path does not exist, or names no partition.
            StorageError: a disk error.
        """
        plan = plan_query(SystemFileSystem(), self._options, self._pushed)
        for damage in plan.unreadable:
            if self._options.on_corrupt is OnCorrupt.FAIL:
                raise CorruptRecordError(str(damage))
            _log.warning("a file is left out: %s", damage)
        return tasks_of(plan.tasks)

    @one_sentence
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one task.

        Raises:
            BadRowError: a value does not have the format, with `BadRows.FAIL`.
            CorruptRecordError: bytes are damaged, with `OnCorrupt.FAIL`.
            StorageError: a disk error.
        """
        values, splits = self._options.values, partition.value or ()
        converter = ValueConverter(values.format, values.bad_rows, self._value_type)
        for batch in read_splits(SystemFileSystem(), splits, self._options):
            yield converter.convert(batch).rows


class PushingReader(TakesFilters, SegmentsReader):
    """A reader that skips files which cannot match the query's filters."""


def read_splits(
    fs: FileSystem, splits: Iterable[Split], options: SegmentOptions
) -> Iterator[pa.RecordBatch]:
    """Yield the wanted rows of splits, in order.

    Args:
        fs: the disk.
        splits: read one at a time, with at most one file open.
        options: with `OnCorrupt.SKIP`, damaged ranges are logged as warnings, at most
            `DAMAGES_MAX` per split. A message longer than `message_bytes_max` is
            damage, and is not read.

    Raises:
        CorruptRecordError: bytes are damaged, with `OnCorrupt.FAIL`; the message names
            file, offset and next good offset.
        StorageError: a disk error.
    """
    for split in splits:
        damage: list[Damage] = []
        for batch in read_split(
            fs,
            split,
            on_corrupt=options.on_corrupt,
            damage=damage,
            message_bytes_max=options.message_bytes_max,
        ):
            wanted = split.bounds.clip(batch)
            if wanted.num_rows:
                yield wanted
        for found in merge_damage(damage):
            _log.warning("damaged bytes are left out: %s", found)


def read_split(
    fs: FileSystem,
    split: Split,
    *,
    on_corrupt: OnCorrupt,
    damage: list[Damage],
    message_bytes_max: int = VALUE_BYTES_MAX,
) -> Iterator[pa.RecordBatch]:
    """Yield all rows of one split, ascending by offset.

    Args:
        fs: the disk.
        split: the split to read.
        on_corrupt: reaction to damage.
        damage: with SKIP, skipped ranges are added to it, in order.
        message_bytes_max: a longer message is damage, and is not read.

    Raises:
        CorruptRecordError: see `read_splits`.
        StorageError: a disk error.
    """
    file = split.file
    decoder = RowDecoder(
        TopicPartition(file.log_id.topic, split.broker_id, file.log_id.partition),
        split.start,
        # The end of the last complete record, as a broker finds it at its start.
        tail_of(fs, split).end if split.may_be_torn else split.end,
        on_corrupt=on_corrupt,
        payload_bytes_max=message_bytes_max,
        limit_hint="; if it is a message, raise maxMessageBytes",
    )
    try:
        yield from _decode(fs, split, decoder)
        decoder.finish()
    except DamagedRecordError as error:
        found = Damage(file.path, error.offset, error.next_good_offset, error.detail)
        raise CorruptRecordError(
            f"damaged record: {found}", next_good_offset=error.next_good_offset
        ) from error
    except CorruptRecordError as error:
        # The zip itself is damaged: the bytes after that cannot be unpacked.
        rest = Damage(file.path, decoder.next_offset, split.end, str(error))
        if on_corrupt is OnCorrupt.FAIL:
            raise CorruptRecordError(str(rest)) from error
        damage.append(rest)
    damage[:0] = [
        Damage(file.path, found.start, found.end, found.detail)
        for found in decoder.damage
    ]


def _decode(
    fs: FileSystem, split: Split, decoder: RowDecoder
) -> Iterator[pa.RecordBatch]:
    """Read the pieces that the decoder needs, until it is done or the file ends."""
    file = split.file
    seen, is_zip = split.start, file.kind is FileKind.ZIPPED
    with closing(open_source(fs, file.path, is_zip=is_zip)) as source:
        while not decoder.is_done:
            start = decoder.next_offset
            size = min(max(PIECE_BYTES, decoder.needed_bytes), decoder.end - start)
            piece = source.read_at(Position(start - file.base_offset), SizeBytes(size))
            if start + len(piece) <= seen:
                return  # the file has become shorter
            seen = Offset(start + len(piece))
            yield from decoder.decode(piece)


def tail_of(fs: FileSystem, split: Split) -> Tail:
    """Check the bytes of an active segment after its index, as the storage engine does.

    Raises:
        StorageError: a disk error.
    """
    base = split.file.base_offset
    segment = Segment(split.file.path, base, SizeBytes(split.end - base))
    with closing(fs.open_read(segment.path)) as file:
        return check_tail(
            file,
            segment,
            split.start,
            unsynced_bytes_max=UNSYNCED_BYTES_MAX,
            span_bytes_min=WINDOW_BYTES,
            time_ms=file.mtime_ms(),
        )
