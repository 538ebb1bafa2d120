"""Gets that wait for data (the extra token `wait=` of our clients).

A waiter ends in exactly one way, whatever happens first: data arrives, the log stops,
the time is over, its partition is closed, the connection ends, the broker stops. What
it answers is always the same: what the get would be answered now if it did not wait.

A get may wait for a log that does not exist yet, so waiters are kept by the name of
the log; the first put to a partition wakes those too.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from metaq.model import LogId, Offset
from metaq.protocol.commands import Get


class Handle(Protocol):
    """Something that was asked for and can be taken back."""

    def cancel(self) -> None:
        """Take it back; harmless when it happened already."""
        ...


class WaitableLog(Protocol):
    """What a waiter needs of a partition log."""

    def wait(self, offset: Offset, callback: Callable[[], None]) -> Handle:
        """Call back once when bytes at `offset` are readable or the log stops."""
        ...


class Waiter:
    """One get that waits. Owner: `Waiters`."""

    __slots__ = ("command", "finish", "handles", "log_id", "offset")

    def __init__(
        self, command: Get, offset: Offset, finish: Callable[["Waiter"], None]
    ) -> None:
        """Make a waiter; `Waiters.add` lets it wait.

        Args:
            command: the get; its offset and wait may differ from what is waited for.
            offset: where it wants data.
            finish: called once when the wait ends, unless it is cancelled.
        """
        self.command = command
        self.log_id = LogId(command.topic, command.partition)
        self.offset = offset
        self.finish = finish
        self.handles: list[Handle] = []


class Waiters:
    """All waiting gets of one broker. Used on the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._by_log: dict[LogId, set[Waiter]] = {}
        self._count = 0

    @property
    def count(self) -> int:
        """Return how many gets are waiting."""
        return self._count

    def add(self, waiter: Waiter, *, log: WaitableLog | None, wait_ms: int) -> None:
        """Let a get wait.

        Args:
            waiter: who waits.
            log: the log it reads; None when it does not exist yet.
            wait_ms: bound of the wait, milliseconds.
        """
        self._by_log.setdefault(waiter.log_id, set()).add(waiter)
        self._count += 1
        waiter.handles.append(self._loop.call_later(wait_ms / 1000, self.end, waiter))
        if log is not None:
            self._watch(waiter, log)

    def cancel(self, waiter: Waiter) -> None:
        """Forget a waiter without an answer: its connection is gone."""
        self._remove(waiter)

    def on_new_log(self, log_id: LogId, log: WaitableLog) -> None:
        """Let those who waited for a log to exist wait for its data."""
        for waiter in list(self._by_log.get(log_id, ())):
            self._watch(waiter, log)

    def end(self, waiter: Waiter) -> None:
        """End one wait now; harmless when it has ended."""
        if self._remove(waiter):
            waiter.finish(waiter)

    def end_log(self, log_id: LogId) -> None:
        """End the waits on one log now."""
        for waiter in list(self._by_log.get(log_id, ())):
            self.end(waiter)

    def end_topic(self, topic: str) -> None:
        """End the waits on every log of a topic now."""
        for log_id in [log_id for log_id in self._by_log if log_id.topic == topic]:
            self.end_log(log_id)

    def _watch(self, waiter: Waiter, log: WaitableLog) -> None:
        waiter.handles.append(log.wait(waiter.offset, lambda: self.end(waiter)))

    def _remove(self, waiter: Waiter) -> bool:
        waiters = self._by_log.get(waiter.log_id)
        if waiters is None or waiter not in waiters:
            return False
        waiters.remove(waiter)
        if not waiters:
            del self._by_log[waiter.log_id]
        self._count -= 1
        for handle in waiter.handles:
            handle.cancel()
        return True
