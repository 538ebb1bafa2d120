"""Make the formats known to a Spark session: `metaq.spark.register(spark)`.

PySpark finds them by itself, too: it looks for top-level modules named `pyspark_…` with
a class `DefaultSource`, and there is one for each format. It looks in the Python that
it starts for its own work: `PYSPARK_PYTHON`, else `python3` on `PATH`. That is another
one where a script is run by its environment's own interpreter, and in a notebook, so
there the formats are registered by hand. The same holds for sessions in which that
look-up is switched off, and for code that is shipped with `addPyFiles`.
"""

import os
import sys
from types import ModuleType
from typing import Final

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource
from pyspark.sql.utils import is_remote

from metaq.spark.data_source import MetaqDataSource, SegmentsDataSource

FORMATS: Final[tuple[type[DataSource], ...]] = (
    MetaqDataSource,
    SegmentsDataSource,
)
"""One class per format."""
_ALREADY_THERE: Final = "DATA_SOURCE_ALREADY_EXISTS"


def register(spark: SparkSession) -> None:
    """Register every format with a session; a second call changes nothing.

    On a local master the Python workers of the session are this interpreter from now
    on, unless `PYSPARK_PYTHON` names another one. The executors of a cluster need this
    package too: installed, or shipped with the query.
    """
    # The driver of Spark Connect is another process, with workers of its own.
    if not is_remote() and "PYSPARK_PYTHON" not in os.environ:
        context = spark.sparkContext
        if (context.master or "").startswith("local"):
            context.pythonExec = sys.executable
    for source in FORMATS:
        try:
            spark.dataSource.register(source)
        except PySparkException as error:
            # Spark 4.0 registers no format anew that it has found by its name.
            if error.getCondition() != _ALREADY_THERE:
                raise


class _Callable(ModuleType):
    """Lets the module stand for its function: `metaq.spark.register(spark)`."""

    def __call__(self, spark: SparkSession) -> None:
        """Call `register`."""
        register(spark)


sys.modules[__name__].__class__ = _Callable
