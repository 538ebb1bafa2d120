"""Filter between a consumer and its cache of ids: checks batches, adds handled ids.

    fetched --> seen? --no--> buffer --> handled --> add
                  `---yes--> counted as handled

Theory of operation. The cache may be a network service, so it is never called on the
event loop: one thread makes one call at a time, each with a deadline. While the ids of
a batch are checked, its partition is not fetched, so that batches keep their order and
the number of waiting batches is bounded. Any thread may note handled ids; one task adds
all noted ids in one call.

With periodic commits, the id of a handled message is added when its batch is given
back; if only the user commits, at the next commit, so that messages of a rollback are
not added.

    Invariant: at most one batch of a partition is being checked.
    Invariant: a call of the cache has a deadline; if it fails, messages are delivered.

Source: docs/metaq-1.4/client.md 11.3.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeVar

from metaq.client.consume.fetched_batch import FetchedBatch
from metaq.client.duplicate_ids import DuplicateIds, key_of
from metaq.client.off_loop import OffLoop
from metaq.client.offsets.offset_store import Offsets
from metaq.clock import Clock
from metaq.model import Message, MessageId, Offset, TopicPartition
from metaq.stats import counter

_log = logging.getLogger(__name__)

T = TypeVar("T")

WAITING_COUNT_MAX: Final = 100_000
"""Maximum number of ids that wait for a commit or for the cache, more than a full
buffer of medium-sized messages. Further ids are dropped and counted."""

NO_MEMORY_S: Final = 0.2
"""Delay before a check that failed for lack of memory is repeated, in seconds."""


@dataclass(slots=True)
class DuplicateStatistics:
    """Counters of one consumer's cache of ids."""

    skipped_count: int = counter(
        "metaq_consumer_duplicate_messages_total",
        "Messages not delivered because their ids were in `duplicate_ids`.",
    )
    """Skipped messages count as handled."""
    failure_count: int = counter(
        "metaq_consumer_duplicate_ids_failures_total",
        "Calls of `duplicate_ids` that raised or took too long.",
    )
    """The messages were delivered, or the ids not added."""
    forgotten_count: int = counter(
        "metaq_consumer_duplicate_ids_forgotten_total",
        "Ids that were not added to `duplicate_ids`.",
    )
    """The cache failed, or too many ids were waiting."""


