"""The in-memory ZooKeeper between threads; its contract is tested beside kazoo."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from metaq.clock import SystemClock
from metaq.errors import CoordinationError, SessionLostError, SessionSuspendedError
from metaq.testing.servers import BoundedLoopThread
from metaq.testing.zk import MemoryCoordinator, MemoryZooKeeper
from metaq.zk.errors import NodeChangedError, NodeExistsError
from metaq.zk.session import SessionState, WriteNode
from tests.rigs.waiting import until

CLOCK = SystemClock()
THREADS = 4
NODES = 50


def in_s(seconds: float = 20.0) -> float:
    return CLOCK.monotonic_s() + seconds


async def connected(coordinator: MemoryCoordinator) -> MemoryCoordinator:
    is_there = asyncio.Event()
    coordinator.add_listener(lambda _status: is_there.set())
    coordinator.start()
    await asyncio.wait_for(is_there.wait(), 30)
    return coordinator


@pytest.fixture
def threads() -> Iterator[list[BoundedLoopThread]]:
    made = [BoundedLoopThread(f"client-{number}") for number in range(THREADS)]
    yield made
    for thread in made:
        thread.close()


def test_of_many_threads_one_creates_each_node(
    threads: list[BoundedLoopThread],
) -> None:
    """Claims from different threads at the same time have one winner each."""
    server = MemoryZooKeeper()
    clients = [t.run(connected(server.coordinator(CLOCK))) for t in threads]

    async def claim_all(client: MemoryCoordinator) -> int:
        won = 0
        for number in range(NODES):
            try:
                await client.create_ephemeral(f"/c/{number}", b"", deadline_s=in_s())
                won += 1
            except NodeExistsError:
                pass
        return won

    claims = [
        asyncio.run_coroutine_threadsafe(claim_all(client), thread.loop)
        for client, thread in zip(clients, threads, strict=True)
    ]
    assert sum(claim.result(20) for claim in claims) == NODES
    assert server.names("/c") == tuple(sorted(map(str, range(NODES))))
    for client, thread in zip(clients, threads, strict=True):
        thread.run(client.stop(deadline_s=in_s()))
    assert server.names("/c") == ()


def test_callbacks_come_on_the_loop_that_started_the_client(
    threads: list[BoundedLoopThread],
) -> None:
    """Statuses and snapshots, whatever causes them."""
    server = MemoryZooKeeper()
    thread = threads[0]
    client = thread.run(connected(server.coordinator(CLOCK)))
    heard: list[int] = []
    seen: list[tuple[bytes | None, int]] = []
    is_seen = threading.Event()

    def on_data(data: bytes | None) -> None:
        seen.append((data, threading.get_ident()))
        if data == b"1":
            is_seen.set()

    thread.call(client.add_listener, lambda _s: heard.append(threading.get_ident()))
    thread.call(client.watch_data, "/w", on_data)
    server.suspend(client)
    server.resume(client)
    server.put("/w", b"1")
    assert is_seen.wait(30)
    its_thread = thread.call(threading.get_ident)
    assert {ident for _, ident in seen} == {its_thread}
    assert heard == [its_thread] * 2
    thread.run(client.stop(deadline_s=in_s()))


def test_an_ended_session_creates_nothing_before_its_client_hears() -> None:
    """The server knows first: no node of a dead session appears."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        client = await connected(server.coordinator(CLOCK))
        # Another thread, so that the client hears of it in a later turn.
        thread = threading.Thread(target=server.expire, args=(client,))
        thread.start()
        thread.join(30)
        assert client.status.state is SessionState.CONNECTED
        with (
            pytest.raises(SessionLostError),
            server.serving("create", "/e", client.status.session_id),
        ):
            raise AssertionError("carried out")
        await client.stop(deadline_s=in_s())

    asyncio.run(scenario())


def test_a_stopped_server_serves_nobody() -> None:
    """Not even a client that has not heard of it."""
    server = MemoryZooKeeper()
    number = server.begin_session()
    server.stop()
    with (
        pytest.raises(SessionSuspendedError),
        server.serving("get", "/e", number),
    ):
        raise AssertionError("carried out")


@pytest.mark.parametrize("is_own_thread", [True, False])
def test_a_client_whose_loop_is_gone_disturbs_nobody(*, is_own_thread: bool) -> None:
    """Changes go on after a loop ended without stopping its client."""
    server = MemoryZooKeeper()
    client = server.coordinator(CLOCK)
    if is_own_thread:
        asyncio.run(connected(client))
    else:
        thread = BoundedLoopThread("gone")
        thread.run(connected(client))
        thread.close()
    client.watch_data("/a", lambda _node: None)
    server.put("/a", b"1")
    server.stop()
    server.start()
    assert server.nodes["/a"].data == b"1"


