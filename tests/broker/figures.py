"""Snapshots of an imaginary broker."""

import enum
from dataclasses import dataclass, replace
from typing import Any

from metaq.broker.status import BrokerStatus, CommandStatus, DirectoryStatus
from metaq.lifecycle import State
from metaq.model import LogId
from metaq.stats import HistogramSnapshot


class Word(enum.Enum):
    """The states of other parts, as far as they are looked at here."""

    OPEN = "open"
    STOPPED = "stopped"
    REGISTERED = "registered"
    PENDING = "pending"
    CONNECTED = "connected"
    SUSPENDED = "suspended"


@dataclass(frozen=True)
class Log:
    """A `LogFigures`."""

    log_id: LogId
    state: enum.Enum = Word.OPEN
    is_group_commit: bool = True
    log_start: int = 1000
    high_watermark: int = 5000
    log_end: int = 5100
    size_bytes: int = 4100
    segment_count: int = 2
    record_count: int = 40
    append_count: int = 30
    refused_count: int = 3
    producer_count: int = 9
    forgotten_count: int = 11
    sync_count: int = 20
    sync_s: float = 0.5
    damage: tuple[str, ...] = ()


@dataclass(frozen=True)
class Listener:
    """A `ListenerFigures`."""

    open_count: int = 7
    accepted_count: int = 70
    refused_count: int = 5
    exhausted_count: int = 1


@dataclass(frozen=True)
class Session:
    """A `SessionFigures`."""

    state: enum.Enum = Word.CONNECTED
    session_version: int = 2


@dataclass(frozen=True)
class Registration:
    """A `RegistrationFigures`."""

    state: enum.Enum = Word.REGISTERED
    session: Session = Session()
    topic_count: int = 4
    failure_count: int = 6
    repair_count: int = 8
    last_error: str = ""


HISTOGRAM = HistogramSnapshot((0.001, 0.01), (3, 2, 1), 0.25)

TEST_0 = LogId("test", 0)


@dataclass(frozen=True)
class Scrub:
    """A `ScrubFigures`."""

    is_enabled: bool = True
    passes: int = 25
    log_id: LogId | None = TEST_0
    offset: int | None = 4000
    checked_bytes: int = 24
    total_bytes: int = 26
    damage_count: int = 9


DIRECTORY = DirectoryStatus(
    path="data",
    size_bytes=8200,
    free_bytes=10**9,
    is_low_on_space=False,
    offline_cause=None,
    is_silent=False,
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
    listener=Listener(),
    commands=CommandStatus(),
    logs=(Log(LogId("test", 0)), Log(LogId("test", 1))),
    directories=(DIRECTORY,),
    put_latency=HISTOGRAM,
    sync_latency=HISTOGRAM,
    registration=Registration(),
)


def status(**changes: Any) -> BrokerStatus:
    """Return a broker without problems, but for the changes."""
    return replace(HEALTHY, **changes)
