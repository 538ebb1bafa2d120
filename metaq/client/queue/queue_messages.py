"""Messages of a queue group: what both worlds have, and that of the async world."""

import asyncio
from collections.abc import Iterable

from metaq.client.errors import AlreadySettledError
from metaq.client.names import require_text
from metaq.client.options import check_delay, check_lease
from metaq.client.queue.prefetch import HeldMessage
from metaq.client.queue.queue_life import QueueLife
from metaq.client.queue.settling import Settling
from metaq.client.timeouts import within
from metaq.client.validation import check_timeout
from metaq.model import Message
from metaq.protocol.queue_frames import GROUP_DELAY, SettleVerb


class DeliveredMessage(Message):
    """A message with its delivery, of either world."""

    held: HeldMessage
    queue: QueueLife

    @property
    def deliveries(self) -> int:
        """Times that it was delivered, this one included; releases do not count."""
        return self.held.deliveries

    @property
    def lease_until(self) -> float:
        """End of its lease, as `time.monotonic` counts; later with each renewal."""
        return self.held.lease_end_s


class AsyncQueueMessage(DeliveredMessage):
    """A message of a queue group: it is settled once, and by its worker.

    A `Message` with its delivery. Settles return when the broker has them on disk;
    one that is not answered is sent again until the lease is over. All of them raise

    * `AlreadySettledError`: it was settled before;
    * `LeaseLostError`: another delivery has it;
    * `OutcomeUnknownError`: the broker did not answer until the lease was over;
    * `ClosedError`: after the block of its queue;
    * `RequestTimeoutError`: `timeout` is over; the settle goes on.
    """

    async def ack(self, timeout: float | None = None) -> None:
        """Say that it is done: it is never delivered again.

        Args:
            timeout: seconds to wait for the answer; None: until the lease is over.
        """
        await self._settle(SettleVerb.ACK, timeout)

    def ack_nowait(self) -> asyncio.Future[None]:
        """Begin an `ack`; the future has its outcome, and need not be awaited."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.queue.settle([Settling(self.held, SettleVerb.ACK, future=future)])
        return future

    async def nack(
        self, delay: float | None = None, timeout: float | None = None
    ) -> None:
        """Have it delivered again, to any worker; this delivery counts.

        Args:
            delay: seconds until then, at most 24 h; None: as the group has it.
            timeout: as for `ack`.
        """
        await self._settle(SettleVerb.NACK, timeout, delay_of(delay))

    async def release(self, timeout: float | None = None) -> None:
        """Have it delivered again at once: it was not begun, and this does not count.

        Args:
            timeout: as for `ack`.
        """
        await self._settle(SettleVerb.RELEASE, timeout)

    async def extend(self, seconds: float, timeout: float | None = None) -> None:
        """Let its lease end so many seconds from now; it is not settled by that.

        Args:
            seconds: 1 s to 12 h.
            timeout: as for `ack`.
        """
        check_lease("seconds", seconds)
        await self._settle(SettleVerb.EXTEND, timeout, int(seconds * 1000))

    async def reject(self, reason: str, timeout: float | None = None) -> None:
        """Give it up: it becomes a dead letter, or nothing, as the group says.

        Args:
            reason: text for the dead letter; cut after 1 KiB.
            timeout: as for `ack`.
        """
        require_text("reason", reason)
        await self._settle(SettleVerb.REJECT, timeout, text=reason)

    async def _settle(
        self, verb: SettleVerb, timeout: float | None, argument: int = 0, text: str = ""
    ) -> None:
        check_timeout(timeout)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue = self.queue
        queue.settle([Settling(self.held, verb, argument, text, future)])
        what = f"{self.held}: {verb.name.lower()}"
        await within(timeout, asyncio.shield(future), what)


def held_of(
    messages: Iterable[DeliveredMessage], queue: QueueLife
) -> list[HeldMessage]:
    """Return what a worker holds of messages.

    Raises:
        AlreadySettledError: one is of another queue object.
    """
    helds = list[HeldMessage]()
    for one in messages:
        if one.queue is not queue:
            raise AlreadySettledError(
                f"{one.held}: it is of another queue object: {one.queue!r}"
            )
        helds.append(one.held)
    return helds


def delay_of(delay: float | None) -> int:
    """Return a nack's argument for a delay in seconds; None: the group's.

    Raises:
        TypeError, ConfigError: not from 0 to 24 h.
    """
    if delay is None:
        return GROUP_DELAY
    check_delay("delay", delay)
    return int(delay * 1000)
