"""Conversion of a run of records to the columns of one Arrow batch.

    topic  broker_id  partition  offset  message_id  timestamp  attribute  flag
    key  headers  value

Spark requires the schema of every batch to equal the declared one exactly: plain
`string` and `binary`, nullable, microseconds, UTC. Columns are built by Arrow and by
strided slices of the headers; only records with an attribute cost Python code each.
"""

import sys
from array import array
from dataclasses import dataclass
from functools import lru_cache
from struct import Struct
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from metaq.model import (
    ID_MS_SHIFT,
    ID_ZERO_MS,
    BrokerId,
    HeaderPairs,
    Offset,
    TopicPartition,
)
from metaq.record.flags import HAS_ATTRIBUTE, HAS_PROPERTIES, split_properties
from metaq.record.layout import HEADER_BYTES

HEADERS: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))

ROW_SCHEMA: Final = pa.schema(
    [
        ("topic", pa.string()),
        ("broker_id", pa.int32()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("message_id", pa.int64()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("attribute", pa.string()),
        ("flag", pa.int32()),
        ("key", pa.binary()),
        ("headers", HEADERS),
        ("value", pa.binary()),
    ]
)
"""A row of the source. `timestamp` is when the broker stamped the id, null for ids of
Java brokers, which have no wall time; `attribute`, `key` and `headers` are null if the
message has none. Key and headers have the types of Spark's Kafka source."""

VALUE_BYTES_MAX: Final = 2**30 - 64
"""Maximum payload bytes; a longer one is taken for damage. Columns address their bytes
with 31 bits, and a run may exceed its limit of the same size by one record."""

_ID_AT: Final = 8
_FLAG_AT: Final = 16
_US_PER_MS: Final = 1000
_ATTRIBUTE_LENGTH: Final = Struct(">i")


@dataclass(frozen=True, slots=True)
class BadAttribute:
    """A record whose flag announces an attribute that its payload does not have."""

    row: int
    detail: str


class RowBuilder:
    """Builds the batches of one partition. Owner: one decoder; one thread."""

    def __init__(self, partition: TopicPartition, records_max: int) -> None:
        """Create the columns that are the same in every row.

        Args:
            partition: partition of the rows.
            records_max: maximum records of a run for `build`, 1 or more.
        """
        repeated = (partition.topic, partition.broker_id, partition.partition)
        self._constant = [
            pa.repeat(pa.scalar(value, field.type), records_max)
            for value, field in zip(repeated, ROW_SCHEMA, strict=False)
        ]
        self._headers, self._payloads = _which_pieces(records_max)

    def build(
        self, run: memoryview, edges: "array[int]", offset: Offset
    ) -> tuple[pa.RecordBatch, BadAttribute | None]:
        """Return the rows of a run, up to the first record with a bad attribute.

        Args:
            run: the bytes of the records; copied.
            edges: of the records, as returned by `find_run`; modified.
            offset: of the first record of the run.

        Returns:
            The batch, which owns its bytes; and the bad attribute at which it ends, or
            None if it has the whole run.
        """
        count = len(edges) // 2
        headers = _pieces(run, edges).take(self._headers[:count]).buffers()[2]
        flags = _column(headers, count, _FLAG_AT, pa.int32())
        attributes, keys, all_headers, bad = _take_attributes(run, edges, flags)
        if bad is not None:
            count = bad.row
            del edges[2 * count + 1 :]
            flags = flags[:count]
        ids = _column(headers, count, _ID_AT, pa.int64())
        offsets = _numbers(edges[0:-1:2]).cast(pa.int64())
        columns = [
            *(column[:count] for column in self._constant),
            pc.add(offsets, pa.scalar(offset, pa.int64())),
            ids,
            _times(ids),
            attributes,
            flags,
            keys,
            all_headers,
            _pieces(run, edges).take(self._payloads[:count]),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=ROW_SCHEMA), bad


@lru_cache(maxsize=4)
def _which_pieces(records_max: int) -> tuple[pa.Array, pa.Array]:
    """Return the indexes of the headers, and those of the payloads, among pieces."""
    return (
        _numbers(array("i", range(0, 2 * records_max, 2))),
        _numbers(array("i", range(1, 2 * records_max, 2))),
    )


def _numbers(values: "array[int]") -> pa.Array:
    buffers = [None, pa.py_buffer(values)]
    return pa.Array.from_buffers(pa.int32(), len(values), buffers)


def _pieces(run: memoryview, edges: "array[int]") -> pa.Array:
    """Return the bytes between the edges, as one array over the same memory."""
    buffers = [None, pa.py_buffer(edges), pa.py_buffer(run)]
    return pa.Array.from_buffers(pa.binary(), len(edges) - 1, buffers)


def _column(headers: pa.Buffer, count: int, at: int, kind: pa.DataType) -> pa.Array:
    """Return the big-endian number at `at` in each header as a column."""
    width = kind.bit_width // 8
    packed = memoryview(headers)[: count * HEADER_BYTES].tobytes()
    native = bytearray(count * width)
    for byte in range(width):
        target = width - 1 - byte if sys.byteorder == "little" else byte
        native[target::width] = packed[at + byte :: HEADER_BYTES]
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(native)])


