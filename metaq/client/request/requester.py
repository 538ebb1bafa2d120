"""Requests of one client, and the mailbox in which their replies arrive.

    request --> topic --> responder --answer--> mailbox --listen--> request returns

Theory of operation. One task opens a mailbox at a broker and keeps a `listen` there.
Requests are sent only while it is open. Their headers name the mailbox, and a number
unique among the requests of this client. After a lost connection, the mailbox is opened
again, preferably at the same broker, which still delivers the replies that it holds. At
another broker, requests sent before end without a reply.
"""

import asyncio
import logging
from dataclasses import dataclass
from itertools import count
from typing import Final

from metaq.client.cluster.context import ClientContext
from metaq.client.cluster.metadata_queries import BACKOFF
from metaq.client.cluster.presence import refuse_exchanges
from metaq.client.consume.fetcher import GET_SLACK_S
from metaq.client.errors import ErrorReply, NoMailboxError, ReplyTimeoutError
from metaq.client.names import check_topic
from metaq.client.options import ProducerOptions
from metaq.client.produce.runs import frozen
from metaq.client.produce.scheduling import with_expiry
from metaq.client.timeouts import spawn
from metaq.client.validation import check_seconds
from metaq.errors import (
    ClosedError,
    CorruptRecordError,
    MetaqError,
    NoBrokerError,
    RequestTimeoutError,
    UnexpectedReplyError,
)
from metaq.model import BrokerId
from metaq.peer.connection import BrokerConnection
from metaq.peer.replies import require_ok
from metaq.protocol.commands import Listen, Value
from metaq.record.flags import Headers, encode_payload, list_headers
from metaq.record.reply_to import ReplyAddress, decode_reply
from metaq.record.runs import decode_runs
from metaq.retry import wait_set
from metaq.stats import counter

_log = logging.getLogger(__name__)

LISTEN_TURNS: Final = 5
"""Iterations of the loop between a reply and the next `listen`: a request that follows
at once is sent first, and the broker handles the `listen` during its sync."""
WAIT_S: Final = 10.0
"""Maximum seconds that a broker waits for replies, unless it announces less."""

CLOSED: Final = "the client is closed"


@dataclass(slots=True)
class RequestStatistics:
    """Counters of the requests of a client. Snapshots are copies."""

    sent_count: int = counter("metaq_requests_total", "Requests, sent or refused.")
    answered_count: int = counter(
        "metaq_requests_answered_total", "Requests that got a reply, good or bad."
    )
    timed_out_count: int = counter(
        "metaq_requests_timed_out_total", "Requests without a reply in their time."
    )
    late_count: int = counter(
        "metaq_replies_late_total", "Replies whose request had ended."
    )


