"""The batch that an iterator holds, and which of its messages are handled.

One task or thread at a time reads a consumer, sync or async. Its loop and its `receive`
both hand messages out of here, and take turns. A second reader would count messages of
the first one as handled, and is refused where it shows.

A message is handled when the next one is asked for. Ending the loop does not tell that
the last one is handled, so it stays current: the next loop over the same consumer
counts it, `commit` counts it, a clean end of the `with` block counts it, and an
exception does not.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
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
        """Start without a batch.

        Args:
            fetch_buffer: where batches come from and go back to.
        """
        self._fetch_buffer = fetch_buffer
        self.batch: FetchedBatch | None = None
        """The batch that messages are handed out of."""
        self._loopers: list[Looper] = []
        self._taking = threading.Lock()

    # -- whose batch it is ------------------------------------------------------------

    @contextmanager
    def loop_of(self, who: Looper) -> Iterator[None]:
        """Note inside the block that a loop runs, and its owner.

        Raises:
            ClientError: another one runs.
        """
        self.require_free_for(who)
        self._loopers.append(who)
        try:
            yield
        finally:
            self._loopers.remove(who)

    def is_free_for(self, who: Looper) -> bool:
        """Return whether no loop of another task or thread may be at work.

        A loop left open by a task or thread that has ended does not count: a task that
        breaks out of `async for` ends before its iterator does.
        """
        return all(one is who or _has_ended(one) for one in self._loopers)

    def require_free_for(self, who: Looper) -> None:
        """Refuse a second reader.

        Raises:
            ClientError: a loop of another task or thread may be at work.
        """
        if self._loopers and not self.is_free_for(who):
            raise ClientError(TWO_READERS)

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Wait for a batch, and hold it, inside the block.

        Raises:
            ClientError: another task or thread does.
        """
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

    def messages(self) -> Iterator[Message]:
        """Hand out the rest of the batch, then give it back."""
        return chain.from_iterable(self.pieces())

    def pieces(self) -> Iterator[Iterator[Message]]:
        """Do the same in pieces: another one where `some` has handed out meanwhile."""
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
            OwnershipLostError: the partition was taken away meanwhile; another member
                will be handed these messages.
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
        """Give the batch back for good: a loop that still runs goes to the next one."""
        if self.batch is not None:
            self.batch.stop()
        self.release()

    def recover(self) -> None:
        """Give back what an interrupt may have kept from the caller.

        Ctrl-C has come while this module or the buffer was at work. What they were
        about to hand out is handed out again, and perhaps the message before it.
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
