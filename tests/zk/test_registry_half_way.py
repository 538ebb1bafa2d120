"""Changes of a registration that fail half-way, and what is left of them."""

import asyncio
from dataclasses import replace

import pytest

from metaq.errors import CoordinationError
from metaq.testing.zk import MemoryZooKeeper
from metaq.zk.plan import AdvertisedTopic
from metaq.zk.registry import BACKOFF, RegistrationState
from tests.rigs.virtual_time import run_virtually
from tests.zk.test_registry import (
    MASTER,
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


@pytest.mark.parametrize("is_expired", [False, True])
def test_a_topic_that_came_in_part_and_was_taken_back_leaves_nothing(
    is_expired: bool,
) -> None:
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
            record = "/meta/catalog/partitions/test"
            assert record in server.tree()
            if is_expired:
                server.suspend(coordinator)
                server.expire(coordinator)
            registry.update(snapshot_of(TWO[0]))
            await settle()
            assert ephemerals_of(server) == before
            assert record not in server.tree()
            assert registry.statistics().state is RegistrationState.REGISTERED

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


def test_a_topic_that_goes_while_it_is_being_closed_leaves_nothing() -> None:
    """Not even the node that its last change should have deleted."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with broker_on(server) as (registry, coordinator):
            await registry.register(snapshot_of(TWO[0]), deadline_s=in_s(5))
            before = ephemerals_of(server)
            registry.update(SNAPSHOT)
            await settle()

            async def refuse(*_: object, **__: object) -> bool:
                raise CoordinationError("no rights")

            coordinator.delete = refuse  # type: ignore[method-assign]
            closed = replace(TWO[1], accepts_puts=False)
            registry.update(snapshot_of(TWO[0], closed))
            await settle()
            assert TEST_PUB in server.tree()
            del coordinator.delete
            registry.update(snapshot_of(TWO[0]))
            await settle()
            assert ephemerals_of(server) == before

    run_virtually(scenario())


def test_a_node_that_goes_during_a_pass_is_back_before_it_counts_as_registered() -> (
    None
):
    """The pass had already been at it."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with broker_on(server) as (registry, _):
            registering = asyncio.create_task(
                registry.register(SNAPSHOT, deadline_s=in_s(5))
            )
            while ("create", TEST_PUB) not in server.calls:
                await asyncio.sleep(0)
            server.remove(MASTER)
            await settle()
            assert registry.statistics().state is RegistrationState.PENDING
            assert MASTER in registry.statistics().last_error
            assert await registering
            assert tree_of(server) == recorded("after_broker_start")

    run_virtually(scenario())


def test_the_first_failure_after_a_success_is_followed_by_a_short_pause() -> None:
    """However many there were in a row before."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        server.refusal = "busy"
        async with broker_on(server) as (registry, _):
            assert not await registry.register(snapshot_of(TWO[0]), deadline_s=in_s(60))
            server.refusal = ""
            await asyncio.sleep(BACKOFF.max_s)
            assert registry.statistics().state is RegistrationState.REGISTERED
            server.refusal = "busy"
            registry.update(SNAPSHOT)
            await settle()
            server.refusal = ""
            await asyncio.sleep(BACKOFF.first_s)
            assert tree_of(server) == recorded("after_broker_start")

    run_virtually(scenario())


def test_the_first_failure_after_a_reconnection_is_followed_by_a_short_pause() -> None:
    """A server that has just come back may refuse once."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        server.refusal = "busy"
        async with broker_on(server) as (registry, coordinator):
            assert not await registry.register(SNAPSHOT, deadline_s=in_s(60))
            server.suspend(coordinator)
            server.resume(coordinator)
            await settle()
            server.refusal = ""
            await asyncio.sleep(BACKOFF.first_s)
            assert tree_of(server) == recorded("after_broker_start")

    run_virtually(scenario())
