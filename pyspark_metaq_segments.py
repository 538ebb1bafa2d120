"""Entry point of PySpark for `format("metaq-segments")`: it looks for this class."""

from metaq.spark.data_source import SegmentsDataSource as DefaultSource

__all__ = ["DefaultSource"]
