"""The Spark source and sink; importing the package itself takes no Spark, no Arrow.

Users import `register`, and of the modules `columns`, `errors`, `letters`, `offsets`,
`options`, `schema`, `topics`, `values` and `segments.checks`: jobs of their own, and
`metaq.pipeline`, need no others.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """Load `register` when it is asked for: it takes Spark."""
    if name == "register":
        from metaq.spark.data_source import register  # noqa: PLC0415  # it takes Spark

        return register
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
