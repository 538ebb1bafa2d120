"""Handlers: workers over the fetch buffer, retries, and messages that none handles.

    buffer --take--> worker --> handler returned: handled
                     |----> it raised: back to the fetch buffer, the partition paused
                     `----> given up: dead letter, kept, dropped, or the end

Theory of operation. A worker holds one batch, so a partition is with one worker at a
time and its order is kept. A message that failed goes back to the buffer with all
behind it: no worker waits with a batch in its hand, and a partition that is taken away
in between goes at once. The state of a failed message waits here, one per partition
(`Trouble`). Work per handled message is done in the worker, in both worlds; a
failure is judged on the loop (`settle`), for the sync world too.

A message counts as handled when its handler returned, or when it was given up *and*
the broker or the disk has it. Cancelling a handler leaves its message unhandled.
Source: client spec 10.2, 11.3, 12.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from metaq.client.cluster.context import MessageSender
from metaq.client.consume.current_batch import current_task
from metaq.client.consume.dead_letters import Origin, letter_headers, origin_of
from metaq.client.consume.fetch_buffer import FetchBuffer, FetchedBatch
from metaq.client.consume.local_retry_store import LocalRetryStore
from metaq.client.consume.redelivery import (
    FailureLog,
    RetryPolicy,
    dead_letter_topic,
    next_delay_s,
)
from metaq.client.errors import HandlerFailedError, MessageTooLargeError
from metaq.client.options import ProducerOptions
from metaq.client.timeouts import within
from metaq.client.validation import check_timeout
from metaq.clock import Clock
from metaq.config.topic_rules import is_safe_topic
from metaq.errors import ClosedError, LocalProtocolError, MetaqError
from metaq.fs import FileSystem
from metaq.model import Message, TopicPartition
from metaq.retry import Backoff
from metaq.stats import counter, gauge, total_of

log = logging.getLogger(__name__)

AsyncHandler: TypeAlias = Callable[[Message], Awaitable[object]]
"""Handles a message; its result is ignored, an exception is a failure."""

CONCURRENCY_MAX: Final = 10_000
"""Most workers of one run."""

GIVING_UP: Final = Backoff(first_s=0.5, max_s=30.0)
"""Pauses while a message cannot be given up: no broker takes the dead letter, or the
local retry store does not take the message."""


LETTER_S: Final = 0.5
"""A dead letter that is begun at the end of a run still has so long."""


@dataclass(slots=True)
class Trouble:
    """State of the failed message that a partition waits for."""

    message: Message
    attempts: int = 0
    """Number of times that the handler had it."""
    error: BaseException | None = None
    """Last error of the handler."""
    is_given_up: bool = False
    """The handler gets it no more."""
    refusals: int = 0
    """Number of refusals after it was given up."""
    refusal: MetaqError | None = None
    """Error of the last refusal."""

    def __str__(self) -> str:
        text = (
            f"{self.message.partition}: message {self.message.id} at offset"
            f" {self.message.offset} failed {self.attempts} times: {self.error!r}"
        )
        if self.refusal is not None:
            text += f"; it is given up, and no broker or disk takes it: {self.refusal}"
        return text


@dataclass(frozen=True, slots=True)
class HandlingStatistics:
    """A snapshot of the counters of one `run`, or of all of a consumer's."""

    handled_count: int = counter(
        "metaq_consumer_handled_messages_total",
        "Messages that `run` is done with: handled, or given up and taken.",
    )
    failure_count: int = counter(
        "metaq_consumer_handler_failures_total",
        "How often a handler failed, parked messages included.",
    )
    dead_letter_count: int = counter(
        "metaq_consumer_dead_letters_total", "Messages that became dead letters."
    )
    dropped_count: int = counter(
        "metaq_consumer_dropped_messages_total", "Messages that were given up for good."
    )
    parked_count: int = counter(
        "metaq_consumer_parked_messages_total", "Messages that were parked."
    )
    replayed_count: int = counter(
        "metaq_consumer_replayed_messages_total",
        "Parked messages that were handled later.",
    )
    waiting_count: int = gauge(
        "metaq_consumer_parked_messages", "Messages that are parked now."
    )


def total_of_runs(parts: Sequence[HandlingStatistics]) -> HandlingStatistics:
    """Return what runs, one or more, counted together; the last one's store counts."""
    return replace(total_of(parts), waiting_count=parts[-1].waiting_count)


