"""The reader of `format("metaq-segments")`: lists files, cuts them, reads in tasks.

The driver lists the files and cuts them into splits; each task reads its splits with
no broker in between: pieces of the file in, Arrow batches out. A query reads the bytes
that were there when it was planned: an active segment ends with its last whole record
of that moment.

A task holds one piece of a file, the batch made of it, and of a zip the piece after
it; a larger record is held whole. Files are read, not mapped, for the reason that
`metaq/fs/` gives.
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
from metaq.storage.damage import Tail, apart, check_tail
from metaq.storage.log_writer import UNSYNCED_BYTES_MAX
from metaq.storage.segment import Damage, Segment
from metaq.storage.segment_source import open_source
from metaq.storage.walk import WINDOW_BYTES

PIECE_BYTES: Final = SizeBytes(WINDOW_BYTES)
"""Read at a time, unless one record needs more; stays in a processor's cache."""

_log = logging.getLogger(__name__)


def declared_columns(given: Mapping[str, str]) -> str:
    """Return the columns of every row, as DDL.

    Args:
        given: options of the read, as Spark hands them over.

    Raises:
        OptionError: An option is wrong.
    """
    return row_ddl(parse_segment_options(given).values)


def segments_reader(given: Mapping[str, str], schema: StructType) -> "SegmentsReader":
    """Return the reader of a query.

    Args:
        given: options of the read, as Spark hands them over.
        schema: as Spark hands it to a reader.

    Raises:
        OptionError: An option is wrong, or the user asked for other columns.
    """
    options = parse_segment_options(given)
    report_missing_filters(options.can_push_filters)
    # Spark refuses a reader that takes filters while its own setting is off.
    kind = PushingReader if options.can_push_filters else SegmentsReader
    return kind(options, value_type(schema, options.values))


class SegmentsReader(DataSourceReader):
    """Plans on the driver, reads in the tasks; travels to them in pickled form."""

    def __init__(self, options: SegmentOptions, value_type: pa.DataType) -> None:
        self._options = options
        self._value_type = value_type
        self._pushed = PushedFilters()

    @one_sentence
    def partitions(self) -> list[InputPartition]:
        """Return the splits of each task, as a tuple.

        Raises:
            CorruptRecordError: An archive is none, and damage is to fail the query.
            OptionError: A path does not exist, or names no partition.
            StorageError: The disk refused.
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
            BadRowError: A value is not of the format, and that is to fail the query.
            CorruptRecordError: Bytes are damaged, and damage is to fail the query.
            StorageError: The disk refused.
        """
        values, splits = self._options.values, partition.value or ()
        converter = ValueConverter(values.format, values.bad_rows, self._value_type)
        for batch in read_splits(SystemFileSystem(), splits, self._options):
            yield converter.convert(batch).rows


class PushingReader(TakesFilters, SegmentsReader):
    """Leaves out files that cannot match the filters of the query."""


def read_splits(
    fs: FileSystem, splits: Iterable[Split], options: SegmentOptions
) -> Iterator[pa.RecordBatch]:
    """Yield the wanted rows of some splits, in order.

    Args:
        fs: The disk.
        splits: One after the other; at most one file is open at a time.
        options: With SKIP damaged ranges are warnings in the task's log, at most
            `DAMAGES_MAX` for each split. A message longer than its `message_bytes_max`
            is damage, and is not read.

    Raises:
        CorruptRecordError: Bytes are damaged and FAIL was said; the message names
            file, offset and next good offset.
        StorageError: The disk refused.
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
        for found in apart(damage):
            _log.warning("damaged bytes are left out: %s", found)


def read_split(
    fs: FileSystem,
    split: Split,
    *,
    on_corrupt: OnCorrupt,
    damage: list[Damage],
    message_bytes_max: int = VALUE_BYTES_MAX,
) -> Iterator[pa.RecordBatch]:
    """Yield all rows of one split, in order of their offsets.

    Args:
        fs: The disk.
        split: The split to read.
        on_corrupt: Reaction to damage.
        damage: With SKIP, skipped ranges are added here, in order.
        message_bytes_max: A longer message is damage, and is not read.

    Raises:
        CorruptRecordError: See `read_splits`.
        StorageError: The disk refused.
    """
    file = split.file
    decoder = RowDecoder(
        TopicPartition(file.log_id.topic, split.broker_id, file.log_id.partition),
        split.start,
        # Where the last whole record ends, as a broker would find it at a start.
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
        # The archive around the records: bytes after it cannot be unpacked.
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
    """Read the pieces that the decoder asks for, until it or the file ends."""
    file = split.file
    seen, is_zip = split.start, file.kind is FileKind.ZIPPED
    with closing(open_source(fs, file.path, is_zip=is_zip)) as source:
        while not decoder.is_done:
            start = decoder.next_offset
            size = min(max(PIECE_BYTES, decoder.needed_bytes), decoder.end - start)
            piece = source.read_at(Position(start - file.base_offset), SizeBytes(size))
            if start + len(piece) <= seen:
                return  # the file is shorter than it was
            seen = Offset(start + len(piece))
            yield from decoder.decode(piece)


def tail_of(fs: FileSystem, split: Split) -> Tail:
    """Judge bytes of an active segment that its index does not cover, as storage does.

    Raises:
        StorageError: the disk refused.
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
