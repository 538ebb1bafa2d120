"""The thread that commits to a data directory, and the loop's commits of single puts.

Theory of operation. The storage thread writes, syncs, rolls, creates and indexes
(`appender.py`). Waking it for one small put takes longer than the sync of a fast disk.
So while it is idle the loop's thread may commit a group of single puts itself: it
writes them, has the kernel sync them (`fs/kernel_syncs.py`), and reports. Only one of
the two works at any time, as `TRANSITIONS` says:

                    HAND                       BEGIN
    THREAD  <-----------------  NONE    -----------------> LOOP
            ----------------->          <-----------------
                 REPORTED                      ENDED

* The thread may be handed requests while it works. The loop takes over only after every
  report of the thread was processed: the last thing of a turn of the thread is a post,
  and posts keep their order. An idle thread is not enough, because its reports may
  arrive any number of turns of the loop later.
* Requests that come while the loop commits a group wait for its end, and form the next
  group, of either thread. Requests that come while the thread works are handed over
  together, at the end of the loop's turn, because each hand-over takes the interpreter
  from the loop. If the thread was given no puts but single ones, further single puts
  wait for its last report, and the loop takes over with them: otherwise a thread that
  is never quite idle would keep the directory, and commit one log after the other. A
  task does not change that: requests after it wait for its end anyway.
* Clients that are answered together send their next puts together. So requests that
  wait at the end of a loop's group are not committed at once: the next puts would miss
  the group and wait for its sync. The loop waits up to `GATHER_TURNS` turns, until as
  many puts are queued as were answered and waited then. A lone client never waits.
* A group committed by the loop consists of one write and one sync of each log, and
  nothing else (`LogWriter.takes_small`). Failures on the way become tasks for the
  thread, handed over before later requests: a sync that the kernel does not accept, and
  a write to a full disk.
* For a log with copies the write is reported too, so that it is sent during the sync.
* The loop does not write to a disk that has synced nothing for `ALIVE_S`, or that has
  just blocked it: a hanging disk blocks the loop in one write at most. The thread
  checks free space and lock, so it gets a group each second.

Invariant: only the owner touches writers and appender.
"""

import enum
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from metaq.clock import Clock
from metaq.errors import DiskError, NoSpaceError
from metaq.fs import Buffer
from metaq.fs.group_thread import Post, Worker
from metaq.fs.kernel_syncs import Syncs
from metaq.storage.append_request import AppendRequest, Request
from metaq.storage.appender import FREE_SPACE_REFRESH_S, Appender, gathered
from metaq.storage.log_writer import LogWriter

LOOP_BYTES_MAX: Final = 128 * 1024
"""Maximum number of bytes that the loop writes in one turn, some 20 µs."""

LOOP_LOGS_MAX: Final = 16
"""Maximum number of logs in a group of the loop: each takes a write and a sync."""

ALIVE_S: Final = 1.0
"""A disk that has synced nothing for this long may hang."""

HELD_UP_S: Final = 0.02
"""A disk that has blocked the loop for longer in one turn is left to the thread for
`ALIVE_S`: it writes through, was frozen, or the kernel lacks memory."""

GATHER_TURNS: Final = 8
"""Maximum number of the loop's turns for which a group waits for the next puts."""


class Owner(enum.Enum):
    """Thread that may touch the writers of a directory."""

    NONE = "none"
    THREAD = "storage thread"
    LOOP = "loop"
    LOOP_LAST = "loop, then the thread ends"
    ENDED = "storage thread, until it ends"


class OwnerEvent(enum.Enum):
    """Event that may change the owner.

    BEGIN: the loop begins a group. ENDED: the last sync of that group is reported.
    HAND: requests are handed to the thread. REPORTED: the thread has done all of them,
    and every report was processed. STOP: no requests will follow.
    """

    BEGIN = "begin"
    ENDED = "ended"
    HAND = "hand over"
    REPORTED = "reported"
    STOP = "stop"


TRANSITIONS: Final = {
    (Owner.NONE, OwnerEvent.BEGIN): Owner.LOOP,
    (Owner.NONE, OwnerEvent.HAND): Owner.THREAD,
    (Owner.NONE, OwnerEvent.STOP): Owner.ENDED,
    (Owner.THREAD, OwnerEvent.HAND): Owner.THREAD,
    (Owner.THREAD, OwnerEvent.REPORTED): Owner.NONE,
    (Owner.THREAD, OwnerEvent.STOP): Owner.ENDED,
    (Owner.LOOP, OwnerEvent.ENDED): Owner.NONE,
    (Owner.LOOP, OwnerEvent.STOP): Owner.LOOP_LAST,
    (Owner.LOOP_LAST, OwnerEvent.ENDED): Owner.ENDED,
}


