"""A Java machine and a Spark session for applications on a set."""

from tests.java.conftest import jvm
from tests.spark.conftest import spark

__all__ = ["jvm", "spark"]
