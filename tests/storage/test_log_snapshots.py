"""Snapshots of the logs for the scrub and for retention."""

from pathlib import Path

from metaq.model import LogId, Offset
from metaq.storage.log_snapshots import ScrubbedLogs, take_directory_snapshot
from metaq.storage.log_state import LogState
from metaq.storage.segment import Damage
from tests.rigs.fs import FaultyFileSystem
from tests.rigs.storage import Ticket
from tests.storage.support import LOG, OTHER, log_of, opened


def test_the_scrub_gets_what_is_durable_and_stops_what_is_damaged(
    fs: FaultyFileSystem,
) -> None:
    """Sealed segments whole, the active one up to the high watermark; a stopped log is
    read on and not written to; damage in a log that is gone is left alone.
    """
    bench = opened(fs, segment_bytes_max=50)
    for _ in range(2):
        bench.append(log_of(bench), [b"x" * 40], Ticket())
        bench.run()
    bench.append(log_of(bench, OTHER), [b"x"], Ticket())
    bench.run()
    bench.append(log_of(bench, OTHER), [b"in flight"], Ticket())
    source = ScrubbedLogs(bench.manager.logs())
    assert source.sizes() == {LOG: 120, OTHER: 21}
    assert [
        (t.log_id, t.segment.base_offset, t.segment.size_bytes, t.is_sealed)
        for log_id in (LOG, OTHER)
        for t in source.targets(log_id)
    ] == [(LOG, 0, 60, True), (LOG, 60, 60, True), (OTHER, 0, 21, False)]
    damage = Damage(Path("x"), Offset(0), Offset(60), "rot")
    bench.manager.on_damage(LOG, damage)
    bench.manager.on_damage(LogId("gone", 0), damage)
    assert log_of(bench).state is LogState.STOPPED
    assert source.sizes() == {LOG: 120, OTHER: 21}
    first, second = source.targets(LOG)
    assert (first.is_first, second.is_first) == (True, False)
    assert (first.is_sealed, first.may_write) == (True, False)
    assert source.targets(LogId("gone", 0)) == ()
    bench.close()
    bench.manager.on_damage(LOG, damage)


def test_of_a_log_of_the_broker_itself_goes_what_its_owner_does_not_need(
    fs: FaultyFileSystem,
) -> None:
    """By no age and no size, and nothing before the owner has said so.

    A copy of it in a set goes by what its leader has.
    """
    own = LogId("__queues", 0)
    bench = opened(fs, segment_bytes_max=50)
    for _ in range(4):
        bench.append(log_of(bench, own), [b"x" * 40], Ticket())
        bench.run()
    log = log_of(bench, own)

    def going() -> list[int]:
        (directory,) = bench.manager.directories()
        found = take_directory_snapshot(directory, [log], bench.config, [])
        ((snapshot,),) = [found.logs]
        assert snapshot.policy.age_ms < 0
        return [each.base_offset for each in snapshot.sealed]

    assert going() == []
    log.trim_offset = Offset(130)
    assert going() == [0, 60]
    bench.run()
    log.follow()
    log.leader_start = Offset(60)
    assert going() == [0]
    bench.close()
