"""Stands before the module of this name: what PySpark finds in it dies at its steps."""

from tests.spark.kills.steps import DyingDataSource as DefaultSource

__all__ = ["DefaultSource"]
