"""One snapshot of a whole broker, and what is wrong with it.

`BrokerStatus` is filled in one place (the app, from `statistics()` of its parts) and
read in three: the administration socket, `/health` and `/metrics`. It is a value:
whoever has one may take it to another thread.

`find_problems` is the only judge of health. A *failing* alarm means that puts or gets
of some partition are refused until somebody acts; a *warning* means that everything is
served, and that something wants a look. What an operator does about each alarm is
told in `docs/operations.md`, kept in step by `tests/broker/test_operations_page.py`.
"""

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Protocol

from metaq.lifecycle import State
from metaq.model import LogId

PROBLEMS_PER_ALARM_MAX: Final = 10
"""Problems told one by one; a disk with a thousand damaged logs tells ten of them."""

Figures = Mapping[str, object]
"""Names and numbers, ready for JSON."""


# -- what the parts hand over ---------------------------------------------------------


class HistogramFigures(Protocol):
    """A snapshot of latencies; `metaq.stats.HistogramSnapshot` is one."""

    @property
    def bounds(self) -> tuple[float, ...]:
        """Return the inclusive upper bounds of the buckets, ascending."""
        ...

    @property
    def counts(self) -> tuple[int, ...]:
        """Return the samples per bucket, not cumulated; the last one has no bound."""
        ...

    @property
    def total(self) -> float:
        """Return the sum of all samples."""
        ...


class LogFigures(Protocol):
    """A snapshot of one partition log; storage's `LogStatistics` is one."""

    @property
    def log_id(self) -> LogId:
        """Return which partition it is."""
        ...

    @property
    def state(self) -> enum.Enum:
        """Return what it may be asked: open, stopped, offline, closing, closed."""
        ...

    @property
    def is_group_commit(self) -> bool:
        """Tell whether an acknowledged record is on disk."""
        ...

    @property
    def log_start(self) -> int:
        """Return the first readable offset."""
        ...

    @property
    def high_watermark(self) -> int:
        """Return the offset behind the last readable byte."""
        ...

    @property
    def log_end(self) -> int:
        """Return the offset behind the last byte written."""
        ...

    @property
    def size_bytes(self) -> int:
        """Return the bytes on disk."""
        ...

    @property
    def segment_count(self) -> int:
        """Return the number of its files."""
        ...

    @property
    def record_count(self) -> int:
        """Return the number of stored records, as far as it is known."""
        ...

    @property
    def append_count(self) -> int:
        """Return the appends that were acknowledged."""
        ...

    @property
    def refused_count(self) -> int:
        """Return the appends that were refused or failed."""
        ...

    @property
    def sync_count(self) -> int:
        """Return the number of syncs."""
        ...

    @property
    def sync_s(self) -> float:
        """Return the time that the syncs took together, in seconds."""
        ...

    @property
    def damage(self) -> tuple[str, ...]:
        """Return one line per damaged range."""
        ...


class ListenerFigures(Protocol):
    """A snapshot of the public port; `metaq.net.listener.ListenerStatistics` is one."""

    @property
    def open_count(self) -> int:
        """Return the connections that are open now."""
        ...

    @property
    def accepted_count(self) -> int:
        """Return the connections taken since the start."""
        ...

    @property
    def refused_count(self) -> int:
        """Return the connections closed at once because a cap was reached."""
        ...

    @property
    def exhausted_count(self) -> int:
        """Return the pauses of accepting for want of descriptors or memory."""
        ...


class SessionFigures(Protocol):
    """A snapshot of the ZooKeeper session; `metaq.zk.session.SessionStatus` is one."""

    @property
    def state(self) -> enum.Enum:
        """Return connected, suspended or lost."""
        ...

    @property
    def epoch(self) -> int:
        """Return the number of the current or last session."""
        ...


