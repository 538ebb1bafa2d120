"""Read the ranges of a task, one by one, from gets to Arrow batches.

A reader plans on the driver, with its own client; a task only reads its ranges. It
connects only to their brokers, except to find the leader of a replica set after a
change, or if its broker lacks bytes. So a reader is pickled only as a `TaskReader`, and
executors do not import the client; they import the sender of dead letters with the
first bad value.

A task has in memory a piece of the log, the gets in flight after it, and the batch made
from the piece. A loop thread of its own receives the replies.
"""

import logging
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from metaq.client.names import parse_address
from metaq.errors import CorruptRecordError, NoBrokerError, OffsetOutOfRangeError
from metaq.filter.language import Filter
from metaq.loop_thread import LoopThread
from metaq.model import BrokerAddress, Offset, TopicPartition
from metaq.peer.log_reader import GET_BYTES, LogReader
from metaq.spark.clusters import shared_cluster
from metaq.spark.errors import DamagedRecordError, one_sentence
from metaq.spark.leaders import follow_leaders, leaders_of, look
from metaq.spark.options import BadRows, SourceOptions, WireOptions
from metaq.spark.plan import LogSpan, ReadRange, settle
from metaq.spark.record_bounds import EVERYTHING, Bounds
from metaq.spark.rows import OnCorrupt, RowDamage, RowDecoder, decode_pieces
from metaq.spark.source.matches import matching_rows, rows_of_runs
from metaq.spark.values import ValueConverter

if TYPE_CHECKING:
    from metaq.spark.sink.outbox import Outbox

BATCH_BYTES: Final = 2 * GET_BYTES
"""Bytes decoded at a time; of short messages, enough for one batch of Spark."""

_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReadTask:
    """Range to read in a task; picklable, for executors."""

    range: ReadRange
    """The range; both ends are record boundaries."""
    address: str | None
    """Address of the broker, `meta://host:port`; None if it was away."""
    bounds: Bounds = EVERYTHING


def read_rows(task: ReadTask, options: SourceOptions) -> Iterator[pa.RecordBatch]:
    """Yield the wanted rows of a range, in order.

    Args:
        task: the range to read.
        options: time-outs, and the handling of lost and damaged bytes.

    Raises:
        DataLossError: bytes are gone, with `failOnDataLoss`.
        DamagedRecordError: a record is damaged, with `OnCorrupt.FAIL`.
        NoBrokerError, RequestTimeoutError: the broker is not available.
    """
    partition = task.range.partition
    if task.address is None:
        raise NoBrokerError(f"{partition}: broker {partition.broker_id} is away")
    address = parse_address(task.address)
    with _BlockingReader(partition, address, options.wire) as reader:
        for batch in _read(reader, task.range, options):
            wanted = matching_rows(task.bounds.clip(batch), options.where)
            if wanted.num_rows:
                yield wanted


