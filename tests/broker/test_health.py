"""Problems of a broker, and their reports."""

import json
from dataclasses import replace

import pytest

from metaq.broker.health import (
    LEADERLESS_S,
    PROBLEMS_PER_ALARM_MAX,
    SEVERITIES,
    Alarm,
    Severity,
    describe_directories,
    describe_health,
    describe_logs,
    describe_scrub,
    find_problems,
    is_failing,
)
from metaq.broker.status import BrokerStatus, JobStatus, RetentionStatus
from metaq.lifecycle import State
from metaq.model import LogId
from metaq.net.listener import ListenerStatistics
from metaq.replication.facts import ReplicaStatus
from metaq.storage.log_state import LogState
from metaq.zk.registry import RegistrationState
from metaq.zk.session import SessionState
from tests.broker.figures import (
    DELAYS,
    DIRECTORY,
    HEALTHY,
    QUEUE_GROUP,
    SCRUB,
    TRANSACTIONS,
    log,
    registration,
    status,
)

PENDING = RegistrationState.PENDING
REPLICA = ReplicaStatus(replica=2, in_sync_count=3)
STOPPED = log("test", 1, state=LogState.STOPPED, damage=("checksum: file=f offset=9",))
BROKEN_JOB = JobStatus(name="scrub", run_count=2, failure_count=1, last_error="boom")

