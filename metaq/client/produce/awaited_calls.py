"""Calls of a transaction that were never awaited: it does not commit without them.

A coroutine that is not awaited never runs: `tx.send(...)` in place of
`await tx.send(...)` would send nothing, and the commit would succeed, in an
exactly-once block with the offsets of messages of which nothing was made. So a call is
noted when it is made, until its coroutine begins.
"""

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from metaq.client.options import names_arguments
from metaq.client.own_process import OfOneProcess
from metaq.errors import TransactionError

P = ParamSpec("P")
R = TypeVar("R")


class AwaitedCalls(OfOneProcess):
    """Base class of transactions: the calls whose coroutines have not begun.

    Concurrency: from any thread, as the sync client makes coroutines in its caller's.
    """

    def __init__(self) -> None:
        self._not_begun = dict[object, str]()
        """Token of a call → name of its method."""

    def _forget_calls(self) -> None:
        self._not_begun.clear()

    def _unawaited(self) -> TransactionError | None:
        """Return the error of a transaction that has such calls."""
        names = sorted(self._not_begun.values())
        if not names:
            return None
        counts = ", ".join(f"{names.count(one)} of {one}" for one in sorted({*names}))
        return TransactionError(
            f"calls that were never awaited, so that nothing was sent: {counts};"
            f" write `await tx.{names[0]}(...)`"
        )


C = TypeVar("C", bound=AwaitedCalls)


def to_be_awaited(
    method: Callable[Concatenate[C, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[C, P], Coroutine[Any, Any, R]]:
    """Note each call of a coroutine method until its coroutine begins.

    Errors about the arguments of a call name it, once it is awaited.
    """
    name, begin = method.__name__, names_arguments(method)

    @functools.wraps(method)
    async def run(self: C, token: object, args: Any, keywords: Any) -> R:
        self._not_begun.pop(token, None)
        return await begin(self, *args, **keywords)

    @functools.wraps(method)
    def call(self: C, /, *args: P.args, **keywords: P.kwargs) -> Coroutine[Any, Any, R]:
        token = object()
        self._not_begun[token] = name
        return run(self, token, args, keywords)

    return call
