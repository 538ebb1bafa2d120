"""Group commit: the cycle of the storage thread.

Theory of operation. A data directory has one storage thread, and this is all it does:

    take what is queued  →  one group: write, sync  →  tell the loop  →  roll if full
            ↑                                                                |
            └────── others queue meanwhile; or nothing comes: rest ←─────────┘

* A group is what one log has queued, `GROUP_BYTES_MAX` at most: one write and one sync.
  Logs take turns (`GroupQueue`), and what came meanwhile is taken in before the next
  turn: a put waits for one group of each log that is busy, whatever is queued there,
  and one of a connection with little in flight for fewer. A single append that is
  larger is written and synced in steps, each of them a turn.
* Appends come in the order the loop made them. A task (a sync by time, a close) is a
  barrier: what came before it is committed before it runs, what came behind it waits.
* The loop is told with `post`, in the order things happened, and only with values. A
  `WriterProgress` says how far that log is written and synced; the loop's side knows
  which appends that answers.
* Logs that get their first append are created together, `NEW_LOGS_MAX` at a time: each
  directory is synced, but the first sync does most of the work of all.
* The span index is written behind the news, in a turn of its own, and of small groups
  not before the thread `rest`s, nor is their checksum computed: a loop that has a reply
  to send needs the interpreter. A kill leaves whole records without an entry then,
  fewer bytes than a span is long; recovery keeps those.
* A group is committed by one generator, on either thread. What is small and finds the
  storage thread idle is begun by the loop's thread (`begin`): it writes, has the kernel
  sync, and goes on when that is done; logs of one group are synced side by side. The
  rest is the storage thread's from a step on that may wait for the disk. The index
  follows behind the next group's write.
* A roll happens after the loop was told, so that no put waits for it, but before the
  next write of that log. If it fails for want of room, the next write tries again.
* No room (`NoSpaceError`): the group is refused, and so is everything that was queued
  behind it for that log, because offsets were given out on the assumption that it
  would succeed. The writer's version grows; requests of an older one are void and are
  dropped here without a word, since the loop's side has failed them when it heard.
* Before a group is acknowledged its segment is looked for under its name, and at each
  look at the free space the lock of the directory: at most once a second each.
* Any other failure takes the directory offline: one post, once, and from then on
  requests are dropped; the loop's side fails whatever is in flight. Nothing is retried:
  after a failed sync the page cache shows bytes that the disk does not have.

Invariants: a log's high watermark as told to the loop is never beyond its last
successful sync; a request is answered exactly once, by a `WriterProgress`, a refusal or
the end of the directory. Keep in step: `partition_log.py`, the other end of the posts.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import chain, count, islice
from pathlib import Path
from typing import Final, TypeAlias

from metaq.clock import Clock
from metaq.errors import DiskError, NoSpaceError, StorageError
from metaq.fs import AppendFile, Buffer, FileSystem
from metaq.fs.group_thread import Post
from metaq.fs.kernel_syncs import Syncs
from metaq.model import SizeBytes
from metaq.storage.append_request import (
    AppendReceiver,
    AppendRequest,
    Request,
    Task,
    WriterProgress,
)
from metaq.storage.holdings import Holdings
from metaq.storage.inventory import is_harmless, try_write_holdings, write_holdings
from metaq.storage.log_writer import (
    GROUP_BYTES_MAX,
    LogWriter,
    Pause,
    Step,
    create_segments,
)
from metaq.storage.producers import StoredBatch

FREE_SPACE_REFRESH_S: Final = 1.0
"""Least time between two looks at the free space; in between, written bytes count."""

CHUNK_BYTES_MIN: Final = 16 * 1024
"""Chunks that are smaller on average are joined: the system takes few in one call."""

SIDE_SYNC_S_MAX: Final = 1.0
"""Longest time of the syncs of indexes and producer files at a stop, which is bounded
too: thousands of partitions leave the rest of them to the kernel."""

NEW_LOGS_MAX: Final = 32
"""Logs that are created together: a put to another log waits for that, some 10 ms of an
SSD."""

BEGUN_BYTES_MAX: Final = 128 * 1024
"""Most bytes that the loop's thread writes in one turn, some 20 µs; more is written by
the storage thread."""

BEGUN_LOGS_MAX: Final = 16
"""Most logs that they may be of: each is a write and a sync of its own."""

FEW_RECORDS_MAX: Final = 4
"""Records of a group whose replies go out before the next one is begun."""

ALIVE_S: Final = 1.0
"""The loop's thread writes to no disk that has synced nothing for so long: it may
hang, or no longer hold in memory what lies before the end of a log."""

HELD_UP_S: Final = 0.02
"""A disk that has kept the loop's thread so long in one turn is the storage thread's
for `ALIVE_S`: it is written through, or was frozen, or has no memory left for it."""

_BROKEN: Final = frozenset({"rename", "sync"})
"""Operations after whose failure it is unknown which names are on the disk."""

_log = logging.getLogger(__name__)


_Place: TypeAlias = tuple[int, int, LogWriter]
"""In the order of turns: the last turn of a log, when it wanted the next, the log."""


class GroupQueue:
    """Appends that wait for the disk, and which log has the next turn. Pure.

    It is the log that was served longest ago: one that is seldom used goes first, and
    none starves. A new one counts as served when it comes. Appends of one log keep
    their order.

    A log with a light append goes before the others, in every other turn at most: a
    connection with little in flight does not wait for all logs that others flood, and
    these keep half of the turns.
    """

    def __init__(self, group_bytes_max: int = GROUP_BYTES_MAX) -> None:
        """Hand out groups of so many bytes at most; a larger append is one alone."""
        self._group_bytes_max = group_bytes_max
        self._waiting: dict[LogWriter, deque[AppendRequest]] = {}
        self._places: dict[LogWriter, _Place] = {}
        """Place of each log that wants a turn."""
        self._turns: list[_Place] = []
        """A heap of them, and of places that were given up."""
        self._light_turns: list[_Place] = []
        """Likewise, of the logs with a light append."""
        self._light_counts: Counter[LogWriter] = Counter()
        """Light appends that wait, for each log that has any."""
        self._was_light = False
        """Whether the last turn went to a log for its light appends."""
        self._numbers = count(1)

    def __bool__(self) -> bool:
        return bool(self._places)

    def push(self, request: AppendRequest) -> None:
        """Queue an append behind those of its log."""
        writer = request.writer
        waiting = self._waiting.get(writer)
        if waiting is None:
            waiting = self._waiting[writer] = deque()
            # Thousands of new logs must not go before one that had a turn.
            writer.last_turn = writer.last_turn or next(self._numbers)
            self._want_turn(writer)
        waiting.append(request)
        if request.is_light:
            self._light_counts[writer] += 1
            if self._light_counts[writer] == 1 and writer in self._places:
                heappush(self._light_turns, self._places[writer])

    def begin_turn(self) -> LogWriter:
        """Return the log whose turn it is; `end_turn` follows."""
        light = None if self._was_light else self._pop(self._light_turns)
        self._was_light = light is not None
        writer = light or self._pop(self._turns)
        assert writer is not None, "a log wants a turn"
        return writer

    def waiting(self) -> Iterable[LogWriter]:
        """Return the logs that wait, in the order they came."""
        return self._waiting

    def take(self, writer: LogWriter) -> list[AppendRequest]:
        """Take the next group of a log that has its turn."""
        waiting = self._waiting[writer]
        group = [waiting.popleft()]
        room_bytes = self._group_bytes_max - group[0].size_bytes
        while waiting and waiting[0].size_bytes <= room_bytes:
            room_bytes -= waiting[0].size_bytes
            group.append(waiting.popleft())
        if writer in self._light_counts:
            self._light_counts[writer] -= sum(each.is_light for each in group)
            if not self._light_counts[writer]:
                del self._light_counts[writer]
        return group

    def end_turn(
        self, writer: LogWriter, *, is_done: bool, counts: bool = True
    ) -> None:
        """Let the log queue again if more waits, or its group is not done.

        Args:
            writer: the log whose turn it was.
            is_done: nothing of its group is left to do.
            counts: others go first now; else it was no turn, as nothing was written.
        """
        if counts:
            writer.last_turn = next(self._numbers)
        if self._waiting[writer] or not is_done:
            self._want_turn(writer)
        else:
            del self._waiting[writer]

    def _want_turn(self, writer: LogWriter) -> None:
        place = self._places[writer] = writer.last_turn, next(self._numbers), writer
        heappush(self._turns, place)
        if writer in self._light_counts:
            heappush(self._light_turns, place)

    def _pop(self, turns: list[_Place]) -> LogWriter | None:
        """Take the first place that was not given up; None: there is none."""
        while turns:
            place = heappop(turns)
            writer = place[-1]
            if self._places.get(writer) is place:
                del self._places[writer]
                return writer
        return None


class Appender:
    """Carry out the requests of one data directory.

    Owner: the storage thread; the loop's thread while what it has begun is under way.
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
        on_free_space: Callable[[SizeBytes], None],
        syncs: Syncs | None = None,
    ) -> None:
        """Serve the data directory `path`.

        Args:
            fs: the disk.
            clock: for time between looks at the free space.
            post: runs a callback on the loop's thread.
            path: the directory.
            check_lock: raises `StorageError` where the directory is not ours any more;
                called here.
            on_offline: posted to the loop, once, after a disk error.
            on_free_space: posted to the loop after each look.
            syncs: on the loop's thread, for `begin`; None: there are none.
        """
        self._fs = fs
        self._clock = clock
        self._post = post
        self._syncs = syncs
        self._path = path
        self._check_lock = check_lock
        self._on_offline = on_offline
        self._on_free_space = on_free_space
        self._free_space_s = float("-inf")
        self._accepted: deque[Request] = deque()
        self._groups = GroupQueue()
        self._under_way: dict[LogWriter, Iterator[Step]] = {}
        """Groups of which some steps are done."""
        self._left: deque[Iterator[Step]] = deque()
        """Groups that were begun, and are for the storage thread now."""
        self._behind: deque[Iterator[Step]] = deque()
        """Groups that were begun and told of, and are not indexed yet."""
        self._begun_count = 0
        """Groups that were begun and have not ended."""
        self._on_end: Callable[[bool], None] = lambda _has_more: None
        """Takes note of the end of the last of them."""
        self._is_few = False
        """They are of few records."""
        self._news: list[Task] | None = None
        """On the loop's thread: what it is told when the disk has its next work."""
        self._is_telling = False
        """The loop's thread has news of an ended group that it did not tell yet."""
        self._alive_s = float("-inf")
        """When a sync ended last."""
        self._held_up_s = float("-inf")
        """When the loop's thread was last held up by the disk."""
        self._unindexed: set[LogWriter] = set()
        self.is_offline = False
        """Set once, by the first disk error."""

    def run(self, requests: Sequence[Request]) -> bool:
        """Take requests over, then give one log its turn, or run a task.

        Returns:
            Whether there is more to do; then it is to be called again.
        """
        try:
            return self._run(requests)
        except Exception as error:  # noqa: BLE001  # the top of the storage thread
            self._note_bug(error)
            return True  # what is queued is dropped by the next calls

    def begin(
        self, requests: Sequence[Request], on_end: Callable[[bool], None]
    ) -> bool:
        """Begin to commit appends on the loop's thread; see `fs.group_thread.Begin`.

        They are small, and so is what is written for them to files that are open, in
        memory that the system writes to a disk that has just answered. Everything else
        is for the storage thread, whether a commit begins with it or comes to it.
        """
        now_s = self._clock.monotonic_s()
        is_alive = now_s - self._alive_s < ALIVE_S <= now_s - self._held_up_s
        # The storage thread looks at free space and lock behind its next group.
        is_seen = now_s - self._free_space_s < FREE_SPACE_REFRESH_S
        if self._syncs is None or self.is_offline or not (is_alive and is_seen):
            return False
        size_bytes = record_count = 0
        groups: dict[LogWriter, list[AppendRequest]] = {}
        try:
            for request in requests:
                if not isinstance(request, AppendRequest) or request.before_write:
                    return False
                size_bytes += request.size_bytes
                record_count += request.record_count
                if request.writer.is_new or size_bytes > BEGUN_BYTES_MAX:
                    return False
                groups.setdefault(request.writer, []).append(request)
        except MemoryError:
            return False  # nothing has begun
        if len(groups) > BEGUN_LOGS_MAX:
            return False
        self._begun_count, self._on_end = len(groups), on_end
        self._is_few = record_count <= FEW_RECORDS_MAX
        self._news = []
        for writer, group in groups.items():
            self._go_on(writer, self._commit(writer, group))
        took_s = self._clock.monotonic_s() - now_s
        if took_s > HELD_UP_S:
            self._held_up_s = now_s + took_s
        self._tell_news(self._post)
        return True

    def _go_on(self, writer: LogWriter, steps: Iterator[Step]) -> None:
        """Carry out a commit on the loop's thread, up to its next sync or its end."""
        assert self._syncs is not None
        try:
            for step in () if self.is_offline else steps:
                if isinstance(step, AppendFile):
                    on_synced = partial(self._on_synced, writer, steps)
                    if step.begin_sync(self._syncs, on_synced):
                        return
                    self._left.append(chain((step,), steps))
                    break
                if step is Pause.STORAGE:
                    self._left.append(steps)
                    break
                # A full segment is rolled now, behind its index.
                if step is Pause.INDEX and not writer.is_full:
                    self._behind.append(steps)
                    break
        except StorageError as error:
            self.go_offline(error)
        except Exception as error:  # noqa: BLE001  # as in `run`
            self._note_bug(error)
        self._begun_count -= 1

    def _on_synced(
        self, writer: LogWriter, steps: Iterator[Step], error: DiskError | None
    ) -> None:
        self._news = []
        if error is not None:
            self.go_offline(error)
        self._go_on(writer, steps)
        self._tell_news(_call)

    def _tell_news(self, tell: Post) -> None:
        """Tell the loop what is done, and give the disk its next work."""
        news, self._news = self._news or [], None
        is_over, is_few = not self._begun_count, self._is_few
        # Many replies take longer than the next write; a few do not, and go before.
        if is_over and not is_few:
            # A group that begins there indexes nothing before the news.
            self._is_telling = True
            self._on_end(bool(self._left))
            self._is_telling = False
        for each in news:
            tell(each)
        if (self._begun_count or is_few) and not self._is_telling:
            self._index_behind()
        if is_over and is_few:
            self._on_end(bool(self._left))

    def _index_behind(self) -> None:
        """Index groups that were told of; in the time that a sync takes, or at rest."""

        def index() -> None:
            for step in steps:
                if step is Pause.STORAGE:
                    return  # a segment that is full now is rolled by a later group

        while self._behind:
            steps = self._behind.popleft()
            self._guarded(index)

    def _run(self, requests: Sequence[Request]) -> bool:
        self._index_behind()
        while self._left:
            self._guarded(partial(_carry_out, self._left.popleft()))
        accepted = self._accepted
        accepted.extend(requests)
        while accepted and isinstance(accepted[0], AppendRequest):
            self._groups.push(accepted[0])
            accepted.popleft()
        if self._groups:
            self._run_turn()
            if self._clock.monotonic_s() - self._free_space_s >= FREE_SPACE_REFRESH_S:
                self.look_at_free_space()
        elif accepted:
            task = accepted.popleft()
            assert not isinstance(task, AppendRequest), task
            task()
        return bool(self._groups or accepted)

    def rest(self) -> None:
        """Write the index entries that were put off; called when nothing is queued."""
        self._index_behind()
        unindexed, self._unindexed = self._unindexed, set()
        for writer in unindexed:
            self._guarded(writer.index)

    def look_at_free_space(self) -> None:
        """Tell the loop how much room the disk has; a task."""

        def look() -> None:
            self._free_space_s = self._clock.monotonic_s()
            self._check_lock()
            free = self._fs.free_bytes(self._path)
            self._tell(partial(self._on_free_space, free))

        self._guarded(look)

    def sync(self, writer: LogWriter, receiver: AppendReceiver) -> None:
        """Sync one log because its time has come; a task."""

        def sync() -> None:
            writer.sync()
            self._post_progress(writer, receiver)

        self._guarded(sync)

    def write_record(self, record: Holdings) -> None:
        """Write what the directory holds; a task."""
        self._guarded(partial(try_write_holdings, self._fs, self._path, record))

    def forget(
        self,
        writers: Sequence[LogWriter],
        record: Holdings,
        on_done: Callable[[StorageError | None], None],
    ) -> None:
        """Close logs, then write the record without them; a task.

        Args:
            writers: the logs' side of the storage thread.
            record: no longer names them.
            on_done: posted to the loop, with what went wrong.
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
            self._unindexed.discard(writer)
        self._post(partial(on_done, failed))

    def set_aside(
        self, move: Task, on_done: Callable[[StorageError | None], None]
    ) -> None:
        """Move the files of deleted logs; a task.

        Args:
            move: raises StorageError.
            on_done: told on the loop's thread what held it up, or None.
        """
        failed: StorageError | None = None
        try:
            self._require_online()
            move()
        except StorageError as error:
            failed = error
            if isinstance(error, DiskError) and error.operation in _BROKEN:
                self.go_offline(error)
        self._post(partial(on_done, failed))

    def _require_online(self) -> None:
        if self.is_offline:
            raise StorageError(f"data directory is offline: directory={self._path}")

    def close(
        self,
        logs: Sequence[tuple[LogWriter, AppendReceiver]],
        seal: Callable[[], Holdings],
        on_closed: Task,
    ) -> None:
        """Sync and close every log, or abandon them when the disk failed; a task.

        `seal` returns the record that the directory is left with.
        """
        deadline_s = self._clock.monotonic_s() + SIDE_SYNC_S_MAX
        for writer, receiver in logs:
            is_in_time = self._clock.monotonic_s() < deadline_s
            self._guarded(partial(writer.close, syncs_side_files=is_in_time))
            if not self.is_offline:
                self._post_progress(writer, receiver)
        if not self.is_offline:
            self.write_record(seal())
        for writer, _receiver in logs:
            writer.abandon()
        # Nothing is posted behind this: the loop may be gone by then.
        self._post(on_closed)

    def go_offline(self, error: StorageError) -> None:
        """Stop believing this directory until it is opened again; only once."""
        if not self.is_offline:
            self.is_offline = True
            self._tell(partial(self._on_offline, error))

    def _note_bug(self, error: Exception) -> None:
        _log.error("storage failed: directory=%s", self._path, exc_info=error)
        self.go_offline(StorageError(f"bug in the storage thread: {error!r}"))

    def _tell(self, news: Task) -> None:
        """Call back on the loop's thread."""
        if self._news is None:
            self._post(news)
        else:
            self._news.append(news)

    def _run_turn(self) -> None:
        """Commit the next group, or go on with one."""
        writer = self._groups.begin_turn()
        if writer.is_new:
            self._guarded(self._create_logs)
        steps = self._under_way.pop(writer, None)
        is_first = steps is None
        if steps is None:
            steps = self._commit(writer, self._groups.take(writer))

        def step() -> None:
            for step in steps:
                if isinstance(step, AppendFile):
                    step.sync()
                elif step is Pause.OTHERS:
                    self._under_way[writer] = steps
                    return

        try:
            self._guarded(step)
        finally:
            # The last of several steps writes nothing of the log.
            is_done = writer not in self._under_way
            counts = is_first or not is_done
            self._groups.end_turn(writer, is_done=is_done, counts=counts)

    def _create_logs(self) -> None:
        """Create the first segments of new logs that wait; they share syncs.

        One for which there is no room tries again at its turn, and is refused there.
        """
        new = (each for each in self._groups.waiting() if each.is_new)
        create_segments(self._fs, list(islice(new, NEW_LOGS_MAX)))

    def _guarded(self, task: Task) -> None:
        """Run a task unless the directory is offline; a failure takes it there."""
        if self.is_offline:
            return
        try:
            task()
        except StorageError as error:
            self.go_offline(error)
        except Exception as error:  # noqa: BLE001  # a bug costs no other directory
            self._note_bug(error)

    def _commit(
        self, writer: LogWriter, queued: Sequence[AppendRequest]
    ) -> Iterator[Step]:
        """Write, sync and announce appends of one log, in steps; then index them."""
        group: list[AppendRequest] = []
        batches: list[StoredBatch] = []
        size_bytes, record_count, last_id = 0, 0, writer.last_id
        has_steps = is_told = False
        for request in queued:
            if request.version == writer.version:
                group.append(request)
                size_bytes += request.size_bytes
                record_count += request.record_count
                # Those of a transaction are older.
                last_id = max(last_id, request.last_id)
                if request.batch is not None:
                    batches.append(request.batch)
                has_steps = has_steps or bool(request.finish)
                is_told = is_told or request.before_write is not None
        if not group:
            return
        receiver = group[0].receiver
        try:
            if writer.is_full and not group[0].completes:
                yield Pause.STORAGE
                self._roll(writer, receiver)
            assert group[0].offset == writer.end, (group[0].offset, writer.end)
            if has_steps:
                for _step in _finish(group):
                    yield Pause.OTHERS
            chunks = _gathered(group, size_bytes)
            if is_told:
                _tell_offsets(group)
            yield from writer.write(
                chunks,
                record_count=record_count,
                last_id=last_id,
                batches=batches,
            )
        except NoSpaceError as error:
            writer.version += 1
            self._tell(partial(receiver.on_refused, error))
            return
        # The journal of transactions forgets what is answered.
        if is_told or writer.is_sync_due():
            yield from writer.sync_segment()
        writer.require_in_place()
        self._post_progress(writer, receiver)
        yield Pause.INDEX
        if not writer.cover_later(chunks, record_count=record_count):
            # Checksum, and a file that may be busy, are no reason for others to wait.
            yield Pause.OTHERS
            for _step in writer.cover():
                yield Pause.OTHERS
        if writer.is_index_due:
            writer.index()
        else:
            self._unindexed.add(writer)
        if writer.is_full:
            yield Pause.STORAGE
            try:
                self._roll(writer, receiver)
            except NoSpaceError as error:
                _log.warning(
                    "roll postponed: directory=%s error=%s", writer.directory, error
                )

    def _roll(self, writer: LogWriter, receiver: AppendReceiver) -> None:
        sealed, active = writer.roll()
        self._post_progress(writer, receiver)
        self._tell(partial(receiver.on_rolled, sealed, active))

    def _post_progress(self, writer: LogWriter, receiver: AppendReceiver) -> None:
        progress = WriterProgress(
            writer.end,
            writer.synced_end,
            writer.last_sync_s,
            writer.sync_count,
            writer.sync_s,
        )
        self._alive_s = max(self._alive_s, writer.last_sync_s)
        self._tell(partial(receiver.on_progress, progress))


