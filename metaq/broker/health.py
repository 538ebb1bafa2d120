"""Finds the problems of a broker in one snapshot, and reports them.

`find_problems` alone decides about health. A *failing* alarm means that puts or gets of
some partition are refused, or wait, until an operator acts; a *warning* means that
everything is served, and that an operator should look. `docs/operations.md` explains
the remedy for each alarm, as `tests/broker/test_health_operations_page.py` checks.
"""

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Final

from metaq.broker.status import BrokerStatus, DirectoryStatus
from metaq.lifecycle import State
from metaq.replication.facts import ReplicaStatus
from metaq.storage.log_state import LogState, LogStatistics
from metaq.txn.figures import TransactionFigures
from metaq.zk.registry import RegistrationState
from metaq.zk.session import SessionState

PROBLEMS_PER_ALARM_MAX: Final = 10
"""Maximum number of problems listed of one alarm; the others are counted."""

LEADERLESS_S: Final = 30.0
"""Time without a leader after which a set raises an alarm; a failover takes less."""

Figures = Mapping[str, object]
"""Names and numbers, ready for JSON."""


class Severity(enum.Enum):
    """Severity of an alarm."""

    FAILING = "failing"
    """Puts or gets are refused, or wait, until an operator acts."""
    WARNING = "warning"
    """Everything is served; an operator should look."""


class Alarm(enum.Enum):
    """Everything that can be wrong with a broker."""

    NOT_RUNNING = "not_running"
    DIRECTORY_OFFLINE = "directory_offline"
    DIRECTORY_SILENT = "directory_silent"
    LOG_STOPPED = "log_stopped"
    LOG_LOST = "log_lost"
    LOG_DAMAGED = "log_damaged"
    LOW_SPACE = "low_space"
    NOT_REGISTERED = "not_registered"
    SESSION_NOT_CONNECTED = "session_not_connected"
    LOOPBACK_ADVERTISED = "loopback_advertised"
    CONNECTIONS_FULL = "connections_full"
    PARTITIONS_CLOSED = "partitions_closed"
    RELOAD_REFUSED = "reload_refused"
    TOPIC_DEFINITION = "topic_definition"
    RETENTION_FAILED = "retention_failed"
    CLOCK_DOUBTED = "clock_doubted"
    TRANSACTIONS_OFFLINE = "transactions_offline"
    TRANSACTIONS_SILENT = "transactions_silent"
    TRANSACTIONS_STUCK = "transactions_stuck"
    TRANSACTIONS_IN_DOUBT = "transactions_in_doubt"
    TRANSACTIONS_LEFT_OPEN = "transactions_left_open"
    TRANSACTION_JOURNAL = "transaction_journal"
    QUEUE_GROUPS = "queue_groups"
    QUEUE_FULL = "queue_full"
    QUEUE_LOST_TO_RETENTION = "queue_lost_to_retention"
    GROUP_USED_BOTH_WAYS = "group_used_both_ways"
    DELAY_STALLED = "delay_stalled"
    JOB_FAILED = "job_failed"
    REPLICA_FROZEN = "replica_frozen"
    REPLICA_INCOMPLETE = "replica_incomplete"
    REPLICAS_DIFFER = "replicas_differ"
    SET_LEADERLESS = "set_leaderless"
    TOO_FEW_REPLICAS = "too_few_replicas"


_FAILING: Final = frozenset(
    {
        Alarm.NOT_RUNNING,
        Alarm.DIRECTORY_OFFLINE,
        Alarm.DIRECTORY_SILENT,
        Alarm.LOG_STOPPED,
        Alarm.LOG_LOST,
        Alarm.LOW_SPACE,
        Alarm.TRANSACTIONS_OFFLINE,
        Alarm.TRANSACTIONS_SILENT,
        Alarm.TRANSACTIONS_STUCK,
        Alarm.QUEUE_GROUPS,
        Alarm.DELAY_STALLED,
        Alarm.REPLICA_FROZEN,
        Alarm.REPLICAS_DIFFER,
        Alarm.SET_LEADERLESS,
        Alarm.TOO_FEW_REPLICAS,
    }
)
"""Alarms about ZooKeeper are warnings: without it connected clients are still served,
and a restart of a "failing" broker would cause an outage."""

SEVERITIES: Final = {
    alarm: Severity.FAILING if alarm in _FAILING else Severity.WARNING
    for alarm in Alarm
}

