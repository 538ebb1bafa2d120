"""All partition logs of a broker, in one or several data directories.

    <dataPath>/<topic>-<partition>/     one partition log
    <dataPath>/.lock                    held by the owner of the data directory
    <dataPath>/holdings                 record of its contents (`holdings.py`)
    <dataPath>/deleted/                 deleted topics until removal (`set_aside.py`)

`open` blocks: it locks every data directory and recovers every partition in it, several
in parallel, before the broker listens. After that everything belongs to the event
loop's thread. The first put creates a log; its first append creates directory and first
segment, on the storage thread. Source: docs/metaq-1.4/broker.md 2.1, 2.3.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeAlias, TypeVar

from metaq.clock import Clock
from metaq.config.settings import BrokerConfig, TopicConfig
from metaq.errors import ClosedError, OffsetOutOfRangeError, StorageError
from metaq.fs import FileSystem
from metaq.fs.group_thread import GroupThread, Post
from metaq.fs.kernel_syncs import Syncs
from metaq.model import LogId, MessageId, Millis, Offset, SizeBytes
from metaq.stats import HistogramSnapshot, merge_snapshots
from metaq.storage.append_request import Request
from metaq.storage.damage import merge_damage
from metaq.storage.holdings import Claim, Extent
from metaq.storage.inventory import TRANSACTIONS
from metaq.storage.log_dir import DirState, LogDir, StartWorker
from metaq.storage.log_removal import LogRemoval, OnDone
from metaq.storage.log_snapshots import (
    is_over_size_limit,
    sealed,
    take_directory_snapshot,
)
from metaq.storage.log_state import LogState
from metaq.storage.log_writer import LogWriter
from metaq.storage.losses import stop_incomplete
from metaq.storage.opening import (
    CallOnce,
    PartitionLoader,
    RecoveredPartition,
    data_paths,
    extent_of,
    log_directory_name,
    partition_names,
    refuse_duplicates,
)
from metaq.storage.partition_log import PartitionLog
from metaq.storage.producers import ProducerTable, StoredBatch
from metaq.storage.recovery import RecoveredLog
from metaq.storage.retention import hard_limit
from metaq.storage.retention_run import Retention, RetentionReport
from metaq.storage.segment import Damage, Segment, Segments, segment_file_name
from metaq.storage.span_index import NO_ID
from metaq.storage.watermarks import KnownWatermarks

FREE_SPACE_IDLE_S: Final = 30.0
"""Interval of free-space checks without writes, seconds."""

FREE_SPACE_LOW_S: Final = 1.0
"""Interval of free-space checks while puts are refused for lack of space, seconds."""


T = TypeVar("T")

ChangeFiles: TypeAlias = Callable[[FileSystem, Path, int], None]
"""Changes the files of a directory; the number is the maximum count of producers."""


class LogManager(LogRemoval):
    """The partition logs of one broker. Owner: the event loop's thread."""

    def __init__(
        self,
        fs: FileSystem,
        clock: Clock,
        post: Post,
        config: BrokerConfig,
        *,
        start_worker: StartWorker = GroupThread[Request],
        syncs: Syncs | None = None,
    ) -> None:
        """Create a manager without logs; `open` reads them.

        Args:
            fs: the disk.
            clock: wall clock and monotonic clock.
            post: runs a callback on the loop's thread (`post_to(loop)`).
            config: data paths, sizes, durability mode, limits.
            start_worker: makes the storage thread of a directory.
            syncs: kernel syncs of the loop's thread; see `LogDir`.
        """
        super().__init__(
            fs, clock, post, Path(config.system.data_log_path) / TRANSACTIONS
        )
        self._config = config
        self._start_worker = start_worker
        self._syncs = syncs
        self._last_id = NO_ID
        self.newest_append_ms: Millis | None = None
        """Wall clock of the newest append that recovery found; None if none."""
        self._is_closing = False
        self._may_seal = True
        self.lacks_bytes = False
        """Whether the start of a replica found that bytes are missing."""
        self.assign_number: Callable[[LogId, LogDir, Offset], int] | None = None
        """Assigns the number of a new log, if a replica leads."""
        self.on_numbered: Callable[[PartitionLog], None] | None = None
        """Called with a log that got its number so, before its first append."""

    # -- opening

    def open(
        self,
        *,
        left_out: Collection[str] = (),
        numbers: Mapping[LogId, int] | None = None,
        starts: Mapping[LogId, Offset] = MappingProxyType({}),
        buried: Collection[LogId] = (),
        on_torn_tail: Callable[[], None] = lambda: None,
    ) -> None:
        """Lock and recover every data directory in the configuration.

        Blocks without a limit on the disks; called once, on any thread, before all
        else.

        Args:
            left_out: topics that are being deleted: their partitions are neither
                recovered nor missed.
            numbers: log numbers, for a replica: its logs follow, and have the high
                watermarks that it knew.
            starts: start offsets of logs; one without a segment begins there.
            buried: logs whose number is gone, and that may not be moved yet.
            on_torn_tail: called once, on any thread, before the first torn tail is cut;
                it may block, and raise StorageError.

        Raises:
            LogDirLockedError: another process has locked a directory.
            DataMissingError: a data directory, as a whole, holds less than before.
            StorageError: a disk fails, or one partition is in two directories. All
                opened files are closed again.
            ClosedError: `cancel_open` or `close` was called; likewise.
        """
        recovered: list[RecoveredPartition] = []
        opened: list[LogDir] = []
        try:
            for path in data_paths(self._config):
                directory = self._new_directory(path)
                opened.append(directory)
                directory.open()
            names = {each.path: partition_names(self._fs, each.path) for each in opened}
            self._inventory.read(names, left_out)
            self._may_seal = numbers is None or self.were_sealed
            if numbers is not None:
                self.known = KnownWatermarks(self._fs, names, numbers, starts)
            loader = self._loader(CallOnce(on_torn_tail))
            for directory in opened:
                path = directory.path
                self._inventory.settle_accepted(path, names[path])
                recovered += loader.recover(
                    path,
                    directory.sync_latency,
                    left_out=left_out,
                    require_wanted=self._require_wanted,
                )
            refuse_duplicates(recovered)
            self._require_wanted()
            recovered = stop_incomplete(self._inventory, loader, recovered, opened)
            extents = (
                (each.data_path, each.log_id, extent)
                for each in recovered
                if (extent := self._extent_of(each)) is not None
            )
            is_replica = self.known is not None
            records = self._inventory.make_records(extents, is_replica=is_replica)
            self._inventory.write_all(records)
        except (StorageError, ClosedError):
            for each in recovered:
                each.writer.abandon()
            for directory in opened:
                directory.unlock()
            raise
        for directory in opened:
            if self.known is not None:
                directory.watermarks = self.known.file_of(directory.path)
            directory.start()
            self._directories[directory.path] = directory
        for each in recovered:
            self._add_recovered(each)
        if self.known is not None:
            self._add_unwritten(self.known, left_out)
            self._find_missing_bytes(self.known, buried)
        times = [each.newest_append_ms for each in recovered if each.newest_append_ms]
        self.newest_append_ms = max(times, default=None)
        self._retention.start(self.newest_append_ms)

    def cancel_open(self) -> None:
        """End an `open` on another thread after the partitions in progress.

        Nothing can be opened any more; call `close` when `open` has ended.
        """
        self._is_closing = True

    def last_message_id(self) -> MessageId:
        """Return the largest id that recovery found, as a floor; negative if none.

        There may be no record with it: see `RecoveredPartition`. A record before the
        batch of a transaction may have a greater id, because such a batch has the ids
        of its puts; the time in that id is at most `newest_append_ms`.
        """
        return self._last_id

    # -- logs

    def get_or_create(
        self,
        log_id: LogId,
        settings: TopicConfig,
        *,
        start_offset: Offset = Offset(0),  # noqa: B008  # a NewType is its number
        number: int | None = None,
    ) -> PartitionLog:
        """Return a log, created in memory if it does not exist yet.

        Args:
            log_id: the partition; the caller has checked the topic.
            settings: of the topic: durability mode and data path of a new log.
            start_offset: start of a new log (a copy starts where its leader does).
            number: log number of a new log in a replica set, which follows; None:
                `assign_number` assigns one.

        Raises:
            StorageError: the name cannot be a directory, or the data path was
                configured after the start.
            LogDirOfflineError: the data directory had a disk error.
            ClosedError: the manager is closed or closing.
        """
        found = self._logs.get(log_id)
        if found is not None:
            return found
        log_directory_name(log_id)  # before a number is assigned
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
        is_new = number is None and self.assign_number is not None
        if number is None and self.assign_number is not None:
            number = self.assign_number(log_id, directory, start_offset)
        log = self._make_log(log_id, directory, settings, start_offset, number)
        if is_new and self.on_numbered is not None:
            self.on_numbered(log)
        return log

    # -- of a replica

    def begin_again(
        self, copies: Mapping[LogId, tuple[Offset, int]], on_done: OnDone
    ) -> None:
        """Set logs aside, and create empty ones in their place; never blocks.

        The caller repeats it until it succeeds; that sets aside the new ones, too.

        Args:
            copies: partition → start of the new log, which follows, and its number.
            on_done: called on the loop's thread with the error, or None.
        """

        def make(error: Exception | None) -> None:
            try:
                if error is not None:
                    raise error
                for log_id, (start, number) in copies.items():
                    settings = self._config.topic(log_id.topic)
                    self.get_or_create(
                        log_id, settings, start_offset=start, number=number
                    )
            except (StorageError, ClosedError) as failed:
                on_done(failed)
            else:
                on_done(None)

        self.set_logs_aside(copies, make)

    def lower_high_watermarks(
        self, ends: Mapping[LogId, Offset], on_done: OnDone
    ) -> None:
        """Lower high watermarks, and no longer expect bytes above them.

        For logs that follow or are stopped, which may be cut then. Never blocks.

        Args:
            ends: partition → the offset; a lower high watermark stays.
            on_done: called on the loop's thread with the error, or None when a start
                would know no higher one.

        Raises:
            StorageError: a log does not follow.
        """
        for log_id, end in ends.items():
            self._logs[log_id].lower_high_watermark(end)
        self._write_records(on_done)

    @property
    def holdings_version(self) -> int:
        """Return the version of the data directories: the least of any of them.

        If it is lower than in ZooKeeper, a directory was restored from a backup.
        """
        return self._inventory.version

    @property
    def were_sealed(self) -> bool:
        """Return whether a clean stop had sealed all data directories."""
        return self._inventory.were_sealed

    def set_holdings_version(self, version: int, on_done: OnDone) -> None:
        """Write a version to every data directory; never blocks.

        Args:
            version: higher than the previous one.
            on_done: called on the loop's thread with the error, or None when synced.
        """
        self._inventory.version, self._may_seal = version, True
        self._write_records(on_done)

    def identities(self) -> dict[str, str]:
        """Return path → identity of every data directory."""
        return {str(path): self._inventory.identity(path) for path in self._directories}

    # -- what transactions need (`metaq/txn/ports.py`)

    def readable_range(self, log_id: LogId) -> tuple[Offset, Offset]:
        """Return log start and high watermark; (0, 0) for an unknown log."""
        log = self._logs.get(log_id)
        if log is None:
            return Offset(0), Offset(0)
        return log.log_start_offset, log.high_watermark

    def read_back(self, log_id: LogId, offset: Offset, size_bytes: int) -> bytes:
        """Return stored bytes; blocks on the disk.

        Returns:
            `size_bytes` bytes from `offset`; fewer if the readable part or the segment
            ends before. No append is in two segments.

        Raises:
            OffsetOutOfRangeError: no readable byte is there; an unknown log is empty.
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

    def hold(self, log_id: LogId, offset: Offset) -> None:
        """Make a log unreadable from an offset on, until the append there is whole."""
        self._logs[log_id].hold(offset)

    # -- housekeeping

    def apply_settings(self, config: BrokerConfig) -> None:
        """Apply reloaded settings: sync intervals now, the rest for later new logs."""
        self._config = config
        for log in self._logs.values():
            log.set_interval_s(config.topic(log.log_id.topic).unflush_interval_s)

    def tick(self, now_s: float) -> None:
        """Do periodic work: syncs of threshold mode, free-space checks, records.

        Cheap; called by the broker's housekeeping, about as often as the shortest
        sync interval.

        Args:
            now_s: the monotonic clock.
        """
        for log in self._logs.values():
            if not log.is_group_commit:
                log.sync_if_due(now_s)
        directories = self._directories.values()
        for directory in directories:
            low = directory.is_low_on_space
            directory.tick(now_s, FREE_SPACE_LOW_S if low else FREE_SPACE_IDLE_S)
        if any(each.is_record_due(now_s) for each in directories):
            for path, record in self._make_records().items():
                self._directories[path].write_record(record)

    def index(self) -> None:
        """Queue the indexing of small groups; called often, unless `is_indexed`."""
        for directory in self._directories.values():
            directory.index()

    def is_indexed(self, on_log_moved: Callable[[], None]) -> bool:
        """Return whether there is nothing to index until `on_log_moved` is called."""
        return all(each.is_indexed(on_log_moved) for each in self._directories.values())

    def directories(self) -> tuple[LogDir, ...]:
        """Return the data directories, for statistics."""
        return tuple(self._directories.values())

    def claims(self) -> dict[str, Claim]:
        """Return path → identity and number of partitions, to be stored elsewhere."""
        counts = Counter(log.log_dir.path for log in self._logs.values())
        return {
            str(path): Claim(self._inventory.identity(path), counts[path])
            for path in self._directories
        }

    def check_claims(self, witness: str, claims: Mapping[str, tuple[str, int]]) -> None:
        """Raise if a data directory held less at the start than is known elsewhere.

        Args:
            witness: source of the claims, for the error text.
            claims: result of `claims` in an earlier run.

        Raises:
            DataMissingError: the text names the remedy.
        """
        self._inventory.check_claims(witness, claims)

    def sync_latency(self) -> HistogramSnapshot:
        """Return the duration of syncs of segments, over all directories."""
        return merge_snapshots(
            each.sync_latency.snapshot() for each in self._directories.values()
        )

    # -- retention and scrub

    @property
    def is_over_size_limit(self) -> bool:
        """Return whether a log or a data directory is larger than its limit.

        Then a run of retention without topics is due, regardless of the schedule.
        """
        return is_over_size_limit(self._logs.values(), self._config)

    def reopen(
        self,
        log_id: LogId,
        change: ChangeFiles,
        on_done: OnDone,
        *,
        is_mended: Callable[[Damage], bool],
    ) -> None:
        """Close a log that follows or is stopped, change its files, and open it again.

        It follows then, or is stopped for remaining damage. Until the callback it
        accepts only gets. Never blocks.

        Args:
            log_id: the partition.
            change: called on the storage thread while the files are closed; raises
                StorageError.
            on_done: called on the loop's thread with the error, or None.
            is_mended: whether a damaged range is good and synced after the change.

        Raises:
            StorageError: there is no such log, or it takes puts.
        """
        log = self._require_open(log_id)
        log.begin_reopen()

        def begin() -> None:
            if log.state is not LogState.REOPENING:
                on_done(ClosedError(f"partition {log_id} is {log.state.value}"))
                return
            self._retention.forget(log.segments)
            count_max = self._config.limits.producer_count_max
            work = partial(change, self._fs, log.writer.directory, count_max)
            recover = partial(self._loader().reopen, log_id, log.writer)
            reopen = log.log_dir.appender.reopen
            log.log_dir.submit(partial(reopen, log.writer, work, recover, done))

        def done(each: RecoveredPartition | None, error: StorageError | None) -> None:
            if each is not None:
                left = (damage for damage in log.damage if not is_mended(damage))
                damage = merge_damage((*left, *each.found.damage))
                log.on_reopened(replace(each.found, damage=damage), each.batches)
            on_done(error)

        # A run of retention uses the files of its snapshot.
        self._retention.call_when_idle(begin)

    def change_file(
        self, log_id: LogId, change: Callable[[FileSystem], None], on_done: OnDone
    ) -> None:
        """Change a file of a log in place, between its appends; never blocks.

        Args:
            log_id: the partition.
            change: called on the storage thread; raises StorageError.
            on_done: called on the loop's thread with the error, or None.

        Raises:
            StorageError: there is no such log.
        """
        log = self._require_open(log_id)

        def work() -> None:
            error: StorageError | None = None
            try:
                change(self._fs)
            except StorageError as failed:
                error = failed
            self._post(partial(on_done, error))

        log.log_dir.submit(work)

    def begin_retention(
        self, topics: Collection[str] = ()
    ) -> Callable[[], RetentionReport] | None:
        """Return the job of one run of retention, or None while one is in progress.

        Args:
            topics: topics whose segments may be removed by age; segments of all topics
                may be removed by size.

        Returns:
            A job for one call on a worker thread: it reads indexes, compresses and
            deletes, and may take minutes. Any exception is a bug.
        """
        return self._retention.begin(
            [
                take_directory_snapshot(
                    directory, self._logs_of(directory), self._config, topics
                )
                for directory in self._directories.values()
                if directory.state is DirState.ONLINE
            ]
        )

    def while_uncut(self, work: Callable[[], T]) -> Callable[[], T]:
        """Wrap `work` so that no log is cut while it runs; see `Retention.hold`."""
        return self._retention.hold(work)

    def on_damage(self, log_id: LogId, damage: Damage) -> None:
        """Stop a log in which the scrub found damage; no effect if it is gone."""
        log = self._logs.get(log_id)
        if log is not None:
            log.on_damage(damage)

    # -- closing

    def close(self, on_closed: Callable[[], None]) -> None:
        """Refuse appends, finish those in flight, sync, close, unlock.

        Never blocks. If a disk hangs, the callback may never come: the caller stops
        waiting after its own time limit, and calls `abandon`.

        Args:
            on_closed: called once on the loop's thread when every file is closed.
        """
        self._is_closing = True
        for log in self._logs.values():
            if log.state is not LogState.CLOSING:
                log.begin_close()
        # A run of retention in progress may remove segments that the seal would
        # include.
        is_exact = self._may_seal and not self._retention.is_running
        is_replica = self.known is not None
        seal = partial(sealed, is_exact=is_exact, is_replica=is_replica)
        records = self._make_records()
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

        # A file being archived belongs to us until that is done, and so does its
        # directory: the next owner's recovery must not see files that come and go.
        self._retention.stop(lambda: done(self._retention))
        for directory in self._directories.values():
            logs = [
                log
                for log in self._logs_of(directory)
                if log.log_id not in self._forgotten
            ]
            directory.close(
                [(log.writer, log) for log in logs],
                partial(seal, records[directory.path], logs),
                partial(closed, directory),
            )

    def abandon(self) -> None:
        """Fail everything in flight, because the wait after `close` is over."""
        for log in self._logs.values():
            if log.state is LogState.CLOSING:
                log.finish_close()

    # -- helpers

    def _require_wanted(self) -> None:
        """Raise ClosedError if opening was cancelled."""
        if self._is_closing:
            raise ClosedError("the logs were called off while they were opened")

    def _loader(
        self, on_torn_tail: Callable[[], None] = lambda: None
    ) -> PartitionLoader:
        starts = {} if self.known is None else self.known.starts
        return PartitionLoader(
            self._fs, self._clock, self._config, starts, on_torn_tail
        )

    def _new_directory(self, path: Path) -> LogDir:
        limits, system = self._config.limits, self._config.system
        return LogDir(
            self._fs,
            self._clock,
            self._post,
            path,
            free_bytes_min=limits.free_bytes_min,
            size_bytes_max=hard_limit(
                limits.data_dir_bytes_max, system.segment_bytes_max
            ),
            start_worker=self._start_worker,
            syncs=self._syncs,
            on_offline=self._on_offline,
        )

    def _make_log(
        self,
        log_id: LogId,
        directory: LogDir,
        settings: TopicConfig,
        start: Offset,
        number: int | None,
    ) -> PartitionLog:
        """Create a log without files."""
        path = directory.path / log_directory_name(log_id)
        writer = self._loader().new_writer(
            settings, path, directory.sync_latency, end=start
        )
        segments = Segments(
            (Segment(path / segment_file_name(start), start, SizeBytes(0)),)
        )
        log = self._new_log(
            log_id, directory, settings, writer, segments, number=number
        )
        self._logs[log_id] = log
        return log

    def _new_log(
        self,
        log_id: LogId,
        directory: LogDir,
        settings: TopicConfig,
        writer: LogWriter,
        segments: Segments,
        found: RecoveredLog | None = None,
        batches: Iterable[StoredBatch] = (),
        *,
        number: int | None = None,
        watermark: Offset | None = None,
    ) -> PartitionLog:
        producers = ProducerTable(self._config.producers_of(log_id.topic))
        for batch in batches:
            producers.add(batch)
        log = PartitionLog(
            log_id,
            directory,
            writer,
            segments,
            self._files,
            is_group_commit=settings.unflush_threshold <= 0,
            interval_s=settings.unflush_interval_s,
            size_bytes_max=hard_limit(
                self._config.log_bytes_max_of(log_id.topic),
                self._config.system.segment_bytes_max,
            ),
            producers=producers,
            record_count=0 if found is None else found.record_count,
            damage=() if found is None else found.damage,
            number=number,
            watermark=watermark,
        )
        if self.known is not None:
            log.follow()
        return log

    def _add_recovered(self, each: RecoveredPartition) -> None:
        segments = each.found.segments
        if not segments:
            start = each.writer.end
            path = each.writer.directory / segment_file_name(start)
            segments = (Segment(path, start, SizeBytes(0)),)
        extent = None if self.known is None else self._extent_of(each)
        log = self._new_log(
            each.log_id,
            self._directories[each.data_path],
            each.settings,
            each.writer,
            Segments(segments),
            each.found,
            each.batches,
            number=None if self.known is None else self.known.numbers.get(each.log_id),
            watermark=None if extent is None else extent.end,
        )
        self._last_id = max(self._last_id, each.last_id)
        self._logs[each.log_id] = log

    def _add_unwritten(self, known: KnownWatermarks, left_out: Collection[str]) -> None:
        """Create the logs that have a number but no directory yet."""
        for log_id, number in known.numbers.items():
            if log_id not in self._logs and log_id.topic not in left_out:
                self.lacks_bytes = self.lacks_bytes or known.has_lost(log_id)
                settings = self._config.topic(log_id.topic)
                directory = self._directories[Path(settings.data_path)]
                start = known.starts.get(log_id, Offset(0))
                self._make_log(log_id, directory, settings, start, number)

    def _find_missing_bytes(
        self, known: KnownWatermarks, buried: Collection[LogId]
    ) -> None:
        """Set `lacks_bytes` if bytes are missing, or some have unknown epochs."""
        is_unknown = any(
            log.number is None and log.next_offset > log.log_start_offset
            for log in self._logs.values()
            if log.log_id not in buried
        )
        # For damage up to the end the former size of the log is unknown.
        is_open = any(
            damage.next_good_offset is None
            for log in self._logs.values()
            for damage in log.damage
        )
        lacks = self._inventory.lacks_bytes or known.too_short
        if lacks or is_unknown or is_open:
            self.lacks_bytes = True

    def _extent_of(self, each: RecoveredPartition) -> Extent | None:
        """Return the offsets of a log; for a replica, those that cannot be cut."""
        found = extent_of(each.found.segments)
        if self.known is None or found is None:
            return found
        return self.known.extent_of(each.data_path, each.log_id, found)

    def _on_offline(self, directory: LogDir, error: StorageError) -> None:
        assert directory.state is DirState.OFFLINE
        for log in self._logs_of(directory):
            if log.state is not LogState.CLOSING:
                log.on_offline()
