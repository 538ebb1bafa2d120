"""Payloads of children, read and watched, on an in-memory ZooKeeper."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from metaq.errors import SessionSuspendedError
from metaq.testing.zk import MemoryCoordinator, MemoryZooKeeper
from metaq.zk.children import (
    INCOMPLETE_S_MAX,
    READS_AT_ONCE,
    SETTLE_S,
    ChildrenOfEach,
    Settler,
    ValuesWatch,
    read_values,
)
from metaq.zk.errors import PayloadError
from tests.rigs.virtual_time import VirtualClock, run_virtually
from tests.zk.meddling import MeddledZooKeeper

CLOCK = VirtualClock()


def in_s(seconds: float = 5.0) -> float:
    return CLOCK.monotonic_s() + seconds


def decode(data: bytes) -> str:
    if data == b"bad":
        raise PayloadError("value: expected anything else, got 'bad'")
    return data.decode()


async def connect(server: MemoryZooKeeper) -> MemoryCoordinator:
    coordinator = server.coordinator(CLOCK)
    coordinator.start()
    await asyncio.sleep(0)
    return coordinator


async def rounds(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_values_are_read_in_batches_by_ascending_names() -> None:
    """More children than requests at once, and none is forgotten."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        coordinator = await connect(server)
        names = [f"{number:04}" for number in range(2 * READS_AT_ONCE + 1)]
        for name in reversed(names):
            server.put(f"/p/{name}", name.encode())
        found = await read_values(coordinator, "/p", decode, deadline_s=in_s())
        assert list(found.items()) == [(name, name) for name in names]
        assert await read_values(coordinator, "/x", decode, deadline_s=in_s()) == {}

    run_virtually(scenario())


def test_what_vanishes_or_cannot_be_read_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A child may go between the list and the read."""

    async def scenario() -> None:
        server = MeddledZooKeeper()
        coordinator = await connect(server)
        for name in ("a", "b", "c"):
            server.put(f"/p/{name}", b"1")
        server.put("/p/b", b"bad")

        async def remove(_path: str) -> None:
            server.remove("/p/c")

        server.after["children"] = remove
        found = await read_values(coordinator, "/p", decode, deadline_s=in_s())
        assert found == {"a": "1"}

    run_virtually(scenario())
    assert [r.getMessage() for r in caplog.records] == [
        "node left out: path=/p/b error=value: expected anything else, got 'bad'"
    ]


def test_a_read_that_fails_fails_as_a_whole() -> None:
    """Half of the members would be another group."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        coordinator = await connect(server)
        for number in range(9):
            server.put(f"/p/{number}", b"1")
        reading = asyncio.ensure_future(
            read_values(coordinator, "/p", decode, deadline_s=in_s())
        )
        await rounds(2)
        server.suspend(coordinator)
        with pytest.raises(SessionSuspendedError):
            await reading

    run_virtually(scenario())


def test_watched_values_follow_names_and_payloads() -> None:
    """Children come, change, turn bad, are replaced and go; others do not matter."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        coordinator = await connect(server)
        news = 0

        def on_change() -> None:
            nonlocal news
            news += 1

        def wants(name: str) -> bool:
            return name != "unwanted"

        watch = ValuesWatch(coordinator, "/p", decode, on_change, wants=wants)
        assert not watch.is_complete
        await rounds()
        assert (watch.is_complete, watch.values, news) == (True, {}, 1)
        server.put("/p/unwanted", b"bad")
        server.put("/p/b", b"1")
        server.put("/p/a", b"2")
        await rounds()
        assert list(watch.values.items()) == [("a", "2"), ("b", "1")]
        for data, expected in ((b"bad", {"b": "1"}), (b"3", {"a": "3", "b": "1"})):
            server.put("/p/a", data)
            await rounds()
            assert watch.values == expected
            assert watch.is_complete
        server.remove("/p/a")
        server.put("/p/a", b"4")
        await rounds()
        assert watch.values == {"a": "4", "b": "1"}
        server.remove("/p/b")
        await rounds()
        assert watch.values == {"a": "4"}
        server.wipe()
        await rounds()
        assert (watch.values, watch.is_complete, watch.has_names) == ({}, True, True)
        watch.cancel()
        watch.cancel()
        before = news
        server.put("/p/a", b"5")
        await rounds()
        assert (watch.values, news) == ({}, before)

    run_virtually(scenario())


def test_a_watch_is_incomplete_until_every_name_was_read() -> None:
    """Names arrive before their payloads."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        server.put("/p/a", b"1")
        coordinator = await connect(server)
        seen: list[tuple[bool, bool]] = []

        def on_change() -> None:
            seen.append((watch.has_names, watch.is_complete))

        watch = ValuesWatch(coordinator, "/p", decode, on_change)
        await rounds()
        assert seen == [(True, False), (True, True)]

    run_virtually(scenario())


