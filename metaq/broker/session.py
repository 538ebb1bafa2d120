"""One client connection: receives bytes, carries out commands and sends replies.

Theory of operation. From the received bytes, the hot loop takes the ordinary puts at
the start, then the general path takes one frame, and so on until an incomplete frame. A
put that was received alone is gathered with those of other connections. Replies are
sent when they are ready, in the order of the commands except for puts and waiting gets:
puts are answered when they are durable, puts to one log in their order. Clients match
replies by opaque (docs/metaq-1.4/broker.md 1.2, rule 8). If a whole transaction is sent
at once, the reply to the begin is sent with those to its puts, and they with the reply
to the commit: a system call for each would cost more than the command.

Reading pauses, and nothing is dropped, while one of these reaches its bound: bytes of
puts in flight on this connection, reply bytes that its peer has not read, bytes held by
all connections (`load.py`). Commands that take longer than a turn of the loop are
continued in later turns, one connection a turn, and a large read waits for a turn: so
a flood on one connection delays the others by one or two milliseconds.

End of a connection: after a quit, a malformed frame, the end by the peer, or the stop
of the broker, nothing more is read; replies to the commands so far are sent, then the
connection is closed. `check`, called by housekeeping, disconnects a peer that is
silent, that does not complete a frame, or that does not read.

    Invariant: `unanswered_count` counts commands that will still be answered; the
    channel is closed only when it is 0, or by `abort`.
"""

import logging
from collections.abc import Callable, Generator

from metaq.broker.acks import HeldBack, Writer
from metaq.broker.context import BrokerContext
from metaq.broker.dispatch import Large, dispatch, dispatch_in_steps, encode_failure
from metaq.broker.handlers.filtered_get import answer_get
from metaq.broker.hot_puts import HotPuts
from metaq.broker.load import LARGE_READ_BYTES, TURN_S
from metaq.broker.single_puts import SinglePuts
from metaq.broker.waiters import Waiter
from metaq.errors import RemoteProtocolError
from metaq.net.channel import RECEIVE_BYTES, Channel
from metaq.net.file_range import Explain, FileRange
from metaq.protocol.commands import (
    CommitTogether,
    Mput,
    Quit,
    Reply,
    Stats,
    TransactionCommand,
    TransactionType,
)
from metaq.protocol.connection import NEED_DATA, Connection, InPieces, Role, WireLimits

_log = logging.getLogger(__name__)


