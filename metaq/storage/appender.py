"""Group commit: the cycle of the storage thread.

Theory of operation. A data directory has one storage thread, which runs this cycle:

    accept requests  →  one group: write, sync  →  report  →  index  →  roll if full
           ↑                                                                    |
           └─────────────────── others queue ←──────────────────────────────────┘

* A group is the queued appends of one log, up to `GROUP_BYTES_MAX`: one write and one
  sync. Logs take turns (`GroupQueue`), and new requests are accepted before each turn.
  So a put waits for at most one group of each busy log, however much is queued there;
  a put of a connection with little in flight waits for fewer. A larger single append is
  written and synced in steps, one step a turn.
* Appends are committed in the order in which the loop made them. A task (a timed sync,
  a close) is a barrier: earlier requests are committed before it, later ones wait.
* Everything is reported to the loop with `post`, in the order it happened, and only
  with values. A `WriterProgress` says how far a log is written and synced; the loop's
  side knows which appends that answers. Nothing runs between a sync and its report.
  Small groups of a log with copies are also reported after the write, so that they are
  sent during the sync. Large groups are not, so that copies get few, large messages.
* Logs that get their first append are created together, `NEW_LOGS_MAX` at a time: each
  directory is synced, but the first sync does most of the work for all of them.
* The span index is written after the report, in a turn of its own; small groups are
  indexed later (`index_later`). Their checksum is also computed later, because a loop
  that has a reply to send needs the interpreter. After a kill whole records, fewer
  bytes than a span, have no entry; recovery keeps them.
* A roll happens after the report, so that no put waits for it, but before the next
  write of that log. If the disk is full, the next write tries again.
* If the disk is full (`NoSpaceError`), the group and all later queued appends of that
  log are refused, because their offsets assume that the group is stored. The writer's
  version grows. Requests of an older version are dropped here without a report: the
  loop's side failed them when it received the refusal.
* Before a group is acknowledged, the thread checks that its segment still has its name,
  and with the free space that the lock is still ours; each at most once a second.
* Any other failure takes the directory offline: it is posted once, and later requests
  are dropped; the loop's side fails everything in flight. Nothing is retried: after a
  failed sync the page cache shows bytes that the disk does not have.

While the storage thread is idle, the loop's thread may commit groups of single puts;
the two never commit at the same time (table in `commit_owner.py`).

Invariants: the reported high watermark of a log is never beyond its last successful
sync; a request is answered exactly once, by a `WriterProgress`, a refusal or the
directory going offline. Keep in step: `partition_log.py`, which receives the posts.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count, islice
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

from metaq.clock import Clock
from metaq.errors import DiskError, NoSpaceError, StorageError
from metaq.fs import Buffer, FileSystem
from metaq.fs.group_thread import Post, Task
from metaq.model import Offset, SizeBytes
from metaq.storage.append_request import (
    AppendReceiver,
    AppendRequest,
    Request,
    WriterProgress,
)
from metaq.storage.holdings import Holdings
from metaq.storage.inventory import is_harmless, try_write_holdings, write_holdings
from metaq.storage.log_writer import GROUP_BYTES_MAX, LogWriter, create_segments
from metaq.storage.producers import StoredBatch

FREE_SPACE_REFRESH_S: Final = 1.0
"""Minimum time between two free-space checks; in between, written bytes are counted."""

CHUNK_BYTES_MIN: Final = 16 * 1024
"""Chunks with a smaller mean size are joined: one system call takes few chunks."""

SIDE_SYNC_S_MAX: Final = 1.0
"""Time limit for syncs of indexes and producer files at a stop. With thousands of
partitions the rest is left to the kernel, because a stop is bounded too."""

NEW_LOGS_MAX: Final = 32
"""Maximum number of logs created together: a put to another log waits for that, some
10 ms on an SSD."""

INDEXED_LATER_MAX: Final = 256
"""Maximum number of logs indexed in one task: a put waits some 10 ms for that."""

_BROKEN: Final = frozenset({"rename", "sync"})
"""Operations whose failure leaves unknown which names are on the disk."""

_log = logging.getLogger(__name__)


RecoveredT = TypeVar("RecoveredT")

_Turn: TypeAlias = tuple[int, int, LogWriter]
"""Sort key and log: number of the log's last turn, of this request for one, the log."""


