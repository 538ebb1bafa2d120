"""Getting one partition's messages, for as long as it is ours.

Theory of operation: a small state machine on the event loop, driven by callbacks; no
task and no future per get. At most one get is on its way per partition.

    step --room?--connection?--> get on its way --answer--> buffer.put --> step
      |no room: wait for on_room    |error, nothing there
      |no broker: pause             v
      +<------------------------- pause

With long poll the broker holds a get back until there is data, so a consumer that
has caught up asks a few times a minute. Without it (MetaQ 1.4) the pause after an
empty answer grows in steps, as MetaQ's clients do. An empty answer that comes sooner
than was asked for pauses too, whatever the broker is: nothing here can spin.

A broker that names damage is believed; one that cannot (MetaQ 1.4), and gives nothing
or refuses time and again, is searched for bytes behind (`cursor.search_gap`).

A leader that is gone leaves its partition readable on its followers: the first address
that the snapshot of the cluster has is asked, leader first.

Source: client spec 11.1 and 11.2, 14.5.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from metaq.client.cluster.context import ClientContext
from metaq.client.consume.cursor import PartitionCursor
from metaq.client.consume.fetch_handler import FetchHandler
from metaq.client.errors import NoProgressError
from metaq.client.options import ConsumerOptions
from metaq.errors import (
    ClientError,
    CorruptRecordError,
    MetaqError,
    NoBrokerError,
    RemoteProtocolError,
    ServerError,
)
from metaq.model import Offset, TopicPartition
from metaq.peer.connection import BrokerConnection
from metaq.peer.options import READ_BACKOFF
from metaq.peer.replies import NothingThere
from metaq.protocol.codec import encode
from metaq.protocol.commands import Reply
from metaq.stats import counter

log = logging.getLogger(__name__)

GET_SLACK_S: Final = 5.0
"""Least seconds that an answer may take on top of the wait that was asked for."""
CONNECT_NOTICE_S: Final = 2.0
"""No connection for so long is an error to tell of; it goes on being made."""
DOUBT_COUNT: Final = 4
"""Answers without data in a row, refusals among them, after which a broker that cannot
name damage is searched for bytes behind; and again after as many."""


@dataclass(frozen=True, slots=True)
class FetchStatistics:
    """Counters of one partition's gets."""

    get_count: int = counter("metaq_consumer_gets_total", "Gets sent.")
    empty_count: int = counter(
        "metaq_consumer_empty_gets_total", "Gets answered without data."
    )
    error_count: int = counter(
        "metaq_consumer_get_failures_total",
        "Gets refused, lost with their connection, or not answered in time.",
    )
    skipped_count: int = counter(
        "metaq_consumer_skipped_ranges_total", "Damaged places that were skipped."
    )
    received_bytes: int = counter(
        "metaq_consumer_received_bytes_total", "Bytes of the log received."
    )


