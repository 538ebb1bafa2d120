"""Commits requested by users: parsing of their argument, and `commit_nowait`.

commit(message)              up to this message and with it
commit([message, ...])       up to the last one of each partition
commit(batch)                the offsets of the batch
commit({partition: offset})  this offset, which may be before the committed one

`commit_nowait` may be called on any thread, and a reader that calls it after each
message may be faster than the loop. Orders are therefore queued in a list, and each
turn of the loop takes the whole list: its size is bounded by the orders of one turn,
and consecutive orders for handled messages share one commit.
"""

import asyncio
import threading
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Mapping,
)
from concurrent.futures import Future
from typing import Any, Protocol, TypeAlias, runtime_checkable

from metaq.client.names import as_partition
from metaq.client.offsets.committer import Commit, CommitOrder
from metaq.client.offsets.offset_reset import NO_MESSAGE
from metaq.client.validation import check_offset, wrong_type
from metaq.errors import ClosedError, MetaqError
from metaq.model import GroupOffset, Message, MessageId, Offset, TopicPartition


@runtime_checkable
class HasOffsets(Protocol):
    """A batch of messages, seen as the offsets to commit after it."""

    @property
    def offsets(self) -> Mapping[TopicPartition, Offset]:
        """The next offset of each partition in the batch."""


Committable: TypeAlias = (
    Message
    | HasOffsets
    | Iterable[Message]
    | Mapping[TopicPartition, int]
    | Mapping[str, int]
)
"""Argument of a commit; the module docstring has a table."""


def read_committable(what: Committable, topics: Collection[str]) -> CommitOrder:
    """Parse the argument of a commit.

    Args:
        what: argument of the commit.
        topics: the subscribed topics; they complete partition names such as `"0-3"`.

    Raises:
        TypeError: the argument is of another type.
        ConfigError: an offset or a partition name is invalid.
    """
    if isinstance(what, Mapping):
        for offset in what.values():
            check_offset("offset", offset)
        named = {as_partition(one, topics): Offset(at) for one, at in what.items()}
        return CommitOrder(_with_ids(named, {}), may_go_back=True)
    # Message is a tuple and a batch is a sequence, so the order of the tests matters.
    messages = [what] if isinstance(what, Message) else what
    ids: dict[TopicPartition, MessageId] = {}
    ends: dict[TopicPartition, Offset] = {}
    if not isinstance(messages, Iterable):
        raise _wrong(what)
    for one in messages:
        if not isinstance(one, Message):
            raise _wrong(one)
        if one.next_offset >= ends.get(one.partition, 0):
            ends[one.partition], ids[one.partition] = one.next_offset, one.id
    if isinstance(what, HasOffsets):
        ends |= what.offsets
    return CommitOrder(_with_ids(ends, ids))


def _with_ids(
    offsets: Mapping[TopicPartition, Offset], ids: Mapping[TopicPartition, MessageId]
) -> dict[TopicPartition, GroupOffset]:
    return {
        partition: GroupOffset(offset, ids.get(partition, NO_MESSAGE))
        for partition, offset in offsets.items()
    }


def _wrong(what: object) -> TypeError:
    wanted = "a Message, messages, a batch, or a mapping of partitions to offsets"
    return wrong_type("commit", wanted, what)


# -- not waited for --------------------------------------------------------------------


AnyFuture: TypeAlias = asyncio.Future[None] | Future[None]


class CommitOrders:
    """Queue of one consumer's `commit_nowait` orders, each with its future."""

    def __init__(self, begin: Callable[[CommitOrder], Awaitable[Commit]]) -> None:
        """Create an empty queue; `begin` starts a commit and is called on the loop."""
        self._begin = begin
        self._beginning = asyncio.Lock()
        """Held while commits are started, so that none overtakes an earlier one."""
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
            future: always completed, unless this call raises.
            start: schedules a coroutine on the loop.

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
        """Commit the queued orders and complete their futures."""
        waiting: list[tuple[CommitOrder, AnyFuture]] = []
        begun: list[Commit] = []
        last: CommitOrder | None = None
        try:
            async with self._beginning:
                waiting = self._take()
                for order, _future in waiting:
                    is_same = last is not None and last.named is order.named is None
                    begun.append(begun[-1] if is_same else await self._begin(order))
                    last = order
            for (order, future), commit in zip(waiting, begun, strict=True):
                _finish(future, order.error(await commit.wait()))
        finally:
            for _order, future in waiting:
                _finish(future, _closed())

    def _on_end(self, run: AnyFuture) -> None:
        self._runs.discard(run)
        # A loop that shuts down may cancel the task before its first step.
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