class Session:
    """One connection. Owned by the app; used on the loop's thread."""

    def __init__(
        self,
        channel: Channel,
        context: BrokerContext,
        single_puts: SinglePuts,
        *,
        on_closed: Callable[["Session"], None],
    ) -> None:
        limits = context.config.limits
        self.channel = channel
        self.context = context
        self._on_closed = on_closed
        self._connection = Connection(
            Role.SERVER,
            WireLimits(
                line_bytes_max=limits.line_bytes_max,
                payload_bytes_max=limits.payload_bytes_max,
                batch_bytes_max=limits.batch_bytes_max,
                joined_bytes_max=RECEIVE_BYTES,
            ),
        )
        self._hot = HotPuts(self, context, single_puts)
        self._in_flight_max = limits.connection_in_flight_bytes_max
        self._queue_max = limits.connection_buffer_bytes_max
        self.in_flight_bytes = 0
        self.unanswered_count = 0
        self.taker_count = 0
        self.held_back: dict[Writer, HeldBack] = {}
        self._partial_bytes = 0
        self._waiters: set[Waiter] = set()
        self.is_paused = False
        """Whether reading is paused, until a bound allows it or for a turn."""
        self._is_resume_due = False
        self._is_closed = False
        self._steps: Generator[None, None, bytes] | None = None
        self._steps_bytes = 0
        self._end_reason = ""
        self._frame_since_s: float | None = None

    # -- for the owner ----------------------------------------------------------------

    def start(self) -> None:
        """Begin to serve."""
        self.context.connection_count += 1
        load = self.context.load
        load.join(self)
        self.channel.start(
            on_data=self._on_data,
            on_end=lambda: self.end("peer ended"),
            on_room=self._resume_soon,
            on_closed=self._on_channel_closed,
            on_held=load.add_replies,
            on_no_memory=lambda: load.relieve_process(self),
            lacking=self._lacking,
        )

    def end(self, reason: str) -> None:
        """Stop reading; close when every command so far is answered."""
        if self._end_reason:
            return
        self._end_reason = reason
        try:
            while self._steps is not None:
                self._take_step()
        except MemoryError:
            self.abort("no memory")
        self._drop_partial()
        self.channel.pause_reading()
        self._let_go()
        self._close_if_settled()

    def _let_go(self) -> None:
        """End the waits, transactions and leases of the connection in other parts."""
        self.context.waiters.end_all(self._waiters)
        self.context.transactions.end_owner(self)
        if self.context.replica is not None:
            self.context.replica.drop(self)
        if self.context.queues is not None:
            self.context.queues.drop(self)
        self.context.mailboxes.drop(self)

    def abort(self, reason: str) -> None:
        """Close at once; unsent replies are lost."""
        self.channel.abort(reason)

    def drop(self, reason: str) -> None:
        """End, and free the memory of an incomplete frame and of unread replies.

        With unread replies, the connection is closed at once.
        """
        is_deaf = self.channel.held_bytes > self._partial_bytes
        self.end(reason)
        if is_deaf:
            self.abort(reason)

    def check(self, now_s: float, timeout_s: float) -> None:
        """Disconnect the peer if it makes no progress for `timeout_s`; 0: never.

        That is the limit for silence, for one frame, for unread replies, and for
        replies still pending after its end.
        """
        # A reply queued to join the next one must not wait for a hung disk.
        self.channel.send_queued()
        if not timeout_s:
            return
        if self.channel.stalled_s(now_s) > timeout_s:
            self.abort("peer does not read")
        elif self._frame_since_s and now_s - self._frame_since_s > timeout_s:
            self.end("frame takes too long")
        elif self.channel.idle_s(now_s) > timeout_s:
            if self._end_reason or self.is_paused:
                # Replies wait for a hung disk; while nothing is read, we cannot see
                # whether the peer is still there.
                self.abort(f"{self._end_reason or 'paused'}, and nothing moves")
            elif not self.unanswered_count:
                self.end("idle")

    @property
    def held_bytes(self) -> int:
        """Return the bytes held until the peer sends or reads more."""
        return self._partial_bytes + self.channel.held_bytes

    @property
    def peer(self) -> str:
        """Return `host:port` of the other side."""
        return self.channel.peer

    # -- bytes in ---------------------------------------------------------------------

    def _on_data(self, data: bytes) -> None:
        """Process new bytes after those received before."""
        try:
            # Idle, or with no unanswered commands but those that wait for messages.
            waits = self.unanswered_count
            if (
                (not waits or waits == self._waiting_count)
                and self._frame_since_s is None
                and self._take_single(data)
            ):
                return
            if data:
                self._connection.receive_data(data)
                self._hot.begin_read()
            if len(data) > LARGE_READ_BYTES:
                self._wait_for_turn()
                return
            self._process()
            if self.unanswered_count == self._waiting_count:
                self.channel.send_queued()
        except MemoryError:
            # A command may be half done: nothing after it may be carried out.
            self.run_out()

    def _lacking(self) -> int:
        """Return the missing bytes of an incomplete frame; 0 if other work is queued.

        Received bytes are not counted as held while they wait for their turn, so only
        one connection at a time may receive such a large piece.
        """
        is_alone = not self.context.turns.is_busy
        return self._connection.buffer.missing_bytes if is_alone else 0

    def _take_single(self, data: bytes) -> bool:
        """Take a put, or a batch of one, that was received alone; return if taken.

        Most connections send nothing else, so this skips the checks of `_process`.
        """
        load = self.context.load
        if self.channel.queued_bytes or load.is_full:
            return False
        size_bytes = self._hot.take_single(data)
        if size_bytes:
            self.unanswered_count += 1
            self.in_flight_bytes += size_bytes
            load.hold(size_bytes)
        elif not self._hot.take_batch(data):
            return False
        if self.in_flight_bytes >= self._in_flight_max or load.is_full:
            self._pause()
        return True

    def _process(self) -> None:
        """Process the received bytes until a bound is reached or the turn is over."""
        connection, now_s = self._connection, self.context.clock.monotonic_s
        turn_ends_s = now_s() + TURN_S
        while not self._end_reason:
            if self._steps is not None:
                # Before the bounds are checked, because finishing it frees bytes.
                self._take_step()
            elif self._must_pause():
                self._pause()
                return
            elif not self._take_next():
                return
            has_more = self._steps is not None or connection.buffer.unread_bytes
            if has_more and now_s() >= turn_ends_s:
                self._wait_for_turn()
                return

    def _take_next(self) -> bool:
        """Carry out a run of puts, or one command; return whether there may be more."""
        connection, buffer = self._connection, self._connection.buffer
        is_put = connection.is_between_frames and buffer.data.startswith(
            b"put ", buffer.position
        )
        if is_put and self._hot.take(buffer):
            self._frame_since_s = None
            if buffer.position == len(buffer.data):
                # Most reads are complete puts and nothing else.
                if self._partial_bytes:
                    self._note_frame()
                self._finish_read()
                return False
        if is_put and self._hot.has_more:
            return True
        try:
            event = connection.next_event()
        except RemoteProtocolError as error:
            self.context.counters.malformed_count += 1
            self.end(f"malformed frame: {error}")
            return False
        if event is NEED_DATA:
            self._note_frame()
            self._finish_read()
            return False
        self._frame_since_s = None
        if isinstance(event, Quit):
            self.end("quit")
            return False
        assert not isinstance(event, Reply), "no replies are heard"
        if isinstance(event, Large):
            self._steps = dispatch_in_steps(event, self)
            self._steps_bytes = _payload_bytes(event)
            self.context.load.hold(self._steps_bytes)
        else:
            reply = dispatch(event, self)
            self.channel.queue(reply)
            # The reply to a begin waits, to be sent with those to its puts.
            if reply and not is_begin(event):
                self.channel.send_queued()
        return True

    def _take_step(self) -> bool:
        """Take one step of the current command; return whether it was the last."""
        assert self._steps is not None, "there is a command at hand"
        try:
            next(self._steps)
        except StopIteration as done:
            self._drop_steps()
            self.channel.send(done.value)
            return True
        except MemoryError:
            self._drop_steps()
            raise
        return False

    def _drop_steps(self) -> None:
        if self._steps is not None:
            self._steps.close()
            self._steps = None
            self._release_steps()

    def _release_steps(self) -> None:
        if self._steps_bytes:
            steps_bytes, self._steps_bytes = self._steps_bytes, 0
            self.context.load.release(steps_bytes)

    def _finish_read(self) -> None:
        """Pause or resume reading by the bounds, after all bytes were processed."""
        if self._end_reason:
            return
        if self._must_pause():
            self._pause()
        elif self.is_paused:
            self._unpause()

    def _note_frame(self) -> None:
        """Note since when a frame has been incomplete; count its bytes as held."""
        connection, load = self._connection, self.context.load
        partial_bytes = connection.buffer.unread_bytes
        if connection.is_between_frames and not partial_bytes:
            self._frame_since_s = None
        elif self._frame_since_s is None:
            self._frame_since_s = self.context.clock.monotonic_s()
        grown_bytes = partial_bytes - self._partial_bytes
        if grown_bytes:
            self._partial_bytes = partial_bytes
            load.add_partial(grown_bytes)
            if grown_bytes > 0:
                load.relieve(self)

    # -- bounds -----------------------------------------------------------------------

    def _must_pause(self) -> bool:
        return (
            self.in_flight_bytes >= self._in_flight_max
            or self.channel.queued_bytes >= self._queue_max
            or self.channel.held_bytes >= self._queue_max
            or self.context.load.is_full
            or (self.context.load.has_many_replies and self.channel.held_bytes > 0)
        )

    def _pause(self) -> None:
        self.is_paused = True
        self.channel.pause_reading()
        load = self.context.load
        if load.is_full:
            load.call_when_room(self._resume_soon)
            load.relieve(self)
        if self.channel.queued_bytes:
            self.channel.want_empty()

    def _wait_for_turn(self) -> None:
        """Pause reading until a turn in which the received bytes are processed."""
        self._pause()
        self._resume_soon()

    def _unpause(self) -> None:
        self.is_paused = False
        self.channel.resume_reading()

    def _resume_soon(self) -> None:
        """Continue after `_pause`, in a later turn of the loop."""
        if self.is_paused and not self._is_resume_due:
            self._is_resume_due = True
            self.context.turns.ask(self._resume)

    def _resume(self) -> None:
        self._is_resume_due = False
        if self.is_paused:
            self._on_data(b"")

    # -- answers (Answerer) -----------------------------------------------------------

    def hold(self, *, count: int, size_bytes: int) -> None:
        """Count commands as in flight until `answer`."""
        # The current command has held these bytes until now.
        self._release_steps()
        self.unanswered_count += count
        self.in_flight_bytes += size_bytes
        self.context.load.hold(size_bytes)

    def answer(
        self,
        replies: bytes,
        *,
        count: int,
        size_bytes: int,
        joins_next: bool = False,
        is_alone: bool = False,
    ) -> None:
        """Send replies to `count` commands that held `size_bytes` in flight."""
        self.unanswered_count -= count
        self.in_flight_bytes -= size_bytes
        try:
            # Waiting commands do not count: their replies may come much later.
            if self.unanswered_count > self._waiting_count and not is_alone:
                self.channel.queue(replies)
                if not joins_next:
                    self.channel.send_queued()
            else:
                self.channel.send_now(replies)
        except MemoryError:
            # Close, or the peer would wait for ever. Do not raise: other tickets of
            # the group still need replies.
            self.run_out()
        self.context.load.release(size_bytes)
        if self._end_reason:
            self._close_if_settled()
        elif self.is_paused:
            self._resume_soon()

    @property
    def _waiting_count(self) -> int:
        """Return the number of its commands that wait for messages or replies."""
        return len(self._waiters) + self.taker_count

    def run_out(self) -> None:
        """Close at once: there is no memory to carry out or answer a command."""
        self.context.load.drop(self, "no memory to carry out a command")
        self.abort("no memory")

    def send_range(
        self, head: bytes, file: FileRange, *, explain: Explain, is_fresh: bool
    ) -> None:
        """Send a header and a range of a file, as `Channel.send_range`."""
        self.channel.send_range(head, file, explain=explain, is_fresh=is_fresh)

    def keep_waiter(self, waiter: Waiter) -> None:
        """Remember a waiter, to end it with the session."""
        self._waiters.add(waiter)

    def finish_wait(self, waiter: Waiter) -> None:
        """Answer a get whose wait is over."""
        command, reply = waiter.command, b""
        self._waiters.discard(waiter)
        if self._is_closed:
            return
        try:
            answer_get(command, self, has_waited=True)
        except MemoryError:
            self.run_out()
        except Exception as error:  # noqa: BLE001  # logged and answered
            reply = encode_failure(error, command, self.context)
        self.answer(reply, count=1, size_bytes=0)

    # -- the end ----------------------------------------------------------------------

    def _close_if_settled(self) -> None:
        if not self.unanswered_count:
            self.channel.close_after_flush(self._end_reason)

    def _drop_partial(self) -> None:
        """Drop received bytes that were not processed."""
        self._connection.buffer.clear()
        partial_bytes, self._partial_bytes = self._partial_bytes, 0
        self.context.load.add_partial(-partial_bytes)

    def _on_channel_closed(self, reason: str) -> None:
        self._end_reason = self._end_reason or reason
        self._is_closed = True
        self._drop_steps()
        self._drop_partial()
        self.context.load.leave(self)
        self._let_go()
        self.context.connection_count -= 1
        _log.debug("connection closed: peer=%s reason=%s", self.channel.peer, reason)
        self._on_closed(self)


def is_begin(event: object) -> bool:
    """Return whether a command begins a transaction, whose puts follow soon."""
    return isinstance(event, TransactionCommand) and event.type is TransactionType.BEGIN


def _payload_bytes(command: Large) -> int:
    """Return the bytes that a command holds while it is carried out in steps."""
    match command:
        case Mput() | CommitTogether():
            return len(command.payload)
        case InPieces():
            return command.size_bytes
        case Stats():
            return 0
