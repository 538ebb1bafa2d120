"""The parts used inside kazoo are there, or refused with the releases to install."""

import asyncio
import errno
import fcntl
import itertools
import re
import resource
import socket
import threading
import tomllib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from kazoo import __version__ as kazoo_version
from kazoo.handlers import utils
from kazoo.protocol.connection import ConnectionHandler
from kazoo.protocol.states import KazooState

from metaq.client import Client
from metaq.clock import SystemClock
from metaq.errors import ConfigError
from metaq.zk._kazoo import KazooCoordinator
from metaq.zk._kazoo_client import KAZOO_KNOWN, CloseOrder, begin_closer, make_client
from tests.rigs.waiting import wait_until

ROOT = Path(__file__).parents[2]


def make(hosts: str = "127.0.0.1:1", **more: Any) -> KazooCoordinator:
    clock = SystemClock()
    return KazooCoordinator(hosts, session_timeout_ms=1000, clock=clock, **more)


@pytest.mark.parametrize("host", ["zk1..com", ".zk1", "z" * 64, "\udcff"])
def test_a_name_that_no_resolver_takes_is_refused(host: str) -> None:
    """It would end kazoo's thread, without a word."""
    with pytest.raises(ConfigError, match="expected host:port,host:port/root, got"):
        make(f"127.0.0.1:1,{host}:2181/root")


@pytest.mark.parametrize("hosts", [["127.0.0.1:2181"], b"127.0.0.1:2181", 2181])
def test_what_is_no_text_is_refused(hosts: Any) -> None:
    with pytest.raises(TypeError, match="zookeeper: expected str, got"):
        Client(hosts)


def test_the_kazoo_that_is_installed_is_one_that_is_known() -> None:
    assert make_client("127.0.0.1:1", 1.0).greeted_timeout_ms == 0


def invoke_otherwise(_self: Any, request: Any) -> Any:
    return request


@pytest.mark.parametrize(
    ("invoke", "got"), [(invoke_otherwise, r"\(request\)"), (None, r"\(\)")]
)
def test_a_kazoo_that_greets_otherwise_is_refused(
    monkeypatch: pytest.MonkeyPatch, invoke: Any, got: str
) -> None:
    """A session would be believed in for a time that the server never granted."""
    monkeypatch.setattr(ConnectionHandler, "_invoke", invoke)
    with pytest.raises(
        ConfigError,
        match=rf"kazoo {re.escape(kazoo_version)} .*"
        rf"_invoke\(timeout, request, xid\), got {got}.*"
        rf"pip install '{re.escape(KAZOO_KNOWN)}'",
    ):
        make()


def test_a_client_that_finds_no_descriptor_is_started_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sessions would never be heard of again; nothing is left of the failed client."""
    make_pair, calls = utils.create_socket_pair, itertools.count(1)
    made = asyncio.Event()

    def fail_at_first(module: Any) -> Any:
        if next(calls) < 4:
            raise OSError(errno.EMFILE, "Too many open files")
        loop.call_soon_threadsafe(made.set)
        return make_pair(module)

    async def scenario() -> None:
        coordinator = make(revive_delay_s=0.01)
        coordinator.start()
        async with asyncio.timeout(30):
            await made.wait()
        await coordinator.stop(deadline_s=SystemClock().monotonic_s() + 30)

    monkeypatch.setattr(utils, "create_socket_pair", fail_at_first)
    before = set(threading.enumerate())
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        runner.run(scenario())
    wait_until(lambda: set(threading.enumerate()) <= before)


def test_the_thread_that_closes_a_client_begins_with_it() -> None:
    """Without memory for one at the stop, its start may wait for ever."""

    async def scenario() -> None:
        coordinator = make()
        coordinator.start()
        begun = set(threading.enumerate()) - before
        assert "zk-close" in {each.name for each in begun}
        await coordinator.stop(deadline_s=SystemClock().monotonic_s() + 30)

    before = set(threading.enumerate())
    asyncio.run(scenario())
    wait_until(lambda: set(threading.enumerate()) <= before)


class AwayClient:
    """A client whose server is away; `on_state` tells it otherwise."""

    def __init__(self) -> None:
        self.connected = False
        self.calls: list[str] = []
        self.is_waiting = threading.Event()
        self.on_state: Any = None

    def add_listener(self, listener: Any) -> None:
        self.on_state = listener
        self.is_waiting.set()

    def stop(self) -> None:
        self.calls.append("stop, connected" if self.connected else "stop")

    def close(self) -> None:
        self.calls.append("close")


def test_a_session_that_lives_on_is_ended_when_its_server_is_back() -> None:
    """Its nodes would be in the way of the next session for a whole time-out."""
    client, closed = AwayClient(), threading.Event()
    begin_closer(client)(CloseOrder(closed.set, patience_s=60.0))
    assert client.is_waiting.wait(30)
    client.on_state(KazooState.SUSPENDED)
    assert client.calls == []
    client.connected = True
    client.on_state(KazooState.CONNECTED)
    assert closed.wait(30)
    assert client.calls == ["stop, connected", "close"]


@pytest.mark.parametrize("patience_s", [0.0, 0.01])
def test_a_server_that_stays_away_is_not_waited_for_for_ever(patience_s: float) -> None:
    """Nor at all where the client is to end now."""
    client, closed = AwayClient(), threading.Event()
    begin_closer(client)(CloseOrder(closed.set, patience_s))
    assert closed.wait(30)
    assert client.calls == ["stop", "close"]
    assert client.is_waiting.is_set() is bool(patience_s)


def test_what_is_told_to_install_is_what_is_required() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert KAZOO_KNOWN in project["dependencies"]


@pytest.mark.parametrize("fd_min", [3, 1100])
def test_a_wait_for_sockets_takes_every_descriptor(fd_min: int) -> None:
    handler = make_client("127.0.0.1:1", 1.0).handler
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    try:
        with ExitStack() as stack:
            ours, theirs = (
                stack.enter_context(
                    socket.socket(fileno=fcntl.fcntl(one, fcntl.F_DUPFD, fd_min))
                )
                for one in map(stack.enter_context, socket.socketpair())
            )
            assert handler.select([ours], [], [], 0.0) == ([], [], [])
            theirs.send(b"x")
            assert handler.select([ours, theirs], [], [], None) == ([ours], [], [])
            assert handler.select([], [ours], [], 1.0) == ([], [ours], [])
            ours.close()
            with pytest.raises(ValueError, match="descriptor"):
                handler.select([ours], [], [], 1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
