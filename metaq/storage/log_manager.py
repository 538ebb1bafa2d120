"""All partition logs of a broker, in one or several data directories.

    <dataPath>/<topic>-<partition>/     one partition log
    <dataPath>/.lock                    who owns the data directory

`open` blocks: it locks every data directory and recovers every partition in it, some
at a time, before the broker listens. After that everything belongs to the event loop's
thread. A log is created by the first put to it; directory and first segment are made
by its first append, on the storage thread. Source: broker spec 2.1, 2.3.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from metaq.clock import Clock
from metaq.config import BrokerConfig, TopicConfig
from metaq.errors import ClosedError, OffsetOutOfRangeError, StorageError
from metaq.fs import Buffer, FileSystem
from metaq.model import LogId, MessageId, Offset, SizeBytes
from metaq.stats import HistogramSnapshot, merge_snapshots
from metaq.storage.appender import AppendTicket, Post
from metaq.storage.log_dir import DirState, LogDir, StartWorker, StorageThread
from metaq.storage.log_pictures import picture_directory
from metaq.storage.log_state import LogState
from metaq.storage.log_writer import LogWriter
from metaq.storage.opening import (
    RecoveredPartition,
    log_directory_name,
    new_writer,
    recover_partitions,
    refuse_twins,
)
from metaq.storage.partition_log import PartitionLog
from metaq.storage.producers import Batch, ProducerTable
from metaq.storage.recovery import RecoveredLog
from metaq.storage.retention_run import Retention, RetentionReport
from metaq.storage.segment import Damage, Segment, segment_file_name
from metaq.storage.segments import Segments
from metaq.storage.slices import OpenFiles

FREE_SPACE_IDLE_S: Final = 30.0
"""How often the free space is looked at when nobody writes."""

FREE_SPACE_LOW_S: Final = 1.0
"""How often it is looked at while puts are refused for want of it."""

NO_MESSAGE_ID: Final = MessageId(-1)
"""What `last_message_id` says when no record with an id of ours is stored."""


@dataclass(frozen=True, slots=True)
class OfflineDirectory:
    """A data directory that had a disk error."""

    path: Path
    """The directory."""
    cause: str
    """The error, one line."""


class LogManager:
    """The partition logs of one broker. Owner: the event loop's thread."""

    def __init__(
        self,
        fs: FileSystem,
        clock: Clock,
        post: Post,
        config: BrokerConfig,
        *,
        start_worker: StartWorker = StorageThread,
    ) -> None:
        """Describe the logs; `open` reads them.

        Args:
            fs: the disk.
            clock: time.
            post: runs a callback on the loop's thread (`loop.call_soon_threadsafe`).
            config: data paths, sizes, durability mode, limits.
            start_worker: makes the storage thread of a directory.
        """
        self._fs = fs
        self._clock = clock
        self._post = post
        self._config = config
        self._start_worker = start_worker
        self._directories: dict[Path, LogDir] = {}
        self._logs: dict[LogId, PartitionLog] = {}
        self._files = OpenFiles(fs)
        self._retention = Retention(fs, clock, post)
        self._last_id = NO_MESSAGE_ID
        self._is_closing = False

    # -- opening

    def open(self) -> None:
        """Lock and recover every data directory that the configuration names.

        Blocks for as long as the disks need; called once, on any thread, before
        anything else is.

        Raises:
            LogDirLockedError: another process owns one of them.
            StorageError: a disk refuses, or one partition lies in two directories.
                Whatever was opened is closed again.
            ClosedError: it was called off, or `close` was called; likewise.
        """
        recovered: list[RecoveredPartition] = []
        opened: list[LogDir] = []
        try:
            for path in self._data_paths(self._config):
                directory = self._new_directory(path)
                opened.append(directory)
                directory.open()
                recovered += recover_partitions(
                    self._fs,
                    self._clock,
                    self._config,
                    path,
                    directory.sync_latency,
                    require_wanted=self._require_wanted,
                )
            refuse_twins(recovered)
            self._require_wanted()
        except (StorageError, ClosedError):
            for each in recovered:
                each.writer.abandon()
            for directory in opened:
                directory.unlock()
            raise
        for directory in opened:
            directory.start()
            self._directories[directory.path] = directory
        for each in recovered:
            self._add_recovered(each)
        times = [each.newest_append_ms for each in recovered if each.newest_append_ms]
        self._retention.start(max(times, default=None))

    def call_off(self) -> None:
        """Have an `open` that runs on another thread end after the partitions at hand.

        Nothing can be opened any more; `close` follows when `open` has ended.
        """
        self._is_closing = True

    def last_message_id(self) -> MessageId:
        """Return the largest id that recovery found, negative for none: a floor.

        Its record may be missing: see `RecoveredPartition`.
        """
        return self._last_id

    # -- logs

    def get(self, log_id: LogId) -> PartitionLog | None:
        """Return a log that exists."""
        return self._logs.get(log_id)

    def get_or_create(
        self,
        log_id: LogId,
        settings: TopicConfig,
        *,
        start_offset: Offset = Offset(0),  # noqa: B008  # a NewType is its number
    ) -> PartitionLog:
        """Return a log, made in memory when it does not exist yet.

        Args:
            log_id: which partition; whether the topic is legal is the caller's
                business.
            settings: of the topic; durability mode and data path of a new log.
            start_offset: where a new log starts (a copy starts where its leader does).

        Raises:
            StorageError: the name cannot be a directory, or the data path was
                configured after the start.
            LogDirOfflineError: the data directory had a disk error.
            ClosedError: the manager is closed or closing.
        """
        found = self._logs.get(log_id)
        if found is not None:
            return found
        name = log_directory_name(log_id)
        directory = self._directories.get(Path(settings.data_path))
        if self._is_closing or not self._directories:
            raise ClosedError("the logs are closed")
        if directory is None:
            raise StorageError(
                f"data path is not open before the next restart: topic={log_id.topic}"
                f" path={settings.data_path}"
            )
        refusal = directory.refusal()
        if refusal is not None:
            raise refusal
        path = directory.path / name
        writer = new_writer(
            self._fs,
            self._clock,
            self._config,
            settings,
            path,
            end=start_offset,
            last_id=NO_MESSAGE_ID,
            sync_latency=directory.sync_latency,
        )
        first = Segment(
            path / segment_file_name(start_offset), start_offset, SizeBytes(0)
        )
        log = self._new_log(log_id, directory, settings, writer, Segments((first,)))
        self._add(log, settings)
        return log

    def logs(self) -> Mapping[LogId, PartitionLog]:
        """Return all logs; a live view, not to be changed."""
        return self._logs

    # -- what the transaction journal needs (`metaq/txn/ports.py`)

    def append(
        self,
        log_id: LogId,
        chunks: Sequence[Buffer],
        *,
        size_bytes: int,
        record_count: int,
        last_id: MessageId,
        ticket: AppendTicket,
    ) -> Offset:
        """Append one contiguous batch to a log, which is made when it is missing.

        Arguments, result and errors are those of `PartitionLog.append` and
        `get_or_create`.
        """
        log = self.get_or_create(log_id, self._config.topic(log_id.topic))
        return log.append(
            chunks,
            size_bytes=size_bytes,
            record_count=record_count,
            last_id=last_id,
            ticket=ticket,
        )

    def read_back(self, log_id: LogId, offset: Offset, size_bytes: int) -> bytes:
        """Return stored bytes; blocks on the disk.

        Returns:
            `size_bytes` bytes from `offset`; fewer where the readable part, or the
            segment, ends. No append lies in two segments.

        Raises:
            OffsetOutOfRangeError: nothing readable is there; an unknown log is empty.
            StorageError: as `PartitionLog.read`.
        """
        log = self._logs.get(log_id)
        if log is None:
            raise OffsetOutOfRangeError(
                offset, log_start=Offset(0), high_watermark=Offset(0)
            )
        found = log.read(offset, size_bytes)
        try:
            return found.read()
        finally:
            found.release()

    # -- housekeeping

    def apply_settings(self, config: BrokerConfig) -> None:
        """Take reloaded settings: sync intervals now, the rest for logs yet to come."""
        self._config = config
        for log in self._logs.values():
            log.set_interval_ms(config.topic(log.log_id.topic).unflush_interval_ms)

    def tick(self, now_s: float) -> None:
        """Do what is due by time: syncs of threshold mode, looks at the free space.

        Cheap; called by the broker's housekeeping, about as often as the shortest
        sync interval.

        Args:
            now_s: the monotonic clock.
        """
        for log in self._logs.values():
            if not log.is_group_commit:
                log.sync_if_due(now_s)
        for directory in self._directories.values():
            low = directory.is_low_on_space
            directory.tick(now_s, FREE_SPACE_LOW_S if low else FREE_SPACE_IDLE_S)

    def offline_directories(self) -> tuple[OfflineDirectory, ...]:
        """Return the data directories that had a disk error."""
        return tuple(
            OfflineDirectory(directory.path, str(directory.offline_cause))
            for directory in self._directories.values()
            if directory.offline_cause is not None
        )

    def directories(self) -> tuple[LogDir, ...]:
        """Return the data directories, for statistics."""
        return tuple(self._directories.values())

    def sync_latency(self) -> HistogramSnapshot:
        """Return how long the syncs of segments took, all directories together."""
        return merge_snapshots(
            each.sync_latency.snapshot() for each in self._directories.values()
        )

    # -- retention and scrub

    @property
    def is_over_size_limit(self) -> bool:
        """Tell whether a log or a data directory is larger than its limit.

        Then a run of retention without topics is due, whatever the schedule says.
        """
        limits = self._config.limits
        # A log without a sealed segment is as small as retention can make it.
        full = [
            log
            for log in self._logs.values()
            if log.state is LogState.OPEN and len(log.segments) > 1
        ]
        return any(
            0 < limits.log_bytes_max < log.size_bytes
            or 0 < limits.data_dir_bytes_max < log.log_dir.size_bytes
            for log in full
        )

    def begin_retention(
        self, topics: Collection[str] = ()
    ) -> Callable[[], RetentionReport] | None:
        """Return the job of one run of retention, or None while one is under way.

        Args:
            topics: topics whose segments may go by age; those of all topics may go by
                size.

        Returns:
            A job to be called once, on a worker thread: it reads indexes, compresses
            and deletes, and may take minutes. It raises nothing that is not a bug.
        """
        return self._retention.begin(
            [
                picture_directory(
                    directory, self._logs_of(directory), self._config, topics
                )
                for directory in self._directories.values()
                if directory.state is DirState.ONLINE
            ]
        )

    def on_damage(self, log_id: LogId, damage: Damage) -> None:
        """Stop a log in which the scrub found damage; harmless when it is gone."""
        log = self._logs.get(log_id)
        if log is not None and log.state in {LogState.OPEN, LogState.STOPPED}:
            log.on_damage(damage)

    # -- closing

    def close(self, on_closed: Callable[[], None]) -> None:
        """Refuse appends, finish those in flight, sync, close, unlock.

        Never blocks. A disk that hangs makes it take for ever: the caller waits as
        long as it likes, then calls `abandon`.

        Args:
            on_closed: called once on the loop's thread when every file is closed.
        """
        self._is_closing = True
        for log in self._logs.values():
            log.begin_close()
        left: set[LogDir | Retention] = {*self._directories.values(), self._retention}

        def done(part: LogDir | Retention) -> None:
            left.discard(part)
            if not left:
                self._files.close()
                for directory in self._directories.values():
                    directory.unlock()
                on_closed()

        def closed(directory: LogDir) -> None:
            for log in self._logs_of(directory):
                if log.state is LogState.CLOSING:
                    log.finish_close()
            done(directory)

        # A file that is being archived belongs to us until that is over, and so does
        # its directory: who recovers it must not meet files that come and go.
        self._retention.stop(lambda: done(self._retention))
        for directory in self._directories.values():
            logs = [(log.writer, log) for log in self._logs_of(directory)]
            directory.close(logs, partial(closed, directory))

    def abandon(self) -> None:
        """Fail whatever is still in flight after `close`, because the wait is over."""
        for log in self._logs.values():
            if log.state is LogState.CLOSING:
                log.finish_close()

    # -- helpers

    def _require_wanted(self) -> None:
        """Raise ClosedError when what is being opened is not wanted any more."""
        if self._is_closing:
            raise ClosedError("the logs were called off while they were opened")

    def _data_paths(self, config: BrokerConfig) -> list[Path]:
        paths = [config.system.data_path]
        paths += [topic.data_path for topic in config.topics.values()]
        # A path has several spellings: a slash behind it makes it no other.
        return list(dict.fromkeys(map(Path, paths)))

    def _new_directory(self, path: Path) -> LogDir:
        limits, system = self._config.limits, self._config.system
        return LogDir(
            self._fs,
            self._clock,
            self._post,
            path,
            free_bytes_min=limits.free_bytes_min,
            size_bytes_max=_hard_limit(
                limits.data_dir_bytes_max, system.segment_bytes_max
            ),
            start_worker=self._start_worker,
            on_offline=self._on_offline,
        )

    def _new_log(
        self,
        log_id: LogId,
        directory: LogDir,
        settings: TopicConfig,
        writer: LogWriter,
        segments: Segments,
        found: RecoveredLog | None = None,
        batches: Iterable[Batch] = (),
    ) -> PartitionLog:
        limits, system = self._config.limits, self._config.system
        producers = ProducerTable(limits.producer_count_max)
        for batch in batches:
            producers.add(batch)
        return PartitionLog(
            log_id,
            directory,
            writer,
            segments,
            self._files,
            is_group_commit=settings.unflush_threshold <= 0,
            size_bytes_max=_hard_limit(limits.log_bytes_max, system.segment_bytes_max),
            producers=producers,
            record_count=0 if found is None else found.record_count,
            damage=() if found is None else found.damage,
        )

    def _add(self, log: PartitionLog, settings: TopicConfig) -> None:
        self._logs[log.log_id] = log
        log.set_interval_ms(settings.unflush_interval_ms)

    def _add_recovered(self, each: RecoveredPartition) -> None:
        segments = each.found.segments
        if not segments:
            path = each.writer.directory / segment_file_name(Offset(0))
            segments = (Segment(path, Offset(0), SizeBytes(0)),)
        log = self._new_log(
            each.log_id,
            self._directories[each.data_path],
            each.settings,
            each.writer,
            Segments(segments),
            each.found,
            each.batches,
        )
        self._last_id = max(self._last_id, each.last_id)
        self._add(log, each.settings)

    def _logs_of(self, directory: LogDir) -> list[PartitionLog]:
        return [log for log in self._logs.values() if log.log_dir is directory]

    def _on_offline(self, directory: LogDir, error: StorageError) -> None:
        assert directory.state is DirState.OFFLINE
        for log in self._logs_of(directory):
            log.on_offline(error)


def _hard_limit(size_bytes: int, segment_bytes_max: int) -> int:
    """Return the size at which puts are refused for a size that retention keeps to.

    Retention removes sealed segments above `size_bytes`. It can always get back below
    it plus one segment; a log that is larger than that has a retention that does not
    work, and must not fill the disk.
    """
    return size_bytes + segment_bytes_max if size_bytes else 0
