"""The batch that an iterator holds, and which of its messages are handled.

One task or thread at a time reads a consumer, sync or async. Its loop and its `receive`
both hand out messages of this batch, and take turns. A second reader would count
messages of the first one as handled, so it is refused when it is detected.

A message is handled when the next one is requested. The end of the loop does not mean
that the last message is handled, so it stays current: the next loop over the same
consumer counts it, `commit` counts it, a clean end of the `with` block counts it, and
an exception does not.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

from metaq.client.consume.fetch_buffer import FetchBuffer, FetchedBatch
from metaq.errors import ClientError, OwnershipLostError
from metaq.model import Message

TWO_READERS: Final = (
    "two tasks or threads read this consumer at once: read it in one of them, or have"
    " `run` call a handler, which may work on several messages at once"
)

Looper: TypeAlias = asyncio.Task[Any] | threading.Thread
"""Task or thread that runs a loop over a consumer."""


class CurrentBatch:
    """Batch held by one consumer's iterator. Used by one thread at a time."""

    def __init__(self, fetch_buffer: FetchBuffer) -> None:
        self._fetch_buffer = fetch_buffer
        self.batch: FetchedBatch | None = None
        """The batch whose messages are handed out."""
        self._loopers: list[Looper] = []
        self._taking = threading.Lock()

    # -- whose batch it is ------------------------------------------------------------

    @contextmanager
    def loop_of(self, who: Looper) -> Iterator[None]:
        """Register a running loop for the time of the block; refuse a second one."""
        self.require_free_for(who)
        self._loopers.append(who)
        try:
            yield
        finally:
            self._loopers.remove(who)

    def is_free_for(self, who: Looper) -> bool:
        """Return whether no other task or thread may run a loop.

        A loop left open by a task or thread that has ended does not count: a task that
        breaks out of `async for` ends before its iterator does.
        """
        return all(one is who or _has_ended(one) for one in self._loopers)

    def require_free_for(self, who: Looper) -> None:
        """Raise ClientError if another task or thread may run a loop."""
        if self._loopers and not self.is_free_for(who):
            raise ClientError(TWO_READERS)

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Reserve the wait for a batch for this block; ClientError if it is taken."""
        if not self._taking.acquire(blocking=False):
            raise ClientError(TWO_READERS)
        try:
            yield
        finally:
            self._taking.release()

    # -- messages ---------------------------------------------------------------------

    def hold(self, batch: FetchedBatch) -> None:
        """Make a batch the current one."""
        assert self.batch is None
        self.batch = batch

    def pieces(self) -> Iterator[Iterator[Message]]:
        """Hand out the rest of the batch, then give it back.

        It comes in one piece, and in more if `some` hands out messages in between.
        """
        while (batch := self.batch) is not None:
            yield batch.begin()
            is_over = batch.is_stopped or batch.handed == len(batch.messages)
            if is_over and self.batch is batch:
                batch.confirm()
                self.release()

    def some(self, count_max: int) -> list[Message]:
        """Hand out up to so many messages at once; [] when a new batch is needed."""
        batch = self.batch
        if batch is None:
            return []
        many = batch.take(count_max)
        if not many:
            self.release()
        return many

    def confirm(self) -> None:
        """Count the messages handed out as handled.

        Raises:
            OwnershipLostError: the partition was lost; another member will get these
                messages.
        """
        batch = self.batch
        if batch is None:
            return
        if not self._fetch_buffer.is_current(batch):
            self.batch = None
            raise OwnershipLostError(
                f"{batch.partition}: lost while its messages were being handled;"
                " they will be delivered again"
            )
        batch.confirm()

    def count(self) -> None:
        """Count the messages handed out as handled, also if revoked."""
        if self.batch is not None:
            self.batch.confirm()

    def drop(self) -> None:
        """Give the batch back for good: a running loop continues with the next one."""
        if self.batch is not None:
            self.batch.stop()
        self.release()

    def recover(self) -> None:
        """Repair the state after Ctrl-C inside this module or the buffer.

        Messages that were about to be handed out are handed out again, and perhaps the
        message before them.
        """
        self.batch = None
        if self._taking.locked():
            self._taking.release()
        self._fetch_buffer.recover()

    def release(self) -> None:
        """Give the batch back; its unhandled messages are handed out again."""
        if self.batch is not None:
            batch, self.batch = self.batch, None
            self._fetch_buffer.done(batch)


def current_task() -> asyncio.Task[Any]:
    """Return the running task."""
    task = asyncio.current_task()
    assert task is not None
    return task


def _has_ended(looper: Looper) -> bool:
    if isinstance(looper, asyncio.Task):
        return looper.done()
    return not looper.is_alive()
