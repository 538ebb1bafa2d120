"""The one thread that writes and syncs a directory, in groups; its silence.

Requests that came while the thread was writing are its next group: under load the
groups grow until the disk is all that is waited for. `storage/commit_owner.py` has one
for each data directory, `txn/journal.py` one for its journal.

A sync that is slow is reported when it ends. One that does not end is noticed by a
question to the thread: one at a time, so that nothing piles up.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Final, Generic, Protocol, TypeAlias, TypeVar

R = TypeVar("R")
R_contra = TypeVar("R_contra", contravariant=True)

Post: TypeAlias = Callable[[Callable[[], None]], object]
"""Runs a callback on the loop's thread, in the order of the calls: what
`loop.call_soon_threadsafe` does."""

SILENCE_S_MAX: Final = 30.0
"""A thread that takes longer to answer waits for a disk that hangs: a group of the
largest size on a slow disk takes less."""

_log = logging.getLogger(__name__)


class Worker(Protocol[R_contra]):
    """Does the work of requests in their order, piece by piece."""

    def start(self) -> None:
        """Begin to work."""
        ...

    def submit(self, *requests: R_contra) -> None:
        """Queue requests; never blocks."""
        ...

    def stop(self) -> None:
        """Finish what is queued, then end; never blocks."""
        ...


class GroupThread(Generic[R]):
    """The thread. Requests are submitted on its owner's thread.

    It is a daemon: a disk that hangs for ever must not keep the process from ending
    once the broker has given up waiting for it.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[Sequence[R]], bool],
        on_idle: Callable[[int], object] = lambda _count: None,
    ) -> None:
        """Describe a thread that is not started yet.

        Args:
            name: of the thread.
            run: takes requests over and does one piece of work; returns whether there
                is more. Raises nothing.
            on_idle: called on the thread when all is done that it has taken, with the
                number of requests taken so far; not after `stop`.
        """
        self._run = run
        self._on_idle = on_idle
        # Unbounded here: the broker bounds the bytes in flight and stops reading.
        self._queue: SimpleQueue[Sequence[R] | None] = SimpleQueue()
        self._thread = Thread(target=self._run_thread, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, *requests: R) -> None:
        """Queue requests; never blocks."""
        self._queue.put(requests)

    def stop(self) -> None:
        """Let the thread end when the queue is empty."""
        self._queue.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread after `stop`, `timeout_s` seconds at most."""
        self._thread.join(timeout_s)

    def _run_thread(self) -> None:
        is_last = has_more = False
        count = 0
        while has_more or not is_last:
            taken = [] if has_more else [self._queue.get()]
            # Only this thread takes, so a queue that is not empty stays so.
            while not self._queue.empty():
                taken.append(self._queue.get())
            is_last = is_last or None in taken
            requests = [each for group in taken if group is not None for each in group]
            count += len(requests)
            has_more = (bool(requests) or has_more) and self._run(requests)
            if not (has_more or is_last):
                self._on_idle(count)
            # They hold the bytes of groups: let go before waiting.
            del taken, requests


class SilenceWatch:
    """Notices that the thread of a directory does not answer. Owner: the loop."""

    def __init__(self, subject: str, path: Path) -> None:
        """Watch the thread of a directory.

        Args:
            subject: of the lines in the log.
            path: the directory.
        """
        self.is_silent = False
        """The disk hangs: the thread has not answered for too long."""
        self._subject = subject
        self._path = path
        self._asked_s: float | None = None
        """Since when a question has been under way; None: none is."""
        self._answered_s = float("-inf")

    def tick(self, now_s: float, interval_s: float, ask: Callable[[], None]) -> None:
        """Ask when the last answer is older than `interval_s`, unless one is due.

        Args:
            now_s: the monotonic clock.
            interval_s: seconds from an answer to the next question.
            ask: has the thread call `on_answer` on the loop's thread.
        """
        if self._asked_s is None:
            if now_s - self._answered_s >= interval_s:
                self._asked_s = now_s
                ask()
        elif not self.is_silent and now_s - self._asked_s > SILENCE_S_MAX:
            self.is_silent = True
            _log.error("%s does not answer: directory=%s", self._subject, self._path)

    def on_answer(self, now_s: float) -> None:
        """Take note that the thread is not waiting; also unasked."""
        self._answered_s, self._asked_s = now_s, None
        if self.is_silent:
            self.is_silent = False
            _log.warning("%s answers again: directory=%s", self._subject, self._path)


def tell_slow_sync(path: Path, took_s: float, slow_sync_ms: int) -> None:
    """Warn of a sync that took longer than `slow_sync_ms`."""
    if took_s * 1000 > slow_sync_ms:
        _log.warning("slow sync: file=%s duration_ms=%d", path, round(took_s * 1000))
