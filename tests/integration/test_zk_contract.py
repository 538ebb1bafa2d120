"""One contract, two coordinators: in memory, and kazoo on a real server.

The one in memory runs twice: all clients on the test's loop, and each on a loop in a
thread of its own.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any, Protocol, cast

import pytest

from metaq.clock import SystemClock
from metaq.errors import SessionLostError
from metaq.testing.proxy import Proxy
from metaq.testing.servers import BoundedLoopThread
from metaq.testing.zk import MemoryCoordinator, MemoryZooKeeper
from metaq.zk.coordinator import ZooKeeperCoordinator
from metaq.zk.errors import (
    CoordinationTimeoutError,
    NodeChangedError,
    NodeExistsError,
    NodeNameError,
    NodeNotEmptyError,
    NoNodeError,
)
from metaq.zk.session import (
    NO_VERSION,
    CheckNode,
    Coordinator,
    CreateEphemeral,
    DeleteNode,
    Operation,
    SessionState,
    SessionStatus,
    WriteNode,
)
from tests.integration.conftest import expire_session
from tests.rigs.inside import session_identity
from tests.rigs.waiting import until

CLOCK = SystemClock()
PATIENCE_S = 60.0
SESSION_TIMEOUT_MS = 20_000
"""No session ends by itself, however long this machine stands still."""


def in_s(seconds: float = PATIENCE_S) -> float:
    return CLOCK.monotonic_s() + seconds


class World(Protocol):
    """Parts of a scenario besides the contract itself."""

    def coordinator(self) -> Coordinator: ...
    async def drop(self, coordinator: Any) -> None: ...
    async def expire(self, coordinator: Any) -> None: ...
    def close(self) -> None: ...


class MemoryWorld:
    def __init__(self) -> None:
        self.server = MemoryZooKeeper()

    def coordinator(self) -> MemoryCoordinator:
        return self.server.coordinator(CLOCK)

    async def drop(self, coordinator: MemoryCoordinator) -> None:
        """Lose the connection; it comes back by itself."""
        self.server.suspend(coordinator)
        asyncio.get_running_loop().call_soon(self.server.resume, coordinator)

    async def expire(self, coordinator: MemoryCoordinator) -> None:
        """End the session; a new one comes by itself."""
        self.server.expire(coordinator)

    def close(self) -> None:
        pass


class Elsewhere:
    """A coordinator on the loop of another thread, used from here."""

    def __init__(self, server: MemoryZooKeeper) -> None:
        self.thread = BoundedLoopThread("client")
        self.real = server.coordinator(CLOCK)

    @property
    def status(self) -> SessionStatus:
        return self.real.status

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.real, name)
        if not asyncio.iscoroutinefunction(method):
            return lambda *args: self.thread.call(method, *args)

        async def ask(*args: Any, **options: Any) -> Any:
            work = method(*args, **options)
            future = asyncio.run_coroutine_threadsafe(work, self.thread.loop)
            result = await asyncio.wrap_future(future)
            # What was told to callbacks before the answer has been told.
            await asyncio.to_thread(self.thread.run, asyncio.sleep(0))
            return result

        return ask


class ThreadsWorld:
    """Each client on its own loop and thread; faults come from yet another one."""

    def __init__(self) -> None:
        self.server = MemoryZooKeeper()
        self.clients: list[Elsewhere] = []

    def coordinator(self) -> Coordinator:
        self.clients.append(Elsewhere(self.server))
        return cast("Coordinator", self.clients[-1])

    async def drop(self, coordinator: Elsewhere) -> None:
        self.server.suspend(coordinator.real)
        self.server.resume(coordinator.real)

    async def expire(self, coordinator: Elsewhere) -> None:
        self.server.expire(coordinator.real)

    def close(self) -> None:
        for client in self.clients:
            client.thread.close()


class RealWorld:
    """A server, and a proxy before it for each client."""

    def __init__(self, hosts: str) -> None:
        address, slash, root = hosts.partition("/")
        self.hosts = hosts
        self.host, _, port = address.partition(":")
        self.port = int(port)
        self.root = slash + root
        self.proxies: dict[ZooKeeperCoordinator, Proxy] = {}

    def coordinator(self) -> ZooKeeperCoordinator:
        proxy = Proxy(self.host, self.port)
        proxy.start()
        hosts = f"{proxy.address.host}:{proxy.address.port}{self.root}"
        coordinator = ZooKeeperCoordinator(
            hosts, session_timeout_ms=SESSION_TIMEOUT_MS, clock=CLOCK
        )
        self.proxies[coordinator] = proxy
        return coordinator

    async def drop(self, coordinator: ZooKeeperCoordinator) -> None:
        self.proxies[coordinator].cut()

    async def expire(self, coordinator: ZooKeeperCoordinator) -> None:
        identity = session_identity(coordinator)
        await asyncio.to_thread(expire_session, self.hosts, *identity)

    def close(self) -> None:
        for proxy in self.proxies.values():
            proxy.stop()


@pytest.fixture(
    params=["memory", "threads", pytest.param("real", marks=pytest.mark.zookeeper)]
)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world: World
    if request.param == "memory":
        world = MemoryWorld()
    elif request.param == "threads":
        world = ThreadsWorld()
    else:
        world = RealWorld(request.getfixturevalue("zookeeper"))
    yield world
    world.close()


async def connected(coordinator: Coordinator, *, session_version: int) -> None:
    await until(
        lambda: (
            coordinator.status.state is SessionState.CONNECTED
            and coordinator.status.session_version == session_version
        )
    )


@asynccontextmanager
async def client_of(world: World) -> AsyncIterator[Coordinator]:
    coordinator = world.coordinator()
    coordinator.start()
    await connected(coordinator, session_version=1)
    yield coordinator
    await coordinator.stop(deadline_s=in_s())


Scenario = Callable[[World], Coroutine[Any, Any, None]]


def run(scenario: Scenario, world: World) -> None:
    asyncio.run(scenario(world))


def test_a_session_begins_lost_and_becomes_connected(world: World) -> None:
    """Before the first session nothing can be asked; listeners hear of it."""

    async def scenario(world: World) -> None:
        coordinator = world.coordinator()
        assert coordinator.status == SessionStatus(SessionState.LOST, 0, 0)
        heard: list[SessionStatus] = []
        deaf: list[SessionStatus] = []
        coordinator.add_listener(heard.append)
        cancel = coordinator.add_listener(deaf.append)
        cancel()
        cancel()
        with pytest.raises(SessionLostError):
            await coordinator.get("/a", deadline_s=in_s())
        coordinator.start()
        await until(lambda: bool(heard))
        assert heard[0].state is SessionState.CONNECTED
        assert heard[0].session_version == 1
        assert heard[0].session_id != 0
        assert heard[0].timeout_s > 0
        await coordinator.stop(deadline_s=in_s())
        assert coordinator.status.state is SessionState.LOST
        await asyncio.sleep(0)
        assert [status.state for status in heard][-1] is SessionState.LOST
        assert deaf == []

    run(scenario, world)


def test_ephemeral_nodes_have_parents_an_owner_and_one_creator(world: World) -> None:
    """Creating makes the parents; a second creator is told."""

    async def scenario(world: World) -> None:
        async with client_of(world) as one, client_of(world) as two:
            assert one.status.session_id != two.status.session_id
            await one.create_ephemeral("/a/b/c", b"data", deadline_s=in_s())
            node = await two.get("/a/b/c", deadline_s=in_s())
            assert node is not None
            assert node.data == b"data"
            assert node.owner_session_id == one.status.session_id
            assert node.owner_session_id
            parent = await two.get("/a/b", deadline_s=in_s())
            assert parent is not None
            assert (parent.data, bool(parent.owner_session_id)) == (b"", False)
            with pytest.raises(NodeExistsError, match="/a/b/c"):
                await two.create_ephemeral("/a/b/c", b"x", deadline_s=in_s())

    run(scenario, world)


def test_missing_nodes_are_values_not_errors(world: World) -> None:
    """None, False, None and False stand for a node that is not there."""

    async def scenario(world: World) -> None:
        async with client_of(world) as one:
            assert await one.get("/no", deadline_s=in_s()) is None
            assert await one.exists("/no", deadline_s=in_s()) is False
            assert await one.children("/no", deadline_s=in_s()) == ()
            assert await one.delete("/no", deadline_s=in_s()) is False

    run(scenario, world)


def test_set_or_create_creates_then_sets_and_keeps_the_kind(world: World) -> None:
    """Payloads are replaced in place; versions count it."""

    async def scenario(world: World) -> None:
        async with client_of(world) as one:
            await one.set_or_create("/p/q", b"1", deadline_s=in_s())
            await one.set_or_create("/p/q", b"2", deadline_s=in_s())
            node = await one.get("/p/q", deadline_s=in_s())
            assert node is not None
            assert (node.data, bool(node.owner_session_id), node.version) == (
                b"2",
                False,
                1,
            )
            await one.create_ephemeral("/e", b"1", deadline_s=in_s())
            await one.set_or_create("/e", b"", deadline_s=in_s())
            node = await one.get("/e", deadline_s=in_s())
            assert node is not None
            assert (node.data, bool(node.owner_session_id)) == (b"", True)

    run(scenario, world)


def test_replace_writes_only_what_nobody_changed(world: World) -> None:
    """A version is good for one write; None means that there was no node."""

    async def scenario(world: World) -> None:
        async with client_of(world) as one, client_of(world) as two:
            with pytest.raises(NodeChangedError, match="/p/q"):
                await one.replace("/p/q", b"0", version=0, deadline_s=in_s())
            await one.replace("/p/q", b"1", version=None, deadline_s=in_s())
            with pytest.raises(NodeChangedError, match="/p/q"):
                await two.replace("/p/q", b"x", version=None, deadline_s=in_s())
            await two.replace("/p/q", b"2", version=0, deadline_s=in_s())
            with pytest.raises(NodeChangedError, match="/p/q"):
                await one.replace("/p/q", b"x", version=0, deadline_s=in_s())
            node = await one.get("/p/q", deadline_s=in_s())
            assert node is not None
            assert (node.data, bool(node.owner_session_id), node.version) == (
                b"2",
                False,
                1,
            )
            await one.set_or_create("/p/q", b"3", deadline_s=in_s())
            await two.replace("/p/q", b"4", version=2, deadline_s=in_s())

    run(scenario, world)


def test_a_transaction_does_all_and_returns_the_versions(world: World) -> None:
    """Checks, creates and writes go together, each seeing those before it."""

    async def scenario(world: World) -> None:
        async with client_of(world) as one:
            for path in ("/t/old", "/t/old"):
                await one.set_or_create(path, b"0", deadline_s=in_s())
            await one.create_ephemeral("/t/owner", b"me", deadline_s=in_s())
            operations: list[Operation] = [
                CheckNode("/t/owner", 0),
                CheckNode("/t/old", None),
                WriteNode("/t/old", b"1", 1),
                WriteNode("/t/old", b"2", 2),
                WriteNode("/t/new", b"3", None),
                WriteNode("/t/new/child", b"", None),
                WriteNode("/t/owner", b"mine", 0),
                CreateEphemeral("/t/here", b"4"),
                DeleteNode("/t/here", 0),
                CreateEphemeral("/t/here", b"5"),
                DeleteNode("/t/new/child", None),
                WriteNode("/t/gone", b"", None),
                DeleteNode("/t/gone", 0),
            ]
            versions = await one.transact(operations, deadline_s=in_s())
            none = NO_VERSION
            assert versions == (0, none, 2, 3, 0, 0, 1, 0, none, 0, none, 0, none)
            found = await one.get("/t/old", deadline_s=in_s())
            assert found is not None
            assert (found.data, found.version) == (b"2", 3)
            found = await one.get("/t/new", deadline_s=in_s())
            assert found is not None
            assert (found.data, bool(found.owner_session_id)) == (b"3", False)
            found = await one.get("/t/owner", deadline_s=in_s())
            assert found is not None
            assert (found.data, bool(found.owner_session_id)) == (b"mine", True)
            here = await one.get("/t/here", deadline_s=in_s())
            assert here is not None
            assert (here.data, here.owner_session_id) == (b"5", found.owner_session_id)
            names = await one.children("/t", deadline_s=in_s())
            assert names == ("here", "new", "old", "owner")
            assert await one.children("/t/new", deadline_s=in_s()) == ()
            assert await one.transact([], deadline_s=in_s()) == ()

    run(scenario, world)


@pytest.mark.parametrize(
    ("operation", "error"),
    [
        (CheckNode("/t/a", 0), NodeChangedError),
        (CheckNode("/t/a", 2), NodeChangedError),
        (CheckNode("/t/no", 0), NodeChangedError),
        (CheckNode("/t/no", None), NodeChangedError),
        (WriteNode("/t/a", b"x", 0), NodeChangedError),
        (WriteNode("/t/a", b"x", None), NodeChangedError),
        (WriteNode("/t/no", b"x", 0), NodeChangedError),
        (WriteNode("/t/no/child", b"x", None), NoNodeError),
        (CreateEphemeral("/t/a", b"x"), NodeChangedError),
        (CreateEphemeral("/t/no/child", b"x"), NoNodeError),
        (DeleteNode("/t/a", 0), NodeChangedError),
        (DeleteNode("/t/no", None), NodeChangedError),
        (DeleteNode("/t/no", 0), NodeChangedError),
        (DeleteNode("/t", None), NodeNotEmptyError),
    ],
    ids=str,
)
def test_a_transaction_that_does_not_fit_does_nothing(
    world: World, operation: Operation, error: type[Exception]
) -> None:
    """The operation that did not fit is named, wherever it is in the list."""
    before: list[Operation] = [
        WriteNode("/t/a", b"2", 1),
        WriteNode("/t/b", b"", None),
        WriteNode("/t/a", b"1", 2),
    ]

    async def scenario(world: World) -> None:
        async with client_of(world) as one:
            await one.set_or_create("/t/a", b"0", deadline_s=in_s())
            await one.set_or_create("/t/a", b"1", deadline_s=in_s())
            last = WriteNode("/t/c", b"", None)
            for operations in ([operation, last], [*before, operation, last]):
                # What was done before it is undone: the node has version 3 by then.
                wanted = operation
                with pytest.raises(error, match=f"transact.* ?'?{wanted.path}"):
                    await one.transact(operations, deadline_s=in_s())
                node = await one.get("/t/a", deadline_s=in_s())
                assert node is not None
                assert (node.data, node.version) == (b"1", 1)
                assert await one.children("/t", deadline_s=in_s()) == ("a",)

    run(scenario, world)


def test_watches_see_a_transaction_after_all_of_it(world: World) -> None:
    """No snapshot shows one half, and none comes for one that did not fit."""

    async def scenario(world: World) -> None:
        async with client_of(world) as one, client_of(world) as two:
            await one.set_or_create("/w/a", b"", deadline_s=in_s())
            seen: list[tuple[str, ...] | None] = []
            two.watch_children("/w", seen.append)
            await until(lambda: seen == [("a",)])
            with pytest.raises(NodeChangedError):
                await one.transact(
                    [WriteNode("/w/no", b"", None), WriteNode("/w/a", b"", 7)],
                    deadline_s=in_s(),
                )
            await one.transact(
                [
                    WriteNode("/w/b", b"", None),
                    WriteNode("/w/c", b"", None),
                ],
                deadline_s=in_s(),
            )
            await until(lambda: seen[-1] == ("a", "b", "c"))
            assert seen == [("a",), ("a", "b", "c")]

    run(scenario, world)


def test_an_ephemeral_node_of_a_transaction_goes_with_its_session(
    world: World,
) -> None:
    """It is the session's that made it; another one cannot make it before."""

    async def scenario(world: World) -> None:
        async with client_of(world) as one, client_of(world) as two:
            await one.set_or_create("/s", b"", deadline_s=in_s())
            create = CreateEphemeral("/s/leader", b"one")
            await one.transact([create], deadline_s=in_s())
            with pytest.raises(NodeChangedError):
                await two.transact([create], deadline_s=in_s())
            node = await two.get("/s/leader", deadline_s=in_s())
            assert node is not None
            assert node.owner_session_id == one.status.session_id
            await world.expire(one)
            await connected(one, session_version=2)
            await two.transact([create], deadline_s=in_s())

    run(scenario, world)


