"""Carry out retention: facts from the disk, the plan, one segment after the other.

The loop's thread begins a run with an immutable snapshot of the logs; the run itself
blocks, for minutes when it compresses, and belongs on a worker thread of the caller. It
never touches a log: what it removed it posts to the loop. Runs never overlap.

A segment stays in its log until its file is gone; a get that comes in between is told
that the log starts behind it. An action that fails ends the run for its log: segments
go in order or not at all. A stop waits for the run, which ends between two actions, or
within one that compresses; that segment then stays. A log that is stopped meanwhile
keeps all that it has from that moment on: somebody has to look at the damage. Keep in
step: `retention.py` (the plan), `retire.py`.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from metaq.clock import Clock
from metaq.config import DeletePolicy
from metaq.errors import ClosedError, DiskError, LogOfflineError, StorageError
from metaq.fs import FileSystem
from metaq.model import LogId, Millis, SizeBytes
from metaq.storage.appender import Post
from metaq.storage.retention import (
    LogFacts,
    Reason,
    SegmentFacts,
    TrustedTime,
    look_at_clocks,
    plan_retention,
    trust_at_start,
)
from metaq.storage.retire import AgeFacts, age_facts, retire_segment
from metaq.storage.segment import Segment

_log = logging.getLogger(__name__)

_HARMLESS: Final = frozenset({"open", "read", "stat"})
"""Operations whose failure says nothing about what was written."""


class RetiredReceiver(Protocol):
    """The loop's side of a log, as far as retention needs it."""

    def on_retired(self, segment: Segment, record_count: int) -> None:
        """The oldest segment is gone from the disk."""
        ...


@dataclass(frozen=True, slots=True)
class LogSnapshot:
    """One log as it was when the run began."""

    log_id: LogId
    """Which one."""
    receiver: RetiredReceiver
    """Told on the loop's thread what went."""
    sealed: tuple[Segment, ...]
    """Segments that may go, oldest first."""
    active: Segment
    """The segment that stays."""
    policy: DeletePolicy
    """Age and what becomes of a segment."""
    is_stopped: Callable[[], bool]
    """Tells on any thread whether nothing may go any more."""


@dataclass(frozen=True, slots=True)
class DirectorySnapshot:
    """One data directory as it was when the run began."""

    path: Path
    """Which one."""
    logs: tuple[LogSnapshot, ...]
    """Logs that retention may touch: stopped ones are left out."""
    log_bytes_max: int
    """Size limit of each log, bytes; 0: none."""
    size_bytes_max: int
    """Size limit of all logs together, bytes; 0: none."""
    on_disk_error: Callable[[StorageError], None]
    """Told on the loop's thread that the disk cannot be believed."""


@dataclass(frozen=True, slots=True)
class RetentionReport:
    """What a run did."""

    segment_count: int
    """Segments deleted or archived."""
    size_bytes: SizeBytes
    """Their size."""
    failures: tuple[str, ...]
    """One line for each action that failed; its source is where it was."""
    doubt: str | None
    """Why the wall clock was not believed; None: it was."""


class Retention:
    """Retention of one broker. Owner: the loop's thread, except for a run's job."""

    def __init__(self, fs: FileSystem, clock: Clock, post: Post) -> None:
        self._fs = fs
        self._clock = clock
        self._post = post
        self._trusted: TrustedTime | None = None
        # Sealed segments do not change, and an index is long: each is read once.
        self._facts: dict[Segment, AgeFacts] = {}
        self._on_idle: list[Callable[[], None]] = []
        self._is_stopping = False
        self.is_running = False
        """A job was handed out and has not ended."""

    def start(self, newest_append_ms: Millis | None) -> None:
        """Learn at the start what time it was when the last record was stored."""
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
        """Return the job of one run, or None while another one is under way.

        The caller runs the job once, on a worker thread.
        """
        if self.is_running or self._is_stopping:
            return None
        self.is_running = True
        return partial(self._run, tuple(directories))

    def stop(self, on_idle: Callable[[], None]) -> None:
        """Begin nothing any more; call back when no job is running."""
        self._is_stopping = True
        self.call_when_idle(on_idle)

    def call_when_idle(self, on_idle: Callable[[], None]) -> None:
        """Call back once, when no job is running; now, when none is."""
        if self.is_running:
            self._on_idle.append(on_idle)
        else:
            on_idle()

    def forget(self, segments: Iterable[Segment]) -> None:
        """Forget segments of a deleted log: others of the same name may come."""
        for segment in segments:
            self._facts.pop(segment, None)

    def _run(self, directories: tuple[DirectorySnapshot, ...]) -> RetentionReport:
        retired: list[Segment] = []
        failures: list[str] = []
        doubt = None
        try:
            assert self._trusted is not None, "started"
            look = look_at_clocks(
                self._trusted,
                wall_ms=self._clock.wall_ms(),
                boot_ms=self._boot_ms(),
            )
            self._trusted, doubt = look.trusted, look.doubt
            if doubt is not None:
                _log.error("retention doubts the clock: %s", doubt)
            for directory in directories:
                self._run_directory(directory, look.now_ms, retired, failures)
        finally:
            self._post(self._end)
        size = SizeBytes(sum(segment.size_bytes for segment in retired))
        return RetentionReport(len(retired), size, tuple(failures), doubt)

    def _end(self) -> None:
        self.is_running = False
        waiting, self._on_idle = self._on_idle, []
        for on_idle in waiting:
            on_idle()

    def _run_directory(
        self,
        directory: DirectorySnapshot,
        now_ms: Millis,
        retired: list[Segment],
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
                retire_segment(
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
                if isinstance(error, DiskError) and error.operation not in _HARMLESS:
                    self._post(partial(directory.on_disk_error, error))
                    return
                if not self._is_gone(segment):
                    continue
            retired.append(segment)
            self._tell(log, segment, action.reason)

    def _require_wanted(self, log: LogSnapshot) -> None:
        """Raise ClosedError when somebody waits for the run to end.

        Raises:
            LogOfflineError: the log was stopped.
        """
        if self._is_stopping:
            raise ClosedError("the logs are being closed")
        if log.is_stopped():
            raise LogOfflineError(
                f"partition {log.log_id} was stopped, its segments stay"
            )

    def _tell(self, log: LogSnapshot, segment: Segment, reason: Reason) -> None:
        """Report a segment that is gone to its log."""
        known = self._facts.pop(segment, None)
        count = known.record_count if known is not None else 0
        self._post(partial(log.receiver.on_retired, segment, count))
        _log.info(
            "segment retired: partition=%s offset=%d size_bytes=%d reason=%s",
            log.log_id,
            segment.base_offset,
            segment.size_bytes,
            reason.value,
        )

    def _is_gone(self, segment: Segment) -> bool:
        """Tell whether a retirement that failed has removed the file nevertheless."""
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
                known = self._facts[segment] = age_facts(self._fs, segment)
            facts.append(
                SegmentFacts(
                    segment.base_offset,
                    segment.size_bytes,
                    is_active=False,
                    newest_append_ms=known.newest_append_ms,
                    mtime_ms=known.mtime_ms,
                )
            )
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
