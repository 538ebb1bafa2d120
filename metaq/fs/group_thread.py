"""The one thread that writes and syncs a place on the disk, in groups.

Requests that came while the thread was writing are its next group: under load the
groups grow until the disk is all that is waited for. `storage/log_dir.py` has one for
each data directory, `txn/journal.py` one for its journal.

Many clients with one request each are read in one turn of their loop. A thread that is
handed each of them takes the interpreter from the loop again and again, for groups of a
few. So what comes while it is at work is handed over at the end of the turn, as one
group; a request that finds it idle does not wait, unless it is one of many that one
cause brings in one turn.
"""

from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Final, Generic, Protocol, TypeAlias, TypeVar

R = TypeVar("R")
R_contra = TypeVar("R_contra", contravariant=True)

Post: TypeAlias = Callable[[Callable[[], None]], object]
"""Runs a callback on the loop's thread, in the order of the calls: what
`loop.call_soon_threadsafe` does."""

REST_DELAY_S: Final = 0.001
"""How long nothing has to be queued before the thread does what was put off: longer
than a client takes from a reply to its next put."""


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
    ) -> None:
        """Describe a thread that is not started yet.

        Args:
            name: of the thread.
            run: takes requests over and does one piece of work; returns whether there
                is more. Raises nothing.
            rest: called when nothing has been queued for `REST_DELAY_S`.
            post: calls back in the next turn of the owner's loop; None: requests are
                handed over at once, also while the thread is at work.
        """
        self._run = run
        self._rest = rest
        self._post = post
        self._is_idle = True
        """A hint: neither is handed a request nor at work."""
        self._gathered: list[R] = []
        # Unbounded here: the broker bounds the bytes in flight and stops reading.
        self._queue: SimpleQueue[Sequence[R] | None] = SimpleQueue()
        self._thread = Thread(target=self._run_thread, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, request: R, *, joins: bool = False) -> None:
        """Queue a request and wake the thread, now or at the end of this turn."""
        is_wanted = self._is_idle and not joins and not self._gathered
        if self._post is None or is_wanted:
            self._is_idle = False
            self._queue.put((request,))
            return
        self._gathered.append(request)
        if len(self._gathered) == 1:
            self._post(self._hand_over)

    def stop(self) -> None:
        """Let the thread end when the queue is empty."""
        self._hand_over()
        self._queue.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread after `stop`, `timeout_s` seconds at most."""
        self._thread.join(timeout_s)

    def _hand_over(self) -> None:
        if self._gathered:
            gathered, self._gathered = self._gathered, []
            self._queue.put(gathered)

    def _run_thread(self) -> None:
        is_last = has_more = False
        while has_more or not is_last:
            taken = [] if has_more else [self._next()]
            # Only this thread takes, so a queue that is not empty stays so.
            while not self._queue.empty():
                taken.append(self._queue.get())
            is_last = is_last or None in taken
            requests = [each for some in taken if some is not None for each in some]
            if requests or has_more:
                has_more = self._run(requests)
            # They hold the bytes of groups: let go before waiting.
            del taken, requests

    def _next(self) -> Sequence[R] | None:
        self._is_idle = self._queue.empty()
        try:
            return self._queue.get(timeout=REST_DELAY_S)
        except Empty:
            self._rest()
            return self._queue.get()
        finally:
            self._is_idle = False
