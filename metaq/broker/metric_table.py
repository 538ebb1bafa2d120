"""The table of all metrics: name, sentence, labels, and how a status gives the numbers.

Nothing is exported that is not in `METRICS`, except the process's own figures. The
same table is in `docs/operations.md`, kept in step by
`tests/broker/test_operations_page.py`.
"""

from collections.abc import Callable, Iterator
from typing import Final

from metaq import prometheus
from metaq.broker.health import SEVERITIES, Alarm, find_problems
from metaq.broker.status import (
    BrokerStatus,
    DirectoryStatus,
    JobStatus,
    LogFigures,
    RegistrationFigures,
    ScrubFigures,
)
from metaq.prometheus import Sample

LOG_SERIES_MAX: Final = 1_000
"""Partition logs that have series of their own, the first ones by name. It bounds an
answer to about 1 MiB; `metaq_alarm` and `metaq_logs` look at all of them."""

MetricSpec = prometheus.MetricSpec[BrokerStatus]
HistogramSpec = prometheus.HistogramSpec[BrokerStatus]


# -- how specifications read ----------------------------------------------------------


def _one(
    name: str, text: str, read: Callable[[BrokerStatus], float | None]
) -> MetricSpec:
    """Return a metric with one number, or none where `read` returns None."""

    def samples(status: BrokerStatus) -> Iterator[Sample]:
        value = read(status)
        if value is not None:
            yield (), value

    return MetricSpec(name, text, (), samples)


def _log(name: str, text: str, read: Callable[[LogFigures], float]) -> MetricSpec:
    """Return a metric of each partition log."""

    def samples(status: BrokerStatus) -> Iterator[Sample]:
        for log in status.logs[:LOG_SERIES_MAX]:
            yield (log.log_id.topic, str(log.log_id.partition)), read(log)

    return MetricSpec(name, text, ("topic", "partition"), samples)


def _directory(
    name: str, text: str, read: Callable[[DirectoryStatus], float]
) -> MetricSpec:
    """Return a metric of each data directory."""

    def samples(status: BrokerStatus) -> Iterator[Sample]:
        for directory in status.directories:
            yield (directory.path,), read(directory)

    return MetricSpec(name, text, ("directory",), samples)


def _registration(
    name: str, text: str, read: Callable[[RegistrationFigures], float]
) -> MetricSpec:
    """Return a metric of the registration, where the broker uses ZooKeeper."""

    def value(status: BrokerStatus) -> float | None:
        return None if status.registration is None else read(status.registration)

    return _one(name, text, value)


def _scrub(name: str, text: str, read: Callable[[ScrubFigures], float]) -> MetricSpec:
    """Return a metric of the background verification, where it is on."""

    def value(status: BrokerStatus) -> float | None:
        scrub = status.scrub
        return None if scrub is None or not scrub.is_enabled else read(scrub)

    return _one(name, text, value)


def _job(name: str, text: str, read: Callable[[JobStatus], float]) -> MetricSpec:
    """Return a metric of each job of the housekeeping."""

    def samples(status: BrokerStatus) -> Iterator[Sample]:
        for job in status.jobs:
            yield (job.name,), read(job)

    return MetricSpec(name, text, ("job",), samples)


def _read_build(status: BrokerStatus) -> Iterator[Sample]:
    yield (status.version, str(status.broker_id)), 1


def _read_alarms(status: BrokerStatus) -> Iterator[Sample]:
    raised = {problem.alarm for problem in find_problems(status)}
    for alarm in Alarm:
        yield (alarm.value, SEVERITIES[alarm].value), alarm in raised


def _read_commands(status: BrokerStatus) -> Iterator[Sample]:
    commands = status.commands
    yield ("put",), commands.put_count
    yield ("get",), commands.get_count
    yield ("offset",), commands.offset_count


def _read_rejections(status: BrokerStatus) -> Iterator[Sample]:
    for cause, count in sorted(status.commands.rejections.items()):
        yield (cause,), count


# -- the table ------------------------------------------------------------------------

