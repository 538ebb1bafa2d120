"""Handlers: workers over the fetch buffer, retries, and messages that are given up.

    buffer --take--> worker --> handler returned: handled
                     |----> it raised: back to the fetch buffer, partition delayed
                     `----> given up: dead letter, parked, dropped, or `run` ends

Theory of operation. A worker holds one batch, so one worker at a time handles a
partition, in order. A failed message goes back to the buffer with all later ones. So no
worker waits while it holds a batch, and a partition that is revoked during the delay is
released at once. The state of the failed message of each partition is kept here
(`FailedMessage`). Each world's workers call the handlers; what to do about a failure is
decided on the loop in both worlds (`settle`).

A message counts as handled when its handler returned, or when it was given up *and*
dropped, or stored as a dead letter or in the local retry store. Cancelling a handler
leaves its message unhandled.

Source: docs/metaq-1.4/client.md 10.2, 11.3 and 12.
"""

import asyncio
import logging
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

from metaq.client.cluster.context import ClientContext, MessageSender
from metaq.client.consume.dead_letter_topics import LetterTopics
from metaq.client.consume.dead_letters import DeadLetterSelector, origin_of
from metaq.client.consume.fetch_buffer import FetchBuffer
from metaq.client.consume.fetched_batch import FetchedBatch
from metaq.client.consume.handler_tasks import AsyncHandler, HandlerTasks, failure_of
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
from metaq.errors import ClosedError, ConfigError, MetaqError
from metaq.fs import FileSystem
from metaq.model import Message, TopicPartition
from metaq.record.dead_letters import Origin, letter_headers
from metaq.retry import Backoff
from metaq.stats import counter, gauge, total_of

_log = logging.getLogger(__name__)

GIVING_UP: Final = Backoff(first_s=0.5, max_s=30.0)
"""Pauses while no broker accepts a dead letter, or the local retry store does not
accept a message."""

LETTER_S: Final = 0.5
"""Minimum time for sending a dead letter at the end of a run, in seconds."""


@dataclass(slots=True)
class FailedMessage:
    """A message whose handler failed; its partition waits for it."""

    message: Message
    attempts: int = 0
    error: BaseException | None = None
    is_given_up: bool = False
    refusals: int = 0
    """Number of times that storing it failed after it was given up."""
    refusal: MetaqError | None = None

    def __str__(self) -> str:
        text = (
            f"{self.message.partition}: message {self.message.id} at offset"
            f" {self.message.offset} failed {self.attempts} times: {self.error!r}"
        )
        if self.refusal is not None:
            text += f"; it is given up, and no broker or disk takes it: {self.refusal}"
        return text

    @property
    def problem(self) -> str:
        """Sentence of it while its partition waits for it."""
        if self.is_given_up and self.refusal is None:
            return f"{self}; it is given up, and waits for a broker or disk to take it"
        return str(self)


@dataclass(slots=True)
class HandlingStatistics:
    """Counters of one `run`, or sums over all runs of a consumer."""

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
    """Return the sums of one or more runs, with the retry store of the last one."""
    return replace(total_of(parts), waiting_count=parts[-1].waiting_count)


