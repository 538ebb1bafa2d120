"""One connection's bytes: a non-blocking socket on the event loop.

Theory of operation. The loop's readers and writers are used directly, because the unit
that crosses this module is a group of commands and a group of replies:

* one call receives up to RECEIVE_BYTES, or the missing bytes of a large frame, as one
  `bytes` object, and the owner gets it unchanged;
* replies are queued by `send` and sent, joined, at the end of the loop's turn: one
  system call for a whole group; a single reply is sent at once (`send_now`);
* a file range is sent by `sendfile`, its header before it with MSG_MORE, so header and
  first bytes share a packet. If its file is not open, or the range is not in the page
  cache, a reader thread first opens and warms it; everything queued after it waits,
  which keeps the order. If the file then turns out to be too short, an error is sent
  instead; a file truncated after its header was sent ends the connection.

The owner bounds the queue: `queued_bytes` is the unsent size; `on_room` is called when
a full queue falls below half of `room_bytes`, or when all is sent after `want_empty`;
`stalled_s` is the time since the peer last read. `on_held` gets every change of the
queue's size in memory, so that one bound can cover many channels.

If there is no memory to receive into, the bytes stay in the socket and the owner
chooses a channel to close (`on_no_memory`). If there is no memory to join a queue, its
channel is closed.

A channel ends in one of three ways. `close_after_flush` sends the queue, then FIN, then
discards input until the peer closes or LINGER_S have passed: closing with unread input
sends an RST, which may destroy replies in transit. `hang_up` sends FIN without waiting;
use it when nothing is in flight. `abort` drops everything and sends an RST, as
SO_LINGER 0 does in MetaQ.

    Invariant: every queued range is released exactly once.
    Invariant: no callback runs after `on_closed`.

Source: docs/metaq-1.4/broker.md 1.1.
"""

import asyncio
import contextlib
import enum
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Final

from metaq.clock import Clock
from metaq.net.file_range import Explain, FileRange, QueuedRange, ShortRangeError
from metaq.net.poller import Readers

RECEIVE_BYTES: Final = 256 * 1024
"""Maximum number of bytes received at once; larger reads gain nothing."""

RECEIVE_FRAME_BYTES: Final = 1024 * 1024
"""Maximum while a larger frame is incomplete, because each read costs a turn of the
loop. Few bytes are received beyond the frame, because those are copied."""

RECEIVE_BYTES_MIN: Final = 16 * 1024
"""Size of reads while little data arrives: a larger buffer would be taken from the
system and returned at each read, which takes longer than a small put."""

SEND_BYTES_MAX: Final = 1024 * 1024
"""Maximum number of queued bytes joined for one send."""

TURN_BYTES_MAX: Final = 4 * 1024 * 1024
"""Maximum number of bytes one channel sends before the others get their turn."""

RANGE_HELD_BYTES: Final = 512
"""Memory counted for a queued range, in bytes: its header and objects."""

LINGER_S: Final = 2.0
"""Time for discarding input after FIN before the socket is closed anyway."""

_RESET: Final = struct.pack("ii", 1, 0)

_DISCARDED: Final = bytearray(RECEIVE_BYTES_MIN)
"""Buffer for discarded input of all channels, so that it needs no memory."""


def _ignore(*_args: object) -> None:
    """Do nothing: the callback before `start`."""


def _nothing() -> int:
    """Return 0: no frame is incomplete."""
    return 0


class ChannelState(enum.Enum):
    """State of a channel; it only moves down this list."""

    OPEN = "open"
    FLUSHING = "flushing"
    LINGERING = "lingering"
    CLOSED = "closed"


