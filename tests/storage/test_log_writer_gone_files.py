"""Files that lose their names under a running broker: noticed within a second."""

from collections.abc import Callable
from pathlib import Path

import pytest

from metaq.config.settings import BrokerConfig, LimitsConfig, SystemConfig, TopicConfig
from metaq.errors import LogDirOfflineError, MayBeStoredError
from metaq.fs import LOCK_FILE
from metaq.storage.log_writer import PLACE_CHECK_S
from metaq.testing.clock import ManualClock
from tests.rigs.fs import FaultyFileSystem
from tests.rigs.storage import StorageBench, Ticket
from tests.storage.support import DATA, LOG, OTHER, log_of

SEGMENT = DATA / "test-0" / f"{0:020}.meta"


def unlink(fs: FaultyFileSystem) -> None:
    fs.unlink(SEGMENT)


def replace(fs: FaultyFileSystem) -> None:
    fs.write_atomically(SEGMENT, b"another file")


def move_partition(fs: FaultyFileSystem) -> None:
    fs.rename(DATA / "test-0", DATA / "aside")


def move_data_directory(fs: FaultyFileSystem) -> None:
    fs.rename(DATA, Path("/aside"))


def mount_over(fs: FaultyFileSystem) -> None:
    """Mount another disk, as seen from here: the same path, another directory."""
    move_data_directory(fs)
    fs.make_directory(DATA)


def unlock(fs: FaultyFileSystem) -> None:
    fs.unlink(DATA / LOCK_FILE)


def put(bench: StorageBench) -> Ticket:
    ticket = Ticket()
    bench.append(log_of(bench), [b"x"], ticket)
    bench.run()
    return ticket


@pytest.mark.parametrize("threshold", [0, 1000])
@pytest.mark.parametrize(
    "remove",
    [unlink, replace, move_partition, move_data_directory, mount_over, unlock],
)
def test_what_cannot_be_found_again_is_acknowledged_for_a_second_at_most(
    fs: FaultyFileSystem,
    remove: Callable[[FaultyFileSystem], None],
    threshold: int,
) -> None:
    """The directory goes offline, and every waiter fails with the cause."""
    clock = ManualClock()
    settings = BrokerConfig(
        system=SystemConfig(data_path=str(DATA)),
        limits=LimitsConfig(free_bytes_min=0),
        topics={"test": TopicConfig(name="test", data_path=str(DATA),
                                    unflush_threshold=threshold)},
    )  # fmt: skip
    bench = StorageBench(fs, settings, clock)
    bench.open()
    assert put(bench).is_stored
    remove(fs)
    clock.advance_s(PLACE_CHECK_S)
    refused = put(bench)
    if remove is unlock:
        # The bytes are where they belong; it is the next put that another broker's
        # could be mixed with.
        assert refused.is_stored
    else:
        assert isinstance(refused.error, MayBeStoredError)
        assert "gone from its name" in str(refused.error)
        assert str(SEGMENT) in str(refused.error)
    with pytest.raises(LogDirOfflineError, match="gone"):
        put(bench)
    bench.close()
    assert fs.open_paths() == []


def test_the_name_is_looked_for_once_a_second(fs: FaultyFileSystem) -> None:
    """Not with every group, and for each log that is written."""
    clock = ManualClock()
    settings = BrokerConfig(
        system=SystemConfig(data_path=str(DATA)), limits=LimitsConfig(free_bytes_min=0)
    )
    bench = StorageBench(fs, settings, clock)
    bench.open()
    for _ in range(100):
        for log_id in (LOG, OTHER):
            bench.append(log_of(bench, log_id), [b"x"], Ticket())
        bench.run()
        clock.advance_s(0.02)
    looked = [call.path for call in fs.log if call.name == "stat"]
    for name in ("test-0", "test-1"):
        # The size when it was made; then the open file, and what has its name.
        assert looked.count(DATA / name / f"{0:020}.meta") == 1 + 2
    bench.close()
