"""Checks of the installation for pipelines; importing this module needs no Spark."""

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from importlib.util import find_spec
from typing import Final

from metaq.errors import ConfigError

INSTALL: Final = "pip install 'metaq[pipeline]'"
CONNECT: Final = "sc://"
"""Prefix of the address of a running Spark Connect server."""


def require_spark() -> None:
    """Raise ConfigError if Spark is not installed."""
    if find_spec("pyspark") is None:
        raise ConfigError(f"pipelines run on Spark, which is not installed: {INSTALL}")


def require_version(least: tuple[int, int], what: str) -> None:
    """Refuse an installed PySpark that is older.

    Args:
        least: the minimum version.
        what: subject of the error message.

    Raises:
        ConfigError: the installed PySpark is older.
    """
    try:
        found = installed_version("pyspark")
    except PackageNotFoundError:
        return
    if tuple(map(int, found.split(".")[:2])) < least:
        raise ConfigError(
            f"{what} requires PySpark {least[0]}.{least[1]} or newer, got {found}:"
            f" {INSTALL}"
        )
