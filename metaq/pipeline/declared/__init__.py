"""Spark Declarative Pipelines: run a project repeatedly, and report on it."""

from importlib.metadata import version as installed_version
from importlib.util import find_spec

from metaq.errors import ConfigError
from metaq.pipeline.installed import INSTALL, require_version


def require_declarative() -> None:
    """Refuse an installation without Spark Declarative Pipelines.

    Raises:
        ConfigError: a library is missing, too old, or too new.
    """
    require_version((4, 1), "a declared pipeline")
    wanted = ("pyspark", "grpc", "yaml")
    if any(find_spec(name) is None for name in wanted):
        raise ConfigError(
            "a declared pipeline requires PySpark 4.1 or newer with Spark Connect,"
            f" which is not installed: {INSTALL}"
        )
    try:
        # Fails if functions of PySpark that are not public have changed.
        import metaq.pipeline.declared.updates  # noqa: F401, PLC0415  # are they there?
    except ImportError as error:
        raise ConfigError(
            "a declared pipeline requires PySpark 4.1 to 4.3, and"
            f" {installed_version('pyspark')} differs ({error}): run it with"
            " spark-pipelines"
        ) from error
