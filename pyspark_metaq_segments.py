"""Where PySpark finds `format("metaq-segments")`: it looks for this name and class."""

from metaq.spark.segments.data_source import (
    SegmentsDataSource as DefaultSource,
)

__all__ = ["DefaultSource"]