def test_a_read_after_a_sync_has_what_others_changed_before_it(world: World) -> None:
    """The path need not exist; without a session or time nothing is asked."""

    async def scenario(world: World) -> None:
        with pytest.raises(SessionLostError):
            await world.coordinator().sync("/y", deadline_s=in_s())
        async with client_of(world) as one, client_of(world) as two:
            for number in range(20):
                data = b"%d" % number
                await one.set_or_create("/y", data, deadline_s=in_s())
                await two.sync("/y/no/such/node", deadline_s=in_s())
                node = await two.get("/y", deadline_s=in_s())
                assert node is not None
                assert node.data == data
            with pytest.raises(CoordinationTimeoutError):
                await two.sync("/y", deadline_s=in_s(-1))

    run(scenario, world)


def test_a_transaction_needs_a_session_and_time(world: World) -> None:
    """Without one of them nothing is asked."""

    async def scenario(world: World) -> None:
        create = WriteNode("/late", b"", None)
        with pytest.raises(SessionLostError):
            await world.coordinator().transact([create], deadline_s=in_s())
        async with client_of(world) as one:
            with pytest.raises(CoordinationTimeoutError):
                await one.transact([create], deadline_s=in_s(-1))
            assert not await one.exists("/late", deadline_s=in_s())

    run(scenario, world)


