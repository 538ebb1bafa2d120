"""A broker's registration on a real ZooKeeper: golden trees, faults, bounds."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError

from metaq.clock import SystemClock
from metaq.model import BrokerAddress, BrokerId
from metaq.zk.coordinator import ZooKeeperCoordinator
from metaq.zk.errors import BrokerIdTakenError
from metaq.zk.paths import BrokerRole, NodePaths
from metaq.zk.plan import AdvertisedTopic, BrokerSnapshot
from metaq.zk.registry import BrokerRegistry, RegistrationState
from metaq.zk.session import SessionState
from tests.integration.conftest import ZooKeeperServer, expire_session
from tests.rigs.inside import session_identity
from tests.rigs.waiting import until
from tests.zk.test_registry import catalog_of

pytestmark = [pytest.mark.zookeeper, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
GOLDEN = json.loads((ROOT / "tests" / "golden" / "vectors.json").read_text())[
    "zookeeper"
]
CLOCK = SystemClock()
PATIENCE_S = 60.0
SESSION_TIMEOUT_MS = 20_000
"""No session ends by itself, however long this machine stands still."""
REQUESTS_MAX = 21
"""Of a topic of four nodes: 4 looks, 13 for the nodes and their parents, 4 watches."""
PATHS = NodePaths()
MASTER = "/meta/brokers/ids/0/master"
TWO = (AdvertisedTopic("meta-test", 2), AdvertisedTopic("test", 2))
NO_PUTS = tuple(AdvertisedTopic(t.name, 2, accepts_puts=False) for t in TWO)
FOUR = (AdvertisedTopic("meta-test", 2), AdvertisedTopic("test", 4, accepts_gets=False))

Tree = dict[str, tuple[str, bool]]


def in_s(seconds: float = PATIENCE_S) -> float:
    return CLOCK.monotonic_s() + seconds


def snapshot_of(
    *topics: AdvertisedTopic, port: int = 8123, checksum: int = 463763767
) -> BrokerSnapshot:
    return BrokerSnapshot(
        role=BrokerRole(BrokerId(0)),
        address=BrokerAddress("127.0.0.1", port),
        config_checksum=checksum,
        topics=topics,
    )


def recorded(tree: str, snapshot: BrokerSnapshot | None = None) -> Tree:
    nodes = {n["path"]: (n["data"], n["ephemeral"]) for n in GOLDEN[tree]}
    return nodes | catalog_of(snapshot or snapshot_of(*TWO))


def read_tree(hosts: str) -> tuple[Tree, set[int]]:
    """Read everything below /meta with a client of its own: nodes, and owners."""
    client = KazooClient(hosts)
    client.start()
    tree: Tree = {}
    owners = set()

    def visit(path: str) -> None:
        # A node may go while the tree is read.
        with contextlib.suppress(NoNodeError):
            data, stat = client.get(path)
            tree[path] = (data.decode(), stat.ephemeralOwner != 0)
            owners.add(stat.ephemeralOwner)
            for name in client.get_children(path):
                visit(f"{path}/{name}")

    try:
        if client.exists("/meta"):
            visit("/meta")
    finally:
        client.stop()
        client.close()
    return tree, owners - {0}


async def tree_of(hosts: str) -> Tree:
    return (await asyncio.to_thread(read_tree, hosts))[0]


async def until_tree(hosts: str, expected: Tree) -> None:
    async def is_there() -> bool:
        return await tree_of(hosts) == expected

    await until(is_there)


@asynccontextmanager
async def broker_on(
    hosts: str, *, session_timeout_ms: int = SESSION_TIMEOUT_MS, **more: Any
) -> AsyncIterator[tuple[BrokerRegistry, ZooKeeperCoordinator]]:
    coordinator = ZooKeeperCoordinator(
        hosts, session_timeout_ms=session_timeout_ms, clock=CLOCK
    )
    registry = BrokerRegistry(coordinator, PATHS, clock=CLOCK, **more)
    coordinator.start()
    registry.start()
    try:
        yield registry, coordinator
    finally:
        await registry.stop()
        await coordinator.stop(deadline_s=in_s(5))


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await scenario()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("tree", "snapshot"),
    [
        ("after_broker_start", snapshot_of(*TWO)),
        (
            "broker_with_acceptPublish_false",
            snapshot_of(*NO_PUTS, checksum=2064703032),
        ),
        (
            "topic_with_4_partitions_and_acceptSubscribe_false",
            snapshot_of(*FOUR, checksum=2152732052),
        ),
    ],
)
def test_a_registered_broker_leaves_the_recorded_tree(
    zookeeper: str, tree: str, snapshot: BrokerSnapshot
) -> None:
    """Every node, parents included, is byte for byte that of a Java broker."""

    async def scenario() -> None:
        async with broker_on(zookeeper) as (registry, _):
            assert await registry.register(snapshot, deadline_s=in_s())
            # Two recordings begin below the root node itself.
            found = await tree_of(zookeeper)
            expected = recorded(tree, snapshot)
            assert found | expected == found
            assert set(found) - set(expected) <= {"/meta"}

    run(scenario)


def test_a_new_topic_takes_few_requests(
    zookeeper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start with thousands of topics takes as long as all of theirs."""
    paths: list[str] = []
    send = KazooClient._call

    def note(client: KazooClient, request: Any, answer: Any) -> object:
        paths.append(getattr(request, "path", ""))
        return send(client, request, answer)

    monkeypatch.setattr(KazooClient, "_call", note)
    many = tuple(AdvertisedTopic(f"many-{number}", 2) for number in range(8))
    snapshot = snapshot_of(*TWO, *many)

    async def scenario() -> None:
        async with broker_on(zookeeper) as (registry, _):
            assert await registry.register(snapshot_of(*TWO), deadline_s=in_s())
            assert await registry.register(snapshot, deadline_s=in_s())
            asked = [path for path in paths if "many-" in path]
            assert len(asked) <= REQUESTS_MAX * len(many), sorted(asked)
            wanted = recorded("after_broker_start", snapshot)
            assert wanted.items() <= (await tree_of(zookeeper)).items()

    run(scenario)