CASES = [
    (status(state=State.STOPPING), Alarm.NOT_RUNNING, "the broker is stopping"),
    (
        status(directories=(replace(DIRECTORY, offline_cause="sync failed: EIO"),)),
        Alarm.DIRECTORY_OFFLINE,
        "data is offline: sync failed: EIO",
    ),
    (
        status(directories=(replace(DIRECTORY, is_silent=True, is_low_on_space=True),)),
        Alarm.DIRECTORY_SILENT,
        "data does not answer",
    ),
    (
        status(directories=(replace(DIRECTORY, is_read_only=True),)),
        Alarm.DIRECTORY_OFFLINE,
        "data is read-only: the next put takes it offline",
    ),
    (
        status(logs=(STOPPED,)),
        Alarm.LOG_STOPPED,
        "test-1: checksum: file=f offset=9",
    ),
    (
        status(logs=(replace(STOPPED, state=LogState.OPEN),)),
        Alarm.LOG_DAMAGED,
        "test-1: checksum: file=f offset=9",
    ),
    (
        status(logs=(replace(STOPPED, state=LogState.OPEN, lost=STOPPED.damage),)),
        Alarm.LOG_LOST,
        "test-1: checksum: file=f offset=9",
    ),
    (
        status(replica=replace(REPLICA, differing="f and the copy at meta://a:1")),
        Alarm.REPLICAS_DIFFER,
        "copies differ: f and the copy at meta://a:1",
    ),
    (
        status(directories=(replace(DIRECTORY, is_low_on_space=True),)),
        Alarm.LOW_SPACE,
        "data refuses puts: it has 1000000000 bytes free, and freeBytesMin is 2000",
    ),
    (
        # What was accepted since the last look is subtracted, and may be more.
        status(directories=(replace(DIRECTORY, is_low_on_space=True, free_bytes=-5),)),
        Alarm.LOW_SPACE,
        "data refuses puts: it has 0 bytes free, and freeBytesMin is 2000",
    ),
    (
        status(registration=registration(PENDING, last_error="timed out")),
        Alarm.NOT_REGISTERED,
        "registration is pending: timed out",
    ),
    (
        status(registration=registration(session=SessionState.SUSPENDED)),
        Alarm.SESSION_NOT_CONNECTED,
        "the ZooKeeper session is suspended",
    ),
    (
        status(replica=replace(REPLICA, frozen_cause="the record is missing")),
        Alarm.REPLICA_FROZEN,
        "replica 2 is frozen: the record is missing",
    ),
    (
        status(replica=replace(REPLICA, lack_of_space="expected at most 5, got 7")),
        Alarm.LOW_SPACE,
        "replica 2 waits for space: expected at most 5, got 7",
    ),
    (
        status(replica=replace(REPLICA, is_incomplete=True)),
        Alarm.REPLICA_INCOMPLETE,
        "replica 2 lacks data and is not in sync: it copies all data from the leader",
    ),
    (
        status(replica=replace(REPLICA, leaderless_s=LEADERLESS_S + 1)),
        Alarm.SET_LEADERLESS,
        "no replica has led the set for 31 s",
    ),
    (
        status(replica=replace(REPLICA, epoch=3, refusal="a put needs 2 replicas")),
        Alarm.TOO_FEW_REPLICAS,
        "puts are refused: a put needs 2 replicas",
    ),
    (
        status(
            replica=replace(REPLICA, epoch=3),
            registration=registration(PENDING, last_error="timed out"),
        ),
        Alarm.NOT_REGISTERED,
        "registration is pending: timed out",
    ),
    (
        status(host_problem="no address but loopback"),
        Alarm.LOOPBACK_ADVERTISED,
        "no address but loopback",
    ),
    (
        status(listener=ListenerStatistics(open_count=100)),
        Alarm.CONNECTIONS_FULL,
        "100 connections are open, the maximum is 100",
    ),
    (
        status(listener=ListenerStatistics(open_count=9, problem="they wait")),
        Alarm.CONNECTIONS_FULL,
        "they wait",
    ),
    (
        status(closed_partitions={"test": (0, 2)}),
        Alarm.PARTITIONS_CLOSED,
        "closed partitions of test: 0, 2",
    ),
    (status(reload_error="no such key"), Alarm.RELOAD_REFUSED, "no such key"),
    (
        status(definition_problems=("topic 't' is odd",)),
        Alarm.TOPIC_DEFINITION,
        "topic 't' is odd",
    ),
    (
        status(retention=RetentionStatus(last_error="archive failed")),
        Alarm.RETENTION_FAILED,
        "archive failed",
    ),
    (
        status(retention=RetentionStatus(clock_doubt="ahead by 90 s")),
        Alarm.CLOCK_DOUBTED,
        "ahead by 90 s",
    ),
    (
        status(transactions=replace(TRANSACTIONS, offline_cause="sync failed: EIO")),
        Alarm.TRANSACTIONS_OFFLINE,
        "transactions are refused: sync failed: EIO",
    ),
    (
        status(transactions=replace(TRANSACTIONS, is_silent=True)),
        Alarm.TRANSACTIONS_SILENT,
        "the transaction journal does not answer",
    ),
    (
        status(logs=(log("test", 1, held_bytes=93),)),
        Alarm.TRANSACTIONS_STUCK,
        (
            "test-1 takes no puts, and its last 93 bytes cannot be read: the rest of a"
            " committed transaction is missing"
        ),
    ),
    (
        status(transactions=replace(TRANSACTIONS, stuck_count=2)),
        Alarm.TRANSACTIONS_STUCK,
        "committed transactions that are not in all of their partitions yet: 2",
    ),
    (
        status(
            transactions=replace(
                TRANSACTIONS, in_doubt_count=3, oldest_in_doubt_ms=61_000
            ),
            tx_in_doubt_alarm_ms=60_000,
        ),
        Alarm.TRANSACTIONS_IN_DOUBT,
        "prepared transactions: 3, the oldest for 61 s",
    ),
    (
        status(
            transactions=replace(
                TRANSACTIONS, untimed_count=2, oldest_untimed_ms=61_000
            ),
            tx_in_doubt_alarm_ms=60_000,
        ),
        Alarm.TRANSACTIONS_LEFT_OPEN,
        "transactions without a time-out that are not ended: 2, the oldest for 61 s",
    ),
    (
        status(transactions=replace(TRANSACTIONS, notes=("torn tail ignored",))),
        Alarm.TRANSACTION_JOURNAL,
        "torn tail ignored",
    ),
    (
        status(
            transactions=replace(TRANSACTIONS, is_unread=True),
            queue_groups=(QUEUE_GROUP, replace(QUEUE_GROUP, group="mails")),
        ),
        Alarm.TRANSACTION_JOURNAL,
        (
            "the transaction journal could not be read at the start: queue groups"
            " 'mails', 'workers' may again deliver messages that were acked in a"
            " transaction"
        ),
    ),
    (
        status(queue_problems=("dead letters wait",)),
        Alarm.QUEUE_GROUPS,
        "dead letters wait",
    ),
    (
        status(queue_groups=(replace(QUEUE_GROUP, full=("no room",)),)),
        Alarm.QUEUE_FULL,
        "no room",
    ),
    (
        status(queue_groups=(replace(QUEUE_GROUP, lost=("gone",)),)),
        Alarm.QUEUE_LOST_TO_RETENTION,
        "gone",
    ),
    (
        status(groups_both_ways=("workers",)),
        Alarm.GROUP_USED_BOTH_WAYS,
        "queue group 'workers' has the same name as a consumer group with members",
    ),
    (
        status(delays=replace(DELAYS, problems=("messages wait for topic 't'",))),
        Alarm.DELAY_STALLED,
        "messages wait for topic 't'",
    ),
    (
        status(delays=replace(DELAYS, clock_problem="the clock has jumped")),
        Alarm.CLOCK_DOUBTED,
        "the clock has jumped",
    ),
    (status(jobs=(BROKEN_JOB,)), Alarm.JOB_FAILED, "scrub: boom"),
]


@pytest.mark.parametrize(("broker", "alarm", "text"), CASES)
def test_each_alarm_has_its_cause(
    broker: BrokerStatus, alarm: Alarm, text: str
) -> None:
    """One thing goes wrong, and exactly that is told."""
    (problem,) = find_problems(broker)
    assert (problem.alarm, problem.text) == (alarm, text)


