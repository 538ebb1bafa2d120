"""One snapshot of a whole broker: a value that whoever has it may take anywhere.

`BrokerStatus` is filled in one place (`control.py`, from `statistics()` of the parts)
and read in three: the administration socket, `/health` and `/metrics`. What is wrong
with a broker is judged from it in `health.py`.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from metaq.lifecycle import State
from metaq.model import LogId
from metaq.stats import HistogramSnapshot

# -- what the parts hand over ---------------------------------------------------------


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
    def producer_count(self) -> int:
        """Return the producers whose batches are remembered."""
        ...

    @property
    def forgotten_count(self) -> int:
        """Return the producers that were forgotten because there are too many."""
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
    def session_version(self) -> int:
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
    is_silent: bool
    """Its disk hangs: nothing that is asked of it is answered."""


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
    batch_repeated_count: int = 0
    """Batches that were sent again and not stored again."""
    waiting_count: int = 0
    """Gets that wait now."""
    malformed_count: int = 0
    """Connections closed because of a malformed command."""
    error_count: int = 0
    """Commands that failed in a way that nobody expected: each is a bug."""
    in_flight_bytes: int = 0
    """Bytes of puts read and not yet answered."""
    partial_bytes: int = 0
    """Bytes of commands that have not arrived in whole."""
    reply_bytes: int = 0
    """Bytes of replies that peers have not read."""
    dropped_count: int = 0
    """Connections closed for the memory that they held, or that was missing."""
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
    put_latency: HistogramSnapshot
    """Seconds from append to acknowledgement, per message."""
    sync_latency: HistogramSnapshot
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
    definition_problems: tuple[str, ...] = ()
    """What is wrong with topics that were made by command, one sentence each."""
    jobs: tuple[JobStatus, ...] = ()
    """Housekeeping."""
    open_transactions: tuple[str, ...] = ()
    """One sentence for each transaction that a Java broker left open."""
