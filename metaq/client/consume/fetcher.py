"""Gets of one partition, for as long as it is assigned to this consumer.

Theory of operation: a small state machine on the event loop, driven by callbacks; no
task and no future per get. At most one get is in flight per partition.

    step --room?--connection?--> get in flight --answer--> buffer.put --> step
      |no room: wait for on_room    |error, no data
      |no broker: pause             v
      +<------------------------- pause

With long poll the broker holds a get until there is data, so a consumer that has caught
up asks a few times a minute. Without it (MetaQ 1.4) the pause after an empty answer
grows in steps, as MetaQ's clients do. An empty answer that comes sooner than requested
causes a pause too, for every kind of broker: no broker can make this code spin.

Damage that the fetcher finds in an answer may have come on the way. A broker that can
be asked says whether its bytes are good (`check`) before the damage counts, and good
ones are got again.

A broker that names damage is believed. One that cannot (MetaQ 1.4), and repeatedly
sends no data or refuses, is searched for later bytes (`cursor.search_gap`).

The partition of a leader that is gone is readable on its followers: a get goes to the
first address in the snapshot of the cluster, leader first.

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
"""Least time that an answer may take, in addition to the requested wait."""
CONNECT_NOTICE_S: Final = 2.0
"""Without a connection for so long, or for `request_timeout_s` if that is shorter, an
error is reported; connecting goes on."""
LATE_S: Final = 1.0
"""An answer that is later than that is waited for: the broker holds it back."""
EMPTY_MAX: Final = 4
"""Answers without data in a row, refusals included, after which a broker that cannot
name damage is searched for later bytes; and again after as many."""


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
    """Gets of one partition. Owner: the consumer; on the loop's thread alone."""

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
        """Take over a cursor; nothing is sent before `step`.

        `is_committed`: it begins where the group's offsets say.
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
        """A get is in flight, a connection is being made, or a pause runs."""
        self._is_asking = False
        self._timer: asyncio.TimerHandle | None = None
        self._forget_connection: Callable[[], None] | None = None
        self._sent_s = 0.0
        self._wait_s = 0.0
        self._failures = 0
        self._idle_s = 0.0
        self._ticket = 0
        """Grows with every get; the answer to an older one is dropped."""
        self._counts = FetchStatistics()
        self._may_be_replaced = is_committed
        """Whether another log may be there than was read before: nothing came yet."""
        self._suspect_count = 0
        """Answers without data in a row that may hide damage."""
        self.last_error: MetaqError | None = None
        """Error of the last get; None after one that was answered."""

    @property
    def problem(self) -> MetaqError | None:
        """The last get's error, or the damage whose end is searched; None: neither."""
        return self.last_error or self.cursor.damage

    @property
    def held_back(self) -> str | None:
        """Condition of the broker that keeps gets waiting; None: none."""
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
        """Send no more gets; an answer that still arrives is dropped."""
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
            self._on_error(NoBrokerError(f"broker {broker_id} is not there"))
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
        """End a pause early: the cluster has changed."""
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
        # After an error, ask for an answer at once: it shows that the error is over.
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
                _log.warning("damage received, the broker is asked: %s", error)
                self._wait_s = 0.0
                check = self.cursor.next_check(connection.next_opaque())
                self._submit(check, connection, self._on_checked)
            else:
                self._on_damage(error)
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
                # There is no gap, or none that can be seen yet.
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
        """Read a log from its start of which the broker knew nothing at the begin."""
        self.cursor.seek(Offset(0))
        self._handler.on_replaced(self.partition, begin)
        self._go_on()

    # -- errors -----------------------------------------------------------------------

    def _suspect_gap(self, connection: BrokerConnection) -> None:
        """Have a gap searched, if the broker could not say that there is one."""
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
        """Get again from an offset: messages may come twice, and none is skipped."""
        self.cursor.seek(offset)
        self._on_error(ClientError(f"{self.partition}: no memory to read at {offset}"))

    def _on_checked(self, reply: Reply, connection: BrokerConnection) -> None:
        """Get the bytes again that the broker does not call damaged."""
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
            # Nothing good follows it now.
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
        """Return the pause after an answer without data; 0: the broker has waited."""
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
