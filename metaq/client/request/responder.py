"""A responder: a worker of a queue group that replies with its handler's results.

    queue --message--> handler --bytes or exception--> mailbox of the requester
                                                  `--> ack

The reply is sent first, then the message is acked. After a crash in between, the
request is handled again, and its second reply is dropped. A reply that cannot be
delivered before the request expires is given up, and logged.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from metaq.client.cluster.context import ClientContext
from metaq.client.cluster.metadata_queries import insist
from metaq.client.consume.redelivery import FailureLog
from metaq.client.options import check_callable, names_calls
from metaq.client.produce.runs import frozen
from metaq.client.queue.queue_messages import AsyncQueueMessage
from metaq.client.queue.work_queue import AsyncQueue
from metaq.client.timeouts import ClosedByBlock
from metaq.errors import MetaqError, NotFoundError
from metaq.model import Message
from metaq.peer.replies import require_ok
from metaq.protocol.commands import Answer
from metaq.record.expiry import expiry_of
from metaq.record.reply_to import (
    ReplyAddress,
    encode_error,
    encode_reply,
    reply_address,
)

_log = logging.getLogger(__name__)

REPLY_BYTES_MAX: Final = (1 << 20) - 1
"""Maximum bytes of a reply; in a mailbox, one more byte has its kind."""
ERROR_CHARS_MAX: Final = 1024
"""Maximum characters of an exception's text in an error reply."""
ANSWER_S_MIN: Final = 1.0
"""Minimum seconds for sending a reply, even to an expired request: clocks differ, and
its requester may still wait."""


@names_calls
class AsyncResponder(ClosedByBlock):
    """Answers requests of a topic, sharing them with the responders of its group.

    Created by `AsyncClient.responder`. Requests are delivered at least once; a reply
    arrives at most once.
    """

    def __init__(self, context: ClientContext, queue: AsyncQueue) -> None:
        """Own a worker; use `AsyncClient.responder` to create a responder."""
        self._context = context
        self.queue = queue
        self._failures = FailureLog(_log)

    async def run(
        self,
        handler: Callable[[AsyncQueueMessage], Awaitable[bytes]],
        *,
        concurrency: int = 1,
        timeout: float | None = None,
    ) -> None:
        """Call the handler for every request, until `close` or the time-out.

        The bytes that it returns are the reply; an exception becomes an `ErrorReply`
        with its text at the requester. Messages that ask for no reply are handled, too.

        Args:
            handler: handles one request.
            concurrency: number of requests handled at once, 1 or more.
            timeout: seconds until no more handlers are started; None runs until another
                task calls `close`.

        Raises:
            ConfigError: the handler is a plain function; its request is delivered
                again.
            MetaqError: as the start of a queue, and its `run`.

        Cancellation: the handlers are cancelled, and their requests returned.
        """

        async def answer(message: AsyncQueueMessage, result: Awaitable[bytes]) -> None:
            data, error = None, None
            try:
                data = await result
            except Exception as failure:  # noqa: BLE001  # the requester gets it
                error = failure
            await self.conclude(message, data, error)

        def handle(message: AsyncQueueMessage) -> Awaitable[Any]:
            try:
                result = handler(message)
            except Exception as failure:  # noqa: BLE001  # see above
                return self.conclude(message, None, failure)
            # A result that is not awaitable is that of a plain function, which the
            # queue refuses.
            return answer(message, result) if hasattr(result, "__await__") else result

        check_callable("handler", handler)
        async with self.queue:
            await self.queue.run(handle, concurrency=concurrency, timeout=timeout)

    async def conclude(
        self, message: Message, data: Any, error: Exception | None
    ) -> None:
        """Send the result or error of a handler, if the message asks for a reply.

        Args:
            message: the request.
            data: the returned value; an error reply is sent if it is not bytes-like.
            error: the exception; None if the handler returned.
        """
        if error is None:
            try:
                data = frozen(data)
            except TypeError:
                got = f"{type(data).__name__} {data!r:.80}"
                error = TypeError(f"reply: expected bytes, got {got}")
        if error is None and len(data) > REPLY_BYTES_MAX:
            error = ValueError(
                f"reply: expected at most {REPLY_BYTES_MAX} bytes, got {len(data)}"
            )
        if error is not None:
            text = _text_of(error)
            where = f"group={self.queue.group} {message.partition}"
            self._failures.write(
                f"request failed: {where}: {text}", error, is_last=False
            )
            payload = encode_error(text[:ERROR_CHARS_MAX])
        else:
            payload = encode_reply(data)
        address = reply_address(message.header_pairs)
        if address is not None:
            await self._answer(message, address, payload)

    async def _answer(
        self, message: Message, address: ReplyAddress, payload: bytes
    ) -> None:
        """Send a reply to its mailbox; retry until the request expires."""
        context = self._context

        async def send(*, deadline_s: float) -> None:
            connection = await context.connect_leader(address.broker_id, deadline_s)
            opaque = connection.next_opaque()
            command = Answer(address.mailbox, address.correlation, payload, opaque)
            require_ok(await connection.call(command, deadline_s=deadline_s))

        deadline_s = context.deadline_s()
        expiry_ms = expiry_of(message.id, message.header_pairs)
        if expiry_ms is not None:
            left_s = (expiry_ms - context.clock.wall_ms()) / 1000
            now_s = context.clock.monotonic_s()
            deadline_s = min(deadline_s, now_s + max(ANSWER_S_MIN, left_s))
        try:
            await insist(context, send, deadline_s)
        except NotFoundError:
            _log.debug("requester has left: mailbox=%s", address.mailbox)
        except MetaqError as error:
            _log.warning(
                "reply was not delivered: group=%s request=%s@%d broker=%d error=%s",
                self.queue.group,
                message.partition,
                message.offset,
                address.broker_id,
                error,
            )

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called, or `run` has ended."""
        return self.queue.is_closed

    async def close(self, timeout: float | None = None) -> None:
        """Stop handling requests; see `AsyncQueue.close`."""
        await self.queue.close(timeout)


def _text_of(error: Exception) -> str:
    kind = type(error).__name__
    try:
        return f"{kind}: {error}"
    except Exception:  # noqa: BLE001  # `str` of a user's exception may raise
        return kind