def _times(ids: pa.Array) -> pa.Array:
    """Return the times at which ids were stamped, in ms; null for negative ids."""
    stamped = pc.shift_right(ids, pa.scalar(ID_MS_SHIFT, pa.int64()))
    since_1970 = pc.add(stamped, pa.scalar(ID_ZERO_MS, pa.int64()))
    micros = pc.multiply(since_1970, pa.scalar(_US_PER_MS, pa.int64()))
    is_java = pc.less(ids, pa.scalar(0, pa.int64()))
    known = pc.if_else(is_java, pa.scalar(None, pa.int64()), micros)
    return known.cast(ROW_SCHEMA.field("timestamp").type)


def _take_attributes(
    run: memoryview, edges: "array[int]", flags: pa.Array
) -> tuple[pa.Array, pa.Array, pa.Array, BadAttribute | None]:
    """Return attributes, keys and headers; move the edges of their payloads past them.

    Invalid UTF-8 is decoded with replacement characters, as by `decode_payload`.
    """
    count, bad = len(flags), None
    announced = pc.bit_wise_and(flags, pa.scalar(HAS_ATTRIBUTE, pa.int32()))
    rows = pc.indices_nonzero(announced).to_pylist()
    if not rows:
        kinds = (pa.string(), pa.binary(), HEADERS)
        return *(pa.nulls(count, kind) for kind in kinds), None
    texts: list[str | None] = [None] * count
    keys: list[bytes | None] = [None] * count
    headers: list[HeaderPairs | None] = [None] * count
    both = pa.scalar(HAS_ATTRIBUTE | HAS_PROPERTIES, pa.int32())
    has_properties = pc.equal(pc.bit_wise_and(flags, both), both).to_pylist()
    for row in rows:
        start, end = edges[2 * row + 1], edges[2 * row + 2]
        text_at = start + _ATTRIBUTE_LENGTH.size
        detail = None
        if text_at > end:
            detail = (
                f"expected {_ATTRIBUTE_LENGTH.size} length bytes, got {end - start}"
            )
        else:
            (length,) = _ATTRIBUTE_LENGTH.unpack_from(run, start)
            if not 0 <= length <= end - text_at:
                detail = f"length {length}, but {end - text_at} bytes follow"
        if detail is not None:
            bad = BadAttribute(row, f"attribute block: {detail}")
            count = row
            break
        text = str(run[text_at : text_at + length], "utf-8", "replace")
        if has_properties[row]:
            keys[row], pairs, texts[row] = split_properties(text)
            headers[row] = pairs or None
        else:
            texts[row] = text
        edges[2 * row + 1] = text_at + length
    return (
        pa.array(texts[:count], pa.string()),
        pa.array(keys[:count], pa.binary()),
        pa.array(headers[:count], HEADERS),
        bad,
    )


def partition_of(row: Any) -> TopicPartition:
    """Return the partition of a row, a Spark `Row` or a mapping."""
    return TopicPartition(row["topic"], BrokerId(row["broker_id"]), row["partition"])