class DuplicateFilter:
    """One consumer's use of its cache of ids.

    Lifecycle: created on the loop, `close`. Concurrency: on the loop, except
    `on_handled` and `statistics`, which any thread may call.
    """

    def __init__(
        self,
        ids: DuplicateIds,
        *,
        group: str,
        clock: Clock,
        timeout_s: float,
        waits_for_commit: bool,
        on_room: Callable[[], None],
    ) -> None:
        """Prepare; nothing is checked yet.

        Args:
            ids: the cache; owned and closed by the user.
            group: consumer group.
            clock: clock of the client.
            timeout_s: maximum time of one call of the cache, including the wait for its
                turn.
            waits_for_commit: whether handled ids wait for `acknowledge`.
            on_room: called on the loop after a batch was checked, so that its partition
                may be fetched again.
        """
        self._ids = ids
        self._group = group
        self._clock = clock
        self._timeout_s = timeout_s
        self._waits_for_commit = waits_for_commit
        self._on_room = on_room
        self._loop = asyncio.get_running_loop()
        self._thread = OffLoop(f"duplicate ids of {group}", clock=clock)
        self._asking: dict[TopicPartition, asyncio.Task[None]] = {}
        self._passing: set[TopicPartition] = set()
        self._lock = threading.Lock()
        self._handled: list[tuple[TopicPartition, Offset, MessageId]] = []
        """Handled messages that wait for a commit at or after this offset."""
        self._ready: list[MessageId] = []
        self._waiting_count = 0
        self._adding: asyncio.Task[None] | None = None
        self._is_failing = False
        self._is_closed = False
        self._counts = DuplicateStatistics()

    # -- before delivery --------------------------------------------------------------

    def is_asking(self, partition: TopicPartition) -> bool:
        """Return whether a batch of the partition is being checked."""
        return partition in self._asking

    def sift(
        self, batch: FetchedBatch, deliver: Callable[[FetchedBatch], None]
    ) -> None:
        """Remove handled messages from a batch, then deliver it on the loop.

        `deliver` is called now or later; `stop` of the partition drops the batch.
        """
        if batch.partition in self._passing:
            deliver(batch)
            return
        self._asking[batch.partition] = self._loop.create_task(
            self._sift(batch, deliver), name=f"duplicate ids of {batch.partition}"
        )

    async def _sift(
        self, batch: FetchedBatch, deliver: Callable[[FetchedBatch], None]
    ) -> None:
        while True:
            try:
                await self._deliver_rest(batch, deliver)
                break
            except MemoryError:
                # The partition is not fetched until the batch is delivered.
                _log.exception("duplicate ids: group=%s: no memory", self._group)
                await asyncio.sleep(NO_MEMORY_S)
        del self._asking[batch.partition]
        self._on_room()

    async def _deliver_rest(
        self, batch: FetchedBatch, deliver: Callable[[FetchedBatch], None]
    ) -> None:
        group = self._group
        keys = [key_of(group, message.id) for message in batch.messages]
        found = await self._call(lambda: frozenset(self._ids.seen(keys)))
        if found:
            asked = zip(batch.messages, keys, strict=True)
            batch.messages = [message for message, key in asked if key not in found]
            self._counts.skipped_count += len(keys) - len(batch.messages)
        deliver(batch)

    def let_pass(self, partition: TopicPartition) -> None:
        """Deliver a partition without checks until `stop`, as a seek requested."""
        self._passing.add(partition)

    def stop(self, partition: TopicPartition) -> None:
        """Drop the batch being checked, because the partition is no longer read."""
        self._passing.discard(partition)
        task = self._asking.pop(partition, None)
        if task is not None:
            task.cancel()

    # -- after handling ---------------------------------------------------------------

    def on_handled(self, messages: Sequence[Message]) -> None:
        """Note handled messages; from any thread, never blocks."""
        with self._lock:
            limit = max(0, WAITING_COUNT_MAX - self._waiting_count)
            taken = messages[:limit]
            self._waiting_count += len(taken)
            self._counts.forgotten_count += len(messages) - len(taken)
            if self._waits_for_commit:
                self._handled += [(m.partition, m.next_offset, m.id) for m in taken]
                return
            self._ready += [one.id for one in taken]
        # After the end of the client there is no loop, and nothing to add to.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._begin_adding)

    def acknowledge(self, offsets: Offsets) -> None:
        """Add the handled ids before these offsets, which are committed.

        The ids of partitions without an offset are dropped, because other members read
        these partitions now.
        """
        with self._lock:
            handled, self._handled = self._handled, []
            for partition, next_offset, message_id in handled:
                at = offsets.get(partition)
                if at is None:
                    self._waiting_count -= 1
                elif next_offset <= at.offset:
                    self._ready.append(message_id)
                else:
                    self._handled.append((partition, next_offset, message_id))
        self._begin_adding()

    def discard(self) -> None:
        """Drop handled ids that were not added, because of a rollback."""
        with self._lock:
            self._handled.clear()
            self._ready.clear()
            self._waiting_count = 0

    def _begin_adding(self) -> None:
        if self._is_closed or not self._ready:
            return
        if self._adding is None or self._adding.done():
            self._adding = self._loop.create_task(
                self._add(), name=f"duplicate ids of {self._group}"
            )

    async def _add(self) -> None:
        while self._ready:
            with self._lock:
                ids, self._ready = self._ready, []
                self._waiting_count -= len(ids)
            if not await self._call(partial(self._add_all, ids)):
                with self._lock:
                    self._counts.forgotten_count += len(ids)

    def _add_all(self, ids: Sequence[MessageId]) -> bool:
        self._ids.add([key_of(self._group, message_id) for message_id in ids])
        return True

    async def close(self) -> None:
        """Add the ready ids within the time of two calls; never raises.

        Cancellation: ids that were not added are dropped.
        """
        self._begin_adding()
        self._is_closed = True
        try:
            if self._adding is not None:
                await asyncio.wait([self._adding])
        finally:
            if self._adding is not None:
                self._adding.cancel()
            self._thread.close()

    # -- the cache --------------------------------------------------------------------

    async def _call(self, work: Callable[[], T]) -> T | None:
        """Return the result of a call of the cache; None if it failed."""
        deadline_s = self._clock.monotonic_s() + self._timeout_s
        try:
            result = await self._thread.run(work, deadline_s=deadline_s)
        except Exception as error:  # noqa: BLE001  # any error of the user's store
            self._counts.failure_count += 1
            # Logged as an error once in each outage; the counter shows how it lasts.
            level = logging.DEBUG if self._is_failing else logging.ERROR
            self._is_failing = True
            _log.log(
                level,
                "duplicate ids failed, messages may be delivered again: group=%s: %r",
                self._group,
                error,
            )
            return None
        self._is_failing = False
        return result

    def statistics(self) -> DuplicateStatistics:
        """Return a snapshot of the counters."""
        return replace(self._counts)
