"""A coordinator on real servers; its contract has tests of its own."""

import asyncio
import contextlib
import logging
import socket

import pytest

from metaq.clock import SystemClock
from metaq.errors import CoordinationError
from metaq.testing.proxy import Proxy
from metaq.zk.coordinator import LIFE, ZooKeeperCoordinator
from metaq.zk.errors import NoNodeError
from metaq.zk.session import SessionState
from tests.integration.conftest import ZooKeeperServer
from tests.rigs.ports import reserved_port
from tests.rigs.waiting import until

CLOCK = SystemClock()
PATIENCE_S = 60.0


def in_s(seconds: float = PATIENCE_S) -> float:
    return CLOCK.monotonic_s() + seconds


def coordinator_on(
    hosts: str, *, session_timeout_ms: int = 20_000
) -> ZooKeeperCoordinator:
    """Return one whose session does not end by itself, if it is not told to."""
    return ZooKeeperCoordinator(
        hosts, session_timeout_ms=session_timeout_ms, clock=CLOCK
    )


def test_an_absent_server_is_no_error_and_logs_no_flood(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Starting and stopping without any server is quiet and quick."""

    async def scenario() -> None:
        coordinator = coordinator_on(f"127.0.0.1:{port}")
        coordinator.start()
        await asyncio.sleep(0.05)  # for some attempts, of which nothing tells
        assert coordinator.status.state is SessionState.LOST
        await coordinator.stop(deadline_s=in_s(1))

    with reserved_port() as port, caplog.at_level(logging.INFO):
        asyncio.run(scenario())
    assert not caplog.messages


@pytest.mark.zookeeper
@pytest.mark.slow
def test_a_root_that_does_not_exist_is_named(zookeeper: str) -> None:
    """It is not made, but for its last step; the error names it."""

    async def scenario() -> None:
        coordinator = coordinator_on(f"{zookeeper}/no/such")
        coordinator.start()
        await until(lambda: coordinator.status.state is SessionState.CONNECTED)
        try:
            with pytest.raises(NoNodeError, match=r"create /\S*/no/such of zk\.zkConn"):
                await coordinator.create_ephemeral("/a/b", b"", deadline_s=in_s())
        finally:
            await coordinator.stop(deadline_s=in_s(1))

    asyncio.run(scenario())


@pytest.mark.zookeeper
@pytest.mark.slow
def test_a_server_that_never_greets_does_not_cost_the_session(
    zookeeper_alone: ZooKeeperServer,
) -> None:
    """A connection that is accepted and then ignored is given up well in time."""

    async def scenario() -> None:
        coordinator = coordinator_on(zookeeper_alone.address, session_timeout_ms=30_000)
        coordinator.start()
        await until(lambda: coordinator.status.session_version)
        port = int(zookeeper_alone.address.rpartition(":")[2])
        zookeeper_alone.stop()
        with socket.create_server(("127.0.0.1", port)) as mute:
            # Accepting is the kernel's work; the test never reads or answers.
            connection, _ = await asyncio.to_thread(mute.accept)
        with connection:
            zookeeper_alone.start()
            await until(lambda: coordinator.status.state is SessionState.CONNECTED)
        assert coordinator.status.session_version == 1
        await coordinator.stop(deadline_s=in_s())

    asyncio.run(scenario())


@pytest.mark.zookeeper
@pytest.mark.slow
@pytest.mark.parametrize("asked_s", [0.1, 2.0, 10_000.0])
def test_a_session_is_believed_in_for_the_time_that_the_server_chose(
    zookeeper: str, asked_s: float
) -> None:
    """The wanted time-out may be below or above the allowed ones."""

    async def scenario() -> float:
        coordinator = coordinator_on(zookeeper, session_timeout_ms=int(asked_s * 1000))
        coordinator.start()
        await until(lambda: coordinator.status.session_version)
        life_left_s = coordinator._life_left_s()
        timeout_s = coordinator.status.timeout_s
        await coordinator.stop(deadline_s=in_s())
        assert life_left_s <= LIFE * timeout_s
        return timeout_s

    timeout_s = asyncio.run(scenario())
    assert 0.1 < timeout_s < 10_000
    assert (timeout_s == asked_s) == (asked_s == 2.0)


@pytest.mark.zookeeper
@pytest.mark.slow
def test_a_session_cut_off_counts_as_lost(zookeeper_alone: ZooKeeperServer) -> None:
    """Without the server's word, the clock decides; the next session is a new one."""

    async def scenario() -> None:
        coordinator = coordinator_on(zookeeper_alone.address, session_timeout_ms=1000)
        coordinator.start()
        await until(lambda: coordinator.status.state is SessionState.CONNECTED)
        lost_version = coordinator.status.session_version
        zookeeper_alone.pause()
        try:
            await until(lambda: coordinator.status.state is SessionState.LOST)
        finally:
            zookeeper_alone.resume()
        await until(
            lambda: (
                coordinator.status.state is SessionState.CONNECTED
                and coordinator.status.session_version > lost_version
            )
        )
        await coordinator.stop(deadline_s=in_s())

    asyncio.run(scenario())


@pytest.mark.zookeeper
@pytest.mark.slow
@pytest.mark.parametrize("is_busy", [False, True])
def test_who_loses_a_session_knows_it_before_its_nodes_go(
    zookeeper: str, is_busy: bool
) -> None:
    """A silent network: lost on this side first, gone for the others then.

    Requests that are sent into the silence change nothing.
    """
    server, _, root = zookeeper.partition("/")
    host, _, port = server.rpartition(":")
    events: list[str] = []

    async def bother(coordinator: ZooKeeperCoordinator) -> None:
        while True:
            with contextlib.suppress(CoordinationError):
                await coordinator.get("/e", deadline_s=in_s(0.1))
            await asyncio.sleep(0.05)

    async def scenario(proxy: Proxy) -> None:
        far = coordinator_on(f"127.0.0.1:{proxy.port}/{root}", session_timeout_ms=2000)
        near = coordinator_on(zookeeper)
        far.start()
        near.start()
        await until(
            lambda: far.status.state is near.status.state is SessionState.CONNECTED
        )
        version = far.status.session_version
        await far.create_ephemeral("/e", b"", deadline_s=in_s())
        far.add_listener(lambda status: events.append(status.state.value))
        near.watch_data(
            "/e", lambda data: events.append("there" if data == b"" else "gone")
        )
        await until(lambda: "there" in events)
        bothering = asyncio.create_task(bother(far)) if is_busy else None
        proxy.stall()
        await until(lambda: {"lost", "gone"} <= set(events))
        assert events.index("lost") < events.index("gone")
        if bothering is not None:
            bothering.cancel()
        proxy.pass_all()
        await until(lambda: far.status.session_version > version)
        await far.stop(deadline_s=in_s())
        await near.stop(deadline_s=in_s())

    with Proxy(host, int(port)) as proxy:
        asyncio.run(scenario(proxy))