class RegistrationFigures(Protocol):
    """A snapshot of the registration; zk's `RegistrationStatistics` is one."""

    @property
    def state(self) -> enum.Enum:
        """Return how wanted nodes and ZooKeeper relate; "registered": in step."""
        ...

    @property
    def session(self) -> SessionFigures:
        """Return the session it stands on."""
        ...

    @property
    def topic_count(self) -> int:
        """Return the topics that are registered."""
        ...

    @property
    def failure_count(self) -> int:
        """Return the attempts that ended in an error."""
        ...

    @property
    def repair_count(self) -> int:
        """Return the nodes put back because they had vanished."""
        ...

    @property
    def last_error(self) -> str:
        """Return the text of the last failure; "" after a success."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryStatus:
    """One data directory."""

    path: str
    """The directory."""
    size_bytes: int
    """Bytes of all its logs."""
    free_bytes: int
    """Room on its disk, as last looked at."""
    is_low_on_space: bool
    """Puts, or the largest of them, are refused because the disk is nearly full."""
    offline_cause: str | None
    """The disk error that took it offline; None while it is online."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandStatus:
    """What clients asked for since the start."""

    put_count: int = 0
    """Puts, one per message."""
    put_failed_count: int = 0
    """Puts that were answered with 500, one per message."""
    get_count: int = 0
    """Gets."""
    get_miss_count: int = 0
    """Gets that found no data."""
    get_failed_count: int = 0
    """Gets that were answered with an error or an offset."""
    offset_count: int = 0
    """Offset queries."""
    wait_count: int = 0
    """Gets that waited for data."""
    waiting_count: int = 0
    """Gets that wait now."""
    malformed_count: int = 0
    """Connections closed because of a malformed command."""
    error_count: int = 0
    """Commands that failed in a way that nobody expected: each is a bug."""
    in_flight_bytes: int = 0
    """Bytes of puts read and not yet answered."""
    rejections: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Refused commands by cause, a fixed set of words in lower case."""


class ScrubFigures(Protocol):
    """A snapshot of the background verification; storage's `ScrubState` is one."""

    @property
    def is_enabled(self) -> bool:
        """Tell whether it is on."""
        ...

    @property
    def passes(self) -> int:
        """Return the passes over everything that were finished."""
        ...

    @property
    def log_id(self) -> LogId | None:
        """Return the partition at hand; None between two passes."""
        ...

    @property
    def offset(self) -> int | None:
        """Return the next offset to be verified in it."""
        ...

    @property
    def checked_bytes(self) -> int:
        """Return the bytes verified in this pass."""
        ...

    @property
    def total_bytes(self) -> int:
        """Return the bytes of a whole pass."""
        ...

    @property
    def damage_count(self) -> int:
        """Return the damaged ranges found since the start."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionStatus:
    """What deletion and archiving did since the start."""

    segment_count: int = 0
    """Segments deleted or archived."""
    removed_bytes: int = 0
    """Their sizes together."""
    failure_count: int = 0
    """Segments that could not be deleted or archived; they are still there."""
    last_error: str = ""
    """First failure of the last run; "" when it had none."""
    clock_doubt: str = ""
    """Why the last run did not believe the wall clock; "" when it did."""


class RetentionFigures(Protocol):
    """What one run of retention did; storage's `RetentionReport` is one."""

    @property
    def segment_count(self) -> int:
        """Return the segments that were deleted or archived."""
        ...

    @property
    def size_bytes(self) -> int:
        """Return their sizes together."""
        ...

    @property
    def failures(self) -> tuple[str, ...]:
        """Return one line for each segment that could not be removed."""
        ...

    @property
    def doubt(self) -> str | None:
        """Return why the wall clock was not believed; None: it was."""
        ...


