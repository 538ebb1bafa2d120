"""An exchange: a message goes to each topic whose binding matches, once.

    async with client.exchange("events") as events:
        await events.send("order.paid.eu", b"...", key="order-7")

It uses a producer that sends only to the exchange. The routing key is a header of the
message, and the broker finds the topics by it. If a message of a batch matches no
binding, the other messages of that batch are sent again without it.
"""

import datetime as dt
from functools import lru_cache
from typing import Final, TypedDict, Unpack

from metaq.client.names import require_text
from metaq.client.options import names_arguments
from metaq.client.produce.batches import SendFuture, SendResult
from metaq.client.produce.producer import AsyncProducer
from metaq.client.produce.producer_counters import ProducerStatistics
from metaq.client.produce.scheduling import Span
from metaq.client.timeouts import ClosedByBlock
from metaq.record.checksum import BytesLike
from metaq.record.flags import Headers, list_headers
from metaq.routing.match import ROUTING_KEY

KEYS_REMEMBERED_MAX: Final = 1024
"""Size of the cache of encoded routing keys."""


class SendKeywords(TypedDict, total=False):
    """Options of one message."""

    key: str | bytes | None
    tag: str | None
    delay: Span | None
    deliver_at: dt.datetime | None
    expires_in: Span | None


class AsyncExchange(ClosedByBlock):
    """Sends messages to one exchange. Owner: the client; `async with` closes it."""

    def __init__(self, producer: AsyncProducer, name: str) -> None:
        """Own a producer; use `AsyncClient.exchange` to create an exchange."""
        self.producer = producer
        self.name = name

    async def send_nowait(
        self,
        routing_key: str,
        data: BytesLike,
        *,
        headers: Headers = (),
        timeout: float | None = None,
        **options: Unpack[SendKeywords],
    ) -> SendFuture:
        """Begin to send one message; waits for memory only.

        Arguments: see `AsyncExchange.send`.

        Returns:
            Its outcome, by its deadline in every case.

        Raises:
            As `send`, but for the outcome.
        """
        headers = routed(routing_key, headers)
        return await self.producer.send_nowait(
            self.name, data, headers=headers, timeout=timeout, **options
        )

    @names_arguments
    async def send(
        self,
        routing_key: str,
        data: BytesLike,
        *,
        key: str | bytes | None = None,
        headers: Headers = (),
        tag: str | None = None,
        timeout: float | None = None,
        delay: Span | None = None,
        deliver_at: dt.datetime | None = None,
        expires_in: Span | None = None,
    ) -> SendResult:
        """Send one message, and wait until all topics that it goes to have it on disk.

        Args:
            routing_key: words with dots between them, or any text; "" is one.
            data: application bytes; mutable ones are copied.
            key: stored; the same key goes to the same partition of each topic.
            headers: names and bytes, stored after the routing key.
            tag: as in `AsyncProducer.send`.
            timeout: seconds, all retries included; None is `timeout_s` of the options.
            delay: as in `AsyncProducer.send`, to the topics that are bound now.
            deliver_at: likewise.
            expires_in: as in `AsyncProducer.send`.

        Returns:
            Its id, and the partition of the exchange; the offset is -1.

        Raises:
            UnroutableError: it is not stored: no binding matches, and it is mandatory.
            NoExchangesError: not sent: the broker is an older one.
            ExchangeError: not sent: there is no such exchange within the time.
            As `AsyncProducer.send`.

        Cancellation: a message that was appended is still sent.
        """
        sent = await self.send_nowait(
            routing_key,
            data,
            key=key,
            headers=headers,
            tag=tag,
            timeout=timeout,
            delay=delay,
            deliver_at=deliver_at,
            expires_in=expires_in,
        )
        return await sent

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until every message sent before has an outcome, success or failure.

        Args:
            timeout: seconds; None waits until the messages' own deadlines.

        Raises:
            RequestTimeoutError: some have no outcome yet; they are still being sent.
            ClosedError: the exchange belongs to another event loop.
        """
        await self.producer.flush(timeout)

    async def close(self, timeout: float | None = None) -> None:
        """Refuse new messages, wait for the others; see `AsyncProducer.close`.

        Args:
            timeout: seconds for everything; None is the client's `close_timeout_s`.

        Raises:
            ClosedError: the exchange belongs to another event loop; it is not closed.

        Cancellation: everything without an outcome fails at once.
        """
        await self.producer.close(timeout)

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self.producer.is_closed

    def statistics(self) -> ProducerStatistics:
        """Return a snapshot of the counters."""
        return self.producer.statistics()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} '{self.name}' by {self.producer!r}>"


def routed(routing_key: str, headers: Headers) -> Headers:
    """Return headers with the routing key first, in place of any other routing key."""
    try:
        pair = _pair_of(routing_key)
    except (TypeError, AttributeError):
        require_text("routing_key", routing_key)
        raise
    if not headers:
        return (pair,)
    # A forwarded message still has the routing key of its arrival.
    return (pair, *(one for one in list_headers(headers) if one[0] != ROUTING_KEY))


@lru_cache(KEYS_REMEMBERED_MAX)
def _pair_of(routing_key: str) -> tuple[str, bytes]:
    return ROUTING_KEY, routing_key.encode(errors="surrogatepass")