def _call(news: Task) -> None:
    try:
        news()
    except Exception as error:  # noqa: BLE001  # a bug of one costs no other
        _log.error("callback failed: %r", news, exc_info=error)


def _carry_out(steps: Iterable[Step]) -> None:
    """Do all steps, and wait for the disk where they do."""
    for step in steps:
        if isinstance(step, AppendFile):
            step.sync()


def _finish(group: Sequence[AppendRequest]) -> Iterator[None]:
    """Finish the bytes of a group, in steps.

    Raises:
        NoSpaceError: there is no memory for it now; nothing was written.
    """
    try:
        for request in group:
            yield from request.finish
    except MemoryError as error:
        raise NoSpaceError("no memory to finish an append") from error


def _tell_offsets(group: Sequence[AppendRequest]) -> None:
    """Tell who wants to know where appends will lie that are written next."""
    tasks: dict[Task, None] = {}
    for request in group:
        if request.before_write is not None:
            tasks.update(dict.fromkeys(request.before_write(request.offset)))
    for task in tasks:
        task()


def _gathered(group: Sequence[AppendRequest], size_bytes: int) -> Sequence[Buffer]:
    """Return the bytes of a group in few pieces; large ones are not copied.

    Raises:
        NoSpaceError: there is no memory for it now; nothing was written.
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
