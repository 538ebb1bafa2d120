"""One Spark session for all tests of this package: it takes seconds to start."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.integration.conftest import ZooKeeperServer, make_root, zookeeper_server
from tests.rigs.fork_server import executable
from tests.spark.classes import VERSION, use_stored

__all__ = ["zookeeper_server"]

use_stored()

ROOT = Path(__file__).parents[2]
HAS_CONNECT = VERSION >= (4, 2)
CONNECT = {
    "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
    "spark.connect.grpc.binding.address": "127.0.0.1",
    "spark.connect.grpc.binding.port": "0",
}
"""Settings of a session that serves clients of Spark Connect as well."""

# Of the sessions of child processes as well: not every machine knows its own name.
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Pardon PySpark before 4.2 for sockets that it leaves to the garbage."""
    if VERSION >= (4, 2):
        return
    for item in items:
        if item.nodeid.startswith(("tests/spark/", "tests/pipeline/")):
            for text in ("ignore:unclosed <socket", "ignore:.*<socket.socket fd="):
                item.add_marker(pytest.mark.filterwarnings(text))


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """Return a session on two local cores, whose Python workers find this checkout."""
    with pytest.MonkeyPatch.context() as patch:
        before = os.environ.get("PYTHONPATH")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), before])))
        patch.setenv("PYSPARK_PYTHON", executable())
        interrupt = signal.getsignal(signal.SIGINT)
        builder = SparkSession.builder
        for name, value in (CONNECT if HAS_CONNECT else {}).items():
            builder = builder.config(name, value)
        session = (
            builder.master("local[2]")
            .appName("metaq tests")
            .config("spark.ui.enabled", "false")
            # It lives as long as the run, and keeps something of each query.
            .config("spark.driver.memory", "2g")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.sql.shuffle.partitions", "2")
            .config("spark.sql.session.timeZone", "UTC")
            .getOrCreate()
        )
        # Spark takes Ctrl-C for itself; other tests of this process send it too.
        signal.signal(signal.SIGINT, interrupt)
        yield session
        session.stop()


@pytest.fixture(scope="module")
def zookeeper(zookeeper_server: ZooKeeperServer, request: pytest.FixtureRequest) -> str:
    """A connection string of the shared server, with a root for each module."""
    return make_root(zookeeper_server, f"/{request.path.stem}")
