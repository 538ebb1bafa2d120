"""The Spark session and the ZooKeeper of `tests/spark`, for these tests as well."""

from tests.spark.conftest import (
    pytest_collection_modifyitems,
    spark,
    zookeeper,
    zookeeper_server,
)

__all__ = ["pytest_collection_modifyitems", "spark", "zookeeper", "zookeeper_server"]
