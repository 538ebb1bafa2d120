"""A run of handlers with a time-out: its waits at the end, and later effects."""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from metaq.client import Client
from metaq.client.consume.redelivery import RetryPolicy
from metaq.client.offsets.offset_store import MemoryOffsets
from metaq.model import Message
from tests.brokers import AnyBroker, StartBroker
from tests.client.worlds import IDLE, QUICK, WORLDS, payloads, take
from tests.rigs.waiting import PATIENCE_S, wait_until

SHORT_S = 0.05
"""Of runs."""


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    return start_broker()


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, broker: AnyBroker) -> Iterator[Any]:
    with WORLDS[request.param](brokers=[broker.address], **QUICK) as one:
        yield one


def handler_of(client: Any, handle: Any) -> Any:
    if isinstance(client, Client):
        return handle

    async def handle_async(message: Message) -> None:
        await asyncio.to_thread(handle, message)

    return handle_async


@pytest.mark.slow
def test_a_run_ends_at_the_end_of_its_time_and_may_be_begun_again(
    broker: AnyBroker, client: Any
) -> None:
    found: list[bytes] = []
    handle = handler_of(client, lambda message: found.append(message.data))
    store = MemoryOffsets()
    with client.consumer("g", ["test"], offsets=store, **IDLE) as consumer:
        broker.put(b"0", b"1")
        while len(found) < 2:
            consumer.run(handle, concurrency=2, timeout=SHORT_S)
        assert not consumer.is_closed
        broker.put(b"2")
        while len(found) < 3:
            consumer.run(handle, timeout=SHORT_S)
        assert consumer.statistics().handling.failure_count == 0
    assert found == [b"0", b"1", b"2"]


@pytest.mark.slow
def test_a_run_that_ends_waits_for_handlers_that_are_at_work(
    broker: AnyBroker, client: Any
) -> None:
    """Their messages are handled; no new one is begun."""
    broker.put(b"0", b"1")
    work_s = 2 * SHORT_S

    def is_the_first_the_last() -> bool:
        nonlocal work_s
        work_s *= 2
        group, found = f"g-{round(work_s * 1000)}", list[bytes]()

        def work(message: Message) -> None:
            time.sleep(work_s)
            found.append(message.data)

        store = MemoryOffsets()
        with client.consumer(group, ["test"], offsets=store, **IDLE) as consumer:
            handle = handler_of(client, work)
            while not found:
                consumer.run(handle, timeout=SHORT_S)
        if found != [b"0"]:
            return False
        with client.consumer(group, ["test"], offsets=store, **IDLE) as consumer:
            assert payloads(take(consumer, 1)) == [b"1"]
        return True

    # A caller that the machine wakes late finds the next message begun.
    wait_until(is_the_first_the_last)


@pytest.mark.slow
def test_a_run_waits_for_handlers_no_longer_than_it_was_told_to(
    broker: AnyBroker, client: Any
) -> None:
    broker.put(b"0")
    at_work, go_on = threading.Event(), threading.Event()

    def work(_message: Message) -> None:
        at_work.set()
        go_on.wait(PATIENCE_S)

    options: dict[str, Any] = {"revoke_timeout_s": SHORT_S, **IDLE}
    store = MemoryOffsets()
    with client.consumer("g", ["test"], offsets=store, **options) as consumer:
        handle = handler_of(client, work)
        while not at_work.is_set():
            consumer.run(handle, timeout=SHORT_S)
        consumer.close()
    go_on.set()
    with client.consumer("g", ["test"], offsets=store, **IDLE) as consumer:
        assert payloads(take(consumer, 1)) == [b"0"]


@pytest.mark.slow
def test_what_a_run_leaves_stuck_is_a_problem_until_a_later_run_handles_it(
    broker: AnyBroker, client: Any
) -> None:
    """The topic of dead letters is closed; they get no longer than the run has."""
    broker.create_topic("no")
    wait_until(lambda: "no" in client.topics())
    broker.close_partition("no")
    fails, tried, found = [True], [], []

    def handle(message: Message) -> None:
        if fails:
            tried.append(message)
            raise ValueError("no number")
        found.append(message.data)

    policy = RetryPolicy(attempts_max=1, then="dead_letter", dead_letter_topic="no")
    options = {"offsets": MemoryOffsets(), **IDLE}
    with client.consumer("g", ["test"], **options) as consumer:
        broker.put(b"0", b"1")
        handler = handler_of(client, handle)
        while not tried:
            consumer.run(handler, retry=policy, timeout=SHORT_S)
        health = consumer.health()
        assert not health.is_ok
        (problem,) = health.problems
        assert "failed 1 times: ValueError('no number'); it is given up" in problem
        assert "; it is given up, and no broker or disk takes it: " in problem
        assert "no run is handling it now" in problem
        fails.clear()
        while len(found) < 2:
            consumer.run(handler, retry=policy, timeout=SHORT_S)
        assert consumer.health().is_ok
