"""A worker of a queue group: takes messages, hands them out, settles them one by one.

    broker --take--> prefetch --> loop, receive or run --> ack, nack, release, reject
       ^               |                |                        |
       |             extend           extend                     v
       +---------------+----------------+------ settles, one request per partition

`AsyncQueue` is the object of the async client, and the core of the sync one. Takes,
renewals and settles of each broker are in `broker_link.py`.
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
from metaq.client.options import check_callable, names_calls
from metaq.client.queue.prefetch import HeldMessage
from metaq.client.queue.queue_life import QueueLife, handled
from metaq.client.queue.queue_messages import AsyncQueueMessage, DeliveredMessage
from metaq.client.queue.settling import SettledTogether, Settling
from metaq.client.timeouts import require_loop, within
from metaq.client.validation import check_timeout, check_whole, wrong_type
from metaq.errors import ClosedError
from metaq.protocol.queue_frames import SettleVerb


@names_calls
class AsyncQueue(QueueLife):
    """A worker of a queue group; any number of workers share the messages of a topic.

    Created by `AsyncClient.queue`; used as `async with`. Any number of tasks may read
    and settle at once.

    Delivery: at least once. A worker has a message until it is settled or its lease
    ends; leases of held messages are renewed for up to `handle_s_max`. A message that
    contradicts its checksum is not handed out: it is returned with the delay of the
    group, and logged.

    The end of the block releases messages that were not handed out, returns unsettled
    ones with the delay of the group, and waits for settles in progress.

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
                # With a full prefetch this never waits, and takes need the loop too.
                await asyncio.sleep(0)

    def message(self, held: HeldMessage) -> AsyncQueueMessage:
        """Return a held message as the object handed out to users."""
        message = MAKE(AsyncQueueMessage, held.row)
        message.held, message.queue = held, self
        return message

    async def receive(self, timeout: float | None = None) -> AsyncQueueMessage | None:
        """Return the next message; None on a time-out.

        Args:
            timeout: seconds; None waits without a limit.

        Raises:
            MetaqError: a broker refuses for good; `ClosedError` after `close`.
        """
        many = await self.receive_many(1, timeout)
        return many[0] if many else None

    async def receive_many(
        self, count_max: int, timeout: float | None = None
    ) -> list[AsyncQueueMessage]:
        """Wait for a message; return it and others already prefetched.

        Args:
            count_max: maximum number of messages, 1 or more; `prefetch` limits those of
                each broker.
            timeout: seconds; None waits without a limit.

        Returns:
            1 to `count_max` messages; [] on a time-out.

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
        """Call the handler for every message, until `close` or the time-out.

        When it returns, the message is acked, unless the handler has settled it. If it
        raises, the message is returned with the delay of the group; `Reject` rejects it
        with the exception's text as the reason.

        Args:
            handler: handles one message.
            concurrency: number of messages handled at once, 1 or more; raises
                `prefetch` if that is less.
            timeout: seconds until no more handlers are started. Running ones then have
                `close_timeout_s` to end, before they are cancelled and their messages
                returned. None runs until another task calls `close`.

        Raises:
            ConfigError: the handler is a plain function; its message is delivered
                again.
            MetaqError: a broker refuses for good, or the queue is not started.

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
            messages: unsettled messages of this queue.
            timeout: seconds to wait for the answers; None waits until shortly after the
                end of the leases.

        Raises:
            AlreadySettledError: one is settled, or of another queue; none is acked.
            LeaseLostError: other deliveries have some; the rest is acked.
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
