"""The Spark source and sink; importing the package itself takes no Spark, no Arrow."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Load `register` when it is asked for: it takes Spark."""
    if name == "register":
        import metaq.spark.register as found  # noqa: PLC0415  # it takes Spark

        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