class Handling:
    """The state that the workers of one `run` share, in both worlds.

    Lifecycle: created, `start`, any number of workers, `close`. Concurrency: on the
    loop, except `is_given_up` and `give_back`, which workers call from any thread.
    """

    def __init__(
        self,
        context: ClientContext,
        fetch_buffer: FetchBuffer,
        *,
        group: str,
        topics: Collection[str],
        policy: RetryPolicy,
        fs: FileSystem | None = None,
        before: "Handling | None" = None,
    ) -> None:
        """Create the state of a run, on the loop.

        Args:
            context: the client's parts.
            fetch_buffer: source of the messages.
            group: consumer group.
            topics: topics of the consumer; more may match its patterns later.
            policy: policy chosen by the user.
            fs: file system of the local retry store; None: that of this machine.
            before: the previous run, which has ended and may have left stuck messages.
        """
        self._fetch_buffer = fetch_buffer
        self._group = group
        self._policy = policy
        self._context = context
        self._clock = context.clock
        self._letter_topics = LetterTopics(context, policy, topics)
        self._loop = asyncio.get_running_loop()
        self._producer: MessageSender | None = None
        self._failure_log = FailureLog(_log)
        self._retry_store = None
        if policy.then == "park":
            self._retry_store = LocalRetryStore(
                fetch_buffer, group=group, topics=topics, policy=policy, fs=fs
            )
        self._failed: dict[TopicPartition, FailedMessage] = {}
        self._stuck_before = {} if before is None else before.stuck()
        self._deadline_s: float | None = None
        self._timers: dict[TopicPartition, asyncio.TimerHandle] = {}
        self._lock = threading.Lock()
        self._tasks = HandlerTasks(group)
        self.is_closed = False
        """Whether the run is over: nothing is decided any more."""
        self.has_ended = False
        """Whether its parts are closed, so that the counters are final."""
        self._counts = HandlingStatistics()

    # -- life -------------------------------------------------------------------------

    async def start(self, timeout_s: float | None) -> None:
        """Check the dead-letter topics, open the retry store, and begin its replay.

        Args:
            timeout_s: seconds for the run, from now on; None: no limit. The topics have
                LETTER_S at least.

        Raises:
            NoTopicError: a dead-letter topic does not exist.
            StorageError: the directory is unusable, or another process has it.
            RequestTimeoutError: the disk does not answer.
        """
        check_timeout(timeout_s)
        if timeout_s is not None:
            self._deadline_s = self._clock.monotonic_s() + timeout_s
        await self._letter_topics.require(self._letter_timeout_s())
        if self._retry_store is not None:
            what = f"opening the local retry store of group '{self._group}'"
            await within(timeout_s, self._retry_store.start(), what)

    async def close(self) -> None:
        """End delays and the replay; parked messages stay. Never raises."""
        self.is_closed = True
        for partition, timer in self._timers.items():
            timer.cancel()
            self._fetch_buffer.end_delay(partition)
        self._timers.clear()
        try:
            if self._retry_store is not None:
                await self._retry_store.close()
            if self._producer is not None:
                await self._producer.close(self._letter_timeout_s())
        finally:
            self.has_ended = True

    async def run_workers(
        self,
        handler: AsyncHandler[Message],
        concurrency: int,
        *,
        timeout_s: float | None,
        grace_s: float,
    ) -> None:
        """Run the async world's workers until one fails or all have ended.

        After `timeout_s` (None: never) running handlers have `grace_s` to end. Then
        they are cancelled. A handler that still runs END_S later keeps its partition
        until it returns, but this call does not wait for it.

        Raises:
            MetaqError: the consumer failed, or the policy says to stop.
        """
        await self._tasks.run(
            lambda: self._work(handler),
            concurrency,
            timeout_s=timeout_s,
            grace_s=grace_s,
        )

    # -- workers ----------------------------------------------------------------------

    async def _work(self, handler: AsyncHandler[Message]) -> None:
        while not self._tasks.is_ending:
            try:
                with self._tasks.idle():
                    batch = await self._fetch_buffer.take_async()
            except ClosedError:
                return
            if batch.on_replayed is None:
                await self._handle(batch, handler)
            else:
                batch.on_replayed(await failure_of(handler, batch.messages[0]))
            # Let other tasks run if the handler never waits.
            await asyncio.sleep(0)

    async def _handle(
        self, batch: FetchedBatch, handler: AsyncHandler[Message]
    ) -> None:
        """Handle the messages of a batch; keep in step with `handler_threads.py`."""
        pause_s = None
        try:
            for message in batch.begin():
                if self._tasks.is_ending:
                    break
                error = None
                is_given_up = self.is_given_up(message)
                if not is_given_up:
                    error = await failure_of(handler, message)
                if error is not None or is_given_up:
                    pause_s = await self.settle(batch, message, error)
                    if pause_s is not None:
                        break
                batch.confirm()
            else:
                batch.confirm()  # the loop skips expired messages at the end
        finally:
            self.give_back(batch, pause_s)

    def is_given_up(self, message: Message) -> bool:
        """Return whether a message was given up, so that no handler gets it again."""
        if not self._failed:
            return False
        failed = self._failed.get(message.partition)
        return (
            failed is not None
            and failed.is_given_up
            and failed.message.offset == message.offset
        )

    def give_back(self, batch: FetchedBatch, pause_s: float | None) -> None:
        """Give a batch back to the fetch buffer; its `confirmed` messages are handled.

        Its partition is delayed by `pause_s` seconds; None: not at all.
        """
        with self._lock:
            self._counts.handled_count += batch.confirmed
        failed = self._failed.get(batch.partition)
        if failed is not None and batch.confirmed:
            last = batch.messages[batch.confirmed - 1]
            if failed.message.offset <= last.offset:
                self._failed.pop(batch.partition, None)
        self._fetch_buffer.done(batch, is_delayed=pause_s is not None)
        if pause_s is not None:
            self._loop.call_soon_threadsafe(self._pause, batch.partition, pause_s)

    def _pause(self, partition: TopicPartition, pause_s: float) -> None:
        if self.is_closed:
            self._fetch_buffer.end_delay(partition)
            return
        earlier = self._timers.get(partition)
        if earlier is not None:
            earlier.cancel()
        self._timers[partition] = self._loop.call_later(
            pause_s, self._resume, partition
        )

    def _resume(self, partition: TopicPartition) -> None:
        del self._timers[partition]
        self._fetch_buffer.end_delay(partition)

    # -- failures ---------------------------------------------------------------------

    async def settle(
        self, batch: FetchedBatch, message: Message, error: BaseException | None
    ) -> float | None:
        """Do what the policy says about a failed message.

        Args:
            batch: the worker's batch. If it is stopped, or the run is over, nothing is
                done, and the message is handed out again.
            message: the failed message.
            error: the handler's exception; None: it was not called, because the message
                was given up after an earlier attempt.

        Returns:
            None if the message counts as handled; else the delay of its partition in
            seconds, after which the message is handed out again.

        Raises:
            HandlerFailedError: the policy says to stop.

        Cancellation: the message may be sent or parked, and still be delivered again.
        """
        if batch.is_stopped or self.is_closed:
            return 0.0
        failed = self._failed.get(message.partition)
        if failed is None or failed.message.offset != message.offset:
            failed = self._failed[message.partition] = FailedMessage(message)
        if error is not None:
            failed.attempts += 1
            failed.error = error
            self._counts.failure_count += 1
        if not failed.is_given_up:
            assert error is not None
            delay_s = next_delay_s(self._policy, failed.attempts, error)
            text = f"handler failed: group={self._group} {failed}"
            self._failure_log.write(text, error, is_last=delay_s is None)
            if delay_s is not None:
                return delay_s
            failed.is_given_up = True
        try:
            await self._give_up(failed)
        except HandlerFailedError:
            raise
        except MetaqError as refusal:
            failed.refusals += 1
            failed.refusal = refusal
            self._letter_topics.forget()
            _log.error(
                "failed message not stored, trying again: group=%s %s",
                self._group,
                failed,
            )
            return GIVING_UP.delay_s(failed.refusals)
        self._failed.pop(message.partition, None)
        return None

    async def _give_up(self, failed: FailedMessage) -> None:
        """Give a message up as the policy says; raise if it cannot be stored."""
        match self._policy.then:
            case "stop":
                raise self._stopped(failed) from failed.error
            case "drop":
                _log.error("message dropped: group=%s %s", self._group, failed)
                self._counts.dropped_count += 1
            case "park":
                assert self._retry_store is not None
                await self._retry_store.add(failed.message)
                self._counts.parked_count += 1
            case "dead_letter":
                await self._send_dead_letter(failed)
                self._counts.dead_letter_count += 1

    async def _send_dead_letter(self, failed: FailedMessage) -> None:
        message = failed.message
        assert failed.error is not None
        origin = origin_of(
            message,
            group=self._group,
            error=failed.error,
            attempts=failed.attempts,
            at_ms=self._clock.wall_ms(),
        )
        try:
            try:
                await self._send_origin(message, origin)
            except MessageTooLargeError:
                # Without the traceback it may fit.
                await self._send_origin(message, origin._replace(traceback=""))
        except (MessageTooLargeError, ConfigError) as refusal:
            # It will never be accepted: stop instead of retrying without end.
            raise self._stopped(failed, f": {refusal}") from failed.error

    async def _send_origin(self, message: Message, origin: Origin) -> None:
        topic = dead_letter_topic(self._policy, message.topic)
        await self._letter_topics.make(message.topic, self._letter_timeout_s())
        if self._producer is None:
            options, selector = ProducerOptions(), DeadLetterSelector()
            self._producer = self._context.make_producer(options, selector)
        await self._producer.send(
            topic,
            message.data,
            attribute=message.attribute,
            key=message.key,
            headers=letter_headers(message.header_pairs, origin),
            timeout=self._letter_timeout_s(),
        )

    def _letter_timeout_s(self) -> float | None:
        """Return the seconds left for a dead letter; None: its producer's own limit."""
        if self._deadline_s is None:
            return None
        left_s = max(LETTER_S, self._deadline_s - self._clock.monotonic_s())
        return left_s if left_s < ProducerOptions().timeout_s else None

    def _stopped(self, failed: FailedMessage, why: str = "") -> HandlerFailedError:
        return HandlerFailedError(
            f"group '{self._group}': {failed}{why}",
            failed=failed.message,
            attempts=failed.attempts,
        )

    # -- how it is doing --------------------------------------------------------------

    def problems(self) -> list[str]:
        """Return one sentence for each problem, also after the run."""
        found = [failed.problem for failed in self.stuck().values()]
        if self.is_closed:
            return [f"{each}; no run is handling it now" for each in found]
        if self._retry_store is not None and self._retry_store.last_error is not None:
            found.append(f"local retry store: {self._retry_store.last_error}")
        return found + self._letter_topics.problems()

    def stuck(self) -> dict[TopicPartition, FailedMessage]:
        """Return the failed messages of this and earlier runs that are not handled."""
        handled = self._fetch_buffer.handled()
        return {
            partition: failed
            for partition, failed in (self._stuck_before | self._failed).items()
            if failed.attempts
            and partition in handled
            and failed.message.offset >= handled[partition].offset
        }

    def statistics(self) -> HandlingStatistics:
        """Return a snapshot of the counters."""
        store = self._retry_store
        if store is None:
            return replace(self._counts)
        return replace(
            self._counts,
            failure_count=self._counts.failure_count + store.failure_count,
            replayed_count=store.replayed_count,
            waiting_count=store.waiting_count,
        )