def test_a_stopped_client_is_forgotten() -> None:
    """A server that outlives many clients does not gather them."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        for _ in range(3):
            client = await connected(server.coordinator(CLOCK))
            await client.stop(deadline_s=in_s())
        assert server.coordinators == ()

    asyncio.run(scenario())


def test_the_session_behind_a_node_can_be_found() -> None:
    """So that a test can end the session of a client that it did not make."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        one = await connected(server.coordinator(CLOCK))
        two = await connected(server.coordinator(CLOCK))
        await two.create_ephemeral("/a/e", b"", deadline_s=in_s())
        assert server.coordinators == (one, two)
        assert server.owner_of("/a/e") is two
        for path in ("/a", "/none"):
            with pytest.raises(LookupError):
                server.owner_of(path)
        server.put("/orphan", b"", session_id=99)
        with pytest.raises(LookupError):
            server.owner_of("/orphan")
        for client in (one, two):
            await client.stop(deadline_s=in_s())

    asyncio.run(scenario())


def test_a_client_that_lags_reads_an_old_state_until_it_syncs_or_writes() -> None:
    """Watches too; whatever it writes is checked against the present state."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        one = await connected(server.coordinator(CLOCK))
        seen: list[bytes | None] = []
        one.watch_data("/t/a", seen.append)
        for catch_up in (
            lambda: one.sync("/t", deadline_s=in_s()),
            lambda: one.set_or_create("/t/b", b"", deadline_s=in_s()),
        ):
            server.put("/t/a", b"old")
            await asyncio.sleep(0)
            server.lag(one)
            server.write("/t/a", b"new")
            server.put("/t/c", b"")
            await asyncio.sleep(0)
            node = await one.get("/t/a", deadline_s=in_s())
            assert node is not None
            assert node.data == b"old"
            assert not await one.exists("/t/c", deadline_s=in_s())
            assert "c" not in await one.children("/t", deadline_s=in_s())
            assert seen[-1] == b"old"
            await catch_up()
            assert await one.exists("/t/c", deadline_s=in_s())
            await until(lambda: seen[-1] == b"new")
            server.remove("/t/c")
        server.lag(one)
        server.write("/t/a", b"newer")
        with pytest.raises(NodeChangedError):
            await one.transact([WriteNode("/t/a", b"", 1)], deadline_s=in_s())
        await until(lambda: seen[-1] == b"newer")
        await one.stop(deadline_s=in_s())

    asyncio.run(scenario())


@pytest.mark.parametrize("is_carried_out", [True, False])
def test_a_lost_answer_cuts_off_its_client_and_hits_one_change(
    is_carried_out: bool,
) -> None:
    """Reads before it are answered; when it is back, all is as ever."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        one = await connected(server.coordinator(CLOCK))
        server.lose_answer(one, is_carried_out=is_carried_out)
        assert not await one.exists("/t/a", deadline_s=in_s())
        with pytest.raises(SessionSuspendedError, match="lost before the answer"):
            await one.set_or_create("/t/a", b"", deadline_s=in_s())
        assert ("/t/a" in server.tree()) == is_carried_out
        assert one.status.state is SessionState.SUSPENDED
        server.resume(one)
        assert one.status.session_version == 1
        await one.set_or_create("/t/b", b"", deadline_s=in_s())
        await one.stop(deadline_s=in_s())

    asyncio.run(scenario())


def test_a_backup_brings_back_nodes_versions_and_their_sessions() -> None:
    """Clients begin new ones; nodes of the old ones stay until those end."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        one = await connected(server.coordinator(CLOCK))
        await one.create_ephemeral("/t/e", b"", deadline_s=in_s())
        server.write("/t/a", b"1")
        backup = server.tree()
        server.write("/t/a", b"2")
        server.put("/t/b", b"")
        server.restore(backup)
        assert server.tree() == backup
        await until(lambda: one.status.session_version == 2)
        assert await one.children("/t", deadline_s=in_s()) == ("a", "e")
        server.reap(backup["/t/e"].owner_session_id)
        assert "/t/e" not in server.tree()
        await one.stop(deadline_s=in_s())

    asyncio.run(scenario())


def test_a_refusal_is_of_every_request_while_it_is_set() -> None:
    """As when rights are missing; nothing is done."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        one = await connected(server.coordinator(CLOCK))
        server.refusal = "no rights"
        with pytest.raises(CoordinationError, match="set /t/a: no rights"):
            await one.set_or_create("/t/a", b"", deadline_s=in_s())
        server.refusal = ""
        assert server.tree() == {}
        await one.stop(deadline_s=in_s())

    asyncio.run(scenario())
