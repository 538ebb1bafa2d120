"""`format("metaq-segments")`: segment files straight from disk, as a batch source.

    spark.read.format("metaq-segments").load("/data/metaq")

Rows are those of `format("metaq")`; each process of Spark imports the part that it is
asked for.
"""

from pyspark.sql.datasource import DataSource, DataSourceReader
from pyspark.sql.types import StructType

from metaq.spark.errors import one_sentence


class SegmentsDataSource(DataSource):
    """The format; Spark makes one per query, on the driver."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "metaq-segments"

    @one_sentence
    def schema(self) -> str:
        """Return the columns of every row.

        Raises:
            OptionError: An option is wrong.
        """
        from metaq.spark.segments.segment_reader import (  # noqa: PLC0415  # see the top
            declared_columns,
        )

        return declared_columns(self.options)

    @one_sentence
    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader that plans and reads.

        Raises:
            OptionError: An option is wrong, or the user asked for other columns.
        """
        from metaq.spark.segments.segment_reader import (  # noqa: PLC0415  # see the top
            segments_reader,
        )

        return segments_reader(self.options, schema)