def test_a_withdrawn_broker_leaves_the_recorded_tree(zookeeper: str) -> None:
    """A clean stop leaves exactly the parents that a Java broker leaves."""

    async def scenario() -> None:
        async with broker_on(zookeeper) as (registry, _):
            await registry.register(snapshot_of(*TWO), deadline_s=in_s())
            await registry.withdraw(deadline_s=in_s())
            assert await tree_of(zookeeper) == recorded("after_clean_stop")

    run(scenario)


def test_an_expired_session_is_followed_by_a_full_registration(zookeeper: str) -> None:
    """A second session with the same id and password is closed: all comes back."""

    async def scenario() -> None:
        async with broker_on(zookeeper) as (registry, coordinator):
            await registry.register(snapshot_of(*TWO), deadline_s=in_s())
            identity = session_identity(coordinator)
            await asyncio.to_thread(expire_session, zookeeper, *identity)
            await until(lambda: coordinator.status.session_version >= 2)
            await until_tree(zookeeper, recorded("after_broker_start"))
            _, owners = await asyncio.to_thread(read_tree, zookeeper)
            assert owners == {coordinator.status.session_id}
            assert coordinator.status.session_id != identity[0]

    run(scenario)


def test_nodes_that_others_delete_or_overwrite_come_back_by_a_watch(
    zookeeper: str,
) -> None:
    """Under a living session, long before the next check would find them gone."""
    wanted = recorded("after_broker_start")
    ours = [path for path, (data, _) in wanted.items() if data]

    def ruin(hosts: str, *, deletes: bool) -> None:
        client = KazooClient(hosts)
        client.start()
        try:
            for path in ours:
                if not deletes:
                    client.set(path, b"junk")
                elif not client.get_children(path):
                    client.delete(path)
        finally:
            client.stop()
            client.close()

    async def scenario() -> None:
        async with broker_on(zookeeper, check_interval_s=3600.0) as (registry, one):
            await registry.register(snapshot_of(*TWO), deadline_s=in_s())
            for deletes in (True, False):
                repairs = registry.statistics().repair_count
                await asyncio.to_thread(ruin, zookeeper, deletes=deletes)
                await until(lambda: registry.statistics().repair_count > repairs)  # noqa: B023
                await until_tree(zookeeper, wanted)
                await until(lambda: not registry.statistics().last_error)
            assert one.status.session_version == 1
            assert registry.statistics().state is RegistrationState.REGISTERED
            await registry.withdraw(deadline_s=in_s())

    run(scenario)


