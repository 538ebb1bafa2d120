"""Changes of a registration that fail half-way, and what is left of them."""

from metaq.errors import CoordinationError
from metaq.testing.zk import MemoryZooKeeper
from metaq.zk.plan import AdvertisedTopic
from tests.rigs.virtual_time import run_virtually
from tests.zk.test_registry import (
    SNAPSHOT,
    TEST_PUB,
    TWO,
    broker_on,
    in_s,
    recorded,
    settle,
    snapshot_of,
    tree_of,
)


def ephemerals_of(server: MemoryZooKeeper) -> set[str]:
    return {path for path, node in server.tree().items() if node.owner_session_id}


def test_a_change_that_failed_half_way_and_was_taken_back_is_mended() -> None:
    """Nodes deleted by a change that failed are there again at once."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with broker_on(server) as (registry, coordinator):
            await registry.register(SNAPSHOT, deadline_s=in_s(5))

            async def refuse(*_: object, **__: object) -> None:
                raise CoordinationError("no rights")

            coordinator.create_ephemeral = refuse  # type: ignore[method-assign]
            registry.update(snapshot_of(TWO[0], AdvertisedTopic("test", 4)))
            await settle()
            assert TEST_PUB not in server.tree()
            del coordinator.create_ephemeral
            registry.update(SNAPSHOT)
            await settle()
            assert tree_of(server) == recorded("after_broker_start")

    run_virtually(scenario())


def test_a_topic_that_came_in_part_and_was_taken_back_leaves_nothing() -> None:
    """A node that is not wanted any more does not live as long as the session."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with broker_on(server) as (registry, coordinator):
            await registry.register(snapshot_of(TWO[0]), deadline_s=in_s(5))
            before = ephemerals_of(server)
            create = coordinator.create_ephemeral

            async def create_all_but_one(path: str, data: bytes, **when: float) -> None:
                if path == TEST_PUB:
                    raise CoordinationError("no rights")
                await create(path, data, **when)

            coordinator.create_ephemeral = create_all_but_one  # type: ignore[method-assign]
            registry.update(SNAPSHOT)
            await settle()
            assert ephemerals_of(server) > before
            registry.update(snapshot_of(TWO[0]))
            await settle()
            assert ephemerals_of(server) == before

    run_virtually(scenario())


def test_a_removal_that_failed_half_way_and_was_taken_back_is_mended() -> None:
    """Nodes deleted by it are there again at once."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with broker_on(server) as (registry, coordinator):
            await registry.register(SNAPSHOT, deadline_s=in_s(5))
            delete = coordinator.delete

            async def delete_all_but_one(path: str, **when: float) -> bool:
                if path == TEST_PUB:
                    raise CoordinationError("no rights")
                return await delete(path, **when)

            coordinator.delete = delete_all_but_one  # type: ignore[method-assign]
            registry.update(snapshot_of(TWO[0]))
            await settle()
            assert tree_of(server) != recorded("after_broker_start")
            registry.update(SNAPSHOT)
            await settle()
            assert tree_of(server) == recorded("after_broker_start")

    run_virtually(scenario())
