"""A real ZooKeeper for the tests: a container where Docker answers, else a child.

`zookeeper` is one server for the whole run, with a root of its own per test.
`zookeeper_alone` is a server that one module may stop, freeze and wipe.
"""

import contextlib
import itertools
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
from kazoo.client import KazooClient

from metaq.testing.servers import reserve_port
from metaq.zk.embedded import EmbeddedZooKeeperError, find_classpath, find_java
from tests.rigs.ports import reserved_port
from tests.rigs.zookeeper import HandledZooKeeper

IMAGE = "zookeeper:3.9"
_numbers = itertools.count(1)


class ZooKeeperServer(Protocol):
    """Operations of tests on a server, however it runs."""

    @property
    def address(self) -> str: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...
    def kill(self) -> None: ...
    def restart(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def wipe(self) -> None: ...


class ContainerZooKeeper:
    """The same in a container; its port stays the same over restarts."""

    def __init__(self) -> None:
        from testcontainers.core.container import DockerContainer

        self._port = reserve_port(self)
        self._container = (
            DockerContainer(IMAGE)
            .with_bind_ports(2181, self._port)
            .with_env("ZOO_TICK_TIME", "500")
            .with_env("ZOO_CFG_EXTRA", "minSessionTimeout=1000 maxSessionTimeout=60000")
        )
        self._is_created = False

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def start(self) -> None:
        if self._is_created:
            self._container.get_wrapped_container().start()
        else:
            self._container.start()
            self._is_created = True
        client = KazooClient(self.address)
        client.start(timeout=60)
        client.stop()
        client.close()

    def stop(self) -> None:
        self._container.get_wrapped_container().stop()

    def kill(self) -> None:
        self._container.get_wrapped_container().kill()

    def restart(self) -> None:
        self.stop()
        self.start()

    def pause(self) -> None:
        self._container.get_wrapped_container().pause()

    def resume(self) -> None:
        self._container.get_wrapped_container().unpause()

    def wipe(self) -> None:
        self.remove()
        self._is_created = False

    def remove(self) -> None:
        self._container.stop()


def expire_session(address: str, session_id: int, password: bytes) -> None:
    """End a session, as the server would after its time-out.

    A second connection takes the session over and closes it in the same breath: the
    request to connect and the request to close travel in one segment. The owner may win
    the session back in between all the same, when a request of its own is under way; so
    it is done again until the server knows no such session.
    """
    while _end_session(address, session_id, password):
        pass


def _end_session(address: str, session_id: int, password: bytes) -> bool:
    """Take a session over and close it; False when the server does not know it."""
    connect = struct.pack(">iqiq", 0, 0, 10_000, session_id)
    connect += struct.pack(">i", len(password)) + password + b"\0"
    close_session = struct.pack(">ii", 1, -11)
    host, _, port = address.partition("/")[0].rpartition(":")
    answer = b""
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(
            b"".join(
                struct.pack(">i", len(part)) + part for part in (connect, close_session)
            )
        )
        with contextlib.suppress(ConnectionResetError):
            while piece := connection.recv(4096):
                answer += piece
    # Length, protocol version, granted time-out: 0 for a session that is over.
    return len(answer) < 12 or struct.unpack_from(">i", answer, 8)[0] > 0


def _docker_answers() -> bool:
    path = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    if not path.startswith("unix://"):
        return True
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(2)
        try:
            probe.connect(path.removeprefix("unix://"))
        except OSError:
            return False
    return True


def _servers(data_dir: Path) -> Iterator[ZooKeeperServer]:
    if _docker_answers():
        container = ContainerZooKeeper()
        try:
            container.start()
        except Exception as error:
            # An engine without the image and without a network to fetch it.
            print(f"no ZooKeeper container ({error}), the embedded server is used")
        else:
            yield container
            container.remove()
            return
    try:
        find_java()
        find_classpath()
    except EmbeddedZooKeeperError as error:
        pytest.skip(str(error))
    with reserved_port() as port, HandledZooKeeper(data_dir, port=port) as server:
        yield server


@pytest.fixture(scope="session")
def zookeeper_server(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ZooKeeperServer]:
    """The server shared by all tests; none stops it."""
    yield from _servers(tmp_path_factory.mktemp("zookeeper"))


@pytest.fixture
def zookeeper(zookeeper_server: ZooKeeperServer) -> str:
    """A connection string with a fresh root: `host:port/test-N`."""
    return make_root(zookeeper_server, f"/test-{next(_numbers)}")


def make_root(server: ZooKeeperServer, root: str) -> str:
    """Make a root; return a connection string that ends in it."""
    client = KazooClient(server.address)
    client.start()
    client.ensure_path(root)
    client.stop()
    client.close()
    return f"{server.address}{root}"


@pytest.fixture(scope="module")
def zookeeper_alone(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ZooKeeperServer]:
    """A server that the tests of one module may mistreat, running at their start."""
    yield from _servers(tmp_path_factory.mktemp("zookeeper-alone"))
