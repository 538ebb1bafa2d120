"""The Spark source and sink; importing the package imports neither Spark nor Arrow.

Public for users' jobs and `metaq.pipeline`: `register`, and the modules `columns`,
`errors`, `letters`, `offsets`, `options`, `schema`, `topics`, `values` and
`segments.checks`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from metaq.spark.data_source import register as register
else:  # a checker of types would take any name

    def __getattr__(name: str) -> Any:
        """Import `register` on first use, because it imports Spark."""
        if name == "register":
            from metaq.spark.data_source import register  # noqa: PLC0415  # it takes Spark

            return register
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