METRICS: Final[tuple[MetricSpec | HistogramSpec, ...]] = (
    MetricSpec(
        "metaq_build_info",
        "Always 1; the labels say which software and which broker this is.",
        ("version", "broker_id"),
        _read_build,
    ),
    _one(
        "metaq_uptime_seconds",
        "Time since the start.",
        lambda s: s.uptime_s,
    ),
    MetricSpec(
        "metaq_alarm",
        "1 while something is wrong, 0 otherwise.",
        ("alarm", "severity"),
        _read_alarms,
    ),
    _one(
        "metaq_reloads_total",
        "Reloads of the configuration that were carried out.",
        lambda s: s.reload_count,
    ),
    # Connections and commands.
    _one(
        "metaq_connections",
        "Connections that are open.",
        lambda s: s.listener.open_count,
    ),
    _one(
        "metaq_connections_max",
        "Cap on open connections.",
        lambda s: s.connection_count_max,
    ),
    _one(
        "metaq_connections_accepted_total",
        "Connections taken.",
        lambda s: s.listener.accepted_count,
    ),
    _one(
        "metaq_connections_refused_total",
        "Connections closed at once because a cap was reached.",
        lambda s: s.listener.refused_count,
    ),
    _one(
        "metaq_accept_pauses_total",
        "Pauses of accepting because the process had no descriptors left.",
        lambda s: s.listener.exhausted_count,
    ),
    MetricSpec(
        "metaq_commands_total",
        "Commands of clients; each message of a batch counts as a put.",
        ("command",),
        _read_commands,
    ),
    MetricSpec(
        "metaq_rejections_total",
        "Commands that were refused, by cause.",
        ("cause",),
        _read_rejections,
    ),
    _one(
        "metaq_put_failures_total",
        "Puts answered with an error, one per message.",
        lambda s: s.commands.put_failed_count,
    ),
    _one(
        "metaq_get_failures_total",
        "Gets answered with an error or with another offset.",
        lambda s: s.commands.get_failed_count,
    ),
    _one(
        "metaq_get_misses_total",
        "Gets that found no data.",
        lambda s: s.commands.get_miss_count,
    ),
    _one(
        "metaq_repeated_batches_total",
        "Batches that a producer sent again; they were not stored again.",
        lambda s: s.commands.batch_repeated_count,
    ),
    _one(
        "metaq_waits_total",
        "Gets that waited for data.",
        lambda s: s.commands.wait_count,
    ),
    _one(
        "metaq_waiting_gets",
        "Gets that wait for data now.",
        lambda s: s.commands.waiting_count,
    ),
    _one(
        "metaq_malformed_commands_total",
        "Connections closed because of a malformed command.",
        lambda s: s.commands.malformed_count,
    ),
    _one(
        "metaq_command_errors_total",
        "Commands that failed unexpectedly; the log has a traceback for each.",
        lambda s: s.commands.error_count,
    ),
    _one(
        "metaq_in_flight_bytes",
        "Bytes of puts that were read and are not yet answered.",
        lambda s: s.commands.in_flight_bytes,
    ),
    _one(
        "metaq_partial_bytes",
        "Bytes of commands that have not arrived in whole.",
        lambda s: s.commands.partial_bytes,
    ),
    _one(
        "metaq_reply_bytes",
        "Bytes of replies that peers have not read.",
        lambda s: s.commands.reply_bytes,
    ),
    _one(
        "metaq_connections_dropped_total",
        "Connections closed for the memory that they held, or that was missing.",
        lambda s: s.commands.dropped_count,
    ),
    HistogramSpec(
        "metaq_put_latency_seconds",
        "Time from append to acknowledgement, per message.",
        lambda s: [s.put_latency],
    ),
    HistogramSpec(
        "metaq_sync_latency_seconds",
        "Time that one sync of a segment took.",
        lambda s: [s.sync_latency],
    ),
    # Partition logs.
    _one(
        "metaq_logs",
        "Partition logs of this broker.",
        lambda s: len(s.logs),
    ),
    _log(
        "metaq_log_size_bytes",
        "Bytes of a log on disk.",
        lambda log: log.size_bytes,
    ),
    _log(
        "metaq_log_segments",
        "Files of a log.",
        lambda log: log.segment_count,
    ),
    _log(
        "metaq_log_records",
        "Records stored in a log.",
        lambda log: log.record_count,
    ),
    _log(
        "metaq_log_start_bytes",
        "Log start: first readable offset.",
        lambda log: log.log_start,
    ),
    _log(
        "metaq_log_high_watermark_bytes",
        "High watermark: offset behind the last readable byte.",
        lambda log: log.high_watermark,
    ),
    _log(
        "metaq_log_end_bytes",
        "Log end: offset behind the last byte written.",
        lambda log: log.log_end,
    ),
    _log(
        "metaq_log_appends_total",
        "Appends that were acknowledged; one holds one or many records.",
        lambda log: log.append_count,
    ),
    _log(
        "metaq_log_refused_appends_total",
        "Appends that were refused or failed.",
        lambda log: log.refused_count,
    ),
    _log(
        "metaq_log_producers",
        "Producers whose repeated batches are recognised.",
        lambda log: log.producer_count,
    ),
    _log(
        "metaq_log_forgotten_producers_total",
        "Producers that were forgotten because there are too many.",
        lambda log: log.forgotten_count,
    ),
    _log(
        "metaq_log_syncs_total",
        "Syncs of a log.",
        lambda log: log.sync_count,
    ),
    _log(
        "metaq_log_sync_seconds_total",
        "Time that the syncs of a log took together.",
        lambda log: log.sync_s,
    ),
    _log(
        "metaq_log_damaged_ranges",
        "Damaged ranges found in a log; above 0 it takes no puts.",
        lambda log: len(log.damage),
    ),
    _log(
        "metaq_log_group_commit",
        "1 where a put is acknowledged after its sync, 0 where before.",
        lambda log: log.is_group_commit,
    ),
    # Data directories.
    _directory(
        "metaq_directory_online",
        "1 while a data directory is in use, 0 after a disk error.",
        lambda directory: directory.offline_cause is None,
    ),
    _directory(
        "metaq_directory_size_bytes",
        "Bytes of all logs in a data directory.",
        lambda directory: directory.size_bytes,
    ),
    _directory(
        "metaq_directory_free_bytes",
        "Room on the disk of a data directory.",
        lambda directory: directory.free_bytes,
    ),
    # ZooKeeper.
    _registration(
        "metaq_registered",
        "1 while this broker is registered as it wants to be.",
        lambda registration: registration.state.value == "registered",
    ),
    _registration(
        "metaq_zookeeper_connected",
        "1 while the ZooKeeper session is connected.",
        lambda registration: registration.session.state.value == "connected",
    ),
    _registration(
        "metaq_zookeeper_sessions_total",
        "ZooKeeper sessions so far; each new one follows an expiry.",
        lambda registration: registration.session.session_version,
    ),
    _registration(
        "metaq_registered_topics",
        "Topics that are registered.",
        lambda registration: registration.topic_count,
    ),
    _registration(
        "metaq_registration_failures_total",
        "Attempts to register that ended in an error.",
        lambda registration: registration.failure_count,
    ),
    _registration(
        "metaq_registration_repairs_total",
        "Nodes put back because somebody had deleted them.",
        lambda registration: registration.repair_count,
    ),
    # Upkeep.
    _scrub(
        "metaq_scrub_passes_total",
        "Complete passes of the background verification.",
        lambda scrub: scrub.passes,
    ),
    _scrub(
        "metaq_scrub_checked_bytes",
        "Bytes verified in the present pass.",
        lambda scrub: scrub.checked_bytes,
    ),
    _scrub(
        "metaq_scrub_pass_bytes",
        "Bytes of a whole pass.",
        lambda scrub: scrub.total_bytes,
    ),
    _scrub(
        "metaq_scrub_damaged_ranges",
        "Damaged ranges found in the background since the start.",
        lambda scrub: scrub.damage_count,
    ),
    _one(
        "metaq_retention_segments_total",
        "Segments that were deleted or archived.",
        lambda s: s.retention.segment_count,
    ),
    _one(
        "metaq_retention_removed_bytes_total",
        "Bytes of the segments that were deleted or archived.",
        lambda s: s.retention.removed_bytes,
    ),
    _one(
        "metaq_retention_failures_total",
        "Segments that could not be deleted or archived.",
        lambda s: s.retention.failure_count,
    ),
    _job(
        "metaq_job_runs_total",
        "Runs of a job of the housekeeping.",
        lambda job: job.run_count,
    ),
    _job(
        "metaq_job_failures_total",
        "Runs of a job of the housekeeping that failed.",
        lambda job: job.failure_count,
    ),
)
"""Every metric of ours, in the order of an answer."""