class Told:
    """A settler, and when it spoke, counted from the start in seconds."""

    def __init__(self, coordinator: MemoryCoordinator) -> None:
        self.is_complete = True
        self.begin_s = CLOCK.monotonic_s()
        self.times_s: list[float] = []
        self.settler = Settler(coordinator, lambda: self.is_complete, self.publish)

    def publish(self) -> None:
        self.times_s.append(round(CLOCK.monotonic_s() - self.begin_s, 3))


def settled(scenario: Any) -> None:
    async def with_settler() -> None:
        server = MemoryZooKeeper()
        coordinator = await connect(server)
        await scenario(Told(coordinator), server, coordinator)

    work: Coroutine[Any, Any, None] = with_settler()
    run_virtually(work)


def test_a_burst_is_told_once_when_it_is_over() -> None:
    """Everything within the settling time is one burst; the next one is another."""

    async def scenario(told: Told, *_rest: object) -> None:
        for _ in range(10):
            told.settler.note()
        await asyncio.sleep(1)
        assert told.times_s == [SETTLE_S]
        told.settler.note()
        await asyncio.sleep(INCOMPLETE_S_MAX * 3)
        assert told.times_s == [SETTLE_S, 1 + SETTLE_S]

    settled(scenario)


def test_what_is_incomplete_waits_for_the_rest_but_not_for_ever() -> None:
    """The last piece ends the burst; without it, patience does."""

    async def scenario(told: Told, *_rest: object) -> None:
        told.is_complete = False
        told.settler.note()
        await asyncio.sleep(1)
        told.is_complete = True
        told.settler.note()
        await asyncio.sleep(1)
        assert told.times_s == [1 + SETTLE_S]
        told.is_complete = False
        told.settler.note()
        await asyncio.sleep(INCOMPLETE_S_MAX * 3)
        assert told.times_s == [1 + SETTLE_S, 2 + INCOMPLETE_S_MAX]

    settled(scenario)


def test_nothing_incomplete_is_told_while_zookeeper_is_away() -> None:
    """A child that could not be read is not absent."""

    async def scenario(
        told: Told, server: MemoryZooKeeper, coordinator: MemoryCoordinator
    ) -> None:
        told.is_complete = False
        told.settler.note()
        server.suspend(coordinator)
        await asyncio.sleep(INCOMPLETE_S_MAX * 3.5)
        assert told.times_s == []
        server.resume(coordinator)
        await asyncio.sleep(INCOMPLETE_S_MAX)
        assert told.times_s == [INCOMPLETE_S_MAX * 4]

    settled(scenario)


def test_a_cancelled_settler_is_silent() -> None:
    """Neither the settling nor the patience speaks any more."""

    async def scenario(told: Told, *_rest: object) -> None:
        told.is_complete = False
        told.settler.note()
        await asyncio.sleep(1)
        told.settler.note()
        told.settler.cancel()
        told.settler.cancel()
        told.is_complete = True
        await asyncio.sleep(INCOMPLETE_S_MAX * 3)
        assert told.times_s == []

    settled(scenario)


def test_children_of_each_node_are_followed_by_its_key() -> None:
    """Those of nodes that are wanted no more are forgotten."""

    async def scenario() -> None:
        server, changes = MemoryZooKeeper(), list[None]()
        coordinator = await connect(server)
        found = ChildrenOfEach(lambda: changes.append(None))
        found.follow({"a": "/a", "b": "/b"}, coordinator.watch_children)
        server.put("/a/x", b"")
        await rounds()
        assert found.children == {"a": ("x",)}
        server.put("/b/y", b"")
        server.remove("/a/x")
        await rounds()
        assert found.children == {"b": ("y",)}
        found.follow({"a": "/a"}, coordinator.watch_children)
        assert not found.children
        server.put("/b/z", b"")
        server.put("/a/z", b"")
        await rounds()
        assert found.children == {"a": ("z",)}
        count = len(changes)
        found.cancel()
        server.remove("/a/z")
        await rounds()
        assert len(changes) == count

    run_virtually(scenario())
