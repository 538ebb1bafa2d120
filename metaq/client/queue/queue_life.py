"""Start, close and settles of a worker: the base class of `AsyncQueue`.

`broker_link.py` has the messages of each broker. This module has what the links share:
changes of the messages' states, made under one lock because sync threads make them too,
and the settles of any thread on their way to the loop.
"""

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Final, Self

from metaq.client.cluster.context import ClientContext
from metaq.client.cluster.presence import refuse_exchanges
from metaq.client.consume.handler_tasks import CONCURRENCY_MAX
from metaq.client.consume.redelivery import FailureLog, Reject
from metaq.client.errors import AlreadySettledError, ExchangeError, LeaseLostError
from metaq.client.options import QueueOptions, load_filter
from metaq.client.own_process import OfOneProcess
from metaq.client.queue.broker_link import BrokerLink, lease_lost
from metaq.client.queue.prefetch import (
    HeldMessage,
    HeldState,
    Prefetch,
    QueueParts,
    QueueStatistics,
)
from metaq.client.queue.settling import Settling
from metaq.client.timeouts import require_loop, spawn, within
from metaq.client.validation import check_timeout, check_whole
from metaq.cluster_snapshot import ClusterSnapshot
from metaq.errors import ClosedError
from metaq.model import BrokerId
from metaq.protocol.queue_frames import GROUP_DELAY, SettleVerb
from metaq.retry import wait_set
from metaq.zk.group_definitions import QueueGroupDefinition

_log = logging.getLogger(__name__)

UPKEEP_S: Final = 0.15
"""Seconds between checks of the leases; less than a sixth of the shortest lease."""

handled: ContextVar[HeldMessage | None] = ContextVar("metaq_handled", default=None)
"""Message of the handler that runs in this context: `close` does not wait for it."""


