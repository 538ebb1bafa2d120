"""The thread that writes and syncs a directory in groups, and a watch over it.

Requests that arrive while the thread is writing are its next group: under load groups
grow until only the disk limits them. `storage/commit_owner.py` has one thread for each
data directory, `txn/journal.py` one for its journal.

A slow sync is logged when it ends. To detect one that does not end, the loop sends the
thread a question and waits for the answer; one question at a time, so that they do not
pile up.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Thread, get_ident
from typing import Final, Generic, Protocol, TypeAlias, TypeVar

R = TypeVar("R")
R_contra = TypeVar("R_contra", contravariant=True)

Task: TypeAlias = Callable[[], None]
"""Work of the thread between two groups, or of the loop; must handle its own errors."""

Post: TypeAlias = Callable[[Task], object]
"""Runs a task on the loop's thread, in the order of the calls; see `post_to`."""

RunRequests: TypeAlias = Callable[[Sequence[R]], bool]
"""Adds requests to those that wait and does one unit of work; must not raise. Returns
whether there is more to do."""

SILENCE_S_MAX: Final = 30.0
"""Time after which a thread without an answer counts as blocked by a hanging disk: a
group of maximum size takes less on a slow disk."""

SET_SILENCE_S_MAX: Final = 10.0
"""The same, where another copy can take over at once."""

_log = logging.getLogger(__name__)


def post_to(loop: asyncio.AbstractEventLoop) -> Post:
    """Return a function that runs tasks on a loop; call this on the loop's thread.

    The function may be called on any thread. On the loop's own thread it does not wake
    the loop: with `call_soon_threadsafe` each turn for which a group of puts waits
    would cost a send to itself.
    """
    own = get_ident()

    def post(task: Task) -> None:
        if get_ident() == own:
            loop.call_soon(task)
        else:
            loop.call_soon_threadsafe(task)

    return post


class Worker(Protocol[R_contra]):
    """Carries out requests in order, one unit of work at a time."""

    def start(self) -> None:
        """Start the worker."""

    def submit(self, *requests: R_contra) -> None:
        """Queue requests; never blocks."""

    def stop(self, *requests: R_contra) -> None:
        """Do all queued requests and then `requests`, and end. Never blocks."""


class GroupThread(Generic[R]):
    """A daemon thread for requests, which are submitted on its owner's thread.

    It is a daemon, because a hanging disk must not keep the process from ending after
    the broker has stopped waiting for it.
    """

    def __init__(
        self,
        name: str,
        run: RunRequests[R],
        on_idle: Callable[[int], object] = lambda _count: None,
    ) -> None:
        """Create the thread; `start` starts it.

        `on_idle` is called on it when all requests taken so far are done, with their
        number; not after the last ones, which `stop` was given.
        """
        self._run = run
        self._on_idle = on_idle
        # Unbounded: the broker bounds the bytes in flight and stops reading.
        self._queue: SimpleQueue[tuple[Sequence[R], bool]] = SimpleQueue()
        self._thread = Thread(target=self._run_thread, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, *requests: R) -> None:
        """Queue requests; never blocks."""
        self._queue.put((requests, False))

    def stop(self, *requests: R) -> None:
        """End the thread after all queued requests and `requests`; never blocks."""
        self._queue.put((requests, True))

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread after `stop`, at most `timeout_s` seconds."""
        self._thread.join(timeout_s)

    def _run_thread(self) -> None:
        is_last = has_more = False
        count = 0
        while has_more or not is_last:
            taken = [] if has_more else [self._queue.get()]
            # Only this thread removes requests, so a queue with some stays so.
            while not self._queue.empty():
                taken.append(self._queue.get())
            is_last = is_last or any(ends for _group, ends in taken)
            requests = [each for group, _ends in taken for each in group]
            count += len(requests)
            has_more = (bool(requests) or has_more) and self._run(requests)
            if not (has_more or is_last):
                self._on_idle(count)
            # Free the bytes of the group before waiting.
            del taken, requests


class SilenceWatch:
    """Detects that the thread of a directory does not answer. Owner: the loop."""

    def __init__(self, subject: str, path: Path) -> None:
        """Watch the thread of directory `path`; `subject` is its name in the log."""
        self.is_silent = False
        """Whether the thread has not answered for too long: the disk hangs."""
        self._subject = subject
        self._path = path
        self._asked_s: float | None = None
        """Time of the question that is not answered yet, or None."""
        self._answered_s = float("-inf")

    def tick(
        self,
        now_s: float,
        interval_s: float,
        ask: Callable[[], None],
        silence_s_max: float = SILENCE_S_MAX,
    ) -> None:
        """Send a question if the last answer is older than `interval_s`.

        Args:
            now_s: the monotonic clock.
            interval_s: seconds from an answer to the next question.
            ask: sends the question; the answer is a call of `on_answer` on the loop.
            silence_s_max: maximum time for an answer.
        """
        if self._asked_s is None:
            if now_s - self._answered_s >= interval_s:
                self._asked_s = now_s
                ask()
        elif not self.is_silent and now_s - self._asked_s > silence_s_max:
            self.is_silent = True
            _log.error("%s does not answer: directory=%s", self._subject, self._path)

    def on_answer(self, now_s: float) -> None:
        """Note that the thread has answered, asked or not."""
        self._answered_s, self._asked_s = now_s, None
        if self.is_silent:
            self.is_silent = False
            _log.warning("%s answers again: directory=%s", self._subject, self._path)


def warn_of_slow_sync(path: Path, took_s: float, slow_sync_ms: int) -> None:
    """Log a sync that took longer than `slow_sync_ms`."""
    if took_s * 1000 > slow_sync_ms:
        _log.warning("slow sync: file=%s duration_ms=%d", path, round(took_s * 1000))