def test_a_second_broker_with_our_id_is_refused(zookeeper: str) -> None:
    """The second one refuses to start with one sentence; the first is untouched."""

    async def scenario() -> None:
        async with broker_on(zookeeper) as (first, _), broker_on(zookeeper) as (two, _):
            await first.register(snapshot_of(*TWO), deadline_s=in_s())
            with pytest.raises(BrokerIdTakenError, match="broker id taken"):
                await two.register(snapshot_of(*TWO, port=8124), deadline_s=in_s())
            await two.withdraw(deadline_s=in_s())
            assert await tree_of(zookeeper) == recorded("after_broker_start")

    run(scenario)


BROKER_PROGRAM = """
import asyncio, sys
from metaq.clock import SystemClock
from metaq.zk.coordinator import ZooKeeperCoordinator
from metaq.zk.registry import BrokerRegistry
from tests.integration.test_zk_registry import PATHS, TWO, snapshot_of

async def main():
    clock = SystemClock()
    hosts = sys.argv[1]
    coordinator = ZooKeeperCoordinator(hosts, session_timeout_ms=60000, clock=clock)
    registry = BrokerRegistry(coordinator, PATHS, clock=clock)
    coordinator.start()
    registry.start()
    deadline_s = clock.monotonic_s() + 60
    print(await registry.register(snapshot_of(*TWO), deadline_s=deadline_s), flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_nodes_of_a_killed_process_are_replaced_within_seconds(zookeeper: str) -> None:
    """kill -9 and start again: no wait for the old session's 60 s."""
    child = subprocess.Popen(
        [sys.executable, "-c", BROKER_PROGRAM, zookeeper],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == "True\n"
        os.kill(child.pid, signal.SIGKILL)
        child.wait()

    async def scenario() -> None:
        assert await tree_of(zookeeper) == recorded("after_broker_start")
        async with broker_on(zookeeper) as (registry, coordinator):
            assert await registry.register(snapshot_of(*TWO), deadline_s=in_s(45))
            tree, owners = await asyncio.to_thread(read_tree, zookeeper)
            assert tree == recorded("after_broker_start")
            assert owners == {coordinator.status.session_id}

    run(scenario)


def test_a_server_restart_keeps_session_and_nodes(
    zookeeper_alone: ZooKeeperServer,
) -> None:
    """The session survives on the server's disk; nothing is registered again."""

    async def scenario() -> None:
        async with broker_on(zookeeper_alone.address) as (registry, coordinator):
            await registry.register(snapshot_of(*TWO), deadline_s=in_s())
            before = registry.statistics().pass_count
            zookeeper_alone.kill()
            await until(lambda: coordinator.status.state is SessionState.SUSPENDED)
            zookeeper_alone.start()
            await until(lambda: coordinator.status.state is SessionState.CONNECTED)
            assert coordinator.status.session_version == 1
            assert await tree_of(zookeeper_alone.address) == recorded(
                "after_broker_start"
            )
            assert registry.statistics().pass_count == before
            await registry.withdraw(deadline_s=in_s())

    run(scenario)


def test_a_server_that_lost_its_data_is_filled_again(
    zookeeper_alone: ZooKeeperServer,
) -> None:
    """Wiped data: the old session is unknown, the new one registers everything."""

    async def scenario() -> None:
        # The new server refuses the session until the broker gives it up.
        async with broker_on(zookeeper_alone.address, session_timeout_ms=2000) as (
            registry,
            coordinator,
        ):
            await registry.register(snapshot_of(*TWO), deadline_s=in_s())
            zookeeper_alone.kill()
            zookeeper_alone.wipe()
            zookeeper_alone.start()
            await until(lambda: coordinator.status.session_version >= 2)
            await until_tree(zookeeper_alone.address, recorded("after_broker_start"))
            await registry.withdraw(deadline_s=in_s())

    run(scenario)


def test_a_broker_starts_without_zookeeper_and_registers_when_it_comes(
    zookeeper_alone: ZooKeeperServer,
) -> None:
    """An absent server costs the wait that the broker allows, and nothing else."""

    async def scenario() -> None:
        zookeeper_alone.stop()
        async with broker_on(zookeeper_alone.address) as (registry, _):
            begin = CLOCK.monotonic_s()
            assert not await registry.register(snapshot_of(*TWO), deadline_s=in_s(0.5))
            assert CLOCK.monotonic_s() - begin < 10
            zookeeper_alone.start()
            await until(
                lambda: registry.statistics().state is RegistrationState.REGISTERED
            )
            assert await tree_of(zookeeper_alone.address) == recorded(
                "after_broker_start"
            )
            await registry.withdraw(deadline_s=in_s())

    run(scenario)


def test_a_frozen_server_blocks_nobody_and_heals(
    zookeeper_alone: ZooKeeperServer,
) -> None:
    """While the server is frozen the loop runs on; afterwards everything is there."""

    async def scenario() -> None:
        # The server is missed after a part of it.
        async with broker_on(zookeeper_alone.address, session_timeout_ms=2000) as (
            registry,
            coordinator,
        ):
            await registry.register(snapshot_of(*TWO), deadline_s=in_s())
            state = RegistrationState.REGISTERED
            count = 0

            async def does_the_loop_run_on() -> bool:
                nonlocal count
                count += 1
                await until(lambda: coordinator.status.state is SessionState.CONNECTED)
                zookeeper_alone.pause()
                try:
                    registry.update(snapshot_of(*TWO, AdvertisedTopic("new", count)))
                    slowest_s = await slowest_turn(coordinator)
                finally:
                    zookeeper_alone.resume()
                await until(lambda: registry.statistics().state is state)
                return slowest_s < 1.0

            # A busy machine may hold up a turn; the server would hold up each time.
            async with asyncio.timeout(3 * PATIENCE_S):
                while not await does_the_loop_run_on():
                    pass
            tree = await tree_of(zookeeper_alone.address)
            assert tree | recorded("after_broker_start") == tree
            assert tree["/meta/brokers/topics/new/0-m"] == (str(count), True)
            await registry.withdraw(deadline_s=in_s())

    run(scenario)


async def slowest_turn(coordinator: ZooKeeperCoordinator) -> float:
    """Return the seconds of the loop's slowest turn until the server is missed."""
    slowest_s = 0.0
    async with asyncio.timeout(PATIENCE_S):
        while coordinator.status.state is SessionState.CONNECTED:
            begin_s = CLOCK.monotonic_s()
            await asyncio.sleep(0.01)
            slowest_s = max(slowest_s, CLOCK.monotonic_s() - begin_s)
    return slowest_s


def test_a_stop_on_a_frozen_server_is_bounded(
    zookeeper_alone: ZooKeeperServer,
) -> None:
    """Withdrawal and the end of the session keep their deadlines."""

    async def scenario() -> None:
        # Who waits for the end of the session waits for more than the bound below.
        async with broker_on(zookeeper_alone.address) as (registry, coordinator):
            await registry.register(snapshot_of(*TWO), deadline_s=in_s())
            zookeeper_alone.pause()
            try:
                begin = CLOCK.monotonic_s()
                await registry.withdraw(deadline_s=in_s(0.5))
                await coordinator.stop(deadline_s=in_s(0.5))
                assert CLOCK.monotonic_s() - begin < 10
            finally:
                zookeeper_alone.resume()

    run(scenario)
