"""One-way messages that cannot be appended yet: kept until they can, or dropped."""

import asyncio
import logging
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Final

from metaq.client.errors import BufferFullError
from metaq.client.partitioner import OutgoingMessage
from metaq.errors import ClosedError, MetaqError, NoBrokerError

_log = logging.getLogger(__name__)

ONEWAY_WAITING_MAX: Final = 10_000
"""One-way messages that wait until their topic is known, and as many that wait for the
loop; more are dropped."""


class OnewayMessages:
    """One-way messages that wait for their topic's partitions.

    Owner: one producer; used on its loop, except `drop`. Closed with `close`.
    """

    def __init__(
        self,
        *,
        prepare: Callable[[str], Awaitable[None]],
        append: Callable[[str, OutgoingMessage], object],
    ) -> None:
        """Start with none; both callables raise MetaqError for an unknown topic."""
        self._prepare = prepare
        self._append = append
        self._waiting: dict[str, deque[OutgoingMessage]] = {}
        self._waiting_count = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._counting = threading.Lock()
        self.dropped: Counter[str] = Counter()
        """Messages that were never appended, by the name of the error."""

    def keep(self, topic: str, message: OutgoingMessage) -> None:
        """Keep a message until its topic is known.

        Raises:
            NoBrokerError: ONEWAY_WAITING_MAX are kept already.
        """
        if self._waiting_count >= ONEWAY_WAITING_MAX:
            raise NoBrokerError(f"topic {topic} is not known yet")
        waiting = self._waiting.get(topic)
        if waiting is None:
            waiting = self._waiting[topic] = deque()
            task = asyncio.get_running_loop().create_task(
                self._run_topic(topic), name=f"producer-topic-{topic}"
            )
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._waiting_count += 1
        waiting.append(message)

    def drop(self, error: Exception, message_count: int = 1) -> None:
        """Count messages that were not appended. Safe in threads."""
        with self._counting:
            self.dropped[type(error).__name__] += message_count

    async def close(self, timeout_s: float) -> None:
        """Wait for the topics, so long at most; messages left then are dropped.

        Cancellation: as at the end of the time.
        """
        try:
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=timeout_s)
        finally:
            for task in self._tasks:
                task.cancel()
            for topic in tuple(self._waiting):
                error = ClosedError(f"topic {topic} was not known in time")
                self.drop(error, len(self._take(topic)))

    async def _run_topic(self, topic: str) -> None:
        """Append the messages of a topic when it is known, or drop them."""
        try:
            await self._prepare(topic)
        except MetaqError as error:
            self.drop(error, len(self._take(topic)))
            return
        for message in self._take(topic):
            try:
                self._append(topic, message)
            except MetaqError as error:
                self.drop(error)
            except Exception as error:  # noqa: BLE001  # logged and counted
                # A selector of the user's; later messages are not lost.
                _log.exception("one-way message dropped: topic=%s", topic)
                self.drop(error)

    def _take(self, topic: str) -> deque[OutgoingMessage]:
        waiting = self._waiting.pop(topic, deque())
        self._waiting_count -= len(waiting)
        return waiting


class Handover:
    """One-way messages from callers' threads, in order, to the loop of a producer."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        send: Callable[[str, OutgoingMessage], None],
        drop: Callable[[Exception], None],
    ) -> None:
        """Start with none.

        Args:
            loop: where `send` is called.
            send: takes a message; where it raises, the message is dropped.
            drop: counts a message that is not sent; called in any thread.
        """
        self._loop = loop
        self._send = send
        self._drop = drop
        self._lock = threading.Lock()
        self._messages: deque[tuple[str, OutgoingMessage]] = deque()
        self._announced: deque[tuple[str, OutgoingMessage]] | None = None
        """The messages that the loop was notified of last; it takes them all."""

    def put(self, topic: str, message: OutgoingMessage) -> None:
        """Hand a message over, or drop it when ONEWAY_WAITING_MAX wait already.

        Safe in threads.

        Raises:
            ClosedError: the loop is gone.
        """
        with self._lock:
            messages = self._messages
            is_full = len(messages) >= ONEWAY_WAITING_MAX
            if not is_full:
                messages.append((topic, message))
        if is_full:
            size_bytes = len(message.data)
            self._drop(
                BufferFullError(
                    f"{ONEWAY_WAITING_MAX:,} one-way messages wait for the client",
                    size_bytes=size_bytes,
                    message_count=1,
                )
            )
        if self._announced is not messages:
            try:
                self._loop.call_soon_threadsafe(self._take)
            except RuntimeError:
                with self._lock:
                    self._messages.clear()
                raise ClosedError("the client is closed") from None
            # Not before: an interrupt in that call would stop all messages.
            self._announced = messages

    def _take(self) -> None:
        with self._lock:
            messages, self._messages = self._messages, deque()
        for topic, message in messages:
            try:
                self._send(topic, message)
            except Exception as error:  # noqa: BLE001  # logged and counted
                # As in `_run_topic`: the caller has gone on, so it is logged.
                _log.exception("one-way message dropped: topic=%s", topic)
                self._drop(error)
        messages.clear()  # `_announced` still has them
