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
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, Final, TypeAlias

from metaq.client.consume.fetch_buffer import FetchBuffer
from metaq.client.consume.fetched_batch import FetchedBatch
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
        self.held: list[FetchedBatch] = []
        """Of each partition one; all but the last are handed out to the end."""
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

    def hold(self, batch: FetchedBatch) -> None:
        """Make a batch the current one; that of its partition is part of it now."""
        for one in self.held:
            if one.partition == batch.partition:
                self.give_back(one)
        self.held.append(batch)

    def pieces(self) -> Iterator[Iterator[Message]]:
        """Hand out the rest of the current batch, then give it back.

        It comes in one piece, and in more if `some` hands out messages in between.
        """
        while (batch := self._current()) is not None:
            yield batch.begin()
            if batch.is_used_up and batch in self.held:
                batch.confirm()
                self.give_back(batch)

    def some(self, count_max: int) -> list[Message]:
        """Hand out up to so many messages at once; [] when a new batch is needed."""
        batch = self._current()
        if batch is None:
            return []
        many = batch.take(count_max)
        if not many:
            self.give_back(batch)
        return many

    def interrupt(self) -> None:
        """Have the present piece end after its present message. From any thread."""
        for batch in self.held:
            batch.interrupt()

    def begin_list(self, filling: "Filling") -> None:
        """Count the messages handed out as handled: a list of more is requested."""
        batch = self._current()
        if batch is not None:
            batch.confirm()
            if batch.is_used_up:
                self.give_back(batch)
        self.last_list = filling

    def _current(self) -> FetchedBatch | None:
        """Return the current batch; those before it are handled and given back."""
        self.last_list = None
        while len(self.held) > 1:
            self.held[0].confirm()
            self.give_back(self.held[0])
        return self.held[0] if self.held else None

    def confirm(self) -> None:
        """Count the messages handed out as handled.

        Raises:
            OwnershipLostError: a partition was lost; another member will get these
                messages. Those of the others are counted.
        """
        lost = [one for one in self.held if not self.fetch_buffer.is_current(one)]
        self.held = [one for one in self.held if one not in lost]
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
        for batch in tuple(self.held):
            if partition in (None, batch.partition):
                batch.stop()
                self.give_back(batch)

    def recover(self) -> None:
        """Repair the state after Ctrl-C inside this module or the buffer.

        Messages that were about to be handed out are handed out again, and perhaps the
        message before them.
        """
        self.held, self.last_list = [], None
        if self._taking.locked():
            self._taking.release()
        self.fetch_buffer.recover()

    def release(self) -> None:
        """Give all batches back; their unhandled messages are handed out again."""
        while self.held:
            self.give_back(self.held[-1])

    def give_back(self, batch: FetchedBatch) -> None:
        """Give a held batch back; its unhandled messages are handed out again."""
        self.held = [one for one in self.held if one is not batch]
        self.fetch_buffer.done(batch)


class Filling:
    """Messages for one list, of several batches, up to a count and a size.

    Messages of a partition that is revoked or paused before the list is full are left
    out. Owner: the reader; it calls `add_nowait`, waits, and calls it again.
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

    def lost(self) -> list[TopicPartition]:
        """Return its partitions that went since, also if they are ours again."""
        current = self._current
        held = [one for one in current.held if one.partition in self.offsets]
        return [
            one.partition for one in held if not current.fetch_buffer.is_current(one)
        ]

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
            if current.held and not current.held[-1].is_used_up:
                if not self._add(current.held[-1], wanted):
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
            current.hold(batch)

    def _add(self, batch: FetchedBatch, count_max: int) -> bool:
        """Add messages of a batch; return False if the next one is too large."""
        if self._bytes_max is not None:
            sizes = (
                part[-1].next_offset - part[0].offset for part in self._parts.values()
            )
            fitting = batch.count_within(self._bytes_max - sum(sizes))
            count_max = min(count_max, fitting if self._parts else max(fitting, 1))
        many = batch.take_more(count_max)
        if many:
            self._parts.setdefault(batch.partition, []).extend(many)
            is_all = batch.handed == len(batch.messages)
            end = batch.next_offset if is_all else many[-1].next_offset
            self.offsets[batch.partition] = end
        return bool(many) or batch.is_used_up

    def _leave_out_halted(self) -> None:
        for batch in tuple(self._current.held):
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