def test_children_are_sorted_and_keep_their_parent_alive(world: World) -> None:
    """Names come sorted; a node with children cannot be deleted."""

    async def scenario(world: World) -> None:
        async with client_of(world) as one:
            for name in ("b", "a", "c"):
                await one.set_or_create(f"/dir/{name}", b"", deadline_s=in_s())
            assert await one.children("/dir", deadline_s=in_s()) == ("a", "b", "c")
            assert await one.children("/dir/a", deadline_s=in_s()) == ()
            assert await one.exists("/dir/a", deadline_s=in_s())
            with pytest.raises(NodeNotEmptyError, match="/dir"):
                await one.delete("/dir", deadline_s=in_s())
            assert await one.delete("/dir/a", deadline_s=in_s()) is True
            assert await one.children("/dir", deadline_s=in_s()) == ("b", "c")

    run(scenario, world)


def test_delete_takes_the_version_that_was_read(world: World) -> None:
    """Or any, when none is named; one that is gone is no error."""

    async def scenario(world: World) -> None:
        async with client_of(world) as one:
            await one.set_or_create("/v", b"0", deadline_s=in_s())
            await one.set_or_create("/v", b"1", deadline_s=in_s())
            with pytest.raises(NodeChangedError, match="/v"):
                await one.delete("/v", version=0, deadline_s=in_s())
            assert await one.delete("/v", version=1, deadline_s=in_s()) is True
            assert await one.delete("/v", version=1, deadline_s=in_s()) is False

    run(scenario, world)


