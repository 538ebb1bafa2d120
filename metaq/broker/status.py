"""Snapshot of a whole broker, for any thread.

`BrokerStatus` is filled in `control.py`, from `statistics()` of the parts, and used by
the administration socket, `/health` and `/metrics`. `health.py` finds problems in it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from metaq.broker.context import CommandStatistics
from metaq.broker.delay_status import DelayStatus
from metaq.broker.mailboxes import MailboxStatistics
from metaq.broker.queue_status import QueueGroupStatus
from metaq.lifecycle import State
from metaq.model import no_items
from metaq.net.listener import ListenerStatistics
from metaq.replication.facts import ReplicaStatus
from metaq.stats import (
    HistogramSnapshot,
    MetricKind,
    MetricSpec,
    counter,
    gauge,
    histogram,
    part,
)
from metaq.storage.log_state import LogStatistics
from metaq.storage.retention_run import RetentionReport
from metaq.storage.scrub import ScrubState
from metaq.txn.figures import TransactionFigures
from metaq.zk.registry import RegistrationStatistics

LOG_SERIES_MAX: Final = 1_000
"""Maximum number of partition logs with series of their own, the first ones by name.
Bounds an answer to about 1 MiB; `metaq_alarm` and `metaq_logs` cover all logs."""

GROUP_SERIES_MAX: Final = 200
"""Maximum number of queue groups with series of their own, the first ones by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryStatus:
    """One data directory."""

    path: str
    offline_cause: str | None = gauge(
        "metaq_directory_online",
        "1 while a data directory is in use, 0 after a disk error.",
        default=None,
        read=lambda cause: cause is None,
    )
    """The disk error that took it offline; None while it is online."""
    size_bytes: int = gauge(
        "metaq_directory_size_bytes", "Bytes of all logs in a data directory."
    )
    free_bytes: int = gauge(
        "metaq_directory_free_bytes", "Room on the disk of a data directory."
    )
    free_bytes_min: int
    """Puts that leave less room are refused; 0: no limit."""
    is_low_on_space: bool
    """Whether puts, at least the largest, are refused because the disk is nearly
    full."""
    is_silent: bool
    """Whether its disk hangs: operations do not return."""
    is_read_only: bool = False
    """Whether its disk is read-only and no put has failed because of that yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionStatus:
    """Deletion and archiving since the start."""

    segment_count: int = counter(
        "metaq_retention_segments_total", "Segments that were deleted or archived."
    )
    removed_bytes: int = counter(
        "metaq_retention_removed_bytes_total",
        "Bytes of the segments that were deleted or archived.",
    )
    failure_count: int = counter(
        "metaq_retention_failures_total",
        "Segments that could not be deleted or archived.",
    )
    """The segments remain."""
    last_error: str = ""
    """First failure of the last run; "" when it had none."""
    clock_doubt: str = ""
    """Why the last run did not trust the wall clock; "" if it did."""


def add_run(status: RetentionStatus, run: RetentionReport) -> RetentionStatus:
    """Return the status after one more run."""
    more = f" (and {len(run.failures) - 1} more)" if len(run.failures) > 1 else ""
    return RetentionStatus(
        segment_count=status.segment_count + run.segment_count,
        removed_bytes=status.removed_bytes + run.size_bytes,
        failure_count=status.failure_count + len(run.failures),
        last_error=f"{run.failures[0]}{more}" if run.failures else "",
        clock_doubt=run.clock_fault or "",
    )


@dataclass(slots=True, kw_only=True)
class JobStatus:
    """One job of the housekeeping. Snapshots are copies."""

    name: str
    """Constant of one or two words; a label of metrics."""
    run_count: int = counter(
        "metaq_job_runs_total", "Runs of a job of the housekeeping."
    )
    failure_count: int = counter(
        "metaq_job_failures_total", "Runs of a job of the housekeeping that failed."
    )
    last_error: str = ""
    """Text of the error that the last run ended with; "" after a success."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerStatus:
    """Status of one broker at one moment. Filled by `control.py`."""

    version: str
    broker_id: int
    address: str
    state: State
    uptime_s: float = gauge("metaq_uptime_seconds", "Time since the start.")
    config_path: str
    """The configuration file; "" when there is none."""
    config_checksum: int
    """CRC-32 of the configuration that is in effect."""
    reload_count: int = counter(
        "metaq_reloads_total", "Reloads of the configuration that were carried out."
    )
    reload_error: str = ""
    """Why the last reload was refused; "" when it was not."""
    connection_count_max: int = gauge(
        "metaq_connections_max", "Cap on open connections."
    )
    listener: ListenerStatistics
    commands: CommandStatistics
    waiting_count: int = gauge("metaq_waiting_gets", "Gets that wait for data now.")
    in_flight_bytes: int = gauge(
        "metaq_in_flight_bytes",
        "Bytes of puts that were read and are not yet answered.",
    )
    partial_bytes: int = gauge(
        "metaq_partial_bytes", "Bytes of commands that have not arrived in whole."
    )
    reply_bytes: int = gauge(
        "metaq_reply_bytes", "Bytes of replies that peers have not read."
    )
    dropped_count: int = counter(
        "metaq_connections_dropped_total",
        "Connections closed for the memory that they held, or that was missing.",
    )
    put_latency: HistogramSnapshot = histogram(
        "metaq_put_latency_seconds", "Time from append to acknowledgement, per message."
    )
    sync_latency: HistogramSnapshot = histogram(
        "metaq_sync_latency_seconds", "Time that one sync of a segment took."
    )
    """Sum over all data directories."""
    logs: tuple[LogStatistics, ...] = part(
        MetricSpec(
            MetricKind.GAUGE, "metaq_logs", "Partition logs of this broker.", read=len
        ),
        labels=("topic", "partition"),
        label=lambda log: (log.log_id.topic, str(log.log_id.partition)),
        count_max=LOG_SERIES_MAX,
    )
    directories: tuple[DirectoryStatus, ...] = part(
        labels=("directory",), label=lambda directory: (directory.path,)
    )
    registration: RegistrationStatistics | None
    """None: the broker runs without ZooKeeper."""
    replica: ReplicaStatus | None = None
    """None: the broker is the only copy."""
    host_problem: str = ""
    """Why clients elsewhere cannot reach the advertised address; "" if they can."""
    closed_partitions: Mapping[str, tuple[int, ...]] = field(default_factory=no_items)
    scrub: ScrubState | None = None
    """Background verification; None while it is off."""
    retention: RetentionStatus = field(default_factory=RetentionStatus)
    queue_groups: tuple[QueueGroupStatus, ...] = part(
        default=(),
        labels=("group", "topic"),
        label=lambda each: (each.group, each.topic),
        count_max=GROUP_SERIES_MAX,
    )
    groups_both_ways: tuple[str, ...] = ()
    """Names of queue groups that are also log groups."""
    queue_problems: tuple[str, ...] = ()
    """One sentence for each problem that stops queue groups."""
    delays: DelayStatus | None = None
    """None: the broker delays no messages."""
    mailboxes: MailboxStatistics = field(default_factory=MailboxStatistics)
    definition_problems: tuple[str, ...] = ()
    jobs: tuple[JobStatus, ...] = part(
        default=(), labels=("job",), label=lambda job: (job.name,)
    )
    transactions: TransactionFigures | None = None
    tx_in_doubt_alarm_ms: int = 0
    """Age above which a prepared transaction raises an alarm; 0: never."""
