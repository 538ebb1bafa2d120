"""The accept loop: caps, exhaustion, closing."""

import asyncio
import errno
import logging
import resource
import socket
from collections.abc import Awaitable, Callable
from contextlib import closing

import pytest

from metaq.net.listener import Listener, ListenError, limit_accept_errors
from tests.rigs.inside import wrap_socket
from tests.rigs.waiting import until


class Rig:
    def __init__(self, count_max: int = 100, per_host_max: int = 0) -> None:
        self.accepted: list[tuple[socket.socket, str]] = []
        self.errors: list[BaseException] = []
        self.listener = Listener(
            loop=asyncio.get_running_loop(),
            on_connection=self._on_connection,
            pause_s=0.01,
            connection_count_max=count_max,
            connection_count_per_host_max=per_host_max,
        )
        self.port = self.listener.open("", 0)
        self.clients: list[socket.socket] = []

    def _on_connection(self, sock: socket.socket, host: str) -> None:
        if self.errors:
            raise self.errors.pop()
        self.accepted.append((sock, host))

    def connect(self) -> socket.socket:
        client = socket.create_connection(("127.0.0.1", self.port))
        client.settimeout(30)
        self.clients.append(client)
        return client

    def close(self) -> None:
        self.listener.close()
        self.listener.close()
        for sock in (*self.clients, *(sock for sock, _ in self.accepted)):
            sock.close()


def run(scenario: Callable[[Rig], Awaitable[None]], **caps: int) -> None:
    async def main() -> None:
        rig = Rig(**caps)
        try:
            await scenario(rig)
        finally:
            rig.close()

    asyncio.run(main())


def test_connections_are_handed_over_with_their_options() -> None:
    """Accepted sockets do not delay small packets, and notice dead peers."""

    async def scenario(rig: Rig) -> None:
        rig.connect()
        await until(lambda: rig.accepted)
        sock, _host = rig.accepted[0]
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert rig.listener.statistics().open_count == 1

    run(scenario)


@pytest.mark.parametrize("caps", [{"count_max": 2}, {"per_host_max": 2}])
def test_one_connection_too_many_is_closed_and_counted(caps: dict[str, int]) -> None:
    """Both caps refuse by closing; room made by `forget` is given again."""

    async def scenario(rig: Rig) -> None:
        for _ in range(2):
            rig.connect()
        third = rig.connect()
        assert await asyncio.to_thread(third.recv, 1) == b""
        assert rig.listener.statistics().refused_count == 1
        assert len(rig.accepted) == 2
        rig.listener.forget(rig.accepted[0][1])
        rig.connect()
        await until(lambda: len(rig.accepted) == 3)

    run(scenario, **caps)


def test_accepting_pauses_when_descriptors_run_out() -> None:
    """EMFILE: counted, no busy loop, and what waited is accepted afterwards."""
    calls = 0

    class Exhausted:
        """A listening socket whose first accept fails."""

        def __init__(self, sock: socket.socket) -> None:
            self._sock = sock

        def accept(self) -> tuple[socket.socket, object]:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise OSError(errno.EMFILE, "Too many open files")
            return self._sock.accept()

        def __getattr__(self, name: str) -> object:
            return getattr(self._sock, name)

    async def scenario(rig: Rig) -> None:
        wrap_socket(rig.listener, Exhausted)
        rig.connect()
        await until(lambda: rig.listener.statistics().exhausted_count)
        await until(lambda: rig.accepted)
        assert rig.listener.statistics().exhausted_count == 1
        assert calls <= 4

    run(scenario)


