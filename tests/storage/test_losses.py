"""A start of a replica finds that bytes are missing: it is not complete then."""

import errno
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from metaq.config.settings import TopicConfig
from metaq.errors import StorageError
from metaq.model import LogId, Millis, Offset, SizeBytes
from metaq.storage.inventory import read_holdings, write_holdings
from metaq.storage.log_state import LogState
from metaq.storage.segment import segment_file_name
from metaq.storage.set_aside import set_aside
from metaq.storage.watermarks import WATERMARKS_NAME
from tests.rigs.fs import FaultyFileSystem
from tests.rigs.storage import StorageBench
from tests.storage.support import DATA, LOG, OTHER, RECORD, config, put
from tests.storage.test_holdings import accept
from tests.storage.test_log_removal import NUMBERS, filled, log_of

SEGMENT = DATA / "test-0" / segment_file_name(Offset(0))


def started(
    fs: FaultyFileSystem,
    numbers: Mapping[LogId, int] | None = NUMBERS,
    buried: Collection[LogId] = (),
) -> StorageBench:
    bench = StorageBench(fs, config())
    bench.manager.open(numbers=numbers, buried=buried)
    return bench


def lacks_bytes(
    fs: FaultyFileSystem,
    numbers: Mapping[LogId, int] | None = NUMBERS,
    buried: Collection[LogId] = (),
) -> bool:
    bench = started(fs, numbers, buried)
    found = bench.manager.lacks_bytes
    bench.close()
    return found


def lose(fs: FaultyFileSystem) -> None:
    """Remove a partition as an operator might."""
    set_aside(fs, DATA, lambda log_id: log_id == LOG, Millis(0))


def test_a_replica_that_has_all_is_not_short(fs: FaultyFileSystem) -> None:
    """Nor is a broker without replicas, which has no numbers."""
    filled(fs).close()
    assert not lacks_bytes(fs)
    assert not lacks_bytes(fs, None)


def test_a_log_that_is_gone_makes_a_replica_short(fs: FaultyFileSystem) -> None:
    """By the record, and by its watermark where there is no record."""
    filled(fs).close()
    lose(fs)
    bare = fs.snapshot()
    bare.unlink(DATA / "holdings")
    assert lacks_bytes(bare)
    bare.unlink(DATA / WATERMARKS_NAME)
    bare.unlink(DATA / "holdings")
    assert not lacks_bytes(bare), "nothing says that it had a byte"
    assert lacks_bytes(fs)
    assert lacks_bytes(fs), "and so it is at the next start"


def test_a_log_that_began_again_after_its_bytes_is_not_missed(
    fs: FaultyFileSystem,
) -> None:
    """Its leader has none of them any more; no byte has come since."""
    bench = filled(fs)
    start = Offset(2 * RECORD)
    bench.manager.begin_again({LOG: (start, NUMBERS[LOG])}, lambda _error: None)
    bench.run()
    bench.close()
    for born, expected in ((start, False), (Offset(0), True)):
        bench = StorageBench(fs, config())
        bench.manager.open(numbers=NUMBERS, starts={LOG: born})
        assert bench.manager.lacks_bytes is expected
        assert log_of(bench).next_offset == born
        bench.close()


def test_a_loss_that_an_operator_accepts_makes_it_short_all_the_same(
    fs: FaultyFileSystem,
) -> None:
    """The others have those bytes: it is to get them again."""
    filled(fs).close()
    lose(fs)
    accept(fs)
    assert lacks_bytes(fs)


def test_a_log_that_ends_below_its_watermark_makes_it_short(
    fs: FaultyFileSystem,
) -> None:
    """Every in-sync copy has had those bytes."""
    filled(fs).close()
    file = fs.open_append(SEGMENT, create=False)
    file.truncate(SizeBytes(RECORD))
    file.close()
    fs.unlink(SEGMENT.with_suffix(".spans"))
    fs.unlink(DATA / "holdings")
    assert lacks_bytes(fs)


def test_damage_up_to_the_end_of_a_log_makes_it_short(fs: FaultyFileSystem) -> None:
    """The index knows of more bytes than the file has; nothing says how many more."""
    filled(fs).close()
    file = fs.open_append(SEGMENT, create=False)
    file.truncate(SizeBytes(RECORD + 1))
    file.close()
    fs.unlink(DATA / WATERMARKS_NAME)
    fs.unlink(DATA / "holdings")
    bench = started(fs)
    assert log_of(bench).state is LogState.STOPPED
    assert bench.manager.lacks_bytes
    bench.close()


def test_bytes_without_a_number_make_it_short(fs: FaultyFileSystem) -> None:
    """Their epochs are not known; but for a log that was deleted and not moved yet."""
    filled(fs).close()
    assert lacks_bytes(fs, {OTHER: 8})
    assert not lacks_bytes(fs, {OTHER: 8}, buried=[LOG])


def test_a_log_without_a_byte_begins_where_it_was_born(fs: FaultyFileSystem) -> None:
    """With its number; a directory that a crash left empty is no other log."""
    fs.make_directory(DATA)
    fs.make_directory(DATA / "test-0")
    starts = {LOG: Offset(7 * RECORD), OTHER: Offset(9 * RECORD)}
    for _ in range(2):
        bench = StorageBench(fs, config())
        bench.manager.open(numbers=NUMBERS, starts=starts)
        assert not bench.manager.lacks_bytes
        for log_id, start in starts.items():
            log = log_of(bench, log_id)
            assert (log.next_offset, log.number) == (start, NUMBERS[log_id])
            assert log.state is LogState.FOLLOWING
        bench.close()
    bench = StorageBench(fs, config())
    bench.manager.open(numbers=NUMBERS, starts=starts)
    log = log_of(bench)
    log.lead()
    put(bench, log)
    bench.run()
    bench.close()
    names = fs.list_directory(DATA / "test-0")
    assert segment_file_name(starts[LOG]) in names