_Group = tuple[list[AppendRequest], Sequence[Buffer]]
"""The part of a group that belongs to one log: its requests and their bytes."""


class CommitOwner:
    """Gives the requests of a directory to one of two threads. Owner: the loop."""

    def __init__(
        self,
        appender: Appender,
        start_worker: Callable[[Callable[[int], object]], Worker[Request]],
        clock: Clock,
        post: Post,
        syncs: Syncs | None,
    ) -> None:
        """Start in state NONE: neither thread is at work.

        Args:
            appender: carries out requests, for both threads.
            start_worker: makes the storage thread, given its `on_idle`.
            clock: measures the time since the disk last answered.
            post: runs a callback in a later turn of the loop.
            syncs: kernel syncs of the loop's thread; None: the storage thread commits
                all groups.
        """
        self.owner = Owner.NONE
        self._appender = appender
        self._clock = clock
        self._post = post
        self._syncs = syncs
        self._worker = start_worker(lambda n: post(partial(self._on_reported, n)))
        # Requests not yet given to either thread, in order.
        self._waiting: list[Request] = []
        # Turns of the loop until waiting requests are begun; 0: no callback is posted.
        self._turns_left = 0
        # Whether the thread was given no puts but single ones.
        self._is_brief = syncs is not None
        # Puts of the loop's last group plus puts that waited for its end: as many may
        # arrive together next.
        self._expected_count = 0.0
        self._handed_count = 0
        self._syncs_under_way = 0
        # Tasks for the thread that the loop's group has left.
        self._left: list[Request] = []
        # Time when a disk last blocked the loop, monotonic.
        self._held_up_s = float("-inf")

    @property
    def is_idle(self) -> bool:
        """Return whether all submitted requests are done and reported."""
        return self.owner is Owner.NONE and not self._waiting

    def start(self) -> None:
        """Start the storage thread."""
        self._worker.start()

    def submit(self, request: Request, *, joins: bool = False) -> None:
        """Queue a request; never blocks.

        Args:
            request: the request.
            joins: more requests come in this turn of the loop; hand them over together.
        """
        self._waiting.append(request)
        if self._turns_left or self.owner not in (Owner.NONE, Owner.THREAD):
            return  # `_end_turn`, `_on_reported` or `_on_ended` continues
        if self.owner is Owner.NONE and not joins:
            self._go_on()
        else:
            self._wait_turns(1)

    def stop(self, last: Request) -> None:
        """Have the thread do the queued requests, then `last`, and end."""
        self._waiting.append(last)
        self._apply(OwnerEvent.STOP)
        if self.owner is Owner.ENDED:
            self._end_worker()

    def _apply(self, event: OwnerEvent) -> None:
        self.owner = TRANSITIONS[self.owner, event]

    def _wait_turns(self, count: int) -> None:
        self._turns_left = count
        self._post(self._end_turn)

    def _end_turn(self) -> None:
        turns_left, self._turns_left = self._turns_left - 1, 0
        if turns_left and self._count_puts() < self._expected_count:
            self._wait_turns(turns_left)
        elif self.owner in (Owner.NONE, Owner.THREAD):
            self._go_on()

    def _count_puts(self) -> float:
        """Return the number of waiting puts; infinity if a task waits."""
        return sum(
            each.record_count if isinstance(each, AppendRequest) else float("inf")
            for each in self._waiting
        )

    def _go_on(self) -> None:
        """Begin a group of the waiting requests, or hand them to the thread."""
        if not self._waiting:
            return
        if self.owner is Owner.THREAD and self._is_brief and _are_single(self._waiting):
            return  # begun after the thread's last report
        try:
            groups = self._plan(self._waiting) if self.owner is Owner.NONE else None
        except (MemoryError, NoSpaceError):
            groups = None  # not enough memory, and nothing has begun
        if groups is None:
            self._apply(OwnerEvent.HAND)
            self._hand()
        else:
            self._apply(OwnerEvent.BEGIN)
            self._waiting = []
            self._begin(groups)

    def _hand(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._is_brief = self._is_brief and not any(
            isinstance(each, AppendRequest) and not each.is_single for each in waiting
        )
        self._handed_count += len(waiting)
        self._worker.submit(*waiting)

    def _end_worker(self) -> None:
        """Hand over all requests together with the end: the last may end the loop."""
        self._worker.stop(*self._waiting)
        self._waiting = []

    def _on_reported(self, count: int) -> None:
        if self.owner is Owner.THREAD and count == self._handed_count:
            self._apply(OwnerEvent.REPORTED)
            self._is_brief = self._syncs is not None
            if not self._turns_left:
                self._go_on()

    # -- the loop's groups

    def _plan(self, requests: Sequence[Request]) -> dict[LogWriter, _Group] | None:
        """Return the loop's group, by log; None: the thread has to commit.

        Raises:
            MemoryError: there is not enough memory now.
            NoSpaceError: the same.
        """
        now_s, appender = self._clock.monotonic_s(), self._appender
        if (
            self._syncs is None
            or appender.is_offline
            or now_s - appender.alive_s >= ALIVE_S
            or now_s - appender.free_space_s >= FREE_SPACE_REFRESH_S
            or now_s - self._held_up_s < ALIVE_S
        ):
            return None
        size_bytes = 0
        groups: dict[LogWriter, list[AppendRequest]] = {}
        for each in requests:
            if (
                not isinstance(each, AppendRequest)
                or not each.is_single
                or not each.is_current
            ):
                return None
            size_bytes += each.size_bytes
            groups.setdefault(each.writer, []).append(each)
        if size_bytes > LOOP_BYTES_MAX or len(groups) > LOOP_LOGS_MAX:
            return None
        for writer, group in groups.items():
            batch_count = sum(len(each.batches) for each in group)
            if not writer.takes_small(batch_count=batch_count, now_s=now_s):
                return None
        return {
            writer: (group, gathered(group, sum(r.size_bytes for r in group)))
            for writer, group in groups.items()
        }

    def _begin(self, groups: dict[LogWriter, _Group]) -> None:
        start_s = self._clock.monotonic_s()
        self._expected_count = 0
        for writer, group in groups.items():
            self._appender.guarded(self._commit, writer, group)
        end_s = self._clock.monotonic_s()
        if end_s - start_s > HELD_UP_S:
            self._held_up_s = end_s
        if not self._syncs_under_way:
            self._on_ended()

    def _commit(self, writer: LogWriter, group: _Group) -> None:
        """Write the group of one log, and begin its sync."""
        assert self._syncs is not None, "a group was planned"
        appender, (requests, chunks) = self._appender, group
        record_count = sum(each.record_count for each in requests)
        self._expected_count += record_count
        assert requests[0].offset == writer.end, (requests[0].offset, writer.end)
        receiver = requests[0].receiver
        try:
            writer.write_small(
                chunks,
                record_count=record_count,
                last_id=max(each.last_id for each in requests),
                batches=[batch for each in requests for batch in each.batches],
            )
        except NoSpaceError as error:
            self._left.append(partial(appender.cut_off, writer, receiver, error))
            return
        appender.unindexed.add(writer)

        def on_synced(error: DiskError | None) -> None:
            appender.report_sync(writer, receiver, error)
            self._syncs_under_way -= 1
            if not self._syncs_under_way:
                self._on_ended()

        if writer.begin_sync(self._syncs, on_synced):
            self._syncs_under_way += 1
            receiver.on_written(writer.end)
            if writer.is_cover_due and not writer.is_index_due:
                deque(writer.cover(), maxlen=0)  # some µs, during the sync
        else:
            self._left.append(partial(appender.sync, writer, receiver))

    def _on_ended(self) -> None:
        """Continue after the last sync of the loop's group."""
        self._apply(OwnerEvent.ENDED)
        self._expected_count += self._count_puts()
        left, self._left = self._left, []
        self._waiting[:0] = left
        if self.owner is Owner.ENDED:
            self._end_worker()
        elif self._expected_count > 1 and not left:
            self._wait_turns(GATHER_TURNS)
        else:
            self._go_on()


def _are_single(requests: Sequence[Request]) -> bool:
    """Return whether all requests are single puts; see `AppendRequest.is_single`."""
    return all(isinstance(each, AppendRequest) and each.is_single for each in requests)
