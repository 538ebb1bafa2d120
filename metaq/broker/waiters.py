"""Gets that wait for data (the extra token `wait=` of our clients).

A wait ends when data arrives, the log stops, the time is over, the partition is closed,
the connection ends or the broker stops. The get is then answered as one without a wait
would be.

A get may wait for a log that does not exist yet, so waiters are kept by the log's name;
the first put to a partition wakes them.

Thousands may wait for one offset or one moment. The event that ends their waits moves
them to a queue in one step, and the queue is processed turn by turn. Its first piece is
processed in the call that reports the event, so a single waiter is not delayed.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from metaq.broker.load import TURN_S, Turns
from metaq.model import LogId, Offset
from metaq.protocol.commands import Get
from metaq.storage.log_state import WaitHandle
from metaq.storage.partition_log import PartitionLog

TICK_S: Final = 0.005
"""Interval of the times at which waits end, so that thousands share a timer."""


class Waiter:
    """One waiting get. Owned by `Waiters`."""

    __slots__ = ("at_place", "at_tick", "command", "finish", "log_id", "offset")

    def __init__(
        self, command: Get, offset: Offset, finish: Callable[["Waiter"], None]
    ) -> None:
        """Create a waiter for data at `offset`; `finish` is called once at the end.

        Offset and duration of the wait may differ from those in the command.
        """
        self.command = command
        self.log_id = LogId(command.topic, command.partition)
        self.offset = offset
        self.finish = finish
        self.at_place: _Group | None = None
        self.at_tick: _Group | None = None


class _Group:
    """Waiters for one offset or one moment, in the order of arrival."""

    __slots__ = ("_forget", "_is_closed", "handle", "waiters")

    def __init__(self, forget: Callable[[], object]) -> None:
        self._forget = forget
        self._is_closed = False
        self.waiters: dict[Waiter, None] = {}
        self.handle: asyncio.TimerHandle | WaitHandle | None = None

    def remove(self, waiter: Waiter) -> None:
        """Remove a waiter; removing the last one closes the group."""
        del self.waiters[waiter]
        if not self.waiters:
            self.close()

    def close(self) -> None:
        """Accept no more waiters and cancel the event; may be called twice."""
        if not self._is_closed:
            self._is_closed = True
            self._forget()
            if self.handle is not None:
                self.handle.cancel()


class Waiters:
    """All waiting gets of one broker. Used on the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, turns: Turns) -> None:
        self._loop = loop
        self._turns = turns
        self._by_place: dict[tuple[LogId, Offset], _Group] = {}
        self._by_tick: dict[int, _Group] = {}
        self._due: deque[Waiter] = deque()
        self._is_ending = False
        self.count = 0

    def add(self, waiter: Waiter, *, log: PartitionLog | None, wait_ms: int) -> None:
        """Add a waiting get; `log` is None if it does not exist yet."""
        self.count += 1
        waiter.at_tick = self._tick_after(wait_ms)
        waiter.at_tick.waiters[waiter] = None
        place = (waiter.log_id, waiter.offset)
        group = self._by_place.get(place)
        if group is not None:
            waiter.at_place = group
            group.waiters[waiter] = None
            return
        group = _Group(partial(self._by_place.pop, place))
        self._by_place[place] = waiter.at_place = group
        group.waiters[waiter] = None
        if log is not None:
            self._watch(group, waiter.offset, log)

    def on_new_log(self, log_id: LogId, log: PartitionLog) -> None:
        """Have the waiters for a new log wait for its data."""
        group = self._by_place.get((log_id, Offset(0)))
        if group is not None:
            self._watch(group, Offset(0), log)

    def end_all(self, waiters: Iterable[Waiter]) -> None:
        """End many waits, the first ones now; waits that have ended are ignored."""
        self._due.extend(waiters)
        if not self._is_ending:
            self._is_ending = True
            self._end_due()

    def end_topic(self, topic: str) -> None:
        """End the waits on every log of a topic."""
        for (log_id, _), group in list(self._by_place.items()):
            if log_id.topic == topic:
                self.end_all(group.waiters)

    def _end_due(self) -> None:
        """End as many due waits as one turn has time for."""
        due, now_s = self._due, self._loop.time
        turn_ends_s = now_s() + TURN_S
        try:
            while due:
                waiter = due.popleft()
                if self._remove(waiter):
                    waiter.finish(waiter)
                if now_s() >= turn_ends_s:
                    break
        finally:
            # Also after an error, or no other wait would ever end.
            self._is_ending = bool(due)
            if due:
                self._turns.ask(self._end_due)

    def _tick_after(self, wait_ms: int) -> _Group:
        """Return the group of the first tick after a wait that begins now."""
        number = math.ceil((self._loop.time() + wait_ms / 1000) / TICK_S)
        tick = self._by_tick.get(number)
        if tick is None:
            tick = self._by_tick[number] = _Group(partial(self._by_tick.pop, number))
            tick.handle = self._loop.call_at(number * TICK_S, self._end_group, tick)
        return tick

    def _watch(self, group: _Group, offset: Offset, log: PartitionLog) -> None:
        group.handle = log.wait(offset, partial(self._end_group, group))

    def _end_group(self, group: _Group) -> None:
        group.close()
        self.end_all(group.waiters)

    def _remove(self, waiter: Waiter) -> bool:
        """Remove a waiter; return whether it was still waiting."""
        if waiter.at_place is None or waiter.at_tick is None:
            return False
        waiter.at_place.remove(waiter)
        waiter.at_tick.remove(waiter)
        waiter.at_place = waiter.at_tick = None
        self.count -= 1
        return True
