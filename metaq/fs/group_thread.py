"""The one thread that writes and syncs a place on the disk, in groups; its silence.

Requests that came while the thread was writing are its next group: under load the
groups grow until the disk is all that is waited for. `storage/log_dir.py` has one for
each data directory, `txn/journal.py` one for its journal.

Many clients with one request each are read in one turn of their loop. A thread that is
handed each of them takes the interpreter from the loop again and again, for groups of a
few. So what comes while it is at work is handed over at the end of the turn, as one
group; a request that finds it idle does not wait, unless it is one of many that one
cause brings in one turn.

A small group need not wake the thread at all: its owner can `begin` it on its own
thread, where the kernel does the waiting (`kernel_syncs.py`). One of the two is at work
at any time, whichever holds `_place`, and groups keep their order: the owner begins
none before the thread has done all that it was handed and every report of it has been
processed, and hands over none before what it began has ended.

A sync that is slow is told when it ends. One that does not end is noticed by a question
to the thread: one at a time, so that nothing piles up.
"""

import enum
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Final, Generic, Protocol, TypeAlias, TypeVar

R = TypeVar("R")
R_contra = TypeVar("R_contra", contravariant=True)

Post: TypeAlias = Callable[[Callable[[], None]], object]
"""Runs a callback on the loop's thread, in the order of the calls: what
`loop.call_soon_threadsafe` does."""

REST_DELAY_S: Final = 0.01
"""Time without a request before the thread does what was put off: longer
than a client takes from a reply to its next put."""

SILENCE_S_MAX: Final = 30.0
"""A thread that takes longer to answer waits for a disk that hangs: a group of the
largest size on a slow disk takes less."""

Begin: TypeAlias = Callable[[Sequence[R], Callable[[bool], None]], bool]
"""Begins the work of requests without waiting for it; False: it is the thread's, and
nothing was done. Its end is reported later, with whether the thread is to go on."""

_log = logging.getLogger(__name__)


class _Signal(enum.Enum):
    """Signal to the thread between groups."""

    WAKE = "wake"
    """There may be something to do when it rests."""
    END = "end"
    """Nothing follows."""


class Worker(Protocol[R_contra]):
    """Hands over requests in their order, and does the work piece by piece."""

    def start(self) -> None:
        """Begin to work."""
        ...

    def submit(self, request: R_contra, *, joins: bool = False) -> None:
        """Queue a request; never blocks.

        Args:
            request: what is to be done.
            joins: others come in this turn of the loop: they are handed over together.
        """
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
        rest: Callable[[], None],
        post: Post | None = None,
        begin: Begin[R] | None = None,
    ) -> None:
        """Describe a thread that is not started yet.

        Args:
            name: of the thread.
            run: takes requests over and does one piece of work; returns whether there
                is more. Raises nothing.
            rest: called when nothing has been queued for `REST_DELAY_S`.
            post: calls back in the next turn of the owner's loop; None: requests are
                handed over at once, also while the thread is at work.
            begin: begins groups on the owner's thread; None: all are the thread's.
        """
        self._run = run
        self._rest = rest
        self._post = post
        self._begin = begin
        self._place = Lock()
        """Held while `run`, `rest` or what was begun is at work."""
        self._handed_count = 0
        """Groups that the thread was handed; the owner's."""
        self._reported_count = 0
        """Groups that the thread has done, and the owner has heard all of; its own."""
        self._begun_count = 0
        """Groups that were begun on the owner's thread; the owner's."""
        self._is_begun = False
        """A group that was begun is under way."""
        self._is_resting = False
        """A hint: the thread has rested, and waits for a signal or a group."""
        self._is_stopped = False
        self._gathered: list[R] = []
        # Unbounded here: the broker bounds the bytes in flight and stops reading.
        self._queue: SimpleQueue[Sequence[R] | _Signal] = SimpleQueue()
        self._thread = Thread(target=self._run_thread, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, request: R, *, joins: bool = False) -> None:
        """Queue a request, for now or for the end of this turn."""
        if self._post is None or (not joins and not self._gathered and self._is_idle()):
            self._take((request,))
            return
        self._gathered.append(request)
        if len(self._gathered) == 1:
            self._post(self._hand_over)

    def stop(self) -> None:
        """Let the thread end when the queue is empty."""
        self._is_stopped = True
        if not self._is_begun:
            self._end()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread after `stop`, `timeout_s` seconds at most."""
        self._thread.join(timeout_s)

    def _is_idle(self) -> bool:
        # Not "the thread is done": what it has reported may wait for a later turn.
        return self._handed_count == self._reported_count and not self._is_begun

    def _on_reported(self, count: int) -> None:
        self._reported_count = count

    def _hand_over(self) -> None:
        # What comes while a group is begun is the next one.
        if self._gathered and not self._is_begun:
            gathered, self._gathered = self._gathered, []
            self._take(gathered)

    def _take(self, requests: Sequence[R]) -> None:
        """Begin a group, or hand it to the thread."""
        is_first = self._begin is not None and self._is_idle()
        # The thread may rest.
        if is_first and self._place.acquire(blocking=False):
            assert self._begin is not None
            self._is_begun = True
            self._begun_count += 1
            if self._begin(requests, self._on_end):
                return
            self._is_begun = False
            self._place.release()
        self._hand(requests)

    def _hand(self, requests: Sequence[R]) -> None:
        self._handed_count += 1
        self._queue.put(requests)

    def _on_end(self, has_more: bool) -> None:
        """Go on behind a group that was begun."""
        self._is_begun = False
        self._place.release()
        if has_more:
            self._hand(())
        if self._is_stopped:
            self._end()
        else:
            self._hand_over()
        if self._is_resting:
            self._is_resting = False
            self._queue.put(_Signal.WAKE)

    def _end(self) -> None:
        if self._gathered:
            gathered, self._gathered = self._gathered, []
            self._hand(gathered)
        self._queue.put(_Signal.END)

    def _run_thread(self) -> None:
        is_last = has_more = False
        count = 0
        while has_more or not is_last:
            taken = [] if has_more else [self._next()]
            # Only this thread takes, so a queue that is not empty stays so.
            while not self._queue.empty():
                taken.append(self._queue.get())
            is_last = is_last or _Signal.END in taken
            groups = [each for each in taken if not isinstance(each, _Signal)]
            count += len(groups)
            if groups or has_more:
                with self._place:
                    has_more = self._run([each for group in groups for each in group])
            # After the last work the owner's loop may be gone.
            if self._post is not None and not (has_more or is_last):
                self._post(partial(self._on_reported, count))
            # They hold the bytes of groups: let go before waiting.
            del taken, groups

    def _next(self) -> Sequence[R] | _Signal:
        while True:
            begun_count = self._begun_count
            try:
                return self._queue.get(timeout=REST_DELAY_S)
            except Empty:
                pass
            if self._begun_count != begun_count:
                continue
            with self._place:
                self._rest()
            # Said before it looks: what is begun behind the look wakes it.
            self._is_resting = True
            if self._begun_count == begun_count:
                return self._queue.get()
            self._is_resting = False


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