class _BlockingReader:
    """A blocking log reader. Lifecycle: a context manager."""

    def __init__(
        self, partition: TopicPartition, address: BrokerAddress, wire: WireOptions
    ) -> None:
        self._partition = partition
        self._wire = wire
        self._awaited: Offset | None = None
        self._reader = LogReader(
            partition,
            address,
            timeout_s=wire.request_timeout_s,
            retry_timeout_s=wire.retry_timeout_s,
        )
        self._thread = LoopThread("metaq-log-reader")
        self._thread.begin(
            follow_leaders(
                leaders_of(wire),
                lambda: (partition.broker_id,),
                lambda: self._awaited,
                lambda _broker, found: self._reader.move(found),
            )
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        try:
            self._thread.run_close(self._reader.close())
        finally:
            self._thread.stop()

    def span(self) -> LogSpan | None:
        """Return the current span of the log; None without one.

        For a replica set, that of its leader, which is read from then on. Raises as
        `LogReader.span` and `Cluster.spans`.
        """
        found = self._wait(self._reader.span(), Offset(0))
        if not self._reader.is_of_set:
            return None if found is None else LogSpan(*found)
        cluster = shared_cluster(self._wire)
        confirmed = cluster.spans([self._partition], is_confirmed=True)
        self._thread.run(self._move())
        return confirmed[self._partition]

    async def _move(self) -> None:
        broker = self._partition.broker_id
        for found in (await look(leaders_of(self._wire), [broker])).values():
            self._reader.move(found)

    @property
    def can_filter(self) -> bool:
        """Whether the broker supports filters; known after the first request."""
        return self._reader.can_filter

    def matches(
        self, span: LogSpan, where: Filter
    ) -> tuple[pa.RecordBatch, Offset] | None:
        """Return matching rows from the start of a span, and the next offset to read.

        None if the span must be read without a filter. Raises as `LogReader.matches`.
        """
        work = self._reader.matches(span.start, span.end, where.text)
        found = self._wait(work, span.start)
        if found is None:
            return None
        end = min(found.next_offset, span.end)
        try:
            return rows_of_runs(self._partition, found.data, span.start, end), end
        except CorruptRecordError:
            # The damage may be one of the transfer: read again, without a filter.
            return None

    def is_good(self, span: LogSpan) -> bool:
        """Return whether the broker's own bytes are good; see `LogReader.is_good`."""
        return self._wait(self._reader.is_good(span.start, span.end), span.start)

    def pieces(self, span: LogSpan) -> Iterator[bytes]:
        """Yield the bytes of a span in pieces; raises as `LogReader.read`."""
        position = span.start
        while position < span.end:
            data = self._wait(self._reader.read(position, span.end), position)
            position = Offset(position + len(data))
            yield data

    def _wait(self, work: Coroutine[Any, Any, T], position: Offset) -> T:
        self._awaited = position
        try:
            return self._thread.run(work)
        finally:
            self._awaited = None


def _read(
    reader: _BlockingReader, wanted: ReadRange, options: SourceOptions
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a range; if the log start has moved past it, of the rest."""
    partition = wanted.partition
    left = [LogSpan(wanted.start, wanted.end)]
    denied: Offset | None = None
    again: Offset | None = None
    damaged: LogSpan | None = None
    while left:
        span = left.pop(0)
        if not span.size_bytes:
            continue
        where = options.where
        if where is not None and (found := reader.matches(span, where)) is not None:
            rows, after = found
            yield rows
            left.insert(0, LogSpan(after, span.end))
            continue
        # Damaged bytes are first read again: the broker, or another replica, may have
        # them undamaged.
        on_corrupt = options.on_corrupt if span == damaged else OnCorrupt.FAIL
        decoder = RowDecoder(partition, span.start, span.end, on_corrupt=on_corrupt)
        try:
            pieces = reader.pieces(span)
            for batch in decode_pieces(decoder, pieces, batch_bytes=BATCH_BYTES):
                yield batch
                if where is not None and reader.can_filter:
                    left.insert(0, LogSpan(decoder.next_offset, span.end))
                    break
        except OffsetOutOfRangeError:
            at = decoder.next_offset
            settled = settle(
                partition,
                LogSpan(at, span.end),
                reader.span(),
                fail_on_data_loss=options.fail_on_data_loss,
            )
            if not settled.lost and at == denied:
                raise
            denied = at
            for lost in settled.lost:
                _log.warning("data is lost: %s", lost)
            left.insert(0, settled.span)
        except DamagedRecordError as error:
            at, good = decoder.next_offset, error.next_good_offset or span.end
            rest = LogSpan(at, span.end)
            if at != again and reader.is_good(LogSpan(at, good)):
                _log.info("read again, the broker has it whole: %s", error)
                again = at
                left.insert(0, rest)
            elif options.on_corrupt is OnCorrupt.FAIL:
                raise
            else:
                damaged = LogSpan(at, good)
                left[:0] = [damaged, LogSpan(good, span.end)]
        except CorruptRecordError as error:
            # Damage or a gap reported by the broker; bytes before it may not be decoded
            # yet.
            named = _named_damage(decoder, error, options.on_corrupt)
            _log.warning("damaged bytes are left out: %s", named)
            before = LogSpan(decoder.next_offset, named.start)
            left[:0] = [before, LogSpan(named.end, span.end)]
        for damage in decoder.damage:
            _log.warning("damaged bytes are left out: %s", damage)


def _named_damage(
    decoder: RowDecoder, error: CorruptRecordError, on_corrupt: OnCorrupt
) -> RowDamage:
    """Return the part of a range to skip after the reader has found damage.

    Raises:
        DamagedRecordError: with `OnCorrupt.FAIL`.
    """
    partition, good = decoder.partition, decoder.end
    start = max(decoder.next_offset, error.offset or decoder.next_offset)
    if on_corrupt is OnCorrupt.FAIL:
        raise DamagedRecordError(
            partition, start, error.detail, error.next_good_offset
        ) from error
    if error.next_good_offset is not None:
        good = min(good, error.next_good_offset)
    return RowDamage(partition, start, good, error.detail)


class TaskReader:
    """Reads the ranges of a task. Base class of the readers that plan them."""

    def __init__(self, options: SourceOptions, value_type: pa.DataType) -> None:
        """Store the options of the read, and the Arrow type of the column `value`."""
        self._options = options
        self._value_type = value_type

    def __reduce__(
        self,
    ) -> tuple[type["TaskReader"], tuple[SourceOptions, pa.DataType]]:
        return TaskReader, (self._options, self._value_type)

    @one_sentence
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one task, with converted values.

        Raises:
            BadRowError: a value does not have the format, with `BadRows.FAIL`.
            MetaqError: as `read_rows`.
        """
        tasks: tuple[ReadTask, ...] = partition.value or ()
        for task in tasks:
            with _Converting(task, self._options, self._value_type) as converting:
                for batch in read_rows(task, self._options):
                    rows = converting.convert(batch)
                    if rows.num_rows:
                        yield rows


class _Converting:
    """Converts the values of one task. A context manager; one thread.

    Leaving it without an error waits until all dead letters are stored.
    """

    def __init__(
        self, task: ReadTask, options: SourceOptions, value_type: pa.DataType
    ) -> None:
        """Prepare for one task; the first bad value connects to the cluster."""
        values = options.values
        self._task = task
        self._options = options
        self._converter = ValueConverter(values.format, values.bad_rows, value_type)
        self._outbox: Outbox | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        if self._outbox is None:
            return
        with self._outbox as outbox:
            if kind is None:
                outbox.finish()

    def convert(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows with a good value, in order.

        Raises:
            BadRowError: a value is bad, with `BadRows.FAIL`.
            MetaqError: dead letters cannot be sent.
        """
        converted = self._converter.convert(batch)
        if converted.rejected is not None:
            assert self._options.values.bad_rows is BadRows.TOPIC
            import metaq.spark.source.dead_letters as post  # noqa: PLC0415  # see the top

            if self._outbox is None:
                bounds = self._task.bounds
                self._outbox = post.letter_outbox(
                    self._task.range, bounds, self._options
                )
            self._outbox.put(post.letters(converted))
        return converted.rows
