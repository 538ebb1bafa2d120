"""Fetches one partition while it is assigned to this consumer.

Theory of operation: a small state machine on the event loop, driven by callbacks,
without a task or future per get. At most one get is in flight per partition.

    step --room?--connection?--> get in flight --answer--> buffer.put --> step
      |no room: wait for on_room    |error, no data
      |no broker: pause             v
      +<------------------------- pause

With long polling, the broker delays the answer to a get until there is data, so an idle
consumer sends a few gets a minute. Without it (MetaQ 1.4), the pause after an empty
answer grows in steps, as in MetaQ's clients. An empty answer that arrives earlier than
requested also causes a pause, so that no broker can make the fetcher spin.

Damage in an answer may be from the network. If the broker supports it, `check` asks
whether the broker's bytes are good before the damage counts, and good ones are fetched
again.

Damage that a broker reports is trusted. If a broker cannot report damage (MetaQ 1.4)
and repeatedly sends no data or refuses, later bytes are searched for
(`cursor.search_gap`).

If the leader is gone, a partition is read from a follower: a get goes to the first
address in the snapshot of the cluster, leader first.

Source: docs/metaq-1.4/client.md 11.1, 11.2 and 14.5.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
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
    UnavailableError,
)
from metaq.model import Offset
from metaq.peer.connection import BrokerConnection
from metaq.peer.options import READ_BACKOFF
from metaq.peer.replies import FetchedRuns, NothingThere
from metaq.protocol.commands import Check, Get, Reply
from metaq.protocol.encoding import encode
from metaq.stats import counter

_log = logging.getLogger(__name__)

GET_SLACK_S: Final = 5.0
"""Minimum time-out of an answer, in addition to the requested wait, in seconds."""
CONNECT_NOTICE_S: Final = 2.0
"""Time without a connection after which an error is reported, in seconds;
`request_timeout_s` if that is shorter. Connecting continues."""
LATE_S: Final = 1.0
"""Delay after which a missing answer is reported as held back by the broker, in
seconds."""
EMPTY_MAX: Final = 4
"""Number of consecutive answers without data, including refusals, after which a gap is
searched for if the broker cannot report damage; repeated after as many."""


@dataclass(slots=True)
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
    again_count: int = counter(
        "metaq_consumer_damaged_answers_total",
        "Damaged answers that were fetched again, because the broker does not call its"
        " own bytes damaged.",
    )


class PartitionFetcher:
    """Fetcher of one partition. Owned by the consumer; used on the loop's thread."""

    def __init__(
        self,
        cursor: PartitionCursor,
        *,
        group: str,
        handler: FetchHandler,
        context: ClientContext,
        options: ConsumerOptions,
        is_committed: bool = False,
    ) -> None:
        """Create a fetcher that owns the cursor; nothing is sent before `step`.

        `is_committed`: the cursor begins at a committed offset of the group.
        """
        self.cursor = cursor
        self.partition: Final = cursor.partition
        self._group = group
        self._handler = handler
        self._context = context
        self._options = options
        self._timeout_s = max(context.options.request_timeout_s, GET_SLACK_S)
        self._loop = asyncio.get_running_loop()
        self._is_stopped = False
        self._is_busy = False
        """Whether a get is in flight, a connection is being made, or a pause runs."""
        self._is_asking = False
        self._timer: asyncio.TimerHandle | None = None
        self._forget_connection: Callable[[], None] | None = None
        self._sent_s = 0.0
        self._wait_s = 0.0
        self._failures = 0
        self._idle_s = 0.0
        self._ticket = 0
        """Number of the last get; answers to older ones are dropped."""
        self._counts = FetchStatistics()
        self._may_be_replaced = is_committed
        """Whether the log may be another one than was committed; until data arrives."""
        self._suspect_count = 0
        """Number of consecutive answers without data that may hide damage."""
        self.last_error: MetaqError | None = None
        """Error of the last get; None if it was answered."""

    @property
    def problem(self) -> MetaqError | None:
        """Error of the last get, or damage whose end is searched for; None: neither."""
        return self.last_error or self.cursor.damage

    @property
    def held_back(self) -> str | None:
        """Why the broker delays gets, for texts; None: it does not."""
        if isinstance(self.last_error, UnavailableError):
            return f"refuses gets: {self.last_error}"
        late_s = self._context.clock.monotonic_s() - self._sent_s - self._wait_s
        if self._is_asking and late_s > LATE_S:
            return f"has not answered a get for {late_s:.0f} s"
        return None

    def statistics(self) -> FetchStatistics:
        """Return a snapshot of the counters."""
        return replace(self._counts, again_count=self.cursor.again_count)

    def stop(self) -> None:
        """Send no more gets, and drop an answer that still arrives."""
        self._is_stopped = True
        if self.last_error is not None:
            self._handler.on_recovery(self.partition)
        if self._timer is not None:
            self._timer.cancel()
        if self._forget_connection is not None:
            self._forget_connection()

    def step(self) -> None:
        """Send the next get if there is buffer space and none is in flight."""
        if self._is_stopped or self._is_busy:
            return
        if not self._handler.has_room(self.partition):
            return
        self._is_busy = True
        broker_id = self.partition.broker_id
        address = self._context.address_of(broker_id)
        if address is None:
            self._on_error(NoBrokerError(f"broker {broker_id} is away"))
            return
        pool = self._context.pool
        connection = pool.ready(address)
        if connection is not None:
            self._ask(connection)
            return
        notice_s = min(CONNECT_NOTICE_S, self._context.options.request_timeout_s)
        self._forget_connection = pool.when_open(
            address,
            self._on_connection,
            deadline_s=self._context.clock.monotonic_s() + notice_s,
        )

    def step_now(self) -> None:
        """End a pause early, because the cluster has changed."""
        if self._timer is not None:
            self._timer.cancel()
            self._resume()

    # -- asking -----------------------------------------------------------------------

    def _on_connection(self, error: MetaqError | None) -> None:
        if error is not None:
            self._on_error(error)
        else:
            self._go_on()

    def _ask(self, connection: BrokerConnection) -> None:
        announced_s = connection.capabilities.wait_ms_max / 1000
        # After an error, request an answer at once, to see whether it has passed.
        is_urgent = self.last_error is not None or self.cursor.is_incomplete
        self._wait_s = 0.0 if is_urgent else min(self._options.wait_s, announced_s)
        self.cursor.set_fetch_bytes(self._handler.fetch_bytes())
        opaque = connection.next_opaque()
        command = self.cursor.next_get(
            self._group,
            opaque,
            int(self._wait_s * 1000),
            can_filter=connection.capabilities.filters,
        )
        self._counts.get_count += 1
        self._submit(command, connection, self._on_reply)

    def _submit(
        self,
        command: Get | Check,
        connection: BrokerConnection,
        on_reply: Callable[[Reply, BrokerConnection], None],
    ) -> None:
        self._ticket += 1
        ticket = self._ticket
        self._sent_s = self._context.clock.monotonic_s()
        self._is_asking = True

        def receive(reply: Reply | MetaqError) -> None:
            if self._is_stopped or ticket != self._ticket:
                return
            self._is_asking = False
            if isinstance(reply, MetaqError):
                self._on_error(reply)
            else:
                on_reply(reply, connection)

        try:
            connection.submit(
                encode(command),
                command.opaque,
                receive,
                deadline_s=self._sent_s + self._wait_s + self._timeout_s,
                is_alone=True,
            )
        except MemoryError:
            self._on_no_memory(self.cursor.offset)
        except MetaqError as error:
            self._on_error(error)

    def _on_reply(self, reply: Reply, connection: BrokerConnection) -> None:
        before, was_searching = self.cursor.offset, self.cursor.is_searching
        try:
            outcome = self.cursor.outcome_of(reply)
            messages = self.cursor.on_reply(outcome)
        except NoProgressError as error:
            self._on_damage(error)
            return
        except CorruptRecordError as error:
            if connection.capabilities.check and self.cursor.may_be_good():
                _log.warning("damage received, checking with the broker: %s", error)
                self._wait_s = 0.0
                check = self.cursor.next_check(connection.next_opaque())
                self._submit(check, connection, self._on_checked)
            else:
                self._on_damage(self.cursor.blamed(error))
            return
        except MemoryError:
            self._on_no_memory(before)
            return
        except MetaqError as error:
            self._on_error(error)
            if isinstance(error, RemoteProtocolError):
                connection.close_for(error)
            elif isinstance(error, ServerError):
                self._suspect_gap(connection)
            return
        if was_searching and not messages:
            if self.cursor.is_searching or self.cursor.offset != before:
                self._go_on()
            elif self.cursor.is_beyond and self._may_be_replaced:
                self._on_replaced(before)
            else:
                # There is no gap, or it cannot be seen yet.
                is_idle = self.last_error is None
                self._pause(self._grown_idle_s() if is_idle else self._grown_pause_s())
            return
        was_probe = self.last_error is not None
        if was_probe:
            self.last_error = None
            self._handler.on_recovery(self.partition)
        end = self.cursor.offset
        if end < before and self._may_be_replaced and not connection.capabilities.codes:
            self._on_replaced(before)
            return
        self._may_be_replaced = self._may_be_replaced and end == before
        if messages or (isinstance(outcome, FetchedRuns) and end != before):
            if isinstance(outcome, FetchedRuns):
                size_bytes = len(outcome.data)
            else:
                size_bytes = messages[-1].next_offset - messages[0].offset
            self._counts.received_bytes += size_bytes
            self._suspect_count = 0
            self._reset_pauses()
            try:
                self._handler.on_messages(self.partition, messages, size_bytes, end)
            except MemoryError:
                self._on_no_memory(before)
                return
        elif isinstance(outcome, NothingThere):
            self._counts.empty_count += 1
            self._suspect_gap(connection)
            pause_s = 0.0 if was_probe else self._pause_after_nothing_s()
            if pause_s:
                self._pause(pause_s)
                return
        elif self.cursor.offset != before:
            self._handler.on_skip(self.partition, before, self.cursor.offset)
        self._go_on()

    def _on_replaced(self, begin: Offset) -> None:
        """Read a replaced log from its start: it ends before the committed offset."""
        self.cursor.seek(Offset(0))
        self._handler.on_replaced(self.partition, begin)
        self._go_on()

    # -- errors -----------------------------------------------------------------------

    def _suspect_gap(self, connection: BrokerConnection) -> None:
        """Count a suspect answer; search for a gap if the broker cannot report one."""
        self._suspect_count += 1
        if self._suspect_count >= EMPTY_MAX and not connection.capabilities.codes:
            self._suspect_count = 0
            self.cursor.search_gap()

    def _on_error(self, error: MetaqError) -> None:
        if self._context.pool.is_closed:
            # The client is closing, and the consumer with it: nothing to report.
            self.stop()
            return
        self._counts.error_count += 1
        self._is_asking = False
        if self.last_error is None:
            self._handler.on_failure(self.partition, error)
        self.last_error = error
        self._context.metadata.request_refresh()
        self._pause(self._grown_pause_s())

    def _on_no_memory(self, offset: Offset) -> None:
        """Fetch again from an offset; messages may be repeated, and none is skipped."""
        self.cursor.seek(offset)
        self._on_error(ClientError(f"{self.partition}: no memory to read at {offset}"))

    def _on_checked(self, reply: Reply, connection: BrokerConnection) -> None:
        """Fetch bytes again unless the broker reports them as damaged."""
        try:
            self.cursor.on_check(reply)
        except CorruptRecordError as error:
            self._on_damage(error)
        except MetaqError as error:
            self._on_error(error)
            if isinstance(error, RemoteProtocolError):
                connection.close_for(error)
        else:
            self._go_on()

    def _on_damage(self, error: CorruptRecordError | NoProgressError) -> None:
        """Skip a damaged range, or stop the consumer, by the user's option."""
        if self._options.on_corrupt == "stop" or not isinstance(
            error, CorruptRecordError
        ):
            self.last_error = error
            self._is_stopped = True
            self._handler.on_fatal(error)
            return
        at, follower = self.cursor.offset, self.cursor.after_damage
        if follower == at:
            # No bytes can be skipped yet; try again later.
            self._on_error(error)
            return
        _log.error("damaged record skipped: next_offset=%d: %s", follower, error)
        self._counts.skipped_count += 1
        self._suspect_count = 0
        self.cursor.seek(follower)
        self._handler.on_skip(self.partition, at, follower)
        self._go_on()

    # -- pausing ----------------------------------------------------------------------

    def _grown_pause_s(self) -> float:
        self._failures += 1
        return READ_BACKOFF.delay_s(self._failures)

    def _grown_idle_s(self) -> float:
        step_s, max_s = self._options.idle_step_s, self._options.idle_max_s
        self._idle_s = min(self._idle_s + step_s, max_s)
        return self._idle_s

    def _pause_after_nothing_s(self) -> float:
        """Return the pause after an answer without data; 0 if the broker has waited."""
        if self._context.clock.monotonic_s() - self._sent_s < self._wait_s / 2:
            return self._grown_pause_s()  # it did not wait as requested
        if not self._wait_s:
            return self._grown_idle_s()
        self._reset_pauses()
        return 0.0

    def _reset_pauses(self) -> None:
        self._failures, self._idle_s = 0, 0.0

    def _pause(self, delay_s: float) -> None:
        self._timer = self._loop.call_later(delay_s, self._resume)

    def _resume(self) -> None:
        self._timer = None
        self._go_on()

    def _go_on(self) -> None:
        self._is_busy = False
        self.step()