class GroupQueue:
    """Appends that wait to be written, and the order in which logs take turns. Pure.

    The next turn goes to the log that was served longest ago: a seldom used log goes
    first, and none starves. A new log counts as served when it is queued. Appends of
    one log keep their order.

    A log with a light append goes before the others, but at most in every other turn: a
    connection with little in flight does not wait for all logs that others flood, and
    those logs keep half of the turns.
    """

    def __init__(self, group_bytes_max: int = GROUP_BYTES_MAX) -> None:
        """Set the maximum size of a group, bytes; a larger append is its own group."""
        self._group_bytes_max = group_bytes_max
        self._waiting: dict[LogWriter, deque[AppendRequest]] = {}
        self._turn_of: dict[LogWriter, _Turn] = {}
        """The entry of each log that wants a turn."""
        self._turns: list[_Turn] = []
        """Heap of these entries and of stale ones."""
        self._light_turns: list[_Turn] = []
        """The same for logs with a light append."""
        self._light_counts: Counter[LogWriter] = Counter()
        """Number of queued light appends for each log that has any."""
        self._was_light = False
        """Whether the last turn went to a log for its light appends."""
        self._numbers = count(1)

    def __bool__(self) -> bool:
        return bool(self._turn_of)

    def push(self, request: AppendRequest) -> None:
        """Queue an append after the others of its log."""
        writer = request.writer
        waiting = self._waiting.get(writer)
        if waiting is None:
            waiting = self._waiting[writer] = deque()
            # Thousands of new logs must not go before a log that had a turn.
            writer.last_turn = writer.last_turn or next(self._numbers)
            self._want_turn(writer)
        waiting.append(request)
        if request.is_light:
            self._light_counts[writer] += 1
            if self._light_counts[writer] == 1 and writer in self._turn_of:
                heappush(self._light_turns, self._turn_of[writer])

    def begin_turn(self) -> LogWriter:
        """Return the log whose turn it is; call `end_turn` next."""
        light = None if self._was_light else self._pop(self._light_turns)
        self._was_light = light is not None
        writer = light or self._pop(self._turns)
        assert writer is not None, "a log wants a turn"
        return writer

    def waiting(self) -> Iterable[LogWriter]:
        """Return the logs with queued appends, in the order they were queued."""
        return self._waiting

    def take(self, writer: LogWriter) -> list[AppendRequest]:
        """Remove and return the next group of a log that has its turn."""
        waiting = self._waiting[writer]
        group = [waiting.popleft()]
        free_bytes = self._group_bytes_max - group[0].size_bytes
        while waiting and waiting[0].size_bytes <= free_bytes:
            free_bytes -= waiting[0].size_bytes
            group.append(waiting.popleft())
        if writer in self._light_counts:
            self._light_counts[writer] -= sum(each.is_light for each in group)
            if not self._light_counts[writer]:
                del self._light_counts[writer]
        return group

    def end_turn(
        self, writer: LogWriter, *, is_done: bool, counts: bool = True
    ) -> None:
        """Queue the log again if it has more appends or an unfinished group.

        Args:
            writer: the log whose turn it was.
            is_done: whether its group is finished.
            counts: whether the log goes after the others now; False: nothing was
                written, so it was no turn.
        """
        if counts:
            writer.last_turn = next(self._numbers)
        if self._waiting[writer] or not is_done:
            self._want_turn(writer)
        else:
            del self._waiting[writer]

    def _want_turn(self, writer: LogWriter) -> None:
        turn = self._turn_of[writer] = writer.last_turn, next(self._numbers), writer
        heappush(self._turns, turn)
        if writer in self._light_counts:
            heappush(self._light_turns, turn)

    def _pop(self, turns: list[_Turn]) -> LogWriter | None:
        """Remove the first entry that is not stale and return its log, or None."""
        while turns:
            turn = heappop(turns)
            writer = turn[-1]
            if self._turn_of.get(writer) is turn:
                del self._turn_of[writer]
                return writer
        return None


