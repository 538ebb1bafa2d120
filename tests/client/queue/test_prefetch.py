"""Waiting messages, and the tasks and threads that wait for messages."""

import asyncio
import threading

import pytest

from metaq.client.queue.prefetch import HeldMessage, HeldState, Prefetch
from metaq.errors import ClosedError
from metaq.model import BrokerId, Offset, TopicPartition
from metaq.testing.clock import ManualClock
from tests.rigs.waiting import until, wait_until

PARTITION = TopicPartition("orders", BrokerId(0), 0)


def held(offset: int, lease_end_s: float = 1e9) -> HeldMessage:
    return HeldMessage((), PARTITION, Offset(offset), 1, 1, 30.0, lease_end_s, 0.0)


def test_messages_are_handed_out_in_order_and_once() -> None:
    prefetch = Prefetch(ManualClock())
    messages = [held(0), held(10)]
    prefetch.put(messages)
    assert [prefetch.take_nowait(), prefetch.take_nowait()] == messages
    assert prefetch.take_nowait() is None
    assert {one.state for one in messages} == {HeldState.BEGUN}


def test_a_message_whose_lease_is_over_is_passed_over() -> None:
    """Another worker gets it, or has it."""
    clock = ManualClock()
    prefetch = Prefetch(clock)
    over = held(0, lease_end_s=clock.monotonic_s())
    good = held(10)
    prefetch.put([over, good])
    assert prefetch.take_nowait() is good
    assert over.state is HeldState.LOST


def test_what_was_given_back_is_not_handed_out() -> None:
    """Nor does it stay in the way of later ones."""
    prefetch = Prefetch(ManualClock())
    gone, good = held(0), held(10)
    prefetch.put([gone])
    gone.state = HeldState.SETTLED
    prefetch.put([])
    assert not prefetch.has_ready
    prefetch.put([good])
    assert prefetch.drain() == [good]


def test_an_error_comes_after_the_messages_and_for_all() -> None:
    prefetch = Prefetch(ManualClock())
    prefetch.put([held(0)])
    prefetch.fail(ClosedError("over"))
    assert prefetch.take_nowait() is not None
    for _ in range(2):
        with pytest.raises(ClosedError, match="over"):
            prefetch.take_nowait()


def test_the_last_message_that_is_handed_out_is_reported_once() -> None:
    """On the loop, whoever takes it; not if none waits to begin with."""

    async def scenario() -> None:
        prefetch, calls = Prefetch(ManualClock()), list[int]()

        def call() -> None:
            calls.append(threading.get_ident())

        assert not prefetch.call_when_empty(call)
        prefetch.put([held(0), held(10), held(20)])
        for _ in range(2):
            assert prefetch.call_when_empty(call)
            await asyncio.to_thread(prefetch.take_nowait)
        await asyncio.sleep(0)
        assert calls == []
        await asyncio.to_thread(prefetch.take_nowait)
        await asyncio.sleep(0)
        prefetch.put([held(30)])
        assert prefetch.take_nowait() is not None
        await asyncio.sleep(0)
        assert calls == [threading.get_ident()]

    asyncio.run(scenario())


def test_each_message_wakes_one_task_and_a_cancelled_one_passes_it_on() -> None:
    """A message is not left lying because its waiter went away in that moment."""

    async def scenario() -> None:
        prefetch = Prefetch(ManualClock())
        first = asyncio.create_task(prefetch.take_async())
        second = asyncio.create_task(prefetch.take_async())
        await asyncio.sleep(0)
        one = held(0)
        prefetch.put([one])
        first.cancel()
        assert await second is one
        with pytest.raises(asyncio.CancelledError):
            await first

    asyncio.run(scenario())


def test_tasks_that_wait_hear_of_the_end() -> None:
    async def scenario() -> None:
        prefetch = Prefetch(ManualClock())
        tasks = [asyncio.create_task(prefetch.take_async()) for _ in range(3)]
        await asyncio.sleep(0)
        prefetch.fail(ClosedError("over"))
        await until(lambda: all(task.done() for task in tasks))
        assert {str(task.exception()) for task in tasks} == {"over"}

    asyncio.run(scenario())


def test_threads_wait_for_messages_and_for_no_longer_than_they_say() -> None:
    prefetch = Prefetch(ManualClock())
    found: list[HeldMessage | None] = []
    threads = [
        threading.Thread(target=lambda: found.append(prefetch.take(None)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    assert prefetch.take(0.0) is None
    messages = [held(0), held(10)]
    prefetch.put(messages)
    for thread in threads:
        thread.join(30)
    wait_until(lambda: len(found) == 2)
    assert {id(one) for one in found} == {id(one) for one in messages}
