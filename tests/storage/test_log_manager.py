"""All logs of a broker: start, stop, the real thread."""

import asyncio
import errno
from dataclasses import replace
from pathlib import Path

import pytest

from metaq.clock import SystemClock
from metaq.config.settings import BrokerConfig, LimitsConfig, SystemConfig, TopicConfig
from metaq.errors import ClosedError, MayBeStoredError, StorageError
from metaq.fs import SystemFileSystem
from metaq.model import LogId, MessageId, Offset
from metaq.record.layout import encode_record
from metaq.record.scan import CleanEnd, scan_records
from metaq.storage.log_manager import LogManager
from metaq.storage.log_state import LogState
from metaq.storage.span_index import read_index
from metaq.testing.clock import ManualClock
from tests.rigs.fs import FaultyFileSystem, Operation, keep_all
from tests.rigs.storage import StorageBench, Ticket
from tests.storage.support import DATA, LOG, OTHER, config, content_of, log_of, opened

# -- start


def test_a_log_is_made_by_its_first_put(fs: FaultyFileSystem) -> None:
    """Until then there is nothing on disk; afterwards it is cached."""
    bench = opened(fs)
    assert bench.manager.get(LOG) is None
    log = log_of(bench)
    assert log_of(bench) is log
    assert bench.manager.get(LOG) is log
    bench.run()
    assert not fs.exists(DATA / "test-0")
    bench.append(log, [b"x"], Ticket())
    bench.run()
    assert fs.exists(DATA / "test-0" / "00000000000000000000.meta")
    bench.close()


def test_every_partition_directory_is_loaded_and_nothing_else(
    fs: FaultyFileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    """In any order, configured or not; strangers are skipped, odd ones named."""
    bench = opened(fs)
    for topic in ("a", "b-c", "zz"):
        for partition in range(4):
            log = log_of(bench, LogId(topic, partition))
            bench.append(log, [topic.encode()], Ticket())
    bench.run()
    bench.close()
    for name in ("transactions", "test-x", "lost+found"):
        fs.make_directory(DATA / name)
    fs.open_append(DATA / "file-1", create=True).close()
    again = opened(fs)
    assert set(again.manager.logs()) == {
        LogId(topic, partition)
        for topic in ("a", "b-c", "zz")
        for partition in range(4)
    }
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "directory skipped, no partition: directory=/data/test-x"
    ]
    again.close()


def test_the_last_message_id_is_the_largest_of_all_logs(fs: FaultyFileSystem) -> None:
    """Ids go on after it; with nothing stored there is no floor."""
    bench = opened(fs, segment_bytes_max=21)
    assert bench.manager.last_message_id() < 0
    for log_id, number in ((LOG, 500), (OTHER, 700), (LOG, 600)):
        bench.next_id = number
        bench.append(log_of(bench, log_id), [b"x"], Ticket())
        bench.run()
    bench.close()
    again = opened(fs)
    assert again.manager.last_message_id() == 700
    again.close()


def test_an_empty_partition_directory_is_a_new_log(fs: FaultyFileSystem) -> None:
    """A crash between directory and first segment leaves nothing to repair."""
    bench = opened(fs)
    fs.make_directory(DATA / "test-0")
    bench.close()
    again = opened(fs)
    log = again.manager.get(LOG)
    assert log is not None
    assert log.next_offset == 0
    ticket = Ticket()
    again.append(log, [b"x"], ticket)
    again.run()
    assert ticket.is_stored
    again.close()


def test_a_damaged_log_is_stopped_and_the_others_go_on(fs: FaultyFileSystem) -> None:
    """A flipped bit in synced bytes stops that partition at start."""
    bench = opened(fs)
    for log_id in (LOG, OTHER):
        bench.append(log_of(bench, log_id), [b"x" * 50] * 3, Ticket())
        bench.run()
        bench.append(log_of(bench, log_id), [b"x" * 5000], Ticket())
        bench.run()
    bench.close()
    fs.flip_bit(DATA / "test-0" / "00000000000000000000.meta", 8 * 100)
    again = opened(fs)
    assert log_of(again, LOG).state is LogState.STOPPED
    with pytest.raises(StorageError, match="next_good_offset=140"):
        again.append(log_of(again, LOG), [b"x"], Ticket())
    assert log_of(again, LOG).read(Offset(0), 4096).size_bytes == 70
    assert log_of(again, LOG).read(Offset(140), 70).size_bytes == 70
    assert log_of(again, OTHER).state is LogState.OPEN
    again.close()


