"""Read one range of one partition in a task: gets in, Arrow batches out.

A task is told where its broker is and needs neither ZooKeeper nor other brokers. It
holds a piece of the log, the gets that are on their way behind it, and the batch that
is made of the piece.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from metaq.client.names import parse_address
from metaq.errors import CorruptRecordError, NoBrokerError, OffsetOutOfRangeError
from metaq.peer.log_reader import GET_BYTES, LogReader
from metaq.spark.errors import DamagedRecordError
from metaq.spark.options import SourceOptions
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
    with LogReader(
        partition,
        parse_address(task.address),
        timeout_s=options.wire.request_timeout_s,
        retry_timeout_s=options.wire.retry_timeout_s,
    ) as reader:
        for batch in _read(reader, task.range, options):
            wanted = task.bounds.clip(batch)
            if wanted.num_rows:
                yield wanted


def _read(
    reader: LogReader, wanted: ReadRange, options: SourceOptions
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
            pieces = reader.pieces(span.start, span.end)
            yield from decode_pieces(decoder, pieces, batch_bytes=BATCH_BYTES)
        except OffsetOutOfRangeError:
            log = reader.span()
            settled = settle(
                partition,
                LogSpan(decoder.next_offset, span.end),
                None if log is None else LogSpan(*log),
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
            # The broker names it; bytes before that may not be decoded yet.
            named = _named_damage(decoder, error, options.on_corrupt)
            _log.warning("damaged bytes are left out: %s", named)
            before = LogSpan(decoder.next_offset, named.start)
            left[:0] = [before, LogSpan(named.end, span.end)]
        for damage in decoder.damage:
            _log.warning("damaged bytes are left out: %s", damage)


def _named_damage(
    decoder: RowDecoder, error: CorruptRecordError, on_corrupt: OnCorrupt
) -> RowDamage:
    """Return the part to leave out of a range in which the broker names damage.

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
