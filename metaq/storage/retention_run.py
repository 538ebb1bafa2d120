"""Carry out retention: facts from the disk, the plan, one removal after the other.

The loop's thread begins a run with an immutable snapshot of the logs; the run itself
blocks, for minutes when it compresses, and belongs on a worker thread of the caller. It
never touches a log: removals are posted to the loop. Runs never overlap.

A segment stays in its log until its file is removed; a get in between is answered that
the log starts after it. A removal that fails ends the run for its log: segments are
removed in order or not at all. A stop waits for the run, which ends between two
removals, or during a compression; that segment then stays. A log that is stopped during
a run keeps all its segments from then on, because an operator must examine the damage.
Keep in step: `retention.py` (the plan).

Removal of a segment, by the policy of its topic:

    delete             <name>.meta is removed, then its index
    archive            <name>.meta → <name>.meta.arc, then the index is removed
    archive, zipped    <name>.meta.zip.tmp written, synced, renamed to <name>.meta.zip;
                       only then <name>.meta is removed, then its index

Each name is durable before the next step. After a crash between two steps the segment
is fully there or fully gone: recovery removes an incomplete archive and an index
without a segment; a complete archive beside its source is replaced by the next run.
Until the segment's own name is gone, an error leaves the segment unchanged. Source:
docs/metaq-1.4/broker.md 2.9.
"""

import logging
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from metaq.clock import Clock
from metaq.config.settings import DeleteKind, DeletePolicy
from metaq.errors import (
    ClosedError,
    CorruptRecordError,
    DiskError,
    LogOfflineError,
    StorageError,
)
from metaq.fs import AppendFile, FileSystem, ReadFile
from metaq.model import LogId, Millis, Position, SizeBytes
from metaq.storage.damage import damage_in_spans
from metaq.storage.key_index import keys_path
from metaq.storage.retention import (
    LogFacts,
    Reason,
    SegmentFacts,
    TrustedTime,
    check_clocks,
    plan_retention,
    trust_at_start,
)
from metaq.storage.segment import Segment
from metaq.storage.span_index import Span, read_index, read_totals, spans_path

_log = logging.getLogger(__name__)

T = TypeVar("T")

ARCHIVE_SUFFIX: Final = ".arc"
ZIP_SUFFIX: Final = ".zip"

COPY_BYTES: Final = 1 << 20
"""Bytes compressed at once."""

_ZIP_EARLIEST: Final = (1980, 1, 1, 0, 0, 0)
"""Earliest time that a zip entry can have."""

_HARMLESS: Final = frozenset({"open", "read", "stat"})
"""Operations whose failure leaves written bytes intact."""

_FORBIDDEN: Final = frozenset({"EACCES", "EPERM"})
"""Errors of a forbidden removal, which changed nothing: the file is protected."""


@dataclass(frozen=True, slots=True)
class LogSnapshot:
    """State of one log at the beginning of the run."""

    log_id: LogId
    on_removed: Callable[[Segment, int], None]
    """Called on the loop's thread for each removed segment, with its record count."""
    sealed: tuple[Segment, ...]
    """Segments that may be removed, oldest first."""
    active: Segment
    policy: DeletePolicy
    is_stopped: Callable[[], bool]
    """Returns whether no segment may be removed any more; called on any thread."""


@dataclass(frozen=True, slots=True)
class DirectorySnapshot:
    """State of one data directory at the beginning of the run."""

    path: Path
    logs: tuple[LogSnapshot, ...]
    """Logs from which retention may remove segments, so no stopped ones."""
    log_bytes_max: int
    """Size limit of each log, bytes; 0: none."""
    size_bytes_max: int
    """Size limit of all logs together, bytes; 0: none."""
    on_disk_error: Callable[[StorageError], None]
    """Called with a disk error, on the loop's thread."""