class Appender:
    """Carries out the requests of one data directory.

    Owner: the storage thread; the loop's thread while it commits a group.
    """

    def __init__(
        self,
        fs: FileSystem,
        clock: Clock,
        post: Post,
        path: Path,
        *,
        check_lock: Task,
        on_offline: Callable[[StorageError], None],
        on_free_space: Callable[[SizeBytes | None], None],
    ) -> None:
        """Serve the data directory `path`.

        Args:
            fs: the disk.
            clock: measures the time between free-space checks.
            post: runs a callback on the loop's thread.
            path: the directory.
            check_lock: raises `StorageError` if the directory is no longer ours;
                called here.
            on_offline: posted to the loop, once, after a disk error.
            on_free_space: posted to the loop after each check; None: the disk is
                read-only.
        """
        self._fs = fs
        self._clock = clock
        self._post = post
        self._path = path
        self._check_lock = check_lock
        self._on_offline = on_offline
        self._on_free_space = on_free_space
        self._accepted: deque[Request] = deque()
        self._groups = GroupQueue()
        self._under_way: dict[LogWriter, Iterator[None]] = {}
        """Groups in progress: some of their steps are done."""
        self.unindexed: Final[set[LogWriter]] = set()
        """Logs with small groups that `index_later` will index."""
        self.free_space_s = float("-inf")
        """Time of the last check of free space and lock, monotonic."""
        self.alive_s = float("-inf")
        """Time when the last sync ended, monotonic."""
        self.is_offline = False
        """Set once, by the first disk error."""

    def run(self, requests: Sequence[Request]) -> bool:
        """Accept requests, then give one log its turn or run one task.

        Returns:
            Whether there is more to do; then call it again.
        """
        try:
            return self._run(requests)
        except Exception as error:  # noqa: BLE001  # the top of the storage thread
            self._note_bug(error)
            return True  # what is queued is dropped by the next calls

    def _run(self, requests: Sequence[Request]) -> bool:
        accepted = self._accepted
        accepted.extend(requests)
        while accepted and isinstance(accepted[0], AppendRequest):
            self._groups.push(accepted[0])
            accepted.popleft()
        if self._groups:
            self._run_turn()
            if self._clock.monotonic_s() - self.free_space_s >= FREE_SPACE_REFRESH_S:
                self.measure_free_space()
        elif accepted:
            task = accepted.popleft()
            assert not isinstance(task, AppendRequest), task
            task()
        return bool(self._groups or accepted)

    def index_later(self) -> None:
        """Write postponed index entries of up to INDEXED_LATER_MAX logs; a task."""
        for _ in range(min(len(self.unindexed), INDEXED_LATER_MAX)):
            self.guarded(self.unindexed.pop().index)

    def measure_free_space(self) -> None:
        """Check the lock, and report the free space to the loop; a task."""

        def look() -> None:
            self.free_space_s = self._clock.monotonic_s()
            self._check_lock()
            free = self._fs.try_free_bytes(self._path)
            self._post(partial(self._on_free_space, free))

        self.guarded(look)

    def sync(self, writer: LogWriter, receiver: AppendReceiver) -> None:
        """Sync one log whose sync interval is over; a task."""

        def sync() -> None:
            writer.sync()
            self._post_progress(writer, receiver)

        self.guarded(sync)

    def cut_off(
        self, writer: LogWriter, receiver: AppendReceiver, error: NoSpaceError
    ) -> None:
        """Cut off and refuse a group whose write found the disk full; a task."""

        def cut_off() -> None:
            writer.cut_off()
            self._refuse(writer, receiver, error)

        self.guarded(cut_off)

    def write_record(self, record: Holdings) -> None:
        """Write the record of what the directory holds; a task."""
        self.guarded(try_write_holdings, self._fs, self._path, record)

    def forget(
        self,
        writers: Sequence[LogWriter],
        record: Holdings,
        on_done: Callable[[StorageError | None], None],
    ) -> None:
        """Close logs, then write a record without them; a task.

        Args:
            writers: the storage thread's side of the logs.
            record: the record, without these logs.
            on_done: posted to the loop with the error, or None.
        """
        failed: StorageError | None = None
        try:
            self._require_online()
            for writer in writers:
                writer.close()
            write_holdings(self._fs, self._path, record)
        except StorageError as error:
            failed = error
            if not is_harmless(error):
                self.go_offline(error)
        for writer in writers:
            writer.abandon()
            self.unindexed.discard(writer)
        self._post(partial(on_done, failed))

    def carry_out(
        self,
        work: Task,
        on_done: Callable[[StorageError | None], None],
        *,
        is_vital: bool = False,
    ) -> None:
        """Change files beside those of open logs; a task.

        Args:
            work: raises StorageError.
            on_done: called on the loop's thread with the error, or None.
            is_vital: logs depend on it, so that any failure takes the directory
                offline.
        """
        failed: StorageError | None = None
        try:
            self._require_online()
            work()
        except StorageError as error:
            failed = error
            is_broken = isinstance(error, DiskError) and error.operation in _BROKEN
            if is_vital or is_broken:
                self.go_offline(error)
        self._post(partial(on_done, failed))

    def reopen(
        self,
        writer: LogWriter,
        change: Task,
        recover: Callable[[], RecoveredT],
        on_done: Callable[[RecoveredT | None, StorageError | None], None],
    ) -> None:
        """Close a log, change its files, and recover it; a task.

        Args:
            writer: the storage thread's side of the log.
            change: raises StorageError; other than a DiskError it is reported only.
            recover: opens the writer again.
            on_done: called on the loop's thread with the recovered log, or None if the
                directory is offline, and the error, if any.
        """
        found: RecoveredT | None = None
        failed: StorageError | None = None
        self.unindexed.discard(writer)
        try:
            self._require_online()
            writer.close(syncs_side_files=False)
            try:
                change()
            except DiskError:
                raise
            except StorageError as error:
                failed = error
            found = recover()
        except StorageError as error:
            failed = error
            self.go_offline(error)
        self._post(partial(on_done, found, failed))

    def _require_online(self) -> None:
        if self.is_offline:
            raise StorageError(f"data directory is offline: directory={self._path}")

    def close(
        self,
        logs: Sequence[tuple[LogWriter, AppendReceiver]],
        seal: Callable[[], Holdings],
        on_closed: Task,
    ) -> None:
        """Sync and close every log, or abandon them if the disk failed; a task.

        `seal` returns the record to write last.
        """
        deadline_s = self._clock.monotonic_s() + SIDE_SYNC_S_MAX
        for writer, receiver in logs:
            is_in_time = self._clock.monotonic_s() < deadline_s
            self.guarded(partial(writer.close, syncs_side_files=is_in_time))
            if not self.is_offline:
                self._post_progress(writer, receiver)
        if not self.is_offline:
            self.write_record(seal())
        for writer, _receiver in logs:
            writer.abandon()
        # Post nothing after this: the loop may be gone by then.
        self._post(on_closed)

    def go_offline(self, error: StorageError) -> None:
        """Take the directory offline until a restart; later calls do nothing."""
        if not self.is_offline:
            self.is_offline = True
            self._post(partial(self._on_offline, error))

    def _note_bug(self, error: Exception) -> None:
        """Take the directory offline: after a bug its state is unknown."""
        _log.error("storage failed: directory=%s", self._path, exc_info=error)
        self.go_offline(StorageError(f"bug in the storage thread: {error!r}"))

    def _run_turn(self) -> None:
        """Commit the next group, or continue one."""
        writer = self._groups.begin_turn()
        if writer.is_new:
            self.guarded(self._create_logs)
        steps = self._under_way.pop(writer, None)
        is_first = steps is None
        if steps is None:
            steps = self._commit(writer, self._groups.take(writer))

        def step() -> None:
            for _ in steps:
                self._under_way[writer] = steps
                return

        try:
            self.guarded(step)
        finally:
            # The final step of a group in steps writes no records.
            is_done = writer not in self._under_way
            counts = is_first or not is_done
            self._groups.end_turn(writer, is_done=is_done, counts=counts)

    def _create_logs(self) -> None:
        """Create the first segments of new logs that wait, with shared syncs.

        A log without space for one tries again at its turn, and is refused there.
        """
        new = (each for each in self._groups.waiting() if each.is_new)
        create_segments(self._fs, list(islice(new, NEW_LOGS_MAX)))

    def guarded(self, work: Callable[..., None], *args: object) -> None:
        """Run `work` unless offline; a failure takes the directory offline."""
        if self.is_offline:
            return
        try:
            work(*args)
        except StorageError as error:
            self.go_offline(error)
        except Exception as error:  # noqa: BLE001  # a bug costs no other directory
            self._note_bug(error)

    def _commit(
        self, writer: LogWriter, queued: Sequence[AppendRequest]
    ) -> Iterator[None]:
        """Write, sync and report appends of one log, then index them and roll.

        Yields where other logs may take a turn.
        """
        group: list[AppendRequest] = []
        batches: list[StoredBatch] = []
        size_bytes, record_count, last_id = 0, 0, writer.last_id
        has_steps = is_reported = False
        is_light = True
        for request in queued:
            if request.version == writer.version:
                group.append(request)
                size_bytes += request.size_bytes
                record_count += request.record_count
                # Ids of transactions are older.
                last_id = max(last_id, request.last_id)
                batches += request.batches
                is_light = is_light and request.is_light
                has_steps = has_steps or bool(request.finish)
                is_reported = is_reported or request.before_write is not None
        if not group:
            return
        receiver = group[0].receiver
        try:
            if writer.is_full and not group[0].completes:
                self._roll(writer, receiver)
            assert group[0].offset == writer.end, (group[0].offset, writer.end)
            if has_steps:
                yield from _finish(group)
            chunks = gathered(group, size_bytes)
            if is_reported:
                _report_offsets(group)
            yield from writer.write(
                chunks,
                record_count=record_count,
                last_id=last_id,
                batches=batches,
            )
        except NoSpaceError as error:
            self._refuse(writer, receiver, error)
            return
        if writer.is_led and is_light:
            self._post(partial(receiver.on_written, writer.end))
        # The transaction journal forgets an append once it is answered.
        if is_reported or writer.is_sync_due():
            writer.sync_segment()
        writer.require_in_place()
        self._post_progress(writer, receiver)
        writer.cover_later(chunks, record_count=record_count)
        if writer.is_cover_due:
            # Others need not wait for the checksum, or for a file that may be busy.
            yield
            for _ in writer.cover():
                yield
        if writer.is_index_due:
            writer.index()
        else:
            self.unindexed.add(writer)
        self._roll_if_full(writer, receiver)

    def roll_on_order(
        self, writer: LogWriter, receiver: AppendReceiver, offset: Offset
    ) -> None:
        """Roll a follower's log at `offset`, as its leader did, if it ends there."""
        if writer.end == offset:
            writer.order_roll()
            self.guarded(self._roll_if_full, writer, receiver)

    def _roll_if_full(self, writer: LogWriter, receiver: AppendReceiver) -> None:
        """Roll a full segment; without space the next write tries again."""
        if writer.is_full:
            try:
                self._roll(writer, receiver)
            except NoSpaceError as error:
                _log.warning(
                    "roll postponed: directory=%s error=%s", writer.directory, error
                )

    def _refuse(
        self, writer: LogWriter, receiver: AppendReceiver, error: NoSpaceError
    ) -> None:
        writer.version += 1
        self._post(partial(receiver.on_refused, error))

    def _roll(self, writer: LogWriter, receiver: AppendReceiver) -> None:
        sealed, active = writer.roll()
        self._post_progress(writer, receiver)
        self._post(partial(receiver.on_rolled, sealed, active))

    def _post_progress(self, writer: LogWriter, receiver: AppendReceiver) -> None:
        self._post(partial(receiver.on_progress, self._progress_of(writer)))

    def report_sync(
        self, writer: LogWriter, receiver: AppendReceiver, error: DiskError | None
    ) -> None:
        """Report a sync that ended, with its error or None; on the loop's thread."""
        if error is not None:
            self.go_offline(error)
        elif not self.is_offline:
            try:
                receiver.on_progress(self._progress_of(writer))
            except Exception as bug:  # noqa: BLE001  # one log's costs no other
                _log.error("report failed: %s", writer.directory, exc_info=bug)

    def _progress_of(self, writer: LogWriter) -> WriterProgress:
        """Return how far a log is written and synced, for the loop's side."""
        self.alive_s = max(self.alive_s, writer.last_sync_s)
        return WriterProgress(
            writer.end,
            writer.synced_end,
            writer.last_sync_s,
            writer.sync_count,
            writer.sync_s,
        )


def _finish(group: Sequence[AppendRequest]) -> Iterator[None]:
    """Finish the bytes of a group, in steps.

    Raises:
        NoSpaceError: there is not enough memory now; nothing was written.
    """
    try:
        for request in group:
            yield from request.finish
    except MemoryError as error:
        raise NoSpaceError("no memory to finish an append") from error


def _report_offsets(group: Sequence[AppendRequest]) -> None:
    """Call `before_write` of the next appends, then run the returned tasks once."""
    tasks: dict[Task, None] = {}
    for request in group:
        if request.before_write is not None:
            tasks.update(dict.fromkeys(request.before_write(request.offset)))
    for task in tasks:
        task()


def gathered(group: Sequence[AppendRequest], size_bytes: int) -> Sequence[Buffer]:
    """Return the bytes of a group in few pieces; large ones are not copied.

    Raises:
        NoSpaceError: there is not enough memory now; nothing was written.
    """
    chunks: list[Buffer] = []
    try:
        for request in group:
            chunks += request.chunks
        if size_bytes >= len(chunks) * CHUNK_BYTES_MIN:
            return chunks
        return (b"".join(chunks),)
    except MemoryError as error:
        raise NoSpaceError(f"no memory to write {size_bytes} bytes") from error
