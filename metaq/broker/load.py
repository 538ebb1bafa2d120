"""Bounds that all connections share: bytes in memory, and time on the loop.

A connection that exceeds its share waits, and the others are served first.
"""

import logging
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

TURN_S: Final = 0.001
"""Maximum duration of one piece of work, in seconds. A new put waits for one piece
before it is read and for one before it is answered. Shorter pieces make smaller groups
for the disk: 0.3 ms slowed streams of small puts by a quarter."""

PACED_JOBS_MAX: Final = 256
"""Maximum number of jobs of paced work: a few seconds of it."""

PACED_BURST_S: Final = 0.01
"""Time by which paced work may be ahead of its rate, in seconds; timers vary so."""

LARGE_READ_BYTES: Final = 16 * 1024
"""Size above which a read waits for its turn, so that puts already received from others
are written first."""

_log = logging.getLogger(__name__)


class Holder(Protocol):
    """Connection interface used by the bound on memory."""

    @property
    def peer(self) -> str:
        """Return `host:port` of its other side."""

    @property
    def held_bytes(self) -> int:
        """Return the bytes of its incomplete frame and its unsent replies."""

    def drop(self, reason: str) -> None:
        """Close the connection and free its memory."""


class Load:
    """Bytes that all connections hold in memory, under one bound.

    Three kinds are counted: puts and look-ups in flight, incomplete frames, and unsent
    replies. The first wait for the disk; the others wait for peers, which may never
    send or read. So there are three limits:

    * the bound is reached: sessions stop reading until bytes are released;
    * replies hold half of it: sessions also wait until their own replies are sent;
    * frames and replies hold all of it: the connection that holds most is closed.

    That connection is also closed if the process runs out of memory.
    """

    def __init__(self, bytes_max: int) -> None:
        self._max = bytes_max
        self.in_flight_bytes = 0
        self.partial_bytes = 0
        self.reply_bytes = 0
        """Bytes of unsent replies; bodies sent from files do not count."""
        self.dropped_count = 0
        self._holders: set[Holder] = set()
        self._sleepers: list[Callable[[], None]] = []

    @property
    def is_full(self) -> bool:
        """Return whether sessions must stop reading."""
        return self.in_flight_bytes + self.partial_bytes + self.reply_bytes >= self._max

    @property
    def has_many_replies(self) -> bool:
        """Return whether sessions must first have their own replies sent."""
        return self.reply_bytes >= self._max // 2

    def join(self, holder: Holder) -> None:
        """Add a connection."""
        self._holders.add(holder)

    def leave(self, holder: Holder) -> None:
        """Remove a connection, which must hold nothing any more."""
        self._holders.discard(holder)

    def hold(self, size_bytes: int) -> None:
        """Count bytes of puts, or of an answer, as in flight."""
        self.in_flight_bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        """Count bytes as answered; wake waiting sessions below the bound."""
        self.in_flight_bytes -= size_bytes
        if self._sleepers:
            self._wake()

    def add_partial(self, change_bytes: int) -> None:
        """Add to the bytes of incomplete frames; a negative change releases them."""
        self.partial_bytes += change_bytes
        if self._sleepers:
            self._wake()

    def add_replies(self, change_bytes: int) -> None:
        """Add to the bytes of unsent replies; a negative change releases them."""
        self.reply_bytes += change_bytes
        if self._sleepers:
            self._wake()

    def call_when_room(self, wake: Callable[[], None]) -> None:
        """Call `wake` once, after bytes were released and the bound is not reached."""
        self._sleepers.append(wake)

    def relieve(self, last: Holder) -> None:
        """Close the largest holders (among equals `last`) until the bound is kept."""
        while (held_bytes := self.partial_bytes + self.reply_bytes) >= self._max:
            self.drop(
                self._find_largest(last),
                f"expected less than {self._max} bytes that wait for peers,"
                f" got {held_bytes}",
            )

    def relieve_process(self, last: Holder) -> None:
        """Close the largest holder: there is no memory to receive for `last`."""
        self.drop(self._find_largest(last), "no memory to receive")

    def drop(self, holder: Holder, cause: str) -> None:
        """Close a connection to free memory; log when the count is a power of two."""
        self.dropped_count += 1
        if self.dropped_count & (self.dropped_count - 1) == 0:
            _log.warning(
                "connection closed for memory: peer=%s held_bytes=%d dropped=%d"
                " cause=%s",
                holder.peer,
                holder.held_bytes,
                self.dropped_count,
                cause,
            )
        holder.drop(cause)

    def _find_largest(self, last: Holder) -> Holder:
        return max(self._holders, key=lambda each: (each.held_bytes, each is last))

    def _wake(self) -> None:
        if not self.is_full:
            sleepers, self._sleepers = self._sleepers, []
            for wake in sleepers:
                wake()


