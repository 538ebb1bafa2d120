"""Messages of a queue group, with the settle methods of the async and sync clients."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Generic, NoReturn, TypeVar

from metaq.client.names import require_text
from metaq.client.options import check_delay, check_lease, names_calls
from metaq.client.queue.prefetch import HeldMessage
from metaq.client.queue.queue_life import QueueLife
from metaq.client.queue.settling import Settling
from metaq.client.timeouts import require_loop, within
from metaq.client.validation import check_timeout
from metaq.model import Message
from metaq.protocol.queue_frames import GROUP_DELAY, SettleVerb

S = TypeVar("S")
F = TypeVar("F", asyncio.Future[None], Future[None])


@names_calls
class DeliveredMessage(Message, Generic[S, F]):
    """A delivered message; it is settled once, by the worker that has it.

    A settle returns when the broker has it on disk. Without an answer it is sent again,
    until shortly after the end of the lease. All settles raise

    * `AlreadySettledError`: it was settled before;
    * `LeaseLostError`: another delivery has it;
    * `OutcomeUnknownError`: it was sent, and the broker did not answer by then;
    * `ClosedError`: its queue is closed;
    * `RequestTimeoutError`: `timeout` has passed; the settle is still being sent.
    """

    held: HeldMessage
    queue: QueueLife

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self.held}: a message of a queue group cannot be copied, because only"
            " the worker that has it can settle it: pass its data to the other"
            " process, and settle it here"
        )

    @property
    def deliveries(self) -> int:
        """Number of deliveries, this one included; released ones do not count."""
        return self.held.deliveries

    @property
    def lease_until(self) -> float:
        """End of its lease, in `time.monotonic` seconds; moved by each renewal."""
        return self.held.lease_end_s

    def ack(self, timeout: float | None = None) -> S:
        """Acknowledge the message: it is never delivered again.

        Args:
            timeout: seconds to wait for the answer; None waits until shortly after the
                end of the lease.
        """
        return self._settle(SettleVerb.ACK, timeout)

    def ack_nowait(self) -> F:
        """Begin an `ack`; the future has its outcome, and need not be awaited.

        It is sent within 20 ms, with others, or at once with one that a caller awaits.
        Errors are also logged, because the future may never be read.
        """
        return self._say(SettleVerb.ACK, is_awaited=False)

    def nack(self, delay: float | None = None, timeout: float | None = None) -> S:
        """Return the message for another delivery, to any worker; this one counts.

        Args:
            delay: seconds until then, at most 24 h; None is the group's delay.
            timeout: as for `ack`.
        """
        delay_ms = GROUP_DELAY
        if delay is not None:
            check_delay("delay", delay)
            delay_ms = int(delay * 1000)
        return self._settle(SettleVerb.NACK, timeout, delay_ms)

    def release(self, timeout: float | None = None) -> S:
        """Return an unhandled message for delivery at once; this one is not counted.

        Args:
            timeout: as for `ack`.
        """
        return self._settle(SettleVerb.RELEASE, timeout)

    def extend(self, seconds: float, timeout: float | None = None) -> S:
        """Set the end of the lease to `seconds` from now; does not settle the message.

        Args:
            seconds: 1 s to 12 h.
            timeout: as for `ack`.
        """
        check_lease("seconds", seconds)
        return self._settle(SettleVerb.EXTEND, timeout, int(seconds * 1000))

    def reject(self, reason: str, timeout: float | None = None) -> S:
        """Reject the message: it is dead-lettered or dropped, as the group defines.

        Args:
            reason: text for the dead letter; truncated to 1 KiB.
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


@names_calls
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
