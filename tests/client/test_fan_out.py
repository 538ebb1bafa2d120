"""One operation on many items."""

import asyncio

import pytest

from metaq.client.fan_out import (
    AT_ONCE_MAX,
    all_of,
    answers,
    failures,
    for_each,
    raise_first,
)
from metaq.errors import ClientError, MetaqError
from tests.rigs.waiting import until


def test_what_fails_does_not_stop_the_others() -> None:
    """Results and errors, in the order of the items."""
    error = ClientError("no")

    async def half(number: int) -> int:
        await asyncio.sleep(0)
        if number % 2:
            raise error
        return number // 2

    results = asyncio.run(for_each(half, [4, 3, 2]))
    assert list(results.items()) == [(4, 2), (3, error), (2, 1)]
    assert failures(results) == {3: error}
    assert answers(results) == {4: 2, 2: 1}
    with pytest.raises(ClientError, match="no"):
        raise_first(results)
    raise_first({4: 2})


def test_so_many_and_no_more_at_once() -> None:
    """The bound is reached, and kept."""
    running = most = 0

    async def note(_number: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    asyncio.run(for_each(note, range(3 * AT_ONCE_MAX)))
    assert most == AT_ONCE_MAX


def test_a_bug_ends_all_of_them() -> None:
    """Nothing runs on behind the caller's back."""
    ended: list[int] = []

    async def work(number: int) -> None:
        if number == 0:
            raise ValueError("a bug")
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(number)

    with pytest.raises(ExceptionGroup):
        asyncio.run(for_each(work, range(3)))
    assert sorted(ended) == [1, 2]


def test_cancelling_ends_all_of_them() -> None:
    """Before the caller goes on."""
    begun: list[int] = []
    ended: list[int] = []

    async def work(number: int) -> MetaqError | None:
        begun.append(number)
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(number)
        return None

    async def scenario() -> None:
        task = asyncio.create_task(for_each(work, range(3)))
        await until(lambda: len(begun) == 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert sorted(ended) == [0, 1, 2]

    asyncio.run(scenario())


def test_all_results_come_in_the_order_of_the_work() -> None:
    """Whichever ends first."""

    async def wait(turns: int) -> int:
        for _ in range(turns):
            await asyncio.sleep(0)
        return turns

    async def scenario() -> list[int]:
        return await all_of(map(wait, (3, 1, 2)))

    assert asyncio.run(scenario()) == [3, 1, 2]


async def fail_first(ended: list[int], number: int) -> int:
    """Fail as number 0; else work for long, and note the end, which takes a while."""
    if number == 0:
        raise ClientError("no")
    try:
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(0)
        ended.append(number)
    return number


def test_the_first_error_ends_the_rest_before_it_is_raised() -> None:
    """Nothing runs on behind the caller's back."""

    async def scenario() -> None:
        ended: list[int] = []
        with pytest.raises(ClientError, match="no"):
            await all_of(fail_first(ended, number) for number in (1, 0, 2))
        assert sorted(ended) == [1, 2]

    asyncio.run(scenario())


def test_cancelling_ends_all_of_the_work() -> None:
    """Before the caller goes on."""

    async def scenario() -> None:
        begun: list[int] = []
        ended: list[int] = []

        async def work(number: int) -> int:
            begun.append(number)
            return await fail_first(ended, number)

        task = asyncio.create_task(all_of(map(work, (1, 2))))
        await until(lambda: len(begun) == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert sorted(ended) == [1, 2]

    asyncio.run(scenario())
