"""The floor of Spark's sinks and streams.

A sink that only counts the bytes of its batches, and a source of one prepared row per
micro-batch. What remains is Spark and its Python workers.
"""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType


def count_bytes(batches: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
    for batch in batches:
        assert batch.nbytes >= 0
    return WriterCommitMessage()


class FloorWriter(DataSourceArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return count_bytes(iterator)


class FloorStreamWriter(DataSourceStreamArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return count_bytes(iterator)

    def commit(self, messages: list[Any], batchId: int) -> None:
        """Do nothing."""

    def abort(self, messages: list[Any], batchId: int) -> None:
        """Do nothing."""


class FloorStreamReader(DataSourceStreamReader):
    def initialOffset(self) -> dict[str, int]:
        return {"rows": 0}

    def latestOffset(self, start: dict[str, int], limit: object) -> dict[str, int]:
        return {"rows": start["rows"] + 1}

    def partitions(
        self, start: dict[str, int], end: dict[str, int]
    ) -> list[InputPartition]:
        return [InputPartition(end["rows"])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pydict({"value": pa.array([b"x"], pa.binary())})


class FloorStream(DataSource):
    @classmethod
    def name(cls) -> str:
        return "metaq-floor-stream"

    def schema(self) -> str:
        return "value BINARY"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return FloorStreamReader()

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        return FloorWriter()

    def streamWriter(
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamArrowWriter:
        return FloorStreamWriter()
