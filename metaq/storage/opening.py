"""From a data directory to recovered partitions: names, recovery, writers.

The first half of `LogManager.open`, which blocks. Nothing here outlives it: a failure
closes all files again; else the manager makes logs from the result. Source:
docs/metaq-1.4/broker.md 2.1, 2.3.
"""

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Final

from metaq.clock import Clock
from metaq.config.settings import BrokerConfig, TopicConfig
from metaq.errors import ClosedError, NoSpaceError, StorageError
from metaq.fs import FileSystem
from metaq.fs.helper_threads import HelperThreads
from metaq.model import LogId, MessageId, Millis, Offset, SizeBytes, no_items
from metaq.record.ids import id_after
from metaq.stats import Histogram
from metaq.storage.damage import merge_damage
from metaq.storage.holdings import Extent
from metaq.storage.listing import check_names
from metaq.storage.log_writer import UNSYNCED_BYTES_MAX, LogWriter, WriterOptions
from metaq.storage.producer_file import (
    PRODUCERS_NAME,
    read_notes,
    stored_batches,
    write_notes,
)
from metaq.storage.producers import StoredBatch
from metaq.storage.recovery import RecoveredLog, recover_log
from metaq.storage.retention_run import facts_of
from metaq.storage.segment import Damage, Segment, segment_file_name
from metaq.storage.span_index import NO_ID

