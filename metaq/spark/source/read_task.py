"""Read one range of one partition in a task: gets in, Arrow batches out.

A task is told where its broker is and needs neither ZooKeeper nor other brokers. It
holds a piece of the log, the gets that are on their way behind it, and the batch that
is made of the piece. Replies come in on a loop thread of the task's own meanwhile.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Self

import pyarrow as pa

from metaq.client.names import parse_address
from metaq.errors import CorruptRecordError, NoBrokerError, OffsetOutOfRangeError
from metaq.loop_thread import LoopThread
from metaq.model import BrokerAddress, Offset, TopicPartition
from metaq.peer.log_reader import GET_BYTES, LogReader
from metaq.spark.errors import DamagedRecordError
from metaq.spark.options import SourceOptions, WireOptions
from metaq.spark.plan import LogSpan, ReadRange
from metaq.spark.record_bounds import EVERYTHING, Bounds
from metaq.spark.rows import OnCorrupt, RowDamage, RowDecoder, decode_pieces
from metaq.spark.source.loss import settle

BATCH_BYTES: Final = 2 * GET_BYTES
"""Decoded at a time: of short messages as many as Spark takes in one batch."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadTask:
    """Range of one task; goes to executors in pickled form."""

    range: ReadRange
    """Record boundaries at both ends."""
    address: str | None
    """Address of the broker, `meta://host:port`; None where it was away."""
    bounds: Bounds = EVERYTHING
    """Bounds of the wanted rows."""


def read_rows(task: ReadTask, options: SourceOptions) -> Iterator[pa.RecordBatch]:
    """Yield the wanted rows of a range, in order.

    Args:
        task: the range to read.
        options: time-outs, and reactions to lost and damaged bytes.

    Raises:
        DataLossError: bytes are gone, and that is to fail the query.
        DamagedRecordError: a record is damaged, and that is to fail the query.
        NoBrokerError, RequestTimeoutError: the broker cannot be asked.
    """
    partition = task.range.partition
    if task.address is None:
        raise NoBrokerError(f"{partition}: broker {partition.broker_id} is away")
    address = parse_address(task.address)
    with _BlockingReader(partition, address, options.wire) as reader:
        for batch in _read(reader, task.range, options):
            wanted = task.bounds.clip(batch)
            if wanted.num_rows:
                yield wanted


class _BlockingReader:
    """A log reader for a thread that waits. Lifecycle: a context manager."""

    def __init__(
        self, partition: TopicPartition, address: BrokerAddress, wire: WireOptions
    ) -> None:
        self._reader = LogReader(
            partition,
            address,
            timeout_s=wire.request_timeout_s,
            retry_timeout_s=wire.retry_timeout_s,
        )
        self._thread = LoopThread("metaq-log-reader")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        try:
            self._thread.run_close(self._reader.close())
        finally:
            self._thread.stop()

    def span(self) -> LogSpan | None:
        """Return the log as it is now; raises as `LogReader.span`."""
        found = self._thread.run(self._reader.span())
        return None if found is None else LogSpan(*found)

    def pieces(self, span: LogSpan) -> Iterator[bytes]:
        """Yield a part of the log, piece by piece; raises as `LogReader.read`."""
        position = span.start
        while position < span.end:
            data = self._thread.run(self._reader.read(position, span.end))
            position = Offset(position + len(data))
            yield data


def _read(
    reader: _BlockingReader, wanted: ReadRange, options: SourceOptions
) -> Iterator[pa.RecordBatch]:
    """Read a range; where the log start has moved on, the rest of it."""
    partition = wanted.partition
    left = [LogSpan(wanted.start, wanted.end)]
    while left:
        span = left.pop(0)
        if not span.size_bytes:
            continue
        decoder = RowDecoder(
            partition, span.start, span.end, on_corrupt=options.on_corrupt
        )
        try:
            pieces = reader.pieces(span)
            yield from decode_pieces(decoder, pieces, batch_bytes=BATCH_BYTES)
        except OffsetOutOfRangeError:
            settled = settle(
                partition,
                LogSpan(decoder.next_offset, span.end),
                reader.span(),
                fail_on_data_loss=options.fail_on_data_loss,
            )
            if not settled.lost:
                raise
            for lost in settled.lost:
                _log.warning("data is lost: %s", lost)
            left.insert(0, settled.span)
        except DamagedRecordError:
            raise
        except CorruptRecordError as error:
            # The broker names it, or a gap; bytes before may not be decoded yet.
            named = _named_damage(decoder, error, options.on_corrupt)
            _log.warning("damaged bytes are left out: %s", named)
            before = LogSpan(decoder.next_offset, named.start)
            left[:0] = [before, LogSpan(named.end, span.end)]
        for damage in decoder.damage:
            _log.warning("damaged bytes are left out: %s", damage)


def _named_damage(
    decoder: RowDecoder, error: CorruptRecordError, on_corrupt: OnCorrupt
) -> RowDamage:
    """Return the part to leave out of a range in which the reader met damage.

    Raises:
        DamagedRecordError: damage is to fail the query.
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
