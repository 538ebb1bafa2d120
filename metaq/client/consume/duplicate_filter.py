"""Filter between a consumer and its cache of ids: checks batches, adds handled ids.

    fetched --> seen? --no--> buffer --> handled --> add
                  `---yes--> counted as handled

Theory of operation. The cache may lie behind a network, so nothing here calls it on
the event loop: calls go through one thread, one at a time, and end at a deadline.
While a batch is asked about, nothing more is fetched of its partition: batches keep
their order, and waiting batches are bounded. Handled ids are noted by any thread and
added by one task, all gathered ones in one call.

A message's id is added once it is handled: when its batch is given back where commits
go by themselves, by the next commit where they are left to the user. So a rollback
finds none of its messages in the cache, unless commits go by themselves.

    Invariant: at most one batch of a partition is asked about.
    Invariant: the cache is never waited for beyond its deadline, and its failure
    delivers. Source: client spec 11.3.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from metaq.client.consume.fetch_buffer import FetchedBatch
from metaq.client.duplicate_ids import DuplicateIds, key_of
from metaq.client.off_loop import OffLoop
from metaq.clock import Clock
from metaq.model import Message, MessageId, TopicPartition
from metaq.stats import counter

log = logging.getLogger(__name__)

T = TypeVar("T")

WAITING_COUNT_MAX: Final = 100_000
"""Ids that wait for a commit, or for the cache: those of more than one full buffer of
messages of middle size. More are forgotten, and counted."""

NO_MEMORY_S: Final = 0.2
"""Before a batch that found no memory is delivered, seconds."""


@dataclass(frozen=True, slots=True)
class DuplicateStatistics:
    """Counters of one consumer's cache of ids."""

    skipped_count: int = counter(
        "metaq_consumer_duplicate_messages_total",
        "Messages not delivered because their ids were in `duplicate_ids`.",
    )
    """They count as handled."""
    failure_count: int = counter(
        "metaq_consumer_duplicate_ids_failures_total",
        "Calls of `duplicate_ids` that raised or took too long.",
    )
    """Their messages were delivered, or their ids not added."""
    forgotten_count: int = counter(
        "metaq_consumer_duplicate_ids_forgotten_total",
        "Ids that were not added to `duplicate_ids`.",
    )
    """The cache failed, or too many were waiting."""


class DuplicateFilter:
    """Use of its cache of ids by one consumer.

    Lifecycle: made on the loop, `close`. Concurrency: on the loop, except `on_handled`,
    which any thread calls, and `statistics`.
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
        """Prepare; nothing is asked yet.

        Args:
            ids: the cache; not closed.
            group: consumer group.
            clock: for deadlines.
            timeout_s: bound on one call of the cache, its turn included.
            waits_for_commit: handled ids wait for `acknowledge`.
            on_room: called on the loop when a partition may be fetched again for which
                `is_asking` said no.
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
        self._handled: list[MessageId] = []
        """Handled, and waiting for a commit."""
        self._ready: list[MessageId] = []
        """Ids to be added."""
        self._waiting_count = 0
        self._adding: asyncio.Task[None] | None = None
        self._is_failing = False
        self._is_closed = False
        self._skipped_count = 0
        self._failure_count = 0
        self._forgotten_count = 0

    # -- before delivery --------------------------------------------------------------

    def is_asking(self, partition: TopicPartition) -> bool:
        """Return whether a batch of the partition is asked about."""
        return partition in self._asking

    def sift(
        self, batch: FetchedBatch, deliver: Callable[[FetchedBatch], None]
    ) -> None:
        """Have a batch delivered without messages handled before.

        Args:
            batch: owned from now on; `stop` of its partition drops it.
            deliver: called on the loop, now or later, with the same batch.
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
                # Nothing behind the batch is fetched before it is delivered.
                log.exception("duplicate ids: group=%s: no memory", self._group)
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
            self._skipped_count += len(keys) - len(batch.messages)
        deliver(batch)

    def let_pass(self, partition: TopicPartition) -> None:
        """Check a partition no more until `stop`: all messages were asked for."""
        self._passing.add(partition)

    def stop(self, partition: TopicPartition) -> None:
        """Drop batches being checked; the partition is not read from here on."""
        self._passing.discard(partition)
        task = self._asking.pop(partition, None)
        if task is not None:
            task.cancel()

    # -- after handling ---------------------------------------------------------------

    def on_handled(self, messages: Sequence[Message]) -> None:
        """Take over that messages are handled; from any thread, never blocks."""
        with self._lock:
            room = max(0, WAITING_COUNT_MAX - self._waiting_count)
            taken = [message.id for message in messages[:room]]
            self._waiting_count += len(taken)
            self._forgotten_count += len(messages) - len(taken)
            if self._waits_for_commit:
                self._handled += taken
                return
            self._ready += taken
        # After the client's end there is no loop, and no cache to add to.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._begin_adding)

    def acknowledge(self) -> None:
        """Add handled ids: they are committed."""
        with self._lock:
            self._ready += self._handled
            self._handled.clear()
        self._begin_adding()

    def discard(self) -> None:
        """Drop handled ids that were not added: a rollback takes them back."""
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
        while ids := self._take_ready():
            if not await self._call(partial(self._add_all, ids)):
                with self._lock:
                    self._forgotten_count += len(ids)

    def _add_all(self, ids: Sequence[MessageId]) -> bool:
        self._ids.add([key_of(self._group, message_id) for message_id in ids])
        return True

    def _take_ready(self) -> list[MessageId]:
        with self._lock:
            taken, self._ready = self._ready, []
            self._waiting_count -= len(taken)
        return taken

    async def close(self) -> None:
        """Add handled ids; bounded by the time-out of two calls; never raises.

        Cancellation: ids that were not added are forgotten.
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
        """Return the result of a call of the cache; None when it fails."""
        deadline_s = self._clock.monotonic_s() + self._timeout_s
        try:
            result = await self._thread.run(work, deadline_s=deadline_s)
        except Exception as error:  # noqa: BLE001  # whatever the user's store raises
            self._failure_count += 1
            # Once for each outage: the counter tells how long it goes on.
            level = logging.DEBUG if self._is_failing else logging.ERROR
            self._is_failing = True
            log.log(
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
        return DuplicateStatistics(
            skipped_count=self._skipped_count,
            failure_count=self._failure_count,
            forgotten_count=self._forgotten_count,
        )
