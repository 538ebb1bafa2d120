"""Runs one operation on many items at once; an error stops no other one, or all."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, Final, TypeVar

from metaq.errors import MetaqError

AT_ONCE_MAX: Final = 64
"""Maximum number of concurrent operations of one `for_each`."""

K = TypeVar("K")
T = TypeVar("T")


async def for_each(
    operation: Callable[[K], Awaitable[T]], items: Iterable[K]
) -> dict[K, T | MetaqError]:
    """Run an operation on each item, at most AT_ONCE_MAX at once.

    Args:
        operation: its MetaqErrors become results; any other error cancels the rest.
        items: distinct items.

    Returns:
        The outcome of each item, in the order of the items.

    Cancellation: cancels all operations, and waits until they have ended.
    """
    every = list(items)
    if len(every) < 2:  # a task of its own costs more than most operations
        return {item: await _outcome(operation(item)) for item in every}
    gate = asyncio.Semaphore(AT_ONCE_MAX)

    async def run_one(item: K) -> T | MetaqError:
        async with gate:
            return await _outcome(operation(item))

    async with asyncio.TaskGroup() as group:
        tasks = {item: group.create_task(run_one(item)) for item in every}
    return {item: task.result() for item, task in tasks.items()}


async def _outcome(work: Awaitable[T]) -> T | MetaqError:
    try:
        return await work
    except MetaqError as error:
        return error


async def all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results, in order; the first error cancels the rest.

    Args:
        work: coroutines, all started at once. A single one runs in the caller's task.

    Raises:
        BaseException: the first error; the others are cancelled and have ended by then.

    Cancellation: cancels all coroutines, and waits until they have ended.
    """
    every = list(work)
    if len(every) < 2:
        return [await one for one in every]
    tasks = [asyncio.ensure_future(one) for one in every]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def all_for(
    operation: Callable[[K], Coroutine[Any, Any, T]], items: Iterable[K]
) -> dict[K, T]:
    """Return the result of each item, in order; as `all_of`."""
    every = list(items)
    return dict(zip(every, await all_of(map(operation, every)), strict=True))


def answers(results: Mapping[K, T | MetaqError]) -> dict[K, T]:
    """Return the results of `for_each` that are not errors."""
    return {i: one for i, one in results.items() if not isinstance(one, MetaqError)}


def failures(results: Mapping[K, object]) -> dict[K, MetaqError]:
    """Return the errors among the results of `for_each`."""
    return {i: one for i, one in results.items() if isinstance(one, MetaqError)}


def raise_first(results: Mapping[K, T | MetaqError]) -> list[T]:
    """Return the results of `for_each`, in order; raise the first error among them."""
    for error in failures(results).values():
        raise error
    return list(answers(results).values())