class QueueLife(OfOneProcess):
    """A worker without the methods that hand messages out. Any thread may `settle`."""

    def __init__(
        self,
        context: ClientContext,
        define: Callable[[], Coroutine[Any, Any, QueueGroupDefinition]],
        *,
        topic: str,
        group: str,
        options: QueueOptions,
    ) -> None:
        """Prepare; use `AsyncClient.queue` to create one.

        Args:
            context: the client's parts.
            define: defines the group, or compares its definition with the options.
            topic: topic of the messages.
            group: the queue group.
            options: options chosen by the user.
        """
        self.topic = topic
        self.group = group
        self.options = options
        self.worker = context.draw_token()
        """Name of this worker, as shown by `metaq queues show`."""
        self.generation: int | None = None
        self._context = context
        self._define = define
        self.loop = asyncio.get_running_loop()
        self.clock = context.clock
        self.prefetch = Prefetch(self.clock)
        self.counts = QueueStatistics(group)
        self.schedule: Callable[[Callable[[], object]], object] = self.loop.call_soon
        self._parts = QueueParts(
            context,
            topic,
            group,
            self.worker,
            options,
            self.prefetch,
            self.counts,
            options.prefetch,
        )
        self._links: dict[BrokerId, BrokerLink] = {}
        self._tasks = list[asyncio.Task[None]]()
        """The upkeep task, and one task per broker that takes messages."""
        self._is_served = True
        """Whether a broker served the topic when that was last logged."""
        self._said = list[Settling]()
        """Settles on their way to the loop."""
        self._runs: dict[int, set[HeldMessage]] = {}
        """Messages in handlers: the set of each run, by its `id`. Threads add and
        remove with one atomic call each; the loop reads."""
        self._handler_ended = asyncio.Event()
        """Set when a handler ends, for a `close` that waits for handlers."""
        self._is_started = self.is_closed = self.has_ended = False
        self._is_over = False
        """Whether settles by users are refused; `close` still sends its own."""
        self._ended = asyncio.Event()
        self.failure_log = FailureLog(_log)
        self._unlisten: Callable[[], None] = lambda: None

    # -- life -------------------------------------------------------------------------

    async def start(self, timeout: float | None = None) -> None:
        """Define the group, or compare it, and begin to take; `async with` calls it.

        Args:
            timeout: seconds; None is `request_timeout_s`.

        Raises:
            ClosedError: it was started before, or is closed.
            NoTopicError: no broker serves the topic.
            ExchangeError: the topic is an exchange.
            QueueGroupError: the group exists with a definition other than the options,
                which the text names; or the name is that of a log group.
            ConfigError: the group is new and the options have neither a dead-letter
                topic nor `then`, or that topic does not exist; or `where` is not a
                valid filter.
            MetaqError: ZooKeeper is not available.

        Cancellation: the queue is closed.
        """
        require_loop(self.loop, self)
        await load_filter(self.options.where)
        if self._is_started or self.is_closed:
            raise ClosedError("a queue is started only once; create another one")
        self._is_started = True
        deadline_s = self._context.deadline_s(timeout)
        try:
            metadata = self._context.metadata
            await metadata.topic(self.topic, deadline_s=deadline_s, takes_puts=True)
            refuse_exchanges(metadata.snapshot, [self.topic])
            left_s = max(0.0, deadline_s - self._context.clock.monotonic_s())
            defined = await within(left_s, self._define(), f"{self}: start")
            self.generation = self._parts.generation = defined.generation
            self._parts.is_ordered = defined.ordered_by is not None
        except BaseException:
            await self.close(0)
            raise
        self._tasks.append(self._spawn(self._run_upkeep(), "upkeep"))
        self._unlisten = metadata.add_listener(self._on_snapshot)
        self._on_snapshot(metadata.snapshot)

    def _on_snapshot(self, snapshot: ClusterSnapshot) -> None:
        try:
            refuse_exchanges(snapshot, [self.topic])
        except ExchangeError as error:
            self._unlisten()
            self._parts.fail(error)
            self._stop_taking()
            return
        brokers = snapshot.puts.get(self.topic, {})
        if self._is_served and not brokers:
            _log.warning(
                "no broker serves the topic: group=%s topic=%s", self.group, self.topic
            )
        self._is_served = bool(brokers)
        for broker_id in brokers:
            if broker_id not in self._links:
                link = self._links[broker_id] = BrokerLink(broker_id, self._parts)
                self._tasks.append(self._spawn(link.run(), f"broker {broker_id}"))
        for link in self._links.values():
            link.wake()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return spawn(work, f"{name} of {self.group}", self._parts.fail)

    def _stop_taking(self) -> None:
        """Stop sending takes; held messages are renewed and settled as before."""
        for link in self._links.values():
            link.stop_taking()

    async def close(self, timeout: float | None = None) -> None:
        """Release messages not handed out, and wait for settles; `async with` calls it.

        Handlers of `run` finish and settle their messages first, except a handler that
        calls this. Other messages that were handed out and not settled are returned
        with the delay of the group. A second call waits for the first.

        Args:
            timeout: seconds, at most half of them for handlers. With None, handlers and
                settles have the client's `close_timeout_s` each. Messages whose settles
                did not reach the broker by then are delivered again when their leases
                are over.

        Raises:
            ClosedError: it belongs to another event loop; it is not closed.

        Cancellation: stops waiting; the queue is closed.
        """
        check_timeout(timeout)
        require_loop(self.loop, self)
        grace_s = self.close_timeout_s if timeout is None else timeout / 2
        if timeout is None:
            timeout = self.close_timeout_s
        if self.is_closed:
            await wait_set(self._ended, timeout)
            return
        self.is_closed = True
        self._unlisten()
        waiting = self.prefetch.drain()
        self.prefetch.fail(ClosedError(f"{self} is closed"))
        try:
            self._stop_taking()
            for held in waiting:
                self._link(held).give_back(held, SettleVerb.RELEASE)
            for link in self._links.values():
                link.flush()
            await self._let_handlers_end(grace_s)
            with self.prefetch.lock:
                self._is_over = True
            self._drain()
            for link in self._links.values():
                for held in tuple(link.held):
                    link.give_back(held, SettleVerb.NACK)
                link.flush()
            if self._parts.unanswered_count:
                self._parts.all_answered.clear()
                await wait_set(self._parts.all_answered, timeout)
        finally:
            self._is_over = True
            for task in self._tasks:
                task.cancel()
            for link in self._links.values():
                link.give_up()
            self.has_ended = True
            self._ended.set()

    async def _let_handlers_end(self, timeout: float) -> None:
        """Wait for all handlers, except one that calls this."""
        mine = {handled.get()}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while set().union(*self._runs.values()) - mine:
                    self._handler_ended.clear()
                    await self._handler_ended.wait()
        if late := set().union(*self._runs.values()) - mine:
            _log.warning(
                "handlers did not end in time, and their messages are returned:"
                " group=%s count=%d",
                self.group,
                len(late),
            )

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
        """Raise ClosedError if the queue was not started."""
        if not self._is_started:
            raise ClosedError(
                "the queue is not started: use it as 'with', or call start()"
            )

    # -- runs -------------------------------------------------------------------------

    def begin_run(self, concurrency: int) -> set[HeldMessage]:
        """Register a run, and take as many messages as it handles at once.

        Returns:
            A set in which the run keeps the messages of its handlers, until `end_run`.

        Raises:
            ConfigError: `concurrency` is outside its range.
            ClosedError: the queue is not started.
        """
        check_whole("concurrency", concurrency, 1, CONCURRENCY_MAX)
        self.require_started()
        self._parts.held_max = max(self._parts.held_max, concurrency)
        for link in self._links.values():
            link.wake()
        at_work = set[HeldMessage]()
        self._runs[id(at_work)] = at_work
        return at_work

    def end_run(self, at_work: set[HeldMessage]) -> None:
        """Unregister a run whose handlers have ended; any thread."""
        self._runs.pop(id(at_work), None)
        self._note_ended()

    def end_work(self, at_work: set[HeldMessage], held: HeldMessage) -> None:
        """Record that a handler has ended, after its settle; any thread."""
        at_work.discard(held)
        self._note_ended()

    def _note_ended(self) -> None:
        if self.is_closed and not self.has_ended:
            with contextlib.suppress(RuntimeError):  # the loop has ended by now
                self.schedule(self._handler_ended.set)

    @property
    def close_timeout_s(self) -> float:
        """Seconds for which the end of a run waits for handlers."""
        return self._context.options.close_timeout_s

    def conclude(self, held: HeldMessage, error: BaseException | None) -> None:
        """Settle a message by the outcome of its handler; any thread."""
        if error is None:
            self.say(held, SettleVerb.ACK)
            return
        is_given_up = isinstance(error, Reject)
        self.counts.failure_count += 1
        text = f"handler failed: group={self.group} {held}: {error!r}"
        self.failure_log.write(text, error, is_last=is_given_up)
        verb = SettleVerb.REJECT if is_given_up else SettleVerb.NACK
        self.say(held, verb, str(error) or repr(error))

    def say(self, held: HeldMessage, verb: SettleVerb, text: str = "") -> None:
        """Settle a message, unless its handler did so; any thread."""
        argument = GROUP_DELAY if verb is SettleVerb.NACK else 0
        # Lost leases are counted elsewhere.
        with contextlib.suppress(AlreadySettledError, LeaseLostError, ClosedError):
            self.settle([Settling(held, verb, argument, text)])

    # -- settling ---------------------------------------------------------------------

    def settle(self, entries: Sequence[Settling]) -> None:
        """Settle or extend messages that were handed out; from any thread.

        Raises:
            AlreadySettledError, LeaseLostError, ClosedError: one of the messages cannot
                be settled; none is.
        """
        begun, settled = HeldState.BEGUN, HeldState.SETTLED
        with self.prefetch.lock:
            for one in entries:
                if self._is_over or one.held.state is not begun:
                    self._require_begun(one.held)
            for one in entries:
                if one.verb is not SettleVerb.EXTEND:
                    one.held.state = settled
            if not self._said:
                self.schedule(self._drain)
            self._said.extend(entries)

    def begin_hold(self, held: HeldMessage, pool: object) -> None:
        """Hand a message over to a transaction of the client with `pool`; on the loop.

        Raises:
            AlreadySettledError, LeaseLostError, ClosedError: as `settle`; or the
                message belongs to another client.
        """
        if pool is not self._context.pool:
            raise AlreadySettledError(f"{held}: it is of another client: {self!r}")
        with self.prefetch.lock:
            self._require_begun(held)
            held.state = HeldState.SETTLED
        self._link(held).drop(held)

    def refuse_hold(self, held: HeldMessage) -> LeaseLostError:
        """Record that another delivery has a message; return the error."""
        self.counts.lost_count += 1
        with self.prefetch.lock:
            held.state = HeldState.LOST
        return lease_lost(held)

    def end_hold(self, held: HeldMessage, *, is_done: bool) -> None:
        """Record the outcome of its transaction: acked, or handed out as before."""
        if is_done:
            self.counts.acked_count += 1
            return
        with self.prefetch.lock:
            if self._is_over or held.state is not HeldState.SETTLED:
                return
            held.state = HeldState.BEGUN
        self._link(held).take_back(held)

    def _require_begun(self, held: HeldMessage) -> None:
        if self._is_over:
            raise ClosedError(f"{held}: {self} is closed")
        if held.state is HeldState.LOST:
            raise lease_lost(held)
        if held.state is not HeldState.BEGUN:
            raise AlreadySettledError(f"{held}: it was settled before")

    def _drain(self) -> None:
        """Pass settles to the links of their brokers, and send them."""
        with self.prefetch.lock:
            said, self._said = self._said, []
        by_broker = defaultdict[BrokerId, list[Settling]](list)
        for entry in said:
            by_broker[entry.held.partition.broker_id].append(entry)
        for broker_id, entries in by_broker.items():
            link = self._links[broker_id]
            link.settle(entries)
            link.flush()

    def _link(self, held: HeldMessage) -> BrokerLink:
        return self._links[held.partition.broker_id]

    async def _run_upkeep(self) -> None:
        while True:
            await asyncio.sleep(UPKEEP_S)
            now_s = self._context.clock.monotonic_s()
            for link in self._links.values():
                link.keep_up(now_s)

    def _count_held(self) -> int:
        """Return the number of messages held and not settled."""
        return sum([len(link.held) for link in tuple(self._links.values())])

    def statistics(self) -> QueueStatistics:
        """Return a snapshot of the counters; from any thread."""
        return replace(self.counts, held_count=self._count_held())