class PartitionFetcher:
    """Gets of one partition. Owner: the consumer; on the loop's thread alone."""

    def __init__(
        self,
        cursor: PartitionCursor,
        *,
        group: str,
        handler: FetchHandler,
        context: ClientContext,
        options: ConsumerOptions,
    ) -> None:
        """Prepare; nothing is asked before `start`.

        Args:
            cursor: where to begin; owned from now on.
            group: consumer group, named in every get.
            handler: gets the messages.
            context: connections to brokers, where they are, and the bound on an answer,
                the wait of a long poll not counted.
            options: sizes, waits and the policy for damaged records.
        """
        self.cursor = cursor
        self._group = group
        self._handler = handler
        self._context = context
        self._pool = context.pool
        self._clock = context.clock
        self._options = options
        self._timeout_s = max(context.options.request_timeout_s, GET_SLACK_S)
        self._loop = asyncio.get_running_loop()
        self._is_stopped = False
        self._is_busy = False
        """A get is on its way, a connection is being made, or a pause runs."""
        self._timer: asyncio.TimerHandle | None = None
        self._forget_connection: Callable[[], None] | None = None
        self._sent_s = 0.0
        self._wait_s = 0.0
        self._failures = 0
        self._idle_s = 0.0
        self._ticket = 0
        """Grows with every get; the answer to an older one is dropped."""
        self._get_count = 0
        self._empty_count = 0
        self._error_count = 0
        self._skipped_count = 0
        self._received_bytes = 0
        self._barren_count = 0
        """Answers without data in a row that leave room for doubt."""
        self.last_error: MetaqError | None = None
        """Error of the last get; None after one that was answered."""

    @property
    def partition(self) -> TopicPartition:
        """Return the fetched partition."""
        return self.cursor.partition

    @property
    def problem(self) -> MetaqError | None:
        """Return why nothing comes: the last get's error, or damage that is searched.

        None where nothing is wrong.
        """
        return self.last_error or self.cursor.damage

    def statistics(self) -> FetchStatistics:
        """Return a snapshot of the counters."""
        return FetchStatistics(
            get_count=self._get_count,
            empty_count=self._empty_count,
            error_count=self._error_count,
            skipped_count=self._skipped_count,
            received_bytes=self._received_bytes,
        )

    def stop(self) -> None:
        """Ask no more; an answer that still comes is dropped."""
        self._is_stopped = True
        if self.last_error is not None:
            self._handler.on_trouble_end(self.partition)
        if self._timer is not None:
            self._timer.cancel()
        if self._forget_connection is not None:
            self._forget_connection()

    def step(self) -> None:
        """Send the next get if there is room and nothing is on its way."""
        if self._is_stopped or self._is_busy:
            return
        if not self._handler.has_room(self.partition):
            return
        self._is_busy = True
        broker_id = self.partition.broker_id
        address = self._context.address_of(broker_id)
        if address is None:
            self._on_error(NoBrokerError(f"broker {broker_id} is not there"))
            return
        connection = self._pool.ready(address)
        if connection is not None:
            self._ask(connection)
            return
        deadline_s = self._clock.monotonic_s() + CONNECT_NOTICE_S
        self._forget_connection = self._pool.when_open(
            address, self._on_connection, deadline_s=deadline_s
        )

    def hurry(self) -> None:
        """End a pause early: the cluster has changed."""
        if self._timer is not None:
            self._timer.cancel()
            self._resume()

    # -- asking -----------------------------------------------------------------------

    def _on_connection(self, error: MetaqError | None) -> None:
        if error is not None:
            self._on_error(error)
            return
        self._is_busy = False
        self.step()

    def _ask(self, connection: BrokerConnection) -> None:
        announced_s = connection.capabilities.wait_ms_max / 1000
        # After an error an answer is wanted at once: it tells that all is well again.
        is_urgent = self.last_error is not None or self.cursor.is_amid
        self._wait_s = 0.0 if is_urgent else min(self._options.wait_s, announced_s)
        self.cursor.set_fetch_bytes(self._handler.fetch_bytes())
        opaque = connection.next_opaque()
        command = self.cursor.next_get(self._group, opaque, int(self._wait_s * 1000))
        self._ticket += 1
        ticket = self._ticket
        self._sent_s = self._clock.monotonic_s()
        self._get_count += 1
        try:
            connection.submit(
                encode(command),
                opaque,
                lambda reply: self._on_reply(ticket, reply, connection),
                deadline_s=self._sent_s + self._wait_s + self._timeout_s,
                is_alone=True,
            )
        except MemoryError:
            self._on_no_memory(self.cursor.offset)
        except MetaqError as error:
            self._on_error(error)

    def _on_reply(
        self, ticket: int, reply: Reply | MetaqError, connection: BrokerConnection
    ) -> None:
        if self._is_stopped or ticket != self._ticket:
            return
        if isinstance(reply, MetaqError):
            self._on_error(reply)
            return
        before, was_searching = self.cursor.offset, self.cursor.is_searching
        try:
            outcome = self.cursor.outcome_of(reply)
            messages = self.cursor.on_reply(outcome)
        except (CorruptRecordError, NoProgressError) as error:
            self._on_damage(error)
            return
        except RemoteProtocolError as error:
            self._on_error(error)
            connection.close_for(error)
            return
        except MemoryError:
            self._on_no_memory(before)
            return
        except MetaqError as error:
            self._on_error(error)
            if isinstance(error, ServerError):
                self._doubt(connection)
            return
        if was_searching and not messages:
            self._is_busy = False
            if not self.cursor.is_searching and self.cursor.offset == before:
                # There is no gap, or not yet one: as before.
                is_idle = self.last_error is None
                self._pause(self._grown_idle_s() if is_idle else self._grown_pause_s())
                return
            self.step()
            return
        was_probe = self.last_error is not None
        if was_probe:
            self.last_error = None
            self._handler.on_trouble_end(self.partition)
        self._is_busy = False
        if messages:
            size_bytes = messages[-1].next_offset - messages[0].offset
            self._received_bytes += size_bytes
            self._barren_count = 0
            self._reset_pauses()
            try:
                self._handler.on_messages(self.partition, messages, size_bytes)
            except MemoryError:
                self._on_no_memory(before)
                return
        elif isinstance(outcome, NothingThere):
            self._empty_count += 1
            self._doubt(connection)
            pause_s = 0.0 if was_probe else self._pause_behind_nothing_s()
            if pause_s:
                self._pause(pause_s)
                return
        elif self.cursor.offset != before:
            self._handler.on_skip(self.partition, before, self.cursor.offset)
        self.step()

    # -- errors -----------------------------------------------------------------------

    def _doubt(self, connection: BrokerConnection) -> None:
        """Have a gap searched, if the broker could not say that there is one."""
        self._barren_count += 1
        if self._barren_count >= DOUBT_COUNT and not connection.capabilities.codes:
            self._barren_count = 0
            self.cursor.search_gap()

    def _on_error(self, error: MetaqError) -> None:
        if self._pool.is_closed:
            # The client goes, and the consumer with it: no trouble to tell of.
            self.stop()
            return
        self._error_count += 1
        if self.last_error is None:
            self._handler.on_trouble(self.partition, error)
        self.last_error = error
        self._context.metadata.request_refresh()
        self._pause(self._grown_pause_s())

    def _on_no_memory(self, offset: Offset) -> None:
        """Get again from an offset: messages may come twice, and none is left out."""
        self.cursor.seek(offset)
        self._on_error(ClientError(f"{self.partition}: no memory to read at {offset}"))

    def _on_damage(self, error: CorruptRecordError | NoProgressError) -> None:
        """Skip a damaged place, or stop the consumer, as its user chose."""
        if self._options.on_corrupt == "stop" or not isinstance(
            error, CorruptRecordError
        ):
            self.last_error = error
            self._is_stopped = True
            self._handler.on_fatal(error)
            return
        at, follower = self.cursor.offset, self.cursor.behind_damage
        if follower == at:
            # Nothing good lies behind it now.
            self._on_error(error)
            return
        log.error("damaged record skipped: next_offset=%d: %s", follower, error)
        self._skipped_count += 1
        self._barren_count = 0
        self.cursor.seek(follower)
        self._handler.on_skip(self.partition, at, follower)
        self._is_busy = False
        self.step()

    # -- pausing ----------------------------------------------------------------------

    def _grown_pause_s(self) -> float:
        self._failures += 1
        return READ_BACKOFF.delay_s(self._failures)

    def _grown_idle_s(self) -> float:
        step_s, max_s = self._options.idle_step_s, self._options.idle_max_s
        self._idle_s = min(self._idle_s + step_s, max_s)
        return self._idle_s

    def _pause_behind_nothing_s(self) -> float:
        """Return how long to pause behind an answer without data; 0: the broker did."""
        if self._clock.monotonic_s() - self._sent_s < self._wait_s / 2:
            return self._grown_pause_s()  # it did not wait as it was asked to
        if not self._wait_s:
            return self._grown_idle_s()
        self._reset_pauses()
        return 0.0

    def _reset_pauses(self) -> None:
        self._failures, self._idle_s = 0, 0.0

    def _pause(self, delay_s: float) -> None:
        self._is_busy = True
        self._timer = self._loop.call_later(delay_s, self._resume)

    def _resume(self) -> None:
        self._timer = None
        self._is_busy = False
        self.step()
