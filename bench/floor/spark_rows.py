"""The floor of a Spark read: a source that yields one prepared batch repeatedly.

It reads no file, checks nothing and decodes nothing. What remains is Spark, and the
transfer of bytes from a Python worker into the query.
"""

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from metaq.spark.columns import ROW_SCHEMA
from metaq.spark.rows import BATCH_RECORDS_MAX

ROW = {
    "topic": "bench",
    "broker_id": 0,
    "partition": 0,
    "offset": 0,
    "message_id": 0,
    "timestamp": 0,
    "attribute": None,
    "flag": 0,
}


class FloorSource(DataSource):
    """Options: `tasks`, `batches` of `BATCH_RECORDS_MAX` rows, `bytes` per value."""

    @classmethod
    def name(cls) -> str:
        return "metaq-floor"

    def schema(self) -> StructType:
        return from_arrow_schema(ROW_SCHEMA)

    def reader(self, schema: StructType) -> DataSourceReader:
        return FloorReader({name: int(text) for name, text in self.options.items()})


class FloorReader(DataSourceReader):
    def __init__(self, options: dict[str, int]) -> None:
        self.options = options

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(i) for i in range(self.options["tasks"])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        row = {**ROW, "value": b"x" * self.options["bytes"]}
        batch = pa.RecordBatch.from_pylist([row] * BATCH_RECORDS_MAX, schema=ROW_SCHEMA)
        for _ in range(self.options["batches"]):
            yield batch