@dataclass(frozen=True, slots=True)
class RetentionReport:
    """Result of a run."""

    segment_count: int
    size_bytes: SizeBytes
    failures: tuple[str, ...]
    """One line for each failed removal; its segment is unchanged or gone."""
    clock_fault: str | None
    """Reason for not trusting the wall clock; None: it was trusted."""


class Retention:
    """Retention of one broker. Owner: the loop's thread, except for a run's job."""

    def __init__(
        self, fs: FileSystem, clock: Clock, post: Callable[[Callable[[], None]], object]
    ) -> None:
        self._fs = fs
        self._clock = clock
        self._post = post
        self._trusted: TrustedTime | None = None
        # Sealed segments do not change, and indexes are long: read each once.
        self._facts: dict[Segment, SegmentFacts] = {}
        self._on_idle: list[Callable[[], None]] = []
        self._is_stopping = False
        self._held = 0
        self.is_running = False
        """Whether a job was handed out and has not ended."""

    def start(self, newest_append_ms: Millis | None) -> None:
        """Set the time of the newest append, for the first look at the clocks."""
        trusted = trust_at_start(
            newest_append_ms, wall_ms=self._clock.wall_ms(), boot_ms=self._boot_ms()
        )
        if trusted.is_absence:
            _log.info(
                "nothing was stored for long, retention by age waits for a day:"
                " absent_s=%d",
                trusted.lead_ms // 1000,
            )
        self._trusted = trusted

    def begin(
        self, directories: Sequence[DirectorySnapshot]
    ) -> Callable[[], RetentionReport] | None:
        """Return the job of one run, or None while another one is in progress.

        The caller runs the job once, on a worker thread.
        """
        if self.is_running or self._is_stopping:
            return None
        self.is_running = True
        return partial(self._run, tuple(directories))

    def stop(self, on_idle: Callable[[], None]) -> None:
        """Begin no more runs; call back when no job is running."""
        self._is_stopping = True
        self.call_when_idle(on_idle)

    def hold(self, work: Callable[[], T]) -> Callable[[], T]:
        """Wrap other work on the files of logs, so that it counts as a running job.

        The caller runs it once, on a worker thread.
        """
        self._held += 1

        def run() -> T:
            try:
                return work()
            finally:
                self._post(self._release)

        return run

    def _release(self) -> None:
        self._held -= 1
        self._call_idle()

    def call_when_idle(self, on_idle: Callable[[], None]) -> None:
        """Call back once when no job is running; at once if none is."""
        if self.is_running or self._held:
            self._on_idle.append(on_idle)
        else:
            on_idle()

    def forget(self, segments: Iterable[Segment]) -> None:
        """Forget segments of a deleted log, because new ones may have the same name."""
        for segment in segments:
            self._facts.pop(segment, None)

    def _run(self, directories: tuple[DirectorySnapshot, ...]) -> RetentionReport:
        removed: list[Segment] = []
        failures: list[str] = []
        clock_fault = None
        try:
            assert self._trusted is not None, "started"
            look = check_clocks(
                self._trusted, wall_ms=self._clock.wall_ms(), boot_ms=self._boot_ms()
            )
            self._trusted, clock_fault = look.trusted, look.clock_fault
            if clock_fault is not None:
                _log.error("retention does not trust the clock: %s", clock_fault)
            for directory in directories:
                self._run_directory(directory, look.now_ms, removed, failures)
        finally:
            self._post(self._end)
        size = SizeBytes(sum(segment.size_bytes for segment in removed))
        return RetentionReport(len(removed), size, tuple(failures), clock_fault)

    def _end(self) -> None:
        self.is_running = False
        self._call_idle()

    def _call_idle(self) -> None:
        if self.is_running or self._held:
            return
        waiting, self._on_idle = self._on_idle, []
        for on_idle in waiting:
            on_idle()

    def _run_directory(
        self,
        directory: DirectorySnapshot,
        now_ms: Millis,
        removed: list[Segment],
        failures: list[str],
    ) -> None:
        snapshots = {log.log_id: log for log in directory.logs}
        segments = {
            (log.log_id, segment.base_offset): segment
            for log in directory.logs
            for segment in log.sealed
        }
        facts = []
        failed: set[LogId] = set()
        for log in directory.logs:
            try:
                facts.append(self._facts_of(log, directory.log_bytes_max, now_ms))
            except StorageError as error:
                failures.append(f"{log.log_id}: {error}")
        plan = plan_retention(
            facts, now_ms=now_ms, directory_bytes_max=directory.size_bytes_max
        )
        for action in plan:
            if action.log_id in failed or self._is_stopping:
                continue
            log = snapshots[action.log_id]
            segment = segments[action.log_id, action.base_offset]
            try:
                remove_segment(
                    self._fs,
                    segment,
                    log.policy,
                    require_wanted=partial(self._require_wanted, log),
                )
            except ClosedError:
                return
            except StorageError as error:
                failed.add(action.log_id)
                failures.append(f"{action.log_id}: {error}")
                _log.error(
                    "retention failed: partition=%s file=%s error=%s",
                    action.log_id,
                    segment.path,
                    error,
                )
                if isinstance(error, DiskError) and not _is_harmless(error):
                    self._post(partial(directory.on_disk_error, error))
                    return
                if not self._is_gone(segment):
                    continue
            removed.append(segment)
            self._log_removal(log, segment, action.reason)

    def _require_wanted(self, log: LogSnapshot) -> None:
        """Raise ClosedError if the logs are being closed.

        Raises:
            LogOfflineError: the log was stopped.
        """
        if self._is_stopping:
            raise ClosedError("the logs are being closed")
        if log.is_stopped():
            raise LogOfflineError(
                f"partition {log.log_id} was stopped, its segments stay"
            )

    def _log_removal(self, log: LogSnapshot, segment: Segment, reason: Reason) -> None:
        """Report a removed segment to its log."""
        known = self._facts.pop(segment, None)
        count = known.record_count if known is not None else 0
        self._post(partial(log.on_removed, segment, count))
        _log.info(
            "segment removed: partition=%s offset=%d size_bytes=%d reason=%s",
            log.log_id,
            segment.base_offset,
            segment.size_bytes,
            reason.value,
        )

    def _is_gone(self, segment: Segment) -> bool:
        """Return whether a failed removal has removed the file nevertheless."""
        try:
            return not self._fs.exists(segment.path)
        except StorageError:
            return False

    def _facts_of(
        self, log: LogSnapshot, log_bytes_max: int, now_ms: Millis
    ) -> LogFacts:
        facts = []
        for segment in log.sealed:
            known = self._facts.get(segment)
            if known is None:
                known = self._facts[segment] = facts_of(self._fs, segment)
            facts.append(known)
        facts.append(
            SegmentFacts(
                log.active.base_offset,
                log.active.size_bytes,
                is_active=True,
                newest_append_ms=None,
                mtime_ms=now_ms,
            )
        )
        return LogFacts(log.log_id, tuple(facts), log.policy.age_ms, log_bytes_max)

    def _boot_ms(self) -> Millis:
        return Millis(int(self._clock.boot_s() * 1000))


