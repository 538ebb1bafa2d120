"""Messages delivered to a worker, those waiting for one, and parts shared by links."""

import asyncio
import enum
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from metaq.client.cluster.context import ClientContext
from metaq.client.options import QueueOptions
from metaq.client.timeouts import finish, wait_for
from metaq.clock import Clock
from metaq.errors import MetaqError
from metaq.model import Offset, TopicPartition
from metaq.stats import counter, gauge

_log = logging.getLogger(__name__)


class HeldState(enum.Enum):
    """State of a message delivered to this worker."""

    WAITING = "waiting"
    """In the prefetch."""
    BEGUN = "begun"
    """Handed out."""
    SETTLED = "settled"
    """Its settle is queued, in flight or answered; or a transaction holds it."""
    LOST = "lost"
    """Another delivery has it, or its lease or group is gone."""


@dataclass(slots=True, eq=False)
class HeldMessage:
    """One message delivered to this worker."""

    row: Sequence[Any]
    """Fields of its `Message`; empty if damaged."""
    partition: TopicPartition
    offset: Offset
    delivery: int
    """Number of this delivery, which its settle names."""
    deliveries: int
    """Number of times it was delivered, releases not counted."""
    lease_s: float
    """Duration of its lease, as set by the broker."""
    lease_end_s: float
    """Monotonic end of its lease; moved by each renewal."""
    since_s: float
    """Monotonic time at which it was handed out; before that, of its arrival."""
    size_bytes: int = 0
    state: HeldState = HeldState.WAITING
    is_renewing: bool = False
    """Whether an `extend` is queued or in flight."""

    def __str__(self) -> str:
        return f"{self.partition}: message at offset {self.offset}"


class Prefetch:
    """Messages to be handed out. Any thread may take; the rest is for the loop."""

    def __init__(self, clock: Clock) -> None:
        """Start empty."""
        self._clock = clock
        self._ready: deque[HeldMessage] = deque()
        self._sleepers: deque[asyncio.Future[None]] = deque()
        self.lock = threading.Lock()
        """Guards the state of every message."""
        self._arrival = threading.Condition(self.lock)
        self._is_drained = False
        self._on_empty = dict[Callable[[], None], asyncio.AbstractEventLoop]()
        self.error: MetaqError | None = None
        """Error to raise once the prefetch is empty; None if there is none."""

    def put(self, messages: Sequence[HeldMessage]) -> bool:
        """Append messages, in this order.

        Returns:
            False if it was drained, and accepts none.
        """
        with self.lock:
            if self._is_drained:
                return False
            while self._ready and self._ready[0].state is not HeldState.WAITING:
                self._ready.popleft()
            self._ready.extend(messages)
            self._wake(len(messages))
        return True

    def fail(self, error: MetaqError) -> None:
        """Have every take raise `error`, once the prefetch is empty."""
        with self.lock:
            self.error = self.error or error
            self._wake(len(self._sleepers))
            self._arrival.notify_all()

    def drain(self) -> list[HeldMessage]:
        """Return the waiting messages, and hand out no more."""
        with self.lock:
            self._is_drained = True
            left = [one for one in self._ready if one.state is HeldState.WAITING]
            self._ready.clear()
        return left

    def call_when_empty(self, callback: Callable[[], None]) -> bool:
        """Have the running loop call `callback`, once, when no message waits any more.

        Returns:
            False if none waits now; then it is not called.
        """
        loop = asyncio.get_running_loop()
        with self.lock:
            if self._ready:
                self._on_empty[callback] = loop
            return bool(self._ready)

    @property
    def has_ready(self) -> bool:
        """Whether messages wait, so that the next `take_async` may return at once."""
        return bool(self._ready)

    def take_nowait(
        self, at_work: set[HeldMessage] | None = None
    ) -> HeldMessage | None:
        """Hand out the next message; None if there is none now.

        Skips messages whose lease is over, as other workers get them.

        Args:
            at_work: set to which the message is added, under the lock.

        Raises:
            MetaqError: the error given to `fail`.
        """
        now_s = self._clock.monotonic_s()
        with self.lock:
            held = self._next(now_s)
            if held is None and self.error is not None:
                raise self.error
            if held is not None and at_work is not None:
                at_work.add(held)
        return held

    def _next(self, now_s: float) -> HeldMessage | None:
        while self._ready:
            held = self._ready.popleft()
            if not self._ready and self._on_empty:
                self._report_empty()
            if held.state is HeldState.WAITING:
                is_over = held.lease_end_s <= now_s
                held.state = HeldState.LOST if is_over else HeldState.BEGUN
                if not is_over:
                    held.since_s = now_s
                    return held
        return None

    def _report_empty(self) -> None:
        waiting, self._on_empty = self._on_empty, {}
        for callback, loop in waiting.items():
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(callback)

    def with_others(self, first: HeldMessage, count_max: int) -> list[HeldMessage]:
        """Return `first` and up to `count_max` - 1 more messages, without waiting."""
        many, now_s = [first], self._clock.monotonic_s()
        with self.lock:
            while len(many) < count_max and (held := self._next(now_s)):
                many.append(held)
        return many

    async def take_async(self) -> HeldMessage:
        """Wait for a message, on the loop. Cancellation: nothing is taken."""
        while (held := self.take_nowait()) is None:
            sleeper: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._sleepers.append(sleeper)
            try:
                await sleeper
            except BaseException:
                with self.lock:
                    if sleeper in self._sleepers:
                        self._sleepers.remove(sleeper)
                    # This waiter may have been woken for a message: wake others.
                    self._wake(len(self._ready))
                raise
        return held

    def take(
        self, timeout_s: float | None, at_work: set[HeldMessage] | None = None
    ) -> HeldMessage | None:
        """Wait for a message, in a thread; None on a time-out."""
        end_s = None if timeout_s is None else self._clock.monotonic_s() + timeout_s
        while (held := self.take_nowait(at_work)) is None:
            with self.lock:
                wait_for(self._arrival, self._has_something, timeout_s)
            if end_s is not None:
                timeout_s = max(0.0, end_s - self._clock.monotonic_s())
                if not timeout_s:
                    return self.take_nowait(at_work)
        return held

    def _has_something(self) -> bool:
        return self.has_ready or self.error is not None

    def _wake(self, count: int) -> None:
        self._arrival.notify(count)
        while count and self._sleepers:
            finish(self._sleepers.popleft(), None)
            count -= 1


