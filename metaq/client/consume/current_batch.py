"""The batches that a reader holds, and which of their messages are handled.

One task or thread at a time reads a consumer, in either world. Its loop and its
`receive` hand out messages of the same batch, in turn. A second reader is refused when
it is detected, because it would count messages of the first one as handled.

A message is handled when the next one is requested. The end of a loop may be a `break`,
so the last message stays current. It counts as handled in the next loop over the
consumer, in `commit`, and when the `with` block ends without an exception.

A loop and `receive` hold one batch. A list of messages (`Filling`) may hold several:
all but the last are handed out to the end, and are given back when the next message is
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
"""Task or thread that loops over a consumer."""


class CurrentBatch:
    """Batches held by a consumer's reader. Used by one thread at a time."""

    def __init__(self, fetch_buffer: FetchBuffer) -> None:
        self.fetch_buffer = fetch_buffer
        self.held: list[FetchedBatch] = []
        """At most one per partition; all but the last are handed out to the end."""
        self.last_list: Filling | None = None
        """The list, if it was requested last; None after any other request."""
        self._loopers: list[Looper] = []
        self._taking = threading.Lock()

    # -- readers ----------------------------------------------------------------------

    @contextmanager
    def loop_of(self, who: Looper) -> Iterator[None]:
        """Register a loop for the duration of the block; refuse a second reader."""
        self.require_free_for(who)
        self._loopers.append(who)
        try:
            yield
        finally:
            self._loopers.remove(who)

    def is_free_for(self, who: Looper) -> bool:
        """Return whether no other task or thread runs a loop.

        A loop of a task or thread that has ended does not count, because a task that
        breaks out of `async for` may end before its iterator is closed.
        """
        return all(one is who or _has_ended(one) for one in self._loopers)

    def require_free_for(self, who: Looper) -> None:
        """Raise ClientError if another task or thread runs a loop."""
        if self._loopers and not self.is_free_for(who):
            raise ClientError(TWO_READERS)

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Let only one block at a time wait for batches; ClientError for a second."""
        if not self._taking.acquire(blocking=False):
            raise ClientError(TWO_READERS)
        try:
            yield
        finally:
            self._taking.release()

    # -- messages ---------------------------------------------------------------------

    def hold(self, batch: FetchedBatch) -> None:
        """Hold a batch as the last one; it replaces a held one of its partition."""
        for one in self.held:
            if one.partition == batch.partition:
                self.give_back(one)
        self.held.append(batch)

    def pieces(self) -> Iterator[Iterator[Message]]:
        """Hand out the rest of the current batch, then give it back.

        It is one piece, or more if `some` hands out messages in between.
        """
        while (batch := self._current()) is not None:
            yield batch.begin()
            if batch.is_used_up and batch in self.held:
                batch.confirm()
                self.give_back(batch)

    def some(self, count_max: int) -> list[Message]:
        """Hand out up to `count_max` messages; [] if a new batch is needed."""
        batch = self._current()
        if batch is None:
            return []
        many = batch.take(count_max)
        if not many:
            self.give_back(batch)
        return many

    def interrupt(self) -> None:
        """End the present piece after its present message. For any thread."""
        for batch in self.held:
            batch.interrupt()

    def begin_list(self, filling: "Filling") -> None:
        """Count the messages handed out as handled, because a list is requested."""
        batch = self._current()
        if batch is not None:
            batch.confirm()
            if batch.is_used_up:
                self.give_back(batch)
        self.last_list = filling

    def _current(self) -> FetchedBatch | None:
        """Return the current batch; confirm and give back those before it."""
        self.last_list = None
        while len(self.held) > 1:
            self.held[0].confirm()
            self.give_back(self.held[0])
        return self.held[0] if self.held else None

    def confirm(self) -> None:
        """Count the messages handed out as handled.

        Raises:
            OwnershipLostError: a partition was lost, and its messages will be delivered
                again; those of other partitions are counted.
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
        """Count the messages handed out as handled, even of lost partitions."""
        for batch in self.held:
            batch.confirm()

    def drop(self, partition: TopicPartition | None = None) -> None:
        """Stop batches and give them back: a running loop continues with the next one.

        Args:
            partition: only the batch of this partition; None: all.
        """
        for batch in tuple(self.held):
            if partition in (None, batch.partition):
                batch.stop()
                self.give_back(batch)

    def recover(self) -> None:
        """Repair the state after Ctrl-C inside this module or the fetch buffer.

        Messages that were about to be handed out are handed out later, perhaps after a
        repetition of the message before them.
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
    """Collects messages of several batches for one list, up to a count and a size.

    Messages of a partition that is revoked or paused before the list is complete are
    left out. Owned by the reader, which calls `add_nowait`, waits, and calls it again.
    """

    def __init__(
        self, current: CurrentBatch, *, count_max: int, bytes_max: int | None = None
    ) -> None:
        """Count the messages handed out before as handled; take nothing yet.

        Args:
            current: batches of the reader.
            count_max: maximum number of messages, 1 or more.
            bytes_max: maximum bytes of the log from their first to their last message,
                summed over partitions; a single message may be larger. None: no limit.
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
        """Whether no messages were requested after this list."""
        return self._current.last_list is self

    def lost(self) -> list[TopicPartition]:
        """Return its partitions that were lost since, even if assigned again."""
        current = self._current
        held = [one for one in current.held if one.partition in self.offsets]
        return [
            one.partition for one in held if not current.fetch_buffer.is_current(one)
        ]

    def add_nowait(self) -> bool:
        """Add available messages; return whether to hand the list out now.

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
            self._leave_out_halted()  # `batch` may follow one that was halted
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
