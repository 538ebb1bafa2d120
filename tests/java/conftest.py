"""One Java machine, one ZooKeeper and one broker for most tests of this package."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import py4j.java_gateway
import pytest
from py4j.protocol import get_return_value

from metaq.client import Client
from tests.integration.conftest import (
    ZooKeeperServer,
    make_root,
    zookeeper,
    zookeeper_alone,
    zookeeper_server,
)
from tests.java.client import JavaClient
from tests.java.jars import (
    CLIENT,
    CLIENT_EXTENSION,
    LOG4J,
    SERVER,
    NoJarsError,
    find_jars,
)
from tests.java.jvm import Jvm
from tests.matrix.scene import broker_arguments
from tests.rigs.process import BrokerProcess
from tests.rigs.waiting import wait_until
from tests.sampling import IS_QUICK

__all__ = ["zookeeper", "zookeeper_alone", "zookeeper_server"]

TOPICS = dict.fromkeys(
    [
        "bytes",
        "keyed",
        "closed",
        "counted",
        "direct",
        "oneway",
        "transactions",
        "wrong",
        "failing",
        "rejected",
        "small",
        "filtered",
        "latest",
        "forms",
        "filed",
        "everybody",
    ],
    1,
) | dict.fromkeys(["browsed", "rounds", "sifted", "worked", "worked-by-name"], 3)
"""Of the shared broker: most tests have one of their own."""


collect_ignore_glob = ["test_*.py"] if IS_QUICK else []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is here for what it is; pardon Py4J the sockets that it leaves."""
    for item in items:
        if item.nodeid.startswith("tests/java/"):
            item.add_marker(pytest.mark.java)
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.zookeeper)
            item.add_marker(pytest.mark.timeout(900))
            for text in ("ignore:unclosed <socket", "ignore:.*<socket.socket fd="):
                item.add_marker(pytest.mark.filterwarnings(text))


def until_registered(broker: BrokerProcess, times: int = 1) -> None:
    """Wait until it has registered so often: Java looks for brokers once."""
    wait_until(lambda: broker.read_log().count(" registered: broker=") >= times)


@pytest.fixture(scope="module", autouse=True)
def plain_py4j() -> Iterator[None]:
    """Undo what PySpark does to Py4J for the whole process, as long as we need it.

    Whatever any Java machine throws, the end of an iteration among it, PySpark looks up
    by its number in the machine of Spark. Where that has an error of that number, it is
    raised instead.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(py4j.java_gateway, "get_return_value", get_return_value)
        yield


@pytest.fixture(scope="session")
def jvm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jvm]:
    """Return a machine with MetaQ's Java client; skip where there can be none."""
    try:
        jars = find_jars(CLIENT, CLIENT_EXTENSION, LOG4J)
    except NoJarsError as error:
        pytest.skip(str(error))
    with Jvm(jars, tmp_path_factory.mktemp("java-home")) as machine:
        yield machine


@pytest.fixture(scope="session")
def server_jars() -> list[Path]:
    """Return what MetaQ's own broker needs; skip where it cannot be had."""
    try:
        return find_jars(SERVER, LOG4J)
    except NoJarsError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def new_root(zookeeper_server: ZooKeeperServer) -> Callable[[], str]:
    """Return what makes connection strings, each with a root of its own."""
    numbers = itertools.count(1)

    def make() -> str:
        return make_root(zookeeper_server, f"/server-{next(numbers)}")

    return make


@pytest.fixture(scope="session")
def java_zookeeper(zookeeper_server: ZooKeeperServer) -> str:
    """A connection string whose root is that of the shared broker."""
    return make_root(zookeeper_server, "/java")


@pytest.fixture(scope="session")
def java_broker(
    java_zookeeper: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BrokerProcess]:
    """Return the broker shared by tests; none stops it."""
    with BrokerProcess(
        tmp_path_factory.mktemp("java") / "broker",
        topic="unused",
        arguments=broker_arguments(java_zookeeper, 0, TOPICS),
    ) as broker:
        until_registered(broker)
        yield broker


@pytest.fixture
def java(
    jvm: Jvm, java_zookeeper: str, java_broker: BrokerProcess
) -> Iterator[JavaClient]:
    """Return a Java session factory on the shared broker."""
    with JavaClient(jvm, java_zookeeper) as client:
        yield client


@pytest.fixture
def ours(java_zookeeper: str, java_broker: BrokerProcess) -> Iterator[Client]:
    """Return a client of ours on the same broker."""
    with Client(java_zookeeper) as client:
        yield client