@pytest.mark.parametrize("path", ["", "a", "/a/", "/a//b", "/a/../b", "/a\ue000"])
def test_paths_that_zookeeper_refuses_are_not_asked(world: World, path: str) -> None:
    """A bad path is an error of its own, for every request."""

    async def scenario(world: World) -> None:
        async with client_of(world) as one:
            requests: list[Awaitable[object]] = [
                one.get(path, deadline_s=in_s()),
                one.delete(path, deadline_s=in_s()),
                one.create_ephemeral(path, b"", deadline_s=in_s()),
                one.set_or_create(path, b"", deadline_s=in_s()),
                one.replace(path, b"", version=None, deadline_s=in_s()),
                one.transact([CheckNode(path, None)], deadline_s=in_s()),
                one.sync(path, deadline_s=in_s()),
            ]
            for request in requests:
                with pytest.raises(NodeNameError):
                    await request
            with pytest.raises(NodeNameError):
                one.watch_data(path, lambda _: None)

    run(scenario, world)


def test_a_deadline_that_has_passed_asks_nothing(world: World) -> None:
    """Without time there is no request."""

    async def scenario(world: World) -> None:
        async with client_of(world) as one:
            with pytest.raises(CoordinationTimeoutError):
                await one.create_ephemeral("/late", b"", deadline_s=in_s(-1))
            assert not await one.exists("/late", deadline_s=in_s())

    run(scenario, world)


