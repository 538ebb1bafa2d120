"""Commits without waiting: few writes, and futures that always end."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

import pytest

from metaq.client.offsets.commit_orders import CommitOrders
from metaq.client.offsets.committer import Commit, CommitOrder, Committer
from metaq.client.offsets.offset_store import MemoryOffsets, OffsetStore
from metaq.clock import SystemClock
from metaq.errors import ClosedError, OwnershipLostError
from metaq.loop_thread import LoopThread
from metaq.model import BrokerId, GroupOffset, Offset, TopicPartition

P0 = TopicPartition("t", BrokerId(0), 0)
HANDLED = CommitOrder()
PATIENCE_S = 30.0


def named(offset: int) -> CommitOrder:
    return CommitOrder({P0: GroupOffset(Offset(offset))})


class Rig:
    """Orders, and a committer of one partition; `handled` goes up with each look."""

    def __init__(self, store: OffsetStore | None = None) -> None:
        self.committer = Committer(
            store or MemoryOffsets(),
            group="g",
            clock=SystemClock(),
            timeout_s=5.0,
            fence=lambda: None,
        )
        self.committer.admit(P0)
        self.handled = 0
        self.begun: list[CommitOrder] = []
        self.orders = CommitOrders(self.begin)

    async def begin(self, order: CommitOrder) -> Commit:
        self.begun.append(order)
        if order.named is not None:
            return self.committer.request({}, order)
        self.handled += 1
        return self.committer.request({P0: GroupOffset(Offset(self.handled))})

    def add(self, order: CommitOrder) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self.orders.add(order, future, loop.create_task)
        return future


def test_orders_of_one_turn_for_what_is_handled_are_one_commit() -> None:
    """Those that name an offset keep their places between them."""

    async def scenario() -> None:
        rig = Rig()
        futures = [rig.add(HANDLED) for _ in range(100)]
        futures += [rig.add(named(50)), rig.add(HANDLED), rig.add(HANDLED)]
        await asyncio.gather(*futures)
        assert [one.named is None for one in rig.begun] == [True, False, True]
        assert rig.committer.commit_count == 1
        await rig.add(HANDLED)
        assert len(rig.begun) == 4

    asyncio.run(scenario())


def test_an_order_that_is_being_checked_is_not_overtaken() -> None:
    """A later one, perhaps of an offset before it, begins after it."""

    async def scenario() -> None:
        rig, may_begin = Rig(), asyncio.Event()
        one, other = named(7), named(5)

        async def begin(order: CommitOrder) -> Commit:
            if order is one:
                await may_begin.wait()
            return await rig.begin(order)

        rig.orders = CommitOrders(begin)
        futures = [rig.add(one)]
        await asyncio.sleep(0)
        futures.append(rig.add(other))
        for _ in range(5):
            await asyncio.sleep(0)
        may_begin.set()
        await asyncio.gather(*futures)
        assert rig.begun == [one, other]

    asyncio.run(scenario())


def test_the_message_that_was_lost_is_the_error_of_its_own_order() -> None:
    """Others of the same turn do not get it."""

    async def scenario() -> None:
        rig = Rig()
        lost = OwnershipLostError("t/0-0: lost")
        one, other = rig.add(CommitOrder(lost=lost)), rig.add(HANDLED)
        with pytest.raises(OwnershipLostError, match="lost"):
            await one
        assert await other is None

    asyncio.run(scenario())


def test_a_future_that_was_cancelled_cancels_no_commit() -> None:
    async def scenario() -> None:
        rig = Rig()
        one, other = rig.add(HANDLED), rig.add(HANDLED)
        one.cancel()
        await other
        assert rig.committer.commit_count == 1

    asyncio.run(scenario())


def test_an_error_of_the_begin_ends_the_futures() -> None:
    """It is a bug; who waits hears of it."""

    async def scenario() -> None:
        rig = Rig()
        rig.orders = CommitOrders(lambda _order: 1 / 0)
        futures = [rig.add(HANDLED), rig.add(HANDLED)]
        for future in futures:
            with pytest.raises(ClosedError):
                await future

    with pytest.raises(ZeroDivisionError):
        _run_strictly(scenario())


def _run_strictly(scenario: Coroutine[Any, Any, None]) -> None:
    """Raise what a task that nobody waits for has raised."""
    errors: list[BaseException] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, told: errors.append(told["exception"]))
        await scenario

    asyncio.run(run())
    raise errors[0]


@pytest.mark.parametrize("is_begun", [False, True])
def test_the_end_of_the_loop_ends_the_futures(is_begun: bool) -> None:
    """Also where the work was cancelled before its first step."""
    futures: list[asyncio.Future[None]] = []

    class Hanging(MemoryOffsets):
        async def commit(self, *_words: Any, **_named: Any) -> Any:
            await asyncio.sleep(PATIENCE_S)

    async def scenario() -> None:
        rig = Rig(Hanging())
        futures.append(rig.add(HANDLED))
        if is_begun:
            await asyncio.sleep(0.01)
        futures.append(rig.add(HANDLED))

    asyncio.run(scenario())
    for future in futures:
        assert isinstance(future.exception(), ClosedError)


@pytest.mark.slow
def test_orders_of_other_threads_end_with_the_loop_s_thread() -> None:
    """Whatever they meet: answered, or closed; and a closed loop takes none."""
    thread = LoopThread("orders")
    rig = thread.run(_made())
    futures: list[Future[None]] = []
    refused = threading.Event()

    def add_many() -> None:
        while not refused.is_set():
            future: Future[None] = Future()
            try:
                rig.orders.add(HANDLED, future, thread.begin)
            except ClosedError:
                refused.set()
            else:
                futures.append(future)

    readers = [threading.Thread(target=add_many) for _ in range(3)]
    for reader in readers:
        reader.start()
    while len(futures) < 100:
        pass
    thread.stop()
    for reader in readers:
        reader.join(PATIENCE_S)
        assert not reader.is_alive()
    for future in futures:
        assert isinstance(future.exception(PATIENCE_S), ClosedError | None)


async def _made() -> Rig:
    return Rig()