def test_a_partition_with_a_misnamed_segment_is_refused_as_a_whole(
    fs: FaultyFileSystem,
) -> None:
    """The log is there, stopped, and says why; nothing in it is touched."""
    bench = opened(fs)
    bench.append(log_of(bench), [b"x"], Ticket())
    bench.run()
    bench.close()
    fs.open_append(DATA / "test-0" / "abc.meta", create=True).close()
    again = opened(fs)
    with pytest.raises(StorageError, match=r"abc\.meta"):
        again.append(log_of(again), [b"x"], Ticket())
    again.close()


def test_one_partition_in_two_data_directories_is_refused(
    fs: FaultyFileSystem,
) -> None:
    """The right one is unknown; the start fails and leaves nothing open."""
    bench = opened(fs)
    bench.append(log_of(bench), [b"x"], Ticket())
    bench.run()
    bench.close()
    fs.make_directory(Path("/other"))
    fs.make_directory(Path("/other/test-0"))
    topic = TopicConfig(name="test", data_path="/other")
    settings = BrokerConfig(
        system=SystemConfig(data_path="/data"), topics={"test": topic}
    )
    with pytest.raises(StorageError, match="two data directories"):
        StorageBench(fs, settings).open()
    assert fs.open_paths() == []


def test_a_data_directory_may_be_spelled_with_a_slash_behind_it(
    fs: FaultyFileSystem,
) -> None:
    """A topic's path is compared as a path: it is not taken for another one."""
    topic = TopicConfig(name="test", data_path=f"{DATA}/")
    bench = StorageBench(fs, replace(config(), topics={"test": topic}))
    bench.open()
    ticket = Ticket()
    bench.append(log_of(bench), [b"x"], ticket)
    bench.run()
    assert ticket.is_stored
    bench.close()


@pytest.mark.slow
def test_a_failed_start_leaves_nothing_open(fs: FaultyFileSystem) -> None:
    """Whichever call fails, the next start finds the directory unlocked."""
    bench = opened(fs, segment_bytes_max=50)
    for log_id in (LOG, OTHER):
        for _ in range(3):
            bench.append(log_of(bench, log_id), [b"x" * 20], Ticket())
            bench.run()
    bench.close()
    trial = fs.snapshot()
    opened(trial).close()
    failed = 0
    for number in range(1, trial.calls + 1):
        disk = fs.snapshot()
        disk.fail_at(number, errno.EIO)
        try:
            opened(disk).close()
        except StorageError:
            failed += 1
        assert disk.open_paths() == []
    assert failed > 20


def test_a_data_path_that_is_new_since_the_start_is_refused(
    fs: FaultyFileSystem,
) -> None:
    """The message says that a restart is needed."""
    bench = opened(fs)
    with pytest.raises(StorageError, match="restart"):
        bench.manager.get_or_create(LOG, TopicConfig(name="test", data_path="/new"))
    bench.close()


def test_a_log_stays_where_it_is_when_its_data_path_changes(
    fs: FaultyFileSystem,
) -> None:
    """Only new logs go to a new data path."""
    bench = opened(fs)
    log = log_of(bench)
    moved = TopicConfig(name="test", data_path="/new")
    assert bench.manager.get_or_create(LOG, moved) is log
    bench.close()


def test_a_full_disk_keeps_no_broker_from_starting(fs: FaultyFileSystem) -> None:
    """Stored messages are served, and retention can make room."""
    bench = opened(fs)
    stored = bench.append(log_of(bench), [b"x"], Ticket())
    bench.run()
    bench.close()
    fs.set_capacity(0)
    bench = opened(fs)
    assert content_of(log_of(bench)) == stored
    bench.close()


# -- stop


def test_closing_answers_everything_and_unlocks(fs: FaultyFileSystem) -> None:
    """Requests in flight are stored; the callback comes last, once."""
    bench = opened(fs)
    order: list[str] = []
    ticket = Ticket()
    bench.append(log_of(bench), [b"x"], ticket)

    def closed() -> None:
        order.append(f"closed, stored={ticket.is_stored}, open={fs.open_paths()}")

    bench.manager.close(closed)
    bench.run()
    assert order == ["closed, stored=True, open=[]"]
    with pytest.raises(ClosedError):
        log_of(bench, OTHER)


def test_closing_what_was_never_opened_calls_back(fs: FaultyFileSystem) -> None:
    """A start that failed can be stopped."""
    bench = StorageBench(fs, config())
    order: list[str] = []
    bench.manager.close(lambda: order.append("closed"))
    bench.run()
    assert order == ["closed"]


def test_a_disk_error_while_closing_fails_what_it_concerns(
    fs: FaultyFileSystem,
) -> None:
    """The append in flight fails with the cause, and the stop goes on to its end."""
    bench = opened(fs)
    ticket = Ticket()
    order: list[str] = []
    bench.append(log_of(bench), [b"x"], ticket)
    bench.manager.close(lambda: order.append("closed"))
    fs.fail_at(fs.calls + 1, errno.EIO)
    bench.run()
    assert isinstance(ticket.error, MayBeStoredError)
    assert "error=EIO" in str(ticket.error)
    assert order == ["closed"]
    assert fs.open_paths() == []