# -- a torn tail


def tear(fs: FaultyFileSystem, log_id: LogId) -> None:
    path = DATA / str(log_id) / segment_file_name(Offset(0))
    file = fs.open_append(path, create=False)
    file.write(b"torn")
    file.close()


def test_a_torn_tail_is_reported_once_before_anything_is_cut(
    fs: FaultyFileSystem,
) -> None:
    """The replica may lack bytes that it promised, and has to remember that first."""
    filled(fs).close()
    for log_id in (LOG, OTHER):
        tear(fs, log_id)
    sizes: list[list[int]] = []

    def note() -> None:
        paths = [DATA / str(each) / SEGMENT.name for each in (LOG, OTHER)]
        sizes.append([fs.size_of(path) for path in paths])

    bench = StorageBench(fs, config())
    bench.manager.open(numbers=NUMBERS, on_torn_tail=note)
    assert sizes == [[3 * RECORD + 4, 3 * RECORD + 4]]
    assert fs.size_of(SEGMENT) == 3 * RECORD
    bench.close()
    bench = StorageBench(fs, config())
    bench.manager.open(numbers=NUMBERS, on_torn_tail=note)
    assert len(sizes) == 1, "nothing is torn any more"
    bench.close()


def test_a_torn_tail_that_cannot_be_noted_is_not_cut(fs: FaultyFileSystem) -> None:
    """The start fails, and the next one finds it again."""
    filled(fs).close()
    tear(fs, LOG)

    def fail() -> None:
        raise StorageError("the disk refuses")

    bench = StorageBench(fs, config())
    with pytest.raises(StorageError, match="the disk refuses"):
        bench.manager.open(numbers=NUMBERS, on_torn_tail=fail)
    assert fs.size_of(SEGMENT) == 3 * RECORD + 4
    assert fs.open_paths() == []


# -- version and identity of the directories


def test_a_version_is_kept_in_every_directory(fs: FaultyFileSystem) -> None:
    """Over starts and stops; identities stay."""
    bench = filled(fs)
    manager = bench.manager
    assert manager.holdings_version == 0
    assert b"version" not in fs.read_file(DATA / "holdings", SizeBytes(1 << 20))
    done: list[Exception | None] = []
    manager.set_holdings_version(7, done.append)
    bench.run()
    assert done == [None]
    identities = manager.identities()
    assert identities.keys() == {str(DATA)}
    killed = fs.crash()
    bench.close()
    for disk in (fs, killed, fs):
        bench = started(disk)
        assert bench.manager.holdings_version == 7
        assert bench.manager.identities() == identities
        bench.close()


def test_a_version_that_is_not_synced_is_reported(fs: FaultyFileSystem) -> None:
    """It must not be shown to others before."""
    bench = filled(fs)
    fs.fail_at(fs.calls + 3, errno.EIO)
    done: list[Exception | None] = []
    bench.manager.set_holdings_version(7, done.append)
    bench.run()
    assert isinstance(done[0], StorageError)
    bench.close()


TWO = Path("/data2")


def in_two(fs: FaultyFileSystem) -> StorageBench:
    """Return logs of a replica in two data directories, opened."""
    topics = {"two": TopicConfig(name="two", data_path=str(TWO))}
    bench = StorageBench(fs, replace(config(), topics=topics))
    bench.manager.open(numbers={})
    return bench


def test_of_two_directories_the_older_one_says_the_version(
    fs: FaultyFileSystem,
) -> None:
    """One that was restored from a backup, or has no record, is not proven."""
    bench = in_two(fs)
    bench.manager.set_holdings_version(7, lambda _error: None)
    bench.run()
    bench.close()
    bench = in_two(fs)
    assert bench.manager.holdings_version == 7
    bench.close()
    record = read_holdings(fs, TWO)
    assert record is not None
    write_holdings(fs, TWO, replace(record, version=5))
    bench = in_two(fs)
    assert bench.manager.holdings_version == 5
    bench.close()
    fs.unlink(TWO / "holdings")
    bench = in_two(fs)
    assert bench.manager.holdings_version == 0
    bench.close()


def test_a_replica_seals_what_it_found_sealed_or_has_given_a_version(
    fs: FaultyFileSystem,
) -> None:
    """Another life has not closed it, and this one may have begun with a backup."""
    bench = filled(fs)
    bench.manager.set_holdings_version(6, lambda _error: None)
    bench.run()
    bench.close()
    bench = started(fs)
    assert bench.manager.were_sealed
    bench.close()
    bench = started(fs)
    assert bench.manager.were_sealed
    killed = fs.crash()
    bench.close()
    for _ in range(2):
        bench = started(killed)
        assert not bench.manager.were_sealed
        bench.close()
    bench = started(killed)
    bench.manager.set_holdings_version(7, lambda _error: None)
    bench.run()
    bench.close()
    assert started(killed).manager.were_sealed


def test_one_directory_without_a_seal_is_as_none(fs: FaultyFileSystem) -> None:
    """One of two disks may have come from a backup."""
    bench = in_two(fs)
    bench.manager.set_holdings_version(7, lambda _error: None)
    bench.run()
    bench.close()
    record = read_holdings(fs, TWO)
    assert record is not None
    write_holdings(fs, TWO, replace(record, is_sealed=False))
    assert not in_two(fs).manager.were_sealed