def _is_harmless(error: DiskError) -> bool:
    return error.operation in _HARMLESS or error.errno_name in _FORBIDDEN


# -- one segment ----------------------------------------------------------------------


def facts_of(fs: FileSystem, segment: Segment) -> SegmentFacts:
    """Return the facts about a sealed segment that retention needs.

    Raises:
        StorageError: The disk refuses.
    """
    totals = read_totals(fs, segment.path, segment.base_offset)
    mtime_ms = fs.mtime_ms(segment.path)
    is_whole = totals.end_offset == segment.end_offset
    return SegmentFacts(
        segment.base_offset,
        segment.size_bytes,
        is_active=False,
        newest_append_ms=totals.newest_append_ms if is_whole else None,
        mtime_ms=mtime_ms,
        record_count=totals.record_count,
    )


def carry_on() -> None:
    """Do nothing: the default `require_wanted`, which never ends an operation."""


def remove_segment(
    fs: FileSystem,
    segment: Segment,
    policy: DeletePolicy,
    *,
    require_wanted: Callable[[], None] = carry_on,
) -> None:
    """Delete or archive one sealed segment; blocks while it is copied.

    Args:
        fs: The disk.
        segment: A sealed segment that no reader can find any more; open files of it
            stay readable.
        policy: How to remove it; its age is ignored.
        require_wanted: Called before the removal, and repeatedly during a compression;
            an exception ends that.

    Raises:
        ClosedError: `require_wanted` raised it; the segment stays.
        CorruptRecordError: It should be compressed and its bytes are damaged, which an
            archive would not show. It stays.
        StorageError: The disk refuses. The segment is unchanged, or gone with its index
            left, which the next start removes.

    Durability: what is removed stays removed, and an archive is complete.
    """
    require_wanted()
    if policy.kind is DeleteKind.DELETE:
        fs.unlink(segment.path)
    elif policy.is_compressed:
        _Zip(fs, segment, require_wanted).write()
        fs.unlink(segment.path)
    else:
        archive = segment.path.with_name(segment.path.name + ARCHIVE_SUFFIX)
        fs.rename(segment.path, archive)
    fs.discard(keys_path(segment.path, segment.base_offset))
    fs.discard(spans_path(segment.path, segment.base_offset))