class Channel:
    """A connected socket. Owned by one session, used on the loop's thread only."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        room_bytes: int,
        readers: Readers | None = None,
        linger_s: float = LINGER_S,
    ) -> None:
        """Take over a connected socket; nothing is read until `start`.

        Args:
            sock: owned from now on.
            loop: the loop whose thread calls everything here.
            clock: for idle times.
            room_bytes: size of a full queue; `on_room` is called when a full one has
                fallen below half of it.
            readers: where to register for readability; None: `loop`.
            linger_s: longest wait for the peer's close after ours, in seconds.
        """
        sock.setblocking(False)
        self._sock = sock
        self._fd = sock.fileno()
        self._loop = loop
        self._readers: Readers = loop if readers is None else readers
        self._clock = clock
        self._room_bytes = room_bytes
        self._linger_s = linger_s
        self.state = ChannelState.OPEN
        self._on_data: Callable[[bytes], None] = _ignore
        self._on_end: Callable[[], None] = _ignore
        self._on_room: Callable[[], None] = _ignore
        self._on_closed: Callable[[str], None] = _ignore
        self._on_held: Callable[[int], object] = _ignore
        self._on_no_memory: Callable[[], object] = self._run_out
        self._lacking: Callable[[], int] = _nothing
        self._queue: deque[bytes | memoryview | QueuedRange] = deque()
        self.queued_bytes = 0
        """Number of bytes that the owner has queued and that are not sent yet."""
        self.held_bytes = 0
        """Memory held by the queue, in bytes; ranges stay in their files."""
        self._is_flush_due = False
        self._receive_bytes = RECEIVE_BYTES_MIN
        self._is_reading = False
        self._is_writing = False
        self._room_below = 0
        self._has_ended = False
        self._reads_rest = False
        self._warming: Future[None] | None = None
        self._linger: asyncio.TimerHandle | None = None
        self._reason = ""
        now_s = clock.monotonic_s()
        self._received_s = now_s
        self._sent_s = now_s
        self.received_bytes = 0
        self.sent_bytes = 0
        """Number of bytes given to the socket, ranges included."""
        self.peer = _name_of(sock)
        """`host:port` of the other side."""

    # -- for the owner ----------------------------------------------------------------

    def start(
        self,
        *,
        on_data: Callable[[bytes], None],
        on_end: Callable[[], None],
        on_room: Callable[[], None],
        on_closed: Callable[[str], None],
        reads_rest: bool = False,
        on_held: Callable[[int], object] = _ignore,
        on_no_memory: Callable[[], object] | None = None,
        lacking: Callable[[], int] = _nothing,
    ) -> None:
        """Begin to read, and set the callbacks.

        Args:
            on_data: gets received bytes, never empty.
            on_end: called when the peer will send no more; it may still read.
            on_room: see the module.
            on_closed: gets the reason once the socket is closed; called once.
            reads_rest: if a send fails, first pass the bytes that the peer sent before
                it closed to `on_data`: these replies still count.
            on_held: gets each change of `held_bytes`.
            on_no_memory: called when there is no memory to receive into; it closes a
                channel, this one or another that holds more. None: this one is closed.
            lacking: returns the number of bytes missing from an incomplete frame, if
                they may be received at once.
        """
        self._on_data = on_data
        self._on_end = on_end
        self._on_room = on_room
        self._on_closed = on_closed
        self._reads_rest = reads_rest
        self._on_held = on_held
        self._lacking = lacking
        if on_no_memory is not None:
            self._on_no_memory = on_no_memory
        self.resume_reading()

    def send(self, data: bytes | memoryview) -> None:
        """Queue bytes; they are sent at the end of this turn of the loop."""
        self.queue(data)
        self.send_queued()

    def queue(self, data: bytes | memoryview) -> None:
        """Queue bytes without a flush; they are sent in one call with the next ones."""
        if self.state is ChannelState.OPEN and data:
            self._queue.append(data)
            self._grow(len(data), len(data))

    def send_queued(self) -> None:
        """Send the queue at the end of this turn of the loop."""
        if self._queue and self.state is ChannelState.OPEN:
            self._flush_soon()

    def send_now(self, data: bytes) -> None:
        """Send bytes within this call, or `send` them if the queue has to wait.

        For a reply that no other will join: waiting for the end of the turn would be a
        tenth of the latency of a single put. Queued bytes are sent before it. Apart
        from `on_held`, no callback runs from here: the flush handles the rest and any
        socket error.
        """
        if not data or self.state is not ChannelState.OPEN:
            self.send(data)
            return
        if self._queue:
            if not self._has_joinable:
                self.send(data)
                return
            data = self._take_queued() + data
        try:
            sent = self._sock.send(data)
        except OSError:
            sent = 0
        self.sent_bytes += sent
        self._sent_s = self._clock.monotonic_s()
        if sent < len(data):
            self.send(memoryview(data)[sent:])

    def send_gathered(self, data: bytes, size_max: int) -> None:
        """Send bytes as `send` does, or at once with the queue if the queue is large.

        This lets the peer start on the first of many requests before the last is made.
        """
        if self.queued_bytes + len(data) < size_max:
            self.send(data)
        else:
            self._is_flush_due = False  # it finds nothing, or the rest
            self.send_now(data)

    def send_range(
        self, head: bytes, file: FileRange, *, explain: Explain, is_fresh: bool = False
    ) -> None:
        """Send a file range after its header.

        It is sent within this call if the queue is empty, its file is open and it is in
        the page cache. As in `send_now`, no callback but `on_held` runs from here.

        Args:
            head: bytes before the range.
            file: released when it is sent or the channel is closed.
            explain: returns the bytes to send instead of both if the range cannot be
                read and no byte of it was sent; raises nothing.
            is_fresh: skip the check of the page cache, as it was just written.
        """
        if self.state is not ChannelState.OPEN:
            file.release()
            return
        item = QueuedRange(file, head, explain)
        item.is_warm = is_fresh
        self._queue.append(item)
        self._grow(len(head) + file.size_bytes, RANGE_HELD_BYTES)
        if len(self._queue) == 1:
            with contextlib.suppress(OSError):  # the flush gets it again
                if self._prepare(item):
                    self._send_range(item)
        if self._queue:
            self._flush_soon()

    def want_empty(self) -> None:
        """Have `on_room` called, at the latest when the queue is empty."""
        self._room_below = max(self._room_below, 1)

    def pause_reading(self) -> None:
        """Stop reading: bytes stay in the socket, which slows down the peer."""
        if self._is_reading:
            self._is_reading = False
            self._readers.remove_reader(self._fd)

    def resume_reading(self) -> None:
        """Read again; does nothing if reading, if closing, or after the peer's end."""
        if self._is_reading or self._has_ended:
            return
        if self.state is ChannelState.OPEN:
            self._is_reading = True
            self._readers.add_reader(self._fd, self._on_readable)

    def close_after_flush(self, reason: str) -> None:
        """Send the queue, then close; nothing more is read or queued."""
        if self.state is not ChannelState.OPEN:
            return
        self.pause_reading()
        self.state = ChannelState.FLUSHING
        self._reason = reason
        if self._queue:
            self._flush_soon()  # which finishes
        else:
            self._finish()

    def abort(self, reason: str) -> None:
        """Close at once and drop the queue; the peer sees a reset."""
        if self.state is not ChannelState.CLOSED:
            with contextlib.suppress(OSError):
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.hang_up(reason)

    def idle_s(self, now_s: float) -> float:
        """Return the time since bytes last moved in either direction, in seconds."""
        return now_s - max(self._received_s, self._sent_s)

    def stalled_s(self, now_s: float) -> float:
        """Return the time for which the peer has not read, in seconds; 0: it reads."""
        return now_s - self._sent_s if self._queue and not self._warming else 0.0

    # -- reading ----------------------------------------------------------------------

    def _on_readable(self) -> None:
        size = self._receive_bytes
        if size == RECEIVE_BYTES and (lacking_bytes := self._lacking()) > size:
            size = min(lacking_bytes + RECEIVE_BYTES_MIN, RECEIVE_FRAME_BYTES)
        try:
            data = self._sock.recv(size)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.hang_up(f"receive failed: {error}")
            return
        except MemoryError:
            self._on_no_memory()
            return
        if not data:
            self.pause_reading()
            self._has_ended = True
            self._on_end()
            return
        if len(data) == size:
            self._receive_bytes = RECEIVE_BYTES
        elif len(data) <= RECEIVE_BYTES_MIN // 2:
            self._receive_bytes = RECEIVE_BYTES_MIN
        self._received_s = self._clock.monotonic_s()
        self.received_bytes += len(data)
        self._on_data(data)

    def _read_rest(self) -> None:
        """Read the bytes that arrived before the connection broke.

        If memory runs out, the rest is lost.
        """
        with contextlib.suppress(OSError, MemoryError):
            while self.state is not ChannelState.CLOSED:
                data = self._sock.recv(RECEIVE_BYTES)
                if not data:
                    return
                self.received_bytes += len(data)
                self._on_data(data)

    # -- writing ----------------------------------------------------------------------

    def _grow(self, size_bytes: int, held_bytes: int) -> None:
        if not self.queued_bytes:
            self._sent_s = self._clock.monotonic_s()
        self.queued_bytes += size_bytes
        self._hold(held_bytes)

    def _hold(self, change_bytes: int) -> None:
        self.held_bytes += change_bytes
        self._on_held(change_bytes)

    @property
    def _has_joinable(self) -> bool:
        """Return whether the queue has only bytes, and no flush or `on_room` is due."""
        if self._is_flush_due or self._is_writing or self._room_below:
            return False
        return not any(isinstance(part, QueuedRange) for part in self._queue)

    def _take_queued(self) -> bytes:
        """Remove and return all queued bytes."""
        data = b"".join(self._queue)  # type: ignore[arg-type]  # without ranges
        self._queue.clear()
        self.queued_bytes -= len(data)
        self._hold(-len(data))
        return data

    def _flush_soon(self) -> None:
        if self.queued_bytes >= self._room_bytes:
            self._room_below = self._room_bytes // 2
        if not self._is_flush_due and not self._is_writing and not self._warming:
            self._is_flush_due = True
            self._loop.call_soon(self._on_flush_due)

    def _on_flush_due(self) -> None:
        self._is_flush_due = False
        self._flush()

    def _flush(self) -> None:
        """Send until the socket is full, a range is cold, or the turn is over."""
        if self.state is ChannelState.CLOSED or self._warming:
            return
        limit = self.sent_bytes + TURN_BYTES_MAX
        try:
            while self._queue and self.sent_bytes < limit:
                head = self._queue[0]
                if isinstance(head, QueuedRange):
                    if not self._prepare(head):
                        self._watch_writable(wanted=False)
                        return
                    self._send_range(head)
                else:
                    self._send_bytes()
        except (BlockingIOError, InterruptedError):
            self._watch_writable(wanted=True)
        except ShortRangeError:
            self._watch_writable(wanted=False)
            return
        except OSError as error:
            if self._reads_rest:
                self._read_rest()
            self.hang_up(f"send failed: {error}")
            return
        except MemoryError:
            self._run_out()
            return
        else:
            # Leave the rest for the next turn: a socket that is still writable calls
            # back at once, after the other channels.
            self._watch_writable(wanted=bool(self._queue))
            if not self._queue and self.state is ChannelState.FLUSHING:
                self._finish()
                return
        if self.queued_bytes < self._room_below:
            self._room_below = 0
            self._on_room()

    def _send_bytes(self) -> None:
        """Send the bytes at the front of the queue, joined."""
        parts: list[bytes | memoryview] = []
        size_bytes, follower = 0, None
        for part in self._queue:
            if isinstance(part, QueuedRange):
                follower = part
                break
            if size_bytes >= SEND_BYTES_MAX:
                break
            parts.append(part)
            size_bytes += len(part)
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        flags = socket.MSG_MORE if follower is not None else 0
        sent = self._sock.send(data, flags)
        self._note_sent(sent)
        self._hold(-sent)
        for _ in parts:
            self._queue.popleft()
        if sent < size_bytes:
            self._queue.appendleft(memoryview(data)[sent:])
            raise BlockingIOError

    def _send_range(self, item: QueuedRange) -> None:
        while item.head:
            sent = self._sock.send(item.head, socket.MSG_MORE)
            self._note_sent(sent)
            item.head = memoryview(item.head)[sent:]
        # One call sends the whole range if the socket has space. It never raises after
        # sending a part, so its result is exact.
        sent = os.sendfile(self._fd, item.file.fileno(), item.position, item.left_bytes)
        if not sent:
            # The owner finds the cause, which blocks, before the channel ends.
            item.is_short = True
            if not self._warming:
                self._warm(item)
            raise ShortRangeError(f"range ends {item.left_bytes} bytes early")
        self._note_sent(sent)
        item.position += sent
        item.left_bytes -= sent
        if not item.left_bytes:
            self._queue.popleft()
            self._hold(-RANGE_HELD_BYTES)
            item.file.release()

    def _note_sent(self, size_bytes: int) -> None:
        self.queued_bytes -= size_bytes
        self.sent_bytes += size_bytes
        self._sent_s = self._clock.monotonic_s()

    def _watch_writable(self, *, wanted: bool) -> None:
        if wanted and not self._is_writing:
            self._loop.add_writer(self._fd, self._flush)
        elif not wanted and self._is_writing:
            self._loop.remove_writer(self._fd)
        self._is_writing = wanted

    # -- cold ranges ------------------------------------------------------------------

    def _prepare(self, item: QueuedRange) -> bool:
        """Return whether a range can be sent now; if not, start to warm it."""
        file = item.file
        if file.is_open and (
            item.is_warm or file.is_cached(item.position, item.left_bytes)
        ):
            item.is_warm = True
            return True
        self._warm(item)
        return False

    def _warm(self, item: QueuedRange) -> None:
        self._warming = item.file.reader.submit(_open_and_warm, item)
        self._warming.add_done_callback(
            lambda future: self._loop.call_soon_threadsafe(self._on_warm, item, future)
        )

    def _on_warm(self, item: QueuedRange, future: Future[None]) -> None:
        self._warming = None
        if self.state is ChannelState.CLOSED:
            item.file.release()
            return
        error = CancelledError() if future.cancelled() else future.exception()
        if item.is_short:
            text = f"range ends {item.left_bytes} bytes early"
            item.explain(error or ShortRangeError(text))
            self.hang_up(f"send failed: {text}")
            return
        if error is not None:
            substitute = self._queue[0] = item.explain(error)
            self.queued_bytes += len(substitute)
            self.queued_bytes -= len(item.head) + item.left_bytes
            self._hold(len(substitute) - RANGE_HELD_BYTES)
            item.file.release()
        item.is_warm = True
        self._sent_s = self._clock.monotonic_s()
        self._flush()

    # -- the end ----------------------------------------------------------------------

    def _finish(self) -> None:
        """Send FIN, then discard input until the peer closes too."""
        self.state = ChannelState.LINGERING
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            self.hang_up(self._reason or f"shutdown failed: {error}")
            return
        self._readers.add_reader(self._fd, self._on_discard)
        self._is_reading = True
        self._linger = self._loop.call_later(self._linger_s, self.hang_up, self._reason)

    def _on_discard(self) -> None:
        try:
            size_bytes = self._sock.recv_into(_DISCARDED)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            size_bytes = 0
        self.received_bytes += size_bytes
        if not size_bytes:
            self.hang_up(self._reason)

    def _run_out(self) -> None:
        self.abort("no memory")

    def hang_up(self, reason: str) -> None:
        """Close at once and drop the queue; the peer sees the end of the stream."""
        if self.state is ChannelState.CLOSED:
            return
        self.state = ChannelState.CLOSED
        if self._linger is not None:
            self._linger.cancel()
        if self._is_reading:
            self._readers.remove_reader(self._fd)
        if self._is_writing:
            self._loop.remove_writer(self._fd)
        self._is_reading = self._is_writing = False
        self._sock.close()
        self._release_queue()
        self._on_closed(reason)

    def _release_queue(self) -> None:
        """Release ranges; a range being warmed is released when that is done."""
        for index, item in enumerate(self._queue):
            if isinstance(item, QueuedRange) and not (self._warming and not index):
                item.file.release()
        self._queue.clear()
        self.queued_bytes = 0
        self._hold(-self.held_bytes)


def _open_and_warm(item: QueuedRange) -> None:
    item.file.open()
    item.file.warm(item.position, item.left_bytes)


def _name_of(sock: socket.socket) -> str:
    try:
        address = sock.getpeername()
    except OSError:
        return "unknown"
    if not isinstance(address, tuple):
        return "local"
    return f"{str(address[0]).removeprefix('::ffff:')}:{address[1]}"