SERVING_STATES: Final = frozenset({State.STARTING, State.RUNNING})
"""States in which clients are served. A starting broker answers here only once it
serves; then it waits for ZooKeeper alone, which the registration's alarms report."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong."""

    alarm: Alarm
    text: str
    """One sentence that names the subject."""

    @property
    def severity(self) -> Severity:
        """Return how bad it is."""
        return SEVERITIES[self.alarm]


def find_problems(status: BrokerStatus) -> tuple[Problem, ...]:
    """Return the problems of a broker, failing alarms first; empty: none.

    Of each alarm at most `PROBLEMS_PER_ALARM_MAX` problems are listed, and then the
    number of the others.
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
    """Return whether an operator has to act."""
    return any(problem.severity is Severity.FAILING for problem in problems)


def _judge(status: BrokerStatus) -> Iterator[tuple[Alarm, str]]:
    if status.state not in SERVING_STATES:
        yield Alarm.NOT_RUNNING, f"the broker is {status.state.value}"
    for directory in status.directories:
        yield from _judge_directory(directory)
    for log in status.logs:
        yield from _judge_damage(log)
        if log.held_bytes:
            text = (
                f"{log.log_id} takes no puts, and its last {log.held_bytes} bytes"
                " cannot be read: the rest of a committed transaction is missing"
            )
            yield Alarm.TRANSACTIONS_STUCK, text
    yield from _judge_registration(status)
    if status.replica is not None:
        yield from _judge_replica(status.replica)
    if status.host_problem:
        yield Alarm.LOOPBACK_ADVERTISED, status.host_problem
    listener = status.listener
    if listener.open_count >= status.connection_count_max:
        text = (
            f"{listener.open_count} connections are open, the maximum is"
            f" {status.connection_count_max}"
        )
        yield Alarm.CONNECTIONS_FULL, text
    elif listener.problem:
        yield Alarm.CONNECTIONS_FULL, listener.problem
    for topic, partitions in status.closed_partitions.items():
        numbers = ", ".join(map(str, partitions))
        yield Alarm.PARTITIONS_CLOSED, f"closed partitions of {topic}: {numbers}"
    if status.reload_error:
        yield Alarm.RELOAD_REFUSED, status.reload_error
    for problem in status.definition_problems:
        yield Alarm.TOPIC_DEFINITION, problem
    if status.retention.last_error:
        yield Alarm.RETENTION_FAILED, status.retention.last_error
    if status.retention.clock_doubt:
        yield Alarm.CLOCK_DOUBTED, status.retention.clock_doubt
    if status.transactions is not None:
        yield from _judge_transactions(status.transactions, status.tx_in_doubt_alarm_ms)
        if status.transactions.is_unread and status.queue_groups:
            groups = ", ".join(sorted({f"'{g.group}'" for g in status.queue_groups}))
            text = (
                "the transaction journal could not be read at the start: queue groups"
                f" {groups} may again deliver messages that were acked in a"
                " transaction"
            )
            yield Alarm.TRANSACTION_JOURNAL, text
    for problem in status.queue_problems:
        yield Alarm.QUEUE_GROUPS, problem
    for group in status.queue_groups:
        for text in group.full:
            yield Alarm.QUEUE_FULL, text
        for text in group.lost:
            yield Alarm.QUEUE_LOST_TO_RETENTION, text
    for name in status.groups_both_ways:
        text = (
            f"queue group '{name}' has the same name as a consumer group with members"
        )
        yield Alarm.GROUP_USED_BOTH_WAYS, text
    if status.delays is not None:
        for problem in status.delays.problems:
            yield Alarm.DELAY_STALLED, problem
        if status.delays.clock_problem:
            yield Alarm.CLOCK_DOUBTED, status.delays.clock_problem
    for job in status.jobs:
        if job.last_error:
            yield Alarm.JOB_FAILED, f"{job.name}: {job.last_error}"


def _judge_directory(directory: DirectoryStatus) -> Iterator[tuple[Alarm, str]]:
    if directory.offline_cause is not None:
        text = f"{directory.path} is offline: {directory.offline_cause}"
        yield Alarm.DIRECTORY_OFFLINE, text
    elif directory.is_silent:
        yield Alarm.DIRECTORY_SILENT, f"{directory.path} does not answer"
    elif directory.is_read_only:
        text = f"{directory.path} is read-only: the next put takes it offline"
        yield Alarm.DIRECTORY_OFFLINE, text
    elif directory.is_low_on_space:
        free_bytes = max(directory.free_bytes, 0)
        text = (
            f"{directory.path} refuses puts: it has {free_bytes} bytes free, and"
            f" freeBytesMin is {directory.free_bytes_min}"
        )
        yield Alarm.LOW_SPACE, text


def _judge_damage(log: LogStatistics) -> Iterator[tuple[Alarm, str]]:
    if log.state is LogState.STOPPED:
        yield Alarm.LOG_STOPPED, f"{log.log_id}: {log.damage[0]}"
    elif log.lost:
        yield Alarm.LOG_LOST, f"{log.log_id}: {log.lost[0]}"
    elif log.damage:
        yield Alarm.LOG_DAMAGED, f"{log.log_id}: {log.damage[0]}"


def _judge_transactions(
    transactions: TransactionFigures, alarm_ms: int
) -> Iterator[tuple[Alarm, str]]:
    if transactions.offline_cause is not None:
        text = f"transactions are refused: {transactions.offline_cause}"
        yield Alarm.TRANSACTIONS_OFFLINE, text
    elif transactions.is_silent:
        yield Alarm.TRANSACTIONS_SILENT, "the transaction journal does not answer"
    if transactions.stuck_count:
        text = (
            "committed transactions that are not in all of their partitions yet:"
            f" {transactions.stuck_count}"
        )
        yield Alarm.TRANSACTIONS_STUCK, text
    oldest_ms = transactions.oldest_in_doubt_ms
    if alarm_ms and oldest_ms > alarm_ms:
        age_s, count = oldest_ms // 1000, transactions.in_doubt_count
        text = f"prepared transactions: {count}, the oldest for {age_s} s"
        yield Alarm.TRANSACTIONS_IN_DOUBT, text
    oldest_ms = transactions.oldest_untimed_ms
    if alarm_ms and oldest_ms > alarm_ms:
        age_s, count = oldest_ms // 1000, transactions.untimed_count
        text = (
            f"transactions without a time-out that are not ended: {count}, the oldest"
            f" for {age_s} s"
        )
        yield Alarm.TRANSACTIONS_LEFT_OPEN, text
    for text in transactions.notes:
        yield Alarm.TRANSACTION_JOURNAL, text


def _judge_replica(replica: ReplicaStatus) -> Iterator[tuple[Alarm, str]]:
    if replica.frozen_cause:
        text = f"replica {replica.replica} is frozen: {replica.frozen_cause}"
        yield Alarm.REPLICA_FROZEN, text
    if replica.lack_of_space:
        text = f"replica {replica.replica} waits for space: {replica.lack_of_space}"
        yield Alarm.LOW_SPACE, text
    if replica.is_incomplete:
        text = (
            f"replica {replica.replica} lacks data and is not in sync: it copies all"
            " data from the leader"
        )
        yield Alarm.REPLICA_INCOMPLETE, text
    if replica.differing:
        yield Alarm.REPLICAS_DIFFER, f"copies differ: {replica.differing}"
    if replica.leaderless_s > LEADERLESS_S:
        text = f"no replica has led the set for {replica.leaderless_s:.0f} s"
        yield Alarm.SET_LEADERLESS, text
    if replica.refusal:
        yield Alarm.TOO_FEW_REPLICAS, f"puts are refused: {replica.refusal}"


def _judge_registration(status: BrokerStatus) -> Iterator[tuple[Alarm, str]]:
    registration = status.registration
    if registration is None:
        return
    # In a replica set, only the leader is registered.
    is_due = status.replica is None or status.replica.epoch > 0
    if is_due and registration.state is not RegistrationState.REGISTERED:
        text = f"registration is {registration.state.value}"
        if registration.last_error:
            text = f"{text}: {registration.last_error}"
        yield Alarm.NOT_REGISTERED, text
    session = registration.session.state
    if session is not SessionState.CONNECTED:
        text = f"the ZooKeeper session is {session.value}"
        yield Alarm.SESSION_NOT_CONNECTED, text


def _shortened(texts: list[str]) -> list[str]:
    more = len(texts) - PROBLEMS_PER_ALARM_MAX
    shown = texts[:PROBLEMS_PER_ALARM_MAX]
    return [*shown, f"and {more} more"] if more > 0 else shown


# -- as JSON --------------------------------------------------------------------------


def describe_health(status: BrokerStatus) -> dict[str, object]:
    """Return the identity and health of the broker, ready for JSON."""
    problems = find_problems(status)
    overall = "failing" if is_failing(problems) else "warning" if problems else "ok"
    return {
        "status": overall,
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
            **asdict(directory),
        }
        for directory in status.directories
    ]


def describe_scrub(status: BrokerStatus) -> Figures:
    """Return the state of the background verification, ready for JSON."""
    scrub = status.scrub
    if scrub is None:
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