def test_a_dropped_connection_suspends_and_keeps_session_version_and_nodes(
    world: World,
) -> None:
    """Suspended is not lost."""

    async def scenario(world: World) -> None:
        async with client_of(world) as one:
            heard: list[SessionStatus] = []
            one.add_listener(heard.append)
            await one.create_ephemeral("/e", b"", deadline_s=in_s())
            before = one.status
            await world.drop(one)
            await until(lambda: len(heard) >= 2)
            assert heard[0].state is SessionState.SUSPENDED
            assert heard[1] == before
            assert await one.exists("/e", deadline_s=in_s())

    run(scenario, world)


def test_an_expired_session_is_lost_with_its_nodes_and_replaced(world: World) -> None:
    """The next session has the next version, and nothing of the last one."""

    async def scenario(world: World) -> None:
        async with client_of(world) as one, client_of(world) as two:
            heard: list[SessionStatus] = []
            one.add_listener(heard.append)
            await one.create_ephemeral("/e", b"", deadline_s=in_s())
            old = one.status.session_id
            await world.expire(one)
            await connected(one, session_version=2)
            assert one.status.session_id != old
            assert not await two.exists("/e", deadline_s=in_s())
            await until(lambda: heard[-1].state is SessionState.CONNECTED)
            states = [status.state for status in heard]
            assert states[-2:] == [SessionState.LOST, SessionState.CONNECTED]
            assert heard[-2].session_version == 1

    run(scenario, world)