def test_a_lack_of_descriptors_that_lasts_is_logged_at_its_begin_and_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Twice a second would fill the disk; the statistics have it in between."""
    caplog.set_level(logging.INFO, "metaq.net.listener")
    is_lacking = [True]

    class Exhausted:
        """A listening socket whose accepts fail for a while."""

        def __init__(self, sock: socket.socket) -> None:
            self._sock = sock

        def accept(self) -> tuple[socket.socket, object]:
            if is_lacking:
                raise OSError(errno.EMFILE, "Too many open files")
            return self._sock.accept()

        def __getattr__(self, name: str) -> object:
            return getattr(self._sock, name)

    async def scenario(rig: Rig) -> None:
        wrap_socket(rig.listener, Exhausted)
        rig.connect()
        await until(lambda: rig.listener.statistics().exhausted_count > 2)
        assert rig.listener.statistics().problem == (
            "connections wait, and 0 are open: Too many open files"
        )
        is_lacking.clear()
        await until(lambda: rig.accepted)
        assert not rig.listener.statistics().problem

    run(scenario)
    begin, end = caplog.messages
    assert begin.startswith("accept paused, no descriptors or memory left: error=Too")
    assert end.startswith("accepting again: pauses=")


def test_a_server_of_asyncio_logs_a_lack_of_descriptors_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It logged a traceback for each place in its backlog, some hundred a second."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        limit_accept_errors(loop)
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        with closing(server), socket.socket() as peer:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
            try:
                peer.connect(server.sockets[0].getsockname())
                await until(lambda: caplog.messages)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        loop.call_exception_handler({"message": "a bug", "exception": OSError(24)})

    with caplog.at_level(logging.ERROR):
        asyncio.run(scenario())
    lack, other = caplog.messages
    assert lack.startswith("accept paused, no descriptors or memory left: error=[Errno")
    assert "address=('127.0.0.1', " in lack
    assert "a bug" in other


@pytest.mark.parametrize("place", ["accept", "hand over"])
def test_accepting_pauses_when_memory_runs_out(place: str) -> None:
    """Counted, no busy loop, and a connection that could not be taken is closed."""

    class NoMemory:
        """A listening socket whose first accept fails."""

        def __init__(self, sock: socket.socket) -> None:
            self._sock = sock
            self._errors = iter([MemoryError()])

        def accept(self) -> tuple[socket.socket, object]:
            for error in self._errors:
                raise error
            return self._sock.accept()

        def __getattr__(self, name: str) -> object:
            return getattr(self._sock, name)

    async def scenario(rig: Rig) -> None:
        listener = rig.listener
        if place == "accept":
            wrap_socket(listener, NoMemory)
        else:
            rig.errors.append(MemoryError())
        first = rig.connect()
        await until(lambda: listener.statistics().exhausted_count)
        rig.connect()
        await until(lambda: rig.accepted)
        statistics = listener.statistics()
        assert statistics.exhausted_count == 1
        if place == "hand over":
            assert await asyncio.to_thread(first.recv, 1) == b""
        await until(lambda: listener.statistics().open_count == len(rig.accepted))

    run(scenario)


def test_a_port_in_use_is_one_sentence() -> None:
    """A taken port is a ListenError that names it."""

    async def scenario(rig: Rig) -> None:
        other = Listener(
            loop=asyncio.get_running_loop(),
            on_connection=lambda _sock, _host: None,
            connection_count_max=1,
            connection_count_per_host_max=0,
        )
        with pytest.raises(ListenError) as caught:
            other.open("127.0.0.1", rig.port)
        assert str(caught.value) == (
            f"cannot listen on 127.0.0.1:{rig.port}: Address already in use"
        )
        with pytest.raises(ListenError, match="cannot listen on no such host:1: "):
            other.open("no such host", 1)

    run(scenario)


def test_after_close_nobody_is_let_in() -> None:
    """A closed listener refuses; open connections stay."""

    async def scenario(rig: Rig) -> None:
        rig.connect()
        await until(lambda: rig.accepted)
        rig.listener.close()
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", rig.port), timeout=30)
        rig.accepted[0][0].send(b"still here")
        assert await asyncio.to_thread(rig.clients[0].recv, 10) == b"still here"

    run(scenario)
