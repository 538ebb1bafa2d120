"""A small broker's worth of logs on a faulty disk, and what it promised."""

import random
from dataclasses import dataclass, field
from pathlib import Path

from metaq.config.settings import BrokerConfig, LimitsConfig, SystemConfig
from metaq.errors import ClosedError, StorageError
from metaq.fs import FileSystem
from metaq.model import LogId, Offset
from metaq.storage.partition_log import PartitionLog
from tests.rigs.storage import StorageBench, Ticket

LOG = LogId("test", 0)
OTHER = LogId("test", 1)
NUMBER = 4711
"""Of the log of a replica."""
DATA = Path("/data")
RECORD = 120
"""Size of a record that `put` makes."""


def config(**system: int) -> BrokerConfig:
    """Return settings with a data directory on a faulty disk."""
    return BrokerConfig(
        system=SystemConfig(data_path=str(DATA), **system),  # type: ignore[arg-type]
        limits=LimitsConfig(free_bytes_min=0),
    )


def opened(fs: FileSystem, *, is_late: bool = False, **system: int) -> StorageBench:
    """Return a bench that is open."""
    bench = StorageBench(fs, config(**system), is_late=is_late)
    bench.open()
    return bench


def replica_log(fs: FileSystem) -> tuple[StorageBench, PartitionLog]:
    """Return a bench with a log of a replica, and the log, which follows."""
    bench = StorageBench(fs, config(segment_bytes_max=300), is_late=True)
    bench.manager.open(numbers={LOG: NUMBER})
    bench.next_id = max(1000, bench.manager.last_message_id()) + 1
    log = bench.manager.get_or_create(LOG, bench.config.topic(LOG.topic), number=NUMBER)
    bench.run()
    return bench, log


def turn(bench: StorageBench, rng: random.Random) -> None:
    """Let the storage thread and the loop do a little, or everything."""
    if rng.random() < 0.3:
        bench.run()
    for worker in bench.workers:
        worker.turn()
    bench.loop.run_some(rng.randrange(4))


def log_of(bench: StorageBench, log_id: LogId = LOG) -> PartitionLog:
    """Return a log, made when it is missing."""
    return bench.manager.get_or_create(log_id, bench.config.topic(log_id.topic))


def content_of(log: PartitionLog) -> bytes:
    """Return everything that can be read, from the log start on."""
    parts = []
    offset = log.log_start_offset
    while offset < log.high_watermark:
        found = log.read(offset, 1 << 20)
        parts.append(found.read())
        found.release()
        assert parts[-1], (offset, log.statistics())
        offset = Offset(offset + len(parts[-1]))
    return b"".join(parts)


@dataclass
class Promise:
    """One append, and what was said about it."""

    log_id: LogId
    data: bytes
    ticket: Ticket
    offset: Offset


@dataclass
class Ledger:
    """All appends of a scenario, in order."""

    promises: list[Promise] = field(default_factory=list)
    refused: int = 0

    def append(self, bench: StorageBench, log_id: LogId, *sizes: int) -> None:
        """Append records with payloads of these sizes; a refusal is taken note of."""
        payloads = [bytes([65 + len(self.promises) % 26]) * size for size in sizes]
        ticket = Ticket()
        try:
            log = log_of(bench, log_id)
            offset = log.next_offset
            data = bench.append(log, payloads, ticket)
        except (StorageError, ClosedError):
            self.refused += 1
            return
        self.promises.append(Promise(log_id, data, ticket, offset))

    def check_answered(self) -> None:
        """Nothing hangs: every append that was taken was answered."""
        assert all(promise.ticket.is_answered for promise in self.promises)

    def stored(self) -> tuple[Promise, ...]:
        """Return what was acknowledged so far."""
        return tuple(p for p in self.promises if p.ticket.is_stored)


def check_kept(fs: FileSystem, stored: tuple[Promise, ...], **system: int) -> None:
    """Recover the disk: every acknowledged record is at its reported offset.

    What follows them is whole records too, and a second recovery finds the same.
    """
    bench = opened(fs, **system)
    contents = {log_id: content_of(log) for log_id, log in bench.manager.logs().items()}
    for log_id, log in bench.manager.logs().items():
        assert not log.damage, (log_id, log.damage)
    for promise in stored:
        content = contents[promise.log_id]
        found = content[promise.offset : promise.offset + len(promise.data)]
        assert found == promise.data, promise
    bench.close()
    again = opened(fs, **system)
    for log_id, log in again.manager.logs().items():
        assert content_of(log) == contents[log_id]
    again.close()


def put(
    bench: StorageBench,
    log: PartitionLog,
    count: int = 1,
    size: int = 100,
    *,
    is_light: bool = False,
) -> Ticket:
    ticket = Ticket()
    bench.append(log, [b"x" * size] * count, ticket, is_light=is_light)
    return ticket


def filled(fs: FileSystem, segments: int = 4) -> tuple[StorageBench, PartitionLog]:
    """Return a log with sealed segments of 1024 bytes, the last of them active."""
    bench = opened(fs, segment_bytes_max=1024)
    log = log_of(bench)
    for _ in range(segments):
        put(bench, log, 2, 492)
        bench.run()
    return bench, log
