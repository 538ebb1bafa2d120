"""The bounds that connections share: bytes in memory, and time on the loop.

A connection within its share pays nothing; one beyond its share waits, and the others
are served first.
"""

import logging
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

TURN_S: Final = 0.001
"""Longest time of one piece of work before others get their turn: a put that arrives
waits for one piece before it is read and for one before it is answered. Shorter pieces
make small groups for the disk: 0.3 ms slowed streams of small puts by a quarter."""

PACED_JOBS_MAX: Final = 256
"""Jobs that wait for their turns of paced work: a few seconds of it."""

PACED_BURST_S: Final = 0.01
"""Paced work may be so far ahead of its rate: timers are no finer."""

LARGE_READ_BYTES: Final = 16 * 1024
"""A larger read waits for its turn, so that puts received from others go to the disk
first."""

_log = logging.getLogger(__name__)


class Holder(Protocol):
    """A connection as the bound on memory sees it."""

    @property
    def peer(self) -> str:
        """Return `host:port` of its other side."""

    @property
    def held_bytes(self) -> int:
        """Return what waits for its peer: half a frame, and replies not read."""

    def drop(self, reason: str) -> None:
        """Close the connection and give its memory back."""


class Load:
    """Bytes that all connections hold in memory, under one bound.

    Three things count: puts and look-ups that were read and not yet answered, frames
    that have not arrived in full, and replies that have not left. The first wait for
    the disk; the rest waits for peers, which may never send or read. So the bound has
    three steps:

    * full: sessions stop reading, and are called when bytes are free again;
    * replies take half of it: a session goes on when its own have left;
    * what waits for peers takes all of it: the connection that holds most is closed.

    The last step is also taken when the process has no memory left.
    """

    def __init__(self, bytes_max: int) -> None:
        self._max = bytes_max
        self.in_flight_bytes = 0
        self.partial_bytes = 0
        self.reply_bytes = 0
        """Bytes of replies that have not left; bodies that stay in files do not
        count."""
        self.dropped_count = 0
        self._holders: set[Holder] = set()
        self._sleepers: list[Callable[[], None]] = []

    @property
    def is_full(self) -> bool:
        """Return whether sessions must stop reading."""
        return self.in_flight_bytes + self.partial_bytes + self.reply_bytes >= self._max

    @property
    def has_many_replies(self) -> bool:
        """Return whether sessions wait until their own replies have left."""
        return self.reply_bytes >= self._max // 2

    def join(self, holder: Holder) -> None:
        """Take a connection into account."""
        self._holders.add(holder)

    def leave(self, holder: Holder) -> None:
        """Forget a connection, which holds nothing any more."""
        self._holders.discard(holder)

    def hold(self, size_bytes: int) -> None:
        """Count bytes of puts, or of an answer, as in flight."""
        self.in_flight_bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        """Count bytes as answered; wake sleepers when there is room."""
        self.in_flight_bytes -= size_bytes
        if self._sleepers:
            self._wake()

    def add_partial(self, change_bytes: int) -> None:
        """Count received bytes of a frame that is not whole; less than 0: gone."""
        self.partial_bytes += change_bytes
        if self._sleepers:
            self._wake()

    def add_replies(self, change_bytes: int) -> None:
        """Count replies that were queued; less than 0: they have left."""
        self.reply_bytes += change_bytes
        if self._sleepers:
            self._wake()

    def call_when_room(self, wake: Callable[[], None]) -> None:
        """Call `wake` once, when bytes are gone and there is room."""
        self._sleepers.append(wake)

    def relieve(self, last: Holder) -> None:
        """Close the largest holders, `last` first among equals, until the rest fits."""
        while (held_bytes := self.partial_bytes + self.reply_bytes) >= self._max:
            self.drop(
                self._find_largest(last),
                f"expected less than {self._max} bytes that wait for peers,"
                f" got {held_bytes}",
            )

    def relieve_process(self, last: Holder) -> None:
        """Close who holds most: there is no memory to receive what `last` is sent."""
        self.drop(self._find_largest(last), "no memory to receive")

    def drop(self, holder: Holder, cause: str) -> None:
        """Close a connection for want of memory; each power of two is logged."""
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
    """Call back when the loop has served its sockets and their callbacks.

    A turn of the loop polls the sockets, runs what was scheduled before, then the
    callbacks of sockets and timers. With `call_soon` alone, two pieces of work run
    between the arrival of a put and its reading.
    """
    # Timers come after sockets, so this call comes after theirs.
    loop.call_later(0, loop.call_soon, call)


class Turns:
    """Work that one turn of the loop is too short for, continued turn by turn.

    One piece runs at a time, of any session: new input waits for one piece of TURN_S or
    little more, however many pieces are queued.
    """

    def __init__(self, call_soon: Callable[[Callable[[], None]], object]) -> None:
        """Run pieces with `call_soon`: see `call_after_sockets`."""
        self._call_soon = call_soon
        self._waiting: deque[Callable[[], None]] = deque()

    @property
    def is_busy(self) -> bool:
        """Return whether any piece waits."""
        return bool(self._waiting)

    def ask(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` once, when those who asked before had their turns."""
        self._waiting.append(go_on)
        if len(self._waiting) == 1:
            self._call_soon(self._run)

    def _run(self) -> None:
        go_on = self._waiting.popleft()
        if self._waiting:
            self._call_soon(self._run)
        go_on()


class PacedWork:
    """Jobs in turns, one after another, that look at so many bytes a second at most.

    The first step of a job that finds no other is taken within `add`.
    """

    def __init__(self, loop: AbstractEventLoop, turns: Turns, bytes_per_s: int) -> None:
        """Begin with nothing to do; `bytes_per_s` 0: there is never room."""
        self._loop = loop
        self._turns = turns
        self._bytes_per_s = bytes_per_s
        self._jobs: deque[Callable[[], bool]] = deque()
        self._due_s = 0.0
        self.turn_s = TURN_S
        """Longest time of one step of a job."""

    @property
    def has_room(self) -> bool:
        """Return whether another job would be done soon."""
        return self._bytes_per_s > 0 and len(self._jobs) < PACED_JOBS_MAX

    def spend(self, size_bytes: int) -> None:
        """Count bytes that a job has looked at."""
        start_s = max(self._due_s, self._loop.time())
        self._due_s = start_s + size_bytes / self._bytes_per_s

    def add(self, job: Callable[[], bool]) -> None:
        """Call `job` until it returns False; it raises nothing."""
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