def call_after_sockets(loop: AbstractEventLoop, call: Callable[[], None]) -> None:
    """Call `call` after the loop has polled its sockets and run their callbacks.

    A turn of the loop polls the sockets, runs what was scheduled before, then the
    callbacks of sockets and timers. With `call_soon` alone, two pieces of work would
    run between the arrival of a put and its reading.
    """
    # Timers run after sockets, so this call is scheduled after theirs.
    loop.call_later(0, loop.call_soon, call)


class Turns:
    """Queue of work that is too long for one turn of the loop.

    One piece, of any session, runs in a turn: new input waits for about TURN_S, however
    many pieces are queued.
    """

    def __init__(self, call_soon: Callable[[Callable[[], None]], object]) -> None:
        """Run pieces with `call_soon`: see `call_after_sockets`."""
        self._call_soon = call_soon
        self._waiting: deque[Callable[[], None]] = deque()

    @property
    def is_busy(self) -> bool:
        """Return whether any piece is queued."""
        return bool(self._waiting)

    def ask(self, go_on: Callable[[], None]) -> None:
        """Queue `go_on`; it is called once, in a later turn."""
        self._waiting.append(go_on)
        if len(self._waiting) == 1:
            self._call_soon(self._run)

    def _run(self) -> None:
        go_on = self._waiting.popleft()
        if self._waiting:
            self._call_soon(self._run)
        go_on()


class PacedWork:
    """Queue of jobs with a limit on the bytes per second that they process.

    Jobs run one after another, each in steps. `add` itself runs the first step if no
    other job is queued and the rate allows it.
    """

    def __init__(self, loop: AbstractEventLoop, turns: Turns, bytes_per_s: int) -> None:
        """Create an empty queue; `bytes_per_s` 0: it takes no jobs."""
        self._loop = loop
        self._turns = turns
        self._bytes_per_s = bytes_per_s
        self._jobs: deque[Callable[[], bool]] = deque()
        self._due_s = 0.0
        self.turn_s = TURN_S
        """Maximum duration of one step of a job, in seconds."""

    @property
    def has_room(self) -> bool:
        """Return whether another job may be added."""
        return self._bytes_per_s > 0 and len(self._jobs) < PACED_JOBS_MAX

    def spend(self, size_bytes: int) -> None:
        """Count bytes that a job has processed."""
        start_s = max(self._due_s, self._loop.time())
        self._due_s = start_s + size_bytes / self._bytes_per_s

    def add(self, job: Callable[[], bool]) -> None:
        """Add a job: `job` is called until it returns False, and must not raise."""
        self._jobs.append(job)
        if len(self._jobs) == 1:
            self._ask_when_due(self._run)

    def _ask_when_due(self, ask: Callable[[], None]) -> None:
        late_s = self._due_s - self._loop.time()
        if late_s > PACED_BURST_S:
            self._loop.call_later(late_s, self._run)
        else:
            ask()

    def _run(self) -> None:
        if not self._jobs[0]():
            self._jobs.popleft()
        if self._jobs:
            self._ask_when_due(lambda: self._turns.ask(self._run))