def add_run(status: RetentionStatus, run: RetentionFigures) -> RetentionStatus:
    """Return the status after one more run."""
    more = f" (and {len(run.failures) - 1} more)" if len(run.failures) > 1 else ""
    return RetentionStatus(
        segment_count=status.segment_count + run.segment_count,
        removed_bytes=status.removed_bytes + run.size_bytes,
        failure_count=status.failure_count + len(run.failures),
        last_error=f"{run.failures[0]}{more}" if run.failures else "",
        clock_doubt=run.doubt or "",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """One job of the housekeeping."""

    name: str
    """A word or two, the same for ever: it is a label of metrics."""
    run_count: int
    """Runs that ended, whichever way."""
    failure_count: int
    """Runs that ended with an error."""
    last_error: str
    """Text of the error that the last run ended with; "" after a success."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerStatus:
    """Everything about one broker at one moment. Filled by the app."""

    version: str
    """Of this software."""
    broker_id: int
    """Its number in the cluster."""
    address: str
    """Advertised address, `meta://host:port`."""
    state: State
    """Where the broker is in its life."""
    uptime_s: float
    """Since the start, in seconds."""
    config_path: str
    """The configuration file; "" when there is none."""
    config_checksum: int
    """CRC-32 of the configuration that is in effect."""
    connection_count_max: int
    """Cap on the connections of the public port."""
    listener: ListenerFigures
    """The public port."""
    commands: CommandStatus
    """What clients asked for."""
    logs: tuple[LogFigures, ...]
    """Every partition log, sorted by topic and partition."""
    directories: tuple[DirectoryStatus, ...]
    """Every data directory."""
    put_latency: HistogramFigures
    """Seconds from append to acknowledgement, per message."""
    sync_latency: HistogramFigures
    """Seconds that one sync of a segment took, of all directories together."""
    registration: RegistrationFigures | None
    """None: the broker runs without ZooKeeper."""
    reload_count: int = 0
    """Reloads that were carried out."""
    reload_error: str = ""
    """Why the last reload was refused; "" when it was not."""
    closed_partitions: Mapping[str, tuple[int, ...]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    """Partitions that were closed by an administrator, by topic."""
    scrub: ScrubFigures | None = None
    """Background verification; None: there is none."""
    retention: RetentionStatus = field(default_factory=RetentionStatus)
    """Deletion and archiving."""
    jobs: tuple[JobStatus, ...] = ()
    """Housekeeping."""


# -- judgement ------------------------------------------------------------------------


class Severity(enum.Enum):
    """How bad an alarm is."""

    FAILING = "failing"
    """Puts or gets are refused until somebody acts."""
    WARNING = "warning"
    """Everything is served; somebody should look."""


class Alarm(enum.Enum):
    """Everything that can be wrong with a broker."""

    NOT_RUNNING = "not_running"
    DIRECTORY_OFFLINE = "directory_offline"
    LOG_STOPPED = "log_stopped"
    LOW_SPACE = "low_space"
    NOT_REGISTERED = "not_registered"
    SESSION_NOT_CONNECTED = "session_not_connected"
    CONNECTIONS_FULL = "connections_full"
    PARTITIONS_CLOSED = "partitions_closed"
    RELOAD_REFUSED = "reload_refused"
    RETENTION_FAILED = "retention_failed"
    CLOCK_DOUBTED = "clock_doubted"
    JOB_FAILED = "job_failed"


SEVERITIES: Final[Mapping[Alarm, Severity]] = MappingProxyType(
    {
        Alarm.NOT_RUNNING: Severity.FAILING,
        Alarm.DIRECTORY_OFFLINE: Severity.FAILING,
        Alarm.LOG_STOPPED: Severity.FAILING,
        Alarm.LOW_SPACE: Severity.FAILING,
        Alarm.NOT_REGISTERED: Severity.WARNING,
        Alarm.SESSION_NOT_CONNECTED: Severity.WARNING,
        Alarm.CONNECTIONS_FULL: Severity.WARNING,
        Alarm.PARTITIONS_CLOSED: Severity.WARNING,
        Alarm.RELOAD_REFUSED: Severity.WARNING,
        Alarm.RETENTION_FAILED: Severity.WARNING,
        Alarm.CLOCK_DOUBTED: Severity.WARNING,
        Alarm.JOB_FAILED: Severity.WARNING,
    }
)
"""ZooKeeper is no reason to call a broker failing: connected clients are served, and
whoever restarts a broker because ZooKeeper is away makes an outage of it."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong."""

    alarm: Alarm
    """What kind it is."""
    text: str
    """One sentence that names what is affected."""

    @property
    def severity(self) -> Severity:
        """Return how bad it is."""
        return SEVERITIES[self.alarm]


def find_problems(status: BrokerStatus) -> tuple[Problem, ...]:
    """Return what is wrong with a broker, failing alarms first; empty: nothing.

    Of each alarm at most `PROBLEMS_PER_ALARM_MAX` problems are told, and then how many
    more there are.
    """
    texts: dict[Alarm, list[str]] = {alarm: [] for alarm in Alarm}
    for alarm, text in _judge(status):
        texts[alarm].append(text)
    return tuple(
        Problem(alarm, text)
        for alarm, found in texts.items()
        for text in _shortened(found)
    )


def is_failing(problems: Iterable[Problem]) -> bool:
    """Tell whether somebody has to act."""
    return any(problem.severity is Severity.FAILING for problem in problems)


def _judge(status: BrokerStatus) -> Iterator[tuple[Alarm, str]]:
    if status.state is not State.RUNNING:
        yield Alarm.NOT_RUNNING, f"the broker is {status.state.value}"
    for directory in status.directories:
        if directory.offline_cause is not None:
            text = f"{directory.path} is offline: {directory.offline_cause}"
            yield Alarm.DIRECTORY_OFFLINE, text
        elif directory.is_low_on_space:
            free_bytes = max(directory.free_bytes, 0)
            text = f"{directory.path} refuses puts, it has {free_bytes} bytes free"
            yield Alarm.LOW_SPACE, text
    for log in status.logs:
        if log.damage:
            yield Alarm.LOG_STOPPED, f"{log.log_id}: {log.damage[0]}"
    yield from _judge_registration(status.registration)
    listener = status.listener
    if listener.open_count >= status.connection_count_max:
        yield Alarm.CONNECTIONS_FULL, f"{listener.open_count} connections are open"
    for topic, partitions in status.closed_partitions.items():
        numbers = ", ".join(map(str, partitions))
        yield Alarm.PARTITIONS_CLOSED, f"closed partitions of {topic}: {numbers}"
    if status.reload_error:
        yield Alarm.RELOAD_REFUSED, status.reload_error
    if status.retention.last_error:
        yield Alarm.RETENTION_FAILED, status.retention.last_error
    if status.retention.clock_doubt:
        yield Alarm.CLOCK_DOUBTED, status.retention.clock_doubt
    for job in status.jobs:
        if job.last_error:
            yield Alarm.JOB_FAILED, f"{job.name}: {job.last_error}"


def _judge_registration(
    registration: RegistrationFigures | None,
) -> Iterator[tuple[Alarm, str]]:
    if registration is None:
        return
    if registration.state.value != "registered":
        text = f"registration is {registration.state.value}"
        if registration.last_error:
            text = f"{text}: {registration.last_error}"
        yield Alarm.NOT_REGISTERED, text
    session = registration.session.state.value
    if session != "connected":
        yield Alarm.SESSION_NOT_CONNECTED, f"the ZooKeeper session is {session}"


def _shortened(texts: list[str]) -> list[str]:
    more = len(texts) - PROBLEMS_PER_ALARM_MAX
    shown = texts[:PROBLEMS_PER_ALARM_MAX]
    return [*shown, f"and {more} more"] if more > 0 else shown


# -- as JSON --------------------------------------------------------------------------


def describe_health(status: BrokerStatus) -> dict[str, object]:
    """Return who the broker is and how it does, ready for JSON."""
    problems = find_problems(status)
    verdict = "failing" if is_failing(problems) else "warning" if problems else "ok"
    return {
        "status": verdict,
        "problems": [
            {
                "alarm": problem.alarm.value,
                "severity": problem.severity.value,
                "text": problem.text,
            }
            for problem in problems
        ],
        "version": status.version,
        "broker_id": status.broker_id,
        "address": status.address,
        "state": status.state.value,
        "uptime_s": round(status.uptime_s, 3),
        "config_path": status.config_path,
        "config_checksum": status.config_checksum,
    }


def describe_logs(status: BrokerStatus) -> list[Figures]:
    """Return one object per partition log, ready for JSON, in the order of `logs`."""
    return [
        {
            "topic": log.log_id.topic,
            "partition": log.log_id.partition,
            "state": log.state.value,
            "is_closed": log.log_id.partition
            in status.closed_partitions.get(log.log_id.topic, ()),
            "is_group_commit": log.is_group_commit,
            "log_start": log.log_start,
            "high_watermark": log.high_watermark,
            "log_end": log.log_end,
            "size_bytes": log.size_bytes,
            "segment_count": log.segment_count,
            "record_count": log.record_count,
            "damage": list(log.damage),
        }
        for log in status.logs
    ]


def describe_directories(status: BrokerStatus) -> list[Figures]:
    """Return one object per data directory, ready for JSON."""
    return [
        {
            "path": directory.path,
            "state": "online" if directory.offline_cause is None else "offline",
            "offline_cause": directory.offline_cause,
            "size_bytes": directory.size_bytes,
            "free_bytes": directory.free_bytes,
            "is_low_on_space": directory.is_low_on_space,
        }
        for directory in status.directories
    ]


def describe_scrub(status: BrokerStatus) -> Figures:
    """Return the state of the background verification, ready for JSON."""
    scrub = status.scrub
    if scrub is None or not scrub.is_enabled:
        return {"is_on": False}
    return {
        "is_on": True,
        "passes": scrub.passes,
        "log": None if scrub.log_id is None else str(scrub.log_id),
        "offset": scrub.offset,
        "checked_bytes": scrub.checked_bytes,
        "total_bytes": scrub.total_bytes,
        "damage_count": scrub.damage_count,
    }
