"""A worker of a queue group: messages are taken, handed out, and settled one by one.

    broker --take--> prefetch --> loop, receive or run --> ack, nack, release, reject
       ^               |                |                        |
       |             extend           extend                     v
       +---------------+----------------+------ settles, one request per partition

`AsyncQueue` is the async world's object and the core of the sync one. The messages of
each broker, and what is said about them, are in `broker_link.py`.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

from metaq.client.consume.decode import MAKE
from metaq.client.consume.handler_tasks import (
    AsyncHandler,
    HandlerTasks,
    failure_of,
)
from metaq.client.errors import AlreadySettledError
from metaq.client.options import check_callable
from metaq.client.queue.prefetch import HeldMessage
from metaq.client.queue.queue_life import QueueLife, handled
from metaq.client.queue.queue_messages import AsyncQueueMessage, DeliveredMessage
from metaq.client.queue.settling import SettledTogether, Settling
from metaq.client.timeouts import require_loop, within
from metaq.client.validation import check_timeout, check_whole, wrong_type
from metaq.errors import ClosedError
from metaq.protocol.queue_frames import SettleVerb


class AsyncQueue(QueueLife):
    """A worker of a queue group; any number of them share the messages of a topic.

    Made by `AsyncClient.queue`; used as `async with`. Any number of tasks may read and
    settle at once.

    Delivery: at least once. A message is this worker's until it is settled or its lease
    is over; leases are renewed as long as the messages are here, up to `handle_s_max`.
    A message that contradicts its checksum is not handed out: it is given back with the
    delay of the group, and logged.

    The end of the block releases what was not handed out, returns with the delay of the
    group what was and is not settled, and waits for settles that are on their way.

    Cancellation: cancelling any `await` loses no message.
    """

    # -- messages ---------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[AsyncQueueMessage]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[AsyncQueueMessage]:
        self.require_started()
        require_loop(self.loop, self)
        while True:
            try:
                held = await self.prefetch.take_async()
            except ClosedError:
                return
            yield self.message(held)
            if self.prefetch.has_ready:
                # Taking runs on this loop too, and a full prefetch never waits.
                await asyncio.sleep(0)

    def message(self, held: HeldMessage) -> AsyncQueueMessage:
        """Return a message as it is handed out."""
        message = MAKE(AsyncQueueMessage, held.row)
        message.held, message.queue = held, self
        return message

    async def receive(self, timeout: float | None = None) -> AsyncQueueMessage | None:
        """Return the next message; None when none came in time.

        Args:
            timeout: seconds; None waits for ever.

        Raises:
            MetaqError: a broker refuses for good; `ClosedError` after `close`.
        """
        many = await self.receive_many(1, timeout)
        return many[0] if many else None

    async def receive_many(
        self, count_max: int, timeout: float | None = None
    ) -> list[AsyncQueueMessage]:
        """Return messages that are here; it waits for the first one alone.

        Args:
            count_max: most messages, 1 or more; there are never more than `prefetch`
                of a broker.
            timeout: seconds; None waits for ever.

        Returns:
            1 to `count_max` messages; none when the time is over.

        Raises:
            ConfigError: `count_max` is below 1.
            MetaqError: as `receive`.
        """
        self.require_started()
        require_loop(self.loop, self)
        check_whole("count_max", count_max, 1)
        check_timeout(timeout)
        try:
            async with asyncio.timeout(timeout):
                first = await self.prefetch.take_async()
        except TimeoutError:
            return []
        return [
            self.message(one) for one in self.prefetch.with_others(first, count_max)
        ]

    async def run(
        self,
        handler: AsyncHandler[AsyncQueueMessage],
        *,
        concurrency: int = 1,
        timeout: float | None = None,
    ) -> None:
        """Call the handler for every message, until `close` or the end of the time.

        When it returns the message is acked, unless the handler has settled it. When it
        raises the message is returned with the delay of the group; `Reject` gives it up
        with the exception's text as reason.

        Args:
            handler: handles one message.
            concurrency: how many messages are handled at once, 1 or more; so many are
                taken, also where `prefetch` is less.
            timeout: seconds until no more messages are begun. Running handlers have
                `close_timeout_s` to end, then they are cancelled and their messages
                returned. None: until another task calls `close`.

        Raises:
            ConfigError: the handler is a plain function; its message comes again.
            MetaqError: a broker refuses for good, or it is not started.

        Cancellation: the handlers are cancelled, and their messages returned.
        """
        require_loop(self.loop, self)
        check_callable("handler", handler)
        check_timeout(timeout)
        at_work = self.begin_run(concurrency)
        tasks = HandlerTasks(self.group)

        async def work() -> None:
            while not tasks.is_ending:
                try:
                    with tasks.idle():
                        held = await self.prefetch.take_async()
                except ClosedError:
                    return
                at_work.add(held)
                handled.set(held)
                try:
                    error = await failure_of(handler, self.message(held))
                except BaseException:
                    self.say(held, SettleVerb.NACK)
                    raise
                else:
                    self.conclude(held, error)
                finally:
                    self.end_work(at_work, held)
                if self.prefetch.has_ready:
                    # Let other tasks run if the handler never waits.
                    await asyncio.sleep(0)

        grace_s = self._context.options.close_timeout_s
        try:
            await tasks.run(work, concurrency, timeout_s=timeout, grace_s=grace_s)
        finally:
            self.end_run(at_work)

    async def ack_many(
        self,
        messages: Iterable[DeliveredMessage[Any, Any]],
        timeout: float | None = None,
    ) -> None:
        """Ack messages together: one request and one sync for each partition.

        Args:
            messages: of this queue, none of them settled.
            timeout: seconds to wait for the answers; None: until the leases are over.

        Raises:
            AlreadySettledError: one is settled, or of another queue; none is acked.
            LeaseLostError: others have some of them; the rest is done.
            OutcomeUnknownError, RequestTimeoutError, ClosedError: as `ack`.
        """
        check_timeout(timeout)
        require_loop(self.loop, self)
        helds = dict[HeldMessage, None]()
        for one in messages:
            if not isinstance(one, DeliveredMessage):
                raise wrong_type("messages", "messages of a queue", one)
            if one.queue is not self:
                raise AlreadySettledError(
                    f"{one.held}: it is of another queue object: {one.queue!r}"
                )
            helds[one.held] = None
        if not helds:
            return
        together = SettledTogether(len(helds))
        self.settle([Settling(held, SettleVerb.ACK, future=together) for held in helds])
        what = f"{self}: ack of {len(helds)} messages"
        await within(timeout, together.future, what)
        if errors := together.errors:
            raise type(errors[0])(
                f"{errors[0]} (the first of {len(errors)} that are not acked, of"
                f" {len(helds)})"
            )