@dataclass(frozen=True, slots=True)
class _Zip:
    """The archive `<name>.meta.zip` of a segment, with one entry `<name>.meta`."""

    fs: FileSystem
    segment: Segment
    require_wanted: Callable[[], None]

    def write(self) -> None:
        """Make the archive, complete and durable."""
        fs, segment = self.fs, self.segment
        archive = segment.path.with_name(segment.path.name + ZIP_SUFFIX)
        temporary = archive.with_name(archive.name + ".tmp")
        fs.discard(temporary)
        try:
            with fs.open_read(segment.path) as source:
                self._refuse_damage(source)
                self._compress(source, temporary)
            self.require_wanted()
            fs.rename(temporary, archive)
        except (StorageError, ClosedError):
            # An error of this must not replace the other; a start removes a leftover.
            with suppress(StorageError):
                fs.unlink(temporary)
            raise

    def _refuse_damage(self, source: ReadFile) -> None:
        segment = self.segment
        index = read_index(self.fs, segment.path, segment.base_offset)
        if index is None:
            return
        spans = self._while_wanted(index.spans)
        for damage in damage_in_spans(source, segment, spans):
            raise CorruptRecordError(f"segment is not archived: {damage}")

    def _while_wanted(self, spans: Sequence[Span]) -> Iterator[Span]:
        for span in spans:
            self.require_wanted()
            yield span

    def _compress(self, source: ReadFile, target: Path) -> None:
        """Write a zip of the file, and sync it."""
        when = datetime.fromtimestamp(source.mtime_ms() // 1000, UTC).timetuple()[:6]
        entry = zipfile.ZipInfo(self.segment.path.name, max(when, _ZIP_EARLIEST))
        entry.compress_type = zipfile.ZIP_DEFLATED
        with self.fs.open_append(target, create=True) as file:
            with (
                zipfile.ZipFile(_Stream(file), "w") as archive,
                archive.open(entry, "w", force_zip64=True) as stream,
            ):
                position = Position(0)
                while data := source.read_at(position, SizeBytes(COPY_BYTES)):
                    self.require_wanted()
                    stream.write(data)
                    position = Position(position + len(data))
            file.sync()


class _Stream:
    """Output stream for `zipfile` that can not seek."""

    def __init__(self, file: AppendFile) -> None:
        self._file = file

    def write(self, data: bytes, /) -> int:
        """Append all of `data`."""
        self._file.write(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing: the complete file is synced."""

    def close(self) -> None:
        """Do nothing: the owner of the file closes it."""
