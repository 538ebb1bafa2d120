"""A declared pipeline as a service: the Spark that it runs on, and its updates.

Importing this takes PySpark 4.1 with Spark Connect: see `require_declarative`.
"""

import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from metaq.errors import ConfigError
from metaq.pipeline.declared import CONNECT
from metaq.pipeline.declared.updates import (
    CONNECT_SETTINGS,
    catalog_settings,
    connect_mode,
    server_url,
)
from metaq.pipeline.jobs.session import end_java, job_session

GATEWAY: Final = "PYSPARK_GATEWAY_PORT"
"""Variable by which `spark-submit` names a Java that runs already: it has no token of
ours, and does not end with us."""
TOKEN: Final = "SPARK_CONNECT_AUTHENTICATE_TOKEN"  # noqa: S105  # its name
"""Variable by which a Spark of ours and its client know each other: others on this
machine may not run code as us."""


@contextmanager
def connect_server(
    master: str, settings: Mapping[str, str], log: Path | None, directory: Path
) -> Iterator[str]:
    """Yield the address of Spark Connect: of a server that runs, or of our own.

    Args:
        master: URL of a Spark cluster, or the address of a server.
        settings: Spark's, for a server of our own.
        log: file for its log, or None.
        directory: of the project; tables and catalog are kept in it.

    Raises:
        ConfigError: this process has a Java of others.
        MetaqError: Spark does not start.
    """
    if master.startswith(CONNECT):
        with connect_mode():
            yield master
        return
    if GATEWAY in os.environ:
        raise ConfigError(
            "a declared pipeline starts a Java of its own: run this command by itself,"
            " not by spark-submit"
        )
    os.environ.setdefault(TOKEN, secrets.token_hex())
    # Of the driver's own Python processes, also where executors are others.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = {**CONNECT_SETTINGS, **catalog_settings(directory), **settings}
    try:
        with job_session(master, settings, log) as session, connect_mode():
            yield server_url(session.spark)
    finally:
        end_java()
