"""The latest message of each key: a Delta table that follows keyed topics.

    latest = LatestTable("/latest/orders")
    rows.writeStream.foreachBatch(latest.write).start(checkpointLocation=...)

A batch is one commit: it inserts, replaces and deletes rows by topic and key, and has
the number of the batch as a version of Delta's application transactions. A batch that
Spark repeats is left out, no matter what was killed when.
"""

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, Transaction
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from metaq.pipeline.errors import ArchiveError
from metaq.pipeline.jobs.archive_store import (
    compact_table,
    may_lose,
    require_plain,
    root_of,
    table_errors,
)
from metaq.pipeline.jobs.compact import FILE_BYTES
from metaq.spark.columns import ROW_SCHEMA, partition_of
from metaq.spark.errors import RowError
from metaq.spark.schema import ROW_DDL

APPLICATION: Final = "metaq latest"
"""Start of the name under which the table has the last batch of a query."""
QUERY_ID: Final = "sql.streaming.queryId"
"""Local property that Spark sets while a batch is written."""
SMALL_FILES_MAX: Final = 32
"""When the table has so many smaller files than `FILE_BYTES`, they are put together."""

_SAME_PLACE: Final = (
    "(source.broker_id = target.broker_id AND source.partition = target.partition)"
)
_IS_NEWER: Final = (
    f"(({_SAME_PLACE} AND source.offset > target.offset) OR (NOT {_SAME_PLACE}"
    " AND coalesce(source.timestamp >= target.timestamp, true)))"
)


class LatestTable:
    """One table; one query at a time writes it. Lives on the driver, one thread.

    A message replaces the row of its topic and key if it comes after it in the
    partition. Producers put the messages of one key into one partition; where they lie
    in several, the greater timestamp counts. A message without data, a tombstone,
    deletes the row of its key.
    """

    def __init__(self, path: str, *, file_bytes: int = FILE_BYTES) -> None:
        """Name the table, which need not exist yet.

        Args:
            path: path or URL of its directory.
            file_bytes: many small files are put together up to about that size.

        Raises:
            ArchiveError: it is none that Spark and the table's library can read.
        """
        self.root: Final = root_of(path)
        self._file_bytes = file_bytes

    def write(self, batch: DataFrame, number: int) -> None:
        """Take in one batch; one that the table has already is left out.

        The latest message of each key of the batch goes through the driver's memory:
        `maxOffsetsPerTrigger` and `maxBytesPerTrigger` bound it.

        Args:
            batch: rows of the source, as `foreachBatch` hands them over.
            number: of the batch in its query.

        Raises:
            RowError: a message has no key.
            ArchiveError: the table cannot be written, or is another one, such as an
                archive, or another query wrote it in the same moment.
        """
        context = batch.sparkSession.sparkContext
        name = f"{APPLICATION} {context.getLocalProperty(QUERY_ID) or ''}".strip()
        with table_errors(self.root):
            table = DeltaTable.create(self.root, ROW_SCHEMA, mode="ignore")
            require_plain(table, self.root)
            _require_columns(table, self.root)
            done = table.transaction_version(name)
        if done is not None and done >= number:
            return
        rows = _keyed(_latest_of(batch).toArrow())
        if rows.num_rows:
            with table_errors(self.root):
                _merge(table, rows, Transaction(name, number))
            with may_lose(self.root):
                _compact(table, self.root, self._file_bytes)


def _merge(table: DeltaTable, rows: pa.Table, progress: Transaction) -> None:
    (
        table.merge(
            rows,
            "source.topic = target.topic AND source.key = target.key",
            source_alias="source",
            target_alias="target",
            commit_properties=CommitProperties(app_transactions=[progress]),
        )
        .when_matched_delete(f"source.is_tombstone AND {_IS_NEWER}")
        .when_matched_update_all(
            f"NOT source.is_tombstone AND {_IS_NEWER}", except_cols=["is_tombstone"]
        )
        .when_not_matched_insert_all(
            "NOT source.is_tombstone", except_cols=["is_tombstone"]
        )
        .execute()
    )
    table.update_incremental()


def _compact(table: DeltaTable, root: str, file_bytes: int) -> None:
    """Put files together when there are many small ones."""
    sizes = pa.table(table.get_add_actions())["size_bytes"]
    small_count = pc.sum(pc.less(sizes, file_bytes)).as_py() or 0
    if small_count >= SMALL_FILES_MAX:
        compact_table(table, root, file_bytes)
        table.vacuum(dry_run=False)


def _latest_of(batch: DataFrame) -> DataFrame:
    """Return the last message of each key, and whether it is a tombstone."""
    whole = sf.struct(*ROW_SCHEMA.names).alias("row")
    of_place = batch.groupBy("topic", "key", "broker_id", "partition").agg(
        sf.max_by(whole, "offset").alias("row")
    )
    order = sf.struct("row.timestamp", "row.offset")
    return (
        of_place.groupBy("topic", "key")
        .agg(sf.max_by("row", order).alias("row"))
        .select("row.*", sf.expr("octet_length(row.value) = 0").alias("is_tombstone"))
    )


def _require_columns(table: DeltaTable, root: str) -> None:
    """Refuse a table of something else, whose rows a merge would replace and delete."""
    names = [field.name for field in table.schema().fields]
    if names != ROW_SCHEMA.names:
        raise ArchiveError(
            f"{root}: expected a table of latest messages, with the columns"
            f" {', '.join(ROW_SCHEMA.names)}, got {', '.join(names)}"
        )


def _keyed(rows: pa.Table) -> pa.Table:
    """Return a copy of the rows, which all have a key.

    PySpark before 4.2 sends lists without elements and leaves their offsets out, which
    `deltalake` reads all the same. A copy has them.
    """
    keyed = rows.filter(rows["key"].is_valid())
    if keyed.num_rows < rows.num_rows:
        (row,) = rows.filter(rows["key"].is_null()).slice(0, 1).to_pylist()
        raise RowError(
            f"{partition_of(row)}: message at offset {row['offset']} has no key: a"
            " table of the latest messages needs one"
        )
    return keyed


def read_latest(spark: SparkSession, path: str) -> DataFrame:
    """Return the latest message of each key, in no order.

    Args:
        spark: the session.
        path: path or URL of the table.

    Returns:
        The columns of the source. Batches that are written later are not seen.

    Raises:
        ArchiveError: there is no table, or Spark's Parquet reader cannot read it.
    """
    root = root_of(path)
    with table_errors(root):
        if not DeltaTable.is_deltatable(root):
            raise ArchiveError(f"{root}: no table: there is no _delta_log")
        table = DeltaTable(root)
        require_plain(table, root)
        files = table.file_uris()
    if not files:
        return spark.createDataFrame([], ROW_DDL)
    return spark.read.schema(ROW_DDL).parquet(*files)