NAME_BYTES_MAX: Final = 255
"""Maximum length of a file name on Linux."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RecoveredPartition:
    """One partition after recovery, before it is in service."""

    log_id: LogId
    data_path: Path
    settings: TopicConfig
    found: RecoveredLog
    writer: LogWriter
    """Open at the end of the active segment, unless there is damage."""
    batches: tuple[StoredBatch, ...]
    """Remembered batches of its producers, in the order of the appends."""
    last_id: MessageId
    """Largest id that was stored, or noted for a batch that was not. New ids must be
    larger, because a note is trusted if a record at its offset has its id. -1: none."""
    newest_append_ms: Millis | None


def log_directory_name(log_id: LogId) -> str:
    """Return the directory name of a partition.

    Raises:
        StorageError: no file system accepts the name; the topic comes from the wire, so
            it may be any text.
    """
    name = str(log_id)
    try:
        size = len(name.encode())
    except UnicodeEncodeError as error:
        raise StorageError(f"topic is not text: topic={log_id.topic!r}") from error
    if not log_id.topic or "/" in name or "\0" in name:
        raise StorageError(f"topic cannot name a directory: topic={log_id.topic!r}")
    if size > NAME_BYTES_MAX:
        raise StorageError(
            f"topic is too long: expected a directory name of at most {NAME_BYTES_MAX}"
            f" bytes, got {size}"
        )
    return name


def parse_log_directory_name(name: str) -> LogId | None:
    """Return the partition of a directory name, or None if it is not one.

    The text after the last '-' is the number; only our own spelling is accepted, so
    that two directories never name one partition.
    """
    topic, dash, number = name.rpartition("-")
    if not (dash and topic and number.isascii() and number.isdecimal()):
        return None
    log_id = LogId(topic, int(number))
    return log_id if str(log_id) == name else None


def find_logs(fs: FileSystem, data_path: Path) -> dict[str, LogId]:
    """Return the partition directories in a data directory, by name."""
    return {
        name: log_id
        for name in fs.list_directory(data_path)
        if (log_id := parse_log_directory_name(name)) is not None
        and fs.is_directory(data_path / name)
    }


@dataclass(frozen=True, slots=True)
class PartitionLoader:
    """Makes the writers of partitions and recovers their directories. Thread-safe."""

    fs: FileSystem
    clock: Clock
    config: BrokerConfig
    starts: Mapping[LogId, Offset] = field(default_factory=no_items)
    """Start offsets of logs that may have no segment yet; others start at 0."""
    on_torn_tail: Callable[[], None] = lambda: None
    """Called before a torn tail is cut, on any thread."""

    def new_writer(
        self, settings: TopicConfig, path: Path, sync_latency: Histogram, *, end: Offset
    ) -> LogWriter:
        """Return the writer of a partition directory, without open files."""
        limits = self.config.limits
        options = WriterOptions(
            segment_bytes_max=self.config.segment_bytes_of(settings.name),
            span_bytes_min=limits.span_bytes_min,
            slow_sync_ms=limits.slow_sync_ms,
            unflush_threshold=settings.unflush_threshold,
            unflush_interval_s=settings.unflush_interval_s,
            producer_count_max=self.config.producers_of(settings.name),
        )
        return LogWriter(
            self.fs,
            self.clock,
            path,
            options,
            end=end,
            last_id=NO_ID,
            sync_latency=sync_latency,
        )

    def recover(
        self,
        data_path: Path,
        sync_latency: Histogram,
        *,
        left_out: Collection[str] = (),
        require_wanted: Callable[[], None],
    ) -> list[RecoveredPartition]:
        """Recover the partitions of one data directory, in parallel on all CPUs.

        Directories without a dash are ignored; one with a dash that is no partition
        gets a warning. Partitions of the topics `left_out` are not touched.
        `require_wanted` is called before each partition, on several threads, and may
        raise `ClosedError`. After an error all files are closed.
        """
        wanted = []
        for name in self.fs.list_directory(data_path):
            path = data_path / name
            if "-" not in name or not self.fs.is_directory(path):
                continue
            log_id = parse_log_directory_name(name)
            if log_id is None:
                _log.warning("directory skipped, no partition: directory=%s", path)
            elif log_id.topic not in left_out:
                wanted.append(log_id)

        def recover(log_id: LogId) -> RecoveredPartition:
            require_wanted()
            return self._recover(data_path, log_id, sync_latency)

        with HelperThreads(os.cpu_count() or 1, "metaq-recovery") as pool:
            futures = [pool.submit(recover, log_id) for log_id in wanted]
        try:
            return [future.result() for future in futures]
        except (StorageError, ClosedError):
            for future in futures:
                if future.exception() is None:
                    future.result().writer.abandon()
            raise

    def missing_partition(
        self, log_id: LogId, loss: Damage, held: Extent, sync_latency: Histogram
    ) -> RecoveredPartition:
        """Return a stopped partition for one without files: empty at its end offset.

        `loss` is the missing data, with the partition's directory as its path; `held`
        is its former range of offsets.
        """
        settings = self.config.topic(log_id.topic)
        path, end = loss.path, held.end
        writer = self.new_writer(settings, path, sync_latency, end=end)
        _log.error("log stopped: %s", loss)
        last = Segment(path / segment_file_name(end), end, SizeBytes(0))
        found = RecoveredLog((last,), None, NO_ID, 0, (loss,))
        return RecoveredPartition(
            log_id, path.parent, settings, found, writer, (), NO_ID, None
        )

    def _recover(
        self, data_path: Path, log_id: LogId, sync_latency: Histogram
    ) -> RecoveredPartition:
        settings = self.config.topic(log_id.topic)
        path = data_path / str(log_id)
        start = self.starts.get(log_id, Offset(0))
        writer = self.new_writer(settings, path, sync_latency, end=start)
        return self.reopen(log_id, writer, is_index_trusted=False)

    def reopen(
        self, log_id: LogId, writer: LogWriter, *, is_index_trusted: bool = True
    ) -> RecoveredPartition:
        """Recover one partition, and open its writer, which has no files; blocks.

        Raises:
            StorageError: the disk refuses.
        """
        fs, limits = self.fs, self.config.limits
        settings, path = self.config.topic(log_id.topic), writer.directory
        if is_index_trusted:
            # A log without an append has no directory.
            fs.make_directory(path)
        is_group_commit = settings.unflush_threshold <= 0
        notes = read_notes(fs, path)
        if notes.flaw:
            _log.error(
                "producers are forgotten: partition=%s file=%s %s",
                log_id,
                path / PRODUCERS_NAME,
                notes.flaw,
            )
        noted = notes.batches
        found = recover_log(
            fs,
            path,
            unsynced_bytes_max=UNSYNCED_BYTES_MAX if is_group_commit else None,
            span_bytes_min=limits.span_bytes_min,
            now_ms=self.clock.wall_ms(),
            noted=noted,
            is_index_trusted=is_index_trusted,
            on_torn_tail=self.on_torn_tail,
        )
        segments = found.segments
        end = segments[-1].end_offset if segments else writer.end
        newest = found.spans.newest_append_ms if found.spans is not None else None
        try:
            batches = stored_batches(
                fs,
                segments,
                noted,
                producer_count_max=self.config.producers_of(log_id.topic),
            )
            if notes.flaw and not found.damage:
                # Rewrite the file, so that the next start does not report it again.
                with suppress(NoSpaceError):
                    write_notes(fs, path, batches)
            writer.reset(end=end, last_id=found.last_id, batches=batches)
            if newest is None and len(segments) > 1:
                # Right after a roll the active segment is empty.
                newest = facts_of(fs, segments[-2]).newest_append_ms
            if segments and not found.damage:
                writer.reopen(segments[-1], found.spans)
        except StorageError:
            if found.spans is not None:
                found.spans.abandon()
            raise
        ids = [id_after(batch.first_id, batch.count - 1) for batch in noted]
        last_id = max([found.last_id, *ids])
        return RecoveredPartition(
            log_id, path.parent, settings, found, writer, batches, last_id, newest
        )


class CallOnce:
    """Calls a function once, before its first caller continues. Thread-safe."""

    def __init__(self, call: Callable[[], None]) -> None:
        """Set the function; it blocks all callers until a call has succeeded."""
        self._call = call
        self._lock = Lock()
        self._is_done = False

    def __call__(self) -> None:
        """Return after a success; an error is raised, and the next caller retries."""
        with self._lock:
            if not self._is_done:
                self._call()
                self._is_done = True


def refuse_duplicates(recovered: Iterable[RecoveredPartition]) -> None:
    """Raise `StorageError` if a partition is in two data directories."""
    places: dict[LogId, Path] = {}
    for each in recovered:
        other = places.setdefault(each.log_id, each.data_path)
        if other != each.data_path:
            raise StorageError(
                f"partition is in two data directories: partition={each.log_id}"
                f" directories={other}, {each.data_path}"
            )


def data_paths(config: BrokerConfig) -> list[Path]:
    """Return the data directories of a broker, first that of `[system]`."""
    paths = [config.system.data_path]
    paths += [topic.data_path for topic in config.topics.values()]
    # Normalise paths: with a slash at the end it is the same directory.
    return list(dict.fromkeys(map(Path, paths)))


def partition_names(fs: FileSystem, data_path: Path) -> tuple[str, ...]:
    """Return the names in a data directory that are spelled like partitions."""
    return tuple(
        name
        for name in fs.list_directory(data_path)
        if parse_log_directory_name(name) is not None
    )


def extent_of(segments: Sequence[Segment]) -> Extent | None:
    """Return the range of offsets of segments, oldest first; None without any."""
    if not segments:
        return None
    return Extent(segments[0].base_offset, segments[-1].end_offset)


def listed_extents(
    fs: FileSystem, data_path: Path, names: Iterable[str]
) -> dict[str, Extent | None]:
    """Return the offsets of partition directories from names and sizes of files.

    Names that are no directory are left out.
    """
    return {
        name: extent_of(check_names(fs, data_path / name).segments)
        for name in names
        if fs.is_directory(data_path / name)
    }


def stop_for(each: RecoveredPartition, loss: Damage) -> RecoveredPartition:
    """Close a partition with missing data, and return it as stopped.

    Args:
        each: a recovered partition with segments.
        loss: the missing data.
    """
    _log.error("log stopped: %s", loss)
    each.writer.abandon()
    damage = merge_damage((*each.found.damage, loss))
    return replace(each, found=replace(each.found, spans=None, damage=damage))
