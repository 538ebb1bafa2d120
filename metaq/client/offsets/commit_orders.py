"""Commits that are not waited for, on their way from any thread to the loop.

A reader that asks for one after each message may be faster than the loop. Orders wait
in a list that the loop empties at once, so they are as many as are given in one turn of
it, and those for what is handled become one commit.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeAlias

from metaq.client.offsets.committer import Commit, CommitOrder
from metaq.errors import ClosedError, MetaqError

AnyFuture: TypeAlias = asyncio.Future[None] | Future[None]


class CommitOrders:
    """Orders of one consumer, with the futures that answer them."""

    def __init__(self, begin: Callable[[CommitOrder], Commit]) -> None:
        """Begin without an order; `begin` is called on the loop."""
        self._begin = begin
        self._lock = threading.Lock()
        self._waiting: list[tuple[CommitOrder, AnyFuture]] = []
        self._runs: set[AnyFuture] = set()

    def add(
        self,
        order: CommitOrder,
        future: AnyFuture,
        start: Callable[[Coroutine[Any, Any, None]], AnyFuture],
    ) -> None:
        """Add an order; from any thread.

        Args:
            order: what to commit.
            future: it ends in every case, unless this raises.
            start: begins work on the loop.

        Raises:
            ClosedError: the loop is closed.
        """
        with self._lock:
            self._waiting.append((order, future))
            if len(self._waiting) > 1:
                return
        try:
            run = start(self._run())
        except ClosedError as error:
            self._fail(error)
            raise
        self._runs.add(run)
        run.add_done_callback(self._on_end)

    async def _run(self) -> None:
        """Commit what waits, and answer."""
        waiting = self._take()
        begun: list[Commit] = []
        last: CommitOrder | None = None
        try:
            for order, _future in waiting:
                is_same = last is not None and last.named is order.named is None
                begun.append(begun[-1] if is_same else self._begin(order))
                last = order
            for (order, future), commit in zip(waiting, begun, strict=True):
                _finish(future, order.error(await commit.wait()))
        finally:
            for _order, future in waiting:
                _finish(future, _closed())

    def _on_end(self, run: AnyFuture) -> None:
        self._runs.discard(run)
        # The loop ends; it may have ended the run before its first step.
        if run.cancelled():
            self._fail(_closed())

    def _fail(self, error: MetaqError) -> None:
        for _order, future in self._take():
            _finish(future, error)

    def _take(self) -> list[tuple[CommitOrder, AnyFuture]]:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        return waiting


def _closed() -> ClosedError:
    return ClosedError("commit: the client was closed before it was done")


def _finish(future: AnyFuture, error: MetaqError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
