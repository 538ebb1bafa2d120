"""The batch that an iterator holds, and which of its messages are handled.

One iterator at a time reads a consumer, sync or async; both hand messages out of here.
A message is handled when the next one is asked for. Ending the loop does not tell that
the last one is handled, so it stays in hand: the next loop over the same consumer
counts it, `commit` counts it, a clean end of the `with` block counts it, and an
exception does not.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeAlias

from metaq.client.consume.fetch_buffer import FetchBuffer, FetchedBatch
from metaq.errors import OwnershipLostError
from metaq.model import Message

Looper: TypeAlias = asyncio.Task[Any] | threading.Thread
"""Task or thread that runs a loop over a consumer."""


class CurrentBatch:
    """Batch held by one consumer's iterator. Used by one thread at a time."""

    def __init__(self, fetch_buffer: FetchBuffer) -> None:
        """Start with empty hands.

        Args:
            fetch_buffer: where batches come from and go back to.
        """
        self._fetch_buffer = fetch_buffer
        self.batch: FetchedBatch | None = None
        """The batch in hand."""
        self._loopers: list[Looper] = []

    # -- whose hand it is -------------------------------------------------------------

    @contextmanager
    def loop_of(self, who: Looper) -> Iterator[None]:
        """Say inside the block that a loop runs, and whose it is."""
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

    # -- messages ---------------------------------------------------------------------

    def hold(self, batch: FetchedBatch) -> None:
        """Take a batch in hand."""
        assert self.batch is None
        self.batch = batch

    def messages(self) -> Iterator[Message]:
        """Hand out the rest of the batch, then give it back.

        The hot path of every iterator: a message costs one step of this loop.
        """
        batch = self.batch
        if batch is None:
            return
        # A caller that asks for one more has handled the messages handed out by `some`.
        batch.confirm()
        batch.held = 1
        for message in islice(batch.messages, batch.handed, None):
            if batch.is_stopped:
                break
            batch.handed += 1
            yield message
        batch.confirm()
        self.release()

    def some(self, count_max: int) -> list[Message]:
        """Hand out up to so many messages at once; [] when a new batch is needed."""
        batch = self.batch
        if batch is None:
            return []
        batch.confirm()
        many = batch.messages[batch.handed : batch.handed + count_max]
        if not many or batch.is_stopped:
            self.release()
            return []
        batch.held = len(many)
        batch.handed += len(many)
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
                f"{batch.partition}: lost while its messages were in hand; they will"
                " be delivered again"
            )
        batch.confirm()

    def count(self) -> None:
        """Count the messages handed out as handled, also if revoked."""
        if self.batch is not None:
            self.batch.confirm()

    def drop(self) -> None:
        """Give the batch back for good: a loop that still runs goes to the next one."""
        if self.batch is not None:
            self.batch.is_stopped = True
        self.release()

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
