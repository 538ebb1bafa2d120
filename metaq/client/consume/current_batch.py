"""The batches that a reader holds, and which of their messages are handled.

One task or thread at a time reads a consumer, sync or async. Its loop and its `receive`
both hand out messages of this batch, and take turns. A second reader would count
messages of the first one as handled, so it is refused when it is detected.

A message is handled when the next one is requested. The end of the loop does not mean
that the last message is handled, so it stays current: the next loop over the same
consumer counts it, `commit` counts it, a clean end of the `with` block counts it, and
an exception does not.

A loop and `receive` hold one batch. A list of messages may be of several (`Filling`):
all but the last are handed out to the end, and go back when the next message is
requested.
"""

import asyncio
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, Final, TypeAlias

from metaq.client.consume.fetch_buffer import FetchBuffer, FetchedBatch
from metaq.errors import ClientError, MetaqError, OwnershipLostError
from metaq.model import Message, Offset, TopicPartition

TWO_READERS: Final = (
    "two tasks or threads read this consumer at once: read it in one of them, or have"
    " `run` call a handler, which may work on several messages at once"
)

Looper: TypeAlias = asyncio.Task[Any] | threading.Thread
"""Task or thread that runs a loop over a consumer."""


class CurrentBatch:
    """Batches held by one consumer's reader. Used by one thread at a time."""

    def __init__(self, fetch_buffer: FetchBuffer) -> None:
        self.fetch_buffer = fetch_buffer
        """Where the batches come from, and go back to."""
        self.batch: FetchedBatch | None = None
        """The batch whose messages are handed out."""
        self._earlier: list[FetchedBatch] = []
        """Batches before it, of other partitions, handed out to the end."""
        self.last_list: Filling | None = None
        """The list that was requested last; None after any other request."""
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

    @property
    def held(self) -> list[FetchedBatch]:
        """All batches that the reader holds, of each partition one."""
        return [*self._earlier, *([] if self.batch is None else [self.batch])]

    def hold(self, batch: FetchedBatch) -> None:
        """Make a batch the current one."""
        assert self.batch is None
        self.batch = batch

    def hold_also(self, batch: FetchedBatch) -> None:
        """Make a batch the current one, and keep those that are handed out."""
        is_current = self.fetch_buffer.is_current
        same = [one for one in self.held if one.partition == batch.partition]
        joined = [one for one in same if not is_current(one)]
        self._earlier = [one for one in self.held if one not in joined]
        self.batch = batch
        for one in joined:  # its messages are in `batch`, but for those handled before
            self.fetch_buffer.done(one)

    def pieces(self) -> Iterator[Iterator[Message]]:
        """Hand out the rest of the batch, then give it back.

        It comes in one piece, and in more if `some` hands out messages in between.
        """
        while True:
            self._finish_earlier()
            batch = self.batch
            if batch is None:
                return
            yield batch.begin()
            is_over = batch.is_halted or batch.handed == len(batch.messages)
            if is_over and self.batch is batch:
                batch.confirm()
                self._release_current()

    def some(self, count_max: int) -> list[Message]:
        """Hand out up to so many messages at once; [] when a new batch is needed."""
        self._finish_earlier()
        batch = self.batch
        if batch is None:
            return []
        many = batch.take(count_max)
        if not many:
            self._release_current()
        return many

    def begin_list(self, filling: "Filling") -> None:
        """Count the messages handed out as handled: a list of more is requested."""
        self._finish_earlier()
        self.last_list = filling
        batch = self.batch
        if batch is not None:
            batch.confirm()
            if batch.is_halted or batch.handed == len(batch.messages):
                self._release_current()

    def _finish_earlier(self) -> None:
        """Count the batches before the current one as handled, and give them back."""
        self.last_list = None
        while self._earlier:
            batch = self._earlier[0]
            batch.confirm()
            self.fetch_buffer.done(batch)
            del self._earlier[0]

    def confirm(self) -> None:
        """Count the messages handed out as handled.

        Raises:
            OwnershipLostError: a partition was lost; another member will get these
                messages. Those of the others are counted.
        """
        lost = [one for one in self.held if not self.fetch_buffer.is_current(one)]
        self._forget(lost)
        self.count()
        for batch in lost:
            raise OwnershipLostError(
                f"{batch.partition}: lost while its messages were being handled;"
                " they will be delivered again"
            )

    def count(self) -> None:
        """Count the messages handed out as handled, also if revoked."""
        for batch in self.held:
            batch.confirm()

    def drop(self, partition: TopicPartition | None = None) -> None:
        """Give batches back for good: a running loop continues with the next one.

        Args:
            partition: only the batch of this one; None: all.
        """
        for batch in self.held:
            if partition in (None, batch.partition):
                batch.stop()
                self.give_back(batch)

    def recover(self) -> None:
        """Repair the state after Ctrl-C inside this module or the buffer.

        Messages that were about to be handed out are handed out again, and perhaps the
        message before them.
        """
        self.batch = None
        self._earlier = []
        self.last_list = None
        if self._taking.locked():
            self._taking.release()
        self.fetch_buffer.recover()

    def release(self) -> None:
        """Give all batches back; their unhandled messages are handed out again."""
        for batch in self.held:
            self.give_back(batch)

    def give_back(self, batch: FetchedBatch) -> None:
        """Give a held batch back; its unhandled messages are handed out again."""
        self._forget([batch])
        self.fetch_buffer.done(batch)

    def _release_current(self) -> None:
        assert self.batch is not None
        self.give_back(self.batch)

    def _forget(self, batches: Collection[FetchedBatch]) -> None:
        self._earlier = [one for one in self._earlier if one not in batches]
        if self.batch in batches:
            self.batch = None


