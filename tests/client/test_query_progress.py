"""Values of a query in ZooKeeper: progress, start, routes, decision."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from metaq.client.cluster.context import ClientContext
from metaq.client.offsets.query_progress import (
    change_decision,
    change_routes,
    commit_progress,
    forget_decision,
    forget_routes,
    forget_start,
    keep_start,
    read_committed,
    read_decision,
    read_progress,
    read_start,
)
from metaq.client.options import ClientOptions
from metaq.errors import ConfigError
from metaq.model import Offset
from metaq.testing.zk import MemoryZooKeeper
from metaq.zk.paths import NodePaths
from tests.client.worlds import partition
from tests.rigs.virtual_time import VirtualClock, run_virtually

CLOCK = VirtualClock()
ZERO, ONE = partition(0), partition(1)


def run(scenario: Callable[[Any, float, MemoryZooKeeper], Awaitable[None]]) -> None:
    """Run a scenario with the context of a client that is connected."""

    async def main() -> None:
        server = MemoryZooKeeper()
        coordinator = server.coordinator(CLOCK)
        coordinator.start()
        unused: Any = None
        context = ClientContext(
            CLOCK,
            ClientOptions(),
            unused,
            unused,
            NodePaths(),
            unused,
            unused,
            coordinator,
        )
        await scenario(context, CLOCK.monotonic_s() + 60, server)
        await coordinator.stop(deadline_s=CLOCK.monotonic_s() + 1)

    run_virtually(main())


def test_progress_of_a_query_never_goes_back() -> None:
    async def scenario(context: Any, end_s: float, _server: MemoryZooKeeper) -> None:
        for offsets in ({ZERO: 10, ONE: 5}, {ZERO: 7}, {ONE: 6}):
            progress = {one: Offset(at) for one, at in offsets.items()}
            await commit_progress(context, "q", progress, deadline_s=end_s)
        wanted = [ZERO, ONE, partition(2)]
        found = await read_progress(context, "q", wanted, deadline_s=end_s)
        assert found == {ZERO: 10, ONE: 6}
        stored = await read_committed(context, "q", ["test", "none"], deadline_s=end_s)
        assert set(stored) == {ZERO, ONE}

    run(scenario)


def test_a_start_is_kept_until_it_is_forgotten() -> None:
    async def scenario(context: Any, end_s: float, _server: MemoryZooKeeper) -> None:
        assert await read_start(context, "q", deadline_s=end_s) is None
        await keep_start(context, "q", "0-0:7", deadline_s=end_s)
        assert await read_start(context, "q", deadline_s=end_s) == "0-0:7"
        for _ in range(2):
            await forget_start(context, "q", deadline_s=end_s)
        assert await read_start(context, "q", deadline_s=end_s) is None

    run(scenario)


def test_a_change_that_another_writer_overtakes_is_made_again() -> None:
    async def scenario(context: Any, end_s: float, server: MemoryZooKeeper) -> None:
        seen: list[bytes | None] = []

        def change(kept: bytes | None) -> bytes:
            if not seen:
                server.put(context.paths.query_decision("q"), b"theirs")
            seen.append(kept)
            return b"ours"

        assert await change_decision(context, "q", change, deadline_s=end_s) == b"ours"
        assert seen == [None, b"theirs"]
        assert await read_decision(context, "q", deadline_s=end_s) == b"ours"
        for _ in range(2):
            await forget_decision(context, "q", deadline_s=end_s)
        assert await read_decision(context, "q", deadline_s=end_s) is None

    run(scenario)


def test_routes_are_texts_and_an_unchanged_one_is_not_written() -> None:
    async def scenario(context: Any, end_s: float, server: MemoryZooKeeper) -> None:
        for wanted in ("a", "a"):
            kept = await change_routes(
                context, "q", lambda old: old or "a", deadline_s=end_s
            )
            assert kept == wanted
        assert server.tree()[context.paths.query_routes("q")].version == 0
        await forget_routes(context, "q", deadline_s=end_s)
        assert context.paths.query_routes("q") not in server.tree()

    run(scenario)


def test_a_request_is_made_again_until_there_is_a_session() -> None:
    async def scenario(context: Any, end_s: float, server: MemoryZooKeeper) -> None:
        server.stop()
        asyncio.get_running_loop().call_later(5, server.start)
        assert await read_start(context, "q", deadline_s=end_s) is None
        assert CLOCK.monotonic_s() >= end_s - 55

    run(scenario)


def test_a_client_without_zookeeper_says_so() -> None:
    async def scenario(context: Any, end_s: float, _server: MemoryZooKeeper) -> None:
        context = replace(context, coordinator=None)
        with pytest.raises(
            ConfigError, match="progress is kept in ZooKeeper: expected"
        ):
            await read_start(context, "q", deadline_s=end_s)

    run(scenario)
