"""The proxy: everything passes, or exactly what was asked for does not."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from metaq.protocol.commands import Version
from metaq.testing.fake_broker import FakeBroker
from metaq.testing.proxy import BUFFER_BYTES_MAX, Direction, Proxy
from tests.rigs.waiting import wait_until
from tests.testing.sockets import PATIENCE_S, Wire


class Echo:
    """A server that sends back what it gets, and counts it."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.received = 0
        self.threads: list[threading.Thread] = []
        self._spawn(self._accept)

    def _spawn(self, work: Callable[..., None], *args: object) -> None:
        self.threads.append(threading.Thread(target=work, args=args, daemon=True))
        self.threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _peer = self.listener.accept()
                self._spawn(self._serve, sock)

    def _serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            while data := sock.recv(65536):
                self.received += len(data)
                sock.sendall(data)

    def stop(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for thread in self.threads:
            thread.join(PATIENCE_S)


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.stop()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[Proxy]:
    with Proxy("127.0.0.1", echo.port) as made:
        yield made


@pytest.fixture
def client(proxy: Proxy) -> Iterator[socket.socket]:
    with connect(proxy) as sock:
        yield sock


def connect(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE_S)


def receive(sock: socket.socket, size_bytes: int) -> bytes:
    data = b""
    while len(data) < size_bytes:
        piece = sock.recv(65536)
        assert piece, "closed"
        data += piece
    return data


def test_everything_passes(proxy: Proxy, client: socket.socket) -> None:
    """Bytes both ways, then the end of the connection, and all is counted."""
    client.sendall(b"hello")
    assert receive(client, 5) == b"hello"
    client.shutdown(socket.SHUT_WR)
    assert client.recv(1) == b""
    wait_until(lambda: proxy.statistics().open_connection_count == 0)
    seen = proxy.statistics()
    assert (seen.connection_count, seen.to_server_bytes, seen.to_client_bytes) == (
        1,
        5,
        5,
    )


def test_more_than_the_buffer_passes(proxy: Proxy, client: socket.socket) -> None:
    """A reader that comes late gets every byte, in order."""
    data = bytes(range(256)) * (16 * BUFFER_BYTES_MAX // 256)
    sender = threading.Thread(target=client.sendall, args=(data,), daemon=True)
    sender.start()
    assert receive(client, len(data)) == data
    sender.join(PATIENCE_S)


@pytest.mark.parametrize(
    ("direction", "arrives"), [(Direction.BOTH, False), (Direction.TO_CLIENT, True)]
)
def test_a_stall_holds_one_direction_or_both(
    proxy: Proxy,
    echo: Echo,
    client: socket.socket,
    direction: Direction,
    arrives: bool,
) -> None:
    """Nothing comes back while it lasts, and nothing is lost by it."""
    proxy.stall(direction)
    client.sendall(b"hello")
    if arrives:
        wait_until(lambda: echo.received == 5)
    client.settimeout(0.02)
    with pytest.raises(TimeoutError):
        client.recv(1)
    assert echo.received == (5 if arrives else 0)
    client.settimeout(PATIENCE_S)
    proxy.pass_all()
    assert receive(client, 5) == b"hello"


def test_a_stall_is_bounded_and_hides_the_end(
    proxy: Proxy, echo: Echo, client: socket.socket
) -> None:
    """The proxy stops reading; a client that leaves is not missed before it is over."""
    proxy.stall()
    with connect(proxy) as leaving:
        wait_until(lambda: proxy.statistics().connection_count == 2)
        leaving.settimeout(0.05)
        with pytest.raises(TimeoutError):
            leaving.sendall(bytes(64 * BUFFER_BYTES_MAX))
    client.sendall(b"bye")
    client.shutdown(socket.SHUT_WR)
    assert echo.received == 0
    proxy.pass_all()
    assert receive(client, 3) == b"bye"
    assert client.recv(1) == b""
    wait_until(lambda: proxy.statistics().open_connection_count == 0)


def test_a_trickle_passes_small_pieces(proxy: Proxy, client: socket.socket) -> None:
    """Piece by piece, until it may go on at once."""
    proxy.trickle(2, interval_s=600.0, direction=Direction.TO_CLIENT)
    client.sendall(b"0123456789")
    assert client.recv(65536) == b"01"
    proxy.trickle(3, interval_s=0.001)
    assert receive(client, 8) == b"23456789"
    proxy.trickle(1, interval_s=600.0)
    client.sendall(b"abc")
    proxy.pass_all()
    assert receive(client, 3) == b"abc"


def test_a_cut_is_a_reset_and_new_connections_pass(
    proxy: Proxy, client: socket.socket
) -> None:
    """Both ends of what was open see it."""
    client.sendall(b"x")
    receive(client, 1)
    proxy.cut()
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    wait_until(lambda: proxy.statistics().open_connection_count == 0)
    with connect(proxy) as again:
        again.sendall(b"y")
        assert receive(again, 1) == b"y"


def test_refused_clients_can_come_back(proxy: Proxy, client: socket.socket) -> None:
    """Open connections go on; the port stays the same."""
    client.sendall(b"x")
    receive(client, 1)
    proxy.refuse()
    proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        connect(proxy)
    client.sendall(b"y")
    assert receive(client, 1) == b"y"
    proxy.accept()
    with connect(proxy) as again:
        again.sendall(b"z")
        assert receive(again, 1) == b"z"


def test_a_server_that_is_not_there_is_a_reset(proxy: Proxy, echo: Echo) -> None:
    """And counted; another server can take its place."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        proxy.retarget("127.0.0.1", nobody.getsockname()[1])
        # The reset may come while connecting.
        with pytest.raises(ConnectionResetError), connect(proxy) as sock:
            sock.recv(1)
    assert proxy.statistics().failed_count == 1
    proxy.retarget("127.0.0.1", echo.port)
    with connect(proxy) as sock:
        sock.sendall(b"x")
        assert receive(sock, 1) == b"x"


def test_a_reset_of_one_end_reaches_the_other() -> None:
    """A broker that cuts the connection cuts the client's."""
    with FakeBroker() as broker, Proxy("127.0.0.1", broker.port) as proxy:
        with Wire(proxy.address) as wire:
            assert wire.ask(Version(1)).opaque == 1
            broker.drop_connections()
            assert wire.is_ended()
        wait_until(lambda: proxy.statistics().open_connection_count == 0)


def test_a_start_that_fails_leaves_no_thread_behind(echo: Echo) -> None:
    """An end is not needed for a `with` that did not start."""
    proxy = Proxy("127.0.0.1", echo.port)
    with proxy:
        pass
    with (
        socket.create_server(("127.0.0.1", proxy.port)),
        pytest.raises(OSError, match="in use"),
    ):
        proxy.start()
    assert "proxy" not in {thread.name for thread in threading.enumerate()}


def test_stop_resets_what_is_open_and_may_be_repeated(echo: Echo) -> None:
    """Also while a direction is stalled."""
    proxy = Proxy("127.0.0.1", echo.port)
    proxy.stop()
    proxy.start()
    with connect(proxy) as sock:
        sock.sendall(b"x")
        receive(sock, 1)
        proxy.stall()
        proxy.stop()
        proxy.stop()
        with pytest.raises(ConnectionResetError):
            sock.recv(1)