class Filling:
    """Messages for one list, of several batches, up to a count and a size.

    Messages of a partition that is revoked or paused before the list is full are left
    out. Owner: the reader; it calls `add_nowait`, waits for `held`, and calls it again.
    """

    def __init__(
        self, current: CurrentBatch, *, count_max: int, bytes_max: int | None = None
    ) -> None:
        """Count the messages handed out before as handled; take nothing yet.

        Args:
            current: batches of the reader.
            count_max: most messages, 1 or more.
            bytes_max: most bytes of the log that they come from, but one message of
                any size; None: no bound.
        """
        self._current = current
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._parts: dict[TopicPartition, list[Message]] = {}
        self.offsets: dict[TopicPartition, Offset] = {}
        """Offset after the messages of each partition."""
        current.begin_list(self)

    @property
    def held(self) -> list[FetchedBatch]:
        """Batches that `FetchBuffer.wait` is to know."""
        return self._current.held

    @property
    def messages(self) -> list[Message]:
        """The messages so far, partition by partition, each in order."""
        return list(chain.from_iterable(self._parts.values()))

    @property
    def begins(self) -> dict[TopicPartition, Offset]:
        """Offset of the first message of each partition."""
        return {one: part[0].offset for one, part in self._parts.items()}

    @property
    def is_last(self) -> bool:
        """Whether no message was requested after those of this list."""
        return self._current.last_list is self

    def add_nowait(self) -> bool:
        """Add what is there; return whether the list is to be handed out now.

        Raises:
            MetaqError: the consumer has failed, and the list is empty.
        """
        current = self._current
        while True:
            self._leave_out_halted()
            wanted = self._count_max - sum(map(len, self._parts.values()))
            if wanted <= 0:
                return True
            batch = current.batch
            if batch is not None and batch.handed < len(batch.messages):
                if not self._add(batch, wanted) and not batch.is_halted:
                    return True
                continue
            try:
                batch = current.fetch_buffer.take_nowait(current.held)
            except MetaqError:
                if not self._parts:
                    raise
                return True
            if batch is None:
                return False
            self._leave_out_halted()  # `batch` may be of one that was read before
            current.hold_also(batch)

    def _add(self, batch: FetchedBatch, count_max: int) -> bool:
        """Add messages of a batch; return False if the next one is too large."""
        if self._bytes_max is not None:
            used = sum(
                part[-1].next_offset - part[0].offset for part in self._parts.values()
            )
            fitting = batch.count_within(self._bytes_max - used)
            count_max = min(count_max, fitting if self._parts else max(fitting, 1))
        many = batch.take_more(count_max) if count_max > 0 else []
        if not many:
            return False
        self._parts.setdefault(batch.partition, []).extend(many)
        is_all = batch.handed == len(batch.messages)
        end = batch.next_offset if is_all else many[-1].next_offset
        self.offsets[batch.partition] = end
        return True

    def _leave_out_halted(self) -> None:
        for batch in self.held:
            if batch.is_halted:
                self._current.give_back(batch)
                self._parts.pop(batch.partition, None)
                self.offsets.pop(batch.partition, None)


def current_task() -> asyncio.Task[Any]:
    """Return the running task."""
    task = asyncio.current_task()
    assert task is not None
    return task


def _has_ended(looper: Looper) -> bool:
    if isinstance(looper, asyncio.Task):
        return looper.done()
    return not looper.is_alive()
