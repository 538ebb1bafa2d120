"""The thread that commits to a data directory, and the loop's groups of single puts.

Theory of operation. The storage thread writes, syncs, rolls, creates and indexes
(`appender.py`). To wake it for one small put takes longer than the sync of a fast disk,
so while it has nothing to do the loop's thread may commit a group of single puts
itself: it writes them, has the kernel sync (`fs/kernel_syncs.py`), and reports. One of
the two works at any time, and `TRANSITIONS` says which:

                    HAND                       BEGIN
    THREAD  <-----------------  NONE    -----------------> LOOP
            ----------------->          <-----------------
                 REPORTED                      ENDED

* The thread is handed requests while it works, and the loop never takes over from it
  before every report of it was processed: the thread's last word on a turn is a post,
  and posts keep their order. Being done is not enough, as reports may come any number
  of turns late.
* What comes while the loop has a group under way waits for its end, and is the next
  group of one or the other. What comes while the thread works is handed over together,
  at the end of the turn: each hand-over takes the interpreter from the loop. Where
  the thread was given no other puts than single ones, those that come wait for its last
  report, and the loop takes over with them: else a thread that is never quite done
  would keep the directory, and commit one log after the other. A task is no reason for
  more: what comes after it waits for its end anyhow.
* Clients that were answered together send their next puts together, so what waits at
  the end of a loop's group is not begun at once: it would go without them, and they
  would wait for its sync. Up to `GATHER_TURNS` turns are given until as many puts
  wait as were answered and waited then. A client that is alone waits for nothing.
* A group that the loop commits takes a write and a sync of each log, and nothing else
  (`LogWriter.takes_small`). What goes wrong on the way is a task for the thread, which
  is handed before everything that came since: a sync that the kernel does not take, and
  a write to a full disk.
* A log that has copies elsewhere hears of the write, too: they are sent in the time of
  the sync.
* The loop writes to no disk that has synced nothing for `ALIVE_S`, nor to one that has
  just kept it waiting: a disk that hangs keeps the loop in one write at most. Free
  space and lock are looked at by the thread, so it has a group each second.

Invariant: writers and appender are touched by the owner alone.
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
"""Most bytes that the loop writes in one turn, some 20 µs."""

LOOP_LOGS_MAX: Final = 16
"""Most logs that they may be of: each is a write and a sync of its own."""

ALIVE_S: Final = 1.0
"""A disk that has synced nothing for so long may hang."""

HELD_UP_S: Final = 0.02
"""A disk that has kept the loop so long in one turn is the thread's for `ALIVE_S`: it
is written through, or was frozen, or has no memory left."""

GATHER_TURNS: Final = 8
"""Most turns of the loop that a group waits for the next puts: each takes what came."""


class Owner(enum.Enum):
    """Thread that may touch the writers of a directory."""

    NONE = "none"
    THREAD = "storage thread"
    LOOP = "loop"
    LOOP_LAST = "loop, then the thread ends"
    ENDED = "storage thread, until it ends"


class OwnerEvent(enum.Enum):
    """Event that may change the owner.

    The loop begins a group (BEGIN), and its last sync is done and reported (ENDED). The
    thread is handed requests (HAND), and has done all of them, with every report
    processed (REPORTED).
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
"""Part of a group that is of one log: its requests, and their bytes."""


class CommitOwner:
    """Hands the requests of a directory to one thread or the other. Owner: the loop."""

    def __init__(
        self,
        appender: Appender,
        start_worker: Callable[[Callable[[int], object]], Worker[Request]],
        clock: Clock,
        post: Post,
        syncs: Syncs | None,
    ) -> None:
        """Begin with no thread at work.

        Args:
            appender: what both threads carry out requests with.
            start_worker: makes the storage thread, given its `on_idle`.
            clock: for the time since a disk has answered.
            post: runs a callback in a later turn of the loop.
            syncs: on the loop's thread; None: all groups are the storage thread's.
        """
        self.owner = Owner.NONE
        self._appender = appender
        self._clock = clock
        self._post = post
        self._syncs = syncs
        self._worker = start_worker(lambda n: post(partial(self._on_reported, n)))
        # Requests that no thread was given yet, in their order.
        self._waiting: list[Request] = []
        # Turns of the loop until what waits is begun; 0: none is posted.
        self._turns_left = 0
        # Whether the thread was given no puts but single ones.
        self._is_brief = syncs is not None
        # Puts of the loop's last group, and of those that waited for its end: as many
        # may come together next.
        self._expected_count = 0.0
        self._handed_count = 0
        self._syncs_under_way = 0
        # Tasks of the loop's group that are for the thread.
        self._left: list[Request] = []
        # When a disk has kept the loop waiting last.
        self._held_up_s = float("-inf")

    @property
    def is_idle(self) -> bool:
        """Return whether everything that was submitted is done and reported."""
        return self.owner is Owner.NONE and not self._waiting

    def start(self) -> None:
        """Start the storage thread."""
        self._worker.start()

    def submit(self, request: Request, *, joins: bool = False) -> None:
        """Queue a request; never blocks.

        Args:
            request: what is to be done.
            joins: others come in this turn of the loop: they are handed over together.
        """
        self._waiting.append(request)
        if self._turns_left or self.owner not in (Owner.NONE, Owner.THREAD):
            return  # it is looked at later
        if self.owner is Owner.NONE and not joins:
            self._go_on()
        else:
            self._wait_turns(1)

    def stop(self, last: Request) -> None:
        """Have what is queued, and then `last`, done by the thread, which ends then."""
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
        """Return how many puts wait; infinity if anything else does, which is begun."""
        return sum(
            each.record_count if isinstance(each, AppendRequest) else float("inf")
            for each in self._waiting
        )

    def _go_on(self) -> None:
        """Begin a group of what waits, or hand it to the thread."""
        if not self._waiting:
            return
        if self.owner is Owner.THREAD and self._is_brief and _are_single(self._waiting):
            return  # begun after the thread's last report
        try:
            groups = self._plan(self._waiting) if self.owner is Owner.NONE else None
        except (MemoryError, NoSpaceError):
            groups = None  # no memory, and nothing has begun
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
        """Hand over all together, the end too: the last one's word may end the loop."""
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
        """Return what the loop commits of each log; None: it is for the thread.

        Raises:
            MemoryError: there is none for it now.
            NoSpaceError: likewise.
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
        """Write a group of one log, and begin its sync."""
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
            self._left.append(partial(appender.take_back, writer, receiver, error))
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
                deque(writer.cover(), maxlen=0)  # some µs, in the time of the sync
        else:
            self._left.append(partial(appender.sync, writer, receiver))

    def _on_ended(self) -> None:
        """Go on after the last sync of the loop's group."""
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
    """Return whether requests are of connections that wait for each reply."""
    return all(isinstance(each, AppendRequest) and each.is_single for each in requests)