def test_every_alarm_is_tried_and_has_a_severity() -> None:
    """A new alarm needs a case above and a place in the table."""
    assert {alarm for _, alarm, _ in CASES} == set(Alarm) == set(SEVERITIES)


@pytest.mark.parametrize(
    "broker",
    [
        HEALTHY,
        status(registration=None),
        status(directories=(), logs=()),
        status(listener=ListenerStatistics(open_count=99)),
        # It is asked once it serves; the rest of a start is the registration.
        status(state=State.STARTING),
    ],
)
def test_a_healthy_broker_has_no_problems(broker: BrokerStatus) -> None:
    """Nothing is told where nothing is wrong; a broker needs no ZooKeeper."""
    assert find_problems(broker) == ()
    assert describe_health(broker)["status"] == "ok"


def test_an_offline_directory_is_not_also_low_on_space() -> None:
    """One cause, one alarm: the figure of an offline disk says nothing."""
    offline = replace(DIRECTORY, offline_cause="EIO", is_low_on_space=True)
    (problem,) = find_problems(status(directories=(offline,)))
    assert problem.alarm is Alarm.DIRECTORY_OFFLINE


def test_a_missing_registration_is_only_a_warning() -> None:
    """A broker is not restarted because ZooKeeper is away."""
    problems = find_problems(status(registration=registration(PENDING)))
    assert [problem.severity for problem in problems] == [Severity.WARNING]
    assert not is_failing(problems)


def test_failing_alarms_come_first() -> None:
    """The first line is the worst one."""
    broker = status(state=State.FAILED, jobs=(BROKEN_JOB,), logs=(STOPPED,))
    alarms = [problem.severity for problem in find_problems(broker)]
    assert alarms == sorted(alarms, key=list(Severity).index)
    assert describe_health(broker)["status"] == "failing"


def test_many_problems_of_a_kind_are_counted() -> None:
    """A disk full of damaged logs does not make an answer without bound."""
    logs = tuple(replace(STOPPED, log_id=LogId("test", n)) for n in range(1000))
    problems = find_problems(status(logs=logs))
    assert len(problems) == PROBLEMS_PER_ALARM_MAX + 1
    assert problems[-1].text == f"and {1000 - PROBLEMS_PER_ALARM_MAX} more"


def test_health_names_alarm_severity_and_text() -> None:
    """The JSON of /health and of the administration socket."""
    health = describe_health(status(jobs=(BROKEN_JOB,)))
    assert json.loads(json.dumps(health)) == {
        "status": "warning",
        "problems": [
            {"alarm": "job_failed", "severity": "warning", "text": "scrub: boom"}
        ],
        "version": "1.0",
        "broker_id": 3,
        "address": "meta://host:8123",
        "state": "running",
        "uptime_s": 12.5,
        "config_path": "server.ini",
        "config_checksum": 77,
    }


def test_logs_are_told_one_by_one() -> None:
    """Offsets, state and damage of each, and whether it was closed by hand."""
    first, second = describe_logs(
        status(
            logs=(log("test", 0), STOPPED),
            closed_partitions={"test": (0,)},
        )
    )
    assert first["is_closed"] is True
    assert second["is_closed"] is False
    assert second["state"] == "stopped"
    assert second["damage"] == ["checksum: file=f offset=9"]
    assert (first["log_start"], first["high_watermark"], first["log_end"]) == (
        1000,
        5000,
        5100,
    )


def test_directories_are_online_or_offline() -> None:
    """The cause stands beside the state."""
    offline = replace(DIRECTORY, offline_cause="EIO")
    one, two = describe_directories(status(directories=(DIRECTORY, offline)))
    assert (one["state"], one["offline_cause"]) == ("online", None)
    assert (two["state"], two["offline_cause"]) == ("offline", "EIO")


def test_a_scrub_that_is_off_says_so() -> None:
    """Figures are there only where there is a scrub."""
    assert describe_scrub(HEALTHY) == {"is_on": False}
    assert describe_scrub(status(scrub=None)) == {"is_on": False}
    assert describe_scrub(status(scrub=SCRUB)) == {
        "is_on": True,
        "passes": 25,
        "log": "test-0",
        "offset": 4000,
        "checked_bytes": 24,
        "total_bytes": 26,
        "damage_count": 9,
    }
    between = describe_scrub(status(scrub=replace(SCRUB, log_id=None, offset=None)))
    assert (between["log"], between["offset"]) == (None, None)


def test_a_follower_has_no_registration_to_miss() -> None:
    """Clients see the leader of a set; a failover takes less than the grace time."""
    idle = registration(RegistrationState.IDLE)
    healthy = replace(REPLICA, leaderless_s=LEADERLESS_S)
    assert find_problems(status(registration=idle, replica=healthy)) == ()
