"""Entry point of PySpark for `format("metaq")`: it looks for this name and class."""

from metaq.spark.data_source import MetaqDataSource as DefaultSource

__all__ = ["DefaultSource"]
