"""Rows of messages that match a filter, selected by a broker and checked again here."""

from bisect import bisect_right

import pyarrow as pa

from metaq.errors import CorruptRecordError
from metaq.filter.language import Filter
from metaq.model import Offset, TopicPartition
from metaq.record.runs import decode_runs
from metaq.spark.columns import ROW_SCHEMA
from metaq.spark.record_bounds import Bounds
from metaq.spark.rows import RowDecoder, decode_pieces


def matching_rows(batch: pa.RecordBatch, where: Filter | None) -> pa.RecordBatch:
    """Return the rows of a batch that match a filter; all rows for None."""
    if where is None:
        return batch
    keys, headers, attributes = (
        batch.column(name).to_pylist() for name in ("key", "headers", "attribute")
    )
    mask = [
        where.matches(key, tuple((h["key"], h["value"]) for h in pairs or ()), text)
        for key, pairs, text in zip(keys, headers, attributes, strict=True)
    ]
    return batch.filter(pa.array(mask, pa.bool_()))


def rows_of_runs(
    partition: TopicPartition, data: bytes, start: Offset, end: Offset
) -> pa.RecordBatch:
    """Return the rows of runs in [start, end) of a log, ascending; drop later ones.

    Raises:
        CorruptRecordError: a record is damaged, or a run begins before `start` or
            before the end of the run before it.
    """
    shifts, begins, joined = list[int](), list[int](), bytearray()
    for offset, records in decode_runs(data):
        if offset < start:
            raise CorruptRecordError(f"{partition}: a run at {offset} before {start}")
        begins.append(len(joined))
        shifts.append(offset - len(joined))
        joined += records
        start = Offset(offset + len(records))
    # The records are decoded as one contiguous log, then their offsets are restored.
    decoder = RowDecoder(partition, Offset(0), Offset(len(joined)))
    batches = list(decode_pieces(decoder, [bytes(joined)]))
    rows = pa.Table.from_batches(batches, ROW_SCHEMA)
    places = rows.column("offset").to_pylist()
    if not set(begins) <= set(places):
        raise CorruptRecordError(f"{partition}: a run that begins within a record")
    offsets = [at + shifts[bisect_right(begins, at) - 1] for at in places]
    at = ROW_SCHEMA.get_field_index("offset")
    rows = rows.set_column(at, ROW_SCHEMA.field(at), pa.array(offsets, pa.int64()))
    (batch,) = rows.combine_chunks().to_batches() or [
        pa.RecordBatch.from_pylist([], ROW_SCHEMA)
    ]
    return Bounds(end=end).clip(batch)