def test_a_stop_does_not_wait_for_the_side_files_of_thousands_of_logs(
    fs: FaultyFileSystem,
) -> None:
    """Syncs end in time; what no power cut takes is whole all the same."""
    clock = ManualClock()
    bench = StorageBench(fs, config(), clock)
    bench.open()
    settings = bench.config.topic("many")
    logs = [
        bench.manager.get_or_create(LogId("many", number), settings)
        for number in range(100)
    ]
    for log in logs:
        bench.append(log, [b"x" * 80], Ticket())
    bench.run()
    synced: list[Path] = []

    def take_time(operation: Operation) -> None:
        if operation.name == "sync" and operation.path.parent != DATA:
            synced.append(operation.path)
            clock.advance_s(0.1)

    fs.on_call(take_time)
    bench.close()
    fs.on_call(None)
    assert len(synced) == 10
    assert fs.open_paths() == []
    for log in logs:
        index = read_index(fs, log.segments.active.path, Offset(0))
        assert index is not None
        assert index.end_offset == log.high_watermark


def test_abandoning_fails_what_a_hanging_disk_never_answered(
    fs: FaultyFileSystem,
) -> None:
    """When the bound of the stop is over every ticket has its answer."""
    bench = opened(fs)
    ticket = Ticket()
    bench.append(log_of(bench), [b"x"], ticket)
    bench.manager.close(lambda: None)
    bench.manager.abandon()
    assert ticket.error is not None
    assert "outcome unknown" in str(ticket.error)
    bench.run()
    assert log_of(bench).state is LogState.CLOSED


def test_a_restart_after_a_kill_finds_everything(fs: FaultyFileSystem) -> None:
    """Without any close the next start has every acknowledged byte."""
    bench = opened(fs)
    data = bench.append(log_of(bench), [b"x", b"y"], Ticket())
    bench.run()
    again = opened(fs.crash(keep_all))
    assert content_of(log_of(again)) == data
    again.close()
    bench.close()


# -- the real thing


async def put_many(manager: LogManager, settings: BrokerConfig, count: int) -> None:
    left = count
    done = asyncio.get_running_loop().create_future()

    class Ticket:
        def on_stored(self) -> None:
            nonlocal left
            left -= 1
            if not left:
                done.set_result(None)

        def on_failed(self, error: StorageError) -> None:
            done.set_exception(error)

    for number in range(count):
        log_id = LogId("test", number % 4)
        log = manager.get_or_create(log_id, settings.topic("test"))
        record = encode_record(b"%d" % number, id=MessageId(number + 1))
        log.append(
            [record],
            size_bytes=len(record),
            record_count=1,
            last_id=MessageId(number + 1),
            ticket=Ticket(),
        )
        if number % 100 == 99:
            await asyncio.sleep(0)
    await done


async def life(settings: BrokerConfig, count: int) -> int:
    """Open, put `count` records, close; return how many syncs that took."""
    loop = asyncio.get_running_loop()
    manager = LogManager(
        SystemFileSystem(), SystemClock(), loop.call_soon_threadsafe, settings
    )
    await loop.run_in_executor(None, manager.open)
    await put_many(manager, settings, count)
    syncs = sum(log.statistics().sync_count for log in manager.logs().values())
    closed = loop.create_future()
    manager.close(lambda: closed.set_result(None))
    await asyncio.wait_for(closed, 30)
    return syncs


def test_a_real_disk_a_real_thread_and_a_real_loop(data_dir: Path) -> None:
    """1,000 interleaved puts over four logs: in order, grouped, whole, twice."""
    settings = BrokerConfig(
        system=SystemConfig(data_path=str(data_dir), segment_bytes_max=5_000),
        limits=LimitsConfig(free_bytes_min=0),
    )
    for _ in range(2):
        syncs = asyncio.run(life(settings, 1_000))
        assert syncs < 500, "puts are grouped"
    for partition in range(4):
        directory = data_dir / f"test-{partition}"
        files = sorted(directory.glob("*.meta"))
        assert len(files) > 2
        data = b"".join(file.read_bytes() for file in files)
        result = scan_records(data)
        assert isinstance(result, CleanEnd)
        assert result.record_count == 500
        numbers = [b"%d" % n for n in range(partition, 1_000, 4)] * 2
        position = 0
        for number in numbers:
            assert data[position + 20 : position + 20 + len(number)] == number
            position += 20 + len(number)
