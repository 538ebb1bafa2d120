"""Damage in a log of a replica set: the log goes on, and gets wait for the mending."""

import pytest

from metaq.errors import CorruptRecordError, LogOfflineError
from metaq.model import Offset
from metaq.storage.log_state import LogState
from metaq.storage.partition_log import PartitionLog
from metaq.storage.producers import StoredBatch
from metaq.storage.segment import Damage
from tests.rigs.fs import FaultyFileSystem
from tests.rigs.storage import StorageBench, Ticket
from tests.storage.support import LOG, config
from tests.storage.test_partition_log_batches import send

NUMBERS = {LOG: 4711}


class Leader:
    """A log that leads a set, with three batches that are on all copies."""

    def __init__(self, *, number: int | None = NUMBERS[LOG]) -> None:
        self.bench = StorageBench(FaultyFileSystem(), config())
        self.bench.manager.open(numbers=None if number is None else NUMBERS)
        settings = self.bench.config.topic(LOG.topic)
        self.log = self.bench.manager.get_or_create(LOG, settings, number=number)
        if number is not None:
            self.log.lead()
        self.batches = [self.put(sequence)[0] for sequence in (10, 20, 30)]
        self.bench.run()
        if number is not None:
            self.log.set_bound(self.log.next_offset)

    def put(self, sequence: int) -> tuple[StoredBatch, Ticket]:
        return send(self.bench, sequence, 2, "p")

    def damage(self, number: int = 1) -> Damage:
        """Return damage of one of the batches."""
        batch = self.batches[number]
        path = self.log.segments.active.path
        return Damage(path, batch.offset, batch.end_offset, "payload: test")


def test_a_replica_goes_on_with_a_damaged_range() -> None:
    """Puts are taken, and gets stop in front of the range."""
    leader = Leader()
    log, damage = leader.log, leader.damage()
    log.on_damage(damage)
    assert log.state is LogState.OPEN
    _batch, ticket = leader.put(40)
    leader.bench.run()
    log.set_bound(log.next_offset)
    assert ticket.is_stored
    assert log.read(Offset(0), 10_000).size_bytes == int(damage.offset)
    with pytest.raises(CorruptRecordError):
        log.read(damage.offset, 1)


def test_a_single_broker_stops_for_it() -> None:
    """There is no other copy."""
    leader = Leader(number=None)
    leader.log.on_damage(leader.damage())
    assert leader.log.state is LogState.STOPPED
    assert not leader.log.is_mendable(leader.damage().offset)


@pytest.mark.parametrize("end", [None, 1 << 40], ids=["open", "beyond the end"])
def test_a_replica_stops_where_the_damage_has_no_end(end: int | None) -> None:
    """It is not known how much was there, so nothing may be appended."""
    leader = Leader()
    path = leader.log.segments.active.path
    good = None if end is None else Offset(end)
    leader.log.on_damage(Damage(path, leader.batches[1].offset, good, "test"))
    assert leader.log.state is LogState.STOPPED
    with pytest.raises(LogOfflineError):
        leader.put(40)


def waits(log: PartitionLog, offset: Offset) -> list[bool]:
    """Return what a get that waits has heard."""
    heard: list[bool] = []
    log.wait(offset, lambda: heard.append(True))
    return heard


def test_a_get_in_a_damaged_range_waits_until_it_is_mended() -> None:
    """Neither the damage nor other puts end its wait."""
    leader = Leader()
    log, damage = leader.log, leader.damage()
    log.on_damage(damage)
    heard = waits(log, damage.offset)
    leader.put(40)
    leader.bench.run()
    log.set_bound(log.next_offset)
    assert heard == []
    log.on_mended(damage)
    assert heard == [True]
    assert log.damage == ()
    assert log.read(damage.offset, 10_000).size_bytes


def test_a_range_that_is_lost_everywhere_is_waited_for_no_longer() -> None:
    """The damage is the answer then."""
    leader = Leader()
    log, damage = leader.log, leader.damage()
    log.on_damage(damage)
    heard = waits(log, damage.offset)
    log.on_lost(damage)
    assert heard == [True]
    assert not log.is_mendable(damage.offset)


def test_a_range_that_was_lost_and_mended_is_waited_for_when_it_is_damaged_again() -> (
    None
):
    """That no replica had it was true of the time before."""
    leader = Leader()
    log, damage = leader.log, leader.damage()
    log.on_damage(damage)
    log.on_lost(damage)
    log.on_mended(damage)
    log.on_damage(damage)
    assert log.is_mendable(damage.offset)


def test_damage_that_retention_takes_is_damage_no_longer() -> None:
    """Its segment is gone, and with it what was wrong."""
    leader = Leader()
    log = leader.log
    log.on_damage(leader.damage(0))
    log.roll(log.next_offset)
    leader.bench.run()
    leader.put(40)
    leader.bench.run()
    log.set_bound(log.next_offset)
    assert len(log.segments) == 2
    log.on_removed(log.segments.first, 6)
    assert log.damage == ()
