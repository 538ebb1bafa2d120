"""Make the formats known to a Spark session.

Where this package is installed nobody has to: PySpark looks for top-level modules named
`pyspark_…` with a class `DefaultSource`, and there is one for each format. Registration
by hand is for sessions in which that look-up is switched off, and for code that is
shipped with `addPyFiles`.
"""

from typing import Final

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource

from metaq.spark.segments import SegmentsDataSource
from metaq.spark.source import MetaqDataSource

FORMATS: Final[tuple[type[DataSource], ...]] = (
    MetaqDataSource,
    SegmentsDataSource,
)
"""One class per format."""
_ALREADY_THERE: Final = "DATA_SOURCE_ALREADY_EXISTS"


def register(spark: SparkSession) -> None:
    """Register every format with a session; a second call changes nothing.

    The executors need this package too: installed, or shipped with the query.
    """
    for source in FORMATS:
        try:
            spark.dataSource.register(source)
        except PySparkException as error:
            # Spark 4.0 registers no format anew that it has found by its name.
            if error.getCondition() != _ALREADY_THERE:
                raise