class Handling:
    """One `run` of one consumer: its workers' common part, in both worlds.

    Lifecycle: made on the loop, `start`, work, `close`.

    Concurrency: on the loop, except `is_given_up`, `give_back` and `take_replay`, which
    workers call from any thread.
    """

    def __init__(
        self,
        fetch_buffer: FetchBuffer,
        *,
        group: str,
        topics: Collection[str],
        policy: RetryPolicy,
        clock: Clock,
        make_producer: Callable[[], MessageSender],
        fs: FileSystem | None = None,
        before: "Handling | None" = None,
    ) -> None:
        """Prepare; call it on the loop.

        Args:
            fetch_buffer: where messages come from.
            group: consumer group.
            topics: topics of the consumer; their messages are replayed.
            policy: policy chosen by the user.
            clock: for deadlines, and for the times in dead letters.
            make_producer: makes the producer of dead letters, when there is one.
            fs: the disk of the local retry store; None: this machine's.
            before: the run before, which has ended; its messages may be stuck.
        """
        self._fetch_buffer = fetch_buffer
        self._group = group
        self._policy = policy
        self.clock = clock
        """Clock for deadlines, and for the times in dead letters."""
        self._make_producer = make_producer
        self._loop = asyncio.get_running_loop()
        self._producer: MessageSender | None = None
        self._failures = FailureLog(log)
        self._retry_store = None
        if policy.then == "park":
            self._retry_store = LocalRetryStore(
                fetch_buffer, group=group, topics=topics, policy=policy, fs=fs
            )
        self._troubles: dict[TopicPartition, Trouble] = {}
        self._stuck_before = {} if before is None else before.stuck()
        self._deadline_s: float | None = None
        self._timers: dict[TopicPartition, asyncio.TimerHandle] = {}
        self._lock = threading.Lock()
        self._idle: set[asyncio.Task[Any]] = set()
        """Workers of `run` that wait for a batch."""
        self._is_ending = False
        self.is_closed = False
        """The run is over; nothing works on it any more."""
        self.has_ended = False
        """The run is over, and its parts are closed."""
        self._handled_count = 0
        self._failure_count = 0
        self._dead_letter_count = 0
        self._dropped_count = 0
        self._parked_count = 0

    # -- life -------------------------------------------------------------------------

    async def start(self, timeout_s: float | None) -> None:
        """Open the local retry store, and begin to replay it.

        Args:
            timeout_s: time of the run, which the disk may take; None: for ever.

        Raises:
            StorageError: the directory is unusable, or another process has it.
            RequestTimeoutError: the disk does not answer.
        """
        check_timeout(timeout_s)
        if timeout_s is not None:
            self._deadline_s = self.clock.monotonic_s() + timeout_s
        if self._retry_store is not None:
            what = f"opening the local retry store of group '{self._group}'"
            await within(timeout_s, self._retry_store.start(), what)

    async def close(self) -> None:
        """End pauses and replays; the messages stay where they are. Never raises."""
        self.is_closed = True
        for partition, timer in self._timers.items():
            timer.cancel()
            self._fetch_buffer.resume(partition)
        self._timers.clear()
        try:
            if self._retry_store is not None:
                await self._retry_store.close()
            if self._producer is not None:
                await self._producer.close()
        finally:
            self.has_ended = True

    async def run(
        self,
        handler: AsyncHandler,
        concurrency: int,
        *,
        timeout_s: float | None,
        grace_s: float,
    ) -> None:
        """Handle messages until the consumer is closed; `AsyncConsumer.run` says more.

        Args:
            handler: takes one message.
            concurrency: number of workers.
            timeout_s: when it ends by itself; None: never.
            grace_s: how long handlers that are at work then may go on.

        Raises:
            MetaqError: the consumer failed, or the policy says to stop.
        """
        try:
            await self.start(timeout_s)
            await self._run_workers(handler, concurrency, timeout_s, grace_s)
        finally:
            await self.close()

    async def _run_workers(
        self,
        handler: AsyncHandler,
        concurrency: int,
        timeout_s: float | None,
        grace_s: float,
    ) -> None:
        """Work until all have ended or one fails; the others are cancelled then."""
        tasks = [
            asyncio.create_task(self._work(handler), name=f"handler {number}")
            for number in range(concurrency)
        ]
        try:
            ended, late = await asyncio.wait(
                tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION
            )
            if not any(_has_failed(task) for task in ended):
                self._is_ending = True
                for task in late & self._idle:
                    task.cancel()
                if late:
                    await asyncio.wait(late, timeout=grace_s)
        finally:
            self._is_ending = True
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end

    # -- workers ----------------------------------------------------------------------

    async def _work(self, handler: AsyncHandler) -> None:
        # A handler may swallow its cancellation: then this ends the worker.
        me = current_task()
        while not self._is_ending:
            self._idle.add(me)
            try:
                batch = await self._fetch_buffer.take_async()
            except ClosedError:
                return
            finally:
                self._idle.discard(me)
            replay = self.take_replay(batch)
            if replay is None:
                await self._handle(batch, handler)
            else:
                replay(await _failure_of(handler, batch.messages[0]))
            # A handler that never waits still leaves others their turn.
            await asyncio.sleep(0)

    async def _handle(self, batch: FetchedBatch, handler: AsyncHandler) -> None:
        """Have a batch handled; keep in step with `handler_threads.py`."""
        pause_s = None
        try:
            for message in batch.begin():
                if self._is_ending:
                    break
                error = None
                is_given_up = self.is_given_up(message)
                if not is_given_up:
                    error = await _failure_of(handler, message)
                if error is not None or is_given_up:
                    pause_s = await self.settle(batch, message, error)
                    if pause_s is not None:
                        break
                batch.confirmed += 1
        finally:
            self.give_back(batch, pause_s)

    def is_given_up(self, message: Message) -> bool:
        """Return whether the handler gets this message no more."""
        if not self._troubles:
            return False
        trouble = self._troubles.get(message.partition)
        return (
            trouble is not None
            and trouble.is_given_up
            and trouble.message.offset == message.offset
        )

    def take_replay(
        self, batch: FetchedBatch
    ) -> Callable[[BaseException | None], None] | None:
        """Return whom to tell how a message of the retry store ended, or None."""
        return None if self._retry_store is None else self._retry_store.take(batch)

    def give_back(self, batch: FetchedBatch, pause_s: float | None) -> None:
        """Give a batch back to the fetch buffer.

        Args:
            batch: the worker's batch; `confirmed` tells its progress.
            pause_s: how long its partition waits; None: not at all.
        """
        with self._lock:
            self._handled_count += batch.confirmed
        trouble = self._troubles.get(batch.partition)
        if trouble is not None and batch.confirmed:
            last = batch.messages[batch.confirmed - 1]
            if trouble.message.offset <= last.offset:
                self._troubles.pop(batch.partition, None)
        self._fetch_buffer.done(batch, is_paused=pause_s is not None)
        if pause_s is not None:
            self._loop.call_soon_threadsafe(self._pause, batch.partition, pause_s)

    def _pause(self, partition: TopicPartition, pause_s: float) -> None:
        if self.is_closed:
            self._fetch_buffer.resume(partition)
            return
        earlier = self._timers.get(partition)
        if earlier is not None:
            earlier.cancel()
        self._timers[partition] = self._loop.call_later(
            pause_s, self._resume, partition
        )

    def _resume(self, partition: TopicPartition) -> None:
        del self._timers[partition]
        self._fetch_buffer.resume(partition)

    # -- failures ---------------------------------------------------------------------

    async def settle(
        self, batch: FetchedBatch, message: Message, error: BaseException | None
    ) -> float | None:
        """Judge a failure, and act by the policy.

        Args:
            batch: the worker's batch; when it is stopped, or the run is over,
                its next handler judges.
            message: the failed message.
            error: the handler's exception; None: it was not asked, for the message is
                given up since an earlier attempt.

        Returns:
            None when the message is done with; else how many seconds its partition
            waits until the message is handed out again.

        Raises:
            HandlerFailedError: the end of the run.

        Cancellation: the message may be a dead letter, or kept, and come again.
        """
        if batch.is_stopped or self.is_closed:
            return 0.0
        trouble = self._note(message, error)
        if not trouble.is_given_up:
            assert error is not None
            delay_s = next_delay_s(self._policy, trouble.attempts, error)
            text = f"handler failed: group={self._group} {trouble}"
            self._failures.tell(text, error, is_last=delay_s is None)
            if delay_s is not None:
                return delay_s
            trouble.is_given_up = True
        try:
            await self._give_up(trouble)
        except MetaqError as refusal:
            if isinstance(refusal, HandlerFailedError):
                raise
            trouble.refusals += 1
            trouble.refusal = refusal
            log.error(
                "failed message not stored, trying again: group=%s %s",
                self._group,
                trouble,
            )
            return GIVING_UP.delay_s(trouble.refusals)
        self._troubles.pop(message.partition, None)
        return None

    def _note(self, message: Message, error: BaseException | None) -> Trouble:
        trouble = self._troubles.get(message.partition)
        if trouble is None or trouble.message.offset != message.offset:
            trouble = self._troubles[message.partition] = Trouble(message)
        if error is not None:
            trouble.attempts += 1
            trouble.error = error
            self._failure_count += 1
        return trouble

    async def _give_up(self, trouble: Trouble) -> None:
        """Give a message up as the policy says; raises if that is refused."""
        then = self._policy.then
        if then == "stop":
            raise self._stopped(trouble) from trouble.error
        if then == "drop":
            log.error("message dropped: group=%s %s", self._group, trouble)
            self._dropped_count += 1
        elif then == "park":
            assert self._retry_store is not None
            await self._retry_store.add(trouble.message)
            self._parked_count += 1
        else:
            await self._send_dead_letter(trouble)
            self._dead_letter_count += 1

    async def _send_dead_letter(self, trouble: Trouble) -> None:
        message = trouble.message
        assert trouble.error is not None
        origin = origin_of(
            message,
            group=self._group,
            error=trouble.error,
            attempts=trouble.attempts,
            at_ms=self.clock.wall_ms(),
        )
        try:
            try:
                await self._send_origin(message, origin)
            except MessageTooLargeError:
                # A large message shall not stop for an optional part.
                await self._send_origin(message, origin._replace(traceback=""))
        except (MessageTooLargeError, LocalProtocolError) as refusal:
            # It will never be taken, and waiting for ever would be silence.
            raise self._stopped(trouble, f": {refusal}") from trouble.error

    async def _send_origin(self, message: Message, origin: Origin) -> None:
        topic = dead_letter_topic(self._policy, message.topic)
        if not is_safe_topic(topic):
            raise LocalProtocolError(f"no topic can have the name {topic!r}")
        if self._producer is None:
            self._producer = self._make_producer()
        await self._producer.send(
            topic,
            message.data,
            attribute=message.attribute,
            key=message.key,
            headers=letter_headers(message.header_pairs, origin),
            timeout=self._letter_timeout_s(),
        )

    def _letter_timeout_s(self) -> float | None:
        """Return what the run leaves a dead letter; None where that is no bound."""
        if self._deadline_s is None:
            return None
        left_s = max(LETTER_S, self._deadline_s - self.clock.monotonic_s())
        return left_s if left_s < ProducerOptions().timeout_s else None

    def _stopped(self, trouble: Trouble, why: str = "") -> HandlerFailedError:
        return HandlerFailedError(
            f"group '{self._group}': {trouble}{why}",
            failed=trouble.message,
            attempts=trouble.attempts,
        )

    # -- how it is doing --------------------------------------------------------------

    def problems(self) -> list[str]:
        """Return one sentence for each problem; what is stuck outlives the run."""
        found = [str(trouble) for trouble in self.stuck().values()]
        if self.is_closed:
            return [f"{each}; no run is handling it now" for each in found]
        if self._retry_store is not None and self._retry_store.last_error is not None:
            found.append(f"local retry store: {self._retry_store.last_error}")
        return found

    def stuck(self) -> dict[TopicPartition, Trouble]:
        """Return the failed messages that have not been handled since."""
        handled = self._fetch_buffer.handled()
        return {
            partition: trouble
            for partition, trouble in (self._stuck_before | self._troubles).items()
            if trouble.attempts
            and partition in handled
            and trouble.message.offset >= handled[partition].offset
        }

    def statistics(self) -> HandlingStatistics:
        """Return a snapshot of the counters."""
        store = self._retry_store
        return HandlingStatistics(
            handled_count=self._handled_count,
            failure_count=self._failure_count
            + (0 if store is None else store.failure_count),
            dead_letter_count=self._dead_letter_count,
            dropped_count=self._dropped_count,
            parked_count=self._parked_count,
            replayed_count=0 if store is None else store.replayed_count,
            waiting_count=0 if store is None else store.waiting_count,
        )


def _has_failed(task: asyncio.Task[None]) -> bool:
    return task.cancelled() or task.exception() is not None


async def _failure_of(handler: AsyncHandler, message: Message) -> BaseException | None:
    """Return the exception of a handler; None when it returned."""
    try:
        await handler(message)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # Something the handler waited for was cancelled, not the handler.
        return error
    except Exception as error:  # noqa: BLE001  # whatever users raise is judged
        return error
    return None
