"""Whole data directories that are missing or hold less: the start is refused."""

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from metaq.config.settings import BrokerConfig, LimitsConfig, SystemConfig, TopicConfig
from metaq.errors import DataMissingError, StorageError
from metaq.model import LogId, Millis
from metaq.storage.holdings import HOLDINGS_FILE, Claim, Holdings
from metaq.storage.inventory import read_holdings, write_holdings
from tests.rigs.fs import FaultyFileSystem, keep_none
from tests.rigs.storage import StorageBench
from tests.storage.support import DATA, LOG, OTHER, content_of, log_of, opened
from tests.storage.test_holdings import AWAY, RECORD, filled, put

SECOND = Path("/second")


def two(fs: FaultyFileSystem) -> StorageBench:
    """Return logs in two data directories, opened."""
    topic = TopicConfig(name="second", data_path=str(SECOND))
    settings = BrokerConfig(
        system=SystemConfig(data_path=str(DATA)),
        limits=LimitsConfig(free_bytes_min=0),
        topics={"second": topic},
    )
    bench = StorageBench(fs, settings)
    bench.open()
    return bench


def in_both(fs: FaultyFileSystem) -> None:
    bench = two(fs)
    for number in range(3):
        put(bench, LogId("second", number))
    put(bench, LOG)
    bench.close()


def move(fs: FaultyFileSystem) -> None:
    fs.rename(SECOND, AWAY)


def unmount(fs: FaultyFileSystem) -> None:
    """The mount point is there, and empty."""
    move(fs)
    fs.make_directory(SECOND)


def mount_another(fs: FaultyFileSystem) -> None:
    unmount(fs)
    write_holdings(fs, SECOND, replace(RECORD, siblings={}, partitions={}))


def empty(fs: FaultyFileSystem) -> None:
    for number in range(3):
        fs.rename(SECOND / f"second-{number}", Path(f"/second-{number}"))


@pytest.mark.parametrize("away", [move, unmount, mount_another, empty])
def test_a_data_directory_that_is_gone_refuses_the_start(
    fs: FaultyFileSystem, away: Callable[[FaultyFileSystem], None]
) -> None:
    """Its sibling knows what it was; nothing is recovered and nothing stays open."""
    in_both(fs)
    away(fs)
    for _ in range(2):
        with pytest.raises(DataMissingError) as refused:
            two(fs)
        text = str(refused.value)
        assert f"directory={SECOND} expected" in text
        assert "3 partitions" in text
        assert "'metaq accept-loss /second' once" in text
        assert fs.open_paths() == []
    write_holdings(
        fs,
        SECOND,
        replace(
            read_holdings(fs, SECOND) or Holdings(identity="", written_ms=Millis(0)),
            is_accepted=True,
        ),
    )
    two(fs).close()
    two(fs).close()


def test_a_directory_that_lost_its_record_is_known_by_what_it_holds(
    fs: FaultyFileSystem,
) -> None:
    """Deleting the record costs knowledge and no start."""
    in_both(fs)
    fs.unlink(SECOND / HOLDINGS_FILE)
    two(fs).close()
    one, other = read_holdings(fs, DATA), read_holdings(fs, SECOND)
    assert one is not None
    assert other is not None
    assert one.siblings == {str(SECOND): Claim(other.identity, 3)}
    assert other.siblings == {str(DATA): Claim(one.identity, 1)}


def test_a_directory_that_is_not_configured_any_more_is_named(
    fs: FaultyFileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    """Its partitions are not served, which may be meant."""
    in_both(fs)
    opened(fs).close()
    text = "not configured any more: directory=/second partitions=3"
    assert caplog.text.count(text) == 1
    opened(fs).close()
    assert caplog.text.count(text) == 1


def test_claims_of_zookeeper_are_compared_with_every_directory(
    fs: FaultyFileSystem,
) -> None:
    """One that holds less is named with the witness; unknown paths are passed over."""
    in_both(fs)
    bench = two(fs)

    def check(**claimed: int) -> None:
        claims = {f"/{path}": ("4be1", count) for path, count in claimed.items()}
        bench.manager.check_claims("zookeeper /meta/x", claims)

    check(second=3, data=1, elsewhere=9)
    check(second=2)
    with pytest.raises(DataMissingError, match=r"directory=/second .*4 partitions"):
        check(second=4)
    with pytest.raises(DataMissingError, match=r"zookeeper /meta/x"):
        check(data=2, second=3)
    bench.close()


# -- forgetting -----------------------------------------------------------------------


def test_a_log_that_is_forgotten_may_be_moved(fs: FaultyFileSystem) -> None:
    """The record goes with it: no start misses it, and a put makes a new one."""
    filled(fs)
    bench = opened(fs)
    reported: list[Exception | None] = []
    bench.manager.forget([LOG], reported.append)
    with pytest.raises(StorageError, match="no log to forget"):
        bench.manager.forget([LOG], reported.append)
    assert reported == []
    bench.run()
    assert reported == [None]
    fs.rename(DATA / "test-0", AWAY)
    (directory,) = bench.manager.directories()
    assert directory.size_bytes == 120
    killed = opened(fs.crash(keep_none))
    assert killed.manager.logs().keys() == {OTHER}
    killed.close()
    put(bench)
    bench.close()
    bench = opened(fs)
    assert len(content_of(log_of(bench))) == 120
    bench.close()
    assert fs.open_paths() == []


@pytest.mark.slow
def test_forgetting_on_a_disk_that_fails_says_so(fs: FaultyFileSystem) -> None:
    """For every call: it is reported once, nothing stays open, and a start goes on."""
    filled(fs)

    def forget(disk: FaultyFileSystem, failing: int | None) -> int:
        bench = opened(disk)
        before = disk.calls
        if failing is not None:
            disk.fail_at(before + failing, errno.EIO)
        reported: list[Exception | None] = []
        bench.manager.forget([LOG], reported.append)
        bench.run()
        assert len(reported) == 1
        assert (reported[0] is None) or failing is not None
        calls = disk.calls - before
        bench.close()
        assert disk.open_paths() == []
        opened(disk.crash(keep_none)).close()
        return calls

    count = forget(fs.snapshot(), None)
    assert count > 5
    for number in range(1, count + 1):
        forget(fs.snapshot(), number)
