"""Messages of a queue group, and how both worlds settle them."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Generic, NoReturn, TypeVar

from metaq.client.names import require_text
from metaq.client.options import check_delay, check_lease
from metaq.client.queue.prefetch import HeldMessage
from metaq.client.queue.queue_life import QueueLife
from metaq.client.queue.settling import Settling
from metaq.client.timeouts import require_loop, within
from metaq.client.validation import check_timeout
from metaq.model import Message
from metaq.protocol.queue_frames import GROUP_DELAY, SettleVerb

S = TypeVar("S")
F = TypeVar("F", asyncio.Future[None], Future[None])


class DeliveredMessage(Message, Generic[S, F]):
    """A message with its delivery: it is settled once, and by its worker.

    Settles return when the broker has them on disk; one that is not answered is sent
    again until the lease is over. All of them raise

    * `AlreadySettledError`: it was settled before;
    * `LeaseLostError`: another delivery has it;
    * `OutcomeUnknownError`: the broker did not answer until the lease was over;
    * `ClosedError`: after the block of its queue;
    * `RequestTimeoutError`: `timeout` is over; the settle goes on.
    """

    held: HeldMessage
    queue: QueueLife

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self.held}: a message of a queue group is settled by the worker that has"
            " it: give another process its data, and settle it here; no copy is made"
        )

    @property
    def deliveries(self) -> int:
        """Times that it was delivered, this one included; releases do not count."""
        return self.held.deliveries

    @property
    def lease_until(self) -> float:
        """End of its lease, as `time.monotonic` counts; later with each renewal."""
        return self.held.lease_end_s

    def ack(self, timeout: float | None = None) -> S:
        """Say that it is done: it is never delivered again.

        Args:
            timeout: seconds to wait for the answer; None: until the lease is over.
        """
        return self._settle(SettleVerb.ACK, timeout)

    def ack_nowait(self) -> F:
        """Begin an `ack`; the future has its outcome, and need not be waited for.

        It leaves within 20 ms, with others, or with the first that is waited for. An
        error is logged, as it is not known whether the future is looked at.
        """
        return self._say(SettleVerb.ACK, is_awaited=False)

    def nack(self, delay: float | None = None, timeout: float | None = None) -> S:
        """Have it delivered again, to any worker; this delivery counts.

        Args:
            delay: seconds until then, at most 24 h; None: as the group has it.
            timeout: as for `ack`.
        """
        delay_ms = GROUP_DELAY
        if delay is not None:
            check_delay("delay", delay)
            delay_ms = int(delay * 1000)
        return self._settle(SettleVerb.NACK, timeout, delay_ms)

    def release(self, timeout: float | None = None) -> S:
        """Have it delivered again at once: it was not begun, and this does not count.

        Args:
            timeout: as for `ack`.
        """
        return self._settle(SettleVerb.RELEASE, timeout)

    def extend(self, seconds: float, timeout: float | None = None) -> S:
        """Let its lease end so many seconds from now; it is not settled by that.

        Args:
            seconds: 1 s to 12 h.
            timeout: as for `ack`.
        """
        check_lease("seconds", seconds)
        return self._settle(SettleVerb.EXTEND, timeout, int(seconds * 1000))

    def reject(self, reason: str, timeout: float | None = None) -> S:
        """Give it up: it becomes a dead letter, or nothing, as the group says.

        Args:
            reason: text for the dead letter; cut after 1 KiB.
            timeout: as for `ack`.
        """
        require_text("reason", reason)
        return self._settle(SettleVerb.REJECT, timeout, text=reason)

    def _say(
        self,
        verb: SettleVerb,
        argument: int = 0,
        text: str = "",
        *,
        is_awaited: bool = True,
    ) -> F:
        future = self._make_future()
        entry = Settling(self.held, verb, argument, text, future, is_awaited)
        self.queue.settle([entry])
        return future

    def _make_future(self) -> F:
        raise NotImplementedError

    def _settle(
        self, verb: SettleVerb, timeout: float | None, argument: int = 0, text: str = ""
    ) -> S:
        raise NotImplementedError


class AsyncQueueMessage(
    DeliveredMessage[Coroutine[Any, Any, None], asyncio.Future[None]]
):
    """A message of a queue group; its settles are awaited."""

    def _make_future(self) -> asyncio.Future[None]:
        require_loop(self.queue.loop, self.held)
        return self.queue.loop.create_future()

    async def _settle(
        self, verb: SettleVerb, timeout: float | None, argument: int = 0, text: str = ""
    ) -> None:
        check_timeout(timeout)
        future = self._say(verb, argument, text)
        what = f"{self.held}: {verb.name.lower()}"
        await within(timeout, asyncio.shield(future), what)