@dataclass(slots=True)
class QueueStatistics:
    """Counters of one worker."""

    group: str = ""
    """Queue group; "" in a sum."""
    taken_count: int = counter(
        "metaq_queue_taken_messages_total", "Messages that brokers gave this worker."
    )
    acked_count: int = counter(
        "metaq_queue_acked_messages_total",
        "Messages acknowledged, and on disk as done.",
    )
    returned_count: int = counter(
        "metaq_queue_returned_messages_total",
        "Messages given back to be delivered again: nacks and releases.",
    )
    rejected_count: int = counter(
        "metaq_queue_rejected_messages_total", "Messages given up for good."
    )
    lost_count: int = counter(
        "metaq_queue_lost_leases_total",
        "Messages whose lease ended before they were settled.",
    )
    failure_count: int = counter(
        "metaq_queue_handler_failures_total", "Failures of handlers of `run`."
    )
    held_count: int = gauge(
        "metaq_queue_held_messages", "Messages that are here and not settled."
    )


@dataclass(slots=True, eq=False)
class QueueParts:
    """Parts that the links of one queue share."""

    context: ClientContext
    topic: str
    group: str
    worker: str
    options: QueueOptions
    prefetch: Prefetch
    """Messages of all links, in order of arrival."""
    counts: QueueStatistics
    held_max: int
    """Maximum number of messages held per broker; at least the concurrency of `run`."""
    generation: int | None = None
    """Generation of the group, once it is defined."""
    is_ordered: bool = False
    """Whether the group delivers one message of a key at a time."""
    unanswered_count: int = 0
    """Number of settle entries without a reply, of all links."""
    all_answered: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when `unanswered_count` reaches 0."""

    def fail(self, error: MetaqError) -> None:
        """Have every take raise `error`, once the prefetch is empty; log it."""
        _log.error("queue of group %s stops: %s", self.group, error)
        self.prefetch.fail(error)