def test_stop_takes_the_nodes_along_and_may_be_repeated(world: World) -> None:
    """A closed session leaves no ephemeral node behind, at once."""

    async def scenario(world: World) -> None:
        async with client_of(world) as two:
            async with client_of(world) as one:
                await one.create_ephemeral("/e", b"", deadline_s=in_s())
            assert not await two.exists("/e", deadline_s=in_s())
            await one.stop(deadline_s=in_s())
            with pytest.raises(SessionLostError):
                await one.get("/e", deadline_s=in_s())

    run(scenario, world)


def test_a_coordinator_that_never_started_stops(world: World) -> None:
    """Cleaning up after a failed start is harmless."""

    async def scenario(world: World) -> None:
        await world.coordinator().stop(deadline_s=in_s())

    run(scenario, world)


def test_children_watches_deliver_whole_snapshots(world: World) -> None:
    """None without the node, then sorted names, again and again."""

    async def scenario(world: World) -> None:
        async with client_of(world) as one, client_of(world) as two:
            seen: list[tuple[str, ...] | None] = []
            one.watch_children("/w", seen.append)
            await until(lambda: seen == [None])
            await two.set_or_create("/w", b"", deadline_s=in_s())
            await until(lambda: seen[-1] == ())
            for number in range(3):
                await two.set_or_create(f"/w/{number}", b"", deadline_s=in_s())
            await until(lambda: seen[-1] == ("0", "1", "2"))
            for number in range(3):
                await two.delete(f"/w/{number}", deadline_s=in_s())
            await two.delete("/w", deadline_s=in_s())
            await until(lambda: seen[-1] is None)
            assert all(a != b for a, b in itertools.pairwise(seen))

    run(scenario, world)


def test_data_watches_deliver_payloads(world: World) -> None:
    """Creation, change and deletion of a node are all seen; children are not."""

    async def scenario(world: World) -> None:
        async with client_of(world) as one, client_of(world) as two:
            seen: list[bytes | None] = []
            one.watch_data("/w", seen.append)
            await until(lambda: seen == [None])
            for data in (b"1", b"2"):
                await two.set_or_create("/w", data, deadline_s=in_s())
                await until(lambda data=data: seen[-1] == data)
            await two.set_or_create("/w/child", b"", deadline_s=in_s())
            await two.delete("/w/child", deadline_s=in_s())
            await two.delete("/w", deadline_s=in_s())
            await until(lambda: seen[-1] is None)
            assert seen == [None, b"1", b"2", None]

    run(scenario, world)


@pytest.mark.parametrize("fault", ["drop", "expire"])
def test_watches_survive_reconnects_and_new_sessions(world: World, fault: str) -> None:
    """Nothing that changes after, or during, the fault is missed."""

    async def scenario(world: World) -> None:
        async with client_of(world) as one, client_of(world) as two:
            seen: list[tuple[str, ...] | None] = []
            one.watch_children("/w", seen.append)
            await two.set_or_create("/w/a", b"", deadline_s=in_s())
            await until(lambda: bool(seen) and seen[-1] == ("a",))
            await getattr(world, fault)(one)
            await two.set_or_create("/w/b", b"", deadline_s=in_s())
            await until(lambda: seen[-1] == ("a", "b"))
            await connected(one, session_version=1 + (fault == "expire"))
            await two.set_or_create("/w/c", b"", deadline_s=in_s())
            await until(lambda: seen[-1] == ("a", "b", "c"))

    run(scenario, world)


def test_a_watch_set_before_the_session_delivers_when_it_comes(world: World) -> None:
    """Watching does not have to wait for the connection."""

    async def scenario(world: World) -> None:
        coordinator = world.coordinator()
        coordinator.start()
        seen: list[bytes | None] = []
        coordinator.watch_data("/w", seen.append)
        await until(lambda: seen == [None])
        await coordinator.stop(deadline_s=in_s())

    run(scenario, world)


def test_a_cancelled_watch_is_silent(world: World) -> None:
    """Nothing is delivered after the cancellation, which may be repeated."""

    async def scenario(world: World) -> None:
        async with client_of(world) as one:
            silent: list[bytes | None] = []
            seen: list[bytes | None] = []
            cancel = one.watch_data("/w", silent.append)
            one.watch_data("/w", seen.append)
            await until(lambda: bool(seen) and bool(silent))
            cancel()
            cancel()
            await one.set_or_create("/w", b"1", deadline_s=in_s())
            await until(lambda: seen[-1] == b"1")
            assert silent == [None]

    run(scenario, world)
