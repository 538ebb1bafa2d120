"""Start, end and settles of a worker: the base of `AsyncQueue`.

The messages of each broker are in `broker_link.py`. Here is what they have in common:
the state of each message, which threads of the sync world change under one lock, and
what is said about messages on its way to the loop.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from metaq.client.cluster.context import ClientContext
from metaq.client.consume.handler_tasks import CONCURRENCY_MAX
from metaq.client.consume.redelivery import FailureLog, Reject
from metaq.client.errors import AlreadySettledError, LeaseLostError
from metaq.client.options import QueueOptions
from metaq.client.queue.broker_link import BrokerLink, QueueParts
from metaq.client.queue.prefetch import HeldMessage, HeldState, Prefetch
from metaq.client.queue.settling import SettleFuture, Settling
from metaq.client.timeouts import require_loop, within
from metaq.client.validation import check_timeout, check_whole
from metaq.cluster_snapshot import ClusterSnapshot
from metaq.errors import ClosedError, MetaqError
from metaq.model import BrokerId
from metaq.protocol.queue_frames import GROUP_DELAY, SettleVerb, Word
from metaq.retry import wait_set
from metaq.stats import counter, gauge

_log = logging.getLogger(__name__)

UPKEEP_S: Final = 0.15
"""Pause between two looks at the leases: a sixth of the shortest one."""
RETURNS: Final = (SettleVerb.NACK, SettleVerb.RELEASE)
"""Verbs that give a message back. Where the first answer was lost, another delivery may
have it by now, as was wanted."""
SUCCESS: Final = {verb: {Word.OK, Word.DONE, Word.LATER} for verb in SettleVerb} | {
    SettleVerb.EXTEND: {Word.OK}
}
"""Words that count as success; `done` is the answer to what is sent again, and `later`
says that the broker has still to store the dead letter."""


@dataclass(slots=True)
class QueueStatistics:
    """Counters of one worker."""

    group: str = ""
    """Its group; "" in a sum."""
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
    damaged_count: int = counter(
        "metaq_queue_damaged_messages_total",
        "Messages that contradicted their checksum, and were given back.",
    )
    failure_count: int = counter(
        "metaq_queue_handler_failures_total", "Failures of handlers of `run`."
    )
    held_count: int = gauge(
        "metaq_queue_held_messages", "Messages that are here and not settled."
    )


class QueueLife:
    """A worker, without what it hands out. `settle` is for any thread."""

    def __init__(
        self,
        context: ClientContext,
        define: Callable[[], Coroutine[Any, Any, object]],
        *,
        topic: str,
        group: str,
        options: QueueOptions,
    ) -> None:
        """Prepare; `AsyncClient.queue` is the way in.

        Args:
            context: the client's parts.
            define: defines the group, or compares its definition.
            topic: whose messages.
            group: the queue group.
            options: options chosen by the user.
        """
        self.topic = topic
        self.group = group
        self.options = options
        self.worker = context.draw_token()
        """Name of this worker, as `metaq queues show` has it."""
        self._context = context
        self._define = define
        self.loop = asyncio.get_running_loop()
        self.prefetch = Prefetch(context.clock)
        self.schedule: Callable[[Callable[[], object]], object] = self.loop.call_soon
        self._parts = QueueParts(
            context,
            topic,
            group,
            self.worker,
            options,
            self._on_taken,
            self._on_damage,
            self._gives_up,
            self._on_settled,
            self._fail,
        )
        self._links: dict[BrokerId, BrokerLink] = {}
        self._tasks = set[asyncio.Task[None]]()
        self._said: deque[Settling] = deque()
        self._is_draining = False
        self._all_answered = asyncio.Event()
        self._concurrency = 0
        self._is_started = self.is_closed = self.has_ended = False
        self._ended = asyncio.Event()
        self.counts = QueueStatistics(group)
        self.failure_log = FailureLog(_log)
        self._unlisten: Callable[[], None] = lambda: None

    # -- life -------------------------------------------------------------------------

    async def start(self, timeout: float | None = None) -> None:
        """Define the group, or compare it, and begin to take; `async with` calls it.

        Args:
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            ClosedError: it was started before, or closed.
            NoTopicError: no broker serves the topic.
            QueueGroupError: the group is there, and other than the options say;
                the text names the difference.
            ConfigError: the group is new, and nothing says what becomes of its dead
                messages; or the name is that of a log group.
            MetaqError: ZooKeeper cannot be asked.

        Cancellation: it is closed.
        """
        require_loop(self.loop, self)
        if self._is_started or self.is_closed:
            raise ClosedError("a queue is started once; make another one")
        self._is_started = True
        deadline_s = self._context.deadline_s(timeout)
        try:
            metadata = self._context.metadata
            await metadata.topic(self.topic, deadline_s=deadline_s, takes_puts=True)
            left_s = max(0.0, deadline_s - self._context.clock.monotonic_s())
            await within(left_s, self._define(), f"{self}: start")
        except BaseException:
            await self.close(0)
            raise
        self._spawn(self._run_upkeep(), "upkeep")
        self._unlisten = metadata.add_listener(self._on_snapshot)
        self._on_snapshot(metadata.snapshot)

    def _on_snapshot(self, snapshot: ClusterSnapshot) -> None:
        for broker_id in snapshot.puts.get(self.topic, {}):
            if broker_id not in self._links:
                link = self._links[broker_id] = BrokerLink(broker_id, self._parts)
                link.prefetch = max(link.prefetch, self._concurrency)
                self._spawn(link.run(), f"broker {broker_id}")
        for link in self._links.values():
            link.wake()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = self.loop.create_task(work, name=f"{name} of {self.group}")
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s failed", task.get_name(), exc_info=error)
            self._fail(MetaqError(f"{task.get_name()} failed: {error!r}"))

    def _fail(self, error: MetaqError) -> None:
        """Raise an error for all who want messages, after those that are here."""
        _log.error("queue of group %s stops: %s", self.group, error)
        self.prefetch.fail(error)

    async def close(self, timeout: float | None = None) -> None:
        """Release what was not handed out, and wait for settles; the block's end.

        What was handed out and is not settled is returned with the delay of the group.
        A second call waits for the first.

        Args:
            timeout: seconds; None takes the client's `close_timeout_s`. After that
                messages that the broker has not heard of come again when their leases
                are over.

        Raises:
            ClosedError: it belongs to another event loop; it is not closed.

        Cancellation: nothing is waited for any more.
        """
        check_timeout(timeout)
        require_loop(self.loop, self)
        if timeout is None:
            timeout = self._context.options.close_timeout_s
        if self.is_closed:
            await wait_set(self._ended, timeout)
            return
        with self.prefetch.lock:
            self.is_closed = True
        self._unlisten()
        waiting = self.prefetch.drain()
        self.prefetch.fail(ClosedError(f"{self} is closed"))
        for task in self._tasks:
            task.cancel()
        try:
            for link in self._links.values():
                link.stop_taking()
            self._drain()
            self._give_back(waiting)
            if self._unanswered:
                await wait_set(self._all_answered, timeout)
        finally:
            for link in self._links.values():
                link.give_up()
            self.has_ended = True
            self._ended.set()

    def _give_back(self, waiting: Sequence[HeldMessage]) -> None:
        for held in waiting:
            self._link(held).settle(self.entry(held, SettleVerb.RELEASE))
        for link in self._links.values():
            for held in tuple(link.held):
                held.state = HeldState.SETTLED
                link.settle(self.entry(held, SettleVerb.NACK, argument=GROUP_DELAY))
            link.flush()

    @property
    def _unanswered(self) -> int:
        return sum(link.unanswered_count for link in self._links.values())

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    def __str__(self) -> str:
        return f"queue of group '{self.group}', topic '{self.topic}'"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {str(self)[6:]}, {self._context.place}>"

    def require_started(self) -> None:
        """Raise ClosedError when nothing can ever be received."""
        if not self._is_started:
            raise ClosedError("the queue is not started: use it as 'with'")

    # -- runs -------------------------------------------------------------------------

    def begin_run(self, concurrency: int) -> None:
        """Let as many messages be taken as a run handles at once.

        Raises:
            ConfigError: `concurrency` is outside its range.
            ClosedError: the queue is not started.
        """
        check_whole("concurrency", concurrency, 1, CONCURRENCY_MAX)
        self.require_started()
        self._concurrency = max(self._concurrency, concurrency)
        for link in self._links.values():
            link.prefetch = max(link.prefetch, self._concurrency)
            link.wake()

    @property
    def close_timeout_s(self) -> float:
        """Return how long the end of a run waits for handlers, seconds."""
        return self._context.options.close_timeout_s

    def verb_for(self, held: HeldMessage, error: BaseException | None) -> SettleVerb:
        """Return what the end of a handler says of its message; any thread."""
        if error is None:
            return SettleVerb.ACK
        is_given_up = isinstance(error, Reject)
        self.counts.failure_count += 1
        text = f"handler failed: group={self.group} {held}: {error!r}"
        self.failure_log.write(text, error, is_last=is_given_up)
        return SettleVerb.REJECT if is_given_up else SettleVerb.NACK

    def conclude(
        self, held: HeldMessage, verb: SettleVerb, error: BaseException | None = None
    ) -> None:
        """Settle a message whose handler has ended, unless it did so; any thread."""
        argument = GROUP_DELAY if verb is SettleVerb.NACK else 0
        text = str(error) or repr(error)
        # It may have settled its message; and what is lost is counted.
        with contextlib.suppress(AlreadySettledError, LeaseLostError, ClosedError):
            self.settle([self.entry(held, verb, None, argument, text)])

    # -- settling ---------------------------------------------------------------------

    async def ack_held(
        self, messages: Iterable[HeldMessage], timeout: float | None
    ) -> None:
        """Ack messages that were handed out, each once; raises as `ack_many`."""
        helds = [*dict.fromkeys(messages)]
        futures: list[asyncio.Future[None]]
        futures = [self.loop.create_future() for _ in helds]
        entries = [
            self.entry(held, SettleVerb.ACK, future)
            for held, future in zip(helds, futures, strict=True)
        ]
        self.settle(entries)
        outcomes = await within(
            timeout,
            asyncio.gather(*futures, return_exceptions=True),
            f"{self}: ack of {len(entries)} messages",
        )
        errors = [one for one in outcomes if one is not None]
        if errors:
            raise type(errors[0])(
                f"{errors[0]} (the first of {len(errors)} that are not acked, of"
                f" {len(entries)})"
            )

    def entry(
        self,
        held: HeldMessage,
        verb: SettleVerb,
        future: SettleFuture | None = None,
        argument: int = 0,
        text: str = "",
    ) -> Settling:
        """Return what `settle` takes, said now."""
        now_s = self._context.clock.monotonic_s()
        return Settling(held, verb, now_s, argument, text, future)

    def settle(self, entries: Sequence[Settling]) -> None:
        """Say something about messages that were handed out; from any thread.

        Raises:
            AlreadySettledError, LeaseLostError, ClosedError: of one of them, and
                nothing is said.
        """
        with self.prefetch.lock:
            for one in entries:
                self._require_begun(one.held)
            for one in entries:
                if one.verb is not SettleVerb.EXTEND:
                    one.held.state = HeldState.SETTLED
            self._said.extend(entries)
            if not self._is_draining:
                self._is_draining = True
                self.schedule(self._drain)

    def begin_hold(self, held: HeldMessage, pool: object) -> None:
        """Leave a message to a transaction over connections of `pool`; on the loop.

        Raises:
            AlreadySettledError, LeaseLostError, ClosedError: as `settle`; or it is
                another client's.
        """
        if pool is not self._context.pool:
            raise AlreadySettledError(f"{held}: it is of another client: {self!r}")
        with self.prefetch.lock:
            self._require_begun(held)
            held.state = HeldState.SETTLED
        self._link(held).drop(held)

    def refuse_hold(self, held: HeldMessage) -> LeaseLostError:
        """Note that another delivery has a message; return the error."""
        self.counts.lost_count += 1
        with self.prefetch.lock:
            held.state = HeldState.LOST
        return lease_lost(held)

    def end_hold(self, held: HeldMessage, *, is_done: bool) -> None:
        """Note the outcome of its transaction: done, or as if it was not acked."""
        if is_done:
            self.counts.acked_count += 1
            return
        with self.prefetch.lock:
            if self.is_closed or held.state is not HeldState.SETTLED:
                return
            held.state = HeldState.BEGUN
        self._link(held).take_back(held)

    def _require_begun(self, held: HeldMessage) -> None:
        if self.is_closed:
            raise ClosedError(f"{held}: {self} is closed")
        if held.state is HeldState.LOST:
            raise lease_lost(held)
        if held.state is not HeldState.BEGUN:
            raise AlreadySettledError(f"{held}: it was settled before")

    def _drain(self) -> None:
        self._is_draining = False
        while self._said:
            entry = self._said.popleft()
            self._link(entry.held).settle(entry)
        for link in self._links.values():
            link.flush()

    def _link(self, held: HeldMessage) -> BrokerLink:
        return self._links[held.partition.broker_id]

    # -- called by the links ----------------------------------------------------------

    def _on_taken(self, messages: Sequence[HeldMessage]) -> bool:
        if self.is_closed:
            return False
        self.counts.taken_count += len(messages)
        self.prefetch.put(messages)
        return True

    def _on_damage(self, held: HeldMessage) -> None:
        self.counts.damaged_count += 1
        _log.error(
            "damaged message given back: topic=%s partition=%s group=%s offset=%d",
            self.topic,
            held.partition.name,
            self.group,
            held.offset,
        )

    def _gives_up(self, held: HeldMessage, is_late: bool) -> bool:
        now_s = self._context.clock.monotonic_s()
        with self.prefetch.lock:
            is_waiting = held.state is HeldState.WAITING
            if is_waiting and held.lease_end_s <= now_s:
                held.state = HeldState.LOST
            if held.state is HeldState.LOST:
                self.counts.lost_count += 1
                return True
            if is_late and is_waiting:
                held.state = HeldState.SETTLED
        if is_late and is_waiting:
            self._link(held).settle(self.entry(held, SettleVerb.RELEASE))
        elif is_late:
            _log.warning(
                "lease is not renewed any more: group=%s handle_s_max=%g: %s",
                self.group,
                self.options.handle_s_max,
                held,
            )
        return is_late

    def _on_settled(self, entry: Settling, outcome: Word | MetaqError) -> None:
        held, verb = entry.held, entry.verb
        error: MetaqError | None = None
        if isinstance(outcome, MetaqError):
            error = outcome
        elif outcome in SUCCESS[verb] or (entry.is_in_doubt and verb in RETURNS):
            self._count(entry)
        else:
            error = lease_lost(held)
            if verb is not SettleVerb.EXTEND or held.state is not HeldState.SETTLED:
                self.counts.lost_count += 1
            with self.prefetch.lock:
                held.state = HeldState.LOST
            self._link(held).drop(held)
        if verb is SettleVerb.EXTEND:
            held.is_renewing = False
        if entry.future is None and error is not None:
            _log.warning("not settled: group=%s verb=%s: %s", self.group, verb, error)
        elif entry.future is not None and not entry.future.done():
            if error is None:
                entry.future.set_result(None)
            else:
                entry.future.set_exception(error)
        if self.is_closed and not self._unanswered:
            self._all_answered.set()

    def _count(self, entry: Settling) -> None:
        counts = self.counts
        match entry.verb:
            case SettleVerb.ACK:
                counts.acked_count += 1
            case SettleVerb.NACK | SettleVerb.RELEASE:
                counts.returned_count += 1
            case SettleVerb.REJECT:
                counts.rejected_count += 1
            case SettleVerb.EXTEND:
                entry.held.lease_end_s = entry.since_s + entry.argument / 1000

    async def _run_upkeep(self) -> None:
        while True:
            await asyncio.sleep(UPKEEP_S)
            now_s = self._context.clock.monotonic_s()
            for link in self._links.values():
                link.keep_up(now_s)

    def statistics(self) -> QueueStatistics:
        """Return a snapshot of the counters; from any thread."""
        held_count = sum(len(link.held) for link in tuple(self._links.values()))
        return replace(self.counts, held_count=held_count)


def lease_lost(held: HeldMessage) -> LeaseLostError:
    """Return the error of a message that is not its worker's any more."""
    return LeaseLostError(
        f"{held}: its lease is over, and another delivery has it: it may be handled"
        " twice"
    )
