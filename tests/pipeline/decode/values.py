"""Decoders of the tests of this folder, and values for them."""

import datetime as dt
import io
from typing import Any

import fastavro
import pyarrow as pa

from metaq.pipeline.decode.decoding import Decoder, decode_values
from metaq.pipeline.decode.text_values import CsvValues

TIME = pa.timestamp("us", tz="UTC")


FIELDS = pa.struct([("a", pa.int32()), ("t", TIME), ("b", pa.string())])


NOON = dt.datetime(2024, 5, 1, 12, tzinfo=dt.UTC)


LINE = r"(?P<t>\S+ \S+) (?P<b>[A-Z]+)(?: (?P<a>\d+))?"


OLD = {"type": "record", "name": "r", "fields": [{"name": "a", "type": "int"}]}


NEW = {
    "type": "record",
    "name": "r",
    "fields": [
        {"name": "a", "type": "int"},
        {"name": "b", "type": ["null", "string"], "default": None},
    ],
}


def decoded(
    decoder: Decoder, values: list[Any], required: pa.DataType | None = None
) -> list[Any]:
    """Return per value: its fields, its error as text, or None."""
    kind = decoder.kind if required is None else required
    found = decode_values(decoder, kind, pa.array(values, pa.binary()))
    found.validate(full=True)
    rows = found.to_pylist()
    assert not [row for row in rows if row["row"] is not None and row["error"]]
    return [row["error"] or row["row"] for row in rows]


def avro_record(schema: dict[str, Any], record: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), record)
    return out.getvalue()


def avro_value(schema: dict[str, Any], record: dict[str, Any]) -> bytes:
    """Return the single-object encoding."""
    canonical = fastavro.schema.to_parsing_canonical_form(schema)
    mark = fastavro.schema.fingerprint(canonical, "CRC-64-AVRO")
    return b"\xc3\x01" + bytes.fromhex(mark) + avro_record(schema, record)


def csv_values(kind: pa.DataType = FIELDS) -> CsvValues:
    return CsvValues(kind, ",")


def row(a: int | None, t: dt.datetime | None, b: str | None) -> dict[str, Any]:
    return {"a": a, "t": t, "b": b}
