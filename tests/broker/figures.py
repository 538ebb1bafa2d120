"""Snapshots of an imaginary broker."""

from dataclasses import replace
from typing import Any

from metaq.broker.context import CommandStatistics
from metaq.broker.delay_status import DelayStatus
from metaq.broker.queue_status import QueueGroupStatus
from metaq.broker.status import BrokerStatus, DirectoryStatus
from metaq.lifecycle import State
from metaq.model import LogId, Offset, SizeBytes
from metaq.net.listener import ListenerStatistics
from metaq.stats import HistogramSnapshot
from metaq.storage.log_state import LogState, LogStatistics
from metaq.storage.scrub import ScrubState
from metaq.txn.figures import TransactionCounters, TransactionFigures
from metaq.zk.registry import RegistrationState, RegistrationStatistics
from metaq.zk.session import SessionState, SessionStatus


def log(topic: str, partition: int, **changes: Any) -> LogStatistics:
    """Return a log without problems, but for the changes."""
    healthy = LogStatistics(
        log_id=LogId(topic, partition),
        state=LogState.OPEN,
        log_start=Offset(1000),
        high_watermark=Offset(5000),
        log_end=Offset(5100),
        next_offset=Offset(5100),
        size_bytes=SizeBytes(4100),
        segment_count=2,
        record_count=40,
        append_count=30,
        refused_count=3,
        producer_count=9,
        forgotten_count=11,
        sync_count=20,
        sync_s=0.5,
    )
    return replace(healthy, **changes)


def registration(
    state: RegistrationState = RegistrationState.REGISTERED,
    session: SessionState = SessionState.CONNECTED,
    **changes: Any,
) -> RegistrationStatistics:
    """Return a registration on the second session."""
    healthy = RegistrationStatistics(
        state=state,
        session=SessionStatus(session, session_version=2, session_id=1),
        topic_count=4,
        failure_count=6,
        repair_count=8,
    )
    return replace(healthy, **changes)


HISTOGRAM = HistogramSnapshot((0.001, 0.01), (3, 2, 1), 0.25)

SCRUB = ScrubState(
    is_enabled=True,
    passes=25,
    log_id=LogId("test", 0),
    offset=Offset(4000),
    checked_bytes=SizeBytes(24),
    total_bytes=SizeBytes(26),
    damage_count=9,
)

DIRECTORY = DirectoryStatus(
    path="data",
    size_bytes=8200,
    free_bytes=10**9,
    free_bytes_min=2_000,
    is_low_on_space=False,
    offline_cause=None,
    is_silent=False,
)

TRANSACTIONS = TransactionFigures(
    counters=TransactionCounters(begun_local=5, committed=4, put_count=9),
    open_count=3,
    in_doubt_count=0,
    stuck_count=0,
    outcome_count=0,
    held_bytes=700,
    journal_bytes=900,
    journal_sync_count=4,
    oldest_in_doubt_ms=0,
    sync_latency=HISTOGRAM,
    offline_cause=None,
    notes=(),
)

DELAYS = DelayStatus(
    waiting_count=55,
    waiting_bytes=56,
    delivered_count=57,
    cancelled_count=58,
    late_ms=59,
)
QUEUE_GROUP = QueueGroupStatus(
    group="workers",
    topic="test",
    open_count=44,
    ready_count=45,
    delayed_count=46,
    unread_bytes=47,
    done_count=48,
    passed_count=60,
    expired_count=49,
    letter_count=50,
    skipped_bytes=61,
)

HEALTHY = BrokerStatus(
    version="1.0",
    broker_id=3,
    address="meta://host:8123",
    state=State.RUNNING,
    uptime_s=12.5,
    config_path="server.ini",
    config_checksum=77,
    connection_count_max=100,
    listener=ListenerStatistics(
        open_count=7, accepted_count=70, refused_count=5, exhausted_count=1
    ),
    commands=CommandStatistics(),
    logs=(log("test", 0), log("test", 1)),
    directories=(DIRECTORY,),
    put_latency=HISTOGRAM,
    sync_latency=HISTOGRAM,
    registration=registration(),
    transactions=TRANSACTIONS,
)


def status(**changes: Any) -> BrokerStatus:
    """Return a broker without problems, but for the changes."""
    return replace(HEALTHY, **changes)