class Requester:
    """The requests of one client. Owner: the client; on its loop."""

    def __init__(self, context: ClientContext, counts: RequestStatistics) -> None:
        """Start without requests; the first one opens the mailbox."""
        self._context = context
        self._counts = counts
        self._producer = context.make_producer(ProducerOptions(), None)
        self._mailbox = context.draw_token()
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._broker_id: BrokerId | None = None
        """Broker of the mailbox, or of the former one."""
        self._silent_id: BrokerId | None = None
        """Broker that did not answer, and is tried last."""
        self._is_open = asyncio.Event()
        self._error: MetaqError = NoBrokerError("no broker is present")
        """Reason why the mailbox is not open."""
        self._task: asyncio.Task[None] | None = None
        self.is_closed = False

    async def request(
        self,
        topic: str,
        data: bytes,
        *,
        key: str | bytes | None,
        headers: Headers,
        timeout: float | None,
    ) -> bytes:
        """Send one request and return its reply; see `AsyncClient.request`."""
        limit_s, clock = self._context.limit_s(timeout), self._context.clock
        check_topic(topic)
        check_seconds("timeout", limit_s, may_be_zero=False)
        encode_payload(frozen(data), None, key, headers)  # raises for bad arguments
        deadline_s = clock.monotonic_s() + limit_s
        await self._open(limit_s)
        metadata = self._context.metadata
        snapshot = await metadata.topic(topic, deadline_s=deadline_s, takes_puts=True)
        # Through an exchange, responders of several topics might all handle it.
        refuse_exchanges(snapshot, [topic])
        assert self._broker_id is not None, "it is open"
        number = next(self._numbers)
        address = ReplyAddress(self._broker_id, self._mailbox, number)
        reply = self._waiting[number] = asyncio.get_running_loop().create_future()
        own = list_headers(headers) if headers else ()
        self._counts.sent_count += 1
        try:
            await self._producer.send(
                topic,
                data,
                key=key,
                headers=with_expiry((*own, *address.headers()), limit_s),
                timeout=max(0.0, deadline_s - clock.monotonic_s()),
            )
            async with asyncio.timeout(max(0.0, deadline_s - clock.monotonic_s())):
                return _data_of(await reply, topic)
        except TimeoutError as error:
            self._counts.timed_out_count += 1
            raise ReplyTimeoutError(
                f"request to topic '{topic}': no reply within {limit_s:g} s; it may"
                " have been handled"
            ) from error
        finally:
            del self._waiting[number]

    async def close(self, timeout: float | None = None) -> None:
        """Fail waiting requests with `ClosedError`; idempotent."""
        self.is_closed = True
        if self._task is not None:
            self._task.cancel()
        self._is_open.set()  # wakes requests that wait for it
        self._fail(ClosedError(CLOSED))
        await self._producer.close(timeout)

    def _fail(self, error: MetaqError) -> None:
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(error)
                reply.exception()  # mark as retrieved: may never be awaited

    # -- the mailbox ------------------------------------------------------------------

    async def _open(self, limit_s: float) -> None:
        """Wait until the mailbox is open.

        Raises:
            ClosedError: the client is closed.
            MetaqError: the reason why it is not; nothing was sent.
        """
        deadline_s = await self._context.reach(limit_s)
        if self._task is None and not self.is_closed:
            self._task = spawn(self._run(), "mailbox", self._fail)
        left_s = deadline_s - self._context.clock.monotonic_s()
        is_open = await wait_set(self._is_open, max(0.0, left_s))
        if self.is_closed:
            raise ClosedError(CLOSED)
        if not is_open:
            raise self._error

    async def _run(self) -> None:
        failures = 0
        while True:
            try:
                connection = await self._connect()
                self._error = NoBrokerError(
                    f"mailbox at {connection.address}: the broker does not answer"
                )
                await self._listen(connection, 0.0)
                failures, self._silent_id = 0, None
                self._is_open.set()
                announced_s = connection.capabilities.wait_ms_max / 1000
                while True:
                    await self._listen(connection, min(WAIT_S, announced_s))
                    for _ in range(LISTEN_TURNS):
                        await asyncio.sleep(0)
            except MetaqError as error:
                self._is_open.clear()
                self._error = error
                if isinstance(error, RequestTimeoutError):
                    self._silent_id = self._broker_id
                self._context.metadata.request_refresh()
                failures += 1
                _log.debug("mailbox is opened again: error=%s", error)
            await asyncio.sleep(BACKOFF.delay_s(failures))

    async def _connect(self) -> BrokerConnection:
        """Return a connection to the broker of the mailbox, or to another one."""
        context, lacking = self._context, list[BrokerId]()
        await context.reach()
        leaders = context.metadata.snapshot.brokers
        ids = sorted(one for one, copies in leaders.items() if copies.leader)
        start = int(self._mailbox[:8], 16) % max(1, len(ids))
        ids = ids[start:] + ids[:start]
        ids.sort(key=lambda one: (one == self._silent_id, one != self._broker_id))
        error: MetaqError = NoBrokerError(f"{context.place}: no broker is present")
        for broker_id in ids:
            try:
                connection = await context.connect_leader(
                    broker_id, context.deadline_s()
                )
            except NoBrokerError as failure:
                error = failure
                continue
            if connection.capabilities.mailbox:
                self._broker_id = broker_id
                return connection
            lacking.append(broker_id)
        if lacking:
            names = ", ".join(map(str, lacking))
            error = NoMailboxError(
                f"broker {names}: it has no mailboxes for replies: it is of an older"
                " version, or of MetaQ 1.4"
            )
        raise error

    async def _listen(self, connection: BrokerConnection, wait_s: float) -> None:
        """Send one `listen`, and pass each reply to its request."""
        command = Listen(
            self._mailbox, connection.next_opaque(), wait_ms=int(wait_s * 1000)
        )
        deadline_s = self._context.clock.monotonic_s() + wait_s + GET_SLACK_S
        reply = await connection.call(command, deadline_s=deadline_s)
        if not isinstance(reply, Value):
            require_ok(reply)
            raise UnexpectedReplyError("listen: expected a value, got a result")
        try:
            for number, payload in decode_runs(reply.payload):
                future = self._waiting.get(number)
                if future is None:
                    self._counts.late_count += 1
                elif not future.done():
                    self._counts.answered_count += 1
                    future.set_result(payload)
        except CorruptRecordError as error:
            raise UnexpectedReplyError(f"listen: {error}") from error


def _data_of(payload: bytes, topic: str) -> bytes:
    data, text = decode_reply(payload)
    if text is not None:
        raise ErrorReply(f"request to topic '{topic}': {text}", text=text)
    return data
